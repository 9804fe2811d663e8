"""DTensors that can't be stepped raise on every rank, by the name of the parameter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from kernel import optimizer
from ranks import DEVICE, rank_outcomes, run_ranks


def partial_placement():
    mesh = init_device_mesh(DEVICE, (2,))
    weight = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [Partial()]))
    optimizer.Muon([{"params": [weight], "names": ["layers.0.wq.weight"], "use_muon": True}])


def test_a_partial_placement_raises_on_every_rank_and_names_the_parameter():
    for outcome in rank_outcomes(partial_placement, 2):
        assert outcome.error == "ValueError"
        assert "layers.0.wq.weight has placement Partial" in outcome.message
        assert "redistribute" in outcome.message


def gradient_placed_otherwise():
    mesh = init_device_mesh(DEVICE, (2,))
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


PLACED = "[Shard(dim=0), Shard(dim=0)] on (dp=2, tp=2)"
UNORDERED = f"{PLACED}, dimension 0 cut by tp before dp"
AFTER_2_10 = "use_strided_shard_as_shard_order" in DTensorSpec.__dataclass_fields__
ROWS = torch.arange(4.0)[:, None].expand(4, 4).contiguous()  # row i is full of i


def rows_cut_in(order, mesh_shape=(2, 2), strided=False, requires_grad=True, whole=ROWS):
    """Four rows, cut by the mesh dimensions in an order. nn.Parameter would lose the order."""
    mesh = init_device_mesh(DEVICE, mesh_shape, mesh_dim_names=("dp", "tp"))
    row = 0
    for dim in order:
        row = row * mesh_shape[dim] + mesh.get_local_rank(dim)
    keys = {"use_strided_shard_as_shard_order": False} if strided and AFTER_2_10 else {}
    spec = DTensorSpec(
        mesh,
        (_StridedShard(0, split_factor=2) if strided else Shard(0), Shard(0)),
        tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype),
        shard_order=(ShardOrderEntry(0, order),),
        **keys,
    )
    return DTensor(whole[row : row + 1].to(DEVICE, copy=True), spec, requires_grad=requires_grad)


def optimizer_of(weight, use_muon=True):
    group = {"params": [weight], "names": ["layers.0.wq.weight"], "use_muon": use_muon}
    return optimizer.Muon([group], lr=0.5, exact=True)


def parameter_out_of_order(use_muon):
    optimizer_of(rows_cut_in((1, 0)), use_muon)


@pytest.mark.parametrize("use_muon", [True, False])
def test_shards_out_of_the_order_of_the_mesh_raise_and_say_what_to_write(use_muon):
    for outcome in rank_outcomes(parameter_out_of_order, 4, use_muon):
        assert outcome.error == "ValueError"
        assert f"layers.0.wq.weight is {UNORDERED}; only shards" in outcome.message
        assert "distribute_tensor(tensor.full_tensor(), tensor.device_mesh, " in outcome.message


def parameter_swapped_for_one_out_of_order():
    optim = optimizer_of(rows_cut_in((0, 1)))
    weight = rows_cut_in((1, 0))
    weight.grad = rows_cut_in((1, 0), requires_grad=False)
    optim.param_groups[0]["params"] = [weight]
    optim.step()


def test_a_parameter_that_was_swapped_for_one_out_of_order_raises():
    for outcome in rank_outcomes(parameter_swapped_for_one_out_of_order, 4):
        assert outcome.error == "ValueError"
        assert f"layers.0.wq.weight is {UNORDERED}; only shards" in outcome.message


def gradient_out_of_order(use_muon, on_ranks):
    weight = rows_cut_in((0, 1))
    optim = optimizer_of(weight, use_muon)
    order = (1, 0) if dist.get_rank() in on_ranks else (0, 1)
    weight.grad = rows_cut_in(order, requires_grad=False)
    try:
        optim.step()
    finally:
        assert not optim.state and torch.equal(weight.full_tensor().cpu(), ROWS)


@pytest.mark.parametrize("on_ranks", [[0, 1, 2, 3], [2]], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("use_muon", [True, False])
def test_a_gradient_out_of_the_order_of_the_mesh_raises_before_anything_moved(use_muon, on_ranks):
    for outcome in rank_outcomes(gradient_out_of_order, 4, use_muon, on_ranks):
        assert outcome.error == "ValueError"
        assert f"layers.0.wq.weight is {PLACED} but its gradient {UNORDERED}; " in outcome.message
        assert "p.grad = distribute_tensor(p.grad.full_tensor(), " in outcome.message


def state_out_of_order():
    weight = rows_cut_in((0, 1))
    optim = optimizer_of(weight)
    weight.grad = rows_cut_in((0, 1), requires_grad=False)
    optim.step()
    saved = optim.state_dict()
    saved["state"][0]["momentum_buffer"] = rows_cut_in((1, 0), requires_grad=False)
    optim.load_state_dict(saved)


def test_state_out_of_the_order_of_the_mesh_raises():
    for outcome in rank_outcomes(state_out_of_order, 4):
        assert outcome.error == "ValueError"
        assert f"is {UNORDERED}, where it should be " in outcome.message


def logits_out_of_order():
    weight = torch.ones(8, 8, requires_grad=True)
    weight.grad = torch.zeros(8, 8)
    group = {"params": [("layers.0.wq.weight", weight)], "use_muon": True}
    optim = optimizer.Muon([group], clip_config={"head_dim": 2})
    logits = torch.full((4,), 200.0)
    optim.step(qk_logits={0: rows_cut_in((1, 0), requires_grad=False, whole=logits)})


def test_logits_out_of_the_order_of_the_mesh_raise():
    for outcome in rank_outcomes(logits_out_of_order, 4):
        assert outcome.error == "ValueError"
        assert f"of layer 0 are {UNORDERED}: give logits.full_tensor()" in outcome.message


def step_in_orders_that_are_the_meshs():
    unordered = rows_cut_in((1, 0))
    whole = unordered.full_tensor().detach()
    remedied = distribute_tensor(whole, unordered.device_mesh, unordered.placements)
    weights = {
        "as the message has it": nn.Parameter(remedied),
        "a dimension of one rank": rows_cut_in((1, 0), (4, 1)),
        "strided shards, which say the order": rows_cut_in((1, 0), strided=True),
    }
    for name, weight in weights.items():
        twin = nn.Parameter(ROWS.to(DEVICE, copy=True))
        row = int(weight.to_local()[0, 0])
        twin.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        weight.grad = DTensor(twin.grad[row : row + 1].clone(), weight._spec, requires_grad=False)
        for each in (weight, twin):
            optimizer_of(each).step()
        assert torch.equal(weight.to_local(), twin[row : row + 1]), name
        assert not torch.equal(twin.cpu(), ROWS)


def test_orders_that_change_no_shard_step_as_one_device_does():
    run_ranks(step_in_orders_that_are_the_meshs, 4)
