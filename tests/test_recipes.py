"""Recipes of published models: each takes a model that is built as they are, and refuses others."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from checkout import PACKAGE
from kernel import optimizer

recipes, Muon = optimizer.recipes, optimizer.Muon
SIZES = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def linear(rows, cols):
    return nn.Linear(cols, rows, bias=False)


class Experts(nn.Module):
    """As transformers stacks them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 32) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(4, 32, 16) * 0.1)


class DeepseekV3(nn.Module):
    """The parameters of DeepSeek-V3, Moonlight and Kimi K2, small, under their names."""

    def __init__(self, stacked=True, query_latent=True):
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(**SIZES)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(100, 32)
        self.model.layers = nn.ModuleList()
        for number in range(2):
            layer, attention, mlp = nn.Module(), nn.Module(), nn.Module()
            attention.num_heads, attention.qk_head_dim = 4, 12
            vars(attention).update(SIZES)
            if query_latent:
                attention.q_a_proj, attention.q_b_proj = linear(24, 32), linear(48, 24)
            else:
                attention.q_proj = linear(48, 32)
            attention.kv_a_proj_with_mqa, attention.kv_b_proj = linear(20, 32), linear(64, 16)
            attention.o_proj = linear(32, 32)
            attention.kv_a_layernorm = nn.RMSNorm(16)
            if number:
                mlp.gate = linear(4, 32)
                mlp.experts = Experts() if stacked else nn.ModuleList([nn.Module()])
                if not stacked:
                    mlp.experts[0].up_proj, mlp.experts[0].down_proj = (
                        linear(16, 32),
                        linear(32, 16),
                    )
            else:
                mlp.up_proj, mlp.down_proj = linear(64, 32), linear(32, 64)
            layer.self_attn, layer.mlp, layer.input_layernorm = attention, mlp, nn.RMSNorm(32)
            self.model.layers.append(layer)
        self.lm_head = linear(100, 32)


def step(model, optim, **how):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optim.step(**how)
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]) and p.isfinite().all(), name
    return before


@pytest.mark.parametrize("query_latent", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("recipe, lr", [(recipes.moonlight, 4.2e-4), (recipes.kimi_k2, 2e-4)])
def test_recipes_of_latent_attention_train_every_parameter(recipe, lr, stacked, query_latent):
    model = DeepseekV3(stacked, query_latent)
    optim = Muon(**recipe(model), ns_dtype=torch.float32)
    muon, adamw = optim.param_groups
    assert muon["lr"] == adamw["lr"] == lr and muon["weight_decay"] == 0.1
    assert {name for name in optim.names[1] if "norm" not in name} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert "model.layers.1.mlp.gate.weight" in optim.names[0]
    step(model, optim)
    if stacked:  # gate and up projections of each expert apart
        assert matrices_of(optim)["model.layers.1.mlp.experts.gate_up_proj"] == 8
        assert matrices_of(optim)["model.layers.1.mlp.experts.down_proj"] == 4


def test_kimi_k2_clips_logits_above_100_in_latent_attention():
    model, twin = DeepseekV3(), DeepseekV3()
    for each, logit in ((model, 400.0), (twin, 100.0)):
        optim = Muon(**recipes.kimi_k2(each), ns_dtype=torch.float32)
        torch.manual_seed(1)
        step(each, optim, qk_logits={0: torch.tensor([logit, 50.0, 50.0, 50.0]), 1: None})
    clipped, left = (
        dict(each.named_parameters())["model.layers.0.self_attn.q_b_proj.weight"]
        for each in (model, twin)
    )
    expected = left.detach().clone()
    expected[:8] *= 0.5  # the root of 100/400, without rotation
    expected[8:12] *= 0.25
    torch.testing.assert_close(clipped, expected)


ADAMW = {"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}  # not published of GLM-5 and Kimi K3
KIMI_K3 = {"lr": 1e-3, "momentum": 0.9, "ns_steps": 4, "threshold": 200.0, **ADAMW}


@pytest.mark.parametrize("name, needed", [("glm_5", ADAMW), ("kimi_k3", KIMI_K3)])
def test_what_a_report_leaves_out_has_to_be_given(name, needed):
    model, recipe = KimiK3(), getattr(recipes, name)
    for key in needed:
        with pytest.raises(TypeError, match=key):
            recipe(model, **{k: value for k, value in needed.items() if k != key})
    arguments = recipe(model, **needed)
    for config in arguments.pop("clip_config", {}).values():
        assert config["threshold"] == needed["threshold"]
    assert arguments.items() >= {k: v for k, v in needed.items() if k != "threshold"}.items()


def matrices_of(optim):
    return {row["name"]: row["matrices"] for row in optim.summary().rows}


def test_glm_5_has_a_matrix_for_each_head_of_queries_keys_and_values():
    model = DeepseekV3()
    optim = Muon(**recipes.glm_5(model, **ADAMW), ns_dtype=torch.float32)
    muon, adamw = optim.param_groups
    assert muon["lr"] == adamw["lr"] == 2e-4 and muon["adjust_lr"] == 0.2
    matrices = {name.split(".")[-2]: n for name, n in matrices_of(optim).items()}
    assert matrices["q_b_proj"] == 4 and matrices["kv_b_proj"] == 8
    assert matrices["q_a_proj"] == matrices["kv_a_proj_with_mqa"] == matrices["o_proj"] == 1
    assert matrices_of(optim)["model.layers.1.mlp.experts.gate_up_proj"] == 8
    step(model, optim)


class KimiK3(DeepseekV3):
    """Also the delta attention of Kimi K3, and its residual projections, under their names."""

    def __init__(self):
        super().__init__()
        layer, attention = nn.Module(), nn.Module()
        attention.num_heads, attention.head_dim = 4, 8
        for name in ("q", "k", "v"):
            setattr(attention, f"{name}_proj", linear(32, 32))
            convolution = nn.Conv1d(32, 32, 4, groups=32, bias=False)
            setattr(attention, f"{name}_conv1d", convolution)
        attention.f_a_proj, attention.f_b_proj = linear(8, 32), linear(32, 8)
        attention.b_proj, attention.g_proj, attention.o_proj = (
            linear(4, 32),
            linear(32, 32),
            linear(32, 32),
        )
        attention.A_log, attention.dt_bias = (nn.Parameter(torch.randn(n)) for n in (4, 32))
        layer.self_attn, layer.self_attention_res_proj = attention, linear(1, 32)
        layer.mlp_res_proj = linear(1, 32)
        self.model.layers.append(layer)


def test_kimi_k3_has_a_matrix_for_each_head_and_clips_latent_attention_alone():
    model, twin = KimiK3(), KimiK3()
    optim = Muon(**recipes.kimi_k3(model, **KIMI_K3), ns_dtype=torch.float32)
    matrices = {name.removeprefix("model.layers."): n for name, n in matrices_of(optim).items()}
    for name in ("q_proj", "k_proj", "v_proj", "f_b_proj", "g_proj", "o_proj", "f_a_proj"):
        assert matrices[f"2.self_attn.{name}.weight"] == (4 if name[0] in "qkv" else 1), name
    assert matrices["0.self_attn.q_b_proj.weight"] == 4
    assert matrices["0.self_attn.kv_b_proj.weight"] == 8
    of_adamw = {name.removeprefix("model.layers.2.") for name in optim.names[1]}
    of_adamw = {name for name in of_adamw if "norm" not in name}
    assert of_adamw == {
        *("model.embed_tokens.weight", "lm_head.weight", "self_attn.A_log", "self_attn.dt_bias"),
        *(f"self_attn.{name}_conv1d.weight" for name in ("q", "k", "v")),
        *("self_attn.b_proj.weight", "self_attention_res_proj.weight", "mlp_res_proj.weight"),
    }
    for each, logit in ((model, 800.0), (twin, 200.0)):
        optim = Muon(**recipes.kimi_k3(each, **KIMI_K3), ns_dtype=torch.float32)
        torch.manual_seed(1)
        step(each, optim, qk_logits={0: torch.tensor([logit, 50.0, 50.0, 50.0]), 1: None})
    left = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        expected = left[name].detach().clone()
        if name == "model.layers.0.self_attn.q_b_proj.weight":
            expected[:8] *= 0.5
            expected[8:12] *= 0.25
        elif name == "model.layers.0.self_attn.kv_b_proj.weight":
            expected[:8] *= 0.5
        torch.testing.assert_close(p, expected)


@pytest.mark.parametrize("name", ["moonlight", "kimi_k2", "glm_5"])
@pytest.mark.parametrize("part", ["kv_b_proj", "kv_a_proj_with_mqa", "experts", "embed_tokens"])
def test_models_without_the_parts_are_refused(name, part):
    model = DeepseekV3()
    for module in list(model.modules()):
        if hasattr(module, part):
            delattr(module, part)
    with pytest.raises(ValueError, match=rf"recipes\.{name} names {part}"):
        getattr(recipes, name)(model, **(ADAMW if name == "glm_5" else {}))


def test_kimi_k2_needs_the_sizes_of_heads():
    model = DeepseekV3()
    del model.config.v_head_dim
    with pytest.raises(ValueError, match=r"needs model\.config\.v_head_dim"):
        recipes.kimi_k2(model)


class DeepseekV4(nn.Module):
    """The parameters of DeepSeek-V4, small, under transformers' names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(o_lora_rank=16)
        self.model, layer = nn.Module(), nn.Module()
        self.model.embed_tokens = nn.Embedding(100, 32)
        attention = layer.self_attn = nn.Module()
        attention.q_a_proj, attention.q_b_proj = linear(24, 32), linear(64, 24)
        attention.kv_proj, attention.kv_norm = linear(16, 32), nn.RMSNorm(16)
        attention.o_a_proj, attention.o_b_proj = linear(32, 32), linear(32, 32)  # two groups
        attention.compressor = nn.Module()
        attention.compressor.position_bias = nn.Parameter(torch.randn(8, 16))
        attention.sinks = nn.Parameter(torch.randn(4))
        layer.mlp = nn.Module()
        layer.mlp.gate, layer.mlp.experts = linear(4, 32), Experts()
        for name in ("attn_hc", "ffn_hc"):
            connection = nn.Module()
            connection.fn = nn.Parameter(torch.randn(24, 128))
            connection.base = nn.Parameter(torch.randn(24))
            connection.scale = nn.Parameter(torch.randn(3))
            setattr(layer, name, connection)
        self.model.layers = nn.ModuleList([layer])
        self.lm_head = linear(100, 32)


def test_deepseek_v4_has_adamw_for_what_its_report_names_and_the_reports_numbers():
    model = DeepseekV4()
    optim = Muon(**recipes.deepseek_v4(model), ns_dtype=torch.float32)
    muon, adamw = optim.param_groups
    assert {name.replace("model.layers.0.", "") for name in optim.names[1]} == {
        *("model.embed_tokens.weight", "lm_head.weight", "self_attn.kv_norm.weight"),
        *(f"{name}_hc.{what}" for name in ("attn", "ffn") for what in ("base", "scale")),
        *("self_attn.sinks", "self_attn.compressor.position_bias"),
    }
    assert muon["lr"] == adamw["lr"] == 2e-4 and muon["weight_decay"] == 0.1
    assert (muon["adjust_lr"], muon["momentum"], muon["nesterov"]) == (0.18, 0.95, True)
    assert (muon["ns_coefficients"], muon["ns_steps"]) == ("deepseekv4", 10)
    assert (adamw["adamw_betas"], adamw["adamw_eps"]) == ((0.9, 0.95), 1e-20)
    assert matrices_of(optim)["model.layers.0.self_attn.o_a_proj.weight"] == 2
    assert matrices_of(optim)["model.layers.0.mlp.experts.gate_up_proj"] == 8
    name, lr = "model.layers.0.self_attn.q_b_proj.weight", 2e-4
    before = step(model, optim)[name]
    update = (before * (1 - lr * 0.1) - dict(model.named_parameters())[name].detach()) / lr
    assert update.square().mean().sqrt().item() == pytest.approx(0.18, rel=0.01)


def test_every_published_value_has_its_source_beside_it():
    file = PACKAGE / "extras" / "recipes" / "published.json"
    for recipe, entries in json.loads(file.read_text()).items():
        assert entries.pop("report") and recipe in recipes.__all__
        assert entries.pop("builds_on", "moonlight") in recipes.__all__
        for key, entry in entries.items():
            assert entry.keys() == {"value", "source"} and entry["source"], f"{recipe}: {key}"


class NanochatGPT(nn.Module):
    """The parameters of nanochat's GPT of July 2026, small."""

    def __init__(self, width=48):
        super().__init__()
        torch.manual_seed(0)
        block = nn.Module()
        block.attn, block.mlp = nn.Module(), nn.Module()
        for name in ("c_q", "c_k", "c_v", "c_proj"):
            setattr(block.attn, name, linear(width, width))
        block.attn.ve_gate = linear(4, 12)
        block.mlp.c_fc, block.mlp.c_proj = linear(4 * width, width), linear(width, 4 * width)
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(64, width), "h": nn.ModuleList([block])}
        )
        self.lm_head = linear(64, width)
        self.resid_lambdas = nn.Parameter(torch.ones(1))
        self.x0_lambdas = nn.Parameter(torch.zeros(1))
        self.smear_gate = linear(1, 24)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.full((1,), 0.2))
        self.value_embeds = nn.ModuleDict({"0": nn.Embedding(64, width)})


def test_nanochats_recipe_has_a_group_for_every_parameter_with_the_rates_of_its_width():
    model = NanochatGPT()
    optim = optimizer.MuonAdamW(**recipes.nanochat(model), ns_dtype=torch.float32)
    rates = {name: g["lr"] for g, names in zip(optim.param_groups, optim.names) for name in names}
    assert rates["lm_head.weight"] == pytest.approx(0.008 * 4)  # (48/768)^-½
    assert rates["transformer.wte.weight"] == pytest.approx(0.3 * 4)
    assert rates["value_embeds.0.weight"] == pytest.approx(0.15 * 4)
    assert rates["resid_lambdas"] == pytest.approx(0.005) and rates["x0_lambdas"] == 0.5
    assert rates["smear_gate.weight"] == 0.2
    assert rates["transformer.h.0.attn.ve_gate.weight"] == 0.02
    muon = optim.param_groups[-1]
    assert muon["ns_equilibrate"] and muon["ns_renormalize"] and muon["ns_norm_factor"] == 1.01
    assert len(rates) == len(list(model.parameters()))
    step(model, optim)


def test_nanochats_recipe_refuses_missing_parts_and_parameters_of_its_own():
    model = NanochatGPT()
    del model.x0_lambdas
    with pytest.raises(ValueError, match=r"recipes\.nanochat names x0_lambdas"):
        recipes.nanochat(model)
    model = NanochatGPT()
    model.final_norm = nn.RMSNorm(48)
    with pytest.raises(ValueError, match=r"no group for final_norm\.weight"):
        recipes.nanochat(model)
