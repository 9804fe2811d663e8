"""Specifies a parameter's state tensors with shapes and dtypes; creates and checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import regions
from ..cpu_offload.placement import KEYS
from ..distributed import dtensors
from ..distributed.plan import Entry
from ..distributed.replicas import is_divided
from ..parameters.options import FLOATING_DTYPES, Group, Settings

# All keys of state: those of large tensors, and AdamW's ``step``, a single number.
ALL_KEYS = (*KEYS, "step")


class Spec(NamedTuple):
    """A tensor in a parameter's state.

    Args:
        shape: shape of the whole tensor.
        placed: mesh and placements; None for a plain tensor.
        dtype: None means the gradient's dtype for a new tensor, and any dtype for an existing one.
    """

    shape: torch.Size
    placed: Optional[tuple]
    dtype: Optional[torch.dtype]


def momentum_dtype(group: Group, dtype: torch.dtype) -> Optional[torch.dtype]:
    """The momentum's dtype for a parameter of ``dtype``; None as in `Spec`."""
    if group.momentum_dtype is None and group.updates_in_fp32(dtype):
        return torch.float32
    return group.momentum_dtype


def specs_of(
    param: Tensor, entry: Optional[Entry], group: Group, settings: Settings
) -> dict[str, Spec]:
    """Specs of a trainable parameter's state, by key.

    Args:
        param: the parameter.
        entry: its entry if it is Muon's; None if it is AdamW's.
        group: its group, whose options decide on keys and dtypes.
        settings: says which replicas divide state.
    """
    own = dtensors.mesh_placements_of(param)
    replicas = settings.zero2_replicas if entry is None else settings.replicas
    if entry is None and replicas is not None and not is_divided(param.shape, len(replicas.ranks)):
        replicas = None
    divided = dtensors.state_placements_of(param, replicas) or own
    in_fp32 = group.updates_in_fp32(param.dtype)
    if entry is None:
        moment = Spec(param.shape, divided, torch.float32 if in_fp32 else param.dtype)
        specs = {"exp_avg": moment, "exp_avg_sq": moment}
    else:
        dtype = momentum_dtype(group, param.dtype)
        specs = {"momentum_buffer": Spec(param.shape, divided, dtype)}
        if group.beta2 is not None:
            m = entry.matrices
            numbers = torch.Size([*m.shape[: m.row_dim], sum(map(m.all_moments, m.blocks))])
            # Divided by experts like the parameter; a rank has all numbers of each of its experts.
            by_experts = dtensors.expert_placements_of(param, m.row_dim)
            specs["second_momentum_buffer"] = Spec(numbers, by_experts, torch.float32)
    if in_fp32 and group.weight_rounding == "exact":
        pairs = torch.Size([*param.shape, 2])  # two bytes for each element
        placed = divided if entry is None else own
        specs["weight_residual"] = Spec(pairs, placed, torch.uint8)
    return specs


def zeros(spec: Spec, param: Tensor, device: Optional[torch.device] = None) -> Tensor:
    """Creates a state tensor of zeros for a parameter. Call it under ``no_grad``.

    Args:
        device: where to allocate it; None means the device of the parameter's local tensor.
    """
    shape, placed, dtype = spec
    local = dtensors.local(param)
    if shape == param.shape and placed == dtensors.mesh_placements_of(param):
        local_shape, stride = tuple(local.shape), _dense_stride(param)  # in its memory order
        local_stride = _dense_stride(local)
    else:
        local_shape = tuple(shape) if placed is None else dtensors.local_shape(shape, placed)
        stride = dtensors.contiguous_stride(shape)
        local_stride = dtensors.contiguous_stride(local_shape)
    dtype, device = dtype or dtensors.grad_dtype(param), device or local.device
    made = torch.empty_strided(local_shape, local_stride, dtype=dtype, device=device).zero_()
    return made if placed is None else dtensors.dtensor_of(made, placed, shape, stride)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The stride of ``torch.zeros_like(tensor, memory_format=torch.preserve_format)``."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return torch.empty_like(like, memory_format=torch.preserve_format).stride()


def converted(value: Tensor, dtype: Optional[torch.dtype], device: torch.device) -> Tensor:
    """Converts a state tensor to a device and, unless None, a dtype; a DTensor stays one.

    Returns the tensor itself if there is nothing to convert, as torch.optim does when it loads.
    """
    local = dtensors.local(value)
    dtype = dtype or local.dtype
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
    """Checks that state fits the current parameters, which may have been replaced."""
    for index, (param, entry) in enumerate(zip(group.params, entries)):
        param_state = state.get(param)  # `state[param]` would create it
        if param_state:
            specs = specs_of(param, entry, group, settings)
            check_tensors(param_state, specs, "state", group.name_of(index))


def check_tensors(
    param_state: Mapping[str, Any], specs: Mapping[str, Spec], source: str, name: str
) -> None:
    """Checks one parameter's state tensors: kind of numbers, shape, mesh, and placements.

    Messages say where the state is (``source``) and which parameter it belongs to (``name``).
    """
    for key, spec in specs.items():
        value = param_state.get(key)
        if value is None:
            continue
        where = f"{key} of {name} in the {source}"
        numbers, dtypes = "bf16, fp16, fp32 or fp64", {*FLOATING_DTYPES}
        if spec.dtype == torch.uint8:
            numbers, dtypes = "bytes", {torch.uint8}
        elif spec.dtype is not None and spec.dtype.is_complex:
            numbers, dtypes = "complex numbers", {torch.complex64, torch.complex128}
        is_tensor = isinstance(value, Tensor)
        if not is_tensor or value.dtype not in dtypes:
            actual = value.dtype if is_tensor else type(value).__name__
            raise ValueError(f"{where} is {actual}, but must be a tensor of {numbers}")
        if value.layout != torch.strided or value.is_meta:
            actual = "on meta" if value.is_meta else f"sparse ({value.layout})"
            raise ValueError(f"{where} is {actual}; make it dense")
        local = dtensors.raw_local(value)
        if spec.dtype == torch.uint8 and not local.is_contiguous():
            raise ValueError(f"{where} is not contiguous: call .contiguous() on it")
        if value.shape != spec.shape:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in the {source}, "
                f"where {tuple(spec.shape)} is needed"
            )
        if not dtensors.is_placed(value, spec.placed):
            remedy = "load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            if spec.placed is None:  # as after unpickling, which doesn't restore process groups
                placement = "plain"
                remedy = f"give the process group again, optim.process_group = ..., or {remedy}"
            else:
                placement = f"{list(spec.placed[1])} on {spec.placed[0]}"
            raise ValueError(
                f"{where} is {dtensors.describe(value)}, where it should be {placement}; {remedy}"
            )
        # Kernels rely on the size of this rank's part of a DTensor.
        if spec.placed is not None:
            needed = dtensors.local_shape(spec.shape, spec.placed)
            if not regions.is_same_shape(local.shape, needed):
                raise ValueError(
                    f"{where} has local shape {tuple(local.shape)} on this rank, where "
                    f"{tuple(needed)} is needed"
                )


def divided_rows(own: Mapping[str, Any]) -> Optional[Tensor]:
    """This rank's rows of a parameter's momentum or first moment, if replicas divide it."""
    for key in ("momentum_buffer", "exp_avg"):
        value = own.get(key)
        if value is not None and dtensors.is_dtensor(value) and value.placements[0].is_shard():
            return dtensors.local(value)
    return None
