"""The scales of all heads from their logits, in one computation on the device.

For a logit m above the threshold, γ = threshold/m (Kimi Team 2025, arXiv:2507.20534, algorithm 1).
Query and key rows of that head are multiplied by sqrt(γ); with multi-head latent attention that is
for the rows without rotation, while rotated query rows are multiplied by γ and the rotated key,
which all heads share, stays. Shapes depend on no value, so that the host waits for nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Optional

import torch
from torch import Tensor

from ..distributed import layout
from ..distributed import utils as dtensors
from .projections import Layer, Projection


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
        self.counts = [layer.logits for layer in layers]
        self.dtype = torch.float32
        for projection in self.projections:
            self.dtype = torch.promote_types(self.dtype, projection.param.dtype)
        self.rank = rank
        thresholds = [layer.config.threshold for layer in layers for _ in range(layer.logits)]
        self.thresholds = torch.tensor(thresholds, dtype=self.dtype).to(device, non_blocking=True)
        heads = sum(layer.q_heads + layer.k_heads for layer in layers)
        members, partners = _tables_of_heads(layers, heads)
        rows, self._shapes = self._local_rows(heads)
        self._members, self._partners, self._rows = (
            table.to(device, non_blocking=True) for table in (members, partners, rows)
        )

    @property
    def projections(self) -> Iterator[Projection]:
        return (projection for layer in self.layers for projection in layer.projections)

    def _local_rows(self, heads: int) -> tuple[Tensor, list[tuple[int, ...]]]:
        """For each row that this rank holds of a projection the place of its scale, all projections
        one behind the other; and the shape in which those of a projection broadcast to its local
        tensor.

        Places are those of all heads, of the rotated rows of all heads, and a last one for rows
        that nothing scales.
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
                region = layout.whole(param.shape)
                if sharding is not None:
                    region = sharding.region(param.shape, self.rank)
                held = rows.view(param.shape[:dims])[layout.slices(region[:dims])]
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
        one = gamma.new_ones(1)
        least = torch.cat([gamma, one])[self._members].amin(dim=1)  # of the logits of each head
        roots = torch.cat([least.sqrt(), one])
        table = torch.cat([least / roots[self._partners], least, one])
        rows = table.index_select(0, self._rows).split([math.prod(s) for s in self._shapes])
        ids = (id(projection.param) for projection in self.projections)
        return {key: part.view(shape) for key, part, shape in zip(ids, rows, self._shapes)}

    def is_clipped(self, logits: Tensor) -> Tensor:
        return (logits > self.thresholds) & (logits < math.inf)


def _tables_of_heads(layers: Sequence[Layer], heads: int) -> tuple[Tensor, Tensor]:
    """For each head the numbers of the logits that scale it, padded with the number behind the last
    one, and the head whose root its scale is divided by.

    That is the head itself, for sqrt(γ). With ``clip_mode="exact"``, it is a query head's key head,
    for γ/κ, or, where no key head is scaled, ``heads``, which has the root 1.
    """
    members: list[list[int]] = []
    partners = list(range(heads))
    logits = 0
    for layer in layers:
        first = len(members)
        first_key = first + layer.q_heads
        members += [[] for _ in range(layer.q_heads + layer.k_heads)]
        for start, indices in ((first, layer.q_indices), (first_key, layer.k_indices)):
            for number, head in enumerate(indices):
                members[start + head].append(logits + number)
        if layer.config.mode == "exact":
            for query, key in itertools.zip_longest(layer.q_indices, layer.k_indices):
                partners[first + query] = heads if key is None else first_key + key
        logits += layer.logits
    most = max(map(len, members), default=1) or 1
    padded = [[*numbers, *(logits,) * (most - len(numbers))] for numbers in members]
    return torch.tensor(padded), torch.tensor(partners)
