"""What one step carries: windows are announced in the order of their use, then fetched one by one.

On each device windows take turns in a ring of memory. While one is used, the next ones are on their
way in, as many as there is room for, and the last ones on their way out::

    IN       w0 w1 w2 ..... w3 w4          waits for the room that a window takes
    COMPUTE     w0 w1 .... w2 w3 w4        waits for the window it is about to use
    OUT            w0 w1 .... w2 w3 w4     waits until what it carries has been computed

The host waits for nothing. Memory of the ring is the current stream's: allocated there, and let go
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

from .backend import COMPUTE, IN, OUT
from .device import OffloadDevice
from .windows import Fetch, Share, Window, fill_windows

# Larger copies are no faster, and the first of them is waited for.
MOST_WINDOW_BYTES = 64 << 20

Fetched = Sequence[tuple[Share, tuple[Tensor, ...]]]  # shares, each with its tensors on the device


class Prefetcher:
    """Brings what a step needs of the host's memory to the devices, and back.

    Args:
        rings: of the devices to which something is carried.

    Attributes:
        is_idle: whether there is nothing to carry, for lack of state on the host.
        is_prepared: whether nothing is left to cut and announce.
    """

    def __init__(self, rings: Mapping[torch.device, PrefetchRing]):
        self._conveyors = rings
        self._windows: dict[Hashable, list[Window]] = {}
        self.is_idle = self.is_prepared = not rings

    def cut(self, key: Hashable, rows: Sequence[Sequence[Fetch]], at_once: bool = False) -> None:
        """Prepares windows with all of these rows, if there is anything to lend.

        Args:
            key: by which to ask for them.
            rows: fetches, of each row of the windows' user.
            at_once: in one window, whatever their size; on one device.
        """
        if not any(rows):
            return
        limits = {
            device: sys.maxsize if at_once else ring.window_bytes
            for device, ring in self._conveyors.items()
        }
        self._windows[key] = [
            Window(shares, device, self._conveyors[device].arena)
            for device, shares in fill_windows(rows, limits)
        ]

    def announce(self, key: Hashable, number: Optional[int] = None) -> None:
        """Appends a window to the order of use, or all of a key."""
        windows = self._windows.get(key, ())
        for window in windows if number is None else windows[number : number + 1]:
            self._conveyors[window.device].windows.append(window)

    def window_bytes(self, key: Hashable) -> list[int]:
        """Bytes that each of the windows prepared under a key brings; of what was not, one."""
        windows = self._windows.get(key)
        return [0] if windows is None else [window.nbytes for window in windows]

    def __enter__(self) -> Prefetcher:
        """Starts to carry what was announced."""
        self.is_prepared = True
        try:
            for ring in self._conveyors.values():
                ring.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Lets go of the devices' memory, also where an error has kept some from being used."""
        for ring in self._conveyors.values():
            ring.end()

    @contextmanager
    def window(self, key: Hashable, number: int) -> Iterator[Optional[Fetched]]:
        """Lends what a window has brought, while the context lasts; None where nothing was."""
        windows = self._windows.get(key)
        if windows is None:
            yield None
            return
        window = windows[number]
        ring = self._conveyors[window.device]
        yield list(zip(window.shares, ring.lend(window)))
        ring.give_back()

    def windows(self, key: Hashable) -> Iterator[Optional[Fetched]]:
        """Lends all windows of a key, one after the other."""
        for number in range(len(self._windows.get(key, (None,)))):
            with self.window(key, number) as fetched:
                yield fetched


@dataclass(eq=False)
class _Turn:
    """A window in the ring, from the copy that brings it until its room has been taken again."""

    window: Window
    start: int  # in the ring
    stop: int
    came: Any  # event: it is on the device
    left: Optional[Any] = None  # event: its room is free; None while it is to be used


class PrefetchRing:
    """The windows of a step on one device.

    Args:
        device: which.
        slot_bytes: device memory for them; a window that is larger gets as much as it needs.
    """

    def __init__(self, device: OffloadDevice, slot_bytes: int):
        self.arena = device.arena
        self.windows: list[Window] = []  # in the order in which they are used
        # Some are on their way in, some on their way out, and room is freed by as much at a time.
        self.window_bytes = min(slot_bytes // 8, MOST_WINDOW_BYTES)
        self._backend = device.backend
        self._slot_bytes = slot_bytes
        self._ring: Any = None
        self._turns: deque[_Turn] = deque()

    def start(self) -> None:
        """Starts to carry the windows."""
        if not self.windows:
            return
        rooms = [window.room for window in self.windows]
        self._ring = self._backend.allocate(min(max(self._slot_bytes, *rooms), sum(rooms)))
        self._coming = deque(self.windows)
        self._head = 0
        # Whoever had the ring's memory before, or wrote what is carried, did it on that stream.
        self._backend.wait(IN, self._backend.record(COMPUTE))
        self._bring()

    def lend(self, window: Window) -> list[tuple[Tensor, ...]]:
        """The tensors of each share on the device, until the window is given back."""
        turn = self._next()
        if turn is None or turn.window is not window:
            raise RuntimeError("windows must be used in the order in which they were announced")
        self._backend.wait(COMPUTE, turn.came)
        return window.views(self._ring[turn.start : turn.stop])

    def give_back(self) -> None:
        """Ends the use of the window that was fetched."""
        turn = self._next()
        assert turn is not None
        turn.left = self._backend.record(COMPUTE)
        if turn.window.written:
            self._backend.wait(OUT, turn.left)
            turn.left = turn.window.leave(self._backend, self._ring[turn.start : turn.stop])
        self._bring()

    def end(self) -> None:
        """Lets go of the ring; the current stream waits for the last copy."""
        if self._ring is None:
            return
        if self._next() is not None:  # an error kept it from being used
            self._backend.wait(COMPUTE, self._backend.record(IN))
        self._backend.wait(COMPUTE, self._backend.record(OUT))
        self._backend.free(self._ring)
        self._ring = None
        self._turns.clear()

    def _next(self) -> Optional[_Turn]:
        """Of the window that is used, or the next one."""
        return next((turn for turn in self._turns if turn.left is None), None)

    def _bring(self) -> None:
        """Starts copies of the next windows, as far as there is room."""
        while self._coming:
            start = self._room(self._coming[0].room)
            if start is None:
                return
            window = self._coming.popleft()
            self._head = start + window.room
            came = window.come(self._backend, self._ring[start : self._head])
            self._turns.append(_Turn(window, start, self._head, came))

    def _room(self, nbytes: int) -> Optional[int]:
        """Where the next window goes; None while one that is to be used lies there."""
        start = self._head if self._head + nbytes <= self._ring.numel() else 0
        overlapping = [
            turn for turn in self._turns if turn.start < start + nbytes and start < turn.stop
        ]
        if any(turn.left is None for turn in overlapping):
            return None
        for turn in overlapping:
            self._turns.remove(turn)
        # A copy back is behind those before it, and behind the use of what it copies.
        copied = [turn for turn in overlapping if turn.window.written]
        for turn in dict.fromkeys((*copied[-1:], *overlapping[-1:])):
            self._backend.wait(IN, turn.left)
        return start
