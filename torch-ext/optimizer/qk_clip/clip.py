"""Bounds the attention logits of one step: from logits to a factor on every row, on the device.

For a logit m above the threshold, γ = threshold/m (Kimi Team 2025, arXiv:2507.20534, algorithm 1).
Query and key rows of that head are multiplied by sqrt(γ); with multi-head latent attention that is
for the rows without rotation, while rotated query rows are multiplied by γ and the rotated key,
which all heads share, stays. The scales of all heads of all layers come from one computation, whose
shapes depend on no value, so that the host waits for nothing.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .. import validation
from ..core import takes_part
from ..cpu_offload import narrow
from ..distributed import layout
from ..distributed import utils as dtensors
from ..distributed.collectives import max_over_ranks
from ..groups import normalize_name
from ..options import OptimizerWide
from ..planning import Survey, shared_with, this_rank
from .config import ClipConfig, LayerKey
from .projections import Layer, Projection, find_layers

Logits = Mapping[Any, Any]  # by layer, (heads,) each
Group = Mapping[str, Any]


class Pack:
    """Layers whose logits lie on one device and are shared by the same ranks, and what is known of
    them before there are logits.

    Logits of all layers are one vector, in the order of the layers; so are the heads, first the
    query heads of a layer, then its key heads.

    Args:
        layers: of it.
        device: where their weights are computed.
        ranks: that hold parts or replicas of their weights; None where this one is alone.
        rank: this one.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        device: torch.device,
        ranks: Optional[tuple[int, ...]],
        rank: int,
    ):
        self.layers = tuple(layers)
        self.device = device
        self.ranks = ranks
        self.param = layers[0].projections[0].param
        self.counts = [layer.logits for layer in layers]
        self.dtype = torch.float32
        for projection in self.projections:
            self.dtype = torch.promote_types(self.dtype, projection.param.dtype)
        self.rank = rank
        thresholds = (torch.full((n,), la.config.threshold) for n, la in zip(self.counts, layers))
        self.thresholds = torch.cat(list(thresholds)).to(device, self.dtype, non_blocking=True)
        members, partners = _heads(layers)
        rows, self._shapes = self._local_rows(len(partners))
        self._members, self._partners, self._rows = (
            table.to(device, non_blocking=True) for table in (members, partners, rows)
        )

    @property
    def projections(self) -> Iterator[Projection]:
        return (projection for layer in self.layers for projection in layer.projections)

    def _local_rows(self, heads: int) -> tuple[Tensor, list[tuple[int, ...]]]:
        """For each row here the place of its scale, of all projections one behind the other, and
        the shape in which those of a projection broadcast to its local tensor."""
        first, places, shapes = 0, [], []
        for layer in self.layers:
            own = layer.q_heads + layer.k_heads
            place_of = [*range(first, first + own)]
            place_of += range(heads + first, heads + first + layer.q_heads)
            place_of.append(2 * heads)
            for projection in layer.projections:
                param, dims = projection.param, projection.row_dims
                sharding = dtensors.sharding_of(param)
                region = layout.whole(param.shape)
                if sharding is not None:
                    region = sharding.region(param.shape, self.rank)
                rows = torch.tensor(place_of)[layer.slots(projection)].view(param.shape[:dims])
                places.append(rows[layout.slices(region[:dims])].flatten())
                shapes.append((*layout.shape_of(region[:dims]), *(1,) * (param.ndim - dims)))
            first += own
        return torch.cat(places).to(torch.int32), shapes

    def scales(self, logits: Tensor) -> dict[int, Tensor]:
        """What each local row is multiplied with, by id of its parameter.

        Args:
            logits: of all layers, (n,), not NaN.
        """
        above = self.is_clipped(logits)
        gamma = torch.where(above, self.thresholds / logits, 1.0)
        one = gamma.new_ones(1)
        least = torch.cat([gamma, one])[self._members].amin(dim=1)  # of the logits of each head
        roots = torch.cat([least.sqrt(), one])
        table = torch.cat([least / roots[self._partners], least, one])
        rows = table.index_select(0, self._rows).split([math.prod(s) for s in self._shapes])
        ids = (id(projection.param) for projection in self.projections)
        return {key: part.view(shape) for key, part, shape in zip(ids, rows, self._shapes)}

    def is_clipped(self, logits: Tensor) -> Tensor:
        return (logits > self.thresholds) & (logits < math.inf)


def _heads(layers: Sequence[Layer]) -> tuple[Tensor, Tensor]:
    """For each head the numbers of the logits that scale it, padded with the number behind the last
    one, and the head whose root its scale is divided by: its own, for sqrt(γ); with
    ``clip_mode="exact"``, a query head's is its key head's, for γ/κ; the number of heads, for none.
    """
    members: list[list[int]] = []
    partners: list[int] = []
    logits = 0
    for layer in layers:
        first = len(members)
        first_key = first + layer.q_heads
        members += [[] for _ in range(layer.q_heads + layer.k_heads)]
        partners += range(first, len(members))
        for start, indices in ((first, layer.q_indices), (first_key, layer.k_indices)):
            for number, head in enumerate(indices):
                members[start + head].append(logits + number)
        if layer.config.mode == "exact":
            pairs = itertools.zip_longest(layer.q_indices, layer.k_indices)
            for query, key in pairs:
                partners[first + query] = -1 if key is None else first_key + key
        logits += layer.logits
    most = max(map(len, members), default=1) or 1
    padded = [[*numbers, *(logits,) * (most - len(numbers))] for numbers in members]
    return torch.tensor(padded), torch.tensor([p if p >= 0 else len(partners) for p in partners])


class Clipping:
    """QK-Clip in one step.

    Args:
        packs: of all layers, with the largest logits that this rank knows of.
        notes: lines that ranks compare, by who shares the layers.
        clip: to whom to tell what was found.
    """

    def __init__(
        self,
        packs: Sequence[tuple[Pack, Tensor]],
        notes: Mapping[tuple[int, ...], Sequence[str]],
        clip: QKClip,
    ):
        self.notes = notes
        self._packs = packs
        self._clip = clip
        self._number = {
            id(p.param): n for n, (pack, _) in enumerate(packs) for p in pack.projections
        }
        self._work: list[Any] = []
        self._scales: dict[int, dict[int, Tensor]] = {}

    def reduce(self, wide: OptimizerWide) -> None:
        """Starts to take the maxima over ranks, of all layers at once; on all ranks alike."""
        for pack, logits in self._packs:
            group = None
            if pack.ranks is not None:
                group = dtensors.process_group(pack.param, pack.ranks, wide.process_group)
            self._work.append(None if group is None else max_over_ranks(logits, group))

    def scale(self, param: Tensor, index: Optional[tuple[slice, ...]] = None) -> Optional[Tensor]:
        """What the rows of a parameter here, or of a part of it, are multiplied with; broadcasts to
        them. None where it is no projection."""
        number = self._number.get(id(param))
        return None if number is None else narrow(self._scales_of(number)[id(param)], index)

    def _scales_of(self, number: int) -> dict[int, Tensor]:
        if number not in self._scales:
            pack, logits = self._packs[number]
            if self._work[number] is not None:
                self._work[number].wait()
            self._scales[number] = pack.scales(logits)
        return self._scales[number]

    def finish(self, groups: Sequence[Group]) -> None:
        """Clips what is not Muon's: biases, and weights that AdamW trains."""
        for group in groups:
            for param in group["params"]:
                if group["use_muon"] or not takes_part(param, group):
                    continue
                scale = self.scale(param)
                if scale is not None:
                    held = dtensors.local(param)
                    held.mul_(scale.to(held.device))  # they differ for hosted parameters only
        for number in range(len(self._packs)):  # also where this rank holds no row
            self._scales_of(number)
        self._clip.saw(self._packs)


@dataclass
class _Totals:
    clipped: Tensor  # (), on a device
    nonfinite: Tensor


class QKClip:
    """What an optimizer keeps of QK-Clip between steps.

    Args:
        config: how logits are bounded; None where they are not.

    Attributes:
        recorder: takes logits in the forward, for steps that are given none.
    """

    def __init__(self, config: Optional[ClipConfig] = None):
        self.config = config
        self.recorder: Any = None
        self._has_warned = False  # of a step without logits
        self._given: Optional[Logits] = None
        self._found: Optional[Survey] = None  # what the packs were made for
        self._packs: list[Pack] = []
        self._layers: _Layers = _Layers({}, {})
        self._notes: dict[tuple[int, ...], list[str]] = {}
        self._steps = 0
        self._last: Sequence[tuple[Pack, Tensor]] = ()
        self._totals: dict[torch.device, _Totals] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        QKClip.__init__(self, state["config"])

    # -- logits ------------------------------------------------------------------------------

    def give(self, logits: Optional[Logits]) -> None:
        self._given = logits

    def take(self, given: Optional[Logits]) -> Optional[Logits]:
        """What was given to the step; else what was set before it; else what was recorded."""
        waiting, self._given = self._given, None
        recorded = None if self.recorder is None else self.recorder.take()
        return next((found for found in (given, waiting) if found is not None), recorded)

    # -- layers ------------------------------------------------------------------------------

    def check(self, groups: Sequence[Group]) -> None:
        """Finds the layers, and forgets them.

        Raises:
            ValueError: no names; a configuration that does not fit a projection.
        """
        if self.config is not None:
            _layers_of(groups, self.config)

    def projections_of(self, groups: Sequence[Group]) -> set[int]:
        """Ids of the parameters that are scaled where logits are too large."""
        if self.config is None:
            return set()
        layers = _layers_of(groups, self.config).layers.values()
        return {id(projection.param) for layer in layers for projection in layer.projections}

    def warn_of_nothing(self, groups: Sequence[Group]) -> None:
        """Warns where QK-Clip finds nothing to do, or may miss something."""
        if self.config is None:
            return
        layers = _layers_of(groups, self.config).layers.values()
        if not layers:
            warnings.warn(
                "clip_config: no query or key projection was found among the names of parameters; "
                "row_map tells of other names",
                stacklevel=4,
            )
        norm = _norm_of_heads([layer for layer in layers if layer.config.latent is None], groups)
        if norm is not None:
            warnings.warn(
                f"clip_config: {norm} normalizes what QK-Clip scales, which then has no effect; "
                "bounded by their norms, such logits need no clip",
                stacklevel=4,
            )
        for number, group in enumerate(groups):
            if group["names"] is None and any(p.ndim == 1 for p in group["params"]):
                warnings.warn(
                    f"clip_config: param_groups[{number}] has no names, so biases of query and key "
                    'projections are not found there: give the group "names"',
                    stacklevel=4,
                )

    def warn_of_none(self) -> None:
        """Warns, once, of a step without logits."""
        if self.config is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "clip_config is given, but step() got no qk_logits, so nothing is clipped: give it "
                "some, call set_qk_logits() before, or set qk_recorder",
                stacklevel=validation.frames_to_the_caller(),
            )

    def begin(
        self,
        logits: Optional[Logits],
        groups: Sequence[Group],
        found: Survey,
        wide: OptimizerWide,
        only_with_gradient: bool = False,
    ) -> Optional[Clipping]:
        """QK-Clip of a step; None where there is nothing to do.

        Args:
            logits: by layer.
            groups, found, wide: of the optimizer.
            only_with_gradient: leave layers alone whose gradients are zeros on all ranks.

        Raises:
            ValueError: logits that don't fit the layers.
        """
        if logits is None:
            return None
        if self.config is None:
            raise ValueError(
                "step() got qk_logits, but the optimizer has no clip_config that says how to bound "
                'them: Muon(..., clip_config={"head_dim": 128, "threshold": 100})'
            )
        if found is not self._found:
            self._look_at(groups, found, wide)
        by_layer = self._layers.match(logits)
        packs = []
        for pack in self._packs:
            parts = [_vector(by_layer[layer.key], layer, pack) for layer in pack.layers]
            known = _joined(parts, pack)
            if only_with_gradient:
                known = torch.where(_has_gradient(pack), known, -math.inf)
            packs.append((pack, known))
        return Clipping(packs, self._notes, self)

    def _look_at(self, groups: Sequence[Group], found: Survey, wide: OptimizerWide) -> None:
        assert self.config is not None
        rank = this_rank()
        self._layers = _layers_of(groups, self.config)
        by_place: dict[tuple, list[Layer]] = {}
        for layer in self._layers.layers.values():
            ranks = _ranks_of(layer, wide)
            alone = ranks is None or len(ranks) == 1 or rank not in ranks
            device = dtensors.compute_device(layer.projections[0].param)
            by_place.setdefault((None if alone else ranks, device), []).append(layer)
        # All ranks go through their sets in one order, the larger ones first.
        order = sorted(
            by_place, key=lambda place: (-len(place[0] or ()), place[0] or (), str(place[1]))
        )
        self._packs = [Pack(by_place[place], place[1], place[0], rank) for place in order]
        self._notes = {}
        for pack in self._packs:
            if pack.ranks is not None:
                self._notes.setdefault(pack.ranks, []).extend(
                    f"QK-Clip of layer {layer.key!r}: {layer.config}" for layer in pack.layers
                )
        self._found = found

    # -- what was found ----------------------------------------------------------------------

    def saw(self, packs: Sequence[tuple[Pack, Tensor]]) -> None:
        """Keeps the logits of a step, and counts; on the device."""
        self._steps += 1
        self._last = packs
        for pack, logits in packs:
            clipped = pack.is_clipped(logits).sum()
            nonfinite = (logits == math.inf).sum()
            totals = self._totals.get(pack.device)
            if totals is None:
                self._totals[pack.device] = _Totals(clipped, nonfinite)
            else:
                totals.clipped += clipped
                totals.nonfinite += nonfinite

    def stats(self) -> dict[str, Any]:
        layers: dict[LayerKey, dict[str, Any]] = {}
        for pack, logits in self._last:
            parts = zip(*(t.cpu().split(pack.counts) for t in (logits, pack.is_clipped(logits))))
            for layer, (of_layer, clipped) in zip(pack.layers, parts):
                layers[layer.key] = {
                    "max_logits": of_layer.tolist(),
                    "max_logit": max(of_layer.tolist(), default=-math.inf),
                    "clipped": int(clipped.sum()),
                    "nonfinite": int((of_layer == math.inf).sum()),
                }
        return {
            "steps": self._steps,
            "max_logit": max((la["max_logit"] for la in layers.values()), default=-math.inf),
            "heads": sum(len(layer["max_logits"]) for layer in layers.values()),
            "clipped": sum(layer["clipped"] for layer in layers.values()),
            "nonfinite": sum(layer["nonfinite"] for layer in layers.values()),
            "total_clipped": sum(int(t.clipped) for t in self._totals.values()),
            "total_nonfinite": sum(int(t.nonfinite) for t in self._totals.values()),
            "layers": layers,
        }


# -- logits as they come -------------------------------------------------------------------------


class _Layers:
    """The layers of an optimizer, and how logits name them."""

    def __init__(self, layers: Mapping[LayerKey, Layer], alone: Mapping[LayerKey, str]):
        self.layers = layers
        self._prefixes = {**{key: layer.prefix for key, layer in layers.items()}, **alone}
        self._numbers = {key: layer.number for key, layer in layers.items()}

    def match(self, logits: Logits) -> dict[LayerKey, Any]:
        """Logits by the keys of layers, of all that are bounded.

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
            if key in found:
                raise ValueError(f"qk_logits has the layer {self._prefixes[key]!r} twice")
            if key in self.layers:
                found[key] = value
        missing = [key for key in self.layers if key not in found]
        if missing:
            raise ValueError(
                f"qk_logits lacks layers {_some(missing)}: give those of all layers, or None in "
                "clip_config for layers to leave alone"
            )
        return found

    def _key(self, given: Any) -> LayerKey:
        if given in self._prefixes:
            return given
        if isinstance(given, str):
            name = normalize_name(given)
            found = [key for key, prefix in self._prefixes.items() if prefix == name]
            found = found or [
                key for key, prefix in self._prefixes.items() if f"{prefix}.".startswith(f"{name}.")
            ]
        else:
            found = [key for key, number in self._numbers.items() if number == given]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"qk_logits has {given!r}, which may be any of {_some(found)}: tell layers by such "
                "prefixes of names"
            )
        raise ValueError(
            f"qk_logits has {given!r}, where this optimizer has no query and key projections; it "
            f"has them in {_some(list(self._prefixes)) or 'no layer'}"
        )


def _layers_of(groups: Sequence[Group], config: ClipConfig) -> _Layers:
    names: list[str] = []
    params: list[Tensor] = []
    for number, group in enumerate(groups):
        if group["names"] is None:
            if group["use_muon"] and group["params"]:
                raise ValueError(
                    f"param_groups[{number}]: clip_config needs names: give the group "
                    '"names", one for each parameter'
                )
            continue
        names += group["names"]
        params += group["params"]
    return _Layers(*find_layers(names, params, config))


def _norm_of_heads(layers: Sequence[Layer], groups: Sequence[Group]) -> Optional[str]:
    """The usual name of a norm between a projection and the logits (QK-norm), if there is one."""
    prefixes = {layer.prefix for layer in layers}
    for name in (name for group in groups for name in group["names"] or ()):
        owner = normalize_name(name).rpartition(".")[0]
        prefix, _, norm = owner.rpartition(".")
        if prefix in prefixes and norm in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
            return name
    return None


def _some(keys: Sequence[LayerKey]) -> str:
    more = "" if len(keys) <= 8 else f" and {len(keys) - 8} more"
    return ", ".join(map(repr, keys[:8])) + more


def _turn(place: tuple[Optional[tuple[int, ...]], torch.device]) -> tuple:
    """All ranks go through their sets in one order, the larger ones first."""
    ranks, device = place[0] or (), place[1]
    return -len(ranks), ranks, str(device)


def _ranks_of(layer: Layer, wide: OptimizerWide) -> Optional[tuple[int, ...]]:
    """All ranks that hold parts or replicas of a layer's projections."""
    found = {shared_with(projection.param, wide) for projection in layer.projections} - {None}
    largest = max(found, key=lambda ranks: len(ranks or ()), default=None)
    for ranks in found:
        if not set(ranks or ()) <= set(largest or ()):
            raise ValueError(
                f"{layer.prefix} has query and key projections on ranks {list(ranks or ())} and on "
                f"ranks {list(largest or ())}, which can't share their logits: put them on one mesh"
            )
    return largest


def _vector(value: Any, layer: Layer, pack: Pack) -> Tensor:
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
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"{where} must be a tensor (heads,) or a list of numbers, found {value!r}"
            ) from None
    if value.shape != (layer.logits,):
        raise ValueError(
            f"{where} have shape {tuple(value.shape)}, where {(layer.logits,)} is needed: the "
            "largest logit of each head in q_indices, or of every query head"
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


def _joined(parts: Iterable[Tensor], pack: Pack) -> Tensor:
    """All logits on the device, a new tensor without NaN: they become Inf, which clips nothing."""
    joined = torch.cat([part.to(pack.device, pack.dtype, non_blocking=True) for part in parts])
    return torch.where(joined.isnan(), math.inf, joined)


def _has_gradient(pack: Pack) -> Tensor:
    """For each logit whether this rank has a gradient of its layer that is not all zeros, (n,)."""
    nonzero = []
    for layer in pack.layers:
        grads = (projection.param.grad for projection in layer.projections)
        held = [dtensors.local(grad) for grad in grads if grad is not None]
        of_layer = [torch.count_nonzero(grad).to(pack.device) for grad in held]
        nonzero.append(sum(of_layer, torch.zeros((), device=pack.device)).expand(layer.logits))
    return torch.cat(nonzero) > 0


def reduce_qk_logits(logits: Logits, group: Any = None) -> dict[Any, Tensor]:
    """The maximum over ranks of the logits of all layers, in one collective.

    `Muon` takes it by itself, over the ranks that share the weights; this is for logits that are
    wanted elsewhere.

    Args:
        logits: by layer (n,) each, on one device; the same layers in the same order on all ranks.
        group: process group; None is the default one.

    Returns:
        New tensors, in fp32 or wider. NaN on any rank is Inf on all.
    """
    if not logits:
        return {}
    wide = torch.float32
    for value in logits.values():
        wide = torch.promote_types(wide, value.dtype)
    joined = torch.cat([value.detach().to(wide) for value in logits.values()])
    joined = torch.where(joined.isnan(), math.inf, joined)
    max_over_ranks(joined, dist.group.WORLD if group is None else group).wait()
    return dict(zip(logits, joined.split([len(value) for value in logits.values()])))
