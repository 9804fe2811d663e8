"""The tensors of state that each parameter has, described before memory for them is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ..distributed import utils as dtensors
from ..distributed.plan import Entry
from ..distributed.zero2 import is_divided
from ..parameters.options import FLOATING_DTYPES, Group, Settings

# The tensors that can be large, unlike AdamW's ``step``, which is one number.
KEYS = ("momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq")

# These may have another dtype than their parameter, and are loaded in the one they were saved in.
OWN_DTYPE = ("momentum_buffer", "second_momentum_buffer")


# Shape and layout of tensors of state, by their keys.
ExpectedState = dict[str, tuple[torch.Size, Optional[tuple]]]


@dataclass(frozen=True)
class Spec:
    """One tensor of state, of which this rank holds a part that fills its memory densely."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: Optional[tuple]  # mesh and placements of a DTensor; None for a plain tensor
    held_shape: tuple[int, ...]  # of this rank's part
    held_stride: tuple[int, ...]
    device: torch.device  # of the parameter's local tensor


def keys_of(group: Group) -> tuple[str, ...]:
    """The tensors of state that every trainable parameter of a group has."""
    if not group.use_muon:
        return ("exp_avg", "exp_avg_sq")
    if group.beta2 is None:
        return ("momentum_buffer",)
    return ("momentum_buffer", "second_momentum_buffer")


def expected_state(param: Tensor, entry: Optional[Entry], settings: Settings) -> ExpectedState:
    """Every tensor that a parameter's state can have; cheap enough for a step.

    Args:
        param: the parameter.
        entry: of a Muon parameter; None of AdamW's.
        settings: says which replicas divide state.
    """
    layout = dtensors.mesh_placements_of(param)
    if entry is None:
        replicas = settings.divided
        if replicas is not None and is_divided(param.shape, len(replicas.ranks)):
            layout = dtensors.state_placements_of(param, replicas) or layout
        return {"exp_avg": (param.shape, layout), "exp_avg_sq": (param.shape, layout)}
    m = entry.matrices
    numbers = torch.Size([*m.shape[: m.row_dim], m.long_sides])
    return {
        "momentum_buffer": (
            param.shape,
            dtensors.state_placements_of(param, settings.process_group) or layout,
        ),
        # Experts lie as the parameter's do, each with all its numbers.
        "second_momentum_buffer": (numbers, dtensors.expert_placements_of(param, m.row_dim)),
    }


def specs_of(
    param: Tensor, entry: Optional[Entry], group: Group, settings: Settings
) -> dict[str, Spec]:
    """The tensors of state that a parameter has, by their keys. To be called under ``no_grad``."""
    dtypes = {
        "momentum_buffer": group.momentum_dtype or dtensors.grad_dtype(param),
        "second_momentum_buffer": torch.float32,
        "exp_avg": param.dtype,
        "exp_avg_sq": param.dtype,
    }
    expected, held, specs = expected_state(param, entry, settings), dtensors.local(param), {}
    for key in keys_of(group):
        shape, layout = expected[key]
        if (shape, layout) == (
            param.shape,
            dtensors.mesh_placements_of(param),
        ):  # then in its order, too
            part, stride, held_stride = tuple(held.shape), _dense_stride(param), _dense_stride(held)
        else:
            part = tuple(shape) if layout is None else dtensors.local_shape(shape, layout)
            stride = dtensors.contiguous_stride(shape)
            held_stride = dtensors.contiguous_stride(part)
        specs[key] = Spec(shape, stride, dtypes[key], layout, part, held_stride, held.device)
    return specs


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The stride that torch.zeros_like gives to a tensor like this one, by ``preserve_format``."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return torch.empty_like(like, memory_format=torch.preserve_format).stride()


def zeros(spec: Spec, device: Optional[torch.device] = None) -> Tensor:
    """This rank's part of state as it begins, all zeros; by default on the parameter's device."""
    held = torch.empty_strided(
        spec.held_shape, spec.held_stride, dtype=spec.dtype, device=device or spec.device
    ).zero_()
    if spec.layout is None:
        return held
    return dtensors.dtensor_of(held, spec.layout, spec.shape, spec.stride)


def place(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """State in a dtype and on a device, plain or a DTensor as before.

    Returns the given tensor where there is nothing to convert, as torch.optim does when it loads.
    """
    held = dtensors.local(value)
    if held.dtype == dtype and held.device == device:
        return value
    held = held.to(dtype=dtype, device=device)
    layout = dtensors.mesh_placements_of(value)
    if layout is None:
        return held
    return dtensors.dtensor_of(held, layout, value.shape, _dense_stride(value))


def check_state(
    group: Group,
    entries: Sequence[Optional[Entry]],
    state: Mapping[Tensor, Any],
    settings: Settings,
) -> None:
    """State fits the parameters as they are now, whatever was done to them since it was made."""
    for index, (param, entry) in enumerate(zip(group.params, entries)):
        own = state.get(param)  # `state[param]` would create it
        if own:
            expected = expected_state(param, entry, settings)
            check_tensors(own, expected, "state", group.name_of(index), param)


def check_tensors(
    state: Mapping[str, Any],
    expected: ExpectedState,
    place: str,
    name: str,
    param: Tensor,
) -> None:
    """Tensors of one parameter's state have its kind of numbers, and the shape and layout expected.

    ``place`` is where the state is, and ``name`` the parameter, for messages.
    """
    for key, (shape, layout) in expected.items():
        value = state.get(key)
        if value is None:
            continue
        where = f"{key} of {name} in the {place}"
        is_tensor = isinstance(value, Tensor)
        if not is_tensor or not (
            value.is_complex() if param.is_complex() else value.dtype in FLOATING_DTYPES
        ):
            found = value.dtype if is_tensor else type(value).__name__
            wanted = "complex numbers" if param.is_complex() else "bf16, fp16, fp32 or fp64"
            raise ValueError(f"{where} is {found}, no tensor of {wanted}")
        if value.layout != torch.strided or value.is_meta:
            found = "on meta" if value.is_meta else f"sparse ({value.layout})"
            raise ValueError(f"{where} is {found}; make it dense")
        if value.shape != shape:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in the {place}, "
                f"where {tuple(shape)} is needed"
            )
        if dtensors.mesh_placements_of(value) != layout:
            wanted = "plain" if layout is None else f"{list(layout[1])} on {layout[0]}"
            remedy = "load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            if layout is None:  # as after unpickling, which brings no process group back
                remedy = f"give the replicas' again, optim.process_group = ..., or {remedy}"
            raise ValueError(
                f"{where} is {dtensors.describe(value)}, where it should be {wanted}; {remedy}"
            )
