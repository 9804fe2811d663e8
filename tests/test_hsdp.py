"""Whether replicas share the work: by estimate, from facts that all of their ranks have."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kernel import optimizer
from plans import CUDA, ShardedDim, Sharding, entries_of, sharded

hsdp, machine = optimizer.distributed.hsdp, optimizer.distributed.machine

SLOW_NETWORK = dataclasses.replace(machine.MACHINES["cuda"], network_bytes=1e8)
SLOW_RANKS = dataclasses.replace(machine.MACHINES["cuda"], flops=1e9)
ATTENTION = [(4096, 4096)] * 32


def replicated(replicas: int, shards: int, dim: int = 0) -> Any:
    ranks = tuple(range(replicas * shards))
    return Sharding((replicas, shards), ranks, (None, ShardedDim(dim)))


def spread(entries: Any, rank: int = 0, choice: str = "auto", speeds: Any = None) -> set[bool]:
    return {e.spread for e in hsdp.share_work(entries, rank, choice, speeds)}


def test_auto_shares_where_arithmetic_is_slow_and_not_where_the_network_is():
    entries = entries_of(ATTENTION, replicated(4, 8), device=CUDA)
    assert spread(entries, speeds=SLOW_RANKS) == {True}
    assert spread(entries, speeds=SLOW_NETWORK) == {False}


def test_auto_takes_what_it_estimates_to_be_faster():
    for replicas, shards in ((2, 8), (4, 8), (16, 8), (2, 4), (2, 1), (64, 16)):
        for speeds in (*machine.MACHINES.values(), SLOW_RANKS, SLOW_NETWORK):
            entries = entries_of(ATTENTION, replicated(replicas, shards), device=CUDA)
            both = hsdp.estimated_seconds(entries, 0, speeds, spread=True)
            alone = hsdp.estimated_seconds(entries, 0, speeds)
            assert spread(entries, speeds=speeds) == {both < alone}


def test_all_ranks_decide_alike():
    for placements in ((None, ShardedDim(0)), (ShardedDim(0), None), (None, None)):
        sharding = Sharding((4, 6), tuple(range(24)), placements)
        for shapes in (ATTENTION, [(16, 24)], [(64, 64), (12, 512, 256)]):
            entries = entries_of(shapes, sharding, device=CUDA)
            for speeds in (None, SLOW_RANKS, SLOW_NETWORK):
                assert len({str(spread(entries, r, "auto", speeds)) for r in range(24)}) == 1


@pytest.mark.parametrize("choice", ["spread", "redundant"])
def test_a_choice_is_for_whatever_has_replicas(choice):
    entries = [
        *entries_of([(64, 64)], replicated(2, 4)),
        *entries_of([(64, 64)], sharded(8)),
        *entries_of([(64, 64)], None),
    ]
    told = [e.spread for e in hsdp.share_work(entries, 3, choice)]
    assert told == [choice == "spread", False, False]


def test_the_estimate_counts_flops_links_and_latency():
    """One matrix of n elements on 2 hosts, a replica of two ranks on each, by hand."""
    speeds = machine.Machine(
        flops=1e12, host_bytes=2e9, network_bytes=1e9, latency=1e-3, ranks_per_host=2
    )
    entries = entries_of([(1024, 1024)] * 8, replicated(2, 2), device=CUDA)
    cost, n = entries[0].cost(*entries[0].matrices.blocks), 1024 * 1024
    chunks = optimizer.distributed.staging.CHUNKS

    def expected(compute: float, wire: float) -> float:
        return max(compute, wire) + min(compute, wire) / chunks + 2 * chunks * 1e-3

    # Redundant: each rank half of the matrices; half of its half of each, 2 bytes, there and back.
    alone = expected(4 * cost / 1e12, 2 * 2 * 8 * n / 2 / 2 / 2e9)
    assert hsdp.estimated_seconds(entries, 0, speeds) == pytest.approx(alone)
    # Spread: a quarter of the matrices; half of that traffic, and two matrices to the other host.
    within, between = 2 * 2 * 8 * n / 2 / 2 / 2 / 2e9, 2 * 2 * n / 1e9
    both = expected(2 * cost / 1e12, max(within, between))
    assert hsdp.estimated_seconds(entries, 0, speeds, spread=True) == pytest.approx(both)


def test_the_largest_matrix_bounds_what_sharing_gains():
    entries = entries_of([(4096, 4096)], replicated(64, 2), device=CUDA)
    fast_links = dataclasses.replace(SLOW_RANKS, host_bytes=1e15, network_bytes=1e15, latency=0.0)
    alone = hsdp.estimated_seconds(entries, 0, fast_links)
    assert hsdp.estimated_seconds(entries, 0, fast_links, spread=True) == pytest.approx(
        alone, rel=1e-3
    )


@pytest.mark.parametrize(
    "wrong",
    [
        *({"flops": 0}, {"latency": -1}, {"ranks_per_host": 0}),
        *({"memory": 0.5}, {"memory": float("inf")}, {"memory": float("nan")}),
    ],
)
def test_a_machine_has_speeds_above_zero_and_bytes_of_memory(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(machine.MACHINES["cpu"], **wrong)


def test_the_option_is_checked():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(4, 4))], "use_muon": True}]
    with pytest.raises(ValueError, match="hsdp must be one of"):
        optimizer.Muon(groups, hsdp="both")
    with pytest.raises(ValueError, match="machine must be"):
        optimizer.Muon(groups, machine="H100")
