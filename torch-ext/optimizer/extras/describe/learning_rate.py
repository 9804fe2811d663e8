"""Finds a learning rate or an update scale that doesn't suit the shapes of the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Optional, Union

from ...core import update_scale
from ...parameters.names import counted
from ...rules.fused import is_stored_transposed
from ...rules.modules import Decision
from .remedy import Remedy, Trap, literal, number, usual_lr
from .subject import Subject, names_of

_ATTENTION = re.compile(r"at+n|attention|qkv|q_proj|\bwq\b", re.IGNORECASE)

# How much of its own size a weight may move per step; `describe` explains these bounds.
MOST = 0.16
LEAST = {"original": 1e-3, "spectral": 1e-3, "none": 1e-3}
LEAST_BY_RMS = 2e-6  # with "match_rms_adamw", or a number


def find_transposed(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Weights stored (in, out), if the update scale depends on which side is which."""
    scale = subject.options.get("adjust_lr")
    if scale not in ("original", "spectral"):
        return
    transposed = [
        d for d in advice.muons(subject) if is_stored_transposed(subject.info(d), d.param)
    ]
    if transposed:
        options: dict[str, Any] = {"adjust_lr": "match_rms_adamw"}
        if not _fits(_relative_update(subject, advice, "match_rms_adamw"), "match_rms_adamw"):
            options["lr"] = None
        yield Trap(
            "transposed",
            f"{counted(transposed, 'weight')} {'are' if transposed[1:] else 'is'} stored (in, out)",
            names_of(transposed),
            f'adjust_lr="{scale}" scales by sqrt(rows/cols), which is inverted for them; '
            '"match_rms_adamw" does not depend on the order',
            Remedy(options, wording='adjust_lr="match_rms_adamw"'),
        )


def find(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """A learning rate that moves weights too far or hardly at all."""
    lr, scale = subject.options.get("lr", 0.0), subject.options.get("adjust_lr", "match_rms_adamw")
    moved = _relative_update(subject, advice, scale)
    # Advice of another scale includes a rate that fits it.
    if moved is None or _fits(moved, scale) or "adjust_lr" in advice.options:
        return
    other = "match_rms_adamw" if scale in LEAST else "original"
    fits_other = _fits(_relative_update(subject, advice, other), other)
    alternative = f', or adjust_lr="{other}", which this rate suits' if fits_other else ""
    if moved > MOST:
        too = "large"
        most = lr * MOST / moved
        digit = 10.0 ** math.floor(math.log10(most))
        rounded_down = float(f"{digit * math.floor(most / digit):.1g}")
        usual = f"use at most about {number(rounded_down)}"
    else:
        too, usual = "small", f"rates around {number(usual_lr(scale))} are usual"
    yield Trap(
        "lr",
        f"lr={number(lr)} is too {too} for adjust_lr={literal(scale)}",
        (),
        f"a step would move weights by {100 * moved:.2g} % of their size; {usual}{alternative}",
        Remedy({"lr": usual_lr(scale)}),
    )


def rates_to_try(subject: Subject, advice: Remedy) -> str:
    """Where to look for the best rate, as measured on small models by benchmarks/training.py."""
    scale = advice.applied_to(subject.options).get("adjust_lr", "match_rms_adamw")
    muons = advice.muons(subject)
    if scale in LEAST or not muons:
        return ""
    factor = 1 if scale == "match_rms_adamw" else 0.2 / scale
    times = "" if factor == 1 else f", times {factor:.2g} because adjust_lr is {scale}, not 0.2"
    if is_transformer(muons):
        matrices = (
            "4 to 8 times AdamW's tuned rate if AdamW used one rate for everything,\n"
            "2 to 8 times its rate for matrices if it used two (this is a transformer)"
        )
    else:
        matrices = "AdamW's tuned rate and half of it (this is not a transformer)"
    return (
        f"Rates to try: lr, for matrices: {matrices}{times};\n"
        "adamw_lr, for the rest: 1 to 4 times that lr. Without adamw_lr, lr is used for both."
    )


def is_transformer(muons: Iterable[Decision]) -> bool:
    """True if some of Muon's matrices have names of attention."""
    return any(_ATTENTION.search(decision.name) for decision in muons)


def _fits(moved: Optional[float], scale: Union[str, float]) -> bool:
    return moved is None or LEAST.get(str(scale), LEAST_BY_RMS) <= moved <= MOST


def _relative_update(subject: Subject, advice: Remedy, scale: Union[str, float]) -> Optional[float]:
    """Size of an update relative to the weights, averaged over all elements of Muon's matrices.

    lr · scale · RMS(orthogonal) / RMS(weight), with weights as torch's layers initialize them. None
    if there are no matrices or no rate: tensors aren't read, and zero is the start of a schedule.
    """
    lr = subject.options.get("lr")
    if not isinstance(lr, (int, float)) or lr <= 0:
        return None
    moved, elements = 0.0, 0
    for decision in advice.muons(subject):
        try:
            matrices = subject.read(decision)
        except ValueError:  # a separate trap
            continue
        for block in matrices.blocks:
            rows, cols = block.rows, block.cols
            count = math.prod(block.shape)
            if count:
                factor = update_scale(rows, cols, scale)
                moved += count * float(lr) * factor * math.sqrt(3 * cols / max(rows, cols))
                elements += count
    return moved / elements if elements else None
