"""The example as a person runs it: torchrun, FSDP2, checkpoints, and Muon ahead of AdamW."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = ["--steps", "8", "--eval-every", "2", "--warmup", "2", "--eval-batches", "2"]

pytestmark = pytest.mark.slow


def run(*arguments: object, ranks: int = 2) -> str:
    """Starts ``train.py``, once more where torchrun itself aborts, as it does once in thirty."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", EXAMPLES / "train.py", *map(str, arguments)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path) -> list[tuple[str, str, str]]:
    """Step, training and validation loss of every row, as written: all digits of the floats."""
    with (folder / "log.csv").open(newline="") as file:
        return [(row["step"], row["train_loss"], row["val_loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("experts", "tp"), [(0, 1), (2, 1), (2, 2)])
def test_resuming_continues_bit_exactly(tmp_path, experts, tp):
    common = [*TINY, "--optimizer", "muon", "--lr", "1e-2", "--experts", experts, "--tp", tp]
    run(*common, "--out", tmp_path / "whole", ranks=2 * tp)
    checkpoints = ["--checkpoint-dir", tmp_path / "checkpoints", "--save-every", "4"]
    cut = [*common, "--out", tmp_path / "cut", *checkpoints]
    run(*cut, "--stop-after", "5", ranks=2 * tp)
    for late in (tmp_path / "checkpoints").glob("step-000005"):
        late.rename(tmp_path / "unused")  # as if the run had died between two checkpoints
    run(*cut, "--resume", ranks=2 * tp)
    whole = losses(tmp_path / "whole")
    assert len(whole) == 8
    assert losses(tmp_path / "cut") == whole


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_tensor_parallelism_trains_as_plain_sharding_does(tmp_path, optimizer):
    for tp in (1, 2):
        run(*TINY, "--optimizer", optimizer, "--tp", tp, "--out", tmp_path / f"tp{tp}", ranks=4)
    for whole, divided in zip(losses(tmp_path / "tp1"), losses(tmp_path / "tp2"), strict=True):
        assert [float(x or 0) for x in divided] == pytest.approx(
            [float(x or 0) for x in whole], rel=1e-3
        )


def test_a_run_writes_its_log_and_its_plot(tmp_path):
    printed = run(*TINY, "--optimizer", "adamw", "--out", tmp_path)
    assert "validation loss" in printed
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_one_plain_process_trains_without_torchrun(tmp_path):
    command = [sys.executable, EXAMPLES / "train.py", *TINY, "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert len(losses(tmp_path)) == 8


def test_muon_reaches_a_loss_well_below_that_of_adamw(tmp_path):
    # One seed and AdamW's best learning rate; `make train` shows three of each.
    final = {}
    for name, lr in (("adamw", "2e-3"), ("muon", "1e-2")):
        run("--optimizer", name, "--lr", lr, "--out", tmp_path / name)
        final[name] = float(losses(tmp_path / name)[-1][2])
    assert final["muon"] < final["adamw"] - 0.3
