"""docs/reliability.md names a test for every promise, tests/README.md the tests of every module."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from checkout import PACKAGE, ROOT, SOURCES

TESTS = ROOT / "tests"
DOCUMENT = ROOT / "docs" / "reliability.md"
REFERENCE = re.compile(r"`(test_\w+\.py)::(test_\w+)(\[[^`]*\])?`")

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="the Hub's builder has no docs")


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def tables() -> list[tuple[str, list[str]]]:
    """Each with the paragraph before it, and its lines: a heading, a rule, rows."""
    blocks = [block.strip() for block in DOCUMENT.read_text().split("\n\n")]
    pairs = zip(["", *blocks], blocks)
    return [(before, block.splitlines()) for before, block in pairs if block.startswith("|")]


def test_every_table_or_row_names_tests_that_exist():
    assert tables()
    for before, (heading, _, *rows) in tables():
        has_column = heading.strip("| ").split("|")[-1].strip().lower() == "test"
        for text in rows if has_column else [before]:
            assert REFERENCE.search(text), f"no test in: {text}"


def test_tests_that_are_named_exist():
    for file, name, _ in REFERENCE.findall(DOCUMENT.read_text()):
        assert name in functions_of(file), f"{file} has no {name}"


def test_every_module_and_every_file_of_tests_is_in_the_table_of_tests():
    text = (TESTS / "README.md").read_text()
    assert set(re.findall(r"test_\w+", text)) == {file.stem for file in TESTS.glob("test_*.py")}
    rows = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    modules = {file.relative_to(PACKAGE).as_posix() for file in SOURCES}
    without_tests = {"__init__.py", "scratch.py", "extras/__init__.py", "extras/simulated_host.py"}
    for module in modules - without_tests:
        assert any(module.startswith(row) for row in rows), f"{module} is in no row"
    for row in rows:
        assert any(module.startswith(row) for module in modules), f"{row} is no module"
