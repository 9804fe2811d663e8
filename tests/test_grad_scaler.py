"""torch.amp.GradScaler: steps of unscaled gradients, skipped on all ranks alike or on none.

Torch decides alone wherever its check reaches all ranks that step together. One rank that it did
not reach would leave the others waiting in their step, so these tests would time out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Shard

from breaking import contents, refused
from comparisons import assert_equal
from kernel import optimizer
from layouts import EXACT, Group, Twins, Weight, local, params_of, part, part_for
from ranks import on_ranks, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

FOUR, SQUARE = (4,), (2, 2)
ROWS, COLUMNS = Weight((16, 12), FOUR, (0,)), Weight((8, 16), SQUARE, (0, 1))
REPLICAS, UNEVEN = Weight((12, 16), SQUARE, (None, 0)), Weight((3, 8), FOUR, (0,))
REDUNDANT, WHOLE = Weight((16, 12), SQUARE, (0, None)), [Weight((12, 16)), Weight((8, 8))]
# Weights, and whether the scaler calls every step, since torch's check does not reach all ranks.
LAYOUTS: dict[str, tuple[list[Weight], bool]] = {
    "FSDP2": ([ROWS, UNEVEN, Weight((16, 8), FOUR, (1,))], False),
    "FSDP2 over TP": ([Weight((16, 8), SQUARE, (0, 0)), COLUMNS, REDUNDANT], False),
    "replicas over TP first": ([REDUNDANT, COLUMNS], True),
    "HSDP": ([REPLICAS, Weight((8, 8), SQUARE, (None, 1))], False),
    "HSDP beside shards of all": ([REPLICAS, ROWS], True),
    "experts on a mesh of their own": ([Weight((4, 8, 16), SQUARE, (0, 1)), ROWS], False),
    "DDP": (WHOLE, False),
    "ZeRO-2": (WHOLE, True),
}


def twins_on(layout: str, **options: Any) -> Twins:
    weights, _ = LAYOUTS[layout]
    options = {**EXACT, "beta2": 0.9, "weight_decay": 0.1, **options}
    group: dict[str, Any] = {"process_group": dist.group.WORLD} if weights is WHOLE else {}
    if layout == "ZeRO-2":
        group["grad_reduce"] = "mean"
    return Twins.placed([Group(weights)], {**options, **group}, reference=options)


def new_scaler(kind: type = torch.amp.GradScaler) -> Any:
    torch.set_num_threads(1)
    scaler = kind(device="cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # which is when it makes its scale
    return scaler


def set_scaled(twins: Twins, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for _, p, q in twins.pairs:
        q.grad = torch.randn(q.shape, generator=generator)
        p.grad = part_for(p, q.grad * scale)


def held(twins: Twins) -> Any:
    return contents(twins.ours, params_of(twins.ours))


def steps_with_overflows(layout: str, unscaled: bool, overflows: dict[int, int]) -> None:
    """Some gradients have an Inf in their last element, which one rank holds, or its replicas.

    Args:
        overflows: by number of a step, the number of the weight.
    """
    # Without comparing notes at each step: that ranks skip is exchanged anyway.
    scaler, twins = new_scaler(), twins_on(layout, consistency_check="plan")
    for step in range(4):
        set_scaled(twins, step, scaler.get_scale())
        if step in overflows:
            _, p, q = twins.pairs[overflows[step]]
            is_here = layout != "ZeRO-2" or dist.get_rank() == 2  # where gradients are a rank's own
            q.grad.view(-1)[-1] = torch.inf if is_here else 1.0
            p.grad = part_for(p, q.grad)
        assert twins.ours._step_supports_amp_scaling == LAYOUTS[layout][1]
        if unscaled:
            scaler.unscale_(twins.ours)
        before = held(twins)[:2]  # torch may unscale gradients
        scaler.step(twins.ours)
        scaler.update(1024.0)  # where only some ranks have found Inf, their scales would differ
        if step in overflows:
            assert_equal(held(twins)[:2], before)
        else:
            twins.reference.step()
    twins.compare()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout):
    run_ranks(steps_with_overflows, 4, layout, False, {1: 0, 2: -1})
    run_ranks(steps_with_overflows, 4, layout, True, {0: 0, 2: -1})  # the first, too


@pytest.mark.parametrize("dense", [True, False])
@on_ranks(4)
def test_ranks_that_step_together_skip_together_and_others_go_on(dense):
    """The first two ranks share experts, and so do the others; all share a weight if ``dense``."""
    scaler, square = new_scaler(), init_device_mesh("cpu", SQUARE, mesh_dim_names=("ep", "shard"))
    meshes = [square["shard"], *([init_device_mesh("cpu", FOUR)] if dense else [])]
    held = [nn.Parameter(part(torch.ones(4, 4), mesh, [Shard(0)])) for mesh in meshes]
    optim = optimizer.Muon([{"params": held, "use_muon": True}])
    for step in range(3):
        for p in held:
            p.grad = torch.full_like(p, 1024.0)
        if step == 1 and dist.get_rank() == 2:
            local(held[0].grad)[0, 0] = torch.inf
        assert optim._step_supports_amp_scaling
        before = [local(p).clone() for p in held]
        scaler.step(optim)
        scaler.update(1024.0)
        skips = step == 1 and (dense or dist.get_rank() >= 2)
        assert all(torch.equal(local(p), b) == skips for p, b in zip(held, before))


@on_ranks(4)
def test_a_sharded_scaler_keeps_the_scales_of_all_ranks_equal():
    scaler, twins, scales = new_scaler(ShardedGradScaler), twins_on("ZeRO-2"), []
    for step in range(3):
        set_scaled(twins, step, scaler.get_scale())
        if step == 1 and dist.get_rank() == 2:
            twins.pairs[0][1].grad[0, 0] = torch.inf
        scaler.unscale_(twins.ours)
        scaler.step(twins.ours)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 512.0, 512.0]


@on_ranks(2, timeout=60, pg_timeout=15)
def test_a_rank_without_any_gradient_votes_to_go_on() -> None:
    scaler, twins = new_scaler(), twins_on("ZeRO-2", missing_grad="zero")
    for step in range(2):
        set_scaled(twins, step, scaler.get_scale())
        for _, p, q in twins.pairs:
            q.grad = q.grad / 2  # the mean with zeros
            if dist.get_rank() == 1:
                p.grad = None
        scaler.step(twins.ours)
        # Without new_scale torch raises "No inf checks were recorded" on this rank.
        scaler.update(scaler.get_scale())
        twins.reference.step()
    twins.compare()


@on_ranks(2, timeout=60, pg_timeout=15)
def test_what_a_scaler_says_that_cannot_be_read_on_one_rank_raises_on_all() -> None:
    torch.set_num_threads(1)
    twins = twins_on("ZeRO-2", consistency_check="plan")
    set_scaled(twins, 0)
    twins.ours.step()
    set_scaled(twins, 1)
    before = held(twins)
    # As a scaler sets it; a number on a device that has failed can't be read.
    fails = dist.get_rank() == 1
    twins.ours.found_inf = torch.zeros((), device="meta" if fails else "cpu")
    with pytest.raises(RuntimeError if fails else ValueError, match="" if fails else "^rank 1: "):
        twins.ours.step()
    assert_equal(held(twins), before)
    assert not twins.ours.is_broken


@on_ranks(2)
def test_scaled_gradients_in_fp16_are_refused_on_all_ranks():
    scaler, twins = new_scaler(), twins_on("ZeRO-2")
    for p in params_of(twins.ours):
        p.data = p.data.half()
        p.grad = torch.ones_like(p)
    before = held(twins)
    with pytest.raises(ValueError, match=r"layers\.0\.0\.weight .*fp16"):
        scaler.step(twins.ours)
    assert_equal(held(twins), before)


# -- in one process --------------------------------------------------------------------------------


def test_what_a_scaler_said_is_forgotten_with_a_step_that_raised():
    held = [nn.Parameter(torch.eye(4)) for _ in range(2)]
    optim, twin = (optimizer.Muon([{"params": [p], "use_muon": True}]) for p in held)
    # As a scaler sets them where it calls every step.
    optim.grad_scale, optim.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    held[0].grad = torch.full((4, 4), 1024.0)
    optim.param_groups[0]["lr"] = -1
    refused(optim, "lr")
    assert not {"found_inf", "grad_scale"} & vars(optim).keys()
    optim.param_groups[0]["lr"] = 1e-3
    for p, each in zip(held, (optim, twin)):
        p.grad = torch.ones(4, 4)
        each.step()  # without the scaler
    assert torch.equal(*held)


def test_a_skipped_step_leaves_gradients_and_leaves_its_logits_to_the_next():
    q, k = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    names = ["layers.0.wq.weight", "layers.0.wk.weight"]
    group = {"params": [q, k], "names": names, "use_muon": True}
    optim = optimizer.Muon([group], clip_config={"head_dim": 4, "threshold": 1.0})
    scaler = new_scaler()
    q.grad, k.grad = torch.full((8, 8), torch.inf), torch.ones(8, 8)
    before = contents(optim, [q, k])[:2]
    optim.set_qk_logits({0: torch.full((2,), 100.0)})
    scaler.step(optim)
    scaler.update()
    assert_equal(contents(optim, [q, k])[:2], before)
    assert q.grad is not None and k.grad is not None
    q.grad = torch.ones(8, 8)
    scaler.step(optim)
    assert optim.qk_clip_stats()["clipped"] == 2


def test_adamws_parameters_are_unscaled_and_skipped_too():
    held, scaler = [nn.Parameter(torch.ones(3)) for _ in range(2)], new_scaler()
    ours, twin = (optimizer.Muon([{"params": [p], "use_muon": False}]) for p in held)
    for number in (1.0, torch.inf, 0.5):
        held[0].grad = torch.full((3,), number * scaler.get_scale())
        scaler.step(ours)
        scaler.update()
        if number != torch.inf:
            held[1].grad = torch.full((3,), number)
            twin.step()
        assert torch.equal(*held)
    assert ours.state[held[0]]["step"] == 2
