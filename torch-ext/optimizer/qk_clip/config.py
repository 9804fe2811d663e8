"""What ``clip_config`` says of one layer, checked, and the configurations of all layers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union

from ..groups import normalize_name
from ..options import is_int, is_number

MODES = ("shared", "exact")

# Parameters whose rows are heads, by what calls them: queries, keys, or, with multi-head latent
# attention, what leads from a latent up to queries, and to keys and values.
LATENT_QUERIES = ("wq_b", "q_b_proj")
QUERIES = (*LATENT_QUERIES, "wq", "q_proj")
KEYS = ("wk", "k_proj")
LATENT_KEYS = ("wkv_b", "kv_b_proj")
KINDS = (*QUERIES, *KEYS, *LATENT_KEYS)

# Usual names of fused projections, and nn.MultiheadAttention's.
FUSED = ("wqkv", "Wqkv", "qkv", "qkv_proj", "to_qkv", "c_attn", "query_key_value", "in_proj")

_MLA_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_KNOWN = (
    "q_indices",
    "k_indices",
    "head_dim",
    "threshold",
    "is_mla",
    *_MLA_DIMS,
    "clip_mode",
    "row_map",
)

LayerKey = Union[int, str]  # number of a layer, or FQN of its attention
Starts = tuple[int, ...]  # first rows of heads


@dataclass(frozen=True)
class LayerConfig:
    """How the attention logits of one layer are bounded.

    Args:
        threshold: largest logit that is left alone.
        head_dim: rows of a head, of queries and keys; with latent attention, both kinds of rows.
        q_indices, k_indices: for each logit the query and the key head that it scales; None takes
            all heads, and for each query head the key head that it reads.
        mode: ``"shared"`` or ``"exact"``, see `Muon`.
        latent: of multi-head latent attention the rows of a head without rotation, with it, and of
            values; None where it is none.
        row_map: for names of projections the one of `KINDS` that they are like, or the first rows
            of all query heads and of all key heads.
    """

    threshold: float
    head_dim: int
    q_indices: Optional[tuple[int, ...]]
    k_indices: Optional[tuple[int, ...]]
    mode: str
    latent: Optional[tuple[int, int, int]]
    row_map: Mapping[str, Union[str, tuple[Starts, Starts]]] = field(default_factory=dict)

    def like(self, kind: str) -> Union[str, tuple[Starts, Starts]]:
        """What a projection of that name is like: one of `KINDS`, or its heads' first rows."""
        return self.row_map.get(kind, kind)

    def __str__(self) -> str:
        dims = f"heads of {self.head_dim} rows" if self.latent is None else f"MLA {self.latent}"
        of_heads = f"q_indices {self.q_indices}, k_indices {self.k_indices}"
        return f"threshold {self.threshold}, {self.mode}, {dims}, {of_heads}, {self.row_map}"


def read_clip_config(given: Any, mode: str) -> Optional[ClipConfig]:
    """``clip_config`` and ``clip_mode`` as given to `Muon`.

    Raises:
        ValueError: see `ClipConfig`.
    """
    _check(mode in MODES, f"clip_mode must be one of {MODES}, found {mode!r}")
    return None if given is None else ClipConfig(given, mode)


class ClipConfig:
    """How logits are bounded: alike in all layers, or in each as told.

    Args:
        given: options of all layers; a mapping from layers to options or None; or a callable from
            layers to either.
        mode: where options don't say.

    Raises:
        ValueError: unknown or missing options, or wrong ones.
    """

    def __init__(self, given: Any, mode: str):
        self._mode = mode
        self._of_all: Optional[LayerConfig] = None
        self._of_layers: dict[LayerKey, Optional[LayerConfig]] = {}
        self._function: Optional[Callable[[LayerKey], Any]] = None
        self.unmatched: set[LayerKey] = set()  # keys that no layer was found for so far
        if callable(given):
            self._function = given
        elif not isinstance(given, Mapping):
            raise ValueError(
                "clip_config must be a dict of options, a mapping from layers to such dicts, or a "
                f"function of a layer, found {given!r}"
            )
        elif given and not any(key in _KNOWN for key in given):
            self._of_layers = {
                self._layer_key(key): self._read(value, f"clip_config[{key!r}]")
                for key, value in given.items()
            }
            self.unmatched = set(self._of_layers)
        else:
            self._of_all = self._read(given, "clip_config")

    @property
    def row_map_names(self) -> set[str]:
        """Names of projections, beside `KINDS`, that there may be rows told of."""
        if self._function is not None:  # which is asked of layers that were found
            return set(FUSED)
        configs = [self._of_all, *self._of_layers.values()]
        return {name for config in configs if config is not None for name in config.row_map}

    def of(
        self, key: LayerKey, number: Optional[int], prefix: str, is_only: bool
    ) -> Optional[LayerConfig]:
        """A layer's; None where it is left alone.

        Args:
            key: how the layer is told from all others.
            number: the last one in its name.
            prefix: FQN of its attention.
            is_only: whether no other layer has that number.
        """
        if self._function is not None:
            return self._read(self._function(key), f"clip_config({key!r})")
        if self._of_all is not None:
            return self._of_all
        if number in self._of_layers:
            _check(
                is_only,
                f"clip_config[{number}]: there are several layers of this number, one of them "
                f"{prefix!r}; tell them by such prefixes of names",
            )
            self.unmatched.discard(number)
            return self._of_layers[number]
        parts = prefix.split(".")
        ancestors = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
        found = next((name for name in ancestors if name in self._of_layers), None)
        if found is None:
            return None
        self.unmatched.discard(found)
        return self._of_layers[found]

    @staticmethod
    def _layer_key(key: Any) -> LayerKey:
        if isinstance(key, str):
            return normalize_name(key)
        _check(
            is_int(key),
            f"clip_config has a key {key!r}, which is neither the number of a layer nor a name",
        )
        return int(key)

    def _read(self, given: Any, where: str) -> Optional[LayerConfig]:
        if given is None:
            return None
        if not isinstance(given, Mapping):
            hint = "" if self._function else f"; options are {', '.join(_KNOWN)}"
            raise ValueError(f"{where} must be a dict of options or None, found {given!r}{hint}")
        for key in given:
            if key not in _KNOWN:
                close = difflib.get_close_matches(str(key), _KNOWN, n=1)
                meant = f"; did you mean {close[0]!r}?" if close else f": {', '.join(_KNOWN)}"
                raise ValueError(f"{where} has {key!r}, which is no option{meant}")
        threshold = given.get("threshold", 100.0)
        if not (is_number(threshold) and threshold > 0):
            raise ValueError(
                f"{where}: threshold must be a finite number above 0, found {threshold!r}"
            )
        mode = given.get("clip_mode", self._mode)
        _check(mode in MODES, f"{where}: clip_mode must be one of {MODES}, found {mode!r}")
        latent = self._read_latent(given, where)
        head_dim = sum(latent[:2]) if latent else self._positive(given, "head_dim", where)
        q_indices, k_indices = (
            self._indices(given.get(key), f"{where}: {key}") for key in ("q_indices", "k_indices")
        )
        config = LayerConfig(
            threshold=float(threshold),
            head_dim=head_dim,
            q_indices=q_indices,
            k_indices=k_indices,
            mode=mode,
            latent=latent,
            row_map=self._row_map(given.get("row_map"), f"{where}: row_map"),
        )
        _check_indices(config, where)
        return config

    def _read_latent(self, given: Mapping, where: str) -> Optional[tuple[int, int, int]]:
        is_mla = given.get("is_mla", False)
        _check(isinstance(is_mla, bool), f"{where}: is_mla must be True or False, found {is_mla!r}")
        dims = [key for key in _MLA_DIMS if given.get(key) is not None]
        if not is_mla:
            _check(not dims, f"{where} has {', '.join(dims)} but not is_mla=True")
            return None
        nope = self._positive(given, "qk_nope_head_dim", where)
        rope = self._positive(given, "qk_rope_head_dim", where, least=0)
        value = self._positive(given, "v_head_dim", where)
        return nope, rope, value

    @staticmethod
    def _positive(given: Mapping, key: str, where: str, least: int = 1) -> int:
        value: Any = given.get(key)
        _check(
            is_int(value) and value >= least,
            f"{where}: {key} must be an int ≥ {least}, found {value!r}",
        )
        return int(value)

    @staticmethod
    def _indices(given: Any, where: str) -> Optional[tuple[int, ...]]:
        if given is None:
            return None
        is_list = isinstance(given, (Sequence, range)) and not isinstance(given, str)
        if not (is_list and all(is_int(index) and index >= 0 for index in given)):
            raise ValueError(f"{where} must be a list of numbers of heads, found {given!r}")
        return tuple(int(index) for index in given)

    def _row_map(self, given: Any, where: str) -> dict[str, Union[str, tuple[Starts, Starts]]]:
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise ValueError(f"{where} must be a mapping from names, found {given!r}")
        rows: dict[str, Union[str, tuple[Starts, Starts]]] = {}
        for name, value in given.items():
            if isinstance(value, str):
                _check(
                    value in KINDS,
                    f"{where}: {name!r} is like {value!r}, which is none of {', '.join(KINDS)}",
                )
                rows[name] = value
            elif isinstance(value, Mapping) and value and not value.keys() - {"q", "k"}:
                q, k = (
                    self._indices(value.get(side, ()), f"{where}[{name!r}][{side!r}]")
                    for side in ("q", "k")
                )
                rows[name] = (q or (), k or ())
            else:
                raise ValueError(
                    f'{where}[{name!r}] must be {{"q": first rows of the query heads, "k": first '
                    f"rows of the key heads}}, or one of {', '.join(KINDS)}, found {value!r}"
                )
        return rows


def _check_indices(config: LayerConfig, where: str) -> None:
    q, k = config.q_indices, config.k_indices
    if q and k and len(q) != len(k):
        raise ValueError(
            f"{where}: q_indices lists {len(q)} heads and k_indices {len(k)}, but entry i of both "
            "is about logit i: list a key head once for each query head that reads it, or leave "
            "both out"
        )
    if config.mode == "exact":
        _check(
            q != () and k != (),
            f"{where}: clip_mode='exact' needs both q_indices and k_indices, or neither",
        )
        _check(
            q is None or len(set(q)) == len(q),
            f"{where}: clip_mode='exact' needs every query head once in q_indices, found {q}",
        )


def stacked_rows(heads: int, kv_heads: int, head_dim: int) -> dict[str, list[int]]:
    """The `row_map` of a fused projection of all queries, then all keys, then all values."""
    first_key = heads * head_dim
    return {
        "q": [head * head_dim for head in range(heads)],
        "k": [first_key + head * head_dim for head in range(kv_heads)],
    }


def grouped_rows(heads: int, kv_heads: int, head_dim: int) -> dict[str, list[int]]:
    """The `row_map` of one that has, for each key head, the queries that read it, it, its values.

    With as many key heads as query heads that is query, key and value, head by head.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads can't share {kv_heads} key heads evenly")
    group = heads // kv_heads
    size = (group + 2) * head_dim
    return {
        "q": [key * size + query * head_dim for key in range(kv_heads) for query in range(group)],
        "k": [key * size + group * head_dim for key in range(kv_heads)],
    }


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
