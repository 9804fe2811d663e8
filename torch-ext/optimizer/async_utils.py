"""Decides the order of a step: a pure function makes the schedule, a list of events, before it.

A lane is worked off chunk by chunk: momentum is updated and gathered by the owners, the owners
orthogonalize, the updates are scattered, weights are updated. While one chunk is orthogonalized,
the next ones are being gathered, and the one before is being scattered. Between chunks a step
updates AdamW's parameters, and averages gradients in ZeRO-2.

Ranks that share a lane launch its collectives in one order, since the order follows from what they
have in common: the number of chunks, how many may be in flight, which gradients are present.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from .adamw import AdamWPart
from .distributed.plan import Plan, ranks_sort_key

# Buckets of gradients that are averaged ahead of the one that is needed next.
BUCKETS_AHEAD = 2


class Do(enum.Enum):
    """What an event does."""

    AVERAGE = "average gradients"  # of matrices, one bucket of them, over replicas
    FLAG = "flag Inf and NaN"  # in the gradients of a lane
    GATHER = "momentum, gather"  # of a chunk; its gather is launched
    ORTHOGONALIZE = "orthogonalize, scatter"  # of a chunk; its scatter is launched
    UPDATE = "update weights"  # of a chunk
    AVERAGE_OTHERS = "average AdamW's gradients"  # one bucket of them
    ADAMW = "AdamW"  # of one part of its parameters
    SHARE_ROWS = "gather AdamW's rows"  # that each replica has updated, of one group


class Event(NamedTuple):
    """One thing that a rank does in a step.

    Args:
        do: what.
        lane: of a chunk, the number of its lane among all lanes of the plan; else −1.
        number: of the chunk, the bucket, AdamW's part, or the group of AdamW's.
    """

    do: Do
    lane: int = -1
    number: int = 0

    @property
    def chunk(self) -> tuple[int, int]:
        """The chunk, by the numbers of its lane and its own."""
        return self.lane, self.number


@dataclass(frozen=True)
class Averaging:
    """The buckets of gradients that ZeRO-2 averages, and the events that wait for them.

    Args:
        ranks: that average, ascending.
        buckets: how many hold gradients of matrices.
        needed: how many of these each chunk waits for, by the numbers of its lane and its own.
        adamw_needed: how many buckets of AdamW's gradients each part of AdamW waits for.
    """

    ranks: tuple[int, ...]
    buckets: int
    needed: Mapping[tuple[int, int], int]
    adamw_needed: Sequence[int]


@dataclass(frozen=True)
class ScheduleInputs:
    """What the order of a step depends on, beside its plan.

    Args:
        adamw_parts: of AdamW's parameters.
        prefetch_bytes: of momentum that comes from host memory for each chunk, by the numbers of
            its lane and its own; None where no state is offloaded.
        averaging: of gradients, where ZeRO-2 has traffic.
        flagged_lanes: numbers of the lanes in which matrices with Inf or NaN are skipped.
    """

    adamw_parts: Sequence[AdamWPart]
    prefetch_bytes: Mapping[tuple[int, int], int] | None
    averaging: Averaging | None
    flagged_lanes: Sequence[int]


def chunk_order(chunks: int, in_flight: int) -> Iterator[tuple[Do, int]]:
    """The order of a lane's chunks, of which at most ``in_flight`` are begun and not updated.

    While chunk k is orthogonalized, the next ones are being gathered and, where ``in_flight``
    allows three, chunk k − 1 is being scattered.
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
        # Room for the chunk after the next one: gathered later, it would hide under nothing.
        makes_room = begun < chunks and gathering < 2
        if computed - updated > 1 or not gathering or makes_room:
            yield Do.UPDATE, updated
            updated += 1


def lanes_order(lanes: Sequence[tuple[int, int, int]]) -> Iterator[tuple[Do, int, int]]:
    """The order of the chunks of a rank's lanes, each with its lane's number.

    Lanes come one after the other, but for what lets the next one begin while the last one's
    traffic ends: its first gathers are launched at the very beginning, and the last updates of a
    lane wait until the next lane's first chunk is orthogonalized. All ranks launch the collectives
    of all lanes in one order that way: first the first gathers, lane by lane, then all others.

    Args:
        lanes: of each, how many chunks it has, how many may be in flight, and how many of these are
            gathered at the beginning, where it is not the first.
    """
    rests: list[list[tuple[Do, int, int]]] = []
    for number, (chunks, in_flight, ahead) in enumerate(lanes):
        order = [(do, number, chunk) for do, chunk in chunk_order(chunks, in_flight)]
        begun = min(chunks, in_flight, ahead if number else chunks)
        yield from order[:begun]
        rests.append(order[begun:])
    updates: list[tuple[Do, int, int]] = []  # that the last lane has left
    for rest in rests:
        computing = [at for at, (do, _, _) in enumerate(rest, 1) if do is Do.ORTHOGONALIZE]
        yield from rest[: computing[0]]
        yield from updates
        yield from rest[computing[0] : computing[-1]]
        updates = rest[computing[-1] :]
    yield from updates


def schedule(plan: Plan, inputs: ScheduleInputs) -> tuple[Event, ...]:
    """All that a rank does in a step of a plan, in order.

    Local lanes come while the first chunks are gathered, and while the last ones are scattered.
    AdamW comes while the first chunks are gathered. In ZeRO-2 it has traffic of its own, which has
    its place among the lanes: while those of the same ranks are gathered, or between the others. In
    another place two ranks would use one process group in different orders, since each may have
    another first lane.
    """
    averaging = inputs.averaging
    interleaves = inputs.prefetch_bytes is not None and averaging is None
    # Gradients are averaged in the order of lanes: a gather ahead would need all of them.
    may_be_ahead = averaging is None
    lanes = [(len(lane.chunks), lane.in_flight, lane.ahead * may_be_ahead) for lane in plan.lanes]
    traffic = [Event(*event) for event in lanes_order(lanes)]
    computing = [at for at, event in enumerate(traffic) if event.do is Do.ORTHOGONALIZE]
    first, last = (computing[0], computing[-1] + 1) if computing else (0, 0)
    before, after = _local_events(plan)
    events = [*traffic[:first], *before, *traffic[first:last], *after, *traffic[last:]]
    if not interleaves:
        at = _place_of_adamw(events, plan, averaging)
        events[at:at] = _adamw(inputs)
    events = [*(Event(Do.FLAG, number) for number in inputs.flagged_lanes), *events]
    if averaging is not None:
        return tuple(_with_averaging(events, plan, averaging))
    return tuple(_interleave(events, plan, inputs) if interleaves else events)


def _local_events(plan: Plan) -> tuple[list[Event], list[Event]]:
    """Local lanes, in two parts of about as much work."""
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


def _place_of_adamw(events: Sequence[Event], plan: Plan, averaging: Optional[Averaging]) -> int:
    """Where AdamW's parts come among the events."""
    number, under_gathers = 0, True
    if averaging is not None and len(averaging.ranks) > 1:
        key = ranks_sort_key(averaging.ranks)
        number = sum(ranks_sort_key(lane.peers) < key for lane in plan.lanes)
        in_lanes = number < len(plan.lanes)
        under_gathers = in_lanes and plan.lanes[number].peers == averaging.ranks
    of_lane = (
        at
        for at, event in enumerate(events)
        if event.lane == number and (event.do is Do.ORTHOGONALIZE or not under_gathers)
    )
    return next(of_lane, len(events)) if number < len(plan.lanes) else len(events)


def _with_averaging(events: Sequence[Event], plan: Plan, averaging: Averaging) -> Iterator[Event]:
    """Launches buckets of matrices' gradients ahead of the events that wait for them."""
    launched = 0
    for event in events:
        needed = 0
        if event.do is Do.GATHER:
            needed = averaging.needed[event.chunk]
        elif event.do is Do.FLAG:
            needed = averaging.needed[event.lane, len(plan.all_lanes[event.lane].chunks) - 1]
        launches = _launches(Do.AVERAGE, launched, needed, averaging.buckets)
        launched += len(launches)
        yield from launches
        yield event


def _launches(do: Do, launched: int, needed: int, buckets: int) -> list[Event]:
    """Launches the buckets that are needed and have not been launched, and some ahead of them."""
    end = min(needed + BUCKETS_AHEAD, buckets) if needed else 0
    return [Event(do, number=bucket) for bucket in range(launched, end)]


def _adamw(inputs: ScheduleInputs) -> list[Event]:
    """AdamW's parts in order, their gradients averaged ahead, their rows gathered after them."""
    averaging, parts = inputs.averaging, inputs.adamw_parts
    if averaging is None:
        return [Event(Do.ADAMW, number=number) for number in range(len(parts))]
    events: list[Event] = []
    launched, buckets = 0, max(averaging.adamw_needed, default=0)
    for number, (part, needed) in enumerate(zip(parts, averaging.adamw_needed)):
        launches = _launches(Do.AVERAGE_OTHERS, launched, needed, buckets)
        launched += len(launches)
        events += [*launches, Event(Do.ADAMW, number=number)]
        if number + 1 == len(parts) or parts[number + 1].group != part.group:
            events.append(Event(Do.SHARE_ROWS, number=part.group))
    return events


def _interleave(events: Sequence[Event], plan: Plan, inputs: ScheduleInputs) -> Iterator[Event]:
    """Puts AdamW's parts between the chunks, where state comes from the host.

    AdamW's own arithmetic is too little to hide that. Each chunk is followed by as many parts as
    keep the bytes that have come in step with the arithmetic that hides them: all of it but that of
    the last chunk, which hides what is left to write back.
    """
    prefetch_bytes, parts = inputs.prefetch_bytes, inputs.adamw_parts
    assert prefetch_bytes is not None
    flops = {
        (lane_number, number): sum(plan.flops(batch) for batch in chunk.batches)
        for lane_number, lane in enumerate(plan.all_lanes)
        for number, chunk in enumerate(lane.chunks)
    }
    hiding = sum(flops.values())
    if flops:
        last = len(plan.lanes or plan.local_lanes) - 1
        hiding -= flops[last, len(plan.all_lanes[last].chunks) - 1]
    nbytes = sum(prefetch_bytes.values()) + sum(part.nbytes for part in parts)
    flops_done = bytes_done = next_part = 0
    for event in events:
        yield event
        if event.do is Do.GATHER:
            bytes_done += prefetch_bytes[event.chunk]
        elif event.do is Do.ORTHOGONALIZE:
            flops_done += flops[event.chunk]
            while next_part < len(parts):
                after = bytes_done + parts[next_part].nbytes
                if after * hiding > nbytes * flops_done:
                    break
                bytes_done = after
                yield Event(Do.ADAMW, number=next_part)
                next_part += 1
    for number in range(next_part, len(parts)):
        yield Event(Do.ADAMW, number=number)
