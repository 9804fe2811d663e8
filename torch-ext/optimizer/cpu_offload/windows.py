"""Divides offloaded tensors into windows, and gives each tensor its place in a window's memory.

A window holds as much as element-wise arithmetic is done on at once, within a limit: whole tensors,
or pieces of larger ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from ..weight_rounding import RandomBits
from .backend import IN, OUT, Backend

# Alignment of tensors on the device, in bytes, as its own allocator has it.
ALIGNMENT = 256

# A piece has a multiple of the first of these, in elements, that it can have: torch's fused AdamW
# on CPUs rounds elements that do not fill a vector register differently.
ALIGNED_NUMEL = (64, 32, 16)

Index = tuple[slice, ...]


class Fetch(NamedTuple):
    """A tensor in host memory that is needed on a device, and whether it is written there."""

    host: Tensor
    device: torch.device
    written: bool


class RowPiece(NamedTuple):
    """What a window has of one row, that is, of tensors of one shape that are used together."""

    row: int  # its number
    slices: Optional[Index]  # take the piece out of each of the row's tensors; None takes it all
    fetches: tuple[Fetch, ...]  # of the row's offloaded tensors, the piece of each
    is_last: bool = True  # piece of the row


class Window:
    """Pieces of rows that are on one device at the same time.

    Attributes:
        nbytes: of its memory on the device, up to where another window's memory may begin.
        is_written: whether any of it is copied back.
        start: of its memory in the ring, in bytes.
        arrived, freed: events in this step: it is on the device; its memory is free again.
    """

    start: int
    arrived: Any
    freed: Any

    def __init__(self, pieces: Sequence[RowPiece], device: torch.device):
        self.pieces = pieces
        self.device = device
        self.nbytes = 0
        # Intervals of host memory, in bytes, and where each begins in the window's memory.
        self._copies_in: list[tuple[Tensor, int]] = []
        self._copies_out: list[tuple[Tensor, int]] = []
        # Of each piece, where its tensors begin, the tensors, and their strides on the device.
        self._places: list[list[tuple[int, Tensor, tuple[int, ...]]]] = []
        for piece in pieces:
            self._places.append([])
            for fetch in piece.fetches:
                self._places[-1].append((self.nbytes, fetch.host, dense_stride(fetch.host)))
                copies = []
                for interval in intervals(fetch.host):
                    copies.append((interval.view(torch.uint8), self.nbytes))
                    self.nbytes += interval.nbytes
                self.nbytes += -self.nbytes % ALIGNMENT
                self._copies_in += copies
                if fetch.written:
                    self._copies_out += copies
        self.is_written = bool(self._copies_out)

    def overlaps(self, other: Window) -> bool:
        """Whether two windows of a ring share memory."""
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes

    def copy_in(self, backend: Backend, memory: Tensor) -> Any:
        """Starts copies to the window's memory on the device; returns an event after them."""
        hosts = [host for host, _ in self._copies_in]
        backend.copy(IN, [memory[at : at + len(host)] for host, at in self._copies_in], hosts)
        return backend.record(IN)

    def copy_out(self, backend: Backend, memory: Tensor) -> Any:
        """Starts copies of what was written, back to the host; returns an event after them."""
        hosts = [host for host, _ in self._copies_out]
        backend.copy(OUT, hosts, [memory[at : at + len(host)] for host, at in self._copies_out])
        return backend.record(OUT)

    def views(self, memory: Tensor) -> list[tuple[Tensor, ...]]:
        """The tensors of each piece in the window's memory, in the order of its fetches."""
        return [
            tuple(
                memory[start : start + host.nbytes].view(host.dtype).as_strided(host.shape, stride)
                for start, host, stride in places
            )
            for places in self._places
        ]


def intervals(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as flat views of intervals of memory, in the order in which they lie there."""
    if not tensor.numel():
        return
    dims, inner = _memory_order(tensor), 1
    while dims and tensor.stride(dims[-1]) == inner:
        inner *= tensor.shape[dims.pop()]
    for index in itertools.product(*(range(tensor.shape[dim]) for dim in dims)):
        offset = sum(i * tensor.stride(dim) for i, dim in zip(index, dims))
        yield tensor.as_strided((inner,), (1,), tensor.storage_offset() + offset)


def _memory_order(tensor: Tensor) -> list[int]:
    """Dimensions of more than one index, the outermost first."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    return sorted(dims, key=tensor.stride, reverse=True)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Strides without gaps that keep the order of dimensions: the tensor's, where it has no gap."""
    stride, inner = list(tensor.stride()), 1
    for dim in reversed(_memory_order(tensor)):
        stride[dim] = inner
        inner *= tensor.shape[dim]
    return tuple(stride)


def narrow(tensor: Union[Tensor, RandomBits, None], slices: Optional[Index]) -> Any:
    """The piece of a tensor, which may be one that broadcasts to the tensors that were divided, or
    of its random bits."""
    if tensor is None or slices is None:
        return tensor
    if isinstance(tensor, RandomBits):
        return tensor._replace(places=narrow(tensor.places, slices))
    sizes = zip(tensor.shape, slices)
    return tensor[tuple(slice(None) if size == 1 else interval for size, interval in sizes)]


def fill_windows(
    rows: Sequence[Sequence[Fetch]], max_bytes: Mapping[torch.device, int]
) -> Iterator[tuple[torch.device, list[RowPiece]]]:
    """Devices and pieces of windows that have all rows, in their order.

    Args:
        rows: the offloaded tensors of each row; none of a row that needs no copy.
        max_bytes: of a window on each device; a window of a single element may exceed it.
    """
    pieces: list[RowPiece] = []
    device: Optional[torch.device] = None
    used = 0
    for row, fetches in enumerate(rows):
        for piece in _row_pieces(row, fetches, max_bytes):
            nbytes = sum(fetch.host.nbytes + ALIGNMENT for fetch in piece.fetches)
            next_device = fetches[0].device if fetches else device
            if device is not None and (next_device != device or used + nbytes > max_bytes[device]):
                yield device, pieces
                pieces, used = [], 0
            device = next_device
            pieces.append(piece)
            used += nbytes
    if device is not None:
        yield device, pieces


def _row_pieces(
    row: int, fetches: Sequence[Fetch], max_bytes: Mapping[torch.device, int]
) -> Iterator[RowPiece]:
    """A row in as many pieces as its bytes ask for."""
    pieces: list[Optional[Index]] = [None]
    if fetches:
        host, device, _ = fetches[0]
        available = max_bytes[device] - ALIGNMENT * len(fetches)
        max_numel = max(1, available // sum(fetch.host.dtype.itemsize for fetch in fetches))
        if host.numel() > max_numel:
            box = tuple(slice(0, size) for size in host.shape)
            pieces = [*_divide(box, _memory_order(host), max_numel)]
    for slices in pieces:
        narrowed = tuple(fetch._replace(host=narrow(fetch.host, slices)) for fetch in fetches)
        yield RowPiece(row, slices, narrowed, is_last=slices is pieces[-1])


def _divide(box: Index, dims: Sequence[int], max_numel: int) -> Iterator[Index]:
    """Boxes of at most so many elements (at least 1), each an interval of memory if ``box`` is.

    ``dims`` are those of more than one index, the outermost in memory first.
    """
    sizes = [s.stop - s.start for s in box]
    numel = math.prod(sizes)
    if numel <= max_numel:
        yield box
        return
    dim = next(dim for dim in dims if sizes[dim] > 1)
    step = max(1, max_numel * sizes[dim] // numel)
    for aligned in (n // math.gcd(n, numel // sizes[dim]) for n in ALIGNED_NUMEL):
        if step >= aligned:
            step -= step % aligned
            break
    stop = box[dim].stop
    for start in range(box[dim].start, stop, step):
        interval = slice(start, min(start + step, stop))
        yield from _divide((*box[:dim], interval, *box[dim + 1 :]), dims, max_numel)
