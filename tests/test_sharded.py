"""DTensor parameters take the steps of plain ones: real gloo ranks, Muon's matrices bit for bit.

AdamW's are compared within its rounding: torch's kernel rounds the last elements of a tensor, which
do not fill a vector register, differently, and shards end elsewhere.
"""

from __future__ import annotations

import copy
import itertools
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from kernel import optimizer
from ranks import rank_outcomes, run_ranks

EXACT = {"ns_dtype": torch.float32, "comm_dtype": torch.float32}
STEPS = 3
ADAMW_ROUNDING = 1e-6


class Experts(nn.Module):
    def __init__(self, count: int, cols: int, rows: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, rows, cols) / cols**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eoi->bo", x, self.w1) / len(self.w1)


class Model(nn.Module):
    """Row counts that 2 and 4 ranks divide evenly, unevenly, and into empty shards."""

    def __init__(self, widths: tuple[int, ...] = (16, 24, 10, 3, 1, 32), experts: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(50, widths[0])
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))
        self.experts = Experts(experts, widths[-1], 20)
        self.lm_head = nn.Linear(20, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.lm_head(self.experts(x))


def make(model: nn.Module, **options):
    groups = optimizer.muon.get_default_muon_param_groups(model, expert_keys=["experts"])
    return optimizer.Muon(groups, lr=0.02, expert_keys=["experts"], **options)


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    tokens = torch.randint(0, 50, (8,), generator=generator)
    nn.functional.cross_entropy(model(tokens), tokens).backward()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(name: str, ours: torch.Tensor, reference: torch.Tensor, atol: float) -> None:
    def message(text: str) -> str:
        return f"{name}: {text}"

    torch.testing.assert_close(whole(ours), reference, rtol=0, atol=atol, msg=message)


def assert_equal_steps(sharded: nn.Module, plain: nn.Module, atol: float = 0.0, **options) -> None:
    """Steps both models with the sharded one's gradients; weights and state must agree."""
    ours, reference = make(sharded, **options), make(plain, **options)
    for step in range(STEPS):
        backward(sharded, step)
        for p, q in zip(sharded.parameters(), plain.parameters()):
            q.grad = whole(p.grad).clone() if p.grad is not None else None
        ours.step()
        reference.step()
    for (name, p), q in zip(sharded.named_parameters(), plain.parameters()):
        is_muon = "momentum_buffer" in ours.state[p]
        assert_same(name, p, q, atol if is_muon else ADAMW_ROUNDING)
        assert ours.state[p].keys() == reference.state[q].keys()
        if is_muon and atol == 0.0:
            assert ours.state[p]["momentum_buffer"].placements == p.placements
            for key, value in ours.state[p].items():
                assert_same(f"{key} of {name}", value, reference.state[q][key], 0.0)


def fsdp2(widths, experts, options):
    model = Model(widths, experts)
    plain = copy.deepcopy(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert_equal_steps(model, plain, **options)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta2": 0.9, "cautious": True, "decay_lr": "adjusted"},
        {"momentum_style": "ema", "nesterov": False, "adjust_lr": "original", "chunk_size": 1},
        {"split": {"layers.0": [4, 4, 16], "layers.1": 5, "experts": 10}, "beta2": 0.9},
        {"momentum_dtype": torch.bfloat16, "ns_norm": "schatten4", "maximize": True},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_fsdp2_equals_one_process_exactly(world_size, options):
    run_ranks(fsdp2, world_size, (16, 24, 10, 3, 1, 32), 6, {**EXACT, **options})


def test_fsdp2_with_fewer_rows_and_experts_than_ranks_equals_one_process_exactly():
    run_ranks(fsdp2, 4, (8, 1, 2, 3, 16), 2, EXACT)


def test_fsdp2_with_the_default_formats_stays_within_their_rounding():
    # bf16 on the wire and in the iteration: 2^-9 relative per element before and after, which the
    # first, steepest polynomial amplifies on the smallest singular values.
    run_ranks(fsdp2, 2, (16, 24, 10, 32), 4, {"atol": 0.02 * STEPS * 0.3})


def two_dimensional_mesh(placements, options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = Model((16, 24, 10, 32), 6)
    plain = copy.deepcopy(model)
    ours, reference = make(model, **options), make(plain, **options)
    for group in ours.param_groups:  # as trainers do that shard after construction
        group["params"] = [
            nn.Parameter(distribute_tensor(p.detach(), mesh, placements(p)))
            for p in group["params"]
        ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for group, twin in zip(ours.param_groups, reference.param_groups):
            for p, q in zip(group["params"], twin["params"]):
                q.grad = torch.randn(q.shape, generator=generator)
                p.grad = distribute_tensor(q.grad, mesh, p.placements)
        ours.step()
        reference.step()
    for names, group, twin in zip(ours.names, ours.param_groups, reference.param_groups):
        for name, p, q in zip(names, group["params"], twin["params"]):
            assert_same(name, p, q, 0.0 if group["use_muon"] else ADAMW_ROUNDING)


def rows_then_columns(p):
    return [Shard(0), Shard(p.ndim - 1)]


def both_on_rows(p):
    return [Shard(0), Shard(0)]


def replicas_and_shards(p):
    return [Replicate(), Shard(0)]


def middle_dimension(p):
    return [Shard(max(0, p.ndim - 2)), Replicate()]


@pytest.mark.parametrize(
    "placements", [rows_then_columns, both_on_rows, replicas_and_shards, middle_dimension]
)
@pytest.mark.parametrize(
    "options", [{}, {"beta2": 0.9, "split": {"layers.0": [4, 4, 16]}}], ids=str
)
def test_two_dimensional_meshes_equal_one_process_exactly(placements, options):
    run_ranks(two_dimensional_mesh, 4, placements, {**EXACT, **options})


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = FeedForward()
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert type(model.up.weight.placements[0]).__name__ == "_StridedShard"
    ours, reference = make(model, **EXACT), make(plain, **EXACT)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            q.grad = whole(p.grad).clone()
        ours.step()
        reference.step()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(whole(p), q)


def test_fsdp2_over_tensor_parallel_equals_one_process_exactly():
    run_ranks(tensor_parallel, 4)


def skip_nonfinite():
    model = Model((16, 24, 10, 32), 6)
    plain = copy.deepcopy(model)
    fully_shard(model)
    ours = make(model, nonfinite="skip", beta2=0.9, **EXACT)
    reference = make(plain, nonfinite="skip", beta2=0.9, **EXACT)
    for step in range(STEPS):
        backward(model, step)
        if step == 1:  # one element, on one rank only
            for p, row in ((model.layers[0].weight, 23), (model.experts.w1, 4)):
                mine = p.grad.to_local()
                first = dist.get_rank() * -(-p.shape[0] // dist.get_world_size())
                if first <= row < first + len(mine):
                    mine[row - first].flatten()[3] = float("nan")
        for p, q in zip(model.parameters(), plain.parameters()):
            q.grad = whole(p.grad).clone()
        ours.step()
        reference.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert_same(name, p, q, 0.0 if "momentum_buffer" in ours.state[p] else ADAMW_ROUNDING)
        assert torch.isfinite(whole(p)).all()


def test_a_nan_on_one_rank_is_skipped_on_all():
    run_ranks(skip_nonfinite, 4)


def mixed_precision():
    model = Model((16, 24, 32), 4)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = copy.deepcopy(model)
    fully_shard(model, mp_policy=policy)
    assert_equal_steps(model, plain, **EXACT)


def test_mixed_precision_keeps_weights_and_momentum_in_fp32():
    run_ranks(mixed_precision, 2)


def parameter_without_gradient():
    model = Model((16, 24, 10, 32), 4)
    plain = copy.deepcopy(model)
    fully_shard(model)
    for m in (model, plain):
        m.layers[1].weight.requires_grad_(False)
        m.layers[0].bias.requires_grad_(False)
    assert_equal_steps(model, plain, **EXACT)


def test_frozen_sharded_parameters_are_left_alone():
    run_ranks(parameter_without_gradient, 2)


def train(model, optim, steps):
    for step in steps:
        backward(model, step)
        optim.step()
        optim.zero_grad()


def save(directory):
    model = Model((16, 24, 10, 3, 32), 6)
    fully_shard(model)
    optim = make(model, beta2=0.9, **EXACT)
    train(model, optim, range(3))
    model_state, optim_state = get_state_dict(model, optim)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=directory)
    return {k: whole(v).clone() for k, v in model.state_dict().items()}, flat_state(model, optim)


def load(directory):
    model = Model((16, 24, 10, 3, 32), 6)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    fully_shard(model)
    optim = make(model, beta2=0.9, **EXACT)
    model_state, optim_state = get_state_dict(model, optim)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=directory)
    set_state_dict(model, optim, model_state_dict=model_state, optim_state_dict=optim_state)
    return {k: whole(v).clone() for k, v in model.state_dict().items()}, flat_state(model, optim)


def flat_state(model, optim):
    return {
        f"{name}.{key}": whole(value).clone()
        for name, p in model.named_parameters()
        for key, value in optim.state[p].items()
    }


@pytest.mark.parametrize("ranks", [(4, 2), (2, 4), (2, 2)])
def test_a_checkpoint_loads_on_another_number_of_ranks(ranks):
    with tempfile.TemporaryDirectory() as directory:
        saved = run_ranks(save, ranks[0], directory)[0]
        loaded = run_ranks(load, ranks[1], directory)[0]
    for before, after in zip(saved, loaded):
        assert before.keys() == after.keys()
        for name in before:
            assert torch.equal(before[name], after[name]), name


def partial_placement():
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [Partial()]))
    optimizer.Muon([{"params": [weight], "names": ["layers.0.wq.weight"], "use_muon": True}])


def test_a_partial_placement_raises_on_every_rank_and_names_the_parameter():
    for outcome in rank_outcomes(partial_placement, 2):
        assert outcome.error == "ValueError"
        assert "layers.0.wq.weight has placement Partial" in outcome.message
        assert "redistribute" in outcome.message


def gradient_placed_otherwise():
    mesh = init_device_mesh("cpu", (2,))
    weights = [
        nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(2)
    ]
    optim = optimizer.Muon(
        [{"params": weights, "names": ["a.weight", "b.weight"], "use_muon": True}]
    )
    weights[0].grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    weights[1].grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    try:
        optim.step()
    finally:
        assert not optim.state
        assert all(torch.equal(w.to_local(), torch.ones(2, 4)) for w in weights)


def test_a_gradient_placed_unlike_its_parameter_raises_before_anything_moved():
    for outcome in rank_outcomes(gradient_placed_otherwise, 2):
        assert outcome.error == "ValueError"
        assert outcome.message.startswith("b.weight is ")
