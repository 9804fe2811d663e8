"""Remembers which module held a parameter when groups were made, to tell later if it still does.

`fully_shard`, and `Module.to_empty` of a model on meta, put other parameters in place of those that
the groups hold. Neither torch nor checkpoints see what is remembered, and it keeps nothing alive.
"""

from __future__ import annotations

import weakref
from typing import Optional

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..distributed import utils as dtensors

# Of each parameter, weakly, the module that held it, and under which name.
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember_owners(model: nn.Module) -> None:
    """Remembers for every parameter of a model the first module that holds it."""
    held = set()
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in held:
                held.add(id(param))
                _owners[param] = (weakref.ref(module), attribute)


def replacement_of(param: Tensor) -> Optional[Tensor]:
    """The parameter that the module of ``param`` is known to hold in its place by now, or None.

    FSDP2 puts unsharded parameters into modules for a while: these do not count, as the sharded
    ones come back.
    """
    module_ref, attribute = _owners.get(param, (lambda: None, ""))
    module = module_ref()
    current = None if module is None else module._parameters.get(attribute)
    if current is None or current is param:
        return None
    return current if _mesh_dimensions(current) >= _mesh_dimensions(param) else None


def _mesh_dimensions(param: Tensor) -> int:
    mesh_placements = dtensors.mesh_placements_of(param)
    return 0 if mesh_placements is None else mesh_placements[0].ndim
