"""Which part of a tensor a rank holds: plain arithmetic on intervals, no process group."""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[int, int]  # [start, stop)
Region = tuple[Interval, ...]  # one interval per dimension of the stored tensor


def whole(shape: Sequence[int]) -> Region:
    """The region of a tensor that is nowhere split."""
    return tuple((0, size) for size in shape)


def numel(region: Region) -> int:
    product = 1
    for start, stop in region:
        product *= stop - start
    return product


def clip(region: Region, dim: int, interval: Interval) -> Region:
    """The part of ``region`` whose indices along ``dim`` lie in ``interval``; may be empty."""
    start = max(region[dim][0], interval[0])
    stop = max(start, min(region[dim][1], interval[1]))
    return region[:dim] + ((start, stop),) + region[dim + 1 :]


def slices(region: Region, origin: Region) -> tuple[slice, ...]:
    """Indices that take ``region`` out of a tensor that holds ``origin``."""
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(region, origin))
