"""Time and memory of the maxima of attention logits, beside attention itself.

    make bench BENCHMARKS=benchmarks/qk_logits.py ARGS="--rounds 9"

`max_qk_logits`, torch's scaled_dot_product_attention (the forward of a layer), and the maximum over
the whole score matrix, in fp32, take turns on the same causal queries and keys. Extra memory is the
most that a call holds beside its inputs: by the allocator of accelerators; on CPUs counted by
operations, which does not see inside attention's own ("–").
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from timing import (
    CHECKOUT,
    least_sample,
    load_kernel,
    machine,
    milliseconds,
    pick_device,
    show,
    synchronize,
    take_turns,
)

OURS, ATTENTION, WHOLE = "max_qk_logits", "attention, forward", "whole matrix, fp32"

Shape = tuple[int, int, int, int, int]  # batch, query heads, key heads, positions, width

ON_CPU: list[Shape] = [(1, 8, 8, 512, 128), (1, 8, 2, 2048, 128), (8, 8, 8, 256, 64)]
ON_ACCELERATORS: list[Shape] = [
    *((1, 32, 32, 4096, 128), (1, 32, 8, 8192, 128), (1, 128, 128, 4096, 192)),
    (16, 32, 32, 512, 64),
]
COLUMNS = ("B × Hq/Hk × T × D", "dtype", "contender", "least ms", "median ms", "MiB", "× attention")


def whole(q: Tensor, k: Tensor) -> Tensor:
    """Maxima over the score matrix of everything."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # (B, Hk, group, T, D)
    scores = (grouped @ k.float().mT.unsqueeze(2)).flatten(1, 2) * q.shape[-1] ** -0.5
    above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill_(above, -math.inf).amax((0, 2, 3))


def extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    if device.type == "cpu":
        sys.path.append(str(CHECKOUT / "tests"))
        from counters import count

        return count(call).peak_bytes
    synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    call()
    synchronize()
    return torch.accelerator.max_memory_allocated() - before


def rows_of(
    kernel: Any, shape: Shape, dtype: torch.dtype, device: torch.device, rounds: int
) -> list[list[str]]:
    B, Hq, Hk, T, D = shape
    q = torch.randn(B, Hq, T, D, device=device).to(dtype)
    k = torch.randn(B, Hk, T, D, device=device).to(dtype)
    contenders: dict[str, Callable[[], object]] = {
        OURS: partial(kernel.max_qk_logits, q, k),
        ATTENTION: partial(
            scaled_dot_product_attention, q, k, k, is_causal=True, enable_gqa=Hq != Hk
        ),
        WHOLE: partial(whole, q, k),
    }
    seconds = take_turns(contenders, rounds, least_sample(device))
    rows = []
    for name, call in contenders.items():
        unseen = device.type == "cpu" and name == ATTENTION
        rows.append(
            [
                f"{B} × {Hq}/{Hk} × {T} × {D}",
                str(dtype).removeprefix("torch."),
                name,
                *milliseconds(seconds[name]),
                "–" if unseen else f"{extra_bytes(call, device) / 2**20:.1f}",
                f"{min(seconds[name]) / min(seconds[ATTENTION]):.2f}",
            ]
        )
    return rows


def parse_shape(text: str) -> Shape:
    """BxHQxHKxTxD."""
    numbers = [int(part) for part in text.split("x")]
    if len(numbers) != 5 or min(numbers) < 1 or numbers[1] % numbers[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not BxHQxHKxTxD, with HQ a multiple of HK")
    batch, query_heads, key_heads, positions, width = numbers
    return batch, query_heads, key_heads, positions, width


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", type=parse_shape, help="BxHQxHKxTxD")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", action="store_true", help="print tables in markdown")
    options = parser.parse_args(arguments)
    device, kernel = pick_device(), load_kernel()
    shapes = options.shapes or (ON_CPU if device.type == "cpu" else ON_ACCELERATORS)
    rows = [
        row
        for shape in shapes
        for dtype in (torch.bfloat16, torch.float32)
        for row in rows_of(kernel, shape, dtype, device, options.rounds)
    ]
    title = f"Maxima of causal attention logits, {options.rounds} rounds, {device.type}"
    show(title, COLUMNS, rows, markdown=options.markdown, left=3)
    print(machine(device))


if __name__ == "__main__":
    main()
