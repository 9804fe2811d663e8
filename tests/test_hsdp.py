"""Whether replicas share the work: by a rule, from facts that all of their ranks have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel import optimizer
from plans import CUDA, ShardedDim, Sharding, entries_of, sharded

hsdp = optimizer.distributed.hsdp

ATTENTION = [(4096, 4096)] * 32
EXPERTS = [(768, 2048)] * 400


def replicated(replicas: int, shards: int, dim: int = 0) -> Any:
    ranks = tuple(range(replicas * shards))
    return Sharding((replicas, shards), ranks, (None, ShardedDim(dim)))


def spread(entries: Any, rank: int = 0, choice: str = "auto") -> set[bool]:
    return {e.spread for e in hsdp.share_work(entries, rank, choice)}


def test_auto_shares_large_matrices_and_not_those_that_cost_little_for_their_bytes():
    for shapes, expected in ((ATTENTION, True), (EXPERTS, False)):
        assert spread(entries_of(shapes, replicated(2, 8), device=CUDA)) == {expected}


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (2, 4), (2, 8), (4, 8)])
def test_auto_compares_the_flops_that_are_saved_with_the_bytes_that_are_sent(replicas, shards):
    """Of n matrices that divide evenly, a rank saves cost·n·(1 − 1/R)/S FLOPs, and sends to each of
    R − 1 replicas the updates of n/(R·S) matrices, two bytes an element."""
    for side in (512, 1024, 2048, 4096):
        entries = entries_of([(side, side)] * 64, replicated(replicas, shards), device=CUDA)
        cost = entries[0].cost(*entries[0].matrices.blocks)
        saved = cost * 64 / shards * (1 - 1 / replicas)
        sent = 2 * side * side * 64 / (replicas * shards) * (replicas - 1)
        per_byte = 12_000 if replicas * shards > 8 else 1_200
        assert spread(entries) == {saved > per_byte * sent}


def test_the_largest_matrix_bounds_what_sharing_gains():
    assert spread(entries_of([(4096, 4096)], replicated(64, 2), device=CUDA)) == {False}


def test_all_ranks_decide_alike():
    for placements in ((None, ShardedDim(0)), (ShardedDim(0), None), (None, None)):
        sharding = Sharding((4, 6), tuple(range(24)), placements)
        for shapes in (ATTENTION, EXPERTS, [(16, 24)], [(64, 64), (12, 512, 256)]):
            entries = entries_of(shapes, sharding, device=CUDA)
            assert len({str(spread(entries, rank)) for rank in range(24)}) == 1


@pytest.mark.parametrize("choice", ["spread", "redundant"])
def test_a_choice_is_for_whatever_has_replicas(choice):
    entries = [
        *entries_of([(64, 64)], replicated(2, 4)),
        *entries_of([(64, 64)], sharded(8)),
        *entries_of([(64, 64)], None),
    ]
    told = [e.spread for e in hsdp.share_work(entries, 3, choice)]
    assert told == [choice == "spread", False, False]


def test_the_option_is_checked():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(4, 4))], "use_muon": True}]
    with pytest.raises(ValueError, match="hsdp must be one of"):
        optimizer.Muon(groups, hsdp="both")
