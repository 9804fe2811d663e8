"""A stub of CUDA's driver, by which Triton launches kernels on an H100 that isn't there.

Kernels are specialized and bound to their arguments by Triton as on that device, and the stub notes
every launch. Nothing is computed: kernels are parsed to Triton's first representation and not
compiled further, which `tests/test_triton_compile.py` does for every chip.

It takes a process in which TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

ALIGNMENT = 16  # bytes, of pointers that Triton and NCCL access in vectors


def missing() -> str:
    """What this machine lacks for the stub; empty where there is nothing."""
    return "" if importlib.util.find_spec("triton") else "there is no triton"


class Launch(NamedTuple):
    """One launch, as the driver gets it: the kernel's name, and its arguments by name."""

    kernel: str
    arguments: Mapping[str, Any]


class AbsentDriver:
    """What Triton asks the driver of a chip that is not there."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> Any:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class StubDriver(AbsentDriver):
    """An H100's driver, which notes what is launched.

    Attributes:
        counts: launches since `reset`, by kernel.
        launches: those since `reset` while `records` was set, which keeps their arguments alive.
    """

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        super().__init__(GPUTarget("cuda", 90, 32))
        self.counts: Counter[str] = Counter()
        self.launches: list[Launch] = []
        self.records = False
        self.launcher_cls = self._launcher
        self.utils = SimpleNamespace(
            # module, function, registers, spills, threads
            load_binary=lambda name, kernel, shared, device: (1, 1, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        )

    def _launcher(self, source: Any, metadata: Any) -> Any:
        """Launches a kernel that was compiled; Triton's own is a C extension."""
        names = source.fn.arg_names

        def launch(*arguments: Any) -> None:
            # In front of the kernel's: grid, stream and function, two of metadata, and two hooks.
            given = dict(zip(names, arguments[9:], strict=True))
            self.counts[metadata.name] += 1
            if self.records:
                self.launches.append(Launch(metadata.name, given))

        return launch

    def reset(self) -> None:
        """Forgets the launches so far."""
        self.counts.clear()
        self.launches.clear()


@contextmanager
def installed(directory: Path) -> Iterator[StubDriver]:
    """Triton's driver is the stub; what Triton makes is cached in a directory."""
    from triton import knobs
    from triton.runtime import driver

    stub, before = StubDriver(), driver._active
    with knobs.runtime.scope(), knobs.cache.scope():
        knobs.runtime.add_stages_inspection_hook = _parse_only
        knobs.cache.dir = str(directory)
        driver.set_active(stub)
        try:
            yield stub
        finally:
            driver._active = before


def _parse_only(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    """Leaves out what Triton does after parsing a kernel, and what it would tell of the binary."""

    def name_only(module: Any, metadata: dict[str, Any]) -> bytes:
        metadata.update(shared=0, tmem_size=None, name=module.get_entry_func_name())
        return b""

    del stages["ttgir"], stages["llir"], stages["ptx"]
    stages["ttir"] = lambda module, metadata: module
    stages["cubin"] = name_only
