"""Runs QK-Clip in a step: turns logits into factors on heads' rows, and counts clipped logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from ..distributed import dtensors, process_groups
from ..distributed.collectives import max_over_ranks
from ..distributed.plan import ranks_sort_key
from ..parameters.names import normalize_name
from ..parameters.options import Group, Settings
from ..parameters.survey import Survey, shared_with
from ..parameters.validation import warn
from .config import ClipConfig, LayerKey
from .layers import Layer, Logits, find_layers, match_logits, quote
from .scales import PackedLayers, ReducedLogits


@dataclass(eq=False)
class Clipping:
    """QK-Clip in one step.

    Args:
        packed_logits: all layers with their logits: this rank's before `reduce`, then the maxima.
        notes: lines that ranks compare, by the ranks that share the layers.
        counter: counts this step's clipped logits; None if the step doesn't count.
    """

    packed_logits: Sequence[tuple[PackedLayers, Tensor]]
    notes: Mapping[tuple[int, ...], Sequence[str]]
    counter: Optional[QKClip]
    _works: list[Any] = field(default_factory=list)

    def reduce(self, settings: Settings) -> None:
        """Starts to take the maxima of all layers over ranks; all ranks must call it."""
        for packed, logits in self.packed_logits:
            if packed.ranks is not None:
                param = next(p for p in packed.params if shared_with(p, settings) == packed.ranks)
                group = process_groups.process_group(param, packed.ranks, settings.replicas)
                self._works.append(max_over_ranks(logits, group))

    @functools.cached_property
    def _scales(self) -> dict[int, Tensor]:
        """The factors on this rank's rows of all projections, by id of the parameter."""
        for work in self._works:
            work.wait()
        by_id: dict[int, Tensor] = {}
        for packed, logits in self.packed_logits:
            by_id.update(packed.scales(logits))
        return by_id

    def scale(self, param: Tensor) -> Optional[Tensor]:
        """The factors on this rank's rows of a parameter, in a shape that broadcasts to them; None
        if it isn't a projection."""
        return self._scales.get(id(param))

    def finish(self) -> None:
        """Waits for the maxima, and counts the logits that the step clipped."""
        _ = self._scales  # a rank without rows of projections hasn't waited for the maxima
        if self.counter is not None:
            self.counter.count(self.packed_logits)


class QKClip:
    """QK-Clip's data between steps; copies and pickles keep only ``config``.

    Attributes:
        config: None if QK-Clip is off.
        recorder: records logits in the forward pass, for steps that get no other logits.
        next_logits: logits for the next step.
    """

    def __init__(self, config: Optional[ClipConfig]):
        self.config = config
        self.recorder: Any = None
        self.next_logits: Optional[Logits] = None
        self._warned_of_none = False
        self._survey: Optional[Survey] = None  # the survey that the layers were packed from
        self._packed_layers: list[PackedLayers] = []
        self._layers: Sequence[Layer] = ()
        self._unshared: list[str] = []  # prefixes of layers whose weights are plain
        self._notes: dict[tuple[int, ...], list[str]] = {}
        self._steps = 0
        self._last: Sequence[tuple[PackedLayers, Tensor]] = ()
        # Numbers of clipped and of Inf or NaN logits in all steps, (2,), by device.
        self._totals: dict[torch.device, Tensor] = {}

    def __reduce__(self) -> tuple:
        return QKClip, (self.config,)

    def find(self, groups: Sequence[Group]) -> list[Layer]:
        """Finds the layers of the groups; layers that QK-Clip skips have no projections.

        Raises:
            ValueError: a group has no names, or a configuration doesn't fit a projection.
        """
        return [] if self.config is None else find_layers(groups, self.config)

    def check_and_warn(self, groups: Sequence[Group]) -> None:
        """Checks like `find`, and warns if QK-Clip has no effect or may miss a parameter."""
        if self.config is None:
            return
        layers = find_layers(groups, self.config)
        bounded = [layer for layer in layers if layer.projections]
        if not bounded:
            warn(
                "clip_config: no query or key projection was found among the names of parameters; "
                "list other names in row_map"
            )
        keys = [key for key in self.config if key is not None]
        unmatched = [key for key in keys if not any(layer.is_named(key) for layer in layers)]
        if unmatched:
            warn(f"clip_config: no layer was found for {quote(unmatched)}")
        prefixes = {la.prefix for la in bounded if la.config and la.config.value_dim is None}
        norms = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
        for name in (name for group in groups for name in group.names or ()):
            prefix, _, norm = normalize_name(name).rpartition(".")[0].rpartition(".")
            if prefix in prefixes and norm in norms:
                warn(
                    f"clip_config: {name} normalizes the queries or keys that QK-Clip scales, so "
                    "scaling has no effect; the norm already bounds the logits, which need no clip"
                )
                break
        for group in groups:
            if group.names is None and any(p.ndim == 1 for p in group.params):
                warn(
                    f"clip_config: {group.where} has no names, so biases of query and key "
                    'projections are not found there: give the group "names"'
                )

    def begin(
        self,
        qk_logits: Optional[Logits],
        groups: Sequence[Group],
        survey: Survey,
        settings: Settings,
        is_dry: bool,
    ) -> Optional[Clipping]:
        """Prepares QK-Clip for a step; returns None if it is off, or has no logits.

        Args:
            qk_logits: logits passed to the step; if None, logits set before it, or recorded ones.
            is_dry: True if the step may be torch.distributed.checkpoint's, which only creates
                state. Without ``qk_logits``, it clips only layers with a nonzero gradient on any
                rank.

        Raises:
            ValueError: logits don't fit the layers, or there is no configuration.
        """
        next_logits, self.next_logits = self.next_logits, None
        recorded = None if self.recorder is None else self.recorder.take()
        given = next_logits if qk_logits is None else qk_logits
        logits = recorded if given is None else given
        if self.config is None:
            if logits is None:
                return None
            raise ValueError(
                "step() got qk_logits, but the optimizer has no clip_config that says how to bound "
                'them: Muon(..., clip_config={"head_dim": 128, "threshold": 100})'
            )
        if not (is_dry or self._warned_of_none):
            self._warned_of_none = _warn_of_none(logits)
        if logits is None:
            return None
        is_recorded = given is None  # may include layers that this optimizer doesn't train
        only_with_gradient = is_dry and qk_logits is None
        is_new = survey is not self._survey
        if is_new:
            self._pack_layers(find_layers(groups, self.config), survey, settings)
        by_layer, unknown = match_logits(logits, self._layers, pass_over_unknown=is_recorded)
        if is_new:
            _warn_of_unknown(unknown, groups)
        if self._unshared and dtensors.world_size() > 1 and not isinstance(logits, ReducedLogits):
            warn(
                f"QK-Clip: the weights of {quote(self._unshared)} are plain tensors, which the "
                "optimizer treats as this rank's own. If other ranks hold them too, as under DDP, "
                "ranks see different logits and their weights diverge: give Muon a process_group, "
                "or pass step() the result of qk_clip.reduce_qk_logits(logits)"
            )
            self._unshared = []  # warn only once
        packed_logits = []
        for packed in self._packed_layers:
            vector = packed.read_logits(by_layer)
            if only_with_gradient:
                vector = torch.where(_has_gradient(packed), vector, -math.inf)
            packed_logits.append((packed, vector))
        return Clipping(packed_logits, self._notes, None if only_with_gradient else self)

    def _pack_layers(self, layers: Sequence[Layer], survey: Survey, settings: Settings) -> None:
        """Packs layers with the same ranks and device together."""
        self._layers = layers
        self._unshared, self._notes = [], {}
        by_key: dict[tuple, list[Layer]] = {}  # the key: ranks and device
        for layer in (layer for layer in layers if layer.projections):
            ranks = _ranks_of(layer, settings)
            if ranks is None:
                self._unshared.append(layer.prefix)
            elif len(ranks) == 1 or dtensors.this_rank() not in ranks:
                ranks = None
            else:
                threshold = f"threshold {layer.threshold}"
                line = f"QK-Clip of layer {layer.key!r}: {threshold}, {layer.config}"
                self._notes.setdefault(ranks, []).append(line)
            device = dtensors.compute_device(layer.params[0])
            by_key.setdefault((ranks, device), []).append(layer)
        # All ranks go through their sets in the same order.
        keys = sorted(by_key, key=lambda key: (*ranks_sort_key(key[0] or ()), str(key[1])))
        self._packed_layers = [PackedLayers(by_key[key], *key) for key in keys]
        self._survey = survey

    def count(self, packed_logits: Sequence[tuple[PackedLayers, Tensor]]) -> None:
        """Keeps the logits of a step, and counts clipped ones on the device."""
        self._steps += 1
        self._last = packed_logits
        for packed, logits in packed_logits:
            counts = torch.stack([packed.is_clipped(logits).sum(), (logits == math.inf).sum()])
            self._totals[packed.device] = counts + self._totals.get(packed.device, 0)

    def stats(self) -> dict[str, Any]:
        """What `Muon.qk_clip_stats` returns."""
        if self.config is None:
            return {}
        layers: dict[LayerKey, dict[str, Any]] = {}
        for packed, logits in self._last:
            maxima, clipped = logits.tolist(), packed.is_clipped(logits).tolist()
            stop = 0
            for layer in packed.layers:
                start, stop = stop, stop + layer.logits
                layers[layer.key] = {
                    "max_logits": maxima[start:stop],
                    "max_logit": max(maxima[start:stop], default=-math.inf),
                    "clipped": sum(clipped[start:stop]),
                    "nonfinite": maxima[start:stop].count(math.inf),
                }
        totals = [counts.tolist() for counts in self._totals.values()]
        return {
            "steps": self._steps,
            "max_logit": max((la["max_logit"] for la in layers.values()), default=-math.inf),
            "heads": sum(len(layer["max_logits"]) for layer in layers.values()),
            "clipped": sum(layer["clipped"] for layer in layers.values()),
            "nonfinite": sum(layer["nonfinite"] for layer in layers.values()),
            "total_clipped": sum(clipped for clipped, _ in totals),
            "total_nonfinite": sum(nonfinite for _, nonfinite in totals),
            "layers": layers,
        }


def _warn_of_none(logits: Optional[Logits]) -> bool:
    """Warns about a step without logits; returns True if it did."""
    if logits is None:
        problem = (
            "step() got no qk_logits, so nothing is clipped: pass them, call set_qk_logits() "
            "before the step, or set qk_recorder"
        )
    elif isinstance(logits, Mapping) and logits and all(v is None for v in logits.values()):
        problem = (
            "qk_logits has no logits of any layer, so nothing is clipped: attach qk_recorder to "
            "the model that is trained; it hooks another model, or was removed or replaced"
        )
    else:
        return False
    warn(f"clip_config is given, but {problem}")
    return True


def _warn_of_unknown(layers: Sequence[Any], groups: Sequence[Group]) -> None:
    """Warns about attention that was recorded and is trained, but has no known projections."""
    names = [normalize_name(name) for group in groups for name in group.names or ()]
    trained = [layer for layer in layers if any(name.startswith(f"{layer}.") for name in names)]
    if trained:
        warn(
            f"clip_config: qk_recorder saw the attention in {quote(trained)}, but none of its "
            "parameters is known as a query or key projection, so it is not clipped: list their "
            "names in row_map"
        )


def _ranks_of(layer: Layer, settings: Settings) -> Optional[tuple[int, ...]]:
    """All ranks that hold parts or replicas of a layer's projections."""
    shared = (shared_with(param, settings) for param in layer.params)
    sets = {ranks for ranks in shared if ranks is not None}
    largest = max(sets, key=len, default=())
    for ranks in sets:
        if not set(ranks) <= set(largest):
            raise ValueError(
                f"{layer.prefix} has query and key projections on ranks {list(ranks)} and on ranks "
                f"{list(largest)}, which can't share their logits: put them on one mesh"
            )
    return largest or None


def _has_gradient(packed: PackedLayers) -> Tensor:
    """For each logit, True if this rank has a nonzero gradient in its layer, (n,)."""
    nonzero = []
    for layer in packed.layers:
        grads = [param.grad for param in layer.params]
        local = [dtensors.local(grad) for grad in grads if grad is not None]
        counts = [torch.count_nonzero(grad).to(packed.device) for grad in local]
        nonzero.append(sum(counts, torch.zeros((), device=packed.device)).expand(layer.logits))
    return torch.cat(nonzero) > 0
