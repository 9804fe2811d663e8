"""Surveys the parameter groups: the matrices, their sharding, and the ranks that share them.

Plans are made from a survey, which describes tensors as entries: pure data.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import torch
from torch import Tensor

from .. import regions, triton_kernels
from ..distributed import agreement, dtensors, hsdp
from ..distributed.plan import Entry, Plan, Planner
from ..distributed.wire import wire_of
from ..matrices import Matrices, read_as_matrices
from ..newton_schulz import recipe_for
from . import validation
from .names import has_component, matches
from .options import EXACT_DTYPES, STRUCTURE, Group, Settings, is_exact

# After a change to these options, or after ``beta2`` is turned on or off, the next step makes a new
# plan and checks state again.
_PLANNED = (
    *("use_muon", "capturable", "adjust_lr", "momentum_dtype", *STRUCTURE),
    "weight_rounding",
    *("ns_steps", "ns_coefficients", "ns_algorithm", "ns_dtype"),
    *("ns_norm_factor", "ns_equilibrate", "ns_renormalize", "second_moment_side"),
)


@dataclass
class Shared:
    """Everything that the ranks of one set share, except hyperparameters that no plan depends on.

    Args:
        lines: a description of each parameter.
        groups: maps the number of each group with such parameters to the name of its first
            parameter, since ranks may number groups differently, and to the options that a plan
            depends on.
    """

    lines: list[str] = field(default_factory=list)
    groups: dict[int, tuple[str, tuple]] = field(default_factory=dict)


@dataclass
class Survey:
    """The input of plans, valid until the groups change.

    Args:
        facts: for each group, everything that the survey depends on.
        names: for each group, what messages call its parameters.
        entries: for each group, its parameters as a plan sees them; None for AdamW's.
        shared: by ranks (of each parameter's mesh, and of the process group), what they share.
        planners: planners of the trainable entries, by ``streams_state``.
    """

    facts: list[tuple]
    names: list[list[str]]
    entries: list[list[Optional[Entry]]]
    shared: dict[agreement.Ranks, Shared] = field(default_factory=lambda: defaultdict(Shared))
    planners: dict[bool, Planner] = field(default_factory=dict)

    @property
    def all_entries(self) -> list[Entry]:
        return [entry for entries in self.entries for entry in entries if entry is not None]

    def structure(self, settings: Settings) -> dict[agreement.Ranks, Any]:
        """Returns what this rank shares with each set of ranks."""
        return {ranks: (shared, settings.streams_state) for ranks, shared in self.shared.items()}

    def plan(self, groups: Sequence[Group], settings: Settings) -> tuple[Plan, frozenset[int]]:
        """Returns the plan of a step, and the numbers of its entries without a gradient."""
        planner = self.planner(groups, settings)
        params = [(groups[e.group].params[e.index], groups[e.group]) for e in planner.entries]
        absent = frozenset(
            [n for n, (p, g) in enumerate(params) if p.grad is None and g.missing_grad != "zero"]
        )
        return planner.plan(absent), absent

    def planner(self, groups: Sequence[Group], settings: Settings) -> Planner:
        """Returns the planner for this survey's steps."""
        if settings.streams_state not in self.planners:
            trainable = [
                entry
                for entry in self.all_entries
                if groups[entry.group].params[entry.index].requires_grad
            ]
            self.planners[settings.streams_state] = Planner(
                trainable,
                dtensors.this_rank(),
                has_lanes=not settings.use_distributed_muon,
                chunk_size=settings.chunk_size,
                warmup_step=settings.warmup_step,
                streams_state=settings.streams_state,
                staging_bytes=settings.staging_bytes,
            )
        return self.planners[settings.streams_state]


NO_SURVEY = Survey([()], [], [])  # its facts differ from those of any groups


_planned_of = operator.attrgetter(*_PLANNED)


def _facts(group: Group) -> tuple:
    """Returns everything that a group's survey depends on, options last. Runs in every step."""
    options = (*_planned_of(group), group.beta2 is None)
    return dtensors.facts_of(group.params), group.names, options


def survey_groups(groups: Sequence[Group], settings: Settings, last: Survey) -> Survey:
    """Surveys all groups; returns the last survey if nothing has changed.

    Raises:
        ValueError: if names, parameters, or options on how to read matrices are invalid.
    """
    facts = [_facts(group) for group in groups]
    if facts == last.facts:
        return last
    facts = [(params, copy.copy(names), copy.deepcopy(opts)) for params, names, opts in facts]
    survey = Survey(facts, [], [])  # with copies, since lists may change in place
    seen: Counter[str] = Counter()  # two models in one optimizer may have the same names
    for number, group in enumerate(groups):
        names: list[str] = []
        entries: list[Optional[Entry]] = []
        for index, entry in enumerate(entries_of(group, number, settings)):
            param, name = group.params[index], group.name_of(index)
            if entry is not None:
                _check_shard(param, name)
            seen[name] += 1
            if seen[name] > 1:
                name = f"{name} ({seen[name]})"
            names.append(name)
            entries.append(None if entry is None else replace(entry, name=name))
            ranks = shared_with(param, settings)
            if ranks is not None:
                shared = survey.shared[ranks]
                shared.lines.append(_line(name, param, group, entry, settings))
                shared.groups.setdefault(number, (name, facts[number][-1]))
        survey.names.append(names)
        survey.entries.append(entries)
    entries_left = iter(hsdp.share_work(survey.all_entries, dtensors.this_rank(), settings.hsdp))
    survey.entries = [
        [None if entry is None else next(entries_left) for entry in entries]
        for entries in survey.entries
    ]
    return survey


def _line(
    name: str, param: Tensor, group: Group, entry: Optional[Entry], settings: Settings
) -> str:
    """Describes a parameter; the text must be the same on all ranks that share it."""
    line = f"{name}: {tuple(param.shape)} {param.dtype} {dtensors.describe(param)}"
    dtype = dtensors.grad_dtype(param)
    if dtype != param.dtype:
        line += f", gradients {dtype}"
    if entry is not None and group.ns_dtype is None and not settings.exact:  # depends on hardware
        line += f", ns_dtype=None means {entry.recipe.dtype} here"
    if entry is not None and entry.device.type in triton_kernels.DEVICE_TYPES and settings.triton:
        line += f", Triton is {'' if triton_kernels.is_installed() else 'not '}installed here"
    return line


def entries_of(group: Group, number: int, settings: Settings) -> list[Optional[Entry]]:
    """Checks a group's parameters; returns them as a plan sees them, with None for AdamW's.

    Raises:
        ValueError: if names, parameters, or options on how to read matrices are invalid.
    """
    validation.check_params(group, settings)
    if not group.use_muon:
        return [None] * len(group.params)
    if settings.exact and group.ns_dtype not in (None, *EXACT_DTYPES):
        raise ValueError(
            f"{group.where}: exact=True and ns_dtype={group.ns_dtype} contradict each other"
        )
    return [_entry(group, number, index, settings) for index in range(len(group.params))]


def _entry(group: Group, number: int, index: int, settings: Settings) -> Entry:
    param, moments_of_rows = group.params[index], group.second_moment_side == "rows"
    device = dtensors.compute_device(param)
    replicas = None if dtensors.is_dtensor(param) else settings.replicas
    dtype = group.ns_dtype
    if dtype is None and settings.exact:
        dtype = torch.promote_types(param.dtype, torch.float32)
    recipe = recipe_for(
        group.ns_coefficients,
        group.ns_steps,
        group.ns_algorithm,
        dtype,
        param.dtype,
        device,
        is_exact(group, settings),
        norm_factor=group.ns_norm_factor,
        equilibrate=group.ns_equilibrate,
        renormalize=group.ns_renormalize,
    )
    return Entry(
        name=group.name_of(index),
        group=number,
        index=index,
        matrices=replace(matrices_of(group, index), moments_of_rows=moments_of_rows),
        sharding=dtensors.sharding_of(param) if replicas is None else replicas.weights,
        dtype=param.dtype,
        device=device,
        wire=wire_of(recipe, settings.comm_dtype, settings.exact),
        recipe=recipe,
        second_moment=group.beta2 is not None,
        momentum_sharding=None if replicas is None else replicas.state,
        spread=replicas is not None,
        adjust_lr=group.adjust_lr,
    )


def _check_shard(param: Tensor, name: str) -> None:
    """Checks that this rank's shard of a DTensor has the shape that its placements imply.

    Only some ranks may see a mismatch, so a step checks it, which reports errors to all ranks.
    """
    sharding, rank = dtensors.sharding_of(param), dtensors.this_rank()
    if sharding is None or rank not in sharding.ranks:
        return
    expected, held = regions.shape_of(sharding.region(param.shape, rank)), dtensors.raw_local(param)
    if not regions.is_same_shape(held.shape, expected):
        raise ValueError(
            f"{name} is {dtensors.describe(param)}, so this rank's shard should have shape "
            f"{expected}, but it has {tuple(held.shape)}: cut shards as torch.chunk does"
        )


def matrices_of(group: Group, index: int) -> Matrices:
    """Returns how a parameter of a Muon group is read as matrices.

    Raises:
        ValueError: if it isn't a matrix, or if options need names and there are none.
    """
    shape, names = group.params[index].shape, group.names
    by_pattern = isinstance(group.split, Mapping)
    if names is None and (by_pattern or (group.expert_keys and len(shape) > 2)):
        what = "a split by name patterns" if by_pattern else "expert_keys"
        raise ValueError(
            f'{group.where}: {what} needs names: give the group "names", one for each parameter'
        )
    name = names[index] if names is not None else None
    try:
        return read_by_options(shape, name, group.expert_keys, group.split, group.flatten)
    except ValueError as error:
        raise ValueError(f"{group.name_of(index)} {error}") from None


def read_by_options(
    shape: Sequence[int],
    name: Optional[str],
    expert_keys: Optional[Sequence[str]],
    split: Any,
    flatten: bool,
) -> Matrices:
    """Reads a parameter as matrices, with a group's options.

    In a ``split`` by patterns, the first pattern that `matches` the name counts. Raises ValueError
    as `read_as_matrices` does.
    """
    is_expert = len(shape) > 2 and name is not None and has_component(name, expert_keys)
    if isinstance(split, Mapping):
        assert name is not None
        split = next((counts for pattern, counts in split.items() if matches(name, pattern)), None)
    return read_as_matrices(shape, is_expert, flatten, split)


def shared_with(param: Tensor, settings: Settings) -> Optional[agreement.Ranks]:
    """Returns the ranks that share a parameter: those of its mesh, or of the process group."""
    return dtensors.ranks_of(param) if dtensors.is_dtensor(param) else settings.replica_ranks


def has_replicas(params: Iterable[Tensor], settings: Settings) -> bool:
    """Returns True if another rank holds the same shard of any of these parameters."""
    rank, replicas = dtensors.this_rank(), settings.replica_ranks
    shardings = map(dtensors.sharding_of, params)
    return any(
        len(replicas or () if sharding is None else sharding.peers(rank, (), replicas=True)) > 1
        for sharding in shardings
    )


def sets_of(params: Iterable[Tensor], settings: Settings) -> set[agreement.Ranks]:
    """Returns the sets of ranks that share these parameters with this rank."""
    sets = {shared_with(param, settings) for param in params}
    return with_replicas({ranks for ranks in sets if ranks is not None}, settings)


def with_replicas(sets: set[agreement.Ranks], settings: Settings) -> set[agreement.Ranks]:
    """Adds the ranks of the process group, even if this rank has no replicated parameters."""
    replicas = settings.replica_ranks
    return sets if replicas is None else {*sets, replicas}
