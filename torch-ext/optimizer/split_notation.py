"""Parses the notation of ``split``: how the rows and columns of a stored tensor form matrices.

``"(group (q=512 + k=128 + v=128)) dim"`` describes a tensor (rows, cols). Its rows are groups, each
with 512 rows of queries, 128 of keys and 128 of values. Axes in parentheses are nested, outermost
first. ``+`` separates consecutive parts, and each part is a matrix: here the query rows of all
groups form one matrix. An axis in brackets instead gives one matrix for each of its indices:
``"([head] 64) dim"`` is one matrix of 64 rows per head.

An axis is written as a name, a size, or both. In each dimension one name may lack a size, which is
then inferred from the tensor. This name may occur more than once: ``"dim (c + c + c)"`` is three
matrices of equal width, side by side.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

_TOKEN = re.compile(r"\s*(?:([A-Za-z_]\w*)(?:\s*=\s*([1-9][0-9]*)\b)?|([1-9][0-9]*)\b|([()\[\]+]))")
_EXAMPLE = "as in '(group (q=512 + k=128 + v=128)) dim'"


class Loop(NamedTuple):
    """An axis of a part: its number of indices, their distance, and whether each is a matrix."""

    size: int
    stride: int
    counts_matrices: bool = False


class Part(NamedTuple):
    """Indices of one dimension that belong to the same matrices.

    Args:
        start: the first index.
        loops: the nested axes that give the other indices, outermost first.
        names: the names of those axes that have names.
    """

    start: int
    loops: tuple[Loop, ...]
    names: tuple[str, ...] = ()

    def indices(self) -> list[int]:
        """Returns all indices of the part."""
        steps = (range(0, loop.size * loop.stride, loop.stride) for loop in self.loops)
        return [self.start + sum(offsets) for offsets in itertools.product(*steps)]


class _Axis(NamedTuple):
    name: str
    size: Optional[int]
    counts_matrices: bool


_Product = list  # of terms, outermost first; a term is an axis, or a sum: a list of products


def parts_of(split: Any, rows: int, cols: Sequence[int]) -> tuple[list[Part], list[list[Part]]]:
    """Splits rows and columns into parts; each pair of them is one or more matrices.

    Args:
        split: a list of row counts, a number of rows, the notation, or None.
        rows: the tensor's number of rows.
        cols: the sizes of the dimensions after the rows; several if they are flattened.

    Returns:
        Parts of the rows, and parts of the columns: lists with a `Part` per item of ``cols``.

    Raises:
        ValueError: if the split doesn't fit. The message continues "<parameter> …".
    """
    whole = [Part(0, (Loop(size, 1),)) for size in cols]
    if not isinstance(split, str):
        return _consecutive(split, rows), [whole]
    row_terms, col_terms = parse(split)
    row_parts = resolve(row_terms, rows, "rows", f"split={split!r}")
    col_parts = resolve(col_terms, math.prod(cols), "columns", f"split={split!r}")
    if len(cols) == 1:
        return row_parts, [[part] for part in col_parts]
    if len(col_parts) > 1 or any(loop.counts_matrices for loop in col_parts[0].loops):
        raise ValueError(f"has flattened columns, which split={split!r} can't divide")
    return row_parts, [whole]


def _consecutive(split: Any, rows: int) -> list[Part]:
    """Cuts rows into matrices of consecutive rows; adjacent equal row counts form one part."""
    if split is None:
        split = [rows]
    if not isinstance(split, Sequence):
        if rows % split:
            raise ValueError(f"has {rows} rows, which split={split} does not divide")
        split = [split] * (rows // split)
    if sum(split) != rows:
        raise ValueError(f"has {rows} rows, but split={list(split)} adds up to {sum(split)}")
    parts, start = [], 0
    for size, equal in itertools.groupby(split):
        count = len(list(equal))
        parts.append(Part(start, (Loop(count, size, True), Loop(size, 1))))
        start += count * size
    return parts


def parse(notation: str) -> tuple[_Product, _Product]:
    """Returns the terms of the rows and the terms of the columns.

    Raises:
        ValueError: if the text isn't in the notation; the message says why.
    """
    tokens = list(_tokens(notation))
    product = _product(tokens, notation)
    if tokens or len(product) != 2:
        raise ValueError(
            f"{notation!r} must be two terms, for rows and for columns, {_EXAMPLE}, found "
            f"{f'{tokens[0][-1]!r}' if tokens else f'{len(product)} terms'}"
        )
    return product[:1], product[1:]


def _tokens(notation: str) -> Iterator[tuple[str, ...]]:
    at = 0
    while at < len(notation.rstrip()):
        match = _TOKEN.match(notation, at)
        if match is None:
            raise ValueError(
                f"{notation!r} has {notation[at:].strip()[0]!r} where a name, a size above 0, "
                f"name=size, +, a parenthesis or a bracket is expected, {_EXAMPLE}"
            )
        yield match.groups(default="")
        at = match.end()


def _product(tokens: list[tuple[str, ...]], notation: str) -> _Product:
    """Removes tokens up to one that ends the product, and returns its terms."""
    product: _Product = []
    while tokens and tokens[0][-1] not in (")", "]", "+"):
        name, size, number, sign = tokens.pop(0)
        if not sign:
            product.append(_Axis(name, int(size or number) if size or number else None, False))
            continue
        terms = [_product(tokens, notation)]
        while sign == "(" and tokens and tokens[0][-1] == "+":
            tokens.pop(0)
            terms.append(_product(tokens, notation))
        closing = tokens.pop(0)[-1] if tokens else ""
        if closing != {"(": ")", "[": "]"}[sign] or not all(terms):
            raise ValueError(f"{notation!r} has an empty or unclosed {sign!r}")
        if sign == "[":
            if len(terms[0]) != 1 or not isinstance(terms[0][0], _Axis):
                raise ValueError(f"{notation!r} has more than one axis in brackets")
            product.append(terms[0][0]._replace(counts_matrices=True))
        else:
            product.append(terms)
    return product


def resolve(product: _Product, total: int, what: str, source: str) -> list[Part]:
    """Splits a dimension of ``total`` indices into parts.

    Args:
        product: the terms of the dimension.
        what: what messages call the indices: rows or columns.
        source: the option and the text that ``product`` was parsed from, for messages.

    Raises:
        ValueError: if the sizes don't fit. The message continues "<parameter> …".
    """
    axes = list(_axes(product))
    sizes = {axis.name: axis.size for axis in axes if axis.name and axis.size is not None}
    unknown = dict.fromkeys(a.name for a in axes if a.size is None and a.name not in sizes)
    subject = f"has {total} {what}, which {source}"
    if len(unknown) > 1:
        raise ValueError(f"{subject} can't divide: give sizes to all but one of {list(unknown)}")
    if any(axis.size not in (None, sizes.get(axis.name, axis.size)) for axis in axes):
        raise ValueError(f"{subject} can't divide: a name has two sizes")
    for name in unknown:  # the total is linear in the size of a name that isn't nested in itself
        with_0, with_1, with_2 = (_size(product, {**sizes, name: n}) for n in (0, 1, 2))
        if with_2 - with_1 != with_1 - with_0 or not with_1 - with_0:
            raise ValueError(f"{subject} can't divide: {name!r} is nested in itself")
        sizes[name] = (total - with_0) // (with_1 - with_0)
    if not unknown and _size(product, sizes) != total:
        raise ValueError(f"has {total} {what}, but {source} adds up to {_size(product, sizes)}")
    if _size(product, sizes) != total or min(sizes.values(), default=1) < min(1, total):
        raise ValueError(f"{subject} does not divide")
    return _parts(product, 1, sizes)


def _axes(product: _Product) -> Iterator[_Axis]:
    for term in product:
        if isinstance(term, _Axis):
            yield term
        else:
            yield from itertools.chain.from_iterable(map(_axes, term))


def _size(product: _Product, sizes: dict[str, Any]) -> int:
    size = 1
    for term in product:
        if isinstance(term, _Axis):
            size *= sizes[term.name] if term.size is None else term.size
        else:
            size *= sum(_size(summand, sizes) for summand in term)
    return size


def _parts(product: _Product, stride: int, sizes: dict[str, Any]) -> list[Part]:
    """Returns the parts of a product whose innermost indices are ``stride`` apart."""
    parts = [Part(0, ())]
    for term in reversed(product):
        if isinstance(term, _Axis):
            loop = Loop(_size([term], sizes), stride, term.counts_matrices)
            outer = [Part(0, (loop,), (term.name,) if term.name else ())]
        else:
            outer, start = [], 0
            for summand in term:
                inner = _parts(summand, stride, sizes)
                outer += [part._replace(start=start + part.start) for part in inner]
                start += _size(summand, sizes) * stride
        parts = [
            Part(out.start + part.start, out.loops + part.loops, out.names + part.names)
            for out in outer
            for part in parts
        ]
        stride *= _size([term], sizes)
    return parts
