"""What is known to go wrong with the groups of a model: found, explained, and mended in code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...distributed import utils as dtensors
from ...parameters.default_groups import Decision, unmatched_keys
from ...parameters.names import matches
from . import convolutions, heads, learning_rate
from .code import WORLD, Advice, Source, literal, patterns_of
from .evidence import Subject, class_names, numel
from .fused import Fused, fused_in, is_stored_transposed
from .table import counted, fold, text
from .trap import Trap

Finder = Callable[[Subject, Advice], Iterator[Trap]]


def find_warnings(subject: Subject, advice: Advice) -> list[Trap]:
    """What is to be mended; puts into ``advice`` how."""
    finders: tuple[Finder, ...] = (
        _flat,
        _replicas,
        _unmatched,
        _refused,
        convolutions.find,
        heads.find,
        _fused,
        _transposed,
        learning_rate.find,
    )
    found = [trap for finder in finders for trap in finder(subject, advice)]
    if not subject.of("Muon") and not any(trap.kind in _EXPLAINS_NONE for trap in found):
        found.insert(0, _nothing(subject))
    return found


_EXPLAINS_NONE = ("flat", "convolutions", "experts", "dimensions")


def _nothing(subject: Subject) -> Trap:
    if not subject.decisions:
        return Trap("nothing", "the model has no parameters", (), "there is nothing to train")
    if not subject.trainable:
        return Trap("nothing", "every parameter is frozen", (), "there is nothing to train")
    return Trap(
        "nothing",
        "no parameter is Muon's",
        (),
        "AdamW trains all of them: there are no matrices but embeddings and output heads",
    )


def _flat(subject: Subject, advice: Advice) -> Iterator[Trap]:
    """Wrappers that store parameters as one-dimensional pieces."""
    is_fsdp1 = any(
        "FullyShardedDataParallel" in class_names(module) for module in subject.model.modules()
    )
    pieces = [d.name for d in subject.trainable if hasattr(d.param, "ds_id")]
    if not (is_fsdp1 or pieces):
        return
    flat = pieces or [d.name for d in subject.trainable if d.param.ndim == 1]
    who = "FullyShardedDataParallel (FSDP1)" if is_fsdp1 else "DeepSpeed's ZeRO-3"
    write = (
        "from torch.distributed.fsdp import fully_shard\n"
        "for layer in model.layers:\n"
        "    fully_shard(layer)\n"
        "fully_shard(model)"
    )
    advice.first += ["# Shard the model by fully_shard first, instead:"]
    advice.first += [f"#     {line}" for line in write.splitlines()]
    yield Trap(
        "flat",
        f"{who} stores parameters as one-dimensional pieces",
        tuple(flat),
        "pieces of matrices are no matrices: AdamW gets all of them. FSDP2 keeps matrices",
        write,
    )


def _replicas(subject: Subject, advice: Advice) -> Iterator[Trap]:
    """Several ranks with plain parameters, of which the optimizer hears nothing."""
    muons = subject.of("Muon")
    if subject.options.get("process_group") is not None or dtensors.world_size() == 1:
        return
    if not muons or any(dtensors.is_dtensor(d.param) for d in subject.trainable):
        return
    names, ranks = tuple(d.name for d in muons), dtensors.world_size()
    modules = subject.model.modules()
    wrapped = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)
    if wrapped:
        advice.options["process_group"] = Source(WORLD)
        yield Trap(
            "replicas",
            f"DDP on {ranks} ranks, without a process_group",
            names,
            "each rank would orthogonalize every matrix; with it they share work and momentum",
            f"Muon(groups, process_group={WORLD})",
        )
        return
    advice.options["process_group"], advice.options["grad_reduce"] = Source(WORLD), "mean"
    advice.first += [
        f"# On {ranks} ranks: step() averages gradients (ZeRO-2). A model that is to be sharded",
        "# (fully_shard) or wrapped in DDP has to be so before the groups are made.",
    ]
    yield Trap(
        "replicas",
        f"plain parameters on {ranks} ranks, without a process_group",
        names,
        "nobody averages gradients; and groups made before fully_shard() hold parameters that it "
        "replaces, so that nothing would be trained",
        f'Muon(groups, process_group={WORLD}, grad_reduce="mean")',
    )


def _unmatched(subject: Subject, advice: Advice) -> Iterator[Trap]:
    """Keys and patterns that are about no parameter."""
    keys = unmatched_keys(subject.decisions, subject.expert_keys)
    if keys:
        advice.expert_keys = [key for key in subject.expert_keys or () if key not in keys]
        yield Trap(
            "expert_keys",
            f"expert_keys {literal(keys)} match no parameter",
            (),
            "a key is a whole component of names, or several: 'experts', 'mlp.experts'",
            f"expert_keys={literal(advice.expert_keys or None)}",
        )
    split = subject.options.get("split")
    names = [d.name for d in subject.of("Muon")]
    patterns = split if isinstance(split, Mapping) else {}
    lost = [p for p in patterns if not any(matches(name, p) for name in names)]
    if lost:
        left = {p: counts for p, counts in patterns.items() if p not in lost}
        advice.options["split"] = left or None
        yield Trap(
            "split",
            f"split patterns {literal(lost)} match no matrix of Muon's",
            (),
            "a pattern is a whole component of names, or a shell-style pattern of whole names",
            f"split={literal(left or None)}",
        )


def _refused(subject: Subject, advice: Advice) -> Iterator[Trap]:
    """What Muon would raise for."""
    refused: dict[str, list[tuple[str, str]]] = {}
    for decision in subject.of("Muon"):
        try:
            subject.matrices(decision)
        except ValueError as error:
            message = str(error)
        else:
            continue
        if decision.param.ndim < 2:
            advice.only_matrices, write = True, "param.ndim > 1 and … in is_muon_func"
        elif decision.param.ndim > 2 and "flatten" in message:
            advice.options["flatten"], write = True, "flatten=True, or expert_keys=[…]"
        else:
            advice.options["split"], write = _split_without(subject, advice, decision), "split=…"
        refused.setdefault(write, []).append((decision.name, message))
    for write, found in refused.items():
        (first, why), names = found[0], tuple(name for name, _ in found)
        what = f"Muon would refuse {first if len(names) == 1 else f'{len(names)} parameters'}"
        yield Trap("refused", what, names, why if len(names) == 1 else f"{first} {why}", write)


def _split_without(subject: Subject, advice: Advice, decision: Decision) -> Any:
    """The caller's ``split``, or what is left of it, but for what it says of a parameter."""
    split = advice.options.get("split", subject.options.get("split"))
    if not isinstance(split, Mapping):
        return None
    return {p: counts for p, counts in split.items() if not matches(decision.name, p)} or None


def _fused(subject: Subject, advice: Advice) -> Iterator[Trap]:
    """Weights that hold several matrices, one below the other, and no split that says so."""
    split = advice.options.get("split", subject.options.get("split"))
    if split is not None and not isinstance(split, Mapping):
        return
    found: dict[tuple[str, str], list[tuple[str, Fused]]] = {}
    for decision in advice.muons(subject):
        if any(matches(decision.name, pattern) for pattern in split or ()):
            continue
        fused = fused_in(decision, subject)
        if fused is not None and not fused.in_columns:
            key = fused.holds, repr(fused.counts)
            found.setdefault(key, []).append((decision.name, fused))
    for (holds, _), weights in found.items():
        fused, names = weights[0][1], [name for name, _ in weights]
        yield _trap_of_fused(subject, advice, holds, fused, names)


def _trap_of_fused(
    subject: Subject, advice: Advice, holds: str, fused: Fused, names: Sequence[str]
) -> Trap:
    what = f"{counted(names, 'weight')} {'hold' if names[1:] else 'holds'} {holds} in one tensor"
    why = "as one matrix they share singular values and scale; split takes each for itself"
    if fused.by_head:
        why = (
            "rows interleave, head by head, so that no block of rows is all of Q: a split by heads "
            "takes the queries, the keys and the values of each head for themselves"
        )
    if fused.counts is not None:
        counts = dict.fromkeys(names, fused.counts)
        advice.split.update(counts)
        split = literal(patterns_of(counts, subject, advice))
        return Trap("fused", what, tuple(names), why, f"split={split}")
    size = "head_dim" if fused.by_head else "[rows of the first, of the second, …]"
    write = f'split={{"{_component(names)}": {size}}}'
    hint = "how many rows each has is in the model's config, or its forward()"
    advice.before += [f"# {write} below parts {holds}:", f"# {hint}."]
    return Trap("fused", what, tuple(names), f"{why}; {hint}", write)


def _component(names: Sequence[str]) -> str:
    named = [p for p in names[0].split(".") if not p.isdigit() and p != "weight"]
    return named[-1] if named else names[0]


def _transposed(subject: Subject, advice: Advice) -> Iterator[Trap]:
    scale = subject.options.get("adjust_lr")
    if scale not in ("original", "spectral"):
        return
    names = [d.name for d in advice.muons(subject) if is_stored_transposed(d, subject)]
    if names:
        advice.options["adjust_lr"] = "match_rms_adamw"
        yield Trap(
            "transposed",
            f"{counted(names, 'weight')} {'are' if names[1:] else 'is'} stored (in, out)",
            tuple(names),
            f'adjust_lr="{scale}" scales by sqrt(rows/cols), which is upside down for them; '
            '"match_rms_adamw" is the same both ways',
            'adjust_lr="match_rms_adamw"',
        )


def find_notes(subject: Subject, advice: Advice) -> list[Trap]:
    """What is as it should be, once the advice is taken, but good to know."""
    muons = advice.muons(subject)
    return [
        *_shared(subject),
        *_columns(subject, muons),
        *_narrow(subject),
        *_kinds(subject, muons),
    ]


def _shared(subject: Subject) -> Iterator[Trap]:
    """Parameters of several names."""
    for decision in subject.decisions:
        names = [place.name for place in subject.places[id(decision.param)]]
        if len(names) == 1:
            continue
        lines = fold(names[1:])
        others = ", ".join(lines[:3]) + (", …" if len(lines) > 3 else "")
        tied = any(
            isinstance(place.owner, nn.Embedding) for place in subject.places[id(decision.param)]
        )
        yield Trap(
            "tied" if tied else "shared",
            f"{others} {'is' if len(names) == 2 else 'are'} {names[0]}",
            tuple(names),
            "one tensor, trained once"
            + (", by AdamW as embeddings are" if tied and decision.algorithm == "AdamW" else "")
            + f"; is_muon_func and split know it as {decision.name}",
        )


def _columns(subject: Subject, muons: Sequence[Decision]) -> Iterator[Trap]:
    by_holding: dict[str, list[str]] = {}
    for decision in muons:
        fused = fused_in(decision, subject)
        if fused is not None and fused.in_columns:
            by_holding.setdefault(fused.holds, []).append(decision.name)
    for holds, names in by_holding.items():
        yield Trap(
            "columns",
            f"{counted(names, 'weight')} stored (in, out): columns hold {holds}",
            tuple(names),
            "each is orthogonalized as one matrix: split parts rows only",
        )


def _narrow(subject: Subject) -> Iterator[Trap]:
    """Weights of so few digits that small steps round away."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = [d for d in subject.trainable if d.param.dtype == dtype]
        if narrow:
            lost = round(4 / torch.finfo(dtype).eps)  # half a digit of a weight just below 1
            yield Trap(
                "narrow",
                f"{counted(narrow, 'parameter')} in {text(dtype)}",
                tuple(d.name for d in narrow),
                f"what a step changes by less than 1/{lost} of its size rounds away, norms at 1 "
                "with AdamW's usual rates among it; keep weights in fp32, under torch.autocast or "
                "FSDP2's MixedPrecisionPolicy",
            )


def _kinds(subject: Subject, muons: Sequence[Decision]) -> Iterator[Trap]:
    factors = [d for d in muons if "lora_" in d.name]
    if factors:
        frozen = subject.of("frozen")
        share = numel(frozen) / max(1, numel(subject.decisions))
        told = f"; {share:.1%} of the parameters are frozen" if frozen else ""
        yield Trap(
            "adapters",
            f"low-rank adapters{told}",
            tuple(d.name for d in factors),
            "Muon orthogonalizes each factor, A and B, as a matrix of its own",
        )
    quantized = [d for d in subject.decisions if _is_quantized(d)]
    if quantized:
        yield Trap(
            "quantized",
            counted(quantized, "quantized weight"),
            tuple(d.name for d in quantized),
            "no optimizer trains them: what floats beside them is trained, such as adapters",
        )
    numbers = [d for d in subject.trainable if d.param.is_complex() and d.param.ndim > 1]
    if numbers:
        yield Trap(
            "complex",
            counted(numbers, "complex parameter"),
            tuple(d.name for d in numbers),
            "AdamW trains them; Muon takes real matrices",
        )
    vectors = [d for d in muons if d.param.ndim == 2 and min(d.param.shape) == 1]
    if vectors:
        yield Trap(
            "vectors",
            f"{counted(vectors, 'matrix', 'matrices')} of one row or one column",
            tuple(d.name for d in vectors),
            "to orthogonalize a vector is to normalize it: every step has the same length",
        )


def _is_quantized(decision: Decision) -> bool:
    """Packed into integers, or by bitsandbytes, whose class may float."""
    param = decision.param
    known = {"Params4bit", "Int8Params"} & {cls.__name__ for cls in type(param).__mro__}
    return bool(known) or not (param.is_floating_point() or param.is_complex())
