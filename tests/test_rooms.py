"""The package's rooms: conveniences are loaded when used, and imports go one way."""

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

STEPS = """
import sys
import torch
from torch import nn
from kernels import get_kernel

optimizer = get_kernel("org/optimizer", version=1)
model = nn.ModuleDict({"embed": nn.Embedding(9, 8), "wq": nn.Linear(8, 8)})
groups = optimizer.get_default_muon_param_groups(model)
optim = optimizer.Muon(groups, beta2=0.95)
optim.turn_on_cpu_offload()
for param in model.parameters():
    param.grad = torch.randn_like(param)
optim.step()
optim.load_state_dict(optim.state_dict())
prefix = f"{optimizer.__name__}."
print(*(name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix)))
"""


def test_no_convenience_is_loaded_by_training():
    run = [sys.executable, "-W", "ignore", "-c", STEPS]
    loaded = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    assert {"muon", "pipeline", "cpu_offload.placement"} <= set(loaded)
    assert [name for name in loaded if name.split(".")[0] in CONVENIENCES] == []


def test_what_is_no_name_of_the_package_says_so():
    with pytest.raises(AttributeError, match="nothing"):
        _ = optimizer.nothing


MODULES = {
    file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def imported(module: str) -> Iterator[str]:
    """The package's modules that a module imports, lazily, too, but not for a type checker."""
    tree = ast.parse(MODULES[module].read_text())
    tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.dump(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = [*module.split(".")[: -node.level], *filter(None, [node.module])]
            source = ".".join(parts)
            for name in (".".join([*parts, alias.name]) for alias in node.names):
                found = (name, f"{name}.__init__", source, f"{source}.__init__".lstrip("."))
                yield from [candidate for candidate in found if candidate in MODULES][:1]


def test_imports_go_one_way_and_none_leads_from_the_engine_to_a_convenience():
    modules = {module: set(imported(module)) - {module} for module in MODULES}
    rooms: dict[str, set[str]] = {}
    for module, targets in modules.items():
        room, others = module.split(".")[0], {target.split(".")[0] for target in targets}
        if module in FACADES:  # which load conveniences where they are called
            others -= set(CONVENIENCES)
        assert room in CONVENIENCES or not others & set(CONVENIENCES), module
        rooms.setdefault(room, set()).update(others - {room})
    for graph in (modules, rooms):
        list(TopologicalSorter(graph).static_order())  # raises CycleError, which names them
