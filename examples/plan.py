r"""What an optimizer step will cost on thousands of ranks, before they are rented.

    python examples/plan.py --model llama-3-8b --ranks 64 --layout fsdp --layout hsdp:8x8 \
        --png runs/plan.png

One process, no process group, no device: it reads a model's shapes, makes the plans that ranks
would make, and adds up what they say.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from planner import deployment
from planner.architectures import MODELS, Weight, read_config, weights_of
from planner.averaging import averages_of
from planner.costs import HOST, NETWORK, RECEIVED, SENT, Costs, costs_of
from planner.deployment import Layout, entries_of, parse_layout
from planner.timeline import Timeline, draw, simulate
from train import load_kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Report:
    """What there is to know of a layout.

    Args:
        layout: which.
        entries: Muon's weights, as the plan sees them.
        local: elements of Muon's weights, (ranks,).
        itemsize: bytes of each.
        costs: of all ranks.
        timeline: of one of them.
        machine: that it is estimated for.
        seconds: that planning and counting took.
    """

    layout: Layout
    entries: list[Any]
    local: np.ndarray
    itemsize: int
    costs: Costs
    timeline: Timeline
    machine: Any
    seconds: float

    def rows(self) -> dict[str, str]:
        """What is printed, by its label."""
        c, t = self.costs, self.timeline
        around = self._around()  # by every rank, sent and received
        sent = c.bytes[:, SENT].sum(0) + around
        received = c.bytes[:, RECEIVED].sum(0) + around
        computing = c.makespan / self.machine.flops
        return {
            "replicas": self._replicas(),
            "owners": f"{np.count_nonzero(c.flops)} of {len(c.flops)} ranks",
            "TFLOP per rank, mean": _number(c.flops.mean() / 1e12),
            "TFLOP per rank, most": _number(c.flops.max() / 1e12),
            "most / mean": f"{c.flops.max() / c.flops.mean():.2f}",
            "makespan of the chunks, TFLOP": _number(c.makespan / 1e12),
            "makespan / bound": f"{c.makespan / c.bound:.2f}",
            "sent within a host, GB, mean": _number(sent[HOST].mean() / 1e9),
            "sent within a host, GB, most": _number(sent[HOST].max() / 1e9),
            "sent to other hosts, GB, mean": _number(sent[NETWORK].mean() / 1e9),
            "sent to other hosts, GB, most": _number(sent[NETWORK].max() / 1e9),
            "received, GB, most": _number(received.sum(0).max() / 1e9),
            "of which ZeRO-2's averages, GB": _number(around.sum() / 1e9),
            "bytes sent per local element": f"{sent.sum() / self.local.sum():.2f}",
            "local weights, GB, most": _number(self.local.max() * self.itemsize / 1e9),
            "staged in flight, GB, most": _number(t.staged / 1e9),
            "chunks": str(max((len(lane.flops) for lane in c.lanes), default=0)),
            "chunks in flight": str(max((lane.in_flight for lane in c.lanes), default=0)),
            "step, ms": _number(1e3 * t.seconds),
            "of which traffic shows, ms": _number(1e3 * max(0.0, t.seconds - computing)),
        }

    def _around(self) -> np.ndarray:
        """Bytes of ZeRO-2's averages and gathers that each rank sends, (links, 1)."""
        if self.costs.averages is None:
            return np.zeros((2, 1))
        ranks = len(self.local)
        by_link = self.costs.averages.all.by_link(ranks, -(-ranks // self.machine.ranks_per_host))
        return np.array(by_link)[:, None]

    def _replicas(self) -> str:
        """What those do that hold the same parts of a matrix."""
        told = {
            "share the work" if entry.spread else "each do all work"
            for entry in self.entries
            if len(entry.holders(0)) > len(entry.holders(0, replicas=False))
        }
        return " or ".join(sorted(told)) or "0"


def report_of(
    kernel: Any, weights: Sequence[Weight], layout: Layout, ranks: int, args: argparse.Namespace
) -> Report:
    """Plans, counts and simulates one layout."""
    began = time.perf_counter()
    dtype = DTYPES[args.dtype]
    machine = machine_of(kernel, args)
    entries = entries_of(
        kernel, weights, layout, dtype, args.device_type, DTYPES[args.wire], machine=machine
    )
    costs = costs_of(
        kernel,
        entries,
        ranks,
        machine.ranks_per_host,
        chunk_size=args.chunk_size,
        warmup_step=args.warmup_step,
    )
    if layout.kind == "zero2":
        (lane,) = costs.lanes
        averages = averages_of(kernel, entries, weights, lane.first_used, ranks)
        costs = replace(costs, averages=averages)
    interleave = importlib.import_module(f"{kernel.__name__}.async_utils").interleave
    timeline = simulate(interleave, costs, machine, args.rank)
    local = local_elements(kernel, entries, ranks)
    seconds = time.perf_counter() - began
    return Report(layout, entries, local, dtype.itemsize, costs, timeline, machine, seconds)


def local_elements(kernel: Any, entries: Iterable[Any], ranks: int) -> np.ndarray:
    """Elements that each rank holds, (ranks,)."""
    count: dict[tuple, int] = defaultdict(int)
    for entry in entries:
        count[entry.sharding, entry.matrices.shape] += 1
    numel = kernel.distributed.layout.numel
    return sum(
        (
            times * np.array([numel(sharding.region(shape, rank)) for rank in range(ranks)])
            for (sharding, shape), times in count.items()
        ),
        start=np.zeros(ranks, np.int64),
    )


def machine_of(kernel: Any, args: argparse.Namespace) -> Any:
    """The package's figures for this device, but for those given."""
    machines = importlib.import_module(f"{kernel.__name__}.distributed.machine")
    given = {
        "flops": args.tflops and args.tflops * 1e12,
        "host_bytes": args.host_gb_s and args.host_gb_s * 1e9,
        "network_bytes": args.network_gb_s and args.network_gb_s * 1e9,
        "latency": None if args.latency_us is None else args.latency_us / 1e6,
        "ranks_per_host": args.ranks_per_host,
    }
    machine = machines.MACHINES.get(args.device_type, machines.DEFAULT_MACHINE)
    return replace(machine, **{key: value for key, value in given.items() if value is not None})


# -- what is printed -------------------------------------------------------------------------------


def compare(title: str, reports: Sequence[Report]) -> Table:
    """Layouts side by side."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    columns = [report.rows() for report in reports]
    for report in reports:
        table.add_column(report.layout.text, justify="right")
    for label in columns[0]:
        cells = [column[label] for column in columns]
        if any(cell != "0" for cell in cells):
            table.add_row(label, *cells)
    return table


MARKDOWN = {
    "TFLOP per rank, mean": "TFLOP a rank",
    "most / mean": "most / mean",
    "makespan / bound": "makespan / bound",
    "sent within a host, GB, most": "GB sent in a host",
    "sent to other hosts, GB, most": "GB sent to others",
    "bytes sent per local element": "bytes per element",
    "local weights, GB, most": "GB of weights",
    "staged in flight, GB, most": "GB staged",
    "step, ms": "step, ms",
    "of which traffic shows, ms": "traffic shows, ms",
}


def markdown_head() -> list[str]:
    head = ["model", "ranks", "layout", *MARKDOWN.values()]
    return [f"| {' | '.join(head)} |", "|---|---|---|" + "---:|" * len(MARKDOWN)]


def markdown_row(model: str, ranks: int, report: Report) -> str:
    rows = report.rows()
    cells = [model, str(ranks), f"`{report.layout.text}`", *(rows[label] for label in MARKDOWN)]
    return f"| {' | '.join(cells)} |"


def owners_table(kernel: Any, report: Report, args: argparse.Namespace) -> Table:
    """Who owns the matrices that one rank holds parts of; weights of all layers in one row."""
    rank = report.timeline.rank
    plan = kernel.distributed.plan.make_plan(
        report.entries, rank, chunk_size=args.chunk_size, warmup_step=args.warmup_step
    )
    owned = [
        (unit, lane.peers[owner])
        for lane in (*plan.lanes, *plan.alone)
        for unit, owner in lane.owners
    ]
    owners: dict[tuple, set[int]] = defaultdict(set)
    matrices: dict[tuple, int] = defaultdict(int)
    for unit, owner in (*owned, *plan.elsewhere):
        entry = plan.entries[unit.entry]
        name = re.sub(r"\.\d+\.", ".*.", entry.name.removesuffix(".weight"))
        key = (name, unit.rows, entry.matrices.cols, entry.cost(unit.rows))
        owners[key].add(owner)
        matrices[key] += entry.matrices.count(unit.box, unit.rows)
    table = Table(title=f"{report.layout.text}: owners of what rank {rank} shares with others")
    for column in ("weight", "matrices", "shape", "GFLOP each", "owners", "ranks"):
        table.add_column(column, justify="left" if column in ("weight", "ranks") else "right")
    for key, count in matrices.items():
        name, rows, cols, flops = key
        ranks = sorted(owners[key])
        shown = (name, str(count), f"{rows}×{cols}", _number(flops / 1e9), str(len(ranks)))
        table.add_row(*shown, _ranges(ranks))
    return table


def _ranges(ranks: Sequence[int], most: int = 6) -> str:
    """0–3, 7, 9–12, …"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [f"{a}" if a == b else f"{a}–{b}" for a, b in runs[:most]]
    return ", ".join(shown + ["…"] * (len(runs) > most))


def _number(value: float) -> str:
    """Three digits."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# -- command line ----------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=deployment.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", action="append", choices=MODELS, help="may be repeated; default: llama-3-8b")
    add("--config", action="append", type=Path, help="config.json of a Hugging Face model")
    add("--ranks", action="append", type=int, help="may be repeated; default: 64")
    add("--layout", action="append", help="may be repeated, see below; default: fsdp")
    add("--rank", type=int, help="whose timeline and owners; default: the one with the most FLOPs")
    add("--dtype", choices=DTYPES, default="bf16", help="of the weights")
    add("--wire", choices=DTYPES, default="bf16", help="comm_dtype")
    add("--device-type", default="cuda", help="sets sizes of chunks and the machine's figures")
    add("--chunk-size", type=int, default=-1)
    add("--warmup-step", type=int, default=5)
    add("--tflops", type=float, help="that a rank reaches in orthogonalization")
    add("--host-gb-s", type=float, help="that a rank sends within its host")
    add("--network-gb-s", type=float, help="that a rank sends to other hosts")
    add("--latency-us", type=float, help="of a collective")
    add("--ranks-per-host", type=int)
    add("--owners", action="store_true", help="also print who owns what")
    add("--markdown", action="store_true", help="print one table of everything, in markdown")
    add("--png", type=Path, help="draw the timelines")
    args = parser.parse_args(argv)
    args.ranks = args.ranks or [64]
    args.layout = args.layout or ["fsdp"]
    if not args.model and not args.config:
        args.model = ["llama-3-8b"]
    return args


def models_of(args: argparse.Namespace) -> dict[str, list[Weight]]:
    configs = {name: MODELS[name] for name in args.model or ()}
    for path in args.config or ():
        configs[path.parent.name or path.stem] = read_config(path)
    return {name: weights_of(config) for name, config in configs.items()}


def layouts_of(args: argparse.Namespace, weights: Sequence[Weight], ranks: int) -> list[Layout]:
    """The layouts asked for; in a table of several models, experts only where there are some."""
    has_experts = any(weight.is_expert for weight in weights)
    layouts = [parse_layout(text, ranks) for text in dict.fromkeys(args.layout)]
    return [layout for layout in layouts if has_experts or layout.kind != "ep"]


def run(args: argparse.Namespace) -> None:
    kernel = load_kernel()
    console = Console(width=None if sys.stdout.isatty() else 160)
    timelines: dict[str, Timeline] = {}
    models = models_of(args)
    if args.markdown:
        print("\n".join(markdown_head()))
    for model, weights in models.items():
        for ranks in args.ranks:
            if args.rank is not None and not 0 <= args.rank < ranks:
                raise ValueError(f"there is no rank {args.rank} of {ranks}")
            reports = []
            for layout in layouts_of(args, weights, ranks):
                report = report_of(kernel, weights, layout, ranks, args)
                reports.append(report)
                parts = [layout.text, model if len(models) > 1 else ""]
                parts.append(f"{ranks} ranks" if len(args.ranks) > 1 else "")
                timelines[", ".join(filter(None, parts))] = report.timeline
                if args.markdown:
                    print(markdown_row(model, ranks, report), flush=True)
            if not args.markdown:
                show(console, kernel, model, weights, ranks, reports, args)
    if args.png:
        machine = machine_of(kernel, args)
        subtitle = (
            f"{machine.flops / 1e12:g} TFLOP/s a rank; {machine.host_bytes / 1e9:g} GB/s within a "
            f"host of {machine.ranks_per_host}, {machine.network_bytes / 1e9:g} GB/s between hosts"
        )
        title = f"A step of {', '.join(models)} on {', '.join(map(str, args.ranks))} ranks"
        draw(args.png, title, subtitle, timelines)
        print(f"timeline: {args.png}")


def show(
    console: Console,
    kernel: Any,
    model: str,
    weights: Sequence[Weight],
    ranks: int,
    reports: Sequence[Report],
    args: argparse.Namespace,
) -> None:
    total = sum(weight.numel for weight in weights)
    of_muon = sum(weight.numel for weight in weights if weight.muon)
    seconds = sum(report.seconds for report in reports)
    console.print(
        compare(
            f"{model} on {ranks} ranks: {total / 1e9:.4g} B parameters, {of_muon / 1e9:.4g} B "
            f"Muon's; planned in {seconds:.1f} s",
            reports,
        )
    )
    if args.owners:
        for report in reports:
            console.print(owners_table(kernel, report, args))


def main() -> None:
    args = parse_args()
    try:
        run(args)
    except ValueError as error:
        raise SystemExit(f"plan.py: {error}") from error


if __name__ == "__main__":
    main()
