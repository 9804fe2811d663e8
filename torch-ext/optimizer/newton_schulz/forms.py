"""Decides in which form matrices of a shape are iterated, standard or Gram, and where the Gram form
restarts; tells dtype and cost.

The choice depends on shape, dtypes and device type alone, never on batch or mesh: a matrix takes
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

# A symmetric product is computed by halves if the shorter side is at least HALVES_FROM, in blocks
# or tiles of BLOCK_SIDES: for shorter sides, blocks are too small to be multiplied at full speed.
# CPUs copy the mirror image, so there a factor must also have at least BLOCKS_FROM entries. In fp32
# products take so long that halves always pay. For exact mode these limits never change, so that
# its last bits stay the same.
HALVES_FROM = 512
BLOCK_SIDES = {"blocks": 256, "fp32 blocks": 256, "exact blocks": 256, "tiles": 128}
BLOCKS_FROM = {"blocks": 1 << 20, "exact blocks": 1 << 20}

# The Gram form is chosen if the shorter side is at least GRAM_FROM, and if it takes at most the
# share GRAM_FLOPS, by the kind of product, of the standard form's FLOPs. The share is less than 1
# since the Gram form does more of its work in small products. benchmarks/orthogonalize.py and
# benchmarks/accuracy.py show times and errors of both.
GRAM_FROM = 512
GRAM_FLOPS = {**dict.fromkeys(("whole", *BLOCK_SIDES), 0.92), "tiles": 0.95}

# Where the Gram form restarts: after which iterations X is brought up to date, and XXᵀ computed
# from it. In between only R, which stands for XXᵀ, is iterated on, and rounding errors make R drift
# away from it. By family, for as many iterations as it was made for and a shorter side of at least
# GRAM_FROM: in bf16, and in other dtypes. These are the fewest restarts with which rounding errors,
# followed to first order, stay within 1.5 times those of the standard form, for a random square
# matrix and for singular values over four orders of magnitude; and with which small singular values
# grow in no segment of several iterations by more than the bounds below.
RESTARTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "quintic": ((2, 3), (3,)),
    "you": ((1, 3), (3,)),
    "polar_express": ((1, 3), (2, 3)),
    "cans": ((1, 2, 3), (2, 3)),
    "cubic5": ((1, 3), (3,)),
    "deepseekv4": ((2, 3, 5, 7, 8, 9), (3, 4, 7, 8, 9)),
}

# Other polynomials, and shorter sides under GRAM_FROM, where fewer errors average out, have
# segments of two iterations, or of one where small singular values would grow by more than this in
# the two. They grow by the product of the coefficients a, and the error of a single large singular
# value grows as much: it may pass the peak of a polynomial, where a little more makes the next
# polynomials diverge.
MOST_GROWTH = 64.0
MOST_GROWTH_IN_BF16 = 16.0


@dataclass(frozen=True)
class Form:
    """How matrices of one shape are orthogonalized.

    Args:
        triples: the polynomials.
        restarts: after which iterations, before the last, X is brought up to date; in the standard
            form, after each of them.
        products: how symmetric products are computed, a key of `products.PRODUCTS`.
        why: why this form was chosen, in a few words.
    """

    triples: tuple[Triple, ...]
    restarts: tuple[int, ...]
    products: str
    why: str

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The iterations of each segment, [start, stop): those between two restarts."""
        return list(zip((0, *self.restarts), (*self.restarts, len(self.triples))))

    @property
    def is_gram(self) -> bool:
        return len(self.restarts) + 1 < len(self.triples)

    def flops(self, rows: int, cols: int) -> int:
        """FLOPs for one matrix, a multiply-add counted as two.

        Let s ≤ l be the two sides. With whole products, a segment of m iterations takes 4s²l for
        XXᵀ and QX, and 2s³·(m + 3(m − 1)) for products of s × s matrices: m squares, fewer if some
        c = 0, and 3 further products in each iteration but one. A symmetric product by halves takes
        little more than half of its FLOPs.
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
        """FLOPs of a symmetric product (s, k) × (k, s), in blocks that end at the diagonal."""
        block = block_side(self.products, s, k)
        ends = [min(s, start + block) for start in range(0, s, block)]
        return sum(2 * (end - start) * end * k for start, end in zip([0, *ends], ends))


def block_side(products: str, s: int, k: int) -> int:
    """Side of the blocks, or tiles, in which (s, k) × (k, s) is computed; s for a whole product."""
    return BLOCK_SIDES.get(products, s) if s * k >= BLOCKS_FROM.get(products, 0) else s


@dataclass(frozen=True)
class Recipe:
    """How a group's matrices are orthogonalized on one type of device, whatever their shape.

    Args:
        polynomials: those of the iterations, before margins for the arithmetic.
        algorithm: of `ALGORITHMS`.
        dtype: arithmetic of the iteration.
        batch_invariant: whether matrices are taken one at a time, with the products that keep exact
            mode's bits.
        equilibrate: whether rows are brought to one norm first.
        renormalize: whether the result is brought to the norm of a polar factor.
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
        """The form for matrices (rows, cols)."""
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
        # fp16 on CPUs imitates the arithmetic of accelerators, so it takes the form that they take.
        counted = "tiles" if products == "in_fp32" else products
        costs = (replace(form, products=counted).flops(s, l) for form in (gram, standard))
        share = next(costs) / max(1, next(costs))
        where = " on accelerators" if counted != products else ""
        if share <= GRAM_FLOPS[counted]:
            return replace(gram, why=f"{share:.2f} of the standard form's FLOPs{where}")
        return replace(standard, why=f"the Gram form takes {share:.2f} of its FLOPs{where}")

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (there are few recipes)
    def flops(self, rows: int, cols: int) -> int:
        """FLOPs of `form` for one matrix."""
        return self.form(rows, cols).flops(rows, cols)

    def _restarts(self, triples: tuple[Triple, ...], s: int) -> tuple[int, ...]:
        """The restarts of the Gram form, for polynomials with their margins and a shorter side."""
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
        # If rows do not begin at multiples of 16 entries, kernels load each entry by itself.
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
    """The recipe for the options that `newton_schulz` takes.

    Raises:
        ValueError: see `resolve`.
    """
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
    """Whether the CPU has instructions for products in bfloat16, and oneDNN may use them.

    On x86 oneDNN says that it supports bfloat16 on every CPU with AVX-512. Without the instructions
    it widens every operand to fp32, and takes five times as long as in fp32. So this asks for the
    instructions, too.
    """
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if probe is None or not torch.backends.mkldnn.is_available() or not probe():
        return False
    if not torch.cpu._is_avx2_supported():  # not x86: there oneDNN asks for more than AVX2
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
