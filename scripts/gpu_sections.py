"""What `make gpu` runs, as data: sections of commands, and the aims that their figures have.

gpu_report.py beside this file runs them, in this order, until its deadline.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

CHECKOUT = Path(__file__).resolve().parent.parent


# Seconds after which no section is started, and a running one is stopped.
ON_ONE_DEVICE, ON_SEVERAL = 600, 2000


@dataclass(frozen=True)
class Machine:
    """What there is to measure."""

    devices: int
    sanitizer: str | None  # NVIDIA's, where it is installed

    @classmethod
    def here(cls) -> Machine:
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
        return cls(count, shutil.which("compute-sanitizer", path=path))

    @property
    def seconds(self) -> int:
        return ON_ONE_DEVICE if self.devices < 2 else ON_SEVERAL


@dataclass(frozen=True)
class Command:
    """One process of Python.

    Args:
        words: after the interpreter.
        full: further words, with --full.
        fake: in the place of all these without a device; nothing is run where there are none.
        before: in front of the interpreter.
        environment: variables, beside those that there are.
    """

    words: str
    full: str = ""
    fake: str = ""
    before: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def line(self, options: argparse.Namespace) -> str:
        words = [self.before, "python", self.words, self.full if options.full else ""]
        if options.fake:
            words = ["python", self.fake] if self.fake else []
        return " ".join(word for word in words if word).replace(
            "OUT/", f"{shlex.quote(str(options.out))}/"
        )

    def variables(self, options: argparse.Namespace) -> Mapping[str, str]:
        return {"TEST_DEVICE": "fake"} if options.fake else self.environment


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Args:
        name: of its files, too.
        what: it shows.
        seconds: after which its commands, together, are stopped.
        commands: in order, whether or not one fails.
        missing: why it can't be run on a machine, or None.
        runs_alone: as what measures time has to; the others run side by side, before these.
    """

    name: str
    what: str
    seconds: int
    commands: Sequence[Command]
    missing: Callable[[Machine], str | None] = lambda machine: None
    runs_alone: bool = True


@dataclass(frozen=True)
class Aim:
    """What figures in tables should be.

    Args:
        what: in words.
        column: the figure's, in any table.
        key, row: the column and its value that tell the rows; without them all rows of the table.
        most, least: bounds.
        baseline: what ``key`` is in the row to compare with, of the same shape; None: the same row.
        beside: the column that is shown of the baseline.
        relative: the figure is a ratio of ``column`` in the two rows.
    """

    what: str
    column: str
    key: str | None = None
    row: str | None = None
    most: float = float("inf")
    least: float = float("-inf")
    baseline: str | None = None
    beside: str = "least ms"
    relative: bool = False


# -- sections --------------------------------------------------------------------------------------


def fewer_than_two_devices(machine: Machine) -> str | None:
    return (
        None if machine.devices > 1 else f"needs two GPUs or more, and there is {machine.devices}"
    )


def no_sanitizer(machine: Machine) -> str | None:
    return None if machine.sanitizer else "compute-sanitizer is not installed"


KERNEL_TESTS = " ".join(
    str(path.relative_to(CHECKOUT))
    for path in sorted((CHECKOUT / "tests").glob("test_triton_*.py"))
    if path.name not in ("test_triton_compile.py", "test_triton_launching.py")  # of no device
)
# Each kernel, with every way to load tiles.
SANITIZED = "float64s or tiles or factors_of or beta_is_zero or any_shape or kind_of or round_w"
PARALLEL = f"-n {min(8, os.cpu_count() or 1)} --dist worksteal"
LLAMA_SHARE = "benchmarks/step.py --model llama-3-8b --share 8 --rounds 5"
FAKE_STEP = "--layers 1 --dim 32 --ffn 64 --rounds 1 --ceiling 32"
ON_FAKE = "tests/on_fake_device.py"
OVER_NCCL = {"TEST_DEVICE": "cuda"}  # tests/ranks.py
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # of freed memory, whose misuse it would hide

# What the imitation of a device lacks: graphs, views of negated complex numbers, autograd,
# and products that do not depend on the width of a tile.
NOT_IMITATED = " or ".join(
    (
        *("replayed_step", "lazily_negated", "call_that_is_recorded", "compiled_graph"),
        "((around_the_output or upper_triangle) and wide)",
    )
)

# In the order of their worth: a deadline cuts off the last ones.
SECTIONS = [
    Section(
        "kernels",
        "every kernel against float64, by shape and dtype",
        150,
        [
            Command(
                f'-m pytest -q {KERNEL_TESTS} -m "not slow" {PARALLEL}',
                full='-m "slow or not slow"',  # the last one holds
                fake=f'-m pytest -q {KERNEL_TESTS} -m "not slow" '
                f'-k "not ({NOT_IMITATED})" '
                f"-p tests.on_fake_device {PARALLEL}",
            )
        ],
        runs_alone=False,
    ),
    Section(
        "sanitizer",
        "compute-sanitizer's memcheck over a test or two of each kernel",
        150,
        [
            Command(
                f'-m pytest -q {KERNEL_TESTS} -m "not slow" -k "{SANITIZED}"',
                before="compute-sanitizer --tool memcheck --report-api-errors no "
                "--target-processes application-only --error-exitcode 9",
                environment=NO_CACHE,
            )
        ],
        no_sanitizer,
        runs_alone=False,
    ),
    Section(
        "accuracy",
        "errors of orthogonalization by the kernels themselves, and their bounds",
        170,
        [
            Command(
                "benchmarks/accuracy.py --check",
                full="--all",
                fake=f'{ON_FAKE} benchmarks/accuracy.py --check --quick --inputs Gaussian "rank 1"',
            )
        ],
        runs_alone=False,
    ),
    Section(
        "waits",
        "QK-Clip and its recorder never make the host wait; page-locked memory of offload",
        150,
        [
            Command(
                '-m pytest -q tests/test_qk_recorder.py -k "host_wait or compiled_flex"',
                fake="-m pytest -q tests/test_qk_recorder.py -k host_wait",
            ),
            Command(f"-m pytest -q tests/test_offload_memory.py {PARALLEL}"),
        ],
        runs_alone=False,
    ),
    Section(
        "checks",
        "whole steps: cold, beside float64, twice, offloaded, without waits, of one rank of eight",
        110,
        [
            Command(
                "scripts/gpu_checks.py --out OUT/",
                fake=f"{ON_FAKE} scripts/gpu_checks.py --out OUT/ --small",
            )
        ],
    ),
    Section(
        "step",
        "a step of one rank's share beside torch.optim.Muon, fused AdamW and dion, and a floor",
        100,
        [
            Command(LLAMA_SHARE, fake=f"{ON_FAKE} benchmarks/step.py {FAKE_STEP}"),
            Command("benchmarks/step.py --layers 12 --dim 512 --ffn 2048 --rounds 5"),
            Command("benchmarks/step.py --model llama-3-8b --share 64 --rounds 5"),
        ],
    ),
    Section(
        "offload",
        "a step with its state on the device, and streamed from host memory; the link's speed",
        70,
        [
            Command(
                "benchmarks/offload.py --share llama-3-8b --repeats 5",
                full="qwen3-30b-a3b",
                fake="benchmarks/offload.py --share llama-3-8b --layers 1",
            )
        ],
    ),
    Section(
        "tuning",
        "tiles of symmetric products that are faster than those looked up so far",
        100,
        [
            Command(
                "benchmarks/tune.py --short --seconds 85",
                fake="benchmarks/tune.py --short --dry-run",
            ),
        ],
    ),
    Section(
        "products",
        "each kernel of symmetric products beside the whole product of cuBLAS, by shape",
        60,
        [
            Command(
                "benchmarks/symmetric_products.py --rounds 5",
                fake="benchmarks/symmetric_products.py --rounds 1",
            )
        ],
    ),
    Section(
        "shapes",
        "orthogonalization by shape, form and arithmetic",
        75,
        [
            Command(
                "benchmarks/orthogonalize.py --rounds 5",
                fake=f"{ON_FAKE} benchmarks/orthogonalize.py --shapes 32x64 --rounds 1 "
                "--ceiling 32",
            )
        ],
    ),
    Section(
        "qk",
        "what QK-Clip and its recorder cost",
        60,
        [
            Command(
                "benchmarks/qk_clip.py --rounds 5",
                fake=f"{ON_FAKE} benchmarks/qk_clip.py --sizes 1 64 2 1 --rounds 1",
            ),
            Command(
                "benchmarks/qk_logits.py --rounds 3",
                fake="benchmarks/qk_logits.py --shapes 1x2x1x32x8 --rounds 1",
            ),
        ],
    ),
    Section(
        "whole-step",
        "a step of as many layers of Llama 3 8B as fit, beside the same optimizers and a floor",
        45,
        [
            Command(
                "benchmarks/step.py --model llama-3-8b --layers fit --rounds 3",
                fake=f"{ON_FAKE} benchmarks/step.py {FAKE_STEP}",
            )
        ],
    ),
    Section(
        "memory",
        "the allocator's record of three steps, for https://pytorch.org/memory_viz",
        40,
        [
            Command(
                f"{LLAMA_SHARE} --contenders ours --snapshot OUT/memory.pickle",
                fake=f"{ON_FAKE} benchmarks/step.py {FAKE_STEP} --contenders ours "
                "--snapshot OUT/memory.pickle",
            )
        ],
    ),
    Section(
        "layouts",
        "layouts, replicas and faults over NCCL, a rank for each GPU",
        1200,
        [
            Command(
                "-m pytest -q tests/test_layouts.py tests/test_sharded.py tests/test_faults.py "
                '-m "not slow"',
                full='-m "slow or not slow"',
                fake="-m pytest -q tests/test_layouts.py tests/test_faults.py "
                '-k "default_formats or other_hyperparameters" -m "not slow"',
                environment=OVER_NCCL,
            ),
            Command("-m pytest -q tests/test_replicas.py", environment=OVER_NCCL),
        ],
        fewer_than_two_devices,
    ),
    Section(
        "traffic",
        "a sharded step, and all-to-alls by size beside the wire's best rate",
        180,
        [
            Command(
                "benchmarks/distributed_step.py --tables step wire --layers 4 --dim 4096 "
                "--ffn 14336",
                fake="benchmarks/distributed_step.py --tables step wire --ranks 2 --layers 1 "
                "--dim 32 --ffn 64 --rounds 1 --wire 4096 65536",
            )
        ],
        fewer_than_two_devices,
    ),
]


# -- aims ------------------------------------------------------------------------------------------

OURS = "Muon (this package)"

AIMS = [
    Aim(
        "a step within 1.3 × the floor",
        "× floor",
        "optimizer",
        OURS,
        most=1.3,
        baseline="floor",
    ),
    Aim(
        "a step 2.3 times as fast as torch.optim.Muon",
        "× torch",
        "optimizer",
        OURS,
        most=1 / 2.3,
        baseline="torch.optim.Muon",
    ),
    Aim(
        "the host done with a step in half of its time",
        "host / step",
        "optimizer",
        OURS,
        most=0.5,
    ),
    Aim(
        "a symmetric product of 4096 × 4096 1.4 times as fast as the library's whole one",
        "speed-up",
        "product",
        "XXᵀ, 4096 × 4096",
        least=1.4,
        beside="library, least ms",
    ),
    Aim(
        "each symmetric product faster than the library's whole one",
        "speed-up",
        least=1.0,
        beside="library, least ms",
    ),
    Aim(
        "a streamed step within 1.1 × the longer of arithmetic and copies",
        "ratio",
        "offload",
        "on",
        most=1.1,
        baseline="off",
    ),
    Aim(
        "QK-Clip within 1 % of a step",
        "least ms",
        "",
        "step with QK-Clip",
        most=1.01,
        baseline="step",
        relative=True,
    ),
    Aim(
        "maxima of logits within half of attention's forward",
        "× attention",
        "contender",
        "max_qk_logits",
        most=0.5,
        baseline="attention, forward",
    ),
    Aim(
        "a step allocates at most 1.5 × the weights",
        "transient / weights",
        most=1.5,
        beside="weights MiB",
    ),
]
