"""What scripts that make pages of the docs share: they write the page, or compare it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def write_or_check(page: Path, text: str, description: str | None) -> None:
    """Writes a page; with ``--check``, ends with an error if the page has another text."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    if parser.parse_args().check and text != page.read_text():
        sys.exit(f"{page} is out of date: run {Path(sys.argv[0]).name}")
    page.write_text(text)
