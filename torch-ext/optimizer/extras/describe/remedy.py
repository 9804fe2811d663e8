"""Writes the remedies of traps as code: next to each trap, and together as a script."""

from __future__ import annotations

import inspect
import json
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Union

import torch

from ...distributed import dtensors
from ...parameters.names import has_component
from ...rules.assignment import AUTO
from ...rules.decisions import DIMENSIONS, default_is_muon, takes_expert_keys
from ...rules.modules import Decision
from .subject import Subject

WIDTH = 88
_LR = {"match_rms_adamw": 1e-3, "original": 0.02, "spectral": 0.01, "none": 0.02}
ADAMW_LR = 3e-4  # if Muon's rate is on another scale
WORLD = "torch.distributed.group.WORLD"


def usual_lr(scale: Union[str, float]) -> float:
    """A rate that suits an ``adjust_lr``; a number is relative to ``match_rms_adamw``'s 0.2."""
    if isinstance(scale, str):
        return _LR[scale]
    return float(f"{_LR['match_rms_adamw'] * 0.2 / scale:.2g}")


@dataclass(frozen=True)
class Remedy:
    """Changes to the caller's code, for one trap, or merged for several (the advice).

    Args:
        options: arguments of `Muon.for_model` that replace the caller's; None means the default.
        leave: names of parameters to leave to AdamW.
        take: names of convolutions to give to Muon.
        only_matrices: True leaves to AdamW the vectors that ``is_muon_func`` gave to Muon.
        header: comments above the script.
        comments: comments above the optimizer.
        wording: the text next to the trap, if it is more than the options; ``{}`` stands for these.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    leave: tuple[str, ...] = ()
    take: tuple[str, ...] = ()
    only_matrices: bool = False
    header: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()
    wording: str = ""

    def then(self, other: Remedy) -> Remedy:
        """Merges two remedies; if both set an option, the value in ``other`` counts."""
        return Remedy(
            options={**self.options, **other.options},
            leave=self.leave + other.leave,
            take=self.take + other.take,
            only_matrices=self.only_matrices or other.only_matrices,
            header=self.header + other.header,
            comments=self.comments + other.comments,
        )

    def applied_to(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The caller's options with the remedy's changes."""
        merged = {**options, **self.options}
        return {k: v for k, v in merged.items() if v is not None or k not in self.options}

    @property
    def needs_a_rule(self) -> bool:
        """True if the groups need a function ``is_muon``."""
        return bool(self.leave or self.only_matrices)

    def muons(self, subject: Subject) -> list[Decision]:
        """The parameters that Muon trains once the advice is followed."""
        expert_keys = self.options.get("expert_keys")
        return [
            d
            for d in subject.trainable
            if d.name not in self.leave
            and (d.param.ndim > 1 or not self.only_matrices)
            and (
                d.algorithm == "Muon"
                or d.name in self.take
                or (d.reason.endswith(DIMENSIONS) and has_component(d.key, expert_keys))
            )
        ]


@dataclass(frozen=True)
class Trap:
    """Something to fix, or to know.

    Args:
        kind: one word, for programs.
        what: what was found.
        parameters: names of the parameters concerned.
        why: why it matters.
        remedy: how to fix it, as data.
        write: how to fix it, as code, abridged; empty if there is nothing to fix.
    """

    kind: str
    what: str
    parameters: tuple[str, ...]
    why: str
    remedy: Remedy = field(default=Remedy(), repr=False, compare=False)
    write: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "write", _beside(self.remedy))


def _beside(remedy: Remedy) -> str:
    if remedy.leave:
        conditions = [f"name != {literal(name)}" for name in remedy.leave[:2]]
        return "is_muon_func: " + " and ".join(conditions + ["…"] * (len(remedy.leave) > 2))
    arguments = ", ".join(_argument(key, value) for key, value in remedy.options.items())
    if not (arguments and remedy.wording):
        return arguments or remedy.wording
    return remedy.wording.replace("{}", arguments)


# Arguments of `Muon.for_model` that `Muon` lacks, and their defaults.
FOR_MODEL = {
    **{"expert_keys": AUTO, "split": AUTO, "adamw_keys": None, "adamw_lr": None},
    **{"decay_vectors": True, "convolutions": False, "per_head": False},
}


def script(subject: Subject, advice: Remedy) -> str:
    """Code that runs where the names ``model`` and ``optimizer`` exist."""
    lines, arguments = list(advice.header), ["model"]
    options = advised_options(subject, advice)
    lines += [*_is_muon(subject, advice), ""] if advice.needs_a_rule else []
    arguments += _arguments({"lr": options.pop("lr")})
    if advice.needs_a_rule:
        arguments.append("is_muon_func=is_muon")
    elif subject.is_muon_func is not default_is_muon:
        arguments.append(f"is_muon_func={_name_of(subject.is_muon_func)}")
    lines += advice.comments
    lines += _call("optim", "optimizer.Muon.for_model", [*arguments, *_arguments(options)])
    if any("torch." in line for line in lines):
        lines = ["import torch", "", *lines]
    return "\n".join(lines)


def advised_options(subject: Subject, advice: Remedy) -> dict[str, Any]:
    """Keyword arguments of `Muon.for_model`, except the model and ``is_muon_func``."""
    options = advice.applied_to(subject.options)
    options = {k: v for k, v in options.items() if k not in FOR_MODEL or v != FOR_MODEL[k]}
    scale = options.get("adjust_lr", "match_rms_adamw")
    options = {"lr": usual_lr(scale), **options}
    has_muons_rate = isinstance(options["lr"], (int, float)) and options["lr"] > 5e-3
    if "adamw_lr" not in options and has_muons_rate and scale != "match_rms_adamw":
        options["adamw_lr"] = ADAMW_LR
    return options


def _is_muon(subject: Subject, advice: Remedy) -> list[str]:
    """Lines of a function that adapts the caller's rule, or the default one, as advised."""
    function, leave, keep = subject.is_muon_func, list(advice.leave), []
    if function is default_is_muon:  # it knows only names: list what modules decided
        leave += [d.name for d in subject.by_algorithm("AdamW") if d.reason.startswith("head")]
        keep = [
            d.name for d in subject.by_algorithm("Muon") if d.reason.startswith("matrix, no head")
        ]
    lines = ["def is_muon(name, param, expert_keys=None):"]
    if advice.only_matrices:
        lines += ["    if param.ndim < 2:", "        return False"]
    if len(leave) == 1:
        lines += [f"    if name == {literal(leave[0])}:", "        return False"]
    elif leave:
        test = f"if name in {literal(leave, WIDTH - 20)}:"
        lines += [*(f"    {line}" for line in test.splitlines()), "        return False"]
    if keep:
        test = f"if name in {literal(keep, WIDTH - 20)}:"
        lines += [*(f"    {line}" for line in test.splitlines()), "        return True"]
    keys = ", expert_keys" if takes_expert_keys(function) else ""
    return [*lines, f"    return {_name_of(function, 'is_muon')}(name, param{keys})"]


_TAKEN = {"model", "optimizer", "optim", "torch"}


def _name_of(function: Any, taken: str = "") -> str:
    if function is default_is_muon:
        return "optimizer.default_is_muon"
    name = getattr(function, "__name__", "")
    is_usable = name.isidentifier() and not keyword.iskeyword(name) and name not in _TAKEN
    is_usable = is_usable and name != taken and not inspect.ismethod(function)
    return name if is_usable else "is_muon_func"


def _call(result: str, function: str, arguments: Sequence[str]) -> list[str]:
    """``result = function(argument, …)``, on one line or with a line for each argument."""
    line = f"{result} = {function}({', '.join(arguments)})"
    if len(line) <= WIDTH and "\n" not in line:
        return [line]
    indented = [f"    {line}" for argument in arguments for line in f"{argument},".splitlines()]
    return [f"{result} = {function}(", *indented, ")"]


def _arguments(values: Mapping[str, Any]) -> list[str]:
    """Each ``key=value``, formatted to fit its own line in a call."""
    return [_argument(key, value, WIDTH - len(key) - 6) for key, value in values.items()]


def _argument(key: str, value: Any, width: int = WIDTH) -> str:
    plain = (bool, int, float, str, list, tuple, dict, torch.dtype)
    if value is None or isinstance(value, plain):
        return f"{key}={literal(value, width)}"
    if dtensors.world_size() > 1 and value is torch.distributed.group.WORLD:
        return f"{key}={WORLD}"
    return f"{key}={key}"  # it has no literal: assume a variable of that name


def literal(value: Any, width: int = WIDTH) -> str:
    """A value as code: on one line, or if that is too long, with a line for each item."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return number(float(value))
    if type(value).__module__ == "numpy" and isinstance(value, Integral):
        return repr(int(value))
    if not isinstance(value, (list, tuple, dict)):
        return repr(value)
    items = [literal(item) for item in value]
    if isinstance(value, dict):
        items = [f"{literal(key)}: {literal(item)}" for key, item in value.items()]
    start, end = "{}" if isinstance(value, dict) else "[]" if isinstance(value, list) else "()"
    line = ", ".join(items) + ("," if isinstance(value, tuple) and len(items) == 1 else "")
    if len(line) <= width:
        return f"{start}{line}{end}"
    return "\n".join([start, *(f"    {item}," for item in items), end])


def number(value: float) -> str:
    """Formats a number: 1e-3 rather than 0.001, but 0.02 rather than 2e-2."""
    mantissa, exponent = f"{value:e}".split("e")
    short = f"{float(mantissa):g}e{int(exponent)}"
    is_same = value and abs(value) < 0.0099 and float(short) == value
    return short if is_same else repr(value)
