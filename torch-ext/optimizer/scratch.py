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
    """Uninitialized tensors: by purpose, or until they are given back."""

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}
        self._free: dict[tuple, list[Tensor]] = {}

    def empty(
        self, purpose: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A contiguous tensor, valid until the same purpose, dtype and device are asked for."""
        key, numel = (purpose, dtype, device), math.prod(shape)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers.pop(key, None)  # before the larger one, or both would live
            self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return self._buffers[key][:numel].view(tuple(shape))

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor for as long as it is not given back with `give`."""
        free = self._free.get((dtype, device), [])
        fitting = [index for index, buffer in enumerate(free) if buffer.numel() >= numel]
        if not fitting:
            if free:  # too small for what comes next: let it go, or staging would grow
                free.pop()
            return torch.empty(numel, dtype=dtype, device=device)
        smallest = min(fitting, key=lambda index: free[index].numel())
        return free.pop(smallest)[:numel]

    def give(self, *buffers: Tensor) -> None:
        """Lets the next `take` have what this one took; its users are on the same stream."""
        for buffer in buffers:
            whole = buffer if buffer._base is None else buffer._base
            self._free.setdefault((buffer.dtype, buffer.device), []).append(whole)
