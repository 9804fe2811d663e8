"""Checkpoints of other optimizers: training goes on as theirs would, or nothing is loaded."""

from __future__ import annotations

import copy
import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_leaves

import foreign_sources as sources
from comparisons import assert_equal, through_torch_save
from kernel import optimizer
from layouts import case as named
from layouts import part, part_for, whole
from one_device import Model
from one_device import train as train_model
from ranks import on_ranks, run_ranks

Muon, MuonAdamW, presets = optimizer.Muon, optimizer.MuonAdamW, optimizer.presets

# Counts that three ranks do not divide: of one shape four, two and one matrices.
MATRICES = [(6, 10), (12, 4), (6, 10), (12, 4), (8, 8), (6, 10), (6, 10)]
KERNELS = [(6, 10), (4, 3, 3, 3), (12, 4), (8, 5, 2, 2), (6, 10), (4, 3, 3, 3), (12, 4)]
OTHERS = [(9, 120), (6,), (3, 4)]  # nanochat divides the first over ranks
STEPS = 3

# Of the movement of each weight. eps is added to other norms here: 1e-7 of them, which the
# iteration enlarges; nanochat's second moments are kept in fp32.
FLOAT64 = 1e-5
# torch's Muon iterates in bfloat16, and normalizes in it.
BFLOAT16 = 3e-2

WRONG = {"lr": 0.5}  # what a checkpoint has to replace

pytestmark = pytest.mark.usefixtures("one_thread")

Params = list[nn.Parameter]


def weights(shapes: Sequence[tuple[int, ...]], seed: int, dtype=torch.float64) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter((torch.randn(s, generator=generator, dtype=torch.float64) / 10).to(dtype))
        for s in shapes
    ]


def train(params: Params, optimizers: Sequence[Any], steps: range) -> None:
    for t in steps:
        for index, p in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * t + index)
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = part_for(p, grad.to(p.dtype))
        for each in optimizers:
            each.step()


# Sources, and their counterparts here


@dataclass(frozen=True)
class Case:
    """One source, and its counterpart here."""

    kind: str  # of `load_foreign_state_dict`
    source: Callable[..., list[Any]]  # from matrices and the rest, the optimizers that train them
    ours: Callable[[Params, Params], Any]  # from both, the arguments of the optimizer here
    shapes: Sequence[tuple[int, ...]] = tuple(MATRICES)
    ranks: int = 1  # that train the source together

    def params(self) -> tuple[Params, Params]:
        return weights(self.shapes, 0), weights(OTHERS, 1)

    def optimizer(self, muon: Params, others: Params, **options: Any) -> Any:
        if self.kind == "nanochat":
            return MuonAdamW(self.ours(muon, others), **options)
        return Muon(**{**self.ours(muon, others), **WRONG, **options})

    def loaded(self, states: Any, **options: Any) -> Any:
        ours = self.optimizer(*self.params(), **options)
        ours.load_foreign_state_dict(states, kind=self.kind)
        return ours


def in_groups(muon: Params, others: Params) -> list[dict[str, Any]]:
    return [{"params": muon, "use_muon": True}, {"params": others, "use_muon": False}]


def named_groups(muon: Params, others: Params) -> list[dict[str, Any]]:
    groups = in_groups(muon, others)
    groups[0]["names"] = [f"layers.{i}.weight" for i in range(len(muon))]
    return groups


NANOCHAT = dict(kind="muon", lr=0.02, momentum=0.9, ns_steps=5, beta2=0.9, weight_decay=0.2)


def nanochat_groups(muon: Params, others: Params, **options: Any) -> list[dict[str, Any]]:
    adamw = dict(kind="adamw", lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    groups = [{**adamw, "params": others[:2]}, {**adamw, "params": others[2:], "lr": 0.03}]
    for shape in sorted({p.shape for p in muon}):
        groups.append({**NANOCHAT, "params": [p for p in muon if p.shape == shape]})
    return [{**group, **options} for group in groups]


def aux_groups(muon: Params, others: Params, **options: Any) -> list[dict[str, Any]]:
    adam = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "use_muon": False}
    own = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
    groups = [{**adam, "params": others}, {**own, "params": muon[:4]}]
    groups.append({**own, "params": muon[4:], "lr": 0.03})
    return [{**group, **options} for group in groups]


def adamw_of(others: Params) -> Any:
    return torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.9), eps=1e-9, weight_decay=0.05)


ALONE: dict[str, Case] = {
    "torch_muon": Case(
        "torch_muon",
        lambda m, v: [sources.TorchMuon(m, lr=0.02, momentum=0.9, weight_decay=0.2), adamw_of(v)],
        lambda m, v: presets.torch_muon(in_groups(m, v)),
    ),
    "motif": Case(
        "motif",
        lambda m, v: [sources.Motif(named_groups(m, v), lr=0.02, momentum=0.9)],
        lambda m, v: presets.motif(named_groups(m, v)),
    ),
    "llamafactory": Case(
        "llamafactory",
        lambda m, v: [sources.Moonlight(0.02, 0.2, m, 0.9, adamw_params=v)],
        lambda m, v: presets.moonlight(muon_params=m, adamw_params=v),
    ),
    "nanochat": Case(
        "nanochat",
        lambda m, v, distributed=False: [sources.Nanochat(nanochat_groups(m, v), distributed)],
        lambda m, v: nanochat_groups(m, v, **WRONG),
    ),
    "keller_jordan": Case(
        "keller_jordan",
        lambda m, v, distributed=False: [sources.KellerJordan(aux_groups(m, v), distributed)],
        lambda m, v: presets.keller_jordan(aux_groups(m, v, **WRONG)),
        tuple(KERNELS),
    ),
    "keller_jordan, matrices": Case(
        "keller_jordan",
        lambda m, v, distributed=False: [
            sources.KellerJordan(m, distributed, lr=0.03, momentum=0.9),
            adamw_of(v),
        ],
        lambda m, v: presets.keller_jordan(in_groups(m, v)),
    ),
}
BY_SIZE = Case(
    "keller_jordan",
    lambda m, v, distributed: [sources.KellerJordanBySize(m, lr=0.03), adamw_of(v)],
    ALONE["keller_jordan, matrices"].ours,
)
DISTRIBUTED = {n: case for n, case in ALONE.items() if case.kind in ("nanochat", "keller_jordan")}
OF_RANKS: dict[str, Case] = {
    f"{name} of ranks": replace(case, source=partial(case.source, distributed=True), ranks=3)
    for name, case in {**DISTRIBUTED, "keller_jordan, by size,": BY_SIZE}.items()
}
CASES = {**ALONE, **OF_RANKS}
each_case = pytest.mark.parametrize("name", CASES)


@dataclass(frozen=True)
class Trained:
    """A source after `STEPS` steps, and as many later."""

    files: list[list[Any]]  # of each rank the state dicts of its optimizers
    before: list[torch.Tensor]  # weights when they were saved
    after: list[torch.Tensor]  # and in the end

    @property
    def states(self) -> Any:
        """Copies of the state dicts, of all ranks if there are several."""
        first, *others = zip(*copy.deepcopy(self.files))
        muon = list(first) if len(first) > 1 else first[0]
        return {"muon": muon, "adamw": others[0][0]} if others else muon


def train_source(name: str) -> Trained:
    muon, others = CASES[name].params()
    params, optimizers = [*muon, *others], CASES[name].source(muon, others)
    train(params, optimizers, range(STEPS))
    files = [through_torch_save([each.state_dict() for each in optimizers])]
    before = [p.detach().clone() for p in params]
    train(params, optimizers, range(STEPS, 2 * STEPS))
    return Trained(files, before, [p.detach().clone() for p in params])


@functools.cache
def trained(name: str) -> Trained:
    if CASES[name].ranks == 1:
        return train_source(name)
    ranks = run_ranks(train_source, CASES[name].ranks, name)
    for other in ranks[1:]:
        assert_equal(other.after, ranks[0].after)
    return Trained([rank.files[0] for rank in ranks], ranks[0].before, ranks[0].after)


def go_on(
    name: str,
    source: Trained,
    place: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    offload: bool = False,
    **options: Any,
) -> None:
    """Migrates, goes on, and compares."""
    case, params = CASES[name], [nn.Parameter(place(W)) for W in source.before]
    ours = case.optimizer(params[: len(case.shapes)], params[len(case.shapes) :], **options)
    if offload:
        ours.turn_on_cpu_offload(backend=optimizer.SimulatedHost())
    ours.load_foreign_state_dict(source.states, kind=case.kind)
    assert all(group["lr"] != WRONG["lr"] for group in ours.param_groups)
    train(params, [ours], range(STEPS, 2 * STEPS))
    for index, (p, before, after) in enumerate(zip(params, source.before, source.after)):
        error = (whole(p).detach() - after).norm() / (after - before).norm()
        assert error < FLOAT64, (index, tuple(p.shape), error)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@each_case
def test_training_goes_on_as_the_sources_would(name, offload):
    go_on(name, trained(name), offload=offload)


@pytest.mark.parametrize("name", [name for name in CASES if "nanochat" not in name])
def test_momentum_of_the_other_convention_gives_the_same_updates(name):
    style = "ema" if name in ("motif", "llamafactory") else "classical"
    go_on(name, trained(name), momentum_style=style)


REPLICAS, ZERO2 = {"process_group": True}, {"process_group": True, "grad_reduce": "mean"}
LAYOUTS: dict[str, tuple[Sequence[Any] | None, dict[str, Any]]] = {
    "FSDP2": ([Shard(0)], {}),
    "columns": ([Shard(-1)], {}),
    "replicas": (None, REPLICAS),
    "ZeRO-2": (None, ZERO2),
    "ZeRO-2, offloaded": (None, {**ZERO2, "offload": True}),
}
STRIDED = {"FSDP2 over TP": ([_StridedShard(0, split_factor=2), Shard(0)], {})}


def placed(W: torch.Tensor, mesh: Any, placements: Sequence[Any] | None) -> torch.Tensor:
    if placements is None:
        return W.clone()
    return part(W, mesh, [Shard(W.ndim - 1) if p == Shard(-1) else p for p in placements])


def go_on_in_layouts(name: str, source: Trained, layouts: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2,) if dist.get_world_size() == 2 else (2, 2))
    for layout, (placements, options) in layouts.items():
        if "process_group" in options:
            options = {**options, "process_group": dist.group.WORLD}
        place = partial(placed, mesh=mesh, placements=placements)
        with named(layout):
            go_on(name, source, place, **options)


@pytest.mark.slow
@each_case
def test_ranks_go_on_in_every_layout(name):
    run_ranks(go_on_in_layouts, 2, name, trained(name), LAYOUTS)
    run_ranks(go_on_in_layouts, 4, name, trained(name), STRIDED)


# torch's own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_own_muon_and_adamw_go_on(dtype):
    shapes = [(96, 96), (128, 48), (48, 128)]  # fewer numbers round too far apart in bfloat16
    muon, others = weights(shapes, 0, dtype), weights(OTHERS, 1, dtype)
    lr = 0.3 if dtype == torch.bfloat16 else 0.02  # far above a bit of the weights
    own = torch.optim.Muon(muon, lr=lr, momentum=0.9, weight_decay=0.2)
    theirs = [own, torch.optim.AdamW(others, lr=lr)]
    train([*muon, *others], theirs, range(STEPS))
    saved = through_torch_save([each.state_dict() for each in theirs])
    before = [p.detach().clone() for p in (*muon, *others)]
    params = [nn.Parameter(p.clone()) for p in before]
    groups = in_groups(params[: len(muon)], params[len(muon) :])
    ours = Muon(**presets.torch_muon(groups), ns_dtype=torch.bfloat16)
    ours.load_foreign_state_dict(dict(zip(("muon", "adamw"), saved)), kind="torch_muon")
    for p, q in zip(params, (*muon, *others)):
        assert_equal(dict(ours.state[p]), dict(theirs[q not in set(muon)].state[q]))
    train([*muon, *others], theirs, range(STEPS, 2 * STEPS))
    train(params, [ours], range(STEPS, 2 * STEPS))
    for p, q, start in zip(params, (*muon, *others), before):
        moved = (p - start).float(), (q - start).float()
        assert (moved[0] - moved[1]).norm() < BFLOAT16 * moved[1].norm()


@pytest.mark.parametrize("absent", ["muon", "adamw"])
def test_one_of_two_optimizers_may_start_anew(absent):
    states = trained("torch_muon").states
    ours = ALONE["torch_muon"].loaded({**states, absent: None})
    state = ours.state_dict()["state"]
    assert state[0]["momentum_buffer"].any() == (absent == "adamw")
    assert state[len(MATRICES)]["step"] == (0 if absent == "adamw" else STEPS)


def model_of_all() -> Model:
    torch.manual_seed(0)
    return Model(torch.float64)


def default_groups(model: Model) -> list[dict[str, Any]]:
    return optimizer.get_default_muon_param_groups(model, expert_keys=["experts"])


def ours_of(model: Model, **options: Any) -> Any:
    return Muon(default_groups(model), **options)


def adamw_beside(model: Model, is_named: bool = False, **options: Any) -> Any:
    params = model.named_parameters() if is_named else model.parameters()
    theirs = torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.9), eps=1e-9, **options)
    train_model(model, theirs, STEPS)
    return theirs


FORMS = {
    "parameters": (False, lambda model: model.parameters()),
    "pairs": (False, lambda model: model.named_parameters()),
    "names": (False, lambda model: [name for name, _ in model.named_parameters()]),
    "names in the checkpoint": (True, lambda model: None),
}


@pytest.mark.parametrize("style", ["ema", "classical"])
@pytest.mark.parametrize("form", FORMS)
def test_one_adamw_of_everything_gives_moments_and_seeds_momentum(form, style):
    is_named, params = FORMS[form]
    model = model_of_all()
    theirs = adamw_beside(model, is_named, weight_decay=0.3)
    saved, other = through_torch_save(theirs.state_dict()), copy.deepcopy(model)
    ours = ours_of(other, momentum_style=style, momentum=0.75)
    ours.load_foreign_state_dict(saved, kind="torch_adamw", params=params(other))
    for p, q in zip(model.parameters(), other.parameters()):
        if q in set(ours.param_groups[0]["params"]):
            seed = theirs.state[p]["exp_avg"] * (1 if style == "ema" else 4)
            assert_equal(dict(ours.state[q]), {"momentum_buffer": seed})
        else:  # of a frozen one there is none
            assert_equal(ours.state.get(q, {}), theirs.state.get(p, {}))
    assert [(g["lr"], g["weight_decay"]) for g in ours.param_groups] == [(0.01, 0.3)] * 2
    adamw = ours.param_groups[1]
    assert ours.param_groups[0]["momentum"] == 0.75
    assert (adamw["adamw_betas"], adamw["adamw_eps"]) == ((0.8, 0.9), 1e-9)
    embeddings = model.embed.weight, other.embed.weight
    for p in embeddings:
        p.grad = torch.ones_like(p)
    theirs.step()
    ours.step()
    torch.testing.assert_close(*embeddings, rtol=1e-12, atol=1e-12)


def test_adamws_rates_go_to_matrices_only_with_the_scale_they_fit():
    model = model_of_all()
    saved = adamw_beside(model, weight_decay=0.3).state_dict()
    ours = ours_of(model, adjust_lr="original", lr=0.02, weight_decay=0.1)
    ours.load_foreign_state_dict(saved, kind="torch_adamw", params=model.parameters())
    rates = [(group["lr"], group["weight_decay"]) for group in ours.param_groups]
    assert rates == [(0.02, 0.1), (0.01, 0.3)]


@pytest.mark.parametrize("kind", ["torch_adamw", "motif"])
def test_state_by_names_is_told_by_names(kind):
    model = model_of_all()
    if kind == "motif":
        muon, adamw = default_groups(model)
        adamw.pop("names"), muon.pop("names")
        theirs = sources.Motif([adamw, muon], lr=0.01)  # in another order
        train_model(model, theirs, STEPS)
    else:
        theirs = adamw_beside(model)
    trained_params = [p for p in model.parameters() if p.requires_grad]
    state = {p: dict(own) for p, own in theirs.state.items()}
    if kind == "torch_adamw":  # torch wants to know the frozen ones, too
        model.frozen.requires_grad_(True)
    saved = through_torch_save(get_optimizer_state_dict(model, theirs))
    model.frozen.requires_grad_(False)
    ours = ours_of(model, momentum_style="ema" if kind == "torch_adamw" else "classical")
    ours.load_foreign_state_dict(saved, kind=kind)
    old = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
    old = {"momentum_buffer": "exp_avg"} if kind == "torch_adamw" else old
    for p in trained_params:
        for key, value in ours.state[p].items():
            assert torch.equal(value, state[p][old.get(key, key)])
    assert all(group["lr"] == 0.01 for group in ours.param_groups)


def test_a_scheduler_goes_on_from_a_checkpoint_of_another_optimizer():
    model = model_of_all()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = lr_scheduler.CosineAnnealingLR(theirs, 10)
    for _ in range(4):
        train_model(model, theirs, 1)
        schedule.step()
    ours = ours_of(model)
    saved, at = through_torch_save([theirs.state_dict(), schedule.state_dict()])
    ours.load_foreign_state_dict(saved, kind="torch_adamw", params=model.parameters())
    rates = [group["lr"] for group in ours.param_groups]
    assert rates == [theirs.param_groups[0]["lr"]] * 2
    resumed = lr_scheduler.CosineAnnealingLR(ours, 10)
    resumed.load_state_dict({**at, "base_lrs": [g["initial_lr"] for g in ours.param_groups]})
    for group, rate in zip(ours.param_groups, rates):
        group["lr"] = rate
    for _ in range(5):
        schedule.step(), resumed.step()
        expected = [theirs.param_groups[0]["lr"]] * 2
        assert [group["lr"] for group in ours.param_groups] == pytest.approx(expected)


# What is taken over, and what is not


def test_hyperparameters_stay_where_they_are_not_wanted():
    case, states = ALONE["motif"], trained("motif").states
    ours = case.optimizer(*case.params(), momentum_style="ema", momentum=0.95)
    before = [{k: v for k, v in group.items() if k != "params"} for group in ours.param_groups]
    ours.load_foreign_state_dict(states, kind="motif", hyperparameters=False)
    for group, own in zip(ours.param_groups, before):
        assert {k: group[k] for k in own} == own
    found, saved = (s["state"][0]["momentum_buffer"] for s in (ours.state_dict(), states))
    torch.testing.assert_close(found, saved * (1 - 0.9))  # it was summed up with a momentum of 0.9


def test_group_options_that_no_checkpoint_has_stay_as_they_are():
    options = {"cautious": True, "ns_coefficients": "polar_express", "beta2": 0.5}
    case = ALONE["torch_muon"]
    ours = case.optimizer(*case.params(), beta2=0.5)
    ours.param_groups[0].update(options)
    ours.load_foreign_state_dict(trained("torch_muon").states, kind="torch_muon")
    assert {key: ours.param_groups[0][key] for key in options} == options
    assert not ours.state_dict()["state"][0]["second_momentum_buffer"].any()


@pytest.mark.parametrize("name", ALONE)
def test_a_checkpoint_from_before_the_first_step_brings_its_hyperparameters(name):
    case = ALONE[name]
    files = [[each.state_dict() for each in case.source(*case.params())]]
    ours = case.loaded(Trained(files, [], []).states)
    assert all(group["lr"] != WRONG["lr"] for group in ours.param_groups)
    for own in ours.state_dict()["state"].values():
        assert not any(torch.as_tensor(value).any() for value in own.values())


def test_a_matrix_that_never_had_a_gradient_starts_with_zeros():
    muon, others = weights(MATRICES, 0), weights(OTHERS, 1)
    theirs = ALONE["torch_muon"].source(muon[1:], others)
    train([*muon[1:], *others], theirs, range(STEPS))
    theirs[0].param_groups[0]["params"].insert(0, muon[0])
    states = Trained([[each.state_dict() for each in theirs]], [], []).states
    state = ALONE["torch_muon"].loaded(states).state_dict()["state"]
    assert not state[0]["momentum_buffer"].any() and state[1]["momentum_buffer"].any()


@each_case
def test_what_is_loaded_is_a_copy_and_nothing_is_warned_of(name):
    case, states = CASES[name], trained(name).states
    kept, (muon, others) = copy.deepcopy(states), case.params()
    ours = case.optimizer(muon, others)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.load_foreign_state_dict(states, kind=case.kind)
    train([*muon, *others], [ours], range(STEPS))
    assert_equal(states, kept)
    given = [v for v in tree_leaves(states) if isinstance(v, torch.Tensor)]
    memory = {t.untyped_storage().data_ptr() for t in given}
    used = {v.untyped_storage().data_ptr() for own in ours.state.values() for v in own.values()}
    assert given and used and not memory & used
    held = [weakref.ref(t) for t in given]
    del states, given
    gc.collect()
    assert not any(ref() is not None for ref in held)


def test_nanochats_second_moment_becomes_the_flat_one_in_float32():
    case, states = ALONE["nanochat"], trained("nanochat").states
    ours = case.optimizer(*(weights(shapes, 0, torch.bfloat16) for shapes in (MATRICES, OTHERS)))
    for own in states["state"].values():  # as it is of a model in bfloat16
        own.update({k: v.bfloat16() for k, v in own.items() if isinstance(v, torch.Tensor)})
    ours.load_foreign_state_dict(states, kind="nanochat")
    stack = states["state"][3]  # four of (6, 10), whose longer side is the columns
    for index, p in enumerate(ours.param_groups[2]["params"]):
        V = stack["second_momentum_buffer"][index, 0].float()
        momentum = stack["momentum_buffer"][index]
        expected = {"momentum_buffer": momentum, "second_momentum_buffer": V}
        assert_equal(dict(ours.state[p]), expected)


def test_nanochats_second_moments_of_experts_are_each_their_own():
    params = weights([(3, 6, 4), (3, 6, 4)], 0)
    source = sources.Nanochat([{**NANOCHAT, "params": params}])
    stack = torch.rand(2, 3, 6, 1, dtype=torch.float64)
    buffers = {"momentum_buffer": torch.stack(params), "second_momentum_buffer": stack}
    source.state[params[0]] = buffers
    pairs = [(f"experts.{i}", nn.Parameter(p.clone())) for i, p in enumerate(params)]
    ours = MuonAdamW([{**NANOCHAT, "params": pairs, "expert_keys": ["experts"]}])
    ours.load_foreign_state_dict(through_torch_save(source.state_dict()), kind="nanochat")
    for index, (_, p) in enumerate(pairs):
        V = ours.state[p]["second_momentum_buffer"]
        assert torch.equal(V, stack[index, ..., 0].float())


@pytest.mark.parametrize(("style", "factor"), [("classical", 1.0), ("ema", 0.1)])
def test_momentum_in_bfloat16_stays_so_and_is_scaled_in_one_rounding(style, factor):
    states = trained("motif").states
    for index in range(len(MATRICES)):
        own = states["state"][index]
        own["momentum_buffer"] = own["momentum_buffer"].bfloat16()
    state = ALONE["motif"].loaded(states, momentum_style=style).state_dict()["state"]
    for index in range(len(MATRICES)):
        exact = states["state"][index]["momentum_buffer"].double() * factor
        assert_equal(state[index]["momentum_buffer"], exact.bfloat16())


def test_amsgrad_is_left_behind_with_a_warning():
    model = model_of_all()
    saved, ours = adamw_beside(model, amsgrad=True).state_dict(), ours_of(model)
    with pytest.warns(UserWarning, match="amsgrad"):
        ours.load_foreign_state_dict(saved, kind="torch_adamw", params=model.parameters())
    assert ours.state[model.embed.weight].keys() == {"step", "exp_avg", "exp_avg_sq"}


# Positions


@pytest.mark.parametrize("name", ["nanochat of ranks", "keller_jordan of ranks"])
def test_parameters_given_in_order_are_found_in_any_groups(name):
    case, states = CASES[name], trained(name).states
    muon, others = case.params()
    options = dict(adamw_betas=(0.8, 0.95), adamw_eps=1e-10, momentum_style="ema", beta2=0.9)
    ours = Muon(in_groups(muon[::-1], others[::-1]), flatten=True, **options)
    given = [*others, *muon]
    if name.startswith("nanochat"):
        given = [p for group in nanochat_groups(muon, others) for p in group["params"]]
    load = partial(ours.load_foreign_state_dict, states, kind=case.kind, params=given)
    with pytest.raises(ValueError, match="lr is"):
        load()
    load(hyperparameters=False)
    reference = case.optimizer(muon, others)
    reference.load_foreign_state_dict(states, kind=case.kind)
    for p in (*muon, *others):
        expected = reference.state[p]
        assert all(torch.equal(ours.state[p][key], expected[key]) for key in expected)


@pytest.mark.slow
@on_ranks(2)
def test_dtensors_in_a_checkpoint_lie_as_the_parameters_or_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    plain = weights(MATRICES, 0)
    muon = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in plain]
    theirs = sources.Motif([named_groups(muon, [])[0]])
    for i, p in enumerate(muon):
        theirs.state[p] = {"momentum_buffer": torch.ones_like(p) * i}
    ours, saved = ALONE["motif"].optimizer(muon, []), theirs.state_dict()
    ours.load_foreign_state_dict(saved, kind="motif")
    for index, p in enumerate(muon):
        momentum = ours.state[p]["momentum_buffer"]
        assert momentum.placements == (Shard(0),) and (momentum.to_local() == index).all()
    with pytest.raises(ValueError, match=r"Shard\(dim=0\).*full_tensor"):
        ALONE["motif"].optimizer(plain, []).load_foreign_state_dict(saved, kind="motif")


# What does not fit


def of_muon(states: Any, rank: int = 0) -> Any:
    """The state dict of Muon's parameters, of one rank."""
    each = states["muon"] if isinstance(states, dict) and "muon" in states else states
    return each[rank] if isinstance(each, list) else each


def changed(change: Callable[[Any], Any], rank: int = 0) -> Callable[[Any], Any]:
    def whole(states: Any) -> Any:
        change(of_muon(states, rank))
        return states

    return whole


def with_key(states: Any, key: str) -> Any:
    """The first state that has it."""
    return next(own for own in states["state"].values() if key in own)


def swap(states: Any) -> None:
    state = states["state"]
    state[0], state[1] = state[1], state[0]


def drop_a_parameter(states: Any) -> None:
    states["state"].pop(states["param_groups"][-1]["params"].pop(), None)


def momentum(change: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    def of(states: Any) -> None:
        own = with_key(states, "momentum_buffer")
        own["momentum_buffer"] = change(own["momentum_buffer"])

    return changed(of)


def other_names(states: Any) -> None:
    states["param_groups"][0]["names"] = [f"layers.{i + 1}.weight" for i in range(len(MATRICES))]


def stepped_twice(states: Any) -> None:
    with_key(states, "step")["step"] += 1


other_shape = momentum(lambda value: value.mT.contiguous())
no_step = changed(lambda states: with_key(states, "step").pop("step"))
no_flag = changed(lambda states: states["state"][0].pop("use_muon"))
other_flag = changed(lambda states: states["state"][0].update(use_muon=False))
ALL_RANKS, IN_ORDER = "all ranks", "order"
FAULTS = [
    ("torch_muon", lambda states: states["muon"], None, "AdamW's"),
    ("torch_muon", lambda states: {"muon": states["muon"]}, None, "'adamw'"),
    ("torch_muon", lambda states: {"adamw": states["adamw"]}, None, "'muon'"),
    ("torch_muon", changed(swap), None, r"momentum_buffer .*\(12, 4\).*\(6, 10"),
    ("torch_muon", changed(drop_a_parameter), None, r"\[6\] parameters.*\[7\]"),
    ("torch_muon", other_shape, None, r"\(10, 6\).*\(6, 10\)"),
    ("torch_muon", momentum(torch.Tensor.long), None, "torch.int64"),
    ("torch_muon", lambda states: [*states.values()], None, "state dict.* list"),
    ("torch_muon", lambda states: states["adamw"], None, "torch_adamw"),
    ("torch_muon", lambda states: {"optimizer": states}, None, "'optimizer'"),
    ("torch_muon", lambda states: None, None, "NoneType"),
    ("torch_muon", lambda states: states, "muon", "kind must be one of 'torch_muon', "),
    ("motif", no_step, None, "step"),
    ("motif", changed(other_names), None, r"layers\.1\.weight"),
    ("motif", lambda states: {"muon": states, "adamw": states}, None, "one state dict"),
    ("llamafactory", no_flag, None, "no use_muon"),
    ("llamafactory", other_flag, None, "AdamW's.*parameter 0.*use_muon=False"),
    ("nanochat", other_shape, None, r"momentum_buffer of .*\(\d+, \d+\)"),
    ("nanochat", lambda states: [states, states], None, ALL_RANKS),
    ("keller_jordan", other_shape, None, IN_ORDER),
    ("keller_jordan", lambda states: states, "nanochat", "keller_jordan"),
    ("keller_jordan", lambda states: [states, states], None, ALL_RANKS),
    ("nanochat of ranks", lambda states: states[:-1], None, IN_ORDER),
    ("nanochat of ranks", lambda states: states[1:], None, IN_ORDER),
    ("nanochat of ranks", lambda states: states[0], None, IN_ORDER),
    ("nanochat of ranks", lambda states: states[::-1], None, IN_ORDER),
    ("nanochat of ranks", changed(stepped_twice, 1), None, ALL_RANKS),
    ("nanochat of ranks", changed(drop_a_parameter, 1), None, "groups of"),
    ("keller_jordan of ranks", lambda states: states[:-1], None, ALL_RANKS),
    ("keller_jordan of ranks", lambda states: states[1:], None, ALL_RANKS),
    ("keller_jordan of ranks", lambda states: states[0], None, ALL_RANKS),
    ("keller_jordan of ranks", lambda states: states[::-1], None, ALL_RANKS),
    ("keller_jordan of ranks", changed(stepped_twice, 1), None, "different ranks"),
    ("keller_jordan, by size, of ranks", changed(drop_a_parameter), None, "groups of"),
]


@pytest.mark.parametrize(("name", "change", "kind", "match"), FAULTS)
def test_what_does_not_fit_raises_and_changes_nothing(name, change, kind, match):
    case, states = CASES[name], change(trained(name).states)
    muon, others = case.params()
    ours = case.optimizer(muon, others)
    train([*muon, *others], [ours], range(1))
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=match):
        ours.load_foreign_state_dict(states, kind=kind or case.kind)
    assert_equal(ours.state_dict(), before)


def test_a_checkpoint_of_this_package_is_no_foreign_one():
    ours = ALONE["motif"].optimizer(*ALONE["motif"].params())
    with pytest.raises(ValueError, match="use load_state_dict"):
        ours.load_foreign_state_dict(ours.state_dict(), kind="motif")


def test_parameters_in_another_order_than_they_were_saved_in_are_refused():
    muon, others = weights(MATRICES, 0), weights(OTHERS, 1)
    ours, states = ALONE["torch_muon"].optimizer(muon, others), trained("torch_muon").states
    load = partial(ours.load_foreign_state_dict, states, kind="torch_muon")
    for given, match in (
        ([*muon[::-1], *others], "shape"),
        ([*muon[1:], *others], "6 are given"),
        ([*muon, muon[0], *others], "twice"),
        ([3], "int"),
    ):
        with pytest.raises(ValueError, match=match):
            load(params=given)
    load(params=[*others, *muon])  # of two optimizers each takes its own


def one_frozen(model: Model) -> tuple[Any, Any]:
    theirs = adamw_beside(model)
    model.embed.requires_grad_(False)
    return theirs, model.named_parameters()


def two_decays(model: Model) -> tuple[Any, Any]:
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim > 1) is m] for m in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01), [*matrices, *vectors]


def adam(model: Model) -> tuple[Any, Any]:
    return torch.optim.Adam(model.parameters(), weight_decay=0.1), model.parameters()


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (one_frozen, r"embed\.weight"),
        (two_decays, "weight_decay is 0.1 for .*0.0 for"),
        (adam, r"Adam's.*weight_decay 0\.1"),
    ],
)
def test_an_adamw_of_everything_that_does_not_fit_is_refused(source, match):
    model = model_of_all()
    theirs, params = source(model)
    train_model(model, theirs, STEPS)
    given, ours = list(params), ours_of(model)
    load = partial(ours.load_foreign_state_dict, kind="torch_adamw", params=given)
    with pytest.raises(ValueError, match=match):
        load(theirs.state_dict())
    if source is two_decays:
        load(theirs.state_dict(), hyperparameters=False)
    if source is adam:  # without decay it is AdamW
        theirs.param_groups[0]["weight_decay"] = 0.0
        load(theirs.state_dict())
    assert source is one_frozen or ours.state[model.embed.weight]["step"] == STEPS


REPLACEMENTS = [None, "text", 3, -1.0, float("nan"), True, [], {}, torch.zeros(2), torch.zeros(())]
DAMAGES = 25


def damage(states: Any, generator: random.Random) -> None:
    """Takes something out of a state dict, anywhere, or puts something else there."""
    at, parents = states, []
    while isinstance(at, (dict, list)) and at:
        key = generator.choice(list(at) if isinstance(at, dict) else range(len(at)))
        parents.append((at, key))
        at = at[key]
    parent, key = generator.choice(parents)
    if generator.random() < 0.4:
        del parent[key]
    else:
        parent[key] = generator.choice(REPLACEMENTS)


@each_case
def test_whatever_is_damaged_raises_a_value_error_or_is_loaded(name):
    case, generator, refused = CASES[name], random.Random(0), 0
    ours = case.loaded(trained(name).states)
    for _ in range(DAMAGES):
        states, before = trained(name).states, copy.deepcopy(ours.state_dict())
        damage(states, generator)
        try:
            ours.load_foreign_state_dict(states, kind=case.kind)
        except ValueError:
            refused += 1
            assert_equal(ours.state_dict(), before)
        else:
            ours.load_foreign_state_dict(trained(name).states, kind=case.kind)
    assert refused > DAMAGES // 4
