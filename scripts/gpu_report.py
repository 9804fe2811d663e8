"""Shows on a machine with GPUs what CPUs cannot, in one command, and writes a report.

    make gpu                      # ten minutes on one device, longer where there are several
    make gpu ARGS=--full          # the longest tests and all sizes, too
    make gpu ARGS="--sections step memory"
    make gpu ARGS=--fake          # no device: shows that every section runs and is reported

A section is some processes, one after the other, which share a limit of time and have a log of
their own in runs/gpu/; one that fails does not stop the others. runs/gpu/report.md has machine,
versions and commands, every table that was printed, the figures beside their aims, and pictures of
the times and rates; tables.json has the tables. Both are written anew after each section, so that
what was found outlives the run.

Exits with 1, and names them, where sections failed: a test did, a bound of accuracy was not kept, a
command ended in an error or took too long. An aim that is not met is named, but no failure: times
depend on the machine. What was not run is named with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from gpu_sections import AIMS, CHECKOUT, SECTIONS, Aim, Machine, Section

sys.path.append(str(CHECKOUT / "examples"))
from plots import drawing, label_rows, save

FAKE = "Made without a device: no figure below says anything about one."
PATIENCE = 2  # times as long as it should take may a section take before it is stopped,
FULL = 6  # and as many times that with --full, or on a CPU with --fake
OUTCOMES = ("failure", "error", "skipped")  # other than success, as pytest writes them
COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#dc2626", "#7c3aed", "#4b5563")

Record = Mapping[str, Any]  # a row, by column


@dataclass(frozen=True)
class Table:
    """As benchmarks/timing.py writes it."""

    title: str
    columns: list[str]
    rows: list[list[Any]]

    def records(self) -> list[Record]:
        return [dict(zip(self.columns, row)) for row in self.rows]

    def markdown(self) -> str:
        return f"{self.title}\n\n{lines_of([self.columns, *self.rows])}"


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


def run_section(section: Section, machine: Machine, options: argparse.Namespace) -> Result:
    result = Result(section)
    commands = [command for command in section.commands if command.line(options)]
    if options.fake:
        result.missing = None if commands else "there is no part of it without a device"
    else:
        result.missing = section.missing(machine)
    if result.missing:
        return result
    tables = CHECKOUT / options.out / f"{section.name}.jsonl"
    environment = {"LOCAL_KERNELS": f"org/optimizer={CHECKOUT}", **os.environ}
    environment["BENCHMARK_TABLES"] = str(tables)
    tests = tables.with_suffix(".xml")
    start = time.monotonic()
    patience = PATIENCE * (FULL if options.full or options.fake else 1)
    deadline = start + section.seconds * patience
    with open(tables.with_suffix(".log"), "w", encoding="utf-8") as log:
        for command in commands:
            line = command.line(options)
            result.lines.append(line)
            log.write(f"$ {line}\n")
            log.flush()
            variables = {**environment, **command.variables(options)}
            left = deadline - time.monotonic()
            why = run(f"{line}{outcomes_to(tests, line)}", machine, variables, log, left)
            result.failures += [f"{why}: {line}"] if why else []
            result.tables += tables_of(tables, tests)
    result.seconds = time.monotonic() - start
    return result


def outcomes_to(file: Path, line: str) -> str:
    """The option by which pytest writes there how tests ended."""
    return f" --junitxml {shlex.quote(str(file))}" if " -m pytest " in line else ""


def tables_of(tables: Path, tests: Path) -> list[Table]:
    """What a command left in the files, which are gone afterwards."""
    found = []
    if tests.exists():
        found.append(outcomes_of(ElementTree.fromstring(tests.read_text(encoding="utf-8"))))
        tests.unlink()
    if tables.exists():
        lines = tables.read_text(encoding="utf-8").splitlines()
        found += [Table(**json.loads(line)) for line in lines]
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
    process = subprocess.Popen(
        words,
        cwd=CHECKOUT,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(max(0.0, seconds))
        return f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        return "not done in time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- the report ------------------------------------------------------------------------------------


def lines_of(rows: Sequence[Sequence[Any]]) -> str:
    """A table in markdown, its first row the header."""
    head, *rest = [f"| {' | '.join(str(c).removesuffix('.0') for c in row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *rest])


def figures_of(aim: Aim, tables: Sequence[Table]) -> Iterator[tuple[str, float, str]]:
    """Where it is, a figure, and what it is compared with."""
    for table in tables:
        if not {aim.column, aim.beside} <= set(table.columns):
            continue
        for record in table.records():
            if aim.key is not None and record.get(aim.key) != aim.row:
                continue
            figure, baseline = record[aim.column], baseline_of(aim, record, table)
            if baseline is None or not isinstance(figure, float):
                continue
            if aim.relative:
                figure /= baseline[aim.column]
            name = "" if aim.baseline is None else f"{aim.baseline}, "
            words = [cell for cell in record.values() if isinstance(cell, str) and cell != "–"]
            where = f"{table.title}: {', '.join(words[:3])}"
            yield where, figure, f"{name}{aim.beside}: {baseline[aim.beside]}"


def baseline_of(aim: Aim, record: Record, table: Table) -> Record | None:
    """The row that has another value of the key, and those left of it in common."""
    if aim.baseline is None or aim.key is None:
        return record
    left = table.columns[: table.columns.index(aim.key)]
    wanted = {**{column: record[column] for column in left}, aim.key: aim.baseline}
    fitting = (
        other
        for other in table.records()
        if all(other[column] == value for column, value in wanted.items())
    )
    return next(fitting, None)


def judge(aim: Aim, tables: Sequence[Table], fake: bool) -> list[list[str]]:
    """Rows of the table of aims, one for each figure."""
    bound = f"≥ {aim.least:.3g}" if aim.least > float("-inf") else f"≤ {aim.most:.3g}"
    rows = []
    for where, figure, baseline in figures_of(aim, tables):
        met = "met" if aim.least <= figure <= aim.most else "NOT met"
        verdict = "no device" if fake else met
        rows.append([aim.what, bound, f"{figure:.3g}", baseline, verdict, where])
    return rows or [[aim.what, bound, "–", "", "not measured", ""]]


def machine_lines() -> list[str]:
    """Devices, driver, versions, and the commit."""
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if importlib.util.find_spec("triton"):
        versions.append(f"triton {version('triton')}")
    if torch.version.cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}"]
    if torch.version.hip:
        versions.append(f"ROCm {torch.version.hip}")
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
    devices = output_of("nvidia-smi", query, "--format=csv,noheader")
    return [
        *(devices.splitlines() or ["nvidia-smi tells of no device"]),
        f"{platform.platform()}, {os.cpu_count()} CPUs",
        ", ".join(versions),
        f"commit {output_of('git', 'describe', '--always', '--dirty', '--abbrev=40')}",
        time.strftime("%Y-%m-%d %H:%M:%S %z"),
    ]


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
    parts = ["# What `make gpu` found"]
    if options.fake:
        parts.append(f"**{FAKE}**")
    parts += ["\n".join(f"- {line}" for line in about)]
    parts += ["## Sections", lines_of([head, *ends])]
    parts += ["## Aims", lines_of([aims, *judged])]
    pictures = [name for name in PICTURES if (CHECKOUT / options.out / name).exists()]
    parts += [f"![{name[:-4]}]({name})" for name in pictures]
    for result in results:
        parts.append(f"## {result.section.name}: {result.section.what}")
        if result.lines:
            parts.append("\n".join(["```sh", *result.lines, "```"]))
        parts.append(f"{result}")
        parts += [table.markdown() for table in result.tables]
    return "\n\n".join(parts) + "\n"


def is_positive(value: Any) -> bool:
    return isinstance(value, float) and value > 0  # no NaN


@dataclass(frozen=True)
class Panel:
    """Tables in a picture: a row of dots for each row, or, without ``row``, for each table.

    Args:
        table: how their titles begin.
        row: columns that name a row of dots.
        series: the column that names a dot, unless ``columns`` do.
        columns: values.
    """

    table: str
    row: Sequence[str]
    series: str | None
    columns: Sequence[str]

    def dots(self, tables: Sequence[Table]) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for table in (table for table in tables if table.title.startswith(self.table)):
            for record in table.records():
                name = ", ".join(str(record[c]).removesuffix(".0") for c in self.row)
                name = name or table.title.removeprefix(self.table).strip(", ")[:60]
                place = found.setdefault(name, {})
                for column in (c for c in self.columns if is_positive(record.get(c))):
                    dot = column if self.series is None else record[self.series]
                    place.setdefault(dot, record[column])
        return found


PICTURES = {
    "times.png": (
        "least ms",
        [
            Panel("One step", (), "optimizer", ["least ms"]),
            Panel("One step", (), "offload", ["least ms"]),
            Panel("QK-Clip", (), "", ["least ms"]),
            Panel(
                "Maxima of causal attention logits",
                ("B × Hq/Hk × T × D", "dtype"),
                "contender",
                ["least ms"],
            ),
        ],
    ),
    "rates.png": (
        "TFLOP/s; of traffic, GB/s",
        [
            Panel(
                "Symmetric products by halves, torch.float16",
                ("product", "matrices"),
                None,
                ["kernel, effective TFLOP/s", "library, effective TFLOP/s"],
            ),
            Panel("Orthogonalization", ("matrices",), "contender", ["effective TFLOP/s"]),
            Panel("All-to-alls", ("KiB sent",), None, ["GB/s to others"]),
        ],
    ),
}


def draw(tables: Sequence[Table], options: argparse.Namespace) -> None:
    for name, (unit, panels) in PICTURES.items():
        drawn = []
        for panel in panels:
            fitting = [table for table in tables if panel.series in (None, *table.columns)]
            if dots := panel.dots(fitting):
                drawn.append((panel.table, dots))
        if drawn:
            draw_dots(drawn, unit, CHECKOUT / options.out / name, options.fake)


def draw_dots(
    panels: Sequence[tuple[str, dict[str, dict[str, float]]]], unit: str, path: Path, fake: bool
) -> None:
    heights = [len(dots) + 3 for _, dots in panels]
    with drawing() as plt:
        size = (10, 0.3 * sum(heights) + 1)
        figure, grid = plt.subplots(len(panels), figsize=size, height_ratios=heights, squeeze=False)
        for axes, (title, dots) in zip(grid[:, 0], panels):
            series = dict.fromkeys(name for row in dots.values() for name in row)
            for colour, name in zip(COLOURS, series):
                points = [(row[name], at) for at, row in enumerate(dots.values()) if name in row]
                axes.plot(*zip(*points), "o", color=colour, label=name)
            label_rows(axes, list(dots))
            powers = [math.log10(value) for row in dots.values() for value in row.values()]
            decades = 10.0 ** math.floor(min(powers)), 10.0 ** math.ceil(max(powers))
            axes.set(xscale="log", xlim=decades, title=title)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        grid[-1, 0].set_xlabel(unit)
        if fake:
            figure.suptitle(FAKE, color="#dc2626")
        figure.tight_layout()
        save(figure, path)


# -- command line ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [section.name for section in SECTIONS]
    parser.add_argument("--full", action="store_true", help="the longest tests and all sizes, too")
    parser.add_argument("--fake", action="store_true", help="tiny sizes without a device")
    parser.add_argument("--sections", nargs="+", choices=names, default=names, help="which")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder")
    options = parser.parse_args(arguments)
    if options.fake and torch.backends.cuda.is_built():
        parser.error("--fake is for builds of torch without CUDA")
    machine = Machine.here()
    if not machine.devices and not options.fake:
        said = output_of("nvidia-smi", "--list-gpus") or "nothing"
        print(f"torch {torch.__version__} finds no GPU; nvidia-smi: {said}", file=sys.stderr)
        print("ARGS=--fake tries this command without one.", file=sys.stderr)
        return 1
    folder = CHECKOUT / options.out
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    about, results = machine_lines(), []
    for section in (section for section in SECTIONS if section.name in options.sections):
        print(f"{section.name}: {section.what} …", flush=True)
        results.append(run_section(section, machine, options))
        print(f"  {results[-1]} ({results[-1].seconds:.0f} s)", flush=True)
        draw([table for result in results for table in result.tables], options)
        (folder / "report.md").write_text(report(results, about, options), encoding="utf-8")
        data = {r.section.name: [asdict(table) for table in r.tables] for r in results}
        (folder / "tables.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
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
    ):
        if lines:
            print(f"{title}:")
            print("\n".join(f"  {line}" for line in lines))
    print(f"report: {options.out / 'report.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
