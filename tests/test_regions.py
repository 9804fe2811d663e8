"""Which part of a tensor each rank holds: what torch says, for all ranks inside one process."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from kernel import optimizer
from lone_rank import lone_rank

regions = optimizer.regions
Sharding, ShardedDim = regions.Sharding, regions.ShardedDim

SIZES = (0, 1, 2, 3, 5, 7, 8, 12, 16, 23)


def random_mesh(rng: random.Random) -> torch.Tensor:
    """Up to three dimensions of at most four ranks each, of more ranks than those, in any order."""
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    numel = math.prod(sizes)
    return torch.tensor(rng.sample(range(numel + 3), numel)).view(sizes)


def random_placements(rng: random.Random, mesh: torch.Tensor, dims: int) -> list[Any]:
    """Shards, strided where later ones cut the same dimension, and replicas."""
    placements: list[Any] = []
    for index in reversed(range(mesh.ndim)):
        dim = rng.choice([None, *range(dims)])
        later = zip(mesh.shape[index + 1 :], placements)
        cuts = [size for size, other in later if getattr(other, "dim", None) == dim]
        if dim is None:
            placement: Any = Replicate()
        elif cuts and rng.random() < 0.6:
            placement = _StridedShard(dim, split_factor=math.prod(cuts))
        else:
            placement = Shard(dim)
        placements.insert(0, placement)
    return placements


def random_shape(rng: random.Random, mesh: torch.Tensor, placements: list[Any]) -> tuple[int, ...]:
    """Any sizes, but multiples where three mesh dimensions cut one, some in strides."""
    shape = [rng.choice(SIZES) for _ in range(3)]
    for dim in range(3):
        cuts = [n for n, p in zip(mesh.shape, placements) if getattr(p, "dim", None) == dim]
        strided = any(isinstance(p, _StridedShard) and p.dim == dim for p in placements)
        if strided and len(cuts) > 2:
            shape[dim] = math.prod(cuts) * rng.randint(0, 3)
    return tuple(shape)


def random_cases(seed: int, count: int) -> Iterator[tuple[torch.Tensor, list[Any], tuple]]:
    rng = random.Random(seed)
    for _ in range(count):
        mesh = random_mesh(rng)
        placements = random_placements(rng, mesh, dims=3)
        yield mesh, placements, random_shape(rng, mesh, placements)


def sharding_of(mesh: torch.Tensor, placements: list[Any]) -> Any:
    splits = [
        None if isinstance(p, Replicate) else ShardedDim(p.dim, isinstance(p, _StridedShard))
        for p in placements
    ]
    return Sharding(tuple(mesh.shape), tuple(mesh.flatten().tolist()), tuple(splits))


def torch_has(
    mesh: torch.Tensor, placements: list[Any], shape: tuple[int, ...], rank: int
) -> tuple:
    """Local shape and offset of a rank, without a process group."""
    device_mesh = DeviceMesh("cpu", mesh, _init_backend=False, _rank=rank)
    return compute_local_shape_and_global_offset(shape, device_mesh, placements)


# -- intervals and regions -------------------------------------------------------------------------


@pytest.mark.kernels_ci
def test_a_dimension_is_cut_as_torch_chunks_it():
    for size, parts in itertools.product(range(40), range(1, 12)):
        expected = [piece.tolist() for piece in torch.arange(size).chunk(parts) if size]
        expected += [[]] * (parts - len(expected))
        found = [regions.shard_interval(size, parts, index) for index in range(parts)]
        assert [list(range(*interval)) for interval in found] == expected
        assert all(0 <= start <= stop <= size for start, stop in found)


# -- shardings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_every_rank_holds_what_torch_gives_it(seed):
    for mesh, placements, shape in random_cases(seed, 150):
        sharding = sharding_of(mesh, placements)
        for rank in mesh.flatten().tolist():
            region = sharding.region(shape, rank)
            sizes, offsets = torch_has(mesh, placements, shape, rank)
            what = f"rank {rank} of {mesh.tolist()}: {placements} of {shape}"
            assert regions.shape_of(region) == tuple(sizes), what
            for (start, stop), offset in zip(region, offsets):
                assert start in (offset, stop), what


# -- DTensors --------------------------------------------------------------------------------------


def dtensor(mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...]) -> DTensor:
    """Zeros, as torch lays them out on this rank."""
    sizes, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        torch.zeros(sizes),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def make_muon(mesh: torch.Tensor, placements: list[Any], shape: tuple[int, ...]) -> None:
    with lone_rank(0, mesh.numel()):
        device_mesh = DeviceMesh("cpu", mesh, _init_backend=False)
        weight = nn.Parameter(dtensor(device_mesh, placements, shape))
        optimizer.Muon([{"params": [weight], "names": ["layers.3.wo.weight"], "use_muon": True}])


THREE_CUTS = [
    [_StridedShard(0, split_factor=4), Shard(0), Shard(0)],
    [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)],
    [Shard(0), _StridedShard(0, split_factor=2), Shard(0)],
]


@pytest.mark.parametrize("placements", THREE_CUTS, ids=str)
def test_three_uneven_cuts_of_a_dimension_in_strides_are_refused_by_name(placements):
    mesh = torch.arange(8).view(2, 2, 2)
    with pytest.raises(ValueError, match=r"^layers\.3\.wo\.weight has 12 indices in dimension 0"):
        make_muon(mesh, placements, (12, 6))
    make_muon(mesh, placements, (16, 6))


@pytest.mark.parametrize("factor", [1, 3, 4])
def test_a_strided_shard_without_the_shards_that_it_strides_over_is_refused_by_name(factor):
    mesh = torch.arange(4).view(2, 2)
    placements = [_StridedShard(0, split_factor=factor), Shard(0)]
    with pytest.raises(ValueError, match=r"^layers\.3\.wo\.weight has placement _StridedShard"):
        make_muon(mesh, placements, (16, 6))
