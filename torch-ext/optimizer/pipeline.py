"""Runs a step: momentum → gather → orthogonalize → scatter → weights, chunk by chunk.

Every rank updates the momentum of its shards, and sends the input of orthogonalization to the
owners of the matrices with an all-to-all. The owners orthogonalize the matrices, and send every
rank its part of the update: with another all-to-all, or, if all ranks need all updates, with an
all-gather or broadcasts. Matrices that are whole on this rank belong to local lanes: they pass
through the same functions without traffic. On one device all lanes are local. In ZeRO-2, earlier
events average gradients.

`async_utils` decides the order of events. `step.binding` has already listed the tensors of each
event, grouped by the call that updates them. An `Exchange` carries a chunk between ranks. If state
is in host memory, `Step.on_device` copies an event's tensors to the device. docs/how-it-works.md
explains the terms.

In traces of torch.profiler, events are named ``Muon.momentum``, ``Muon.orthogonalize``,
``Muon.weights``, and ``Muon.adamw``, and the comparison before a step ``Muon.agree``. Each enters a
new `record_function` context. A decorator would share one record among all threads, so it isn't
used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor
from torch.profiler import record_function

from . import adamw, core
from .async_utils import Do, Event
from .distributed.exchange import Exchange
from .newton_schulz.iteration import Eps, orthogonalize
from .step.binding import Pieces
from .step.context import Bring, Step


def run(step: Step) -> None:
    """Runs all events of a step."""
    if step.clipping is not None:
        step.clipping.reduce(step.settings)
    is_reference = step.settings.use_distributed_muon
    step.progress.has_exchanged = step.bound.last_exchange is None and not is_reference
    if is_reference:
        from .reference import update_matrices  # loaded where it is used

        update_matrices(step)  # the schedule has only AdamW's events
    for event in step.bound.schedule:
        DOES[event.do](event, step)
    step.end()


# -- events of a chunk -------------------------------------------------------------------------


def update_momentum(event: Event, step: Step) -> None:
    """Updates this rank's momentum, B ← μB + wG, and starts the gather to the owners."""
    key = event.chunk
    chunk = step.bound.chunks[key]
    exchange = Exchange(chunk.chunk, chunk.lane, chunk.process_group, step.scratch)
    step.exchanges[key] = exchange
    step.complete_gradients(chunk.reads)
    step.progress.has_written = True
    with record_function("Muon.momentum"), step.on_device(event) as bring:
        for span in chunk.momentum:
            inputs = exchange.inputs[span.start : span.stop]
            D = step.in_update_dtype(inputs, chunk.lane)
            for pieces in span.pieces:
                options = step.groups[pieces.group]
                momenta, grads = bring(pieces.tensors), bring(step.gradients(pieces))
                step.watched(core.update_momentum, pieces)(
                    momenta,
                    grads,
                    pieces.views(D) if pieces.is_staged else None,  # None: another replica sends it
                    momentum=options.momentum,
                    nesterov=options.nesterov,
                    style=options.momentum_style,
                    maximize=options.maximize,
                    opmath=chunk.lane.opmath,
                )
            if D is not inputs:
                inputs.copy_(D)
    step.release_gradients(step.bound.last_reads[key])
    exchange.start_gather()


def orthogonalize_and_scatter(event: Event, step: Step) -> None:
    """Computes the polar factors U on the owners of matrices, and starts the scatter of U."""
    key = event.chunk
    chunk, exchange = step.bound.chunks[key], step.exchanges[key]
    exchange.finish_gather()
    with record_function("Muon.orthogonalize"):
        for batch, count in chunk.batches:
            if count:
                X = exchange.assemble(batch)[:count]
                entry, block = step.plan.entries[batch.units[0].entry], batch.units[0].block
                options, matrices = step.groups[entry.group], X.view(-1, block.rows, block.cols)
                eps = Eps(options.ns_eps, options.ns_eps_absolute or 0.0)
                U = orthogonalize(matrices, entry.recipe, eps, True, step.scratch)
                if entry.second_moment:
                    by_row = entry.matrices.has_moment_of_rows(block)
                    squares = core.second_moment(U, by_row, step.scratch)
                    exchange.stage_moments(squares, batch)
                if step.audit is not None:
                    step.audit.orthogonalized(batch, U)
                exchange.stage(U.view(X.shape), batch)
    exchange.start_scatter()


def update_weights(event: Event, step: Step) -> None:
    """Updates this rank's weights, W ← W − lr·(scale·U + weight_decay·W), then applies QK-Clip."""
    key = event.chunk
    chunk, exchange = step.bound.chunks[key], step.exchanges.pop(key)
    exchange.finish_scatter()
    if event == step.bound.last_exchange:
        step.progress.has_exchanged = True
    step.progress.has_written = True
    with record_function("Muon.weights"), step.on_device(event) as bring:
        for span in chunk.weights:
            updates = exchange.updates[span.start : span.stop]
            U = step.in_update_dtype(updates, chunk.lane)
            if U is not updates:
                U.copy_(updates)
            for pieces in span.pieces:
                options = step.groups[pieces.group]
                decay_scale = pieces.scale if options.decay_lr == "adjusted" else 1.0
                # Calls of `bring` must come in the order of `Bound._weights_load`.
                factors = _factors(pieces, exchange, bring, step)
                rounded_by = step.rounded_by(pieces, bring)
                step.watched(core.update_weights, pieces)(
                    bring(pieces.tensors),
                    pieces.views(U),
                    rate=options.lr * pieces.scale,
                    decay=options.lr * options.weight_decay * decay_scale,
                    cautious=options.cautious,
                    factors=factors,
                    together=U if len(span.pieces) == 1 else None,
                    rounded_by=rounded_by,
                    clip=step.clip(pieces),
                )
    exchange.release()


def update_adamw(event: Event, step: Step) -> None:
    """Updates one part of AdamW's parameters."""
    part = step.bound.parts[event.number]
    step.progress.has_written = True
    with record_function("Muon.adamw"), step.on_device(event) as bring:
        exp_avgs, exp_avg_sqs = bring(part.exp_avgs), bring(part.exp_avg_sqs)
        adamw.update(
            part,
            step.adamw_gradients(part),
            exp_avgs,
            exp_avg_sqs,
            step.groups[part.group],
            rounded_by=step.rounded_by(part, bring),
            clip=step.clip_adamw(part),
            counts=not step.only_creates,
        )


DOES: dict[Do, Callable[[Event, Step], None]] = {
    Do.AVERAGE: lambda event, step: step.means.launch(),
    Do.GATHER: update_momentum,
    Do.ORTHOGONALIZE: orthogonalize_and_scatter,
    Do.UPDATE: update_weights,
    Do.ADAMW: update_adamw,
    Do.SHARE_ROWS: lambda event, step: step.share_rows(event.number),
}


def _factors(
    pieces: Pieces, exchange: Exchange, bring: Bring, step: Step
) -> Optional[list[Tensor]]:
    """Updates the second moments V; returns a factor for each piece of the update."""
    beta2 = step.groups[pieces.group].beta2
    if beta2 is None:
        return None
    factors: list[Tensor] = []
    for moments in pieces.moments:
        tensors = bring(moments.tensors)
        if not tensors:
            continue
        V = torch.stack(tensors)  # (n, experts…, matrices of each…, rows or columns)
        assert exchange.moments is not None
        v = exchange.moments[moments.start :][: V.numel()].view(-1, V.shape[-1])
        factors += moments.of_pieces(core.second_moment_factor(V.view(v.shape), v, beta2))
        torch._foreach_copy_(tensors, list(V))
    return factors
