"""Changes one token of the package at a time, and shows whether the tests of that line notice.

    pip install coverage
    python scripts/mutate.py --results runs/mutants.json

Mutants come from the syntax trees of the package's modules: another operator or comparison, another
constant, a call left out. Some of those on lines that `make test` runs are drawn, each on a line of
its own, and tried in a clone of the last commit by the tests that run that line, quickest first,
until one fails. What tests run comes from ``--covered`` (`covering.py`), and is found out first if
that folder isn't there. Run again with the same results, the script goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("torch-ext", "optimizer")
NOTHING_RAN = 5  # what pytest returns where it finds none of the tests

OTHER_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}

Place = tuple[int, int]  # line, from 1, and byte in it


class Mutant(NamedTuple):
    """The text of a module from ``start`` to ``stop``, and what stands there instead."""

    module: str
    start: Place
    stop: Place
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.module}:{self.start[0]}:{self.start[1]}  {self.before} → {self.after}"


class Source:
    """The text of a module, and the mutants that its syntax tree has."""

    def __init__(self, module: str, text: bytes):
        self.module = module
        self.lines = text.splitlines(keepends=True)
        self.tree = ast.parse(text)

    def mutants(self) -> Iterator[Mutant]:
        return self._of(self.tree)

    def runs_at_import(self, line: int) -> bool:
        """True if a line is outside all function bodies, as defaults of arguments are."""
        functions = (f for f in ast.walk(self.tree) if isinstance(f, ast.FunctionDef))
        return not any(f.body[0].lineno <= line <= (f.end_lineno or 0) for f in functions)

    def mutated(self, mutant: Mutant) -> bytes:
        start, stop = self._offset(mutant.start), self._offset(mutant.stop)
        text = b"".join(self.lines)
        if text[start:stop].decode() != mutant.before:
            raise ValueError(f"{mutant}: found {text[start:stop]!r} there")
        return text[:start] + mutant.after.encode() + text[stop:]

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        """The node and all nodes in it, except types, messages, and docstrings."""
        if isinstance(node, (ast.Raise, ast.JoinedStr)) or _warns(node):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield self._replaced(node, "pass")
        elif isinstance(node, (ast.BinOp, ast.AugAssign)):
            left, right = (
                (node.left, node.right)
                if isinstance(node, ast.BinOp)
                else (node.target, node.value)
            )
            yield from self._between(left, right, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from self._between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.Compare):
            yield from self._between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield self._replaced(node, self._text(_start(node.operand), _stop(node.operand)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            value = node.value
            other = not value if isinstance(value, bool) else value + 1
            yield self._replaced(node, repr(other))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._of(child)

    def _between(self, left: ast.AST, right: ast.AST, operator: ast.AST) -> Iterator[Mutant]:
        if type(operator) not in OTHER_OPERATORS:
            return
        pattern, other = OTHER_OPERATORS[type(operator)]
        if pattern[0] in "+-*/%<>&|^=!":
            pattern = re.escape(pattern)
        gap = self._text(_stop(left), _start(right))
        found = re.search(pattern, gap)
        assert found is not None, gap
        start, stop = (self._moved(_stop(left), gap[:end]) for end in found.span())
        yield Mutant(self.module, start, stop, found[0], other)

    def _replaced(self, node: ast.AST, after: str) -> Mutant:
        start, stop = _start(node), _stop(node)
        return Mutant(self.module, start, stop, self._text(start, stop), after)

    def _text(self, start: Place, stop: Place) -> str:
        return b"".join(self.lines)[self._offset(start) : self._offset(stop)].decode()

    def _offset(self, place: Place) -> int:
        return sum(map(len, self.lines[: place[0] - 1])) + place[1]

    @staticmethod
    def _moved(place: Place, text: str) -> Place:
        lines = text.encode().split(b"\n")
        return place[0] + len(lines) - 1, len(lines[-1]) + (place[1] if len(lines) == 1 else 0)


def _warns(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn")


def _start(node: ast.AST) -> Place:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _stop(node: ast.AST) -> Place:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


class Covered:
    """What ran while the tests ran: by module and line the tests, by test its seconds.

    A line that runs at import counts as run by all tests that run any line of its module.
    """

    def __init__(self, folder: Path):
        self.tests: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.of_module: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        for file in folder.glob("*.jsonl"):
            for entry in map(json.loads, file.read_text().splitlines()):
                test = sys.intern(entry["test"])
                self.seconds[test] = max(self.seconds[test], entry["seconds"])
                for module, lines in entry["lines"].items():
                    for line in lines:
                        self.tests[module, line].add(test)
                    if lines:
                        self.of_module[module].add(test)

    def tests_of(self, mutant: Mutant, source: Source) -> list[str]:
        """Those that run the first line of what a mutant changes, the quickest first."""
        line = mutant.start[0]
        if source.runs_at_import(line):
            tests = self.of_module[mutant.module]
        else:
            tests = self.tests.get((mutant.module, line), set())
        return sorted(tests, key=self.seconds.__getitem__)


def cover(checkout: Path, folder: Path) -> None:
    """Runs what `make test` runs, and notes what each test runs."""
    folder.mkdir(parents=True)
    scripts = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(scripts), "COVERED": str(folder.resolve())}
    run = [sys.executable, "-m", "pytest", "-q", "-p", "covering", "-m", "not slow", "-n", "auto"]
    subprocess.run(run, cwd=checkout, env={**os.environ, **environment}, check=True)


def draw(covered: Covered, modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """So many mutants of modules whose paths begin like one of ``modules``."""
    by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        module = str(path.relative_to(ROOT / PACKAGE))
        if module.startswith(tuple(modules)):
            for mutant in Source(module, path.read_bytes()).mutants():
                if (module, mutant.start[0]) in covered.tests:
                    by_line[module, mutant.start[0]].append(mutant)
    choose = random.Random(seed)
    lines = sorted(by_line)
    choose.shuffle(lines)
    return [choose.choice(by_line[line]) for line in lines[:count]]


def failing_test(checkout: Path, tests: Sequence[str], seconds: float) -> str:
    """The first test that fails; "" where all pass, or none failed in so many seconds."""
    if not tests:
        return ""
    listed = checkout / "tests-of-line"
    listed.write_text("\n".join(tests))
    run = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "auto", "--dist", "load"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*run, f"@{listed}"], cwd=checkout, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if process.returncode == NOTHING_RAN:
        raise RuntimeError(f"the tests in {listed} are not those of {checkout}: {text}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    return failed[1] if failed else "" if process.returncode in (0, -9) else text[-300:]


def tried(mutant: Mutant, root: Path, covered: Covered, seconds: float) -> Mapping[str, object]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        checkout = Path(folder, "checkout")
        subprocess.run(["git", "clone", "-q", root, checkout], check=True)
        module = checkout / PACKAGE / mutant.module
        source = Source(mutant.module, module.read_bytes())
        module.write_bytes(source.mutated(mutant))
        tests = covered.tests_of(mutant, source)
        killer = failing_test(checkout, tests, seconds)
    taken = round(time.monotonic() - start)
    return {"killer": killer, "tests": len(tests), "seconds": taken}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs = ROOT / "runs"
    parser.add_argument("--root", type=Path, default=ROOT, help="a repository, for its tests")
    parser.add_argument("--covered", type=Path, default=runs / "covered", help="a folder")
    parser.add_argument("--mutants", type=Path, default=runs / "drawn.json", help="those drawn")
    parser.add_argument("--results", type=Path, default=runs / "mutants.json")
    parser.add_argument("--modules", nargs="+", default=[""], help="how their paths begin")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600, help="for each mutant")
    args = parser.parse_args()
    if not args.covered.exists():
        cover(args.root, args.covered)
    covered = Covered(args.covered)
    if not args.mutants.exists():
        args.mutants.write_text(
            json.dumps(draw(covered, args.modules, args.count, args.seed), indent=0)
        )
    drawn = [
        Mutant(module, tuple(start), tuple(stop), before, after)
        for module, start, stop, before, after in json.loads(args.mutants.read_text())
    ]
    known = json.loads(args.results.read_text()) if args.results.exists() else {}
    for mutant in drawn:
        if str(mutant) not in known:
            known[str(mutant)] = tried(mutant, args.root, covered, args.seconds)
            args.results.write_text(json.dumps(known, indent=1, ensure_ascii=False))
        found = known[str(mutant)]
        print(
            f"{found['seconds']:4} s of {found['tests']:4} tests  "
            f"{found['killer'] or 'SURVIVES':90}  {mutant}",
            flush=True,
        )
    killed = sum(bool(known[str(mutant)]["killer"]) for mutant in drawn)
    print(f"{killed} of {len(drawn)} mutants die")


if __name__ == "__main__":
    main()
