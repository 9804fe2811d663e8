"""Compiles what calls of the package would launch, for accelerators that are not there.

Run as a program, without TRITON_INTERPRET: prints a JSON list of what `FACTS` says of each kernel.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from compile_kernels import usage_of_amd, usage_of_nvidia
from kernel import optimizer

FACTS = ("kernel", "architecture", "spills", "fused", "vectors")
TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)]


def compile_for_all(calls: Callable[[], None]) -> list[dict[str, Any]]:
    """The facts of every kernel that ``calls`` launches on CPU tensors, for each target."""

    class Absent:
        """The driver of a device that is not there."""

        def __init__(self, target: GPUTarget):
            self.target = target

        def get_current_target(self) -> GPUTarget:
            return self.target

        def get_current_device(self) -> str:
            return str(self.target)

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        compiled.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    for target in TARGETS:
        driver.set_active(Absent(GPUTarget(*target)))
        calls()
    return [dict(zip(FACTS, facts_of(name, kernel))) for name, kernel in compiled]


def facts_of(name: str, kernel: Any) -> tuple:
    """`FACTS` of a compiled kernel: registers spilled, products fused with sums, wide accesses."""
    architecture = str(kernel.metadata.target.arch)
    if "amdgcn" in kernel.asm:
        text, usage = kernel.asm["amdgcn"], usage_of_amd(kernel)
        fused = len(re.findall(r"v_(?:pk_)?(?:fma|fmac|mad|mac)_f\d+", text))
        vectors = len(re.findall(r"(?:global|buffer)_(?:load|store)_dwordx4", text))
    else:
        text, usage = kernel.asm["ptx"], usage_of_nvidia(kernel)
        fused = len(re.findall(r"\b(?:fma|mad)\.\w+\.f\d+", text))
        vectors = len(re.findall(r"(?:ld|st)\.global\.v4", text))
    return name, architecture, usage["spilled"], fused, vectors


def elementwise_calls() -> None:
    """Every kernel as a step launches it: all options, flat and strided."""
    elementwise = importlib.import_module(f"{optimizer.__name__}.triton_kernels.elementwise")
    W = torch.zeros(256, 512)
    B, G, out = W.clone(), W.to(torch.bfloat16), W.to(torch.bfloat16)
    number, factor = torch.zeros(1), torch.ones(256, 1)
    plain = {"momentum": 0.9, "weight": 1.0, "nesterov": True}
    sent = out.half()
    elementwise.update_momentum([B], [G], [out], **plain)
    elementwise.update_momentum([G], [G], None, **plain)
    elementwise.update_momentum([B[:, 1:]], [G[:, 1:]], [out[:, 1:]], **plain)
    rates = {"rate": 0.1, "decay": 0.01}
    on_device = {"rate": number, "decay": number, "factors": [factor]}
    elementwise.update_weights([W], [G], cautious=False, **rates)
    elementwise.update_weights([G], [out], cautious=True, **on_device)
    elementwise.update_weights([W.t()], [G.view(512, 256)], cautious=False, **rates)
    elementwise.update_weights([W] * 32, [G] * 32, cautious=False, **rates)
    residual = torch.zeros(256, 512, dtype=torch.int16)
    places = torch.empty(256, 512, device="meta")
    random_bits = optimizer.weight_rounding.RandomBits(1 << 61, places)
    elementwise.update_weights(
        [G] * 32, [out] * 32, cautious=False, rounded_by=[random_bits] * 32, **rates
    )
    for by in ([residual], [random_bits]):
        elementwise.update_weights([G], [out], cautious=True, rounded_by=by, **on_device)
    elementwise.update_momentum([B] * 32, [G] * 32, [out] * 32, **plain)
    for matrices, divided_by in ((W, None), (out, number)):
        elementwise.normalize(
            matrices[None], sent[None], 1.01, 1e-7, 1e-8, divided_by, 1e18, magnification=16.0
        )
    elementwise.copy([out[None]] * 32, [out[None]] * 32)
    elementwise.copy([sent[None]] * 32, [out[None]] * 32)


if __name__ == "__main__":
    json.dump(compile_for_all(elementwise_calls), sys.stdout)
