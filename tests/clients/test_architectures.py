"""`Muon.for_model` and `describe` decide about models as architectures.json and
causal_families.json do, which were read in the models' code; it trains them, whole and sharded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import architectures
import audits
import causal_families
import ranked
from advice import arguments, kinds, names_of, run
from architectures import ROWS, batch_of, key_of
from causal_families import FAMILIES, PAGE, TABLE, value_of
from kernel import optimizer

EVERY = {**ROWS, **FAMILIES}
TRAINED = [(name, "whole") for name in ROWS]
TRAINED += [(name, how) for name in FAMILIES for how in FAMILIES[name].get("train", "").split()]
ON_RANKS = ["llama", "qwen3_moe", "gpt2", "BertForMaskedLM", "T5ForConditionalGeneration"]
PAGE_LINES = PAGE.read_text().splitlines()
STEPS = 20
KINDS = ("muon", "adamw", "convolutions")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def audited(request: pytest.FixtureRequest) -> Iterator[None]:
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with audits.healthy(EVERY.get(params.get("name"), {}).get("findings", ()), STEPS):
        yield


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (architectures if name in ROWS else causal_families).build(name)


def words_of(name: str, key: str) -> list[str]:
    return EVERY[name].get(key, "").split()


def algorithms(name: str, model: nn.Module) -> dict[str, str]:
    """By name of each parameter that is trained: muon, adamw, or convolutions."""
    trained = [param for param, p in model.named_parameters() if p.requires_grad]
    if name in FAMILIES:
        muons = causal_families.muons(name, model)
        return {param: "muon" if param in muons else "adamw" for param in trained}
    kinds_of = {key: kind for kind in KINDS for key in words_of(name, kind)}
    shapes = dict(model.named_parameters())
    found = {param: key_of(param, kinds_of) for param in trained if shapes[param].ndim > 1}
    assert set(found.values()) == set(kinds_of), "a parameter has no key, or a key no parameter"
    return {param: kinds_of[found[param]] if param in found else "adamw" for param in trained}


def make(name: str, model: nn.Module, per_head: bool = False, convolutions: bool = False) -> Any:
    """The optimizer, which warns of what the table says, and of nothing else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"per_head": per_head, "convolutions": convolutions}
        optim = optimizer.Muon.for_model(model, lr=1e-3, **options)
    expected = [*EVERY[name].get("warns", ())]
    expected += EVERY[name].get("warns_per_head", ()) if per_head else ()
    texts = [str(each.message) for each in caught]
    assert len(texts) == len(expected), texts
    assert all(word in text for word, text in zip(expected, texts)), texts
    return optim


def splits(optim: Any) -> dict[str, Any]:
    """By name of each of Muon's parameters, how it is split, or None."""
    patterns = (optim.defaults["split"] or {}).items()
    return {
        name: next(
            (how for p, how in patterns if fnmatchcase(name, p) or p in name.split(".")), None
        )
        for name in optim.names[0]
    }


@pytest.mark.parametrize("name", EVERY)
def test_parameters_splits_and_traps_are_those_that_were_read(name):
    if name in ROWS:
        model, shared = build(name), {}
    else:
        with torch.device("meta"):
            model, shared = build(name), TABLE
    row, expected = EVERY[name], algorithms(name, model)
    convolutions = "convolutions" in words_of(name, "warnings")
    whole, by_head = (make(name, model, per_head, convolutions) for per_head in (False, True))
    assert [group["use_muon"] for group in whole.param_groups] == [True, False]
    muons = {param for param, kind in expected.items() if kind != "adamw"}
    if name in ROWS or not convolutions:  # the rule for families leaves out convolutions
        assert set(whole.names[0]) == muons
    assert set(whole.names[0]) | set(whole.names[1]) == set(expected)
    assert by_head.names == whole.names

    by_key = {key: {**shared.get(key, {}), **row.get(key, {})} for key in ("split", "per_head")}
    parted = {param: value_of(param, by_key["split"]) for param in whole.names[0]}
    heads = {param: value_of(param, by_key["per_head"]) or parted[param] for param in parted}
    assert splits(whole) == parted
    assert splits(by_head) == heads

    description = optimizer.describe(model)
    by_default = {param for param, kind in expected.items() if kind == "muon"}
    assert set(names_of(description, "Muon")) == by_default
    assert list(dict.fromkeys(kinds(description.warnings))) == words_of(name, "warnings")
    assert list(dict.fromkeys(kinds(description.notes))) == words_of(name, "notes")
    unsure = [p for note in description.notes if note.kind == "unsure" for p in note.parameters]
    assert sorted(param.removesuffix(".weight") for param in unsure) == words_of(name, "unsure")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `make` has seen them
        space = run(description.code, model)
    assert space["optim"].names == whole.names
    assert space["optim"].defaults["split"] == whole.defaults["split"]
    again = optimizer.describe(model, **arguments(description.code, space))
    assert set(kinds(again.warnings)) <= {"stack", "nothing"}, again
    if name in FAMILIES:
        parts = whole.defaults["split"], by_head.defaults["split"], kinds(description.warnings)
        line = f"| {causal_families.cells(*parts)}"
        assert any(f"`{name}`" in each and each.endswith(line) for each in PAGE_LINES), line
    keys = [key for kind in ("split", "per_head") for key in row.get(kind, ())]
    keys += words_of(name, "muon") + words_of(name, "adamw")
    assert [key for key in keys if not any(key_of(param, [key]) for param in expected)] == []


def test_every_family_of_the_release_is_in_the_table():
    assert hf.__version__ == TABLE["transformers"]
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(FAMILIES)
    parts, config_of = causal_families.parts, causal_families.config_of
    known = {part.model_type for name in FAMILIES for part in parts(config_of(name))}
    for kind in CONFIG_MAPPING_NAMES:
        try:
            published = hf.AutoConfig.for_model(kind)
        except Exception:  # a class whose defaults contradict one another
            continue
        for part in parts(published):
            count = max(vars(part).get(key) or 0 for key in EXPERTS)
            assert count < 2 or part.model_type in known, part.model_type


def train(model: nn.Module, optim: torch.optim.Optimizer, batch: dict[str, Any]) -> list[float]:
    """Losses of steps with one batch, none of which warns."""
    losses = []
    for _ in range(STEPS):
        hf.set_seed(1)  # the same dropout, masks, noise and targets in each step
        loss = loss_of(model(**batch))
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss; where it has none, how far all outputs are from random targets."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    leaves = tree_leaves(outputs)
    given = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum((t - torch.randn_like(t)).square().mean() for t in given if t.is_floating_point())


@pytest.mark.parametrize("name, how", TRAINED)
def test_for_model_trains_without_a_warning_or_a_finding(name, how):
    model = build(name)
    batch, convolutions = batch_of(EVERY[name]), "convolutions" in EVERY[name].get("warnings", "")
    losses = train(model, make(name, model, how == "heads", convolutions), batch)
    assert losses[-1] < losses[0], losses


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
    """For each model Muon's parameters, the ``split``, and the losses."""
    dist.init_process_group("gloo")
    found = {}
    for name in ON_RANKS:
        model = build(name)
        shard(model)
        optim = make(name, model)
        torch.manual_seed(dist.get_rank())
        losses = train(model, optim, batch_of(EVERY[name]))
        found[name] = optim.names[0], optim.defaults["split"], losses
    return found


def test_sharded_models_train_by_the_same_decisions_as_whole_ones(tmp_path):
    for name, (muons, split, losses) in ranked.run(ranks_train, tmp_path).items():
        whole = make(name, build(name))
        assert (muons, split) == (whole.names[0], whole.defaults["split"])
        assert losses[-1] < losses[0], losses
