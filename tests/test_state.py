"""State: when it comes to be, what it holds, and that training resumes from it bit by bit."""

from __future__ import annotations

import copy
import functools
import pickle
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
from torch.utils._pytree import tree_leaves

from breaking import Fault
from comparisons import assert_equal, assert_same_training, through_torch_save
from counters import count
from kernel import optimizer
from layouts import local, params_of, set_gradients
from one_device import SCHEDULERS, Model, build, groups_of, train, trainable
from ranks import on_ranks

Muon = optimizer.Muon
EXPLICIT = [(2.0, -1.5, 0.5), (1.875, -1.25, 0.375), (1.5, -0.5, 0.0)]
MUON_KEYS = ["momentum_buffer", "second_momentum_buffer"]
ADAMW_KEYS = ["step", "exp_avg", "exp_avg_sq"]
Pair = tuple[Model, Any]  # a model and its optimizer

pytestmark = pytest.mark.usefixtures("one_thread")


def table(name: str, rows: dict[str, Any]) -> Any:
    return pytest.mark.parametrize(name, rows.values(), ids=rows)


def go_on(*pairs: Pair) -> None:
    """Checks that they take the same steps, from the same state."""
    for pair in pairs:
        train(*pair, 2, seed=1)
    assert_same_training(*pairs[0], *pairs[1])


def trained(steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> Pair:
    pair = build(dtype, **options)
    train(*pair, steps)
    return pair


def load_into(pair: Pair, weights: Any, state: Any) -> Pair:
    pair[0].load_state_dict(weights)
    pair[1].load_state_dict(state)
    return pair


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# When state comes to be

first_calls = table(
    "call",
    {
        "step": lambda optim: optim.step(),
        "state_dict": lambda optim: optim.state_dict(),
        "load_state_dict": lambda optim: optim.load_state_dict(
            {"state": {}, "param_groups": build(beta2=0.9)[1].state_dict()["param_groups"]}
        ),
    },
)


@pytest.mark.kernels_ci
@first_calls
def test_all_state_is_created_at_the_first_call_and_none_before(call):
    model, optim = build(beta2=0.9)
    set_gradients(trainable(model))
    model.qkv.weight.grad = None  # state comes all the same
    repr(optim)
    optim.zero_grad(set_to_none=False)
    assert not optim.state
    call(optim)
    assert set(optim.state) == set(trainable(model))
    for group in optim.param_groups:
        for p in group["params"]:
            assert list(optim.state[p]) == (MUON_KEYS if group["use_muon"] else ADAMW_KEYS)


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


def swap_parameters(optim: Any, make: Callable[[nn.Parameter], torch.Tensor]) -> list[nn.Parameter]:
    """As trainers do between construction and the first step; returns the new parameters."""
    for group in optim.param_groups:
        group["params"] = [nn.Parameter(make(p.detach())) for p in group["params"]]
    return params_of(optim)


@first_calls
@table(
    "make",
    {
        "copies": torch.randn_like,
        "of another dtype": lambda p: torch.randn(p.shape, dtype=torch.bfloat16),
        "wider": lambda p: torch.randn(2 * p.shape[0], *p.shape[1:]),
        "strided": lambda p: torch.randn(p.shape).mT.contiguous().mT if p.ndim > 1 else p + 1,
    },
)
def test_parameters_swapped_before_the_first_call_have_the_state(make, call):
    optim = build(beta2=0.9)[1]
    new = swap_parameters(optim, lambda p: make(torch.zeros(p.shape)))
    set_gradients(new)
    call(optim)
    assert set(optim.state) == set(new)
    for p in new:
        for key in {"momentum_buffer", "exp_avg", "exp_avg_sq"} & optim.state[p].keys():
            assert optim.state[p][key].shape == p.shape and optim.state[p][key].dtype == p.dtype
    before = [p.detach().clone() for p in new]
    set_gradients(new, 1)
    optim.step()
    assert not any(map(torch.equal, new, before))


def test_state_on_the_meta_device_goes_with_its_parameters():
    with torch.device("meta"):
        optim = build()[1]
    assert optim.state_dict()["state"]
    set_gradients(swap_parameters(optim, lambda p: torch.randn(p.shape)))
    optim.step()
    assert all(v.device.type == "cpu" for state in optim.state.values() for v in state.values())


def test_state_that_was_never_stepped_goes_with_the_parameters_that_are_swapped_out():
    """It would keep the whole model beside its shards: accelerate has it made before it swaps."""
    model, optim = build(beta2=0.9)
    optim.load_state_dict(optim.state_dict())
    old = weakref.ref(optim.param_groups[0]["params"][0])
    new = swap_parameters(optim, torch.clone)
    del model
    assert set(optim.state_dict()["state"]) == {*range(len(new))}
    set_gradients(new)
    optim.step()
    assert set(optim.state) == set(new) and old() is None


def test_state_of_parameters_that_come_back_is_as_they_left_it():
    optim = trained(1)[1]
    before, old = copy.deepcopy(optim.state_dict()), [g["params"] for g in optim.param_groups]
    set_gradients(swap_parameters(optim, torch.clone))
    optim.state_dict()
    optim.step()
    for group, params in zip(optim.param_groups, old):
        group["params"] = params
    assert_equal(optim.state_dict(), before)


def test_steps_go_on_from_state_that_was_replaced():
    replaced, written = trained(2, beta2=0.9), trained(2, beta2=0.9)
    for p, q in zip(trainable(replaced[0]), trainable(written[0])):
        for key, value in written[1].state[q].items():
            replaced[1].state[p][key] = torch.zeros_like(value)
            value.zero_()
    go_on(replaced, written)


def test_a_group_added_after_steps_has_state_from_the_next_one_and_leaves_the_rest_alone():
    model, optim = trained(3)
    before = copy.deepcopy(optim.state_dict()["state"])
    matrix, vector = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    optim.add_param_group({"params": [("new.matrix", matrix)], "use_muon": True, "lr": 0.5})
    optim.add_param_group({"params": [("new.vector", vector)], "use_muon": False})
    assert matrix not in optim.state and vector not in optim.state
    saved = optim.state_dict()["state"]
    assert_equal({key: saved[key] for key in before}, before)
    assert not optim.state[matrix]["momentum_buffer"].any()
    matrix.grad, vector.grad = torch.randn(4, 4), torch.randn(4)
    train(model, optim, 1)
    assert optim.state[vector]["step"] == 1 and optim.state[model.embed.weight]["step"] == 4
    assert [group["lr"] for group in optim.param_groups[-2:]] == [0.5, 0.01]


def test_groups_appended_behind_the_optimizers_back_raise():
    optim = Muon([{"params": [nn.Parameter(torch.ones(4, 4))], "use_muon": True}])
    optim.param_groups.append({**optim.param_groups[0], "params": []})
    with pytest.raises(ValueError, match="add_param_group"):
        optim.step()


# What state holds


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, torch.bfloat16])
def test_state_has_the_documented_keys_shapes_and_dtypes(dtype, momentum_dtype):
    model, optim = trained(2, dtype, beta2=0.9, momentum_dtype=momentum_dtype)
    shapes = {  # a number for each index of the longer side of each matrix
        model.qkv.weight: (12,),
        model.down.weight: (12,),
        model.experts: (3, 6),
        model.conv.weight: (18,),
    }
    for p in trainable(model):
        state = optim.state[p]
        found = {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
        like = (tuple(p.shape), dtype)
        expected: dict[str, Any] = {"step": ((), torch.float32), "exp_avg": like}
        if p in shapes:
            expected = {"momentum_buffer": (like[0], momentum_dtype or dtype)}
            expected["second_momentum_buffer"] = (shapes[p], torch.float32)
        else:
            expected["exp_avg_sq"] = like
            assert state["step"] == 2
        assert found == expected


@table(
    "call",
    {
        "nothing": lambda model, optim: None,
        "state_dict": lambda model, optim: optim.state_dict(),
        "get_optimizer_state_dict": get_optimizer_state_dict,
    },
)
def test_momentum_of_fp32_gradients_of_bf16_weights_is_fp32_where_any_dtype_is_taken(call):
    model, momentum = nn.Linear(6, 4, dtype=torch.bfloat16), torch.zeros(4, 6)
    groups = [{"params": [model.weight], "use_muon": True}]
    optim = Muon([*groups, {"params": [model.bias], "use_muon": False}], lr=0.1, momentum=0.9)
    model.weight.grad_dtype = model.bias.grad_dtype = None
    before = model.bias.detach().clone()
    call(model, optim)
    for seed in range(3):
        grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        model.weight.grad, model.bias.grad = grad, grad[:, 0].clone()
        optim.step()
        momentum = 0.9 * momentum + grad
    found = optim.state[model.weight]["momentum_buffer"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, momentum)
    assert (model.bias != before).all()


@pytest.mark.parametrize("use_muon", [False, True])
@table(
    "param",
    {
        "transposed": torch.empty(4, 6).mT,
        "channels last": torch.empty(2, 4, 3, 5).to(memory_format=torch.channels_last),
        "with gaps": torch.empty(6, 8)[:, ::2],
        "one row of a wider one": torch.empty(6, 8)[:1],
        "no rows": torch.empty(0, 5),
        "no columns": torch.empty(5, 0),
    },
)
def test_state_lies_in_memory_as_zeros_like_of_its_parameter(param, use_muon):
    p = nn.Parameter(param)
    optim = Muon([{"params": [p], "use_muon": use_muon, "flatten": True}], beta2=0.9)
    state = optim.state_dict()["state"][0]
    for key in ("momentum_buffer",) if use_muon else ("exp_avg", "exp_avg_sq"):
        assert_equal(state[key], torch.zeros_like(p), strides=True)
        assert not state[key].requires_grad
    assert not use_muon or state["second_momentum_buffer"].is_contiguous()


@on_ranks(3)
def test_state_of_a_dtensor_lies_as_zeros_like_of_it():
    """Shapes 7 × 5 and 2 × 5 on 3 ranks give uneven shards, and an empty one on some rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Shard(0), Shard(1), Replicate()):
        for shape in ((7, 5), (2, 5)):
            for whole in (torch.ones(shape), torch.ones(shape[::-1]).mT):
                param = nn.Parameter(distribute_tensor(whole, mesh, [placement]))
                group = {"params": [param], "use_muon": True, "momentum_dtype": torch.float64}
                state = Muon([group]).state_dict()["state"][0]["momentum_buffer"]
                assert_equal(state, torch.zeros_like(param, dtype=torch.float64), strides=True)
                assert not state.requires_grad


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
    for param, group in ((matrix, muon), (head, optim.param_groups[-1])):
        param.requires_grad_(not frozen)
        group["use_muon"] = not group["use_muon"]
    train(model, optim, 1)
    saved = copy.deepcopy(optim.state_dict())
    kept = [optim.state[param].keys() for param in (matrix, head)]
    assert kept == ([set(), set()] if frozen else [{*ADAMW_KEYS}, {*MUON_KEYS}])
    assert frozen or optim.state[matrix]["step"] == 1
    optim.load_state_dict(saved)
    assert_equal(optim.state_dict(), saved)
    train(model, optim, 1)


@pytest.mark.parametrize("change", [{"beta2": 0.9}, {"weight_rounding": "exact"}], ids=str)
def test_an_option_with_state_may_be_set_while_a_parameter_is_frozen(change):
    model, optim = trained(2, torch.bfloat16)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_may_change_its_dtype_between_steps(dtype):
    model, optim = trained(2)
    model.to(dtype)
    train(model, optim, 2)
    for p in trainable(model):
        assert p.dtype == dtype and torch.isfinite(p).all()
        moments = {"exp_avg", "exp_avg_sq"} & optim.state[p].keys()
        assert all(optim.state[p][key].dtype == dtype for key in moments)


def test_a_parameter_that_shrank_is_not_stepped_with_its_old_momentum():
    param = nn.Parameter(torch.ones(8, 4))
    optim = Muon([{"params": [param], "names": ["w"], "use_muon": True}])
    param.grad = torch.ones(8, 4)
    optim.step()
    param.data, param.grad = param.data[2:6].clone(), torch.ones(4, 4)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=r"momentum_buffer of w .*\(8, 4\)"):
        optim.step()
    assert torch.equal(param, before)


OF_UPDATES = {"ns_coefficients": EXPLICIT, "ns_dtype": torch.float64, "adjust_lr": "original"}
OF_MOMENTUM = {"momentum": 0.9, "momentum_style": "ema", "momentum_dtype": torch.float64}
OF_DECAY = {"weight_decay": 0.2, "cautious": True, "decay_lr": "adjusted"}
OF_GRADIENTS = {"none_grad": False, "missing_grad": "zero", "maximize": True, "nesterov": False}
OF_CHUNKS = {"chunk_size": 1, "comm_dtype": torch.float32, "split": {"qkv": [6, 3, 3], "down": 2}}
OF_MOMENTS = {"beta2": 0.9, "adamw_betas": (0.8, 0.9), "lr": torch.tensor(0.01)}
ALL_ELSE = {**OF_UPDATES, **OF_MOMENTUM, **OF_DECAY, **OF_GRADIENTS, **OF_CHUNKS, **OF_MOMENTS}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all else": ALL_ELSE,
    "list": {"ns_coefficients": [list(triple) for triple in EXPLICIT]},
    "family": {"ns_coefficients": "quintic", "ns_steps": 7},
    "split": {"split": {"qkv": 4}},
    "capturable": {"capturable": True},
    "bf16": {"dtype": torch.bfloat16},
}
options_matrix = table("options", OPTIONS)


@options_matrix
def test_a_state_dict_holds_only_tensors_and_plain_values(options):
    optim = trained(2, **options)[1]
    saved = optim.state_dict()
    plain = {bool, int, float, str, torch.Tensor, type(None)}
    assert {type(value) for value in tree_leaves(saved["param_groups"])} <= plain
    assert {type(value) for value in tree_leaves(saved["state"])} == {torch.Tensor}


@pytest.mark.kernels_ci
def test_names_are_not_in_the_state_dict_and_survive_loading():
    optim = trained(1)[1]
    names = optim.names
    assert names[0] == ["experts", "qkv.weight", "down.weight"]
    saved = optim.state_dict()
    assert not [group for group in saved["param_groups"] if "names" in group]
    twin = build(seed=1)[1]
    twin.load_state_dict(saved)
    assert twin.names == optim.names == names
    twin.param_groups[2]["params"][0].grad = torch.eye(10, 6).to_sparse()
    with pytest.raises(ValueError, match=r"^" + names[2][0]):
        twin.step()


# Resuming


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_name(flatten: bool, warm: bool) -> Callable[..., Pair]:
    """State goes by names into another, fresh or trained."""
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def way(pair: Pair, make: Callable[..., Pair]) -> Pair:
        saved = copy.deepcopy(get_optimizer_state_dict(*pair, options=how))
        model, optim = make(seed=1)
        train(model, optim, 2 * warm, seed=5)
        model.load_state_dict(pair[0].state_dict())
        set_optimizer_state_dict(model, optim, saved, options=how)
        return model, optim

    return way


def copies(duplicate: Callable[[Pair], Pair]) -> Callable[..., Pair]:
    """The optimizer itself, with its options as a whole."""

    def way(pair: Pair, make: Callable[..., Pair]) -> Pair:
        lr_scheduler.StepLR(pair[1], 1)  # wraps the step
        twins = duplicate(pair)
        twin = twins[1]
        assert type(twin) is type(pair[1])
        assert_equal(twin.defaults, pair[1].defaults)
        for group, copied in zip(pair[1].param_groups, twin.param_groups):
            assert_equal({**copied, "params": None}, {**group, "params": None})
        return twins

    return way


WAYS: dict[str, Callable[..., Pair]] = {
    "by name": by_name(flatten=False, warm=False),
    "by name, flattened, trained": by_name(flatten=True, warm=True),
    "deepcopy": copies(copy.deepcopy),
    "pickle": copies(pickled),
}


@table("way", WAYS)
@options_matrix
def test_training_goes_on_bit_by_bit(options, way):
    pair = trained(3, **options)
    twins = way(pair, functools.partial(build, **options))
    assert twins[1].names == pair[1].names
    go_on(pair, twins)


def test_training_goes_on_from_a_file_that_dcp_has_converted_for_torch_load(tmp_path):
    """Its state is under the ids of the groups as text."""
    pair = trained(3, beta2=0.9)
    content = {"model": pair[0].state_dict(), "optim": pair[1].state_dict()}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "converted.pt")
    saved = torch.load(tmp_path / "converted.pt", weights_only=True)
    twins = load_into(build(seed=1, beta2=0.9), saved["model"], saved["optim"])
    assert_same_training(*pair, *twins)


WIDE = {"chunk_size": 3, "warmup_step": 2, "comm_dtype": torch.float32, "debug": True}
WIDE |= {"use_distributed_muon": True, "consistency_check": "plan"}


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copied_optimizer_still_has_the_constructors_options(way):
    model = Model()
    twin = WAYS[way]((model, Muon(groups_of(model), **WIDE)), None)[1]
    settings = next(value for value in vars(twin).values() if hasattr(value, "chunk_size"))
    assert {key: getattr(settings, key) for key in WIDE} == WIDE


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


def test_dtypes_of_loaded_state_are_the_parameters_and_for_momentum_the_files():
    model, optim = trained(3, torch.float64, beta2=0.9)
    saved = through_torch_save(optim.state_dict())
    for state in saved["state"].values():
        state["foreign"] = torch.ones(2, dtype=torch.float64)
        if "second_momentum_buffer" in state:
            state["second_momentum_buffer"] = state["second_momentum_buffer"].double()
    other, twin = build(torch.float32, seed=1, beta2=0.9)
    twin.load_state_dict(saved)
    for p, q in zip(trainable(model), trainable(other)):
        assert list(twin.state[q]) == [*optim.state[p], "foreign"]
        assert twin.state[q]["foreign"].dtype == torch.float32
        for key, value in optim.state[p].items():
            moment = key in ("exp_avg", "exp_avg_sq")
            assert_equal(twin.state[q][key], value.float() if moment else value)


# A state dict taken before the first step resets the optimizer


def with_state(pair: Pair) -> Pair:
    pair[1].state_dict()  # creates it, which copies have, too
    return pair


def with_loaded_state(pair: Pair) -> Pair:
    pair[1].load_state_dict(through_torch_save(pair[1].state_dict()))
    return pair


def taken(pair: Pair) -> tuple[Pair, Any]:
    return pair, pair[1].state_dict()


def taken_and_loaded(pair: Pair) -> tuple[Pair, Any]:
    start = pair[1].state_dict()
    pair[1].load_state_dict(start)
    return pair, start


RESETS: dict[str, Callable[[Pair], tuple[Pair, Any]]] = {
    "taken": taken,
    "taken and loaded": taken_and_loaded,
    "of a deepcopy": lambda pair: taken(copy.deepcopy(with_state(pair))),
    "of a pickle": lambda pair: taken(pickled(with_state(pair))),
    "of a load": lambda pair: taken(with_loaded_state(pair)),
}


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@table("take", RESETS)
@options_matrix
def test_a_state_dict_taken_before_the_first_step_resets_the_optimizer(options, take, offload):
    (model, optim), start = take(build(**options))
    if offload and not options.get("capturable"):  # which refuses it
        optim.turn_on_cpu_offload(backend=optimizer.SimulatedHost())
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(start)
    for _ in range(2):
        train(model, optim, 3)
        assert_equal(start, saved)
        load_into((model, optim), weights, start)
    train(model, optim, 3)
    fresh = build(**options)
    train(*fresh, 3)
    assert_same_training(model, optim, *fresh)


def load_residuals(optim: Any) -> None:
    optim.load_exact_weights({"w": torch.randn(6, 4)})


@pytest.mark.parametrize(
    ("steps", "change", "key"),
    [
        (1, lambda o: o.add_param_group(matrix_group((4, 6))), "momentum_buffer"),
        (1, lambda o: o.param_groups[0].update(beta2=0.9), "second_momentum_buffer"),
        (0, load_residuals, "momentum_buffer"),
    ],
    ids=["a group", "beta2", "residuals"],
)
def test_state_that_is_created_beside_other_state_stays_zeros_in_a_state_dict(steps, change, key):
    optim = Muon([{**matrix_group((6, 4)), "names": ["w"], "weight_rounding": "exact"}], lr=0.1)
    for _ in range(steps):
        set_gradients(params_of(optim))
        optim.step()
    change(optim)
    created = list(optim.state_dict()["state"].values())[-1][key]
    set_gradients(params_of(optim))
    optim.step()
    assert not created.any()


def matrix_group(shape: tuple[int, ...], **options: Any) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.randn(shape).bfloat16())], "use_muon": True, **options}


@pytest.mark.parametrize("grad_reduce", [None, "mean"], ids=["FSDP2", "ZeRO-2"])
@on_ranks(2)
def test_a_state_dict_taken_before_the_first_step_resets_the_state_of_every_rank(grad_reduce):
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


# What is loaded


def test_a_load_in_place_is_a_load_and_takes_no_memory(tmp_path):
    pair, twins = build(beta2=0.9), build(beta2=0.9)
    train(*pair, 2)
    dcp.save({"optim": pair[1].state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    content = {"optim": twins[1].state_dict()}
    dcp.load(content, checkpoint_id=tmp_path, no_dist=True)
    read = content["optim"]
    twins[0].load_state_dict(pair[0].state_dict())
    assert count(lambda: twins[1].load_state_dict(read)).peak_bytes < 1000
    assert_equal(twins[1].state_dict()["state"], pair[1].state_dict()["state"])
    go_on(pair, twins)
    state = twins[1].state_dict()["state"]
    for number, tensors in read["state"].items():
        assert all(state[number][key] is tensor for key, tensor in tensors.items())


def test_tensors_of_a_checkpoint_that_share_memory_or_leave_gaps_get_their_own():
    model, optim = trained(2)
    saved = copy.deepcopy(optim.state_dict())
    for own in saved["state"].values():
        own.update({k: torch.stack([v, v], -1)[..., 0] for k, v in own.items() if v.ndim})
        if "exp_avg" in own:
            own["exp_avg"] = own["exp_avg_sq"]  # the very same
    apart = copy.deepcopy(saved)
    for own in apart["state"].values():
        own.update({key: value.clone().contiguous() for key, value in own.items()})
    runs = [load_into(build(seed=1), model.state_dict(), content) for content in (saved, apart)]
    go_on(*runs)


def test_state_whose_first_rows_are_zeros_is_not_taken_for_fresh():
    model, optim = trained(2, beta2=0.9)
    saved = through_torch_save(optim.state_dict())
    for value in (v for own in saved["state"].values() for v in own.values() if v.ndim):
        value[0] = 0
    runs = [load_into(build(beta2=0.9), model.state_dict(), saved) for _ in range(2)]
    runs[0][1].state_dict()
    go_on(*runs)


def test_a_tensor_of_the_optimizer_that_is_loaded_twice_is_two():
    optim = trained(1)[1]
    saved = optim.state_dict()
    saved["state"][5]["exp_avg"] = saved["state"][5]["exp_avg_sq"]
    optim.load_state_dict(saved)
    moments = [optim.state_dict()["state"][5][key] for key in ADAMW_KEYS[1:]]
    assert moments[0] is not moments[1] and torch.equal(*moments)


def test_parameters_missing_from_a_checkpoint_start_from_zeros():
    optim = trained(2, beta2=0.9)[1]
    saved = through_torch_save(optim.state_dict())
    saved["state"][0] = dict.fromkeys(saved["state"][0])
    del saved["state"][1]
    saved["state"][5] = {}
    twin = build(seed=1, beta2=0.9)[1]
    twin.load_state_dict(saved)
    found, expected = twin.state_dict()["state"], optim.state_dict()["state"]
    for number, own in expected.items():
        zeros = {key: torch.zeros_like(value) for key, value in own.items()}
        assert_equal(found[number], zeros if number in (0, 1, 5) else own)


def with_old_moments(saved: Any) -> None:
    for state in saved["state"].values():
        if "exp_avg" in state:
            state["moment1"], state["moment2"] = state.pop("exp_avg"), state.pop("exp_avg_sq")


def with_steps(number: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(saved: Any) -> None:
        for state in saved["state"].values():
            state.update({key: number(state[key]) for key in {"step"} & state.keys()})

    return change


def without_keys(saved: Any) -> None:
    saved["param_groups"] = [{"params": group["params"]} for group in saved["param_groups"]]


LOADABLE: dict[str, Callable[[Any], None]] = {
    "moment1 and moment2": with_old_moments,
    "int steps": with_steps(int),
    "float steps": with_steps(float),
    "numpy steps": with_steps(np.float32),
    "integer tensors": with_steps(lambda step: step.to(torch.int64)),
    "bf16 of one dimension": with_steps(lambda step: step.to(torch.bfloat16).view(1)),
    "no keys at all": without_keys,
}


@table("change", LOADABLE)
def test_what_an_older_or_other_version_wrote_goes_on_bit_by_bit(change):
    options = {"beta2": 0.9, "cautious": True, "ns_coefficients": EXPLICIT}
    model, optim = trained(2, **options)
    saved, twins = copy.deepcopy(optim.state_dict()), build(seed=1, **options)
    change(saved)
    given = copy.deepcopy(saved)
    for group in twins[1].param_groups:  # what the file lacks is the constructor's, not these
        group.update(beta2=0.5, momentum=0.5, cautious=False)
    load_into(twins, model.state_dict(), saved)
    assert_equal(twins[1].state_dict(), optim.state_dict())
    go_on((model, optim), twins)
    assert_equal(saved, given)


# What is refused, beyond test_errors


def test_a_checkpoint_without_the_residual_of_a_matrix_is_refused():
    optim = trained(2, torch.bfloat16, weight_rounding="exact")[1]
    saved = through_torch_save(optim.state_dict())
    del saved["state"][1]["weight_residual"]
    with pytest.raises(ValueError, match=r"qkv\.weight but not weight_residual"):
        optim.load_state_dict(saved)


@on_ranks(2)
def test_a_dtensor_around_a_part_of_another_size_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)]))
    optim = Muon([{"params": [param], "use_muon": False}])
    saved = optim.state_dict()
    short = DTensor.from_local(
        torch.zeros(8), mesh, [Shard(0)], run_check=False, shape=param.shape, stride=(64, 1)
    )
    saved["state"][0] = {**saved["state"][0], "exp_avg": short}
    with pytest.raises(ValueError, match=r"exp_avg of .*\(8,\).*\(32, 64\)"):
        optim.load_state_dict(saved)


def break_off_midway(model: nn.Module, optim: Any) -> None:
    """A step that fails when momentum has been updated."""
    set_gradients(trainable(model))
    with pytest.raises(RuntimeError, match="broke off"), Fault("begin Muon.orthogonalize", 1):
        optim.step()
    assert optim.is_broken


def test_a_state_dict_that_is_the_live_state_repairs_nothing_and_one_from_a_file_does():
    model, optim = trained(1)
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
    model, optim = trained(1)
    shared = copy.copy(optim)
    break_off_midway(model, optim)
    with pytest.raises(RuntimeError, match="earlier step"):
        shared.step()


def test_discarded_state_leaves_what_is_the_users():
    optim = trained(1)[1]
    optim.state["mine"] = {"kept": 1}
    optim.discard_state()
    assert optim.state["mine"] == {"kept": 1} and optim.is_broken


# A first step of zeros, as torch.distributed.checkpoint takes it to have state


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@options_matrix
def test_taking_the_state_of_a_fresh_optimizer_changes_nothing(options, flatten):
    pair, twins = build(**options), build(**options)
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    get_optimizer_state_dict(*pair, options=how)
    assert all(p.grad is None for p in pair[0].parameters())
    assert_same_training(*pair, *twins)
    go_on(pair, twins)


def test_taking_the_state_of_a_fresh_optimizer_draws_no_random_numbers():
    options = {"weight_rounding": "stochastic", "weight_decay": 0.0}
    runs = [build(torch.bfloat16, **options) for _ in range(2)]
    get_optimizer_state_dict(*runs[0])
    go_on(*runs)


@pytest.mark.parametrize("averages", [False, True], ids=["FSDP2", "ZeRO-2"])
@on_ranks(2)
def test_ranks_decide_together_whether_a_fresh_step_without_lr_counts(averages):
    mesh, whole = init_device_mesh("cpu", (2,)), torch.ones(4, 2)
    options = {"process_group": dist.group.WORLD, "grad_reduce": "mean"} if averages else {}
    for nonzero_rank, counted in ((None, 0), (1, 1), (0, 1)):
        param = nn.Parameter(whole if averages else distribute_tensor(whole, mesh, [Shard(0)]))
        optim = Muon([{"params": [param], "use_muon": False}], lr=0.0, **options)
        for steps in (counted, counted + 1):  # only the first step can create the state
            param.grad = torch.zeros_like(param)
            if dist.get_rank() == nonzero_rank:
                local(param.grad).fill_(1.0)
            optim.step()
            assert optim.state[param]["step"] == steps


# Schedulers


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_what_it_sets_for_torchs_sgd(name, tensor):
    lrs = [torch.tensor(0.1) if tensor else 0.1 for _ in range(2)]
    model, optim = build(lr=lrs[0])
    groups = [{"params": list(g["params"])} for g in copy.deepcopy(optim).param_groups]
    sgd = torch.optim.SGD(groups, lr=lrs[1], momentum=0.95, foreach=False)
    schedules, seen = [SCHEDULERS[name](each) for each in (optim, sgd)], set()
    for _ in range(8):
        for group, theirs in zip(optim.param_groups, sgd.param_groups):
            assert group["lr"] == theirs["lr"] and group["momentum"] == theirs["momentum"]
            assert isinstance(group["lr"], torch.Tensor) is isinstance(theirs["lr"], torch.Tensor)
            assert group["adamw_betas"] == (0.9, 0.95)  # also where momentum is cycled
        lr, before = float(optim.param_groups[0]["lr"]), model.qkv.weight.detach().clone()
        seen.add(lr)
        train(model, optim, 1)
        sgd.step()
        assert (model.qkv.weight != before).any() or not lr
        for each in schedules:
            each.step(1.0) if name == "ReduceLROnPlateau" else each.step()
    assert len(seen) > 1, "nothing was scheduled"


@pytest.mark.parametrize("total", [4, 10])
def test_a_linear_decay_to_zero_can_be_followed_to_its_end(total):
    """LinearLR ends a rounding error below zero; torch's optimizers step on."""
    model, optim = build(lr=1e-3)
    schedule = lr_scheduler.LinearLR(optim, end_factor=0.0, total_iters=total)
    train(model, optim, total + 2, schedule=schedule)
    assert abs(optim.param_groups[0]["lr"]) < 1e-15


# What torch.optim's users call


@pytest.mark.kernels_ci
def test_a_closure_is_called_once_with_gradients_on_and_its_value_returned_as_it_is():
    model, optim = build()
    calls, losses = [], []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optim.zero_grad()
        losses.append(model(torch.arange(10).view(2, 5)).square().mean())
        losses[-1].backward()
        return losses[-1]

    assert optim.step(closure) is losses[0]
    assert optim.step(closure=closure) is losses[1]
    assert losses[0] > losses[1] > 0
    assert optim.step() is None
    for value in (None, 3, 2.5):
        assert optim.step(lambda: closure() and value) is value  # noqa: B023
    optim.register_step_pre_hook(lambda _, args, kwargs: ((*args[:1], closure), {}))
    assert optim.step() is losses[-1]
    assert calls == [True] * len(losses) == [True] * 6


@pytest.mark.kernels_ci
def test_step_hooks_fire_once_each_around_the_step_and_none_after_one_that_raises():
    model, optim = build()
    seen: list[str] = []
    before = model.qkv.weight.detach().clone()

    def hook(name: str) -> Callable[..., None]:
        def record(hooked: Any, *_: Any) -> None:
            assert hooked is optim and torch.equal(model.qkv.weight, before) is ("pre" in name)
            seen.append(name)

        return record

    handles = [
        optim.register_step_pre_hook(hook("pre")),
        optim.register_step_post_hook(hook("post")),
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
    ]
    try:
        set_gradients(trainable(model))
        model.embed.weight.grad = model.embed.weight.grad.to_sparse()
        with pytest.raises(ValueError, match="sparse"):
            optim.step()
        assert seen == ["global pre", "pre"]
        train(model, optim, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen[2:] == ["global pre", "pre", "post", "global post"]
    train(model, optim, 1)
    assert len(seen) == 6


def test_state_dict_hooks_fire_and_may_change_what_is_loaded():
    optim, seen, half = build()[1], [], torch.full((12, 4), 0.5)
    optim.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    optim.register_state_dict_post_hook(lambda o, s: seen.append("post"))
    optim.register_load_state_dict_pre_hook(lambda o, s: s["state"][1].update(momentum_buffer=half))
    optim.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optim.load_state_dict(optim.state_dict())
    assert seen == ["pre", "post", "loaded"]
    assert_equal(optim.state_dict()["state"][1]["momentum_buffer"], half)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("none_grad", [False, True])
def test_gradients_stay_or_go_as_asked_and_are_never_written(none_grad):
    """Those that stay and that nobody clears add up."""
    model, optim = build(none_grad=none_grad)
    set_gradients(trainable(model))
    gone = {p for g in optim.param_groups for p in g["params"] if none_grad and g["use_muon"]}
    held = {p: p.grad for p in trainable(model)}
    values = {p: grad.clone() for p, grad in held.items()}
    optim.step()
    for p, grad in held.items():
        assert torch.equal(grad, values[p])
        assert p.grad is None if p in gone else p.grad is grad
    for p, grad in values.items():
        (p * grad).sum().backward()
        assert torch.equal(p.grad, grad if p in gone else 2 * grad)
