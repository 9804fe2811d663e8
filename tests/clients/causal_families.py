"""Causal language models and mixtures of experts of transformers, small, from causal_families.json.

A rule says which algorithm trains a parameter of such a model. The file holds what is special about
a family: sizes that all the others do not have, exceptions to the rule, and weights that hold
several matrices. What they hold was read in the modeling code of each family.
"""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import transformers as hf
from torch import nn

from architectures import key_of

TABLE = json.loads(Path(__file__).with_name("causal_families.json").read_text())
FAMILIES: dict[str, dict[str, Any]] = TABLE["families"]
PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.md"


def build(name: str) -> nn.Module:
    """The small model of a family, on torch's default device."""
    config = config_of(name)
    if "class" not in FAMILIES[name]:
        return hf.AutoModelForCausalLM.from_config(config)
    code = type(config).__module__.replace(".configuration_", ".modeling_")
    return getattr(importlib.import_module(code), FAMILIES[name]["class"])(config)


def config_of(name: str) -> Any:
    """The configuration of a family: the table's sizes, and what the family has in their place."""
    kind = FAMILIES[name].get("type", name)
    given = copy.deepcopy(FAMILIES[name].get("config", {}))  # classes change what they are given
    try:
        published = hf.AutoConfig.for_model(kind)
    except Exception:  # a class whose defaults contradict one another
        published = hf.AutoConfig.for_model(kind, **given)
    return hf.AutoConfig.for_model(kind, **_merged(_small(published), given))


def parts(config: Any) -> list[Any]:
    """A configuration, and those that it consists of."""
    found = [part for part in vars(config).values() if isinstance(part, hf.PreTrainedConfig)]
    return sum(map(parts, found), [config])


def _small(config: Any) -> dict[str, Any]:
    """The table's sizes that a configuration and its parts have, by their own names."""
    values, alias = config.to_dict(), config.attribute_map

    def is_size(key: str) -> bool:
        return key in values and type(values[key]) in (int, type(None))

    sizes = {alias[key]: size for key, size in TABLE["sizes"].items() if is_size(alias.get(key))}
    sizes |= {key: size for key, size in TABLE["sizes"].items() if is_size(key)}
    for key, part in vars(config).items():
        if isinstance(part, hf.PreTrainedConfig):
            sizes[key] = {"model_type": part.model_type, **_small(part)}
    return sizes


def _merged(sizes: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    both = [key for key in given if isinstance(sizes.get(key), dict)]
    return {**sizes, **given, **{key: _merged(sizes[key], given[key]) for key in both}}


def value_of(name: str, by_key: dict[str, Any]) -> Any:
    """What stands under the key of a parameter, or None."""
    return by_key.get(key_of(name, by_key))


def muons(name: str, model: Any) -> set[str]:
    """Names of the parameters that are Muon's.

    By the rule these are all matrices but those of embeddings, of what is tied to one, and of the
    output head; and all stacks of experts. Convolutions and other tensors of more than two
    dimensions are AdamW's.
    """
    row = FAMILIES[name]
    exceptions = {key: kind for kind in ("muon", "adamw") for key in row.get(kind, "").split()}
    heads = model.get_output_embeddings()
    heads = list(heads) if isinstance(heads, nn.ModuleList) else [heads]
    tables = (nn.Embedding, nn.modules.conv._ConvNd)
    modules = [m for m in model.modules() if isinstance(m, tables) or any(m is h for h in heads)]
    others = {id(param) for module in modules for param in module.parameters()}
    found = set()
    for param_name, param in model.named_parameters():
        is_bias = "bias" in param_name.split(".")[-1]
        is_matrix = param.ndim == 2 and id(param) not in others and not is_bias
        is_experts = param.ndim == 3 and "experts" in param_name
        rule = "muon" if is_matrix or is_experts else "adamw"
        if param.requires_grad and (value_of(param_name, exceptions) or rule) == "muon":
            found.add(param_name)
    return found


def cells(whole: dict | None, by_head: dict | None, warnings: list[str]) -> str:
    """What a row of the page says of a model: what is found, by heads also, and warnings."""
    whole, by_head = whole or {}, by_head or {}
    heads = {pattern: how for pattern, how in by_head.items() if whole.get(pattern) != how}
    return f"{_listed(whole)} | {_listed(heads)} | {', '.join(dict.fromkeys(warnings))} |"


def _listed(split: dict[str, Any]) -> str:
    """A ``split``, with the patterns of each value together."""
    patterns: dict[str, list[str]] = {}
    for pattern, how in split.items():
        short = ".".join(c for c in pattern.removesuffix(".weight").split(".") if c != "model")
        patterns.setdefault(json.dumps(how), []).append(f"`{short}`")
    return "; ".join(f"{', '.join(names)}: {how}" for how, names in patterns.items())
