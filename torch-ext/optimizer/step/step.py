"""What the events of a step work on: tensors taken apart as its runs need them, and gradients.

`Work` is made once for a plan, and holds as long as the storages stand. `Step` is one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import adamw
from ..async_utils import Averages, Beside, Do, Event, schedule
from ..cpu_offload import Carrier, CPUOffload, Loan
from ..distributed import regions as layout
from ..distributed import utils as dtensors
from ..distributed.chunks import Chunk, Run
from ..distributed.plan import Lane, Plan, Unit
from ..distributed.transport import Transport
from ..parameters.options import Group, OptimizerWide
from ..qk_clip.clip import Clipping
from ..scratch import Scratch
from .gradients import Gradients
from .nonfinite import Finite

State = Mapping[Tensor, MutableMapping[str, Tensor]]
Index = Optional[tuple[slice, ...]]

# What windows of host memory are announced for.
NONFINITE, MOMENTUM = "nonfinite", "momentum"
SECOND_MOMENT, WEIGHTS = "second moment", "weights"


class Parts(NamedTuple):
    """This rank's parts of the units of a run, in the order of its bundles; empty ones left out.

    Args:
        units: whose they are.
        boxes: which part of the unit, in coordinates of its box.
        indices: slices that take the part out of the local tensor; None takes it all.
        tensors: the parts themselves, of momentum or of weights.
    """

    units: list[Unit]
    boxes: list[layout.Region]
    indices: list[Index]
    tensors: list[Tensor]


class Work:
    """The tensors of a plan's parameters and of their state, taken apart as its runs need them.

    ``params`` and ``state`` are in the order of the plan's entries.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        state: Sequence[Mapping[str, Tensor]],
        wide: OptimizerWide,
        offload: CPUOffload,
    ):
        self.plan = plan
        self.params = params
        self.state = state
        self.sharded = [number for number, p in enumerate(params) if dtensors.is_dtensor(p)]
        self.weights = [dtensors.local(param) for param in params]
        self.momenta = [offload.here(own["momentum_buffer"]) for own in state]
        self._addresses = _addresses(self.weights) + _addresses(self.momenta)
        self.process_groups: list[Any] = [
            dtensors.process_group(params[lane.owners[0][0].entry], lane.peers, wide.process_group)
            for lane in plan.lanes
        ]
        self.process_groups += [None] * len(plan.alone)
        self.schedule: tuple[Event, ...] = ()
        self.last_reads: dict[Optional[int], list[int]] = {}
        self._beside: Optional[Beside] = None
        self._parts: dict[int, Parts] = {}  # by id of a run

    def holds(self, params: Sequence[Tensor], state: Sequence[Mapping[str, Tensor]]) -> bool:
        """Whether all storages are still the same."""
        momenta = [own["momentum_buffer"] for own in state]
        return _addresses(params) + _addresses(momenta) == self._addresses

    def order(self, beside: Beside) -> None:
        """Makes the schedule, where it is not still the same."""
        if beside == self._beside:
            return
        self._beside, self.schedule = beside, schedule(self.plan, beside)
        # Of each entry the run, by its id, behind which nobody reads the gradient.
        last: dict[int, Optional[int]] = dict.fromkeys(range(len(self.params)))
        for event in self.schedule:
            if event.do is Do.GATHER:
                for run in self.chunk(event)[0].momentum:
                    last.update((unit.entry, id(run)) for bundle in run for unit in bundle.units)
        self.last_reads = {}
        for number, run_id in last.items():
            self.last_reads.setdefault(run_id, []).append(number)

    def chunk(self, event: Event) -> tuple[Chunk, Lane]:
        lane = self.plan.all_lanes[event.lane]
        return lane.chunks[event.number], lane

    def parts(self, run: Run, tensors: Sequence[Tensor]) -> Parts:
        """The parts of a run, taken out of `momenta` or `weights`."""
        parts = self._parts.get(id(run))
        if parts is None:
            filled = [bundle for bundle in run if bundle.numel]
            units = [unit for bundle in filled for unit in bundle.units]
            indices = [index for bundle in filled for index in bundle.indices]
            parts = self._parts[id(run)] = Parts(
                units,
                [bundle.box for bundle in filled for _ in bundle.units],
                indices,
                [part_of(tensors[u.entry], index) for u, index in zip(units, indices)],
            )
        return parts


class Step:
    """One step of a plan.

    Args:
        plan, groups, state, wide, offload, clipping: what the step works on.
        absent: numbers of the plan's entries that take no part, for lack of a gradient. Those that
            ranks share are in no lane; those that are whole on this rank are passed over.
        work: of the last step, unless there was state in host memory.

    Attributes:
        home: where state lives: on the device, or in host memory, from which it is carried.
        gradients: as they are, or averaged over replicas.
        under_way: how each chunk travels that is under way, by the numbers of its lane and its own.
        finite: which matrices are updated, of those that may be skipped.
        has_written: whether parameters or state may have changed.
    """

    work: Work
    home: Carrier
    adamw: adamw.Updates

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Group],
        absent: Collection[int],
        state: State,
        wide: OptimizerWide,
        offload: CPUOffload,
        clipping: Optional[Clipping],
        work: Optional[Work],
    ):
        self.plan = plan
        self.groups = groups
        self.wide = wide
        self.clipping = clipping
        self.scratch = Scratch()
        self.finite = Finite(plan)
        self.under_way: dict[tuple[int, int], Transport] = {}
        self.has_written = False
        self._params = [groups[entry.group].params[entry.index] for entry in plan.entries]
        self._absent = absent
        self._state = state
        self._offload = offload
        self.gradients = Gradients(plan, self._params, groups, absent, wide.divided, self.scratch)
        self._last_work = work if work is not None and work.plan is plan else None
        self._hosted: set[int] = set()  # entries that are in host memory, but not their use
        if self._last_work is None:
            self._hosted = {n for n, param in enumerate(self._params) if offload.hosts(param)}

    def __enter__(self) -> Step:
        others: list[int] = []
        if self._offload.is_used:
            of_adamw = (group for group in self.groups if not group.use_muon)
            others = [id(p) for group in of_adamw for p in group.params if group.takes_part(p)]
        try:
            use = (self._absent, others)
            self.home = self._offload.begin_step(self.plan, use, once=bool(self._hosted))
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Sends back what was carried, also where an error has ended the step."""
        self._offload.end_step({self.plan.entries[number].device for number in self._hosted})

    def _prepare(self) -> None:
        state, work = [self._state[param] for param in self._params], self._last_work
        if work is None or not work.holds(self._params, state):
            work = Work(self.plan, self._params, state, self.wide, self._offload)
        self.work, divided, averages = work, self.wide.divided, None
        self.adamw = adamw.Updates(self.groups, self._state, divided, self._offload, self.home)
        if divided is not None:
            averages = Averages(
                tuple(sorted(divided.ranks)),
                len(self.gradients.means.plan.buckets),
                self.gradients.buckets_needed(),
                self.adamw.buckets_needed(),
            )
        lanes = enumerate(self.plan.all_lanes)
        beside = Beside(
            parts=self.adamw.parts,
            chunk_bytes=None if self.home.is_idle else self._momentum_bytes(),
            averages=averages,
            flagged=[n for n, lane in lanes if any(self.may_skip(unit) for unit, _ in lane.owners)],
        )
        work.order(beside)
        if not self.home.is_prepared:
            for event in work.schedule:
                self._announce(event)

    def end(self) -> None:
        """Completes what is under way, and tells autograd what was written."""
        self.were_read(None)
        numbers = [number for number in self.work.sharded if number not in self._absent]
        torch.autograd.graph.increment_version([self._params[number] for number in numbers])
        self.adamw.wait()
        if self.clipping is not None:
            self.clipping.finish(self.groups)

    # -- what events work on -------------------------------------------------------------------

    def hyper(self, unit: Unit) -> Group:
        return self.groups[self.plan.entries[unit.entry].group]

    def momentum(self, run: Run) -> Parts:
        """Parts of the momentum of a run, of units that take part."""
        return self._present(self.work.parts(run, self.work.momenta))

    def weights(self, run: Run) -> Parts:
        """Parts of the weights of a run, of units that take part."""
        return self._present(self.work.parts(run, self.work.weights))

    def _present(self, parts: Parts) -> Parts:
        present = self.present(parts.units)
        if present is None:
            return parts
        chosen: Any = (list(itertools.compress(column, present)) for column in parts)
        return Parts(*chosen)

    def views(self, flat: Tensor, run: Run) -> list[Tensor]:
        """What a flat tensor, which begins where a run does, has for the same parts."""
        views: list[Tensor] = []
        for bundle in run:
            if bundle.numel:
                place = bundle.start - run[0].start
                views += flat[place : place + bundle.numel].view(bundle.shape).unbind(0)
        present = self.present(unit for bundle in run if bundle.numel for unit in bundle.units)
        return views if present is None else list(itertools.compress(views, present))

    def present(self, units: Iterable[Unit]) -> Optional[list[bool]]:
        """Which of the units take part; None where all do."""
        if not self._absent:
            return None
        present = [unit.entry not in self._absent for unit in units]
        return None if all(present) else present

    def grads(self, parts: Parts) -> list[Tensor]:
        """The gradients of parts of the momentum."""
        pairs = zip(parts.units, parts.indices)
        return [part_of(self.gradients.of(unit.entry), index) for unit, index in pairs]

    def were_read(self, run: Optional[Run]) -> None:
        """Lets the gradients go that no other run reads; of None, those of which none reads any."""
        for number in self.work.last_reads.get(None if run is None else id(run), ()):
            if number not in self._absent:
                self.gradients.release(number)

    def keep(self, parts: Parts) -> Optional[list[Tensor]]:
        """Where to update the parts of a run; None where that is everywhere."""
        if not parts.units or not self.may_skip(parts.units[0]):
            return None
        return [self.finite.keep(unit, box) for unit, box in zip(parts.units, parts.boxes)]

    def clip(self, parts: Parts) -> Optional[list[Optional[Tensor]]]:
        """What QK-Clip multiplies the rows of the parts with, if it does."""
        if self.clipping is None:
            return None
        pairs = zip(parts.units, parts.indices)
        return [self.clipping.scale(self._params[unit.entry], index) for unit, index in pairs]

    def second_moment(self, unit: Unit) -> Tensor:
        """V of a unit's matrices, a view (experts…, matrices of each, long side)."""
        entry = self.plan.entries[unit.entry]
        row_dim = entry.matrices.row_dim
        start, stop = unit.box[row_dim]
        count = (stop - start) // unit.rows
        numbers = entry.matrices.second_moment_interval(start, unit.rows, count)
        held = entry.region(self.plan.rank)[:row_dim]
        experts = layout.slices(layout.relative(unit.box[:row_dim], held))
        V = self._offload.here(self.work.state[unit.entry]["second_momentum_buffer"])
        return V[(*experts, slice(*numbers))].unflatten(-1, (count, -1))

    def may_skip(self, unit: Unit) -> bool:
        """Whether matrices with Inf or NaN are left as they are."""
        return self.hyper(unit).nonfinite == "skip"

    def may_overflow(self, unit: Unit) -> bool:
        """Whether finite gradients may sum up to Inf; other formats reach as far as 1e38."""
        return self.work.momenta[unit.entry].dtype == torch.float16

    # -- what has to be carried to the device --------------------------------------------------

    def _momentum_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes of momentum that this rank holds of each chunk."""
        momenta = self.work.momenta
        return {
            (number, at): sum(
                bundle.numel * momenta[bundle.units[0].entry].itemsize
                for run in chunk.momentum
                for bundle in run
            )
            for number, lane in enumerate(self.plan.all_lanes)
            for at, chunk in enumerate(lane.chunks)
        }

    def _announce(self, event: Event) -> None:
        """Announces what an event is going to borrow of the host's memory, in the order of use."""
        if event.do is Do.ADAMW:
            self.adamw.announce(event.number)
        elif event.do is Do.GATHER:
            for run in self.work.chunk(event)[0].momentum:
                self._carry((MOMENTUM, id(run)), self._momentum_loans(self.momentum(run)))
        elif event.do is Do.UPDATE:
            for run in self.work.chunk(event)[0].weights:
                for bundle in run:
                    if self.hyper(bundle.units[0]).beta2 is not None:
                        units = (unit for unit in bundle.units if unit.entry not in self._absent)
                        moments = [self._second_moment_loans(unit) for unit in units]
                        self._carry((SECOND_MOMENT, id(bundle)), moments, at_once=True)
                self._carry((WEIGHTS, id(run)), self._weight_loans(self.weights(run)))
        elif event.do is Do.FLAG:
            lane = self.plan.all_lanes[event.lane]
            for run in (run for chunk in lane.chunks for run in chunk.momentum):
                parts = self.momentum(run)
                first = parts.units[0] if parts.units else None
                if first is not None and self.may_skip(first) and self.may_overflow(first):
                    unchanged = self._momentum_loans(parts, written=False)
                    self._carry((NONFINITE, id(run)), unchanged, at_once=True)

    def _carry(self, key: tuple, rows: Sequence[Sequence[Loan]], at_once: bool = False) -> None:
        self.home.cut(key, rows, at_once)
        self.home.announce(key)

    def _momentum_loans(self, parts: Parts, written: bool = True) -> list[list[Loan]]:
        """Of parts of the momentum, and of gradients in host memory; none of what is not there."""
        rows = []
        for unit, index, part in zip(parts.units, parts.indices, parts.tensors):
            held = self.work.state[unit.entry]["momentum_buffer"]
            loans = [loan._replace(written=written) for loan in self._offload.loan(held, part)]
            if unit.entry in self._hosted:
                grad = part_of(self.gradients.of(unit.entry), index)
                loans.append(Loan(grad, self.plan.entries[unit.entry].device, False))
            rows.append(loans)
        return rows

    def _second_moment_loans(self, unit: Unit) -> list[Loan]:
        held = self.work.state[unit.entry]["second_momentum_buffer"]
        return self._offload.loan(held, self.second_moment(unit))

    def _weight_loans(self, parts: Parts) -> list[list[Loan]]:
        """Of weights in host memory."""
        return [
            [Loan(part, self.plan.entries[unit.entry].device, True)]
            if unit.entry in self._hosted
            else []
            for unit, part in zip(parts.units, parts.tensors)
        ]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [dtensors.held(tensor).data_ptr() for tensor in tensors]


def part_of(tensor: Tensor, index: Index) -> Tensor:
    """The part of a local tensor that the slices take out; None takes it all."""
    return tensor if index is None else tensor[index]
