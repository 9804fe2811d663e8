"""Decides the order of a step's events, with pure functions that run before the first event.

Each chunk of a lane goes through the same events: ranks update momentum and the owners gather it;
the owners orthogonalize it and scatter the updates; ranks update weights. While one chunk is
orthogonalized, the next chunks are being gathered and the previous one is being scattered. A step
also updates AdamW's parameters and, in ZeRO-2, averages gradients; `schedule` says when.

Ranks that share a lane launch its collectives in the same order, because the order depends only on
facts they share: the number of chunks, the limit on chunks in flight, and which parameters have
gradients.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from .distributed.plan import Plan, ranks_sort_key

# How many gradient buckets to launch beyond those that the next event needs.
BUCKETS_AHEAD = 2

# For each lane, the maximum number of chunks to gather at the beginning of a step.
GATHERS_AHEAD = 2


class Do(enum.Enum):
    """What an event does."""

    AVERAGE = "average gradients"  # launches the mean, over replicas, of one bucket
    GATHER = "momentum, gather"  # updates the momentum of one chunk, launches its gather
    ORTHOGONALIZE = "orthogonalize, scatter"  # orthogonalizes one chunk, launches its scatter
    UPDATE = "update weights"  # updates the weights of one chunk
    ADAMW = "AdamW"  # updates one part of AdamW's parameters
    SHARE_ROWS = "gather AdamW's rows"  # sends the updated rows of one group to all replicas


class Event(NamedTuple):
    """One action of a rank in a step.

    Args:
        do: the action.
        lane: the lane's number in `Plan.all_lanes`; −1 for events without a lane.
        number: the number of the chunk in its lane, of the bucket, of AdamW's part, or of the
            group, depending on ``do``.
    """

    do: Do
    lane: int = -1
    number: int = 0

    @property
    def chunk(self) -> tuple[int, int]:
        """The chunk's key: the number of its lane, and its number in the lane."""
        return self.lane, self.number


def chunk_order(chunks: int, in_flight: int) -> Iterator[tuple[Do, int]]:
    """Yields the actions for the chunks of one lane, each with the number of its chunk.

    A chunk is in flight from the launch of its gather to the update of its weights; at most
    ``in_flight`` chunks are. While chunk k is orthogonalized, the next chunks are being gathered if
    ``in_flight`` is at least 2, and chunk k − 1 is being scattered if it is at least 3.
    """
    begun = computed = updated = 0
    while updated < chunks:
        while begun < min(chunks, updated + in_flight):
            yield Do.GATHER, begun
            begun += 1
        if computed < begun:
            yield Do.ORTHOGONALIZE, computed
            computed += 1
        gathering = begun - computed
        # An update makes room for one more gather. If fewer than two gathers are in flight, the
        # next one must start before the next orthogonalization, which hides it.
        makes_room = begun < chunks and gathering < 2
        if computed - updated > 1 or not gathering or makes_room:
            yield Do.UPDATE, updated
            updated += 1


def lanes_order(
    lanes: Sequence[tuple[int, int]], gathers_ahead: int = GATHERS_AHEAD
) -> Iterator[tuple[Do, int, int]]:
    """Yields the actions for the chunks of all lanes, each with the numbers of lane and chunk.

    Lanes run one after another, but overlap at their ends: up to ``gathers_ahead`` gathers of each
    lane come at the beginning of the step, and the last updates of a lane come after the first
    chunk of the next lane is orthogonalized. All ranks launch collectives in one order: these first
    gathers, lane by lane, then all others, lane by lane.

    Args:
        lanes: for each lane, its number of chunks, and how many of them may be in flight.
        gathers_ahead: how many chunks of each lane to gather at the beginning. It is the same for
            all lanes, since ranks that share two lanes may differ in which lane is their first.
    """
    remaining_orders: list[list[tuple[Do, int, int]]] = []
    for number, (chunks, in_flight) in enumerate(lanes):
        order = [(do, number, chunk) for do, chunk in chunk_order(chunks, in_flight)]
        begun = min(chunks, in_flight, gathers_ahead)
        yield from order[:begun]
        remaining_orders.append(order[begun:])
    last_updates: list[tuple[Do, int, int]] = []  # of the previous lane
    for remaining in remaining_orders:
        # Indices in `remaining` just after each orthogonalization.
        ends = [at for at, (do, _, _) in enumerate(remaining, 1) if do is Do.ORTHOGONALIZE]
        yield from remaining[: ends[0]]
        yield from last_updates
        yield from remaining[ends[0] : ends[-1]]
        last_updates = remaining[ends[-1] :]
    yield from last_updates


def schedule(
    plan: Plan,
    adamw_parts: Sequence[tuple[int, int]],
    prefetch_bytes: Optional[Mapping[tuple[int, int], int]],
    averaging: Optional[tuple[int, ...]],
) -> tuple[Event, ...]:
    """Returns all events of this rank's step, in order, without those that `with_averages` adds.

    Half of the work of local lanes comes while the first chunks are gathered, and half while the
    last ones are scattered. AdamW also comes while the first chunks are gathered. If state comes
    from the host, AdamW's parts come between the chunks instead (`_interleave`), except in ZeRO-2.

    In ZeRO-2, AdamW communicates as well, so it has a fixed position in the order of lanes. If the
    ranks that average gradients also have a lane, AdamW comes while that lane's first chunks are
    gathered; otherwise, at the position that the sort order would give that lane. In any other
    position, ranks whose first lanes differ would use one process group in different orders.

    Args:
        plan: the plan of the step.
        adamw_parts: for each of AdamW's parts, in order, the number of its group, and the bytes of
            state that it fetches from host memory.
        prefetch_bytes: bytes of each chunk's momentum, by `Event.chunk`; None if no state or
            weights come from the host.
        averaging: the ranks that average gradients, ascending; None without ZeRO-2.
    """
    # Gradients are averaged in the order of lanes. If all lanes began to gather at once, the step
    # would start by waiting for nearly all gradients.
    lanes = [(len(lane.chunks), lane.in_flight) for lane in plan.lanes]
    order = lanes_order(lanes, GATHERS_AHEAD if averaging is None else 0)
    traffic = [Event(*event) for event in order]
    computing = [at for at, event in enumerate(traffic) if event.do is Do.ORTHOGONALIZE]
    first, last = (computing[0], computing[-1] + 1) if computing else (0, 0)
    before, after = _local_events(plan)
    events = [*traffic[:first], *before, *traffic[first:last], *after, *traffic[last:]]
    if prefetch_bytes is not None and averaging is None:
        return tuple(_interleave(events, plan, adamw_parts, prefetch_bytes))
    at = _place_of_adamw(events, plan, averaging)
    for number, (group, _) in enumerate(adamw_parts):
        events.insert(at, Event(Do.ADAMW, number=number))
        at += 1
        is_last = number + 1 == len(adamw_parts) or adamw_parts[number + 1][0] != group
        if averaging is not None and is_last:
            events.insert(at, Event(Do.SHARE_ROWS, number=group))
            at += 1
    return tuple(events)


def with_averages(
    events: Iterable[Event], needed: Mapping[Event, int], buckets: int
) -> Iterator[Event]:
    """Yields the events, each preceded by the launches of gradient buckets that it needs.

    Args:
        events: the events of a step.
        needed: how many buckets each event needs averaged; `BUCKETS_AHEAD` more are launched.
        buckets: the number of buckets.
    """
    launched = 0
    for event in events:
        while needed[event] and launched < min(needed[event] + BUCKETS_AHEAD, buckets):
            yield Event(Do.AVERAGE, number=launched)
            launched += 1
        yield event


def _local_events(plan: Plan) -> tuple[list[Event], list[Event]]:
    """Splits the events of local lanes into two parts of about equal work.

    The second part is empty if no lane has traffic.
    """
    chunks = [
        (number, chunk, sum(map(plan.flops, lane.chunks[chunk].batches)))
        for number, lane in enumerate(plan.local_lanes, len(plan.lanes))
        for chunk in range(len(lane.chunks))
    ]
    half, done = sum(flops for _, _, flops in chunks) / 2, 0.0
    parts: tuple[list[Event], list[Event]] = [], []
    for number, chunk, flops in chunks:
        is_after = bool(plan.lanes) and done + flops / 2 > half
        parts[is_after].extend(Event(do, number, chunk) for do, _ in chunk_order(1, 1))
        done += flops
    return parts


def _place_of_adamw(
    events: Sequence[Event], plan: Plan, averaging: Optional[tuple[int, ...]]
) -> int:
    """Returns the index in ``events`` at which to insert AdamW's parts."""
    number, while_gathered = 0, True
    if averaging is not None and len(averaging) > 1:
        key = ranks_sort_key(averaging)
        number = sum(ranks_sort_key(lane.peers) < key for lane in plan.lanes)
        in_lanes = number < len(plan.lanes)
        while_gathered = in_lanes and plan.lanes[number].peers == averaging
    if number == len(plan.lanes):  # no lane with traffic has this number; a local lane may
        return len(events)
    places = (
        at
        for at, event in enumerate(events)
        if event.lane == number and (event.do is Do.ORTHOGONALIZE or not while_gathered)
    )
    return next(places, len(events))


def _interleave(
    events: Sequence[Event],
    plan: Plan,
    parts: Sequence[tuple[int, int]],
    prefetch_bytes: Mapping[tuple[int, int], int],
) -> Iterator[Event]:
    """Puts AdamW's parts between the chunks, for steps whose state comes from the host.

    AdamW's arithmetic is too short to hide the copies of its own state, but the chunks' arithmetic
    can. After each chunk, AdamW's parts follow as long as the fraction of bytes copied doesn't
    exceed the fraction of FLOPs done. The last chunk (with traffic, if any chunk has some) doesn't
    count: it hides the remaining copies to the host.
    """
    flops = {
        (lane_number, number): sum(plan.flops(batch) for batch in chunk.batches)
        for lane_number, lane in enumerate(plan.all_lanes)
        for number, chunk in enumerate(lane.chunks)
    }
    hiding = sum(flops.values())
    if flops:
        last = len(plan.lanes or plan.local_lanes) - 1
        hiding -= flops[last, len(plan.all_lanes[last].chunks) - 1]
    nbytes = sum(prefetch_bytes.values()) + sum(of_part for _, of_part in parts)
    flops_done = bytes_done = next_part = 0
    for event in events:
        yield event
        if event.do is Do.GATHER:
            bytes_done += prefetch_bytes[event.chunk]
        elif event.do is Do.ORTHOGONALIZE:
            flops_done += flops[event.chunk]
            while next_part < len(parts):
                after = bytes_done + parts[next_part][1]
                if after * hiding > nbytes * flops_done:
                    break
                bytes_done = after
                yield Event(Do.ADAMW, number=next_part)
                next_part += 1
    for number in range(next_part, len(parts)):
        yield Event(Do.ADAMW, number=number)
