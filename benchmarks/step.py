"""Time, memory and FLOPs of one optimizer step beside torch.optim.Muon's, interleaved in one run.

    make bench ARGS="--layers 12 --dim 512 --ffn 2048"

Both optimizers hold equal matrices and gradients and take turns (A B A B …), so that whatever else
the machine does falls on both. Memory is what a step allocates beyond what it started with, at its
highest point, counted in a step of its own; FLOPs likewise.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kernels import get_kernel
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from counters import transient_bytes


def matrices(layers: int, dim: int, ffn: int, device: str) -> list[torch.nn.Parameter]:
    """Weights of a transformer: four (dim, dim) and three of the feed-forward in each layer."""
    shapes = layers * [(dim, dim)] * 4 + layers * [(ffn, dim), (ffn, dim), (dim, ffn)]
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, generator=generator, device=device) * 0.02)
        param.grad = torch.randn(shape, generator=generator, device=device)
        params.append(param)
    return params


def flops_of_formula(params: list[torch.nn.Parameter], steps: int = 5) -> int:
    """20·s²l + 10·s³ for five steps, a multiply-add counted as two."""
    total = 0
    for param in params:
        s, long = sorted(param.shape)
        total += steps * (4 * s * s * long + 2 * s**3)
    return total


def measure(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, contenders taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        step()
    for _ in range(rounds):
        for name, step in contenders.items():
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator.type if accelerator else "cpu"
    optimizer = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])
    sizes = (arguments.layers, arguments.dim, arguments.ffn, device)
    ours, theirs = matrices(*sizes), matrices(*sizes)
    groups = [{"params": ours, "use_muon": True, "none_grad": False}]
    optimizers = {
        "Muon (this package)": optimizer.Muon(groups, lr=1e-3, weight_decay=0.1),
        "torch.optim.Muon": torch.optim.Muon(
            theirs, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
    }
    steps = {name: optim.step for name, optim in optimizers.items()}
    seconds = measure(steps, arguments.rounds)
    baseline = seconds["torch.optim.Muon"]
    param_bytes = sum(p.numel() * p.element_size() for p in ours)
    formula = flops_of_formula(ours)

    table = Table(title=f"One step, {len(ours)} matrices, {param_bytes / 2**20:.0f} MiB, {device}")
    for column in ("optimizer", "least ms", "median ms", "× torch", "transient / weights", "FLOPs"):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    for name, step in steps.items():
        with FlopCounterMode(display=False) as counter:
            step()
        table.add_row(
            name,
            f"{min(seconds[name]) * 1e3:.0f}",
            f"{statistics.median(seconds[name]) * 1e3:.0f}",
            f"{min(seconds[name]) / min(baseline):.2f}",
            f"{transient_bytes(optimizers[name]) / param_bytes:.2f}",
            f"{counter.get_total_flops() / formula:.3f} × formula",
        )
    Console(width=110).print(table)
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} threads; formula: {formula / 1e9:.0f} GFLOP"
    )


if __name__ == "__main__":
    main()
