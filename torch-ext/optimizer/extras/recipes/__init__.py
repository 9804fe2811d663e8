"""Recipes: parameter groups and options of published models.

A recipe takes a model and returns keyword arguments::

    optim = Muon(**recipes.kimi_k2(model))

published.json lists each value with its source, a section of a report or a file. Numbers missing
from Kimi K3's and GLM-5's reports are required arguments. Where these reports don't spell out the
algorithm, it comes from the recipes they build on: Nesterov momentum, the polynomials, and the
scale of Kimi K3's updates. Learning rates are the peaks of schedules, which the trainer supplies.
"""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Sequence
from typing import Any, Optional

from torch import nn

from ...parameters.names import has_component, normalize_name, state_dict_key
from ...rules.groups import get_default_muon_param_groups

__all__ = ["deepseek_v4", "glm_5", "kimi_k2", "kimi_k3", "moonlight", "nanochat"]


def __dir__() -> list[str]:
    return __all__


def moonlight(model: nn.Module, lr: Any = None) -> dict[str, Any]:
    """Arguments of `Muon` for Moonlight, 16 B parameters (Liu et al. 2025, arXiv:2502.16982).

    Muon trains matrices, including routers. AdamW, with the same learning rate and decay (section
    2.2), trains embeddings, head, and norms, whose decay appendix D calls crucial.

    Args:
        model: a model with latent attention, experts, and the names of transformers' DeepSeek-V3.
        lr: the peak learning rate; None is the published one.

    Raises:
        ValueError: the model lacks these parts.
    """
    return _arguments("moonlight", model, lr=lr)


def kimi_k2(model: nn.Module, lr: Any = None) -> dict[str, Any]:
    """Arguments of `Muon` for Kimi K2, 1 T parameters: MuonClip (Kimi Team 2025, arXiv:2507.20534).

    Moonlight's Muon with QK-Clip: `step` needs ``qk_logits`` or a `QKLogitRecorder`.

    Args:
        model: a model with latent attention, experts, the names of transformers' DeepSeek-V3, and
            head sizes in its ``config``.
        lr: the peak learning rate; None is the published one.

    Raises:
        ValueError: the model lacks these parts or sizes.
    """
    return _arguments("kimi_k2", model, lr=lr)


def kimi_k3(
    model: nn.Module,
    lr: Any,
    *,
    momentum: float,
    ns_steps: int,
    threshold: float,
    adamw_betas: tuple[float, float],
    adamw_eps: float,
) -> dict[str, Any]:
    """Arguments of `Muon` for Kimi K3, 2.8 T parameters: Per-Head Muon (arXiv:2607.24653).

    Muon and QK-Clip as in Kimi K2, but each head of query, key, and value projections is
    orthogonalized separately, in delta attention and in latent attention. AdamW trains embeddings,
    head, vectors, convolutions, and what torchtitan's recipe of Kimi K3 leaves to it: beta,
    residual projections with one row, and the vision tower.

    Args:
        model: a model with the names of the published weights, and the head sizes of latent
            attention in its ``config``. Attention modules must have their head sizes too.
        lr, momentum, ns_steps, adamw_betas, adamw_eps: as in `Muon`; the report has none of them.
        threshold: of ``clip_config``; the report doesn't have it either.

    Raises:
        ValueError: the model lacks these parts or sizes.
    """
    given = dict(lr=lr, momentum=momentum, ns_steps=ns_steps, adamw_eps=adamw_eps)
    arguments = _arguments("kimi_k3", model, adamw_betas=adamw_betas, **given)
    config = {**arguments["clip_config"], "threshold": threshold}
    names = [normalize_name(name) for name, _ in model.named_parameters()]
    latent = [
        name.partition(".kv_b_proj.")[0] for name in names if has_component(name, ["kv_b_proj"])
    ]
    return {**arguments, "clip_config": dict.fromkeys(latent, config)}


def glm_5(
    model: nn.Module, lr: Any = None, *, adamw_betas: tuple[float, float], adamw_eps: float
) -> dict[str, Any]:
    """Arguments of `Muon` for GLM-5, 744 B parameters: Muon Split (arXiv:2602.15763).

    Latent attention's up-projections to queries, keys, and values are orthogonalized head by head,
    which kept logits bounded without clipping (section 2.1). The settings are GLM-4.5's.

    Args:
        model: a model with latent attention, experts, and the names of transformers' GLM-5.
        lr: the peak learning rate; None is the published one.
        adamw_betas, adamw_eps: as in `Muon`; the reports have neither.

    Raises:
        ValueError: the model lacks these parts.
    """
    return _arguments("glm_5", model, lr=lr, adamw_betas=adamw_betas, adamw_eps=adamw_eps)


def deepseek_v4(model: nn.Module, lr: Any = None) -> dict[str, Any]:
    """Arguments of `Muon` for DeepSeek-V4, up to 1.6 T parameters (arXiv:2606.19348).

    AdamW trains the embedding, the prediction head, norms, and the static biases and gating factors
    of hyper-connections; Muon trains all other matrices. The report doesn't mention the position
    biases of compressors: AdamW trains them, like all biases.

    Args:
        model: a model with the names of transformers' DeepSeek-V4, and ``o_lora_rank`` in its
            ``config``.
        lr: the peak learning rate; None is DeepSeek-V4-Pro's, which is lower than Flash's.

    Raises:
        ValueError: the model lacks these parts or sizes.
    """
    return _arguments("deepseek_v4", model, lr=lr)


def nanochat(
    model: nn.Module,
    unembedding_lr: Optional[float] = None,
    embedding_lr: Optional[float] = None,
    matrix_lr: Optional[float] = None,
    weight_decay: Optional[float] = None,
    scalar_lr: Optional[float] = None,
) -> dict[str, Any]:
    """Arguments of `MuonAdamW` for nanochat's GPT of July 2026 (karpathy/nanochat at 92d63d4).

    Args:
        model: a model with exactly the parameter names of nanochat's GPT.
        unembedding_lr, embedding_lr, matrix_lr, weight_decay, scalar_lr: arguments of
            ``setup_optimizer``. None uses the value in scripts/base_train.py, before that script
            adapts it to batch size and horizon.

    Raises:
        ValueError: a part is missing, or a parameter belongs to no part.
    """
    given = dict(unembedding_lr=unembedding_lr, embedding_lr=embedding_lr, matrix_lr=matrix_lr)
    given.update(weight_decay=weight_decay, scalar_lr=scalar_lr)
    published = _values("nanochat")
    rates = {**published["rates"], **{k: v for k, v in given.items() if v is not None}}
    left = {state_dict_key(name): param for name, param in model.named_parameters()}
    tables = [p for n, p in left.items() if normalize_name(n) == "transformer.wte.weight"]
    by_width = (tables[0].shape[1] / published["width"]) ** -0.5 if tables else 1.0

    def group(parts: Sequence[str], **options: Any) -> dict[str, Any]:
        """A group of the parameters whose names begin with any of the parts."""
        chosen: dict[str, nn.Parameter] = {}
        for part in parts:
            names = [n for n in left if f"{normalize_name(n)}.".startswith(f"{part}.")]
            if not names:
                raise _missing("nanochat", part, model)
            chosen.update({name: left.pop(name) for name in names})
        params, lr = list(chosen.values()), options["lr"]
        return {"params": params, "names": list(chosen), **options, "initial_lr": lr}

    scaled = {key: rates[key] * by_width for key in ("unembedding_lr", "embedding_lr")}
    scaled.update(scalar_lr=rates["scalar_lr"], constant=1.0)
    groups = []
    for options in published["adamw"]:
        factor, rate = options["lr"]
        own = {**options, "lr": factor * scaled[rate], "betas": tuple(options["betas"])}
        groups.append(group(kind="adamw", eps=published["adamw_eps"], **own))
    own = {"lr": rates["matrix_lr"], "weight_decay": rates["weight_decay"], **published["muon"]}
    groups.append(group(kind="muon", **own))
    left.update((n, p) for n, p in zip(groups[-1]["names"], groups[-1]["params"]) if p.ndim != 2)
    for name, param in left.items():
        raise ValueError(f"recipes.nanochat has no group for {name}, {tuple(param.shape)}")
    return {"param_groups": groups, "version": "2026-07"}


def _arguments(recipe: str, model: nn.Module, **given: Any) -> dict[str, Any]:
    """Arguments of `Muon` from a recipe in published.json and the ``given`` values except None.

    A value "config.x" stands for ``x`` of the model's config. The keys ``parts`` and ``split``
    contain components of parameters' names.
    """
    names = [name for name, _ in model.named_parameters()]

    def has(component: str) -> bool:
        return any(has_component(name, [component]) for name in names)

    def resolve(value: Any) -> Any:
        if not (isinstance(value, str) and value.startswith("config.")):
            return value
        size = getattr(getattr(model, "config", None), value[len("config.") :], None)
        if size is None:
            raise ValueError(f"recipes.{recipe} needs model.{value}, which is missing")
        return size

    options = {**_values(recipe), **{k: v for k, v in given.items() if v is not None}}
    for part in options.pop("parts"):
        if not any(map(has, part.split())):
            raise _missing(recipe, " or ".join(part.split()), model)
    stacked = any(
        p.ndim == 3 and has_component(n, ["experts"]) for n, p in model.named_parameters()
    )
    groups = get_default_muon_param_groups(
        model,
        expert_keys=["experts"] if stacked else None,
        adamw_keys=list(filter(has, options.pop("adamw_keys", []))),
        per_head=options.pop("per_head", False),
    )
    split = {name: resolve(value) for name, value in options.pop("split").items() if has(name)}
    groups[0]["split"] = {**groups[0].get("split", {}), **split} or None
    options["params"] = groups
    if "clip_config" in options:
        options["clip_config"] = {k: resolve(value) for k, value in options["clip_config"].items()}
    options["adamw_betas"] = tuple(options["adamw_betas"])
    return options


def _values(recipe: str) -> dict[str, Any]:
    """The values of a recipe by key, including values of the recipe it builds on."""
    entries = json.loads(_published())[recipe]
    values = _values(entries["builds_on"]) if "builds_on" in entries else {}
    values.update((k, entry["value"]) for k, entry in entries.items() if isinstance(entry, dict))
    return values


@functools.cache
def _published() -> bytes:
    """The text of published.json, read on first use."""
    return pkgutil.get_data(__name__, "published.json") or b""


def _missing(recipe: str, part: str, model: nn.Module) -> ValueError:
    return ValueError(f"recipes.{recipe} needs {part}, missing in this {type(model).__name__}")
