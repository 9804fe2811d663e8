"""State: when it comes to be, what it holds, and that training resumes from it bit by bit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from breaking import Fault
from comparisons import assert_equal, assert_same_training, through_torch_save
from counters import count
from kernel import optimizer
from layouts import params_of, set_gradients
from one_device import SCHEDULERS, Model, build, groups_of, train, trainable
from ranks import run_ranks

Muon = optimizer.Muon
GROUP_OPTIONS = optimizer.muon.GROUP_OPTIONS
EXPLICIT = [(2.0, -1.5, 0.5), (1.875, -1.25, 0.375), (1.5, -0.5, 0.0)]


pytestmark = pytest.mark.usefixtures("one_thread")


# When state comes to be

FIRST_CALLS = {
    "step": lambda optim: optim.step(),
    "state_dict": lambda optim: optim.state_dict(),
    "load_state_dict": lambda optim: optim.load_state_dict(
        {"state": {}, "param_groups": build(beta2=0.9)[1].state_dict()["param_groups"]}
    ),
}
first_calls = pytest.mark.parametrize("call", FIRST_CALLS.values(), ids=FIRST_CALLS)


@pytest.mark.kernels_ci
@first_calls
def test_all_state_is_created_at_the_first_call_and_none_before(call):
    model, optim = build(beta2=0.9)
    set_gradients(trainable(model))
    assert not optim.state
    model.qkv.weight.grad = None  # state comes all the same
    repr(optim)
    optim.zero_grad(set_to_none=False)
    assert not optim.state
    call(optim)
    assert set(optim.state) == set(trainable(model))
    for group in optim.param_groups:
        for p in group["params"]:
            keys = ["momentum_buffer", "second_momentum_buffer"]
            assert list(optim.state[p]) == (
                keys if group["use_muon"] else ["step", "exp_avg", "exp_avg_sq"]
            )


def test_a_frozen_parameter_has_no_state_until_it_is_trained():
    model, optim = build()
    optim.add_param_group({"params": [("frozen", model.frozen)], "use_muon": True})
    train(model, optim, 2)
    assert model.frozen not in optim.state
    assert torch.equal(model.frozen, torch.ones(6, 6))
    model.frozen.requires_grad_(True)
    train(model, optim, 1)
    assert optim.state[model.frozen]["momentum_buffer"].any()
    assert not torch.equal(model.frozen, torch.ones(6, 6))


def swap_parameters(optim: Any, make: Callable[[nn.Parameter], nn.Parameter]) -> list[nn.Parameter]:
    """As trainers do between construction and the first step; returns the new parameters."""
    for group in optim.param_groups:
        group["params"] = [make(p) for p in group["params"]]
    return params_of(optim)


@first_calls
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: nn.Parameter(p.detach().clone()), id="copies"),
        pytest.param(lambda p: nn.Parameter(p.detach().bfloat16()), id="of another dtype"),
        pytest.param(lambda p: nn.Parameter(p.detach().repeat(2, *[1] * (p.ndim - 1))), id="wider"),
        pytest.param(lambda p: nn.Parameter(p.detach().mT.contiguous().mT), id="strided"),
    ],
)
def test_parameters_swapped_before_the_first_call_have_the_state(make, call):
    model, optim = build(beta2=0.9)
    old = trainable(model)
    for p in old:
        p.data = torch.atleast_2d(p.data) if p.ndim < 2 else p.data
    new = swap_parameters(optim, make)
    for p in new:
        p.grad = torch.randn_like(p)
    call(optim)
    assert set(optim.state) == set(new)
    for p in new:
        for key, value in optim.state[p].items():
            if key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                assert value.shape == p.shape and value.dtype == p.dtype
    before = [p.detach().clone() for p in new]
    for p in new:
        p.grad = torch.randn_like(p)
    optim.step()
    assert not any(torch.equal(p, q) for p, q in zip(new, before))
    assert len(optim.state_dict()["state"]) == len(new)


def test_parameters_on_the_meta_device_can_be_swapped_for_real_ones():
    with torch.device("meta"):
        model = Model()
    optim = Muon(groups_of(model), lr=0.01)
    assert optim.state_dict()["state"]
    real = swap_parameters(optim, lambda p: nn.Parameter(torch.randn(p.shape)))
    for p in real:
        p.grad = torch.randn_like(p)
    optim.step()
    assert set(optim.state) == set(real)
    assert all(v.device.type == "cpu" for state in optim.state.values() for v in state.values())


def test_a_group_added_after_steps_has_state_from_the_next_one_and_leaves_the_rest_alone():
    model, optim = build()
    train(model, optim, 3)
    before = copy.deepcopy(optim.state_dict()["state"])
    matrix, vector = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    optim.add_param_group({"params": [("new.matrix", matrix)], "use_muon": True, "lr": 0.5})
    optim.add_param_group({"params": [("new.vector", vector)], "use_muon": False})
    assert matrix not in optim.state and vector not in optim.state
    saved = optim.state_dict()["state"]
    assert_equal({key: saved[key] for key in before}, before)
    assert not optim.state[matrix]["momentum_buffer"].any()
    assert optim.state[vector]["step"] == 0
    matrix.grad, vector.grad = torch.randn(4, 4), torch.randn(4)
    train(model, optim, 1)
    assert optim.state[vector]["step"] == 1
    assert optim.state[model.embed.weight]["step"] == 4
    assert optim.param_groups[-2]["lr"] == 0.5 and optim.param_groups[-1]["lr"] == 0.01


# What state holds


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, torch.bfloat16])
def test_state_has_the_documented_keys_shapes_and_dtypes(dtype, momentum_dtype):
    model, optim = build(dtype, beta2=0.9, momentum_dtype=momentum_dtype)
    train(model, optim, 2)
    shapes = {  # a number for each index of the longer side of each matrix
        model.qkv.weight: (12,),
        model.down.weight: (12,),
        model.experts: (3, 6),
        model.conv.weight: (18,),
    }
    for p, shape in shapes.items():
        state = optim.state[p]
        assert list(state) == ["momentum_buffer", "second_momentum_buffer"]
        assert state["momentum_buffer"].dtype == (momentum_dtype or dtype)
        assert state["momentum_buffer"].shape == p.shape
        assert state["second_momentum_buffer"].dtype == torch.float32
        assert state["second_momentum_buffer"].shape == shape
    for p in set(trainable(model)) - set(shapes):
        state = optim.state[p]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
        assert state["step"].shape == () and state["step"] == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].shape == p.shape and state[key].dtype == dtype


BEFORE_GRADIENTS: dict[str, Callable[..., Any]] = {
    "nothing": lambda model, optim: None,
    "state_dict": lambda model, optim: optim.state_dict(),
    "get_optimizer_state_dict": get_optimizer_state_dict,
}


@pytest.mark.parametrize("call", BEFORE_GRADIENTS.values(), ids=BEFORE_GRADIENTS)
def test_momentum_of_fp32_gradients_of_bf16_weights_is_fp32_where_any_dtype_is_taken(call):
    model, momentum = nn.Linear(6, 4, bias=False, dtype=torch.bfloat16), torch.zeros(4, 6)
    optim = Muon([{"params": list(model.named_parameters()), "use_muon": True}], momentum=0.9)
    model.weight.grad_dtype = None
    call(model, optim)
    for seed in range(3):
        grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        model.weight.grad = grad
        optim.step()
        momentum = 0.9 * momentum + grad
    found = optim.state[model.weight]["momentum_buffer"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, momentum)


def test_the_factored_second_moment_counts_the_longer_side_of_each_block():
    fused, heads = nn.Parameter(torch.randn(10, 4)), nn.Parameter(torch.randn(6, 5))
    optim = Muon(
        [
            {"params": [fused], "use_muon": True, "split": [6, 2, 2]},
            {"params": [heads], "use_muon": True, "split": 2},
        ],
        beta2=0.9,
    )
    optim.state_dict()
    assert optim.state[fused]["second_momentum_buffer"].shape == (6 + 4 + 4,)
    assert optim.state[heads]["second_momentum_buffer"].shape == (3 * 5,)


LAYOUTS_IN_MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.empty(4, 6).mT,
    "channels last": lambda: torch.empty(2, 4, 3, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.empty(6, 8)[:, ::2],
    "one row of a wider one": lambda: torch.empty(6, 8)[:1],
    "no rows": lambda: torch.empty(0, 5),
    "no columns": lambda: torch.empty(5, 0),
}


@pytest.mark.parametrize("use_muon", [False, True])
@pytest.mark.parametrize("new", LAYOUTS_IN_MEMORY.values(), ids=LAYOUTS_IN_MEMORY)
def test_state_lies_in_memory_as_zeros_like_of_its_parameter(new, use_muon):
    p = nn.Parameter(new())
    optim = Muon([{"params": [p], "use_muon": use_muon, "flatten": True}], beta2=0.9)
    optim.state_dict()
    expected = torch.zeros_like(p)
    for key in ("momentum_buffer",) if use_muon else ("exp_avg", "exp_avg_sq"):
        state = optim.state[p][key]
        assert torch.equal(state, expected) and state.stride() == expected.stride()
    if use_muon:
        assert optim.state[p]["second_momentum_buffer"].is_contiguous()


def state_of_parts() -> None:
    """Of 7 × 5 and 2 × 5 on 3 ranks: uneven, and of nothing on some rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Shard(0), Shard(1), Replicate()):
        for shape in ((7, 5), (2, 5)):
            for transposed in (False, True):
                whole = torch.arange(0.0, shape[0] * shape[1]).view(shape)
                whole = whole.mT.contiguous().mT if transposed else whole
                check_state_of_parts(nn.Parameter(distribute_tensor(whole, mesh, [placement])))


def check_state_of_parts(param: nn.Parameter) -> None:
    optim = Muon([{"params": [param], "use_muon": True, "momentum_dtype": torch.float64}])
    state = optim.state_dict()["state"][0]["momentum_buffer"]
    assert_equal(state, torch.zeros_like(param, dtype=torch.float64), strides=True)
    assert not state.requires_grad


def test_state_of_a_dtensor_lies_as_zeros_like_of_it():
    run_ranks(state_of_parts, 3)


def test_without_beta2_there_is_no_second_moment_until_it_is_set():
    model, optim = build()
    train(model, optim, 1)
    assert list(optim.state[model.qkv.weight]) == ["momentum_buffer"]
    optim.param_groups[0]["beta2"] = 0.9
    train(model, optim, 1)
    assert optim.state[model.qkv.weight]["second_momentum_buffer"].any()
    assert "second_momentum_buffer" not in optim.state[model.conv.weight]


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_a_group_whose_algorithm_changes_saves_and_loads_the_state_of_the_new_one(frozen, offload):
    model, optim = build(beta2=0.9)
    if offload:
        optim.turn_on_cpu_offload(backend=optimizer.SimulatedHost())
    train(model, optim, 2)
    muon, adamw = optim.param_groups[0], optim.param_groups[-1]
    matrix, head = muon["params"][0], adamw["params"].pop()
    optim.names[-1].pop()
    optim.add_param_group({"params": [head], "names": ["head"], "use_muon": False})
    for param in (matrix, head):
        param.requires_grad_(not frozen)
    for group in (muon, optim.param_groups[-1]):
        group["use_muon"] = not group["use_muon"]
    train(model, optim, 1)
    saved = copy.deepcopy(optim.state_dict())
    kept = [optim.state[param].keys() for param in (matrix, head)]
    if frozen:
        assert kept == [set(), set()]
    else:
        muons = {"momentum_buffer", "second_momentum_buffer"}
        assert kept == [{"step", "exp_avg", "exp_avg_sq"}, muons]
        assert optim.state[matrix]["step"] == 1
    optim.load_state_dict(saved)
    assert_equal(optim.state_dict(), saved)
    train(model, optim, 1)


@pytest.mark.parametrize("change", [{"beta2": 0.9}, {"weight_rounding": "exact"}], ids=str)
def test_an_option_with_state_may_be_set_while_a_parameter_is_frozen(change):
    model, optim = build(torch.bfloat16)
    train(model, optim, 2)
    model.qkv.weight.requires_grad_(False)
    for group in optim.param_groups:
        group.update(change)
    saved = through_torch_save(optim.state_dict())
    momentum = optim.state[model.qkv.weight]["momentum_buffer"].clone()
    optim.load_state_dict(saved)
    assert_equal(optim.state_dict(), saved)
    model.qkv.weight.requires_grad_(True)
    assert_equal(optim.state[model.qkv.weight]["momentum_buffer"], momentum)
    train(model, optim, 1)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all else": {
        "lr": torch.tensor(0.01),
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.2,
        "adamw_betas": (0.8, 0.9),
        "none_grad": False,
        "chunk_size": 1,
        "adjust_lr": "original",
        "momentum_style": "ema",
        "ns_coefficients": EXPLICIT,
        "ns_dtype": torch.float64,
        "beta2": 0.9,
        "cautious": True,
        "decay_lr": "adjusted",
        "momentum_dtype": torch.float64,
        "missing_grad": "zero",
        "split": {"qkv": [6, 3, 3], "down": 2},
        "maximize": True,
        "comm_dtype": torch.float32,
    },
    "list": {"ns_coefficients": [list(triple) for triple in EXPLICIT]},
    "family": {"ns_coefficients": "quintic", "ns_steps": 7},
    "split": {"split": {"qkv": 4}},
    "capturable": {"capturable": True},
}
options_matrix = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@options_matrix
def test_state_and_saved_groups_hold_only_tensors_and_plain_values(options):
    model, optim = build(**options)
    train(model, optim, 2)
    saved = optim.state_dict()
    for state in saved["state"].values():
        for value in state.values():
            assert type(value) in (torch.Tensor, int, float)

    def assert_plain(value: Any) -> None:
        plain = (bool, int, float, str, torch.dtype, torch.Tensor, type(None))
        if isinstance(value, (list, tuple)):
            for each in value:
                assert_plain(each)
        elif isinstance(value, dict):
            for key, each in value.items():
                assert type(key) is str
                assert_plain(each)
        else:
            assert type(value) in plain

    for group in saved["param_groups"]:
        assert_plain(group)


@pytest.mark.kernels_ci
def test_names_are_not_in_the_state_dict_and_survive_loading():
    model, optim = build()
    train(model, optim, 1)
    names = optim.names
    assert names[0] == ["experts", "qkv.weight", "down.weight"]
    saved = optim.state_dict()
    assert not [group for group in saved["param_groups"] if "names" in group]
    assert optim.names == names
    twin = build(seed=1)[1]
    twin.load_state_dict(saved)
    assert twin.names == names
    twin.param_groups[2]["params"][0].grad = torch.eye(10, 6).to_sparse()
    with pytest.raises(ValueError, match=r"^" + names[2][0]):
        twin.step()


def test_what_was_passed_in_is_not_changed():
    model = Model()
    groups = groups_of(model)
    before = [dict(group, params=list(group["params"])) for group in groups]
    coefficients = [list(triple) for triple in EXPLICIT]
    optim = Muon(groups, ns_coefficients=coefficients)
    train(model, optim, 1)
    assert coefficients == [list(triple) for triple in EXPLICIT]
    for group, old in zip(groups, before):
        assert set(group) == set(old) and group["names"] == old["names"]
        assert all(p is q for p, q in zip(group["params"], old["params"]))


# Resuming


def each_with(first: dict[str, Any], names: str) -> Any:
    """All options with the first way, and the two most different options with all ways."""
    pairs = [
        pytest.param(options, way, id=f"{name}-{way_name}")
        for name, options in OPTIONS.items()
        for way_name, way in first.items()
        if name in ("defaults", "all else") or way_name == next(iter(first))
    ]
    return pytest.mark.parametrize(names, pairs)


TRANSPORTS: dict[str, Callable[[Any], Any]] = {
    "torch.save": through_torch_save,
    "pickle": lambda saved: pickle.loads(pickle.dumps(saved)),
    "deepcopy": copy.deepcopy,
}


@each_with(TRANSPORTS, "options, transport")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_dict_resumes_bit_by_bit(options, transport, dtype):
    model, optim = build(dtype, **options)
    train(model, optim, 5)
    saved = transport({"model": model.state_dict(), "optim": optim.state_dict()})
    train(model, optim, 5, seed=1)
    other, twin = build(dtype, seed=1, **options)
    other.load_state_dict(saved["model"])
    twin.load_state_dict(saved["optim"])
    train(other, twin, 5, seed=1)
    assert_same_training(model, optim, other, twin)


def test_a_checkpoint_brings_its_hyperparameters_but_not_how_matrices_are_read():
    options = {"lr": 0.5, "momentum": 0.8, "beta2": 0.7, "ns_coefficients": EXPLICIT}
    saved = build(**options, split={"qkv": 4})[1].state_dict()
    other, twin = build()
    twin.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    for group in twin.param_groups:
        assert {key: group[key] for key in options} == options
        assert group["ns_steps"] == len(EXPLICIT)
        assert group["split"] is None
    train(other, twin, 2)


@pytest.mark.kernels_ci
def test_fp32_momentum_of_bf16_weights_is_loaded_exactly():
    model, optim = build(torch.bfloat16, momentum_dtype=torch.float32, beta2=0.9)
    train(model, optim, 3)
    momentum = optim.state[model.qkv.weight]["momentum_buffer"].clone()
    second = optim.state[model.qkv.weight]["second_momentum_buffer"].clone()
    assert not torch.equal(momentum, momentum.bfloat16().float())
    other, twin = build(torch.bfloat16, momentum_dtype=torch.float32, beta2=0.9)
    twin.load_state_dict(through_torch_save(optim.state_dict()))
    assert_equal(twin.state[other.qkv.weight]["momentum_buffer"], momentum)
    assert_equal(twin.state[other.qkv.weight]["second_momentum_buffer"], second)


def test_a_second_moment_is_in_fp32_whatever_it_was_saved_in():
    model, optim = build(beta2=0.9)
    train(model, optim, 2)
    saved = copy.deepcopy(optim.state_dict())
    for state in saved["state"].values():
        if "second_momentum_buffer" in state:
            state["second_momentum_buffer"] = state["second_momentum_buffer"].double()
    _, twin = build(seed=1, beta2=0.9)
    twin.load_state_dict(saved)
    assert_equal(twin.state_dict()["state"], optim.state_dict()["state"])


def test_loaded_moments_get_the_dtype_of_their_parameter_and_momentum_keeps_its_own():
    model, optim = build(torch.float64, beta2=0.9)
    train(model, optim, 3)
    saved = through_torch_save(optim.state_dict())
    for state in saved["state"].values():
        state["foreign"] = torch.ones(2, dtype=torch.float64)
    other, twin = build(torch.float32, seed=1, beta2=0.9)
    twin.load_state_dict(saved)
    for p, q in zip(trainable(model), trainable(other)):
        assert list(twin.state[q]) == [*optim.state[p], "foreign"]
        assert twin.state[q]["foreign"].dtype == torch.float32
        for key, value in optim.state[p].items():
            moment = key in ("exp_avg", "exp_avg_sq")
            assert_equal(twin.state[q][key], value.float() if moment else value)


def reset(model: nn.Module, optim: Any, weights: Any, snapshot: Any) -> None:
    model.load_state_dict(weights)
    optim.load_state_dict(snapshot)


@pytest.mark.parametrize("is_loaded", [False, True], ids=["taken", "taken and loaded"])
@options_matrix
def test_a_state_dict_taken_before_the_first_step_resets_the_optimizer(options, is_loaded):
    model, optim = build(**options)
    check_reset(model, optim, build(**options), is_loaded)


def check_reset(model: nn.Module, optim: Any, fresh: Any, is_loaded: bool = False) -> None:
    """Checks that a state dict taken now makes both train as fresh ones, again and again."""
    weights, start = copy.deepcopy(model.state_dict()), optim.state_dict()
    saved = copy.deepcopy(start)
    if is_loaded:
        optim.load_state_dict(start)
    for _ in range(2):
        train(model, optim, 3)
        assert_equal(start, saved)
        reset(model, optim, weights, start)
    train(model, optim, 3)
    train(*fresh, 3)
    assert_same_training(model, optim, *fresh)


def loaded(pair: Any) -> Any:
    pair[1].load_state_dict(through_torch_save(pair[1].state_dict()))
    return pair


@pytest.mark.parametrize(
    "as_new",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), loaded],
    ids=["deepcopy", "pickle", "load"],
)
@options_matrix
def test_a_state_dict_of_a_fresh_copy_or_load_resets_the_optimizer(options, as_new):
    model, optim = build(**options)
    optim.state_dict()  # creates state, which the copy has, too
    check_reset(*as_new((model, optim)), build(**options))


def test_state_that_is_created_beside_other_state_stays_zeros_in_a_state_dict():
    def joins(optim: Any, weight: nn.Parameter) -> None:
        train_alone(optim, weight)
        optim.add_param_group({"params": [nn.Parameter(torch.randn(4, 6))], "use_muon": True})

    def has_beta2(optim: Any, weight: nn.Parameter) -> None:
        train_alone(optim, weight)
        optim.param_groups[0]["beta2"] = 0.9

    def has_residuals(optim: Any, weight: nn.Parameter) -> None:
        optim.load_exact_weights({"w": torch.randn(weight.shape)})

    def train_alone(optim: Any, weight: nn.Parameter) -> None:
        for p in params_of(optim):
            p.grad = torch.randn_like(p)
        optim.step()

    for change, key in (
        (joins, "momentum_buffer"),
        (has_beta2, "second_momentum_buffer"),
        (has_residuals, "momentum_buffer"),
    ):
        weight = nn.Parameter(torch.randn(6, 4).bfloat16())
        group = {"params": [weight], "names": ["w"], "use_muon": True, "weight_rounding": "exact"}
        optim = Muon([group], lr=0.1)
        change(optim, weight)
        created = list(optim.state_dict()["state"].values())[-1][key]
        train_alone(optim, weight)
        assert not created.any(), change


def test_a_state_dict_taken_before_offload_was_turned_on_resets_the_optimizer():
    model, optim = build(beta2=0.9)
    weights, start = copy.deepcopy(model.state_dict()), optim.state_dict()
    saved = copy.deepcopy(start)
    optim.turn_on_cpu_offload(backend=optimizer.SimulatedHost())
    offloaded = optim.state_dict()
    train(model, optim, 3)
    assert_equal([start["state"], offloaded["state"]], [saved["state"]] * 2)
    reset(model, optim, weights, offloaded)
    train(model, optim, 2)
    other, twin = build(beta2=0.9)
    train(other, twin, 2)
    assert_equal([p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()])


def reset_shards(grad_reduce: str | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(torch.randn(5, 4)) for _ in range(2)]
    options: dict[str, Any] = {"process_group": dist.group.WORLD, "grad_reduce": grad_reduce}
    if grad_reduce is None:
        params, options = [nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])) for p in params], {}
    groups = [{"params": [p], "use_muon": m} for p, m in zip(params, (True, False))]
    optim = Muon(groups, lr=0.1, **options)
    start, weights = optim.state_dict(), [p.detach().clone() for p in params]
    runs = []
    for _ in range(2):
        for seed in range(3):
            set_gradients(params, seed)
            optim.step()
        runs.append([p.detach().clone() for p in params])
        optim.load_state_dict(start)
        for param, weight in zip(params, weights):
            param.detach().copy_(weight)
    assert_equal(*runs)


@pytest.mark.parametrize("grad_reduce", [None, "mean"], ids=["FSDP2", "ZeRO-2"])
def test_a_state_dict_taken_before_the_first_step_resets_the_state_of_every_rank(grad_reduce):
    run_ranks(reset_shards, 2, grad_reduce)


def test_a_loaded_state_dict_stays_as_it_was_given():
    model, optim = build(beta2=0.9)
    train(model, optim, 2)
    saved, weights = through_torch_save(optim.state_dict()), copy.deepcopy(model.state_dict())
    given = copy.deepcopy(saved)
    runs = [build(seed=seed, beta2=0.9) for seed in (1, 2)]
    for other, twin in (*runs, runs[0]):  # two optimizers, and one of them twice
        reset(other, twin, weights, given)
        train(other, twin, 2, seed=3)
    assert_equal(given, saved)
    assert_same_training(*runs[0], *runs[1])


def load_in_place(folder: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A trained model and optimizer, fresh ones, and the state dict of the fresh optimizer, into
    whose tensors that of the trained one was read from files."""
    trained, fresh = build(beta2=0.9), build(beta2=0.9)
    train(*trained, 2)
    dcp.save({"optim": trained[1].state_dict()}, checkpoint_id=folder, no_dist=True)
    content = {"optim": fresh[1].state_dict()}
    dcp.load(content, checkpoint_id=folder, no_dist=True)
    return trained, fresh, content["optim"]


def test_a_load_in_place_takes_no_memory_of_its_own(tmp_path):
    _, (other, twin), read = load_in_place(tmp_path)
    assert count(lambda: twin.load_state_dict(read)).peak_bytes < 1000
    train(other, twin, 1)
    state = twin.state_dict()["state"]
    for number, tensors in read["state"].items():
        assert all(state[number][key] is tensor for key, tensor in tensors.items())


def test_a_load_in_place_is_a_load_without_another_one(tmp_path):
    (model, optim), (other, twin), read = load_in_place(tmp_path)
    other.load_state_dict(model.state_dict())
    assert_equal(twin.state_dict()["state"], optim.state_dict()["state"])
    for pair in ((model, optim), (other, twin)):
        train(*pair, 2, seed=1)
    assert_same_training(model, optim, other, twin)
    assert read


def test_parameters_missing_from_a_checkpoint_start_from_zeros():
    model, optim = build(beta2=0.9)
    train(model, optim, 2)
    saved = through_torch_save(optim.state_dict())
    saved["state"][0] = dict.fromkeys(saved["state"][0])
    del saved["state"][1]
    saved["state"][5] = {}
    twin = build(seed=1, beta2=0.9)[1]
    twin.load_state_dict(saved)
    found = twin.state_dict()["state"]
    for number, key in ((0, "momentum_buffer"), (1, "second_momentum_buffer"), (5, "exp_avg")):
        expected = optim.state_dict()["state"][number][key]
        assert_equal(found[number][key], torch.zeros_like(expected))
    assert found[5]["step"] == 0
    assert_equal(found[2], optim.state_dict()["state"][2])


@pytest.mark.parametrize("absent", ["step", "exp_avg", "exp_avg_sq"])
def test_state_of_adamw_without_one_of_its_entries_is_refused_by_name(absent):
    model, optim = build()
    train(model, optim, 2)
    saved = through_torch_save(optim.state_dict())
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optim.state_dict())
    del saved["state"][5][absent]
    with pytest.raises(ValueError, match=rf"of conv\.bias in the checkpoint lack {absent}:"):
        optim.load_state_dict(saved)
    assert_equal([model.state_dict(), optim.state_dict()], [weights, state])


@pytest.mark.parametrize("is_trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("absent", ["momentum_buffer", "second_momentum_buffer", "weight_residual"])
def test_state_of_muon_without_one_of_its_tensors_is_refused_by_name(absent, is_trained):
    options = {"beta2": 0.9, "weight_rounding": "exact"}
    model, optim = build(torch.bfloat16, **options)
    train(model, optim, 2)
    saved = through_torch_save(optim.state_dict())
    del saved["state"][1][absent]
    other, twin = build(torch.bfloat16, seed=1, **options)
    train(other, twin, 2 * is_trained)
    state = copy.deepcopy(twin.state_dict())
    names = {param: name for name, param in model.named_parameters()}
    name = re.escape(names[optim.param_groups[0]["params"][1]])
    with pytest.raises(ValueError, match=rf"of {name} in the checkpoint lack {absent}:"):
        twin.load_state_dict(saved)
    assert_equal(twin.state_dict(), state)


# Copies and pickles of the optimizer itself

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "deepcopy": copy.deepcopy,
    "torch.save": functools.partial(through_torch_save, weights_only=False),
}


def wide_options(optim: Any) -> dict[str, Any]:
    """Options of the optimizer as a whole, wherever it keeps them."""
    found: dict[str, Any] = {}
    for value in vars(optim).values():
        if dataclasses.is_dataclass(value) and hasattr(value, "chunk_size"):
            found.update(dataclasses.asdict(value))
    assert found
    return found


@each_with(COPIES, "options, duplicate")
@pytest.mark.parametrize("steps", [0, 3])
def test_a_copied_optimizer_has_all_options_and_trains_bit_by_bit(options, steps, duplicate):
    model, optim = build(**options)
    train(model, optim, steps)
    other, twin = duplicate((model, optim))
    assert type(twin) is type(optim)
    assert wide_options(twin) == wide_options(optim)
    assert_equal(twin.defaults, optim.defaults)
    for group, copied in zip(optim.param_groups, twin.param_groups):
        assert_equal(
            {key: value for key, value in copied.items() if key != "params"},
            {key: value for key, value in group.items() if key != "params"},
        )
    train(model, optim, 3, seed=1)
    train(other, twin, 3, seed=1)
    assert_same_training(model, optim, other, twin)


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copied_optimizer_still_has_the_constructors_options(duplicate):
    options = {
        "chunk_size": 3,
        "warmup_step": 2,
        "comm_dtype": torch.float32,
        "debug": True,
        "use_distributed_muon": True,
        "consistency_check": "plan",
    }
    model = Model()
    optim = Muon(groups_of(model), expert_keys=["stacked"], **options)
    twin = duplicate((model, optim))[1]
    found = wide_options(twin)
    assert {key: found[key] for key in options} == options
    added = nn.Parameter(torch.randn(2, 3, 4))
    twin.add_param_group({"params": [("stacked.w", added)], "use_muon": True})
    assert twin.param_groups[-1]["expert_keys"] == ["stacked"]


def test_an_optimizer_can_be_copied_under_a_scheduler():
    model, optim = build()
    schedule = lr_scheduler.StepLR(optim, 1, gamma=0.5)
    train(model, optim, 2, schedule=schedule)
    other, twin, copied = copy.deepcopy((model, optim, schedule))
    pickle.loads(pickle.dumps(optim))
    train(model, optim, 2, schedule=schedule)
    train(other, twin, 2, schedule=copied)
    assert_same_training(model, optim, other, twin)


# Older and foreign checkpoints


@pytest.mark.parametrize("key", [*GROUP_OPTIONS, "use_muon"])
def test_a_group_key_missing_from_a_checkpoint_gets_its_default(key):
    model, optim = build()
    train(model, optim, 2)
    saved = copy.deepcopy(optim.state_dict())
    for group in saved["param_groups"]:
        del group[key]
    other, twin = build(seed=1)
    expected = [group[key] for group in twin.param_groups]
    twin.load_state_dict(saved)
    assert [group[key] for group in twin.param_groups] == expected
    other.load_state_dict(model.state_dict())
    train(model, optim, 2, seed=1)
    train(other, twin, 2, seed=1)
    assert_same_training(model, optim, other, twin)


def test_a_checkpoint_without_any_group_keys_gets_the_constructors():
    model, optim = build(beta2=0.9, cautious=True, ns_coefficients=EXPLICIT)
    train(model, optim, 2)
    saved = copy.deepcopy(optim.state_dict())
    saved["param_groups"] = [{"params": group["params"]} for group in saved["param_groups"]]
    other, twin = build(seed=1, beta2=0.9, cautious=True, ns_coefficients=EXPLICIT)
    twin.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    train(model, optim, 2, seed=1)
    train(other, twin, 2, seed=1)
    assert_same_training(model, optim, other, twin)


def test_tensors_of_a_checkpoint_that_share_memory_or_leave_gaps_get_their_own():
    model, optim = build()
    train(model, optim, 2)
    saved = copy.deepcopy(optim.state_dict())
    other, twin = build(seed=1)
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(copy.deepcopy(saved))
    for own in saved["state"].values():
        for key, value in own.items():
            if value.ndim:
                own[key] = torch.stack([value, value], -1)[..., 0]  # every second element
        if "exp_avg" in own:
            own["exp_avg"] = own["exp_avg_sq"]  # the very same
    shared, expected = copy.deepcopy(saved), copy.deepcopy(saved)
    for own in expected["state"].values():
        own.update({key: value.clone().contiguous() for key, value in own.items()})
    twins = []
    for content in (shared, expected):
        again, of_it = build(seed=1)
        again.load_state_dict(model.state_dict())
        of_it.load_state_dict(content)
        train(again, of_it, 2)
        twins.append((again, of_it))
    assert_same_training(*twins[0], *twins[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_may_change_its_dtype_between_steps(dtype):
    model, optim = build()
    train(model, optim, 2)
    model.to(dtype)
    train(model, optim, 2)
    for p in trainable(model):
        assert p.dtype == dtype and torch.isfinite(p).all()
        moments = [
            optim.state[p][key] for key in ("exp_avg", "exp_avg_sq") if key in optim.state[p]
        ]
        assert all(moment.dtype == dtype for moment in moments)


def break_off_midway(model: nn.Module, optim: Any) -> None:
    """A step that fails when momentum has been updated."""
    set_gradients(trainable(model))
    with pytest.raises(RuntimeError, match="broke off"), Fault("begin Muon.orthogonalize", 1):
        optim.step()
    assert optim.is_broken


def test_a_state_dict_that_is_the_live_state_repairs_nothing_and_one_from_a_file_does():
    model, optim = build()
    train(model, optim, 1)
    own = optim.state_dict()
    saved = through_torch_save(own)
    for _ in range(2):
        train(model, optim, 1)
        break_off_midway(model, optim)
        with pytest.raises(ValueError, match="load the file again"):
            optim.load_state_dict(own)
        assert optim.is_broken
        optim.load_state_dict(saved)
        assert not optim.is_broken
        own = optim.state_dict()


def test_a_shallow_copy_is_as_broken_as_the_state_it_shares():
    model, optim = build()
    train(model, optim, 1)
    shared = copy.copy(optim)
    break_off_midway(model, optim)
    with pytest.raises(RuntimeError, match="An earlier step"):
        shared.step()


def test_discarded_state_leaves_what_is_the_users():
    model, optim = build()
    train(model, optim, 1)
    optim.state["mine"] = {"kept": 1}
    optim.discard_state()
    assert optim.state["mine"] == {"kept": 1} and optim.is_broken


def load_parts_of_another_size() -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)]))
    optim = Muon([{"params": [param], "use_muon": False}])
    saved = optim.state_dict()
    short = DTensor.from_local(
        torch.zeros(8), mesh, [Shard(0)], run_check=False, shape=param.shape, stride=(64, 1)
    )
    saved["state"][0] = {**saved["state"][0], "exp_avg": short}
    with pytest.raises(ValueError, match=r"exp_avg of .* this rank holds \(8,\), .* \(32, 64\)"):
        optim.load_state_dict(saved)


def test_a_dtensor_around_a_part_of_another_size_is_refused():
    run_ranks(load_parts_of_another_size, 2)


def test_moments_under_their_old_names_load():
    model, optim = build()
    train(model, optim, 3)
    saved = copy.deepcopy(optim.state_dict())
    for state in saved["state"].values():
        if "exp_avg" in state:
            state["moment1"], state["moment2"] = state.pop("exp_avg"), state.pop("exp_avg_sq")
    twin = build(seed=1)[1]
    twin.load_state_dict(saved)
    assert "moment1" in saved["state"][5], "the caller's dict was changed"
    assert_equal(twin.state_dict(), optim.state_dict())


@pytest.mark.parametrize(
    "number",
    [
        int,
        float,
        np.float32,
        lambda step: step.to(torch.int64),
        lambda step: step.to(torch.bfloat16).view(1),
    ],
    ids=["int", "float", "numpy", "integer tensor", "bf16, one dimension"],
)
def test_a_step_count_saved_as_a_number_loads(number):
    model, optim = build()
    train(model, optim, 3)
    saved = copy.deepcopy(optim.state_dict())
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = number(state["step"])
    other, twin = build(seed=1)
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(saved)
    train(model, optim, 2, seed=1)
    train(other, twin, 2, seed=1)
    assert_same_training(model, optim, other, twin)


def test_a_load_hook_can_change_momentum():
    model, optim = build()
    train(model, optim, 2)

    def halve(_: Any, saved: Any) -> Any:
        states = {
            key: {k: v * 0.5 if k == "momentum_buffer" else v for k, v in state.items()}
            for key, state in saved["state"].items()
        }
        return {**saved, "state": states}

    other, twin = build()
    twin.register_load_state_dict_pre_hook(halve)
    twin.load_state_dict(copy.deepcopy(optim.state_dict()))
    assert_equal(
        twin.state[other.qkv.weight]["momentum_buffer"],
        optim.state[model.qkv.weight]["momentum_buffer"] * 0.5,
    )


# torch.distributed.checkpoint, on one process


@options_matrix
def test_a_step_of_zeros_changes_neither_weights_nor_momentum(options):
    model, optim = build(**{**options, "lr": 0.0})
    before = [p.detach().clone() for p in model.parameters()]
    for p in trainable(model):
        p.grad = torch.zeros_like(p)
    optim.step()
    assert_equal([p.detach() for p in model.parameters()], before)
    for state in optim.state.values():
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            assert key not in state or not state[key].any()


flattened = pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])


@flattened
@options_matrix
def test_taking_the_state_of_a_fresh_optimizer_changes_nothing(options, flatten):
    model, optim = build(**options)
    before = [p.detach().clone() for p in model.parameters()]
    lrs = [copy.deepcopy(group["lr"]) for group in optim.param_groups]
    get_optimizer_state_dict(
        model, optim, options=StateDictOptions(flatten_optimizer_state_dict=flatten)
    )
    assert_equal([p.detach() for p in model.parameters()], before)
    assert_equal([group["lr"] for group in optim.param_groups], lrs)
    assert all(p.grad is None for p in model.parameters())
    for p in (model.qkv.weight, model.experts, model.conv.weight):
        assert not optim.state[p]["momentum_buffer"].any()
    other, twin = build(**options)
    for pair in ((model, optim), (other, twin)):
        train(*pair, 2)
    assert_same_training(model, optim, other, twin)


def test_taking_the_state_of_a_fresh_optimizer_draws_no_random_numbers():
    options = {"weight_rounding": "stochastic", "weight_decay": 0.0}
    runs = [build(torch.bfloat16, **options) for _ in range(2)]
    get_optimizer_state_dict(*runs[0])
    for model, optim in runs:
        train(model, optim, 2)
    assert_same_training(*runs[0], *runs[1])


def step_without_lr(averages: bool) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    for nonzero_rank, counted in ((None, 0), (1, 1), (0, 1)):
        whole = torch.ones(4, 2)
        param = nn.Parameter(whole if averages else distribute_tensor(whole, mesh, [Shard(0)]))
        options = {"process_group": dist.group.WORLD, "grad_reduce": "mean"} if averages else {}
        optim = Muon([{"params": [param], "use_muon": False}], lr=0.0, **options)
        for steps in (counted, counted + 1):  # only the first step can create the state
            param.grad = torch.zeros_like(param)
            if dist.get_rank() == nonzero_rank:
                optimizer.distributed.dtensors.raw_local(param.grad).fill_(1.0)
            optim.step()
            assert optim.state[param]["step"] == steps


@pytest.mark.parametrize("averages", [False, True], ids=["FSDP2", "ZeRO-2"])
def test_ranks_decide_together_whether_a_fresh_step_without_lr_counts(averages):
    run_ranks(step_without_lr, 2, averages)


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "trained"])
@each_with({"nested": False, "flattened": True}, "options, flatten")
def test_training_resumes_bit_by_bit_through_distributed_checkpoint_state(options, flatten, warm):
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optim = build(**options)
    train(model, optim, 3)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optim, options=how))
    other, twin = build(seed=1, **options)
    if warm:
        train(other, twin, 2, seed=5)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, twin, saved, options=how)
    assert twin.names == optim.names
    train(model, optim, 3, seed=1)
    train(other, twin, 3, seed=1)
    assert_same_training(model, optim, other, twin)


def test_training_resumes_from_a_file_that_dcp_has_converted_for_torch_load(tmp_path):
    """Its state is under the ids of the groups as text."""
    model, optim = build(beta2=0.9)
    train(model, optim, 3)
    content = {"model": model.state_dict(), "optim": optim.state_dict()}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "converted.pt")
    saved = torch.load(tmp_path / "converted.pt", weights_only=True)
    other, twin = build(seed=1, beta2=0.9)
    other.load_state_dict(saved["model"])
    twin.load_state_dict(saved["optim"])
    assert_equal(twin.state_dict(), optim.state_dict())
    train(model, optim, 3, seed=1)
    train(other, twin, 3, seed=1)
    assert_same_training(model, optim, other, twin)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["layers.0.wq.weight"], "of parameter 'layers.0.wq.weight', which none of its groups"),
        ([99], "of parameter 99, which none of its groups lists"),
        ([0, "0"], "has state of parameter 0 twice"),
    ],
)
def test_state_under_other_ids_than_the_groups_is_refused(ids, message):
    model, optim = build()
    train(model, optim, 1)
    saved, before = copy.deepcopy(optim.state_dict()), copy.deepcopy(optim.state_dict())
    momentum = saved["state"].pop(0)
    saved["state"].update(dict.fromkeys(ids, momentum))
    with pytest.raises(ValueError, match=message):
        optim.load_state_dict(saved)
    assert_equal(optim.state_dict(), before)


# Schedulers


def test_every_scheduler_of_torch_is_tried():
    bases = (lr_scheduler.LRScheduler, lr_scheduler._LRScheduler)
    known = {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, bases) and value not in bases
    }
    assert known == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_what_it_sets_for_torchs_sgd(name, tensor):
    def lr() -> Any:
        return torch.tensor(0.1) if tensor else 0.1

    torch.manual_seed(0)
    model, optim = build(lr=lr())
    groups = [{"params": list(g["params"])} for g in copy.deepcopy(optim).param_groups]
    sgd = torch.optim.SGD(groups, lr=lr(), momentum=0.95, foreach=False)
    schedule, expected = SCHEDULERS[name](optim), SCHEDULERS[name](sgd)
    seen = set()
    for seed in range(8):
        for group, theirs in zip(optim.param_groups, sgd.param_groups):
            assert group["lr"] == theirs["lr"] and group["momentum"] == theirs["momentum"]
            assert isinstance(group["lr"], torch.Tensor) is isinstance(theirs["lr"], torch.Tensor)
        seen.add(float(optim.param_groups[0]["lr"]))
        before = model.qkv.weight.detach().clone()
        set_gradients(trainable(model), seed)
        optim.step()
        sgd.step()
        assert (model.qkv.weight != before).any() or not optim.param_groups[0]["lr"]
        for each in (schedule, expected):
            each.step(1.0) if name == "ReduceLROnPlateau" else each.step()
    assert len(seen) > 1, "nothing was scheduled"


@pytest.mark.parametrize("total", [4, 10])
def test_a_linear_decay_to_zero_can_be_followed_to_its_end(total):
    """LinearLR ends a rounding error below zero; torch's optimizers step on."""
    model, optim = build(lr=1e-3)
    schedule = lr_scheduler.LinearLR(optim, end_factor=0.0, total_iters=total)
    train(model, optim, total + 2, schedule=schedule)
    assert abs(optim.param_groups[0]["lr"]) < 1e-15


@pytest.mark.parametrize(
    "lr",
    [torch.tensor(0.25), torch.tensor([0.25]), torch.tensor(0.25, dtype=torch.float64)],
    ids=["fp32", "one element", "fp64"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"decay_lr": "adjusted", "cautious": True}, {"capturable": True}],
    ids=str,
)
def test_a_tensor_learning_rate_is_the_number(lr, options):
    model, optim = build(lr=0.25, **options)
    other, twin = build(lr=lr, **options)
    for seed in range(3):
        for each, of in ((optim, model), (twin, other)):
            set_gradients(trainable(of), seed)
            each.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert twin.param_groups[0]["lr"].shape == lr.shape


def test_a_tensor_learning_rate_changed_in_place_is_obeyed():
    model, optim = build(lr=torch.tensor(0.1))
    train(model, optim, 1)
    for group in optim.param_groups:
        group["lr"].zero_()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optim, 1)
    assert_equal([p.detach() for p in model.parameters()], before)


# What torch.optim's users call


@pytest.mark.kernels_ci
def test_a_closure_is_called_once_with_gradients_on_and_its_value_returned():
    model, optim = build()
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optim.zero_grad()
        loss = model(torch.arange(10).view(2, 5)).square().mean()
        loss.backward()
        return loss

    before = model.qkv.weight.detach().clone()
    loss = optim.step(closure)
    assert calls == [True]
    assert isinstance(loss, torch.Tensor) and loss > 0
    assert not torch.equal(model.qkv.weight, before)
    assert optim.step(closure=closure) < loss or len(calls) == 2
    assert optim.step() is None


@pytest.mark.kernels_ci
def test_step_hooks_fire_once_each_around_the_step():
    model, optim = build()
    seen: list[str] = []
    before = model.qkv.weight.detach().clone()

    def pre(hooked: Any, args: Any, kwargs: Any) -> None:
        assert hooked is optim and torch.equal(model.qkv.weight, before)
        seen.append("pre")

    def post(hooked: Any, args: Any, kwargs: Any) -> None:
        assert hooked is optim and not torch.equal(model.qkv.weight, before)
        seen.append("post")

    handles = [optim.register_step_pre_hook(pre), optim.register_step_post_hook(post)]
    every_pre = register_optimizer_step_pre_hook(lambda *_: seen.append("global pre"))
    every_post = register_optimizer_step_post_hook(lambda *_: seen.append("global post"))
    try:
        train(model, optim, 1)
    finally:
        every_pre.remove()
        every_post.remove()
    assert sorted(seen) == ["global post", "global pre", "post", "pre"]
    assert seen.index("pre") < seen.index("post")
    for handle in handles:
        handle.remove()
    train(model, optim, 1)
    assert len(seen) == 4


def test_state_dict_hooks_fire():
    optim = build()[1]
    seen = []
    optim.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optim.register_state_dict_post_hook(lambda o, s: seen.append("post"))
    optim.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optim.load_state_dict(optim.state_dict())
    assert seen == ["pre", "post", "loaded"]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("none_grad", [False, True])
def test_gradients_stay_or_go_as_asked_and_are_never_written(none_grad):
    model, optim = build(none_grad=none_grad)
    set_gradients(trainable(model))
    held = {p: p.grad for p in trainable(model)}
    values = {p: grad.clone() for p, grad in held.items()}
    optim.step()
    for group in optim.param_groups:
        for p in group["params"]:
            assert torch.equal(held[p], values[p])
            assert (p.grad is None) is (none_grad and group["use_muon"])


@pytest.mark.parametrize("none_grad", [False, True])
def test_gradients_that_nobody_clears_add_up_for_those_that_keep_them(none_grad):
    model, optim = build(none_grad=none_grad)
    set_gradients(trainable(model))
    first = {p: p.grad.clone() for p in trainable(model)}
    optim.step()
    optim.zero_grad(set_to_none=False)
    for group in optim.param_groups:
        for p in group["params"]:
            assert (p.grad is None) is (none_grad and group["use_muon"])
    for passes in (1, 2):
        for p in trainable(model):
            (p * first[p]).sum().backward()
        if passes == 1:
            optim.step()
    for group in optim.param_groups:
        for p in group["params"]:
            count = 1 if none_grad and group["use_muon"] else 2
            assert torch.equal(p.grad, count * first[p])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_zeroes_or_drops(set_to_none):
    model, optim = build(none_grad=False)
    set_gradients(trainable(model))
    optim.step()
    optim.zero_grad(set_to_none=set_to_none)
    for p in trainable(model):
        assert p.grad is None if set_to_none else not p.grad.any()
    before = [p.detach().clone() for p in trainable(model)]
    optim.step()  # zeros are gradients, None is none
    for p, old in zip(trainable(model), before):
        assert torch.equal(p, old) is set_to_none


@pytest.mark.kernels_ci
def test_grad_scaler_takes_the_step_of_unscaled_gradients():
    model, optim = build()
    other, twin = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for seed in range(3):
        tokens = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(seed))
        model(tokens).square().mean().backward()
        optim.step()
        optim.zero_grad()
        scaler.scale(other(tokens).square().mean()).backward()
        if seed == 1:
            scaler.unscale_(twin)
        scaler.step(twin)
        scaler.update()
        twin.zero_grad()
    assert_same_training(model, optim, other, twin)


@options_matrix
def test_repr_shows_every_group_and_each_option_that_is_no_default(options):
    model, optim = build(**options)
    head, *lines, end = repr(optim).splitlines()
    assert (head, end) == ("Muon (", ")")
    for group, line in zip(optim.param_groups, lines, strict=True):
        shown = {"lr", "weight_decay", *(options if group["use_muon"] else ())}
        assert all(f" {key}=" in line for key in shown & {*GROUP_OPTIONS})
    text = repr(optim)
    train(model, optim, 1)
    assert repr(optim) == text


def test_a_state_dict_after_parameters_were_swapped_out_has_only_the_present_ones():
    old, new = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    optim = Muon([{"params": [old], "use_muon": True}])
    optim.state_dict()
    optim.param_groups[0]["params"] = [new]
    assert set(optim.state_dict()["state"]) == {0}


def test_state_that_was_never_stepped_goes_with_the_parameters_that_are_swapped_out():
    """It would keep the whole model beside its shards: accelerate has it made before it swaps."""
    model, optim = build(beta2=0.9)
    optim.load_state_dict(optim.state_dict())
    old = weakref.ref(optim.param_groups[0]["params"][0])
    new = swap_parameters(optim, lambda p: nn.Parameter(p.detach().clone()))
    del model
    for p in new:
        p.grad = torch.ones_like(p)
    optim.step()
    assert set(optim.state) == set(new) and old() is None


def test_state_of_parameters_that_come_back_is_as_they_left_it():
    model, optim = build()
    set_gradients(trainable(model))
    optim.step()
    before, old = copy.deepcopy(optim.state_dict()), [g["params"] for g in optim.param_groups]
    swap_parameters(optim, lambda p: nn.Parameter(p.detach().clone()))
    optim.state_dict()
    for group, params in zip(optim.param_groups, old):
        group["params"] = params
    assert_equal(optim.state_dict(), before)


def test_groups_appended_behind_the_optimizers_back_raise():
    optim = Muon([{"params": [nn.Parameter(torch.ones(4, 4))], "use_muon": True}])
    optim.param_groups.append({**optim.param_groups[0], "params": []})
    with pytest.raises(ValueError, match="add_param_group"):
        optim.step()


def test_a_parameter_that_shrank_is_not_stepped_with_its_old_momentum():
    param = nn.Parameter(torch.ones(8, 4))
    optim = Muon([{"params": [param], "names": ["w"], "use_muon": True}])
    param.grad = torch.ones(8, 4)
    optim.step()
    param.data = param.data[2:6].clone()
    param.grad = torch.ones(4, 4)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=r"momentum_buffer of w has shape \(8, 4\)"):
        optim.step()
    assert torch.equal(param, before)
