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
    lines = DOCUMENT.read_text().splitlines()
    tables = [line for line in lines if line.startswith("|")]
    headings = {
        line for line, below in zip(lines, lines[1:]) if re.fullmatch(r"\|[-:|]+\|", below.strip())
    }
    return [
        line for line in tables if line not in headings and not re.fullmatch(r"\|[-:|]+\|", line)
    ]


def test_every_row_names_tests_that_exist():
    for row in rows():
        references = REFERENCE.findall(row)
        assert references, f"no test in: {row}"
        for file, name, _ in references:
            assert name in functions_of(file), f"{file} has no {name}, named in: {row}"
