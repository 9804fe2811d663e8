"""Allocates page-locked host memory for state, in few large segments that tensors share.

torch rounds every page-locked allocation up to a power of two. So the arena maps whole pages of
ordinary memory, and registers them with the device's driver if torch has a call for that. If not,
it fills segments of at most a power of two with as many tensors as fit.

A tensor is an interval of its segment with its own storage, so pickles and files contain the tensor
alone. Each tensor keeps its segment alive (`torch.frombuffer` keeps its buffer), and the arena does
not: a segment is freed with the last of its tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, Optional

import torch
from torch import Tensor

# Alignment of tensors, in bytes, as in torch; the padding between neighbors belongs to no tensor.
PADDED_TO = 64

# Large enough that a page and a driver call per segment cost nothing, and small enough that memory
# is freed in pieces when tensors die one by one.
SEGMENT_BYTES = 2**28


class Arena:
    """Host memory for an optimizer's state.

    Args:
        device: the device that copies go to and come from; for a CPU, memory is ordinary.
        register: page-locks memory, given its address and bytes; raises RuntimeError if it can't.
            The default is the driver's call if ``device`` is CUDA's or ROCm's, else none.
        unregister: undoes `register`, given the address, before the memory is freed.
        drain: makes the host wait for copies from and to the arena; called before `unregister`, or,
            without one, before the memory is freed.

    If memory can't be page-locked, the arena warns once, and uses ordinary memory from then on.
    """

    def __init__(
        self,
        device: torch.device,
        register: Optional[Callable[[int, int], None]] = None,
        unregister: Callable[[int], None] = lambda address: None,
        drain: Callable[[], None] = lambda: None,
    ):
        if register is None and device.type == "cuda":
            register, unregister = partial(_register, device), partial(_unregister, device)
        self._register, self._unregister = register, unregister
        self._drain = drain
        self._pins = register is None and device.type != "cpu"
        self._sizes: dict[int, int] = {}  # bytes of the segments that are alive, by address

    @property
    def nbytes(self) -> int:
        """Bytes of all live segments: the arena's current use of host memory."""
        return sum(list(self._sizes.values()))

    def allocate(self, nbytes: Sequence[int]) -> list[Tensor]:
        """Allocates zeroed uint8 tensors of shape ``(nbytes[i],)``, each with its own storage.

        Tensors that share a segment lie in this order, aligned to `PADDED_TO` bytes, without other
        gaps. Empty tensors have no memory.
        """
        ends = [0, *accumulate(-(-n // PADDED_TO) * PADDED_TO for n in nbytes)]
        tensors, first = [], 0
        while first < len(nbytes):
            # A tensor larger than a usual segment begins a segment of a power of two.
            power = 1 << (ends[first + 1] - ends[first] - 1).bit_length()
            last = bisect_right(ends, ends[first] + max(SEGMENT_BYTES, power)) - 1
            size = ends[last] - ends[first]
            segment = self._segment(size) if size else None
            for index in range(first, last):
                tensors.append(_interval(segment, ends[index] - ends[first], nbytes[index]))
            first = last
        return tensors

    def _segment(self, nbytes: int) -> Any:
        """A buffer that owns new zeroed memory, page-locked if possible."""
        memory: Optional[Tensor] = None
        undo = [self._drain]
        try:
            if self._register is not None:
                # Whole pages, since registrations that share a page fail. The mapping is shared,
                # mmap's default: Linux copies page-locked private pages when a process forks, so
                # each worker of a data loader would use as much memory as all the state.
                nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
                memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
                self._register(memory.data_ptr(), nbytes)
                undo.append(partial(self._unregister, memory.data_ptr()))
            elif self._pins:
                memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._register, self._pins = None, False
            reason = str(error).strip().split("\n")[0]
            warnings.warn(
                f"no page-locked host memory for offloaded state ({reason}): copies will be slow "
                "and block the host; if the limit of locked memory is low, raise it (ulimit -l)",
                RuntimeWarning,
                stacklevel=1,
            )
        if memory is None:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        address = memory.data_ptr()
        segment: Any = (ctypes.c_ubyte * nbytes).from_address(address)
        segment.memory = memory
        self._sizes[address] = nbytes
        finalizer = weakref.finalize(segment, _release, self._sizes, address, undo, os.getpid())
        finalizer.atexit = False  # at exit the driver may be gone and tensors still in use
        return segment


def _interval(segment: Any, offset: int, nbytes: int) -> Tensor:
    if nbytes == 0:  # which frombuffer rejects
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(segment, dtype=torch.uint8, count=nbytes, offset=offset)


def _release(
    sizes: dict[int, int], address: int, undo: Sequence[Callable[[], None]], process: int
) -> None:
    """Runs when a segment dies, before its memory is freed."""
    del sizes[address]
    if os.getpid() == process:  # a fork has the memory, but no working driver
        for action in undo:
            action()


def _register(device: torch.device, address: int, nbytes: int) -> None:
    cudart: Any = torch.cuda.cudart()
    # This device must be current: the call creates a context on the current device if it has none.
    with torch.accelerator.device_index(device.index):
        result = cudart.cudaHostRegister(address, nbytes, 1)  # 1: portable, for all devices
        if int(result) == 0:
            return
        # The runtime keeps the error until someone reads it, as torch does after its next kernel.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    raise RuntimeError(f"cudaHostRegister: {cudart.cudaGetErrorString(result)}")


def _unregister(device: torch.device, address: int) -> None:
    cudart: Any = torch.cuda.cudart()
    with torch.accelerator.device_index(device.index):
        result = cudart.cudaHostUnregister(address)
    if int(result) != 0:
        raise RuntimeError(f"cudaHostUnregister: {cudart.cudaGetErrorString(result)}")
