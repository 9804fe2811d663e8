"""``per_head=True``: query, key and value projections are updated head by head."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reference as ref
from counters import count
from kernel import optimizer
from layouts import EXACT, set_gradients, whole
from models import Attention
from ranks import run_ranks

DIM, HEADS, KEY_HEADS, HEAD_DIM = 20, 6, 4, 6  # shards of 4 ranks begin within heads
COLWISE = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel()}
SPLIT = {"wq": HEAD_DIM, "wk": HEAD_DIM, "wv": HEAD_DIM}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(Attention(DIM, HEADS, KEY_HEADS, HEAD_DIM) for _ in range(2))
        self.lm_head = nn.Linear(DIM, 50, bias=False)


def make(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return optimizer.Muon.for_model(model, 0.02, 0.01, per_head=True, **EXACT, **options)


def train(model: nn.Module, **options: Any) -> list[torch.Tensor]:
    optim = make(model, **options)
    assert optim.defaults["split"] == SPLIT
    for step in range(3):
        set_gradients(model.parameters(), seed=step)
        optim.step()
    return [whole(p).detach() for p in model.parameters()]


def shard(model: nn.Module, layout: str) -> nn.Module:
    if layout == "fsdp2 and tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    else:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp" if layout == "tp" else "dp",))
    for layer in model.layers:
        if "tp" in layout:
            parallelize_module(layer, mesh["tp"], {**COLWISE, "wo": RowwiseParallel()})
        if "fsdp2" in layout:
            fully_shard(layer, mesh=mesh["dp"])
    return model


def train_both(layout: str) -> None:
    expected = train(Model())
    for found, right in zip(train(shard(Model(), layout)), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("layout", ["fsdp2", "tp", "fsdp2 and tp"])
def test_steps_are_those_of_one_device_bit_for_bit(layout):
    run_ranks(train_both, 4, layout)


def test_each_head_takes_the_step_of_a_matrix_of_its_own():
    model = Model()
    before = copy.deepcopy(model)
    optim = make(model, weight_decay=0.0, momentum=0.0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optim.step()
    for name in ("layers.0.wq.weight", "layers.1.wv.weight", "layers.1.wo.weight"):
        rows = DIM if "wo" in name else HEAD_DIM
        moved = (before.get_parameter(name) - model.get_parameter(name)).split(rows)
        for step, grad in zip(moved, grads[name].split(rows), strict=True):
            right = ref.newton_schulz(grad, ref.FAMILIES["polar_express"], 1.02)
            right *= 0.02 * ref.update_scale(*grad.shape)
            torch.testing.assert_close(step.double(), right, rtol=0, atol=1e-5)


def bytes_sent(per_head: bool) -> float:
    model = shard(Model(), "fsdp2")
    optim = optimizer.Muon.for_model(model, 0.02, per_head=per_head)
    for _ in range(2):
        set_gradients(model.parameters())
        counter = count(optim.step)
    return counter.sent


def test_heads_need_no_more_traffic_than_whole_matrices():
    by_head, as_a_whole = (sum(run_ranks(bytes_sent, 4, value)) for value in (True, False))
    assert by_head <= as_a_whole


class Fused(nn.Module):
    """Projections of all kinds, and modules that tell of their heads, or do not."""

    def __init__(self, projections: dict[str, Any], **sizes: Any) -> None:
        super().__init__()
        self.attn = nn.Module()
        for name, layer in projections.items():
            if isinstance(layer, tuple):
                layer = nn.Linear(layer[1], layer[0], bias=False)
            setattr(self.attn, name, layer)
        for name, size in sizes.items():
            setattr(self.attn, name, size)
        self.mlp = nn.Linear(64, 64, bias=False)


def split_of(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return optimizer.Muon.for_model(model, 0.02, per_head=True).defaults["split"]


QKV = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64)}
LATENT = {"q_b_proj": (96, 24), "kv_a_proj_with_mqa": (24, 64), "kv_b_proj": (144, 16)}
NOPE_AND_ROPE = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}


@pytest.mark.parametrize(
    ("projections", "sizes", "split"),
    [
        (QKV, {"head_dim": 16}, dict.fromkeys(QKV, 16)),
        (QKV, {"num_heads": 4, "num_kv_heads": 2}, dict.fromkeys(QKV, 16)),
        (
            QKV,
            {"config": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}},
            dict.fromkeys(QKV, 16),
        ),
        (QKV, {"head_dim": 16, "config": {"head_dim": 8, "num_heads": 8}}, dict.fromkeys(QKV, 16)),
        (
            {"wq": (64, 64), "wk": (64, 64), "wv": (80, 64)},
            {"head_dim": 16, "v_head_dim": 20},
            {"wq": 16, "wk": 16, "wv": 20},
        ),
        ({"qkv": (192, 64)}, {"num_heads": 4}, {"qkv": 16}),
        ({"qkv": (128, 64)}, {"num_heads": 4, "num_kv_heads": 2}, {"qkv": 16}),
        ({"query_key_value": (192, 64)}, {"num_heads": 4}, {"query_key_value": 16}),
        (
            LATENT,
            {**NOPE_AND_ROPE, "kv_lora_rank": 16},
            {
                "q_b_proj": 24,
                "kv_a_proj_with_mqa": [16, 8],
                "kv_b_proj": "([head] (k=16 + v=20)) dim",
            },
        ),
        (
            {"q_proj": (128, 64), "k_proj": (32, 64)},
            {"head_dim": 16, "num_heads": 4},
            {"q_proj": 16, "k_proj": 16},
        ),
        ({"wq_b": (64, 24), "wk": (16, 64)}, {"head_dim": 16, "n_heads": 4}, {"wq_b": 16}),
        (
            {"in_proj_qkv": (160, 64)},
            {
                "config": {
                    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
                    **{"linear_key_head_dim": 16, "linear_value_head_dim": 24},
                }
            },
            {"in_proj_qkv": "([q=2] 16 + [k=2] 16 + [v=4] 24) dim"},
        ),
    ],
)
def test_heads_are_told_by_the_module_or_its_config(projections, sizes, split):
    assert split_of(Fused(projections, **sizes)) == split


def test_rows_of_linear_attention_are_not_those_of_the_softmax_heads():
    """Both sizes add up to the rows: those of the linear heads hold."""
    softmax = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    model = Fused({"in_proj_qkv": (128, 64)}, config={**softmax, **linear})
    assert optimizer.Muon.for_model(model, 0.02).defaults["split"] == {"in_proj_qkv": [32, 32, 64]}
    model = Fused(
        {"in_proj_qkv": (128, 64)}, config={**softmax, **linear, "linear_key_head_dim": 8}
    )
    with pytest.warns(UserWarning, match="of unknown sizes: attn.in_proj_qkv"):
        assert optimizer.Muon.for_model(model, 0.02).defaults["split"] is None


@pytest.mark.parametrize(
    "sizes",
    [{}, {"head_dim": 24}, {"config": {"num_heads": 4, "head_dim": 24}}, {"num_heads": 5}],
    ids=str,
)
@pytest.mark.parametrize(
    "groups_of",
    [
        lambda model: optimizer.Muon.for_model(model, 0.02, per_head=True).param_groups,
        lambda model: optimizer.get_default_muon_param_groups(model, per_head=True),
    ],
    ids=["for_model", "groups"],
)
def test_heads_that_nothing_tells_stay_whole_and_that_is_said_once(sizes, groups_of: Callable):
    model = Fused(QKV, **sizes)
    with pytest.warns(UserWarning) as caught:
        groups = groups_of(model)
    assert [str(each.message)[:70] for each in caught] == [
        "per_head: no size of a head is told that fits attn.q_proj.weight and 2"
    ]
    assert caught[0].filename == __file__
    assert len(groups[0]["params"]) == 4 and not groups[0].get("split")


def test_default_groups_part_heads_and_nothing_else():
    model = Fused({**QKV, "gate_up_proj": (96, 64)}, head_dim=16)
    (group, _) = optimizer.get_default_muon_param_groups(model, per_head=True)
    assert group["split"] == dict.fromkeys(QKV, 16)
    optimizer.Muon([group], lr=0.02)


def test_a_split_by_hand_comes_first_and_one_for_all_is_refused():
    model = Fused(QKV, head_dim=16)
    optim = optimizer.Muon.for_model(model, 0.02, per_head=True, split={"q_proj": 32})
    assert optim.defaults["split"] == {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    with pytest.raises(ValueError, match="per_head=True needs split"):
        optimizer.Muon.for_model(model, 0.02, per_head=True, split=None)


def test_a_multihead_attention_tells_of_its_heads():
    model = nn.TransformerEncoderLayer(64, 4, 128)
    assert split_of(model) == {"in_proj_weight": 16}
    model = nn.Sequential(nn.MultiheadAttention(64, 4, kdim=32, vdim=48))
    assert split_of(model) == {f"0.{kind}_proj_weight": 16 for kind in "qkv"}


def test_describe_offers_it_and_says_what_it_costs():
    model = Model()
    text = " ".join(str(optimizer.describe(model)).split())
    assert "per_head=True would update 6 query, key and value projections head by head" in text
    cost = [s * s * (2 * max(20, r) + s) for r in (36, 24, 24, 6) for s in [min(20, r)]]
    share = 14 * cost[3] / sum(cost[:3])
    assert "28 matrices (6 × 20) instead of 6, batched by shape" in text
    assert f"iterations take {share:.2g} times the FLOPs" in text
    described = optimizer.describe(model, per_head=True)
    assert "per_head=True" in described.code and "updates 6 query" in described.heads
    with_words = optimizer.describe(Fused(QKV), per_head=True)
    assert "that fits 3 projections, attn.q_proj.weight first" in str(with_words)


class Conv1D(nn.Module):
    """A layer that stores (inputs, outputs), as transformers' GPT-2 has it."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cols, rows))


SQUARE = {"q_proj": (64, 64), "k_proj": (64, 64), "v_proj": (64, 64)}


@pytest.mark.parametrize(
    ("layers", "sizes", "split"),
    [
        (
            {name: Conv1D(*shape) for name, shape in SQUARE.items()},
            {"num_heads": 4},
            dict.fromkeys(SQUARE, "dim ([head] 16)"),
        ),
        (
            {"to_q": nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), "to_kv": (128, 64)},
            {"heads": 4},
            {"to_q": 16, "to_kv": 16},
        ),
        (
            {"c_q": (64, 64), "c_k": (32, 64), "c_v": (32, 64)},
            {"n_head": 4, "n_kv_head": 2},
            {"c_q": 16, "c_k": 16, "c_v": 16},
        ),
        (
            {"w_qs": (64, 64), "w_ks": (64, 64), "w_vs": (64, 64)},
            {"n_head": 4},
            {"w_qs": 16, "w_ks": 16, "w_vs": 16},
        ),
        # Fewer keys than queries, wider values: as many value heads as key heads.
        (
            {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (64, 64)},
            {"num_heads": 4, "num_kv_heads": 2},
            {"q_proj": 16, "k_proj": 16, "v_proj": 32},
        ),
        # The configuration is of another tower.
        (
            {"qkv": (192, 64), "proj": (64, 64)},
            {"num_heads": 8, "config": {"num_attention_heads": 4, "hidden_size": 64}},
            {"qkv": 8},
        ),
    ],
)
def test_heads_are_cut_where_they_lie(layers, sizes, split):
    assert split_of(Fused(layers, **sizes)) == split


@pytest.mark.parametrize(
    ("layers", "sizes", "whole"),
    [
        # The size of a head of queries is not that of values.
        (
            {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (64, 64)},
            {"head_dim": 16, "value_size": 32},
            ["v_proj"],
        ),
        # Queries and gates, each in one half: no head has 32 rows.
        (
            {"q_proj": (128, 64), "k_proj": (32, 64), "v_proj": (32, 64)},
            {"num_heads": 4, "num_kv_heads": 2, "o_proj": nn.Linear(64, 64)},
            ["q_proj", "k_proj", "v_proj"],
        ),
        # All heads of a rank, keys and values have fewer.
        (
            {"wq": (64, 64), "wk": (32, 64), "wv": (32, 64)},
            {"n_local_heads": 4},
            ["wq", "wk", "wv"],
        ),
        # Queries and gates make up twice the rows, and nothing counts the keys' heads.
        (
            {"wq": (192, 96), "wk": (96, 192), "wv": (96, 192)},
            {"num_heads": 6},
            ["wk", "wv"],
        ),
        # The width of the model over the heads is no size of theirs.
        (
            {"w_qs": (96, 48), "w_ks": (48, 48), "w_vs": (72, 48)},
            {"num_attention_heads": 6, "hidden_size": 48},
            ["w_ks", "w_vs"],
        ),
        # One head of keys and values, which the module does not tell.
        ({"to_q": (96, 64), "to_kv": (48, 64)}, {"heads": 4}, ["to_kv"]),
        # Bare parameters may be (inputs, outputs).
        (
            {name: nn.Parameter(torch.randn(64, 64)) for name in SQUARE},
            {"head_dim": 16},
            list(SQUARE),
        ),
        ({"to_qk": (128, 64), "to_v": (64, 64)}, {"heads": 4}, ["to_qk", "to_v"]),
        ({"q": (64, 64), "kv": (128, 64)}, {"num_heads": 4}, ["kv"]),
        (
            {"query_projection": (64, 64), "key_projection": (64, 64)},
            {"h": 4},
            ["query_projection", "key_projection"],
        ),
    ],
)
def test_nothing_is_cut_where_sizes_contradict_one_another(layers, sizes, whole):
    model = Fused(layers, **sizes)
    with pytest.warns(UserWarning) as caught:
        optim = optimizer.Muon.for_model(model, 0.02, per_head=True)
    more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
    told = [str(each.message) for each in caught if str(each.message).startswith("per_head")]
    assert len(told) == 1 and f"that fits attn.{whole[0]}" in told[0]
    assert f"{more}: they stay" in told[0]
    split = optim.defaults["split"] or {}
    assert not any(isinstance(split.get(name), (int, str)) for name in whole)


def wrapped(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = Fused({"q_proj": (64, 64), "k_proj": (32, 64)}, num_heads=4, num_kv_heads=2)
    model.attn.q_proj = wrap(model.attn.q_proj)
    return model


class Saved(nn.Module):
    """What PEFT makes of a layer in ``modules_to_save``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = copy.deepcopy(layer).requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": layer})


@pytest.mark.parametrize("wrap", [Saved, nn.utils.parametrizations.weight_norm, torch.compile])
def test_a_wrapped_projection_has_the_heads_of_its_attention(wrap):
    model = wrapped(wrap)
    optim = optimizer.Muon.for_model(model, 0.02, per_head=True)
    described = optimizer.describe(model, per_head=True)
    assert "no size is told" not in str(described)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    before = {id(p): p.detach().clone() for p in model.parameters()}
    optim.step()
    for p in model.parameters():
        if p.shape in ((64, 64), (32, 64)) and p.requires_grad and p is not model.mlp.weight:
            for head in (before[id(p)] * (1 - 0.02 * 0.1) - p.detach()).split(16):
                values = torch.linalg.svdvals(head)
                assert values.min() > 0.5 * values.max()


SEPARATE = ("0.k_proj_weight", "0.v_proj_weight", "0.parametrizations.q_proj_weight.original1")


@pytest.mark.parametrize(
    ("name", "kdim", "parted"),
    [("in_proj_weight", None, ["in_proj_weight"]), ("q_proj_weight", 32, SEPARATE)],
)
def test_a_parametrized_multihead_attention_tells_of_its_heads(name, kdim, parted):
    model = nn.Sequential(nn.MultiheadAttention(64, 4, kdim=kdim))
    nn.utils.parametrizations.weight_norm(model[0], name)
    assert split_of(model) == dict.fromkeys(parted, 16)
