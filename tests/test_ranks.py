"""The multi-rank harness itself: results, failures, hangs and crashes are told apart."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from kernel import optimizer
from ranks import RankError, rank_outcomes, run_ranks


def environment() -> tuple[str, str, int]:
    return os.environ["LOCAL_KERNELS"], optimizer.__name__, torch.get_num_threads()


def test_ranks_load_the_kernel_that_the_tests_load():
    expected = (os.environ["LOCAL_KERNELS"], optimizer.__name__, 1)
    assert run_ranks(environment, 2) == [expected, expected]


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the reason")
    time.sleep(60)


def test_exception_names_the_rank_and_kills_the_others():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 of 4: ValueError: the reason") as caught:
        run_ranks(raise_on, 4, 2)
    assert time.monotonic() - start < 30
    assert "in raise_on" in str(caught.value), "the traceback is missing"
    assert "rank 0" not in str(caught.value)


def hang_on(rank: int) -> str:
    if dist.get_rank() == rank:
        time.sleep(60)
    return "done"


def test_hanging_rank_is_killed_at_the_timeout_and_says_where_it_hung():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2: TimedOut: no result in 3 s") as caught:
        run_ranks(hang_on, 2, 1, timeout=3)
    assert time.monotonic() - start < 30
    assert "hang_on" in str(caught.value), "the stack is missing"


def end_differently() -> str:
    if dist.get_rank() == 0:
        raise KeyError("missing")
    if dist.get_rank() == 1:
        os.abort()
    return hang_on(2)


def test_outcomes_tell_how_each_rank_ended():
    outcomes = rank_outcomes(end_differently, 4, timeout=3)
    assert [outcome.error for outcome in outcomes] == ["KeyError", "Crashed", "TimedOut", None]
    assert outcomes[0].message == "'missing'"
    assert outcomes[3].value == "done"
