"""What steps give an accelerator, counted without one: launches, host waits, memory, pointers.

Nothing is timed. A process of its own, in which Triton does not interpret, counts what one rank of
a real model does (tests/accelerator_path.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stub_driver
from fake_device import CUDA, fake_device

PROGRAM = Path(__file__).parent / "accelerator_path.py"

pytestmark = [
    pytest.mark.skipif(bool(stub_driver.missing()), reason=stub_driver.missing()),
    pytest.mark.skipif(
        torch.backends.cuda.is_built(), reason="the device is made for builds without CUDA"
    ),
]

# What a step was measured to take: launches of Triton's kernels, operations of torch that are
# kernels or copies, and collectives. A step may take 1.02 times as many.
BUDGETS = {
    "four layers in bf16, rank 0 of 8": (43, 16, 4),
    "four layers, rank 0 of 8": (43, 16, 4),
    "llama-3-8b, rank 0 of 8": (343, 99, 34),
    "llama-3-8b, rank 0 of 64": (56, 16, 4),
    "1,000 of 64 × 64, rank 0 of 64": (71, 17, 2),
    "30B of experts, rank 0 of 8": (1393, 478, 8),
}


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, Any]]:
    """The facts of all cases, from one process, which shares what Triton compiles."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, PROGRAM, *BUDGETS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


@pytest.fixture(params=BUDGETS)
def case(request, counted) -> tuple[str, dict[str, Any]]:
    """The name of a case, and its facts."""
    return request.param, counted[request.param]


@pytest.mark.slow
def test_a_step_stays_within_its_budget_of_launches(case):
    name, facts = case
    counted = [sum(facts[kind].values()) for kind in ("launches", "operations", "collectives")]
    assert all(0 < n <= 1.02 * most for n, most in zip(counted, BUDGETS[name])), counted


def test_a_step_leaves_no_memory_behind(case):
    _, facts = case
    assert len(facts["device_bytes"]) >= 2 and len(set(facts["device_bytes"])) == 1


def test_a_step_never_makes_the_host_wait_and_copies_from_no_pageable_memory(case):
    _, facts = case
    assert facts["waits"] == {}


def test_programs_of_a_launch_cover_its_tensors_once(case):
    _, facts = case
    assert facts["launches"] and facts["wrong_grids"] == []


def test_pointers_of_collectives_and_kernels_can_be_accessed_in_vectors(case):
    _, facts = case
    misaligned = sorted(facts["misaligned"].items(), key=lambda item: -item[1])
    assert not misaligned, "\n".join(f"{count} × {what}" for what, count in misaligned[:20])


def test_the_fake_device_notes_what_makes_the_host_wait():
    with fake_device() as device:
        there = torch.ones(4, device=CUDA)
        float(there.sum())
        there.sum().item()
        there.nonzero()
        assert device.waits == {"__float__": 1, "_local_scalar_dense": 1, "nonzero": 1}
        device.waits.clear()
        here = torch.zeros(4)
        here.copy_(there)
        here.copy_(there, non_blocking=True)
        there.copy_(here, non_blocking=True)
        there.to("cpu")
        assert device.waits == {"blocking copy": 1, "pageable copy": 3}
        device.waits.clear()
        device.locked[here.data_ptr()] = 16
        there.copy_(here, non_blocking=True)
        there.add_(1.0).copy_(there * 2)
        assert not device.waits
