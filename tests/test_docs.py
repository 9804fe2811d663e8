"""The documents' code runs, their commands exist, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checkout import ROOT, SOURCES
from kernel import optimizer
from layouts import set_gradients
from models import Attention

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/README.md")]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r"\b(?:src|srcset)=\"([^\"]+)\"")
PATH = re.compile(r"`((?:benchmarks|docs|examples|scripts|tests|torch-ext)/[\w./-]+)")
TEST = re.compile(r"`(?:tests/)?(test_\w+\.py)")
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)


def anchors(document: Path) -> set[str]:
    """Returns the anchors that GitHub makes from a document's headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_document
def test_links_lead_somewhere(document):
    text = document.read_text()
    for link in [*LINK.findall(text), *PICTURE.findall(text)]:
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = (document.parent / path).resolve() if path else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    for path in PATH.findall(text):
        assert (ROOT / path.rstrip(".")).exists(), path
    for file in TEST.findall(text):
        assert any((ROOT / "tests").rglob(file)), file


@pytest.mark.parametrize("script", ["options_page.py", "api_page.py"])
def test_generated_pages_are_up_to_date(script):
    subprocess.run([sys.executable, str(ROOT / "scripts" / script), "--check"], check=True)


# -- commands --------------------------------------------------------------------------------------


def commands() -> dict[str, set[str]]:
    """By target or script, the options that documents give it."""
    found: dict[str, set[str]] = {}
    for document in DOCUMENTS:
        text = "\n".join(SHELL.findall(document.read_text())).replace("\\\n", " ")
        for line in text.splitlines():
            if match := re.search(r"\bmake ([a-z-]+)|((?:scripts|examples)/\w+\.py)(.*)", line):
                options = re.findall(r"--[a-z-]+", (match[3] or "").partition("#")[0])
                found.setdefault(match[1] or match[2], set()).update(options)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", commands())
def test_commands_exist_with_their_options(what):
    if not what.endswith(".py"):
        assert re.search(rf"^{what}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    shown = subprocess.run([sys.executable, ROOT / what, "--help"], capture_output=True, text=True)
    assert commands()[what] <= set(re.findall(r"--[a-z-]+", shown.stdout)), shown.stderr


# -- error messages --------------------------------------------------------------------------------

# Messages of the loader and the Hub's client.
OF_OTHERS = {
    *("ConnectError", "RepositoryNotFoundError", "could not verify publisher trust status"),
    "Cannot find a build variant for this system in",
}


def messages_of(source: Path) -> list[str]:
    """Literals of a file except docstrings, with … in place of an f-string's expressions."""
    nodes = list(ast.walk(ast.parse(source.read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            parts = [node.value]
        else:
            continue
        texts.append(" ".join("".join(map(str, parts)).split()))
    return texts


def quoted_messages() -> list[str]:
    """From the tables of docs/reliability.md whose first column is headed "message"."""
    _, _, page = (ROOT / "docs" / "reliability.md").read_text().partition("## Error messages")
    tables = re.findall(r"^\| message \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    return [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]


def test_messages_that_the_page_quotes_are_in_the_sources():
    texts = [text for source in SOURCES for text in messages_of(source)]
    quotes = quoted_messages()
    assert len(quotes) > 40
    for quote in {*quotes} - OF_OTHERS:
        pieces = re.compile(".*".join(re.escape(piece.strip()) for piece in quote.split("…")))
        assert any(pieces.search(text) for text in texts), quote


# -- code ------------------------------------------------------------------------------------------


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.filterwarnings("error")
def test_the_code_of_the_readme_runs_as_it_stands_and_shows_names(capsys):
    model = nn.TransformerEncoderLayer(64, nhead=4)
    loss = model(torch.randn(8, 16, 64)).square().mean()
    names: dict[str, Any] = {"model": model, "loss": loss}
    text = (ROOT / "README.md").read_text()
    for block in CODE.findall(text):
        exec(block, names)
    assert len(names["optim"].param_groups) >= 2
    table = capsys.readouterr().out
    assert all(f"{name} " in table for name, _ in model.named_parameters())
    # The row of QK-Clip: an argument, and a line.
    (argument,) = re.findall(r"`(clip_config=.*?)`", text)
    (line,) = re.findall(r"`(optim\.qk_recorder = .*?)`", text)
    model = nn.Sequential(Attention(64, heads=2, kv_heads=2, head_dim=128))
    names = {"optimizer": optimizer, "model": model}
    exec(f"optim = optimizer.Muon.for_model(model, lr=1e-3, {argument})\n{line}", names)
    model(torch.randn(2, 8, 64)).square().mean().backward()
    names["optim"].step()
    stats = names["optim"].qk_clip_stats()
    assert (stats["steps"], stats["heads"]) == (1, 2)


# Code that needs what is not here, by a part of each block: a Hub (test_hub.py), started ranks
# (test_selfcheck.py), several devices, packages of others (clients/), files (test_checkpoints.py,
# test_foreign.py), published configurations (test_recipes.py), or the rest of a module.
NOT_RUN = (
    *("{{", "install_kernel", 'get_kernel("org/optimizer"', "get_locked_kernel"),
    *("optimizer.selfcheck", "init_device_mesh", "DistMuonAdamW", "recipes.moonlight"),
    *("wandb", "Trainer(", "accelerator", "self.log_dict", "def configure_optimizers"),
    *("load_foreign_state_dict", "background =", "dcp."),
    *("in Attention.forward", "document_ids=ids"),
)


def namespace() -> dict[str, Any]:
    """What the documents' code takes for granted."""
    model: Any = nn.Sequential(Attention(64, heads=2, kv_heads=2, head_dim=128))
    return {
        **{"torch": torch, "nn": nn, "optimizer": optimizer, "model": model},
        "optim": optimizer.Muon.for_model(model, lr=1e-3),
        "groups": optimizer.get_default_muon_param_groups(model),
        "loss": model(torch.randn(2, 8, 64)).square().mean(),
        "DistributedDataParallel": DistributedDataParallel,
        "fully_shard": fully_shard,
    }


ALL = [(path, block) for path in DOCUMENTS for block in CODE.findall(path.read_text())]
BLOCKS = [
    pytest.param(path, block, id=f"{path.stem}: {block.splitlines()[0][:40]}")
    for path, block in ALL
    if path.stem not in ("README", "migration") and not any(part in block for part in NOT_RUN)
]


@pytest.mark.parametrize(("path", "block"), BLOCKS)
def test_code_of_the_documents_runs(path, block, process_group):
    names = namespace()
    if path.stem == "checks":
        names["loss"] = lambda model, batch: model(batch).square().mean()
        names["batches"] = [torch.randn(2, 8, 64)]
    exec(block, names)
    set_gradients(names["model"].parameters())
    names["optim"].step()


@each_document
def test_code_is_python(document):
    for block in CODE.findall(document.read_text()):
        if "{{" not in block:
            ast.parse(block)


# -- docs/migration.md -----------------------------------------------------------------------------


def ingredients(section: str) -> dict[str, Any]:
    """What the code of a section takes for granted."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.Linear(6, 4, bias=False))
    matrices, others = (g["params"] for g in optimizer.get_default_muon_param_groups(model))
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


PARTS = re.split(r"^## (.*)$", (ROOT / "docs" / "migration.md").read_text(), flags=re.MULTILINE)
MIGRATION = dict(zip(PARTS[1::2], PARTS[2::2]))


@pytest.mark.parametrize(
    "section", [name for name in MIGRATION if name not in ("Checkpoints", "Small gradients")]
)
def test_migration_takes_a_step_by_every_line(section, process_group):
    for block in CODE.findall(MIGRATION[section]):
        first, *lines = re.split(r"^(?=optim = )", block, flags=re.MULTILINE)
        for line in lines:
            names = ingredients(section)
            exec(first + line, names)
            before = [p.detach().clone() for p in names["model"].parameters()]
            set_gradients(names["model"].parameters())
            names["optim"].step()
            trained = {id(p) for g in names["optim"].param_groups for p in g["params"]}
            for p, was in zip(names["model"].parameters(), before):
                assert torch.equal(p, was) == (id(p) not in trained)
