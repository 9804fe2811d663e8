"""Checks groups, keys, parameters, and gradients, and warns about likely mistakes.

Checks change nothing. They raise ValueError with the parameter's name, the problem, and what to do.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Optional

import torch
from torch import Tensor

from .. import newton_schulz, regions
from ..distributed import dtensors
from ..distributed.collectives import has_backend
from ..distributed.plan import Plan
from . import options
from .aliases import suggestion
from .names import counted, did_you_mean, matches
from .options import Group, Settings

_WRITE_THIS = (
    "Muon needs a list of parameter groups with use_muon. Use Muon.for_model(model, lr=…), which "
    'makes them, or write Muon([{"params": matrices, "use_muon": True}, {"params": others, '
    '"use_muon": False}])'
)


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Returns the constructor's ``params`` as a list of dicts.

    Raises:
        ValueError: if ``params`` are tensors, (name, tensor) pairs, or a single dict.
    """
    if isinstance(params, Iterable) and not isinstance(params, (Tensor, dict)):
        groups = list(params)
        if all(isinstance(group, dict) for group in groups):
            return groups
    raise ValueError(_WRITE_THIS)


def normalize_group(param_group: Any, where: str) -> dict[str, Any]:
    """Returns a copy of a group with a list as ``params``, and with ``names`` taken from pairs.

    ``param_names``, which torch's optimizers use, also serve as ``names``.

    Raises:
        ValueError: if there is no ``use_muon`` or ``params``, ``params`` is a set or has pairs for
            some parameters only, or ``names`` and ``param_names`` differ.
    """
    if not isinstance(param_group, dict) or "use_muon" not in param_group:
        raise ValueError(f"{where} has no use_muon=True or False: {_WRITE_THIS}")
    if not isinstance(param_group["use_muon"], bool):
        raise ValueError(
            f"{where} has use_muon={param_group['use_muon']!r}, which must be True or False: "
            f"{_WRITE_THIS}"
        )
    if "params" not in param_group:
        raise ValueError(f"{where} has no params: {_WRITE_THIS}")
    group = dict(param_group)
    params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    if isinstance(params, (set, frozenset)):
        raise ValueError(f"{where}: params is a set, which has no fixed order: use a list")
    params = list(params)
    shown = group.get("param_names")
    if shown is not None and group.setdefault("names", shown) != shown:
        raise ValueError(f"{where} has names and param_names that differ: keep one of them")
    pairs = [p for p in params if isinstance(p, tuple)]
    if pairs:
        if len(pairs) != len(params) or "names" in group:
            raise ValueError(
                f"{where} mixes (name, parameter) pairs with tensors or names: use pairs only"
            )
        if not all(len(p) == 2 and isinstance(p[0], str) for p in pairs):
            raise ValueError(f"{where}: pairs in params must be (name, parameter)")
        group["names"], params = map(list, zip(*pairs))
    return {**group, "params": params}


# Keys that any group may have besides options.
_NO_OPTIONS = ("params", "names", "param_names", "use_muon", "fused", "rounding_step")


def check_keys(group: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raises ValueError for keys that are options for all groups, or look like mistyped options.

    Other keys belong to the user. Lightning's monitors read a text under ``name``, and torchtitan
    sets ``fused`` in every group.
    """
    known = {*_NO_OPTIONS, *known}
    for key, value in group.items():
        if key in known or (key == "name" and isinstance(value, str)):
            continue
        if key in options.CONSTRUCTOR_ONLY:
            raise ValueError(f"{where} has {key!r}, which is for all groups: pass it to Muon(...)")
        instead = suggestion(key, known, cutoff=0.86)
        if instead is not None:
            raise ValueError(f"{where} has an unknown key {key!r}: {instead}")


def check_changed(
    groups: Sequence[Group],
    raw_groups: Sequence[Mapping[str, Any]],
    checked: Sequence[dict[str, Any]],
    defaults_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Checks what has changed in groups since their last check; returns copies for the next one."""
    now: list[dict[str, Any]] = []
    for number, (group, raw) in enumerate(zip(groups, raw_groups)):
        before = checked[number] if number < len(checked) else {}
        changed = options.changed_keys(raw, before)
        if changed or not before:
            group.validate(changed if before else None)
            if raw.keys() != {"params", *before}:
                check_keys(raw, defaults_of(raw), group.where)
            before = options.checked_keys(raw)
        now.append(before)
    return now


def without_unknown_keys(
    saved: Sequence[dict[str, Any]], known: Sequence[Iterable[str]]
) -> list[dict[str, Any]]:
    """Returns groups of a checkpoint without unknown keys, with one warning about those.

    ``known`` lists, for each group, its options and the keys of the optimizer's group.
    """
    always = {*_NO_OPTIONS, *options.SCHEDULED, "name"}
    unknown = {
        key: None for group, keys in zip(saved, known) for key in group.keys() - {*always, *keys}
    }
    if unknown:
        warnings.warn(
            "groups of the checkpoint have unknown keys, which are left out: "
            f"{', '.join(sorted(map(str, unknown)))}",
            stacklevel=2,
        )
    return [{k: v for k, v in group.items() if k not in unknown} for group in saved]


def check_params(group: Group, settings: Settings) -> None:
    """Checks a group's names and tensors; `survey` checks how matrices are read."""
    params, names, where = group.params, group.names, group.where
    replicas = settings.replicas if group.use_muon else settings.zero2_replicas
    if names is not None:
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise ValueError(f"{where}: names must be a list of str, found {names!r}")
        if len(names) != len(params):
            counts = f"{counted(names, 'name')} for {counted(params, 'parameter')}"
            remedy = "give each parameter one, in the same order"
            vectors = [param for param in params if getattr(param, "ndim", None) == 1]
            if group.use_muon and vectors and len(params) < len(names):
                remedy = (
                    "an engine seems to have flattened several matrices into one tensor, as "
                    "DeepSpeed's ZeRO and FSDP1 do. Muon needs the matrices: use fully_shard"
                )
            raise ValueError(f"{where} has {counts}: {remedy}")
    seen: set[int] = set()
    for index, param in enumerate(params):
        name = group.name_of(index)
        if id(param) in seen:
            raise ValueError(f"{name} is twice in {where}: list tied weights once")
        seen.add(id(param))
        _check_param(param, name, group.use_muon)
        if group.weight_rounding != "nearest" and param.dtype == torch.float16:
            raise ValueError(
                f"{name} is float16, but weight_rounding={group.weight_rounding!r} is for bfloat16 "
                "only, which 16 more bits extend to fp32: convert the model, or use "
                "weight_rounding='nearest'"
            )
        if replicas is None or dtensors.is_dtensor(param):
            continue
        if not has_backend(replicas.group, param.device):
            raise ValueError(
                f"{name} is on {param.device.type}, for which process_group has no backend: set "
                'one for each device, as in init_process_group("cpu:gloo,cuda:nccl")'
            )


def check_exact_weight(name: str, value: Any, param: Optional[Tensor]) -> None:
    """Checks an fp32 weight for a parameter; None stands for no parameter with a residual."""
    if param is None:
        raise ValueError(
            f"no trainable bfloat16 parameter with weight_rounding='exact' has the name {name!r}"
        )
    placed = dtensors.mesh_placements_of(param)
    if (
        not isinstance(value, Tensor)
        or (value.dtype, value.shape) != (torch.float32, param.shape)
        or not dtensors.is_placed(value, placed)
    ):
        raise ValueError(
            f"{name} needs a float32 tensor of shape {tuple(param.shape)}, "
            f"{dtensors.describe(param)}, as exact_weights() returns it"
        )


def check_unshared(group: Group, others: Iterable[Mapping[str, Any]]) -> None:
    """Checks that no parameter of the group is also in another group."""
    taken = {id(p): number for number, other in enumerate(others) for p in other["params"]}
    for index, param in enumerate(group.params):
        if id(param) in taken:
            raise ValueError(
                f"{group.name_of(index)} is already in param_groups[{taken[id(param)]}]: "
                "put every parameter into one group only"
            )


def _check_param(param: Any, name: str, use_muon: bool) -> None:
    if not isinstance(param, Tensor):
        raise ValueError(f"{name} is a {type(param).__name__}, but must be a tensor")
    if not (param.is_leaf or param.retains_grad):
        raise ValueError(
            f"{name} is not a leaf tensor and gets no gradient: pass the parameter that it was "
            "computed from"
        )
    if param.layout != torch.strided:
        raise ValueError(f"{name} is sparse ({param.layout}): make it dense with .to_dense()")
    held = dtensors.local(param)
    repeats = any(size > 1 and stride == 0 for size, stride in zip(held.shape, held.stride()))
    if repeats and held.numel() > 0 and param.requires_grad:  # as torch.Tensor.expand makes them
        raise ValueError(
            f"{name} has elements that share memory (strides {tuple(param.stride())}), which "
            "can't be updated separately: copy it with .clone()"
        )
    if use_muon and param.dtype not in options.FLOATING_DTYPES:
        raise ValueError(
            f"{name} has dtype {param.dtype}, but Muon's matrices must be bf16, fp16, fp32 or "
            "fp64: put it into a group with use_muon=False"
        )
    if not (param.dtype in options.FLOATING_DTYPES or param.is_complex()):
        raise ValueError(
            f"{name} has dtype {param.dtype}, which AdamW can't train: freeze or convert it"
        )
    try:
        dtensors.check_placements(param)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def check_list_operations(group: Group) -> None:
    """Tries a step's operations on copies of weights whose class overrides torch's operations."""
    for index, param in enumerate(group.params):
        held = dtensors.raw_local(param)
        if not param.requires_grad or type(held).__torch_dispatch__ is Tensor.__torch_dispatch__:
            continue
        try:
            copied = held.detach().clone()
            zeros = torch.zeros(held.shape, dtype=held.dtype, device=held.device)
            torch._foreach_add_([copied], [zeros])
            if group.use_muon:
                copied.as_strided(copied.shape, copied.stride()).data_ptr()
        except Exception as error:
            raise ValueError(
                f"{group.name_of(index)} is a {type(held).__name__}, which torch's foreach "
                f"operations can't update ({type(error).__name__}): freeze it, or use an optimizer "
                "of the library that made it"
            ) from error


def check_gradients(group: Group) -> None:
    """Checks that gradients are dense and placed like their parameters, which have memory."""
    zero = group.missing_grad == "zero"
    params: list[Any] = group.params
    grads: list[Any] = [param.grad for param in params]
    strided = torch.strided
    for index, (param, grad, held, held_grad) in enumerate(
        zip(params, grads, dtensors.raw_locals(params), dtensors.raw_locals(grads))
    ):
        if grad is None and not zero:
            continue
        has_memory = held.untyped_storage().nbytes() > 0 or held.numel() == 0
        if has_memory and (
            grad is None
            or (
                held_grad.shape == held.shape
                and grad.layout is strided
                and (grad is held_grad) is (param is held)
                and (
                    param is held
                    or grad._spec is param._spec  # as in FSDP2
                    or (
                        grad._spec.mesh is param._spec.mesh
                        and grad._spec.placements == param._spec.placements
                        and getattr(grad._spec, "shard_order", None)
                        == getattr(param._spec, "shard_order", None)
                    )
                )
            )
        ):
            continue
        _refuse_gradient(group, index)


def _refuse_gradient(group: Group, index: int) -> None:
    """Raises ValueError if a gradient doesn't fit; ignores false alarms of the quick check."""
    param, name = group.params[index], group.name_of(index)
    grad = param.grad
    if dtensors.lacks_memory(param) and param.requires_grad:
        what = "a gradient" if grad is not None else "missing_grad='zero'"
        raise ValueError(
            f"{name} has {what}, but its memory was freed: make the groups from the parameters "
            "that the model has outside its forward pass; set gradients of idle modules to None"
        )
    if grad is None:
        return
    if grad.layout != torch.strided:
        raise ValueError(
            f"{name} has a sparse gradient ({grad.layout}): make it dense, for example with "
            "nn.Embedding(..., sparse=False)"
        )
    if not dtensors.is_placed(grad, dtensors.mesh_placements_of(param)):
        write = (
            "p.grad.redistribute(p.device_mesh, p.placements). "
            "FSDP2 around tensor parallelism does it by itself"
        )
        if dtensors.unusual_shard_order(grad) is not None:  # redistribute wouldn't change it
            write = "distribute_tensor(p.grad.full_tensor(), p.device_mesh, p.placements)"
        raise ValueError(
            f"{name} is {dtensors.describe(param)} but its gradient {dtensors.describe(grad)}; "
            f"before step(): p.grad = {write}"
        )
    shape, grad_shape = dtensors.raw_local(param).shape, dtensors.raw_local(grad).shape
    if not regions.is_same_shape(shape, grad_shape):
        raise ValueError(
            f"{name} has shape {tuple(shape)} on this rank, but its gradient {tuple(grad_shape)}"
        )


def check_capturable(
    groups: Sequence[Group],
    plan: Plan,
    settings: Settings,
    use_of: Callable[[Tensor, bool], Any],
) -> None:
    """Checks that groups with ``capturable`` have no state in host memory and no traffic.

    ``use_of`` is `CPUOffload.destination`.
    """
    capturable = [group for group in groups if group.capturable]
    for group in capturable:
        for index, param in enumerate(group.params):
            if use_of(param, group.use_muon) is not None:
                raise ValueError(
                    f"the state of {group.name_of(index)} is in host memory, and CUDA graphs can't "
                    f"capture its copies: set capturable=False in {group.where}, or call "
                    "turn_off_cpu_offload()"
                )
        if settings.zero2_replicas is not None and len(settings.zero2_replicas.ranks) > 1:
            raise ValueError(
                f'{group.where}: grad_reduce="mean" averages gradients within the step, which CUDA '
                "graphs can't capture: set capturable=False"
            )
    for lane in plan.lanes if capturable else ():
        for entry in (plan.entries[unit.entry] for unit, _ in lane.owners):
            if groups[entry.group].capturable:
                raise ValueError(
                    f"{entry.name} is exchanged between ranks {list(lane.peers)}, which CUDA "
                    f"graphs can't capture: set capturable=False in {groups[entry.group].where}"
                )


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def warn(problem: str) -> None:
    """Warns, with the location of the first caller outside of this package and torch."""
    _, level = _caller_outside(_PACKAGE, os.path.dirname(torch.__file__))
    warnings.warn(problem, stacklevel=level)


def is_called_by(module: str) -> bool:
    """Returns True if the first caller outside of this package is in that module or package."""
    frame, _ = _caller_outside(_PACKAGE)
    return frame.f_globals.get("__name__", "").startswith(module)


def _caller_outside(*folders: str) -> tuple[FrameType, int]:
    """Returns the first frame outside of these folders, and its stacklevel for the caller."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    return frame, level


def warn_about_unmatched_split(split: Any, groups: Iterable[Group]) -> None:
    """Warns about name patterns that match no matrix."""
    names = [name for group in groups if group.use_muon for name in group.names or ()]
    for pattern in split if isinstance(split, Mapping) else ():
        if not any(matches(name, pattern) for name in names):
            warn(
                f"split: the pattern {pattern!r} matches no matrix{did_you_mean([pattern], names)}"
            )


def warn_about_overshoot(group: Group) -> None:
    """Warns if a schedule is so short that it leaves singular values far above 1."""
    family, steps = group.ns_coefficients, group.ns_steps
    if not group.use_muon or not isinstance(family, str):
        return
    largest = newton_schulz.overshoot(family, steps)
    if largest is not None:
        warn(
            f"{group.where}: the first {steps} steps of {family!r} leave singular values up to "
            f"{largest:.2f}; use all {len(newton_schulz.FAMILIES[family].triples)} or 'quintic'"
        )


def warn_about_no_gradients(groups: Sequence[Group]) -> bool:
    """Warns if a step trains nothing, or none of Muon's matrices; returns True if it warned."""
    trained = [p for group in groups for p in group.params if p.requires_grad]
    matrices = [p for group in groups if group.use_muon for p in group.params]
    if not trained:
        state = "frozen" if any(group.params for group in groups) else "missing: groups are empty"
        warn(
            f"step() trains nothing, as all parameters are {state}. Were they frozen after the "
            "groups were made, or was a generator of parameters exhausted? Make the groups and the "
            "optimizer from the parameters to train"
        )
    elif matrices and not any(p.requires_grad for p in matrices):
        warn(
            "step() trains no matrix with Muon, as all of them are frozen. If you train others "
            "instead, such as adapters, make the groups and the optimizer from those"
        )
    elif all(p.grad is None for p in trained):
        warn(
            "step() found no gradient on any parameter: nothing is updated. Were the groups made "
            "before the model was sharded or moved? Make them from the model's current parameters"
        )
    else:
        return False
    return True
