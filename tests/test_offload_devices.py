"""Beside an accelerator that isn't there: CPU offload, and which tensor is where, when."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves

from comparisons import assert_equal
from fake_device import CUDA, Device, fake_device
from layouts import local
from offloaded import CLIPPED, CPU, MOMENTS, OTHER_SHAPES, SLOT_BYTES, Training, placed
from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="the device is made for builds without CUDA"
)


@pytest.fixture
def device(one_thread) -> Iterator[Device]:
    with fake_device() as device:
        yield device


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in tensors.items()}


def check_same_state(found: Training, expected: Training) -> None:
    assert found.devices() == {CPU}
    check_layout(found)
    assert_equal(found.state(), on_cpu(expected.state()))


def check_equal(found: Training, expected: Training) -> None:
    assert_equal(on_cpu(found.state()), on_cpu(expected.state()))
    for p, q in zip(found.params.values(), expected.params.values()):
        assert torch.equal(local(p).cpu(), local(q).cpu())


# -- where state lives -----------------------------------------------------------------------------


def test_state_is_born_on_the_host_moves_there_and_comes_back(device):
    training = Training()
    weights, counts = device.memory.now, 4 * len(OTHER_SHAPES)  # AdamW's steps stay
    peak = device.memory.peak_of(training.optimizer.state_dict)  # and an answer of one byte
    assert weights + counts <= peak <= weights + counts + 8
    assert training.devices() == {CPU}
    training.step()
    training.drop_gradients()
    assert training.devices() == {CPU}
    assert device.memory.now == weights + counts
    expected = on_cpu(training.state())
    for _ in range(2):
        training.optimizer.turn_off_cpu_offload()
        assert training.devices() == {CUDA}
        assert device.memory.now == weights + counts + training.state_bytes
        training.turn_on()
        assert training.devices() == {CPU}
        assert device.memory.now == weights + counts
    assert_equal(training.state(), expected)


def test_state_stays_on_the_host_whatever_changes(device):
    training = Training(steps=1)
    groups = training.optimizer.param_groups
    groups[0]["momentum_dtype"] = torch.bfloat16
    for group in groups:
        group["lr"] = torch.tensor(0.1, device="cuda")
    more = nn.Parameter(torch.ones(16, 24, device="cuda"))
    training.optimizer.add_param_group({"params": [("more", more)], "use_muon": True})
    training.set_gradients()
    more.grad = torch.ones_like(more)
    training.optimizer.step()
    assert training.devices() == {CPU}
    assert training.state()["w1.momentum_buffer"].dtype == torch.bfloat16
    assert training.optimizer.state[more]["momentum_buffer"].device == CPU
    assert "w1" in str(training.optimizer.summary())
    away, groups[1]["params"] = groups[1]["params"], []  # comes back, too
    training.params["odd"].requires_grad_(False)  # as does what is frozen
    training.optimizer.turn_off_cpu_offload()
    groups[1]["params"] = away
    assert training.devices() == {CUDA}


def test_a_copy_takes_no_more_of_the_device_than_its_original(device):
    training, peaks = Training(steps=1, chunk_size=1).drop_gradients(), []
    for each in (training, copy.deepcopy(training)):
        peaks.append(device.memory.peak_of(each.step))
        each.drop_gradients()
    assert peaks[1] == peaks[0]


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on", [True, False], ids=["from the host", "from the device"])
def test_loading_leaves_state_on_the_host_and_the_device_alone(is_on, device):
    saved, training = Training(is_on=is_on, steps=1), Training(steps=1).drop_gradients()
    resting, found = device.memory.settled(), []
    peak = device.memory.peak_of(lambda: found.append(saved.optimizer.state_dict()))
    assert peak == resting or not is_on
    states = found[0]["state"].values()
    kept = {own[key].device for own in states for key in MOMENTS if key in own}
    assert kept == {CPU if is_on else CUDA}
    largest = max(param.nbytes for param in training.params.values())
    resting = device.memory.settled()
    peak = device.memory.peak_of(lambda: training.optimizer.load_state_dict(found[0]))
    assert peak <= resting + largest
    assert device.memory.now <= resting  # AdamW's step counts are the checkpoint's own
    assert training.devices() == {CPU}
    assert_equal(training.state(), on_cpu(saved.state()))
    training.step()
    back = Training(is_on=False)
    back.optimizer.load_state_dict(found[0])
    assert back.devices() == {CUDA}
    back.step()


# -- ranks -----------------------------------------------------------------------------------------


def with_device(train: Callable[..., None], *args: Any) -> None:
    with fake_device() as device:
        train(device, *args)


def check_layout(training: Training) -> None:
    for name, param in training.params.items():
        for key, value in training.optimizer.state[param].items():
            is_whole = key == "second_momentum_buffer" and name != "experts"
            if isinstance(param, DTensor) and key in MOMENTS:
                assert value.placements == ((Replicate(),) if is_whole else param.placements), name
                assert value.device_mesh == param.device_mesh
            elif key == "momentum_buffer" and dist.is_initialized():
                assert value.placements == (Shard(0),)
                assert value.device_mesh.device_type == "cuda"


def train(device: Device, kind: str) -> None:
    """As without offload; state is where it belongs after whatever moves or replaces it."""
    is_hosted, options = kind == "hosted", {}
    if kind in ("DDP", "ZeRO-2"):
        reduced = "mean" if kind == "ZeRO-2" else None
        options = {"process_group": dist.group.WORLD, "grad_reduce": reduced}
    on_device: Any = {"make": placed(CUDA)} if kind in ("FSDP2", "hosted") else {}
    on_host: Any = {"make": placed(CPU)} if is_hosted else on_device
    expected = Training(**on_device, is_on=False, steps=3, **options)
    for is_on in (False, True) if is_hosted else (True,):
        training = Training(**on_host, is_on=is_on, **options)
        for _ in range(3):
            training.step()
            assert training.devices() == {CPU}
        check_equal(training, expected)
        check_layout(training)
    training.drop_gradients()
    resting = device.memory.settled()
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    if not options:  # whose process group could not be copied
        assert device.memory.settled() <= resting
        model, optim = training.model(), training.optimizer
        device.memory.peak = resting
        state = of_torch.get_optimizer_state_dict(model, optim)
        of_torch.set_optimizer_state_dict(model, optim, state)
        del state
        largest = max(local(param).nbytes for param in training.params.values())
        assert device.memory.peak <= resting + 2 * largest
        copied = copy.deepcopy(training)
        for each in (copied, training):
            assert each.devices() == {CPU}
            each.step()
        check_equal(copied, training)
        del copied
    assert training.devices() == {CPU}
    training.drop_gradients()
    resting = device.memory.settled()
    training.optimizer.turn_off_cpu_offload()
    assert training.devices() == ({CPU} if is_hosted else {CUDA})
    assert device.memory.settled() == resting + (0 if is_hosted else training.state_bytes)
    check_layout(training)
    assert "w1" in str(training.optimizer.summary())
    training.step()


@pytest.mark.parametrize("kind", ["one process", "FSDP2", "DDP", "ZeRO-2", "hosted"])
def test_steps_are_the_same_and_state_is_on_the_host_and_keeps_its_placements(kind, one_thread):
    if kind == "one process":
        with_device(train, kind)
    else:
        run_ranks(with_device, 2, train, kind)


def checkpoint_whole_and_in_files(device: Device, at: torch.device, directory: str) -> None:
    saved, training = Training(placed(at), at != CPU, 2), Training(placed(at), at != CPU, 1)
    saved.drop_gradients()
    training.drop_gradients()
    models = [each.model() for each in (saved, training)]
    whole = of_torch.StateDictOptions(full_state_dict=True, cpu_offload=True)
    # torch puts a DTensor together on its mesh's device, wherever its parts are.
    state = of_torch.get_optimizer_state_dict(models[0], saved.optimizer, options=whole)
    assert {leaf.device for leaf in tree_leaves(state) if isinstance(leaf, Tensor)} <= {CPU}
    options = of_torch.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    of_torch.set_optimizer_state_dict(models[1], training.optimizer, state, options=options)
    check_same_state(training, saved)
    saved.step()
    saved.drop_gradients()
    dcp.save(of_torch.get_optimizer_state_dict(models[0], saved.optimizer), checkpoint_id=directory)
    state = of_torch.get_optimizer_state_dict(models[1], training.optimizer)
    dcp.load(state, checkpoint_id=directory)
    of_torch.set_optimizer_state_dict(models[1], training.optimizer, state)
    check_same_state(training, saved)


@pytest.mark.parametrize("at", [CUDA, CPU], ids=["offloaded", "hosted"])
def test_whole_and_saved_checkpoints_of_dtensors_leave_state_on_the_host(at, tmp_path):
    run_ranks(with_device, 2, checkpoint_whole_and_in_files, at, str(tmp_path))


# -- parameters in host memory, as FSDP2's CPUOffloadPolicy has them -------------------------------


def compute_hosted(device: Device) -> None:
    for is_on in (False, True):
        training = Training(placed(CPU), is_on, steps=1)
        resting = device.memory.settled()
        training.set_gradients()
        for operations in (device.operations, device.host_operations):
            operations.clear()
        training.optimizer.step()
        assert device.operations["baddbmm"] + device.operations["bmm"] > 0
        assert not device.host_operations["baddbmm"] + device.host_operations["bmm"]
        assert device.host_operations["_fused_adamw_"] == 1
        assert not device.operations["_fused_adamw_"]
        assert device.memory.settled() == resting
        assert {local(p).device for p in training.params.values()} == {CPU}


def stream_hosted(device: Device) -> None:
    """In slots beside what is computed."""
    taken = []
    for at, is_on in ((CUDA, False), (CPU, True)):
        # With gradients that stay: letting them go would make room in one case only.
        training = Training(placed(at), is_on, steps=1, none_grad=False, chunk_size=1)
        training.set_gradients()
        resting = device.memory.settled()
        taken.append(device.memory.peak_of(training.optimizer.step) - resting)
    chunk = 2 * 4 * (96 * 64 + 64 * 128) // 2  # momentum and gradients of the largest one
    assert taken[1] <= taken[0] + max(SLOT_BYTES, chunk), taken


@pytest.mark.parametrize("train", [compute_hosted, stream_hosted])
def test_parameters_in_host_memory_are_computed_on_the_device_and_stay(train):
    run_ranks(with_device, 2, train)


VARIANTS: list[dict[str, Any]] = [
    {"cautious": True, "decay_lr": "adjusted", "comm_dtype": torch.float32},
    {"momentum_dtype": torch.bfloat16, "momentum_style": "ema", "maximize": True},
    {"missing_grad": "zero", "chunk_size": 1},
    {"missing_grad": "zero", "lr": torch.tensor(0.1), "weight_decay": 0.0},
    CLIPPED,
]


def train_variants(device: Device, options: dict[str, Any]) -> None:
    every: list[Training] = []
    for at, is_on in itertools.product((CUDA, CPU), (False, True)):
        training = Training(placed(at), is_on, **options)
        every.append(training)
        for _ in range(2):
            training.set_gradients()
            for name in ("w1", "norm") if "missing_grad" in options else ():
                training.params[name].grad = None
            clips = "clip_config" in options
            logits = {"": torch.tensor([3.0, 1.0]).to(CUDA)} if clips else None
            training.optimizer.step(qk_logits=logits)
        check_equal(training, every[0])
        assert training.devices() == ({CUDA} if at == CUDA and not is_on else {CPU})


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: " ".join(options))
def test_options_mix_no_devices(options):
    run_ranks(with_device, 2, train_variants, options)
