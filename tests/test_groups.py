"""Which parameters go to Muon: by name, shape and module, through wrappers, ties and freezing."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize

from advice import take_a_step
from kernel import optimizer
from ranks import on_ranks
from wrong_input import parameter

Muon = optimizer.Muon
default_is_muon = optimizer.default_is_muon
get_default_muon_param_groups = optimizer.get_default_muon_param_groups

pytestmark = pytest.mark.usefixtures("one_thread")

KEYS = ["experts"]
STACKS = "model.layers.0.mlp.experts.gate_up_proj"
EMBEDDINGS_AND_HEADS = """
    model.embed_tokens.weight tok_embeddings.weight transformer.wte.weight shared.weight
    gpt_neox.embed_in.weight embed_out.weight value_embeds.1.weight token_emb.weight emb.weight
    word_embedding.weight bert.embeddings.word_embeddings.weight token_embedding_table.weight
    transformer.wpe.weight position_embedding_table.weight pos_embed positional_embedding
    pos decoder.positional_encoding
    vision.patch_embed.proj.weight lm_head.weight output.weight to_logits.weight logits.weight
    net.to_logits.1.weight model.layers.61.shared_head.head.weight head.weight score.weight
    base_model.model.lm_head.base_layer.weight classifier.weight classifier.out_proj.weight
    qa_outputs.weight cls.seq_relationship.weight blocks.0.attention.output.weight
    base_model.model.score.modules_to_save.default.weight
"""
# Of two dimensions, and no matrices.
NO_MATRICES = """
    encoder.layers.0.self_attn.pos_bias_u stages.0.attn.attention_biases model.level_embed
    resampler.latents blocks.0.audio_scale_shift_table layers.0.mamba.D layers.0.attn.rel_pos_h
    backbone.layers.0.mixer.A_log layers.0.attn.relative_position_bias_table
    q_proj.oft_R.default.weight model.layers.0.mlp.experts.gate_up_proj_bias
"""
# Some are called nearly as heads are.
MATRICES = """
    model.layers.0.self_attn.q_proj.weight weight decoder.weight blocks.0.fc_out.weight
    transformer.h.0.attn.c_q.weight blocks.0.attn.proj_out.weight bert.pooler.dense.weight
    bert.encoder.layer.0.attention.output.dense.weight roberta.lm_head.dense.weight
    classifier.dense.weight encoder.block.0.layer.0.SelfAttention.q.weight
    layers.0.head_proj.weight layers.0.multihead.out_proj.weight encoder.output.proj.weight
    head.mlp.fc1.weight bert.encoder.layer.0.output.dense.weight layers.0.output.dense.weight
    model.layers.11.mlp.gate_proj.weight pre_logits.fc1.weight time_emb_proj.weight
    blocks.0.emb_layers.1.weight transformer.h.0.attn.c_attn.weight blocks.0.attn.qkv.weight
    in_proj_weight transformer.h.3.attn.ve_gate.weight attention.in_proj_weight
    projector.mm_input_projection_weight pre_classifier.weight model.layers.61.eh_proj.weight
    model.layers.0.self_attn.kv_a_proj_with_mqa.weight
"""
# Shape, expert_keys, whether parameters of these names are Muon's. Families: Llama, GPT-2 and NeoX,
# nanochat, BERT, T5, ViT, Mixtral, Qwen, DeepSeek, tutorials', and what only sounds like theirs.
NAMES: list[tuple[tuple[int, ...], list[str] | None, bool, str]] = [
    ((32, 8), None, False, EMBEDDINGS_AND_HEADS),
    ((4, 16), None, False, NO_MATRICES),
    ((4, 16), KEYS, False, f"{STACKS}_bias layers.0.moe.experts.mlp1_bias"),
    ((32, 1), None, False, "q_proj.ia3_l.default"),
    ((8, 1), None, False, "q_proj.lora_E.default"),
    ((8,), None, False, "layers.0.input_layernorm.weight weight layers.0.q_proj.bias lambdas"),
    ((4,), KEYS, False, "experts.7.w1.bias model.layers.3.mlp.gate.e_score_correction_bias"),
    ((), None, False, "logit_scale"),
    ((12, 16, 1, 1), None, False, "decode.low_classifier.weight"),
    ((8, 3, 4, 4), None, False, "embeddings.patch_embeddings.projection.weight conv1.weight"),
    ((1, 17, 8), None, False, "pos_embed cls_token"),
    ((8, 1, 4), KEYS, False, "conv1d.weight"),
    ((16, 8), None, True, MATRICES),
    ((1, 28), None, True, "q_proj.lora_A.default.weight"),
    ((0, 8), None, True, "layers.0.wq.weight"),
    ((1, 8), KEYS, True, "mlp.shared_expert_gate.weight block_sparse_moe.experts.7.w1.weight"),
    ((4, 8, 16), KEYS, True, f"{STACKS} experts"),
    ((4, 8, 16), ["mlp.experts"], True, STACKS),
    ((4, 8, 16), ["other", "experts"], True, STACKS),
    ((2, 4, 8, 16), KEYS, True, "layers.0.moe.experts.w1.weight"),
    *(((4, 8, 16), keys, False, STACKS) for keys in (None, [], ["expert"])),
    ((4, 8, 16), KEYS, False, "model.layers.0.mlp.my_experts.w1"),
]
TABLE = [(name, *decides) for *decides, names in NAMES for name in names.split()]


@pytest.mark.parametrize("name, shape, expert_keys, expected", TABLE)
def test_each_name_and_shape_goes_where_it_belongs(name, shape, expert_keys, expected):
    assert default_is_muon(name, parameter(*shape), expert_keys) is expected
    assert default_is_muon(name, torch.empty(shape, device="meta"), expert_keys) is expected
    complex_parameter = torch.empty(shape, dtype=torch.complex64, device="meta")
    assert default_is_muon(name, complex_parameter, expert_keys) is False


@pytest.mark.parametrize(
    "wrapped",
    ["_orig_mod.{}", "module.{}", "module._orig_mod.{}", "_orig_mod.module.{}"]
    + ["_fsdp_wrapped_module.{}"],
)
def test_wrapper_parts_of_a_name_are_not_its_owner(wrapped):
    for name, shape, expert_keys, expected in TABLE:
        p: Any = torch.empty(shape, device="meta")
        assert default_is_muon(wrapped.format(name), p, expert_keys) is expected, name
        *path, last = name.split(".")
        inner = ".".join([*path, "_checkpoint_wrapped_module", last])
        assert default_is_muon(inner, p, expert_keys) is expected, inner


# Models


def names_of(groups: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Names of Muon's and of AdamW's parameters."""
    muon, adamw = groups
    assert muon["use_muon"] is True and adamw["use_muon"] is False
    return muon["names"], adamw["names"]


def assert_aligned(groups: list[dict[str, Any]], model: nn.Module) -> None:
    """Every trainable parameter of the model is there once, under its own name."""
    expected = {name: id(p) for name, p in model.named_parameters() if p.requires_grad}
    assert all(len(group["names"]) == len(group["params"]) for group in groups)
    pairs = [pair for group in groups for pair in zip(group["names"], map(id, group["params"]))]
    assert len(pairs) == len(expected) and dict(pairs) == expected


def assert_trains(groups: list[dict[str, Any]], **options: Any) -> None:
    """Muon takes the groups and updates all their parameters."""
    take_a_step(Muon(groups, **options))


def module_of(parameters: dict[str, nn.Parameter]) -> nn.Module:
    """A model with parameters of these names."""
    root = nn.Module()
    for name, param in parameters.items():
        *path, last = name.split(".")
        owner = root
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, param)
    return root


@pytest.mark.parametrize("expert_keys", [None, KEYS])
def test_a_model_is_divided_as_its_names_are(expert_keys):
    shapes = {name: shape for name, shape, keys, _ in TABLE if keys == expert_keys}
    leaves = {
        name: parameter(*shape)
        for name, shape in shapes.items()
        if not any(other.startswith(f"{name}.") for other in shapes)
    }
    model = module_of(leaves)
    groups = get_default_muon_param_groups(model, expert_keys=expert_keys)
    muon, _ = names_of(groups)
    assert set(muon) == {n for n, p in leaves.items() if default_is_muon(n, p, expert_keys)}
    assert_aligned(groups, model)
    assert_trains(groups)


class Llama(nn.Module):
    def __init__(self, tied: bool = False, head_first: bool = False):
        super().__init__()
        if head_first:
            self.lm_head = nn.Linear(4, 16, bias=False)
        self.tok = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"wq": nn.Linear(4, 4, bias=False), "w1": nn.Linear(4, 8), "norm": nn.LayerNorm(4)}
            )
            for _ in range(2)
        )
        if not head_first:
            self.lm_head = nn.Linear(4, 16, bias=False)
        if tied:
            self.lm_head.weight = self.tok.weight


def with_frozen(*paths: str, tied: bool = False) -> nn.Module:
    model = Llama(tied)
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Llama(tied=True)


def with_embeddings() -> nn.Module:
    names = ("anything", "relative_attention_bias", "codebook", "value_embeds", "position")
    many = nn.ModuleDict({"0": nn.Embedding(8, 4), "1": nn.EmbeddingBag(8, 4)})
    tables = {name: nn.Embedding(8, 4) for name in names}
    return nn.ModuleDict({**tables, "many": many, "proj": nn.Linear(4, 4)})


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def doubled(path: str) -> nn.Module:
    model = Llama()
    parametrize.register_parametrization(model.get_submodule(path), "weight", Double())
    return model


def tied_and_doubled() -> nn.Module:
    model = nn.ModuleDict({"projection": nn.Linear(4, 16, bias=False), "tok": nn.Embedding(16, 4)})
    model["tok"].weight = model["projection"].weight
    parametrize.register_parametrization(model["tok"], "weight", Double())
    return model


def normalized(normalize: Callable[[nn.Module], Any]) -> nn.Module:
    model = Llama()
    for module in (model.tok, model.lm_head, model.layers[1]["wq"]):
        normalize(module)
    return model


class Head(nn.Module):
    """Some layers and what comes after them."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"w": nn.Linear(32, 32)}) for _ in range(2)])
        for name, module in modules.items():
            self.add_module(name, module)


def with_magnitudes() -> nn.Module:
    model = Head(head=nn.Linear(32, 10))
    parametrizations.weight_norm(model.layers[0]["w"])
    parametrizations.weight_norm(model.head)
    nn.utils.weight_norm(model.layers[1]["w"])
    return model


def with_adapters() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(100, 32), "up": nn.Linear(32, 64)})
    model["embed"].requires_grad_(False)
    model["embed"].lora_embedding_A = nn.ParameterDict({"default": torch.ones(4, 100)})
    model["embed"].lora_embedding_B = nn.ParameterDict({"default": torch.ones(32, 4)})
    return model


MUONS = ["layers.0.wq.weight", "layers.0.w1.weight", "layers.1.wq.weight", "layers.1.w1.weight"]
FROZEN = ["layers.1.w1.bias", "layers.1.norm.weight", "layers.1.norm.bias", "lm_head.weight"]
VECTORS = [f"layers.{i}.{name}" for i in (0, 1) for name in ("w1.bias", "norm.weight", "norm.bias")]
TOK, LM = ["tok.weight"], ["lm_head.weight"]
DOUBLED = ["layers.0.wq.parametrizations.weight.original", *MUONS[1:]]
WN = [*MUONS[:2], MUONS[3], "layers.1.wq.parametrizations.weight.original1"]
SN = [*MUONS[:2], MUONS[3], "layers.1.wq.parametrizations.weight.original"]
LAYERS = ["layers.0.w.weight", "layers.1.w.weight"]
MAGNITUDES = ["layers.0.w.parametrizations.weight.original1", "layers.1.w.weight_v"]

# A model, names of what Muon trains, and in some cases of what AdamW does.
MODELS: dict[str, tuple[Any, ...]] = {
    "order": (Llama, MUONS, [*TOK, *VECTORS, *LM]),
    "tied": (lambda: Llama(tied=True), MUONS, [*TOK, *VECTORS]),
    "tied to a head": (lambda: Llama(tied=True, head_first=True), MUONS, [*LM, *VECTORS]),
    "tied, on meta": (on_meta, MUONS, [*TOK, *VECTORS]),
    "frozen": (lambda: with_frozen("tok", "layers.0"), MUONS[2:], FROZEN),
    "tied, frozen": (lambda: with_frozen("tok", tied=True), MUONS, VECTORS),
    "embeddings": (with_embeddings, ["proj.weight"]),
    "matrix": (lambda: nn.Linear(4, 4, bias=False), ["weight"], []),
    "embedding": (lambda: nn.Embedding(4, 4), [], ["weight"]),
    "vectors": (lambda: nn.LayerNorm(4), [], ["weight", "bias"]),
    "all frozen": (lambda: nn.Linear(4, 4).requires_grad_(False), [], []),
    "no parameters": (nn.ReLU, [], []),
    "parametrized": (lambda: doubled("layers.0.wq"), DOUBLED),
    "parametrized head": (lambda: doubled("lm_head"), MUONS),
    "parametrized embedding": (lambda: doubled("tok"), MUONS),
    "tied, parametrized": (tied_and_doubled, [], ["projection.weight"]),
    "weight norm": (lambda: normalized(parametrizations.weight_norm), WN),
    "spectral norm": (lambda: normalized(parametrizations.spectral_norm), SN),
    "magnitudes": (with_magnitudes, MAGNITUDES),
    "adapters": (with_adapters, ["up.weight"]),
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*weight_norm", "ignore:no parameter of this model is Muon's")
def test_modules_decide_and_muon_takes_the_groups(name):
    make, muon, *adamw = MODELS[name]
    model = make()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    groups = get_default_muon_param_groups(model)
    assert set(names_of(groups)[0]) == set(muon)
    if adamw:
        assert names_of(groups) == (muon, *adamw)
    assert_aligned(groups, model)
    assert before.keys() == dict(model.named_parameters()).keys()
    if "meta" not in name:
        assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())
        assert_trains(groups)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("first", [False, True])
def test_what_is_tied_to_an_embedding_is_never_muons(embedding, first):
    projection, tokens = nn.Linear(4, 16, bias=False), embedding(16, 4)
    tokens.weight = projection.weight
    modules = {"projection": projection, "tokens": tokens, "other": nn.Linear(4, 4, bias=False)}
    model = nn.ModuleDict(
        {name: modules[name] for name in (modules if first else [*modules][::-1])}
    )
    groups = get_default_muon_param_groups(model, is_muon_func=lambda name, p: p.ndim == 2)
    tied = "projection.weight" if first else "tokens.weight"
    assert names_of(groups) == (["other.weight"], [tied])


# Wrappers


class Mixer(nn.Module):
    """With a weight of its own beside that of a layer called ``module``, as wrappers call it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 12, bias=False)
        self.weight = nn.Parameter(torch.randn(12, 6))
        self.experts = nn.Parameter(torch.randn(3, 6, 6))


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def wrapped_layers(model: Any) -> nn.Module:
    if isinstance(model, Llama):
        for index, layer in enumerate(model.layers):
            layer["wq"] = checkpoint_wrapper(compiled(layer["wq"]))
            model.layers[index] = checkpoint_wrapper(layer)
        model.lm_head, model.tok = compiled(model.lm_head), checkpoint_wrapper(model.tok)
        return model
    return nn.DataParallel(nn.Sequential(checkpoint_wrapper(model[0]), compiled(model[1])))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "torch.compile": compiled,
    "DataParallel": nn.DataParallel,
    "checkpoint_wrapper": checkpoint_wrapper,
    "all of them": lambda model: checkpoint_wrapper(compiled(nn.DataParallel(model))),
    "of layers": wrapped_layers,
}


def assert_same_groups(wrap: Callable[[nn.Module], nn.Module], model: nn.Module) -> None:
    expected, wrapped = get_default_muon_param_groups(model), wrap(model)
    groups, keys = get_default_muon_param_groups(wrapped), wrapped.state_dict(keep_vars=True)
    for group, other in zip(groups, expected):
        assert list(map(id, group["params"])) == list(map(id, other["params"]))
        assert all(keys[name] is p for name, p in zip(group["names"], group["params"]))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_gives_the_groups_of_the_model_under_its_own_keys(wrap):
    assert_same_groups(wrap, Llama())


@on_ranks(1)
def test_a_model_in_ddp_gives_the_groups_of_the_model() -> None:
    assert_same_groups(nn.parallel.DistributedDataParallel, Llama(tied=True))


@pytest.mark.parametrize(
    "is_muon", [default_is_muon, lambda name, p, keys: default_is_muon(name, p, keys)]
)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_names_of_a_wrapped_model_mean_the_same_parameters_as_keys_and_patterns(wrap, is_muon):
    model = nn.Sequential(Mixer(), Mixer())
    first, second = model
    wrapped = wrap(model)
    name_of = {id(p): name for name, p in wrapped.named_parameters()}
    keys = {
        "expert_keys": [name_of[id(second.experts)]],
        "adamw_keys": [name_of[id(second.weight)]],
    }
    groups = get_default_muon_param_groups(wrapped, is_muon, **keys)
    params = [first.weight, first.module.weight, second.experts, second.module.weight]
    assert list(map(id, groups[0]["params"])) == list(map(id, params))
    optim = Muon(groups, split={name_of[id(second.module.weight)]: 4})
    assert [row["matrices"] for row in optim.summary().rows[:4]] == [1, 1, 3, 3]


@on_ranks(1)
def test_a_sequential_that_fully_shard_has_made_a_class_of_its_own_keeps_its_head() -> None:
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40))
    before, _ = get_default_muon_param_groups(model)
    fully_shard(model)
    after, _ = get_default_muon_param_groups(model)
    assert before["names"] == after["names"] == ["1.weight"]


# Experts


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = parameter(3, 4, 8)
        self.gate_up_proj_bias = parameter(3, 8)
        self.down_proj = parameter(3, 4, 4)


def moe() -> nn.Module:
    shared = nn.Linear(4, 4, bias=False)
    return nn.ModuleDict(
        {"experts": Experts(), "shared_expert": shared, "conv": nn.Conv1d(4, 4, 2)}
    )


def test_groups_made_with_expert_keys_are_taken_as_they_are():
    for keys in (["experts"], ("experts",), "experts"):
        groups = get_default_muon_param_groups(moe(), expert_keys=keys)
        muon, adamw = names_of(groups)
        assert muon == ["experts.gate_up_proj", "experts.down_proj", "shared_expert.weight"]
        assert adamw == ["experts.gate_up_proj_bias", "conv.weight", "conv.bias"]
        assert_trains(groups)
    assert_trains(groups, expert_keys=["experts"])


def test_without_expert_keys_stacked_experts_are_adamws_and_a_warning_has_the_keys():
    with pytest.warns(UserWarning, match=r"gate_up_proj.*expert_keys=\['experts'\]"):
        groups = get_default_muon_param_groups(moe())
    muon, adamw = names_of(groups)
    assert muon == ["shared_expert.weight"]
    assert {"experts.gate_up_proj", "experts.down_proj"} <= set(adamw)
    model = nn.ModuleDict({"ffn": nn.ParameterDict({"w1": torch.ones(4, 8, 8)})})
    model.config = {"num_experts": 4}
    with pytest.warns(UserWarning, match=r"100%.*ffn\.w1\..*expert_keys=\['w1'\]"):
        get_default_muon_param_groups(model)


def test_experts_that_are_named_or_meant_for_adamw_are_not_warned_of():
    with warnings.catch_warnings(action="error"):
        get_default_muon_param_groups(moe(), expert_keys=["experts"])
        muon, _ = get_default_muon_param_groups(moe(), expert_keys=[])
        get_default_muon_param_groups(moe(), lambda name, p: p.ndim == 2)
    assert muon["names"] == ["shared_expert.weight"]


# Functions and keys of the user's


def of_two(name: str, p: torch.Tensor) -> bool:
    return p.ndim == 2 and "wq" in name


def of_key(key: str, name: str, p: torch.Tensor, expert_key: str = "wq") -> bool:
    return p.ndim == 2 and key in name and expert_key == "wq"


RULES: dict[str, Callable[..., bool]] = {
    "two arguments": of_two,
    "three": lambda name, p, expert_keys: expert_keys == ["wq"] and of_two(name, p),
    "any": lambda *arguments: arguments[2] == ["wq"] and of_two(*arguments[:2]),
    "a default": lambda name, p, key="wq": of_key(key, name, p),
    "expert_keys by default": lambda name, p, expert_keys=(): of_key(expert_keys[0], name, p),
    "keyword-only": lambda name, p, *, key="wq": of_key(key, name, p),
    "partial of the first": functools.partial(of_key, "wq"),
}


@pytest.mark.parametrize("is_muon", RULES.values(), ids=RULES)
@pytest.mark.filterwarnings("ignore:expert_keys")
def test_a_custom_function_gets_what_it_takes(is_muon):
    model = Llama()
    groups = get_default_muon_param_groups(model, is_muon, expert_keys=["wq"])
    assert names_of(groups)[0] == ["layers.0.wq.weight", "layers.1.wq.weight"]
    assert_aligned(groups, model)


@pytest.mark.filterwarnings("ignore:no parameter of this model is Muon's")
def test_a_custom_function_gets_names_without_wrapper_parts_unless_two_would_be_one():
    seen: list[str] = []
    model = compiled(nn.DataParallel(checkpoint_wrapper(Llama())))
    get_default_muon_param_groups(model, lambda name, p: bool(seen.append(name)))
    assert seen == [name for name, _ in Llama().named_parameters() if name != "tok.weight"]
    seen.clear()
    get_default_muon_param_groups(Mixer(), lambda name, p: bool(seen.append(name)))
    assert seen == ["weight", "experts", "module.weight"]


def test_a_partial_of_the_default_keeps_its_expert_keys():
    is_muon = functools.partial(default_is_muon, expert_keys=["experts"])
    muon, _ = names_of(get_default_muon_param_groups(moe(), is_muon))
    assert muon == ["experts.gate_up_proj", "experts.down_proj", "shared_expert.weight"]


def test_a_custom_function_that_takes_a_vector_or_a_kernel_for_muon_is_told_by_muon():
    groups = get_default_muon_param_groups(Llama(), lambda name, p: True)
    with pytest.raises(ValueError, match=r"layers\.0\.w1\.bias.*use_muon=False"):
        Muon(groups)
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 8, 3), "head": nn.Linear(8, 2)})
    groups = get_default_muon_param_groups(model, lambda name, p: p.ndim == 4)
    assert names_of(groups) == (["conv.weight"], ["conv.bias", "head.weight", "head.bias"])
    assert_trains(groups, flatten=True)
    with pytest.raises(ValueError, match=r"conv\.weight.*flatten"):
        Muon(groups)


def test_convolutions_are_muons_by_one_argument():
    # Of pixels, good, of four channels, of few outputs, depthwise.
    layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)]
    layers += [nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(5, 5, 3)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 16), nn.Linear(16, 10))
    for rule in (default_is_muon, lambda name, p: p.ndim == 2 and len(p) > 10):
        groups = get_default_muon_param_groups(model, rule, convolutions=True)
        assert names_of(groups)[0] == ["1.weight", "5.weight", "7.weight"]
        assert_aligned(groups, model)
        assert_trains(groups)
    muon, _ = get_default_muon_param_groups(model, adamw_keys=["1"], convolutions=True)
    assert muon["names"] == ["5.weight", "7.weight"]


def test_a_model_without_a_matrix_of_muons_is_warned_of():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 10))
    with pytest.warns(UserWarning, match="Muon") as caught:
        muon, adamw = get_default_muon_param_groups(model)
    assert len(caught) == 1 and muon["names"] == [] and "3.weight" in adamw["names"]


def test_adamw_keys_name_what_adamw_trains():
    model = Head(router=nn.Linear(32, 8))
    model.layers[0]["router"] = nn.Linear(32, 8)
    muon, _ = get_default_muon_param_groups(model, adamw_keys="router")
    assert muon["names"] == LAYERS
    muon, _ = get_default_muon_param_groups(model, lambda name, p: p.ndim > 1, adamw_keys=["w"])
    assert muon["names"] == ["layers.0.router.weight", "router.weight"]
    with pytest.warns(UserWarning, match="adamw_keys.*'gate'"):
        get_default_muon_param_groups(model, adamw_keys=["gate"])


def test_groups_are_plain_and_take_options_adamws_rate_and_no_decay_of_vectors():
    model = Head(head=nn.Linear(32, 10))
    groups = get_default_muon_param_groups(model)
    for group in groups:
        assert type(group) is dict and type(group["params"]) is list
        assert isinstance(group["names"], list)
        assert type(copy.deepcopy(group["names"])) is list  # without the model that names remember
    groups[0].update(lr=0.02, beta2=0.9)
    assert [group["beta2"] for group in Muon(groups).param_groups] == [0.9, None]
    muon, adamw = get_default_muon_param_groups(model, adamw_lr=1e-4)
    assert "lr" not in muon and adamw["lr"] == 1e-4 and "weight_decay" not in adamw
    muon, adamw, vectors = get_default_muon_param_groups(model, adamw_lr=1e-4, decay_vectors=False)
    assert adamw["names"] == ["head.weight"] and not vectors["use_muon"]
    assert vectors["names"] == [name for name, p in model.named_parameters() if p.ndim == 1]
    optim = optimizer.Muon([muon, adamw, vectors], lr=0.02, weight_decay=0.1)
    assert [g["lr"] for g in optim.param_groups] == [0.02, 1e-4, 1e-4]
    assert [g["weight_decay"] for g in optim.param_groups] == [0.1, 0.1, 0.0]
