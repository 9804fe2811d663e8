"""docs/reliability.md names a test in every row of its tables, and the tests exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "reliability.md"
REFERENCE = re.compile(r"`(test_\w+\.py)::(test_\w+)(\[[^`]*\])?`")

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="the Hub's builder has no docs")


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def rows() -> list[str]:
    """Of all tables, without their headings."""
    tables = re.findall(r"^\|.*\n\|[-:| ]+\|\n((?:\|.*\n)*)", DOCUMENT.read_text(), re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def test_every_row_names_tests_that_exist():
    for row in rows():
        references = REFERENCE.findall(row)
        assert references, f"no test in: {row}"
        for file, name, _ in references:
            assert name in functions_of(file), f"{file} has no {name}, named in: {row}"
