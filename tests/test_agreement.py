"""All ranks that a chain of meshes connects hear of what is wrong on any of them, in seconds."""

from __future__ import annotations

import copy
import itertools
import os
import random
import re
import time
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from breaking import refused
from kernel import optimizer
from layouts import params_of, part, set_gradients
from ranks import on_ranks, rank_outcomes, run_ranks

agreement = optimizer.distributed.agreement
Agreement, StepNotes = agreement.Agreement, agreement.StepNotes

Sets = Sequence[tuple[int, ...]]

PAIR = ((0, 1),)
PARTS = ((0, 1), (2, 3))
CHAIN = ((0, 1), (1, 2), (2, 3))
STAR = ((0, 1), (0, 2), (0, 3), (0, 4))
NESTED = ((0, 1, 2, 3), (0, 1), (1, 2, 3), (3, 4))


def notes_on(sets: Sets, lines: Any = ("a.weight: (6, 4)",), gradients: Any = ("a.weight",)) -> Any:
    return {ranks: StepNotes(lines, gradients) for ranks in sets if dist.get_rank() in ranks}


def decide(shared: Any, notes: Any, error: str | None = None, skip: bool = False) -> Any:
    """True if all ranks skip, or the problem that they agreed on; found within seconds."""
    start = time.monotonic()
    try:
        return shared.check(notes, error, notes, skip)
    except ValueError as problem:
        return str(problem)
    finally:
        assert time.monotonic() - start < 10


def union_of(sets: Sets, rank: int) -> set[int]:
    """The ranks that meshes connect with a rank."""
    union = {rank}
    for _ in sets:
        union = union.union(*(ranks for ranks in sets if union & set(ranks)))
    return union


def random_sets(seed: int, ranks: int) -> Sets:
    """A connected hypergraph: every rank but the first joins one that came before it."""
    draw = random.Random(seed)
    sets = set()
    for rank in range(1, ranks):
        others = draw.sample(range(rank), draw.randint(1, min(rank, 2)))
        sets.add(tuple(sorted([rank, *others])))
    for _ in range(draw.randint(0, 3)):
        sets.add(tuple(sorted(draw.sample(range(ranks), draw.randint(2, ranks)))))
    return sorted(sets)


def faults_and_recoveries(cases: Sequence[tuple[Sets, int, str]]) -> None:
    """Notes are compared before, with, and after a fault of one rank."""
    for sets, faulty, fault in cases:
        shared, rank = Agreement(), dist.get_rank()
        where = max(ranks for ranks in sets if faulty in ranks)
        words = {
            "error": f"rank {faulty}: out of data",
            "lines": f"ranks {where[0]} and {where[1] if faulty == where[0] else faulty} ",
            "gradients": f"a.weight on ranks [{faulty}]",
        }[fault]
        notes, error = notes_on(sets), None
        if rank == faulty and fault == "error":
            notes, error = notes_on(sets, [], []), "out of data"
        elif rank == faulty:
            other = {"lines": ["a.weight: (4, 6)"]} if fault == "lines" else {"gradients": []}
            notes[where] = notes[where]._replace(**other)
        assert decide(shared, notes_on(sets)) is False
        told = decide(shared, notes, error)
        if faulty in union_of(sets, rank):
            assert words in told, (sets, faulty, fault, told)
        else:
            assert told is False
        assert decide(shared, notes_on(sets)) is False


FIXED = [(PAIR, 1), (CHAIN, 0), (CHAIN, 3), (STAR, 4), (NESTED, 2), (NESTED, 4), (PARTS, 3)]


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (5, range(12)),
        (6, range(12)),
        pytest.param(4, range(1000, 1070), marks=pytest.mark.slow),
        pytest.param(8, range(3000, 3060), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_fault_reaches_all_connected_ranks_and_leaves_nothing_behind(ranks, seeds):
    kinds = ("error", "lines", "gradients")
    cases = [(*case, kind) for case in FIXED for kind in kinds] if ranks == 5 else []
    for seed in seeds:
        draw = random.Random(seed)
        cases.append((random_sets(seed, ranks), draw.randrange(ranks), draw.choice(kinds)))
    run_ranks(faults_and_recoveries, ranks, cases)


CHANGED: list[Sets] = [PARTS, ((0, 1, 2, 3),), ((1, 2),), (), ((0, 4), *CHAIN), ((2, 3, 4),)]


@on_ranks(5)
def test_a_step_takes_one_exchange_once_ranks_know_each_other_also_after_meshes_change():
    calls, gather, rank = [], agreement.all_gather, dist.get_rank()

    def counted(*args):
        calls.append(args)
        return gather(*args)

    def exchanges(*steps):
        shared, counts = Agreement(), []
        for sets in steps:
            calls.clear()
            assert decide(shared, notes_on(sets)) is False
            counts.append(len(calls))
        return counts

    agreement.all_gather = counted
    assert exchanges((), ((0,), (1,))) == [0, 0]
    assert exchanges(*[((0, 1, 2),)] * 3) == ([2, 1, 1] if rank < 3 else [0, 0, 0])
    for sets in CHANGED:
        counts = exchanges(CHAIN, CHAIN, sets, sets, CHAIN, CHAIN)
        assert counts[1] == counts[5] == int(rank < 4)
        assert counts[3] == int(any(rank in ranks for ranks in sets))


# The sets before, or None if these are a first step's; those of one rank; its error; what all hear.
CHANGES: list[tuple[Sets | None, int, Sets, str | None, str]] = [
    (CHAIN, 2, ((1, 2),), None, r"rank 3 .*\[2, 3\], but rank 2 has none"),
    (CHAIN, 2, (), None, r"rank 1 .*\[1, 2\], but rank 2 has none"),
    (CHAIN, 2, ((0, 2), *CHAIN), None, r"rank 2 .*\[0, 2\], but rank 0 has none"),
    (CHAIN, 2, ((1, 2),), "no such mesh", "rank 2: no such mesh"),
    (None, 0, ((0, 1, 2, 3), (0, 1)), None, r"rank 0 .*\[0, 1\], but rank 1 has none"),
]


@on_ranks(4)
def test_sets_that_change_on_one_rank_raise_on_all() -> None:
    for before, odd, own, error, words in CHANGES:
        shared, usual, is_odd = Agreement(), before or ((0, 1, 2, 3),), dist.get_rank() == odd
        if before:
            decide(shared, notes_on(before))
        told = decide(shared, notes_on(own if is_odd else usual), error if is_odd else None)
        assert re.search(words, told), told
        assert decide(shared, notes_on(usual)) is False


@on_ranks(4)
def test_other_optimizers_on_one_rank_are_told_and_then_all_go_on() -> None:
    """Two that one rank steps the other way round, once; then one that one rank has copied."""
    both, rank = [(Agreement(), CHAIN), (Agreement(), ((0, 1, 2, 3), (1, 2)))], dist.get_rank()
    for step in range(4):
        error = "out of data" if rank == 3 and step == 1 else None
        order = both[::-1] if rank == 1 and step == 2 else both
        told = [decide(shared, notes_on(sets), error) for shared, sets in order]
        if step == 2:
            assert all("ranks 0 and 1 step different optimizers" in each for each in told)
        else:
            assert told == ["rank 3: out of data" if step == 1 else False] * 2
    shared = Agreement()
    assert decide(shared, notes_on(PAIR)) is False
    shared = copy.deepcopy(shared) if rank == 1 else shared
    told = [decide(shared, notes_on(PAIR)) for _ in range(2)]
    assert rank > 1 or "ranks 0 and 1 step different optimizers" in told[0]
    assert told[1] is False


@on_ranks(4)
def test_one_rank_that_wants_to_skip_makes_all_that_are_connected_skip() -> None:
    """Some ranks want to skip; they do while another one has an error; and none wants to."""
    rank = dist.get_rank()
    for wanting in ((0,), (2, 3)):
        shared, error = Agreement(), "out of data" if rank == 3 else None
        assert decide(shared, notes_on(CHAIN), skip=rank in wanting) is True
        told = decide(shared, notes_on(CHAIN), error, skip=rank in wanting)
        assert told == "rank 3: out of data" and not shared.others_may_step
        assert decide(shared, notes_on(CHAIN)) is False


@on_ranks(5)
def test_connections_and_the_process_group_can_be_made_again() -> None:
    """Connections in one store, then the process group, under an agreement and an optimizer."""
    shared, rank, size = Agreement(), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for lifetime in range(4):
        mesh = init_device_mesh("cpu", (2, 2))  # of five ranks: needs a group of its own
        if rank < 4:
            weight = nn.Parameter(part(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
            weight.grad = torch.ones_like(weight)
            optimizer.Muon([{"params": [weight], "use_muon": True}]).step()
            assert decide(shared, notes_on(CHAIN)) is decide(shared, notes_on(CHAIN)) is False
            for ranks in (*CHAIN, (0, 1, 2, 3)):
                agreement.close_connections(ranks)
            assert decide(copy.deepcopy(shared), notes_on(CHAIN)) is False
        dist.destroy_process_group()
        prefixed = dist.PrefixStore(str(lifetime), store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size)
    dist.barrier()  # a rank that is gone breaks the connections of those that still make theirs


# -- ranks that do not come ------------------------------------------------------------------------


def compare_twice(sets: Sets, fault: str, ranks: Collection[int], at: int) -> None:
    """Some ranks stay away, die, or have no network, from a comparison on."""
    shared = Agreement()
    for number in range(2):
        if number == at and dist.get_rank() in ranks:
            if fault == "stays away":
                return
            if fault == "dies":
                os._exit(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "bogus0"
        decide(shared, notes_on(sets))


@pytest.mark.parametrize(("at", "named"), [(0, "[1, 2]"), (1, "[0, 1, 2]")])
def test_a_rank_that_stays_away_is_left_to_the_timeout_of_the_process_group(at, named):
    arguments = ((0, 1), (1, 2)), "stays away", (2,), at
    first, second, third = rank_outcomes(compare_twice, 3, *arguments, pg_timeout=2, timeout=30)
    assert third.error is None
    assert first.error == second.error == "RuntimeError"
    assert named in second.message


@pytest.mark.parametrize("bogus", [(0,), (2,), (0, 1, 2)], ids=str)
def test_where_gloo_has_no_interface_on_a_rank_all_raise_at_once_and_name_the_variable(bogus):
    arguments = ((0, 1, 2),), "no network", bogus, 0
    for outcome in rank_outcomes(compare_twice, 3, *arguments, pg_timeout=60):
        assert outcome.error == "RuntimeError"
        assert re.match("|".join(f"rank {rank} " for rank in bogus), outcome.message)
        assert "GLOO_SOCKET_IFNAME" in outcome.message and "bogus0" in outcome.message


@pytest.mark.parametrize("victim", [0, 9, 17])
def test_where_a_rank_has_died_all_raise_long_before_the_timeout(victim):
    arguments = (tuple(range(18)),), "dies", (victim,), 1
    for rank, outcome in enumerate(rank_outcomes(compare_twice, 18, *arguments, pg_timeout=100)):
        assert outcome.error == ("Crashed" if rank == victim else "RuntimeError"), outcome


# -- connections -----------------------------------------------------------------------------------


SIZES = [*range(2, 10), 13, 16, 19]


@on_ranks(max(SIZES))
def test_every_rank_gathers_what_all_have_in_order_whatever_their_number():
    rank = dist.get_rank()
    for size in SIZES:
        if rank < size:
            gathered = agreement.all_gather(tuple(range(size)), torch.tensor([[rank, -rank]]))
            expected = torch.stack([torch.arange(size), -torch.arange(size)], 1).unsqueeze(1)
            assert torch.equal(gathered, expected)


def sockets_opened() -> int:
    def count() -> int:
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(f) and os.readlink(f).startswith("socket:") for f in links)

    shared, everyone = Agreement(), tuple(range(dist.get_world_size()))
    before = count()
    for _ in range(2):
        assert decide(shared, notes_on((everyone,))) is False
    return count() - before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts sockets as Linux lists them")
@pytest.mark.parametrize(
    ("ranks", "peers"),
    [(8, 7), (13, 7 + 1), (16, 7 + 1), pytest.param(64, 14, marks=pytest.mark.slow)],
)
def test_a_rank_connects_with_seven_for_each_eightfold_of_ranks_and_listens_on_one(ranks, peers):
    assert max(run_ranks(sockets_opened, ranks, timeout=500)) == peers + 1


# -- optimizers ------------------------------------------------------------------------------------


def optimizer_on(sets: Sets) -> Any:
    """Makes an optimizer of one matrix on each mesh that this rank is in."""
    groups = []
    for number, ranks in enumerate(sets):
        mesh = DeviceMesh("cpu", list(ranks))
        if dist.get_rank() in ranks:
            params = [nn.Parameter(part(torch.ones(6, 4), mesh, [Shard(0)]))]
            groups.append({"params": params, "names": [f"{number}.weight"], "use_muon": True})
    optim = optimizer.Muon(groups, lr=0.1)
    set_gradients(params_of(optim))
    return optim


@on_ranks(4, pg_timeout=20)
def test_a_fault_at_one_end_of_a_chain_raises_on_all_and_touches_nothing() -> None:
    for faulty, fault in itertools.product((0, 3), ("momentum", "gradient")):
        optim = optimizer_on(CHAIN)
        group, words = optim.param_groups[0], f"rank {faulty}: .*momentum"
        if fault == "gradient":
            words = rf"{min(faulty, 2)}\.weight on ranks \[{faulty}\]"
        if dist.get_rank() == faulty and fault == "gradient":
            group["params"][0].grad = None
        elif dist.get_rank() == faulty:
            group["momentum"], words = 2.0, "momentum"
        refused(optim, words)


def closure_raises_where_nobody_else_steps() -> None:
    optim = optimizer_on(CHAIN)
    if dist.get_rank() == 0:
        optim.step(lambda: {}["no batch"])


def test_a_closure_that_raises_says_so_where_no_other_rank_comes():
    """Also in a first step, in which ranks find each other before they plan."""
    alone, *_ = rank_outcomes(closure_raises_where_nobody_else_steps, 4, pg_timeout=2)
    assert (alone.error, alone.message) == ("KeyError", "'no batch'")


@on_ranks(2)
def test_after_a_closure_that_raised_on_one_rank_all_go_on() -> None:
    """All go on with it, with another one, or with another while the first has lost its shards."""

    def closure() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("out of data")

    own = dist.get_rank() == 1
    error, words = (RuntimeError, "^out") if own else (ValueError, "^rank 1: RuntimeError: out")
    for goes_on_with in ("it", "another", "another beside it"):
        first = optim = optimizer_on(PAIR)
        with pytest.raises(error, match=f"{words} of data$"):
            optim.step(closure)
        assert not optim.state and not optim.is_broken
        if goes_on_with == "another beside it":
            first.param_groups[0]["params"] = [nn.Parameter(torch.ones(4, 4))]
        if goes_on_with != "it":
            del optim
            first = first if goes_on_with == "another beside it" else None
            optim = optimizer_on(PAIR)
        optim.step()
        assert not torch.equal(params_of(optim)[0].to_local(), torch.ones(3, 4))
