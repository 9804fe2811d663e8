"""Audits: what steps did to every matrix, on every layout, and what is found where it is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpointed import CLIP, LAYOUTS, LOGITS, Run
from counters import Counter
from kernel import optimizer
from layouts import case, local, whole
from ranks import run_ranks

Host = optimizer.SimulatedHost
KINDS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "QK-Clip": CLIP,
    "bf16": {"change": lambda model: model.bfloat16()},
    "exact": {"change": lambda model: model.bfloat16(), "weight_rounding": "exact", **CLIP},
}


def matrices_of(run: Run) -> dict[str, nn.Parameter]:
    muon = [group for group in run.optim.param_groups if group["use_muon"]]
    ids = {id(p) for group in muon for p in group["params"] if p.requires_grad}
    return {name: p for name, p in run.model.named_parameters() if id(p) in ids}


def norm(tensor: torch.Tensor) -> float:
    return whole(tensor).detach().double().norm().item()


def audited(layouts: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    for layout in layouts:
        for kind in kinds:
            with case(f"{layout}, {kind}"):
                check(layout, KINDS[kind])


def check(layout: str, options: dict[str, Any]) -> None:
    """Numbers are those of whole tensors, and bits those of a run without."""
    run, twin = Run.on(layout, **options), Run.on(layout, **options)
    logits = LOGITS if "clip_config" in options else None
    audit = run.optim.audit()
    expected = []
    for number in range(2):
        rows = {}
        for each in (run, twin):
            each.give_gradients(number)
        before = weights_of(run)
        for name, p in matrices_of(run).items():
            rows[name] = {"gradient": 0.0 if p.grad is None else norm(p.grad), "nonzero": 1.0}
            rows[name]["weight"] = before[name].norm().item()
        run.optim.step(qk_logits=logits)
        twin.optim.step(qk_logits=logits)
        after = weights_of(run)
        for name, p in matrices_of(run).items():
            rows[name]["change"] = (after[name] - before[name]).norm().item()
            rows[name]["momentum"] = norm(run.optim.state[p]["momentum_buffer"])
        expected.append(rows)
    audit.stop()
    report = audit.report()
    for mine, other in zip(run.held().items(), twin.held().items()):
        assert mine[0] == other[0]
        assert torch.equal(local(mine[1]), local(other[1]))
    assert len(report.steps) == 2
    for found, rows in zip(report.steps, expected):
        assert found.keys() == rows.keys()
        for name, row in rows.items():
            if name.startswith("idle"):
                assert found[name]["absent"] and not found[name]["owners"]
                continue
            for what, value in row.items():
                assert found[name][what] == pytest.approx(value, rel=1e-3, abs=1e-6), (name, what)
            assert found[name]["owners"] and found[name]["matrices"] >= 1
            assert 0.5 < found[name]["relative_rank"] < 1.4, name
            is_fp32 = options.get("change") is None or "weight_rounding" in options
            assert (found[name]["lost"] == 0.0) == is_fp32, name
    assert any("sigma" in row for row in report.steps[-1].values())
    assert report.findings[0].startswith("1 of ") and "had no gradient: idle" in report.findings[0]
    metrics = run.optim.metrics()
    assert metrics["muon/without_gradient"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    exact = run.optim.exact_weights()
    return {
        name: whole(exact.get(name, p)).detach().double() for name, p in matrices_of(run).items()
    }


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_audit_has_the_norms_of_whole_tensors_and_changes_no_bit(ranks):
    kinds = ("defaults", "exact") if ranks == 4 else tuple(KINDS)
    run_ranks(audited, ranks, LAYOUTS[ranks], kinds)


def test_offloaded_state_is_audited_alike():
    reports = []
    for is_on in (False, True):
        run = Run.on("one device", change=lambda model: model.bfloat16(), weight_rounding="exact")
        if is_on:
            run.optim.turn_on_cpu_offload(slot_bytes=16384, backend=Host(delay=1e-5))
        with run.optim.audit() as audit:
            run.train(range(3))
        run.train([3])  # which it does not watch any more
        reports.append(audit.report())
    assert len(reports[0].steps) == len(reports[1].steps) == 3
    for one, other in zip(*(report.steps[-1].items() for report in reports)):
        assert one[0] == other[0]
        for key, value in one[1].items():
            if isinstance(value, float):
                assert other[1][key] == pytest.approx(value, rel=1e-4, abs=1e-9), (one[0], key)


def unlike() -> None:
    """A step is audited on one rank alone, and all updates of another have NaN."""
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
    assert first.startswith("ranks have audited different numbers of steps, [4, 3]")
    assert second.startswith("13 of 14 matrices have Inf or NaN since audited step ")
    assert math.isnan(run.optim.metrics()["muon/weight_norm"])


def test_reports_of_ranks_that_differ_and_of_nan_come_to_an_end():
    run_ranks(unlike, 2)


def test_matrices_may_come_and_go_while_an_audit_is_on():
    model = Blocks()
    optim = optimizer.Muon(optimizer.get_default_muon_param_groups(model, expert_keys=["experts"]))
    late = nn.Parameter(torch.ones(4, 4))

    def step() -> None:
        for p in (*model.parameters(), late):
            p.grad = torch.randn_like(p) if p.requires_grad else None
        optim.step()

    with optim.audit() as audit:
        step()
        model.layers[0].requires_grad_(False)
        step()
        optim.add_param_group({"params": [late], "names": ["late"], "use_muon": True})
        step()
    steps = audit.report().steps
    assert ["layers.0.weight" in rows for rows in steps] == [True, False, False]
    assert ["late" in rows for rows in steps] == [False, False, True]
    assert optim.metrics()["muon/orthogonalized"] == 8.0


# -- findings --------------------------------------------------------------------------------------


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


def report_of(
    model: nn.Module | None = None,
    spoil: Callable[[nn.Module, int], None] = lambda model, step: None,
    regroup: Callable[[list[dict]], list[dict]] = lambda groups: groups,
    **options: Any,
) -> Any:
    model = model or Blocks()
    groups = optimizer.get_default_muon_param_groups(model, expert_keys=["experts"])
    optim = optimizer.Muon(regroup(groups), **{"lr": 1e-3, **options})
    dtype = next(model.parameters()).dtype
    with optim.audit() as audit:
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(256, 24, dtype=dtype)
            loss = nn.functional.cross_entropy(model(x), torch.randint(10, (256,)))
            loss.backward()
            spoil(model, number)
            optim.step()
            optim.zero_grad()
    return audit.report()


def all_adamw(groups: list[dict]) -> list[dict]:
    muon, adamw = groups
    params = [*muon["params"], *adamw["params"]]
    return [{"params": params, "names": [*muon["names"], *adamw["names"]], "use_muon": False}]


def one_adamw(groups: list[dict]) -> list[dict]:
    muon, adamw = groups
    last = {"params": muon["params"][-1:], "names": muon["names"][-1:], "use_muon": False}
    return [{**muon, "params": muon["params"][:-1], "names": muon["names"][:-1]}, adamw, last]


def experts_on_adamw(groups: list[dict]) -> list[dict]:
    muon, adamw = groups
    (at,) = [number for number, name in enumerate(muon["names"]) if name == "experts"]
    return [
        {**muon, **{key: [*muon[key][:at], *muon[key][at + 1 :]] for key in ("params", "names")}},
        {**adamw, **{key: [*adamw[key], muon[key][at]] for key in ("params", "names")}},
    ]


def as_slab(groups: list[dict]) -> list[dict]:
    muon, adamw = groups
    return [{**muon, "expert_keys": [], "flatten": True}, adamw]


def scaled(name: str, factor: float) -> Callable[[nn.Module, int], None]:
    def spoil(model: nn.Module, step: int) -> None:
        for key, param in model.named_parameters():
            if param.grad is not None and name in key:
                param.grad.mul_(factor)

    return spoil


def missing(model: nn.Module, step: int) -> None:
    model.layers[1].weight.grad = None


def one_row(model: nn.Module, step: int) -> None:
    model.layers[2].weight.grad[1:] = 0.0


def vanishing(model: nn.Module, step: int) -> None:
    scaled("", 1.0 if step == 0 else 1e-9)(model, step)


def not_finite(model: nn.Module, step: int) -> None:
    if step == 2:
        model.layers[0].weight.grad[0, 0] = math.nan


def tiny_weights() -> nn.Module:
    model = Blocks()
    with torch.no_grad():
        model.layers[3].weight.mul_(1e-4)
    return model


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "everything on AdamW": ({"regroup": all_adamw}, "no matrix was orthogonalized: layers.0"),
    "one on AdamW": (
        {"regroup": one_adamw},
        "AdamW trains layers.3.weight, whose like in other layers",
    ),
    "no gradient": ({"spoil": missing}, "1 of 5 matrices had no gradient: layers.1.weight"),
    "zeros": (
        {"spoil": scaled("layers.2", 0.0)},
        "1 of 5 matrices had gradients of zeros: layers.2",
    ),
    "clipped to nothing": ({"spoil": vanishing}, "gradients are 1e-09 of the momentum"),
    "a slab of experts": (
        {"regroup": as_slab},
        "experts are stacks of experts that AdamW trains, or that are orthogonalized as one",
    ),
    "one row": ({"spoil": one_row}, "1 of 5 matrices have updates of a rank under 0.1"),
    "NaN": (
        {"spoil": not_finite},
        "1 of 5 matrices have Inf or NaN since audited step 3, first in the gradient: layers.0",
    ),
    "clipped to nothing from the beginning": (
        {"spoil": scaled("", 1e-9)},
        "gradients have a root mean square of ",
    ),
    "no learning rate": ({"lr": 0.0}, "5 of 5 matrices did not change: "),
    "a learning rate for another scale": ({"lr": 3.0}, "updates are "),
    "experts on AdamW": (
        {"regroup": experts_on_adamw},
        "experts are stacks of experts that AdamW trains",
    ),
    "coefficients that diverge": (
        {"ns_coefficients": (3.4445, -4.775, 3.2), "ns_steps": 3},
        "1 of 5 matrices have updates with singular values above 1.5",
    ),
    "rounded to nothing": (
        {"model": lambda: Blocks().bfloat16()},
        "5 of 5 matrices have lost over 30%",
    ),
    "weights that are too small": (
        {"model": tiny_weights},
        "1 of 5 matrices have updates over 20 times the median, relative to their weights: ",
    ),
}


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


def test_a_healthy_run_has_no_finding():
    report = report_of()
    assert report.findings == []
    assert str(report).startswith("no finding")
    for rounding in ("exact", "stochastic"):
        report = report_of(Blocks().bfloat16(), weight_rounding=rounding)
        assert report.findings == [], rounding


class Bigrams(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(vocabulary, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(2))
        self.fc_out = nn.Linear(24, vocabulary, bias=False)

    def findings(self, words_are_muons: bool) -> str:
        """Of three steps in which Muon trains all other matrices."""
        groups: list[dict[str, Any]] = [
            {"params": [], "use_muon": True},
            {"params": [], "use_muon": False},
        ]
        for name, param in self.named_parameters():
            is_adamws = name.startswith("words") and not words_are_muons
            groups[is_adamws]["params"].append((name, param))
        optim = optimizer.Muon(groups, lr=1e-3)
        with optim.audit() as audit:
            for number in range(3):
                torch.manual_seed(number)
                tokens = torch.randint(self.words.num_embeddings, (2, 64))
                x = self.words(tokens[0])
                for layer in self.layers:
                    x = x + torch.tanh(layer(x))
                nn.functional.cross_entropy(self.fc_out(x), tokens[1]).backward()
                optim.step()
                optim.zero_grad()
        return "\n".join(audit.report().findings)


def test_embeddings_and_heads_that_muon_trains_are_found():
    found = Bigrams(1000).findings(words_are_muons=True)
    assert "fc_out.weight (1000 rows, as of a vocabulary)" in found
    assert "words.weight (1000 rows, as of a vocabulary)" in found
    sparse = (
        "1 of 4 matrices had gradients that are zero in over 75% of their elements: words.weight"
    )
    assert sparse in found and "adamw_keys" in found
    found = Bigrams(65).findings(words_are_muons=False)
    assert found.startswith("Muon trains fc_out.weight (as many rows as words.weight).")


def test_weights_that_begin_at_zero_are_no_finding():
    model = Blocks()
    nn.init.zeros_(model.layers[3].weight)
    assert report_of(model).findings == []


def replicas_apart() -> None:
    model = Blocks()
    optim = optimizer.Muon(optimizer.get_default_muon_param_groups(model, expert_keys=["experts"]))
    with optim.audit() as audit:
        for step in range(2):
            torch.manual_seed(10 * step + dist.get_rank())
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optim.step()
    message = "4 of 5 matrices are plain tensors that have other weights on other ranks: layers.0"
    assert audit.report().findings[0].startswith(message)


def test_replicas_whose_weights_part_are_found():
    run_ranks(replicas_apart, 2)


def test_an_audit_without_steps_says_so():
    optim = optimizer.Muon(optimizer.get_default_muon_param_groups(Blocks()))
    assert str(optim.audit().report()).startswith("1. no step was audited")


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_is_the_first_finding(name):
    options, message = FAILURES[name]
    if "model" in options:
        options = {**options, "model": options["model"]()}
    report = report_of(**options)
    assert report.findings[0].startswith(message), report.findings
    assert str(report).startswith(f"1. {message}")


# -- cost ------------------------------------------------------------------------------------------


def test_without_an_audit_a_step_does_nothing_more():
    """Counted operations: before one was made, and behind it."""
    counts = []
    run = Run.on("one device")
    run.train(range(2))
    for number in (2, 3):
        run.give_gradients(number)
        with Counter() as counter:
            run.optim.step()
        counts.append(counter.operations)
        with run.optim.audit():
            run.train([9])
        assert run.optim.metrics()
    assert counts[0] == counts[1]
    assert Run.on("one device").optim.metrics() == {}


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
