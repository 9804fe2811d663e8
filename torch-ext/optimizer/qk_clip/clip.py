"""QK-Clip of an optimizer: finds the layers, takes their logits, scales rows, keeps count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ..cpu_offload import narrow
from ..distributed import utils as dtensors
from ..distributed.collectives import max_over_ranks
from ..groups import normalize_name
from ..options import Group, OptimizerWide
from ..planning import Survey, shared_with, this_rank
from ..validation import warn
from .config import ClipConfig, LayerKey
from .projections import Layer, find_layers, row_dims_of
from .scales import Layers, Logits, Pack, Reduced, joined, some, vector_of


class Clipping:
    """QK-Clip in one step.

    Args:
        packs: of all layers, with the largest logits that this rank knows of.
        notes: lines that ranks compare, by who shares the layers.
        clip: to whom to tell what was found, if to anybody.
    """

    def __init__(
        self,
        packs: Sequence[tuple[Pack, Tensor]],
        notes: Mapping[tuple[int, ...], Sequence[str]],
        clip: Optional[QKClip],
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
                params = (projection.param for projection in pack.projections)
                param = next(p for p in params if shared_with(p, wide) == pack.ranks)
                group = dtensors.process_group(param, pack.ranks, wide.process_group)
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
            for param in group.params:
                if group.use_muon or not group.takes_part(param):
                    continue
                scale = self.scale(param)
                if scale is not None:
                    held = dtensors.local(param)
                    held.mul_(scale.to(held.device))  # they differ for hosted parameters only
        for number in range(len(self._packs)):  # also where this rank holds no row
            self._scales_of(number)
        if self._clip is not None:
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
        self._has_warned_of_ranks = False  # that may see other logits
        self._given: Optional[Logits] = None
        self._found: Optional[Survey] = None  # what the packs were made for
        self._packs: list[Pack] = []
        self._layers: Layers = Layers({}, {})
        self._unshared: list[str] = []  # prefixes of layers whose weights are plain
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

    def take(self, given: Optional[Logits]) -> tuple[Optional[Logits], bool]:
        """What was given to the step, or set before it, or else recorded, and whether it was."""
        waiting, self._given = self._given, None
        recorded = None if self.recorder is None else self.recorder.take()
        found = next((logits for logits in (given, waiting) if logits is not None), None)
        return (recorded, True) if found is None else (found, False)

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

    def check_and_warn(self, groups: Sequence[Group]) -> None:
        """The same, with warnings where QK-Clip finds nothing to do, or may miss something."""
        if self.config is None:
            return
        layers = _layers_of(groups, self.config).layers.values()
        if not layers:
            warn(
                "clip_config: no query or key projection was found among the names of parameters; "
                "row_map tells of other names"
            )
        if self.config.unmatched:
            warn(f"clip_config: no layer was found for {some(list(self.config.unmatched))}")
        norm = _norm_of_heads([layer for layer in layers if layer.config.latent is None], groups)
        if norm is not None:
            warn(
                f"clip_config: {norm} normalizes what QK-Clip scales, which then has no effect; "
                "bounded by their norms, such logits need no clip"
            )
        for number, group in enumerate(groups):
            if group.names is None and any(p.ndim == 1 for p in group.params):
                warn(
                    f"clip_config: param_groups[{number}] has no names, so biases of query and key "
                    'projections are not found there: give the group "names"'
                )

    def warn_of_none(self, logits: Optional[Logits]) -> None:
        """Warns, once, of a step without logits."""
        if self.config is None or self._has_warned:
            return
        if logits is None:
            problem = (
                "step() got no qk_logits, so nothing is clipped: give it some, call "
                "set_qk_logits() before, or set qk_recorder"
            )
        elif isinstance(logits, Mapping) and {id(of) for of in logits.values()} == {id(None)}:
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

    def begin(
        self,
        logits: Optional[Logits],
        groups: Sequence[Group],
        found: Survey,
        wide: OptimizerWide,
        *,
        is_recorded: bool = False,
        only_with_gradient: bool = False,
    ) -> Optional[Clipping]:
        """QK-Clip of a step; None where there is nothing to do.

        Args:
            logits: by layer.
            groups, found, wide: of the optimizer.
            is_recorded: there may be some of layers that are none of this optimizer's.
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

    def _look_at(self, groups: Sequence[Group], found: Survey, wide: OptimizerWide) -> None:
        assert self.config is not None
        rank = this_rank()
        self._layers = _layers_of(groups, self.config)
        self._unshared = []
        by_place: dict[tuple, list[Layer]] = {}
        for layer in self._layers.layers.values():
            ranks = _ranks_of(layer, wide)
            if ranks is None:
                self._unshared.append(layer.prefix)
            alone = ranks is None or len(ranks) == 1 or rank not in ranks
            device = dtensors.compute_device(layer.projections[0].param)
            by_place.setdefault((None if alone else ranks, device), []).append(layer)
        self._packs = [
            Pack(by_place[ranks, device], device, ranks, rank)
            for ranks, device in sorted(by_place, key=_turn)
        ]
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
            "total_clipped": sum(int(t.clipped) for t in self._totals.values()),
            "total_nonfinite": sum(int(t.nonfinite) for t in self._totals.values()),
            "layers": layers,
        }


def _layers_of(groups: Sequence[Group], config: ClipConfig) -> Layers:
    named: list[tuple[str, Tensor, int]] = []
    for number, group in enumerate(groups):
        if group.names is None:
            if group.use_muon and group.params:
                raise ValueError(
                    f"param_groups[{number}]: clip_config needs names: give the group "
                    '"names", one for each parameter'
                )
            continue
        flatten = group.use_muon and group.flatten
        named += [(n, p, row_dims_of(p, flatten)) for n, p in zip(group.names, group.params)]
    return Layers(*find_layers(named, config))


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


def _norm_of_heads(layers: Sequence[Layer], groups: Sequence[Group]) -> Optional[str]:
    """The usual name of a norm between a projection and the logits (QK-norm), if there is one."""
    prefixes = {layer.prefix for layer in layers}
    for name in (name for group in groups for name in group.names or ()):
        owner = normalize_name(name).rpartition(".")[0]
        prefix, _, norm = owner.rpartition(".")
        if prefix in prefixes and norm in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
            return name
    return None


def _turn(place: tuple[Optional[tuple[int, ...]], torch.device]) -> tuple:
    """All ranks go through their sets in one order, the larger ones first."""
    ranks, device = place[0] or (), place[1]
    return -len(ranks), ranks, str(device)


def _ranks_of(layer: Layer, wide: OptimizerWide) -> Optional[tuple[int, ...]]:
    """All ranks that hold parts or replicas of a layer's projections."""
    sets = (shared_with(projection.param, wide) for projection in layer.projections)
    found = {ranks for ranks in sets if ranks is not None}
    largest = max(found, key=len, default=None)
    for ranks in found:
        if largest is not None and not set(ranks) <= set(largest):
            raise ValueError(
                f"{layer.prefix} has query and key projections on ranks {list(ranks)} and on ranks "
                f"{list(largest)}, which can't share their logits: put them on one mesh"
            )
    return largest


def _has_gradient(pack: Pack) -> Tensor:
    """For each logit whether this rank has a gradient of its layer that is not all zeros, (n,)."""
    nonzero = []
    for layer in pack.layers:
        grads = (projection.param.grad for projection in layer.projections)
        held = [dtensors.local(grad) for grad in grads if grad is not None]
        of_layer = [torch.count_nonzero(grad).to(pack.device) for grad in held]
        nonzero.append(sum(of_layer, torch.zeros((), device=pack.device)).expand(layer.logits))
    return torch.cat(nonzero) > 0
