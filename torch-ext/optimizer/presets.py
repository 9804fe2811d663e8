"""The numbers of other Muons: one call that takes what their constructors take.

A preset returns the keyword arguments of `Muon`, groups included: its user changes one line::

    optimizer = Muon(**presets.torch_muon(matrices, lr=0.02))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .muon import Muon

Params = Iterable[Any]  # tensors, (name, tensor) pairs, or group dicts

# All of them keep p.grad, as their sources do.
_TORCH_ADJUST_LR = {None: "original", "original": "original", "match_rms_adamw": "match_rms_adamw"}


def motif(params: Params, lr: Any = 1e-3, **arguments: Any) -> dict[str, Any]:
    """Motif's ``Muon``: classical momentum and the coefficients of `you`.

    Args:
        params: Motif's groups, with ``use_muon`` and ``names``.
        lr, arguments: of Motif's constructor, which are those of `Muon` here.
    """
    return {"params": list(params), "lr": lr, "ns_coefficients": "you", **arguments}


def torch_muon(
    params: Params,
    lr: Any = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: Optional[str] = None,
) -> dict[str, Any]:
    """``torch.optim.Muon``: averaged momentum, one triple of coefficients for every step.

    torch divides by max(norm, eps); here eps is added to the norm of the matrix scaled to a largest
    magnitude of 1, so gradients below eps keep their direction.

    Raises:
        ValueError: unknown ``adjust_lr_fn``.
    """
    if adjust_lr_fn not in _TORCH_ADJUST_LR:
        raise ValueError(
            f"adjust_lr_fn must be None, 'original' or 'match_rms_adamw', found {adjust_lr_fn!r}"
        )
    return {
        "params": _muon_groups(params),
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_coefficients": [tuple(ns_coefficients)] * ns_steps,
        "ns_steps": ns_steps,
        "ns_eps": eps,
        "adjust_lr": _TORCH_ADJUST_LR[adjust_lr_fn],
        "momentum_style": "ema",
        "none_grad": False,
    }


def keller_jordan(
    params: Params, lr: Any = 0.02, weight_decay: float = 0.0, momentum: float = 0.95
) -> dict[str, Any]:
    """Keller Jordan's ``Muon``, ``SingleDeviceMuon`` and ``MuonWithAuxAdam``.

    Averaged momentum, quintic, scale sqrt(max(1, rows/cols)), absent gradients count as zeros,
    convolutions read as (out, rest). Their scale comes from the two sides of the kernel in the
    source, which makes it 1: they get a group of their own, behind the one they came in.

    Args:
        params: tensors, or groups with ``use_muon`` as ``MuonWithAuxAdam`` takes them (there
            ``betas`` and ``eps`` are Adam's).

    Raises:
        ValueError: a convolution whose kernel is higher than wide, whose scale has no name here.
    """
    groups: list[dict[str, Any]] = []
    for group in _muon_groups(params):
        if not group["use_muon"]:
            group["adamw_betas"] = group.pop("betas", (0.9, 0.95))
            group["adamw_eps"] = group.pop("eps", 1e-10)
            groups.append({"lr": 3e-4, "weight_decay": 0.0, **group})
            continue
        if _is_groups(params):
            group = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, **group}
        group["params"] = list(group["params"])
        convolutions = [p for p in group["params"] if p.ndim == 4]
        if any(p.shape[-2] > p.shape[-1] for p in convolutions):
            raise ValueError(
                "keller_jordan: a kernel higher than wide has a scale of its own there"
            )
        groups.append({**group, "params": [p for p in group["params"] if p.ndim != 4]})
        if convolutions:
            groups.append({**group, "params": convolutions, "adjust_lr": "none"})
    return {
        "params": groups,
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "ns_coefficients": "quintic",
        "adjust_lr": "original",
        "momentum_style": "ema",
        "missing_grad": "zero",
        "flatten": True,
        "none_grad": False,
    }


def moonlight(
    lr: Any = 1e-3,
    wd: float = 0.1,
    muon_params: Optional[Params] = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adamw_params: Optional[Params] = None,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
) -> dict[str, Any]:
    """Moonlight's ``Muon``, which LlamaFactory ships: classical momentum, quintic, 0.2·sqrt(max).

    Its AdamW adds eps to the root of the uncorrected second moment; this one is torch's, which
    corrects first. The two differ by what eps weighs in the first steps.
    """
    return {
        "params": [
            {"params": list(muon_params or ()), "use_muon": True},
            {"params": list(adamw_params or ()), "use_muon": False},
        ],
        "lr": lr,
        "weight_decay": wd,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_steps": ns_steps,
        "adamw_betas": adamw_betas,
        "adamw_eps": adamw_eps,
        "ns_coefficients": "quintic",
        "none_grad": False,
    }


class MuonAdamW(Muon):
    """nanochat's ``MuonAdamW``: Polar Express, factored second moment, cautious decay.

    Args:
        param_groups: groups with ``kind``: ``"muon"`` (``lr``, ``momentum``, ``ns_steps``,
            ``beta2``, ``weight_decay``; ``beta2=None`` means 0) or ``"adamw"`` (``lr``, ``betas``,
            ``eps``, ``weight_decay``). The keys stay live: schedules may set them at any time.

    The learning rate, decay and betas are not rounded to the parameters' dtype, and the momentum of
    each matrix is its own state entry.

    Raises:
        ValueError: an unknown ``kind``; whatever `Muon` raises.
    """

    def __init__(self, param_groups: list[dict[str, Any]]):
        super().__init__(
            param_groups,
            ns_coefficients="polar_express",
            momentum_style="ema",
            adjust_lr="original",
            decay_lr="adjusted",
            cautious=True,
            none_grad=False,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = dict(param_group)
        if group.get("kind") not in ("muon", "adamw"):
            raise ValueError(
                f"param_groups[{len(self.param_groups)}]: kind must be 'muon' or 'adamw', "
                f"found {group.get('kind')!r}"
            )
        group["use_muon"] = group["kind"] == "muon"
        if group["use_muon"]:
            group.setdefault("beta2", 0.95)
        else:
            group.setdefault("betas", (0.9, 0.95))
            group.setdefault("eps", 1e-8)
        super().add_param_group(group)

    def _read(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        if group["use_muon"]:
            return {**group, "beta2": group["beta2"] or 0.0}
        return {**group, "adamw_betas": group["betas"], "adamw_eps": group["eps"]}


def _is_groups(params: Params) -> bool:
    return isinstance(params, (list, tuple)) and len(params) > 0 and isinstance(params[0], dict)


def _muon_groups(params: Union[Params, Tensor]) -> list[dict[str, Any]]:
    """Copies of groups (Muon's unless they say otherwise), anything else as one Muon group."""
    if _is_groups(params):
        return [{"use_muon": True, **group} for group in params]
    tensors = [params] if isinstance(params, torch.Tensor) else list(params)
    return [{"params": tensors, "use_muon": True}]
