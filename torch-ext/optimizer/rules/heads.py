"""Detects embeddings and heads that names don't show, and layers that are heads only by name.

The evidence is a dimension with a vocabulary's size, or a last linear layer that makes predictions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Optional

from torch import nn

from ..parameters.names import normalize_name
from .modules import (
    Decision,
    ParamInfo,
    ParamInfos,
    component_of,
    configs_of,
    expert_key,
    look_up,
    size_in,
)

# Words in the name of a last layer that makes predictions.
_HEAD_WORDS = {"head", "heads", "logit", "logits", "classifier", "final", "score"}
_HEAD_WORDS |= {"pred", "prediction", "predictions", "predictor"}
# In diffusers: the layer from the residual stream to patches, and layers that compute scales and
# shifts from the time.
_LAST_OF_DIFFUSION = re.compile(r"(\w+_)?proj_out(_2)?")
_MODULATION = re.compile(r"adaln|modulation|norm_out|proj_out_1", re.IGNORECASE)
# Names of stacks of layers whose last layer makes predictions.
_HEAD_STACK = re.compile(
    r"(heads?|logits?|predict)_\w+|logits|(\w+_)?(heads?|predictor|predictions?)|(\w+_)?(class|bbox)_embed|final_layer"
)
POSITIONS = re.compile(r"pos(ition\w*)?_?emb\w*$|wpe$")  # tables without a vocabulary
_FEW = 16  # hidden layers have more outputs than this
LARGE = 1000  # a side at least this long, and over 8 × the other side, isn't a hidden size


def hidden_layers(
    infos: ParamInfos, named: Sequence[Decision], decisions: Sequence[Decision]
) -> set[str]:
    """Returns names of matrices that aren't heads although a component of their name says so.

    In an ``nn.Sequential``, only the last matrix is a head. In lists of layers, RWKV's
    ``attention.output`` and ProphetNet's ``feed_forward.output`` feed the next layer, and LongCat's
    ``router.classifier`` chooses experts.

    Args:
        named: the parameters that would be AdamW's because of their names.
        decisions: decisions for all parameters of the model.
    """
    hidden = set()
    for decision in named:
        info = infos[id(decision.param)][0]
        if decision.param.ndim != 2 or not isinstance(info.layer, nn.Linear):
            continue
        stack: Optional[nn.Module] = None
        for module, component in zip(info.around, reversed(info.path)):
            if not (component.isdigit() and _is_sequential(module)):
                break
            stack = module
        matrices = [] if stack is None else [p for p in stack.parameters() if p.ndim == 2]
        is_stacked = matrices and matrices[-1] is not decision.param
        is_in_a_layer = stack is None and any(c.isdigit() for c in info.path[:-1])
        is_taken = "router" in info.path or not _gives_to_nobody(decision, decisions, infos)
        if is_stacked or (is_in_a_layer and is_taken):
            hidden.add(decision.name)
    return hidden


def unnamed_heads(
    model: nn.Module,
    infos: ParamInfos,
    decisions: Sequence[Decision],
    muons: Sequence[Decision],
) -> dict[str, str]:
    """Finds embeddings and heads among Muon's parameters; returns the reasons by name.

    Args:
        decisions: decisions for all parameters, in the model's order.
        muons: the decisions for Muon.
    """
    vocabularies, last = _vocabularies(model), last_matrix(model)
    is_all = sum(d.param.ndim > 1 for d in decisions if d.algorithm != "frozen") == 1
    follows_convolutions = [d.param.ndim for d in decisions].count(2) == 1 and any(
        d.param.ndim > 3 and expert_key(model, infos[id(d.param)][0], d.param) is None
        for d in decisions
    )
    reasons: dict[str, str] = {}
    for decision in muons:
        shape, info = tuple(decision.param.shape), infos[id(decision.param)][0]
        if isinstance(info.module, (nn.RNNBase, nn.RNNCellBase)):  # gates of any size
            continue
        size = next((s for s in shape if s in vocabularies), None) if len(shape) == 2 else None
        if size is not None and (
            (size >= LARGE and size > 8 * (shape[1] if shape[0] == size else shape[0]))
            # Within layers, a hidden size may happen to equal a small vocabulary.
            or not (_is_in_a_layer(info) or _is_hidden_size(size, decision, decisions, infos))
        ):
            reasons[decision.name] = f"head or embedding: {size} is {vocabularies[size]}"
        elif _is_last_of_diffusion(info):
            reasons[decision.name] = f"head: from the stream to patches, {shape}"
        elif (
            decision.param is last
            and not is_all
            and (follows_convolutions or _is_head(decision, info, muons))
        ):
            reasons[decision.name] = f"head: the model's last layer, {shape}"
        elif (component := _called_a_head(info)) and (
            # A layer with so few inputs may be an input layer for the boxes that the head predicts.
            shape[0] <= _FEW < shape[-1] or _gives_to_nobody(decision, decisions, infos)
        ):
            reasons[decision.name] = f"head: the last layer of {component}"
    return reasons


def _is_last_of_diffusion(info: ParamInfo) -> bool:
    """Returns True for the ``proj_out`` next to a list of blocks, but not in a perceptron."""
    if not (info.path and _LAST_OF_DIFFUSION.fullmatch(info.path[-1])) or _is_in_a_layer(info):
        return False
    around = info.around[0].children() if info.around else ()
    lists = [m for m in around if isinstance(m, nn.ModuleList) and len(m)]
    return any(not isinstance(layers[0], nn.Linear) for layers in lists)


def _called_a_head(info: ParamInfo) -> str:
    """Returns the component that names a head: the layer, or a stack that ends with it; or ""."""
    if not (info.attribute.startswith("weight") or info.is_original):
        return ""
    inner = info.layer
    for depth, (module, component) in enumerate(zip((inner, *info.around), info.path[::-1]), 1):
        if not isinstance(module, nn.ModuleList) or isinstance(inner, nn.ModuleList):
            inner = module  # in a list with one head per layer, each head is a stack
        if _HEAD_STACK.fullmatch(component):
            if any(outer.isdigit() for outer in info.path[:-depth]):
                return ""
            matrices = [
                p
                for name, p in inner.named_parameters()
                if p.ndim == 2 and p.shape[1] > 1 and not _MODULATION.search(name)
            ]
            is_last = matrices and matrices[-1] is info.module._parameters[info.attribute]
            return component if is_last or info.path[-1] == "proj_out" else ""  # SAM's is second
    return ""


def last_matrix(model: nn.Module) -> Optional[nn.Parameter]:
    """Returns the largest parameter of the last linear layer or, without any, 1 × 1 convolution."""
    modules = [m for name, m in model.named_modules() if not _MODULATION.search(name)]
    linear = [m for m in modules if isinstance(m, nn.Linear)]
    linear = linear or [m for m in modules if _is_of_one_pixel(m)]
    if not linear:
        return None
    weights = [p for name, p in linear[-1].named_parameters() if "bias" not in name]
    return max(weights, key=lambda p: p.numel(), default=None)


def _is_of_one_pixel(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd) and set(module.kernel_size) == {1}


def _gives_to_nobody(decision: Decision, decisions: Sequence[Decision], infos: ParamInfos) -> bool:
    """Returns True if a matrix isn't square and no hidden layer or tied head can use its outputs.

    Input layers don't count: their inputs may have the head's width, as with channels or bytes.
    """
    if decision.param.ndim != 2 or decision.param.shape[0] == decision.param.shape[1]:
        return False
    others = [d for d in decisions if d is not decision and d.param.ndim == 2]
    layers = [infos[id(d.param)][0] for d in others]
    hidden = [
        d
        for d, info in zip(others, layers)
        if _is_in_a_layer(info) or isinstance(info.layer, nn.Embedding)
    ]
    takers = hidden if any(map(_is_in_a_layer, layers)) else others
    return decision.param.shape[0] not in {d.param.shape[1] for d in takers}


def possible_heads(
    model: nn.Module, infos: ParamInfos, decisions: Sequence[Decision], muons: Sequence[Decision]
) -> list[Decision]:
    """Returns Muon's matrices that may be heads: outside of layers, with outputs nothing uses.

    These are the last matrix, matrices of other towers with as many outputs, and those with "out"
    in their name. Matrices with ``projection_dim`` outputs aren't: CLIP's towers compare these.
    """
    last = last_matrix(model)
    may_be = []
    for decision in muons:
        info = infos[id(decision.param)][0]
        in_a_layer = _is_in_a_layer(info) or _MODULATION.search(info.name)
        is_compared = look_up(model, info, ["projection_dim"]) == decision.param.shape[0]
        if not (in_a_layer or is_compared) and _gives_to_nobody(decision, decisions, infos):
            may_be.append(decision)
    outputs = {d.param.shape[0] for d in may_be if d.param is last}
    return [
        d for d in may_be if d.param.shape[0] in outputs or "out" in component_of(d.name).split("_")
    ]


def _vocabularies(model: nn.Module) -> dict[int, str]:
    """Returns the sizes of vocabularies, each with its source."""
    sizes: dict[int, str] = {}
    for path, module in model.named_modules():
        # A square table may be for positions, and square matrices may have its size.
        is_larger = (
            isinstance(module, nn.Embedding) and module.num_embeddings > module.embedding_dim
        )
        if is_larger and not POSITIONS.search(path):
            sizes.setdefault(module.num_embeddings, f"the number of rows of {normalize_name(path)}")
        for config in configs_of(module):
            size = size_in(config, ["vocab_size"])
            if size is not None:
                sizes.setdefault(size, "the config's vocab_size")
    return sizes


def _is_hidden_size(
    size: int, decision: Decision, decisions: Sequence[Decision], infos: ParamInfos
) -> bool:
    """Returns True if the parameter is one of two linear layers, an earlier one with ``size``
    outputs and a later one with ``size`` inputs."""
    gives, takes = [], []
    for index, other in enumerate(decisions):
        info = infos[id(other.param)][0]
        if other.param.ndim == 2 and not isinstance(info.module, (nn.Embedding, nn.EmbeddingBag)):
            rows, cols = other.param.shape
            inputs, outputs = (rows, cols) if info.is_conv1d else (cols, rows)
            if outputs == size:
                gives.append(index)
            if inputs == size:
                takes.append(index)
    position = next(i for i, other in enumerate(decisions) if other is decision)
    if position in gives:
        return any(position < i for i in takes)
    return any(i < position for i in gives)


def _is_in_a_layer(info: ParamInfo) -> bool:
    """Returns True if the parameter is in a list of layers.

    An ``nn.Sequential`` that makes up the whole model doesn't count.
    """
    indices = sum(component.isdigit() for component in info.path)
    is_direct = len(info.around) > 0 and _is_sequential(info.around[0])
    return indices > (1 if is_direct else 0)


def _is_sequential(module: nn.Module) -> bool:
    """Returns True for ``nn.Sequential`` itself, even after fully_shard, which subclasses it."""
    return type(module).__name__ in ("Sequential", "FSDPSequential")


def _is_head(decision: Decision, info: ParamInfo, muons: Sequence[Decision]) -> bool:
    if _is_in_a_layer(info):
        return False
    rows, cols = decision.param.shape[:2]
    if len(info.path) == 1 and re.fullmatch(r"fc\d*", info.path[0]):
        return True
    words = {word for component in info.path[-2:] for word in component.lower().split("_")}
    if words & _HEAD_WORDS and rows != cols:
        return True
    # The size of a residual stream is also a side of other matrices.
    others = (d.param.shape for d in muons if d is not decision and d.param.ndim > 1)
    sides = {side for shape in others for side in shape}
    return rows not in sides and rows < cols and (rows <= _FEW or rows * 4 < cols)
