"""`Muon.for_model` decides as the table of architectures does, and trains all of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import audits
from advice import names_of, run
from architectures import KINDS, Architecture, train
from kernel import optimizer
from other_architectures import OTHERS
from transformers_architectures import TRANSFORMERS
from vision_architectures import TIMM, TORCHVISION

ARCHITECTURES: dict[str, Architecture] = {**TRANSFORMERS, **TIMM, **TORCHVISION, **OTHERS}
EACH = pytest.mark.parametrize("name", ARCHITECTURES)
STEPS = 20

# What an audit finds rightly in such small models, fresh, with two or three examples in each batch.
UNUSED = "had no gradient"
CUT_OFF = "had gradients of zeros"  # one key or one class: what chooses among them has no gradient
SMALL = "updates over 20 times the median"  # of matrices that are almost zero at first
NONE_TRAINED = "no matrix was orthogonalized"  # vectors and prompts only
# Of two or three examples. Which matrices have such updates depends on the machine: bf16 arithmetic
# adds noise of full rank to them, and fp32 arithmetic, with which they were found, hardly any.
LOW_RANK = "updates of a rank under 0.1"
FEW_EXAMPLES = (
    "hubert idefics2 timm_siglip timm_cait timm_vgg timm_coatnet mobilenet_v3_small "
    "unet dit pixart flux sana perceptron"
)
FOUND = {
    **{name: [LOW_RANK] for name in FEW_EXAMPLES.split()},
    "blip2": [SMALL, LOW_RANK],
    "fnet": [UNUSED],
    "wav2vec2_conformer": [UNUSED],
    "detr": [CUT_OFF],
    "sam": [CUT_OFF, SMALL],
    "timm_gmlp": [SMALL],
    "sd3": [CUT_OFF, LOW_RANK],
    "ia3": [NONE_TRAINED],
    "oft": [NONE_TRAINED],
    "prompt_tuning": [NONE_TRAINED],
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def audited(request: pytest.FixtureRequest) -> Iterator[None]:
    with audits.healthy(FOUND.get(request.node.callspec.params["name"], ()), STEPS):
        yield


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ARCHITECTURES[name].build()


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """What may be Muon's; the table says nothing of the rest."""
    params = model.named_parameters()
    return {name: p for name, p in params if p.requires_grad and p.ndim > 1}


def make(name: str, model: nn.Module) -> Any:
    """The optimizer, which warns of what the table says, and of nothing else."""
    architecture = ARCHITECTURES[name]
    with warns_of(architecture.warning):
        convolutions = bool(architecture.convolutions)
        return optimizer.Muon.for_model(model, lr=1e-3, convolutions=convolutions)


@contextlib.contextmanager
def warns_of(warning: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(each.message) for each in caught]
    assert len(texts) == bool(warning) and all(text.startswith(warning) for text in texts), texts


@EACH
def test_each_parameter_goes_where_the_table_says(name):
    architecture, model = ARCHITECTURES[name], build(name)
    expected = {param: architecture.algorithm_of(param) for param in matrices(model)}
    muons = {param for param, kind in expected.items() if kind != "adamw"}
    optim = make(name, model)
    assert [group["use_muon"] for group in optim.param_groups] == [True, False]
    assert set(optim.names[0]) == muons
    trained = {param for param, p in model.named_parameters() if p.requires_grad}
    assert set(optim.names[1]) == trained - muons
    description = optimizer.describe(model)
    by_default = {param for param, kind in expected.items() if kind == "muon"}
    assert set(names_of(description, "Muon")) == by_default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `make` has seen them
        advised = run(description.code, model)["optim"]
    assert advised.names == optim.names and advised.defaults["split"] == optim.defaults["split"]


@EACH
def test_of_the_contested_ones_describe_is_unsure(name):
    notes = [note for note in optimizer.describe(build(name)).notes if note.kind == "unsure"]
    unsure = [param.removesuffix(".weight") for note in notes for param in note.parameters]
    assert sorted(unsure) == sorted(ARCHITECTURES[name].keys("unsure"))


@EACH
def test_the_table_has_a_key_for_each_parameter_and_no_other(name):
    architecture = ARCHITECTURES[name]
    used = {architecture.key_of(param) for param in matrices(build(name))}
    assert used == {key for kind in KINDS for key in architecture.keys(kind)}


@EACH
def test_for_model_trains_without_a_warning_or_a_finding(name):
    model = build(name)
    batch = ARCHITECTURES[name].batch()
    losses = train(model, batch, make(name, model), STEPS, loss_of)
    assert losses[-1] < losses[0], losses


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss; where it has none, how far all outputs are from random targets."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    return sum((out - torch.randn_like(out)).square().mean() for out in tensors(outputs))


def tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested outputs that depend on the model's weights."""
    if isinstance(outputs, torch.Tensor):
        if outputs.requires_grad and outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, (tuple, list)):
        for output in outputs:
            yield from tensors(output)
    elif isinstance(outputs, dict):
        yield from tensors(list(outputs.values()))
