"""The examples as a person runs them: torchrun, FSDP2, checkpoints, and Muon ahead of AdamW."""

from __future__ import annotations

import contextlib
import csv
import importlib
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


def run(script: str, *arguments: object, ranks: int = 2) -> str:
    """Starts an example, once more where torchrun itself aborts, as it does once in thirty."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", EXAMPLES / script, *map(str, arguments)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(script: str, *arguments: object, ranks: int = 2) -> list[str]:
    """The same without torchrun, on ranks that need not import torch again."""
    return run_ranks(on_this_rank, ranks, script, list(map(str, arguments)), timeout=300)


def on_this_rank(script: str, arguments: list[str]) -> str:
    sys.path.insert(0, str(EXAMPLES))
    tests_own = sys.modules.pop("ranks")  # the examples have a module of this name, too
    example = importlib.import_module(script.removesuffix(".py"))
    sys.modules["ranks"] = tests_own
    sys.argv = [script, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.main()
    return printed.getvalue()


def log(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(folder: Path) -> list[list[float]]:
    """Step, training and validation loss of every row, all digits of the floats."""
    keys = ("step", "train_loss", "val_loss")
    return [[float(row[key] or 0) for key in keys] for row in log(folder)]


def are_drawn(picture: Path) -> bool:
    themes = [picture.with_stem(f"{picture.stem}-{theme}") for theme in ("light", "dark")]
    return all(file.stat().st_size > 10_000 for file in themes)


@pytest.mark.parametrize(
    "layout", [[], ["--experts", 2, "--tp", 2], ["--zero2", "--experts", 2, "--offload"]], ids=str
)
def test_resuming_continues_bit_exactly(tmp_path, layout):
    common = ["train.py", *TINY, "--optimizer", "muon", "--lr", "1e-2", *layout]
    run_here(*common, "--out", tmp_path / "whole")
    checkpoints = ["--checkpoint-dir", tmp_path / "checkpoints", "--save-every", "4"]
    cut = [*common, "--out", tmp_path / "cut", *checkpoints]
    run_here(*cut, "--stop-after", "5")
    for late in (tmp_path / "checkpoints").glob("step-000005"):
        late.rename(tmp_path / "unused")  # as if the run had died between two checkpoints
    (run_here if layout else run)(*cut, "--resume")
    assert len(losses(tmp_path / "whole")) == 8
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("ranks", "layout", "plain_ranks", "plain"),
    [
        (2, "--ddp --grad-clip 1e9", 2, "--grad-clip 1e9"),
        (2, "--zero2", 2, "--grad-clip 1e9"),
        (4, "--hsdp 2 --grad-clip 1e9", 4, "--grad-clip 1e9"),
        # The experts' balance is averaged over batches, of which there are two here, too.
        (4, "--experts 2 --tp 2", 2, "--experts 2"),
    ],
)
def test_layouts_train_as_plain_sharding_does(tmp_path, ranks, layout, plain_ranks, plain):
    run_here("train.py", *TINY, *plain.split(), "--out", tmp_path / "plain", ranks=plain_ranks)
    run_here("train.py", *TINY, *layout.split(), "--out", tmp_path / "layout", ranks=ranks)
    for row, expected in zip(losses(tmp_path / "layout"), losses(tmp_path / "plain"), strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-3)  # bf16 arithmetic and wire


def test_muon_reaches_a_loss_well_below_that_of_adamw(tmp_path):
    # One seed, and the best rates of both, which `make train` finds; it compares three seeds.
    final = {}
    for name, lr, rest in (("adamw", 8e-3, 6.4e-2), ("muon", 1.6e-2, 3.2e-2)):
        out = tmp_path / name
        printed = run("train.py", "--optimizer", name, "--lr", lr, "--adamw-lr", rest, "--out", out)
        assert "validation loss" in printed and are_drawn(out / "loss.png")
        final[name] = losses(out)[-1][2]
    assert final["muon"] < final["adamw"] - 0.1


def test_a_comparison_at_given_rates_searches_none_and_is_drawn(tmp_path):
    rates = ["--rates", "0.008,0.064,0.016,0.032"]
    printed = run_here("compare.py", "--quick", *rates, "--out", tmp_path)[0]
    assert "0.008, 0.064" in printed and "0.016, 0.032" in printed
    assert len([*tmp_path.glob("compare/*/log.csv")]) == 2
    assert are_drawn(tmp_path / "compare.png")


@pytest.mark.parametrize("is_alone", [True, False], ids=["one plain process", "ranks"])
def test_qk_clip_bounds_logits(tmp_path, is_alone):
    # The threshold is below the logits of the first weights, and steps are small beside those.
    arguments = [*TINY, "--qk-clip", "0.05", "--lr", "3e-4", "--out", str(tmp_path)]
    if is_alone:
        command = [sys.executable, EXAMPLES / "train.py", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    else:
        run_here("train.py", *arguments)
    clipped, unclipped = (
        max(float(row["max_logit"]) for row in log(folder))
        for folder in (tmp_path, tmp_path / "unclipped")
    )
    assert len(log(tmp_path)) == 8 and clipped <= 1.05 * 0.05 < unclipped
    assert are_drawn(tmp_path / "logits.png")


def test_a_trace_has_the_phases_of_every_rank_and_makes_a_plot(tmp_path):
    where = ["--out", tmp_path, "--png", tmp_path / "step.png"]
    run("trace.py", "--dim", 64, "--layers", 1, *where)
    phases = {f"Muon.{name}" for name in ("agree", "momentum", "orthogonalize", "weights", "adamw")}
    for rank in range(2):
        trace = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert phases <= {event.get("name") for event in trace["traceEvents"]}
    assert are_drawn(tmp_path / "step.png")


CHECKED = {"fsdp": 2, "ddp": 2, "zero2": 3, "fsdp:2+tp:2": 4, "hsdp:2x2": 4, "ep:2": 4}


@pytest.mark.parametrize("layout", CHECKED)
def test_selfcheck_finds_nothing_in_the_examples_layouts(layout):
    experts = ["--experts", "4"] if layout.startswith("ep") else []
    printed = run_here("selfcheck.py", "--layout", layout, *experts, ranks=CHECKED[layout])
    assert all(text.startswith("no finding\n3 steps on") or not text for text in printed)
    assert any(printed)
