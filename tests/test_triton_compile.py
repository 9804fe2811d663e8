"""Every kernel, in every configuration that is picked without measuring, compiles for every chip.

No chip is needed: two processes cross-compile what `CASES` lists, and each case is a test. Another
kernel joins by a function like `symmetric_cases` and a place in `CASES`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel import optimizer

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import tune

pytest.importorskip("triton")

launching, logit_maxima = (
    import_module(f"{optimizer.__name__}.triton_kernels.{name}")
    for name in ("launching", "logit_maxima")
)

PROCESSES = 2


@dataclass(frozen=True)
class Chip:
    architecture: str
    backend: str
    shared_bytes: int  # that one program may have
    matrix_instruction: str
    has_fp32_matrices: bool = False


CHIPS = [
    Chip("sm_80", "cuda", 163 << 10, "mma.sync"),
    Chip("sm_90", "cuda", 227 << 10, "wgmma.mma_async"),
    Chip("sm_100", "cuda", 227 << 10, "tcgen05.mma"),
    Chip("sm_120", "cuda", 99 << 10, "mma.sync"),
    Chip("gfx90a", "hip", 64 << 10, "v_mfma", has_fp32_matrices=True),
    Chip("gfx942", "hip", 64 << 10, "v_mfma", has_fp32_matrices=True),
    Chip("gfx950", "hip", 160 << 10, "v_mfma", has_fp32_matrices=True),
]
POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}


@dataclass(frozen=True)
class Case:
    """What to compile, and what must be found in it."""

    name: str
    chip: Chip
    job: dict[str, Any]
    matrix_instruction: bool
    most_spilled: int = 0  # bytes


def symmetric_cases(chip: Chip) -> list[Case]:
    """Each configuration as bA + cA² on whole tiles, and as αAB + βC with masks and all there is.

    Where a rule is for operands that cannot be loaded in vectors, the latter is compiled for those.
    """
    cases = {}
    for dtype in ("bfloat16", "float16", "float32"):
        for rule in launching.rules_of(getattr(torch, dtype), chip.architecture, chip.backend):
            config = rule.config
            key = f"{chip.architecture}-symmetric-{config.block}x{config.block_k}"
            uses_matrices = dtype != "float32" or chip.has_fp32_matrices
            if rule.even or (dtype == "bfloat16" and rule.aligned):
                key += f"-{config.num_warps}"
                job = symmetric_job(chip, dtype, dtype, config, even=True, aligned=True)
                cases[f"{key}-{dtype}"] = Case(f"{key}-{dtype}-even", chip, job, uses_matrices)
            elif dtype != "bfloat16":
                job = symmetric_job(chip, dtype, "float32", config, False, rule.aligned)
                # Two numbers may wait for the end of the loop, of sizes that are no multiples.
                name = f"{key}-{dtype}"
                cases[name] = Case(f"{name}-masked", chip, job, uses_matrices, most_spilled=8)
    if chip.architecture == "sm_90":  # what sizes do to the kernel, whatever the chip
        job = symmetric_job(chip, "float16", "float16", config, even=False, aligned=False)
        one = {**job, "arguments": {**job["arguments"], "s": 1, "k": 1}}  # Triton makes 1 constant
        wide = {**job, "arguments": {**job["arguments"], "LONG_OFFSETS": True}}
        cases["one"] = Case(f"{chip.architecture}-symmetric-one", chip, one, True)
        cases["wide"] = Case(f"{chip.architecture}-symmetric-wide", chip, wide, True)
    if chip.architecture in tune.HOPPER:
        for fields in tune.WIDE_OR_IN_BULK:
            config = launching.SymmetricConfig(**fields)
            name = f"{chip.architecture}-symmetric-{config.block}x{config.block * config.width}"
            name += f"-{config.num_stages}" + ("-in-bulk" if config.descriptors else "")
            for even in (True, False):
                job = symmetric_job(chip, "float16", "float16", config, even, aligned=True)
                case = f"{name}-{'even' if even else 'masked'}"
                # Beside 128 accumulators a thread, a few numbers wait for the end of the loop.
                cases[case] = Case(case, chip, job, True, most_spilled=16)
    return list(cases.values())


def symmetric_job(
    chip: Chip, dtype: str, out_dtype: str, config: Any, even: bool, aligned: bool
) -> dict[str, Any]:
    size, full = ("i32:16" if aligned else "i32"), not even
    inner, outer = ((1, size), (size, 1)) if full else ((size, 1), (1, size))
    arguments = {
        "a_ptr": f"{POINTERS[dtype]}:16",
        "b_ptr": f"{POINTERS[dtype]}:16",
        "c_ptr": f"{POINTERS[out_dtype]}:16",
        "out_ptr": f"{POINTERS[out_dtype]}:16",
        **dict.fromkeys(("alpha", "beta"), "fp32"),
        **dict.fromkeys(("s", "k"), size),
        "per_matrix": "i32",
        "a_strides": [size, *inner],
        "b_strides": [size, *outer],
        **{name: [size, size, 1] for name in ("c_strides", "out_strides")},
        "HAS_C": True,
        "DESCRIPTORS": config.descriptors,
        "A_TRANSPOSED": False,
        "B_TRANSPOSED": full,
        "EVEN": even,
        "LONG_OFFSETS": False,
        "INTERPRETED": False,
        "BLOCK": config.block,
        "BLOCK_K": config.block_k,
        "WIDTH": config.width,
        "GROUP": config.group,
    }
    if config.descriptors:
        kind, wide = POINTERS[dtype][1:], config.block * config.width
        b_tile = (wide, config.block_k) if full else (config.block_k, wide)
        arguments["a_ptr"] = f"tensordesc<{kind}[1,{config.block},{config.block_k}]>"
        arguments["b_ptr"] = f"tensordesc<{kind}[1,{b_tile[0]},{b_tile[1]}]>"
    return {
        "module": "symmetric",
        "kernel": "_symmetric_kernel",
        "architecture": chip.architecture,
        "arguments": arguments,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,
    }


def maxima_cases(chip: Chip) -> list[Case]:
    """Each configuration with rope and documents, or, where its rule is not for vectors, with a
    mask, too, and any strides."""
    cases = {}
    for dtype in ("bfloat16", "float32"):
        for rule in launching.rules_of(getattr(torch, dtype), chip.architecture, chip.backend):
            config = logit_maxima.with_two_tiles(rule.config, getattr(torch, dtype))
            uses_matrices = dtype != "float32" or chip.has_fp32_matrices
            name = f"{chip.architecture}-maxima-{config.block}x{config.block_k}-{dtype}"
            name += "-vectors" if rule.aligned else "-masked"
            job = maxima_job(chip, dtype, config, rule.aligned)
            cases[name] = Case(name, chip, job, uses_matrices)
            if dtype == "bfloat16" and rule.aligned:  # all of a head's width at once
                whole = {"WHOLE": True, "BLOCK_WIDTH": logit_maxima.WHOLE_WIDTH}
                whole |= dict.fromkeys(("q_rope", "k_rope", "rope_width"))
                whole |= dict.fromkeys(("q_rope_steps", "k_rope_steps"))
                job = {**job, "arguments": {**job["arguments"], **whole}}
                cases[f"{name}-whole"] = Case(f"{name}-whole", chip, job, uses_matrices)
    return list(cases.values())


def maxima_job(chip: Chip, dtype: str, config: Any, aligned: bool) -> dict[str, Any]:
    steps = ["i32:16", "i32:16", "i32:16", 1] if aligned else ["i32"] * 4
    arguments = {
        "out": "*i32:16",
        **dict.fromkeys(("q", "k", "q_rope", "k_rope"), f"{POINTERS[dtype]}:16"),
        **dict.fromkeys(("query_ids", "key_ids"), "*i64:16"),
        "mask": None if aligned else "*fp32:16",
        "scale": "fp32",
        "largest_excluded": None if aligned else "fp32",
        **dict.fromkeys(("heads", "group", "queries", "keys", "out_stride"), "i32"),
        **dict.fromkeys(("width", "rope_width"), "i32:16" if aligned else "i32"),
        **dict.fromkeys(("q_steps", "k_steps", "q_rope_steps", "k_rope_steps"), steps),
        **{f"{name}_ids_steps": ["i32", 1] for name in ("query", "key")},
        "mask_steps": None if aligned else ["i32"] * 4,
        "CAUSAL": True,
        "WHOLE": False,
        "INTERPRETED": False,
        "BLOCK": config.block,
        "KEYS": min(config.block, logit_maxima.KEYS),
        "BLOCK_WIDTH": config.block_k,
    }
    return {
        "module": "logit_maxima",
        "kernel": "_maxima_kernel",
        "architecture": chip.architecture,
        "arguments": arguments,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": False,
    }


CASES = [
    case
    for chip in CHIPS
    for cases_of in (symmetric_cases, maxima_cases)
    for case in cases_of(chip)
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """What became of each case, by name."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    shares = [CASES[first::PROCESSES] for first in range(PROCESSES)]
    processes = [
        subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in shares
    ]
    for process, share in zip(processes, shares):
        json.dump([case.job for case in share], process.stdin)
        process.stdin.close()
    results: dict[str, dict[str, Any]] = {}
    for process, share in zip(processes, shares):
        answer = process.stdout.read()
        assert process.wait() == 0
        results.update(zip((case.name for case in share), json.loads(answer)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_compiles_to_matrix_instructions_without_spilling(case, compiled):
    found = compiled[case.name]
    assert "error" not in found, found["error"]
    expected = [case.chip.matrix_instruction] if case.matrix_instruction else []
    assert found["matrix_instructions"] == expected
    assert found["spilled"] <= case.most_spilled, found
    assert found["shared"] <= case.chip.shared_bytes, found
