"""CPU offload over the life of an optimizer: state changed by hand, errors, copies, ends."""

from __future__ import annotations

import copy
import gc
import importlib

import pytest
import torch

from kernel import optimizer
from offloaded import (
    TINY,
    Host,
    Muon,
    Pair,
    adamw_group_of,
    host,
    muon_group_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def offloaded() -> tuple[Pair, object]:
    pair = Pair()
    backend = pair.turn_on(slot_bytes=TINY)
    pair.step()
    return pair, backend


def test_state_is_there_to_be_changed_by_hand_when_offload_is_synchronized():
    pair, backend = offloaded()
    pair.ours.synchronize_offload()
    assert backend.allocated_bytes == 0
    pair.compare()
    for (p, q), optim in ((pair.params[0], pair.ours), (pair.params[0], pair.twin)):
        optim.state[p if optim is pair.ours else q]["momentum_buffer"].mul_(0.5)
    pair.step_and_compare(2)


def test_a_step_in_inference_mode_leaves_memory_that_later_ones_can_use():
    pair, _ = offloaded()
    pair.give_gradients()
    with torch.inference_mode():
        pair.ours.step()
    pair.twin.step()
    pair.step_and_compare(2)


def test_loading_repairs_what_a_copy_that_failed_has_left():
    pair, backend = offloaded()
    saved = copy.deepcopy(pair.ours.state_dict())
    twins = copy.deepcopy((pair.params, pair.twin))  # weights as of now, and their optimizer
    pair.ours.synchronize_offload()
    backend._errors.append(RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="a copy failed"):
        pair.step()
        pair.ours.synchronize_offload()
    pair.ours.load_state_dict(saved)
    with torch.no_grad():
        for (p, _), (q, _) in zip(pair.params, twins[0]):
            p.copy_(q)
    pair.step()
    for p, _ in pair.params:
        assert torch.isfinite(p).all()


def test_a_moment_that_is_replaced_counts():
    pair, _ = offloaded()
    p, q = pair.params[-1]
    pair.ours.state[p]["exp_avg"] = torch.ones_like(p)
    pair.twin.state[q]["exp_avg"] = torch.ones_like(q)
    pair.step_and_compare(2)


def test_parameters_that_leave_the_groups_and_come_back_have_their_newest_state():
    pair, _ = offloaded()
    swapped = [optim.param_groups[1]["params"] for optim in (pair.ours, pair.twin)]
    for optim in (pair.ours, pair.twin):
        optim.param_groups[1]["params"] = adamw_group_of(((5, 5),))["params"]
    pair.step_and_compare()
    for optim, params in zip((pair.ours, pair.twin), swapped):
        optim.param_groups[1]["params"] = params
    pair.step_and_compare(2)


def test_state_of_parameters_outside_the_groups_comes_back_when_offload_is_turned_off():
    pair, _ = offloaded()
    params = pair.ours.param_groups[1]["params"]
    pair.ours.param_groups[1]["params"] = []
    pair.ours.turn_off_cpu_offload()
    assert not pair.ours._offload._offloaded
    pair.ours.param_groups[1]["params"] = params
    pair.step_and_compare()


def test_an_error_within_a_step_gives_the_devices_memory_back():
    pair, backend = offloaded()
    pair.give_gradients()
    (p, _), *_ = pair.params
    p.grad = Uncomputable(p.grad)
    with pytest.raises(RuntimeError, match="broke off: ArithmeticError"):
        pair.ours.step()
    assert backend.allocated_bytes == 0


def test_an_error_as_a_step_begins_gives_the_devices_memory_back(monkeypatch):
    pair, backend = offloaded()
    pair.give_gradients()

    def fail(*_: object) -> None:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(backend, "copy", fail)
        with pytest.raises(ArithmeticError):
            pair.ours.step()
    assert backend.allocated_bytes == 0


class Uncomputable(torch.Tensor):
    """A gradient with which nothing can be computed."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "foreach" in func.__name__ or "adamw" in func.__name__ or func.__name__ == "to":
            raise ArithmeticError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_memory_goes_with_the_optimizer_without_the_garbage_collector():
    pair, backend = offloaded()
    (arena,) = [device.arena for device in pair.ours._offload._devices.values()]
    assert arena.nbytes > 0
    gc.collect()
    gc.disable()
    try:
        for queue in ("in", "out"):
            backend.synchronize(backend.record(queue))  # what it has to do keeps its memory
        del pair.ours
        assert arena.nbytes == 0
    finally:
        gc.enable()


def test_groups_that_come_later_are_planned_for():
    optim = Muon([{"params": [], "use_muon": True}], lr=0.01)
    optim.turn_on_cpu_offload(backend=host())
    optim.add_param_group(muon_group_of(((16, 16),)))
    assert "in host memory" in str(optim.summary()) and optim._settings.streams_state


def test_it_can_be_told_whether_offload_is_on():
    pair = Pair()
    assert pair.ours.cpu_offload is False
    assert pair.ours.summary().totals["state"] == "with its parameters"
    pair.ours.turn_on_cpu_offload()
    assert pair.ours.cpu_offload is True
    assert "on the CPU" in pair.ours.summary().totals["state"]
    pair.turn_on()
    assert pair.ours.summary().totals["state"] == "in host memory"
    pair.ours.turn_off_cpu_offload()
    assert pair.ours.cpu_offload is False


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"backend": Host}, "backend must be"),
        ({"backend": "host"}, "backend must be"),
        ({"slot_bytes": True}, "slot_bytes must be"),
    ],
)
def test_what_makes_no_sense_is_refused_and_turns_nothing_on(how, message):
    pair = Pair()
    with pytest.raises(ValueError, match=message):
        pair.ours.turn_on_cpu_offload(**how)
    assert not pair.ours.cpu_offload


def test_host_memory_is_let_go_of_behind_the_copies():
    arena = importlib.import_module(f"{optimizer.__name__}.cpu_offload.arena")
    calls: list[str] = []
    memory = arena.Arena(
        torch.device("cuda"),
        lambda address, nbytes: calls.append("register"),
        lambda address: calls.append("unregister"),
        lambda: calls.append("drain"),
    )
    tensors = memory.allocate([100])
    del tensors
    assert calls == ["register", "drain", "unregister"]
