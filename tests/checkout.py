"""Where the files of this checkout are."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PACKAGE = ROOT / "torch-ext" / "optimizer"
SOURCES = sorted(PACKAGE.rglob("*.py"))

each_source = pytest.mark.parametrize(
    "source", SOURCES, ids=[str(source.relative_to(PACKAGE)) for source in SOURCES]
)
