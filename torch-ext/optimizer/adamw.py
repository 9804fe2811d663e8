"""AdamW of the parameters that are not Muon's, by torch's own fused or foreach functional."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .core import takes_part
from .distributed.utils import is_dtensor, local

# Devices whose fused kernel keeps `step` beside the parameter.
FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


def is_fused(param: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether this parameter takes torch's fused kernel; ``foreach`` given either way means no."""
    return (
        options["foreach"] is None
        and param.device.type in FUSED_DEVICES
        and torch.is_floating_point(param)
    )


def init_state(
    param: Tensor, state: MutableMapping[str, Tensor], options: Mapping[str, Any]
) -> None:
    """Adds what is missing of ``step``, ``exp_avg``, ``exp_avg_sq``: those of torch.optim."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    on_device = options["capturable"] or is_fused(param, options)
    device = local(param).device if on_device else torch.device("cpu")
    if state["step"].device != device:
        state["step"] = state["step"].to(device)
    for key in ("exp_avg", "exp_avg_sq"):
        if key not in state:
            state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)


def update(
    params: Sequence[Tensor],
    state: Mapping[Tensor, MutableMapping[str, Tensor]],
    options: Mapping[str, Any],
) -> None:
    """One AdamW step (Loshchilov & Hutter 2019, algorithm 2) of parameters that have a gradient.

    Works on the local shards of DTensors: AdamW is element-wise. Gradients are only read; with
    ``missing_grad="zero"`` an absent one counts as zeros.
    """
    present = [p for p in params if takes_part(p, options)]
    rows = [_Row.of(p, state[p]) for p in present]
    beta1, beta2 = options["adamw_betas"]
    for fused in (True, False):
        chosen = [row for row in rows if (is_fused(row.param, options) and row.is_dense) is fused]
        if not chosen:
            continue
        adamw(
            [row.param for row in chosen],
            [row.grad for row in chosen],
            [row.exp_avg for row in chosen],
            [row.exp_avg_sq for row in chosen],
            [],
            [row.step for row in chosen],
            foreach=False if fused else options["foreach"],
            fused=fused,
            capturable=options["capturable"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            eps=options["adamw_eps"],
            maximize=options["maximize"],
        )
    for p in present:
        if is_dtensor(p):
            torch.autograd.graph.increment_version(p)


@dataclass(frozen=True)
class _Row:
    """The local tensors of one parameter's update."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @classmethod
    def of(cls, param: Tensor, state: Mapping[str, Tensor]) -> _Row:
        shard = local(param)
        if param.grad is None:
            grad = torch.zeros_like(shard)
        else:
            grad = local(param.grad).to(shard.dtype)
        moments = local(state["exp_avg"]), local(state["exp_avg_sq"])
        return cls(shard, grad, *moments, state["step"])

    @property
    def is_dense(self) -> bool:
        """Whether all tensors fill their memory in one order: torch's fused kernel takes their
        storages for flat arrays, and would write the wrong elements of any others."""
        tensors = (self.param, self.grad, self.exp_avg, self.exp_avg_sq)
        if any(t.stride() != self.param.stride() for t in tensors):
            return False
        size_and_stride = zip(self.param.shape, self.param.stride())
        span = 1 + sum((size - 1) * stride for size, stride in size_and_stride)
        return self.param.numel() == 0 or span == self.param.numel()


def state_layout(param, replicas):
    return None
