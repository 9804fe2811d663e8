"""One step: what its events ask for beside the lists that are bound to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from .. import adamw, core
from ..async_utils import Averaging, Event
from ..cpu_offload import CPUOffload
from ..distributed import dtensors
from ..distributed.exchange import Exchange
from ..distributed.plan import Lane, Plan
from ..parameters.options import Group, Settings
from ..scratch import Scratch
from ..state.rounding import Rounding
from ..weight_rounding import RoundedBy
from .binding import Bound, Pieces, State

if TYPE_CHECKING:
    from ..distributed.zero2 import MeanGradients
    from ..extras.audit import Audit
    from ..qk_clip.clip import Clipping

Bring = Callable[[Sequence[Tensor]], list[Tensor]]


class Step:
    """One step of a plan; a context that ends with all that it has begun.

    Args:
        plan, groups, state, settings, offload, rounding, clipping: what the step works on.
        absent: numbers of the plan's entries that take no part, for lack of a gradient.
        bound: of the last step.
        audit: records what the step does; None without an audit.
        only_creates: whether the step only creates state, and does not count as one of AdamW.

    Attributes:
        params: Muon's, in the order of the plan's entries.
        exchanges: of the chunks in flight, by `Event.chunk`.
        means: averages gradients of Muon's; in ZeRO-2 only.
        has_written: whether parameters or state may have changed.
        has_released: whether some gradients were set to None.
        has_exchanged: whether the last updates from other ranks have come.
    """

    bound: Bound
    adamw: adamw.AdamWStep
    means: MeanGradients

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Group],
        absent: frozenset[int],
        state: State,
        settings: Settings,
        offload: CPUOffload,
        rounding: Rounding,
        clipping: Optional[Clipping],
        bound: Optional[Bound],
        audit: Optional[Audit],
        only_creates: bool = False,
    ):
        self.plan = plan
        self.groups = groups
        self.settings = settings
        self.clipping = clipping
        self.rounding = rounding
        self.audit = audit
        self.scratch = Scratch()
        self.exchanges: dict[tuple[int, int], Exchange] = {}
        self.has_written = self.has_released = self.has_exchanged = False
        self.params = [groups[entry.group].params[entry.index] for entry in plan.entries]
        self.absent = absent
        self._only_creates = only_creates
        self._state = state
        self._offload = offload
        self._last_bound = bound if bound is not None and bound.plan is plan else None
        self._grads: list[Optional[Tensor]] = []
        self._averaged: dict[int, int] = {}  # by entry, its number among averaged gradients

    def __enter__(self) -> Step:
        bound = self._last_bound
        if bound is None or not bound.fits():
            bound = Bound(
                self.plan,
                self.params,
                self.groups,
                self._state,
                self.settings,
                self._offload,
                self.rounding,
            )
        self.bound = bound
        bound.choose(
            self.absent,
            [[] if group.use_muon else group.taking_part() for group in self.groups],
        )
        divided = self.settings.divided
        self.adamw = adamw.AdamWStep(
            bound.parts,
            self.groups,
            divided,
            self.rounding,
            None if self.clipping is None else self.clipping.scale,
            counts=not self._only_creates,
        )
        self._grads = dtensors.raw_locals([param.grad for param in self.params])
        averaging = None if divided is None else self._begin_averaging(divided)
        self.read_gradients([n for n in bound.on_host - self.absent if n not in self._averaged])
        bound.order(averaging, self._grads)
        self._rings = self._offload.rings(bound.loads.values()) if bound.loads else {}
        if self.audit is not None:
            self.audit.begin(self)
        try:
            for ring in self._rings.values():
                ring.open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Ends copies; makes the host wait for weights in host memory, also after an error."""
        for ring in self._rings.values():
            ring.close()
        if self.bound.on_host:
            entries = self.plan.entries
            self._offload.end_step({entries[number].device for number in self.bound.on_host})

    def end(self) -> None:
        """Completes what is in flight, and tells autograd what was written."""
        self.release_gradients(self.bound.last_reads[None])
        sharded = self.bound.sharded.items()
        torch.autograd.graph.increment_version(
            [param for number, param in sharded if number not in self.absent]
        )
        self.adamw.wait()
        if self.clipping is not None:
            self.clipping.finish()
        if self.audit is not None:
            self.audit.end()

    @contextmanager
    def on_device(self, event: Event) -> Iterator[Bring]:
        """A context in which an event's tensors are on the device.

        It gives a function that takes the event's lists one after the other, and returns them as
        they are on the device.
        """
        load = self.bound.loads.get(event)
        if load is None or load.device is None:
            yield list
            return
        ring = self._rings[load.device]
        columns = ring.acquire(load)

        def bring(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [
                tensor if on_device is None else on_device
                for tensor, on_device in zip(tensors, next(columns))
            ]

        yield bring
        ring.release(load)

    def in_update_dtype(self, buffer: Tensor, lane: Lane) -> Tensor:
        """The buffer itself where arithmetic reads and writes its dtype, else one for a copy."""
        dtype = core.update_dtype(lane.wire, lane.opmath, lane.device)
        return self.scratch.in_dtype(buffer, dtype)

    def watched(self, function: Callable[..., None], pieces: Pieces) -> Callable[..., None]:
        """A function of `core` that updates pieces, observed by the audit if there is one."""
        return function if self.audit is None else self.audit.watching(function, pieces)

    # -- gradients -----------------------------------------------------------------------------

    def _begin_averaging(self, replicas: Any) -> Averaging:
        """Groups gradients into buckets to be averaged, in the order of chunks."""
        from ..distributed.zero2 import MeanGradients  # loaded where it is used

        needed: dict[tuple[int, int], int] = {}  # gradients, by chunk
        for key, chunk in self.bound.chunks.items():
            for number in chunk.reads:
                if self.plan.entries[number].momentum is not None:
                    self._averaged.setdefault(number, len(self._averaged))
            needed[key] = len(self._averaged)
        entries = list(self._averaged)
        for number in entries:
            self._grads[number] = None  # until the mean has come
        self.means = MeanGradients(
            [self.params[number] for number in entries],
            [True] * len(entries),
            replicas.group,
            on_read=lambda index: self.release_gradients([entries[index]]),
            scratch=self.scratch,
        )
        counts = self.means.bucket_plan.prefix_counts
        return Averaging(
            tuple(sorted(replicas.ranks)),
            len(self.means.bucket_plan.buckets),
            {key: counts[count] for key, count in needed.items()},
            self.adamw.buckets_needed(),
        )

    def read_gradients(self, numbers: Sequence[int]) -> None:
        """Gets gradients that are no tensors yet: means of replicas, and zeros for absent ones."""
        for number in numbers:
            if self._grads[number] is not None:
                continue
            if number in self._averaged:
                self._grads[number] = self.means.result(self._averaged[number])
            else:
                self._grads[number] = torch.zeros_like(dtensors.local(self.params[number]))

    def gradients_of(self, numbers: Sequence[int]) -> list[Tensor]:
        """This rank's gradients of entries."""
        self.read_gradients(numbers)
        return [self._grads[number] for number in numbers]  # type: ignore[misc]

    def gradients(self, pieces: Pieces) -> list[Tensor]:
        """The gradients of pieces of the momentum, after `read_gradients`."""
        grads: list[Any] = self._grads
        return [
            grads[number] if part is None else part.of(grads[number])
            for number, part in zip(pieces.entries, pieces.parts)
        ]

    def release_gradients(self, numbers: Sequence[int]) -> None:
        """Drops gradients that were read, and sets them to None where their groups ask for that.

        Gradients of capturable groups stay: the backward of a replayed graph writes to the memory
        that it wrote to when it was captured.
        """
        for number in numbers:
            self._grads[number] = None
            group = self.groups[self.plan.entries[number].group]
            if group.none_grad and not group.capturable:
                self.has_released = True
                self.params[number].grad = None

    # -- weights -------------------------------------------------------------------------------

    def rounded_by(self, pieces: Pieces, bring: Bring) -> Optional[list[RoundedBy]]:
        """What weights are rounded by; None unless they are updated in fp32."""
        if pieces.rounding is None:
            return None
        params, group = [self.params[n] for n in pieces.entries], self.groups[pieces.group]
        return self.rounding.by(params, bring(pieces.rounding), group)

    def clip(self, pieces: Pieces) -> Optional[list[Optional[Tensor]]]:
        """QK-Clip's factors on weights, None for those that it leaves; None without QK-Clip."""
        if self.clipping is None:
            return None
        clip: list[Optional[Tensor]] = []
        for number, part in zip(pieces.entries, pieces.parts):
            scale = self.clipping.scale(self.params[number])
            if scale is not None and part is not None:
                scale = part.of(scale.expand(self.bound.weights[number].shape))
            clip.append(scale)
        return clip
