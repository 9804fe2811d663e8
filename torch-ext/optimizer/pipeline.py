"""One chunk of a step: momentum → gather → orthogonalize → normalize → update the weights.

On one device nothing is gathered. Sharded matrices are gathered whole on every rank, which computes
their update and keeps its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from . import core
from .core import Blocks, takes_part
from .distributed import layout
from .distributed import utils as dtensors
from .distributed.plan import Chunk, Entry, Piece
from .newton_schulz import default_dtype, newton_schulz
from .scratch import Scratch

State = Mapping[Tensor, Mapping[str, Tensor]]
Hyper = Mapping[str, Any]


def update_chunk(
    chunk: Chunk,
    entries: Sequence[Entry],
    params: Sequence[Tensor],
    state: State,
    hyper: Hyper,
    comm_dtype: Optional[torch.dtype],
    scratch: Scratch,
) -> None:
    """Updates weights and state of a chunk's matrices.

    Args:
        chunk: what to update; pieces whose parameter has no gradient are left out.
        entries, params: the plan's entries and the parameters they stand for, in one order.
        state: ``momentum_buffer`` and ``second_momentum_buffer`` of each parameter.
        hyper: hyperparameters of the parameter group.
        comm_dtype: wire format; None is bf16 (fp64 where the arithmetic is).
        scratch: buffers that the chunks of a step share.
    """
    parts: list[_Part] = []
    for piece in chunk.pieces:
        if takes_part(params[piece.entry], hyper):
            first = parts[-1].last if parts else 0
            parts.append(_Part.of(params[piece.entry], entries[piece.entry], piece, first))
    if not parts:
        return
    keep = _rows_to_keep(parts) if hyper["nonfinite"] == "skip" else None
    X = _momentum(parts, state, hyper, keep, comm_dtype, scratch)
    for blocks in parts[0].entry.matrices.blocks:
        _update_blocks(blocks, X, parts, state, hyper, keep, scratch)


@dataclass(frozen=True)
class _Part:
    """A piece at work: where it lies in the stored tensor, on this rank, and in the batch.

    Args:
        whole: what the piece covers of the stored tensor.
        mine: what of that this rank holds.
        first, last: its stored matrices in the batch (n, rows, cols) of the chunk.
    """

    param: Tensor
    entry: Entry
    whole: layout.Region
    mine: layout.Region
    first: int
    last: int

    @classmethod
    def of(cls, param: Tensor, entry: Entry, piece: Piece, first: int) -> _Part:
        interval = (piece.first, piece.last)
        whole = layout.clip(layout.whole(entry.matrices.shape), 0, interval)
        mine = layout.clip(entry.region, 0, interval)
        count = layout.numel(whole[: entry.matrices.row_dim])
        return cls(param, entry, whole, mine, first, first + count)

    def of_local(self, tensor: Tensor, rows: layout.Interval) -> Tensor:
        """This rank's part of ``rows``, a view of a tensor or DTensor shaped like the parameter."""
        mine = layout.clip(self.mine, self.entry.matrices.row_dim, rows)
        return dtensors.local(tensor)[layout.slices(mine, self.entry.region)]

    def of_batch(self, batch: Tensor, rows: layout.Interval, whole: bool = False) -> Tensor:
        """The same part (or all of the piece) out of a contiguous batch (n, len(rows), cols)."""
        row_dim = self.entry.matrices.row_dim
        stored = layout.clip(self.whole, row_dim, rows)
        wanted = stored if whole else layout.clip(self.mine, row_dim, rows)
        shape = [stop - start for start, stop in stored]
        return batch[self.first : self.last].view(shape)[layout.slices(wanted, stored)]

    def second_moment(self, state: State, blocks: Blocks) -> Tensor:
        """V of these blocks, a view (stored matrices, count, long side) of the flat buffer."""
        matrices = self.entry.matrices
        V = state[self.param]["second_momentum_buffer"].view(matrices.experts, -1)
        if matrices.row_dim:
            per_index = matrices.experts // matrices.shape[0]
            V = V[self.whole[0][0] * per_index : self.whole[0][1] * per_index]
        long_side, offset = max(blocks.rows, matrices.cols), matrices.second_moment_offset(blocks)
        return V[:, offset : offset + blocks.count * long_side].unflatten(1, (-1, long_side))


def _all_rows(parts: Sequence[_Part]) -> layout.Interval:
    return (0, parts[0].entry.matrices.rows)


def _grad(part: _Part) -> Tensor:
    rows = (0, part.entry.matrices.rows)
    if part.param.grad is None:
        return torch.zeros_like(part.of_local(part.param, rows))
    return part.of_local(part.param.grad, rows)


def _momentum(
    parts: Sequence[_Part],
    state: State,
    hyper: Hyper,
    keep: Optional[Tensor],
    comm_dtype: Optional[torch.dtype],
    scratch: Scratch,
) -> Tensor:
    """Updates the momentum and returns what is to be orthogonalized, (n, rows, cols)."""
    rows, sharded = _all_rows(parts), parts[0].entry.sharded
    grads = [_grad(part) for part in parts]
    if sharded:
        wire = _wire_dtype(parts, hyper, comm_dtype)
        outputs = [torch.empty(g.shape, dtype=wire, device=g.device) for g in grads]
    else:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        X = scratch.empty("momentum", _batch_shape(parts), wide, parts[0].entry.device)
        outputs = [part.of_batch(X, rows) for part in parts]
    core.update_momentum(
        [part.of_local(state[part.param]["momentum_buffer"], rows) for part in parts],
        grads,
        outputs,
        momentum=hyper["momentum"],
        nesterov=hyper["nesterov"],
        style=hyper["momentum_style"],
        maximize=hyper["maximize"],
        keep=_keep_of_parts(parts, keep, rows),
    )
    return _gather(parts, outputs) if sharded else X


def _update_blocks(
    blocks: Blocks,
    X: Tensor,  # (n, all rows, cols)
    parts: Sequence[_Part],
    state: State,
    hyper: Hyper,
    keep: Optional[Tensor],
    scratch: Scratch,
) -> None:
    """Orthogonalizes the same blocks of all pieces and updates their weights."""
    entry, rows = parts[0].entry, (blocks.start, blocks.stop)
    U = newton_schulz(
        X[:, blocks.start : blocks.stop].unflatten(1, (blocks.count, blocks.rows)),
        hyper["ns_steps"],
        hyper["ns_coefficients"],
        norm=hyper["ns_norm"],
        algorithm=hyper["ns_algorithm"],
        dtype=_ns_dtype(entry, hyper),
        eps=hyper["ns_eps"],
        scratch=scratch,
    )  # (n, count, rows, cols)
    if hyper["beta2"] is not None:
        U = _normalize(U, blocks, parts, state, hyper, keep)

    lr, scale = hyper["lr"], core.update_scale(blocks.rows, U.shape[-1], hyper["adjust_lr"])
    decay = lr * hyper["weight_decay"] * (scale if hyper["decay_lr"] == "adjusted" else 1.0)
    wide = torch.promote_types(entry.dtype, torch.float32)
    delta = scratch.empty("delta", U.shape, wide, U.device)
    delta = delta.copy_(U).mul_(lr * scale).flatten(1, 2)  # (n, count·rows, cols)
    core.update_weights(
        [part.of_local(part.param, rows) for part in parts],
        [part.of_batch(delta, rows) for part in parts],
        decay=decay,
        cautious=hyper["cautious"],
        keep=_keep_of_parts(parts, keep, rows),
    )


def _normalize(
    U: Tensor,  # (n, count, rows, cols)
    blocks: Blocks,
    parts: Sequence[_Part],
    state: State,
    hyper: Hyper,
    keep: Optional[Tensor],
) -> Tensor:
    views = [part.second_moment(state, blocks) for part in parts]
    V = torch.cat(views)  # (n, count, long side)
    if keep is not None:
        keep = keep[:, blocks.start : blocks.stop : max(1, blocks.rows)].flatten()  # (n·count,)
    normalized = core.normalize_second_moment(
        U.flatten(0, 1), V.view(-1, V.shape[-1]), hyper["beta2"], keep
    )
    torch._foreach_copy_(views, list(V.split([len(view) for view in views])))
    return normalized.view(U.shape)


def _rows_to_keep(parts: Sequence[_Part]) -> Tensor:
    """(n, rows), False on all rows of a matrix whose gradient has Inf or NaN anywhere."""
    finite = [torch.isfinite(_grad(part)).to(torch.uint8) for part in parts]
    rows = _gather(parts, finite).amin(dim=-1).bool()
    for blocks in parts[0].entry.matrices.blocks:
        of_block = rows[:, blocks.start : blocks.stop].unflatten(1, (blocks.count, -1))
        of_block.copy_(of_block.all(dim=-1, keepdim=True).expand_as(of_block))
    return rows


def _keep_of_parts(
    parts: Sequence[_Part], keep: Optional[Tensor], rows: layout.Interval
) -> Optional[list[Tensor]]:
    """``keep`` in the shape of this rank's part of ``rows`` of each piece."""
    if keep is None:
        return None
    cols = parts[0].entry.matrices.cols
    batch = keep[:, rows[0] : rows[1], None].expand(-1, -1, cols).contiguous()
    return [part.of_batch(batch, rows) for part in parts]


def _gather(parts: Sequence[_Part], shards: Sequence[Tensor]) -> Tensor:
    """All pieces whole, from this rank's part of each, as one batch (n, rows, cols)."""
    if parts[0].entry.sharded:
        matrices = parts[0].entry.matrices
        return dtensors.all_gather(shards, parts[0].param).view(-1, matrices.rows, matrices.cols)
    rows = _all_rows(parts)
    batch = torch.empty(_batch_shape(parts), dtype=shards[0].dtype, device=shards[0].device)
    torch._foreach_copy_([part.of_batch(batch, rows, whole=True) for part in parts], list(shards))
    return batch


def _batch_shape(parts: Sequence[_Part]) -> tuple[int, int, int]:
    matrices = parts[0].entry.matrices
    return (parts[-1].last, matrices.rows, matrices.cols)


def _ns_dtype(entry: Entry, hyper: Hyper) -> torch.dtype:
    return hyper["ns_dtype"] or default_dtype(entry.dtype, entry.device)


def _wire_dtype(
    parts: Sequence[_Part], hyper: Hyper, comm_dtype: Optional[torch.dtype]
) -> torch.dtype:
    if comm_dtype is not None:
        return comm_dtype
    wide = _ns_dtype(parts[0].entry, hyper) == torch.float64
    return torch.float64 if wide else torch.bfloat16
