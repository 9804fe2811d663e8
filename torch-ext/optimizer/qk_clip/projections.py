"""Which parameters are query and key projections of which layer, and which head each row is of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from ..groups import normalize_name
from .config import (
    KEYS,
    KINDS,
    LATENT_KEYS,
    LATENT_QUERIES,
    QUERIES,
    ClipConfig,
    LayerConfig,
    LayerKey,
)


@dataclass(frozen=True)
class Projection:
    """A parameter whose rows are heads.

    Args:
        name: its FQN.
        param: itself.
        kind: what its name says: one of `KINDS`, or the name of a `row_map`.
        prefix: FQN of the attention that owns it.
        number: the last one in its name, if there is any.
        is_bias: of a projection, instead of its weight.
        row_dims: how many of its dimensions count rows.
    """

    name: str
    param: Tensor
    kind: str
    prefix: str
    number: Optional[int]
    is_bias: bool
    row_dims: int

    @property
    def rows(self) -> int:
        return math.prod(self.param.shape[: self.row_dims])


@dataclass(frozen=True)
class Layer:
    """An attention whose logits are bounded together.

    Args:
        key: its number, or its prefix where another layer has the same number.
        prefix: FQN of what owns its projections.
        number: the last one in their names.
        config: how it is bounded.
        projections: of it.
        q_heads, k_heads: how many there are, as far as scales are concerned.
        q_indices, k_indices: for each logit the heads it scales; one of them may be empty.
    """

    key: LayerKey
    prefix: str
    number: Optional[int]
    config: LayerConfig
    projections: tuple[Projection, ...]
    q_heads: int
    k_heads: int
    q_indices: tuple[int, ...]
    k_indices: tuple[int, ...]

    @property
    def logits(self) -> int:
        """How many there are to be given."""
        return max(len(self.q_indices), len(self.k_indices))


def row_dims_of(param: Tensor, flatten: bool) -> int:
    """How many dimensions of a weight count rows: of (rows, cols) one, of (heads, rows of each,
    cols) two, of a convolution (rows, cols, kernel…), read as ``flatten`` says, one."""
    return 1 if flatten or param.ndim > 3 else param.ndim - 1


def find_layers(
    named: Iterable[tuple[str, Tensor, int]], config: ClipConfig
) -> tuple[dict[LayerKey, Layer], dict[LayerKey, str]]:
    """The layers whose logits are bounded, by their keys, and prefixes of those left alone.

    Keys are numbers where no two layers have the same, else prefixes.

    Args:
        named: names, parameters, and how many dimensions count rows if they are weights.
        config: how logits are bounded.

    Raises:
        ValueError: a configuration that does not fit a projection; two parameters that play the
            same part in one layer.
    """
    known = {*KINDS, *config.row_map_names}
    found = [_recognize(*each, known) for each in named]
    layers: dict[LayerKey, Layer] = {}
    alone: dict[LayerKey, str] = {}
    together = _by_layer([projection for projection in found if projection is not None])
    numbers = [of_layer[0].number for of_layer in together]
    have_numbers = None not in numbers and len(set(numbers)) == len(numbers)
    for of_layer, number in zip(together, numbers):
        prefix = _common_prefix(of_layer)
        key = number if number is not None and have_numbers else prefix
        chosen = config.of(key, number, prefix, is_only=numbers.count(number) == 1)
        if chosen is not None:
            of_layer = [p for p in of_layer if p.kind in KINDS or p.kind in chosen.row_map]
        if chosen is None or not of_layer:
            alone[key] = prefix
        else:
            layers[key] = _layer(key, prefix, number, chosen, of_layer)
    return layers, alone


def _recognize(name: str, param: Tensor, row_dims: int, known: set[str]) -> Optional[Projection]:
    """By the component that owns the parameter, or by what the parameter itself is called."""
    parts = normalize_name(name).split(".")
    named = [index for index, part in enumerate(parts) if not part.isdigit()]
    if not named or "parametrizations" in parts:  # what is stored is not the weight
        return None
    attribute, owner = parts[named[-1]], parts[named[-2]] if len(named) > 1 else ""
    stem, _, suffix = attribute.rpartition("_")
    if owner in known and attribute in ("weight", "bias"):
        kind, at, is_bias = owner, named[-2], attribute == "bias"
    elif attribute in known:
        kind, at, is_bias = attribute, named[-1], param.ndim == 1
    elif stem in known and suffix in ("weight", "bias"):
        kind, at, is_bias = stem, named[-1], suffix == "bias"
    else:
        return None
    numbers = [int(part) for part in parts if part.isdigit()]
    number = numbers[-1] if numbers else None
    row_dims = param.ndim if is_bias else row_dims
    return Projection(name, param, kind, ".".join(parts[:at]), number, is_bias, row_dims)


def _by_layer(projections: Sequence[Projection]) -> list[list[Projection]]:
    """Those with one owner are one layer; and so are, under one number, an owner of queries only
    and an owner of keys only."""
    owners: dict[str, list[Projection]] = defaultdict(list)
    for projection in projections:
        owners[projection.prefix].append(projection)
    blocks: dict[tuple[str, ...], list[list[Projection]]] = defaultdict(list)
    for prefix, of_owner in owners.items():
        parts = prefix.split(".")
        last = max((at for at, part in enumerate(parts) if part.isdigit()), default=len(parts))
        blocks[tuple(parts[: last + 1])].append(of_owner)
    layers: list[list[Projection]] = []
    for of_block in blocks.values():
        sides = [{_side(projection.kind) for projection in of_owner} for of_owner in of_block]
        if sides in ([{"q"}, {"k"}], [{"k"}, {"q"}]):
            of_block = [[*of_block[0], *of_block[1]]]
        layers += of_block
    return layers


def _twice(projections: Iterable[Projection]) -> Optional[tuple[str, str]]:
    """Names of two projections that play the same part."""
    parts: dict[tuple[str, bool], str] = {}
    for projection in projections:
        part = _side(projection.kind), projection.is_bias
        if part in parts:
            return parts[part], projection.name
        parts[part] = projection.name
    return None


def _side(kind: str) -> str:
    return "q" if kind in QUERIES else "k" if kind in (*KEYS, *LATENT_KEYS) else kind


def _common_prefix(projections: Sequence[Projection]) -> str:
    common = projections[0].prefix.split(".")
    for projection in projections[1:]:
        others = projection.prefix.split(".")
        same = [a == b for a, b in zip(common, others)]
        common = common[: same.index(False) if False in same else len(same)]
    return ".".join(common)


# -- which rows are whose ------------------------------------------------------------------------


def _layer(
    key: LayerKey,
    prefix: str,
    number: Optional[int],
    config: LayerConfig,
    projections: Sequence[Projection],
) -> Layer:
    heads: dict[str, int] = {}
    sizes: dict[str, int] = {}
    counts = [_heads(projection, config) for projection in projections]
    for projection, of_sides in zip(projections, counts):
        for side, count in of_sides.items():
            if heads.setdefault(side, count) != count:
                raise ValueError(
                    f"{projection.name} has {count} heads, but other parameters of the layer have "
                    f"{heads[side]}"
                )
        kind = config.like(projection.kind)
        part = kind if isinstance(kind, str) else projection.kind
        if sizes.setdefault(part, projection.rows) != projection.rows:
            raise ValueError(
                f"{projection.name} has {projection.rows} rows, but others of its projection "
                f"{sizes[part]}"
            )
    twice = _twice(projections)
    if twice is not None:
        raise ValueError(
            f"{twice[0]} and {twice[1]} would be clipped by the same logits; let clip_config be a "
            "mapping from prefixes of names, or a function, that gives only one of them a config"
        )
    of_weights = {
        side for p, of_sides in zip(projections, counts) if not p.is_bias for side in of_sides
    }
    for projection, of_sides in zip(projections, counts):
        if of_sides.keys() - of_weights:
            raise ValueError(
                f"{projection.name} would be clipped without its weight, which is not in the "
                f"groups, or not as {projection.kind}.weight or {projection.kind}_weight: leave "
                "the layer alone, by None in clip_config"
            )
    q_indices, k_indices = _indices(prefix, config, heads.get("q"), heads.get("k"))
    return Layer(
        key,
        prefix,
        number,
        config,
        tuple(projections),
        heads.get("q", 1 + max(q_indices, default=-1)),
        heads.get("k", 1 + max(k_indices, default=-1)),
        q_indices,
        k_indices,
    )


def _heads(projection: Projection, config: LayerConfig) -> dict[str, int]:
    """How many query heads and key heads a projection has.

    Raises:
        ValueError: it can't have such heads.
    """
    kind = config.like(projection.kind)
    rows, name = projection.rows, projection.name
    if not isinstance(kind, str):
        for starts, size in zip(kind, _sizes(config)):
            wrong = [start for start in starts if start + size > rows]
            if wrong:
                raise ValueError(
                    f"clip_config: row_map[{projection.kind!r}] has a head of {size} rows from row "
                    f"{wrong[0]} on, but {name} has {rows} rows"
                )
        intervals = sorted(
            (start, start + size) for starts, size in zip(kind, _sizes(config)) for start in starts
        )
        for (_, stop), (start, _) in zip(intervals, intervals[1:]):
            if start < stop:
                raise ValueError(
                    f"clip_config: row_map[{projection.kind!r}] has a head from row {start} on, "
                    f"which is in the one before, that ends with row {stop - 1}"
                )
        return {side: len(starts) for side, starts in zip("qk", kind) if starts}
    if config.latent is None:
        if kind in (*LATENT_QUERIES, *LATENT_KEYS):
            raise ValueError(
                f"clip_config does not fit {name}, a projection of multi-head latent attention: "
                "set is_mla=True, qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
            )
        size, told = config.head_dim, "head_dim"
    elif kind in KEYS:
        raise ValueError(
            f"clip_config has is_mla=True, which does not fit {name}: with latent attention keys "
            "come from wkv_b or kv_b_proj; give layers of another kind a config of their own, "
            "or None"
        )
    elif kind in LATENT_KEYS:
        size, told = config.latent[0] + config.latent[2], "qk_nope_head_dim + v_head_dim"
    else:
        size, told = config.head_dim, "qk_nope_head_dim + qk_rope_head_dim"
    if rows % size:
        raise ValueError(
            f"clip_config does not fit {name}: {rows} rows are no heads of {told}={size}"
        )
    return {_side(kind): rows // size}


def _sizes(config: LayerConfig) -> tuple[int, int]:
    """Rows of a query head and of a key head."""
    return config.head_dim, config.head_dim if config.latent is None else config.latent[0]


def _indices(
    prefix: str, config: LayerConfig, q_heads: Optional[int], k_heads: Optional[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each logit its query head and its key head, as told or as attention pairs them."""
    q, k = config.q_indices, config.k_indices
    for side, indices, heads in (("q", q, q_heads), ("k", k, k_heads)):
        if indices and heads is not None and max(indices) >= heads:
            raise ValueError(
                f"clip_config: {side}_indices has head {max(indices)}, but {prefix} has {heads}"
            )
    if q is None:
        if q_heads is None:
            raise ValueError(
                f"clip_config: give q_indices and k_indices, for the groups have no query "
                f"projection of {prefix} that would tell how many heads there are"
            )
        q = tuple(range(q_heads))
        if k and len(k) != len(q):
            raise ValueError(
                f"clip_config: k_indices lists {len(k)} key heads, but {prefix} has {len(q)} query "
                "heads: list a key head once for each query head that reads it"
            )
    if k is None:
        k = ()
        if k_heads is not None:
            if not q_heads or q_heads % k_heads:
                raise ValueError(
                    f"clip_config: {q_heads} query heads of {prefix} can't share {k_heads} key "
                    "heads evenly: give q_indices and k_indices, or mend head_dim"
                )
            k = tuple(head // (q_heads // k_heads) for head in q)
    return q, k


def slots_of(layer: Layer, projection: Projection) -> Tensor:
    """For each row of a projection its scale's place, (rows,) in int64, on the CPU.

    Places are those of query heads, of key heads, of the rotated rows of query heads, and the last
    one for rows that nothing scales.
    """
    config = layer.config
    kind = config.like(projection.kind)
    rotated, alone = layer.q_heads + layer.k_heads, 2 * layer.q_heads + layer.k_heads
    slots = torch.full((projection.rows,), alone, dtype=torch.int64)
    q: Sequence[int] = ()
    k: Sequence[int] = ()
    if not isinstance(kind, str):
        q, k = kind
    elif _side(kind) == "q":
        q = range(0, projection.rows, _stride(kind, config))
    else:
        k = range(0, projection.rows, _stride(kind, config))
    q_size, k_size = _sizes(config)
    plain = q_size if config.latent is None else config.latent[0]
    _fill(slots, q, 0, plain, first=0)
    _fill(slots, q, plain, q_size, first=rotated)
    _fill(slots, k, 0, k_size, first=layer.q_heads)
    return slots


def _stride(kind: str, config: LayerConfig) -> int:
    """Rows from one head to the next."""
    if config.latent is not None and kind in LATENT_KEYS:
        return config.latent[0] + config.latent[2]
    return config.head_dim


def _fill(slots: Tensor, heads: Sequence[int], start: int, stop: int, first: int) -> None:
    """Rows ``start`` to ``stop`` of each head, given by its first row, get consecutive places."""
    if len(heads) and stop > start:
        rows = torch.tensor(heads)[:, None] + torch.arange(start, stop)
        slots[rows] = torch.arange(first, first + len(heads))[:, None]
