"""Kernels that can't be launched: found out before a step, and replaced by torch on all ranks."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from kernel import optimizer
from layouts import EXACT, Group, Twins, Weight, whole
from ranks import run_ranks

pytest.importorskip("triton")

NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable."
triton_kernels = optimizer.triton_kernels


class Launches:
    """Takes the place of the function that launches element-wise kernels."""

    def __init__(self, launch, error=None):
        self.launch, self.error, self.count = launch, error, 0

    def __call__(self, *arguments, **constants):
        self.count += 1
        if self.error is not None:
            raise self.error
        return self.launch(*arguments, **constants)


@pytest.fixture
def launches(monkeypatch):
    return use_on_cpu(monkeypatch)


def use_on_cpu(patch: pytest.MonkeyPatch, error: Exception | None = None) -> Launches:
    """Lets CPUs take the path of accelerators, on which kernels are interpreted."""
    patch.setattr(triton_kernels, "DEVICE_TYPES", ("cpu",))
    elementwise = import_module(f"{optimizer.__name__}.triton_kernels.elementwise")
    launches = Launches(elementwise._launch, error)
    patch.setattr(elementwise, "_launch", launches)
    trial = import_module(f"{optimizer.__name__}.step.kernel_trial")
    trial._try_batch.cache_clear()
    return launches


def stepped(steps: int = 2) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(24, 16, generator=generator))
    optim = optimizer.Muon([{"params": [param], "use_muon": True}], ns_dtype=torch.float32)
    for _ in range(steps):
        param.grad = torch.randn(24, 16, generator=generator)
        optim.step()
    return optim, param.detach()


def test_without_a_c_compiler_steps_are_those_of_torch_with_one_warning(launches):
    expected = stepped()[1]
    assert launches.count > 2  # two trials, and the steps
    launches.count, launches.error = 0, RuntimeError(NO_COMPILER)
    with pytest.warns(RuntimeWarning, match="C compiler") as caught:
        optim, found = stepped()
    assert len([w for w in caught if issubclass(w.category, RuntimeWarning)]) == 1
    assert NO_COMPILER[:20] in str(caught[0].message)
    assert launches.count == 1 and not optim.is_broken
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_trial_that_finds_no_memory_raises_and_changes_nothing(launches):
    optim, param = stepped(1)
    before, launches.error = param.clone(), torch.OutOfMemoryError("no memory")
    optim.param_groups[0]["params"][0].grad = torch.ones(24, 16)
    optim._tried = None
    with pytest.raises(torch.OutOfMemoryError):
        optim.step()
    assert torch.equal(param, before) and not optim.is_broken
    launches.error = None
    optim.step()
    assert not torch.equal(param, before)


def step_without_a_compiler_on_one_rank(options: dict) -> tuple[list[str], list[int], Any]:
    """Warnings, launches after each step, and the weight; the last rank can launch nothing."""
    last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        launches = use_on_cpu(patch, RuntimeError(NO_COMPILER) if last else None)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        twins = Twins.placed(
            [Group([Weight((24, 16), tuple(mesh.shape), (0,))], options)], {mesh.shape: mesh}, EXACT
        )
        counts = []
        ((_, param, _),) = twins.pairs
        for _ in range(2):
            param.grad = torch.ones_like(param)
            twins.ours.step()
            counts.append(launches.count)
        words = [str(w.message) for w in caught if "kernels are not used" in str(w.message)]
        return words, counts, whole(param)


def test_one_rank_without_a_compiler_brings_all_to_torch_before_they_write():
    # The last rank owns no matrix.
    *others, last = run_ranks(step_without_a_compiler_on_one_rank, 3, {"beta2": 0.9})
    for words, counts, weight in others:
        assert len(words) == 1 and "another rank" in words[0]
        assert counts[0] == counts[1]  # in the trial alone
        assert torch.equal(weight, last[2])
    assert len(last[0]) == 1 and "C compiler" in last[0][0] and last[1] == [1, 1]


def step_where_others_hear_nothing() -> str:
    last = dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        use_on_cpu(patch, RuntimeError(NO_COMPILER) if last else None)
        mesh = init_device_mesh("cpu", (2,))
        options = {**EXACT, "consistency_check": "off"}
        twins = Twins.placed([Group([Weight((24, 16), (2,), (0,))])], {(2,): mesh}, options)
        ((_, param, _),) = twins.pairs
        param.grad = torch.ones_like(param)
        if not last:
            return ""  # it would wait for the other
        for _ in range(2):  # a retry does not go on without the others
            with pytest.raises(RuntimeError, match="set it to 'step'"):
                twins.ours.step()
        assert not twins.ours.is_broken
        return "raised"


def test_a_rank_without_a_compiler_raises_where_others_do_not_hear_of_it():
    assert run_ranks(step_where_others_hear_nothing, 2) == ["", "raised"]
