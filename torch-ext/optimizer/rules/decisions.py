"""Decides which parameters get Muon and which AdamW: by dimensions, name, and module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Callable, Optional, Union

import torch
from torch import nn

from ..parameters.names import (
    has_component,
    normalize_name,
    normalize_names,
    state_dict_key,
)
from .heads import hidden_layers, unnamed_heads
from .modules import (
    Decision,
    ParamInfos,
    expert_key,
    infos_of,
    owning_components,
    unsharded_ids,
)

ExpertKeys = Union[str, Sequence[str], None]

# Names of modules for embeddings and output heads in the model families of the Hub.
EMBEDDINGS_AND_HEADS = frozenset(
    (
        *("embed", "embed_in", "embed_out", "embed_positions", "embed_tokens", "embedding"),
        *("emb", "embedding_table", "embeddings", "word_embeddings", "word_embedding"),
        *("word_emb", "word_embed"),
        *("token_embedding", "token_embeddings", "token_embedding_table", "token_emb"),
        *("token_embed", "token_type_embeddings", "tok_emb", "tok_embed", "tok_embedding"),
        *("tok_embeddings", "wte", "shared", "value_embeds", "patch_embed"),
        *("position_embedding", "position_embeddings", "position_embedding_table"),
        *("positional_embedding", "pos_emb", "pos_embed", "pos_embedding", "pos_embeddings"),
        *("wpe", "rel_pos_h", "rel_pos_w"),
        *("relative_position_bias_table", "unembed", "unembedding", "patch_embedding"),
        *("lm_head", "lm_heads", "head", "heads", "output", "output_layer", "classifier", "score"),
        *("logits", "to_logits", "qa_outputs", "seq_relationship"),
        *("lora_embedding_A", "lora_embedding_B"),  # PEFT: (rank, vocabulary) and (dim, rank)
    )
)

# The last layers of heads with several layers; and linear layers for patches of pixels, which are
# convolutions in other models.
HEAD_PATHS = ("classifier.out_proj", "classification_head.out_proj")
PATCH_PATHS = ("patch_embed.proj", "patch_embeddings.projection", "patch_embedder.input_proj")

# Words in names of parameters whose rows are vectors of one token each.
_TABLES = {"embed", "embeds", "embedding", "embeddings", "emb", "latents", "probe", "prompt"}
_TABLES |= {"pos", "position", "positional", "positions", "prompts", "queries", "query", "table"}
_TABLES |= {"token", "tokens"}

# Two-dimensional parameters whose elements are used one by one.
ELEMENTWISE = frozenset({"A_log", "D", "alpha", "gamma", "scale", "static_weight"})
_ADAPTERS_ELEMENTWISE = "oft_R"  # PEFT: halves of skew matrices, named oft_R.<adapter>.weight

# Beginnings or ends of reasons, which other modules look for.
BY_NAME = "embedding or head by name"
DIMENSIONS = "dimensions"
BY_FUNCTION = "is_muon_func"

MOST_CHANNELS = 4  # most channels of images, or inputs per output of a depthwise convolution


def default_is_muon(
    name: str, param: torch.Tensor, expert_keys: Optional[Sequence[str]] = None
) -> bool:
    """True if Muon should train a parameter, judged by its shape and name.

    Muon gets matrices, and tensors with more dimensions if ``expert_keys`` names them (their
    leading dimensions count experts). It doesn't get embeddings, output heads, biases, complex
    parameters, parameters known not to be linear maps (Mamba's A_log), or convolutions. Some heads
    have the same name as hidden layers; `get_default_muon_param_groups` looks at the model's
    modules to tell them apart.

    Args:
        name: fully qualified name, for example ``"layers.0.attention.wq.weight"``.
        param: the parameter.
        expert_keys: whole name components that mark stacked experts, for example ``["experts"]``.
    """
    return _judge(name, param, expert_keys)[0]


def _judge(
    name: str, param: torch.Tensor, expert_keys: Optional[Sequence[str]]
) -> tuple[bool, str]:
    """Returns True if the parameter is Muon's, and the reason."""
    if param.ndim < 2:
        return False, "vector" if param.ndim else "scalar"
    components = ["", *owning_components(name)]
    module, attribute = components[-2:]
    words = set(attribute.split("_"))
    if words & {"bias", "biases"}:  # (experts, out) looks like a matrix
        return False, "bias"
    matched = [
        c
        for c in (module, attribute)
        if c in EMBEDDINGS_AND_HEADS or (c.endswith("_classifier") and not c.startswith("pre_"))
    ]
    paths = HEAD_PATHS + (PATCH_PATHS if param.ndim == 2 else ())
    matched += [path for path in paths if components[-3:-1] == path.split(".")]
    if words & _TABLES and not words & {"proj", "weight"}:
        matched.append(attribute)
    if matched:
        return False, f"{BY_NAME}: {matched[0]}"
    if attribute in ELEMENTWISE or _ADAPTERS_ELEMENTWISE in components[-3:]:
        return False, "no linear map, by name"
    is_weight = attribute == "weight" and not name.endswith(".original0")
    if param.ndim == 2 and 1 in param.shape and not is_weight:
        return False, "vector"  # magnitudes, tokens, or scales: only a layer's weight may be (1, n)
    if param.is_complex():
        return False, "complex"
    if param.ndim == 2:
        return True, "matrix"
    if has_component(name, expert_keys):
        return True, "stacked experts"
    return False, f"{param.ndim} {DIMENSIONS}"


def decide(
    model: nn.Module,
    is_muon_func: Callable[..., bool] = default_is_muon,
    expert_keys: Optional[Sequence[str]] = None,
    adamw_keys: Optional[Sequence[str]] = None,
    convolutions: bool = False,
) -> list[Decision]:
    """Decides for `get_default_muon_param_groups` which algorithm trains each parameter.

    The default rule also looks at the modules: in a stack of layers that is named a head, only the
    last matrix is one, and names of some heads and embeddings don't show what they are.

    Raises:
        ValueError: if ``model`` isn't a module, or has parameters without a shape or that FSDP2
            has temporarily gathered.
    """
    if not callable(is_muon_func):
        raise ValueError(f"is_muon_func must be a function, found {is_muon_func!r}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, found a {type(model).__name__}")
    with_keys = takes_expert_keys(is_muon_func)
    embeddings: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            for param in module.parameters():  # including its parametrizations'
                embeddings.setdefault(id(param), state_dict_key(path))
    decisions, unsharded = [], unsharded_ids(model)
    params = dict(model.named_parameters())
    keys = list(map(state_dict_key, params))
    normalized_keys = None if expert_keys is None else list(map(normalize_name, expert_keys))
    for name, key, param in zip(normalize_names(params), keys, params.values()):
        embedding = embeddings.get(id(param))
        if id(param) in unsharded:
            raise ValueError(
                f"{name} is unsharded, as fully_shard leaves it after a forward pass alone: "
                "call reshard() on the module that holds it, to restore its shard"
            )
        if nn.parameter.is_lazy(param):
            raise ValueError(f"{name} has no shape yet: first run the model once, on any batch")
        if not param.requires_grad:
            decision = "frozen", "requires_grad=False"
        elif embedding is not None:
            is_tied = not key.startswith(f"{embedding}." if embedding else "")
            reason = f"tied to {normalize_name(embedding)}" if is_tied else "embedding"
            decision = "AdamW", reason
        elif has_component(key, adamw_keys):
            decision = "AdamW", "adamw_keys"
        elif is_muon_func is default_is_muon:
            is_muon, reason = _judge(key, param, expert_keys)
            decision = "Muon" if is_muon else "AdamW", reason
        else:
            arguments = (name, param, normalized_keys) if with_keys else (name, param)
            decision = "Muon" if is_muon_func(*arguments) else "AdamW", BY_FUNCTION
        decisions.append(Decision(name, key, param, *decision))
    infos = infos_of(model)
    if is_muon_func is default_is_muon:  # modules show what is a head and what isn't
        decisions = changed(decisions, "AdamW", _no_experts(infos, decisions))
        named = [d for d in decisions if d.reason.startswith(BY_NAME)]
        hidden = hidden_layers(infos, named, decisions)
        decisions = changed(decisions, "Muon", dict.fromkeys(hidden, "matrix, no head"))
        muons = [d for d in decisions if d.algorithm == "Muon"]
        heads = unnamed_heads(model, infos, decisions, muons)
        decisions = changed(decisions, "AdamW", heads)
    if convolutions:
        kernels = [decision.name for decision in convolutions_of(model, infos, decisions)]
        decisions = changed(decisions, "Muon", dict.fromkeys(kernels, "convolution"))
    return decisions


def _no_experts(infos: ParamInfos, decisions: Sequence[Decision]) -> dict[str, str]:
    """Returns reasons, by name, why experts' parameters aren't stacked matrices.

    They are convolutions, or vectors of all experts next to stacks of the same length.
    """
    reasons = {}
    for decision in (d for d in decisions if d.algorithm == "Muon"):
        info, param = infos[id(decision.param)][0], decision.param
        if decision.reason == "stacked experts" and info.is_convolution:
            reasons[decision.name] = f"{param.ndim} {DIMENSIONS}"
        beside = [p for p in info.module._parameters.values() if p is not None and p.ndim > 2]
        is_weight = info.attribute == "weight"
        if param.ndim == 2 and not is_weight and any(len(p) == len(param) for p in beside):
            reasons[decision.name] = "vectors of stacked experts"
    return reasons


def changed(
    decisions: Sequence[Decision], algorithm: str, reasons: Mapping[str, str]
) -> list[Decision]:
    """Returns the decisions with a new algorithm for parameters whose names have a reason."""
    return [
        replace(d, algorithm=algorithm, reason=reasons[d.name]) if d.name in reasons else d
        for d in decisions
    ]


def convolutions_of(
    model: nn.Module, infos: ParamInfos, decisions: Sequence[Decision]
) -> list[Decision]:
    """Returns AdamW's convolutions that may be Muon's: not of pixels, not depthwise, not heads."""
    kernels = [
        d
        for d in decisions
        if is_left_by_dimensions(d)
        and (d.param.ndim > 3 or infos[id(d.param)][0].is_convolution)
        and min(d.param.shape[:2]) > MOST_CHANNELS
        and expert_key(model, infos[id(d.param)][0], d.param) is None
    ]
    muons = [d for d in decisions if d.algorithm == "Muon"]
    heads = unnamed_heads(model, infos, decisions, [*muons, *kernels]) if kernels else {}
    return [d for d in kernels if d.name not in heads]


def is_left_by_dimensions(decision: Decision) -> bool:
    """Returns True if a parameter is AdamW's because it has more than two dimensions."""
    by_dimensions = decision.reason.endswith(DIMENSIONS) or decision.reason == BY_FUNCTION
    return decision.algorithm == "AdamW" and decision.param.ndim > 2 and by_dimensions


def stacked_experts(
    model: nn.Module, infos: ParamInfos, decisions: Sequence[Decision]
) -> dict[str, str]:
    """Finds stacked experts that no expert key matches; returns, by name, the missing key."""
    return {
        d.name: key
        for d in decisions
        if is_left_by_dimensions(d) or (d.reason == BY_FUNCTION and d.param.ndim > 2)
        if (key := expert_key(model, infos[id(d.param)][0], d.param)) is not None
    }


def as_keys(keys: ExpertKeys) -> Optional[Sequence[str]]:
    """Returns components of names as a list, or None."""
    if isinstance(keys, str):
        return [keys]
    if keys is not None and not all(isinstance(key, str) for key in keys):
        raise ValueError(f"keys must be strings, components of names, found {keys!r}")
    return keys


def unmatched_keys(
    decisions: Sequence[Decision], expert_keys: Optional[Sequence[str]]
) -> list[str]:
    """Returns the keys that aren't a component of any name."""
    return [
        key for key in expert_keys or () if not any(has_component(d.key, [key]) for d in decisions)
    ]


def takes_expert_keys(function: Callable[..., bool]) -> bool:
    """Returns True if an ``is_muon_func`` has a third parameter, for ``expert_keys``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) >= 3:  # with a default, it is the caller's, unless named expert_keys
        third = positional[2]
        return third.name == "expert_keys" or third.default is third.empty
    return any(p.kind == p.VAR_POSITIONAL for p in parameters)
