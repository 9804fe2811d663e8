"""Builds the kernel into a temporary directory, for `get_kernel` to find, before tests load.

Where only the tests and the package are present (the Hub's kernel builder), LOCAL_KERNELS already
names the build under test.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from kernels.backends import _backend

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

BUILD_SCRIPT = Path(__file__).parent.parent / "scripts" / "build.py"

if not (BUILD_SCRIPT.parent.parent / "examples").exists():
    collect_ignore = ["test_benchmarks.py", "test_plan_example.py", "test_training.py"]

if BUILD_SCRIPT.exists():
    # Held by the module: the directory goes when the test process ends.
    checkout = tempfile.TemporaryDirectory(prefix="optimizer-kernel-")
    build = ["--output", checkout.name, "--backend", _backend().name]
    subprocess.run([sys.executable, BUILD_SCRIPT, *build], check=True, stdout=subprocess.DEVNULL)
    os.environ["LOCAL_KERNELS"] = f"org/optimizer={checkout.name}"
elif "org/optimizer=" not in os.environ.get("LOCAL_KERNELS", ""):
    raise pytest.UsageError(
        "there is no scripts/build.py to build the kernel with: set "
        "LOCAL_KERNELS=org/optimizer=DIR, where DIR holds a build"
    )


@pytest.fixture
def one_thread():
    """Threads that wait for each other take longer than small matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
