"""Muon against AdamW at the same number of steps; what `make train` runs.

    torchrun --standalone --nproc-per-node 2 examples/compare.py

AdamW gets the best of three learning rates by seed 0, Muon a single one; then both run with every
seed. All runs share one launch, because starting the processes takes nearly as long as a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from history import History, plot
from ranks import launch, rank, world_size
from train import TrainConfig, option, parse_config, train

ADAMW_LRS = (1e-3, 2e-3, 4e-3)


@dataclass(frozen=True)
class CompareConfig:
    steps: int = option(200, "updates of every run")
    seeds: int = option(3, "seeds of the final comparison")
    muon_lr: float = option(1e-2, "Muon's peak learning rate")
    eval_every: int = option(20, "updates between validations")
    experts: int = option(0, "experts per layer; 0 is a dense model")
    out: str = option("runs", "folder for compare.png and the logs")
    quick: bool = option(False, "20 steps and one seed, only to see that everything runs")


def main() -> None:
    config = parse_config(CompareConfig, __doc__.splitlines()[0])
    if config.quick:
        config = replace(config, steps=20, seeds=1, eval_every=10)
    warm_up_process(config)

    runs = Runs(config)
    sweep = {lr: runs.train("adamw", lr, seed=0) for lr in ADAMW_LRS}
    best_lr = min(sweep, key=lambda lr: sweep[lr].final_val_loss)
    seeds = range(1, config.seeds)
    adamw = [sweep[best_lr], *(runs.train("adamw", best_lr, seed) for seed in seeds)]
    muon = [runs.train("muon", config.muon_lr, seed) for seed in range(config.seeds)]
    if rank() == 0:
        report(config, sweep, best_lr, adamw, muon)


class Runs:
    """Starts the runs and numbers them."""

    def __init__(self, config: CompareConfig) -> None:
        self.config = config
        self.total = len(ADAMW_LRS) + (config.seeds - 1) + config.seeds
        self.started = 0

    def train(self, optimizer: str, lr: float, seed: int) -> History:
        self.started += 1
        label = f"[{self.started}/{self.total}] {optimizer:<5} lr {lr:<5g} seed {seed}"
        name = f"{optimizer}-lr{lr:g}-seed{seed}"
        run = replace(
            train_config(self.config),
            optimizer=optimizer,
            lr=lr,
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


def report(
    config: CompareConfig,
    sweep: dict[float, History],
    best_lr: float,
    adamw: list[History],
    muon: list[History],
) -> None:
    out = Path(config.out)
    gaps = [a.final_val_loss - m.final_val_loss for a, m in zip(adamw, muon)]
    plot(
        out / "compare.png",
        f"After {config.steps} steps Muon's loss is {difference(fmean(gaps))} AdamW's",
        f"Validation loss, mean of {config.seeds} seeds; bands from lowest to highest",
        {f"AdamW (lr {best_lr:g})": adamw, f"Muon (lr {config.muon_lr:g})": muon},
    )
    print(f"\nValidation loss (nats per byte) after {config.steps} steps, ranks: {world_size()}\n")
    by_seed = f"{'by seed':<{8 * len(muon)}}"
    print(f"{'':<6} {'lr':>6}   {'mean ± std':<15} {by_seed} {'seconds':>8} {'tokens/s':>9}")
    for name, lr, histories in (("AdamW", best_lr, adamw), ("Muon", config.muon_lr, muon)):
        print(f"{name:<6} {lr:>6g}   {summary_line(histories)}")
    others = ", ".join(f"{h.final_val_loss:.3f} at {lr:g}" for lr, h in sweep.items())
    print(f"\nAdamW's learning rates, seed 0: {others}")
    if best_lr in (min(sweep), max(sweep)):
        print("The best of them is at an edge: AdamW may do better beyond it.")

    print(f"Muon's loss is {difference(fmean(gaps))} AdamW's; least by any seed: {min(gaps):.3f}")
    print(f"plot: {out / 'compare.png'}\nlogs: {out / 'compare'}/*/log.csv")


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
