"""Does Muon pay, and at which learning rate: small models trained with AdamW and with Muon.

    make bench BENCHMARKS=benchmarks/training.py    # an hour on one core, without the largest
    make bench BENCHMARKS=benchmarks/training.py ARGS="--models mlp cnn --widths"    # minutes

Both optimizers have the best of the same five learning rates, each twice the one before; where the
best is at an edge, rates beyond it are tried, too, and of Muon 2 and 4 times AdamW's best in any
case. One seed chooses the rates, several compare them. Weight decay, warm-up, decay and batches are
the same, and Muon's groups and options are those that `describe` advises. Then a transformer of
several widths is trained with each `adjust_lr`, while AdamW's parameters keep one learning rate, to
show how the best rate of the matrices moves with width.

Every run that ends is a line of --out, and a run that is found there is not repeated. Seconds are
steps times the median time of a step; the two optimizers' steps take turns, so that whatever else
the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from small_models import TASKS, Batch, Task, transformer
from timing import load_kernel, machine, pick_device, show, take_turns

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from history import COLOURS
from plots import GREY, drawing, save

Curve = list[tuple[int, float]]  # validation losses after so many steps
Sweep = dict[float, Curve]  # by learning rate

MOST_BEYOND = 3  # rates that are tried beyond an edge
ADJUST_LR = ("match_rms_adamw", "original", "spectral")
WIDTH_RATES = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
WIDTH_ADAMW_RATE = 3e-3
WEIGHT_DECAY = 0.1


# -- training --------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, name: str, lr: float, **options: Any) -> torch.optim.Optimizer:
    if name == "AdamW":
        betas = (0.9, 0.95)
        return torch.optim.AdamW(
            model.parameters(), lr, betas, weight_decay=WEIGHT_DECAY, fused=True
        )
    kernel = load_kernel()
    advised = kernel.describe(model, weight_decay=WEIGHT_DECAY, **options)
    # The advice has another rate where it finds one too large or small, and all are tried here.
    return kernel.Muon(advised.groups(), **{**advised.options(), "lr": lr})


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def to_device(batch: Batch) -> Batch:
    return batch[0].to(pick_device()), batch[1].to(pick_device())


def train(task: Task, steps: int, name: str, lr: float, seed: int, **options: Any) -> Curve:
    """Twenty validations of a run with linear warm-up over a tenth of it, then linear decay."""
    torch.manual_seed(seed)
    model = task.build().to(pick_device())
    optimizer = make_optimizer(model, name, lr, **options)
    warmup = max(1, steps // 10)
    decay = max(1, steps - warmup)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (steps - step) / decay))
    validation = [to_device(batch) for batch in task.validation()]
    curve = []
    for step in range(1, steps + 1):
        update(model, optimizer, to_device(task.draw(seed, step - 1)))
        schedule.step()
        if step % max(1, steps // 20) == 0 or step == steps:
            model.eval()
            with torch.no_grad():
                loss = fmean(loss_of(model, batch).item() for batch in validation)
            model.train()
            curve.append((step, loss if math.isfinite(loss) else math.inf))
    return curve


def time_steps(task: Task, rounds: int) -> dict[str, Any]:
    """Median seconds of a step of each optimizer."""
    batch, contenders = to_device(task.draw(0, 0)), {}
    for name in COLOURS:
        model = task.build().to(pick_device())
        contenders[name] = partial(update, model, make_optimizer(model, name, 1e-3), batch)
    seconds = take_turns(contenders, rounds)
    medians = {name: median(samples) for name, samples in seconds.items()}
    return {"seconds": medians, "machine": machine(pick_device())}


class Runs:
    """Runs by their settings: those of the file, and those that are still to do."""

    def __init__(self, path: Path, steps: int | None) -> None:
        self.path, self.steps = path, steps
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        self.done = {json.dumps(line["settings"]): line for line in lines}

    def train(self, model: str, task: Task, name: str, lr: float, seed: int, **more: Any) -> Curve:
        steps = self.steps or task.steps
        options = {"steps": steps, "name": name, "lr": float(f"{lr:.6g}"), "seed": seed, **more}
        settings = {"model": model, **options}
        return self.find_or_make(settings, lambda: {"losses": train(task, **options)})["losses"]

    def find_or_make(self, settings: dict[str, Any], make: Callable[[], dict]) -> dict[str, Any]:
        key = json.dumps(settings)
        if key not in self.done:
            self.done[key] = {"settings": settings, **make()}
            with self.path.open("a") as file:
                file.write(json.dumps(self.done[key]) + "\n")
            print(*settings.values(), *self.done[key].get("losses", [""])[-1], file=sys.stderr)
        return self.done[key]


# -- rates -----------------------------------------------------------------------------------------


def last(curve: Curve) -> float:
    return curve[-1][1]


def best_of(sweep: Sweep) -> float:
    return min(sweep, key=lambda rate: last(sweep[rate]))


def sweep_of(train_at: Callable[[float], Curve], rates: Iterable[float]) -> Sweep:
    """Curves in the order of rates, of which there are more where the best is at an edge."""
    sweep = {rate: train_at(rate) for rate in rates}
    for _ in range(MOST_BEYOND):
        best = best_of(sweep)
        if best not in (min(sweep), max(sweep)):
            break
        beyond = best / 2 if best == min(sweep) else best * 2
        sweep[beyond] = train_at(beyond)
    return dict(sorted(sweep.items()))


def between_rates(sweep: Sweep) -> float:
    """The lowest point of a parabola, in log2 of rates, through the best one and its neighbours."""
    best, rates = best_of(sweep), list(sweep)
    at = rates.index(best)
    if at in (0, len(rates) - 1):
        return best
    below, lowest, above = (last(sweep[rate]) for rate in rates[at - 1 : at + 2])
    curvature = below - 2 * lowest + above
    if not 0 < curvature < math.inf:  # three equal losses, or a neighbour diverges
        return best
    return best * 2 ** ((below - above) / (2 * curvature))


# -- what is compared ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    model: str
    sweeps: dict[str, Sweep]  # by optimizer, of the first seed
    finals: dict[str, list[Curve]]  # by optimizer, at its best rate, of every seed
    seconds: dict[str, float]  # median of a step, by optimizer
    machine: str

    @property
    def title(self) -> str:
        numel = sum(param.numel() for param in TASKS[self.model].build().parameters())
        return f"{self.model}, {numel / 1e6:.2g} M"

    def best(self, name: str) -> float:
        return best_of(self.sweeps[name])

    def mean_curve(self, name: str) -> Curve:
        points = zip(*self.finals[name])
        return [(at_step[0][0], fmean(loss for _, loss in at_step)) for at_step in points]

    def steps_to_adamw(self) -> float:
        """Muon's steps until AdamW's last loss, between two validations on a straight line."""
        goal, before = last(self.mean_curve("AdamW")), None
        for step, loss in self.mean_curve("Muon"):
            if loss <= goal:
                share = (before[1] - goal) / (before[1] - loss) if before else 1.0
                return step - (1 - share) * (step - (before[0] if before else 0))
            before = (step, loss)
        return math.inf


def compare(runs: Runs, model: str, seeds: int, rounds: int) -> Comparison:
    task, sweeps, finals = TASKS[model], {}, {}
    rates = {*task.rates}
    for name in COLOURS:  # AdamW first
        sweeps[name] = sweep_of(partial(runs.train, model, task, name, seed=0), rates)
        best = best_of(sweeps[name])
        finals[name] = [runs.train(model, task, name, best, seed) for seed in range(seeds)]
        rates |= {*sweeps[name], 2 * best, 4 * best}
    timing = runs.find_or_make({"model": model, "rounds": rounds}, lambda: time_steps(task, rounds))
    return Comparison(model, sweeps, finals, timing["seconds"], timing["machine"])


def compare_widths(runs: Runs, widths: Sequence[int]) -> dict[str, dict[int, Sweep]]:
    """Sweeps by `adjust_lr` and width."""

    def sweep_at(dim: int, adjust_lr: str) -> Sweep:
        model, task = f"width-{dim}", transformer(dim, 3 * dim, steps=100)
        options: dict[str, Any] = {"seed": 0, "adjust_lr": adjust_lr, "adamw_lr": WIDTH_ADAMW_RATE}
        return sweep_of(partial(runs.train, model, task, "Muon", **options), WIDTH_RATES)

    return {how: {dim: sweep_at(dim, how) for dim in widths} for how in ADJUST_LR}


# -- tables and the plot ---------------------------------------------------------------------------


def show_losses(comparisons: Sequence[Comparison], markdown: bool) -> None:
    columns = "model, parameters|AdamW's lr|loss|Muon's lr|loss|Muon's / AdamW's lr"
    columns += "|steps to AdamW's loss|AdamW's step, ms|Muon's|seconds to AdamW's loss"
    rows = []
    for c in comparisons:
        (steps, _), reached, seconds = c.finals["AdamW"][0][-1], c.steps_to_adamw(), c.seconds
        row = [c.title]
        for name in COLOURS:
            losses = [last(curve) for curve in c.finals[name]]
            spread = stdev(losses) if len(losses) > 1 else 0.0
            row += [f"{c.best(name):g}", f"{fmean(losses):.3f} ± {spread:.3f}"]
        row += [f"{c.best('Muon') / c.best('AdamW'):g} ×", f"{reached:.0f} of {steps}"]
        row += [f"{1e3 * seconds[name]:.1f}" for name in COLOURS]
        row += [f"{reached * seconds['Muon']:.1f} of {steps * seconds['AdamW']:.1f}"]
        rows.append(row)
    title = "Validation losses at the best rates"
    show(title, columns.split("|"), rows, markdown=markdown, width=170)


def show_rates(comparisons: Sequence[Comparison], markdown: bool) -> None:
    rates = sorted({rate for c in comparisons for s in c.sweeps.values() for rate in s})
    rows = []
    for c in comparisons:
        for name, sweep in c.sweeps.items():
            losses = [f"{last(sweep[rate]):.3f}" if rate in sweep else "" for rate in rates]
            rows.append([f"{c.model}, {name}", *losses])
    columns = ["learning rate", *(f"{rate:g}" for rate in rates)]
    show("Validation losses by learning rate, seed 0", columns, rows, markdown=markdown, width=170)


def show_widths(widths: dict[str, dict[int, Sweep]], markdown: bool) -> None:
    rows = []
    for adjust_lr, sweeps in widths.items():
        cells = [f"{between_rates(s):.2g} ({last(s[best_of(s)]):.3f})" for s in sweeps.values()]
        rows.append([adjust_lr, *cells])
    columns = ["adjust_lr", *(f"width {dim}" for dim in widths[ADJUST_LR[0]])]
    show("Best learning rate of the matrices (and its loss)", columns, rows, markdown=markdown)


def plot(path: Path, comparisons: Sequence[Comparison], widths: dict) -> None:
    """Losses by step; by learning rate; by learning rate at each width."""
    count = max(len(comparisons), len(ADJUST_LR) + 1)
    with drawing() as plt:
        figure, grid = plt.subplots(3, count, figsize=(2.4 * count, 7), squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        for c, by_step, by_rate in zip(comparisons, *grid[:2]):
            for name, colour in COLOURS.items():
                draw(by_step, c.mean_curve(name), name, colour)
                draw_sweep(by_rate, c.sweeps[name], name, colour)
            by_step.set_title(c.title, fontsize=11)
            by_step.set_xlabel("Step")
        for (adjust_lr, sweeps), axes in zip(widths.items(), grid[2]):
            for number, (dim, sweep) in enumerate(sweeps.items()):
                colour = plt.get_cmap("viridis")(number / len(sweeps))
                draw_sweep(axes, sweep, f"width {dim}", colour)
            axes.set_title(adjust_lr, fontsize=11)
        for axes in grid[:, 0]:
            axes.set_ylabel("Validation loss")
        legend = {"frameon": False, "fontsize": 9, "handlelength": 1}
        if comparisons:
            grid[0, 0].legend(**legend)
        if any(widths.values()):  # beside its last panel there is room
            beside = grid[2, 2].legend(**legend, loc="upper left", bbox_to_anchor=(1, 1))
            beside.set_in_layout(False)
        figure.tight_layout()
        save(figure, path)


def draw_sweep(axes: Any, sweep: Sweep, label: str, colour: Any) -> None:
    points = [(rate, last(curve)) for rate, curve in sweep.items()]
    draw(axes, points, label, colour, marker=".")
    axes.plot(best_of(sweep), last(sweep[best_of(sweep)]), color=colour, marker="o")
    axes.set(xscale="log", xlabel="Learning rate")
    axes.xaxis.set_minor_formatter("")


def draw(axes: Any, points: Sequence, label: str, colour: Any, marker: str = "") -> None:
    axes.set_visible(True)
    axes.plot(*zip(*points), color=colour, label=label, marker=marker)
    low, high = axes.dataLim.intervaly
    if high > 5 * low:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.tick_params(length=0, labelcolor=GREY, labelsize=9)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = [name for name in TASKS if name != "transformer-l"]
    parser.add_argument("--models", nargs="*", choices=list(TASKS), default=usual)
    parser.add_argument("--widths", nargs="*", type=int, default=[32, 64, 128, 256])
    parser.add_argument("--steps", type=int, help="of every run; default: each model's")
    parser.add_argument("--seeds", type=int, default=3, help="at the best rate")
    parser.add_argument("--rounds", type=int, default=100, help="steps that are timed")
    parser.add_argument("--out", type=Path, default=Path("runs/training.jsonl"))
    parser.add_argument("--plot", type=Path, default=Path("runs/training.png"))
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args(argv)
    runs = Runs(args.out, args.steps)
    comparisons = [compare(runs, model, args.seeds, args.rounds) for model in args.models]
    widths = compare_widths(runs, args.widths)
    if comparisons:
        show_losses(comparisons, args.markdown)
        show_rates(comparisons, args.markdown)
        print("\n".join({comparison.machine for comparison in comparisons}) + "\n")
    if args.widths:
        show_widths(widths, args.markdown)
    plot(args.plot, comparisons, widths)
    print(f"runs: {args.out}\nplot: {args.plot}")


if __name__ == "__main__":
    main()
