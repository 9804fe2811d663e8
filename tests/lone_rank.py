"""One process as a rank of many: what is planned and counted for it needs no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def lone_rank(rank: int, ranks: int) -> Iterator[None]:
    """The process group of a rank whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
