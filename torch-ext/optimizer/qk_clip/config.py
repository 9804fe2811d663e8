"""Reads and checks ``clip_config``: the options by which a layer's attention logits are bounded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from .. import split_notation
from ..parameters.names import normalize_name
from ..parameters.options import Option, is_int, is_number

# Names of parameters whose rows are heads. In multi-head latent attention, the parameters that
# project a latent up to queries, and to keys and values, have other names.
LATENT_QUERIES = ("wq_b", "q_b_proj")
QUERIES = (*LATENT_QUERIES, "wq", "q_proj")
KEYS = ("wk", "k_proj")
LATENT_KEYS = ("wkv_b", "kv_b_proj")
SIDES = {**dict.fromkeys(QUERIES, "q"), **dict.fromkeys((*KEYS, *LATENT_KEYS), "k")}
KINDS = tuple(SIDES)


def _int_from(least: int) -> Option:
    return Option(lambda value: is_int(value) and value >= least, f"an int ≥ {least}")


def _are_indices(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(is_int(index) and index >= 0 for index in value)


_INDICES = Option(lambda value: value is None or _are_indices(value), "a list of numbers of heads")
_LATENT_DIMS = {
    "qk_nope_head_dim": _int_from(1),
    "qk_rope_head_dim": _int_from(0),
    "v_head_dim": _int_from(1),
}
_OPTIONS = {
    "q_indices": _INDICES,
    "k_indices": _INDICES,
    "head_dim": _int_from(1),
    "threshold": Option(lambda value: is_number(value) and value > 0, "a finite number above 0"),
    "is_mla": Option(lambda value: isinstance(value, bool), "True or False"),
    **_LATENT_DIMS,
    "row_map": Option(
        lambda value: value is None or isinstance(value, Mapping), "a mapping from names"
    ),
}

LayerKey = Union[int, str]  # number of a layer, or FQN of its attention


@dataclass(frozen=True)
class LayerConfig:
    """How the attention logits of one layer are bounded."""

    threshold: float  # the largest logit that is left alone
    plain_dim: int  # rows of a query head without rotation, which are also the rows of a key head
    rotated_dim: int  # rows of a query head with rotation, in latent attention
    value_dim: Optional[int]  # rows of values in latent attention; None in any other
    # By side, "q" or "k", for each logit the head that it scales. None means all query heads, or
    # for each query head the key head that it reads.
    indices: Mapping[str, Optional[tuple[int, ...]]]
    # By the name of a projection the one of `KINDS` that it is like, or the rows of its query heads
    # and of its key heads in the notation of ``split``.
    row_map: Mapping[str, str]


# By a layer's number or the beginning of its name, or by None for all layers that have no other.
ClipConfig = Mapping[Optional[LayerKey], Optional[LayerConfig]]


def read_config(clip_config: Any) -> ClipConfig:
    """Reads ``clip_config``: options of all layers, or a mapping from layers to options or None.

    Raises:
        ValueError: unknown or missing options, or wrong ones.
    """
    if not isinstance(clip_config, Mapping):
        raise ValueError(
            "clip_config must be a dict of options, or a mapping from layers to such dicts, "
            f"found {clip_config!r}"
        )
    if not clip_config or any(key in _OPTIONS for key in clip_config):
        return {None: _read(clip_config, "clip_config")}
    configs: dict[Optional[LayerKey], Optional[LayerConfig]] = {}
    for key, options in clip_config.items():
        if not (isinstance(key, str) or is_int(key)):
            raise ValueError(
                f"clip_config has a key {key!r}, which is neither the number of a layer nor a name"
            )
        layer = normalize_name(key) if isinstance(key, str) else int(key)
        configs[layer] = _read(options, f"clip_config[{key!r}]")
    return configs


def _read(options: Any, where: str) -> Optional[LayerConfig]:
    """Reads and checks the options of a layer; messages name them ``where``."""
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise ValueError(
            f"{where} must be a dict of options or None, found {options!r}; options are "
            f"{', '.join(_OPTIONS)}"
        )
    for key in options:
        if key not in _OPTIONS:
            close = difflib.get_close_matches(str(key), _OPTIONS, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else f": {', '.join(_OPTIONS)}"
            raise ValueError(f"{where} has {key!r}, which is no option{meant}")
    given: dict[str, Any] = {**dict.fromkeys(_OPTIONS), "threshold": 100.0, "is_mla": False}
    given.update(options)
    is_mla = given["is_mla"]
    latent_dims = [key for key in _LATENT_DIMS if given[key] is not None]
    if is_mla is False and latent_dims:
        raise ValueError(f"{where} has {', '.join(latent_dims)} but not is_mla=True")
    unused = {"head_dim"} if is_mla else {*_LATENT_DIMS}
    for key, option in _OPTIONS.items():
        if key not in unused:
            option.check(f"{where}: {key}", given[key])
    indices = {
        side: None if given[key] is None else tuple(map(int, given[key]))
        for side, key in (("q", "q_indices"), ("k", "k_indices"))
    }
    q, k = indices.values()
    if q and k and len(q) != len(k):
        raise ValueError(
            f"{where}: q_indices lists {len(q)} heads and k_indices {len(k)}, but entry i of "
            "both is about logit i: list a key head once for each query head that reads it, or "
            "leave both out"
        )
    return LayerConfig(
        threshold=float(given["threshold"]),
        plain_dim=int(given["qk_nope_head_dim" if is_mla else "head_dim"]),
        rotated_dim=int(given["qk_rope_head_dim"]) if is_mla else 0,
        value_dim=int(given["v_head_dim"]) if is_mla else None,
        indices=indices,
        row_map=_read_row_map(given["row_map"] or {}, f"{where}: row_map"),
    )


def _read_row_map(row_map: Mapping[Any, Any], where: str) -> dict[str, str]:
    for name, value in row_map.items():
        if not isinstance(value, str) or (value not in KINDS and value.isidentifier()):
            raise ValueError(
                f"{where}[{name!r}] must be the notation of split, or one of {', '.join(KINDS)}, "
                f"found {value!r}"
            )
        if value not in KINDS:
            try:
                split_notation.parse(value)
            except ValueError as error:
                raise ValueError(f"{where}[{name!r}]: {error}") from None
    return dict(row_map)
