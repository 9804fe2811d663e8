"""Runs a script beside an accelerator that isn't there: see fake_device.py.

    python tests/on_fake_device.py benchmarks/step.py --layers 1 --dim 32

What scripts ask an accelerator for beyond tensors is there, too: its name, its memory, the end of
its work, page-locked memory and a record of its allocator. For builds of torch without CUDA. Ranks
of tests run so as well, over gloo, with ``TEST_DEVICE=fake``: see ranks.py.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

# The kernel comes from the checkout's build, as in `make bench`, unless LOCAL_KERNELS is given.
CHECKOUT = Path(__file__).resolve().parent.parent
os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={CHECKOUT}")

import torch  # noqa: E402

from fake_device import CUDA, Device, fake_device  # noqa: E402

ROOM = 1 << 30  # bytes of memory, all of them free


there = ExitStack()  # of the process, whose end leaves it


def put_there() -> None:
    """From now on the device is there."""
    device = there.enter_context(fake_device())
    for replaced in what_is_asked(device):
        there.enter_context(patch.object(*replaced))


def what_is_asked(device: Device) -> list[tuple[Any, str, Any]]:
    memory, empty, generator = device.memory, torch.empty, torch.Generator
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

    return [
        (torch, "empty", unlocked),
        (torch, "Generator", lambda device=None: generator()),
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "current_accelerator", lambda check_available=False: CUDA),
        (torch.accelerator, "synchronize", lambda device=None: None),
        (torch.accelerator, "get_memory_info", lambda device=None: (ROOM, ROOM)),
        (torch.accelerator, "memory_allocated", lambda device=None: memory.now),
        (torch.accelerator, "max_memory_allocated", lambda device=None: memory.peak),
        (
            torch.accelerator,
            "reset_peak_memory_stats",
            lambda device=None: setattr(memory, "peak", memory.now),
        ),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "set_sync_debug_mode", watch),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "get_device_name", lambda device=None: "no device"),
        (torch.cuda.memory, "_record_memory_history", lambda **_: None),
        (torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"")),
    ]


def main() -> None:
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    with there:
        put_there()
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
