"""The multi-rank harness itself: results, failures, hangs and crashes are told apart."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from kernel import optimizer
from ranks import RankError, rank_outcomes, run_ranks


def gather_ranks(offset: int, scale: int = 1) -> list[int]:
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([offset + scale * dist.get_rank()]))
    return [int(value) for value in gathered] + [dist.get_rank()]


def test_results_come_back_in_rank_order():
    results = run_ranks(gather_ranks, 4, 10, scale=2)
    assert results == [[10, 12, 14, 16, rank] for rank in range(4)]


def environment() -> tuple[str, str, int]:
    return os.environ["LOCAL_KERNELS"], optimizer.__name__, torch.get_num_threads()


def test_ranks_load_the_kernel_that_the_tests_load():
    expected = (os.environ["LOCAL_KERNELS"], optimizer.__name__, 1)
    assert run_ranks(environment, 2) == [expected, expected]


def large_tensor() -> torch.Tensor:
    return torch.full((1 << 20,), float(dist.get_rank()))  # larger than a pipe's buffer


def test_large_results_arrive():
    for rank, tensor in enumerate(run_ranks(large_tensor, 2)):
        assert torch.equal(tensor, torch.full((1 << 20,), float(rank)))


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


def unpicklable() -> object:
    return lambda: None


def test_unpicklable_result_is_an_error_of_its_rank():
    with pytest.raises(RankError, match=r"rank 0 of 1: .*pickle"):
        run_ranks(unpicklable, 1)


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


def wait_for_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.barrier()


def test_collective_gives_up_at_the_process_group_timeout():
    with pytest.raises(RankError, match=r"rank 1 of 2: (RuntimeError|DistBackendError)"):
        run_ranks(wait_for_rank_0, 2, pg_timeout=2)


def crash_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()
    dist.barrier()


def test_crash_is_reported_with_its_exit_code():
    with pytest.raises(RankError, match=r"rank 1 of 3: Crashed: exit code -6"):
        run_ranks(crash_on, 3, 1)


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


def raise_everywhere() -> None:
    raise ValueError(f"rank {dist.get_rank()}")


def test_outcomes_of_a_fault_that_every_rank_sees():
    outcomes = rank_outcomes(raise_everywhere, 3)
    assert [outcome.message for outcome in outcomes] == ["rank 0", "rank 1", "rank 2"]
