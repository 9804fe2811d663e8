"""Binds a plan to parameters and state: builds, once, the lists that each chunk's events work on.

A bound chunk is valid as long as parameters and state keep their storages. Tensors in host memory
are bound at their host address; events copy them to the device, one list at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from operator import eq
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import adamw, core, regions
from ..async_utils import Do, Event, schedule, with_averages
from ..cpu_offload import CPUOffload, Fetch, Load, Ring
from ..distributed import dtensors, process_groups
from ..distributed.chunks import Batch, Chunk, Share
from ..distributed.plan import Lane, Plan
from ..distributed.replicas import Replicas
from ..distributed.units import Unit
from ..matrices import LocalPart
from ..parameters.options import Group, Settings
from ..regions import Region
from ..state.rounding import Rounding

if TYPE_CHECKING:
    from ..distributed.zero2 import BucketPlan

State = Mapping[Tensor, Mapping[str, Tensor]]  # of an optimizer, by parameter

# Bytes of a span's copy in opmath, if arithmetic needs one (`core.update_dtype`).
SPAN_BYTES = {"cpu": 1 << 20}
DEFAULT_SPAN_BYTES = 64 << 20


@dataclass
class Moments:
    """V, the second moments, of some units of one batch.

    Args:
        entries: the entry of each unit.
        tensors: V of each unit: a view (experts…, matrices of an expert…, numbers of a matrix).
        start: where the owners' mean squares begin in the chunk's side buffer.
        sizes: the shape in which V of a unit broadcasts to the unit.
        indices: for each of this rank's pieces of a unit, the part of V that belongs to it.
    """

    entries: list[int]
    tensors: list[Tensor]
    start: int
    sizes: list[int]
    indices: list[tuple[slice, ...]]

    def of_pieces(self, of_units: Tensor) -> list[Tensor]:
        """Splits the units' per-row or per-column numbers into one tensor per piece.

        The tensors broadcast to the pieces. For a tall unit of 8 rows, if this rank has rows 0 to 2
        and 6 to 7, the result is numbers 0 to 2, as (3, 1), and numbers 6 to 7, as (2, 1).
        """
        of_units = of_units.view(-1, *self.sizes)
        columns = [of_units[(slice(None), *index)].unbind(0) for index in self.indices]
        return list(chain.from_iterable(zip(*columns)))

    def without(self, absent: frozenset[int]) -> Moments:
        present = [entry not in absent for entry in self.entries]
        entries = list(compress(self.entries, present))
        return replace(self, entries=entries, tensors=list(compress(self.tensors, present)))


class Places(NamedTuple):
    """Where the pieces of one batch lie in a span, unit by unit.

    Args:
        start: where the first piece begins, in elements.
        units: number of units.
        shapes: shapes of the pieces of a unit.
    """

    start: int
    units: int
    shapes: list[tuple[int, ...]]

    def views(self, buffer: Tensor) -> Iterable[Tensor]:
        """Views of the pieces in a flat buffer of the span."""
        numels = list(map(math.prod, self.shapes))
        end = self.start + self.units * sum(numels)
        columns = buffer[self.start : end].view(self.units, -1).split(numels, 1)
        of_shapes = [
            column.unflatten(1, shape).unbind() for column, shape in zip(columns, self.shapes)
        ]
        return of_shapes[0] if len(of_shapes) == 1 else chain.from_iterable(zip(*of_shapes))


@dataclass
class Pieces:
    """This rank's pieces of matrices that one call updates: one group, one dtype, one scale.

    Lists have one item per piece, except ``places`` and ``moments``, which have one per batch.

    Args:
        group: number of the group.
        scale: factor on the update.
        is_staged: True if the pieces have places in the chunk's buffer.
        entries: the entry of each piece.
        params: the parameter of each piece.
        tensors: views of the momentum or of the weights.
        parts: where each piece lies in the entry's gradient or weights; None for all of it.
        rounding: residuals, or the places of random bits; None without `Group.updates_in_fp32`.
        places: the places of each batch.
        moments: the second moments of each batch; empty without a second moment.
    """

    group: int
    scale: float
    is_staged: bool
    entries: list[int]
    params: list[Tensor]
    tensors: list[Tensor]
    parts: list[Optional[LocalPart]]
    rounding: Optional[list[Tensor]]
    places: list[Places]
    moments: list[Moments]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Views of the pieces' places in a flat buffer of their span."""
        views: list[Tensor] = []
        for places in self.places:
            if places.units and places.shapes:
                views += places.views(buffer)
        return views

    def without(self, absent: frozenset[int]) -> Pieces:
        """The pieces of entries with a gradient, packed into the first places of their batch.

        Only for lanes without traffic, in which every unit is whole and has one piece.
        """
        present = [entry not in absent for entry in self.entries]
        places, at = [], 0
        for start, count, shapes in self.places:
            places.append(Places(start, sum(present[at : at + count]), shapes))
            at += count
        return replace(
            self,
            entries=list(compress(self.entries, present)),
            params=list(compress(self.params, present)),
            tensors=list(compress(self.tensors, present)),
            parts=list(compress(self.parts, present)),
            rounding=self.rounding and list(compress(self.rounding, present)),
            places=places,
            moments=[moments.without(absent) for moments in self.moments],
        )

    def join(self, others: Pieces) -> None:
        """Appends pieces that are updated in the same call."""
        for name in ("entries", "params", "tensors", "parts", "places", "moments"):
            getattr(self, name).extend(getattr(others, name))
        if self.rounding is not None and others.rounding is not None:
            self.rounding += others.rounding


class Span(NamedTuple):
    """An interval of a chunk's buffer that is converted at once.

    Args:
        start, stop: bounds of the interval, in elements.
        pieces: the pieces in the interval, and pieces that have no place in the buffer.
    """

    start: int
    stop: int
    pieces: list[Pieces]

    def without(self, absent: frozenset[int]) -> Span:
        return self._replace(pieces=[pieces.without(absent) for pieces in self.pieces])


@dataclass
class BoundChunk:
    """The tensors that the events of a chunk work on.

    Args:
        momentum, weights: spans in the order of the chunk's buffers.
        batches: the batches that this rank owns, each with the number of units that take part.
        reads: entries whose gradients `momentum` reads.
    """

    chunk: Chunk
    lane: Lane
    process_group: Any
    momentum: list[Span]
    weights: list[Span]
    batches: list[tuple[Batch, int]]
    reads: list[int]

    @property
    def momentum_bytes(self) -> int:
        pieces = (pieces for span in self.momentum for pieces in span.pieces)
        return sum(tensor.nbytes for each in pieces for tensor in each.tensors)

    def without(self, absent: frozenset[int]) -> BoundChunk:
        """The chunk without absent entries; lanes with traffic never contain any."""
        if len(self.lane.peers) > 1 or absent.isdisjoint(self.reads):
            return self
        return replace(
            self,
            momentum=[span.without(absent) for span in self.momentum],
            weights=[span.without(absent) for span in self.weights],
            batches=[
                (batch, sum([unit.entry not in absent for unit in batch.units]))
                for batch, _ in self.batches
            ],
            reads=[entry for entry in self.reads if entry not in absent],
        )


class Bound:
    """A plan, bound to parameters and state, and the order of its events.

    Valid until the plan changes or a bound tensor gets a new storage. `prepare` chooses which
    parameters take part in a step.

    Args:
        params, state: Muon's parameters, in the order of the plan's entries, and their state.

    Attributes:
        chunks: the step's chunks, without absent entries, by numbers of lane and chunk.
        taking_part: AdamW's parameters that take part, by group.
        parts: the parts that AdamW updates at once.
        averaged: in ZeRO-2, the parameters whose gradients replicas average, in the order in which
            the step needs them. Each has the number of its entry (None for AdamW's), and True if
            this rank gets only its rows.
        bucket_plan: buckets of these gradients.
        schedule: all events of the step, in order.
        loads: for each event, the load that it copies from host memory.
        rings: the rings that copy these loads, by device.
        last_exchange: the event that waits for other ranks' last updates; None without traffic.
        last_reads: for each chunk, the entries whose gradients no later event reads; under None,
            those whose gradients no event reads.
        sharded: the parameters that are DTensors, by number of their entry.
        on_host: entries whose weights are in host memory, but are updated on a device.
    """

    chunks: dict[tuple[int, int], BoundChunk]
    taking_part: Sequence[Sequence[Tensor]]
    parts: list[adamw.Part]
    averaged: dict[Tensor, tuple[Optional[int], bool]]
    bucket_plan: BucketPlan
    schedule: tuple[Event, ...]
    loads: dict[Event, Load]
    rings: dict[torch.device, Ring]
    last_reads: dict[Optional[tuple[int, int]], list[int]]
    last_exchange: Optional[Event]

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        groups: Sequence[Group],
        state: State,
        settings: Settings,
        offload: CPUOffload,
        rounding: Rounding,
    ):
        self.plan = plan
        self.params = params
        self._groups = groups
        self._state = state
        self._settings = settings
        self._rounding = rounding
        self._offload = offload
        # A weight whose memory was freed takes no part, but needs views: bind a meta tensor.
        self.weights = [
            dtensors.local(param).to("meta")
            if dtensors.lacks_memory(param)
            else dtensors.local(param)
            for param in params
        ]
        self.momenta = [dtensors.local(state[param]["momentum_buffer"]) for param in params]
        self.sharded = {n: param for n, param in enumerate(params) if dtensors.is_dtensor(param)}
        self.on_host = {n for n, param in enumerate(params) if offload.is_on_host(param)}
        self._streams = bool(self.on_host) or offload.has_state
        self._whole: dict[tuple[int, int], BoundChunk] = {}
        for number, lane in enumerate(plan.all_lanes):
            for at in range(len(lane.chunks)):
                self._whole[number, at] = self._chunk(lane, at)
        self._chosen: Optional[tuple[frozenset[int], list[list[int]]]] = None

    def fits(self) -> bool:
        """True if all tensors still have the storages that were bound."""
        return dtensors.addresses(self._tensors) == self._addresses

    def prepare(
        self,
        absent: frozenset[int],
        taking_part: Sequence[Sequence[Tensor]],
        grads: Sequence[Optional[Tensor]],
    ) -> None:
        """Chooses the parameters that take part in a step, if they differ from the last step's.

        Args:
            absent: entries that take no part.
            taking_part: AdamW's parameters that take part, by group.
            grads: the gradient of each entry; None where there is none yet.
        """
        last, self._chosen = self._chosen, None  # after an error the next call chooses everything
        chosen = absent, [list(map(id, params)) for params in taking_part]
        if last is None or absent != last[0]:
            self.chunks = {key: chunk.without(absent) for key, chunk in self._whole.items()}
        if last is None or chosen[1] != last[1]:
            self._order(taking_part)
        # Gradients in host memory are different tensors in each step.
        if self._streams and (self.on_host or chosen != last):
            self._load(grads)
        self._chosen = chosen

    def _order(self, taking_part: Sequence[Sequence[Tensor]]) -> None:
        """Binds AdamW's parameters and makes the schedule."""
        replicas = self._settings.zero2_replicas
        binder = adamw.Binder(self._groups, self._state, replicas, self._offload, self._rounding)
        self.taking_part, self.parts = taking_part, binder.parts(taking_part)
        self._tensors = _tensors_of(chain(self.params, *taking_part), self._state)
        self._addresses = dtensors.addresses(self._tensors)
        self.loads, self.rings = {}, {}
        self.schedule = schedule(
            self.plan,
            [(part.group, part.nbytes) for part in self.parts],
            {k: c.momentum_bytes for k, c in self._whole.items()} if self._streams else None,
            None if replicas is None else tuple(sorted(replicas.ranks)),
        )
        self.averaged = {}
        if replicas is not None:
            self._average(replicas)
        lanes = range(len(self.plan.lanes))
        updates = [e for e in self.schedule if e.do is Do.UPDATE and e.lane in lanes]
        self.last_exchange = updates[-1] if updates else None
        last: dict[int, Optional[tuple[int, int]]] = dict.fromkeys(range(len(self.params)))
        for event in self.schedule:
            if event.do is Do.GATHER:
                last.update(dict.fromkeys(self._whole[event.chunk].reads, event.chunk))
        self.last_reads = {None: [], **{key: [] for key in self._whole}}
        for entry, key in last.items():
            self.last_reads[key].append(entry)

    def divided_rows(self, param: Tensor) -> Optional[slice]:
        """The rows of one of AdamW's parameters that this rank updates; None for all rows."""
        return adamw.divided_rows(param, self._settings.zero2_replicas)

    def _average(self, replicas: Replicas) -> None:
        """Adds events to the schedule that average gradients, bucket by bucket, before use."""
        from ..distributed.zero2 import buckets_of  # loaded only in ZeRO-2

        needed: dict[Event, int] = {}  # how many gradients each event needs
        for event in self.schedule:
            if event.do is Do.GATHER:
                for number in self._whole[event.chunk].reads:
                    if self.plan.entries[number].momentum_sharding is not None:
                        self.averaged.setdefault(self.params[number], (number, True))
            elif event.do is Do.ADAMW:
                # All of the group's parameters, since parts may differ between ranks.
                for param in self.taking_part[self.parts[event.number].group]:
                    if not dtensors.is_dtensor(param):
                        is_divided = self.divided_rows(param) is not None
                        self.averaged.setdefault(param, (None, is_divided))
            needed[event] = len(self.averaged)
        divided = [is_divided for _, is_divided in self.averaged.values()]
        self.bucket_plan = buckets_of(list(self.averaged), divided, len(replicas.ranks))
        counts = self.bucket_plan.prefix_counts
        needed = {event: counts[count] for event, count in needed.items()}
        self.schedule = tuple(with_averages(self.schedule, needed, counts[-1]))

    def _load(self, grads: Sequence[Optional[Tensor]]) -> None:
        """Lists the tensors that each event copies from host memory."""
        self.loads = {}
        for event in self.schedule:
            load: Optional[Load] = None
            if event.do is Do.GATHER:
                load = self._momentum_load(self.chunks[event.chunk], grads)
            elif event.do is Do.UPDATE:
                load = self._weights_load(self.chunks[event.chunk])
            elif event.do is Do.ADAMW:
                load = self.parts[event.number].load
            if load is not None and load.device is not None:
                self.loads[event] = load
        self.rings = self._offload.rings(self.loads.values())

    def _chunk(self, lane: Lane, number: int) -> BoundChunk:
        chunk = lane.chunks[number]
        param = self.params[lane.owners[0][0].entry]
        group = None
        if len(lane.peers) > 1:
            group = process_groups.process_group(param, lane.peers, self._settings.replicas)
        return BoundChunk(
            chunk,
            lane,
            group,
            self._spans(lane, chunk.momentum, is_scatter=False),
            self._spans(lane, chunk.weights, is_scatter=True),
            [(batch, len(batch.units)) for batch in chunk.batches],
            list(dict.fromkeys(unit.entry for unit, _ in lane.units[number])),
        )

    def _spans(self, lane: Lane, shares: Sequence[Share], is_scatter: bool) -> list[Span]:
        """The pieces of shares, span by span, in lists for one call each."""
        limit: float = math.inf
        if core.update_dtype(lane.wire, lane.opmath, lane.device) != lane.wire:
            nbytes = SPAN_BYTES.get(lane.device.type, DEFAULT_SPAN_BYTES)
            limit = nbytes / lane.opmath.itemsize
        spans: list[Span] = []
        joined: dict[tuple, Pieces] = {}  # of the last span, by what one call has in common
        for share in shares:
            if not (is_scatter or share.boxes):
                continue
            stop = share.start + len(share.units) * share.numel
            if not spans or (share.is_staged and stop - spans[-1].start > limit):
                spans.append(Span(share.start, stop, []))
                joined = {}
            if share.is_staged:
                spans[-1] = spans[-1]._replace(stop=stop)
            pieces = self._bind(share, share.start - spans[-1].start, is_scatter)
            dtype = self.plan.entries[share.units[0].entry].dtype
            key = share.is_staged, pieces.group, dtype, pieces.scale
            if key in joined:
                joined[key].join(pieces)
            else:
                joined[key] = pieces
                spans[-1].pieces.append(pieces)
        return spans

    def _bind(self, share: Share, start: int, is_scatter: bool) -> Pieces:
        entry, parts = self.plan.entries[share.units[0].entry], share.local_parts
        entries = [unit.entry for unit in share.units for _ in share.boxes]
        local = self.weights if is_scatter else self.momenta
        group = self._groups[entry.group]
        rounding: Optional[list[Tensor]] = None
        if is_scatter and group.updates_in_fp32(entry.dtype):
            rounding = [
                part.of(self._rounding.tensor(self.params[number], group))
                for number, part in zip(entries, parts)
            ]
        return Pieces(
            entry.group,
            entry.scale(share.units[0].block) if is_scatter else 1.0,
            share.is_staged,
            entries,
            [self.params[number] for number in entries],
            [part.of(local[number]) for number, part in zip(entries, parts)],
            list(
                map(self._part_of_weights if is_scatter else self._part_of_gradient, entries, parts)
            ),
            rounding,
            [Places(start, len(share.units), list(map(regions.shape_of, share.boxes)))],
            [self._moments(share)] if is_scatter and entry.second_moment else [],
        )

    def _part_of_gradient(self, number: int, part: LocalPart) -> Optional[LocalPart]:
        """Where a piece of the momentum lies in the gradient of its entry; None for all of it.

        If replicas divide the momentum, and this rank has rows 4 to 7, then row 5 has index 1 in
        the momentum. In ZeRO-2 it has index 1 in the gradient, too, since this rank gets only these
        rows of the mean gradient; otherwise it has index 5 there.
        """
        entry, rank = self.plan.entries[number], self.plan.rank
        rows = entry.momentum_region(rank)
        if entry.momentum_sharding is None or self._settings.zero2_replicas is not None:
            return _none_if_whole(part, rows)
        starts = tuple(at + first for at, (first, _) in zip(part.starts, rows))
        return _none_if_whole(part._replace(starts=starts), entry.region(rank))

    def _part_of_weights(self, number: int, part: LocalPart) -> Optional[LocalPart]:
        """Where a piece lies in the weights of its entry; None for all of them."""
        return _none_if_whole(part, self.plan.entries[number].region(self.plan.rank))

    def _moments(self, share: Share) -> Moments:
        unit, entry = share.units[0], self.plan.entries[share.units[0].entry]
        block, by_row = unit.block, entry.matrices.has_moment_of_rows(unit.block)
        axes = range(len(unit.shape))
        side = slice(block.row_axis, block.col_axis) if by_row else slice(block.col_axis, None)
        varies_along = {*axes[: block.row_axis], *axes[side]}
        return Moments(
            [unit.entry for unit in share.units],
            [self._second_moment(unit) for unit in share.units],
            share.moments_start,
            [size if axis in varies_along else 1 for axis, size in enumerate(unit.shape)],
            [
                tuple(slice(*box[axis]) if axis in varies_along else slice(None) for axis in axes)
                for box in share.boxes
            ],
        )

    def _second_moment(self, unit: Unit) -> Tensor:
        """V of a unit's matrices: a view (experts…, matrices of an expert…, numbers of each)."""
        entry, block = self.plan.entries[unit.entry], unit.block
        row_dim, counting = entry.matrices.row_dim, slice(entry.matrices.row_dim, block.row_axis)
        held = entry.region(self.plan.rank)[:row_dim]
        experts = regions.slices(regions.relative(unit.box[:row_dim], held))
        V = dtensors.local(self._state[self.params[unit.entry]]["second_momentum_buffer"])
        V = V[(*experts, slice(*entry.matrices.moments_interval(block)))]
        V = V.unflatten(-1, (*block.shape[counting], -1))
        return V[(..., *regions.slices(unit.box[counting]), slice(None))]

    # -- loads from host memory ----------------------------------------------------------------

    def _momentum_load(self, chunk: BoundChunk, grads: Sequence[Optional[Tensor]]) -> Load:
        """The load of a chunk's momentum event: momentum and gradients, list by list."""
        columns: list[list[Optional[Fetch]]] = []
        for pieces in (pieces for span in chunk.momentum for pieces in span.pieces):
            columns.append(self._fetches(pieces.entries, "momentum_buffer", pieces.tensors))
            columns.append([])
            for number, part in zip(pieces.entries, pieces.parts):
                grad, fetch = grads[number], None
                if number in self.on_host and grad is not None:  # a mean is on the device already
                    device = self.plan.entries[number].device
                    fetch = Fetch(grad if part is None else part.of(grad), device, written=False)
                columns[-1].append(fetch)
        return Load(columns)

    def _weights_load(self, chunk: BoundChunk) -> Load:
        """The load of a chunk's weights event: second moments, residuals, and weights, in the order
        in which `pipeline.update_weights` asks for them."""
        columns = []
        for pieces in (pieces for span in chunk.weights for pieces in span.pieces):
            for of in pieces.moments:
                columns.append(self._fetches(of.entries, "second_momentum_buffer", of.tensors))
            if pieces.rounding is not None:
                columns.append(self._fetches(pieces.entries, "weight_residual", pieces.rounding))
            columns.append(
                [
                    Fetch(weight, self.plan.entries[number].device)
                    if number in self.on_host
                    else None
                    for number, weight in zip(pieces.entries, pieces.tensors)
                ]
            )
        return Load(columns)

    def _fetches(
        self, entries: Iterable[int], key: str, tensors: Iterable[Tensor]
    ) -> list[Optional[Fetch]]:
        return [
            self._offload.fetch(self._state[self.params[number]].get(key), tensor)
            for number, tensor in zip(entries, tensors)
        ]


def _none_if_whole(part: LocalPart, held: Region) -> Optional[LocalPart]:
    """A part of a local tensor; None if it is the whole tensor, with the dimensions as axes."""
    sizes = regions.shape_of(held)
    dims = ((dim, size, 1) for dim, size in enumerate(sizes))
    is_whole = not any(part.starts) and len(part.axes) == len(sizes)
    return None if is_whole and all(map(eq, part.axes, dims)) else part


def _tensors_of(params: Iterable[Tensor], state: State) -> list[Tensor]:
    """Parameters and their state."""
    return [
        tensor
        for param in params
        for tensor in (param, *state[param].values())
        if isinstance(tensor, Tensor)
    ]
