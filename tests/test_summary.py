"""What `summary` tells: FLOPs and bytes are those that a step is counted to have."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from comparisons import assert_equal
from counters import count
from kernel import optimizer
from layouts import EXACT, Group, Twins, Weight, params_of, set_gradients
from models import Model
from ranks import on_ranks, run_ranks

FIELDS = "name group shape dtype placement sharded algorithm matrices owners whole flops bytes"
TOTALS = "flops sent_bytes received_bytes chunks in_flight balance state"


def flops(rows: int, cols: int) -> int:
    """Returns the FLOPs of five steps of Polar Express on one matrix."""
    s, long = sorted((rows, cols))
    return 20 * s * s * long + 5 * 2 * s**3


# -- one device --------------------------------------------------------------------------------

# Shapes, how many matrices they are, and their FLOPs.
MATRICES = {
    "layers.0.wq.weight": ((8, 4), 1, flops(8, 4)),
    "layers.0.wqkv.weight": ((16, 4), 3, flops(8, 4) + 2 * flops(4, 4)),
    "layers.0.heads.weight": ((12, 4), 4, 4 * flops(3, 4)),
    "layers.0.experts.w1": ((3, 8, 4), 3, 3 * flops(8, 4)),
    "layers.0.none.weight": ((0, 4), 0, 0),
    "layers.0.frozen.weight": ((4, 4), 0, 0),
}
OTHERS = {"norm.weight": (4,), "scale": (), "nothing": (0,), "embed.weight": (10, 4)}


def groups() -> list[dict[str, Any]]:
    muon = [(name, nn.Parameter(torch.randn(row[0]))) for name, row in MATRICES.items()]
    adamw = [(name, nn.Parameter(torch.randn(shape))) for name, shape in OTHERS.items()]
    muon[-1][1].requires_grad_(False)
    split = {"wqkv": [8, 4, 4], "heads": 3}
    return [
        {"params": muon, "use_muon": True, "expert_keys": ["experts"], "split": split},
        {"params": adamw, "use_muon": False},
    ]


def test_rows_tell_of_every_parameter_in_order_and_totals_are_those_of_a_step():
    optim = optimizer.Muon(groups())
    summary = optim.summary()
    expected = {**MATRICES, **{name: (shape, 0, 0) for name, shape in OTHERS.items()}}
    for row, (name, about) in zip(summary.rows, expected.items(), strict=True):
        assert list(row) == [*FIELDS.split(), "clipped"]
        assert (row["name"], row["shape"], row["matrices"], row["flops"]) == (name, *about)
        assert row["group"] == (name in OTHERS) and row["dtype"] == torch.float32
        assert (row["placement"], row["sharded"], row["bytes"]) == ("plain", False, 0)
        assert (row["owners"], row["whole"]) == (([0], True) if about[1] else ([], False))
    algorithms = [row["algorithm"].partition(",")[0] for row in summary.rows]
    assert algorithms == ["Muon"] * 5 + ["frozen"] + ["AdamW"] * 4
    set_gradients(p for p in params_of(optim) if p.requires_grad)
    with FlopCounterMode(display=False) as counter:
        optim.step()
    assert list(summary.totals) == TOTALS.split()
    assert summary.totals["flops"] == counter.get_total_flops() > 0
    assert summary.totals["flops"] == sum(row["flops"] for row in summary.rows)
    check_table(summary)


CONVERGING = {"ns_coefficients": [(15 / 8, -10 / 8, 3 / 8)] * 7, "ns_dtype": torch.float64}
QUINTIC = {"ns_coefficients": "quintic", "ns_dtype": torch.bfloat16}
ADAMW = {"use_muon": False}


@pytest.mark.parametrize(
    ("param", "options", "facts"),
    [
        (torch.ones(4, 4), {}, ["polar_express ×5", "standard"]),
        (torch.ones(4, 4), CONVERGING, ["own coefficients ×7", "standard", "float64"]),
        (torch.ones(640, 640), QUINTIC, ["quintic ×5", "standard", " 1."]),
        (torch.ones(4608, 512), QUINTIC, ["gram, restarted after 2 and 3", "0.", "bfloat16"]),
        (torch.ones(4), ADAMW, ["AdamW, fused"]),
        (torch.ones(2, dtype=torch.complex64), ADAMW, ["AdamW"]),
    ],
)
def test_algorithms_are_told(param, options, facts):
    group = {"params": [nn.Parameter(param)], "use_muon": True, **options}
    algorithm = optimizer.Muon([group]).summary().rows[0]["algorithm"]
    assert all(fact in algorithm for fact in facts), algorithm
    assert ("fused" in algorithm) == (facts == ["AdamW, fused"])


def is_short(cell: str, value: int) -> bool:
    """True if a cell has a number with three digits, and a unit."""
    digits, _, unit = cell.strip().partition(" ")
    factor = 1000 ** " kMGT".index(unit or " ")
    return float(digits) < 1000 and float(digits) * factor == pytest.approx(value, rel=6e-3)


def check_table(summary: Any) -> None:
    """A line of aligned cells for each parameter, below what it has in common with others."""
    head, rule, *lines = str(summary).splitlines()
    end = next(at for at, line in enumerate(lines) if line.startswith("this rank: "))
    assert any(summary.totals["state"] in line for line in lines[end:])
    columns = [match.span() for match in re.finditer("-+", rule)]
    cells = [head[slice(*column)].strip() for column in columns]
    assert cells == ["parameter", "shape", "owner", "FLOPs", "moved by all"]
    section, shown = "", []
    names = {row["name"]: row for row in summary.rows}
    for line in lines[:end]:
        assert len(line) <= 100
        name, *cells = (line[slice(*column)].strip() for column in columns)
        if name in names and len(line) == columns[-1][1]:
            row = names[name]
            shown.append(name)
            about = (str(row["dtype"]), row["placement"], row["algorithm"].split(",")[0])
            assert all(each.removeprefix("torch.") in section for each in about)
            assert cells[0].startswith("×".join(map(str, row["shape"])) or "scalar")
            for cell, value in ((cells[2], row["flops"]), (cells[3], row["bytes"])):
                assert value == 0 if cell == "–" else is_short(cell.removesuffix("B"), value)
            assert all(line[stop : stop + 2].strip() == "" for _, stop in columns)
            section += "\n"
        elif line:
            section = line if section[-1:] == "\n" else section + line
    assert sorted(shown) == sorted(names)


@pytest.mark.parametrize("params", [[], [nn.Parameter(torch.ones(4, 4))]], ids=len)
def test_groups_without_parameters_or_names_have_a_summary(params):
    summary = optimizer.Muon([{"params": params, "use_muon": True}]).summary()
    check_table(summary)
    assert ["param_groups[0]" in row["name"] for row in summary.rows] == [True] * len(params)
    check_table(optimizer.Muon([{"params": [], "use_muon": False}]).summary())


def test_a_long_name_has_a_line_of_its_own():
    name, param = f"layers.0.{'x' * 150}", nn.Parameter(torch.ones(4, 4))
    text = str(optimizer.Muon([{"params": [(name, param)], "use_muon": True}]).summary())
    lines = text.splitlines()
    lines.remove(name)
    assert all(len(line) <= 100 for line in lines)


def summary_of(muon: dict[str, tuple], adamw: dict[str, tuple], is_named: bool = True) -> Any:
    """Summarizes an optimizer of a layer and of matrices with these names and shapes."""
    groups = []
    for use_muon, shapes in ((True, {"l.0.w.weight": (32, 8), **muon}), (False, adamw)):
        params = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
        given = params.items() if is_named else params.values()
        groups.append({"params": list(given), "use_muon": use_muon})
    return optimizer.Muon(groups).summary()


WORDS, HEAD = {"emb.weight": (65, 8)}, {"fc.weight": (65, 8)}


@pytest.mark.parametrize("is_named", [True, False])
def test_matrices_with_a_vocabulary_are_noted(is_named):
    tables = {"tokens.weight": (2000, 300), "out.weight": (1001, 8)}
    for muon, adamw in ((tables, {}), (HEAD, WORDS)):
        summary = summary_of(muon, adamw, is_named)
        for note, row in zip(summary.notes, summary.rows[1 : len(muon) + 1], strict=True):
            assert row["name"] in note and note in str(summary).splitlines()


HIDDEN: dict[str, tuple[dict[str, tuple], dict[str, tuple]]] = {
    "as many rows in a layer": ({"l.1.w": (65, 8), **HEAD}, WORDS),
    "positions": ({"fc.weight": (16, 8)}, {"wpe.weight": (16, 8)}),
    "latent attention": ({f"l.{i}.kv_b.weight": (4096, 64) for i in range(2)}, {}),
    "adapters": ({"head.lora_B.default.weight": (2000, 8)}, {}),
    "under a thousand rows": ({"x.weight": (999, 8)}, {}),
    "under six times the columns": ({"x.weight": (1700, 300)}, {}),
    "many inputs": ({"fc1.weight": (64, 6272), "fc2.weight": (64, 64)}, {}),
    "wide layer": ({"0.weight": (1024, 64), "2.weight": (64, 1024)}, {}),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_matrices_of_hidden_layers_are_not_noted(name):
    assert summary_of(*HIDDEN[name]).notes == []


def test_options_set_later_show_and_bad_ones_raise():
    optim = optimizer.Muon(groups())
    before = optim.summary().rows[0]
    optim.param_groups[0]["ns_steps"] = 7
    after = optim.summary().rows[0]
    assert "×7" in after["algorithm"]
    assert after["flops"] * 5 == before["flops"] * 7
    optim.param_groups[0]["momentum"] = 2.0
    with pytest.raises(ValueError, match=r"param_groups\[0\].*momentum"):
        optim.summary()


def test_the_schedule_is_that_of_the_last_step():
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    bias = nn.Parameter(torch.randn(8))
    groups = [{"params": params, "use_muon": True}, {"params": [bias], "use_muon": False}]
    optim = optimizer.Muon(groups, chunk_size=2)
    assert optim.summary(schedule=True).schedule == []
    set_gradients([*params, bias])
    optim.step()
    summary = optim.summary(schedule=True)
    way = ["momentum, gather", "orthogonalize, scatter", "update weights"]
    assert [event["event"] for event in summary.schedule] == [*way, *way, "AdamW"]
    assert [event["matrices"] for event in summary.schedule] == [0, 2, 0, 0, 1, 0, 0]
    assert sum(event["flops"] for event in summary.schedule) == summary.totals["flops"]
    assert "chunk 1" in str(summary) and max(map(len, str(summary).splitlines())) <= 100
    assert optim.summary().schedule == []


def test_a_summary_changes_nothing():
    optim = optimizer.Muon(groups())
    set_gradients(params_of(optim))
    before = copy.deepcopy(optim.param_groups)
    grads = [param.grad for param in params_of(optim)]
    first, second = optim.summary(), optim.summary()
    assert not optim.state and (first.rows, first.totals) == (second.rows, second.totals)
    assert_equal(optim.param_groups, before)
    assert all(param.grad is grad for param, grad in zip(params_of(optim), grads))


# -- sharded -----------------------------------------------------------------------------------


KEPT = {"none_grad": False}  # gradients, for the next step


def counted(optim: Any) -> dict[str, Any]:
    """A summary, and what a step that begins like it was counted to do."""
    first = optim.summary()
    optim.step()  # creates state and process groups
    summary = optim.summary(schedule=True)
    assert (first.rows, first.totals) == (summary.rows, summary.totals)
    check_table(first)
    assert all(len(line) <= 100 for line in str(summary).splitlines())
    counter = count(optim.step)
    with FlopCounterMode(display=False) as flop_counter:
        optim.step()
    numbers = {"sent": counter.sent, "messages": len(counter.messages)}
    numbers["flops"] = flop_counter.get_total_flops()
    return {"rows": summary.rows, "totals": summary.totals, **numbers}


def fsdp2(options: dict) -> dict[str, Any]:
    model = Model()
    model.layers[1].bias.requires_grad_(False)
    model.layers[2].weight.requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    groups = optimizer.get_default_muon_param_groups(model, expert_keys=["experts"])
    groups[0]["params"].append(model.layers[2].weight)
    groups[0]["names"].append("layers.2.weight")
    optim = optimizer.Muon(groups, none_grad=False, **options)
    model(torch.arange(8)).sum().backward()
    return counted(optim)


def placed(weights: list[Weight], options: dict) -> dict[str, Any]:
    twins = Twins.placed([Group(weights, KEPT)], options)
    set_gradients(p for _, p, _ in twins.pairs)
    return counted(twins.ours)


def check_counts(found: list[dict], rows: list[dict], options: dict) -> None:
    """Totals of each rank, and rows that tell of all parameters once."""
    for own in found:
        assert own["totals"]["sent_bytes"] == own["sent"]
        assert own["totals"]["flops"] == own["flops"]
        chunks = own["totals"]["chunks"]
        assert own["messages"] == (3 if "beta2" in options else 2) * chunks  # with mean squares
        assert 1 <= own["totals"]["in_flight"] <= chunks
    sent = sum(own["sent"] for own in found)
    assert sum(own["totals"]["received_bytes"] for own in found) == sent > 0
    # Rows tell of matrices, without the padding after what two ranks exchange in one direction,
    # and after the mean squares of each owner, of which all send as many as the one with most.
    matrices = sum(row["matrices"] for row in rows)
    pairs = len(found) * (len(found) - 1)
    padding = 64 * 2 * pairs * matrices + 4 * pairs * max(max(row["shape"]) for row in rows)
    assert 0 <= sent - sum(row["bytes"] for row in rows) < padding
    assert sum(row["flops"] for row in rows) == sum(own["flops"] for own in found)


ROWS = {"comm_dtype": torch.float32, "chunk_size": 1, "beta2": 0.9, "second_moment_side": "rows"}
OPTIONS = [{}, {"beta2": 0.9}, ROWS, {"ns_dtype": torch.float64, "beta2": 0.9}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bytes_and_flops_are_those_of_a_step_under_fsdp2(options):
    found = run_ranks(fsdp2, 4, options)
    of_ranks = [[row for row in own["rows"] if "experts" not in row["name"]] for own in found]
    experts = [row for own in found for row in own["rows"] if "experts" in row["name"]]
    assert all(rows == of_ranks[0] for rows in of_ranks)
    check_counts(found, [*of_ranks[0], *experts], options)
    assert [row["owners"] for row in experts] == [[0], [1], [2], []]  # two each of six
    assert [row["whole"] for row in experts] == [True, True, True, False]
    assert all(row["bytes"] == 0 for row in experts)
    assert {own["totals"]["balance"] for own in found} == {found[0]["totals"]["balance"]}


# By name: ranks whose rows tell of all matrices between them, then weights.
PLACED: dict[str, tuple[Any, ...]] = {
    "tensor parallelism": ([0], [(12, 8), (2, 2), (0, 1)], [(8, 12), (2, 2), (0, 0)]),
    "columns": ([0], [(12, 8), (4,), (1,)], [(8, 3), (4,), (1,)], [(8, 6), (4,), (1,)]),
    "wide": ([0], [(4, 2048), (4,), (0,)]),
    "few rows": ([0], [(1, 8), (4,), (0,)], [(8, 1), (4,), (1,)], [(3, 6), (4,), (0,)]),
    "replicas": ([0, 2], [(12, 8), (2, 2), (None, 0)], [(8, 6), (2, 2), (None, 1)]),
    "experts": ([0, 2], [(4, 8, 12), (2, 2), (0, 1)], [(3, 6, 4), (2, 2), (0, 2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [OPTIONS[n] for n in (0, 1, 3)], ids=str)
@pytest.mark.parametrize("layout", PLACED)
def test_bytes_and_flops_are_those_of_a_step_on_any_mesh(layout, options):
    ranks, *weights = PLACED[layout]
    found = run_ranks(placed, 4, [Weight(*weight) for weight in weights], options)
    check_counts(found, [row for rank in ranks for row in found[rank]["rows"]], options)
    if len(ranks) == 1:
        of_ranks = [own["flops"] for own in found]
        balance = pytest.approx(max(of_ranks) * 4 / sum(of_ranks))
        assert all(own["rows"] == found[0]["rows"] for own in found)
        assert all(own["totals"]["balance"] == balance for own in found)


def replicated(options: dict[str, Any]) -> dict[str, Any]:
    matrices = [*[Weight((96, 64))] * 8, Weight((30, 20)), Weight((12, 4, 8))]
    others = [Weight(shape) for shape in [(50, 40), (64,), (1000, 16), (400, 40)]]
    groups = [Group(matrices, KEPT), Group(others, {**KEPT, "use_muon": False})]
    options = {**options, "beta2": 0.9, "process_group": dist.group.WORLD}
    optim = Twins.placed(groups, options).ours
    params_of(optim)[-1].requires_grad_(False)
    set_gradients(params_of(optim)[:-1])
    return counted(optim)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"grad_reduce": "mean"}], ids=["DDP", "ZeRO-2"])
def test_summaries_tell_what_replicas_send(options, ranks):
    found = run_ranks(replicated, ranks, options)
    for own in found:
        assert own["totals"]["sent_bytes"] == pytest.approx(own["sent"], abs=2)
        assert own["totals"]["flops"] == own["flops"]
        assert str(ranks) in own["rows"][0]["placement"] and own["rows"] == found[0]["rows"]
    if options:  # all-gathers of updates pad a little, which no parameter answers for
        moved = sum(row["bytes"] for row in found[0]["rows"])
        assert moved == pytest.approx(sum(own["sent"] for own in found), rel=0.1)


def test_every_rank_of_the_plain_reference_owns_every_matrix():
    weights = [Weight((12, 8), (2,), (0,)), Weight((3, 6, 4), (2,), (1,))]
    for own in run_ranks(placed, 2, weights, {"use_distributed_muon": True}):
        assert [row["owners"] for row in own["rows"]] == [[0, 1]] * 2
        assert own["totals"]["flops"] == own["flops"] == flops(12, 8) + 3 * flops(6, 4)
        assert [row["flops"] for row in own["rows"]] == [2 * flops(12, 8), 6 * flops(6, 4)]
        assert not any(row["whole"] for row in own["rows"])


def test_bytes_of_a_matrix_are_two_for_each_element_both_ways_and_its_mean_squares():
    found = run_ranks(placed, 2, [Weight((64, 96), (2,), (0,))], {"beta2": 0.9})
    expected = 2 * (32 * 96) + 2 * (32 * 96) + 4 * 96  # the longer side has the mean squares
    assert [own["rows"][0]["bytes"] for own in found] == [expected] * 2
    assert sum(own["sent"] for own in found) >= expected


@on_ranks(2, pg_timeout=10, timeout=40)
def test_one_rank_may_look_at_what_it_would_do() -> None:
    """What one rank asks for does not make it expect to compare notes with the others."""
    options = {**EXACT, "consistency_check": "plan", "none_grad": False}
    twins = Twins.placed([Group([Weight((8, 4), (2,), (0,))] * 3)], options)
    for step in range(4):
        if dist.get_rank() == 1:
            group, weight = twins.ours.param_groups[0], twins.pairs[step % 3][1]
            for changed in (3, 5):
                group["ns_steps"] = changed
                assert f"×{changed}" in twins.ours.summary().rows[0]["algorithm"]
            weight.requires_grad_(False)
            assert twins.ours.summary().rows[step % 3]["algorithm"] == "frozen"
            weight.requires_grad_(True)
        twins.step_and_compare()
