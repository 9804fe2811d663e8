"""Is the run really Muon: trains the example under an audit, and draws what it finds.

    python examples/audit.py --png runs/audit.png
    torchrun --standalone --nproc-per-node 2 examples/audit.py

The model is in bf16, twice: with weights rounded to the nearest, and with exact residuals. The
script prints both audits. Its picture shows the singular values of updates, how much a step changes
weights, relative to them, and the share of an update that rounding the weights loses.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from model import ModelConfig, Transformer
from plots import HEAD, Theme, add_head, save
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
        print(
            plot(options.png, {name: each.steps for name, each in reports.items()}, options.every)
        )


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


Step = dict[str, dict[str, Any]]  # what an audited step found, by name of the parameter


def plot(path: Path, runs: dict[str, list[Step]], every: int) -> str:
    """Three panels; a curve for each way to round, of medians over matrices.

    Returns:
        The files, to print.
    """
    lost = {name: median_ratio(steps[-1], "lost", "update") for name, steps in runs.items()}
    title = (
        f"Rounding weights to the nearest bf16 loses {lost['nearest']:.0%} of the last update, "
        f"exact rounding {lost['exact']:.0%}"
    )
    subtitle = (
        "Medians over matrices. Bands: the middle 80% of singular values, and all of them (pale)"
    )

    def draw(plt: Any, theme: Theme) -> Any:
        figure, panels = plt.subplots(1, 3, figsize=(12, 4.6))
        figure.subplots_adjust(left=0.04, right=0.985, bottom=0.12, top=1 - (HEAD + 0.25) / 4.6)
        figure.subplots_adjust(wspace=0.2)
        draw_singular_values(panels[0], theme, [*runs.values()], every)
        styles = ((theme.orange, 3.5), (theme.blue, 1.5))  # where curves coincide, both show
        for (rounding, steps), (color, width) in zip(runs.items(), styles):
            at = [every * step for step in range(len(steps))]
            style = {"color": color, "linewidth": width, "label": f'weight_rounding="{rounding}"'}
            for axes, one, other in zip(panels[1:], ("change", "lost"), ("weight", "update")):
                shares = [median_ratio(rows, one, other) for rows in steps]
                axes.plot(at, shares, clip_on=False, **style)
        titles = ("Singular values of updates", "Change of weights", "Update lost by rounding")
        for axes, name in zip(panels, titles):
            axes.set_title(name, fontsize=11, loc="left")
            axes.set(xlabel="Step", xlim=(0, None), ylim=(0, None))
            axes.grid(axis="y")
        panels[1].yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        panels[2].yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        add_head(figure, theme, title, subtitle, legend=panels[1])
        return figure

    return save(path, draw)


def draw_singular_values(axes: Any, theme: Theme, runs: list[list[Step]], every: int) -> None:
    """Bands over steps. A step measures few matrices, so a band covers the last round of all."""
    measured = [
        [(name, row["sigma"]) for rows in both for name, row in rows.items() if "sigma" in row]
        for both in zip(*runs)
    ]
    round_of_all = len({name for of_step in measured for name, _ in of_step})
    bands = []
    for stop in range(1, len(measured) + 1):
        latest = measured[max(0, stop - round_of_all) : stop]
        sigmas = [sigma for of_step in latest for _, sigma in of_step]
        low, tenth, middle, ninetieth, high = zip(*sigmas)
        bands.append((min(low), median(tenth), median(middle), median(ninetieth), max(high)))
    low, tenth, middle, ninetieth, high = zip(*bands)
    at = [every * step for step in range(len(bands))]
    axes.fill_between(at, low, high, color=theme.teal, alpha=0.15, lw=0)
    axes.fill_between(at, tenth, ninetieth, color=theme.teal, alpha=0.4, lw=0)
    axes.plot(at, middle, color=theme.teal, linewidth=2)


def median_ratio(rows: Step, one: str, other: str) -> float:
    return median(ratio(row[one], row[other]) for row in rows.values())


def ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


if __name__ == "__main__":
    main()
