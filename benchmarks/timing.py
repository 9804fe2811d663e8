"""What the benchmarks share: kernel and device, taking turns, ceilings of the machine, tables."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from kernels import get_kernel
from rich.console import Console
from rich.table import Table

CHECKOUT = Path(__file__).resolve().parent.parent

# The variable that names a file, to which `show` appends every table as one line of JSON.
TABLES = "BENCHMARK_TABLES"

# The variable that names a Markdown file, to which `show` appends every table, under a head with
# command and machine. `make bench RESULTS=1` writes benchmarks/results/<script>.md with it.
RESULTS = "BENCHMARK_RESULTS"

# Arithmetics of the iteration that benchmarks of steps take by name, in place of the default's.
NS_DTYPES = ("bfloat16", "float16", "float32")

Seconds = dict[str, list[float]]  # of one call, by contender

# How long a sample lasts at least, by repeating calls: on an accelerator, so long that waiting for
# it, some 20 µs, is lost in it; on a CPU, so is the first call, which finds another's caches.
LEAST_SAMPLE = {"cpu": 0.05}
DEFAULT_LEAST_SAMPLE = 0.02

# Sides of the square products whose best rate is the ceiling, and elements of a copy in fp32.
CEILING_SIDES = {"cpu": (1024, 2048)}
DEFAULT_CEILING_SIDES = (4096, 8192)
COPIED = {"cpu": 32 << 20}
DEFAULT_COPIED = 256 << 20


def load_kernel() -> Any:
    """The package; from now on it is an error if Triton's kernels should run here and can't.

    Figures would be those of torch's operations.
    """
    if (CHECKOUT / "build").is_dir():  # made by `make build`
        os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={CHECKOUT}")
    kernel = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])
    warnings.filterwarnings("error", message="Triton's kernels are not used")
    kernels, device = kernel.triton_kernels, pick_device().type
    if device in kernels.DEVICE_TYPES and importlib.util.find_spec("triton") is None:
        raise SystemExit("Triton is not installed, so that its kernels can't be measured")
    return kernel


def pick_device() -> torch.device:
    """The accelerator of this process where there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(accelerator.type if accelerator else "cpu")


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def machine(device: torch.device | str) -> str:
    """Versions and processor, for the line under a table."""
    device = torch.device(device)
    cpu = f"{_cpu_name()} ({' '.join(_cpu_flags()) or platform.machine()})"
    parts = [f"torch {torch.__version__}"]
    if device.type == "cpu":
        return ", ".join([*parts, cpu, f"{torch.get_num_threads()} threads"])
    backend = getattr(torch, device.type)  # of names there is no generic query
    name = backend.get_device_name(device) if hasattr(backend, "get_device_name") else device.type
    return ", ".join([*parts, name, cpu])


def _cpu_name() -> str:
    """As Linux tells it; elsewhere what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _cpu_flags() -> list[str]:
    """Instructions that decide how fast products are, of those that torch asks CPUs for."""
    flags = ("avx2", "avx512", "avx512_bf16", "amx_tile")
    probes = {flag: getattr(torch.cpu, f"_is_{flag}_supported") for flag in flags}
    return [flag for flag, is_supported in probes.items() if is_supported()]


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    least_sample: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Seconds of a call, one sample of each contender in every round: A B C A B C …

    Whatever else the machine does falls on all of them.

    Args:
        contenders: called twice before anything is counted.
        least_sample: seconds that a sample lasts at least: calls are repeated, and averaged.
        clock: `time.process_time` leaves out what other processes of a shared machine take.
    """
    calls = {}
    for name, call in contenders.items():
        call()
        once = seconds_of(call, 1, clock)
        calls[name] = max(1, round(least_sample / max(once, 1e-6)))
    seconds: Seconds = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            seconds[name].append(seconds_of(call, calls[name], clock))
    return seconds


def seconds_of(
    call: Callable[[], object], calls: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    synchronize()
    start = clock()
    for _ in range(calls):
        call()
    synchronize()
    return (clock() - start) / calls


def add_cpu_time(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        help="measure the process's CPU time: of one thread, on a machine that others use",
    )


def least_sample(device: torch.device) -> float:
    return LEAST_SAMPLE.get(device.type, DEFAULT_LEAST_SAMPLE)


def milliseconds(samples: Sequence[float]) -> tuple[str, str]:
    """Least and median."""
    return tuple(  # type: ignore[return-value]
        f"{seconds * 1e3:.{0 if seconds >= 0.1 else 2 if seconds >= 1e-3 else 4}f}"
        for seconds in (min(samples), statistics.median(samples))
    )


# -- ceilings --------------------------------------------------------------------------------------


class Ceilings:
    """Rates of the machine, measured among the contenders: square products, and a copy.

    Args:
        dtypes: of the products.
        sides: of the products; None takes those of the type of device.
        copied: elements of the copy; 0 leaves it out.
    """

    def __init__(
        self,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        sides: Sequence[int] | None = None,
        copied: int = 0,
    ) -> None:
        self.work: dict[str, float] = {}  # FLOPs or bytes
        self.contenders: dict[str, Callable[[], object]] = {}
        self.seconds: Seconds = {}
        for side in sides or CEILING_SIDES.get(device.type, DEFAULT_CEILING_SIDES):
            for dtype in dict.fromkeys(dtypes):
                # Normal values: products of zeros draw less power, and run at higher clocks.
                A = torch.randn(side, side, device=device).to(dtype)
                out = torch.empty_like(A)
                self._add(f"mm {dtype} {side}", 2 * side**3, partial(torch.mm, A, A, out=out))
        if copied:
            source = torch.randn(copied, device=device)
            target = torch.empty_like(source)
            self._add("copy", 8 * copied, partial(target.copy_, source))

    def _add(self, name: str, work: float, call: Callable[[], object]) -> None:
        self.work[name], self.contenders[name], self.seconds[name] = work, call, []

    def take(self, seconds: Seconds) -> None:
        """Takes its own samples out of those of a run."""
        for name in self.work:
            self.seconds[name] += seconds.pop(name)

    def flops_per_second(self, dtype: torch.dtype) -> float:
        return self._best(f"mm {dtype} ")

    def bytes_per_second(self) -> float:
        return self._best("copy")

    def _best(self, prefix: str) -> float:
        names = [name for name in self.work if name.startswith(prefix)]
        return max(self.work[name] / min(self.seconds[name]) for name in names)

    def tell(self) -> str:
        """A line for people; a table, too, where `TABLES` names a file."""
        rows = [
            [
                name.replace("torch.", ""),
                f"{work / min(self.seconds[name]) / 1e9:.0f}",
                "GB/s" if name == "copy" else "GFLOP/s",
            ]
            for name, work in self.work.items()
        ]
        record("Ceilings", ("what", "rate", "unit"), rows)
        return "ceilings: " + ", ".join(f"{name}: {rate} {unit}" for name, rate, unit in rows)


# -- tables ----------------------------------------------------------------------------------------


def show(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    markdown: bool = False,
    left: int = 1,
    width: int = 150,
) -> None:
    """Prints a table, whose first ``left`` columns are words and all others numbers.

    The files that `TABLES` and `RESULTS` name get the table, too.
    """
    record(title, columns, rows)
    if path := os.environ.get(RESULTS):
        append_result(Path(path), markdown_of(f"**{title}**", columns, rows, left))
    if markdown:
        print(markdown_of(title, columns, rows, left))
        return
    printed = Table(title=title)
    for number, column in enumerate(columns):
        is_word = number < left
        printed.add_column(column, justify="left" if is_word else "right", no_wrap=is_word)
    for row in rows:
        printed.add_row(*row)
    Console(width=width).print(printed)


def markdown_of(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int
) -> str:
    header = f"| {' | '.join(columns)} |".replace("\n", " ")
    rule = "|" + "---|" * left + "---:|" * (len(columns) - left)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([title, "", header, rule, *lines, ""])


def append_result(path: Path, table: str) -> None:
    """Appends a table to a file of results, under the head of the command that runs."""
    script = Path(sys.argv[0])
    command = shlex.join(["python", f"benchmarks/{script.name}", *sys.argv[1:]])
    text = path.read_text(encoding="utf-8") if path.exists() else f"# {script.stem}\n"
    fence = f"```sh\n{command}\n```\n"
    if fence not in text:  # a script's ranks append to what its first process has begun
        text += f"\n{fence}\n{time.strftime('%Y-%m-%d')}, commit {_commit()}, {_versions()}.\n"
    path.write_text(f"{text}\n{table}", encoding="utf-8")


def _commit() -> str:
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _versions() -> str:
    """The machine, and the Triton that compiles or interprets the kernels."""
    try:
        return f"{machine(pick_device())}, Triton {version('triton')}"
    except PackageNotFoundError:
        return f"{machine(pick_device())}, no Triton"


def record(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Appends a table to the file that `TABLES` names, if it names one."""
    if path := os.environ.get(TABLES):
        names = [column.replace("\n", " ") for column in columns]
        table = {"title": title, "columns": names, "rows": [[*map(_value_of, r)] for r in rows]}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(table, ensure_ascii=False) + "\n")


def _value_of(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell
