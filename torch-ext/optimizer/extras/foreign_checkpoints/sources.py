"""Reads the state dicts of another optimizer, and checks that they have the given kind.

State dicts may be those of torch.optim, keyed by name, or one for each rank. This unpickles,
copies, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor

from ...state.checkpoints import MOTIFS_NAMES, OWN_KEY, step_count
from .hyperparameters import read_options
from .kinds import KINDS, kind_of

# Keys of tensors in the state of any source.
_MOMENTUM_KEYS = ("momentum_buffer", "second_momentum_buffer")
_TENSOR_KEYS = (*_MOMENTUM_KEYS, *MOTIFS_NAMES, *MOTIFS_NAMES.values())

State = Mapping[Any, Mapping[str, Any]]  # by the id of a parameter


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group of a checkpoint.

    Args:
        ids: its parameters' keys in the state.
        names: its parameters' names, if the checkpoint has them.
        options: its hyperparameters, under the keys of `Muon`, and other keys.
    """

    ids: Sequence[Any]
    names: Optional[Sequence[str]]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class SourceOptimizer:
    """What one optimizer saved: a state dict, or one for each rank that divides state.

    Args:
        use_muon: True if it has Muon's parameters, False for AdamW's, None for both.
        groups: its groups, in order, as in the first rank; other ranks have the same groups.
        states: the state of each rank, in order; parameters that were never stepped have none.
        wheres: names of the ranks' state dicts in messages.
    """

    use_muon: Optional[bool]
    groups: Sequence[SavedGroup]
    states: Sequence[State]
    wheres: Sequence[str]

    @property
    def where(self) -> str:
        """Its name in messages."""
        return self.wheres[0] if len(self.wheres) == 1 else "the state dicts of the ranks"

    def label(self, group: SavedGroup, index: int) -> str:
        """The name of a parameter in messages."""
        name = f" ({group.names[index]})" if group.names is not None else ""
        number = [other is group for other in self.groups].index(True)
        return f"parameter {index}{name} of group {number}"

    def param_states(self, group: SavedGroup, index: int) -> list[Mapping[str, Any]]:
        """The state of a parameter on each rank."""
        return [state.get(group.ids[index], {}) for state in self.states]

    @property
    def is_fresh(self) -> bool:
        """True if it was saved before the first step."""
        param_states = [each for state in self.states for each in state.values()]
        return not any(key != "use_muon" for each in param_states for key in each)


def read_sources(states: Any, kind: str) -> tuple[list[SourceOptimizer], list[bool]]:
    """Returns the optimizers in ``states``, and the values of ``use_muon`` for which it has None.

    Args:
        states: see `Muon.load_foreign_state_dict`.
        kind: one of `KINDS`.

    Raises:
        ValueError: it isn't a state dict, or has another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, found {kind!r}")
    if not (isinstance(states, Mapping) and states and states.keys() <= {"muon", "adamw"}):
        return [_read_source(states, "states", kind, True if kind == "torch_muon" else None)], []
    if kind not in ("torch_muon", "keller_jordan"):
        raise ValueError(
            f"kind={kind!r} has one state dict for Muon's and AdamW's parameters, found "
            f"{sorted(states)}"
        )
    sources = [
        _read_source(states[key], f"states[{key!r}]", kind, use_muon)
        for key, use_muon in (("muon", True), ("adamw", False))
        if states.get(key) is not None
    ]
    return sources, [key == "muon" for key, state_dict in states.items() if state_dict is None]


def _read_source(states: Any, where: str, kind: str, use_muon: Optional[bool]) -> SourceOptimizer:
    state_dicts, wheres = [states], [where]
    if isinstance(states, (list, tuple)):
        if kind not in ("nanochat", "keller_jordan") or not states:
            raise ValueError(f"{where} must be a state dict, found {_describe(states)}")
        state_dicts = list(states)
        wheres = [f"{where}[{rank}]" for rank in range(len(states))]
    ranks = [_read_state_dict(*each, kind, use_muon) for each in zip(state_dicts, wheres)]
    counts = [[len(group.ids) for group in groups] for groups, _ in ranks]
    for name, others in zip(wheres, counts):
        if others != counts[0]:
            raise ValueError(
                f"{name} has groups of {others} parameters but {wheres[0]} of {counts[0]}: pass "
                "the state dicts of all ranks of one checkpoint, in order"
            )
    groups = ranks[0][0]
    if kind == "keller_jordan" and not any("use_muon" in group.options for group in groups):
        use_muon = use_muon is not False  # a Muon without AdamW
    return SourceOptimizer(use_muon, groups, [state for _, state in ranks], wheres)


def _read_state_dict(
    state_dict: Any, where: str, kind: str, use_muon: Optional[bool]
) -> tuple[list[SavedGroup], State]:
    """Groups and state of a state dict from torch.optim, or keyed by name, as
    torch.distributed.checkpoint makes it.

    Raises:
        ValueError: it is neither, or has another kind.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"{where} must be an optimizer's state dict with 'state' and 'param_groups', found "
            f"{_describe(state_dict)}"
        )
    state, saved_groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping) or not all(isinstance(s, Mapping) for s in state.values()):
        raise ValueError(f"{where}['state'] must have a dict for each parameter")
    if not isinstance(saved_groups, (list, tuple)):
        raise ValueError(f"{where}['param_groups'] must be a list, found {_describe(saved_groups)}")
    groups = []
    for number, group in enumerate(saved_groups):
        where_group = f"{where}['param_groups'][{number}]"
        ids = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(ids, (list, tuple)) or not all(isinstance(i, (int, str)) for i in ids):
            raise ValueError(f"{where_group} has no list of params")
        _check_kind(group, where_group, kind, use_muon)
        groups.append(SavedGroup(list(ids), _names_of(group), read_options(group, where_group)))
    ids = [saved_id for group in groups for saved_id in group.ids]
    unique_ids = set(ids)
    if len(unique_ids) != len(ids):
        raise ValueError(f"{where} has a parameter in its groups twice")
    for saved_id, param_state in state.items():
        if saved_id not in unique_ids:
            raise ValueError(f"{where} has state for {saved_id!r}, which is in none of its groups")
        _check_state(param_state, f"parameter {saved_id!r} of {where}")
    return groups, state


def _check_state(param_state: Mapping[str, Any], name: str) -> None:
    """Checks the types of values that may be loaded."""
    for key in _TENSOR_KEYS:
        value = param_state.get(key)
        if value is None:
            continue
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{key} of {name} must be a floating-point tensor, found {kind}")
    step = param_state.get("step")
    if step is not None and step_count(step) is None:
        raise ValueError(f"step of {name} must be a number ≥ 0, found {step!r}")


def _names_of(group: Mapping[str, Any]) -> Optional[list[str]]:
    ids = group["params"]
    for names in (group.get("param_names"), group.get("names"), ids):
        names = names if isinstance(names, (list, tuple)) else []
        texts = [name for name in names if isinstance(name, str)]
        if texts and len(texts) == len(ids):
            return texts
    return None


def _check_kind(group: Mapping[str, Any], where: str, kind: str, use_muon: Optional[bool]) -> None:
    """Checks that a group has the given kind, or belongs to the AdamW of two optimizers."""
    looks_like = kind_of(group)
    if looks_like == kind or (use_muon is False and looks_like == "torch_adamw"):
        return
    if OWN_KEY in group:
        raise ValueError(f"{where} was saved by this package: use load_state_dict")
    guess = f"; it looks like kind={looks_like!r}" if looks_like else ""
    raise ValueError(
        f"{where} is not from a {kind!r} checkpoint: it has the keys "
        f"{', '.join(sorted(map(str, group.keys() - {'params'})))}{guess}"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(repr, list(value)[:8]))}"
    return f"a {type(value).__name__}"
