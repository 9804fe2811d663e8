"""summary() tells what a step does: its FLOPs and bytes are those that a step is counted to have"""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from counters import count
from kernel import optimizer
from layouts import EXACT, Group, Twins, Weight, backward, params_of, part
from models import Model
from ranks import run_ranks

FIELDS = {
    "name",
    "group",
    "shape",
    "dtype",
    "placement",
    "sharded",
    "algorithm",
    "matrices",
    "owners",
    "whole",
    "flops",
    "bytes",
    "clipped",
}

TOTALS = {"flops", "sent_bytes", "received_bytes", "chunks", "in_flight", "balance", "state"}


def flops(rows: int, cols: int) -> int:
    """Of one matrix, with five steps of Polar Express."""
    s, long = sorted((rows, cols))
    return 20 * s * s * long + 5 * 2 * s**3


# -- one device --------------------------------------------------------------------------------


def awkward_groups():
    """(name, shape) of Muon's, of AdamW's, and one that is frozen."""
    matrices = {
        "layers.0.wq.weight": (8, 4),
        "layers.0.wqkv.weight": (16, 4),
        "layers.0.heads.weight": (12, 4),
        "layers.0.experts.w1": (3, 8, 4),
        "layers.0.none.weight": (0, 4),
        "layers.0.frozen.weight": (4, 4),
    }
    others = {"norm.weight": (4,), "scale": (), "nothing": (0,), "embed.weight": (10, 4)}
    muon, adamw = (
        [(name, nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()]
        for shapes in (matrices, others)
    )
    muon[-1][1].requires_grad_(False)
    split = {"wqkv": [8, 4, 4], "heads": 3}
    return [
        {"params": muon, "use_muon": True, "expert_keys": ["experts"], "split": split},
        {"params": adamw, "use_muon": False},
    ]


def test_there_is_a_row_for_every_parameter_in_order():
    optim = optimizer.Muon(awkward_groups())
    summary = optim.summary()
    params = [(n, p) for n, group in enumerate(optim.param_groups) for p in group["params"]]
    assert len(summary.rows) == len(params)
    for row, (number, param) in zip(summary.rows, params):
        assert row.keys() == FIELDS
        assert row["group"] == number
        assert row["shape"] == tuple(param.shape)
        assert row["dtype"] == torch.float32
        assert row["placement"] == "plain"
        assert row["sharded"] is False
        assert row["bytes"] == 0
    names = [row["name"] for row in summary.rows]
    assert names[:6] == optim.names[0]
    assert names[6:] == optim.names[1]
    assert summary.totals.keys() == TOTALS


def test_blocks_heads_and_experts_count_as_matrices():
    optim = optimizer.Muon(awkward_groups())
    rows = {row["name"]: row for row in optim.summary().rows}
    counts = {name: row["matrices"] for name, row in rows.items() if row["matrices"]}
    assert counts == {
        "layers.0.wq.weight": 1,
        "layers.0.wqkv.weight": 3,
        "layers.0.heads.weight": 4,
        "layers.0.experts.w1": 3,
    }
    assert rows["layers.0.wqkv.weight"]["flops"] == flops(8, 4) + 2 * flops(4, 4)
    assert rows["layers.0.heads.weight"]["flops"] == 4 * flops(3, 4)
    assert rows["layers.0.experts.w1"]["flops"] == 3 * flops(8, 4)
    for name, row in rows.items():
        assert row["owners"] == ([0] if name in counts else [])
        assert row["whole"] == (name in counts)


def test_algorithms_are_told():
    groups = awkward_groups()
    complex_vector = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    groups.append({"params": [complex_vector], "use_muon": False})
    groups.append(
        {
            "params": [nn.Parameter(torch.ones(4, 4))],
            "use_muon": True,
            "ns_coefficients": [(15 / 8, -10 / 8, 3 / 8)] * 7,
            "ns_dtype": torch.float64,
        }
    )
    groups.append(
        {
            "params": [nn.Parameter(torch.ones(4608, 512)), nn.Parameter(torch.ones(640, 640))],
            "use_muon": True,
            "ns_dtype": torch.bfloat16,
            "ns_coefficients": "quintic",
        }
    )
    algorithms = [row["algorithm"] for row in optimizer.Muon(groups).summary().rows]
    *rows, without_kernel, own, long, square = algorithms
    short = "Muon, polar_express ×5, standard (shorter side under 512), "
    assert all(text.startswith(short) for text in rows[:5])
    assert rows[5] == "frozen"
    assert rows[6:] == ["AdamW, fused"] * 4
    assert without_kernel == "AdamW"
    assert own == "Muon, own coefficients ×7, standard (shorter side under 512), float64"
    why = r"\(0\.\d\d of the standard form's FLOPs\), bfloat16"
    assert re.fullmatch(rf"Muon, quintic ×5, gram, restarted after 2 and 3 {why}", long)
    assert re.fullmatch(r"Muon, quintic ×5, standard \(the Gram form takes 1\.\d\d .*", square)


def test_flops_are_those_of_a_step():
    optim = optimizer.Muon(awkward_groups())
    for param in params_of(optim):
        param.grad = torch.randn_like(param) if param.requires_grad else None
    summary = optim.summary()
    with FlopCounterMode(display=False) as counter:
        optim.step()
    assert summary.totals["flops"] == counter.get_total_flops() > 0
    assert summary.totals["flops"] == sum(row["flops"] for row in summary.rows)


def columns_of(table: str) -> list[tuple[int, int]]:
    """Where the columns of a table begin and end, by the rule under its head."""
    rule = table.splitlines()[1]
    assert set(rule) == {"-", " "}
    starts = [at for at in range(len(rule)) if rule[at] == "-" and rule[:at][-1:] != "-"]
    return [(start, start + len(rule[start:].split()[0])) for start in starts]


def check_table(summary) -> None:
    """Of names that leave room for the other columns."""
    head, _, *table, last, balance, state = str(summary).splitlines()
    assert all(len(line) <= 100 for line in table)
    columns = columns_of(str(summary))
    labels = ["parameter", "shape", "owner", "FLOPs", "moved by all"]
    assert [head[start:stop].strip() for start, stop in columns] == labels
    rows = {row["name"]: row for row in summary.rows}
    shown = []
    for section in "\n".join(table).strip().split("\n\n"):
        lines = section.splitlines()
        starts = [at for at, line in enumerate(lines) if line.split("  ")[0] in rows]
        title = " ".join(line.strip() for line in lines[: min(starts, default=0)])
        for line in lines[min(starts, default=0) :]:
            cells = [line[start:stop] for start, stop in columns]
            row = rows[cells[0].rstrip()]
            shown.append(row["name"])
            clip = ", QK-Clip" if row["clipped"] else ""
            about = f"{row['dtype']}, {row['placement']}: {row['algorithm']}{clip}"
            assert f"torch.{title}" == about
            for (_, stop), (start, _) in itertools.pairwise(columns):
                assert not line[stop:start].strip()
            assert all(not cell.startswith(" ") for cell in cells[:3])
            assert all(cell.strip() for cell in cells)
            assert len(line) == columns[-1][1]
    assert sorted(shown) == sorted(row["name"] for row in summary.rows)
    assert last.startswith("this rank: ")
    assert balance.startswith("balance: ")
    assert state == f"state: {summary.totals['state']}"


def test_the_table_has_an_aligned_line_for_each_parameter():
    check_table(optimizer.Muon(awkward_groups()).summary())


def summary_of(muon: dict[str, tuple], adamw: dict[str, tuple], is_named: bool = True) -> Any:
    """Of matrices of these names and shapes."""
    groups = []
    for use_muon, shapes in ((True, muon), (False, adamw)):
        params = [(name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]
        params = params if is_named else [param for _, param in params]
        groups.append({"params": params, "use_muon": use_muon})
    return optimizer.Muon(groups).summary()


LAYER = {"l.0.w.weight": (32, 8)}


@pytest.mark.parametrize("is_named", [True, False])
def test_matrices_with_a_vocabulary_are_noted(is_named):
    muon = {"tokens.weight": (2000, 8), **LAYER, "out.weight": (2000, 8)}
    summary = summary_of(muon, {}, is_named)
    names = [summary.rows[index]["name"] for index in (0, 2)]
    assert [note.split()[1] for note in summary.notes] == names
    assert str(summary).splitlines()[-2:] == summary.notes
    head = {"fc.weight": (65, 8), **LAYER}
    (note,) = summary_of(head, {"emb.weight": (65, 8)}, is_named).notes
    assert "has as many rows as " in note


@pytest.mark.parametrize(
    "muon, adamw",
    [
        pytest.param(
            {"l.1.w": (65, 8), "fc.weight": (65, 8)}, {"emb.weight": (65, 8)}, id="hidden"
        ),
        pytest.param({"fc.weight": (16, 8)}, {"wpe.weight": (16, 8)}, id="positions"),
        pytest.param(
            {f"l.{i}.kv_b.weight": (4096, 64) for i in range(2)}, {}, id="latent attention"
        ),
        pytest.param({"head.lora_B.default.weight": (2000, 8)}, {}, id="adapters"),
        pytest.param({"fc1.weight": (64, 6272), "fc2.weight": (64, 64)}, {}, id="many inputs"),
        pytest.param({"0.weight": (1024, 64), "2.weight": (64, 1024)}, {}, id="wide layer"),
    ],
)
def test_matrices_of_hidden_layers_are_not_noted(muon, adamw):
    assert summary_of({**LAYER, **muon}, adamw).notes == []


def test_nameless_parameters_are_told_by_their_place():
    optim = optimizer.Muon([{"params": [nn.Parameter(torch.ones(4, 4))] * 1, "use_muon": True}])
    check_table(optim.summary())
    assert "param_groups[0]" in optim.summary().rows[0]["name"]


@pytest.mark.parametrize("use_muon", [True, False])
def test_groups_without_parameters_have_a_summary(use_muon):
    summary = optimizer.Muon([{"params": [], "use_muon": use_muon}]).summary()
    check_table(summary)
    assert summary.rows == []
    assert summary.totals["flops"] == 0


def test_a_bad_option_set_later_raises_as_in_a_step():
    optim = optimizer.Muon(awkward_groups())
    optim.param_groups[0]["momentum"] = 2.0
    with pytest.raises(ValueError, match=r"param_groups\[0\]: momentum must be"):
        optim.summary()


def test_options_set_later_show():
    optim = optimizer.Muon(awkward_groups())
    before = optim.summary().rows[0]
    optim.param_groups[0]["ns_steps"] = 7
    after = optim.summary().rows[0]
    assert "×7" in after["algorithm"]
    assert after["flops"] * 5 == before["flops"] * 7


def test_the_schedule_is_that_of_the_last_step():
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    bias = nn.Parameter(torch.randn(8))
    groups = [{"params": params, "use_muon": True}, {"params": [bias], "use_muon": False}]
    optim = optimizer.Muon(groups, chunk_size=2)
    assert optim.summary(schedule=True).schedule == []
    for param in (*params, bias):
        param.grad = torch.randn_like(param)
    optim.step()
    way = ["momentum, gather", "orthogonalize, scatter", "update weights"]
    summary = optim.summary(schedule=True)
    assert [event["event"] for event in summary.schedule] == [*way, *way, "AdamW"]
    assert [event["matrices"] for event in summary.schedule] == [0, 2, 0, 0, 1, 0, 0]
    assert sum(event["flops"] for event in summary.schedule) == summary.totals["flops"]
    assert "chunk 1 without traffic" in str(summary)
    assert all(len(line) <= 100 for line in str(summary).splitlines())
    assert optim.summary().schedule == []


def test_a_summary_changes_nothing():
    optim = optimizer.Muon(awkward_groups())
    groups = copy.deepcopy(optim.param_groups)
    first = optim.summary()
    assert not optim.state
    assert [group.keys() for group in optim.param_groups] == [group.keys() for group in groups]
    for param in params_of(optim):
        param.grad = torch.randn_like(param)
    assert not optim.state
    weights = [p.detach().clone() for p in params_of(optim)]
    second = optim.summary()
    assert (first.rows, first.totals) == (second.rows, second.totals)
    now = params_of(optim)
    assert all(torch.equal(p, old) for p, old in zip(now, weights))
    assert all(p.grad is not None for p in now)


# -- sharded -----------------------------------------------------------------------------------


def counted(optim: torch.optim.Optimizer) -> dict:
    """A summary and what a step that begins like it was counted to do."""
    first = optim.summary()
    optim.step()  # creates state and process groups
    summary = optim.summary()
    assert (first.rows, first.totals) == (summary.rows, summary.totals)
    counter = count(optim.step)
    with FlopCounterMode(display=False) as flop_counter:
        optim.step()
    check_table(summary)
    lines = str(optim.summary(schedule=True)).splitlines()
    assert len(lines) > len(str(summary).splitlines())
    assert all(len(line) <= 100 for line in lines)
    return {
        "rows": summary.rows,
        "totals": summary.totals,
        "sent": counter.sent,
        "messages": len(counter.messages),
        "flops": flop_counter.get_total_flops(),
    }


def fsdp2(options: dict) -> dict:
    model = Model()
    model.layers[1].bias.requires_grad_(False)
    model.layers[2].weight.requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    groups = optimizer.muon.get_default_muon_param_groups(model, expert_keys=["experts"])
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    groups[0]["params"] += [p for n, p in frozen if "weight" in n]
    groups[0]["names"] += [n for n, _ in frozen if "weight" in n]
    optim = optimizer.Muon(groups, none_grad=False, **options)
    backward(model, 0)
    return counted(optim)


def placed(weights, options: dict) -> dict:
    meshes = {w.mesh: init_device_mesh("cpu", w.mesh) for w in weights}
    twins = Twins.placed([Group(weights, {"none_grad": False})], meshes, options)
    for _, p, _ in twins.pairs:
        p.grad = part(torch.randn(p.shape), p.device_mesh, p.placements)
    return counted(twins.ours)


OPTIONS = [
    {},
    {"beta2": 0.9},
    {"comm_dtype": torch.float32, "chunk_size": 1, "beta2": 0.9, "second_moment_side": "rows"},
    {"ns_dtype": torch.float64, "beta2": 0.9},
]


def check_counts(found: list[dict], rows: list[dict]) -> None:
    """Totals of each rank, and rows that tell of all parameters once."""
    for own in found:
        assert own["totals"]["sent_bytes"] == own["sent"]
        assert own["totals"]["flops"] == own["flops"]
    sent = sum(own["sent"] for own in found)
    assert sum(own["totals"]["received_bytes"] for own in found) == sent
    # Rows tell of matrices, without the padding behind what two ranks exchange in one direction,
    # and behind the mean squares of each owner, of which all send as many as the one with most.
    matrices = sum(row["matrices"] for row in rows)
    pairs = len(found) * (len(found) - 1)
    padding = 64 * 2 * pairs * matrices + 4 * pairs * max(max(row["shape"]) for row in rows)
    assert 0 <= sent - sum(row["bytes"] for row in rows) < padding
    assert sum(row["flops"] for row in rows) == sum(own["flops"] for own in found)


def check_chunks(found: list[dict], collectives: int = 2) -> None:
    for own in found:
        chunks = own["totals"]["chunks"]
        assert own["messages"] == collectives * chunks
        assert 1 <= own["totals"]["in_flight"] <= chunks


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bytes_and_flops_are_those_of_a_step_under_fsdp2(options):
    found = run_ranks(fsdp2, 4, options)
    dense, experts = [], []
    for own in found:
        dense.append([row for row in own["rows"] if "experts" not in row["name"]])
        experts += [row for row in own["rows"] if "experts" in row["name"]]
    assert all(rows == dense[0] for rows in dense)
    check_counts(found, [*dense[0], *experts])
    check_chunks(found, 3 if "beta2" in options else 2)  # mean squares travel by themselves
    assert found[0]["sent"] > 0
    assert [row["owners"] for row in experts] == [[0], [1], [2], []]  # two each of six
    assert all(row["bytes"] == 0 for row in experts)
    assert [row["whole"] for row in experts] == [True, True, True, False]
    assert {own["totals"]["balance"] for own in found} == {found[0]["totals"]["balance"]}


# By name: ranks whose rows tell of all matrices between them, then weights.
PLACED = {
    "tensor parallelism": ([0], [(12, 8), (2, 2), (0, 1)], [(8, 12), (2, 2), (0, 0)]),
    "columns": ([0], [(12, 8), (4,), (1,)], [(8, 3), (4,), (1,)], [(8, 6), (4,), (1,)]),
    "wide": ([0], [(4, 2048), (4,), (0,)]),
    "few rows": ([0], [(1, 8), (4,), (0,)], [(8, 1), (4,), (1,)], [(3, 6), (4,), (0,)]),
    "replicas": ([0, 2], [(12, 8), (2, 2), (None, 0)], [(8, 6), (2, 2), (None, 1)]),
    "experts": ([0, 2], [(4, 8, 12), (2, 2), (0, 1)], [(3, 6, 4), (2, 2), (0, 2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(OPTIONS[n], marks=pytest.mark.slow) for n in (1, 3))],
    ids=str,
)
@pytest.mark.parametrize("layout", list(PLACED))
def test_bytes_and_flops_are_those_of_a_step_on_any_mesh(layout, options):
    ranks, *weights = PLACED[layout]
    found = run_ranks(placed, 4, [Weight(*weight) for weight in weights], options)
    check_counts(found, [row for rank in ranks for row in found[rank]["rows"]])
    check_chunks(found, 3 if "beta2" in options else 2)
    flops_of_ranks = [own["flops"] for own in found]
    balance = max(flops_of_ranks) * 4 / sum(flops_of_ranks)
    if len(ranks) == 1:
        assert all(own["rows"] == found[0]["rows"] for own in found)
        assert all(own["totals"]["balance"] == pytest.approx(balance) for own in found)


def one_rank_looks() -> None:
    """What one rank asks for does not make it expect to compare notes with the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [Weight((8, 4), tuple(mesh.shape), (0,)) for _ in range(3)]
    options = {"consistency_check": "plan", "none_grad": False}
    twins = Twins.placed([Group(weights)], {weights[0].mesh: mesh}, {**EXACT, **options})
    for step in range(4):
        for _, p, q in twins.pairs:
            q.grad = torch.full(q.shape, float(step + 1))
            p.grad = part(q.grad, p.device_mesh, p.placements)
        if dist.get_rank() == 1:
            group = twins.ours.param_groups[0]
            twins.ours.summary()
            group["ns_steps"] = 3
            assert "×3" in twins.ours.summary().rows[0]["algorithm"]
            group["ns_steps"] = 5
            twins.pairs[step % 3][1].requires_grad_(False)
            assert twins.ours.summary().rows[step % 3]["algorithm"] == "frozen"
            twins.pairs[step % 3][1].requires_grad_(True)
        twins.ours.step()
        twins.reference.step()
        twins.compare()


def test_one_rank_may_look_at_what_it_would_do():
    run_ranks(one_rank_looks, 2, pg_timeout=10, timeout=40)
