"""Shows what ``per_head=True`` would split, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...parameters.names import counted
from ...rules.assignment import AUTO
from ...rules.fused import heads_in
from .subject import Subject

_SHAPES = 3  # listed at most


def offer(subject: Subject) -> str:
    """What ``per_head`` does or would do, as text; empty if the model has no heads to split.

    FLOPs are those of the standard iteration, proportional to s²·(2l + s) for sides s ≤ l.
    """
    if whole := subject.assignment.whole:
        return (
            f"Heads: no known head size fits {counted(whole, 'projection')}, first {whole[0]}:\n"
            "per_head leaves them as they are. Set head_dim on the attention module, or use split."
        )
    given = subject.options.get("split")
    if not (given == AUTO or isinstance(given, Mapping)):
        return ""
    projections, costs, counts, shapes = 0, [0, 0], [0, 0], dict[str, None]()
    for decision in subject.by_algorithm("Muon"):
        fused = heads_in(subject.model, subject.info(decision), decision.param)
        if fused is None or fused.by_head is None or decision.reason.endswith("as given"):
            continue
        projections += 1
        for number, how in enumerate((fused.split, fused.by_head)):
            split = {decision.name: how}
            matrices = replace(subject, assignment=replace(subject.assignment, split=split)).read(
                decision
            )
            for block in matrices.blocks:
                count, (short, long) = matrices.count(block), sorted((block.rows, block.cols))
                counts[number] += count
                costs[number] += count * (2 * long + short) * short**2
                if number:
                    shapes[f"{block.rows} × {block.cols}"] = None
    if not projections:
        return ""
    listed = ", ".join(list(shapes)[:_SHAPES]) + (", …" if len(shapes) > _SHAPES else "")
    verb = "updates" if subject.options.get("per_head") else "would update"
    return (
        f"Heads: per_head=True {verb} {projections} query, key and value projections head by "
        f"head,\nas {counts[1]:,} matrices ({listed}) instead of {counts[0]:,}, batched by shape. "
        f"Their iterations take {costs[1] / max(1, costs[0]):.2g} times the FLOPs."
    )
