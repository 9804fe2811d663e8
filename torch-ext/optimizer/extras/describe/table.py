"""Folds names of repeated layers into one line, and lays out tables to fit a screen."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Callable, TypeVar

from .. import summary

LINES = 28  # of the table, which then fits a screen with totals, traps, and code
_LISTED = 3  # lines of names under a trap
_INDEX = re.compile(r"(?<![^.])(\d+)(?![^.])")  # a component of a name
_DIGITS = re.compile(r"(\d+)")  # anywhere in a name

Item = TypeVar("Item")
Row = Mapping[str, Any]


def collect_by(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Any, list[Item]]:
    """Groups items by key, in the order in which the keys first appear."""
    by_key: dict[Any, list[Item]] = {}
    for item in items:
        by_key.setdefault(key(item), []).append(item)
    return by_key


def fold(names: Iterable[str]) -> list[str]:
    """Folds names that differ only in indices into one: ``layers.{0..31}.wq.weight``."""
    alike = collect_by(names, lambda name: _without(_INDEX, name))
    return [_folded(_INDEX, together) for together in alike.values()]


def _without(numbers: re.Pattern[str], name: str) -> tuple[str, ...]:
    """The parts of a name between its numbers."""
    return tuple(numbers.split(name)[::2])


def _folded(numbers: re.Pattern[str], names: Iterable[str]) -> str:
    return "".join(map(_one_or_range, zip(*map(numbers.split, names))))


def _one_or_range(pieces: Sequence[str]) -> str:
    if len(set(pieces)) == 1:
        return pieces[0]
    indices = sorted(set(map(int, pieces)))
    first, last = indices[0], indices[-1]
    if len(indices) == last - first + 1 and len(indices) > 2:
        return f"{{{first}..{last}}}"
    if len(indices) <= 3:
        return "{" + ",".join(map(str, indices)) + "}"
    return f"{{{first},{indices[1]},..,{last}}}"


def lines_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table of parameters, folded until it fits a screen.

    Args:
        rows: dicts with ``name``, ``shape``, ``dtype``, ``placement``, ``numel``, ``algorithm`` and
            ``reason``.
    """
    many_dtypes = len({row["dtype"] for row in rows}) > 1
    for numbers in (_INDEX, _DIGITS):
        alike = list(collect_by(rows, functools.partial(_likeness, numbers)).values())
        lines = [_line(numbers, together, many_dtypes) for together in alike]
        if len(lines) <= LINES:
            return lines
    sizes = [sum(row["numel"] for row in together) for together in alike]
    largest = set(sorted(range(len(alike)), key=lambda index: -sizes[index])[:LINES])
    smaller = sum(len(together) for i, together in enumerate(alike) if i not in largest)
    lines = [line for i, line in enumerate(lines) if i in largest]
    return [*lines, (f"… and {smaller} smaller ones in .rows", "", "", "", "")]


def _likeness(numbers: re.Pattern[str], row: Row) -> Hashable:
    """What the rows of one line have in common: not the shape, if any number in names folds."""
    shape = row["shape"] if numbers is _INDEX else len(row["shape"])
    if numbers is _DIGITS and len(row["shape"]) < 2 and row["algorithm"] == "AdamW":
        return "vectors"
    name = _without(numbers, row["name"])
    return name, shape, row["dtype"], row["placement"], row["algorithm"], row["reason"]


def _line(numbers: re.Pattern[str], rows: Sequence[Row], many_dtypes: bool) -> tuple[str, ...]:
    first, names = rows[0], [row["name"] for row in rows]
    shapes = [row["shape"] for row in rows]
    is_one_pattern = len({_without(numbers, name) for name in names}) == 1
    shape = str(shapes[0]) if len(set(shapes)) == 1 else f"{min(shapes)} to {max(shapes)}"
    if many_dtypes:
        shape += f" {text(first['dtype'])}"
    if first["placement"] != "plain":
        shape += f" {first['placement']}"
    return (
        _folded(numbers, names) if is_one_pattern else "vectors and scalars: norms, biases, …",
        shape if is_one_pattern else "",
        f"×{len(rows)}" if len(rows) > 1 else "",
        first["algorithm"],
        first["reason"] if is_one_pattern else "vector",
    )


def aligned(lines: Iterable[Sequence[str]]) -> list[str]:
    table = list(lines)
    widths = [max(map(len, column)) for column in zip(*table)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table
    ]


def listed(names: Iterable[str]) -> list[str]:
    """Folded names, one per line, ending with how many lines are left out."""
    lines = fold(names)
    if len(lines) > _LISTED:
        return [*lines[:_LISTED], f"… and {len(lines) - _LISTED} more like these"]
    return lines


def text(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def count(number: int) -> str:
    """Formats a number, for example 1.23 B."""
    return summary.short(number).replace("G", "B").strip()
