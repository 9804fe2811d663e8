"""Follows the code of a description to the letter: runs it, and reads what it advises."""

from __future__ import annotations

import ast
import warnings
from typing import Any

import torch
from torch import nn

from kernel import optimizer
from layouts import params_of


def run(code: str, model: nn.Module, **names: Any) -> dict[str, Any]:
    """What the code defines, where ``model``, ``optimizer`` and ``names`` are at hand."""
    space = {"model": model, "optimizer": optimizer, **names}
    exec(code, space)
    return space


def arguments(code: str, space: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the calls that make the groups and the optimizer."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("optimizer."):
            if ast.unparse(node.func) == "optimizer.default_is_muon":
                continue
            for keyword in node.keywords:
                found[keyword.arg] = eval(ast.unparse(keyword.value), space)
    return found


def everything(name: str, param: torch.Tensor) -> bool:
    """An `is_muon_func` that takes all parameters for Muon's."""
    return True


def take_a_step(optim: torch.optim.Optimizer) -> None:
    """With random gradients; every parameter moves and stays finite."""
    params = params_of(optim)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.randn_like(p)
    optim.step()
    for p, old in zip(params, before):
        assert p.isfinite().all() and not (p.numel() and torch.equal(p, old))


def follow(model: nn.Module, **given: Any) -> Any:
    """The description of a model, whose code was run, was trained with, and left no warning."""
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    description = optimizer.describe(model, **given)
    for name, p in model.named_parameters():
        assert p is before[name][0] and p.grad is None
        assert p.is_meta or torch.equal(p, before[name][1])
    functions = {key: value for key, value in given.items() if callable(value)}
    names = {**functions, **{value.__name__: value for value in functions.values()}}
    space = run(description.code, model, **names)
    if not any(p.is_meta for p in model.parameters()):
        take_a_step(space["optim"])
    again = optimizer.describe(model, **arguments(description.code, space))
    assert again.warnings == [], again
    for names, algorithm in zip(space["optim"].names, ("Muon", "AdamW")):
        names = [name.removeprefix("module.") for name in names]  # DDP's
        assert names == names_of(again, algorithm)
    assert max(map(len, str(description).splitlines())) < 160
    return description


def follow_apart(model: nn.Module, **given: Any) -> Any:
    """Follows the description of a caller who gives neither ``expert_keys`` nor ``split``: what it
    advises to write is what `Muon.for_model` finds by itself."""
    description = follow(model, **{"expert_keys": None, "split": None, **given})
    written = arguments(description.code, run(description.code, model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim = optimizer.Muon.for_model(model, lr=1e-3, convolutions="convolutions" in written)
    assert optim.defaults["split"] == written.get("split")
    assert optim.param_groups[0]["expert_keys"] == written.get("expert_keys")
    return description


def names_of(description: Any, algorithm: str) -> list[str]:
    return [row["name"] for row in description.rows if row["algorithm"] == algorithm]


def reasons(description: Any) -> dict[str, str]:
    return {row["name"]: row["reason"] for row in description.rows}


def kinds(traps: list[Any]) -> list[str]:
    return [trap.kind for trap in traps]
