"""A model on a mesh: from a layout written as text to what the package's plans are made from.

    fsdp              Shard(0) on all ranks
    hsdp:RxP          R replicas of P shards; then :redundant (each replica does all the work) or
                      :spread (a matrix has one owner among all replicas), else what is faster
    fsdp[:P]+tp:N     FSDP2, of P shards, over tensor parallelism on N ranks
    ep:N              experts divided among N ranks, then by FSDP2; all else FSDP2 on all ranks
    ddp, zero2        plain weights, momentum in row shards; zero2 also reduces the gradients

One of R, P may be *: as many as there are ranks.

Stacks of experts are cut by expert where there are enough of them for all ranks that cut them,
else by rows, as torchtitan does it. FSDP2 needs rows that divide evenly for that; where they do
not, some ranks have no experts.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from planner.architectures import Weight

KINDS = ("fsdp", "hsdp:RxP[:spread|:redundant]", "fsdp[:P]+tp:N", "ep:N", "ddp", "zero2")
_PATTERN = re.compile(
    r"(?P<plain>fsdp|ddp|zero2)"
    r"|(?P<divided>fsdp(:(?P<outer>\d+))?\+tp|ep):(?P<inner>\d+)"
    r"|hsdp:(?P<replicas>\d+|\*)x(?P<shards>\d+|\*)(?P<how>:spread|:redundant)?"
)


@dataclass(frozen=True)
class Layout:
    """Where weights lie.

    Args:
        text: as it was written.
        kind: its first part.
        mesh: (ranks,), or outer and inner ranks of a mesh.
        hsdp: the optimizer's option of this name.
    """

    text: str
    kind: str
    mesh: tuple[int, ...]
    hsdp: str = "auto"

    @property
    def replicated(self) -> bool:
        """Weights are plain tensors, equal on all ranks."""
        return self.kind in ("ddp", "zero2")


def parse_layout(text: str, ranks: int) -> Layout:
    """A layout of so many ranks.

    Raises:
        ValueError: not a layout, or not of so many ranks.
    """
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no layout; there are {', '.join(KINDS)}")
    if found["plain"]:
        return Layout(text, text, (ranks,))
    if found["divided"]:
        inner = int(found["inner"])
        if not inner or ranks % inner:
            raise ValueError(f"{text}: {inner} does not divide {ranks} ranks")
        if found["outer"] and int(found["outer"]) * inner != ranks:
            raise ValueError(f"{text}: {found['outer']} × {inner} is not {ranks} ranks")
        kind = "ep" if found["divided"].startswith("ep") else "fsdp+tp"
        return Layout(text, kind, (ranks // inner, inner))
    mesh = _replicas_and_shards(text, found["replicas"], found["shards"], ranks)
    how = found["how"] or ""
    return Layout(f"hsdp:{mesh[0]}x{mesh[1]}{how}", "hsdp", mesh, how[1:] or "auto")


def _replicas_and_shards(text: str, replicas: str, shards: str, ranks: int) -> tuple[int, int]:
    """The numbers in ``hsdp:RxP``, with a star replaced."""
    if replicas == shards == "*":
        raise ValueError(f"{text}: only one of R, P may be *")
    if "*" not in (replicas, shards):
        if int(replicas) * int(shards) != ranks:
            raise ValueError(f"{text}: {replicas} × {shards} is not {ranks} ranks")
        return int(replicas), int(shards)
    given = int(shards if replicas == "*" else replicas)
    if not given or ranks % given:
        raise ValueError(f"{text}: {given} does not divide {ranks} ranks")
    return (ranks // given, given) if replicas == "*" else (given, ranks // given)


def entries_of(
    kernel: Any,
    weights: Iterable[Weight],
    layout: Layout,
    dtype: torch.dtype = torch.bfloat16,
    device_type: str = "cuda",
    wire: torch.dtype | None = None,
    second_moment: bool = False,
) -> list[Any]:
    """Muon's weights as `distributed.plan.Entry`, one each, with the optimizer's default options.

    Args:
        kernel: the package.
        weights: of the model; AdamW's are left out.
        layout: where they lie.
        dtype: of the weights.
        device_type: of the ranks' devices.
        wire: format in which momentum and updates travel; None: the package's choice.
        second_moment: with `beta2`.
    """
    device = torch.device(device_type)
    recipe = kernel.newton_schulz.recipe_for("polar_express", 5, "auto", None, dtype, device)
    entries = []
    for index, weight in enumerate(weight for weight in weights if weight.muon):
        sharding = sharding_of(kernel, weight, layout)
        entry = kernel.distributed.plan.Entry(
            name=weight.name,
            group=0,
            index=index,
            matrices=kernel.matrices.read_as_matrices(weight.shape, weight.is_expert, False, None),
            sharding=sharding,
            dtype=dtype,
            device=device,
            wire=wire or kernel.distributed.wire.wire_of(recipe),
            recipe=recipe,
            second_moment=second_moment,
            momentum_sharding=rows_of(kernel, layout) if layout.replicated else None,
            spread=layout.replicated,
        )
        entries.append(entry)
    return kernel.distributed.hsdp.share_work(entries, 0, layout.hsdp)


def rows_of(kernel: Any, layout: Layout) -> Any:
    """Rows of replicated weights, divided among all ranks, as `regions.Sharding`."""
    return _sharding(kernel, layout.mesh, (0, False))


def sharding_of(kernel: Any, weight: Weight, layout: Layout) -> Any:
    """Where a weight lies, as `regions.Sharding`."""
    mesh, everyone = layout.mesh, (math.prod(layout.mesh),)
    if layout.replicated:
        return _sharding(kernel, mesh, None)
    if layout.kind == "fsdp":
        return _sharding(kernel, mesh, (_fsdp_dim(weight, mesh[0], 1, 1), False))
    if layout.kind == "hsdp":
        return _sharding(kernel, mesh, None, (_fsdp_dim(weight, mesh[1], 1, 1), False))
    if layout.kind == "ep":
        if not weight.is_expert:
            return _sharding(kernel, everyone, (0, False))
        dim = _fsdp_dim(weight, mesh[0], mesh[1], 1)
        return _sharding(kernel, mesh, (dim, dim == 0), (0, False))
    row_dim = len(weight.shape) - 2
    tp = {"colwise": row_dim, "rowwise": row_dim + 1, None: None}[weight.parallel]
    dim = _fsdp_dim(weight, mesh[0], 1, mesh[1] if weight.parallel == "colwise" else 1)
    return _sharding(kernel, mesh, (dim, tp == dim), None if tp is None else (tp, False))


@functools.cache  # one object for all weights that lie alike: of thousands of ranks, told by id
def _sharding(kernel: Any, mesh: tuple[int, ...], *splits: tuple[int, bool] | None) -> Any:
    """A `Sharding` of all ranks, from (dimension, strided) or None for each mesh dimension."""
    ShardedDim = kernel.regions.ShardedDim
    return kernel.regions.Sharding(
        mesh,
        tuple(range(math.prod(mesh))),
        tuple(None if split is None else ShardedDim(*split) for split in splits),
    )


def _fsdp_dim(weight: Weight, ranks: int, of_experts: int, of_rows: int) -> int:
    """The dimension that FSDP2 cuts among some ranks, once others have cut experts or rows."""
    if not weight.is_expert:
        return 0
    experts, rows = weight.shape[0], weight.shape[1]
    return 0 if experts >= ranks * of_experts or rows % (ranks * of_rows) else 1
