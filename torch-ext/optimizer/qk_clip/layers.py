"""Finds query and key projections by name, and the layers and rows of their heads."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from torch import Tensor

from .. import split_notation
from ..parameters.names import normalize_name
from ..parameters.options import Group
from .config import KEYS, LATENT_KEYS, LATENT_QUERIES, SIDES, ClipConfig, LayerConfig, LayerKey

Logits = Mapping[Any, Any]  # by layer, (heads,) each
HeadStarts = Mapping[str, Sequence[int]]  # by side, "q" or "k", the first rows of the heads


@dataclass(frozen=True)
class Projection:
    """A parameter whose rows are heads."""

    name: str  # FQN
    param: Tensor
    kind: str  # the part of its name that is in `SIDES` or in a ``row_map``
    is_bias: bool
    row_dims: int  # number of leading dimensions that count rows
    # First row, number of rows, and scale: 2h for a head h, 2h + 1 for its rotated rows.
    blocks: Sequence[tuple[int, int, int]] = ()

    @property
    def rows(self) -> int:
        return math.prod(self.param.shape[: self.row_dims])


@dataclass(frozen=True)
class Layer:
    """An attention layer. Query heads are numbered first, then key heads."""

    key: LayerKey  # its number, or its prefix if another layer has the same number
    prefix: str  # FQN of the module that owns the projections
    number: Optional[int]  # the last number in their names
    config: Optional[LayerConfig] = None  # None if QK-Clip skips it; then the rest is empty
    threshold: float = math.inf
    projections: Sequence[Projection] = ()
    heads: int = 0  # number of heads with scales
    pairs: Sequence[tuple[int, int]] = ()  # (logit, head that it scales)
    logits: int = 0  # number of logits that the layer expects

    @property
    def params(self) -> list[Tensor]:
        return [projection.param for projection in self.projections]

    def is_named(self, key: Any) -> bool:
        """True if a key is the layer's number, or its prefix up to one of the dots."""
        if isinstance(key, str):
            return f"{self.prefix}.".startswith(f"{key}.")
        return key is not None and key == self.number


def quote(keys: Sequence[LayerKey]) -> str:
    """Lists keys for a message, at most eight of them."""
    more = "" if len(keys) <= 8 else f" and {len(keys) - 8} more"
    return ", ".join(map(repr, keys[:8])) + more


def match_logits(
    logits: Logits, layers: Sequence[Layer], pass_over_unknown: bool
) -> tuple[dict[LayerKey, Any], list[Any]]:
    """Returns the logits of each layer by its key, and the names in ``logits`` without a layer.

    Raises:
        ValueError: a bounded layer has no logits, or, unless they are ignored, layers are unknown.
    """
    if not isinstance(logits, Mapping):
        raise ValueError(
            f"qk_logits must map layers to tensors (heads,), found a {type(logits).__name__}"
        )
    matched: dict[LayerKey, Any] = {}
    unknown = []
    for name, value in logits.items():
        layer = _layer_of(name, layers)
        if layer is None:
            unknown.append(name)
        elif layer.key in matched:
            raise ValueError(f"qk_logits has the layer {layer.prefix!r} twice")
        else:
            matched[layer.key] = value
    if unknown and not pass_over_unknown:
        raise ValueError(
            f"qk_logits has {unknown[0]!r}, where this optimizer has no query and key "
            f"projections; it has them in {quote([la.key for la in layers]) or 'no layer'}"
        )
    missing = [layer for layer in layers if layer.projections and layer.key not in matched]
    if missing:
        remedy = ""
        if unknown:  # for example, the recorder's module isn't the model
            found = f"The recorder has {quote(unknown)}, not {quote([la.prefix for la in missing])}"
            remedy = f". {found}: make it from the same module"
        raise ValueError(
            f"qk_logits lacks layers {quote([la.key for la in missing])}: pass the logits of all "
            f"layers, or set layers to None in clip_config to skip them{remedy}"
        )
    return matched, unknown


def _layer_of(name: Any, layers: Sequence[Layer]) -> Optional[Layer]:
    """The layer with this number or prefix, or whose prefix begins with ``name``."""
    key = normalize_name(name) if isinstance(name, str) else name
    named = [layer for layer in layers if layer.is_named(key)]
    # A whole prefix takes precedence over a beginning, and a bounded layer over others.
    exact = [layer for layer in named if layer.prefix == key]
    bounded = [layer for layer in named if layer.projections and layer.number == key]
    named = exact or bounded or named
    if len(named) > 1:
        raise ValueError(
            f"qk_logits has {name!r}, which may be any of {quote([la.key for la in named])}: use "
            "such prefixes of names as keys"
        )
    return named[0] if named else None


def find_layers(groups: Sequence[Group], config: ClipConfig) -> list[Layer]:
    """Finds the layers of all groups. Their keys are numbers if these are unique, else prefixes.

    Raises:
        ValueError: a group has no names, a configuration doesn't fit a projection, or two
            parameters have the same role in one layer.
    """
    row_maps = (layer_config.row_map for layer_config in config.values() if layer_config)
    attentions = _by_attention(_projections(groups, {*SIDES}.union(*row_maps)))
    numbers = [_last_number(projections[0].name) for projections in attentions.values()]
    are_keys = None not in numbers and len({*numbers}) == len(numbers)
    layers = []
    for (prefix, projections), number in zip(attentions.items(), numbers):
        layer = Layer(number if are_keys else prefix, prefix, number)  # type: ignore[arg-type]
        keys = filter(layer.is_named, config)
        # If several keys name a layer, its number takes precedence, then the longest key.
        key = max(keys, key=lambda key: (not isinstance(key, str), len(str(key))), default=None)
        if isinstance(key, int) and numbers.count(key) > 1:
            raise ValueError(
                f"clip_config[{key}]: several layers have this number, one of them {prefix!r}; "
                "use such prefixes of names as keys"
            )
        layer_config = config.get(key)
        layers.append(layer if layer_config is None else _bound(layer, layer_config, projections))
    return layers


def _bound(layer: Layer, config: LayerConfig, projections: Sequence[Projection]) -> Layer:
    """Adds the configuration and heads to a layer if it has projections of these kinds."""
    kinds = {*SIDES, *config.row_map}
    placed = [(p, _head_starts(p, config)) for p in projections if p.kind in kinds]
    if not placed:
        return layer
    counts = _count_heads(placed)
    q, k = _pair_heads(layer.prefix, config, counts)
    q_heads, k_heads = (
        counts.get(side, 1 + max(indices, default=-1)) for side, indices in (("q", q), ("k", k))
    )

    def blocks_of(starts: HeadStarts) -> Iterator[tuple[int, int, int]]:
        for head, row in enumerate(starts.get("q", ())):
            yield row, config.plain_dim, 2 * head
            yield row + config.plain_dim, config.rotated_dim, 2 * head + 1
        for head, row in enumerate(starts.get("k", ()), start=q_heads):
            yield row, config.plain_dim, 2 * head

    return replace(
        layer,
        config=config,
        threshold=config.threshold,
        projections=[replace(p, blocks=[*blocks_of(starts)]) for p, starts in placed],
        heads=q_heads + k_heads,
        pairs=[*enumerate(q), *((logit, q_heads + head) for logit, head in enumerate(k))],
        logits=max(len(q), len(k)),
    )


def _last_number(name: str) -> Optional[int]:
    return next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)


def _projections(
    groups: Sequence[Group], kinds: Collection[Any]
) -> Iterator[tuple[str, Projection]]:
    """Yields (FQN of the owner, projection) for ``kinds``: modules of these names with a weight and
    a bias, or parameters named like ``wq``, ``wq_weight``, and ``wq_bias``."""
    longest_first = sorted(map(re.escape, map(str, kinds)), key=len, reverse=True)
    pattern = re.compile(
        rf"(?:(.*)\.)?({'|'.join(longest_first)})(?:(?:\.\d+)*[._](weight|bias))?(?:\.\d+)*"
    )
    for group in groups:
        if group.names is None and group.use_muon and group.params:
            raise ValueError(
                f'{group.where}: clip_config needs names: give the group "names", one for each '
                "parameter"
            )
        for name, param in zip(group.names or (), group.params):
            match = pattern.fullmatch(normalize_name(name))
            if match is None:
                continue
            prefix, kind, suffix = match.groups(default="")
            is_bias = suffix == "bias" or (not suffix and param.ndim == 1)
            row_dims = param.ndim if is_bias else param.ndim - 1  # (heads, rows of each, cols)
            if not is_bias and (param.ndim > 3 or (group.use_muon and group.flatten)):
                row_dims = 1  # a convolution, (rows, cols, kernel…)
            yield prefix, Projection(name, param, kind, is_bias, row_dims)


def _by_attention(projections: Iterable[tuple[str, Projection]]) -> dict[str, list[Projection]]:
    """Groups projections by attention: by the FQN of the module that owns them.

    An owner of only queries and an owner of only keys form one attention if no other owner lies in
    the same block, which is the name up to its last number.
    """
    owners: dict[str, list[Projection]] = defaultdict(list)
    for prefix, projection in projections:
        owners[prefix].append(projection)
    blocks: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for prefix in owners:
        parts = prefix.split(".")
        last = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts))
        blocks[tuple(parts[: last + 1])].append(prefix)
    attentions: dict[str, list[Projection]] = {}
    for prefixes in blocks.values():
        sides = [{SIDES.get(p.kind, p.kind) for p in owners[prefix]} for prefix in prefixes]
        if sides in ([{"q"}, {"k"}], [{"k"}, {"q"}]):
            pairs = zip(*(prefix.split(".") for prefix in prefixes))
            common = [part for part, _ in itertools.takewhile(lambda p: p[0] == p[1], pairs)]
            attentions[".".join(common)] = [p for prefix in prefixes for p in owners[prefix]]
        else:
            attentions.update((prefix, owners[prefix]) for prefix in prefixes)
    return attentions


def _head_starts(projection: Projection, config: LayerConfig) -> HeadStarts:
    """The first rows of a projection's query heads and key heads, by side."""
    kind = config.row_map.get(projection.kind, projection.kind)
    rows, name = projection.rows, projection.name
    if kind not in SIDES:
        where = f"clip_config: row_map[{projection.kind!r}]: {name}"
        return _starts_by_axes(kind, rows, config, where)
    size, meaning = config.plain_dim + config.rotated_dim, "qk_nope_head_dim + qk_rope_head_dim"
    if config.value_dim is None:
        meaning = "head_dim"
        if kind in (*LATENT_QUERIES, *LATENT_KEYS):
            raise ValueError(
                f"clip_config does not fit {name}, a projection of multi-head latent attention: "
                "set is_mla=True, qk_nope_head_dim, qk_rope_head_dim and v_head_dim"
            )
    elif kind in KEYS:
        raise ValueError(
            f"clip_config has is_mla=True, which does not fit {name}: with latent attention, keys "
            "come from wkv_b or kv_b_proj; give other kinds of layers their own config, or None"
        )
    elif kind in LATENT_KEYS:
        size, meaning = config.plain_dim + config.value_dim, "qk_nope_head_dim + v_head_dim"
    if rows % size:
        raise ValueError(
            f"clip_config does not fit {name}: its {rows} rows can't be divided into heads of "
            f"{meaning}={size}"
        )
    return {SIDES[kind]: range(0, rows, size)}


def _starts_by_axes(notation: str, rows: int, config: LayerConfig, where: str) -> HeadStarts:
    """The first rows of the heads in the parts named q and k in the notation of ``split``."""
    product, _ = split_notation.parse(notation)
    try:
        parts = split_notation.resolve(product, rows, "rows", repr(notation))
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None
    starts: dict[str, Sequence[int]] = {}
    for side, rotated in ("q", config.rotated_dim), ("k", 0):
        size = config.plain_dim + rotated
        named = (part.indices() for part in parts if side in part.names)
        indices = sorted(itertools.chain.from_iterable(named))
        heads = [indices[at : at + size] for at in range(0, len(indices), size)]
        if any(head != list(range(head[0], head[0] + size)) for head in heads):
            raise ValueError(f"{where} has parts {side!r} that are not heads of {size} rows")
        if heads:
            starts[side] = [head[0] for head in heads]
    if not starts or any({"q", "k"} <= {*part.names} for part in parts):
        raise ValueError(f"{where} has no part 'q' or 'k', or one that is both, in {notation!r}")
    return starts


def _count_heads(projections: Sequence[tuple[Projection, HeadStarts]]) -> dict[str, int]:
    """Counts query heads and key heads, by side; checks that all projections agree on them."""
    heads: dict[str, int] = {}
    names: dict[tuple[str, bool], str] = {}
    have_weights = {side for p, starts in projections if not p.is_bias for side in starts}
    for projection, of_sides in projections:
        name, kind = projection.name, projection.kind
        for side, starts in of_sides.items():
            if heads.setdefault(side, len(starts)) != len(starts):
                raise ValueError(
                    f"{name} has {len(starts)} heads, but other parameters of the layer have "
                    f"{heads[side]}"
                )
        other = names.setdefault((SIDES.get(kind, kind), projection.is_bias), name)
        if other != name:
            raise ValueError(
                f"{other} and {name} would be clipped by the same logits; make clip_config a "
                "mapping from prefixes of names, in which only one of them has a config"
            )
        if of_sides.keys() - have_weights:
            raise ValueError(
                f"{name} would be clipped without its weight, which is not in the groups, or not "
                f"as {kind}.weight or {kind}_weight: skip the layer with None in clip_config"
            )
    return heads


def _pair_heads(
    prefix: str, config: LayerConfig, heads: Mapping[str, int]
) -> tuple[Sequence[int], Sequence[int]]:
    """The query head and key head of each logit, as configured or as attention pairs them."""
    q, k = config.q_indices, config.k_indices
    for side, indices in ("q", q), ("k", k):
        if indices and max(indices) >= heads.get(side, math.inf):
            raise ValueError(
                f"clip_config: {side}_indices has head {max(indices)}, but {prefix} has "
                f"{heads[side]}"
            )
    q_heads, k_heads = heads.get("q", 0), heads.get("k")
    if q is None:
        if not q_heads:
            raise ValueError(
                f"clip_config: set q_indices and k_indices, since the groups have no query "
                f"projection of {prefix} that would show the number of heads"
            )
        q = tuple(range(q_heads))
    if k is None and k_heads is not None:
        if not q_heads or q_heads % k_heads:
            raise ValueError(
                f"clip_config: {q_heads} query heads of {prefix} can't share {k_heads} key "
                "heads evenly: set q_indices and k_indices, or correct head_dim"
            )
        k = tuple(head // (q_heads // k_heads) for head in q)
    if q and k and len(k) != len(q):
        raise ValueError(
            f"clip_config: k_indices lists {len(k)} key heads, but {prefix} needs one for each of "
            f"{len(q)} query heads: list a key head once for each query head that reads it"
        )
    return q, k or ()
