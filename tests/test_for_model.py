"""`Muon.for_model`: groups and options in one call, the same under FSDP2 as on one device."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from kernel import optimizer
from layouts import EXACT, set_gradients, whole
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
        set_gradients(model.parameters(), seed=step)
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


def two(make_layer) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([make_layer(), make_layer()])
    return model


def module(**attributes) -> nn.Module:
    made = nn.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def muons(model: nn.Module, **options) -> list[str]:
    return optimizer.Muon.for_model(model, lr=1e-3, **options).names[0]


def converted(_: int = 0) -> bool:
    model = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))
    optimizer.Muon.for_model(model, lr=1e-3)
    model.to(torch.bfloat16)
    return all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_a_sharded_model_can_be_converted_and_moved_afterwards():
    assert run_ranks(converted, 2) == [True, True]


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile], ids=["checkpoint", "compile"])
def test_wrapped_layers_are_decided_as_the_layers_are(wrap):
    def attention(of=lambda layer: layer):
        sizes = {"n_heads": 8, "n_kv_heads": 2, "head_dim": 4}
        fused = module(**sizes, qkv=weights(48, 32), o=nn.Linear(32, 32, bias=False))
        return module(attn=of(fused))

    plain, wrapped = two(attention), two(lambda: attention(wrap))
    made = [optimizer.Muon.for_model(model, lr=1e-3) for model in (plain, wrapped)]
    assert made[0].defaults["split"] == made[1].defaults["split"] == {"qkv": [32, 8, 8]}

    def perceptron(of=lambda layer: layer):
        linear = (of(nn.Linear(64, 128)), of(nn.Linear(128, 128)), of(nn.Linear(128, 10)))
        return nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])

    counts = [len(muons(perceptron(of))) for of in (lambda layer: layer, wrap)]
    assert counts == [2, 2]  # the last one is the head


def test_expert_keys_by_hand_are_added_to_those_found():
    def layer():
        experts = module(w=weights(4, 16, 16))
        return module(experts=experts, rel=weights(8, 16, 16), a=nn.Linear(16, 16))

    names = muons(two(layer), expert_keys=["rel"])
    assert {"layers.0.experts.w", "layers.0.rel"} <= set(names)


def test_vectors_and_convolutions_of_experts_are_no_stacks():
    def layer():
        stacks = {"w1": weights(4, 16, 32), "b1": weights(4, 32), "conv": nn.Conv1d(16, 16, 3)}
        return module(experts=module(**stacks), a=nn.Linear(16, 16))

    names = [name.removeprefix("layers.0.") for name in muons(two(layer))]
    assert {"experts.w1", "a.weight"} <= set(names)
    assert not {"experts.b1", "experts.conv.weight"} & set(names)


def test_what_is_frozen_beside_experts_is_in_no_group():
    def layer():
        frozen = weights(4, 32).requires_grad_(False)
        experts = module(w1=weights(4, 16, 32), scales=frozen)
        return module(experts=experts, a=nn.Linear(16, 16))

    names = optimizer.Muon.for_model(two(layer), lr=1e-3).names
    assert not any("scales" in name for group in names for name in group)


def test_experts_are_found_for_a_rule_of_ones_own_too():
    def layer():
        return module(experts=module(w=weights(4, 16, 16)), a=nn.Linear(16, 16))

    optim = optimizer.Muon.for_model(two(layer), lr=1e-3, is_muon_func=lambda n, p: p.ndim > 1)
    assert optim.param_groups[0]["expert_keys"] == ["experts"]
    description = optimizer.describe(two(layer), is_muon_func=lambda n, p: p.ndim == 2)
    assert "expert_keys" not in description.code


def test_key_heads_that_a_module_tells_count_more_than_thirds():
    def layer():
        return module(num_heads=16, num_kv_heads=4, qkv=nn.Linear(32, 96, bias=False))

    optim = optimizer.Muon.for_model(two(layer), lr=1e-3)
    assert optim.defaults["split"] == {"qkv": [64, 16, 16]}


def test_parametrized_projections_are_split():
    def layer():
        qkv = nn.utils.parametrizations.weight_norm(nn.Linear(16, 48))
        return module(qkv=qkv, o=nn.Linear(16, 16))

    (value,) = optimizer.Muon.for_model(two(layer), lr=1e-3).defaults["split"].values()
    assert value == [16, 16, 16]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"is_muon_func": None}, "is_muon_func must be a function"),
        ({"expert_keys": [1]}, "components of names"),
        ({"split": {1: 2}}, "split must be"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_in_words(wrong, words):
    for call in (optimizer.Muon.for_model, optimizer.describe):
        with pytest.raises(ValueError, match=words):
            call(build(), 1e-3, **wrong)


def test_rates_are_written_with_all_their_digits():
    code = optimizer.describe(build(), lr=1 / 300).code
    assert f"lr={1 / 300!r}" in code


class Gated(nn.Module):
    """A feed-forward whose gate and up projection are torchtitan's ``w13``."""

    def __init__(self, *shape: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Module(), nn.Module()])
        for layer in self.layers:
            layer.w13 = nn.Parameter(torch.randn(shape))
            layer.w2 = nn.Linear(24, 16, bias=False)


def test_gate_and_up_projection_in_a_stack_are_two_matrices():
    optim = make(Gated(2, 24, 16))
    assert optim.param_groups[0]["expert_keys"] == ["w13"] and optim.defaults["split"] is None
    for p in optim.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    optim.step()
    rows = [row for row in optim.summary().rows if row["name"] == "layers.0.w13"]
    assert [row["matrices"] for row in rows] == [2]


@pytest.mark.parametrize("shape", [(24, 2, 16), (4, 24, 2, 16)], ids=str)
def test_gate_and_up_projection_row_beside_row_are_left_to_adamw_with_a_word(shape):
    model = Gated(*shape)
    with pytest.warns(UserWarning, match=r"row beside row.*layers\.0\.w13 and 1 more"):
        optim = optimizer.Muon.for_model(model, lr=0.02)
    assert set(optim.names[0]) == {"layers.0.w2.weight", "layers.1.w2.weight"}
    assert [trap.kind for trap in optimizer.describe(model).warnings] == ["pair"]


def test_a_gate_and_up_projection_of_odd_rows_is_left_to_adamw_with_a_word():
    with pytest.warns(UserWarning, match=r"of unknown sizes: layers\.0\.w13 and 1 more"):
        optim = optimizer.Muon.for_model(Gated(25, 16), lr=0.02)
    assert set(optim.names[0]) == {"layers.0.w2.weight", "layers.1.w2.weight"}
