"""Normalizes names of parameters and matches them with keys and patterns."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Optional

# What torch.compile, activation checkpointing and FSDP1 add to a parameter's name, anywhere in it.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_NOT_IN_STATE_DICTS = WRAPPERS - {"_orig_mod"}


@functools.lru_cache(maxsize=1 << 16)
def normalize_name(name: str) -> str:
    """The parameter's name without the components that wrappers add: ``layers.0.wq.weight``.

    ``module`` is DDP's at the beginning only. Elsewhere it may be a part of the model.
    """
    components = _without(name, WRAPPERS).split(".")
    return ".".join(itertools.dropwhile(lambda component: component == "module", components))


def is_wrapper(components: Sequence[str]) -> bool:
    """Whether the last of the components that lead to a module is one that a wrapper adds."""
    return components[-1] in WRAPPERS or all(c == "module" for c in components)


def state_dict_key(name: str) -> str:
    """The key in the model's ``state_dict()`` of a parameter that ``named_parameters()`` names."""
    return _without(name, _NOT_IN_STATE_DICTS)


@functools.lru_cache(maxsize=1 << 16)
def _without(name: str, components: frozenset[str]) -> str:
    return ".".join(c for c in name.split(".") if c not in components)


def normalize_names(names: Iterable[str]) -> list[str]:
    """Normalized names of a model's parameters; as they are where two would become one."""
    names = list(names)
    normalized = list(map(normalize_name, names))
    return normalized if len(set(normalized)) == len(set(names)) else names


def find_name(names: Iterable[str]) -> Callable[[str], Optional[str]]:
    """Finds which of ``names`` is meant by a name: itself, or the one that only wrappers tell from
    it; None where there is no such name, or several."""
    forms: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: _without(name, WRAPPERS),
        normalize_name,
    ]
    alike: dict[tuple[int, str], list[str]] = {}
    for name in names:
        for number, form in enumerate(forms):
            alike.setdefault((number, form(name)), []).append(name)

    def find(name: str) -> Optional[str]:
        fitting = (alike.get((number, form(name))) for number, form in enumerate(forms))
        first = next(filter(None, fitting), [])
        return first[0] if len(first) == 1 else None

    return find


def has_component(name: str, keys: Optional[Sequence[str]]) -> bool:
    """Whether any whole component of ``name`` is one of ``keys`` (a key may itself have dots)."""
    compared = (_to_compare(name, key) for key in keys or ())
    return any(f".{key}." in f".{name}." for name, key in compared)


def _to_compare(name: str, pattern: str) -> tuple[str, str]:
    """Both without the components that wrappers add; ``module`` stays where the pattern has it."""
    pattern = _without(pattern, WRAPPERS)
    has_module = pattern.startswith("module.")
    return _without(name, WRAPPERS) if has_module else normalize_name(name), pattern


def did_you_mean(keys: Iterable[str], names: Iterable[str]) -> str:
    """The end of a message about keys without a match: components of names that are much like them.

    A key with dots is compared with as many components. The end is empty if none is like a key.
    """
    split, near = [normalize_name(name).split(".") for name in names], []
    for key in map(normalize_name, keys):
        count = key.count(".") + 1
        runs = {".".join(c[i : i + count]) for c in split for i in range(len(c) - count + 1)}
        near += difflib.get_close_matches(key, runs, n=1, cutoff=0.6)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def matches(name: str, pattern: str) -> bool:
    """Whether a shell-style pattern fits the whole name, or whole components of it do."""
    name, pattern = _to_compare(name, pattern)
    return f".{pattern}." in f".{name}." or fnmatch.fnmatchcase(name, pattern)


def counted(things: Collection[Any], singular: str, plural: str = "") -> str:
    """1 matrix, 2 matrices."""
    return f"{len(things)} {singular if len(things) == 1 else plural or singular + 's'}"
