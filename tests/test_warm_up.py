"""Kernels are compiled before a step; where that fails, all ranks raise and nothing was changed."""

from __future__ import annotations

import threading
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
warm_up = import_module(f"{optimizer.__name__}.step.warm_up")


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
    warm_up._orthogonalize_batch.cache_clear()
    warm_up._warn_once.cache_clear()
    return launches


def trained(steps: int, **options: Any) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(24, 16, generator=generator))
    groups = [{"params": [param], "use_muon": True}]
    optim = optimizer.Muon(groups, ns_dtype=torch.float32, none_grad=False, **options)
    param.grad = torch.randn(24, 16, generator=generator)
    for _ in range(steps):
        optim.step()
    return optim, param.detach()


def test_without_a_c_compiler_a_step_raises_and_changes_nothing(launches):
    optim, param = trained(0)
    before, launches.error = param.clone(), RuntimeError(f"{NO_COMPILER}\nThe second line.")
    for count in (1, 2):  # a retry does not go on by itself
        with pytest.raises(RuntimeError, match=r"C compiler.*python3-dev.*triton=False") as caught:
            optim.step()
        assert NO_COMPILER in str(caught.value) and "second line" not in str(caught.value)
        assert launches.count == count
    assert torch.equal(param, before) and not optim.state and not optim.is_broken
    launches.error = None
    for _ in range(2):
        optim.step()
    assert torch.equal(param, trained(2)[1])


def test_a_warm_up_that_finds_no_memory_raises_and_changes_nothing(launches):
    optim, param = trained(0)
    before, launches.error = param.clone(), torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        optim.step()
    assert torch.equal(param, before) and not optim.is_broken
    launches.error = None
    optim.step()
    assert not torch.equal(param, before)


def test_a_plan_is_warmed_up_once(launches):
    optim, _ = trained(1)
    first, launches.count = launches.count, 0
    optim.step()
    assert 0 < launches.count < first


def test_without_triton_kernels_another_optimizer_has_them_all_the_same(launches):
    with_kernels, ours = trained(1)
    launches.count, launches.error = 0, RuntimeError(NO_COMPILER)
    without, theirs = trained(1, triton=False)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert launches.count == 0
    launches.error = None
    without.step()
    with_kernels.step()
    assert launches.count > 0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_thread_without_kernels_takes_them_from_no_other():
    seen = []

    def look() -> None:
        seen.append(triton_kernels.is_used_on("cuda"))

    with triton_kernels.enabled(False):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    look()
    assert seen == [True, False, True]


def test_without_triton_steps_are_those_of_torch_with_one_warning(launches, monkeypatch):
    _, expected = trained(2, triton=False)
    monkeypatch.setattr(triton_kernels, "is_installed", lambda: False)
    with pytest.warns(RuntimeWarning, match="not installed") as caught:
        _, found = trained(2)
        trained(1)
        trained(1, triton=False)
    assert len([w for w in caught if issubclass(w.category, RuntimeWarning)]) == 1
    assert launches.count == 0 and torch.equal(found, expected)


def step_of_ranks(what: str, options: dict) -> tuple[str, bool, bool]:
    """What a step raises, whether it left the weight as it was, and has broken the optimizer.

    Args:
        what: the last rank has no ``"compiler"`` or no ``"triton"``; it owns no matrix.
    """
    last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        use_on_cpu(patch, RuntimeError(NO_COMPILER) if last and what == "compiler" else None)
        if last and what == "triton":
            patch.setattr(triton_kernels, "is_installed", lambda: False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        group = Group([Weight((24, 16), tuple(mesh.shape), (0,))], options)
        twins = Twins.placed([group], {mesh.shape: mesh}, EXACT)
        ((_, param, _),) = twins.pairs
        param.grad = torch.ones_like(param)
        before = whole(param)
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                twins.ours.step()
        return str(caught.value), torch.equal(whole(param), before), twins.ours.is_broken


@pytest.mark.parametrize(
    "what, words", [("compiler", "C compiler"), ("triton", "Triton is not installed here")]
)
def test_one_rank_that_lacks_something_makes_all_raise_before_they_write(what, words):
    for text, is_unchanged, is_broken in run_ranks(step_of_ranks, 3, what, {"beta2": 0.9}):
        assert words in text and is_unchanged and not is_broken


def step_with_triton_on_one_rank() -> str:
    with pytest.MonkeyPatch.context() as patch:
        use_on_cpu(patch)
        mesh, options = init_device_mesh("cpu", (2,)), {"triton": dist.get_rank() == 0, **EXACT}
        group = Group([Weight((24, 16), (2,), (0,))])
        twins = Twins.placed([group], {(2,): mesh}, options)
        ((_, param, _),) = twins.pairs
        param.grad = torch.ones_like(param)
        with pytest.raises(ValueError) as caught:
            twins.ours.step()
        return str(caught.value)


def test_ranks_use_triton_together():
    for text in run_ranks(step_with_triton_on_one_rank, 2):
        assert "'triton = True'" in text and "'triton = False'" in text
