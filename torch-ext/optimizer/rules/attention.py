"""Finds the size of a head in query, key and value projections, which ``per_head`` parts by it.

The attention's module tells it, or the configuration: the size itself, or a count of heads. What
the configuration tells has to fit the rows. Nothing is concluded from the rows alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from torch import nn

from .modules import ParamInfo, look_up, may_be_divided, size_in

# Finds a size that modules or configurations call by one of some keys.
SizeOf = Callable[[Sequence[str]], Optional[int]]

# What configurations and modules call their numbers of attention heads, and the size of one.
HEADS = ["num_attention_heads", "num_heads", "n_heads", "n_head", "nheads"]
HEADS += ["heads", "num_attn_heads"]
KEY_HEADS = ["num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_heads"]
KEY_HEADS += ["n_query_groups", "num_query_groups"]
HEAD_DIM = ["head_dim", "attention_head_size", "head_size", "d_head", "kv_channels"]
HEAD_DIM += ["key_value_proj_dim", "d_kv", "dim_head"]
_QUERY_DIM = ["qk_head_dim", "q_head_dim", "head_k_dim", *HEAD_DIM]
_VALUE_DIM = ["v_head_dim", "head_v_dim", *HEAD_DIM]
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")

_WORDS = {"q": "query", "k": "key", "v": "value"}
# By name of a projection, whether it gives queries, keys or values. Latent attention, and indexers
# of sparse attention, have two query projections in turn, of which the second gives heads.
_PROJECTIONS = {"q_b_proj": "q", "wq_b": "q"} | {
    pattern.format(name): kind
    for kind, word in _WORDS.items()
    for name, patterns in (
        (kind, "{} w{} W{} to_{} {}_proj {}_lin linear_{} add_{}_proj project_{}"),
        (word, "{} {}_proj {}_layer"),
    )
    for pattern in patterns.split()
}


def projection_head(model: nn.Module, info: ParamInfo, weight: str, rows: int) -> Optional[int]:
    """Rows of one head of a projection, 0 if nothing tells; None if the weight is none.

    Args:
        weight: the last component of its name that says something.
        rows: of the weight, in all.
    """
    kind, attention = _PROJECTIONS.get(weight), attention_of(info)
    beside = {**attention._modules, **attention._parameters}
    queries = {n for n in beside if _PROJECTIONS.get(n.removesuffix("_weight")) == "q"}
    if kind is None or not queries:  # RWKV's keys and values are asked for by no queries
        return None
    dims = _VALUE_DIM if kind == "v" else _QUERY_DIM
    own = size_in(attention, dims)
    halves = [size_in(attention, [f"qk_{half}_head_dim"]) for half in ("nope", "rope")]
    if kind != "v" and None not in halves:
        own = sum(filter(None, halves))
    if own is not None and rows % own == 0:
        return own
    counts = HEADS if kind == "q" or _has_rows(beside, queries, rows) else []
    heads = own_size(info, counts if kind == "q" else [*KEY_HEADS, *counts])
    if heads is not None and rows % heads == 0:
        return rows // heads
    size_of = functools.partial(look_up, model, info)
    heads, hidden, size = size_of(HEADS), size_of(_HIDDEN), size_of(dims)
    if heads is None:
        return 0
    if size is None and hidden is not None and hidden % heads == 0:
        size = hidden // heads
    heads = heads if kind == "q" else size_of(KEY_HEADS) or heads
    return size if size is not None and rows == heads * size else 0


def attention_of(info: ParamInfo) -> nn.Module:
    """The module whose projection a parameter is."""
    around = info.around[1:] if is_wrapped(info) else info.around
    is_direct = isinstance(info.module, nn.MultiheadAttention) or not around
    return info.module if is_direct else around[0]


def is_wrapped(info: ParamInfo) -> bool:
    """Whether it is the ``linear`` of a module that wraps one: ``q_proj.linear.weight``."""
    names = [type(module).__name__ for module in info.around[:1]] if len(info.around) > 1 else []
    return info.path[-1:] == ["linear"] and any("Linear" in n or "Projection" in n for n in names)


def heads_of(info: ParamInfo, rows: int) -> Optional[int]:
    """How many heads make up so many rows, by what the attention tells."""
    size = size_in(attention_of(info), HEAD_DIM)
    return rows // size if size is not None and rows % size == 0 else own_size(info, HEADS)


def own_size(info: ParamInfo, keys: Sequence[str]) -> Optional[int]:
    """A size that the attention itself tells; None where its sizes may be those of one rank."""
    return None if may_be_divided(info) else size_in(attention_of(info), keys)


def _has_rows(beside: Mapping[str, object], names: set[str], rows: int) -> bool:
    layers = (beside[name] for name in names)
    weights = (getattr(layer, "weight", layer) for layer in layers)
    return any(getattr(weight, "shape", (0,))[0] == rows for weight in weights)
