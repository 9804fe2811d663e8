"""Launches kernels: chooses their tiles, and caches compiled kernels.

Tiles of products depend only on dtype, sizes, and device: they come from measurements on the device
(`MEASURED`), or else from a heuristic (`RULES`). Nothing is timed during training.
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
    """Launches a kernel; if it was compiled before, without Triton's dispatch.

    At every launch, Triton derives the specialization from the arguments' types, alignments and
    values. That costs the host 20 to 60 µs, more than many kernels need on the device. Callers
    instead compute a key from the layout of their tensors.

    Args:
        key: the kernel's name, and everything its specialization depends on (`layout_of`).
        device: device to launch on; by itself, Triton uses the current one.
        programs: number of programs.
        arguments: the kernel's arguments before its constants, in order.
        constants: the kernel's constants by name.
        options: Triton's launch options.
    """
    grid = (programs, 1, 1)
    with torch.accelerator.device_index(device.index):
        kept = _kept.get((key, device))
        if kept is not None:
            compiled, values = kept
            compiled[grid](*arguments, *values)
            return
        compiled = kernel[grid](*arguments, **constants, **options)
    # The interpreter returns None. Other backends specialize on more, such as a storage's size.
    if isinstance(compiled, CompiledKernel) and compile_target(device).backend == "cuda":
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        values = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        _kept[key, device] = compiled, values


def layout_of(argument: Any) -> Any:
    """Returns what Triton specializes on, for a tensor, an integer, a float, or None."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return type(argument), argument == 1, argument % 16 == 0, abs(argument) > INT32_MAX
    return type(argument)


class CompileTarget(NamedTuple):
    """The device that a kernel is compiled for."""

    device: str  # its name, such as "NVIDIA H200"
    architecture: str  # "sm_90", "gfx942", …; "xpu"; "interpreter"
    backend: str  # "cuda", "hip", "xpu", or "interpreter"
    processors: int  # streaming multiprocessors or compute units


@functools.cache
def compile_target(device: torch.device) -> CompileTarget:
    """Queries the device once, at its first launch."""
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

    block: int  # rows and columns of an output tile, a power of two ≥ 16
    block_k: int  # part of k to load at once, a power of two ≥ 16
    num_warps: int  # per program
    num_stages: int  # loads in flight, as in Triton
    group: int = 8  # columns of tiles computed together, for reuse in L2
    width: int = 1  # tiles side by side per program, 1 or 2, which share the rows of A
    # True to load tiles of A and B with the tensor memory accelerator of sm_90 and later, if
    # `symmetric._can_be_described`. Launches then cost the host more time.
    descriptors: bool = False

    def programs(self, s: int) -> int:
        """Number of programs for one (s, s) matrix: its tiles on and above the diagonal."""
        side = -(-s // (self.width * self.block))
        return self.width * side * (side + 1) // 2


class Rule(NamedTuple):
    """A configuration of the heuristic, and its conditions."""

    config: SymmetricConfig
    aligned: bool = False  # only if all operands can be loaded in vectors
    even: bool = False  # only if the last tiles are whole: masks need registers
    min_s: int = 0
    min_programs_per_processor: float = 0  # counting all matrices of the batch

    def holds(self, s: int, batch: int, aligned: bool, target: CompileTarget) -> bool:
        programs = batch * self.config.programs(s)
        enough = programs >= self.min_programs_per_processor * target.processors
        fits = (aligned or not self.aligned) and not (self.even and s % self.config.block)
        return s >= self.min_s and enough and fits


# The fastest configurations on a device, by (dtype, s, k, batch), as printed by benchmarks/tune.py.
MEASURED: dict[str, dict[tuple[str, int, int, int], SymmetricConfig]] = {}

# For devices without measurements: the rules of an architecture, or else of a backend, in order.
# The rule for even tiles on sm_90 was measured on an H200, where two programs fit a processor: one
# multiplies while the other stores. The other rules come from compiling: the largest tiles that fit
# registers and shared memory without spilling (tests/test_triton_compile.py). Operands that can't
# be loaded in vectors pass through registers, so unaligned ones have smaller tiles. fp32 is
# multiplied in full precision, without matrix instructions on NVIDIA.
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

# By architecture or backend, and by the dtype's size in bytes.
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
    """Returns the configuration measured for the nearest sizes, else the first rule's.

    Only aligned operands, which can be loaded in vectors, were measured; for others the rules
    decide. Large tiles reuse more of what they load, but there must be enough of them for all
    processors, and s must fill them. No rule depends on k, which scales the time of all tiles.
    """
    name = str(dtype).rpartition(".")[2]
    # Tiles of fp16 and bf16 cost the same, so measurements of either apply to both.
    names = ("float16", "bfloat16") if dtype.itemsize == 2 else (name,)
    measured = MEASURED.get(target.device, {}) if aligned else {}

    def distance(key: tuple[str, int, int, int]) -> tuple[float, bool]:
        """The sum of the distances to the measured sizes, in octaves; then prefers the dtype."""
        pairs = zip(key[1:], (s, k, batch))
        return sum(abs(math.log2(known / max(1, size))) for known, size in pairs), key[0] != name

    nearest = min((key for key in measured if key[0] in names), key=distance, default=None)
    if nearest is None:
        return choose_by_rule(dtype, s, batch, aligned, target)
    return measured[nearest]


def choose_by_rule(
    dtype: torch.dtype, s: int, batch: int, aligned: bool, target: CompileTarget
) -> SymmetricConfig:
    """Returns the configuration of the first rule that holds (see `choose`)."""
    rules = rules_of(dtype, target.architecture, target.backend)
    return next(rule.config for rule in rules if rule.holds(s, batch, aligned, target))


def rules_of(dtype: torch.dtype, architecture: str, backend: str) -> Sequence[Rule]:
    """Returns the rules for the architecture, or for the backend if there are none."""
    return RULES[architecture if architecture in RULES else backend][dtype.itemsize]
