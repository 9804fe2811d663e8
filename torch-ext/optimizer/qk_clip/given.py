"""Logits as they are given: by which layers, of which ranks, and their maxima over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import layout
from ..distributed import utils as dtensors
from ..distributed.collectives import max_over_ranks
from ..groups import normalize_name
from .config import LayerKey
from .projections import Layer
from .scales import Pack

Logits = Mapping[Any, Any]  # by layer, (heads,) each


class Layers:
    """The layers of an optimizer, and how logits name them."""

    def __init__(self, layers: Mapping[LayerKey, Layer], alone: Mapping[LayerKey, str]):
        self.layers = layers
        self._prefixes = {**{key: layer.prefix for key, layer in layers.items()}, **alone}
        self._numbers = {key: layer.number for key, layer in layers.items()}

    def match(self, logits: Logits, pass_over_unknown: bool = False) -> dict[LayerKey, Any]:
        """Logits by the keys of layers, of all that are bounded.

        Args:
            logits: as they are given.
            pass_over_unknown: logits of other layers don't matter.

        Raises:
            ValueError: other layers, or not all.
        """
        if not isinstance(logits, Mapping):
            raise ValueError(
                f"qk_logits must map layers to tensors (heads,), found a {type(logits).__name__}"
            )
        found: dict[LayerKey, Any] = {}
        for given, value in logits.items():
            key = self._key(given)
            if key is None:
                if pass_over_unknown:
                    continue
                raise ValueError(
                    f"qk_logits has {given!r}, where this optimizer has no query and key "
                    f"projections; it has them in {some(list(self._prefixes)) or 'no layer'}"
                )
            if key in found:
                raise ValueError(f"qk_logits has the layer {self._prefixes[key]!r} twice")
            if key in self.layers:
                found[key] = value
        missing = [key for key in self.layers if key not in found]
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
        """Those that are not of these layers, nor of any that are left alone."""
        return [given for given in logits if self._key(given) is None]

    def _key(self, given: Any) -> Optional[LayerKey]:
        if given in self._prefixes:
            return given
        if isinstance(given, str):
            name = normalize_name(given)
            prefixes = self._prefixes.items()
            found = [key for key, prefix in prefixes if prefix == name]
            found = found or [key for key, prefix in prefixes if prefix.startswith(f"{name}.")]
        else:
            found = [key for key, number in self._numbers.items() if number == given]
        if len(found) > 1:
            raise ValueError(
                f"qk_logits has {given!r}, which may be any of {some(found)}: tell layers by such "
                "prefixes of names"
            )
        return found[0] if found else None


def vector_of(value: Any, layer: Layer, pack: Pack) -> Tensor:
    """The logits of a layer that this rank knows, (n,); −inf for those of others.

    Raises:
        ValueError: not one number for each head; on another device; a DTensor that others reduce.
    """
    where = f"qk_logits of layer {layer.key!r}"
    if value is None:  # nothing was seen here
        return torch.full((layer.logits,), -math.inf, dtype=pack.dtype)
    if not isinstance(value, Tensor):
        try:
            value = torch.tensor(value, dtype=pack.dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(
                f"{where} must be a tensor (heads,) or a list of numbers, found {value!r}"
            ) from None
    if value.shape != (layer.logits,):
        raise ValueError(
            f"{where} have shape {tuple(value.shape)}, where {(layer.logits,)} is needed: the "
            "largest logit of each head in q_indices, or of every query head; of the heads that a "
            "rank has under tensor parallelism, a DTensor that says which, Shard(0)"
        )
    if value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{where} are {value.dtype}, no real numbers")
    interval = (0, layer.logits)
    if dtensors.is_dtensor(value):
        interval = _held_interval(value, where, pack)
    held = dtensors.local(value)
    if held.device not in (pack.device, torch.device("cpu")):
        raise ValueError(f"{where} are on {held.device}, but its weights on {pack.device}")
    if interval == (0, layer.logits):
        return held
    whole = held.new_full((layer.logits,), -math.inf, dtype=pack.dtype)
    whole[slice(*interval)] = held
    return whole


def _held_interval(value: Tensor, where: str, pack: Pack) -> layout.Interval:
    """Which of the logits of a DTensor this rank holds."""
    placements = value.placements  # type: ignore[attr-defined]
    partial = [p for p in placements if p.is_partial()]
    if any(p.reduce_op != "max" for p in partial):
        raise ValueError(f"{where} are {dtensors.describe(value)}; the maximum is needed")
    is_whole = all(p.is_replicate() for p in placements)
    others = set(dtensors.ranks_of(value) or ()) - set(pack.ranks or (pack.rank,))
    if others and not is_whole:
        raise ValueError(
            f"{where} are {dtensors.describe(value)}, but their weights are not shared with ranks "
            f"{sorted(others)}: give logits.full_tensor()"
        )
    sharding = dtensors.sharding_of(value)
    assert sharding is not None
    return sharding.region(value.shape, pack.rank)[0]


def joined(
    parts: Iterable[Tensor], dtype: torch.dtype, device: Optional[torch.device] = None
) -> Tensor:
    """All logits, a new tensor without NaN: they become Inf, which clips nothing."""
    whole = torch.cat([part.detach().to(device, dtype, non_blocking=True) for part in parts])
    return torch.where(whole.isnan(), math.inf, whole)


class Reduced(dict[Any, Tensor]):
    """Logits that are the same on all ranks."""


def reduce_qk_logits(logits: Logits, group: Any = None) -> dict[Any, Tensor]:
    """The maximum over ranks of the logits of all layers, in one collective.

    `Muon` takes it by itself, over the ranks that share the weights; this is for weights that it
    does not know to be shared, and for logits that are wanted elsewhere.

    Args:
        logits: by layer (n,) each, on one device; the same layers on all ranks.
        group: process group; None is the default one.

    Returns:
        New tensors, in fp32 or wider. NaN on any rank is Inf on all.

    Raises:
        ValueError: of a layer nothing, or only some heads.
    """
    wide = torch.float32
    for layer, value in logits.items():
        if not isinstance(value, Tensor) or dtensors.is_dtensor(value) or value.ndim != 1:
            found = dtensors.describe(value) if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"logits of layer {layer!r} must be a plain tensor of all heads, found {found}"
            )
        wide = torch.promote_types(wide, value.dtype)
    if not logits:
        return Reduced()
    order = sorted(logits, key=repr)
    maxima = joined((logits[layer] for layer in order), wide)
    max_over_ranks(maxima, dist.group.WORLD if group is None else group).wait()
    parts = dict(zip(order, maxima.split([len(logits[layer]) for layer in order])))
    return Reduced((layer, parts[layer]) for layer in logits)


def some(keys: Sequence[LayerKey]) -> str:
    more = "" if len(keys) <= 8 else f" and {len(keys) - 8} more"
    return ", ".join(map(repr, keys[:8])) + more
