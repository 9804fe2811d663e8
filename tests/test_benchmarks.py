"""The benchmark scripts run and print their tables, on matrices too small to say anything."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import absent
import accuracy
import auditing
import benchmark
import offload
import orthogonalize
import per_head
import qk_logits
import simulated
import step
import stub_driver
import timing
import training
import weight_rounding
from fake_device import CUDA, fake_device

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CPU = torch.device("cpu")
TINY = ["--rounds", "1", "--ceiling", "32", "--markdown"]


def rows_of(printed: str, first: str) -> list[list[str]]:
    """Cells of the markdown rows that begin so."""
    lines = [line for line in printed.splitlines() if line.startswith(f"| {first}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_orthogonalize_compares_every_form_with_plain_torch(capsys):
    orthogonalize.main(
        ["--shapes", "32x64", "24x24x2", "--rounds", "1", "--ceiling", "32", "--markdown"]
    )
    printed = capsys.readouterr().out
    for first in ("32 × 64", "24 × 24, 2"):
        rows = rows_of(printed, first)[:5]  # of the first table
        assert [row[1] for row in rows] == [
            *("auto", "standard", "gram", orthogonalize.PLAIN, orthogonalize.BARE)
        ]
        assert rows[1][4] == rows[3][4] == "1.00"  # FLOPs / plain, of products that are whole
    assert "mm bfloat16 32" in printed


@pytest.mark.slow
def test_orthogonalize_compares_the_default_arithmetic_with_the_others_and_names_the_cpu(capsys):
    orthogonalize.main(["--shapes", "32x64", *TINY])
    printed = capsys.readouterr().out
    assert "| matrices | default | fp32 | bf16 | fp32, exact mode | torch.optim.Muon's |" in printed
    assert ("avx512_bf16" in printed) == torch.cpu._is_avx512_bf16_supported()


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
    ("name", "workload"),
    [("Orthogonalize", "experts"), pytest.param("Step", "layer", marks=pytest.mark.slow)],
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
    compared = benchmark.Orthogonalize()
    kernel = timing.load_kernel()
    wrong = SimpleNamespace(
        FAMILIES=kernel.newton_schulz.FAMILIES,
        newton_schulz=lambda G: kernel.newton_schulz.newton_schulz(G, coefficients="quintic"),
    )
    compared.kernel = SimpleNamespace(newton_schulz=wrong)
    compared.setup_experts()
    with pytest.raises(RuntimeError, match="relative error"):
        compared.benchmark_experts()


def test_per_head_sets_heads_beside_the_whole_matrix(capsys):
    sizes = ["--projections", "4x8x32", "--sizes", "4x2x8x32x48"]
    per_head.main([*sizes, "--rounds", "1", "--markdown"])
    printed = capsys.readouterr().out
    whole, by_head = (float(rows_of(printed, first)[0][3]) for first in ("1 × 32 × 32", "4 × 8"))
    assert by_head <= whole
    steps = rows_of(printed, "heads of 8 × 32")
    assert [row[:2] for row in steps] == [
        ["heads of 8 × 32, whole", "7"],
        ["heads of 8 × 32, by head", "12"],
    ]


def test_absent_compares_steps_by_the_share_of_gradients_that_are_not_there(capsys):
    absent.main(["--matrices", "20", "--shape", "4", "6", "--rounds", "1", "--markdown"])
    printed = capsys.readouterr().out
    assert [line.split(" |")[0] for line in printed.splitlines() if "% |" in line] == [
        *("| 0%", "| 5%", "| 50%", "| 95%")
    ]


@pytest.mark.slow
def test_an_audit_is_timed_for_both_dtypes_of_weights(capsys):
    auditing.main(["--rounds", "1", "--markdown"])
    printed = capsys.readouterr().out
    assert all(rows_of(printed, dtype)[0][-1].endswith("%") for dtype in ("float32", "bfloat16"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts sockets as Linux lists them")
def test_hosts_compares_groups_of_eight_with_one_group_of_all_ranks():
    command = [sys.executable, BENCHMARKS / "hosts.py", "--ranks", "16", "--steps", "2"]
    printed = subprocess.run([*command, "--markdown"], check=True, capture_output=True, text=True)
    mesh, groups = rows_of(printed.stdout, "16 |")
    assert mesh[:3] == ["16", "one group of all", "16"]  # one listens
    assert groups[:3] == ["16", "groups of 8", "9"]


def test_maxima_of_logits_are_timed_beside_attention(capsys):
    qk_logits.main(["--shapes", "2x4x2x40x8", "--rounds", "1", "--markdown"])
    printed = capsys.readouterr().out
    rows = rows_of(printed, "2 × 4/2 × 40 × 8")
    names = [qk_logits.OURS, qk_logits.ATTENTION, qk_logits.WHOLE]
    assert [row[2] for row in rows] == 2 * names
    assert [row[6] for row in rows if row[2] == qk_logits.ATTENTION] == ["1.00", "1.00"]
    assert f"torch {torch.__version__}" in printed


def test_step_holds_all_contenders_to_a_floor(capsys):
    sizes = ["--layers", "1", "--dim", "32", "--ffn", "64"]
    step.main([*sizes, *TINY])
    printed = capsys.readouterr().out
    (ours,) = rows_of(printed, step.OURS)
    assert float(ours[4]) > 0 and ours[6] == "1.000"
    assert len(rows_of(printed, step.THEIRS)) == len(rows_of(printed, step.ADAMW)) == 1
    assert "1.000 × plain" in printed


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
    elementwise = importlib.import_module(f"{kernel.__name__}.triton_kernels.elementwise")

    def fails(*arguments, **constants):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(elementwise, "_launch", fails)
    sizes = ["--layers", "1", "--dim", "32", "--ffn", "64"]
    arguments = [*sizes, *TINY, "--contenders", "ours"]
    with pytest.raises(RuntimeError, match="C compiler"):
        step.main(arguments)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Triton is not installed"):
        step.main(arguments)


@pytest.mark.slow
def test_accuracy_tells_every_input_and_setting():
    # A process of its own: modules of examples/ and of tests/ share names.
    options = "--quick --all --families cans cubic5 --markdown"
    command = [sys.executable, BENCHMARKS / "accuracy.py", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    for name in (*accuracy.MADE, "momentum, d = 64"):
        default, other, *rest = rows_of(done.stdout, f"{name} |")
        assert default[2].startswith(("pass", "FAIL")) and "%" in default[1]
        assert "e-0" in other[5]  # fp32
        assert len(rest) == 2 * 2 * 3  # families, forms, arithmetics


@pytest.mark.parametrize("shape", [(32, 32), (24, 56), (56, 24)])
def test_references_of_accuracy_are_those_of_the_formulas(shape):
    import reference

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


@pytest.mark.slow
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
    assert best[1] == best[3] == "0.01, 0.02" and best[5] == "1 ×" and best[6].endswith(" of 2")
    assert [row[:2] for row in by_rate] == [["mlp, AdamW", "0.02"], ["mlp, Muon", "0.02"]]
    seeds = [json.loads(line)["settings"].get("seed") for line in runs.splitlines()]
    assert seeds[:6] == [0, 1, 2] * 2, "one seed chooses the rates, others compare"
    assert [len(rows_of(printed, f"{how} ")) for how in training.ADJUST_LR] == [1, 1, 1]
    assert f"torch {torch.__version__}" in printed and picture.stat().st_size
    training.main(command)
    assert capsys.readouterr().out == printed and out.read_text() == runs


@pytest.mark.slow
def test_weight_rounding_trains_with_each_way_to_round(tmp_path, capsys):
    picture = tmp_path / "rounding.png"
    command = ["--steps", "2", "--seeds", "1", "--lrs", "0.01", "--markdown"]
    weight_rounding.main([*command, "--plot", str(picture)])
    rows = rows_of(capsys.readouterr().out, "0.01")
    assert [row[1] for row in rows] == list(weight_rounding.COLOURS)
    assert picture.exists()


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


def test_steps_to_adamws_loss_lie_between_two_validations():
    adamw, muon = [(10, 3.0), (20, 2.0)], [(10, 2.5), (20, 1.5)]
    finals = {"AdamW": [adamw, adamw], "Muon": [muon, muon]}
    assert training.Comparison("mlp", {}, finals, {}, "").steps_to_adamw() == 15
    finals["Muon"] = [[(10, 3.0), (20, 2.1)]]
    assert training.Comparison("mlp", {}, finals, {}, "").steps_to_adamw() == float("inf")


SMALL_SHARE = (
    [(f"layers.{n}.{name}", (512, 1024)) for n in range(8) for name in ("up", "down")],
    [("head", (1000, 512))],
)


TINY_SHARE = (
    [(f"layers.{n}.{name}", (32, 64)) for n in range(2) for name in ("up", "down")],
    [("head", (20000, 128))],
)


def simulated_step(is_offloaded: bool, machine: simulated.Machine) -> simulated.Step:
    def make():
        params = [offload.params_of(shapes, CPU, torch.bfloat16) for shapes in SMALL_SHARE]
        options = {"momentum_dtype": torch.float32, "ns_dtype": torch.float16, "chunk_size": 2}
        return offload.optimizer_of(SMALL_SHARE, params, **options), [*params[0], *params[1]]

    return simulated.simulate(make, machine, is_offloaded, slot_bytes=8 << 20)


@pytest.mark.parametrize("bound", ["products", "copies"])
def test_a_simulated_step_keeps_to_its_bounds(bound):
    slow = {"flops": 1e13} if bound == "products" else {"link": 1e9}
    machine = simulated.Machine(launch=0.0, latency=0.0, **slow)
    off, stream = (simulated_step(is_on, machine) for is_on in (False, True))
    state = 4 * 16 * 512 * 1024 + 2 * 2 * 1000 * 512
    assert off.nbytes == 0 and stream.resting == 4  # AdamW's step
    assert off.resting == state + 4
    assert state <= stream.nbytes <= 1.001 * state
    longest = max(off.seconds, stream.carrying)
    assert (longest == off.seconds) == (bound == "products")
    assert longest < stream.seconds < 1.3 * longest
    # Momentum comes in pieces, so what is sent of a chunk of two is put together in fp32.
    assert stream.peak <= off.peak + (8 << 20) + 2 * 4 * 512 * 1024
    assert stream.loads > 8
    assert simulated_step(True, machine) == stream


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to measure")
def test_offload_says_that_it_simulates(capsys):
    offload.main(["--share", "llama-3-8b", "--layers", "1", "--markdown"])
    printed = capsys.readouterr().out
    assert "There is no accelerator here" in printed and "SIMULATED" in printed
    (stream,) = rows_of(printed, "on |")
    assert stream[-1] == "0" and float(stream[4]) > 1.0
    assert "exposed = step − step without offload" in printed
    assert "fair share" not in printed


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="for builds without CUDA")
def test_offload_measures_beside_an_accelerator(capsys, monkeypatch):
    monkeypatch.setattr(offload, "share_of", lambda *_: TINY_SHARE)
    monkeypatch.setattr(offload, "pick_device", lambda: CUDA)
    monkeypatch.setattr(offload, "LINK_BYTES", 1 << 10)
    empty = torch.empty

    def unlocked(*size, pin_memory=False, **kwargs):  # without CUDA, torch locks no pages
        return empty(*size, **kwargs)

    with fake_device() as device:
        memory = device.memory
        monkeypatch.setattr(torch, "empty", unlocked)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "no device")
        for name, call in (
            ("reset_peak_memory_stats", lambda: setattr(memory, "peak", memory.now)),
            ("memory_allocated", lambda: memory.now),
            ("max_memory_allocated", lambda: memory.peak),
        ):
            monkeypatch.setattr(torch.accelerator, name, call)
        offload.main(["--share", "llama-3-8b", "--repeats", "1", "--markdown"])
    printed = capsys.readouterr().out
    (header,) = rows_of(printed, "offload")
    off, on = (dict(zip(header, rows_of(printed, f"{name} |")[0])) for name in offload.OFFLOAD)
    assert tuple(header) == offload.MEASURED and "SIMULATED" not in printed
    state = 4 * 4 * 32 * 64 + 2 * 2 * 20000 * 128
    assert off["GB each way"] == "0.00" and off["at rest MiB"] == f"{state / 2**20:.0f}"
    assert on["GB each way"] == f"{state / 1e9:.2f}" and on["at rest MiB"] == "0"
    assert float(on["× off"]) >= 0 and float(on["ratio"]) >= 0  # numbers, however short the times
    assert offload.LEGEND in printed and "link, GB/s each way: to the device" in printed


@pytest.mark.slow
@pytest.mark.skipif(bool(stub_driver.missing()), reason=stub_driver.missing())
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the fake device needs a CPU's build")
def test_launches_are_counted_and_the_timed_step_has_as_many():
    options = ["--cases", "four layers, rank 0 of 8", "--rounds", "1", "--markdown"]
    command = [sys.executable, BENCHMARKS / "launches.py", *options]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout
    [totals, *_] = rows_of(printed, "four layers, rank 0 of 8")
    by_kernel = [int(row[2]) for row in rows_of(printed, "") if row[1].endswith("_kernel")]
    assert totals[1] == "28" and int(totals[3]) == sum(by_kernel) > 28
    assert float(totals[-2]) > 0
