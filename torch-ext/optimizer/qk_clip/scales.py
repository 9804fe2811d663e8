"""Computes the scales of all heads from the largest logits, in one computation on the device.

For a logit m above the threshold, γ = threshold/m (Kimi Team 2025, arXiv:2507.20534, algorithm 1).
Query and key rows of its head are multiplied by sqrt(γ). In multi-head latent attention, this
applies to rows without rotation; rotated query rows are multiplied by γ, and the rotated key, which
all heads share, stays. Shapes don't depend on values, so the host never waits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .. import regions
from ..distributed import dtensors
from ..distributed.collectives import max_over_ranks
from ..distributed.dtensors import this_rank
from .config import LayerKey
from .layers import Layer, Logits, Projection


class PackedLayers:
    """Layers on one device, shared by the same ranks, whose logits are packed into one vector.

    Logits and heads are in the order of the layers. Tables that need no logits are built once.

    Args:
        ranks: all ranks that hold shards or replicas of the weights; None if no maxima are shared.
        device: the device that updates the weights.
    """

    def __init__(
        self, layers: Sequence[Layer], ranks: Optional[tuple[int, ...]], device: torch.device
    ):
        self.layers = layers
        self.params = [param for layer in layers for param in layer.params]
        self.device = device
        self.ranks = ranks
        dtypes = (param.dtype for param in self.params)
        self.dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self._heads = sum(layer.heads for layer in layers)
        self._shapes: list[tuple[int, ...]] = []  # of projections' scales, to broadcast
        thresholds: list[float] = []
        pairs: list[tuple[int, int]] = []  # (logit, head that it scales)
        scale_indices: list[Tensor] = []
        first_head = 0
        for layer in layers:
            pairs += [(len(thresholds) + logit, first_head + head) for logit, head in layer.pairs]
            thresholds += [layer.threshold] * layer.logits
            for projection in layer.projections:
                local = self._index_local_rows(projection, 2 * first_head)
                scale_indices.append(local.flatten())
                columns = projection.param.ndim - projection.row_dims
                self._shapes.append((*local.shape, *(1,) * columns))
            first_head += layer.heads
        tables = (
            torch.tensor(thresholds, dtype=self.dtype),
            torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous(),
            torch.cat(scale_indices).to(torch.int32),
        )
        self.thresholds, self._pairs, self._scale_index = (
            table.to(device, non_blocking=True) for table in tables
        )

    def _index_local_rows(self, projection: Projection, first_scale: int) -> Tensor:
        """For each of this rank's rows of a projection, the index of its scale in `scales`."""
        rows = torch.full((projection.rows,), 2 * self._heads)
        for row, count, scale in projection.blocks:
            rows[row : row + count] = first_scale + scale
        shape, dims = projection.param.shape, projection.row_dims
        sharding = dtensors.sharding_of(projection.param)
        region = regions.whole(shape) if sharding is None else sharding.region(shape, this_rank())
        return rows.view(shape[:dims])[regions.slices(region[:dims])]

    def read_logits(self, by_layer: Mapping[LayerKey, Any]) -> Tensor:
        """The logits of all layers, (n,); −inf for logits that this rank doesn't have.

        Raises:
            ValueError: logits aren't one number per head, are on another device, or are a DTensor
                whose maximum can't be taken over the ranks that share the weights.
        """
        parts = (self._layer_logits(by_layer[layer.key], layer) for layer in self.layers)
        return concatenate_logits(parts, self.dtype, self.device)

    def scales(self, logits: Tensor) -> dict[int, Tensor]:
        """The factors on the local rows of each projection, by id of its parameter.

        Args:
            logits: logits of all layers, (n,), not NaN.
        """
        gamma = torch.where(self.is_clipped(logits), self.thresholds / logits, 1.0)
        of_logits, of_heads = self._pairs
        ones = gamma.new_ones(self._heads)
        least = ones.scatter_reduce(0, of_heads, gamma[of_logits], "amin")  # γ of each head
        table = torch.cat([torch.stack([least.sqrt(), least], 1).flatten(), gamma.new_ones(1)])
        numels = [math.prod(shape) for shape in self._shapes]
        scales = table.index_select(0, self._scale_index).split(numels)
        ids = map(id, self.params)
        return {key: part.view(shape) for key, part, shape in zip(ids, scales, self._shapes)}

    def is_clipped(self, logits: Tensor) -> Tensor:
        return (logits > self.thresholds) & (logits < math.inf)

    def _layer_logits(self, value: Any, layer: Layer) -> Tensor:
        where = f"qk_logits of layer {layer.key!r}"
        if value is None:  # this rank hasn't run the layer's attention
            return torch.full((layer.logits,), -math.inf, dtype=self.dtype)
        if not isinstance(value, Tensor):
            try:
                value = torch.tensor(value, dtype=self.dtype)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                raise ValueError(
                    f"{where} must be a tensor (heads,) or a list of numbers, found {value!r}"
                ) from None
        if value.shape != (layer.logits,):
            raise ValueError(
                f"{where} have shape {tuple(value.shape)}, where {(layer.logits,)} is needed: the "
                "largest logit of each head in q_indices, or of every query head. If ranks have "
                "different heads (tensor parallelism), pass a DTensor with Shard(0)"
            )
        if value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"{where} are {value.dtype}, but must be real numbers")
        local, sharding = dtensors.local(value), dtensors.sharding_of(value)
        if local.device not in (self.device, torch.device("cpu")):
            raise ValueError(f"{where} are on {local.device}, its weights are on {self.device}")
        if sharding is None:
            return local
        if dtensors.unusual_shard_order(value) is not None:
            raise ValueError(f"{where} are {dtensors.describe(value)}: pass logits.full_tensor()")
        placements = value.placements
        if any(p.is_partial() and p.reduce_op != "max" for p in placements):
            raise ValueError(f"{where} are {dtensors.describe(value)}; the maximum is needed")
        others = set(sharding.ranks) - set(self.ranks or (this_rank(),))
        if others and not all(p.is_replicate() for p in placements):
            raise ValueError(
                f"{where} are {dtensors.describe(value)}, but their weights are not shared with "
                f"ranks {sorted(others)}: pass logits.full_tensor()"
            )
        vector = local.new_full((layer.logits,), -math.inf, dtype=self.dtype)
        vector[regions.slices(sharding.region(value.shape, this_rank()))] = local
        return vector


def concatenate_logits(
    parts: Iterable[Tensor], dtype: torch.dtype, device: Optional[torch.device] = None
) -> Tensor:
    """Concatenates logits into a new tensor; NaN becomes Inf, which clips nothing."""
    vector = torch.cat([part.detach().to(device, dtype, non_blocking=True) for part in parts])
    return torch.where(vector.isnan(), math.inf, vector)


class ReducedLogits(dict[Any, Tensor]):
    """Logits by layer, equal on all ranks."""


def reduce_qk_logits(logits: Logits, group: Any = None) -> dict[Any, Tensor]:
    """Takes the maximum of all layers' logits over ranks, in one collective.

    `Muon` itself takes the maximum over the ranks that share the weights. Use this function for
    weights that `Muon` doesn't know to be shared, or to use the logits elsewhere.

    Args:
        logits: maps each layer to a vector (n,) of logits, all on one device; every rank has the
            same layers.
        group: the process group; None is the default group.

    Returns:
        New tensors by layer, in fp32 or wider. NaN on any rank becomes Inf on all.

    Raises:
        ValueError: a layer has no logits, or logits of only some heads.
    """
    dtype = torch.float32
    for layer, value in logits.items():
        if not isinstance(value, Tensor) or dtensors.is_dtensor(value) or value.ndim != 1:
            problem = dtensors.describe(value) if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"logits of layer {layer!r} must be a plain tensor of all heads, found {problem}"
            )
        dtype = torch.promote_types(dtype, value.dtype)
    if not logits:
        return ReducedLogits()
    order = sorted(logits, key=repr)
    maxima = concatenate_logits((logits[layer] for layer in order), dtype)
    max_over_ranks(maxima, dist.group.WORLD if group is None else group).wait()
    parts = dict(zip(order, maxima.split([len(logits[layer]) for layer in order])))
    return ReducedLogits((layer, parts[layer]) for layer in logits)
