"""Architectures of several libraries, small, with random weights, and what trains their parameters.

Each class was decided by hand, from what the layer does: embeddings, tables of positions, output
heads, biases, scales and convolutions are AdamW's; the linear maps between them are Muon's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import set_seed

Batch = dict[str, Any]  # keyword arguments of ``forward``
VOCABULARY = 1000
KINDS = ("muon", "adamw", "convolutions")


@dataclass(frozen=True)
class Architecture:
    """A model, a batch, and the class of each parameter of two or more dimensions.

    A parameter's class is that of the longest key which ends its name, ``.weight`` left out. Keys
    may leave out indices: ``mlp.fc1`` ends ``blocks.0.mlp.fc1.weight``. Parameters of fewer
    dimensions are AdamW's.

    Args:
        build: makes the model.
        batch: makes a batch.
        muon: keys of what is Muon's.
        adamw: keys of what is AdamW's.
        convolutions: keys of what is Muon's by ``convolutions=True``. `describe` advises that where
            they are a tenth of the model or more, or most of its layers; of other models the table
            has none.
        unsure: names of the contested ones, which `describe` has to say, without ``.weight``.
        warning: how the warning begins that `Muon.for_model` gives, of what it can't tell.
        why: the reason where a class is not plain.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    muon: str = ""
    adamw: str = ""
    convolutions: str = ""
    unsure: str = ""
    warning: str = ""
    why: str = ""

    def algorithm_of(self, name: str) -> str:
        """Under which of `KINDS` a parameter's key stands."""
        return next(kind for kind in KINDS if self.key_of(name) in self.keys(kind))

    def key_of(self, name: str) -> str:
        """The longest key that ends a parameter's name."""
        keys = [key for kind in KINDS for key in self.keys(kind) if is_ended_by(name, key)]
        assert keys, f"the table has no key for {name}"
        return max(keys, key=lambda key: key.count("."))

    def keys(self, kind: str) -> list[str]:
        return getattr(self, kind).split()


def is_ended_by(name: str, key: str) -> bool:
    """Whether a key ends a parameter's name, whose indices it may leave out."""
    components = name.removesuffix(".weight").split(".")
    named = [component for component in components if not component.isdigit()]
    count = key.count(".") + 1
    return key in (".".join(components[-count:]), ".".join(named[-count:]))


def tokens(vocabulary: int = VOCABULARY, length: int = 12, texts: int = 2) -> torch.Tensor:
    """Ids of texts, none of them of a special token."""
    return torch.randint(3, vocabulary - 10, (texts, length))


def text() -> Batch:
    input_ids = tokens()
    return {"input_ids": input_ids, "labels": input_ids}


def train(
    model: nn.Module,
    batch: Batch,
    optim: torch.optim.Optimizer,
    steps: int,
    loss_of: Callable[[Any], torch.Tensor] = lambda outputs: outputs.loss,
) -> list[float]:
    """Losses of steps with one batch, none of which warns."""
    losses = []
    for _ in range(steps):
        set_seed(1)  # the same dropout, masks, noise and targets in each step
        loss = loss_of(model(**batch))
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def images(size: int = 32, channels: int = 3, count: int = 2) -> torch.Tensor:
    return torch.randn(count, channels, size, size)


def narrow(model: nn.Module, by: int) -> nn.Module:
    """Divides all widths, of a model whose class fixes them, before its weights are used."""

    def width(channels: int) -> int:
        if channels == 4096:  # of AlexNet's and VGG's classifiers
            return 64
        return channels // by if channels > 16 else channels

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                shape = width(child.in_channels), width(child.out_channels), child.kernel_size
                geometry = child.stride, child.padding, child.dilation, width(child.groups)
                setattr(module, name, type(child)(*shape, *geometry, child.bias is not None))
            elif isinstance(child, nn.Linear):
                setattr(
                    module, name, nn.Linear(width(child.in_features), width(child.out_features))
                )
            elif isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.BatchNorm2d(width(child.num_features)))
    return model
