"""What `describe` says of the architectures of transformers, built small, on the meta device.

Each family's decisions were read one by one; a change of them is to be read as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from advice import arguments, kinds, run
from kernel import optimizer
from transformers_architectures import TRANSFORMERS


@dataclass(frozen=True)
class Expected:
    """Of a family, components that own Muon's parameters, and AdamW's of several dimensions; kinds
    of warnings and notes; arguments of the advised code beside ``lr`` and ``is_muon_func``."""

    muon: str
    adamw: str
    warnings: str = ""
    notes: str = ""
    advised: dict[str, Any] = field(default_factory=dict)


EXPECTED: dict[str, Expected] = {
    "llama": Expected(
        muon="q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
        adamw="embed_tokens lm_head",
    ),
    "qwen3": Expected(
        muon="q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
        adamw="embed_tokens lm_head",
    ),
    "olmo2": Expected(
        muon="q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
        adamw="embed_tokens lm_head",
    ),
    "gemma3": Expected(
        muon="q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
        adamw="embed_tokens",
        notes="tied",
    ),
    "starcoder2": Expected(
        muon="q_proj k_proj v_proj o_proj c_fc c_proj",
        adamw="embed_tokens",
        notes="tied",
    ),
    "phi3": Expected(
        muon="o_proj qkv_proj gate_up_proj down_proj",
        adamw="embed_tokens lm_head",
        warnings="fused fused",
        advised={"split": {"qkv_proj": [64, 32, 32], "gate_up_proj": [112, 112]}},
    ),
    "glm4": Expected(
        muon="q_proj k_proj v_proj o_proj gate_up_proj down_proj",
        adamw="embed_tokens lm_head",
        warnings="fused",
        advised={"split": {"gate_up_proj": [112, 112]}},
    ),
    "qwen3_moe": Expected(
        muon="q_proj k_proj v_proj o_proj gate",
        adamw="embed_tokens gate_up_proj down_proj lm_head",
        warnings="experts fused",
        notes="routers",
        advised={"expert_keys": ["experts"], "split": {"gate_up_proj": [24, 24]}},
    ),
    "qwen2_moe": Expected(
        muon="q_proj k_proj v_proj o_proj gate gate_proj up_proj down_proj shared_expert_gate",
        adamw="embed_tokens gate_up_proj down_proj lm_head",
        warnings="experts fused",
        notes="routers vectors",
        advised={"expert_keys": ["experts"], "split": {"gate_up_proj": [24, 24]}},
    ),
    "mixtral": Expected(
        muon="q_proj k_proj v_proj o_proj gate",
        adamw="embed_tokens gate_up_proj down_proj lm_head",
        warnings="experts fused",
        notes="routers",
        advised={"expert_keys": ["experts"], "split": {"gate_up_proj": [112, 112]}},
    ),
    "minimax": Expected(
        muon="q_proj k_proj v_proj o_proj gate qkv_proj out_proj output_gate",
        adamw="embed_tokens gate_up_proj down_proj lm_head",
        warnings="experts fused fused",
        notes="routers",
        advised={"expert_keys": ["experts"], "split": {"gate_up_proj": [112, 112], "qkv_proj": 16}},
    ),
    "jetmoe": Expected(
        muon="layer kv_proj",
        adamw="embed_tokens input_linear output_linear",
        warnings="experts",
        notes="routers tied",
        advised={"expert_keys": ["input_linear", "output_linear", "experts"]},
    ),
    "gpt_oss": Expected(
        muon="q_proj k_proj v_proj o_proj router",
        adamw="embed_tokens gate_up_proj gate_up_proj_bias down_proj down_proj_bias lm_head",
        warnings="experts",
        notes="routers columns",
        advised={"expert_keys": ["experts"]},
    ),
    "llama4": Expected(
        muon="q_proj k_proj v_proj o_proj router gate_proj up_proj down_proj",
        adamw="embed_tokens gate_up_proj down_proj lm_head",
        warnings="experts",
        notes="routers columns",
        advised={"expert_keys": ["experts"]},
    ),
    "deepseek_v3": Expected(
        muon="q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj gate_proj up_proj down_proj "
        "gate",
        adamw="embed_tokens gate_up_proj down_proj lm_head",
        warnings="experts fused fused",
        notes="routers",
        advised={
            "expert_keys": ["experts"],
            "split": {"kv_a_proj_with_mqa": [16, 8], "gate_up_proj": [24, 24]},
        },
    ),
    "gpt2": Expected(
        muon="c_attn c_proj c_fc",
        adamw="wte wpe",
        notes="tied columns",
    ),
    "gpt_bigcode": Expected(
        muon="c_attn c_proj c_fc",
        adamw="wte wpe",
        warnings="fused",
        notes="tied",
        advised={"split": {"c_attn": [64, 16, 16]}},
    ),
    "gptj": Expected(
        muon="k_proj v_proj q_proj out_proj fc_in fc_out",
        adamw="wte lm_head",
    ),
    "codegen": Expected(
        muon="qkv_proj out_proj fc_in fc_out",
        adamw="wte lm_head",
        warnings="fused",
        advised={"split": {"qkv_proj": 16}},
    ),
    "gpt_neox": Expected(
        muon="query_key_value dense dense_h_to_4h dense_4h_to_h",
        adamw="embed_in lm_head",
        warnings="fused",
        advised={"split": {"query_key_value": 16}},
    ),
    "bloom": Expected(
        muon="query_key_value dense dense_h_to_4h dense_4h_to_h",
        adamw="word_embeddings",
        warnings="fused",
        notes="tied",
        advised={"split": {"query_key_value": 16}},
    ),
    "falcon": Expected(
        muon="query_key_value dense dense_h_to_4h dense_4h_to_h",
        adamw="word_embeddings",
        warnings="fused",
        notes="tied",
        advised={"split": {"query_key_value": 16}},
    ),
    "falcon_grouped": Expected(
        muon="query_key_value dense dense_h_to_4h dense_4h_to_h",
        adamw="word_embeddings",
        warnings="fused",
        notes="tied",
        advised={"split": {"query_key_value": 16}},
    ),
    "mpt": Expected(
        muon="Wqkv out_proj up_proj down_proj",
        adamw="wte",
        warnings="fused",
        notes="tied",
        advised={"split": {"Wqkv": [64, 64, 64]}},
    ),
    "opt": Expected(
        muon="k_proj v_proj q_proj out_proj fc1 fc2",
        adamw="embed_tokens embed_positions",
        notes="tied",
    ),
    "mamba": Expected(
        muon="in_proj x_proj dt_proj out_proj",
        adamw="embeddings A_log conv1d",
        warnings="fused",
        notes="tied",
        advised={"split": {"in_proj": [128, 128]}},
    ),
    "mamba2": Expected(
        muon="in_proj out_proj",
        adamw="embeddings conv1d lm_head",
        warnings="fused",
        advised={"split": {"in_proj": [128, 128, 16, 16, 8]}},
    ),
    "rwkv": Expected(
        muon="key value receptance output",
        adamw="embeddings time_mix_key time_mix_value time_mix_receptance head",
    ),
    "recurrent_gemma": Expected(
        muon="linear_y linear_x linear_out gate_proj up_proj down_proj",
        adamw="embed_tokens conv_1d input_gate_weight input_gate_bias "
        "recurrent_gate_weight recurrent_gate_bias",
        warnings="dimensions",
        notes="tied",
    ),
    "bert": Expected(
        muon="query key value dense",
        adamw="word_embeddings position_embeddings token_type_embeddings",
        notes="tied shared",
    ),
    "bert_untied": Expected(
        muon="query key value dense",
        adamw="word_embeddings position_embeddings token_type_embeddings decoder",
    ),
    "bert_classifier": Expected(
        muon="query key value dense",
        adamw="word_embeddings position_embeddings token_type_embeddings classifier",
    ),
    "roberta_classifier": Expected(
        muon="query key value dense",
        adamw="word_embeddings token_type_embeddings position_embeddings out_proj",
    ),
    "electra": Expected(
        muon="embeddings_project query key value dense",
        adamw="word_embeddings position_embeddings token_type_embeddings dense_prediction",
    ),
    "albert": Expected(
        muon="embedding_hidden_mapping_in query key value dense ffn ffn_output",
        adamw="word_embeddings position_embeddings token_type_embeddings",
        notes="tied shared",
    ),
    "t5": Expected(
        muon="q k v o wi_0 wi_1 wo",
        adamw="shared relative_attention_bias",
        notes="tied",
    ),
    "bart": Expected(
        muon="k_proj v_proj q_proj out_proj fc1 fc2",
        adamw="shared embed_positions",
        notes="tied",
    ),
    "whisper": Expected(
        muon="k_proj v_proj q_proj out_proj fc1 fc2",
        adamw="conv1 conv2 embed_tokens embed_positions",
        notes="tied",
    ),
    "vit": Expected(
        muon="q_proj k_proj v_proj o_proj fc1 fc2",
        adamw="cls_token position_embeddings projection classifier",
    ),
    "swin": Expected(
        muon="q_proj k_proj v_proj o_proj fc1 fc2 reduction",
        adamw="projection relative_position_bias_table classifier",
    ),
    "clip": Expected(
        muon="k_proj v_proj q_proj out_proj fc1 fc2 visual_projection text_projection",
        adamw="token_embedding position_embedding patch_embedding",
        notes="unsure unsure",
    ),
    "qwen2_vl": Expected(
        muon="qkv proj fc1 fc2 mlp q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
        adamw="proj embed_tokens lm_head",
        warnings="fused",
        advised={"split": {"qkv": [64, 64, 64]}},
    ),
    "resnet": Expected(
        muon="",
        adamw="convolution classifier",
        warnings="convolutions",
        advised={"flatten": True},
    ),
}


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return TRANSFORMERS[name].build()


def describe_family(name: str) -> Any:
    return optimizer.describe(build(name))


def owners(description: Any, algorithm: str) -> list[str]:
    """What parameters are called, without indices, ``weight`` and what is around."""
    rows = [row for row in description.rows if row["algorithm"] == algorithm]
    names = [row["name"].split(".") for row in rows if len(row["shape"]) > 1]
    named = [[p for p in parts if not p.isdigit() and p != "weight"] for parts in names]
    return list(dict.fromkeys(parts[-1] for parts in named))


def advised(description: Any, name: str) -> dict[str, Any]:
    found = arguments(description.code, run(description.code, build(name)))
    return {key: value for key, value in found.items() if key not in ("lr", "is_muon_func")}


@pytest.mark.parametrize("name", EXPECTED)
def test_decisions_traps_and_advice_are_those_that_were_read(name):
    expected, description = EXPECTED[name], describe_family(name)
    assert owners(description, "Muon") == expected.muon.split()
    assert owners(description, "AdamW") == expected.adamw.split()
    assert kinds(description.warnings) == expected.warnings.split()
    assert kinds(description.notes) == expected.notes.split()
    assert advised(description, name) == expected.advised


@pytest.mark.parametrize("name", EXPECTED)
def test_what_the_code_advises_leaves_no_warning_but_of_sizes_nobody_knows(name):
    model = build(name)
    description = optimizer.describe(model)
    space = run(description.code, model)
    again = optimizer.describe(model, **arguments(description.code, space))
    assert [kind for kind in kinds(again.warnings) if kind != "dimensions"] == [], again
    assert len(str(description).splitlines()) < 80
