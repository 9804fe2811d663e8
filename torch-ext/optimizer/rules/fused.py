"""Finds weights that hold several matrices in one tensor, such as QKV, and where each one is.

A weight's name shows that it is fused. The order of its rows follows from the class, or else from
convention: Q, K, and V one below the other. Sizes come from the config, the modules, or the shape,
and count only if they add up to the rows. `attention` finds the heads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional, Union

from torch import Tensor, nn

from ..parameters.names import matches
from .attention import (
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    QUERY_DIM,
    VALUES_ALONE,
    SizeOf,
    attention_of,
    heads_of,
    is_wrapped,
    own_size,
    projection_head,
)
from .modules import (
    PAIR,
    ParamInfo,
    class_names,
    component_of,
    look_up,
    owning_components,
    read,
    size_in,
)

# Weights whose rows are ordered by key head in any module, and classes in which all weights are.
_BY_HEAD = {"query_key_value", "linear_qkv"}
_BY_HEAD_CLASSES = ("MiniMax", "InternLM2")
_CODEGEN_SHARDS = 4  # CodeGen's rows come from this many devices, each with Q, V, and K
# Queries, keys, and values.
_QKV = {"qkv", "qkv_proj", "qkv_linear", "to_qkv", "in_proj_qkv", "c_attn", "wqkv", "Wqkv"}
_QKV |= _BY_HEAD
_HOLDS = "Q, K and V"
# Gate and up projection of a gated feed-forward; the second set only if the config agrees.
_GATED = {"gate_up_proj", "gate_and_up_proj", "gate_up", "w13", "w1_w3", "w12"}
_GATED_BY_CONFIG = {"Wi", "input_linear"}
_GATE_BESIDE_UP = "GptOss"  # classes in which rows, or columns, of gate and up alternate
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size")
# Weights that hold parts one below the other. Columns: names of the weights; parts of class names
# (*: any; ?: any, if sizes fit); how often the parts repeat (-: once; HEADS: once per head; n,
# head: any number of times; [n]: each time is a matrix); what they hold; the rows of each part, as
# names in modules or configs, or the number of equal parts.
_LAYOUTS = tuple(
    tuple(map(str.strip, line.split("|")))
    for line in """
    q_proj | ? | HEADS | Q and gate | q=HEAD_DIM gate=HEAD_DIM
    q_gate_proj | * | head | Q and gate | q=qk_head_dim gate=v_head_dim
    qkv | ? | HEADS | Q, K and V | q=key_dim k=key_dim v=val_dim
    kv_b_proj wkv_b | * | head | K and V | k=qk_nope_head_dim v=v_head_dim
    kv_a_proj_with_mqa wkv_a | * | - | latent and rotary keys | c=kv_lora_rank rope=qk_rope_head_dim
    index_qk_proj | * | - | Q and K | q=index_n_heads*index_head_dim k=index_kv_heads*index_head_dim
    in_proj_qkv | * | - | Q, K and V | q=KEYS*KEY k=KEYS*KEY v=VALUES*VALUE
    in_proj_qkvz | * | head | Q, K, V, gate | q=KEY k=KEY v=VALUES/KEYS*VALUE z=VALUES/KEYS*VALUE
    in_proj_ba | * | head | steps and decays | b=VALUES/KEYS a=VALUES/KEYS
    qkv_opreact | xLSTM | - | Q, K, V, gate | q=HEADS*QK/HEADS k=HEADS*QK/HEADS v=HEADS*V/HEADS o=V
    ifgate_preact proj_up_gate_z | xLSTM | - | two projections | 2
    in_proj | ShortConv | - | B, C and input | 3
    in_proj | ZambaMambaMixer | n | input and gate, in turn, | input=1 gate=1
    in_proj | ? | - | input and gate | input=INNER gate=INNER
    in_proj | ? | - | gate, input, B, C and steps | z=INNER x=INNER B=N*STATE C=N*STATE steps=STEPS
    x_proj | MambaMixer | - | steps, B and C | steps=time_step_rank B=STATE C=STATE
    kv_proj | CSACompressor DeepseekV4Indexer | - | keys of two windows | 2
    gate_proj | CSACompressor DeepseekV4Indexer | - | gates of two windows | 2
    fc1 | MoshiGatingMLP | - | gate and up projection | 2
    linear_start | LightConv1d | - | values and gates | 2
    w1 v1 w2 | DbrxExpert | [n] | experts | expert=ffn_hidden_size
    per_layer_model_projection | * | [n] | one for each layer | layer=hidden_size_per_layer_input
    """.strip().splitlines()
)
# Sizes with several names, or with long ones.
_SIZES = {
    "HEADS": HEADS,
    "HEAD_DIM": QUERY_DIM,
    "KEYS": ["linear_num_key_heads"],
    "VALUES": ["linear_num_value_heads"],
    "KEY": ["linear_key_head_dim"],
    "VALUE": ["linear_value_head_dim"],
    "QK": ["qk_dim"],
    "V": ["v_dim"],
    "INNER": ["intermediate_size", "mamba_intermediate", "d_inner"],
    "N": ["n_groups", "mamba_n_groups", "mamba_ngroups", "ngroups"],
    "STATE": ["state_size", "ssm_state_size", "mamba_d_state", "d_state"],
    "STEPS": ["num_heads", "mamba_n_heads", "n_mamba_heads", "nheads"],
}
_GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}


Split = Union[int, Sequence[int], str, None]


@dataclass(frozen=True)
class Fused:
    """How a weight holds several matrices.

    Args:
        holds: what the matrices are, in words.
        split: the ``split`` for the matrices; None if their sizes are unknown.
        hint: a template for ``split`` if sizes are unknown.
        has_heads: True if the matrices consist of attention heads.
        by_head: the ``split`` for the heads; None if their sizes are unknown.
    """

    holds: str
    split: Split = None
    hint: str = "[rows of the first, of the second, …]"
    has_heads: bool = False
    by_head: Split = None

    def argument(self, name: str) -> str:
        """Returns the argument of `Muon.for_model`, to fill in, that would split a weight."""
        return f'split={{"{component_of(name)}": {self.hint}}}'


def split_patterns(split: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """Turns a ``split`` by names into one by few patterns, which match none of the other names."""
    others, by_pattern = set(others), dict[str, Any]()
    by_value: dict[str, list[str]] = {}
    for name, value in split.items():
        by_value.setdefault(repr(value), []).append(name)
    for names in by_value.values():
        rest = others.union(split).difference(names)
        by_pattern.update(dict.fromkeys(_patterns(names, rest), split[names[0]]))
    return by_pattern


def _patterns(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """Returns a few patterns that match all names and none of the others, or else the names."""
    paths = [[c for c in n.split(".") if not (c.isdigit() or c in _VAGUE)] for n in names]
    layers = [path[-1] for name, path in zip(names, paths) if path and name.endswith(".weight")]
    projections = list(dict.fromkeys(layers))
    components = [[component] for component in reversed(paths[0])]
    by_form: dict[tuple[str, ...], list[list[str]]] = {}  # names that differ only in indices
    for split in (name.split(".") for name in names):
        by_form.setdefault(tuple("*" if c.isdigit() else c for c in split), []).append(split)
    globs = [
        ".".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*together))
        for together in by_form.values()
    ]
    letters = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*names))
    start = "".join(column[0] for column in letters)
    for patterns in (projections, *components, globs, [f"{start}*"]):
        match_all = all(any(matches(name, p) for p in patterns) for name in names)
        match_others = any(matches(name, p) for p in patterns for name in others)
        is_short = patterns is projections or len(patterns) <= (len(names) + 1) // 2
        if match_all and not match_others and is_short:
            return patterns
    return list(names)


# Components that say little about what a weight holds.
_VAGUE = {"weight", "attn", "attention", "mlp", "parametrizations", "original0", "original1"}


class Part(NamedTuple):
    """Consecutive rows of a weight, with their number of heads, or None if it is unknown."""

    name: str
    rows: int
    heads: Optional[int] = 1


def _fused(holds: str, parts: Sequence[Part], loop: str = "") -> Fused:
    """Returns a weight with parts one below the other, repeated as ``loop`` says."""
    split: Split = [part.rows for part in parts]
    if loop:
        split = f"({loop} ({' + '.join(f'{part.name}={part.rows}' for part in parts)})) dim"
    has_heads = any(part.name in ("q", "k", "v") for part in parts)
    if not has_heads or any(part.heads is None or part.rows % part.heads for part in parts):
        return Fused(holds, split, has_heads=has_heads)
    sizes = [(part.name, part.heads or 1, part.rows // (part.heads or 1)) for part in parts]
    by_head: Split = sizes[0][-1]
    if any(size != by_head for *_, size in sizes):
        terms = [f"[{name}={n}] {size}" if n > 1 else f"{name}={size}" for name, n, size in sizes]
        rows = f"({' + '.join(terms)})"
        by_head = f"([{loop}] {rows}) dim" if loop else f"{rows} dim"
    return Fused(holds, split, has_heads=True, by_head=by_head)


def heads_in(model: nn.Module, info: ParamInfo, param: Tensor) -> Optional[Fused]:
    """Returns what a weight holds, if several matrices or heads; ``split`` is for matrices only."""
    fused = fused_in(model, info, param)
    if fused is not None or param.ndim < 2 or 0 in param.shape:
        return fused
    rows = param.shape[1 if info.is_conv1d else -2 if param.ndim == 3 else 0]
    of_one_head = projection_head(model, info, _weight_name(info), rows, param.ndim)
    if of_one_head is None or of_one_head == rows:
        return None
    by_head: Split = f"dim ([head] {of_one_head})" if info.is_conv1d else of_one_head
    return Fused("heads", has_heads=True, by_head=by_head if of_one_head else None)


def fused_in(model: nn.Module, info: ParamInfo, param: Tensor) -> Optional[Fused]:
    """Returns what a weight of a model holds, if it holds several matrices."""
    shape, size_of = tuple(param.shape), functools.partial(look_up, model, info)
    if len(shape) < 2 or 0 in shape:
        return None
    if isinstance(info.layer, nn.MultiheadAttention) and _weight_name(info) == "in_proj":
        parts = [Part(name, shape[0] // 3, info.layer.num_heads) for name in "qkv"]
        return _fused(_HOLDS, parts)
    for name in class_names(info.module):
        if name in _GATES and info.attribute.startswith(("weight_ih", "weight_hh")):
            return Fused(f"{_GATES[name]} gates", shape[0] // _GATES[name])
    if isinstance(info.layer, nn.modules.conv._ConvNd):
        groups = info.layer.groups
        holds = f"{groups} groups of a convolution"
        return Fused(holds, shape[0] // groups) if groups > 1 else None
    if isinstance(info.layer, nn.Linear) and info.attribute == "weight":
        groups = size_in(info.layer, ["n_groups", "groups"]) or 1
        if groups > 1 and shape[0] % groups == 0:
            return Fused(f"{groups} groups of a linear layer", shape[0] // groups)
    weight, above = _weight_name(info), _classes(attention_of(info))
    if len(shape) == 2:
        is_listed, fused = _listed(shape[0], info, size_of, weight, above)
        if is_listed:
            return fused
    if weight.startswith("adaLN_mod") or (weight == "linear" and "AdaLayerNorm" in above):
        norm = read(info.above[0], "norm") if info.above else None
        (width,) = (read(norm, "normalized_shape") or shape)[-1:]  # of the modulated activations
        count, rest = divmod(shape[0], width)
        return Fused("modulations", width) if count > 1 and not rest else None
    if weight in _GATED | _GATED_BY_CONFIG:
        return _gated(shape, info, size_of, weight)
    is_both = weight == "to_kv" or (weight == "kv_proj" and "JetMoe" in above)
    if len(shape) != 2 or not (is_both or weight in _QKV):
        return None
    rows, cols = reversed(shape) if info.is_conv1d else shape
    if is_both:
        halves = [Part(name, rows // 2, heads_of(info, rows // 2)) for name in "kv"]
        is_even = rows % (2 * (size_in(attention_of(info), HEAD_DIM) or 1)) == 0
        fused = _fused("K and V", halves) if is_even else Fused("K and V")
        return _oriented(fused, "k v", info)
    return _oriented(_qkv(info, size_of, weight, rows, cols, above), "q k v", info)


def _oriented(fused: Fused, names: str, info: ParamInfo) -> Fused:
    """Returns the weight, with its matrices side by side if it is a (transposed) Conv1D's."""
    if not info.is_conv1d:
        return fused
    sizes = fused.split if isinstance(fused.split, list) else ["…"] * len(names.split())
    hint = " + ".join(f"{name}={size}" for name, size in zip(names.split(), sizes))
    by_head = fused.by_head
    if by_head is not None:
        rows = f"[head] {by_head}" if isinstance(by_head, int) else str(by_head)[: -len(" dim")]
        by_head = f"dim ({rows})"
    return replace(
        fused,
        holds=f"{fused.holds}, side by side,",
        split=f"dim ({hint})" if fused.split else None,
        hint=f'"dim ({hint})"',
        by_head=by_head,
    )


def _listed(
    rows: int, info: ParamInfo, size_of: SizeOf, weight: str, classes: str
) -> tuple[bool, Optional[Fused]]:
    """Returns True if `_LAYOUTS` lists the weight with this many rows, and what it holds."""
    # Modules come first: their sizes may differ from the config's. Sizes per rank don't fit.
    own = functools.partial(size_in, attention_of(info))
    finders: tuple[SizeOf, ...] = (lambda keys: own(keys) or size_of(keys), size_of)
    found: tuple[bool, Optional[Fused]] = False, None
    for names, owners, loop, holds, layout in _LAYOUTS:
        is_owned = owners in "*?" or any(owner in classes for owner in owners.split())
        if weight not in names.split() or not is_owned:
            continue
        if layout.isdigit():
            count, rest = int(layout), rows % int(layout)
            return True, Fused(holds, None if rest else [rows // count] * count)
        is_any_known = False
        for find in finders[:1] if owners == "?" else finders:
            parts = [_part(term, find) for term in layout.split()]
            is_any_known |= any(part.rows for part in parts)
            total = sum(part.rows for part in parts)
            if not all(part.rows for part in parts) or rows % total:
                if loop == "-" and rows == parts[0].rows:
                    return True, None  # latent attention without rotary keys
            elif loop == "[n]":
                return True, Fused(holds, total)
            elif loop in ("n", "head"):
                return True, _fused(holds, parts, loop)
            elif rows == (1 if loop == "-" else _size(loop, find)) * total:
                return True, _fused(holds, parts, "" if loop == "-" else "head")
        if owners != "?" and (is_any_known or weight not in _QKV):
            found = True, Fused(holds)
    return found


def _size(name: str, find: SizeOf) -> int:
    """Returns a size of `_LAYOUTS`, 0 if it is unknown."""
    if "/" in name:
        dividend, divisor = (_size(part, find) for part in name.split("/"))
        return dividend // (divisor or 1)
    return int(name) if name.isdigit() else find(_SIZES.get(name, [name])) or 0


def _part(term: str, find: SizeOf) -> Part:
    """Returns a part of a layout, 0 rows if a size is unknown; the last factor is a head's rows."""
    name, _, product = term.partition("=")
    sizes = [_size(factor, find) for factor in product.split("*")]
    return Part(name, math.prod(sizes), math.prod(sizes[:-1]))


def _weight_name(info: ParamInfo) -> str:
    """Returns a weight's name: ``qkv`` of ``attention.qkv.weight``, even in parametrizations."""
    *above, layer, attribute = ["", *owning_components(info.name)]
    if is_wrapped(info):
        layer = above[-1]
    return layer if attribute in ("weight", "weight_v") else attribute.removesuffix("_weight")


def _qkv(
    info: ParamInfo, size_of: SizeOf, weight: str, rows: int, cols: int, classes: str
) -> Fused:
    """Returns how Q, K, and V make up the rows: one below the other, or by key head."""
    own_of, own_heads = functools.partial(own_size, info), own_size(info, HEADS)
    if own_heads not in (None, size_of(HEADS)):  # the config is for other attentions
        size_of = own_of
    heads, key_heads, size = size_of(HEADS), size_of(KEY_HEADS), size_of(HEAD_DIM)
    by_head = weight in _BY_HEAD or any(name in classes for name in _BY_HEAD_CLASSES)
    one = 1 if read(attention_of(info), "multi_query") else None
    if "GPTBigCode" in classes and one is None:
        by_head = True
    if heads is not None:
        size = size or (cols // heads if cols % heads == 0 else None)
        if "CodeGen" in classes and size and rows == 3 * heads * size:
            part = heads * size // _CODEGEN_SHARDS
            each = None if heads % _CODEGEN_SHARDS else heads // _CODEGEN_SHARDS
            parts = [Part(name, part, each) for name in "qvk"]
            return _fused(f"{_HOLDS}, which alternate,", parts, str(_CODEGEN_SHARDS))
        own = size_in(attention_of(info), KEY_HEADS)
        if own not in (None, heads) and size_of(HEAD_DIM) is None and not by_head:
            unit, left = divmod(rows, heads + 2 * own)
            return Fused(_HOLDS) if left else _fused(_HOLDS, _q_k_v(heads, own, unit))
        for count in filter(None, (one, key_heads, heads)):
            if size and (heads + 2 * count) * size == rows and heads % count == 0:
                if by_head and count > 1:
                    parts = _q_k_v(heads // count, 1, size)
                    return _fused(f"{_HOLDS}, which alternate,", parts, "head")
                return _fused(_HOLDS, _q_k_v(heads, count, size))
    if by_head:
        hint = '"(head (q=… + k=… + v=…)) dim"' if weight in _BY_HEAD else Fused.hint
        return Fused(_HOLDS, hint=hint)
    # If the number of key heads is unknown, rows that happen to divide by three prove nothing.
    is_even = rows == 3 * cols or (key_heads == heads and heads and rows % 3 == 0)
    own_dims = [own_of(HEAD_DIM), own_of(VALUES_ALONE)]
    is_odd = any(dim and rows % (3 * dim * (own_heads or 1)) for dim in own_dims)
    if is_odd or not (is_even or _is_taken(info, rows / 3)):
        return Fused(_HOLDS)
    third = rows // 3
    return _fused(_HOLDS, [Part(name, third, heads_of(info, third, third)) for name in "qkv"])


def _q_k_v(heads: int, key_heads: int, size: int) -> list[Part]:
    counts = {"q": heads, "k": key_heads, "v": key_heads}
    return [Part(name, count * size, count) for name, count in counts.items()]


def _classes(module: nn.Module) -> str:
    return " ".join(class_names(module))


def _is_taken(info: ParamInfo, size: float) -> bool:
    """Returns True if a linear layer next to the parameter's has this many inputs."""
    beside = info.above[0].children() if info.above else ()
    return any(isinstance(layer, nn.Linear) and layer.weight.shape[1] == size for layer in beside)


def _gated(
    shape: tuple[int, ...], info: ParamInfo, size_of: SizeOf, weight: str
) -> Optional[Fused]:
    holds, is_stack = "gate and up projection", len(shape) > 2
    in_turn = any(_GATE_BESIDE_UP in name for name in class_names(info.module))
    parts = "(n (gate=1 + up=1))" if in_turn else f"(gate={shape[-1] // 2} + up={shape[-1] // 2})"
    if info.is_conv1d or (is_stack and _is_halved(shape, info, in_columns=True)):
        holds += ", in alternate columns," if in_turn else ", side by side,"
        return Fused(holds, f"dim {parts}" if shape[-1] % 2 == 0 else None)
    rows = shape[-2]
    if weight in _GATED_BY_CONFIG:
        if rows != 2 * (size_of(_INTERMEDIATE) or 0) and not _is_taken(info, rows / 2):
            return None
    elif rows % 2 or (is_stack and not _is_halved(shape, info, in_columns=False)):
        return None if weight == PAIR and is_stack and shape[-3] == 2 else Fused(holds)
    return Fused(holds, [rows // 2] * 2)


def _is_halved(shape: Sequence[int], info: ParamInfo, in_columns: bool) -> bool:
    """Returns True if the experts' other projection shows that halves are in columns, or in rows.

    The shapes are (E, 2·inner, dim) and (E, dim, inner), or (E, dim, 2·inner) and (E, inner, dim).
    Numbers of experts may differ: some of LongCat's compute nothing.
    """
    rows, cols = shape[-2:]
    half = (cols // 2, rows) if in_columns else (cols, rows // 2)
    others = (param for param in info.module._parameters.values() if param is not None)
    return any(param.ndim == len(shape) and param.shape[-2:] == half for param in others)


def is_stored_transposed(info: ParamInfo, param: Tensor) -> bool:
    """Returns True if modules show that a weight is (in, out).

    These are Conv1D, transposed convolutions, and projections of experts with halves in columns.
    """
    if info.is_conv1d or isinstance(info.layer, nn.modules.conv._ConvTransposeNd):
        return True
    return param.ndim > 2 and any(
        _is_halved(other.shape, info, in_columns=True)
        for name, other in info.module._parameters.items()
        if other is not None and other.ndim > 2 and name.removesuffix("_weight") in _GATED
    )
