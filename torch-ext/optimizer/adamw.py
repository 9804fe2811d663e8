"""AdamW of the parameters that are not Muon's, by torch's own fused or foreach functional."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

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
        state["step"] = torch.zeros((), dtype=torch.float32)
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
    present = [
        p
        for p in params
        if p.requires_grad and (p.grad is not None or options["missing_grad"] == "zero")
    ]
    for fused in (True, False):
        chosen = [p for p in present if is_fused(p, options) is fused]
        if not chosen:
            continue
        shards = [local(p) for p in chosen]
        grads = [
            torch.zeros_like(shard) if p.grad is None else local(p.grad).to(shard.dtype)
            for p, shard in zip(chosen, shards)
        ]
        beta1, beta2 = options["adamw_betas"]
        adamw(
            shards,
            grads,
            [local(state[p]["exp_avg"]) for p in chosen],
            [local(state[p]["exp_avg_sq"]) for p in chosen],
            [],
            [state[p]["step"] for p in chosen],
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
        for p in chosen:
            if is_dtensor(p):
                torch.autograd.graph.increment_version(p)
