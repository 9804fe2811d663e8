"""Which parameters go to Muon: by name, shape and module, through wrappers, ties and freezing."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize

from kernel import optimizer
from ranks import rank_outcomes, run_ranks
from wrong_input import parameter

Muon = optimizer.Muon
default_is_muon = optimizer.muon.default_is_muon
get_default_muon_param_groups = optimizer.muon.get_default_muon_param_groups

# name, shape, expert_keys, whether it is Muon's
TABLE = [
    # Llama, as transformers and as torchtitan name it
    ("model.embed_tokens.weight", (32, 8), None, False),
    ("model.layers.0.self_attn.q_proj.weight", (8, 8), None, True),
    ("model.layers.11.mlp.gate_proj.weight", (16, 8), None, True),
    ("model.layers.0.input_layernorm.weight", (8,), None, False),
    ("model.layers.0.self_attn.q_proj.bias", (8,), None, False),
    ("lm_head.weight", (32, 8), None, False),
    ("tok_embeddings.weight", (32, 8), None, False),
    ("output.weight", (32, 8), None, False),
    # GPT-2: Conv1D stores (in, out)
    ("transformer.wte.weight", (32, 8), None, False),
    ("transformer.wpe.weight", (16, 8), None, False),
    ("transformer.h.0.attn.c_attn.weight", (8, 24), None, True),
    # GPT-NeoX
    ("gpt_neox.embed_in.weight", (32, 8), None, False),
    ("embed_out.weight", (32, 8), None, False),
    # nanochat
    ("transformer.h.0.attn.c_q.weight", (8, 8), None, True),
    ("value_embeds.1.weight", (32, 8), None, False),
    ("resid_lambdas", (12,), None, False),
    ("transformer.h.3.attn.ve_gate.weight", (4, 12), None, True),
    # Parameters of two dimensions that are no matrices
    ("encoder.layers.0.self_attn.pos_bias_u", (4, 16), None, False),
    ("stages.0.attn.attention_biases", (4, 196), None, False),
    ("model.level_embed", (4, 256), None, False),
    ("resampler.latents", (64, 128), None, False),
    ("blocks.0.audio_scale_shift_table", (6, 32), None, False),
    ("layers.0.mamba.D", (2, 16), None, False),
    ("q_proj.ia3_l.default", (32, 1), None, False),
    ("q_proj.lora_E.default", (8, 1), None, False),
    ("q_proj.oft_R.default.weight", (8, 28), None, False),
    ("q_proj.lora_A.default.weight", (1, 28), None, True),
    ("attention.in_proj_weight", (48, 16), None, True),
    ("projector.mm_input_projection_weight", (48, 16), None, True),
    # Heads and hidden layers by the ends of their names
    ("decode.low_classifier.weight", (12, 16, 1, 1), None, False),
    ("pre_classifier.weight", (16, 16), None, True),
    ("vision.patch_embed.proj.weight", (16, 48), None, False),
    # Tutorials' language models, and hidden layers whose names are like theirs
    ("token_embedding_table.weight", (65, 8), None, False),
    ("position_embedding_table.weight", (16, 8), None, False),
    ("token_emb.weight", (32, 8), None, False),
    ("emb.weight", (32, 8), None, False),
    ("word_embedding.weight", (32, 8), None, False),
    ("to_logits.weight", (32, 8), None, False),
    ("net.to_logits.1.weight", (32, 8), None, False),
    ("logits.weight", (32, 8), None, False),
    ("pre_logits.fc1.weight", (16, 8), None, True),
    ("time_emb_proj.weight", (16, 8), None, True),
    ("blocks.0.emb_layers.1.weight", (16, 8), None, True),
    ("blocks.0.fc_out.weight", (8, 8), None, True),
    ("blocks.0.attn.proj_out.weight", (8, 8), None, True),
    ("decoder.weight", (8, 8), None, True),
    # BERT
    ("bert.embeddings.word_embeddings.weight", (32, 8), None, False),
    ("bert.encoder.layer.0.attention.output.dense.weight", (8, 8), None, True),
    ("bert.encoder.layer.0.output.dense.weight", (8, 32), None, True),
    ("layers.0.output.dense.weight", (8, 32), None, True),
    ("bert.pooler.dense.weight", (8, 8), None, True),
    ("classifier.weight", (2, 8), None, False),
    ("roberta.lm_head.dense.weight", (8, 8), None, True),
    # T5
    ("shared.weight", (32, 8), None, False),
    ("encoder.block.0.layer.0.SelfAttention.q.weight", (8, 8), None, True),
    # ViT
    ("vit.embeddings.patch_embeddings.projection.weight", (8, 3, 4, 4), None, False),
    ("patch_embed.proj.weight", (8, 3, 4, 4), None, False),
    ("pos_embed", (1, 17, 8), None, False),
    ("pos_embed", (17, 8), None, False),
    ("cls_token", (1, 1, 8), None, False),
    ("blocks.0.attn.qkv.weight", (24, 8), None, True),
    ("head.weight", (10, 8), None, False),
    ("layer1.0.conv1.weight", (8, 8, 3, 3), None, False),
    ("conv1d.weight", (8, 1, 4), ["experts"], False),
    # Mixtral: a ModuleList of ordinary matrices
    ("model.layers.0.block_sparse_moe.experts.7.w1.weight", (16, 8), ["experts"], True),
    ("experts.7.w1.bias", (16,), ["experts"], False),
    # Qwen MoE
    ("model.layers.0.mlp.shared_expert_gate.weight", (1, 8), ["experts"], True),
    # DeepSeek
    ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (6, 8), None, True),
    ("model.layers.3.mlp.gate.e_score_correction_bias", (4,), ["experts"], False),
    ("model.layers.61.eh_proj.weight", (8, 16), None, True),
    ("model.layers.61.shared_head.head.weight", (32, 8), None, False),
    # stacked experts
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), ["experts"], True),
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), None, False),
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), [], False),
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), ["mlp.experts"], True),
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), ["other", "experts"], True),
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 16), ["expert"], False),
    ("model.layers.0.mlp.my_experts.w1", (4, 8, 16), ["experts"], False),
    ("layers.0.moe.experts.w1.weight", (2, 4, 8, 16), ["experts"], True),
    ("experts", (4, 8, 16), ["experts"], True),
    # biases of stacked experts look like matrices
    ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 16), ["experts"], False),
    ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 16), None, False),
    ("layers.0.moe.experts.mlp1_bias", (4, 16), ["experts"], False),
    # heads of other models
    ("classifier.out_proj.weight", (2, 8), None, False),
    ("classifier.dense.weight", (8, 8), None, True),
    ("qa_outputs.weight", (2, 8), None, False),
    ("cls.seq_relationship.weight", (2, 8), None, False),
    ("base_model.model.score.modules_to_save.default.weight", (2, 8), None, False),
    ("base_model.model.lm_head.base_layer.weight", (32, 8), None, False),
    ("score.weight", (2, 8), None, False),
    ("blocks.0.attention.output.weight", (8, 8), None, False),
    # tables of positions, and numbers that are used one by one
    ("positional_embedding", (17, 8), None, False),
    ("layers.0.attn.rel_pos_h", (15, 4), None, False),
    ("layers.0.attn.relative_position_bias_table", (49, 4), None, False),
    ("backbone.layers.0.mixer.A_log", (16, 4), None, False),
    # what only sounds like an embedding or a head
    ("layers.0.head_proj.weight", (8, 8), None, True),
    ("layers.0.multihead.out_proj.weight", (8, 8), None, True),
    ("encoder.output.proj.weight", (8, 8), None, True),
    ("head.mlp.fc1.weight", (8, 8), None, True),
    # no name to speak of
    ("weight", (8, 8), None, True),
    ("weight", (8,), None, False),
    ("logit_scale", (), None, False),
    ("in_proj_weight", (24, 8), None, True),
    # odd shapes
    ("layers.0.wq.weight", (0, 8), None, True),
]
table = pytest.mark.parametrize("name, shape, expert_keys, expected", TABLE)

WRAPPED_NAMES = [
    "_orig_mod.{}",
    "module.{}",
    "module._orig_mod.{}",
    "_orig_mod.module.{}",
    "_fsdp_wrapped_module.{}",
]


def module_of(parameters: dict[str, nn.Parameter]) -> nn.Module:
    """A model with parameters of these names."""
    root = nn.Module()
    for name, param in parameters.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, param)
    return root


def names_of(groups: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Names of Muon's and of AdamW's parameters, after checking what holds of all groups."""
    muon, adamw = groups
    assert muon["use_muon"] is True and adamw["use_muon"] is False
    for group in groups:
        assert len(group["params"]) == len(group["names"])
    return muon["names"], adamw["names"]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": lambda m: torch.compile(m, backend="eager"),
    "DataParallel": nn.DataParallel,
    "checkpoint_wrapper": checkpoint_wrapper,
    "all of them": lambda m: checkpoint_wrapper(torch.compile(nn.DataParallel(m), backend="eager")),
}


def assert_aligned(groups: list[dict[str, Any]], model: nn.Module) -> None:
    """Every trainable parameter of the model is there once, under its own name."""
    expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = [pair for g in groups for pair in zip(g["names"], g["params"])]
    assert len(found) == len(expected)
    for name, p in found:
        assert p is expected[name]


def assert_trains(groups: list[dict[str, Any]], **options: Any) -> None:
    """Muon takes the groups and updates all their parameters."""
    optim = Muon(groups, **options)
    params = [p for group in groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.randn_like(p)
    optim.step()
    for p, old in zip(params, before):
        assert p.numel() == 0 or not torch.equal(p, old)


@table
def test_each_name_and_shape_goes_where_it_belongs(name, shape, expert_keys, expected):
    assert default_is_muon(name, parameter(*shape), expert_keys) is expected
    assert default_is_muon(name, torch.empty(shape, device="meta"), expert_keys) is expected


@pytest.mark.parametrize("wrapped", WRAPPED_NAMES)
def test_wrapper_parts_of_a_name_are_not_its_owner(wrapped):
    for name, shape, expert_keys, _ in TABLE:
        p = torch.empty(shape, device="meta")
        expected = default_is_muon(name, p, expert_keys)
        assert default_is_muon(wrapped.format(name), p, expert_keys) is expected, name
        *path, last = name.split(".")
        inner = ".".join([*path, "_checkpoint_wrapped_module", last])
        assert default_is_muon(inner, p, expert_keys) is expected, inner


@pytest.mark.parametrize("expert_keys", [None, ["experts"]])
def test_a_model_is_divided_as_its_names_are(expert_keys):
    shapes = {name: shape for name, shape, keys, _ in TABLE if keys == expert_keys}
    leaves = {
        name: parameter(*shape)
        for name, shape in shapes.items()
        if not any(other.startswith(f"{name}.") for other in shapes)
    }
    model = module_of(leaves)
    groups = get_default_muon_param_groups(model, expert_keys=expert_keys)
    muon, _ = names_of(groups)
    assert set(muon) == {n for n, p in leaves.items() if default_is_muon(n, p, expert_keys)}
    assert_aligned(groups, model)
    assert_trains(groups)


# Whole models


class Llama(nn.Module):
    def __init__(self, tied: bool = False, head_first: bool = False):
        super().__init__()
        if head_first:
            self.lm_head = nn.Linear(4, 16, bias=False)
        self.tok = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"wq": nn.Linear(4, 4, bias=False), "w1": nn.Linear(4, 8), "norm": nn.LayerNorm(4)}
            )
            for _ in range(2)
        )
        if not head_first:
            self.lm_head = nn.Linear(4, 16, bias=False)
        if tied:
            self.lm_head.weight = self.tok.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = x + layer["w1"](layer["wq"](layer["norm"](x)))[..., :4]
        return self.lm_head(x)


MUONS = ["layers.0.wq.weight", "layers.0.w1.weight", "layers.1.wq.weight", "layers.1.w1.weight"]


@pytest.mark.kernels_ci
def test_names_stand_in_the_models_order_beside_their_parameters():
    model = Llama()
    groups = get_default_muon_param_groups(model)
    muon, adamw = names_of(groups)
    assert muon == MUONS
    assert adamw == [name for name, _ in model.named_parameters() if name not in MUONS]
    assert_aligned(groups, model)
    assert_trains(groups)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_gives_the_groups_of_the_model_under_its_own_keys(wrap):
    model = Llama()
    expected = get_default_muon_param_groups(model)
    assert_same_groups(wrap(model), expected)


def assert_same_groups(wrapped: nn.Module, expected: list[dict[str, Any]]) -> None:
    found, keys = get_default_muon_param_groups(wrapped), wrapped.state_dict(keep_vars=True)
    for group, other in zip(found, expected):
        assert list(map(id, group["params"])) == list(map(id, other["params"]))
        assert all(keys[name] is p for name, p in zip(group["names"], group["params"]))


def test_wrapped_layers_give_the_groups_of_the_model():
    model = Llama()
    expected = get_default_muon_param_groups(model)
    for index, layer in enumerate(model.layers):
        layer["wq"] = checkpoint_wrapper(torch.compile(layer["wq"], backend="eager"))
        model.layers[index] = checkpoint_wrapper(layer)
    model.lm_head = torch.compile(model.lm_head, backend="eager")
    model.tok = checkpoint_wrapper(model.tok)
    assert_same_groups(model, expected)


def groups_under_ddp() -> None:
    model = Llama(tied=True)
    expected = get_default_muon_param_groups(model)
    assert_same_groups(nn.parallel.DistributedDataParallel(model), expected)


def test_a_model_in_ddp_gives_the_groups_of_the_model():
    run_ranks(groups_under_ddp, 1)


@pytest.mark.parametrize("head_first", [False, True])
def test_a_head_tied_to_the_embedding_is_adamws_once(head_first):
    model = Llama(tied=True, head_first=head_first)
    groups = get_default_muon_param_groups(model)
    muon, adamw = names_of(groups)
    assert muon == MUONS
    assert ("lm_head.weight" in adamw) is head_first
    assert ("tok.weight" in adamw) is not head_first
    assert_aligned(groups, model)
    assert_trains(groups)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("first", [False, True])
def test_what_is_tied_to_an_embedding_is_never_muons(embedding, first):
    model = nn.Module()
    projection, tokens = nn.Linear(4, 16, bias=False), embedding(16, 4)
    tokens.weight = projection.weight
    modules = {"projection": projection, "tokens": tokens, "other": nn.Linear(4, 4, bias=False)}
    for name in modules if first else reversed(modules):
        model.add_module(name, modules[name])
    groups = get_default_muon_param_groups(model, is_muon_func=lambda name, p: p.ndim == 2)
    muon, adamw = names_of(groups)
    assert muon == ["other.weight"]
    assert adamw == ["projection.weight" if first else "tokens.weight"]
    assert_trains(groups)


@pytest.mark.parametrize(
    "name", ["anything", "relative_attention_bias", "codebook", "value_embeds", "position"]
)
def test_an_embedding_is_adamws_whatever_its_name(name):
    class Positions(nn.Embedding):
        """As OPT's, whose class is its own."""

    model = nn.ModuleDict(
        {
            name: Positions(8, 4),
            "many": nn.ModuleDict({"0": nn.Embedding(8, 4), "1": nn.Embedding(8, 4)}),
            "proj": nn.Linear(4, 4),
        }
    )
    muon, _ = names_of(get_default_muon_param_groups(model))
    assert muon == ["proj.weight"]


def test_two_tied_matrices_are_muons_once():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    groups = get_default_muon_param_groups(model)
    assert names_of(groups) == (["a.weight"], [])
    assert_trains(groups)


def test_frozen_parameters_are_skipped():
    model = Llama()
    model.tok.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    groups = get_default_muon_param_groups(model)
    muon, adamw = names_of(groups)
    assert muon == ["layers.1.wq.weight", "layers.1.w1.weight"]
    assert adamw == [
        "layers.1.w1.bias",
        "layers.1.norm.weight",
        "layers.1.norm.bias",
        "lm_head.weight",
    ]
    assert_aligned(groups, model)
    assert_trains(groups)


def test_an_embedding_frozen_together_with_its_tied_head_is_skipped():
    model = Llama(tied=True)
    model.tok.weight.requires_grad_(False)
    muon, adamw = names_of(get_default_muon_param_groups(model))
    assert muon == MUONS
    assert not {"tok.weight", "lm_head.weight"} & set(adamw)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "model, expected",
    [
        (nn.Linear(4, 4, bias=False), (["weight"], [])),
        (nn.Embedding(4, 4), ([], ["weight"])),
        (nn.LayerNorm(4), ([], ["weight", "bias"])),
        (nn.Linear(4, 4).requires_grad_(False), ([], [])),
        (nn.ReLU(), ([], [])),
    ],
    ids=["matrix", "embedding", "vectors", "all frozen", "no parameters"],
)
@pytest.mark.filterwarnings("ignore:no parameter of this model is Muon's")
def test_both_groups_are_there_and_muon_takes_them(model, expected):
    groups = get_default_muon_param_groups(model)
    assert names_of(groups) == expected
    assert_trains(groups)


def test_a_model_on_the_meta_device_has_its_groups():
    with torch.device("meta"):
        model = Llama(tied=True)
    assert names_of(get_default_muon_param_groups(model))[0] == MUONS
    Muon(get_default_muon_param_groups(model))


# Experts


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = parameter(3, 4, 8)
        self.gate_up_proj_bias = parameter(3, 8)
        self.down_proj = parameter(3, 4, 4)


def moe() -> nn.Module:
    return nn.ModuleDict(
        {
            "experts": Experts(),
            "shared_expert": nn.Linear(4, 4, bias=False),
            "conv": nn.Conv1d(4, 4, 2),
        }
    )


def test_groups_made_with_expert_keys_are_taken_as_they_are():
    model = moe()
    groups = get_default_muon_param_groups(model, expert_keys=["experts"])
    muon, adamw = names_of(groups)
    assert muon == ["experts.gate_up_proj", "experts.down_proj", "shared_expert.weight"]
    assert adamw == ["experts.gate_up_proj_bias", "conv.weight", "conv.bias"]
    assert_trains(groups)
    assert_trains(get_default_muon_param_groups(moe(), expert_keys=("experts",)))
    assert_trains(groups, expert_keys=["experts"])


def test_without_expert_keys_stacked_experts_are_adamws_and_a_warning_has_the_keys():
    with pytest.warns(UserWarning, match=r"gate_up_proj and others.*expert_keys=\['experts'\]"):
        groups = get_default_muon_param_groups(moe())
    muon, adamw = names_of(groups)
    assert muon == ["shared_expert.weight"]
    assert {"experts.gate_up_proj", "experts.down_proj"} <= set(adamw)
    assert_trains(groups)


def test_one_string_as_expert_keys_is_refused_or_one_key():
    try:
        groups = get_default_muon_param_groups(moe(), expert_keys="experts")
    except (TypeError, ValueError) as error:
        assert "expert_keys" in str(error)
    else:
        assert names_of(groups)[0][:2] == ["experts.gate_up_proj", "experts.down_proj"]


# Custom functions


def of_two(name: str, p: torch.Tensor) -> bool:
    return p.ndim == 2 and "wq" in name


def of_three(name: str, p: torch.Tensor, expert_keys: list[str] | None) -> bool:
    return p.ndim == 2 and expert_keys == ["wq"] and expert_keys[0] in name


def of_two_and_a_key(name: str, p: torch.Tensor, *, key: str = "wq") -> bool:
    return p.ndim == 2 and key in name


def of_key_first(key: str, name: str, p: torch.Tensor) -> bool:
    return p.ndim == 2 and key in name


class Rule:
    def method(self, name: str, p: torch.Tensor, expert_keys: list[str] | None) -> bool:
        return of_three(name, p, expert_keys)


@pytest.mark.parametrize(
    "is_muon",
    [
        pytest.param(of_two, id="two arguments"),
        pytest.param(of_three, id="three arguments"),
        pytest.param(of_two_and_a_key, id="keyword-only argument"),
        pytest.param(functools.partial(of_key_first, "wq"), id="partial of the first"),
        pytest.param(functools.partial(of_two_and_a_key, key="wq"), id="partial of a keyword"),
        pytest.param(Rule().method, id="method"),
    ],
)
def test_a_custom_function_gets_what_it_takes(is_muon):
    model = Llama()
    groups = get_default_muon_param_groups(model, is_muon, expert_keys=["wq"])
    muon, adamw = names_of(groups)
    assert muon == ["layers.0.wq.weight", "layers.1.wq.weight"]
    assert "layers.0.w1.weight" in adamw and "lm_head.weight" in adamw
    assert_aligned(groups, model)
    assert_trains(groups)


class Mixer(nn.Module):
    """With a weight of its own beside that of a layer called ``module``, as wrappers call it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 12, bias=False)
        self.weight = nn.Parameter(torch.randn(12, 6))
        self.experts = nn.Parameter(torch.randn(3, 6, 6))


def wrapped_layers(model: nn.Sequential) -> nn.Module:
    layers = [checkpoint_wrapper(model[0]), torch.compile(model[1], backend="eager")]
    return nn.DataParallel(nn.Sequential(*layers))


WRAPS = {"plain": lambda model: model, "layers, too": wrapped_layers, **WRAPPERS}


@pytest.mark.parametrize(
    "is_muon", [default_is_muon, lambda name, p, keys: default_is_muon(name, p, keys)]
)
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_names_of_a_wrapped_model_mean_the_same_parameters_as_keys_and_patterns(wrap, is_muon):
    model = nn.Sequential(Mixer(), Mixer())
    first, second = model
    wrapped = wrap(model)
    name_of = {id(p): name for name, p in wrapped.named_parameters()}
    groups = get_default_muon_param_groups(
        wrapped,
        is_muon,
        expert_keys=[name_of[id(second.experts)]],
        adamw_keys=[name_of[id(second.weight)]],
    )
    params = [first.weight, first.module.weight, second.experts, second.module.weight]
    assert list(map(id, groups[0]["params"])) == list(map(id, params))
    optim = Muon(groups, split={name_of[id(second.module.weight)]: 4})
    assert [row["matrices"] for row in optim.summary().rows[:4]] == [1, 1, 3, 3]


def test_a_custom_function_gets_names_without_wrapper_parts():
    seen = []
    model = torch.compile(nn.DataParallel(checkpoint_wrapper(Llama())), backend="eager")
    get_default_muon_param_groups(model, lambda name, p: bool(seen.append(name)))
    expected = {name for name, _ in Llama().named_parameters()}
    assert set(seen) | {"tok.weight"} == expected  # an embedding needs no asking


def test_a_partial_of_the_default_keeps_its_expert_keys():
    is_muon = functools.partial(default_is_muon, expert_keys=["experts"])
    muon, _ = names_of(get_default_muon_param_groups(moe(), is_muon))
    assert muon == ["experts.gate_up_proj", "experts.down_proj", "shared_expert.weight"]


def test_a_custom_function_can_hand_convolutions_to_muon():
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 8, 3), "head": nn.Linear(8, 2)})
    groups = get_default_muon_param_groups(model, lambda name, p: p.ndim == 4)
    assert names_of(groups) == (["conv.weight"], ["conv.bias", "head.weight", "head.bias"])
    assert_trains(groups, flatten=True)
    with pytest.raises(ValueError, match=r"conv\.weight.*flatten"):
        Muon(groups)


def test_a_custom_function_that_takes_a_vector_for_muon_is_told_by_muon():
    groups = get_default_muon_param_groups(Llama(), lambda name, p: True)
    with pytest.raises(ValueError, match=r"layers\.0\.w1\.bias.*use_muon=False"):
        Muon(groups)


# Parametrizations


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_parametrized_matrix_stays_muons():
    model = Llama()
    parametrize.register_parametrization(model.layers[0]["wq"], "weight", Double())
    groups = get_default_muon_param_groups(model)
    assert "layers.0.wq.parametrizations.weight.original" in names_of(groups)[0]
    assert len(names_of(groups)[0]) == len(MUONS)
    assert_aligned(groups, model)
    assert_trains(groups)


@pytest.mark.parametrize("name", ["lm_head", "tok"])
def test_a_parametrized_head_or_embedding_stays_adamws(name):
    model = Llama()
    parametrize.register_parametrization(getattr(model, name), "weight", Double())
    muon, adamw = names_of(get_default_muon_param_groups(model))
    assert muon == MUONS
    assert f"{name}.parametrizations.weight.original" in adamw


def test_what_is_tied_to_a_parametrized_embedding_stays_adamws():
    model = nn.ModuleDict({"projection": nn.Linear(4, 16, bias=False), "tok": nn.Embedding(16, 4)})
    model["tok"].weight = model["projection"].weight
    parametrize.register_parametrization(model["tok"], "weight", Double())
    assert names_of(get_default_muon_param_groups(model)) == ([], ["projection.weight"])


@pytest.mark.parametrize(
    "normalize", [parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_groups_of_a_normalized_model_are_taken_and_spare_head_and_embedding(normalize):
    model = Llama()
    for module in (model.tok, model.lm_head, model.layers[1]["wq"]):
        normalize(module)
    groups = get_default_muon_param_groups(model)
    muon, _ = names_of(groups)
    assert not [name for name in muon if name.startswith(("tok.", "lm_head."))]
    assert [name for name in muon if name.startswith("layers.1.wq.")]
    assert_aligned(groups, model)
    assert_trains(groups)


# What the groups are


def test_groups_are_plain_and_can_take_options():
    groups = get_default_muon_param_groups(Llama())
    for group in groups:
        assert type(group) is dict
        assert type(group["params"]) is list and isinstance(group["names"], list)
        assert type(copy.deepcopy(group["names"])) is list  # without the model that names remember
    groups[0].update(lr=0.02, beta2=0.9)
    groups[1].update(lr=0.001)
    optim = Muon(groups)
    assert [group["lr"] for group in optim.param_groups] == [0.02, 0.001]
    assert [group["beta2"] for group in optim.param_groups] == [0.9, None]


def test_nothing_of_the_model_changes():
    model = Llama(tied=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    get_default_muon_param_groups(model)
    assert {name for name, _ in model.named_parameters()} == set(before)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None and p.requires_grad


def under_fsdp1(strategy: str) -> list[int]:
    # Kept out of the other tests: what they import is not FSDP1.
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        nn.Linear(6, 4),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return [len(group["params"]) for group in get_default_muon_param_groups(model)]


def test_experts_that_are_named_or_meant_for_adamw_are_not_warned_of():
    with warnings.catch_warnings(action="error"):
        get_default_muon_param_groups(moe(), expert_keys=["experts"])
        muon, _ = get_default_muon_param_groups(moe(), expert_keys=[])
        get_default_muon_param_groups(moe(), lambda name, p: p.ndim == 2)
    assert muon["names"] == ["shared_expert.weight"]


def test_experts_that_only_the_config_tells_of_are_warned_of():
    model = nn.ModuleDict({"ffn": nn.ParameterDict({"w1": torch.ones(4, 8, 8)})})
    model.config = {"num_experts": 4}
    with pytest.warns(UserWarning, match=r"100% of what is trained.*ffn\.w1\..*keys=\['w1'\]"):
        get_default_muon_param_groups(model)


def test_convolutions_are_muons_by_one_argument():
    layers = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 16), nn.Linear(16, 10))
    for rule in (default_is_muon, lambda name, p: p.ndim == 2 and len(p) > 10):
        groups = get_default_muon_param_groups(model, rule, convolutions=True)
        muon, _ = names_of(groups)
        assert muon == ["1.weight", "4.weight"]
        assert_aligned(groups, model)
        assert_trains(groups)
    muon, _ = get_default_muon_param_groups(model, adamw_keys=["1"], convolutions=True)
    assert muon["names"] == ["4.weight"]


@pytest.mark.slow
def test_a_model_that_fsdp1_has_flattened_raises():
    """None of its parameters would be Muon's."""
    assert run_ranks(under_fsdp1, 2, "NO_SHARD") == [[1, 1]] * 2
    for outcome in rank_outcomes(under_fsdp1, 2, "FULL_SHARD"):
        assert outcome.error == "ValueError" and "fully_shard" in outcome.message


# The default rule looks at the modules, too


class Head(nn.Module):
    """Some layers and what comes behind them."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"w": nn.Linear(32, 32)}) for _ in range(2)])
        for name, module in modules.items():
            self.add_module(name, module)


def rwkv() -> nn.Module:
    model = Head(head=nn.Linear(32, 100))
    for layer in model.layers:
        layer["attention"] = nn.ModuleDict({"output": nn.Linear(32, 32)})
    return model


def with_magnitudes() -> nn.Module:
    model = Head(head=nn.Linear(32, 10))
    parametrizations.weight_norm(model.layers[0]["w"])
    parametrizations.weight_norm(model.head)
    nn.utils.weight_norm(model.layers[1]["w"])
    return model


def with_adapters() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(100, 32), "up": nn.Linear(32, 64)})
    model["embed"].requires_grad_(False)
    model["embed"].lora_embedding_A = nn.ParameterDict({"default": torch.ones(4, 100)})
    model["embed"].lora_embedding_B = nn.ParameterDict({"default": torch.ones(32, 4)})
    return model


def recurrent(kind: type[nn.RNNBase], hidden: int) -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(256, 128), "rnn": kind(128, hidden)})
    model["to_tokens"] = nn.Linear(hidden, 256)
    return model


def classifier(*sizes: int) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(m for i, o in pairs for m in (nn.Linear(i, o), nn.ReLU())))


def perceptron(*sizes: int) -> nn.Module:
    layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
    return nn.ModuleDict({"layers": layers})


def modulated() -> nn.Module:
    """The last layer of the first DiT: to patches, after a modulation."""
    modulation = nn.Sequential(nn.SiLU(), nn.Linear(32, 64))
    return nn.ModuleDict({"linear": nn.Linear(32, 16), "adaLN_modulation": modulation})


LAYERS = ["layers.0.w.weight", "layers.1.w.weight"]
RNN = ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]
MODULATED = [*LAYERS, "patches.weight", "final_layer.adaLN_modulation.1.weight"]

# A model, and names of what Muon trains.
MODELS = {
    "AlexNet": (
        lambda: Head(classifier=classifier(64, 48, 48, 10)),
        [*LAYERS, "classifier.0.weight", "classifier.2.weight"],
    ),
    "a stack within a stack": (
        lambda: Head(head=nn.Sequential(classifier(32, 48), nn.Linear(48, 10))),
        [*LAYERS, "head.0.0.weight"],
    ),
    "several heads": (
        lambda: Head(heads=nn.ModuleList(nn.Linear(32, 7) for _ in range(2))),
        LAYERS,
    ),
    "RWKV": (
        rwkv,
        [f"layers.{i}.{name}.weight" for i in range(2) for name in ("w", "attention.output")],
    ),
    "ResNet": (lambda: Head(fc=nn.Linear(32, 10)), LAYERS),
    "a head's own stack": (
        lambda: Head(head=nn.ModuleDict({"pre": nn.Linear(32, 48), "linear": nn.Linear(48, 99)})),
        [*LAYERS, "head.pre.weight"],
    ),
    "two heads": (
        lambda: Head(
            head=nn.ModuleDict({"linear": nn.Linear(32, 9)}),
            head_dist=nn.ModuleDict({"linear": nn.Linear(32, 9)}),
        ),
        LAYERS,
    ),
    "Flux": (lambda: Head(proj_out=nn.Linear(32, 4)), LAYERS),
    "DiT": (
        lambda: Head(proj_out_1=nn.Linear(32, 64), proj_out_2=nn.Linear(32, 4)),
        [*LAYERS, "proj_out_1.weight"],
    ),
    "GRU": (lambda: recurrent(nn.GRU, 256), RNN),
    "LSTM": (lambda: recurrent(nn.LSTM, 64), RNN),
    "magnitudes": (
        with_magnitudes,
        ["layers.0.w.parametrizations.weight.original1", "layers.1.w.weight_v"],
    ),
    "adapters": (with_adapters, ["up.weight"]),
    "DETR": (
        lambda: Head(bbox_predictor=perceptron(32, 32, 4), class_embed=nn.Linear(32, 9)),
        [*LAYERS, "bbox_predictor.layers.0.weight"],
    ),
    "heads of each layer": (
        lambda: Head(bbox_embed=nn.ModuleList(perceptron(32, 32, 4) for _ in range(2))),
        [*LAYERS, "bbox_embed.0.layers.0.weight", "bbox_embed.1.layers.0.weight"],
    ),
    "DiT's own": (lambda: Head(patches=nn.Linear(16, 32), final_layer=modulated()), MODULATED),
    "a tied head's hidden layer": (
        lambda: Head(words=nn.Embedding(99, 24), predictions=perceptron(32, 24)),
        [*LAYERS, "predictions.layers.0.weight"],
    ),
    "pooling by attention": (
        lambda: Head(head=perceptron(32, 64, 32)),
        [*LAYERS, "head.layers.0.weight", "head.layers.1.weight"],
    ),
    "a normed head": (
        lambda: nn.Sequential(nn.Linear(8, 32), parametrizations.weight_norm(nn.Linear(32, 5))),
        ["0.weight"],
    ),
    "ProphetNet": (
        lambda: nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(8, 32), "output": nn.Linear(32, 8)})]
        ),
        ["0.up.weight", "0.output.weight"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_heads_are_what_the_modules_say(name):
    model, expected = MODELS[name]
    muon, _ = get_default_muon_param_groups(model())
    assert muon["names"] == expected


def groups_before_and_after_sharding() -> list[list[str]]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40))
    before, _ = get_default_muon_param_groups(model)
    fully_shard(model)
    after, _ = get_default_muon_param_groups(model)
    return [before["names"], after["names"]]


def test_a_sequential_that_fully_shard_has_made_a_class_of_its_own_keeps_its_head():
    assert run_ranks(groups_before_and_after_sharding, 1) == [[["1.weight"]] * 2]


def test_a_model_without_a_matrix_of_muons_is_warned_of():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 10))
    with pytest.warns(UserWarning, match="no parameter of this model is Muon's"):
        muon, adamw = get_default_muon_param_groups(model)
    assert muon["names"] == [] and "3.weight" in adamw["names"]


def test_adamw_keys_name_what_adamw_trains():
    model = Head(router=nn.Linear(32, 8))
    model.layers[0]["router"] = nn.Linear(32, 8)
    muon, _ = get_default_muon_param_groups(model, adamw_keys="router")
    assert muon["names"] == LAYERS
    muon, _ = get_default_muon_param_groups(model, lambda name, p: p.ndim > 1, adamw_keys=["w"])
    assert muon["names"] == ["layers.0.router.weight", "router.weight"]
    with pytest.warns(UserWarning, match="adamw_keys: no parameter has a component 'gate'"):
        get_default_muon_param_groups(model, adamw_keys=["gate"])


def test_adamws_rate_and_undecayed_vectors_are_arguments():
    model = Head(head=nn.Linear(32, 10))
    muon, adamw = get_default_muon_param_groups(model, adamw_lr=1e-4)
    assert "lr" not in muon and adamw["lr"] == 1e-4 and "weight_decay" not in adamw
    muon, adamw, vectors = get_default_muon_param_groups(model, adamw_lr=1e-4, decay_vectors=False)
    assert adamw["names"] == ["head.weight"] and not vectors["use_muon"]
    assert vectors["names"] == [name for name, p in model.named_parameters() if p.ndim == 1]
    optim = optimizer.Muon([muon, adamw, vectors], lr=0.02, weight_decay=0.1)
    assert [g["lr"] for g in optim.param_groups] == [0.02, 1e-4, 1e-4]
    assert [g["weight_decay"] for g in optim.param_groups] == [0.1, 0.1, 0.0]
