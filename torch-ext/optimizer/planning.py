"""From a parameter group to its plan: the bridge between tensors and the pure data of `plan`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from torch import Tensor

from . import validation
from .core import Matrices, read_as_matrices, row_counts_for, takes_part
from .distributed import agreement
from .distributed import utils as dtensors
from .distributed.plan import Entry, GroupPlan, plan_chunks
from .groups import has_component
from .options import GROUP_OPTIONS, STRUCTURE, OptimizerWide

Group = Mapping[str, Any]  # with all options, as `Muon._views` has them


def facts_of(group: Group) -> tuple:
    """All that a plan depends on, comparable, cheap enough for every step."""
    return (
        [(p.shape, p.dtype, p.layout, p.device, dtensors.layout_of(p)) for p in group["params"]],
        copy.copy(group["names"]),
        copy.deepcopy([group[key] for key in ("use_muon", "capturable", "foreach", *STRUCTURE)]),
    )


def plan_group(group: Group, where: str, chunk_size: int) -> GroupPlan:
    """The plan of a group.

    Raises:
        ValueError: wrong names or parameters, matrices that can't be read as asked for.
    """
    validation.check_params(group, where)
    params = group["params"]
    entries = [
        Entry(
            name=validation.name_of(group, index, where),
            matrices=matrices_of(group, index, where),
            region=dtensors.region_of(param),
            sharding=dtensors.layout_of(param) if dtensors.is_sharded(param) else None,
            dtype=param.dtype,
            device=dtensors.local(param).device,
        )
        for index, param in enumerate(params if group["use_muon"] else ())
    ]
    lines = [
        f"{validation.name_of(group, i, where)}: {tuple(p.shape)} {p.dtype} {dtensors.describe(p)}"
        for i, p in enumerate(params)
    ]
    return GroupPlan(facts_of(group), lines, entries, plan_chunks(entries, chunk_size))


def matrices_of(group: Group, index: int, where: str) -> Matrices:
    """How a parameter of a Muon group is read as matrices.

    Raises:
        ValueError: not a matrix; names missing where experts or name patterns need them.
    """
    shape, names = group["params"][index].shape, group["names"]
    expert_keys, split, flatten = (group[key] for key in STRUCTURE)
    needs_names: Optional[str] = None
    if isinstance(split, Mapping):
        needs_names = "a split by name patterns"
    elif expert_keys and len(shape) > 2:
        needs_names = "expert_keys"
    if names is None and needs_names:
        raise ValueError(
            f'{where}: {needs_names} needs names: give the group "names", one for each parameter'
        )
    name = names[index] if names is not None else None
    is_expert = len(shape) > 2 and name is not None and has_component(name, expert_keys)
    try:
        return read_as_matrices(shape, is_expert, flatten, row_counts_for(name, split))
    except ValueError as error:
        raise ValueError(f"{validation.name_of(group, index, where)} {error}") from None


def meshes_of(groups: Sequence[Group]) -> set[agreement.Ranks]:
    """The ranks of every mesh that a parameter lives on."""
    ranks = (dtensors.ranks_of(param) for group in groups for param in group["params"])
    return {r for r in ranks if r is not None}


def notes_of(
    ranks: agreement.Ranks,
    groups: Sequence[Group],
    plans: Sequence[GroupPlan],
    wide: OptimizerWide,
    error: Optional[Exception],
) -> agreement.Notes:
    """What the ranks of one mesh have to share; a rank whose checks failed only says so."""
    if error is not None:
        return agreement.Notes([], [], str(error))
    lines, gradients = [repr(wide)], []
    for group, plan in zip(groups, plans):
        here = [i for i, param in enumerate(group["params"]) if dtensors.ranks_of(param) == ranks]
        if not here:
            continue
        values = {key: group[key] for key in GROUP_OPTIONS}
        if isinstance(values["lr"], Tensor):  # its value stays on the device
            values["lr"] = "tensor"
        lines += [f"a group with {values}", *(plan.lines[index] for index in here)]
        gradients += [
            plan.entries[index].name
            for index in here
            if group["use_muon"]
            and plan.entries[index].sharded
            and takes_part(group["params"][index], group)
        ]
    return agreement.Notes(lines, gradients, None)
