"""The names that a step's phases have in torch.profiler's traces."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kernel import optimizer

pytestmark = pytest.mark.usefixtures("one_thread")


def take_steps() -> None:
    params = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(10)]
    groups = [{"params": params, "use_muon": True}]
    optim = optimizer.Muon(
        groups, chunk_size=1, none_grad=False, ns_coefficients="quintic", ns_steps=1
    )
    for p in params:
        p.grad = torch.randn_like(p)
    for _ in range(6):
        optim.step()


def is_named(event: Any) -> bool:
    while event is not None and not event.name.startswith("Muon."):
        event = event.cpu_parent
    return event is not None


@pytest.mark.slow
def test_threads_that_step_at_once_have_their_own_names():
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as trace:
            threads = [threading.Thread(target=take_steps) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    arithmetic = [event for event in trace.events() if event.name.startswith("aten::_foreach")]
    assert len(arithmetic) > 100
    assert all(map(is_named, arithmetic))
