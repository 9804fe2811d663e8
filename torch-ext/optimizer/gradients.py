"""Where the gradients of Muon's parameters come from: as they are, or averaged over replicas."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .async_utils import Averages
from .distributed import layout
from .distributed import utils as dtensors
from .distributed.plan import Plan
from .distributed.replicas import Replicas
from .distributed.zero2 import MeanGradients
from .options import Group
from .scratch import Scratch


class Gradients:
    """Of each parameter the gradient of what this rank has the momentum of, in one step.

    Args:
        plan: whose entries the parameters are.
        params: in the order of the entries.
        groups: of the optimizer.

    Attributes:
        has_released: whether some gradients are gone.
    """

    def __init__(self, plan: Plan, params: Sequence[Tensor], groups: Sequence[Group]):
        self._plan = plan
        self._params = params
        self._groups = groups
        self._held: dict[int, Tensor] = {}
        self.has_released = False

    def of(self, number: int) -> Tensor:
        """The gradient of an entry; zeros where there is none."""
        grad = self._held.get(number)
        if grad is None:
            grad = self._held[number] = self._find(number)
        return grad

    def release(self, number: int) -> None:
        """Lets a gradient go that has been read, where that is asked for.

        Not in capturable groups: the backward of a replayed graph writes where it was captured.
        """
        self._held.pop(number, None)
        group = self._groups[self._plan.entries[number].group]
        if group.none_grad and not group.capturable:
            self.has_released = True
            self._params[number].grad = None

    def average(self) -> None:
        """Starts to average the next bucket, on all replicas alike."""
        raise RuntimeError("these gradients are not averaged")

    def _find(self, number: int) -> Tensor:
        param, entry = self._params[number], self._plan.entries[number]
        grad = param.grad
        grad = torch.zeros_like(dtensors.local(param)) if grad is None else dtensors.held(grad)
        if entry.momentum is not None:  # replicas divide the momentum, not the gradient
            grad = grad[layout.slices(entry.momentum_region(self._plan.rank))]
        return grad


class MeanOfReplicas(Gradients):
    """The same of plain parameters in ZeRO-2: rows of gradients averaged over the replicas.

    Args:
        replicas: that average.
        absent: numbers of entries that take no part.
        scratch: what buffers are taken from.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        groups: Sequence[Group],
        replicas: Replicas,
        absent: Collection[int],
        scratch: Scratch,
    ):
        super().__init__(plan, params, groups)
        numbers: dict[int, int] = {}  # of entries, in the order of the first chunk of each
        last: dict[tuple[int, int], int] = {}  # of a chunk, how many entries it needs
        for at, lane in enumerate(plan.all_lanes):
            for chunk, units in enumerate(lane.rounds):
                for unit, _ in units:
                    divided = plan.entries[unit.entry].momentum is not None
                    if divided and unit.entry not in absent:
                        numbers.setdefault(unit.entry, len(numbers))
                last[at, chunk] = len(numbers)
        entries = list(numbers)
        self._numbers, self._last, self._ranks = numbers, last, tuple(sorted(replicas.ranks))
        self._means = MeanGradients(
            [params[entry] for entry in entries],
            [True] * len(entries),
            replicas.group,
            on_read=lambda index: self.release(entries[index]),
            scratch=scratch,
        )

    def averages(self, others_needed: Sequence[int]) -> Averages:
        """What is averaged, in the order in which chunks need it.

        Args:
            others_needed: how many buckets of AdamW's gradients each part of AdamW waits for.
        """
        through = self._means.buckets_through
        needed = {chunk: through(count - 1) if count else 0 for chunk, count in self._last.items()}
        return Averages(self._ranks, self._means.buckets, needed, others_needed)

    def average(self) -> None:
        self._means.launch()

    def _find(self, number: int) -> Tensor:
        if number in self._numbers:
            return self._means.result(self._numbers[number])
        return super()._find(number)
