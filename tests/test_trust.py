"""What the package's code can't do, by its sources, and what a checkpoint can't make it do."""

from __future__ import annotations

import ast
import copy
import pickle
import subprocess
import sys
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
    *("datetime", "difflib", "enum", "fnmatch", "functools", "gc", "hashlib", "heapq", "inspect"),
    *("itertools", "json", "keyword", "logging", "math", "mmap", "numbers", "operator", "queue"),
    *("random", "re", "statistics", "sys", "textwrap", "threading", "time", "types", "typing"),
    *("uuid", "warnings", "weakref", "torch"),
}
# For one purpose each, in the file that has it: what may be used of the module.
FOR_ONE_PURPOSE = {
    ("cpu_offload/arena.py", "ctypes"): {"c_ubyte"},  # memory that mmap has made
    ("cpu_offload/arena.py", "os"): {"getpid"},
    ("extras/recipes/__init__.py", "pkgutil"): {"get_data"},  # of the package's own JSON
    ("parameters/validation.py", "os"): {"path"},  # whose code a warning is about
    ("triton_kernels/__init__.py", "importlib"): {"util"},  # whether there is a triton
    ("extras/selfcheck/ranks.py", "torch.multiprocessing"): {"multiprocessing", "start_processes"},
}
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "breakpoint", "input", "open"}
# Attributes by which torch, or any module, would do what is ruled out above.
RULED_OUT = {
    *("load", "loads", "dump", "dumps", "save", "hub", "environ", "getenv", "putenv", "system"),
    *("popen", "import_module", "load_library", "cpp_extension", "load_inline", "modules_from"),
    *("send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object"),
    *("gather_object", "scatter_object_list", "rpc", "multiprocessing", "package"),
}
ALLOWED = {"json.loads", "json.dumps", "tl.load"}  # tl.load reads the device's memory


def is_allowed(file: str, module: str, names: set[str], is_lazy: bool) -> bool:
    top = module.partition(".")[0]
    if top == "triton":  # whose language kernels need among their module's globals
        return is_lazy or file.startswith("triton_kernels/")
    used = {*module.split(".")[1:], *names}
    if (file, module) in FOR_ONE_PURPOSE or (file, top) in FOR_ONE_PURPOSE:
        return used <= (FOR_ONE_PURPOSE.get((file, module)) or FOR_ONE_PURPOSE[file, top])
    return top in MODULES and not used & RULED_OUT


@each_source
def test_nothing_is_imported_that_reaches_outside(source):
    file, tree = source.relative_to(PACKAGE).as_posix(), ast.parse(source.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lazy = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                dotted = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
                used = {n.attr for n in dotted if ast.unparse(n.value) == top}
                names = used if (file, top) in FOR_ONE_PURPOSE else set()
                assert is_allowed(file, alias.name, names, node in lazy), alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {alias.name for alias in node.names}
            assert is_allowed(file, str(node.module), names, node in lazy), node.module


@each_source
def test_nothing_unpickles_runs_text_reads_the_environment_or_sends_objects(source):
    tree = ast.parse(source.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    foreign = [node for node in imports if isinstance(node, ast.Import) or node.level == 0]
    modules = {(a.asname or a.name).partition(".")[0] for node in foreign for a in node.names}
    for node in ast.walk(tree):
        where = f"{source.name}:{getattr(node, 'lineno', '?')}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in RUNS_TEXT, where
        if isinstance(node, ast.Attribute) and node.attr in RULED_OUT:
            text = ast.unparse(node)
            assert text in ALLOWED or text.partition(".")[0] not in modules, f"{where}: {text}"


@pytest.mark.kernels_ci
def test_the_package_is_python_and_one_table():
    recipes = PACKAGE / "extras" / "recipes"
    others = {path for path in PACKAGE.rglob("*") if path.suffix not in (".py", ".pyc", "")}
    assert others == {recipes / "published.json"}
    nodes = ast.walk(ast.parse((recipes / "__init__.py").read_text()))
    calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
    opened = [call for call in calls if call.startswith("pkgutil.get_data(")]
    assert opened == ["pkgutil.get_data(__name__, 'published.json')"]


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


def check_refused(place: tuple[Any, ...], value: Any, match: str | None) -> None:
    """Of a checkpoint with ``value`` in a place of it; None: the value is left out."""
    optim = trained()
    before = copy.deepcopy(optim.state_dict())
    saved = copy.deepcopy(before)
    *path, key = place
    holder = saved
    for step in path:
        holder = holder[step]
    holder[key] = value
    RAN.clear()
    if match is None:
        optim.load_state_dict(saved)
    else:
        with pytest.raises(ValueError, match=match):
            optim.load_state_dict(saved)
    assert not RAN
    assert repr(optim.state_dict()) == repr(before)


MUON, ADAMW = ("momentum_buffer", "second_momentum_buffer"), ("step", "exp_avg", "exp_avg_sq")
PLACES: list[tuple[Any, ...]] = [(0,), (1,), *((0, k) for k in MUON), *((1, k) for k in ADAMW)]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_objects_in_the_place_of_state_are_refused_and_not_run(place):
    for value in (Stranger(), "text", [1.0], b"bytes"):
        check_refused(("state", *place), value, "checkpoint")


@pytest.mark.parametrize("key", sorted(optimizer.muon.GROUP_OPTIONS))
def test_objects_in_the_place_of_options_are_refused_and_not_run(key):
    # Those that say how matrices are read stay as constructed.
    is_kept = key in optimizer.parameters.options.STRUCTURE
    check_refused(("param_groups", 1, key), Stranger(), None if is_kept else key)


@pytest.mark.slow
def test_a_pickled_optimizer_needs_the_same_build_in_the_process(tmp_path):
    file = tmp_path / "optimizer.pkl"
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    file.write_bytes(pickle.dumps(optimizer.Muon([{"params": [parameter], "use_muon": True}])))
    assert isinstance(pickle.loads(file.read_bytes()), optimizer.Muon)
    load = f"import pickle, torch; pickle.load(open({str(file)!r}, 'rb'))"
    fresh = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True)
    assert f"ModuleNotFoundError: No module named '{optimizer.__name__}'" in fresh.stderr
