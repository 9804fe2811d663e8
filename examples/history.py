"""What a run leaves: one row a step, kept in memory, in a CSV file and in a plot."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from plots import GREY, drawing, save


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


COLOURS = {"AdamW": "#c2410c", "Muon": "#1d4ed8"}  # by the first word of a curve's name


def plot(path: Path, title: str, subtitle: str, runs: dict[str, list[History]]) -> None:
    """Loss against steps and against time, a curve for each name: the mean of its histories.

    The band reaches from the lowest to the highest history. A name with a single history also
    shows its training loss.
    """
    with drawing() as plt:
        figure, panels = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True)
        figure.subplots_adjust(left=0.06, right=0.95, bottom=0.12, top=0.83, wspace=0.14)
        for axes, x, label in zip(panels, ("step", "seconds"), ("Step", "Training time (s)")):
            for name, histories in runs.items():
                _draw(axes, name, histories, x)
            axes.set_xlabel(label)
            axes.set_xlim(left=0)
            axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
            axes.tick_params(length=0, labelleft=True)
        panels[0].set_ylabel("Loss (nats per byte)")
        if len(runs) > 1:
            panels[0].legend(frameon=False, loc="upper right")
        figure.text(0.06, 0.94, title, fontsize=14, fontweight="bold")
        figure.text(0.06, 0.88, subtitle, color=GREY)
        save(figure, path)


def _draw(axes: Any, name: str, histories: list[History], x: str) -> None:
    colour = COLOURS.get(name.split()[0], GREY)
    if len(histories) == 1:
        rows = histories[0].rows
        train = [row.train_loss for row in rows]
        axes.plot([getattr(row, x) for row in rows], train, color=colour, alpha=0.3, linewidth=1)
    at_same_step = list(zip(*(history.validations for history in histories)))
    xs = [fmean(getattr(row, x) for row, _ in points) for points in at_same_step]
    losses = [[loss for _, loss in points] for points in at_same_step]
    axes.plot(xs, [fmean(ys) for ys in losses], color=colour, linewidth=2, label=name)
    axes.fill_between(
        xs, [min(ys) for ys in losses], [max(ys) for ys in losses], color=colour, alpha=0.2, lw=0
    )
    _label(axes, f"{fmean(losses[-1]):.2f}", (xs[-1], fmean(losses[-1])), colour)


def _label(axes: Any, text: str, point: Sequence[float], colour: str) -> None:
    """At the end of a curve, outside of the axes."""
    axes.annotate(
        text,
        point,
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontweight="bold",
        annotation_clip=False,
    )


def plot_logits(path: Path, threshold: float, clipped: History, unclipped: History) -> None:
    """Largest attention logit after every step, and before it (pale), with QK-Clip and without."""
    with drawing() as plt:
        figure, axes = plt.subplots(figsize=(8, 4.8))
        figure.subplots_adjust(left=0.08, right=0.86, bottom=0.12, top=0.82)
        axes.axhline(threshold, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"threshold {threshold:g}",
            (0, threshold),
            xytext=(6, 4),
            textcoords="offset points",
            color=GREY,
        )
        runs = {"without\nQK-Clip": (unclipped, "#c2410c"), "with\nQK-Clip": (clipped, "#1d4ed8")}
        for name, (history, colour) in runs.items():
            seen = [(r.step, r.seen_logit) for r in history.rows if r.seen_logit is not None]
            points = [(r.step, r.max_logit) for r in history.rows if r.max_logit is not None]
            axes.plot(*zip(*seen), color=colour, linewidth=1, alpha=0.25)
            axes.plot(*zip(*points), color=colour, linewidth=1.5)
            _label(axes, name, points[-1], colour)
        axes.set_xlabel("Step")
        axes.set_ylabel("Largest attention logit")
        axes.set_xlim(0, unclipped.last.step)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.tick_params(length=0)
        ratios = [history.largest_logits[0] / threshold for history in (clipped, unclipped)]
        title = "With QK-Clip logits reach {:.2f} × the threshold, without it {:.1f} ×"
        losses = [f"{history.final_val_loss:.3f}" for history in (clipped, unclipped)]
        subtitle = (
            f"After each step (pale: in its forward). Validation loss {losses[0]}, "
            f"without {losses[1]}"
        )
        figure.text(0.08, 0.93, title.format(*ratios), fontsize=13, fontweight="bold")
        figure.text(0.08, 0.87, subtitle, color=GREY)
        save(figure, path)
