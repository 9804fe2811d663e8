"""Shows on a machine with GPUs what CPUs cannot, in one command, and writes a report.

    make gpu                      # ten minutes on one device, half an hour where there are several
    make gpu HERE=1               # with the Python, torch and packages that are there
    make gpu ARGS="--sections step memory"
    make gpu ARGS="--seconds 420 --to FOLDER"
    make gpu ARGS=--full          # the longest tests and all sizes, too
    make gpu ARGS=--fake          # no device: shows that every section runs and is reported

A section is some processes, one after the other, which share a limit of time and have a log of
their own in runs/gpu/; one that fails does not stop the others. Those that test what is
measured later run side by side, the others alone. One deadline holds for all; sections come in the
order of their worth, so that it cuts off the least.

runs/gpu/report.md has machine, versions and commands, every table that was printed, the figures
beside their aims, and pictures of the times and rates; tables.json has the tables. Both are written
after each section, so that what was found outlives the run. So is a copy in the folder of --to: the
report, the tables, the pictures, and in archives all of runs/gpu.

Exits with 1, and names them, where sections failed: a test did, a bound of accuracy was not kept, a
command ended in an error or took too long. An aim that is not met is named, but no failure: times
depend on the machine. What was not run is named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from gpu_figures import FAKE, PICTURES, Table, draw, judge, lines_of, names_of
from gpu_sections import AIMS, CHECKOUT, SECTIONS, Machine, Section

SLOW = 6  # times as long may all take with --full, or on a CPU with --fake
LEAST = 15  # seconds without which no section is started
GRACE = 10  # seconds in which a command that is stopped may write what it has
TITLE = "# What `make gpu` found"
OUTCOMES = ("failure", "error", "skipped")  # other than success, as pytest writes them
PACKAGES = ("triton", "numpy", "kernels", "huggingface_hub", "pytest")

running: set[subprocess.Popen[bytes]] = set()
interrupted = threading.Event()


@dataclass
class Result:
    """How a section ended."""

    section: Section
    lines: list[str] = field(default_factory=list)  # of commands that were started
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    missing: str | None = None
    tables: list[Table] = field(default_factory=list)

    def __str__(self) -> str:
        if self.missing:
            return f"not run: {self.missing}"
        return f"FAILED: {'; '.join(self.failures)}" if self.failures else "passed"


# -- running ---------------------------------------------------------------------------------------


def run_sections(machine: Machine, options: argparse.Namespace) -> Iterator[Result]:
    """Runs those that were asked for; gives each as soon as it has ended."""
    slow = SLOW if options.full or options.fake else 1
    seconds = machine.seconds * slow if options.seconds is None else options.seconds
    deadline = time.monotonic() + seconds
    chosen = [section for section in SECTIONS if section.name in options.sections]

    def result_of(section: Section) -> Result:
        print(f"{section.name}: {section.what} …\n", end="", flush=True)  # of threads
        end = min(deadline, time.monotonic() + section.seconds * slow)
        return run_section(section, machine, options, end)

    with ThreadPoolExecutor() as pool:
        try:
            together = [pool.submit(result_of, s) for s in chosen if not s.runs_alone]
            for future in as_completed(together):
                yield future.result()
            for section in (section for section in chosen if section.runs_alone):
                yield result_of(section)
        except BaseException:  # the pool's end waits for what its threads have started
            interrupted.set()
            for process in list(running):
                kill(process)
            raise


def run_section(
    section: Section, machine: Machine, options: argparse.Namespace, end: float
) -> Result:
    """Runs its commands until then, on the monotonic clock."""
    result, start = Result(section), time.monotonic()
    commands = [command for command in section.commands if command.line(options)]
    if options.fake:
        result.missing = None if commands else "there is no part of it without a device"
    else:
        result.missing = section.missing(machine)
    if result.missing is None and end - start < min(LEAST, section.seconds):
        result.missing = "no time was left"
    if result.missing:
        return result
    tables = CHECKOUT / options.out / f"{section.name}.jsonl"
    environment = {"LOCAL_KERNELS": f"org/optimizer={CHECKOUT}", **os.environ}
    tests = tables.with_suffix(".xml")
    with open(tables.with_suffix(".log"), "w", encoding="utf-8") as log:
        for command in commands:
            line = command.line(options)
            result.lines.append(line)
            log.write(f"$ {line}\n")
            log.flush()
            variables = {**environment, **command.variables(options)}
            if not is_pytest(line):  # whose tests may run a benchmark
                variables["BENCHMARK_TABLES"] = str(tables)
            left = end - time.monotonic()
            why = run(f"{line}{outcomes_to(tests, line)}", machine, variables, log, left)
            result.failures += [f"{why}: {line}"] if why else []
            result.tables += tables_of(tables, tests)
    result.seconds = time.monotonic() - start
    return result


def is_pytest(line: str) -> bool:
    return " -m pytest " in line


def outcomes_to(file: Path, line: str) -> str:
    """The option by which pytest writes there how tests ended."""
    return f" --junitxml {shlex.quote(str(file))}" if is_pytest(line) else ""


def tables_of(tables: Path, tests: Path) -> list[Table]:
    """What a command left in the files, which are gone afterwards."""
    found = []
    if tests.exists():
        with suppress(ElementTree.ParseError):  # of a command that was stopped
            found.append(outcomes_of(ElementTree.fromstring(tests.read_text(encoding="utf-8"))))
        tests.unlink()
    if tables.exists():
        # A command that was stopped may have left part of a line.
        lines = tables.read_text(encoding="utf-8").splitlines(keepends=True)
        found += [Table(**json.loads(line)) for line in lines if line.endswith("\n")]
        tables.unlink()
    return found


def outcomes_of(document: ElementTree.Element) -> Table:
    """How many tests passed, were skipped for which reason, and which ones failed."""
    counts: Counter[tuple[str, str]] = Counter()
    for case in document.iter("testcase"):
        ends = [(end.tag, end.get("message", "")) for end in case if end.tag in OUTCOMES]
        outcome, reason = ends[0] if ends else ("passed", "")
        counts[outcome, reason if outcome == "skipped" else case.get("name", "")] += 1
    passed = sum(count for (outcome, _), count in counts.items() if outcome == "passed")
    others = [[*end, count] for end, count in sorted(counts.items()) if end[0] != "passed"]
    return Table("Tests", ["outcome", "which, or why", "tests"], [["passed", "", passed], *others])


def run(
    line: str, machine: Machine, environment: Mapping[str, str], log: Any, seconds: float
) -> str | None:
    """Why it failed, or None; what it started is gone either way."""
    programs = {"python": sys.executable, "compute-sanitizer": machine.sanitizer}
    words = [programs.get(word) or word for word in shlex.split(line)]
    if interrupted.is_set():
        return "interrupted"
    process = subprocess.Popen(
        words,
        cwd=CHECKOUT,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    running.add(process)
    if interrupted.is_set():  # since then
        kill(process)
    try:
        code = process.wait(max(0.0, seconds))
        return f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest says then what has failed
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return "not done in time"
    finally:
        kill(process)
        process.wait()
        running.discard(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# -- the report ------------------------------------------------------------------------------------


def machine_lines(commit: str | None) -> list[str]:
    """Devices, driver, versions, and the commit."""
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    if torch.version.cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}"]
    if torch.version.hip:
        versions.append(f"ROCm {torch.version.hip}")
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
    devices = output_of("nvidia-smi", query, "--format=csv,noheader")
    described = output_of("git", "describe", "--always", "--dirty", "--abbrev=40")
    return [
        *(devices.splitlines() or ["nvidia-smi tells of no device"]),
        f"{platform.platform()}, {os.cpu_count()} CPUs",
        ", ".join(versions),
        f"compilers: {', '.join(map(first_line, (('gcc',), ('nvcc',))))}",
        f"commit {commit or described or 'unknown: name it with --commit'}",
        time.strftime("%Y-%m-%d %H:%M:%S %z"),
    ]


def first_line(command: Sequence[str]) -> str:
    lines = output_of(*command, "--version").splitlines()
    return lines[0] if lines else f"no {command[0]}"


def output_of(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def report(results: Sequence[Result], about: Sequence[str], options: argparse.Namespace) -> str:
    tables = [table for result in results for table in result.tables]
    judged = [row for aim in AIMS for row in judge(aim, tables, options.fake)]
    head = ["section", "what it shows", "result", "seconds", "log"]
    ends = [
        [r.section.name, r.section.what, r, f"{r.seconds:.0f}", f"[log]({r.section.name}.log)"]
        for r in results
    ]
    aims = ["aim", "bound", "figure", "beside", "", "where"]
    parts = [TITLE]
    if options.fake:
        parts.append(f"**{FAKE}**")
    parts += ["\n".join(f"- {line}" for line in about)]
    parts += ["## Sections", lines_of([head, *ends])]
    parts += ["## Aims", lines_of([aims, *judged])]
    for name in PICTURES:
        light, dark = names_of(name)
        if (CHECKOUT / options.out / light).exists():
            media = "(prefers-color-scheme: dark)"
            source = f'<source media="{media}" srcset="{dark}">'
            parts.append(f'<picture>{source}<img alt="{name}" src="{light}"></picture>')
    for result in results:
        parts.append(f"## {result.section.name}: {result.section.what}")
        if result.lines:
            parts.append("\n".join(["```sh", *result.lines, "```"]))
        parts.append(f"{result}")
        parts += [table.markdown() for table in result.tables]
    return "\n\n".join(parts) + "\n"


def write(results: list[Result], about: Sequence[str], options: argparse.Namespace) -> None:
    """What was found so far, in the order of the sections."""
    folder, names = CHECKOUT / options.out, [section.name for section in SECTIONS]
    results.sort(key=lambda result: names.index(result.section.name))
    try:
        draw([table for result in results for table in result.tables], folder, options.fake)
    except Exception:  # pictures are worth less than the rest
        traceback.print_exc()
    (folder / "report.md").write_text(report(results, about, options), encoding="utf-8")
    data = {r.section.name: [asdict(table) for table in r.tables] for r in results}
    (folder / "tables.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    if options.to:
        copy(folder, CHECKOUT / options.to)


def copy(folder: Path, to: Path) -> None:
    """The report with what it shows, and archives of everything, to another folder.

    The allocator's record has an archive of its own, since it can be larger than all the rest.
    """
    files = sorted(file for file in folder.iterdir() if file.is_file())
    records = [file for file in files if file.suffix == ".pickle"]
    for name, wanted in (
        ("gpu.tgz", [file for file in files if file not in records]),
        ("memory.tgz", records),
    ):
        part = to / f"{name}.part"  # renamed when complete: a kill leaves the last one
        with tarfile.open(part, "w:gz") as tar:
            for file in wanted:
                tar.add(file, file.name)
        part.rename(to / name)
    pictures = [name for picture in PICTURES for name in names_of(picture)]
    for file in files:
        if file.name in ("report.md", "tables.json", *pictures):
            shutil.copyfile(file, to / file.name)


def folders_of(options: argparse.Namespace) -> Path:
    """The empty folder of --out, and that of --to is there.

    Raises:
        ValueError: a folder holds what this script has not written.
    """
    folder, to = CHECKOUT / options.out, options.to and CHECKOUT / options.to
    report = folder / "report.md"
    if folder.exists() and any(folder.iterdir()):
        if not report.is_file() or not report.read_text(encoding="utf-8").startswith(TITLE):
            raise ValueError(f"--out {options.out} is no folder of an earlier report")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if to:
        to.mkdir(parents=True, exist_ok=True)
        if to.samefile(folder):
            raise ValueError("--to is another folder than --out")
    return folder


# -- command line ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [section.name for section in SECTIONS]
    parser.add_argument("--full", action="store_true", help="the longest tests and all sizes, too")
    parser.add_argument("--fake", action="store_true", help="tiny sizes without a device")
    parser.add_argument("--sections", nargs="+", choices=names, default=names, help="which")
    parser.add_argument("--seconds", type=int, help="until all is stopped; see above")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder")
    parser.add_argument("--to", type=Path, help="folder of a copy")
    parser.add_argument("--commit", help="of these files, where there is no git to ask")
    options = parser.parse_args(arguments)
    if options.fake and torch.accelerator.is_available():
        parser.error("--fake is for machines without a device")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    machine = Machine.here()
    if not machine.devices and not options.fake:
        said = output_of("nvidia-smi", "--list-gpus") or "nothing"
        print(f"torch {torch.__version__} finds no GPU; nvidia-smi: {said}", file=sys.stderr)
        print(
            "make gpu HERE=1 takes the torch of `python3` (another with PYTHON=); ", file=sys.stderr
        )
        print("ARGS=--fake tries this command without a GPU.", file=sys.stderr)
        return 1
    try:
        folder = folders_of(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    about: list[str] = machine_lines(options.commit)
    results: list[Result] = []
    write(results, about, options)
    (folder / "nvidia-smi.txt").write_text(output_of("nvidia-smi", "-q"), encoding="utf-8")
    for result in run_sections(machine, options):
        results.append(result)
        print(f"  {result.section.name}: {result} ({result.seconds:.0f} s)", flush=True)
        write(results, about, options)
    return conclude(results, options)


def conclude(results: Sequence[Result], options: argparse.Namespace) -> int:
    """Names what failed, what was not run and which aims are not met."""
    tables = [table for result in results for table in result.tables]
    missed = [
        row for aim in AIMS for row in judge(aim, tables, options.fake) if row[4] == "NOT met"
    ]
    failed = [result for result in results if result.failures]
    if options.fake:
        print(FAKE)
    for title, lines in (
        ("not run", [f"{r.section.name}: {r.missing}" for r in results if r.missing]),
        ("aims that are not met", [f"{row[0]}: {row[2]} ({row[5]})" for row in missed]),
        ("FAILED", [f"{r.section.name}: {why}" for r in failed for why in r.failures]),
        (
            "tests that failed",
            [row[1] for table in tables for row in table.rows if row[0] in OUTCOMES[:2]],
        ),
    ):
        if lines:
            print(f"{title}:")
            print("\n".join(f"  {line}" for line in lines))
    print(f"report: {options.out / 'report.md'}")
    return 1 if failed else 0


def start(arguments: Sequence[str] | None = None) -> int:
    """As a process of its own, whose end is that of all it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return main(arguments)


if __name__ == "__main__":
    sys.exit(start())
