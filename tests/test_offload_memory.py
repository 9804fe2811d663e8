"""CPU offload's host memory: page-locked, no more than the state's, gone with it; its queues."""

from __future__ import annotations

import copy
import gc
import importlib
import mmap
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fake_device import CUDA, Device, fake_device
from kernel import optimizer
from layouts import params_of
from offloaded import Host, Muon, Pair, tensors_of

arena = importlib.import_module(f"{optimizer.__name__}.cpu_offload.arena")

COMPUTE, IN, OUT = "compute", "in", "out"

MIB = 2**20
ALIGNMENT = 64  # bytes

without_cuda = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="the device is made for builds without CUDA"
)


@pytest.fixture
def device(one_thread) -> Iterator[Device]:
    with fake_device() as device:
        yield device


def offloaded(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> Any:
    """AdamW of vectors of these sizes, which has two tensors of state for each."""
    params = [nn.Parameter(torch.zeros(size, dtype=dtype).to(CUDA)) for size in sizes]
    optim = Muon([{"params": params, "use_muon": False}])
    optim.turn_on_cpu_offload()
    optim.state_dict()
    return optim


LAYER = [2**14, 2**12, 2**12, 2**14, *[7 * 2**13] * 3, 128, 128]  # of Llama 3 8B, sides / 32
STATES: dict[str, tuple[list[int], torch.dtype]] = {
    "Llama 3 8B, sides / 32": ([4008 * 128, *LAYER * 32, 128, 4008 * 128], torch.float32),
    "norms of 4096 bf16 entries": ([4096] * 1000, torch.bfloat16),
    "norms between matrices": ([3 * 2**14, 64, 1, 2**14 + 1, 128] * 50, torch.float32),
    "two of 1 MiB": ([MIB // 4], torch.float32),
    "two of 1 MiB and a bit": ([MIB // 4 + 1], torch.float32),
}


@without_cuda
@pytest.mark.parametrize("segment_bytes", [2**16, 2**28])
@pytest.mark.parametrize("state", STATES)
def test_tensors_lie_apart_in_few_full_segments(state, segment_bytes, device, monkeypatch):
    monkeypatch.setattr(arena, "SEGMENT_BYTES", segment_bytes)
    optim = offloaded(*STATES[state])
    tensors, segments = tensors_of(optim), list(device.locked.values())
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor.storage_offset()
        assert tensor.data_ptr() % ALIGNMENT == 0 and not tensor.any()
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(n % mmap.PAGESIZE == 0 for n in (*segments, *device.locked))
    total, largest = sum(t.nbytes for t in tensors), max(t.nbytes for t in tensors)
    # Which tensors are smaller than their alignment is the model's affair.
    padding = sum(-t.nbytes % ALIGNMENT for t in tensors)
    pages = mmap.PAGESIZE * len(segments)
    assert total <= sum(segments) <= min(1.02 * (total + padding), total + padding + pages)
    assert max(segments) <= max(segment_bytes, 2 * largest + mmap.PAGESIZE)
    assert len(segments) <= 2 * (total + padding) / segment_bytes + 1
    if segment_bytes > total + padding:
        assert len(segments) == 1


@without_cuda
def test_memory_comes_back_segment_by_segment_when_tensors_die(device, monkeypatch):
    monkeypatch.setattr(arena, "SEGMENT_BYTES", 2**14)
    optim = offloaded([2**11] * 4)
    tensors: list[Any] = tensors_of(optim)
    gc.collect()
    gc.disable()  # what goes, goes at once
    try:
        del optim
        assert len(device.locked) == 4
        view = tensors[1].view(torch.int32)
        tensors[0] = tensors[1] = tensors[2] = None
        assert len(device.locked) == 4  # the neighbour of each lives
        assert not view.fill_(3).ne(3).any()
        del view
        assert len(device.locked) == 3
        tensors.clear()
        assert device.locked == {}
    finally:
        gc.enable()


@without_cuda
def test_memory_is_the_states_alone_whatever_has_replaced_it_and_goes_with_offload(device):
    matrices = [nn.Parameter(torch.ones(256, 256).to(CUDA)) for _ in range(2)]
    optim = Muon([{"params": matrices, "use_muon": True}], ns_coefficients=[(1.5, -0.5, 0.0)])
    optim.turn_on_cpu_offload()

    def step() -> None:
        for param in matrices:
            param.grad = torch.ones_like(param)
        optim.step()

    def change_dtype() -> None:
        optim.param_groups[0]["momentum_dtype"] = torch.bfloat16
        step()

    def load() -> None:
        optim.load_state_dict(copy.deepcopy(optim.state_dict()))

    for change in (step, load, step, change_dtype, load, step):
        change()
        state = sum(tensor.nbytes for tensor in tensors_of(optim))
        assert state <= sum(device.locked.values()) <= 1.02 * state, change
    optim.turn_off_cpu_offload()
    assert device.locked == {}


@without_cuda
def test_memory_of_a_group_without_elements_is_none(device):
    optim = offloaded([0, 0])
    assert device.locked == {} and [t.shape for t in tensors_of(optim)] == [(0,)] * 4
    assert len(tensors_of(offloaded([0, 5, 0]))) == 6
    assert len(device.locked) == 0  # gone with the optimizer


def refuse(monkeypatch: Any, first: int) -> list[int]:
    """The driver refuses to lock memory from a call on; returns the sizes it will be asked for."""
    cudart: Any = torch.cuda.cudart()
    register, asked = cudart.cudaHostRegister, list[int]()

    def refusing(address: int, nbytes: int, flags: int) -> int:
        asked.append(nbytes)
        return 2 if len(asked) >= first else register(address, nbytes, flags)

    cudart.cudaHostRegister, cudart.cudaGetErrorString = refusing, lambda result: "out of luck"
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return asked


@without_cuda
@pytest.mark.parametrize("refused", [1, 3])
def test_where_memory_cannot_be_page_locked_one_warning_says_so(refused, device, monkeypatch):
    monkeypatch.setattr(arena, "SEGMENT_BYTES", 2**14)
    asked = refuse(monkeypatch, refused)
    with pytest.warns(RuntimeWarning, match="out of luck") as caught:
        optim = offloaded([2**12] * 3)
    assert len(caught) == 1
    assert len(asked) == refused and len(device.locked) == refused - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = nn.Parameter(torch.ones(100).to(CUDA))
        optim.add_param_group({"params": [more], "use_muon": False})
        optim.state_dict()
    assert len(asked) == refused
    for param in params_of(optim):
        param.grad = torch.ones_like(param)
    optim.step()
    assert all(t.any() for t in tensors_of(optim))
    del optim
    assert device.locked == {}


@without_cuda
@pytest.mark.parametrize("is_locked", [False, True], ids=["ordinary", "page-locked"])
@pytest.mark.filterwarnings("ignore")
def test_memory_is_freed_after_the_copies(is_locked, device, monkeypatch):
    if not is_locked:
        refuse(monkeypatch, first=1)
    optim = offloaded([100])
    for param in params_of(optim):
        param.grad = torch.ones_like(param)
    optim.step()
    device.waits.clear()
    device.unlocked.clear()  # of zeros that the step has replaced
    del optim, param
    gc.collect()
    assert device.waits["synchronize"] == 2  # the host has waited for both streams
    assert device.unlocked == [2] * is_locked  # before


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be page-locked")
def test_memory_of_an_accelerator_that_is_not_there_is_ordinary():
    pair, backend = Pair("small"), Host()
    pair.step()
    backend.device = torch.device("xpu")
    with pytest.warns(RuntimeWarning, match="slow"):
        pair.turn_on(backend=backend)
    backend.device = torch.device("cpu")
    pair.step_and_compare()


FORKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from fake_device import CUDA, fake_device
from kernel import optimizer
with fake_device() as device:
    params = [torch.nn.Parameter(torch.ones(8).to(CUDA)) for _ in range(2)]
    gone, kept = (optimizer.Muon([{"params": [p], "use_muon": False}]) for p in params)
    for optim in (gone, kept):
        optim.turn_on_cpu_offload()
        optim.state_dict()
    assert len(device.locked) == 2
    child = os.fork()
    if child == 0:
        del gone, optim
        os._exit(len(device.locked) != 2)
    assert os.waitpid(child, 0)[1] == 0
    del gone
    assert len(device.locked) == 1
    torch.cuda.cudart = lambda: print("called at the end")
"""


@without_cuda
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_forked_processes_and_exits_leave_registrations_alone():
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


# -- queues ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_orders_two_queues_and_without_one_they_are_not(waits, seed):
    host, slot = Host(delay=0.02, seed=seed), torch.zeros(8)
    results = [torch.zeros(8) for _ in range(8)]
    for number, result in enumerate(results):
        host.copy(IN, [slot], [torch.full((8,), 1.0 + number)])
        if waits:
            host.wait(OUT, host.record(IN))
        host.copy(OUT, [result], [slot])
        if waits:
            host.wait(IN, host.record(OUT))
    for on in (IN, OUT):
        host.synchronize(host.record(on))
    assert all(result.eq(1 + number).all() for number, result in enumerate(results)) == waits


def test_an_error_in_a_copy_is_told_until_it_is_recovered_from_and_nobody_hangs():
    host, target = Host(), torch.zeros(4)
    host.copy(IN, [torch.zeros(3), target], [torch.zeros(4), torch.ones(4)])
    event = host.record(IN)
    for wait in (host.synchronize, lambda e: host.wait(COMPUTE, e), lambda e: host.wait(OUT, e)):
        with pytest.raises(RuntimeError) as caught:
            wait(event)
        assert "size" in str(caught.value.__cause__)
    assert target.eq(1).all()  # what follows is done
    host.recover()
    host.synchronize(event)


# -- a device that is there ------------------------------------------------------------------------


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_state_in_page_locked_memory_leaves_the_current_stream_alone():
    device, current = torch.accelerator.current_accelerator(), torch.accelerator.current_stream()
    params = [nn.Parameter(torch.randn(1024, 512, device=device)) for _ in range(2)]
    groups = [{"params": [p], "use_muon": is_muon} for p, is_muon in zip(params, (True, False))]
    optim = Muon(groups, lr=0.1)
    optim.turn_on_cpu_offload(slot_bytes=4 * MIB)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optim.step()
    optim.synchronize_offload()
    assert all(t.is_pinned() and t.isfinite().all() and t.any() for t in tensors_of(optim))
    assert torch.accelerator.current_stream() == current
