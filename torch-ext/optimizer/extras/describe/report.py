"""Makes a `Description` of a model: which parameters go where, traps, and the code to write."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...distributed import dtensors
from ...muon import Muon
from ...parameters.aliases import refusal
from ...parameters.names import WRAPPERS
from ...parameters.options import ARGUMENTS, GROUP_OPTIONS
from ...rules.assignment import AUTO, assign
from ...rules.decisions import ExpertKeys, as_keys, default_is_muon
from . import table
from .learning_rate import rates_to_try
from .per_head import offer as per_head_of
from .remedy import Trap, script
from .subject import Subject
from .traps import find_notes, find_warnings

_NOTES = 3  # printed for each kind
ALGORITHMS = ("Muon", "AdamW", "frozen")


@dataclass(frozen=True)
class Description:
    """The result of `describe`; ``print`` shows it on one screen.

    Args:
        rows: one for each parameter: ``name``, ``shape`` (of the whole tensor, even if sharded),
            ``dtype``, ``placement``, ``numel``, ``algorithm`` (``"Muon"``, ``"AdamW"`` or
            ``"frozen"``) and ``reason``.
        warnings: what to fix; ``code`` does.
        notes: what is fine, but good to know.
        code: what to write. It needs the names ``model`` and ``optimizer`` (this package).
        model: name of the model's class.
        rates: learning rates to try, as text; empty if nothing is known.
        heads: what ``per_head=True`` does, as text; empty if the model has no heads to split.
    """

    rows: list[dict[str, Any]]
    warnings: list[Trap]
    notes: list[Trap]
    code: str
    model: str
    rates: str
    heads: str

    @property
    def totals(self) -> dict[str, dict[str, Any]]:
        """By algorithm: ``tensors``, ``numel``, and ``share`` of all elements."""
        total = max(1, sum(row["numel"] for row in self.rows))
        totals = {}
        for algorithm in ALGORITHMS:
            sizes = [row["numel"] for row in self.rows if row["algorithm"] == algorithm]
            numel = sum(sizes)
            totals[algorithm] = {"tensors": len(sizes), "numel": numel, "share": numel / total}
        return totals

    def __str__(self) -> str:
        size = table.count(sum(row["numel"] for row in self.rows))
        dtypes = ", ".join(dict.fromkeys(table.text(row["dtype"]) for row in self.rows))
        lines = [", ".join(filter(None, [f"{self.model}: {size} parameters", dtypes])), ""]
        if self.rows:
            lines += [*table.aligned(table.lines_of(self.rows)), ""]
        lines += table.aligned(
            (
                name,
                f"{total['share']:.1%}",
                f"{table.count(total['numel'])} parameters",
                f"{total['tensors']} tensor{'' if total['tensors'] == 1 else 's'}",
            )
            for name, total in self.totals.items()
            if total["tensors"] or name != "frozen"
        )
        for text in filter(None, (self.rates, self.heads)):
            lines += ["", text]
        for number, trap in enumerate(self.warnings, 1):
            lines += ["", *lines_of(trap, f"{number}. ")]
        if self.notes:
            lines.append("")
        for kind, notes in table.collect_by(self.notes, lambda note: note.kind).items():
            for note in notes[:_NOTES]:
                lines += lines_of(note, "Note: ")
            if notes[_NOTES:]:
                lines.append(f"Note: … and {len(notes) - _NOTES} more of kind {kind!r} in .notes")
        lines += ["", "Write:" if self.warnings else "No traps found. Write:", ""]
        return "\n".join([*lines, *(f"    {line}".rstrip() for line in self.code.splitlines())])


def lines_of(trap: Trap, prefix: str) -> list[str]:
    indent = " " * 3
    lines = [f"{prefix}{trap.what}"]
    if trap.write:
        lines += [f"{indent}{name}" for name in table.listed(trap.parameters)]
    lines += textwrap.wrap(trap.why, 100, initial_indent=indent, subsequent_indent=indent)
    if trap.write:
        first, *more = trap.write.splitlines()
        lines += [f"{indent}→ {first}", *(f"{indent}  {line}" for line in more)]
    return lines


def describe(
    model: nn.Module,
    lr: Any = None,
    adamw_lr: Any = None,
    weight_decay: Any = None,
    *,
    per_head: bool = False,
    expert_keys: ExpertKeys = AUTO,
    split: Any = AUTO,
    convolutions: bool = False,
    is_muon_func: Callable[..., bool] = default_is_muon,
    adamw_keys: ExpertKeys = None,
    decay_vectors: bool = True,
    **options: Any,
) -> Description:
    """Shows which parameters of a model go where and why, known traps, and the code to write.

    It makes the same decisions as `Muon.for_model`, from the same arguments. It changes nothing and
    reads no weights, so the model may be on the meta device, sharded (DTensors) or wrapped (DDP,
    torch.compile, checkpointing), with or without a process group.

    Traps include heads and embeddings that names don't reveal, tensors left to AdamW because
    nothing shows which matrices they hold, ``convolutions`` left to AdamW, a learning rate that
    doesn't fit ``adjust_lr``, weights stored (in, out), several ranks without a ``process_group``,
    FSDP1's flat parameters, and anything that `Muon` would refuse. Notes include tied weights.

    A learning rate is judged by how much of its own size a weight moves per step, ``lr · scale ·
    sqrt(3·cols / max(rows, cols))``: an orthogonal matrix has an RMS of 1/sqrt(max(rows, cols)),
    and torch initializes weights with an RMS of 1/sqrt(3·cols). More than 16% is too large, because
    rates known to work stay under 15%. Less than 0.0002% is too small with
    ``adjust_lr="match_rms_adamw"``, because fine-tuning uses rates down to 1e-6. With the other
    scales, less than 0.1% is too small: there, AdamW's 3e-4 would move weights by 0.05%.

    Args:
        model: the model as it will be trained, already sharded and wrapped.
        lr, adamw_lr, weight_decay: as in `Muon.for_model`; None means not given.
        per_head, expert_keys, split, convolutions, is_muon_func: as in `Muon.for_model`.
        adamw_keys, decay_vectors, options: as in `Muon.for_model`.

    Raises:
        ValueError: ``model`` isn't a module, a parameter has no shape yet, or an option is invalid.
        TypeError: `Muon` doesn't have an option.

    Example:
        >>> print(optimizer.describe(model))
        >>> description = optimizer.describe(model, lr=0.02, adjust_lr="original")
        >>> [row["name"] for row in description.rows if row["algorithm"] == "Muon"]
        >>> assert not description.warnings
    """
    given_rates = {"lr": lr, "weight_decay": weight_decay}
    options = {**{k: v for k, v in given_rates.items() if v is not None}, **options}
    if adamw_lr is not None:
        GROUP_OPTIONS["lr"].check("adamw_lr", adamw_lr)
    is_found = split == AUTO
    _check({**options, **({} if is_found else {"split": split})})
    assignment = assign(model, is_muon_func, expert_keys, adamw_keys, convolutions, split, per_head)
    given = {
        "expert_keys": expert_keys if expert_keys == AUTO else as_keys(expert_keys),
        "split": split,
        "per_head": per_head,
        "adamw_keys": as_keys(adamw_keys),
        "adamw_lr": adamw_lr,
        "decay_vectors": decay_vectors,
        "convolutions": convolutions,
    }
    subject = Subject(assignment, is_muon_func, {**given, **options})
    traps, advice = find_warnings(subject)
    return Description(
        rows=[
            {
                "name": decision.name,
                "shape": tuple(decision.param.shape),
                "dtype": decision.param.dtype,
                "placement": dtensors.describe(decision.param),
                "numel": decision.param.numel(),
                "algorithm": decision.algorithm,
                "reason": decision.reason,
            }
            for decision in assignment.decisions
        ],
        warnings=traps,
        notes=find_notes(subject, advice),
        code=script(subject, advice),
        model=type(_unwrapped(model)).__name__.removeprefix("FSDP"),  # fully_shard's
        rates=rates_to_try(subject, advice),
        heads=per_head_of(subject),
    )


def _check(options: dict[str, Any]) -> None:
    for key, value in options.items():
        if key not in ARGUMENTS - {"params"}:
            raise TypeError(refusal("describe", key))
        if key in GROUP_OPTIONS:
            GROUP_OPTIONS[key].check(key, value)
    with warnings.catch_warnings():  # about having no parameters
        warnings.simplefilter("ignore")
        Muon([{"params": [], "use_muon": True, "names": []}], **options)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers, for its name."""
    while True:
        inner = [child for name, child in model.named_children() if name in {*WRAPPERS, "module"}]
        if len(inner) != 1 or len(list(model.children())) != 1:
            return model
        model = inner[0]
