"""One chunk of a step: momentum → gather → orthogonalize → give back → update the weights.

Every rank updates the momentum of what it holds and sends it to the owners of the matrices; the
owners orthogonalize whole matrices and send every rank its part of the update. Where a rank holds
whole matrices the same happens without traffic, which is all that happens on one device.

Buffers in flight belong to their chunk until the collective that uses them has been waited for;
waiting makes the current stream wait, not the host, and all later work is on that stream.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from . import core
from .async_utils import Task, interleave
from .distributed import layout, wire
from .distributed import utils as dtensors
from .distributed.collectives import all_gather_slots
from .distributed.plan import (
    Batch,
    Bundle,
    Chunk,
    Entry,
    Lane,
    Plan,
    Run,
    Traffic,
    Unit,
    turn_of,
)
from .distributed.replicas import Replicas
from .distributed.zero2 import MeanGradients
from .newton_schulz import newton_schulz
from .options import OptimizerWide
from .scratch import Scratch

State = Mapping[Tensor, Mapping[str, Tensor]]
Hyper = Mapping[str, Any]


class Step:
    """What the chunks of one step share.

    Args:
        plan: what to do.
        groups: hyperparameters and parameters of each group.
        state: ``momentum_buffer`` and ``second_momentum_buffer`` of each parameter.
        wide: options that hold for all groups.
    """

    def __init__(self, plan: Plan, groups: Sequence[Hyper], state: State, wide: OptimizerWide):
        self.plan = plan
        self.groups = groups
        self.wide = wide
        self.params = [groups[entry.group]["params"][entry.index] for entry in plan.entries]
        self.state = [state[param] for param in self.params]
        self.weights = [dtensors.local(param) for param in self.params]
        self.momenta = [dtensors.local(own["momentum_buffer"]) for own in self.state]
        self.grads: dict[int, Tensor] = {}
        self.unread = Counter(plan.reads)
        self.finite: dict[int, Tensor] = {}  # by id of a unit, (matrices,), with nonfinite="skip"
        self.scratch = Scratch()
        self.means = None if wide.divided is None else _Means(self, wide.divided)

    def run(self, meanwhile: Callable[[], None]) -> None:
        """Updates all matrices; ``meanwhile`` is other work, done under the first gathers.

        In ZeRO-2 that has traffic of its own, which takes its turn among the lanes: under those of
        the same ranks, or between the others. Out of turn, two ranks would use one process group
        in different orders, since each may have another first lane.
        """

        lanes = [(lane, self._process_group(lane)) for lane in self.plan.lanes]
        _find_nonfinite(self, lanes)
        turn, is_under = self._turn_of_others()

        def without_traffic() -> None:
            for lane in self.plan.alone:
                interleave(self._chunks(lane, None), in_flight=1)

        def hidden_under(number: int) -> None:
            if number == 0:
                without_traffic()
            if number == turn and is_under:
                meanwhile()

        for number, (lane, group) in enumerate(lanes):
            if number == turn and not is_under:
                meanwhile()
            hidden = functools.partial(hidden_under, number)
            interleave(self._chunks(lane, group), lane.in_flight, hidden)
        if not lanes:
            without_traffic()
        if turn == len(lanes):
            meanwhile()
        for entry, param in enumerate(self.params):
            self._release_grad(entry)
            if dtensors.is_dtensor(param):
                torch.autograd.graph.increment_version(param)

    def _turn_of_others(self) -> tuple[int, bool]:
        """The number of the lane with which other work has its turn, and whether under it."""
        replicas = self.wide.divided
        if replicas is None or len(replicas.ranks) == 1:  # without traffic
            return 0, bool(self.plan.lanes)
        ranks = tuple(sorted(replicas.ranks))
        turn = sum(turn_of(lane.peers) < turn_of(ranks) for lane in self.plan.lanes)
        return turn, turn < len(self.plan.lanes) and self.plan.lanes[turn].peers == ranks

    def _chunks(self, lane: Lane, group: Any) -> Iterator[Task]:
        return (update_chunk(chunk, lane, group, self) for chunk in lane.chunks)

    def _process_group(self, lane: Lane) -> Any:
        param = self.params[lane.owners[0][0].entry]
        return dtensors.process_group(param, lane.peers, self.wide.process_group)

    def entry(self, unit: Unit) -> Entry:
        return self.plan.entries[unit.entry]

    def hyper(self, unit: Unit) -> Hyper:
        return self.groups[self.entry(unit).group]

    def average_gradients(self, chunk: Chunk) -> None:
        """Starts to, in ZeRO-2, for what a chunk needs; on all ranks alike."""
        if self.means is not None:
            self.means.launch(chunk)

    def grad(self, unit: Unit) -> Tensor:
        """The gradient of the unit's parameter where its momentum is; zeros where there is none."""
        number = unit.entry
        if number not in self.grads:
            self.grads[number] = self._grad(number)
        return self.grads[number]

    def _grad(self, number: int) -> Tensor:
        if self.means is not None and number in self.means.numbers:
            return self.means.rows(number)
        grad, entry = self.params[number].grad, self.plan.entries[number]
        grad = torch.zeros_like(self.weights[number]) if grad is None else dtensors.local(grad)
        if entry.momentum is not None:  # replicas divide the momentum, not the gradient
            grad = grad[layout.slices(entry.momentum_region(self.plan.rank))]
        return grad

    def was_read(self, units: Sequence[Unit]) -> None:
        """Lets a gradient go once all units of its parameter have been read."""
        for unit in units:
            self.unread[unit.entry] -= 1
            if not self.unread[unit.entry]:
                self._release_grad(unit.entry)

    def _release_grad(self, number: int) -> None:
        self.grads.pop(number, None)
        self.drop_grad(number)

    def drop_grad(self, number: int) -> None:
        """Lets a gradient go that has been read, where that is asked for.

        Not in capturable groups: the backward of a replayed graph writes where it was captured.
        """
        hyper = self.groups[self.plan.entries[number].group]
        if hyper["none_grad"] and not hyper["capturable"]:
            self.params[number].grad = None

    def second_moment(self, unit: Unit) -> Tensor:
        """V of a unit's matrices, a view (experts…, matrices of each, long side)."""
        entry = self.entry(unit)
        row_dim = entry.matrices.row_dim
        start, stop = unit.box[row_dim]
        count = (stop - start) // unit.rows
        numbers = entry.matrices.second_moment_interval(start, unit.rows, count)
        held = entry.region(self.plan.rank)[:row_dim]
        experts = layout.slices(layout.relative(unit.box[:row_dim], held))
        V = dtensors.local(self.state[unit.entry]["second_momentum_buffer"])
        return V[(*experts, slice(*numbers))].unflatten(-1, (count, -1))

    def keep(self, unit: Unit, box: layout.Region) -> Optional[Tensor]:
        """Whether to update, for the elements of a part of a unit; broadcasts to them."""
        if id(unit) not in self.finite:
            return None
        row_dim = self.entry(unit).matrices.row_dim
        experts = layout.shape_of(unit.box[:row_dim])
        by_matrix = self.finite[id(unit)].view(*experts, -1, 1)
        rows = by_matrix.expand(*by_matrix.shape[:-1], unit.rows).flatten(-2)[
            (..., slice(*box[row_dim]))
        ]
        return rows.view(*rows.shape, *(1 for _ in box[row_dim + 1 :]))


class _Means:
    """Gradients of replicas, averaged over their ranks in the order in which chunks need them."""

    def __init__(self, step: Step, replicas: Replicas):
        self.numbers: dict[int, int] = {}  # of entries, in the order of the first chunk of each
        self._through: dict[int, int] = {}  # by id of a chunk, the last that it needs
        for lane in (*step.plan.lanes, *step.plan.alone):
            for chunk, units in zip(lane.chunks, lane.rounds):
                for unit, _ in units:
                    if step.entry(unit).momentum is not None:
                        self.numbers.setdefault(unit.entry, len(self.numbers))
                self._through[id(chunk)] = len(self.numbers) - 1
        entries = list(self.numbers)
        self._gradients = MeanGradients(
            [step.params[entry] for entry in entries],
            [True] * len(entries),
            replicas.group,
            on_read=lambda number: step.drop_grad(entries[number]),
            scratch=step.scratch,
        )

    def launch(self, chunk: Chunk) -> None:
        if self._through[id(chunk)] >= 0:
            self._gradients.launch_through(self._through[id(chunk)])

    def rows(self, entry: int) -> Tensor:
        return self._gradients.result(self.numbers[entry])


def update_chunk(chunk: Chunk, lane: Lane, group: Any, step: Step) -> Task:
    """Updates weights and state of a chunk's matrices.

    Yields when the momentum is on its way to the owners, and when the updates are on their way
    back; without traffic there is nothing to wait for.
    """
    take, give = step.scratch.take, step.scratch.give
    step.average_gradients(chunk)
    momentum = _momentum(chunk, lane, step)
    gathered = take(sum(chunk.gather.received), lane.wire, lane.device)
    gathering = _exchange(momentum[chunk.kept :], gathered, chunk.gather, group)
    yield
    _wait(gathering)
    updates, returned = momentum, gathered
    only_own = lane.everywhere or chunk.slot > 0
    if not chunk.in_place:
        updates = take(chunk.kept_back + sum(chunk.scatter.received), lane.wire, lane.device)
        returned = take(0 if only_own else sum(chunk.scatter.sent), lane.wire, lane.device)
    if chunk.slot:  # nothing undefined is sent where it is padded
        updates[lane.me * chunk.slot :][: chunk.slot].zero_()
    for batch in chunk.batches:
        U = _orthogonalize(_assemble(batch, momentum, gathered, lane, step), batch, step)
        _give_back(U, batch, updates, None if only_own else returned, lane, step)
    if not chunk.in_place:
        give(momentum, gathered)
    scattering = None
    if chunk.slot:
        scattering = all_gather_slots(updates, group)
    elif not lane.everywhere:
        scattering = _exchange(returned, updates[chunk.kept_back :], chunk.scatter, group)
    yield
    _wait(scattering)
    _update_weights(chunk, updates, lane, step)
    give(updates, returned)


def _exchange(sent: Tensor, received: Tensor, traffic: Traffic, group: Any) -> Any:
    """Starts one all-to-all; None without a group."""
    if group is None:
        return None
    return dist.all_to_all_single(
        received, sent, list(traffic.received), list(traffic.sent), group=group, async_op=True
    )


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _momentum(chunk: Chunk, lane: Lane, step: Step) -> Tensor:
    """Updates the momentum and returns what is to be orthogonalized, in the order of the wire."""
    buffer = step.scratch.take(chunk.kept + sum(chunk.gather.sent), lane.wire, lane.device)
    exponents: list[tuple[int, Tensor]] = []
    dtype = lane.wide if lane.scaled else core.update_dtype(lane.wire, lane.wide, lane.device)
    for run in chunk.momentum:
        start, stop = run[0].start, _end(run)
        if not run[0].travels:
            unread = step.scratch.empty("wide", (stop - start,), lane.wide, lane.device)
            _update_momentum(run, unread, start, step)
            continue
        sent = buffer[start:stop]
        written = step.scratch.wide(sent, dtype)
        if lane.scaled:
            exponents += _update_and_scale(run, written, sent, start, step)
        else:
            _update_momentum(run, written, start, step)
            if dtype != lane.wire:
                sent.copy_(written)
    for place, of_bundle in exponents:  # last: they lie between the parts that runs write
        buffer[place : place + len(of_bundle)].copy_(of_bundle)
    if lane.everywhere and chunk.kept:
        buffer[chunk.kept :].view(-1, chunk.kept).copy_(buffer[: chunk.kept])
    return buffer


def _update_momentum(
    run: Run, written: Tensor, start: int, step: Step, largest: Optional[Tensor] = None
) -> None:
    """Updates the momentum of a run; what is to be orthogonalized goes into ``written``.

    The largest magnitude of every part goes into ``largest``.
    """
    by_group: dict[int, list[tuple]] = defaultdict(list)
    slots = itertools.repeat(None) if largest is None else iter(largest.unbind())
    for bundle in run:
        outputs = _views(written, bundle.start - start, bundle.shape)
        for unit, index, output in zip(bundle.units, bundle.indices, outputs):
            momentum = _part_of(step.momenta[unit.entry], index)
            grad = _part_of(step.grad(unit), index)
            row = momentum, grad, output, step.keep(unit, bundle.box), next(slots)
            by_group[step.entry(unit).group].append(row)
        step.was_read(bundle.units)
    for group, rows in by_group.items():
        hyper = step.groups[group]
        momenta, grads, outputs, kept, slots_of_group = map(list, zip(*rows))
        core.update_momentum(
            momenta,
            grads,
            outputs,
            momentum=hyper["momentum"],
            nesterov=hyper["nesterov"],
            style=hyper["momentum_style"],
            maximize=hyper["maximize"],
            keep=kept if hyper["nonfinite"] == "skip" else None,
            wanted=run[0].travels,
            largest=None if largest is None else slots_of_group,
        )


def _update_and_scale(
    run: Run, wide: Tensor, sent: Tensor, start: int, step: Step
) -> list[tuple[int, Tensor]]:
    """Updates the momentum of a run; what is to be orthogonalized goes into ``sent``, scaled.

    Returns:
        Exponents of each bundle's parts with their place in the buffer.
    """
    bundles = [bundle for bundle in run if bundle.numel]
    counts = [len(bundle.units) for bundle in bundles]
    largest = torch.empty(sum(counts), dtype=wide.dtype, device=wide.device)
    _update_momentum(run, wide, start, step, largest)
    if not bundles:
        return []
    parts, outputs = (
        [view for b in bundles for view in _views(flat, b.start - start, b.shape)]
        for flat in (wide, sent)
    )
    exponents = wire.scale_down(parts, outputs, largest).split(counts)
    return [(bundle.along, of) for bundle, of in zip(bundles, exponents)]


def _assemble(batch: Batch, momentum: Tensor, gathered: Tensor, lane: Lane, step: Step) -> Tensor:
    """Whole units, (n, *shape of each), from the peers' parts."""
    shape = (len(batch.units), *layout.shape_of(batch.units[0].box))
    if len(lane.peers) == 1:  # they are whole already
        return momentum[batch.parts[0].gathered :][: math.prod(shape)].view(shape)
    X = step.scratch.empty("gathered", shape, lane.wire, lane.device)
    here, there, exponents = [], [], []
    for part in batch.parts:
        numel = layout.numel(part.momentum) * shape[0]
        if numel:
            source = momentum if part.peer == lane.me else gathered
            here.append(X[(slice(None), *layout.slices(part.momentum))])
            there.append(source[part.gathered : part.gathered + numel].view(here[-1].shape))
            exponents.append(source[part.gathered + numel :][: shape[0]])
    torch._foreach_copy_(here, there)
    if lane.scaled:
        wire.align(here, torch.stack(exponents))
    return X


def _orthogonalize(X: Tensor, batch: Batch, step: Step) -> Tensor:
    """The polar factor of every matrix, (n, rows, cols)."""
    unit = batch.units[0]
    hyper = step.hyper(unit)
    return newton_schulz(
        X.view(-1, unit.rows, step.entry(unit).matrices.cols),
        hyper["ns_steps"],
        hyper["ns_coefficients"],
        norm=hyper["ns_norm"],
        algorithm=hyper["ns_algorithm"],
        dtype=step.entry(unit).recipe.dtype,
        eps=hyper["ns_eps"],
        scratch=step.scratch,
    )


def _give_back(
    U: Tensor, batch: Batch, updates: Tensor, returned: Optional[Tensor], lane: Lane, step: Step
) -> None:
    """Puts every peer's part of the update, with its mean squares, where it is sent from.

    Where nothing is returned to single peers, only this rank's own part.
    """
    unit = batch.units[0]
    units = U.view(len(batch.units), *layout.shape_of(unit.box))
    v = core.second_moment(U, step.scratch) if step.hyper(unit)["beta2"] is not None else None
    here, there = [], []
    for part in batch.parts:
        buffer = updates if part.peer == lane.me else returned
        if buffer is None:
            continue
        numel = layout.numel(part.weights) * len(batch.units)
        start, stop = part.returned, part.returned + numel
        if numel:
            there.append(units[(slice(None), *layout.slices(part.weights))])
            here.append(buffer[start:stop].view(there[-1].shape))
        if v is not None:
            wire.write_numbers(v, buffer, stop)
    if here:
        torch._foreach_copy_(here, there)


def _update_weights(chunk: Chunk, updates: Tensor, lane: Lane, step: Step) -> None:
    """Applies this rank's parts of the updates, which may be overwritten, to its weights."""
    dtype = core.update_dtype(lane.wire, lane.wide, lane.device)
    for run in chunk.weights:
        start = run[0].start
        received = updates[start : _end(run)]
        read = step.scratch.wide(received, dtype)
        if dtype != lane.wire:
            read.copy_(received)
        by_rates: dict[tuple[int, float], list[tuple]] = defaultdict(list)
        for bundle in run:
            parts = _views(read, bundle.start - start, bundle.shape)
            entry, hyper = step.entry(bundle.units[0]), step.hyper(bundle.units[0])
            factors: Iterable[Optional[Tensor]] = itertools.repeat(None)
            if hyper["beta2"] is not None:
                factors = _second_moment_factors(bundle, updates, step)
            rows, cols = bundle.units[0].rows, entry.matrices.cols
            scale = core.update_scale(rows, cols, hyper["adjust_lr"])
            for unit, index, part, factor in zip(bundle.units, bundle.indices, parts, factors):
                weight = _part_of(step.weights[unit.entry], index)
                row = weight, part, factor, step.keep(unit, bundle.box)
                by_rates[entry.group, scale].append(row)
        for (group, scale), weights in by_rates.items():
            _apply(step.groups[group], scale, weights)


def _apply(hyper: Hyper, scale: float, rows: Sequence[tuple]) -> None:
    """W ← W − lr·scale·U with its decay, for rows of W, U, a factor on it and where to do so."""
    weights, updates, factors, keep = map(list, zip(*rows))
    lr = hyper["lr"]
    core.update_weights(
        weights,
        updates,
        rate=lr * scale,
        decay=lr * hyper["weight_decay"] * (scale if hyper["decay_lr"] == "adjusted" else 1.0),
        cautious=hyper["cautious"],
        factors=factors if hyper["beta2"] is not None else None,
        keep=keep if hyper["nonfinite"] == "skip" else None,
    )


def _second_moment_factors(bundle: Bundle, updates: Tensor, step: Step) -> list[Tensor]:
    """Updates V of a bundle's units; what this rank's parts of the update are multiplied with."""
    unit = bundle.units[0]
    m = step.entry(unit).matrices
    views = [step.second_moment(unit) for unit in bundle.units]
    V = torch.stack(views)  # (n, experts…, matrices of each, long side)
    v = wire.read_numbers(updates, bundle.along, V.numel()).view(V.shape)
    v = v.to(
        torch.promote_types(step.entry(unit).recipe.dtype, torch.float32)
    )  # as the owner had it
    keep = None
    if id(unit) in step.finite:
        keep = torch.cat([step.finite[id(unit)] for unit in bundle.units])
    flat = V.view(-1, V.shape[-1])
    factor = core.second_moment_factor(
        flat, v.view(flat.shape), step.hyper(unit)["beta2"], keep
    ).view(V.shape)
    torch._foreach_copy_(views, list(V))
    if not bundle.numel:
        return []
    experts, rest = V.shape[:-2], m.shape[m.row_dim + 1 :]
    if unit.rows >= m.cols:
        factor = factor.reshape(*experts, -1, *(1 for _ in rest))
        index = bundle.box[: m.row_dim + 1]
    else:
        factor = factor.reshape(*experts, -1, 1, *rest)
        rows = (*factor.shape[: len(experts) + 1], unit.rows, *rest)
        factor = factor.expand(rows).flatten(len(experts), len(experts) + 1)
        index = bundle.box
    return list(factor[(slice(None), *layout.slices(index))])


def _find_nonfinite(step: Step, lanes: Sequence[tuple[Lane, Any]]) -> None:
    """With nonfinite="skip": which matrices have a finite gradient on all ranks."""
    work = []
    for lane, group in (*lanes, *((lane, None) for lane in step.plan.alone)):
        units = [unit for unit, _ in lane.owners if step.hyper(unit)["nonfinite"] == "skip"]
        if not units:
            continue
        counts = [step.entry(unit).matrices.count(unit.box, unit.rows) for unit in units]
        finite = torch.ones(sum(counts), dtype=torch.uint8, device=lane.device)
        of_unit = {id(unit): flags for unit, flags in zip(units, finite.split(counts))}
        for chunk in lane.chunks:
            step.average_gradients(chunk)
        for bundle in (bundle for chunk in lane.chunks for bundle in chunk.read):
            for unit, index in zip(bundle.units, bundle.indices):
                if bundle.numel and id(unit) in of_unit:
                    grad = _part_of(step.grad(unit), index)
                    _mark_finite(grad, unit, bundle.box, of_unit[id(unit)], step)
        if group is not None:
            work.append(dist.all_reduce(finite, dist.ReduceOp.MIN, group=group, async_op=True))
        step.finite.update(of_unit)
    for waited in work:
        waited.wait()
    step.finite = {key: finite.bool() for key, finite in step.finite.items()}


def _mark_finite(grad: Tensor, unit: Unit, box: layout.Region, out: Tensor, step: Step) -> None:
    row_dim = step.entry(unit).matrices.row_dim
    rows = torch.isfinite(grad).flatten(row_dim + 1).all(dim=-1)  # (experts…, rows here)
    shape = layout.shape_of(unit.box[: row_dim + 1])
    whole = rows.new_ones(shape)
    whole[(..., slice(*box[row_dim]))] = rows
    out.copy_(whole.unflatten(-1, (-1, unit.rows)).all(dim=-1).flatten())


def _end(run: Run) -> int:
    return run[-1].start + run[-1].numel


def _views(flat: Tensor, start: int, shape: Sequence[int]) -> list[Tensor]:
    """(n, *shape of each) from ``start`` of a flat buffer, as n views; none where it is empty."""
    numel = math.prod(shape)
    return list(flat[start : start + numel].view(shape).unbind(0)) if numel else []


def _part_of(tensor: Tensor, index: Optional[tuple[slice, ...]]) -> Tensor:
    return tensor if index is None else tensor[index]
