"""`Muon.for_model` decides about sharded models as about whole ones, and trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import causal_families
import ranked
from architectures import text
from kernel import optimizer
from transformers_architectures import TRANSFORMERS

FAMILIES = ("llama", "qwen3_moe", "gpt2", "bert", "t5")
STEPS = 20


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in TRANSFORMERS:
        return TRANSFORMERS[name].build()
    return causal_families.build(name)


def shard(model: Any) -> None:
    """Each layer, and the model with what is left, such as embeddings that a head is tied to."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    names = model._no_split_modules  # classes of layers, for accelerate
    layers = [layer for layers in lists for layer in layers if type(layer).__name__ in names]
    assert len(layers) >= 2
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)


def ranks_train() -> dict[str, Any]:
    """For each family Muon's parameters, the ``split``, and the losses."""
    dist.init_process_group("gloo")
    found = {}
    for name in FAMILIES:
        model = build(name)
        shard(model)
        optim = optimizer.Muon.for_model(model, lr=1e-3)
        torch.manual_seed(dist.get_rank())
        batch, losses = text(), []
        for _ in range(STEPS):
            loss = model(**batch).loss
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        found[name] = {"muons": optim.names[0], "split": optim.defaults["split"], "losses": losses}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of two has; audits of all ranks have had no finding."""
    return ranked.run(ranks_train, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sharded_model_trains_by_the_same_decisions_as_a_whole_one(name, trained):
    whole = optimizer.Muon.for_model(build(name), lr=1e-3)
    assert trained[name]["muons"] == whole.names[0]
    assert trained[name]["split"] == whole.defaults["split"]
    losses = trained[name]["losses"]
    assert losses[-1] < losses[0], losses
