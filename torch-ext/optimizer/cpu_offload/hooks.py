"""Registers hooks that reload state during the backward and free it during the next forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn


class Hooks:
    """Hooks of an optimizer's parameters, and of the modules that have them.

    Args:
        optimizer: a `Muon`; the hooks are removed when it dies.
        model: before the forwards of its modules memory is freed; None for no such hooks.

    Raises:
        ValueError: a model without any of the optimizer's parameters.
    """

    def __init__(self, optimizer: Any, model: Optional[nn.Module]):
        self._optimizer = weakref.ref(optimizer)
        self._handles: dict[Tensor, Any] = {}  # of the parameters' hooks
        params = {param for group in optimizer.param_groups for param in group["params"]}
        modules = [
            module
            for module in (model.modules() if model is not None else ())
            if not params.isdisjoint(module.parameters(recurse=False))
        ]
        if model is not None and not modules:
            raise ValueError("model has none of this optimizer's parameters")
        hook = _Hook(self._optimizer, _free_written_back)
        handles = [module.register_forward_pre_hook(hook) for module in modules]
        self.remove = weakref.finalize(optimizer, _remove, handles, self._handles)
        self.hook_params()

    def hook_params(self) -> None:
        """Hooks parameters that are new in the groups, and unhooks those that have left them."""
        optimizer = self._optimizer()
        groups = optimizer.param_groups if optimizer is not None else ()
        params = {p for g in groups for p in g["params"] if p.requires_grad and p.is_leaf}
        for param in self._handles.keys() - params:
            self._handles.pop(param).remove()
        hook = _Hook(self._optimizer, _reload)
        for param in params - self._handles.keys():
            self._handles[param] = param.register_post_accumulate_grad_hook(hook)


class _Hook:
    """Calls a function with the optimizer, while it lives, and with the parameter or module.

    The hooks of a copied or unpickled model have no optimizer, and do nothing.
    """

    def __init__(self, optimizer: Optional[Callable[[], Any]], function: Callable[..., None]):
        self._optimizer = optimizer
        self._function = function

    def __call__(self, hooked: Any, *arguments: Any) -> None:
        if torch.compiler.is_compiling():  # or a graph would depend on how far copies are
            return
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            self._function(optimizer, hooked)

    def __reduce__(self) -> tuple:
        return _Hook, (None, self._function)


def _free_written_back(optimizer: Any, module: nn.Module) -> None:
    optimizer._offload.free_written_back()


def _reload(optimizer: Any, param: Tensor) -> None:
    if not optimizer.manual_offload:
        optimizer._offload.reload(optimizer.state, (param,))


def _remove(handles: list[Any], param_handles: dict[Tensor, Any]) -> None:
    for handle in (*handles, *param_handles.values()):
        handle.remove()
