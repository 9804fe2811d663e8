"""Kernels that can't be launched: found out before a step, and replaced by torch on all ranks."""

from __future__ import annotations

import warnings
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from kernel import optimizer
from layouts import Group, Twins, Weight
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
    patch.setattr(triton_kernels, "_is_given_up", False)
    elementwise = import_module(f"{optimizer.__name__}.triton_kernels.elementwise")
    launches = Launches(elementwise._launch, error)
    patch.setattr(elementwise, "_launch", launches)
    trial = import_module(f"{optimizer.__name__}.step.kernel_trial")
    trial._try_momentum.cache_clear()
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
    import_module(f"{optimizer.__name__}.step.kernel_trial")._try_momentum.cache_clear()
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
    import_module(f"{optimizer.__name__}.step.kernel_trial")._try_momentum.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        optim.step()
    assert torch.equal(param, before) and not optim.is_broken
    launches.error = None
    optim.step()
    assert not torch.equal(param, before)


def sharded_without_a_compiler_on_one_rank(dtype: torch.dtype) -> tuple[list[str], int]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        error = RuntimeError(NO_COMPILER) if dist.get_rank() == 1 else None
        launches = use_on_cpu(patch, error)
        mesh = init_device_mesh("cpu", (2,))
        weights = [Weight((24, 16), (2,), (0,)), Weight((8, 32), (2,), (1,))]
        options = {"ns_dtype": dtype, "comm_dtype": dtype}
        twins = Twins.placed([Group(weights)], {(2,): mesh}, options)
        tried = launches.count
        twins.step_and_compare()
        words = [str(w.message) for w in caught if "kernels are not used" in str(w.message)]
        return words, launches.count - tried


def test_one_rank_without_a_compiler_brings_all_to_torch_before_they_write():
    found = run_ranks(sharded_without_a_compiler_on_one_rank, 2, torch.float32)
    (other, launched), (own, failed) = found
    assert len(other) == len(own) == 1
    assert "another rank" in other[0] and "C compiler" in own[0]
    assert launched == 1 and failed == 1  # in trials
