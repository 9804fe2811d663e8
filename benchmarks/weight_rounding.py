"""What rounding weights to bf16 costs a training, and what `weight_rounding` gives back.

    make bench BENCHMARKS=benchmarks/weight_rounding.py ARGS="--plot docs/weight-rounding.png"

A small transformer in bf16 is trained on the example's bytes. "fp32" updates fp32 weights, of which
the model has a copy in bf16. Batches, initialization and gradients' dtype are the same for all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from small_models import TASKS, Task
from timing import load_kernel, machine, pick_device, show
from training import Curve, last, loss_of, mean_of, to_device

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from plots import HEAD, Theme, add_head, save

ROUNDINGS = ("fp32", "nearest", "stochastic", "exact")
HUES = {"nearest": "orange", "stochastic": "teal", "exact": "blue"}


def train(task: Task, rounding: str, lr: float, steps: int, seed: int) -> Curve:
    """Validation losses of a run with linear warm-up over a tenth of it, then linear decay."""
    kernel = load_kernel()
    torch.manual_seed(seed)
    model = task.build().to(pick_device(), torch.bfloat16)
    weights = dict(model.named_parameters())
    trained = weights
    if rounding == "fp32":
        trained = {name: nn.Parameter(param.detach().float()) for name, param in weights.items()}
    groups = kernel.get_default_muon_param_groups(model)
    for group in groups:
        group["params"] = [trained[name] for name in group["names"]]
    how = {} if rounding == "fp32" else {"weight_rounding": rounding}
    optimizer = kernel.Muon(groups, lr=lr, **how)
    warmup = max(1, steps // 10)
    schedule = LambdaLR(optimizer, lambda n: min((n + 1) / warmup, (steps - n) / (steps - warmup)))
    validation = [to_device(batch) for batch in task.validation()]
    curve = []
    for step in range(1, steps + 1):
        loss_of(model, to_device(task.draw(seed, step - 1))).backward()
        for name, param in trained.items() if trained is not weights else ():
            grad, weights[name].grad = weights[name].grad, None
            param.grad = None if grad is None else grad.float()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            for name, param in trained.items() if trained is not weights else ():
                weights[name].copy_(param)
            if step % max(1, steps // 20) == 0 or step == steps:
                losses = (loss_of(model, batch).item() for batch in validation)
                curve.append((step, fmean(losses)))
    return curve


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    transformers = [name for name in TASKS if name.startswith("transformer")]
    parser.add_argument("--model", default="transformer-s", choices=transformers)
    parser.add_argument("--lrs", nargs="*", type=float, default=[1e-2, 1e-3])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(argv)
    task, rows = TASKS[options.model], []
    curves: dict[tuple[float, str], list[Curve]] = {}
    for lr in options.lrs:
        for rounding in ROUNDINGS:
            runs = [train(task, rounding, lr, options.steps, seed) for seed in range(options.seeds)]
            curves[lr, rounding] = runs
            losses = [last(curve) for curve in runs]
            spread = stdev(losses) if len(losses) > 1 else 0.0
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            rows.append([f"{lr:g}", rounding, f"{fmean(losses):.4f} ± {spread:.4f}", each])
    title = f"Validation losses of {options.model} in bf16 after {options.steps} steps"
    columns = ["learning rate", "weight_rounding", "mean ± std of the seeds", "each seed"]
    show(title, columns, rows, markdown=options.markdown, left=2)
    print(machine(pick_device()))
    if options.plot:
        print(f"plot: {plot(options.plot, options.lrs, curves)}")


def plot(path: Path, lrs: Sequence[float], curves: dict[tuple[float, str], list[Curve]]) -> str:
    """What each rounding costs beside fp32 weights, a panel for each learning rate.

    Returns:
        The files, to print.
    """
    costs = {key: cost(runs, curves[key[0], "fp32"]) for key, runs in curves.items()}
    lr = max(lrs, key=lambda lr: last(costs[lr, "nearest"]))
    title = (
        f"Rounding weights to the nearest bf16 costs {last(costs[lr, 'nearest']):.3f} nats "
        f"at lr {lr:g}, exact rounding {last(costs[lr, 'exact']):.3f}"
    )
    seeds = len(curves[lr, "nearest"])
    whose = "one seed" if seeds == 1 else f"mean of {seeds} seeds"
    subtitle = f"Validation loss above that with fp32 weights, {whose}"

    def draw(plt: Any, theme: Theme) -> Any:
        size = (max(11, 4.5 * len(lrs)), 4.8)
        figure, panels = plt.subplots(1, len(lrs), figsize=size, sharey=True, squeeze=False)
        figure.subplots_adjust(left=0.08, right=0.985, bottom=0.12, wspace=0.08)
        figure.subplots_adjust(top=1 - (HEAD + 0.25) / size[1])
        for lr, axes in zip(lrs, panels[0]):
            axes.axhline(0, color=theme.text, linewidth=1.2, linestyle=(0, (4, 3)), label="fp32")
            for rounding, hue in HUES.items():
                color = getattr(theme, hue)
                axes.plot(*zip(*costs[lr, rounding]), color=color, linewidth=2, label=rounding)
            axes.set_title(f"lr {lr:g}", fontsize=11, loc="left")
            axes.set(xlabel="Step", xlim=(0, None))
            axes.grid(axis="y")
        panels[0, 0].set_ylabel("Loss above fp32's (nats)")
        add_head(figure, theme, title, subtitle, legend=panels[0, 0])
        return figure

    return save(path, draw)


def cost(runs: Sequence[Curve], baseline: Sequence[Curve]) -> Curve:
    """Mean loss of runs above that of others, by step."""
    pairs = zip(mean_of(runs), mean_of(baseline))
    return [(step, loss - other) for (step, loss), (_, other) in pairs]


if __name__ == "__main__":
    main()
