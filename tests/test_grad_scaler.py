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
from torch.distributed.tensor import DTensor, Shard

from kernel import optimizer
from layouts import EXACT, Group, Twins, Weight, local, part_for
from ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

FOUR = (4,)
LAYOUTS: dict[str, list[Weight]] = {
    "FSDP2": [
        Weight((12, 16), FOUR, (0,)),
        Weight((3, 8), FOUR, (0,)),
        Weight((16, 8), FOUR, (1,)),
    ],
    "FSDP2 over TP": [
        Weight((16, 8), (2, 2), (0, 0)),
        Weight((8, 16), (2, 2), (0, 1)),
        Weight((16, 12), (2, 2), (0, None)),
    ],
    "replicas over TP first": [
        Weight((16, 12), (2, 2), (0, None)),
        Weight((8, 16), (2, 2), (0, 1)),
    ],
    "HSDP": [Weight((12, 16), (2, 2), (None, 0)), Weight((8, 8), (2, 2), (None, 1))],
    "HSDP beside shards of all": [
        Weight((12, 16), (2, 2), (None, 0)),
        Weight((16, 12), FOUR, (0,)),
    ],
    "experts on a mesh of their own": [
        Weight((4, 8, 16), (2, 2), (0, 1)),
        Weight((16, 12), FOUR, (0,)),
    ],
    "DDP": [Weight((12, 16)), Weight((8, 8))],
    "ZeRO-2": [Weight((12, 16)), Weight((8, 8))],
}
# Where torch's check does not reach all ranks, so that the scaler calls every step.
CALLED = ("replicas over TP first", "HSDP beside shards of all", "ZeRO-2")
REPLICATED = {
    "DDP": lambda: {"process_group": dist.group.WORLD},
    "ZeRO-2": lambda: {"process_group": dist.group.WORLD, "grad_reduce": "mean"},
}


def twins_on(layout: str, **options: Any) -> Twins:
    meshes = {
        w.mesh: init_device_mesh("cpu", w.mesh) for w in LAYOUTS[layout] if w.mesh is not None
    }
    options = {**EXACT, "beta2": 0.9, "weight_decay": 0.1, **options}
    ours = {**options, **REPLICATED.get(layout, dict)()}
    return Twins.placed([Group(LAYOUTS[layout])], meshes, ours, reference=options)


def new_scaler(kind: type = torch.amp.GradScaler, **options: Any) -> Any:
    scaler = kind(device="cpu", init_scale=1024.0, **options)
    scaler.scale(torch.ones(()))  # which is when it makes its scale
    return scaler


def set_scaled(twins: Twins, step: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(step)
    for _, p, q in twins.pairs:
        q.grad = torch.randn(q.shape, generator=generator)
        p.grad = part_for(p, q.grad * scale)


def contents(twins: Twins) -> list[torch.Tensor]:
    """Clones of what this rank holds of weights and state."""
    state = [twins.ours.state[p] for _, p, _ in twins.pairs]
    values = [p for _, p, _ in twins.pairs] + [v for own in state for v in own.values()]
    return [local(value).clone() for value in values]


def steps_with_overflows(layout: str, unscaled: bool, overflows: dict[int, int]) -> None:
    """Some gradients have an Inf in their last element, which one rank holds, or its replicas.

    Args:
        overflows: by number of a step, the number of the weight.
    """
    torch.set_num_threads(1)
    # Without comparing notes at each step: that ranks skip is exchanged anyway.
    twins, scaler = twins_on(layout, consistency_check="plan"), new_scaler()
    for step in range(4):
        set_scaled(twins, step, scaler.get_scale())
        if step in overflows:
            _, p, q = twins.pairs[overflows[step]]
            is_here = layout != "ZeRO-2" or dist.get_rank() == 2  # where gradients are a rank's own
            q.grad.view(-1)[-1] = torch.inf if is_here else 1.0
            p.grad = part_for(p, q.grad)
        assert twins.ours._step_supports_amp_scaling == (layout in CALLED)
        if unscaled:
            scaler.unscale_(twins.ours)
        before = contents(twins)
        scaler.step(twins.ours)
        scaler.update(1024.0)  # where only some ranks have found Inf, their scales would differ
        if step in overflows:
            assert all(torch.equal(a, b) for a, b in zip(before, contents(twins), strict=True))
        else:
            twins.reference.step()
    twins.compare()


@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize(
    "layout",
    [
        key if key in ("FSDP2", "ZeRO-2") else pytest.param(key, marks=pytest.mark.slow)
        for key in LAYOUTS
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout, unscaled):
    run_ranks(steps_with_overflows, 4, layout, unscaled, {1: 0, 2: -1})


@pytest.mark.parametrize("layout", ["FSDP2", "ZeRO-2"])
def test_a_first_step_may_be_skipped(layout):
    run_ranks(steps_with_overflows, 4, layout, True, {0: 0})


def steps_of_experts(dense: bool) -> list[bool]:
    """Which steps have moved weights; the first two ranks share experts, and so do the others.

    Args:
        dense: whether all ranks share a weight, too.
    """
    torch.set_num_threads(1)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    meshes = [square["shard"], *([init_device_mesh("cpu", FOUR)] if dense else [])]
    params = [
        nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])) for mesh in meshes
    ]
    optim, scaler = optimizer.Muon([{"params": params, "use_muon": True}]), new_scaler()
    have_moved = []
    for step in range(3):
        for p in params:
            p.grad = torch.full_like(p, 1024.0)
        if step == 1 and dist.get_rank() == 2:
            local(params[0].grad)[0, 0] = torch.inf
        assert optim._step_supports_amp_scaling
        before = [local(p).clone() for p in params]
        scaler.step(optim)
        scaler.update(1024.0)
        have_moved.append(any(not torch.equal(local(p), b) for p, b in zip(params, before)))
    return have_moved


@pytest.mark.parametrize("dense", [True, False])
def test_ranks_that_step_together_skip_together_and_others_go_on(dense):
    found = run_ranks(steps_of_experts, 4, dense)
    assert [moved[1] for moved in found] == [not dense, not dense, False, False]
    assert all(moved[0] and moved[2] for moved in found)


def scales_of_a_sharded_scaler() -> list[float]:
    torch.set_num_threads(1)
    twins, scaler, scales = twins_on("ZeRO-2"), new_scaler(ShardedGradScaler), []
    for step in range(3):
        set_scaled(twins, step, scaler.get_scale())
        if step == 1 and dist.get_rank() == 2:
            twins.pairs[0][1].grad[0, 0] = torch.inf
        scaler.unscale_(twins.ours)
        scaler.step(twins.ours)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_a_sharded_scaler_keeps_the_scales_of_all_ranks_equal():
    assert run_ranks(scales_of_a_sharded_scaler, 4) == [[1024.0, 512.0, 512.0]] * 4


def step_without_a_gradient_on_one_rank() -> None:
    torch.set_num_threads(1)
    twins, scaler = twins_on("ZeRO-2", missing_grad="zero"), new_scaler()
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


def test_a_rank_without_any_gradient_votes_to_go_on():
    run_ranks(step_without_a_gradient_on_one_rank, 2, timeout=60, pg_timeout=15)


def step_where_found_inf_cannot_be_read() -> str:
    torch.set_num_threads(1)
    twins = twins_on("ZeRO-2", consistency_check="plan")
    set_scaled(twins, 0, 1.0)
    twins.ours.step()
    set_scaled(twins, 1, 1.0)
    before = contents(twins)
    # As a scaler sets it; a number on a device that has failed can't be read.
    twins.ours.found_inf = torch.zeros((), device="meta" if dist.get_rank() == 1 else "cpu")
    with pytest.raises((ValueError, RuntimeError)) as raised:
        twins.ours.step()
    assert all(torch.equal(a, b) for a, b in zip(before, contents(twins), strict=True))
    assert not twins.ours.is_broken
    return str(raised.value)


def test_what_a_scaler_says_that_cannot_be_read_on_one_rank_raises_on_all():
    words = run_ranks(step_where_found_inf_cannot_be_read, 2, timeout=60, pg_timeout=15)
    assert words[0].startswith("rank 1: ") and words[1] in words[0]


def scale_fp16(layout: str) -> str:
    torch.set_num_threads(1)
    twins, scaler = twins_on(layout), new_scaler()
    for _, p, _ in twins.pairs:
        p.data = p.data.half()
        p.grad = torch.ones_like(p)
    before = contents(twins)
    with pytest.raises(ValueError) as raised:
        scaler.step(twins.ours)
    assert all(torch.equal(a, b) for a, b in zip(before, contents(twins), strict=True))
    return str(raised.value)


def test_scaled_gradients_in_fp16_are_refused_on_all_ranks():
    for words in run_ranks(scale_fp16, 2, "ZeRO-2"):
        assert "layers.0.0.weight has a scaled gradient in fp16" in words


# -- in one process ------------------------------------------------------------------------------


def one_matrix(**options: Any) -> tuple[nn.Parameter, Any]:
    param = nn.Parameter(torch.eye(4))
    return param, optimizer.Muon([{"params": [param], "use_muon": True}], **options)


def test_what_a_scaler_said_is_forgotten_with_a_step_that_raised():
    param, optim = one_matrix()
    other, twin = one_matrix()
    # As a scaler sets them where it calls every step.
    optim.grad_scale, optim.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    param.grad = torch.full((4, 4), 1024.0)
    optim.param_groups[0]["lr"] = -1
    with pytest.raises(ValueError, match="lr"):
        optim.step()
    assert torch.equal(param.grad, torch.full((4, 4), 1024.0))
    assert not {"found_inf", "grad_scale"} & vars(optim).keys()
    optim.param_groups[0]["lr"] = 1e-3
    for p, each in ((param, optim), (other, twin)):
        p.grad = torch.ones(4, 4)
        each.step()  # without the scaler
    assert torch.equal(param, other)


def test_a_skipped_step_leaves_gradients_and_leaves_its_logits_to_the_next():
    torch.manual_seed(0)
    q = nn.Parameter(torch.randn(8, 8))
    groups = [{"params": [q], "names": ["layers.0.wq.weight"], "use_muon": True}]
    groups.append({"params": [k := nn.Parameter(torch.randn(8, 8))], "use_muon": True})
    groups[1]["names"] = ["layers.0.wk.weight"]
    optim = optimizer.Muon(groups, clip_config={"head_dim": 4, "threshold": 1.0})
    scaler = new_scaler()
    q.grad, k.grad = torch.full((8, 8), torch.inf), torch.ones(8, 8)
    before = q.detach().clone()
    optim.set_qk_logits({0: torch.full((2,), 100.0)})
    scaler.step(optim)
    scaler.update()
    assert torch.equal(q, before) and q.grad is not None and k.grad is not None
    q.grad, k.grad = torch.ones(8, 8), torch.ones(8, 8)
    scaler.step(optim)
    assert optim.qk_clip_stats()["clipped"] == 2


def test_adamws_parameters_are_unscaled_and_skipped_too():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    scaler = new_scaler()
    ours, twin = (optimizer.Muon([{"params": [p], "use_muon": False}]) for p in params)
    for number in (1.0, torch.inf, 0.5):
        params[0].grad = torch.full((3,), number * scaler.get_scale())
        scaler.step(ours)
        scaler.update()
        if number != torch.inf:
            params[1].grad = torch.full((3,), number)
            twin.step()
        assert torch.equal(*params)
    assert ours.state[params[0]]["step"] == 2


def test_a_disabled_scaler_is_none():
    param, optim = one_matrix()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    param.grad = torch.full((4, 4), torch.nan)
    scaler.step(optim)
    assert param.isnan().any()
