"""Orthogonalization: replaces a matrix by (nearly) its polar factor, with matrix products alone.

Each iteration maps every singular value σ to aσ + bσ³ + cσ⁵ and leaves the singular vectors as they
are, so a few well-chosen (a, b, c) push all singular values towards 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Optional, Union

import torch
from torch import Tensor

from .scratch import Scratch

Triple = tuple[float, float, float]
Coefficients = Union[str, Sequence[Sequence[float]]]

NORMS = ("frobenius", "schatten4")
ALGORITHMS = ("auto", "standard")

# Matrices are brought to norm 1 in fp32, this many bytes of it at once.
NORMALIZE_BYTES = {"cpu": 2 << 20}
DEFAULT_NORMALIZE_BYTES = 64 << 20

DEFAULT_STEPS = 5

# Of a scheduled family, one more step than it was computed for: σ ← (15σ − 10σ³ + 3σ⁵)/8, the
# quintic with p(1) = 1 and p'(1) = p''(1) = 0 (Björck & Bowie 1971, order 3).
CONVERGING: Triple = (15 / 8, -10 / 8, 3 / 8)


@dataclass(frozen=True)
class Family:
    """Published polynomials of one name.

    Args:
        triples: (a, b, c) of each iteration; a constant family has one, used for any count.
        source: where the literals were published.
        norm_factor: the input is divided by its norm times this (a safety margin of the source).
        safety: in 16-bit arithmetic the polynomials but the last are those of σ/safety: a rounded
            singular value may exceed the interval that a schedule without margins was made for,
            and be driven away from 1 from then on.
    """

    triples: tuple[Triple, ...]
    source: str
    norm_factor: float = 1.0
    safety: float = 1.0

    @property
    def constant(self) -> bool:
        return len(self.triples) == 1


FAMILIES: dict[str, Family] = {
    "quintic": Family(
        ((3.4445, -4.7750, 2.0315),),
        "Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks",
    ),
    "you": Family(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "You 2025, per-iteration coefficients by gradient descent",
    ),
    "polar_express": Family(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        "Amsel et al. 2025, arXiv:2505.16932, 5 iterations, safety 2e-2, cushion 2",
        norm_factor=1.02,
    ),
    "cans": Family(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        "Grishina et al. 2025, arXiv:2506.10935",
        safety=1.01,
    ),
    "cubic5": Family(
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        "optimal cubics composed, same method as polar_express; c = 0 saves the product A²",
    ),
}


@dataclass(frozen=True)
class Iteration:
    """What one matrix goes through: the polynomials, and their margins (see `Family`)."""

    triples: tuple[Triple, ...]
    norm_factor: float = 1.0
    safety: float = 1.0

    def in_arithmetic(self, dtype: torch.dtype) -> tuple[Triple, ...]:
        """The polynomials to run in ``dtype``."""
        if self.safety == 1.0 or torch.finfo(dtype).bits > 16:
            return self.triples
        s = self.safety
        guarded = tuple((a / s, b / s**3, c / s**5) for a, b, c in self.triples[:-1])
        return guarded + self.triples[-1:]

    def largest_singular_value(self, points: int = 2000) -> float:
        """The largest value any singular value in (0, 1] is mapped to (on a grid)."""
        largest = 0.0
        for i in range(1, points + 1):
            x = i / points / self.norm_factor
            for a, b, c in self.triples:
                x = x * (a + x * x * (b + c * x * x))
            largest = max(largest, abs(x))
        return largest


def resolve(coefficients: Coefficients, steps: Optional[int] = None) -> Iteration:
    """The polynomials of ``steps`` iterations; None is 5, or the length of an explicit list.

    A constant family repeats. Of a scheduled one, fewer steps take the first ones and more continue
    with `CONVERGING`: cycling a schedule made for a fixed count can turn the update around.

    Raises:
        ValueError: unknown family; an explicit list that is not ``steps`` triples of numbers.
    """
    if isinstance(coefficients, str):
        return _resolve_family(coefficients, DEFAULT_STEPS if steps is None else steps)
    if not coefficients or not all(map(_is_triple, coefficients)):
        raise ValueError(
            "ns_coefficients must be a family name or a list of (a, b, c), one for each step, "
            f"found {coefficients!r}"
        )
    triples = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    if steps is not None and len(triples) != steps:
        raise ValueError(
            f"ns_coefficients lists {len(triples)} iterations but ns_steps is {steps}: "
            "an explicit list sets the count itself, leave ns_steps out or make them equal"
        )
    return Iteration(triples)


def _is_triple(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 3
        and all(isinstance(x, Real) and math.isfinite(x) for x in value)
    )


@functools.cache
def _resolve_family(name: str, steps: int) -> Iteration:
    if name not in FAMILIES:
        raise ValueError(f"unknown ns_coefficients {name!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if family.constant:
        return Iteration(family.triples * steps, family.norm_factor, family.safety)
    missing = max(0, steps - len(family.triples))
    triples = family.triples[:steps] + (CONVERGING,) * missing
    return Iteration(triples, family.norm_factor, family.safety)


@functools.cache
def overshoot(name: str, steps: int) -> Optional[float]:
    """Largest singular value of a shortened schedule where it exceeds 1.5, else None.

    The first polynomials of a schedule overshoot on purpose and count on the later ones.
    """
    family = FAMILIES[name]
    if family.constant or steps >= len(family.triples):
        return None
    largest = _resolve_family(name, steps).largest_singular_value()
    return largest if largest > 1.5 else None


def default_dtype(matrix_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Arithmetic of the iteration where ``ns_dtype`` is None.

    float64 stays float64. Otherwise bfloat16 where matrix products in it are fast (accelerators,
    and CPUs whose oneDNN has it), else float32. float16 is never picked: on CPUs it is far slower.
    """
    if matrix_dtype == torch.float64:
        return torch.float64
    if device.type == "cpu":
        return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
    return torch.float32 if device.type == "mps" else torch.bfloat16


@functools.cache
def _cpu_has_bfloat16() -> bool:
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(probe is not None and torch.backends.mkldnn.is_available() and probe())


def flops(rows: int, cols: int, triples: Sequence[Triple]) -> int:
    """FLOPs of the standard form for one matrix, a multiply-add counted as two.

    With s ≤ l the two sides: XXᵀ and BX take 2s²l each, A² takes 2s³ (none where c = 0). Five
    quintic steps: 20·s²l + 10·s³.
    """
    s, l = min(rows, cols), max(rows, cols)
    squares = sum(1 for triple in triples if triple[2] != 0.0)
    return len(triples) * 4 * s * s * l + squares * 2 * s**3


@torch.no_grad()
def newton_schulz(
    G: Tensor,  # (..., rows, cols)
    steps: Optional[int] = None,
    coefficients: Coefficients = "polar_express",
    *,
    norm: str = "frobenius",
    algorithm: str = "auto",
    dtype: Optional[torch.dtype] = None,
    eps: float = 1e-7,
    scratch: Optional[Scratch] = None,
) -> Tensor:
    """Approximate polar factor U of every matrix of ``G``: if G = PΣQᵀ, then U ≈ PQᵀ.

    Iterates A = XXᵀ, X ← aX + (bA + cA²)X on the shorter side (Jordan et al. 2024), from X = G
    divided by its norm.

    Args:
        G: matrices (..., rows, cols), real floating point; leading dimensions are a batch.
        steps: number of iterations; None is 5, or what an explicit list of coefficients has.
        coefficients: a family of `FAMILIES`, or the (a, b, c) of each iteration.
        norm: ``"frobenius"`` or ``"schatten4"`` (‖XXᵀ‖_F^½, a tighter bound on the largest
            singular value, at the price of one more Gram product here).
        algorithm: ``"auto"`` or ``"standard"``.
        dtype: arithmetic of the iteration; None picks by device (`default_dtype`).
        eps: added to the norm of the matrix after its largest magnitude was scaled to 1, so that
            it acts alike on a matrix and on 1e-30 times that matrix.
        scratch: buffers to work in; with them, ``G`` is overwritten and U lies in one of them.
            Without them ``G`` is not modified and U is new.

    Returns:
        U (..., rows, cols) in the arithmetic dtype. Zero matrices give zeros, matrices with Inf or
        NaN give NaN, empty ones stay empty.

    Raises:
        ValueError: fewer than two dimensions, complex or integer input, unknown options.
    """
    if G.ndim < 2 or not G.is_floating_point():
        raise ValueError(
            f"newton_schulz takes real matrices (..., rows, cols), found {tuple(G.shape)} {G.dtype}"
        )
    if norm not in NORMS or algorithm not in ALGORITHMS:
        raise ValueError(
            f"norm must be one of {NORMS} and algorithm one of {ALGORITHMS}, "
            f"found {norm!r} and {algorithm!r}"
        )
    iteration = resolve(coefficients, steps)
    dtype = dtype or default_dtype(G.dtype, G.device)
    if G.numel() == 0:
        return G.to(dtype, copy=True)
    batch = G.reshape(-1, *G.shape[-2:])  # (n, rows, cols)
    overwrite, scratch = scratch is not None, scratch or Scratch()
    if overwrite and G.dtype == dtype:
        X = batch
    else:
        X = scratch.empty("X", batch.shape, dtype, G.device)
    limit = NORMALIZE_BYTES.get(G.device.type, DEFAULT_NORMALIZE_BYTES)
    at_once = max(1, limit // (4 * G.shape[-2] * G.shape[-1]))
    for matrices, out in zip(batch.split(at_once), X.split(at_once)):
        _normalize(matrices, norm, iteration.norm_factor, eps, overwrite, scratch, out)
    return _iterate(X, iteration.in_arithmetic(dtype), scratch).view(G.shape)


def _normalize(
    G: Tensor, norm: str, factor: float, eps: float, overwrite: bool, scratch: Scratch, out: Tensor
) -> None:
    """``G / (factor · ‖G‖ + eps)`` per matrix, rounded once into ``out``; norms in fp32 or fp64."""
    dtype = torch.promote_types(G.dtype, torch.float32)
    # Squares of values under 1e-19 vanish in fp32: bring the largest magnitude to 1 first.
    sides = (-2, -1)
    largest = torch.maximum(G.amax(sides, keepdim=True), -G.amin(sides, keepdim=True)).to(dtype)
    largest.masked_fill_(largest == 0, 1.0)  # (n, 1, 1)

    def divided(rows: Tensor) -> Tensor:
        if overwrite and rows.dtype == dtype:
            return rows.div_(largest)
        return scratch.empty("wide", rows.shape, dtype, rows.device).copy_(rows).div_(largest)

    # A large matrix in 16 bits goes by in rows, twice, rather than being copied to fp32 whole.
    narrow = norm == "frobenius" and G.dtype != dtype
    limit = NORMALIZE_BYTES.get(G.device.type, DEFAULT_NORMALIZE_BYTES)
    rows_at_once = max(1, limit // (4 * len(G) * G.shape[-1])) if narrow else G.shape[-2]
    slices = G.split(rows_at_once, dim=-2)
    norms = []
    for rows in slices:
        X = divided(rows)
        if norm == "schatten4":
            X_gram = X.mT @ X if X.shape[-2] > X.shape[-1] else X @ X.mT
            norms.append(torch.linalg.vector_norm(X_gram, dim=sides, keepdim=True).sqrt_())
        else:
            norms.append(torch.linalg.vector_norm(X, dim=sides, keepdim=True))
    size = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)
    size.mul_(factor).add_(eps)
    size.masked_fill_(size == 0, 1.0)  # a zero matrix without eps
    if len(slices) == 1:
        torch.div(X, size, out=out)
    else:
        for rows, of_rows in zip(slices, out.split(rows_at_once, dim=-2)):
            torch.div(divided(rows), size, out=of_rows)


def _iterate(X: Tensor, triples: Sequence[Triple], scratch: Scratch) -> Tensor:
    """The standard form on (n, rows, cols), whose storage is used too."""
    n, rows, cols = X.shape
    tall = rows > cols
    side = min(rows, cols)
    A = scratch.empty("A", (n, side, side), X.dtype, X.device)
    B = scratch.empty("B", (n, side, side), X.dtype, X.device)
    Y = scratch.empty("Y", X.shape, X.dtype, X.device)
    for a, b, c in triples:
        if tall:
            torch.bmm(X.mT, X, out=A)
        else:
            torch.bmm(X, X.mT, out=A)
        if c == 0.0:
            factor, alpha = A, b
        else:
            factor, alpha = torch.baddbmm(A, A, A, beta=b, alpha=c, out=B), 1.0
        left, right = (X, factor) if tall else (factor, X)
        torch.baddbmm(X, left, right, beta=a, alpha=alpha, out=Y)
        X, Y = Y, X
    return X
