"""What the package's code can't do, read from its sources, and what a checkpoint can't make it do.

That it imports nothing but itself, the standard library and torch is in tests/test_build.py.
"""

from __future__ import annotations

import ast
import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkout import PACKAGE, each_source
from comparisons import through_torch_save
from kernel import optimizer

# Of the standard library. What is not here needs a look before it is added: nothing that reads or
# writes files or the network, starts processes, unpickles, or asks the environment.
MODULES = {
    *("__future__", "bisect", "collections", "contextlib", "contextvars", "copy", "dataclasses"),
    *("datetime",),
    *("difflib", "enum", "fnmatch", "functools", "gc", "hashlib", "heapq", "inspect", "itertools"),
    *("json", "keyword", "logging", "math", "mmap", "numbers", "operator", "queue", "random", "re"),
    *(
        "statistics",
        "sys",
        "textwrap",
        "threading",
        "time",
        "types",
        "typing",
        "uuid",
        "warnings",
        "weakref",
    ),
}

# For one purpose each, in the file that has it: what may be used of the module.
FOR_ONE_PURPOSE = {
    ("cpu_offload/arena.py", "ctypes"): {"c_ubyte"},  # memory that mmap has made
    ("cpu_offload/arena.py", "os"): {"getpid"},
    ("extras/recipes/__init__.py", "pkgutil"): {"get_data"},  # of the package's own JSON
    ("parameters/validation.py", "os"): {"path"},  # whose code a warning is about
    ("triton_kernels/__init__.py", "importlib"): {"util"},  # whether there is a triton
}

# Submodules of torch that do what is ruled out below, in the one file that may use them.
OF_TORCH = {("extras/selfcheck/ranks.py", "multiprocessing")}  # ranks, where the caller has none

RUNS_TEXT = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
# Attributes by which torch, or any module, would do what is ruled out above.
RULED_OUT = {
    *("load", "loads", "dump", "dumps", "save", "hub", "environ", "getenv", "putenv", "system"),
    *("popen", "import_module", "load_library", "cpp_extension", "load_inline", "modules_from"),
    *("send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object"),
    *("gather_object", "scatter_object_list", "rpc", "multiprocessing", "package"),
}
ALLOWED = {("json", "loads"), ("json", "dumps")}


def imports(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Modules that are imported absolutely, and the names taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, set()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", {alias.name for alias in node.names}


def attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


@each_source
def test_no_module_that_reaches_outside_is_imported(source):
    tree, file = ast.parse(source.read_text()), source.relative_to(PACKAGE).as_posix()
    for module, names in imports(tree):
        top, _, rest = module.partition(".")
        if top in ("torch", "triton"):
            used = set(rest.split(".")) & RULED_OUT
            assert {(file, name) for name in used} <= OF_TORCH, f"{file} imports {module}"
            continue
        if (file, top) not in FOR_ONE_PURPOSE:
            assert top in MODULES, f"{file} imports {module}"
            continue
        used = {rest.partition(".")[0]} if rest else set(names)
        used |= {
            node.attr
            for node in attributes(tree)
            if isinstance(node.value, ast.Name) and node.value.id == top
        }
        assert used <= FOR_ONE_PURPOSE[file, top], f"{file} uses {used} of {top}"


def test_the_only_file_that_is_opened_is_the_json_of_the_recipes():
    recipes = PACKAGE / "extras" / "recipes"
    calls = [
        node
        for node in ast.walk(ast.parse((recipes / "__init__.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pkgutil.get_data"
    ]
    assert [ast.unparse(call) for call in calls] == ["pkgutil.get_data(__name__, 'published.json')"]
    assert list(PACKAGE.rglob("*.json")) == [recipes / "published.json"]


@each_source
def test_nothing_unpickles_runs_text_reads_the_environment_or_sends_objects(source):
    tree = ast.parse(source.read_text())
    modules = names_from_elsewhere(tree)
    for node in ast.walk(tree):
        where = f"{source.name}:{getattr(node, 'lineno', '?')}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in RUNS_TEXT | {"open"}, where
        if isinstance(node, ast.Attribute) and node.attr in RULED_OUT:
            root = root_of(node)
            allowed = (root, node.attr) in ALLOWED or is_triton(source, node)
            assert allowed or root not in modules, where
        if isinstance(node, ast.ImportFrom):
            assert not {alias.name for alias in node.names} & (RUNS_TEXT | RULED_OUT), where


def names_from_elsewhere(tree: ast.AST) -> set[str]:
    """By which a file knows what it has imported from outside the package."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    outside = [node for node in nodes if isinstance(node, ast.Import) or node.level == 0]
    return {(a.asname or a.name).partition(".")[0] for node in outside for a in node.names}


def root_of(node: ast.expr) -> str:
    """``torch`` of ``torch.hub.load``; nothing of an expression that begins otherwise."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_triton(source: Path, node: ast.Attribute) -> bool:
    """``tl.load`` of a Triton kernel reads the device's memory."""
    return (
        "triton_kernels" in source.parts
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) == ("tl", "load")
    )


@pytest.mark.kernels_ci
def test_the_package_is_python_and_one_table():
    suffixes = {path.suffix for path in PACKAGE.rglob("*") if path.is_file()} - {".pyc"}
    assert suffixes == {".py", ".json"}


# Checkpoints

RAN: list[str] = []


def note(word: str) -> str:
    RAN.append(word)
    return word


class Bomb:
    """Runs a function when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return note, ("unpickled",)


class Stranger:
    """Stands for any object that is no state; whatever is called on it is noted."""

    def __getattr__(self, name: str) -> Any:
        return note(name)

    def __call__(self) -> str:
        return note("called")

    def __iter__(self) -> Any:
        return iter([note("iterated")])

    def __bool__(self) -> bool:
        return bool(note("asked"))

    def __float__(self) -> float:
        return float(len(note("converted")))


def trained() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optim = optimizer.Muon(
        [
            {"params": [model.weight], "use_muon": True},
            {"params": [model.bias], "use_muon": False},
        ],
        beta2=0.9,
    )
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optim.step()
    return optim


def test_a_checkpoint_that_would_run_code_is_refused_by_weights_only_loading():
    saved = trained().state_dict()
    saved["state"][0]["momentum_buffer"] = Bomb()
    RAN.clear()
    with pytest.raises(pickle.UnpicklingError):
        through_torch_save(saved, weights_only=True)
    assert not RAN


PLACES = [
    *((0, key) for key in ("momentum_buffer", "second_momentum_buffer")),
    *((1, key) for key in ("step", "exp_avg", "exp_avg_sq")),
    *((number, None) for number in (0, 1)),
]


@pytest.mark.parametrize("number, key", PLACES)
@pytest.mark.parametrize(
    "value", [Stranger(), "text", [1.0], b"bytes"], ids=lambda v: type(v).__name__
)
def test_objects_in_the_place_of_state_are_refused_and_not_run(number, key, value):
    optim = trained()
    before = copy.deepcopy(optim.state_dict())
    saved = copy.deepcopy(before)
    if key is None:
        saved["state"][number] = value
    else:
        saved["state"][number][key] = value
    RAN.clear()
    with pytest.raises(ValueError, match="checkpoint"):
        optim.load_state_dict(saved)
    assert not RAN
    assert repr(optim.state_dict()) == repr(before)


@pytest.mark.parametrize("key", sorted(optimizer.muon.GROUP_OPTIONS))
def test_objects_in_the_place_of_options_are_refused_and_not_run(key):
    optim = trained()
    before = copy.deepcopy(optim.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][1][key] = Stranger()
    RAN.clear()
    if key in optimizer.parameters.options.STRUCTURE:  # which stay as constructed
        optim.load_state_dict(saved)
    else:
        with pytest.raises(ValueError, match=key):
            optim.load_state_dict(saved)
    assert not RAN
    assert repr(optim.state_dict()) == repr(before)


@pytest.mark.slow
def test_a_pickled_optimizer_needs_the_same_build_in_the_process(tmp_path):
    file = tmp_path / "optimizer.pkl"
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    file.write_bytes(pickle.dumps(optimizer.Muon([{"params": [parameter], "use_muon": True}])))
    assert isinstance(pickle.loads(file.read_bytes()), optimizer.Muon)
    load = f"import pickle, torch; pickle.load(open({str(file)!r}, 'rb'))"
    fresh = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True)
    assert f"ModuleNotFoundError: No module named '{optimizer.__name__}'" in fresh.stderr
