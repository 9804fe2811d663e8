"""``split`` by the notation of axes: matrices in blocks, strides and groups of rows and columns.

Expected values come from matrices that are cut out by hand, as lists of rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from comparisons import assert_equal
from kernel import optimizer
from layouts import Group, Weight, check, randn
from reference import ReferenceMuon

FP64 = {"ns_dtype": torch.float64, "comm_dtype": torch.float64}


@dataclass(frozen=True)
class Case:
    """A stored matrix, what ``split`` says of it, and rows and columns of its matrices."""

    shape: tuple[int, ...]
    split: Any
    matrices: Sequence[tuple[Sequence[int], Sequence[int]]]
    options: dict[str, Any] = field(default_factory=dict)


def indices(*shape: int) -> torch.Tensor:
    """Indices of rows or columns, laid out in some axes."""
    return torch.arange(math.prod(shape)).view(shape)


def rows_of(cols: int, *rows: torch.Tensor) -> list[tuple[list[int], list[int]]]:
    return [(some.flatten().tolist(), list(range(cols))) for some in rows]


def cols_of(rows: int, *cols: torch.Tensor) -> list[tuple[list[int], list[int]]]:
    return [(ours, theirs) for theirs, ours in rows_of(rows, *cols)]


BY_GROUP, BY_HEAD, PAIRS, HALVES = indices(3, 16), indices(3, 10), indices(7, 2), indices(4, 2, 3)
NESTED, COLS, BRACKETS = indices(2, 3, 4), indices(2, 6), indices(2, 2, 2, 2)
CASES = {
    "blocks of rows": Case(
        (20, 6), "(q=12 + k=4 + v=4) dim", rows_of(6, *indices(20).split([12, 4, 4]))
    ),
    "sizes without names": Case((8, 6), "(5 + 3) 6", rows_of(6, *indices(8).split([5, 3]))),
    "by query group": Case(
        (48, 10), "(group (q=8 + k=4 + v=4)) dim", rows_of(10, *BY_GROUP.split([8, 4, 4], 1))
    ),
    "gate and up, row by row": Case((14, 6), "(n (gate=1 + up=1)) dim", rows_of(6, *PAIRS.T)),
    "columns of equal width": Case((6, 24), "dim (c + c + c)", cols_of(6, *indices(3, 8))),
    "gate and up, column by column": Case((8, 14), "dim (n (gate=1 + up=1))", cols_of(8, *PAIRS.T)),
    "heads": Case((20, 6), "([head] 4) dim", rows_of(6, *indices(5, 4))),
    "query, key and value of each head": Case(
        (30, 7),
        "([head] (q=4 + k=4 + v=2)) dim",
        rows_of(7, *(head for part in BY_HEAD.split([4, 4, 2], 1) for head in part)),
    ),
    "one matrix for each index of an inner axis": Case(
        (24, 5), "(group [half=2] 3) dim", rows_of(5, HALVES[:, 0], HALVES[:, 1])
    ),
    "rows and columns": Case(
        (10, 12),
        "(a=4 + b=6) (n (5 + 1))",
        [
            (rows.tolist(), cols.flatten().tolist())
            for rows in indices(10).split([4, 6])
            for cols in COLS.split([5, 1], 1)
        ],
    ),
    "groups in groups": Case(
        (2 * 3 * 4 + 5, 9),
        "((outer=2 (inner=3 (q=2 + k=1 + v))) + rest=5) dim",
        rows_of(9, *NESTED.split([2, 1, 1], 2), 24 + indices(5)),
    ),
    # Shards cut it within an outer index whose matrices lie whole on either side.
    "one matrix for each index of an inner axis, and a rest": Case(
        (30, 6),
        "((group=2 [half=3] 3) + rest) dim",
        rows_of(6, *indices(2, 3, 3).unbind(1), 18 + indices(12)),
    ),
    "brackets in brackets, of columns": Case(
        (6, 32),
        "dim (([a=2] g=2 [b=2] 2) + r=16)",
        cols_of(6, *(BRACKETS[a, :, b] for a in (0, 1) for b in (0, 1)), 16 + indices(16)),
    ),
    "blocks of columns of heads": Case(
        (6, 24),
        "dim ([head] (q=4 + k=4))",
        cols_of(6, *indices(3, 2, 4)[:, 0], *indices(3, 2, 4)[:, 1]),
    ),
}


def gradients(*shape: int) -> list[torch.Tensor]:
    """Returns the gradients of three steps."""
    return [randn(*shape, seed=step, dtype=torch.float64) for step in range(3)]


def stepped(param: torch.nn.Parameter, **group: Any) -> torch.optim.Optimizer:
    """An optimizer that has taken three steps."""
    settings = {key: group.pop(key) for key in FP64 if key in group}
    name = "experts" if param.ndim > 2 else "layers.0"
    group = {"params": [param], "names": [name], "use_muon": True, **group}
    optim = optimizer.Muon([group], lr=0.05, **settings)
    for grad in gradients(*param.shape):
        param.grad = grad.to(param.dtype)
        optim.step()
    return optim


@pytest.mark.parametrize(
    "options",
    [{}, {"beta2": 0.9, "momentum_style": "ema", "adjust_lr": "original"}, {"cautious": True}],
    ids=["defaults", "second moment", "cautious"],
)
@pytest.mark.parametrize("name", CASES)
def test_each_part_takes_the_steps_of_a_matrix_of_its_own(name, options):
    case = CASES[name]
    start = randn(*case.shape, seed=9, dtype=torch.float64)
    param = torch.nn.Parameter(start.clone())
    optim = stepped(param, split=case.split, **FP64, **options)

    def cut(tensor):
        return [tensor[list(rows)][:, list(cols)] for rows, cols in case.matrices]

    assert sum(len(rows) * len(cols) for rows, cols in case.matrices) == start.numel()
    reference = ReferenceMuon(cut(start), {"lr": 0.05, **options})
    for grad in gradients(*case.shape):
        reference.step(cut(grad))
    rounding = 1e-6 if "beta2" in options else 1e-9  # second moments are in fp32
    for ours, expected in zip(cut(param.detach()), reference.weights):
        torch.testing.assert_close(ours, expected, rtol=rounding, atol=rounding)
    state = optim.state[param]
    for ours, expected in zip(cut(state["momentum_buffer"]), reference.momentum):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    if "beta2" in options:
        expected = torch.cat(reference.second_moment).float()
        torch.testing.assert_close(state["second_momentum_buffer"], expected)


OF_STACKS: list[tuple[tuple[int, ...], dict[str, Any], Any]] = [
    (
        (3, 8, 14),
        {"split": "dim (n (gate=1 + up=1))", "expert_keys": ["experts"]},
        lambda experts: [expert[:, i::2] for expert in experts for i in (0, 1)],
    ),
    (
        (12, 5, 3, 3),
        {"split": "([group=3] out) in", "flatten": True},
        lambda kernel: kernel.flatten(1).split(4),
    ),
]


@pytest.mark.parametrize("shape, options, matrices", OF_STACKS)
def test_experts_are_parted_each_and_flattened_kernels_by_group(shape, options, matrices):
    param = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    reference = ReferenceMuon(matrices(param), {"lr": 0.05})
    stepped(param, **options, **FP64)
    for grad in gradients(*shape):
        reference.step(matrices(grad))
    for ours, expected in zip(matrices(param.detach()), reference.weights):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("as_counts", "as_axes"),
    [([12, 4, 4], "(12 + 4 + 4) dim"), (4, "([head] 4) dim"), (20, "rows dim"), (None, "r d")],
)
def test_counts_and_axes_that_say_the_same_take_the_same_steps(as_counts, as_axes):
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 120).view(20, 6)) for _ in range(2)]
    splits = zip(params, (as_counts, as_axes))
    states = [stepped(p, split=split, beta2=0.9).state[p] for p, split in splits]
    assert_equal([params[0], states[0]], [params[1], states[1]])


def groups_of(weights):
    """For each case a group of weights of its shape."""
    return {
        name: [Group(weights(case.shape), {"split": case.split})] for name, case in CASES.items()
    }


# With a second moment, matrices that are whole on a rank take part in the exchange.
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8))]
)
def test_every_split_on_fsdp2_and_tensor_parallelism_takes_the_steps_of_one_device(ranks):
    cases = groups_of(lambda shape: [Weight(shape, (ranks,), (dim,)) for dim in (0, 1)])
    others = {"ns_dtype": torch.float32, "cautious": True} if ranks in (3, 8) else {}
    check(ranks, cases, [others, {"beta2": 0.9}])


@pytest.mark.slow
def test_every_split_on_fsdp2_over_tensor_parallelism_takes_the_steps_of_one_device():
    dims = [(0, 0), (0, 1), (1, 1), (None, 0)]
    check(4, groups_of(lambda shape: [Weight(shape, (2, 2), each) for each in dims]))


def test_experts_parted_by_columns_on_every_mesh_take_the_steps_of_one_device():
    split = {"split": "dim (n (gate=1 + up=1))", "expert_keys": ["experts"]}
    layouts = {"EP": ((4,), (0,)), "rows": ((4,), (1,)), "columns": ((4,), (2,))}
    layouts["EP and columns"] = ((2, 2), (0, 2))
    check(4, {name: [Group([Weight((5, 8, 14), *at)], split)] for name, at in layouts.items()})


# What is refused


@pytest.mark.parametrize(
    ("split", "word"),
    [
        ("(q=4 + k=4)", ""),
        ("a b c", ""),
        ("(q=4 + ) dim", "'('"),
        ("(q=4 dim", "'('"),
        ("q=4) dim", "')'"),
        ("[a b] dim", "brackets"),
        ("q=1_0 dim", "'='"),
        ("q*4 dim", "'*'"),
        ("q=0 dim", "q=0"),
        ("(q=4 + k=5) dim", "wqkv has 20 rows"),
        ("(g (q=3 + k=4)) dim", "wqkv"),
        ("(q + k) dim", "['q', 'k']"),
        ("(g (g + 1)) dim", "'g'"),
        ("(q=4 + q=16) dim", ""),
        ("rows (a=2 + b=5)", "wqkv has 6 columns"),
        ("(g (q=10 + k=11)) dim", "wqkv"),
    ],
)
def test_a_split_that_does_not_fit_raises_with_its_words_and_the_parameter(split, word):
    group = {"params": [("wqkv", torch.nn.Parameter(torch.ones(20, 6)))], "use_muon": True}
    for given in (split, {"wqkv": split}):
        with pytest.raises(ValueError, match=r"wqkv|param_groups\[0\]") as raised:
            optimizer.Muon([{**group, "split": given}])
        assert "split" in str(raised.value) and word in str(raised.value)


def test_columns_of_a_flattened_kernel_are_not_parted():
    group = {"params": [torch.nn.Parameter(torch.ones(4, 4, 3))], "use_muon": True}
    for split, words in ("out (a + a)", "has flattened columns"), ("out c=7", "has 12 columns"):
        with pytest.raises(ValueError, match=words):
            optimizer.Muon([{**group, "flatten": True, "split": split}])
    optimizer.Muon([{**group, "flatten": True, "split": "(2 + out) (c)"}])
