"""What `describe` says of the architectures of transformers, built small, on the meta device.

Each family's traps were read one by one; a change of them is to be read as well.
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
    """Of a family, kinds of warnings and notes; arguments of the advised code beside ``lr`` and
    ``is_muon_func``. The table of architectures has the class of each parameter."""

    warnings: str = ""
    notes: str = ""
    advised: dict[str, Any] = field(default_factory=dict)


BY_HEAD = "(head (q=16 + k=16 + v=16)) dim"

EXPECTED: dict[str, Expected] = {
    "llama": Expected(),
    "qwen3": Expected(),
    "gemma3": Expected(notes="tied"),
    "starcoder2": Expected(notes="tied"),
    "phi3": Expected(
        warnings="fused fused",
        advised={"split": {"qkv_proj": [64, 32, 32], "gate_up_proj": [112, 112]}},
    ),
    "glm4": Expected(warnings="fused", advised={"split": {"gate_up_proj": [112, 112]}}),
    "qwen3_moe": Expected(
        warnings="experts fused",
        notes="routers",
        advised={"expert_keys": ["experts"], "split": {"gate_up_proj": [24, 24]}},
    ),
    "qwen2_moe": Expected(
        warnings="experts fused",
        notes="routers vectors",
        advised={"expert_keys": ["experts"], "split": {"gate_up_proj": [24, 24]}},
    ),
    "mixtral": Expected(
        warnings="experts fused",
        notes="routers",
        advised={"expert_keys": ["experts"], "split": {"gate_up_proj": [112, 112]}},
    ),
    "minimax": Expected(
        warnings="experts fused fused",
        notes="routers",
        advised={
            "expert_keys": ["experts"],
            "split": {"gate_up_proj": [112, 112], "qkv_proj": BY_HEAD},
        },
    ),
    "jetmoe": Expected(
        warnings="experts fused",
        notes="routers tied",
        advised={
            "expert_keys": ["input_linear", "output_linear", "experts"],
            "split": {"model.layers.*.mlp.input_linear.weight": [112, 112]},
        },
    ),
    "gpt_oss": Expected(
        warnings="experts fused",
        notes="routers",
        advised={
            "expert_keys": ["experts"],
            "split": {"gate_up_proj": "dim (n (gate=1 + up=1))"},
        },
    ),
    "llama4": Expected(
        warnings="experts fused",
        notes="routers",
        advised={
            "expert_keys": ["experts"],
            "split": {"gate_up_proj": "dim (gate=112 + up=112)"},
        },
    ),
    "deepseek_v3": Expected(
        warnings="experts fused fused fused",
        notes="routers",
        advised={
            "expert_keys": ["experts"],
            "split": {
                "kv_a_proj_with_mqa": [16, 8],
                "kv_b_proj": "(head (k=16 + v=16)) dim",
                "gate_up_proj": [24, 24],
            },
        },
    ),
    "gpt2": Expected(
        warnings="fused",
        notes="tied",
        advised={"split": {"c_attn": "dim (q=64 + k=64 + v=64)"}},
    ),
    "gpt_bigcode": Expected(
        warnings="fused", notes="tied", advised={"split": {"c_attn": [64, 16, 16]}}
    ),
    "gptj": Expected(),
    "codegen": Expected(
        warnings="fused", advised={"split": {"qkv_proj": "(4 (q=16 + v=16 + k=16)) dim"}}
    ),
    "gpt_neox": Expected(warnings="fused", advised={"split": {"query_key_value": BY_HEAD}}),
    "falcon": Expected(
        warnings="fused", notes="tied", advised={"split": {"query_key_value": [64, 16, 16]}}
    ),
    "falcon_grouped": Expected(
        warnings="fused",
        notes="tied",
        advised={"split": {"query_key_value": "(head (q=32 + k=16 + v=16)) dim"}},
    ),
    "mpt": Expected(warnings="fused", notes="tied", advised={"split": {"Wqkv": [64, 64, 64]}}),
    "opt": Expected(notes="tied"),
    "mamba": Expected(warnings="fused", notes="tied", advised={"split": {"in_proj": [128, 128]}}),
    "mamba2": Expected(warnings="fused", advised={"split": {"in_proj": [128, 128, 16, 16, 8]}}),
    "rwkv": Expected(),
    "recurrent_gemma": Expected(warnings="dimensions", notes="tied"),
    "bert": Expected(notes="tied shared"),
    "bert_untied": Expected(),
    "bert_classifier": Expected(),
    "roberta_classifier": Expected(),
    "electra": Expected(),
    "albert": Expected(notes="tied shared"),
    "t5": Expected(notes="tied"),
    "bart": Expected(notes="tied"),
    "whisper": Expected(notes="tied"),
    "vit": Expected(),
    "swin": Expected(),
    "clip": Expected(notes="unsure unsure"),
    "qwen2_vl": Expected(warnings="fused", advised={"split": {"qkv": [64, 64, 64]}}),
    "resnet": Expected(warnings="convolutions", advised={"convolutions": True}),
}


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return TRANSFORMERS[name].build()


def describe_family(name: str) -> Any:
    return optimizer.describe(build(name))


def advised(description: Any, name: str) -> dict[str, Any]:
    found = arguments(description.code, run(description.code, build(name)))
    return {key: value for key, value in found.items() if key not in ("lr", "is_muon_func")}


@pytest.mark.parametrize("name", EXPECTED)
def test_traps_and_advice_are_those_that_were_read(name):
    expected, description = EXPECTED[name], describe_family(name)
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
