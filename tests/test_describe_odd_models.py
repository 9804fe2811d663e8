"""What `describe` tells of models that name, own or configure things unusually."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from advice import everything, follow, follow_apart, kinds, names_of
from kernel import optimizer

describe = optimizer.describe

pytestmark = pytest.mark.usefixtures("one_thread")


def grouped_attention(**attributes: int) -> nn.Module:
    """Layers with Q, K and V of 8 heads and 2 key heads of 8 in one weight."""
    model = nn.Module()
    model.embed = nn.Embedding(50, 64)
    model.layers = nn.ModuleList(
        nn.ModuleDict({"qkv": nn.Linear(64, 96), "proj": nn.Linear(64, 64)}) for _ in range(2)
    )
    model.config = types.SimpleNamespace(n_head=8, **attributes)
    return model


def test_rows_of_grouped_queries_are_not_divided_into_thirds():
    known = follow_apart(grouped_attention(n_query_groups=2))
    assert 'split={"qkv": [64, 16, 16]}' in known.code
    unknown = describe(grouped_attention(n_kv=2))
    assert kinds(unknown.warnings) == ["fused"] and "# split=" in unknown.code


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 16) for n in (1000, 64, 256))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.Linear(256, 64), nn.Linear(64, 16))
        self.top = nn.Sequential(nn.Linear(80, 256), nn.Linear(256, 1))


class OneBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters, self.positions = nn.Embedding(100, 16), nn.Embedding(64, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.out = nn.Linear(16, 100)


def test_hidden_sizes_that_are_those_of_tables_make_no_heads():
    assert names_of(follow(Recommender()), "Muon") == [
        "bottom.0.weight",
        "bottom.1.weight",
        "bottom.2.weight",
        "top.0.weight",
    ]
    assert names_of(follow(OneBlock()), "Muon") == ["up.weight", "down.weight"]


def test_both_ends_of_a_one_hot_autoencoder_are_no_hidden_layers():
    model = nn.ModuleDict({"into": nn.Linear(100, 16), "mid": nn.Linear(16, 16)})
    model["back"] = nn.Linear(16, 100)
    model.config = {"vocab_size": 100}
    assert names_of(describe(model), "Muon") == ["mid.weight"]


class Raises:
    def __getattr__(self, name: str):
        raise KeyError(name)


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


@pytest.mark.parametrize(
    "make",
    [
        Raises,
        lambda: types.SimpleNamespace(text_config=torch.ones(2)),
        lambda: torch.ones(2),
        lambda: "args",
    ],
)
def test_configurations_that_raise_or_are_something_else_tell_nothing(make):
    assert kinds(follow_apart(Careless(make())).warnings) == ["fused"]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        normed = nn.Conv1d(32, 32, 9, groups=2)
        self.position = nn.utils.parametrizations.weight_norm(normed, dim=2)
        self.up = nn.ConvTranspose2d(32, 16, 3)
        self.pixels = nn.Conv2d(16, 3, 1)
        self.mix = nn.Linear(16, 16)


def test_parametrized_convolutions_are_known_and_those_to_pixels_are_left():
    description = follow(Decoder())
    (trap,) = description.warnings
    names = ("up.weight", "position.parametrizations.weight.original1")
    assert trap.kind == "convolutions" and sorted(trap.parameters) == sorted(names)
    optim = optimizer.Muon.for_model(Decoder(), lr=1e-3, convolutions=True)
    assert optim.defaults["split"] == {"position": 16}
    scaled = follow(Decoder(), adjust_lr="original", lr=0.02)
    assert "transposed" in kinds(scaled.warnings)


def test_what_repeats_is_printed_once():
    layers = [nn.ModuleDict({f"mix{i}": nn.Linear(8, 8, bias=False)}) for i in range(30)]
    model = nn.Sequential(*layers, *layers)
    description = describe(model)
    assert len(description.notes) == 30 and len(str(description).splitlines()) < 60
    many = nn.ModuleList(nn.Linear(8, 8) for _ in range(30))
    description = follow(many, is_muon_func=everything)
    assert kinds(description.warnings) == ["refused"]
    assert len(description.warnings[0].parameters) == 30


def test_names_and_models_that_are_hardly_any():
    model = nn.ModuleDict({"²": nn.Linear(4, 4), "³": nn.Linear(4, 4)})
    assert "².weight" in str(describe(model))
    assert "no parameters" in str(describe(nn.Module()))


def test_options_that_contradict_each_other_raise_as_they_do_in_muon():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="process_group"):
        describe(model, grad_reduce="mean")
    with pytest.raises(ValueError, match="ns_steps"):
        describe(model, ns_coefficients=[(1.5, -0.5, 0.0)], ns_steps=7)


def test_a_rate_that_is_too_large_is_told_which_is_not():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3)))
    (trap,) = describe(model, lr=0.01).warnings
    assert "up to about 7e-3" in trap.why  # of 0.2 · lr · √(3 · 4096) ≤ 16 %
