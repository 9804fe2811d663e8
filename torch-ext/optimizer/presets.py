"""The numbers of other Muons: one call that takes what their constructors take.

A preset returns the keyword arguments of `Muon`, groups included: its user changes one line::

    optimizer = Muon(**presets.torch_muon(matrices, lr=0.02))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from torch import Tensor

from . import validation
from .distributed import utils as dtensors
from .muon import Muon

Params = Iterable[Any]  # tensors, (name, tensor) pairs, or group dicts


def motif(params: Params, lr: Any = 1e-3, **arguments: Any) -> dict[str, Any]:
    """Motif's ``Muon``: classical momentum and the coefficients of `you`.

    Args:
        params: Motif's groups, with ``use_muon`` and ``names``.
        lr, arguments: of Motif's constructor, which are those of `Muon` here.
    """
    return {"params": list(params), "lr": lr, "ns_coefficients": "you", **arguments}


def torch_muon(params: Params, lr: Any = 1e-3, **arguments: Any) -> dict[str, Any]:
    """``torch.optim.Muon``: averaged momentum, one triple of coefficients for every step.

    torch divides by max(norm, eps); here eps is added to the norm of the matrix scaled to a largest
    magnitude of 1, so gradients below eps keep their direction.

    Args:
        params: tensors, (name, tensor) pairs, or groups, which may have the arguments below.
        lr: learning rate.
        arguments: ``weight_decay`` (0.1), ``momentum`` (0.95), ``nesterov`` (True),
            ``ns_coefficients`` (one (a, b, c), the quintic), ``eps`` (1e-7), ``ns_steps`` (5),
            ``adjust_lr_fn`` (None: the original scale).

    Raises:
        TypeError: an argument torch.optim.Muon does not have.
        ValueError: unknown ``adjust_lr_fn``.
    """
    unknown = arguments.keys() - _TORCH_DEFAULTS.keys()
    if unknown:
        raise TypeError(f"torch.optim.Muon has no argument {', '.join(sorted(unknown))}")
    given = {**_TORCH_DEFAULTS, **arguments}
    groups = []
    for group in _muon_groups(params):
        own = {key: group.pop(key) for key in _TORCH_DEFAULTS if key in group}
        groups.append({**group, **_from_torch({**given, **own})} if own else group)
    options = {"momentum_style": "ema", "none_grad": False}
    return {"params": groups, "lr": lr, **options, **_from_torch(given)}


_TORCH_DEFAULTS = {
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}


def _from_torch(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """torch's names and meanings to those of `Muon`."""
    own = dict(arguments)
    scale, triple, steps = own.pop("adjust_lr_fn"), own["ns_coefficients"], own["ns_steps"]
    if scale not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            f"adjust_lr_fn must be None, 'original' or 'match_rms_adamw', found {scale!r}"
        )
    own.update(
        adjust_lr=scale or "original",
        ns_coefficients=[tuple(triple)] * steps,
        ns_eps=own.pop("eps"),
    )
    return own


def keller_jordan(
    params: Params,
    lr: Any = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    process_group: Any = None,
) -> dict[str, Any]:
    """Keller Jordan's ``Muon``, ``SingleDeviceMuon``, ``MuonWithAuxAdam`` and their like.

    Averaged momentum, quintic, scale sqrt(max(1, rows/cols)), absent gradients count as zeros,
    convolutions read as (out, rest). Their scale comes from the two sides of the kernel in the
    source, which makes it 1: they get a group of their own, behind the one they came in.

    Args:
        params: tensors, or groups with ``use_muon`` as ``MuonWithAuxAdam`` takes them (there
            ``betas`` and ``eps`` are Adam's).
        process_group: the ranks that divide the work, all with the same parameters and averaged
            gradients; the source takes the default group, ``torch.distributed.group.WORLD``.

    Raises:
        ValueError: a convolution whose kernel is higher than wide, whose scale has no name here.
    """
    groups: list[dict[str, Any]] = []
    params = _as_list(params)
    for number, group in enumerate(_muon_groups(params)):
        if not group["use_muon"]:
            group["adamw_betas"] = group.pop("betas", (0.9, 0.95))
            group["adamw_eps"] = group.pop("eps", 1e-10)
            groups.append({"lr": 3e-4, "weight_decay": 0.0, **group})
            continue
        if _is_groups(params):
            group = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, **group}
        group = validation.normalize_group(group, f"param_groups[{number}]")
        is_convolution = [p.ndim == 4 for p in group["params"]]
        if any(p.ndim == 4 and p.shape[-2] > p.shape[-1] for p in group["params"]):
            raise ValueError("keller_jordan has no scale for a kernel higher than wide")
        groups.append(_subset(group, [not is_one for is_one in is_convolution]))
        if any(is_convolution):
            groups.append({**_subset(group, is_convolution), "adjust_lr": "none"})
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
        "process_group": process_group,
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


def dion(
    params: Params,
    distributed_mesh: Any = None,
    lr: Any = 0.01,
    mu: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
    epsilon: float = 1e-8,
    nesterov: bool = False,
    adjust_lr: Optional[str] = "spectral_norm",
    flatten: bool = False,
    use_triton: bool = False,
) -> dict[str, Any]:
    """microsoft/dion's ``Muon``: classical momentum, the coefficients of `you`, spectral scale.

    Args:
        params: tensors, or groups with an ``algorithm``, ``"muon"`` (the default) or ``"adamw"``,
            and any of the arguments below (of AdamW's two betas, ``beta1`` and ``beta2``).
        distributed_mesh: a process group of replicas divides the work among them, as in the
            source; a mesh is left alone, since DTensors say how they are sharded.
        adjust_lr: ``"spectral_norm"``, ``"rms_norm"`` or None.
        flatten: tensors of more than two dimensions as (dim 0, rest). Without it the source takes
            them for stacked matrices: name those by ``expert_keys`` here.
        use_triton: left alone; kernels are used where they run.

    Raises:
        ValueError: an ``algorithm`` this package does not have (``"lion"``), an unknown scale.
    """
    given = {"mu": mu, "epsilon": epsilon, "adjust_lr": adjust_lr}
    given |= {"beta1": betas[0], "beta2": betas[1]}
    groups = []
    for group in _muon_groups(params):
        algorithm = group.pop("algorithm", "muon")
        if algorithm not in ("muon", "adamw"):
            raise ValueError(f"algorithm must be 'muon' or 'adamw', found {algorithm!r}")
        own = {key: group.pop(key) for key in given if key in group}
        groups.append({**group, "use_muon": algorithm == "muon", **_from_dion({**given, **own})})
    return {
        "params": groups,
        "lr": lr,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "flatten": flatten,
        "ns_coefficients": "you",
        "none_grad": False,
        "process_group": None if hasattr(distributed_mesh, "mesh") else distributed_mesh,
    }


_DION_SCALES = {"spectral_norm": "spectral", "rms_norm": "match_rms_adamw", None: "none"}


def _from_dion(given: Mapping[str, Any]) -> dict[str, Any]:
    """dion's names and meanings to those of `Muon`."""
    if given["adjust_lr"] not in _DION_SCALES:
        raise ValueError(
            f"adjust_lr must be 'spectral_norm', 'rms_norm' or None, found {given['adjust_lr']!r}"
        )
    return {
        "momentum": given["mu"],
        "adjust_lr": _DION_SCALES[given["adjust_lr"]],
        "ns_eps": given["epsilon"],
        "adamw_betas": (given["beta1"], given["beta2"]),
        "adamw_eps": given["epsilon"],
    }


class MuonAdamW(Muon):
    """nanochat's ``MuonAdamW``: Polar Express, factored second moment, cautious decay.

    Args:
        param_groups: groups with ``kind``: ``"muon"`` (``lr``, ``momentum``, ``ns_steps``,
            ``beta2``, ``weight_decay``; ``beta2=None`` means 0) or ``"adamw"`` (``lr``, ``betas``,
            ``eps``, ``weight_decay``). The keys stay live: schedules may set them at any time.
        options: further ones of `Muon`, such as ``ns_dtype``.

    The learning rate, decay and betas are not rounded to the parameters' dtype, and the momentum of
    each matrix is its own state entry.

    Raises:
        ValueError: an unknown ``kind``; whatever `Muon` raises.
    """

    def __init__(self, param_groups: list[dict[str, Any]], **options: Any):
        super().__init__(
            param_groups,
            ns_coefficients="polar_express",
            momentum_style="ema",
            adjust_lr="original",
            decay_lr="adjusted",
            cautious=True,
            none_grad=False,
            **options,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = dict(param_group)
        if group.get("kind") not in ("muon", "adamw"):
            raise ValueError(
                f"param_groups[{len(self.param_groups)}]: kind must be 'muon' or 'adamw', "
                f"found {group.get('kind')!r}"
            )
        group["use_muon"] = group["kind"] == "muon"
        super().add_param_group(group)

    def _defaults_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        own = {"beta2": 0.95} if group["use_muon"] else {"betas": (0.9, 0.95), "eps": 1e-8}
        return {**super()._defaults_of(group), **own}

    def _translate(self, group: dict[str, Any]) -> dict[str, Any]:
        if group["use_muon"] is True:  # nothing is validated yet
            return {**group, "beta2": 0.0 if group["beta2"] is None else group["beta2"]}
        return {**group, "adamw_betas": group.get("betas"), "adamw_eps": group.get("eps")}


class DistMuonAdamW(MuonAdamW):
    """nanochat's ``DistMuonAdamW``: `MuonAdamW` of replicas, in ZeRO-2, without a DDP wrapper.

    Every rank comes with the gradients of its own batch. ``step()`` averages them by
    reduce-scatter, each rank keeps the state of its rows, owners orthogonalize, updates are
    gathered. Counts of matrices, numbers of rows and sizes of groups are free.

    Args:
        param_groups: as for `MuonAdamW`, the same on all ranks.
        process_group: the ranks; None is all of them.

    Raises:
        ValueError: torch.distributed is not initialized; whatever `MuonAdamW` raises.
    """

    def __init__(
        self, param_groups: list[dict[str, Any]], process_group: Any = None, **options: Any
    ):
        if process_group is None:
            process_group = dtensors.world()
        super().__init__(param_groups, process_group=process_group, grad_reduce="mean", **options)


def _as_list(params: Params) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _is_groups(params: list[Any]) -> bool:
    return len(params) > 0 and isinstance(params[0], dict)


def _muon_groups(params: Params) -> list[dict[str, Any]]:
    """Copies of groups (Muon's unless they say otherwise), anything else as one Muon group."""
    params = _as_list(params)
    if _is_groups(params):
        return [{"use_muon": True, **group} for group in params]
    return [{"params": params, "use_muon": True}]


def _subset(group: Mapping[str, Any], chosen: Sequence[bool]) -> dict[str, Any]:
    """The group with only the chosen parameters and their names."""
    lists = {key: group[key] for key in ("params", "names", "param_names") if key in group}
    cut = {key: [x for x, keep in zip(each, chosen) if keep] for key, each in lists.items()}
    return {**group, **cut}
