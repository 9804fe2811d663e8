"""What a run leaves: one row a step, kept in memory, in a CSV file and in a plot."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from plots import HEAD, Theme, add_head, save


@dataclass(frozen=True)
class Row:
    step: int  # updates done so far
    seconds: float  # of training: validation and checkpoints are not counted
    tokens: int
    lr: float
    train_loss: float  # nats per byte, before the update
    val_loss: float | None = None  # after it, where it was measured
    seen_logit: float | None = None  # largest of attention, in the update's own forward
    max_logit: float | None = None  # the same, of the same batch after the update


@dataclass
class History:
    rows: list[Row] = field(default_factory=list)

    @property
    def last(self) -> Row:
        return self.rows[-1]

    @property
    def validations(self) -> list[tuple[Row, float]]:
        return [(row, row.val_loss) for row in self.rows if row.val_loss is not None]

    @property
    def final_val_loss(self) -> float:
        return self.validations[-1][1] if self.validations else float("nan")

    @property
    def largest_logits(self) -> tuple[float, float]:
        """After updates, and before them."""
        return (
            max((row.max_logit for row in self.rows if row.max_logit is not None), default=0.0),
            max((row.seen_logit for row in self.rows if row.seen_logit is not None), default=0.0),
        )

    @property
    def tokens_per_second(self) -> float:
        return self.last.tokens / self.last.seconds

    def write_csv(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in self.rows)

    def append_csv(self, path: Path) -> None:
        """Adds the last row, so that a run that is killed leaves its log."""
        with path.open("a", newline="") as file:
            csv.DictWriter(file, [f.name for f in fields(Row)]).writerow(asdict(self.last))

    @classmethod
    def read_csv(cls, path: Path, through_step: int) -> History:
        """The rows a run had written when it saved its checkpoint at `through_step`."""
        if not path.exists():
            return cls()
        with path.open(newline="") as file:
            rows = [_parse(row) for row in csv.DictReader(file)]
        return cls([row for row in rows if row.step <= through_step])


def _parse(row: dict[str, str]) -> Row:
    # csv writes floats by repr(), so float() gives the same bits back.
    return Row(
        step=int(row["step"]),
        seconds=float(row["seconds"]),
        tokens=int(row["tokens"]),
        lr=float(row["lr"]),
        train_loss=float(row["train_loss"]),
        val_loss=float(row["val_loss"]) if row["val_loss"] else None,
        seen_logit=float(row["seen_logit"]) if row.get("seen_logit") else None,
        max_logit=float(row["max_logit"]) if row.get("max_logit") else None,
    )


HUES = {"AdamW": "orange", "Muon": "blue"}  # by the first word of a curve's name

Curve = list[tuple[float, float]]  # (step or seconds, loss)


def mean_curve(histories: Sequence[History], x: str) -> Curve:
    """Validation loss against ``"step"`` or ``"seconds"``, mean of the histories."""
    at_same_step = zip(*(history.validations for history in histories))
    return [
        (fmean(getattr(row, x) for row, _ in points), fmean(loss for _, loss in points))
        for points in at_same_step
    ]


def reaches(curve: Sequence[tuple[float, float]], goal: float) -> float:
    """Where a curve comes down to a loss, on a straight line between its points; inf: never."""
    for before, (x, loss) in zip([None, *curve], curve):
        if loss <= goal:
            return x if before is None else x - (x - before[0]) * (goal - loss) / (before[1] - loss)
    return math.inf


def plot(path: Path, title: str, subtitle: str, runs: dict[str, list[History]]) -> str:
    """Loss against steps and against time, a curve for each name: the mean of its histories.

    The band reaches from the lowest to the highest history. A name with a single history also
    shows its training loss. Of two names, the better one is marked where it reaches the last loss
    of the other.

    Returns:
        The files, to print.
    """

    def draw(plt: Any, theme: Theme) -> Any:
        figure, panels = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
        figure.subplots_adjust(left=0.06, right=0.985, bottom=0.11, top=1 - HEAD / 5, wspace=0.1)
        for axes, x, label in zip(panels, ("step", "seconds"), ("Step", "Training time (s)")):
            for name, histories in runs.items():
                _draw(axes, theme, name, histories, x)
            if len(runs) == 2:
                of_what = "steps" if x == "step" else "time"
                _mark(axes, theme, [mean_curve(each, x) for each in runs.values()], of_what)
            axes.set_xlabel(label)
            axes.set_xlim(left=0)
            axes.grid(axis="y")
            axes.tick_params(labelleft=True)
        panels[0].set_ylabel("Loss (nats per byte)")
        add_head(figure, theme, title, subtitle, legend=panels[0])
        return figure

    return save(path, draw)


def _draw(axes: Any, theme: Theme, name: str, histories: list[History], x: str) -> None:
    color = getattr(theme, HUES.get(name.split()[0], "muted"))
    if len(histories) == 1:
        rows = histories[0].rows
        train = [row.train_loss for row in rows]
        axes.plot([getattr(row, x) for row in rows], train, color=color, alpha=0.3, linewidth=1)
    curve = mean_curve(histories, x)
    xs = [at for at, _ in curve]
    losses = list(zip(*([loss for _, loss in history.validations] for history in histories)))
    axes.plot(*zip(*curve), color=color, linewidth=2, label=f"{name}: {curve[-1][1]:.2f}")
    axes.fill_between(xs, [*map(min, losses)], [*map(max, losses)], color=color, alpha=0.2, lw=0)


def _mark(axes: Any, theme: Theme, curves: Sequence[Curve], of_what: str) -> None:
    """Where the better curve reaches the last loss of the other.

    The words stand below and left of that point, where a falling curve has not been.
    """
    better, other = sorted(curves, key=lambda curve: curve[-1][1])
    end, goal = other[-1]
    at = reaches(better, goal)
    dotted = {"color": theme.muted, "linewidth": 1, "linestyle": (0, (1, 2))}
    axes.plot([at, end], [goal, goal], **dotted)
    axes.plot([at], [goal], "o", color=theme.text, markersize=5)
    axes.annotate(
        f"the same loss in\n{at / end:.0%} of the {of_what}",
        (at, goal),
        xytext=(-8, -6),
        textcoords="offset points",
        ha="right",
        va="top",
        bbox={"facecolor": theme.background, "linewidth": 0, "pad": 1},
    )


def plot_logits(path: Path, threshold: float, clipped: History, unclipped: History) -> str:
    """Largest attention logit after every step, and before it (pale), with QK-Clip and without.

    Returns:
        The files, to print.
    """
    ratios = [history.largest_logits[0] / threshold for history in (clipped, unclipped)]
    losses = [f"{history.final_val_loss:.3f}" for history in (clipped, unclipped)]
    title = (
        f"With QK-Clip, logits reach {ratios[0]:.2f} × the threshold; without it, {ratios[1]:.1f} ×"
    )
    subtitle = (
        f"After each step (pale: in its forward). Validation loss {losses[0]}, without {losses[1]}"
    )

    def draw(plt: Any, theme: Theme) -> Any:
        figure, axes = plt.subplots(figsize=(9, 4.8))
        figure.subplots_adjust(left=0.08, right=0.97, bottom=0.12, top=1 - HEAD / 4.8)
        runs = {
            "without QK-Clip": (unclipped, theme.orange),
            "with QK-Clip": (clipped, theme.blue),
        }
        for name, (history, color) in runs.items():
            seen = [(r.step, r.seen_logit) for r in history.rows if r.seen_logit is not None]
            points = [(r.step, r.max_logit) for r in history.rows if r.max_logit is not None]
            axes.plot(*zip(*seen), color=color, linewidth=1, alpha=0.3)
            axes.plot(*zip(*points), color=color, linewidth=1.3, label=name)
        dashed = {"color": theme.text, "linewidth": 1.2, "linestyle": (0, (4, 3))}
        axes.axhline(threshold, **dashed, label=f"threshold: {threshold:g}")
        axes.set(xlabel="Step", ylabel="Largest attention logit", xlim=(0, unclipped.last.step))
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        add_head(figure, theme, title, subtitle, legend=axes)
        return figure

    return save(path, draw)
