"""Runs a step: momentum → gather → orthogonalize → scatter → update, chunk by chunk.

Every rank updates the momentum of what it holds, and sends the input of orthogonalization to the
owners of the matrices. The owners orthogonalize them, and send every rank its part of the update.
Matrices that lie whole on this rank, in a local lane, pass through the same functions without
traffic; on one device all lanes are local.

The schedule, a tuple of events made by `async_utils`, fixes the order. docs/how-it-works.md
explains what a plan is made of: lanes, chunks, batches, units, bundles, spans. All units of a batch
have one group of hyperparameters and one shape of matrices; all units of a span have one group, one
dtype and, for weights, one scale. So the code reads these from the first unit. A matrix that
takes no part, for lack of a gradient, is left out of lanes with traffic. In a local lane it stays,
and the code leaves it out by `Step.present`.

An event asks the step for tensors. Those that `Step.momentum` and `Step.weights` return may lie in
host memory; `Step.prefetcher` then brings them to the device window by window. `Step.grads` returns
this rank's gradients, or means over replicas (ZeRO-2). A `Transport` carries one chunk between
ranks.

Traces of torch.profiler name four kinds of events, ``Muon.momentum``, ``Muon.orthogonalize``,
``Muon.weights`` and ``Muon.adamw``, and the exchange of notes before a step, ``Muon.agree``. The
code enters a new `record_function` context each time, and decorates no function: a decorator has
one record, which threads that run several optimizers would share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Optional

import torch
from torch import Tensor
from torch.profiler import record_function

from . import core
from .async_utils import Do, Event
from .cpu_offload.rows import MomentumRows, WeightRows
from .distributed import wire
from .distributed.chunks import Batch, Bundle, Span
from .distributed.plan import Lane, Unit
from .distributed.transport import Transport
from .newton_schulz.iteration import Eps, orthogonalize
from .step.step import MOMENTUM, SECOND_MOMENT, WEIGHTS, Step


def run(step: Step) -> None:
    """Updates all parameters."""
    if step.clipping is not None:
        step.clipping.reduce(step.settings)
    is_reference = step.settings.use_distributed_muon
    step.has_exchanged = step.prepared.last_exchange is None and not is_reference
    if is_reference:
        from .reference import update_matrices  # loaded where it is used

        update_matrices(step)
    with step.prefetcher:
        for event in step.prepared.schedule:
            DOES[event.do](event, step)
    step.end()


# -- events of a chunk -------------------------------------------------------------------------


def update_momentum_and_gather(event: Event, step: Step) -> None:
    """Updates this rank's momentum, B ← μB + wG, and starts to send the owners their input.

    The weight w is `core.gradient_weight`.
    """
    prepared = step.prepared
    chunk, lane = prepared.chunk(event)
    transport = Transport(chunk, lane, prepared.process_groups[event.lane], step.scratch)
    step.transports[event.chunk] = transport
    with record_function("Muon.momentum"):
        for span, joined_spans in step.together(chunk.momentum, lane):
            _update_span_momentum(span, transport.inputs, lane, step)
            for joined in joined_spans:
                step.release_gradients(joined)
    transport.gather()


def orthogonalize_and_scatter(event: Event, step: Step) -> None:
    """Computes U, the polar factors, on the owners of matrices, and starts to send U back."""
    chunk, _ = step.prepared.chunk(event)
    transport = step.transports[event.chunk]
    transport.finish_gather()
    with record_function("Muon.orthogonalize"):
        for batch in chunk.batches:
            present = step.present(batch.units)
            X = transport.assemble(batch)
            packed = _to_front(X, present)
            if not len(packed):
                continue
            U = _polar_factors(packed, batch, step)
            if step.audit is not None:
                step.audit.orthogonalized(_units_to_front(batch.units, present), U)
            squares: Optional[Tensor] = None
            if step.group(batch.units[0]).beta2 is not None:
                by_row = step.has_moment_of_rows(batch.units[0])
                squares = core.second_moment(U, by_row, step.scratch).view(len(packed), -1)
                squares = _to_places(squares, present, None)
            U = _to_places(U.view(packed.shape), present, X)
            transport.stage_updates(U, squares, batch)
    transport.scatter()


def update_weights(event: Event, step: Step) -> None:
    """Updates this rank's weights, W ← W − lr·(scale·U + weight_decay·W); then clips by QK-Clip."""
    chunk, lane = step.prepared.chunk(event)
    transport = step.transports.pop(event.chunk)
    transport.wait()
    if event == step.prepared.last_exchange:
        step.has_exchanged = True
    step.has_written = True
    with record_function("Muon.weights"):
        for span, _ in step.together(chunk.weights, lane, is_scatter=True):
            _update_span_weights(span, transport.updates, lane, step)
    transport.release()


# -- momentum ----------------------------------------------------------------------------------


def _update_span_momentum(span: Span, buffer: Tensor, lane: Lane, step: Step) -> None:
    """Updates the momentum of a span, and writes the owners' input into the buffer.

    If the span is not staged, no input is written: another replica sends it.
    """
    parts = step.momentum(span)
    grads = step.grads(parts)
    if not grads:
        return
    start, stop = span[0].start, span[-1].start + span[-1].numel
    sent, is_staged = buffer[start:stop], span[0].is_staged
    if is_staged:
        dtype = core.update_dtype(lane.wire, lane.opmath, lane.device)
        result = step.scratch.in_dtype(sent, dtype)
        outputs = step.views(result, span)
    elif step.uses_lists(lane):
        outputs = parts.tensors  # in their place: kernels write none that is not wanted
    else:
        result = step.scratch.empty("opmath", (stop - start,), lane.opmath, lane.device)
        outputs = step.views(result, span)
    rows, options = MomentumRows(parts.tensors, grads, outputs), step.group(parts.units[0])
    step.has_written = True
    for fetched in step.prefetcher.windows((MOMENTUM, id(span))):
        window_rows = rows.in_window(fetched)
        core.update_momentum(
            window_rows.momenta,
            window_rows.grads,
            window_rows.outputs,
            momentum=options.momentum,
            nesterov=options.nesterov,
            style=options.momentum_style,
            maximize=options.maximize,
            wanted=is_staged,
        )
        if step.audit is not None:
            step.audit.momentum(parts.units, fetched, window_rows)
    if is_staged and result is not sent:
        sent.copy_(result)


# -- orthogonalization -------------------------------------------------------------------------


def _polar_factors(X: Tensor, batch: Batch, step: Step) -> Tensor:
    """The polar factors, (matrices, rows, cols), of units of a batch, (n, *shape of each)."""
    unit = batch.units[0]
    entry, options = step.plan.entries[unit.entry], step.group(unit)
    eps = Eps(options.ns_eps, options.ns_eps_absolute or 0.0)
    matrices = X.view(-1, unit.block.rows, unit.block.cols)
    return orthogonalize(matrices, entry.recipe, eps, True, step.scratch)


def _to_front(X: Tensor, present: Optional[Sequence[bool]]) -> Tensor:
    """Moves present units from the end to the places of absent ones; returns the present units."""
    if present is None:
        return X
    absent, moved = _moves(present)
    _copy_units(X, absent, moved)
    return X[: sum(present)]


def _units_to_front(units: Sequence[Unit], present: Optional[Sequence[bool]]) -> list[Unit]:
    """The present units, in the order in which `_to_front` leaves them."""
    packed = list(units)
    if present is not None:
        for to, source in zip(*_moves(present)):
            packed[to] = packed[source]
        del packed[sum(present) :]
    return packed


def _to_places(packed: Tensor, present: Optional[Sequence[bool]], out: Optional[Tensor]) -> Tensor:
    """Undoes `_to_front`, in ``out`` or in a new tensor; absent units are undefined in it."""
    if present is None:
        return packed
    if out is None:
        out = packed.new_empty((len(present), *packed.shape[1:]))
    out[: len(packed)].copy_(packed)
    absent, moved = _moves(present)
    _copy_units(out, moved, absent)
    return out


def _moves(present: Sequence[bool]) -> tuple[list[int], list[int]]:
    """The indices of absent units at the front, and of as many present units at the end."""
    count = sum(present)
    absent = [number for number in range(count) if not present[number]]
    return absent, [number for number in range(count, len(present)) if present[number]]


def _copy_units(units: Tensor, to: Sequence[int], source: Sequence[int]) -> None:
    if to:
        torch._foreach_copy_([units[n] for n in to], [units[n] for n in source])


# -- weights -----------------------------------------------------------------------------------


def _update_span_weights(span: Span, updates: Tensor, lane: Lane, step: Step) -> None:
    """Applies this rank's parts of the updates to its weights; may overwrite the updates."""
    parts = step.weights(span)
    received = updates[span[0].start : span[-1].start + span[-1].numel]
    U = step.scratch.in_dtype(received, core.update_dtype(lane.wire, lane.opmath, lane.device))
    if U is not received:
        U.copy_(received)
    unit = span[0].units[0]
    options, update_scale = step.group(unit), step.plan.entries[unit.entry].scale(unit.block)
    factors: Optional[list[Tensor]] = None
    if options.beta2 is not None:
        factors = [f for bundle in span for f in _second_moment_factors(bundle, updates, step)]
    views = step.views(U, span)
    rows = WeightRows(step.rounded_by(parts), parts.tensors, views, factors, step.clip(parts))
    if not rows.weights:
        return
    decay_scale = update_scale if options.decay_lr == "adjusted" else 1.0

    def update(window_rows: WeightRows) -> None:
        core.update_weights(
            window_rows.weights,
            window_rows.updates,
            rate=options.lr * update_scale,
            decay=options.lr * options.weight_decay * decay_scale,
            cautious=options.cautious,
            factors=window_rows.factors,
            together=U if window_rows.updates is views else None,  # a window has pieces of U
            rounded_by=window_rows.rounded_by,
        )

    def clip(window_rows: WeightRows) -> None:
        if window_rows.clip is not None:
            core.clip_weights(window_rows.weights, window_rows.clip, window_rows.rounded_by)

    for fetched in step.prefetcher.windows((WEIGHTS, id(span))):
        window_rows = rows.in_window(fetched)
        if step.audit is not None:
            step.audit.weights(parts.units, fetched, window_rows, update, clip)
        else:
            update(window_rows)
            clip(window_rows)


def _second_moment_factors(bundle: Bundle, updates: Tensor, step: Step) -> list[Tensor]:
    """Updates V, the second moments of a bundle's units.

    Returns:
        What each of this rank's parts of the update is multiplied with, in the order of the parts.
    """
    present = step.present(bundle.units)
    units = list(bundle.units if present is None else compress(bundle.units, present))
    if not units:
        return []
    views = [step.second_moment(unit) for unit in units]
    with step.prefetcher.window((SECOND_MOMENT, id(bundle)), 0) as fetched:
        if fetched is not None:  # else V is on the device already
            views = [tensors[0] if tensors else views[piece.row] for piece, tensors in fetched]
        V = torch.stack(views)  # (n, experts…, matrices of each…, rows or columns)
        numbers = wire.read_numbers(updates, bundle.trailer, len(bundle.units) * views[0].numel())
        v = numbers.view(len(bundle.units), *V.shape[1:])  # the owners' `core.second_moment`
        if present is not None:
            v = torch.stack(list(compress(v.unbind(), present)))
        dtype = step.plan.entries[units[0].entry].recipe.dtype
        v = v.to(torch.promote_types(dtype, torch.float32))  # the owner computed it in this dtype
        flat, beta2 = V.view(-1, V.shape[-1]), step.group(units[0]).beta2
        assert beta2 is not None
        factor = core.second_moment_factor(flat, v.view(flat.shape), beta2).view(V.shape)
        torch._foreach_copy_(views, list(V))
    return _factors_of_parts(factor, bundle, step.has_moment_of_rows(units[0]))


def _factors_of_parts(factor: Tensor, bundle: Bundle, by_row: bool) -> list[Tensor]:
    """Cuts ``factor``, of V's shape, into pieces that broadcast to this rank's parts."""
    unit = bundle.units[0]
    block, axes = unit.block, range(len(unit.shape))
    side_axes = slice(block.row_axis, block.col_axis) if by_row else slice(block.col_axis, None)
    varies_along = {*axes[: block.row_axis], *axes[side_axes]}
    sizes = (size if axis in varies_along else 1 for axis, size in enumerate(unit.shape))
    factor = factor.view(-1, *sizes)
    views = []
    for box in bundle.boxes:
        index = (slice(*box[axis]) if axis in varies_along else slice(None) for axis in axes)
        views.append(factor[(slice(None), *index)].unbind(0))
    return list(itertools.chain.from_iterable(zip(*views)))


# -- other events of a step --------------------------------------------------------------------


def update_adamw(event: Event, step: Step) -> None:
    """Updates one part of AdamW's parameters (`AdamWPart`)."""
    step.has_written = True
    step.adamw.update(event.number)


DOES: dict[Do, Callable[[Event, Step], None]] = {
    Do.AVERAGE: lambda event, step: step.gradients.means.launch(),
    Do.GATHER: update_momentum_and_gather,
    Do.ORTHOGONALIZE: orthogonalize_and_scatter,
    Do.UPDATE: update_weights,
    Do.AVERAGE_OTHERS: lambda event, step: step.adamw.means.launch(),
    Do.ADAMW: update_adamw,
    Do.SHARE_ROWS: lambda event, step: step.adamw.share_rows(event.number),
}
