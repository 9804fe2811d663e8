"""Normalizes names of parameters and matches them with keys and patterns."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Optional

# Components that torch.compile, activation checkpointing, and FSDP1 insert anywhere in names.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_NOT_IN_STATE_DICTS = WRAPPERS - {"_orig_mod"}


@functools.lru_cache(maxsize=1 << 16)
def normalize_name(name: str) -> str:
    """Returns a parameter's name without the components of wrappers: ``layers.0.wq.weight``.

    A leading ``module`` is DDP's. Elsewhere it may belong to the model, and stays.
    """
    components = _without(name, WRAPPERS).split(".")
    return ".".join(itertools.dropwhile(lambda component: component == "module", components))


def is_wrapper(components: Sequence[str]) -> bool:
    """Returns True if a wrapper adds the last component of a module's path."""
    return components[-1] in WRAPPERS or all(c == "module" for c in components)


def state_dict_key(name: str) -> str:
    """Returns the ``state_dict()`` key for a parameter's name from ``named_parameters()``."""
    return _without(name, _NOT_IN_STATE_DICTS)


@functools.lru_cache(maxsize=1 << 16)
def _without(name: str, components: frozenset[str]) -> str:
    return ".".join(c for c in name.split(".") if c not in components)


def normalize_names(names: Iterable[str]) -> list[str]:
    """Normalizes the names of a model's parameters, or none of them if two would become equal."""
    names = list(names)
    normalized = list(map(normalize_name, names))
    return normalized if len(set(normalized)) == len(set(names)) else names


def find_name(names: Iterable[str]) -> Callable[[str], Optional[str]]:
    """Returns a function that finds a name in ``names`` up to wrappers' components, or None."""
    forms: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: _without(name, WRAPPERS),
        normalize_name,
    ]
    by_form: dict[tuple[int, str], list[str]] = {}
    for name in names:
        for number, form in enumerate(forms):
            by_form.setdefault((number, form(name)), []).append(name)

    def find(name: str) -> Optional[str]:
        fitting = (by_form.get((number, form(name))) for number, form in enumerate(forms))
        first = next(filter(None, fitting), [])
        return first[0] if len(first) == 1 else None

    return find


def has_component(name: str, keys: Optional[Sequence[str]]) -> bool:
    """Returns True if a key equals a whole component of ``name``, or several if it has dots."""
    compared = (_to_compare(name, key) for key in keys or ())
    return any(f".{key}." in f".{name}." for name, key in compared)


def _to_compare(name: str, pattern: str) -> tuple[str, str]:
    """Removes wrappers' components from both; keeps ``module`` if the pattern begins with it."""
    pattern = _without(pattern, WRAPPERS)
    has_module = pattern.startswith("module.")
    return _without(name, WRAPPERS) if has_module else normalize_name(name), pattern


def did_you_mean(keys: Iterable[str], names: Iterable[str]) -> str:
    """Returns the end of a message about unmatched keys: similar components of names, if any.

    A key with dots is compared with as many components.
    """
    split, near = [normalize_name(name).split(".") for name in names], []
    for key in map(normalize_name, keys):
        count = key.count(".") + 1
        runs = {".".join(c[i : i + count]) for c in split for i in range(len(c) - count + 1)}
        near += difflib.get_close_matches(key, runs, n=1, cutoff=0.6)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def matches(name: str, pattern: str) -> bool:
    """Returns True if a pattern equals whole components of a name, or matches it shell-style."""
    name, pattern = _to_compare(name, pattern)
    return f".{pattern}." in f".{name}." or fnmatch.fnmatchcase(name, pattern)


def counted(things: Collection[Any], singular: str, plural: str = "") -> str:
    """Returns a count with its noun: 1 matrix, 2 matrices."""
    return f"{len(things)} {singular if len(things) == 1 else plural or singular + 's'}"
