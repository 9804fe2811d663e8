"""One chunk of a step: momentum → gather → orthogonalize → normalize → update the weights.

On one device nothing is gathered. Sharded matrices are gathered whole on every rank, which computes
their update and keeps its own part.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

import torch
from torch import Tensor

from . import core
from .core import Blocks
from .distributed import layout
from .distributed import utils as dtensors
from .distributed.plan import Chunk, Entry, Piece
from .newton_schulz import default_dtype, newton_schulz

State = Mapping[Tensor, Mapping[str, Tensor]]


def update_chunk(
    chunk: Chunk,
    entries: Sequence[Entry],
    params: Sequence[Tensor],
    state: State,
    options: Mapping[str, Any],
    comm_dtype: Optional[torch.dtype],
) -> None:
    """Updates weights and state of a chunk's matrices.

    Args:
        chunk: what to update; pieces whose parameter has no gradient are left out.
        entries, params: the plan's entries and the parameters they stand for, in one order.
        state: ``momentum_buffer`` and ``second_momentum_buffer`` of each parameter.
        options: hyperparameters of the parameter group.
        comm_dtype: wire format; None is bf16 (fp64 where the arithmetic is).
    """
    pieces = [piece for piece in chunk.pieces if takes_part(params[piece.entry], options)]
    if not pieces:
        return
    work = _Work(pieces, entries, params, options)
    keep = work.rows_to_keep() if options["nonfinite"] == "skip" else None
    X = work.momentum(state, keep, comm_dtype)  # (n, rows, cols)
    for blocks in entries[pieces[0].entry].matrices.blocks:
        work.apply(blocks, X, state, keep)


def takes_part(param: Tensor, options: Mapping[str, Any]) -> bool:
    if not param.requires_grad:
        return False
    return param.grad is not None or options["missing_grad"] == "zero"


class _Work:
    """The pieces of one chunk with a gradient, and the views of local tensors they stand for."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        entries: Sequence[Entry],
        params: Sequence[Tensor],
        options: Mapping[str, Any],
    ):
        self.options = options
        self.params = [params[piece.entry] for piece in pieces]
        self.entries = [entries[piece.entry] for piece in pieces]
        # What each piece covers of the stored tensor, and what of that this rank holds.
        self.wholes = [self._cover(p, e) for p, e in zip(pieces, self.entries)]
        self.regions = [
            layout.clip(entry.region, 0, region[0])
            for entry, region in zip(self.entries, self.wholes)
        ]
        self.matrices = self.entries[0].matrices
        self.offsets = [0]  # of each piece in the batch
        for region, entry in zip(self.wholes, self.entries):
            row_dim = entry.matrices.row_dim
            self.offsets.append(self.offsets[-1] + layout.numel(region[:row_dim]))
        self.grads = [self._grad(param) for param in self.params]

    @staticmethod
    def _cover(piece: Piece, entry: Entry) -> layout.Region:
        return layout.clip(layout.whole(entry.matrices.shape), 0, (piece.first, piece.last))

    def _grad(self, param: Tensor) -> Tensor:
        if param.grad is None:
            return torch.zeros_like(dtensors.local(param))
        return dtensors.local(param.grad)

    def _views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of each piece, out of local tensors of the whole parameters."""
        return [
            tensor[layout.slices(region, entry.region)[:1]]
            for tensor, region, entry in zip(tensors, self.regions, self.entries)
        ]

    def rows_to_keep(self) -> Tensor:
        """(n, rows) False on the rows of every matrix whose gradient has Inf or NaN somewhere."""
        finite = [torch.isfinite(grad) for grad in self._views(self.grads)]
        full = self._gather([f.to(torch.uint8) for f in finite], torch.uint8)  # (n, rows, cols)
        rows = full.amin(dim=-1).bool()
        for blocks in self.matrices.blocks:
            of_block = rows[:, blocks.start : blocks.stop].unflatten(1, (blocks.count, -1))
            of_block.copy_(of_block.all(dim=-1, keepdim=True).expand_as(of_block))
        return rows

    def momentum(
        self, state: State, keep: Optional[Tensor], comm_dtype: Optional[torch.dtype]
    ) -> Tensor:
        """Updates the momentum and returns what is to be orthogonalized, (n, rows, cols)."""
        options = self.options
        buffers = self._views([dtensors.local(state[p]["momentum_buffer"]) for p in self.params])
        grads = self._views(self.grads)
        wire = self._wire_dtype(comm_dtype)
        X, outputs = None, None
        if not any(entry.sharded for entry in self.entries):
            X = self._empty_batch(wire)
            outputs = self._cut(X, self.wholes, self.wholes)
        else:
            outputs = [torch.empty(g.shape, dtype=wire, device=g.device) for g in grads]
        core.update_momentum(
            buffers,
            grads,
            outputs,
            momentum=options["momentum"],
            nesterov=options["nesterov"],
            style=options["momentum_style"],
            maximize=options["maximize"],
            keep=None if keep is None else self._cut_rows(keep, 0, self.matrices.rows),
        )
        return X if X is not None else self._gather(outputs, wire)

    def apply(
        self, blocks: Blocks, X: Tensor, state: State, keep: Optional[Tensor]
    ) -> None:
        """Orthogonalizes the same blocks of all pieces and updates their weights."""
        options, cols = self.options, self.matrices.cols
        of_blocks = X[:, blocks.start : blocks.stop].unflatten(1, (blocks.count, blocks.rows))
        U = newton_schulz(
            of_blocks,  # (n, count, rows, cols)
            options["ns_steps"],
            options["ns_coefficients"],
            norm=options["ns_norm"],
            algorithm=options["ns_algorithm"],
            dtype=self._ns_dtype(),
            eps=options["ns_eps"],
        )
        kept_matrices = None
        if keep is not None:
            kept_matrices = keep[:, blocks.start : blocks.stop : max(1, blocks.rows)]  # (n, count)
        if options["beta2"] is not None:
            U = self._normalize(U, blocks, state, kept_matrices)

        lr = options["lr"]
        scale = core.update_scale(blocks.rows, cols, options["adjust_lr"])
        wide = torch.promote_types(self.entries[0].dtype, torch.float32)
        delta = U.to(wide, copy=True).mul_(lr * scale).flatten(1, 2)  # (n, count·rows, cols)

        interval = (blocks.start, blocks.stop)
        row_dims = [entry.matrices.row_dim for entry in self.entries]
        mine = [layout.clip(r, d, interval) for r, d in zip(self.regions, row_dims)]
        stored = [layout.clip(r, d, interval) for r, d in zip(self.wholes, row_dims)]
        weights = [
            dtensors.local(param)[layout.slices(region, entry.region)]
            for param, region, entry in zip(self.params, mine, self.entries)
        ]
        core.update_weights(
            weights,
            self._cut(delta, stored, mine),
            decay=lr * options["weight_decay"] * (scale if options["decay_lr"] == "adjusted" else 1),
            cautious=options["cautious"],
            keep=None if keep is None else self._cut_rows(keep, *interval),
        )

    def _normalize(
        self, U: Tensor, blocks: Blocks, state: State, keep: Optional[Tensor]
    ) -> Tensor:
        V, views = self._second_moments(blocks, state)
        normalized = core.normalize_second_moment(
            U.flatten(0, 1),
            V.flatten(0, 1),
            self.options["beta2"],
            None if keep is None else keep.flatten(),
        )
        torch._foreach_copy_(views, list(V.split([len(view) for view in views])))
        return normalized.view(U.shape)

    def _second_moments(self, blocks: Blocks, state: State) -> tuple[Tensor, list[Tensor]]:
        """V of these blocks as one batch (n, count, long), and the views it came from."""
        offset = 0
        for other in self.matrices.blocks:
            if other == blocks:
                break
            offset += other.count * max(other.rows, self.matrices.cols)
        long_side = max(blocks.rows, self.matrices.cols)
        views = []
        for param, entry, region in zip(self.params, self.entries, self.wholes):
            per_stored = state[param]["second_momentum_buffer"].view(entry.matrices.experts, -1)
            first, last = region[0] if entry.matrices.row_dim else (0, 1)
            per_index = entry.matrices.experts // max(1, entry.matrices.shape[0])
            if entry.matrices.row_dim:
                per_stored = per_stored[first * per_index : last * per_index]
            part = per_stored[:, offset : offset + blocks.count * long_side]
            views.append(part.unflatten(1, (blocks.count, long_side)))
        return torch.cat(views), views

    def _gather(self, shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The whole of every piece from this rank's part, as one batch (n, rows, cols)."""
        full = [
            dtensors.all_gather(shard, like=param) if entry.sharded else shard
            for shard, param, entry in zip(shards, self.params, self.entries)
        ]
        batch = self._empty_batch(dtype)
        torch._foreach_copy_(self._cut(batch, self.wholes, self.wholes), full)
        return batch

    def _empty_batch(self, dtype: torch.dtype) -> Tensor:
        shape = (self.offsets[-1], self.matrices.rows, self.matrices.cols)
        return torch.empty(shape, dtype=dtype, device=self.entries[0].device)

    def _cut(
        self,
        batch: Tensor,  # (n, rows, cols) of the pieces' `stored` regions
        stored: Sequence[layout.Region],
        wanted: Sequence[layout.Region],
    ) -> list[Tensor]:
        """Views of a batch in the stored shape of each piece, cut to the wanted regions."""
        views = []
        for first, last, whole, region in zip(self.offsets, self.offsets[1:], stored, wanted):
            shape = [stop - start for start, stop in whole]
            views.append(batch[first:last].view(shape)[layout.slices(region, whole)])
        return views

    def _cut_rows(self, keep: Tensor, start: int, stop: int) -> list[Tensor]:
        """``keep`` (n, rows) cut to this rank's part of rows [start, stop) of each piece."""
        expanded = keep[:, start:stop, None].expand(-1, -1, self.matrices.cols).contiguous()
        row_dims = [entry.matrices.row_dim for entry in self.entries]
        stored = [layout.clip(r, d, (start, stop)) for r, d in zip(self.wholes, row_dims)]
        mine = [layout.clip(r, d, (start, stop)) for r, d in zip(self.regions, row_dims)]
        return self._cut(expanded, stored, mine)

    def _ns_dtype(self) -> torch.dtype:
        entry = self.entries[0]
        return self.options["ns_dtype"] or default_dtype(entry.dtype, entry.device)

    def _wire_dtype(self, comm_dtype: Optional[torch.dtype]) -> torch.dtype:
        if not any(entry.sharded for entry in self.entries):
            return torch.promote_types(self.grads[0].dtype, torch.float32)
        if comm_dtype is not None:
            return comm_dtype
        return torch.float64 if self._ns_dtype() == torch.float64 else torch.bfloat16
