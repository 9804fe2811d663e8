"""Time of projections that are updated head by head, beside the same projections as whole matrices.

    make bench BENCHMARKS=benchmarks/per_head.py ARGS="--layers 2"

The first table has the iteration alone, on all matrices of one projection at once: (heads, rows of
a head, columns) beside (1, rows, columns). The second has whole steps of a transformer's layers by
`Muon.for_model`, with ``per_head`` and without. Contenders take turns. FLOPs are those of the forms
that were chosen; the rate is FLOPs over the least time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from timing import (
    add_cpu_time,
    least_sample,
    load_kernel,
    machine,
    milliseconds,
    pick_device,
    show,
    take_turns,
)

# Heads, and rows and columns of each.
PROJECTIONS = ["32x128x4096", "8x128x4096", "16x64x1024", "12x64x768"]
# Query and key heads, size of a head, hidden size, width of the feed-forward.
LAYERS = ["16x4x128x2048x5632", "16x16x64x1024x2816"]


class Layer(nn.Module):
    def __init__(self, heads: int, key_heads: int, head_dim: int, dim: int, ffn: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, key_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, key_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(dim, ffn, bias=False),
                "up_proj": nn.Linear(dim, ffn, bias=False),
            }
        )
        self.mlp["down_proj"] = nn.Linear(ffn, dim, bias=False)


def parse(sizes: str) -> list[int]:
    return list(map(int, sizes.split("x")))


def iteration_rows(kernel: Any, device: torch.device, options: Any) -> list[list[str]]:
    ns, rows = kernel.newton_schulz, []
    recipe = ns.recipe_for("polar_express", None, "auto", None, torch.float32, device)
    for heads, size, cols in map(parse, options.projections):
        shapes = {"whole": (1, heads * size, cols), "by head": (heads, size, cols)}
        inputs: dict[str, Tensor] = {n: torch.randn(s, device=device) for n, s in shapes.items()}
        calls: dict[str, Callable[[], object]] = {
            name: partial(ns.newton_schulz, G) for name, G in inputs.items()
        }
        seconds = take_turns(calls, options.rounds, least_sample(device), options.clock)
        whole = min(seconds["whole"])
        for name, (count, *shape) in shapes.items():
            flops, least = count * recipe.flops(*shape), min(seconds[name])
            rates = f"{flops / 1e9:.2f}", f"{flops / least / 1e9:.0f}", f"{least / whole:.2f}"
            rows.append(
                [f"{count} × {shape[0]} × {shape[1]}", *milliseconds(seconds[name]), *rates]
            )
    return rows


def step_rows(kernel: Any, device: torch.device, options: Any) -> list[list[str]]:
    rows = []
    for sizes in map(parse, options.sizes):
        name = f"heads of {sizes[2]} × {sizes[3]}"
        calls: dict[str, Callable[[], object]] = {}
        counts = {}
        for how, per_head in (("whole", False), ("by head", True)):
            layers = nn.ModuleList(Layer(*sizes) for _ in range(options.layers)).to(device)
            optim = kernel.Muon.for_model(layers, lr=1e-3, per_head=per_head, none_grad=False)
            for param in layers.parameters():
                param.grad = torch.randn_like(param)
            optim.step()
            counts[how] = sum(row["matrices"] for row in optim.summary().rows)
            calls[how] = optim.step
        seconds = take_turns(calls, options.rounds, 0.0, options.clock)
        for how, of in seconds.items():
            ratio = f"{min(of) / min(seconds['whole']):.2f}"
            rows.append([f"{name}, {how}", str(counts[how]), *milliseconds(of), ratio])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--projections", nargs="+", default=PROJECTIONS, metavar="HxRxC")
    parser.add_argument("--sizes", nargs="+", default=LAYERS, metavar="HxKxRxCxF")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", action="store_true", help="print tables in markdown")
    add_cpu_time(parser)
    options = parser.parse_args(arguments)
    device, kernel = pick_device(), load_kernel()
    times = ("least ms", "median ms")
    show(
        f"Iterations of a projection, {options.rounds} rounds",
        ("matrices", *times, "GFLOP", "GFLOP/s", "× whole"),
        iteration_rows(kernel, device, options),
        markdown=options.markdown,
    )
    show(
        f"Steps of {options.layers} layers, {options.rounds} rounds",
        ("projections", "matrices", *times, "× whole"),
        step_rows(kernel, device, options),
        markdown=options.markdown,
    )
    print(machine(device))


if __name__ == "__main__":
    main()
