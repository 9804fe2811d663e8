"""Clips in a step: takes the logits of each layer, scales the rows of its heads, counts clips."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from ..distributed import utils as dtensors
from ..distributed.collectives import max_over_ranks
from ..distributed.plan import ranks_sort_key
from ..distributed.utils import this_rank
from ..parameters.names import normalize_name
from ..parameters.options import Group, Settings
from ..parameters.survey import Survey, shared_with
from ..parameters.validation import warn
from .config import ClipConfig, LayerKey
from .logit_source import Logits
from .projections import Layer, Layers, find_layers, quote
from .scales import PackedLayers, ReducedLogits, concatenate_logits, read_layer_logits


@dataclass(eq=False)
class Clipping:
    """QK-Clip in one step.

    Args:
        packed_logits: all layers, with their logits: this rank's until `reduce`, then the maxima.
        notes: lines that ranks compare, by the ranks that share the layers.
        counter: keeps count of this step, if it counts.
    """

    packed_logits: Sequence[tuple[PackedLayers, Tensor]]
    notes: Mapping[tuple[int, ...], Sequence[str]]
    counter: Optional[QKClip]
    _works: list[Any] = field(default_factory=list)
    _scales_by_id: Optional[dict[int, Tensor]] = None

    def reduce(self, settings: Settings) -> None:
        """Starts to take the maxima over ranks, of all layers at once; on all ranks alike."""
        for packed, logits in self.packed_logits:
            if packed.ranks is not None:
                params = (projection.param for projection in packed.projections)
                param = next(p for p in params if shared_with(p, settings) == packed.ranks)
                group = dtensors.process_group(param, packed.ranks, settings.process_group)
                self._works.append(max_over_ranks(logits, group))

    def _scales(self) -> dict[int, Tensor]:
        """The factors of this rank's rows of all projections, by id of the parameter."""
        if self._scales_by_id is None:
            for work in self._works:
                work.wait()
            self._scales_by_id = {}
            for packed, logits in self.packed_logits:
                self._scales_by_id.update(packed.scales(logits))
        return self._scales_by_id

    def scale(self, param: Tensor) -> Optional[Tensor]:
        """The factors of this rank's rows of a parameter, which broadcast to them; None where the
        parameter is no projection."""
        return self._scales().get(id(param))

    def finish(self) -> None:
        """Waits for the maxima, and counts what the step has clipped."""
        self._scales()  # a rank that holds no row of a projection has not waited for the maxima
        if self.counter is not None:
            self.counter.count(self.packed_logits)


class QKClip:
    """What an optimizer keeps of QK-Clip between steps."""

    def __init__(self, config: ClipConfig):
        self.config = config
        self._has_warned = False  # of a step without logits
        self._has_warned_of_ranks = False  # that may see other logits
        self._survey: Optional[Survey] = None  # the one that the layers were packed from
        self._packed_layers: list[PackedLayers] = []
        self._layers = Layers({}, {})
        self._unshared: list[str] = []  # prefixes of layers whose weights are plain
        self._notes: dict[tuple[int, ...], list[str]] = {}
        self._steps = 0
        self._last: Sequence[tuple[PackedLayers, Tensor]] = ()
        self._clipped: dict[torch.device, Tensor] = {}  # how many logits in all steps, ()
        self._nonfinite: dict[torch.device, Tensor] = {}

    def __reduce__(self) -> tuple:
        return QKClip, (self.config,)

    def find(self, groups: Sequence[Group]) -> Collection[Layer]:
        """The layers whose logits are bounded.

        Raises:
            ValueError: no names; a configuration that does not fit a projection.
        """
        return find_layers(groups, self.config).bounded.values()

    def check_and_warn(self, groups: Sequence[Group]) -> None:
        """Checks as `find` does, and warns where QK-Clip has no effect, or may miss a parameter."""
        layers = self.find(groups)
        if not layers:
            warn(
                "clip_config: no query or key projection was found among the names of parameters; "
                "give other names in row_map"
            )
        if self.config.unmatched:
            warn(f"clip_config: no layer was found for {quote(list(self.config.unmatched))}")
        prefixes = {layer.prefix for layer in layers if layer.config.latent is None}
        for name in (name for group in groups for name in group.names or ()):
            prefix, _, norm = normalize_name(name).rpartition(".")[0].rpartition(".")
            if prefix in prefixes and norm in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
                warn(
                    f"clip_config: {name} normalizes what QK-Clip scales, which then has no "
                    "effect; bounded by their norms, such logits need no clip"
                )
                break
        for number, group in enumerate(groups):
            if group.names is None and any(p.ndim == 1 for p in group.params):
                warn(
                    f"clip_config: param_groups[{number}] has no names, so biases of query and key "
                    'projections are not found there: give the group "names"'
                )

    def begin(
        self,
        logits: Optional[Logits],
        is_recorded: bool,
        groups: Sequence[Group],
        survey: Survey,
        settings: Settings,
        is_dry: bool,
        only_with_gradient: bool,
    ) -> Optional[Clipping]:
        """QK-Clip of a step; None where there are no logits.

        Args:
            is_recorded: a recorder has made the logits, and may have layers that this optimizer
                does not train.
            is_dry: the step is to change nothing.
            only_with_gradient: leave layers alone whose gradients are zeros on all ranks.

        Raises:
            ValueError: logits that don't fit the layers.
        """
        if not is_dry:
            self._warn_of_none(logits)
        if logits is None:
            return None
        if survey is not self._survey:
            self._pack_layers(groups, survey, settings)
            if is_recorded:
                _warn_of_unknown(self._layers.unknown_names(logits), groups)
        by_layer = self._layers.match(logits, pass_over_unknown=is_recorded)
        if not isinstance(logits, ReducedLogits):
            self._warn_of_ranks()
        packed_logits = []
        for packed in self._packed_layers:
            parts = [read_layer_logits(by_layer[la.key], la, packed) for la in packed.layers]
            vector = concatenate_logits(parts, packed.dtype, packed.device)
            if only_with_gradient:
                vector = torch.where(_has_gradient(packed), vector, -math.inf)
            packed_logits.append((packed, vector))
        return Clipping(packed_logits, self._notes, None if only_with_gradient else self)

    def _warn_of_none(self, logits: Optional[Logits]) -> None:
        """Warns, once, of a step without logits."""
        if self._has_warned:
            return
        if logits is None:
            problem = (
                "step() got no qk_logits, so nothing is clipped: give it some, call "
                "set_qk_logits() before, or set qk_recorder"
            )
        elif isinstance(logits, Mapping) and logits and all(v is None for v in logits.values()):
            problem = (
                "qk_logits has no logits of any layer, so nothing is clipped: does qk_recorder "
                "hook the model that is trained, or was it removed, or replaced by another?"
            )
        else:
            return
        self._has_warned = True
        warn(f"clip_config is given, but {problem}")

    def _warn_of_ranks(self) -> None:
        """Warns, once, where other ranks may be replicas that clip by other logits."""
        if self._unshared and not self._has_warned_of_ranks and dtensors.world_size() > 1:
            self._has_warned_of_ranks = True
            warn(
                f"QK-Clip: the weights of {quote(self._unshared)} are plain tensors, which the "
                "optimizer takes for this rank's own. If other ranks hold them too, as under DDP, "
                "they see other logits, and their weights diverge: give Muon their process_group, "
                "or step() logits that were reduced, qk_clip.reduce_qk_logits(logits)"
            )

    def _pack_layers(self, groups: Sequence[Group], survey: Survey, settings: Settings) -> None:
        """Finds the layers of the groups, and packs those of the same ranks and device."""
        self._layers = find_layers(groups, self.config)
        self._unshared, self._notes = [], {}
        by_key: dict[tuple, list[Layer]] = {}  # the key: ranks and device
        for layer in self._layers.bounded.values():
            ranks = _ranks_of(layer, settings)
            if ranks is None:
                self._unshared.append(layer.prefix)
            elif len(ranks) == 1 or this_rank() not in ranks:
                ranks = None
            device = dtensors.compute_device(layer.projections[0].param)
            by_key.setdefault((ranks, device), []).append(layer)
            if ranks is not None:
                line = f"QK-Clip of layer {layer.key!r}: {layer.config}"
                self._notes.setdefault(ranks, []).append(line)
        # All ranks go through their sets in one order.
        keys = sorted(by_key, key=lambda key: (*ranks_sort_key(key[0] or ()), str(key[1])))
        self._packed_layers = [PackedLayers(by_key[key], *key) for key in keys]
        self._survey = survey

    def count(self, packed_logits: Sequence[tuple[PackedLayers, Tensor]]) -> None:
        """Keeps the logits of a step, and counts them on the device."""
        self._steps += 1
        self._last = packed_logits
        for packed, logits in packed_logits:
            clipped, nonfinite = packed.is_clipped(logits), logits == math.inf
            for totals, mask in ((self._clipped, clipped), (self._nonfinite, nonfinite)):
                totals[packed.device] = mask.sum() + totals.get(packed.device, 0)

    def stats(self) -> dict[str, Any]:
        """What `Muon.qk_clip_stats` returns."""
        layers: dict[LayerKey, dict[str, Any]] = {}
        for packed, logits in self._last:
            vectors = (logits, packed.is_clipped(logits))
            parts = zip(packed.layers, *(v.cpu().split(packed.logit_counts) for v in vectors))
            for layer, layer_logits, clipped in parts:
                maxima = layer_logits.tolist()
                layers[layer.key] = {
                    "max_logits": maxima,
                    "max_logit": max(maxima, default=-math.inf),
                    "clipped": int(clipped.sum()),
                    "nonfinite": int((layer_logits == math.inf).sum()),
                }
        return {
            "steps": self._steps,
            "max_logit": max((la["max_logit"] for la in layers.values()), default=-math.inf),
            "heads": sum(len(layer["max_logits"]) for layer in layers.values()),
            "clipped": sum(layer["clipped"] for layer in layers.values()),
            "nonfinite": sum(layer["nonfinite"] for layer in layers.values()),
            "total_clipped": sum(map(int, self._clipped.values())),
            "total_nonfinite": sum(map(int, self._nonfinite.values())),
            "layers": layers,
        }


def _warn_of_unknown(layers: Sequence[Any], groups: Sequence[Group]) -> None:
    """Warns of attention that was recorded and is trained, but whose projections are not known."""
    names = [normalize_name(name) for group in groups for name in group.names or ()]
    trained = [layer for layer in layers if any(name.startswith(f"{layer}.") for name in names)]
    if trained:
        warn(
            f"clip_config: qk_recorder saw the attention in {quote(trained)}, of whose parameters "
            "none is known as a query or key projection, so it is not clipped: give other names in "
            "row_map"
        )


def _ranks_of(layer: Layer, settings: Settings) -> Optional[tuple[int, ...]]:
    """All ranks that hold parts or replicas of a layer's projections."""
    shared = (shared_with(projection.param, settings) for projection in layer.projections)
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
    """For each logit whether this rank has a gradient of its layer that is not all zeros, (n,)."""
    nonzero = []
    for layer in packed.layers:
        grads = (projection.param.grad for projection in layer.projections)
        local = [dtensors.local(grad) for grad in grads if grad is not None]
        counts = [torch.count_nonzero(grad).to(packed.device) for grad in local]
        nonzero.append(sum(counts, torch.zeros((), device=packed.device)).expand(layer.logits))
    return torch.cat(nonzero) > 0
