"""Which parameters of a model are Muon's: by dimensions, by name, by the module that owns them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch
from torch import nn

# Name parts that wrappers put into a parameter's name: torch.compile, activation checkpointing,
# FSDP1, DDP.
WRAPPER_PARTS = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"}
)

# Owners of embeddings and output heads in the model families of the Hub.
EMBEDDINGS_AND_HEADS = frozenset(
    {
        "embed_tokens",
        "embed_positions",
        "embed_in",
        "embed_out",
        "embed",
        "embedding",
        "embeddings",
        "word_embeddings",
        "position_embeddings",
        "token_type_embeddings",
        "token_embedding",
        "tok_embedding",
        "tok_embeddings",
        "pos_embedding",
        "pos_embed",
        "patch_embed",
        "value_embeds",
        "wte",
        "wpe",
        "shared",
        "lm_head",
        "output",
        "head",
        "classifier",
        "score",
        "unembed",
        "unembedding",
    }
)


def normalize_name(name: str) -> str:
    """The parameter's name without the parts that wrappers add: ``layers.0.wq.weight``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def has_component(name: str, keys: Optional[Sequence[str]]) -> bool:
    """Whether any whole component of ``name`` is one of ``keys`` (a key may itself have dots)."""
    dotted = f".{normalize_name(name)}."
    return any(f".{key}." in dotted for key in keys or ())


def default_is_muon(
    name: str, param: torch.Tensor, expert_keys: Optional[Sequence[str]] = None
) -> bool:
    """Whether Muon should train this parameter, judged by its shape and name.

    True for matrices, and for tensors of more dimensions that ``expert_keys`` names (the leading
    dimensions count experts), unless the component that owns the parameter is an embedding or an
    output head, or the parameter is a bias. Convolutions are AdamW's unless asked for.

    Args:
        name: fully qualified name, e.g. ``"layers.0.attention.wq.weight"``.
        param: the parameter.
        expert_keys: whole components of names that hold stacked experts, e.g. ``["experts"]``.
    """
    if param.ndim < 2 or (param.ndim > 2 and not has_component(name, expert_keys)):
        return False
    parts = normalize_name(name).split(".")
    if parts[-1].split("_")[-1] == "bias":  # (experts, out) biases look like a matrix
        return False
    return EMBEDDINGS_AND_HEADS.isdisjoint(parts[-2:])


def get_default_muon_param_groups(
    model: nn.Module,
    is_muon_func: Callable[..., bool] = default_is_muon,
    expert_keys: Optional[Sequence[str]] = None,
) -> list[dict[str, Any]]:
    """Muon's and AdamW's parameter groups of a model, frozen parameters left out.

    Weights of ``nn.Embedding`` and whatever is tied to one are AdamW's whatever their name.

    Args:
        model: the model, sharded or not.
        is_muon_func: ``(name, param)`` or ``(name, param, expert_keys)`` to whether it is Muon's.
        expert_keys: see `default_is_muon`; the Muon group keeps them.

    Returns:
        Two groups, ``use_muon`` True and False, with ``params`` and ``names``; either may be empty.
    """
    takes_expert_keys = _takes_expert_keys(is_muon_func)
    embeddings = {
        id(param)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for param in module.parameters(recurse=False)
    }
    muon: dict[str, Any] = {"params": [], "names": [], "use_muon": True}
    if expert_keys is not None:
        muon["expert_keys"] = list(expert_keys)
    adamw: dict[str, Any] = {"params": [], "names": [], "use_muon": False}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        name = normalize_name(name)
        arguments = (name, param, expert_keys) if takes_expert_keys else (name, param)
        chosen = id(param) not in embeddings and is_muon_func(*arguments)
        group = muon if chosen else adamw
        group["params"].append(param)
        group["names"].append(name)
    return [muon, adamw]


def _takes_expert_keys(function: Callable[..., bool]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 3 or any(p.kind == p.VAR_POSITIONAL for p in parameters)
