"""What the chunks of one step share: parameters, gradients, state, and what they borrow of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .core import takes_part
from .cpu_offload import CPUOffload, Loan
from .distributed import layout
from .distributed import utils as dtensors
from .distributed.plan import Bundle, Chunk, Entry, Lane, Plan, Run, Unit
from .distributed.replicas import Replicas
from .distributed.zero2 import MeanGradients
from .options import Group, OptimizerWide
from .qk_clip.clip import Clipping
from .scratch import Scratch

State = Mapping[Tensor, Mapping[str, Tensor]]
Hyper = Group
Index = Optional[tuple[slice, ...]]


class Step:
    """What the chunks of one step share.

    Args:
        plan: what to do.
        groups: hyperparameters and parameters of each group.
        state: ``momentum_buffer`` and ``second_momentum_buffer`` of each parameter.
        wide: options that hold for all groups.
        offload: where the state lives.
        clipping: QK-Clip of this step, if there is any.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Hyper],
        state: State,
        wide: OptimizerWide,
        offload: CPUOffload,
        clipping: Optional[Clipping] = None,
    ):
        self.plan = plan
        self.groups = groups
        self.wide = wide
        self.offload = offload
        self.clipping = clipping
        self.params = [groups[entry.group]["params"][entry.index] for entry in plan.entries]
        self.state = [state[param] for param in self.params]
        self.weights = [dtensors.local(param) for param in self.params]
        self.hosted = [offload.hosts(param) for param in self.params]  # with their gradients
        self.grads: dict[int, Tensor] = {}
        self.unread = Counter(plan.reads)
        self.finite: dict[int, Tensor] = {}  # by id of a unit, (matrices,), with nonfinite="skip"
        self.scratch = Scratch()
        # Whether parameters or state may have changed, or gradients are gone.
        self.has_written = False
        self.means = None if wide.divided is None else _Means(self, wide.divided)

    def __enter__(self) -> Step:
        others: list[int] = []
        if self.offload.is_used:
            adamw = (group for group in self.groups if not group["use_muon"])
            others = [id(p) for group in adamw for p in group["params"] if takes_part(p, group)]
        try:
            self.carrier = self.offload.begin_step(self.plan, others, once=any(self.hosted))
            self.momenta = [self.offload.here(own["momentum_buffer"]) for own in self.state]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Sends back what was carried, also where an error has ended the step."""
        hosted = zip(self.plan.entries, self.hosted)
        self.offload.end_step({entry.device for entry, is_hosted in hosted if is_hosted})

    def release(self) -> None:
        """Lets go of the gradients that are left, and tells autograd what was written."""
        for entry, param in enumerate(self.params):
            if entry in self.plan.absent:
                continue
            self._release_grad(entry)
            if dtensors.is_dtensor(param):
                torch.autograd.graph.increment_version(param)

    def process_group(self, lane: Lane) -> Any:
        param = self.params[lane.owners[0][0].entry]
        return dtensors.process_group(param, lane.peers, self.wide.process_group)

    def entry(self, unit: Unit) -> Entry:
        return self.plan.entries[unit.entry]

    def hyper(self, unit: Unit) -> Hyper:
        return self.groups[self.entry(unit).group]

    def momentum_bytes(self) -> dict[int, int]:
        """Bytes of momentum that this rank holds of each chunk, by the chunk's id."""
        sizes = [momentum.dtype.itemsize for momentum in self.momenta]
        return {
            id(chunk): sum(
                bundle.numel * sizes[bundle.units[0].entry]
                for run in chunk.momentum
                for bundle in run
            )
            for lane in (*self.plan.lanes, *self.plan.alone)
            for chunk in lane.chunks
        }

    def average_gradients(self, chunk: Chunk) -> None:
        """Starts to, in ZeRO-2, for what a chunk needs; on all ranks alike."""
        if self.means is not None:
            self.means.launch(chunk)

    def grad(self, unit: Unit) -> Tensor:
        """The gradient of the unit's parameter where its momentum is; zeros where there is none."""
        number = unit.entry
        if number not in self.grads:
            self.grads[number] = self._grad(number)
        return self.grads[number]

    def _grad(self, number: int) -> Tensor:
        if self.means is not None and number in self.means.numbers:
            return self.means.rows(number)
        grad, entry = self.params[number].grad, self.plan.entries[number]
        grad = torch.zeros_like(self.weights[number]) if grad is None else dtensors.local(grad)
        if entry.momentum is not None:  # replicas divide the momentum, not the gradient
            grad = grad[layout.slices(entry.momentum_region(self.plan.rank))]
        return grad

    def was_read(self, units: Sequence[Unit]) -> None:
        """Lets a gradient go once all units of its parameter have been read."""
        for unit in units:
            self.unread[unit.entry] -= 1
            if not self.unread[unit.entry]:
                self._release_grad(unit.entry)

    def _release_grad(self, number: int) -> None:
        self.grads.pop(number, None)
        self.drop_grad(number)

    def drop_grad(self, number: int) -> None:
        """Lets a gradient go that has been read, where that is asked for.

        Not in capturable groups: the backward of a replayed graph writes where it was captured.
        """
        hyper = self.groups[self.plan.entries[number].group]
        if hyper["none_grad"] and not hyper["capturable"]:
            self.has_written = True
            self.params[number].grad = None

    def second_moment(self, unit: Unit) -> Tensor:
        """V of a unit's matrices, a view (experts…, matrices of each, long side)."""
        entry = self.entry(unit)
        row_dim = entry.matrices.row_dim
        start, stop = unit.box[row_dim]
        count = (stop - start) // unit.rows
        numbers = entry.matrices.second_moment_interval(start, unit.rows, count)
        held = entry.region(self.plan.rank)[:row_dim]
        experts = layout.slices(layout.relative(unit.box[:row_dim], held))
        V = self.offload.here(self.state[unit.entry]["second_momentum_buffer"])
        return V[(*experts, slice(*numbers))].unflatten(-1, (count, -1))

    def clip(self, unit: Unit, index: Index) -> Optional[Tensor]:
        """What the rows of a part of a unit's weights are multiplied with, if by anything."""
        if self.clipping is None:
            return None
        return self.clipping.scale(self.params[unit.entry], index)

    # -- what has to be carried to the device --------------------------------------------------

    def announce(
        self,
        purpose: str,
        of: Union[Run, Bundle, Unit],
        rows: Sequence[Sequence[Loan]],
        at_once: bool = False,
    ) -> None:
        """Announces loans for the rows of a run, bundle or unit; see `cpu_offload.Carrier`."""
        self.carrier.cut((purpose, id(of)), rows, at_once)
        self.carrier.announce((purpose, id(of)))

    def momentum_loans(self, unit: Unit, index: Index) -> list[Loan]:
        """Of a part of a unit's momentum, and its gradient; none where they are on the device."""
        part = part_of(self.momenta[unit.entry], index)
        loans = self.offload.loan(self.state[unit.entry]["momentum_buffer"], part)
        if self.hosted[unit.entry]:
            grad = part_of(self.grad(unit), index)
            loans.append(Loan(grad, self.entry(unit).device, False))
        return loans

    def second_moment_loans(self, unit: Unit) -> list[Loan]:
        """The same of `second_moment`."""
        held = self.state[unit.entry]["second_momentum_buffer"]
        return self.offload.loan(held, self.second_moment(unit))

    def weight_loans(self, unit: Unit, index: Index) -> list[Loan]:
        """The same of weights."""
        if not self.hosted[unit.entry]:
            return []
        weight = part_of(self.weights[unit.entry], index)
        return [Loan(weight, self.entry(unit).device, True)]

    def keep(self, unit: Unit, box: layout.Region) -> Optional[Tensor]:
        """Whether to update, for the elements of a part of a unit; broadcasts to them."""
        if id(unit) not in self.finite:
            return None
        row_dim = self.entry(unit).matrices.row_dim
        experts = layout.shape_of(unit.box[:row_dim])
        by_matrix = self.finite[id(unit)].view(*experts, -1, 1)
        rows = by_matrix.expand(*by_matrix.shape[:-1], unit.rows).flatten(-2)[
            (..., slice(*box[row_dim]))
        ]
        return rows.view(*rows.shape, *(1 for _ in box[row_dim + 1 :]))


class _Means:
    """Gradients of replicas, averaged over their ranks in the order in which chunks need them."""

    def __init__(self, step: Step, replicas: Replicas):
        self.numbers: dict[int, int] = {}  # of entries, in the order of the first chunk of each
        self._through: dict[int, int] = {}  # by id of a chunk, the last that it needs
        for lane in (*step.plan.lanes, *step.plan.alone):
            for chunk, units in zip(lane.chunks, lane.rounds):
                for unit, _ in units:
                    if step.entry(unit).momentum is not None:
                        self.numbers.setdefault(unit.entry, len(self.numbers))
                self._through[id(chunk)] = len(self.numbers) - 1
        entries = list(self.numbers)
        self._gradients = MeanGradients(
            [step.params[entry] for entry in entries],
            [True] * len(entries),
            replicas.group,
            on_read=lambda number: step.drop_grad(entries[number]),
            scratch=step.scratch,
        )

    def launch(self, chunk: Chunk) -> None:
        if self._through[id(chunk)] >= 0:
            self._gradients.launch_through(self._through[id(chunk)])

    def rows(self, entry: int) -> Tensor:
        return self._gradients.result(self.numbers[entry])


def part_of(tensor: Tensor, index: Index) -> Tensor:
    """The part of a local tensor that the slices take out; None takes it all."""
    return tensor if index is None else tensor[index]
