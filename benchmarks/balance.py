"""How evenly plans share the work of orthogonalization: real models on 8 to 1024 ranks of FSDP2.

    make bench BENCHMARKS=benchmarks/balance.py ARGS="--ranks 64 256"

Plans are made, not run: no accelerator and no process group is needed. For each model, number of
ranks and dtype of the parameters:

- size: `chunk_size`.
- max/mean: FLOPs of the busiest owner over the mean, those of experts that stay included.
- pigeonhole: the same FLOPs over the larger of the mean and the costliest matrix.
- proven: the same over a bound that takes into account that matrices are not divided (see
  `least_load`); 1.000 is an assignment that cannot be improved.
- makespan: a chunk's all-to-all waits for all owners, so a step lasts as long as the busiest owner
  of each chunk, summed over chunks; over the pigeonhole's bound.
- proven: the same over a bound that holds for any sequence of chunks (see `least_makespan`).
- chunks, and how many of them may be in flight; MiB of the largest chunk's buffers, there or back;
  host seconds to plan.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kernels import get_kernel

from timing import show

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from planner.architectures import MODELS, weights_of

optimizer = get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])
matrices, regions = optimizer.matrices, optimizer.regions
planning = optimizer.distributed.plan

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEVICE = torch.device("cuda")  # a name: plans need no device

Shape = tuple[int, ...]


# -- models ----------------------------------------------------------------------------------------


def shapes_of(model: str) -> list[Shape]:
    """Shapes of Muon's parameters."""
    return [tuple(weight.shape) for weight in weights_of(MODELS[model]) if weight.muon]


def entries_of(
    shapes: Iterable[Shape],
    ranks: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = DEVICE,
    whole_experts: bool = False,
) -> list[Any]:
    """Parameters as FSDP2 shards them: along dim 0, experts that travel along dim 1."""
    recipe = optimizer.newton_schulz.recipe_for("polar_express", 5, "auto", None, dtype, device)
    by_dim = [
        regions.Sharding((ranks,), tuple(range(ranks)), (regions.ShardedDim(dim),))
        for dim in (0, 1)
    ]
    return [
        planning.Entry(
            name=f"layers.{number}.weight",
            group=0,
            index=number,
            matrices=matrices.read_as_matrices(shape, len(shape) > 2, False, None),
            sharding=by_dim[len(shape) > 2 and not whole_experts],
            dtype=dtype,
            device=device,
            wire=optimizer.distributed.wire.wire_of(recipe),
            recipe=recipe,
        )
        for number, shape in enumerate(shapes)
    ]


# -- bounds ----------------------------------------------------------------------------------------


def least_load(costs: Sequence[int], ranks: int) -> int:
    """A load that the busiest owner of whole matrices has in every assignment.

    A capacity C is too small if some f with f(A) ≤ 1 for every set A of costs whose sum is at most
    C (a dual feasible function) has Σ f(cost) > ranks. Tried are those of Fekete and Schepers 2001
    (New classes of fast lower bounds for bin packing problems): costs above C − ε count as 1 and
    those below ε as nothing, for every cost ε ≤ C/2, before and after cost/C is rounded down to
    k-ths where (k + 1)·cost/C is no integer.
    """
    count: dict[int, int] = {}
    for cost in costs:
        count[cost] = count.get(cost, 0) + 1
    low = max(-(-sum(costs) // ranks), max(costs)) - 1  # too small
    high = low + max(costs) + 1  # longest processing time first never needs more
    while high - low > 1:
        middle = (low + high) // 2
        if _is_too_small(middle, count, ranks):
            low = middle
        else:
            high = middle
    return low + 1


def _is_too_small(capacity: int, count: dict[int, int], ranks: int, roundings: int = 12) -> bool:
    thresholds = [0, *(cost for cost in count if 2 * cost <= capacity)]
    for k in range(roundings + 1):
        # In units of 1/(k · capacity), so that all numbers are integers.
        value = {cost: _rounded(cost, capacity, k) for cost in count}
        one = max(1, k) * capacity
        for least in thresholds:
            total = 0
            for cost, number in count.items():
                if least and cost > capacity - least:
                    total += number * one
                elif cost >= least:
                    total += number * value[cost]
            if total > ranks * one:
                return True
    return False


def _rounded(cost: int, capacity: int, k: int) -> int:
    if k == 0:
        return cost
    down, rest = divmod((k + 1) * cost, capacity)
    return down * capacity if rest else k * cost


def least_makespan(costs: Sequence[int], ranks: int, chunk_size: int = -1) -> int:
    """A makespan that every sequence of chunks has.

    With n matrices of an owner in a chunk, r chunks leave all but r·n·ranks of the costliest
    matrices to later ones, whatever the order.
    """
    bound = least_load(costs, ranks)
    if chunk_size > 0:
        bound = max(bound, sum(sorted(costs, reverse=True)[:: chunk_size * ranks]))
    return bound


# -- plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Balance:
    """FLOPs of the owners of a plan that sends matrices along one lane.

    Args:
        costs: of the matrices that travel.
        loads: of each chunk, by owner.
        local_flops: of the matrices that do not travel, on each rank.
        chunk_size: of the plan.
    """

    costs: tuple[int, ...]
    loads: tuple[tuple[int, ...], ...]
    local_flops: int
    chunk_size: int

    @property
    def ranks(self) -> int:
        return len(self.loads[0])

    @property
    def mean(self) -> float:
        return self.local_flops + sum(self.costs) / self.ranks

    @property
    def busiest(self) -> int:
        return self.local_flops + max(map(sum, zip(*self.loads)))

    @property
    def makespan(self) -> int:
        return self.local_flops + sum(map(max, self.loads))

    @property
    def pigeonhole(self) -> float:
        """No assignment of whole matrices ends sooner: mean load, and costliest matrix."""
        return max(self.mean, *self.costs)

    @property
    def least_load(self) -> int:
        return self.local_flops + least_load(self.costs, self.ranks)

    @property
    def least_makespan(self) -> int:
        return self.local_flops + least_makespan(self.costs, self.ranks, self.chunk_size)


def balance_of(plan: Any, chunk_size: int = -1) -> Balance:
    def count_and_cost(unit: Any) -> tuple[int, int]:
        entry = plan.entries[unit.entry]
        return unit.count, entry.cost(unit.block)

    (lane,) = plan.lanes
    costs, loads = [], []
    for owned in lane.units:
        of_chunk = [0] * len(lane.peers)
        for unit, owner in owned:
            number, cost = count_and_cost(unit)
            costs += [cost] * number
            of_chunk[owner] += number * cost
        loads.append(tuple(of_chunk))
    local = (unit for lane in plan.local_lanes for unit, _ in lane.owners)
    local_flops = sum(math.prod(count_and_cost(unit)) for unit in local)
    return Balance(tuple(costs), tuple(loads), local_flops, chunk_size)


def staged_bytes(lane: Any) -> int:
    """Size of the largest chunk: what a rank sends, and what the busiest owner gathers."""
    staged = []
    for owned in lane.units:
        gathered = [0] * len(lane.peers)
        for unit, owner in owned:
            gathered[owner] += regions.numel(unit.box)
        staged.append(max(gathered) + sum(gathered) // len(gathered))
    return max(staged) * lane.wire.itemsize


def expected_state(shapes: Sequence[Shape], ranks: int) -> dict[str, bool]:
    """Names of the layouts of a model, and whether whole experts stay on their ranks in them."""
    counts = {shape[0] for shape in shapes if len(shape) > 2}
    if not counts:
        return {"": False}
    whole = {"experts stay": True} if all(count % ranks == 0 for count in counts) else {}
    return {"experts travel": False, **whole}


COLUMNS = (
    *("model", "ranks", "dtype", "size", "max/mean", "pigeonhole", "proven", "makespan", "proven"),
    *("chunks", "in flight", "MiB", "s"),
)


def rows_of(model: str, arguments: argparse.Namespace) -> Iterator[list[str]]:
    shapes = shapes_of(model)
    for ranks in arguments.ranks:
        for kind, whole_experts in expected_state(shapes, ranks).items():
            for dtype in arguments.dtypes:
                entries = entries_of(
                    shapes, ranks, dtype=DTYPES[dtype], whole_experts=whole_experts
                )
                for size in arguments.chunk_size:
                    name = f"{model}, {kind}" if kind else model
                    yield [name, f"{ranks}", dtype, f"{size}", *row_of(entries, size)]


def row_of(entries: Sequence[Any], chunk_size: int) -> list[str]:
    start = time.process_time()
    plan = planning.Planner(entries, rank=0, chunk_size=chunk_size).plan()
    seconds = time.process_time() - start
    balance = balance_of(plan, chunk_size)
    ratios = (
        *(balance.busiest / of for of in (balance.mean, balance.pigeonhole, balance.least_load)),
        *(balance.makespan / of for of in (balance.pigeonhole, balance.least_makespan)),
    )
    (lane,) = plan.lanes
    return [
        *(f"{ratio:.3f}" for ratio in ratios),
        f"{len(lane.units)}",
        f"{lane.in_flight}",
        f"{staged_bytes(lane) / 2**20:.0f}",
        f"{seconds:.1f}",
    ]


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--chunk-size", nargs="+", type=int, default=[-1])
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown")
    arguments = parser.parse_args()
    rows = [row for model in arguments.models for row in rows_of(model, arguments)]
    show("How evenly plans share work", COLUMNS, rows, markdown=arguments.markdown)


if __name__ == "__main__":
    main()
