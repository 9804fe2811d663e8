"""The multi-rank harness itself: results, failures, hangs and crashes are told apart."""

import os
import time

import torch
import torch.distributed as dist

from kernel import optimizer
from ranks import rank_outcomes, run_ranks


def environment() -> tuple[str, str, int]:
    return os.environ["LOCAL_KERNELS"], optimizer.__name__, torch.get_num_threads()


def test_ranks_load_the_kernel_that_the_tests_load():
    expected = (os.environ["LOCAL_KERNELS"], optimizer.__name__, 1)
    assert run_ranks(environment, 2) == [expected, expected]


def hang_on(rank: int) -> str:
    if dist.get_rank() == rank:
        time.sleep(60)
    return "done"


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
