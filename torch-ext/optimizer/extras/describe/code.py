"""The code a description advises: what traps ask for, put together with what the caller gave."""

from __future__ import annotations

import itertools
import json
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from ...distributed import utils as dtensors
from ...parameters.default_groups import DIMENSIONS, Decision, default_is_muon, takes_expert_keys
from ...parameters.names import has_component, matches
from .evidence import Subject
from .table import glob

WIDTH = 88
LR = {"match_rms_adamw": 1e-3, "original": 0.02, "spectral": 0.01, "none": 0.02}
ADAMW_LR = 3e-4  # where Muon's is on a scale of its own
WORLD = "torch.distributed.group.WORLD"


class Source(str):
    """Code, as the value of an argument."""


@dataclass
class Advice:
    """What the traps found ask for.

    Args:
        leave: names of parameters that are AdamW's after all.
        take: names of convolutions that are Muon's.
        only_matrices: leave vectors to AdamW, which ``is_muon_func`` takes.
        expert_keys: instead of the caller's.
        split: row counts by name, beside the caller's.
        options: arguments of Muon, instead of the caller's; None takes the default.
        first: lines before all others, such as comments.
        before: lines before the optimizer is made.
    """

    leave: list[str] = field(default_factory=list)
    take: list[str] = field(default_factory=list)
    only_matrices: bool = False
    expert_keys: Optional[list[str]] = None
    split: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)

    def muons(self, subject: Subject) -> list[Decision]:
        """The parameters that are Muon's once the advice is taken."""
        taken = {*self.take}
        return [
            d
            for d in subject.trainable
            if d.name not in self.leave
            and (d.param.ndim > 1 or not self.only_matrices)
            and (
                d.algorithm == "Muon"
                or d.name in taken
                or (d.reason.endswith(DIMENSIONS) and has_component(d.name, self.expert_keys))
            )
        ]


def write(subject: Subject, advice: Advice) -> str:
    """Code that runs where ``model`` and ``optimizer`` are at hand."""
    options = {**subject.options, **advice.options}
    for key in [key for key, value in advice.options.items() if value is None]:
        del options[key]
    scale = options.get("adjust_lr", "match_rms_adamw")
    lr = options.pop("lr", LR[scale])
    split = split_by(subject, advice)
    if split:
        options["split"] = split
    groups: dict[str, Any] = {}
    lines = list(advice.first)
    if _asks_for_a_function(advice):
        lines += [*_is_muon(subject, advice), ""]
        groups["is_muon_func"] = Source("is_muon")
    elif subject.is_muon_func is not default_is_muon:
        groups["is_muon_func"] = Source(_name_of(subject.is_muon_func))
    keys = advice.expert_keys if advice.expert_keys is not None else subject.expert_keys
    if keys:
        groups["expert_keys"] = list(keys)
    lines += _call("groups", "optimizer.muon.get_default_muon_param_groups", "model", groups)
    lines += advice.before
    if isinstance(lr, (int, float)) and lr > 5e-3 and scale != "match_rms_adamw":
        lines.append(
            f"groups[1][\"lr\"] = {number(ADAMW_LR)}  # AdamW's own: {number(lr)} is Muon's"
        )
    lines += _call("optim", "optimizer.Muon", "groups", {"lr": lr, **options})
    if any("torch." in line for line in lines):
        lines = ["import torch", "", *lines]
    return "\n".join(lines)


def _asks_for_a_function(advice: Advice) -> bool:
    return bool(advice.leave or advice.take or advice.only_matrices)


def _is_muon(subject: Subject, advice: Advice) -> list[str]:
    """A function that is the caller's, or the default, but for what the advice is about."""
    function = subject.is_muon_func
    name = _name_of(function) if function is default_is_muon else _name_of(function, "is_muon")
    leave, take = list(advice.leave), ""
    if advice.take:
        take, others = _convolutions(subject, advice.take)
        leave += others
    lines = ["def is_muon(name, param, expert_keys=None):"]
    if advice.only_matrices:
        lines += ["    if param.ndim < 2:", "        return False"]
    if len(leave) == 1:
        lines += [f"    if name == {literal(leave[0])}:", "        return False"]
    elif leave:
        head, *more = literal(leave, WIDTH - 20).splitlines()
        lines += [f"    if name in {head}", *(f"    {line}" for line in more)]
        lines[-1] += ":"
        lines += ["        return False"]
    if take:
        lines += [f"    if {take}:  # convolutions", "        return True"]
    keys = ", expert_keys" if takes_expert_keys(function) else ""
    return [*lines, f"    return {name}(name, param{keys})"]


def _convolutions(subject: Subject, take: Sequence[str]) -> tuple[str, list[str]]:
    """A condition that holds for them, and which others it holds for, that are to be left."""
    wanted = set(take)
    best: Optional[tuple[str, list[str]]] = None
    conditions: dict[str, Callable[[Decision], bool]] = {
        "param.ndim == 4": lambda d: d.param.ndim == 4,
        "param.ndim == 3": lambda d: d.param.ndim == 3,
        "param.ndim > 2": lambda d: d.param.ndim > 2,
        "param.ndim > 2 and param.shape[1] > 4": lambda d: (
            d.param.ndim > 2 and d.param.shape[1] > 4
        ),
    }
    for condition, holds in conditions.items():
        chosen = [d.name for d in subject.trainable if holds(d)]
        others = [name for name in chosen if name not in wanted]
        if wanted <= set(chosen) and (best is None or len(others) < len(best[1])):
            best = condition, others
    if best is not None and len(best[1]) <= 6:
        return best
    return f"name in {list(take)!r}", []


def split_by(subject: Subject, advice: Advice) -> dict[str, Any]:
    """The caller's ``split`` and the advised one."""
    given = advice.options.get("split", subject.options.get("split"))
    patterns: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    return {**patterns, **patterns_of(advice.split, subject, advice)}


def patterns_of(split: Mapping[str, Any], subject: Subject, advice: Advice) -> dict[str, Any]:
    """Row counts by patterns, of row counts by name, which match no other matrix of Muon's."""
    together: dict[str, list[str]] = {}
    for name, counts in split.items():
        together.setdefault(repr(counts), []).append(name)
    muons = [decision.name for decision in advice.muons(subject)]
    found: dict[str, Any] = {}
    for names in together.values():
        others = list(dict.fromkeys(muons).keys() - set(names))
        found.update(dict.fromkeys(_patterns(names, others), split[names[0]]))
    return found


def _patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """The fewest that match all of the names and none of the others."""
    common = [
        part
        for part in reversed(names[0].split("."))
        if not part.isdigit()
        and part not in ("weight", "attn", "attention", "mlp")
        and all(part in name.split(".") for name in names)
    ]
    prefix = [f"{_common_prefix(names)}*"] if names[1:] else []
    for patterns in (*([part] for part in common), glob(names), prefix):
        catch_all = all(any(matches(name, p) for p in patterns) for name in names)
        catch_others = any(matches(name, p) for p in patterns for name in others)
        if catch_all and not catch_others and len(patterns) <= (len(names) + 1) // 2:
            return patterns
    return list(names)


def _common_prefix(names: Sequence[str]) -> str:
    pairs = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names))
    return "".join(letters[0] for letters in pairs)


def _name_of(function: Any, taken: str = "") -> str:
    if function is default_is_muon:
        return "optimizer.muon.default_is_muon"
    name = getattr(function, "__name__", "")
    is_usable = name.isidentifier() and not keyword.iskeyword(name) and name != taken
    return name if is_usable else "is_muon_func"


def _call(result: str, function: str, first: str, arguments: Mapping[str, Any]) -> list[str]:
    """``result = function(first, …)``, one line, or one for each argument."""
    shown = [f"{key}={_text(key, value)}" for key, value in arguments.items()]
    line = f"{result} = {function}({', '.join([first, *shown])})"
    if len(line) <= WIDTH and "\n" not in line:
        return [line]
    lines = [f"{result} = {function}("]
    for argument in (first, *shown):
        lines += [f"    {part}" for part in f"{argument},".splitlines()]
    return [*lines, ")"]


def _text(key: str, value: Any) -> str:
    if isinstance(value, Source):
        return str(value)
    plain = (bool, int, float, str, list, tuple, dict, torch.dtype)
    if value is None or isinstance(value, plain):
        return literal(value, WIDTH - len(key) - 6)
    if dtensors.world_size() > 1 and value is torch.distributed.group.WORLD:
        return WORLD
    return key  # what has no spelling: the caller's own variable


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
