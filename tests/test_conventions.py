"""What programs do with any torch optimizer, beyond what tests/test_state.py has of it."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

from comparisons import assert_equal, assert_same_training
from kernel import as_arguments, optimizer
from layouts import EXACT, params_of, part, set_gradients, whole
from one_device import Model, build, train, trainable
from ranks import on_ranks

Muon = optimizer.Muon
Host = optimizer.SimulatedHost

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_shallow_copy_shares_parameters_state_and_groups():
    model, optim = build(beta2=0.9)
    other, twin = build(beta2=0.9)
    train(model, optim, 2)
    train(other, twin, 2)
    copied = copy.copy(optim)
    assert copied.state is optim.state and copied.param_groups is optim.param_groups
    assert copied.names == optim.names
    for each in (copied, optim):
        train(model, each, 1, seed=1)
        train(other, twin, 1, seed=1)
    assert_same_training(model, optim, other, twin)


# What ranks do below: parameters of FSDP2, gradients that are the same numbers on any layout


def sharded(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5))
    fully_shard(model)
    groups = optimizer.get_default_muon_param_groups(model)
    return model, Muon(groups, **as_arguments({"lr": 0.02, **EXACT, **options}))


def step(model: nn.Module, optim: Any, seed: int, sign: float = 1.0) -> None:
    set_gradients(params_of(optim), seed, sign)
    optim.step()


# Names and keys


def test_names_in_torchs_form_stay_where_those_look_who_gave_them():
    """torchtitan makes state dicts by the names that it finds in groups."""
    model, ours = nn.Linear(4, 4), nn.Parameter(torch.ones(2, 2))
    named = {"params": [model.weight, model.bias], "param_names": ["weight", "bias"]}
    group = {**named, "use_muon": False}
    optim = Muon([group])
    assert optim.names == [["weight", "bias"]] and "names" not in group
    late = {"params": [ours], "param_names": ["ours"], "names": ["ours"], "use_muon": True}
    optim.add_param_group(late)
    optim.add_param_group({"params": [], "names": [], "use_muon": True})

    def shown(groups: list[dict]) -> list[Any]:
        return [group.get("param_names") for group in groups]

    expected = [["weight", "bias"], ["ours"], None]
    saved = copy.deepcopy(optim.state_dict())
    assert shown(optim.param_groups) == shown(saved["param_groups"]) == expected
    for group in saved["param_groups"]:
        group.pop("param_names", None)
    optim.load_state_dict(saved)
    assert shown(optim.param_groups) == shown(copy.deepcopy(optim).param_groups) == expected
    optim.param_groups[1]["param_names"] = ["theirs"]
    optim.param_groups[0]["names"] = ["w", "b"]
    assert optim.names == [["w", "b"], ["theirs"], []]
    assert shown(optim.param_groups) == [["w", "b"], ["theirs"], None]


def test_names_in_a_checkpoint_are_not_taken_and_stop_no_group_from_being_added():
    group = {"params": list(nn.Linear(4, 4).named_parameters()), "use_muon": False}
    saved, optim = Muon([group], lr=0.1).state_dict(), Muon([group], lr=0.2)
    saved["param_groups"][0]["param_names"] = ["weight", "bias"]
    optim.load_state_dict(saved)
    assert optim.names == [["weight", "bias"]] and optim.param_groups[0]["lr"] == 0.1
    assert "param_names" not in optim.state_dict()["param_groups"][0]
    optim.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": True})
    assert optim.names == [["weight", "bias"], None]


@pytest.mark.parametrize("offload", [False, True], ids=["plain", "offloaded"])
def test_state_under_keys_that_are_no_parameters_is_the_users(offload):
    model, optim = build()
    other, twin = build()
    optim.state["tokens"] = 5
    if offload:
        optim.turn_on_cpu_offload(backend=Host())
    train(model, optim, 2)
    train(other, twin, 2)
    saved = copy.deepcopy(optim.state_dict())
    assert saved["state"]["tokens"] == 5 and optim.state["tokens"] == 5
    copied = copy.deepcopy(optim)
    assert copied.state["tokens"] == 5
    saved["state"]["tokens"] = 6
    optim.load_state_dict(saved)
    assert optim.state["tokens"] == 6
    if offload:
        optim.turn_off_cpu_offload()
    train(model, optim, 1, seed=1)
    train(other, twin, 1, seed=1)
    assert_equal(list(model.parameters()), list(other.parameters()))


OTHER_VALUES: dict[str, Any] = {
    **{"lr": 0.05, "momentum": 0.5, "nesterov": False, "ns_steps": 7, "weight_decay": 0.9},
    **{"adamw_betas": (0.5, 0.6), "adamw_eps": 0.1, "none_grad": False, "adjust_lr": "original"},
    **{"momentum_style": "ema", "ns_coefficients": "quintic", "ns_algorithm": "gram"},
    **{"ns_dtype": torch.float64, "ns_eps": 1.0, "ns_eps_absolute": 1.0, "ns_norm_factor": 2.0},
    **{"ns_equilibrate": True, "ns_renormalize": True, "beta2": 0.9, "second_moment_side": "rows"},
    **{"cautious": True, "decay_lr": "adjusted", "momentum_dtype": torch.bfloat16},
    **{"weight_rounding": "stochastic", "missing_grad": "zero", "split": {"qkv": 4}},
    **{"expert_keys": ["experts", "others"], "flatten": True, "maximize": True, "capturable": True},
}


@pytest.mark.parametrize("key", Muon([{"params": [], "use_muon": True}]).defaults)
def test_a_key_that_is_set_on_the_groups_is_the_argument_from_then_on(key):
    value = OTHER_VALUES[key]
    model, optim = build()
    assert value != optim.defaults[key]
    train(model, optim, 2)
    other, twin = build(**{key: value})  # the same training, resumed with the other argument
    other.load_state_dict(model.state_dict())
    saved = copy.deepcopy(optim.state_dict())
    for group in saved["param_groups"]:
        del group[key]
    twin.load_state_dict(saved)
    for group, theirs in zip(optim.param_groups, twin.param_groups):
        group[key] = theirs[key]
    train(model, optim, 2, seed=1)
    train(other, twin, 2, seed=1)
    assert_same_training(model, optim, other, twin)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_capturable_groups_step_any_parameter_of_adamw_on_a_cpu(lr):
    """Those of which torch's loop takes care refuse to be capturable there."""
    results = []
    for capturable in (False, True):
        torch.manual_seed(0)
        values = torch.randn(6, 8)[:, ::2], torch.randn(3, dtype=torch.complex64), torch.randn(5)
        params = [nn.Parameter(value) for value in values]
        optim = Muon([{"params": params, "use_muon": False}], lr=lr, capturable=capturable)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optim.step()
        results.append([p.detach() for p in params])
    assert_equal(*results)


# Groups that come later


@on_ranks(2)
def test_a_group_added_on_one_rank_raises_on_all_until_all_have_it() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, optim = sharded()
    step(model, optim, 0)
    param = nn.Parameter(part(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]))
    late = {"params": [("late", param)], "use_muon": True, "lr": 0.5}
    before = [p.to_local().clone() for p in (*model.parameters(), param)]
    if dist.get_rank() == 0:
        optim.add_param_group(late)
    with pytest.raises(ValueError, match=r"rank 0 .*late"):
        step(model, optim, 1)
    assert_equal([p.to_local() for p in (*model.parameters(), param)], before)
    if dist.get_rank() == 1:
        optim.add_param_group(late)
    set_gradients(params_of(optim), 1)
    alone = nn.Parameter(torch.arange(12.0).view(4, 3))
    alone.grad = whole(param.grad)
    reference = Muon([{"params": [alone], "use_muon": True}], lr=0.5, **EXACT)
    optim.step()
    reference.step()
    assert torch.equal(whole(param), alone)
    assert optim.names[-1] == ["late"] and optim.param_groups[-1]["lr"] == 0.5


# Modes of torch around the step


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Whatever `torch.empty` gives is full of NaN then, so that what reads it is seen."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default dtype fp16": lambda: default_dtype(torch.float16),
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "deterministic algorithms": deterministic,
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("options", [{}, {"beta2": 0.9, "cautious": True}])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_modes_of_torch_around_the_step_change_no_bit_of_it_nor_of_state(mode, options):
    model, optim = build(**options)
    other, twin = build(**options)
    for seed in range(4):
        for each, of in ((optim, model), (twin, other)):
            set_gradients(trainable(of), seed)
            with mode() if each is optim and seed != 2 else contextlib.nullcontext():
                each.step()  # state is made under the mode, and then used without it
                saved = copy.deepcopy(each.state_dict())
                each.load_state_dict(saved)
    assert_same_training(model, optim, other, twin)


@pytest.mark.slow
@on_ranks(2)
def test_modes_of_torch_around_the_step_change_no_bit_on_ranks() -> None:
    for mode in MODES.values():
        (model, optim), (other, twin) = (sharded(beta2=0.9) for _ in range(2))
        for seed in range(3):
            set_gradients(params_of(optim), seed)
            with mode() if seed != 1 else contextlib.nullcontext():
                optim.step()
            step(other, twin, seed)
        assert_equal(list(model.parameters()), list(other.parameters()))


def test_optimizers_in_several_threads_step_as_they_do_alone():
    pairs, twins = ([build(beta2=0.9, seed=seed) for seed in range(3)] for _ in range(2))
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda pair: train(*pair, 10), pairs))
    for (model, optim), (other, twin) in zip(pairs, twins):
        train(other, twin, 10)
        assert_same_training(model, optim, other, twin)


def is_named(event: Any) -> bool:
    return event is not None and (event.name.startswith("Muon.") or is_named(event.cpu_parent))


@pytest.mark.slow
def test_phases_have_their_names_in_the_profile_of_several_threads():
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def step_ten_matrices(_: int) -> None:
        params = [nn.Parameter(torch.randn(8, 8)) for _ in range(10)]
        optim = Muon([{"params": params, "use_muon": True}], chunk_size=1)
        for seed in range(6):
            set_gradients(params, seed)
            optim.step()

    try:
        with (
            profile(activities=[ProfilerActivity.CPU], experimental_config=config) as trace,
            ThreadPoolExecutor(2) as threads,
        ):
            list(threads.map(step_ten_matrices, range(2)))
    finally:
        sys.setswitchinterval(interval)
    arithmetic = [event for event in trace.events() if event.name.startswith("aten::_foreach")]
    assert len(arithmetic) > 100
    assert all(map(is_named, arithmetic))


# What torch's tools do to parameters and gradients


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_parameter_whose_data_is_another_tensor_goes_on_as_one_that_was_written_to(use_muon):
    param, twin = params = [nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
    optim = Muon([{"params": params, "use_muon": use_muon}], lr=0.1, none_grad=False)
    for seed in range(3):
        param.data, twin.data[:] = param.detach() + 1, twin.detach() + 1
        for each in params:
            set_gradients([each], seed)
        optim.step()
    assert torch.equal(param, twin)


def test_one_optimizer_for_each_parameter_can_step_within_the_backward():
    torch.manual_seed(0)
    model = Model()
    groups = optimizer.get_default_muon_param_groups(model)  # experts are AdamW's
    for group in groups:
        for p in group["params"]:
            optim = Muon([{"params": [p], "use_muon": group["use_muon"]}], lr=0.01)

            def update(_: torch.Tensor, optim: Any = optim) -> None:
                optim.step()
                optim.zero_grad()

            p.register_post_accumulate_grad_hook(update)
    torch.manual_seed(0)
    other = Model()
    twin = Muon(optimizer.get_default_muon_param_groups(other), lr=0.01)
    for seed in range(3):
        model(tokens(seed)).square().mean().backward()
        other(tokens(seed)).square().mean().backward()
        twin.step()
        twin.zero_grad()
        assert all(p.grad is None for p in trainable(model))
    assert_equal(list(model.parameters()), list(other.parameters()))


@on_ranks(2)
def test_gradients_of_matrices_alone_are_gone_after_a_step_on_ranks_too() -> None:
    replicas = {"process_group": dist.group.WORLD}
    for settings in (None, replicas, {**replicas, "grad_reduce": "mean"}):
        for none_grad in (True, False):
            if settings is None:
                _, optim = sharded(none_grad=none_grad)
            else:
                groups = optimizer.get_default_muon_param_groups(nn.Linear(8, 12))
                optim = Muon(groups, none_grad=none_grad, **settings)
            set_gradients(params_of(optim), 0)
            optim.step()
            for group in optim.param_groups:
                is_gone = none_grad and group["use_muon"]
                assert all((p.grad is None) is is_gone for p in group["params"]), settings


# torch.compile


def frames_compiled() -> int:
    """So far in this process, by Dynamo."""
    return torch._dynamo.utils.counters["frames"]["total"]


def training_step(model: nn.Module, optim: Any, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optim.step()
    optim.zero_grad()


def compare_compiled(make: Callable[[], Any], inputs_of: Callable[[int], torch.Tensor]) -> None:
    """A compiled training step, and an eager one with a compiled step, beside an eager one."""
    for is_whole in (False, True):
        (model, optim), (other, twin) = make(), make()
        torch._dynamo.reset()
        step = torch.compile(training_step, backend="aot_eager") if is_whole else training_step
        if not is_whole:
            optim.step = torch.compile(optim.step, backend="aot_eager")
        frames = []
        for seed in range(6):
            for group in (*optim.param_groups, *twin.param_groups):
                group["lr"] = 0.01 / (seed + 1)
            step(model, optim, inputs_of(seed))
            training_step(other, twin, inputs_of(seed))
            frames.append(frames_compiled())
        assert frames[3] == frames[-1], "something is compiled again"
        torch._dynamo.reset()  # what was compiled is forgotten, what the optimizer knows is not
        step(model, optim, inputs_of(6))
        training_step(other, twin, inputs_of(6))
        assert_equal(list(model.parameters()), list(other.parameters()))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(seed))


def inputs(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(6, 8, generator=generator)


@pytest.mark.slow
def test_compiled_training_steps_are_the_eager_ones():
    compare_compiled(lambda: build(beta2=0.9), tokens)
    compare_compiled(lambda: build(none_grad=False), tokens)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_steps_under_fsdp2_are_the_eager_ones() -> None:
    compare_compiled(lambda: sharded(beta2=0.9), inputs)
