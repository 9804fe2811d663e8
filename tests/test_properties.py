"""What holds of every training, whatever its shapes, layouts, options, gradients, or garbage.

`hypothesis` draws them, and shows the smallest example of a failure. Runs are alike each time;
``pytest --hypothesis-profile=night`` looks further (conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings

from kernel import optimizer
from rank_pool import RankPool
from strategies import cases
from trainings import Case, takes_the_steps_of_one_process

Muon = optimizer.Muon


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As on ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as ranks:
        yield ranks


on_ranks = pytest.mark.parametrize("pool", [1, 2, 3, 4], indirect=True)


def examples(count: int) -> settings:
    """So many, in the profile that is always run."""
    return settings(max_examples=max(1, round(count * settings.default.max_examples / 100)))


# -- layouts ---------------------------------------------------------------------------------------


def check_layouts(pool: RankPool, count: int) -> None:
    @examples(count)
    @given(case=cases(pool.ranks))
    def check(case: Case) -> None:
        pool(takes_the_steps_of_one_process, case)

    check()


@on_ranks
def test_any_training_takes_the_steps_of_one_process_and_changes_nothing_else(pool):
    check_layouts(pool, 10)
