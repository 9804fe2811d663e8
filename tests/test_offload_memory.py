"""CPU offload's memory and queues: the arena's tensors and segments; copies in order."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import math
import mmap
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kernel import optimizer

arena = importlib.import_module(f"{optimizer.__name__}.cpu_offload.arena")
backend = importlib.import_module(f"{optimizer.__name__}.cpu_offload.backend")
COMPUTE, IN, OUT = backend.COMPUTE, backend.IN, backend.OUT

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 2**20


class Driver:
    """Page-locks nothing, and tells what it was asked for."""

    def __init__(self, refuse: Callable[[int], bool] = lambda count: False):
        self.locked: dict[int, int] = {}  # bytes by address
        self.calls = 0
        self.refuse = refuse

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if self.refuse(self.calls):
            raise RuntimeError("out of luck")
        assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
        ends = [(start, start + size) for start, size in self.locked.items()]
        assert all(address >= end or address + nbytes <= start for start, end in ends)
        self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        nbytes = self.locked.pop(address)
        # The memory is still there: reading it would crash otherwise.
        memory = (arena.ctypes.c_ubyte * nbytes).from_address(address)
        assert memory[0] in range(256) and memory[nbytes - 1] in range(256)


def registering(driver: Driver) -> arena.Arena:
    return arena.Arena(CUDA, driver.register, driver.unregister)


def either() -> list[arena.Arena]:
    return [arena.Arena(CPU), registering(Driver())]


def llama_like(scale: int) -> list[int]:
    """Bytes of AdamW's state of Llama 3 8B's parameters, sides divided by `scale`, in fp32."""
    hidden, wide, kv, vocab = 4096 // scale, 14336 // scale, 1024 // scale, 128256 // scale
    layer = [hidden**2, hidden * kv, hidden * kv, hidden**2]
    layer += [hidden * wide] * 3 + [hidden, hidden]
    numels = [vocab * hidden, *layer * 32, hidden, vocab * hidden]
    return [4 * numel for numel in numels for _ in range(2)]


STATES = {
    "Llama 3 8B, sides / 32": llama_like(32),
    "Llama 3 8B, sides / 16": llama_like(16),
    "norms of 4096 bf16 entries": [8192] * 2000,
    "norms between matrices": [3 * 2**16, 256, 4, 2**16 + 2, 512] * 100,
    "heads' norms": [512] * 4000,
    "one of 1 MiB": [MIB],
    "one of 1 MiB and a bit": [MIB + 1],
}


def overlap(tensors: list[torch.Tensor]) -> bool:
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in tensors if t.numel())
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def test_tensors_are_zeroed_aligned_neighbours_with_storages_of_their_own():
    sizes = [64, 100, 0, 1, 4096, 63, 65]
    for memory in either():
        tensors = memory.allocate(sizes)
        assert [t.numel() for t in tensors] == sizes
        for tensor in tensors:
            assert tensor.dtype == torch.uint8 and tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.numel()
            assert tensor.storage_offset() == 0
            assert not tensor.any()
        full = [t for t in tensors if t.numel()]
        for first, second in pairwise(full):
            padded = math.ceil(first.numel() / arena.PADDED_TO) * arena.PADDED_TO
            assert second.data_ptr() - first.data_ptr() == padded
        assert full[0].data_ptr() % arena.PADDED_TO == 0


def test_pickle_save_and_deepcopy_take_one_tensor_and_not_its_neighbours():
    for memory in either():
        tensor, neighbour = memory.allocate([100, MIB])
        tensor.fill_(7)
        file = io.BytesIO()
        torch.save(tensor, file)
        data = pickle.dumps(tensor)
        assert file.tell() < 4000 and len(data) < 4000
        file.seek(0)
        twin = copy.deepcopy(tensor)
        for other in (twin, pickle.loads(data), torch.load(file)):
            assert torch.equal(other, tensor)
            assert other.untyped_storage().nbytes() == 100
        twin.fill_(8)
        assert tensor.eq(7).all() and not neighbour.any()


@pytest.mark.parametrize("state", STATES)
def test_overhead_is_at_most_2_percent(state):
    sizes = STATES[state]
    # Which tensors are smaller than their alignment is the model's affair.
    padding = sum(-n % arena.PADDED_TO for n in sizes)
    for memory in either():
        tensors = memory.allocate(sizes)
        assert not overlap(tensors)
        assert sum(sizes) <= memory.nbytes <= 1.02 * (sum(sizes) + padding)
        if padding < 0.01 * sum(sizes):
            assert memory.nbytes <= 1.02 * sum(sizes)


@pytest.mark.parametrize("scale", [1, 2, 8])
def test_segments_of_large_states_are_full_and_bounded(monkeypatch, scale):
    sizes, segments = llama_like(scale), []
    monkeypatch.setattr(arena.Arena, "_segment", lambda _, nbytes: segments.append(nbytes))
    monkeypatch.setattr(arena, "_interval", lambda *_: None)
    arena.Arena(CPU).allocate(sizes)
    assert sum(segments) == sum(sizes)
    assert max(segments) <= max(arena.SEGMENT_BYTES, 2 * max(sizes))
    powers = [2 ** math.ceil(math.log2(nbytes)) for nbytes in segments]  # as torch allocates
    assert sum(powers) <= 1.3 * sum(sizes)


def test_memory_comes_back_segment_by_segment_when_tensors_die(monkeypatch):
    monkeypatch.setattr(arena, "SEGMENT_BYTES", 2**14)
    driver = Driver()
    for memory in (arena.Arena(CPU), registering(driver)):
        tensors = memory.allocate([2**13] * 8)
        assert memory.nbytes == 4 * 2**14
        tensors[0] = None
        gc.collect()
        assert memory.nbytes == 4 * 2**14  # its neighbour lives
        view = tensors[1].view(torch.float32)
        tensors[1] = tensors[2] = None
        gc.collect()
        assert memory.nbytes == 4 * 2**14
        del view
        gc.collect()
        assert memory.nbytes == 3 * 2**14
        tensors.clear()
        gc.collect()
        assert memory.nbytes == 0
    assert driver.calls == 4 and not driver.locked


def test_tensors_outlive_the_arena():
    driver = Driver()
    memory = registering(driver)
    (tensor,) = memory.allocate([100])
    del memory
    gc.collect()
    assert tensor.fill_(3).sum() == 300 and len(driver.locked) == 1
    del tensor
    gc.collect()
    assert not driver.locked


def test_nothing_and_empty_tensors_take_no_memory():
    for memory in either():
        assert memory.allocate([]) == []
        tensors = memory.allocate([0, 0])
        assert [t.shape for t in tensors] == [(0,), (0,)] and memory.nbytes == 0
        tensors = memory.allocate([0, 5, 0])
        assert [t.numel() for t in tensors] == [0, 5, 0] and memory.nbytes > 0


@pytest.mark.parametrize("refused", [1, 3])
def test_where_memory_cannot_be_page_locked_one_warning_says_so(monkeypatch, refused):
    monkeypatch.setattr(arena, "SEGMENT_BYTES", 2**14)
    driver = Driver(refuse=lambda count: count >= refused)
    memory = registering(driver)
    with pytest.warns(RuntimeWarning, match=r"out of luck.*copies will be slow") as caught:
        tensors = memory.allocate([2**14] * 5)
    assert len(caught) == 1
    assert driver.calls == refused and len(driver.locked) == refused - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors += memory.allocate([2**14, 100])
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all(tensor.eq(value).all() for value, tensor in enumerate(tensors))
    del tensors, tensor
    gc.collect()
    assert memory.nbytes == 0 and not driver.locked


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be page-locked")
def test_memory_of_an_accelerator_that_is_not_there_is_ordinary():
    memory = arena.Arena(torch.device("xpu"))
    with pytest.warns(RuntimeWarning, match="copies will be slow"):
        tensors = memory.allocate([100, 2**15])
    assert [t.numel() for t in tensors] == [100, 2**15] and not any(t.any() for t in tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_memory_is_page_locked():
    memory = arena.Arena(torch.device("cuda", torch.cuda.current_device()))
    tensors = memory.allocate([100, MIB, 0, 2**13])
    assert all(t.is_pinned() for t in tensors if t.numel())
    tensors[1].copy_(torch.full_like(tensors[1], 5, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert tensors[1].eq(5).all()


EXIT = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads when this forks
sys.path.insert(0, sys.argv[1])
import torch
from cpu_offload.arena import Arena

log = open(sys.argv[2], "a", buffering=1)
register = lambda address, nbytes: log.write(f"register {os.getpid()}\\n")
unregister = lambda address: log.write(f"unregister {os.getpid()}\\n")
arena = Arena(torch.device("cuda"), register, unregister)
tensors, kept = arena.allocate([100, 200]), arena.allocate([300])
child = os.fork()
if child == 0:
    tensors[0].sum()
    del tensors
    assert arena.nbytes > 0
    sys.exit(0)
_, status = os.waitpid(child, 0)
del tensors
log.write(f"end {status} {os.getpid()}\\n")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_forked_processes_and_exits_leave_registrations_alone(tmp_path):
    log = tmp_path / "log"
    package = Path(arena.__file__).parent.parent
    stub = tmp_path / "cpu_offload"  # alone, without the package around it
    stub.mkdir()
    (stub / "arena.py").write_text((package / "cpu_offload" / "arena.py").read_text())
    result = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path), str(log)], capture_output=True, text=True
    )
    assert result.returncode == 0 and not result.stderr, result.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [line[0] for line in lines] == ["register", "register", "unregister", "end"]
    assert lines[-1][1] == "0" and len({line[-1] for line in lines}) == 1


def numbers(count: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((count,), value)


@pytest.mark.parametrize("seed", range(5))
def test_a_wait_orders_two_queues_and_without_one_they_are_not(seed):
    for waits in (True, False):
        host = optimizer.SimulatedHost(delay=0.02, seed=seed)
        state, slot, result = numbers(8, 1.0), numbers(8), [numbers(8) for _ in range(8)]
        for number in range(8):
            host.copy(IN, [slot], [state + number])
            if waits:
                host.wait(OUT, host.record(IN))
            host.copy(OUT, [result[number]], [slot])
            if waits:
                host.wait(IN, host.record(OUT))
        for on in (IN, OUT):
            host.synchronize(host.record(on))
        right = all(tensor.eq(1 + number).all() for number, tensor in enumerate(result))
        assert right == waits


def test_an_error_in_a_copy_is_told_and_nobody_hangs():
    host = optimizer.SimulatedHost()
    target = numbers(4)
    host.copy(IN, [numbers(3), target], [numbers(4), numbers(4, 2.0)])
    event = host.record(IN)
    for wait in (
        lambda: host.synchronize(event),
        lambda: host.wait(COMPUTE, event),
        lambda: host.wait(OUT, event),
    ):
        with pytest.raises(RuntimeError, match="a copy failed") as caught:
            wait()
        assert "size" in str(caught.value.__cause__)
    assert target.eq(2).all()  # what follows is done


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_streams_copy_in_order_and_leave_the_current_one_alone():
    device = torch.empty(0, device=torch.accelerator.current_accelerator()).device
    accelerator = backend.Backend(device)
    memory = arena.Arena(device)
    source, target = memory.allocate([4 * MIB, 4 * MIB])
    source.fill_(1)
    current = torch.accelerator.current_stream()
    slot = accelerator.allocate(4 * MIB)
    accelerator.wait(IN, accelerator.record(COMPUTE))
    accelerator.copy(IN, [slot], [source])
    accelerator.wait(COMPUTE, accelerator.record(IN))
    slot.add_(1)
    accelerator.wait(OUT, accelerator.record(COMPUTE))
    accelerator.copy(OUT, [target], [slot])
    event = accelerator.record(OUT)
    accelerator.synchronize(event)
    assert event.query() and target.eq(2).all()
    assert torch.accelerator.current_stream() == current
    accelerator.free(slot)
