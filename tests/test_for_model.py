"""`Muon.for_model`: groups and options in one call, the same under FSDP2 as on one device."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from kernel import optimizer
from layouts import EXACT, part_for, whole
from ranks import run_ranks


class Layer(nn.Module):
    """Fused grouped-query attention, and stacked experts with gate and up projection in one."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 2
        self.qkv = nn.Linear(16, 32, bias=False)
        self.proj = nn.Linear(16, 16)
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(4, 24, 16))
        self.experts.down_proj = nn.Parameter(torch.randn(4, 16, 12))
        self.norm = nn.LayerNorm(16)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(16, 50, bias=False)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


SPLIT = {"qkv": [16, 8, 8], "gate_up_proj": [12, 12]}
MUONS = {"qkv.weight", "proj.weight", "router.weight"}
MUONS |= {"experts.gate_up_proj", "experts.down_proj"}


def make(model: nn.Module) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return optimizer.Muon.for_model(model, 0.02, 0.01, **EXACT)


def train(model: nn.Module) -> list[torch.Tensor]:
    optim = make(model)
    assert set(optim.names[0]) == {f"layers.{i}.{name}" for i in range(2) for name in MUONS}
    assert optim.defaults["split"] == SPLIT
    assert [group["lr"] for group in optim.param_groups] == [0.02, 0.01]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = part_for(p, torch.randn(p.shape, generator=generator))
        optim.step()
    return [whole(p).detach() for p in model.parameters()]


def train_sharded() -> list[torch.Tensor]:
    model = build()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return train(model)


@pytest.mark.kernels_ci
def test_experts_and_fused_projections_are_found_and_all_else_is_adamws():
    train(build())


def test_under_fsdp2_it_makes_the_same_steps_as_on_one_device():
    expected = train(build())
    for weights in run_ranks(train_sharded, 2):
        for found, right in zip(weights, expected):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-6)


def test_what_it_cannot_tell_is_adamws_and_said_once():
    model = build()
    for layer in model.layers:
        del layer.num_kv_heads
    with pytest.warns(UserWarning) as caught:
        optim = optimizer.Muon.for_model(model, lr=0.02)
    (warning,) = caught
    assert "Q, K and V in one tensor" in str(warning.message)
    assert "layers.0.qkv.weight and 1 more" in str(warning.message)
    assert warning.filename == __file__
    assert {f"layers.{i}.qkv.weight" for i in range(2)} <= set(optim.names[1])


def test_a_split_by_hand_is_added_to_what_is_found():
    optim = optimizer.Muon.for_model(build(), lr=0.02, split={"proj": 4})
    assert optim.defaults["split"] == {"proj": 4, **SPLIT}
    whole_tensors = optimizer.Muon.for_model(build(), lr=0.02, split=None)
    assert whole_tensors.defaults["split"] is None


def test_nanochats_optimizer_has_groups_of_its_own():
    with pytest.raises(TypeError, match=r"recipes\.nanochat"):
        optimizer.MuonAdamW.for_model(build(), lr=0.02)


def test_copies_of_a_model_get_the_same_groups():
    model = build()
    first, second = make(model), make(copy.deepcopy(model))
    assert first.names == second.names
