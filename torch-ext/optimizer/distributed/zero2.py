"""ZeRO-2 of replicated parameters: gradients averaged to where they are used, rows gathered back.

Every rank of a group holds whole parameters and gradients of its own. A tensor that is *divided* is
cut along dimension 0 as `torch.chunk` cuts it: a reduce-scatter brings each rank the mean gradient
of its rows, the rank updates these rows, and an all-gather brings them to the others. Tensors too
small for that are all-reduced, and every rank updates the whole of them.

Tensors travel in buckets that follow from shapes alone, so that all ranks launch the same
collectives in the same order. In a bucket of divided tensors, what is for a rank, or comes from
it, is one interval, a *slot*; all slots are as large as the one of the first rank.

A buffer belongs to its bucket until the collective has been waited for; waiting makes the current
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

from ..scratch import Scratch
from .collectives import all_gather_slots, single_tensor_collective
from .regions import shard_interval
from .utils import grad_dtype

# A tensor of fewer elements is not divided: its state is too small to be worth it.
SMALL_NUMEL = 1024

# Staging of one bucket: so large that latency does not count (of 64 ranks, each still gets 1 MiB),
# or, on CPUs, so small that what was packed is still in the cache when it is sent.
BUCKET_BYTES = {"cpu": 4 << 20}
DEFAULT_BUCKET_BYTES = 64 << 20

# One is being packed, one is on the wire, one is there: more would take memory and hide nothing.
BUCKETS_IN_FLIGHT = 3


def is_divided(shape: Sequence[int], ranks: int) -> bool:
    """Whether each rank has rows of a tensor that is not Muon's, rather than all of it."""
    return len(shape) > 0 and shape[0] >= ranks and math.prod(shape) >= SMALL_NUMEL


# -- what travels together ---------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A tensor as buckets see it, of at least one dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    in_slots: bool

    def slot_numel(self, ranks: int) -> int:
        """Elements in the slot of each rank; in the one there is where it is not in slots."""
        slots = ranks if self.in_slots else 1
        return -(-self.shape[0] // slots) * math.prod(self.shape[1:])


@dataclass
class Bucket:
    """What one collective carries: tensors of one dtype and device, all or none of them in slots.

    Args:
        in_slots: one slot for each rank, else a single one.
        members: numbers of the tensors, and where each begins in a slot.
        numel: elements of a slot.
    """

    dtype: torch.dtype
    device: torch.device
    in_slots: bool
    members: dict[int, int] = field(default_factory=dict)
    numel: int = 0


class Buckets(NamedTuple):
    """All buckets, in the order of the first tensor in each.

    Args:
        buckets: not to be changed.
        through: for each n, how many buckets hold the first n tensors.
    """

    buckets: Sequence[Bucket]
    through: Sequence[int]


@functools.lru_cache(maxsize=32)
def plan_buckets(pieces: tuple[Piece, ...], ranks: int) -> Buckets:
    """Fills buckets with tensors, in their order; one above the limit has a bucket to itself.

    Args:
        pieces: equal on all ranks but for their devices' indices.
        ranks: how many there are.
    """
    buckets: list[Bucket] = []
    through = [0]
    latest: dict[tuple, Bucket] = {}  # of each kind
    for index, piece in enumerate(pieces):
        kind = (piece.dtype, piece.device, piece.in_slots)
        limit = BUCKET_BYTES.get(piece.device.type, DEFAULT_BUCKET_BYTES) // piece.dtype.itemsize
        if piece.in_slots:
            limit //= ranks
        numel, bucket = piece.slot_numel(ranks), latest.get(kind)
        if bucket is None or bucket.numel + numel > limit:
            bucket = Bucket(*kind)
            buckets.append(bucket)
            if numel <= limit:  # else what was begun is left open for smaller ones
                latest[kind] = bucket
        bucket.members[index] = bucket.numel
        bucket.numel += numel
        through.append(len(buckets))
    return Buckets(buckets, through)


# -- gradients ---------------------------------------------------------------------------------


class MeanGradients:
    """The means of gradients over a group; of those that are divided, this rank's rows.

    Buckets are launched one after the other, by calls of `launch` that must be alike on all ranks
    of the group. `result` may be called in any order. Gradients are not changed; one that is a
    bucket as it stands (alone in it, contiguous, as many rows for each rank) is sent without a
    copy.

    Staging is bounded by `BUCKETS_IN_FLIGHT` buckets, each of `BUCKET_BYTES` or of one tensor.

    Args:
        params: plain tensors, whose ``grad`` is averaged; an absent one counts as zeros.
        divided: for each whether this rank gets its rows, maybe none; never of 0-D tensors.
        group: process group.
        on_read: called with the number of a tensor once its gradient has been read.
        scratch: what staging is taken from.

    Attributes:
        plan: what travels together.
        launched: how many buckets have been launched.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        divided: Sequence[bool],
        group: Any,
        on_read: Optional[Callable[[int], None]] = None,
        scratch: Optional[Scratch] = None,
    ):
        self._params = params
        self._divided = divided
        self._group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._on_read = on_read
        self._scratch = Scratch() if scratch is None else scratch
        pieces = (
            _piece_of_gradient(param, is_cut, self._ranks) for param, is_cut in zip(params, divided)
        )
        self.plan = plan_buckets(tuple(pieces), self._ranks)
        self.launched = 0
        # What is waited for, the bucket, what is sent, the same if it is staging, and the mean.
        self._under_way: deque[tuple[Any, Bucket, Tensor, Optional[Tensor], Tensor]] = deque()
        self._means: dict[int, Tensor] = {}  # that nobody has asked for yet

    def launch(self) -> None:
        """Starts to average the next bucket."""
        if len(self._under_way) == BUCKETS_IN_FLIGHT:
            self._finish()
        bucket, staging = self.plan.buckets[self.launched], None
        self.launched += 1
        if bucket.in_slots:
            sent = self._as_it_stands(bucket)
            if sent is None:
                numel = self._ranks * bucket.numel
                sent = staging = self._scratch.take(numel, bucket.dtype, bucket.device)
                self._pack(sent, bucket)
            mean = sent.new_empty(bucket.numel)
        else:  # summed in place, and kept: nothing that a later bucket could use
            sent = mean = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            self._pack(sent, bucket)
        work = _sum(sent, mean, self._group) if bucket.numel else None
        self._under_way.append((work, bucket, sent, staging, mean))
        if self._on_read is not None:
            for index in bucket.members:
                self._on_read(index)

    def result(self, index: int) -> Tensor:
        """This rank's rows of a mean, (rows here, *rest), or all of it; once for each tensor.

        Contiguous, of the dtype that gradients of the parameter have, and not used again here.

        Raises:
            RuntimeError: its bucket has not been launched.
        """
        while index not in self._means:
            if not self._under_way:
                raise RuntimeError(f"the mean of tensor {index} was not launched")
            self._finish()
        return self._means.pop(index)

    def _finish(self) -> None:
        """Waits for the bucket that was launched first, and takes it apart."""
        work, bucket, _sent, staging, mean = self._under_way.popleft()
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

    def _as_it_stands(self, bucket: Bucket) -> Optional[Tensor]:
        """The gradient, flat, that is all the bucket holds, if it can be sent without a copy."""
        if len(bucket.members) > 1 or _divides_first(bucket):
            return None
        [index] = bucket.members
        grad = self._params[index].grad
        if grad is None or grad.dtype != bucket.dtype or not _is_slots(grad, self._ranks):
            return None
        if grad.is_conj() or grad.is_neg():  # in memory, it is another number
            return None
        return grad.detach().view(-1)

    def _pack(self, buffer: Tensor, bucket: Bucket) -> None:
        pairs: list[Pair] = []
        slots = buffer.view(self._ranks if bucket.in_slots else 1, bucket.numel)
        for index, offset in bucket.members.items():
            grad, shape = self._params[index].grad, _shape_of(self._params[index])
            room = _room(shape, slots, offset)
            if grad is None:
                room.zero_()
            else:
                pairs += _fill(grad.detach().view(shape), room, 0, len(slots))
        _copy(pairs, into_slots=True)
        if _divides_first(bucket):
            buffer.div_(self._ranks)


def bytes_sent(param: Tensor, divided: bool, gathered: bool, ranks: int) -> float:
    """What each rank sends to average a parameter's gradient and, if so, to gather its rows."""
    piece = _piece_of_gradient(param, divided, ranks)
    size = (ranks - 1) * piece.slot_numel(ranks) * piece.dtype.itemsize
    sent = float(size) if piece.in_slots else 2 * size / ranks
    if gathered:
        rows = Piece(piece.shape, param.dtype, param.device, True)
        sent += (ranks - 1) * rows.slot_numel(ranks) * param.dtype.itemsize
    return sent


def _piece_of_gradient(param: Tensor, divided: bool, ranks: int) -> Piece:
    shape = _shape_of(param)
    # A reduce-scatter of padded slots is to move no more than an all-reduce of what is in them.
    in_slots = divided and -(-shape[0] // ranks) * ranks <= 2 * shape[0]
    return Piece(shape, grad_dtype(param), param.device, in_slots)


def _shape_of(param: Tensor) -> tuple[int, ...]:
    """With rows, which a number has not."""
    return tuple(param.shape) or (1,)


def _divides_first(bucket: Bucket) -> bool:
    """Whether gradients are divided by the number of ranks before they are summed, not after."""
    return bucket.dtype == torch.float16  # the sum could overflow


# -- rows --------------------------------------------------------------------------------------


class RowGathering:
    """Starts to bring the rows that each rank has updated to the others, alike on all ranks.

    A tensor that is a bucket as it stands is received in place: to the end of `wait`, only this
    rank's rows of the tensors are defined. Staging is bounded like that of `MeanGradients`.

    Args:
        tensors: plain ones of at least one dimension, whole on each rank, strided as they like;
            of each, this rank's rows (dimension 0) are up to date.
        group: process group.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Any):
        self._tensors = [tensor.detach() for tensor in tensors]  # of the same version counters
        self._group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._scratch = Scratch()
        self._under_way: deque[tuple[Any, Bucket, Optional[Tensor]]] = deque()
        pieces = tuple(Piece(tuple(t.shape), t.dtype, t.device, True) for t in tensors)
        for bucket in plan_buckets(pieces, self._ranks).buckets:
            if bucket.numel:
                self._launch(bucket)

    def wait(self) -> None:
        """Completes the tensors: whatever follows on the current stream finds all rows in them."""
        while self._under_way:
            self._finish()

    def _launch(self, bucket: Bucket) -> None:
        if len(self._under_way) == BUCKETS_IN_FLIGHT:
            self._finish()
        first, staging = self._tensors[min(bucket.members)], None
        if len(bucket.members) == 1 and _is_slots(first, self._ranks):
            received = first.view(-1)
        else:
            numel = self._ranks * bucket.numel
            received = staging = self._scratch.take(numel, bucket.dtype, bucket.device)
            slots = staging.view(self._ranks, bucket.numel)
            pairs: list[Pair] = []
            for index, offset in bucket.members.items():
                tensor = self._tensors[index]
                room = _room(tensor.shape, slots, offset)
                pairs += _fill(tensor, room, self._rank, self._rank + 1)
            _copy(pairs, into_slots=True)
        work = all_gather_slots(_real(received), self._group)
        self._under_way.append((work, bucket, staging))

    def _finish(self) -> None:
        work, bucket, staging = self._under_way.popleft()
        work.wait()
        if staging is None:  # it was received in place, which no version counter has seen
            torch.autograd.graph.increment_version(self._tensors[min(bucket.members)])
            return
        pairs: list[Pair] = []  # not of this rank's rows: they may have been changed meanwhile
        slots = staging.view(self._ranks, bucket.numel)
        for index, offset in bucket.members.items():
            tensor = self._tensors[index]
            room = _room(tensor.shape, slots, offset)
            pairs += _parts(tensor, room, 0, self._rank)
            pairs += _parts(tensor, room, self._rank + 1, self._ranks)
        _copy(pairs, into_slots=False)
        self._scratch.give(staging)


# -- tensors, slots and collectives ------------------------------------------------------------

Pair = tuple[Tensor, Tensor]  # rows of a tensor, and their place in slots


def _room(shape: Sequence[int], slots: Tensor, offset: int) -> Tensor:
    """What a tensor takes in slots (n, numel): (n, rows in each, *rest)."""
    ranks = slots.shape[0]
    room = (-(-shape[0] // ranks), *shape[1:])
    return slots[:, offset : offset + math.prod(room)].view(ranks, *room)


def _parts(tensor: Tensor, room: Tensor, first: int, last: int) -> list[Pair]:
    """The rows of a tensor that belong into the slots ``first`` to ``last`` − 1."""
    if room.numel() == 0:
        return []
    rows, each = tensor.shape[0], room.shape[1]
    full = min(max(rows // each, first), last)  # the slots before it have as many as they can
    pairs = []
    if full > first:
        filled = tensor[first * each : full * each].unflatten(0, (full - first, each))
        pairs.append((filled, room[first:full]))
    if full < last and full * each < rows:
        rest = tensor[full * each : last * each]
        pairs.append((rest, room[full, : rest.shape[0]]))
    return pairs


def _fill(tensor: Tensor, room: Tensor, first: int, last: int) -> list[Pair]:
    """The same of slots that are to be sent, which are cleared where they have no rows.

    Whatever lay in the buffer might be NaN, for which debugging tools watch the wire.
    """
    rows, each = tensor.shape[0], room.shape[1]
    if rows < last * each and room.numel() > 0:
        full, partial = divmod(rows, each)
        if full >= first:
            room[full, partial:].zero_()
        room[max(full + 1, first) : last].zero_()
    return _parts(tensor, room, first, last)


def _copy(pairs: Sequence[Pair], into_slots: bool) -> None:
    rows, places = [rows for rows, _ in pairs], [place for _, place in pairs]
    if pairs:
        torch._foreach_copy_(*((places, rows) if into_slots else (rows, places)))


def _is_slots(tensor: Tensor, ranks: int) -> bool:
    """Whether a tensor is, in memory, what a bucket of it alone would be."""
    return tensor.is_contiguous() and tensor.shape[0] % ranks == 0


def _sum(sent: Tensor, output: Tensor, group: Any) -> Any:
    """Starts a sum over ranks: of slots, or in place of all."""
    if output is sent:
        return dist.all_reduce(_real(sent), group=group, async_op=True)
    return single_tensor_collective("reduce_scatter")(
        _real(output), _real(sent), group=group, async_op=True
    )


def _real(buffer: Tensor) -> Tensor:
    """Complex numbers as pairs: not all backends know others."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
