"""``per_head=True``: query, key and value projections are updated head by head."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kernel import optimizer
from models import Attention
from ranks import on_ranks

DIM, HEADS, KEY_HEADS, HEAD_DIM = 20, 6, 4, 6  # shards of 4 ranks begin within heads
COLWISE = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(Attention(DIM, HEADS, KEY_HEADS, HEAD_DIM) for _ in range(2))
        self.lm_head = nn.Linear(DIM, 50, bias=False)


def make(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings(action="error"):
        return optimizer.Muon.for_model(model, 0.02, 0.01, per_head=True, **options)


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


@pytest.mark.parametrize("layout", ["fsdp2", "tp", "fsdp2 and tp"])
@on_ranks(4)
def test_heads_of_sharded_layers_are_told_as_those_of_whole_ones(layout: str) -> None:
    assert make(shard(Model(), layout)).defaults["split"] == dict.fromkeys(COLWISE, HEAD_DIM)


# What tells of heads


class Fused(nn.Module):
    """An attention of some layers, and what it tells; ``"wq 8x4"`` is a layer of 8 outputs."""

    def __init__(self, layers: str | dict[str, nn.Module], **sizes: Any) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Module(), nn.Linear(64, 64, bias=False)
        if isinstance(layers, str):
            shapes = re.findall(r"(\w+) (\d+)x(\d+)", layers)
            layers = {name: nn.Linear(int(c), int(r), bias=False) for name, r, c in shapes}
        for name, value in {**layers, **sizes}.items():
            setattr(self.attn, name, value)


def conv1d(rows: int, cols: int) -> nn.Module:
    """A layer that stores (inputs, outputs), as transformers' GPT-2 has it."""
    layer = type("Conv1D", (nn.Module,), {})()
    layer.weight = nn.Parameter(torch.randn(cols, rows))
    return layer


QKV = "q_proj 64x64 k_proj 32x64 v_proj 32x64"
NAMES = ["q_proj", "k_proj", "v_proj"]
LATENT = "q_b_proj 96x24 kv_a_proj_with_mqa 24x64 kv_b_proj 144x16"
OF_LATENT: Any = {"q_b_proj": 24, "kv_a_proj_with_mqa": [16, 8]}
OF_LATENT |= {"kv_b_proj": "([head] (k=16 + v=20)) dim"}
NOPE_AND_ROPE = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
GROUPED = {"num_heads": 4, "num_kv_heads": 2}
SOFTMAX = {**GROUPED, "head_dim": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
WIDER = {**LINEAR, "linear_value_head_dim": 24}
OF_LINEAR = "([q=2] 16 + [k=2] 16 + [v=4] 24) dim"
CONV1D = {name: conv1d(64, 64) for name in NAMES}
SEQUENTIAL = {"to_q": nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))}
SEQUENTIAL["to_kv"] = nn.Linear(64, 128)
OF_ANOTHER_TOWER = {"num_attention_heads": 4, "hidden_size": 64}
OF_SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 48}
PROJECTIONS = ["query_projection", "key_projection"]
GATED = {**GROUPED, "o_proj": nn.Linear(64, 64)}

TOLD: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (QKV, {"head_dim": 16}, dict.fromkeys(NAMES, 16)),
    (QKV, GROUPED, dict.fromkeys(NAMES, 16)),
    (QKV, {"config": SOFTMAX}, dict.fromkeys(NAMES, 16)),
    (QKV, {"head_dim": 16, "config": {"head_dim": 8, "num_heads": 8}}, dict.fromkeys(NAMES, 16)),
    ("wq 64x64 wk 64x64 wv 80x64", {"head_dim": 16, "v_head_dim": 20}, dict(wq=16, wk=16, wv=20)),
    ("qkv 192x64", {"num_heads": 4}, {"qkv": 16}),
    ("qkv 128x64", GROUPED, {"qkv": 16}),
    ("query_key_value 192x64", {"num_heads": 4}, {"query_key_value": 16}),
    (LATENT, {**NOPE_AND_ROPE, "kv_lora_rank": 16}, OF_LATENT),
    ("q_proj 128x64 k_proj 32x64", {"head_dim": 16, "num_heads": 4}, dict(q_proj=16, k_proj=16)),
    ("wq_b 64x24 wk 16x64", {"head_dim": 16, "n_heads": 4}, {"wq_b": 16}),
    ("in_proj_qkv 160x64", {"config": WIDER}, {"in_proj_qkv": OF_LINEAR}),
    (CONV1D, {"num_heads": 4}, dict.fromkeys(NAMES, "dim ([head] 16)")),
    (SEQUENTIAL, {"heads": 4}, dict(to_q=16, to_kv=16)),
    ("c_q 64x64 c_k 32x64 c_v 32x64", {"n_head": 4, "n_kv_head": 2}, dict(c_q=16, c_k=16, c_v=16)),
    ("w_qs 64x64 w_ks 64x64 w_vs 64x64", {"n_head": 4}, dict(w_qs=16, w_ks=16, w_vs=16)),
    # Fewer keys than queries, wider values: as many value heads as key heads.
    ("q_proj 64x64 k_proj 32x64 v_proj 64x64", GROUPED, dict(q_proj=16, k_proj=16, v_proj=32)),
    ("qkv 192x64 proj 64x64", {"num_heads": 8, "config": OF_ANOTHER_TOWER}, {"qkv": 8}),
]


@pytest.mark.parametrize("layers, sizes, split", TOLD)
def test_heads_are_told_by_the_module_or_its_config_and_cut_where_they_lie(layers, sizes, split):
    assert make(Fused(layers, **sizes)).defaults["split"] == split


UNTOLD: list[tuple[Any, dict[str, Any], list[str]]] = [
    *((QKV, sizes, NAMES) for sizes in ({}, {"head_dim": 24}, {"num_heads": 5})),
    (QKV, {"config": {"num_heads": 4, "head_dim": 24}}, NAMES),
    # The size of a head of queries is not that of values.
    ("q_proj 64x64 k_proj 32x64 v_proj 64x64", {"head_dim": 16, "value_size": 32}, ["v_proj"]),
    # Queries and gates, each in one half: no head has 32 rows.
    ("q_proj 128x64 k_proj 32x64 v_proj 32x64", GATED, NAMES),
    # All heads of a rank, keys and values have fewer.
    ("wq 64x64 wk 32x64 wv 32x64", {"n_local_heads": 4}, ["wq", "wk", "wv"]),
    # Queries and gates make up twice the rows, and nothing counts the keys' heads.
    ("wq 192x96 wk 96x192 wv 96x192", {"num_heads": 6}, ["wk", "wv"]),
    # The width of the model over the heads is no size of theirs.
    ("w_qs 96x48 w_ks 48x48 w_vs 72x48", OF_SIX_HEADS, ["w_ks", "w_vs"]),
    # One head of keys and values, which the module does not tell.
    ("to_q 96x64 to_kv 48x64", {"heads": 4}, ["to_kv"]),
    # Bare parameters may be (inputs, outputs).
    ({name: nn.Parameter(torch.randn(64, 64)) for name in NAMES}, {"head_dim": 16}, NAMES),
    ("to_qk 128x64 to_v 64x64", {"heads": 4}, ["to_qk", "to_v"]),
    ("q 64x64 kv 128x64", {"num_heads": 4}, ["kv"]),
    ("query_projection 64x64 key_projection 64x64", {"h": 4}, PROJECTIONS),
]


@pytest.mark.parametrize("layers, sizes, whole", UNTOLD)
def test_nothing_is_cut_where_nothing_tells_or_sizes_contradict_and_that_is_said_once(
    layers, sizes, whole
):
    model = Fused(layers, **sizes)
    for make_groups in (optimizer.Muon.for_model, optimizer.get_default_muon_param_groups):
        arguments = [0.02] if make_groups == optimizer.Muon.for_model else []
        with pytest.warns(UserWarning) as caught:
            made: Any = make_groups(model, *arguments, per_head=True)
        (told,) = (w for w in caught if str(w.message).startswith("per_head"))
        assert told.filename == __file__ and f"attn.{whole[0]}" in str(told.message)
        assert len(whole) == 1 or f"{len(whole) - 1} more" in str(told.message)
        split = made.defaults["split"] if arguments else made[0].get("split")
        assert not any(isinstance((split or {}).get(name), (int, str)) for name in whole)


def test_rows_of_linear_attention_are_not_those_of_the_softmax_heads():
    """Both sizes add up to the rows: those of the linear heads hold."""
    config = {**SOFTMAX, **LINEAR, "linear_value_head_dim": 16}
    model = Fused("in_proj_qkv 128x64", config=config)
    assert optimizer.Muon.for_model(model, 0.02).defaults["split"] == {"in_proj_qkv": [32, 32, 64]}
    model = Fused("in_proj_qkv 128x64", config={**config, "linear_key_head_dim": 8})
    with pytest.warns(UserWarning, match=r"attn\.in_proj_qkv"):
        assert optimizer.Muon.for_model(model, 0.02).defaults["split"] is None


def test_default_groups_part_heads_and_nothing_else():
    model = Fused(f"{QKV} gate_up_proj 96x64", head_dim=16)
    (group, _) = optimizer.get_default_muon_param_groups(model, per_head=True)
    assert group["split"] == dict.fromkeys(NAMES, 16)
    optimizer.Muon([group], lr=0.02)


def test_a_split_by_hand_comes_first_and_one_for_all_is_refused():
    model = Fused(QKV, head_dim=16)
    optim = make(model, split={"q_proj": 32})
    assert optim.defaults["split"] == {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    with pytest.raises(ValueError, match=r"per_head=True.*split"):
        make(model, split=None)


SEPARATE = ("0.k_proj_weight", "0.v_proj_weight", "0.parametrizations.q_proj_weight.original1")


def test_a_multihead_attention_tells_of_its_heads_also_if_it_is_parametrized():
    layer = nn.TransformerEncoderLayer(64, 4, 128)
    assert make(layer).defaults["split"] == {"in_proj_weight": 16}
    model = nn.Sequential(nn.MultiheadAttention(64, 4, kdim=32, vdim=48))
    assert make(model).defaults["split"] == {f"0.{kind}_proj_weight": 16 for kind in "qkv"}
    for name, kdim, parted in (
        ("in_proj_weight", None, ["in_proj_weight"]),
        ("q_proj_weight", 32, SEPARATE),
    ):
        model = nn.Sequential(nn.MultiheadAttention(64, 4, kdim=kdim))
        nn.utils.parametrizations.weight_norm(model[0], name)
        assert make(model).defaults["split"] == dict.fromkeys(parted, 16)


class Saved(nn.Module):
    """What PEFT makes of a layer in ``modules_to_save``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.original_module = copy.deepcopy(layer).requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": layer})


@pytest.mark.parametrize("wrap", [Saved, nn.utils.parametrizations.weight_norm, torch.compile])
def test_a_wrapped_projection_has_the_heads_of_its_attention(wrap: Callable):
    model = Fused("q_proj 64x64 k_proj 32x64", **GROUPED)
    model.attn.q_proj = wrap(model.attn.q_proj)
    optim = make(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    before = {id(p): p.detach().clone() for p in model.parameters()}
    optim.step()
    for p in model.parameters():
        if p.shape in ((64, 64), (32, 64)) and p.requires_grad and p is not model.mlp.weight:
            for head in (before[id(p)] * (1 - 0.02 * 0.1) - p.detach()).split(16):
                values = torch.linalg.svdvals(head)
                assert values.min() > 0.5 * values.max()


def test_describe_offers_it_and_says_what_it_costs():
    text = " ".join(str(optimizer.describe(Model())).split())
    cost = [s * s * (2 * max(20, r) + s) for r in (36, 24, 24, 6) for s in [min(20, r)]]
    share = f"{14 * cost[3] / sum(cost[:3]):.2g} times"
    for fact in ("per_head=True", "6 query", "28 matrices (6 × 20)", share):
        assert fact in text
    described = optimizer.describe(Model(), per_head=True)
    assert "per_head=True" in described.code and "6 query" in described.heads
    untold = str(optimizer.describe(Fused(QKV), per_head=True))
    assert "3 projections" in untold and "attn.q_proj.weight" in untold
