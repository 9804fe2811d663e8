"""Tables that benchmarks wrote: in markdown, beside their aims, and as pictures."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any

from gpu_sections import CHECKOUT, Aim

sys.path.append(str(CHECKOUT / "examples"))
from plots import Theme, files_of, label_rows, save

FAKE = "Made without a device: no figure below says anything about one."

Record = Mapping[str, Any]  # a row, by column
Dots = dict[str, dict[str, float]]  # by row of dots, and by series


@dataclass(frozen=True)
class Table:
    """As benchmarks/timing.py writes it."""

    title: str
    columns: list[str]
    rows: list[list[Any]]

    def records(self) -> list[Record]:
        return [dict(zip(self.columns, row)) for row in self.rows]

    def markdown(self) -> str:
        return f"{self.title}\n\n{lines_of([self.columns, *self.rows])}"


def lines_of(rows: Sequence[Sequence[Any]]) -> str:
    """A table in markdown, its first row the header."""
    head, *rest = [f"| {' | '.join(str(c).removesuffix('.0') for c in row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *rest])


# -- aims ------------------------------------------------------------------------------------------


def figures_of(aim: Aim, tables: Sequence[Table]) -> Iterator[tuple[str, float, str]]:
    """Where it is, a figure, and what it is compared with."""
    for table in tables:
        if not {aim.column, aim.beside} <= set(table.columns):
            continue
        for record in table.records():
            if aim.key is not None and record.get(aim.key) != aim.row:
                continue
            figure, baseline = record[aim.column], baseline_of(aim, record, table)
            if baseline is None or not isinstance(figure, float):
                continue
            if aim.relative:
                figure /= baseline[aim.column]
            name = "" if aim.baseline is None else f"{aim.baseline}, "
            words = [cell for cell in record.values() if isinstance(cell, str) and cell != "–"]
            where = f"{table.title}: {', '.join(words[:3])}"
            yield where, figure, f"{name}{aim.beside}: {baseline[aim.beside]}"


def baseline_of(aim: Aim, record: Record, table: Table) -> Record | None:
    """The row that has another value of the key, and those left of it in common."""
    if aim.baseline is None or aim.key is None:
        return record
    left = table.columns[: table.columns.index(aim.key)]
    wanted = {**{column: record[column] for column in left}, aim.key: aim.baseline}
    fitting = (
        other
        for other in table.records()
        if all(other[column] == value for column, value in wanted.items())
    )
    return next(fitting, None)


def judge(aim: Aim, tables: Sequence[Table], fake: bool) -> list[list[str]]:
    """Rows of the table of aims, one for each figure."""
    bound = f"≥ {aim.least:.3g}" if aim.least > float("-inf") else f"≤ {aim.most:.3g}"
    rows = []
    for where, figure, baseline in figures_of(aim, tables):
        met = "met" if aim.least <= figure <= aim.most else "NOT met"
        verdict = "no device" if fake else met
        rows.append([aim.what, bound, f"{figure:.3g}", baseline, verdict, where])
    return rows or [[aim.what, bound, "–", "", "not measured", ""]]


# -- pictures --------------------------------------------------------------------------------------


def is_positive(value: Any) -> bool:
    return isinstance(value, float) and value > 0  # no NaN


@dataclass(frozen=True)
class Panel:
    """Tables in a picture: a row of dots for each row, or, without ``row``, for each table.

    Args:
        table: how their titles begin.
        row: columns that name a row of dots.
        series: the column that names a dot, unless ``columns`` do.
        columns: values.
    """

    table: str
    row: Sequence[str]
    series: str | None
    columns: Sequence[str]

    def dots(self, tables: Sequence[Table]) -> Dots:
        found: Dots = {}
        for table in (table for table in tables if table.title.startswith(self.table)):
            for record in table.records():
                name = ", ".join(str(record[c]).removesuffix(".0") for c in self.row)
                name = name or table.title.removeprefix(self.table).strip(", ")[:60]
                place = found.setdefault(name, {})
                for column in (c for c in self.columns if is_positive(record.get(c))):
                    dot = column if self.series is None else record[self.series]
                    place.setdefault(dot, record[column])
        return found


# By name: the unit, whether its least or its largest value is best, and panels.
PICTURES: dict[str, tuple[str, Callable[..., str], list[Panel]]] = {
    "times": (
        "least ms",
        min,
        [
            Panel("One step", (), "optimizer", ["least ms"]),
            Panel("One step", (), "offload", ["least ms"]),
            Panel("QK-Clip", (), "", ["least ms"]),
            Panel(
                "Maxima of causal attention logits",
                ("B × Hq/Hk × T × D", "dtype"),
                "contender",
                ["least ms"],
            ),
        ],
    ),
    "rates": (
        "TFLOP/s; of traffic, GB/s",
        max,
        [
            Panel(
                "Symmetric products by halves, torch.float16",
                ("product", "matrices"),
                None,
                ["kernel, effective TFLOP/s", "library, effective TFLOP/s"],
            ),
            Panel("Orthogonalization", ("matrices",), "contender", ["effective TFLOP/s"]),
            Panel("All-to-alls", ("KiB sent",), None, ["GB/s to others"]),
        ],
    ),
}


def names_of(picture: str) -> list[str]:
    """Names of a picture's files."""
    return [file.name for file in files_of(Path(picture))]


def draw(tables: Sequence[Table], folder: Path, fake: bool) -> None:
    for name, (unit, best, panels) in PICTURES.items():
        drawn = []
        for panel in panels:
            fitting = [table for table in tables if panel.series in (None, *table.columns)]
            if dots := panel.dots(fitting):
                drawn.append((finding(panel.table, dots, best), dots))
        if drawn:
            draw_dots(drawn, unit, folder / f"{name}.png", fake)


def finding(table: str, dots: Dots, best: Callable[..., str]) -> str:
    """A panel's title: which series is best, and in how many of the rows that compare any."""
    winners = [best(row, key=row.__getitem__) for row in dots.values() if len(row) > 1]
    if not winners:
        return table
    winner = mode(winners)
    name = winner.removesuffix(", effective TFLOP/s")
    return f"{table}: {name} is best in {winners.count(winner)} of {len(winners)}"


def draw_dots(panels: Sequence[tuple[str, Dots]], unit: str, path: Path, fake: bool) -> None:
    heights = [len(dots) + 3 for _, dots in panels]

    def figure_of(plt: Any, theme: Theme) -> Any:
        size = (10, 0.3 * sum(heights) + 1)
        figure, grid = plt.subplots(len(panels), figsize=size, height_ratios=heights, squeeze=False)
        for axes, (title, dots) in zip(grid[:, 0], panels):
            series = dict.fromkeys(name for row in dots.values() for name in row)
            for color, name in zip(theme.hues, series):
                points = [(row[name], at) for at, row in enumerate(dots.values()) if name in row]
                axes.plot(*zip(*points), "o", color=color, label=name)
            label_rows(axes, list(dots))
            powers = [math.log10(value) for row in dots.values() for value in row.values()]
            decades = 10.0 ** math.floor(min(powers)), 10.0 ** math.ceil(max(powers))
            axes.set(xscale="log", xlim=decades)
            axes.set_title(title, loc="left", fontsize=11)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        grid[-1, 0].set_xlabel(unit)
        if fake:
            figure.suptitle(FAKE, color=theme.red)
        figure.tight_layout()
        return figure

    save(path, figure_of)
