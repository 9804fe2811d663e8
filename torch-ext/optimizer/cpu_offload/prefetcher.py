"""Prefetches the windows of a step in the order of their use, and writes them back.

On each device windows take turns in a ring of memory. While the step uses one window, copies of the
next ones to the device are under way, as many as there is room for, and copies of the last ones
back to the host::

    IN       w0 w1 w2 ..... w3 w4          waits for the room that a window takes
    COMPUTE     w0 w1 .... w2 w3 w4        waits for the window it is about to use
    OUT            w0 w1 .... w2 w3 w4     waits until what it copies has been computed

The host waits for nothing. Memory of the ring is the current stream's: allocated there, and freed
when that stream has been made to wait for the last copy.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor

from .backend import COMPUTE, IN, OUT, Backend
from .windows import Fetch, RowPiece, Window, fill_windows

# Larger copies are no faster, and the step waits for the first of them.
MAX_WINDOW_BYTES = 64 << 20

Fetched = Sequence[tuple[RowPiece, tuple[Tensor, ...]]]  # pieces with their tensors on the device


class Prefetcher:
    """Copies the offloaded tensors that a step uses to the devices, and back.

    Args:
        rings: of the devices on which offloaded tensors are used.

    Attributes:
        is_idle: whether nothing is offloaded, so that there is nothing to prefetch.
        is_enqueued: whether all windows are in their rings' order of use already.
    """

    def __init__(self, rings: Mapping[torch.device, PrefetchRing]):
        self._rings = rings
        self._windows: dict[Hashable, list[Window]] = {}
        self.is_idle = self.is_enqueued = not rings

    def add_windows(
        self, key: Hashable, rows: Sequence[Sequence[Fetch]], single: bool = False
    ) -> None:
        """Makes windows with all of these rows, if any of them is offloaded.

        Args:
            key: by which to ask for the windows.
            rows: the offloaded tensors of each row of the windows' user.
            single: makes one window, whatever its size; on one device.
        """
        if not any(rows):
            return
        max_bytes = {
            device: sys.maxsize if single else ring.max_window_bytes
            for device, ring in self._rings.items()
        }
        self._windows[key] = [
            Window(pieces, device) for device, pieces in fill_windows(rows, max_bytes)
        ]

    def enqueue(self, key: Hashable, number: Optional[int] = None) -> None:
        """Appends one window of a key, or all, to the order of use."""
        windows = self._windows.get(key, ())
        for window in windows if number is None else windows[number : number + 1]:
            self._rings[window.device].windows.append(window)

    def window_bytes(self, key: Hashable) -> list[int]:
        """Bytes of each of a key's windows; a single 0 where it has none."""
        windows = self._windows.get(key)
        return [0] if windows is None else [window.nbytes for window in windows]

    def __enter__(self) -> Prefetcher:
        """Starts to copy the windows in the order of use to their devices."""
        self.is_enqueued = True
        try:
            for ring in self._rings.values():
                ring.open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Frees the devices' memory, also where an error has kept some from being used."""
        for ring in self._rings.values():
            ring.close()

    @contextmanager
    def window(self, key: Hashable, number: int) -> Iterator[Optional[Fetched]]:
        """A window's tensors, to be used while the context lasts; None where the key has none."""
        windows = self._windows.get(key)
        if windows is None:
            yield None
            return
        window = windows[number]
        ring = self._rings[window.device]
        yield list(zip(window.pieces, ring.acquire(window)))
        ring.release()

    def windows(self, key: Hashable) -> Iterator[Optional[Fetched]]:
        """The tensors of each of a key's windows in turn; None, once, where it has none."""
        for number in range(len(self._windows.get(key, (None,)))):
            with self.window(key, number) as fetched:
                yield fetched


class PrefetchRing:
    """The windows of a step on one device.

    Args:
        backend: of the device on which the windows are used.
        slot_bytes: device memory for them; a window that is larger gets as much as it needs.
    """

    def __init__(self, backend: Backend, slot_bytes: int):
        self.windows: list[Window] = []  # in the order in which they are used
        # Some windows arrive while others are used or copied back, each of which frees its room.
        self.max_window_bytes = min(slot_bytes // 8, MAX_WINDOW_BYTES)
        self._backend = backend
        self._slot_bytes = slot_bytes
        self._ring: Any = None
        self._pending: deque[Window] = deque()  # not in the ring yet
        self._arriving: deque[Window] = deque()  # in the ring, and their use has not ended
        self._leaving: list[Window] = []  # used, until another one takes their place

    def open(self) -> None:
        """Allocates the ring, and starts to copy windows to it."""
        if not self.windows:
            return
        sizes = [window.nbytes for window in self.windows]
        self._ring = self._backend.allocate(min(max(self._slot_bytes, *sizes), sum(sizes)))
        self._pending = deque(self.windows)
        self._head = 0
        # The current stream may still use the ring's memory, or write what is to be copied.
        self._backend.wait(IN, self._backend.record(COMPUTE))
        self._copy_in()

    def acquire(self, window: Window) -> list[tuple[Tensor, ...]]:
        """The tensors of each piece on the device, until the window is released."""
        if not self._arriving or self._arriving[0] is not window:
            raise RuntimeError("windows must be used in the order in which they were announced")
        self._backend.wait(COMPUTE, window.arrived)
        return window.views(self._memory(window))

    def release(self) -> None:
        """Ends the use of the window that was acquired."""
        window = self._arriving.popleft()
        window.freed = self._backend.record(COMPUTE)
        if window.is_written:
            self._backend.wait(OUT, window.freed)
            window.freed = window.copy_out(self._backend, self._memory(window))
        self._leaving.append(window)
        self._copy_in()

    def close(self) -> None:
        """Frees the ring; the current stream waits for the last copy."""
        if self._ring is None:
            return
        if self._arriving:  # an error kept them from being used
            self._backend.wait(COMPUTE, self._backend.record(IN))
        self._backend.wait(COMPUTE, self._backend.record(OUT))
        self._backend.free(self._ring)
        self._ring = None
        self._arriving.clear()
        self._leaving.clear()

    def _memory(self, window: Window) -> Tensor:
        return self._ring[window.start : window.start + window.nbytes]

    def _copy_in(self) -> None:
        """Starts copies of the next windows, as far as there is room."""
        while self._pending:
            window = self._pending[0]
            if not self._make_room(window):
                return
            self._arriving.append(self._pending.popleft())
            self._head = window.start + window.nbytes
            window.arrived = window.copy_in(self._backend, self._memory(window))

    def _make_room(self, window: Window) -> bool:
        """Places the next window; False while one whose use has not ended lies there."""
        window.start = self._head if self._head + window.nbytes <= self._ring.numel() else 0
        if any(map(window.overlaps, self._arriving)):
            return False
        overlapping = [other for other in self._leaving if window.overlaps(other)]
        self._leaving = [other for other in self._leaving if other not in overlapping]
        # A copy back is after those before it, and after the use of what it copies.
        written = [other for other in overlapping if other.is_written]
        for other in dict.fromkeys((*written[-1:], *overlapping[-1:])):
            self._backend.wait(IN, other.freed)
        return True
