"""Plans of real models share the work as evenly as whole matrices can be shared."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from plans import make_plan

balance = pytest.importorskip("balance", reason="only the package and its tests are here")

SMALL = ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b")
CASES = [
    *itertools.product(SMALL, balance.RANKS),
    *itertools.product(["kimi-k2"], (256, 1024)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "ranks"), CASES)
def test_owners_of_a_real_model_are_evenly_loaded_and_wait_little_for_each_other(model, ranks):
    shapes = balance.shapes_of(model)
    for whole_experts in balance.expected_state(shapes, ranks).values():
        entries = balance.entries_of(shapes, ranks, whole_experts=whole_experts)
        found = balance.balance_of(make_plan(entries))
        bound = max(1.05 * found.pigeonhole, found.least_load)
        assert found.busiest <= bound
        # In the first chunk of Kimi K2, most owners have only experts, others a costlier matrix.
        most = 1.4 if model == "kimi-k2" else 1.15
        assert found.makespan <= max(most * found.pigeonhole, found.least_makespan)


@pytest.mark.parametrize("ranks", [8, 64])
def test_experts_as_parameters_of_their_own_are_shared_like_stacked_ones(ranks):
    stacked = [(16, 768, 2048), (16, 2048, 768), (4096, 2048)]
    single = 16 * [(768, 2048)] + 16 * [(2048, 768)] + [(4096, 2048)]
    plans = [make_plan(balance.entries_of(shapes, ranks)) for shapes in (stacked, single)]
    one, other = map(balance.balance_of, plans)
    assert (one.busiest, one.makespan) == (other.busiest, other.makespan)


# -- bounds ----------------------------------------------------------------------------------------


def optimum(costs: list[int], ranks: int) -> int:
    """The least load of the busiest of all assignments."""
    best = sum(costs)
    for owners in itertools.product(range(ranks), repeat=len(costs)):
        loads = [0] * ranks
        for owner, cost in zip(owners, costs):
            loads[owner] += cost
        best = min(best, max(loads))
    return best


def test_no_assignment_is_better_than_the_least_load():
    rng = random.Random(0)
    reached = 0
    for _ in range(60):
        ranks, kinds = rng.choice([2, 3, 4]), rng.sample(range(1, 60), 3)
        costs = [rng.choice(kinds) for _ in range(rng.randint(1, 6))]
        bound, best = balance.least_load(costs, ranks), optimum(costs, ranks)
        assert bound <= best
        reached += bound == best
    assert reached > 50


@pytest.mark.parametrize(
    ("costs", "ranks", "least"),
    [
        ([7], 4, 7),  # one matrix
        ([5] * 96, 64, 10),  # one owner has two
        ([5] * 7, 3, 15),  # one owner has three
        ([80] * 240 + [30] * 160, 256, 110),  # the small ones do not fit on the 16 ranks left
        ([4, 4, 4, 3, 3, 3], 3, 7),  # pairs
    ],
)
def test_the_least_load_of_a_few_distinct_costs(costs, ranks, least):
    assert balance.least_load(costs, ranks) == least


def test_a_limit_on_matrices_lengthens_the_makespan():
    costs = [80] * 96 + [30] * 64
    assert balance.least_makespan(costs, 64) == 160
    assert balance.least_makespan(costs, 64, chunk_size=1) == 80 + 80 + 30
    assert balance.least_makespan(costs, 64, chunk_size=2) == 160
