"""Host time of a step for each matrix, with products replaced by nothing.

    make bench BENCHMARKS=benchmarks/host_time.py

What a step costs its host beside the arithmetic of orthogonalization: Python, dispatch and, on a
CPU, the element-wise updates themselves. On an accelerator the host has to be faster than the
device's share of the work, or the device waits for it. Two cases: many small matrices on one
device, and rank 0 of 64 under FSDP2, with a fake process group whose collectives return at once.
``--absent`` adds steps in which some local matrices, others each time, have no gradient. Where a
matrix that ranks share has none, its lane is planned anew: the last row has that in every step.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from timing import load_kernel, machine, show, take_turns

RANKS = 64


class Case:
    """Matrices with a gradient each, plain or sharded, and an optimizer of them."""

    def __init__(
        self, optimizer: Callable[..., Any], count: int, rows: int, cols: int, mesh: Any = None
    ):
        values = [torch.randn(rows, cols) for _ in range(count)]
        if mesh is not None:
            placed = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
            values = [placed(value, src_data_rank=None) for value in values]
        self.params = [nn.Parameter(value) for value in values]
        self.grads = [torch.randn_like(param) for param in self.params]
        self.optimizer = optimizer(self.params)
        self.draw = random.Random(0)

    def step(self, absent: float = 0.0) -> None:
        count = len(self.params)
        without = set(self.draw.sample(range(count), round(absent * count)))
        for number, (param, grad) in enumerate(zip(self.params, self.grads, strict=True)):
            param.grad = None if number in without else grad
        self.optimizer.step()


def muon(kernel: Any, params: Sequence[Tensor]) -> Any:
    # Notes would travel between hosts that are not there.
    return kernel.Muon([{"params": params, "use_muon": True}], consistency_check="off")


def adamw(params: Sequence[Tensor]) -> Any:
    return torch.optim.AdamW(params, fused=True)


def nothing(X: Tensor, *_: Any, **__: Any) -> Tensor:
    """In place of the iteration."""
    return X


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, default=1536, help="of 16 × 16, on one device")
    parser.add_argument("--sharded", type=int, default=1000, help="of 64 × 64, on 64 ranks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--absent", type=float, nargs="*", default=[0.05, 0.5])
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown")
    options = parser.parse_args(arguments)
    kernel = load_kernel()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    alone = Case(partial(muon, kernel), options.matrices, 16, 16)
    sharded, planned = (
        Case(partial(muon, kernel), options.sharded, 64, 64, mesh) for _ in range(2)
    )
    compared, shards = Case(adamw, options.matrices, 16, 16), Case(adamw, options.sharded, 1, 64)
    calls: dict[str, Callable[[], object]] = {
        f"{options.matrices} of 16 × 16, one device": alone.step,
        f"{options.sharded} of 64 × 64, rank 0 of {RANKS}": sharded.step,
        f"torch.optim.AdamW, fused, {options.matrices} of 16 × 16": compared.step,
        f"torch.optim.AdamW, fused, {options.sharded} of 1 × 64, such shards": shards.step,
    }
    for share in options.absent:
        calls[f"{options.matrices} of 16 × 16, {share:.0%} absent"] = partial(alone.step, share)
    one = 1 / options.sharded
    calls[f"{options.sharded} of 64 × 64, another one absent each time"] = partial(
        planned.step, one
    )
    with patch.object(kernel.pipeline, "orthogonalize", nothing):
        seconds = take_turns(calls, options.rounds)
    counts = {name: int(name.split(" of ")[0].split()[-1]) for name in calls}
    rows = [
        [name, f"{min(of) * 1e3:.1f}", f"{min(of) / counts[name] * 1e6:.1f}"]
        for name, of in seconds.items()
    ]
    title = "Host time of a step, products replaced by nothing"
    show(title, ("step", "least ms", "µs a matrix"), rows, markdown=options.markdown)
    print(machine("cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
