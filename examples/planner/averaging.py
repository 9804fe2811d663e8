"""What ZeRO-2 moves beside momentum and updates: gradients to be averaged, AdamW's weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.architectures import Weight


@dataclass(frozen=True)
class Ring:
    """Collectives over all ranks, in rings that visit host after host.

    Args:
        count: how many.
        sent: bytes that each rank sends in all of them, and receives.
    """

    count: int
    sent: float

    def by_link(self, ranks: int, hosts: int) -> tuple[float, float]:
        """Bytes that a rank sends within its host and to others.

        Of each ring one of the ranks of a host leaves it; rings take turns in which.
        """
        away = self.sent * hosts / ranks if hosts > 1 else 0.0
        return self.sent - away, away

    def seconds(self, ranks: int, machine: Any) -> float:
        here, away = self.by_link(ranks, -(-ranks // machine.ranks_per_host))
        slowest = max(here / machine.host_bytes, away / machine.network_bytes)
        return slowest + self.count * machine.latency


@dataclass(frozen=True)
class Averages:
    """ZeRO-2's collectives.

    Args:
        gradients: of all weights, bucket by bucket.
        needed: how many of these buckets each chunk needs.
        other_needed: how many AdamW needs.
        ahead: buckets that are launched before they are needed.
        other_rows: of AdamW's weights, each from the rank that has updated them.
    """

    gradients: tuple[Ring, ...]
    needed: tuple[int, ...]
    other_needed: int
    ahead: int
    other_rows: Ring

    @property
    def all(self) -> Ring:
        rings = (*self.gradients, self.other_rows)
        return Ring(sum(ring.count for ring in rings), sum(ring.sent for ring in rings))


def averages_of(
    kernel: Any,
    entries: Sequence[Any],
    weights: Iterable[Weight],
    first_used: Sequence[Sequence[int]],
    before_others: int,
    ranks: int,
) -> Averages:
    """The collectives of a step in which all weights have a gradient of their own dtype.

    Args:
        kernel: the package.
        entries: Muon's weights, as the plan sees them.
        weights: of the model, of which AdamW's are looked at.
        first_used: the numbers of the entries that each chunk is the first to need.
        before_others: chunks whose gathers begin before AdamW's weights are updated.
        ranks: how many.
    """
    zero2 = importlib.import_module(f"{kernel.__name__}.distributed.zero2")
    dtype, device = entries[0].dtype, entries[0].device

    def piece(shape: Sequence[int], in_slots: bool) -> Any:
        return zero2.BucketTensor(tuple(shape), dtype, device, in_slots)

    def gradient(shape: Sequence[int], divided: bool) -> Any:
        whole, slots = piece(shape, False), piece(shape, divided)
        few_rows = slots.slot_numel(ranks) * ranks > 2 * whole.slot_numel(ranks)
        return whole if few_rows else slots  # an all-reduce moves less than padded slots

    others = [weight.shape for weight in weights if not weight.muon]
    divided = [kernel.distributed.replicas.is_divided(shape, ranks) for shape in others]
    gradients, counts = [], []  # in the order in which the step needs them; after each chunk
    other_count = 0
    for chunk, of_chunk in enumerate((*first_used, ())):
        if chunk == min(before_others, len(first_used)):
            gradients += [gradient(*of) for of in zip(others, divided)]
            other_count = len(gradients)
        gradients += [gradient(entries[number].matrices.shape, True) for number in of_chunk]
        counts.append(len(gradients))
    buckets = zero2.plan_buckets(tuple(gradients), ranks)
    rows = [piece(shape, True) for shape, cut in zip(others, divided) if cut]
    return Averages(
        tuple(
            _ring([gradients[i] for i in bucket.members], 1, ranks) for bucket in buckets.buckets
        ),
        tuple(buckets.prefix_counts[count] for count in counts[:-1]),
        buckets.prefix_counts[other_count],
        zero2.BUCKETS_IN_FLIGHT - 1,
        _ring(rows, len(zero2.plan_buckets(tuple(rows), ranks).buckets), ranks),
    )


def _ring(pieces: Sequence[Any], count: int, ranks: int) -> Ring:
    """Reduce-scatters or all-gathers of what is in slots, all-reduces of the rest."""
    sent = 0.0
    for piece in pieces:
        size = piece.slot_numel(ranks) * piece.dtype.itemsize
        sent += size * (ranks - 1) if piece.in_slots else 2 * size * (ranks - 1) / ranks
    return Ring(count, sent)
