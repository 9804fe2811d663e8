"""Where the files of this checkout are."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PACKAGE = ROOT / "torch-ext" / "optimizer"
# The Hub's builder writes _ops.py beside the sources, and tests them with it there.
SOURCES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "_ops.py")

each_source = pytest.mark.parametrize(
    "source", SOURCES, ids=[str(source.relative_to(PACKAGE)) for source in SOURCES]
)
