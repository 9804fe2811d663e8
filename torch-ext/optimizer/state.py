"""What state there is: which tensors a parameter has beside it, known before there is memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from .distributed import utils as dtensors
from .distributed.plan import Entry
from .distributed.replicas import Replicas
from .distributed.zero2 import is_divided
from .options import Group, OptimizerWide

# The tensors that can be large. AdamW's ``step``, one number, is none of them.
KEYS = ("momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq")

# May be wider or narrower than their parameter, and are loaded as they were saved.
OWN_DTYPE = ("momentum_buffer", "second_momentum_buffer")


@dataclass(frozen=True)
class Spec:
    """One tensor of state, of which this rank holds a part that fills its memory densely.

    Args:
        shape: of the whole tensor.
        stride: of the whole tensor.
        dtype: of its elements.
        layout: mesh and placements of a DTensor; None for a plain tensor.
        held_shape: of this rank's part.
        held_stride: of this rank's part.
        device: of the parameter's local tensor.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: Optional[tuple]
    held_shape: tuple[int, ...]
    held_stride: tuple[int, ...]
    device: torch.device


def keys_of(group: Group) -> tuple[str, ...]:
    """The tensors of state that every trainable parameter of a group has."""
    if not group.use_muon:
        return ("exp_avg", "exp_avg_sq")
    if group.beta2 is None:
        return ("momentum_buffer",)
    return ("momentum_buffer", "second_momentum_buffer")


def layouts_of(
    param: Tensor, entry: Optional[Entry], wide: OptimizerWide
) -> dict[str, tuple[torch.Size, Optional[tuple]]]:
    """Shape and layout of every tensor that a parameter's state can have; cheap enough for a step.

    Args:
        param: the parameter.
        entry: of a Muon parameter; None of AdamW's.
        wide: says which replicas divide state.
    """
    layout = dtensors.layout_of(param)
    if entry is None:
        moments = (param.shape, _rows_of_moments(param, wide.divided) or layout)
        return {"exp_avg": moments, "exp_avg_sq": moments}
    m = entry.matrices
    numbers = torch.Size([*m.shape[: m.row_dim], m.long_sides])
    return {
        "momentum_buffer": (
            param.shape,
            dtensors.state_layout(param, wide.process_group) or layout,
        ),
        # Experts lie as the parameter's do, each with all its numbers.
        "second_momentum_buffer": (numbers, dtensors.layout_by_expert(param, m.row_dim)),
    }


def _rows_of_moments(param: Tensor, replicas: Optional[Replicas]) -> Optional[tuple]:
    """Mesh and placements of AdamW's moments where replicas of a plain parameter divide them."""
    if replicas is None or not is_divided(param.shape, len(replicas.ranks)):
        return None
    return dtensors.state_layout(param, replicas)


def specs_of(
    param: Tensor, entry: Optional[Entry], group: Group, wide: OptimizerWide
) -> dict[str, Spec]:
    """The tensors of state that a parameter has, by their keys. To be called under ``no_grad``.

    Args:
        param: the parameter.
        entry: of a Muon parameter; None of AdamW's.
        group: the parameter's.
        wide: says which replicas divide state.
    """
    layouts = layouts_of(param, entry, wide)
    dtypes = {
        "momentum_buffer": group.momentum_dtype or dtensors.grad_dtype(param),
        "second_momentum_buffer": torch.float32,
        "exp_avg": param.dtype,
        "exp_avg_sq": param.dtype,
    }
    return {key: _spec(param, *layouts[key], dtypes[key]) for key in keys_of(group)}


def _spec(param: Tensor, shape: torch.Size, layout: Optional[tuple], dtype: torch.dtype) -> Spec:
    held = dtensors.local(param)
    if (shape, layout) == (param.shape, dtensors.layout_of(param)):  # then in the same order, too
        part, stride, held_stride = tuple(held.shape), _dense_stride(param), _dense_stride(held)
    else:
        part = tuple(shape) if layout is None else dtensors.part_shape(shape, layout)
        stride, held_stride = dtensors.contiguous_stride(shape), dtensors.contiguous_stride(part)
    return Spec(shape, stride, dtype, layout, part, held_stride, held.device)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The whole tensor's in torch.zeros_like, by ``preserve_format``."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return torch.empty_like(like, memory_format=torch.preserve_format).stride()


def make(spec: Spec, held: Tensor) -> Tensor:
    """State of this rank's part: that itself, or a DTensor of it. It stays on its device.

    Args:
        spec: of the state.
        held: of ``spec.held_shape`` and ``spec.dtype``.
    """
    if spec.layout is None:
        return held
    return dtensors.dtensor_of(held, spec.layout, spec.shape, spec.stride)


def zeros(spec: Spec) -> Tensor:
    """State as it begins, of which only this rank's part is made."""
    held = torch.empty_strided(
        spec.held_shape, spec.held_stride, dtype=spec.dtype, device=spec.device
    )
    return make(spec, held.zero_())


def place(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """State in a dtype and on a device, plain or a DTensor as before.

    The given tensor itself where there is nothing to convert, as torch.optim loads it.
    """
    held = dtensors.local(value)
    if held.dtype == dtype and held.device == device:
        return value
    held = held.to(dtype=dtype, device=device)
    layout = dtensors.layout_of(value)
    if layout is None:
        return held
    return dtensors.dtensor_of(held, layout, value.shape, _dense_stride(value))
