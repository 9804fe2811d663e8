"""Weights in bf16 that lose nothing: residuals of 16 bits, and rounding at random.

A twin with weights in fp32 gets the same gradients, rounded to bf16, and everything has to be
equal to the bit: the bf16 weight and its residual make the twin's weight.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from checkpointed import CLIP, LAYOUTS, LOGITS, Network, Run, load_checkpoint, save_checkpoint
from comparisons import adamw_without_fused_kernel
from kernel import optimizer
from layouts import case, local, part_for
from ranks import run_ranks

Host = optimizer.SimulatedHost
VARIANTS: list[dict[str, Any]] = [
    {},
    {**CLIP, "cautious": True},
    {"decay_lr": "adjusted", "chunk_size": 1},
]


def in_bf16(model: Network) -> None:
    model.bfloat16()


def rounded_to_bf16(model: Network) -> None:
    model.bfloat16().float()


def exact_run(layout: str, **options: Any) -> Run:
    return Run.on(layout, change=in_bf16, weight_rounding="exact", **options)


def fp32_run(layout: str, **options: Any) -> Run:
    return Run.on(layout, change=rounded_to_bf16, **options)


def train(run: Run, steps: Iterable[int]) -> None:
    """With gradients that bf16 holds."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, p in run.model.named_parameters():
            grad = torch.randn(p.shape, generator=generator).bfloat16()
            if p.requires_grad and not name.startswith("idle"):
                p.grad = part_for(p, grad.to(p.dtype))
        has_clip = run.optim._clip.config is not None
        run.optim.step(qk_logits=LOGITS if has_clip else None)


def rounded(exact: torch.Tensor) -> torch.Tensor:
    """To the nearest in bf16, ties away from zero: by halves of 8 more bits, in fp64."""
    exponent = torch.frexp(exact.double()).exponent.clamp_min(-125)  # of subnormals, too
    scaled = torch.ldexp(exact.double(), 8 - exponent)
    nearest = torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)
    return torch.ldexp(nearest, exponent - 8).to(torch.bfloat16)


def assert_exact(run: Run, twin: Run) -> None:
    exact = run.optim.exact_weights()
    twins = dict(twin.model.named_parameters())
    trained = [name for name, p in twins.items() if p.requires_grad]
    assert sorted(exact) == sorted(trained)
    for name, param in run.model.named_parameters():
        if not param.requires_grad:
            continue
        expected = local(twins[name])
        assert torch.equal(local(exact[name]), expected), name
        assert torch.equal(local(param), rounded(expected)), name
        state, twin_state = run.optim.state[param], twin.optim.state[twins[name]]
        assert state.keys() - twin_state.keys() == {"weight_residual"}
        for key, value in twin_state.items():
            assert state[key].dtype == value.dtype, f"{key} of {name}"
            assert torch.equal(local(state[key]), local(value)), f"{key} of {name}"


# -- exact -----------------------------------------------------------------------------------------


def step_beside_fp32(layouts: tuple[str, ...]) -> None:
    for number, layout in enumerate(layouts):
        options = VARIANTS[number % len(VARIANTS)]
        with case(f"{layout}, {options}"):
            run, twin = exact_run(layout, **options), fp32_run(layout, **options)
            for each in (run, twin):
                train(each, range(4))
            assert_exact(run, twin)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_exact_steps_are_those_of_fp32_weights_on_every_layout(ranks):
    run_ranks(step_beside_fp32, ranks, LAYOUTS[ranks])


@pytest.mark.parametrize("hosts_parameters", [False, True], ids=["state", "parameters, too"])
@pytest.mark.parametrize("rounding", ["exact", "stochastic"])
def test_offloaded_state_makes_no_difference(rounding, hosts_parameters):
    """Windows are so small that residuals come in pieces."""
    options = {"weight_rounding": rounding, "change": in_bf16, **CLIP}
    run, twin = Run.on("one device", **options), Run.on("one device", **options)
    backend = Host(delay=1e-5, hosts_parameters=hosts_parameters)
    run.optim.turn_on_cpu_offload(slot_bytes=16384, backend=backend)
    for each in (run, twin):
        train(each, range(2))
    with torch.no_grad():  # which the residual of the host has to follow
        for each in (run, twin):
            each.model.lm_head.weight.mul_(2)
            each.model.blocks[0].up.weight.mul_(2)
    for each in (run, twin):
        train(each, range(2, 4))
    run.optim.turn_off_cpu_offload()
    found, expected = run.held(), twin.held()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_exact_weights_are_loaded_while_their_residuals_are_offloaded():
    options = {"weight_rounding": "exact", "change": in_bf16}
    run, twin = Run.on("one device", **options), Run.on("one device", **options)
    run.optim.turn_on_cpu_offload(backend=Host(delay=2e-3))
    for each in (run, twin):
        train(each, range(2))
    weights = {name: value + 1e-4 for name, value in twin.optim.exact_weights().items()}
    for each in (run, twin):
        each.optim.load_exact_weights(weights)
        each.train([3])
    run.optim.turn_off_cpu_offload()
    expected = twin.held()
    for name, value in run.held().items():
        assert torch.equal(value, expected[name]), name


def weights_of(shape: tuple[int, ...], **options: Any) -> tuple[nn.Parameter, Any]:
    param = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    group = {"params": [param], "names": ["w"], "use_muon": len(shape) == 2}
    return param, optimizer.Muon([group], **{"weight_rounding": "exact", **options})


def bits(*patterns: int) -> torch.Tensor:
    signed = [p - (1 << 32) if p >> 31 else p for p in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def test_any_fp32_number_is_a_weight_and_its_residual():
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator).to(torch.int32)
    numbers = patterns.view(torch.float32)
    halves = torch.arange(-300, 300, dtype=torch.int32) * 0x8000  # ties, zeros and subnormals
    numbers = torch.cat([numbers[numbers.isfinite()], halves.view(torch.float32)])
    numbers = numbers[numbers.abs() < 3e38]
    param, optim = weights_of(numbers.shape)
    optim.load_exact_weights({"w": numbers})
    assert torch.equal(optim.exact_weights()["w"].view(torch.int32), numbers.view(torch.int32))
    assert torch.equal(param.detach(), rounded(numbers))


def test_inf_stays_nan_stays_and_what_rounds_to_inf_comes_back_finite():
    largest, nans = bits(0x7F7FFFFF, 0xFF7FFFFF), bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001)
    infinite = torch.tensor([math.inf, -math.inf])
    param, optim = weights_of((7,))
    optim.load_exact_weights({"w": torch.cat([largest, infinite, nans])})
    assert torch.equal(param.detach()[:4].float(), torch.cat([infinite, infinite]))
    assert param.detach()[4:].isnan().all()
    exact = optim.exact_weights()["w"]
    assert torch.equal(exact[:4], torch.cat([largest, infinite]))
    assert exact[4:].isnan().all()


@pytest.mark.parametrize("shape", [(8, 8), (64,)], ids=["Muon", "AdamW"])
def test_small_steps_add_up_that_rounding_to_the_nearest_loses(shape):
    lengths = {}
    for rounding in ("nearest", "exact"):
        param, optim = weights_of(shape, weight_rounding=rounding, lr=1e-5, weight_decay=0.0)
        with torch.no_grad():
            param.fill_(1.0)
        for _ in range(10):
            param.grad = -torch.eye(*shape, dtype=torch.bfloat16) if len(shape) == 2 else None
            if param.grad is None:
                param.grad = -torch.ones(shape, dtype=torch.bfloat16)
            optim.step()
        exact = optim.exact_weights().get("w", param.detach().float())
        lengths[rounding] = (exact - 1.0).abs().max().item()
    assert lengths["nearest"] == 0.0
    assert lengths["exact"] == pytest.approx(
        1e-4 if len(shape) == 1 else 1e-4 * 0.2 * math.sqrt(8), rel=0.2
    )


def test_weights_that_were_changed_between_steps_win():
    changes: dict[str, Callable[[Run], Any]] = {
        "loaded": lambda run: run.model.load_state_dict(Network(True).bfloat16().state_dict()),
        "averaged": lambda run: [p.data_ptr() for p in run.model.parameters() if p.mul_(0.5) is p],
    }
    for name, change in changes.items():
        with case(name), torch.no_grad():
            run = exact_run("one device")
            train(run, range(2))
            change(run)
            for key, value in run.optim.exact_weights().items():
                assert torch.equal(value, run.model.get_parameter(key).float()), key
            train(run, [2])
            assert any(
                not torch.equal(value, run.model.get_parameter(key).float())
                for key, value in run.optim.exact_weights().items()
            )


@pytest.mark.parametrize("how", ["saved", "pickled", "frozen"])
def test_weights_that_were_changed_win_before_another_step_has_seen_them(how):
    run = exact_run("one device")
    train(run, range(2))
    model, optim = run.model, run.optim
    if how == "frozen":  # while steps are made
        model.lm_head.requires_grad_(False)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    if how == "saved":
        optim = exact_run("one device").optim
        for group, other in zip(optim.param_groups, run.optim.param_groups):
            for p, changed in zip(group["params"], other["params"]):
                p.data.copy_(changed)
        optim.load_state_dict(run.optim.state_dict())
    elif how == "pickled":
        model, optim = copy.deepcopy((run.model, run.optim))
    else:
        train(run, range(2, 4))
        model.lm_head.requires_grad_(True)
    exact = optim.exact_weights()
    names = ["lm_head.weight"] if how == "frozen" else sorted(exact)
    for name in names:
        assert torch.equal(exact[name], model.get_parameter(name).float()), name


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_weights_of_a_copy_that_were_changed_win_before_its_first_step(copied):
    run = exact_run("one device")
    train(run, range(2))
    expected = run.optim.exact_weights()
    for changed in (False, True):
        model, optim = copied((run.model, run.optim))
        if changed:
            model.load_state_dict(Network(True).bfloat16().state_dict())
            expected = {name: model.get_parameter(name).float() for name in expected}
        for name, value in optim.exact_weights().items():
            assert torch.equal(value, expected[name]), name


def test_a_shallow_copy_keeps_the_residuals_that_it_shares():
    run = exact_run("one device")
    train(run, range(2))
    shared = copy.copy(run.optim)
    train(run, [2])
    expected = run.optim.exact_weights()
    for name, value in shared.exact_weights().items():
        assert torch.equal(value, expected[name]), name


def test_residuals_of_another_memory_order_load():
    run, other = exact_run("one device"), exact_run("one device")
    train(run, range(2))
    saved = copy.deepcopy(run.optim.state_dict())
    for state in saved["state"].values():
        state["weight_residual"] = torch.stack(state["weight_residual"].unbind(-1)).movedim(0, -1)
    other.model.load_state_dict(run.model.state_dict())
    other.optim.load_state_dict(saved)
    for each in (run, other):
        train(each, [2])
    expected = run.optim.exact_weights()
    for name, value in other.optim.exact_weights().items():
        assert torch.equal(value, expected[name]), name
    param, before = other.model.lm_head.weight, copy.deepcopy(other.model.state_dict())
    state = other.optim.state[param]
    state["weight_residual"] = torch.stack(state["weight_residual"].unbind(-1)).movedim(0, -1)
    with pytest.raises(ValueError, match=r"weight_residual of lm_head.weight .* not contiguous"):
        train(other, [3])
    assert all(torch.equal(value, before[name]) for name, value in other.model.named_parameters())


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_loaded_residual_survives_whichever_is_loaded_first(first):
    run, other = exact_run("one device"), exact_run("one device", zeroed=True)
    train(other, [7])
    train(run, range(2))
    content = {"model": run.model.state_dict(), "optimizer": run.optim.state_dict()}
    loads = {"model": other.model, "optimizer": other.optim}
    for name in sorted(loads, key=lambda name: name != first):
        loads[name].load_state_dict(content[name])
    expected = run.optim.exact_weights()
    for name, value in other.optim.exact_weights().items():
        assert torch.equal(value, expected[name]), name


# -- names -----------------------------------------------------------------------------------------


class Beside(nn.Module):
    """A matrix of its own beside that of a layer called ``module``, as wrappers call it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 4)
        self.weight = nn.Parameter(torch.zeros(4, 6))


def of_layers() -> nn.Module:
    return nn.Sequential(Beside(), nn.Linear(4, 4), nn.Linear(4, 2))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def wrapped_layers(model: nn.Module) -> nn.Module:
    model[0], model[1] = checkpoint_wrapper(model[0]), compiled(model[1])
    return model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "a component called module at the root": lambda model: model[0],
    "compile": compiled,
    "checkpoint_wrapper": checkpoint_wrapper,
    "DataParallel": nn.DataParallel,
    "layers": wrapped_layers,
    "all": lambda model: compiled(nn.DataParallel(checkpoint_wrapper(wrapped_layers(model)))),
}


def check_keys(wrap: Callable[[nn.Module], nn.Module], **options: Any) -> None:
    """Weights that bf16 does not hold come from `load_exact_weights` to a model in fp32."""
    model, wide = wrap(of_layers().bfloat16()), wrap(of_layers())
    groups = optimizer.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, weight_rounding="exact", **options)
    weights = {
        name: torch.full(p.shape, number + 2**-15)
        for number, (name, p) in enumerate(model.named_parameters(), start=1)
    }
    optim.load_exact_weights(weights)
    wide.load_state_dict({**model.state_dict(), **optim.exact_weights()})
    for name, p in wide.named_parameters():
        assert torch.equal(p, weights[name]), name


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_exact_weights_have_the_models_own_keys_however_it_is_wrapped(wrap):
    check_keys(wrap)


def check_keys_under_ddp() -> None:
    group = dist.group.WORLD
    for wrap in (nn.parallel.DistributedDataParallel, ddp_of_compiled):
        check_keys(wrap)
        check_keys(wrap, process_group=group)
        check_keys(wrap, process_group=group, grad_reduce="mean")


def ddp_of_compiled(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(compiled(model))


def test_exact_weights_have_the_models_own_keys_under_ddp():
    run_ranks(check_keys_under_ddp, 2)


def two_weights(*names: str) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16)) for _ in names]
    group = {"params": params, "names": list(names), "use_muon": True}
    return params, optimizer.Muon([group], weight_rounding="exact")


def test_exact_weights_load_into_a_model_that_is_wrapped_otherwise():
    params, optim = two_weights("_orig_mod.0.weight", "_orig_mod.1.weight")
    ones = torch.ones(4, 4)
    optim.load_exact_weights({"0.weight": ones, "module._orig_mod.1.weight": 2 * ones})
    assert torch.equal(params[0], ones.bfloat16()) and torch.equal(params[1], 2 * ones.bfloat16())


def test_exact_weights_of_two_parameters_of_one_name_are_refused():
    params, optim = two_weights("weight", "weight")
    with pytest.raises(ValueError, match="2 parameters are called weight, so that exact weights"):
        optim.exact_weights()
    with pytest.raises(ValueError, match="2 parameters are called weight, so that exact weights"):
        optim.load_exact_weights({"weight": torch.ones(4, 4)})
    assert not any(map(torch.any, params))


def test_exact_weights_need_names():
    param = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optim = optimizer.Muon([{"params": [param], "use_muon": True}], weight_rounding="exact")
    with pytest.raises(ValueError, match=r"param_groups\[0\]: exact weights need names"):
        optim.exact_weights()


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (["a.weight", "_orig_mod.a.weight"], ["module.a.weight"], "no trainable .*'module.a.we"),
        (["a.weight", "b.weight"], ["a.weight", "_orig_mod.a.weight"], "a.weight, which is given"),
    ],
)
def test_exact_weights_whose_parameter_cannot_be_told_change_nothing(names, given, message):
    params, optim = two_weights(*names)
    with pytest.raises(ValueError, match=message):
        optim.load_exact_weights(dict.fromkeys(given, torch.ones(4, 4)))
    assert not any(map(torch.any, params))


def test_random_rounding_does_not_depend_on_wrappers():
    def train_wrapped(wrap: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = wrap(of_layers().bfloat16())
        groups = optimizer.get_default_muon_param_groups(model)
        optim = optimizer.Muon(groups, lr=1e-3, weight_rounding="stochastic")
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optim.step()
        return [p.detach() for p in model.parameters()]

    expected = train_wrapped(WRAPS["plain"])
    for name in ("compile", "DataParallel", "all"):
        for weight, other in zip(train_wrapped(WRAPS[name]), expected):
            assert torch.equal(weight, other), name


# -- checkpoints -----------------------------------------------------------------------------------


RUNS = {
    "exact": exact_run,
    "fp32": fp32_run,
    "stochastic": lambda layout, **options: Run.on(
        layout, change=in_bf16, weight_rounding="stochastic", **options
    ),
}


def begin(name: str, layout: str, directory: Path) -> None:
    run = RUNS[name](layout)
    train(run, range(3))
    save_checkpoint(run, directory / name)
    run.write(directory / f"{name} then.pt")


def resume(names: tuple[str, ...], layout: str, directory: Path) -> None:
    runs = {name: RUNS[name](layout, zeroed=True) for name in names}
    for name, run in runs.items():
        load_checkpoint(run, directory / name)
        run.check(directory / f"{name} then.pt", groups=False)
        train(run, range(3, 5))
    if "exact" in runs:
        assert_exact(runs["exact"], runs["fp32"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "others"),
    [
        (1, "one device", [(2, "FSDP2"), (4, "FSDP2 + TP")]),
        (2, "ZeRO-2", [(1, "one device"), (4, "HSDP, spread")]),
        (4, "EP + FSDP2", [(2, "DDP"), (2, "ZeRO-2")]),
    ],
)
def test_residuals_and_random_numbers_resume_on_other_layouts(ranks, layout, others, tmp_path):
    for name in RUNS:
        run_ranks(begin, ranks, name, layout, tmp_path)
    for other_ranks, other in others:
        run_ranks(resume, other_ranks, tuple(RUNS), other, tmp_path)


def convert(layout: str, directory: Path) -> None:
    """From exact weights to fp32 and back, with steps in between, beside a run that stays fp32."""
    stays, run = fp32_run(layout), exact_run(layout)
    for each in (stays, run):
        train(each, range(2))
    model, optim = get_state_dict(run.model, run.optim)
    dcp.save(
        {"model": {**model, **run.optim.exact_weights()}, "optim": optim},
        checkpoint_id=directory / "exact",
    )
    wide = fp32_run(layout, zeroed=True)
    load_checkpoint(wide, directory / "exact")
    for each in (stays, wide):
        train(each, range(2, 4))
    save_checkpoint(wide, directory / "fp32")
    back = exact_run(layout, zeroed=True)
    model, optim = get_state_dict(back.model, back.optim)
    content = {"model": {**model, **back.optim.exact_weights()}, "optim": optim}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # fp32 weights have no residuals
    dcp.load(content, checkpoint_id=directory / "fp32", planner=planner)
    weights = {name: content["model"].pop(name) for name in back.optim.exact_weights()}
    set_state_dict(
        back.model, back.optim, model_state_dict=model, optim_state_dict=content["optim"]
    )
    back.optim.load_exact_weights(weights)
    for each in (stays, back):
        train(each, range(4, 6))
    assert_exact(back, stays)


@pytest.mark.parametrize(("ranks", "layout"), [(1, "one device"), (2, "FSDP2"), (2, "ZeRO-2")])
def test_exact_weights_go_to_fp32_and_back_through_checkpoints(ranks, layout, tmp_path):
    run_ranks(convert, ranks, layout, tmp_path)


def test_checkpoints_whose_residuals_would_be_lost_are_refused():
    exact, wide = exact_run("one device"), fp32_run("one device")
    nearest = Run.on("one device", change=in_bf16)
    train(exact, [0])
    content = exact.optim.state_dict()
    with pytest.raises(ValueError, match=r"is torch\.float32, .* take the residual out"):
        wide.optim.load_state_dict(content)
    for state in content["state"].values():
        state.pop("weight_residual", None)
    with pytest.raises(ValueError, match="construct it with weight_rounding='exact'"):
        nearest.optim.load_state_dict(content)
    wide.optim.load_state_dict(content)


def test_a_run_that_goes_on_turns_the_option_on_behind_loading(tmp_path):
    """A checkpoint brings its groups' options, this one too."""
    before = Run.on("one device", change=in_bf16)
    train(before, [0])
    save_checkpoint(before, tmp_path)
    run = exact_run("one device")
    model, optim = get_state_dict(run.model, run.optim)
    content = {"model": model, "optim": optim}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(content, checkpoint_id=tmp_path, planner=planner)
    with pytest.raises(ValueError, match="without the option, and set it in param_groups then"):
        set_optimizer_state_dict(run.model, run.optim, content["optim"])
    run = Run.on("one device", change=in_bf16, zeroed=True)
    load_checkpoint(run, tmp_path)
    for group in run.optim.param_groups:
        group["weight_rounding"] = "exact"
    for name, value in run.optim.exact_weights().items():
        assert torch.equal(value, before.model.get_parameter(name).float()), name


# -- the example -----------------------------------------------------------------------------------


# -- stochastic ------------------------------------------------------------------------------------


def stochastic_on(layouts: tuple[str, ...], directory: Path, options: dict[str, Any]) -> None:
    for layout in layouts:
        with case(layout), adamw_without_fused_kernel():
            run = RUNS["stochastic"](layout, **options)
            train(run, range(4))
            if layout == "one device":
                run.write(directory / "expected.pt")
            else:
                run.check(directory / "expected.pt", groups=False)


@pytest.mark.parametrize(
    "options",
    [pytest.param(VARIANTS[0], marks=pytest.mark.slow), VARIANTS[1]],
    ids=["defaults", "QK-Clip, cautious"],
)
def test_random_numbers_are_the_same_on_every_layout(options, tmp_path):
    for ranks in (1, 2, 4):
        run_ranks(stochastic_on, ranks, LAYOUTS[ranks], tmp_path, options)


def test_the_expectation_of_a_rounded_weight_is_the_weight():
    size = 1 << 17
    for step in (3e-5, 1e-3):  # of 1/128, the distance between neighbours behind 1
        param, optim = weights_of((size,), weight_rounding="stochastic", lr=step, weight_decay=0.0)
        with torch.no_grad():
            param.fill_(1.0)
        param.grad = -torch.ones_like(param)
        optim.step()
        share = (param > 1).double().mean().item()
        expected = step * 128
        assert share == pytest.approx(expected, abs=5 * math.sqrt(expected / size))
        assert set(param.detach().tolist()) == {1.0, 1.0 + 1 / 128}


def test_step_and_name_or_else_group_and_index_each_change_the_random_numbers():
    def rounded_up(name: str | None = "w", number: int = 0, steps: int = 1) -> torch.Tensor:
        """Which weights of a parameter are rounded up, of three: two in a group, one in another."""
        params = [nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(3)]
        names = [str(n) if n != number else name for n in range(3)]
        groups = [
            {"params": params[at], "use_muon": False, "names": None if name is None else names[at]}
            for at in (slice(0, 2), slice(2, 3))
        ]
        options = {"lr": 1e-3, "weight_decay": 0.0, "weight_rounding": "stochastic"}
        optim = optimizer.Muon(groups, **options)
        for _ in range(steps):
            with torch.no_grad():
                for param in params:
                    param.fill_(1.0)
            optim.state.clear()
            for param in params:
                param.grad = -torch.ones_like(param)
            optim.step()
        assert optim.param_groups[0]["rounding_step"] == steps
        return (params[number] > 1).detach()

    assert torch.equal(rounded_up(), rounded_up())
    assert torch.equal(rounded_up(), rounded_up(number=2))
    others = [rounded_up(name="v"), rounded_up(steps=2)]
    others += [rounded_up(None, number) for number in range(3)]
    for one, other in itertools.combinations([rounded_up(), *others], 2):
        together = (one & other).double().mean().item()
        assert together == pytest.approx(0.128**2, abs=0.01)  # as if drawn apart


# -- options ---------------------------------------------------------------------------------------


def test_other_dtypes_are_left_alone_or_refused():
    weights = [nn.Parameter(torch.randn(4, 4, dtype=t)) for t in (torch.float32, torch.float64)]
    optim = optimizer.Muon([{"params": weights, "use_muon": True}], weight_rounding="exact")
    for param in weights:
        param.grad = torch.randn_like(param)
    optim.step()
    assert all(optim.state[param].keys() == {"momentum_buffer"} for param in weights)
    half = {"params": [nn.Parameter(torch.randn(4, 4).half())], "use_muon": True}
    for rounding in ("exact", "stochastic"):
        with pytest.raises(ValueError, match="is float16, of which 16 more bits"):
            optimizer.Muon([half], weight_rounding=rounding)
    with pytest.raises(ValueError, match="weight_rounding must be one of 'nearest', 'exact'"):
        weights_of((4, 4), weight_rounding="up")
    with pytest.raises(ValueError, match="'stochastic' is not capturable"):
        weights_of((4, 4), weight_rounding="stochastic", capturable=True)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"v": torch.zeros(4, 4)}, "there is no trainable parameter 'v' in bfloat16"),
        ({"w": torch.zeros(4, 5)}, r"w needs a tensor of \(4, 4\) in float32, plain"),
        ({"w": torch.zeros(4, 4).double()}, r"w needs a tensor of \(4, 4\) in float32, plain"),
    ],
)
def test_exact_weights_that_do_not_fit_change_nothing(weights, message):
    param, optim = weights_of((4, 4))
    with pytest.raises(ValueError, match=message):
        optim.load_exact_weights({"w": torch.ones(4, 4), **weights})
    assert not param.any()


def test_a_group_may_be_rounded_otherwise_than_others_and_change_its_mind():
    run = exact_run("one device")
    last = run.optim.param_groups[-1]
    last["weight_rounding"] = "nearest"
    train(run, range(2))
    names = {
        name for name, p in run.model.named_parameters() if id(p) in set(map(id, last["params"]))
    }
    assert names and not names & run.optim.exact_weights().keys()
    last["weight_rounding"] = "exact"
    train(run, range(2, 4))
    assert names <= run.optim.exact_weights().keys() | {"idle.bias"}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_residual_goes_when_steps_no_longer_keep_it(rounding):
    run = exact_run("one device")
    train(run, range(2))
    for group in run.optim.param_groups:
        group["weight_rounding"] = rounding
    train(run, range(2, 4))
    assert not any("weight_residual" in state for state in run.optim.state.values())
    run.optim.load_state_dict(run.optim.state_dict())  # which it takes back
    for group in run.optim.param_groups:
        group["weight_rounding"] = "exact"
    for name, value in run.optim.exact_weights().items():
        assert torch.equal(value, run.model.get_parameter(name).float()), name
