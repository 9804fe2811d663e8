"""What `describe` tells of a model: decisions, reasons, traps, and code that runs as it stands."""

from __future__ import annotations

import copy
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

from advice import arguments, everything, follow, follow_apart, kinds, names_of, reasons, run
from kernel import optimizer
from ranks import on_ranks

describe = optimizer.describe
pytestmark = pytest.mark.usefixtures("one_thread")


def build(spec: Any) -> Any:
    """A model of data: (in, out) is a linear layer, lists and dicts are modules, tensors are
    parameters, a name is the module of that name, anything else becomes an attribute."""
    if isinstance(spec, tuple):
        return nn.Linear(*spec)
    if isinstance(spec, list):
        return nn.ModuleList(map(build, spec))
    if isinstance(spec, torch.Tensor) and not isinstance(spec, nn.Parameter):
        return nn.Parameter(spec.clone())
    if not isinstance(spec, dict):
        return copy.deepcopy(spec)
    model = nn.Module()
    for name, value in spec.items():
        if isinstance(value, str):
            setattr(model, name, model.get_submodule(value))
        else:
            setattr(model, name, value if name in ("config", "args") else build(value))
    return model


def sequential(*specs: Any) -> nn.Module:
    return nn.Sequential(*map(build, specs))


def attention(name: str, rows: int, config: Any = None, **sizes: int) -> dict[str, Any]:
    """Two layers of which each has one weight, between an embedding and a head."""
    layers = [{"attn": {name: (16, rows), **sizes}}] * 2
    return {
        "embed_tokens": nn.Embedding(50, 16),
        "layers": layers,
        "lm_head": (16, 50),
        "config": config,
    }


def llama(dim: int = 16, layers: int = 2, vocabulary: int = 100, tied: bool = False) -> nn.Module:
    heads = {"n_heads": 4, "n_kv_heads": 2, "wk": (dim, dim // 2, False)}
    attn = {"wq": (dim, dim, False), **heads, "wv": (dim, dim // 2, False), "wo": (dim, dim, False)}
    ffn = {"w1": (dim, 3 * dim, False), "w2": (3 * dim, dim, False), "w3": (dim, 3 * dim, False)}
    layer = {"attention": attn, **ffn, "norm_weight": torch.ones(dim)}
    embedding = {"tok_embeddings": nn.Embedding(vocabulary, dim)}
    model = build({**embedding, "layers": [layer] * layers, "output": (dim, vocabulary, False)})
    if tied:
        model.output.weight = model.tok_embeddings.weight
    return model


class Conv1D(nn.Module):
    """A linear layer that stores (in, out), as GPT-2's."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))


def gpt2(dim: int = 16) -> nn.Module:
    blocks = [{"c_attn": Conv1D(3 * dim, dim), "c_proj": Conv1D(dim, dim)}] * 2
    tables = {"wte": nn.Embedding(50, dim), "wpe": nn.Embedding(20, dim)}
    model = build({**tables, "h": blocks, "lm_head": (dim, 50, False)})
    model.lm_head.weight = model.wte.weight
    return model


def experts(transposed: bool = False, others: int = 3) -> dict[str, Any]:
    """Stacks of experts, of which ``others`` have a down projection."""
    up, down = (torch.randn(3, 24, 16), torch.randn(others, 16, 12))
    up, down = (up.mT.contiguous(), down.mT.contiguous()) if transposed else (up, down)
    stacks = {"gate_up_proj": up, "down_proj": down, "gate_up_proj_bias": torch.randn(3, 24)}
    layers = [{"router": (16, 3), "experts": stacks}] * 2
    return {"embed_tokens": nn.Embedding(50, 16), "layers": layers}


def resnet() -> nn.Module:
    depthwise = nn.Conv2d(16, 16, 3, groups=16)
    first = sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), depthwise)
    second = sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32))
    return sequential(nn.Conv2d(3, 8, 7), first, second, (32, 10))


def of_towers(**config: int) -> dict[str, Any]:
    towers = {"visual_projection": (32, 24), "text_projection": (16, 24)}
    return {**towers, "config": types.SimpleNamespace(**config)}


def encoder_decoder() -> nn.Module:
    half = {"embed_tokens": nn.Embedding(40, 8), "wi": (8, 12)}
    model = build(
        {"shared": nn.Embedding(40, 8), "encoder": half, "decoder": half, "lm_head": (8, 40)}
    )
    for layer in (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head):
        layer.weight = model.shared.weight
    return model


def adapted() -> nn.Module:
    model = llama().requires_grad_(False)
    for layer in model.layers:
        base = layer.attention.wq
        layer.attention.wq = build({"base_layer": base, "lora_A": (16, 2), "lora_B": (2, 16)})
    return model


ADAPTERS = " ".join(f"layers.{i}.attention.wq.lora_{side}" for i in range(2) for side in "AB")


def with_head(name: str) -> dict[str, Any]:
    return {"layer1": (32, 32), "layer2": (32, 64), name: (64, 20)}


def recurrent(layer: nn.Module, hidden: int) -> dict[str, Any]:
    return {"embed": nn.Embedding(256, 128), "rnn": layer, "to_tokens": (hidden, 256)}


RNN = "rnn.weight_ih_l0 rnn.weight_hh_l0"
MIXING = {"w": {"output": (32, 32)}}
OF_100, WORDS = {"config": {"vocab_size": 100}}, {"words": nn.Embedding(100, 16)}
TABLES = {**WORDS, "positions": nn.Embedding(64, 16)}
SIZES = {"tables": [nn.Embedding(n, 16) for n in (1000, 64, 256)]}
SIZES |= {
    "bottom": sequential((13, 256), (256, 64), (64, 16)),
    "top": sequential((80, 256), (256, 1)),
}
MIXER = {"conv1d": nn.Conv1d(64, 64, 4, groups=64), "stem": nn.Conv1d(16, 16, 3)}
PATCHES = {"patch": nn.Conv2d(3, 32, 16), "pos_embed": torch.randn(1, 17, 32)}
ROUTER = {"layers": [{"gate": (16, 8)}] * 2, "config": {"num_experts": 8}}
PACKED = nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
UNUSUAL = {"packed": PACKED, "filter": torch.randn(4, 4, dtype=torch.complex64), "gate": (8, 1)}
HEADS_OF_LAYERS = {"enc_out_class_embed": [(32, 4), (32, 4)], "bbox_embed": (32, 4)}
OF_LAYERS = [name for name, p in llama().named_parameters() if "layers" in name and p.ndim > 1]
LLAMA = " ".join(name.removesuffix(".weight") for name in OF_LAYERS)

# Models, Muon's matrices of each, without "weight", and kinds of warnings and notes.
MODELS: dict[str, tuple[Any, ...]] = {
    "a plain llama": (llama(), LLAMA),
    "tied": (llama(tied=True), LLAMA, "tied"),
    "tied in an encoder and a decoder": (encoder_decoder(), "encoder.wi decoder.wi", "tied"),
    "a module used twice": ({"first": (8, 8), "second": "first"}, "first", "shared", "shared"),
    "vocabulary": ({**WORDS, "up": [(16, 32)] * 2, "x": (16, 100)}, "up.0 up.1"),
    "decoder": ({**WORDS, "up": [(16, 32)] * 2, "decoder": (16, 100)}, "up.0 up.1"),
    "a plain embedding": ({"words": torch.randn(100, 8), "mid": (8, 8), **OF_100}, "mid"),
    "hidden sizes like the vocabulary": (llama(vocabulary=48), LLAMA),
    "a residual stream like the vocabulary": (llama(vocabulary=16), LLAMA, "unsure"),
    "autoencoder": ({"into": (100, 16), "mid": (16, 16), "back": (16, 100), **OF_100}, "mid"),
    "tables of hidden sizes": (SIZES, "bottom.0 bottom.1 bottom.2 top.0"),
    "tables of a block": (
        {**TABLES, "up": (16, 64), "down": (64, 16), "out": (16, 100)},
        "up down",
    ),
    "fc": (with_head("fc"), "layer1 layer2"),
    "fc3": (with_head("fc3"), "layer1 layer2"),
    "heads": (with_head("heads"), "layer1 layer2"),
    "predictions": (with_head("predictions"), "layer1 layer2"),
    "few outputs": (sequential((24, 24), nn.ReLU(), (24, 24), (24, 10)), "0 2"),
    "fewer outputs than inputs": (sequential((96, 96), (96, 20)), "0"),
    "may be a head": ({"encode": (32, 64), "project": (64, 48)}, "encode", "unsure"),
    "heads of layers": ({"layers": [(32, 32)] * 2, **HEADS_OF_LAYERS}, "layers.0 layers.1"),
    "towers": (of_towers(), "", "nothing", "unsure", "unsure"),
    "compared": (of_towers(projection_dim=24), "visual_projection text_projection"),
    "a residual stream": (sequential((40, 16), (16, 40)), "0 1"),
    "square": (sequential((16, 64), (64, 64)), "0 1"),
    "the last of a list": ({"layers": [(64, 64), (64, 8)]}, "layers.0 layers.1"),
    "all there is": (nn.Linear(64, 2), "", "nothing", "unsure"),
    "a pooler": ({"pooler": (16, 16), "proj": (16, 16)}, "pooler proj"),
    "routers": (ROUTER, "layers.0.gate layers.1.gate", "routers"),
    "no linear map": ({"mixer": {"A_log": torch.randn(8, 4)}, "proj": (8, 8)}, "proj"),
    "a list of experts": ({"h": [{"experts": [(8, 12)] * 2}]}, "h.0.experts.0 h.0.experts.1"),
    "patches": ({**PATCHES, "blocks": [{"fc1": (32, 64)}], "head": (32, 10)}, "blocks.0.fc1"),
    "small convolutions": ({"layers": [{**MIXER, "in_proj": (64, 256)}]}, "layers.0.in_proj"),
    "adapters": (adapted(), ADAPTERS, "adapters"),
    "unusual": (
        {**UNUSUAL, "a": (8, 8), "b": (8, 8)},
        "gate a b",
        "quantized",
        "complex",
        "vectors",
    ),
    "no matrices": ({"tok": nn.Embedding(8, 4), "norm": nn.LayerNorm(4)}, "", "nothing"),
    "GRU": (recurrent(nn.GRU(128, 256), 256), RNN),
    "LSTM": (recurrent(nn.LSTM(128, 64), 64), RNN),
    "a normed head": (sequential((8, 32), parametrizations.weight_norm(nn.Linear(32, 5))), "0"),
    "gives what is taken": ({"up": (8, 32), "down": (32, 8)}, "up down"),
    "RWKV": ({"layers": [MIXING] * 2, "head": (32, 100)}, "layers.0.w.output layers.1.w.output"),
    "ProphetNet": (sequential({"up": (8, 32), "output": (32, 8)}), "0.up 0.output"),
    "frozen": (llama().requires_grad_(False), "", "nothing"),
    "no parameters": ({}, "", "nothing"),
}


BOX = {"layers": [(32, 32), (32, 4)]}
MODULATED = {"linear": (32, 16), "adaLN_modulation": sequential(nn.SiLU(), (32, 64))}
# What comes after two layers, and which of its weights are Muon's, too.
BEHIND: dict[str, tuple[dict[str, Any], str]] = {
    "AlexNet": (
        {"classifier": sequential((64, 48), nn.ReLU(), (48, 48), nn.ReLU(), (48, 10))},
        "classifier.0 classifier.2",
    ),
    "a stack within a stack": ({"head": sequential(sequential((32, 48)), (48, 10))}, "head.0.0"),
    "several heads": ({"heads": [(32, 7)] * 2}, ""),
    "a head's own stack": ({"head": {"pre": (32, 48), "linear": (48, 99)}}, "head.pre"),
    "two heads": ({"head": {"linear": (32, 9)}, "head_dist": {"linear": (32, 9)}}, ""),
    "Flux": ({"proj_out": (32, 4)}, ""),
    "SD3, with another after it": ({"proj_out": (32, 64), "mix": (64, 64)}, "mix"),
    "DiT": ({"proj_out_1": (32, 64), "proj_out_2": (32, 4)}, "proj_out_1"),
    "DETR": ({"bbox_predictor": BOX, "class_embed": (32, 9)}, "bbox_predictor.layers.0"),
    "heads of each layer": (
        {"bbox_embed": [BOX] * 2},
        "bbox_embed.0.layers.0 bbox_embed.1.layers.0",
    ),
    "DiT's own": (
        {"patches": (16, 32), "final_layer": MODULATED},
        "patches final_layer.adaLN_modulation.1",
    ),
    "a tied head's hidden layer": (
        {"words": nn.Embedding(99, 24), "predictions": {"layers": [(32, 24)]}},
        "predictions.layers.0",
    ),
    "pooling by attention": (
        {"head": {"layers": [(32, 64), (64, 32)]}},
        "head.layers.0 head.layers.1",
    ),
}
for name, (spec, muons) in BEHIND.items():
    MODELS[name] = ({"layers": [{"w": (32, 32)}] * 2, **spec}, f"layers.0.w layers.1.w {muons}")


@pytest.mark.filterwarnings("ignore:.*head:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_models_are_decided(name):
    model, muons, *traps = MODELS[name]
    description = (follow if muons else describe)(build(model))
    assert all_kinds(description) == traps
    names = names_of(description, "Muon")
    assert [name.removesuffix(".weight") for name in names] == muons.split()


def all_kinds(description: Any) -> list[str]:
    return kinds([*description.warnings, *description.notes])


class AdaLayerNormZero(nn.Module):
    """As diffusers calls it."""

    def __init__(self, dim: int = 16, chunks: int = 6):
        super().__init__()
        self.linear = nn.Linear(16, chunks * dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)


def latent(rotary: int) -> dict[str, Any]:
    """Latent attention, with and without rotary keys."""
    nope = 8 - rotary
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": nope, "qk_rope_head_dim": rotary}
    weights = {"kv_a_proj_with_mqa": (16, 16 + rotary), "kv_b_proj": (16, 3 * (nope + 4))}
    return {**weights, **sizes, "v_head_dim": 4}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


HEADS = {"num_attention_heads": 4}
GROUPED = types.SimpleNamespace(**HEADS, num_key_value_heads=2, hidden_size=16)
OF_8 = types.SimpleNamespace(**HEADS, num_key_value_heads=2, head_dim=8)
GROUPS = {"n_head": 4, "n_query_groups": 1}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 4}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
MAMBA_2 = {"d_inner": 32, "ngroups": 2, "d_state": 5, "nheads": 8}
LATENT_LAYERS = {
    "layers.0.kv_a_proj_with_mqa.weight": [16, 2],
    "layers.0.kv_b_proj.weight": "(head (k=6 + v=4)) dim",
    "layers.1.kv_b_proj.weight": "(head (k=8 + v=4)) dim",
}
STAGES = {"stages": [[{"qkv": (8, 24)}] * 2, [{"qkv": (16, 48)}] * 2]}
THIRDS = {"blocks": [{"qkv": (dim, 96), "proj": (32, 32)} for dim in (16, 32)]}
CONVOLUTIONS = [nn.Conv2d(64, 64, 3, groups=4)] * 2
# Fused weights by name, how many rows they have, what else tells their sizes, and the split that
# `describe` advises to write where the caller gives none, and that `for_model` finds by itself.
FUSED: list[tuple[str, int, Any, dict[str, Any], Any]] = [
    ("qkv", 48, None, {}, [16, 16, 16]),
    ("qkv_proj", 48, None, {}, [16, 16, 16]),
    ("c_attn", 48, None, {}, [16, 16, 16]),
    ("wqkv", 48, None, {}, [16, 16, 16]),
    ("Wqkv", 48, None, {}, [16, 16, 16]),
    ("qkv_proj", 32, GROUPED, {}, [16, 8, 8]),
    ("qkv_proj", 64, OF_8, {}, [32, 16, 16]),
    ("qkv", 24, GROUPS, {}, [16, 4, 4]),
    ("query_key_value", 48, HEADS, {"multi_query": False}, "(head (q=4 + k=4 + v=4)) dim"),
    ("query_key_value", 32, {**HEADS, "num_kv_heads": 2}, {}, "(head (q=8 + k=4 + v=4)) dim"),
    ("query_key_value", 24, HEADS, {"multi_query": True}, [16, 4, 4]),
    ("q_proj", 64, {**HEADS, "head_dim": 8}, {}, "(head (q=8 + gate=8)) dim"),
    ("kv_a_proj_with_mqa", 24, LATENT, {}, [16, 8]),
    ("kv_b_proj", 40, LATENT, {}, "(head (k=6 + v=4)) dim"),
    ("in_proj_qkvz", 80, DELTA, {}, "(head (q=8 + k=8 + v=12 + z=12)) dim"),
    ("in_proj_ba", 8, DELTA, {}, "(head (b=2 + a=2)) dim"),
    ("in_proj_qkv", 56, DELTA, {}, [16, 16, 24]),
    ("in_proj", 64, None, {"intermediate_size": 32}, [32, 32]),
    ("in_proj", 92, None, MAMBA_2, [32, 32, 10, 10, 8]),
    ("gate_up_proj", 48, None, {}, [24, 24]),
    ("adaLN_modulation", 96, None, {}, 16),
]
FUSED_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"{name}, {rows} rows": (attention(name, rows, config, **sizes), {name: split})
        for name, rows, config, sizes, split in FUSED
    },
    "a third is taken": (THIRDS, {"qkv": [32, 32, 32]}),
    "stages": (STAGES, {"stages.0.*.qkv.weight": [8] * 3, "stages.1.*.qkv.weight": [16] * 3}),
    "latent": ({"layers": [latent(2), latent(0)], "config": LATENT}, LATENT_LAYERS),
    "columns": (gpt2(), {"c_attn": "dim (q=16 + k=16 + v=16)"}),
    "diffusers": ({"layers": [AdaLayerNormZero()] * 2}, {"linear": 16}),
    "diffusers, of a narrow time": ({"layers": [AdaLayerNormZero(32, 2)] * 2}, {"linear": 32}),
    "LSTM": ({"rnn": nn.LSTM(12, 8, 2, bidirectional=True), "proj": (16, 16)}, {"rnn": 8}),
    "GRU": ({"rnn": nn.GRU(12, 8, 2, bidirectional=True), "proj": (16, 16)}, {"rnn": 8}),
    "LSTM alone": (nn.LSTM(12, 8, num_layers=2), {"weight_*": 8}),
    "encoder": (encoder(), {"in_proj_weight": [16, 16, 16]}),
    "torch's attention": (nn.MultiheadAttention(16, 2), {"in_proj_weight": [16, 16, 16]}),
    "convolutions": ({"stem": nn.Conv2d(8, 64, 3), "layers": CONVOLUTIONS}, {"layers": 16}),
    "experts": (experts(), {"gate_up_proj": [12, 12]}),
    "experts in columns": (experts(transposed=True), {"gate_up_proj": "dim (gate=12 + up=12)"}),
    "more experts than down projections": (experts(others=2), {"gate_up_proj": [12, 12]}),
}


@pytest.mark.parametrize("name", FUSED_MODELS)
def test_weights_that_hold_several_matrices_are_split(name):
    spec, split = FUSED_MODELS[name]
    description = follow_apart(model := build(spec))
    written = arguments(description.code, run(description.code, model))
    assert written["split"] == split
    assert (written["expert_keys"] or []) == (["experts"] if "experts" in name else [])
    others = {key for key in ("experts", "convolutions") if key in name}
    assert set(kinds(description.warnings)) == {"fused", *others}


UNSPLIT: dict[str, Any] = {
    "other sizes": {"layers": [{"in_proj": (16, 65), "intermediate_size": 32}]},
    "queries alone": attention("q_proj", 32, OF_8),
    "keys of other sizes": nn.MultiheadAttention(16, 2, kdim=8, vdim=8),
    "no gates": nn.RNN(12, 8),
}


@pytest.mark.parametrize("name", UNSPLIT)
def test_what_holds_one_matrix_is_not_split(name):
    assert describe(build(UNSPLIT[name]), expert_keys=None, split=None).warnings == []


class Careless(nn.Module):
    def __init__(self, args: object):
        super().__init__()
        self.args, self.qkv = args, nn.Linear(8, 24)

    @property
    def config(self):
        raise RuntimeError("not now")

    @property
    def num_heads(self):
        raise RuntimeError("not now")


UNTOLD: dict[str, tuple[Any, str]] = {
    "no sizes": (attention("qkv_proj", 32), "qkv_proj"),
    "unknown key": (attention("qkv_proj", 24, {"n_head": 4, "n_kv": 1}), "qkv_proj"),
    "by head": (attention("query_key_value", 48), "query_key_value"),
    "stack": ({"attn": {"W_Q": torch.randn(4, 16, 8)}, "proj": (16, 16)}, "W_Q"),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_nothing_tells_is_left_to_adamw_with_a_line_to_fill_in(name):
    spec, component = UNTOLD[name]
    argument, key = ("expert_keys=[", "stack") if name == "stack" else ("split={", "fused")
    description = describe(model := build(spec))
    assert kinds(description.warnings) == [key]
    assert f'{argument}"{component}"' in description.warnings[0].write
    assert f'# {argument}"{component}"' in description.code
    with pytest.warns(UserWarning, match=f"AdamW.*{component}"):
        space = run(description.code, model)
    assert arguments(description.code, space).keys() <= {"lr"}
    assert any(component in other for other in space["optim"].names[1])
    given = {"expert_keys": ["W_Q"]} if name == "stack" else {"split": {component: 8}}
    assert describe(model, **given).warnings == []
    taken = optimizer.Muon.for_model(model, lr=1e-3, **given)
    assert any(component in name for name in taken.names[0])


CARELESS = [types.SimpleNamespace(text_config=torch.ones(2)), torch.ones(2), "args"]


@pytest.mark.parametrize("args", CARELESS, ids=lambda args: type(args).__name__)
def test_configurations_that_raise_or_are_something_else_tell_nothing(args):
    assert kinds(follow_apart(Careless(args)).warnings) == ["fused"]


def test_experts_are_known_by_their_number_too():
    layer = {"ffn": {"input_linear": {"weight": torch.randn(4, 16, 16)}}}
    config = types.SimpleNamespace(num_local_experts=4)
    model = build({"layers": [layer], "config": config})
    assert 'expert_keys=["input_linear"]' in follow_apart(model).code


# Rows, totals, and what is printed


def test_rows_are_plain_data_of_every_parameter_in_the_models_order():
    model = llama()
    model.layers[0].w1.weight.requires_grad_(False)
    description = describe(model)
    assert [row["name"] for row in description.rows] == [n for n, _ in model.named_parameters()]
    (row,) = (row for row in description.rows if row["name"] == "layers.0.w1.weight")
    told = {"algorithm": "frozen", "reason": "requires_grad=False", "placement": "plain"}
    about = {"name": "layers.0.w1.weight", "shape": (48, 16), "dtype": torch.float32, "numel": 768}
    assert row == {**about, **told}
    by_name = reasons(description)
    assert by_name["tok_embeddings.weight"] == "embedding"
    assert by_name["layers.0.norm_weight"] == "vector"
    by_name = reasons(describe(build({"words": nn.Embedding(100, 16), "x": (16, 100)})))
    assert "100" in by_name["x.weight"] and "words" in by_name["x.weight"]
    total, totals = sum(p.numel() for p in model.parameters()), description.totals
    assert totals["frozen"] == {"tensors": 1, "numel": 768, "share": 768 / total}
    assert sum(each["numel"] for each in totals.values()) == total
    assert sum(each["share"] for each in totals.values()) == pytest.approx(1)


def test_a_plain_model_needs_no_more_than_the_code_of_the_readme():
    assert describe(llama()).code == "optim = optimizer.Muon.for_model(model, lr=1e-3)"


@pytest.mark.filterwarnings("ignore")  # of keys that match nothing
@pytest.mark.parametrize("keys", [None, "experts", ["experts"]])
@pytest.mark.parametrize("function", [None, lambda name, p: p.ndim == 2 and "w" in name])
def test_decisions_are_those_of_the_groups(keys, function):
    given = {} if function is None else {"is_muon_func": function}
    for model in (llama(), gpt2(), build(experts()), resnet()):
        groups = optimizer.get_default_muon_param_groups(model, expert_keys=keys, **given)
        description = describe(model, expert_keys=keys, **given)
        names = [names_of(description, algorithm) for algorithm in ("Muon", "AdamW")]
        assert names == [group["names"] for group in groups]


def test_any_model_fits_a_screen_and_layers_that_are_alike_take_one_line():
    with torch.device("meta"):
        model = llama(dim=4096, layers=100, vocabulary=128_256)
    text = str(describe(model))
    (line,) = (line for line in text.splitlines() if "wq.weight" in line)
    assert line.split()[:5] == [
        "layers.{0..99}.attention.wq.weight",
        "(4096,",
        "4096)",
        "×100",
        "Muon",
    ]
    assert len(text.splitlines()) < 40
    layers = [build({f"mix{i}": (8, 8, False)}) for i in range(30)]
    twice = nn.Sequential(*layers, *layers)
    blocks = {f"block{i}x": [(i, i + 1), nn.Conv2d(i, i + 2, 3)] for i in range(5, 90)}
    for model in (twice, build(blocks)):
        assert len(str(describe(model)).splitlines()) < 60
    assert len(describe(twice).notes) == 30
    assert "²" in str(describe(build({"²": (4, 4), "³": (4, 4)})))  # which int() does not read


# Wrapped, sharded, on meta


WRAPPERS = [lambda m: torch.compile(m, backend="eager"), checkpoint_wrapper, nn.DataParallel]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["compile", "checkpoint_wrapper", "DataParallel"])
def test_a_wrapped_model_is_described_as_the_model(wrap):
    assert describe(wrap(model := gpt2())) == describe(model)


def test_a_model_on_meta_is_described_as_any_other():
    with torch.device("meta"):
        model = llama(dim=4096, layers=32, vocabulary=128_256)
    assert follow(model).warnings == []


@on_ranks(1)
def test_a_sharded_model_is_described_as_the_model() -> None:
    model = llama(tied=True)
    expected = describe(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    found = describe(model)
    assert found.code == expected.code and found.warnings == []
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert "Shard(dim=0)" in row["placement"]
        assert {**row, "placement": "plain"} == other
    fused = build(attention("qkv", 48))
    fully_shard(fused)
    follow(fused)
    assert describe(DistributedDataParallel(llama())).warnings == []  # one rank has no replicas


@on_ranks(2)
def test_a_model_that_fsdp1_has_flattened_is_told_of_fully_shard() -> None:
    cpu, no_shard = torch.device("cpu"), ShardingStrategy.NO_SHARD
    for original in (False, True):
        model = FullyShardedDataParallel(llama(), device_id=cpu, use_orig_params=original)
        description = describe(model)
        assert kinds(description.warnings) == ["flat"]
        assert "fully_shard" in description.code
        with pytest.raises(ValueError, match="fully_shard"):
            optimizer.get_default_muon_param_groups(model)
    whole = FullyShardedDataParallel(
        nn.Linear(6, 4), device_id=cpu, use_orig_params=True, sharding_strategy=no_shard
    )
    groups = optimizer.get_default_muon_param_groups(whole)
    assert [len(group["params"]) for group in groups] == [1, 1]


@on_ranks(2)
def test_replicas_are_told_of_process_groups() -> None:
    description = describe(llama())
    assert kinds(description.warnings) == ["replicas"]
    assert "fully_shard" in description.code and 'grad_reduce="mean"' in description.code
    torch.manual_seed(0)
    model = DistributedDataParallel(llama())
    description = follow(model)
    assert kinds(description.warnings) == ["replicas"]
    assert "process_group=" in description.code and "grad_reduce" not in description.code
    assert describe(model, process_group=dist.group.WORLD).warnings == []
    fully_shard(model := llama())
    assert describe(model).warnings == []


# Options, and what the caller decides


def test_code_has_the_options_that_are_given_and_the_groups_take_them():
    given = {"lr": 2e-3, "adamw_lr": 1e-4, "decay_vectors": False, "weight_decay": 0.05}
    given |= {"ns_dtype": torch.float32, "ns_steps": 5}
    description = describe(model := llama(), **given)
    written = arguments(description.code, run(description.code, model))
    assert given.items() <= written.items()
    groups = optimizer.Muon.for_model(model, **given).param_groups
    assert [group["lr"] for group in groups] == [2e-3, 1e-4, 1e-4]
    assert [group["weight_decay"] for group in groups] == [0.05, 0.05, 0.0]


def test_a_given_split_is_kept_and_what_it_settles_is_not_told_again():
    model = build(attention("qkv", 48))
    assert describe(model, split={"qkv": 4}).warnings == describe(model, split=8).warnings == []
    model.layers[0].gate_up = nn.Linear(16, 32)
    description = follow(model, split={"qkv": 4})
    assert description.warnings == [] and 'split={"qkv": 4}' in description.code
    optim = optimizer.Muon.for_model(model, lr=1e-3, split={"qkv": 4})
    assert optim.defaults["split"] == {"qkv": 4, "gate_up": [16, 16]}


def test_convolutions_left_to_adamw_are_a_trap_and_one_argument_makes_them_muons():
    description = follow(resnet())
    assert description.warnings[0].parameters == ("1.0.weight", "2.0.weight")
    assert arguments(description.code, {})["convolutions"] is True
    convolutional = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 3)
    (trap,) = follow(sequential(*convolutional, (6272, 128), (128, 10))).warnings
    assert "6%" in trap.what and trap.write == "convolutions=True"
    normed = parametrizations.weight_norm(nn.Conv1d(32, 32, 9, groups=2), dim=2)
    up, pixels = nn.ConvTranspose2d(32, 16, 3), nn.Conv2d(16, 3, 1)
    model = build({"position": normed, "up": up, "pixels": pixels, "mix": (16, 16)})
    (trap,) = describe(model).warnings
    parametrized = "position.parametrizations.weight.original1"
    assert trap.kind == "convolutions" and set(trap.parameters) == {"up.weight", parametrized}
    optim = optimizer.Muon.for_model(model, lr=1e-3, convolutions=True)
    assert optim.defaults["split"] == {"position": 16}
    assert "transposed" in kinds(describe(model, adjust_lr="original", lr=0.02).warnings)


HEAD = nn.Conv2d(32, 20, 1)


@pytest.mark.parametrize("head", [{"fc": HEAD}, {"head": {"fc": HEAD}}, {}], ids=str)
def test_the_last_convolution_of_a_model_without_linear_layers_may_be_its_head(head):
    layers = sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 32, 1))
    description = describe(build({"layers": layers, **head}), convolutions=True)
    assert names_of(description, "Muon") == ["layers.1.weight", "layers.2.weight"]


def test_keys_and_patterns_that_match_nothing_are_told_and_left_out():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all_kinds(describe(llama(), expert_keys=["experts"])) == ["expert_keys"]
        assert all_kinds(describe(llama(), adamw_keys=["experts"])) == ["adamw_keys"]
    follow(llama(), expert_keys=["experts"])
    assert (
        'expert_keys=["experts"]'
        in follow(build(experts()), expert_keys=["expert"], split=None).code
    )
    description = follow(llama(), split={"wqkv": 4, "wq": 4})
    assert all_kinds(description) == ["split"] and 'split={"wq": 4}' in description.code


def test_what_muon_would_refuse_is_told():
    description = follow(resnet(), is_muon_func=everything)
    assert "refused" in kinds(description.warnings)
    assert "everything(name, param)" in description.code
    many = follow(build({"layers": [(8, 8)] * 30}), is_muon_func=everything)
    assert [len(trap.parameters) for trap in many.warnings] == [30]
    description = follow(build(attention("qkv", 48)), split={"qkv": [7, 7]})
    assert "14" in description.warnings[0].why
    assert "split" not in description.code  # which finds it by itself


def test_heads_that_the_caller_gives_muon_are_told_and_keys_say_what_is_adamws():
    model = build(with_head("fc"))
    (trap,) = describe(model, is_muon_func=lambda name, param: param.ndim == 2).warnings
    assert (trap.kind, trap.parameters) == ("head", ("fc.weight",))
    model = build({"encode": (32, 64), "project": (64, 48)})
    (note,) = describe(model).notes
    assert (note.kind, note.parameters) == ("unsure", ("project.weight",))
    described = describe(model, adamw_keys="project")
    assert described.notes == [] and names_of(described, "Muon") == ["encode.weight"]
    assert 'adamw_keys=["project"]' in described.code
    model = build({"layers": [{"w": (16, 16)}] * 2, "head": (16, 16)})
    assert all_kinds(describe(model)) == ["unsure"]
    assert not all_kinds(describe(model, adamw_keys="head"))
    described = describe(build({"größer": (8, 8), "w": (8, 8)}), adamw_keys="größer")
    assert 'adamw_keys=["größer"]' in described.code
    assert 'adamw_keys=["gate"]' in describe(build(ROUTER)).notes[0].why


@pytest.mark.parametrize(
    ("given", "error", "name"),
    [
        ({"learning_rate": 1e-3}, TypeError, "learning_rate"),
        ({"momentum": 2}, ValueError, "momentum"),
        ({"grad_reduce": "mean"}, ValueError, "process_group"),
        ({"ns_coefficients": [(1.5, -0.5, 0.0)], "ns_steps": 7}, ValueError, "ns_steps"),
        ({"model": [torch.ones(2, 2)]}, ValueError, r"nn\.Module"),
        ({"model": nn.Sequential(nn.LazyLinear(3))}, ValueError, r"0\.weight"),
    ],
)
def test_options_are_those_of_muon(given, error, name):
    with pytest.raises(error, match=name):
        describe(**{"model": llama(), **given})


# Learning rates


@pytest.mark.parametrize("dim", [512, 4096])
@pytest.mark.parametrize(
    ("scale", "small", "fine", "large"),
    [
        ("match_rms_adamw", [1e-8], [1e-6, 1e-4, 3e-3], [0.02, 1.0]),
        (0.18, [1e-8], [1e-3], [0.02]),
        ("original", [3e-4], [0.0, 0.02, 0.05], [0.5]),
        ("spectral", [3e-4], [0.01], [1.0]),
        ("none", [3e-4], [0.02], [10.0]),
    ],
)
def test_learning_rates_are_judged_by_their_scale(dim, scale, small, fine, large):
    with torch.device("meta"):
        model = llama(dim=dim)
    for lr in fine:
        assert follow(model, lr=lr, adjust_lr=scale).warnings == []
    for rates, verdict in ((small, "small"), (large, "large")):
        for lr in rates:
            (trap,) = follow(model, lr=lr, adjust_lr=scale).warnings
            assert trap.kind == "lr" and verdict in trap.what


def test_rates_that_suit_are_told():
    with torch.device("meta"):
        model, square = llama(dim=1024), sequential(*[(4096, 4096)] * 3)
    assert 'adjust_lr="original"' in describe(model, lr=0.02).warnings[0].why
    told = describe(model, lr=3e-4, adjust_lr="original").warnings[0]
    assert 'adjust_lr="match_rms_adamw"' in told.why
    assert "7e-3" in describe(square, lr=0.01).warnings[0].why  # 0.2 · lr · √(3 · 4096) ≤ 16 %
    assert "lr=1.1e-3," in describe(sequential((16, 16), (16, 16)), adjust_lr=0.18).code
    space = run(describe(model := llama(), adjust_lr="original").code, model)
    assert [group["lr"] for group in space["optim"].param_groups] == [0.02, 3e-4]
    description = describe(model, lr=torch.tensor(5.0))  # the value of a tensor is not read
    assert description.warnings == [] and "lr=lr" in description.code


def test_rates_to_try_are_those_of_models_of_its_kind():
    perceptron = sequential((32, 32), (32, 32), (32, 4))
    rates = [describe(model).rates for model in (llama(), perceptron)]
    assert "4 to 8 times" in rates[0] and "4 to 8" not in rates[1]
    assert all("adamw_lr" in text and "1 to 4 times" in text for text in rates)
    assert "times 0.5" in describe(llama(), adjust_lr=0.4).rates
    assert describe(llama(), adjust_lr="original", lr=0.02).rates == ""
    assert describe(nn.Embedding(8, 4)).rates == ""


def test_weights_stored_in_out_are_told_of_a_scale_that_is_not_symmetric():
    for model in (gpt2(dim=64), build(experts(transposed=True))):
        description = follow(model, adjust_lr="original", lr=0.02)
        assert "transposed" in kinds(description.warnings)
        assert 'adjust_lr="match_rms_adamw"' in description.code
    assert "transposed" not in kinds(describe(gpt2(), adjust_lr="none").warnings)
    assert describe(llama(), adjust_lr="original").warnings == []


# Weights that are not as usual


def test_weights_of_few_digits_are_noted_with_the_size_of_what_rounds_away():
    (note,) = describe(llama().bfloat16()).notes
    assert note.kind == "narrow" and "1/512" in note.why and 'weight_rounding="exact"' in note.why
    weight = torch.tensor(0.996).bfloat16()
    assert weight * (1 - 1 / 500) != weight and weight * (1 - 1 / 520) == weight
    assert describe(llama().bfloat16(), weight_rounding="exact").notes == []
    assert "1/4096" in describe(llama().half()).notes[0].why


class Params4bit(nn.Parameter):
    """As bitsandbytes calls its own."""


def test_packed_and_partitioned_weights_are_known_by_what_their_libraries_call_them():
    model = llama()
    packed = Params4bit(torch.randn(16, 16), requires_grad=False)
    model.layers[0].attention.wq.weight = packed
    assert kinds(describe(model).notes) == ["quantized"]
    for p in model.parameters():
        p.data, p.ds_id = torch.empty(0), 0  # as DeepSpeed leaves them
    assert kinds(describe(model).warnings) == ["flat"]
    base = "base_model.model.score"  # as peft calls a head that is trained whole
    for name in (f"{base}.modules_to_save.default.weight", f"{base}.original_module.weight"):
        assert not optimizer.default_is_muon(name, torch.empty(4, 8))


def test_a_parametrized_weight_is_not_computed():
    class Never(nn.Module):
        def forward(self, weight):
            raise AssertionError("computed")

    model = llama()
    for module in (model.layers[0].w1, model.output):
        parametrize.register_parametrization(module, "weight", Never(), unsafe=True)
    assert describe(model).warnings == []
