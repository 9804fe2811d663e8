"""What the documents promise that can be looked up: links, paths, defaults, messages, code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reference as ref
from checkout import ROOT
from comparisons import relative_error_of_known
from kernel import optimizer

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "examples" / "README.md"])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:benchmarks|docs|examples|scripts|tests|torch-ext)/[\w./-]+)")
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_document
def test_links_lead_somewhere(document):
    for link in LINK.findall(document.read_text()):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


@each_document
def test_files_that_are_named_exist(document):
    for path in PATH.findall(document.read_text()):
        assert (ROOT / path.split("::")[0].rstrip(".")).exists(), f"{document.name}: {path}"


@each_document
def test_code_is_python(document):
    for block in CODE.findall(document.read_text()):
        if "{{" not in block:  # filled in by the builder
            ast.parse(block)


@pytest.mark.filterwarnings("error")
def test_the_code_of_the_readme_runs_as_it_stands_and_shows_names(capsys):
    model = nn.TransformerEncoderLayer(64, nhead=4)
    loss = model(torch.randn(8, 16, 64)).square().mean()
    names: dict[str, Any] = {"model": model, "loss": loss}
    first_step, groups_by_hand = CODE.findall((ROOT / "README.md").read_text())
    assert len(first_step.split("\n\n")[1].splitlines()) <= 5
    exec(first_step, names)
    assert len(names["optim"].state) == len(list(model.parameters()))
    exec(groups_by_hand, names)
    table = capsys.readouterr().out
    assert all(f"{name} " in table for name, _ in names["model"].named_parameters())
    assert all(len(line) <= 100 for line in table.splitlines())


class Attention(nn.Module):
    """Two heads of 128, with projections of usual names."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 256) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (proj(x).unflatten(-1, (2, 128)).transpose(1, 2) for proj in projections)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.filterwarnings("error")
def test_the_readmes_row_of_qk_clip_runs_as_it_stands():
    text = (ROOT / "README.md").read_text()
    (row,) = (cells for cells in rows(text) if cells[0] == "attention logits that grow")
    (argument,) = re.findall(r"`(clip_config=.*?)`", row[1])
    (line,) = re.findall(r"`(optim\..*?)`", row[1])
    model = nn.Sequential(Attention())
    names: dict[str, Any] = {"optimizer": optimizer, "model": model}
    exec(f"optim = optimizer.Muon.for_model(model, lr=1e-3, {argument})\n{line}", names)
    for _ in range(2):
        model(torch.randn(2, 8, 64)).square().mean().backward()
        names["optim"].step()
        names["optim"].zero_grad()
    stats = names["optim"].qk_clip_stats()
    assert (stats["steps"], stats["heads"]) == (2, 2)


def rows(text: str) -> Iterator[list[str]]:
    """Cells of all tables, without their heads."""
    for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE):
        cells = [cell.strip() for cell in line.split("|")]
        if not set(line) <= set("|-: "):
            yield cells


def test_the_page_of_options_is_made_from_their_declarations():
    command = [sys.executable, str(ROOT / "scripts" / "options_page.py"), "--check"]
    subprocess.run(command, check=True)


# -- docs/migration.md -----------------------------------------------------------------------------


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def ingredients(section: str) -> dict[str, Any]:
    """What the code of a section takes for granted."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.Linear(6, 4, bias=False))
    matrices, others = (g["params"] for g in optimizer.muon.get_default_muon_param_groups(model))
    muon, adamw = {"params": matrices}, {"params": others}
    groups = [{**muon, "use_muon": True}, {**adamw, "use_muon": False}]
    if section == "nanochat":
        groups = [{**muon, "kind": "muon", "lr": 0.02}, {**adamw, "kind": "adamw", "lr": 0.2}]
    elif section.startswith("microsoft"):
        groups = [muon, {**adamw, "algorithm": "adamw"}]
    return {
        **{"torch": torch, "optimizer": optimizer, "get_kernel": lambda *_, **__: optimizer},
        **{"Muon": optimizer.Muon, "presets": optimizer.presets},
        **{"model": model, "matrices": matrices, "others": others, "groups": groups},
        **{"lr": 1e-3, "rest_lr": 1e-3, "adamw_weight_decay": 0.1, "adamw_betas": (0.9, 0.95)},
    }


def sections(document: Path) -> dict[str, str]:
    parts = re.split(r"^## (.*)$", document.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


MIGRATION = sections(ROOT / "docs" / "migration.md")


@pytest.mark.parametrize(
    "section", [name for name in MIGRATION if name not in ("Checkpoints", "Small gradients")]
)
def test_migration_takes_a_step_by_every_line(section, process_group):
    for block in CODE.findall(MIGRATION[section]):
        lines = re.split(r"^(?=optim = )", block, flags=re.MULTILINE)
        for line in lines[1:]:
            names = ingredients(section)
            exec(lines[0] + line, names)
            before = [p.detach().clone() for p in names["model"].parameters()]
            for p in names["model"].parameters():
                p.grad = torch.randn_like(p)
            names["optim"].step()
            trained = {id(p) for g in names["optim"].param_groups for p in g["params"]}
            for p, was in zip(names["model"].parameters(), before):
                assert torch.equal(p, was) == (id(p) not in trained)


PRESETS: dict[str, tuple[Any, Any]] = {
    "torch.optim": (ref.TorchMuonReference, optimizer.presets.torch_muon),
    "dion": (ref.DionReference, optimizer.presets.dion),
    "Motif": (
        ref.MotifReference,
        lambda params, lr: optimizer.presets.motif([{"params": params, "use_muon": True}], lr),
    ),
    "Moonlight": (
        ref.MoonlightReference,
        lambda params, lr: optimizer.presets.moonlight(lr, muon_params=params),
    ),
    "Keller Jordan": (ref.KellerJordanReference, optimizer.presets.keller_jordan),
    "nanochat": (ref.NanochatReference, None),
}


def distance(name: str, norm: float) -> float:
    """Of a preset to its source's formulas after three steps with gradients of that norm."""
    make_source, preset = PRESETS[name]
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64), (64, 128), (128, 64)]
    params = [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in shapes]
    before = [p.detach().double() for p in params]
    if preset is None:
        source = make_source(params, lr=0.02, beta2=0.95)
        group = {"kind": "muon", "params": params, "lr": 0.02, "weight_decay": 0.0}
        optim = optimizer.MuonAdamW([group], ns_dtype=torch.float32)
    else:
        source = make_source(params, lr=0.02)
        optim = optimizer.Muon(**preset(params, lr=0.02), ns_dtype=torch.float32)
    for _ in range(3):
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        grads = [G * (norm / G.norm()) for G in grads]
        source.step(grads)
        for p, G in zip(params, grads):
            p.grad = G.clone()
        optim.step()
    moved = ((p.detach() - was, W - was) for p, W, was in zip(params, source.weights, before))
    return max(relative_error_of_known(actual, expected) for actual, expected in moved)


@pytest.mark.slow
def test_distances_at_small_gradients_are_those_that_are_documented():
    head, *table = rows(MIGRATION["Small gradients"])
    assert head[1:] == list(PRESETS) and len(table) == 3
    for norm, *distances in table:
        for name, documented in zip(head[1:], map(float, distances)):
            measured = distance(name, float(norm))
            if documented < 1e-5:  # roundings of fp32, which other machines add otherwise
                assert measured < 1e-5, (name, norm, measured)
            else:
                assert measured == pytest.approx(documented, rel=0.3), (name, norm, measured)


def test_kinds_of_checkpoints_are_all_documented():
    documented = re.findall(r'\| `"(\w+)"`', MIGRATION["Checkpoints"])
    assert sorted(documented) == sorted(
        import_module(f"{optimizer.__name__}.extras.foreign_checkpoints").KINDS
    )
