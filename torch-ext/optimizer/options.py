"""The hyperparameters of a parameter group: defaults, meaning of None, and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Rational, Real
from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor

from . import newton_schulz
from .distributed import agreement, hsdp
from .distributed.machine import Machine
from .distributed.replicas import Replicas

# How parameters are read as matrices: facts of the model, which no checkpoint changes.
STRUCTURE = ("expert_keys", "split", "flatten")

FLOATING_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ADJUST_LR = ("match_rms_adamw", "original", "spectral", "none")
MOMENTUM_STYLES = ("classical", "ema")
DECAY_LR = ("base", "adjusted")
MISSING_GRAD = ("raise", "zero")
NONFINITE = ("propagate", "skip")
MOST_STEPS = 1000  # far above any use: more would take for ever, or no memory can list them


@dataclass(frozen=True)
class Option:
    """One key of a parameter group.

    Args:
        default: value where neither the group nor the constructor gives one.
        accepts: whether a value is valid; must not read a tensor on a device.
        expected: completes "… must be", in the error message.
    """

    default: Any
    accepts: Callable[[Any], bool]
    expected: str


class DefaultSteps(int):
    """The default of ``ns_steps``, told apart from the same number given by the caller."""


def is_number(value: Any) -> bool:
    if not isinstance(value, Real) or _is_bool(value):
        return False
    if isinstance(value, Rational) and not isinstance(value, Integral):  # torch takes no fractions
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float is as large as
        return False


def _is_bool(value: object) -> bool:  # a number to Python, a mistake here
    return isinstance(value, bool)


def _at_least_zero(value: Any) -> bool:
    return is_number(value) and value >= 0


def _fraction(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


def _learning_rate(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return False
        if value.device.type != "cpu":  # its value stays unread: that would wait for the device
            return True
        value = value.item()
    # Schedules that end at zero may end a rounding error below it.
    return is_number(value) and value > -1e-12


def _betas(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_fraction, value))


def _none_or(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def _is_positive_int(value: Any) -> bool:
    return is_int(value) and value > 0


def is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not _is_bool(value)


def _are_keys(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(key, str) for key in value)


def _is_split(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _are_row_counts(v) for k, v in value.items())
    return _are_row_counts(value)


def _are_row_counts(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(map(_is_positive_int, value))
    return _is_positive_int(value)


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    listed = ", ".join(map(repr, words))
    return (lambda value: isinstance(value, str) and value in words), f"one of {listed}"


_BOOL = (lambda value: isinstance(value, bool), "True or False")
_NONNEGATIVE = (_at_least_zero, "a finite number ≥ 0")
_FRACTION = (_fraction, "a number in [0, 1)")
_OPTIONAL_DTYPE = (
    _none_or(lambda value: isinstance(value, torch.dtype) and value in FLOATING_DTYPES),
    "None or one of torch.bfloat16, torch.float16, torch.float32, torch.float64",
)


def _option(*option: Any) -> Any:
    """A field of `Group` that is described by an `Option` of these arguments."""
    return field(metadata={"option": Option(*option)})


@dataclass(eq=False)
class Group:
    """A parameter group as the package reads it: a view of one of torch's dicts, made by `Muon`.

    Nothing is validated when a view is made, and a view does not follow later changes of the dict.

    Args:
        params: the parameters; in the group of a checkpoint, the ids of their state.
        names: their names, in the same order, or None.
        use_muon: whether Muon trains them, or AdamW.

    The further fields are the options of a group, described in `Muon`.
    """

    params: list[Tensor]
    names: Optional[list[str]]
    use_muon: bool
    lr: Union[float, Tensor] = _option(
        1e-3, _learning_rate, "a finite number ≥ 0 or a tensor of one element"
    )
    momentum: float = _option(0.95, *_FRACTION)
    nesterov: bool = _option(True, *_BOOL)
    ns_steps: int = _option(
        DefaultSteps(5),
        lambda value: _is_positive_int(value) and value <= MOST_STEPS,
        f"an int from 1 to {MOST_STEPS}",
    )
    weight_decay: float = _option(0.1, *_NONNEGATIVE)
    adamw_betas: tuple[float, float] = _option((0.9, 0.95), _betas, "two numbers in [0, 1)")
    adamw_eps: float = _option(1e-8, *_NONNEGATIVE)
    none_grad: bool = _option(True, *_BOOL)
    adjust_lr: str = _option("match_rms_adamw", *_one_of(*ADJUST_LR))
    momentum_style: str = _option("classical", *_one_of(*MOMENTUM_STYLES))
    ns_coefficients: newton_schulz.Coefficients = _option(
        "polar_express",
        lambda value: isinstance(value, (str, list, tuple)),
        f"one of {', '.join(newton_schulz.FAMILIES)}, or a list of (a, b, c)",
    )
    ns_algorithm: str = _option("auto", *_one_of(*newton_schulz.ALGORITHMS))
    ns_norm: str = _option("frobenius", *_one_of(*newton_schulz.NORMS))
    ns_dtype: Optional[torch.dtype] = _option(None, *_OPTIONAL_DTYPE)
    ns_eps: float = _option(1e-7, *_NONNEGATIVE)
    beta2: Optional[float] = _option(None, _none_or(_fraction), "None or a number in [0, 1)")
    cautious: bool = _option(False, *_BOOL)
    decay_lr: str = _option("base", *_one_of(*DECAY_LR))
    momentum_dtype: Optional[torch.dtype] = _option(None, *_OPTIONAL_DTYPE)
    missing_grad: str = _option("raise", *_one_of(*MISSING_GRAD))
    nonfinite: str = _option("propagate", *_one_of(*NONFINITE))
    expert_keys: Optional[Sequence[str]] = _option(
        None, _none_or(_are_keys), "None or a list of name components"
    )
    split: Any = _option(
        None,
        _none_or(_is_split),
        "None, a list of row counts, a number of rows, or a mapping from name patterns to either",
    )
    flatten: bool = _option(False, *_BOOL)
    maximize: bool = _option(False, *_BOOL)
    capturable: bool = _option(False, *_BOOL)
    foreach: Optional[bool] = _option(
        None, _none_or(lambda value: isinstance(value, bool)), "None or a bool"
    )

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Group:
        """The view of a dict that has all keys; others of its keys are left out."""
        return cls(**{key: group[key] for key in cls.__dataclass_fields__})

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


GROUP_OPTIONS: dict[str, Option] = {
    each.name: each.metadata["option"] for each in fields(Group) if each.metadata
}


def settle_steps(group: dict[str, Any], given: bool) -> None:
    """Lets an explicit coefficient list set ``ns_steps`` where the caller has not ``given`` it."""
    coefficients = group.get("ns_coefficients")
    if not given and isinstance(coefficients, (list, tuple)) and coefficients:
        group["ns_steps"] = len(coefficients)
    elif "ns_steps" in group and isinstance(group["ns_steps"], DefaultSteps):
        group["ns_steps"] = int(group["ns_steps"])  # checkpoints must not hold our classes


def validate(group: Group, where: str) -> None:
    """Checks every hyperparameter of a group.

    Args:
        group: as the user has set it.
        where: how the error message names the group.

    Raises:
        ValueError: says the key, what was found and what is accepted.
    """
    if not isinstance(group.use_muon, bool):
        raise ValueError(f"{where}: use_muon must be True or False, found {group['use_muon']!r}")
    for key, option in GROUP_OPTIONS.items():
        value = getattr(group, key)
        if not option.accepts(value):
            raise ValueError(f"{where}: {key} must be {option.expected}, found {value!r}")
    if isinstance(group.lr, Tensor) and group.foreach and not group.capturable:
        raise ValueError(f"{where}: a tensor lr with foreach=True needs capturable=True")
    try:
        newton_schulz.resolve(group.ns_coefficients, group.ns_steps)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@dataclass(frozen=True)
class OptimizerWide:
    """Options that hold for all groups; the constructor's arguments of these names.

    ``process_group`` is known by its ranks, which all of them compare.
    """

    debug: bool
    warmup_step: int
    chunk_size: int
    use_distributed_muon: bool
    comm_dtype: Optional[torch.dtype]
    consistency_check: str
    hsdp: str
    machine: Optional[Machine]
    process_group: Optional[Replicas]
    grad_reduce: Optional[str]
    streams: bool = False  # state, from the host: no argument, but what a method turns on

    @property
    def divided(self) -> Optional[Replicas]:
        """The ranks that divide all state by rows, AdamW's too, and average gradients: ZeRO-2."""
        return self.process_group if self.grad_reduce is not None else None

    def validate(self) -> None:
        accepts, expected = _OPTIONAL_DTYPE
        if not accepts(self.comm_dtype):
            raise ValueError(f"comm_dtype must be {expected}, found {self.comm_dtype!r}")
        if self.consistency_check not in agreement.CHECKS:
            raise ValueError(
                f"consistency_check must be one of {agreement.CHECKS}, "
                f"found {self.consistency_check!r}"
            )
        if not is_int(self.chunk_size) or (self.chunk_size != -1 and self.chunk_size < 1):
            raise ValueError(f"chunk_size must be -1 or an int ≥ 1, found {self.chunk_size!r}")
        if not is_int(self.warmup_step) or self.warmup_step < 0:
            raise ValueError(f"warmup_step must be an int ≥ 0, found {self.warmup_step!r}")
        if self.hsdp not in hsdp.CHOICES:
            raise ValueError(f"hsdp must be one of {hsdp.CHOICES}, found {self.hsdp!r}")
        if not (self.machine is None or isinstance(self.machine, Machine)):
            raise ValueError(f"machine must be None or a Machine, found {self.machine!r}")
        if self.grad_reduce not in (None, "mean"):
            raise ValueError(
                f"grad_reduce must be one of None or 'mean', found {self.grad_reduce!r}"
            )
        if self.grad_reduce is not None and self.process_group is None:
            raise ValueError(
                f"grad_reduce={self.grad_reduce!r} averages gradients over a process group: give "
                "process_group, for example torch.distributed.group.WORLD, which is None before "
                "init_process_group. One that was pickled has lost it: optim.process_group = ..."
            )
        if self.process_group is not None:
            self.process_group.check_alive()
        for key in ("debug", "use_distributed_muon"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key} must be True or False, found {getattr(self, key)!r}")


def is_exact(group: Group, wide: OptimizerWide) -> bool:
    """Whether the group is in exact mode: the same bits on every layout and machine.

    Arithmetic and wire have to be given as fp32 or fp64. What None chooses is made for speed.
    """
    return {group.ns_dtype, wide.comm_dtype} <= {torch.float32, torch.float64}


# What a group can't have of its own.
OPTIMIZER_WIDE = (
    *(OptimizerWide.__dataclass_fields__.keys() - {"streams"}),
    "clip_config",
    "clip_mode",
)
