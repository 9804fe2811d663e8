"""What `describe` says of other architectures of transformers than causal_families.json has, built
small, on the meta device.

Each family's traps were read one by one; a change of them is to be read as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from advice import arguments, kinds, run
from kernel import optimizer
from transformers_architectures import TRANSFORMERS


@dataclass(frozen=True)
class Expected:
    """Of a family, kinds of warnings and notes, and the ``split`` that ``Muon.for_model`` finds.
    The table of architectures has the class of each parameter."""

    warnings: str = ""
    notes: str = ""
    split: dict[str, Any] | None = None


EXPECTED: dict[str, Expected] = {
    "bert": Expected(notes="tied shared"),
    "bert_untied": Expected(),
    "bert_classifier": Expected(),
    "roberta": Expected(notes="tied shared"),
    "roberta_classifier": Expected(),
    "electra": Expected(),
    "albert": Expected(notes="tied shared"),
    "t5": Expected(notes="tied"),
    "bart": Expected(notes="tied"),
    "whisper": Expected(notes="tied"),
    "vit": Expected(),
    "swin": Expected(),
    "clip": Expected(),
    "qwen2_vl": Expected(split={"qkv": [64, 64, 64]}),
    "resnet": Expected(warnings="convolutions"),
}


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return TRANSFORMERS[name].build()


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.filterwarnings("ignore")  # they are those that `describe` tells
def test_traps_and_what_is_found_are_those_that_were_read(name):
    expected, description = EXPECTED[name], optimizer.describe(build(name))
    assert kinds(description.warnings) == expected.warnings.split()
    assert kinds(description.notes) == expected.notes.split()
    assert optimizer.Muon.for_model(build(name), lr=1e-3).defaults["split"] == expected.split


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.filterwarnings("ignore")
def test_what_the_code_advises_leaves_no_warning_but_of_what_nobody_can_tell(name):
    model = build(name)
    description = optimizer.describe(model)
    space = run(description.code, model)
    again = optimizer.describe(model, **arguments(description.code, space))
    assert [kind for kind in kinds(again.warnings) if kind != "stack"] == [], again
    assert len(str(description).splitlines()) < 80
