"""Buffers that the chunks of one step take turns in.

A batch as large as a chunk is above the size from which allocators hand pages back to the system;
on CPUs, taking them anew for every chunk costs more than the element-wise work done in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """Uninitialized tensors by purpose; the next request for a purpose overwrites the last."""

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}

    def empty(
        self, purpose: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A contiguous tensor, valid until the same purpose, dtype and device are asked for."""
        key, numel = (purpose, dtype, device), math.prod(shape)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers.pop(key, None)  # before the larger one, or both would live
            self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return self._buffers[key][:numel].view(tuple(shape))
