"""Presets: translate the constructor arguments of other Muons to arguments of `Muon`.

A preset returns keyword arguments of `Muon`, including the parameter groups, so that switching
changes one line::

    optim = Muon(**presets.torch_muon(matrices, lr=0.02))

A preset raises ValueError for an empty list of parameters, and for any argument or group key that
neither the source nor this package has, or that has no counterpart. Pass further options of `Muon`
to `Muon` itself. As in the source, gradients remain after a step (``none_grad=False``), except with
`motif`, which sets the matrices' gradients to None.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Optional

from torch import Tensor

from .distributed import dtensors, process_groups
from .muon import Muon
from .newton_schulz import FAMILIES
from .parameters import validation
from .parameters.aliases import suggestion
from .parameters.options import GROUP_OPTIONS, Group, is_int, is_number

__all__ = [
    "DistMuonAdamW",
    "MuonAdamW",
    "dion",
    "emerging_optimizers",
    "keller_jordan",
    "moonlight",
    "motif",
    "normuon",
    "torch_muon",
]


Params = Iterable[Any]  # tensors, (name, tensor) pairs, or group dicts


def motif(params: Params, lr: Any = 1e-3, **arguments: Any) -> dict[str, Any]:
    """Motif's ``Muon``: classical momentum and the coefficients ``"you"``.

    Args:
        params: Motif's groups, with ``use_muon`` and ``names``.
        lr: learning rate.
        arguments: any other argument of Motif's constructor; `Muon` has the same ones.
    """
    _check_arguments(arguments, "Motif's Muon", _arguments_of(Muon))
    groups = validation.as_groups(params)
    for number, group in enumerate(groups):
        _check_keys(group, number, "Motif's Muon", GROUP_OPTIONS)
    how = {"ns_coefficients": "you", "ns_options": {"eps_absolute": 1e-7}}
    return {"params": groups, "lr": lr, **how, **arguments}


def torch_muon(params: Params, lr: Any = 1e-3, **arguments: Any) -> dict[str, Any]:
    """``torch.optim.Muon``: averaged momentum, and one (a, b, c) for all iterations.

    torch divides a matrix by max(norm, eps). `Muon` adds eps to the norm of the matrix scaled to a
    largest magnitude of 1, so gradients smaller than eps keep their direction.

    Args:
        params: tensors, (name, tensor) pairs, or groups, whose keys may be the arguments below.
        lr: learning rate.
        arguments: ``weight_decay``, ``momentum``, ``nesterov``, ``ns_coefficients`` (one (a, b,
            c)), ``eps``, ``ns_steps``, and ``adjust_lr_fn``. There, None is the original scale, and
            ``"spectral_unclamped"`` is called ``"spectral"`` in this package.

    Raises:
        ValueError: if ``adjust_lr_fn`` is unknown.
    """
    source, muon_keys = "torch.optim.Muon", ["lr", *_TORCH_DEFAULTS]
    _check_arguments(arguments, source, muon_keys)
    groups = [_from_torch(g) for g in _muon_groups(params, source, muon_keys, GROUP_OPTIONS)]
    how = _from_torch({**_TORCH_DEFAULTS, **arguments})
    how["ns_options"] = {"eps": how.pop("ns_eps")}
    return {"params": groups, "lr": lr, "momentum_style": "ema", "none_grad": False, **how}


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
    """Translates torch's arguments to arguments of `Muon`."""
    renamed = {"eps": "ns_eps", "adjust_lr_fn": "adjust_lr"}
    translated = {renamed.get(key, key): value for key, value in arguments.items()}
    if "adjust_lr_fn" in arguments:
        scale = arguments["adjust_lr_fn"]
        _check_choice("adjust_lr_fn", scale, _TORCH_SCALES)
        translated["adjust_lr"] = _TORCH_SCALES[scale]
    return translated


_TORCH_SCALES = {None: "original", "original": "original", "match_rms_adamw": "match_rms_adamw"}
_TORCH_SCALES["spectral_unclamped"] = "spectral"


@process_groups.refuses_groups_before_init("process_group")
def keller_jordan(
    params: Params,
    lr: Any = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    process_group: Any = None,
    **unknown: Any,
) -> dict[str, Any]:
    """Keller Jordan's ``Muon``, ``SingleDeviceMuon``, ``MuonWithAuxAdam``, and their variants.

    Averaged momentum, the coefficients ``"quintic"``, and the scale sqrt(max(1, rows/cols)).
    Missing gradients count as zeros. Convolutions are read as (out, rest) and have their own group:
    the source computes their scale from the two sides of the kernel, so it is 1 unless the kernel
    is taller than wide.

    Args:
        params: tensors, or groups with ``use_muon`` as in ``MuonWithAuxAdam``, where ``betas`` and
            ``eps`` are Adam's.
        lr, weight_decay, momentum: hyperparameters of Muon's groups.
        process_group: the ranks that divide the work; all have the same parameters and averaged
            gradients. The source uses the default group, ``torch.distributed.group.WORLD``.

    Raises:
        ValueError: a convolution's kernel is taller than wide; no ``adjust_lr`` has its scale.
    """
    _check_arguments(unknown, "Keller Jordan's Muon", _arguments_of(keller_jordan))
    source, muon_keys = "Keller Jordan's Muon", {"lr", "weight_decay", "momentum"}
    adam_keys = {"lr", "weight_decay", "betas", "eps"}
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(_muon_groups(params, source, muon_keys, adam_keys)):
        if not group["use_muon"]:
            group["adamw_betas"] = group.pop("betas", (0.9, 0.95))
            group["adamw_eps"] = group.pop("eps", 1e-10)
            groups.append({"lr": 3e-4, "weight_decay": 0.0, **group})
            continue
        group = validation.normalize_group(group, f"param_groups[{number}]")
        if any(p.ndim == 4 and p.shape[-2] > p.shape[-1] for p in group["params"]):
            raise ValueError(
                f"param_groups[{number}] has a kernel higher than wide, whose scale in Keller "
                "Jordan's Muon has no counterpart: train it with AdamW"
            )
        groups.append(_subset(group, lambda p: p.ndim != 4))
        convolutions = _subset(group, lambda p: p.ndim == 4)
        if convolutions["params"]:
            groups.append({**convolutions, "adjust_lr": "none"})
    how: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
    if process_group is not None:
        how["process_group"] = process_group
    how.update(ns_coefficients="quintic", ns_options={"eps_absolute": 1e-7}, adjust_lr="original")
    how.update(momentum_style="ema", flatten=True, missing_grad="zero", none_grad=False)
    return {"params": groups, **how}


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
    **unknown: Any,
) -> dict[str, Any]:
    """Moonlight's ``Muon``, which LlamaFactory ships: classical momentum, ``"quintic"``,
    0.2·sqrt(max).

    Moonlight's AdamW adds eps to the root of the second moment before bias correction; this
    package's AdamW is torch's, which corrects first. The two differ by the weight of eps in the
    first steps.

    Args:
        lr, wd: learning rate and weight decay of both algorithms.
        muon_params: matrices for Muon.
        momentum, nesterov, ns_steps: as in `Muon`.
        adamw_params: parameters for AdamW.
        adamw_betas, adamw_eps: as in `Muon`.
    """
    _check_arguments(unknown, "Moonlight's Muon", _arguments_of(moonlight))
    matrices = [] if muon_params is None else _as_list(muon_params)
    others = [] if adamw_params is None else _as_list(adamw_params)
    if not matrices and not others:
        raise ValueError("Moonlight's Muon got empty lists of muon_params and adamw_params")
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    given = dict(lr=lr, weight_decay=wd, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
    given.update(adamw_betas=adamw_betas, adamw_eps=adamw_eps)
    how = dict(ns_coefficients="quintic", ns_options={"eps_absolute": 1e-7}, none_grad=False)
    return {"params": groups, **given, **how}


@process_groups.refuses_groups_before_init("distributed_mesh")
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
    cautious_wd: bool = False,
    use_polar_express: bool = False,
    use_gram_newton_schulz: bool = False,
    newton_schulz_func: Optional[Callable[..., Tensor]] = None,
    **unknown: Any,
) -> dict[str, Any]:
    """microsoft/dion's ``Muon``: classical momentum, the coefficients ``"you"``, spectral scale.

    Args:
        params: tensors, or groups. A group has ``algorithm``, ``"muon"`` (the default) or
            ``"adamw"``, or ``use_muon``; hyperparameters, with ``beta1`` and ``beta2`` instead of
            ``betas``; and ``num_heads`` or ``split_sizes``.
        distributed_mesh: a process group of replicas, which divide the work as in the source. A
            mesh has no effect, because DTensors say how they are sharded.
        lr, weight_decay, nesterov: as in `Muon`.
        mu: momentum.
        betas: AdamW's.
        epsilon: AdamW's eps, and Muon's ``ns_eps_absolute``.
        adjust_lr: ``"spectral_norm"``, ``"rms_norm"``, or None.
        flatten: True reads tensors with more than two dimensions as (dim 0, rest). Without it, the
            source reads them as stacked matrices; here, name those in ``expert_keys``.
        use_triton: has no effect; Triton kernels are used wherever they run.
        cautious_wd: True decays a weight only where it and its update agree in sign. Only matrices
            can have this: groups of AdamW need ``cautious_wd=False`` or no decay.
        use_polar_express: True uses the coefficients ``"polar_express"``, the default of later
            versions.

    Raises:
        ValueError: something has no counterpart (``newton_schulz_func``,
            ``use_gram_newton_schulz``, or an ``algorithm`` such as ``"lion"``), the scale is
            unknown, or a group has both ``num_heads`` and ``split_sizes``.
    """
    if newton_schulz_func or use_gram_newton_schulz:
        key = "newton_schulz_func" if newton_schulz_func else "use_gram_newton_schulz"
        raise ValueError(f"dion's {key} has no counterpart: leave it out")
    source = "dion's Muon"
    _check_arguments(unknown, source, _arguments_of(dion))
    defaults = {"mu": mu, "epsilon": epsilon, "adjust_lr": adjust_lr, "cautious_wd": cautious_wd}
    defaults |= {"beta1": betas[0], "beta2": betas[1], "num_heads": None, "split_sizes": None}
    keys = {"algorithm", "lr", "weight_decay", "nesterov", "flatten", *defaults}
    groups = _muon_groups(params, source, keys, keys)
    for number, group in enumerate(groups):
        where = f"param_groups[{number}]"
        algorithm = group.pop("algorithm", "muon" if group["use_muon"] else "adamw")
        _check_choice(f"{where}: algorithm", algorithm, ("muon", "adamw"))
        if algorithm == "muon" and not group["use_muon"]:
            raise ValueError(f"{where} has algorithm='muon' and use_muon=False: set one of them")
        values = {key: group.pop(key, default) for key, default in defaults.items()}
        _check_choice(f"{where}: adjust_lr", values["adjust_lr"], _DION_SCALES)
        group.update(momentum=values["mu"], cautious=values["cautious_wd"])
        group.update(adamw_betas=(values["beta1"], values["beta2"]), adamw_eps=values["epsilon"])
        group.update(adjust_lr=_DION_SCALES[values["adjust_lr"]], ns_eps_absolute=values["epsilon"])
        group["use_muon"] = algorithm == "muon"
        if algorithm == "muon":
            group["split"] = _dion_split(values["num_heads"], values["split_sizes"], where)
        elif values["cautious_wd"] and group.get("weight_decay", weight_decay):
            raise ValueError(f"{where}: AdamW has no cautious decay here: set cautious_wd=False")
    given = dict(lr=lr, weight_decay=weight_decay, nesterov=nesterov, flatten=flatten)
    if distributed_mesh is not None and not hasattr(distributed_mesh, "mesh"):
        given["process_group"] = distributed_mesh
    coefficients = "polar_express" if use_polar_express else "you"
    return {"params": groups, **given, "ns_coefficients": coefficients, "none_grad": False}


_DION_SCALES = {"spectral_norm": "spectral", "rms_norm": "match_rms_adamw", None: "none"}


def _dion_split(heads: Any, sizes: Any, where: str) -> Any:
    """Returns the ``split`` for dion's ``num_heads``, heads of equal rows, or ``split_sizes``."""
    if heads is None:
        return sizes
    if sizes is not None:
        raise ValueError(f"{where} has num_heads and split_sizes: set one of them")
    if not is_int(heads) or heads < 1:
        raise ValueError(f"{where}: num_heads must be an int ≥ 1, found {heads!r}")
    return f"([num_heads={heads}] rows) cols"


@process_groups.refuses_groups_before_init("distributed_mesh")
def normuon(
    params: Params,
    distributed_mesh: Any = None,
    lr: Any = 0.01,
    mu: float = 0.95,
    muon_beta2: float = 0.95,
    use_polar_express: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """microsoft/dion's ``NorMuon``: its ``Muon`` with a second moment for each row of a matrix.

    With sharded matrices, the source normalizes each shard separately; this package normalizes
    whole matrices.

    Args:
        params, distributed_mesh, lr, mu, use_polar_express, arguments: as in `dion`.
        muon_beta2: decay of the second moment, for all groups.
    """
    given = dion(params, distributed_mesh, lr, mu, use_polar_express=use_polar_express, **arguments)
    return {**given, "beta2": muon_beta2, "second_moment_side": "rows"}


def emerging_optimizers(
    params: Params,
    lr: Any = 3e-4,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    nesterov: bool = False,
    weight_decay_method: str = "decoupled",
    fp32_matmul_prec: str = "medium",
    coefficient_type: str = "quintic",
    num_ns_steps: int = 5,
    scale_mode: str = "spectral",
    extra_scale_factor: float = 1.0,
    use_syrk: bool = False,
    weight_update_hook: Any = None,
    **unknown: Any,
) -> dict[str, Any]:
    """``Muon`` of NVIDIA's Emerging-Optimizers, which Megatron-LM uses.

    Arguments and defaults are those of version 0.5.0a0 (20 August 2026); 0.4.0 has the same
    defaults. Averaged momentum, and the coefficients ``"you"``, which the source calls
    ``"quintic"``.

    Args:
        params: tensors, or groups with ``lr``, ``momentum``, and ``weight_decay``.
        fp32_matmul_prec, use_syrk: have no effect; ``ns_dtype`` of `Muon` sets the precision.
        coefficient_type: ``"simple"``, ``"quintic"``, ``"polar_express"`` (eight triples of its
            own), ``"cans"``, ``"cubic5"``, or ``"deepseekv4"``.
        num_ns_steps: iterations.
        scale_mode: ``"spectral"`` is ``sqrt(max(rows, cols))``, ``"shape_scaling"`` is
            ``sqrt(max(1, rows/cols))``, and ``"unit_rms_norm"`` is ``sqrt(rows/cols)``.
        extra_scale_factor: multiplies the update but not the decay. With ``"spectral"`` it becomes
            ``adjust_lr``; with other scales it multiplies the matrices' learning rates and divides
            their decays. The source suggests 0.2, or sqrt((1 − β)/(1 + β)) with AdamW's first β.

    Raises:
        ValueError: an unsupported ``weight_decay_method`` or ``weight_update_hook``;
            ``coefficient_type`` ``"aol"``, which flips the largest singular values in the source,
            or ``"custom"``; or more steps than ``"quintic"``, ``"cubic5"``, or ``"cans"`` have
            coefficients. The source then repeats them, or the last one, which diverges in 16-bit
            arithmetic.
    """
    source = "Emerging-Optimizers' Muon"
    _check_arguments(unknown, source, _arguments_of(emerging_optimizers))
    _check_choice("weight_decay_method", weight_decay_method, ("decoupled",))
    _check_choice("weight_update_hook", weight_update_hook, (None,))
    _check_choice("scale_mode", scale_mode, ("spectral", *_EMERGING_SCALES))
    if not is_number(extra_scale_factor) or extra_scale_factor <= 0:
        raise ValueError(f"extra_scale_factor must be a number > 0, found {extra_scale_factor!r}")
    groups = _muon_groups(params, source, {"lr", "momentum", "weight_decay"}, GROUP_OPTIONS)
    for group in groups if scale_mode != "spectral" and extra_scale_factor != 1 else ():
        if group["use_muon"]:
            group["lr"] = group.get("lr", lr) * extra_scale_factor
            group["weight_decay"] = group.get("weight_decay", weight_decay) / extra_scale_factor
    how = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
    how.update(adjust_lr=_EMERGING_SCALES.get(scale_mode, extra_scale_factor))
    how.update(ns_coefficients=_emerging_triples(coefficient_type, num_ns_steps))
    how.update(ns_steps=num_ns_steps, momentum_style="ema", none_grad=False)
    return {"params": groups, **how}


# Emerging-Optimizers' scale → ``adjust_lr``; for "spectral" it is ``extra_scale_factor``.
_EMERGING_SCALES = {"shape_scaling": "original", "unit_rms_norm": "spectral"}
# Emerging-Optimizers' coefficients → the family that has them, or the triples.
_EMERGING_COEFFICIENTS: dict[str, Any] = {
    "simple": "quintic",
    "quintic": "you",
    **{name: name for name in ("cans", "cubic5", "deepseekv4")},
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}


def _emerging_triples(coefficient_type: str, steps: int) -> Any:
    """Returns ``ns_coefficients``: a family's name, or one triple per iteration.

    As in the source, lists that are too short repeat their last triple, but not those that would
    then reverse updates or diverge.
    """
    _check_choice("coefficient_type", coefficient_type, _EMERGING_COEFFICIENTS)
    family = _EMERGING_COEFFICIENTS[coefficient_type]
    triples = FAMILIES[family].triples if isinstance(family, str) else family
    if family == "quintic" or (isinstance(family, str) and steps == len(triples)):
        return family
    if steps > len(triples) and coefficient_type in ("quintic", "cubic5", "cans"):
        raise ValueError(
            f"num_ns_steps={steps} would repeat coefficients of {coefficient_type!r}, which can "
            f"reverse updates or make them infinite: use at most {len(triples)}"
        )
    return triples[:steps] + triples[-1:] * (steps - len(triples))


class MuonAdamW(Muon):
    """nanochat's ``MuonAdamW``: Polar Express, factored second moment, cautious decay.

    nanochat's version of July 2026 also equilibrates rows before the iteration and renormalizes U
    after it. If torch.distributed is initialized, it works over all ranks as `DistMuonAdamW` does.

    Args:
        param_groups: groups with ``kind``: ``"muon"`` (``lr``, ``momentum``, ``ns_steps``,
            ``beta2``, ``weight_decay``; ``beta2=None`` means 0) or ``"adamw"`` (``lr``, ``betas``,
            ``eps``, ``weight_decay``). Schedules may change these keys at any time.
        version: version of nanochat's formulas, ``"2026-02"`` or ``"2026-07"``.
        options: further options of `Muon`, such as ``ns_dtype``.

    Unlike nanochat, it doesn't round the learning rate, decay, and betas to the parameters' dtype,
    and keeps a separate momentum buffer for each matrix.

    Raises:
        ValueError: unknown ``kind`` or ``version``; or anything that `Muon` raises.
    """

    def __init__(
        self, param_groups: list[dict[str, Any]], *, version: str = "2026-02", **options: Any
    ):
        _check_choice("version", version, _NANOCHAT_VERSIONS)
        if version == "2026-07" and dtensors.world_size() > 1:
            options = {"process_group": process_groups.world(), "grad_reduce": "mean", **options}
        fixed = {**_NANOCHAT, "ns_options": _NANOCHAT_VERSIONS[version]}
        for key in ("beta2", *_NANOCHAT_KEYS, *fixed):
            if key in options:
                raise ValueError(
                    f"{type(self).__name__} does not accept {key}, which nanochat fixes or sets in "
                    "groups: leave it out"
                )
        super().__init__(param_groups, **fixed, **options)

    @classmethod
    def for_model(cls, *_: Any, **__: Any) -> MuonAdamW:
        raise TypeError(
            f"{cls.__name__} needs nanochat's groups: recipes.nanochat(model) makes them"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        where, kind = f"param_groups[{len(self.param_groups)}]", param_group.get("kind")
        _check_choice(f"{where}: kind", kind, ("muon", "adamw"))
        for key, nanochat_key in _NANOCHAT_KEYS.items():
            if key in param_group:
                raise ValueError(f"{where} has {key!r}, which nanochat calls {nanochat_key!r}")
        super().add_param_group({**param_group, "use_muon": kind == "muon"})

    def _defaults_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {"beta2": 0.95} if group["use_muon"] else {"betas": (0.9, 0.95), "eps": 1e-8}
        return {**super()._defaults_of(group), **defaults}

    def _translate(self, group: dict[str, Any]) -> Group:
        if group["use_muon"] is True:  # nothing is validated yet
            options = {"beta2": 0.0 if group["beta2"] is None else group["beta2"]}
        else:
            options = {key: group.get(name) for key, name in _NANOCHAT_KEYS.items()}
        return super()._translate({**group, **options})


# nanochat's formulas as options. It divides the input of the iteration by factor·norm + eps.
_NANOCHAT: dict[str, Any] = {
    "ns_coefficients": "polar_express",
    "momentum_style": "ema",
    "adjust_lr": "original",
    "decay_lr": "adjusted",
    "cautious": True,
    "none_grad": False,
}
_NANOCHAT_VERSIONS: dict[str, dict[str, Any]] = {
    "2026-02": {"norm_factor": 1.02, "eps_absolute": 1e-6},
    "2026-07": {
        "norm_factor": 1.01,
        "eps_absolute": 1e-6,
        "equilibrate": True,
        "renormalize": True,
    },
}

# nanochat's names of options of AdamW's groups.
_NANOCHAT_KEYS = {"adamw_betas": "betas", "adamw_eps": "eps"}


class DistMuonAdamW(MuonAdamW):
    """nanochat's ``DistMuonAdamW``: `MuonAdamW` for replicas, in ZeRO-2, without a DDP wrapper.

    Every rank has the gradients of its own batch. ``step()`` averages them by reduce-scatter, and
    each rank keeps the state of its rows. Owners orthogonalize the matrices, and all ranks gather
    the updates.

    Args:
        param_groups: as for `MuonAdamW`, the same on all ranks.
        process_group: the replicas; None is all ranks.

    Raises:
        ValueError: torch.distributed isn't initialized; or anything that `MuonAdamW` raises.
    """

    def __init__(
        self, param_groups: list[dict[str, Any]], process_group: Any = None, **options: Any
    ):
        if process_group is None:
            process_group = process_groups.world()
        super().__init__(param_groups, process_group=process_group, grad_reduce="mean", **options)


def _muon_groups(
    params: Params, source: str, muon_keys: Collection[str], adamw_keys: Collection[str]
) -> list[dict[str, Any]]:
    """Copies groups, with ``use_muon=True`` by default; puts tensors or pairs into one Muon group.

    Raises ValueError for unknown keys.
    """
    params = _as_list(params)
    if not params:
        raise ValueError(f"{source} got an empty parameter list")
    if not isinstance(params[0], dict):
        return [{"params": params, "use_muon": True}]
    groups = [{"use_muon": True, **group} for group in params]
    for number, group in enumerate(groups):
        _check_keys(group, number, source, muon_keys if group["use_muon"] else adamw_keys)
    return groups


def _as_list(params: Params) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _arguments_of(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]


def _check_arguments(names: Iterable[str], source: str, valid: Collection[str]) -> None:
    for name in names:
        if name not in valid:
            raise ValueError(f"{source} has no argument {name!r}{_instead(name, valid)}")


# Keys for the contents of a group, which groups of all sources may have.
_CONTENTS = ("params", "names", "param_names", "use_muon", "expert_keys")


def _check_keys(group: Iterable[str], number: int, source: str, valid: Collection[str]) -> None:
    for key in set(group) - {*_CONTENTS, *valid}:
        instead = _instead(key, sorted(valid))
        raise ValueError(
            f"param_groups[{number}] has {key!r}, which isn't a key of such a group in {source}"
            f"{instead}. Set further options of this package, and keys of your own, on the groups "
            "that the preset returns"
        )


def _instead(word: str, valid: Collection[str]) -> str:
    """Suggests a replacement for an unknown word, and lists the valid ones."""
    instead = suggestion(word, valid)
    return f"{f' ({instead})' if instead else ''}; it has {', '.join(valid)}"


def _check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    if value not in [*choices]:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {listed}, found {value!r}")


def _subset(group: Mapping[str, Any], condition: Callable[[Tensor], bool]) -> dict[str, Any]:
    """Returns the group with only the parameters that meet a condition, and their names."""
    chosen = list(map(condition, group["params"]))
    keys = group.keys() & {"params", "names", "param_names"}
    return {**group, **{key: list(itertools.compress(group[key], chosen)) for key in keys}}
