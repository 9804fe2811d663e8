"""The check from its beginning to its report."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from ...muon import Muon
from ...parameters.names import counted
from ..describe.remedy import Remedy, Trap
from ..describe.report import lines_of
from .comparison import Run
from .ranks import Alone, gather_json, run_on_ranks
from .structure import find_frozen, find_misread, find_unmatched

# What leaves nothing to compare, or would be found again by each comparison.
_ENDS = {"replaced", "names", "shape", "flat", "nothing", "replicas", "raised"}
_ENDS |= {"gradient", "weights"}
_ENDED = "What comes after that was not checked: mend it, and check again"
_SAMPLES, _TOKENS = 4, 32  # of each rank


@dataclasses.dataclass(frozen=True)
class Report:
    """What `selfcheck` found; ``print`` shows it.

    Args:
        findings: what is to be mended, the first cause first; empty where all is well. Each has
            ``kind``, ``what``, ``parameters``, ``why`` and ``write``.
        facts: what was compared, in words.
    """

    findings: list[Trap]
    facts: list[str]

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        lines = [] if self.findings else ["no finding"]
        for number, finding in enumerate(self.findings, 1):
            lines += lines_of(finding, f"{number}. ")
        return "\n".join([*lines, *self.facts])


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of each next token, of a model that gives logits, alone or with others."""
    output = model(tokens)
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def backward(_: nn.Module, loss: Tensor) -> None:
    """What most training does with a loss."""
    loss.backward()


def selfcheck(
    model_fn: Callable[[], nn.Module],
    layout_fn: Callable[[nn.Module], Any],
    batch_fn: Optional[Callable[[int], Any]] = None,
    loss_fn: Callable[[nn.Module, Any], Tensor] = next_token_loss,
    backward_fn: Callable[[nn.Module, Tensor], Any] = backward,
    *,
    frozen: Sequence[str] = (),
    steps: int = 3,
    ranks: int = 2,
    seed: int = 0,
) -> Report:
    """Trains a model sharded and whole, side by side, and names the first parameter that differs.

    Takes a few steps in exact arithmetic. In each, the gradients of the sharded model, each rank on
    its part of the batch, are compared with those of the whole model on all of it; then both take
    the sharded model's gradients, so that Muon's matrices have to be the same bits after the step.
    At last it loads a checkpoint of the sharded run into one process.

    It tells of groups made before sharding; of experts that are not named, as a slab or AdamW's; of
    transposed stacks; of gradients averaged twice or not at all; of what is frozen; of a missing
    process group; of a wrong split; and of `describe`'s warnings. It ends early where a finding
    leaves nothing to compare.

    Where neither a process group is initialized nor torchrun has started the script, it starts
    ranks on the CPU by itself. They import the script, so that all functions have to be importable,
    the package loaded at the top of the script, and the call below ``if __name__ ==
    "__main__":``.

    Args:
        model_fn: makes the model, whole and with weights, of a size that a rank can train twice.
        layout_fn: shards it by the training's own code. Returns the sharded model; or the model and
            its `Muon`, by default the one that `describe` advises; or these two and the mesh or
            process group whose ranks see different data, by default all ranks: tensor parallelism
            needs it.
        batch_fn: from the number of a step to a batch for all ranks: tensors, in any containers,
            whose first dimension is samples, a multiple of the ranks. torch's random numbers are
            seeded for it. None: random tokens, (samples, 32), below the first embedding's size.
        loss_fn: from a model and a batch to the mean loss of the samples.
        backward_fn: what training does with the sharded model and the loss of a rank until
            ``step()``, where that is more than ``loss.backward()``. It clips nothing.
        frozen: names, components or patterns of parameters that are not to be trained.
        steps: how many.
        ranks: how many are started, where it starts them.
        seed: of weights and batches.

    Returns:
        The report: true where it has no ``findings``. What a function raises is a finding, too.

    Raises:
        ValueError: ranks are to be started, and can't import the functions.
        Exception: from what a function raised on one rank, while others may be in a collective. The
            rank prints the report.

    Example:
        >>> def layout_fn(model):
        ...     for layer in model.layers:
        ...         fully_shard(layer)
        ...     fully_shard(model)
        ...     return model, optimizer.Muon.for_model(model, lr=1e-3)
        >>> if __name__ == "__main__":
        ...     report = optimizer.selfcheck(model_fn, layout_fn, ranks=2)
        ...     print(report)
    """
    functions = (model_fn, layout_fn, batch_fn, loss_fn, backward_fn)
    findings, facts = run_on_ranks(_check, (functions, tuple(frozen), steps, seed), ranks)
    return _report(findings, facts)


def _check(
    functions: tuple, frozen: Sequence[str], steps: int, seed: int
) -> tuple[list[Any], list[str]]:
    """What the ranks found, as plain data, without repetitions, and the facts of this one."""
    findings: list[list[Any]] = []
    facts: list[str] = []
    stages = _stages(functions, frozen, steps, seed, facts)
    while True:
        raised: Optional[Exception] = None
        try:
            traps: Optional[list[Trap]] = next(stages, None)
        except Exception as error:
            traps, raised = [_raised(error)], error
        data = [_data(trap) for trap in traps or ()]
        try:
            answers = gather_json(data, raised is not None)
        except dist.DistStoreError:
            if raised is None:
                raise
            findings += data
            print(f"rank {dist.get_rank()}: {_report(findings, [_ENDED])}", file=sys.stderr)
            raise Alone(findings, [_ENDED]) from raised
        for answer in answers:
            known = {kind for kind, *_ in findings}
            findings += [finding for finding in answer if finding[0] not in known]
        if any(kind in _ENDS for kind, *_ in findings):
            return findings, [_ENDED]
        if any(answer != answers[0] for answer in answers):
            return findings, ["Not all ranks find the same", _ENDED]
        if traps is None:
            return findings, facts


def _stages(
    functions: Any, frozen: Sequence[str], steps: int, seed: int, facts: list[str]
) -> Iterator[list[Trap]]:
    """What each stage finds on this rank; all ranks end after the same one."""
    model_fn, layout_fn, batch_fn, loss_fn, backward_fn = functions
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reference = model_fn()
    if not isinstance(reference, nn.Module):
        raise TypeError(f"model_fn returns the model, found {type(reference).__name__}")
    if any(p.is_meta for p in reference.parameters()):
        raise ValueError("model_fn gives a model on meta: it has to have weights")
    model, optim, data = _sharded(layout_fn(copy.deepcopy(reference)))
    yield list(find_unmatched(model, optim, reference, frozen))
    yield list(find_misread(model, optim, reference))

    device = next(model.parameters()).device
    run = Run(model.eval(), optim, reference.to(device).eval(), data, loss_fn, backward_fn)
    yield run.compare_weights("layout_fn has changed it: model_fn makes the weights")
    for step in range(steps):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + step)
            batch = _tokens(reference, data[1]) if batch_fn is None else batch_fn(step)
        yield run.backward(tree_map_only(Tensor, lambda tensor: tensor.to(device), batch))
        optim.step()
        run.reference_optim.step()
        yield run.compare_weights("gradients were the same bits: the step, or a hook, changed it")
        model.zero_grad()  # of parameters in no group, too
    idle = [name for name in run.params if name in (run.idle or ())]
    yield list(find_frozen(idle, len(run.params), frozen, "no step has given them a gradient"))
    yield run.compare_checkpoint()
    others = len(run.params) - len(run.exact)
    moved = f"within {run.weights:.1g} of what they moved" if run.weights else "equal"
    noisy = f", but {counted(run.noisy, 'parameter')} within bf16's rounding" if run.noisy else ""
    facts += [
        f"{steps} steps on {dist.get_world_size()} ranks: {counted(run.exact, 'parameter')} of "
        f"Muon's bit-equal to the unsharded run's, {others} others {moved}",
        f"gradients within {run.gradients:.1g} of those of the whole batch{noisy}",
        "the checkpoint, loaded by one process, has the same weights and state",
    ]


def _sharded(returned: Any) -> tuple[nn.Module, Muon, tuple[int, int]]:
    """Model, optimizer in exact mode, and which part of the data, from what layout_fn returned."""
    parts: list[Any] = list(returned) if isinstance(returned, tuple) else [returned]
    model, optim, ranks = [*parts, None, None][:3]
    if optim is None and isinstance(model, nn.Module):
        optim = Muon.for_model(model, lr=1e-3)
    if not isinstance(model, nn.Module) or not isinstance(optim, Muon):
        raise TypeError(
            "layout_fn returns a model, (model, Muon), or (model, Muon, mesh of the data), found "
            f"{type(model).__name__}, {type(optim).__name__}"
        )
    for group in optim.param_groups:
        group["ns_dtype"] = None
        if not isinstance(group["lr"], Tensor) and group["lr"] == 0:  # a schedule's first
            group["lr"] = 1e-3
    optim._settings = dataclasses.replace(optim._settings, exact=True, comm_dtype=None)
    optim.qk_recorder = None
    optim._forget_plans()
    if not isinstance(ranks, DeviceMesh):
        return model, optim, (dist.get_rank(ranks), dist.get_world_size(ranks))
    return model, optim, (ranks.mesh.flatten().tolist().index(dist.get_rank()), ranks.size())


def _tokens(model: nn.Module, parts: int) -> Tensor:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise ValueError("the model has no nn.Embedding, so it takes no tokens: give batch_fn")
    return torch.randint(tables[0].num_embeddings, (_SAMPLES * parts, _TOKENS))


def _raised(error: Exception) -> Trap:
    """What an exception says, the caller's line that led to it, and the line that raised it."""
    packages, trace = ("torch.", __name__.rpartition("extras.")[0]), error.__traceback__
    callers, last = "", ""
    while trace is not None:
        code = trace.tb_frame.f_code
        last = f"{code.co_filename}:{trace.tb_lineno}, in {code.co_name}"
        if not f"{trace.tb_frame.f_globals.get('__name__')}.".startswith(packages):
            callers = last
        trace = trace.tb_next
    places = "\n".join(dict.fromkeys(filter(None, (callers, last))))
    return Trap("raised", f"{type(error).__name__}: {error}", (), "", Remedy(wording=places))


def _data(trap: Trap) -> list[Any]:
    return [trap.kind, trap.what, list(trap.parameters), trap.why, trap.write]


def _report(findings: Sequence[Sequence[Any]], facts: list[str]) -> Report:
    return Report(
        [
            Trap(kind, what, tuple(parameters), why, Remedy(wording=write))
            for kind, what, parameters, why, write in findings
        ],
        facts,
    )
