"""Averages gradients in buckets and all-gathers updated rows: the collectives of ZeRO-2.

Every rank of a group holds whole parameters and its own gradients. A *divided* tensor is cut along
dimension 0 as `torch.chunk` does: a reduce-scatter gives each rank the mean gradient of its rows,
the rank updates these rows, and an all-gather sends them to the other ranks. The gradients of
smaller tensors are all-reduced, and every rank updates all of their rows. Divided tensors that
padding would more than double are all-reduced, too, but each rank updates only its rows.

Buckets follow from shapes alone, so that all ranks launch the same collectives in the same order. A
bucket of divided tensors has one interval for each rank, a *slot*, with the data that goes to the
rank or comes from it; all slots are as large as the first rank's.

A buffer belongs to its bucket until the collective has been waited for. Waiting makes the current
stream wait, not the host, and all other work is on that stream.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..regions import shard_interval
from ..scratch import Scratch
from .collectives import all_gather_slots, single_tensor_collective
from .dtensors import grad_dtype

# Bytes of one bucket's staging: enough that latency doesn't matter (each of 64 ranks still gets
# 1 MiB), or, on CPUs, few enough that a packed bucket is still in the cache when it is sent.
BUCKET_BYTES = {"cpu": 4 << 20}
DEFAULT_BUCKET_BYTES = 64 << 20

# One bucket is packed, one on the wire, one has arrived: more would use memory and hide nothing.
BUCKETS_IN_FLIGHT = 3


# -- buckets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketTensor:
    """A tensor as a bucket sees it, of at least one dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    in_slots: bool  # True if its rows are cut into a slot for each rank

    def slot_numel(self, ranks: int) -> int:
        """Elements of the tensor in each slot; in the only slot if the tensor isn't cut."""
        slots = ranks if self.in_slots else 1
        return -(-self.shape[0] // slots) * math.prod(self.shape[1:])


@dataclass
class Bucket:
    """The tensors of one collective: one dtype, one device, all or none of them in slots.

    Args:
        in_slots: True if each rank has a slot; False for a single slot.
        members: by number of the tensor, where it begins in a slot.
        numel: elements of a slot.
    """

    dtype: torch.dtype
    device: torch.device
    in_slots: bool
    members: dict[int, int] = field(default_factory=dict)
    numel: int = 0


class BucketPlan(NamedTuple):
    """All buckets, in the order of the first tensor in each.

    Args:
        buckets: read-only, since all users of a cached plan share them.
        prefix_counts: for each n, how many buckets contain the first n tensors.
    """

    buckets: Sequence[Bucket]
    prefix_counts: Sequence[int]


@functools.lru_cache(maxsize=32)
def plan_buckets(tensors: tuple[BucketTensor, ...], ranks: int) -> BucketPlan:
    """Fills buckets with tensors, in order; a tensor above the limit has a bucket to itself.

    Args:
        tensors: equal on all ranks except for device indices.
        ranks: number of ranks that average or gather the tensors.
    """
    buckets: list[Bucket] = []
    prefix_counts = [0]
    latest: dict[tuple, Bucket] = {}  # of each kind
    for index, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device, tensor.in_slots)
        limit = BUCKET_BYTES.get(tensor.device.type, DEFAULT_BUCKET_BYTES) // tensor.dtype.itemsize
        if tensor.in_slots:
            limit //= ranks
        numel, bucket = tensor.slot_numel(ranks), latest.get(kind)
        if bucket is None or bucket.numel + numel > limit:
            bucket = Bucket(*kind)
            buckets.append(bucket)
            if numel <= limit:  # else the latest bucket is left open for smaller tensors
                latest[kind] = bucket
        bucket.members[index] = bucket.numel
        bucket.numel += numel
        prefix_counts.append(len(buckets))
    return BucketPlan(buckets, prefix_counts)


# -- gradients ---------------------------------------------------------------------------------


class MeanGradients:
    """Averages gradients over a process group; this rank gets only its rows of divided gradients.

    Each call of `launch` launches the next bucket; all ranks of the group must make the same calls.
    `result` may be called in any order. Gradients aren't changed. A gradient is sent without a
    copy if it is alone in its bucket, contiguous, and has the same number of rows for each rank.

    Staging is limited to `BUCKETS_IN_FLIGHT` buckets, each of `BUCKET_BYTES` or of one tensor.

    Args:
        params: plain tensors, whose ``grad`` is averaged; a missing one counts as zeros.
        divided: for each parameter, True if this rank gets only its rows, possibly none; False for
            0-D tensors.
        group: process group.
        on_read: called with the number of a tensor once its gradient has been read.
        scratch: provides the staging.
        bucket_plan: result of `buckets_of`, if known.

    Attributes:
        bucket_plan: which gradients travel together.
        launched: number of buckets launched.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        divided: Sequence[bool],
        group: Any,
        on_read: Optional[Callable[[int], None]] = None,
        scratch: Optional[Scratch] = None,
        bucket_plan: Optional[BucketPlan] = None,
    ):
        self._params = params
        self._divided = divided
        self._group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._on_read = on_read
        self._scratch = Scratch() if scratch is None else scratch
        self.bucket_plan = bucket_plan or buckets_of(params, divided, self._ranks)
        self.launched = 0
        # Work to wait for, bucket, buffer that is sent, the buffer again if it is staging, mean.
        self._in_flight: deque[tuple[Any, Bucket, Tensor, Optional[Tensor], Tensor]] = deque()
        self._means: dict[int, Tensor] = {}  # by number, until `result` is called

    def launch(self) -> None:
        """Starts to average the next bucket."""
        if len(self._in_flight) == BUCKETS_IN_FLIGHT:
            self._finish()
        bucket, staging = self.bucket_plan.buckets[self.launched], None
        self.launched += 1
        if bucket.in_slots:
            sent = self._zero_copy_gradient(bucket)
            if sent is None:
                numel = self._ranks * bucket.numel
                sent = staging = self._scratch.take(numel, bucket.dtype, bucket.device)
                self._pack(sent, bucket)
            mean = sent.new_empty(bucket.numel)
        else:  # summed in place and kept as the mean, so the buffer isn't staging to be reused
            sent = mean = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            self._pack(sent, bucket)
        work = _start_sum(sent, mean, self._group) if bucket.numel else None
        self._in_flight.append((work, bucket, sent, staging, mean))
        if self._on_read is not None:
            for index in bucket.members:
                self._on_read(index)

    def result(self, index: int) -> Tensor:
        """Returns a mean, once: all of it, or, if divided, this rank's rows, (rows, *rest).

        The mean is contiguous, in the dtype of the parameter's gradients.

        Raises:
            RuntimeError: its bucket hasn't been launched.
        """
        while index not in self._means:
            if not self._in_flight:
                raise RuntimeError(f"the mean of tensor {index} was not launched")
            self._finish()
        return self._means.pop(index)

    def _finish(self) -> None:
        """Waits for the earliest bucket in flight, and stores its means."""
        work, bucket, _sent, staging, mean = self._in_flight.popleft()
        if work is not None:
            work.wait()
        if staging is not None:
            self._scratch.give(staging)
        if not _divides_first(bucket):
            mean.div_(self._ranks)
        for index, start in bucket.members.items():
            shape = tuple(self._params[index].shape)
            if self._divided[index]:
                first, last = shard_interval(shape[0], self._ranks, self._rank)
                shape = (last - first, *shape[1:])
                if not bucket.in_slots:
                    start += first * math.prod(shape[1:])
            self._means[index] = mean[start : start + math.prod(shape)].view(shape)

    def _zero_copy_gradient(self, bucket: Bucket) -> Optional[Tensor]:
        """The flat gradient of a bucket with only one, if it can be sent without a copy."""
        if len(bucket.members) > 1 or _divides_first(bucket):
            return None
        [index] = bucket.members
        grad = self._params[index].grad
        if grad is None or grad.dtype != bucket.dtype or not _is_packed(grad, self._ranks):
            return None
        # The memory of conjugate and negative views holds other numbers.
        return None if grad.is_conj() or grad.is_neg() else grad.detach().view(-1)

    def _pack(self, buffer: Tensor, bucket: Bucket) -> None:
        pairs: list[RowPair] = []
        slots = buffer.view(self._ranks if bucket.in_slots else 1, bucket.numel)
        for index, offset in bucket.members.items():
            grad, shape = self._params[index].grad, _shape_with_rows(self._params[index])
            slot_rows = _rows_of_slots(shape, slots, offset)
            if grad is None:
                slot_rows.zero_()
            else:
                _clear_padding(shape[0], slot_rows, 0, len(slots))
                pairs += _pair_rows(grad.detach().view(shape), slot_rows, 0, len(slots))
        _copy_rows(pairs, into_slots=True)
        if _divides_first(bucket):
            buffer.div_(self._ranks)


def buckets_of(params: Sequence[Tensor], divided: Sequence[bool], ranks: int) -> BucketPlan:
    """The buckets in which the gradients of parameters are averaged, see `MeanGradients`."""
    gradients = [gradient_in_bucket(param, cut, ranks) for param, cut in zip(params, divided)]
    return plan_buckets(tuple(gradients), ranks)


def gradient_in_bucket(param: Tensor, divided: bool, ranks: int) -> BucketTensor:
    shape = _shape_with_rows(param)
    # A reduce-scatter of padded slots must not move more than an all-reduce of the rows in them.
    in_slots = divided and -(-shape[0] // ranks) * ranks <= 2 * shape[0]
    return BucketTensor(shape, grad_dtype(param), param.device, in_slots)


def _shape_with_rows(param: Tensor) -> tuple[int, ...]:
    """The shape of a parameter; a 0-D one has one row."""
    return tuple(param.shape) or (1,)


def _divides_first(bucket: Bucket) -> bool:
    """True if gradients are divided by the number of ranks before the sum, not after it."""
    return bucket.dtype == torch.float16  # the sum could overflow


# -- rows --------------------------------------------------------------------------------------


class RowAllGather:
    """Sends the rows that each rank has updated to all other ranks of a group.

    All ranks call `launch`, then `wait`. In between, only the rows that this rank has updated are
    defined: other rows may be arriving in place. Staging is limited as in `MeanGradients`.

    Args:
        tensors: plain tensors, whole on each rank, with rows (dimension 0) and any strides.
        group: process group.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Any):
        self._tensors = [tensor.detach() for tensor in tensors]  # with shared version counters
        self._group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._scratch = Scratch()
        self._in_flight: deque[tuple[Any, Bucket, Optional[Tensor]]] = deque()

    def launch(self) -> None:
        """Starts to exchange the rows of all tensors."""
        rows = (BucketTensor(tuple(t.shape), t.dtype, t.device, True) for t in self._tensors)
        for bucket in plan_buckets(tuple(rows), self._ranks).buckets:
            if bucket.numel:
                self._launch(bucket)

    def wait(self) -> None:
        """Completes the tensors: later work on the current stream sees all rows."""
        while self._in_flight:
            self._finish()

    def _launch(self, bucket: Bucket) -> None:
        if len(self._in_flight) == BUCKETS_IN_FLIGHT:
            self._finish()
        first, staging = self._tensors[min(bucket.members)], None
        if len(bucket.members) == 1 and _is_packed(first, self._ranks):
            received = first.view(-1)
        else:
            numel = self._ranks * bucket.numel
            received = staging = self._scratch.take(numel, bucket.dtype, bucket.device)
            slots = staging.view(self._ranks, bucket.numel)
            pairs: list[RowPair] = []
            for index, offset in bucket.members.items():
                tensor = self._tensors[index]
                slot_rows = _rows_of_slots(tensor.shape, slots, offset)
                _clear_padding(tensor.shape[0], slot_rows, self._rank, self._rank + 1)
                pairs += _pair_rows(tensor, slot_rows, self._rank, self._rank + 1)
            _copy_rows(pairs, into_slots=True)
        work = all_gather_slots(_real(received), self._group)
        self._in_flight.append((work, bucket, staging))

    def _finish(self) -> None:
        work, bucket, staging = self._in_flight.popleft()
        work.wait()
        if staging is None:  # rows were received in place, which version counters miss
            torch.autograd.graph.increment_version(self._tensors[min(bucket.members)])
            return
        pairs: list[RowPair] = []  # without this rank's rows, which may have been changed since
        slots = staging.view(self._ranks, bucket.numel)
        for index, offset in bucket.members.items():
            tensor = self._tensors[index]
            slot_rows = _rows_of_slots(tensor.shape, slots, offset)
            pairs += _pair_rows(tensor, slot_rows, 0, self._rank)
            pairs += _pair_rows(tensor, slot_rows, self._rank + 1, self._ranks)
        _copy_rows(pairs, into_slots=False)
        self._scratch.give(staging)


# -- tensors, slots and collectives ------------------------------------------------------------

RowPair = tuple[Tensor, Tensor]  # rows of a tensor, and their place in slots


def _rows_of_slots(shape: Sequence[int], slots: Tensor, offset: int) -> Tensor:
    """The place of a tensor in slots (n, numel), as a view (n, rows per slot, *rest)."""
    ranks = slots.shape[0]
    per_slot = (-(-shape[0] // ranks), *shape[1:])
    return slots[:, offset : offset + math.prod(per_slot)].view(ranks, *per_slot)


def _pair_rows(tensor: Tensor, slot_rows: Tensor, first: int, last: int) -> list[RowPair]:
    """Pairs rows of a tensor with their places in the slots ``first`` to ``last`` − 1."""
    if slot_rows.numel() == 0:
        return []
    rows, per_slot = tensor.shape[0], slot_rows.shape[1]
    full = min(max(rows // per_slot, first), last)  # the slots before it have no padding
    pairs = []
    if full > first:
        rows_of_full = tensor[first * per_slot : full * per_slot]
        pairs.append((rows_of_full.unflatten(0, (full - first, per_slot)), slot_rows[first:full]))
    if full < last and full * per_slot < rows:
        partial_rows = tensor[full * per_slot : last * per_slot]
        pairs.append((partial_rows, slot_rows[full, : partial_rows.shape[0]]))
    return pairs


def _clear_padding(rows: int, slot_rows: Tensor, first: int, last: int) -> None:
    """Zeroes the padding of a tensor of ``rows`` rows in the slots ``first`` to ``last`` − 1.

    The buffer might contain NaN there, and debugging tools watch the wire for NaN.
    """
    per_slot = slot_rows.shape[1]
    if rows < last * per_slot and slot_rows.numel() > 0:
        full, partial = divmod(rows, per_slot)
        if full >= first:
            slot_rows[full, partial:].zero_()
        slot_rows[max(full + 1, first) : last].zero_()


def _copy_rows(pairs: Sequence[RowPair], into_slots: bool) -> None:
    rows, places = [rows for rows, _ in pairs], [place for _, place in pairs]
    if pairs:
        torch._foreach_copy_(*((places, rows) if into_slots else (rows, places)))


def _is_packed(tensor: Tensor, ranks: int) -> bool:
    """True if a tensor has the memory layout of a bucket with no other tensors."""
    return tensor.is_contiguous() and tensor.shape[0] % ranks == 0


def _start_sum(sent: Tensor, output: Tensor, group: Any) -> Any:
    """Starts a sum over ranks: each rank gets its slot of the sum, or all of it in place."""
    if output is sent:
        return dist.all_reduce(_real(sent), group=group, async_op=True)
    return single_tensor_collective("reduce_scatter")(
        _real(output), _real(sent), group=group, async_op=True
    )


def _real(buffer: Tensor) -> Tensor:
    """Views complex numbers as pairs of real ones: not all backends support complex dtypes."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
