"""Writes remedies of traps as code: beside each trap, and together as a script."""

from __future__ import annotations

import itertools
import json
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...distributed import dtensors
from ...parameters.default_groups import (
    DIMENSIONS,
    Decision,
    decide,
    default_is_muon,
    groups_of,
    takes_expert_keys,
)
from ...parameters.modules import remember_owners
from ...parameters.names import has_component, matches
from .subject import Subject
from .table import collect_by, glob

WIDTH = 88
LR = {"match_rms_adamw": 1e-3, "original": 0.02, "spectral": 0.01, "none": 0.02}
ADAMW_LR = 3e-4  # where Muon's is on a scale of its own
WORLD = "torch.distributed.group.WORLD"


@dataclass(frozen=True)
class Remedy:
    """Changes of what the caller wrote, for one trap, or for several in order: the advice.

    Args:
        options: arguments of ``Muon`` and ``expert_keys``, in place of the caller's; None takes
            the default.
        leave: names of parameters that are AdamW's after all.
        take: names of convolutions that are Muon's.
        only_matrices: leaves vectors to AdamW, which ``is_muon_func`` takes.
        split: row counts by name, beside the ``split`` of the options.
        matrices: names of all that is Muon's, which patterns of ``split`` have to tell apart.
        header: comments above the script.
        comments: comments above the optimizer.
        wording: the text beside the trap, where it is more than the options: ``{}`` stands for
            these.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    leave: tuple[str, ...] = ()
    take: tuple[str, ...] = ()
    only_matrices: bool = False
    split: Mapping[str, Any] = field(default_factory=dict)
    matrices: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()
    wording: str = ""

    def then(self, other: Remedy) -> Remedy:
        """Both remedies in one; if both set an option, the value of ``other`` counts."""
        return Remedy(
            options={**self.options, **other.options},
            leave=self.leave + other.leave,
            take=self.take + other.take,
            only_matrices=self.only_matrices or other.only_matrices,
            split={**self.split, **other.split},
            matrices=other.matrices or self.matrices,
            header=self.header + other.header,
            comments=self.comments + other.comments,
        )

    def applied_to(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The caller's options, changed by the remedy."""
        merged = {**options, **self.options}
        return {k: v for k, v in merged.items() if v is not None or k not in self.options}

    @property
    def needs_a_rule(self) -> bool:
        """Whether the groups need a function ``is_muon``, beside other arguments."""
        return bool(self.leave or self.only_matrices)

    def muons(self, subject: Subject) -> list[Decision]:
        """The parameters that are Muon's once the advice is taken."""
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
    """Something that goes wrong, or only is good to know.

    Args:
        kind: one word for programs.
        what: what there is.
        parameters: names of those it is about.
        why: why that matters.
        remedy: what mends it, as data.
        write: the code that mends it, in short; empty where nothing is to be done.
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
    options = dict(remedy.options)
    if remedy.split:
        options["split"] = _split_patterns(remedy)
    arguments = ", ".join(_argument(key, value) for key, value in options.items())
    if not (arguments and remedy.wording):
        return arguments or remedy.wording
    return remedy.wording.replace("{}", arguments)


# Arguments of `get_default_muon_param_groups` beside the model and ``is_muon_func``.
GROUP_ARGUMENTS = {
    **dict.fromkeys(("expert_keys", "adamw_keys", "adamw_lr")),
    **{"decay_vectors": True, "convolutions": False},
}


def script(subject: Subject, advice: Remedy) -> str:
    """Code that runs where ``model`` and ``optimizer`` are at hand."""
    lines = list(advice.header)
    arguments = ["model"]
    if advice.needs_a_rule:
        lines += [*_is_muon(subject, advice), ""]
        arguments.append("is_muon_func=is_muon")
    elif subject.is_muon_func is not default_is_muon:
        arguments.append(f"is_muon_func={_name_of(subject.is_muon_func)}")
    chosen = _group_arguments(subject, advice)
    defaults = GROUP_ARGUMENTS.items()
    arguments += _arguments({key: chosen[key] for key, value in defaults if chosen[key] != value})
    lines += _call("groups", "optimizer.get_default_muon_param_groups", arguments)
    lines += advice.comments
    options = _arguments(advised_options(subject, advice))
    lines += _call("optim", "optimizer.Muon", ["groups", *options])
    if any("torch." in line for line in lines):
        lines = ["import torch", "", *lines]
    return "\n".join(lines)


def advised_options(subject: Subject, advice: Remedy) -> dict[str, Any]:
    """Keyword arguments of ``Muon``."""
    options = advice.applied_to(subject.options)
    options = {key: value for key, value in options.items() if key not in GROUP_ARGUMENTS}
    if advice.split:
        options["split"] = {**(options.get("split") or {}), **_split_patterns(advice)}
    return {"lr": LR[options.get("adjust_lr", "match_rms_adamw")], **options}


def advised_groups(subject: Subject, advice: Remedy) -> list[dict[str, Any]]:
    """The parameter groups that the script makes."""
    arguments = _group_arguments(subject, advice)
    adamw_keys = arguments.pop("adamw_keys")
    if advice.needs_a_rule:
        muons = {decision.name for decision in advice.muons(subject)}
        decisions = [
            replace(decision, algorithm="Muon" if decision.name in muons else "AdamW")
            for decision in subject.trainable
        ]
    else:  # anew: expert_keys may change what the default rule takes for a head
        keys = arguments["expert_keys"], adamw_keys, arguments["convolutions"]
        decisions = decide(subject.model, subject.is_muon_func, *keys)
    remember_owners(subject.model)
    return groups_of(decisions, **arguments)


def _group_arguments(subject: Subject, advice: Remedy) -> dict[str, Any]:
    options = {**GROUP_ARGUMENTS, **advice.applied_to(subject.options)}
    arguments = {key: options[key] for key in GROUP_ARGUMENTS}
    for key in ("expert_keys", "adamw_keys"):
        arguments[key] = list(arguments[key] or ()) or None
    lr = advised_options(subject, advice)["lr"]
    scale = options.get("adjust_lr", "match_rms_adamw")
    is_muons = isinstance(lr, (int, float)) and lr > 5e-3 and scale != "match_rms_adamw"
    if arguments["adamw_lr"] is None and is_muons:
        arguments["adamw_lr"] = ADAMW_LR
    return arguments


def _is_muon(subject: Subject, advice: Remedy) -> list[str]:
    """A function that is the caller's, or the default, but for what the advice is about."""
    function, leave, keep = subject.is_muon_func, list(advice.leave), []
    if function is default_is_muon:  # it goes by names: what modules have decided is listed
        leave += [d.name for d in subject.by_algorithm("AdamW") if d.reason.startswith("head")]
        keep = [d.name for d in subject.by_algorithm("Muon") if d.reason == "matrix, no head"]
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


def _split_patterns(remedy: Remedy) -> dict[str, Any]:
    """The remedy's row counts by patterns, which match no other matrix of Muon's."""
    by_pattern: dict[str, Any] = {}
    for names in collect_by(remedy.split, lambda name: repr(remedy.split[name])).values():
        others = list(set(remedy.matrices) - set(names))
        by_pattern.update(dict.fromkeys(_patterns(names, others), remedy.split[names[0]]))
    return by_pattern


def _patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """A few patterns that match all of the names and none of the others; else the names."""
    common = [
        component
        for component in reversed(names[0].split("."))
        if not component.isdigit()
        and component not in ("weight", "attn", "attention", "mlp")
        and all(component in name.split(".") for name in names)
    ]
    letters = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*names))
    prefix = [f"{''.join(column[0] for column in letters)}*"] if names[1:] else []
    for patterns in (*([component] for component in common), glob(names), prefix):
        match_all = all(any(matches(name, p) for p in patterns) for name in names)
        match_others = any(matches(name, p) for p in patterns for name in others)
        if match_all and not match_others and len(patterns) <= (len(names) + 1) // 2:
            return patterns
    return list(names)


def _name_of(function: Any, taken: str = "") -> str:
    if function is default_is_muon:
        return "optimizer.default_is_muon"
    name = getattr(function, "__name__", "")
    is_usable = name.isidentifier() and not keyword.iskeyword(name) and name != taken
    return name if is_usable else "is_muon_func"


def _call(result: str, function: str, arguments: Sequence[str]) -> list[str]:
    """``result = function(argument, …)``, one line, or one for each argument."""
    line = f"{result} = {function}({', '.join(arguments)})"
    if len(line) <= WIDTH and "\n" not in line:
        return [line]
    indented = [f"    {line}" for argument in arguments for line in f"{argument},".splitlines()]
    return [f"{result} = {function}(", *indented, ")"]


def _arguments(values: Mapping[str, Any]) -> list[str]:
    """Each ``key=value`` as it fits a line of its own in a call."""
    return [_argument(key, value, WIDTH - len(key) - 6) for key, value in values.items()]


def _argument(key: str, value: Any, width: int = WIDTH) -> str:
    plain = (bool, int, float, str, list, tuple, dict, torch.dtype)
    if value is None or isinstance(value, plain):
        return f"{key}={literal(value, width)}"
    if dtensors.world_size() > 1 and value is torch.distributed.group.WORLD:
        return f"{key}={WORLD}"
    return f"{key}={key}"  # what has no spelling: the caller's own variable


def literal(value: Any, width: int = WIDTH) -> str:
    """A value as code: on one line, or with a line for each item where that is too long."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return number(value)
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
    """1e-3 rather than 0.001, 0.02 rather than 2e-2."""
    if value and abs(value) < 0.0099:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return repr(value)
