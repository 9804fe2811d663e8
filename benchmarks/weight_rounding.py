"""What rounding weights to bf16 costs a training, and what `weight_rounding` gives back.

    make bench BENCHMARKS=benchmarks/weight_rounding.py ARGS="--plot docs/weight-rounding.png"

A small transformer in bf16 is trained on the example's bytes. "fp32" updates fp32 weights, of which
the model has a copy in bf16. Batches, initialization and gradients' dtype are the same for all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from small_models import TASKS, Task
from timing import load_kernel, machine, pick_device, show
from training import Curve, draw, drawing, last, loss_of, save, to_device

COLOURS = {"nearest": "#dc2626", "stochastic": "#d97706", "exact": "#2563eb", "fp32": "#111827"}


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
        for rounding in COLOURS:
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
        plot(options.plot, options.lrs, curves)


def plot(path: Path, lrs: Sequence[float], curves: dict[tuple[float, str], list[Curve]]) -> None:
    """The mean of the seeds in the second half of the steps, a panel for each learning rate."""
    with drawing() as plt:
        figure, panels = plt.subplots(1, len(lrs), figsize=(4.2 * len(lrs), 3.4), squeeze=False)
        for lr, axes in zip(lrs, panels[0]):
            for rounding, colour in COLOURS.items():
                runs = curves[lr, rounding]
                points: Any = [
                    (step, fmean(values))
                    for step, *values in zip([s for s, _ in runs[0]], *map(_losses, runs))
                ]
                draw(axes, points[len(points) // 2 :], rounding, colour)
            axes.set(title=f"lr {lr:g}", xlabel="Step")
        panels[0, 0].set_ylabel("Validation loss")
        panels[0, 0].legend(frameon=False, fontsize=9, handlelength=1)
        figure.tight_layout()
        save(figure, path)


def _losses(curve: Curve) -> list[float]:
    return [loss for _, loss in curve]


if __name__ == "__main__":
    main()
