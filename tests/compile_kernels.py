"""Compiles what calls of the package launch, for a chip that is not there, in a process of its own.

    python tests/compile_kernels.py sm_90 > facts.json

Prints a JSON list with what `facts_of` says of each kernel that was launched. TRITON_INTERPRET,
which the tests of the interpreter need, must not be set here.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernel import optimizer
from stub_driver import AbsentDriver

elementwise, launching, logit_maxima, symmetric = (
    importlib.import_module(f"{optimizer.__name__}.triton_kernels.{name}")
    for name in ("elementwise", "launching", "logit_maxima", "symmetric")
)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

Calls = Iterator[tuple[str, Callable[[], Any]]]  # with names, which say what is to be found


def compiled_for(architecture: str) -> list[dict[str, Any]]:
    is_amd = architecture.startswith("gfx")
    chip: Any = architecture if is_amd else int(architecture.removeprefix("sm_"))
    absent = AbsentDriver(GPUTarget("hip" if is_amd else "cuda", chip, 64 if is_amd else 32))
    target = launching.CompileTarget("absent", architecture, absent.target.backend, 132)
    facts, call = [], ""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        facts.append({"call": call, "kernel": self.__name__, **facts_of(compiled)})

    JITFunction.run = compile_only
    launching.compile_target = lambda device: target
    driver.set_active(absent)
    for calls in (elementwise_calls(), symmetric_calls(target), maxima_calls()):
        for call, launch in calls:
            try:
                launch()
            except Exception as error:  # of one call, which the test shows
                facts.append({"call": call, "error": f"{type(error).__name__}: {error}"[:2000]})
    return facts


# -- what is launched ------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype, gap: int = 0) -> torch.Tensor:
    """Rows that lie ``gap`` elements further apart than they are long."""
    return torch.zeros(*shape[:-1], shape[-1] + gap, dtype=dtype)[..., : shape[-1]]


def elementwise_calls() -> Calls:
    """Every kernel as a step launches it: all options, flat and strided."""
    W = torch.zeros(256, 512)
    B, G, out = W.clone(), W.to(torch.bfloat16), W.to(torch.bfloat16)
    number, factor, sent = torch.zeros(1), torch.ones(256, 1), out.half()
    plain = {"momentum": 0.9, "weight": 1.0, "nesterov": True}
    momentum = partial(elementwise.update_momentum, **plain)
    weights = partial(elementwise.update_weights, rate=0.1, decay=0.01, cautious=False)
    on_device = partial(weights, rate=number, decay=number, factors=[factor], cautious=True)
    residual = torch.zeros(256, 512, dtype=torch.int16)
    places = torch.empty(256, 512, device="meta")
    random_bits = optimizer.weight_rounding.RandomBits(1 << 61, places)
    normalize = partial(
        elementwise.normalize, out=sent[None], factor=1.01, eps=1e-7, eps_absolute=1e-8,
        most_eps=1e18, magnification=16.0,
    )  # fmt: skip
    for launch in (
        partial(momentum, [B], [G], [out]),
        partial(momentum, [G], [G], None),
        partial(momentum, [B[:, 1:]], [G[:, 1:]], [out[:, 1:]]),
        partial(momentum, [B] * 32, [G] * 32, [out] * 32),
        partial(weights, [W], [G]),
        partial(weights, [W.t()], [G.view(512, 256)]),
        partial(weights, [W] * 32, [G] * 32),
        partial(weights, [G] * 32, [out] * 32, rounded_by=[random_bits] * 32),
        partial(on_device, [G], [out]),
        partial(on_device, [G], [out], rounded_by=[residual]),
        partial(on_device, [G], [out], rounded_by=[random_bits]),
        partial(normalize, W[None], divided_by=None),
        partial(normalize, out[None], divided_by=number),
        partial(elementwise.copy, [out[None]] * 32, [out[None]] * 32),
        partial(elementwise.copy, [sent[None]] * 32, [out[None]] * 32),
    ):
        yield "elementwise", launch


def symmetric_calls(target: Any) -> Calls:
    """Each configuration on whole tiles, and with masks: of aligned operands, and of others where a
    rule is for those that cannot be loaded in vectors."""

    def call(name: str, config: Any, dtype: Any, out_dtype: Any, size: int, gap: int) -> Any:
        A = zeros(1, size, size, dtype=dtype, gap=gap)
        C, out = (zeros(1, size, size, dtype=out_dtype, gap=gap) for _ in range(2))
        B = A.mT if size % 128 else A
        launch = partial(symmetric.symmetric_product, A, B, 0.5, 2.0, C, out, config)
        kind = "fp32" if dtype == torch.float32 else "16 bits"
        return f"symmetric {name}, {kind}, {config}", launch

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rule in launching.rules_of(dtype, target.architecture, target.backend):
            if rule.even or (dtype == torch.bfloat16 and rule.aligned):
                yield call("even", rule.config, dtype, dtype, 512, 0)
            elif dtype != torch.bfloat16:
                sizes = (528, 0) if rule.aligned else (500, 1)
                yield call("masked", rule.config, dtype, torch.float32, *sizes)
    if target.architecture == "sm_90":  # what sizes do to the kernel, whatever the chip
        yield call("masked", rule.config, torch.float16, torch.float16, 1, 0)
        symmetric.INT32_MAX = 5
        yield call("masked", rule.config, torch.float16, torch.float16, 500, 1)


def maxima_calls() -> Calls:
    """With rope and documents, or all of a head's width at once, or a mask and any strides."""
    for dtype, positions, name in [
        (torch.bfloat16, 2048, "vectors"), (torch.bfloat16, 128, "vectors"),
        (torch.bfloat16, 128, "whole"), (torch.bfloat16, 100, "masked"),
        (torch.float32, 128, "vectors"), (torch.float32, 100, "masked"),
    ]:  # fmt: skip
        gap = name == "masked"
        q, k, q_rope, k_rope = (
            zeros(2, 32, positions, width, dtype=dtype, gap=gap) for width in (128, 128, 64, 64)
        )
        ids = torch.zeros(2, positions, dtype=torch.int64)
        mask = zeros(2, 32, positions, positions, dtype=torch.float32) if gap else None
        ropes = (None, None) if name == "whole" else (q_rope, k_rope)
        inputs = torch.zeros(32), q, k, *ropes, ids, ids, mask
        how = {"scale": 1.0, "causal": True, "largest_excluded": -1e30 if gap else None}
        kind = "fp32" if dtype == torch.float32 else "16 bits"
        yield f"maxima {name}, {kind}", partial(logit_maxima.raise_maxima, *inputs, **how)


# -- what was compiled -----------------------------------------------------------------------------


def facts_of(compiled: Any) -> dict[str, Any]:
    """Matrix instructions by name, bytes of shared and spilled memory, products fused with sums,
    wide accesses."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        usage = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\n", text)}
        spilled = usage["private_segment_fixed_size"] + usage["vgpr_spill_count"]
        instructions = r"\b(v_w?mfma|v_wmma)_"
        fused = r"v_(?:pk_)?(?:fma|fmac|mad|mac)_f\d+"
        vectors = r"(?:global|buffer)_(?:load|store)_dwordx4"
    else:
        text = compiled.asm["ptx"]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            command = [CUOBJDUMP, "-res-usage", cubin.name]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", shown)}
        spilled = usage["STACK"] + usage["LOCAL"]  # like an array indexed at run time
        instructions = r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"
        fused = r"\b(?:fma|mad)\.\w+\.f\d+"
        vectors = r"(?:ld|st)\.global\.v4"
    return {
        "matrix_instructions": sorted(set(re.findall(instructions, text))),
        "shared": compiled.metadata.shared,
        "spilled": spilled,
        "fused": len(re.findall(fused, text)),
        "vectors": len(re.findall(vectors, text)),
    }


if __name__ == "__main__":
    shown, sys.stdout = sys.stdout, sys.stderr  # where Triton tells what ptxas refused
    json.dump(compiled_for(sys.argv[1]), shown)
