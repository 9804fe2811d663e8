"""Reuses buffers on the device across the chunks of one step.

Allocators return buffers as large as a chunk to the operating system. On CPUs, allocating them
again for every chunk costs more than the element-wise work done in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Scratch:
    """Lends tensors, either one for each purpose (`empty`) or until their return (`give`)."""

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
        """Returns an uninitialized tensor, valid until the next call for its purpose and dtype."""
        key, numel = (purpose, dtype, device), math.prod(shape)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers.pop(key, None)  # free it before the larger one is allocated
            self._buffers[key] = make(numel, dtype=dtype, device=device)
        return self._buffers[key][:numel].view(tuple(shape))

    def in_dtype(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the flat tensor itself if it has that dtype, else a buffer of its size."""
        if tensor.dtype == dtype:
            return tensor
        return self.empty("in dtype", tensor.shape, dtype, tensor.device, torch.zeros)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a flat tensor of ``numel`` elements, valid until it is returned with `give`.

        New buffers are zeroed and reused ones keep their contents. Uninitialized padding, which
        travels, could be NaN, on which NCCL aborts if its NaN check is on.
        """
        free = self._free.setdefault((dtype, device), [])
        fitting = [index for index, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            buffer = free.pop(min(fitting, key=lambda index: free[index].numel()))
        else:
            if free:  # all are too small: free one, or memory would only grow
                free.pop()
            buffer = torch.zeros(numel, dtype=dtype, device=device)
        taken = buffer[:numel]
        self._taken[id(taken)] = buffer
        return taken

    def give(self, tensor: Tensor) -> None:
        """Returns a tensor from `take`, for reuse by later calls on the same stream."""
        self._free[tensor.dtype, tensor.device].append(self._taken.pop(id(tensor)))
