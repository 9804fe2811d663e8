"""`Muon.audit`: what steps did to every matrix, as numbers and as findings.

During an audit, each step leaves norms and a copy of one update on the device. They are read on
request, so no step waits. A rank records its parts of the matrices, and the updates of the matrices
it owns; `Audit.report` merges the records of all ranks.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .. import core
from ..distributed import dtensors, process_groups
from ..distributed.chunks import Batch
from ..distributed.collectives import gather_over_ranks, has_backend
from ..distributed.plan import Entry, Plan
from ..parameters.names import has_component
from ..parameters.options import Group
from ..rules.decisions import default_is_muon
from ..step.binding import Pieces
from ..step.context import Step
from ..weight_rounding import RoundedBy, widen
from .summary import likely_embeddings

# Bounds of a healthy run; anything beyond them is a finding.
SMALLEST_RANK = 0.1  # of the update, over the shorter side
LARGEST_SIGMA = 1.5  # singular value of an orthogonalized matrix
LARGEST_OUTLIER = 20.0  # relative change of a matrix, over the median of all
MOST_LOST = 0.3  # fraction of an update lost to rounding
LARGEST_CHANGE = 0.5  # of the median matrix in a step, relative
LEAST_NONZERO = 0.25  # fraction of a gradient; lower in embeddings, since batches use few tokens
LEAST_GRADIENT = 1e-6  # norm of all gradients, over that of the momentum
LEAST_RMS = 1e-8  # root mean square of all gradients: AdamW's usual eps

NORMS = ("gradient", "momentum", "weight", "update", "change", "lost")
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
_EXPERTS = ("experts",)
_SUMMED = (*NORMS, "nonzero")  # their squares add up over ranks and parts
_OF_MOMENTUM = ("gradient", "momentum", "nonzero")  # divided if replicas divide momentum


@dataclass
class StepRecord:
    """One rank's record of one step.

    Args:
        plan: the step's plan.
        absent: names of matrices without a gradient.
        norms: which of `NORMS` (or "nonzero"), names of parameters, and norms, (n,) on the device.
        owned: for matrices this rank orthogonalized: names of their parameters, shorter sides, and
            Frobenius norms of their polar factors, (n,) on the device.
        samples: names, and polar factors (rows, cols).
    """

    plan: Plan
    absent: list[str]
    norms: list[tuple[str, list[str], Tensor]] = field(default_factory=list)
    owned: list[tuple[list[str], list[int], Tensor]] = field(default_factory=list)
    samples: list[tuple[str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What the audited steps did; ``print`` shows findings first.

    Args:
        findings: what is wrong, the worst first, each with what to do; empty for a healthy run.
        steps: for each audited step, by name of Muon's parameters. Frobenius norms: ``gradient``
            (as `step` received it), ``momentum``, ``weight`` (before the step), ``update`` (with
            decay, in fp32), ``change`` (of the weight, including QK-Clip) and ``lost`` (the part of
            the update lost to rounding). Others: ``shape``; ``numel``; ``matrices``, a count;
            ``owners``, global ranks; ``relative_rank``, the squared norm of the polar factors over
            that of orthogonal matrices; ``nonzero``, the nonzero fraction of the gradient;
            ``absent``, True without a gradient; ``differs``, True if replicas differ; and for some
            ``sigma``, quantiles 0, 0.1, 0.5, 0.9, 1 of the singular values of one polar factor.
    """

    findings: list[str]
    steps: list[dict[str, dict[str, Any]]]

    def __str__(self) -> str:
        lines = [f"{number}. {text}" for number, text in enumerate(self.findings, 1)]
        lines = lines or ["no finding"]
        if self.steps:
            lines.append(f"the last of {len(self.steps)} steps:")
            width = max(map(len, self.steps[-1]), default=0)
            lines.append(f"{'':{width}}  change/weight      lost  rel. rank  owners")
        for name, row in self.steps[-1].items() if self.steps else ():
            relative = _ratio(row["change"], row["weight"])
            lost, owners = _ratio(row["lost"], row["update"]), ", ".join(map(str, row["owners"]))
            rank = f"{row['relative_rank']:9.2f}" if row["owners"] else f"{'–':>9}"
            lines.append(f"{name:{width}}  {relative:13.2e}  {lost:8.1e}  {rank}  {owners}")
        return "\n".join(lines)


class Audit:
    """Watches an optimizer's steps until ``stop()`` is called or its context ends.

    Attributes:
        is_on: True while it watches; may be set.
        steps: records of the last watched steps, at most ``keep``; their samples use device memory.
    """

    def __init__(self, keep: int) -> None:
        self.is_on = True
        self.steps: deque[StepRecord] = deque(maxlen=keep)
        self._groups: Sequence[Group] = ()
        self._absent: frozenset[int] = frozenset()
        self._seen = 0  # matrices that this rank has orthogonalized in the step
        self._due = -1  # index of the matrix whose polar factor is kept

    def stop(self) -> None:
        """Stops watching, for good unless ``is_on`` is set again."""
        self.is_on = False

    def __enter__(self) -> Audit:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # -- in a step -----------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Begins the record of a step."""
        self._groups, self._absent = step.groups, step.absent
        names = [step.plan.entries[number].name for number in step.absent]
        self._record = StepRecord(step.plan, names)
        # A different matrix in each step.
        self._due, self._seen = (self._due + 1) % max(1, self._seen), 0

    def watching(self, function: Callable[..., None], pieces: Pieces) -> Callable[..., None]:
        """`core.update_momentum` or `core.update_weights`, recording what it does to the pieces."""
        watched = self._momentum if function is core.update_momentum else self._weights
        return partial(watched, self._names(pieces.entries))

    def _momentum(
        self,
        names: list[str],
        momenta: list[Tensor],
        grads: list[Tensor],
        outputs: Optional[list[Tensor]],
        **options: Any,
    ) -> None:
        """Updates momentum, and records norms of gradients and of the new momentum."""
        core.update_momentum(momenta, grads, outputs, **options)
        if not momenta:
            return
        for what, tensors in (("gradient", grads), ("momentum", momenta)):
            self._record.norms.append((what, names, _norms(tensors)))
        counts = torch.stack([grad.count_nonzero() for grad in grads])
        self._record.norms.append(("nonzero", names, counts.float().sqrt()))

    def orthogonalized(self, batch: Batch, U: Tensor) -> None:
        """Records norms of polar factors (matrices, rows, cols): the active part of a batch."""
        units = [unit for unit in batch.units if unit.entry not in self._absent]
        names = self._names(unit.entry for unit in units for _ in range(unit.count))
        sides = [min(U.shape[-2:])] * len(U)
        norms = torch.linalg.vector_norm(U, dim=(-2, -1), dtype=_widened(U))
        self._record.owned.append((names, sides, norms))
        place = self._due - self._seen
        if 0 <= place < len(U):
            self._record.samples.append((names[place], U[place].clone()))
        self._seen += len(U)

    def _weights(
        self,
        names: list[str],
        weights: list[Tensor],
        updates: list[Tensor],
        *,
        together: Optional[Tensor],
        rounded_by: Optional[list[RoundedBy]],
        clip: Optional[list[Optional[Tensor]]],
        **options: Any,
    ) -> None:
        """Updates and clips weights, and records norms of their changes."""
        if not weights:
            return
        before = _exact(weights, rounded_by, copy=True)
        wanted: Optional[list[Tensor]] = None  # the updated weights, not rounded
        if weights[0].dtype.itemsize == 2:
            wanted, copies = ([tensor.clone() for tensor in of] for of in (before, updates))
            core.update_weights(wanted, copies, **options)
        core.update_weights(weights, updates, together=together, rounded_by=rounded_by, **options)
        updated = _exact(weights, rounded_by)
        changes = sizes = _norms(torch._foreach_sub(updated, before))
        lost = torch.zeros_like(sizes)
        if wanted is not None:
            sizes = _norms(torch._foreach_sub(wanted, before))
            lost = _norms(torch._foreach_sub(updated, wanted))
        if clip is not None:
            core.clip_weights(weights, clip, rounded_by)
            changes = _norms(torch._foreach_sub(_exact(weights, rounded_by), before))
        measured = {"weight": _norms(before), "update": sizes, "lost": lost, "change": changes}
        self._record.norms += [(what, names, norms) for what, norms in measured.items()]

    def end(self) -> None:
        """Keeps the record of a completed step."""
        self.steps.append(self._record)

    def _names(self, entries: Iterable[int]) -> list[str]:
        return [self._record.plan.entries[number].name for number in entries]

    # -- afterwards ----------------------------------------------------------------------------

    def rows(self, record: StepRecord) -> dict[str, dict[str, Any]]:
        """This rank's share of `Report.steps`, with norms whose squares add up over ranks."""
        rank, rows = record.plan.rank, dict[str, dict[str, Any]]()
        copies: dict[str, dict[str, int]] = {}
        for entry in record.plan.entries:
            sharding = entry.sharding
            rows[entry.name] = {
                **dict.fromkeys(_SUMMED, 0.0),
                "matrices": 0,
                "owners": [],
                "relative_rank": 0.0,
                "absent": entry.name in record.absent,
                "shape": list(entry.matrices.shape),
                "numel": math.prod(entry.matrices.shape),
                "is_plain": sharding is None and not has_component(entry.name, _EXPERTS),
                "differs": False,
                "held_by": process_groups.key_of_ranks(
                    (rank,) if sharding is None else sharding.ranks
                ),
            }
            # Every replica adds its norms of the same weights. If replicas divide the momentum,
            # each has norms of its own part of momentum and gradient.
            holders = 1 if sharding is None else len(sharding.peers(rank, (), replicas=True))
            of_momentum = holders if entry.momentum_sharding is None else 1
            copies[entry.name] = {
                **dict.fromkeys(_SUMMED, holders),
                **dict.fromkeys(_OF_MOMENTUM, of_momentum),
            }
        for what, names, norms in record.norms:
            for name, norm in zip(names, norms.tolist()):
                share = norm / math.sqrt(copies[name][what])
                rows[name][what] = math.hypot(rows[name][what], share)
        for names, sides, norms in record.owned:
            for name, side, norm in zip(names, sides, norms.tolist()):
                rows[name]["matrices"] += 1
                rows[name]["owners"] = [rank]
                rows[name]["relative_rank"] += norm**2 / side
        return rows

    def _rows_with_sigma(self, record: StepRecord) -> dict[str, dict[str, Any]]:
        rows = self.rows(record)
        for name, U in record.samples:
            if not U.isfinite().all():  # no singular values
                continue
            sigma = torch.linalg.svdvals(U.to(_widened(U)))
            at = torch.tensor(QUANTILES, dtype=sigma.dtype, device=sigma.device)
            rows[name]["sigma"] = torch.quantile(sigma, at).tolist()
        return rows

    def report(self) -> Report:
        """Reports what the steps did. Call it on all ranks: they wait for the device, and exchange
        a few numbers for each matrix and step."""
        rows = [self._rows_with_sigma(record) for record in self.steps]
        mine = json.dumps([rows, self._suspects()])
        texts = _gather_texts(mine) if dtensors.world_size() > 1 else [mine]
        steps_of_ranks, suspects_of_ranks = zip(*map(json.loads, texts))
        steps = [_merged(of_ranks) for of_ranks in zip(*steps_of_ranks)]
        suspects = {
            key: sorted(set(chain.from_iterable(each[key] for each in suspects_of_ranks)))
            for key in suspects_of_ranks[0]
        }
        findings, counts = list(_findings(steps, **suspects)), list(map(len, steps_of_ranks))
        if len(set(counts)) > 1:
            findings.insert(
                0,
                f"ranks audited different numbers of steps, {counts}, so sums over ranks may mix "
                "steps. Turn audits on and off at the same steps on all ranks",
            )
        return Report(findings, steps)

    def _suspects(self) -> dict[str, list[str]]:
        """Names of this rank's parameters, by argument of `_findings`."""
        entries = self.steps[-1].plan.entries if self.steps else ()
        roundings = {entry.name: self._groups[entry.group].weight_rounding for entry in entries}
        return {
            "left_to_adamw": _left_to_adamw(self._groups),
            "slabs": _slabs(self._groups, entries),
            "at_random": [name for name, mode in roundings.items() if mode == "stochastic"],
            "tables": [f"{n} ({why})" for n, why in likely_embeddings(self._groups).items()],
        }

    def metrics(self) -> dict[str, float]:
        """See `Muon.metrics`."""
        if not self.steps:
            return {}
        rows = self.rows(self.steps[-1]).values()
        total = {what: math.hypot(*(row[what] for row in rows)) for what in NORMS}
        owned = sum(row["matrices"] for row in rows)
        return {
            **{f"muon/{what}_norm": total[what] for what in ("gradient", "momentum", "weight")},
            "muon/change_over_weight": _ratio(total["change"], total["weight"]),
            "muon/lost_by_rounding": _ratio(total["lost"], total["update"]),
            "muon/orthogonalized": float(owned),
            "muon/without_gradient": float(sum(row["absent"] for row in rows)),
            "muon/relative_rank": _ratio(sum(row["relative_rank"] for row in rows), owned),
        }


def _exact(
    weights: Sequence[Tensor], rounded_by: Optional[Sequence[RoundedBy]], copy: bool = False
) -> list[Tensor]:
    """The weights in the dtype of the arithmetic, including their residuals."""
    if rounded_by is not None:
        return widen(weights, rounded_by)
    return [weight.to(_widened(weight), copy=copy) for weight in weights]


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Frobenius norms, (tensors,).

    Each tensor is first divided by its largest magnitude, because squares in fp32 overflow above
    1e19 and underflow below 1e-23.
    """
    dtype = _widened(tensors[0])
    largest = torch.stack(torch._foreach_norm(list(tensors), torch.inf, dtype))
    scales = torch.where(largest.isfinite() & (largest > 0.0), largest, 1.0)
    scaled = (tensor.to(dtype) / scale for tensor, scale in zip(tensors, scales.unbind()))
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in scaled]) * scales


def _widened(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


def _merged(of_ranks: Iterable[Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The rows of one step, merged from all ranks.

    If several meshes hold a parameter, as replicas without a common mesh do, the first one counts.
    """
    merged: dict[str, dict[str, Any]] = {}
    for rows in of_ranks:
        for name, row in rows.items():
            so_far = merged.setdefault(name, row)
            if so_far is row:
                continue
            if so_far["held_by"] != row["held_by"]:
                is_replica = so_far["is_plain"] and row["is_plain"]
                so_far["differs"] |= is_replica and so_far["weight"] != row["weight"]
                continue
            for key in _SUMMED:
                so_far[key] = math.hypot(so_far[key], row[key])
            for key in ("matrices", "owners", "relative_rank"):
                so_far[key] += row[key]
            so_far["absent"] |= row["absent"]
            if "sigma" in row:
                so_far["sigma"] = row["sigma"]
    for row in merged.values():
        del row["held_by"], row["is_plain"]
        row["nonzero"] = _ratio(row["nonzero"] ** 2, row["numel"])
        row["relative_rank"] = _ratio(row["relative_rank"], row["matrices"])
    return merged


# -- findings ----------------------------------------------------------------------------------


def _left_to_adamw(groups: Sequence[Group]) -> list[str]:
    """Names of matrices that AdamW trains although Muon trains matrices of the same name and shape
    in other layers. If Muon trains none, this lists all matrices that it could train."""

    def kind(name: str, param: Tensor) -> tuple[str, torch.Size]:
        return re.sub(r"\d+", "*", name), param.shape

    trained = [
        (group.use_muon, name, param)
        for group in groups
        for name, param in zip(group.names or (), group.params)
        if param.requires_grad
    ]
    kinds = {kind(name, param) for use_muon, name, param in trained if use_muon}
    return [
        name
        for use_muon, name, param in trained
        if not use_muon and default_is_muon(name, param)
        if not kinds or kind(name, param) in kinds
    ]


def _slabs(groups: Sequence[Group], entries: Iterable[Entry]) -> list[str]:
    """Names of stacks of experts that AdamW trains or that are read as one matrix."""
    stacks = [
        (group.use_muon, name)
        for group in groups
        for name, param in zip(group.names or (), group.params)
        if math.prod(param.shape[:-2]) > 1 and has_component(name, _EXPERTS)
    ]
    slabs = {
        entry.name
        for entry in entries
        if sum(math.prod(block.shape[: block.row_axis]) for block in entry.matrices.blocks) == 1
    }
    return [name for use_muon, name in stacks if not use_muon or name in slabs]


Rows = Mapping[str, Mapping[str, Any]]  # one of `Report.steps`


def _findings(
    steps: Sequence[Rows],
    left_to_adamw: list[str],
    slabs: list[str],
    at_random: list[str],
    tables: list[str],
) -> Iterator[str]:
    """Yields all findings, the worst first.

    Args:
        steps: as in `Report`.
        left_to_adamw, slabs: names, see `_left_to_adamw` and `_slabs`.
        at_random: names of parameters with stochastic rounding, whose losses cancel over steps.
        tables: names of matrices that may be embeddings or heads, with the reason.
    """
    if not steps:
        yield "no step was audited"
        return
    names = list(steps[-1])
    if not names:
        to_adamw = f": {_some(left_to_adamw)} went to AdamW" if left_to_adamw else ""
        yield (
            f"no matrix was orthogonalized{to_adamw}. Make the optimizer with Muon.for_model; "
            "describe(model) says why"
        )
        return
    if left_to_adamw:
        yield (
            f"AdamW trains {_some(left_to_adamw)}, but Muon trains the same matrix in other "
            "layers. Is that what you meant?"
        )
    if slabs:
        yield (
            f"{_some(slabs)} are stacks of experts that AdamW trains, or that Muon orthogonalizes "
            "as one matrix each. Name them in expert_keys, or split them"
        )
    if tables:
        yield f"Muon trains {_some(tables)}. Are these embeddings or heads? {_TO_ADAMW}"
    yield from _findings_of_gradients(steps)
    for check in _CHECKS:
        judged = {n: [check.is_so(rows[n]) for rows in steps if n in rows] for n in names}
        found = [name for name, are in judged.items() if (all if check.in_all else any)(are)]
        if check is _LOSES:
            found = [name for name in found if name not in at_random]
        if found:
            many = f"{len(found)} of {len(names)} matrices"
            yield f"{many} {check.what}: {_some(found)}. {check.advice}"
    yield from _findings_of_sizes(steps, names)


def _findings_of_gradients(steps: Sequence[Rows]) -> Iterator[str]:
    """Gradients that are too small in all matrices, and the first step with Inf or NaN."""
    totals = [
        [math.hypot(*(row[what] for row in rows.values())) for what in ("gradient", "momentum")]
        for rows in steps
    ]
    share = median(_ratio(*of_both) for of_both in totals)
    numel = sum(row["numel"] for row in steps[-1].values())
    rms = median(gradient for gradient, _ in totals) / math.sqrt(max(1, numel))
    if 0.0 < share < LEAST_GRADIENT:
        yield f"gradients are {share:.0e} of the momentum. Were they clipped or unscaled too far?"
    elif 0.0 < rms < LEAST_RMS:
        yield (
            f"gradients have a root mean square of {rms:.0e}, less than AdamW's eps. Were they "
            "clipped or unscaled too far?"
        )
    for number, rows in enumerate(steps, 1):
        bad = [what for what in NORMS if any(not math.isfinite(r[what]) for r in rows.values())]
        if bad:
            found = {n for rows in steps for n, row in rows.items() if not _is_finite(row)}
            advice = "Is lr too large?"
            if bad[0] == "gradient":
                advice = "Skip such steps, and look for the cause in the loss and the data"
            yield (
                f"{len(found)} of {len(rows)} matrices have had Inf or NaN since audited step "
                f"{number}, first in the {bad[0]}: {_some(sorted(found))}. {advice}"
            )
            return


def _is_finite(row: Mapping[str, Any]) -> bool:
    return all(math.isfinite(row[what]) for what in NORMS)


def _findings_of_sizes(steps: Sequence[Rows], names: Sequence[str]) -> Iterator[str]:
    """Updates that are too large for their weights; weights that start at zero are left out."""
    changes = {
        name: median(_ratio(rows[name]["update"], rows[name]["weight"]) for rows in steps)
        for name in names
        if all(name in rows for rows in steps) and steps[0][name]["weight"] > 0.0
    }
    middle = median(changes.values()) if changes else 0.0
    if middle > LARGEST_CHANGE:
        yield f"updates are {middle:.1g} of the weights in each step. Is lr too large?"
    far = sorted((change, n) for n, change in changes.items() if change > LARGEST_OUTLIER * middle)
    if middle and far:
        yield (
            f"{len(far)} of {len(names)} matrices have updates over {LARGEST_OUTLIER:g} times the "
            f"median, relative to their weights: {_some([n for _, n in far[::-1]])}. Do these "
            "weights start too small, or is their lr too large?"
        )


class _Check(NamedTuple):
    """A fault that a matrix may have.

    Args:
        what: the fault, in words.
        advice: what to do about it.
        is_so: True if a matrix has the fault, judged by its row in `Report.steps`.
        in_all: True if the fault must occur in all steps; otherwise one is enough.
    """

    what: str
    advice: str
    is_so: Callable[[Mapping[str, Any]], bool]
    in_all: bool = True


_TO_ADAMW = "AdamW trains those better: name them in adamw_keys of Muon.for_model"


def _is_sparse(row: Mapping[str, Any]) -> bool:
    """True if it may be an embedding; gradients of wide matrices after ReLU have zeros too."""
    is_tall = len(row["shape"]) == 2 and row["shape"][0] > row["shape"][1]
    return is_tall and row["matrices"] == 1 and 0.0 < row["nonzero"] < LEAST_NONZERO


def _is_flat(row: Mapping[str, Any]) -> bool:
    has_update = row["matrices"] > 0 and row["gradient"] > 0
    return has_update and row["relative_rank"] < SMALLEST_RANK


_LOSES = _Check(
    f"lost over {MOST_LOST:.0%} of an update to rounding",
    'weight_rounding="exact" keeps it',
    lambda row: _ratio(row["lost"], row["update"]) > MOST_LOST,
    in_all=False,
)
_CHECKS = (
    _Check(
        "are plain tensors whose weights differ on other ranks",
        "Are gradients averaged? Use DDP, or grad_reduce with a process_group",
        lambda row: row["differs"],
        in_all=False,
    ),
    _Check(
        "had no gradient",
        "Do they belong to the trained model? Does zero_grad() come after step()?",
        lambda row: row["absent"],
    ),
    _Check(
        "had gradients of zeros",
        "Is their part of the model detached or unused?",
        lambda row: not row["absent"] and row["gradient"] == 0.0,
    ),
    _Check(
        "did not change",
        "Is lr zero, or too small for their dtype?",
        lambda row: row["gradient"] > 0.0 and row["change"] == 0.0,
    ),
    _Check(
        f"have updates with a rank under {SMALLEST_RANK:g} of their shorter side",
        "Do gradients reach all of their rows?",
        _is_flat,
    ),
    _Check(
        f"had gradients with zeros in over {1 - LEAST_NONZERO:.0%} of their elements",
        f"Are they embeddings? {_TO_ADAMW}",
        _is_sparse,
    ),
    _Check(
        f"have updates with singular values above {LARGEST_SIGMA:g}",
        "Do ns_coefficients diverge?",
        lambda row: row.get("sigma", [0.0])[-1] > LARGEST_SIGMA,
        in_all=False,
    ),
    _LOSES,
)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _gather_texts(text: str) -> list[str]:
    """Gathers the texts of all ranks; the host waits."""
    world, host = dist.group.WORLD, torch.device("cpu")
    device = host if has_backend(world, host) else torch.accelerator.current_accelerator()
    sent = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    lengths = gather_over_ranks(torch.tensor([len(sent)], device=device), world).flatten().tolist()
    padded = sent.new_zeros(max(lengths))
    padded[: len(sent)] = sent
    rows = gather_over_ranks(padded, world).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths)]
