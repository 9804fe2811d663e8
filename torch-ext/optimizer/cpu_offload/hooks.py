"""Hooks that bring state under the backward and let it go under the forward that follows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn


class Hooks:
    """Of an optimizer's parameters, and of the modules that have them.

    Args:
        optimizer: a `Muon`; the hooks go when it does.
        model: whose modules' forwards let memory go; None for none.

    Raises:
        ValueError: a model without any of the optimizer's parameters.
    """

    def __init__(self, optimizer: Any, model: Optional[nn.Module]):
        self._optimizer = weakref.ref(optimizer)
        # By id, with the parameter: were it let go of, another one could get its id, and no hook.
        self._hooked: dict[int, tuple[Tensor, Any]] = {}
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        modules = [
            module
            for module in (model.modules() if model is not None else ())
            if any(id(param) in held for param in module.parameters(recurse=False))
        ]
        if model is not None and not modules:
            raise ValueError("model has none of this optimizer's parameters")
        hook = _Hook(self._optimizer, _sweep)
        handles = [module.register_forward_pre_hook(hook) for module in modules]
        self.remove = weakref.finalize(optimizer, _remove, handles, self._hooked)
        self.hook_params()

    def hook_params(self) -> None:
        """Hooks the parameters that have come, and lets go of those that have left."""
        optimizer = self._optimizer()
        groups = optimizer.param_groups if optimizer is not None else ()
        params = (p for group in groups for p in group["params"])
        wanted = {id(p): p for p in params if p.requires_grad and p.is_leaf}
        for key in self._hooked.keys() - wanted.keys():
            self._hooked.pop(key)[1].remove()
        hook = _Hook(self._optimizer, _reload)
        for key in wanted.keys() - self._hooked.keys():
            handle = wanted[key].register_post_accumulate_grad_hook(hook)
            self._hooked[key] = (wanted[key], handle)


class _Hook:
    """Calls a function with the optimizer, as long as there is one, and what it is hooked to.

    A copy, or a pickle, of a model has no such optimizer: its hooks do nothing.
    """

    def __init__(
        self, optimizer: Optional[Callable[[], Any]], function: Callable[[Any, Any], None]
    ):
        self._optimizer = optimizer
        self._function = function

    def __call__(self, hooked: Any, *arguments: Any) -> None:
        if torch.compiler.is_compiling():  # else a graph would depend on how far copies are
            return
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            self._function(optimizer, hooked)

    def __reduce__(self) -> tuple:
        return _Hook, (None, self._function)


def _sweep(optimizer: Any, module: nn.Module) -> None:
    optimizer._offload.sweep()


def _reload(optimizer: Any, param: Tensor) -> None:
    if not optimizer.manual_offload:
        optimizer._offload.reload(optimizer.state, (param,))


def _remove(handles: list[Any], hooked: dict[int, tuple[Tensor, Any]]) -> None:
    for handle in (*handles, *(handle for _, handle in hooked.values())):
        handle.remove()
