"""Examples are imported by name; nothing asks the Hub; every training is audited."""

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "clients"
sys.path.insert(0, str(EXAMPLES))
os.environ["HF_HUB_OFFLINE"] = "1"  # LOCAL_KERNELS, set by then, needs no Hub
os.environ["OMP_NUM_THREADS"] = "1"

# timm and torchvision are in a folder of their own: the trainers' processes, which would load
# torchvision where they find it, must not. Beside torch's CPU build its wheel has no operators, and
# the module that describes these fails to load; no test needs them.
sys.path.append(str(Path(sys.prefix) / "vision"))
sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("no operators"))


@pytest.fixture(autouse=True)
def audited() -> Iterator[None]:
    import audits  # loads the kernel

    with audits.healthy():
        yield
