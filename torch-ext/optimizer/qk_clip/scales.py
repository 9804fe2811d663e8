"""From the logits that are given to the scales of all heads, in one computation on the device.

For a logit m above the threshold, γ = threshold/m (Kimi Team 2025, arXiv:2507.20534, algorithm 1).
Query and key rows of that head are multiplied by sqrt(γ); with multi-head latent attention that is
for the rows without rotation, while rotated query rows are multiplied by γ and the rotated key,
which all heads share, stays. Shapes depend on no value, so that the host waits for nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import regions
from ..distributed import utils as dtensors
from ..distributed.collectives import max_over_ranks
from ..parameters.survey import this_rank
from .projections import Layer, Logits


class Pack:
    """Layers whose logits lie on one device and are shared by the same ranks.

    Logits of all layers are one vector, in the order of the layers; so are the heads, first the
    query heads of a layer, then its key heads. A pack makes all tables that need no logits.

    Args:
        device: where the weights of the layers are computed.
        ranks: all that hold parts or replicas of the weights; None where this one is alone.
    """

    def __init__(
        self, layers: Sequence[Layer], device: torch.device, ranks: Optional[tuple[int, ...]]
    ):
        self.layers = layers
        self.projections = [p for layer in layers for p in layer.projections]
        self.device = device
        self.ranks = ranks
        self.rank = this_rank()
        self.counts = [layer.logits for layer in layers]
        dtypes = (projection.param.dtype for projection in self.projections)
        self.dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        thresholds = [layer.config.threshold for layer in layers for _ in range(layer.logits)]
        self.thresholds = torch.tensor(thresholds, dtype=self.dtype).to(device, non_blocking=True)
        heads = sum(layer.q_heads + layer.k_heads for layer in layers)
        rows, self._shapes = self._local_rows(heads)
        self._pairs, self._partners, self._rows = (
            table.to(device, non_blocking=True)
            for table in (*_tables_of_heads(layers, heads), rows)
        )

    def _local_rows(self, heads: int) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Where the table of scales has those of the rows that this rank holds, of all projections
        one behind the other; and the shapes in which they broadcast to the local tensors.

        The table has a scale for each head, then one for its rotated rows, then 1, for other rows.
        """
        first, places, shapes = 0, [], []
        for layer in self.layers:
            stop = first + layer.q_heads + layer.k_heads
            of_heads = torch.arange(first, stop)[:, None]
            plain = torch.arange(layer.config.plain_dim)
            rotated = torch.arange(layer.config.plain_dim, layer.config.head_dim)
            for projection in layer.projections:
                q, k = (
                    torch.tensor(projection.starts.get(side, ()), dtype=torch.int64)[:, None]
                    for side in ("q", "k")
                )
                rows = torch.full((projection.rows,), 2 * heads)
                rows[q + plain] = of_heads[: len(q)]
                rows[q + rotated] = heads + of_heads[: len(q)]
                rows[k + plain] = of_heads[layer.q_heads :][: len(k)]
                param, dims = projection.param, projection.row_dims
                sharding = dtensors.sharding_of(param)
                region = regions.whole(param.shape)
                if sharding is not None:
                    region = sharding.region(param.shape, self.rank)
                held = rows.view(param.shape[:dims])[regions.slices(region[:dims])]
                places.append(held.flatten())
                shapes.append((*held.shape, *(1,) * (param.ndim - dims)))
            first = stop
        return torch.cat(places).to(torch.int32), shapes

    def scales(self, logits: Tensor) -> dict[int, Tensor]:
        """What each local row is multiplied with, by id of its parameter.

        Args:
            logits: of all layers, (n,), not NaN.
        """
        above = self.is_clipped(logits)
        gamma = torch.where(above, self.thresholds / logits, 1.0)
        gamma.clamp_min_(torch.finfo(gamma.dtype).tiny)  # or roots of it might be no divisors
        numbers, heads = self._pairs
        ones = gamma.new_ones(len(self._partners))
        least = ones.scatter_reduce(0, heads, gamma[numbers], "amin")  # of the logits of each head
        one = gamma.new_ones(1)
        roots = torch.cat([least.sqrt(), one])
        table = torch.cat([least / roots[self._partners], least, one])
        rows = table.index_select(0, self._rows).split([math.prod(s) for s in self._shapes])
        ids = (id(projection.param) for projection in self.projections)
        return {key: part.view(shape) for key, part, shape in zip(ids, rows, self._shapes)}

    def is_clipped(self, logits: Tensor) -> Tensor:
        return (logits > self.thresholds) & (logits < math.inf)


def _tables_of_heads(layers: Sequence[Layer], heads: int) -> tuple[Tensor, Tensor]:
    """Pairs of a logit and a head that it scales, (2, pairs); for each head the one by whose root
    its scale is divided.

    A head is divided by its own root, which gives sqrt(γ). With ``clip_mode="exact"``, a query head
    is divided by the root of its key head, which gives γ/κ, or by entry ``heads``, which is 1,
    where no key head is scaled.
    """
    pairs: list[tuple[int, int]] = []
    partners = list(range(heads))
    logits = first = 0
    for layer in layers:
        first_key = first + layer.q_heads
        pairs += [(logits + number, first + head) for number, head in enumerate(layer.q_indices)]
        pairs += [(logits + number, first_key + k) for number, k in enumerate(layer.k_indices)]
        if layer.config.mode == "exact":
            for query, key in itertools.zip_longest(layer.q_indices, layer.k_indices):
                partners[first + query] = heads if key is None else first_key + key
        logits += layer.logits
        first = first_key + layer.k_heads
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous(), torch.tensor(partners)


def vector_of(value: Any, layer: Layer, pack: Pack) -> Tensor:
    """The logits of a layer that this rank knows, (n,), and −inf for those that others know.

    Raises:
        ValueError: logits that are not one number for each head, or lie on another device, or are a
            DTensor whose maximum can't be taken over the ranks that share the weights.
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


def _held_interval(value: Tensor, where: str, pack: Pack) -> regions.Interval:
    """Which of the logits of a DTensor this rank holds."""
    placements = value.placements  # type: ignore[attr-defined]
    if any(p.is_partial() and p.reduce_op != "max" for p in placements):
        raise ValueError(f"{where} are {dtensors.describe(value)}; the maximum is needed")
    others = set(dtensors.ranks_of(value) or ()) - set(pack.ranks or (pack.rank,))
    if others and not all(p.is_replicate() for p in placements):
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
    """Joins all logits to a new tensor, in which NaN becomes Inf, which clips nothing."""
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
