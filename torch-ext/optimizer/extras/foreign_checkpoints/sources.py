"""Detects which optimizer wrote a state dict, checks it, and brings it to a common form.

State dicts may be as torch.optim writes them, keyed by name, or one for each rank.
Nothing is unpickled, copied or changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor

from ...state.checkpoints import OWN_KEY, step_count
from .hyperparameters import check_options
from .origin import kinds_of

# Keys under which any source keeps a tensor of state.
_MOMENTUM_KEYS = ("momentum_buffer", "second_momentum_buffer")
_TENSOR_KEYS = (*_MOMENTUM_KEYS, "exp_avg", "exp_avg_sq", "moment1", "moment2")

KINDS = ("torch_muon", "torch_adamw", "motif", "llamafactory", "nanochat", "keller_jordan")


@dataclass(frozen=True)
class SavedGroup:
    """A param group of a checkpoint.

    Args:
        ids: of its parameters, keys of `SavedStateDict.state`.
        names: of its parameters, where the checkpoint has them.
        options: its other keys.
    """

    ids: Sequence[Any]
    names: Optional[Sequence[str]]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class SavedStateDict:
    """One state dict.

    Args:
        groups: in order.
        state: by id; parameters that were never stepped have none.
        where: what messages call it.
    """

    groups: Sequence[SavedGroup]
    state: Mapping[Any, Mapping[str, Any]]
    where: str

    def param_state(self, saved_id: Any) -> Mapping[str, Any]:
        return self.state.get(saved_id, {})


@dataclass(frozen=True)
class SourceOptimizer:
    """What one optimizer saved: a state dict, or one for each rank of those that divide state.

    Args:
        use_muon: whose parameters it has: Muon's, AdamW's, or None: both.
        ranks: their state dicts, in order; one where one state dict has everything.
    """

    use_muon: Optional[bool]
    ranks: Sequence[SavedStateDict]

    @property
    def groups(self) -> Sequence[SavedGroup]:
        return self.ranks[0].groups

    @property
    def where(self) -> str:
        """What messages call it."""
        return self.ranks[0].where if len(self.ranks) == 1 else "the state dicts of the ranks"

    def label(self, group: SavedGroup, index: int) -> str:
        """What messages call a parameter of one of the groups."""
        name = f" ({group.names[index]})" if group.names is not None else ""
        number = [other is group for other in self.groups].index(True)
        return f"parameter {index}{name} of group {number}"

    @property
    def is_fresh(self) -> bool:
        """Whether it was saved before the first step."""
        states = [state for rank in self.ranks for state in rank.state.values()]
        return not any(key != "use_muon" for state in states for key in state)


def read_sources(states: Any, kind: str) -> tuple[list[SourceOptimizer], list[bool]]:
    """The optimizers in ``states``, and the values of ``use_muon`` whose parameters start anew.

    Args:
        states: as `Muon.load_foreign_state_dict` takes it.
        kind: one of `KINDS`.

    Raises:
        ValueError: no state dict, or one of another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, found {kind!r}")
    divided = kind in ("nanochat", "keller_jordan")
    anew: list[bool] = []
    if isinstance(states, Mapping) and states and states.keys() <= {"muon", "adamw"}:
        if kind not in ("torch_muon", "keller_jordan"):
            raise ValueError(
                f"kind={kind!r} has one state dict for Muon's parameters and AdamW's, found "
                f"{sorted(states)}"
            )
        sources = [
            _source(states[key], f"states[{key!r}]", use_muon, divided)
            for key, use_muon in (("muon", True), ("adamw", False))
            if states.get(key) is not None
        ]
        anew = [key == "muon" for key, state_dict in states.items() if state_dict is None]
    else:
        source = _source(states, "states", None, divided)
        if kind == "torch_muon" or (kind == "keller_jordan" and _has_only_muon(source)):
            source = SourceOptimizer(True, source.ranks)
        sources = [source]
    for source in sources:
        _check_kind(source, kind)
    return sources, anew


def _source(states: Any, where: str, use_muon: Optional[bool], divided: bool) -> SourceOptimizer:
    if not isinstance(states, (list, tuple)):
        return SourceOptimizer(use_muon, [read_state_dict(states, where)])
    if not divided or not states:
        raise ValueError(f"{where} must be a state dict, found {_in_words(states)}")
    ranks = [read_state_dict(item, f"{where}[{rank}]") for rank, item in enumerate(states)]
    lengths = [[len(group.ids) for group in rank.groups] for rank in ranks]
    for state_dict, counts in zip(ranks, lengths):
        if counts != lengths[0]:
            raise ValueError(
                f"{state_dict.where} has groups of {counts} parameters but {ranks[0].where} of "
                f"{lengths[0]}: give the state dicts of all ranks of one checkpoint, in their order"
            )
    return SourceOptimizer(use_muon, ranks)


def _has_only_muon(source: SourceOptimizer) -> bool:
    """Whether it is a Muon that trains nothing else, beside another optimizer."""
    return not any("use_muon" in group.options for group in source.groups)


def read_state_dict(state_dict: Any, where: str) -> SavedStateDict:
    """Reads a state dict of torch.optim, or one by names that torch.distributed.checkpoint makes.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"{where} must be an optimizer's state dict, with 'state' and 'param_groups', found "
            f"{_in_words(state_dict)}"
        )
    states, saved_groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping) or not all(isinstance(s, Mapping) for s in states.values()):
        raise ValueError(f"{where}['state'] must hold a dict for each parameter")
    if not isinstance(saved_groups, (list, tuple)):
        raise ValueError(f"{where}['param_groups'] must be a list, found {_in_words(saved_groups)}")
    groups = []
    for number, group in enumerate(saved_groups):
        where_group = f"{where}['param_groups'][{number}]"
        ids = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(ids, (list, tuple)) or not all(isinstance(i, (int, str)) for i in ids):
            raise ValueError(f"{where_group} has no list of params")
        options = {k: v for k, v in group.items() if k not in ("params", "names", "param_names")}
        check_options(options, where_group)
        groups.append(SavedGroup(list(ids), _names_of(group), options))
    ids = [saved_id for group in groups for saved_id in group.ids]
    unique_ids = set(ids)
    if len(unique_ids) != len(ids):
        raise ValueError(f"{where} has a parameter twice in its groups")
    for saved_id, param_state in states.items():
        if saved_id not in unique_ids:
            raise ValueError(f"{where} has state of {saved_id!r}, which is in none of its groups")
        _check_state(param_state, f"parameter {saved_id!r} of {where}")
    return SavedStateDict(groups, states, where)


def _check_state(param_state: Mapping[str, Any], name: str) -> None:
    """Checks the types of what can be taken over."""
    for key in _TENSOR_KEYS:
        value = param_state.get(key)
        if value is None:
            continue
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{key} of {name} is {kind}, no real tensor")
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


def _check_kind(source: SourceOptimizer, kind: str) -> None:
    for rank in source.ranks:
        for number, group in enumerate(rank.groups):
            kinds = kinds_of(group.options)
            if kind in kinds or (source.use_muon is False and "torch_adamw" in kinds):
                continue
            where = f"{rank.where}['param_groups'][{number}]"
            if OWN_KEY in group.options:
                raise ValueError(f"{where} is this package's own: use load_state_dict")
            guess = f"; it looks like kind={kinds[0]!r}" if kinds else ""
            raise ValueError(
                f"{where} is of no {kind!r} checkpoint: it has the keys "
                f"{', '.join(sorted(group.options))}{guess}"
            )


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(repr, list(value)[:8]))}"
    return f"a {type(value).__name__}"
