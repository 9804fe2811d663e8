"""Normalizes names of parameters and matches them with keys and patterns."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
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


def did_you_mean(keys: Iterable[str], names: Iterable[str]) -> str:
    """The end of a message about keys without a match: components of names that are much like them.

    A key with dots is compared with as many components. The end is empty if none is like a key.
    """
    split, near = [normalize_name(name).split(".") for name in names], []
    for key in keys:
        count = key.count(".") + 1
        runs = {".".join(c[i : i + count]) for c in split for i in range(len(c) - count + 1)}
        near += difflib.get_close_matches(key, runs, n=1, cutoff=0.6)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def matches(name: str, pattern: str) -> bool:
    """Whether a shell-style pattern fits the whole name, or whole components of it do."""
    return fnmatch.fnmatchcase(normalize_name(name), pattern) or has_component(name, [pattern])
