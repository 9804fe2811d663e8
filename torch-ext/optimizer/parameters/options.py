"""Defines the options of a group and the settings of an optimizer: types and accepted values.

Their defaults are those of the arguments of `Muon`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Rational, Real
from typing import Any, Callable, NamedTuple, Optional, Union

import torch
from torch import Tensor

from .. import newton_schulz, split_notation
from ..distributed import agreement, hsdp
from ..distributed.replicas import Replicas
from ..weight_rounding import MODES as ROUNDINGS

# How parameters are read as matrices: facts of the model, which no checkpoint changes.
STRUCTURE = ("expert_keys", "split", "flatten")

# What torch's schedulers keep in groups, to go on from.
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")

FLOATING_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MOST_STEPS = 1000  # far above any use: more would take for ever, or no memory can list them


class Option(NamedTuple):
    """What an option may be."""

    accepts: Callable[[Any], bool]  # must not read a tensor on a device
    expected: str  # completes "… must be", in the error message

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError if the option, whose name is ``name``, does not accept the value."""
        if not self.accepts(value):
            raise ValueError(f"{name} must be {self.expected}, found {value!r}")


class DefaultSteps(int):
    """The default of ``ns_steps``, told apart from the same number given by the caller."""


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, of a kind that torch takes: no bool and no fraction."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    if isinstance(value, Rational) and not isinstance(value, Integral):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float is as large as
        return False


def is_int(value: Any) -> bool:
    """Whether a value is an integer. A bool, which Python counts among them, is none."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_learning_rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return False
        if value.device.type != "cpu":  # it stays unread: to read it would wait for the device
            return True
        value = value.item()
    # Schedules that end at zero may end a rounding error below it.
    return is_number(value) and value > -1e-12


def _is_split(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(
            isinstance(pattern, str) and not isinstance(counts, Mapping) and _is_split(counts)
            for pattern, counts in value.items()
        )
    if isinstance(value, str):  # `Group.validate` reads it
        return True
    counts = value if isinstance(value, (list, tuple)) else [value]
    return len(counts) > 0 and _are(counts, lambda count: is_int(count) and count > 0)


def _are(values: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(values, (list, tuple)) and all(map(accepts, values))


def one_of(*words: str) -> Option:
    listed = ", ".join(map(repr, words))
    return Option(lambda value: isinstance(value, str) and value in words, f"one of {listed}")


def _optional(accepts: Callable[[Any], bool], expected: str) -> Option:
    return Option(lambda value: value is None or accepts(value), f"None or {expected}")


def _optional_dtype(*dtypes: torch.dtype) -> Option:
    listed = ", ".join(map(str, dtypes))
    return _optional(
        lambda value: isinstance(value, torch.dtype) and value in dtypes, f"one of {listed}"
    )


_BOOL = Option(lambda value: isinstance(value, bool), "True or False")
_NONNEGATIVE = Option(lambda value: is_number(value) and value >= 0, "a finite number ≥ 0")
_FRACTION = Option(lambda value: is_number(value) and 0 <= value < 1, "a number in [0, 1)")
_OPTIONAL_DTYPE = _optional_dtype(torch.bfloat16, torch.float16, torch.float32, torch.float64)
# fp16 has no range for gradients: what is under 6e-8 would be lost on the way.
_OPTIONAL_WIRE = _optional_dtype(torch.bfloat16, torch.float32, torch.float64)


def _is(option: Option) -> Any:
    """A field of `Group` that is an option; its default is that of the argument of `Muon`."""
    return field(metadata={"option": option})


@dataclass(eq=False)
class Group:
    """A parameter group as the package reads it: a copy of one of torch's dicts, not validated yet.

    Args:
        params: the parameters; in the group of a checkpoint, the ids of their state.
        names: their names, in the same order, or None.
        where: what messages call the group.
        use_muon: whether Muon trains them, or AdamW.
        rounding_step: how many steps have drawn random numbers for ``weight_rounding``.

    The further fields are the options of a group, described in `Muon`.
    """

    params: list[Tensor]
    names: Optional[list[str]]
    where: str
    use_muon: bool
    rounding_step: int
    lr: Union[float, Tensor] = _is(
        Option(_is_learning_rate, "a finite number ≥ 0 or a tensor of one element")
    )
    momentum: float = _is(_FRACTION)
    nesterov: bool = _is(_BOOL)
    ns_steps: int = _is(
        Option(
            lambda value: is_int(value) and 0 < value <= MOST_STEPS,
            f"an int from 1 to {MOST_STEPS}",
        )
    )
    weight_decay: float = _is(_NONNEGATIVE)
    adamw_betas: tuple[float, float] = _is(
        Option(
            lambda value: _are(value, _FRACTION.accepts) and len(value) == 2,
            "two numbers in [0, 1)",
        )
    )
    adamw_eps: float = _is(_NONNEGATIVE)
    none_grad: bool = _is(_BOOL)
    adjust_lr: str = _is(one_of("match_rms_adamw", "original", "spectral", "none"))
    momentum_style: str = _is(one_of("classical", "ema"))
    ns_coefficients: newton_schulz.Coefficients = _is(
        Option(
            lambda value: isinstance(value, (str, list, tuple)),
            f"one of {', '.join(newton_schulz.FAMILIES)}, an (a, b, c), or a list of them",
        )
    )
    ns_algorithm: str = _is(one_of(*newton_schulz.ALGORITHMS))
    ns_dtype: Optional[torch.dtype] = _is(_OPTIONAL_DTYPE)
    ns_eps: float = _is(_NONNEGATIVE)
    ns_eps_absolute: Optional[float] = _is(_optional(*_NONNEGATIVE))
    ns_norm_factor: Optional[float] = _is(
        _optional(lambda value: is_number(value) and value > 0, "a finite number > 0")
    )
    ns_equilibrate: bool = _is(_BOOL)
    ns_renormalize: bool = _is(_BOOL)
    beta2: Optional[float] = _is(_optional(*_FRACTION))
    second_moment_side: str = _is(one_of("longer", "rows"))
    cautious: bool = _is(_BOOL)
    decay_lr: str = _is(one_of("base", "adjusted"))
    momentum_dtype: Optional[torch.dtype] = _is(_OPTIONAL_DTYPE)
    weight_rounding: str = _is(one_of(*ROUNDINGS))
    missing_grad: str = _is(one_of("raise", "zero"))
    expert_keys: Optional[Sequence[str]] = _is(
        _optional(
            lambda value: _are(value, lambda key: isinstance(key, str)), "a list of name components"
        )
    )
    split: Any = _is(
        Option(
            lambda value: value is None or _is_split(value),
            "None, a list of row counts, a number of rows, the notation of axes, or a mapping from "
            "name patterns to any of these",
        )
    )
    flatten: bool = _is(_BOOL)
    maximize: bool = _is(_BOOL)
    capturable: bool = _is(_BOOL)

    def name_of(self, index: int) -> str:
        """What messages call a parameter: its FQN, or its place in the groups."""
        return self.names[index] if self.names is not None else f"{self.where}['params'][{index}]"

    def takes_part(self, param: Tensor) -> bool:
        """Whether this step updates a parameter of the group."""
        return param.requires_grad and (param.grad is not None or self.missing_grad == "zero")

    def updates_in_fp32(self, dtype: torch.dtype) -> bool:
        """Whether weights of that dtype are updated in fp32, and rounded by `weight_rounding`."""
        return self.weight_rounding != "nearest" and dtype == torch.bfloat16

    def taking_part(self) -> list[Tensor]:
        """The parameters that this step updates."""
        zero = self.missing_grad == "zero"
        return [p for p in self.params if p.requires_grad and (zero or p.grad is not None)]

    def validate(self, changed: Optional[Collection[str]] = None) -> None:
        """Checks every option; a ValueError says its key, what was found and what is accepted.

        Args:
            changed: keys of the group that have changed since it was checked; None for all.
        """
        only = changed if changed is not None and _ALONE.issuperset(changed) else None
        for key, option in {"use_muon": _BOOL, **GROUP_OPTIONS}.items():
            if only is None or key in only:
                option.check(f"{self.where}: {key}", getattr(self, key))
        if only is not None:
            return
        if self.capturable and self.weight_rounding == "stochastic":
            raise ValueError(
                f"{self.where}: weight_rounding='stochastic' is not capturable, as a graph would "
                "replay the random numbers of one step; 'exact' is"
            )
        try:
            newton_schulz.resolve(self.ns_coefficients, self.ns_steps)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None
        splits = self.split.values() if isinstance(self.split, Mapping) else [self.split]
        try:
            for split in splits:
                if isinstance(split, str):
                    split_notation.parse(split)
        except ValueError as error:
            raise ValueError(f"{self.where}: split {error}") from None


def _options_of(dataclass_type: Any) -> dict[str, Option]:
    return {f.name: f.metadata["option"] for f in fields(dataclass_type) if f.metadata}


GROUP_OPTIONS = _options_of(Group)

# Keys that schedules change, and of which no other check depends.
_ALONE = frozenset({"lr", "weight_decay", "momentum", "rounding_step"})


def checked_keys(group: Mapping[str, Any]) -> dict[str, Any]:
    """What `changed_keys` compares with the group later; lists may be changed in place."""
    return {
        key: copy.deepcopy(value)
        if key in GROUP_OPTIONS and not isinstance(value, Tensor)
        else value
        for key, value in group.items()
        if key != "params"
    }


def changed_keys(group: Mapping[str, Any], checked: Mapping[str, Any]) -> list[str]:
    """The keys of a group, but ``params``, whose values are others than when it was checked."""
    changed = []
    for key, value in group.items():
        if key == "params":
            continue
        before = checked.get(key, checked)  # itself is no value of it
        is_same = value is before or (key in GROUP_OPTIONS and _is_equal(value, before))
        # The number in a tensor may have changed.
        if not is_same or (key == "lr" and isinstance(value, Tensor)):
            changed.append(key)
    return changed


def _is_equal(value: Any, before: Any) -> bool:
    try:
        return (
            type(value) is type(before) and not isinstance(value, Tensor) and bool(value == before)
        )
    except Exception:  # of garbage, which is refused when it is checked
        return False


def settle_steps(group: dict[str, Any], is_explicit: bool) -> None:
    """Lets coefficients that were made for a count of iterations set ``ns_steps`` where the caller
    has not set that explicitly."""
    coefficients, families = group.get("ns_coefficients"), newton_schulz.FAMILIES
    is_list = isinstance(coefficients, (list, tuple)) and not newton_schulz.is_triple(coefficients)
    if not is_explicit and is_list and coefficients:
        group["ns_steps"] = len(coefficients)
    elif not is_explicit and isinstance(coefficients, str) and coefficients in families:
        group["ns_steps"] = families[coefficients].steps
    elif "ns_steps" in group and isinstance(group["ns_steps"], DefaultSteps):
        group["ns_steps"] = int(group["ns_steps"])  # checkpoints must not hold our classes


@dataclass(frozen=True)
class Settings:
    """Options that hold for all groups; the constructor's arguments of these names.

    Ranks compare these options, and of a process group its ranks.
    """

    debug: bool = _is(_BOOL)
    warmup_step: int = _is(Option(lambda value: is_int(value) and value >= 0, "an int ≥ 0"))
    chunk_size: int = _is(
        Option(lambda value: is_int(value) and (value == -1 or value >= 1), "-1 or an int ≥ 1")
    )
    use_distributed_muon: bool = _is(_BOOL)
    comm_dtype: Optional[torch.dtype] = _is(_OPTIONAL_WIRE)
    consistency_check: str = _is(
        Option(lambda value: value in agreement.CHECKS, f"one of {agreement.CHECKS}")
    )
    hsdp: str = _is(Option(lambda value: value in hsdp.MODES, f"one of {hsdp.MODES}"))
    staging_bytes: Optional[int] = _is(
        # `is_number` is False for an int that no float is as large as.
        _optional(lambda value: is_int(value) and is_number(value) and value > 0, "an int > 0")
    )
    triton: bool = _is(_BOOL)
    process_group: Optional[Replicas] = _is(
        _optional(lambda value: isinstance(value, Replicas), "Replicas")
    )
    grad_reduce: Optional[str] = _is(
        Option(lambda value: value in (None, "mean"), "one of None or 'mean'")
    )
    streams: bool = False  # no argument: whether state comes from the host, which a method turns on

    @property
    def replicas(self) -> Optional[agreement.Ranks]:
        """The ranks of the process group, ascending."""
        return None if self.process_group is None else tuple(sorted(self.process_group.ranks))

    @property
    def divided(self) -> Optional[Replicas]:
        """The ranks that divide all state by rows, AdamW's too, and average gradients: ZeRO-2."""
        return self.process_group if self.grad_reduce is not None else None

    def validate(self) -> None:
        """Checks these options, as `Group.validate` does those of a group."""
        for key, option in SETTINGS.items():
            option.check(key, getattr(self, key))
        if self.process_group is not None:
            self.process_group.check_alive()
        elif self.grad_reduce is not None:
            raise ValueError(
                f"grad_reduce={self.grad_reduce!r} averages gradients over a process group: give "
                "process_group, for example torch.distributed.group.WORLD, which is None before "
                "init_process_group. One that was pickled has lost it: optim.process_group = ..."
            )


SETTINGS = _options_of(Settings)

# Arguments of `Muon` that hold for all groups, and are refused as keys of one.
CONSTRUCTOR_ONLY = (*SETTINGS, "clip_config")
ARGUMENTS = frozenset({"params", *GROUP_OPTIONS, *CONSTRUCTOR_ONLY})


def is_exact(group: Group, settings: Settings) -> bool:
    """Whether the group is in exact mode: the same bits on every layout and machine."""
    return {group.ns_dtype, settings.comm_dtype} <= {torch.float32, torch.float64}
