"""Recipes of published models: each takes a model that is built as they are, and refuses others."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from checkout import PACKAGE
from kernel import optimizer

recipes, Muon = optimizer.recipes, optimizer.Muon
SIZES = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
FP32 = {"ns_dtype": torch.float32}

pytestmark = pytest.mark.usefixtures("one_thread")


def module(**parts):
    """Makes a module of layers, given as (rows, columns), and of other parts."""
    made = nn.Module()
    for name, part in parts.items():
        layer = nn.Linear(part[1], part[0], bias=False) if isinstance(part, tuple) else part
        setattr(made, name, layer)
    return made


def numbers(*shape):
    return nn.Parameter(torch.randn(shape) * 0.1)


def experts():
    """As transformers stacks them."""
    return module(gate_up_proj=numbers(4, 32, 32), down_proj=numbers(4, 32, 16))


def language_model(*layers, **config):
    model = module(embed_tokens=nn.Embedding(100, 32), layers=nn.ModuleList(layers))
    return module(config=SimpleNamespace(**config), model=model, lm_head=(100, 32))


def latent_attention(query_latent=True):
    queries = {"q_a_proj": (24, 32), "q_b_proj": (48, 24)} if query_latent else {"q_proj": (48, 32)}
    keys = {"kv_a_proj_with_mqa": (20, 32), "kv_b_proj": (64, 16), "kv_a_layernorm": nn.RMSNorm(16)}
    return module(**queries, **keys, o_proj=(32, 32), num_heads=4, qk_head_dim=12, **SIZES)


def deepseek_v3(stacked=True, query_latent=True, more=()):
    """The parameters of DeepSeek-V3, Moonlight and Kimi K2, small, under their names."""
    torch.manual_seed(0)
    listed = nn.ModuleList([module(up_proj=(16, 32), down_proj=(32, 16))])
    mlps = [module(up_proj=(64, 32), down_proj=(32, 64))]
    mlps += [module(gate=(4, 32), experts=experts() if stacked else listed)]
    layers = [
        module(self_attn=latent_attention(query_latent), mlp=mlp, input_layernorm=nn.RMSNorm(32))
        for mlp in mlps
    ]
    return language_model(*layers, *more, **SIZES)


def kimi_k3():
    """Also the delta attention of Kimi K3, and its residual projections, under their names."""
    heads = {f"{name}_proj": (32, 32) for name in "qkvgo"}
    kernels = {
        f"{name}_conv1d": nn.Conv1d(32, 32, 4, groups=32, bias=False) for name in ("q", "k", "v")
    }
    small = {"f_a_proj": (8, 32), "f_b_proj": (32, 8), "b_proj": (4, 32)}
    vectors = {"A_log": numbers(4), "dt_bias": numbers(32)}
    attention = module(**heads, **kernels, **small, **vectors, num_heads=4, head_dim=8)
    layer = module(self_attn=attention, self_attention_res_proj=(1, 32), mlp_res_proj=(1, 32))
    return deepseek_v3(more=[layer])


def step(model, optim, **how):
    torch.manual_seed(1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optim.step(**how)
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]) and p.isfinite().all(), name
    return before


def matrices_of(optim):
    """By name without what all have, how many matrices each parameter holds."""
    rows = optim.summary().rows
    return {row["name"].replace("model.layers.", ""): row["matrices"] for row in rows}


def of_adamw(optim):
    names = (name.replace("model.layers.", "") for name in optim.names[1])
    return {name for name in names if "norm" not in name}


TABLES = {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("query_latent", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("recipe, lr", [(recipes.moonlight, 4.2e-4), (recipes.kimi_k2, 2e-4)])
def test_recipes_of_latent_attention_train_every_parameter(recipe, lr, stacked, query_latent):
    model = deepseek_v3(stacked, query_latent)
    optim = Muon(**recipe(model), **FP32)
    muon, adamw = optim.param_groups
    assert muon["lr"] == adamw["lr"] == lr and muon["weight_decay"] == 0.1
    assert of_adamw(optim) == TABLES
    assert "model.layers.1.mlp.gate.weight" in optim.names[0]
    step(model, optim)
    if stacked:  # gate and up projections of each expert apart
        assert matrices_of(optim)["1.mlp.experts.gate_up_proj"] == 8
        assert matrices_of(optim)["1.mlp.experts.down_proj"] == 4
    assert Muon(**recipe(model, lr=0.5)).param_groups[0]["lr"] == 0.5


ADAMW = {"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}  # not published of GLM-5 and Kimi K3
KIMI_K3 = {"lr": 1e-3, "momentum": 0.9, "ns_steps": 4, "threshold": 200.0, **ADAMW}


@pytest.mark.parametrize("name, needed", [("glm_5", ADAMW), ("kimi_k3", KIMI_K3)])
def test_what_a_report_leaves_out_has_to_be_given(name, needed):
    model, recipe = kimi_k3(), getattr(recipes, name)
    for key in needed:
        with pytest.raises(TypeError, match=key):
            recipe(model, **{k: value for k, value in needed.items() if k != key})
    arguments = recipe(model, **needed)
    for config in arguments.pop("clip_config", {}).values():
        assert config["threshold"] == needed["threshold"]
    assert arguments.items() >= {k: v for k, v in needed.items() if k != "threshold"}.items()


@pytest.mark.parametrize(
    "build, recipe, given, threshold",
    [
        (deepseek_v3, recipes.kimi_k2, {}, 100.0),
        (kimi_k3, recipes.kimi_k3, KIMI_K3, 200.0),
    ],
)
def test_logits_above_the_threshold_are_clipped_in_latent_attention_alone(
    build, recipe, given, threshold
):
    model = build()
    twin = copy.deepcopy(model)
    for each, logit in ((model, 4 * threshold), (twin, threshold)):
        optim = Muon(**recipe(each, **given), **FP32)
        step(each, optim, qk_logits={0: torch.tensor([logit, 50.0, 50.0, 50.0]), 1: None})
    left = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        expected = left[name].detach().clone()
        if name == "model.layers.0.self_attn.q_b_proj.weight":
            expected[:8] *= 0.5  # the root of 1/4, without rotation
            expected[8:12] *= 0.25
        elif name == "model.layers.0.self_attn.kv_b_proj.weight":
            expected[:8] *= 0.5
        torch.testing.assert_close(p, expected)


def test_glm_5_has_a_matrix_for_each_head_of_queries_keys_and_values():
    model = deepseek_v3()
    optim = Muon(**recipes.glm_5(model, **ADAMW), **FP32)
    muon, adamw = optim.param_groups
    assert muon["lr"] == adamw["lr"] == 2e-4 and muon["adjust_lr"] == 0.2
    matrices = {"q_b_proj": 4, "kv_b_proj": 8, "q_a_proj": 1, "kv_a_proj_with_mqa": 1, "o_proj": 1}
    expected = {f"0.self_attn.{name}.weight": count for name, count in matrices.items()}
    assert matrices_of(optim).items() >= {**expected, "1.mlp.experts.gate_up_proj": 8}.items()
    step(model, optim)


def test_kimi_k3_has_a_matrix_for_each_head():
    optim = Muon(**recipes.kimi_k3(kimi_k3(), **KIMI_K3), **FP32)
    matrices = {name: 4 if name in "qkv" else 1 for name in ("q", "k", "v", "f_b", "g", "o", "f_a")}
    expected = {f"2.self_attn.{name}_proj.weight": count for name, count in matrices.items()}
    expected |= {"0.self_attn.q_b_proj.weight": 4, "0.self_attn.kv_b_proj.weight": 8}
    assert matrices_of(optim).items() >= expected.items()
    assert of_adamw(optim) == TABLES | {
        *("2.self_attn.A_log", "2.self_attn.dt_bias", "2.self_attn.b_proj.weight"),
        *(f"2.self_attn.{name}_conv1d.weight" for name in ("q", "k", "v")),
        *("2.self_attention_res_proj.weight", "2.mlp_res_proj.weight"),
    }


def deepseek_v4():
    """The parameters of DeepSeek-V4, small, under transformers' names."""
    torch.manual_seed(0)
    queries = {"q_a_proj": (24, 32), "q_b_proj": (64, 24), "sinks": numbers(4)}
    keys = {"kv_proj": (16, 32), "kv_norm": nn.RMSNorm(16)}
    outputs = {"o_a_proj": (32, 32), "o_b_proj": (32, 32)}  # two groups
    compressor = module(position_bias=numbers(8, 16))
    attention = module(**queries, **keys, **outputs, compressor=compressor)
    connections = {
        f"{name}_hc": module(fn=numbers(24, 128), base=numbers(24), scale=numbers(3))
        for name in ("attn", "ffn")
    }
    layer = module(self_attn=attention, mlp=module(gate=(4, 32), experts=experts()), **connections)
    return language_model(layer, o_lora_rank=16)


def test_deepseek_v4_has_adamw_for_what_its_report_names_and_the_reports_numbers():
    model = deepseek_v4()
    optim = Muon(**recipes.deepseek_v4(model), **FP32)
    muon, adamw = optim.param_groups
    assert of_adamw(optim) == TABLES | {
        *(f"0.{name}_hc.{what}" for name in ("attn", "ffn") for what in ("base", "scale")),
        *("0.self_attn.sinks", "0.self_attn.compressor.position_bias"),
    }
    numbers = {"lr": 2e-4, "weight_decay": 0.1, "adjust_lr": 0.18, "momentum": 0.95}
    numbers |= {"nesterov": True, "ns_coefficients": "deepseekv4", "ns_steps": 10}
    assert muon.items() >= numbers.items()
    adamws = {"lr": 2e-4, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-20}
    assert adamw.items() >= adamws.items()
    assert matrices_of(optim)["0.self_attn.o_a_proj.weight"] == 2
    assert matrices_of(optim)["0.mlp.experts.gate_up_proj"] == 8
    name, lr = "model.layers.0.self_attn.q_b_proj.weight", 2e-4
    before = step(model, optim)[name]
    update = (before * (1 - lr * 0.1) - dict(model.named_parameters())[name].detach()) / lr
    assert update.square().mean().sqrt().item() == pytest.approx(0.18, rel=0.01)


def nanochat(width=48):
    """The parameters of nanochat's GPT of July 2026, small."""
    torch.manual_seed(0)
    attention = dict.fromkeys(("c_q", "c_k", "c_v", "c_proj"), (width, width))
    mlp = module(c_fc=(4 * width, width), c_proj=(width, 4 * width))
    block = module(attn=module(**attention, ve_gate=(4, 12)), mlp=mlp)
    transformer = module(wte=nn.Embedding(64, width), h=nn.ModuleList([block]))
    lambdas = {f"{name}_lambda": numbers(1) for name in ("smear", "backout")}
    lambdas |= {f"{name}_lambdas": numbers(1) for name in ("resid", "x0")}
    gates = {"smear_gate": (1, 24), "value_embeds": module(**{"0": nn.Embedding(64, width)})}
    return module(transformer=transformer, lm_head=(64, width), **lambdas, **gates)


def test_nanochats_recipe_has_a_group_for_every_parameter_with_the_rates_of_its_width():
    model = nanochat()
    optim = optimizer.MuonAdamW(**recipes.nanochat(model), **FP32)
    rates = {name: g["lr"] for g, names in zip(optim.param_groups, optim.names) for name in names}
    expected = {"lm_head.weight": 0.008 * 4, "transformer.wte.weight": 0.3 * 4}  # (48/768)^-½
    expected |= {"value_embeds.0.weight": 0.15 * 4, "resid_lambdas": 0.005, "x0_lambdas": 0.5}
    expected |= {"smear_gate.weight": 0.2, "transformer.h.0.attn.ve_gate.weight": 0.02}
    assert {name: rates[name] for name in expected} == pytest.approx(expected)
    muon = optim.param_groups[-1]
    assert muon["ns_equilibrate"] and muon["ns_renormalize"] and muon["ns_norm_factor"] == 1.01
    assert len(rates) == len(list(model.parameters()))
    step(model, optim)
    (head, *_, matrices) = recipes.nanochat(model, 0.5, matrix_lr=0.3)["param_groups"]
    assert (head["lr"], matrices["lr"]) == (pytest.approx(0.5 * 4), 0.3)


# What is refused


@pytest.mark.parametrize("name", ["moonlight", "kimi_k2", "glm_5"])
@pytest.mark.parametrize("part", ["kv_b_proj", "kv_a_proj_with_mqa", "experts", "embed_tokens"])
def test_models_without_the_parts_are_refused(name, part):
    model = deepseek_v3()
    for each in list(model.modules()):
        if hasattr(each, part):
            delattr(each, part)
    with pytest.raises(ValueError, match=rf"recipes\.{name} .*{part}"):
        getattr(recipes, name)(model, **(ADAMW if name == "glm_5" else {}))


def test_missing_sizes_and_parameters_of_no_part_are_refused():
    model = deepseek_v3()
    del model.config.v_head_dim
    with pytest.raises(ValueError, match=r"model\.config\.v_head_dim"):
        recipes.kimi_k2(model)
    model = nanochat()
    model.final_norm = nn.RMSNorm(48)
    with pytest.raises(ValueError, match=r"recipes\.nanochat .*final_norm\.weight"):
        recipes.nanochat(model)
    del model.final_norm, model.x0_lambdas
    with pytest.raises(ValueError, match=r"recipes\.nanochat .*x0_lambdas"):
        recipes.nanochat(model)


def test_every_published_value_has_its_source_beside_it():
    file = PACKAGE / "extras" / "recipes" / "published.json"
    for recipe, entries in json.loads(file.read_text()).items():
        assert entries.pop("report") and recipe in recipes.__all__
        assert entries.pop("builds_on", "moonlight") in recipes.__all__
        for key, entry in entries.items():
            assert entry.keys() == {"value", "source"} and entry["source"], f"{recipe}: {key}"
