"""Decides with which tiles a kernel is launched, from measurements or else a heuristic.

Both are below: `MEASURED`, of single devices, and `RULES`. Nothing is timed while training: a
configuration follows from dtype, sizes and device alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SymmetricConfig:
    """Tiles of `symmetric.symmetric_product`.

    Args:
        block: rows and columns of a tile of the output, a power of two from 16 on.
        block_k: how much of k is loaded at once, a power of two from 16 on.
        num_warps, num_stages: warps of a program; loads in flight (Triton's own meaning).
        group: columns of tiles computed together, for reuse in L2.
        width: tiles side by side that a program computes, 1 or 2: they share the rows of A.
        descriptors: load tiles of A and B in bulk, by the engine for it that sm_90 and later have,
            where both can be described (`symmetric._can_be_described`). A launch takes the host
            longer.
    """

    block: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    width: int = 1
    descriptors: bool = False

    def programs(self, s: int) -> int:
        """How many programs compute one (s, s) matrix."""
        return self.width * symmetric_tiles(s, self.width * self.block)


@dataclass(frozen=True)
class CompileTarget:
    """What a kernel is compiled for.

    Args:
        device: the device's name, such as ``NVIDIA H200``.
        architecture: ``sm_90``, ``gfx942``, …; ``xpu``; ``interpreter``.
        backend: ``cuda``, ``hip``, ``xpu`` or ``interpreter``.
        processors: streaming multiprocessors, compute units.
    """

    device: str
    architecture: str
    backend: str
    processors: int


@dataclass(frozen=True)
class Rule:
    """A configuration of the heuristic, for where its conditions hold.

    Args:
        aligned: holds only where all operands can be loaded in vectors.
        even: holds only where the last tiles are whole: masks take registers.
        min_s: holds from this s on.
        min_tiles_per_processor: holds from so many programs for each processor on, those of all
            matrices of the batch counted.
    """

    config: SymmetricConfig
    aligned: bool = False
    even: bool = False
    min_s: int = 0
    min_tiles_per_processor: float = 0


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
_large = functools.partial(Rule, aligned=True, min_s=192, min_tiles_per_processor=0.75)
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


def symmetric_tiles(s: int, block: int) -> int:
    """Tiles on and above the diagonal of one (s, s) matrix."""
    side = -(-s // block)
    return side * (side + 1) // 2


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
    for rule in rules_of(dtype, target.architecture, target.backend):
        programs = batch * rule.config.programs(s)
        enough = programs >= rule.min_tiles_per_processor * target.processors
        fits = (aligned or not rule.aligned) and not (rule.even and s % rule.config.block)
        if s >= rule.min_s and enough and fits:
            return rule.config
    raise ValueError(f"no rule for a symmetric product in {dtype} holds on {target}")


def rules_of(dtype: torch.dtype, architecture: str, backend: str) -> Sequence[Rule]:
    """The heuristic's rules for the architecture; where there are none, for the backend."""
    return RULES[architecture if architecture in RULES else backend][dtype.itemsize]


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
