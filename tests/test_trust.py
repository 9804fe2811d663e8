"""What the package's sources say that its code can't do, and what a checkpoint can't make it do."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.util
import operator
import pickle
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import Any

import pytest
import torch
from torch import nn

from checkout import PACKAGE, SOURCES, each_source
from comparisons import through_torch_save
from kernel import optimizer
from layouts import set_gradients

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
    text = (recipes / "__init__.py").read_text()
    assert text.count("pkgutil.") == text.count('pkgutil.get_data(__name__, "published.json")') == 1


# Names that the standard library got after Python 3.9.
NEWER_THAN_39 = {
    *("Concatenate", "Never", "NotRequired", "ParamSpec", "Required", "Self", "TypeAlias"),
    *("TypeGuard", "Unpack", "assert_never", "override"),
    *("StrEnum", "aclosing", "batched", "bit_count", "pairwise", "tomllib"),
}
NEWER_ARGUMENTS = {"zip": {"strict"}, "dataclass": {"slots", "kw_only"}, "field": {"kw_only"}}


@each_source
def test_sources_are_python_39_and_name_operators_after_the_build(source):
    tree = ast.parse(source.read_text(), feature_version=(3, 9))
    nodes = list(ast.walk(tree))
    future = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    annotated = any(isinstance(node, ast.arg) and node.annotation for node in nodes)
    assert "annotations" in future or not annotated, "annotations are evaluated"
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imported = (node.names for node in nodes if isinstance(node, ast.ImportFrom) and not node.level)
    used |= {alias.name for names in imported for alias in names}
    assert not used & NEWER_THAN_39
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        name, where = ast.unparse(call.func), f"line {call.lineno}"
        newer = NEWER_ARGUMENTS.get(name.rpartition(".")[2], set())
        assert not newer & {keyword.arg for keyword in call.keywords}, where
        if name in ("isinstance", "issubclass"):
            assert not isinstance(call.args[1], ast.BinOp), f"{where}: X | Y"
        if name.endswith(("library.custom_op", "library.triton_op", "library.define")):
            assert ast.unparse(call.args[0]).startswith("add_op_namespace_prefix('"), where
        assert not name.endswith("torch.library.Library"), where


# -- rooms -----------------------------------------------------------------------------------------

CONVENIENCES = {"extras", "presets"}  # loaded when they are used
FACADES = {"__init__", "muon", "state.stateful"}  # what users call
FILES = {
    file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): file for file in SOURCES
}


def imported(module: str) -> Iterator[str]:
    """The package's modules that a module imports, lazily, too, but not for a type checker."""
    tree = ast.parse(FILES[module].read_text())
    tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.dump(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = [*module.split(".")[: -node.level], *filter(None, [node.module])]
            for name in node.names:
                full = ".".join([*source, name.name])
                found = (
                    full,
                    f"{full}.__init__",
                    ".".join(source),
                    ".".join([*source, "__init__"]),
                )
                yield from [candidate for candidate in found if candidate in FILES][:1]


@pytest.mark.kernels_ci
def test_imports_go_one_way_and_none_leads_from_the_engine_to_a_convenience():
    modules = {module: set(imported(module)) - {module} for module in FILES}
    rooms: dict[str, set[str]] = {}
    for module, targets in modules.items():
        room, others = module.split(".")[0], {target.split(".")[0] for target in targets}
        if module in FACADES:  # which load conveniences where they are called
            others -= CONVENIENCES
        assert room in CONVENIENCES or not others & CONVENIENCES, module
        rooms.setdefault(room, set()).update(others - {room})
    for graph in (modules, rooms):
        list(TopologicalSorter(graph).static_order())  # raises CycleError, which names them


# torch's own modules ask for devices when they are imported, so they come first.
WITHOUT_DEVICES = """
import sys
import torch
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, torch.distributed.tensor
import torch._dynamo

def refuse(*args, **kwargs):
    raise AssertionError("device query at import")

torch.cuda._lazy_init = refuse
for module in (torch.cuda, torch.accelerator, torch.xpu, torch.mps, torch.backends.mps):
    for name in ("is_available", "device_count", "current_device", "current_accelerator",
                 "get_device_capability", "get_device_properties", "is_bf16_supported"):
        if hasattr(module, name):
            setattr(module, name, refuse)
sys.path.insert(0, sys.argv[1])
import optimizer.muon
# What is imported later.
import optimizer.triton_kernels.symmetric, optimizer.triton_kernels.elementwise
"""
WITHOUT_TRITON = """
import sys
import torch
from torch import nn

sys.modules["triton"] = None
sys.path.insert(0, sys.argv[1])
import optimizer

model = nn.ModuleDict({"embed": nn.Embedding(9, 8), "wq": nn.Linear(8, 8)})
optim = optimizer.Muon(optimizer.get_default_muon_param_groups(model), beta2=0.95)
optim.turn_on_cpu_offload()
for param in model.parameters():
    param.grad = torch.randn_like(param)
optim.step()
optim.load_state_dict(optim.state_dict())
print(*(name.removeprefix("optimizer.") for name in sys.modules if name.startswith("optimizer.")))
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_importing_the_package_asks_for_no_device():
    done = run(WITHOUT_DEVICES, PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_training_needs_no_triton_and_loads_no_convenience():
    done = run(WITHOUT_TRITON, PACKAGE.parent)
    loaded = done.stdout.split()
    assert {"muon", "pipeline", "cpu_offload.placement"} <= set(loaded), done.stderr
    assert [name for name in loaded if name.split(".")[0] in CONVENIENCES] == []


# -- checkpoints -----------------------------------------------------------------------------------

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

    __call__ = lambda self: note("called")  # noqa: E731
    __iter__ = lambda self: iter([note("iterated")])  # noqa: E731
    __bool__ = lambda self: bool(note("asked"))  # noqa: E731
    __float__ = lambda self: float(len(note("converted")))  # noqa: E731


def trained() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optim = optimizer.Muon.for_model(
        model, lr=0.1, is_muon_func=lambda name, p: p.ndim > 1, beta2=0.9
    )
    set_gradients(model.parameters())
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
    """Loads a checkpoint with ``value`` at ``place``; ``match=None`` means that it is ignored."""
    optim = trained()
    before = copy.deepcopy(optim.state_dict())
    saved = copy.deepcopy(before)
    *path, key = place
    functools.reduce(operator.getitem, path, saved)[key] = value
    RAN.clear()
    with pytest.raises(ValueError, match=match) if match else contextlib.nullcontext():
        optim.load_state_dict(saved)
    assert not RAN
    assert repr(optim.state_dict()) == repr(before)


MUON, ADAMW = ("momentum_buffer", "second_momentum_buffer"), ("step", "exp_avg", "exp_avg_sq")
PLACES: list[tuple[Any, ...]] = [(0,), (1,), *((0, k) for k in MUON), *((1, k) for k in ADAMW)]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_objects_in_the_place_of_state_are_refused_and_not_run(place):
    for value in (Stranger(), "text", [1.0], b"bytes"):
        check_refused(("state", *place), value, "checkpoint")


def test_objects_in_the_place_of_options_are_refused_and_not_run():
    for key in trained().param_groups[1].keys() - {"params", "use_muon"}:
        # Those that say how matrices are read stay as constructed.
        is_kept = key in ("expert_keys", "split", "flatten")
        check_refused(("param_groups", 1, key), Stranger(), None if is_kept else key)


@pytest.mark.slow
def test_a_pickled_optimizer_needs_the_same_build_in_the_process(tmp_path):
    file = tmp_path / "optimizer.pkl"
    file.write_bytes(pickle.dumps(trained()))
    assert isinstance(pickle.loads(file.read_bytes()), optimizer.Muon)
    told = run(f"import pickle, torch; pickle.load(open({str(file)!r}, 'rb'))").stderr
    assert f"ModuleNotFoundError: No module named '{optimizer.__name__}'" in told
