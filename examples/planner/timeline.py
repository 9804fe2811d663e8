"""When a step gathers, computes and gives back, on a machine that nobody has rented yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.averaging import Averages, Ring
from planner.costs import GATHER, HOST, NETWORK, SCATTER, Costs, LaneCosts
from planner.machine import Machine
from plots import Theme, add_head, label_rows, save

WAYS = {GATHER: "gather", SCATTER: "scatter"}


@dataclass(frozen=True)
class Span:
    """What a rank does from ``start`` to ``stop``, in seconds.

    Args:
        what: ``"gather"``, ``"compute"`` or ``"scatter"``; ``"average"``: what ZeRO-2 does beside.
        chunk: counted over all lanes; −1 for what is in none.
    """

    what: str
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """A step as one rank sees it.

    Args:
        rank: which.
        spans: those of its chunks.
        seconds: until it has all updates.
        staged: bytes in the buffers of chunks in flight, at most, on the rank that has most.
    """

    rank: int
    spans: tuple[Span, ...]
    seconds: float
    staged: int

    @property
    def rows(self) -> list[str]:
        """What there are spans of."""
        return [row for row in ROWS if any(span.what == row for span in self.spans)]

    @property
    def computing(self) -> float:
        """Seconds of orthogonalization on this rank."""
        return sum(span.stop - span.start for span in self.spans if span.what == "compute")


def simulate(scheduler: Any, costs: Costs, machine: Machine, rank: int | None = None) -> Timeline:
    """Runs the chunks of a rank and of all its peers by the package's own scheduler.

    Every rank computes on one stream, in the order of the program. An all-to-all starts when all
    its ranks have reached it and the one before it has ended, and takes as long as its slowest
    rank. Counted are orthogonalization and traffic; element-wise work, which is bound by memory,
    is not.

    Args:
        scheduler: the package's ``async_utils``, which orders the chunks.
        costs: of all ranks.
        machine: its speeds.
        rank: whose timeline; None is the one with the most FLOPs.
    """
    rank = costs.busiest if rank is None else rank
    clock = _Clock(len(costs.local_flops))
    spans: list[Span] = []
    lanes, first = costs.lanes_of(rank), 0
    runs = []
    for lane in lanes:
        averages = None if costs.averages is None else _Averaging(costs.averages)
        place = lane.peers.index(rank)
        runs.append(_LaneRun(lane, machine, clock, place, first, spans, averages))
        first += len(lane.flops)

    def without_traffic(share: float) -> None:
        start = clock.free[rank]
        clock.free += share * costs.local_flops / machine.flops
        if costs.local_flops[rank]:
            spans.append(Span("compute", -1, start, clock.free[rank]))

    sizes = [(len(lane.flops), lane.in_flight) for lane in lanes]
    ahead = scheduler.GATHERS_AHEAD if costs.averages is None else 0
    order = list(scheduler.lanes_order(sizes, ahead))
    computing = [at for at, (do, _, _) in enumerate(order) if do is scheduler.Do.ORTHOGONALIZE]
    for at, (do, number, chunk) in enumerate(order):
        if at == computing[0]:
            without_traffic(0.5)
            runs[number].update_others()
        runs[number].does[do.name](chunk)
        if at == computing[-1]:
            without_traffic(0.5)
    for run in runs:
        run.finish()
    if not lanes:
        without_traffic(1.0)
    staged = max((run.most_held for run in runs), default=0)
    return Timeline(rank, tuple(spans), float(clock.free[rank]), staged)


class _Clock:
    """What time it is, for the lanes of a rank together.

    Attributes:
        free: when each rank of the world has done its work so far, in seconds.
        wire: when the last collective ends; lanes share the links.
        held: bytes that each rank of the world has in the buffers of chunks in flight.
    """

    def __init__(self, ranks: int):
        self.free, self.held = np.zeros(ranks), np.zeros(ranks, np.int64)
        self.wire = 0.0


class _Averaging:
    """ZeRO-2's collectives while they are launched.

    Attributes:
        arrivals: when each bucket of gradients is there, of those launched.
        rows: when AdamW's weights are there.
    """

    def __init__(self, averages: Averages):
        self.averages = averages
        self.arrivals: list[float] = []
        self.rows = 0.0

    def due(self, needed: int) -> list[Ring]:
        """Buckets to launch before work that needs so many of them."""
        return list(self.averages.gradients[len(self.arrivals) : needed + self.averages.ahead])

    def arrival(self, needed: int) -> float:
        """When so many buckets are there."""
        return max(self.arrivals[:needed], default=0.0)


class _LaneRun:
    """The chunks of a lane, on all its ranks at once.

    Args:
        clock: of all lanes; moved on.
        this_peer: index of the peer whose spans are kept.
        first: number of the lane's first chunk.
        spans: filled.
        averaging: what ZeRO-2 does beside.
    """

    def __init__(
        self,
        lane: LaneCosts,
        machine: Machine,
        clock: _Clock,
        this_peer: int,
        first: int,
        spans: list[Span],
        averaging: _Averaging | None,
    ):
        self.lane, self.machine, self.spans, self.averaging = lane, machine, spans, averaging
        self.clock, self.peers = clock, np.array(lane.peers)
        self.this_peer, self.first = this_peer, first
        self.most_held = 0
        self.arrivals: dict[int, float] = {}  # of what was sent last, by chunk
        self.does = {
            "GATHER": self._gather,
            "ORTHOGONALIZE": self._orthogonalize,
            "UPDATE": self._update,
        }

    def update_others(self) -> None:
        """ZeRO-2 averages AdamW's gradients and starts to gather the rows that it updates."""
        if self.averaging is not None:
            self._average(self.averaging.averages.other_needed)
            self.averaging.rows = self._ring(self.averaging.averages.other_rows)

    def finish(self) -> None:
        if self.averaging is not None:
            self._wait(self.averaging.rows)

    def _average(self, needed: int) -> None:
        """Launches so many buckets and some more, and waits for the former."""
        assert self.averaging is not None
        self.averaging.arrivals += map(self._ring, self.averaging.due(needed))
        self._wait(self.averaging.arrival(needed))

    def _gather(self, chunk: int) -> None:
        if self.averaging is not None:
            self._average(self.averaging.averages.needed[chunk])
        self._hold(chunk, GATHER)
        self.arrivals[chunk] = self._exchange(chunk, GATHER)

    def _orthogonalize(self, chunk: int) -> None:
        self._wait(self.arrivals[chunk])
        self._hold(chunk, SCATTER)
        self._compute(chunk)
        self._hold(chunk, GATHER, -1)
        self.arrivals[chunk] = self._exchange(chunk, SCATTER)

    def _update(self, chunk: int) -> None:
        self._wait(self.arrivals[chunk])
        self._hold(chunk, SCATTER, -1)

    def _hold(self, chunk: int, way: int, sign: int = 1) -> None:
        """Takes the two buffers of one way, or gives them back."""
        size = self.lane.bytes[chunk, way].sum((0, 1)) + self.lane.kept[chunk, way]
        self.clock.held[self.peers] += sign * size
        self.most_held = max(self.most_held, int(self.clock.held.max()))

    def _exchange(self, chunk: int, way: int) -> float:
        """When an all-to-all that is launched now ends."""
        moved = self.lane.bytes[chunk, way]
        start = max(self.clock.wire, float(self.clock.free[self.peers].max()))
        self.clock.wire = start
        if moved.any():
            here = moved[:, HOST].max() / self.machine.host_bytes
            away = moved[:, NETWORK].max() / self.machine.network_bytes
            launched = self.lane.launched[chunk] if way == SCATTER else 1
            self.clock.wire += max(here, away) + launched * self.machine.latency
        self.spans.append(Span(WAYS[way], self.first + chunk, start, self.clock.wire))
        return self.clock.wire

    def _ring(self, ring: Ring) -> float:
        """When a collective of ZeRO-2 that is launched now ends."""
        start = max(self.clock.wire, float(self.clock.free[self.peers].max()))
        self.clock.wire = start + ring.seconds(len(self.peers), self.machine)
        self.spans.append(Span("average", -1, start, self.clock.wire))
        return self.clock.wire

    def _wait(self, arrival: float) -> None:
        self.clock.free[self.peers] = np.maximum(self.clock.free[self.peers], arrival)

    def _compute(self, chunk: int) -> None:
        start = self.clock.free[self.peers[self.this_peer]]
        self.clock.free[self.peers] += self.lane.flops[chunk] / self.machine.flops
        stop = self.clock.free[self.peers[self.this_peer]]
        if stop > start:
            self.spans.append(Span("compute", self.first + chunk, start, stop))


# -- the picture -----------------------------------------------------------------------------------

ROWS = ("average", "gather", "compute", "scatter")
HUES = {"average": "purple", "gather": "blue", "compute": "orange", "scatter": "teal"}


def draw(path: Path, what: str, subtitle: str, timelines: dict[str, Timeline]) -> str:
    """A panel for each layout, on one axis of time; chunks are told apart by their shade.

    Args:
        path: NAME.png; NAME-light.png and NAME-dark.png are written.
        what: whose steps, for the title.
        subtitle: of which machine.
        timelines: by layout.

    Returns:
        The files, to print.
    """
    height = 1.5 * len(timelines) + 1.6

    def figure_of(plt: Any, theme: Theme) -> Any:
        figure, panels = plt.subplots(
            len(timelines), 1, figsize=(11, height), sharex=True, squeeze=False
        )
        figure.subplots_adjust(
            left=0.09, right=0.97, bottom=0.6 / height, top=1 - 1.2 / height, hspace=0.55
        )
        for axes, (name, timeline) in zip(panels[:, 0], timelines.items()):
            _draw_rows(axes, theme, timeline)
            axes.set_title(_summary(name, timeline), loc="left", fontsize=11)
        panels[-1, 0].set_xlabel("Milliseconds since the step began")
        panels[-1, 0].set_xlim(left=0)
        add_head(figure, theme, f"{what}: {_finding(timelines)}", subtitle)
        return figure

    return save(path, figure_of)


def _finding(timelines: dict[str, Timeline]) -> str:
    """The times of the fastest and of the slowest layout."""
    ordered = sorted(timelines, key=lambda name: timelines[name].seconds)
    ends = dict.fromkeys((ordered[0], ordered[-1]))
    return ", ".join(f"{1e3 * timelines[name].seconds:,.0f} ms with {name}" for name in ends)


def _summary(name: str, timeline: Timeline) -> str:
    return (
        f"{name}: {1e3 * timeline.seconds:,.1f} ms; rank {timeline.rank} orthogonalizes "
        f"for {1e3 * timeline.computing:,.1f} ms"
    )


def _draw_rows(axes: Any, theme: Theme, timeline: Timeline) -> None:
    for row, what in enumerate(timeline.rows):
        for is_odd in range(2):
            spans = [s for s in timeline.spans if s.what == what and s.chunk % 2 == is_odd]
            bars = [(1e3 * s.start, 1e3 * (s.stop - s.start)) for s in spans]
            color = getattr(theme, HUES[what])
            color = theme.pale(color) if is_odd else color
            axes.broken_barh(bars, (row - 0.4, 0.8), color=color, linewidth=0.5)  # never too thin
    axes.xaxis.set_major_formatter("{x:,.10g}")
    label_rows(axes, timeline.rows)
