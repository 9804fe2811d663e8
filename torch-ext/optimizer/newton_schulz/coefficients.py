"""Resolves published families of coefficients, or the user's, to one (a, b, c) per iteration.

Each iteration maps every singular value σ to aσ + bσ³ + cσ⁵ and keeps the singular vectors, so a
few well-chosen (a, b, c) push all singular values toward 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Optional, Union

import torch

Triple = tuple[float, float, float]
Coefficients = Union[str, Sequence[float], Sequence[Sequence[float]]]

DEFAULT_STEPS = 5

# For iterations beyond the schedule of a family: σ ← (15σ − 10σ³ + 3σ⁵)/8, the quintic with
# p(1) = 1 and p'(1) = p''(1) = 0 (Björck & Bowie 1971, order 3).
CONVERGING: Triple = (15 / 8, -10 / 8, 3 / 8)


@dataclass(frozen=True)
class Polynomials:
    """The polynomials of the iterations, with their safety margins.

    Args:
        triples: (a, b, c) of each iteration.
        norm_factor: the input is divided by its norm times this factor, a margin of the source.
        safety: in 16-bit arithmetic, all polynomials but the last use σ/safety instead of σ. A
            schedule without margins needs this: rounding may push a singular value out of the
            interval it was made for, and later polynomials would drive it away from 1.
    """

    triples: tuple[Triple, ...]
    norm_factor: float = 1.0
    safety: float = 1.0

    @property
    def steps(self) -> int:
        """The number of iterations that a family was made for; 5 for a family of one triple."""
        return DEFAULT_STEPS if len(self.triples) == 1 else len(self.triples)

    def in_arithmetic(self, dtype: torch.dtype) -> tuple[Triple, ...]:
        """Returns the triples to use in ``dtype``, with ``safety`` applied."""
        if self.safety == 1.0 or torch.finfo(dtype).bits > 16:
            return self.triples
        s = self.safety
        guarded = tuple((a / s, b / s**3, c / s**5) for a, b, c in self.triples[:-1])
        return guarded + self.triples[-1:]


# Published polynomials by name; a family of one triple repeats it in every iteration.
FAMILIES: dict[str, Polynomials] = {
    # Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks
    "quintic": Polynomials(((3.4445, -4.7750, 2.0315),)),
    # You 2025, per-iteration coefficients by gradient descent
    "you": Polynomials(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    ),
    # Amsel et al. 2025, arXiv:2505.16932, 5 iterations, safety 2e-2, cushion 2
    "polar_express": Polynomials(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        norm_factor=1.02,
    ),
    # Grishina et al. 2025, arXiv:2506.10935
    "cans": Polynomials(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        safety=1.01,
    ),
    # optimal cubics composed, same method as polar_express; c = 0 saves the product A²
    "cubic5": Polynomials(
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
    ),
    # DeepSeek-AI 2026, DeepSeek-V4, section 2.4: 10 iterations in two stages
    "deepseekv4": Polynomials(((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2),
}


def resolve(coefficients: Coefficients, steps: Optional[int] = None) -> Polynomials:
    """Returns the polynomials of ``steps`` iterations.

    A single triple, of the caller or of a family, repeats. In a family with a schedule, fewer steps
    use the first polynomials, and more steps continue with `CONVERGING`: cycling through a schedule
    made for a fixed number of steps can reverse the update.

    Args:
        coefficients: name of a family, one (a, b, c), or a list with one for each iteration.
        steps: number of iterations. None means the number that a family was made for, the length of
            a list, or 5 for one (a, b, c).

    Raises:
        ValueError: if ``steps`` is less than 1, the family is unknown, or the coefficients are
            neither a triple of numbers nor a list of ``steps`` triples.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, found {steps!r}")
    if isinstance(coefficients, str):
        if coefficients not in FAMILIES:
            names = ", ".join(FAMILIES)
            raise ValueError(f"unknown ns_coefficients {coefficients!r}; known: {names}")
        family = FAMILIES[coefficients]
        steps = steps or family.steps
        if len(family.triples) == 1:
            triples = family.triples * steps
        else:
            missing = steps - len(family.triples)
            triples = family.triples[:steps] + (CONVERGING,) * missing
        return replace(family, triples=triples)
    listed: Sequence[Any] = coefficients
    if is_triple(coefficients):
        listed = [coefficients] * (steps or DEFAULT_STEPS)
    if not listed or not all(map(is_triple, listed)):
        raise ValueError(
            "ns_coefficients must be a family name, one (a, b, c) for all steps, or a list of "
            f"(a, b, c), one for each step, found {coefficients!r}"
        )
    triples = tuple((float(a), float(b), float(c)) for a, b, c in listed)
    if steps is not None and len(triples) != steps:
        raise ValueError(
            f"ns_coefficients lists {len(triples)} iterations but ns_steps is {steps}: "
            "leave ns_steps out, as a list sets the number of steps, or make them equal"
        )
    return Polynomials(triples)


def is_triple(value: object) -> bool:
    """Returns True if a value is one (a, b, c) of finite numbers."""
    return isinstance(value, (tuple, list)) and len(value) == 3 and all(map(_is_finite, value))


def _is_finite(value: object) -> bool:
    if not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that is too large for a float
        return False


@functools.cache
def overshoot(name: str, steps: int) -> Optional[float]:
    """Returns the largest singular value after a shortened schedule if it exceeds 1.5, else None.

    The first polynomials of a schedule overshoot on purpose and rely on the later ones.
    """
    if steps >= len(FAMILIES[name].triples):
        return None
    polynomials, points, largest = resolve(name, steps), 2000, 0.0
    for i in range(1, points + 1):
        x = i / points / polynomials.norm_factor
        for a, b, c in polynomials.triples:
            x = x * (a + x * x * (b + c * x * x))
        largest = max(largest, abs(x))
    return largest if largest > 1.5 else None
