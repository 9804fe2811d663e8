"""Finds query and key projections by their names, their layers, and the rows of each head."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor

from .. import split_notation
from ..parameters.names import normalize_name
from ..parameters.options import Group
from .config import (
    KEYS,
    KINDS,
    LATENT_KEYS,
    LATENT_QUERIES,
    SIDES,
    ClipConfig,
    LayerConfig,
    LayerKey,
)

Logits = Mapping[Any, Any]  # by layer, (heads,) each
HeadStarts = Mapping[str, Sequence[int]]  # by side, "q" or "k", the first rows of the heads


@dataclass(frozen=True)
class Projection:
    """A parameter whose rows are heads."""

    name: str  # FQN
    param: Tensor
    kind: str  # what the name says: one of `KINDS`, or a name in a `row_map`
    prefix: str  # FQN of the attention that owns the parameter
    number: Optional[int]  # the last number in the name
    is_bias: bool
    row_dims: int  # how many dimensions count rows

    @property
    def rows(self) -> int:
        return math.prod(self.param.shape[: self.row_dims])


@dataclass(frozen=True)
class Layer:
    """An attention whose logits are bounded; ``heads`` and ``indices`` are by side."""

    key: LayerKey  # its number, or its prefix where another layer has the same number
    prefix: str  # FQN of what owns the projections
    number: Optional[int]  # the last number in their names
    config: LayerConfig
    projections: tuple[tuple[Projection, HeadStarts], ...]
    heads: Mapping[str, int]  # how many have scales
    indices: Mapping[str, tuple[int, ...]]  # for each logit the head that it scales; one may be ()

    @property
    def params(self) -> list[Tensor]:
        return [projection.param for projection, _ in self.projections]

    @property
    def logits(self) -> int:
        """How many logits the layer takes."""
        return max(map(len, self.indices.values()))


@dataclass(frozen=True)
class Layers:
    """The layers of an optimizer by their keys, and how logits name them."""

    bounded: Mapping[LayerKey, Layer]  # whose logits are bounded
    prefixes: Mapping[LayerKey, str]  # of all layers
    unmatched: Sequence[LayerKey] = ()  # keys of ``clip_config`` that no layer has

    def match(
        self, logits: Logits, pass_over_unknown: bool
    ) -> tuple[dict[LayerKey, Any], list[Any]]:
        """The logits of each bounded layer by its key, and names in ``logits`` of no known layer.

        Raises:
            ValueError: layers that lack logits, or, unless they are passed over, unknown layers.
        """
        if not isinstance(logits, Mapping):
            raise ValueError(
                f"qk_logits must map layers to tensors (heads,), found a {type(logits).__name__}"
            )
        matched: dict[LayerKey, Any] = {}
        unknown = []
        for name, value in logits.items():
            key = self._key_of(name)
            if key is None:
                unknown.append(name)
            elif key in matched:
                raise ValueError(f"qk_logits has the layer {self.prefixes[key]!r} twice")
            elif key in self.bounded:
                matched[key] = value
        if unknown and not pass_over_unknown:
            raise ValueError(
                f"qk_logits has {unknown[0]!r}, where this optimizer has no query and key "
                f"projections; it has them in {quote(list(self.prefixes)) or 'no layer'}"
            )
        missing = [key for key in self.bounded if key not in matched]
        if missing:
            remedy = ""
            if unknown:  # as where a recorder's module is not the model
                names = quote([self.prefixes[key] for key in missing])
                found = f". The recorder has {quote(unknown)}, not {names}"
                remedy = f"{found}: make it of the same module"
            raise ValueError(
                f"qk_logits lacks layers {quote(missing)}: give those of all layers, or None in "
                f"clip_config for layers to leave alone{remedy}"
            )
        return matched, unknown

    def _key_of(self, name: Any) -> Optional[LayerKey]:
        """The key of the layer that ``name`` means: its key, number, prefix, or how that begins."""
        if name in self.prefixes:
            return name
        if isinstance(name, str):
            start, prefixes = normalize_name(name), self.prefixes.items()
            keys = [key for key, prefix in prefixes if prefix == start]
            keys = keys or [key for key, prefix in prefixes if _begins(prefix, start)]
        else:
            keys = [key for key, layer in self.bounded.items() if layer.number == name]
        if len(keys) > 1:
            raise ValueError(
                f"qk_logits has {name!r}, which may be any of {quote(keys)}: tell layers by such "
                "prefixes of names"
            )
        return keys[0] if keys else None


def quote(keys: Sequence[LayerKey]) -> str:
    """Lists keys for a message, at most eight of them."""
    more = "" if len(keys) <= 8 else f" and {len(keys) - 8} more"
    return ", ".join(map(repr, keys[:8])) + more


def find_layers(groups: Sequence[Group], config: ClipConfig) -> Layers:
    """The layers of all groups. Keys are numbers where no two layers have the same, else prefixes.

    Raises:
        ValueError: no names; a configuration that does not fit a projection; two parameters that
            play the same part in one layer.
    """
    row_maps = (layer_config.row_map for layer_config in config.values() if layer_config)
    attentions = _by_attention(_projections(groups, {*KINDS}.union(*row_maps)))
    numbers = {prefix: projections[0].number for prefix, projections in attentions.items()}
    are_keys = None not in numbers.values() and len({*numbers.values()}) == len(numbers)
    configs, unmatched = _configs_of(numbers, config)
    bounded: dict[LayerKey, Layer] = {}
    prefixes: dict[LayerKey, str] = {}
    for prefix, projections in attentions.items():
        number, layer_config = numbers[prefix], configs[prefix]
        key: Any = number if are_keys else prefix
        prefixes[key] = prefix
        if layer_config is None:
            continue
        kinds = {*KINDS, *layer_config.row_map}
        placed = tuple((p, _head_starts(p, layer_config)) for p in projections if p.kind in kinds)
        if placed:
            heads = _count_heads(placed)
            indices = _pair_heads(prefix, layer_config, heads)
            for side, of_logits in indices.items():
                heads.setdefault(side, 1 + max(of_logits, default=-1))
            bounded[key] = Layer(key, prefix, number, layer_config, placed, heads, indices)
    return Layers(bounded, prefixes, unmatched)


def _configs_of(
    numbers: Mapping[str, Optional[int]], config: ClipConfig
) -> tuple[dict[str, Optional[LayerConfig]], list[LayerKey]]:
    """The configuration of each layer by its prefix, and the keys of ``config`` that no layer has.

    ``numbers`` are those of all layers. Of several keys that name a layer, its number counts, else
    the longest.
    """
    configs: dict[str, Optional[LayerConfig]] = dict.fromkeys(numbers, config.get(None))
    unmatched: list[LayerKey] = []
    names = [name for name in config if name is not None]
    for name in sorted(names, key=lambda name: (not isinstance(name, str), len(str(name)))):
        if isinstance(name, str):
            named = [prefix for prefix in numbers if _begins(prefix, name)]
        else:
            named = [prefix for prefix, number in numbers.items() if number == name]
            if len(named) > 1:
                raise ValueError(
                    f"clip_config[{name}]: there are several layers of this number, one of them "
                    f"{named[0]!r}; tell them by such prefixes of names"
                )
        configs.update(dict.fromkeys(named, config[name]))
        if not named:
            unmatched.append(name)
    return configs, unmatched


def _begins(prefix: str, start: str) -> bool:
    """Whether a name begins with all components of another one."""
    return f"{prefix}.".startswith(f"{start}.")


def _projections(groups: Sequence[Group], kinds: set[str]) -> Iterator[Projection]:
    """Finds projections of ``kinds`` by the module that owns the parameter, or by its own name."""
    for number, group in enumerate(groups):
        if group.names is None and group.use_muon and group.params:
            raise ValueError(
                f"param_groups[{number}]: clip_config needs names: give the group "
                '"names", one for each parameter'
            )
        for name, param in zip(group.names or (), group.params):
            parts = normalize_name(name).split(".")
            words = [index for index, part in enumerate(parts) if not part.isdigit()]
            if not words or "parametrizations" in parts:  # such a parameter is not the weight
                continue
            attribute, owner = parts[words[-1]], parts[words[-2]] if len(words) > 1 else ""
            stem, _, suffix = attribute.rpartition("_")
            if owner in kinds and attribute in ("weight", "bias"):
                kind, stop, is_bias = owner, words[-2], attribute == "bias"
            elif attribute in kinds:
                kind, stop, is_bias = attribute, words[-1], param.ndim == 1
            elif stem in kinds and suffix in ("weight", "bias"):
                kind, stop, is_bias = stem, words[-1], suffix == "bias"
            else:
                continue
            row_dims = param.ndim if is_bias else param.ndim - 1  # (heads, rows of each, cols)
            if not is_bias and (param.ndim > 3 or (group.use_muon and group.flatten)):
                row_dims = 1  # of a convolution, (rows, cols, kernel…)
            last = next((int(part) for part in reversed(parts) if part.isdigit()), None)
            yield Projection(name, param, kind, ".".join(parts[:stop]), last, is_bias, row_dims)


def _by_attention(projections: Iterable[Projection]) -> dict[str, list[Projection]]:
    """The projections of each attention, by the FQN of the module that owns them.

    An owner of queries only and an owner of keys only are one attention where no other owner lies
    in the same block; the last number in a name tells the block.
    """
    owners: dict[str, list[Projection]] = defaultdict(list)
    for projection in projections:
        owners[projection.prefix].append(projection)
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
            common = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            prefix = ".".join(part for part, _ in common)
            attentions[prefix] = [p for owner in prefixes for p in owners[owner]]
        else:
            attentions.update((prefix, owners[prefix]) for prefix in prefixes)
    return attentions


def _head_starts(projection: Projection, config: LayerConfig) -> HeadStarts:
    """The first rows of a projection's query heads and of its key heads, by side."""
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
            f"clip_config has is_mla=True, which does not fit {name}: with latent attention keys "
            "come from wkv_b or kv_b_proj; give layers of another kind a config of their own, "
            "or None"
        )
    elif kind in LATENT_KEYS:
        size, meaning = config.plain_dim + config.value_dim, "qk_nope_head_dim + v_head_dim"
    if rows % size:
        raise ValueError(
            f"clip_config does not fit {name}: {rows} rows are no heads of {meaning}={size}"
        )
    return {SIDES[kind]: range(0, rows, size)}


def _starts_by_axes(notation: str, rows: int, config: LayerConfig, where: str) -> HeadStarts:
    """The first rows of the heads in the parts that the notation of ``split`` names q and k."""
    product, _ = split_notation.parse(notation)
    try:
        parts = split_notation.resolve(product, rows, "rows", repr(notation))
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None
    starts: dict[str, list[int]] = {}
    for side, rotated in ("q", config.rotated_dim), ("k", 0):
        size = config.plain_dim + rotated
        named = (part.indices() for part in parts if side in part.names)
        indices = sorted(itertools.chain.from_iterable(named))
        heads = [indices[at : at + size] for at in range(0, len(indices), size)]
        if any(head != list(range(head[0], head[0] + size)) for head in heads):
            raise ValueError(f"{where} has parts {side!r} that are no heads of {size} rows")
        if heads:
            starts[side] = [head[0] for head in heads]
    if not starts or any({"q", "k"} <= {*part.names} for part in parts):
        raise ValueError(f"{where} has no part 'q' or 'k', or one that is both, in {notation!r}")
    return starts


def _count_heads(projections: Sequence[tuple[Projection, HeadStarts]]) -> dict[str, int]:
    """How many query heads and key heads a layer has, by side, on which its projections agree."""
    heads: dict[str, int] = {}
    by_side: dict[tuple[str, bool], str] = {}
    weight_sides = {side for p, starts in projections if not p.is_bias for side in starts}
    for projection, of_sides in projections:
        name, kind = projection.name, projection.kind
        for side, starts in of_sides.items():
            if heads.setdefault(side, len(starts)) != len(starts):
                raise ValueError(
                    f"{name} has {len(starts)} heads, but other parameters of the layer have "
                    f"{heads[side]}"
                )
        other = by_side.setdefault((SIDES.get(kind, kind), projection.is_bias), name)
        if other != name:
            raise ValueError(
                f"{other} and {name} would be clipped by the same logits; let clip_config be "
                "a mapping from prefixes of names that gives only one of them a config"
            )
        if of_sides.keys() - weight_sides:
            raise ValueError(
                f"{name} would be clipped without its weight, which is not in the groups, or not "
                f"as {kind}.weight or {kind}_weight: leave the layer alone, by None in clip_config"
            )
    return heads


def _pair_heads(
    prefix: str, config: LayerConfig, heads: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """For each logit its query head and its key head, as configured or as attention pairs them."""
    for side, indices in config.indices.items():
        if indices and max(indices) >= heads.get(side, math.inf):
            raise ValueError(
                f"clip_config: {side}_indices has head {max(indices)}, but {prefix} has "
                f"{heads[side]}"
            )
    q, k = config.indices.values()
    q_heads, k_heads = heads.get("q"), heads.get("k")
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
    if k is None and k_heads is not None:
        if not q_heads or q_heads % k_heads:
            raise ValueError(
                f"clip_config: {q_heads} query heads of {prefix} can't share {k_heads} key "
                "heads evenly: give q_indices and k_indices, or mend head_dim"
            )
        k = tuple(head // (q_heads // k_heads) for head in q)
    return {"q": q, "k": k or ()}
