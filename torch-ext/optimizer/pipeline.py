"""One chunk of a step: momentum → gather → orthogonalize → give back → update, clip the weights.

Every rank updates the momentum of what it holds and sends it to the owners of the matrices; the
owners orthogonalize whole matrices and send every rank its part of the update. Where a rank holds
whole matrices the same happens without traffic, which is all that happens on one device.

The phases have names in traces of torch.profiler: ``Muon.momentum``, ``Muon.orthogonalize``,
``Muon.weights``; beside them ``Muon.adamw``, and ``Muon.agree``: the hosts' exchange before a step.
As a decorator, record_function would be one object, which threads that step at once would share.

Buffers in flight belong to their chunk until the collective that uses them has been waited for;
waiting makes the current stream wait, not the host, and all later work is on that stream.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from . import adamw, core
from .async_utils import Task, interleave
from .cpu_offload import narrow
from .distributed import layout, wire
from .distributed.collectives import all_gather_slots
from .distributed.plan import Batch, Bundle, Chunk, Lane, Run, Traffic, Unit, turn_of
from .newton_schulz import newton_schulz
from .options import is_exact
from .step import Hyper, Index, Step, part_of


def run(step: Step, others: adamw.Updates) -> None:
    """Updates all matrices, and the parameters that are not Muon's."""
    groups = {id(lane): step.process_group(lane) for lane in step.plan.lanes}

    def announced(chunk: Chunk, lane: Lane) -> Task:
        return announce_chunk(chunk, step)

    def updated(chunk: Chunk, lane: Lane) -> Task:
        return update_chunk(chunk, lane, groups.get(id(lane)), step)

    if not step.carrier.is_prepared:
        _announce_nonfinite(step)
        _walk(step, announced, _Others(others.announce(), others, step))
    if step.clipping is not None:
        step.clipping.reduce(step.wide)
    with step.carrier:
        _find_nonfinite(step, [(lane, groups[id(lane)]) for lane in step.plan.lanes])
        _walk(step, updated, _Others(_written(others.run(), step), others, step))
    step.release()
    others.wait()
    if step.clipping is not None:
        step.clipping.finish(step.groups)


def _written(parts: Iterator[None], step: Step) -> Iterator[None]:
    step.has_written = True
    yield from parts


def _walk(step: Step, task: Callable[[Chunk, Lane], Task], others: _Others) -> None:
    """Goes through all that there is to do, in the order in which all ranks do it.

    The others' turn is under the first gathers. In ZeRO-2 they have traffic of their own, which
    takes its turn among the lanes: under those of the same ranks, or between the others. Out of
    turn, two ranks would use one process group in different orders, since each may have another
    first lane.

    Args:
        task: what to do for a chunk.
        others: what to do for the parameters that are not Muon's.
    """
    lanes = step.plan.lanes
    turn, is_under = _turn_of_others(step)

    def tasks(lane: Lane) -> Iterator[Task]:
        return (others.taking_turns(task(chunk, lane), chunk) for chunk in lane.chunks)

    def without_traffic() -> None:
        for lane in step.plan.alone:
            interleave(tasks(lane), in_flight=1)

    def hidden_under(number: int) -> None:
        if number == 0:
            without_traffic()
        if number == turn and is_under:
            others.take_turn()

    for number, lane in enumerate(lanes):
        if number == turn and not is_under:
            others.take_turn()
        interleave(tasks(lane), lane.in_flight, functools.partial(hidden_under, number))
    if not lanes:
        without_traffic()
    if turn == len(lanes):
        others.take_turn()
    others.finish()


def _turn_of_others(step: Step) -> tuple[int, bool]:
    """The number of the lane with which the others have their turn, and whether under it."""
    replicas, lanes = step.wide.divided, step.plan.lanes
    if replicas is None or len(replicas.ranks) == 1:  # without traffic
        return 0, bool(lanes)
    ranks = tuple(sorted(replicas.ranks))
    turn = sum(turn_of(lane.peers) < turn_of(ranks) for lane in lanes)
    return turn, turn < len(lanes) and lanes[turn].peers == ranks


class _Others:
    """The parameters that are not Muon's: all at their turn, or part by part between the chunks.

    The latter where state is carried from the host: their own arithmetic is too little to hide
    that. Each chunk is followed by as many parts as keep the bytes carried so far in step with the
    arithmetic. But not in ZeRO-2, where their traffic has its place.

    Args:
        parts: does one after the other.
        updates: what they are of.
        step: which.
    """

    def __init__(self, parts: Iterator[None], updates: adamw.Updates, step: Step):
        self._parts = parts
        self._is_apart = step.carrier.is_idle or step.wide.divided is not None
        if self._is_apart:
            return
        self._sizes = deque(updates.part_bytes())
        self._flops_of, self._bytes_of = step.plan.flops, step.momentum_bytes()
        # All before the last chunk, whose arithmetic hides what is left to write back.
        last = (step.plan.lanes or step.plan.alone)[-1:]
        self._flops = sum(self._flops_of.values()) - sum(
            self._flops_of[id(lane.chunks[-1])] for lane in last
        )
        self._bytes = sum(self._bytes_of.values()) + sum(self._sizes)
        self._flops_done = self._bytes_done = 0

    def take_turn(self) -> None:
        if self._is_apart:
            self.finish()

    def taking_turns(self, task: Task, chunk: Chunk) -> Task:
        """A chunk's task, with parts behind its arithmetic."""
        return task if self._is_apart else self._taking_turns(task, chunk)

    def _taking_turns(self, task: Task, chunk: Chunk) -> Task:
        next(task)
        self._bytes_done += self._bytes_of[id(chunk)]
        yield
        next(task)
        self._flops_done += self._flops_of[id(chunk)]
        while self._sizes and self._is_behind(self._sizes[0]):
            self._bytes_done += self._sizes.popleft()
            next(self._parts, None)
        yield
        next(task, None)

    def _is_behind(self, nbytes: int) -> bool:
        return (self._bytes_done + nbytes) * self._flops <= self._bytes * self._flops_done

    def finish(self) -> None:
        for _ in self._parts:
            pass


def announce_chunk(chunk: Chunk, step: Step) -> Task:
    """Announces what `update_chunk` is going to borrow of the host's, in the order of its use."""
    for run in chunk.momentum:
        step.announce(_MOMENTUM, run, [step.momentum_loans(*part) for part in _parts_of(run)])
    yield
    yield
    for run in chunk.weights:
        for bundle in run:
            if step.hyper(bundle.units[0])["beta2"] is not None:
                loans = [step.second_moment_loans(unit) for unit in bundle.units]
                step.announce(_SECOND_MOMENT, bundle, loans, at_once=True)
        step.announce(_WEIGHTS, run, [step.weight_loans(*part) for part in _parts_of(run)])


def _parts_of(run: Run) -> Iterator[tuple[Unit, Index]]:
    """The parts in a run, in the order in which `_views` has them."""
    for bundle in run:
        if bundle.numel:
            yield from zip(bundle.units, bundle.indices)


# What windows are announced for.
_NONFINITE, _MOMENTUM = "nonfinite", "momentum"
_SECOND_MOMENT, _WEIGHTS = "second moment", "weights"


def update_chunk(chunk: Chunk, lane: Lane, group: Any, step: Step) -> Task:
    """Updates weights and state of a chunk's matrices.

    Yields when the momentum is on its way to the owners, and when the updates are on their way
    back; without traffic there is nothing to wait for.
    """
    take, give = step.scratch.take, step.scratch.give
    step.average_gradients(chunk)
    with record_function("Muon.momentum"):
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
    with record_function("Muon.orthogonalize"):
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
    with record_function("Muon.weights"):
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
    rows: list[tuple] = []
    groups: list[int] = []
    slots = itertools.repeat(None) if largest is None else iter(largest.unbind())
    for bundle in run:
        outputs = _views(written, bundle.start - start, bundle.shape)
        for unit, index, output in zip(bundle.units, bundle.indices, outputs):
            momentum = part_of(step.momenta[unit.entry], index)
            grad = part_of(step.grad(unit), index)
            rows.append((momentum, grad, output, step.keep(unit, bundle.box), next(slots)))
            groups.append(step.entry(unit).group)
    step.has_written = True
    for bundle in run:
        step.was_read(bundle.units)
    for portion in step.carrier.portions((_MOMENTUM, id(run)), len(rows)):
        by_group: dict[int, list[tuple]] = defaultdict(list)
        partial: list[tuple[Tensor, Tensor]] = []
        with portion as shares:
            for share, lent in shares:
                *tensors, slot = rows[share.row]
                if slot is not None and not share.is_first:
                    partial.append((slot, torch.empty_like(slot)))
                    slot = partial[-1][1]
                row = (*lent, *(narrow(t, share.piece) for t in tensors[len(lent) :]), slot)
                by_group[groups[share.row]].append(row)
            for group, of_group in by_group.items():
                _apply_momentum(step.groups[group], of_group, wanted=run[0].travels)
        for slot, of_piece in partial:
            slot.copy_(torch.maximum(slot, of_piece))


def _apply_momentum(hyper: Hyper, rows: Sequence[tuple], wanted: bool) -> None:
    """B ← μB + G, for rows of B, G, what to orthogonalize, where to do so, and a largest one."""
    momenta, grads, outputs, kept, largest = map(list, zip(*rows))
    core.update_momentum(
        momenta,
        grads,
        outputs,
        momentum=hyper["momentum"],
        nesterov=hyper["nesterov"],
        style=hyper["momentum_style"],
        maximize=hyper["maximize"],
        keep=None if kept[0] is None else kept,
        wanted=wanted,
        largest=None if largest[0] is None else largest,
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
        batch_invariant=is_exact(hyper, step.wide),
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
        rows: list[tuple] = []
        rates: list[tuple[int, float]] = []  # group and scale
        for bundle in run:
            parts = _views(read, bundle.start - start, bundle.shape)
            entry, hyper = step.entry(bundle.units[0]), step.hyper(bundle.units[0])
            factors: Iterable[Optional[Tensor]] = itertools.repeat(None)
            if hyper["beta2"] is not None:
                factors = _second_moment_factors(bundle, updates, step)
            of_bundle = entry.matrices.cols, hyper["adjust_lr"]
            scale = core.update_scale(bundle.units[0].rows, *of_bundle)
            for unit, index, part, factor in zip(bundle.units, bundle.indices, parts, factors):
                weight = part_of(step.weights[unit.entry], index)
                kept, clip = step.keep(unit, bundle.box), step.clip(unit, index)
                rows.append((weight, part, factor, kept, clip))
                rates.append((entry.group, scale))
        for portion in step.carrier.portions((_WEIGHTS, id(run)), len(rows)):
            by_rates: dict[tuple[int, float], list[tuple]] = defaultdict(list)
            with portion as shares:
                for share, lent in shares:
                    tensors = rows[share.row][len(lent) :]
                    row = (*lent, *(narrow(tensor, share.piece) for tensor in tensors))
                    by_rates[rates[share.row]].append(row)
                for (group, scale), of_rate in by_rates.items():
                    _apply(step.groups[group], scale, of_rate)


def _apply(hyper: Hyper, scale: float, rows: Sequence[tuple]) -> None:
    """W ← W − lr·scale·U with its decay, for rows of W, U, a factor on it, where to do so and
    what to multiply W with in the end."""
    weights, updates, factors, kept, clip = map(list, zip(*rows))
    keep = kept if hyper["nonfinite"] == "skip" else None
    lr = hyper["lr"]
    core.update_weights(
        weights,
        updates,
        rate=lr * scale,
        decay=lr * hyper["weight_decay"] * (scale if hyper["decay_lr"] == "adjusted" else 1.0),
        cautious=hyper["cautious"],
        factors=factors if hyper["beta2"] is not None else None,
        keep=keep,
    )
    core.clip_weights(weights, clip, keep)


def _second_moment_factors(bundle: Bundle, updates: Tensor, step: Step) -> list[Tensor]:
    """Updates V of a bundle's units; what this rank's parts of the update are multiplied with."""
    views = [step.second_moment(unit) for unit in bundle.units]
    factors: list[Tensor] = []
    for portion in step.carrier.portions((_SECOND_MOMENT, id(bundle)), len(views)):  # one
        with portion as shares:
            there = [lent[0] if lent else views[share.row] for share, lent in shares]
            factors = _update_second_moment(there, bundle, updates, step)
    return factors


def _update_second_moment(
    views: Sequence[Tensor], bundle: Bundle, updates: Tensor, step: Step
) -> list[Tensor]:
    unit = bundle.units[0]
    m = step.entry(unit).matrices
    V = torch.stack(list(views))  # (n, experts…, matrices of each, long side)
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
    torch._foreach_copy_(list(views), list(V))
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
    """With nonfinite="skip": which matrices have a finite gradient, and momentum, on all ranks."""
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
        for unit, index, box in _skippable(lane, step):
            grad = part_of(step.grad(unit), index)
            if _may_overflow(unit, step):
                grad = _next_momentum(unit, index, grad, lane, step)
            _mark_finite(grad, unit, box, of_unit[id(unit)], step)
        if group is not None:
            work.append(dist.all_reduce(finite, dist.ReduceOp.MIN, group=group, async_op=True))
        step.finite.update(of_unit)
    for waited in work:
        waited.wait()
    step.finite = {key: finite.bool() for key, finite in step.finite.items()}


def _announce_nonfinite(step: Step) -> None:
    """Announces what `_find_nonfinite` is going to borrow."""
    for lane in (*step.plan.lanes, *step.plan.alone):
        for unit, index, _ in _skippable(lane, step):
            if _may_overflow(unit, step):
                loans = [loan._replace(written=False) for loan in step.momentum_loans(unit, index)]
                step.announce(_NONFINITE, unit, [loans], at_once=True)


def _skippable(lane: Lane, step: Step) -> Iterator[tuple[Unit, Index, layout.Region]]:
    """This rank's parts of units that may be skipped, and their boxes."""
    for bundle in (bundle for chunk in lane.chunks for bundle in chunk.read):
        if bundle.numel and step.hyper(bundle.units[0])["nonfinite"] == "skip":
            yield from (
                (unit, index, bundle.box) for unit, index in zip(bundle.units, bundle.indices)
            )


def _may_overflow(unit: Unit, step: Step) -> bool:
    """Whether finite gradients may sum up to Inf; other formats reach as far as 1e38."""
    return step.momenta[unit.entry].dtype == torch.float16


def _next_momentum(unit: Unit, index: Index, grad: Tensor, lane: Lane, step: Step) -> Tensor:
    """What this step would make of a part of the momentum, which stays as it is."""
    momentum = part_of(step.momenta[unit.entry], index)
    for portion in step.carrier.portions((_NONFINITE, id(unit)), 1):  # one
        with portion as ((_, lent),):
            momentum, grad = (*lent, *(momentum, grad)[len(lent) :])
            after = momentum.clone()
            unread = step.scratch.empty("wide", after.shape, lane.wide, after.device)
            _apply_momentum(step.hyper(unit), [(after, grad, unread, None, None)], wanted=False)
    return after


def _mark_finite(part: Tensor, unit: Unit, box: layout.Region, out: Tensor, step: Step) -> None:
    row_dim = step.entry(unit).matrices.row_dim
    rows = torch.isfinite(part).flatten(row_dim + 1).all(dim=-1)  # (experts…, rows here)
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
