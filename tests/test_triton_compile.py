"""Every kernel, in every configuration that is picked without measuring, compiles for every chip.

No chip is needed: a process for each compiles what the package launches (compile_kernels.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Matrix instructions, and the bytes of shared memory that one program may have.
CHIPS = {
    "sm_80": ("mma.sync", 163 << 10),
    "sm_90": ("wgmma.mma_async", 227 << 10),
    "sm_100": ("tcgen05.mma", 227 << 10),
    "sm_120": ("mma.sync", 99 << 10),
    "gfx90a": ("v_mfma", 64 << 10),
    "gfx942": ("v_mfma", 64 << 10),
    "gfx950": ("v_mfma", 160 << 10),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
@pytest.mark.parametrize("architecture", CHIPS)
def test_kernels_compile_to_matrix_instructions_without_spills_and_fused_rounding(architecture):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).with_name("compile_kernels.py"), architecture]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 0
    instruction, shared = CHIPS[architecture]
    is_amd = architecture.startswith("gfx")
    facts = json.loads(done.stdout)
    for fact in facts:
        assert "error" not in fact, fact
        assert fact["shared"] <= shared, fact
        name, *words = fact["call"].split(", ")
        # A few numbers wait for the end of the loop: sizes, beside 128 accumulators a thread more.
        most_spilled = 8 if name == "symmetric masked" else 0
        assert fact["spilled"] <= most_spilled, fact
        if name == "elementwise":
            # AMD divides with fused operations, which the norms alone need.
            divides = fact["kernel"] in ("_measure_kernel", "_sizes_kernel", "_copy_kernel")
            assert fact["fused"] == 0 or (divides and is_amd), fact
        else:
            has_matrices = is_amd or "fp32" not in words
            assert fact["matrix_instructions"] == [instruction] * has_matrices, fact
    vectors = {fact["kernel"] for fact in facts if fact["vectors"]}
    assert vectors >= {"_momentum_kernel", "_weights_kernel", "_copy_kernel"}
    kernels = {fact["kernel"] for fact in facts}
    assert kernels >= {"_symmetric_kernel", "_maxima_kernel", "_measure_kernel", "_sizes_kernel"}
