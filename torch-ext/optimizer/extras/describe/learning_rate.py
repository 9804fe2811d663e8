"""Whether a learning rate fits the scale of updates, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Optional

from ...core import update_scale
from ...parameters.default_groups import Decision
from .code import LR, Advice, number
from .evidence import Subject
from .trap import Trap

# How much of its own size a weight moves per step. An orthogonal matrix has an RMS of
# 1/sqrt(max(rows, cols)), and a weight as torch's layers initialize it 1/sqrt(3·cols).
#
# Above: what is known to work with Muon stays under 9 % (0.05 with "original"); with
# "match_rms_adamw", 0.02 in matrices of 512 columns and more is above.
MOST = 0.12
# Below: the others are for rates around 0.02, 3 % a step; one of AdamW's, 3e-4, moves weights by
# 0.05 %. With AdamW's scale small rates are meant: fine-tuning goes down to 1e-6.
LEAST = {"match_rms_adamw": 2e-6, "original": 1e-3, "spectral": 1e-3, "none": 1e-3}


def find(subject: Subject, advice: Advice) -> Iterator[Trap]:
    lr, given = subject.options.get("lr"), subject.options.get("adjust_lr", "match_rms_adamw")
    scale = advice.options.get("adjust_lr", given)
    # The value of a tensor stays unread; zero is a schedule's first.
    if not isinstance(lr, (int, float)) or lr <= 0:
        return
    muons = advice.muons(subject)
    moved = relative_update(subject, muons, float(lr), scale)
    if moved is None or LEAST[scale] <= moved <= MOST:
        return
    better = LR[scale]
    advice.options["lr"] = better
    if scale != given:  # told as that trap's consequence
        return
    other = "original" if scale == "match_rms_adamw" else "match_rms_adamw"
    suits_other = relative_update(subject, muons, float(lr), other)
    fits = suits_other is not None and LEAST[other] <= suits_other <= MOST
    alternative = f', or adjust_lr="{other}", whose rates it is like' if fits else ""
    most = f", here up to about {number(float(f'{lr * MOST / moved:.1g}'))}" if moved > MOST else ""
    too = "large" if moved > MOST else "small"
    yield Trap(
        "lr",
        f'lr={number(lr)} is too {too} for adjust_lr="{scale}"',
        (),
        f"a step would move weights by {100 * moved:.2g} % of their size; {_usual(scale)}{most}"
        f"{alternative}",
        f"lr={number(better)}",
    )


def _usual(scale: str) -> str:
    if scale == "match_rms_adamw":
        return "rates like AdamW's are meant, 1e-4 to 1e-2"
    return f"rates around {number(LR[scale])} are meant"


def relative_update(
    subject: Subject, decisions: Sequence[Decision], lr: float, scale: str
) -> Optional[float]:
    """The size of an update over that of the weights, the mean over all elements of Muon's.

    lr · scale · RMS(orthogonal) / RMS(weight), the latter as torch's layers initialize it.
    """
    moved, elements = 0.0, 0
    for decision in decisions:
        try:
            matrices = subject.matrices(decision)
        except ValueError:  # told as refused
            continue
        for block in matrices.blocks:
            rows, cols = block.rows, matrices.cols
            count = matrices.experts * block.count * rows * cols
            if count:
                factor = update_scale(rows, cols, scale)
                moved += count * lr * factor * math.sqrt(3 * cols / max(rows, cols))
                elements += count
    return moved / elements if elements else None
