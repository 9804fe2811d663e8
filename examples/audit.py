"""Is the run really Muon: trains the example under an audit, and draws what it found.

    python examples/audit.py --png runs/audit.png
    torchrun --standalone --nproc-per-node 2 examples/audit.py

The model is in bf16, twice: with weights rounded to the nearest, and with exact residuals. What is
found is printed. The picture has singular values of updates, how large updates are beside their
weights, layer by layer, and how much of them rounding the weights took away.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from model import ModelConfig, Transformer
from plots import GREY, drawing, save
from ranks import launch, pick_device, rank
from train import Batches, TrainConfig, load_kernel, lr_factor, shard

ROUNDINGS = ("nearest", "exact")


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=2, help="audited steps; default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-2, help="default: %(default)s")
    parser.add_argument("--png", type=Path, default=Path("runs/audit.png"))
    options = parser.parse_args()
    launch(lambda: audit_both(options))


def audit_both(options: argparse.Namespace) -> None:
    reports = {}
    for rounding in ROUNDINGS:
        reports[rounding] = train(rounding, options)
        if rank() == 0:
            print(f'weight_rounding="{rounding}"', reports[rounding], sep="\n", end="\n\n")
    if rank() == 0:
        plot(options.png, reports, options.every)
        print(options.png)


def train(rounding: str, options: argparse.Namespace) -> Any:
    config, device, kernel = TrainConfig(steps=options.steps), pick_device(), load_kernel()
    shared = {f.name for f in fields(ModelConfig)} & {f.name for f in fields(TrainConfig)}
    sizes = {name: getattr(config, name) for name in shared}
    torch.manual_seed(config.seed)
    model = Transformer(ModelConfig(max_seq_len=config.seq_len, **sizes)).to(device, torch.bfloat16)
    if dist.is_initialized():
        shard(model, config, device)
    optimizer = kernel.Muon.for_model(model, lr=options.lr, weight_rounding=rounding)
    batches, audit = Batches(config, device), optimizer.audit()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * lr_factor(step, config)
        audit.is_on = step % options.every == 0
        inputs, targets = batches.train(step)
        logits = model(inputs)[0]
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return audit.report()


def plot(path: Path, reports: dict[str, Any], every: int) -> None:
    """A column for each way to round, of which all have the same axes."""
    with drawing() as plt:
        size = (4.2 * len(reports), 7.5)
        figure, grid = plt.subplots(3, len(reports), figsize=size, sharex=True, sharey="row")
        for (rounding, report), column in zip(reports.items(), grid.T):
            column[0].set_title(f'weight_rounding="{rounding}"', fontsize=11)
            draw(column, report.steps, every, plt.get_cmap("viridis"))
            column[2].set_xlabel("Step")
        labels = ("Singular values\nof updates", "Change of weights,\nrelative", "Lost by rounding")
        for axes, label in zip(grid[:, 0], labels):
            axes.set_ylabel(label)
        grid[1, 0].legend(frameon=False, fontsize=9, handlelength=1)
        for axes in grid.flat:
            axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
            axes.tick_params(length=0, labelcolor=GREY, labelsize=9)
        figure.tight_layout()
        save(figure, path)


def draw(column: Any, steps: list[dict[str, dict[str, Any]]], every: int, colours: Any) -> None:
    layers = sorted({layer_of(name) for name in steps[0]})
    for number, layer in enumerate(layers):
        colour = colours(0.15 + 0.7 * number / max(1, len(layers) - 1))
        of_layer = [
            [row for name, row in rows.items() if layer_of(name) == layer] for rows in steps
        ]
        at = [every * step for step in range(len(steps))]
        for axes, one, other in ((column[1], "change", "weight"), (column[2], "lost", "update")):
            points = [median(ratio(row[one], row[other]) for row in rows) for rows in of_layer]
            axes.plot(at, points, color=colour, label=layer)
        for step, rows in zip(at, of_layer):
            for low, tenth, middle, most, high in (row["sigma"] for row in rows if "sigma" in row):
                column[0].plot([step, step], [low, high], color=colour, linewidth=0.5)
                column[0].plot([step, step], [tenth, most], color=colour, linewidth=2)
                column[0].plot(step, middle, ".", color="black", markersize=2)


def layer_of(name: str) -> str:
    found = re.search(r"\d+", name)
    return f"layer {found[0]}" if found else name


def ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


if __name__ == "__main__":
    main()
