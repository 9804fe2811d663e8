"""What ZeRO-2 moves beside momentum and updates: gradients to be averaged, AdamW's weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from architectures import Weight


@dataclass(frozen=True)
class Collectives:
    """Collectives over all ranks, in rings that visit host after host.

    Args:
        count: how many.
        sent: bytes that each rank sends in all of them, and receives.
    """

    count: int = 0
    sent: float = 0.0

    def by_link(self, ranks: int, ranks_per_host: int) -> tuple[float, float]:
        """Bytes that a rank sends within its host and to others.

        Of each ring one of the ranks of a host leaves it; rings take turns in which.
        """
        if ranks <= ranks_per_host:
            return self.sent, 0.0
        away = self.sent / ranks_per_host
        return self.sent - away, away

    def seconds(self, ranks: int, machine: Any) -> float:
        here, away = self.by_link(ranks, machine.ranks_per_host)
        slowest = max(here / machine.host_bytes, away / machine.network_bytes)
        return slowest + self.count * machine.latency


NOTHING = Collectives()


def averaging_of(
    kernel: Any, weights: Iterable[Weight], ranks: int, dtype: torch.dtype, device_type: str
) -> tuple[Collectives, Collectives]:
    """The averages of all gradients, and the gathers of the rows that AdamW has updated.

    Args:
        kernel: the package.
        weights: of the model.
        ranks: how many.
        dtype: of weights and gradients.
        device_type: of the ranks' devices.
    """
    zero2 = importlib.import_module(f"{kernel.__name__}.distributed.zero2")
    device = torch.device(device_type)
    gradients, rows = [], []
    for weight in weights:
        divided = weight.muon or zero2.is_divided(weight.shape, ranks)
        piece = zero2.Piece(weight.shape, dtype, device, divided)
        padded = piece.slot_numel(ranks) * ranks
        if divided and padded > 2 * weight.numel:  # an all-reduce moves less
            gradients.append(zero2.Piece(weight.shape, dtype, device, False))
        else:
            gradients.append(piece)
        if divided and not weight.muon:
            rows.append(piece)
    return _collectives(zero2, gradients, ranks), _collectives(zero2, rows, ranks)


def _collectives(zero2: Any, pieces: list[Any], ranks: int) -> Collectives:
    """Reduce-scatters or all-gathers of what is in slots, all-reduces of the rest."""
    sent = 0.0
    for piece in pieces:
        size = piece.slot_numel(ranks) * piece.dtype.itemsize
        sent += size * (ranks - 1) if piece.in_slots else 2 * size * (ranks - 1) / ranks
    return Collectives(len(zero2.plan_buckets(tuple(pieces), ranks).buckets), sent)
