"""Finds faults of groups and options before any step, with the traps of `describe`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ... import regions
from ...matrices import Matrices
from ...muon import Muon
from ...parameters.names import counted, matches, normalize_name, normalize_names
from ...rules.assignment import Assignment
from ...rules.decisions import decide
from ...rules.fused import fused_in, is_stored_transposed, split_patterns
from ...rules.modules import EXPERTS, Decision, expert_key, infos_of
from ..describe.remedy import Remedy, Trap
from ..describe.subject import Subject, names_of
from ..describe.table import collect_by
from ..describe.traps import find_warnings

# Kinds of advice that a caller may ignore on purpose: rates, and convolutions left to AdamW.
_ADVICE = ("lr", "convolutions")
_OF_RANKS = ("replicas", "flat")
_READ = ("expert_keys", "split", "flatten", "adjust_lr")
_ROUTERS = ("router", "gate", "wg")
# Names of stacks of experts that read the layer's input, and that make its output.
_UP, _DOWN = ("w1", "w3", "gate", "up", "gate_proj", "up_proj"), ("w2", "down", "down_proj")


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, without the name components that wrappers add."""
    params = dict(model.named_parameters())
    return dict(zip(normalize_names(params), params.values()))


def find_unmatched(
    model: nn.Module, optim: Muon, reference: nn.Module, frozen: Sequence[str]
) -> Iterator[Trap]:
    """Parameters missing from the optimizer, the sharded model or the unsharded model."""
    params, twins = named(model), named(reference)
    held = {id(p) for group in optim.param_groups for p in group["params"]}
    unknown = len(held - {id(p) for p in params.values()})
    if unknown:
        yield Trap(
            "replaced",
            f"groups made before sharding: they hold {unknown} of {len(held)} parameters that the "
            "model does not have",
            tuple(name for name, p in params.items() if id(p) not in held),
            "fully_shard, .to_empty() and others replace parameters; nothing trains the new ones",
            Remedy(wording="make groups and optimizer after sharding"),
        )
        return
    others = tuple(sorted(params.keys() ^ twins.keys()))
    if others:
        what = f"{counted(others, 'parameter')} only before or only after layout_fn"
        why = "parameters that it adds, ties or renames can't be compared: do that in model_fn"
        yield Trap("names", f"{what}: {others[0]}", others, why)
    shapes = {n: (tuple(p.shape), tuple(twins[n].shape)) for n, p in params.items() if n in twins}
    changed = [name for name, (found, right) in shapes.items() if found != right]
    if changed:
        found, right = shapes[changed[0]]
        kind = "a transposed stack or matrix" if {*found} == {*right} else "another shape"
        what = f"{kind}: {changed[0]} is {found} after layout_fn and {right} before"
        yield Trap("shape", what, tuple(changed), "Muon's matrices are those of the new shape")
    still = [n for n, p in params.items() if not (p.requires_grad and id(p) in held)]
    yield from find_frozen(still, len(params), frozen, "requires_grad=False, or in no group")


def find_frozen(names: Sequence[str], total: int, meant: Sequence[str], why: str) -> Iterator[Trap]:
    """Parameters that are neither trained nor listed as ``meant``."""
    patterns = {*meant, *map(normalize_name, meant)}
    names = [name for name in names if not any(matches(name, pattern) for pattern in patterns)]
    if names:
        what = f"frozen: nothing trains {len(names)} of {total} parameters"
        remedy = Remedy(wording="if on purpose: selfcheck(..., frozen=[…]), names or patterns")
        yield Trap("frozen", what, tuple(names), why, remedy)


def find_misread(model: nn.Module, optim: Muon, reference: nn.Module) -> Iterator[Trap]:
    """Parameters that the optimizer reads as matrices other than the model's, and the traps of
    `describe`: about replicas and flat parameters in the sharded model, and about all else in the
    unsharded model, whose modules still have their full sizes."""
    views = {id(p): view for view in optim._read_groups() for p in view.params}
    trained = {
        name: {key: getattr(views[id(p)], key) for key in ("use_muon", *_READ)}
        for name, p in named(model).items()
        if p.requires_grad and id(p) in views
    }
    sharded = _subject(model, trained, {"process_group": optim.process_group})
    yield from (trap for trap in find_warnings(sharded)[0] if trap.kind in _OF_RANKS)
    readings: list[dict[str, Any]] = []
    for each in trained.values():
        if each["use_muon"] and each not in readings:
            readings.append(each)
    # A pattern in one group may be meant for another group's matrices.
    ignored = (*_ADVICE, *_OF_RANKS, *(("expert_keys", "split") if len(readings) > 1 else ()))
    for reading in readings or [{}]:
        alike = {n: each for n, each in trained.items() if each == reading or not each["use_muon"]}
        given = {key: reading[key] for key in _READ if reading.get(key) is not None}
        subject = _subject(reference, alike, given)
        yield from _stacks(subject)
        yield from _splits(subject)
        yield from (trap for trap in find_warnings(subject)[0] if trap.kind not in ignored)


def _subject(model: nn.Module, trained: Mapping[str, Any], options: Mapping[str, Any]) -> Subject:
    """The trained parameters, with the algorithms of their groups instead of the default ones."""
    algorithms = {True: "Muon", False: "AdamW"}
    decisions = [
        dataclasses.replace(d, algorithm=algorithms[trained[d.name]["use_muon"]])
        for d in decide(model)
        if d.name in trained
    ]
    read = options.get("expert_keys"), options.get("split")
    return Subject(Assignment(model, infos_of(model), decisions, *read, []), None, options)


# Faults of stacks: kind, what is wrong, why it matters, and what to write.
_FAULTS = {
    "slab": (
        "experts",
        "experts not named: {} of experts trained as one matrix each",
        "all experts of a stack share singular values: idle experts get the others' updates",
        "expert_keys=[…] for (experts, rows, cols), or split= the number of rows of an expert",
    ),
    "order": (
        "transposed",
        "a transposed stack: {} whose first dimension does not count experts",
        "with expert_keys, leading dimensions count matrices",
        "store (experts, rows, cols)",
    ),
    "sides": (
        "transposed",
        "a transposed stack: {} stored (experts, in, out)",
        "adjust_lr scales by sqrt(rows/cols), which is inverted for them",
        'adjust_lr="match_rms_adamw"',
    ),
}


def _stacks(subject: Subject) -> Iterator[Trap]:
    """Stacks of experts read as one matrix, or with dimensions in the wrong order."""
    muons = subject.by_algorithm("Muon")
    for fault, decisions in collect_by(muons, lambda d: _fault(d, subject)).items():
        if fault is not None:
            kind, what, why, write = _FAULTS[fault]
            what = what.format(counted(decisions, "stack"))
            yield Trap(kind, what, names_of(decisions), why, Remedy(wording=write))


def _fault(decision: Decision, subject: Subject) -> Optional[str]:
    key = expert_key(subject.model, subject.info(decision), decision.param)
    count, width = _experts(decision, subject)
    if key is None or not _is_stack(decision, key, count):
        return None
    shape, matrices = tuple(decision.param.shape), subject.read(decision)
    if matrices.row_dim == 0 and all(block.rows == shape[0] for block in matrices.blocks):
        return "slab"
    if matrices.row_dim and count in shape and count not in shape[: matrices.row_dim]:
        return "order"
    is_upright = subject.options.get("adjust_lr") not in ("original", "spectral")
    if is_upright or is_stored_transposed(
        subject.info(decision), decision.param
    ):  # which `describe` warns about
        return None
    word = decision.name.removesuffix(".weight").split(".")[-1]
    inner, outer = shape[-1:-3:-1] if word in _UP else shape[-2:]
    is_turned = word in _UP + _DOWN and inner != width and outer == width
    return "sides" if is_turned else None


def _experts(decision: Decision, subject: Subject) -> tuple[Optional[int], Optional[int]]:
    """Number of experts in a stack, and width of their input, from the router or a config."""
    for module in subject.info(decision).above[:2]:
        for name, child in module.named_children():
            weight = getattr(child, "weight", None) if name in _ROUTERS else None
            if isinstance(weight, Tensor) and weight.ndim == 2:
                return weight.shape[0], weight.shape[1]
    return subject.look_up(decision, EXPERTS), None


def _is_stack(decision: Decision, key: str, count: Optional[int]) -> bool:
    """True if a tensor holds several experts, unlike ``experts.3`` or a shared expert."""
    components, shape = decision.name.split("."), decision.param.shape
    if len(shape) > 2:
        return True
    after = components[components.index(key) :]
    is_one = "shared" in key or "expert" not in key or any(c.isdigit() for c in after)
    return not is_one and count is not None and shape[0] > count and shape[0] % count == 0


def _splits(subject: Subject) -> Iterator[Trap]:
    """Splits of fused weights that don't cut between the matrices they hold."""
    wrong = []
    for decision in subject.by_algorithm("Muon"):
        if subject.assignment.split is None:
            return
        fused = fused_in(subject.model, subject.info(decision), decision.param)
        if fused is None or fused.split is None:
            continue
        actual = subject.read(decision)
        right = dataclasses.replace(subject.assignment, split={decision.name: fused.split})
        known = dataclasses.replace(subject, assignment=right).read(decision)
        is_whole = len(actual.blocks) * actual.count(actual.blocks[0]) == 1  # `describe` says so
        if not is_whole and _mixes(actual, known):
            wrong.append((decision, fused))
    if wrong:
        (first, fused), *_ = wrong
        splits = {decision.name: fused.split for decision, fused in wrong}
        patterns = split_patterns(splits, names_of(subject.by_algorithm("Muon")))
        yield Trap(
            "split",
            f"a wrong split: matrices of {first.name} mix rows of {fused.holds}",
            tuple(splits),
            "Muon orthogonalizes each matrix separately: it must lie within one of them",
            Remedy({"split": patterns}),
        )


def _mixes(actual: Matrices, known: Matrices) -> bool:
    """True if a matrix of one reading has elements from several matrices of the other."""
    matrices_of, number = torch.empty(known.shape, dtype=torch.int32), itertools.count()
    for block in known.blocks:
        view = _view(block, matrices_of)
        for matrix in itertools.product(*map(range, block.shape[: block.row_axis])):
            view[matrix] = next(number)
    for block in actual.blocks:
        numbers = _view(block, matrices_of).reshape(-1, block.rows * block.cols)
        if bool((numbers != numbers[:, :1]).any()):
            return True
    return False


def _view(block: Any, tensor: Tensor) -> Tensor:
    """A block's elements of a whole tensor: (matrices…, rows…, cols…)."""
    everything = regions.whole(tensor.shape)
    return block.local_part(regions.whole(block.shape), everything).of(tensor)
