"""Checkpoints of other optimizers: training goes on as theirs would, or nothing is loaded."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import foreign_sources as sources
from kernel import optimizer
from layouts import case as named
from ranks import run_ranks

Muon, MuonAdamW, presets = optimizer.Muon, optimizer.MuonAdamW, optimizer.presets

# Counts that three ranks do not divide: of one shape four, two and one matrices.
MATRICES = [(6, 10), (12, 4), (6, 10), (8, 8), (6, 10), (12, 4), (6, 10)]
KERNELS = [(6, 10), (4, 3, 3, 3), (12, 4), (8, 5, 2, 2), (6, 10), (4, 3, 3, 3), (12, 4)]
OTHERS = [(9, 120), (6,), (3, 4)]  # nanochat divides the first over ranks, before it did all

STEPS, RANKS = 3, 3

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


def part_for(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(p, DTensor):
        return value.clone()
    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)


def train(params: Params, optimizers: Sequence[Any], steps: range) -> None:
    for t in steps:
        for index, p in enumerate(params):
            p.grad = part_for(p, gradient(p, t, index))
        for each in optimizers:
            each.step()


def through_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


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
    """Muon's and AdamW's, each of all ranks."""
    muon, adamw = ([own[number] for own in files] for number in (0, 1))
    return {"muon": muon, "adamw": adamw} if len(files) > 1 else [muon[0], adamw[0]]


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


def our_keller_jordans_first(muon: Params, others: Params, **options: Any) -> Any:
    flat = {"ns_steps": 6, "momentum_style": "classical", "adjust_lr": "original"}
    given = {**presets.keller_jordan(muon), **flat, "weight_decay": 0.0}
    ours = Muon(**{**given, **WRONG, **options})
    ours.add_param_group({"params": others, "use_muon": False, "adamw_betas": (0.5, 0.5)})
    return ours


def our_nanochat(muon: Params, others: Params, **options: Any) -> Any:
    return MuonAdamW(nanochat_groups(muon, others, **WRONG), **options)


def our_older_nanochat(muon: Params, others: Params, **options: Any) -> Any:
    groups = nanochat_groups(muon, others)
    own = {"ns_coefficients": "quintic", "momentum_style": "ema", "adjust_lr": "original"}
    groups = [in_groups(muon, [])[0], in_groups([], others)[1]]
    return Muon(groups, **{**own, "weight_decay": 0.0, **WRONG, **options})


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


def older_nanochat(muon: Params, others: Params) -> list[Any]:
    adamw = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    slices = sources.Nanochat([{**adamw, "params": others}], distributed=True, small=0)
    return [sources.KellerJordanBySize(muon, lr=0.03, momentum=0.9, numel=False), slices]


def older_stacked_nanochat(muon: Params, others: Params) -> list[Any]:
    groups = nanochat_groups(muon, others)
    for group in groups:
        del group["kind"]
    every = [sources.Nanochat(g, distributed=True, small=0) for g in (groups[2:], groups[:2])]
    return every


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
        lambda files: dict(zip(("muon", "adamw"), files[0])),
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
    "nanochat, two optimizers": Case(
        "nanochat", older_nanochat, of_two, our_older_nanochat, ranks=RANKS
    ),
    "nanochat, two optimizers, stacks": Case(
        "nanochat", older_stacked_nanochat, of_two, our_nanochat, ranks=RANKS
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
        lambda files: {"muon": [own[0] for own in files], "adamw": files[0][1]},
        our_keller_jordans_matrices,
        ranks=RANKS,
    ),
    "keller_jordan, by number of elements": Case(
        "keller_jordan",
        lambda muon, others: [sources.KellerJordanBySize(muon, lr=0.03), adamw_of(others)],
        lambda files: {"muon": [own[0] for own in files], "adamw": files[0][1]},
        our_keller_jordans_matrices,
        ranks=RANKS,
    ),
    "keller_jordan, the first": Case(
        "keller_jordan",
        lambda muon, others: [
            sources.KellerJordanFirst(muon, lr=0.03, momentum=0.9, adamw_params=others)
        ],
        of_ranks,
        our_keller_jordans_first,
        (*MATRICES, (4, 3, 3, 3)),
        RANKS,
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
    files = [through_file(own)]
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
        ours.turn_on_cpu_offload()
    ours.load_foreign_state_dict(source.states(case), kind=case.kind)
    train(params, [ours], range(STEPS, 2 * STEPS))
    for index, (p, before, after) in enumerate(zip(params, source.before, source.after)):
        p = p.full_tensor() if isinstance(p, DTensor) else p
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
