"""Orthogonalizes: replaces a matrix by (nearly) its polar factor, using only matrix products."""

from __future__ import annotations

from .coefficients import (
    FAMILIES,
    Coefficients,
    Family,
    Polynomials,
    Triple,
    is_triple,
    overshoot,
    resolve,
)
from .forms import ALGORITHMS, Form, Recipe, default_dtype, recipe_for
from .iteration import NORMS, newton_schulz
from .restarts import one_restart, plan_restarts

__all__ = [
    "ALGORITHMS",
    "FAMILIES",
    "NORMS",
    "Coefficients",
    "Family",
    "Form",
    "Polynomials",
    "Recipe",
    "Triple",
    "default_dtype",
    "is_triple",
    "newton_schulz",
    "one_restart",
    "overshoot",
    "plan_restarts",
    "recipe_for",
    "resolve",
]
