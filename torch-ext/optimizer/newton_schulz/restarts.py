"""How long an iteration may stay in its Gram form: a schedule of restarts from the coefficients.

Within a segment only the Gram matrix R of X is iterated on. By rounding it drifts away from XXᵀ,
faster with every step; a restart brings X up to date and takes R anew. Here that growth is followed
to first order. Let X = PΣQᵀ and λ = σ². In the basis P a rounding of a matrix M has entries of
equal variance, that of one rounding times ‖M‖_F²/s². One iteration, y(λ) = a + bλ + cλ², makes

    of R:  YRY,  and of its error D at (v, t):  y(λv)·y(λt)·D
    of X:  YX,   and of its error O at (v, t):  y(λv)·O + (b + c(λv + λt))·D·σt

and every product adds its own rounding. What is left of O at the end, relative to the result, is
the error of a schedule. It is followed for the spectrum of a random square matrix and for one that
decays over four orders of magnitude: between them lie those of most gradients.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from .coefficients import Triple

# Errors that a schedule may have: so many times those of a restart after every iteration, which is
# the standard form, or less than matters.
_TOLERATED = 1.3
_UNSEEN = 1e-4

_COARSE = 2.0**-9  # eps of a format in which at least one restart is needed

_SIDE = 512  # of the matrices that schedules are made for; in longer ones, more averages out
_POINTS = 16  # of a spectrum, each for _SIDE/_POINTS singular values
_WEIGHT = _SIDE / _POINTS

_MOST_TRIED = 10  # iterations of which all subsets are tried as restarts


@functools.cache
def plan_restarts(triples: tuple[Triple, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """After which iterations to restart, ascending: as few as keep the accuracy.

    Args:
        triples: (a, b, c) of each iteration.
        dtype: of the matrices; products are summed up in fp32 or better.
    """
    every = tuple(range(1, len(triples)))
    # To first order a short iteration in bf16 could do without; with its few digits it is not first
    # order that decides on decaying spectra.
    least = int(torch.finfo(dtype).eps > _COARSE and len(triples) > 1)
    limit = max(_TOLERATED * predicted_error(triples, every, dtype), _UNSEEN)
    for count in range(least, len(every) if len(triples) <= _MOST_TRIED else 3):
        tried = itertools.combinations(every, count)
        error, restarts = min((predicted_error(triples, r, dtype), r) for r in tried)
        if error <= limit:
            return restarts
    return every


def predicted_error(
    triples: Sequence[Triple], restarts: Sequence[int], dtype: torch.dtype
) -> float:
    """‖U − U₀‖_F/‖U₀‖_F, where U₀ is U without roundings, for the worse of the two spectra."""
    rounding = torch.finfo(dtype).eps / 2 / math.sqrt(3)  # standard deviation, relative
    return rounding * max(_roundings(triples, restarts, sigmas) for sigmas in _spectra())


def segments(restarts: Sequence[int], count: int) -> list[tuple[int, int]]:
    """First and last (exclusive) iteration of every segment of ``count`` iterations."""
    return list(zip((0, *restarts), (*restarts, count)))


def _roundings(
    triples: Sequence[Triple], restarts: Sequence[int], spectrum: Sequence[float]
) -> float:
    """The error in units of one rounding."""
    sigmas = list(spectrum)
    errors = [[0.0] * _POINTS for _ in sigmas]  # variances of O, (v, t)
    for start, stop in segments(restarts, len(triples)):
        of_X = _variance(sigmas)
        errors = [[O + of_X for O in row] for row in errors]
        lambdas, before, Q = [x * x for x in sigmas], sigmas, [1.0] * _POINTS
        drift = [[_variance(lambdas)] * _POINTS for _ in sigmas]  # variances of D
        for a, b, c in triples[start:stop]:
            Z = [b * x + c * x * x for x in lambdas]
            Y = [a + z for z in Z]
            Q = [q * y for q, y in zip(Q, Y)]
            T = [x * y for x, y in zip(lambdas, Y)]
            R = [t * y for t, y in zip(T, Y)]
            of_Z, of_Q, of_T, of_R = map(_variance, (Z, Q, T, R))
            for v, (O, D) in enumerate(zip(errors, drift)):
                for t, sigma in enumerate(sigmas):
                    slope = b + c * (lambdas[v] + lambdas[t])
                    O[t] *= Y[v] ** 2
                    O[t] += (slope**2 * D[t] + of_Z) * sigma**2 + of_Q * before[t] ** 2
                    D[t] = (Y[v] * Y[t]) ** 2 * D[t] + Y[v] ** 2 * of_T + of_R
            lambdas, sigmas = R, [x * y for x, y in zip(sigmas, Y)]
    return math.sqrt(_WEIGHT**2 * sum(map(sum, errors)) / (_WEIGHT * _square(sigmas)))


def _variance(values: Sequence[float]) -> float:
    """Of an entry of the rounding of a matrix with these singular values."""
    return _WEIGHT * _square(values) / _SIDE**2


def _square(values: Sequence[float]) -> float:
    return sum(x * x for x in values)


@functools.cache
def _spectra() -> tuple[list[float], ...]:
    """Singular values of two matrices of Frobenius norm 1."""
    middles = [(i + 0.5) / _POINTS for i in range(_POINTS)]
    random = [_quarter_circle(p) for p in middles]
    decaying = [10.0 ** (-4.0 * p) for p in middles]
    return tuple(
        [x / math.sqrt(_WEIGHT * _square(spectrum)) for x in spectrum]
        for spectrum in (random, decaying)
    )


def _quarter_circle(p: float) -> float:
    """Quantile of the singular values of a square Gaussian matrix, the largest being 1."""
    low, high = 0.0, 1.0
    for _ in range(50):
        x = (low + high) / 2
        below = 2 / math.pi * (x * math.sqrt(1 - x * x) + math.asin(x))
        low, high = (x, high) if below < p else (low, x)
    return low
