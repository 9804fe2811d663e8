"""`Muon.for_model` decides about all causal language models and mixtures of experts of transformers
as causal_families.json does, whole and by heads, and trains many of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import audits
from advice import arguments, kinds, run
from architectures import is_ended_by, text, train
from causal_families import (
    FAMILIES,
    PAGE,
    TABLE,
    build,
    cells,
    config_of,
    muons,
    parts,
    value_of,
)
from kernel import optimizer

EACH = pytest.mark.parametrize("name", FAMILIES)
TRAINED = [(name, mode) for name in FAMILIES for mode in FAMILIES[name].get("train", "").split()]
PAGE_LINES = PAGE.read_text().splitlines()
STEPS = 20
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def audited(request: pytest.FixtureRequest) -> Iterator[None]:
    params = getattr(request.node, "callspec", None)
    known = FAMILIES[params.params["name"]].get("findings", ()) if params else ()
    with audits.healthy(known, STEPS):
        yield


def make(name: str, model: nn.Module, per_head: bool) -> Any:
    """The optimizer, which warns of what the table says, and of nothing else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optim = optimizer.Muon.for_model(model, lr=1e-3, per_head=per_head)
    expected = FAMILIES[name].get("warns", ())
    expected = [start for start in expected if per_head or not start.startswith("per_head")]
    texts = [str(each.message) for each in caught]
    assert len(texts) == len(expected) and all(map(str.startswith, texts, expected)), texts
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


def test_every_family_of_the_release_is_in_the_table():
    assert hf.__version__ == TABLE["transformers"]
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(FAMILIES)
    known = {part.model_type for name in FAMILIES for part in parts(config_of(name))}
    for kind in CONFIG_MAPPING_NAMES:
        try:
            published = hf.AutoConfig.for_model(kind)
        except Exception:  # a class whose defaults contradict one another
            continue
        for part in parts(published):
            count = max(vars(part).get(key) or 0 for key in EXPERTS)
            assert count < 2 or part.model_type in known, part.model_type


@EACH
def test_parameters_splits_and_notes_are_those_that_were_read(name):
    family = FAMILIES[name]
    with torch.device("meta"):
        model = build(name)
    whole, by_head = (make(name, model, per_head) for per_head in (False, True))
    assert set(whole.names[0]) == muons(name, model)
    assert by_head.names == whole.names
    parted = {**TABLE["split"], **family.get("split", {})}
    heads = {**TABLE["per_head"], **family.get("per_head", {})}
    expected = {param: value_of(param, parted) for param in whole.names[0]}
    assert splits(whole) == expected
    assert splits(by_head) == {
        param: value_of(param, heads) or expected[param] for param in whole.names[0]
    }
    description = optimizer.describe(model)
    assert list(dict.fromkeys(kinds(description.warnings))) == family.get("warnings", "").split()
    assert list(dict.fromkeys(kinds(description.notes))) == family.get("notes", "").split()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        space = run(description.code, model)
        row = cells(model, optimizer)
    again = optimizer.describe(model, **arguments(description.code, space))
    assert set(kinds(again.warnings)) <= {"stack"}, again
    if "convolutions" not in kinds(description.warnings):  # the code gives Muon these, too
        assert space["optim"].names == whole.names
        assert space["optim"].defaults["split"] == whole.defaults["split"]
    assert any(f"`{name}`" in line and line.endswith(f"| {row}") for line in PAGE_LINES), row
    keys = [key for kind in ("split", "per_head") for key in family.get(kind, ())]
    keys += [key for kind in ("muon", "adamw") for key in family.get(kind, "").split()]
    names = dict(model.named_parameters())
    assert [key for key in keys if not any(is_ended_by(param, key) for param in names)] == []


@pytest.mark.parametrize("name, mode", TRAINED)
def test_for_model_trains_without_a_finding(name, mode):
    torch.manual_seed(0)
    model, batch = build(name), text()
    losses = train(model, batch, make(name, model, per_head=mode == "heads"), STEPS)
    assert losses[-1] < losses[0], losses
