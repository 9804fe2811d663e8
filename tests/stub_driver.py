"""A stub of CUDA's driver library, by which Triton's own launcher runs without an accelerator.

Triton's launcher is a C extension that parses a kernel's arguments and calls the driver. What
`installed` yields stands in for the driver of an H100, with the few functions that the launcher
calls. Kernels are launched by Triton as on that device, specialized and bound to their arguments,
and the stub writes every launch down. Nothing is computed: kernels are parsed to Triton's first
representation and not compiled further, which `tests/test_triton_compile.py` does for every chip.

It takes a C compiler and Python's headers, and a process in which TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ALIGNMENT = 16  # bytes, of pointers that Triton and NCCL access in vectors

# What the launcher of Triton 3.6 calls. It asks for the address of each pointer right before the
# launch, so the pointers since the launch before are those of this one.
SOURCE = r"""
#include <stdint.h>
#include <stddef.h>
#include "cuda.h"

typedef struct { uint64_t function; uint32_t grid[3]; uint32_t pointers; } Launch;

static Launch launches[1 << 16];
static uint64_t pointers[1 << 20];
static uint64_t launch_count, pointer_count, pointers_before;

uint64_t stub_launch_count(void) { return launch_count; }
Launch *stub_launches(void) { return launches; }
uint64_t *stub_pointers(void) { return pointers; }
void stub_reset(void) { launch_count = pointer_count = pointers_before = 0; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  Launch *launch = &launches[launch_count++ % (1 << 16)];
  launch->function = (uint64_t)f;
  launch->grid[0] = config->gridDimX;
  launch->grid[1] = config->gridDimY;
  launch->grid[2] = config->gridDimZ;
  launch->pointers = pointer_count - pointers_before;
  pointers_before = pointer_count;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  pointers[pointer_count++ % (1 << 20)] = pointer;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = 0; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "the stub knows no errors";
  return CUDA_SUCCESS;
}
"""


def missing() -> str:
    """What this machine lacks for the stub; empty where there is nothing."""
    if importlib.util.find_spec("triton") is None:
        return "there is no triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "there are no headers of Python"
    return ""


@dataclass(frozen=True)
class Launch:
    """One launch, as the driver gets it.

    Attributes:
        kernel: its name.
        variant: a number for each of its specializations, of all kernels.
        grid: programs along three axes.
        pointers: addresses of its arguments that are tensors, in their order.
        arguments: all of them by name, as the kernel's caller gave them; empty unless recorded.
    """

    kernel: str
    variant: int
    grid: tuple[int, int, int]
    pointers: tuple[int, ...]
    arguments: Mapping[str, Any]


class _CLaunch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("pointers", ctypes.c_uint32),
    ]


class StubDriver:
    """What Triton takes for the driver of an H100.

    Attributes:
        variants: kernels that were loaded, one name for each specialization of a kernel.
        records_arguments: whether launches keep their arguments, which takes time.
    """

    def __init__(self, library: ctypes.CDLL):
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaLauncher

        driver = self

        class Launcher(CudaLauncher):
            """The real one; writes arguments down where they are recorded."""

            def __init__(self, src: Any, metadata: Any):
                super().__init__(src, metadata)
                self._names = src.fn.arg_names

            def __call__(self, *args: Any) -> None:
                if driver.records_arguments:
                    given = args[-len(self._names) :]
                    driver._arguments.append(dict(zip(self._names, given)))
                super().__call__(*args)

        self.launcher_cls = Launcher
        self.variants: list[str] = []
        self.records_arguments = False
        self._library = library
        self._target = GPUTarget("cuda", 90, 32)
        self._arguments: list[dict[str, Any]] = []
        self.utils = SimpleNamespace(
            load_binary=self._load_binary,
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        )
        library.stub_launch_count.restype = ctypes.c_uint64
        library.stub_launches.restype = ctypes.POINTER(_CLaunch)
        library.stub_pointers.restype = ctypes.POINTER(ctypes.c_uint64)

    def _load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple:
        self.variants.append(name)
        return 1, len(self.variants), 0, 0, 1024  # module, function, registers, spills, threads

    # -- what Triton asks a driver

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    # -- for tests

    def reset(self) -> None:
        """Forgets the launches so far."""
        self._library.stub_reset()
        self._arguments.clear()

    def counts(self) -> dict[str, int]:
        """Launches since `reset`, by kernel."""
        counts: dict[str, int] = {}
        for launch in self._raw():
            name = self.variants[launch.function - 1]
            counts[name] = counts.get(name, 0) + 1
        return counts

    def launches(self) -> Iterator[Launch]:
        """Launches since `reset`, in order."""
        pointers, at = self._library.stub_pointers(), 0
        for number, launch in enumerate(self._raw()):
            arguments = self._arguments[number] if self._arguments else {}
            given = tuple(pointers[at : at + launch.pointers])
            at += launch.pointers
            kernel, grid = self.variants[launch.function - 1], tuple(launch.grid)
            yield Launch(kernel, launch.function, grid, given, arguments)

    def _raw(self) -> Any:
        count = self._library.stub_launch_count()
        assert count <= 1 << 16, "the stub has no room for so many launches"
        return self._library.stub_launches()[:count]


@contextmanager
def installed(directory: Path) -> Iterator[StubDriver]:
    """Triton's driver is the stub, built in a directory which also caches what Triton makes."""
    import triton
    from triton import knobs
    from triton.runtime import driver

    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source, library = directory / "stub.c", directory / "libcuda.so.1"
    source.write_text(SOURCE)
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    flags = ["-shared", "-fPIC", "-O1", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, source, *flags, "-o", library], check=True)
    stub = StubDriver(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    before = driver._active
    with knobs.nvidia.scope(), knobs.runtime.scope(), knobs.cache.scope():
        knobs.nvidia.libcuda_path = str(directory)
        knobs.runtime.add_stages_inspection_hook = _parse_only
        knobs.cache.dir = str(directory / "cache")
        driver.set_active(stub)
        try:
            yield stub
        finally:
            driver._active = before


def _parse_only(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    """Leaves out what Triton does after parsing a kernel, and what it would tell of the binary."""
    facts = dict(shared=0, tmem_size=None, tensordesc_meta=None)
    for kind in ("global", "profile"):
        facts |= {f"{kind}_scratch_size": 0, f"{kind}_scratch_align": 1}

    def name_only(module: Any, metadata: dict[str, Any]) -> bytes:
        metadata.update(facts, name=module.get_entry_func_name())
        return b""

    del stages["ttgir"], stages["llir"], stages["ptx"]
    stages["ttir"] = lambda module, metadata: module
    stages["cubin"] = name_only
