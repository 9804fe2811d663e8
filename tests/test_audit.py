"""Audits: what steps did to every matrix, on every layout, and what is found where it is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpointed import CLIP, LAYOUTS, LOGITS, Run
from counters import Counter
from kernel import optimizer
from layouts import case, local, set_gradients, whole
from ranks import on_ranks, run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "QK-Clip": CLIP,
    "bf16": {"change": lambda model: model.bfloat16()},
    "exact": {"change": lambda model: model.bfloat16(), "weight_rounding": "exact", **CLIP},
}


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    """Whole weights of Muon's matrices in float64, with what 16 bits leave out."""
    muon = [group for group in run.optim.param_groups if group["use_muon"]]
    ids = {id(p) for group in muon for p in group["params"] if p.requires_grad}
    finer = run.optim.exact_weights()
    named = run.model.named_parameters()
    return {n: whole(finer.get(n, p)).detach().double() for n, p in named if id(p) in ids}


def check_norms(layouts: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    for layout in layouts:
        for kind in kinds:
            with case(f"{layout}, {kind}"):
                check(layout, KINDS[kind])


def check(layout: str, options: dict[str, Any]) -> None:
    """Numbers are those of whole tensors, and bits those of a run without an audit."""
    run, twin = Run.on(layout, **options), Run.on(layout, **options)
    params = dict(run.model.named_parameters())
    logits = LOGITS if "clip_config" in options else None
    keeps_all = "change" not in options or "weight_rounding" in options
    audit, expected = run.optim.audit(), []
    for number in range(2):
        run.give_gradients(number)
        twin.give_gradients(number)
        before = weights_of(run)
        rows = {n: {"nonzero": 1.0, "weight": norm(w)} for n, w in before.items()}
        for name, row in rows.items():
            row["gradient"] = norm(params[name].grad)
        run.optim.step(qk_logits=logits)
        twin.optim.step(qk_logits=logits)
        for name, weight in weights_of(run).items():
            rows[name]["change"] = norm(weight - before[name])
            rows[name]["momentum"] = norm(run.optim.state[params[name]]["momentum_buffer"])
        expected.append(rows)
    audit.stop()
    report = audit.report()
    ours, without = run.held(), twin.held()
    assert ours.keys() == without.keys()
    assert all(torch.equal(local(ours[name]), local(without[name])) for name in ours)
    for actual, rows in zip(report.steps, expected, strict=True):
        assert actual.keys() == rows.keys()
        for name, row in rows.items():
            if name.startswith("idle"):
                assert actual[name]["absent"] and not actual[name]["owners"]
                continue
            measured = {key: actual[name][key] for key in row}
            assert measured == pytest.approx(row, rel=1e-3, abs=1e-6), name
            assert actual[name]["owners"] and actual[name]["matrices"] >= 1
            assert 0.5 < actual[name]["relative_rank"] < 1.4, name
            assert (actual[name]["lost"] == 0.0) == keeps_all, name
    assert any("sigma" in row for row in report.steps[-1].values())
    assert re.match(r"1 of .*gradient: idle", report.findings[0])
    metrics = run.optim.metrics()
    assert metrics["muon/without_gradient"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


def norm(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else whole(tensor).detach().double().norm().item()


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_audit_has_the_norms_of_whole_tensors_and_changes_no_bit(ranks):
    kinds = ("defaults", "exact") if ranks == 4 else tuple(KINDS)
    run_ranks(check_norms, ranks, LAYOUTS[ranks], kinds)


def test_offloaded_state_is_audited_alike():
    last = []
    for is_on in (False, True):
        run = Run.on("one device", change=lambda model: model.bfloat16(), weight_rounding="exact")
        if is_on:
            host = optimizer.SimulatedHost(delay=1e-5)
            run.optim.turn_on_cpu_offload(slot_bytes=16384, backend=host)
        with run.optim.audit() as audit:
            run.train(range(3))
        run.train([3])  # which it does not watch any more
        _, _, rows = audit.report().steps
        cells = ((n, k, v) for n, row in rows.items() for k, v in row.items())
        last.append({(n, k): v for n, k, v in cells if isinstance(v, float)})
    assert last[1] == pytest.approx(last[0], rel=1e-4, abs=1e-9)


@on_ranks(2)
def test_steps_that_one_rank_audits_alone_and_nan_on_another_are_found() -> None:
    run = Run.on("FSDP2")
    audit = run.optim.audit()
    audit.is_on = dist.get_rank() == 0
    run.train([0])
    audit.is_on = True
    for step in range(1, 4):
        run.give_gradients(step)
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad = p.grad * math.nan
        run.optim.step()
    first, second = audit.report().findings[:2]
    assert "[4, 3]" in first and re.match("15 of 16 .*NaN", second)
    assert math.isnan(run.optim.metrics()["muon/weight_norm"])


@on_ranks(2)
def test_gradients_of_their_own_that_nobody_averages_are_found() -> None:
    optim = muon(model := Blocks())
    with optim.audit() as audit:
        for step in range(2):
            set_gradients(model.parameters(), seed=10 * step + dist.get_rank())
            optim.step()
    finding = audit.report().findings[0]
    assert re.match("4 of 5 .*other ranks: layers.0", finding) and "grad_reduce" in finding


# -- one device ------------------------------------------------------------------------------------


EXPERTS = {"expert_keys": ["experts"]}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(4))
        self.experts = nn.Parameter(torch.randn(4, 24, 24) / 5)
        self.lm_head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = torch.tanh(torch.einsum("bi,eoi->bo", x, self.experts))
        return self.lm_head(x)


def muon(
    model: nn.Module, adamw: str = "lm_head", muon_options: Any = EXPERTS, **options: Any
) -> Any:
    """Everything is Muon's but what has a name like ``adamw``."""
    groups: list[dict[str, Any]] = [
        {"params": [], "use_muon": True, **muon_options},
        {"params": [], "use_muon": False},
    ]
    for name, param in model.named_parameters():
        groups[bool(re.search(adamw, name))]["params"].append((name, param))
    return optimizer.Muon(groups, **{"lr": 1e-3, **options})


def report_of(
    model: nn.Module | None = None,
    spoil: Callable[[Any, int], None] = lambda model, step: None,
    **options: Any,
) -> Any:
    """Reports on three audited steps, whose gradients ``spoil`` changes."""
    model = model or Blocks()
    optim = muon(model, **options)
    dtype = next(model.parameters()).dtype
    with optim.audit() as audit:
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(256, 24, dtype=dtype)
            nn.functional.cross_entropy(model(x), torch.randint(10, (256,))).backward()
            spoil(model, number)
            optim.step()
            optim.zero_grad()
    return audit.report()


def scaled(factor: float, name: str = "", since: int = 0) -> Callable[[Any, int], None]:
    """Scales the gradients of what has the name, from some step on."""

    def spoil(model: nn.Module, step: int) -> None:
        for key, param in model.named_parameters():
            if param.grad is not None and name in key and step >= since:
                param.grad.mul_(factor)

    return spoil


def missing(model: Any, step: int) -> None:
    model.layers[1].weight.grad = None


def one_row(model: Any, step: int) -> None:
    model.layers[2].weight.grad[1:] = 0.0


def last_layer_times(factor: float) -> nn.Module:
    model = Blocks()
    with torch.no_grad():
        model.layers[3].weight.mul_(factor)
    return model


AS_ONE = {"muon_options": {"expert_keys": [], "flatten": True}}
DIVERGING = {"ns_coefficients": (3.4445, -4.775, 3.2), "ns_steps": 3}
FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "everything on AdamW": ({"adamw": ""}, "no matrix .*layers.0"),
    "one on AdamW": ({"adamw": "layers.3|lm_head"}, "AdamW trains layers.3.weight"),
    "experts on AdamW": ({"adamw": "experts|lm_head"}, "experts are stacks .*expert_keys"),
    "experts as one matrix": (AS_ONE, "experts are .*expert_keys"),
    "no gradient": ({"spoil": missing}, "1 of 5 .*no gradient: layers.1.weight"),
    "zeros": ({"spoil": scaled(0.0, "layers.2")}, "1 of 5 .*zeros: layers.2.weight"),
    "several zeros": ({"spoil": scaled(0.0, "layers.")}, "4 of 5 .*, layers.2.weight and 1 more"),
    "NaN": ({"spoil": scaled(math.nan, "layers.0", 2)}, "1 of 5 .*NaN .*3, .*gradient: layers.0"),
    "clipped to nothing": ({"spoil": scaled(1e-9, since=1)}, "gradients are 1e-09 .*momentum"),
    "clipped from the beginning": ({"spoil": scaled(1e-9)}, r"gradients .* of \de-1\d"),
    "one row": ({"spoil": one_row}, "1 of 5 .*rank under 0.1 .*: layers.2.weight"),
    "no learning rate": ({"lr": 0.0}, "5 of 5 .*not change"),
    "a learning rate for another scale": ({"lr": 3.0}, "updates are .*lr"),
    "coefficients that diverge": (DIVERGING, "1 of 5 .*1.5.*ns_coefficients"),
    "rounded to nothing": ({"model": Blocks().bfloat16()}, '5 of 5 .*30%.*"exact"'),
    "small weights": ({"model": last_layer_times(1e-4)}, "1 of 5 .*20 times .*: layers.3.weight"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_is_the_first_finding(name):
    options, facts = FAILURES[name]
    report = report_of(**options)
    assert re.match(facts, report.findings[0]), report.findings
    assert str(report).startswith(f"1. {report.findings[0]}")


HEALTHY: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, exact": {"model": Blocks().bfloat16(), "weight_rounding": "exact"},
    "bf16, at random": {"model": Blocks().bfloat16(), "weight_rounding": "stochastic"},
    "weights that begin at zero": {"model": last_layer_times(0.0)},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name):
    report = report_of(**HEALTHY[name])
    assert report.findings == [] and "layers.3.weight" in str(report)


def bigrams(vocabulary: int) -> nn.Module:
    layers = (nn.Linear(24, 24, bias=False), nn.Tanh(), nn.Linear(24, 24, bias=False), nn.Tanh())
    model = nn.Sequential()
    model.add_module("words", nn.Embedding(vocabulary, 24))
    model.add_module("layers", nn.Sequential(*layers))
    model.add_module("fc_out", nn.Linear(24, vocabulary, bias=False))
    model.register_forward_pre_hook(lambda _, inputs: inputs[0][:, 0].abs().mul(40).long())
    return model


def test_embeddings_and_heads_that_muon_trains_are_found():
    torch.manual_seed(0)
    tables, sparse = report_of(bigrams(1000), adamw="none").findings[:2]
    assert all(f"{name}.weight (1000 rows" in tables for name in ("words", "fc_out"))
    assert re.match("1 of 4 .*75%.*: words.weight.*adamw_keys", sparse)
    (head, *_) = report_of(bigrams(165), adamw="words").findings
    assert "fc_out.weight" in head and "words.weight" in head


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("largest", [1e18, 1e36, 1e-24, 1e-35])
def test_gradients_whose_squares_leave_the_range_of_numbers_have_their_norms(largest, dtype):
    torch.manual_seed(0)
    magnitude = largest**5 if dtype == torch.float64 else largest
    param = nn.Parameter(torch.randn(24, 24, dtype=dtype))
    optim = optimizer.Muon([{"params": [param], "names": ["wq.weight"], "use_muon": True}])
    with optim.audit() as audit:
        for _ in range(2):
            gradient = torch.randn(24, 24, dtype=dtype)
            param.grad = gradient * magnitude
            optim.step()
    report = audit.report()
    row = report.steps[-1]["wq.weight"]
    assert row["gradient"] / magnitude == pytest.approx(gradient.norm().item(), rel=1e-4)
    assert 0.0 < row["momentum"] < math.inf
    assert optim.metrics()["muon/gradient_norm"] == row["gradient"]
    assert not any("zeros" in finding or "Inf" in finding for finding in report.findings)


def test_matrices_may_come_and_go_while_an_audit_is_on():
    optim = muon(model := Blocks())
    late = nn.Parameter(torch.ones(4, 4))

    def step() -> None:
        set_gradients(p for p in (*model.parameters(), late) if p.requires_grad)
        optim.step()

    with optim.audit() as audit:
        step()
        model.layers[0].requires_grad_(False)
        model.layers[0].weight.grad = None
        step()
        optim.add_param_group({"params": [late], "names": ["late"], "use_muon": True})
        step()
    steps = audit.report().steps
    assert ["layers.0.weight" in rows for rows in steps] == [True, False, False]
    assert ["late" in rows for rows in steps] == [False, False, True]
    assert optim.metrics()["muon/orthogonalized"] == 8.0


def test_polar_factors_are_told_apart_where_another_matrix_has_no_gradient():
    params = {name: nn.Parameter(torch.randn(16, 16)) for name in ("idle", "row", "full")}
    optim = optimizer.Muon([{"params": list(params.items()), "use_muon": True}])
    params["full"].grad = torch.randn(16, 16)
    params["row"].grad = torch.zeros(16, 16).index_fill(0, torch.tensor([3]), 1.0)
    with optim.audit() as audit:
        optim.step()
    (rows,) = audit.report().steps
    assert rows["idle"]["absent"]
    assert rows["row"]["relative_rank"] < 0.2 < 0.5 < rows["full"]["relative_rank"]


def test_without_an_audit_a_step_does_nothing_more():
    """Counted operations: before one was made, and after it."""
    counts = []
    run = Run.on("one device")
    assert run.optim.metrics() == {}
    run.train(range(2))
    for number in (2, 3):
        run.give_gradients(number)
        with Counter() as counter:
            run.optim.step()
        counts.append(counter.operations)
        with run.optim.audit() as audit:
            assert len(audit.report().findings) == 1  # that no step was audited
            run.train([9])
        assert run.optim.metrics()
    assert counts[0] == counts[1]
