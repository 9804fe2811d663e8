"""Holds what a step's events work on: parts of parameters and state, gradients, prefetching.

`Prepared` is made once for a plan, and is valid as long as parameters and momentum keep their
storages. `Step` is one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import adamw, triton_kernels
from ..async_utils import Averaging, Do, Event, ScheduleInputs, schedule
from ..cpu_offload import CPUOffload, Fetch, Prefetcher
from ..distributed import regions
from ..distributed import utils as dtensors
from ..distributed.chunks import Chunk, Span
from ..distributed.plan import Lane, Plan, Unit
from ..distributed.transport import Transport
from ..matrices import LocalPart
from ..parameters.options import Group, Settings
from ..scratch import Scratch
from ..state.rounding import Rounding
from ..weight_rounding import RandomBits, RoundedBy, as_int16
from .gradients import Gradients

if TYPE_CHECKING:
    from ..extras.audit import Audit
    from ..qk_clip.clip import Clipping

OptimizerState = Mapping[Tensor, MutableMapping[str, Tensor]]  # by parameter

# What the prefetcher's windows are for: the first item of their keys.
MOMENTUM, SECOND_MOMENT, WEIGHTS = "momentum", "second moment", "weights"


class SpanParts(NamedTuple):
    """This rank's parts of the units of a span, in the order of its bundles, without empty parts.

    Args:
        units: one for each part.
        local_parts: where they lie in the local tensor.
        tensors: the parts themselves, of momentum or of weights.
    """

    units: list[Unit]
    local_parts: list[LocalPart]
    tensors: list[Tensor]


class Prepared:
    """What the steps of one plan share: parts of parameters and state by span, and the schedule.

    ``params`` and ``state`` are in the order of the plan's entries. ``last_exchange`` is the event
    that waits for the last updates from other ranks, None without traffic.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        state: Sequence[Mapping[str, Tensor]],
        settings: Settings,
        offload: CPUOffload,
    ):
        self.plan = plan
        self.params = params
        self.state = state
        self.sharded = [number for number, p in enumerate(params) if dtensors.is_dtensor(p)]
        # Of a weight without memory, which takes no part, there are views all the same.
        self.weights = [
            dtensors.local(param).to("meta")
            if dtensors.lacks_memory(param)
            else dtensors.local(param)
            for param in params
        ]
        self.momenta = [dtensors.local(param_state["momentum_buffer"]) for param_state in state]
        # Numbers of entries whose weights are in host memory, but are updated on a device.
        self.on_host = {n for n, param in enumerate(params) if offload.is_on_host(param)}
        self._addresses = _addresses(self.weights) + _addresses(self.momenta)

        def process_group_of(lane: Lane) -> Any:
            param = params[lane.owners[0][0].entry]
            return dtensors.process_group(param, lane.peers, settings.process_group)

        self.process_groups = [process_group_of(lane) for lane in plan.lanes]
        self.process_groups += [None] * len(plan.local_lanes)
        self.schedule: tuple[Event, ...] = ()
        self.last_exchange: Optional[Event] = None
        self.last_reads: dict[Optional[int], list[int]] = {}
        self._schedule_inputs: Optional[ScheduleInputs] = None
        # Caches, by id of a span; `_joined` by id of a chunk's sequence of spans.
        self._parts: dict[int, SpanParts] = {}
        self._places: dict[int, list[tuple[torch.Size, tuple[int, ...], int]]] = {}
        self._joined: dict[int, list[tuple[Span, Sequence[Span]]]] = {}

    def holds(self, params: Sequence[Tensor], state: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether all storages are still those that the parts were taken from."""
        momenta = [param_state["momentum_buffer"] for param_state in state]
        return _addresses(params) + _addresses(momenta) == self._addresses

    def order(self, inputs: ScheduleInputs) -> None:
        """Makes the schedule, unless its inputs are those of the last step."""
        if inputs == self._schedule_inputs:
            return
        self._schedule_inputs, self.schedule = inputs, schedule(self.plan, inputs)
        lanes = range(len(self.plan.lanes))
        updates = [e for e in self.schedule if e.do is Do.UPDATE and e.lane in lanes]
        self.last_exchange = updates[-1] if updates else None
        # By number of an entry, the id of the last span that reads its gradient.
        last: dict[int, Optional[int]] = dict.fromkeys(range(len(self.params)))
        for event in self.schedule:
            if event.do is Do.GATHER:
                for span in self.chunk(event)[0].momentum:
                    last.update((unit.entry, id(span)) for bundle in span for unit in bundle.units)
        self.last_reads = {}
        for number, span_id in last.items():
            self.last_reads.setdefault(span_id, []).append(number)

    def chunk(self, event: Event) -> tuple[Chunk, Lane]:
        lane = self.plan.all_lanes[event.lane]
        return lane.chunks[event.number], lane

    def parts(self, span: Span, tensors: Sequence[Tensor]) -> SpanParts:
        """The parts of a span, taken out of `momenta` or `weights`.

        A span belongs to only one of the two, so its id alone is the key.
        """
        parts = self._parts.get(id(span))
        if parts is None:
            filled = [bundle for bundle in span if bundle.numel]
            units = [u for bundle in filled for u in bundle.units for _ in bundle.boxes]
            local_parts = [part for bundle in filled for part in bundle.local_parts]
            parts = self._parts[id(span)] = SpanParts(
                units,
                local_parts,
                [part.of(tensors[u.entry]) for u, part in zip(units, local_parts)],
            )
        return parts

    def places(self, span: Span) -> list[tuple[torch.Size, tuple[int, ...], int]]:
        """Sizes, strides and offset of each part in a flat tensor that begins where a span does."""
        places = self._places.get(id(span))
        if places is None:
            filled = [bundle for bundle in span if bundle.numel]
            numel = max((bundle.start + bundle.numel for bundle in filled), default=0)
            flat = torch.empty(numel, device="meta")
            places = self._places[id(span)] = [
                (view.shape, view.stride(), int(view.storage_offset()) - span[0].start)
                for bundle in filled
                for view in bundle.views(flat[bundle.start : bundle.start + bundle.numel])
            ]
        return places

    def joined(self, spans: Sequence[Span], is_scatter: bool) -> list[tuple[Span, Sequence[Span]]]:
        """The spans of a chunk, joined where they are updated alike; each with those it joins."""
        joined = self._joined.get(id(spans))
        if joined is None:
            alike: dict[tuple, list[Span]] = {}
            for span in spans:
                unit = span[0].units[0]
                entry = self.plan.entries[unit.entry]
                scale = entry.scale(unit.block) if is_scatter else None
                key = span[0].is_staged, entry.group, entry.dtype, scale
                alike.setdefault(key, []).append(span)
            chain = itertools.chain.from_iterable
            joined = [(tuple(chain(members)), members) for members in alike.values()]
            self._joined[id(spans)] = joined
        return joined


class Step:
    """One step of a plan.

    Args:
        plan, groups, state, settings, offload, rounding, clipping: what the step works on.
        absent: numbers of the plan's entries that take no part, for lack of a gradient. Lanes with
            traffic have none of them; in local lanes the step passes over them.
        prepared: of the last step.
        audit: records what the step does; None without an audit.
        only_creates: whether the step only creates state, and does not count as one of AdamW.

    Attributes:
        prefetcher: brings state from host memory, window by window; idle if there is none.
        params: in the order of the plan's entries.
        gradients: as they are, or averaged over replicas.
        transports: of the chunks in flight, by `Event.chunk`.
        has_written: whether parameters or state may have changed.
        has_exchanged: whether the last updates from other ranks have come.
    """

    prepared: Prepared
    prefetcher: Prefetcher
    adamw: adamw.AdamWStep

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Group],
        absent: Collection[int],
        state: OptimizerState,
        settings: Settings,
        offload: CPUOffload,
        rounding: Rounding,
        clipping: Optional[Clipping],
        prepared: Optional[Prepared],
        audit: Optional[Audit],
        only_creates: bool = False,
    ):
        self.plan = plan
        self.groups = groups
        self.settings = settings
        self.clipping = clipping
        self._rounding = rounding
        self.audit = audit
        self.scratch = Scratch()
        self.transports: dict[tuple[int, int], Transport] = {}
        self.has_written = self.has_exchanged = False
        self.params = [groups[entry.group].params[entry.index] for entry in plan.entries]
        self._absent = absent
        self._only_creates = only_creates
        self._state = state
        self._offload = offload
        self.gradients = Gradients(
            plan, self.params, groups, absent, settings.divided, self.scratch
        )
        self._last_prepared = prepared if prepared is not None and prepared.plan is plan else None

    def __enter__(self) -> Step:
        state, prepared = [self._state[param] for param in self.params], self._last_prepared
        if prepared is None or not prepared.holds(self.params, state):
            prepared = Prepared(self.plan, self.params, state, self.settings, self._offload)
        self.prepared = prepared
        adamw_ids: list[int] = []  # of the parameters that take part
        if self._offload.has_state:
            groups = (group for group in self.groups if not group.use_muon)
            adamw_ids = [id(p) for group in groups for p in group.params if group.takes_part(p)]
        participants, once = (self._absent, adamw_ids), bool(prepared.on_host)
        self.prefetcher = self._offload.begin_step(self.plan, participants, once=once)
        self._order()
        if self.audit is not None:
            self.audit.begin(self, self._absent)
        return self

    def __exit__(self, *error: object) -> None:
        """Makes the host wait for weights in host memory, also where an error ended the step."""
        on_host = self.prepared.on_host
        self._offload.end_step({self.plan.entries[number].device for number in on_host})

    def _order(self) -> None:
        """Orders the events, and enqueues what has to be prefetched for them."""
        divided, averaging = self.settings.divided, None
        self.adamw = adamw.AdamWStep(
            *(self.groups, self._state, divided, self._offload, self._rounding, self.clipping),
            self.prefetcher,
            not self._only_creates,
        )
        if divided is not None:
            averaging = Averaging(
                tuple(sorted(divided.ranks)),
                len(self.gradients.means.bucket_plan.buckets),
                self.gradients.buckets_needed(),
                self.adamw.buckets_needed(),
            )
        inputs = ScheduleInputs(
            adamw_parts=self.adamw.parts,
            prefetch_bytes=None if self.prefetcher.is_idle else self._momentum_bytes(),
            averaging=averaging,
        )
        self.prepared.order(inputs)
        if not self.prefetcher.is_enqueued:
            for event in self.prepared.schedule:
                self._enqueue(event)

    def end(self) -> None:
        """Completes what is in flight, and tells autograd what was written."""
        self.release_gradients(None)
        numbers = [number for number in self.prepared.sharded if number not in self._absent]
        torch.autograd.graph.increment_version([self.params[number] for number in numbers])
        self.adamw.wait()
        if self.clipping is not None:
            self.clipping.finish()
        if self.audit is not None:
            self.audit.end()

    # -- what events work on -------------------------------------------------------------------

    def takes_part(self, number: int) -> bool:
        """Whether an entry takes part, by its number."""
        return number not in self._absent

    def group(self, unit: Unit) -> Group:
        return self.groups[self.plan.entries[unit.entry].group]

    def momentum(self, span: Span) -> SpanParts:
        """Parts of the momentum of a span, of units that take part."""
        return self._without_absent(self.prepared.parts(span, self.prepared.momenta))

    def weights(self, span: Span) -> SpanParts:
        """Parts of the weights of a span, of units that take part."""
        return self._without_absent(self.prepared.parts(span, self.prepared.weights))

    def _without_absent(self, parts: SpanParts) -> SpanParts:
        """The parts of units that take part."""
        present = self.present(parts.units)
        if present is None:
            return parts
        chosen: Any = (list(itertools.compress(column, present)) for column in parts)
        return SpanParts(*chosen)

    def uses_lists(self, lane: Lane) -> bool:
        """Whether all spans of a chunk may be updated at once, as kernels take any list of tensors.

        Torch's functions need a copy of a span in opmath, and what comes from host memory comes
        span by span: then each span is updated by itself.
        """
        return triton_kernels.is_used_on(lane.device.type) and self.prefetcher.is_idle

    def together(
        self, spans: Sequence[Span], lane: Lane, is_scatter: bool = False
    ) -> Sequence[tuple[Span, Sequence[Span]]]:
        """Pairs: a span that one call updates, and the spans of the chunk that are joined in it."""
        if self.uses_lists(lane):
            return self.prepared.joined(spans, is_scatter)
        return [(span, (span,)) for span in spans]

    def views(self, flat: Tensor, span: Span) -> list[Tensor]:
        """Views of a flat tensor, which begins where a span does, one for each part of the span."""
        start = flat.storage_offset()
        views = [
            flat.as_strided(size, stride, start + offset)
            for size, stride, offset in self.prepared.places(span)
        ]
        present = self.present(u for bundle in span for u in bundle.units for _ in bundle.boxes)
        return views if present is None else list(itertools.compress(views, present))

    def present(self, units: Iterable[Unit]) -> Optional[list[bool]]:
        """Which of the units take part; None where all do."""
        if not self._absent:
            return None
        present = [unit.entry not in self._absent for unit in units]
        return None if all(present) else present

    def grads(self, parts: SpanParts) -> list[Tensor]:
        """The gradients of parts of the momentum."""
        pairs = zip(parts.units, parts.local_parts)
        return [part.of(self.gradients.of(unit.entry)) for unit, part in pairs]

    def release_gradients(self, span: Optional[Span]) -> None:
        """Releases the gradients that this span reads last; for None, those that no span reads."""
        for number in self.prepared.last_reads.get(None if span is None else id(span), ()):
            if number not in self._absent:
                self.gradients.release(number)

    def clip(self, parts: SpanParts) -> Optional[list[Optional[Tensor]]]:
        """Factors of QK-Clip on each part, None for parts that it leaves; None without QK-Clip."""
        if self.clipping is None:
            return None
        scales = [self.clipping.scale(self.params[unit.entry]) for unit in parts.units]
        shapes = (self.prepared.weights[unit.entry].shape for unit in parts.units)
        return [
            None if scale is None else part.of(scale.expand(shape))
            for scale, shape, part in zip(scales, shapes, parts.local_parts)
        ]

    def rounded_by(self, parts: SpanParts) -> Optional[list[RoundedBy]]:
        """What rounds each part of the weights; None unless they are updated in fp32."""
        if not parts.units:
            return None
        entry = self.plan.entries[parts.units[0].entry]
        if not self.groups[entry.group].updates_in_fp32(entry.dtype):
            return None
        rounded_by: list[RoundedBy] = []
        for unit, part in zip(parts.units, parts.local_parts):
            by = self._rounding.of(self.params[unit.entry], self.groups[entry.group])
            if isinstance(by, RandomBits):
                rounded_by.append(by._replace(places=part.of(by.places)))
            else:
                rounded_by.append(part.of(by))
        return rounded_by

    def has_moment_of_rows(self, unit: Unit) -> bool:
        """Whether V, the second moment, of a unit's matrices has a number for each row, not for
        each column."""
        return self.plan.entries[unit.entry].matrices.has_moment_of_rows(unit.block)

    def second_moment(self, unit: Unit) -> Tensor:
        """V of a unit's matrices: a view (experts…, matrices of each expert…, numbers of each)."""
        entry, block = self.plan.entries[unit.entry], unit.block
        row_dim, counting = entry.matrices.row_dim, slice(entry.matrices.row_dim, block.row_axis)
        held = entry.region(self.plan.rank)[:row_dim]
        experts = regions.slices(regions.relative(unit.box[:row_dim], held))
        V = dtensors.local(self.prepared.state[unit.entry]["second_momentum_buffer"])
        V = V[(*experts, slice(*entry.matrices.moments_interval(block)))]
        V = V.unflatten(-1, (*block.shape[counting], -1))
        return V[(..., *regions.slices(unit.box[counting]), slice(None))]

    # -- what has to be prefetched -------------------------------------------------------------

    def _momentum_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes of momentum that this rank holds of each chunk."""
        momenta = self.prepared.momenta
        return {
            (number, at): sum(
                bundle.numel * momenta[bundle.units[0].entry].itemsize
                for span in chunk.momentum
                for bundle in span
            )
            for number, lane in enumerate(self.plan.all_lanes)
            for at, chunk in enumerate(lane.chunks)
        }

    def _enqueue(self, event: Event) -> None:
        """Enqueues the windows that an event is going to use, in the order of their use."""
        if event.do is Do.ADAMW:
            self.adamw.enqueue(event.number)
        elif event.do is Do.GATHER:
            for span in self.prepared.chunk(event)[0].momentum:
                self._prefetch((MOMENTUM, id(span)), self._momentum_fetches(self.momentum(span)))
        elif event.do is Do.UPDATE:
            for span in self.prepared.chunk(event)[0].weights:
                for bundle in span:
                    if self.group(bundle.units[0]).beta2 is not None:
                        units = (unit for unit in bundle.units if unit.entry not in self._absent)
                        moments = [self._second_moment_fetches(unit) for unit in units]
                        self._prefetch((SECOND_MOMENT, id(bundle)), moments, single=True)
                self._prefetch((WEIGHTS, id(span)), self._weight_fetches(self.weights(span)))

    def _prefetch(self, key: tuple, rows: Sequence[Sequence[Fetch]], single: bool = False) -> None:
        self.prefetcher.add_windows(key, rows, single)
        self.prefetcher.enqueue(key)

    def _momentum_fetches(self, parts: SpanParts) -> list[list[Fetch]]:
        """Fetches of each part of the momentum and its gradient that are in host memory."""
        rows = []
        for unit, local_part, tensor in zip(parts.units, parts.local_parts, parts.tensors):
            buffer = self.prepared.state[unit.entry]["momentum_buffer"]
            fetches = self._offload.fetches(buffer, tensor)
            if unit.entry in self.prepared.on_host:
                grad = local_part.of(self.gradients.of(unit.entry))
                fetches.append(Fetch(grad, self.plan.entries[unit.entry].device, False))
            rows.append(fetches)
        return rows

    def _second_moment_fetches(self, unit: Unit) -> list[Fetch]:
        buffer = self.prepared.state[unit.entry]["second_momentum_buffer"]
        return self._offload.fetches(buffer, self.second_moment(unit))

    def _weight_fetches(self, parts: SpanParts) -> list[list[Fetch]]:
        """Fetches of each part of the weights and its residual that are in host memory."""
        rows = []
        for unit, local_part, tensor in zip(parts.units, parts.local_parts, parts.tensors):
            fetches, entry = list[Fetch](), self.plan.entries[unit.entry]
            residual = self._state[self.params[unit.entry]].get("weight_residual")
            if residual is not None and self.groups[entry.group].weight_rounding == "exact":
                part = local_part.of(as_int16(dtensors.local(residual)))
                fetches += self._offload.fetches(residual, part)
            if unit.entry in self.prepared.on_host:
                fetches.append(Fetch(tensor, entry.device, True))
            rows.append(fetches)
        return rows


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [dtensors.raw_local(tensor).data_ptr() for tensor in tensors]
