"""Chooses how matrices of a shape are iterated: standard or Gram form, restarts, products, dtype.

The choice depends only on shape, dtypes, and device type, never on batch or mesh: a matrix follows
the same path on every layout.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Optional

import torch

from .. import triton_kernels
from .coefficients import Coefficients, Polynomials, Triple, resolve

ALGORITHMS = ("auto", "standard", "gram")

# Only one half of a symmetric product is computed if the shorter side is at least HALVES_FROM, in
# blocks or tiles of BLOCK_SIDES. For shorter sides, blocks are too small to multiply at full speed.
# CPUs copy the mirror image, so there a factor must also have at least BLOCKS_FROM entries; but
# fp32 products are so slow that halves always pay off. Never change the limits of exact mode: its
# last bits must stay the same.
HALVES_FROM = 512
BLOCK_SIDES = {"blocks": 256, "fp32 blocks": 256, "exact blocks": 256, "tiles": 128}
BLOCKS_FROM = {"blocks": 1 << 20, "exact blocks": 1 << 20}

# The Gram form is chosen if the shorter side is at least GRAM_FROM and it needs at most the share
# GRAM_FLOPS of the standard form's FLOPs. The share depends on the kind of product, and is less
# than 1 because more of the Gram form's work is in small products. benchmarks/orthogonalize.py and
# benchmarks/accuracy.py compare times and errors of both.
GRAM_FROM = 512
GRAM_FLOPS = {**dict.fromkeys(("whole", *BLOCK_SIDES), 0.92), "tiles": 0.95}

# Restarts of the Gram form: the iterations after which X is updated and XXᵀ computed from it. In
# between, only R, which represents XXᵀ, is iterated on, and rounding errors make R drift away. By
# family: restarts in bf16, and in other dtypes, for the family's own number of iterations and a
# shorter side of at least GRAM_FROM. These are the fewest restarts with which rounding errors, to
# first order, stay within 1.5 times those of the standard form, both for a random square matrix and
# for singular values over four orders of magnitude; and with which small singular values grow by
# no more than the bounds below in any segment of several iterations.
RESTARTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "quintic": ((2, 3), (3,)),
    "you": ((1, 3), (3,)),
    "polar_express": ((1, 3), (2, 3)),
    "cans": ((1, 2, 3), (2, 3)),
    "cubic5": ((1, 3), (3,)),
    "deepseekv4": ((2, 3, 5, 7, 8, 9), (3, 4, 7, 8, 9)),
}

# For other polynomials, and for shorter sides under GRAM_FROM, where fewer errors average out,
# segments have two iterations, or one if small singular values would grow by more than this in two.
# They grow by the product of the coefficients a. So does the error of a single large singular
# value, which may then exceed the peak of a polynomial, beyond which the next ones diverge.
MOST_GROWTH = 64.0
MOST_GROWTH_IN_BF16 = 16.0


@dataclass(frozen=True)
class Form:
    """How matrices of one shape are orthogonalized.

    Args:
        triples: the polynomials.
        restarts: the iterations after which X is updated, except the last one. In the standard
            form, these are all iterations.
        products: how symmetric products are computed, a key of `products.PRODUCTS`.
        why: a few words on why this form was chosen.
    """

    triples: tuple[Triple, ...]
    restarts: tuple[int, ...]
    products: str
    why: str

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The iterations [start, stop) of each segment, which lies between two restarts."""
        return list(zip((0, *self.restarts), (*self.restarts, len(self.triples))))

    @property
    def is_gram(self) -> bool:
        return len(self.restarts) + 1 < len(self.triples)

    def flops(self, rows: int, cols: int) -> int:
        """Returns the FLOPs for one matrix; a multiply-add counts as two.

        Let s ≤ l be the two sides. With whole products, a segment of m iterations needs 4s²l for
        XXᵀ and QX, and 2s³·(m + 3(m − 1)) for products of s × s matrices: m squares, fewer if some
        c = 0, and 3 more products in each iteration but one. Computing only one half of a symmetric
        product needs little more than half of its FLOPs.
        """
        s, l = min(rows, cols), max(rows, cols)
        if s == 0:
            return 0
        total = 0
        for start, stop in self.segments:
            squares = sum(1 for _, _, c in self.triples[start:stop] if c != 0.0)
            small = squares + 3 * (stop - start - 1)
            total += self._symmetric(s, l) + small * self._symmetric(s, s) + 2 * s * s * l
        return total

    def _symmetric(self, s: int, k: int) -> int:
        """Returns the FLOPs of a symmetric (s, k) × (k, s), in blocks up to the diagonal."""
        block = block_side(self.products, s, k)
        ends = [min(s, start + block) for start in range(0, s, block)]
        return sum(2 * (end - start) * end * k for start, end in zip([0, *ends], ends))


def block_side(products: str, s: int, k: int) -> int:
    """Returns the side of the blocks or tiles of (s, k) × (k, s); s for a whole product."""
    return BLOCK_SIDES.get(products, s) if s * k >= BLOCKS_FROM.get(products, 0) else s


@dataclass(frozen=True)
class Recipe:
    """How a group's matrices of any shape are orthogonalized on one type of device.

    Args:
        polynomials: the polynomials, before margins for the arithmetic.
        algorithm: one of `ALGORITHMS`.
        dtype: dtype of the iteration's arithmetic.
        batch_invariant: True for one matrix at a time, with the products of exact mode.
        equilibrate: True to scale rows to the same norm first.
        renormalize: True to scale the result to the norm of a polar factor.
    """

    polynomials: Polynomials
    algorithm: str
    dtype: torch.dtype
    device_type: str
    batch_invariant: bool = False
    equilibrate: bool = False
    renormalize: bool = False

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (there are few recipes)
    def form(self, rows: int, cols: int) -> Form:
        """Returns the form for matrices (rows, cols)."""
        s, l = min(rows, cols), max(rows, cols)
        triples, products = self.polynomials.in_arithmetic(self.dtype), self._products(s, l)
        standard = Form(triples, tuple(range(1, len(triples))), products, "as asked for")
        if self.algorithm == "standard":
            return standard
        if self.algorithm != "gram" and s < GRAM_FROM:
            return replace(standard, why=f"shorter side under {GRAM_FROM}")
        gram = replace(standard, restarts=self._restarts(triples, s))
        if self.algorithm == "gram":
            return gram
        # fp16 on CPUs imitates the arithmetic of accelerators, so it uses the same form.
        counted = "tiles" if products == "in_fp32" else products
        costs = (replace(form, products=counted).flops(s, l) for form in (gram, standard))
        share = next(costs) / max(1, next(costs))
        where = " on accelerators" if counted != products else ""
        if share <= GRAM_FLOPS[counted]:
            return replace(gram, why=f"{share:.2f} of the standard form's FLOPs{where}")
        return replace(standard, why=f"the Gram form needs {share:.2f} of its FLOPs{where}")

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (there are few recipes)
    def flops(self, rows: int, cols: int) -> int:
        """Returns the FLOPs of `form` for one matrix."""
        return self.form(rows, cols).flops(rows, cols)

    def _restarts(self, triples: tuple[Triple, ...], s: int) -> tuple[int, ...]:
        """Returns the restarts of the Gram form for triples with margins; s is the shorter side."""
        is_bf16 = self.dtype == torch.bfloat16
        for name, (in_bf16, in_others) in RESTARTS.items() if s >= GRAM_FROM else ():
            if self.polynomials.triples == resolve(name).triples:
                return in_bf16 if is_bf16 else in_others
        most = MOST_GROWTH_IN_BF16 if is_bf16 else MOST_GROWTH
        restarts, start = [], 0
        for stop in range(1, len(triples)):
            growth = abs(triples[stop - 1][0] * triples[stop][0])
            if stop - start == 2 or growth > most:
                restarts.append(stop)
                start = stop
        return tuple(restarts)

    def _products(self, s: int, l: int) -> str:
        if self.device_type == "cpu" and self.dtype == torch.float16:
            return "in_fp32"
        if s < HALVES_FROM:
            return "whole"
        if self.device_type == "cpu":
            if self.batch_invariant:
                return "exact blocks"
            return "blocks" if self.dtype == torch.bfloat16 else "fp32 blocks"
        has_kernels = self.device_type in triton_kernels.DEVICE_TYPES
        # Unless rows begin at multiples of 16 entries, kernels load entries one by one.
        fits = self.dtype != torch.float64 and s % 16 == l % 16 == 0
        return "tiles" if has_kernels and fits else "whole"


def recipe_for(
    coefficients: Coefficients,
    steps: Optional[int],
    algorithm: str,
    dtype: Optional[torch.dtype],
    matrix_dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    *,
    norm_factor: Optional[float] = None,
    equilibrate: bool = False,
    renormalize: bool = False,
) -> Recipe:
    """Returns the recipe for options of `newton_schulz`; raises ValueError as `resolve` does."""
    dtype = dtype or default_dtype(matrix_dtype, device)
    polynomials = resolve(coefficients, steps)
    if norm_factor is not None:
        polynomials = replace(polynomials, norm_factor=norm_factor)
    how = algorithm, dtype, device.type, batch_invariant
    return Recipe(polynomials, *how, equilibrate, renormalize)


def default_dtype(matrix_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of the iteration's arithmetic where ``ns_dtype`` is None.

    float64 matrices use float64. Accelerators use float16, which is as fast as bfloat16 and eight
    times as accurate (the singular values, at most about 1, fit its range), except Apple's GPUs,
    which use float32. CPUs use bfloat16 if they have instructions for its products, otherwise
    float32; float16 is far slower there.

    Args:
        matrix_dtype: dtype of the matrices.
        device: where they are orthogonalized.
    """
    if matrix_dtype == torch.float64:
        return torch.float64
    if device.type == "cpu":
        return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32
    return torch.float32 if device.type == "mps" else torch.float16


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    """Returns True if the CPU has instructions for bfloat16 products that oneDNN can use.

    On x86, oneDNN reports support for bfloat16 on every CPU with AVX-512. Without the instructions
    it widens every operand to fp32, and is five times slower than fp32, so this checks them, too.
    """
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if probe is None or not torch.backends.mkldnn.is_available() or not probe():
        return False
    if not torch.cpu._is_avx2_supported():  # not x86, where oneDNN's bf16 needs more than AVX2
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
