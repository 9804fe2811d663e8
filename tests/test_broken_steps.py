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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.profiler import record_function

from breaking import Fault, Interrupt, fail
from checkpointed import Run, load_checkpoint, save_checkpoint
from comparisons import assert_equal
from kernel import optimizer
from layouts import EXACT, case, local, params_of, part, set_gradients
from ranks import Outcome, rank_outcomes, run_ranks

Muon = optimizer.Muon
Host = optimizer.SimulatedHost

pytestmark = pytest.mark.usefixtures("one_thread")

BROKE_OFF = r"^step\(\) broke off: "
EARLIER = r"^An earlier (step|load_state_dict)\(\) (broke off|was interrupted)"


# -- in one process, at every operation and at every line ------------------------------------------


FAULTS: dict[str, tuple[Callable[[int], Any], type[BaseException]]] = {
    "out of memory": (partial(Fault, "aten."), torch.OutOfMemoryError),
    "interrupt": (Interrupt, KeyboardInterrupt),
}
ATTENTION = ("layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight")
CLIP = {"clip_config": {"head_dim": 4, "threshold": 1.0}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"beta2": 0.9, "cautious": True, "chunk_size": 1, **CLIP},
    "missing gradients": {"missing_grad": "zero", **CLIP},
    "AdamW alone": {},
    "gradients still scaled": {},
    "streamed": {"beta2": 0.9, **CLIP},
}


@dataclass
class Training:
    """An optimizer in one process, of every kind of parameter, that can be trained anew."""

    kind: str
    optim: Any = field(init=False)
    params: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [(8, 12), (8, 12), (12, 8), (12, 8), (2, 8, 4), (8,), (10, 4)]
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        matrices = {"params": params[:5], "use_muon": True}
        matrices["names"] = [*ATTENTION, "layers.0.w1.weight", "layers.1.w1.weight", "experts.w"]
        others = {"params": params[5:], "use_muon": False}
        others["names"] = ["layers.0.attn.q_proj.bias", "embed_tokens.weight"]
        groups = [others] if self.kind == "AdamW alone" else [matrices, others]
        options = {"lr": 0.05, "ns_dtype": torch.float32, "expert_keys": ["experts"]}
        self.optim = Muon(groups, **options, **KINDS[self.kind])
        self.params = params_of(self.optim)
        if self.kind == "streamed":
            self.optim.turn_on_cpu_offload(slot_bytes=16384, backend=Host())

    def give_gradients(self, step: int) -> None:
        set_gradients(self.params, step + 1)
        if self.kind == "missing gradients":
            for index in (1, 3):
                self.params[index].grad = None

    def step(self) -> None:
        logits = torch.tensor([3.0, 0.5]), torch.tensor([0.5, 4.0])
        clips = "clip_config" in KINDS[self.kind]
        if self.kind != "gradients still scaled":
            self.optim.step(qk_logits={0: logits[0]} if clips else None)
            return
        # As a GradScaler does where it calls every step.
        self.optim.grad_scale, self.optim.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        self.optim.step()
        del self.optim.grad_scale, self.optim.found_inf

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.give_gradients(step)
            self.step()

    def everything(self) -> dict[tuple[int, str], torch.Tensor]:
        """Copies of weights and state; of the state that is not all zeros, which it is at first."""
        self.optim.synchronize_offload()
        found = {(n, "weight"): p.detach().clone() for n, p in enumerate(self.params)}
        for number, param in enumerate(self.params):
            for key, value in self.optim.state.get(param, {}).items():
                if value.any():
                    found[number, key] = value.clone()
        return found

    def gradients(self) -> list[Any]:
        return [p.grad if p.grad is None else (p.grad, p.grad.clone()) for p in self.params]


def are_equal(found: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[k], expected[k]) for k in found
    )


def is_marked(optim: Any) -> bool:
    is_broken = optim.is_broken
    try:
        optim.state_dict()
    except RuntimeError as error:
        assert "An earlier" in str(error)
        assert is_broken and optim.is_broken
        return True
    assert not is_broken and not optim.is_broken
    return False


def assert_marked(training: Training) -> None:
    """Nothing can be had of it, and asking changes nothing."""
    before = training.everything()
    for ask in (
        training.step,
        training.optim.state_dict,
        lambda: copy.deepcopy(training.optim),
        lambda: pickle.dumps(training.optim),
    ):
        with pytest.raises(RuntimeError, match=EARLIER):
            ask()
    assert_equal(training.everything(), before)


def sweep(kind: str, steps: int, fault: str, numbers: Iterable[int]) -> Counter[str]:
    """Breaks a step off at each of the numbers, until it has fewer operations or lines.

    Returns:
        How often nothing was changed, and how often the optimizer was marked.
    """
    fail, error_type = FAULTS[fault]
    expected = Training(kind)
    expected.train(range(steps))
    weights = [p.detach().clone() for p in expected.params]
    checkpoint = copy.deepcopy(expected.optim.state_dict())
    expected.train([steps])
    undisturbed, found = expected.everything(), Counter[str]()
    for number in numbers:
        with case(f"{fault} {number}"):
            training = Training(kind)
            training.train(range(steps))
            training.give_gradients(steps)
            before, gradients = training.everything(), training.gradients()
            failing = fail(number)
            try:
                with failing:
                    training.step()
            except error_type:  # as it was raised
                pass
            except RuntimeError as error:
                assert str(error).startswith("step() broke off: "), error
                assert isinstance(error.__cause__, error_type)
                assert is_marked(training.optim)
            if failing.left > 0:
                return found
            if is_marked(training.optim):
                assert_marked(training)
                with torch.no_grad():
                    for p, weight in zip(training.params, weights):
                        p.copy_(weight)
                training.optim.load_state_dict(copy.deepcopy(checkpoint))
                training.give_gradients(steps)
                found["marked"] += 1
            elif fault == "interrupt" and training.params[-1].grad is None:
                raise AssertionError("gradients were read, but nothing was marked")
            else:
                after = training.everything()
                if are_equal(after, undisturbed):
                    assert fault == "interrupt"  # just behind the step
                    found["done"] += 1
                    continue
                assert_equal(after, before)
                for p, grad in zip(training.params, gradients):
                    assert p.grad is (None if grad is None else grad[0])
                    assert grad is None or torch.equal(*grad)
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
    stride = 97 if fault == "interrupt" else 9 if kind in ("everything", "streamed") else 1
    assert sweep(kind, steps, fault, itertools.count(1, stride))["marked"]


def sweep_on_one_rank(kind: str) -> Counter[str]:
    """A process group of one rank: gradients are averaged by nobody else, and let go of."""
    options = {"process_group": dist.group.WORLD, "grad_reduce": "mean"}
    KINDS[kind] = options
    return sweep(kind, 1, "out of memory", itertools.count(1, 9))


@pytest.mark.slow
def test_a_gradient_that_was_let_go_of_counts_as_a_beginning():
    assert run_ranks(sweep_on_one_rank, 1, "ZeRO-2 of one rank")[0]["marked"]


def broken() -> Training:
    """After a step that broke off in AdamW's share, behind Muon's."""
    training = Training("everything")
    training.train(range(2))
    training.give_gradients(2)
    raises = pytest.raises(RuntimeError, match=f"{BROKE_OFF}OutOfMemoryError: no memory left")
    with raises, Fault("begin Muon.adamw", 1):
        training.step()
    return training


def test_what_needs_no_state_works_on_a_broken_optimizer_and_repairs_nothing():
    training = broken()
    optim = training.optim
    assert optim.qk_clip_stats()["steps"] == 2
    assert "layers.0.w1.weight" in str(optim.summary())
    optim.add_param_group({"params": [nn.Parameter(torch.ones(3))], "use_muon": False})
    optim.turn_on_cpu_offload(backend=Host())
    assert_marked(training)
    optim.turn_off_cpu_offload()
    assert_marked(training)


def test_a_checkpoint_that_does_not_fit_repairs_nothing():
    checkpoint = Training("plain").optim.state_dict()
    checkpoint["param_groups"].pop()
    training = broken()
    with pytest.raises(ValueError, match="number of parameter groups"):
        training.optim.load_state_dict(checkpoint)
    assert_marked(training)


def of_weights(found: Mapping[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
    return {place: value for place, value in found.items() if place[1] == "weight"}


def of_state(found: Mapping[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
    return {place: value for place, value in found.items() if place[1] != "weight"}


def test_loading_that_breaks_off_is_marked_and_can_be_repeated():
    trained = Training("everything")
    trained.train(range(3))
    checkpoint = copy.deepcopy(trained.optim.state_dict())
    for number, own in checkpoint["state"].items():  # to be made, and to be converted
        if number % 2 and "momentum_buffer" in own:
            own.clear()
        own.update({k: v.double() for k, v in own.items() if k == "exp_avg"})
    expected = Training("everything")
    expected.optim.load_state_dict(copy.deepcopy(checkpoint))
    loaded, found = expected.everything(), Counter[str]()
    for fault, stride in (("out of memory", 4), ("interrupt", 157)):
        fail, error_type = FAULTS[fault]
        for number in itertools.count(1, stride):
            training = Training("everything")
            training.train(range(1))
            before, failing = training.everything(), fail(number)
            try:
                with failing:
                    training.optim.load_state_dict(copy.deepcopy(checkpoint))
            except error_type:
                pass
            except RuntimeError as error:
                assert str(error).startswith("load_state_dict() broke off: OutOfMemoryError")
            if failing.left > 0:
                break
            is_broken, after = is_marked(training.optim), training.everything()
            assert are_equal(of_weights(after), of_weights(before))
            if is_broken:
                assert_marked(training)
                found["marked"] += 1
            else:
                assert are_equal(of_state(after), of_state(before)) or are_equal(
                    of_state(after), of_state(loaded)
                )
                found["untouched or done"] += 1
            training.optim.load_state_dict(copy.deepcopy(checkpoint))
            assert not is_marked(training.optim)
            assert_equal(of_state(training.everything()), of_state(loaded))
    assert len(found) == 2


def load_where_one_rank_has_no_rows() -> None:
    """Of one row on two ranks the second has nothing, nor of the momentum."""
    (model := nn.Linear(8, 1, bias=False)).weight.data.fill_(0.5)
    fully_shard(model)
    optim = Muon([{"params": list(model.parameters()), "use_muon": True}], **EXACT)
    model(torch.ones(2, 8)).sum().backward()
    checkpoint = copy.deepcopy(optim.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer.muon.pipeline, "run", lambda *_: fail())
        with pytest.raises(RuntimeError, match=BROKE_OFF):
            optim.step()
    assert is_marked(optim)
    optim.load_state_dict(checkpoint)
    assert not is_marked(optim)


def test_a_rank_without_rows_takes_a_checkpoint_after_a_step_that_broke_off():
    run_ranks(load_where_one_rank_has_no_rows, 2)


def test_discarded_state_is_zeros_to_load_into_and_not_to_step_from():
    for training in (broken(), Training("everything")):  # other ranks may have got through
        training.optim.discard_state()
        assert training.optim.is_broken
        state_dict = training.optim.state_dict()
        assert len(state_dict["state"]) == len(training.params)
        tensors = [v for own in state_dict["state"].values() for v in own.values()]
        assert tensors and not any(value.any() for value in tensors)
        training.give_gradients(3)
        with pytest.raises(RuntimeError, match="load the last checkpoint"):
            training.step()
        with pytest.raises(RuntimeError, match="load the last checkpoint"):
            copy.deepcopy(training.optim)
        training.optim.load_state_dict(state_dict)
        assert not training.optim.is_broken
        training.step()


# -- accepted as it is -----------------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gradients still scaled"])
def test_a_partial_step_is_accepted_wherever_it_was_interrupted(kind):
    undisturbed, accepted = Training(kind), 0
    undisturbed.train(range(1))
    start = of_weights(undisturbed.everything())
    undisturbed.train([1])
    end = of_weights(undisturbed.everything())
    for number in itertools.count(2, 151):
        with case(f"interrupt {number}"):
            training, interrupting = Training(kind), Interrupt(number)
            training.train(range(1))
            training.give_gradients(1)
            with interrupting, suppress(KeyboardInterrupt):
                training.step()
            if interrupting.left > 0:
                break
            if not training.optim.is_broken:
                continue
            training.optim.accept_partial_step()
            accepted += 1
            assert not is_marked(training.optim)
            found = training.everything()
            for place, weight in of_weights(found).items():
                step = (end[place] - start[place]).abs().max()
                assert (weight - start[place]).abs().max() <= 1.5 * step
            saved = copy.deepcopy(training.optim.state_dict())
            pickle.loads(pickle.dumps(training.optim))
            resumed = Training(kind)
            with torch.no_grad():
                for p, weight in zip(resumed.params, training.params):
                    p.copy_(weight)
            resumed.optim.load_state_dict(saved)
            for going_on in (training, resumed):
                going_on.train([2])
            assert_equal(training.everything(), resumed.everything())
    assert accepted


def test_an_accepted_step_counts_where_it_was_made_and_only_there():
    """Muon's matrices have made it; AdamW's parameters train as if it had not been."""
    training, matrices, others = Training("plain"), Training("plain"), Training("AdamW alone")
    training.train(range(2))
    training.give_gradients(2)
    with pytest.raises(KeyboardInterrupt), Fault("begin Muon.adamw", 1, interrupt):
        training.step()
    with pytest.raises(RuntimeError, match=r"was interrupted.*accept_partial_step\(\).*or load"):
        training.optim.state_dict()
    training.optim.accept_partial_step()
    training.train([3])
    matrices.train(range(4))
    training_all, others_all = training.everything(), others.params
    for step in (0, 1, 3):
        set_gradients(training.params, step + 1)  # the same gradients for the same parameters
        for p, twin in zip(others_all, training.params[5:]):
            p.grad = twin.grad
        others.step()
    for number in range(5):
        for key in ("weight", "momentum_buffer"):
            place = number, key
            assert torch.equal(training_all[place], matrices.everything()[place])
    for number, p in enumerate(others_all, 5):
        assert torch.equal(training_all[number, "weight"], p)
        assert training_all[number, "step"] == 3


def in_bfloat16(weight_rounding: str) -> tuple[Any, list[nn.Parameter]]:
    params = [nn.Parameter(torch.full(shape, 0.7).bfloat16()) for shape in ((8, 12), (8,))]
    groups = [
        {"params": params[:1], "use_muon": True, "names": ["w.weight"]},
        {"params": params[1:], "use_muon": False, "names": ["w.bias"]},
    ]
    return Muon(groups, lr=1e-3, weight_rounding=weight_rounding), params


def test_an_accepted_step_keeps_the_low_bits_of_exact_weights():
    (optim, params), (undisturbed, its_params) = in_bfloat16("exact"), in_bfloat16("exact")
    for step in range(3):
        for each in (params, its_params):
            set_gradients(each, step)
        undisturbed.step()
        if step < 2:
            optim.step()
    with pytest.raises(KeyboardInterrupt), Fault("begin Muon.adamw", 1, interrupt):
        optim.step()
    optim.accept_partial_step()
    found, expected = optim.exact_weights()["w.weight"], undisturbed.exact_weights()["w.weight"]
    assert torch.equal(found, expected)
    assert not torch.equal(found, params[0].float())


@pytest.mark.parametrize("weight_rounding", ["exact", "stochastic"])
def test_a_step_interrupted_at_its_last_lines_is_accepted_as_the_whole_step(weight_rounding):
    def interrupted(number: int) -> tuple[Any, Interrupt, bool]:
        optim, params = in_bfloat16(weight_rounding)
        for step in range(2):
            set_gradients(params, step)
            if step == 0:
                optim.step()
        with Interrupt(number) as interrupting, suppress(KeyboardInterrupt):
            optim.step()
        was_broken = optim.is_broken
        optim.accept_partial_step()
        return optim, interrupting, was_broken

    whole, counting, _ = interrupted(1 << 30)
    lines, accepted = (1 << 30) - counting.left, 0
    expected = [p.detach() for group in whole.param_groups for p in group["params"]]
    for number in range(lines - 40, lines):
        optim, _, was_broken = interrupted(number)
        found = [p.detach() for group in optim.param_groups for p in group["params"]]
        if not all(map(torch.equal, found, expected)):
            continue
        accepted += was_broken
        if weight_rounding == "exact":
            kept, exact = optim.exact_weights(), whole.exact_weights()
            assert all(torch.equal(kept[name], exact[name]) for name in exact), number
        else:
            assert [group["rounding_step"] for group in optim.param_groups] == [2, 2], number
    assert accepted > 10


def test_only_a_step_can_be_accepted_not_a_load_nor_discarded_state():
    training = broken()
    training.optim.discard_state()
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        training.optim.accept_partial_step()
    assert training.optim.is_broken
    trained = Training("plain")
    trained.train(range(1))
    saved = copy.deepcopy(trained.optim.state_dict())
    for own in saved["state"].values():  # which have to be converted
        own.update({key: value.double() for key, value in own.items() if key == "exp_avg"})
    for number in itertools.count(1):
        training = Training("plain")
        with pytest.raises(RuntimeError) as raised, Fault("aten.", number):
            training.optim.load_state_dict(copy.deepcopy(saved))
        if training.optim.is_broken:
            break
    assert "accept_partial_step" not in str(raised.value)
    with pytest.raises(RuntimeError, match="An earlier load_state_dict"):
        training.optim.accept_partial_step()
    assert training.optim.is_broken


def sharded(**options: Any) -> tuple[Any, list[nn.Parameter]]:
    """Two matrices and a bias on two ranks, each a shard or, with a process group, all."""
    torch.manual_seed(0)
    tensors = [torch.randn(8, 12), torch.randn(12, 8), torch.randn(8)]
    if not options:
        mesh = init_device_mesh("cpu", (2,))
        tensors = [part(tensor, mesh, [Shard(0)]) for tensor in tensors]
    params = [nn.Parameter(tensor) for tensor in tensors]
    groups = [
        {"params": params[:2], "use_muon": True, "names": ["a.weight", "b.weight"]},
        {"params": params[2:], "use_muon": False, "names": ["a.bias"]},
    ]
    return Muon(groups, **{**EXACT, "lr": 0.05, "chunk_size": 1, **options}), params


def step_interrupted(optim: Any, params: list[nn.Parameter], step: int, point: str) -> None:
    set_gradients(params, step)
    with pytest.raises(KeyboardInterrupt), Fault(point, 1, interrupt):
        optim.step()


def accept_behind_the_last_exchange() -> None:
    (optim, params), (undisturbed, its_params) = sharded(), sharded()
    for step in range(3):
        set_gradients(its_params, step)
        undisturbed.step()
        if step < 2:
            set_gradients(params, step)
            optim.step()
    if dist.get_rank() == 1:
        step_interrupted(optim, params, 2, "end Muon.weights")
        optim.accept_partial_step()
    else:
        set_gradients(params, 2)
        optim.step()
    before = [local(p).detach().clone() for p in params]
    set_gradients(params, 3)
    with pytest.raises(ValueError, match="step different optimizers"):  # only one has accepted
        optim.step()
    assert all(torch.equal(local(p), b) for p, b in zip(params, before))
    optim.accept_partial_step()
    optim.state_dict()
    for each in (optim, undisturbed):
        set_gradients(params if each is optim else its_params, 3)
        each.step()
    assert all(torch.equal(local(p), local(q)) for p, q in zip(params, its_params))


def test_ranks_that_all_accept_go_on_if_exchanges_were_over():
    run_ranks(accept_behind_the_last_exchange, 2)


def accept_and_only_save(point: str, replicated: bool) -> None:
    optim, params = sharded(**({"process_group": dist.group.WORLD} if replicated else {}))
    for step in range(2):
        set_gradients(params, step)
        optim.step()
    if dist.get_rank() == 1 or not replicated:
        step_interrupted(optim, params, 2, point)
    else:
        set_gradients(params, 2)
        optim.step()
    optim.accept_partial_step()
    optim.accept_partial_step()  # changes nothing more
    before = [local(p).detach().clone() for p in params]
    saved = copy.deepcopy(optim.state_dict())
    set_gradients(params, 3)
    error = RuntimeError if dist.get_rank() == 1 or not replicated else ValueError
    with pytest.raises(error, match="start a fresh launch"):
        optim.step()
    assert not optim.is_broken
    assert all(torch.equal(local(p), b) for p, b in zip(params, before))
    launched, its_params = sharded(**({"process_group": dist.group.WORLD} if replicated else {}))
    with torch.no_grad():
        for p, weight in zip(its_params, params):
            local(p).copy_(local(weight))
            if replicated:
                dist.broadcast(p, 0)  # as rank 0 has saved it
    launched.load_state_dict(saved)
    set_gradients(its_params, 3)
    launched.step()


@pytest.mark.parametrize(
    ("point", "replicated"),
    [("in Muon.momentum: aten._foreach_mul_", False), ("end Muon.weights", True)],
)
def test_ranks_that_exchanges_or_replicas_have_parted_can_save_and_all_refuse_to_step(
    point, replicated
):
    run_ranks(accept_and_only_save, 2, point, replicated)


# -- on ranks, in every phase ----------------------------------------------------------------------

RANKS, VICTIM = 4, 1
TIMEOUT = 3.0  # of the process groups
SLACK = 4.0  # of a busy machine

CHAIN = ((0, 1), (1, 2), (2, 3))


class NamedHost(Host):
    """Its copies are regions of the thread that asks for them."""

    def copy(self, on: str, targets: Any, sources: Any) -> None:
        with record_function(f"copy {on}"):
            super().copy(on, targets, sources)


class World:
    """An optimizer on four ranks, of every kind of parameter that a layout has."""

    def __init__(self, layout: str):
        torch.manual_seed(0)
        self.layout = layout
        options: dict[str, Any] = {**EXACT, "lr": 0.05, "chunk_size": 1, "warmup_step": 1}
        matrices = [(8, 12), (8, 12), *[(12, 8), (16, 20)] * 5]  # three for each rank
        shapes = [*matrices, (8,), (600, 16)]
        if layout == "chain":
            groups = []
            for number, ranks in enumerate(CHAIN):
                mesh = DeviceMesh("cpu", list(ranks))
                if dist.get_rank() in ranks:
                    held = [nn.Parameter(part(torch.randn(6, 4), mesh, [Shard(0)])) for _ in "ab"]
                    names = [f"{number}.{name}.weight" for name in "ab"]
                    groups.append({"params": held, "names": names, "use_muon": True})
        else:
            params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
            if layout in ("ZeRO-2", "DDP"):
                options["process_group"] = dist.group.WORLD
                options["grad_reduce"] = "mean" if layout == "ZeRO-2" else None
            else:
                mesh, placements = init_device_mesh("cpu", (RANKS,)), [Shard(0)]
                if layout == "HSDP spread":
                    mesh, placements = init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
                    options["hsdp"] = "spread"
                params = [nn.Parameter(part(p.detach(), mesh, placements)) for p in params]
            names = [*ATTENTION, *(f"layers.{number}.w1.weight" for number in range(10))]
            others = ["layers.0.attn.q_proj.bias", "embed_tokens.weight"]
            groups = [
                {"params": params[:-2], "names": names, "use_muon": True, "beta2": 0.9},
                {"params": params[-2:], "names": others, "use_muon": False},
            ]
            if layout == "FSDP2 beside experts":  # whose ranks are pairs
                pairs = init_device_mesh("cpu", (2, 2))
                experts = nn.Parameter(part(torch.randn(4, 8, 12), pairs, [Shard(0), Shard(1)]))
                groups.append({"params": [experts], "names": ["experts.w"], "use_muon": True})
                options["expert_keys"] = ["experts"]
            options.update(CLIP)
        self.optim = Muon(groups, **options)
        self.params = params_of(self.optim)
        if layout == "offloaded":
            self.optim.turn_on_cpu_offload(slot_bytes=16384, backend=NamedHost())

    def step(self, step: int, closure: Any = None) -> None:
        set_gradients(self.params, step)
        logits = None if self.layout == "chain" else {0: torch.tensor([3.0, 0.5])}
        self.optim.step(closure, qk_logits=logits)

    def everything(self) -> dict[tuple[int, str], torch.Tensor]:
        """Copies of what this rank has of weights and state."""
        self.optim.synchronize_offload()
        return {
            (number, key): local(value).clone()
            for number, p in enumerate(self.params)
            for key, value in {"weight": p, **self.optim.state.get(p, {})}.items()
        }


@dataclass(frozen=True)
class Phase:
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
    "write-back to the host": Phase("begin copy out", 2, "offloaded"),
    "AdamW": Phase("begin Muon.adamw"),
    "AdamW's rows": Phase("behind Muon.adamw: c10d._allgather_base_", 1, "ZeRO-2"),
    "QK-Clip of biases": Phase("in Muon.adamw: aten.mul_"),
}
# Until then nothing was written anywhere. Who waits there can't know: others may have gone on.
BEFORE = ("forward", "comparison of notes")
# As the victim raises them; other exceptions of a step that has begun become RuntimeError.
OWN = {"out of memory": "OutOfMemoryError", "interrupted": "KeyboardInterrupt"}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Until the others have given up."""
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {TIMEOUT + 2}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


INJECTED = {"killed": kill, "out of memory": fail, "interrupted": interrupt, "stopped": stop}


def faulty(phase: Phase, fault: Callable[[], None]) -> AbstractContextManager[Any]:
    """A context in which the victim meets with the fault."""
    is_victim = dist.get_rank() == VICTIM
    return Fault(phase.point, phase.number, fault) if is_victim else nullcontext()


@dataclass(frozen=True)
class Attempt:
    error: str | None
    message: str
    seconds: float


def attempt(call: Callable[[], Any]) -> Attempt:
    start, error = time.monotonic(), None
    try:
        call()
    except BaseException as raised:
        error = raised
    seconds = time.monotonic() - start
    return Attempt(error and type(error).__name__, str(error), seconds)


def shorten_timeouts() -> None:
    """Of all groups, and of that in which ranks compare notes; setting up may take longer."""
    timeout = timedelta(seconds=TIMEOUT)
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    for groups in optimizer.distributed.connections._cache.current().values():
        for group in groups.values():
            group._set_default_timeout(timeout)


class BrokenOff(NamedTuple):
    """How a rank fared in the step in which the victim meets with its fault, and from then on."""

    first: Attempt
    saved: Attempt  # of a state_dict()
    second: Attempt  # the next step, or the same again where it can be
    is_untouched: bool  # weights and state, by the first
    is_whole: bool  # after the second step: as if there had been no fault


def break_off(name: str, fault: str) -> BrokenOff:
    phase = PHASES[name]
    world = undisturbed = World(phase.layout)
    if can_repeat(name, fault):
        undisturbed = World(phase.layout)
        for step in range(phase.steps + 1):
            undisturbed.step(step)
    for step in range(phase.steps):
        world.step(step)
    before = world.everything()
    dist.barrier()
    shorten_timeouts()

    def closure() -> None:
        with record_function("forward"):
            pass

    with faulty(phase, INJECTED[fault]):
        first = attempt(lambda: world.step(phase.steps, closure))
    is_untouched = are_equal(world.everything(), before)
    saved = attempt(world.optim.state_dict)
    second = first
    if can_repeat(name, fault):
        second = attempt(lambda: world.step(phase.steps, closure))
    elif first.error is None or fault != "killed":  # else the ranks have parted for good
        second = attempt(lambda: world.step(phase.steps + 1))
    is_whole = are_equal(world.everything(), undisturbed.everything())
    return BrokenOff(first, saved, second, is_untouched, is_whole)


def can_repeat(name: str, fault: str) -> bool:
    """Whether all ranks were told, so that none waits or may have gone on."""
    return name == "forward" and fault in OWN


def check_ended(name: str, fault: str, outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        is_victim, told = rank == VICTIM, f"rank {rank}: {outcome.value}"
        if is_victim and fault == "killed":
            assert outcome.error == "Crashed", outcome
            continue
        assert outcome.error is None, outcome
        first, saved, second, is_untouched, is_whole = outcome.value
        assert max(first.seconds, second.seconds) < TIMEOUT + SLACK or is_victim, told
        if is_victim and fault in OWN:
            is_own = fault == "interrupted" or can_repeat(name, fault)
            assert first.error == (OWN[fault] if is_own else "RuntimeError"), told
        elif not is_victim:  # else a rank that was stopped, and may find all it needs
            assert first.error is not None, told
        if name in BEFORE and not (is_victim and fault == "stopped"):
            assert is_untouched, told
        if can_repeat(name, fault):
            assert is_victim or first.error == "ValueError", told
            assert is_whole and saved.error is second.error is None, told
            continue
        assert second.error is not None, told
        if first.error is not None:
            assert saved.error == "RuntimeError", told
            assert saved.message.startswith("An earlier step()"), told
            assert fault == "killed" or second.message.startswith("An earlier step()"), told
            if first.error != "KeyboardInterrupt":
                assert first.message.startswith("step() broke off: "), told
                assert "load the last checkpoint" in first.message


def outcomes_of(name: str, fault: str) -> list[Outcome]:
    return rank_outcomes(break_off, RANKS, name, fault, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("fault", INJECTED)
def test_a_fault_of_one_rank_in_any_phase_raises_on_all_within_the_timeout(fault):
    with ThreadPoolExecutor(6) as pool:  # they mostly wait
        ends = {name: pool.submit(outcomes_of, name, fault) for name in PHASES}
        for name, end in ends.items():
            with case(f"{fault} in {name}"):
                check_ended(name, fault, end.result())


# -- what comes after ------------------------------------------------------------------------------

SAVED_AFTER, KILLED_IN, END = 2, 4, 6  # steps


def train_until_killed(layout: str, directory: str, phase: Phase) -> None:
    run = Run.on(layout)
    run.train(range(SAVED_AFTER))
    save_checkpoint(run, directory)
    run.train(range(SAVED_AFTER, KILLED_IN))
    with faulty(phase, kill):
        run.train([KILLED_IN])


def resume(layout: str, directory: str, expected: Path) -> None:
    run = Run.on(layout, zeroed=True)
    load_checkpoint(run, directory)
    run.train(range(SAVED_AFTER, END))
    run.check(expected, steps=END)


def never_disturbed(layout: str, file: Path) -> None:
    run = Run.on(layout)
    run.train(range(END))
    run.write(file)


KILLED = {
    # layout: where, and on how many ranks to go on as well
    "FSDP2": (PHASES["orthogonalization"], 3),
    "FSDP2 + TP": (PHASES["momentum"], None),
    "HSDP, spread": (Phase(SCATTER), None),
    "DDP": (PHASES["orthogonalization"], 3),
    "ZeRO-2": (Phase("behind Muon.agree: c10d.allreduce_"), 2),  # of the second bucket
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", KILLED)
def test_after_a_kill_a_fresh_launch_resumes_as_if_nothing_had_been(layout, tmp_path):
    phase, fewer = KILLED[layout]
    directory, expected = str(tmp_path / "checkpoint"), tmp_path / "expected.pt"
    run_ranks(never_disturbed, RANKS, layout, expected)
    ends = rank_outcomes(train_until_killed, RANKS, layout, directory, phase, pg_timeout=TIMEOUT)
    for rank, end in enumerate(ends):
        assert end.error == ("Crashed" if rank == VICTIM else "RuntimeError"), end
    for ranks in (RANKS, fewer):
        if ranks:
            run_ranks(resume, ranks, layout, directory, expected)


def repair(how: str, directory: str) -> None:
    """A rank fails behind its last exchange: the process groups are whole, the step is not."""
    expected = Path(directory, "expected.pt")
    never_disturbed("FSDP2", expected)
    dist.barrier()  # until it is written
    run, full = Run.on("FSDP2"), StateDictOptions(full_state_dict=True)
    run.train(range(SAVED_AFTER))
    save_checkpoint(run, directory)
    whole_state = copy.deepcopy(get_optimizer_state_dict(run.model, run.optim, options=full))
    run.train(range(SAVED_AFTER, KILLED_IN))
    if dist.get_rank() == VICTIM:
        raises = pytest.raises(RuntimeError, match=f"{BROKE_OFF}OutOfMemoryError")
        with raises, Fault("end Muon.weights", 2):  # of the matrices that are shared
            run.train([KILLED_IN])
        with pytest.raises(RuntimeError, match=EARLIER):
            get_state_dict(run.model, run.optim)
        with pytest.raises(RuntimeError, match=f"{EARLIER}.*OutOfMemoryError"):
            run.train([KILLED_IN])
    else:
        run.train([KILLED_IN])
        with pytest.raises(ValueError, match=r"rank 1: RuntimeError: An earlier step\(\)"):
            run.train([KILLED_IN])
    run.optim.discard_state()
    if how == "whole":  # torch takes what is there first, to divide the whole likewise
        set_optimizer_state_dict(run.model, run.optim, whole_state, options=full)
        model_state = {"model": run.model.state_dict()}
        dcp.load(model_state, checkpoint_id=directory)
        run.model.load_state_dict(model_state["model"])
    else:
        load_checkpoint(run, directory)
    run.train(range(SAVED_AFTER, END))
    run.check(expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "whole"])
def test_ranks_whose_groups_are_whole_go_on_from_a_checkpoint_in_the_same_processes(how, tmp_path):
    run_ranks(repair, RANKS, how, str(tmp_path))
