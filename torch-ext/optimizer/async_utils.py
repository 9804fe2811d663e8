"""The order of a step: a list of events, made before it by a pure function.

The matrices of a lane go through chunk by chunk: momentum is updated and sent to the owners, the
owners orthogonalize, the updates come back, weights are updated. While one chunk is orthogonalized,
the next ones are on their way to their owners, and the one before is on its way back. Between them
AdamW's parameters have their turn, and the averages of ZeRO-2.

Ranks that share a lane launch its collectives in one order, since the order follows from what they
have in common: the number of chunks, how many may be in flight, who takes part.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .adamw import AdamWPart
from .distributed.plan import Plan, lane_order

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
class Averages:
    """What ZeRO-2 averages and sends, and who waits for it.

    Args:
        ranks: that average, ascending.
        buckets: how many hold gradients of matrices.
        needed: how many of them a chunk waits for, by the numbers of its lane and its own.
        others_needed: how many buckets of AdamW's gradients each part of AdamW waits for.
    """

    ranks: tuple[int, ...]
    buckets: int
    needed: Mapping[tuple[int, int], int]
    others_needed: Sequence[int]


@dataclass(frozen=True)
class OtherWork:
    """What a step does beside the chunks.

    Args:
        parts: of AdamW.
        chunk_bytes: of state that comes from host memory for each chunk, by the numbers of its lane
            and its own; None where no state is streamed.
        averages: those of ZeRO-2, where it has traffic.
        flagged: numbers of the lanes in which matrices with Inf or NaN are skipped.
    """

    parts: Sequence[AdamWPart]
    chunk_bytes: Mapping[tuple[int, int], int] | None
    averages: Averages | None
    flagged: Sequence[int]


def turns(chunks: int, in_flight: int) -> Iterator[tuple[Do, int]]:
    """The order of a lane's chunks, of which at most ``in_flight`` are begun and not updated.

    While chunk k is computed, the next ones are being gathered and, where ``in_flight`` allows
    three, chunk k − 1 is on its way back.
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
        # Room for the chunk behind the next one: gathered later, it would hide under nothing.
        makes_room = begun < chunks and gathering < 2
        if computed - updated > 1 or not gathering or makes_room:
            yield Do.UPDATE, updated
            updated += 1


def schedule(plan: Plan, other_work: OtherWork) -> tuple[Event, ...]:
    """All that a rank does in a step of a plan, in order.

    Chunks without traffic and AdamW come while the first chunks of the first lane are gathered. In
    ZeRO-2 AdamW has traffic of its own, which takes its turn among the lanes: while those of the
    same ranks are gathered, or between the others. Out of turn, two ranks would use one process
    group in different orders, since each may have another first lane.
    """
    averages, count = other_work.averages, len(plan.lanes)
    is_woven = other_work.chunk_bytes is not None and averages is None
    others = [] if is_woven else _adamw(other_work)
    turn, is_under = 0, count > 0
    if averages is not None and len(averages.ranks) > 1:
        turn = sum(lane_order(lane.peers) < lane_order(averages.ranks) for lane in plan.lanes)
        is_under = turn < count and plan.lanes[turn].peers == averages.ranks
    alone = [
        Event(do, number, chunk)
        for number, lane in enumerate(plan.alone, count)
        for do, chunk in turns(len(lane.chunks), in_flight=1)
    ]
    events = [Event(Do.FLAG, number) for number in other_work.flagged]
    for number, lane in enumerate(plan.lanes):
        of_lane = [
            Event(do, number, chunk) for do, chunk in turns(len(lane.chunks), lane.in_flight)
        ]
        gathers = next(at for at, event in enumerate(of_lane) if event.do is not Do.GATHER)
        events += others if number == turn and not is_under else []
        events += of_lane[:gathers]
        events += alone if number == 0 else []
        events += others if number == turn and is_under else []
        events += of_lane[gathers:]
    events += [] if plan.lanes else alone
    events += others if turn == count else []
    if averages is not None:
        return tuple(_with_averages(events, plan, averages))
    return tuple(_weave(events, plan, other_work) if is_woven else events)


def _with_averages(events: Sequence[Event], plan: Plan, averages: Averages) -> Iterator[Event]:
    """Launches averages of matrices' gradients ahead of the events that wait for them."""
    launched = 0
    for event in events:
        needed = 0
        if event.do is Do.GATHER:
            needed = averages.needed[event.chunk]
        elif event.do is Do.FLAG:
            needed = averages.needed[event.lane, len(plan.all_lanes[event.lane].chunks) - 1]
        launches = _launches(Do.AVERAGE, launched, needed, averages.buckets)
        launched += len(launches)
        yield from launches
        yield event


def _launches(do: Do, launched: int, needed: int, buckets: int) -> list[Event]:
    """Launches the buckets that are needed and have not been launched, and some ahead of them."""
    end = min(needed + BUCKETS_AHEAD, buckets) if needed else 0
    return [Event(do, number=bucket) for bucket in range(launched, end)]


def _adamw(other_work: OtherWork) -> list[Event]:
    """AdamW's parts one after the other, with their averages ahead and their rows behind."""
    averages = other_work.averages
    if averages is None:
        return [Event(Do.ADAMW, number=number) for number in range(len(other_work.parts))]
    events: list[Event] = []
    launched, buckets = 0, max(averages.others_needed, default=0)
    for number, part in enumerate(other_work.parts):
        launches = _launches(Do.AVERAGE_OTHERS, launched, averages.others_needed[number], buckets)
        launched += len(launches)
        events += [*launches, Event(Do.ADAMW, number=number)]
        if number + 1 == len(other_work.parts) or other_work.parts[number + 1].group != part.group:
            events.append(Event(Do.SHARE_ROWS, number=part.group))
    return events


def _weave(events: Sequence[Event], plan: Plan, other_work: OtherWork) -> Iterator[Event]:
    """Puts AdamW's parts between the chunks, where state comes from the host.

    AdamW's own arithmetic is too little to hide that. Each chunk is followed by as many parts as
    keep the bytes that have come in step with the arithmetic that hides them: all of it but that of
    the last chunk, which hides what is left to write back.
    """
    assert other_work.chunk_bytes is not None
    flops = {
        (number, of_lane): sum(plan.flops(batch) for batch in chunk.batches)
        for number, lane in enumerate(plan.all_lanes)
        for of_lane, chunk in enumerate(lane.chunks)
    }
    hiding = sum(flops.values())
    if flops:
        last = len(plan.lanes or plan.alone) - 1
        hiding -= flops[last, len(plan.all_lanes[last].chunks) - 1]
    nbytes = sum(other_work.chunk_bytes.values()) + sum(part.nbytes for part in other_work.parts)
    flops_done = bytes_done = part = 0
    for event in events:
        yield event
        if event.do is Do.GATHER:
            bytes_done += other_work.chunk_bytes[event.chunk]
        elif event.do is Do.ORTHOGONALIZE:
            flops_done += flops[event.chunk]
            while part < len(other_work.parts):
                after = bytes_done + other_work.parts[part].nbytes
                if after * hiding > nbytes * flops_done:
                    break
                bytes_done = after
                yield Event(Do.ADAMW, number=part)
                part += 1
    for rest in range(part, len(other_work.parts)):
        yield Event(Do.ADAMW, number=rest)
