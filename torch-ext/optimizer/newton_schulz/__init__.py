"""Orthogonalization: replaces a matrix by (nearly) its polar factor, with matrix products alone.

`coefficients` has the polynomials, `restarts` plans how long an iteration may stay in its Gram
form, `forms` chooses what each shape gets, `products` multiplies symmetric matrices at half the
cost, and `iteration` is the algorithm.
"""

from __future__ import annotations

from .coefficients import FAMILIES, Coefficients, Family, Iteration, Triple, overshoot, resolve
from .forms import ALGORITHMS, Form, Recipe, default_dtype, flops, recipe_for
from .iteration import NORMS, newton_schulz
from .restarts import plan_restarts

__all__ = [
    "ALGORITHMS",
    "FAMILIES",
    "NORMS",
    "Coefficients",
    "Family",
    "Form",
    "Iteration",
    "Recipe",
    "Triple",
    "default_dtype",
    "flops",
    "newton_schulz",
    "overshoot",
    "plan_restarts",
    "recipe_for",
    "resolve",
]
