"""Replaces a matrix with an approximation of its polar factor, using only matrix products."""

from __future__ import annotations

from .coefficients import FAMILIES, Coefficients, Triple, is_triple, overshoot, resolve
from .forms import ALGORITHMS, Recipe, default_dtype, recipe_for
from .iteration import newton_schulz

__all__ = [
    "ALGORITHMS",
    "FAMILIES",
    "Coefficients",
    "Recipe",
    "Triple",
    "default_dtype",
    "is_triple",
    "newton_schulz",
    "overshoot",
    "recipe_for",
    "resolve",
]
