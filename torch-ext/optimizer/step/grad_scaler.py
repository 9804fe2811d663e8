"""Supports torch.amp.GradScaler: all ranks decide alike whether a step is skipped.

By itself a scaler calls ``step()`` on the ranks that have found no Inf or NaN, and not on the
others. Of an optimizer with ``_step_supports_amp_scaling`` it sets two attributes instead,
``found_inf`` and ``grad_scale``, for the time of a ``step()`` that it always calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..distributed import utils as dtensors
from ..parameters.options import Group


class Scaling:
    """What a scaler says of one step, if there is one.

    Args:
        optimizer: whose attributes it has set.

    Attributes:
        skips: whether the step is to be skipped; None where there is no scaler.
        has_unscaled: whether gradients have been changed: a second time would be once too often.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        found_inf: Optional[Tensor] = getattr(optimizer, "found_inf", None)
        # Waits for the device, as a scaler does for itself before any other optimizer's step.
        self.skips = None if found_inf is None else bool(found_inf.item())
        self._scale: Optional[Tensor] = getattr(optimizer, "grad_scale", None)
        self.has_unscaled = False

    def check(self, groups: Sequence[Group]) -> None:
        """Gradients that are still scaled can be unscaled.

        Raises:
            ValueError: one is fp16, where what is left of small numbers would be lost.
        """
        if self._scale is None or self.skips:
            return
        for group in groups:
            for index, param in enumerate(group.params):
                if param.grad is not None and param.grad.dtype == torch.float16:
                    raise ValueError(
                        f"{group.name_of(index)} has a scaled gradient in fp16, which loses small "
                        "numbers when it is unscaled: keep weights in fp32 under torch.autocast"
                    )

    def unscale(self, groups: Sequence[Group]) -> None:
        """Divides all gradients by the scale, in place, as ``scaler.unscale_`` does."""
        if self._scale is None:
            return
        by_device: dict[torch.device, list[Tensor]] = {}
        for group in groups:
            for param in group.params:
                if param.grad is not None:
                    grad = dtensors.local(param.grad)
                    by_device.setdefault(grad.device, []).append(grad)
        for device, grads in by_device.items():
            self.has_unscaled = True
            torch._foreach_mul_(grads, self._scale.reciprocal().to(device, non_blocking=True))
        self._optimizer.grad_scale = None  # a step within hooks of this one has them unscaled


def is_asked_by_lightning() -> bool:
    """Whether Lightning reads the property that calls this, and not a scaler.

    Of an optimizer with ``_step_supports_amp_scaling`` it expects that gradients are still scaled
    before the step, and refuses to clip them, in bf16 too. Of others it has them unscaled.
    """
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return asking.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")


def forget_where_it_raises(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step, hooks and all, that leaves nothing of what a scaler has said where it raises.

    The scaler would multiply its scale into what is left, and a step without it would be skipped.
    """

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        except BaseException:
            for attribute in ("found_inf", "grad_scale"):
                vars(self).pop(attribute, None)
            raise

    return wrapper
