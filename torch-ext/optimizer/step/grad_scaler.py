"""Supports torch.amp.GradScaler: all ranks decide alike whether a step is skipped.

As a rule a scaler calls ``step()`` only on ranks that have found no Inf or NaN. If the optimizer
has ``_step_supports_amp_scaling``, the scaler calls ``step()`` always, and sets two attributes of
the optimizer for the time of the call, ``found_inf`` and ``grad_scale``.
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
    """What a scaler, if there is one, says of one step.

    Args:
        optimizer: the optimizer whose attributes the scaler has set.

    Attributes:
        skips: whether the step is to be skipped, False until `check` has read it; None if there is
            no scaler.
        has_unscaled: whether gradients have been divided by the scale. If so, a step that fails
            can't be repeated, since it would divide them again.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._found_inf: Any = getattr(optimizer, "found_inf", None)
        self.skips = None if self._found_inf is None else False
        self._scale: Optional[Tensor] = getattr(optimizer, "grad_scale", None)
        self.has_unscaled = False

    def check(self, groups: Sequence[Group]) -> None:
        """Reads whether to skip the step, and checks that scaled gradients can be unscaled.

        To be called where the other ranks hear of an error.

        Raises:
            ValueError: a gradient is fp16, in which small numbers would be lost.
        """
        if self._found_inf is not None:
            # Waits for the device, as a scaler does for itself before any other optimizer's step.
            # On a rank without any gradient, the sum over devices is the integer 0.
            self.skips = bool(self._found_inf)
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
        self._optimizer.grad_scale = None  # a step in a hook of this step finds them unscaled


def is_asked_by_lightning() -> bool:
    """Whether Lightning, and not a scaler, reads the property that calls this function.

    If an optimizer has ``_step_supports_amp_scaling``, Lightning expects that its gradients are
    still scaled before the step, and refuses to clip them, even in bf16. For other optimizers it
    has gradients unscaled.
    """
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return asking.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")


def forget_where_it_raises(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a step and its hooks: if they raise, the attributes that a scaler has set are removed.

    Otherwise the scaler would multiply its scale into the one that is left, and a later step
    without a scaler would be skipped.
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
