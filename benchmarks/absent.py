"""Time of a step in which some local matrices have no gradient, beside a step in which all have.

    make bench BENCHMARKS=benchmarks/absent.py ARGS="--matrices 1536 --shape 32 64"

As experts that idle: in each step others, at random. Shares of absent gradients take turns.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from timing import load_kernel, machine, milliseconds, pick_device, show, take_turns

SHARES = (0.0, 0.05, 0.5, 0.95)


class Experts:
    """Matrices with a gradient each, and an optimizer of them."""

    def __init__(self, kernel: Any, count: int, shape: Sequence[int], device: torch.device):
        self.params = [nn.Parameter(torch.randn(*shape, device=device)) for _ in range(count)]
        self.grads = [torch.randn_like(param) for param in self.params]
        self.draw = random.Random(0)
        group = {"params": self.params, "use_muon": True}
        self.optimizer = kernel.Muon([group], lr=1e-3, none_grad=False)

    def step(self, share: float) -> None:
        count = len(self.params)
        absent = set(self.draw.sample(range(count), round(share * count)))
        for number, (param, grad) in enumerate(zip(self.params, self.grads, strict=True)):
            param.grad = None if number in absent else grad
        self.optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, default=1536)
    parser.add_argument("--shape", type=int, nargs=2, default=(32, 64), metavar=("ROWS", "COLS"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown")
    options = parser.parse_args(arguments)
    device = pick_device()
    experts = Experts(load_kernel(), options.matrices, options.shape, device)
    calls: dict[str, Callable[[], object]] = {
        f"{share:.0%}": partial(experts.step, share) for share in SHARES
    }
    seconds = take_turns(calls, options.rounds)
    full = min(seconds["0%"])
    rows = [[name, *milliseconds(of), f"{min(of) / full:.2f}"] for name, of in seconds.items()]
    rows_by_cols = " × ".join(map(str, options.shape))
    title = f"A step of {options.matrices} matrices of {rows_by_cols}, {options.rounds} rounds"
    columns = ("without gradient", "least ms", "median ms", "× a full step")
    show(title, columns, rows, markdown=options.markdown)
    print(machine(device))


if __name__ == "__main__":
    main()
