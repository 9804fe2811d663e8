"""Recipes on the models of published configurations, made small, as transformers builds them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV4Config

from kernel import optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

# Of moonshotai/Kimi-K2-Instruct's config.json, by the numbers in the comments.
KIMI_K2: dict[str, Any] = {
    "hidden_size": 7168 // 112,
    "intermediate_size": 18432 // 144,
    "moe_intermediate_size": 2048 // 64,
    "num_hidden_layers": 3,  # 61, the first of which is dense
    "first_k_dense_replace": 1,
    "num_attention_heads": 64 // 16,
    "num_key_value_heads": 64 // 16,
    "q_lora_rank": 1536 // 48,
    "kv_lora_rank": 512 // 32,
    "qk_nope_head_dim": 128 // 8,
    "qk_rope_head_dim": 64 // 8,
    "v_head_dim": 128 // 8,
    "n_routed_experts": 384 // 48,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,  # 8
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "vocab_size": 163840 // 160,
    "tie_word_embeddings": False,
}
MOONLIGHT = {**KIMI_K2, "q_lora_rank": None, "n_shared_experts": 2}  # queries without a latent

# Of deepseek-ai/DeepSeek-V4-Flash's kind, with one layer of each kind of attention.
DEEPSEEK_V4: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
}

RECIPES = {
    "kimi_k2": DeepseekV3Config(**KIMI_K2),
    "moonlight": DeepseekV3Config(**MOONLIGHT),
    "glm_5": DeepseekV3Config(**KIMI_K2),  # without the indexer, as in pre-training
    "deepseek_v4": DeepseekV4Config(**DEEPSEEK_V4),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_train_the_models_of_their_configurations(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(RECIPES[name])
    given = {"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8} if name == "glm_5" else {}
    optim = optimizer.Muon(**getattr(optimizer.recipes, name)(model, lr=0.01, **given))
    if name == "kimi_k2":
        optim.qk_recorder = optimizer.QKLogitRecorder(model)
    muon, adamw = optim.names
    of_adamw = {
        n for n in adamw if not re.search(r"norm|_hc\.(base|scale)|hc_(base|scale)|bias|sinks", n)
    }
    assert of_adamw == {"model.embed_tokens.weight", "lm_head.weight"}
    assert set(muon) | set(adamw) == {n for n, p in model.named_parameters()}
    matrices = {row["name"]: row["matrices"] for row in optim.summary().rows}
    stacked = [n for n in muon if n.endswith("gate_up_proj")]
    assert all(matrices[n] == 2 * RECIPES[name].n_routed_experts for n in stacked)
    tokens = torch.randint(KIMI_K2["vocab_size"], (4, 32))
    losses = []
    for _ in range(12):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


def test_a_model_of_another_architecture_is_refused():
    from transformers import LlamaConfig

    sizes = {"num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(hidden_size=32, intermediate_size=64, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="kimi_k2 names kv_a_proj_with_mqa, which this LlamaFor"):
        optimizer.recipes.kimi_k2(model)
