"""Wrong input is an error that names what is wrong, and it changes nothing.

Most mistakes are made twice: on a fresh optimizer, which must have no state afterwards, and on one
that has trained, whose weights, gradients and state must be bit-equal to a copy made before.
"""

from __future__ import annotations

import copy
import gc
import io
import re
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from breaking import contents
from comparisons import assert_equal
from kernel import as_arguments, optimizer
from layouts import params_of, set_gradients
from ranks import on_ranks, rank_outcomes
from wrong_input import (
    BAD_VALUES,
    INF,
    NAN,
    TOO_LARGE,
    adamw_group,
    assert_steps_like,
    good_groups,
    muon_group,
    parameter,
    trained,
)

Muon, presets = optimizer.Muon, optimizer.presets

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


def assert_refused(
    optim: torch.optim.Optimizer,
    call: Callable[[], Any],
    *words: str,
    error: type[Exception] = ValueError,
) -> None:
    """The call raises, the message has the words, and nothing that `optim` holds has changed."""
    before = contents(optim)
    assert_raises(call, *words, error=error)
    assert_equal(contents(optim), before)


def assert_raises(
    call: Callable[[], Any], *words: str, error: type[Exception] = ValueError
) -> None:
    """The call raises, and the message has each of the words, such as names, as they are."""
    with pytest.raises(error) as caught:
        call()
    for word in words:
        message = str(caught.value)
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message), f"no {word!r} in: {message}"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


W = "blocks.3.w.weight"
GOOD = "blocks.0.w.weight"
NAMES = {"names": [GOOD, W]}
AT = "param_groups[4]"  # after the four of `good_groups`


# The package's face: what users see most, whole. No other test compares sentences.


def sparse_gradient() -> None:
    optim = trained(0)
    optim.param_groups[1]["params"][1].grad = torch.ones(3, 2).to_sparse()
    optim.step()


def another_models_checkpoint() -> None:
    saved = trained(1).state_dict()
    saved["state"][4]["momentum_buffer"] = torch.zeros(4, 6)
    trained(0).load_state_dict(saved)


def adamws_checkpoint() -> None:
    trained(0).load_state_dict(torch.optim.AdamW(params_of(trained(0))).state_dict())


def replaced_by_to_empty() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    optim = Muon.for_model(model, 1e-3)
    model.to_empty(device="cpu")(torch.ones(2, 4)).sum().backward()
    optim.step()


def ranks_without_a_gradient() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    weights = [nn.Parameter(dist.tensor.ones(4, 4, device_mesh=mesh, placements=[Shard(0)]))]
    weights += [nn.Parameter(w.detach().clone()) for w in weights]
    weights[0].grad = weights[0].detach().clone()
    if dist.get_rank() == 0:
        weights[1].grad = weights[0].detach().clone()
    Muon([muon_group(*weights, **NAMES)]).step()


def on_two_ranks(fn: Callable[[], None]) -> None:
    first, second = rank_outcomes(fn, 2)
    assert first.error == second.error == "ValueError" and first.message == second.message
    raise ValueError(first.message)


MESSAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "no use_muon": (
        lambda: Muon([{"params": [parameter(3, 3)]}]),
        "param_groups[0] has no use_muon=True or False: Muon needs a list of parameter groups with "
        "use_muon. Use Muon.for_model(model, lr=…), which makes them, or write "
        'Muon([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])',
    ),
    "names": (
        lambda: Muon([muon_group(parameter(3, 3), **NAMES)]),
        "param_groups[0] has 2 names for 1 parameter: give each parameter one, in the same order",
    ),
    "vector": (
        lambda: Muon([muon_group((W, parameter(3)))]),
        "blocks.3.w.weight has shape (3,), but Muon orthogonalizes matrices: put it into a group "
        "with use_muon=False",
    ),
    "three dimensions": (
        lambda: Muon([muon_group((W, parameter(2, 3, 3)))]),
        "blocks.3.w.weight has shape (2, 3, 3): name its component in expert_keys if the leading "
        "dimensions are experts, set flatten=True to read it as (dim 0, all the rest), or put it "
        "into a group with use_muon=False",
    ),
    "in two groups": (
        lambda: Muon([*good_groups()[:1] * 2]),
        "layers.0.w1.weight is already in param_groups[0]: put every parameter into one group only",
    ),
    "split": (
        lambda: Muon([muon_group((W, parameter(5, 3)))], split={"w": [2, 4]}),
        "blocks.3.w.weight has 5 rows, but split=[2, 4] adds up to 6",
    ),
    "bad value": (
        lambda: Muon(good_groups(), lr=-1.0),
        "param_groups[0]: lr must be a finite number ≥ 0 or a tensor of one element, found -1.0",
    ),
    "unknown argument": (
        lambda: Muon(good_groups(), betas=(0.9, 0.95)),
        "Muon() got an unexpected keyword argument 'betas': use 'adamw_betas' (for AdamW; Muon has "
        "'momentum')",
    ),
    "typo in a group": (
        lambda: Muon([{**good_groups()[0], "ns_step": 3}]),
        "param_groups[0] has an unknown key 'ns_step': did you mean 'ns_steps'?",
    ),
    "sparse gradient": (
        sparse_gradient,
        "embed.weight has a sparse gradient (torch.sparse_coo): make it dense, for example with "
        "nn.Embedding(..., sparse=False)",
    ),
    "another model's checkpoint": (
        another_models_checkpoint,
        "momentum_buffer of layers.1.w1.weight has shape (4, 6) in the checkpoint, where (6, 4) is "
        "needed",
    ),
    "AdamW's checkpoint": (
        adamws_checkpoint,
        "the checkpoint has kind 'torch_adamw', judging by the keys of its groups: "
        "load_foreign_state_dict(state_dict, params=model.parameters(), kind='torch_adamw') "
        "converts it",
    ),
    "model replaced": (
        replaced_by_to_empty,
        "step() found no gradient on 0.weight, and the model now has another parameter of this "
        "name than the groups: make the groups and the optimizer after fully_shard, .to_empty() or "
        "anything else that replaces parameters",
    ),
    "gradients of some ranks": (
        lambda: on_two_ranks(ranks_without_a_gradient),
        "gradients are missing on some ranks only: blocks.3.w.weight on ranks [1]. Compute these "
        'gradients on every rank, or set missing_grad="zero", which counts them as zeros (on '
        'replicas only with grad_reduce="mean")',
    ),
    "grad_reduce alone": (
        lambda: Muon(good_groups(), grad_reduce="mean"),
        "grad_reduce='mean' averages gradients over a process group: pass process_group, for "
        "example torch.distributed.group.WORLD, which is None before init_process_group. Pickles "
        "omit it: after loading one, optim.process_group = ...",
    ),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_what_users_see_most_says_what_is_wrong_and_what_to_do(what):
    make, message = MESSAGES[what]
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert str(caught.value) == message


# Groups


NO_GROUPS: dict[str, Callable[[], Any]] = {
    "list of tensors": lambda: list(model().parameters()),
    "generator of tensors": lambda: model().parameters(),
    "generator of pairs": lambda: model().named_parameters(),
    "state dict": lambda: model().state_dict(keep_vars=True),
    "one group": lambda: muon_group(parameter(3, 3)),
    "tensor": lambda: parameter(3, 3),
    "group and tensor": lambda: [muon_group(parameter(3, 3)), parameter(3)],
    "pair": lambda: (W, parameter(3, 3)),
    "set of tensors": lambda: {parameter(3, 3)},
    "nothing": lambda: None,
}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("what", NO_GROUPS)
def test_what_is_no_list_of_groups_is_told_what_to_write(what):
    make, optim = NO_GROUPS[what], trained(1)
    assert_raises(lambda: Muon(make()), "use_muon", "Muon.for_model(model")
    if what != "one group":
        assert_refused(optim, partial(optim.add_param_group, make()), AT, "use_muon")
    assert_raises(lambda: Muon([]), "empty")


def sparse(layout: str) -> nn.Parameter:
    return nn.Parameter(torch.eye(3).to_sparse(layout=layout))


M, A = {"use_muon": True}, {"use_muon": False}
EXPERTS = {"expert_keys": ["experts"], "names": ["experts.w"], **M}
TRIPLES = [(2.0, -1.5, 0.5)] * 3
OF_TWO = {"names": [GOOD, W], **M}
FLOAT8 = torch.float8_e4m3fn

# What params hold, where tuples of ints are shapes; keys of the group; what the message names.
BAD_GROUPS: dict[str, tuple[Any, ...]] = {
    "no use_muon": ([(3, 3)], {}, AT, "use_muon"),
    **{f"use_muon={v!r}": ([(3, 3)], {"use_muon": v}, AT, "use_muon") for v in (1, 0, None, "on")},
    "no params": (None, M, AT, "params"),
    "names too few": ([(3, 3), (3, 3)], {"names": [W], **M}, AT, "1 name", "2 parameters"),
    "names too many": ([(3, 3)], OF_TWO, AT, "2 names", "1 parameter"),
    "one string as names": ([(3, 3), (3, 3)], {"names": "ab", **M}, AT, "names"),
    "plain mixed with pairs": ([(3,), (W, parameter(3))], A, AT, "(name, parameter)"),
    "pairs and names": ([(W, parameter(3, 3))], {"names": [W], **M}, AT, "names"),
    "pairs the wrong way round": ([(parameter(3, 3), W)], M, AT, "(name, parameter)"),
    "triples": ([(W, parameter(3, 3), 1.0)], M, AT, "(name, parameter)"),
    "two lists of names": ([(3, 3)], {"names": [W], "param_names": [GOOD], **M}, AT, "param_names"),
    "experts without names": ([(2, 3, 3)], {"expert_keys": ["w"], **M}, AT, "expert_keys", "names"),
    "pattern without names": ([(4, 3)], {"split": {"qkv": 2}, **M}, AT, "split", "names"),
    "vector": ([(3, 3), (3,)], OF_TWO, W, "(3,)", "use_muon=False"),
    "vector without name": ([(3, 3), (3,)], M, "param_groups[4]['params'][1]", "use_muon=False"),
    "scalar": ([()], {"names": [W], **M}, W, "()", "use_muon=False"),
    "vector with flatten": ([(3,)], {"names": [W], "flatten": True, **M}, W, "use_muon=False"),
    "vector of experts": ([(3,)], EXPERTS, "experts.w", "use_muon=False"),
    **{
        f"{dtype}": ([(3, 3), torch.ones(3, 3, dtype=dtype)], OF_TWO, W, f"{dtype}", "use_muon")
        for dtype in (torch.complex64, torch.complex128, torch.int64, torch.bool, FLOAT8)
    },
    "integers for AdamW": ([(3, 3), torch.ones(3, dtype=torch.int64)], {**NAMES, **A}, W, "AdamW"),
    **{
        f"sparse {layout}, {algorithm}": ([(3, 3), sparse(layout)], {**NAMES, **algorithm}, W)
        for layout in (torch.sparse_coo, torch.sparse_csr)
        for algorithm in (M, A)
    },
    "three dimensions": ([(3, 3), (2, 3, 3)], OF_TWO, W, "(2, 3, 3)", "expert_keys", "flatten"),
    "no expert": ([(2, 3, 3)], {**EXPERTS, "names": [W]}, W, "expert_keys", "flatten"),
    **{
        f"{type(value).__name__}, {algorithm}": ([(3, 3), value], {**NAMES, **algorithm}, W)
        for value in (None, 3.0, [1.0])
        for algorithm in (M, A)
    },
    "no leaf": ([(3, 3), parameter(3, 3) * 2], OF_TWO, W, "not a leaf"),
    "set": ({parameter(3, 3)}, M, AT, "set"),
    "twice in a group": ([parameter(3, 3)] * 2, OF_TWO, W, "twice", AT),
    "split list": ([(6, 3), (5, 3)], {"split": [2, 4], **OF_TWO}, W, "5 rows", "6"),
    "split number": ([(6, 3), (5, 3)], {"split": 2, **OF_TWO}, W, "5 rows", "split=2"),
    "split by pattern": ([(6, 3), (5, 3)], {"split": {"3.w": [2, 4]}, **OF_TWO}, W, "5 rows", "6"),
    "split by shell's": ([(5, 3), (5, 3)], {"split": {"*.3.w*": 2}, **OF_TWO}, W, "split=2"),
    "split of experts": ([(4, 5, 3)], {"split": 2, **EXPERTS}, "experts.w", "5 rows", "split=2"),
    "split of a kernel": ([(5, 4, 2, 2)], {"split": 2, "flatten": True, **M}, AT, "5 rows"),
    "steps of a list": ([(3, 3)], {"ns_coefficients": TRIPLES, "ns_steps": 5, **M}, AT, "ns_steps"),
}


def group_of(content: Any, options: dict[str, Any]) -> dict[str, Any]:
    if content is None:
        return dict(options)
    if isinstance(content, list):
        content = [parameter(*each) if is_shape(each) else each for each in content]
    return {"params": content, **options}


def is_shape(each: Any) -> bool:
    return isinstance(each, tuple) and all(type(n) is int for n in each)


@pytest.mark.parametrize("what", BAD_GROUPS)
def test_a_bad_group_is_refused_at_construction_and_later_and_the_optimizer_goes_on(what):
    content, options, *words = BAD_GROUPS[what]
    groups, group = good_groups(), group_of(content, options)
    before = copy.deepcopy(groups)
    assert_raises(lambda: Muon([*groups, group]), *words)
    assert_equal(groups, before)
    for optim in trained(0), trained(2):
        twin = copy.deepcopy(optim)
        assert_refused(optim, partial(optim.add_param_group, group), *words)
    assert_steps_like(optim, twin)
    added = parameter(3, 3)
    optim.add_param_group(muon_group((W, added)))
    set_gradients(params_of(optim))
    optim.step()
    assert "momentum_buffer" in optim.state[added]


def test_an_added_group_with_a_parameter_of_another_is_refused():
    optim = trained(1)
    tied = muon_group(("tied.weight", optim.param_groups[0]["params"][1]))
    assert_refused(optim, partial(optim.add_param_group, tied), "tied.weight", "param_groups[0]")


def test_an_explicit_list_sets_the_steps_of_a_group_added_later():
    optim = Muon(good_groups())
    optim.add_param_group(muon_group(parameter(3, 3), ns_coefficients=TRIPLES))
    assert optim.param_groups[-1]["ns_steps"] == 3
    set_gradients(params_of(optim))
    optim.step()


# Options of a group, one by one: `BAD_VALUES` has to have every one of them

EVERY_OPTION = pytest.mark.parametrize("key", Muon(good_groups()).defaults)


@EVERY_OPTION
def test_a_bad_option_of_an_added_group_is_refused(key):
    for value in BAD_VALUES[key]:
        make = partial(Muon, good_groups(), **as_arguments({key: value}))
        assert_raises(make, "param_groups[0]", key)
    optim, group = trained(1), muon_group((W, parameter(4, 4)), **{key: BAD_VALUES[key][0]})
    assert_raises(lambda: Muon([*good_groups(), group]), AT, key)
    assert_refused(optim, partial(optim.add_param_group, group), AT, key)


@EVERY_OPTION
def test_a_bad_option_set_later_in_the_last_group_stops_the_step_before_anything_changed(key):
    for steps, number in ((2, 3), (0, 0)):
        optim = trained(steps)
        twin, group = copy.deepcopy(optim), optim.param_groups[number]
        good = group[key]
        for value in BAD_VALUES[key] if steps else BAD_VALUES[key][:1]:
            group[key] = value
            assert_refused(optim, optim.step, f"param_groups[{number}]", key)
        assert_refused(optim, optim.state_dict, f"param_groups[{number}]", key)
        assert bool(optim.state) is bool(steps)
        group[key] = good
        assert_steps_like(optim, twin)


FOUR_TRIPLES = {"ns_coefficients": TRIPLES[:1] * 4}
OF_0, OF_2 = "layers.0.w1.weight", "layers.1.w1.weight"  # of (4, 6) and of (6, 4)
BAD_LATER: list[tuple[Any, ...]] = [
    (0, {**FOUR_TRIPLES, "ns_steps": 3}, "ns_coefficients", "4", "3"),
    (2, FOUR_TRIPLES, "ns_coefficients", "4", "ns_steps", "5"),
    (2, {"split": [3, 4]}, OF_2, "6 rows", "7"),
    (0, {"split": 5}, OF_0, "4 rows", "split=5"),
    (2, {"split": {"w1": 5}}, OF_2, "6 rows", "split=5"),
    (0, {"split": {"layers.*.w1.weight": [1, 2]}}, OF_0, "4 rows", "3"),
    (0, {"weight_rounding": "stochastic", "capturable": True}, "weight_rounding"),
    *((n, {"use_muon": v}, f"param_groups[{n}]", "use_muon") for n in (0, 3) for v in (None, 0)),
    (2, {"chunk_size": 4}, "param_groups[2]", "chunk_size"),  # which is for all groups
    (2, {"clip_config": None}, "param_groups[2]", "clip_config"),
    *((0, {"names": ["w"] * n}, "param_groups[0]", str(n), "2 parameters") for n in (0, 1, 3)),
    (2, {"params": [parameter(3)]}, OF_2, "(3,)"),
    (2, {"params": [parameter(2, 3, 3)]}, OF_2, "expert_keys"),
    (2, {"params": [parameter(6, 4, dtype=torch.complex64)]}, OF_2, "torch.complex64"),
    (2, {"params": [torch.ones(6, 4, dtype=torch.int32)]}, OF_2, "torch.int32"),
    (2, {"params": [nn.Parameter(torch.ones(6, 4).to_sparse())]}, OF_2, "sparse"),
    (2, {"params": [nn.Parameter(torch.ones(1, 4).expand(6, 4))]}, OF_2, "share memory"),
    (2, {"params": [parameter(6, 4) * 2]}, OF_2, "not a leaf"),
]


@pytest.mark.parametrize("case", BAD_LATER, ids=lambda case: " ".join(case[2:]))
def test_what_does_not_fit_set_later_stops_the_step(case):
    number, options, *words = case
    for optim in trained(0), trained(2):
        twin, group = copy.deepcopy(optim), optim.param_groups[number]
        good, names = dict(group), optim.names[number]
        group.update(options)
        assert_refused(optim, optim.step, *words)
        group.clear()
        group.update(good, names=names)
        assert_steps_like(optim, twin)


def test_a_group_that_an_engine_has_flattened_is_told_from_a_wrong_count_of_names():
    optim = Muon([muon_group(parameter(3, 3), parameter(3, 3), **NAMES)])
    optim.param_groups[0]["params"] = [parameter(18)]  # as DeepSpeed's ZeRO does
    assert_raises(optim.step, "param_groups[0]", "fully_shard")


def test_a_row_that_is_held_once_and_a_frozen_one_that_is_repeated_are_good():
    one = nn.Parameter(torch.ones(4).as_strided((1, 4), (0, 1)))
    frozen = nn.Parameter(torch.ones(1, 4).expand(6, 4), requires_grad=False)
    Muon([muon_group(one, frozen)])


# Options of the whole optimizer, and those that contradict each other

REFERENCE = {"use_distributed_muon": True}
CLIP = {"clip_config": {"head_dim": 2, "threshold": 100}}


@pytest.mark.parametrize(
    "key, values",
    [
        ("chunk_size", [0, -2, 2.5, True, None, "4"]),
        ("warmup_step", [-1, 1.5, None]),
        ("staging_bytes", [0, 1e9, TOO_LARGE]),
        ("triton", [None, 1, "off"]),
        ("exact", [None, 1]),
        ("debug", [None, 1]),
        ("use_distributed_muon", [None, 1]),
        ("comm_dtype", [torch.int8, torch.complex64, torch.float16, "bfloat16", 16]),
        ("consistency_check", ["always", None, True]),
        ("hsdp", ["both", None]),
        ("grad_reduce", ["sum", True]),
        ("ns_options", [{"epsilon": 1e-8}, 3]),
    ],
)
def test_a_bad_option_of_the_optimizer_is_refused(key, values):
    for value in values:
        assert_raises(partial(Muon, good_groups(), **{key: value}), key)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"exact": True, "comm_dtype": torch.bfloat16}, ["exact=True", "comm_dtype"]),
        ({"exact": True, "ns_dtype": torch.float16}, ["exact=True", "ns_dtype"]),
        ({"ns_options": {"eps": -1.0}}, ["ns_eps"]),
        ({**REFERENCE, "beta2": 0.9}, ["beta2"]),
        ({**REFERENCE, "weight_rounding": "exact"}, ["weight_rounding"]),
        ({**REFERENCE, "capturable": True}, ["capturable"]),
        ({**REFERENCE, **CLIP}, ["clip_config"]),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words):
    assert_raises(lambda: Muon(good_groups(), **options), *words)


def test_the_reference_refuses_cpu_offload_and_audits():
    for turn_on, word in ((Muon.turn_on_cpu_offload, "CPU offload"), (Muon.audit, "audit")):
        optim = Muon(good_groups(), **REFERENCE)
        set_gradients(params_of(optim), 0)
        turn_on(optim)
        assert_refused(optim, optim.step, "use_distributed_muon=True", word)


# nanochat's groups


def groups_by_kind() -> list[dict[str, Any]]:
    return [
        {"kind": "muon", "params": [parameter(4, 4)], "lr": 0.02, "beta2": 0.9},
        {"kind": "adamw", "params": [parameter(3)], "lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-10},
    ]


@pytest.mark.parametrize(
    "number, key, value, named",
    [
        *((1, "kind", kind, "kind") for kind in (None, "Muon", "sgd", True)),
        (0, "lr", NAN, "lr"),
        (0, "beta2", 1.0, "beta2"),
        (0, "momentum", -0.1, "momentum"),
        (1, "betas", (0.9, 1.0), "adamw_betas"),
        (1, "betas", 0.9, "adamw_betas"),
        (1, "eps", -1.0, "adamw_eps"),
        (1, "weight_decay", INF, "weight_decay"),
    ],
)
def test_a_bad_key_of_nanochats_groups_is_refused(number, key, value, named):
    groups = groups_by_kind()
    groups[number][key] = value
    assert_raises(lambda: optimizer.MuonAdamW(groups), f"param_groups[{number}]", named)
    optim = optimizer.MuonAdamW(groups_by_kind())
    set_gradients(params_of(optim))
    if key != "kind":  # which is read once
        optim.param_groups[number][key] = value
        assert_refused(optim, optim.step, f"param_groups[{number}]", named)


# Gradients, and steps that happen wholly or not at all


@pytest.mark.kernels_ci
@pytest.mark.parametrize("number, index, name", [(1, 1, "embed.weight"), (2, 0, OF_2)])
def test_a_sparse_gradient_stops_the_step_before_anything_changed(number, index, name):
    for optim in trained(0), trained(2):
        twin = copy.deepcopy(optim)
        param = optim.param_groups[number]["params"][index]
        param.grad = param.grad.to_sparse()
        assert_refused(optim, optim.step, name, "sparse")
        param.grad = param.grad.to_dense()
        assert_steps_like(optim, twin)


class NoLists(torch.Tensor):
    """Around another tensor; it does one tensor's operations, and none of lists."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> torch.Tensor:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("foreach", "fused", "as_strided")):
            raise NotImplementedError(f"{cls.__name__} has no {func}")
        made = func(*(a.held if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return cls(made) if func._opname in ("detach", "clone") else made


@pytest.mark.parametrize("group", [muon_group, adamw_group])
def test_a_weight_of_a_class_without_list_operations_stops_the_step_before_anything_changed(group):
    quantized = nn.Parameter(NoLists(torch.ones(4, 6)))
    optim = Muon([group(("a", parameter(4, 6))), group(("b", quantized))])
    a, b = params_of(optim)
    a.grad, b.grad = torch.ones(4, 6), torch.ones(4, 6)
    before = a.detach().clone()
    assert_raises(optim.step, "b", "NoLists")
    assert not optim.state and not optim.is_broken and torch.equal(a, before)
    b.requires_grad_(False)  # as quantized weights under adapters are
    optim.step()
    assert not torch.equal(a, before)


# Checkpoints


def put(index: int, key: str, value: Any) -> Callable[[Any], None]:
    return lambda saved: saved["state"][index].update({key: value})


def put_in_group(number: int, **options: Any) -> Callable[[Any], None]:
    return lambda saved: saved["param_groups"][number].update(options)


META = torch.ones((), device="meta")
GROUP = "param_groups[{}] of the checkpoint"
# Indices of state: 0, 1 Muon (4, 6), (5, 5); 2, 3 AdamW (7,), (3, 2); 4 Muon (6, 4); 5 AdamW (2,)
# Groups: Muon, AdamW, Muon, AdamW.
BAD_CHECKPOINTS: dict[str, tuple[Any, ...]] = {
    "momentum's shape": (put(4, "momentum_buffer", torch.zeros(4, 6)), OF_2, "(6, 4)", "(4, 6)"),
    "moment's shape": (put(5, "exp_avg", torch.zeros(3)), "head.bias", "exp_avg", "(2,)", "(3,)"),
    "second moment's": (put(4, "second_momentum_buffer", torch.zeros(5)), OF_2, "(5,)"),
    "integers": (put(4, "momentum_buffer", torch.zeros(6, 4, dtype=torch.int32)), OF_2, "int32"),
    "sparse": (put(5, "exp_avg", torch.zeros(2).to_sparse()), "head.bias", "exp_avg", "sparse"),
    "on meta": (put(5, "exp_avg", torch.zeros(2, device="meta")), "head.bias", "meta"),
    "two step counts": (put(5, "step", torch.zeros(2)), "step", "parameter 5", "(2,)"),
    "no step count": (put(5, "step", torch.tensor(NAN)), "step", "parameter 5"),
    "negative step count": (put(5, "step", -1), "step", "parameter 5"),
    "momentum of AdamW's": (put(5, "momentum_buffer", torch.zeros(2)), "head.bias"),
    "no second moment": (lambda s: s["state"][5].pop("exp_avg_sq"), "head.bias", "exp_avg_sq"),
    "no momentum": (lambda s: s["state"][4].pop("momentum_buffer"), OF_2, "momentum_buffer"),
    "no longer side's": (lambda s: s["state"][4].pop("second_momentum_buffer"), OF_2, "but not"),
    "no steps": (lambda s: s["state"][5].pop("step"), "head.bias", "step"),
    "state of none": (lambda s: s["state"].update({9: s["state"][5]}), "parameter 9"),
    "state by a name": (lambda s: s["state"].update({"w1": s["state"].pop(4)}), "w1"),
    "state under 0 and '0'": (lambda s: s["state"].update({"0": s["state"][0]}), "parameter 0"),
    "SGD's": (lambda s: s["state"].update({5: {"momentum_buffer": torch.ones(2)}}), "head.bias"),
    "twice in a group": (put_in_group(0, params=[0, 0]), "parameter 0"),
    "in two groups": (put_in_group(3, params=[0]), "parameter 0"),
    "no state": (lambda s: s.pop("state"), "'state'"),
    "no groups": (lambda s: s.pop("param_groups"), "'param_groups'"),
    "no dict": (lambda s: s["param_groups"].__setitem__(0, [0, 1]), "'param_groups'"),
    "no params": (lambda s: s["param_groups"][1].pop("params"), GROUP.format(1), "params"),
    "lists as ids": (put_in_group(1, params=[[2], 3]), GROUP.format(1), "params"),
    "state that is no dict": (lambda s: s["state"].update({3: torch.zeros(3, 2)}), "parameter 3"),
    "groups in another order": (lambda s: s["param_groups"].reverse(), "param_groups[0]", "order"),
    "use_muon swapped": (put_in_group(3, use_muon=True), "param_groups[3]", "use_muon=False"),
    "a group too few": (lambda s: s["param_groups"].pop(), "4 param_groups", "3"),
    "a parameter too few": (put_in_group(0, params=[0]), "param_groups[0]", "2 parameters", "1"),
    "bad rate": (put_in_group(3, lr=NAN), GROUP.format(3), "lr"),
    "bad scale": (put_in_group(2, adjust_lr="rms"), GROUP.format(2), "adjust_lr"),
    "one triple": (
        put_in_group(2, ns_coefficients=TRIPLES[:1]),
        GROUP.format(2),
        "ns_coefficients",
    ),
    "no dtype": (put_in_group(2, momentum_dtype="torch.nn"), GROUP.format(2), "momentum_dtype"),
    "use_muon=1": (put_in_group(0, use_muon=1), GROUP.format(0), "use_muon"),
    "two bools": (put_in_group(0, use_muon=torch.ones(2)), GROUP.format(0), "use_muon"),
    "bool on meta": (put_in_group(3, use_muon=META), GROUP.format(3), "use_muon"),
}


@pytest.mark.parametrize("what", BAD_CHECKPOINTS)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_checkpoint_that_does_not_fit_loads_nothing(what, steps):
    change, *words = BAD_CHECKPOINTS[what]
    saved = copy.deepcopy(trained(3, beta2=0.9, lr=0.5).state_dict())
    change(saved)
    torch.manual_seed(1)
    optim = trained(steps, beta2=0.9)
    twin, untouched = copy.deepcopy(optim), copy.deepcopy(saved)
    assert_refused(optim, partial(optim.load_state_dict, saved), *words)
    assert bool(optim.state) is bool(steps)
    assert repr(saved) == repr(untouched)
    assert_steps_like(optim, twin)


@pytest.mark.parametrize("value", [None, torch.ones(2), META], ids=str)
def test_use_muon_of_another_type_in_a_checkpoint_of_nanochats_groups_is_refused(value):
    optim = optimizer.MuonAdamW(groups_by_kind())
    for number in range(2):
        saved = optim.state_dict()
        saved["param_groups"][number]["use_muon"] = value
        words = (GROUP.format(number), "use_muon")
        assert_refused(optim, partial(optim.load_state_dict, saved), *words)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["torch_adamw", "torch_muon"])
def test_a_checkpoint_of_torchs_optimizers_names_what_loads_it(kind, groups):
    params = [parameter(4, 4), parameter(3, 3)]
    theirs: Any = {"torch_adamw": torch.optim.AdamW, "torch_muon": torch.optim.Muon}[kind](params)
    set_gradients(params)
    theirs.step()
    optim = Muon([muon_group(*each) for each in ([params] if groups == 1 else zip(params))])
    saved, words = theirs.state_dict(), ("load_foreign_state_dict", kind)
    assert_refused(optim, partial(optim.load_state_dict, saved), *words)
    assert_refused(optim, partial(optim.load_state_dict, [saved]), "load_foreign_state_dict")
    optim.load_foreign_state_dict(saved, kind=kind, params=params)


def test_a_checkpoint_of_another_muon_that_does_not_load_names_what_loads_it():
    optim = Muon(good_groups()[:2])
    saved = copy.deepcopy(optim.state_dict())
    kept = {"params", "lr", "weight_decay", "use_muon"}
    saved["param_groups"] = [{k: group[k] for k in kept} for group in saved["param_groups"]]
    saved["param_groups"][1]["betas"] = (0.9, 0.95)
    words = ("betas", "keller_jordan", "load_foreign_state_dict")
    assert_refused(optim, partial(optim.load_state_dict, saved), *words)


# Process groups


@on_ranks(1)
def test_a_dtensor_without_a_process_group_is_refused() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    tensor = nn.Parameter(dist.tensor.ones(4, 4, device_mesh=mesh, placements=[Shard(0)]))
    dist.destroy_process_group()
    for group in (muon_group, adamw_group):
        bad, optim, words = group((W, tensor)), trained(1), (W, "DTensor", "process group")
        assert_refused(optim, partial(optim.add_param_group, bad), *words)


ONE = [parameter(4, 3)]
WORLD_TOO_EARLY: dict[str, Callable[[], Any]] = {
    "Muon": lambda: Muon([muon_group(*ONE)], process_group=dist.group.WORLD),
    "MuonAdamW": lambda: optimizer.MuonAdamW(
        [{"kind": "muon", "params": ONE}], process_group=dist.group.WORLD
    ),
    "keller_jordan": lambda: presets.keller_jordan(ONE, process_group=dist.group.WORLD),
    "dion": lambda: presets.dion(ONE, dist.group.WORLD),
    "normuon": lambda: presets.normuon(ONE, dist.group.WORLD),
    "set": lambda: setattr(Muon([muon_group(*ONE)]), "process_group", dist.group.WORLD),
}


@pytest.mark.parametrize("how", WORLD_TOO_EARLY)
def test_the_default_group_before_it_is_initialized_is_refused(how, monkeypatch):
    WORLD_TOO_EARLY[how]()  # one process has no other ranks to forget
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert_raises(WORLD_TOO_EARLY[how], "WORLD", "init_process_group")
    for given in (presets.keller_jordan(ONE), presets.dion(ONE)):  # who leaves it out may be early
        assert Muon(**given).process_group is None


# Words of other optimizers, and typos

# By words of other optimizers, and mistyped ones, what the answer names.
INSTEAD = {
    word: answer.split()
    for words, answer in {
        "betas beta1": "adamw_betas momentum",
        "eps epsilon": "adamw_eps ns_eps",
        "wd weigth_decay decoupled_weight_decay": "weight_decay",
        "learning_rate": "lr",
        "adjust_lr_fn": "adjust_lr original",
        "scale_mode": "adjust_lr",
        "fused amsgrad": "AdamW",
        "differentiable zzz": "",
        "dampening": "momentum_style ema",
        "muon_params adamw_params": "params moonlight",
        "backend_steps num_ns_steps ns_step": "ns_steps",
        "mu": "momentum",
        "cautious_wd": "cautious",
        "distributed_mesh": "process_group",
        "use_nesterov": "nesterov",
        "coefficient_type": "ns_coefficients",
        "adamw_lr": "lr use_muon=False for_model",
        "muon_lr": "lr use_muon=True",
    }.items()
    for word in words.split()
}


@pytest.mark.parametrize("word", INSTEAD)
def test_an_argument_that_muon_does_not_have_is_answered_with_what_to_write(word):
    words = (word, *INSTEAD[word])
    assert_raises(partial(Muon, good_groups(), **{word: 1}), "Muon()", *words, error=TypeError)
    if word not in ("betas", "eps"):  # nanochat's
        make = partial(optimizer.MuonAdamW, groups_by_kind(), **{word: 1})
        assert_raises(make, "MuonAdamW()", *words, error=TypeError)
    if word != "adamw_lr":  # for_model's
        describe = partial(optimizer.describe, model(), **{word: 1})
        assert_raises(describe, "describe()", *words, error=TypeError)
    assert_raises(lambda: presets.motif(good_groups(), **{word: 1}), *words)
    assert_raises(lambda: presets.motif([{**good_groups()[0], word: 1}]), *words[:1])


# A group may have `fused`, which torchtitan sets, and words that the others stand for are not keys.
NO_MISTAKES_IN_GROUPS = {"fused", "zzz", "muon_params", "adamw_params", "distributed_mesh"}


@pytest.mark.parametrize("word", sorted(INSTEAD.keys() - NO_MISTAKES_IN_GROUPS))
def test_a_group_key_that_means_nothing_is_answered_wherever_it_comes_from(word):
    words = ("param_groups[3]", word, *INSTEAD[word])
    for optim in trained(0), trained(2):
        twin, group = copy.deepcopy(optim), optim.param_groups[3]
        group[word] = 1
        assert_refused(optim, optim.step, *words)
        assert_refused(optim, optim.state_dict, *words)
        saved = copy.deepcopy(twin.state_dict())
        saved["param_groups"][3][word] = group.pop(word)
        assert_refused(optim, partial(optim.load_state_dict, saved), "checkpoint", *words)
        assert_steps_like(optim, twin)
    groups = good_groups()
    groups[3][word] = 1
    assert_raises(lambda: Muon(groups), *words)


def test_presets_propose_only_what_their_source_has():
    make = presets.torch_muon
    assert_raises(lambda: make([parameter(2, 2)], learning_rate=1), "learning_rate", "use 'lr'")
    with pytest.raises(ValueError, match=r"^(?!.*adamw_betas).*betas"):
        make([parameter(2, 2)], betas=1)


def test_unknown_arguments_are_answered_under_torchrun_too(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert_raises(lambda: Muon(good_groups(), wd=1), "weight_decay", error=TypeError)
    assert_raises(lambda: Muon(good_groups(), ns_eps=1), "ns_options={'eps'", error=TypeError)


OWN_KEYS: dict[Any, Any] = {
    # of torch's schedulers, timm, Lightning, Megatron, schedule-free optimizers, GaLore
    "fused": False,  # torchtitan's
    **dict.fromkeys(["initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"], 0.1),
    **dict.fromkeys(["swa_lr", "lr_scale", "lr_mult", "wd_mult", "my_weight_decay"], 0.1),
    **dict.fromkeys(["max_weight_decay", "start_wd", "warmup_steps", "rank", "scale", "k"], 1),
    **{"name": "decoder", "is_expert_parallel": False, "tag": None, 7: "a number"},
}


def test_keys_of_schedulers_and_trainers_are_theirs():
    optim, twin = trained(0), trained(0)
    for group, other in zip(optim.param_groups, twin.param_groups):
        for p, q in zip(group["params"], other["params"]):
            q.data.copy_(p)
        group.update(OWN_KEYS)
    assert_steps_like(optim, twin)
    optim.load_state_dict(copy.deepcopy(optim.state_dict()))
    assert_steps_like(optim, twin)
    assert all(group.items() >= OWN_KEYS.items() for group in optim.param_groups)
    Muon([{**group, **OWN_KEYS} for group in good_groups()])


# Warnings: names that almost match, and steps that train nothing


@pytest.mark.parametrize(
    "key, near", [("expert", "experts"), ("expertz.w1", "experts.w1"), ("router", None)]
)
def test_an_expert_key_without_a_match_proposes_the_component_that_is_nearest(key, near):
    stacks = nn.ParameterDict({"w1": torch.zeros(2, 4, 4)})
    layers = nn.ModuleDict({"experts": stacks, "norm": nn.LayerNorm(4)})
    with pytest.warns(UserWarning, match=f"'{key}'.*'{near}'" if near else f"'{key}'$"):
        optimizer.get_default_muon_param_groups(layers, expert_keys=[key])
    text = " ".join(str(optimizer.describe(layers, expert_keys=[key])).split())
    assert near is None or f"'{near}'" in text


def test_a_split_pattern_without_a_match_proposes_the_component_that_is_nearest():
    group = muon_group(("layers.0.qkv.weight", parameter(6, 2)))
    with pytest.warns(UserWarning, match="'qvk'.*'qkv'"):
        Muon([group], split={"qvk": 2})


def warnings_of(model: nn.Module, optim: Any, steps: int) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optim.step()
    return caught


def test_an_optimizer_that_trains_nothing_says_so_once():
    layers = model()
    optim = Muon(optimizer.get_default_muon_param_groups(layers))
    assert not warnings_of(layers, optim, 1)
    layers.requires_grad_(False)  # as for adapters that the groups do not have
    (warning,) = warnings_of(nn.Sequential(layers, nn.Linear(4, 4)), optim, 3)
    assert Path(warning.filename).name == "test_errors.py" and "frozen" in str(warning.message)
    for layer in layers:
        layer.bias.requires_grad_(True)
    weights, biases = zip(*((layer.weight, layer.bias) for layer in layers))
    (warning,) = warnings_of(layers, Muon([muon_group(*weights), adamw_group(*biases)]), 3)
    assert "no matrix" in str(warning.message) and "frozen" in str(warning.message)
    (warning,) = warnings_of(layers, Muon([muon_group()]), 3)
    assert "empty" in str(warning.message)


# Parameters that a model has replaced since its groups were made


@pytest.mark.parametrize("attribute", ["weight", "bias"])
def test_one_parameter_that_was_replaced_stops_the_step(attribute):
    layers = model()
    optim = Muon(optimizer.get_default_muon_param_groups(layers))
    assert not warnings_of(layers, optim, 2)
    optim.zero_grad()
    setattr(layers[1], attribute, parameter(*getattr(layers[1], attribute).shape))
    layers(torch.ones(2, 4)).sum().backward()
    assert_refused(optim, optim.step, f"1.{attribute}", "fully_shard")


def test_a_parameter_in_whose_place_another_of_the_groups_is_trained_stops_no_step():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optim = Muon(optimizer.get_default_muon_param_groups(layers))
    layers[1].weight = layers[0].weight  # tied after the groups were made
    layers[2].weight = parameter(4, 4)
    optim.add_param_group(muon_group(layers[2].weight))
    weights = [layers[0].weight.clone(), layers[2].weight.clone()]
    layers(torch.ones(2, 4)).sum().backward()
    optim.step()
    assert not torch.equal(layers[0].weight, weights[0])
    assert not torch.equal(layers[2].weight, weights[1])


@on_ranks(1)
def test_groups_made_before_fully_shard_stop_the_first_step() -> None:
    layers = model()
    optim = Muon(optimizer.get_default_muon_param_groups(layers))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for part in (*layers, layers):
        fully_shard(part, mesh=mesh)
    layers(torch.ones(2, 4)).sum().backward()
    assert_refused(optim, optim.step, "0.weight", "fully_shard")
    optim = Muon(optimizer.get_default_muon_param_groups(layers))
    assert not warnings_of(layers, optim, 2)
    optim.zero_grad()
    layers.set_reshard_after_backward(False)  # leaves unsharded parameters in the modules
    layers(torch.ones(2, 4)).sum().backward()
    optim.zero_grad()
    with pytest.warns(UserWarning, match="no gradient"):
        optim.step()


def test_a_model_whose_groups_were_made_is_copied_saved_and_let_go():
    layers = model()
    groups = optimizer.get_default_muon_param_groups(layers)
    assert all(group.keys() == {"params", "names", "use_muon"} for group in groups)
    copied = copy.deepcopy(layers)
    torch.save(copied, io.BytesIO())
    kept = weakref.ref(layers)
    del layers
    gc.collect()
    assert kept() is None
    with pytest.warns(UserWarning, match="no gradient"):
        Muon(groups).step()
