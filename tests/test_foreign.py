"""Checkpoints of other optimizers: training goes on as theirs would, or nothing is loaded."""

from __future__ import annotations

import copy
import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_leaves

import foreign_sources as sources
from comparisons import assert_equal, through_torch_save
from kernel import optimizer
from layouts import case as named
from layouts import part_for, whole
from ranks import run_ranks

Muon, MuonAdamW, presets = optimizer.Muon, optimizer.MuonAdamW, optimizer.presets

# Counts that three ranks do not divide: of one shape four, two and one matrices.
MATRICES = [(6, 10), (12, 4), (6, 10), (12, 4), (8, 8), (6, 10), (6, 10)]
KERNELS = [(6, 10), (4, 3, 3, 3), (12, 4), (8, 5, 2, 2), (6, 10), (4, 3, 3, 3), (12, 4)]
OTHERS = [(9, 120), (6,), (3, 4)]  # nanochat divides the first over ranks

STEPS, RANKS = 3, 3
DAMAGES = 25

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


def gradient(p: torch.Tensor, t: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * t + index)
    return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def train(params: Params, optimizers: Sequence[Any], steps: range) -> None:
    for t in steps:
        for index, p in enumerate(params):
            p.grad = part_for(p, gradient(p, t, index))
        for each in optimizers:
            each.step()


def by_shape(params: Params) -> list[Params]:
    return [[p for p in params if p.shape == shape] for shape in sorted({p.shape for p in params})]


@dataclass(frozen=True)
class Case:
    """One source, and its counterpart here.

    Args:
        kind: of `load_foreign_state_dict`.
        source: from matrices and the rest, the optimizers that train them.
        pack: from the state dicts of each rank, ``states``.
        ours: from matrices, the rest, and options, the optimizer here.
        shapes: of the matrices.
        ranks: how many train the source together.
    """

    kind: str
    source: Callable[[Params, Params], list[Any]]
    pack: Callable[[list[list[Any]]], Any]
    ours: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]] = tuple(MATRICES)
    ranks: int = 1


def alone(files: list[list[Any]]) -> Any:
    return files[0][0]


def of_ranks(files: list[list[Any]]) -> Any:
    return [own[0] for own in files]


def of_two(files: list[list[Any]]) -> Any:
    """Muon's, of all ranks if there are several, and AdamW's."""
    muon = [own[0] for own in files]
    return {"muon": muon if len(files) > 1 else muon[0], "adamw": files[0][1]}


def in_groups(muon: Params, others: Params, **options: Any) -> list[dict[str, Any]]:
    return [
        {"params": muon, "use_muon": True, **options},
        {"params": others, "use_muon": False, **options},
    ]


def named_groups(muon: Params, others: Params) -> list[dict[str, Any]]:
    groups = in_groups(muon, others)
    groups[0]["names"] = [f"layers.{i}.weight" for i in range(len(muon))]
    return groups


def from_preset(preset: Callable[..., dict[str, Any]], *args: Any, **options: Any) -> Any:
    given = preset(*args)
    return Muon(**{**given, **options})


def our_torch_muon(muon: Params, others: Params, **options: Any) -> Any:
    return from_preset(presets.torch_muon, in_groups(muon, others), **{**WRONG, **options})


def our_motif(muon: Params, others: Params, **options: Any) -> Any:
    return from_preset(presets.motif, named_groups(muon, others), **{**WRONG, **options})


def our_moonlight(muon: Params, others: Params, **options: Any) -> Any:
    given = presets.moonlight(muon_params=muon, adamw_params=others)
    return Muon(**{**given, **WRONG, **options})


def our_keller_jordan(muon: Params, others: Params, **options: Any) -> Any:
    groups = [
        {"params": others, "use_muon": False, **WRONG},
        {"params": muon[:4], "use_muon": True, **WRONG},
        {"params": muon[4:], "use_muon": True, **WRONG},
    ]
    return from_preset(presets.keller_jordan, groups, **options)


def our_keller_jordans_matrices(muon: Params, others: Params, **options: Any) -> Any:
    ours = from_preset(presets.keller_jordan, muon, **{**WRONG, **options})
    ours.add_param_group({"params": others, "use_muon": False})
    return ours


def our_nanochat(muon: Params, others: Params, **options: Any) -> Any:
    return MuonAdamW(nanochat_groups(muon, others, **WRONG), **options)


def nanochat_groups(muon: Params, others: Params, **options: Any) -> list[dict[str, Any]]:
    adamw = dict(kind="adamw", lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    own = dict(kind="muon", lr=0.02, momentum=0.9, ns_steps=5, beta2=0.9, weight_decay=0.2)
    groups = [{**adamw, "params": others[:2]}, {**adamw, "params": others[2:], "lr": 0.03}]
    groups += [{**own, "params": same} for same in by_shape(muon)]
    return [{**group, **options} for group in groups]


def adamw_of(others: Params) -> Any:
    return torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.9), eps=1e-9, weight_decay=0.05)


def aux_groups(muon: Params, others: Params) -> list[dict[str, Any]]:
    adam = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "use_muon": False}
    own = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
    return [
        {**adam, "params": others},
        {**own, "params": muon[:4]},
        {**own, "params": muon[4:], "lr": 0.03},
    ]


ALONE = {
    "torch_muon": Case(
        "torch_muon",
        lambda muon, others: [
            sources.TorchMuon(muon, lr=0.02, momentum=0.9, weight_decay=0.2),
            adamw_of(others),
        ],
        of_two,
        our_torch_muon,
    ),
    "motif": Case(
        "motif",
        lambda muon, others: [sources.Motif(named_groups(muon, others), lr=0.02, momentum=0.9)],
        alone,
        our_motif,
    ),
    "llamafactory": Case(
        "llamafactory",
        lambda muon, others: [
            sources.Moonlight(lr=0.02, wd=0.2, muon_params=muon, momentum=0.9, adamw_params=others)
        ],
        alone,
        our_moonlight,
    ),
    "nanochat": Case(
        "nanochat",
        lambda muon, others: [sources.Nanochat(nanochat_groups(muon, others))],
        alone,
        our_nanochat,
    ),
    "keller_jordan": Case(
        "keller_jordan",
        lambda muon, others: [sources.KellerJordan(aux_groups(muon, others))],
        alone,
        our_keller_jordan,
        tuple(KERNELS),
    ),
    "keller_jordan, matrices": Case(
        "keller_jordan",
        lambda muon, others: [
            sources.KellerJordan(muon, lr=0.03, momentum=0.9),
            adamw_of(others),
        ],
        of_two,
        our_keller_jordans_matrices,
    ),
}

DISTRIBUTED = {
    "nanochat": Case(
        "nanochat",
        lambda muon, others: [sources.Nanochat(nanochat_groups(muon, others), distributed=True)],
        of_ranks,
        our_nanochat,
        ranks=RANKS,
    ),
    "keller_jordan": Case(
        "keller_jordan",
        lambda muon, others: [sources.KellerJordan(aux_groups(muon, others), distributed=True)],
        of_ranks,
        our_keller_jordan,
        tuple(KERNELS),
        RANKS,
    ),
    "keller_jordan, matrices": Case(
        "keller_jordan",
        lambda muon, others: [
            sources.KellerJordan(muon, distributed=True, lr=0.03, momentum=0.9),
            adamw_of(others),
        ],
        of_two,
        our_keller_jordans_matrices,
        ranks=RANKS,
    ),
    "keller_jordan, by number of elements": Case(
        "keller_jordan",
        lambda muon, others: [sources.KellerJordanBySize(muon, lr=0.03), adamw_of(others)],
        of_two,
        our_keller_jordans_matrices,
        ranks=RANKS,
    ),
}


@dataclass(frozen=True)
class Trained:
    """A source after `STEPS` steps, and as many later.

    Args:
        files: of each rank the state dicts of its optimizers.
        before: weights when they were saved.
        after: weights in the end.
    """

    files: list[list[Any]]
    before: list[torch.Tensor]
    after: list[torch.Tensor]

    def states(self, case: Case) -> Any:
        return case.pack(copy.deepcopy(self.files))


def train_source(case: Case, path: Path | None = None) -> Trained:
    """With ``path``, where each rank writes a file of its own; it gets them all."""
    muon, others = weights(case.shapes, 0), weights(OTHERS, 1)
    params = [*muon, *others]
    optimizers = case.source(muon, others)
    train(params, optimizers, range(STEPS))
    own = [each.state_dict() for each in optimizers]
    before = [p.detach().clone() for p in params]
    files = [through_torch_save(own)]
    if path is not None:
        torch.save(own, path / f"rank{dist.get_rank()}.pt")
        dist.barrier()
        files = [
            torch.load(path / f"rank{rank}.pt", weights_only=True)
            for rank in range(dist.get_world_size())
        ]
    train(params, optimizers, range(STEPS, 2 * STEPS))
    return Trained(files, before, [p.detach().clone() for p in params])


@functools.cache
def trained(name: str) -> Trained:
    return train_source(ALONE[name])


def train_sources(path: str) -> dict[str, Trained]:
    found = {}
    for number, (name, case) in enumerate(DISTRIBUTED.items()):
        directory = Path(path, str(number))
        directory.mkdir(exist_ok=True)
        found[name] = train_source(case, directory)
    return found


@pytest.fixture(scope="module")
def distributed(tmp_path_factory) -> dict[str, Trained]:
    """What three ranks have trained and written, one file each."""
    results = run_ranks(train_sources, RANKS, str(tmp_path_factory.mktemp("sources")))
    for name, first in results[0].items():
        for other in results[1:]:
            assert all(map(torch.equal, first.after, other[name].after)), name
    return results[0]


def go_on(
    case: Case,
    source: Trained,
    place: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    offload: bool = False,
    **options: Any,
) -> Any:
    """Migrates, goes on, and compares; returns the optimizer."""
    params = [nn.Parameter(place(W)) for W in source.before]
    muon, others = params[: len(case.shapes)], params[len(case.shapes) :]
    ours = case.ours(muon, others, **options)
    if offload:
        ours.turn_on_cpu_offload(backend=optimizer.SimulatedHost())
    ours.load_foreign_state_dict(source.states(case), kind=case.kind)
    train(params, [ours], range(STEPS, 2 * STEPS))
    for index, (p, before, after) in enumerate(zip(params, source.before, source.after)):
        p = whole(p)
        error = (p.detach() - after).norm() / (after - before).norm()
        assert error < FLOAT64, (index, tuple(p.shape), error)
    return ours


# One device


@pytest.mark.parametrize("name", ALONE)
def test_training_goes_on_as_the_sources_would(name):
    ours = go_on(ALONE[name], trained(name))
    assert all(group["lr"] != WRONG["lr"] for group in ours.param_groups)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_one_device_goes_on_from_the_files_of_three_ranks(name, distributed):
    ours = go_on(DISTRIBUTED[name], distributed[name])
    assert all(group["lr"] != WRONG["lr"] for group in ours.param_groups)


@pytest.mark.parametrize("name", [name for name in ALONE if name != "nanochat"])
def test_momentum_of_the_other_convention_gives_the_same_updates(name):
    style = "ema" if name in ("motif", "llamafactory") else "classical"
    go_on(ALONE[name], trained(name), momentum_style=style)


@pytest.mark.parametrize("name", ALONE)
def test_state_is_taken_over_into_host_memory(name):
    go_on(ALONE[name], trained(name), offload=True)


# Several ranks


def place_rows(W: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(W, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)


def place_columns(W: torch.Tensor) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(W, mesh, [Shard(W.ndim - 1)], src_data_rank=None)


LAYOUTS = {
    "FSDP2": (place_rows, {}),
    "columns": (place_columns, {}),
    "replicas": (torch.clone, {"process_group": True}),
    "ZeRO-2": (torch.clone, {"process_group": True, "grad_reduce": "mean"}),
    "ZeRO-2, offloaded": (
        torch.clone,
        {"process_group": True, "grad_reduce": "mean", "offload": True},
    ),
}


def go_on_in_layouts(every: dict[str, Trained], cases: str) -> None:
    for name, source in every.items():
        for layout, (place, options) in LAYOUTS.items():
            if "process_group" in options:
                options = {**options, "process_group": dist.group.WORLD}
            with named(f"{name}, {layout}"):
                go_on(globals()[cases][name], source, place, **options)


@pytest.mark.slow
def test_two_ranks_go_on_from_the_files_of_three_in_every_layout(distributed):
    run_ranks(go_on_in_layouts, 2, distributed, "DISTRIBUTED")


@pytest.mark.slow
def test_two_ranks_go_on_from_the_file_of_one_in_every_layout():
    run_ranks(go_on_in_layouts, 2, {name: trained(name) for name in ALONE}, "ALONE")


# torch's own


def torchs_own(muon: Params, others: Params, **adamw: Any) -> list[Any]:
    own = dict(lr=0.02, momentum=0.9, weight_decay=0.2)
    return [torch.optim.Muon(muon, **own), torch.optim.AdamW(others, lr=0.01, **adamw)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_own_muon_and_adamw_go_on(dtype):
    shapes = [(96, 96), (128, 48), (48, 128)]  # fewer numbers round too far apart in bfloat16
    muon, others = weights(shapes, 0, dtype), weights(OTHERS, 1, dtype)
    lr = 0.3 if dtype == torch.bfloat16 else 0.02  # far above a bit of the weights
    theirs = torchs_own(muon, others)
    theirs[0].param_groups[0]["lr"] = theirs[1].param_groups[0]["lr"] = lr
    train([*muon, *others], theirs, range(STEPS))
    saved = through_torch_save(of_two([[each.state_dict() for each in theirs]]))
    before = [p.detach().clone() for p in (*muon, *others)]
    params = [nn.Parameter(p.clone()) for p in before]
    groups = in_groups(params[: len(muon)], params[len(muon) :])
    ours = Muon(**presets.torch_muon(groups), ns_dtype=torch.bfloat16)
    ours.load_foreign_state_dict(saved, kind="torch_muon")
    for p, q in zip(params, muon):
        momentum = ours.state[p]["momentum_buffer"]
        assert momentum.dtype == dtype and torch.equal(momentum, saved_momentum(theirs[0], q))
    for p, q in zip(params[len(muon) :], others):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.state[p][key], theirs[1].state[q][key])
    train([*muon, *others], theirs, range(STEPS, 2 * STEPS))
    train(params, [ours], range(STEPS, 2 * STEPS))
    for p, q, start in zip(params, (*muon, *others), before):
        moved = (p - start).float(), (q - start).float()
        assert (moved[0] - moved[1]).norm() < BFLOAT16 * moved[1].norm()


def saved_momentum(theirs: torch.optim.Optimizer, p: nn.Parameter) -> torch.Tensor:
    return theirs.state[p]["momentum_buffer"]


@pytest.mark.parametrize("absent", ["muon", "adamw"])
def test_one_of_two_optimizers_may_start_anew(absent):
    case = ALONE["torch_muon"]
    saved = trained("torch_muon").states(case)
    ours = case.ours(weights(MATRICES, 0), weights(OTHERS, 1))
    del saved[absent]
    with pytest.raises(ValueError, match=f"states has nothing for .*'{absent}': None"):
        ours.load_foreign_state_dict(saved, kind="torch_muon")
    ours.load_foreign_state_dict({**saved, absent: None}, kind="torch_muon")
    state = ours.state_dict()["state"]
    assert state[0]["momentum_buffer"].any() == (absent == "adamw")
    assert state[len(MATRICES)]["step"] == (0 if absent == "adamw" else STEPS)


class Model(nn.Module):
    """Its parameters come in another order than those of Muon and AdamW."""

    def __init__(self, seed: int = 0, wide: int = 6):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, wide), nn.Linear(wide, 4)])
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(self.frozen(x)))


def train_model(model: Model, optim: Any, steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        model(torch.randint(0, 7, (5,), generator=generator)).square().mean().backward()
        optim.step()
        optim.zero_grad()


def ours_of(model: nn.Module, **options: Any) -> Any:
    return Muon(optimizer.muon.get_default_muon_param_groups(model), **options)


def adamw_beside(model: Model, **options: Any) -> Any:
    params = model.named_parameters() if options.pop("named", False) else model.parameters()
    theirs = torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.9), eps=1e-9, **options)
    train_model(model, theirs)
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
    model = Model()
    theirs = adamw_beside(model, named=is_named, weight_decay=0.3)
    saved, other = through_torch_save(theirs.state_dict()), copy.deepcopy(model)
    ours = ours_of(other, momentum_style=style, momentum=0.75)
    if form == "names":  # of a frozen one, which no group has, there is only the name
        ours.add_param_group({"params": [("x", nn.Parameter(torch.zeros(3)))], "use_muon": False})
        ours.param_groups.pop(), ours._names.pop()
    ours.load_foreign_state_dict(saved, kind="torch_adamw", params=params(other))
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        if not q.requires_grad:
            assert q not in ours.state, name
            continue
        own, expected = ours.state[q], theirs.state[p]
        if q in set(ours.param_groups[0]["params"]):
            seed = expected["exp_avg"] * (1 if style == "ema" else 4)
            assert list(own) == ["momentum_buffer"] and torch.equal(own["momentum_buffer"], seed)
        else:
            assert all(torch.equal(own[key], expected[key]) for key in expected), name
    for group in ours.param_groups:
        assert group["lr"] == 0.01 and group["weight_decay"] == 0.3
    assert ours.param_groups[0]["momentum"] == 0.75
    assert ours.param_groups[1]["adamw_betas"] == (0.8, 0.9)
    assert ours.param_groups[1]["adamw_eps"] == 1e-9
    embeddings = model.embed.weight, other.embed.weight
    for p in embeddings:
        p.grad = torch.ones_like(p)
    theirs.step()
    ours.step()
    torch.testing.assert_close(*embeddings, rtol=1e-12, atol=1e-12)


def test_adamws_rates_go_to_matrices_only_with_the_scale_they_fit():
    model = Model()
    theirs = adamw_beside(model, weight_decay=0.3)
    ours = ours_of(model, adjust_lr="original", lr=0.02, weight_decay=0.1)
    params = model.parameters()
    ours.load_foreign_state_dict(theirs.state_dict(), kind="torch_adamw", params=params)
    rates = [(group["lr"], group["weight_decay"]) for group in ours.param_groups]
    assert rates == [(0.02, 0.1), (0.01, 0.3)]


@pytest.mark.parametrize("kind", ["torch_adamw", "motif"])
def test_state_by_names_is_told_by_names(kind):
    model = Model()
    if kind == "motif":
        groups = optimizer.muon.get_default_muon_param_groups(model)
        matrices, names = groups[0]["params"], groups[0].pop("names")
        groups[1].pop("names")
        theirs = sources.Motif([groups[1], groups[0]], lr=0.01)  # in another order
        train_model(model, theirs)
        assert names[0].startswith("layers") and len(matrices) == 2
    else:
        theirs = adamw_beside(model)
        for q in model.frozen.parameters():  # which torch wants to know, too
            q.requires_grad_(True)
    state = {p: dict(own) for p, own in theirs.state.items()}
    saved = through_torch_save(get_optimizer_state_dict(model, theirs))
    for q in model.frozen.parameters():
        q.requires_grad_(False)
    ours = ours_of(model, momentum_style="ema" if kind == "torch_adamw" else "classical")
    ours.load_foreign_state_dict(saved, kind=kind)
    for p in model.parameters():
        if not p.requires_grad:
            continue
        for key, value in ours.state[p].items():
            old = {"exp_avg": "moment1", "exp_avg_sq": "moment2"} if kind == "motif" else {}
            if kind == "torch_adamw" and key == "momentum_buffer":
                key = "exp_avg"
            assert torch.equal(value, state[p][old.get(key, key)])
    assert all(group["lr"] == 0.01 for group in ours.param_groups)


def test_a_scheduler_goes_on_from_a_checkpoint_of_another_optimizer():
    def make(optim: Any) -> Any:
        return lr_scheduler.CosineAnnealingLR(optim, 10)

    model = Model()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = make(theirs)
    for _ in range(4):
        train_model(model, theirs, 1)
        schedule.step()
    ours = ours_of(model)
    saved, at = through_torch_save(theirs.state_dict()), through_torch_save(schedule.state_dict())
    ours.load_foreign_state_dict(saved, kind="torch_adamw", params=model.parameters())
    rates = [group["lr"] for group in ours.param_groups]
    resumed = make(ours)
    resumed.load_state_dict({**at, "base_lrs": [g["initial_lr"] for g in ours.param_groups]})
    for group, rate in zip(ours.param_groups, rates):
        group["lr"] = rate
    assert rates == [theirs.param_groups[0]["lr"]] * 2
    for _ in range(5):
        model.norm.weight.grad = torch.ones_like(model.norm.weight)
        schedule.step(), ours.step(), resumed.step()
        assert [group["lr"] for group in ours.param_groups] == pytest.approx(
            [theirs.param_groups[0]["lr"]] * 2
        )


def test_hyperparameters_stay_where_they_are_not_wanted():
    ours = ALONE["motif"].ours(weights(MATRICES, 0), weights(OTHERS, 1))
    before = [{k: v for k, v in group.items() if k != "params"} for group in ours.param_groups]
    states = trained("motif").states(ALONE["motif"])
    ours.load_foreign_state_dict(states, kind="motif", hyperparameters=False)
    for group, own in zip(ours.param_groups, before):
        assert {k: group[k] for k in own} == own
    assert ours.state_dict()["state"][0]["momentum_buffer"].any()


def test_group_options_that_no_checkpoint_has_stay_as_they_are():
    case, options = ALONE["torch_muon"], {"cautious": True, "ns_coefficients": "polar_express"}
    ours = case.ours(weights(MATRICES, 0), weights(OTHERS, 1), beta2=0.5)
    ours.param_groups[0].update(options)
    ours.load_foreign_state_dict(trained("torch_muon").states(case), kind="torch_muon")
    assert {key: ours.param_groups[0][key] for key in options} == options
    assert ours.param_groups[0]["beta2"] == 0.5
    assert not ours.state_dict()["state"][0]["second_momentum_buffer"].any()


def test_different_hyperparameters_within_one_group_are_refused():
    model = Model()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.01)
    train_model(model, theirs)
    ours, given = ours_of(model), [*matrices, *vectors]
    load = functools.partial(
        ours.load_foreign_state_dict, theirs.state_dict(), kind="torch_adamw", params=given
    )
    with pytest.raises(ValueError, match=r"weight_decay is 0.1 for embed.*but 0.0 for .*groups of"):
        load()
    load(hyperparameters=False)


def test_a_checkpoint_from_before_the_first_step_brings_its_hyperparameters():
    for case in ALONE.values():
        muon, others = weights(case.shapes, 0), weights(OTHERS, 1)
        states = case.pack(
            [through_torch_save([o.state_dict() for o in case.source(muon, others)])]
        )
        ours = case.ours(muon, others)
        ours.load_foreign_state_dict(states, kind=case.kind)
        assert all(group["lr"] != WRONG["lr"] for group in ours.param_groups)
        for own in ours.state_dict()["state"].values():
            assert not any(torch.as_tensor(value).any() for value in own.values())


def test_a_matrix_that_never_had_a_gradient_starts_with_zeros():
    muon, others = weights(MATRICES, 0), weights(OTHERS, 1)
    theirs = torchs_own(muon, others)
    train([*muon[1:], *others], theirs, range(STEPS))
    ours = ALONE["torch_muon"].ours(muon, others)
    states = of_two([[each.state_dict() for each in theirs]])
    ours.load_foreign_state_dict(states, kind="torch_muon")
    assert not ours.state[muon[0]]["momentum_buffer"].any()
    assert ours.state[muon[1]]["momentum_buffer"].any()


def test_what_is_loaded_is_a_copy():
    for name, case in ALONE.items():
        states = trained(name).states(case)
        kept = copy.deepcopy(states)
        muon, others = weights(case.shapes, 0), weights(OTHERS, 1)
        ours = case.ours(muon, others)
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
    case, source = ALONE["nanochat"], trained("nanochat")
    ours = case.ours(*(weights(shapes, 0, torch.bfloat16) for shapes in (MATRICES, OTHERS)))
    states = source.states(case)
    for own in states["state"].values():  # as it is of a model in bfloat16
        own.update({k: v.bfloat16() for k, v in own.items() if isinstance(v, torch.Tensor)})
    ours.load_foreign_state_dict(states, kind="nanochat")
    group = ours.param_groups[2]  # four of (6, 10), whose longer side is the columns
    stack = states["state"][3]
    for index, p in enumerate(group["params"]):
        momentum, V = (ours.state[p][key] for key in ("momentum_buffer", "second_momentum_buffer"))
        assert momentum.dtype == torch.bfloat16 and V.dtype == torch.float32 and V.shape == (10,)
        assert torch.equal(momentum, stack["momentum_buffer"][index])
        assert torch.equal(V, stack["second_momentum_buffer"][index, 0].float())


def test_nanochats_second_moments_of_experts_are_each_their_own():
    params = weights([(3, 6, 4), (3, 6, 4)], 0)
    group = dict(kind="muon", lr=0.02, momentum=0.9, ns_steps=5, beta2=0.9, weight_decay=0.2)
    source = sources.Nanochat([{**group, "params": params}])
    train(params, [source], range(STEPS))
    saved, copies = (
        through_torch_save(source.state_dict()),
        [nn.Parameter(p.clone()) for p in params],
    )
    pairs = [(f"experts.{i}", p) for i, p in enumerate(copies)]
    ours = MuonAdamW([{**group, "params": pairs, "expert_keys": ["experts"]}])
    ours.load_foreign_state_dict(saved, kind="nanochat")
    stack = saved["state"][0]["second_momentum_buffer"]  # (2, 3, 6, 1)
    for index, p in enumerate(copies):
        V = ours.state[p]["second_momentum_buffer"]
        assert torch.equal(V, stack[index, ..., 0].float())


def test_momentum_in_bfloat16_stays_so_and_is_scaled_in_one_rounding():
    source = trained("motif")
    states = source.states(ALONE["motif"])
    for own in states["state"].values():
        if "momentum_buffer" in own:
            own["momentum_buffer"] = own["momentum_buffer"].bfloat16()
    for style, factor in (("classical", 1.0), ("ema", 0.1)):
        muon = weights(MATRICES, 0)
        ours = ALONE["motif"].ours(muon, weights(OTHERS, 1), momentum_style=style)
        ours.load_foreign_state_dict(states, kind="motif")
        for index, p in enumerate(muon):
            found, saved = ours.state[p]["momentum_buffer"], states["state"][index]
            assert found.dtype == torch.bfloat16
            exact = saved["momentum_buffer"].double() * factor
            assert torch.equal(found, exact.bfloat16())


def test_an_adam_whose_decay_is_in_the_gradient_is_refused():
    for decay in (0.1, 0.0):  # without decay it is AdamW
        model = Model()
        theirs = torch.optim.Adam(model.parameters(), weight_decay=decay)
        train_model(model, theirs)
        ours, params = ours_of(model), model.parameters()
        load = functools.partial(ours.load_foreign_state_dict, theirs.state_dict(), params=params)
        if decay:
            with pytest.raises(ValueError, match=r"Adam's, with weight_decay 0\.1"):
                load(kind="torch_adamw")
        else:
            load(kind="torch_adamw")
            assert ours.state[model.embed.weight]["step"] == STEPS


def test_amsgrad_is_left_behind_with_a_warning():
    model = Model()
    theirs = adamw_beside(model, amsgrad=True)
    ours, load = ours_of(model), functools.partial(pytest.warns, match="amsgrad=True")
    with load(UserWarning):
        ours.load_foreign_state_dict(
            theirs.state_dict(), kind="torch_adamw", params=model.parameters()
        )
    assert ours.state[model.embed.weight].keys() == {"step", "exp_avg", "exp_avg_sq"}


# Positions


def test_parameters_given_in_order_are_found_in_any_groups(distributed):
    for name, every in (("nanochat", distributed), ("keller_jordan", distributed)):
        case, source = DISTRIBUTED[name], every[name]
        params = [nn.Parameter(W.clone()) for W in source.before]
        muon, others = params[: len(case.shapes)], params[len(case.shapes) :]
        adamw = dict(adamw_betas=(0.8, 0.95), adamw_eps=1e-10)
        groups = in_groups(muon[::-1], others[::-1])
        ours = Muon(groups, flatten=True, momentum_style="ema", beta2=0.9, **adamw)
        if name == "nanochat":
            given = [p for group in nanochat_groups(muon, others) for p in group["params"]]
        else:
            given = [*others, *muon]
        load = functools.partial(
            ours.load_foreign_state_dict, source.states(case), kind=case.kind, params=given
        )
        with pytest.raises(ValueError, match=r"lr is .* one group here"):
            load()
        load(hyperparameters=False)
        reference = case.ours(muon, others)
        reference.load_foreign_state_dict(source.states(case), kind=case.kind)
        for p in params:
            expected = reference.state[p]
            assert all(torch.equal(ours.state[p][key], expected[key]) for key in expected)


@pytest.mark.slow
def test_fsdp_over_tensor_parallelism_takes_its_strides():
    run_ranks(go_on_in_strides, 4, {name: trained(name) for name in ALONE})


def go_on_in_strides(every: dict[str, Trained]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    place = functools.partial(
        distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None
    )
    for name, source in every.items():
        with named(name):
            go_on(ALONE[name], source, place)


@pytest.mark.slow
def test_a_model_under_fsdp2_takes_over_what_one_device_does():
    run_ranks(load_under_fsdp2, 2)


def load_under_fsdp2() -> None:
    model, sharded = Model(), Model()
    theirs = adamw_beside(model, named=True, weight_decay=0.3)
    sharded.load_state_dict(model.state_dict())
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    optimizers = []
    for each, params in ((model, model.parameters()), (sharded, None)):  # by order, by names
        optimizers.append(ours_of(each, momentum_style="ema"))
        optimizers[-1].load_foreign_state_dict(
            through_torch_save(theirs.state_dict()), kind="torch_adamw", params=params
        )
    for _ in range(STEPS):
        for each, optim in zip((model, sharded), optimizers):
            train_model(each, optim, 1)
    for (name, p), q in zip(model.named_parameters(), sharded.parameters()):
        torch.testing.assert_close(q.full_tensor(), p, rtol=1e-9, atol=1e-9, msg=name)


# What does not fit


def mixed(change: Callable[[Any], Any], rank: int = 0) -> Callable[[Any], Any]:
    """A change of one state dict."""

    def changed(states: Any) -> Any:
        each = states
        if isinstance(states, dict) and "muon" in states:
            each = states["muon"]
        each = each[rank] if isinstance(each, list) else each
        change(each)
        return states

    return changed


def swap(states: Any) -> None:
    state = states["state"]
    state[0], state[1] = state[1], state[0]


def drop_a_parameter(states: Any) -> None:
    group = states["param_groups"][-1]
    states["state"].pop(group["params"].pop(), None)


def other_shape(states: Any) -> None:
    key = "momentum_buffer"
    own = next(own for own in states["state"].values() if key in own)
    own[key] = own[key].mT.contiguous()


def no_step(states: Any) -> None:
    next(own for own in states["state"].values() if "step" in own).pop("step")


def integers(states: Any) -> None:
    own = next(own for own in states["state"].values() if "momentum_buffer" in own)
    own["momentum_buffer"] = own["momentum_buffer"].long()


def other_rename(states: Any) -> None:
    states["param_groups"][0]["names"] = [f"layers.{i + 1}.weight" for i in range(len(MATRICES))]


def stepped_twice(states: Any) -> None:
    next(own for own in states["state"].values() if "step" in own)["step"] += 1


COMPLETE = "give the state dicts of all ranks"
FAULTS = [
    ("torch_muon", lambda states: states["muon"], None, "states has nothing for .* AdamW's here"),
    ("torch_muon", mixed(swap), None, r"momentum_buffer of .* has shape \(12, 4\), where \(6, 10"),
    ("torch_muon", mixed(drop_a_parameter), None, r"has groups of \[6\] parameters.*\[7\]"),
    ("torch_muon", mixed(other_shape), None, r"has shape \(10, 6\), where \(6, 10\)"),
    ("torch_muon", mixed(integers), None, "torch.int64, no real tensor"),
    ("torch_muon", lambda states: [*states.values()], None, "be a state dict, found a list"),
    ("torch_muon", lambda states: states["adamw"], None, "looks like kind='torch_adamw'"),
    ("torch_muon", lambda states: {"optimizer": states}, None, "must be an optimizer's state"),
    ("torch_muon", lambda states: None, None, "found a NoneType"),
    ("torch_muon", lambda states: states, "muon", "kind must be one of 'torch_muon', "),
    ("motif", mixed(no_step), None, "has no step: is it AdamW's"),
    ("motif", mixed(other_rename), None, "is where states has layers.1.weight"),
    ("motif", lambda states: {"muon": states, "adamw": states}, None, "has one state dict for"),
    (
        "llamafactory",
        mixed(lambda s: s["state"][0].pop("use_muon")),
        None,
        "has no use_muon in states",
    ),
    (
        "llamafactory",
        mixed(lambda s: s["state"][0].update(use_muon=False)),
        None,
        "was AdamW's, parameter 0 of",
    ),
    ("nanochat", mixed(other_shape), None, r"momentum_buffer of .* has shape \(\d+, \d+\)"),
    ("nanochat", lambda states: [states, states], None, r"should stack 2 of 4 matrices.*all ranks"),
    ("keller_jordan", mixed(other_shape), None, "in the order in which the other optimizer was"),
    ("keller_jordan", lambda states: states, "nanochat", "looks like kind='keller_jordan'"),
    ("keller_jordan", lambda states: [states, states], None, COMPLETE),
]
FAULTS_OF_RANKS = [
    ("nanochat", lambda states: states[:-1], r"state dicts of all ranks, in their order"),
    ("nanochat", lambda states: states[1:], "state dicts of all ranks, in their order"),
    ("nanochat", lambda states: states[0], "state dicts of all ranks, in their order"),
    ("nanochat", lambda states: states[::-1], "in the order of the ranks"),
    ("nanochat", mixed(stepped_twice, 1), "all ranks of one checkpoint"),
    ("nanochat", mixed(drop_a_parameter, 1), "has groups of .* of one checkpoint"),
    ("keller_jordan", lambda states: states[:-1], COMPLETE),
    ("keller_jordan", lambda states: states[1:], COMPLETE),
    ("keller_jordan", lambda states: states[0], COMPLETE),
    ("keller_jordan", lambda states: states[::-1], COMPLETE),
    ("keller_jordan", mixed(stepped_twice, 1), "on different ranks"),
    ("keller_jordan, by number of elements", mixed(drop_a_parameter), "has groups of"),
]


def check_refused(case: Case, states: Any, kind: str, match: str) -> None:
    muon, others = weights(case.shapes, 0), weights(OTHERS, 1)
    ours = case.ours(muon, others)
    train([*muon, *others], [ours], range(1))
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=match):
        ours.load_foreign_state_dict(states, kind=kind)
    assert_equal(ours.state_dict(), before)


@pytest.mark.parametrize("name, change, kind, match", FAULTS)
def test_what_does_not_fit_raises_and_changes_nothing(name, change, kind, match):
    case = ALONE[name]
    states = change(trained(name).states(case))
    check_refused(case, states, kind or case.kind, match)


@pytest.mark.parametrize("name, change, match", FAULTS_OF_RANKS)
def test_files_of_ranks_that_do_not_fit_raise_and_change_nothing(name, change, match, distributed):
    case = DISTRIBUTED[name]
    check_refused(case, change(distributed[name].states(case)), case.kind, match)


def test_a_checkpoint_of_this_package_is_no_foreign_one():
    ours = ALONE["motif"].ours(weights(MATRICES, 0), weights(OTHERS, 1))
    with pytest.raises(ValueError, match="this package's own: use load_state_dict"):
        ours.load_foreign_state_dict(ours.state_dict(), kind="motif")


def test_parameters_in_another_order_than_they_were_saved_in_are_refused():
    case = ALONE["torch_muon"]
    muon, others = weights(MATRICES, 0), weights(OTHERS, 1)
    ours, states = case.ours(muon, others), trained("torch_muon").states(case)
    load = functools.partial(ours.load_foreign_state_dict, states, kind="torch_muon")
    with pytest.raises(ValueError, match="has shape"):
        load(params=[*muon[::-1], *others])
    with pytest.raises(ValueError, match="6 are given"):
        load(params=[*muon[1:], *others])
    with pytest.raises(ValueError, match=r"params has .*\[0\] twice"):
        load(params=[*muon, muon[0], *others])
    with pytest.raises(ValueError, match="names, found a int"):
        load(params=[3])
    load(params=[*others, *muon])  # of two optimizers each takes its own


def test_state_of_a_parameter_that_is_in_no_group_is_refused():
    model = Model()
    theirs = adamw_beside(model)
    model.embed.requires_grad_(False)
    ours = ours_of(model)
    with pytest.raises(ValueError, match=r"embed.weight, .* is in no group of this"):
        ours.load_foreign_state_dict(
            theirs.state_dict(), kind="torch_adamw", params=model.named_parameters()
        )


@pytest.mark.slow
def test_dtensors_in_a_checkpoint_lie_as_the_parameters_or_are_refused():
    run_ranks(load_dtensors, 2)


def load_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole, case = weights(MATRICES, 0), ALONE["motif"]
    muon = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole]
    theirs = sources.Motif([named_groups(muon, [])[0]])
    states = {p: {"momentum_buffer": torch.ones_like(p) * i} for i, p in enumerate(muon)}
    theirs.state.update(states)
    saved = theirs.state_dict()
    ours = case.ours([nn.Parameter(p.detach().clone()) for p in muon], [])
    ours.load_foreign_state_dict(saved, kind="motif")
    for index, p in enumerate(ours.param_groups[0]["params"]):
        momentum = ours.state[p]["momentum_buffer"]
        assert momentum.placements == (Shard(0),) and (momentum.to_local() == index).all()
    plain = case.ours(whole, [])
    with pytest.raises(ValueError, match=r"is \[Shard\(dim=0\)\].*full_tensor"):
        plain.load_foreign_state_dict(saved, kind="motif")


def test_no_warning_is_given_where_everything_fits():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, case in ALONE.items():
            ours = case.ours(weights(case.shapes, 0), weights(OTHERS, 1))
            ours.load_foreign_state_dict(trained(name).states(case), kind=case.kind)


REPLACEMENTS = [None, "text", 3, -1.0, float("nan"), True, [], {}, torch.zeros(2), torch.zeros(())]


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


@pytest.mark.parametrize("name", [*ALONE, *(f"ranks: {name}" for name in DISTRIBUTED)])
def test_whatever_is_damaged_raises_a_value_error_or_is_loaded(name, distributed):
    ranks = name.removeprefix("ranks: ")
    if ranks in DISTRIBUTED and ranks != name:
        case, source = DISTRIBUTED[ranks], distributed[ranks]
    else:
        case, source = ALONE[name], trained(name)
    generator, refused = random.Random(0), 0
    muon, others = weights(case.shapes, 0), weights(OTHERS, 1)
    ours = case.ours(muon, others)
    ours.load_foreign_state_dict(source.states(case), kind=case.kind)
    for _ in range(DAMAGES):
        states, before = source.states(case), copy.deepcopy(ours.state_dict())
        damage(states, generator)
        try:
            ours.load_foreign_state_dict(states, kind=case.kind)
        except ValueError:
            refused += 1
            assert_equal(ours.state_dict(), before)
        else:
            ours.load_foreign_state_dict(source.states(case), kind=case.kind)
    assert refused > DAMAGES // 4
