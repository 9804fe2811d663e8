"""DTensors that can't be stepped raise on every rank, by the name of the parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from kernel import optimizer
from ranks import DEVICE, rank_outcomes


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
