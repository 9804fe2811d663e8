"""What a step gives an accelerator, one by one, and what that costs the host; takes no accelerator.

    make bench BENCHMARKS=benchmarks/launches.py

Counted on tensors of real shapes that are "on" a device which is not there (tests/fake_device.py),
with a stub of the driver below Triton (tests/stub_driver.py): launches of Triton's kernels, torch's
operations that are kernels or copies, collectives. ``--rounds`` times the host beside: the same
step on tensors of the CPU, which is told to be the accelerator, with operations that write large
tensors replaced by nothing. So it has Python, dispatch and Triton's work before a launch in it, and
of torch's own launches, which take some µs each, an empty function's call.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from timing import load_kernel, machine, show

kernel = load_kernel()
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
accelerator_path: Any = import_module("accelerator_path")
lone_rank: Any = import_module("lone_rank").lone_rank
stub_driver: Any = import_module("stub_driver")
CASES = accelerator_path.CASES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# In fp16, the default: what normalizes in other arithmetic is not replaced below.
TIMED = [name for name, case in CASES.items() if "ns_dtype" not in case.options]

# Operations that write an argument of theirs, large ones among them, and the argument's name.
WRITING = {
    "copy_": "self",
    "zero_": "self",
    "add_.Tensor": "self",
    "mul_.Tensor": "self",
    "bmm.out": "out",
    "baddbmm.out": "out",
    "mul.out": "out",
    "_foreach_copy_": "",
    "_fused_adamw_": "",
}


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """Tensors on the CPU take the path of an accelerator's, and large ones are left as they are."""

    def module(name: str) -> Any:
        return import_module(f"{kernel.__name__}.{name}")

    limits = module("distributed.limits")
    iteration, survey = module("newton_schulz.iteration"), module("parameters.survey")
    launching, symmetric = module("triton_kernels.launching"), module("triton_kernels.symmetric")
    normalization = module("newton_schulz.normalization")
    by_cpus = (
        *(limits.BATCH_BYTES, limits.CHUNK_BYTES),
        *(iteration.AT_ONCE_BYTES, normalization.PART_BYTES),
    )

    def recipe_for(*options: Any, **more: Any) -> Any:
        return recipe(*options[:-2], CUDA, options[-1], **more)

    recipe = survey.recipe_for
    h100 = launching.CompileTarget("NVIDIA H100", "sm_90", "cuda", processors=132)
    with ExitStack() as stack:
        for owner, name, value in (
            (survey, "recipe_for", recipe_for),
            (iteration, "recipe_for", recipe_for),
            (module("triton_kernels"), "is_used_on", lambda device_type: True),
            (launching, "compile_target", lambda device: h100),
            (symmetric, "INTERPRETED", True),  # else it refuses CPUs
            (dist, "all_to_all_single", _untouched(dist.all_to_all_single)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        for table in by_cpus:
            stack.enter_context(patch.dict(table))
            del table["cpu"]
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        for name, written in WRITING.items():
            library.impl(name, partial(_nothing, written), "CPU")
        yield


def _untouched(collective: Any) -> Any:
    """A collective of as much memory as it is given, which the stand-in for a group would copy."""

    def call(*tensors_and_sizes: Any, **options: Any) -> Any:
        return collective(
            *(
                torch.empty(value.shape, dtype=value.dtype, device="meta")
                if isinstance(value, torch.Tensor)
                else value
                for value in tensors_and_sizes
            ),
            **options,
        )

    return call


def _nothing(written: str, *args: Any, **kwargs: Any) -> Any:
    return kwargs["out"] if written == "out" else args[0] if written else None


def host_seconds(case: Any, stub: Any, facts: Any, rounds: int) -> float:
    """The least of some steps, which launch as often as was counted."""
    with lone_rank(0, case.ranks):
        training, seconds = accelerator_path.Training(case, CPU), []
        with cpu_as_accelerator():
            for _ in range(rounds + 2):
                stub.reset()
                start = time.perf_counter()
                training.step()
                seconds.append(time.perf_counter() - start)
        if stub.counts != facts.launches:
            raise RuntimeError(f"launches: {dict(stub.counts)}, but {facts.launches} were counted")
    return min(seconds[2:])


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=TIMED, choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="steps timed; 0 times none")
    parser.add_argument("--markdown", action="store_true", help="print the tables in markdown")
    options = parser.parse_args(arguments)
    if stub_driver.missing():
        raise SystemExit(stub_driver.missing())
    totals, kernels = [], []
    with tempfile.TemporaryDirectory() as scratch, stub_driver.installed(Path(scratch)) as stub:
        for name in options.cases:
            facts = accelerator_path.facts_of(CASES[name], stub)
            launches, operations = (
                sum(counts.values()) for counts in (facts.launches, facts.operations)
            )
            row = [name, f"{facts.parameters:,}", f"{facts.chunks:,}", f"{launches:,}"]
            row += [f"{operations:,}", f"{sum(facts.collectives.values())}"]
            row += [f"{(launches + operations) / facts.parameters:.1f}"]
            row += [f"{(launches + operations) / facts.chunks:.1f}"]
            if options.rounds:
                seconds = host_seconds(CASES[name], stub, facts, options.rounds)
                row += [f"{seconds * 1e3:.1f}", f"{seconds / facts.parameters * 1e6:.1f}"]
            totals.append(row)
            kernels += [
                [name if not number else "", kernel_name, f"{count:,}"]
                for number, (kernel_name, count) in enumerate(sorted(facts.launches.items()))
            ]
    columns = ["step", "parameters", "chunks", "Triton launches", "torch operations"]
    columns += ["collectives", "launches, operations a parameter", "a chunk"]
    columns += ["host ms", "µs a parameter"] if options.rounds else []
    show("What a step gives an accelerator", columns, totals, markdown=options.markdown)
    columns = ["step", "kernel", "launches"]
    show("Launches by kernel", columns, kernels, markdown=options.markdown, left=2)
    print(machine("cpu"))


if __name__ == "__main__":
    main()
