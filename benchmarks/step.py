"""Time, memory and FLOPs of one optimizer step beside torch.optim.Muon's, interleaved in one run.

    python benchmarks/step.py --layers 12 --dim 512 --ffn 2048

Both optimizers hold equal matrices and gradients and take turns (A B A B …), so that whatever else
the machine does falls on both. Memory is what a step allocates beyond what it started with, at its
highest point, counted from the storages of every tensor made in a step of its own.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import weakref
from collections.abc import Callable

import torch
from kernels import get_kernel
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that came to life inside the context: now, and at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs or {})) if _is(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self._seen:
                self._track(storage)
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


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
        with LiveBytes() as memory:
            step()
        with FlopCounterMode(display=False) as counter:
            step()
        table.add_row(
            name,
            f"{min(seconds[name]) * 1e3:.0f}",
            f"{statistics.median(seconds[name]) * 1e3:.0f}",
            f"{min(seconds[name]) / min(baseline):.2f}",
            f"{memory.peak / param_bytes:.2f}",
            f"{counter.get_total_flops() / formula:.3f} × formula",
        )
    Console(width=110).print(table)
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} threads; formula: {formula / 1e9:.0f} GFLOP"
    )


if __name__ == "__main__":
    main()
