"""Finds the fastest tiles for this GPU, and prints what the package is to look up.

    make bench BENCHMARKS=benchmarks/tune.py

For each size, every candidate is timed with a cold L2 cache beside torch.bmm of the full product,
and beside the configuration that is looked up so far; its result is compared with bmm's. Where some
are faster than that one, the device's entries of `MEASURED` in triton_kernels/launching.py are
printed, those of other sizes included: put them there, and `make build` puts them into the kernel.
A configuration is looked up there by the nearest size, and nothing is timed while training.

A candidate that gives another product than bmm is left out and named, and makes the exit status 1.
`--short` tries fewer sizes and candidates, of one dtype, in about a minute; after `--seconds` no
further candidate is tried. `--dry-run` goes the same way with tiny sizes and no clock, in Triton's
interpreter where there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch

from timing import load_kernel, show

DTYPES = ("bfloat16", "float16", "float32")


class Size(NamedTuple):
    s: int
    k: int
    batch: int


# Gram matrices of (s, k), and products of two (s, s).
SIZES = [
    Size(1024, 1024, 1),
    Size(4096, 4096, 1),  # Llama-3-8B: queries, outputs
    Size(1024, 4096, 8),  # keys, values
    Size(1024, 1024, 8),
    Size(4096, 14336, 1),  # feed-forward
    Size(4096, 4096, 4),
    Size(768, 2048, 128),  # experts
    Size(768, 768, 128),
    Size(2048, 7168, 1),
    Size(2048, 2048, 1),
]
SHORT_SIZES = [SIZES[0], SIZES[1], SIZES[2], SIZES[4], SIZES[7]]
DRY_SIZES = [Size(48, 32, 2), Size(32, 32, 1)]

# Of the time with what is looked up so far: less is noise.
WORTHWHILE = 0.97

# Of what bmm rounds otherwise: in units of each entry's magnitude and a sum's deviation.
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4}


class Finding(NamedTuple):
    """The fastest configuration for one size, and what failed on the way.

    It is the one that is looked up so far unless another is faster by more than noise.
    """

    size: Size
    dtype: str
    config: Any
    microseconds: float
    bmm_microseconds: float
    candidates: int
    refused: int  # too much shared memory, too many registers
    wrong: int = 0  # another product than bmm's
    current_microseconds: float = math.nan  # of what is looked up so far

    @property
    def is_better(self) -> bool:
        return self.microseconds < self.current_microseconds


# Of tiles twice as wide, shared memory feeds all of the tensor cores, of square ones four fifths
# (benchmarks/results/h200.md). Descriptors free the registers that pointers take: with three
# stages two programs fit a processor, and one multiplies while the other stores.
HOPPER = ("sm_90", "sm_100", "sm_103")
WIDE_OR_IN_BULK = [
    dict(block=128, block_k=64, num_warps=8, num_stages=3, width=2),
    dict(block=128, block_k=64, num_warps=8, num_stages=3, width=2, descriptors=True),
    dict(block=128, block_k=64, num_warps=8, num_stages=4, width=2, descriptors=True),
    dict(block=128, block_k=64, num_warps=8, num_stages=3, descriptors=True),
    dict(block=128, block_k=64, num_warps=8, num_stages=4, descriptors=True),
    dict(block=64, block_k=64, num_warps=4, num_stages=4, descriptors=True),
    dict(block=64, block_k=64, num_warps=4, num_stages=4, width=2, descriptors=True),
]


def candidates(
    kind: Any, dtype: str, dry: bool, short: bool = False, architecture: str = ""
) -> list[Any]:
    """Configurations to time; more groups of columns are tried on the fastest (`tune`)."""
    if dry:
        plain = [kind(16, 16, 4, stages, group=2) for stages in (1, 2)]
        return [*plain, kind(16, 16, 4, 2, width=2, descriptors=True)]
    more = WIDE_OR_IN_BULK if dtype != "float32" and architecture in HOPPER else []
    blocks = (64, 128, 256) if dtype != "float32" else (32, 64, 128)
    blocks_k = (32, 64, 128) if dtype != "float32" else (16, 32)
    tried = itertools.product(blocks, blocks_k, (4, 8), (2, 3, 4, 5))
    if short:
        tried = itertools.product(blocks[:2], blocks_k[:2], (4, 8), (3, 4))
    return [
        kind(block, block_k, warps, stages)
        for block, block_k, warps, stages in tried
        # Of accumulators alone, more than a thread's registers.
        if block * block <= 32 * warps * 255
    ] + [kind(**fields) for fields in more]


def tune(
    symmetric: Any,
    size: Size,
    dtype: str,
    current: Any,
    device: str,
    architecture: str,
    clock: Callable,
    arguments: argparse.Namespace,
    end: float = math.inf,
) -> Finding:
    """Times candidates until ``end``, on the monotonic clock; the rest is left out."""
    s, k, batch = size
    generator = torch.Generator(device).manual_seed(0)
    X = torch.randn(batch, s, k, generator=generator, device=device).to(getattr(torch, dtype))
    expected = torch.bmm(X, X.mT)
    out = torch.empty_like(expected)
    # Entries off the diagonal have a deviation of √k.
    bound = expected.abs().float().add_(k**0.5).mul_(TOLERANCE[dtype])
    refused: list[Any] = []
    wrong: list[Any] = []

    def microseconds(config: Any) -> float:
        def run() -> None:
            symmetric.symmetric_product(X, X.mT, 1.0, 0.0, out, out, config)

        out.fill_(math.nan)  # what a candidate does not write is seen
        try:
            run()
        except Exception as error:  # Triton raises what the backend says; any is a refusal
            if arguments.dry_run:
                raise
            print(f"{config} was refused: {str(error)[:100]!r}", file=sys.stderr)
            refused.append(config)
            return math.inf
        is_near = (out.float() - expected.float()).abs_() <= bound  # not with NaN
        if not is_near.all() or not torch.equal(out, out.mT):
            print(f"{config} gives another product at {size} in {dtype}", file=sys.stderr)
            wrong.append(config)
            return math.inf
        return clock(run) * 1e3

    times = {current: microseconds(current)}

    def time_until_end(configs: Sequence[Any]) -> None:
        for config in configs:
            if time.monotonic() < end and config not in times:
                times[config] = microseconds(config)

    def fastest() -> Any:
        return min(times, key=lambda config: times[config])

    dry, short = arguments.dry_run, arguments.short
    time_until_end(candidates(type(current), dtype, dry, short, architecture))
    time_until_end([dataclasses.replace(fastest(), group=group) for group in (1, 4, 16)])
    if len(refused) + len(wrong) == len(times):
        raise RuntimeError(f"no configuration gives the product at {size} in {dtype}")
    bmm = clock(lambda: torch.bmm(X, X.mT, out=out)) * 1e3
    best = fastest()
    failed = len(refused), len(wrong)
    so_far = min(times[current], microseconds(current))  # again, on a device that is warm by now
    if so_far < math.inf and not times[best] < WORTHWHILE * so_far:
        best, times[current] = current, so_far
    return Finding(size, dtype, best, times[best], bmm, len(times), *failed, so_far)


Key = tuple[str, int, int, int]  # dtype, s, k, batch


def entries_of(
    findings: Sequence[Finding], kept: Mapping[Key, Any], untuned: Mapping[Key, Any]
) -> dict[Key, Any]:
    """The device's entries of `MEASURED`.

    Args:
        kept: entries of earlier, of which those of other sizes remain.
        untuned: what is looked up so far for other sizes, which they keep: else they would take
            what is fastest for the nearest of those measured.
    """
    return {**untuned, **kept, **{(f.dtype, *f.size): f.config for f in findings}}


def text_of(device: str, entries: Mapping[Key, Any]) -> str:
    """The entries as they stand in the source, with what measured them."""
    import triton

    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    day = datetime.datetime.now(datetime.UTC).date()
    lines = [f"        {key}: {source_of(config)}," for key, config in entries.items()]
    head = f"    # By benchmarks/tune.py, {versions}, {day}.\n    {device!r}: {{\n"
    return head + "\n".join(lines) + "\n    },\n"


def source_of(config: Any) -> str:
    """The call that makes a configuration, without what it has by default."""
    arguments = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is dataclasses.MISSING:
            arguments.append(repr(value))
        elif value != field.default:
            arguments.append(f"{field.name}={value!r}")
    return f"SymmetricConfig({', '.join(arguments)})"


COLUMNS = (
    *("dtype", "s", "k", "batch", "tile", "loads", "warps", "stages", "group", "µs"),
    *("µs so far", "TFLOP/s", "bmm µs", "× bmm", "refused", "wrong"),
)


def row_of(finding: Finding) -> list[str]:
    (s, k, batch), config = finding.size, finding.config
    speed = 2 * batch * s * s * k / finding.microseconds / 1e6
    return [
        *(finding.dtype, str(s), str(k), str(batch)),
        f"{config.block}×{config.width * config.block}×{config.block_k}",
        "in bulk" if config.descriptors else "by pointers",
        *(str(config.num_warps), str(config.num_stages)),
        *(str(config.group), f"{finding.microseconds:.1f}"),
        *(f"{finding.current_microseconds:.1f}", f"{speed:.0f}"),
        *(f"{finding.bmm_microseconds:.1f}",),
        f"{finding.bmm_microseconds / finding.microseconds:.2f}",
        *(f"{finding.refused}/{finding.candidates}", f"{finding.wrong}"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="all, or one of a --short run")
    parser.add_argument("--short", action="store_true", help="fewer sizes and candidates")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for all sizes")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes and no clock")
    arguments = parser.parse_args()

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        if not arguments.dry_run:
            print("There is no GPU here, and nothing to tune without one.", file=sys.stderr)
            return 1
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    device = accelerator.type if accelerator else "cpu"
    optimizer = load_kernel()
    launching = import_module(f"{optimizer.__name__}.triton_kernels.launching")
    symmetric = import_module(f"{optimizer.__name__}.triton_kernels.symmetric")
    end = time.monotonic() + arguments.seconds
    from triton.testing import do_bench  # clears the L2 cache before every run

    def clock(run: Callable[[], object]) -> float:
        """Milliseconds, the median of many runs."""
        if not arguments.dry_run:
            return do_bench(run, warmup=10, rep=50, return_mode="median")
        run()
        return math.nan

    where = torch.empty(0, device=device).device  # with its index
    target = launching.compile_target(where)
    sizes = SHORT_SIZES if arguments.short else SIZES
    findings: list[Finding] = []
    dtypes = arguments.dtypes or (("float16",) if arguments.short else DTYPES)
    kept = launching.MEASURED.get(target.device, {})
    untuned = {
        (dtype, *size): launching.choose(getattr(torch, dtype), *size, True, target)
        for dtype in dtypes
        for size in SIZES
    }
    left_out: list[str] = []
    status = 0
    for dtype in dtypes:
        for size in DRY_SIZES if arguments.dry_run else sizes:
            if time.monotonic() > end:
                left_out.append(f"no time was left for {size} in {dtype}")
                continue
            current = launching.choose(getattr(torch, dtype), *size, True, target)
            about = current, device, target.architecture, clock, arguments, end
            try:
                findings.append(tune(symmetric, size, dtype, *about))
            except RuntimeError as error:
                left_out.append(str(error))
                status = 1
                continue
            print(f"{dtype} {size}: {findings[-1].config}", file=sys.stderr)

    title = f"Tuned symmetric products on {target.device}; TFLOP/s as if all tiles were computed"
    show(title, COLUMNS, [row_of(finding) for finding in findings])
    if arguments.dry_run:
        print("A dry run: nothing was timed.")
    elif not any(finding.is_better for finding in findings):
        print("Nothing is faster than what is looked up so far.")
    else:
        print("For `MEASURED` in torch-ext/optimizer/triton_kernels/launching.py:\n")
        print(text_of(target.device, entries_of(findings, kept, untuned)))
    print("".join(f"not tuned: {why}\n" for why in left_out), end="")
    return 1 if any(finding.wrong for finding in findings) else status


if __name__ == "__main__":
    sys.exit(main())
