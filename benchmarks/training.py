"""Does Muon pay, and at which learning rate: small models trained with AdamW and with Muon.

    make bench BENCHMARKS=benchmarks/training.py    # hours on one core, without the largest
    make bench BENCHMARKS=benchmarks/training.py ARGS="--models mlp cnn --widths"    # minutes
    make bench BENCHMARKS=benchmarks/training.py \
        ARGS="--models transformer-s transformer-m --wires fp32 bf16 --ranks 2 --steps 600"

Both optimizers have one learning rate for the matrices that Muon trains and another for the rest:
the best pair of a grid, which begins with the same three by three rates for both, each twice the
one before, and grows beyond an edge that the best pair lies at. One seed chooses the pair, three
others compare. Weight decay, warm-up, decay and batches are the same, and the groups are those that
`describe` advises. Then a transformer of several widths is trained with each `adjust_lr`, while the
rest keeps one learning rate, to show how the best rate of the matrices moves with width.

With --wires, instead: does it matter in which format momentum and updates travel? The model lies on
--ranks ranks by FSDP2, and Muon trains it with each wire and each arithmetic of the iteration.

Every run that ends is a line of --out, and a run that is found there is not repeated. Seconds are
steps times the median time of a step; the two optimizers' steps take turns, so that whatever else
the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from small_models import TASKS, Batch, Task, transformer
from timing import load_kernel, machine, pick_device, show, take_turns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from ranks import run_ranks  # type: ignore[attr-defined]  # mypy takes examples/ranks.py

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from grid_search import Rates, best_of, grid_search
from history import HUES, reaches
from plots import HEAD, Theme, add_head, save

Curve = list[tuple[int, float]]  # validation losses after so many steps
Grid = dict[Rates, float]  # last losses, by the rates of the matrices and of the rest

ADJUST_LR = ("match_rms_adamw", "original", "spectral")
WIDTH_RATES = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
WIDTH_ADAMW_RATE = 3e-3
WEIGHT_DECAY = 0.1

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# -- training --------------------------------------------------------------------------------------


def make_optimizer(
    model: nn.Module, name: str, lr: float, adamw_lr: float, **options: Any
) -> torch.optim.Optimizer:
    """AdamW or Muon, with ``lr`` for the matrices of Muon and ``adamw_lr`` for the rest."""
    kernel = load_kernel()
    optim = kernel.Muon.for_model(model, lr, adamw_lr, WEIGHT_DECAY, **options)
    if name == "Muon":
        return optim
    groups = [
        {"params": group["params"], "lr": lr if group["use_muon"] else adamw_lr}
        for group in optim.param_groups
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)


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


def train(
    task: Task, steps: int, name: str, lr: float, adamw_lr: float, seed: int, **options: Any
) -> Curve:
    """Twenty validations of a run with linear warm-up over a tenth of it, then linear decay."""
    torch.manual_seed(seed)
    model = on_all_ranks(task.build().to(pick_device()))
    optimizer = make_optimizer(model, name, lr, adamw_lr, **options)
    warmup = max(1, steps // 10)
    decay = max(1, steps - warmup)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (steps - step) / decay))
    validation = [to_device(share_of(batch)) for batch in task.validation()]
    curve = []
    for step in range(1, steps + 1):
        update(model, optimizer, to_device(share_of(task.draw(seed, step - 1))))
        schedule.step()
        if step % max(1, steps // 20) == 0 or step == steps:
            model.eval()
            with torch.no_grad():
                losses = [loss_of(model, batch) for batch in validation]
            loss = mean_over_ranks(torch.stack(losses).mean())
            model.train()
            curve.append((step, loss if math.isfinite(loss) else math.inf))
    return curve


def on_all_ranks(model: nn.Module) -> nn.Module:
    """The model under FSDP2, if there are ranks."""
    if dist.is_initialized():
        fully_shard(model)
    return model


def share_of(batch: Batch) -> Batch:
    """The rows of a batch, which all ranks draw alike, that this rank trains on."""
    if not dist.is_initialized():
        return batch
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return batch[0][rank::ranks], batch[1][rank::ranks]


def mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def train_as_rank(model: str, ns_dtype: str, comm_dtype: str, **options: Any) -> Curve:
    options |= {"ns_dtype": DTYPES[ns_dtype], "comm_dtype": DTYPES[comm_dtype]}
    return train(TASKS[model], name="Muon", **options)


def time_steps(task: Task, rounds: int) -> dict[str, Any]:
    """Median seconds of a step of each optimizer."""
    batch, contenders = to_device(task.draw(0, 0)), {}
    for name in HUES:
        model = task.build().to(pick_device())
        contenders[name] = partial(update, model, make_optimizer(model, name, 1e-3, 1e-3), batch)
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

    def train(
        self, model: str, task: Task, name: str, rates: Rates, seed: int, **more: Any
    ) -> Curve:
        steps = self.steps or task.steps
        lr, adamw_lr = (float(f"{rate:.6g}") for rate in rates)
        options: dict[str, Any] = {"steps": steps, "name": name, "lr": lr, "adamw_lr": adamw_lr}
        options |= {"seed": seed, **more}
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


def mean_of(curves: Sequence[Curve]) -> Curve:
    return [(points[0][0], fmean(loss for _, loss in points)) for points in zip(*curves)]


def of_matrices(grid: Grid) -> dict[float, float]:
    """Losses by the rate of the matrices, in its order, where the rest has its best rate."""
    rest = best_of(grid)[1]
    return {lr: loss for (lr, adamw_lr), loss in sorted(grid.items()) if adamw_lr == rest}


def between_rates(grid: Grid) -> float:
    """The lowest point of a parabola, in log2 of the matrices' rates, through the best one and its
    neighbours."""
    losses = of_matrices(grid)
    best, rates = best_of(grid)[0], list(losses)
    at = rates.index(best)
    if at in (0, len(rates) - 1):
        return best
    below, lowest, above = (losses[rate] for rate in rates[at - 1 : at + 2])
    curvature = below - 2 * lowest + above
    if not 0 < curvature < math.inf:  # three equal losses, or a neighbour diverges
        return best
    return best * 2 ** ((below - above) / (2 * curvature))


# -- what is compared ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    model: str
    grids: dict[str, Grid]  # by optimizer, of seed 0
    finals: dict[str, list[Curve]]  # by optimizer, at its best rates, of the other seeds
    seconds: dict[str, float]  # median of a step, by optimizer
    machine: str

    @property
    def title(self) -> str:
        numel = sum(param.numel() for param in TASKS[self.model].build().parameters())
        return f"{self.model}, {numel / 1e6:.2g} M"

    def best(self, name: str) -> Rates:
        return best_of(self.grids[name])

    def mean_curve(self, name: str) -> Curve:
        return mean_of(self.finals[name])

    def steps_to_adamw(self) -> float:
        """Muon's steps until AdamW's last loss, between two validations on a straight line."""
        return reaches(self.mean_curve("Muon"), last(self.mean_curve("AdamW")))


def last_loss(train_at: Callable[[Rates, int], Curve], rates: Rates) -> float:
    """Last loss of seed 0, which chooses the rates."""
    return last(train_at(rates, 0))


def compare(runs: Runs, model: str, seeds: int, rounds: int) -> Comparison:
    task, grids, finals = TASKS[model], {}, {}

    for name in HUES:
        train_at = partial(runs.train, model, task, name)
        grids[name] = grid_search(partial(last_loss, train_at), task.rates, task.rest_rates)
        best = best_of(grids[name])
        finals[name] = [train_at(best, seed) for seed in range(1, seeds + 1)]
    timing = runs.find_or_make({"model": model, "rounds": rounds}, lambda: time_steps(task, rounds))
    return Comparison(model, grids, finals, timing["seconds"], timing["machine"])


def compare_widths(runs: Runs, widths: Sequence[int]) -> dict[str, dict[int, Grid]]:
    """Losses by `adjust_lr` and width."""

    def grid_at(dim: int, adjust_lr: str) -> Grid:
        model, task = f"width-{dim}", transformer(dim, 3 * dim, steps=100)
        train_at = partial(runs.train, model, task, "Muon", adjust_lr=adjust_lr)
        return grid_search(partial(last_loss, train_at), WIDTH_RATES, [WIDTH_ADAMW_RATE])

    return {how: {dim: grid_at(dim, how) for dim in widths} for how in ADJUST_LR}


Wires = dict[tuple[str, str, str], list[float]]  # last losses, by model, arithmetic and wire


def compare_wires(
    runs: Runs,
    models: Sequence[str],
    ranks: int,
    seeds: int,
    arithmetics: Sequence[str],
    wires: Sequence[str],
) -> Wires:
    """Muon's, in the middle of the rates that a model tries first; wires take turns."""
    load_kernel()  # which tells ranks where it is
    losses: Wires = {}
    for model, seed, arithmetic, wire in product(models, range(seeds), arithmetics, wires):
        task = TASKS[model]
        options: dict[str, Any] = {"steps": runs.steps or task.steps, "lr": task.rates[1]}
        options |= {"adamw_lr": task.rest_rates[1], "seed": seed}
        options |= {"ns_dtype": arithmetic, "comm_dtype": wire}

        def run(model: str = model, options: dict[str, Any] = options) -> dict[str, Any]:
            return {"losses": run_ranks(train_as_rank, ranks, model, timeout=7200, **options)[0]}

        made = runs.find_or_make({"model": model, "ranks": ranks, **options}, run)
        losses.setdefault((model, arithmetic, wire), []).append(last(made["losses"]))
    return losses


# -- tables and the plot ---------------------------------------------------------------------------


def show_losses(comparisons: Sequence[Comparison], markdown: bool) -> None:
    columns = "model, parameters|AdamW's lr, rest|loss|Muon's lr, rest|loss|Muon's / AdamW's lr"
    columns += "|steps to AdamW's loss|AdamW's step, ms|Muon's|seconds to AdamW's loss"
    rows = []
    for c in comparisons:
        (steps, _), reached, seconds = c.finals["AdamW"][0][-1], c.steps_to_adamw(), c.seconds
        row = [c.title]
        for name in HUES:
            losses = [last(curve) for curve in c.finals[name]]
            spread = stdev(losses) if len(losses) > 1 else 0.0
            rates = ", ".join(f"{rate:g}" for rate in c.best(name))
            row += [rates, f"{fmean(losses):.3f} ± {spread:.3f}"]
        row += [f"{c.best('Muon')[0] / c.best('AdamW')[0]:g} ×", f"{reached:.0f} of {steps}"]
        row += [f"{1e3 * seconds[name]:.1f}" for name in HUES]
        row += [f"{reached * seconds['Muon']:.1f} of {steps * seconds['AdamW']:.1f}"]
        rows.append(row)
    title = "Validation losses at the best rates, other seeds"
    show(title, columns.split("|"), rows, markdown=markdown, width=180)


def show_rates(comparisons: Sequence[Comparison], markdown: bool) -> None:
    grids = [(c.model, name, grid) for c in comparisons for name, grid in c.grids.items()]
    rates = sorted({lr for _, _, grid in grids for lr, _ in grid})
    rows = []
    for model, name, grid in grids:
        for rest in sorted({adamw_lr for _, adamw_lr in grid}):
            losses = [f"{grid[lr, rest]:.3f}" if (lr, rest) in grid else "" for lr in rates]
            rows.append([f"{model}, {name}", f"{rest:g}", *losses])
    columns = ["learning rate of matrices", "rest", *(f"{rate:g}" for rate in rates)]
    show("Validation losses by learning rates, seed 0", columns, rows, markdown=markdown, width=170)


def show_widths(widths: dict[str, dict[int, Grid]], markdown: bool) -> None:
    rows = []
    for adjust_lr, grids in widths.items():
        cells = [f"{between_rates(grid):.2g} ({min(grid.values()):.3f})" for grid in grids.values()]
        rows.append([adjust_lr, *cells])
    columns = ["adjust_lr", *(f"width {dim}" for dim in widths[ADJUST_LR[0]])]
    show("Best learning rate of the matrices (and its loss)", columns, rows, markdown=markdown)


def show_wires(losses: Wires, markdown: bool) -> None:
    rows = []
    for (model, arithmetic, wire), of_seeds in losses.items():
        first = next(iter(each for key, each in losses.items() if key[:2] == (model, arithmetic)))
        behind = [loss - other for loss, other in zip(of_seeds, first)]
        spread = stdev(behind) if len(behind) > 1 else 0.0
        by_seed = " ".join(f"{loss:.4f}" for loss in of_seeds)
        mean = f"{fmean(of_seeds):.4f}"
        rows.append(
            [model, arithmetic, wire, by_seed, mean, f"{fmean(behind):+.4f} ± {spread:.4f}"]
        )
    columns = ["model", "arithmetic", "wire", "by seed", "mean", "over the first wire"]
    show("Validation losses by wire", columns, rows, markdown=markdown, width=140)


def plot(path: Path, comparisons: Sequence[Comparison], widths: dict) -> str:
    """Losses by step; by learning rate; by learning rate at each width.

    Returns:
        The files, to print.
    """
    count = max(len(comparisons), len(ADJUST_LR) + 1)
    height = 7.5 + HEAD

    def figure_of(plt: Any, theme: Theme) -> Any:
        figure, grid = plt.subplots(3, count, figsize=(2.6 * count, height), squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        for c, by_step, by_rate in zip(comparisons, *grid[:2]):
            for name, hue in HUES.items():
                color = getattr(theme, hue)
                draw(by_step, c.mean_curve(name), name, color)
                draw_rates(by_rate, c.grids[name], name, color)
            by_step.set_title(c.title, fontsize=11)
            by_step.set_xlabel("Step")
        for (adjust_lr, grids), axes in zip(widths.items(), grid[2]):
            for number, (dim, losses) in enumerate(grids.items()):
                draw_rates(axes, losses, f"width {dim}", theme.hues[2 + number % 6])
            axes.set_title(adjust_lr, fontsize=11)
        for axes in grid[:, 0]:
            axes.set_ylabel("Validation loss")
        if any(widths.values()):  # beside its last panel there is room
            beside = grid[2, 2].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
            beside.set_in_layout(False)
        figure.tight_layout(rect=(0, 0, 1, 1 - HEAD / height))
        subtitle = "Validation losses by step, by learning rate, and by learning rate and width"
        legend = grid[0, 0] if comparisons else None
        add_head(figure, theme, finding(comparisons), subtitle, legend)
        return figure

    return save(path, figure_of)


def finding(comparisons: Sequence[Comparison]) -> str:
    """The plot's title."""
    if not comparisons:
        return "Muon's best learning rate by the model's width"
    shares = [c.steps_to_adamw() / c.finals["AdamW"][0][-1][0] for c in comparisons]
    reached = sorted(share for share in shares if share <= 1)
    if not reached:
        return "Muon does not reach AdamW's last loss"
    least, most = (f"{share:.0%}" for share in (reached[0], reached[-1]))
    many = f" on {len(reached)} of {len(shares)} models" if len(shares) > 1 else ""
    span = least if least == most else f"{least} to {most}"
    return f"Muon reaches AdamW's last loss in {span} of the steps{many}"


def draw_rates(axes: Any, grid: Grid, label: str, color: Any) -> None:
    draw(axes, [*of_matrices(grid).items()], label, color, marker=".")
    axes.plot(best_of(grid)[0], grid[best_of(grid)], color=color, marker="o")
    axes.set(xscale="log", xlabel="Matrices' learning rate")
    axes.xaxis.set_minor_formatter("")


def draw(axes: Any, points: Sequence, label: str, color: Any, marker: str = "") -> None:
    axes.set_visible(True)
    axes.plot(*zip(*points), color=color, label=label, marker=marker)
    low, high = axes.dataLim.intervaly
    if high > 5 * low:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y")
    axes.tick_params(labelsize=9)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = [name for name in TASKS if name != "transformer-l"]
    parser.add_argument("--models", nargs="*", choices=list(TASKS), default=usual)
    parser.add_argument("--widths", nargs="*", type=int, default=[32, 64, 128, 256])
    parser.add_argument("--steps", type=int, help="of every run; default: each model's")
    parser.add_argument("--seeds", type=int, default=3, help="at the best rates, beside seed 0")
    parser.add_argument("--rounds", type=int, default=100, help="steps that are timed")
    parser.add_argument(
        "--wires", nargs="+", choices=DTYPES, help="formats to compare, first first"
    )
    parser.add_argument("--arithmetics", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--ranks", type=int, default=2, help="with --wires")
    parser.add_argument("--out", type=Path, default=Path("runs/training.jsonl"))
    parser.add_argument("--plot", type=Path, default=Path("runs/training.png"))
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args(argv)
    runs = Runs(args.out, args.steps)
    if args.wires:
        wires = (args.ranks, args.seeds, args.arithmetics, args.wires)
        show_wires(compare_wires(runs, args.models, *wires), args.markdown)
        print(f"{machine('cpu')}, a thread for each rank\nruns: {args.out}")
        return
    comparisons = [compare(runs, model, args.seeds, args.rounds) for model in args.models]
    widths = compare_widths(runs, args.widths)
    if comparisons:
        show_losses(comparisons, args.markdown)
        show_rates(comparisons, args.markdown)
        print("\n".join({comparison.machine for comparison in comparisons}) + "\n")
    if args.widths:
        show_widths(widths, args.markdown)
    print(f"runs: {args.out}\nplot: {plot(args.plot, comparisons, widths)}")


if __name__ == "__main__":
    main()
