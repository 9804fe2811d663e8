"""QK-Clip of an optimizer: finds the layers, takes their logits, scales rows, keeps count."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from ..cpu_offload import narrow
from ..distributed import utils as dtensors
from ..distributed.collectives import max_over_ranks
from ..distributed.plan import ranks_sort_key
from ..parameters.names import normalize_name
from ..parameters.options import Group, Settings
from ..parameters.survey import Survey, shared_with, this_rank
from ..parameters.validation import warn
from .config import ClipConfig, LayerKey
from .projections import Layer, Layers, Logits, find_layers, some
from .scales import Pack, Reduced, joined, vector_of


@dataclass(eq=False)
class Clipping:
    """QK-Clip in one step.

    Args:
        packs: of all layers, with the largest logits that this rank knows of.
        notes: lines that ranks compare, by who shares the layers.
        clip: to whom to tell what was found, if to anybody.
    """

    packs: Sequence[tuple[Pack, Tensor]]
    notes: Mapping[tuple[int, ...], Sequence[str]]
    clip: Optional[QKClip]
    _works: list[Any] = field(default_factory=list)
    _by_id: Optional[dict[int, Tensor]] = None

    def reduce(self, settings: Settings) -> None:
        """Starts to take the maxima over ranks, of all layers at once; on all ranks alike."""
        for pack, logits in self.packs:
            if pack.ranks is not None:
                params = (projection.param for projection in pack.projections)
                param = next(p for p in params if shared_with(p, settings) == pack.ranks)
                group = dtensors.process_group(param, pack.ranks, settings.process_group)
                self._works.append(max_over_ranks(logits, group))

    def _scales(self) -> dict[int, Tensor]:
        """What the rows of each projection here are multiplied with, by id of the parameter."""
        if self._by_id is None:
            for work in self._works:
                work.wait()
            self._by_id = {}
            for pack, logits in self.packs:
                self._by_id.update(pack.scales(logits))
        return self._by_id

    def scale(self, param: Tensor, index: Optional[tuple[slice, ...]] = None) -> Optional[Tensor]:
        """What the rows of a parameter here, or of a part of it, are multiplied with; broadcasts to
        them. None where it is no projection."""
        return narrow(self._scales().get(id(param)), index)

    def finish(self, groups: Sequence[Group]) -> None:
        """Clips what is not Muon's: biases, and weights that AdamW trains."""
        scales = self._scales()
        for group in groups:
            for param in group.params:
                if id(param) in scales and group.takes_part(param) and not group.use_muon:
                    held = dtensors.local(param)
                    # The devices differ for hosted parameters only.
                    held.mul_(scales[id(param)].to(held.device))
        if self.clip is not None:
            self.clip.count(self.packs)


class QKClip:
    """What an optimizer keeps of QK-Clip between steps.

    Args:
        config: how logits are bounded; None where they are not.

    Attributes:
        recorder: takes logits in the forward, for steps that are given none.
        given: logits for the next step.
    """

    def __init__(self, config: Optional[ClipConfig] = None):
        self.config = config
        self.recorder: Any = None
        self.given: Optional[Logits] = None
        self._has_warned = False  # of a step without logits
        self._has_warned_of_ranks = False  # that may see other logits
        self._found: Optional[Survey] = None  # what the packs were made for
        self._packs: list[Pack] = []
        self._layers = Layers({}, {})
        self._unshared: list[str] = []  # prefixes of layers whose weights are plain
        self._notes: dict[tuple[int, ...], list[str]] = {}
        self._steps = 0
        self._last: Sequence[tuple[Pack, Tensor]] = ()
        self._clipped: dict[torch.device, Tensor] = {}  # how many in all steps, ()
        self._nonfinite: dict[torch.device, Tensor] = {}

    def __reduce__(self) -> tuple:
        return QKClip, (self.config,)

    def find(self, groups: Sequence[Group]) -> Collection[Layer]:
        """The layers whose logits are bounded.

        Raises:
            ValueError: no names; a configuration that does not fit a projection.
        """
        return find_layers(groups, self.config).bounded.values() if self.config else ()

    def check_and_warn(self, groups: Sequence[Group]) -> None:
        """The same, with warnings where QK-Clip finds nothing to do, or may miss something."""
        if self.config is None:
            return
        layers = self.find(groups)
        if not layers:
            warn(
                "clip_config: no query or key projection was found among the names of parameters; "
                "row_map tells of other names"
            )
        if self.config.unmatched:
            warn(f"clip_config: no layer was found for {some(list(self.config.unmatched))}")
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
        qk_logits: Optional[Logits],
        groups: Sequence[Group],
        found: Survey,
        settings: Settings,
        is_dry: bool,
    ) -> Optional[Clipping]:
        """QK-Clip of a step; None where there is nothing to do.

        Args:
            qk_logits: by layer; None takes those given before, else what was recorded, where there
                may be layers that are none of this optimizer's.
            groups, found, settings: of the optimizer.
            is_dry: the step is to change nothing. Where no logits were passed to it, layers whose
                gradients are zeros on all ranks are left alone.

        Raises:
            ValueError: logits that don't fit the layers.
        """
        only_with_gradient = is_dry and qk_logits is None
        waiting, self.given = self.given, None
        recorded = None if self.recorder is None else self.recorder.take()
        given = waiting if qk_logits is None else qk_logits
        is_recorded = given is None
        logits = recorded if given is None else given
        if not is_dry:
            self._warn_of_none(logits)
        if logits is None:
            return None
        if self.config is None:
            raise ValueError(
                "step() got qk_logits, but the optimizer has no clip_config that says how to bound "
                'them: Muon(..., clip_config={"head_dim": 128, "threshold": 100})'
            )
        if found is not self._found:
            self._look_at(groups, found, settings, self.config)
            if is_recorded:
                _warn_of_unknown(self._layers.unknown(logits), groups)
        by_layer = self._layers.match(logits, pass_over_unknown=is_recorded)
        if not isinstance(logits, Reduced):
            self._warn_of_ranks()
        packs = []
        for pack in self._packs:
            parts = [vector_of(by_layer[layer.key], layer, pack) for layer in pack.layers]
            known = joined(parts, pack.dtype, pack.device)
            if only_with_gradient:
                known = torch.where(_has_gradient(pack), known, -math.inf)
            packs.append((pack, known))
        return Clipping(packs, self._notes, None if only_with_gradient else self)

    def _warn_of_none(self, logits: Optional[Logits]) -> None:
        """Warns, once, of a step without logits."""
        if self.config is None or self._has_warned:
            return
        if logits is None:
            problem = (
                "step() got no qk_logits, so nothing is clipped: give it some, call "
                "set_qk_logits() before, or set qk_recorder"
            )
        elif isinstance(logits, Mapping) and logits and all(of is None for of in logits.values()):
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
                f"QK-Clip: the weights of {some(self._unshared)} are plain tensors, which the "
                "optimizer takes for this rank's own. If other ranks hold them too, as under DDP, "
                "they see other logits, and their weights part: give Muon their process_group, or "
                "step() logits that were reduced, qk_clip.reduce_qk_logits(logits)"
            )

    def _look_at(
        self, groups: Sequence[Group], found: Survey, settings: Settings, config: ClipConfig
    ) -> None:
        """Makes the packs of the layers there are now."""
        self._layers = find_layers(groups, config)
        self._unshared, self._notes = [], {}
        by_place: dict[tuple, list[Layer]] = {}
        for layer in self._layers.bounded.values():
            ranks = _ranks_of(layer, settings)
            if ranks is None:
                self._unshared.append(layer.prefix)
            elif len(ranks) == 1 or this_rank() not in ranks:
                ranks = None
            device = dtensors.compute_device(layer.projections[0].param)
            by_place.setdefault((ranks, device), []).append(layer)
            if ranks is not None:
                note = f"QK-Clip of layer {layer.key!r}: {layer.config}"
                self._notes.setdefault(ranks, []).append(note)
        # All ranks go through their sets in one order.
        places = sorted(
            by_place, key=lambda place: (*ranks_sort_key(place[0] or ()), str(place[1]))
        )
        self._packs = [Pack(by_place[ranks, device], device, ranks) for ranks, device in places]
        self._found = found

    def count(self, packs: Sequence[tuple[Pack, Tensor]]) -> None:
        """Keeps the logits of a step, and counts; on the device."""
        self._steps += 1
        self._last = packs
        for pack, logits in packs:
            clipped, nonfinite = pack.is_clipped(logits), logits == math.inf
            for totals, of_pack in ((self._clipped, clipped), (self._nonfinite, nonfinite)):
                totals[pack.device] = of_pack.sum() + totals.get(pack.device, 0)

    def stats(self) -> dict[str, Any]:
        layers: dict[LayerKey, dict[str, Any]] = {}
        for pack, logits in self._last:
            parts = zip(*(t.cpu().split(pack.counts) for t in (logits, pack.is_clipped(logits))))
            for layer, (of_layer, clipped) in zip(pack.layers, parts):
                maxima = of_layer.tolist()
                layers[layer.key] = {
                    "max_logits": maxima,
                    "max_logit": max(maxima, default=-math.inf),
                    "clipped": int(clipped.sum()),
                    "nonfinite": int((of_layer == math.inf).sum()),
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
    """Warns of attention that was recorded and is trained, of which no projection is known."""
    names = [normalize_name(name) for group in groups for name in group.names or ()]
    trained = [layer for layer in layers if any(name.startswith(f"{layer}.") for name in names)]
    if trained:
        warn(
            f"clip_config: qk_recorder saw the attention in {some(trained)}, of whose parameters "
            "none is known as a query or key projection, so it is not clipped: row_map tells of "
            "other names"
        )


def _ranks_of(layer: Layer, settings: Settings) -> Optional[tuple[int, ...]]:
    """All ranks that hold parts or replicas of a layer's projections."""
    sets = (shared_with(projection.param, settings) for projection in layer.projections)
    found = {ranks for ranks in sets if ranks is not None}
    largest = max(found, key=len, default=())
    for ranks in found:
        if not set(ranks) <= set(largest):
            raise ValueError(
                f"{layer.prefix} has query and key projections on ranks {list(ranks)} and on ranks "
                f"{list(largest)}, which can't share their logits: put them on one mesh"
            )
    return largest or None


def _has_gradient(pack: Pack) -> Tensor:
    """For each logit whether this rank has a gradient of its layer that is not all zeros, (n,)."""
    nonzero = []
    for layer in pack.layers:
        grads = (projection.param.grad for projection in layer.projections)
        held = [dtensors.local(grad) for grad in grads if grad is not None]
        of_layer = [torch.count_nonzero(grad).to(pack.device) for grad in held]
        nonzero.append(sum(of_layer, torch.zeros((), device=pack.device)).expand(layer.logits))
    return torch.cat(nonzero) > 0
