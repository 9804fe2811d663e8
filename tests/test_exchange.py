"""For random shardings every element reaches its owner and comes back, in any order of ranks.

Plans of all ranks are made and played inside one process (`simulation.py`): no process group is
needed, so that 1,024 ranks are a test as well.
"""

from __future__ import annotations

import dataclasses
import functools
import graphlib
import itertools
import math
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from counters import calls_of
from kernel import optimizer
from layouts import axes_of, case
from plans import CPU, CUDA, ShardedDim, Sharding, entries_of, entry, make_plan, sharded
from simulation import simulate

regions = optimizer.regions

# -- random sets of parameters ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    ranks: int
    entries: tuple[Any, ...]
    options: dict[str, Any]

    def plans(self) -> list[Any]:
        return [make_plan(self.entries, rank, **self.options) for rank in range(self.ranks)]


def random_case(seed: int, **fixed: Any) -> Case:
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 3, 4, 6, 8])
    options = {
        "chunk_size": rng.choice([-1, -1, 1, 2, 5]),
        "warmup_step": rng.choice([0, 1, 2, 5]),
        "staging_bytes": rng.choice([None, None, 1, 1000, 10_000]),
        **fixed,
    }
    shardings = [random_sharding(rng, ranks) for _ in range(rng.randint(1, 3))]
    wires = rng.sample([torch.bfloat16, torch.float16, torch.float32], rng.randint(1, 2))
    second_moment = rng.random() < 0.4
    entries = [
        random_entry(rng, number, rng.choice(shardings), rng.choice(wires), second_moment)
        for number in range(rng.randint(1, 12))
    ]
    entries = [with_replicas(rng, e) for e in entries]
    return Case(ranks, tuple(entries), options)


def random_sharding(rng: random.Random, ranks: int) -> Any:
    """On all ranks or on some of them, as stages of a pipeline are; dimensions 0 to 2, replicas."""
    if rng.random() < 0.1:
        return None
    on = rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0] + [ranks] * 2)
    chosen = rng.sample(range(ranks), on)
    first = rng.choice([n for n in range(1, on + 1) if on % n == 0])
    mesh = (on,) if rng.random() < 0.4 else (first, on // first)
    dims = [rng.choice([None, 0, 0, 1, 2]) for _ in mesh]
    strided = len(mesh) == 2 and dims[0] == dims[1] is not None and rng.random() < 0.7
    splits = [None if dim is None else ShardedDim(dim) for dim in dims]
    if strided:
        splits[0] = ShardedDim(dims[0], strided=True)
    return Sharding(mesh, tuple(chosen), tuple(splits))


def random_entry(
    rng: random.Random, number: int, sharding: Any, wire: torch.dtype, second_moment: bool
) -> Any:
    sizes = [0, 1, 2, 3, 5, 8, 8, 12, 12, 17]
    kind = rng.choice(["matrix", "matrix", "experts", "experts twice", "convolution"])
    leading = {"experts": 1, "experts twice": 2, "convolution": 1}.get(kind, 0)
    shape = (*(rng.randint(1, 5) for _ in range(leading)), rng.choice(sizes), rng.choice(sizes))
    rows = shape[0] if kind == "convolution" else shape[-2]
    split: Any = None
    if rows and rng.random() < 0.4:
        split = rng.choice([n for n in range(1, rows + 1) if rows % n == 0])
        if rng.random() < 0.5:
            cuts = sorted(rng.sample(range(1, rows), min(rows - 1, 2)))
            split = [stop - start for start, stop in itertools.pairwise((0, *cuts, rows))]
        elif rng.random() < 0.7 and shape[-1]:
            whole = kind == "convolution" or rng.random() < 0.4
            cols = "rest" if whole else axes_of(shape[-1], rng.choice)
            split = f"{axes_of(rows, rng.choice)} {cols}"
    if sharding is not None:  # no cuts of dimensions that there aren't
        splits = tuple(
            None if s is None else ShardedDim(min(s.dim, len(shape) - 1), s.strided)
            for s in sharding.placements
        )
        strided = len(splits) == 2 and None not in splits and splits[0].dim == splits[1].dim
        if not strided:
            splits = tuple(None if s is None else ShardedDim(s.dim) for s in splits)
        sharding = Sharding(sharding.mesh_shape, sharding.ranks, splits)
    return entry(
        shape,
        sharding,
        number,
        split,
        flatten=kind == "convolution",
        dtype=rng.choice([torch.float32, torch.bfloat16]),
        wire=wire,
        second_moment=second_moment and rng.random() < 0.8,
    )


def with_replicas(rng: random.Random, e: Any) -> Any:
    """Replicas that share the work, or none; those of whole weights may divide the momentum."""
    if e.sharding is None or rng.random() < 0.5:
        return e
    if len(e.sharding.mesh_shape) == 1 and e.sharding.placements == (None,):
        divided = Sharding(e.sharding.mesh_shape, e.sharding.ranks, (ShardedDim(0),))
        return dataclasses.replace(e, spread=True, momentum_sharding=divided)
    return dataclasses.replace(e, spread=True)


# -- a step of all ranks ---------------------------------------------------------------------------


def test_every_element_comes_to_its_owners_and_back_to_its_holders():
    seen = Counter()
    for seed in range(160):
        drawn = random_case(seed)
        with case(f"seed {seed}, {drawn.ranks} ranks, {drawn.options}"):
            seen += simulate(drawn.entries, drawn.plans(), drawn.options["chunk_size"])
    assert seen["lanes"] > 100 and seen["all-gathers"] > 10


@pytest.mark.parametrize("averages", [False, True])
def test_all_ranks_launch_the_collectives_of_all_lanes_in_one_order(averages):
    """Or ranks that share two process groups could wait for each other in each of them."""
    several = 0
    for seed in range(160):
        plans = random_case(seed).plans()
        several += max(len(plan.lanes) for plan in plans) > 1
        waits_for: dict[tuple, set[tuple]] = {}
        for launched in map(functools.partial(launches, averages=averages), plans):
            for earlier, later in itertools.pairwise(launched):
                waits_for.setdefault(later, set()).add(earlier)
        graphlib.TopologicalSorter(waits_for).prepare()  # raises where there is a circle
    assert several > 20


def launches(plan: Any, averages: bool) -> list[tuple]:
    """A rank's collectives in its order, each as all of its ranks call it."""
    ranks = plan.lanes[0].peers if averages and plan.lanes else (plan.rank,)
    events = optimizer.async_utils.schedule(plan, (), None, ranks if averages else None)
    found = []
    for event in events:
        if event.do.name in ("GATHER", "ORTHOGONALIZE") and event.lane < len(plan.lanes):
            lane = plan.all_lanes[event.lane]
            found.append((lane.peers, lane.wire, lane.opmath, event[0], event[2]))
    return found


# -- what ranks agree on ---------------------------------------------------------------------------


def test_other_parameters_of_other_ranks_change_nothing():
    """Stages of a pipeline see only their own parameters, at other numbers of the list."""
    both = [entry((8, 6), Sharding((2,), ranks, (ShardedDim(0),))) for ranks in ((0, 1), (2, 3))]
    for rank in range(4):
        (alone,) = make_plan([both[rank // 2]], rank).lanes
        (among,) = make_plan(both, rank).lanes
        assert (alone.digest, alone.chunks[0].gather) == (among.digest, among.chunks[0].gather)


def digests() -> list[list[str]]:
    """Returns the digests of all lanes of all ranks, for another process to compare."""
    return [
        [lane.digest for lane in (*plan.lanes, *plan.local_lanes)]
        for seed in range(10)
        for plan in random_case(seed).plans()
    ]


def test_a_process_that_hashes_otherwise_makes_the_same_plan():
    script = [sys.executable, "-c", "import test_exchange; print(test_exchange.digests())"]
    environment = {**os.environ, "PYTHONHASHSEED": "4321"}
    printed = subprocess.check_output(script, cwd=Path(__file__).parent, env=environment, text=True)
    assert printed.strip() == str(digests())


# -- what need not travel --------------------------------------------------------------------------


def test_one_device_has_no_traffic():
    e = [entry((8, 6), None), entry((4, 8, 6), None, 1), entry((8, 6), sharded(1), 2, split=2)]
    plan = make_plan(e)
    assert not plan.lanes
    assert {unit.entry for lane in plan.local_lanes for unit, _ in lane.owners} == {0, 1, 2}


@pytest.mark.parametrize("second_moment", [False, True])
@pytest.mark.parametrize(
    "sharding",
    [
        sharded(4),
        sharded(4, None),
        Sharding((2, 2), (0, 1, 2, 3), (ShardedDim(0), None)),
        Sharding((2, 2), (0, 1, 2, 3), (ShardedDim(0, strided=True), ShardedDim(0))),
    ],
    ids=["shards", "replicas", "replicas of shards", "strided shards"],
)
def test_experts_that_are_whole_where_they_lie_have_no_traffic(sharding, second_moment):
    shapes = [(8, 6, 10), (6, 6, 10), (3, 10, 6)]
    entries = entries_of(shapes, sharding, second_moment=second_moment)
    assert not any(make_plan(entries, rank).lanes for rank in range(4))


def test_heads_that_are_whole_on_a_rank_stay_there():
    for rank in range(4):
        (lane,) = make_plan([entry((12, 8), sharded(4), split=2)], rank).lanes
        (alone,) = make_plan([entry((12, 8), sharded(4), split=2)], rank).local_lanes
        # Rank 1 holds rows 3 to 5: a whole head, and half of the one that rank 0 has begun.
        assert [unit.box[0] for unit, _ in lane.owners] == [(1, 2), (4, 5)]
        whole = {0: (0, 1), 1: (2, 3), 2: (3, 4), 3: (5, 6)}
        assert [unit.box[0] for unit, _ in alone.owners] == [whole[rank]]


def test_heads_that_are_cut_are_owned_one_by_one():
    (lane,) = make_plan([entry((12, 8), sharded(4, 1), split=2)]).lanes
    assert sorted(unit.box[0] for unit, _ in lane.owners) == [(at, at + 1) for at in range(6)]
    assert Counter(owner for _, owner in lane.owners) == {0: 2, 1: 2, 2: 1, 3: 1}


# -- balance ---------------------------------------------------------------------------------------


def llama(layers: int, dim: int, ffn: int, kv: int) -> list[tuple[int, int]]:
    attention = [(dim, dim), (kv, dim), (kv, dim), (dim, dim)]
    return layers * [*attention, (ffn, dim), (ffn, dim), (dim, ffn)]


LLAMA_3_8B = llama(32, 4096, 14336, 1024)


@dataclass(frozen=True)
class Loads:
    """FLOPs of the owners of one lane: of each in all, and of each in every chunk."""

    total: list[int]
    by_chunk: list[list[int]]
    largest: int

    @property
    def pigeonhole(self) -> float:
        """No assignment of whole matrices can end sooner."""
        return max(sum(self.total) / len(self.total), self.largest)


def loads_of(plan: Any) -> Loads:
    (lane,) = plan.lanes
    owners = dict(lane.owners)

    def cost(unit: Any) -> int:
        e = plan.entries[unit.entry]
        return unit.count * e.cost(unit.block)

    by_chunk = []
    for chunk in lane.chunks:
        loads = [0] * len(lane.peers)
        for unit in (unit for share in chunk.momentum for unit in share.units):
            loads[owners[unit]] += cost(unit)
        by_chunk.append(loads)
    return Loads([sum(of) for of in zip(*by_chunk)], by_chunk, max(map(cost, owners)))


@pytest.mark.parametrize("seed", range(20))
def test_no_owner_does_more_than_its_share_and_one_matrix(seed):
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4, 8, 16])
    shapes = [
        (ranks * rng.randint(1, 20), rng.randint(1, 200)) for _ in range(rng.randint(1, 5 * ranks))
    ]
    loads = loads_of(make_plan(entries_of(shapes, sharded(ranks))))
    assert max(loads.total) <= sum(loads.total) / ranks + loads.largest * (1 - 1 / ranks)
    assert sum(map(sum, loads.by_chunk)) == sum(loads.total)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("ranks", [8, 64])
def test_a_language_model_is_balanced_in_all_and_chunk_by_chunk(ranks, device):
    entries = entries_of(LLAMA_3_8B, sharded(ranks), device=device, dtype=torch.bfloat16)
    loads = loads_of(make_plan(entries))
    assert max(loads.total) <= 1.06 * loads.pigeonhole  # at 64 ranks some own two of 96
    makespan = sum(max(of_chunk) for of_chunk in loads.by_chunk)  # each waits for its slowest rank
    assert makespan <= 1.06 * loads.pigeonhole


def test_small_matrices_that_few_owners_get_join_chunks_in_which_all_have_work():
    shapes = llama(10, 128, 448, 16)  # 30 large matrices: 2 of 16 owners have one less
    entries = entries_of(shapes, sharded(16))
    loads = loads_of(make_plan(entries, staging_bytes=1))
    assert len(loads.by_chunk) == 3
    assert all(min(of_chunk) > 0.75 * max(of_chunk) for of_chunk in loads.by_chunk)


# -- staging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup_step", [0, 1, 5])
@pytest.mark.parametrize("staging_bytes", [None, 100_000])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_an_owner_gathers_a_fixed_number_of_bytes_or_one_matrix(device, staging_bytes, warmup_step):
    deepest = 0
    uneven = [(2048, 2048)] * 2 + [(256, 1024)] * 600
    tail = llama(10, 1024, 3584, 128)  # two owners have one less of the large matrices
    for shapes in (llama(2, 512, 1536, 128), LLAMA_3_8B, [(1024, 1024)] * 40, uneven, tail):
        entries = entries_of(shapes, sharded(4), device=device, dtype=torch.bfloat16)
        fixed = staging_bytes or {"cpu": 1 << 20, "cuda": 64 << 20}[device.type]
        most = max(fixed, 2 * max(map(math.prod, shapes)))
        for rank in range(4):
            options = {"warmup_step": warmup_step, "staging_bytes": staging_bytes}
            (lane,) = make_plan(entries, rank, **options).lanes
            for chunk in lane.chunks:
                gathered = sum(math.prod(u.shape) for batch in chunk.batches for u in batch.units)
                assert 2 * gathered <= most
            assert 1 <= lane.in_flight <= warmup_step + 1
            deepest = max(deepest, lane.in_flight)
    assert deepest == warmup_step + 1


@pytest.mark.parametrize("ranks", [8, 64, 256])
def test_updates_for_all_ranks_are_staged_within_the_bound_and_sent_once(ranks):
    """Replicas that share the work: with uneven owners, no rank sends copies of its updates."""
    divided = Sharding((ranks,), tuple(range(ranks)), (ShardedDim(0),))
    shapes = LLAMA_3_8B
    options = {"device": CUDA, "dtype": torch.bfloat16, "momentum": divided, "spread": True}
    entries = entries_of(shapes, sharded(ranks, None), **options)
    (lane,) = make_plan(entries).lanes
    received = [chunk.scatter.kept + sum(chunk.scatter.received) for chunk in lane.chunks]
    assert sum(received) >= sum(map(math.prod, shapes))
    assert all(chunk.slots for chunk in lane.chunks)
    most = 48 * (64 << 20) + 2 * max(map(math.prod, shapes))  # and what a rank has to keep aligned
    assert 2 * max(received) <= most
    if ranks > 8:  # slots as large as the largest would be mostly empty
        assert sum(received) <= 1.01 * sum(map(math.prod, shapes))


# -- a trillion parameters on 1024 ranks -----------------------------------------------------------


EP_64_FSDP_16 = Sharding((64, 16), tuple(range(1024)), (ShardedDim(0), ShardedDim(1)))


@pytest.mark.slow
@pytest.mark.parametrize("of_experts", [EP_64_FSDP_16, sharded(1024, 1)], ids=["EP", "FSDP"])
def test_a_trillion_parameters_on_1024_ranks_are_planned_in_few_calls(of_experts):
    dense = [(1536, 7168), (12288, 1536), (576, 7168), (16384, 512), (7168, 8192), (384, 7168)]
    experts = [(384, 2048, 7168), (384, 2048, 7168), (384, 7168, 2048)]
    of_layer = [(shape, of_experts) for shape in experts] + [
        (shape, sharded(1024)) for shape in dense
    ]
    entries = [
        entry(shape, sharding, number, dtype=torch.bfloat16, device=CUDA)
        for number, (shape, sharding) in enumerate(61 * of_layer)
    ]
    plan, calls = calls_of(lambda: make_plan(entries, rank=517))
    assert calls < 25e6  # a core makes one to five million in a second
    numel = [0] * len(plan.entries)
    for lane in (*plan.lanes, *plan.local_lanes):
        for share in (share for chunk in lane.chunks for share in chunk.momentum):
            for unit in share.units:
                numel[unit.entry] += share.numel
    assert numel == [regions.numel(e.region(517)) for e in plan.entries]


# -- replicas that share the work ------------------------------------------------------------------

hsdp = optimizer.distributed.hsdp


def shares(entries: Any, rank: int = 0) -> set[bool]:
    return {e.spread for e in hsdp.share_work(entries, rank, "auto")}


def replicated(replicas: int, shards: int) -> Any:
    ranks = tuple(range(replicas * shards))
    return Sharding((replicas, shards), ranks, (None, ShardedDim(0)))


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (2, 4), (2, 8), (4, 8), (64, 2)])
def test_auto_compares_the_flops_that_are_saved_with_the_bytes_that_are_sent(replicas, shards):
    """A rank saves cost·n·(1 − 1/R)/S FLOPs on n matrices that divide evenly. It sends the updates
    of n/(R·S) matrices, two bytes per element, to each of R − 1 replicas."""
    found = set()
    for side, count in itertools.product((512, 1024, 2048, 4096), (1, 128)):
        shapes = [(side, side)] * count
        entries = entries_of(shapes, replicated(replicas, shards), device=CUDA)
        if count == 1:  # the largest matrix bounds what sharing gains
            assert shares(entries) == {False}
            continue
        cost = entries[0].cost(*entries[0].matrices.blocks)
        saved = cost * count / shards * (1 - 1 / replicas)
        sent = 2 * side * side * count / (replicas * shards) * (replicas - 1)
        per_byte = 12_000 if replicas * shards > 8 else 1_200
        for rank in range(replicas * shards):
            assert shares(entries, rank) == {saved > per_byte * sent}
        found |= shares(entries)
    assert found == {True, False} or replicas * shards < 9


@pytest.mark.parametrize(("ranks", "shared"), [((0, 1), True), ((0, 32), False), ((7, 8), False)])
def test_auto_expects_a_slower_link_between_hosts(ranks, shared):
    """Whole matrices on two ranks. Sharing saves 4,096 FLOPs for each byte that a rank sends, which
    lies between the thresholds within a host of eight ranks (1,200) and between hosts (12,000)."""
    sharding = Sharding((2,), ranks, (None,))
    entries = entries_of([(512, 2048)] * 64, sharding, device=CUDA)
    assert shares(entries) == {shared}


@pytest.mark.parametrize("choice", ["spread", "redundant"])
def test_a_choice_is_for_whatever_has_replicas(choice):
    of_kinds = [replicated(2, 4), sharded(8), None]
    entries = [entry((64, 64), sharding, number) for number, sharding in enumerate(of_kinds)]
    told = [e.spread for e in hsdp.share_work(entries, 3, choice)]
    assert told == [choice == "spread", False, False]
