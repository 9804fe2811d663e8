"""Reads and checks ``clip_config``, the options that bound a layer's attention logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from .. import split_notation
from ..parameters.names import did_you_mean, normalize_name
from ..parameters.options import Option, is_int, is_number

# Names of parameters whose rows are heads. In multi-head latent attention, other names belong to
# the parameters that project a latent up to queries, and to keys and values.
LATENT_QUERIES = ("wq_b", "q_b_proj")
QUERIES = (*LATENT_QUERIES, "wq", "q_proj")
KEYS = ("wk", "k_proj")
LATENT_KEYS = ("wkv_b", "kv_b_proj")
SIDES = {**dict.fromkeys(QUERIES, "q"), **dict.fromkeys((*KEYS, *LATENT_KEYS), "k")}


def _int_from(least: int) -> Option:
    return Option(lambda value: is_int(value) and value >= least, f"an int ≥ {least}")


def _are_indices(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return value is None or (is_list and all(is_int(index) and index >= 0 for index in value))


_INDICES = Option(_are_indices, "a list of head indices")
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
_DEFAULTS: dict[str, Any] = {**dict.fromkeys(_OPTIONS), "threshold": 100.0, "is_mla": False}

LayerKey = Union[int, str]  # number of a layer, or FQN of its attention


@dataclass(frozen=True)
class LayerConfig:
    """How the attention logits of one layer are bounded."""

    threshold: float  # the largest logit that isn't clipped
    plain_dim: int  # rows of a query head without rotation, which are also the rows of a key head
    rotated_dim: int  # rows of a query head with rotation, in latent attention
    value_dim: Optional[int]  # rows of values in latent attention; None in other attention
    # For each logit, the head that it scales. None means all query heads, or for each query head
    # the key head that it reads.
    q_indices: Optional[tuple[int, ...]]
    k_indices: Optional[tuple[int, ...]]
    # Maps the name of a projection to a name in `SIDES` with the same rows, or to the rows of its
    # query heads and key heads in the notation of ``split``.
    row_map: Mapping[str, str]


# By a layer's number or the beginning of its name; None stands for layers without their own key.
ClipConfig = Mapping[Optional[LayerKey], Optional[LayerConfig]]


def read_config(clip_config: Any) -> ClipConfig:
    """Reads ``clip_config``: options for all layers, or a mapping from layers to options or None.

    Raises:
        ValueError: an option is unknown, missing, or wrong.
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
    """Reads and checks the options of a layer; messages call them ``where``."""
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise ValueError(
            f"{where} must be a dict of options or None, found {options!r}; options are "
            f"{', '.join(_OPTIONS)}"
        )
    for key in options:
        if key not in _OPTIONS:
            meant = did_you_mean([str(key)], _OPTIONS) or f": {', '.join(_OPTIONS)}"
            raise ValueError(f"{where} has {key!r}, which isn't an option{meant}")
    given = {**_DEFAULTS, **options}
    is_mla = given["is_mla"]
    latent_dims = [key for key in _LATENT_DIMS if given[key] is not None]
    if is_mla is False and latent_dims:
        raise ValueError(f"{where} has {', '.join(latent_dims)} but not is_mla=True")
    unused = ("head_dim",) if is_mla else tuple(_LATENT_DIMS)
    for key, option in _OPTIONS.items():
        if key not in unused:
            option.check(f"{where}: {key}", given[key])
    row_map = dict(given["row_map"] or {})
    for name, value in row_map.items():
        _check_rows(value, f"{where}: row_map[{name!r}]")
    return LayerConfig(
        threshold=float(given["threshold"]),
        plain_dim=int(given["qk_nope_head_dim" if is_mla else "head_dim"]),
        rotated_dim=int(given["qk_rope_head_dim"]) if is_mla else 0,
        value_dim=int(given["v_head_dim"]) if is_mla else None,
        q_indices=_as_ints(given["q_indices"]),
        k_indices=_as_ints(given["k_indices"]),
        row_map=row_map,
    )


def _as_ints(indices: Optional[Sequence[Any]]) -> Optional[tuple[int, ...]]:
    return None if indices is None else tuple(map(int, indices))


def _check_rows(value: Any, where: str) -> None:
    """Checks a value of ``row_map``."""
    if not isinstance(value, str) or (value not in SIDES and value.isidentifier()):
        raise ValueError(
            f"{where} must be the notation of split, or one of {', '.join(SIDES)}, found {value!r}"
        )
    if value not in SIDES:
        try:
            split_notation.parse(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
