"""Supports torch.amp.GradScaler: ranks that step together skip a step together.

A scaler divides gradients by its scale, looks for Inf and NaN in them, and calls ``step()`` if it
finds none. It reduces its finding over the ranks that hold parts of the first gradient. If these
aren't all ranks that step together, some ranks would call ``step()`` and wait for the others. In
this case the optimizer has ``_step_supports_amp_scaling``, with which the scaler always calls
``step()``, with gradients that are still scaled, unless the caller has unscaled them. During the
call the scaler sets two attributes of the optimizer, ``found_inf`` and ``grad_scale``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import dtensors
from ..distributed.agreement import Ranks
from ..parameters.options import Group, Settings
from ..parameters.survey import shared_with
from .progress import Progress


def scaler_agrees(params: Sequence[Tensor], settings: Settings) -> bool:
    """True if a scaler finds the same result on all ranks that step together.

    For each device and dtype, a scaler reduces its finding over the ranks that the first gradient
    is sharded over. That suffices if these are all ranks, or if all gradients are sharded over
    these ranks and the other ranks hold replicas. Without communication, a rank knows which ranks
    step together only if all ranks do.
    """
    shared = {shared_with(param, settings) for param in params}
    if all(ranks is None or len(ranks) == 1 for ranks in shared):
        return True
    if (
        settings.zero2_replicas is not None
    ):  # gradients of replicas differ until the step averages them
        return False
    rank, everyone = dist.get_rank(), tuple(range(dist.get_world_size()))
    first: dict[tuple[torch.device, torch.dtype], Ranks] = {}
    for param in params:
        if param.grad is None:
            continue
        sharding = dtensors.sharding_of(param)
        cut = (rank,) if sharding is None else sharding.peers(rank, range(param.ndim))
        reached = first.setdefault((param.grad.device, param.grad.dtype), cut)
        replicated = shared_with(param, settings) == everyone and set(reached).issuperset(cut)
        if reached != everyone and not replicated:
            return False
    return True


class Scaling:
    """A scaler's verdict and scale for one step, if the scaler leaves skipping to the step.

    As a context manager it removes the attributes that the scaler set if the step raises. Otherwise
    the scaler would multiply its next scale into the old one, and a later step without a scaler
    would be skipped.

    Args:
        optimizer: the optimizer whose attributes the scaler has set.

    Attributes:
        skips: True if the step must be skipped, False until `check` has read the verdict; None if
            no scaler has set attributes.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._found_inf: Any = getattr(optimizer, "found_inf", None)
        self.skips = None if self._found_inf is None else False
        self._scale: Optional[Tensor] = getattr(optimizer, "grad_scale", None)

    def __enter__(self) -> Scaling:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], *_: object) -> None:
        if kind is not None:
            for attribute in ("found_inf", "grad_scale"):
                vars(self._optimizer).pop(attribute, None)

    def check(self, groups: Sequence[Group]) -> None:
        """Reads the scaler's verdict, and checks that scaled gradients can be unscaled.

        Call this where errors are reported to the other ranks.

        Raises:
            ValueError: a gradient is fp16, which would lose small numbers.
        """
        if self._found_inf is not None:
            # Waits for the device, as a scaler does before any other optimizer's step. On a rank
            # without gradients, the sum over devices is the integer 0.
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

    def unscale(self, groups: Sequence[Group], progress: Progress) -> None:
        """Divides all gradients by the scale, in place, as ``scaler.unscale_`` does.

        If the step fails later, it can't be repeated, since it would divide them again.
        """
        if self._scale is None:
            return
        by_device: dict[torch.device, list[Tensor]] = {}
        for group in groups:
            for param in group.params:
                if param.grad is not None:
                    grad = dtensors.local(param.grad)
                    by_device.setdefault(grad.device, []).append(grad)
        for device, grads in by_device.items():
            progress.has_written = True
            torch._foreach_mul_(grads, self._scale.reciprocal().to(device, non_blocking=True))
