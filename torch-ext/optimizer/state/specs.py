"""Says which tensors of state a parameter has, of which shapes and dtypes, and checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..distributed import utils as dtensors
from ..distributed.plan import Entry
from ..distributed.replicas import is_divided
from ..parameters.options import FLOATING_DTYPES, Group, Settings

# Keys of the tensors of state that can be large; AdamW's ``step``, one number, is not among them.
KEYS = ("momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq", "weight_residual")

MUON_KEYS = ("momentum_buffer", "second_momentum_buffer")
ADAMW_KEYS = ("step", "exp_avg", "exp_avg_sq")

# Keys of the tensors that are loaded in the dtype they were saved in.
KEPT_DTYPE = ("momentum_buffer", "second_momentum_buffer", "weight_residual")


# By key, the shape of a tensor of state, and its mesh and placements, None for a plain tensor.
ExpectedState = dict[str, tuple[torch.Size, Optional[tuple]]]


def keys_of(group: Group, dtype: torch.dtype) -> list[str]:
    """The tensors of state that a trainable parameter of a group has, by its dtype."""
    keys = ["momentum_buffer"] if group.use_muon else ["exp_avg", "exp_avg_sq"]
    if group.use_muon and group.beta2 is not None:
        keys.append("second_momentum_buffer")
    if group.weight_rounding == "exact" and group.updates_in_fp32(dtype):
        keys.append("weight_residual")
    return keys


def moments_dtype(group: Group, dtype: torch.dtype) -> torch.dtype:
    """The dtype of AdamW's moments of a parameter of ``dtype``."""
    return torch.float32 if group.updates_in_fp32(dtype) else dtype


def momentum_dtype(group: Group, dtype: torch.dtype) -> Optional[torch.dtype]:
    """The dtype of the momentum of a parameter of ``dtype``.

    None stands for the gradient's dtype when the momentum is created; later any dtype may stay.
    """
    if group.momentum_dtype is None and group.updates_in_fp32(dtype):
        return torch.float32
    return group.momentum_dtype


def expected_state(param: Tensor, entry: Optional[Entry], settings: Settings) -> ExpectedState:
    """Every tensor that a parameter's state can have; cheap enough for a step.

    Args:
        param: the parameter.
        entry: of a Muon parameter; None of AdamW's.
        settings: says which replicas divide state.
    """
    placed = dtensors.mesh_placements_of(param)
    if entry is None:
        replicas = settings.divided
        if replicas is not None and is_divided(param.shape, len(replicas.ranks)):
            placed = dtensors.state_placements_of(param, replicas) or placed
        moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), (param.shape, placed))
        return {**moments, "weight_residual": (torch.Size([*param.shape, 2]), placed)}
    m = entry.matrices
    numbers = torch.Size([*m.shape[: m.row_dim], sum(map(m.all_moments, m.blocks))])
    return {
        "momentum_buffer": (
            param.shape,
            dtensors.state_placements_of(param, settings.process_group) or placed,
        ),
        "weight_residual": (torch.Size([*param.shape, 2]), placed),
        # Experts lie as the parameter's do; a rank has all numbers of each of its experts.
        "second_momentum_buffer": (numbers, dtensors.expert_placements_of(param, m.row_dim)),
    }


def zeros(
    key: str,
    param: Tensor,
    entry: Optional[Entry],
    group: Group,
    settings: Settings,
    device: Optional[torch.device] = None,
) -> Tensor:
    """A tensor of state as it begins, all zeros. To be called under ``no_grad``.

    Args:
        key: names the tensor.
        param, entry, settings: as in `expected_state`.
        group: the parameter's.
        device: for the memory; None is that of the parameter's local tensor.
    """
    dtype = {
        "momentum_buffer": momentum_dtype(group, param.dtype) or dtensors.grad_dtype(param),
        "second_momentum_buffer": torch.float32,
        "weight_residual": torch.uint8,
    }.get(key, moments_dtype(group, param.dtype))
    shape, placed = expected_state(param, entry, settings)[key]
    local = dtensors.local(param)
    if shape == param.shape and placed == dtensors.mesh_placements_of(param):
        local_shape, stride = tuple(local.shape), _dense_stride(param)  # in its memory order
        local_stride = _dense_stride(local)
    else:
        local_shape = tuple(shape) if placed is None else dtensors.local_shape(shape, placed)
        stride = dtensors.contiguous_stride(shape)
        local_stride = dtensors.contiguous_stride(local_shape)
    made = torch.empty_strided(
        local_shape, local_stride, dtype=dtype, device=device or local.device
    ).zero_()
    return made if placed is None else dtensors.dtensor_of(made, placed, shape, stride)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The stride that torch.zeros_like gives to a tensor like this one, by ``preserve_format``."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return torch.empty_like(like, memory_format=torch.preserve_format).stride()


def converted(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of state in a dtype and on a device, plain or a DTensor as before.

    Returns the given tensor where there is nothing to convert, as torch.optim does when it loads.
    """
    local = dtensors.local(value)
    if local.dtype == dtype and local.device == device:
        return value
    local = local.to(dtype=dtype, device=device)
    placed = dtensors.mesh_placements_of(value)
    if placed is None:
        return local
    return dtensors.dtensor_of(local, placed, value.shape, _dense_stride(value))


def check_state(
    group: Group,
    entries: Sequence[Optional[Entry]],
    state: Mapping[Tensor, Any],
    settings: Settings,
) -> None:
    """Checks that state fits the parameters as they are now; parameters may have been replaced."""
    for index, (param, entry) in enumerate(zip(group.params, entries)):
        param_state = state.get(param)  # `state[param]` would create it
        if param_state:
            expected = expected_state(param, entry, settings)
            check_tensors(param_state, expected, "state", group.name_of(index), param)


def check_tensors(
    param_state: Mapping[str, Any],
    expected: ExpectedState,
    source: str,
    name: str,
    param: Tensor,
) -> None:
    """Checks tensors of one parameter's state: kind of numbers, shape, mesh and placements.

    ``source`` says where the state is, and ``name`` which parameter's, for messages.
    """
    for key, (shape, placed) in expected.items():
        value = param_state.get(key)
        if value is None:
            continue
        where = f"{key} of {name} in the {source}"
        is_tensor = isinstance(value, Tensor)
        numbers, dtypes = "bf16, fp16, fp32 or fp64", set(FLOATING_DTYPES)
        if key == "weight_residual":
            numbers, dtypes = "bytes", {torch.uint8}
        elif param.is_complex():
            numbers, dtypes = "complex numbers", {torch.complex64, torch.complex128}
        if not is_tensor or value.dtype not in dtypes:
            actual = value.dtype if is_tensor else type(value).__name__
            raise ValueError(f"{where} is {actual}, no tensor of {numbers}")
        if value.layout != torch.strided or value.is_meta:
            actual = "on meta" if value.is_meta else f"sparse ({value.layout})"
            raise ValueError(f"{where} is {actual}; make it dense")
        if key == "weight_residual" and not dtensors.raw_local(value).is_contiguous():
            raise ValueError(f"{where} is not contiguous: make it so, by .contiguous()")
        if value.shape != shape:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in the {source}, "
                f"where {tuple(shape)} is needed"
            )
        if dtensors.mesh_placements_of(value) != placed:
            placement = "plain" if placed is None else f"{list(placed[1])} on {placed[0]}"
            remedy = "load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            if placed is None:  # as after unpickling, which brings no process group back
                remedy = f"give the process group again, optim.process_group = ..., or {remedy}"
            raise ValueError(
                f"{where} is {dtensors.describe(value)}, where it should be {placement}; {remedy}"
            )
