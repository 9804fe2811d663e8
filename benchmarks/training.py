"""Does Muon pay, and at which learning rate: small models trained with AdamW and with Muon.

    make bench BENCHMARKS=benchmarks/training.py    # about an hour on one core, all models but one
    make bench BENCHMARKS=benchmarks/training.py ARGS="--models mlp cnn --widths"    # minutes

Transformers are the example's, on its bytes of Python sources. The MLP and the CNN tell apart ten
digits of seven segments, drawn anew for every batch: shifted, turned, scaled, and under noise.

AdamW has the best of five learning rates, and so has Muon, whose five are 1, 2, 4, 8 and 16 times
AdamW's best; where the best one is at an edge, the next rate beyond it is tried, too. One seed
chooses the rates, several compare them. Both optimizers have the same weight decay, betas, linear
warm-up, linear decay to 0 and batches, and Muon's groups and options are those that `describe`
advises. Then a transformer of several widths is trained with each `adjust_lr`, while AdamW's
parameters keep one learning rate, to show how the best rate of the matrices moves with width.

Every run that ends is a line of --out, and a run that is found there is not repeated. Seconds are
steps times the median time of a step; the two optimizers' steps take turns, so that whatever else
the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from timing import load_kernel, machine, pick_device, show, take_turns

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from data import load_corpus, train_batch, val_batches
from history import COLOURS
from model import ModelConfig, Transformer
from plots import GREY, drawing, save

Batch = tuple[Tensor, Tensor]  # inputs, and the class of each output
Run = dict[str, Any]  # a line of --out

MULTIPLES = (1, 2, 4, 8, 16)  # of AdamW's best rate, that Muon tries
ADJUST_LR = ("match_rms_adamw", "original", "spectral")
WIDTH_RATES = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
WIDTH_ADAMW_RATE = 3e-3
WEIGHT_DECAY = 0.1
VALIDATIONS = 20  # in a run
MOST_RATES = 8  # five, and those beyond the edges


# -- what is trained -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Batch]  # the batch of a seed and a step
    validation: Callable[[], list[Batch]]
    steps: int
    adamw_rates: tuple[float, ...]


class Bytes(nn.Module):
    """The example's transformer without its second output, and its batches of text."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        self.transformer = Transformer(ModelConfig(**config))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.transformer(tokens)[0]

    @staticmethod
    def draw(seed: int, step: int) -> Batch:
        return train_batch(load_corpus()[0], 24, 48, seed, step, rank=0, world_size=1)

    @staticmethod
    def validation() -> list[Batch]:
        return val_batches(load_corpus()[1], 24, 48, count=8, rank=0, world_size=1)


# Rows and columns of each segment in a picture of 16 × 16, and the segments of each digit.
SEGMENTS = {
    **{"a": (2, 4, 4, 12), "g": (7, 9, 4, 12), "d": (12, 14, 4, 12)},
    **{"f": (2, 9, 4, 6), "b": (2, 9, 10, 12), "e": (7, 14, 4, 6), "c": (7, 14, 10, 12)},
}
DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")


def draw_digits(seed: int, step: int, count: int = 128) -> Batch:
    """Pictures (count, 1, 16, 16) and their digits."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"digits/{seed}/{step}".encode()))
    templates = torch.zeros(10, 1, 16, 16)
    for digit, segments in enumerate(DIGITS):
        for top, bottom, left, right in map(SEGMENTS.__getitem__, segments):
            templates[digit, 0, top:bottom, left:right] = 1
    digits = torch.randint(10, (count,), generator=generator)
    angle, size, dx, dy = 2 * torch.rand(4, count, generator=generator) - 1
    angle, size, dx, dy = 0.4 * angle, 1.2 + 0.3 * size, 0.3 * dx, 0.3 * dy
    rows = (angle.cos(), -angle.sin(), dx, angle.sin(), angle.cos(), dy)
    theta = torch.stack(rows, dim=1).view(count, 2, 3) * size.view(-1, 1, 1)
    grid = F.affine_grid(theta, [count, 1, 16, 16], align_corners=False)
    pictures = F.grid_sample(templates[digits], grid, align_corners=False)
    return pictures + 0.3 * torch.randn(pictures.shape, generator=generator), digits


def mlp() -> nn.Module:
    layers = [part for _ in range(3) for part in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(256, 10))


def cnn() -> nn.Module:
    def block(channels: int, filters: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(filters), nn.ReLU()]

    blocks = [*block(1, 32, 1), *block(32, 64, 2), *block(64, 128, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def transformer(dim: int, hidden_dim: int, steps: int) -> Task:
    build = partial(Bytes, dim=dim, hidden_dim=hidden_dim, max_seq_len=48)
    rates = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    return Task(build, Bytes.draw, Bytes.validation, steps, rates)


def digits(build: Callable[[], nn.Module], steps: int) -> Task:
    def validation() -> list[Batch]:
        return [draw_digits(-1, number) for number in range(16)]

    return Task(build, draw_digits, validation, steps, adamw_rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))


TASKS = {
    "transformer-s": transformer(dim=128, hidden_dim=384, steps=200),
    "transformer-m": transformer(dim=256, hidden_dim=1024, steps=200),
    "transformer-l": transformer(dim=512, hidden_dim=2048, steps=200),
    "mlp": digits(mlp, steps=300),
    "mlp-long": digits(mlp, steps=3000),
    "cnn": digits(cnn, steps=300),
}


# -- training --------------------------------------------------------------------------------------


def make_optimizer(
    model: nn.Module, name: str, lr: float, adjust_lr: str, adamw_lr: float | None
) -> torch.optim.Optimizer:
    """``adamw_lr`` is that of the parameters that Muon leaves to AdamW; None is ``lr``."""
    if name == "AdamW":
        options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": WEIGHT_DECAY}
        return torch.optim.AdamW(model.parameters(), lr, fused=True, **options)
    kernel = load_kernel()
    advised = kernel.describe(
        model, lr=lr, adamw_lr=adamw_lr, adjust_lr=adjust_lr, weight_decay=WEIGHT_DECAY
    )
    return kernel.Muon(advised.groups(), **advised.options())


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def train(
    task: Task,
    steps: int,
    name: str,
    lr: float,
    seed: int,
    adjust_lr: str = ADJUST_LR[0],
    adamw_lr: float | None = None,
) -> list[tuple[int, float]]:
    """Validation losses of a run, each with the number of its step."""
    device = pick_device()

    def moved(batch: Batch) -> Batch:
        return batch[0].to(device), batch[1].to(device)

    torch.manual_seed(seed)
    model = task.build().to(device)
    optimizer = make_optimizer(model, name, lr, adjust_lr, adamw_lr)
    warmup = max(1, steps // 10)
    decay = max(1, steps - warmup)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (steps - step) / decay))
    validation = [moved(batch) for batch in task.validation()]
    every = max(1, steps // VALIDATIONS)
    losses = []
    for step in range(steps):
        update(model, optimizer, moved(task.draw(seed, step)))
        schedule.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            model.eval()
            with torch.no_grad():
                loss = fmean(loss_of(model, batch).item() for batch in validation)
            model.train()
            losses.append((step + 1, loss if math.isfinite(loss) else math.inf))
    return losses


class Runs:
    """Runs by their settings: those of the file, and those that are still to do."""

    def __init__(self, path: Path, steps: int | None) -> None:
        self.path, self.steps = path, steps
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.done = {json.dumps(run["settings"]): run for run in map(json.loads, lines)}

    def train(self, model: str, task: Task, name: str, lr: float, seed: int, **more: Any) -> Run:
        steps = self.steps or task.steps
        options = {"steps": steps, "name": name, "lr": float(f"{lr:.6g}"), "seed": seed, **more}

        def curve() -> Run:
            return {"losses": train(task, **options)}

        return self._find_or_make({"model": model, **options}, curve)

    def time(self, model: str, task: Task, rounds: int) -> Run:
        """Median seconds of a step of each optimizer."""
        return self._find_or_make({"model": model, "rounds": rounds}, partial(timed, task, rounds))

    def _find_or_make(self, settings: Run, make: Callable[[], Run]) -> Run:
        key = json.dumps(settings)
        if key not in self.done:
            self.done[key] = {"settings": settings, **make()}
            with self.path.open("a") as file:
                file.write(json.dumps(self.done[key]) + "\n")
            print(*settings.values(), *self.done[key].get("losses", [""])[-1], file=sys.stderr)
        return self.done[key]


def timed(task: Task, rounds: int) -> Run:
    device, contenders = pick_device(), {}
    batch = tuple(tensor.to(device) for tensor in task.draw(0, 0))
    for name in COLOURS:
        model = task.build().to(device)
        optimizer = make_optimizer(model, name, 1e-3, ADJUST_LR[0], None)
        contenders[name] = partial(update, model, optimizer, batch)
    seconds = take_turns(contenders, rounds)
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    return {"seconds": medians, "machine": machine(device)}


def last(run: Run) -> float:
    return run["losses"][-1][1]


def sweep(train_at: Callable[[float], Run], rates: Sequence[float]) -> dict[float, Run]:
    """Runs by rate, in the order of rates, with more of them as long as the best is at an edge."""
    runs = {rate: train_at(rate) for rate in rates}
    while len(runs) < MOST_RATES:
        best = best_of(runs)
        if best not in (min(runs), max(runs)):
            break
        beyond = best / 2 if best == min(runs) else best * 2
        runs[beyond] = train_at(beyond)
    return dict(sorted(runs.items()))


def best_of(runs: dict[float, Run]) -> float:
    return min(runs, key=lambda rate: last(runs[rate]))


def between_rates(runs: dict[float, Run]) -> float:
    """The lowest point of a parabola through the best rate and its neighbours, in log2."""
    best, rates = best_of(runs), list(runs)
    at = rates.index(best)
    if at in (0, len(rates) - 1):
        return best
    below, here, above = (last(runs[rate]) for rate in rates[at - 1 : at + 2])
    return best * 2 ** ((below - above) / (2 * (below - 2 * here + above)))


# -- what is compared ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    model: str
    numel: int
    sweeps: dict[str, dict[float, Run]]  # by optimizer and rate, of the first seed
    finals: dict[str, list[Run]]  # by optimizer, at its best rate, of every seed
    timing: Run

    def best(self, name: str) -> float:
        return best_of(self.sweeps[name])

    def mean_curve(self, name: str) -> list[tuple[int, float]]:
        curves = [run["losses"] for run in self.finals[name]]
        return [(points[0][0], fmean(loss for _, loss in points)) for points in zip(*curves)]

    def steps_to_adamw(self) -> float:
        """Muon's steps until AdamW's last loss, between two validations on a straight line."""
        goal, before = self.mean_curve("AdamW")[-1][1], (0, math.inf)
        for step, loss in self.mean_curve("Muon"):
            if loss <= goal:
                share = (before[1] - goal) / (before[1] - loss) if before[0] else 1.0
                return before[0] + share * (step - before[0])
            before = (step, loss)
        return math.inf


def compare(runs: Runs, model: str, seeds: int, rounds: int) -> Comparison:
    task, sweeps, finals = TASKS[model], {}, {}
    rates: Sequence[float] = task.adamw_rates
    for name in COLOURS:  # AdamW first
        sweeps[name] = sweep(lambda lr, name=name: runs.train(model, task, name, lr, 0), rates)
        best = best_of(sweeps[name])
        finals[name] = [runs.train(model, task, name, best, seed) for seed in range(seeds)]
        rates = [best * multiple for multiple in MULTIPLES]
    numel = sum(param.numel() for param in task.build().parameters())
    return Comparison(model, numel, sweeps, finals, runs.time(model, task, rounds))


Widths = dict[str, dict[int, dict[float, Run]]]  # runs by adjust_lr, width and rate


def compare_widths(runs: Runs, widths: Sequence[int]) -> Widths:
    def sweep_of(dim: int, adjust_lr: str) -> dict[float, Run]:
        task = transformer(dim, 3 * dim, steps=100)
        more = {"adjust_lr": adjust_lr, "adamw_lr": WIDTH_ADAMW_RATE}
        return sweep(
            lambda lr: runs.train(f"width-{dim}", task, "Muon", lr, 0, **more), WIDTH_RATES
        )

    return {how: {dim: sweep_of(dim, how) for dim in widths} for how in ADJUST_LR}


# -- tables and the plot ---------------------------------------------------------------------------


def report(comparisons: Sequence[Comparison], widths: Widths, markdown: bool) -> None:
    summaries, by_rate = [], []
    for c in comparisons:
        steps, seconds = c.mean_curve("AdamW")[-1][0], c.timing["seconds"]
        reached = c.steps_to_adamw()
        row = [c.model, f"{c.numel / 1e6:.2f} M", str(steps)]
        for name in COLOURS:
            losses = [last(run) for run in c.finals[name]]
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            row += [f"{c.best(name):g}", f"{fmean(losses):.3f} ± {spread:.3f}"]
        row += [f"{c.best('Muon') / c.best('AdamW'):g} ×", f"{reached:.0f}"]
        row += [f"{1e3 * seconds[name]:.0f}" for name in COLOURS]
        row += [f"{steps * seconds['AdamW']:.1f}", f"{reached * seconds['Muon']:.1f}"]
        summaries.append(row)
        muon = {round(lr / c.best("AdamW"), 3): last(run) for lr, run in c.sweeps["Muon"].items()}
        losses = [f"{muon[multiple]:.3f}" for multiple in MULTIPLES]
        by_rate.append([c.model, f"{last(c.finals['AdamW'][0]):.3f}", *losses])
    columns = [
        "model",
        "parameters",
        "steps",
        "AdamW lr",
        "loss",
        "Muon lr",
        "loss",
        "Muon / AdamW",
    ]
    columns += ["Muon's steps to AdamW's loss", "AdamW ms", "Muon ms"]
    columns += ["AdamW's seconds", "Muon's to that loss"]
    if summaries:
        show(
            "Validation losses at the best rates", columns, summaries, markdown=markdown, width=170
        )
        columns = ["model", "AdamW's best", *(f"{multiple} ×" for multiple in MULTIPLES)]
        show("Loss at multiples of AdamW's rate, seed 0", columns, by_rate, markdown=markdown)
        print("\n".join({comparison.timing["machine"] for comparison in comparisons}))
    if any(widths.values()):
        rows = [
            [
                how,
                *(
                    f"{between_rates(runs):.3g} ({last(runs[best_of(runs)]):.3f})"
                    for runs in by.values()
                ),
            ]
            for how, by in widths.items()
        ]
        columns = ["adjust_lr", *(f"width {dim}" for dim in widths[ADJUST_LR[0]])]
        show("Best rate of the matrices (loss)", columns, rows, markdown=markdown)


def plot(path: Path, comparisons: Sequence[Comparison], widths: Widths) -> None:
    """Losses by step, by learning rate, and by learning rate at each width."""
    count = max(len(comparisons), len(ADJUST_LR))
    with drawing() as plt:
        figure, grid = plt.subplots(3, count, figsize=(3.2 * count, 9), squeeze=False)
        for axes in grid.flat[:]:
            axes.set_visible(False)
        for c, top, middle in zip(comparisons, grid[0], grid[1]):
            for name, colour in COLOURS.items():
                draw(top, c.mean_curve(name), name, colour)
                points = [(lr, last(run)) for lr, run in c.sweeps[name].items()]
                draw(middle, points, name, colour, by_rate=True)
            top.set_title(f"{c.model}, {c.numel / 1e6:.2g} M", fontsize=11)
            top.set_xlabel("Step")
        for (how, by_width), axes in zip(widths.items(), grid[2]):
            for number, (dim, runs) in enumerate(by_width.items()):
                points = [(lr, last(run)) for lr, run in runs.items()]
                colour = plt.get_cmap("viridis")(number / max(1, len(by_width)))
                draw(axes, points, f"width {dim}", colour, by_rate=True)
            axes.set_title(how, fontsize=11)
        for axes in grid[:, 0]:
            axes.set_ylabel("Validation loss")
            axes.legend(frameon=False, fontsize=9)
        figure.tight_layout()
        save(figure, path)


def draw(
    axes: Any, points: Sequence[tuple], label: str, colour: Any, by_rate: bool = False
) -> None:
    """A curve; by learning rates with its lowest point, and nothing that is far above it."""
    axes.set_visible(True)
    lowest = min(points, key=lambda point: point[1])
    axes.plot(*zip(*points), color=colour, label=label, marker="." if by_rate else "")
    if by_rate:
        axes.plot(*lowest, color=colour, marker="o", markersize=7)
        axes.set_xscale("log", base=10)
        axes.set_xlabel("Learning rate")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.tick_params(length=0, labelcolor=GREY)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = [name for name in TASKS if name != "transformer-l"]
    parser.add_argument("--models", nargs="*", choices=list(TASKS), default=usual)
    parser.add_argument("--widths", nargs="*", type=int, default=[32, 64, 128, 256])
    parser.add_argument("--steps", type=int, help="of every run; default: each model's")
    parser.add_argument("--seeds", type=int, default=3, help="at the best rate")
    parser.add_argument("--rounds", type=int, default=30, help="steps that are timed")
    parser.add_argument("--out", type=Path, default=Path("runs/training.jsonl"))
    parser.add_argument("--plot", type=Path, default=Path("runs/training.png"))
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args(argv)
    runs = Runs(args.out, args.steps)
    comparisons = [compare(runs, model, args.seeds, args.rounds) for model in args.models]
    widths = compare_widths(runs, args.widths)
    report(comparisons, widths, args.markdown)
    plot(args.plot, comparisons, widths)
    print(f"runs: {args.out}\nplot: {args.plot}")


if __name__ == "__main__":
    main()
