"""Runs the check, from start to report."""

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

# Kinds that leave nothing to compare, or that every later comparison would find again.
_ENDS = {"replaced", "names", "shape", "flat", "nothing", "replicas", "raised"}
_ENDS |= {"gradient", "weights"}
_ENDED = "Later checks did not run: fix this, then check again"
_SAMPLES, _TOKENS = 4, 32  # of each rank


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `selfcheck`; ``print`` shows it.

    Args:
        findings: what to fix, root causes first; empty if all is well. Each has ``kind``, ``what``,
            ``parameters``, ``why``, and ``write``, as `describe.Trap` does.
        facts: what was compared, as text.
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
    """Cross-entropy of the next tokens; the model returns logits, maybe with other outputs."""
    output = model(tokens)
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def backward(_: nn.Module, loss: Tensor) -> None:
    """The default: ``loss.backward()``."""
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

    It takes a few steps in exact arithmetic. Each step compares gradients: of the sharded model,
    where each rank has its part of the batch, and of the whole model on the whole batch. Then both
    models take the sharded model's gradients, so Muon's matrices must be bit-identical after the
    step. Finally, one process loads a checkpoint of the sharded run.

    It finds groups made before sharding, stacked experts that aren't named (read as one matrix, or
    left to AdamW), transposed stacks, gradients averaged twice or not at all, frozen parameters, a
    missing process group, a wrong split, and the traps of `describe`. It ends early if a finding
    leaves nothing to compare.

    It uses an initialized process group or torchrun's ranks. Otherwise it starts ranks on the CPU,
    which import the script: define the functions and load the package at the top of the script, and
    call ``selfcheck`` below ``if __name__ == "__main__":``.

    Args:
        model_fn: returns the whole model with weights, small enough for a rank to train it twice.
        layout_fn: shards the model with the code of your training. Returns the sharded model; or
            the model and its `Muon` (by default what `describe` advises); or these two and the mesh
            or process group of the ranks that see different data (by default all ranks), which
            tensor parallelism needs.
        batch_fn: takes a step's number and returns a batch for all ranks: tensors in any
            containers, whose first dimension counts samples and is a multiple of the number of
            ranks. torch's random seed is set before each call. None uses random tokens, (samples,
            32), smaller than the size of the first embedding.
        loss_fn: takes a model and a batch, and returns the mean loss of its samples.
        backward_fn: takes the sharded model and this rank's loss, and does what training does
            before ``step()``, if that is more than ``loss.backward()``. It must not clip gradients.
        frozen: names, name components, or patterns of parameters that are frozen on purpose.
        steps: number of steps.
        ranks: number of ranks to start.
        seed: seed of weights and batches.

    Returns:
        A report, true if it has no ``findings``. Errors in your functions are findings, too.

    Raises:
        ValueError: ranks would be started, but can't import the functions.
        Exception: a function raised on one rank only, while others may be in a collective. This
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
    """The findings of all ranks as plain data, without duplicates, and the facts of this rank."""
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
            return findings, ["Not all ranks have the same findings", _ENDED]
        if traps is None:
            return findings, facts


def _stages(
    functions: Any, frozen: Sequence[str], steps: int, seed: int, facts: list[str]
) -> Iterator[list[Trap]]:
    """Yields the findings of each stage on this rank; all ranks end after the same stage."""
    model_fn, layout_fn, batch_fn, loss_fn, backward_fn = functions
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reference = model_fn()
    if not isinstance(reference, nn.Module):
        raise TypeError(f"model_fn must return the model, found {type(reference).__name__}")
    if any(p.is_meta for p in reference.parameters()):
        raise ValueError("model_fn returns a model on the meta device; it must have weights")
    model, optim, data = _sharded(layout_fn(copy.deepcopy(reference)))
    yield list(find_unmatched(model, optim, reference, frozen))
    yield list(find_misread(model, optim, reference))

    device = next(model.parameters()).device
    run = Run(model.eval(), optim, reference.to(device).eval(), data, loss_fn, backward_fn)
    yield run.compare_weights("layout_fn has changed it; weights must come from model_fn")
    for step in range(steps):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + step)
            batch = _tokens(reference, data[1]) if batch_fn is None else batch_fn(step)
        yield run.backward(tree_map_only(Tensor, lambda tensor: tensor.to(device), batch))
        optim.step()
        run.reference_optim.step()
        yield run.compare_weights("gradients were bit-identical: the step or a hook changed it")
        model.zero_grad()  # includes parameters in no group
    idle = [name for name in run.params if name in (run.idle or ())]
    yield list(find_frozen(idle, len(run.params), frozen, "they had no gradient in any step"))
    yield run.compare_checkpoint()
    others = len(run.params) - len(run.exact)
    moved = f"within {run.weights:.1g} of their change" if run.weights else "equal"
    noisy = f", but {counted(run.noisy, 'parameter')} within bf16's rounding" if run.noisy else ""
    facts += [
        f"{steps} steps on {dist.get_world_size()} ranks: {counted(run.exact, 'parameter')} of "
        f"Muon bit-identical to the unsharded run, {others} others {moved}",
        f"gradients within {run.gradients:.1g} of the unsharded run's{noisy}",
        "the checkpoint, loaded in one process, has the same weights and state",
    ]


def _sharded(returned: Any) -> tuple[nn.Module, Muon, tuple[int, int]]:
    """Model, optimizer in exact mode, and this rank's part of the data, from layout_fn's result."""
    parts: list[Any] = list(returned) if isinstance(returned, tuple) else [returned]
    model, optim, ranks = [*parts, None, None][:3]
    if optim is None and isinstance(model, nn.Module):
        optim = Muon.for_model(model, lr=1e-3)
    if not isinstance(model, nn.Module) or not isinstance(optim, Muon):
        raise TypeError(
            "layout_fn must return model, (model, Muon), or (model, Muon, mesh of the data), found "
            f"{type(model).__name__}, {type(optim).__name__}"
        )
    for group in optim.param_groups:
        group["ns_dtype"] = None
        if not isinstance(group["lr"], Tensor) and group["lr"] == 0:  # the start of a schedule
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
        raise ValueError("the model has no nn.Embedding, so it takes no tokens: pass batch_fn")
    return torch.randint(tables[0].num_embeddings, (_SAMPLES * parts, _TOKENS))


def _raised(error: Exception) -> Trap:
    """An exception, the caller's line that led to it, and the line that raised it."""
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
