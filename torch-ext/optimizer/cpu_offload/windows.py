"""What of the state is on the device at the same time: windows, cut from tensors in host memory.

A window holds as much as element-wise arithmetic is done on at once, within a limit: whole tensors,
or pieces of larger ones. In a window tensors lie as they do in host memory, so that neighbours
there are copied at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .arena import PADDED_TO, Arena
from .backend import IN, OUT, Backend

# Where tensors begin on the device, in bytes, as its own allocator has it.
ALIGNMENT = 256

# Pieces have a multiple of the first of these, in elements, that they can have: torch's fused
# AdamW on CPUs rounds differently what does not fill a vector register.
ALIGNED_NUMEL = (64, 32, 16)

Index = tuple[slice, ...]


class Fetch(NamedTuple):
    """A tensor in host memory that is needed on a device, and whether it is written there."""

    host: Tensor
    device: torch.device
    written: bool


class Share(NamedTuple):
    """What a window has of one row, of tensors of one shape that are used together."""

    row: int  # its number
    piece: Optional[Index]  # of each of its tensors; None is all of them
    fetches: tuple[Fetch, ...]  # of that piece
    is_last: bool = True  # piece of the row


class Copy(NamedTuple):
    """An interval of host memory, as flat bytes, and where it lies in the window."""

    host: Tensor
    place: int
    written: bool


class Window:
    """Shares of rows that are on one device at the same time.

    Args:
        shares: of them.
        device: which.
        arena: where the state lies that they lend.
    """

    def __init__(self, shares: Sequence[Share], device: torch.device, arena: Arena):
        self.shares = shares
        self.device = device
        self.copies: list[Copy] = []
        self.nbytes = 0  # on the device
        self._arena = arena
        self._last: Any = None  # what the last copy ends with
        fetches = [fetch for share in shares for fetch in share.fetches]
        places: dict[int, int] = {}  # by id of a fetch
        for fetch in sorted(fetches, key=lambda fetch: fetch.host.data_ptr()):
            places[id(fetch)] = self._place(fetch)
        self.room = _aligned(self.nbytes)  # up to where the next window may begin
        self.written = [copy for copy in self.copies if copy.written]
        self._views = [
            [(places[id(fetch)], fetch.host, dense_stride(fetch.host)) for fetch in share.fetches]
            for share in shares
        ]

    def come(self, backend: Backend, memory: Tensor) -> Any:
        """Starts copies to the window's bytes on the device; an event behind them."""
        targets = [memory[c.place : c.place + c.host.numel()] for c in self.copies]
        backend.copy(IN, targets, [c.host for c in self.copies])
        return backend.record(IN)

    def leave(self, backend: Backend, memory: Tensor) -> Any:
        """Starts copies of what was written, back to the host; an event behind them."""
        sources = [memory[c.place : c.place + c.host.numel()] for c in self.written]
        backend.copy(OUT, [c.host for c in self.written], sources)
        return backend.record(OUT)

    def views(self, memory: Tensor) -> list[tuple[Tensor, ...]]:
        """The tensors of each share, in the order of its fetches, in the window's bytes."""
        return [
            tuple(
                memory[place : place + host.nbytes].view(host.dtype).as_strided(host.shape, stride)
                for place, host, stride in of_share
            )
            for of_share in self._views
        ]

    def _place(self, fetch: Fetch) -> int:
        """Appends a tensor; where it begins."""
        begin = self.nbytes
        for number, interval in enumerate(intervals(fetch.host)):
            part = interval.view(torch.uint8)
            copy = Copy(part, self.nbytes, fetch.written)
            if number == 0:
                # As far from a boundary as in host memory, so that what is joined to it is, too.
                place = _aligned(self.nbytes) + part.data_ptr() % PADDED_TO
                copy = self._join(part, fetch.written) or copy._replace(place=place)
                begin = copy.place + copy.host.numel() - part.numel()
            self.copies.append(copy)
            self.nbytes = copy.place + copy.host.numel()
            self._last = part
        return begin

    def _join(self, part: Tensor, written: bool) -> Optional[Copy]:
        """Takes the last copy away, and gives it together with its neighbour, if this is one."""
        if not self.copies or self.copies[-1].written != written:
            return None
        last, place, _ = self.copies[-1]
        gap = part.data_ptr() - last.data_ptr() - last.numel()
        # Between them there must be nothing but padding, or the copy back would write over it.
        if gap != 0 and not (0 < gap < PADDED_TO and _are_ends(self._last, part)):
            return None
        both = self._arena.span(last.data_ptr(), last.numel() + gap + part.numel())
        if both is None:
            return None
        del self.copies[-1]
        return Copy(both, place, written)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _are_ends(first: Tensor, second: Tensor) -> bool:
    """Whether one is the end of its storage, and the other the beginning of its own."""
    storage = first.untyped_storage()
    end = storage.data_ptr() + storage.nbytes()
    is_end = first.data_ptr() + first.numel() == end
    return is_end and second.data_ptr() == second.untyped_storage().data_ptr()


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
    """Strides of the same order without gaps: its own where it has none."""
    stride, inner = list(tensor.stride()), 1
    for dim in reversed(_memory_order(tensor)):
        stride[dim] = inner
        inner *= tensor.shape[dim]
    return tuple(stride)


def _cut(box: Index, dims: Sequence[int], most: int) -> Iterator[Index]:
    """Pieces of at most so many elements (at least 1), each an interval of memory if the box is."""
    sizes = [s.stop - s.start for s in box]
    numel = math.prod(sizes)
    if numel <= most:
        yield box
        return
    dim = next(dim for dim in dims if sizes[dim] > 1)
    step = max(1, most * sizes[dim] // numel)
    for aligned in (n // math.gcd(n, numel // sizes[dim]) for n in ALIGNED_NUMEL):
        if step >= aligned:
            step -= step % aligned
            break
    stop = box[dim].stop
    for start in range(box[dim].start, stop, step):
        part = slice(start, min(start + step, stop))
        yield from _cut((*box[:dim], part, *box[dim + 1 :]), dims, most)


def narrow(tensor: Optional[Tensor], piece: Optional[Index]) -> Any:
    """The piece of a tensor, which may be one that broadcasts to those that were cut."""
    if tensor is None or piece is None:
        return tensor
    sizes = zip(tensor.shape, piece)
    return tensor[tuple(slice(None) if size == 1 else part for size, part in sizes)]


def fill_windows(
    rows: Sequence[Sequence[Fetch]], most_bytes: Mapping[torch.device, int]
) -> Iterator[tuple[torch.device, list[Share]]]:
    """Devices and shares of windows that have all rows, in their order.

    Args:
        rows: tensors of one shape that are used together; none of a row that is where it is used.
        most_bytes: of a window on each device; a single element may be above it.
    """
    shares: list[Share] = []
    device: Optional[torch.device] = None
    used = 0
    for number, fetches in enumerate(rows):
        for share in _shares(number, fetches, most_bytes):
            nbytes = sum(fetch.host.nbytes + ALIGNMENT for fetch in share.fetches)
            other = fetches[0].device if fetches else device
            if device is not None and (other != device or used + nbytes > most_bytes[device]):
                yield device, shares
                shares, used = [], 0
            device = other
            shares.append(share)
            used += nbytes
    if device is not None:
        yield device, shares


def _shares(
    row: int, fetches: Sequence[Fetch], most_bytes: Mapping[torch.device, int]
) -> Iterator[Share]:
    """A row in as many pieces as its bytes ask for."""
    if not fetches:
        yield Share(row, None, ())
        return
    host = fetches[0].host
    most = most_bytes[fetches[0].device] - ALIGNMENT * len(fetches)
    most_numel = max(1, most // sum(fetch.host.dtype.itemsize for fetch in fetches))
    if host.numel() <= most_numel:
        yield Share(row, None, tuple(fetches))
        return
    pieces = list(_cut(tuple(slice(0, n) for n in host.shape), _memory_order(host), most_numel))
    for piece in pieces:
        of_piece = tuple(fetch._replace(host=fetch.host[piece]) for fetch in fetches)
        yield Share(row, piece, of_piece, is_last=piece is pieces[-1])
