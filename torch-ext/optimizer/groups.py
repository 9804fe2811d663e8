"""Which parameters of a model are Muon's: by dimensions, by name, by the module that owns them."""

from __future__ import annotations

import inspect
import sys
import warnings
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
        "position_embedding",
        "position_embeddings",
        "token_type_embeddings",
        "token_embedding",
        "tok_embedding",
        "tok_embeddings",
        "pos_embedding",
        "pos_embed",
        "patch_embed",
        "value_embeds",
        "tok_emb",
        "pos_emb",
        "wte",
        "wpe",
        "shared",
        "lm_head",
        "lm_heads",
        "output_layer",
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
    owner, attribute = _owner_and_attribute(name)
    if attribute.split("_")[-1] == "bias":  # (experts, out) biases look like a matrix
        return False
    return owner not in EMBEDDINGS_AND_HEADS and attribute not in EMBEDDINGS_AND_HEADS


def _owner_and_attribute(name: str) -> tuple[str, str]:
    """The component that owns the parameter and what it calls it: ``("wq", "weight")``.

    Indices of lists are looked through, and so are parametrizations: both ``lm_head.0.weight`` and
    ``lm_head.parametrizations.weight.original0`` are ``lm_head``'s ``weight``.
    """
    parts = normalize_name(name).split(".")
    if "parametrizations" in parts[:-1]:
        index = parts.index("parametrizations")
        parts = [*parts[:index], parts[index + 1]]
    named = [part for part in parts if not part.isdigit()]
    return (named[-2] if len(named) > 1 else ""), (named[-1] if named else "")


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

    Raises:
        ValueError: no model; one that FSDP1 has flattened.

    Returns:
        Two groups, ``use_muon`` True and False, with ``params`` and ``names``; either may be empty.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"takes a model (nn.Module), found a {type(model).__name__}")
    _check_not_flattened(model)
    if isinstance(expert_keys, str):
        expert_keys = [expert_keys]
    takes_expert_keys = _takes_expert_keys(is_muon_func)
    embeddings = {
        id(param)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for param in module.parameters()  # of its parametrizations too
    }
    muon: dict[str, Any] = {"params": [], "names": [], "use_muon": True}
    if expert_keys is not None:
        muon["expert_keys"] = list(expert_keys)
    adamw: dict[str, Any] = {"params": [], "names": [], "use_muon": False}
    names = [name for name, _ in model.named_parameters()]
    for key in expert_keys or ():
        if not any(has_component(name, [key]) for name in names):
            warnings.warn(f"expert_keys: no parameter has a component {key!r}", stacklevel=2)
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


def _check_not_flattened(model: nn.Module) -> None:
    """FSDP1 leaves no matrices: all of the model would be AdamW's, and nothing would say so."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is None:
        return
    wrappers = [module for module in model.modules() if isinstance(module, fsdp)]
    if any(wrapper.sharding_strategy.name != "NO_SHARD" for wrapper in wrappers):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), whose parameters are pieces "
            "of one long vector and no matrices: shard it by fully_shard (FSDP2), which is "
            "fsdp_version=2 in accelerate and transformers"
        )


def _takes_expert_keys(function: Callable[..., bool]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) >= 3:  # a third one with a default is the caller's own, unless it says so
        third = positional[2]
        return third.name == "expert_keys" or third.default is third.empty
    return any(p.kind == p.VAR_POSITIONAL for p in parameters)
