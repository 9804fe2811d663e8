"""Weights in bf16 that lose nothing: residuals of 16 bits, and rounding at random.

A twin with weights in fp32 gets the same gradients, rounded to bf16, and everything has to be
equal to the bit: the bf16 weight and its residual make the twin's weight. test_layouts.py shows
that this holds on every layout.
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from checkpointed import load_checkpoint, save_checkpoint
from comparisons import assert_equal
from kernel import optimizer
from layouts import EXACT, local, part_for
from model_layouts import LAYOUTS, Network
from ranks import on_ranks, run_ranks


class Run:
    """A model on a layout and its optimizer, trained by gradients that bf16 holds."""

    def __init__(self, rounding: str | None, layout: str = "", **options: Any):
        """Without ``rounding`` weights are in fp32, and begin as bf16 has them."""
        self.model = Network().bfloat16()
        if rounding is None:
            self.model.float()
        logits = {block: torch.tensor([3.0, 0.5]) for block in range(2)}
        self.logits = logits if "clip_config" in options else None
        told = LAYOUTS[layout].place(self.model) if layout else {}
        groups = optimizer.get_default_muon_param_groups(self.model, expert_keys=["experts"])
        options = {"weight_rounding": rounding or "nearest", "lr": 0.02, **EXACT, **told, **options}
        self.optim = optimizer.Muon(groups, expert_keys=["experts"], **options)

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for name, p in self.model.named_parameters():
                grad = torch.randn(p.shape, generator=generator).bfloat16()
                if p.requires_grad and not name.startswith("idle"):
                    p.grad = part_for(p, grad.to(p.dtype))
            self.optim.step(qk_logits=self.logits)

    def assert_exact(self, exact: dict[str, torch.Tensor], like_model: bool = False) -> None:
        """Its exact weights are those; of weights that were changed, what the model holds."""
        for name, value in self.optim.exact_weights().items():
            expected = self.model.get_parameter(name).float() if like_model else exact[name]
            assert torch.equal(local(value), local(expected)), name


def exact_run(layout: str = "", **options: Any) -> Run:
    return Run("exact", layout, **options)


def rounded(exact: torch.Tensor) -> torch.Tensor:
    """To the nearest in bf16, ties away from zero: by halves of 8 more bits, in fp64."""
    exponent = torch.frexp(exact.double()).exponent.clamp_min(-125)  # of subnormals, too
    scaled = torch.ldexp(exact.double(), 8 - exponent)
    nearest = torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)
    return torch.ldexp(nearest, exponent - 8).to(torch.bfloat16)


def assert_like_fp32(run: Run, twin: Run) -> None:
    exact = run.optim.exact_weights()
    twins = dict(twin.model.named_parameters())
    assert sorted(exact) == sorted(name for name, p in twins.items() if p.requires_grad)
    for name, param in run.model.named_parameters():
        if not param.requires_grad:
            continue
        expected = local(twins[name])
        assert torch.equal(local(exact[name]), expected), name
        assert torch.equal(local(param), rounded(expected)), name
        state, twin_state = run.optim.state[param], twin.optim.state[twins[name]]
        assert state.keys() - twin_state.keys() <= {"weight_residual"}
        for key, value in twin_state.items():
            assert state[key].dtype == value.dtype, f"{key} of {name}"
            assert torch.equal(local(state[key]), local(value)), f"{key} of {name}"


# -- exact -----------------------------------------------------------------------------------------

CLIP = {"clip_config": {"head_dim": 8, "threshold": 1.0}}
OPTIONS: list[dict[str, Any]] = [
    {},
    {**CLIP, "cautious": True},
    {"decay_lr": "adjusted", "chunk_size": 1, "beta2": 0.9},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS, ids=["defaults", "QK-Clip, cautious", "one by one"])
def test_exact_steps_are_those_of_fp32_weights(options):
    run, twin = exact_run(**options), Run(None, **options)
    for each in (run, twin):
        each.train(range(4))
    assert_like_fp32(run, twin)


def weights_of(
    *shapes: tuple[int, ...], names: Any = ("w",), **options: Any
) -> tuple[list[nn.Parameter], Any]:
    """Zeros in bf16; matrices are Muon's."""
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    group = {"params": params, "names": names, "use_muon": len(shapes[0]) == 2}
    return params, optimizer.Muon([group], **{"weight_rounding": "exact", **options})


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
    [param], optim = weights_of(numbers.shape)
    optim.load_exact_weights({"w": numbers})
    assert torch.equal(optim.exact_weights()["w"].view(torch.int32), numbers.view(torch.int32))
    assert torch.equal(param.detach(), rounded(numbers))


def test_exact_weights_that_are_loaded_between_steps_stay():
    [param], optim = weights_of((4, 4), lr=0.0)
    weights = {"w": torch.full((4, 4), 1 + 2**-15)}
    param.grad = torch.ones_like(param)
    optim.step()
    optim.load_exact_weights(weights)
    param.grad = torch.ones_like(param)
    optim.step()
    assert torch.equal(optim.exact_weights()["w"], weights["w"])


def test_inf_stays_nan_stays_and_what_rounds_to_inf_comes_back_finite():
    largest, nans = bits(0x7F7FFFFF, 0xFF7FFFFF), bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001)
    infinite = torch.tensor([math.inf, -math.inf])
    [param], optim = weights_of((7,))
    optim.load_exact_weights({"w": torch.cat([largest, infinite, nans])})
    assert torch.equal(param.detach()[:4].float(), torch.cat([infinite, infinite]))
    assert param.detach()[4:].isnan().all()
    exact = optim.exact_weights()["w"]
    assert torch.equal(exact[:4], torch.cat([largest, infinite]))
    assert exact[4:].isnan().all()


# -- weights that others change --------------------------------------------------------------------


def halve(run: Run) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.5)


def load_others(run: Run) -> None:
    run.model.load_state_dict({k: v + 1 for k, v in run.model.state_dict().items()})


def save_and_load(run: Run) -> None:
    halve(run)
    again = exact_run()
    again.model.load_state_dict(run.model.state_dict())
    again.optim.load_state_dict(run.optim.state_dict())
    run.model, run.optim = again.model, again.optim


def copy_and_load(run: Run) -> None:
    run.model, run.optim = copy.deepcopy((run.model, run.optim))
    load_others(run)


def train_frozen(run: Run) -> None:
    """Freezes weights while steps are made, and changes them meanwhile."""
    trained = [p for p in run.model.parameters() if p.requires_grad]
    for p in trained[1:]:
        p.requires_grad_(False)
    halve(run)
    run.train([2, 3])
    halve(run)
    for p in trained:
        p.requires_grad_(True)


@pytest.mark.parametrize("change", [halve, load_others, save_and_load, copy_and_load, train_frozen])
def test_weights_that_were_changed_between_steps_win(change):
    run = exact_run()
    run.train(range(2))
    change(run)
    run.assert_exact({}, like_model=True)
    run.train([4])
    with pytest.raises(AssertionError):
        run.assert_exact({}, like_model=True)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "copy": lambda pair: map(copy.copy, pair),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_keep_their_residuals(how):
    run = exact_run()
    run.train(range(2))
    expected = run.optim.exact_weights()
    run.model, run.optim = COPIES[how]((run.model, run.optim))
    run.assert_exact(expected)


def test_exact_weights_are_loaded_while_their_residuals_are_offloaded():
    run, twin = exact_run(), exact_run()
    run.optim.turn_on_cpu_offload(backend=optimizer.SimulatedHost(delay=2e-3))
    for each in (run, twin):
        each.train(range(2))
    weights = {name: value + 1e-4 for name, value in twin.optim.exact_weights().items()}
    for each in (run, twin):
        each.optim.load_exact_weights(weights)
        each.train([3])
    run.optim.turn_off_cpu_offload()
    run.assert_exact(twin.optim.exact_weights())


def test_residuals_of_another_memory_order_load_and_are_refused_where_they_were_put():
    def reordered(t: torch.Tensor) -> torch.Tensor:
        return torch.stack(t.unbind(-1)).movedim(0, -1)

    run, other = exact_run(), exact_run()
    run.train(range(2))
    saved = copy.deepcopy(run.optim.state_dict())
    for state in saved["state"].values():
        state["weight_residual"] = reordered(state["weight_residual"])
    other.model.load_state_dict(run.model.state_dict())
    other.optim.load_state_dict(saved)
    for each in (run, other):
        each.train([2])
    other.assert_exact(run.optim.exact_weights())
    state = other.optim.state[other.model.lm_head.weight]
    state["weight_residual"] = reordered(state["weight_residual"])
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(ValueError, match=r"weight_residual of lm_head\.weight"):
        other.train([3])
    assert all(torch.equal(value, before[name]) for name, value in other.model.named_parameters())


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_loaded_residual_survives_whichever_is_loaded_first(first):
    run, other = exact_run(), exact_run()
    other.train([7])
    run.train(range(2))
    content = {"model": run.model.state_dict(), "optimizer": run.optim.state_dict()}
    loads = {"model": other.model, "optimizer": other.optim}
    for name in sorted(loads, key=lambda name: name != first):
        loads[name].load_state_dict(content[name])
    other.assert_exact(run.optim.exact_weights())


# -- names -----------------------------------------------------------------------------------------


class Beside(nn.Module):
    """A matrix of its own beside that of a layer called ``module``, as wrappers call it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 4)
        self.weight = nn.Parameter(torch.zeros(4, 6))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def wrapped_layers(model: nn.Module) -> nn.Module:
    model[0], model[1] = checkpoint_wrapper(model[0]), compiled(model[1])
    return model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "a component called module at the root": lambda model: model[0],
    "layers": wrapped_layers,
    "all": lambda model: compiled(nn.DataParallel(checkpoint_wrapper(wrapped_layers(model)))),
}


def check_keys(wrap: Callable[[nn.Module], nn.Module], **options: Any) -> None:
    """Weights that bf16 does not hold come from `load_exact_weights` to a model in fp32."""
    layers = nn.Sequential(Beside(), nn.Linear(4, 4), nn.Linear(4, 2))
    model, wide = wrap(copy.deepcopy(layers).bfloat16()), wrap(layers)
    groups = optimizer.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, weight_rounding="exact", **options)
    named = enumerate(model.named_parameters(), start=1)
    weights = {name: torch.full(p.shape, number + 2**-15) for number, (name, p) in named}
    optim.load_exact_weights(weights)
    wide.load_state_dict({**model.state_dict(), **optim.exact_weights()})
    for name, p in wide.named_parameters():
        assert torch.equal(p, weights[name]), name


@pytest.mark.parametrize("wrap", WRAPS)
def test_exact_weights_have_the_models_own_keys_however_it_is_wrapped(wrap):
    check_keys(WRAPS[wrap])


@on_ranks(2)
def test_exact_weights_have_the_models_own_keys_under_ddp() -> None:
    ddp = nn.parallel.DistributedDataParallel
    for options in ({}, {"process_group": dist.group.WORLD, "grad_reduce": "mean"}):
        check_keys(lambda model: ddp(compiled(model)), **options)


ONES = torch.ones(4, 4)


def test_exact_weights_load_into_a_model_that_is_wrapped_otherwise():
    names = ["_orig_mod.0.weight", "_orig_mod.1.weight"]
    params, optim = weights_of((4, 4), (4, 4), names=names)
    optim.load_exact_weights({"0.weight": ONES, "module._orig_mod.1.weight": 2 * ONES})
    assert torch.equal(params[0], ONES.bfloat16()) and torch.equal(params[1], 2 * ONES.bfloat16())


@pytest.mark.parametrize("names, given, named", [
    (["weight", "weight"], {"weight": ONES}, "weight"),
    (["a", "_orig_mod.a"], {"module.a": ONES}, "module.a"),
    (["a", "b"], {"a": ONES, "_orig_mod.a": ONES}, "a, which is given"),
    (["w"], {"w": ONES, "v": ONES}, "'v'"),
    (["w"], {"w": torch.zeros(4, 5)}, r"w needs .*\(4, 4\)"),
    (["w"], {"w": ONES.double()}, "w needs .*float32"),
    (None, {}, "names"),
])  # fmt: skip
def test_exact_weights_that_fit_no_parameter_change_nothing(names, given, named):
    params, optim = weights_of(*[(4, 4)] * len(names or "w"), names=names)
    with pytest.raises(ValueError, match=named):
        optim.load_exact_weights(given)
    if names in (["weight", "weight"], None):
        with pytest.raises(ValueError, match=named):
            optim.exact_weights()
    assert not any(map(torch.any, params))


# -- checkpoints -----------------------------------------------------------------------------------


def convert(layout: str, directory: Path) -> None:
    """From exact weights to fp32 and back, with steps in between, beside a run that stays fp32."""
    stays, run = Run(None, layout), exact_run(layout)
    for each in (stays, run):
        each.train(range(2))
    model, optim = get_state_dict(run.model, run.optim)
    content = {"model": {**model, **run.optim.exact_weights()}, "optim": optim}
    dcp.save(content, checkpoint_id=directory / "exact")
    wide = Run(None, layout)
    wide.train([9])
    load_checkpoint(wide, directory / "exact")
    for each in (stays, wide):
        each.train(range(2, 4))
    save_checkpoint(wide, directory / "fp32")
    back = exact_run(layout)
    back.train([9])
    model, optim = get_state_dict(back.model, back.optim)
    content = {"model": {**model, **back.optim.exact_weights()}, "optim": optim}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # fp32 weights have no residuals
    dcp.load(content, checkpoint_id=directory / "fp32", planner=planner)
    weights = {name: content["model"].pop(name) for name in back.optim.exact_weights()}
    set_state_dict(back.model, back.optim, model_state_dict=model, optim_state_dict=optim)
    back.optim.load_exact_weights(weights)
    for each in (stays, back):
        each.train(range(4, 6))
    assert_like_fp32(back, stays)


@pytest.mark.parametrize("layout", ["2 ranks, FSDP2", "2 ranks, ZeRO-2"])
def test_exact_weights_go_to_fp32_and_back_through_checkpoints(layout, tmp_path):
    run_ranks(convert, LAYOUTS[layout].ranks, layout, tmp_path)


def test_checkpoints_whose_residuals_would_be_lost_are_refused():
    exact, wide, nearest = exact_run(), Run(None), Run("nearest")
    exact.train([0])
    content = exact.optim.state_dict()
    with pytest.raises(ValueError, match="residual"):
        wide.optim.load_state_dict(content)
    for state in content["state"].values():
        state.pop("weight_residual", None)
    with pytest.raises(ValueError, match="weight_rounding='exact'"):
        nearest.optim.load_state_dict(content)
    wide.optim.load_state_dict(content)
    kept = exact.optim.state_dict()  # as a load in place leaves it of a file without residuals
    kept["param_groups"] = nearest.optim.state_dict()["param_groups"]
    with pytest.raises(ValueError, match="without the option"):
        exact.optim.load_state_dict(kept)


# -- stochastic ------------------------------------------------------------------------------------


def test_the_expectation_of_a_rounded_weight_is_the_weight():
    size = 1 << 17
    for step in (3e-5, 1e-3):  # of 1/128, the distance between neighbours above 1
        options = {"weight_rounding": "stochastic", "lr": step, "weight_decay": 0.0}
        [param], optim = weights_of((size,), **options)
        with torch.no_grad():
            param.fill_(1.0)
        param.grad = -torch.ones_like(param)
        optim.step()
        share = (param > 1).double().mean().item()
        expected = step * 128
        assert share == pytest.approx(expected, abs=5 * math.sqrt(expected / size))
        assert set(param.detach().tolist()) == {1.0, 1.0 + 1 / 128}


def test_the_expectation_of_a_weight_that_is_clipped_after_its_step_is_that_of_both():
    names, sizes = ["q_proj.weight", "k_proj.weight"], ((512, 256), (512, 256))
    how = {"weight_rounding": "stochastic", "lr": 1 / 512, "weight_decay": 0.0, "names": names}
    params, optim = weights_of(*sizes, clip_config={"head_dim": 8, "threshold": 0.64}, **how)
    optim.param_groups[0]["use_muon"] = False
    for param in params:
        param.data.fill_(1.0)
        param.grad = -torch.ones_like(param)
    optim.step(qk_logits={"": torch.ones(64)})
    for param in params:
        expected = 0.8 * (1 + 1 / 512)  # five standard deviations from this, of 2⁻⁷ each
        assert param.double().mean().item() == pytest.approx(expected, abs=5 * 2**-7 / 2**8.5)


def test_random_numbers_go_on_after_a_distributed_checkpoint(tmp_path):
    run, again = (Run("stochastic") for _ in range(2))
    run.train(range(2))
    save_checkpoint(run, tmp_path)
    load_checkpoint(again, tmp_path)
    for each in (run, again):
        each.train([2])
    assert_equal(*(dict(each.model.state_dict()) for each in (run, again)))


def test_step_and_name_or_else_group_and_index_each_change_the_random_numbers():
    def rounded_up(name: str | None = "w", number: int = 0, steps: int = 1) -> torch.Tensor:
        """Which weights of a parameter are rounded up, of three: two in a group, one in another."""
        params = [nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(3)]
        names = None if name is None else [name if n == number else str(n) for n in range(3)]
        groups = [
            {"params": params[at], "use_muon": False, "names": names and names[at]}
            for at in (slice(0, 2), slice(2, 3))
        ]
        options = {"lr": 1e-3, "weight_decay": 0.0, "weight_rounding": "stochastic"}
        optim = optimizer.Muon(groups, **options)
        for _ in range(steps):
            optim.state.clear()
            for param in params:
                param.data.fill_(1.0)
                param.grad = -torch.ones_like(param)
            optim.step()
        assert optim.param_groups[0]["rounding_step"] == steps
        return (params[number] > 1).detach()

    assert torch.equal(rounded_up(), rounded_up())
    assert torch.equal(rounded_up(), rounded_up(number=2))
    assert torch.equal(rounded_up("a._orig_mod.b"), rounded_up("module.a.b"))
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
        with pytest.raises(ValueError, match="float16"):
            optimizer.Muon([half], weight_rounding=rounding)


def test_a_group_may_be_rounded_otherwise_than_others_and_change_its_mind():
    run = exact_run()
    last = run.optim.param_groups[-1]
    last["weight_rounding"] = "nearest"
    run.train(range(2))
    own = set(map(id, last["params"]))
    names = {name for name, p in run.model.named_parameters() if id(p) in own}
    assert names and not names & run.optim.exact_weights().keys()
    last["weight_rounding"] = "exact"
    run.train(range(2, 4))
    assert names <= run.optim.exact_weights().keys() | {"idle.bias"}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_residual_goes_when_steps_no_longer_keep_it(rounding):
    run = exact_run()
    run.train(range(2))
    for group in run.optim.param_groups:
        group["weight_rounding"] = rounding
    run.train(range(2, 4))
    assert not any("weight_residual" in state for state in run.optim.state.values())
    run.optim.load_state_dict(run.optim.state_dict())  # which it takes back
    for group in run.optim.param_groups:
        group["weight_rounding"] = "exact"
    run.assert_exact({}, like_model=True)
