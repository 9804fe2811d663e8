"""Writes the notes that ranks compare before a step: parameters, options, gradients, the plan.

`distributed.agreement` exchanges these notes; then all ranks step, or all raise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from torch import Tensor

from ..distributed import dtensors
from ..distributed.agreement import Ranks, Registration, StepNotes
from ..distributed.plan import Entry
from ..parameters.options import GROUP_OPTIONS, SETTINGS, Group, Settings
from ..parameters.survey import Survey
from ..state.specs import divided_rows
from .context import Step


def take_notes(
    step: Step, survey: Survey, registration: Registration, steps: int
) -> dict[Ranks, StepNotes]:
    """Writes down what must be equal on each set of ranks.

    Ranks of a mesh must agree on the parameters on it. Ranks that hold parts or replicas of the
    same matrices must agree on which of these have gradients, and ranks of a lane on what they
    exchange.

    Args:
        step: this step.
        survey: the survey of its parameters.
        registration: gives this optimizer's number among those that a set of ranks shares.
        steps: number of steps that the optimizer has taken.
    """
    groups, plan, settings = step.groups, step.plan, step.settings
    clip_lines = step.clipping.notes if step.clipping else {}
    lines: dict[Ranks, list[str]] = defaultdict(list)
    gradients: dict[Ranks, list[str]] = defaultdict(list)
    owners: dict[Ranks, str] = defaultdict(str)
    for ranks, shared in survey.shared.items():
        lines[ranks] += [*_setting_lines(settings, ranks), *shared.lines]
        for number, (first, _) in shared.groups.items():
            lines[ranks] += [
                f"{key} = {_value_text(getattr(groups[number], key))} in the group of {first}"
                for key in GROUP_OPTIONS
            ]
    for group, names in zip(groups, survey.names):
        for param, name in zip(group.params, names) if not group.use_muon else ():
            replicas = _adamw_replicas(param, group, plan.rank, settings)
            if len(replicas) > 1:
                gradients[replicas].append(name)
    for ranks, layers in clip_lines.items():
        lines[ranks] += layers
    for number, entry in enumerate(plan.entries):
        if number not in step.absent:
            param = groups[entry.group].params[entry.index]
            for ranks in _gradient_sets(entry, param, plan.rank, settings):
                gradients[ranks].append(entry.name)
    for lane in plan.lanes:
        owners[lane.peers] += lane.digest
    return {
        ranks: StepNotes(
            lines.get(ranks, ()),
            gradients.get(ranks, ()),
            owners.get(ranks, ""),
            f"optimizer {registration.number(ranks)} (counting from 0) after {steps} steps"
            if ranks in survey.shared
            else "",
        )
        for ranks in {**lines, **gradients, **owners}
    }


def replica_difference(
    step: Step, names: Sequence[Sequence[str]], state: Mapping[Any, Mapping[str, Any]]
) -> Optional[str]:
    """Describes how replicas differ: in weights, in gradients that the step doesn't average, or
    because two of them have the same part of divided state. None if all is well."""
    replicas = step.settings.replicas
    if replicas is None:
        return None
    plain = [
        (name, param, divided_rows(state.get(param, {})))
        for group, group_names in zip(step.groups, names)
        for name, param in zip(group_names, group.params)
        if param.requires_grad and not dtensors.is_dtensor(param)
    ]
    return replicas.difference(plain, averaged=step.settings.zero2_replicas is None)


def _setting_lines(settings: Settings, ranks: Ranks) -> list[str]:
    """The settings as lines. Only replicas compare process groups: a mesh's ranks may differ."""
    values = {key: getattr(settings, key) for key in SETTINGS}
    values["state streamed (turn_on_cpu_offload)"] = settings.streams_state
    if ranks == settings.replica_ranks:
        values["process_group"] = settings.replicas
    return [f"{key} = {value!r}" for key, value in values.items()]


def _value_text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.device.type != "cpu":  # reading it would wait for the device
        return f"a tensor on {value.device.type}"
    return f"tensor({value.item()})"


def _gradient_sets(entry: Entry, param: Tensor, rank: int, settings: Settings) -> list[Ranks]:
    """The sets of ranks that must all take part in an entry, because this rank does.

    Unless replicas average gradients, either all ranks that hold the same part have a gradient, or
    none has: among them, a missing gradient counts as absent, even with ``missing_grad="zero"``.
    Otherwise replicas would diverge, or a matrix would mix a gradient with zeros.
    """
    holders = entry.holders(rank)
    averaged = entry.momentum_sharding is not None and settings.zero2_replicas is not None
    if averaged or entry.sharding is None:
        return [holders]
    replicas = entry.sharding.peers(rank, (), replicas=True)
    if param.grad is None:
        return [] if replicas == holders else [holders]
    return [holders] if replicas == holders or len(replicas) == 1 else [holders, replicas]


def _adamw_replicas(param: Tensor, group: Group, rank: int, settings: Settings) -> Ranks:
    """The ranks that hold the same part of an AdamW parameter, and must update it, too.

    Empty if this rank takes no part. If every rank applies its own gradient, a gradient missing on
    this rank counts as absent: zeros on only some ranks would make replicas diverge.
    """
    sharding = dtensors.sharding_of(param)
    is_averaged = sharding is None and settings.zero2_replicas is not None
    if not (group.takes_part(param) and (is_averaged or param.grad is not None)):
        return ()
    if sharding is None:
        return settings.replica_ranks or ()
    return sharding.peers(rank, (), replicas=True)
