r"""What an optimizer step will cost on thousands of ranks, before they are rented.

    python examples/plan.py --model llama-3-8b --ranks 64 --layout fsdp --layout hsdp:8x8 \
        --png runs/plan.png

One process, no process group, no device: it reads a model's shapes, makes the plans that ranks
would make, and adds up what they say.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from planner import deployment
from planner.architectures import MODELS, Weight, read_config, weights_of
from planner.averaging import averages_of
from planner.costs import costs_of
from planner.deployment import Layout, entries_of, parse_layout
from planner.machine import DEFAULT_MACHINE, MACHINES, Machine
from planner.memory import averaged_in_backward, elements_of_all, elements_of_muon
from planner.report import LEGEND, Report, compare, markdown_head, markdown_row, owners_table
from planner.timeline import Timeline, draw, simulate

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def report_of(
    kernel: Any, weights: Sequence[Weight], layout: Layout, ranks: int, args: argparse.Namespace
) -> Report:
    """Plans, counts and simulates one layout."""
    began = time.perf_counter()
    dtype = DTYPES[args.dtype]
    machine = machine_of(args)
    entries = entries_of(kernel, weights, layout, dtype, args.device_type, DTYPES[args.wire])
    costs = costs_of(
        kernel,
        entries,
        ranks,
        machine.ranks_per_host,
        chunk_size=args.chunk_size,
        warmup_step=args.warmup_step,
    )
    if layout.kind == "zero2" and costs.lanes:  # one rank averages nothing
        (lane,) = costs.lanes
        averages = averages_of(kernel, entries, weights, lane.first_used, lane.in_flight, ranks)
        costs = replace(costs, averages=averages)
    scheduler = importlib.import_module(f"{kernel.__name__}.async_utils")
    return Report(
        layout=layout,
        entries=entries,
        local=elements_of_muon(kernel, entries, ranks),
        held=elements_of_all(kernel, entries, weights, layout, ranks),
        backward=averaged_in_backward(kernel, weights, layout),
        itemsize=dtype.itemsize,
        costs=costs,
        timeline=simulate(scheduler, costs, machine, args.rank),
        machine=machine,
        seconds=time.perf_counter() - began,
    )


def machine_of(args: argparse.Namespace) -> Machine:
    """The figures for this type of device, but for those given."""
    given = {
        "flops": args.tflops and args.tflops * 1e12,
        "host_bytes": args.host_gb_s and args.host_gb_s * 1e9,
        "network_bytes": args.network_gb_s and args.network_gb_s * 1e9,
        "latency": None if args.latency_us is None else args.latency_us / 1e6,
        "ranks_per_host": args.ranks_per_host,
    }
    machine = MACHINES.get(args.device_type, DEFAULT_MACHINE)
    return replace(machine, **{key: value for key, value in given.items() if value is not None})


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
    add("--assume-gated", action="store_true", help="take a config of any model_type for a decoder")
    add("--ranks", action="append", type=int, help="may be repeated; default: 64")
    add("--layout", action="append", help="may be repeated, see below; default: fsdp")
    add("--rank", type=int, help="whose timeline and owners; default: the one with the most FLOPs")
    add("--dtype", choices=DTYPES, default="bf16", help="of the weights")
    add("--wire", choices=("bf16", "fp32"), default="bf16", help="comm_dtype")
    add(
        "--device-type",
        choices=("cpu", "cuda", "xpu"),
        default="cuda",
        help="sets sizes of chunks and the machine's figures",
    )
    add("--chunk-size", type=int, default=-1)
    add("--warmup-step", type=int, default=5)
    add("--tflops", type=float, help="that a rank reaches in orthogonalization")
    add("--host-gb-s", type=float, help="that a rank sends within its host")
    add("--network-gb-s", type=float, help="that a rank sends to other hosts")
    add("--latency-us", type=float, help="of a collective")
    add("--ranks-per-host", type=int)
    add("--owners", action="store_true", help="also print who owns what")
    add("--markdown", action="store_true", help="print one table of everything, in markdown")
    add("--results", type=Path, help="write that table to a file, under the command")
    add("--png", type=Path, help="draw the timelines")
    args = parser.parse_args(argv)
    args.ranks = list(dict.fromkeys(args.ranks or [64]))
    args.layout = list(dict.fromkeys(args.layout or ["fsdp"]))
    if not args.model and not args.config:
        args.model = ["llama-3-8b"]
    return args


def check(args: argparse.Namespace) -> None:
    """What can be refused before anything is planned.

    Raises:
        ValueError: says what is wrong.
    """
    if min(args.ranks) < 1:
        raise ValueError("--ranks must be at least 1")
    if args.rank is not None and not 0 <= args.rank < min(args.ranks):
        raise ValueError(f"there is no rank {args.rank} of {min(args.ranks)}")
    if args.chunk_size != -1 and args.chunk_size < 1:
        raise ValueError("--chunk-size must be -1 or at least 1")
    if args.warmup_step < 0:
        raise ValueError("--warmup-step must be at least 0")
    for option, path in (("--results", args.results), ("--png", args.png)):
        if path is not None:
            folder = path.resolve().parent
            missing = folder if folder.exists() else folder.parent
            if not missing.is_dir():
                raise ValueError(f"{option} {path}: there is no folder {missing}")


def models_of(args: argparse.Namespace) -> dict[str, list[Weight]]:
    """The weights of each model, by its name or that of its folder."""
    models = {name: weights_of(MODELS[name]) for name in args.model or ()}
    for path in args.config or ():
        resolved = path.resolve()
        name = resolved.name if path.is_dir() else resolved.parent.name
        name = str(path) if not name or name in models else name
        models[name] = weights_of(read_config(path), args.assume_gated)
    return models


def tables_of(
    args: argparse.Namespace, models: Mapping[str, Sequence[Weight]]
) -> dict[tuple[str, int], list[Layout]]:
    """What is planned, by model and ranks: experts only where there are some.

    Raises:
        SystemExit: nothing is left.
    """
    layouts = {n: [parse_layout(text, n) for text in args.layout] for n in args.ranks}
    tables: dict[tuple[str, int], list[Layout]] = {}
    left_out: dict[str, None] = {}
    for model, weights in models.items():
        has_experts = any(weight.is_expert for weight in weights)
        for ranks, of_ranks in layouts.items():
            chosen = [layout for layout in of_ranks if has_experts or layout.kind != "ep"]
            if chosen:
                tables[model, ranks] = chosen
            for layout in of_ranks:
                if layout not in chosen:
                    left_out[f"{model} has no routed experts: {layout.text} is left out"] = None
    for line in left_out:
        print(line, file=sys.stderr)
    if not tables:
        raise SystemExit(1)
    return tables


def run(args: argparse.Namespace) -> None:
    check(args)
    models = models_of(args)
    tables = tables_of(args, models)
    from train import load_kernel  # once nothing is wrong: it takes a second

    kernel = load_kernel()
    console = Console(width=None if sys.stdout.isatty() else 160)
    timelines: dict[str, Timeline] = {}
    rows = markdown_head()
    if args.markdown:
        print("\n".join(rows))
    for (model, ranks), layouts in tables.items():
        reports = []
        for layout in layouts:
            if sys.stderr.isatty():
                print(f"planning {model}, {layout.text}, {ranks:,} ranks ...", file=sys.stderr)
            report = report_of(kernel, models[model], layout, ranks, args)
            reports.append(report)
            parts = [layout.text, model if len(models) > 1 else ""]
            parts.append(f"{ranks} ranks" if len(args.ranks) > 1 else "")
            timelines[", ".join(filter(None, parts))] = report.timeline
            rows.append(markdown_row(model, ranks, report))
            if args.markdown:
                print(rows[-1], flush=True)
        if not args.markdown:
            show(console, kernel, title_of(model, models[model], ranks, reports), reports, args)
    if not args.markdown:
        print(LEGEND)
    if args.results:
        write_results(args.results, rows)
    if args.png:
        picture(machine_of(args), tables, timelines, args.png)


def title_of(model: str, weights: Sequence[Weight], ranks: int, reports: Sequence[Report]) -> str:
    total = sum(weight.numel for weight in weights)
    of_muon = sum(weight.numel for weight in weights if weight.muon)
    seconds = sum(report.seconds for report in reports)
    took = f"; planned in {seconds:,.0f} s" if seconds > 1 else ""
    return (
        f"{model} on {ranks:,} ranks: {total / 1e9:,.4g} B parameters, {of_muon / 1e9:,.4g} B "
        f"Muon's{took}"
    )


def show(
    console: Console,
    kernel: Any,
    title: str,
    reports: Sequence[Report],
    args: argparse.Namespace,
) -> None:
    """Titles have lines of their own, which tables of few columns would wrap."""
    console.print(title, style="bold", soft_wrap=True, highlight=False, markup=False)
    console.print(compare(reports))
    for report in reports if args.owners else ():
        shared = (
            f"{report.layout.text}: owners of what rank {report.timeline.rank} shares with others"
        )
        console.print(shared, style="bold", soft_wrap=True, highlight=False, markup=False)
        console.print(owners_table(kernel, report, args.chunk_size, args.warmup_step))


def write_results(path: Path, rows: Sequence[str]) -> None:
    command = shlex.join(["python", "examples/plan.py", *sys.argv[1:]])
    head = (
        "# What steps will cost",
        f"```sh\n{command}\n```",
        "`examples/planner/README.md` explains the columns.",
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n\n".join([*head, "\n".join(rows)]) + "\n", encoding="utf-8")
    print(f"table: {path}")


def picture(
    machine: Machine,
    tables: Mapping[tuple[str, int], Any],
    timelines: dict[str, Timeline],
    path: Path,
) -> None:
    subtitle = (
        f"{machine.flops / 1e12:g} TFLOP/s a rank; {machine.host_bytes / 1e9:g} GB/s within a "
        f"host of {machine.ranks_per_host}, {machine.network_bytes / 1e9:g} GB/s between hosts"
    )
    models = ", ".join(dict.fromkeys(model for model, _ in tables))
    ranks = ", ".join(f"{number:,}" for number in dict.fromkeys(number for _, number in tables))
    files = draw(path, f"A step of {models} on {ranks} ranks", subtitle, timelines)
    print(f"timeline: {files}")


def main() -> None:
    args = parse_args()
    try:
        run(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"plan.py: {error}") from error


if __name__ == "__main__":
    main()
