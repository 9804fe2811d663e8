"""What a step costs, by counting: FLOPs, memory, and what it leaves to the allocator."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from kernel import optimizer


def transformer(layers: int, dim: int, ffn: int) -> list[torch.nn.Parameter]:
    shapes = layers * ([(dim, dim)] * 4 + [(ffn, dim), (ffn, dim), (dim, ffn)])
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def make(params, **options):
    return optimizer.Muon([{"params": params, "use_muon": True, "none_grad": False}], **options)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("family", "squares"), [("quintic", 5), ("polar_express", 5), ("cubic5", 0)]
)
def test_flops_of_a_step_equal_the_formula(family, squares):
    params = transformer(2, 32, 96)
    optim = make(params, ns_coefficients=family)
    with FlopCounterMode(display=False) as counter:
        optim.step()
    expected = 0
    for param in params:
        s, long = sorted(param.shape)
        expected += 20 * s * s * long + squares * 2 * s**3
    assert counter.get_total_flops() == expected


def transient_bytes(optim: torch.optim.Optimizer) -> int:
    params = [p for group in optim.param_groups for p in group["params"]]
    tracker = MemTracker()
    tracker.track_external(optim, *params, *(p.grad for p in params))
    device = torch.device("cpu")
    with tracker:
        before = tracker.get_tracker_snapshot("current")[device]["Total"]
        optim.step()
        return tracker.get_tracker_snapshot("peak")[device]["Total"] - before


@pytest.mark.parametrize(
    "options",
    [{}, {"beta2": 0.9, "cautious": True}, {"nonfinite": "skip"}, {"ns_dtype": torch.float32}],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_transient_memory_stays_under_one_and_a_half_times_the_weights(options):
    params = transformer(6, 256, 1024)
    optim = make(params, **options)
    optim.step()
    weights = sum(p.numel() * p.element_size() for p in params)
    assert transient_bytes(optim) <= 1.5 * weights


def test_smaller_chunks_take_less_memory():
    params = transformer(6, 128, 256)
    taken = []
    for chunk_size in (1, 4, 16):
        optim = make(params, chunk_size=chunk_size)
        optim.step()
        taken.append(transient_bytes(optim))
    assert taken[0] < taken[1] < taken[2]


def test_state_takes_one_buffer_per_matrix():
    params = transformer(1, 64, 128)
    optim = make(params)
    optim.step()
    assert all(list(optim.state[p]) == ["momentum_buffer"] for p in params)


def test_memory_does_not_grow_over_steps():
    params = transformer(1, 64, 128)
    optim = make(params, beta2=0.9)
    optim.step()
    first = transient_bytes(optim)
    for _ in range(5):
        optim.step()
    assert transient_bytes(optim) == first
