"""Trainings as data, and what a rank does with one: takes its steps beside one process's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from breaking import contents, refused
from comparisons import assert_equal
from layouts import (
    EXACT,
    MEMORY,
    Group,
    Twins,
    Weight,
    lay,
    local,
    part_for,
    random,
    whole,
)


@dataclass(frozen=True)
class Case:
    """A training of some steps.

    Args:
        groups: param groups.
        options: of the optimizer.
        gradients: of each step what it is like, for each weight: how it lies in
            memory, one of `MEMORY`, or "absent", "zeros", "tiny", "large", or "absent on one rank",
            the last.
        frozen: numbers of weights that get no gradient, and do not require it.
        logits: of each step the largest of each head of layer 0, for QK-Clip.
        replicas: of plain weights: None, they are a rank's own; else "DDP" or "ZeRO-2".
    """

    groups: Sequence[Group]
    options: Mapping[str, Any]
    gradients: Sequence[Sequence[str]]
    frozen: Sequence[int] = ()
    logits: Sequence[Sequence[float]] | None = None
    replicas: str | None = None

    @property
    def weights(self) -> list[tuple[Weight, Group]]:
        return [(weight, group) for group in self.groups for weight in group.weights]


def twins_of(case: Case) -> Twins:
    options = {**EXACT, **case.options}
    reference = {**options}
    if case.replicas is not None:
        options["process_group"] = dist.group.WORLD
        options["grad_reduce"] = "mean" if case.replicas == "ZeRO-2" else None
    twins = Twins.placed(case.groups, options, reference)
    for number in case.frozen:
        for param in twins.pairs[number][1:]:
            param.requires_grad_(False)
    return twins


def takes_the_steps_of_one_process(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twins = twins_of(case)
        generator = torch.Generator().manual_seed(1)
        for step, kinds in enumerate(case.gradients):
            give_gradients(twins, kinds, case.frozen, generator)
            logits, of_rank = logits_of(case, step)
            check_inputs_unchanged(twins, case, of_rank)
            twins.reference.step(qk_logits=logits)
        twins.compare()


def logits_of(case: Case, step: int) -> tuple[Any, Any]:
    """All of them, and those that this rank has seen."""
    if case.logits is None:
        return None, None
    logits = torch.tensor(case.logits[step])
    seen = torch.arange(len(logits)) % dist.get_world_size() == dist.get_rank()
    return {0: logits}, {0: torch.where(seen, logits, -math.inf)}


def give_gradients(twins: Twins, kinds: Any, frozen: Any, generator: torch.Generator) -> None:
    for number, ((_, p, q), kind) in enumerate(zip(twins.pairs, kinds)):
        p.grad = q.grad = None
        if kind == "absent" or number in frozen:
            continue
        grad = random(q.shape, q.dtype, generator)
        if kind in ("zeros", "tiny", "large"):
            grad = grad * {"zeros": 0.0, "tiny": 1e-20, "large": 2.0**20}[kind]
        q.grad = lay(grad, "contiguous")
        p.grad = lay(part_for(p, grad), kind if kind in MEMORY else "contiguous")
        if kind == "absent on one rank":
            is_here = dist.get_rank() == dist.get_world_size() - 1
            if is_here:
                p.grad.to_local().zero_()
            q.grad = whole(p.grad).clone()
            if is_here:
                p.grad = None


def check_inputs_unchanged(twins: Twins, case: Case, logits: Any) -> None:
    """Steps, and looks at all that a step has no business with."""
    held = [(p.grad, None if p.grad is None else local(p.grad).clone()) for _, p, _ in twins.pairs]
    frozen = [twins.pairs[number][1] for number in case.frozen]
    before = [(local(p).detach().clone(), p._version) for p in frozen]
    given = None if logits is None else {key: value.clone() for key, value in logits.items()}
    rng, world = torch.get_rng_state(), surroundings()
    *_, groups = contents(twins.ours)

    twins.ours.step(qk_logits=logits)

    assert torch.equal(torch.get_rng_state(), rng) and surroundings() == world
    assert contents(twins.ours)[-1] == groups
    for (name, p, _), (grad, values) in zip(twins.pairs, held):
        if grad is not None:
            assert_equal(local(grad), values, f"gradient of {name}")
            assert p.grad is grad or (p.grad is None and "momentum_buffer" in twins.ours.state[p])
    for p, (values, version) in zip(frozen, before):
        assert torch.equal(local(p), values) and p._version == version
        assert p not in twins.ours.state
    if given is not None:
        assert logits.keys() == given.keys()
        for key, value in given.items():
            assert_equal(logits[key], value, "logits")


def surroundings() -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()


def refuse_garbage_of_one_rank(where: str, value: Any, bad: int) -> None:
    """What one rank alone is given raises on all, and changes nothing; then all go on."""
    ranks = (dist.get_world_size(),)
    weights = [Weight((10, 12), ranks, (0,)), Weight((10, 16), ranks, (1,)), Weight((3, 8))]
    names = ("layers.0.wq.weight", "layers.0.wk.weight", "layers.0.other.weight")
    groups = [Group(weights, {"beta2": 0.9}, names), Group([Weight((7, 3), ranks, (0,))], ADAMW)]
    options = {**EXACT, "clip_config": CLIP}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twins = Twins.placed(groups, options)
        twins.step()
    generator = torch.Generator().manual_seed(5)
    give_gradients(twins, ["contiguous"] * 4, (), generator)
    group, (_, p, _) = twins.ours.param_groups[0], twins.pairs[1]
    logits: Any = {0: [0.5, 2.0, 3.0, 0.1, 9.0]}
    good, grad, given = {**group, "names": list(names)}, p.grad, logits
    if dist.get_rank() == bad:
        if where == "logits":
            given = value
        elif where == "gradient":
            p.grad = None
        else:
            group[where] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(twins.ours, qk_logits=given)
        p.grad = grad
        group.update(good)
        twins.ours.step(qk_logits=logits)
        twins.reference.step(qk_logits=logits)
    twins.compare()


ADAMW = {"use_muon": False}
CLIP = {"head_dim": 2, "threshold": 1.0}
