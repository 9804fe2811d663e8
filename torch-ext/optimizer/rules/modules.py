"""Finds the modules that hold a parameter, and what they or their configs say about it.

Nothing in this module reads weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..distributed import dtensors
from ..parameters.names import is_wrapper, normalize_name

# Attributes for a model's config: in transformers, torchtitan, and others.
_CONFIGS = ("config", "model_args", "args")
# Names for the number of experts in configs and modules.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts")

PAIR = "w13"  # gate and up projections as stacked in torchtitan, (2, rows, cols)

# Name components between a layer and its weight; the first two come from adapters (PEFT).
_INNER_WRAPPERS = frozenset({"base_layer", "original_module", "module"})


@dataclass(frozen=True)
class ParamInfo:
    """One of the places where a model registers a parameter.

    Args:
        name: FQN of the parameter, without wrappers' components.
        module: the module that holds the parameter.
        attribute: the parameter's name in the module.
        above: the modules around that module, innermost first.
    """

    name: str
    module: nn.Module
    attribute: str
    above: tuple[nn.Module, ...]

    @property
    def layer(self) -> nn.Module:
        """The module, or the module that it parametrizes."""
        return self.above[1] if self.is_original else self.module

    @property
    def is_original(self) -> bool:
        """True if a parametrization computes the layer's weight from the parameter."""
        return isinstance(self.module, ParametrizationList) and len(self.above) > 1

    @property
    def path(self) -> list[str]:
        """The components of the layer's name: ``["layers", "0", "wq"]``."""
        # A parametrized layer's weight is called <layer>.parametrizations.weight.original0.
        return self.name.split(".")[: -3 if self.is_original else -1]

    @property
    def around(self) -> tuple[nn.Module, ...]:
        """The modules around the layer, innermost first."""
        return self.above[2:] if self.is_original else self.above

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.layer, nn.modules.conv._ConvNd)

    @property
    def is_conv1d(self) -> bool:
        """True if the parameter is a weight stored as (in, out), as in GPT-2."""
        return self.attribute == "weight" and "Conv1D" in class_names(self.module)


@dataclass(frozen=True)
class Decision:
    """Which algorithm trains a parameter, and why.

    Args:
        name: FQN of the parameter, without wrappers' components.
        key: FQN of the parameter in the model's ``state_dict()``.
        param: the parameter.
        algorithm: ``"Muon"``, ``"AdamW"``, or ``"frozen"``.
        reason: a few words on why.
    """

    name: str
    key: str
    param: Tensor
    algorithm: str
    reason: str


# By id of each parameter, in the model's order; tied parameters have several infos.
ParamInfos = Mapping[int, Sequence[ParamInfo]]


def infos_of(model: nn.Module) -> ParamInfos:
    by_param: dict[int, list[ParamInfo]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        components = path.split(".") if path else []
        paths = [
            ".".join(components[:end])
            for end in range(len(components) - 1, -1, -1)
            if not is_wrapper(components[: end + 1])  # names lack wrappers' components, too
        ]
        above = tuple(modules[outer] for outer in paths if outer in modules)
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            name = normalize_name(".".join([*components, attribute]))
            infos = by_param.setdefault(id(param), [])
            if all(name != other.name for other in infos):
                infos.append(ParamInfo(name, module, attribute, above))
    return by_param


def unsharded_ids(model: nn.Module) -> set[int]:
    """Returns ids of the unsharded parameters that FSDP2 registers temporarily."""
    fsdp_module = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, fsdp_module):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            params = [param for group in groups if group is not None for param in group.fsdp_params]
            ids |= {id(getattr(param, "_unsharded_param", None)) for param in params}
    return ids


def look_up(model: nn.Module, info: ParamInfo, keys: Sequence[str]) -> Optional[int]:
    """Returns a size that a config or module around a parameter has under one of the keys.

    Configs come first, since tensor parallelism may divide the sizes in modules.
    """
    around = (info.module, *info.above, model)
    sources = [config for module in around for config in configs_of(module)]
    if not may_be_divided(info):
        sources += info.module, *info.above
    sizes = (size_in(source, keys) for source in sources)
    return next((size for size in sizes if size is not None), None)


def may_be_divided(info: ParamInfo) -> bool:
    """Returns True if sizes in modules may be per rank, as in sharding by more than FSDP2."""
    param: Any = getattr(info.module, info.attribute, None)
    if not dtensors.is_dtensor(param):
        return False
    is_fsdp2s = any("FSDPModule" in class_names(m) for m in (info.module, *info.above))
    sharded = [placement for placement in param.placements if not placement.is_replicate()]
    return not is_fsdp2s or len(sharded) > 1


def configs_of(module: nn.Module) -> Iterator[Any]:
    for key in _CONFIGS:
        config = read(module, key)
        if config is not None:
            yield config
            text_config = read(config, "text_config")
            if text_config is not None:
                yield text_config


def size_in(source: Any, keys: Sequence[str]) -> Optional[int]:
    """Returns the first positive integer that a module or config has under one of the keys."""
    for key in keys:
        value = read(source, key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def read(source: Any, key: str) -> Any:
    """Returns a module's or config's value for a key; None if it is missing or raises."""
    try:
        return source.get(key) if isinstance(source, Mapping) else getattr(source, key, None)
    except Exception:
        return None


def class_names(thing: object) -> Iterator[str]:
    """Returns names of an object's class and bases, as importing the classes would be too slow."""
    return (cls.__name__ for cls in type(thing).__mro__)


def expert_key(model: nn.Module, info: ParamInfo, param: Tensor) -> Optional[str]:
    """Returns the component of a name that marks experts, if the name or config indicates any."""
    components = info.name.split(".")
    if info.is_convolution or is_paired_row_by_row(info, param):
        return None
    if components[-1] == PAIR and param.ndim == 3 and len(param) == 2:
        return PAIR
    for component in components:
        if "expert" in component.lower() and not component.endswith("bias"):
            return component
    is_moe = any("moe" in component.lower().split("_") for component in components)
    count = look_up(model, info, EXPERTS)
    if (count is not None and param.shape[0] == count > 1) or is_moe:
        named = [c for c in components if not c.isdigit() and c != "weight"]
        return named[-1] if named else None
    return None


def is_paired_row_by_row(info: ParamInfo, param: Tensor) -> bool:
    """Returns True if rows of a gate and an up projection are interleaved: (…, rows, 2, cols)."""
    return info.attribute == PAIR and param.ndim > 2 and param.shape[-2] == 2


def owning_components(name: str) -> list[str]:
    """Returns the components of a name that identify the parameter: ``[…, "wq", "weight"]``.

    ``lm_head.0.weight``, ``lm_head.parametrizations.weight.original0`` and
    ``lm_head.modules_to_save.default.weight`` are all ``lm_head``'s ``weight``.
    """
    components = normalize_name(name).split(".")
    if "parametrizations" in components[:-1]:
        index = components.index("parametrizations")
        components = [*components[:index], components[index + 1]]
    if "modules_to_save" in components[:-2]:  # in PEFT, the adapter's name follows
        index = components.index("modules_to_save")
        components = [*components[:index], *components[index + 2 :]]
    return [c for c in components if not c.isdigit() and c not in _INNER_WRAPPERS] or [""]


def component_of(name: str) -> str:
    """Returns the last component of a parameter's name that is neither a number nor "weight"."""
    named = [c for c in name.split(".") if not c.isdigit() and c != "weight"]
    return named[-1] if named else name
