"""What the Hub asks of a kernel: of build.toml, of the package's sources, and of what is built.

The source gates run anywhere. Those that build need scripts/build.py, which the Hub's own builder
leaves out.
"""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernels import Metadata, get_local_kernel
from kernels.backends import _backend

from checkout import PACKAGE, ROOT, SOURCES, each_source
from hub_clients import commit, git
from kernel import optimizer

try:
    from kernels._rust import Build, Digest, DigestAlgorithm, DigestValidationError
except ImportError:  # the Hub's builder has a `kernels` that is not the released one
    from kernels_data import Build, Digest, DigestAlgorithm, DigestValidationError

BUILD_SCRIPT = ROOT / "scripts" / "build.py"
BACKENDS = ["cpu", "cuda", "metal", "rocm", "xpu"]
HERE = _backend().name

needs_build_script = pytest.mark.skipif(
    not BUILD_SCRIPT.exists(), reason="scripts/ is not part of the published sources"
)


@pytest.mark.kernels_ci
def test_build_toml_is_accepted_and_complete():
    # The parser takes an empty `backends`, and dependencies that no loader would install.
    assert [str(backend) for backend in Build.open(ROOT).general.backends] == BACKENDS
    config = tomllib.loads((ROOT / "build.toml").read_text())
    assert config.keys() == {"general", "torch-noarch"}
    assert config["general"].keys() == {
        *("name", "version", "edition", "license", "source", "backends", "hub")
    }
    assert config["general"]["name"] == "optimizer"
    assert config["general"]["version"] >= 1
    assert config["general"]["license"] == "Apache-2.0"
    assert config["general"]["hub"] == {"repo-id": "org/optimizer"}
    assert config["torch-noarch"]["pyext"] == ["py", "pyi", "json"]


NIX_OPTIONS = {"build-users-group": "", "download-attempts": "1"}


def accepted_by_nix(flake: Path) -> bool:
    """Whether Nix takes the lock file for complete, with no network and a store of its own."""
    folders = ("NIX_STORE_DIR", "NIX_STATE_DIR", "NIX_LOG_DIR", "NIX_CONF_DIR", "HOME")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("XDG_")},
        **{name: str(flake.parent / name) for name in folders},
        "NIX_REMOTE": "local",
        # Nix asks the network for what a lock lacks, --offline or not.
        "https_proxy": "http://127.0.0.1:9",
    }
    command = ["nix", "--extra-experimental-features", "nix-command flakes", "flake", "lock"]
    command += ["--offline", "--no-update-lock-file", f"path:{flake}"]
    command += [part for option in NIX_OPTIONS.items() for part in ("--option", *option)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stderr)
    return done.returncode == 0


@pytest.mark.skipif(not shutil.which("nix"), reason="needs Nix (nix-bin)")
def test_nix_takes_the_lock_as_it_is_and_refuses_it_for_another_builder(tmp_path):
    flake = tmp_path / "flake"
    flake.mkdir()
    for name in ("flake.nix", "flake.lock"):
        if not (ROOT / name).exists():
            pytest.skip(f"{name} is not part of the published sources")
        shutil.copy(ROOT / name, flake)
    assert accepted_by_nix(flake)
    text = (flake / "flake.nix").read_text()
    moved, count = re.subn(r"(huggingface/kernels/)[0-9a-f]{40}", rf"\g<1>{'0' * 40}", text)
    assert count == 1
    (flake / "flake.nix").write_text(moved)
    assert not accepted_by_nix(flake)


BUILDERS_PYTHON = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.split(".")[0] in {absent!r}
        return None if absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import kernels, kernels.layer
sys.modules["kernels_data"] = sys.modules["kernels._rust"]
sys.modules["kernels._rust"] = None
import pytest
sys.exit(pytest.main([*sys.argv[1:], "-q", "-p", "no:cacheprovider"]))
"""
# In the package's folder, by the builder.
BUILDERS_OPS = """
import torch

ops = torch.ops._optimizer_cpu_0123456

def add_op_namespace_prefix(op_name: str) -> str:
    return f"_optimizer_cpu_0123456::{op_name}"
"""


@pytest.fixture
def in_the_builder(tmp_path):
    """Runs pytest on what the builder takes of the sources, with its `kernels` and packages."""
    shutil.copy(ROOT / "build.toml", tmp_path)
    suffixes = tomllib.loads((ROOT / "build.toml").read_text())["torch-noarch"]["pyext"]
    for file in (file for name in ("torch-ext", "tests") for file in (ROOT / name).rglob("*")):
        if file.suffix.lstrip(".") in suffixes:
            copied = tmp_path / file.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copied)
    (tmp_path / PACKAGE.relative_to(ROOT) / "_ops.py").write_text(BUILDERS_OPS)
    given = re.search(r"pythonCheckInputs = python: \[(.*?)\]", (ROOT / "flake.nix").read_text())[1]
    others = {"numpy", "matplotlib", "rich", "hypothesis", "expecttest", "xdist", "triton"}
    absent = others - set(given.replace("python.", "").split())

    def run(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", BUILDERS_PYTHON.format(absent=absent), *arguments],
            # One thread, since threads that wait for a busy core take time of another.
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:]

    return run


@needs_build_script
@pytest.mark.slow
def test_the_quick_tests_pass_in_the_builder(in_the_builder):
    in_the_builder("tests", "-m", "kernels_ci")


@needs_build_script
@pytest.mark.slow
def test_the_tests_of_sources_pass_beside_what_the_builder_generates(in_the_builder):
    in_the_builder("tests/test_build.py", "tests/test_trust.py")


def test_card_renders_with_what_the_builder_passes():
    card = ROOT / "CARD.md"
    if not card.exists():
        pytest.skip("CARD.md is not part of the published sources")
    jinja2 = pytest.importorskip("jinja2")
    source = card.read_text()
    variables = pytest.importorskip("jinja2.meta").find_undeclared_variables(
        jinja2.Environment().parse(source)
    )
    passed = {"repo_id", "version", "functions", "layers", "has_benchmark", "upstream", "source"}
    assert variables <= passed | {"license"}
    assert not re.search(r"(?:version=|--revision v)\d", source)
    text = jinja2.Template(source, trim_blocks=True).render(
        repo_id="org/optimizer",
        version=1,
        functions=["Muon"],
        has_benchmark=True,
        source="https://github.com/org/optimizer",
        license="apache-2.0",
    )
    front_matter = text.split("---\n")[1]
    assert front_matter == "license: apache-2.0\nlibrary_name: kernels\ntags:\n  - kernels\n"
    assert 'get_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])' in text
    assert "- `Muon`" in text
    assert "{%" not in text and "{{" not in text


@pytest.mark.kernels_ci
def test_public_names_are_a_literal_list_that_starts_with_muon():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (assignment,) = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    names = ast.literal_eval(assignment.value)
    assert isinstance(names, list)
    assert names[0] == "Muon"
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(optimizer, name)] == []


@each_source
def test_imports_are_relative_or_standard_library_or_torch(source):
    tree = ast.parse(source.read_text())
    lazy = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    # A Triton kernel needs triton's language among its module's globals; that such a module is
    # itself imported lazily is what `test_package_imports_without_triton` shows.
    triton_module = "triton_kernels" in source.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            top = module.partition(".")[0]
            allowed = top == "torch" or top in sys.stdlib_module_names
            if top == "triton":
                allowed = triton_module or node in lazy
            assert allowed, f"{source.name}:{node.lineno} imports {module}"


# Names that the standard library got after Python 3.9.
NEWER_THAN_39 = {
    *("Concatenate", "Never", "NotRequired", "ParamSpec", "Required", "Self", "TypeAlias"),
    *("TypeGuard", "Unpack", "assert_never", "override"),
    *("StrEnum", "aclosing", "batched", "bit_count", "pairwise", "tomllib"),
}


@each_source
def test_sources_are_python_39(source):
    tree = ast.parse(source.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        where = f"{source.name}:{getattr(node, 'lineno', '?')}"
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            keywords = {keyword.arg for keyword in node.keywords}
            assert not (name == "zip" and "strict" in keywords), f"{where}: zip(strict=)"
            newer = keywords & {"slots", "kw_only"} if name in ("dataclass", "field") else set()
            assert not newer, f"{where}: {name}({newer})"
            unions = [
                a for a in node.args if isinstance(a, ast.BinOp) and isinstance(a.op, ast.BitOr)
            ]
            assert not (name in ("isinstance", "issubclass") and unions), f"{where}: X | Y"
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            newer = {alias.name for alias in node.names} & NEWER_THAN_39
            assert not newer, f"{where}: imports {newer}"
        elif isinstance(node, ast.Attribute):
            assert node.attr not in NEWER_THAN_39, f"{where}: {node.attr}"
        elif isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation is not None:
            assert "annotations" in future_imports(tree), f"{where}: no lazy annotations"


def future_imports(tree: ast.Module) -> set[str]:
    return {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    }


@each_source
def test_custom_operators_are_in_the_namespace_of_the_build(source):
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name.endswith(("library.custom_op", "library.triton_op", "library.define")):
            namespaced = ast.unparse(node.args[0])
            assert namespaced.startswith("add_op_namespace_prefix('"), f"{source.name}: {name}"
        assert not name.endswith("torch.library.Library"), f"{source.name}: {name}"


IMPORT_PACKAGE = """
import sys
sys.path.insert(0, {path!r})
{before}
import optimizer
{after}
print(*sorted(name for name in sys.modules if name.split(".")[0] == "optimizer"))
"""

# torch's own modules ask for devices when they are imported, so they come first.
DEVICE_QUERIES_RAISE = """
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
"""


def import_package(before: str, after: str = "") -> set[str]:
    script = IMPORT_PACKAGE.format(path=str(PACKAGE.parent), before=before, after=after)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_asks_for_no_device():
    # So it imports under a GPU build of torch that sees no GPU. What is imported later, too.
    triton = "import optimizer.triton_kernels.symmetric, optimizer.triton_kernels.elementwise"
    later = triton if importlib.util.find_spec("triton") else ""
    assert "optimizer.muon" in import_package(DEVICE_QUERIES_RAISE, later)


def test_package_imports_without_triton():
    assert "optimizer.muon" in import_package("sys.modules['triton'] = None")


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("build_script", BUILD_SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A copy of the sources outside any checkout, free to be changed."""
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):  # set inside a git hook
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "source"
    shutil.copytree(PACKAGE, root / "torch-ext" / "optimizer")
    shutil.copy(ROOT / "build.toml", root)
    return root


def uid(build_id: str) -> str:
    return build_id.removeprefix(f"_optimizer_{HERE}_")


@needs_build_script
def test_variants_have_valid_digests_and_metadata(builder, source):
    output = source / "build"
    ids = builder.build(source, output)
    assert sorted(path.name for path in output.iterdir()) == [f"torch-{name}" for name in BACKENDS]
    for backend, build_id in zip(BACKENDS, ids, strict=True):
        variant = output / f"torch-{backend}"
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert (str(metadata.name), metadata.version) == ("optimizer", 1)
        assert (metadata.id, metadata.license) == (build_id, "Apache-2.0")
        assert str(metadata.backend.backend_type) == backend
        assert metadata.python_depends == [] and metadata.kernel_depends == []
        assert (
            metadata.source == tomllib.loads((ROOT / "build.toml").read_text())["general"]["source"]
        )
        assert metadata.provenance.kernel is None and not metadata.provenance.dirty
        assert metadata.provenance.kernel_builder.version == "none (scripts/build.py)"
        actual = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
        metadata.digest.validate(actual)
        files = {str(file.relative_to(PACKAGE)) for file in SOURCES}
        assert files <= set(actual.files)
        (variant / "__init__.py").write_text("tampered = True\n")
        with pytest.raises(DigestValidationError):
            metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


@needs_build_script
def test_id_follows_the_content_and_nothing_else(builder, source, tmp_path):
    def build() -> str:
        (build_id,) = builder.build(source, tmp_path / "output", [HERE])
        return uid(build_id)

    first = build()
    assert build() == first
    (source / "README.md").write_text("not part of the package")
    (source / "torch-ext" / "optimizer" / "_ops.py").write_text("# left by the Hub's builder")
    assert build() == first

    init = source / "torch-ext" / "optimizer" / "__init__.py"
    init.write_text(init.read_text() + "CHANGED = True\n")
    second = build()
    data = source / "torch-ext" / "optimizer" / "data.py"
    data.write_text("{}")
    third = build()
    data.rename(data.with_name("other.py"))
    assert len({first, second, third, build()}) == 4
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == [f"torch-{HERE}"]


@needs_build_script
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_id_and_provenance_tell_uncommitted_work(builder, source, tmp_path):
    def build() -> Metadata:
        builder.build(source, tmp_path / "output", [HERE])
        return Metadata.read_from_file(tmp_path / "output" / f"torch-{HERE}" / "metadata.json")

    outside = build()
    git(source, "init", "--quiet")
    assert build().provenance.kernel is None, "there is no commit yet"
    commit(source)
    clean = build()
    assert clean.id == outside.id
    assert clean.provenance.kernel.commit == git(source, "rev-parse", "HEAD")
    assert not clean.provenance.dirty

    new = source / "torch-ext" / "optimizer" / "new.py"
    ids = set()
    for content in ("1", "2"):
        new.write_text(content)
        metadata = build()
        assert metadata.id.endswith("_dirty") and metadata.provenance.dirty
        ids.add(metadata.id)
    assert len(ids) == 2, "different uncommitted contents share an id"


@needs_build_script
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("what", ["ignored", "assumed unchanged", "skipped", "link", "absent"])
def test_a_build_of_the_work_tree_tells_all_that_is_not_in_the_commit(builder, source, what):
    git(source, "init", "--quiet")
    commit(source)
    package = source / "torch-ext" / "optimizer"
    (source / ".git" / "info" / "exclude").write_text("ignored.py\n__pycache__\nbuild\n")
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "muon.pyc").write_text("no build takes bytecode")
    assert builder.git_status(source)["dirty"] is False
    if what == "ignored":
        (package / "ignored.py").write_text("{}")
    elif what == "link":  # the commit holds the link, a build what it leads to
        text = (package / "muon.py").read_text()
        (source / "outside.py").write_text(f"{text}CHANGED = True\n")
        (package / "muon.py").unlink()
        (package / "muon.py").symlink_to(source / "outside.py")
        commit(source)
    elif what == "absent":
        git(source, "update-index", "--skip-worktree", "torch-ext/optimizer/presets.py")
        (package / "presets.py").unlink()
    else:
        mark = {"assumed unchanged": "--assume-unchanged", "skipped": "--skip-worktree"}[what]
        git(source, "update-index", mark, "torch-ext/optimizer/muon.py")
        (package / "muon.py").write_text("CHANGED = True\n")
    (build_id,) = builder.build(source, source / "build", [HERE])
    metadata = Metadata.read_from_file(source / "build" / f"torch-{HERE}" / "metadata.json")
    assert build_id.endswith("_dirty") and metadata.provenance.dirty


@needs_build_script
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_release_names_what_is_in_no_commit(builder, source):
    with pytest.raises(ValueError, match="is in no commit of a git repository"):
        builder.export_commit(source, source / "exported")
    git(source, "init", "--quiet")
    commit(source)
    builder.require_committed(source)
    package = source / "torch-ext" / "optimizer"
    (source / "notes").mkdir()
    for path in (source / "notes" / "new.md", package / "ignored.py", package / "__init__.py"):
        path.write_text("[]")
    (source / ".git" / "info" / "exclude").write_text("ignored.py\n")
    with pytest.raises(ValueError) as refusal:
        builder.require_committed(source)
    for path in ("notes/new.md", "optimizer/__init__.py"):
        assert path in str(refusal.value)
    assert "ignored" not in str(refusal.value)


@needs_build_script
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("mark", ["--assume-unchanged", "--skip-worktree"])
def test_a_release_holds_the_commits_files_whatever_git_does_not_look_at(source, mark):
    git(source, "init", "--quiet")
    commit(source)
    package = source / "torch-ext" / "optimizer"
    (source / ".git" / "info" / "exclude").write_text("ignored.py\nbuild\n")
    (package / "ignored.py").write_text("{}")
    git(source, "update-index", mark, "torch-ext/optimizer/__init__.py")
    (package / "__init__.py").write_text("changed = True\n")
    release = [sys.executable, BUILD_SCRIPT, "--release", "--source", source, "--backend", HERE]
    subprocess.run(release, check=True, capture_output=True)
    variant = source / "build" / f"torch-{HERE}"
    assert not (variant / "ignored.py").exists()
    assert (variant / "__init__.py").read_bytes() == (PACKAGE / "__init__.py").read_bytes()
    provenance = Metadata.read_from_file(variant / "metadata.json").provenance
    assert provenance.kernel.commit == git(source, "rev-parse", "HEAD") and not provenance.dirty


@needs_build_script
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("kind", ["file", "folder", "submodule"])
def test_a_release_of_links_or_submodules_is_refused(source, tmp_path, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text("SECRET = True\n")
    git(source, "init", "--quiet")
    commit(source)
    package = source / "torch-ext" / "optimizer"
    if kind == "submodule":
        head = git(source, "rev-parse", "HEAD")
        linked = "torch-ext/optimizer/linked"
        git(source, "update-index", "--add", "--cacheinfo", f"160000,{head},{linked}")
        git(source, "commit", "--quiet", "-m", "submodule")
    else:
        target, link = ("secret.py", "linked.py") if kind == "file" else (".", "linked")
        (package / link).symlink_to(outside / target)
        commit(source)
    release = [sys.executable, BUILD_SCRIPT, "--release", "--source", source, "--backend", HERE]
    refused = subprocess.run(release, capture_output=True, text=True)
    assert refused.returncode and "optimizer/linked" in refused.stderr
    assert "is a link or a submodule" in refused.stderr and not (source / "build").exists()


@needs_build_script
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("options", [[], ["--release"]], ids=["work tree", "release"])
def test_clones_of_a_commit_give_the_same_bytes_under_any_umask_locale_and_time(
    source, tmp_path, options
):
    git(source, "init", "--quiet")
    commit(source)
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    settings = [
        (0o022, 1_000_000_000, {"LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "1"}),
        (0o077, 2_000_000_000, {**ascii_only, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2"}),
    ]
    builds = []
    for umask, seconds, variables in settings:
        clone = tmp_path / f"clone-{umask:o}"
        subprocess.run(["git", "clone", "--quiet", source, clone], check=True, umask=umask)
        for file in (clone / "torch-ext").rglob("*"):
            os.utime(file, (seconds, seconds))
        subprocess.run(
            [sys.executable, BUILD_SCRIPT, "--source", clone, *options],
            env={**os.environ, **variables},
            check=True,
            capture_output=True,
            umask=umask,
        )
        files = (file for file in (clone / "build").rglob("*") if file.is_file())
        builds.append({file.relative_to(clone): file.read_bytes() for file in files})
    assert len(builds[0]) > len(BACKENDS) and builds[0] == builds[1]


@needs_build_script
def test_parallel_builds_leave_one_whole_build(builder, source, tmp_path):
    sources = []
    for index in range(4):
        sources.append(tmp_path / f"source-{index}")
        shutil.copytree(source, sources[-1])
        (sources[-1] / "torch-ext" / "optimizer" / "index.py").write_text(str(index))
    output = tmp_path / "output"
    with ThreadPoolExecutor(len(sources)) as pool:
        built = pool.map(lambda root: builder.build(root, output, [HERE]), sources * 5)
        ids = {build_id for (build_id,) in built}
    variant = output / f"torch-{HERE}"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.id in ids and len(ids) == len(sources)
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert [path.name for path in output.iterdir()] == [variant.name]


@needs_build_script
def test_two_builds_in_one_process_keep_their_submodules_apart(builder, source, tmp_path):
    for mark in ("first", "second"):
        for file in (source / "torch-ext").rglob("*.py"):
            file.write_text(f"{file.read_text()}\nBUILD_MARK = {mark!r}\n")
        (build_id,) = builder.build(source, tmp_path / mark, [HERE])
        loaded = get_local_kernel(tmp_path / mark)
        assert loaded.__name__ == build_id and loaded.__name__ != optimizer.__name__
        assert all(hasattr(loaded, name) for name in loaded.__all__)  # loads what is used seldom
        modules = {
            name: sys.modules[name] for name in sys.modules if name.split(".")[0] == build_id
        }
        assert modules.pop(f"{build_id}._ops").add_op_namespace_prefix("op") == f"{build_id}::op"
        assert f"{build_id}.muon" in modules
        assert {module.BUILD_MARK for module in modules.values()} == {mark}
    assert not hasattr(optimizer, "BUILD_MARK")
