"""Embeddings and output heads that no name reveals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Optional

from torch import nn

from ...parameters.default_groups import Decision
from .code import Advice, literal
from .evidence import Subject, is_transposed, vocabularies
from .trap import Trap

# What the last layer of a model is called where it makes predictions.
_SAYS_HEAD = {"head", "heads", "logit", "logits", "classifier", "final", "score"}
_SAYS_HEAD |= {"pred", "prediction", "predictions", "predictor"}
_FEW = 16  # outputs: fewer are no hidden layer's
_LARGE = 1000  # a vocabulary that no hidden size is mistaken for, if it is 8 × the embedding's


def find(subject: Subject, advice: Advice) -> Iterator[Trap]:
    """Matrices of Muon's with a vocabulary for a side, and a last layer of few outputs."""
    sizes = vocabularies(subject)
    muons = advice.muons(subject)
    last = _last_linear(subject, muons)
    found: dict[str, list[str]] = {}
    for decision in muons:
        reason = _vocabulary(decision, subject, sizes)
        if reason is None and decision is last and _is_head(decision, subject, muons):
            reason = f"is the model's last layer ({tuple(decision.param.shape)})"
        if reason is not None:
            found.setdefault(reason, []).append(decision.name)
    for reason, names in found.items():
        advice.leave += names
        yield Trap(
            "head",
            f"{names[0]} {reason}" if len(names) == 1 else f"{len(names)} matrices: each {reason}",
            tuple(names),
            "embeddings and output heads train better with AdamW; their names do not tell",
            "is_muon_func: "
            + " and ".join(f"name != {literal(name)}" for name in names[:2])
            + (" and …" if len(names) > 2 else ""),
        )


def _vocabulary(decision: Decision, subject: Subject, sizes: dict[int, str]) -> Optional[str]:
    shape = decision.param.shape
    size = next((side for side in shape if side in sizes), None) if len(shape) == 2 else None
    if size is None:
        return None
    other = shape[1] if shape[0] == size else shape[0]
    is_large = size >= _LARGE and size > 8 * other
    # Within layers a hidden size may happen to be that of a small vocabulary.
    if is_large or not (_is_in_a_layer(decision, subject) or _is_hidden(decision, size, subject)):
        return f"has a side of {size}, as {sizes[size]}"
    return None


def _is_hidden(decision: Decision, size: int, subject: Subject) -> bool:
    """Whether a side of a matrix is a hidden size: an earlier one gives what a later one takes."""
    sides = [_sides(d, subject) for d in subject.decisions if d.param.ndim == 2]
    given = [i for i, (_, outputs, _) in enumerate(sides) if outputs == size]
    taken = [i for i, (inputs, _, _) in enumerate(sides) if inputs == size]
    own = next(i for i, (_, _, d) in enumerate(sides) if d is decision)
    if own in given:
        return any(own < other for other in taken)
    return any(other < own for other in given)


def _sides(decision: Decision, subject: Subject) -> tuple[int, int, Decision]:
    """Inputs and outputs of a linear layer, embeddings being none."""
    rows, cols = decision.param.shape
    place = subject.place(decision)
    if isinstance(place.owner, (nn.Embedding, nn.EmbeddingBag)):
        return -1, -1, decision
    return (rows, cols, decision) if is_transposed(place) else (cols, rows, decision)


def _is_in_a_layer(decision: Decision, subject: Subject) -> bool:
    """Whether it is one of a list of layers, or within one.

    The layers of an ``nn.Sequential`` that makes up the model are no list of layers.
    """
    place = subject.place(decision)
    above = place.above
    parts = place.name.split(".")
    if not any(part.isdigit() for part in parts):
        return False
    is_direct = len(above) > 0 and type(above[0]) is nn.Sequential
    return not (is_direct and sum(part.isdigit() for part in parts) == 1)


def _last_linear(subject: Subject, muons: Sequence[Decision]) -> Optional[Decision]:
    """Of the weight of the model's last layer that is linear, tied to another one or not."""
    linear = [module for module in subject.model.modules() if isinstance(module, nn.Linear)]
    weight = linear[-1]._parameters.get("weight") if linear else None  # not of a parametrization
    if weight is None or len(muons) < 2:  # where it is all there is, Muon would have nothing left
        return None
    return next((decision for decision in muons if decision.param is weight), None)


def _is_head(decision: Decision, subject: Subject, muons: Sequence[Decision]) -> bool:
    if _is_in_a_layer(decision, subject):
        return False
    parts = subject.place(decision).name.split(".")[:-1]
    rows, cols = decision.param.shape
    if len(parts) == 1 and re.fullmatch(r"fc\d*", parts[0]):
        return True
    words = {word for part in parts[-2:] for word in part.lower().split("_")}
    if words & _SAYS_HEAD and rows != cols:
        return True
    # The size of a residual stream is a side of other matrices, too.
    others = (d.param.shape for d in muons if d is not decision and d.param.ndim > 1)
    sides = {side for shape in others for side in shape}
    return rows not in sides and rows < cols and (rows <= _FEW or rows * 4 < cols)
