"""Which parameters are query and key projections of which layer, and which head each row is of."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from torch import Tensor

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
    Starts,
)

Logits = Mapping[Any, Any]  # by layer, (heads,) each


@dataclass(frozen=True)
class Projection:
    """A parameter whose rows are heads."""

    name: str  # FQN
    param: Tensor
    kind: str  # what the name says: one of `KINDS`, or a name in a `row_map`
    prefix: str  # FQN of the attention that owns the parameter
    number: Optional[int]  # the last one in the name
    is_bias: bool  # of a projection, not its weight
    row_dims: int  # how many dimensions count rows
    # By side, "q" or "k", the first rows of the heads; empty until the layer is known.
    starts: Mapping[str, Starts] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return math.prod(self.param.shape[: self.row_dims])


@dataclass(frozen=True)
class Layer:
    """An attention whose logits are bounded together."""

    key: LayerKey  # its number, or its prefix where another layer has the same number
    prefix: str  # FQN of what owns the projections
    number: Optional[int]  # the last one in their names
    config: LayerConfig
    projections: tuple[Projection, ...]
    q_heads: int  # those that have scales
    k_heads: int
    q_indices: tuple[int, ...]  # for each logit the head that it scales; one of both may be empty
    k_indices: tuple[int, ...]

    @property
    def logits(self) -> int:
        """How many logits the layer takes."""
        return max(len(self.q_indices), len(self.k_indices))


class Layers:
    """The layers of an optimizer by their keys, and how logits name them.

    Args:
        bounded: those whose logits are bounded.
        alone: prefixes of those that are left alone.
    """

    def __init__(self, bounded: Mapping[LayerKey, Layer], alone: Mapping[LayerKey, str]):
        self.bounded = bounded
        self._prefixes = {**{key: layer.prefix for key, layer in bounded.items()}, **alone}

    def match(self, logits: Logits, pass_over_unknown: bool) -> dict[LayerKey, Any]:
        """Maps the key of each layer that is bounded to its logits.

        Raises:
            ValueError: layers that lack logits, or, unless they are passed over, unknown layers.
        """
        if not isinstance(logits, Mapping):
            raise ValueError(
                f"qk_logits must map layers to tensors (heads,), found a {type(logits).__name__}"
            )
        found: dict[LayerKey, Any] = {}
        for given, value in logits.items():
            key = self._key(given)
            if key is None and pass_over_unknown:
                continue
            if key is None:
                raise ValueError(
                    f"qk_logits has {given!r}, where this optimizer has no query and key "
                    f"projections; it has them in {some(list(self._prefixes)) or 'no layer'}"
                )
            if key in found:
                raise ValueError(f"qk_logits has the layer {self._prefixes[key]!r} twice")
            if key in self.bounded:
                found[key] = value
        missing = [key for key in self.bounded if key not in found]
        if missing:
            unknown = self.unknown(logits)  # of a recorder of a part of the model, or of one around
            names = some([self._prefixes[key] for key in missing])
            remedy = f". The recorder has {some(unknown)}, not {names}: make it of the same module"
            raise ValueError(
                f"qk_logits lacks layers {some(missing)}: give those of all layers, or None in "
                f"clip_config for layers to leave alone{remedy if unknown else ''}"
            )
        return found

    def unknown(self, logits: Logits) -> list[Any]:
        """The keys that name no layer, neither one that is bounded nor one that is left alone."""
        return [given for given in logits if self._key(given) is None]

    def _key(self, given: Any) -> Optional[LayerKey]:
        """The layer that a key, a number, a prefix of names or a beginning of one means."""
        if given in self._prefixes:
            return given
        if isinstance(given, str):
            name = normalize_name(given)
            prefixes = self._prefixes.items()
            found = [key for key, prefix in prefixes if prefix == name]
            found = found or [key for key, prefix in prefixes if prefix.startswith(f"{name}.")]
        else:
            found = [key for key, layer in self.bounded.items() if layer.number == given]
        if len(found) > 1:
            raise ValueError(
                f"qk_logits has {given!r}, which may be any of {some(found)}: tell layers by such "
                "prefixes of names"
            )
        return found[0] if found else None


def some(keys: Sequence[LayerKey]) -> str:
    more = "" if len(keys) <= 8 else f" and {len(keys) - 8} more"
    return ", ".join(map(repr, keys[:8])) + more


def find_layers(groups: Sequence[Group], config: ClipConfig) -> Layers:
    """The layers of all groups. Keys are numbers where no two layers have the same, else prefixes.

    Raises:
        ValueError: no names; a configuration that does not fit a projection; two parameters that
            play the same part in one layer.
    """
    attentions = _by_attention(_projections(groups, {*KINDS, *config.row_map_names}))
    numbers = [projections[0].number for projections in attentions.values()]
    have_numbers = None not in numbers and len(set(numbers)) == len(numbers)
    bounded: dict[LayerKey, Layer] = {}
    alone: dict[LayerKey, str] = {}
    for (prefix, projections), number in zip(attentions.items(), numbers):
        key = number if number is not None and have_numbers else prefix
        chosen = config.of(key, number, prefix, is_only=numbers.count(number) == 1)
        if chosen is not None:
            projections = [p for p in projections if p.kind in KINDS or p.kind in chosen.row_map]
        if chosen is None or not projections:
            alone[key] = prefix
            continue
        projections = [replace(p, starts=_head_starts(p, chosen)) for p in projections]
        heads = _count_heads(projections, chosen)
        q, k = _pair_heads(prefix, chosen, heads)
        bounded[key] = Layer(
            key=key,
            prefix=prefix,
            number=number,
            config=chosen,
            projections=tuple(projections),
            q_heads=heads.get("q", 1 + max(q, default=-1)),
            k_heads=heads.get("k", 1 + max(k, default=-1)),
            q_indices=q,
            k_indices=k,
        )
    return Layers(bounded, alone)


def _projections(groups: Sequence[Group], known: set[str]) -> Iterator[Projection]:
    """Tells projections by the component that owns the parameter, or by the parameter's name."""
    for number, group in enumerate(groups):
        if group.names is None and group.use_muon and group.params:
            raise ValueError(
                f"param_groups[{number}]: clip_config needs names: give the group "
                '"names", one for each parameter'
            )
        for name, param in zip(group.names or (), group.params):
            parts = normalize_name(name).split(".")
            named = [index for index, part in enumerate(parts) if not part.isdigit()]
            if not named or "parametrizations" in parts:  # what is stored is not the weight
                continue
            attribute, owner = parts[named[-1]], parts[named[-2]] if len(named) > 1 else ""
            stem, _, suffix = attribute.rpartition("_")
            if owner in known and attribute in ("weight", "bias"):
                kind, at, is_bias = owner, named[-2], attribute == "bias"
            elif attribute in known:
                kind, at, is_bias = attribute, named[-1], param.ndim == 1
            elif stem in known and suffix in ("weight", "bias"):
                kind, at, is_bias = stem, named[-1], suffix == "bias"
            else:
                continue
            row_dims = param.ndim if is_bias else param.ndim - 1  # (heads, rows of each, cols)
            if not is_bias and (param.ndim > 3 or (group.use_muon and group.flatten)):
                row_dims = 1  # of a convolution, (rows, cols, kernel…)
            numbers = [int(part) for part in parts if part.isdigit()]
            last = numbers[-1] if numbers else None
            yield Projection(name, param, kind, ".".join(parts[:at]), last, is_bias, row_dims)


def _by_attention(projections: Iterable[Projection]) -> dict[str, list[Projection]]:
    """The projections of each attention, by the FQN of what owns them.

    An owner of queries only and an owner of keys only are one attention where no other owner lies
    in the same block, which is what the last number in a name counts.
    """
    owners: dict[str, list[Projection]] = defaultdict(list)
    for projection in projections:
        owners[projection.prefix].append(projection)
    blocks: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for prefix in owners:
        parts = prefix.split(".")
        last = max((at for at, part in enumerate(parts) if part.isdigit()), default=len(parts))
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


def _head_starts(projection: Projection, config: LayerConfig) -> Mapping[str, Starts]:
    """The first rows of a projection's query heads and of its key heads, by side."""
    kind = config.row_map.get(projection.kind, projection.kind)
    rows, name = projection.rows, projection.name
    if not isinstance(kind, str):
        where = f"clip_config: row_map[{projection.kind!r}]"
        sizes = config.head_dim, config.plain_dim
        heads = [(start, start + size) for starts, size in zip(kind, sizes) for start in starts]
        end = 0
        for start, stop in sorted(heads):
            if stop > rows:
                raise ValueError(
                    f"{where} has a head of {stop - start} rows from row {start} on, but {name} "
                    f"has {rows} rows"
                )
            if start < end:
                raise ValueError(
                    f"{where} has a head from row {start} on, which is in the one before, that "
                    f"ends with row {end - 1}"
                )
            end = stop
        return {side: starts for side, starts in zip("qk", kind) if starts}
    size, meaning = config.head_dim, "head_dim"
    if config.latent is None:
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
        size, meaning = config.latent[0] + config.latent[2], "qk_nope_head_dim + v_head_dim"
    else:
        meaning = "qk_nope_head_dim + qk_rope_head_dim"
    if rows % size:
        raise ValueError(
            f"clip_config does not fit {name}: {rows} rows are no heads of {meaning}={size}"
        )
    return {SIDES[kind]: range(0, rows, size)}


def _count_heads(projections: Sequence[Projection], config: LayerConfig) -> dict[str, int]:
    """How many query heads and key heads a layer has, by side, on which its projections agree."""
    heads: dict[str, int] = {}
    sizes: dict[str, int] = {}
    parts: dict[tuple[str, bool], Projection] = {}
    of_weights = {side for p in projections if not p.is_bias for side in p.starts}
    for projection in projections:
        name, kind = projection.name, projection.kind
        for side, starts in projection.starts.items():
            if heads.setdefault(side, len(starts)) != len(starts):
                raise ValueError(
                    f"{name} has {len(starts)} heads, but other parameters of the layer have "
                    f"{heads[side]}"
                )
        like = config.row_map.get(kind)
        size = sizes.setdefault(like if isinstance(like, str) else kind, projection.rows)
        if projection.rows != size:
            raise ValueError(
                f"{name} has {projection.rows} rows, but others of its projection {size}"
            )
        other = parts.setdefault((SIDES.get(kind, kind), projection.is_bias), projection)
        if other is not projection:
            raise ValueError(
                f"{other.name} and {name} would be clipped by the same logits; let clip_config be "
                "a mapping from prefixes of names, or a function, that gives only one of them a "
                "config"
            )
        if projection.starts.keys() - of_weights:
            raise ValueError(
                f"{name} would be clipped without its weight, which is not in the groups, or not "
                f"as {kind}.weight or {kind}_weight: leave the layer alone, by None in clip_config"
            )
    return heads


def _pair_heads(
    prefix: str, config: LayerConfig, heads: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each logit its query head and its key head, as configured or as attention pairs them."""
    q, k = config.q_indices, config.k_indices
    q_heads, k_heads = heads.get("q"), heads.get("k")
    for side, indices in (("q", q), ("k", k)):
        if indices and max(indices) >= heads.get(side, math.inf):
            raise ValueError(
                f"clip_config: {side}_indices has head {max(indices)}, but {prefix} has "
                f"{heads[side]}"
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
