"""Writes the tables of docs/options.md from the declarations of the options; --check only compares.

A table follows each line ``<!-- options: … -->``, which names its options.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from generated_page import write_or_check

sys.path.insert(0, str(Path(__file__).parent.parent / "torch-ext"))

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
TABLE = re.compile(r"<!-- options: (.*?) -->\n\n(?:\|.*\n)*")


def declared() -> dict[str, tuple[Any, str]]:
    """By name of an option, its default and its meaning."""
    from optimizer import Muon
    from optimizer.parameters.options import (
        GROUP_OPTIONS,
        NS_DEFAULTS,
        OTHER_ARGUMENTS,
        SETTINGS,
    )

    parameters = inspect.signature(Muon).parameters
    defaults = {**NS_DEFAULTS, **{name: p.default for name, p in parameters.items()}}
    options = {**GROUP_OPTIONS, **SETTINGS}
    meanings = {**{name: option.meaning for name, option in options.items()}, **OTHER_ARGUMENTS}
    return {name: (defaults[name], meaning) for name, meaning in meanings.items()}


def with_tables(page: str) -> str:
    """The page with its tables made anew; ValueError unless each option is in one table."""
    options = declared()
    listed = [name for names in TABLE.findall(page) for name in names.split()]
    if sorted(listed) != sorted(options):
        raise ValueError(f"options in no table, or in two: {sorted({*listed} ^ {*options})}")

    def table(match: re.Match[str]) -> str:
        lines = ["| option | default | meaning |", "|---|---|---|"]
        for name in match[1].split():
            default, meaning = options[name]
            shown = f'"{default}"' if isinstance(default, str) else repr(default)
            lines.append(f"| `{name}` | `{shown}` | {meaning} |")
        return "\n".join([f"<!-- options: {match[1]} -->", "", *lines, ""])

    return TABLE.sub(table, page)


if __name__ == "__main__":
    write_or_check(PAGE, with_tables(PAGE.read_text()), __doc__)
