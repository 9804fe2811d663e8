"""What all plots of the examples share: their style, and how they become files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GREY = "#4b5563"


@contextmanager
def drawing() -> Iterator[Any]:
    """pyplot, to draw into files, in one style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style | {"font.size": 11, "axes.edgecolor": GREY}):
        yield plt


def label_rows(axes: Any, rows: Sequence[str]) -> None:
    """For bars along time: a row for each name, the first on top, bars of 0.8 around 0, 1, …"""
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
