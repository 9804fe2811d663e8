"""Keeps the traffic of some chunks under way while another one is being computed.

A chunk is a generator that yields twice: when its matrices are on their way to the owners, and when
the updates are on their way back. It waits for the former when resumed the first time, for the
latter when resumed the second time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Optional

Task = Generator[None, None, None]


def interleave(
    tasks: Iterable[Task], in_flight: int, meanwhile: Optional[Callable[[], None]] = None
) -> None:
    """Runs tasks to their ends, at most ``in_flight`` of them begun and not ended at any time.

    While chunk k is computed, the next ones are being gathered and, where ``in_flight`` allows
    three, chunk k − 1 is on its way back. The order depends on the number of tasks and on
    ``in_flight`` alone: ranks for which these are equal launch their collectives in one order.

    Args:
        tasks: begun in this order.
        in_flight: at least 1.
        meanwhile: other work, done under the first gathers.
    """
    waiting = iter(tasks)
    upcoming = next(waiting, None)
    gathering: deque[Task] = deque()
    returning: deque[Task] = deque()
    while True:
        while upcoming is not None and len(gathering) + len(returning) < in_flight:
            next(upcoming)
            gathering.append(upcoming)
            upcoming = next(waiting, None)
        if meanwhile is not None:
            meanwhile()
            meanwhile = None
        if gathering:
            task = gathering.popleft()
            next(task)
            returning.append(task)
        if not returning:
            return
        # Room for the chunk behind the next one: gathered later, it would hide under nothing.
        makes_room = upcoming is not None and len(gathering) < 2
        if len(returning) > 1 or not gathering or makes_room:
            next(returning.popleft(), None)
