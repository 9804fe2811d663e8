"""What a step does when: a trace of it by torch.profiler, and a picture of that.

    torchrun --standalone --nproc-per-node 2 examples/trace.py --png runs/trace/step.png

Every rank writes a trace that https://ui.perfetto.dev opens; the picture shows all of them on one
axis of time. The model is the example's GPT under FSDP2, its gradients are random.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from model import ModelConfig, Transformer
from plots import Theme, add_head, label_rows, save
from ranks import launch, pick_device, rank, world_size
from train import load_kernel, local

# The package's phases in a trace, and their rows in the picture. Between them lie the collectives.
PHASES = {
    "Muon.agree": "compare notes",
    "Muon.momentum": "momentum",
    "Muon.orthogonalize": "orthogonalize",
    "Muon.weights": "update weights",
    "Muon.adamw": "AdamW",
}
LAUNCH = "c10d::alltoall_base_"
TRANSFER = re.compile(r"gloo:all_to_all|nccl.*(SendRecv|AllToAll)", re.IGNORECASE)


@dataclass(frozen=True)
class Span:
    """What happens from ``start`` to ``stop``, in milliseconds since the step began.

    Args:
        row: a value of `PHASES`, ``"gather"`` or ``"scatter"``.
        chunk: whose; −1 for what belongs to none.
    """

    row: str
    chunk: int
    start: float
    stop: float


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=512, help="model width; default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--chunk-size", type=int, default=-1, help="of Muon; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/trace"), help="folder for traces")
    parser.add_argument("--png", type=Path, default=Path("runs/trace/step.png"))
    arguments = parser.parse_args()
    launch(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    if not dist.is_initialized():
        raise SystemExit("start it with torchrun: a step of one process has no traffic to show")
    device = pick_device()
    model = sharded_model(arguments.dim, arguments.layers, device)
    kernel = load_kernel()
    optimizer = kernel.Muon.for_model(model, lr=1e-3, chunk_size=arguments.chunk_size)
    events = traced(model, optimizer, device, arguments.out / f"rank{rank()}.json")
    spans: list[list[Span]] = [[] for _ in range(world_size())]
    dist.all_gather_object(spans, list(spans_of(events, device)))
    if rank() == 0:
        files = draw(spans, arguments.png, f"{device.type}, torch {torch.__version__}")
        print(f"{files}; traces in {arguments.out}, for https://ui.perfetto.dev")


def sharded_model(dim: int, layers: int, device: torch.device) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(dim=dim, layers=layers, heads=8, kv_heads=2, hidden_dim=3 * dim)
    model = Transformer(config).to(device)
    mesh = init_device_mesh(device.type, (world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def traced(model: Transformer, optimizer: Any, device: torch.device, path: Path) -> Any:
    """The profiler's events of the third step, of which it writes a trace."""
    activities = [ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    for _ in range(2):  # makes state, plan and groups
        set_gradients(model)
        optimizer.step()
    set_gradients(model)
    dist.barrier()
    with profile(activities=activities) as profiler:
        optimizer.step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return profiler.events()


def set_gradients(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
        local(parameter.grad).normal_()


def spans_of(events: Any, device: torch.device) -> Iterator[Span]:
    """Phases and transfers on the device, in milliseconds since the host began the step.

    The traffic of a rank ends in the order in which it is launched. It is launched right after a
    chunk's momentum, to the owners, or right after its orthogonalization, back from them.
    """
    events = sorted(events, key=lambda event: event.time_range.start)
    begin = next(e for e in events if e.name.startswith("Optimizer.step")).time_range.start
    here = [e for e in events if (e.device_type.name == "CPU") == (device.type == "cpu")]
    hosts = [e for e in events if e.device_type.name == "CPU"]

    def span(event: Any, row: str, chunk: int) -> Span:
        times = event.time_range
        return Span(row, chunk, (times.start - begin) / 1e3, (times.end - begin) / 1e3)

    ways: list[tuple[str, int]] = []
    last, counts = "", {"gather": 0, "scatter": 0}
    for event in hosts:
        if event.name in ("Muon.momentum", "Muon.orthogonalize"):
            last = "gather" if event.name == "Muon.momentum" else "scatter"
        elif event.name == LAUNCH:
            ways.append((last, counts[last]))
            counts[last] += 1
    agreed = next(e for e in hosts if e.name == "Muon.agree").time_range.end
    transfers = [e for e in here if TRANSFER.search(e.name) and e.time_range.start > agreed]
    for event, (way, chunk) in zip(transfers, ways):
        yield span(event, way, chunk)
    numbers = dict.fromkeys(PHASES, 0)
    for event in here + ([] if device.type == "cpu" else hosts):
        if event.name in PHASES and (event in here or event.name == "Muon.agree"):
            of_chunk = event.name not in ("Muon.agree", "Muon.adamw")
            yield span(event, PHASES[event.name], numbers[event.name] if of_chunk else -1)
            numbers[event.name] += 1


# -- the picture -----------------------------------------------------------------------------------

ROWS = (
    "compare notes",
    "momentum",
    "gather",
    "AdamW",
    "orthogonalize",
    "scatter",
    "update weights",
)


def draw(ranks: list[list[Span]], path: Path, machine: str) -> str:
    """A panel for each rank; a color for each chunk, whose number stands in its longest bars.

    Returns:
        The files, to print.
    """
    stop = max(span.stop for spans in ranks for span in spans)
    height = 2.3 * len(ranks) + 1.3
    subtitle = f"FSDP2 on {len(ranks)} ranks, a color for each chunk of matrices; {machine}"

    def figure_of(plt: Any, theme: Theme) -> Any:
        figure, panels = plt.subplots(
            len(ranks), 1, figsize=(11, height), sharex=True, squeeze=False
        )
        figure.subplots_adjust(
            left=0.13, right=0.97, bottom=0.55 / height, top=1 - 1.15 / height, hspace=0.3
        )
        for number, (axes, spans) in enumerate(zip(panels[:, 0], ranks)):
            draw_rank(axes, theme, spans, stop)
            axes.set_title(f"rank {number}", loc="left", fontsize=11)
        panels[-1, 0].set_xlabel("Milliseconds since the step began")
        panels[-1, 0].set_xlim(0, stop)
        add_head(figure, theme, finding(ranks, stop), subtitle)
        return figure

    return save(path, figure_of)


def finding(ranks: list[list[Span]], stop: float) -> str:
    """The picture's title: how much of the step ranks compute, and how much traffic that hides."""
    computing = moving = hidden = 0.0
    for spans in ranks:
        work = [span for span in spans if span.row == "orthogonalize"]
        computing += sum(span.stop - span.start for span in work)
        for span in spans:
            if span.row in ("gather", "scatter"):
                moving += span.stop - span.start
                hidden += sum(
                    max(0.0, min(span.stop, each.stop) - max(span.start, each.start))
                    for each in work
                )
    title = f"Ranks orthogonalize for {computing / len(ranks) / stop:.0%} of the step"
    return f"{title}, which hides {hidden / moving:.0%} of the transfer time" if moving else title


def draw_rank(axes: Any, theme: Theme, spans: list[Span], stop: float) -> None:
    for span in spans:
        color = theme.hues[span.chunk % len(theme.hues)] if span.chunk >= 0 else theme.muted
        # Transfers of neighbors may overlap: they share a row by halves.
        is_transfer = span.row in ("gather", "scatter")
        row = ROWS.index(span.row) - 0.4 + (0.4 * (span.chunk % 2) if is_transfer else 0)
        axes.broken_barh(
            [(span.start, span.stop - span.start)],
            (row, 0.4 if is_transfer else 0.8),
            color=color,
            linewidth=0.5,  # never too thin to be seen
        )
        if span.row == "orthogonalize" and span.stop - span.start > 0.015 * stop:
            middle = (span.start + span.stop) / 2
            axes.text(
                middle, row + 0.42, span.chunk, color=theme.background, ha="center", va="center"
            )
    label_rows(axes, ROWS)


if __name__ == "__main__":
    main()
