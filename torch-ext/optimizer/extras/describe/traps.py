"""Collects the traps about a model's parameters, and merges their remedies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...distributed import dtensors, process_groups
from ...parameters.names import counted, did_you_mean, matches
from ...rules.decisions import BY_NAME, default_is_muon, unmatched_keys
from ...rules.fused import fused_in, split_patterns
from ...rules.heads import unnamed_heads
from ...rules.modules import EXPERTS, class_names, component_of
from . import convolutions, learning_rate
from .remedy import Remedy, Trap, literal
from .subject import Subject, names_of, numel
from .table import collect_by, fold, text

# A pure function of the model and the advice so far; yields traps, each with the remedy it adds.
Finder = Callable[[Subject, Remedy], Iterator[Trap]]

_EXPLAINS_NONE = ("flat", "convolutions", "experts", "stack", "fused")


def find_warnings(subject: Subject) -> tuple[list[Trap], Remedy]:
    """All traps to fix, and the advice: their remedies, merged in order."""
    finders: tuple[Finder, ...] = (
        _flat,
        _replicas,
        _unmatched,
        _refused,
        convolutions.find,
        _heads,
        _undecided,
        _whole,
        learning_rate.find_transposed,
        learning_rate.find,
    )
    traps: list[Trap] = []
    advice = Remedy()
    for find in finders:
        new = list(find(subject, advice))
        advice = functools.reduce(Remedy.then, (trap.remedy for trap in new), advice)
        traps += new
    if not subject.by_algorithm("Muon") and not any(t.kind in _EXPLAINS_NONE for t in traps):
        traps.insert(0, _nothing(subject))
    return traps, advice


def find_notes(subject: Subject, advice: Remedy) -> list[Trap]:
    """What is fine once the advice is followed, but good to know."""
    finders: tuple[Finder, ...] = (
        _unsure,
        _routers,
        _shared,
        _narrow,
        _unusual,
    )
    return [trap for find in finders for trap in find(subject, advice)]


def _nothing(subject: Subject) -> Trap:
    what, why, remedy = "Muon trains no parameter", "there is nothing to train", Remedy()
    if not subject.decisions:
        what = "the model has no parameters"
    elif not subject.trainable:
        what = "every parameter is frozen"
    elif any(default_is_muon(decision.name, decision.param) for decision in subject.trainable):
        why = "the groups give all of them to AdamW"
        remedy = Remedy(wording="Muon.for_model(model, …)")
    else:
        why = "AdamW trains all of them: the only matrices are embeddings and output heads"
    return Trap("nothing", what, (), why, remedy)


def _flat(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Wrappers that store parameters as one-dimensional pieces."""
    is_fsdp1 = any(
        "FullyShardedDataParallel" in class_names(module) for module in subject.model.modules()
    )
    pieces = [d for d in subject.trainable if hasattr(d.param, "ds_id")]
    if not (is_fsdp1 or pieces):
        return
    who = "FullyShardedDataParallel (FSDP1)" if is_fsdp1 else "DeepSpeed's ZeRO-3"
    lines = (
        "from torch.distributed.fsdp import fully_shard",
        "for layer in model.layers:",
        "    fully_shard(layer)",
        "fully_shard(model)",
    )
    comments = "# Instead, shard the model with fully_shard first:", *(f"#     {x}" for x in lines)
    yield Trap(
        "flat",
        f"{who} stores parameters as one-dimensional pieces",
        names_of(pieces or [d for d in subject.trainable if d.param.ndim == 1]),
        "pieces are not matrices, so AdamW gets all of them. FSDP2 keeps matrices whole",
        Remedy(header=comments, wording="\n".join(lines)),
    )


def _replicas(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Several ranks with plain parameters, if the optimizer has no process group."""
    muons, ranks = subject.by_algorithm("Muon"), dtensors.world_size()
    if subject.options.get("process_group") is not None or ranks == 1:
        return
    if not muons or any(dtensors.is_dtensor(d.param) for d in subject.trainable):
        return
    options: dict[str, Any] = {"process_group": process_groups.world()}
    header: tuple[str, ...] = ()
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in subject.model.modules()):
        what = f"DDP on {ranks} ranks, without a process_group"
        why = "each rank would orthogonalize every matrix; with it, ranks share work and momentum"
    else:
        what = f"plain parameters on {ranks} ranks, without a process_group"
        why = (
            "nothing averages gradients. And if fully_shard() comes later, it replaces the "
            "parameters in the groups, and nothing is trained"
        )
        options["grad_reduce"] = "mean"
        averages = f"# On {ranks} ranks: step() averages gradients (ZeRO-2)."
        header = (
            f"{averages} If you use fully_shard",
            "# or DDP instead, shard or wrap the model before you make the groups.",
        )
    remedy = Remedy(options, header=header)
    yield Trap("replicas", what, names_of(muons), why, remedy)


def _unmatched(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Keys and patterns that match no parameter."""
    expert_keys = subject.assignment.expert_keys
    unmatched = unmatched_keys(subject.decisions, expert_keys)
    if unmatched:
        rest = [key for key in expert_keys or () if key not in unmatched]
        yield Trap(
            "expert_keys",
            f"expert_keys {literal(unmatched)} match no parameter",
            (),
            "a key is one or more whole components of a name: 'experts', 'mlp.experts'"
            + did_you_mean(unmatched, names_of(subject.decisions)),
            Remedy({"expert_keys": rest or None}, wording=f"leave out {literal(unmatched)}"),
        )
    names = names_of(subject.decisions)
    for key in unmatched_keys(subject.decisions, subject.options.get("adamw_keys")):
        yield Trap(
            "adamw_keys",
            f"adamw_keys {literal([key])} match no parameter",
            (),
            f"a key is a whole component of a name{did_you_mean([key], names)}",
            Remedy({"adamw_keys": None}, wording=f"leave out {literal([key])}"),
        )
    split = subject.options.get("split")
    muons = [decision.key for decision in subject.by_algorithm("Muon")]
    patterns = split if isinstance(split, Mapping) else {}
    unmatched = [p for p in patterns if not any(matches(name, p) for name in muons)]
    if unmatched:
        yield Trap(
            "split",
            f"split patterns {literal(unmatched)} match none of Muon's matrices",
            (),
            "a pattern is a whole component of a name, or a shell-style pattern of the whole name"
            + did_you_mean(unmatched, muons),
            Remedy(
                {"split": {p: patterns[p] for p in patterns if p not in unmatched} or None},
                wording=f"leave out {literal(unmatched)}",
            ),
        )


def _refused(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Parameters for which Muon would raise."""
    errors = []
    for decision in subject.by_algorithm("Muon"):
        try:
            subject.read(decision)
        except ValueError as error:
            by_flatten = decision.param.ndim > 2 and "flatten" in str(error)
            cause = "flatten" if by_flatten else "split" if decision.param.ndim > 1 else "vector"
            errors.append((cause, decision, str(error)))
    for cause, refused in collect_by(errors, lambda error: error[0]).items():
        decisions = [decision for _, decision, _ in refused]
        names = names_of(decisions)
        if cause == "vector":
            remedy = Remedy(only_matrices=True, wording="param.ndim > 1 and … in is_muon_func")
        elif cause == "flatten":
            remedy = Remedy({"flatten": True}, wording="{}, or expert_keys=[…]")
        else:
            split = subject.options.get("split")
            patterns = split if isinstance(split, Mapping) else {}
            kept = [p for p in patterns if not any(matches(d.key, p) for d in decisions)]
            remedy = Remedy({"split": {p: patterns[p] for p in kept} or None}, wording="split=…")
        what, why = names[0], refused[0][2]
        if len(names) > 1:
            what, why = f"{len(names)} parameters", f"{names[0]} {why}"
        yield Trap("refused", f"Muon would refuse {what}", names, why, remedy)


def _heads(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Muon's matrices with a vocabulary on one side, and last layers with few outputs."""
    muons = advice.muons(subject)
    infos = subject.assignment.infos
    reasons = unnamed_heads(subject.model, infos, subject.decisions, muons)
    for reason, names in collect_by(reasons, lambda name: reasons[name]).items():
        yield Trap(
            "head",
            f"{names[0] if len(names) == 1 else f'{len(names)} matrices'}: {reason}",
            tuple(names),
            "embeddings and output heads train better with AdamW; their names do not show them",
            Remedy(leave=tuple(names)),
        )


_HINTS = {
    "fused": "the model's config or forward() shows how its rows are laid out; docs/options.md, "
    "Split by axes, how to write that. As one matrix, parts would share singular values and scale",
    "pair": "Muon reads (2, rows, columns) as two matrices. In the stored layout, each row and the "
    "next would be one matrix",
    "stack": "if leading dimensions count matrices, use expert_keys; if a single matrix has more "
    "dimensions, is_muon_func and flatten=True read it as (first, the rest)",
}


def _undecided(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Parameters left to AdamW because nothing shows how Muon should read them."""
    undecided = [each for each in subject.assignment.undecided if each.kind in _HINTS]
    for (kind, what), alike in collect_by(undecided, lambda each: (each.kind, each.what)).items():
        names = tuple(each.name for each in alike)
        yield Trap(
            kind,
            f"{counted(names, 'weight')} left to AdamW: {what}",
            names,
            _HINTS[kind],
            Remedy(
                comments=(f"# {alike[0].write} says what {names[0]} holds.",),
                wording=alike[0].write,
            ),
        )


def _whole(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Weights that hold several matrices but stay whole under the caller's ``split``."""
    split = subject.assignment.split
    given = {} if split is None else split
    if not isinstance(given, Mapping):
        return
    # "auto" finds the others itself, including those that the advice gives to Muon.
    is_kept = subject.options.get("split") is None
    muons = advice.muons(subject) if is_kept else subject.by_algorithm("Muon")
    fused = {
        decision.name: found
        for decision in muons
        if not any(matches(decision.key, pattern) for pattern in given)
        and (found := fused_in(subject.model, subject.info(decision), decision.param)) is not None
    }
    for (holds, _), names in collect_by(
        fused, lambda name: (fused[name].holds, repr(fused[name].split))
    ).items():
        first = fused[names[0]]
        if first.split is None:
            write = first.argument(names[0])
            comment = f"# {write} separates the {holds} of {names[0]}."
            remedy = Remedy(comments=(comment,), wording=write)
        else:
            patterns = split_patterns(dict.fromkeys(names, first.split), names_of(muons))
            remedy = Remedy({"split": {**given, **patterns}})
            given = remedy.options["split"]
        yield Trap(
            "fused",
            f"{counted(names, 'weight')} {'hold' if names[1:] else 'holds'} {holds} in one tensor",
            tuple(names),
            "as one matrix, they share singular values and scale; split updates each separately",
            remedy,
        )


def _unsure(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Possible output heads, and heads by name that may be hidden layers."""
    shapes = {d.name: tuple(d.param.shape) for d in subject.decisions}
    for each in subject.assignment.undecided:
        if each.kind == "head":
            yield Trap(
                "unsure",
                f"{each.name} {shapes[each.name]} may be an output head",
                (each.name,),
                "nothing reads its outputs, so AdamW, which trains heads better, keeps it. If it "
                "is a hidden layer, Muon trains it better: return True in is_muon_func",
            )
    for decision in subject.by_algorithm("AdamW"):
        shape, layer = tuple(decision.param.shape), subject.info(decision).layer
        is_named = decision.reason.startswith(BY_NAME) and isinstance(layer, nn.Linear)
        is_head = {"head", "output", "classifier"} & set(component_of(decision.name).split("_"))
        if is_named and is_head and shape[0] == shape[-1]:
            yield Trap(
                "unsure",
                f"{decision.name} {shape} may be a hidden layer",
                (decision.name,),
                "its name says head, so AdamW trains it, but it has as many outputs as inputs. If "
                "they are not predictions, Muon trains it better: return True in is_muon_func",
            )


def _routers(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Matrices that choose experts."""
    routers = [d for d in advice.muons(subject) if component_of(d.name) in ROUTERS]
    counts = {d.name: subject.look_up(d, EXPERTS) for d in routers}
    routers = [d for d in routers if counts[d.name] in d.param.shape]
    if routers:
        yield Trap(
            "routers",
            f"Muon trains {counted(routers, 'router')}",
            names_of(routers),
            "as Moonlight does, where Muon trains every matrix except embeddings and heads; "
            f"adamw_keys=[{literal(component_of(routers[0].name))}] leaves them to AdamW",
        )


# What models call the matrix that chooses experts.
ROUTERS = ("router", "gate", "gate_proj", "router_proj", "classifier", "layer", "wg")


def _shared(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Parameters with several names."""
    for decision in subject.decisions:
        infos = subject.assignment.infos[id(decision.param)]
        if len(infos) == 1:
            continue
        first, *others = names = tuple(info.name for info in infos)
        lines = fold(others)
        shown = ", ".join(lines[:3]) + (", …" if len(lines) > 3 else "")
        is_tied = any(isinstance(info.module, nn.Embedding) for info in infos)
        by_adamw = is_tied and decision.algorithm == "AdamW"
        yield Trap(
            "tied" if is_tied else "shared",
            f"{shown} {'is' if len(others) == 1 else 'are'} {first}",
            names,
            f"one tensor, trained once{', by AdamW like all embeddings' if by_adamw else ''}"
            f"; in is_muon_func and split its name is {decision.name}",
        )


def _narrow(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Weights in 16-bit dtypes, where small steps round away."""
    is_kept = subject.options.get("weight_rounding", "nearest") != "nearest"
    for dtype in (torch.bfloat16, torch.float16):
        narrow = [d for d in subject.trainable if d.param.dtype == dtype]
        if narrow and not (is_kept and dtype == torch.bfloat16):
            lost = round(4 / torch.finfo(dtype).eps)  # half a digit of a weight just below 1
            keep = 'use weight_rounding="exact", or ' if dtype == torch.bfloat16 else ""
            yield Trap(
                "narrow",
                f"{counted(narrow, 'parameter')} in {text(dtype)}",
                names_of(narrow),
                f"changes below 1/{lost} of a weight round away, such as those of norms at 1 with "
                f"AdamW's usual rates; {keep}keep weights in fp32, with torch.autocast or FSDP2's "
                "MixedPrecisionPolicy",
            )


def _unusual(subject: Subject, advice: Remedy) -> Iterator[Trap]:
    """Adapters, quantized weights, complex weights, and matrices that are vectors."""
    muons, frozen = advice.muons(subject), subject.by_algorithm("frozen")
    share = numel(frozen) / max(1, numel(subject.decisions))
    factors = [d for d in muons if "lora_" in d.name]
    quantized = [d for d in subject.decisions if _is_quantized(d.param)]
    numbers = [d for d in subject.trainable if d.param.is_complex() and d.param.ndim > 1]
    vectors = [d for d in muons if d.param.ndim == 2 and min(d.param.shape) == 1]
    notes = (
        (
            "adapters",
            factors,
            "low-rank adapters" + (f"; {share:.1%} of the parameters are frozen" if frozen else ""),
            "Muon orthogonalizes each factor, A and B, as a separate matrix",
        ),
        (
            "quantized",
            quantized,
            counted(quantized, "quantized weight"),
            "they are not trained; floating-point parameters, such as adapters, are",
        ),
        (
            "complex",
            numbers,
            counted(numbers, "complex parameter"),
            "AdamW trains them; Muon supports only real matrices",
        ),
        (
            "vectors",
            vectors,
            f"{counted(vectors, 'matrix', 'matrices')} with one row or one column",
            "orthogonalizing a vector normalizes it, so every step has the same length",
        ),
    )
    for kind, decisions, what, why in notes:
        if decisions:
            yield Trap(kind, what, names_of(decisions), why)


def _is_quantized(param: torch.Tensor) -> bool:
    """True if a parameter is packed into integers, or has a class of bitsandbytes."""
    is_packed = not {"Params4bit", "Int8Params"}.isdisjoint(class_names(param))
    return is_packed or not (param.is_floating_point() or param.is_complex())
