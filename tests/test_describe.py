"""What `describe` tells of a model: decisions, reasons, traps, and code that runs as it stands."""

from __future__ import annotations

import copy
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from advice import arguments, everything, follow, follow_apart, kinds, names_of, reasons, run
from kernel import optimizer
from ranks import run_ranks

describe = optimizer.describe
get_default_muon_param_groups = optimizer.muon.get_default_muon_param_groups

pytestmark = pytest.mark.usefixtures("one_thread")


# Models


class Attention(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        self.n_heads, self.n_kv_heads = heads, kv_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim // heads * kv_heads, bias=False)
        self.wv = nn.Linear(dim, dim // heads * kv_heads, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)


class Layer(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        self.attention = Attention(dim, heads, kv_heads)
        self.w1 = nn.Linear(dim, 3 * dim, bias=False)
        self.w2 = nn.Linear(3 * dim, dim, bias=False)
        self.w3 = nn.Linear(dim, 3 * dim, bias=False)
        self.norm = nn.RMSNorm(dim)


class Llama(nn.Module):
    def __init__(self, dim: int = 16, layers: int = 2, vocabulary: int = 100, tied: bool = False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight


class Conv1D(nn.Module):
    """A linear layer that stores (in, out), as GPT-2's."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))


def gpt2(dim: int = 16, layers: int = 2) -> nn.Module:
    blocks = (
        nn.ModuleDict({"c_attn": Conv1D(3 * dim, dim), "c_proj": Conv1D(dim, dim)})
        for _ in range(layers)
    )
    model = nn.ModuleDict(
        {"wte": nn.Embedding(50, dim), "wpe": nn.Embedding(20, dim), "h": nn.ModuleList(blocks)}
    )
    model["lm_head"] = nn.Linear(dim, 50, bias=False)
    model["lm_head"].weight = model["wte"].weight
    return model


def of_layers(name: str, weight: nn.Module, head: int = 50, layers: int = 2, **config: int):
    """A model of layers that each hold one module of that name, and a config."""
    model = nn.Module()
    model.embed_tokens = nn.Embedding(head, 16)
    model.layers = nn.ModuleList(nn.ModuleDict({"attn": nn.ModuleDict()}) for _ in range(layers))
    for layer in model.layers:
        layer["attn"][name] = type(weight)(weight.in_features, weight.out_features, bias=True)
    model.lm_head = nn.Linear(16, head, bias=False)
    if config:
        model.config = types.SimpleNamespace(**config)
    return model


class Experts(nn.Module):
    def __init__(self, transposed: bool = False):
        super().__init__()
        shapes = [(3, 16, 24), (3, 12, 16)] if transposed else [(3, 24, 16), (3, 16, 12)]
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(3, 24))


def moe(transposed: bool = False) -> nn.Module:
    layers = (
        nn.ModuleDict({"router": nn.Linear(16, 3), "experts": Experts(transposed)})
        for _ in range(2)
    )
    return nn.ModuleDict({"embed_tokens": nn.Embedding(50, 16), "layers": nn.ModuleList(layers)})


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7),
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, groups=16)),
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)),
        nn.Linear(32, 10),
    )


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})


# Decisions


@pytest.mark.kernels_ci
def test_a_plain_llama_has_no_trap_and_the_code_of_the_readme():
    description = follow(Llama())
    assert description.warnings == [] and description.notes == []
    assert description.code == "optim = optimizer.Muon.for_model(model, lr=1e-3)"
    told = reasons(description)
    assert told["tok_embeddings.weight"] == "embedding"
    assert told["layers.0.attention.wq.weight"] == "matrix"
    assert told["norm.weight"] == "vector"
    assert "output" in told["output.weight"]


def test_rows_are_plain_data_of_every_parameter_in_the_models_order():
    model = Llama()
    model.layers[0].w1.weight.requires_grad_(False)
    rows = describe(model).rows
    assert [row["name"] for row in rows] == [name for name, _ in model.named_parameters()]
    row = next(row for row in rows if row["name"] == "layers.0.w1.weight")
    assert row == {
        "name": "layers.0.w1.weight",
        "shape": (48, 16),
        "dtype": torch.float32,
        "placement": "plain",
        "numel": 768,
        "algorithm": "frozen",
        "reason": "requires_grad=False",
    }


@pytest.mark.parametrize("keys", [None, "experts", ["experts"]])
@pytest.mark.parametrize("function", [None, lambda name, p: p.ndim == 2 and "w" in name])
def test_decisions_are_those_of_the_groups(keys, function):
    given = {} if function is None else {"is_muon_func": function}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of keys that match nothing
        for model in (Llama(), gpt2(), moe(), resnet()):
            groups = get_default_muon_param_groups(model, expert_keys=keys, **given)
            description = describe(model, expert_keys=keys, **given)
            assert [names_of(description, a) for a in ("Muon", "AdamW")] == [
                group["names"] for group in groups
            ]


def test_totals_count_parameters_and_shares():
    model = Llama()
    model.norm.weight.requires_grad_(False)
    totals = describe(model).totals
    number = sum(p.numel() for p in model.parameters())
    assert totals["frozen"] == {"tensors": 1, "numel": 16, "share": 16 / number}
    assert sum(total["numel"] for total in totals.values()) == number
    assert sum(total["share"] for total in totals.values()) == pytest.approx(1)


def test_layers_that_are_alike_take_one_line_each():
    with torch.device("meta"):
        model = Llama(dim=4096, layers=100, vocabulary=128_256)
    text = str(describe(model))
    line = next(line for line in text.splitlines() if "wq" in line)
    assert line.split() == [
        "layers.{0..99}.attention.wq.weight",
        "(4096,",
        "4096)",
        "×100",
        "Muon",
        "matrix",
    ]
    assert len(text.splitlines()) < 30


def test_a_model_of_many_shapes_still_fits_a_screen():
    blocks = [nn.Sequential(nn.Linear(i, i + 1), nn.Conv2d(i, i + 2, 3)) for i in range(5, 90)]
    model = nn.ModuleDict({f"block{i}x": block for i, block in enumerate(blocks)})
    text = str(describe(model))
    assert len(text.splitlines()) < 60


# Wrapped, sharded, on meta


def test_a_model_on_meta_is_described_as_any_other():
    with torch.device("meta"):
        model = Llama(dim=4096, layers=32, vocabulary=128_256)
    assert follow(model).warnings == []


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda model: torch.compile(model, backend="eager"), id="compile"),
        pytest.param(lambda model: checkpoint_wrapper(model), id="checkpoint_wrapper"),
        pytest.param(nn.DataParallel, id="DataParallel"),
    ],
)
def test_a_wrapped_model_is_described_as_the_model(wrap):
    model = gpt2()
    expected, found = describe(model), describe(wrap(model))
    assert found.rows == expected.rows and found.code == expected.code
    assert found.notes == expected.notes and found.model == expected.model


def sharded() -> None:
    model = Llama(tied=True)
    whole = describe(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    found = describe(model)
    assert found.code == whole.code and found.warnings == []
    for row, expected in zip(found.rows, whole.rows):
        assert "Shard(dim=0)" in row["placement"]
        assert {**row, "placement": ""} == {**expected, "placement": ""}
    fused = of_layers("qkv", nn.Linear(16, 48))
    fully_shard(fused)
    follow(fused)


@pytest.mark.slow
def test_shapes_of_sharded_models_are_whole_and_placements_are_told():
    run_ranks(sharded, 1)


def flat() -> None:
    for original in (False, True):
        model = FullyShardedDataParallel(
            Llama(), device_id=torch.device("cpu"), use_orig_params=original
        )
        description = describe(model)
        assert kinds(description.warnings) == ["flat"]
        assert "fully_shard" in description.code
        run(description.code, model)


def test_flat_parameters_of_fsdp1_are_told():
    run_ranks(flat, 1)


def replicated() -> None:
    model = Llama()
    description = describe(model)
    assert kinds(description.warnings) == ["replicas"]
    assert "fully_shard" in description.code and "grad_reduce" in description.code
    torch.manual_seed(0)
    model = DistributedDataParallel(Llama())
    description = follow(model)
    assert kinds(description.warnings) == ["replicas"]
    assert "grad_reduce" not in description.code
    assert describe(model, process_group=dist.group.WORLD).warnings == []
    fully_shard(model := Llama())
    assert describe(model).warnings == []


def test_plain_parameters_on_several_ranks_are_told_to_name_a_process_group():
    run_ranks(replicated, 2)


def under_ddp_alone() -> None:
    assert describe(DistributedDataParallel(Llama())).warnings == []


def test_one_rank_needs_no_process_group():
    run_ranks(under_ddp_alone, 1)


# Embeddings and heads


def test_a_tied_head_is_noted_and_no_warning():
    description = follow(Llama(tied=True))
    assert kinds(description.notes) == ["tied"] and description.warnings == []
    assert set(description.notes[0].parameters) == {"tok_embeddings.weight", "output.weight"}


def test_embeddings_of_an_encoder_and_a_decoder_tied_to_one_another_are_one_note():
    model = nn.ModuleDict({"shared": nn.Embedding(40, 8)})
    for name in ("encoder", "decoder"):
        model[name] = nn.ModuleDict({"embed_tokens": nn.Embedding(40, 8), "wi": nn.Linear(8, 12)})
        model[name]["embed_tokens"].weight = model["shared"].weight
    model["lm_head"] = nn.Linear(8, 40, bias=False)
    model["lm_head"].weight = model["shared"].weight
    description = follow(model)
    assert kinds(description.notes) == ["tied"] and len(description.notes[0].parameters) == 4
    assert reasons(description)["shared.weight"] == "embedding"


def test_a_module_used_twice_is_noted():
    model = nn.ModuleDict({"first": nn.Linear(8, 8)})
    model["second"] = model["first"]
    assert kinds(follow(model).notes) == ["shared", "shared"]


@pytest.mark.parametrize("name", ["to_words", "decoder"])
def test_a_head_that_no_name_reveals_is_told_by_the_vocabulary(name):
    model = Llama(vocabulary=100)
    del model.output
    model.add_module(name, nn.Linear(16, 100))
    description = follow(model)
    assert reasons(description)[f"{name}.weight"] == (
        "head or embedding: 100 is the number of rows of tok_embeddings"
    )
    assert f"{name}.weight" in names_of(description, "AdamW")


def test_an_embedding_made_of_a_plain_parameter_is_told_by_the_config():
    model = Llama(vocabulary=100)
    del model.tok_embeddings
    model.words = nn.Parameter(torch.randn(100, 16))
    model.config = {"vocab_size": 100}
    assert "words" in names_of(follow(model), "AdamW")


def test_hidden_sizes_that_equal_a_small_vocabulary_raise_no_alarm():
    assert describe(Llama(dim=16, vocabulary=48)).warnings == []  # w1 is (48, 16), as the head is
    assert describe(Llama(dim=16, vocabulary=16)).warnings == []


@pytest.mark.parametrize("name", ["fc", "fc3", "heads", "predictions"])
def test_a_last_layer_is_told_to_be_a_head(name):
    model = nn.ModuleDict({"layer1": nn.Linear(32, 32), "layer2": nn.Linear(32, 64)})
    model[name] = nn.Linear(64, 20)
    assert f"{name}.weight" in names_of(follow(model), "AdamW")


def test_for_model_takes_the_arguments_that_describe_takes():
    given = {"lr": 1e-3, "adamw_lr": 1e-4, "decay_vectors": False, "weight_decay": 0.1}
    model = Llama()
    optim = optimizer.Muon.for_model(model, **given)
    assert [group["lr"] for group in optim.param_groups] == [1e-3, 1e-4, 1e-4]
    assert [group["weight_decay"] for group in optim.param_groups] == [0.1, 0.1, 0.0]
    assert "adamw_lr=1e-4,\n    decay_vectors=False" in describe(model, **given).code
    assert "adamw_lr=3e-4" in describe(model, adjust_lr="original").code


def test_a_head_is_told_where_the_caller_decides():
    model = nn.ModuleDict({"layer1": nn.Linear(32, 32), "layer2": nn.Linear(32, 64)})
    model["fc"] = nn.Linear(64, 20)
    description = describe(model, is_muon_func=lambda name, param: param.ndim == 2)
    assert [t.parameters for t in description.warnings] == [("fc.weight",)]


def test_a_last_matrix_that_may_be_a_head_is_left_to_adamw_and_said_to_be_unsure():
    model = nn.ModuleDict({"encode": nn.Linear(32, 64), "project": nn.Linear(64, 48)})
    with pytest.warns(UserWarning, match="may be an output head: project.weight"):
        (note,) = follow(model).notes
    assert (note.kind, note.parameters) == ("unsure", ("project.weight",))
    assert names_of(describe(model), "Muon") == ["encode.weight"]
    described = describe(model, adamw_keys="project")
    assert described.notes == [] and names_of(described, "Muon") == ["encode.weight"]
    assert 'adamw_keys=["project"]' in described.code


def test_projections_of_towers_whose_config_tells_what_they_give_are_no_heads():
    towers = {"visual_projection": nn.Linear(32, 24), "text_projection": nn.Linear(16, 24)}
    model = nn.ModuleDict(towers)
    assert {note.kind for note in describe(model).notes} == {"unsure"}
    model.config = types.SimpleNamespace(projection_dim=24)
    assert follow(model).notes == []
    assert names_of(describe(model), "Muon") == [f"{name}.weight" for name in towers]


@pytest.mark.parametrize("name", ["fc", "head"])
def test_the_last_convolution_of_a_model_without_linear_layers_may_be_its_head(name):
    layers = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 32, 1))
    head = nn.Conv2d(32, 20, 1) if name == "fc" else nn.ModuleDict({"fc": nn.Conv2d(32, 20, 1)})
    model = nn.ModuleDict({"layers": layers, name: head})
    description = follow(model, convolutions=True)
    assert names_of(description, "Muon") == ["layers.1.weight", "layers.2.weight"]
    del model[name]
    assert names_of(describe(model, convolutions=True), "Muon")[1:] == ["layers.2.weight"]


def test_heads_of_an_encoders_outputs_are_found_by_name():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])})
    model["enc_out_class_embed"] = nn.ModuleList([nn.Linear(32, 4), nn.Linear(32, 4)])
    model["bbox_embed"] = nn.Linear(32, 4)
    heads = ["enc_out_class_embed.0.weight", "enc_out_class_embed.1.weight", "bbox_embed.weight"]
    assert [n for n in names_of(follow(model), "AdamW") if n.endswith("weight")] == heads


def test_the_last_matrix_of_a_residual_stream_raises_no_doubt():
    assert describe(nn.TransformerEncoderLayer(16, 2, 32)).notes == []
    assert describe(nn.Sequential(nn.Linear(40, 16), nn.Linear(16, 40))).notes == []


def test_routers_are_noted_with_what_leaves_them_to_adamw():
    model = nn.Module()
    model.config = {"num_experts": 8}
    model.layers = nn.ModuleList([nn.ModuleDict({"gate": nn.Linear(16, 8)}) for _ in range(2)])
    (note,) = follow(model).notes
    assert (note.kind, len(note.parameters)) == ("routers", 2)
    assert 'adamw_keys=["gate"]' in note.why


def test_the_last_layer_of_a_sequence_with_few_outputs_is_a_head():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
    assert "3.weight" in names_of(follow(model), "AdamW")


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(64, 2),  # all there is
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64)),
        nn.TransformerDecoderLayer(16, 2, 32),
        nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 8)])}),
        nn.ModuleDict({"pooler": nn.Linear(16, 16), "proj": nn.Linear(16, 16)}),
    ],
)
def test_other_last_layers_are_none(model):
    assert "head" not in kinds(describe(model).warnings)


def test_a_head_that_an_adapter_library_saves_whole_stays_adamws():
    base = "base_model.model.score"
    names = {f"{base}.modules_to_save.default.weight", f"{base}.original_module.weight"}
    for name in names:
        assert not optimizer.muon.default_is_muon(name, torch.empty(4, 8))


def test_numbers_used_one_by_one_are_no_matrices():
    model = nn.ModuleDict({"mixer": nn.Module(), "proj": nn.Linear(8, 8)})
    model["mixer"].A_log = nn.Parameter(torch.randn(8, 4))
    assert reasons(follow(model))["mixer.A_log"] == "no linear map, by name"


# Fused projections


class StateSpace(nn.Module):
    """The sizes of Mamba's mixer, or of Mamba-2's."""

    def __init__(self, rows: int, **sizes: int):
        super().__init__()
        self.in_proj = nn.Linear(16, rows)
        for name, size in sizes.items():
            setattr(self, name, size)


class AdaLayerNormZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 96)


@pytest.mark.parametrize(
    ("module", "split"),
    [
        (lambda: StateSpace(64, intermediate_size=32), {"in_proj": [32, 32]}),
        (
            lambda: StateSpace(92, d_inner=32, ngroups=2, d_state=5, nheads=8),
            {"in_proj": [32, 32, 10, 10, 8]},
        ),
        (AdaLayerNormZero, {"linear": 16}),
        (
            lambda: nn.ModuleDict({"adaLN_modulation": nn.Sequential(nn.Linear(16, 96))}),
            {"adaLN_modulation": 16},
        ),
    ],
    ids=["Mamba", "Mamba-2", "diffusers' modulations", "DiT's modulations"],
)
def test_projections_that_modules_name_the_sizes_of_are_split(module, split):
    model = nn.ModuleDict({"layers": nn.ModuleList([module(), module()])})
    description = follow_apart(model)
    assert kinds(description.warnings) == ["fused"]
    space = run(description.code, model)
    assert arguments(description.code, space)["split"] == split


def test_an_input_projection_of_other_sizes_is_left_alone():
    model = nn.ModuleDict({"layers": nn.ModuleList([StateSpace(65, intermediate_size=32)])})
    assert follow(model).warnings == []


def test_latent_and_rotary_keys_are_split_by_the_config():
    model = of_layers("kv_a_proj_with_mqa", nn.Linear(16, 24))
    model.config = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
    description = follow_apart(model)
    assert 'split={"kv_a_proj_with_mqa": [16, 8]}' in description.code


def test_latent_attention_without_rotary_keys_is_split_by_what_its_module_says():
    class Attention(nn.Module):
        def __init__(self, rotary: int):
            super().__init__()
            self.kv_lora_rank, self.v_head_dim = 16, 4
            self.qk_nope_head_dim, self.qk_rope_head_dim = (6, 2) if rotary else (8, 0)
            self.kv_a_proj_with_mqa = nn.Linear(16, 16 + self.qk_rope_head_dim)
            self.kv_b_proj = nn.Linear(16, 3 * (self.qk_nope_head_dim + 4))

    model = nn.ModuleDict({"layers": nn.ModuleList([Attention(2), Attention(0)])})
    model.config = {"kv_lora_rank": 16, "qk_rope_head_dim": 2, "qk_nope_head_dim": 6}
    model.config["v_head_dim"] = 4
    description = follow_apart(model)
    assert arguments(description.code, run(description.code, model))["split"] == {
        "layers.0.kv_a_proj_with_mqa.weight": [16, 2],
        "layers.0.kv_b_proj.weight": "(head (k=6 + v=4)) dim",
        "layers.1.kv_b_proj.weight": "(head (k=8 + v=4)) dim",
    }


def test_queries_of_gated_attention_are_split_from_their_gates():
    config = dict(num_attention_heads=4, head_dim=8)
    description = follow_apart(of_layers("q_proj", nn.Linear(16, 64), **config))
    assert 'split={"q_proj": "(head (q=8 + gate=8)) dim"}' in description.code
    assert follow(of_layers("q_proj", nn.Linear(16, 32), **config)).warnings == []


def test_fused_projections_are_split_in_three_where_a_layer_takes_a_third():
    blocks = (
        nn.ModuleDict({"qkv": nn.Linear(rows, 96), "proj": nn.Linear(32, 32)}) for rows in (16, 32)
    )
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})  # the first block widens the stream
    assert 'split={"qkv": [32, 32, 32]}' in follow_apart(model).code


@pytest.mark.parametrize("name", ["qkv", "qkv_proj", "c_attn", "wqkv", "Wqkv"])
def test_fused_projections_are_split_in_three_where_shapes_tell(name):
    description = follow_apart(of_layers(name, nn.Linear(16, 48)))
    assert kinds(description.warnings) == ["fused"]
    assert f'split={{"{name}": [16, 16, 16]}}' in description.code


def test_fused_grouped_query_projections_are_split_by_the_config():
    config = dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=16)
    description = follow_apart(of_layers("qkv_proj", nn.Linear(16, 32), **config))
    assert 'split={"qkv_proj": [16, 8, 8]}' in description.code
    description = follow_apart(of_layers("qkv_proj", nn.Linear(16, 64), head_dim=8, **config))
    assert 'split={"qkv_proj": [32, 16, 16]}' in description.code


def test_fused_projections_whose_sizes_nothing_tells_are_left_to_adamw_with_a_line_to_fill_in():
    model = of_layers("qkv_proj", nn.Linear(16, 32))
    description = describe(model)
    assert kinds(description.warnings) == ["fused"]
    assert 'split={"qkv_proj": [' in description.warnings[0].write
    assert '# split={"qkv_proj": [' in description.code
    with pytest.warns(UserWarning, match="left to AdamW: Q, K and V in one tensor"):
        space = run(description.code, model)
    assert "split" not in arguments(description.code, space)
    assert "layers.0.attn.qkv_proj.weight" in space["optim"].names[1]
    taken = optimizer.Muon.for_model(model, lr=1e-3, split={"qkv_proj": [16, 8, 8]})
    assert "layers.0.attn.qkv_proj.weight" in taken.names[0]


@pytest.mark.parametrize(
    ("rows", "config", "split"),
    [
        (48, {}, "(head (q=4 + k=4 + v=4)) dim"),
        (32, {"num_kv_heads": 2}, "(head (q=8 + k=4 + v=4)) dim"),
        (24, {"multi_query": True}, [16, 4, 4]),
    ],
    ids=["by head", "by key head", "one key head"],
)
def test_rows_that_interleave_head_by_head_are_split_into_whole_projections(rows, config, split):
    model = of_layers("query_key_value", nn.Linear(16, rows), num_attention_heads=4, **config)
    for layer in model.layers:
        layer["attn"].multi_query = config.get("multi_query", False)
    description = follow_apart(model)
    space = run(description.code, model)
    assert arguments(description.code, space)["split"] == {"query_key_value": split}
    unknown = of_layers("query_key_value", nn.Linear(16, 48))
    assert "[16, 16, 16]" not in str(describe(unknown))


def test_columns_of_weights_stored_in_by_out_are_split():
    description = follow_apart(gpt2())
    assert kinds(description.notes) == ["tied"]
    assert 'split={"c_attn": "dim (q=16 + k=16 + v=16)"}' in description.code


def test_keys_and_values_of_latent_attention_are_split_head_by_head():
    model = of_layers("kv_b_proj", nn.Linear(16, 40))
    model.config = {"qk_nope_head_dim": 6, "v_head_dim": 4}
    description = follow_apart(model)
    assert 'split={"kv_b_proj": "(head (k=6 + v=4)) dim"}' in description.code


def test_projections_of_gated_delta_nets_are_split_key_head_by_key_head():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
    model = of_layers("in_proj_qkvz", nn.Linear(16, 2 * (8 + 8 + 12 + 12)))
    model.config = sizes
    description = follow_apart(model)
    split = "(head (q=8 + k=8 + v=12 + z=12)) dim"
    assert f'split={{"in_proj_qkvz": "{split}"}}' in description.code
    model = of_layers("in_proj_ba", nn.Linear(16, 8))
    model.config = sizes
    assert 'split={"in_proj_ba": "(head (b=2 + a=2)) dim"}' in follow_apart(model).code
    model = of_layers("in_proj_qkv", nn.Linear(16, 16 + 16 + 24))
    model.config = sizes
    assert 'split={"in_proj_qkv": [16, 16, 24]}' in follow_apart(model).code


def test_convolutions_in_groups_are_one_matrix_for_each_group():
    stem = nn.Conv2d(8, 64, 3)
    layers = [nn.Conv2d(64, 64, 3, groups=4) for _ in range(2)]
    model = nn.ModuleDict({"stem": stem, "layers": nn.ModuleList(layers)})
    description = follow_apart(model)
    options = arguments(description.code, run(description.code, model))
    assert options["convolutions"] and options["split"] == {"layers": 16}


def test_rates_to_try_are_those_of_models_of_its_kind():
    transformer = of_layers("q_proj", nn.Linear(16, 16))
    perceptron = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    matrices = "lr, for the matrices, "
    rest = "adamw_lr, for the rest, 1 to 4 times that lr. Without adamw_lr, lr drives both."
    assert f"{matrices}4 to 8 times AdamW's tuned rate" in str(describe(transformer))
    assert f"{matrices}AdamW's tuned rate and half of it" in str(describe(perceptron))
    assert rest in str(describe(transformer)) and rest in str(describe(perceptron))
    assert describe(transformer, adjust_lr="original", lr=0.02).rates == ""
    assert describe(nn.Embedding(8, 4)).rates == ""


def test_gates_of_a_feed_forward_are_split_in_two():
    description = follow_apart(of_layers("gate_up_proj", nn.Linear(16, 48)))
    assert 'split={"gate_up_proj": [24, 24]}' in description.code


@pytest.mark.parametrize("cls, gates", [(nn.LSTM, 4), (nn.GRU, 3)])
def test_gates_of_recurrent_layers_are_split(cls, gates):
    rnn = cls(12, 8, num_layers=2, bidirectional=True)
    alone = copy.deepcopy(rnn)
    description = follow_apart(nn.ModuleDict({"rnn": rnn, "proj": nn.Linear(16, 16)}))
    assert f"{gates} gates" in description.warnings[0].what
    assert 'split={"rnn": 8}' in description.code
    assert 'split={"weight_*": 8}' in follow_apart(alone).code
    assert describe(nn.RNN(12, 8)).warnings == []


def test_attention_of_torch_is_split_in_three():
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    description = follow_apart(encoder)
    assert 'split={"in_proj_weight": [16, 16, 16]}' in description.code
    follow_apart(nn.MultiheadAttention(16, 2))
    assert describe(nn.MultiheadAttention(16, 2, kdim=8, vdim=8)).warnings == []


def test_fused_projections_of_several_sizes_are_each_split_by_their_own():
    stages = (
        nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(d, 3 * d)}) for _ in range(2))
        for d in (8, 16)
    )
    description = follow_apart(nn.ModuleDict({"stages": nn.ModuleList(stages)}))
    assert '"stages.0.*.qkv.weight": [8, 8, 8]' in description.code


def test_a_given_split_is_kept_and_what_it_settles_is_not_told_again():
    model = of_layers("qkv", nn.Linear(16, 48))
    assert describe(model, split={"qkv": 4}).warnings == []
    assert describe(model, split=8).warnings == []
    model.layers[0]["gate_up"] = nn.Linear(16, 32)
    description = follow(model, split={"qkv": 4})
    assert description.warnings == [] and 'split={"qkv": 4}' in description.code
    optim = optimizer.Muon.for_model(model, lr=1e-3, split={"qkv": 4})
    assert optim.defaults["split"] == {"qkv": 4, "gate_up": [16, 16]}


# More than two dimensions


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_are_told_to_name_expert_keys(transposed):
    description = follow_apart(moe(transposed))
    assert kinds(description.warnings) == ["experts", "fused"]
    assert 'expert_keys=["experts"]' in description.code
    halves = '"dim (gate=12 + up=12)"' if transposed else "[12, 12]"
    assert f'split={{"gate_up_proj": {halves}}}' in description.code


def test_halves_of_experts_are_known_where_some_experts_have_one_projection_only():
    model = moe()
    for layer in model["layers"]:
        layer["experts"].gate_up_proj = nn.Parameter(torch.randn(5, 24, 16))
    assert 'split={"gate_up_proj": [12, 12]}' in follow_apart(model).code


def test_experts_are_known_by_their_number_too():
    layer = nn.ModuleDict({"ffn": nn.ModuleDict({"input_linear": nn.Module()})})
    layer["ffn"]["input_linear"].weight = nn.Parameter(torch.randn(4, 16, 16))
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    model.config = types.SimpleNamespace(num_local_experts=4)
    assert 'expert_keys=["input_linear"]' in follow_apart(model).code


def test_a_list_of_experts_is_a_list_of_matrices():
    experts = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(8, 12)}) for _ in range(4))
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": experts})])})
    assert follow(model).warnings == []
    assert describe(model, expert_keys=["experts"]).warnings == []


def test_tensors_that_may_be_stacked_get_a_line_to_fill_in():
    model = nn.ModuleDict({"attn": nn.Module(), "proj": nn.Linear(16, 16)})
    model["attn"].W_Q = nn.Parameter(torch.randn(4, 16, 8))
    description = describe(model)
    assert kinds(description.warnings) == ["stack"]
    assert 'expert_keys=["W_Q"]' in description.warnings[0].write
    with pytest.warns(UserWarning, match="left to AdamW: three dimensions.*attn.W_Q"):
        run(description.code, model)
    assert describe(model, expert_keys=["W_Q"]).warnings == []


def test_expert_keys_that_match_nothing_are_told_without_a_warning_of_pythons():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        description = describe(Llama(), expert_keys=["experts"])
    assert kinds(description.warnings) == ["expert_keys"]
    follow(Llama(), expert_keys=["experts"])
    assert 'expert_keys=["experts"]' in follow(moe(), expert_keys=["expert"], split=None).code


def test_convolutions_of_a_resnet_are_told_to_be_flattened():
    description = follow(resnet())
    assert kinds(description.warnings) == ["convolutions"]
    assert description.warnings[0].parameters == ("1.0.weight", "2.0.weight")
    assert "convolutions=True" in description.code and "def " not in description.code


def test_convolutions_of_a_cnn_are_told_though_its_linear_layers_are_larger():
    layers = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 64, 3)
    linear = nn.Linear(6272, 128), nn.Linear(128, 10)
    description = follow(nn.Sequential(*layers, nn.Flatten(), *linear))
    (trap,) = description.warnings
    assert trap.what == "2 convolutions left to AdamW: 6% of what is trained"
    assert trap.write == "convolutions=True"
    assert len(description.code.splitlines()) == 1


def test_a_patch_embedding_is_no_convolution_to_flatten():
    model = nn.ModuleDict(
        {
            "patch": nn.Conv2d(3, 32, 16),
            "blocks": nn.ModuleList([nn.ModuleDict({"fc1": nn.Linear(32, 64)})]),
            "head": nn.Linear(32, 10),
        }
    )
    model.pos_embed = nn.Parameter(torch.randn(1, 17, 32))
    model.cls_token = nn.Parameter(torch.randn(1, 1, 32))
    assert follow(model).warnings == []


def test_small_and_depthwise_convolutions_beside_matrices_are_adamws():
    mixer = nn.ModuleDict(
        {"conv1d": nn.Conv1d(64, 64, 4, groups=64), "in_proj": nn.Linear(64, 256)}
    )
    mixer["stem"] = nn.Conv1d(16, 16, 3)
    assert follow(nn.ModuleDict({"layers": nn.ModuleList([mixer])})).warnings == []


# Learning rates


@pytest.mark.parametrize("dim", [512, 4096])
@pytest.mark.parametrize(
    "lr, scale, verdict",
    [
        (1e-6, "match_rms_adamw", None),
        (1e-4, "match_rms_adamw", None),
        (3e-3, "match_rms_adamw", None),
        (0.02, "match_rms_adamw", "large"),
        (1e-3, 0.18, None),
        (0.02, 1.0, "large"),
        (1e-8, 0.18, "small"),
        (1.0, "match_rms_adamw", "large"),
        (1e-8, "match_rms_adamw", "small"),
        (3e-4, "original", "small"),
        (0.02, "original", None),
        (0.05, "original", None),
        (0.5, "original", "large"),
        (3e-4, "spectral", "small"),
        (0.01, "spectral", None),
        (3e-4, "none", "small"),
        (0.02, "none", None),
        (0.0, "original", None),
    ],
)
def test_learning_rates_are_judged_by_their_scale(dim, lr, scale, verdict):
    with torch.device("meta"):
        model = Llama(dim=dim)
    description = follow(model, lr=lr, adjust_lr=scale)
    assert kinds(description.warnings) == ([] if verdict is None else ["lr"])
    if verdict is not None:
        assert f"too {verdict}" in description.warnings[0].what


def test_a_learning_rate_that_suits_the_other_scale_is_told_so():
    with torch.device("meta"):
        model = Llama(dim=1024)
    assert 'adjust_lr="original"' in describe(model, lr=0.02).warnings[0].why
    told = describe(model, lr=3e-4, adjust_lr="original").warnings[0]
    assert 'adjust_lr="match_rms_adamw"' in told.why


def test_a_tensor_is_not_read_and_adamw_gets_a_rate_of_its_own():
    model, lr = Llama(), torch.tensor(5.0)
    description = describe(model, lr=lr)
    assert description.warnings == [] and "lr=lr" in description.code
    code = describe(model, adjust_lr="original").code
    space = run(code, model)
    assert [group["lr"] for group in space["optim"].param_groups] == [0.02, 3e-4]


def test_weights_stored_in_out_are_told_of_a_scale_that_is_not_symmetric():
    for model in (gpt2(dim=64), moe(transposed=True)):
        description = follow(model, adjust_lr="original", lr=0.02)
        assert "transposed" in kinds(description.warnings)
        assert 'adjust_lr="match_rms_adamw"' in description.code
    assert "transposed" not in kinds(describe(gpt2(), adjust_lr="none").warnings)
    assert describe(Llama(), adjust_lr="original").warnings == []


# What Muon would refuse, and what it is given by mistake


def test_what_muon_would_refuse_is_told():
    description = follow(resnet(), is_muon_func=everything)
    assert "refused" in kinds(description.warnings)
    assert "everything(name, param)" in description.code
    description = follow(of_layers("qkv", nn.Linear(16, 48)), split={"qkv": [7, 7]})
    assert "adds up to 14" in description.warnings[0].why
    assert "split" not in description.code  # which finds it by itself


def test_patterns_that_match_nothing_are_told():
    description = follow(Llama(), split={"wqkv": 4, "wq": 4})
    assert kinds(description.warnings) == ["split"]
    assert 'split={"wq": 4}' in description.code


def test_options_are_those_of_muon():
    with pytest.raises(TypeError, match="learning_rate"):
        describe(Llama(), learning_rate=1e-3)
    with pytest.raises(ValueError, match="momentum must be"):
        describe(Llama(), momentum=2)
    with pytest.raises(ValueError, match=r"nn\.Module"):
        describe([torch.randn(2, 2)])
    with pytest.raises(ValueError, match=r"0\.weight.*run the model once"):
        describe(nn.Sequential(nn.LazyLinear(3)))
    code = follow(Llama(), lr=2e-3, weight_decay=0.05, ns_dtype=torch.float32, ns_steps=5).code
    for argument in ("lr=2e-3", "weight_decay=0.05", "ns_dtype=torch.float32", "ns_steps=5"):
        assert argument in code


def test_a_model_without_matrices_is_told():
    description = describe(nn.ModuleDict({"tok": nn.Embedding(8, 4), "norm": nn.LayerNorm(4)}))
    assert kinds(description.warnings) == ["nothing"]
    description = describe(Llama().requires_grad_(False))
    assert "frozen" in description.warnings[0].what


def test_weights_of_few_digits_are_noted():
    (note,) = describe(Llama().bfloat16()).notes
    assert note.kind == "narrow" and "1/512" in note.why and "in bfloat16" in note.what
    weight = torch.tensor(0.996).bfloat16()
    assert weight * (1 - 1 / 500) != weight and weight * (1 - 1 / 520) == weight
    assert "1/4096" in describe(Llama().half()).notes[0].why


def test_adapters_and_frozen_weights_are_noted():
    model = Llama(vocabulary=100).requires_grad_(False)
    for layer in model.layers:
        layer.attention.wq = Adapted(layer.attention.wq)
    description = follow(model)
    assert description.warnings == [] and kinds(description.notes) == ["adapters"]
    assert len(names_of(description, "Muon")) == 4
    assert description.totals["frozen"]["share"] > 0.9


def test_quantized_complex_and_one_row_weights_are_noted():
    model = nn.ModuleDict(
        {"proj": nn.Linear(8, 8), "gate": nn.Linear(8, 1), "proj2": nn.Linear(8, 8)}
    )
    model["proj"].packed = nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)
    model["proj"].filter = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    description = follow(model)
    assert kinds(description.notes) == ["quantized", "complex", "vectors"]
    assert reasons(description)["proj.filter"] == "complex"


class Params4bit(nn.Parameter):
    """As bitsandbytes calls its own."""


def test_packed_and_partitioned_weights_are_known_by_what_their_libraries_call_them():
    model = Llama()
    packed = Params4bit(torch.randn(16, 16), requires_grad=False)
    model.layers[0].attention.wq.weight = packed
    assert kinds(describe(model).notes) == ["quantized"]
    for p in model.parameters():
        p.data, p.ds_id = torch.empty(0), 0  # as DeepSpeed leaves them
    assert "ZeRO-3" in describe(model).warnings[0].what


def test_a_parametrized_weight_is_not_computed():
    class Never(nn.Module):
        def forward(self, weight):
            raise AssertionError("computed")

    model = Llama()
    weights = [(model.layers[0].w1, "weight"), (model.output, "weight")]
    for module, name in weights:
        parametrize.register_parametrization(module, name, Never(), unsafe=True)
    assert describe(model).warnings == []


def test_a_rate_for_a_scale_by_number_is_written_in_two_digits():
    code = describe(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), adjust_lr=0.18).code
    assert "lr=1.1e-3," in code
