"""Compiles Triton kernels for chips that need not be there: a process of its own.

    python tests/compile_kernels.py < jobs.json > results.json

A job names a module of triton_kernels, a kernel in it, and its arguments: a type as Triton writes
it (``"*fp16:16"``, a pointer whose address is divisible by 16; ``"i32"``), or the value of one that
is constant while compiling (a number or truth value; also a stride that is 1; null), or a list of
such for a tuple. The tests of the interpreter need TRITON_INTERPRET=1, which must not be set here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel import optimizer

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def main() -> None:
    results = []
    for job in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(sys.stderr):  # where Triton tells what ptxas refused
                results.append(compile_job(job))
        except Exception as error:  # of one job, which its own test reports
            results.append({"error": f"{type(error).__name__}: {error}"[:2000]})
    json.dump(results, sys.stdout)


def compile_job(job: dict[str, Any]) -> dict[str, Any]:
    """Matrix instructions by name, bytes of shared and spilled memory, registers of a thread."""
    module = importlib.import_module(f"{optimizer.__name__}.triton_kernels.{job['module']}")
    kernel = getattr(module, job["kernel"])
    signature, constants, attributes = {}, {}, {}

    def type_of(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, list):
            return tuple(type_of(part, (*path, at)) for at, part in enumerate(value))
        if not isinstance(value, str):
            constants[path] = value
            return "constexpr"
        kind, _, divisor = value.partition(":")
        if divisor:
            attributes[path] = [["tt.divisibility", int(divisor)]]
        return kind

    for position, name in enumerate(kernel.arg_names):
        signature[name] = type_of(job["arguments"][name], (position,))
    unknown = set(job["arguments"]) - set(signature)
    if unknown:
        raise ValueError(f"{job['kernel']} has no arguments {sorted(unknown)}")
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=target(job["architecture"]),
        options={option: job[option] for option in OPTIONS},
    )
    found = usage_of_amd(compiled) if "amdgcn" in compiled.asm else usage_of_nvidia(compiled)
    return {"shared": compiled.metadata.shared, **found}


def target(architecture: str) -> GPUTarget:
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)
    return GPUTarget("cuda", int(architecture.partition("_")[2]), 32)


def usage_of_nvidia(compiled: Any) -> dict[str, Any]:
    """A spilled register, like an array indexed at run time, lies on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [CUOBJDUMP, "-res-usage", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
    instructions = r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"
    return {
        "matrix_instructions": sorted(set(re.findall(instructions, compiled.asm["ptx"]))),
        "spilled": usage["STACK"] + usage["LOCAL"],
        "registers": usage["REG"],
    }


def usage_of_amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        (value,) = re.findall(rf"\.{key}:\s+(\d+)", text)
        return int(value)

    instructions = r"\b(v_w?mfma|v_wmma)_"
    return {
        "matrix_instructions": sorted(set(re.findall(instructions, text))),
        "spilled": number("private_segment_fixed_size") + number("vgpr_spill_count"),
        "registers": number("vgpr_count"),
    }


if __name__ == "__main__":
    main()
