"""A pytest plugin: Triton's interpreter runs kernels on tensors of a device that isn't there.

    python -m pytest -p tests.kernels_on_fake_device tests/test_triton_maxima.py

Tests take the path of an accelerator, an H100 with its tiles. Tensors are those of fake_device.py,
and kernels compute on what these hold; a tensor of the host that is given to a kernel raises, as it
does on a GPU. So what mixes host and device, or expects the interpreter's tiles, fails without a
GPU. scripts/gpu_sections.py names the tests that need more than is imitated.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
sys.path.append(str(Path(__file__).parent))  # before pytest does so

is_there = False


def pytest_collectstart(collector: Any) -> None:
    """Tests are collected after conftest.py has built the kernel, and read the device then."""
    global is_there
    if not is_there:
        is_there = True
        put_there()


def put_there() -> None:
    from triton.runtime.interpreter import GridExecutor

    import on_fake_device
    from kernel import optimizer

    kernels = f"{optimizer.__name__}.triton_kernels"
    is_used_on = import_module(kernels).is_used_on
    on_fake_device.put_there()
    import_module(kernels).is_used_on = is_used_on  # which the imitation says no to

    execute, elementwise = GridExecutor.__call__, import_module(f"{kernels}.elementwise")
    launches = elementwise.launches

    def on_what_is_held(self: Any, *args: Any, **kwargs: Any) -> Any:
        return execute(self, *map(held, args), **{key: held(v) for key, v in kwargs.items()})

    def of_the_device(wide: Any, broadcast: Any = (), **options: Any) -> Any:
        for column in (*wide, *broadcast):
            for tensor in (t for t in column or () if isinstance(t, torch.Tensor)):
                held(tensor)  # kernels get only its address
        return launches(wide, broadcast, **options)

    GridExecutor.__call__ = on_what_is_held
    elementwise.launches = of_the_device
    launching = import_module(f"{kernels}.launching")
    h100 = launching.CompileTarget("NVIDIA H100 80GB HBM3", "sm_90", "cuda", 132)
    launching.compile_target = lambda device: h100


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
