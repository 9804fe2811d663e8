"""Whole steps on gloo ranks beside a fake device: what streams and collectives touch is ordered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fake_device import CUDA, rows_at
from kernel import optimizer
from layouts import params_of, randn
from race_detector import ordered_device
from rank_pool import RankPool

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="the device is made for builds without CUDA"
)

RANKS, STEPS, SLOT_BYTES = 2, 3, 16384

SHAPES = {
    "layers.0.attention.wq.weight": (16, 24),
    "layers.0.attention.wk.weight": (8, 24),
    "layers.0.w1.weight": (40, 24),
    "layers.0.w2.weight": (24, 40),
    "layers.1.w1.weight": (33, 24),
    "embed_tokens.weight": (50, 8),
    "norm.weight": (24,),
}
CLIPPED = {"clip_config": {"threshold": 2.0, "head_dim": 4}}

# Options of the optimizer, and whether CPU offload is on. One matrix travels at a time, so that
# chunks are in flight together.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "fp16 arithmetic": ({"ns_dtype": torch.float16}, False),
    "second moments": ({"beta2": 0.9}, False),
    "QK-Clip": (CLIPPED, False),
    "ZeRO-2": ({"grad_reduce": "mean"}, False),
    "streamed": ({"ns_dtype": torch.float16, "beta2": 0.9, **CLIPPED}, True),
    "ZeRO-2, streamed": ({"grad_reduce": "mean"}, True),
}


class Logits:
    """A recorder of attention logits, of which some heads are to be clipped."""

    def take(self) -> dict[int, torch.Tensor]:
        return {0: torch.tensor([1.0, 4.0, 9.0, 2.5])}


def train(case: str, dropped: str | None = None) -> tuple[list[str], int, list[str]]:
    """The races of some steps, how many collectives they launched, and where waits are called.

    Args:
        case: of `CASES`.
        dropped: waits that are called there are ignored.
    """
    torch.set_num_threads(1)
    options, is_offloaded = CASES[case]
    is_replicated = "grad_reduce" in options
    if is_replicated:
        options = {**options, "process_group": dist.group.WORLD}
    with ordered_device(lambda _, site: site == dropped) as recorder:
        mesh = None if is_replicated else DeviceMesh("cuda", list(range(RANKS)))

        def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
            value = randn(*shape, seed=seed)
            return value.to(CUDA) if mesh is None else rows_at(value, mesh, CUDA)

        groups: list[dict[str, Any]] = [{"params": [], "use_muon": kind} for kind in (True, False)]
        for number, (name, shape) in enumerate(SHAPES.items()):
            param = nn.Parameter(random(shape, number))
            groups[0 if "layers" in name else 1]["params"].append((name, param))
        optim = optimizer.Muon(groups, lr=0.02, chunk_size=1, **options)
        if "clip_config" in options:
            optim.qk_recorder = Logits()
        if is_offloaded:
            optim.turn_on_cpu_offload(slot_bytes=SLOT_BYTES)
        for step in range(STEPS):
            for param in params_of(optim):
                param.grad = random(param.shape, step)
            optim.step()
        return recorder.races, recorder.collectives, recorder.waits


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(RANKS) as pool:
        yield pool


@pytest.mark.parametrize("case", CASES)
def test_all_that_a_step_touches_is_ordered(case, ranks):
    for races, collectives, waits in ranks(train, case):
        assert races == [] and collectives >= 2 * STEPS and waits


@pytest.mark.parametrize(
    "case, site, queue",
    [
        ("fp16 arithmetic", "Exchange._wait", "collectives of [0, 1] wrote (all_to_all_single)"),
        ("ZeRO-2", "MeanGradients._finish", "collectives of [0, 1] wrote (reduce_scatter"),
        ("ZeRO-2", "MeanGradients._finish", "collectives of [0, 1] read (all_reduce)"),
        ("ZeRO-2", "gather_over_ranks", "collectives of [0, 1] wrote (all_gather"),
        ("streamed", "Ring.acquire", "stream 0 wrote (copy_)"),
        ("streamed", "Ring.release", "compute wrote (_foreach_add_)"),
    ],
)
def test_a_wait_that_is_left_out_is_found(case, site, queue, ranks):
    for races, _, waits in ranks(train, case, site):
        assert site in waits
        assert any(f"unordered with: {queue}" in race for race in races), races
