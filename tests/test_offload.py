"""CPU offload on one device: the same bits as without, bounded memory, no races, checkpoints."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode

from comparisons import assert_equal, assert_same_training
from layouts import case
from offloaded import (
    REST,
    TINY,
    TRAININGS,
    Host,
    Muon,
    Pair,
    adamw_group_of,
    host,
    models,
    muon_group_of,
    tensors_of,
)
from race_detector import COMPUTE, IN, OUT, Recorder

MIDDLE, LARGE = 60_000, 1 << 24
EXPLICIT = [(1.5, -0.5, 0.0)]  # one iteration: few figures where only bytes matter

WAYS = {
    "tiny slots": {"slot_bytes": TINY},
    "middle slots": {"slot_bytes": MIDDLE},
    "large slots": {"slot_bytes": LARGE},
    "default slots": {},
}


pytestmark = pytest.mark.usefixtures("one_thread")


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", TRAININGS)
def test_steps_are_those_without_offload_to_the_bit(training):
    for number, (name, how) in enumerate(WAYS.items(), list(TRAININGS).index(training)):
        with case(f"{name}, turned on after {number % 2} steps"):
            pair = Pair(training)
            pair.step(number % 2)
            pair.turn_on(**how)
            pair.step_and_compare(2)
            pair.ours.turn_off_cpu_offload()
            pair.step_and_compare()


@pytest.mark.parametrize("training", ["second moments, cautious", "transposed", "dtypes"])
def test_steps_are_the_same_when_it_is_toggled_and_changed_at_any_time(training):
    pair = Pair(training)
    for how in itertools.islice(itertools.cycle(WAYS.values()), 7):
        pair.turn_on(**how)
        pair.step_and_compare()
        pair.ours.turn_off_cpu_offload()
        pair.step()
    backend = pair.turn_on()
    for how in (*WAYS.values(), *reversed(WAYS.values())):  # changed while on
        pair.turn_on(backend=backend, **how)
        pair.step_and_compare()
    pair.turn_on()  # another backend
    pair.step_and_compare()


def test_slots_of_one_byte_carry_as_little_as_can_be():
    pair = Pair("dtypes")
    pair.turn_on(slot_bytes=1, backend=Host())
    pair.step_and_compare(2)


@pytest.mark.parametrize("slot_bytes", [1, 7_000, 12_000])
@pytest.mark.parametrize("shape", [(40, 24), (2, 5, 150), (7, 333)], ids=str)
def test_pieces_of_adamws_are_cut_where_the_fused_kernel_rounds_alike(shape, slot_bytes):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape))]
    params.append(nn.Parameter(params[0].detach().clone()))
    grads = [torch.randn(shape) for _ in range(3)]
    optims = [Muon([{"params": [param], "use_muon": False}], lr=0.1) for param in params]
    optims[1].turn_on_cpu_offload(slot_bytes=slot_bytes, backend=Host())
    for grad in grads:
        for param, optim in zip(params, optims):
            param.grad = grad.clone()
            optim.step()
    assert torch.equal(*params)


@pytest.mark.parametrize("how", WAYS)
def test_momentum_follows_a_dtype_that_changes(how):
    pair = Pair("second moments, cautious")
    pair.turn_on(**WAYS[how])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for optim in (pair.ours, pair.twin):
            optim.param_groups[0]["momentum_dtype"] = dtype
        pair.step_and_compare()
        assert pair.ours.state[pair.params[0][0]]["momentum_buffer"].dtype == dtype


def test_pieces_of_a_large_tensor_count_one_step_of_adamw():
    pair = Pair("AdamW only")
    pair.turn_on(slot_bytes=TINY)
    pair.step(3)
    assert [int(pair.ours.state[p]["step"]) for p, _ in pair.params] == [3] * len(REST)


def test_a_group_that_is_added_is_offloaded_too():
    pair = Pair()
    pair.turn_on(slot_bytes=TINY)
    pair.step()
    for optim in (pair.ours, pair.twin):
        optim.add_param_group(muon_group_of(((20, 20),), "more"))
    pair.step_and_compare(2)
    assert host_bytes(pair.ours) >= sum(t.nbytes for t in tensors_of(pair.ours))


def train(model: nn.Module, optim: Any, step: int) -> None:
    tokens = torch.randint(0, 30, (8,), generator=torch.Generator().manual_seed(step))
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optim.step()
    optim.zero_grad()


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", ["second moments, cautious", "transposed", "dtypes", "gram"])
@pytest.mark.parametrize("slot_bytes", [TINY, 20_000, 30_000, MIDDLE, 100_000])
def test_a_step_takes_no_more_of_the_device_than_the_slots(training, slot_bytes):
    pair = Pair(training)
    backend = pair.turn_on(slot_bytes=slot_bytes)
    pair.step_and_compare(2)
    state = sum(t.nbytes for t in tensors_of(pair.ours))
    largest = 4 * 2 * 72 * 40 * (2 if training == "gram" else 1)  # of a chunk, in bytes
    assert min(slot_bytes, state) / 3 <= backend.peak_bytes <= max(slot_bytes, largest)
    assert backend.allocated_bytes == 0


def arenas_of(optim: Any) -> list[Any]:
    return [device.arena for device in optim._offload._devices.values()]


def host_bytes(optim: Any) -> int:
    return sum(arena.nbytes for arena in arenas_of(optim))


LAYER = ((192, 192), (48, 192), (48, 192), (192, 192), (512, 192), (512, 192), (192, 512))


@pytest.mark.parametrize("early", [True, False], ids=["before the state", "after it"])
def test_host_memory_is_the_states_within_2_percent_and_goes_with_offload(early):
    groups = [muon_group_of(LAYER * 2), adamw_group_of(((1000, 192), (192,), (192,), (192,)))]
    optim = Muon(groups, lr=0.01, beta2=0.9, ns_coefficients=EXPLICIT)
    if not early:
        optim.state_dict()
    optim.turn_on_cpu_offload(backend=Host())
    state = sum(t.nbytes for t in tensors_of_known(optim))
    assert state > 2**20 and state <= host_bytes(optim) <= 1.02 * state
    optim.param_groups[0]["momentum_dtype"] = torch.bfloat16
    state = sum(t.nbytes for t in tensors_of_known(optim))
    optim.load_state_dict(copy.deepcopy(optim.state_dict()))
    assert state <= host_bytes(optim) <= 1.02 * state
    arenas = arenas_of(optim)
    optim.turn_off_cpu_offload()
    assert arenas and not any(arena.nbytes for arena in arenas)


def tensors_of_known(optim: Any) -> list[torch.Tensor]:
    optim.state_dict()
    return tensors_of(optim)


def test_no_other_copy_of_the_state_stays_alive():
    pair = Pair("second moments, cautious")
    pair.step()
    memories = []
    for own in pair.ours.state.values():
        for key, tensor in own.items():
            if key != "step" and tensor.numel():
                memory = bytearray_of(tensor)
                memories.append(weakref.ref(memory))
                own[key] = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
                del memory
    del tensor, own
    assert all(memory() is not None for memory in memories)
    pair.turn_on()
    assert all(memory() is None for memory in memories)
    pair.step_and_compare()


def bytearray_of(tensor: torch.Tensor) -> Any:
    class Memory(bytearray):  # which can be referred to weakly
        pass

    return Memory(tensor.flatten().view(torch.uint8).numpy().tobytes())


# -- checkpoints -----------------------------------------------------------------------------------


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


# How the state is when something happens to it.
SITUATIONS: dict[str, Callable[[Pair], Any]] = {}


def situation(arrange: Callable[[Pair], Any]) -> Callable[[Pair], Any]:
    SITUATIONS[arrange.__name__.replace("_", " ")] = arrange
    return arrange


@situation
def off(pair: Pair) -> Any:
    pair.step(2)
    return None


@situation
def streamed(pair: Pair) -> Any:
    pair.step()
    backend = pair.turn_on(slot_bytes=TINY)
    pair.step()
    return backend


@situation
def not_used_yet(pair: Pair) -> Any:
    return pair.turn_on()


in_situations = pytest.mark.parametrize("arrange", SITUATIONS.values(), ids=SITUATIONS)
TRAINED = ("second moments, cautious", "dtypes")


@in_situations
@pytest.mark.parametrize("training", TRAINED)
def test_a_state_dict_is_the_one_without_offload(arrange, training):
    pair = Pair(training)
    arrange(pair)
    pair.compare()
    assert len(saved(pair.ours.state_dict())) <= 1.01 * len(saved(pair.twin.state_dict()))
    pair.step_and_compare(2)


@pytest.mark.parametrize(
    "first, second",
    [
        *((name, "streamed") for name in SITUATIONS),
        *(("off", name) for name in SITUATIONS),
    ],
)
def test_a_state_dict_loads_whichever_of_both_are_offloaded(first, second):
    pair, other = Pair(TRAINED[0]), Pair(TRAINED[0])
    SITUATIONS[first](pair)
    backend = SITUATIONS[second](other)
    peak = backend.peak_bytes if backend is not None else 0
    state_dict = pair.ours.state_dict()
    other.ours.load_state_dict(state_dict)
    other.twin.load_state_dict(copy.deepcopy(state_dict))
    with torch.no_grad():  # the twin may be behind in weights
        for p, q in other.params:
            p.copy_(q)
    assert backend is None or backend.peak_bytes == peak
    assert backend is None or backend.allocated_bytes == 0
    other.compare()
    other.step_and_compare(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_loaded_momentum_keeps_its_dtype_and_loads_into_its_group_s(dtype):
    pair, other = Pair(momentum_dtype=dtype), Pair()
    streamed(pair)
    streamed(other)
    for optim in (other.ours, other.twin):
        optim.load_state_dict(copy.deepcopy(pair.ours.state_dict()))
    other.step_and_compare(2)
    assert other.ours.state[other.params[0][0]]["momentum_buffer"].dtype == dtype


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": lambda pair: loaded(saved(pair)),
}


@in_situations
@pytest.mark.parametrize("how", COPIES)
def test_copies_go_on_to_the_bit_and_the_original_too(arrange, how):
    pair = Pair(TRAINED[0])
    backend = arrange(pair)
    peak = backend.peak_bytes if backend is not None else 0
    other = COPIES[how](pair)
    sizes = [len(data(o)) for data in (pickle.dumps, saved) for o in (pair.ours, pair.twin)]
    assert sizes[0] <= 1.01 * sizes[1] and sizes[2] <= 1.01 * sizes[3]
    assert backend is None or backend.peak_bytes == peak
    other.step_and_compare()
    other.turn_on(slot_bytes=TINY)
    other.step_and_compare(2)
    other.ours.turn_off_cpu_offload()
    other.step_and_compare()
    pair.step_and_compare(2)


@pytest.mark.parametrize("kind", ["nested", "flattened", "full"])
def test_torchs_functions_for_distributed_checkpoints_see_no_difference(kind):
    how = {
        "nested": StateDictOptions(),
        "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
        "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
    }[kind]
    (model, optim), (other, twin) = models(beta2=0.9)
    optim.turn_on_cpu_offload(slot_bytes=TINY, backend=host())
    fresh = [
        get_optimizer_state_dict(m, o, options=how) for m, o in ((model, optim), (other, twin))
    ]
    assert_equal(*fresh, strides=True)
    for step in range(2):
        train(model, optim, step)
        train(other, twin, step)
    state, expected = (
        copy.deepcopy(get_optimizer_state_dict(m, o, options=how))
        for m, o in ((model, optim), (other, twin))
    )
    assert_equal(state, expected, strides=True)
    for step in range(2, 4):
        train(model, optim, step)
        set_optimizer_state_dict(model, optim, copy.deepcopy(expected), options=how)
        set_optimizer_state_dict(other, twin, copy.deepcopy(expected), options=how)
        other.load_state_dict(model.state_dict())
        train(model, optim, step)
        train(other, twin, step)
        assert_same_training(model, optim, other, twin)


# -- on and off -----------------------------------------------------------------------------------


def test_turning_on_and_off_again_changes_nothing():
    pair = Pair()
    pair.ours.turn_off_cpu_offload()
    pair.step()
    backend = pair.turn_on()
    before = tensors_of(pair.ours)
    pair.turn_on(backend=backend)
    pair.ours.turn_on_cpu_offload()  # the same backend
    assert all(one is other for one, other in zip(tensors_of(pair.ours), before))
    pair.step_and_compare()
    assert backend.peak_bytes > 0
    for _ in range(2):
        pair.ours.turn_off_cpu_offload()
        before = tensors_of(pair.ours)
    assert all(one is other for one, other in zip(tensors_of(pair.ours), before))
    pair.step_and_compare()


def test_wrong_input_is_refused_and_changes_nothing():
    pair = Pair()
    optim = pair.ours
    for slot_bytes in (0, -1, 1.5, "1 MiB"):
        with pytest.raises(ValueError, match="slot_bytes must be None or an int ≥ 1"):
            optim.turn_on_cpu_offload(slot_bytes=slot_bytes, backend=Host())
    pair.step_and_compare()


def test_capturable_steps_with_offload_are_refused_before_anything_is_changed():
    pair = Pair("AdamW only", capturable=True)
    pair.turn_on()
    pair.give_gradients()
    with pytest.raises(ValueError, match="capturable=False"):
        pair.ours.step()
    for p, q in pair.params:
        assert_equal(p, q)


def test_without_an_accelerator_it_costs_nothing():
    pair = Pair("second moments, cautious")
    pair.step()
    before = tensors_of(pair.ours)
    pair.ours.turn_on_cpu_offload(slot_bytes=1)
    pair.step_and_compare()
    assert host_bytes(pair.ours) == 0
    pair.ours.turn_off_cpu_offload()
    pair.step_and_compare()
    assert all(one is other for one, other in zip(tensors_of(pair.ours), before))


# -- order -----------------------------------------------------------------------------------------


NARROW = 8192  # less than the state of what follows


def load(pair: Pair) -> None:
    pair.step()
    for _ in range(2):
        pair.ours.load_state_dict(copy.deepcopy(pair.ours.state_dict()))
        pair.step()


def turn_off_and_on(pair: Pair) -> None:
    pair.step()
    backend = pair.ours._offload._backend
    pair.ours.turn_off_cpu_offload()
    pair.step()
    pair.ours.turn_on_cpu_offload(backend=backend)
    pair.step()


def change_dtype(pair: Pair) -> None:
    pair.step()
    for dtype in (torch.bfloat16, torch.float32):
        for optim in (pair.ours, pair.twin):
            optim.param_groups[0]["momentum_dtype"] = dtype
        pair.step()


def save(pair: Pair) -> None:
    for _ in range(3):
        pair.step()
        pair.compare()


SCENARIOS: dict[str, tuple[dict[str, Any], Callable[[Pair], None]]] = {
    "stream": ({"slot_bytes": NARROW}, lambda pair: pair.step(2)),
    "stream through large slots": ({}, lambda pair: pair.step(2)),
    "load": ({}, load),
    "turn off": ({}, turn_off_and_on),
    "change dtype": ({"slot_bytes": NARROW}, change_dtype),
    "save": ({"slot_bytes": NARROW}, save),
}


def recorded(scenario: str, dropped: Any = ()) -> Recorder:
    how, run = SCENARIOS[scenario]
    pair, recorder = Pair("small"), Recorder(dropped)
    with recorder.watching():
        pair.turn_on(backend=recorder, **how)
        run(pair)
    pair.compare()
    return recorder


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_races(scenario):
    assert recorded(scenario).races == []


def sites_that_race_without(scenario: str) -> set[str]:
    sites = sorted(set(recorded(scenario).waits))
    return {
        site
        for site in sites
        if recorded(scenario, lambda _, other: other == site).races  # noqa: B023
    }


def test_no_wait_can_be_left_out():
    methods = ("open", "acquire", "release", "_make_room", "close")
    assert sites_that_race_without("stream") == {f"Ring.{name}" for name in methods}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_single_call_of_wait_can_be_left_out(scenario):
    waits = recorded(scenario).waits
    some = random.Random(scenario).sample(range(len(waits)), min(len(waits), 8))
    assert not [waits[place] for place in some if not recorded(scenario, [place]).races]


class Failure(RuntimeError):
    pass


class Failing(TorchDispatchMode):
    """Raises in one of torch's operations with data, but not in copies, as without memory."""

    def __init__(self, number: int, recorder: Recorder):
        super().__init__()
        self.left = number
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= not (self.recorder._is_quiet or func.is_view)
        if self.left == 0:
            self.left = -1
            raise Failure(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_that_fails_anywhere_leaves_no_race_and_loading_repairs_it():
    failed = 0
    for number in itertools.count(1, 17):
        pair, recorder = Pair("small"), Recorder()
        with recorder.watching():
            pair.turn_on(backend=recorder, slot_bytes=NARROW)
            pair.step()
            checkpoint = copy.deepcopy(pair.ours.state_dict())
            pair.give_gradients()
            try:
                with Failing(number, recorder):
                    pair.ours.step()
                break  # it has fewer operations
            except RuntimeError as error:
                failed += 1
                if not isinstance(error, Failure):  # it had written something
                    pair.ours.load_state_dict(checkpoint)
            pair.step()
        saved(pair.ours.state_dict())
        assert recorder.races == []
        assert all(t.isfinite().all() for t in tensors_of(pair.ours))
        pair.ours.turn_off_cpu_offload()
        assert recorder.allocated_bytes == 0, number
    assert failed > 5


class Log(Recorder):
    """The order of what is given to the queues: loads that come, are used, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, tuple[int, ...]]] = []  # with addresses on the host

    def copy(
        self, on: str, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        hosts = sources if on == IN else targets
        self.events.append((on, tuple(h.data_ptr() for h in hosts)))
        super().copy(on, targets, sources)

    def wait(self, on: str, event: Any) -> None:
        super().wait(on, event)
        if on == COMPUTE and event.queue == IN:
            self.events.append((COMPUTE, ()))


@pytest.mark.parametrize("training", ["small", "second moments, cautious", "transposed"])
def test_loads_come_and_leave_in_the_order_of_their_use_ahead_of_it(training):
    pair, log = Pair(training), Log()
    pair.turn_on(backend=log, slot_bytes=MIDDLE)
    pair.step()
    log.events.clear()
    pair.step()
    come, leave = ([hosts for on, hosts in log.events if on == queue] for queue in (IN, OUT))
    assert [hosts for hosts in come if hosts] == leave and len(leave) >= 6
    used = ahead = 0
    for on, _ in log.events:
        ahead += (on == IN) - (on == COMPUTE)
        used += on == COMPUTE
        if on == COMPUTE:
            assert ahead >= min(2, len(come) - used)  # beside the one that is used
    assert used == len(come) and ahead == 0


@pytest.mark.parametrize("call", ["load_state_dict", "turn_off_cpu_offload"])
def test_memory_of_the_host_goes_when_all_that_reads_it_is_done(call):
    pair, recorder = Pair("small"), Recorder()
    pair.turn_on(backend=recorder)
    pair.step()
    arguments = [copy.deepcopy(pair.ours.state_dict())] if call == "load_state_dict" else []
    read = recorder.record(IN)
    assert not recorder.is_done(read)
    getattr(pair.ours, call)(*arguments)
    assert recorder.is_done(read)
