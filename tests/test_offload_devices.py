"""Beside an accelerator that isn't there: CPU offload, which tensor is where, when; launches."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_leaves

from fake_device import CUDA, Device, fake_device, rows_at
from kernel import optimizer
from ranks import run_ranks

dtensors = importlib.import_module(f"{optimizer.__name__}.distributed.dtensors")

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="the device is made for builds without CUDA"
)

CPU = torch.device("cpu")
SLOT_BYTES = 32768
MOMENTS = ["momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq"]

MATRICES = {"w1": (96, 64), "w2": (64, 128), "experts": (4, 32, 48), "odd": (33, 20)}
OTHERS = {"embedding": (50, 32), "norm": (64,)}

Make = Callable[[Tensor], Tensor]  # a parameter, or its gradient, of its value on the host


@pytest.fixture
def device(one_thread) -> Iterator[Device]:
    with fake_device() as device:
        yield device


def on_device(value: Tensor) -> Tensor:
    return value.to(CUDA)


def seeded(name: str, seed: int) -> Tensor:
    shape = {**MATRICES, **OTHERS}[name]
    generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
    return torch.randn(shape, generator=generator) / 4


class Training:
    """An optimizer, its parameters by name, and steps with gradients that depend on their number.

    Args:
        make: places a parameter, or its gradient.
        options: of the optimizer.
    """

    def __init__(self, make: Make = on_device, **options: Any):
        self.make = make
        self.params = {name: nn.Parameter(make(seeded(name, 0))) for name in (*MATRICES, *OTHERS)}
        muon = [(name, self.params[name]) for name in MATRICES]
        groups = [
            {"params": muon, "use_muon": True, "beta2": 0.9, "expert_keys": ("experts",)},
            {"params": [(name, self.params[name]) for name in OTHERS], "use_muon": False},
        ]
        options = (
            dict(lr=0.1, ns_dtype=torch.float32, ns_coefficients="quintic", ns_steps=2) | options
        )
        self.optimizer = optimizer.Muon(groups, **options)
        self.steps = 0

    def set_gradients(self) -> None:
        self.steps += 1
        for name, param in self.params.items():
            param.grad = self.make(seeded(name, self.steps))

    def step(self) -> None:
        self.set_gradients()
        self.optimizer.step()

    def turn_on(self) -> None:
        self.optimizer.turn_on_cpu_offload(slot_bytes=SLOT_BYTES)

    def drop_gradients(self) -> None:
        for param in self.params.values():
            param.grad = None

    def state(self) -> dict[str, Tensor]:
        """All tensors that can be large, this rank's parts."""
        return {
            f"{name}.{key}": dtensors.local(value)
            for name, param in self.params.items()
            for key, value in self.optimizer.state[param].items()
            if key in MOMENTS
        }

    def state_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state().values())

    def all_values(self) -> dict[str, Tensor]:
        weights = {name: dtensors.local(param) for name, param in self.params.items()}
        return {name: value.cpu() for name, value in (weights | self.state()).items()}


def devices_of(training: Training) -> set[torch.device]:
    assert len(training.state()) == 2 * len(MATRICES) + 2 * len(OTHERS)
    return {tensor.device for tensor in training.state().values()}


def check_equal(found: Training, expected: Training) -> None:
    values = expected.all_values()
    for name, value in found.all_values().items():
        assert torch.equal(value, values[name]), name


# -- the device itself -----------------------------------------------------------------------


# -- where state lives -------------------------------------------------------------------------


def test_state_is_born_on_the_host_while_offload_is_on(device):
    training = Training()
    training.turn_on()
    weights = device.memory.now
    counts = 4 * len(OTHERS)  # AdamW's steps
    peak = device.memory.peak_of(training.optimizer.state_dict)  # and an answer of one byte
    assert weights + counts <= peak <= weights + counts + 8
    assert devices_of(training) == {CPU}
    training.step()
    training.drop_gradients()
    assert devices_of(training) == {CPU}
    assert device.memory.now == weights + counts


def test_turning_on_moves_state_to_the_host_and_turning_off_brings_it_back(device):
    training = Training()
    training.step()
    training.drop_gradients()
    with_state = device.memory.now
    expected = training.all_values()
    training.turn_on()
    assert devices_of(training) == {CPU}
    assert device.memory.now == with_state - training.state_bytes()
    training.optimizer.turn_off_cpu_offload()
    assert devices_of(training) == {CUDA}
    assert device.memory.now == with_state
    for name, value in training.all_values().items():
        assert torch.equal(value, expected[name])


def test_memory_of_the_state_is_locked_while_it_lives(device):
    training = Training()
    training.turn_on()
    training.step()
    assert sum(device.locked.values()) >= training.state_bytes()
    training.optimizer.turn_off_cpu_offload()
    training.optimizer.state.clear()
    del training
    assert device.locked == {}


# -- steps ---------------------------------------------------------------------------------------


def test_a_step_is_the_same_and_leaves_nothing_on_the_device(device):
    expected, training = Training(), Training()
    training.turn_on()
    for _ in range(3):
        expected.step()
        training.step()
    check_equal(training, expected)
    assert devices_of(training) == {CPU}
    del expected
    training.drop_gradients()
    weights = sum(param.numel() for param in training.params.values())
    assert device.memory.now == 4 * weights + 4 * len(OTHERS)


def test_streaming_takes_its_slots_where_the_state_was(device):
    training = Training(chunk_size=1)  # a chunk that is larger than the slots takes more
    training.step()
    training.set_gradients()
    off = device.memory.peak_of(training.optimizer.step)
    training.turn_on()
    for _ in range(2):
        training.set_gradients()
        on = device.memory.peak_of(training.optimizer.step)
        assert on <= off - training.state_bytes() + SLOT_BYTES


def test_the_state_s_dtype_may_change_while_it_is_on_the_host(device):
    training = Training()
    training.turn_on()
    training.step()
    training.optimizer.param_groups[0]["momentum_dtype"] = torch.bfloat16
    training.step()
    assert devices_of(training) == {CPU}
    assert training.state()["w1.momentum_buffer"].dtype == torch.bfloat16


def test_a_learning_rate_on_the_device_stays_there(device):
    training = Training()
    training.turn_on()
    for group in training.optimizer.param_groups:
        group["lr"] = torch.tensor(0.1, device="cuda")
    training.step()
    assert devices_of(training) == {CPU}


def test_a_summary_is_made_while_offload_is_on(device):
    training = Training()
    training.turn_on()
    training.step()
    assert "w1" in str(training.optimizer.summary())


def test_parameters_that_are_added_have_their_state_on_the_host(device):
    training = Training()
    training.turn_on()
    training.step()
    more = nn.Parameter(torch.ones(16, 24, device="cuda"))
    training.optimizer.add_param_group({"params": [("more", more)], "use_muon": True})
    training.set_gradients()
    more.grad = torch.ones_like(more)
    training.optimizer.step()
    assert training.optimizer.state[more]["momentum_buffer"].device == CPU
    assert devices_of(training) == {CPU}


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["host", "device"])
def test_loading_leaves_state_on_the_host_and_the_device_alone(source, device):
    saved = Training()
    if source == "host":
        saved.turn_on()
    saved.step()
    checkpoint = saved.optimizer.state_dict()
    training = Training()
    training.turn_on()
    training.step()
    training.drop_gradients()
    resting = device.memory.now
    load = training.optimizer.load_state_dict
    largest = 4 * max(param.numel() for param in training.params.values())
    assert device.memory.peak_of(lambda: load(checkpoint)) <= resting + largest
    assert device.memory.now <= resting  # AdamW's step counts are the checkpoint's own
    assert devices_of(training) == {CPU}
    for name, value in training.state().items():
        assert torch.equal(value, saved.state()[name].cpu()), name
    training.step()


def test_a_checkpoint_made_on_the_host_is_loaded_to_the_device_where_offload_is_off(device):
    saved = Training()
    saved.turn_on()
    saved.step()
    training = Training()
    training.optimizer.load_state_dict(saved.optimizer.state_dict())
    assert devices_of(training) == {CUDA}
    training.step()


def test_a_state_dict_takes_nothing_of_the_device(device):
    training = Training()
    training.turn_on()
    training.step()
    resting = device.memory.now
    state_dict: list[Any] = []
    make = lambda: state_dict.append(training.optimizer.state_dict())  # noqa: E731
    assert device.memory.peak_of(make) == resting
    for own in state_dict[0]["state"].values():
        assert all(own[key].device == CPU for key in MOMENTS if key in own)


def test_a_pickled_optimizer_goes_on_with_state_on_the_host(device):
    training = Training()
    training.turn_on()
    training.step()
    training.drop_gradients()
    pair = (training.params, training.optimizer)
    loaded = Training()
    loaded.params, loaded.optimizer = pickle.loads(pickle.dumps(pair))
    loaded.steps = training.steps
    assert devices_of(loaded) == {CPU}
    training.step()
    loaded.step()
    check_equal(loaded, training)
    assert devices_of(loaded) == {CPU}


# -- ranks ---------------------------------------------------------------------------------------


def with_device(train: Callable[..., None], *args: Any, **options: Any) -> None:
    with fake_device() as device:
        train(device, *args, **options)


def mesh_of_all() -> DeviceMesh:
    return DeviceMesh("cuda", list(range(dist.get_world_size())))


def placed(at: torch.device) -> Make:
    mesh = mesh_of_all()
    return lambda value: rows_at(value, mesh, at)


def check_layout(training: Training) -> None:
    for name in (*MATRICES, *OTHERS):
        param, own = training.params[name], training.optimizer.state[training.params[name]]
        for key in MOMENTS:
            if key not in own:
                continue
            expected = param.placements
            if key == "second_momentum_buffer" and name != "experts":
                expected = (Replicate(),)
            assert own[key].placements == expected, (name, key)
            assert own[key].device_mesh == param.device_mesh


def train_sharded(device: Device) -> None:
    place = placed(CUDA)
    expected = Training(place)
    for _ in range(3):
        expected.step()
    training = Training(place)
    training.turn_on()
    for _ in range(3):
        training.step()
        assert devices_of(training) == {CPU}
    check_layout(training)
    check_equal(training, expected)
    resting = device.memory.settled()
    training.optimizer.turn_off_cpu_offload()
    assert devices_of(training) == {CUDA}
    check_layout(training)
    assert device.memory.settled() == resting + training.state_bytes()
    training.step()
    assert "w1" in str(training.optimizer.summary())


def test_state_of_dtensors_is_on_the_host_and_keeps_its_placements():
    run_ranks(with_device, 2, train_sharded)


def checkpoint_sharded(device: Device) -> None:
    place = placed(CUDA)
    saved, training = Training(place), Training(place)
    for each in (saved, training):
        each.turn_on()
        each.step()
    saved.step()
    for each in (saved, training):
        each.drop_gradients()
    resting = device.memory.settled()
    largest = 4 * max(param.numel() for param in training.params.values())

    training.optimizer.load_state_dict(saved.optimizer.state_dict())
    assert device.memory.settled() <= resting
    check_same_state(training, saved)

    training.step()
    model = nn.ParameterDict(saved.params)
    other = nn.ParameterDict(training.params)
    training.drop_gradients()
    device.memory.peak = device.memory.settled()
    state = get_optimizer_state_dict(model, saved.optimizer)
    set_optimizer_state_dict(other, training.optimizer, state)
    assert device.memory.peak <= resting + largest
    assert device.memory.settled() <= resting
    check_same_state(training, saved)

    saved.steps = training.steps
    saved.step()
    training.step()
    assert devices_of(training) == {CPU}
    copied = copy.deepcopy(training)
    assert devices_of(copied) == {CPU}
    copied.step()
    training.step()
    check_equal(copied, training)


def checkpoint_fully(device: Device, at: torch.device, directory: str) -> None:
    saved, training = Training(placed(at)), Training(placed(at))
    for each in (saved, training):
        if at != CPU:
            each.turn_on()
        each.step()
        each.drop_gradients()
    saved.step()
    saved.drop_gradients()
    models = [nn.ParameterDict(each.params) for each in (saved, training)]
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # torch puts a DTensor together on its mesh's device, wherever its parts are.
    state = get_optimizer_state_dict(models[0], saved.optimizer, options=whole)
    assert {leaf.device for leaf in tree_leaves(state) if isinstance(leaf, Tensor)} <= {CPU}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(models[1], training.optimizer, state, options=options)
    check_same_state(training, saved)

    saved.step()
    saved.drop_gradients()
    dcp.save(get_optimizer_state_dict(models[0], saved.optimizer), checkpoint_id=directory)
    state = get_optimizer_state_dict(models[1], training.optimizer)
    dcp.load(state, checkpoint_id=directory)
    set_optimizer_state_dict(models[1], training.optimizer, state)
    check_same_state(training, saved)


@pytest.mark.parametrize("at", [CUDA, CPU], ids=["offloaded", "parameters in host memory"])
def test_whole_and_saved_checkpoints_of_dtensors_leave_state_on_the_host(at, tmp_path):
    run_ranks(with_device, 2, checkpoint_fully, at, str(tmp_path))


def check_same_state(found: Training, expected: Training) -> None:
    assert devices_of(found) == {CPU}
    check_layout(found)
    for name, value in found.state().items():
        assert torch.equal(value, expected.state()[name]), name


def test_checkpoints_of_dtensors_leave_state_on_the_host():
    run_ranks(with_device, 2, checkpoint_sharded)


def train_replicas(device: Device, **options: Any) -> None:
    options["process_group"] = dist.group.WORLD
    expected = Training(**options)
    for _ in range(3):
        expected.step()
    training = Training(**options)
    training.turn_on()
    for _ in range(3):
        training.step()
    assert devices_of(training) == {CPU}
    check_equal(training, expected)
    momentum = training.optimizer.state[training.params["w1"]]["momentum_buffer"]
    assert momentum.placements == (Shard(0),)
    assert momentum.device_mesh.device_type == "cuda"
    state_dict = training.optimizer.state_dict()
    training.optimizer.load_state_dict(state_dict)
    assert devices_of(training) == {CPU}
    training.optimizer.turn_off_cpu_offload()
    assert devices_of(training) == {CUDA}
    training.step()


@pytest.mark.parametrize("options", [{}, {"grad_reduce": "mean"}], ids=["DDP", "ZeRO-2"])
def test_state_that_replicas_divide_is_on_the_host(options):
    run_ranks(with_device, 2, train_replicas, **options)


# -- parameters in host memory, as FSDP2's CPUOffloadPolicy has them -----------------------------


def train_hosted(device: Device) -> None:
    expected = Training(placed(CUDA))
    for _ in range(3):
        expected.step()
    # AdamW's arithmetic on the host is that of the device, here.
    for is_on in (False, True):
        training = Training(placed(CPU))
        if is_on:
            training.turn_on()
        resting = device.memory.settled()
        for _ in range(3):
            training.set_gradients()
            device.operations.clear()
            device.host_operations.clear()
            device.memory.peak = device.memory.settled()
            training.optimizer.step()
            assert device.operations["baddbmm"] + device.operations["bmm"] > 0
            assert not device.host_operations["baddbmm"] + device.host_operations["bmm"]
            assert device.host_operations["_fused_adamw_"] == 1
            assert not device.operations["_fused_adamw_"]
            assert device.memory.settled() == resting
            assert {dtensors.local(p).device for p in training.params.values()} == {CPU}
            assert devices_of(training) == {CPU}
        check_equal(training, expected)
        check_layout(training)
    training.optimizer.turn_off_cpu_offload()
    assert devices_of(training) == {CPU}
    training.step()
    copied = copy.deepcopy(training)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    state = get_optimizer_state_dict(nn.ParameterDict(training.params), training.optimizer)
    set_optimizer_state_dict(nn.ParameterDict(training.params), training.optimizer, state)
    assert devices_of(training) == {CPU}
    assert "w1" in str(training.optimizer.summary())
    training.step()
    copied.step()
    check_equal(training, copied)
    assert device.memory.settled() == resting


def test_parameters_in_host_memory_are_computed_on_the_device_and_stay():
    run_ranks(with_device, 2, train_hosted)


def transient_bytes(device: Device, training: Training) -> int:
    """Bytes that a later step takes of the device beside what is there before it."""
    for _ in range(2):
        training.set_gradients()
        resting = device.memory.settled()
        peak = device.memory.peak_of(training.optimizer.step)
    return peak - resting


def stream_hosted(device: Device) -> None:
    # With gradients that stay: letting them go would make room in one case only.
    options: dict[str, Any] = {"none_grad": False, "chunk_size": 1}
    off = transient_bytes(device, Training(placed(CUDA), **options))
    training = Training(placed(CPU), **options)
    training.turn_on()
    on = transient_bytes(device, training)
    chunk = 2 * 4 * (96 * 64 + 64 * 128) // 2  # momentum and gradients of the largest one
    assert on <= off + max(SLOT_BYTES, chunk), (on, off)


def test_streaming_parameters_in_host_memory_takes_slots_beside_what_is_computed():
    run_ranks(with_device, 2, stream_hosted)


VARIANTS: list[dict[str, Any]] = [
    dict(cautious=True, decay_lr="adjusted", comm_dtype=torch.float32),
    dict(momentum_dtype=torch.bfloat16, momentum_style="ema", nesterov=False, maximize=True),
    dict(none_grad=False),
    dict(missing_grad="zero", chunk_size=1),
    dict(missing_grad="zero", lr=torch.tensor(0.1), weight_decay=0.0),
    dict(
        clip_config={
            "head_dim": 32,
            "threshold": 2.0,
            "row_map": {
                "w1": "(q=32 + 16 + q=32 + 16) d",
                "w2": "(k=64) d",
                "norm": "(k=64) d",
            },
        }
    ),
]


def train_variants(device: Device, options: dict[str, Any]) -> None:
    every = []
    for at, is_on in itertools.product((CUDA, CPU), (False, True)):
        training = Training(placed(at), **options)
        every.append(training)
        if is_on:
            training.turn_on()
        for _ in range(2):
            training.set_gradients()
            if "missing_grad" in options:
                for name in ("w1", "norm"):
                    training.params[name].grad = None
            if "clip_config" in options:
                logits = torch.tensor([3.0, 1.0]).to(CUDA)
                training.optimizer.set_qk_logits({"": logits})
            training.optimizer.step()
        check_equal(training, every[0])
        assert devices_of(training) == ({CUDA} if at == CUDA and not is_on else {CPU})


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: " ".join(options))
@pytest.mark.slow
def test_options_mix_no_devices(options):
    run_ranks(with_device, 2, train_variants, options)


# -- launches --------------------------------------------------------------------------------------
