"""All ranks that a chain of meshes connects hear of what is wrong on any of them, in seconds."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import random
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kernel import optimizer
from ranks import rank_outcomes, run_ranks

agreement = optimizer.distributed.agreement
Agreement, StepNotes = agreement.Agreement, agreement.StepNotes

CHAIN = ((0, 1), (1, 2), (2, 3))
STAR = ((0, 1), (0, 2), (0, 3), (0, 4))
NESTED = ((0, 1, 2, 3), (0, 1), (1, 2, 3), (3, 4))


def notes_on(sets, plan=("a.weight: (6, 4)",), gradients=("a.weight",)):
    return {ranks: StepNotes(plan, gradients) for ranks in sets if dist.get_rank() in ranks}


def compare(shared, *notes_and_error):
    """What is wrong, by the decision of all."""
    decision = decide(shared, *notes_and_error)
    return decision if isinstance(decision, str) else None


def decide(shared, notes, error, **options):
    """Whether to skip, or what is wrong."""
    try:
        return shared.check(notes, error, notes, **options)
    except ValueError as problem:
        return str(problem)


def in_seconds(call, *args, limit=10):
    start = time.monotonic()
    try:
        return call(*args)
    finally:
        assert time.monotonic() - start < limit


def fault_and_recovery(sets, faulty, fault):
    """Answers before, with, and after a fault on one rank."""
    shared = Agreement()
    answers = [compare(shared, notes_on(sets), None)]
    notes, error = notes_on(sets), None
    if dist.get_rank() == faulty:
        where = max(notes)
        if fault == "error":
            notes, error = notes_on(sets, [], []), "out of data"
        if fault == "plan":
            notes[where] = StepNotes(["a.weight: (4, 6)"], ["a.weight"])
        if fault == "gradient":
            notes[where] = StepNotes(notes[where].lines, [])
    answers.append(in_seconds(compare, shared, notes, error))
    answers.append(in_seconds(compare, shared, notes_on(sets), None))
    return answers


def expected_words(sets, faulty, fault):
    if fault == "error":
        return f"rank {faulty}: out of data"
    if fault == "gradient":
        return f"gradients are missing on some ranks only: a.weight on ranks [{faulty}]"
    where = max(ranks for ranks in sets if faulty in ranks)
    other = faulty if faulty != where[0] else where[1]
    return f"ranks {where[0]} and {other} would do different things; "


@pytest.mark.parametrize("fault", ["error", "plan", "gradient"])
@pytest.mark.parametrize(
    ("sets", "faulty"),
    [
        (((0, 1),), 1),
        (CHAIN, 0),
        (CHAIN, 3),
        (STAR, 4),
        (NESTED, 2),
        (NESTED, 4),
    ],
    ids=str,
)
def test_a_fault_reaches_all_connected_ranks_and_leaves_nothing_behind(sets, faulty, fault):
    ranks = max(max(s) for s in sets) + 1
    for before, answer, after in run_ranks(fault_and_recovery, ranks, sets, faulty, fault):
        assert before is None
        assert expected_words(sets, faulty, fault) in answer
        assert after is None


def test_unconnected_ranks_hear_nothing():
    sets = ((0, 1), (2, 3))
    first, second, third, fourth = run_ranks(fault_and_recovery, 4, sets, 3, "error")
    assert first == second == [None] * 3
    assert third == fourth == [None, "rank 3: out of data", None]


def random_sets(seed, ranks):
    """A connected hypergraph: every rank but the first joins one that came before it."""
    draw = random.Random(seed)
    sets = set()
    for rank in range(1, ranks):
        others = draw.sample(range(rank), draw.randint(1, min(rank, 2)))
        sets.add(tuple(sorted([rank, *others])))
    for _ in range(draw.randint(0, 3)):
        sets.add(tuple(sorted(draw.sample(range(ranks), draw.randint(2, ranks)))))
    return sorted(sets)


def many_hypergraphs(seeds):
    ranks, answers = dist.get_world_size(), []
    for seed in seeds:
        sets = random_sets(seed, ranks)
        draw = random.Random(seed)
        fault, faulty = draw.choice(["error", "plan", "gradient"]), draw.randrange(ranks)
        answers.append(fault_and_recovery(sets, faulty, fault))
        assert answers[-1][0] is None and answers[-1][2] is None, (sets, answers[-1])
        assert expected_words(sets, faulty, fault) in answers[-1][1], (sets, answers[-1])
    return answers


@pytest.mark.parametrize(
    "ranks, seeds",
    [
        (5, range(12)),
        (6, range(12)),
        pytest.param(4, range(1000, 1070), marks=pytest.mark.slow),
        pytest.param(6, range(2000, 2070), marks=pytest.mark.slow),
        pytest.param(8, range(3000, 3060), marks=pytest.mark.slow),
    ],
)
def test_any_connected_sets_will_do(ranks, seeds):
    answers = run_ranks(many_hypergraphs, ranks, seeds)
    assert all(other == answers[0] for other in answers)


def exchanges_of(steps):
    """Runs steps, given as the sets of each; returns how many gathers each took on this rank."""
    totals, calls, shared, gather = [0], [], Agreement(), agreement.all_gather

    def counted(*args):
        calls.append(args)
        return gather(*args)

    agreement.all_gather = counted
    for sets in steps:
        assert compare(shared, notes_on(sets), None) is None
        totals.append(len(calls))
    return [after - before for before, after in itertools.pairwise(totals)]


def test_a_step_takes_one_exchange_and_a_single_set_one_more_at_first():
    assert run_ranks(exchanges_of, 3, [((0, 1, 2),)] * 3) == [[2, 1, 1]] * 3


def test_a_chain_takes_one_exchange_a_step_too():
    for counts in run_ranks(exchanges_of, 4, [CHAIN] * 3):
        assert counts[1:] == [1, 1]


def test_ranks_without_company_exchange_nothing():
    assert run_ranks(exchanges_of, 2, [(), ((0,), (1,))]) == [[0, 0]] * 2


@pytest.mark.parametrize(
    "after",
    [
        ((0, 1), (2, 3)),
        ((0, 1, 2, 3),),
        ((1, 2),),
        (),
        ((0, 4), (0, 1), (1, 2), (2, 3)),
        ((2, 3, 4),),
    ],
    ids=str,
)
def test_sets_may_change_on_all_their_ranks(after):
    steps = [CHAIN, CHAIN, after, after, CHAIN, CHAIN]
    for rank, counts in enumerate(run_ranks(exchanges_of, 5, steps)):
        connected = any(rank in ranks for ranks in after)
        assert counts[3] == int(connected)
        assert counts[5] == int(rank != 4)


def merge():
    shared = Agreement()
    steps = [((0, 1), (2, 3)), ((0, 1), (1, 2), (2, 3))]
    first, second = (compare(shared, notes_on(sets), None) for sets in steps)
    error = "out of data" if dist.get_rank() == 0 else None
    return first, second, compare(shared, notes_on(steps[1]), error)


def test_unions_may_merge():
    assert run_ranks(merge, 4) == [(None, None, "rank 0: out of data")] * 4


def change_on_one_rank(own, error):
    shared = Agreement()
    assert compare(shared, notes_on(CHAIN), None) is None
    odd = dist.get_rank() == 2
    first = in_seconds(compare, shared, notes_on(own if odd else CHAIN), error if odd else None)
    return first, in_seconds(compare, shared, notes_on(CHAIN), None)


@pytest.mark.parametrize(
    ("own", "error", "words"),
    [
        (((1, 2),), None, "rank 3 has parameters on a mesh of ranks [2, 3], rank 2 has none there"),
        ((), None, "rank 1 has parameters on a mesh of ranks [1, 2], rank 2 has none there"),
        (((0, 2), *CHAIN), None, "rank 2 has parameters on a mesh of ranks [0, 2], rank 0 has"),
        (((1, 2),), "no such mesh", "rank 2: no such mesh"),
    ],
    ids=str,
)
def test_sets_that_change_on_one_rank_raise_on_all(own, error, words):
    for first, second in run_ranks(change_on_one_rank, 4, own, error):
        assert words in first
        assert second is None


def contradict_from_the_start():
    sets = ((0, 1, 2, 3), (0, 1)) if dist.get_rank() == 0 else ((0, 1, 2, 3),)
    shared = Agreement()
    first = in_seconds(compare, shared, notes_on(sets), None)
    return first, in_seconds(compare, shared, notes_on(((0, 1, 2, 3),)), None)


def test_a_smaller_mesh_that_only_one_rank_has_raises_at_the_first_step():
    words = "rank 0 has parameters on a mesh of ranks [0, 1], rank 1 has none there"
    for first, second in run_ranks(contradict_from_the_start, 4):
        assert words in first
        assert second is None


def two_agreements(in_turn):
    """Optimizers of different unions, which one rank steps the other way round at the third step"""
    both = [(Agreement(), CHAIN), (Agreement(), ((0, 1, 2, 3), (1, 2)))]
    answers = []
    for step in range(4):
        error = "out of data" if dist.get_rank() == 3 and step == 1 else None
        order = both[::-1] if dist.get_rank() == 1 and step == 2 and not in_turn else both
        answers.append([in_seconds(compare, one, notes_on(s), error) for one, s in order])
    return answers


@pytest.mark.parametrize("in_turn", [True, False])
def test_two_optimizers_step_in_turn_or_are_told(in_turn):
    agreed, fault = [None, None], ["rank 3: out of data"] * 2
    for first, second, third, fourth in run_ranks(two_agreements, 4, in_turn):
        assert (first, second, fourth) == (agreed, fault, agreed)
        if in_turn:
            assert third == agreed
        else:
            assert all("ranks 0 and 1 step different optimizers" in answer for answer in third)


def fresh_on_one_rank():
    shared = Agreement()
    compare(shared, notes_on(((0, 1),)), None)
    if dist.get_rank() == 1:
        shared = copy.deepcopy(shared)
    return [in_seconds(compare, shared, notes_on(((0, 1),)), None) for _ in range(2)]


def test_a_copy_on_one_rank_is_told_apart_and_then_counts():
    for first, second in run_ranks(fresh_on_one_rank, 2):
        assert "ranks 0 and 1 step different optimizers" in first
        assert second is None


def votes(wanting):
    """What is decided where some ranks want to skip; with a fault; and where none wants to."""
    shared, wants = Agreement(), dist.get_rank() in wanting
    error = "out of data" if dist.get_rank() == 3 else None
    return [
        decide(shared, notes_on(CHAIN), None, skip=wants),
        decide(shared, notes_on(CHAIN), error, skip=wants),
        decide(shared, notes_on(CHAIN), None),
    ]


@pytest.mark.parametrize("wanting", [(0,), (2, 3)], ids=str)
def test_one_rank_that_wants_to_skip_makes_all_that_are_connected_skip(wanting):
    expected = [True, "rank 3: out of data", False]
    assert run_ranks(votes, 4, wanting) == [expected] * 4


def groups_made_anew():
    shared = Agreement()
    for _ in range(3):
        assert compare(shared, notes_on(CHAIN), None) is None
        # As when the process group was replaced but its store was not.
        optimizer.distributed.connections._cache.clear()
        shared = pickle.loads(pickle.dumps(shared))


def test_groups_of_the_same_ranks_can_be_made_anew_in_one_store():
    run_ranks(groups_made_anew, 4)


def process_group_made_anew():
    shared = Agreement()
    for lifetime in range(3):
        assert [compare(shared, notes_on(CHAIN), None) for _ in range(2)] == [None, None]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore(str(lifetime), dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def test_the_process_group_can_be_made_anew():
    run_ranks(process_group_made_anew, 4)


def one_stays_away(at):
    shared = Agreement()
    for step in range(2):
        if dist.get_rank() == 2 and step == at:
            return None
        start = time.monotonic()
        try:
            compare(shared, notes_on(((0, 1), (1, 2))), None)
        finally:
            assert time.monotonic() - start < 10


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_stays_away_is_left_to_the_timeout_of_the_process_group(at):
    first, second, third = rank_outcomes(one_stays_away, 3, at, pg_timeout=2, timeout=30)
    assert third.error is None
    for outcome in (first, second):
        assert outcome.error == "RuntimeError"
        assert "have to call step() together" in outcome.message
    assert "ranks [1, 2] have" in second.message if at == 0 else "[0, 1, 2]" in second.message


def one_has_no_interface(bogus):
    if dist.get_rank() in bogus:
        os.environ["GLOO_SOCKET_IFNAME"] = "bogus0"
    start = time.monotonic()
    try:
        compare(Agreement(), notes_on(((0, 1, 2),)), None)
    finally:
        assert time.monotonic() - start < 10  # not the timeout


@pytest.mark.parametrize("bogus", [(0,), (2,), (0, 1, 2)], ids=str)
def test_where_gloo_has_no_interface_on_a_rank_all_raise_at_once_and_name_the_variable(bogus):
    for outcome in rank_outcomes(one_has_no_interface, 3, bogus, pg_timeout=60):
        assert outcome.error == "RuntimeError"
        said = "|".join(f"rank {rank} has no network" for rank in bogus)
        assert re.match(said, outcome.message)
        assert (
            "compare notes over gloo, by the network interface that GLOO_SOCKET_IFNAME names"
            in (outcome.message)
        )
        assert "bogus0" in outcome.message


# -- connections -------------------------------------------------------------------------------


def gathered_by(sizes):
    """What the first ranks gather, so many of them at a time."""
    rank, gathered = dist.get_rank(), {}
    for size in sizes:
        if rank < size:
            ranks, sent = tuple(range(size)), torch.tensor([[rank, -rank]])
            gathered[size] = agreement.all_gather(ranks, sent)
    return gathered


def test_every_rank_gathers_what_all_have_in_order_whatever_their_number():
    sizes = [*range(2, 10), 13, 16, 19]
    for rank, gathered in enumerate(run_ranks(gathered_by, max(sizes), sizes)):
        assert list(gathered) == [size for size in sizes if size > rank]
        for size in gathered:
            expected = torch.stack([torch.arange(size), -torch.arange(size)], 1).unsqueeze(1)
            assert torch.equal(gathered[size], expected)


def sockets_opened():
    def count():
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(f) and os.readlink(f).startswith("socket:") for f in links)

    shared, everyone = Agreement(), tuple(range(dist.get_world_size()))
    before = count()
    for _ in range(2):
        assert compare(shared, notes_on((everyone,)), None) is None
    return count() - before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts sockets as Linux lists them")
@pytest.mark.parametrize(
    ("ranks", "peers"),
    [(8, 7), (13, 7 + 1), (16, 7 + 1), pytest.param(64, 14, marks=pytest.mark.slow)],
)
def test_a_rank_connects_with_seven_for_each_eightfold_of_ranks_and_listens_on_one(ranks, peers):
    assert max(run_ranks(sockets_opened, ranks, timeout=500)) == peers + 1


def one_dies(victim):
    shared, everyone = Agreement(), tuple(range(dist.get_world_size()))
    assert compare(shared, notes_on((everyone,)), None) is None
    if dist.get_rank() == victim:
        os._exit(1)
    in_seconds(compare, shared, notes_on((everyone,)), None)


@pytest.mark.parametrize("victim", [0, 9, 17])
def test_where_a_rank_has_died_all_raise_long_before_the_timeout(victim):
    for rank, outcome in enumerate(rank_outcomes(one_dies, 18, victim, pg_timeout=100)):
        assert outcome.error == ("Crashed" if rank == victim else "RuntimeError"), outcome
        assert rank == victim or "have to call step() together" in outcome.message


# -- optimizers --------------------------------------------------------------------------------


def chained_optimizer(**options):
    groups = []
    for number, ranks in enumerate(CHAIN):
        mesh = DeviceMesh("cpu", list(ranks))
        if dist.get_rank() in ranks:
            param = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
            param.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
            names = [f"{number}.weight"]
            groups.append({"params": [param], "names": names, "use_muon": True})
    return optimizer.Muon(groups, lr=0.1, **options)


def step_a_chain(faulty, fault):
    optim = chained_optimizer()
    group = optim.param_groups[0]
    fails = dist.get_rank() == faulty
    if fails and fault == "momentum":
        group["momentum"] = 2.0
    if fails and fault == "gradient":
        group["params"][0].grad = None

    def closure():
        if fails and fault == "closure":
            raise KeyError("no batch")
        return 1.0

    try:
        in_seconds(optim.step, closure)
    finally:
        assert not optim.state
        for param in (p for g in optim.param_groups for p in g["params"]):
            assert torch.equal(param.to_local(), torch.ones(3, 4))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("faulty", [0, 3])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("momentum", "momentum must be a number in [0, 1), found 2.0"),
        ("gradient", "gradients are missing on some ranks only: {}.weight on ranks [{}]"),
        ("closure", "no batch"),
    ],
)
def test_a_fault_at_one_end_of_a_chain_raises_on_all_and_touches_nothing(faulty, fault, words):
    words = words.format(min(faulty, 2), faulty)
    for rank, outcome in enumerate(rank_outcomes(step_a_chain, 4, faulty, fault, pg_timeout=20)):
        own = "KeyError" if fault == "closure" and rank == faulty else "ValueError"
        assert outcome.error == own, outcome
        assert words in outcome.message


def closure_raises_where_nobody_else_steps():
    optim = chained_optimizer()
    if dist.get_rank() == 0:
        optim.step(lambda: {}["no batch"])


def test_a_closure_that_raises_says_so_where_no_other_rank_comes():
    """Also in a first step, in which ranks find each other before they plan."""
    alone, *_ = rank_outcomes(closure_raises_where_nobody_else_steps, 4, pg_timeout=2)
    assert (alone.error, alone.message) == ("KeyError", "'no batch'")


def closure_recovers(goes_on_with):
    mesh = init_device_mesh("cpu", (2,))

    def make():
        param = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        param.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
        group = {"params": [param], "names": ["a.weight"], "use_muon": True}
        return param, optimizer.Muon([group], lr=0.1)

    param, optim = make()

    def closure():
        if dist.get_rank() == 1:
            raise RuntimeError("out of data")

    kind = RuntimeError if dist.get_rank() == 1 else ValueError
    words = "^out of data$" if dist.get_rank() == 1 else "^rank 1: RuntimeError: out of data$"
    with pytest.raises(kind, match=words):
        optim.step(closure)
    first = optim
    if goes_on_with == "another, while the first trains other parameters":
        first.param_groups[0]["params"] = [nn.Parameter(torch.ones(4, 4))]
        param, optim = make()
    elif goes_on_with == "another":
        del first, optim
        gc.collect()
        param, optim = make()
    optim.step()
    assert not torch.equal(param.to_local(), torch.ones(3, 4))


@pytest.mark.parametrize(
    "goes_on_with", ["it", "another", "another, while the first trains other parameters"]
)
def test_after_a_closure_that_raised_on_one_rank_all_go_on(goes_on_with):
    run_ranks(closure_recovers, 2, goes_on_with)
