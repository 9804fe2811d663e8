"""Allocates page-locked host memory for state, in few large segments that tensors share.

torch rounds every page-locked allocation up to a power of two. So the arena maps ordinary memory,
to the page, and registers it with the device's driver where torch has a call for that. Elsewhere
sizes of segments are powers of two, and tensors are distributed so that little is left over.

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
from collections.abc import Callable, Iterator, Sequence
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
# Of segments whose sizes are powers of two. The smallest is 1.6 % of 1 MiB, below which overhead
# doesn't matter; the largest holds two of Llama 3 8B's largest matrices: one would fill it badly.
SMALLEST_POWER, LARGEST_POWER = 2**14, 2**29


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
        self.device = device
        if register is None and device.type == "cuda":
            register, unregister = partial(_register, device), partial(_unregister, device)
        self._register, self._unregister = register, unregister
        self._drain = drain
        self._pins = register is None and device.type != "cpu"
        self._segments: dict[int, weakref.ref[Any]] = {}  # that are alive, by address

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that are alive: what the arena takes from the host now."""
        alive = (reference() for reference in list(self._segments.values()))
        return sum(len(segment) for segment in alive if segment is not None)

    def allocate(self, nbytes: Sequence[int]) -> list[Tensor]:
        """Zeroed uint8 tensors of shape ``(nbytes[i],)``, each with a storage of its own.

        Tensors that share a segment lie in this order, `PADDED_TO` bytes aligned, without other
        gaps; empty tensors have no memory.
        """
        ends = [0, *accumulate(-(-n // PADDED_TO) * PADDED_TO for n in nbytes)]
        tensors = []
        for first, last, size in (_power_of_two_segments if self._pins else _full_segments)(ends):
            segment = self._segment(size) if ends[last] > ends[first] else None
            for index in range(first, last):
                tensors.append(_interval(segment, ends[index] - ends[first], nbytes[index]))
        return tensors

    def bytes_at(self, address: int, nbytes: int) -> Optional[Tensor]:
        """An interval of at least one byte, which may include several of the arena's tensors and
        the padding between: a uint8 tensor of shape ``(nbytes,)``, which keeps the memory alive.
        None where the interval isn't within one segment that is alive."""
        for start, reference in list(self._segments.items()):
            segment = reference()
            if segment is not None and start <= address <= start + len(segment) - nbytes:
                return _interval(segment, address - start, nbytes)
        return None

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
        self._segments[address] = weakref.ref(segment)
        finalizer = weakref.finalize(segment, _release, self._segments, address, undo, os.getpid())
        finalizer.atexit = False  # the driver may be gone by then, and tensors still in use
        return segment


def _full_segments(ends: list[int]) -> Iterator[tuple[int, int, int]]:
    """Segments as full as they get: number of the first tensor, of that after the last, bytes.

    Args:
        ends: ``ends[i]`` is where tensor i would begin, were all in one segment.
    """
    first = 0
    while first < len(ends) - 1:
        last = max(bisect_right(ends, ends[first] + SEGMENT_BYTES) - 1, first + 1)
        yield first, last, ends[last] - ends[first]
        first = last


def _power_of_two_segments(ends: list[int]) -> Iterator[tuple[int, int, int]]:
    """Segments as `_full_segments` gives them, but of 2^k bytes, with the smallest sum.

    A large tensor may leave up to half of its segment to the tensors after it.
    """
    count = len(ends) - 1
    # The best segments from each tensor on: bytes of all of them; minus the number of the tensor
    # with which the second one begins; bytes of the first one.
    best: list[tuple[int, int, int]] = [(0, 0, 0)] * (count + 1)
    for first in reversed(range(count)):
        power = max(SMALLEST_POWER, 1 << (ends[first + 1] - ends[first] - 1).bit_length())
        last = first
        options: list[tuple[int, int, int]] = []
        while not options or (last < count and power <= LARGEST_POWER):
            last = bisect_right(ends, ends[first] + power) - 1
            options.append((power + best[last][0], -last, power))
            power *= 2
        best[first] = min(options)
    first = 0
    while first < count:
        _, last, size = best[first]
        yield first, -last, size
        first = -last


def _interval(segment: Any, offset: int, nbytes: int) -> Tensor:
    if nbytes == 0:  # frombuffer refuses
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(segment, dtype=torch.uint8, count=nbytes, offset=offset)


def _release(
    segments: dict[int, Any], address: int, undo: Sequence[Callable[[], None]], process: int
) -> None:
    """Runs when a segment dies, before its memory is freed."""
    segments.pop(address, None)
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
