"""Draws the README's first picture: momentum travels to owners, and updates travel back.

    python scripts/diagram.py docs/diagram.png

Writes docs/diagram-light.png and docs/diagram-dark.png.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from plots import Theme, save

RANKS = 4  # and as many matrices: rank r owns matrix r
WIDTH, HEIGHT = 10.0, 4.05  # inches, the unit of all coordinates below

SIDE = 0.38  # of a matrix
PITCH = 0.46  # from one matrix to the next
SHARDS = 3 * PITCH + SIDE  # width of a shard of every matrix
OWNED = 1.4  # width of a matrix, an arrow, and the matrix's update
ROW = 0.6  # from one rank to the next
TOP = 2.58  # middle of rank 0
MOMENTUM, OWNER, UPDATES = 0.98, 4.6, 7.9  # left edges of the three columns
MOMENTUM_SHADE = 0.55  # of the update's color
PAD = 0.09  # between a matrix and the edge of its rank's box


def main(argv: list[str]) -> None:
    print(save(Path(argv[0] if argv else "docs/diagram.png"), draw))


def draw(plt: Any, theme: Theme) -> Any:
    figure = plt.figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")
    colors = theme.hues[:RANKS]
    for rank in range(RANKS):
        y = TOP - ROW * rank
        axes.text(MOMENTUM - 0.22, y, f"rank {rank}", ha="right", va="center", fontsize=13)
        box(axes, theme, MOMENTUM, y, SHARDS)
        box(axes, theme, OWNER, y, OWNED)
        box(axes, theme, UPDATES, y, SHARDS)
        draw_owner(axes, theme, y, colors[rank])
        for matrix, color in enumerate(colors):
            at = PITCH * matrix
            draw_shard(axes, theme, MOMENTUM + at, y, rank, theme.pale(color, MOMENTUM_SHADE))
            draw_shard(axes, theme, UPDATES + at, y, rank, color)
            shard, whole = row_of(rank, matrix), row_of(matrix, rank)
            ribbon(axes, MOMENTUM + SHARDS + PAD, shard, OWNER - PAD, whole, color)
            ribbon(axes, OWNER + OWNED + PAD, whole, UPDATES - PAD, shard, color)
    draw_words(axes, theme)
    return figure


def row_of(rank: int, part: int) -> float:
    """Height of the middle of a quarter of a matrix."""
    return TOP - ROW * rank - SIDE * ((part + 0.5) / RANKS - 0.5)


def box(axes: Any, theme: Theme, x: float, y: float, width: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner, size = (x - PAD, y - SIDE / 2 - PAD), (width + 2 * PAD, SIDE + 2 * PAD)
    style: dict[str, Any] = {
        "facecolor": theme.background,
        "edgecolor": theme.muted,
        "linewidth": 0.9,
    }
    rounded = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=rounded, zorder=2, **style))


def draw_shard(axes: Any, theme: Theme, x: float, y: float, rank: int, color: Any) -> None:
    """The rows of a matrix that a rank holds, and, in grey, those of other ranks."""
    rectangle(axes, x, y, SIDE, theme.grid)
    rectangle(axes, x, y + row_of(0, rank) - TOP, SIDE / RANKS, color)


def draw_owner(axes: Any, theme: Theme, y: float, color: str) -> None:
    """A matrix of shards, and its update."""
    update = OWNER + OWNED - SIDE
    rectangle(axes, OWNER, y, SIDE, theme.pale(color, MOMENTUM_SHADE))
    for line in range(1, RANKS):
        height = y + SIDE * (line / RANKS - 0.5)
        axes.plot([OWNER, OWNER + SIDE], [height] * 2, color=theme.background, lw=0.9, zorder=4)
    arrow = {"arrowstyle": "-|>", "color": theme.text, "lw": 1.5, "mutation_scale": 14}
    gap = 0.07
    axes.annotate(
        "", (update - gap, y), (OWNER + SIDE + gap, y), arrowprops=arrow | {"shrinkA": 0}, zorder=4
    )
    rectangle(axes, update, y, SIDE, color)


def rectangle(axes: Any, x: float, y: float, height: float, color: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y - height / 2), SIDE, height, color=color, lw=0, zorder=3))


def ribbon(axes: Any, x: float, y: float, to_x: float, to_y: float, color: str) -> None:
    """A band between two ranks, nearly as wide as a shard is high."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    half, bend = 0.4 * SIDE / RANKS, 0.5 * (to_x - x)
    upper = [(x, y + half), (x + bend, y + half), (to_x - bend, to_y + half), (to_x, to_y + half)]
    lower = [(px, py - 2 * half) for px, py in reversed(upper)]
    codes = [Curve.MOVETO, *[Curve.CURVE4] * 3, Curve.LINETO, *[Curve.CURVE4] * 3]
    curve = Curve(upper + lower, codes)
    axes.add_patch(PathPatch(curve, facecolor=color, alpha=0.45, lw=0, zorder=1))


def draw_words(axes: Any, theme: Theme) -> None:
    title = "Each matrix is orthogonalized once, by one owner rank"
    axes.text(0.2, HEIGHT - 0.42, title, fontsize=18, fontweight="bold")
    heads = {
        "momentum shards": MOMENTUM + SHARDS / 2,
        "owner orthogonalizes\n(Newton-Schulz)": OWNER + OWNED / 2,
        "updates back": UPDATES + SHARDS / 2,
    }
    middles = (MOMENTUM + SHARDS + OWNER) / 2, (OWNER + OWNED + UPDATES) / 2
    y = TOP + SIDE / 2 + PAD + 0.13
    for head, x in heads.items():
        axes.text(x, y, head, ha="center", fontsize=13, fontweight="bold", linespacing=1.15)
    for x in middles:
        axes.text(x, y, "all-to-all, bf16", ha="center", fontsize=12, color=theme.muted)
    rest = "AdamW updates the rest (embeddings, norms, head) shard by shard"
    axes.text(WIDTH / 2, 0.15, rest, ha="center", va="bottom", fontsize=12, color=theme.muted)


if __name__ == "__main__":
    main(sys.argv[1:])
