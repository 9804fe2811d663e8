"""Declares every option once: its type, accepted values, and meaning.

`Group` has the options of a group, `Settings` the options for all groups. The arguments of `Muon`
give their defaults. Checks and messages come from these two classes, as do the tables of
docs/options.md (scripts/options_page.py).
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

# How parameters are read as matrices: properties of the model, which loading doesn't change.
STRUCTURE = ("expert_keys", "split", "flatten")

# Keys in which torch's schedulers keep their state.
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")

FLOATING_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
EXACT_DTYPES = (torch.float32, torch.float64)
_SCALES = ("match_rms_adamw", "original", "spectral", "none")
MOST_STEPS = 1000  # far more than useful, but not too many to run or list


class Option(NamedTuple):
    """The accepted values of an option, and its meaning."""

    accepts: Callable[[Any], bool]  # must not read a tensor on a device, which synchronizes
    expected: str  # completes "… must be", in the error message
    meaning: str = ""  # for docs/options.md

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError, with the option's name, if the option doesn't accept the value."""
        if not self.accepts(value):
            raise ValueError(f"{name} must be {self.expected}, found {value!r}")


class DefaultSteps(int):
    """The default of ``ns_steps``, distinguishable from the same number passed by the caller."""


def is_number(value: Any) -> bool:
    """Returns True for finite numbers that torch accepts: no bool and no Fraction."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    if isinstance(value, Rational) and not isinstance(value, Integral):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


def is_int(value: Any) -> bool:
    """Returns True for integers, but not for bool, which is an int in Python."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_learning_rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return False
        if value.device.type != "cpu":  # reading it would synchronize
            return True
        value = value.item()
    # Schedules that end at zero may end slightly below it, by rounding.
    return is_number(value) and value > -1e-12


def _is_split(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(
            isinstance(pattern, str) and not isinstance(counts, Mapping) and _is_split(counts)
            for pattern, counts in value.items()
        )
    if isinstance(value, str):  # `Group.validate` parses it
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
# fp16 lacks the range of gradients: it rounds numbers under 6e-8 to zero.
_OPTIONAL_WIRE = _optional_dtype(torch.bfloat16, torch.float32, torch.float64)


def _option(option: Option, meaning: str) -> Any:
    """Returns a field for an option; the argument of `Muon` gives its default."""
    return field(metadata={"option": option._replace(meaning=meaning)})


@dataclass(eq=False)
class Group:
    """A parameter group as the package reads it: a copy of one of torch's dicts, not validated yet.

    Args:
        params: the parameters; in groups of checkpoints, the ids of their state.
        names: the parameters' names, in the same order, or None.
        where: what messages call the group.
        use_muon: True if Muon trains the parameters, False if AdamW does.
        rounding_step: number of steps that have drawn random numbers for ``weight_rounding``.
    """

    params: list[Tensor]
    names: Optional[list[str]]
    where: str
    use_muon: bool
    rounding_step: int
    lr: Union[float, Tensor] = _option(
        Option(_is_learning_rate, "a finite number ≥ 0 or a tensor of one element"),
        "learning rate, a number or a tensor of one element",
    )
    momentum: float = _option(_FRACTION, "μ, the decay of the momentum buffer `B`")
    nesterov: bool = _option(
        _BOOL, 'True to orthogonalize `G + μB` (with `"ema"`, `(1−μ)G + μB`) instead of `B`'
    )
    ns_steps: int = _option(
        Option(
            lambda value: is_int(value) and 0 < value <= MOST_STEPS,
            f"an int from 1 to {MOST_STEPS}",
        ),
        "number of iterations",
    )
    weight_decay: float = _option(
        _NONNEGATIVE, "decoupled weight decay: `W ← W·(1 − lr·weight_decay)`"
    )
    adamw_betas: tuple[float, float] = _option(
        Option(
            lambda value: _are(value, _FRACTION.accepts) and len(value) == 2,
            "two numbers in [0, 1)",
        ),
        "AdamW's betas, for groups with `use_muon=False`",
    )
    adamw_eps: float = _option(_NONNEGATIVE, "AdamW's eps, for groups with `use_muon=False`")
    none_grad: bool = _option(
        _BOOL,
        "True to set `p.grad` of Muon's matrices to None as soon as `step()` has read it; ignored "
        "in groups with `capturable`",
    )
    adjust_lr: Union[str, float] = _option(
        Option(
            lambda value: value in _SCALES if isinstance(value, str) else _is_positive(value),
            f"one of {', '.join(map(repr, _SCALES))}, or a number > 0",
        ),
        "scale of the update. A number r means `r·sqrt(max(rows, cols))`, which gives updates a "
        'root mean square of about r. `"match_rms_adamw"` is r = 0.2, `"original"` is '
        '`sqrt(max(1, rows/cols))`, `"spectral"` is `sqrt(rows/cols)`, and `"none"` is 1',
    )
    momentum_style: str = _option(
        one_of("classical", "ema"), '`"classical"`: `B = μB + G`; `"ema"`: `B = μB + (1−μ)G`'
    )
    ns_coefficients: newton_schulz.Coefficients = _option(
        Option(
            lambda value: isinstance(value, (str, list, tuple)),
            f"one of {', '.join(newton_schulz.FAMILIES)}, an (a, b, c), or a list of them",
        ),
        "coefficients of the iterations: "
        + ", ".join(f'`"{family}"`' for family in newton_schulz.FAMILIES)
        + ", one triple (a, b, c) for all iterations, or a list of triples, whose length sets "
        "`ns_steps`",
    )
    ns_algorithm: str = _option(
        one_of(*newton_schulz.ALGORITHMS),
        '`"standard"` multiplies the whole matrix in every iteration. `"gram"` iterates on the '
        "shorter side and multiplies the whole matrix only at restarts and at the end. "
        '`"auto"` uses `"gram"` if the shorter side is at least 512 and enough FLOPs are saved; '
        "`summary()` shows the reason",
    )
    ns_dtype: Optional[torch.dtype] = _option(
        _OPTIONAL_DTYPE,
        "dtype of the iteration's arithmetic. None means fp16 on accelerators, bf16 on CPUs with "
        "bf16 instructions (avx512_bf16, AMX, Arm's bf16), fp32 on other CPUs and on MPS, and "
        "fp64 for fp64 weights. fp16 on CPUs is slow",
    )
    ns_eps: float = _option(
        _NONNEGATIVE,
        "epsilon added to the norm, after the matrix has been divided by its largest magnitude",
    )
    ns_eps_absolute: Optional[float] = _option(
        _optional(*_NONNEGATIVE[:2]),
        "epsilon added to the norm of the matrix itself, as in most other Muon implementations, so "
        "that smaller gradients lead to smaller updates",
    )
    ns_norm_factor: Optional[float] = _option(
        _optional(_is_positive, "a finite number > 0"),
        "factor that multiplies the norm. None means 1.02 for Polar Express, and 1 for other "
        "coefficients",
    )
    ns_equilibrate: bool = _option(
        _BOOL,
        "True to first scale each row of the stored matrix so that its norm is the root mean "
        "square of all row norms ([MuonEq](https://arxiv.org/abs/2603.28254), as in nanochat)",
    )
    ns_renormalize: bool = _option(
        _BOOL,
        "True to scale `U` to the Frobenius norm `sqrt(min(rows, cols))` "
        "([Muon+](https://arxiv.org/abs/2602.21545))",
    )
    beta2: Optional[float] = _option(
        _optional(*_FRACTION[:2]),
        "decay of the factored second moment (NorMuon); None turns it off",
    )
    second_moment_side: str = _option(
        one_of("longer", "rows"),
        'dimension of the second moment: `"longer"` stores one number per index of a matrix\'s '
        'longer side, as in nanochat; `"rows"` stores one per row, even for wide matrices, as in '
        "dion's NorMuon",
    )
    cautious: bool = _option(
        _BOOL, "True to decay a weight only where the update doesn't move it away from zero"
    )
    decay_lr: str = _option(
        one_of("base", "adjusted"), '`"base"` decays by `lr`, `"adjusted"` by `lr·scale`'
    )
    momentum_dtype: Optional[torch.dtype] = _option(
        _OPTIONAL_DTYPE,
        "dtype of the momentum buffer. None means the gradient's dtype, or fp32 if "
        "`weight_rounding` updates bf16 weights in fp32, or if a parameter accepts gradients of "
        "any dtype (torch's `grad_dtype=None`); ZeRO-2 averages these gradients in fp32",
    )
    weight_rounding: str = _option(
        one_of(*ROUNDINGS),
        'how to round updated bf16 weights, including AdamW\'s. `"exact"` keeps 16 more bits of '
        'each weight as state, so steps are the same as with fp32 weights. `"stochastic"` rounds '
        "up or down at random",
    )
    missing_grad: str = _option(
        one_of("raise", "zero"),
        '`"raise"` raises an error if only some ranks of a sharded matrix have a gradient, and '
        'skips a matrix if no rank has one. `"zero"` treats missing gradients as zeros',
    )
    expert_keys: Optional[Sequence[str]] = _option(
        _optional(
            lambda value: _are(value, lambda key: isinstance(key, str)), "a list of name components"
        ),
        "components of parameter names that mark stacked experts `(…, rows, cols)`; needs "
        "named parameters",
    )
    split: Any = _option(
        Option(
            lambda value: value is None or _is_split(value),
            "None, a list of row counts, a number of rows, the notation of axes, or a mapping from "
            "name patterns to any of these",
        ),
        "splits a tensor into matrices: a list of row counts, an int (rows of each matrix), "
        "[the notation below](#split-by-axes), or a mapping from name patterns to any of these",
    )
    flatten: bool = _option(
        _BOOL,
        "True to treat tensors with more than two dimensions, such as convolutions, as matrices "
        "of shape (dim 0, all the rest)",
    )
    maximize: bool = _option(_BOOL, "True to maximize the objective, as in torch.optim")
    capturable: bool = _option(
        _BOOL,
        "True to allow a CUDA graph to capture the step, as in torch.optim. Gradients stay in "
        "place. Doesn't work with traffic between ranks or with CPU offload",
    )

    def name_of(self, index: int) -> str:
        """Returns what messages call a parameter: its FQN, or its place in the group."""
        return self.names[index] if self.names is not None else f"{self.where}['params'][{index}]"

    def takes_part(self, param: Tensor) -> bool:
        """Returns True if this step updates a parameter of the group."""
        return param.requires_grad and (param.grad is not None or self.missing_grad == "zero")

    def updates_in_fp32(self, dtype: torch.dtype) -> bool:
        """Returns True if weights of that dtype are updated in fp32 and rounded afterwards."""
        return self.weight_rounding != "nearest" and dtype == torch.bfloat16

    def taking_part(self) -> list[Tensor]:
        """Returns the parameters that this step updates."""
        zero = self.missing_grad == "zero"
        return [p for p in self.params if p.requires_grad and (zero or p.grad is not None)]

    def validate(self, changed: Optional[Collection[str]] = None) -> None:
        """Raises ValueError if an option is invalid.

        Args:
            changed: keys that have changed since the last check; None checks all.
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
                "repeat one step's random numbers: use 'exact', or set capturable=False"
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

# Keys that schedules change, and that can be checked without any others.
_ALONE = frozenset({"lr", "weight_decay", "momentum", "rounding_step"})


def checked_keys(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a group for `changed_keys`, since lists may be changed in place."""
    return {
        key: copy.deepcopy(value)
        if key in GROUP_OPTIONS and not isinstance(value, Tensor)
        else value
        for key, value in group.items()
        if key != "params"
    }


def changed_keys(group: Mapping[str, Any], checked: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a group, except ``params``, whose values have changed since a check."""
    changed = []
    for key, value in group.items():
        if key == "params":
            continue
        before = checked.get(key, checked)  # a default that equals no value
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
    except Exception:  # comparing an invalid value may raise; its check comes later
        return False


def settle_steps(group: dict[str, Any], is_explicit: bool) -> None:
    """Sets ``ns_steps`` to the number of iterations of the coefficients, unless it is explicit."""
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
    """Options for all groups, with the names of the constructor's arguments.

    Ranks compare these options, and the ranks in the process group.

    Args:
        replicas: the ranks of the process group.
        streams_state: True if state comes from host memory (`Muon.turn_on_cpu_offload`).
    """

    debug: bool = _option(_BOOL, "True to log the plan")
    warmup_step: int = _option(
        Option(lambda value: is_int(value) and value >= 0, "an int ≥ 0"),
        "maximum number of chunks of a [lane](how-it-works.md#names) in flight, in addition to the "
        "one being orthogonalized; smaller values of this option and of `chunk_size` need less "
        "memory",
    )
    chunk_size: int = _option(
        Option(lambda value: is_int(value) and (value == -1 or value >= 1), "-1 or an int ≥ 1"),
        "maximum number of matrices that a rank orthogonalizes per chunk; with −1, limits in "
        "bytes decide (`staging_bytes`)",
    )
    use_distributed_muon: bool = _option(
        _BOOL,
        "True to use a simple reference implementation, in which every rank gathers and "
        "orthogonalizes everything, one parameter at a time. It doesn't work with `beta2`, "
        "`weight_rounding`, `capturable`, `clip_config`, `process_group`, CPU offload, or an audit",
    )
    exact: bool = _option(
        _BOOL,
        "True to compute and communicate in fp32 (fp64 for fp64 weights), so that steps of Muon's "
        "matrices are bit-identical on every layout. `ns_dtype` and `comm_dtype` can then only be "
        "fp32 or fp64",
    )
    comm_dtype: Optional[torch.dtype] = _option(
        _OPTIONAL_WIRE,
        "dtype of the wire, in which momentum and updates travel: bf16, fp32, or fp64. None means "
        "bf16, or fp64 if the arithmetic is in fp64",
    )
    consistency_check: str = _option(
        Option(lambda value: value in agreement.CHECKS, f"one of {agreement.CHECKS}"),
        'when ranks [compare notes](layouts.md#ranks-agree-first): `"step"`, before every step; '
        '`"plan"`, before the first step and after a change to shared parameters or to options '
        'that affect the plan; `"off"`, never',
    )
    hsdp: str = _option(
        Option(lambda value: value in hsdp.MODES, f"one of {hsdp.MODES}"),
        '`"spread"` divides the work among replicas of shards, `"redundant"` repeats it on every '
        'replica, and `"auto"` chooses whichever is expected to be faster',
    )
    staging_bytes: Optional[int] = _option(
        # `is_number` is False for an int too large for a float.
        _optional(lambda value: is_int(value) and is_number(value) and value > 0, "an int > 0"),
        "maximum bytes that a rank gathers per chunk, unless a single matrix is larger. "
        "None means 64 MiB on accelerators and 1 MiB on CPUs",
    )
    triton: bool = _option(
        _BOOL,
        "True to use Triton kernels on accelerators; False to use torch's operations, which are "
        "slower but need no C compiler",
    )
    grad_reduce: Optional[str] = _option(
        Option(lambda value: value in (None, "mean"), "one of None or 'mean'"),
        '`"mean"` averages gradients over the ranks of `process_group` during the step (ZeRO-2)',
    )
    replicas: Optional[Replicas] = None
    streams_state: bool = False

    @property
    def replica_ranks(self) -> Optional[agreement.Ranks]:
        """The ranks of the process group, ascending; None without one."""
        return None if self.replicas is None else tuple(sorted(self.replicas.ranks))

    @property
    def zero2_replicas(self) -> Optional[Replicas]:
        """In ZeRO-2, the ranks that average gradients and divide all state by rows; else None."""
        return self.replicas if self.grad_reduce is not None else None

    def validate(self) -> None:
        """Raises ValueError if an option is invalid."""
        for key, option in SETTINGS.items():
            option.check(key, getattr(self, key))
        if self.exact and self.comm_dtype not in (None, *EXACT_DTYPES):
            raise ValueError(f"exact=True and comm_dtype={self.comm_dtype} contradict each other")
        if self.replicas is not None:
            self.replicas.check_alive()
        elif self.grad_reduce is not None:
            raise ValueError(
                f"grad_reduce={self.grad_reduce!r} averages gradients over a process group: pass "
                "process_group, for example torch.distributed.group.WORLD, which is None before "
                "init_process_group. Pickles omit it: after loading one, optim.process_group = ..."
            )


SETTINGS = _options_of(Settings)

# Other arguments of `Muon` for all groups, and their meaning.
OTHER_ARGUMENTS = {
    "process_group": "process group of the ranks that have replicas of the plain parameters "
    "([DDP and ZeRO-2](layouts.md#ddp-and-zero-2))",
    "clip_config": "options of [QK-Clip](offload-and-qk-clip.md#qk-clip)",
    "ns_options": "rarely used options of the iteration, in one mapping; in "
    "[groups](#ns_options), they're separate keys",
}

# Rare options of the iteration: keys of groups and, without ``ns_``, of ``ns_options``.
NS_OPTIONS = ("algorithm", "eps", "eps_absolute", "norm_factor", "equilibrate", "renormalize")
NS_DEFAULTS = {
    "ns_algorithm": "auto",
    "ns_eps": 1e-7,
    "ns_eps_absolute": None,
    "ns_norm_factor": None,
    "ns_equilibrate": False,
    "ns_renormalize": False,
}

# Arguments that aren't keys of groups, and all arguments of `Muon`.
CONSTRUCTOR_ONLY = (*SETTINGS, *OTHER_ARGUMENTS)
ARGUMENTS = frozenset({"params", *GROUP_OPTIONS, *CONSTRUCTOR_ONLY} - NS_DEFAULTS.keys())


def read_ns_options(ns_options: Any) -> dict[str, Any]:
    """Returns the group keys that ``ns_options`` sets, with defaults for the others.

    Raises:
        ValueError: if ``ns_options`` isn't a mapping, or a key is unknown.
    """
    if ns_options is not None and not isinstance(ns_options, Mapping):
        raise ValueError(f"ns_options must be None or a mapping, found {ns_options!r}")
    for key in ns_options or {}:
        if key not in NS_OPTIONS:
            raise ValueError(f"ns_options has {key!r}; its keys are {', '.join(NS_OPTIONS)}")
    return {**NS_DEFAULTS, **{f"ns_{key}": value for key, value in (ns_options or {}).items()}}


def is_exact(group: Group, settings: Settings) -> bool:
    """Returns True if the group is in exact mode: the same bits on every layout and machine."""
    return settings.exact or {group.ns_dtype, settings.comm_dtype} <= {*EXACT_DTYPES}
