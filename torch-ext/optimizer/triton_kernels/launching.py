"""Launches kernels on their device; those that were compiled before, without asking Triton again.

At every launch Triton works out for which types, alignments and constants the arguments need a
kernel, which takes 20 to 60 µs of the host, more than many a kernel takes the device. Callers know
a key for that from the layout of their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from . import configs

INT32_MAX = 2**31 - 1
_MOST_KEPT = 4096

_kept: dict[tuple, tuple[CompiledKernel, Sequence[Any]]] = {}


def launch(
    kernel: Any,
    key: tuple,
    device: torch.device,
    programs: int,
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    **options: Any,
) -> None:
    """Launches so many programs of a kernel.

    Args:
        key: the kernel's name, and all that its specialization depends on: see `layout_of`.
        device: left to itself, Triton takes the current one.
        arguments: in the kernel's order, before all constants.
        constants: by name.
        options: Triton's own.
    """
    grid = (programs, 1, 1)
    with torch.accelerator.device_index(device.index):
        kept = _kept.get((key, device))
        if kept is not None:
            compiled, values = kept
            compiled[grid](*arguments, *values)
            return
        compiled = kernel[grid](*arguments, **constants, **options)
    # None in the interpreter. Other backends look at more of a tensor, such as its storage's size.
    if isinstance(compiled, CompiledKernel) and configs.compile_target(device).backend == "cuda":
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        values = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        _kept[key, device] = compiled, values


def layout_of(argument: Any) -> Any:
    """What Triton specializes a kernel for, of a tensor, an integer, a float or None."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return type(argument), argument == 1, argument % 16 == 0, abs(argument) > INT32_MAX
    return type(argument)
