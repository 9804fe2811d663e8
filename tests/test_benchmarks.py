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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

import reference
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


class Products(TorchDispatchMode):
    """Counts products by their shapes, and names all operations."""

    def __init__(self):
        super().__init__()
        self.counts, self.dtypes, self.names = Counter(), set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        if function.name().endswith(("mm", "mm.out")):
            self.counts[tuple(tuple(arg.shape) for arg in args)] += 1
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
    getattr(compared, f"benchmark_{workload}")()
    with Products() as products:
        expected = getattr(compared, f"verify_{workload}")()
    assert torch.allclose(compared.out, expected, atol=1e-2)  # as the runner has it
    shapes = [G.shape for G in (compared.G if name == "Orthogonalize" else compared.weights)]
    with Products() as of_torch:
        for shape in shapes:
            _zeropower_via_newtonschulz(torch.empty(shape, device="meta"), (1.0, 1.0, 1.0), 5, 1e-7)
    assert products.counts == of_torch.counts and len(products.counts) > 1
    assert products.dtypes == {compared.kernel.newton_schulz.default_dtype(torch.float32, CPU)}
    assert not any("linalg" in name for name in products.names - {"aten::linalg_vector_norm"})


def test_the_hubs_benchmark_refuses_a_kernel_that_is_wrong():
    compared, kernel = benchmark.Orthogonalize(), timing.load_kernel()
    wrong = SimpleNamespace(
        FAMILIES=kernel.newton_schulz.FAMILIES,
        newton_schulz=lambda G: kernel.newton_schulz.newton_schulz(G, coefficients="quintic"),
    )
    compared.kernel = SimpleNamespace(newton_schulz=wrong)
    compared.setup_experts()
    with pytest.raises(RuntimeError, match="error"):
        compared.benchmark_experts()


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts sockets as Linux lists them")
def test_hosts_compares_groups_of_eight_with_one_group_of_all_ranks():
    command = [sys.executable, ROOT / "benchmarks" / "hosts.py", "--ranks", "16", "--steps", "2"]
    printed = subprocess.run([*command, "--markdown"], check=True, capture_output=True, text=True)
    connections = [int(row[2]) for row in rows_of(printed.stdout, "16 |")]
    assert connections == [16, 9]  # one group of all, of which one listens; groups of eight


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_share_of_a_model_is_one_ranks_part_of_its_flops(ranks):
    stored = step.of_model("llama-3-8b", layers=None)
    whole, share = step.matrices_in(stored), step.share_of(stored, ranks, CPU)
    recipe = timing.load_kernel().newton_schulz.recipe_for(
        "polar_express", None, "auto", None, torch.float32, CPU
    )
    parts = step.flops_of_forms(whole, recipe) / step.flops_of_forms(share, recipe)
    assert whole.total() == 7 * 32
    assert 0.9 * ranks < parts < 1.1 * ranks


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_a_step_without_the_kernels_that_it_should_have_is_no_figure(monkeypatch):
    kernel = timing.load_kernel()
    monkeypatch.setattr(kernel.triton_kernels, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Triton"):
        step.main([*STEP.split(), "--contenders", "ours"])


@slow
def test_accuracy_tells_every_input_and_setting():
    # A process of its own: modules of examples/ and of tests/ share names.
    options = "--quick --all --families cans cubic5 --markdown"
    command = [sys.executable, ROOT / "benchmarks" / "accuracy.py", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    for name in (*accuracy.MADE, "momentum, d = 64"):
        default, other, *rest = rows_of(done.stdout, f"{name} |")
        assert default[2].startswith(("pass", "FAIL")) and "%" in default[1]
        assert "e-0" in other[5]  # fp32
        assert len(rest) == 2 * 2 * 3  # families, forms, arithmetics


@pytest.mark.parametrize("shape", [(32, 32), (24, 56), (56, 24)])
def test_references_of_accuracy_are_those_of_the_formulas(shape):
    G = accuracy.MADE["rank s/4"](*shape, torch.Generator().manual_seed(0))
    triples = reference.FAMILIES["polar_express"]
    U = reference.newton_schulz(G, triples, norm_factor=1.02, eps=0.0)
    family = timing.load_kernel().newton_schulz.FAMILIES["polar_express"]
    matrix = accuracy.Decomposed.of(G)
    found = accuracy.compare(U, matrix, triples, family)
    assert len(matrix.sigmas) == min(shape) // 4
    assert found.error < 1e-10 and found.null < 1e-6
    assert found.polar == pytest.approx(found.polar_of_float64)
    polar = reference.polar_factor(G)
    assert found.polar == pytest.approx(float((U - polar).norm() / polar.norm()))


@slow
@pytest.mark.filterwarnings("error")
def test_training_compares_optimizers_at_their_best_rates_and_repeats_no_run(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(training, "WIDTH_RATES", (1e-2,))
    mlp = dataclasses.replace(training.TASKS["mlp"], rates=(1e-2,), rest_rates=(2e-2,))
    monkeypatch.setitem(training.TASKS, "mlp", mlp)
    out, picture = tmp_path / "runs.jsonl", tmp_path / "training.png"
    options = "--models mlp --widths 16 --steps 2 --seeds 2 --rounds 1 --markdown"
    command = f"{options} --out {out} --plot {picture}".split()
    training.main(command)
    printed, runs = capsys.readouterr().out, out.read_text()
    best, *by_rate = rows_of(printed, "mlp")
    assert best[1] == best[3] == "0.01, 0.02"
    assert [row[:2] for row in by_rate] == [["mlp, AdamW", "0.02"], ["mlp, Muon", "0.02"]]
    seeds = [json.loads(line)["settings"].get("seed") for line in runs.splitlines()]
    assert seeds[:6] == [0, 1, 2] * 2, "one seed chooses the rates, others compare"
    assert [len(rows_of(printed, f"{how} ")) for how in training.ADJUST_LR] == [1, 1, 1]
    assert picture.stat().st_size
    training.main(command)
    assert capsys.readouterr().out == printed and out.read_text() == runs


@pytest.mark.parametrize(
    ("losses", "lowest"),
    [
        ([1.25**2, 0.25**2, 0.75**2], 2**1.25),
        ([3.0, 2.0, float("inf")], 2.0),
        ([2.0, 2.0, 2.0], 1.0),
        ([1.0, 2.0, 3.0], 1.0),
    ],
)
def test_a_best_rate_lies_on_a_parabola_through_its_neighbours(losses, lowest):
    grid = {(2.0**n, 1.0): loss for n, loss in enumerate(losses)}
    assert training.between_rates(grid) == pytest.approx(lowest)


@pytest.mark.parametrize(("last", "steps"), [(1.5, 15), (2.1, float("inf"))])
def test_steps_to_adamws_loss_lie_between_two_validations(last, steps):
    adamw, muon = [(10, 3.0), (20, 2.0)], [(10, 2.5), (20, last)]
    finals = {"AdamW": [adamw, adamw], "Muon": [muon, muon]}
    assert training.Comparison("mlp", {}, finals, {}, "").steps_to_adamw() == steps


SHARE = (
    [(f"layers.{n}.{name}", (512, 1024)) for n in range(8) for name in ("up", "down")],
    [("head", (1000, 512))],
)


@pytest.mark.parametrize("bound", ["products", "copies"])
def test_a_simulated_step_keeps_to_its_bounds(bound):
    slow_part: dict[str, Any] = {"flops": 1e13} if bound == "products" else {"link": 1e9}
    machine = simulated.Machine(launch=0.0, latency=0.0, **slow_part)

    def make() -> Any:
        params = [offload.params_of(shapes, CPU, torch.bfloat16) for shapes in SHARE]
        options = {"momentum_dtype": torch.float32, "ns_dtype": torch.float16, "chunk_size": 2}
        return offload.optimizer_of(SHARE, params, **options), [*params[0], *params[1]]

    off, stream, again = (
        simulated.simulate(make, machine, is_on, slot_bytes=8 << 20) for is_on in (0, 1, 1)
    )
    state = 4 * 16 * 512 * 1024 + 2 * 2 * 1000 * 512
    assert off.nbytes == 0 and stream.resting == 4  # AdamW's step
    assert off.resting == state + 4
    assert state <= stream.nbytes <= 1.001 * state
    longest = max(off.seconds, stream.carrying)
    assert (longest == off.seconds) == (bound == "products")
    assert longest < stream.seconds < 1.3 * longest
    # Momentum comes in pieces, so what is sent of a chunk of two is put together in fp32.
    assert stream.peak <= off.peak + (8 << 20) + 2 * 4 * 512 * 1024
    assert stream.loads > 8 and again == stream


@slow
@pytest.mark.skipif(bool(stub_driver.missing()), reason=stub_driver.missing())
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the fake device needs a CPU's build")
def test_launches_are_counted_and_the_timed_step_has_as_many():
    options = ["--cases", "four layers, rank 0 of 8", "--rounds", "1", "--markdown"]
    command = [sys.executable, ROOT / "benchmarks" / "launches.py", *options]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout
    [totals, *_] = rows_of(printed, "four layers, rank 0 of 8")
    by_kernel = [int(row[2]) for row in rows_of(printed, "") if row[1].endswith("_kernel")]
    assert totals[1] == "28" and int(totals[3]) == sum(by_kernel) > 28
    assert float(totals[-2]) > 0
