"""Tells stacked experts and convolutions among tensors of more than two dimensions.

Names, modules and configurations tell; nothing here reads a weight.
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor, nn

from .modules import ParamInfo, look_up

# What configurations and modules call their number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts")
MOST_CHANNELS = 4  # of images; as few come into a depthwise convolution


def expert_key(model: nn.Module, info: ParamInfo, param: Tensor) -> Optional[str]:
    """The component of a parameter's name that holds experts, if name or config tells of any."""
    if is_convolution(info):
        return None
    components = info.name.split(".")
    for component in components:
        if "expert" in component.lower() and not component.endswith("bias"):
            return component
    is_moe = any("moe" in component.lower().split("_") for component in components)
    count = look_up(model, info, EXPERTS)
    if (count is not None and param.shape[0] == count > 1) or is_moe:
        named = [c for c in components if not c.isdigit() and c != "weight"]
        return named[-1] if named else None
    return None


def is_convolution(info: ParamInfo) -> bool:
    return isinstance(info.layer, nn.modules.conv._ConvNd)


def is_kernel(info: ParamInfo, param: Tensor) -> bool:
    """Whether it is a convolution, or may be one of a module of another class."""
    return is_convolution(info) or param.ndim > 3
