"""Builds the kernel into a temporary directory, for `get_kernel` to find, before tests load.

Where only the tests and the package are present (the Hub's kernel builder), LOCAL_KERNELS already
names the build under test.
"""

import hashlib
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from kernels.backends import _backend

from loopback_hub import client, hub, releases  # noqa: F401 (fixtures of test_hub.py)

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

# Threads of several processes that wait for each other on few cores take most of the time.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // workers))

BUILD_SCRIPT = Path(__file__).parent.parent / "scripts" / "build.py"

collect_ignore = []
if not (BUILD_SCRIPT.parent.parent / "examples").exists():
    collect_ignore += ["test_benchmarks.py", "test_docs.py", "test_hub.py", "test_plan_example.py"]
    collect_ignore += ["test_training.py", "test_gpu_report.py", "test_triton_compile.py"]

if importlib.util.find_spec("transformers") is None:  # `make test-clients` has it
    collect_ignore.append("clients")

# The same examples in every run; with pytest --hypothesis-profile=night others, HYPOTHESIS_FACTOR
# times as many.
FACTORS = {"same": 1.0, "night": float(os.environ.get("HYPOTHESIS_FACTOR", "10"))}

if importlib.util.find_spec("hypothesis") is None:  # in the Hub's builder
    collect_ignore.append("test_properties.py")
else:
    import hypothesis

    for name, factor in FACTORS.items():
        hypothesis.settings.register_profile(
            name,
            max_examples=round(100 * factor),  # of 100 that a test asks for
            derandomize=name == "same",
            database=None,
            deadline=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
    hypothesis.settings.load_profile("same")

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


# The time, in seconds since 1970, after which no slow test is started: continuous integration has a
# limit, and machines differ by a factor of three. What is left out then is named, and differs from
# run to run.
SLOW_UNTIL = float(os.environ.get("SLOW_UNTIL", "inf"))


def pytest_collection_modifyitems(items):
    if math.isfinite(SLOW_UNTIL):
        names = {item.path.name for item in items}
        places = {name: hashlib.sha256(f"{SLOW_UNTIL} {name}".encode()).digest() for name in names}
        items.sort(key=lambda item: places[item.path.name])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if time.time() > SLOW_UNTIL and item.get_closest_marker("slow"):
        pytest.skip(f"no time was left for {item.nodeid}")


@pytest.fixture
def one_thread():
    """Threads that wait for each other take longer than small matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seeded_on_one_thread(one_thread):
    """The same numbers of torch's own generator, whatever ran before."""
    torch.manual_seed(0)
