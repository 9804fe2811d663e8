"""Allocates page-locked host memory for state, in few large segments that tensors share.

torch rounds every page-locked allocation up to a power of two. So the arena maps ordinary memory,
to the page, and registers it with the device's driver where torch has a call for that. Elsewhere
tensors fill segments up to a power of two, as far as they fit.

A tensor is an interval of its segment with a storage of its own: what is pickled or saved is the
tensor alone. Each tensor keeps its segment alive (`torch.frombuffer` keeps its buffer), the arena
keeps none: a segment is freed when the last of its tensors is.
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

# Alignment of tensors, in bytes, as in torch; the padding between neighbours belongs to no tensor.
PADDED_TO = 64

# Large enough that a page and a driver's call for each segment cost nothing, small enough that
# memory is freed in pieces when tensors die one by one.
SEGMENT_BYTES = 2**28


class Arena:
    """Host memory of the state of an optimizer.

    Args:
        device: the one that copies go to and come from; for a CPU, memory is ordinary.
        register: page-locks memory, given its address and bytes; raises RuntimeError where it
            can't. By default the driver's call where ``device`` is CUDA's or ROCm's, and none
            elsewhere.
        unregister: undoes `register`, given the address, before the memory is freed.
        drain: makes the host wait for copies from and to the arena; called before `unregister`,
            and where there is none, before the memory is freed.

    Where memory can't be page-locked, a warning says so once, and the arena's memory is ordinary
    from then on.
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
        """Bytes of the segments that are alive: what the arena takes from the host now."""
        return sum(list(self._sizes.values()))

    def allocate(self, nbytes: Sequence[int]) -> list[Tensor]:
        """Zeroed uint8 tensors of shape ``(nbytes[i],)``, each with a storage of its own.

        Tensors that share a segment lie in this order, `PADDED_TO` bytes aligned, without other
        gaps; empty tensors have no memory.
        """
        ends = [0, *accumulate(-(-n // PADDED_TO) * PADDED_TO for n in nbytes)]
        tensors, first = [], 0
        while first < len(nbytes):
            # A tensor that is larger than other segments begins one of a power of two.
            power = 1 << (ends[first + 1] - ends[first] - 1).bit_length()
            last = bisect_right(ends, ends[first] + max(SEGMENT_BYTES, power)) - 1
            size = ends[last] - ends[first]
            segment = self._segment(size) if size else None
            for index in range(first, last):
                tensors.append(_interval(segment, ends[index] - ends[first], nbytes[index]))
            first = last
        return tensors

    def _segment(self, nbytes: int) -> Any:
        """A buffer over new zeroed memory, page-locked if possible, which the buffer keeps."""
        memory: Optional[Tensor] = None
        undo = [self._drain]
        try:
            if self._register is not None:
                # Whole pages: registrations that share one fail. And a shared mapping, mmap's
                # default: Linux copies page-locked private pages as soon as a process forks, so
                # that each worker of a data loader would take as much memory as all the state.
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
                "and hold up the host",
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
        finalizer.atexit = False  # the driver may be gone by then, and tensors still in use
        return segment


def _interval(segment: Any, offset: int, nbytes: int) -> Tensor:
    if nbytes == 0:  # frombuffer refuses
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(segment, dtype=torch.uint8, count=nbytes, offset=offset)


def _release(
    sizes: dict[int, int], address: int, undo: Sequence[Callable[[], None]], process: int
) -> None:
    """Runs when a segment dies, before its memory is freed."""
    del sizes[address]
    if os.getpid() == process:  # a fork has the memory, but no driver that works
        for action in undo:
            action()


def _register(device: torch.device, address: int, nbytes: int) -> None:
    cudart: Any = torch.cuda.cudart()
    # With this device current: the call makes a context on the current one, where there is none.
    with torch.accelerator.device_index(device.index):
        result = cudart.cudaHostRegister(address, nbytes, 1)  # 1: portable, for all devices
        if int(result) == 0:
            return
        # The runtime keeps the error until it is asked for: torch asks after its next kernel.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    raise RuntimeError(f"cudaHostRegister: {cudart.cudaGetErrorString(result)}")


def _unregister(device: torch.device, address: int) -> None:
    cudart: Any = torch.cuda.cudart()
    with torch.accelerator.device_index(device.index):
        result = cudart.cudaHostUnregister(address)
    if int(result) != 0:
        raise RuntimeError(f"cudaHostUnregister: {cudart.cudaGetErrorString(result)}")
