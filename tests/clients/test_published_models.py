"""Recipes train the models of their configurations, made small, as transformers builds them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

import audits
import causal_families
from kernel import optimizer

pytestmark = pytest.mark.usefixtures("one_thread")
OTHERS = re.compile(r"norm|_hc\.(base|scale)|hc_(base|scale)|bias|sinks|embed_tokens|lm_head")


@pytest.fixture(autouse=True)
def audited() -> Iterator[None]:
    with audits.healthy(["unused"]):  # an indexer's choice has no gradient
        yield


@pytest.mark.parametrize(
    "name, family, config, options",
    [
        ("kimi_k2", "deepseek_v3", {}, {}),
        # Queries without a latent.
        ("moonlight", "deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2}, {}),
        # Without the indexer, as in pre-training.
        ("glm_5", "deepseek_v3", {}, {"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}),
        ("deepseek_v4", "deepseek_v4", {}, {}),
    ],
)
def test_recipes_train_the_models_of_their_configurations(name, family, config, options):
    torch.manual_seed(0)
    made = causal_families.config_of(family)
    for key, value in config.items():
        setattr(made, key, value)
    model = AutoModelForCausalLM.from_config(made)
    optim = optimizer.Muon(**getattr(optimizer.recipes, name)(model, lr=0.01, **options))
    if name == "kimi_k2":
        optim.qk_recorder = optimizer.QKLogitRecorder(model)
    muon, adamw = optim.names
    assert set(muon) | set(adamw) == {param for param, _ in model.named_parameters()}
    assert [param for param in adamw if not OTHERS.search(param)] == []
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(adamw)
    matrices = {row["name"]: row["matrices"] for row in optim.summary().rows}
    stacked = [param for param in muon if param.endswith("gate_up_proj")]
    assert stacked and all(matrices[p] == 2 * made.n_routed_experts for p in stacked)
    tokens = torch.randint(made.vocab_size, (4, 32))
    losses = []
    for _ in range(12):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


def test_a_model_of_another_architecture_is_refused():
    with pytest.raises(ValueError, match=r"kimi_k2.*kv_a_proj_with_mqa.*LlamaForCausalLM"):
        optimizer.recipes.kimi_k2(causal_families.build("llama"))
