"""Wrong input is an error that names what is wrong and how to repair it, and it changes nothing.

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
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from comparisons import assert_equal
from kernel import as_arguments, optimizer
from layouts import params_of, set_gradients
from ranks import run_ranks
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

Muon = optimizer.Muon
GROUP_OPTIONS = optimizer.muon.GROUP_OPTIONS

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


def snapshot(optim: torch.optim.Optimizer) -> list[Any]:
    """Copies of all that an optimizer holds; does not create state."""
    assert {id(p) for p in optim.state} <= {id(p) for p in params_of(optim)}
    held: list[Any] = [len(optim.param_groups)]
    for group in optim.param_groups:
        # Names set on a group go to `optim.names`.
        keys = group.keys() - {"params", "names"}
        held.append(repr({key: group[key] for key in sorted(keys)}))
        for p in group["params"]:
            held.append(p.detach().clone())
            held.append(None if p.grad is None else p.grad.clone())
            state = optim.state.get(p, {})
            held.append({key: copy.deepcopy(value) for key, value in state.items()})
    return held


def assert_refused(
    optim: torch.optim.Optimizer,
    call: Callable[[], Any],
    *patterns: str,
    error: type[Exception] = ValueError,
) -> None:
    """The call raises, the message has all patterns, and nothing that `optim` holds changed."""
    before = snapshot(optim)
    assert_raises(call, *patterns, error=error)
    assert_equal(snapshot(optim), before)


def assert_raises(
    call: Callable[[], Any], *patterns: str, error: type[Exception] = ValueError
) -> None:
    with pytest.raises(error) as caught:
        call()
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"no {pattern!r} in: {caught.value}"


# What is no list of groups


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(lambda: list(model().parameters()), id="list of tensors"),
        pytest.param(lambda: model().parameters(), id="generator of tensors"),
        pytest.param(lambda: model().named_parameters(), id="named_parameters"),
        pytest.param(lambda: list(model().named_parameters()), id="list of pairs"),
        pytest.param(lambda: model().state_dict(keep_vars=True), id="state dict"),
        pytest.param(lambda: muon_group(parameter(3, 3)), id="one group"),
        pytest.param(lambda: parameter(3, 3), id="tensor"),
        pytest.param(lambda: [muon_group(parameter(3, 3)), parameter(3)], id="group and tensor"),
        pytest.param(lambda: {parameter(3, 3)}, id="set of tensors"),
    ],
)
def test_what_is_no_list_of_groups_is_told_what_to_write(params):
    assert_raises(lambda: Muon(params()), "use_muon", r"Muon\.for_model\(model")


def test_no_groups_at_all_are_refused():
    assert_raises(lambda: Muon([]), "empty")


# Bad groups, at construction and added later


def sparse_parameter(layout: str) -> nn.Parameter:
    dense = torch.eye(3)
    return nn.Parameter(dense.to_sparse_csr() if layout == "csr" else dense.to_sparse())


W = "blocks.3.w.weight"
GOOD = "blocks.0.w.weight"
UNNAMED = r"param_groups\[4\]\['params'\]\[1\]"

BAD_GROUPS = {
    # use_muon
    "no use_muon": (lambda _: {"params": [parameter(3, 3)]}, [r"param_groups\[4\]", "use_muon"]),
    **{
        f"use_muon={value!r}": (
            lambda _, value=value: {"params": [parameter(3, 3)], "use_muon": value},
            [r"param_groups\[4\]", "use_muon=True or False"],
        )
        for value in (1, 0, None, "yes")
    },
    # names
    "names too few": (
        lambda _: muon_group(parameter(3, 3), parameter(3, 3), names=[W]),
        [r"param_groups\[4\]", "1 name for 2 parameters", "one for each"],
    ),
    "names too many": (
        lambda _: muon_group(parameter(3, 3), names=[GOOD, W]),
        [r"param_groups\[4\]", "2 names for 1 parameter;", "one for each"],
    ),
    "one string as names": (
        lambda _: muon_group(parameter(3, 3), parameter(3, 3), names="ab"),
        [r"param_groups\[4\]", "names"],
    ),
    "plain mixed with pairs": (
        lambda _: adamw_group(parameter(3), (W, parameter(3))),
        [r"param_groups\[4\]", r"give all parameters as \(name, parameter\)"],
    ),
    "pairs and names": (
        lambda _: muon_group((W, parameter(3, 3)), names=[W]),
        [r"param_groups\[4\]", "names"],
    ),
    "pairs the wrong way round": (
        lambda _: muon_group((parameter(3, 3), W)),
        [r"param_groups\[4\]", r"\(name, parameter\)"],
    ),
    "expert_keys without names": (
        lambda _: muon_group(parameter(2, 3, 3), expert_keys=["experts"]),
        [r"param_groups\[4\]", "expert_keys", "names"],
    ),
    "split by pattern without names": (
        lambda _: muon_group(parameter(4, 3), split={"qkv": 2}),
        [r"param_groups\[4\]", "split", "names"],
    ),
    # tensors
    "vector": (
        lambda _: muon_group(parameter(3, 3), parameter(3), names=[GOOD, W]),
        [W, r"\(3,\)", "use_muon=False"],
    ),
    "vector without name": (
        lambda _: muon_group(parameter(3, 3), parameter(3)),
        [UNNAMED, r"\(3,\)", "use_muon=False"],
    ),
    "scalar": (lambda _: muon_group(parameter(), names=[W]), [W, r"\(\)", "use_muon=False"]),
    "vector with flatten": (
        lambda _: muon_group(parameter(3), names=[W], flatten=True),
        [W, "use_muon=False"],
    ),
    "vector of experts": (
        lambda _: muon_group(parameter(3), names=["experts.w"], expert_keys=["experts"]),
        ["experts.w", "use_muon=False"],
    ),
    **{
        f"{dtype}": (
            lambda _, dtype=dtype: muon_group(
                parameter(3, 3), torch.ones(3, 3, dtype=dtype), names=[GOOD, W]
            ),
            [W, str(dtype), "use_muon=False"],
        )
        for dtype in (torch.complex64, torch.complex128, torch.int64, torch.uint8, torch.bool)
    },
    **{
        f"sparse {layout} in {name}": (
            lambda _, layout=layout, group=group: group(
                parameter(3, 3), sparse_parameter(layout), names=[GOOD, W]
            ),
            [W, "sparse", "dense"],
        )
        for layout in ("coo", "csr")
        for name, group in (("Muon", muon_group), ("AdamW", adamw_group))
    },
    "three dimensions": (
        lambda _: muon_group(parameter(3, 3), parameter(2, 3, 3), names=[GOOD, W]),
        [W, r"\(2, 3, 3\)", "expert_keys", "flatten=True", "use_muon=False"],
    ),
    "three dimensions of another name": (
        lambda _: muon_group(
            parameter(2, 3, 3), names=["layers.0.conv.weight"], expert_keys=["experts"]
        ),
        ["layers.0.conv.weight", "expert_keys", "flatten=True"],
    ),
    **{
        f"{what} in {name}": (
            lambda _, value=value, group=group: group(parameter(3, 3), value, names=[GOOD, W]),
            [W, type(value).__name__],
        )
        for what, value in {"None": None, "number": 3.0, "list": [1.0]}.items()
        for name, group in (("Muon", muon_group), ("AdamW", adamw_group))
    },
    "no leaf": (
        lambda _: muon_group(parameter(3, 3), parameter(3, 3) * 2, names=[GOOD, W]),
        [W, "leaf"],
    ),
    # duplicates
    "set": (
        lambda _: {"params": {parameter(3, 3)}, "use_muon": True},
        [r"param_groups\[4\]", "set", "list"],
    ),
    "twice in a Muon group": (
        lambda _: muon_group(*[parameter(3, 3)] * 2, names=[GOOD, W]),
        [f"{GOOD}|{W}", "twice|more than once"],
    ),
    "in two groups": (
        lambda groups: muon_group(groups[0]["params"][1], names=["tied.weight"]),
        [r"tied\.weight|layers\.0\.w2\.weight", "already"],
    ),
    # splits
    "split list": (
        lambda _: muon_group(parameter(6, 3), parameter(5, 3), names=[GOOD, W], split=[2, 4]),
        [W, "5 rows", "6"],
    ),
    "split number": (
        lambda _: muon_group(parameter(6, 3), parameter(5, 3), names=[GOOD, W], split=2),
        [W, "5 rows", "split=2"],
    ),
    "split mapping to a list": (
        lambda _: muon_group(
            parameter(6, 3), parameter(5, 3), names=["a.qkv", "b.qkv"], split={"qkv": [2, 4]}
        ),
        ["b.qkv", "5 rows", "6"],
    ),
    "split mapping to a number": (
        lambda _: muon_group(
            parameter(5, 3), parameter(5, 3), names=["a.w", "b.qkv"], split={"*.qkv": 2}
        ),
        ["b.qkv", "5 rows", "split=2"],
    ),
    "split of experts counts their rows": (
        lambda _: muon_group(
            parameter(4, 5, 3), names=["experts.w"], expert_keys=["experts"], split=2
        ),
        ["experts.w", "5 rows", "split=2"],
    ),
    "split of a convolution counts dim 0": (
        lambda _: muon_group(parameter(5, 4, 2, 2), names=[W], flatten=True, split=2),
        [W, "5 rows", "split=2"],
    ),
    # options that contradict each other
    "coefficients for another number of steps": (
        lambda _: muon_group(parameter(3, 3), ns_coefficients=[(2.0, -1.5, 0.5)] * 3, ns_steps=5),
        [r"param_groups\[4\]", "ns_coefficients", "3", "ns_steps", "5", "leave ns_steps out"],
    ),
}
bad_groups = pytest.mark.parametrize("bad", BAD_GROUPS.values(), ids=BAD_GROUPS)


@bad_groups
def test_a_bad_last_group_is_refused_at_construction(bad):
    make, patterns = bad
    groups = good_groups()
    before = copy.deepcopy(groups)
    assert_raises(lambda: Muon([*groups, make(groups)]), *patterns)
    assert_equal(groups, before)


@bad_groups
def test_a_bad_added_group_is_refused_and_the_optimizer_goes_on(bad):
    make, patterns = bad
    for optim in trained(0), trained(2):
        twin = copy.deepcopy(optim)
        group = make(optim.param_groups)
        assert_refused(optim, lambda o=optim, group=group: o.add_param_group(group), *patterns)
    assert_steps_like(optim, twin)
    added = parameter(3, 3)
    optim.add_param_group(muon_group(added, names=[W]))
    set_gradients(params_of(optim))
    optim.step()
    assert "momentum_buffer" in optim.state[added]


@pytest.mark.parametrize("added", [parameter(3, 3), [parameter(3, 3)], (W, parameter(3, 3)), None])
def test_adding_what_is_no_group_says_what_to_write(added):
    optim = trained(1)
    assert_refused(optim, lambda: optim.add_param_group(added), r"param_groups\[4\]", "use_muon")


def test_an_explicit_list_sets_the_steps_of_a_group_added_later():
    optim = Muon(good_groups())
    optim.add_param_group(muon_group(parameter(3, 3), ns_coefficients=[(2.0, -1.5, 0.5)] * 3))
    assert optim.param_groups[-1]["ns_steps"] == 3
    set_gradients(params_of(optim))
    optim.step()


# Options of a group, one by one

bad_values = pytest.mark.parametrize(
    "key, value",
    [
        pytest.param(key, value, id=f"{key}={str(value)[:40]}")
        for key, values in BAD_VALUES.items()
        for value in values
    ],
)
a_bad_value_of_each = pytest.mark.parametrize(
    "key, value", [(key, values[0]) for key, values in BAD_VALUES.items()], ids=list(BAD_VALUES)
)


def test_every_option_is_tried_with_bad_values():
    assert set(BAD_VALUES) == set(GROUP_OPTIONS)


def option_error(group: int, key: str) -> list[str]:
    return [rf"param_groups\[{group}\]", key, "must be|known|adds? up|list"]


@pytest.mark.parametrize(
    "options", [{"comm_dtype": torch.bfloat16}, {"ns_dtype": torch.float16}], ids=str
)
def test_exact_mode_and_16_bits_contradict_each_other(options):
    assert_raises(lambda: Muon(good_groups(), exact=True, **options), *options, "contradict")


@pytest.mark.parametrize("wrong", [{"epsilon": 1e-8}, 3, {"eps": -1.0}], ids=str)
def test_ns_options_take_known_keys_and_good_values(wrong):
    assert_raises(lambda: Muon(good_groups(), ns_options=wrong), "ns_options|ns_eps")


def test_a_rare_option_given_by_itself_is_told_to_be_one_of_ns_options():
    with pytest.raises(TypeError, match=r"use ns_options=\{'eps': …\}"):
        Muon(good_groups(), ns_eps=1e-8)


@bad_values
def test_a_bad_argument_is_refused(key, value):
    assert_raises(lambda: Muon(good_groups(), **as_arguments({key: value})), *option_error(0, key))


@a_bad_value_of_each
def test_a_bad_option_of_the_last_group_is_refused_at_construction(key, value):
    groups = good_groups()
    groups[-1][key] = value
    assert_raises(lambda: Muon(groups), *option_error(3, key))


@a_bad_value_of_each
def test_a_bad_option_of_an_added_group_is_refused(key, value):
    optim = trained(1)
    group = muon_group(parameter(4, 4), names=[W], **{key: value})
    assert_refused(optim, lambda: optim.add_param_group(group), *option_error(4, key))


@bad_values
def test_a_bad_option_set_later_in_the_last_group_stops_the_step_before_anything_changed(
    key, value
):
    optim = trained(2)
    twin, group = copy.deepcopy(optim), optim.param_groups[3]
    good, group[key] = group[key], value
    assert_refused(optim, optim.step, *option_error(3, key))
    group[key] = good
    assert_steps_like(optim, twin)


@a_bad_value_of_each
def test_a_bad_option_set_before_the_first_step_creates_no_state(key, value):
    optim = trained(0)
    twin, group = copy.deepcopy(optim), optim.param_groups[0]
    good, group[key] = group[key], value
    assert_refused(optim, optim.step, *option_error(0, key))
    assert_refused(optim, optim.state_dict, *option_error(0, key))
    assert not optim.state
    group[key] = good
    assert_steps_like(optim, twin)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    "options, patterns",
    [
        ({"ns_steps": 3, "ns_coefficients": [(2.0, -1.5, 0.5)] * 4}, ["ns_coefficients", "4", "3"]),
        ({"ns_coefficients": [(2.0, -1.5, 0.5)] * 4}, ["ns_coefficients", "4", "ns_steps", "5"]),
        ({"split": [3, 4]}, ["layers", "rows", r"\[3, 4\]", "7"]),
        ({"split": 5}, ["layers", "rows", "split=5"]),
        ({"split": {"w1": 5}}, [r"layers\.\d\.w1\.weight", "rows", "split=5"]),
        ({"split": {"layers.*.w1.weight": [1, 2]}}, [r"layers\.\d\.w1\.weight", "rows", "3"]),
    ],
)
def test_options_that_contradict_set_later_stop_the_step(number, options, patterns):
    optim = trained(1)
    twin, group = copy.deepcopy(optim), optim.param_groups[number]
    good = {key: group[key] for key in options}
    group.update(options)
    assert_refused(optim, optim.step, *patterns)
    group.update(good)
    assert_steps_like(optim, twin)


@pytest.mark.parametrize("value", [None, "yes", 0])
@pytest.mark.parametrize("number", [0, 3])
def test_use_muon_set_later_to_no_bool_stops_the_step(number, value):
    optim = trained(1)
    optim.param_groups[number]["use_muon"] = value
    assert_refused(optim, optim.step, rf"param_groups\[{number}\]", "use_muon")


@pytest.mark.parametrize(
    "names", [["a"], ["a", "b", "c"], []], ids=["too few", "too many", "none at all"]
)
def test_names_set_later_of_another_length_stop_the_step(names):
    optim = trained(1)
    twin, good = copy.deepcopy(optim), optim.names[0]
    optim.param_groups[0]["names"] = names
    assert_refused(optim, optim.step, r"param_groups\[0\]", r"\d names? for 2 parameters; give one")
    optim.param_groups[0]["names"] = good
    assert_steps_like(optim, twin)


def test_a_group_that_an_engine_has_flattened_is_told_from_a_wrong_count_of_names():
    optim = Muon([muon_group(parameter(3, 3), parameter(3, 3), names=[GOOD, W])])
    flat = parameter(18)  # as DeepSpeed's ZeRO puts in their place
    flat.grad = torch.ones(18)
    optim.param_groups[0]["params"] = [flat]
    says = r"param_groups\[0\]: 2 names for 1 parameter; .* flattened .* fully_shard"
    assert_raises(optim.step, says)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "replacement, pattern",
    [
        (lambda: parameter(3), r"\(3,\)"),
        (lambda: parameter(2, 3, 3), "expert_keys"),
        (lambda: parameter(6, 4, dtype=torch.complex64), "complex64"),
        (lambda: torch.ones(6, 4, dtype=torch.int32), "int32"),
        (lambda: nn.Parameter(torch.ones(6, 4).to_sparse()), "sparse"),
        (lambda: nn.Parameter(torch.ones(1, 4).expand(6, 4)), "share memory"),
        (lambda: parameter(6, 4) * 2, "no leaf"),
    ],
    ids=["vector", "three dimensions", "complex", "integer", "sparse", "expanded", "computed"],
)
def test_a_bad_parameter_swapped_in_later_stops_the_step(replacement, pattern, steps):
    optim = trained(steps)
    twin, good = copy.deepcopy(optim), optim.param_groups[2]["params"]
    states, optim.param_groups[2]["params"] = optim.state.pop(good[0], None), [replacement()]
    assert_refused(optim, optim.step, r"layers\.1\.w1\.weight", pattern)
    optim.param_groups[2]["params"] = good
    if states is not None:
        optim.state[good[0]] = states
    assert_steps_like(optim, twin)


# Options of the whole optimizer


@pytest.mark.parametrize(
    "key, value",
    [("chunk_size", bad) for bad in (0, -2, 2.5, True, None, "4")]
    + [("warmup_step", bad) for bad in (-1, 1.5, None)]
    + [("staging_bytes", bad) for bad in (0, 1e9, TOO_LARGE)]
    + [("triton", bad) for bad in (None, 1, "off")]
    + [("comm_dtype", bad) for bad in (torch.int8, torch.complex64, "bfloat16", 16)]
    + [("consistency_check", bad) for bad in ("always", None, True)],
)
def test_a_bad_option_of_the_optimizer_is_refused(key, value):
    assert_raises(lambda: Muon(good_groups(), **{key: value}), key, "must be")


@pytest.mark.parametrize("steps", [0, 2])
def test_logits_without_a_clip_config_are_refused(steps):
    optim = trained(steps)
    twin = copy.deepcopy(optim)
    assert_refused(optim, lambda: optim.step(qk_logits={0: torch.ones(2)}), "clip_config")
    assert_steps_like(optim, twin)


@pytest.mark.parametrize(
    "options",
    [
        {"beta2": 0.9},
        {"weight_rounding": "exact"},
        {"capturable": True},
        {"clip_config": {"head_dim": 2, "threshold": 100}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_reference_refuses_what_it_does_not_do(options):
    (key,) = options
    assert_raises(lambda: Muon(good_groups(), use_distributed_muon=True, **options), key)


def test_the_reference_refuses_cpu_offload_and_audits():
    for turn_on, words in ((Muon.turn_on_cpu_offload, "CPU offload"), (Muon.audit, "an audit")):
        optim = Muon(good_groups(), use_distributed_muon=True)
        set_gradients(params_of(optim), 0)
        turn_on(optim)
        assert_refused(optim, optim.step, "use_distributed_muon=True", words)


# nanochat's groups


def groups_by_kind() -> list[dict[str, Any]]:
    return [
        {"kind": "muon", "params": [parameter(4, 4)], "lr": 0.02, "beta2": 0.9},
        {"kind": "adamw", "params": [parameter(3)], "lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-10},
    ]


@pytest.mark.parametrize("kind", [None, "Muon", "sgd", True])
def test_an_unknown_kind_is_refused(kind):
    groups = groups_by_kind()
    groups[1]["kind"] = kind
    assert_raises(lambda: optimizer.MuonAdamW(groups), r"param_groups\[1\]", "kind", "'adamw'")


@pytest.mark.parametrize(
    "number, key, value",
    [
        (0, "lr", NAN),
        (0, "beta2", 1.0),
        (0, "momentum", -0.1),
        (0, "ns_steps", 0),
        (1, "betas", (0.9, 1.0)),
        (1, "betas", 0.9),
        (1, "eps", -1.0),
        (1, "weight_decay", INF),
    ],
)
def test_a_bad_live_key_of_nanochats_groups_is_refused(number, key, value):
    groups = groups_by_kind()
    groups[number][key] = value
    assert_raises(lambda: optimizer.MuonAdamW(groups), rf"param_groups\[{number}\]", key)
    optim = optimizer.MuonAdamW(groups_by_kind())
    set_gradients(params_of(optim))
    optim.step()
    set_gradients(params_of(optim))
    optim.param_groups[number][key] = value
    assert_refused(optim, optim.step, rf"param_groups\[{number}\]", key)


# Gradients


@pytest.mark.kernels_ci
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "number, index, name", [(1, 1, r"embed\.weight"), (2, 0, r"layers\.1\.w1\.weight")]
)
def test_a_sparse_gradient_stops_the_step_before_anything_changed(number, index, name, steps):
    optim = trained(steps)
    twin = copy.deepcopy(optim)
    param = optim.param_groups[number]["params"][index]
    param.grad = param.grad.to_sparse()
    assert_refused(optim, optim.step, name, "sparse", "dense")
    param.grad = param.grad.to_dense()
    assert_steps_like(optim, twin)


def test_a_closure_that_raises_changes_nothing():
    optim = trained(1)
    twin = copy.deepcopy(optim)

    def closure():
        raise RuntimeError("out of data")

    assert_refused(optim, lambda: optim.step(closure), "out of data", error=RuntimeError)
    assert_steps_like(optim, twin)


# A step happens wholly or not at all


def assert_steps_wholly_or_not_at_all(optim: torch.optim.Optimizer) -> None:
    before = snapshot(optim)
    weights = [p.detach().clone() for p in params_of(optim)]
    try:
        optim.step()
    except ValueError:
        assert_equal(snapshot(optim), before)
    else:
        for p, weight in zip(params_of(optim), weights):
            assert not torch.equal(p, weight)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": torch.tensor([0.1])},
        {"lr": torch.tensor([[0.1]], dtype=torch.float64)},
        {"lr": torch.tensor(1)},
        {"lr": torch.tensor(1 + 1j)},
        {"capturable": True},
        {"capturable": True, "lr": torch.tensor(0.1)},
    ],
    ids=str,
)
def test_options_that_do_not_go_together_never_leave_half_a_step(options):
    optim = trained(2)
    for group in optim.param_groups:
        group.update(options)
    assert_steps_wholly_or_not_at_all(optim)


def test_a_float8_matrix_never_leaves_half_a_step():
    float8 = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn))
    groups = [muon_group(parameter(4, 4), float8, names=[GOOD, W])]
    try:
        optim = Muon(groups)
    except ValueError as error:
        assert W in str(error) and "float8" in str(error)
        return
    for p in params_of(optim):
        p.grad = torch.ones(4, 4).to(p.dtype)
    before = [p.detach().clone() for p in params_of(optim)]
    with pytest.raises(ValueError, match=W):
        optim.step()
    for p, weight in zip(params_of(optim), before):
        assert torch.equal(p.view(torch.uint8), weight.view(torch.uint8))


def test_gradients_wider_than_their_parameters_never_leave_half_a_step():
    matrix, vector = parameter(4, 4, dtype=torch.bfloat16), parameter(4, dtype=torch.bfloat16)
    optim = Muon([muon_group(matrix), adamw_group(vector)], lr=1.0)
    for p in (matrix, vector):
        p.grad_dtype = torch.float32
        p.grad = torch.randn(p.shape)
    assert_steps_wholly_or_not_at_all(optim)


# Checkpoints


def replace(state: Any, index: int, key: str, value: Any) -> None:
    state["state"][index][key] = value


def edit_group(state: Any, number: int, **options: Any) -> None:
    state["param_groups"][number].update(options)


# Indices of state: 0, 1 Muon (4, 6), (5, 5); 2, 3 AdamW (7,), (3, 2); 4 Muon (6, 4); 5 AdamW (2,)
BAD_CHECKPOINTS = {
    "momentum of another shape": (
        lambda s: replace(s, 4, "momentum_buffer", torch.zeros(4, 6)),
        [r"layers\.1\.w1\.weight", "momentum_buffer", r"\(6, 4\)", r"\(4, 6\)"],
    ),
    "first moment of another shape": (
        lambda s: replace(s, 5, "exp_avg", torch.zeros(3)),
        [r"head\.bias", "exp_avg", r"\(2,\)", r"\(3,\)"],
    ),
    "factored second moment of another length": (
        lambda s: replace(s, 4, "second_momentum_buffer", torch.zeros(5)),
        [r"layers\.1\.w1\.weight", "second_momentum_buffer"],
    ),
    "momentum of integers": (
        lambda s: replace(s, 4, "momentum_buffer", torch.zeros(6, 4, dtype=torch.int32)),
        [r"layers\.1\.w1\.weight", "momentum_buffer", "int32"],
    ),
    "sparse moment": (
        lambda s: replace(s, 5, "exp_avg", torch.zeros(2).to_sparse()),
        [r"head\.bias", "exp_avg", "sparse"],
    ),
    "step count that is no number": (
        lambda s: replace(s, 5, "step", torch.zeros(2)),
        ["step of parameter 5", r"\(2,\)"],
    ),
    "step count that is not finite": (
        lambda s: replace(s, 5, "step", torch.tensor(NAN)),
        ["step of parameter 5", "one number"],
    ),
    "moment on meta": (
        lambda s: replace(s, 5, "exp_avg", torch.zeros(2, device="meta")),
        [r"head\.bias", "exp_avg", "meta"],
    ),
    "a parameter twice in a group": (
        lambda s: s["param_groups"][0]["params"].__setitem__(1, s["param_groups"][0]["params"][0]),
        ["parameter 0 twice"],
    ),
    "a parameter in two groups": (
        lambda s: s["param_groups"][3]["params"].__setitem__(0, 0),
        ["parameter 0 twice"],
    ),
    "no state": (lambda s: s.pop("state"), ["'state' must be a dict", "none"]),
    "no groups": (lambda s: s.pop("param_groups"), ["'param_groups' must be a list", "none"]),
    "a group that is no dict": (
        lambda s: s["param_groups"].__setitem__(0, [0, 1]),
        ["'param_groups' must be a list of dicts"],
    ),
    "a group without params": (
        lambda s: s["param_groups"][1].pop("params"),
        [r"param_groups\[1\] of the checkpoint must list its params"],
    ),
    "state of a parameter that is no dict": (
        lambda s: s["state"].__setitem__(3, torch.zeros(3, 2)),
        ["state of parameter 3 must be a dict", "Tensor"],
    ),
    "groups in another order": (
        lambda s: s["param_groups"].reverse(),
        [r"param_groups\[0\]", "use_muon=True", "order"],
    ),
    "use_muon swapped": (
        lambda s: edit_group(s, 3, use_muon=True),
        [r"param_groups\[3\]", "use_muon=False", "True"],
    ),
    "a group too few": (lambda s: s["param_groups"].pop(), ["number of parameter groups"]),
    "a parameter too few": (lambda s: s["param_groups"][0]["params"].pop(), ["size"]),
    **{
        f"{key}={value} in group {number}": (
            lambda s, key=key, value=value, number=number: edit_group(s, number, **{key: value}),
            [rf"param_groups\[{number}\] of the checkpoint", key, "must be|known|list"],
        )
        for key, value, number in [
            ("lr", NAN, 3),
            ("lr", -1.0, 0),
            ("lr", None, 3),
            ("momentum", 1.0, 2),
            ("weight_decay", INF, 3),
            ("adamw_betas", (0.9, 1.0), 3),
            ("adamw_eps", "small", 3),
            ("adjust_lr", "rms", 2),
            ("adjust_lr", 0.0, 2),
            ("adjust_lr", True, 2),
            ("ns_steps", 0, 2),
            ("ns_coefficients", "newton", 2),
            ("ns_coefficients", [(2.0, -1.5, 0.5)], 2),
            ("momentum_dtype", torch.int8, 2),
            ("beta2", 2.0, 2),
            ("maximize", "yes", 3),
            ("use_muon", 1, 0),
            ("use_muon", torch.ones(2), 0),
            ("use_muon", torch.ones((), device="meta"), 3),
        ]
    },
}


@pytest.mark.parametrize("edit", BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_checkpoint_that_does_not_fit_loads_nothing(edit, steps):
    change, patterns = edit
    saved = copy.deepcopy(trained(3, beta2=0.9, lr=0.5).state_dict())
    change(saved)
    torch.manual_seed(1)
    optim = trained(steps, beta2=0.9)
    twin, untouched = copy.deepcopy(optim), copy.deepcopy(saved)
    assert_refused(optim, lambda: optim.load_state_dict(saved), *patterns)
    assert bool(optim.state) is bool(steps)
    assert repr(saved) == repr(untouched)
    assert_steps_like(optim, twin)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("value", [None, torch.ones(2), torch.ones((), device="meta")], ids=str)
def test_use_muon_of_another_type_in_a_checkpoint_of_nanochats_groups_is_refused(number, value):
    optim = optimizer.MuonAdamW(groups_by_kind())
    saved = optim.state_dict()
    edit_group(saved, number, use_muon=value)
    assert_raises(
        lambda: optim.load_state_dict(saved),
        rf"param_groups\[{number}\] of the checkpoint: use_muon must be True or False",
    )


# DTensors, on one rank


def on_one_rank_dtensor(placement: str, shape: tuple[int, ...] = (4, 4)) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    placements = {"shard": Shard(0), "replicate": Replicate(), "partial": Partial()}
    return DTensor.from_local(torch.randn(shape), mesh, [placements[placement]])


def refuse_partial_parameters() -> None:
    for group in (muon_group, adamw_group):
        partial = nn.Parameter(on_one_rank_dtensor("partial"))
        bad = group(parameter(4, 4), partial, names=[GOOD, W])
        patterns = (W, "Partial", "redistribute")
        assert_raises(lambda bad=bad: Muon([*good_groups(), bad]), *patterns)
        optim = trained(1)
        assert_refused(optim, lambda o=optim, bad=bad: o.add_param_group(bad), *patterns)


def test_a_partial_parameter_is_refused():
    run_ranks(refuse_partial_parameters, 1)


def refuse_gradients_of_another_layout() -> None:
    for use_muon in (True, False):
        for found in ("replicate", "partial", "plain"):
            sharded = nn.Parameter(on_one_rank_dtensor("shard"))
            optim = trained(0)
            optim.add_param_group({"params": [(W, sharded)], "use_muon": use_muon})
            grad = torch.ones(4, 4) if found == "plain" else on_one_rank_dtensor(found)
            sharded.grad = grad
            for steps in range(2):
                before = snapshot_without(optim, sharded)
                assert_raises(optim.step, W, r"Shard\(dim=0\)|S\(0\)", "redistribute")
                assert_equal(snapshot_without(optim, sharded), before)
                assert bool(optim.state) is bool(steps)
                sharded.grad = on_one_rank_dtensor("shard")
                optim.step()
                set_gradients_without(optim, sharded)
                sharded.grad = grad


def snapshot_without(optim: Any, sharded: torch.Tensor) -> list[Any]:
    """`snapshot` with the shards of one DTensor in its place."""
    held: list[Any] = [sharded.to_local().detach().clone()]
    held += [v.to_local().clone() for v in optim.state.get(sharded, {}).values() if v.ndim]
    for p in params_of(optim):
        if p is not sharded:
            state = optim.state.get(p, {})
            held += [p.detach().clone(), {key: value.clone() for key, value in state.items()}]
    return held


def set_gradients_without(optim: Any, sharded: torch.Tensor) -> None:
    for p in params_of(optim):
        if p is not sharded:
            p.grad = torch.randn_like(p)


def test_a_gradient_of_another_layout_than_its_parameter_stops_the_step():
    run_ranks(refuse_gradients_of_another_layout, 1)


WORLD_TOO_EARLY: dict[str, Callable[..., Any]] = {
    "Muon": lambda: Muon([muon_group(parameter(4, 3))], process_group=dist.group.WORLD),
    "MuonAdamW": lambda: optimizer.MuonAdamW(
        [{"kind": "muon", "params": [parameter(4, 3)]}], process_group=dist.group.WORLD
    ),
    "keller_jordan": lambda: optimizer.presets.keller_jordan(
        [parameter(4, 3)], process_group=dist.group.WORLD
    ),
    "dion": lambda: optimizer.presets.dion([parameter(4, 3)], dist.group.WORLD),
    "set": lambda: setattr(Muon([muon_group(parameter(4, 3))]), "process_group", dist.group.WORLD),
}


@pytest.mark.parametrize("how", WORLD_TOO_EARLY)
def test_the_default_group_before_it_is_initialized_is_refused(how, monkeypatch):
    WORLD_TOO_EARLY[how]()  # one process has no other ranks to forget
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ValueError, match=r"WORLD is before init_process_group\(\), and torchrun"):
        WORLD_TOO_EARLY[how]()


@pytest.mark.parametrize("preset", ["keller_jordan", "dion"])
def test_who_leaves_the_process_group_out_may_initialize_it_later(preset, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert Muon([muon_group(parameter(4, 3))]).process_group is None
    assert Muon(**getattr(optimizer.presets, preset)([parameter(4, 3)])).process_group is None


def refuse_dtensors_without_a_process_group() -> None:
    sharded = nn.Parameter(on_one_rank_dtensor("shard"))
    dist.destroy_process_group()
    for group in (muon_group, adamw_group):
        bad = group((W, sharded))
        assert_raises(lambda bad=bad: Muon([bad]), W, "DTensor", "process group")
        optim = trained(1)
        assert_refused(optim, lambda o=optim, bad=bad: o.add_param_group(bad), W, "process group")


def test_a_dtensor_without_a_process_group_is_refused():
    run_ranks(refuse_dtensors_without_a_process_group, 1)


def matrices_and_biases(model: nn.Module, **options: Any) -> Any:
    return Muon(optimizer.muon.get_default_muon_param_groups(model, **options))


def warnings_of(model: nn.Module, optim: Any, steps: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optim.step()
    return [f"{Path(w.filename).name}: {w.message}" for w in caught]


@pytest.mark.parametrize("attribute", ["weight", "bias"])
def test_one_parameter_that_was_replaced_stops_the_step(attribute):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = matrices_and_biases(model)
    assert not warnings_of(model, optim, 2)
    optim.zero_grad()
    setattr(model[1], attribute, parameter(*getattr(model[1], attribute).shape))
    model(torch.ones(2, 4)).sum().backward()
    says = rf"no gradient on 1\.{attribute}, and by now the model holds another parameter"
    assert_refused(optim, optim.step, says)


def test_a_parameter_in_whose_place_another_of_the_groups_is_trained_stops_no_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optim = matrices_and_biases(model)
    model[1].weight = model[0].weight  # tied after the groups were made
    model[2].weight = parameter(4, 4)
    optim.add_param_group(muon_group(model[2].weight))
    weights = [model[0].weight.clone(), model[2].weight.clone()]
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    assert not torch.equal(model[0].weight, weights[0])
    assert not torch.equal(model[2].weight, weights[1])


def test_an_optimizer_that_trains_nothing_says_so_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = matrices_and_biases(model)
    assert not warnings_of(model, optim, 1)
    model.requires_grad_(False)  # as for adapters that the groups do not have
    adapted = nn.Sequential(model, nn.Linear(4, 4))
    (message,) = warnings_of(adapted, optim, 3)
    assert "test_errors.py: step() trains nothing, as all parameters are frozen" in message
    for layer in model:
        layer.bias.requires_grad_(True)
    optim = Muon(
        [
            muon_group(*(layer.weight for layer in model)),
            adamw_group(*(layer.bias for layer in model)),
        ]
    )
    (message,) = warnings_of(model, optim, 3)
    assert "step() trains no matrix by Muon, as all of them are frozen" in message
    params = (p for p in model.parameters())
    list(params)
    optim = Muon([muon_group(*params)])
    (message,) = warnings_of(model, optim, 3)
    assert "step() trains nothing, as all parameters are missing" in message


# Weights of classes of their own


class Int8Weight(torch.Tensor):
    """Integers with a scale, which does one tensor's operations, and none of lists."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            made = cls(func(args[0].integers), func(args[0].scale))
            return return_and_correct_aliasing(func, args, kwargs, made)
        if any(word in str(func) for word in ("foreach", "fused", "as_strided")):
            raise NotImplementedError(f"{cls.__name__} has no {func}")
        plain = [a.integers * a.scale if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_weight_of_a_class_without_list_operations_stops_the_step_before_anything_changed(
    use_muon,
):
    integers = torch.randint(-127, 128, (4, 6), dtype=torch.int8)
    quantized = nn.Parameter(Int8Weight(integers, torch.tensor(0.01)))
    group = muon_group if use_muon else adamw_group
    groups = [group(("a", parameter(4, 6))), group(("b", quantized))]
    optim = Muon(groups)
    a, b = params_of(optim)
    a.grad, b.grad = torch.ones(4, 6), torch.ones(4, 6)
    before = a.detach().clone()
    assert_raises(optim.step, "b is a Int8Weight, of which lists can't be updated")
    assert not optim.state and not optim.is_broken and torch.equal(a, before)
    b.requires_grad_(False)  # as quantized weights under adapters are
    optim.step()
    assert not torch.equal(a, before)


# Words of other optimizers, and typos

MISTAKES = {  # what it is answered with
    "betas": "use 'adamw_betas' .for AdamW; Muon has 'momentum'",
    "eps": "use 'adamw_eps' .for AdamW, 'ns_eps' for the orthogonalization",
    "wd": "use 'weight_decay'",
    "learning_rate": "use 'lr'",
    "adjust_lr_fn": "use 'adjust_lr' .torch's None is 'original'",
    "fused": "leave it out: AdamW is fused by itself",
    "amsgrad": "leave it out",
    "mu": "use 'momentum'",
    "num_ns_steps": "use 'ns_steps'",
    "ns_step": "did you mean 'ns_steps'",
    "weigth_decay": "did you mean 'weight_decay'",
}
each_mistake = pytest.mark.parametrize("word, answer", MISTAKES.items(), ids=MISTAKES)
MEANS_NOTHING = "that means nothing here; {}"


@each_mistake
def test_an_argument_that_muon_does_not_have_is_answered_with_what_to_write(word, answer):
    says = rf"Muon\(\) got an unexpected keyword argument '{word}': {answer}"
    assert_raises(lambda: Muon(good_groups(), **{word: 1}), says, error=TypeError)
    says = says.replace("Muon", "MuonAdamW", 1)
    if word not in ("betas", "eps"):  # nanochat's
        make = lambda: optimizer.MuonAdamW(groups_by_kind(), **{word: 1})  # noqa: E731
        assert_raises(make, says, error=TypeError)
    says = says.replace("MuonAdamW", "describe", 1)
    assert_raises(lambda: optimizer.describe(model(), **{word: 1}), says, error=TypeError)
    says = rf"Motif's Muon has no argument '{word}' \({answer}"
    assert_raises(lambda: optimizer.presets.motif(good_groups(), **{word: 1}), says)
    groups = [{**good_groups()[0], word: 1}]
    assert_raises(lambda: optimizer.presets.motif(groups), rf"has '{word}', .* has not \({answer}")


def test_presets_propose_only_what_their_source_has():
    make = optimizer.presets.torch_muon
    assert_raises(lambda: make([parameter(2, 2)], learning_rate=1), r"\(use 'lr'\); it has lr, ")
    assert_raises(lambda: make([parameter(2, 2)], betas=1), "has no argument 'betas'; it has lr, ")


def test_unknown_arguments_are_answered_under_torchrun_too(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert_raises(lambda: Muon(good_groups(), wd=1), "use 'weight_decay'", error=TypeError)
    assert_raises(lambda: Muon(good_groups(), zzz=1), "unexpected .*'zzz'$", error=TypeError)


@pytest.mark.parametrize("word, answer", [item for item in MISTAKES.items() if item[0] != "fused"])
def test_a_group_key_that_means_nothing_is_answered_wherever_it_comes_from(word, answer):
    says = [rf"param_groups\[3\].* has a key '{word}'", MEANS_NOTHING.format(answer)]
    groups = good_groups()
    groups[3][word] = 1
    assert_raises(lambda: Muon(groups), *says)
    for optim in trained(0), trained(2):
        twin = copy.deepcopy(optim)
        optim.param_groups[3][word] = 1
        assert_refused(optim, optim.step, *says)
        assert_refused(optim, optim.state_dict, *says)
        saved = copy.deepcopy(twin.state_dict())
        saved["param_groups"][3][word] = 1
        del optim.param_groups[3][word]
        assert_refused(optim, lambda o=optim, s=saved: o.load_state_dict(s), "checkpoint", *says)
        assert_steps_like(optim, twin)


def test_a_key_for_all_groups_that_is_set_later_is_refused():
    optim = trained(1)
    optim.param_groups[2]["chunk_size"] = 4
    assert_refused(optim, optim.step, r"param_groups\[2\] has 'chunk_size'.*give it to Muon")


OWN_KEYS: dict[Any, Any] = {
    # of torch's schedulers, timm, Lightning, Megatron, schedule-free optimizers, GaLore
    "fused": False,  # torchtitan's
    **dict.fromkeys(["initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"], 0.1),
    **dict.fromkeys(["swa_lr", "lr_scale", "lr_mult", "wd_mult", "weight_decay_mult"], 0.1),
    **dict.fromkeys(["max_weight_decay", "start_wd", "warmup_steps", "rank", "scale", "k"], 1),
    **{"name": "decoder", "is_expert_parallel": False, "tag": None, 7: "a number"},
}


def test_keys_of_schedulers_and_trainers_are_theirs():
    optim, twin = trained(0), trained(0)
    for number, group in enumerate(optim.param_groups):
        for p, other in zip(group["params"], twin.param_groups[number]["params"]):
            other.data.copy_(p)
        group.update(OWN_KEYS)
    assert_steps_like(optim, twin)
    optim.load_state_dict(copy.deepcopy(optim.state_dict()))
    assert_steps_like(optim, twin)
    assert all(
        group[key] == value for group in optim.param_groups for key, value in OWN_KEYS.items()
    )
    Muon([{**group, **OWN_KEYS} for group in good_groups()])


def refuse_a_key_that_one_rank_has() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optim = Muon([muon_group((W, weight))], process_group=dist.group.WORLD)
    for _ in range(2):
        weight.grad = torch.eye(4)
        before = weight.detach().clone()
        says = [MEANS_NOTHING.format("did you mean 'ns_steps'")]
        if dist.get_rank() == 1:
            optim.param_groups[0]["ns_step"] = 3
        else:
            says.append("rank 1")
        assert_raises(optim.step, *says)
        assert torch.equal(weight, before)
        optim.param_groups[0].pop("ns_step", None)
        optim.step()
        assert not torch.equal(weight, before)


def test_a_key_that_means_nothing_on_one_rank_stops_the_step_of_all():
    run_ranks(refuse_a_key_that_one_rank_has, 2)


# Names that almost match


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterDict({"w1": torch.zeros(2, 4, 4)})
        self.norm = nn.LayerNorm(4)


def test_an_expert_key_without_a_match_proposes_the_component_that_is_nearest():
    model = Experts()
    make = optimizer.get_default_muon_param_groups
    for key, near in {"expert": "experts", "expertz.w1": "experts.w1"}.items():
        with pytest.warns(UserWarning, match=f"component '{key}'; did you mean '{near}'"):
            make(model, expert_keys=[key])
        assert f"did you mean '{near}'" in " ".join(
            str(optimizer.describe(model, expert_keys=[key])).split()
        )
    with pytest.warns(UserWarning, match="has a component 'router'$"):
        make(model, expert_keys=["router"])


def test_a_split_pattern_without_a_match_proposes_the_component_that_is_nearest():
    group = muon_group(("layers.0.qkv.weight", parameter(6, 2)))
    with pytest.warns(UserWarning, match="'qvk' matches no matrix; did you mean 'qkv'"):
        Muon([group], split={"qvk": 2})


# Checkpoints of other optimizers


def torch_adamw(params: list[nn.Parameter]) -> Any:
    return torch.optim.AdamW(params)


def torch_muon(params: list[nn.Parameter]) -> Any:
    return torch.optim.Muon(params)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("make", [torch_adamw, torch_muon], ids=["torch_adamw", "torch_muon"])
def test_a_checkpoint_of_torchs_optimizers_names_what_loads_it(make, groups):
    params = [parameter(4, 4), parameter(3, 3)]
    theirs = make(params)
    for p in params:
        p.grad = torch.randn_like(p)
    theirs.step()
    divided = [params] if groups == 1 else [[p] for p in params]
    optim = Muon([muon_group(*each) for each in divided])
    says = rf"load_foreign_state_dict\(.*kind='{make.__name__}'\)"
    assert_refused(optim, lambda: optim.load_state_dict(theirs.state_dict()), says)
    assert_refused(
        optim, lambda: optim.load_state_dict([theirs.state_dict()]), "load_foreign_state_dict"
    )
    optim.load_foreign_state_dict(theirs.state_dict(), kind=make.__name__, params=params)


def test_a_checkpoint_of_another_muon_that_does_not_load_names_what_loads_it():
    optim = Muon(good_groups()[:2])
    saved = copy.deepcopy(optim.state_dict())
    for group in saved["param_groups"]:
        own = group.keys() - {"params", "lr", "weight_decay", "use_muon"}
        for key in own:
            del group[key]
    saved["param_groups"][1]["betas"] = (0.9, 0.95)
    kind = r"like those of kind 'keller_jordan', which load_foreign_state_dict"
    assert_refused(optim, lambda: optim.load_state_dict(saved), "'betas'", kind)


# Groups made before the model was sharded


def refuse_groups_made_before_sharding() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optim = matrices_and_biases(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    says = r"model holds another parameter as 0\.weight .* after fully_shard"
    assert_refused(optim, optim.step, says)
    optim = matrices_and_biases(model)
    assert not warnings_of(model, optim, 2)
    optim.zero_grad()
    model.set_reshard_after_backward(False)  # leaves unsharded parameters in the modules
    model(torch.ones(2, 4)).sum().backward()
    optim.zero_grad()
    with pytest.warns(UserWarning, match="found no gradient on any parameter: nothing"):
        optim.step()


def test_groups_made_before_fully_shard_stop_the_first_step():
    run_ranks(refuse_groups_made_before_sharding, 1)


def test_groups_made_of_a_model_on_meta_stop_the_first_step():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    optim = matrices_and_biases(model)
    model.to_empty(device="cpu")
    model(torch.ones(2, 4)).sum().backward()
    assert_raises(optim.step, r"model holds another parameter as 0\.weight than its groups")


def test_a_model_whose_groups_were_made_is_copied_saved_and_let_go():
    model = nn.Linear(4, 4)
    groups = optimizer.get_default_muon_param_groups(model)
    assert all(group.keys() == {"params", "names", "use_muon"} for group in groups)
    copied = copy.deepcopy(model)
    torch.save(copied, io.BytesIO())
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
    optim = Muon(groups)
    with pytest.warns(UserWarning, match="found no gradient on any parameter: nothing"):
        optim.step()
