"""One optimizer step on sharded matrices: time, traffic, memory and operations.

    make bench BENCHMARKS=benchmarks/distributed_step.py ARGS="--ranks 4"

Starts its own ranks: one for each accelerator, or four on the CPU; under torchrun it uses those.

1. Step: the matrices of a transformer under FSDP2. This package, torch.optim.Muon and, as a floor,
   AdamW hold the same DTensors and take turns (A B C A B C …). A step lasts as long as the slowest
   rank's.
2. Wire: all-to-alls of equal parts by size, as a step's traffic is, beside the best rate of all.
3. Layouts: traffic on other meshes, of gloo ranks.
4. Host: what `step()` itself costs for many matrices. They are real CPU tensors, so that all that a
   step does on the host is done, allocation included, but tiny, so that the iteration's arithmetic
   is none of it; torch's fake process group, which moves nothing, leaves the network out.

Traffic, operations and memory are counted (tests/counters.py), not timed.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from timing import NS_DTYPES, load_kernel, machine, milliseconds, show, synchronize

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from counters import count
from ranks import RankError, run_ranks  # type: ignore[attr-defined]  # mypy takes examples/ranks.py

OURS, THEIRS, ADAMW = "Muon (this package)", "torch.optim.Muon", "AdamW (fused)"
TABLES = ("step", "wire", "layouts", "host")
WIRE_BYTES = [2**n for n in range(12, 31, 2)]  # that a rank sends at once, to all ranks together
DEFAULT_WIRE_BYTES = {"cpu": WIRE_BYTES[:7]}

Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Cost:
    """One step on one rank."""

    sent: float  # bytes
    notes: float  # bytes by which hosts compare notes
    collectives: int
    chunks: float
    operations: int
    peak_bytes: int
    local_elements: int


class Model(nn.Module):
    def __init__(self, layers: Sequence[Shapes]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(cols, rows, bias=False) for rows, cols in shapes))
            for shapes in layers
        )


def transformer(layers: int, dim: int, ffn: int) -> Sequence[Shapes]:
    """Four (dim, dim) and three of the feed-forward in each layer, as in step.py."""
    return layers * [4 * [(dim, dim)] + [(ffn, dim), (ffn, dim), (dim, ffn)]]


def shard(model: Model, mesh: Any) -> list[nn.Parameter]:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return with_gradients(list(model.parameters()))


def with_gradients(params: list[nn.Parameter]) -> list[nn.Parameter]:
    for param in params:
        param.grad = torch.zeros_like(param)
        local(param.grad).normal_()
    return params


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def muon(
    params: list[nn.Parameter], names: list[str] | None = None, **options: Any
) -> torch.optim.Optimizer:
    group: dict[str, Any] = {"params": params, "use_muon": True, "none_grad": False}
    if names:
        group |= {"names": names}
    return load_kernel().Muon([group], expert_keys=["experts"] if names else None, **options)


def torch_muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


def cost_of_a_step(optimizer: torch.optim.Optimizer) -> Cost:
    optimizer.step()  # makes state, plans and groups
    counter = count(optimizer.step)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return Cost(
        counter.sent,
        sum(c.sent for c in counter.collectives if c.notes),
        len(counter.messages),
        sum(c.name.replace("_", "").startswith("alltoall") for c in counter.messages) / 2,
        counter.operations,
        counter.peak_bytes,
        sum(local(p).numel() for p in params),
    )


def sent_per_local_element(costs: Sequence[Cost]) -> float:
    return sum(c.sent for c in costs) / sum(c.local_elements for c in costs)


def floor(ranks: int) -> float:
    """Two bytes each way for all of a rank's elements but those of matrices it owns."""
    return 4 * (ranks - 1) / ranks


# 1. Step


def run_as_rank(arguments: argparse.Namespace) -> None:
    device = pick_device()
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{torch_backend(device)}"
    dist.init_process_group(backend)
    if "step" in arguments.tables:
        step_table(arguments, device)
    if "wire" in arguments.tables:
        wire_table(arguments, device)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # shutting the interpreter down sometimes aborts after gloo was used


def step_table(arguments: argparse.Namespace, device: torch.device) -> None:
    ranks = dist.get_world_size()
    ns_dtype = getattr(torch, arguments.ns_dtype) if arguments.ns_dtype else None
    torch.manual_seed(0)
    layers = transformer(arguments.layers, arguments.dim, arguments.ffn)
    params = shard(Model(layers).to(device), init_device_mesh(device.type, (ranks,)))
    optimizers = {
        OURS: muon(params, ns_dtype=ns_dtype),
        THEIRS: torch_muon(params),
        ADAMW: torch.optim.AdamW(params, fused=True),
    }
    if arguments.without_torch:
        del optimizers[THEIRS]
    costs = {name: over_ranks(cost_of_a_step(optim)) for name, optim in optimizers.items()}
    steps = {name: optim.step for name, optim in optimizers.items()}
    seconds = measure(steps, arguments.rounds)
    comparing = measure({"notes": comparison(len(params))}, 200)["notes"]
    if dist.get_rank() == 0:
        print_steps(params, costs, seconds, comparing, device, arguments.markdown)


def comparison(lines: int) -> Callable[[], object]:
    """What hosts do before a step: compare notes of so many lines on plan and gradients."""
    agreement = load_kernel().muon.agreement
    ranks = tuple(range(dist.get_world_size()))
    shared = agreement.Agreement()
    notes = agreement.StepNotes(
        [f"layers.{i}.weight: (512, 512) torch.float32 [Shard(0)] on (dp=4)" for i in range(lines)],
        [f"layers.{i}.weight" for i in range(lines)],
    )
    return lambda: shared.check({ranks: notes}, None, [ranks])


def torch_backend(device: torch.device) -> str:
    return dist.get_default_backend_for_device(device)


def pick_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < int(
        os.environ["LOCAL_WORLD_SIZE"]
    ):
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def measure(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step on the rank that took longest, contenders taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            synchronize()
            dist.barrier()
            start = time.perf_counter()
            step()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: [max(step) for step in zip(*over_ranks(s))] for name, s in seconds.items()}


def over_ranks(value: Any) -> list[Any]:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


STEP_COLUMNS = (
    *("optimizer", "least\nms", "median\nms", "bytes per\nlocal element"),
    *("collectives\nper step", "chunks", "collectives\nper chunk", "transient\nMiB"),
    "operations\nper matrix",
)


def print_steps(
    params: list[nn.Parameter],
    costs: dict[str, list[Cost]],
    seconds: dict[str, list[float]],
    comparing: list[float],
    device: torch.device,
    markdown: bool,
) -> None:
    ranks = dist.get_world_size()
    bytes_of = [p.numel() * p.element_size() for p in params]
    rows = []
    for name, of_ranks in costs.items():
        first = of_ranks[0]
        owns = name == OURS and first.chunks > 0
        rows.append(
            [
                name,
                f"{min(seconds[name]) * 1e3:.0f}",
                f"{statistics.median(seconds[name]) * 1e3:.0f}",
                f"{sent_per_local_element(of_ranks):.2f}",
                f"{first.collectives}",
                f"{first.chunks:g}" if owns else "–",
                f"{first.collectives / first.chunks:g}" if owns else "–",
                f"{max(c.peak_bytes for c in of_ranks) / 2**20:.1f}",
                f"{statistics.fmean(c.operations for c in of_ranks) / len(params):.1f}",
            ]
        )
    local_bytes = sum(local(p).numel() * p.element_size() for p in params)
    bound = (1.5 * local_bytes + 4 * max(bytes_of)) / 2**20
    rows.append(["floor or bound", "", "", f"{floor(ranks):.2f}", "", "", "2", f"{bound:.1f}", ""])
    title = (
        f"One step, {len(params)} matrices, {sum(bytes_of) / 2**20:.0f} MiB, FSDP2 on "
        f"{ranks} × {device.type}"
    )
    show(title, STEP_COLUMNS, rows, markdown=markdown, width=118)
    notes = costs[OURS][0].notes
    print(
        f"bound: 1.5 × local weights + 4 × largest matrix; hosts compare notes in {notes:.0f} more "
        f"bytes a step and rank,\nwhich takes {min(comparing) * 1e3:.2f} ms at least, "
        f"{statistics.median(comparing) * 1e3:.2f} ms median\n{machine(device)} a rank"
    )


# 2. Wire

WIRE_COLUMNS = ("KiB sent", "least ms", "median ms", "GB/s to others", "of the best rate")


def wire_table(arguments: argparse.Namespace, device: torch.device) -> None:
    """Rates by which a rank's bytes leave for the others, what stays with it not counted."""
    ranks = dist.get_world_size()
    sizes = arguments.wire or DEFAULT_WIRE_BYTES.get(device.type, WIRE_BYTES)
    calls: dict[str, Callable[[], object]] = {}
    for size in sizes:
        sent = torch.ones(ranks, size // ranks, dtype=torch.uint8, device=device)
        calls[f"{size / 2**10:g}"] = partial(dist.all_to_all_single, torch.empty_like(sent), sent)
    measure(calls, 2)  # makes the communicator and its buffers
    seconds = measure(calls, arguments.rounds)
    leaving = {name: float(name) * 2**10 * (ranks - 1) / ranks for name in calls}
    rates = {name: leaving[name] / min(seconds[name]) for name in calls}
    if dist.get_rank() == 0:
        rows = [
            [name, *milliseconds(seconds[name]), f"{rate / 1e9:.2f}"]
            + [f"{rate / max(rates.values()):.2f}"]
            for name, rate in rates.items()
        ]
        title = f"All-to-alls of {ranks} × {device.type}"
        show(title, WIRE_COLUMNS, rows, markdown=arguments.markdown)


# 3. Layouts


@dataclass(frozen=True)
class Layout:
    """How a rank's parameters are made, and the floor of what it sends per local element."""

    ranks: int
    floor: float
    matrices: int
    params: Callable[[int], list[nn.Parameter]]
    names: list[str] | None = None
    options: Callable[[], Mapping[str, Any]] = dict


SMALL = [(64, 64), (64, 64), (160, 64), (64, 160)]


def fsdp2(shapes: Shapes) -> Callable[[int], list[nn.Parameter]]:
    return lambda ranks: shard(Model([shapes]), init_device_mesh("cpu", (ranks,)))


def hsdp(ranks: int) -> list[nn.Parameter]:
    names = ("replicas", "shards")
    return shard(Model(2 * [SMALL]), init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names))


def fsdp2_and_tp(ranks: int) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(2 * [SMALL])
    for layer in model.layers:
        assert isinstance(layer, nn.Sequential)
        for i, linear in enumerate(layer):
            parallelize_module(linear, mesh["tp"], (ColwiseParallel, RowwiseParallel)[i % 2]())
    return shard(model, mesh["dp"])


def replicated(ranks: int) -> list[nn.Parameter]:
    return with_gradients([nn.Parameter(torch.randn(shape)) for shape in 2 * SMALL])


def floor_of_replicas(replicas: int, shards: int) -> float:
    """Gathered within the owner's replica, given back to all of them."""
    ranks = replicas * shards
    return 2 * (shards - 1) / shards / replicas + 2 * (ranks - 1) / ranks


def floor_of_ddp(ranks: int) -> float:
    """Gathered from where the momentum is, given back to all."""
    return 2 * (ranks - 1) / ranks * (1 + 1 / ranks)


def experts(ranks: int) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (ranks,))
    shards = [torch.randn(2, 64, 32), torch.randn(2, 32, 64)]
    return with_gradients(
        [nn.Parameter(DTensor.from_local(w, mesh, [Shard(0)], run_check=False)) for w in shards]
    )


LAYOUTS = {
    "one matrix per shape": Layout(
        4, floor(4), 16, fsdp2([(8 * i, 136 - 8 * i) for i in range(1, 17)])
    ),
    "3 matrices on 8 ranks": Layout(8, floor(8), 3, fsdp2([(64, 32), (64, 32), (32, 64)])),
    "uneven and empty shards": Layout(
        4, floor(4), 5, fsdp2([(50, 64), (7, 64), (3, 64), (65, 64), (1, 9)])
    ),
    "HSDP, 2 replicas of 4 shards, redundant": Layout(
        8, floor(4), 8, hsdp, options=lambda: {"hsdp": "redundant"}
    ),
    "the same, spread": Layout(
        8, floor_of_replicas(2, 4), 8, hsdp, options=lambda: {"hsdp": "spread"}
    ),
    "DDP": Layout(
        4, floor_of_ddp(4), 8, replicated, options=lambda: {"process_group": dist.group.WORLD}
    ),
    "ZeRO-2, fp32 gradients included": Layout(
        4,
        floor_of_ddp(4) + 4 * 3 / 4,
        8,
        replicated,
        options=lambda: {"process_group": dist.group.WORLD, "grad_reduce": "mean"},
    ),
    "FSDP2 of 4 × TP of 2": Layout(8, floor(8), 8, fsdp2_and_tp),
    "experts, Shard(0)": Layout(4, 0.0, 16, experts, names=["experts.w1", "experts.w2"]),
}


def layout_table(arguments: argparse.Namespace) -> None:
    rows = []
    for name, layout in LAYOUTS.items():
        ours = run_ranks(layout_cost, layout.ranks, name, OURS)
        try:
            theirs = run_ranks(layout_cost, layout.ranks, name, THEIRS)
        except RankError:
            theirs = None
        rows.append(
            [
                *(name, f"{layout.ranks}", f"{layout.matrices}", f"{layout.floor:.2f}"),
                *(f"{sent_per_local_element(ours):.2f}", f"{ours[0].collectives}"),
                f"{sent_per_local_element(theirs):.2f}" if theirs else "raises",
            ]
        )
    columns = ("layout", "ranks", "matrices", "floor", "this package", "collectives", THEIRS)
    title = "Sent, bytes per local element, mean over ranks"
    show(title, columns, rows, markdown=arguments.markdown, width=118)


def layout_cost(name: str, optimizer: str) -> Cost:
    # DTensor's advice on the collectives that torch.optim.Muon makes it run.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    layout = LAYOUTS[name]
    params = layout.params(layout.ranks)
    if optimizer == OURS:
        return cost_of_a_step(muon(params, layout.names, **layout.options()))
    return cost_of_a_step(torch_muon(params))


# 4. Host


def host_table(arguments: argparse.Namespace, rounds: int = 20) -> None:
    matrices, ranks = arguments.matrices, arguments.mesh
    torch.set_num_threads(1)
    shards = [torch.randn(1, ranks) for _ in range(matrices)]  # a row on every rank
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    sharded = with_gradients(
        [nn.Parameter(DTensor.from_local(s, mesh, [Shard(0)], run_check=False)) for s in shards]
    )
    plain = with_gradients([nn.Parameter(s.clone()) for s in shards])
    optimizers = {
        OURS: muon(sharded),
        f"{ADAMW}, on local tensors": torch.optim.AdamW(plain, fused=True),
    }
    costs = {name: cost_of_a_step(optimizer) for name, optimizer in optimizers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
    rows = [
        [
            name,
            f"{min(seconds[name]) * 1e3:.1f}",
            f"{statistics.median(seconds[name]) * 1e3:.1f}",
            f"{costs[name].operations / matrices:.2f}",
        ]
        for name in optimizers
    ]
    title = (
        f"Host time of a step, {matrices} matrices of {ranks} × {ranks}, rank 0 of {ranks} "
        "(fake process group)"
    )
    columns = ("optimizer", "least ms", "median ms", "operations per matrix")
    show(title, columns, rows, markdown=arguments.markdown, width=118)


def start_ranks(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, *sys.argv[1:]]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": threads} | os.environ)


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=torch.accelerator.device_count() or 4)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="which")
    parser.add_argument("--wire", nargs="+", type=int, help="bytes that a rank sends at once")
    parser.add_argument("--markdown", action="store_true", help="print tables in markdown")
    parser.add_argument("--without-torch", action="store_true", help=f"leave {THEIRS} out")
    parser.add_argument("--ns-dtype", choices=NS_DTYPES, help="this package's arithmetic")
    parser.add_argument("--matrices", type=int, default=1000, help="of the host's table")
    parser.add_argument("--mesh", type=int, default=64, help="ranks of the host's table")
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():
        run_as_rank(arguments)
        return
    if {"step", "wire"} & set(arguments.tables):
        start_ranks(arguments.ranks)
    if "layouts" in arguments.tables:
        layout_table(arguments)
    if "host" in arguments.tables:
        host_table(arguments)


if __name__ == "__main__":
    main()
