"""Each Triton kernel of symmetric products beside the whole product of the vendor's library.

Of one matrix the library is called by mm and by bmm, and the faster one counts.

    make bench BENCHMARKS=benchmarks/symmetric_products.py ARGS="--markdown"

For accelerators; without one the kernels are interpreted, which says nothing of their time. On CUDA
devices both are called from a graph, which leaves the host's launches out. Operands are warm, as
within an iteration. Effective rates count the whole product, of which a kernel computes half.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from timing import (
    least_sample,
    load_kernel,
    machine,
    milliseconds,
    pick_device,
    show,
    take_turns,
)

IN_A_ROW = 32  # calls
SQUARE = (-4.7750, 2.0315)  # b and c

Calls = dict[str, Callable[[], object]]
Shape = tuple[int, int, int]  # matrices, rows, cols

ON_CPU: list[Shape] = [(1, 32, 64)]
SIDES = [(1024, 1024), (1024, 4096), (4096, 4096), (4096, 14336), (7168, 2048)]
ON_ACCELERATORS: list[Shape] = [
    *((batch, *sides) for sides in SIDES for batch in (1, 8)),
    (128, 768, 2048),
]

COLUMNS = (
    *("product", "matrices", "kernel, least ms", "median ms", "library, least ms", "its median"),
    *("kernel, effective TFLOP/s", "library, effective TFLOP/s", "speed-up"),
)


def rows_of(
    kernel: Any,
    shapes: Sequence[Shape],
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
) -> list[list[str]]:
    """XXᵀ of every shape, and cA² + bA of every shorter side."""
    symmetric = importlib.import_module(f"{kernel.__name__}.triton_kernels.symmetric")
    found = []
    squares = dict.fromkeys((count, min(sides), min(sides)) for count, *sides in shapes)
    products = [(shape, False) for shape in shapes] + [(shape, True) for shape in squares]
    for (count, rows, cols), is_square in products:
        s, k = sorted((rows, cols))
        A = (torch.randn(count, s, k, device=device) / k**0.5).to(dtype)
        if is_square:
            A = A + A.mT
        calls = _square_calls if is_square else _gram_calls
        contenders = calls(symmetric.symmetric_product, A)
        repeated = {name: in_a_row(call, device) for name, call in contenders.items()}
        seconds = {
            name: [sample / IN_A_ROW for sample in samples]
            for name, samples in take_turns(repeated, rounds, least_sample(device)).items()
        }
        by_library = min(seconds.keys() - {"kernel"}, key=lambda name: min(seconds[name]))
        seconds["library"] = seconds[by_library]
        least = {name: min(samples) for name, samples in seconds.items()}
        found.append(
            [
                f"cA² + bA, {s}" if is_square else f"XXᵀ, {s} × {k}",
                f"{count}",
                *milliseconds(seconds["kernel"]),
                *milliseconds(seconds["library"]),
                f"{2 * count * s * s * k / least['kernel'] / 1e12:.3g}",
                f"{2 * count * s * s * k / least['library'] / 1e12:.3g}",
                f"{least['library'] / least['kernel']:.3f}",
            ]
        )
    return found


def _gram_calls(symmetric_product: Callable[..., object], A: Tensor) -> Calls:
    out = torch.empty(len(A), A.shape[1], A.shape[1], dtype=A.dtype, device=A.device)
    calls: Calls = {
        "kernel": lambda: symmetric_product(A, A.mT, 1.0, 0.0, out, out),
        "bmm": lambda: torch.bmm(A, A.mT, out=out),
    }
    if len(A) == 1:
        calls["mm"] = lambda: torch.mm(A[0], A[0].mT, out=out[0])
    return calls


def _square_calls(symmetric_product: Callable[..., object], A: Tensor) -> Calls:
    (b, c), out = SQUARE, torch.empty_like(A)
    calls: Calls = {
        "kernel": lambda: symmetric_product(A, A, c, b, A, out),
        "baddbmm": lambda: torch.baddbmm(A, A, A, alpha=c, beta=b, out=out),
    }
    if len(A) == 1:
        calls["addmm"] = lambda: torch.addmm(A[0], A[0], A[0], alpha=c, beta=b, out=out[0])
    return calls


def in_a_row(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`IN_A_ROW` calls, from a graph where there are graphs: small products end before the host has
    launched the next one."""

    def calls() -> None:
        for _ in range(IN_A_ROW):
            call()

    if device.type != "cuda":
        return calls
    call()  # compiles
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


def parse_shape(text: str) -> Shape:
    """ROWSxCOLS or ROWSxCOLSxCOUNT."""
    numbers = [int(part) for part in text.split("x")]
    if len(numbers) not in (2, 3) or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCOLS or ROWSxCOLSxCOUNT")
    rows, cols, count = (*numbers, 1)[:3]
    return count, rows, cols


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, help="ROWSxCOLS or ROWSxCOLSxCOUNT"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", action="store_true", help="print tables in markdown")
    options = parser.parse_args(arguments)
    device = pick_device()
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    kernel = load_kernel()
    shapes = options.shapes or (ON_CPU if device.type == "cpu" else ON_ACCELERATORS)
    for dtype in (torch.float16, torch.bfloat16):
        rows = rows_of(kernel, shapes, device, dtype, options.rounds)
        title = f"Symmetric products by halves, {dtype}, {device.type}"
        show(title, COLUMNS, rows, markdown=options.markdown)
    print(machine(device))


if __name__ == "__main__":
    main()
