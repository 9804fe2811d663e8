"""Finds weights that hold several matrices in one tensor, such as QKV, and where each lies.

Names tell that a weight is fused. How its rows lie is told by its class where that is known, else
by convention: Q, K and V one below the other. Sizes come from the model's configuration, from its
modules, or from the shape, and count only if they add up to the rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, Union

from torch import Tensor, nn

from ..parameters.names import matches
from .modules import (
    ParamInfo,
    class_names,
    component_of,
    look_up,
    owning_components,
    read,
    size_in,
)

# Finds a size that modules or configurations call by one of some keys.
SizeOf = Callable[[Sequence[str]], Optional[int]]

# What configurations and modules call their numbers of attention heads, and the size of one.
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nheads")
KEY_HEADS = ["num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_heads"]
KEY_HEADS += ["n_query_groups", "num_query_groups"]
HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "d_head", "kv_channels")
# Weights whose rows lie key head by key head in any module, and classes whose rows do so, whatever
# the weight is called.
_BY_HEAD = {"query_key_value", "linear_qkv"}
_BY_HEAD_CLASSES = ("MiniMax", "InternLM2")
_CODEGEN_SHARDS = 4  # CodeGen's rows are those of as many devices, each with Q, V and K
# Queries, keys and values.
_QKV = {"qkv", "qkv_proj", "qkv_linear", "to_qkv", "in_proj_qkv", "c_attn", "wqkv", "Wqkv"}
_QKV |= _BY_HEAD
_KEYS_AND_VALUES = {"to_kv"}
# Gate and up projection of a gated feed-forward; some only where the config agrees.
_GATED = {"gate_up_proj", "gate_and_up_proj", "gate_up", "w13", "w1_w3", "w12"}
_GATED_BY_CONFIG = {"Wi", "input_linear"}
_GATE_BESIDE_UP = "GptOss"  # classes that have them row by row, or column by column, in turn
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size")
# State-space layers: what configurations and modules call the inner width, groups, state, heads.
_SSM_SIZES = (
    ("intermediate_size", "mamba_intermediate", "d_inner"),
    ("n_groups", "mamba_n_groups", "mamba_ngroups", "ngroups"),
    ("state_size", "ssm_state_size", "mamba_d_state", "d_state"),
    ("num_heads", "mamba_n_heads", "n_mamba_heads", "nheads"),
)
_LATENT = {
    "kv_a_proj_with_mqa": ("latent and rotary keys", ("kv_lora_rank", "qk_rope_head_dim")),
    "kv_b_proj": ("K and V of each head", ("qk_nope_head_dim", "v_head_dim")),
}
_LINEAR_ATTENTION = {"in_proj_qkvz": "Q, K, V and gate", "in_proj_ba": "steps and decays"}
_LINEAR_ATTENTION |= {"in_proj_qkv": "Q, K and V"}
_LINEAR_SIZES = ["linear_num_key_heads", "linear_num_value_heads"]
_LINEAR_SIZES += ["linear_key_head_dim", "linear_value_head_dim"]
_GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}


@dataclass(frozen=True)
class Fused:
    """How a weight holds several matrices.

    Args:
        holds: what the matrices are, in words.
        split: the option that parts them; None where their sizes can't be told.
        hint: how it would look then.
    """

    holds: str
    split: Union[int, Sequence[int], str, None] = None
    hint: str = "[rows of the first, of the second, …]"

    def argument(self, name: str) -> str:
        """The argument of `Muon.for_model`, to fill in, that would part the weight of that name."""
        return f'split={{"{component_of(name)}": {self.hint}}}'


def split_patterns(split: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """A ``split`` by few patterns for one by names, which match none of the other names."""
    others, by_pattern = set(others), dict[str, Any]()
    by_value: dict[str, list[str]] = {}
    for name, value in split.items():
        by_value.setdefault(repr(value), []).append(name)
    for names in by_value.values():
        rest = others.union(split).difference(names)
        by_pattern.update(dict.fromkeys(_patterns(names, rest), split[names[0]]))
    return by_pattern


def _patterns(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """A few patterns that match all of the names and none of the others; else the names."""
    components = [[c] for c in reversed(names[0].split(".")) if not (c.isdigit() or c in _VAGUE)]
    alike: dict[tuple[str, ...], list[list[str]]] = {}  # names that differ in indices alone
    for split in (name.split(".") for name in names):
        alike.setdefault(tuple("*" if c.isdigit() else c for c in split), []).append(split)
    globs = [
        ".".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*together))
        for together in alike.values()
    ]
    letters = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*names))
    start = "".join(column[0] for column in letters)
    for patterns in (*components, globs, [f"{start}*"]):
        match_all = all(any(matches(name, p) for p in patterns) for name in names)
        match_others = any(matches(name, p) for p in patterns for name in others)
        if match_all and not match_others and len(patterns) <= (len(names) + 1) // 2:
            return patterns
    return list(names)


# Components that say little of what a weight holds.
_VAGUE = {"weight", "attn", "attention", "mlp", "parametrizations", "original0", "original1"}


def fused_in(model: nn.Module, info: ParamInfo, param: Tensor) -> Optional[Fused]:
    """What a weight of a model holds, if it holds several matrices."""
    shape, size_of = tuple(param.shape), functools.partial(look_up, model, info)
    if len(shape) < 2 or 0 in shape:
        return None
    if isinstance(info.module, nn.MultiheadAttention) and info.attribute == "in_proj_weight":
        return Fused("Q, K and V", [shape[0] // 3] * 3)
    for name in class_names(info.module):
        if name in _GATES and info.attribute.startswith(("weight_ih", "weight_hh")):
            return Fused(f"{_GATES[name]} gates", shape[0] // _GATES[name])
    if isinstance(info.layer, nn.modules.conv._ConvNd):
        groups = info.layer.groups
        holds = f"{groups} groups of a convolution"
        return Fused(holds, shape[0] // groups) if groups > 1 else None
    weight = _weight_name(info)
    if weight == "in_proj" and len(shape) == 2:
        return _state_space(shape[0], info)
    if weight in _LATENT and len(shape) == 2:
        return _latent(shape[0], info, size_of, weight)
    if weight in _LINEAR_ATTENTION and len(shape) == 2:
        linear = _linear_attention(shape[0], size_of, weight)
        if linear.split is not None or weight not in _QKV:
            return linear
    if weight == "q_proj" and len(shape) == 2:
        return _gated_queries(shape[0], size_of)
    above = " ".join(class_names(info.above[0])) if info.above else ""
    if weight.startswith("adaLN_mod") or (weight == "linear" and "AdaLayerNorm" in above):
        count, rest = divmod(shape[0], shape[-1])
        return Fused("modulations", shape[-1]) if count > 1 and not rest else None
    if weight in _GATED | _GATED_BY_CONFIG:
        return _gated(shape, info, size_of, weight)
    if weight not in _QKV | _KEYS_AND_VALUES or len(shape) != 2:
        return None
    rows, cols = reversed(shape) if info.is_conv1d else shape
    if weight in _KEYS_AND_VALUES:
        halves = [rows // 2] * 2 if rows % 2 == 0 else None
        return _oriented(Fused("K and V", halves), "k v", info)
    fused = Fused("Q, K and V", _qkv(info, size_of, weight, rows, cols))
    if isinstance(fused.split, str):
        fused = replace(fused, holds="Q, K and V, which alternate,")
    elif fused.split is None and weight in _BY_HEAD:
        fused = replace(fused, hint='"(head (q=… + k=… + v=…)) dim"')
    return _oriented(fused, "q k v", info)


def _oriented(fused: Fused, names: str, info: ParamInfo) -> Fused:
    """The weight as it is, or with its matrices side by side where Conv1D has rows as columns."""
    if not info.is_conv1d:
        return fused
    sizes = fused.split if isinstance(fused.split, list) else ["…"] * len(names.split())
    hint = " + ".join(f"{name}={size}" for name, size in zip(names.split(), sizes))
    split = f"dim ({hint})" if fused.split else None
    return Fused(f"{fused.holds}, side by side,", split, f'"dim ({hint})"')


def _latent(rows: int, info: ParamInfo, size_of: SizeOf, weight: str) -> Optional[Fused]:
    """Multi-head latent attention: down to latent and rotary keys, up to each head's K and V."""
    holds, keys = _LATENT[weight]
    module = info.above[0] if info.above else info.module
    # The module comes first: layers without rotary keys have other sizes than the configuration.
    for find_size in (functools.partial(size_in, module), size_of):
        first, second = (find_size([key]) for key in keys)
        if weight != "kv_b_proj" and rows == first:
            return None  # there are no rotary keys
        if first is None or second is None:
            continue
        if weight == "kv_b_proj" and rows % (first + second) == 0:
            return Fused(holds, f"(head (k={first} + v={second})) dim")
        if weight != "kv_b_proj" and rows == first + second:
            return Fused(holds, [first, second])
    return Fused(holds)


def _linear_attention(rows: int, size_of: SizeOf, weight: str) -> Fused:
    """The gated delta net: key head by key head in Qwen3-Next, one below the other in Qwen3.5."""
    sizes = [size_of([key]) for key in _LINEAR_SIZES]
    holds = _LINEAR_ATTENTION[weight]
    key_heads, value_heads, key_dim, value_dim = (size or 1 for size in sizes)
    if weight == "in_proj_qkv":
        q_k_v = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
        return Fused(holds, q_k_v if None not in sizes and sum(q_k_v) == rows else None)
    each = value_heads // key_heads  # value heads of a key head
    parts = f"b={each} + a={each}"
    expected = 2 * value_heads
    if weight == "in_proj_qkvz":
        parts = f"q={key_dim} + k={key_dim} + v={each * value_dim} + z={each * value_dim}"
        expected = 2 * key_heads * (key_dim + each * value_dim)
    fits = None not in sizes and rows == expected
    return Fused(holds, f"(head ({parts})) dim" if fits else None)


def _gated_queries(rows: int, size_of: SizeOf) -> Optional[Fused]:
    """Queries of gated attention (Qwen3-Next, Qwen3.5): each head's are followed by its gate."""
    heads, size = size_of(HEADS), size_of(HEAD_DIM)
    if heads is None or size is None or rows != 2 * heads * size:
        return None
    return Fused("Q and gate of each head", f"(head (q={size} + gate={size})) dim")


def _state_space(rows: int, info: ParamInfo) -> Optional[Fused]:
    """Mamba's input and gate; with B, C and the steps of all heads, Mamba-2's."""
    module = info.above[0] if info.above else info.module
    inner, groups, state, heads = (size_in(module, keys) for keys in _SSM_SIZES)
    if inner is not None and rows == 2 * inner:
        return Fused("input and gate", [inner, inner])
    if None not in (inner, groups, state, heads):
        counts = [inner, inner, groups * state, groups * state, heads]  # type: ignore[operator]
        if sum(counts) == rows:  # type: ignore[arg-type]
            return Fused("gate, input, B, C and steps", counts)  # type: ignore[arg-type]
    return None


def _weight_name(info: ParamInfo) -> str:
    """``qkv`` of ``attention.qkv.weight`` and ``attention.qkv``, parametrized, or in an adapter."""
    *_, layer, attribute = ["", *owning_components(info.name)]
    return layer if attribute in ("weight", "weight_v") else attribute.removesuffix("_weight")


def _qkv(
    info: ParamInfo, size_of: SizeOf, weight: str, rows: int, cols: int
) -> Union[Sequence[int], str, None]:
    """How Q, K and V make up so many rows: one below the other, or key head by key head."""
    above = info.above[:1]
    classes = " ".join(class_names(above[0])) if above else ""
    heads, key_heads, size = size_of(HEADS), size_of(KEY_HEADS), size_of(HEAD_DIM)
    by_head = weight in _BY_HEAD or any(name in classes for name in _BY_HEAD_CLASSES)
    one = 1 if any(read(module, "multi_query") for module in above) else None
    if "GPTBigCode" in classes and one is None:
        by_head = True
    if heads is not None:
        size = size or (cols // heads if cols % heads == 0 else None)
        if "CodeGen" in classes and size and rows == 3 * heads * size:
            part = heads * size // _CODEGEN_SHARDS
            return f"({_CODEGEN_SHARDS} (q={part} + v={part} + k={part})) dim"
        own = next(filter(None, (size_in(m, KEY_HEADS) for m in (info.module, *above))), None)
        if own not in (None, heads) and size_of(HEAD_DIM) is None and not by_head:
            unit, left = divmod(rows, heads + 2 * own)
            return None if left else [heads * unit, own * unit, own * unit]
        for count in filter(None, (one, key_heads, heads)):
            if size and (heads + 2 * count) * size == rows and heads % count == 0:
                if by_head and count > 1:
                    return f"(head (q={heads // count * size} + k={size} + v={size})) dim"
                return [heads * size, count * size, count * size]
    # Where the key heads can't be told, rows that happen to divide by three tell nothing.
    is_even = rows == 3 * cols or (key_heads == heads and heads and rows % 3 == 0)
    if by_head or not (is_even or _is_taken(info, rows / 3)):
        return None
    return [rows // 3] * 3


def _is_taken(info: ParamInfo, size: float) -> bool:
    """Whether a linear layer beside the parameter's takes so many inputs."""
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
        if rows != 2 * (size_of(_INTERMEDIATE) or 0):
            return None
    elif rows % 2 or (is_stack and not _is_halved(shape, info, in_columns=False)):
        return Fused(holds)
    return Fused(holds, [rows // 2] * 2)


def _is_halved(shape: Sequence[int], info: ParamInfo, in_columns: bool) -> bool:
    """Whether the experts' other projection says that halves lie in columns, or in rows.

    (E, 2·inner, dim) beside (E, dim, inner), or (E, dim, 2·inner) beside (E, inner, dim), where the
    numbers of experts may differ: LongCat has some that compute nothing.
    """
    rows, cols = shape[-2:]
    half = (cols // 2, rows) if in_columns else (cols, rows // 2)
    others = (param for param in info.module._parameters.values() if param is not None)
    return any(param.ndim == len(shape) and param.shape[-2:] == half for param in others)


def is_stored_transposed(info: ParamInfo, param: Tensor) -> bool:
    """Whether a weight is (in, out), as far as modules tell: Conv1D, transposed convolutions, and
    experts whose halves lie in columns, with what is beside them."""
    if info.is_conv1d or isinstance(info.layer, nn.modules.conv._ConvTransposeNd):
        return True
    return param.ndim > 2 and any(
        _is_halved(other.shape, info, in_columns=True)
        for name, other in info.module._parameters.items()
        if other is not None and other.ndim > 2 and name.removesuffix("_weight") in _GATED
    )
