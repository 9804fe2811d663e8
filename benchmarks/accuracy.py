"""Accuracy of orthogonalization: its result beside float64's, for inputs easy and hard.

    make bench BENCHMARKS=benchmarks/accuracy.py ARGS="--markdown"

The reference shares nothing with the iteration: of G = PΣQᵀ, by a singular value decomposition in
float64, the same polynomials applied to Σ give PpQᵀ, and ones in the place of Σ the polar factor;
what is zero in Σ stays zero. Errors are relative, in the Frobenius norm:

- error: distance to the same polynomials in float64; what arithmetic and wire add.
- polar: distance to the polar factor; the polynomials' own part included.
- σ: least and largest singular value of the result, as many as the input has that are not zero.
- null: the largest of the others.

The plain loop is that of other Muons, with the same polynomials: bf16 throughout, the norm too.

Where a wire is named, the matrix is rounded to its dtype before the iteration. fp16 is
accelerators' arithmetic. A CPU reproduces it, with products in fp32, one rounding, and mirrored
halves, in the form that an accelerator takes.

Momentum is taken from a run of examples/train.py: its width is 128, and in a second run 512. Lines
are the worst of all shapes, or of all matrices of the last layer.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inputs import MADE, momentum
from timing import load_kernel, machine, pick_device, show

SHAPES = [(512, 512), (512, 2048), (1024, 1024)]
MOMENTUM = {128: 100, 512: 30}  # steps by width
FAMILIES = ("quintic", "you", "polar_express", "cans", "cubic5")

# Of the accelerators' default: errors by input, and singular values.
STRICT = ("Gaussian", "condition 1e4", "condition 1e8", "power law", "spiked")
BOUNDS = dict.fromkeys(STRICT, 0.02)
BOUNDS |= {"rank s/16": 0.07, "rank 2": 0.3, "rank 1": 0.3}
DEFAULT_BOUND = 0.05
LARGEST_SIGMA = 1.25


@dataclass(frozen=True)
class Setting:
    """How a matrix is orthogonalized.

    Args:
        dtype: of the arithmetic.
        wire: dtype in which matrices travel before; None: they do not.
        family, algorithm: as `newton_schulz` takes them.
        accelerators: "auto" is what accelerators take.
    """

    dtype: torch.dtype
    wire: torch.dtype | None
    family: str = "polar_express"
    algorithm: str = "auto"
    accelerators: bool = False


PLAIN = "plain bf16 loop"

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
WIRES = {FP16: None, BF16: BF16, FP32: None}
DEFAULTS = {
    "accelerators: fp16": Setting(FP16, None, accelerators=True),
    "accelerators: fp16, bf16 wire": Setting(FP16, BF16, accelerators=True),
    "CPUs: bf16": Setting(BF16, BF16),
    "fp32": Setting(FP32, None),
    "fp32, bf16 wire": Setting(FP32, BF16),
}


@dataclass(frozen=True)
class Errors:
    """See the head of this file."""

    error: float
    polar: float
    least: float
    largest: float
    null: float
    polar_of_float64: float


@dataclass(frozen=True)
class Decomposed:
    """A matrix and its singular value decomposition in float64; sigmas that are zero left out."""

    G: Tensor  # (rows, cols) in fp32
    P: Tensor  # (rows, r)
    sigmas: Tensor  # (r,)
    Qt: Tensor  # (r, cols)

    @classmethod
    def of(cls, G: Tensor) -> Decomposed:
        P, sigmas, Qt = torch.linalg.svd(G.double().cpu(), full_matrices=False)
        kept = sigmas > sigmas[0] * max(G.shape) * torch.finfo(torch.float64).eps
        return cls(G, P[:, kept], sigmas[kept], Qt[kept])


def errors_of(kernel: Any, matrix: Decomposed, setting: Setting, device: torch.device) -> Errors:
    ns = kernel.newton_schulz
    algorithm = setting.algorithm
    recipe = partial(ns.recipe_for, setting.family, None, algorithm, setting.dtype)
    planned = torch.device("cuda") if setting.accelerators and device.type == "cpu" else device
    form = recipe(FP32, planned).form(*matrix.G.shape)
    if algorithm == "auto":
        algorithm = "gram" if form.is_gram else "standard"
    G = matrix.G.to(device, setting.wire)
    U = ns.newton_schulz(G, None, setting.family, algorithm=algorithm, dtype=setting.dtype)
    return compare(U.cpu().double(), matrix, form.triples, ns.FAMILIES[setting.family])


def errors_of_plain_loop(kernel: Any, matrix: Decomposed, device: torch.device) -> Errors:
    family = kernel.newton_schulz.FAMILIES["polar_express"]
    X = matrix.G.to(device, BF16)
    tall = X.shape[0] > X.shape[1]
    X = X.mT if tall else X
    X = X / (X.norm() * family.norm_factor + 1e-6)
    for a, b, c in family.triples:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    U = (X.mT if tall else X).cpu().double()
    return compare(U, matrix, family.triples, family)


def compare(
    U: Tensor, matrix: Decomposed, triples: Iterable[Sequence[float]], family: Any
) -> Errors:
    sigmas = matrix.sigmas / matrix.sigmas.norm() / family.norm_factor
    for a, b, c in triples:
        sigmas = a * sigmas + b * sigmas**3 + c * sigmas**5
    same, polar = (matrix.P * sigmas) @ matrix.Qt, matrix.P @ matrix.Qt
    gram = U @ U.mT if U.shape[0] <= U.shape[1] else U.mT @ U
    if bool(gram.isfinite().all()):
        found = torch.linalg.eigvalsh(gram).clamp_min_(0).sqrt().flip(0)  # descending
    else:
        found = torch.full((len(gram),), torch.nan, dtype=torch.float64)
    rank = len(sigmas)
    return Errors(
        float((U - same).norm() / same.norm()),
        float((U - polar).norm() / polar.norm()),
        float(found[rank - 1]),
        float(found[0]),
        float(found[rank]) if rank < len(found) else 0.0,
        float((sigmas - 1).norm() / rank**0.5),
    )


def worst(found: Sequence[Errors]) -> Errors:
    def most(field: str) -> float:
        return max(getattr(errors, field) for errors in found)

    return Errors(
        most("error"),
        most("polar"),
        min(errors.least for errors in found),
        most("largest"),
        most("null"),
        most("polar_of_float64"),
    )


# -- inputs ----------------------------------------------------------------------------------------


def inputs_of(options: argparse.Namespace) -> Iterator[tuple[str, list[Decomposed]]]:
    """Decomposed once for all settings, and forgotten before the next ones."""
    for name, make in MADE.items():
        if name in options.inputs:  # the same matrices whatever else is asked for
            yield name, [Decomposed.of(make(r, c, seeded())) for r, c in options.shapes]
    for dim, steps in options.momentum.items() if "momentum" in options.inputs else ():
        matrices = [Decomposed.of(matrix) for _, matrix in momentum(dim, steps)]
        yield f"momentum, d = {dim}", matrices


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# -- tables ----------------------------------------------------------------------------------------

DEFAULT_COLUMNS = (
    *("input", "error", "bound", "σ", "null", "polar", "float64: polar"),
    *("bf16 wire: error", "null"),
)


def default_row(name: str, found: dict[str, Errors]) -> list[str]:
    """The accelerators' default and its bounds."""
    e, bound = found["accelerators: fp16"], BOUNDS.get(name, DEFAULT_BOUND)
    passes = e.error < bound and e.largest <= LARGEST_SIGMA
    of_wire = found["accelerators: fp16, bf16 wire"]
    return [
        *(name, percent(e.error), f"{'pass' if passes else 'FAIL'}: {bound:.0%}"),
        *(sigmas(e), null(e), percent(e.polar), percent(e.polar_of_float64)),
        *(percent(of_wire.error), null(of_wire)),
    ]


OTHER_COLUMNS = (
    *("input", "bf16, bf16 wire: error", "σ", "null", "polar", "fp32: error", "null"),
    *("fp32, bf16 wire: error", "null", "plain bf16 loop: error", "null"),
)


def other_row(name: str, found: dict[str, Errors]) -> list[str]:
    bf16, *others = (found[setting] for setting in [*list(DEFAULTS)[2:], PLAIN])
    row = [name, percent(bf16.error), sigmas(bf16), null(bf16), percent(bf16.polar)]
    for errors in others:
        row += [percent(errors.error), null(errors)]
    return row


def percent(value: float) -> str:
    return f"{value:.1%}" if value >= 0.1 else f"{value:.2%}" if value >= 1e-3 else f"{value:.1e}"


def sigmas(errors: Errors) -> str:
    return f"{errors.least:.2f}–{errors.largest:.2f}"


def null(errors: Errors) -> str:
    return f"{errors.null:.2f}" if errors.null else ""


ALL_COLUMNS = (
    *("input", "family", "form", "arithmetic", "error", "polar", "float64: polar"),
    *("σ", "null"),
)


def all_settings(options: argparse.Namespace) -> list[Setting]:
    return [
        Setting(dtype, WIRES[dtype], family, algorithm)
        for family, algorithm, dtype in itertools.product(
            options.families, ("standard", "gram"), WIRES
        )
    ]


def all_rows(
    name: str, matrices: Sequence[Decomposed], settings: Sequence[Setting], measure: Callable
) -> Iterator[list[str]]:
    for setting in settings:
        e = worst([measure(matrix, setting) for matrix in matrices])
        dtype = str(setting.dtype).removeprefix("torch.")
        yield [
            *(name, setting.family, setting.algorithm, dtype),
            *(percent(e.error), percent(e.polar), percent(e.polar_of_float64)),
            *(sigmas(e), null(e)),
        ]


ADVICE = """\
error: to the same polynomials in float64; polar: to the exact polar factor; σ: of the result, as
many as the input has that are not zero; null: the largest of the others. Worst of all shapes and
of all matrices of momentum. Bounds are those of the error; σ must not exceed 1.25.
Where bf16 is not good enough, set ns_dtype=torch.float32, and, where matrices travel,
comm_dtype=torch.float32: with ns_dtype alone they travel in bf16."""


def parse_shape(text: str) -> tuple[int, int]:
    rows, cols = map(int, text.split("x"))
    return rows, cols


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="also every family, form, arithmetic")
    inputs = (*MADE, "momentum")
    parser.add_argument("--inputs", nargs="+", choices=inputs, default=inputs, help="which")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=SHAPES, help="ROWSxCOLS")
    parser.add_argument("--quick", action="store_true", help="tiny matrices: to try the script")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is not kept")
    parser.add_argument("--markdown", action="store_true", help="print tables in markdown")
    options = parser.parse_args(arguments)
    options.momentum = MOMENTUM
    if options.quick:
        options.shapes, options.momentum = [(64, 96)], {64: 2}
    device, kernel = pick_device(), load_kernel()
    measure = partial(errors_of, kernel, device=device)

    shapes = ", ".join(f"{rows} × {cols}" for rows, cols in options.shapes)
    settings = all_settings(options) if options.all else []
    default_rows: list[list[str]] = []
    other_rows: list[list[str]] = []
    long_rows: list[list[str]] = []
    for name, matrices in inputs_of(options):
        found = {
            of: worst([measure(matrix, setting) for matrix in matrices])
            for of, setting in DEFAULTS.items()
        }
        found[PLAIN] = worst([errors_of_plain_loop(kernel, m, device) for m in matrices])
        default_rows.append(default_row(name, found))
        other_rows.append(other_row(name, found))
        long_rows += all_rows(name, matrices, settings, measure)
    title = f"Accelerators' default (fp16, auto, polar_express), {shapes}, {device.type}"
    show(title, DEFAULT_COLUMNS, default_rows, markdown=options.markdown)
    title = f"CPUs' default (bf16, bf16 wire), and fp32, {shapes}, {device.type}"
    show(title, OTHER_COLUMNS, other_rows, markdown=options.markdown, width=170)
    if options.all:
        title = f"Every form of every family, {shapes}, {device.type}"
        show(title, ALL_COLUMNS, long_rows, markdown=options.markdown, left=5)
    print(f"{ADVICE}\n{machine(device)}")
    if options.check and any(row[2].startswith("FAIL") for row in default_rows):
        raise SystemExit("the accelerators' default does not keep its bounds")


if __name__ == "__main__":
    main()
