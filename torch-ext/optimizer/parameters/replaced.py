"""Notices parameters that modules have replaced since groups were made, as fully_shard does."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Optional

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..distributed import dtensors
from .options import Group

Place = tuple[weakref.ref[nn.Module], str]  # a module, and what it calls a parameter

# Of each parameter, weakly, the module that held it when groups were made, and under which name.
_places: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember_places(model: nn.Module) -> None:
    """Remembers for every parameter of a model the first module that holds it.

    `fully_shard`, and `Module.to_empty` of a model on meta, put other parameters in place of those
    that groups hold.
    """
    held = set()
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in held:
                held.add(id(param))
                _places[param] = (weakref.ref(module), attribute)


def place_of(param: Tensor) -> Optional[Place]:
    """The module that held a parameter when groups were made, and under which name."""
    return _places.get(param)


def replacement_of(param: Tensor, place: Place) -> Optional[Tensor]:
    """The parameter that its module has in the place of ``param`` by now, or None.

    FSDP2 puts unsharded parameters into modules for a while: these do not count, as the sharded
    ones come back.
    """
    module = place[0]()
    current = None if module is None else module._parameters.get(place[1])
    if current is None or current is param:
        return None
    old, new = map(dtensors.mesh_placements_of, (param, current))
    return current if (new[0].ndim if new else 0) >= (old[0].ndim if old else 0) else None


def check_not_replaced(
    groups: Sequence[Group], places: Sequence[Sequence[Optional[Place]]]
) -> None:
    """Checks of parameters without a gradient that the model holds no others in their places.

    Others that the groups have, too, are trained: tied weights, or a larger embedding that
    `add_param_group` was given.

    Args:
        groups: all groups.
        places: `place_of` each of their parameters.
    """
    for group, of_group in zip(groups, places):
        for index, (param, place) in enumerate(zip(group.params, of_group)):
            if place is None or param.grad is not None or not param.requires_grad:
                continue
            module = place[0]()
            if module is None or module._parameters.get(place[1]) is param:
                continue
            other = replacement_of(param, place)
            if other is not None and not any(p is other for g in groups for p in g.params):
                name = group.name_of(index)
                raise ValueError(
                    f"step() found no gradient on {name}, and by now the model holds another "
                    f"parameter as {name} than its groups: make the groups and the optimizer after "
                    "fully_shard, .to_empty() or whatever replaced it"
                )
