"""Normalizes names of parameters and matches them with keys and patterns."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Optional

# What wrappers add to a parameter's name: torch.compile, activation checkpointing, FSDP1, DDP.
WRAPPER_COMPONENTS = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"}
)


def normalize_name(name: str) -> str:
    """The parameter's name without the components that wrappers add: ``layers.0.wq.weight``."""
    return ".".join(c for c in name.split(".") if c not in WRAPPER_COMPONENTS)


def has_component(name: str, keys: Optional[Sequence[str]]) -> bool:
    """Whether any whole component of ``name`` is one of ``keys`` (a key may itself have dots)."""
    dotted = f".{normalize_name(name)}."
    return any(f".{key}." in dotted for key in keys or ())


def matches(name: str, pattern: str) -> bool:
    """Whether a shell-style pattern fits the whole name, or whole components of it do."""
    return fnmatch.fnmatchcase(normalize_name(name), pattern) or has_component(name, [pattern])
