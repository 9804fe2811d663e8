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
    """Of a family, kinds of warnings and notes, and what ``Muon.for_model`` finds: ``expert_keys``
    and ``split``. The table of architectures has the class of each parameter."""

    warnings: str = ""
    notes: str = ""
    found: dict[str, Any] = field(default_factory=dict)


BY_HEAD = "(head (q=16 + k=16 + v=16)) dim"
QUERIES_AND_GATES = "(head (q=16 + gate=16)) dim"

EXPECTED: dict[str, Expected] = {
    "llama": Expected(),
    "qwen3": Expected(),
    "gemma3": Expected(notes="tied"),
    "starcoder2": Expected(notes="tied"),
    "mistral": Expected(),
    "olmo2": Expected(),
    "phi": Expected(),
    "phi3": Expected(
        found={"split": {"qkv_proj": [64, 32, 32], "gate_up_proj": [112, 112]}},
    ),
    "glm4": Expected(found={"split": {"gate_up_proj": [112, 112]}}),
    "qwen3_moe": Expected(
        notes="routers",
        found={"expert_keys": ["experts"], "split": {"gate_up_proj": [24, 24]}},
    ),
    "qwen2_moe": Expected(
        notes="routers vectors",
        found={"expert_keys": ["experts"], "split": {"gate_up_proj": [24, 24]}},
    ),
    "qwen3_next": Expected(
        notes="routers vectors",
        found={
            "expert_keys": ["experts"],
            "split": {
                "q_proj": QUERIES_AND_GATES,
                "in_proj_qkvz": "(head (q=16 + k=16 + v=32 + z=32)) dim",
                "in_proj_ba": "(head (b=2 + a=2)) dim",
                "gate_up_proj": [24, 24],
            },
        },
    ),
    "qwen3_5": Expected(
        found={"split": {"q_proj": QUERIES_AND_GATES, "in_proj_qkv": [32, 32, 64]}}
    ),
    "mixtral": Expected(
        notes="routers",
        found={"expert_keys": ["experts"], "split": {"gate_up_proj": [112, 112]}},
    ),
    "minimax": Expected(
        notes="routers",
        found={
            "expert_keys": ["experts"],
            "split": {"gate_up_proj": [112, 112], "qkv_proj": BY_HEAD},
        },
    ),
    "jetmoe": Expected(
        notes="routers tied",
        found={
            "expert_keys": ["input_linear", "output_linear", "experts"],
            "split": {"model.layers.*.mlp.input_linear.weight": [112, 112], "kv_proj": [32, 32]},
        },
    ),
    "gpt_oss": Expected(
        notes="routers",
        found={
            "expert_keys": ["experts"],
            "split": {"gate_up_proj": "dim (n (gate=1 + up=1))"},
        },
    ),
    "llama4": Expected(
        notes="routers",
        found={
            "expert_keys": ["experts"],
            "split": {"gate_up_proj": "dim (gate=112 + up=112)"},
        },
    ),
    "deepseek_v3": Expected(
        notes="routers",
        found={
            "expert_keys": ["experts"],
            "split": {
                "kv_a_proj_with_mqa": [16, 8],
                "kv_b_proj": "(head (k=16 + v=16)) dim",
                "gate_up_proj": [24, 24],
            },
        },
    ),
    "gpt2": Expected(
        notes="tied",
        found={"split": {"c_attn": "dim (q=64 + k=64 + v=64)"}},
    ),
    "gpt_bigcode": Expected(notes="tied", found={"split": {"c_attn": [64, 16, 16]}}),
    "gptj": Expected(),
    "codegen": Expected(found={"split": {"qkv_proj": "(4 (q=16 + v=16 + k=16)) dim"}}),
    "gpt_neox": Expected(found={"split": {"query_key_value": BY_HEAD}}),
    "falcon": Expected(notes="tied", found={"split": {"query_key_value": [64, 16, 16]}}),
    "falcon_grouped": Expected(
        notes="tied",
        found={"split": {"query_key_value": "(head (q=32 + k=16 + v=16)) dim"}},
    ),
    "mpt": Expected(notes="tied", found={"split": {"Wqkv": [64, 64, 64]}}),
    "opt": Expected(notes="tied"),
    "mamba": Expected(notes="tied", found={"split": {"in_proj": [128, 128], "x_proj": [4, 8, 8]}}),
    "mamba2": Expected(found={"split": {"in_proj": [128, 128, 16, 16, 8]}}),
    "rwkv": Expected(),
    "recurrent_gemma": Expected(warnings="stack", notes="tied"),
    "bert": Expected(notes="tied shared"),
    "bert_untied": Expected(),
    "bert_classifier": Expected(),
    "roberta": Expected(notes="tied shared"),
    "roberta_classifier": Expected(),
    "electra": Expected(),
    "albert": Expected(notes="tied shared"),
    "t5": Expected(notes="tied"),
    "bart": Expected(notes="tied"),
    "whisper": Expected(notes="tied"),
    "vit": Expected(),
    "swin": Expected(),
    "clip": Expected(),
    "qwen2_vl": Expected(found={"split": {"qkv": [64, 64, 64]}}),
    "resnet": Expected(warnings="convolutions"),
}


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return TRANSFORMERS[name].build()


def find(name: str) -> dict[str, Any]:
    optim = optimizer.Muon.for_model(build(name), lr=1e-3)
    keys = optim.param_groups[0].get("expert_keys")
    found = {"expert_keys": keys, "split": optim.defaults["split"]}
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.filterwarnings("ignore")  # they are those that `describe` tells
def test_traps_and_what_is_found_are_those_that_were_read(name):
    expected, description = EXPECTED[name], optimizer.describe(build(name))
    assert kinds(description.warnings) == expected.warnings.split()
    assert kinds(description.notes) == expected.notes.split()
    assert find(name) == expected.found


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.filterwarnings("ignore")
def test_what_the_code_advises_leaves_no_warning_but_of_what_nobody_can_tell(name):
    model = build(name)
    description = optimizer.describe(model)
    space = run(description.code, model)
    again = optimizer.describe(model, **arguments(description.code, space))
    assert [kind for kind in kinds(again.warnings) if kind != "stack"] == [], again
    assert len(str(description).splitlines()) < 80
