"""`Muon.for_model`: groups and options in one call, the same under FSDP2 as on one device."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from kernel import optimizer
from layouts import EXACT, set_gradients, whole
from ranks import run_ranks

for_model, describe = optimizer.Muon.for_model, optimizer.describe


def module(**attributes: Any) -> nn.Module:
    made = nn.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def linear(rows: int, cols: int) -> nn.Linear:
    return nn.Linear(cols, rows, bias=False)


def two(make_layer: Any, **attributes: Any) -> Any:
    return module(layers=nn.ModuleList([make_layer(), make_layer()]), **attributes)


def layer(**sizes: Any) -> nn.Module:
    """Fused grouped-query attention, and stacked experts with gate and up projection in one."""
    experts = module(gate_up_proj=weights(4, 24, 16), down_proj=weights(4, 16, 12))
    fused = {"qkv": linear(32, 16), "proj": nn.Linear(16, 16), "router": linear(4, 16)}
    return module(**fused, experts=experts, norm=nn.LayerNorm(16), **{"num_heads": 4, **sizes})


def build(**sizes: Any) -> Any:
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(50, 16), "lm_head": linear(50, 16)}
    return two(lambda: layer(**sizes), **layers)


SPLIT = {"qkv": [16, 8, 8], "gate_up_proj": [12, 12]}
MUONS = {"qkv.weight", "proj.weight", "router.weight"}
MUONS |= {"experts.gate_up_proj", "experts.down_proj"}


def make(model: nn.Module) -> torch.optim.Optimizer:
    with warnings.catch_warnings(action="error"):
        return for_model(model, 0.02, 0.01, **EXACT)


def train(model: Any) -> list[torch.Tensor]:
    optim = make(model)
    assert set(optim.names[0]) == {f"layers.{i}.{name}" for i in range(2) for name in MUONS}
    assert optim.defaults["split"] == SPLIT
    assert [group["lr"] for group in optim.param_groups] == [0.02, 0.01]
    for step in range(2):
        set_gradients(model.parameters(), seed=step)
        optim.step()
    return [whole(p).detach() for p in model.parameters()]


def train_sharded() -> list[torch.Tensor]:
    model = build(num_kv_heads=2)
    for each in (*model.layers, model):
        fully_shard(each)
    weights = train(model)
    model.to(torch.bfloat16)  # it can be converted afterwards
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    return weights


@pytest.mark.kernels_ci
def test_experts_and_fused_projections_are_found_and_all_else_is_adamws():
    model = build(num_kv_heads=2)
    copied = copy.deepcopy(model)
    train(model)
    assert make(copied).names == make(model).names


def test_under_fsdp2_it_makes_the_same_steps_as_on_one_device():
    expected = train(build(num_kv_heads=2))
    for weights in run_ranks(train_sharded, 2):
        for found, right in zip(weights, expected):
            torch.testing.assert_close(found, right, rtol=0, atol=1e-6)


def muons(make_layer: Any, **options: Any) -> set[str]:
    """What Muon trains of the first of two layers."""
    names = for_model(two(make_layer), lr=1e-3, **options).names[0]
    return {name.removeprefix("layers.0.") for name in names if name.startswith("layers.0.")}


def experts(**stacks: Any) -> nn.Module:
    return module(experts=module(w=weights(4, 16, 16), **stacks), a=nn.Linear(16, 16))


LAYERS: dict[str, Any] = {
    "experts": experts,
    "biases": lambda: experts(b1=weights(4, 32), conv=nn.Conv1d(16, 16, 3)),
    "frozen scales": lambda: experts(scales=weights(4, 32).requires_grad_(False)),
    "another stack": lambda: module(rel=weights(8, 16, 16), **experts()._modules),
    "convolution": lambda: module(conv=nn.Conv1d(16, 16, 3), a=nn.Linear(16, 16)),
}


# A layer, options, and what Muon trains of it.
@pytest.mark.parametrize(
    "layer, options, expected",
    [
        ("experts", {}, "experts.w a.weight"),
        ("biases", {}, "experts.w a.weight"),
        ("frozen scales", {}, "experts.w a.weight"),
        ("another stack", {"expert_keys": ["rel"]}, "experts.w rel a.weight"),
        ("experts", {"is_muon_func": lambda name, p: p.ndim > 1}, "experts.w a.weight"),
        ("experts", {"adamw_keys": ["a"]}, "experts.w"),
        ("experts", {"expert_keys": []}, "a.weight"),
        ("convolution", {"convolutions": True}, "conv.weight a.weight"),
    ],
)
def test_stacks_and_keys_decide_what_is_muons(layer, options, expected):
    assert muons(LAYERS[layer], **options) == set(expected.split())


def test_experts_are_found_for_a_rule_of_ones_own_too():
    optim = for_model(two(experts), lr=1e-3, is_muon_func=lambda name, p: p.ndim > 1)
    assert optim.param_groups[0]["expert_keys"] == ["experts"]
    description = describe(two(experts), is_muon_func=lambda name, p: p.ndim == 2)
    assert "expert_keys" not in description.code


SIZES = {"n_heads": 8, "n_kv_heads": 2, "head_dim": 4}


def attention(wrap: Any) -> nn.Module:
    return module(attn=wrap(module(**SIZES, qkv=weights(48, 32), o=linear(32, 32))))


wrapped = pytest.mark.parametrize(
    "wrap", [lambda module: module, checkpoint_wrapper, torch.compile]
)


@wrapped
def test_fused_projections_are_split_also_within_wrappers(wrap):
    optim = for_model(two(lambda: attention(wrap)), lr=1e-3)
    assert optim.defaults["split"] == {"qkv": [32, 8, 8]}


def test_fused_projections_are_split_also_if_parametrized_or_also_thirds():
    normed = nn.utils.parametrizations.weight_norm
    model = two(lambda: module(qkv=normed(nn.Linear(16, 48)), o=nn.Linear(16, 16)))
    assert list(for_model(model, lr=1e-3).defaults["split"].values()) == [[16, 16, 16]]
    # Key heads that a module tells count more than thirds.
    model = two(lambda: module(num_heads=16, num_kv_heads=4, qkv=linear(96, 32)))
    assert for_model(model, lr=1e-3).defaults["split"] == {"qkv": [64, 16, 16]}


@wrapped
def test_the_head_of_wrapped_layers_is_the_last_one(wrap):
    layers = [wrap(nn.Linear(*sizes)) for sizes in ((64, 128), (128, 128), (128, 10))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    assert len(for_model(model, lr=1e-3).names[0]) == 2


def test_a_split_by_hand_is_added_to_what_is_found():
    model = build(num_kv_heads=2)
    assert for_model(model, 0.02, split={"proj": 4}).defaults["split"] == {"proj": 4, **SPLIT}
    assert for_model(model, 0.02, split=None).defaults["split"] is None


def gated(*shape: int) -> Any:
    """A feed-forward whose gate and up projection are torchtitan's ``w13``."""
    return two(lambda: module(w13=weights(*shape), w2=linear(16, 24)))


# What can't be told, its parameters, and how many more there are.
@pytest.mark.parametrize(
    "make_model, kind",
    [
        (build, "fused"),  # without the number of key heads
        (lambda: gated(24, 2, 16), "pair"),  # row beside row
        (lambda: gated(4, 24, 2, 16), "pair"),
        (lambda: gated(25, 16), "fused"),
    ],
)
def test_what_it_cannot_tell_is_adamws_and_said_once(make_model, kind):
    model = make_model()
    left = "qkv.weight" if make_model is build else "w13"
    with pytest.warns(UserWarning, match=rf"layers\.0\.{left} and 1 more") as caught:
        optim = for_model(model, lr=0.02)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert {f"layers.{i}.{left}" for i in range(2)} <= set(optim.names[1])
    assert kind in [trap.kind for trap in describe(model).warnings]


def test_gate_and_up_projection_in_a_stack_are_two_matrices():
    optim = make(gated(2, 24, 16))
    assert optim.param_groups[0]["expert_keys"] == ["w13"] and optim.defaults["split"] is None
    set_gradients(optim.param_groups[0]["params"])
    optim.step()
    rows = [row for row in optim.summary().rows if row["name"] == "layers.0.w13"]
    assert [row["matrices"] for row in rows] == [2]


def test_wrong_arguments_are_refused():
    for key, wrong in (("is_muon_func", None), ("expert_keys", [1]), ("split", {1: 2})):
        for call in (for_model, describe):
            with pytest.raises(ValueError, match=r"\[1\]" if key == "expert_keys" else key):
                call(build(), 1e-3, **{key: wrong})
    with pytest.raises(TypeError, match=r"recipes\.nanochat"):
        optimizer.MuonAdamW.for_model(build(), lr=0.02)


def test_rates_are_written_with_all_their_digits():
    assert f"lr={1 / 300!r}" in describe(build(num_kv_heads=2), lr=1 / 300).code
