"""Runs a script, or tests of kernels, beside an accelerator that isn't there: see fake_device.py.

    python tests/on_fake_device.py benchmarks/step.py --layers 1 --dim 32
    python -m pytest -p tests.on_fake_device tests/test_triton_maxima.py

What scripts ask an accelerator for beyond tensors is there, too: its name, its memory, the end of
its work, page-locked memory and a record of its allocator. For builds of torch without CUDA. Ranks
of tests run so as well, over gloo, with ``TEST_DEVICE=fake``: see ranks.py.

As a plugin of pytest it has Triton's interpreter run kernels, on what the tensors hold, with the
tiles of an H100; a tensor of the host that is given to a kernel raises, as it does on a GPU. So
tests that mix host and device, or expect the interpreter's tiles, fail without a GPU.
scripts/gpu_sections.py names the tests that need more than is imitated.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

TESTS = Path(__file__).resolve().parent
ROOM = 1 << 30  # bytes of memory, all of them free

sys.path.append(str(TESTS))
there = ExitStack()  # of the process, whose end leaves it


def put_there(kernels: bool = False) -> None:
    """From now on the device is there."""
    from fake_device import fake_device

    device = there.enter_context(fake_device(kernels))
    for replaced in what_is_asked(device):
        there.enter_context(patch.object(*replaced))


def what_is_asked(device: Any) -> list[tuple[Any, str, Any]]:
    memory, empty, generator = device.memory, torch.empty, torch.Generator
    accelerator, cuda, at = torch.accelerator, torch.cuda, torch.device("cuda", 0)
    waits = 0  # before those that are an error

    def unlocked(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*size, **kwargs)  # without CUDA, torch locks no pages

    def watch(mode: str) -> None:
        """CUDA raises at a wait itself, this when it is watched no more."""
        nonlocal waits
        if mode == "error":
            waits = device.waits.total()
        elif device.waits.total() > waits:
            raise RuntimeError(f"the host waits for the device: {dict(device.waits)}")

    def reset_peak(device: Any = None) -> None:
        memory.peak = memory.now

    return [
        (torch, "empty", unlocked),
        (torch, "Generator", lambda device=None: generator()),
        (accelerator, "is_available", lambda: True),
        (accelerator, "current_accelerator", lambda check_available=False: at),
        (accelerator, "synchronize", lambda device=None: None),
        (accelerator, "get_memory_info", lambda device=None: (ROOM, ROOM)),
        (accelerator, "memory_allocated", lambda device=None: memory.now),
        (accelerator, "max_memory_allocated", lambda device=None: memory.peak),
        (accelerator, "reset_peak_memory_stats", reset_peak),
        (cuda, "is_available", lambda: True),
        (cuda, "is_current_stream_capturing", lambda: False),
        (cuda, "set_sync_debug_mode", watch),
        (cuda, "set_device", lambda device: None),
        (cuda, "get_device_name", lambda device=None: "no device"),
        (cuda.memory, "_record_memory_history", lambda **_: None),
        (cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"")),
    ]


def main() -> None:
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    # The kernel comes from the checkout's build, as in `make bench`, unless LOCAL_KERNELS is given.
    os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={TESTS.parent}")
    with there:
        put_there()
        runpy.run_path(str(script), run_name="__main__")


# -- the plugin ------------------------------------------------------------------------------------


def pytest_collectstart(collector: Any) -> None:
    """Tests are collected after conftest.py has built the kernel, and read the device then."""
    if "fake_device" not in sys.modules:
        put_there(kernels=True)
        let_kernels_compute()


def let_kernels_compute() -> None:
    from triton.runtime.interpreter import GridExecutor

    from kernel import optimizer

    elementwise, launching = (
        import_module(f"{optimizer.__name__}.triton_kernels.{name}")
        for name in ("elementwise", "launching")
    )
    execute, launches = GridExecutor.__call__, elementwise.launches

    def on_what_is_held(self: Any, *args: Any, **kwargs: Any) -> Any:
        return execute(self, *map(held, args), **{key: held(v) for key, v in kwargs.items()})

    def of_the_device(wide: Any, broadcast: Any = (), **options: Any) -> Any:
        for column in (*wide, *broadcast):
            for tensor in (t for t in column or () if isinstance(t, torch.Tensor)):
                held(tensor)  # kernels get only its address
        return launches(wide, broadcast, **options)

    h100 = launching.CompileTarget("NVIDIA H100 80GB HBM3", "sm_90", "cuda", 132)
    for replaced in (
        (GridExecutor, "__call__", on_what_is_held),
        (elementwise, "launches", of_the_device),
        (launching, "compile_target", lambda device: h100),
    ):
        there.enter_context(patch.object(*replaced))


def held(value: Any) -> Any:
    """What kernels get of a tensor, and of what holds tensors."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from fake_device import Fake

    if isinstance(value, Fake):
        return value.held
    if isinstance(value, torch.Tensor):
        raise ValueError(f"a kernel was given a tensor of the host, {tuple(value.shape)}")
    if isinstance(value, TensorDescriptor):
        sizes = value.shape, value.strides, value.block_shape
        return TensorDescriptor(held(value.base), *sizes)
    return type(value)(map(held, value)) if type(value) in (list, tuple) else value


if __name__ == "__main__":
    main()
