"""Steps beside a fake device: what streams, collectives and the host touch is ordered."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from breaking import Fault
from fake_device import CUDA
from layouts import case
from offloaded import CLIPPED, Training, placed
from race_detector import Recorder, ordered_device
from rank_pool import RankPool

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="the device is made for builds without CUDA"
)

RANKS, STEPS = 2, 3
FP16: dict[str, Any] = {"ns_dtype": torch.float16}

# Options of the optimizer, and whether CPU offload is on. One matrix travels at a time, so that
# chunks are in flight together.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "fp16 arithmetic": (FP16, False),
    "QK-Clip": (CLIPPED, False),
    "ZeRO-2": ({"grad_reduce": "mean"}, False),
    "streamed": ({**FP16, **CLIPPED}, True),
    "ZeRO-2, streamed": ({"grad_reduce": "mean"}, True),
}


class Logits:
    """A recorder of attention logits, of which one head is to be clipped."""

    def take(self) -> dict[str, torch.Tensor]:
        return {"": torch.tensor([3.0, 1.0])}


def train(case: str, dropped: str | None = None) -> tuple[list[str], int, list[str]]:
    """The races of some steps, how many collectives they launched, and where waits are called.

    Args:
        case: of `CASES`.
        dropped: waits that are called there are ignored.
    """
    torch.set_num_threads(1)
    options, is_on = CASES[case]
    with ordered_device(dropped) as recorder:
        how: dict[str, Any] = {"chunk_size": 1, "is_on": is_on, **options}
        if "grad_reduce" in options:
            training = Training(process_group=dist.group.WORLD, **how)
        else:
            training = Training(placed(CUDA), **how)
        if "clip_config" in options:
            training.optimizer.qk_recorder = Logits()
        training.step(STEPS)
        training.set_gradients()  # and then a step of AdamW's alone, and what reads the weights
        for param in training.optimizer.param_groups[0]["params"]:
            param.grad = None
        training.optimizer.step()
        [param.detach().clone() for param in training.params.values()]
        return recorder.races, recorder.collectives, recorder.waits


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(RANKS) as pool:
        yield pool


@pytest.mark.parametrize("case", CASES)
def test_all_that_a_step_touches_is_ordered(case, ranks):
    for races, collectives, waits in ranks(train, case):
        assert races == [] and collectives >= 2 * STEPS and waits


@pytest.mark.parametrize("case, unordered", [
    ("fp16 arithmetic", ["[0, 1] wrote (all_to_all_single)"]),
    ("ZeRO-2", ["wrote (reduce_scatter", "read (all_reduce)", "wrote (all_gather"]),
    ("streamed", ["stream 0 wrote (copy_)", "compute wrote (_foreach_add_)"]),
])  # fmt: skip
def test_no_wait_of_ranks_can_be_left_out(case, unordered, ranks):
    sites = sorted({site for _, _, waits in ranks(train, case) for site in waits})
    found = {
        site: [race for races, *_ in ranks(train, case, site) for race in races] for site in sites
    }
    assert all(found.values()), found
    for queue in unordered:
        assert any(queue in race for races in found.values() for race in races), queue


# -- CPU offload, in one process -------------------------------------------------------------------


def load(training: Training) -> None:
    for _ in range(2):
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        training.step()


def turn_off_and_on(training: Training) -> None:
    training.optimizer.turn_off_cpu_offload()
    training.step()
    training.turn_on()


def change_dtype(training: Training) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        training.optimizer.param_groups[0]["momentum_dtype"] = dtype
        training.step()


def change_weights(training: Training) -> None:
    with torch.no_grad():
        for param in training.params.values():
            param.mul_(0.5)


# What is done between two steps.
SCENARIOS: dict[str, Callable[[Training], Any]] = {
    "stream": lambda training: None,
    "large slots": lambda training: training.turn_on(1 << 24),
    "load": load,
    "turn off": turn_off_and_on,
    "change dtype": change_dtype,
    "change weights": change_weights,
    "save": lambda training: copy.deepcopy(training.optimizer.state_dict()),
}


def stream(scenario: str) -> None:
    exact: dict[str, Any] = {"chunk_size": 1, "weight_rounding": "exact"}
    training = Training(lambda value: value.to(CUDA, torch.bfloat16), steps=1, **exact)
    SCENARIOS[scenario](training)
    training.step()


def recorded(scenario: str, dropped: str | None = None) -> Recorder:
    with ordered_device(dropped) as recorder:
        stream(scenario)
    return recorder


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_races_with_what_is_streamed(scenario, one_thread):
    assert recorded(scenario).races == []


def test_no_wait_for_what_is_streamed_can_be_left_out(one_thread):
    sites = sorted(set(recorded("stream").waits))
    assert len(sites) > 1
    for site in sites:
        assert recorded("stream", site).races, site


def fails(recorder: Recorder, number: int) -> bool:
    """True if a step has enough operations to fail at the given one."""
    training, memory = Training(steps=1, chunk_size=1), recorder.device.memory
    checkpoint = copy.deepcopy(training.optimizer.state_dict())
    resting = memory.now
    training.set_gradients()
    try:
        with Fault("aten.", number):
            training.optimizer.step()
        return False
    except RuntimeError:
        pass
    if training.optimizer.is_broken:
        training.optimizer.load_state_dict(checkpoint)
    training.step()
    assert recorder.races == [] and memory.now <= resting
    assert all(t.isfinite().all() for t in training.state().values())
    return True


def test_a_streamed_step_that_fails_anywhere_leaves_no_race_and_loading_repairs_it(one_thread):
    for number in itertools.count(1, 61):
        with ordered_device() as recorder, case(f"operation {number}"):
            if not fails(recorder, number):
                break
    assert number > 5 * 61
