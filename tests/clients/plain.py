"""The task in a plain loop in one process, which clients are to equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from kernel import optimizer
from task import Sequences, build_model

# Rounding to 16 bits would make steps of what ranks add up in another order.
FP32 = {"ns_dtype": torch.float32, "comm_dtype": torch.float32}


@dataclass
class Trained:
    """What a training left: the loss of each update, and the weights by name."""

    losses: list[float]
    weights: dict[str, Tensor]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def whole_weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Gathers the whole weights of a sharded model; call it on all ranks."""
    return {
        name: value.full_tensor().clone() if isinstance(value, DTensor) else value
        for name, value in weights_of(model).items()
    }


def attach_recorder(model: nn.Module, optim: Any) -> None:
    """A ``prepare`` of `train`, for QK-Clip where steps get no arguments."""
    optim.qk_recorder = optimizer.QKLogitRecorder(model)


def linear(steps: int) -> Callable[[Any], LRScheduler]:
    """The schedule of the examples that choose one."""
    return lambda optim: LambdaLR(optim, lambda step: 1 - step / steps)


def batch_of(first: int, size: int) -> dict[str, Tensor]:
    """Consecutive sequences of the task, as its data loaders give them."""
    samples = [Sequences(1 << 30)[i] for i in range(first, first + size)]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def train(
    steps: int,
    batch_size: int,
    accumulate: int = 1,
    schedule: Callable[[Any], LRScheduler] | None = None,
    max_norm: float | None = 1.0,
    autocast: bool = False,
    by_tokens: bool = False,
    clip_by_groups: bool = False,
    prepare: Callable[[nn.Module, Any], None] | None = None,
    **options: Any,
) -> Trained:
    """
    Args:
        batch_size: sequences of each of the `accumulate` batches of an update, a step.
        schedule: makes a scheduler of the optimizer.
        max_norm: of gradients.
        autocast: whether forwards are in bf16.
        by_tokens: whether an update's gradients are divided by its tokens, as transformers' Trainer
            does it, and not each batch's by its own.
        clip_by_groups: whether the norm is added up in the order of the optimizer's groups, as
            Lightning does it, and not in the model's.
        prepare: sees model and optimizer before the first step.
        options: Muon's.
    """
    model = build_model()
    groups = optimizer.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, **{"lr": 1e-2, "weight_decay": 0.1, **options})
    if prepare is not None:
        prepare(model, optim)
    scheduler = schedule(optim) if schedule is not None else None
    losses, first = [], 0
    for _ in range(steps):
        starts = range(first, first + accumulate * batch_size, batch_size)
        first += accumulate * batch_size
        batches = [batch_of(start, batch_size) for start in starts]
        losses.append(_accumulate(model, batches, autocast, by_tokens))
        if max_norm is not None:
            in_groups = [p for group in optim.param_groups for p in group["params"]]
            params = in_groups if clip_by_groups else list(model.parameters())
            nn.utils.clip_grad_norm_(params, max_norm)
        optim.step()
        optim.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return Trained(losses, weights_of(model))


def _accumulate(model: nn.Module, batches: list[dict], autocast: bool, by_tokens: bool) -> float:
    """One update's forwards and backwards; returns its loss."""
    tokens = sum(batch["labels"][:, 1:].numel() for batch in batches)
    total = torch.zeros(())
    for batch in batches:
        if by_tokens:
            batch = {**batch, "num_items_in_batch": torch.tensor(tokens)}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss = loss if by_tokens else loss / len(batches)
        loss.backward()
        total += loss.detach()
    return float(total)


def assert_same(found: Trained, expected: Trained, rounding: float = 0.0) -> None:
    """Losses and weights are equal, bit for bit or to a difference of `rounding`."""
    assert_falls(found.losses)
    losses = (torch.tensor(each.losses, dtype=torch.float64) for each in (found, expected))
    torch.testing.assert_close(*losses, rtol=0, atol=rounding)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=rounding)


def assert_falls(losses: Iterable[float]) -> None:
    first, *_, last = losses
    assert last < first - 0.5, (first, last)
