"""The names that a step's phases have in torch.profiler's traces."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kernel import optimizer
from layouts import set_gradients

pytestmark = pytest.mark.usefixtures("one_thread")


def take_steps() -> None:
    params = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(10)]
    optim = optimizer.Muon([{"params": params, "use_muon": True}], chunk_size=1, none_grad=False)
    set_gradients(params)
    for _ in range(6):
        optim.step()


def is_named(event: Any) -> bool:
    return event is not None and (event.name.startswith("Muon.") or is_named(event.cpu_parent))


@pytest.mark.slow
def test_threads_that_step_at_once_have_their_own_names():
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with (
            profile(activities=[ProfilerActivity.CPU], experimental_config=config) as trace,
            ThreadPoolExecutor(2) as pool,
        ):
            list(pool.map(lambda _: take_steps(), range(2)))
    finally:
        sys.setswitchinterval(interval)
    arithmetic = [event for event in trace.events() if event.name.startswith("aten::_foreach")]
    assert len(arithmetic) > 100
    assert all(map(is_named, arithmetic))
