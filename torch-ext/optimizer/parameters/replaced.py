"""Detects parameters that the model has replaced since groups were made, as fully_shard does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from torch import Tensor, nn

from ..distributed import dtensors
from .options import Group


class ModelNames(list[str]):
    """A group's list of parameter names that keeps a weak reference to the model.

    Parameters can't keep it: torch can't convert or move a DTensor that has weak references. Copies
    and pickles are plain lists.
    """

    def __init__(self, names: Iterable[str], model: nn.Module):
        super().__init__(names)
        self.model = weakref.ref(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def check_not_replaced(groups: Sequence[Group]) -> None:
    """Raises ValueError if the model has replaced a parameter that has no gradient.

    A replacement that is also in the groups is fine: tied weights, or a larger embedding that was
    passed to `add_param_group`.
    """
    for group in groups:
        model = group.names.model() if isinstance(group.names, ModelNames) else None
        if model is None:
            continue
        for index, param in enumerate(group.params):
            if param.grad is not None or not param.requires_grad:
                continue
            name = group.name_of(index)
            other = _replacement_of(param, model, name)
            if other is not None and not any(p is other for g in groups for p in g.params):
                raise ValueError(
                    f"step() found no gradient on {name}, and the model now has another parameter "
                    "of this name than the groups: make the groups and the optimizer after "
                    "fully_shard, .to_empty() or anything else that replaces parameters"
                )


def _replacement_of(param: Tensor, model: nn.Module, name: str) -> Optional[Tensor]:
    """Returns the parameter that the model now has in place of ``param``, or None.

    Unsharded parameters, which FSDP2 registers temporarily, don't count.
    """
    path, _, attribute = name.rpartition(".")
    try:
        current = model.get_submodule(path)._parameters.get(attribute)
    except AttributeError:  # the module is gone, or wrapped under another name
        return None
    if current is None or current is param:
        return None
    old, new = map(dtensors.mesh_placements_of, (param, current))
    return current if (new[0].ndim if new else 0) >= (old[0].ndim if old else 0) else None
