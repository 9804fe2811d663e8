"""What all plots of the examples share: their style, and how they become files."""

from __future__ import annotations

from collections.abc import Iterator
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


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
