"""Tells what ``per_head=True`` would part, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...parameters.names import counted
from ...rules.fused import heads_in
from .subject import Subject

_SHAPES = 3  # that are listed


def offer(subject: Subject) -> str:
    """What ``per_head`` does, or would do; empty if the model has no heads to part.

    FLOPs are those of the textbook iteration, in proportion s²·(2l + s) for sides s ≤ l.
    """
    if whole := subject.assignment.whole:
        return (
            f"per_head leaves {counted(whole, 'projection')} whole, {whole[0]} first:\n"
            "neither modules nor their config tell the size of a head."
        )
    split = subject.assignment.split
    if subject.options.get("per_head") or not (split is None or isinstance(split, Mapping)):
        return ""
    projections, costs, counts, shapes = 0, [0, 0], [0, 0], dict[str, None]()
    for decision in subject.by_algorithm("Muon"):
        fused = heads_in(subject.model, subject.info(decision), decision.param)
        if fused is None or fused.by_head is None:
            continue
        projections += 1
        by_head = replace(subject.assignment, split={decision.name: fused.by_head})
        for number, assignment in enumerate((subject.assignment, by_head)):
            matrices = replace(subject, assignment=assignment).read(decision)
            for block in matrices.blocks:
                count, (short, long) = matrices.count(block), sorted((block.rows, block.cols))
                counts[number] += count
                costs[number] += count * (2 * long + short) * short**2
                if number:
                    shapes[f"{block.rows} × {block.cols}"] = None
    if not projections:
        return ""
    listed = ", ".join(list(shapes)[:_SHAPES]) + (", …" if len(shapes) > _SHAPES else "")
    return (
        f"Heads: per_head=True updates {projections} query, key and value projections head by head,"
        f"\n{counts[1]:,} matrices ({listed}) instead of {counts[0]:,}, batched by shape, with "
        f"{costs[1] / max(1, costs[0]):.2g} of the FLOPs of their iterations."
    )
