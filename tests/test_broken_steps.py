"""A step that breaks off anywhere, on one rank or all, is never gone on from as if it were whole.

An exception, an interrupt, a rank that is killed or stops: either nothing has changed, and the step
can be repeated; or the optimizer is marked, and neither steps nor lets itself be saved or copied
before a checkpoint is loaded.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.profiler import record_function

from breaking import Fault, Interrupt, fail, refused
from comparisons import assert_equal
from kernel import optimizer
from layouts import EXACT, case, local, params_of, part, set_gradients
from ranks import Outcome, on_ranks, rank_outcomes

Muon, agreement = optimizer.Muon, optimizer.distributed.agreement
Host = optimizer.SimulatedHost

pytestmark = pytest.mark.usefixtures("one_thread")

BROKE_OFF = r"^step\(\) broke off: .*OutOfMemoryError"
EARLIER = r"^An earlier "

ATTENTION = ["layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight"]
LOGITS = {0: torch.tensor([3.0, 0.5])}
CLIP = {"clip_config": {"head_dim": 4, "threshold": 1.0}}
RICH = {"beta2": 0.9, "chunk_size": 1, "warmup_step": 1, **CLIP}
CHAIN = ((0, 1), (1, 2), (2, 3))

# In one process.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"cautious": True, **RICH},
    "missing gradients": {"missing_grad": "zero", **CLIP},
    "AdamW alone": {},
    "gradients still scaled": {},
    "streamed": {"beta2": 0.9, **CLIP},
    "exact": {"weight_rounding": "exact"},
    "stochastic": {"weight_rounding": "stochastic"},
}


class NamedHost(Host):
    """Its copies are regions of the thread that asks for them."""

    def copy(self, on: str, targets: Any, sources: Any) -> None:
        with record_function(f"copy {on}"):
            super().copy(on, targets, sources)


class Training:
    """An optimizer of every kind of parameter, whose steps can be taken again.

    Args:
        kind: one of `KINDS`.
        layout: of all ranks; None is one process.
    """

    def __init__(self, kind: str = "everything", layout: str | None = None):
        self.kind, self.layout = kind, layout
        ranks, generator = dist.get_world_size() if layout else 1, torch.Generator().manual_seed(0)
        matrices = [*[(8, 12)] * 2, *[(12, 8)] * 2, *[(16, 20)] * (2 * ranks - 2)]
        shapes = [*matrices, (2, 8, 4), (8,), (600, 16) if layout else (10, 4)]
        names = [*ATTENTION, *(f"layers.{n}.w1.weight" for n in range(len(matrices) - 2))]
        names += ["experts.w", "layers.0.attn.q_proj.bias", "embed_tokens.weight"]
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        if "weight_rounding" in KINDS[kind]:
            values = [value.bfloat16() for value in values]
        named = [(name, nn.Parameter(self.place(value))) for name, value in zip(names, values)]
        groups = [
            {"params": named[:-2], "use_muon": True},
            {"params": named[-2:], "use_muon": False},
        ]
        if layout == "chain":  # a matrix on each pair of ranks in it
            meshes = {f"{ranks}": DeviceMesh("cpu", list(ranks)) for ranks in CHAIN}
            here = [item for item in meshes.items() if dist.get_rank() in item[1].mesh]
            whole = torch.ones(6, 4)
            held = [(name, nn.Parameter(part(whole, mesh, [Shard(0)]))) for name, mesh in here]
            groups = [{"params": held, "use_muon": True}]
        options: dict[str, Any] = {**EXACT, "lr": 0.05, "expert_keys": ["experts"], **KINDS[kind]}
        if layout in ("ZeRO-2", "DDP"):
            options["process_group"] = dist.group.WORLD
            options["grad_reduce"] = "mean" if layout == "ZeRO-2" else None
        if layout == "HSDP spread":
            options["hsdp"] = "spread"
        self.optim = Muon(groups[1:] if kind == "AdamW alone" else groups, **options)
        self.params = params_of(self.optim)
        if "streamed" in (kind, layout):
            self.optim.turn_on_cpu_offload(slot_bytes=16384, backend=NamedHost())

    def place(self, value: torch.Tensor) -> torch.Tensor:
        if self.layout in (None, "DDP", "ZeRO-2", "chain"):
            return value
        if self.layout == "HSDP spread":
            return part(value, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
        if self.layout == "FSDP2 beside experts" and value.ndim > 2:  # whose ranks are pairs
            return part(value, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
        return part(value, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])

    def give_gradients(self, step: int) -> None:
        set_gradients(self.params, step + 1)
        if self.kind == "missing gradients":
            for index in (1, 3):
                self.params[index].grad = None

    def step(self, closure: Any = None) -> None:
        if self.kind == "gradients still scaled":  # as by a GradScaler that calls every step
            self.optim.grad_scale, self.optim.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        clips = "clip_config" in KINDS[self.kind]
        self.optim.step(closure, qk_logits=LOGITS if clips else None)
        for attribute in ("grad_scale", "found_inf"):
            vars(self.optim).pop(attribute, None)

    def train(self, steps: Iterable[int]) -> Training:
        for step in steps:
            self.give_gradients(step)
            self.step()
        return self

    def load(self, weights: Sequence[torch.Tensor], state_dict: Any) -> None:
        with torch.no_grad():
            for p, weight in zip(self.params, weights):
                local(p).copy_(local(weight))
        self.optim.load_state_dict(copy.deepcopy(state_dict))

    def weights(self) -> list[torch.Tensor]:
        return [local(p).clone() for p in self.params]

    def state(self) -> dict[tuple[int, str], torch.Tensor]:
        """Copies of what is not all zeros, which state is at first."""
        self.optim.synchronize_offload()
        return {
            (number, key): local(value).clone()
            for number, param in enumerate(self.params)
            for key, value in self.optim.state.get(param, {}).items()
            if value.any()
        }

    def everything(self) -> Any:
        return self.state(), self.weights()


def are_equal(found: Any, expected: Any) -> bool:
    try:
        assert_equal(found, expected)
    except AssertionError:
        return False
    return True


def is_marked(training: Training) -> bool:
    """True if the optimizer refuses everything; asking changes nothing."""
    optim = training.optim
    if not optim.is_broken:
        optim.state_dict()
        return False
    before = training.everything()
    copied, pickled = partial(copy.copy, optim), partial(pickle.dumps, optim)
    for ask in (training.step, optim.state_dict, copied, pickled):
        with pytest.raises(RuntimeError, match=EARLIER):
            ask()
    assert_equal(training.everything(), before)
    return optim.is_broken


# -- in one process, at every operation and at every line ------------------------------------------


FAULTS: dict[str, tuple[Callable[[int], Any], type[BaseException]]] = {
    "out of memory": (partial(Fault, "aten."), torch.OutOfMemoryError),
    "interrupt": (Interrupt, KeyboardInterrupt),
}


def sweep(kind: str, steps: int, fault: str, numbers: Iterable[int]) -> Counter[str]:
    """Breaks a step off at each of the numbers, until it has fewer operations or lines.

    Returns:
        How often nothing was changed, and how often the optimizer was marked.
    """
    make_fault, error_type = FAULTS[fault]
    expected, found = Training(kind).train(range(steps)), Counter[str]()
    checkpoint = expected.weights(), copy.deepcopy(expected.optim.state_dict())
    undisturbed = expected.train([steps]).everything()
    for number in numbers:
        with case(f"{fault} {number}"):
            training, failing = Training(kind).train(range(steps)), make_fault(number)
            training.give_gradients(steps)
            before = training.everything()
            grads = [(p.grad, copy.deepcopy(p.grad)) for p in training.params]
            try:
                with failing:
                    training.step()
            except error_type:  # as it was raised
                pass
            except RuntimeError as error:
                assert isinstance(error.__cause__, error_type) and training.optim.is_broken
                assert f"step() broke off: {error_type.__name__}" in str(error)
            if failing.left > 0:
                return found
            if is_marked(training):
                training.load(*checkpoint)
                training.give_gradients(steps)
                found["marked"] += 1
            elif fault == "interrupt" and are_equal(training.everything(), undisturbed):
                continue  # just after the step
            else:
                assert_equal(training.everything(), before)
                assert all(p.grad is grad for p, (grad, _) in zip(training.params, grads))
                assert_equal(*map(list, zip(*grads)))
                found["untouched"] += 1
            training.step()
            assert_equal(training.everything(), undisturbed)
    raise AssertionError("the step has more operations than that")


SWEEPS = list(itertools.product(KINDS, FAULTS))


@pytest.mark.parametrize(("kind", "fault"), SWEEPS)
def test_a_step_that_breaks_off_is_repeated_from_where_it_was_or_from_a_checkpoint(kind, fault):
    stride = {"out of memory": 31, "interrupt": 401}[fault]
    stride = 2 if (kind, fault) == ("AdamW alone", "out of memory") else stride
    assert sweep(kind, 1, fault, itertools.count(2, stride))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("kind", "fault"), SWEEPS)
def test_a_step_may_break_off_at_any_operation_and_any_line(kind, fault, steps):
    has_many = kind in ("everything", "streamed", "exact", "stochastic")
    stride = 97 if fault == "interrupt" else 9 if has_many else 1
    assert sweep(kind, steps, fault, itertools.count(1, stride))["marked"]


@pytest.mark.slow
@on_ranks(1)
def test_a_gradient_that_was_let_go_of_counts_as_a_beginning() -> None:
    """Gradients are averaged by nobody else, and let go of."""
    KINDS["ZeRO-2"] = {"process_group": dist.group.WORLD, "grad_reduce": "mean"}
    assert sweep("ZeRO-2", 1, "out of memory", itertools.count(1, 9))["marked"]


def break_off_at(training: Training, step: int, point: str, number: int = 1) -> Training:
    training.give_gradients(step)
    with pytest.raises(RuntimeError), Fault(point, number):
        training.step()
    return training


def broken(kind: str = "everything") -> Training:
    """After a third step that broke off in AdamW's share, after Muon's."""
    return break_off_at(Training(kind).train(range(2)), 2, "begin Muon.adamw")


def test_what_needs_no_state_works_on_a_broken_optimizer_and_repairs_nothing():
    training = broken()
    optim = training.optim
    assert optim.qk_clip_stats()["steps"] == 2
    assert "layers.0.w1.weight" in str(optim.summary())
    optim.add_param_group({"params": [nn.Parameter(torch.ones(3))], "use_muon": False})
    optim.turn_on_cpu_offload(backend=Host())
    assert is_marked(training)
    optim.turn_off_cpu_offload()
    assert is_marked(training)


def test_a_checkpoint_that_does_not_fit_repairs_nothing():
    checkpoint = Training().optim.state_dict()
    checkpoint["param_groups"].pop()
    training = broken()
    with pytest.raises(ValueError, match="number of parameter groups"):
        training.optim.load_state_dict(checkpoint)
    assert is_marked(training)


def test_loading_that_breaks_off_is_marked_and_can_be_repeated():
    checkpoint = copy.deepcopy(Training().train(range(3)).optim.state_dict())
    for number, own in checkpoint["state"].items():  # to be made, and to be converted
        if number % 2 and "momentum_buffer" in own:
            own.clear()
        own.update({key: value.double() for key, value in own.items() if key == "exp_avg"})
    expected, found = Training(), Counter[str]()
    expected.optim.load_state_dict(copy.deepcopy(checkpoint))
    loaded = expected.state()
    for fault, stride in (("out of memory", 4), ("interrupt", 157)):
        make_fault, error_type = FAULTS[fault]
        for number in itertools.count(1, stride):
            training, failing = Training().train(range(1)), make_fault(number)
            state, weights = training.everything()
            with failing, suppress(error_type, RuntimeError):
                training.optim.load_state_dict(copy.deepcopy(checkpoint))
            if failing.left > 0:
                break
            assert_equal(training.weights(), weights)
            if is_marked(training):
                with pytest.raises(RuntimeError, match=r"load_state_dict\(\)"):
                    training.optim.accept_partial_step()
                assert training.optim.is_broken
                found["marked"] += 1
            else:
                assert are_equal(training.state(), state) or are_equal(training.state(), loaded)
                found["untouched or done"] += 1
            training.optim.load_state_dict(copy.deepcopy(checkpoint))
            assert not is_marked(training)
            assert_equal(training.state(), loaded)
    assert len(found) == 2


@on_ranks(2)
def test_a_rank_without_rows_takes_a_checkpoint_after_a_step_that_broke_off() -> None:
    """The second of two ranks has no part of a single row, nor of its momentum."""
    param = nn.Parameter(part(torch.ones(1, 8), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optim = Muon([{"params": [param], "use_muon": True}], **EXACT)
    checkpoint = copy.deepcopy(optim.state_dict())
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=BROKE_OFF), Fault("end Muon.agree", 1):
        optim.step()
    assert optim.is_broken
    optim.load_state_dict(checkpoint)
    assert not optim.is_broken
    optim.step()


def test_discarded_state_is_zeros_to_load_into_and_not_to_step_from():
    for training in (broken(), Training()):  # other ranks may have got through
        optim = training.optim
        optim.discard_state()
        assert optim.is_broken
        state_dict = optim.state_dict()
        assert len(state_dict["state"]) == len(training.params)
        tensors = [v for own in state_dict["state"].values() for v in own.values()]
        assert tensors and not any(value.any() for value in tensors)
        training.give_gradients(3)
        for ask in (training.step, partial(copy.deepcopy, optim), optim.accept_partial_step):
            with pytest.raises(RuntimeError, match="load the last checkpoint"):
                ask()
        optim.load_state_dict(state_dict)
        assert not is_marked(training)
        training.step()


# -- accepted as it is -----------------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupted(kind: str, number: int) -> tuple[Training, bool]:
    """A training whose second step is interrupted at a line, and whether it has fewer lines."""
    training, interrupting = Training(kind).train(range(1)), Interrupt(number)
    training.give_gradients(1)
    with interrupting, suppress(KeyboardInterrupt):
        training.step()
    return training, interrupting.left > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gradients still scaled"])
def test_a_partial_step_is_accepted_wherever_it_was_interrupted(kind):
    undisturbed, accepted = Training(kind).train(range(1)), 0
    start = undisturbed.weights()
    end = undisturbed.train([1]).weights()
    for number in itertools.count(2, 151):
        with case(f"interrupt {number}"):
            training, is_over = interrupted(kind, number)
            if is_over:
                break
            if not training.optim.is_broken:
                continue
            training.optim.accept_partial_step()
            accepted += 1
            assert not is_marked(training)
            for weight, before, after in zip(training.weights(), start, end):
                assert (weight - before).abs().max() <= 1.5 * (after - before).abs().max()
            pickle.loads(pickle.dumps(training.optim))
            resumed = Training(kind)
            resumed.load(training.params, training.optim.state_dict())
            assert_equal(training.train([2]).everything(), resumed.train([2]).everything())
    assert accepted


def test_an_accepted_step_counts_where_it_was_made_and_only_there():
    """Muon's matrices have made it; AdamW's parameters train as if it had not been."""
    training = broken("plain")
    with pytest.raises(RuntimeError, match=r"accept_partial_step\(\)"):
        training.optim.state_dict()
    training.optim.accept_partial_step()
    training.train([3])
    matrices, others = Training("plain").train(range(4)), Training("plain").train([0, 1, 3])
    found, count = training.everything(), len(training.params) - 2
    for which, expected in ((range(count), matrices), (range(count, count + 2), others)):
        state, weights = expected.everything()
        for number in which:
            assert torch.equal(found[1][number], weights[number])
            for key in ("momentum_buffer", "exp_avg", "step"):
                assert_equal(found[0].get((number, key)), state.get((number, key)))
    assert found[0][count, "step"] == 3


def test_an_accepted_step_keeps_the_low_bits_of_exact_weights():
    training = broken("exact")
    training.optim.accept_partial_step()
    expected = Training("exact").train(range(3)).optim.exact_weights()
    found, name = training.optim.exact_weights(), "layers.0.w1.weight"
    assert torch.equal(found[name], expected[name])
    assert not torch.equal(found[name], training.params[2].float())


@pytest.mark.parametrize("kind", ["exact", "stochastic"])
def test_a_step_interrupted_at_its_last_lines_is_accepted_as_the_whole_step(kind):
    whole, counting = Training(kind).train(range(1)), Interrupt(1 << 30)
    whole.give_gradients(1)
    with counting:
        whole.step()
    lines, accepted = (1 << 30) - counting.left, 0
    for number in range(lines - 40, lines):
        training, _ = interrupted(kind, number)
        was_broken = training.optim.is_broken
        training.optim.accept_partial_step()
        if not are_equal(training.weights(), whole.weights()):
            continue
        accepted += was_broken
        if kind == "exact":
            assert_equal(training.optim.exact_weights(), whole.optim.exact_weights())
        else:
            assert [group["rounding_step"] for group in training.optim.param_groups] == [2, 2]
    assert accepted > 10


@on_ranks(2)
def test_ranks_that_all_accept_go_on_if_exchanges_were_over() -> None:
    training, undisturbed = (Training("plain", "FSDP2") for _ in range(2))
    undisturbed.train(range(3))
    with Fault("end Muon.weights", 1 << 30) as counting:
        undisturbed.train([3])
    training.train(range(2))
    if dist.get_rank() == 1:
        break_off_at(training, 2, "end Muon.weights", (1 << 30) - counting.left)
        training.optim.accept_partial_step()
    else:
        training.train([2])
    training.give_gradients(3)
    refused(training.optim, "step different optimizers")  # only one has accepted
    training.optim.accept_partial_step()
    training.optim.state_dict()
    training.step()
    assert_equal(training.weights(), undisturbed.weights())


@pytest.mark.parametrize(
    ("point", "layout"),
    [("in Muon.momentum: aten._foreach_mul_", "FSDP2"), ("end Muon.weights", "DDP")],
)
@on_ranks(2)
def test_ranks_that_exchanges_or_replicas_have_parted_can_save_and_all_refuse_to_step(
    point: str, layout: str
) -> None:
    training = Training("plain", layout).train(range(2))
    is_broken = dist.get_rank() == 1 or layout == "FSDP2"
    if is_broken:
        break_off_at(training, 2, point)
    else:
        training.train([2])
    for _ in range(2):  # the second time changes nothing more
        training.optim.accept_partial_step()
    before, saved = training.weights(), copy.deepcopy(training.optim.state_dict())
    training.give_gradients(3)
    with pytest.raises(RuntimeError if is_broken else ValueError, match="start a fresh launch"):
        training.step()
    assert not training.optim.is_broken
    assert_equal(training.weights(), before)
    launched = Training("plain", layout)
    if layout == "DDP":
        for weight in before:
            dist.broadcast(weight, 0)  # as rank 0 has saved it
    launched.load(before, saved)
    launched.train([3])


@on_ranks(2)
def test_ranks_whose_groups_are_whole_go_on_from_a_checkpoint_in_the_same_processes(
    tmp_path: Path,
) -> None:
    """One fails after its last exchange, the other goes through; both load in place."""
    training, undisturbed = (Training("plain", "FSDP2").train(range(2)) for _ in range(2))
    with Fault("end Muon.weights", 1 << 30) as counting:
        undisturbed.train([2])
    undisturbed.train([3])
    weights, is_victim = training.weights(), dist.get_rank() == 1
    dcp.save({"optim": training.optim.state_dict()}, checkpoint_id=tmp_path)
    if is_victim:
        break_off_at(training, 2, "end Muon.weights", (1 << 30) - counting.left)
    else:
        training.train([2])
    words = EARLIER if is_victim else "^rank 1: .*An earlier "
    with pytest.raises(RuntimeError if is_victim else ValueError, match=words):
        training.train([3])
    training.optim.discard_state()
    loaded = {"optim": training.optim.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    training.load(weights, loaded["optim"])
    assert_equal(training.train([2, 3]).everything(), undisturbed.everything())


# -- on ranks, in every phase ----------------------------------------------------------------------

RANKS, VICTIM = 4, 1
TIMEOUT = 3.0  # of the process groups
SLACK = 4.0  # of a busy machine


class Phase(NamedTuple):
    """Where in a step the victim is: ahead of the n-th event of that name, see `Fault`."""

    point: str
    number: int = 1
    layout: str = "FSDP2"
    steps: int = 2  # before


GATHER = "behind Muon.momentum: c10d.alltoall_base_"
SCATTER = "behind Muon.orthogonalize: c10d.alltoall_base_"

PHASES = {
    "forward": Phase("begin forward"),
    "comparison of notes": Phase("in Muon.agree: aten."),
    "between notes and step": Phase("in Muon.agree: aten.any"),  # of what has come
    "state at the first step": Phase("behind Muon.agree: aten.zero_", 3, steps=0),
    "maximum of logits": Phase("behind Muon.agree: c10d.allreduce_"),
    "mean of gradients": Phase("c10d._reduce_scatter_base_", 1, "ZeRO-2"),
    "momentum": Phase("in Muon.momentum: aten._foreach_mul_", 2),
    "momentum, in a chain": Phase("in Muon.momentum: aten._foreach_mul_", 1, "chain"),
    "gather": Phase(GATHER, 1, "FSDP2 beside experts"),
    "gather of replicas": Phase(GATHER, 2, "HSDP spread"),
    "orthogonalization": Phase("in Muon.orthogonalize: aten.bmm"),
    "return of updates": Phase(SCATTER, 2),
    "return to replicas": Phase("behind Muon.orthogonalize: c10d.broadcast_", 2, "DDP"),
    "second moment": Phase("in Muon.weights: aten.lerp", 2),
    "weights": Phase("in Muon.weights: aten._foreach_sub_", 2),
    "write-back to the host": Phase("begin copy out", 2, "streamed"),
    "AdamW": Phase("begin Muon.adamw"),
    "AdamW's rows": Phase("behind Muon.adamw: c10d._allgather_base_", 1, "ZeRO-2"),
    "QK-Clip of biases": Phase("in Muon.adamw: aten.mul_"),
}
# Until then nothing was written anywhere. Who waits there can't know: others may have gone on.
BEFORE = ("forward", "comparison of notes")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Until the others have given up."""
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {TIMEOUT + 2}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


INJECTED = {"killed": kill, "out of memory": fail, "interrupted": interrupt, "stopped": stop}
# As the victim raises them; other exceptions of a step that has begun become RuntimeError.
OWN = {"out of memory": "OutOfMemoryError", "interrupted": "KeyboardInterrupt"}


class Attempt(NamedTuple):
    error: str  # the name of its class, or none
    message: str
    seconds: float


def attempt(call: Callable[[], Any]) -> Attempt:
    start = time.monotonic()
    try:
        call()
    except BaseException as error:
        return Attempt(type(error).__name__, str(error), time.monotonic() - start)
    return Attempt("", "", time.monotonic() - start)


def shorten_timeouts() -> None:
    """Shortens the timeouts of all existing groups; only their setup may take longer."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), group)
    for size in range(2, RANKS + 1):  # those over which hosts compare notes are made again
        for ranks in itertools.combinations(range(RANKS), size):
            agreement.close_connections(ranks)


def break_off(name: str, fault: str) -> None:
    phase, is_victim = PHASES[name], dist.get_rank() == VICTIM
    kind = "plain" if phase.layout == "chain" else "everything"
    # Whether all ranks are told, so that none waits or may have gone on.
    can_repeat = name == "forward" and fault in OWN
    undisturbed = Training(kind, phase.layout)
    undisturbed.train(range(phase.steps + 1) if can_repeat else ())
    training = Training(kind, phase.layout).train(range(phase.steps - 1))
    dist.barrier()
    shorten_timeouts()
    training.train(range(max(0, phase.steps - 1), phase.steps))
    before = training.everything()
    dist.barrier()

    def closure() -> None:
        with record_function("forward"):
            pass

    def step(number: int) -> Attempt:
        training.give_gradients(number)
        return attempt(lambda: training.step(closure))

    failing = Fault(phase.point, phase.number, INJECTED[fault])
    with failing if is_victim else nullcontext():
        first = step(phase.steps)
    assert first.seconds < TIMEOUT + SLACK or is_victim, first
    if is_victim and fault in OWN:
        is_own = fault == "interrupted" or can_repeat
        assert first.error == (OWN[fault] if is_own else "RuntimeError"), first
    elif not is_victim:  # else a rank that was stopped, and may find all it needs
        assert first.error, first
    if name in BEFORE and not (is_victim and fault == "stopped"):
        assert_equal(training.everything(), before)
    if can_repeat:
        assert is_victim or first.error == "ValueError", first
        assert not training.optim.is_broken
        assert not step(phase.steps).error
        assert_equal(training.everything(), undisturbed.everything())
        return
    if first.error:
        assert first.error == "KeyboardInterrupt" or "broke off" in first.message, first
        assert is_marked(training)
    if fault != "killed":  # else the ranks have parted for good
        second = step(phase.steps + 1)
        assert second.error and (is_victim or second.seconds < TIMEOUT + SLACK), second
        assert second.message.startswith("An earlier step()") or not first.error, second


@pytest.mark.slow
@pytest.mark.parametrize("fault", INJECTED)
def test_a_fault_of_one_rank_in_any_phase_raises_on_all_within_the_timeout(fault):
    def ends_of(name: str) -> list[Outcome]:
        return rank_outcomes(break_off, RANKS, name, fault, timeout=60)

    with ThreadPoolExecutor(6) as pool:  # they mostly wait
        for name, ends in zip(PHASES, pool.map(ends_of, PHASES)):
            for rank, end in enumerate(ends):
                is_killed = fault == "killed" and rank == VICTIM
                assert end.error == ("Crashed" if is_killed else None), (name, end)
