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
from dataclasses import dataclass
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


@dataclass(eq=False)
class _RingWindow:
    """A window in the ring, from its copy to the device until another one takes its place."""

    window: Window
    start: int  # in the ring
    stop: int
    arrived: Any  # event: it is on the device
    freed: Optional[Any] = None  # event: its place is free; None before its use has ended


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
        self._in_ring: deque[_RingWindow] = deque()

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
        placed = self._first_unreleased()
        if placed is None or placed.window is not window:
            raise RuntimeError("windows must be used in the order in which they were announced")
        self._backend.wait(COMPUTE, placed.arrived)
        return window.views(self._ring[placed.start : placed.stop])

    def release(self) -> None:
        """Ends the use of the window that was acquired."""
        placed = self._first_unreleased()
        assert placed is not None
        placed.freed = self._backend.record(COMPUTE)
        if placed.window.is_written:
            self._backend.wait(OUT, placed.freed)
            memory = self._ring[placed.start : placed.stop]
            placed.freed = placed.window.copy_out(self._backend, memory)
        self._copy_in()

    def close(self) -> None:
        """Frees the ring; the current stream waits for the last copy."""
        if self._ring is None:
            return
        if self._first_unreleased() is not None:  # an error kept it from being used
            self._backend.wait(COMPUTE, self._backend.record(IN))
        self._backend.wait(COMPUTE, self._backend.record(OUT))
        self._backend.free(self._ring)
        self._ring = None
        self._in_ring.clear()

    def _first_unreleased(self) -> Optional[_RingWindow]:
        """The window that is in use, or else the next one."""
        return next((placed for placed in self._in_ring if placed.freed is None), None)

    def _copy_in(self) -> None:
        """Starts copies of the next windows, as far as there is room."""
        while self._pending:
            start = self._make_room(self._pending[0].nbytes)
            if start is None:
                return
            window = self._pending.popleft()
            self._head = start + window.nbytes
            arrived = window.copy_in(self._backend, self._ring[start : self._head])
            self._in_ring.append(_RingWindow(window, start, self._head, arrived))

    def _make_room(self, nbytes: int) -> Optional[int]:
        """Where the next window goes; None while one whose use has not ended lies there."""
        start = self._head if self._head + nbytes <= self._ring.numel() else 0
        stop = start + nbytes
        overlapping = [p for p in self._in_ring if p.start < stop and start < p.stop]
        if any(placed.freed is None for placed in overlapping):
            return None
        for placed in overlapping:
            self._in_ring.remove(placed)
        # A copy back is after those before it, and after the use of what it copies.
        copied = [placed for placed in overlapping if placed.window.is_written]
        for placed in dict.fromkeys((*copied[-1:], *overlapping[-1:])):
            self._backend.wait(IN, placed.freed)
        return start
