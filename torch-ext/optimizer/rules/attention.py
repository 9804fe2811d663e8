"""Finds the head size of query, key, and value projections, for ``per_head``.

The size, or a number of heads, comes from the attention module or the config. A config's values
must fit the rows. Rows alone are never enough.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from torch import Tensor, nn

from .modules import (
    ParamInfo,
    class_names,
    look_up,
    may_be_divided,
    owning_components,
    size_in,
)

# Finds a size that modules or configs have under one of the keys.
SizeOf = Callable[[Sequence[str]], Optional[int]]

# Names in configs and modules for numbers of attention heads, and for the size of one.
HEADS = ["num_attention_heads", "num_heads", "n_heads", "n_head", "nheads"]
HEADS += ["heads", "num_attn_heads", "nhead", "num_q_heads", "num_query_heads"]
KEY_HEADS = ["num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_heads"]
KEY_HEADS += ["n_query_groups", "num_query_groups", "kv_heads"]
HEAD_DIM = ["head_dim", "attention_head_size", "head_size", "d_head", "kv_channels"]
HEAD_DIM += ["key_value_proj_dim", "d_kv", "dim_head"]
QUERY_DIM = ["qk_head_dim", "q_head_dim", "head_k_dim", *HEAD_DIM]
VALUES_ALONE = ["v_head_dim", "head_v_dim"]
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")

# By word in a projection's name, its outputs: queries, keys, values, or two of them.
_KINDS = {"q": "q", "query": "q", "queries": "q", "k": "k", "v": "v", "qk": "qk", "kv": "kv"}
_KINDS |= {"key": "k", "keys": "k", "value": "v", "values": "v", "key_value": "kv"}
_PROJECTION = re.compile(
    r"(c_|fc_|proj_|project_|lin_|linear_|add_|to_?|w_?|)"
    rf"({'|'.join(sorted(_KINDS, key=len, reverse=True))})s?"
    r"(_?proj|_projection|_lin|_linear|_layer|_net|_global|)(?:_weight)?",
    re.IGNORECASE,
)
# Latent attention, and indexers of sparse attention, have two consecutive query projections; the
# second outputs heads.
_SECOND_QUERIES = ("q_b_proj", "wq_b")


def projection_head(
    model: nn.Module, info: ParamInfo, weight: str, rows: int, ndim: int = 2
) -> Optional[int]:
    """Returns the rows of one head of a projection, or 0 if unknown; None if it isn't a projection.

    Args:
        weight: the weight's name, as in `fused`.
        rows: the total number of outputs.
        ndim: the weight's number of dimensions; with more than two, the order of heads is unknown.
    """
    (affixes, kind), attention = _kind_of(weight), attention_of(info)
    beside = _projections(attention)
    kinds = {name: _kind_of(name) for name in beside}
    if not kind or not any(other.startswith("q") for _, other in kinds.values()):
        return None  # RWKV has keys and values without queries
    own = functools.partial(size_in, attention)
    halves = [own([f"qk_{half}_head_dim"]) for half in ("nope", "rope")]
    dim = own(QUERY_DIM) if None in halves else sum(filter(None, halves))
    is_bare = info.layer is attention and not isinstance(attention, nn.MultiheadAttention)
    if len(kind) > 1 or is_bare or ndim != 2:  # a bare parameter may be (inputs, outputs)
        return None if dim == rows else 0
    outputs = {other: _outputs(beside[n]) for n, (a, other) in kinds.items() if a == affixes}
    if outputs.get(kind) != rows:  # the projection has several layers
        return 0
    heads, key_heads = own_size(info, HEADS), own_size(info, KEY_HEADS)
    size = _sizes(outputs, heads, key_heads, dim, own(VALUES_ALONE)).get(kind, 0)
    if size or dim is not None:
        return size
    size_of = functools.partial(look_up, model, info)
    config_heads, hidden, dim = size_of(HEADS), size_of(_HIDDEN), size_of(QUERY_DIM)
    if config_heads is None or heads not in (None, config_heads):  # a config of other attentions
        return 0
    if dim is None:
        if hidden is None or hidden % config_heads or outputs.get("q", hidden) != hidden:
            return 0
        dim = hidden // config_heads
    key_heads = size_of(KEY_HEADS) or config_heads
    return _sizes(outputs, config_heads, key_heads, dim, size_of(VALUES_ALONE)).get(kind, 0)


def _sizes(
    outputs: Mapping[str, int],
    heads: Optional[int],
    key_heads: Optional[int],
    dim: Optional[int],
    value_dim: Optional[int],
) -> dict[str, int]:
    """Returns the rows of one head of queries, keys, and values; empty if sizes don't fit the rows.

    Heads of queries and keys have the same size, and there are as many of keys as of values.
    """
    q, k, v = (outputs.get(kind, 0) for kind in "qkv")
    if dim is None:  # queries may include gates, so dim isn't the key size if key_heads is unknown
        dim = q // heads if heads and q % heads == 0 else 0
        key_heads = key_heads or (heads if k == q else None)
        k, v = (k, v) if key_heads else (0, 0)
    is_asked = not (heads and q) or q in (heads * dim, 2 * heads * dim)  # twice as many with gates
    does_fit = dim and q % dim == k % dim == 0 and is_asked
    if not does_fit or (key_heads and k not in (0, key_heads * dim)):
        return {}
    count = 0 if not k else key_heads or (k // dim if v == k else 0)
    if value_dim is None:
        value_dim = v // count if count and v % count == 0 else 0
    value_dim = value_dim if v and value_dim and v % value_dim == 0 else 0
    return {"q": dim, "k": dim if k else 0, "v": value_dim}


def _kind_of(name: str) -> tuple[tuple[str, str], str]:
    """Returns what surrounds the word for the kind in a projection's name, and the kind or ""."""
    if name in _SECOND_QUERIES:
        return (name, ""), "q"
    match = _PROJECTION.fullmatch(name)
    if match is None:
        return (name, ""), ""
    before, word, after = match.groups()
    return (before, after), _KINDS[word.lower()]


def _projections(attention: nn.Module) -> dict[str, object]:
    """Returns everything in an attention module that may be a projection, by name."""
    parametrized = getattr(attention, "parametrizations", nn.Module())._modules
    return {**attention._modules, **attention._parameters, **parametrized}


def _outputs(projection: object) -> int:
    """Returns the number of outputs of a projection's last matrix; 0 if there is none."""
    if isinstance(projection, nn.Module):
        projection = projection._modules.get("linear", projection)  # see `is_wrapped`
    modules = list(projection.modules()) if isinstance(projection, nn.Module) else []
    tensors = modules[0].parameters() if modules else [projection]
    shapes = [t.shape for t in tensors if isinstance(t, Tensor) and t.ndim == 2]
    is_conv1d = any("Conv1D" in class_names(module) for module in modules)
    return shapes[-1][1 if is_conv1d else 0] if shapes else 0


def attention_of(info: ParamInfo) -> nn.Module:
    """Returns the module that a parameter is a projection of."""
    tensor = info.name.split(".")[-2 if info.is_original else -1]
    if tensor not in ("weight", "weight_v"):
        return info.layer
    # A Sequential or an adapter is inside of the projection.
    layer, names = ["", *owning_components(info.name)][-2], info.path[::-1]
    inner = names.index(layer) if layer in names else 0
    around = info.around[inner + is_wrapped(info) :]
    return around[0] if around else info.layer


def is_wrapped(info: ParamInfo) -> bool:
    """Returns True if the layer is the ``linear`` of a wrapper module: ``q_proj.linear.weight``."""
    names = [type(module).__name__ for module in info.around[:1]] if len(info.around) > 1 else []
    return info.path[-1:] == ["linear"] and any("Linear" in n or "Projection" in n for n in names)


def heads_of(info: ParamInfo, rows: int, queries: Optional[int] = None) -> Optional[int]:
    """Returns the number of heads in ``rows`` rows of keys or values, from the attention's sizes.

    Args:
        queries: rows of the queries; None means the rows of the projection next to the parameter.
    """
    attention = attention_of(info)
    size = size_in(attention, HEAD_DIM)
    if size is not None:
        return None if rows % size else rows // size
    beside = _projections(attention).items()
    found = {_outputs(projection) for name, projection in beside if _kind_of(name)[1] == "q"}
    return own_size(info, HEADS) if rows in ({queries} if queries else found) else None


def own_size(info: ParamInfo, keys: Sequence[str]) -> Optional[int]:
    """Returns a size from the attention module; None if its sizes may be per rank."""
    return None if may_be_divided(info) else size_in(attention_of(info), keys)
