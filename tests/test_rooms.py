"""The package's rooms: conveniences apart from the engine and loaded when used, imports one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from kernel import optimizer

PACKAGE = Path(optimizer.__file__).parent
CONVENIENCES = ("extras", "presets")

FACADES = {"__init__", "muon", "state.stateful"}  # what users call

MODULES = {
    file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): file
    for file in sorted(PACKAGE.rglob("*.py"))
}

STEPS = """
import sys
import torch
from torch import nn
from kernels import get_kernel

optimizer = get_kernel("org/optimizer", version=1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk = nn.Linear(8, 8), nn.Linear(8, 8)

model = nn.ModuleDict({"embed": nn.Embedding(9, 8), "layers": nn.ModuleList([Attention()])})
groups = optimizer.get_default_muon_param_groups(model)
optim = optimizer.Muon(groups, clip_config={"head_dim": 4}, beta2=0.95)
optim.turn_on_cpu_offload()
for param in model.parameters():
    param.grad = torch.randn_like(param)
optim.step(qk_logits={0: torch.full((2,), 200.0)})
optim.load_state_dict(optim.state_dict())
prefix = f"{optimizer.__name__}."
print(*(name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix)))
"""


def test_no_convenience_is_loaded_by_training():
    run = [sys.executable, "-W", "ignore", "-c", STEPS]
    loaded = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    assert {"muon", "pipeline", "qk_clip.clip", "cpu_offload.placement"} <= set(loaded)
    assert [name for name in loaded if name.split(".")[0] in CONVENIENCES] == []


@pytest.mark.parametrize("name", optimizer.__all__)
def test_every_public_name_is_listed_and_there(name):
    assert name in dir(optimizer)
    assert getattr(optimizer, name).__name__.split(".")[-1] == name


def test_what_is_no_name_of_the_package_says_so():
    assert optimizer.muon.get_default_muon_param_groups is optimizer.get_default_muon_param_groups
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = optimizer.nothing


def imported(module: str, nodes: list[ast.AST]) -> Iterator[str]:
    """The package's modules that import statements name."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = module.split(".")[: -node.level]
            source = ".".join([*base, *filter(None, [node.module])])
            for name in (f"{source}.{alias.name}".lstrip(".") for alias in node.names):
                found = (name, f"{name}.__init__", source, f"{source}.__init__".lstrip("."))
                yield from [candidate for candidate in found if candidate in MODULES][:1]


def imports_of(file: Path) -> list[ast.AST]:
    """Import statements of a file, lazy ones, too, but for those that only a type checker reads."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.dump(node)]
    return list(ast.walk(tree))


GRAPH = {
    module: set(imported(module, imports_of(file))) - {module} for module, file in MODULES.items()
}


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_the_engine_imports_no_convenience():
    for module, targets in GRAPH.items():
        if room_of(module) not in CONVENIENCES and module not in FACADES:
            assert [name for name in targets if room_of(name) in CONVENIENCES] == [], module


def test_no_module_imports_one_that_imports_it():
    list(TopologicalSorter(GRAPH).static_order())  # raises CycleError, which names the modules


def test_rooms_depend_on_each_other_one_way():
    rooms: dict[str, set[str]] = {}
    for module, targets in GRAPH.items():
        room = rooms.setdefault(room_of(module), set())
        is_facade = module in FACADES  # which loads conveniences where they are called
        room |= {room_of(t) for t in targets if not (is_facade and room_of(t) in CONVENIENCES)}
        room.discard(room_of(module))
    list(TopologicalSorter(rooms).static_order())
