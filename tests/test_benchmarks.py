"""The benchmark scripts run and print their tables, on matrices too small to say anything."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

import stub_driver
from checkout import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import accuracy
import benchmark
import offload
import simulated
import step
import timing
import training

CPU = torch.device("cpu")


def rows_of(printed: str, first: str) -> list[list[str]]:
    """Cells of the markdown rows that begin so."""
    lines = [line for line in printed.splitlines() if line.startswith(f"| {first}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def output_of(script: str, *options: str, **variables: str) -> str:
    """Runs a script in its own process: modules of examples/ and of tests/ share names."""
    command = [sys.executable, ROOT / "benchmarks" / script, *options, "--markdown"]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=400, env=environment
    ).stdout


slow = pytest.mark.slow
ORTHOGONALIZE = "--shapes 32x64 24x24x2 --rounds 1 --ceiling 32"
PER_HEAD = "--projections 4x8x32 --sizes 4x2x8x32x48 --rounds 1"
STEP = "--layers 1 --dim 32 --ffn 64 --rounds 1 --ceiling 32"
ROUNDING = "--steps 2 --seeds 1 --lrs 0.01"
# Scripts, their options, and how many rows of the tables begin with each text.
SCRIPTS: dict[str, tuple[str, dict[str, int]]] = {
    "absent": ("--matrices 20 --shape 4 6 --rounds 1", {"0% ": 1, "5% ": 1, "50% ": 1, "95% ": 1}),
    "auditing": ("--rounds 1", {"float32": 1, "bfloat16": 1}),
    "orthogonalize": (ORTHOGONALIZE, {"32 × 64": 7, "24 × 24, 2": 7}),
    "per_head": (PER_HEAD, {"1 × 32 × 32": 1, "4 × 8": 1, "heads of 8 × 32": 2}),
    "qk_logits": ("--shapes 2x4x2x40x8 --rounds 1", {"2 × 4/2 × 40 × 8": 6}),
    "step": (STEP, {step.OURS: 1, step.THEIRS: 1, step.ADAMW: 1}),
    "offload": ("--share llama-3-8b --layers 1", {"on ": 1, "off": 2}),
    "weight_rounding": (ROUNDING, {"0.01": 4}),
}
SLOW = ("auditing", "orthogonalize", "weight_rounding")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[slow] if name in SLOW else []) for name in SCRIPTS]
)
def test_a_script_prints_its_table(name, capsys):
    options, rows = SCRIPTS[name]
    importlib.import_module(name).main([*options.split(), "--markdown"])
    printed = capsys.readouterr().out
    assert {first: len(rows_of(printed, first)) for first in rows} == rows
    assert f"torch {torch.__version__}" in printed
    if name == "offload" and not torch.accelerator.is_available():
        assert "SIMULATED" in printed


def test_a_script_writes_its_tables_with_command_and_machine_where_results_are_wanted(
    capsys, monkeypatch, tmp_path
):
    path = tmp_path / "absent.md"
    options, rows = SCRIPTS["absent"]
    monkeypatch.setenv(timing.RESULTS, str(path))
    monkeypatch.setattr(sys, "argv", ["benchmarks/absent.py", *options.split()])
    for _ in range(2):  # as ranks do, in processes of their own
        importlib.import_module("absent").main(options.split())
    written = path.read_text()
    assert written.startswith("# absent\n") and "|" not in capsys.readouterr().out
    assert written.count(f"python benchmarks/absent.py {options}\n") == 1
    assert timing.machine(CPU) in written and "commit " in written and "Triton" in written
    assert {first: len(rows_of(written, first)) for first in rows} == dict.fromkeys(rows, 2)


class Products(TorchDispatchMode):
    """Counts products of matrices by shapes and dtypes."""

    def __init__(self):
        super().__init__()
        self.shapes, self.dtypes = Counter(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "linalg" not in function.name() or "vector_norm" in function.name()
        if function.name().endswith(("mm", "mm.out")):
            self.shapes[tuple(tuple(arg.shape) for arg in args)] += 1
            self.dtypes |= {arg.dtype for arg in args}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "workload"), [("Orthogonalize", "experts"), pytest.param("Step", "layer", marks=slow)]
)
def test_the_hubs_benchmark_compares_with_torchs_iteration_in_the_same_arithmetic(name, workload):
    torch.manual_seed(0)
    compared = getattr(benchmark, name)()
    compared.kernel = timing.load_kernel()
    getattr(compared, f"setup_{workload}")()
    getattr(compared, f"benchmark_{workload}")()  # compares with singular values
    with Products() as ours:
        getattr(compared, f"benchmark_{workload}")()
    with Products() as products:
        expected = getattr(compared, f"verify_{workload}")()
    assert torch.allclose(compared.out, expected, atol=1e-2)  # as the runner has it
    shapes = [G.shape for G in (compared.G if name == "Orthogonalize" else compared.weights)]
    with Products() as of_torch:
        for shape in shapes:
            _zeropower_via_newtonschulz(torch.empty(shape, device="meta"), (1.0, 1.0, 1.0), 5, 1e-7)
    assert products.shapes == of_torch.shapes and len(products.shapes) > 1
    assert products.dtypes == ours.dtypes


def test_the_hubs_benchmark_refuses_a_kernel_that_is_wrong():
    compared, kernel = benchmark.Orthogonalize(), timing.load_kernel()
    wrong = partial(kernel.newton_schulz.newton_schulz, coefficients="quintic")
    names = {**vars(kernel.newton_schulz), "newton_schulz": wrong}
    compared.kernel = SimpleNamespace(newton_schulz=SimpleNamespace(**names))
    compared.setup_experts()
    with pytest.raises(RuntimeError, match="error"):
        compared.benchmark_experts()


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts sockets as Linux lists them")
def test_hosts_compares_groups_of_eight_with_one_group_of_all_ranks():
    printed = output_of("hosts.py", "--ranks", "16", "--steps", "2")
    connections = [int(row[2]) for row in rows_of(printed, "16 |")]
    assert connections == [16, 9]  # one group of all, of which one listens; groups of eight


def test_a_share_of_a_model_is_one_ranks_part_of_its_flops():
    stored = step.of_model("llama-3-8b", layers=None)
    whole, share = step.matrices_in(stored), step.share_of(stored, 64, CPU)
    recipe = timing.load_kernel().newton_schulz.recipe_for(
        "polar_express", None, "auto", None, torch.float32, CPU
    )
    parts = step.flops_of_forms(whole, recipe) / step.flops_of_forms(share, recipe)
    assert whole.total() == 7 * 32
    assert 0.9 * 64 < parts < 1.1 * 64


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_a_step_without_the_kernels_that_it_should_have_is_no_figure(monkeypatch):
    kernel = timing.load_kernel()
    monkeypatch.setattr(kernel.triton_kernels, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Triton"):
        step.main([*STEP.split(), "--contenders", "ours"])


@slow
def test_accuracy_tells_every_input_and_setting():
    printed = output_of("accuracy.py", *["--quick", "--all", "--families", "cans", "cubic5"])
    for name in (*accuracy.MADE, "momentum, d = 64"):
        default, other, *rest = rows_of(printed, f"{name} |")
        assert default[2].startswith(("pass", "FAIL")) and "%" in default[1]
        assert "e-0" in other[5]  # fp32
        assert len(rest) == 2 * 2 * 3  # families, forms, arithmetics


@slow
@pytest.mark.filterwarnings("error")
def test_training_compares_optimizers_at_their_best_rates_and_repeats_no_run(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "WIDTH_RATES", (1e-2,))
    mlp = dataclasses.replace(training.TASKS["mlp"], rates=(1e-2,), rest_rates=(2e-2,))
    monkeypatch.setitem(training.TASKS, "mlp", mlp)
    out, picture = tmp_path / "runs.jsonl", tmp_path / "training.png"
    sizes = "--models mlp --widths 16 --steps 2 --seeds 2 --rounds 1 --markdown"
    options = [*sizes.split(), "--out", str(out), "--plot", str(picture)]
    training.main(options)
    printed, runs = capsys.readouterr().out, out.read_text()
    best, *by_rate = rows_of(printed, "mlp")
    assert best[1] == best[3] == "0.01, 0.02"
    assert [row[:2] for row in by_rate] == [["mlp, AdamW", "0.02"], ["mlp, Muon", "0.02"]]
    seeds = [json.loads(line)["settings"].get("seed") for line in runs.splitlines()]
    assert seeds[:6] == [0, 1, 2] * 2, "one seed chooses the rates, others compare"
    assert [len(rows_of(printed, f"{how} ")) for how in training.ADJUST_LR] == [1, 1, 1]
    assert all(picture.with_stem(f"training-{theme}").stat().st_size for theme in ("light", "dark"))
    training.main(options)
    assert capsys.readouterr().out == printed and out.read_text() == runs


SHARE = (
    [(f"layers.{n}.{name}", (512, 1024)) for n in range(8) for name in ("up", "down")],
    [("head", (1000, 512))],
)


@pytest.mark.parametrize("slow_part", [{"flops": 1e13}, {"link": 1e9}], ids=str)
def test_a_simulated_step_keeps_to_its_bounds(slow_part):
    machine = simulated.Machine(launch=0.0, latency=0.0, **slow_part)

    def make() -> Any:
        params = [offload.params_of(shapes, CPU, torch.bfloat16) for shapes in SHARE]
        options = {"momentum_dtype": torch.float32, "ns_dtype": torch.float16, "chunk_size": 2}
        return offload.optimizer_of(SHARE, params, **options), [*params[0], *params[1]]

    off, stream, again = (
        simulated.simulate(make, machine, is_on, slot_bytes=8 << 20) for is_on in (0, 1, 1)
    )
    state = 4 * 16 * 512 * 1024 + 2 * 2 * 1000 * 512
    assert off.nbytes == 0 and off.resting == state + 4 and stream.resting == 4  # AdamW's step
    assert state <= stream.nbytes <= 1.001 * state
    longest = off.seconds if "flops" in slow_part else stream.carrying
    assert longest == max(off.seconds, stream.carrying) < stream.seconds < 1.3 * longest
    # Momentum comes in pieces, so what is sent of a chunk of two is put together in fp32.
    assert stream.peak <= off.peak + (8 << 20) + 2 * 4 * 512 * 1024
    assert stream.loads > 8 and again == stream


@slow
@pytest.mark.skipif(bool(stub_driver.missing()), reason=stub_driver.missing())
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the fake device needs a CPU's build")
def test_launches_are_counted_and_the_timed_step_has_as_many():
    options = ["--cases", "four layers, rank 0 of 8", "--rounds", "1"]
    printed = output_of("launches.py", *options, TRITON_INTERPRET="0")
    [totals, *_] = rows_of(printed, "four layers, rank 0 of 8")
    by_kernel = [int(row[2]) for row in rows_of(printed, "") if row[1].endswith("_kernel")]
    assert totals[1] == "28" and int(totals[3]) == sum(by_kernel) > 28
    assert float(totals[-2]) > 0
