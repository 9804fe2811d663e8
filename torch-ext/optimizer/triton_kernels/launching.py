"""Launches kernels: decides with which tiles, and keeps what Triton has compiled.

Tiles of products follow from dtype, sizes and device alone, by what was measured on the device
(`MEASURED`) or else by a heuristic (`RULES`). Nothing is timed while training.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

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
    """Launches so many programs of a kernel; one that was compiled before, without asking Triton.

    At every launch Triton works out for which types, alignments and constants the arguments need a
    kernel, which takes 20 to 60 µs of the host, more than many a kernel takes the device. Callers
    know a key for that from the layout of their tensors.

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
    if isinstance(compiled, CompiledKernel) and compile_target(device).backend == "cuda":
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


class CompileTarget(NamedTuple):
    """What a kernel is compiled for."""

    device: str  # its name, such as "NVIDIA H200"
    architecture: str  # "sm_90", "gfx942", …; "xpu"; "interpreter"
    backend: str  # "cuda", "hip", "xpu" or "interpreter"
    processors: int  # streaming multiprocessors, compute units


@functools.cache
def compile_target(device: torch.device) -> CompileTarget:
    """Asks the device once, when something is first launched there."""
    if device.type == "cpu":
        return CompileTarget("interpreter", "interpreter", "interpreter", processors=4)
    if device.type == "xpu":
        xpu = torch.xpu.get_device_properties(device)
        return CompileTarget(xpu.name, "xpu", "xpu", xpu.gpu_subslice_count)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        architecture, backend = properties.gcnArchName.partition(":")[0], "hip"
    else:
        architecture, backend = f"sm_{properties.major}{properties.minor}", "cuda"
    processors = properties.multi_processor_count
    return CompileTarget(properties.name, architecture, backend, processors)


@dataclass(frozen=True)
class SymmetricConfig:
    """Tiles of `symmetric.symmetric_product`."""

    block: int  # rows and columns of a tile of the output, a power of two from 16 on
    block_k: int  # how much of k is loaded at once, a power of two from 16 on
    num_warps: int  # of a program
    num_stages: int  # loads in flight (Triton's own meaning)
    group: int = 8  # columns of tiles computed together, for reuse in L2
    width: int = 1  # tiles side by side that a program computes, 1 or 2: they share the rows of A
    # Load tiles of A and B in bulk, by the engine for it that sm_90 and later have, where both can
    # be described (`symmetric._can_be_described`). A launch takes the host longer.
    descriptors: bool = False

    def programs(self, s: int) -> int:
        """How many programs compute one (s, s) matrix: its tiles on and above the diagonal."""
        side = -(-s // (self.width * self.block))
        return self.width * side * (side + 1) // 2


class Rule(NamedTuple):
    """A configuration of the heuristic, for where its conditions hold."""

    config: SymmetricConfig
    aligned: bool = False  # only where all operands can be loaded in vectors
    even: bool = False  # only where the last tiles are whole: masks take registers
    min_s: int = 0
    min_programs_per_processor: float = 0  # those of all matrices of the batch counted

    def holds(self, s: int, batch: int, aligned: bool, target: CompileTarget) -> bool:
        programs = batch * self.config.programs(s)
        enough = programs >= self.min_programs_per_processor * target.processors
        fits = (aligned or not self.aligned) and not (self.even and s % self.config.block)
        return s >= self.min_s and enough and fits


# The fastest configurations found on a device, by (dtype, s, k, batch): benchmarks/tune.py prints
# what to put here.
MEASURED: dict[str, dict[tuple[str, int, int, int], SymmetricConfig]] = {}

# For devices without measurements: the rules of an architecture, or else of a backend, in order.
# Those of even tiles on sm_90 were measured on an H200, where two programs fit a processor, and one
# multiplies while the other stores. Others follow from compiling: the largest tiles that keep all
# operands in registers and shared memory without spilling (tests/test_triton_compile.py). Entries
# that cannot be loaded in vectors pass through registers, hence smaller tiles for what is not
# aligned. fp32 is multiplied in full precision, without matrix instructions on NVIDIA.
_INTERPRETER = (
    Rule(SymmetricConfig(128, 128, 4, 1), min_s=65),
    Rule(SymmetricConfig(64, 64, 4, 1), min_s=17),
    Rule(SymmetricConfig(16, 64, 4, 1)),
)
_large = functools.partial(Rule, aligned=True, min_s=192, min_programs_per_processor=0.75)
_SM_80 = (
    _large(SymmetricConfig(128, 64, 8, 3)),
    Rule(SymmetricConfig(64, 64, 4, 4), aligned=True),
    Rule(SymmetricConfig(64, 32, 4, 4)),
)
_SM_100 = (_large(SymmetricConfig(128, 64, 8, 4)), *_SM_80[1:])
_SM_90 = (_large(SymmetricConfig(128, 64, 4, 3), even=True), *_SM_100)
_GFX9 = (
    _large(SymmetricConfig(128, 64, 8, 2)),
    Rule(SymmetricConfig(64, 64, 4, 2), aligned=True),
    Rule(SymmetricConfig(64, 32, 4, 2)),
)
_OTHERS = (Rule(SymmetricConfig(64, 32, 4, 3)),)
_SM_FP32 = (Rule(SymmetricConfig(64, 32, 8, 3)),)
_GFX9_FP32 = (Rule(SymmetricConfig(64, 32, 4, 2)),)
_OTHERS_FP32 = (Rule(SymmetricConfig(64, 32, 8, 2)),)

# By architecture or backend, and by how many bytes the dtype has.
RULES: dict[str, dict[int, Sequence[Rule]]] = {
    "interpreter": {2: _INTERPRETER, 4: _INTERPRETER},
    **{key: {2: _SM_80, 4: _SM_FP32} for key in ("sm_80", "sm_86", "sm_89")},
    "sm_90": {2: _SM_90, 4: _SM_FP32},
    **{key: {2: _SM_100, 4: _SM_FP32} for key in ("sm_100", "sm_103")},
    **{key: {2: _GFX9, 4: _GFX9_FP32} for key in ("gfx90a", "gfx942", "gfx950")},
    **{key: {2: _OTHERS, 4: _OTHERS_FP32} for key in ("cuda", "hip", "xpu")},
}


@functools.lru_cache(maxsize=4096)
def choose(
    dtype: torch.dtype, s: int, k: int, batch: int, aligned: bool, target: CompileTarget
) -> SymmetricConfig:
    """The configuration measured nearest to these sizes on that device, else the first rule's that
    holds.

    Only operands that can be loaded in vectors were measured; for others the rules decide. Large
    tiles reuse more of what they load, but there must be enough of them for all processors, and s
    must fill them. No rule asks for k, which says how long a tile takes, whatever its size.
    """
    name = str(dtype).rpartition(".")[2]
    # Tiles of fp16 and bf16 cost the same: either stands in for the other.
    names = ("float16", "bfloat16") if dtype.itemsize == 2 else (name,)
    measured = MEASURED.get(target.device, {}) if aligned else {}

    def distance(key: tuple[str, int, int, int]) -> tuple[float, bool]:
        """How far the measured sizes are from these, in octaves, added up."""
        pairs = zip(key[1:], (s, k, batch))
        return sum(abs(math.log2(size / max(1, own))) for size, own in pairs), key[0] != name

    nearest = min((key for key in measured if key[0] in names), key=distance, default=None)
    if nearest is None:
        return choose_by_rule(dtype, s, batch, aligned, target)
    return measured[nearest]


def choose_by_rule(
    dtype: torch.dtype, s: int, batch: int, aligned: bool, target: CompileTarget
) -> SymmetricConfig:
    """The configuration of the first rule that holds, see `choose`."""
    rules = rules_of(dtype, target.architecture, target.backend)
    return next(rule.config for rule in rules if rule.holds(s, batch, aligned, target))


def rules_of(dtype: torch.dtype, architecture: str, backend: str) -> Sequence[Rule]:
    """The heuristic's rules for the architecture; where there are none, for the backend."""
    return RULES[architecture if architecture in RULES else backend][dtype.itemsize]
