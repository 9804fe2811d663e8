"""What all plots of the examples share: a light and a dark theme, titles, and files for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Theme:
    """Colors of a plot; the names of hues say what each looks like in both themes."""

    name: str
    background: str
    text: str
    muted: str
    grid: str
    blue: str
    orange: str
    teal: str
    purple: str
    red: str
    yellow: str
    pink: str
    green: str

    @property
    def hues(self) -> tuple[str, ...]:
        """Colors for series without a fixed color, in the order of use."""
        first = (self.blue, self.orange, self.teal, self.purple)
        return (*first, self.red, self.yellow, self.pink, self.green)

    def pale(self, color: str, share: float = 0.5) -> Any:
        """A color mixed with the background; unlike a transparent one, it hides what is below."""
        from matplotlib.colors import to_rgb

        both = zip(to_rgb(color), to_rgb(self.background))
        return [share * c + (1 - share) * b for c, b in both]


LIGHT = Theme(
    name="light",
    background="#ffffff",
    text="#1f2328",
    muted="#59636e",
    grid="#e2e7ec",
    blue="#1d4ed8",
    orange="#c2410c",
    teal="#0f766e",
    purple="#6d28d9",
    red="#dc2626",
    yellow="#a16207",
    pink="#be185d",
    green="#4d7c0f",
)
DARK = Theme(
    name="dark",
    background="#0d1117",  # GitHub's page
    text="#e6edf3",
    muted="#9198a1",
    grid="#262c36",
    blue="#58a6ff",
    orange="#f0883e",
    teal="#2dd4bf",
    purple="#bc8cff",
    red="#ff7b72",
    yellow="#e3b341",
    pink="#f778ba",
    green="#7ee787",
)


THEMES = (LIGHT, DARK)


def files_of(path: Path) -> list[Path]:
    """NAME-light.png and NAME-dark.png, for NAME.png."""
    return [path.with_name(f"{path.stem}-{each.name}{path.suffix or '.png'}") for each in THEMES]


def save(path: Path, draw: Callable[[Any, Theme], Any]) -> str:
    """Draws in both themes, into NAME-light.png and NAME-dark.png.

    Args:
        path: NAME.png.
        draw: makes the figure, from pyplot and a theme.

    Returns:
        Both paths, to print.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files = files_of(path)
    for theme, file in zip(THEMES, files):
        with drawing(theme) as plt:
            figure = draw(plt, theme)
            figure.savefig(file, dpi=150)
            plt.close(figure)
    return ", ".join(map(str, files))


@contextmanager
def drawing(theme: Theme) -> Iterator[Any]:
    """pyplot, to draw into files, in the style of a theme."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": theme.muted,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "xtick.minor.size": 0,
        "legend.frameon": False,
    }
    style |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.background)
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), theme.text)
    style |= dict.fromkeys(("xtick.color", "ytick.color"), theme.muted)
    with plt.rc_context(style):
        yield plt


HEAD = 1.2  # inches that a title, a subtitle and a legend need above the axes
LEFT = 0.2  # inches from a figure's edge to its title


def add_head(figure: Any, theme: Theme, title: str, subtitle: str, legend: Any = None) -> None:
    """What a figure shows, above its axes: a legend there lies on no curve.

    Args:
        figure: where.
        theme: of its colors.
        title: the finding.
        subtitle: how it was found.
        legend: the axes whose curves the legend names; None: no legend.
    """
    width, height = figure.get_size_inches()
    x = LEFT / width
    figure.text(x, 1 - 0.36 / height, title, fontsize=14, fontweight="bold")
    figure.text(x, 1 - 0.66 / height, subtitle, color=theme.muted)
    if legend is not None:
        handles, labels = legend.get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="upper left",
            bbox_to_anchor=(x, 1 - 0.83 / height),
            borderaxespad=0,
            borderpad=0,
            ncols=len(labels),
            handlelength=1.2,
            columnspacing=1.6,
        )


def label_rows(axes: Any, rows: Sequence[str]) -> None:
    """For bars along time: a row for each name, the first on top, bars of 0.8 around 0, 1, …"""
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x")
