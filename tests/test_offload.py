"""CPU offload on one device: the same bits as without, bounded memory, no races, checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from comparisons import assert_equal
from layouts import case
from offloaded import TINY, TRAININGS, Host, Muon, Pair, group, tensors_of

MIDDLE, LARGE = 60_000, 1 << 24
ALIGNMENT = 256  # bytes, of tensors on the device
WAYS = {
    "tiny slots": {"slot_bytes": TINY},
    "middle slots": {"slot_bytes": MIDDLE},
    "large slots": {"slot_bytes": LARGE},
    "default slots": {},
    "slots of one byte, which carry as little as can be": {"slot_bytes": 1},
}

pytestmark = pytest.mark.usefixtures("one_thread")


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", TRAININGS)
def test_steps_are_those_without_offload_to_the_bit(training):
    """Turned on before a first step and later, changed while it is on, and toggled."""
    for first in (0, 1):
        pair = Pair(training)
        pair.step(first)
        for number, (name, how) in enumerate(WAYS.items(), first):
            with case(f"{name}, turned on after {first} steps"):
                pair.turn_on(**how)
                pair.step_and_compare()
                if number % 2:
                    pair.ours.turn_off_cpu_offload()
                    pair.step_and_compare()


@pytest.mark.parametrize("shape", [(40, 24), (2, 5, 150), (7, 333)], ids=str)
def test_pieces_of_adamws_are_cut_where_the_fused_kernel_rounds_alike(shape):
    for slot_bytes in (1, 7_000, 12_000):
        start = torch.linspace(-1, 1, 2**12)[: torch.Size(shape).numel()].view(shape)
        params = [nn.Parameter(start.clone()) for _ in range(2)]
        optims = [Muon([{"params": [param], "use_muon": False}], lr=0.1) for param in params]
        optims[1].turn_on_cpu_offload(slot_bytes=slot_bytes, backend=Host())
        for _ in range(3):
            grad = torch.randn(shape)
            for param, optim in zip(params, optims):
                param.grad = grad.clone()
                optim.step()
        assert torch.equal(*params)
        assert optims[1].state[params[1]]["step"] == 3  # though it was made in pieces


@pytest.mark.parametrize("how", WAYS)
def test_momentum_follows_a_dtype_that_changes(how):
    pair = Pair("second moments, cautious")
    pair.turn_on(**WAYS[how])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        pair.change(0, momentum_dtype=dtype)
        pair.step_and_compare()
        assert pair.ours.state[pair.params[0][0]]["momentum_buffer"].dtype == dtype


def test_state_may_be_changed_by_hand_and_groups_may_come_and_parameters_leave_and_return():
    pair, both = Pair(), lambda: zip((pair.ours, pair.twin), zip(*pair.params))
    backend = pair.turn_on(slot_bytes=TINY)
    pair.step()
    pair.ours.synchronize_offload()
    assert backend.allocated_bytes == 0
    for optim, params in both():
        optim.state[params[0]]["momentum_buffer"].mul_(0.5)
        optim.state[params[-1]]["exp_avg"] = torch.ones_like(params[-1])
    pair.step_and_compare(2)
    for optim, _ in both():
        optim.add_param_group(group(((20, 20),), "more"))
    pair.step_and_compare(2)
    swapped = [optim.param_groups[1]["params"] for optim, _ in both()]
    for optim, _ in both():
        optim.param_groups[1]["params"] = group(((5, 5),))["params"]
    pair.step_and_compare()
    for (optim, _), params in zip(both(), swapped):
        optim.param_groups[1]["params"] = params
    pair.step_and_compare(2)
    with torch.inference_mode():  # leaves memory that later steps can use
        pair.give_gradients()
        pair.ours.step()
    pair.twin.step()
    pair.step_and_compare(2)


# -- on and off ------------------------------------------------------------------------------------


def are_the_same(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(one is other for one, other in zip(tensors, others, strict=True))


def test_turning_on_and_off_again_changes_nothing():
    pair = Pair()

    def says(word: str) -> bool:
        return word in pair.ours.summary().totals["state"]

    assert pair.ours.cpu_offload is False and says("parameters")
    pair.ours.turn_off_cpu_offload()
    pair.step()
    backend = pair.turn_on()
    before = tensors_of(pair.ours)
    pair.turn_on(backend=backend)
    pair.ours.turn_on_cpu_offload()  # the same backend
    assert are_the_same(tensors_of(pair.ours), before)
    assert pair.ours.cpu_offload is True and says("host memory")
    pair.step_and_compare()
    assert backend.peak_bytes > 0
    for _ in range(2):
        pair.ours.turn_off_cpu_offload()
        before = tensors_of(pair.ours)
    assert are_the_same(tensors_of(pair.ours), before) and says("parameters")
    pair.step_and_compare()


def test_without_an_accelerator_it_costs_nothing():
    pair = Pair("second moments, cautious")
    pair.step()
    before = tensors_of(pair.ours)
    pair.ours.turn_on_cpu_offload(slot_bytes=1)
    assert "CPU" in pair.ours.summary().totals["state"]
    pair.step_and_compare()
    assert are_the_same(tensors_of(pair.ours), before)


@pytest.mark.parametrize("key, value", [
    *(("slot_bytes", bad) for bad in (0, -1, 1.5, "1 MiB", True)),
    ("backend", Host), ("backend", "host"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_and_turns_nothing_on(key, value):
    pair = Pair()
    with pytest.raises(ValueError, match=key):
        pair.ours.turn_on_cpu_offload(**{"backend": Host(), key: value})
    assert not pair.ours.cpu_offload
    pair.step_and_compare()


def test_capturable_steps_with_offload_are_refused_before_anything_is_changed():
    pair = Pair("AdamW only", capturable=True)
    pair.turn_on()
    pair.give_gradients()
    with pytest.raises(ValueError, match="capturable=False"):
        pair.ours.step()
    for p, q in pair.params:
        assert_equal(p, q)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", ["second moments, cautious", "transposed", "dtypes", "gram"])
def test_a_step_takes_no_more_of_the_device_than_the_slots(training):
    for slot_bytes in (TINY, 20_000, 30_000, MIDDLE, 100_000):
        pair = Pair(training)
        backend = pair.turn_on(slot_bytes=slot_bytes)
        pair.step_and_compare(2)
        state = sum(t.nbytes for t in tensors_of(pair.ours))
        largest = 4 * 2 * 72 * 40 * (2 if training == "gram" else 1)  # of a chunk, in bytes
        assert min(slot_bytes, state) / 3 <= backend.peak_bytes <= max(slot_bytes, largest)
        assert backend.allocated_bytes == 0
    backend = pair.turn_on(backend=Host())  # as much as the state needs, if that is less
    pair.step_and_compare()
    assert state <= backend.peak_bytes <= state + ALIGNMENT * len(tensors_of(pair.ours))


# -- copies ----------------------------------------------------------------------------------------


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("situation", ["off", "streamed", "not used yet"])
@pytest.mark.parametrize("is_saved", [False, True], ids=["deepcopy", "torch.save"])
def test_copies_go_on_to_the_bit_and_the_original_too(situation, is_saved):
    pair, backend = Pair("second moments, cautious"), Host()
    if situation != "off":
        pair.turn_on(slot_bytes=TINY, backend=backend)
    pair.step(0 if situation == "not used yet" else 2)
    peak = backend.peak_bytes
    file = io.BytesIO(saved(pair))
    other = torch.load(file, weights_only=False) if is_saved else copy.deepcopy(pair)
    for data in (pickle.dumps, saved):
        assert len(data(pair.ours)) <= 1.01 * len(data(pair.twin))
    assert backend.peak_bytes == peak
    other.step_and_compare()
    other.turn_on(slot_bytes=TINY)
    other.step_and_compare(2)
    other.ours.turn_off_cpu_offload()
    other.step_and_compare()
    pair.step_and_compare(2)


# -- order -----------------------------------------------------------------------------------------


class Log(Host):
    """The order of what is given to the queues: loads that come, are used, and leave."""

    events: list[tuple[str, Any]]  # with addresses on the host

    def copy(self, on: str, targets: Any, sources: Any) -> None:
        self.events.append((on, [t.data_ptr() for t in (sources if on == "in" else targets)]))
        super().copy(on, targets, sources)

    def record(self, on: str) -> Any:
        event = super().record(on)
        event.queue = on
        return event

    def wait(self, on: str, event: Any) -> None:
        super().wait(on, event)
        if on == "compute" and event.queue == "in":
            self.events.append((on, []))


@pytest.mark.parametrize("training", ["small", "second moments, cautious", "transposed"])
def test_loads_come_and_leave_in_the_order_of_their_use_ahead_of_it(training):
    pair, log = Pair(training), Log()
    pair.turn_on(backend=log, slot_bytes=MIDDLE)
    for _ in range(2):
        log.events = []
        pair.step()
    come, leave = ([hosts for on, hosts in log.events if on == queue] for queue in ("in", "out"))
    assert [hosts for hosts in come if hosts] == leave and len(leave) >= 6
    queues = [on for on, _ in log.events]
    assert queues.count("compute") == len(come)
    for used, place in enumerate(at for at, on in enumerate(queues) if on == "compute"):
        ahead = queues[:place].count("in") - used - 1  # beside the one that is used
        assert ahead >= min(2, len(come) - used - 1)


@pytest.mark.parametrize("call", ["load_state_dict", "turn_off_cpu_offload"])
def test_memory_of_the_host_goes_when_all_that_reads_it_is_done(call):
    pair, backend = Pair("small"), Host(delay=0.05)
    pair.turn_on(backend=backend)
    pair.step()
    arguments = [copy.deepcopy(pair.ours.state_dict())] if call == "load_state_dict" else []
    backend.copy("in", [torch.zeros(1)], [torch.zeros(1)])
    read = backend.record("in")
    getattr(pair.ours, call)(*arguments)
    assert read.is_set()


# -- errors ----------------------------------------------------------------------------------------


def test_loading_repairs_what_a_copy_that_failed_has_left():
    pair = Pair("second moments, cautious")
    backend = pair.turn_on(slot_bytes=TINY)
    pair.step(2)
    checkpoint = copy.deepcopy(pair.ours.state_dict())
    weights = [p.detach().clone() for p, _ in pair.params]
    backend.copy("in", [torch.zeros(3)], [torch.zeros(4)])
    with pytest.raises(RuntimeError, match="a copy failed"):
        pair.step()
        pair.ours.synchronize_offload()
    pair.ours.load_state_dict(checkpoint)
    pair.twin.load_state_dict(copy.deepcopy(checkpoint))
    with torch.no_grad():
        for (p, q), weight in zip(pair.params, weights):
            p.copy_(weight)
            q.copy_(weight)
    pair.step_and_compare()
