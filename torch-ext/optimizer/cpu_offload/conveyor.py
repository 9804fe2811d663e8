"""Carries windows of state to the device and back, in the order in which a step uses them.

Windows take turns in a ring of device memory. While one is used, the next ones are on their way in,
as many as there is room for, and the last ones on their way out::

    IN       w0 w1 w2 ..... w3 w4          waits for the room that a window takes
    COMPUTE     w0 w1 .... w2 w3 w4        waits for the window it is about to use
    OUT            w0 w1 .... w2 w3 w4     waits until what it carries has been computed

The host waits for nothing. Memory of the ring is the current stream's: allocated there, and let go
when that stream has been made to wait for the last copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor

from .backend import COMPUTE, IN, OUT, Backend
from .windows import ALIGNMENT, Window


@dataclass(eq=False)
class _Turn:
    """A window in the ring, from the copy that brings it until its room has been taken again.

    Args:
        window: which.
        start, stop: its bytes of the ring.
        came: when it is on the device.
        left: when its room is free; None while it is to be used.
    """

    window: Window
    start: int
    stop: int
    came: Any
    left: Optional[Any] = None


class Conveyor:
    """The windows of one step on one device.

    Args:
        backend: of the device.
        windows: in the order in which they are used.
        slot_bytes: device memory for them; a window that is larger gets as much as it needs.
    """

    def __init__(self, backend: Backend, windows: Sequence[Window], slot_bytes: int):
        self._backend = backend
        self._coming = deque(windows)
        sizes = [_aligned(window.nbytes) for window in windows]
        self._size = min(max(slot_bytes, max(sizes, default=0)), sum(sizes))
        self._ring = backend.allocate(self._size)
        self._turns: deque[_Turn] = deque()
        self._head = 0
        # Whoever had the ring's memory before, or wrote what is carried, did it on that stream.
        backend.wait(IN, backend.record(COMPUTE))
        self._bring()

    def lend(self, window: Window) -> list[tuple[Tensor, ...]]:
        """The tensors of each share on the device, until the window is given back.

        Raises:
            RuntimeError: another window's turn it is.
        """
        turn = self._next()
        if turn is None or turn.window is not window:
            raise RuntimeError("windows must be used in the order in which they were announced")
        self._backend.wait(COMPUTE, turn.came)
        return window.views(self._ring[turn.start : turn.stop])

    def give_back(self) -> None:
        """Ends the use of the window that was lent."""
        turn = self._next()
        assert turn is not None
        turn.left = self._backend.record(COMPUTE)
        if turn.window.written:
            self._backend.wait(OUT, turn.left)
            turn.left = turn.window.leave(self._backend, self._ring[turn.start : turn.stop])
        self._bring()

    def end(self) -> None:
        """Lets go of the ring; the current stream waits for the last copy."""
        if self._next() is not None:  # an error kept it from being used
            self._backend.wait(COMPUTE, self._backend.record(IN))
        self._backend.wait(COMPUTE, self._backend.record(OUT))
        self._backend.free(self._ring)
        del self._ring

    def _next(self) -> Optional[_Turn]:
        """Of the window that is used, or the next one."""
        return next((turn for turn in self._turns if turn.left is None), None)

    def _bring(self) -> None:
        """Starts copies of the next windows, as far as there is room."""
        while self._coming:
            start = self._room(_aligned(self._coming[0].nbytes))
            if start is None:
                return
            window = self._coming.popleft()
            self._head = start + _aligned(window.nbytes)
            came = window.come(self._backend, self._ring[start : self._head])
            self._turns.append(_Turn(window, start, self._head, came))

    def _room(self, nbytes: int) -> Optional[int]:
        """Where the next window goes; None while one that is to be used lies there."""
        start = self._head if self._head + nbytes <= self._size else 0
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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
