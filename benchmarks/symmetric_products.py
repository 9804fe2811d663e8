"""Each Triton kernel of symmetric products beside the whole product of the vendor's library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from timing import least_sample, milliseconds, take_turns

IN_A_ROW = 32  # calls
SQUARE = (-4.7750, 2.0315)  # b and c

Calls = dict[str, Callable[[], object]]


COLUMNS = (
    *("product", "matrices", "kernel, least ms", "median ms", "library, least ms", "median ms"),
    *("kernel, effective TFLOP/s", "library", "speed-up"),
)


def rows_of(
    kernel: Any,
    shapes: Sequence[tuple[int, int, int]],
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
        least = {name: min(samples) for name, samples in seconds.items()}
        ratio = least["library"] / least["kernel"]
        found.append(
            [
                f"cA² + bA, {s}" if is_square else f"XXᵀ, {s} × {k}",
                f"{count}",
                *milliseconds(seconds["kernel"]),
                *milliseconds(seconds["library"]),
                f"{2 * count * s * s * k / least['kernel'] / 1e12:.3g}",
                f"{2 * count * s * s * k / least['library'] / 1e12:.3g}",
                f"{ratio:.2f}" + (" (slower)" if ratio < 1 else ""),
            ]
        )
    return found


def _gram_calls(symmetric_product: Callable[..., object], A: Tensor) -> Calls:
    out = torch.empty(len(A), A.shape[1], A.shape[1], dtype=A.dtype, device=A.device)
    return {
        "kernel": lambda: symmetric_product(A, A.mT, out=out),
        "library": lambda: torch.bmm(A, A.mT, out=out),
    }


def _square_calls(symmetric_product: Callable[..., object], A: Tensor) -> Calls:
    (b, c), out = SQUARE, torch.empty_like(A)
    return {
        "kernel": lambda: symmetric_product(A, A, alpha=c, beta=b, C=A, out=out),
        "library": lambda: torch.baddbmm(A, A, A, alpha=c, beta=b, out=out),
    }


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
