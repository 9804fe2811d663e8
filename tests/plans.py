"""What plans are made of: shardings, and parameters, written down without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernel import optimizer

Sharding = optimizer.regions.Sharding
ShardedDim = optimizer.regions.ShardedDim
recipe_for = optimizer.newton_schulz.recipe_for

CPU = torch.device("cpu")
CUDA = torch.device("cuda")  # a name: plans need no device


def sharded(ranks: int, dim: int | None = 0) -> Any:
    """Each of the ranks holds its part of one dimension, or all of them hold everything."""
    return Sharding((ranks,), tuple(range(ranks)), (None if dim is None else ShardedDim(dim),))


def entry(
    shape: Sequence[int],
    sharding: Any,
    number: int = 0,
    split: Any = None,
    flatten: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    wire: torch.dtype = torch.bfloat16,
    second_moment: bool = False,
    momentum: Any = None,
    spread: bool = False,
) -> Any:
    is_expert = len(shape) > 2 and not flatten
    return optimizer.distributed.plan.Entry(
        name=f"layers.{number}.weight",
        group=int(second_moment),  # as an option of groups
        index=number,
        matrices=optimizer.matrices.read_as_matrices(shape, is_expert, flatten, split),
        sharding=sharding,
        dtype=dtype,
        device=device,
        wire=wire,
        recipe=recipe_for("polar_express", 5, "auto", None, dtype, device),
        second_moment=second_moment,
        momentum_sharding=momentum,
        spread=spread,
    )


def entries_of(shapes: Sequence[Sequence[int]], sharding: Any, **options: Any) -> list[Any]:
    return [entry(shape, sharding, number, **options) for number, shape in enumerate(shapes)]


def make_plan(entries: Sequence[Any], rank: int = 0, **options: Any) -> Any:
    """The plan of ``rank`` for entries that all take part."""
    return optimizer.distributed.plan.Planner(entries, rank, **options).plan()
