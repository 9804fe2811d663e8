"""Models of several libraries, small, with random weights, from architectures.json.

Each class was decided by hand, from what the layer does: embeddings, tables of positions, output
heads, biases, scales and convolutions are AdamW's; the linear maps between them are Muon's. A row's
keys (all optional but ``batch``):

- ``class``, `module:name` (by default the row's first word, of transformers), ``args`` and
  ``config``, which is the model's configuration in transformers and keyword arguments elsewhere;
  ``like`` takes values of ``sizes``; ``narrow`` divides all widths; ``adapter`` is PEFT's.
- ``batch``: keyword arguments of ``forward``; a list calls a function of torch, and a string is
  the argument of that name again.
- ``muon``, ``adamw``, and ``convolutions`` (Muon's by ``convolutions=True``): keys of parameters
  of two or more dimensions, compared as `key_of` does. Others are AdamW's.
- ``split`` and ``per_head``: how `Muon.for_model` splits matrices, by key.
- ``warnings`` and ``notes``: kinds of `describe`'s traps; ``unsure``: names of the contested ones.
- ``warns``: a word of each warning that `Muon.for_model` gives.
- ``findings``: what an audit finds in such a small model, rightly, by `audits.KNOWN`.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

TABLE = json.loads(Path(__file__).with_name("architectures.json").read_text())
ROWS: dict[str, dict[str, Any]] = TABLE["architectures"]


def build(name: str) -> nn.Module:
    row = ROWS[name]
    cls = pkgutil.resolve_name(row.get("class", f"transformers:{name.split()[0]}"))
    config = filled(row.get("config", {}))
    if hasattr(cls, "config_class"):
        model = cls(cls.config_class(**config))
    else:
        model = cls(*row.get("args", ()), **config)
    if "narrow" in row:
        narrow(model, row["narrow"])
    if "adapter" in row:
        config = dict(row["adapter"])
        model = peft.get_peft_model(model, pkgutil.resolve_name(config.pop("class"))(**config))
    return model


def filled(config: Any) -> Any:
    """A configuration, or part of one, with the values of the ``sizes`` that it is like."""
    if not isinstance(config, dict):
        return config
    shared = filled(TABLE["sizes"][config["like"]]) if "like" in config else {}
    return {**shared, **{key: filled(value) for key, value in config.items() if key != "like"}}


def batch_of(row: dict[str, Any]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    given = row.get("batch", "text")
    for key, value in (TABLE["batches"][given] if isinstance(given, str) else given).items():
        if isinstance(value, list):
            function, *arguments = value
            batch[key] = getattr(torch, function)(*arguments)
        else:
            batch[key] = batch[value] if isinstance(value, str) else value
    return batch


def key_of(name: str, keys: Iterable[str]) -> str | None:
    """The longest key that ends a parameter's name without ``.weight``; it may leave out indices:
    ``mlp.fc1`` ends ``blocks.0.mlp.fc1.weight``."""

    def ends(key: str) -> bool:
        components = name.removesuffix(".weight").split(".")
        named = [component for component in components if not component.isdigit()]
        count = key.count(".") + 1
        return key in (".".join(components[-count:]), ".".join(named[-count:]))

    return max(filter(ends, keys), key=lambda key: key.count("."), default=None)


def narrow(model: nn.Module, by: int) -> None:
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
                sizes = width(child.in_features), width(child.out_features)
                setattr(module, name, nn.Linear(*sizes))
            elif isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.BatchNorm2d(width(child.num_features)))
