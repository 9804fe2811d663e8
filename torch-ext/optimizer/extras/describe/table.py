"""Names of repeated layers in one line, and tables that fit a screen."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Optional

from .. import summary

LINES = 28  # of the table of parameters: beside totals, traps and code, it leaves a screen


def fold(names: Sequence[str]) -> list[str]:
    """Names that differ only in indices as one: ``layers.{0..31}.wq.weight``."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return [_folded(group) for group in groups.values()]


def glob(names: Sequence[str]) -> list[str]:
    """Shell-style patterns for the same: ``layers.*.wq.weight``."""
    return [re.sub(r"\{[^}]*\}", "*", folded) for folded in fold(names)]


def _pattern(name: str, anywhere: bool = False) -> tuple[str, ...]:
    """What names have in common: components, indices left out, or digits ``anywhere``."""
    if anywhere:
        return tuple(re.split(r"\d+", name))
    return tuple("" if part.isdecimal() else part for part in name.split("."))


def _folded(names: Sequence[str], anywhere: bool = False) -> str:
    if anywhere:
        pieces = [re.split(r"(\d+)", name) for name in names]
        return "".join(map(_one_or_range, zip(*pieces)))
    return ".".join(map(_one_or_range, zip(*(name.split(".") for name in names))))


def _one_or_range(parts: Sequence[str]) -> str:
    if len(set(parts)) == 1:
        return parts[0]
    numbers = sorted(set(map(int, parts)))
    first, last = numbers[0], numbers[-1]
    if len(numbers) == last - first + 1 and len(numbers) > 2:
        return f"{{{first}..{last}}}"
    if len(numbers) <= 3:
        return "{" + ",".join(map(str, numbers)) + "}"
    return f"{{{first},{numbers[1]},..,{last}}}"


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The table of parameters, folded as far as a screen asks for.

    Args:
        rows: with ``name``, ``shape``, ``dtype``, ``placement``, ``numel``, ``algorithm``,
            ``reason``.
    """
    many_dtypes = len({row["dtype"] for row in rows}) > 1
    lines: list[tuple[str, ...]] = []
    for anywhere in (False, True):
        groups = _grouped(rows, anywhere)
        lines = [_line(group, many_dtypes, anywhere) for group in groups]
        if len(lines) <= LINES:
            return lines
    largest = sorted(groups, key=lambda group: -sum(row["numel"] for row in group))[:LINES]
    kept = [line for group, line in zip(groups, lines) if any(group is g for g in largest)]
    left = sum(len(group) for group in groups) - sum(len(group) for group in largest)
    return [*kept, (f"… and {left} smaller ones, in .rows", "", "", "", "")]


def _grouped(rows: Sequence[Mapping[str, Any]], anywhere: bool) -> list[list[Mapping[str, Any]]]:
    """Rows that make one line each; ``anywhere``, also those of other shapes."""
    groups: dict[Hashable, list[Mapping[str, Any]]] = {}
    for row in rows:
        shape = len(row["shape"]) if anywhere else row["shape"]
        alike = row["dtype"], row["placement"], row["algorithm"], row["reason"]
        if anywhere and len(row["shape"]) < 2 and row["algorithm"] == "AdamW":
            key: Hashable = "vectors"
        else:
            key = (_pattern(row["name"], anywhere), shape, alike)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _line(rows: Sequence[Mapping[str, Any]], dtypes: bool, anywhere: bool) -> tuple[str, ...]:
    first, names = rows[0], [row["name"] for row in rows]
    shapes = [row["shape"] for row in rows]
    same = len({_pattern(name, anywhere) for name in names}) == 1
    shape = str(shapes[0]) if len(set(shapes)) == 1 else f"{min(shapes)} to {max(shapes)}"
    if dtypes:
        shape += f" {text(first['dtype'])}"
    if first["placement"] != "plain":
        shape += f" {first['placement']}"
    return (
        _folded(names, anywhere) if same else "vectors and scalars: norms, biases, …",
        shape if same else "",
        f"×{len(rows)}" if len(rows) > 1 else "",
        first["algorithm"],
        first["reason"] if same else "vector",
    )


def aligned(lines: Iterable[Sequence[str]]) -> list[str]:
    table = list(lines)
    if not table:
        return []
    widths = [max(map(len, column)) for column in zip(*table)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table
    ]


def listed(names: Sequence[str], most: Optional[int] = 3) -> list[str]:
    """Folded names, a line each, and how many lines are left out."""
    lines = fold(names)
    if most is not None and len(lines) > most:
        return [*lines[:most], f"… and {len(lines) - most} more like these"]
    return lines


def text(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def counted(things: Collection[Any], one: str, several: str = "") -> str:
    """1 matrix, 2 matrices."""
    return f"{len(things)} {one if len(things) == 1 else several or one + 's'}"


def count(number: int) -> str:
    """1.23 B."""
    return summary.short(number).replace("G", "B").strip()


def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent)
