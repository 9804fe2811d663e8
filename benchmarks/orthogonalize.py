"""Time of orthogonalization by shape: this package's forms, plain torch, and torch.optim.Muon's.

    make bench BENCHMARKS=benchmarks/orthogonalize.py ARGS="--rounds 9"

All contenders get the same fp32 matrices and take turns, a round being one sample of each; a sample
is as many calls as fill 20 ms of an accelerator. There, calls take inputs in turn that together
exceed the L2 cache, as a step finds them, whereas what an iteration writes may stay in it, as in a
step. FLOPs are counted, not timed:

- FLOPs / plain: of the form that was run (`Form.flops`), over 20·s²l + 10·s³.
- effective: the plain formula's FLOPs over the least time; done: those of the form.
- of ceiling: what was done, over the best rate of a square torch.mm in the same arithmetic, which
  takes turns with the contenders.

Plain torch is the textbook iteration in bf16, by bmm. The bare loop is its products alone, in
place: what others take beyond it is normalization, conversions and memory. torch.optim.Muon's
function takes one matrix: of a batch it is called for each. On CPUs a second table has the
arithmetic that is chosen by default beside fp32 and bf16, and fp32 in exact mode, one matrix after
the other, and the ratio of torch.optim.Muon's function to the default, the median over the rounds.
What the kernels of symmetric products contribute on accelerators, symmetric_products.py tells.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from symmetric_products import ON_ACCELERATORS, Shape, parse_shape
from timing import (
    LEAST_SAMPLE,
    Ceilings,
    Seconds,
    add_cpu_time,
    least_sample,
    load_kernel,
    machine,
    milliseconds,
    pick_device,
    show,
    take_turns,
)

PLAIN, THEIRS, DEFAULT = "plain torch, bf16", "torch.optim.Muon's", "default"
BARE = "bare loop, bf16"
QUINTIC = (3.4445, -4.7750, 2.0315)

ON_CPU: list[Shape] = [
    *((1, 256, 256), (1, 512, 512), (1, 512, 2048), (1, 1024, 1024), (1, 1024, 4096)),
    *((4, 768, 2048), (12, 512, 512), (48, 256, 256)),
]
BEYOND_L2 = 256 << 20  # bytes


@dataclass(frozen=True)
class Contender:
    """One way to orthogonalize matrices of one shape.

    Args:
        form: in words.
        why: it is run in this form.
        flops: what it does to one matrix.
        dtype: its arithmetic.
        function: of a batch (n, rows, cols).
    """

    form: str
    why: str
    flops: int
    dtype: torch.dtype
    function: Callable[[Tensor], object]


def contenders_of(kernel: Any, shape: Shape, device: torch.device) -> dict[str, Contender]:
    ns = kernel.newton_schulz
    _, rows, cols = shape
    found = {}
    for algorithm in ("auto", "standard", "gram"):
        recipe = ns.recipe_for("polar_express", None, algorithm, None, torch.float32, device)
        form = recipe.form(rows, cols)
        kind = "gram" if form.is_gram else "standard"
        restarts = f", restarts {' '.join(map(str, form.restarts))}"
        found[algorithm] = Contender(
            f"{kind}{restarts if form.is_gram else ''}, {form.products}",
            form.why,
            form.flops(rows, cols),
            recipe.dtype,
            partial(ns.newton_schulz, algorithm=algorithm),
        )
    whole = plain_flops(rows, cols)
    found[PLAIN] = Contender("standard, whole", "", whole, torch.bfloat16, plain)
    found[BARE] = Contender("standard, whole", "", whole, torch.bfloat16, bare)
    found[THEIRS] = Contender("standard, whole, one by one", "", whole, torch.bfloat16, theirs)
    return found


def arithmetics_of(kernel: Any) -> dict[str, Callable[[Tensor], object]]:
    ns = kernel.newton_schulz.newton_schulz
    return {
        DEFAULT: ns,
        "fp32": partial(ns, dtype=torch.float32),
        "bf16": partial(ns, dtype=torch.bfloat16),
        "fp32, exact mode": partial(ns, dtype=torch.float32, batch_invariant=True),
        THEIRS: theirs,
    }


def arithmetic_row(kernel: Any, shape: Shape, rounds: int, clock: Callable[[], float]) -> list[str]:
    """Least milliseconds of each arithmetic on one shape."""
    G, arithmetics = torch.randn(shape), arithmetics_of(kernel)
    calls = {name: partial(function, G) for name, function in arithmetics.items()}
    seconds = take_turns(calls, rounds, LEAST_SAMPLE["cpu"], clock)
    least = {name: min(of) for name, of in seconds.items()}
    ratio = statistics.median(map(operator.truediv, seconds[THEIRS], seconds[DEFAULT]))
    faster = min(least["fp32"], least["bf16"])
    times = (milliseconds([seconds])[0] for seconds in least.values())
    return [name_of(shape), *times, f"{least[DEFAULT] / faster:.2f}", f"{ratio:.2f}"]


def plain_flops(rows: int, cols: int, steps: int = 5) -> int:
    """4·s²l + 2·s³ for each step, a multiply-add counted as two."""
    s, l = sorted((rows, cols))
    return steps * (4 * s * s * l + 2 * s**3)


def plain(G: Tensor) -> Tensor:  # (n, rows, cols)
    """Jordan et al. 2024, as their reference implementation has it, over a batch."""
    X = G.bfloat16()
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        A = torch.bmm(X, X.mT)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X.mT if tall else X


def bare(G: Tensor) -> Tensor:  # (n, rows, cols)
    X, Y, R, Z = _at_norm_1(G.shape, G.device)
    a, b, c = QUINTIC
    for _ in range(5):
        is_tall = X.shape[-2] > X.shape[-1]
        torch.bmm(*((X.mT, X) if is_tall else (X, X.mT)), out=R)
        torch.baddbmm(R, R, R, beta=b, alpha=c, out=Z)
        torch.baddbmm(X, *((X, Z) if is_tall else (Z, X)), beta=a, out=Y)
        X, Y = Y, X
    return X


@functools.cache
def _at_norm_1(shape: Shape, device: torch.device) -> list[Tensor]:
    """X of about that norm, and room for X, R and Z."""
    n, rows, cols = shape
    G = torch.randn(shape, device=device).mul_(1 / math.sqrt(rows * cols)).bfloat16()
    squares = torch.empty(2, n, min(rows, cols), min(rows, cols), device=device).bfloat16()
    return [G, torch.empty_like(G), *squares]


def theirs(G: Tensor) -> list[Tensor]:
    return [_zeropower_via_newtonschulz(matrix, QUINTIC, 5, 1e-7) for matrix in G]


def inputs_of(shape: Shape, device: torch.device) -> list[Tensor]:
    """Equal batches; on accelerators so many that no cache holds them all."""
    G = torch.randn(shape, device=device)
    copies = 1 if device.type == "cpu" else math.ceil(BEYOND_L2 / (4 * G.numel()))
    return [G, *(G.clone() for _ in range(min(64, copies) - 1))]


def time_shape(
    contenders: dict[str, Contender],
    shape: Shape,
    device: torch.device,
    ceilings: Ceilings,
    rounds: int,
    clock: Callable[[], float],
) -> Seconds:
    inputs = inputs_of(shape, device)

    def in_turn(function: Callable[[Tensor], object]) -> Callable[[], object]:
        cycle = itertools.cycle(inputs)
        return lambda: function(next(cycle))

    calls = {name: in_turn(contender.function) for name, contender in contenders.items()}
    calls = {**calls, **ceilings.contenders}
    seconds = take_turns(calls, rounds, least_sample(device), clock)
    ceilings.take(seconds)
    return seconds


COLUMNS = (
    *("matrices", "contender", "form", "GFLOP", "FLOPs\n/ plain", "least ms", "median ms"),
    *("effective\nTFLOP/s", "done\nTFLOP/s", "of\nceiling", "× plain\ntorch"),
)


def rows_of(
    shape: Shape, contenders: dict[str, Contender], seconds: Seconds, ceilings: Ceilings
) -> list[list[str]]:
    count, rows, cols = shape
    whole, found = plain_flops(rows, cols), []
    for name, contender in contenders.items():
        least = min(seconds[name])
        done = count * contender.flops / least
        found.append(
            [
                name_of(shape),
                name,
                contender.form,
                f"{count * contender.flops / 1e9:.2f}",
                f"{contender.flops / whole:.2f}",
                *milliseconds(seconds[name]),
                f"{count * whole / least / 1e12:.3g}",
                f"{done / 1e12:.3g}",
                f"{done / ceilings.flops_per_second(contender.dtype):.2f}",
                f"{min(seconds[PLAIN]) / least:.2f}",
            ]
        )
    return found


def name_of(shape: Shape) -> str:
    count, rows, cols = shape
    return f"{rows} × {cols}" + (f", {count}" if count > 1 else "")


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, help="ROWSxCOLS or ROWSxCOLSxCOUNT"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ceiling", nargs="+", type=int, help="sides of the square products")
    add_cpu_time(parser)
    parser.add_argument("--markdown", action="store_true", help="print tables in markdown")
    options = parser.parse_args(arguments)
    device, kernel = pick_device(), load_kernel()
    shapes = options.shapes or (ON_CPU if device.type == "cpu" else ON_ACCELERATORS)
    contenders = {shape: contenders_of(kernel, shape, device) for shape in shapes}
    dtypes = [c.dtype for of_shape in contenders.values() for c in of_shape.values()]
    ceilings = Ceilings(device, dtypes, options.ceiling)
    seconds = {
        shape: time_shape(contenders[shape], shape, device, ceilings, options.rounds, options.clock)
        for shape in shapes
    }
    rows = [row for s in shapes for row in rows_of(s, contenders[s], seconds[s], ceilings)]
    title = f"Orthogonalization of fp32 matrices, {options.rounds} rounds, {device.type}"
    show(title, COLUMNS, rows, markdown=options.markdown, left=3, width=170)
    for shape in shapes:
        auto = contenders[shape]["auto"]
        print(f"auto, {name_of(shape)}: {auto.form}, for {auto.why}")
    if device.type == "cpu":
        title = f"Least ms by arithmetic, {options.rounds} rounds"
        columns = ["matrices", *arithmetics_of(kernel), "default / faster\nof fp32, bf16"]
        columns.append(f"{THEIRS}\n/ default")
        rows = [arithmetic_row(kernel, s, options.rounds, options.clock) for s in shapes]
        show(title, columns, rows, markdown=options.markdown)
    print(f"{machine(device)}; {ceilings.tell()}")


if __name__ == "__main__":
    main()
