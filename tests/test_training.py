"""The example as a person runs it: torchrun, FSDP2, checkpoints, and Muon ahead of AdamW."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import EXAMPLES
from ranks import run_ranks

TINY = ["--steps", "8", "--eval-every", "2", "--warmup", "2", "--eval-batches", "2"]

pytestmark = pytest.mark.slow


def run(*arguments: object, ranks: int = 2, script: str = "train.py") -> str:
    """Starts an example, once more where torchrun itself aborts, as it does once in thirty."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", EXAMPLES / script, *map(str, arguments)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(*arguments: object, ranks: int = 2) -> None:
    """The same without torchrun, on ranks that need not import torch anew."""
    run_ranks(train_on_this_rank, ranks, list(map(str, arguments)), timeout=300)


def train_on_this_rank(arguments: list[str]) -> None:
    sys.path.insert(0, str(EXAMPLES))
    tests_own = sys.modules.pop("ranks")  # the example has a module of this name, too
    import train

    sys.modules["ranks"] = tests_own
    sys.argv = ["train.py", *arguments]
    train.main()


def losses(folder: Path) -> list[tuple[str, str, str]]:
    """Step, training and validation loss of every row, as written: all digits of the floats."""
    with (folder / "log.csv").open(newline="") as file:
        return [(row["step"], row["train_loss"], row["val_loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ([], 2),
        (["--experts", 2, "--tp", 2], 2),
        (["--zero2", "--experts", 2, "--offload"], 2),
    ],
    ids=str,
)
def test_resuming_continues_bit_exactly(tmp_path, layout, ranks):
    common = [*TINY, "--optimizer", "muon", "--lr", "1e-2", *layout]
    run_here(*common, "--out", tmp_path / "whole", ranks=ranks)
    checkpoints = ["--checkpoint-dir", tmp_path / "checkpoints", "--save-every", "4"]
    cut = [*common, "--out", tmp_path / "cut", *checkpoints]
    run_here(*cut, "--stop-after", "5", ranks=ranks)
    for late in (tmp_path / "checkpoints").glob("step-000005"):
        late.rename(tmp_path / "unused")  # as if the run had died between two checkpoints
    (run_here if layout else run)(*cut, "--resume", ranks=ranks)
    whole = losses(tmp_path / "whole")
    assert len(whole) == 8
    assert losses(tmp_path / "cut") == whole


def test_tensor_parallelism_trains_as_plain_sharding_does(tmp_path):
    # The experts' balance is averaged over batches: compared is as many as with --tp 2 on 4 ranks.
    common = [*TINY, "--experts", 2]
    run_here(*common, "--out", tmp_path / "plain", ranks=2)
    run_here(*common, "--out", tmp_path / "tp", "--tp", 2, ranks=4)
    rounding = 1e-3  # Muon's arithmetic and wire are bf16
    for plain, tp in zip(losses(tmp_path / "plain"), losses(tmp_path / "tp"), strict=True):
        expected = [float(x or 0) for x in plain]
        assert [float(x or 0) for x in tp] == pytest.approx(expected, rel=rounding)


def test_a_run_writes_its_log_and_its_plot(tmp_path):
    printed = run(*TINY, "--optimizer", "adamw", "--out", tmp_path)
    assert "validation loss" in printed
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_muon_reaches_a_loss_well_below_that_of_adamw(tmp_path):
    # One seed, and the best rates of both, which `make train` finds; it compares three seeds.
    final = {}
    for name, lr, rest in (("adamw", 8e-3, 6.4e-2), ("muon", 1.6e-2, 3.2e-2)):
        run("--optimizer", name, "--lr", lr, "--adamw-lr", rest, "--out", tmp_path / name)
        final[name] = float(losses(tmp_path / name)[-1][2])
    assert final["muon"] < final["adamw"] - 0.1


@pytest.mark.parametrize(
    ("ranks", "layouts"), [(2, [["--ddp"], ["--zero2"]]), (4, [["--hsdp", 2]])], ids=str
)
def test_replicas_train_as_plain_sharding_does(tmp_path, ranks, layouts):
    unclipped = ["--grad-clip", "1e9"]
    run_here(*TINY, *unclipped, "--out", tmp_path / "plain", ranks=ranks)
    for layout in layouts:
        clip = [] if layout == ["--zero2"] else unclipped
        run_here(*TINY, *clip, *layout, "--out", tmp_path / layout[0], ranks=ranks)
        rows = zip(losses(tmp_path / "plain"), losses(tmp_path / layout[0]), strict=True)
        for plain, replicas in rows:
            expected = [float(x or 0) for x in plain]
            assert [float(x or 0) for x in replicas] == pytest.approx(expected, abs=1e-3)


# The threshold is below the logits of the first weights, and steps are small beside those.
CLIPPED = [*TINY, "--qk-clip", "0.05", "--lr", "3e-4"]


def check_clipped(folder: Path) -> None:
    assert len(losses(folder)) == 8
    assert max(logits(folder)) <= 1.05 * 0.05 < max(logits(folder / "unclipped"))
    assert (folder / "logits.png").stat().st_size > 10_000


def test_one_plain_process_trains_without_torchrun_and_qk_clip_bounds_its_logits(tmp_path):
    command = [sys.executable, EXAMPLES / "train.py", *CLIPPED, "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    check_clipped(tmp_path)


def test_qk_clip_bounds_logits_over_ranks(tmp_path):
    run_here(*CLIPPED, "--out", tmp_path)
    check_clipped(tmp_path)


def logits(folder: Path) -> list[float]:
    with (folder / "log.csv").open(newline="") as file:
        return [float(row["max_logit"]) for row in csv.DictReader(file)]


def test_a_trace_has_the_phases_of_every_rank_and_makes_a_plot(tmp_path):
    where = ["--out", tmp_path, "--png", tmp_path / "step.png"]
    run("--dim", 64, "--layers", 1, *where, script="trace.py")
    phases = {f"Muon.{name}" for name in ("agree", "momentum", "orthogonalize", "weights", "adamw")}
    for rank in range(2):
        trace = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert phases <= {event.get("name") for event in trace["traceEvents"]}
    assert (tmp_path / "step.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, ["--layout", "fsdp"]),
        (2, ["--layout", "ddp"]),
        (3, ["--layout", "zero2"]),
        (4, ["--layout", "fsdp:2+tp:2"]),
        (4, ["--layout", "hsdp:2x2"]),
        (4, ["--layout", "ep:2", "--experts", "4"]),
    ],
    ids=lambda value: "" if isinstance(value, int) else value[1],
)
def test_selfcheck_finds_nothing_in_the_examples_layouts(ranks, arguments):
    for printed in run_ranks(selfcheck_on_this_rank, ranks, arguments, timeout=300):
        assert printed.startswith("no finding\n3 steps on") or not printed


def selfcheck_on_this_rank(arguments: list[str]) -> str:
    sys.path.insert(0, str(EXAMPLES))
    tests_own = sys.modules.pop("ranks")
    import selfcheck

    sys.modules["ranks"] = tests_own
    sys.argv = ["selfcheck.py", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        selfcheck.main()
    return printed.getvalue()
