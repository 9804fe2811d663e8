"""Recipes of published models: what a report or a repository says of groups and options, as a call.

A recipe takes a model and returns keyword arguments: its user writes one line::

    optimizer = Muon(**recipes.kimi_k2(model))

`published` has the numbers, and the source of each. Learning rates are the highest of a schedule;
the schedule itself is up to the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...parameters.names import has_component, normalize_name, state_dict_key
from ...rules.groups import get_default_muon_param_groups
from . import published
from .published import KIMI_K2, MOONLIGHT, NANOCHAT

__all__ = ["kimi_k2", "moonlight", "nanochat"]


def __dir__() -> list[str]:
    return __all__


def moonlight(model: nn.Module, lr: Any = MOONLIGHT["lr"]) -> dict[str, Any]:
    """`Muon`'s arguments for Moonlight, 16 B parameters (Liu et al. 2025, arXiv:2502.16982).

    Muon for matrices, routers among them; AdamW, with the same learning rate and decay (section
    2.2), for embeddings, head and norms, whose decay appendix D calls crucial.

    Args:
        model: with latent attention and experts, under the names of DeepSeek-V3 in transformers.
        lr: the highest learning rate.

    Raises:
        ValueError: no such parts.
    """
    return _deepseek_v3("moonlight", model, {**MOONLIGHT, "lr": lr})


def kimi_k2(model: nn.Module, lr: Any = KIMI_K2["lr"]) -> dict[str, Any]:
    """`Muon`'s arguments for Kimi K2, 1 T parameters: MuonClip (Kimi Team 2025, arXiv:2507.20534).

    Muon as Moonlight's, and QK-Clip: `step` wants ``qk_logits``, or a `QKLogitRecorder`.

    Args:
        model: with latent attention and experts, under the names of DeepSeek-V3 in transformers,
            and a ``config`` that has the sizes of heads.
        lr: the highest learning rate.

    Raises:
        ValueError: no such parts, or sizes.
    """
    arguments = _deepseek_v3("kimi_k2", model, {**KIMI_K2, "lr": lr})
    config = getattr(model, "config", None)
    clip: dict[str, Any] = dict(published.KIMI_K2_CLIP)
    for size in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        clip[size] = getattr(config, size, None)
        if clip[size] is None:
            raise ValueError(f"recipes.kimi_k2 needs model.config.{size}, which this model has not")
    return {**arguments, "clip_config": clip}


def _deepseek_v3(recipe: str, model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Default groups and options, of a model with the parts of DeepSeek-V3."""
    params = dict(model.named_parameters())
    for part in published.DEEPSEEK_V3:
        words = part.split()
        if not any(has_component(name, words) for name in params):
            raise _missing(recipe, " or ".join(words), model)
    stacked = [n for n, p in params.items() if p.ndim == 3 and has_component(n, ["experts"])]
    groups = get_default_muon_param_groups(model, expert_keys=["experts"] if stacked else None)
    arguments = {"params": groups, **options}
    if any(has_component(name, ["gate_up_proj"]) for name in stacked):
        arguments["split"] = dict(published.STACKED_EXPERTS)
    return arguments


def nanochat(
    model: nn.Module,
    unembedding_lr: float = NANOCHAT["unembedding_lr"],
    embedding_lr: float = NANOCHAT["embedding_lr"],
    matrix_lr: float = NANOCHAT["matrix_lr"],
    weight_decay: float = NANOCHAT["weight_decay"],
    scalar_lr: float = NANOCHAT["scalar_lr"],
) -> dict[str, Any]:
    """`MuonAdamW`'s arguments for nanochat's GPT of July 2026 (karpathy/nanochat at 92d63d4).

    Args:
        model: with nanochat's names of parameters, and no others.
        unembedding_lr, embedding_lr, matrix_lr, weight_decay, scalar_lr: arguments of
            ``setup_optimizer``, by default those of scripts/base_train.py before it adapts them to
            batch size and horizon.

    Raises:
        ValueError: a part is missing, or a parameter belongs to none.
    """
    left = {state_dict_key(name): param for name, param in model.named_parameters()}

    def take(parts: Sequence[str]) -> dict[str, Any]:
        """Parameters, and their names, that begin with any of the parts."""
        chosen: dict[str, nn.Parameter] = {}
        for part in parts:
            names = [n for n in left if f"{normalize_name(n)}.".startswith(f"{part}.")]
            if not names:
                raise _missing("nanochat", part, model)
            chosen.update({name: left.pop(name) for name in names})
        return {"params": list(chosen.values()), "names": list(chosen)}

    tables = [p for n, p in left.items() if normalize_name(n) == "transformer.wte.weight"]
    by_width = (tables[0].shape[1] / published.NANOCHAT_WIDTH) ** -0.5 if tables else 1.0
    rates = {"unembedding_lr": unembedding_lr * by_width, "embedding_lr": embedding_lr * by_width}
    rates.update(scalar_lr=scalar_lr, constant=1.0)
    groups = []
    for parts, (factor, argument), betas, decay in published.NANOCHAT_ADAMW:
        own = {"kind": "adamw", "lr": factor * rates[argument], "betas": betas}
        own.update(eps=published.NANOCHAT_ADAMW_EPS, weight_decay=decay)
        groups.append({**take(parts), **own})
    own = {"kind": "muon", "lr": matrix_lr, "weight_decay": weight_decay}
    matrices = {**take(published.NANOCHAT_MATRICES), **own, **published.NANOCHAT_MUON}
    groups.append(matrices)
    for group in groups:
        group["initial_lr"] = group["lr"]
    left.update((n, p) for n, p in zip(matrices["names"], matrices["params"]) if p.ndim != 2)
    for name, param in left.items():
        raise ValueError(f"recipes.nanochat has no group for {name}, {tuple(param.shape)}")
    return {"param_groups": groups, "version": "2026-07"}


def _missing(recipe: str, part: str, model: nn.Module) -> ValueError:
    return ValueError(f"recipes.{recipe} names {part}, which this {type(model).__name__} has not")
