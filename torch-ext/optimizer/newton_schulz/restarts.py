"""Plans the restarts of the Gram form: how many iterations are safe without one.

Within a segment only the Gram matrix R of X is iterated on. Rounding makes R drift away from XXᵀ,
faster with every iteration; a restart brings X up to date and computes R from it. This module
follows the drift to first order. Let X = PΣQᵀ and λ = σ². Seen in the basis P, all entries of the
rounding error of a matrix M have the same variance: that of one rounding times ‖M‖_F²/s². One
iteration, y(λ) = a + bλ + cλ², makes

    of R:  YRY,  and of its error D at (v, t):  y(λv)·y(λt)·D
    of X:  YX,   and of its error O at (v, t):  y(λv)·O + (b + c(λv + λt))·D·σt

and every product adds a rounding error. O at the end, relative to the result, is the error of a
schedule. It is computed for two spectra: that of a random square matrix, and one that decays over
four orders of magnitude. The spectra of most gradients lie between the two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Optional

import torch

from .coefficients import Triple

# The most error that a schedule may have, as a multiple of the error of the standard form, which
# restarts after every iteration.
_TOLERATED = 1.5

# First order misses one case. A single large singular value may come to the peak of a polynomial,
# where a little more makes the next polynomials diverge. Its error in R grows as much as the small
# singular values grow in the segment. Measurements on matrices with one large singular value beside
# others show harm where the product of the coefficients a of a segment exceeds these numbers.
MOST_GROWTH = {torch.bfloat16: 16.0, torch.float16: 64.0}
MOST_GROWTH_IN_FP32 = 1000.0

_LARGEST_SIDE = 512  # longer sides are planned like this one: more of their errors averages out
_POINTS = 16  # points of a spectrum; each stands for many singular values

# All subsets of the first so many iterations are tried as restarts. With later iterations, which
# change little, there would be too many subsets: each later iteration is a segment by itself.
_MOST_PLANNED = 7

# What the authors of the Gram form simulate: points of a spectrum, the error of R, and the
# condition number from which on they refuse a restart.
_AUTHORS_POINTS = 1000  # they take 10,000, with the same outcome
_AUTHORS_ERROR_OF_R = -4e-4
_AUTHORS_WORST_CONDITION = 1e8


def plan_restarts(
    triples: tuple[Triple, ...], dtype: torch.dtype, norm: str = "frobenius", side: int = 512
) -> tuple[int, ...]:
    """The iterations after which to restart, ascending: as few as keep the accuracy.

    Args:
        triples: (a, b, c) of each iteration.
        dtype: of the matrices; products are summed up in fp32 or better.
        norm: the norm that is 1 at the start, ``"frobenius"`` or ``"schatten4"``.
        side: the shorter side of the matrices.
    """
    if len(triples) < 2:
        return ()
    growth = MOST_GROWTH.get(dtype, MOST_GROWTH_IN_FP32)
    side = min(_LARGEST_SIDE, 1 << max(4, side.bit_length() - 1))
    planned = _plan(triples[:_MOST_PLANNED], growth, norm, side)
    return planned + tuple(range(_MOST_PLANNED, len(triples)))


@functools.cache
def one_restart(triples: tuple[Triple, ...], dtype: torch.dtype) -> Optional[int]:
    """The one iteration after which the authors of the Gram form restart.

    They are Zhang, Amsel, Chen & Dao 2026 ("Gram Newton-Schulz", find_best_restarts). They assume
    that all eigenvalues of R are off by −4e-4 whenever R is computed, and choose the restart at
    which the largest condition number of Q, over all iterations, is least. They iterate in fp16.
    One restart takes fewer FLOPs than those of `plan_restarts`, and is less exact
    (docs/accuracy.md).

    Returns:
        None if the authors refuse every restart, or if small singular values grow so much in a
        segment that a single large one would diverge.
    """
    positions = range(1, len(triples))
    best = min(positions, key=lambda at: _worst_condition(triples, at), default=None)
    if best is None or not _worst_condition(triples, best) < _AUTHORS_WORST_CONDITION:
        return None
    growth = MOST_GROWTH.get(dtype, MOST_GROWTH_IN_FP32)
    return best if _growth(triples, [best]) <= growth else None


def _worst_condition(triples: Sequence[Triple], restart: int) -> float:
    """The largest condition number of Q, with one restart, for singular values from 1 to 1e-10."""
    sigmas = [10.0 ** (-10 * i / (_AUTHORS_POINTS - 1)) for i in range(_AUTHORS_POINTS)]
    worst = 1.0
    for start, stop in segments([restart], len(triples)):
        lambdas, Q = [x * x + _AUTHORS_ERROR_OF_R for x in sigmas], [1.0] * len(sigmas)
        for a, b, c in triples[start:stop]:
            Y = [a + x * (b + c * x) for x in lambdas]
            Q = [q * y for q, y in zip(Q, Y)]
            lambdas = [x * y * y for x, y in zip(lambdas, Y)]
            least = min(map(abs, Q))
            finite = least > 0 and all(map(math.isfinite, Q))
            worst = max(worst, max(map(abs, Q)) / least if finite else math.inf)
        sigmas = [x * q for x, q in zip(sigmas, Q)]
    return worst


@functools.cache
def _plan(triples: tuple[Triple, ...], growth: float, norm: str, side: int) -> tuple[int, ...]:
    all_restarts = tuple(range(1, len(triples)))
    standard = predicted_errors(triples, all_restarts, norm, side)
    for count in range(len(all_restarts)):
        worst = {}
        for restarts in itertools.combinations(all_restarts, count):
            if _growth(triples, restarts) <= growth:
                errors = predicted_errors(triples, restarts, norm, side)
                worst[restarts] = max(error / least for error, least in zip(errors, standard))
        best = min(worst, key=lambda restarts: worst[restarts], default=all_restarts)
        if best != all_restarts and worst[best] <= _TOLERATED:
            return best
    return all_restarts


def _growth(triples: Sequence[Triple], restarts: Sequence[int]) -> float:
    """The largest factor by which small singular values grow in a segment of several iterations."""
    within = [triples[a:b] for a, b in segments(restarts, len(triples)) if b - a > 1]
    return max((math.prod(abs(a) for a, _, _ in segment) for segment in within), default=1.0)


def predicted_errors(
    triples: Sequence[Triple], restarts: Sequence[int], norm: str, side: int
) -> list[float]:
    """‖U − U₀‖_F/‖U₀‖_F for each of the two spectra, where U₀ is U without roundings.

    The unit is the relative standard deviation of one rounding, about eps/5.
    """
    return [_error(triples, restarts, sigmas, side) for sigmas in _spectra(norm, side)]


def segments(restarts: Sequence[int], count: int) -> list[tuple[int, int]]:
    """The segments of ``count`` iterations, [start, stop) each."""
    return list(zip((0, *restarts), (*restarts, count)))


def _error(
    triples: Sequence[Triple], restarts: Sequence[int], spectrum: Sequence[float], side: int
) -> float:
    weight = side / _POINTS  # how many singular values each point stands for

    def variance(values: Sequence[float]) -> float:
        """The variance of an entry of the rounding error of a matrix with these singular values."""
        return weight * sum(x * x for x in values) / side**2

    sigmas = list(spectrum)
    errors = [[0.0] * _POINTS for _ in sigmas]  # variances of O, (v, t)
    for start, stop in segments(restarts, len(triples)):
        rounding_X = variance(sigmas)
        errors = [[O + rounding_X for O in row] for row in errors]
        lambdas, start_sigmas, Q = [x * x for x in sigmas], sigmas, [1.0] * _POINTS
        drift = [[variance(lambdas)] * _POINTS for _ in sigmas]  # variances of D
        for a, b, c in triples[start:stop]:
            Z = [b * x + c * x * x for x in lambdas]
            Y = [a + z for z in Z]
            Q = [q * y for q, y in zip(Q, Y)]
            T = [x * y for x, y in zip(lambdas, Y)]
            R = [t * y for t, y in zip(T, Y)]
            rounding_Z, rounding_Q, rounding_T, rounding_R = map(variance, (Z, Q, T, R))
            rounding_Q *= stop - start > 1  # a single iteration has no Q: X ← ZX + aX
            for v, (O, D) in enumerate(zip(errors, drift)):
                for t, sigma in enumerate(sigmas):
                    slope, squared = b + c * (lambdas[v] + lambdas[t]), Y[v] * Y[v]
                    O[t] = squared * O[t] + rounding_Q * start_sigmas[t] * start_sigmas[t]
                    O[t] += (slope * slope * D[t] + rounding_Z) * sigma * sigma
                    D[t] = squared * (Y[t] * Y[t] * D[t] + rounding_T) + rounding_R
            lambdas, sigmas = R, [x * y for x, y in zip(sigmas, Y)]
    squares = sum(x * x for x in sigmas)
    return math.sqrt(weight * sum(map(sum, errors)) / squares) if squares > 0 else math.inf


@functools.cache
def _spectra(norm: str, side: int) -> tuple[list[float], ...]:
    """Singular values of two matrices of norm 1."""
    middles = [(i + 0.5) / _POINTS for i in range(_POINTS)]
    power = {"frobenius": 2, "schatten4": 4}[norm]
    scaled = []
    for sigmas in ([_quarter_circle(p) for p in middles], [10.0 ** (-4.0 * p) for p in middles]):
        norm_before = (side / _POINTS * sum(x**power for x in sigmas)) ** (1 / power)
        scaled.append([x / norm_before for x in sigmas])
    return tuple(scaled)


def _quarter_circle(p: float) -> float:
    """Quantile ``p`` of the singular values of a square Gaussian matrix whose largest one is 1."""
    low, high = 0.0, 1.0
    for _ in range(50):
        x = (low + high) / 2
        below = 2 / math.pi * (x * math.sqrt(1 - x * x) + math.asin(x))
        low, high = (x, high) if below < p else (low, x)
    return low
