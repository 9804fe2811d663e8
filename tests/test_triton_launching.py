"""What launches of kernels promise: one compilation for one kernel, all of them before a
step, errors that change nothing, and few launches, host waits and bytes on accelerators.

Nothing is timed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import threading
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stub_driver
from kernel import optimizer
from layouts import EXACT, Group, Twins, Weight, whole
from ranks import on_ranks

pytest.importorskip("triton")
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

triton_kernels = optimizer.triton_kernels
elementwise, launching, symmetric = (
    import_module(f"{optimizer.__name__}.triton_kernels.{name}")
    for name in ("elementwise", "launching", "symmetric")
)

# -- one key where one kernel is needed ------------------------------------------------------------

# Of internals, since a mistaken key would launch a kernel that was compiled for other numbers:
# Triton makes a 1 in a tuple a constant, and weights would be wrong without a word.

SHAPES = [(2048,), (5008,), (4096,), (1,), (33000,), (3, 2048), (16, 40), (40, 16), (2, 9, 80)]
CONFIGS = [None, launching.SymmetricConfig(32, 32, 4, 3, width=2, descriptors=True)]
MEMORY = {dtype: torch.zeros(1 << 18, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}


class Keys:
    """Takes the place of `launching.launch`; holds each launch against the first of its key."""

    def __init__(self):
        self.first = {}
        self.again = 0

    def __call__(self, kernel, key, device, programs, arguments, constants, **options):
        needed = native_specialize_impl(CUDABackend, tuple(arguments), False, True, True)
        needed = (kernel, needed, sorted(constants.items(), key=str), options)
        self.again += (key, device) in self.first
        assert self.first.setdefault((key, device), needed) == needed, key


@pytest.fixture
def keys(monkeypatch):
    found = Keys()
    monkeypatch.setattr(launching, "launch", found)
    return found


def tensor(shape, dtype, offset):
    """A view of memory that others of the dtype share: little is written, and nothing read."""
    return MEMORY[dtype][offset:][: torch.Size(shape).numel()].view(shape)


def test_launches_of_lists_have_one_key_only_where_they_need_one_kernel(keys):
    draw = random.Random(0)
    for _ in range(1500):
        shapes = [draw.choice(SHAPES) for _ in range(draw.choice([1, 2, 2, 3, 5, 33]))]
        offset = draw.choice([0, 0, 0, 1, 8])  # 1: addresses that no vector fits
        dtypes = torch.float32, torch.float32, torch.bfloat16
        B, G, out = ([tensor(shape, dtype, offset) for shape in shapes] for dtype in dtypes)
        how = {"momentum": draw.choice([0.9, 1.0]), "weight": 1.0, "nesterov": True}
        elementwise.update_momentum(B, G, out, **how)
        rates = {"rate": draw.choice([0.1, 1, torch.tensor(0.1)]), "decay": 0.0}
        elementwise.update_weights(out, B, cautious=False, **rates)
    assert keys.again > 1000


def test_launches_of_batches_have_one_key_only_where_they_need_one_kernel(keys):
    for n, rows, cols, offset in itertools.product((1, 2, 16), (1, 16, 33), (1, 40, 64), (0, 1, 8)):
        X = tensor((n, rows, cols), torch.float32, offset)
        numbers = torch.zeros(n + 1)[offset % 2 :][:n]
        for divided_by, factor in itertools.product((None, numbers), (1.01, 1)):
            sixteen = tensor(X.shape, torch.bfloat16, 0)
            elementwise.normalize(X, sixteen, factor, 1e-7, 0.0, divided_by, 1e18, 4.0)
        out = torch.zeros(n, rows, rows)
        for alpha, beta, config in itertools.product((1.0, 1), (0.0, 0.5), CONFIGS):
            symmetric.symmetric_product(X, X.mT, alpha, beta, out, out, config)
    assert keys.again > 100


# -- kernels are compiled before a step ------------------------------------------------------------

NO_COMPILER = RuntimeError("Failed to find C compiler.\nThe second line.")


class Launches:
    """Counts launches, or has them fail, on CPUs that take the path of accelerators."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Exception | None = None):
        self.launch, self.error, self.count = launching.launch, error, 0
        patch.setattr(launching, "launch", self)
        patch.setattr(triton_kernels, "DEVICE_TYPES", ("cpu",))

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error
        self.launch(*arguments, **options)


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


def trained(steps: int, **options: Any) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(24, 16, generator=generator))
    groups = [{"params": [param], "use_muon": True}]
    optim = optimizer.Muon(groups, ns_dtype=torch.float32, none_grad=False, **options)
    param.grad = torch.randn(24, 16, generator=generator)
    for _ in range(steps):
        optim.step()
    return optim, param.detach()


@pytest.mark.parametrize("error, raised, named", [
    (NO_COMPILER, RuntimeError, r"C compiler.*python3-dev.*triton=False"),
    (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError, "no memory"),
], ids=["no compiler", "no memory"])  # fmt: skip
def test_where_a_kernel_cannot_be_launched_a_step_raises_and_changes_nothing(
    error, raised, named, launches
):
    optim, param = trained(0)
    before, launches.error = param.clone(), error
    for count in (1, 2):  # a retry does not go on by itself
        with pytest.raises(raised, match=named) as caught:
            optim.step()
        assert "second line" not in str(caught.value) and launches.count == count
    assert torch.equal(param, before) and not optim.state and not optim.is_broken
    launches.error = None
    optim.step()
    assert torch.equal(param, trained(1)[1])


def test_a_plan_is_warmed_up_once(launches):
    optim, _ = trained(1)
    first, launches.count = launches.count, 0
    optim.step()
    assert 0 < launches.count < first


def test_kernels_turned_off_in_one_optimizer_or_thread_stay_on_in_others(launches):
    with_kernels, ours = trained(1)
    launches.count, launches.error = 0, NO_COMPILER
    _, theirs = trained(1, triton=False)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert launches.count == 0
    launches.error = None
    with_kernels.step()
    assert launches.count > 0
    seen = []
    with triton_kernels.enabled(False):
        thread = threading.Thread(target=lambda: seen.append(triton_kernels.is_used_on("cpu")))
        thread.start()
        thread.join()
        seen.append(triton_kernels.is_used_on("cpu"))
    assert [*seen, triton_kernels.is_used_on("cpu")] == [True, False, True]


@on_ranks(1)
def test_without_triton_steps_are_those_of_torch_with_one_warning() -> None:
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)
        _, expected = trained(2, triton=False)
        patch.setattr(triton_kernels, "is_installed", lambda: False)
        with pytest.warns(RuntimeWarning, match="Triton is not installed") as caught:
            _, found = trained(2)
            trained(1)
            trained(1, triton=False)
    assert len([w for w in caught if issubclass(w.category, RuntimeWarning)]) == 1
    assert launches.count == 0 and torch.equal(found, expected)


@pytest.mark.parametrize("lacks", ["compiler", "triton", "kernels"])
@on_ranks(3)
def test_one_rank_that_lacks_something_makes_all_raise_before_they_write(lacks: str) -> None:
    """The last rank lacks a compiler, Triton or kernels; it owns no matrix."""
    last = dist.get_rank() == dist.get_world_size() - 1
    named = {"compiler": "C compiler", "triton": "Triton", "kernels": "triton = False"}[lacks]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        Launches(patch, NO_COMPILER if last and lacks == "compiler" else None)
        if last and lacks == "triton":
            patch.setattr(triton_kernels, "is_installed", lambda: False)
        mesh = (dist.get_world_size(),)
        group = Group([Weight((24, 16), mesh, (0,))], {"beta2": 0.9})
        options = {**EXACT, "triton": not (last and lacks == "kernels")}
        twins = Twins.placed([group], options)
        ((_, param, _),) = twins.pairs
        param.grad = torch.ones_like(param)
        before = whole(param)
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError), match=named):
                twins.ours.step()
        assert torch.equal(whole(param), before) and not twins.ours.is_broken


# -- what steps give an accelerator ----------------------------------------------------------------

# What a step of a real model was measured to take: launches of Triton's kernels, operations of
# torch that are kernels or copies, and collectives. A step may take 1.02 times as many.
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
    """The facts of all cases, from one process, in which Triton does not interpret."""
    if stub_driver.missing() or torch.backends.cuda.is_built():
        pytest.skip(stub_driver.missing() or "the device is made for builds without CUDA")
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    program = Path(__file__).parent / "accelerator_path.py"
    command = [sys.executable, program, *BUDGETS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("case", BUDGETS)
def test_a_step_stays_within_its_budget_of_launches(case, counted):
    kinds = ("launches", "operations", "collectives")
    taken = [sum(counted[case][kind].values()) for kind in kinds]
    assert all(0 < n <= 1.02 * most for n, most in zip(taken, BUDGETS[case])), taken


@pytest.mark.parametrize("what", ["waits", "misaligned"])
@pytest.mark.parametrize("case", BUDGETS)
def test_no_step_waits_copies_pageable_memory_or_misses_vectors(case, what, counted):
    assert counted[case]["launches"] and not counted[case][what], counted[case][what]


@pytest.mark.parametrize("case", BUDGETS)
def test_a_step_leaves_no_memory_behind(case, counted):
    held = counted[case]["device_bytes"]
    assert len(held) >= 2 and len(set(held)) == 1
