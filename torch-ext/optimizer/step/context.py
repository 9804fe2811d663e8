"""What the events of one step use: gradients, exchanges, and tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch import Tensor

from .. import adamw, core
from ..async_utils import Event
from ..cpu_offload import CPUOffload
from ..distributed import dtensors
from ..distributed.exchange import Exchange
from ..distributed.plan import Lane, Plan
from ..parameters.options import Group, Settings
from ..scratch import Scratch
from ..state.rounding import Rounding
from ..weight_rounding import RoundedBy
from .binding import Bound, Pieces, State
from .progress import Progress

if TYPE_CHECKING:
    from ..distributed.zero2 import MeanGradients, RowAllGather
    from ..extras.audit import Audit
    from ..qk_clip.clip import Clipping

Bring = Callable[[Sequence[Tensor]], list[Tensor]]


class Step:
    """One step of a plan; a context manager whose end closes rings and finishes copies to the host.

    Args:
        plan, groups, state, settings, offload, rounding, clipping: the objects a step works on.
        absent: numbers of the plan's entries that take no part because they have no gradient.
        bound: the last step's `Bound`, reused if it still fits.
        audit: records what the step does; None without an audit.
        progress: how far the step has come.
        only_creates: True if the step only creates state, and doesn't count as a step of AdamW.

    Attributes:
        params: Muon's parameters, in the order of the plan's entries.
        exchanges: exchanges of the chunks in flight, by `Event.chunk`.
        means: averages gradients; in ZeRO-2 only.
    """

    bound: Bound
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
        progress: Progress,
        only_creates: bool = False,
    ):
        self.plan = plan
        self.groups = groups
        self.settings = settings
        self.clipping = clipping
        self.rounding = rounding
        self.audit = audit
        self.only_creates = only_creates
        self.scratch = Scratch()
        self.exchanges: dict[tuple[int, int], Exchange] = {}
        self.progress = progress
        self.params = [groups[entry.group].params[entry.index] for entry in plan.entries]
        self.absent = absent
        self._state = state
        self._offload = offload
        self._last_bound = bound if bound is not None and bound.plan is plan else None
        # By entry, until the last event has read it; None where there is no gradient yet.
        self._grads: list[Optional[Tensor]] = []
        self._mean_numbers: dict[Tensor, int] = {}  # by parameter, as `means` numbers them
        self._kept_means: dict[Tensor, Tensor] = {}  # AdamW's parameters with more pieces to come
        self._sharing: list[RowAllGather] = []

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
        self._take_local_gradients(bound)
        taking_part = [[] if group.use_muon else group.taking_part() for group in self.groups]
        bound.prepare(self.absent, taking_part, self._grads)
        if self.settings.zero2_replicas is not None:
            self._begin_averaging(self.settings.zero2_replicas.group)
        if self.audit is not None:
            self.audit.begin(self)
        try:
            for ring in bound.rings.values():
                ring.open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Finishes copies; the host waits for weights in host memory, even after an error."""
        for ring in self.bound.rings.values():
            ring.close()
        if self.bound.on_host:
            entries = self.plan.entries
            self._offload.end_step({entries[number].device for number in self.bound.on_host})

    def end(self) -> None:
        """Completes operations in flight; increments the version counters of Muon's DTensors."""
        self.release_gradients(self.bound.last_reads[None])
        sharded = self.bound.sharded.items()
        torch.autograd.graph.increment_version(
            [param for number, param in sharded if number not in self.absent]
        )
        for rows in self._sharing:
            rows.wait()
        if self.clipping is not None:
            self.clipping.finish()
        if self.audit is not None:
            self.audit.end()

    @contextmanager
    def on_device(self, event: Event) -> Iterator[Bring]:
        """A context in which an event's tensors are on the device.

        It yields a function that maps the event's lists, passed in order, to lists on the device.
        """
        load = self.bound.loads.get(event)
        if load is None:
            yield list
            return
        ring = self.bound.rings[load.device]  # type: ignore[index]
        columns = ring.acquire(load)

        def bring(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [
                tensor if on_device is None else on_device
                for tensor, on_device in zip(tensors, next(columns))
            ]

        yield bring
        ring.release(load)

    def in_update_dtype(self, buffer: Tensor, lane: Lane) -> Tensor:
        """The buffer itself if arithmetic reads and writes its dtype, else a buffer for a copy."""
        dtype = core.update_dtype(lane.wire, lane.opmath, lane.device)
        return self.scratch.in_dtype(buffer, dtype)

    def watched(self, function: Callable[..., None], pieces: Pieces) -> Callable[..., None]:
        """A function of `core` that updates pieces, wrapped by the audit if there is one."""
        return function if self.audit is None else self.audit.watching(function, pieces)

    # -- gradients -----------------------------------------------------------------------------

    def _take_local_gradients(self, bound: Bound) -> None:
        """Collects the gradients of entries that replicas don't average."""
        self._grads = dtensors.raw_locals([param.grad for param in self.params])
        divided = set[int]()
        if self.settings.zero2_replicas is not None:
            entries = enumerate(self.plan.entries)
            divided = {number for number, entry in entries if entry.momentum_sharding is not None}
            for number in divided:
                self._grads[number] = None
        self.complete_gradients(bound.on_host - self.absent - divided)  # events load these later

    def _begin_averaging(self, group: Any) -> None:
        from ..distributed.zero2 import MeanGradients  # loaded only in ZeRO-2

        params, averaged = list(self.bound.averaged), list(self.bound.averaged.values())
        self._mean_numbers = {param: index for index, param in enumerate(params)}

        def release(index: int) -> None:
            number = averaged[index][0]
            if number is not None:
                self.release_gradients([number])

        divided = [is_divided for _, is_divided in averaged]
        buckets = self.bound.bucket_plan
        self.means = MeanGradients(params, divided, group, release, self.scratch, buckets)

    def complete_gradients(self, numbers: Iterable[int]) -> list[Tensor]:
        """The gradients of entries, creating those that don't exist yet: means over replicas, and
        zeros for missing gradients."""
        completed = []
        for number in numbers:
            grad = self._grads[number]
            if grad is None:
                grad = self._grads[number] = self._mean_or_zeros(self.params[number])
            completed.append(grad)
        return completed

    def _mean_or_zeros(self, param: Tensor) -> Tensor:
        if param in self._mean_numbers:
            return self.means.result(self._mean_numbers[param])
        return torch.zeros_like(dtensors.local(param))

    def gradients(self, pieces: Pieces) -> list[Tensor]:
        """The gradients of pieces of the momentum, after `complete_gradients`."""
        grads: list[Any] = self._grads
        return [
            grads[number] if part is None else part.of(grads[number])
            for number, part in zip(pieces.entries, pieces.parts)
        ]

    def adamw_gradients(self, part: adamw.Part) -> list[Tensor]:
        """The gradients of a part's tensors: local gradients or means."""
        grads = []
        held = dtensors.raw_locals([param.grad for param in part.params])
        for param, grad, index, is_last in zip(part.params, held, part.index, part.is_last):
            if grad is None or param in self._mean_numbers:
                grad = self._kept_means.pop(param, None)
                grad = self._mean_or_zeros(param) if grad is None else grad
                if not is_last:
                    self._kept_means[param] = grad
            grad = grad if index is None else adamw.narrow(grad, index)
            grads.append(grad if part.kind.in_fp32 else grad.to(param.dtype))
        return grads

    def release_gradients(self, numbers: Sequence[int]) -> None:
        """Drops gradients that no later event reads; with ``none_grad``, also ``param.grad``.

        Gradients of capturable groups stay: the backward of a replayed graph writes to the same
        memory as when it was captured.
        """
        for number in numbers:
            self._grads[number] = None
            group = self.groups[self.plan.entries[number].group]
            if group.none_grad and not group.capturable:
                self.progress.has_written = True
                self.params[number].grad = None

    # -- weights -------------------------------------------------------------------------------

    def rounded_by(self, of: Union[Pieces, adamw.Part], bring: Bring) -> Optional[list[RoundedBy]]:
        """Residuals or random bits that round weights; None without `Group.updates_in_fp32`."""
        if of.rounding is None:
            return None
        return self.rounding.by(of.params, bring(of.rounding), self.groups[of.group])

    def clip(self, pieces: Pieces) -> Optional[list[Optional[Tensor]]]:
        """QK-Clip's factors on weights, None for weights it doesn't scale; None without QK-Clip."""
        if self.clipping is None:
            return None
        clip: list[Optional[Tensor]] = []
        for number, param, part in zip(pieces.entries, pieces.params, pieces.parts):
            scale = self.clipping.scale(param)
            if scale is not None and part is not None:
                scale = part.of(scale.expand(self.bound.weights[number].shape))
            clip.append(scale)
        return clip

    def clip_adamw(self, part: adamw.Part) -> Optional[list[Optional[Tensor]]]:
        """QK-Clip's factors on the tensors of a part, as `clip` returns them."""
        if self.clipping is None:
            return None
        clip: list[Optional[Tensor]] = []
        for param, weight, index in zip(part.params, part.weights, part.index):
            scale, rows = self.clipping.scale(param), self.bound.divided_rows(param)
            if scale is not None:
                scale = scale if rows is None else scale[rows]
                # The two devices differ only for parameters in host memory.
                scale = adamw.narrow(scale, index).to(weight.device)
            clip.append(scale)
        return clip

    def share_rows(self, group: int) -> None:
        """Starts the all-gather of the updated rows of one of AdamW's groups to all replicas."""
        from ..distributed.zero2 import RowAllGather

        assert self.settings.zero2_replicas is not None
        params = self.bound.taking_part[group]
        divided = [param for param in params if self.bound.divided_rows(param) is not None]
        self._sharing.append(RowAllGather(divided, self.settings.zero2_replicas.group))
        self._sharing[-1].launch()


def has_nonzero_gradient(group: Group) -> bool:
    """True if a group has a gradient with a nonzero element; waits for the device."""
    grads = (param.grad for param in group.params if param.grad is not None)
    return any(bool(dtensors.local(grad).any()) for grad in grads)


def is_zero_rate(lr: Any) -> bool:
    """True if a learning rate is zero; False for a tensor on a device, which isn't read."""
    return (not isinstance(lr, Tensor) or lr.device.type == "cpu") and bool(lr == 0)
