"""Hooks that bring state under the backward and let it go under the forward that follows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor, nn


class Hooks:
    """Of an optimizer's parameters, and of the modules that have them.

    Args:
        optimizer: an `Offloadable`, not kept alive.
        model: whose modules' forwards let memory go; None for none.
    """

    def __init__(self, optimizer: Any, model: Optional[nn.Module]):
        self._optimizer = weakref.ref(optimizer)
        self._handles: list[Any] = []
        self._hooked: set[int] = set()
        self.hook_params()
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for module in model.modules() if model is not None else ():
            if any(id(param) in held for param in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(self._before_forward()))

    def hook_params(self) -> None:
        """Hooks whatever parameters have come."""
        optimizer = self._optimizer()
        for group in optimizer.param_groups if optimizer is not None else ():
            for param in group["params"]:
                if param.requires_grad and id(param) not in self._hooked:
                    self._hooked.add(id(param))
                    handle = param.register_post_accumulate_grad_hook(self._after_gradient())
                    self._handles.append(handle)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _after_gradient(self) -> Callable[[Tensor], None]:
        reference = self._optimizer

        def reload(param: Tensor) -> None:
            optimizer = reference()
            if optimizer is not None and not optimizer.manual_offload:
                optimizer._reload_at_home(param)

        return reload

    def _before_forward(self) -> Callable[[nn.Module, Any], None]:
        reference = self._optimizer

        def sweep(module: nn.Module, arguments: Any) -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._offload.sweep()

        return sweep
