"""Reuses buffers on the device across the chunks of one step.

A buffer as large as a chunk is above the size from which allocators hand pages back to the system;
on CPUs, taking these anew for every chunk costs more than the element-wise work done in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Scratch:
    """Hands out uninitialized tensors, by their purpose or until they are given back."""

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._taken: dict[int, Tensor] = {}  # by id of the tensor that was handed out

    def empty(
        self,
        purpose: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[..., Tensor] = torch.empty,
    ) -> Tensor:
        """A contiguous tensor, valid until the same purpose, dtype and device are asked for."""
        key, numel = (purpose, dtype, device), math.prod(shape)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers.pop(key, None)  # before the larger one, or both would live
            self._buffers[key] = make(numel, dtype=dtype, device=device)
        return self._buffers[key][:numel].view(tuple(shape))

    def in_dtype(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The flat tensor itself where it has that dtype, else an uncleared buffer of its size."""
        if tensor.dtype == dtype:
            return tensor
        return self.empty("in dtype", tensor.shape, dtype, tensor.device, torch.zeros)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of numbers, valid until it is given back with `give`.

        A new one has zeros, and a used one what it had: padding between what is written travels,
        and arbitrary bits could be NaN, at which NCCL aborts where it is asked to check.
        """
        free = self._free.setdefault((dtype, device), [])
        fitting = [index for index, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            buffer = free.pop(min(fitting, key=lambda index: free[index].numel()))
        else:
            if free:  # too small: let one go, or the memory held would only grow
                free.pop()
            buffer = torch.zeros(numel, dtype=dtype, device=device)
        taken = buffer[:numel]
        self._taken[id(taken)] = buffer
        return taken

    def give(self, tensor: Tensor) -> None:
        """Lets a later `take` reuse a tensor's buffer; all users are on the same stream."""
        self._free[tensor.dtype, tensor.device].append(self._taken.pop(id(tensor)))
