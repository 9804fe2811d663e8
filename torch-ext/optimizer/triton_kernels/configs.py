"""Decides with which tiles a kernel is launched, from measurements or else a heuristic.

Measurements of a device, and the heuristic's rules, are data in configs/*.json. Nothing is timed
while training: a configuration follows from dtype, sizes and device alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DIRECTORY = Path(__file__).parent / "configs"
SCHEMA = 1

OPERATIONS = ("symmetric",)
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class SymmetricConfig:
    """Tiles of `symmetric.symmetric_product`; "config" in the files has a key for each field, but
    may lack ``width`` and ``descriptors``, which then have their defaults.

    Args:
        block: rows and columns of a tile of the output.
        block_k: how much of k is loaded at once.
        num_warps, num_stages: warps of a program; loads in flight (Triton's own meaning).
        group: columns of tiles computed together, for reuse in L2.
        width: tiles side by side that a program computes, 1 or 2: they share the rows of A.
        descriptors: load tiles of A and B in bulk, by the engine for it that sm_90 and later have,
            where both can be described (`symmetric._can_be_described`). A launch takes the host
            longer.
    """

    block: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    width: int = 1
    descriptors: bool = False

    def programs(self, s: int) -> int:
        """How many programs compute one (s, s) matrix."""
        return self.width * symmetric_tiles(s, self.width * self.block)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "descriptors" and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name} must be a positive integer, found {value!r}")
        for name, least in (("block", 16), ("block_k", 16), ("num_warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {least} on, found {value}")
        if self.width > 2:
            raise ValueError(f"width must be 1 or 2, found {self.width}")


@dataclass(frozen=True)
class CompileTarget:
    """What a kernel is compiled for.

    Args:
        device: the device's name in lower case with underscores, such as ``nvidia_h200``.
        architecture: ``sm_90``, ``gfx942``, …; ``xpu``; ``interpreter``.
        backend: ``cuda``, ``hip``, ``xpu`` or ``interpreter``.
        processors: streaming multiprocessors, compute units.
    """

    device: str
    architecture: str
    backend: str
    processors: int


@dataclass(frozen=True)
class Rule:
    """A configuration of the heuristic, for where its conditions hold.

    Args:
        aligned: holds only where all operands can be loaded in vectors.
        even: holds only where the last tiles are whole: masks take registers.
        min_s: holds from this s on.
        min_tiles_per_processor: holds from so many programs for each processor on, those of all
            matrices of the batch counted.
    """

    architectures: list[str]
    dtypes: list[str]
    config: SymmetricConfig
    aligned: bool = False
    even: bool = False
    min_s: int = 0
    min_tiles_per_processor: float = 0


@dataclass(frozen=True)
class Measured:
    """The fastest configuration found for one size on one device."""

    dtype: str
    s: int
    k: int
    batch: int
    config: SymmetricConfig

    def distance(self, s: int, k: int, batch: int) -> float:
        """How far these sizes are from the measured ones, in octaves, added up."""
        pairs = ((self.s, s), (self.k, k), (self.batch, batch))
        return sum(abs(math.log2(size / max(1, wanted))) for size, wanted in pairs)


def symmetric_tiles(s: int, block: int) -> int:
    """Tiles on and above the diagonal of one (s, s) matrix."""
    side = -(-s // block)
    return side * (side + 1) // 2


@functools.lru_cache(maxsize=4096)
def choose(
    dtype: torch.dtype, s: int, k: int, batch: int, aligned: bool, target: CompileTarget
) -> SymmetricConfig:
    """The configuration measured nearest to these sizes on that device, else the first rule's that
    holds.

    Only operands that can be loaded in vectors were measured; for others the rules decide. Large
    tiles reuse more of what they load, but there must be enough of them for all processors, and s
    must fill them. No rule asks for k, which says how long a tile takes, whatever its size.
    """
    name = str(dtype).rpartition(".")[2]
    # Tiles of fp16 and bf16 cost the same: either stands in for the other.
    names = ("float16", "bfloat16") if dtype.itemsize == 2 else (name,)
    entries = [entry for entry in measured(target.device) if aligned and entry.dtype in names]
    if entries:
        return min(entries, key=lambda e: (e.distance(s, k, batch), e.dtype != name)).config
    return choose_by_rule(dtype, s, batch, aligned, target)


def choose_by_rule(
    dtype: torch.dtype, s: int, batch: int, aligned: bool, target: CompileTarget
) -> SymmetricConfig:
    """The configuration of the first rule that holds, see `choose`."""
    name = str(dtype).rpartition(".")[2]
    for rule in rules_of(name, target.architecture, target.backend):
        programs = batch * rule.config.programs(s)
        enough = programs >= rule.min_tiles_per_processor * target.processors
        fits = (aligned or not rule.aligned) and not (rule.even and s % rule.config.block)
        if s >= rule.min_s and enough and fits:
            return rule.config
    raise ValueError(f"heuristic.json has no rule for symmetric in {name} on {target}")


@functools.cache
def rules_of(dtype: str, architecture: str, backend: str) -> list[Rule]:
    """The heuristic's rules for the architecture; where there are none, for the backend."""
    path = DIRECTORY / "heuristic.json"
    rules = parse_rules(json.loads(path.read_text(encoding="utf-8")), path.name)
    for name in (architecture, backend):
        fitting = [rule for rule in rules if name in rule.architectures and dtype in rule.dtypes]
        if fitting:
            return fitting
    return []


@functools.cache
def measured(device: str) -> list[Measured]:
    """What benchmarks/tune.py wrote for a device; empty where there is no file."""
    path = DIRECTORY / f"{device}.json"
    if device == "heuristic" or not path.is_file():
        return []
    return parse_measured(json.loads(path.read_text(encoding="utf-8")), path.name)


@functools.cache
def compile_target(device: torch.device) -> CompileTarget:
    """Asks the device once, when something is first launched there."""
    if device.type == "cpu":
        return CompileTarget("interpreter", "interpreter", "interpreter", processors=4)
    if device.type == "xpu":
        xpu = torch.xpu.get_device_properties(device)
        return CompileTarget(normalized(xpu.name), "xpu", "xpu", xpu.gpu_subslice_count)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        architecture, backend = properties.gcnArchName.partition(":")[0], "hip"
    else:
        architecture, backend = f"sm_{properties.major}{properties.minor}", "cuda"
    processors = properties.multi_processor_count
    return CompileTarget(normalized(properties.name), architecture, backend, processors)


def normalized(device_name: str) -> str:
    """``NVIDIA H200`` becomes ``nvidia_h200``: a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


# Files


def parse_rules(document: Any, source: str) -> list[Rule]:
    """heuristic.json: ``schema``, ``why`` (how the numbers were found) and ``rules``, in order.

    A rule has ``operation``, ``architectures`` (or backends), ``dtypes``, ``config``, and, if it
    is not to hold everywhere, ``aligned``, ``even``, ``min_s`` and ``min_tiles_per_processor``
    (see `Rule`).

    Raises:
        ValueError: keys unknown or missing, values of the wrong type or range.
    """
    _check_keys(document, {"schema": int, "why": str, "rules": list}, {}, source)
    keys = {"operation": str, "architectures": list, "dtypes": list, "config": dict}
    conditions = {
        "aligned": bool,
        "even": bool,
        "min_s": int,
        "min_tiles_per_processor": (int, float),
    }
    rules = []
    for index, rule in enumerate(document["rules"]):
        where = f"{source}, rule {index}"
        _check_keys(rule, keys, conditions, where)
        config = _parse_config(rule, rule["dtypes"], where)
        set_conditions = {key: rule[key] for key in conditions if key in rule}
        rules.append(Rule(rule["architectures"], rule["dtypes"], config, **set_conditions))
    return rules


def parse_measured(document: Any, source: str) -> list[Measured]:
    """<device>.json: ``schema``, ``device``, ``why`` (versions, date) and ``entries``.

    An entry has ``operation``, ``dtype``, ``s``, ``k``, ``batch`` and ``config``; it may have
    ``microseconds`` and ``bmm_microseconds``, as measured.

    Raises:
        ValueError: keys unknown or missing, values of the wrong type or range.
    """
    _check_keys(document, {"schema": int, "device": str, "why": str, "entries": list}, {}, source)
    if f"{document['device']}.json" != source:
        raise ValueError(f"{source} is of another device, {document['device']!r}")
    sizes = {"s": int, "k": int, "batch": int}
    keys = {"operation": str, "dtype": str, "config": dict, **sizes}
    times = {"microseconds": (int, float), "bmm_microseconds": (int, float)}
    entries = []
    for index, entry in enumerate(document["entries"]):
        where = f"{source}, entry {index}"
        _check_keys(entry, keys, times, where)
        if min(entry[size] for size in sizes) < 1:
            raise ValueError(f"{where}: s, k and batch must be positive, found {entry}")
        config = _parse_config(entry, [entry["dtype"]], where)
        entries.append(Measured(entry["dtype"], entry["s"], entry["k"], entry["batch"], config))
    return entries


def _check_keys(document: Any, required: dict, optional: dict, where: str) -> None:
    if not isinstance(document, dict):
        raise ValueError(f"{where}: expected an object, found {document!r}")
    unknown = sorted(document.keys() - required.keys() - optional.keys())
    missing = sorted(required.keys() - document.keys())
    if unknown or missing:
        raise ValueError(f"{where}: unknown keys {unknown}, missing keys {missing}")
    for key, value in document.items():
        kind = required.get(key) or optional[key]
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{where}: {key} has the wrong type, found {value!r}")
    if document.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"{where}: schema {document['schema']} is not {SCHEMA}")


def _parse_config(entry: dict, dtypes: list, where: str) -> SymmetricConfig:
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"{where}: dtype must be one of {DTYPES}, found {dtype!r}")
    operation, config = entry["operation"], entry["config"]
    if operation not in OPERATIONS:
        raise ValueError(f"{where}: operation must be one of {list(OPERATIONS)}: {operation!r}")
    names = [field.name for field in dataclasses.fields(SymmetricConfig)]
    optional = {"width": int, "descriptors": bool}
    required = {name: int for name in names if name not in optional}
    _check_keys(config, required, optional, f"{where}, config")
    try:
        return SymmetricConfig(**config)
    except ValueError as error:
        raise ValueError(f"{where}, config: {error}") from None
