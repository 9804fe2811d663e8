"""What a model tells of its parameters beside names and shapes: modules, attributes, its config.

Nothing here reads a weight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ...distributed import utils as dtensors
from ...matrices import Matrices
from ...parameters.default_groups import Decision, decide
from ...parameters.names import normalize_name
from ...parameters.survey import read_by_options

# What models call their own configuration: transformers, torchtitan, others.
_CONFIGS = ("config", "model_args", "args")

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nheads")
KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
    "n_local_heads",
    "n_query_groups",
    "num_query_groups",
)
HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "d_head", "kv_channels")
EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "n_experts",
)


@dataclass(frozen=True)
class Place:
    """Where a model keeps a parameter.

    Args:
        name: FQN of the parameter, without the parts that wrappers add.
        owner: the module.
        attribute: what the owner calls it.
        above: the modules around the owner, innermost first.
    """

    name: str
    owner: nn.Module
    attribute: str
    above: tuple[nn.Module, ...]

    @property
    def layer(self) -> nn.Module:
        """The owner, or the module whose parametrization that is."""
        is_original = isinstance(self.owner, ParametrizationList) and len(self.above) > 1
        return self.above[1] if is_original else self.owner

    @property
    def around(self) -> tuple[nn.Module, ...]:
        return (self.owner, *self.above)


@dataclass(frozen=True)
class Subject:
    """A model, what is decided of its parameters, and by which arguments.

    Args:
        model: as it was given.
        decisions: of all parameters.
        places: of each parameter, by its id, all of them, in the model's order.
        is_muon_func, expert_keys: of the decisions.
        options: `Muon`'s, as far as they were given.
    """

    model: nn.Module
    decisions: Sequence[Decision]
    places: Mapping[int, Sequence[Place]]
    is_muon_func: Any
    expert_keys: Optional[Sequence[str]]
    options: Mapping[str, Any]

    def of(self, algorithm: str) -> list[Decision]:
        return [decision for decision in self.decisions if decision.algorithm == algorithm]

    @property
    def trainable(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.algorithm != "frozen"]

    def place(self, decision: Decision) -> Place:
        return self.places[id(decision.param)][0]

    def matrices(self, decision: Decision) -> Matrices:
        """How Muon would read the parameter.

        Raises:
            ValueError: it would not. Completes "<parameter> …".
        """
        shape, name = decision.param.shape, decision.name
        split, flatten = self.options.get("split"), self.options.get("flatten", False)
        return read_by_options(shape, name, self.expert_keys, split, flatten)

    def look_up(self, place: Place, keys: Sequence[str]) -> Optional[int]:
        """A size that the modules around a parameter, or their configurations, call by a key.

        Configurations first, since tensor parallelism divides what modules say.
        """
        for module in (*place.around, self.model):
            for config in _configs(module):
                found = _first(config, keys)
                if found is not None:
                    return found
        if dtensors.is_dtensor(getattr(place.owner, place.attribute, None)):
            return None
        return next(
            (found for module in place.above for found in [_first(module, keys)] if found), None
        )


def examine(
    model: nn.Module,
    is_muon_func: Any,
    expert_keys: Optional[Sequence[str]],
    options: Mapping[str, Any],
) -> Subject:
    decisions = decide(model, is_muon_func, expert_keys)
    places: dict[int, list[Place]] = defaultdict(list)
    for place, param in _places(model):
        if all(place.name != other.name for other in places[id(param)]):
            places[id(param)].append(place)
    return Subject(model, decisions, dict(places), is_muon_func, expert_keys, options)


def _places(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        parts = path.split(".") if path else []
        above = [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
        around = tuple(modules[outer] for outer in above if outer in modules)
        for attribute, param in module._parameters.items():
            if param is not None:
                name = normalize_name(".".join([*parts, attribute]))
                yield Place(name, module, attribute, around), param


def _configs(module: nn.Module) -> Iterator[Any]:
    for key in _CONFIGS:
        config = read(module, key)
        if config is not None:
            yield config
            inner = read(config, "text_config")
            if inner is not None:
                yield inner


def _first(source: Any, keys: Sequence[str]) -> Optional[int]:
    for key in keys:
        value = read(source, key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def read(source: Any, key: str) -> Any:
    """What a module or a configuration calls by a key, or None; properties may raise anything."""
    try:
        return source.get(key) if isinstance(source, Mapping) else getattr(source, key, None)
    except Exception:
        return None


def class_names(module: nn.Module) -> Iterator[str]:
    """Of a module and what it inherits from: classes are known by name where importing them, or the
    library that has them, would cost too much."""
    return (cls.__name__ for cls in type(module).__mro__)


def is_transposed(place: Place) -> bool:
    """Whether a weight is stored (in, out), as GPT-2's are."""
    return place.attribute == "weight" and "Conv1D" in class_names(place.owner)


def vocabularies(subject: Subject) -> dict[int, str]:
    """Sizes of the embeddings' vocabularies, and what says so."""
    found: dict[int, str] = {}
    for path, module in subject.model.named_modules():
        # A table of as many rows as columns may as well be of positions, beside square matrices.
        if isinstance(module, nn.Embedding) and module.num_embeddings > module.embedding_dim:
            found.setdefault(module.num_embeddings, f"the rows of {normalize_name(path)}")
        for config in _configs(module):
            size = _first(config, ["vocab_size"])
            if size is not None:
                found.setdefault(size, "the config's vocab_size")
    return found


def numel(decisions: Sequence[Decision]) -> int:
    return sum(math.prod(decision.param.shape) for decision in decisions)
