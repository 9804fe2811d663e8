"""Remembers which module held a parameter when groups were made, to notice what replaced it."""

from __future__ import annotations

import weakref
from typing import Optional

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..distributed import dtensors

Holder = tuple[weakref.ref[nn.Module], str]  # a module, and what it calls a parameter

# Of each parameter, weakly, the module that held it when groups were made, and under which name.
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember_owners(model: nn.Module) -> None:
    """Remembers for every parameter of a model the first module that holds it.

    `fully_shard`, and `Module.to_empty` of a model on meta, put other parameters in place of those
    that groups hold.
    """
    held = set()
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in held:
                held.add(id(param))
                _owners[param] = (weakref.ref(module), attribute)


def holder_of(param: Tensor) -> Optional[Holder]:
    """The module that held a parameter when groups were made, and under which name."""
    return _owners.get(param)


def replacement_of(param: Tensor, holder: Holder) -> Optional[Tensor]:
    """The parameter that its holder has in the place of ``param`` by now, or None.

    FSDP2 puts unsharded parameters into modules for a while: these do not count, as the sharded
    ones come back.
    """
    module = holder[0]()
    current = None if module is None else module._parameters.get(holder[1])
    if current is None or current is param:
        return None
    old, new = map(dtensors.mesh_placements_of, (param, current))
    return current if (new[0].ndim if new else 0) >= (old[0].ndim if old else 0) else None
