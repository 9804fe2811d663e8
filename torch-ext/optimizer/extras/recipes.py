"""Recipes of published models: what a report or a repository says of groups and options, as a call.

A recipe takes a model and returns keyword arguments: its user writes one line::

    optimizer = Muon(**recipes.kimi_k2(model))

Beside each number stands its source. Where a source does not give a number, a comment says so, and
the number is that of another source, on which it builds. Learning rates are the highest of a
schedule; the schedule itself is up to the trainer. A ValueError is raised for a model without the
parts that the recipe names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..parameters.default_groups import get_default_muon_param_groups
from ..parameters.names import has_component, normalize_name, state_dict_key

__all__ = ["kimi_k2", "moonlight", "nanochat"]


def __dir__() -> list[str]:
    return __all__


# Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982, of Moonlight.
_MOONLIGHT_MUON: dict[str, Any] = {
    "momentum": 0.95,  # section 2.2, "Other Hyper-parameters"
    "nesterov": True,  # section 2.1, footnote 1; Kimi K2's algorithm 1 has the momentum alone
    "momentum_style": "classical",  # equation 1
    "ns_steps": 5,  # section 2.2: N = 5
    "ns_coefficients": "quintic",  # section 2.1, as Jordan et al. 2024
    "ns_eps_absolute": 1e-7,  # not in the report: its repository's examples/toy_train.py
    "adjust_lr": "match_rms_adamw",  # equation 4: 0.2·sqrt(max(rows, cols))
    "weight_decay": 0.1,  # section 3.3, all stages; Kimi K2: section 2.5
    "adamw_betas": (0.9, 0.95),  # not in the report: examples/toy_train.py
    "adamw_eps": 1e-8,  # likewise
}


def moonlight(model: nn.Module, lr: Any = 4.2e-4) -> dict[str, Any]:
    """Moonlight, 16 B parameters, built as DeepSeek-V3 is (Liu et al. 2025, arXiv:2502.16982).

    Muon for matrices, routers among them; AdamW, with the same learning rate and decay (section
    2.2), for embeddings, head and norms, whose decay appendix D calls crucial. Gate and up
    projections of stacked experts are matrices of their own, as DeepSeek-V3's published code
    stores them; the report does not say.

    Args:
        model: with latent attention and experts, under the names of DeepSeek-V3 in transformers.
        lr: 4.2e-4 after a warm-up of 2,000 steps, in a cosine to 4.2e-5 (section 3.3).

    Returns:
        Arguments of `Muon`.

    Raises:
        ValueError: no such parts.
    """
    _require(model, "moonlight", _DEEPSEEK_V3)
    experts = [
        name
        for name, param in model.named_parameters()
        if param.ndim == 3 and has_component(name, ["experts"])
    ]
    groups = get_default_muon_param_groups(model, expert_keys=["experts"] if experts else None)
    arguments = {"params": groups, "lr": lr, **_MOONLIGHT_MUON}
    if any(has_component(name, ["gate_up_proj"]) for name in experts):
        arguments["split"] = {"experts.gate_up_proj": "(n + n) dim"}
    return arguments


def kimi_k2(model: nn.Module, lr: Any = 2e-4) -> dict[str, Any]:
    """Kimi K2, 1 T parameters: MuonClip (Kimi Team 2025, arXiv:2507.20534).

    Muon as Moonlight's, whose momentum, iteration and AdamW stand in for what this report does not
    say, and QK-Clip: `step` wants ``qk_logits``, or a `QKLogitRecorder`.

    Args:
        model: with latent attention and experts, under the names of DeepSeek-V3 in transformers,
            and a ``config`` that has the sizes of heads.
        lr: 2e-4, constant over 10 T tokens after a warm-up of 500 steps, then in a cosine to 2e-5
            (section 2.5).

    Returns:
        Arguments of `Muon`.

    Raises:
        ValueError: no such parts, or sizes.
    """
    _require(model, "kimi_k2", _DEEPSEEK_V3)
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config = getattr(model, "config", None)
    for size in sizes:
        if getattr(config, size, None) is None:
            raise ValueError(f"recipes.kimi_k2 needs model.config.{size}, which this model has not")
    clip = {"is_mla": True, **{size: getattr(config, size) for size in sizes}}
    clip["threshold"] = 100.0  # section 2.1: τ = 100
    return {**moonlight(model, lr), "clip_config": clip}


# Components of names that a model must have; of several in one string, one is enough.
_DEEPSEEK_V3 = (
    "embed_tokens",
    "q_b_proj q_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "experts",
    "lm_head",
)


def nanochat(
    model: nn.Module,
    unembedding_lr: float = 0.008,
    embedding_lr: float = 0.3,
    matrix_lr: float = 0.02,
    weight_decay: float = 0.28,
    scalar_lr: float = 0.5,
) -> dict[str, Any]:
    """nanochat's GPT of July 2026 (karpathy/nanochat at 92d63d4).

    Args:
        model: with nanochat's names of parameters, and no others.
        unembedding_lr, embedding_lr, matrix_lr, weight_decay, scalar_lr: arguments of
            ``setup_optimizer``, by default those of scripts/base_train.py, which multiplies them by
            batch size and horizon first, and has schedules for all of them and the momentum.

    Returns:
        Arguments of `MuonAdamW`.

    Raises:
        ValueError: a part is missing, or a parameter belongs to none.
    """
    width = 768  # for which the source gives the rates of embeddings and head
    for name, param in model.named_parameters():
        if normalize_name(name) == "transformer.wte.weight":
            width = param.shape[1]
    unembedding_lr, embedding_lr = (
        rate * (width / 768) ** -0.5 for rate in (unembedding_lr, embedding_lr)
    )
    # By the beginnings of names: lr, betas and decay. These and the options below are from
    # ``GPT.setup_optimizer`` in nanochat/gpt.py.
    adamw_options: dict[tuple[str, ...], tuple[float, tuple[float, float], float]] = {
        ("lm_head",): (unembedding_lr, (0.8, 0.96), 0.01),
        ("transformer.wte",): (embedding_lr, (0.8, 0.995), 0.001),
        ("value_embeds",): (0.5 * embedding_lr, (0.8, 0.995), 0.01),
        ("resid_lambdas",): (0.01 * scalar_lr, (0.8, 0.95), 0.05),
        ("x0_lambdas",): (scalar_lr, (0.96, 0.95), 0.0),
        ("smear_gate", "smear_lambda", "backout_lambda"): (0.2, (0.8, 0.95), 0.0),
    }
    groups = []
    for parts, (lr, betas, decay) in adamw_options.items():
        how = {"kind": "adamw", "lr": lr, "betas": betas, "eps": 1e-10, "weight_decay": decay}
        groups.append({**_part(model, parts), **how})
    matrices = {**_part(model, ("transformer.h",)), "kind": "muon", "lr": matrix_lr}
    how = {"momentum": 0.95, "ns_steps": 5, "beta2": 0.9, "weight_decay": weight_decay}
    groups.append({**matrices, **how})
    taken = {id(param) for group in groups for param in group["params"]}
    for name, param in model.named_parameters():
        is_muons = state_dict_key(name) in groups[-1]["names"]
        if id(param) not in taken or (param.ndim != 2 and is_muons):
            raise ValueError(f"recipes.nanochat has no group for {name}, {tuple(param.shape)}")
    for group in groups:
        group["initial_lr"] = group["lr"]
    return {"param_groups": groups, "version": "2026-07"}


def _part(model: nn.Module, parts: Sequence[str]) -> dict[str, Any]:
    """Parameters and names of nanochat's GPT that begin with any of these parts."""
    named = {state_dict_key(name): param for name, param in model.named_parameters()}
    chosen: dict[str, nn.Parameter] = {}
    for part in parts:
        matching = {
            k: p for k, p in named.items() if f"{normalize_name(k)}.".startswith(f"{part}.")
        }
        if not matching:
            raise ValueError(
                f"recipes.nanochat names {part}, which this {type(model).__name__} has not"
            )
        chosen.update(matching)
    return {"params": list(chosen.values()), "names": list(chosen)}


def _require(model: nn.Module, recipe: str, parts: Sequence[str]) -> None:
    """Raises where no parameter has a part among the components of its name."""
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        if not any(has_component(name, part.split()) for name in names):
            wanted = " or ".join(part.split())
            raise ValueError(
                f"recipes.{recipe} names {wanted}, which this {type(model).__name__} has not"
            )
