"""What the Hub asks of a kernel: of build.toml, the tests, and what scripts/build.py builds."""

import importlib.util
import json
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

from checkout import PACKAGE, ROOT, SOURCES
from kernel import optimizer
from loopback_hub import commit, git

try:
    from kernels._rust import Build, Digest, DigestAlgorithm, DigestValidationError
except ImportError:  # the Hub's builder has a `kernels` that is not the released one
    from kernels_data import Build, Digest, DigestAlgorithm, DigestValidationError

BUILD_SCRIPT = ROOT / "scripts" / "build.py"
BACKENDS = ["cpu", "cuda", "metal", "rocm", "xpu"]
HERE = _backend().name
CONFIG = tomllib.loads((ROOT / "build.toml").read_text())


@pytest.fixture
def needs_build_script():
    if not (BUILD_SCRIPT.exists() and shutil.which("git")):
        pytest.skip("needs scripts/build.py and git")


@pytest.mark.kernels_ci
def test_build_toml_is_accepted_and_complete():
    # The parser takes an empty `backends`, and dependencies that no loader would install.
    assert [str(backend) for backend in Build.open(ROOT).general.backends] == BACKENDS
    assert CONFIG["torch-noarch"] == {"pyext": ["py", "pyi", "json"]}
    general = dict(CONFIG["general"])
    assert general.pop("version") >= 1 and general.pop("source").startswith("https://")
    assert general == {
        **{"name": "optimizer", "edition": 5, "license": "Apache-2.0", "backends": BACKENDS},
        "hub": {"repo-id": "org/optimizer"},
    }


def accepted_by_nix(flake: Path) -> bool:
    """True if Nix accepts the lock file as complete, without a network, in a store of its own."""
    folders = ("NIX_STORE_DIR", "NIX_STATE_DIR", "NIX_LOG_DIR", "NIX_CONF_DIR", "HOME")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    own = {name: str(flake.parent / name) for name in folders}
    # Nix asks the network for what a lock lacks, --offline or not.
    away = {"NIX_REMOTE": "local", "https_proxy": "http://127.0.0.1:9"}
    options = ["--option", "build-users-group", "", "--option", "download-attempts", "1"]
    command = ["nix", "--extra-experimental-features", "nix-command flakes", "flake", "lock"]
    command += ["--offline", "--no-update-lock-file", f"path:{flake}", *options]
    return not subprocess.run(command, env={**kept, **own, **away}, check=False).returncode


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
BUILDERS_OPS = """
import torch

ops = torch.ops._optimizer_cpu_0123456

def add_op_namespace_prefix(op_name: str) -> str:
    return f"_optimizer_cpu_0123456::{op_name}"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests", ["tests -m kernels_ci", "tests/test_build.py tests/test_trust.py"]
)
def test_tests_pass_on_what_the_builder_takes_of_the_sources(needs_build_script, tmp_path, tests):
    """With its `kernels` and its packages."""
    shutil.copy(ROOT / "build.toml", tmp_path)
    for file in (file for name in ("torch-ext", "tests") for file in (ROOT / name).rglob("*")):
        if file.suffix.lstrip(".") in CONFIG["torch-noarch"]["pyext"]:
            copied = tmp_path / file.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copied)
    (tmp_path / PACKAGE.relative_to(ROOT) / "_ops.py").write_text(BUILDERS_OPS)
    given = re.search(r"pythonCheckInputs = python: \[(.*?)\]", (ROOT / "flake.nix").read_text())[1]
    others = {"numpy", "matplotlib", "rich", "hypothesis", "expecttest", "xdist", "triton"}
    absent = others - set(given.replace("python.", "").split())
    done = subprocess.run(
        [sys.executable, "-c", BUILDERS_PYTHON.format(absent=absent), *tests.split()],
        # One thread, since threads that wait for a busy core take time of another.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


# -- what is built ---------------------------------------------------------------------------------


@pytest.fixture
def builder(needs_build_script):
    spec = importlib.util.spec_from_file_location("build_script", BUILD_SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(needs_build_script, tmp_path, monkeypatch):
    """A copy of the sources outside any checkout, free to be changed."""
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):  # set inside a git hook
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "source"
    shutil.copytree(PACKAGE, root / "torch-ext" / "optimizer")
    shutil.copy(ROOT / "build.toml", root)
    return root


def committed(source: Path) -> Path:
    """The package, in a commit of a new repository."""
    git(source, "init", "--quiet")
    commit(source)
    return source / "torch-ext" / "optimizer"


def metadata_in(folder: Path) -> Metadata:
    return Metadata.read_from_file(folder / f"torch-{HERE}" / "metadata.json")


def test_variants_have_valid_digests_and_metadata(builder, source):
    output = source / "build"
    ids = builder.build(source, output)
    assert sorted(path.name for path in output.iterdir()) == [f"torch-{name}" for name in BACKENDS]
    for backend, build_id in zip(BACKENDS, ids, strict=True):
        variant = output / f"torch-{backend}"
        written = json.loads((variant / "metadata.json").read_text())
        files = written.pop("digest")["files"]
        provenance = {"kernel-builder": {"version": "none (scripts/build.py)"}}
        assert written == {
            **{"name": "optimizer", "version": 1, "license": "Apache-2.0", "id": build_id},
            **{"provenance": provenance},
            **{"python-depends": [], "kernel-depends": [], "backend": {"type": backend}},
            **{"kernels-minver": "0.14.0", "source": CONFIG["general"]["source"]},
        }
        assert {str(file.relative_to(PACKAGE)) for file in SOURCES} <= set(files)
        metadata = Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        (variant / "__init__.py").write_text("tampered = True\n")
        with pytest.raises(DigestValidationError):
            metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_id_and_provenance_follow_the_content_and_nothing_else(builder, source, tmp_path):
    output, package = tmp_path / "output", source / "torch-ext" / "optimizer"

    def build() -> str:
        (build_id,) = builder.build(source, output, [HERE])
        metadata = metadata_in(output)
        assert metadata.id == build_id
        assert metadata.provenance.dirty == build_id.endswith("_dirty")
        return build_id

    first = build()
    assert build() == first and not first.endswith("_dirty")
    (source / "README.md").write_text("not part of the package")
    (package / "_ops.py").write_text("# left by the Hub's builder")
    assert build() == first
    committed(source)
    assert build() == first
    assert metadata_in(output).provenance.kernel.commit == git(source, "rev-parse", "HEAD")

    ids, init, data = [first], package / "__init__.py", package / "data.py"
    for change in (
        lambda: init.write_text(init.read_text() + "CHANGED = True\n"),
        lambda: data.write_text("{}"),
        lambda: data.rename(data.with_name("other.py")),
    ):
        change()
        ids.append(build())
    assert len(set(ids)) == 4 and all(each.endswith("_dirty") for each in ids[1:])
    assert [path.name for path in output.iterdir()] == [f"torch-{HERE}"]


@pytest.mark.parametrize("what", ["ignored", "--assume-unchanged", "--skip-worktree", "link"])
def test_a_build_tells_all_that_is_not_in_the_commit_and_a_release_leaves_it_out(
    builder, source, what
):
    package = committed(source)
    (source / ".git" / "info" / "exclude").write_text("ignored.py\n__pycache__\nbuild\n")
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "muon.pyc").write_text("no build takes bytecode")
    assert builder.git_status(source)["dirty"] is False
    if what == "ignored":
        (package / "ignored.py").write_text("{}")
    elif what == "link":  # the commit holds the link, a build what it leads to
        (package / "muon.py").rename(source / "outside.py")
        (package / "muon.py").symlink_to(source / "outside.py")
        commit(source)
    else:
        git(source, "update-index", what, "torch-ext/optimizer/muon.py")
        (package / "muon.py").write_text("CHANGED = True\n")
    (build_id,) = builder.build(source, source / "build", [HERE])
    assert build_id.endswith("_dirty") and metadata_in(source / "build").provenance.dirty
    command = [sys.executable, BUILD_SCRIPT, "--release", "--source", source, "--backend", HERE]
    released = subprocess.run(command, capture_output=True, text=True)
    if what == "link":
        assert released.returncode and "optimizer/muon.py" in released.stderr
        return
    variant = source / "build" / f"torch-{HERE}"
    assert not (variant / "ignored.py").exists()
    assert (variant / "muon.py").read_bytes() == (PACKAGE / "muon.py").read_bytes()
    provenance = metadata_in(source / "build").provenance
    assert provenance.kernel.commit == git(source, "rev-parse", "HEAD") and not provenance.dirty


def test_a_release_names_what_is_in_no_commit(builder, source):
    with pytest.raises(ValueError, match="git repository"):
        builder.export_commit(source, source / "exported")
    package = committed(source)
    builder.require_committed(source)
    (source / "notes").mkdir()
    for path in (source / "notes" / "new.md", package / "__init__.py"):
        path.write_text("[]")
    with pytest.raises(ValueError, match=r"optimizer/__init__\.py.*notes/new\.md"):
        builder.require_committed(source)
    head = git(source, "rev-parse", "HEAD")
    submodule = f"160000,{head},torch-ext/optimizer/linked"
    git(source, "update-index", "--add", "--cacheinfo", submodule)
    git(source, "commit", "--quiet", "-m", "submodule")
    with pytest.raises(ValueError, match="optimizer/linked"):
        builder.export_commit(source, source / "exported")


def test_a_build_and_a_release_give_the_same_bytes_under_any_umask_locale_and_time(
    source, tmp_path
):
    committed(source)
    settings = [
        (0o022, 10**9, [], "LC_ALL=C.UTF-8 TZ=UTC PYTHONHASHSEED=1"),
        (0o077, 2 * 10**9, ["--release"], "LC_ALL=C PYTHONUTF8=0 TZ=Asia/Tokyo PYTHONHASHSEED=2"),
    ]
    builds = []
    for umask, seconds, options, variables in settings:
        clone = tmp_path / f"clone-{umask:o}"
        subprocess.run(["git", "clone", "--quiet", source, clone], check=True, umask=umask)
        for file in (clone / "torch-ext").rglob("*"):
            os.utime(file, (seconds, seconds))
        subprocess.run(
            [sys.executable, BUILD_SCRIPT, "--source", clone, "--backend", HERE, *options],
            env={**os.environ, **dict(pair.split("=") for pair in variables.split())},
            check=True,
            capture_output=True,
            umask=umask,
        )
        files = (file for file in (clone / "build").rglob("*") if file.is_file())
        builds.append({file.relative_to(clone): file.read_bytes() for file in files})
    assert len(builds[0]) > len(SOURCES) and builds[0] == builds[1]


def test_parallel_builds_leave_one_whole_build(builder, source, tmp_path):
    sources = [tmp_path / f"source-{index}" for index in range(4)]
    for root in sources:
        shutil.copytree(source, root)
        (root / "torch-ext" / "optimizer" / "index.py").write_text(root.name)
    output = tmp_path / "output"
    with ThreadPoolExecutor(len(sources)) as pool:
        built = pool.map(lambda root: builder.build(root, output, [HERE]), sources * 5)
        ids = {build_id for (build_id,) in built}
    metadata = metadata_in(output)
    assert metadata.id in ids and len(ids) == len(sources)
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, output / f"torch-{HERE}"))
    assert [path.name for path in output.iterdir()] == [f"torch-{HERE}"]


def test_two_builds_in_one_process_keep_their_submodules_apart(builder, source, tmp_path):
    for mark in ("first", "second"):
        for file in (source / "torch-ext").rglob("*.py"):
            file.write_text(f"{file.read_text()}\nBUILD_MARK = {mark!r}\n")
        (build_id,) = builder.build(source, tmp_path / mark, [HERE])
        loaded = get_local_kernel(tmp_path / mark)
        assert loaded.__name__ == build_id and loaded.__name__ != optimizer.__name__
        assert all(hasattr(loaded, name) for name in loaded.__all__)  # loads what is used seldom
        modules = {name: m for name, m in sys.modules.items() if name.split(".")[0] == build_id}
        assert modules.pop(f"{build_id}._ops").add_op_namespace_prefix("op") == f"{build_id}::op"
        assert f"{build_id}.muon" in modules
        assert {module.BUILD_MARK for module in modules.values()} == {mark}
    assert not hasattr(optimizer, "BUILD_MARK")
