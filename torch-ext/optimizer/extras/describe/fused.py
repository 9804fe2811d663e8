"""Finds weights that hold several matrices in one tensor, such as QKV, and the rows of each.

Names tell that a weight is fused. How its rows lie is told by its class where that is known, else
by convention: Q, K and V one below the other. Sizes come from the model's configuration, from its
modules, or from the shape, and count only if they add up to the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional, Union

from torch import nn

from ...parameters.default_groups import Decision
from ...parameters.modules import ParamInfo, class_names, read, size_in
from ...parameters.names import matches
from .remedy import Remedy, Trap
from .subject import Subject, names_of
from .table import collect_by, counted

# What configurations and modules call their numbers of attention heads, and the size of one.
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nheads")
KEY_HEADS = ["num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_heads"]
KEY_HEADS += ["n_query_groups", "num_query_groups"]
HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "d_head", "kv_channels")
# Weights whose rows lie head by head in any module, and classes whose rows do so, whatever the
# weight is called.
_BY_HEAD = {"query_key_value", "linear_qkv"}
_BY_HEAD_CLASSES = ("MiniMax", "CodeGen", "InternLM2")
# Queries, keys and values.
_QKV = {"qkv", "qkv_proj", "qkv_linear", "to_qkv", "in_proj_qkv", "c_attn", "wqkv", "Wqkv"}
_QKV |= _BY_HEAD
_KEYS_AND_VALUES = {"to_kv"}
# Gate and up projection of a gated feed-forward; the last one only where the config agrees.
_GATED = {"gate_up_proj", "gate_and_up_proj", "gate_up", "w13", "w1_w3", "w12"}
_GATED_BY_CONFIG = {"Wi"}
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size")
# State-space layers: what configurations and modules call the inner width, groups, state, heads.
_SSM_SIZES = (
    ("intermediate_size", "mamba_intermediate", "d_inner"),
    ("n_groups", "mamba_n_groups", "mamba_ngroups", "ngroups"),
    ("state_size", "ssm_state_size", "mamba_d_state", "d_state"),
    ("num_heads", "mamba_n_heads", "n_mamba_heads", "nheads"),
)
_GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}


@dataclass(frozen=True)
class Fused:
    """How a weight holds several matrices.

    Args:
        holds: what the matrices are, in words.
        counts: what ``split`` says of it; None where its sizes can't be told.
        by_head: whether rows lie head by head, so that no block of rows is a whole projection.
        in_columns: whether the matrices lie side by side, where ``split`` can't part them.
    """

    holds: str
    counts: Union[int, Sequence[int], None] = None
    by_head: bool = False
    in_columns: bool = False


def find(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Weights that hold several matrices, one below the other, and no split that says so."""
    split = advice.applied_to(subject.options).get("split") or {}
    if not isinstance(split, Mapping):
        return
    muons = advice.muons(subject)
    weights = [
        (decision.name, fused)
        for decision in muons
        if not any(matches(decision.name, pattern) for pattern in split)
        if (fused := fused_in(decision, subject)) is not None and not fused.in_columns
    ]
    alike = collect_by(weights, lambda weight: (weight[1].holds, repr(weight[1].counts)))
    for (name, fused), *more in alike.values():
        names = (name, *(other for other, _ in more))
        why = "as one matrix they share singular values and scale; split takes each for itself"
        if fused.by_head:
            why = (
                "rows interleave, head by head, so that no block of rows is all of Q: a split by "
                "heads takes the queries, the keys and the values of each head for themselves"
            )
        if fused.counts is not None:
            counts = dict.fromkeys(names, fused.counts)
            remedy = Remedy(split=counts, matrices=names_of(muons))
        else:
            size = "head_dim" if fused.by_head else "[rows of the first, of the second, …]"
            named = [c for c in name.split(".") if not c.isdigit() and c != "weight"]
            write = f'split={{"{named[-1] if named else name}": {size}}}'
            hint = "how many rows each has is in the model's config, or its forward()"
            why = f"{why}; {hint}"
            comments = (f"# {write} below parts {fused.holds}:", f"# {hint}.")
            remedy = Remedy(comments=comments, wording=write)
        what = f"{counted(names, 'weight')} {'hold' if more else 'holds'} {fused.holds}"
        yield Trap("fused", f"{what} in one tensor", names, why, remedy)


def find_columns(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Weights whose matrices lie side by side, which nothing can be done about."""
    fused = [(d.name, fused_in(d, subject)) for d in advice.muons(subject)]
    columns = [(name, weight.holds) for name, weight in fused if weight and weight.in_columns]
    for holds, weights in collect_by(columns, lambda column: column[1]).items():
        yield Trap(
            "columns",
            f"{counted(weights, 'weight')} stored (in, out): columns hold {holds}",
            tuple(name for name, _ in weights),
            "each is orthogonalized as one matrix: split parts rows only",
        )


def fused_in(decision: Decision, subject: Subject) -> Optional[Fused]:
    """What a weight of Muon's holds, if it holds several matrices."""
    info, shape = subject.info(decision), decision.param.shape
    if isinstance(info.module, nn.MultiheadAttention) and info.attribute == "in_proj_weight":
        return Fused("Q, K and V", [shape[0] // 3] * 3)
    for name in class_names(info.module):
        if name in _GATES and info.attribute.startswith(("weight_ih", "weight_hh")):
            return Fused(f"{_GATES[name]} gates", shape[0] // _GATES[name])
    weight = _weight_name(info)
    if weight == "in_proj" and len(shape) == 2:
        return _state_space(decision, info)
    if weight == "kv_a_proj_with_mqa":
        sizes = [subject.look_up(decision, [key]) for key in ("kv_lora_rank", "qk_rope_head_dim")]
        known = [size for size in sizes if size is not None]
        is_sum = len(known) == 2 and sum(known) == shape[0]
        return Fused("latent and rotary keys", known if is_sum else None)
    above = " ".join(class_names(info.above[0])) if info.above else ""
    if weight.startswith("adaLN_mod") or (weight == "linear" and "AdaLayerNorm" in above):
        count, rest = divmod(shape[0], shape[-1])
        return Fused("modulations", shape[-1]) if count > 1 and not rest else None
    if weight in _GATED | _GATED_BY_CONFIG:
        return _gated(decision, subject, weight)
    if weight not in _QKV | _KEYS_AND_VALUES or len(shape) != 2:
        return None
    holds = "K and V" if weight in _KEYS_AND_VALUES else "Q, K and V"
    if info.is_conv1d:
        return Fused(holds, in_columns=True)
    if weight in _KEYS_AND_VALUES:
        return Fused(holds, [shape[0] // 2] * 2 if shape[0] % 2 == 0 else None)
    if weight in _BY_HEAD or _is_by_head(info):
        return Fused(holds, _head_rows(decision, subject), by_head=True)
    return Fused(holds, _qkv_rows(decision, subject))


def _state_space(decision: Decision, info: ParamInfo) -> Optional[Fused]:
    """Mamba's input and gate; with B, C and the steps of all heads, Mamba-2's."""
    rows, module = decision.param.shape[0], info.above[0] if info.above else info.module
    inner, groups, state, heads = (size_in(module, keys) for keys in _SSM_SIZES)
    if inner is not None and rows == 2 * inner:
        return Fused("input and gate", [inner, inner])
    if None not in (inner, groups, state, heads):
        counts = [inner, inner, groups * state, groups * state, heads]  # type: ignore[operator]
        if sum(counts) == rows:  # type: ignore[arg-type]
            return Fused("gate, input, B, C and steps", counts)  # type: ignore[arg-type]
    return None


def _weight_name(info: ParamInfo) -> str:
    """``qkv`` of both ``attention.qkv.weight`` and ``attention.qkv``."""
    if info.attribute != "weight":
        return info.attribute.removesuffix("_weight")
    components = [c for c in info.name.split(".") if not c.isdigit()]
    return components[-2] if len(components) > 1 else ""


def _is_by_head(info: ParamInfo) -> bool:
    names = " ".join(class_names(info.above[0])) if info.above else ""
    if any(name in names for name in _BY_HEAD_CLASSES):
        return True
    return "GPTBigCode" in names and not read(info.above[0], "multi_query")


def _head_rows(decision: Decision, subject: Subject) -> Optional[int]:
    """Rows of one head, of queries, keys or values alike."""
    rows, cols = decision.param.shape
    heads, size = subject.look_up(decision, HEADS), subject.look_up(decision, HEAD_DIM)
    if size is None and heads is not None and cols % heads == 0:
        size = cols // heads
    return size if size is not None and rows % size == 0 and rows // size >= 3 else None


def _qkv_rows(decision: Decision, subject: Subject) -> Optional[list[int]]:
    rows, cols = decision.param.shape
    heads, size = subject.look_up(decision, HEADS), subject.look_up(decision, HEAD_DIM)
    key_heads = subject.look_up(decision, KEY_HEADS)
    if any(read(module, "multi_query") for module in subject.info(decision).above[:1]):
        key_heads = 1
    if heads is not None:
        size = size or (cols // heads if cols % heads == 0 else None)
        for count in filter(None, (key_heads, heads)):
            if size and (heads + 2 * count) * size == rows:
                return [heads * size, count * size, count * size]
    # Where the key heads can't be told, rows that happen to divide by three tell nothing.
    if rows == 3 * cols or (heads and key_heads == heads and rows % (3 * heads) == 0):
        return [rows // 3] * 3
    return None


def _gated(decision: Decision, subject: Subject, weight: str) -> Optional[Fused]:
    info, shape = subject.info(decision), tuple(decision.param.shape)
    holds, is_stack = "gate and up projection", len(shape) > 2
    if info.is_conv1d or (is_stack and _is_halved(shape, info, in_columns=True)):
        return Fused(holds, in_columns=True)
    rows = shape[-2]
    if weight in _GATED_BY_CONFIG and rows != 2 * (subject.look_up(decision, _INTERMEDIATE) or 0):
        return None
    if rows % 2 or (is_stack and not _is_halved(shape, info, in_columns=False)):
        return Fused(holds)
    return Fused(holds, [rows // 2] * 2)


def _is_halved(shape: Sequence[int], info: ParamInfo, in_columns: bool) -> bool:
    """Whether the experts' other projection says that halves lie in columns, or in rows.

    (E, 2·inner, dim) beside (E, dim, inner), or (E, dim, 2·inner) beside (E, inner, dim).
    """
    *experts, rows, cols = shape
    half = [*experts, cols // 2, rows] if in_columns else [*experts, cols, rows // 2]
    others = (param for param in info.module._parameters.values() if param is not None)
    return any(list(param.shape) == half for param in others)


def is_stored_transposed(decision: Decision, subject: Subject) -> bool:
    """Whether a weight is (in, out), as far as modules tell: Conv1D, transposed convolutions, and
    experts whose halves lie in columns, with what is beside them."""
    info = subject.info(decision)
    if info.is_conv1d or isinstance(info.layer, nn.modules.conv._ConvTransposeNd):
        return True
    return decision.param.ndim > 2 and any(
        _is_halved(param.shape, info, in_columns=True)
        for name, param in info.module._parameters.items()
        if param is not None and param.ndim > 2 and name.removesuffix("_weight") in _GATED
    )
