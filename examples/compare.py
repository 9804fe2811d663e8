"""Muon against AdamW at the same number of steps; what `make train` runs.

    torchrun --standalone --nproc-per-node 2 examples/compare.py

Both optimizers have one learning rate for the matrices that Muon trains and another for the rest.
Seed 0 chooses each optimizer's pair from the same grid; other seeds compare. ``--rates`` skips the
search. All runs share one launch, because starting the processes takes nearly as long as a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from grid_search import Rates, best_of, grid_search, is_at_edge
from history import HUES, History, mean_curve, plot, reaches
from ranks import launch, rank, world_size
from train import TrainConfig, option, parse_config, train

MATRICES = (4e-3, 8e-3, 1.6e-2)
REST = (1.6e-2, 3.2e-2, 6.4e-2)


@dataclass(frozen=True)
class CompareConfig:
    steps: int = option(200, "updates of every run")
    seeds: int = option(3, "seeds of the comparison, beside the one that chooses the rates")
    eval_every: int = option(20, "updates between validations")
    experts: int = option(0, "experts per layer; 0 is a dense model")
    rates: str = option(
        "", "AdamW's pair, then Muon's, to use without a search: 0.008,0.064,0.016,0.064"
    )
    out: str = option("runs", "folder for compare-light.png, compare-dark.png and the logs")
    quick: bool = option(
        False, "20 steps, one pair of rates and one seed, only to see that everything runs"
    )


def main() -> None:
    config = parse_config(CompareConfig, __doc__.splitlines()[0])
    if config.quick:
        config = replace(config, steps=20, seeds=1, eval_every=10)
    matrices, rest = ([8e-3], [2e-2]) if config.quick else (MATRICES, REST)
    warm_up_process(config)

    runs = Runs(config)
    grids: dict[str, dict[Rates, float]] = {}
    best = rates_of(config)
    if not best:
        for name in HUES:
            grids[name] = grid_search(partial(runs.loss_at, name), matrices, rest)
            best[name] = best_of(grids[name])
    finals: dict[str, list[History]] = {name: [] for name in HUES}
    for seed in range(1, config.seeds + 1):
        for name in HUES:  # in turns: a busy moment of the machine slows both
            finals[name].append(runs.train(name, best[name], seed))
    if rank() == 0:
        for name, grid in grids.items():
            show_grid(name, grid)
        report(config, best, finals)


def rates_of(config: CompareConfig) -> dict[str, Rates]:
    """What ``--rates`` gives each optimizer; nothing without it."""
    if not config.rates:
        return {}
    try:
        adamw, adamw_rest, muon, muon_rest = map(float, config.rates.split(","))
    except ValueError as error:
        raise SystemExit(f"--rates {config.rates!r} must be four numbers with commas") from error
    return {"AdamW": (adamw, adamw_rest), "Muon": (muon, muon_rest)}


class Runs:
    """Starts the runs and numbers them."""

    def __init__(self, config: CompareConfig) -> None:
        self.config = config
        self.started = 0

    def loss_at(self, optimizer: str, rates: Rates) -> float:
        return self.train(optimizer, rates, seed=0).final_val_loss

    def train(self, optimizer: str, rates: Rates, seed: int) -> History:
        self.started += 1
        lr, adamw_lr = rates
        label = f"[{self.started}] {optimizer:<5} lr {lr:g}, rest {adamw_lr:g}, seed {seed}"
        name = f"{optimizer.lower()}-lr{lr:g}-rest{adamw_lr:g}-seed{seed}"
        run = replace(
            train_config(self.config),
            optimizer=optimizer.lower(),
            lr=lr,
            adamw_lr=adamw_lr,
            seed=seed,
            out=str(Path(self.config.out, "compare", name)),
        )
        return train(run, label)


def train_config(config: CompareConfig) -> TrainConfig:
    return TrainConfig(
        steps=config.steps, eval_every=config.eval_every, experts=config.experts, out=""
    )


def warm_up_process(config: CompareConfig) -> None:
    """What only a process's first steps pay for (lazy imports, threads) is on nobody's clock."""
    for optimizer in ("adamw", "muon"):
        train(replace(train_config(config), optimizer=optimizer, stop_after=2), quiet=True)


def report(config: CompareConfig, best: dict[str, Rates], finals: dict[str, list[History]]) -> None:
    out = Path(config.out)
    gaps = [a.final_val_loss - m.final_val_loss for a, m in zip(*finals.values())]
    files = plot(
        out / "compare.png",
        finding(finals),
        f"Validation loss, mean of {config.seeds} seeds; bands from lowest to highest",
        {f"{name} (lr {best[name][0]:g}, rest {best[name][1]:g})": finals[name] for name in finals},
    )
    print(f"\nValidation loss (nats per byte) after {config.steps} steps, ranks: {world_size()}\n")
    by_seed = f"{'other seeds':<{8 * len(gaps)}}"
    print(f"{'':<6} {'lr, rest':>13}   {'mean ± std':<15} {by_seed} {'seconds':>8} {'tokens/s':>9}")
    for name, histories in finals.items():
        rates = ", ".join(f"{rate:g}" for rate in best[name])
        print(f"{name:<6} {rates:>13}   {summary_line(histories)}")
    print(f"\nMuon's loss is {difference(fmean(gaps))} AdamW's; least by any seed: {min(gaps):.3f}")
    print(f"plot: {files}\nlogs: {out / 'compare'}/*/log.csv")


def finding(finals: dict[str, list[History]]) -> str:
    """The plot's title."""
    adamw, muon = (mean_curve(finals[name], "step") for name in ("AdamW", "Muon"))
    steps, goal = adamw[-1]
    if (reached := reaches(muon, goal)) < steps:
        return f"Muon reaches AdamW's last loss in {reached / steps:.0%} of the steps"
    return f"After {steps:g} steps Muon's loss is {difference(goal - muon[-1][1])} AdamW's"


def show_grid(name: str, grid: dict[Rates, float]) -> None:
    matrices, rest = (sorted({*rates}) for rates in zip(*grid))
    print(f"\n{name}, seed 0: loss by learning rate of matrices (across) and of the rest (down)\n")
    print(f"{'':<8}" + "".join(f"{lr:>8g}" for lr in matrices))
    for adamw_lr in rest:
        losses = "".join(f"{grid[lr, adamw_lr]:>8.3f}" for lr in matrices)
        print(f"{adamw_lr:<8g}{losses}")
    if is_at_edge(grid):
        print(f"The best pair is at an edge: {name} may do better beyond it.")


def difference(gap: float) -> str:
    return f"{abs(gap):.2f} nats per byte {'below' if gap >= 0 else 'above'}"


def summary_line(histories: list[History]) -> str:
    losses = [history.final_val_loss for history in histories]
    spread = stdev(losses) if len(losses) > 1 else 0.0
    seconds = fmean(history.last.seconds for history in histories)
    speed = fmean(history.tokens_per_second for history in histories)
    by_seed = " ".join(f"{loss:<7.3f}" for loss in losses)
    return f"{fmean(losses):.3f} ± {spread:<7.3f} {by_seed} {seconds:>8.1f} {speed:>9,.0f}"


if __name__ == "__main__":
    launch(main)
