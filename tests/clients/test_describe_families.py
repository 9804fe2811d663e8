"""What `describe` says of the architectures of transformers, built small, on the meta device.

Each family's decisions were read one by one; a change of them is to be read as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from advice import arguments, kinds, run
from kernel import optimizer

TEXT = dict(
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=1000,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA = dict(**TEXT, num_key_value_heads=2, head_dim=16)
MOE = dict(num_experts=8, num_local_experts=8, n_routed_experts=8, num_experts_per_tok=2)
LATENT = dict(q_lora_rank=24, kv_lora_rank=16, v_head_dim=16)
LATENT |= dict(qk_rope_head_dim=8, qk_nope_head_dim=16)
GPT2 = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=1000, n_positions=128)
VISION = dict(
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=224,
    patch_size=8,
)
ENCODER_DECODER = dict(
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=112,
    decoder_ffn_dim=112,
    vocab_size=1000,
    pad_token_id=0,
    decoder_start_token_id=0,
)


def causal(kind: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **config))


def of(model: str, config: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**arguments))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": causal("llama", **LLAMA),
    "qwen3": causal("qwen3", **LLAMA),
    "olmo2": causal("olmo2", **LLAMA),
    "gemma3": causal("gemma3_text", **LLAMA),
    "starcoder2": causal("starcoder2", **LLAMA),
    "phi3": causal("phi3", **LLAMA),
    "glm4": causal("glm4", **LLAMA),
    "qwen3_moe": causal("qwen3_moe", **LLAMA, **MOE, moe_intermediate_size=24),
    "qwen2_moe": causal(
        "qwen2_moe",
        **TEXT,
        **MOE,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=48,
    ),
    "mixtral": causal("mixtral", **LLAMA, **MOE),
    "minimax": causal("minimax", **LLAMA, **MOE),
    "jetmoe": causal("jetmoe", **LLAMA, **MOE),
    "gpt_oss": causal("gpt_oss", **LLAMA, **MOE),
    "llama4": causal("llama4_text", **LLAMA, **MOE, intermediate_size_mlp=112),
    "deepseek_v3": causal(
        "deepseek_v3",
        **TEXT,
        **MOE,
        **LATENT,
        moe_intermediate_size=24,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "gpt2": causal("gpt2", **GPT2),
    "gpt_bigcode": causal("gpt_bigcode", **GPT2),
    "gptj": causal("gptj", **GPT2, rotary_dim=8),
    "codegen": causal("codegen", **GPT2, rotary_dim=8),
    "gpt_neox": causal("gpt_neox", **TEXT),
    "bloom": causal("bloom", hidden_size=64, n_layer=2, n_head=4, vocab_size=1000),
    "falcon": causal("falcon", hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "falcon_grouped": causal(
        "falcon",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "mpt": causal("mpt", d_model=64, n_heads=4, n_layers=2, vocab_size=1000),
    "opt": causal("opt", **TEXT, ffn_dim=112, word_embed_proj_dim=64),
    "mamba": causal("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=1000, state_size=8),
    "mamba2": causal(
        "mamba2",
        hidden_size=64,
        num_hidden_layers=2,
        vocab_size=1000,
        state_size=8,
        num_heads=8,
        head_dim=16,
        n_groups=2,
    ),
    "rwkv": causal("rwkv", hidden_size=64, num_hidden_layers=2, vocab_size=1000),
    "recurrent_gemma": causal("recurrent_gemma", **TEXT),
    "bert": of("BertForMaskedLM", "BertConfig", **TEXT),
    "bert_untied": of("BertForMaskedLM", "BertConfig", **TEXT, tie_word_embeddings=False),
    "bert_classifier": of("BertForSequenceClassification", "BertConfig", **TEXT),
    "roberta_classifier": of("RobertaForSequenceClassification", "RobertaConfig", **TEXT),
    "electra": of("ElectraForPreTraining", "ElectraConfig", **TEXT, embedding_size=32),
    "albert": of("AlbertForMaskedLM", "AlbertConfig", **TEXT, embedding_size=32),
    "t5": of(
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=64,
        d_kv=16,
        d_ff=112,
        num_layers=2,
        num_heads=4,
        vocab_size=1000,
        feed_forward_proj="gated-gelu",
    ),
    "bart": of("BartForConditionalGeneration", "BartConfig", **ENCODER_DECODER),
    "whisper": of(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **ENCODER_DECODER,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "vit": of("ViTForImageClassification", "ViTConfig", **VISION, num_labels=10),
    "swin": of(
        "SwinForImageClassification",
        "SwinConfig",
        embed_dim=32,
        depths=[1, 2],
        num_heads=[2, 4],
        image_size=32,
        num_labels=10,
    ),
    "clip": of(
        "CLIPModel", "CLIPConfig", text_config=TEXT, vision_config=VISION, projection_dim=48
    ),
    "qwen2_vl": of(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        text_config=dict(**TEXT, num_key_value_heads=2),
        vision_config=dict(depth=2, embed_dim=64, hidden_size=64, num_heads=4),
    ),
    "resnet": of(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=16,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        num_labels=10,
    ),
}


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
        notes="unsure",
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
        return FAMILIES[name]()


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


@pytest.mark.parametrize("name", FAMILIES)
def test_decisions_traps_and_advice_are_those_that_were_read(name):
    expected, description = EXPECTED[name], describe_family(name)
    assert owners(description, "Muon") == expected.muon.split()
    assert owners(description, "AdamW") == expected.adamw.split()
    assert kinds(description.warnings) == expected.warnings.split()
    assert kinds(description.notes) == expected.notes.split()
    assert advised(description, name) == expected.advised


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_code_advises_leaves_no_warning_but_of_sizes_nobody_knows(name):
    model = build(name)
    description = optimizer.describe(model)
    space = run(description.code, model)
    again = optimizer.describe(model, **arguments(description.code, space))
    assert [kind for kind in kinds(again.warnings) if kind != "dimensions"] == [], again
    assert len(str(description).splitlines()) < 80
