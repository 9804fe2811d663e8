"""Which weights hold several matrices in one tensor, and in which of their rows.

Names tell that a weight is fused. How its rows lie is told by its class where that is known, else
by convention: Q, K and V one below the other. Sizes come from the model's configuration, from its
modules, or from the shape, and count only if they add up to the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Union

from torch import nn

from ...parameters.default_groups import Decision
from .evidence import HEAD_DIM, HEADS, KEY_HEADS, Place, Subject, class_names, is_transposed, read

# Queries, keys and values.
_QKV = {
    "qkv",
    "qkv_proj",
    "qkv_linear",
    "to_qkv",
    "in_proj_qkv",
    "c_attn",
    "wqkv",
    "Wqkv",
    "query_key_value",
    "linear_qkv",
}
# Of these, those whose rows lie head by head wherever they are found.
_BY_HEAD = {"query_key_value", "linear_qkv"}
# Classes whose rows do so, whatever the weight is called.
_BY_HEAD_CLASSES = ("MiniMax", "CodeGen", "InternLM2")
_KEYS_AND_VALUES = {"to_kv"}
# Gate and up projection of a gated feed-forward; the last one only where the config agrees.
_GATED = {"gate_up_proj", "gate_and_up_proj", "gate_up", "w13", "w1_w3", "w12"}
_GATED_BY_CONFIG = {"Wi"}
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size")
_GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}


@dataclass(frozen=True)
class Fused:
    """A weight that holds several matrices.

    Args:
        holds: what, in words.
        counts: what ``split`` says of it; None where its sizes can't be told.
        by_head: whether rows lie head by head, so that no block of rows is a whole projection.
        in_columns: whether the matrices lie side by side, where ``split`` can't part them.
    """

    holds: str
    counts: Union[int, Sequence[int], None] = None
    by_head: bool = False
    in_columns: bool = False


def fused_in(decision: Decision, subject: Subject) -> Optional[Fused]:
    """What a weight of Muon's holds, if it holds several matrices."""
    place, shape = subject.place(decision), decision.param.shape
    module, attribute = place.owner, place.attribute
    if isinstance(module, nn.MultiheadAttention) and attribute == "in_proj_weight":
        return Fused("Q, K and V", [shape[0] // 3] * 3)
    for name in class_names(module):
        if name in _GATES and attribute.startswith(("weight_ih", "weight_hh")):
            return Fused(f"{_GATES[name]} gates", shape[0] // _GATES[name])
    called = _called(place)
    if called in _GATED | _GATED_BY_CONFIG:
        return _gated(decision, place, subject, called)
    if called in _QKV | _KEYS_AND_VALUES and len(shape) == 2:
        parts = 2 if called in _KEYS_AND_VALUES else 3
        holds = "Q, K and V" if parts == 3 else "K and V"
        if is_transposed(place):
            return Fused(holds, in_columns=True)
        if parts == 2:
            return Fused(holds, [shape[0] // 2] * 2 if shape[0] % 2 == 0 else None)
        if called in _BY_HEAD or _is_by_head(place):
            return Fused(holds, _head_rows(decision, place, subject), by_head=True)
        return Fused(holds, _qkv_rows(decision, place, subject))
    return None


def _called(place: Place) -> str:
    """``qkv`` of both ``attention.qkv.weight`` and ``attention.qkv``."""
    parts = [part for part in place.name.split(".") if not part.isdigit()]
    if place.attribute != "weight":
        return place.attribute.removesuffix("_weight")
    return parts[-2] if len(parts) > 1 else ""


def _is_by_head(place: Place) -> bool:
    for module in place.above[:1]:
        names = " ".join(class_names(module))
        if any(name in names for name in _BY_HEAD_CLASSES):
            return True
        if "GPTBigCode" in names:
            return not read(module, "multi_query")
    return False


def _head_rows(decision: Decision, place: Place, subject: Subject) -> Optional[int]:
    """Rows of one head, of queries, keys or values alike."""
    rows, cols = decision.param.shape
    heads, size = subject.look_up(place, HEADS), subject.look_up(place, HEAD_DIM)
    if size is None and heads is not None and cols % heads == 0:
        size = cols // heads
    return size if size is not None and rows % size == 0 and rows // size >= 3 else None


def _qkv_rows(decision: Decision, place: Place, subject: Subject) -> Optional[list[int]]:
    rows, cols = decision.param.shape
    heads, size = subject.look_up(place, HEADS), subject.look_up(place, HEAD_DIM)
    key_heads = subject.look_up(place, KEY_HEADS)
    if place.above and read(place.above[0], "multi_query"):
        key_heads = 1
    if heads is not None:
        known = size or (cols // heads if cols % heads == 0 else None)
        for count in filter(None, (key_heads, heads)):
            if known and (heads + 2 * count) * known == rows:
                return [heads * known, count * known, count * known]
    # Where the key heads can't be told, rows that happen to divide by three tell nothing.
    if rows == 3 * cols or (heads and key_heads == heads and rows % (3 * heads) == 0):
        return [rows // 3] * 3
    return None


def _gated(decision: Decision, place: Place, subject: Subject, called: str) -> Optional[Fused]:
    shape, holds = tuple(decision.param.shape), "gate and up projection"
    if is_transposed(place) or (len(shape) > 2 and _beside(decision, place, in_columns=True)):
        return Fused(holds, in_columns=True)
    rows = shape[-2]
    if called in _GATED_BY_CONFIG and rows != 2 * (subject.look_up(place, _INTERMEDIATE) or 0):
        return None
    if rows % 2 or (len(shape) > 2 and not _beside(decision, place, in_columns=False)):
        return Fused(holds)
    return Fused(holds, [rows // 2] * 2)


def _beside(decision: Decision, place: Place, in_columns: bool) -> bool:
    """Whether the experts' other projection says that halves lie in columns, or in rows.

    (E, 2·inner, dim) beside (E, dim, inner), or (E, dim, 2·inner) beside (E, inner, dim).
    """
    *experts, rows, cols = decision.param.shape
    half = [*experts, cols // 2, rows] if in_columns else [*experts, cols, rows // 2]
    others = (param for param in place.owner._parameters.values() if param is not None)
    return any(param is not decision.param and list(param.shape) == half for param in others)


def is_stored_transposed(decision: Decision, subject: Subject) -> bool:
    """Whether a weight is (in, out), as far as modules tell: Conv1D, transposed convolutions, and
    experts whose halves lie in columns, with what is beside them."""
    place = subject.place(decision)
    if is_transposed(place) or isinstance(place.layer, nn.modules.conv._ConvTransposeNd):
        return True
    if decision.param.ndim < 3:
        return False
    return any(
        _beside(Decision(place.name, param, "", ""), place, in_columns=True)
        for name, param in place.owner._parameters.items()
        if param is not None and param.ndim > 2 and name.removesuffix("_weight") in _GATED
    )
