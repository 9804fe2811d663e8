"""DTensors that can't be stepped raise on every rank, by the name of the parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from breaking import refused
from kernel import optimizer
from layouts import case, part
from ranks import DEVICE, on_ranks

RANKS, NAME = 4, "layers.0.wq.weight"

AFTER_2_10 = "use_strided_shard_as_shard_order" in DTensorSpec.__dataclass_fields__
ROWS = torch.arange(4.0)[:, None].expand(4, 4).contiguous()  # row i is full of i


def rows_cut_in(
    order: tuple[int, int],
    mesh_shape: tuple[int, int] = (2, 2),
    strided: bool = False,
    requires_grad: bool = True,
    whole: torch.Tensor = ROWS,
) -> Any:
    """Four rows, cut by the mesh dimensions in an order. nn.Parameter would lose the order."""
    mesh = init_device_mesh(DEVICE, mesh_shape, mesh_dim_names=("dp", "tp"))
    row = 0
    for dim in order:
        row = row * mesh_shape[dim] + mesh.get_local_rank(dim)
    keys: Any = {"use_strided_shard_as_shard_order": False} if strided and AFTER_2_10 else {}
    spec = DTensorSpec(
        mesh,
        (_StridedShard(0, split_factor=2) if strided else Shard(0), Shard(0)),
        tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype),
        shard_order=(ShardOrderEntry(0, order),),
        **keys,
    )
    return DTensor(whole[row : row + 1].to(DEVICE, copy=True), spec, requires_grad=requires_grad)


def optimizer_of(*weights: Any, use_muon: bool = True, **options: Any) -> Any:
    names = [NAME, "other.weight"][: len(weights)]
    group = {"params": list(weights), "names": names, "use_muon": use_muon}
    return optimizer.Muon([group], lr=0.5, exact=True, **options)


# -- what is made, stepped or loaded ---------------------------------------------------------------


def on_mesh(local: torch.Tensor, placements: list[Any], *shape: int) -> Any:
    mesh = init_device_mesh(DEVICE, (RANKS,))
    how: Any = {"run_check": False, "shape": shape, "stride": (4, 1)}
    return nn.Parameter(DTensor.from_local(local, mesh, placements, **how))


def step(weight: Any) -> None:
    weight.grad = torch.ones_like(weight)
    optimizer_of(weight).step()


def step_what_was_swapped_for_one_out_of_order() -> None:
    optim = optimizer_of(rows_cut_in((0, 1)))
    optim.param_groups[0]["params"] = [rows_cut_in((1, 0))]
    optim.step()


def load(momentum: Any) -> None:
    optim = optimizer_of(rows_cut_in((0, 1)))
    saved = optim.state_dict()
    saved["state"][0]["momentum_buffer"] = momentum
    optim.load_state_dict(saved)


def clip_by_logits_out_of_order() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    weight.grad = torch.zeros(8, 8)
    logits = rows_cut_in((1, 0), requires_grad=False, whole=torch.full((4,), 200.0))
    optimizer_of(weight, clip_config={"head_dim": 2}).step(qk_logits={0: logits})


UNORDERED = r".*dimension 0 cut by tp before dp"
CUT = (0, 1, 3, 0)  # rows of four, which torch would not cut like that


@on_ranks(RANKS, pg_timeout=20)
def test_what_is_placed_as_no_step_can_take_it_raises_on_every_rank_and_names_the_parameter():
    partial = on_mesh(torch.ones(4, 4), [Partial()], 4, 4)
    unlike_chunk = on_mesh(torch.ones(CUT[dist.get_rank()], 4), [Shard(0)], 4, 4)
    unordered, constant = rows_cut_in((1, 0)), rows_cut_in((1, 0), requires_grad=False)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: optimizer_of(partial), rf"{NAME} .*Partial.*redistribute"),
        (lambda: step(unlike_chunk), rf"{NAME} is \[Shard\(dim=0\)\].*torch\.chunk"),
        (lambda: optimizer_of(unordered), NAME + UNORDERED),
        (lambda: optimizer_of(unordered, use_muon=False), NAME + UNORDERED),
        (step_what_was_swapped_for_one_out_of_order, NAME + UNORDERED),
        (lambda: load(constant), NAME + UNORDERED),
        (lambda: load(torch.ones(4, 4)), rf"{NAME} .*plain"),
        (clip_by_logits_out_of_order, rf"layer 0{UNORDERED}.*logits\.full_tensor\(\)"),
    ]
    for number, (call, words) in enumerate(calls):
        with case(str(number)), pytest.raises(ValueError, match=words):
            call()
        dist.barrier()


@on_ranks(8, pg_timeout=20)
def test_uneven_strides_that_no_shard_of_a_shard_has_are_refused_by_all():
    """As `distribute_tensor` cuts them; FSDP2 over TP does otherwise."""
    mesh = init_device_mesh(DEVICE, (4, 2))
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    with pytest.raises(ValueError, match=rf"{NAME} is .*torch\.chunk"):
        step(nn.Parameter(part(torch.ones(9, 4), mesh, placements)))


# -- gradients -------------------------------------------------------------------------------------


def advised(message: str, **names: Any) -> Any:
    """What comes of the code in a message."""
    code = re.search(r"distribute_tensor\(.*?placements\)", message)
    assert code is not None, message
    return eval(code[0], {"distribute_tensor": distribute_tensor}, names)


@on_ranks(RANKS, pg_timeout=20)
def test_a_gradient_placed_unlike_its_parameter_raises_before_anything_moved() -> None:
    """Placed unlike their parameters, on all ranks or on one."""
    mesh, ones = init_device_mesh(DEVICE, (RANKS,)), torch.ones(4, 4)
    weights = [nn.Parameter(part(ones, mesh, [Shard(0)])) for _ in range(2)]
    optim = optimizer_of(*weights)
    weights[0].grad = torch.ones_like(weights[0])
    for placement in (Shard(1), Replicate()):
        weights[1].grad = part(ones, mesh, [placement])
        refused(optim, r"^other\.weight is ")
    for use_muon in (True, False):
        for bad in (range(RANKS), [2]):
            weight = rows_cut_in((0, 1))
            order = (1, 0) if dist.get_rank() in bad else (0, 1)
            weight.grad = rows_cut_in(order, requires_grad=False)
            optim = optimizer_of(weight, use_muon=use_muon)
            advice = refused(optim, f"{NAME} is .*gradient{UNORDERED}")
            if len(bad) == RANKS:
                weight.grad = advised(advice, p=weight)
                optim.step()


@on_ranks(RANKS)
def test_orders_that_change_no_shard_step_as_one_device_does() -> None:
    unordered = rows_cut_in((1, 0))
    with pytest.raises(ValueError) as raised:
        optimizer_of(unordered)
    with torch.no_grad():
        remedied = advised(str(raised.value), tensor=unordered)
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
