"""What an audit costs: the example's model trained with and without one, in fp32 and in bf16.

make bench BENCHMARKS=benchmarks/auditing.py ARGS="--rounds 15 --cpu-time"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from timing import CHECKOUT, add_cpu_time, load_kernel, machine, milliseconds, show, take_turns

sys.path.append(str(CHECKOUT / "examples"))
from model import ModelConfig, Transformer

DTYPES = (torch.float32, torch.bfloat16)


class Training:
    """The example's model, whose steps may be audited."""

    def __init__(self, kernel: Any, dtype: torch.dtype):
        torch.manual_seed(0)
        self.model = Transformer(ModelConfig()).to(dtype)
        self.optimizer = kernel.Muon.for_model(self.model, lr=1e-3)
        self.optimizer.defaults["none_grad"] = False
        for group in self.optimizer.param_groups:
            group["none_grad"] = False  # a step can be repeated
        self.audit = self.optimizer.audit(keep=1)
        self.tokens = torch.randint(256, (16, 65))

    def step(self, is_audited: bool) -> None:
        self.audit.is_on = is_audited
        self.optimizer.step()

    def iterate(self) -> None:
        self.optimizer.zero_grad()
        logits, _ = self.model(self.tokens[:, :-1])
        cross_entropy(logits.float().flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.step(is_audited=False)


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown")
    add_cpu_time(parser)
    options = parser.parse_args(arguments)
    rows, kernel = [], load_kernel()
    for dtype in DTYPES:
        training = Training(kernel, dtype)
        calls: dict[str, Callable[[], object]] = {
            "iteration": training.iterate,
            "off": partial(training.step, False),
            "on": partial(training.step, True),
        }
        seconds = take_turns(calls, options.rounds, clock=options.clock)
        iteration, off, on = (min(samples) for samples in seconds.values())
        cells = (milliseconds(samples)[0] for samples in seconds.values())
        shares = (f"{(on - off) / whole:.1%}" for whole in (off, iteration))
        rows.append([str(dtype)[6:], *cells, *shares])
    columns = (
        "weights",
        "iteration, least ms",
        "step",
        "audited",
        "more of a step",
        "of an iteration",
    )
    show(f"An audit, {options.rounds} rounds", columns, rows, markdown=options.markdown)
    print(machine("cpu"))


if __name__ == "__main__":
    main()
