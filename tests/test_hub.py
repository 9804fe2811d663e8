"""Loading the published kernel from a Hub as users do: the `kernels` client, over a loopback Hub.

Some of these pin what kernels 0.17.2 does not do: docs/publishing.md tells its users so.
"""

import copy
import json
import re
import subprocess
import sys

import pytest
from kernels import Metadata

from checkout import ROOT
from hub_clients import KERNEL, VARIANT, Client, branch
from loopback_hub import Fault

pytestmark = pytest.mark.slow

DEAD = "http://127.0.0.1:9"  # the discard port: nothing listens


@pytest.fixture(scope="module")
def trained(releases, tmp_path_factory):
    """What training with a local build of each version gives, each in a process of its own."""
    results = []
    for source in (releases.sources, releases.second_sources):
        build = [sys.executable, ROOT / "scripts" / "build.py", "--source", source]
        subprocess.run(build, check=True, capture_output=True)
        client = Client(DEAD, tmp_path_factory.mktemp("home"))
        results += client.python("show(train(load()))", LOCAL_KERNELS=f"{KERNEL}={source}")
    first, second = results
    assert first != second
    return results


def build_id(contents, version: str = "v1") -> str:
    return Metadata.from_bytes(branch(contents, version)[f"{VARIANT}/metadata.json"]).id


def commit_of(contents, version: str = "v1") -> str:
    return contents[KERNEL].branches[version]


def test_a_published_kernel_is_fetched_and_trains_as_the_local_build(client, releases, trained):
    refused, name, result = client.python("""
refused = attempt(load, trust_remote_code=False)
optimizer = load()
show(refused, optimizer.__name__, train(optimizer))
""")
    assert refused.startswith("ValueError: Kernel repository 'org/optimizer' is not from a trusted")
    assert "Set trust_remote_code=True or add the repository ID" in refused
    assert name == build_id(releases.first)
    assert result == trained[0]


def test_a_trusted_publisher_needs_no_trust_remote_code(hub, client, trained):
    hub.trusted.add(KERNEL.partition("/")[0])
    script = 'optimizer = get_kernel("org/optimizer", version=1)\nshow(train(optimizer))'
    assert client.python(script) == [trained[0]]


def test_two_versions_train_side_by_side_as_each_does_alone(hub, client, releases, trained):
    hub.repositories = copy.deepcopy(releases.both)
    names, results, strangers, marks, instance = client.python("""
one, two = load(), load(version=2)
results = [train(one), train(two), train(one)]
modules = {name: module for name, module in sys.modules.items() if "_optimizer_" in name}
strangers = [
    name for name, module in modules.items()
    for value in vars(module).values()
    if (getattr(value, "__module__", None) or "").startswith("_optimizer_")
    and value.__module__.split(".")[0] != name.split(".")[0]
]
marks = {name.split(".")[0]: set() for name in modules}
for name, module in modules.items():
    marks[name.split(".")[0]].add(getattr(module, "RELEASE", "first"))
optim = two.Muon([{"params": [torch.nn.Parameter(torch.ones(2, 2))], "use_muon": True}])
marks = {name: sorted(found) for name, found in marks.items()}
show([one.__name__, two.__name__], results, strangers, marks, isinstance(optim, one.Muon))
""")
    assert names == [build_id(releases.both), build_id(releases.both, "v2")]
    assert results == [trained[0], trained[1], trained[0]]
    assert strangers == [], "modules of one version hold objects of the other's"
    # The module that registers operators is written by the build.
    assert {name: set(found) - {"first"} for name, found in marks.items()} == {
        names[0]: set(),
        names[1]: {"second"},
    }
    assert not instance


def test_a_republished_version_reaches_old_and_new_caches(hub, client, releases, tmp_path):
    load = "show(load().__name__)"
    assert client.python(load) == [build_id(releases.first)]
    hub.repositories = copy.deepcopy(releases.changed)
    ids = [client.python(load), Client(hub.url, tmp_path / "other").python(load)]
    assert ids == [[build_id(releases.changed)]] * 2
    assert build_id(releases.changed) != build_id(releases.first)


def documented(heading: str) -> str:
    """The first block of Python below `heading` of docs/publishing.md."""
    text = (ROOT / "docs" / "publishing.md").read_text()
    return re.search(rf"\n#+ {heading}\n.*?```python\n(.*?)```", text, re.DOTALL)[1]


def test_other_bytes_of_the_same_size_are_loaded_unless_the_documented_check_is_made(
    hub, client, releases, trained
):
    # The client compares sizes only, and metadata.json's digests not at all.
    path = f"{VARIANT}/muon.py"
    sent = branch(releases.first, "v1")[path]
    hub.corrupted[path] = sent.replace(b"momentum: float = 0.95,", b"momentum: float = 0.59,")
    assert len(hub.corrupted[path]) == len(sent) and hub.corrupted[path] != sent
    check = documented("Verify what was fetched")
    result, found = client.python(
        f"result = train(load())\nshow(result, attempt(exec, {check!r}, {{}}))"
    )
    assert result not in trained
    assert "DigestValidationError" in found and "muon.py" in found


def test_the_documented_check_refuses_what_python_would_load_and_no_digest_covers(
    client, trained, tmp_path
):
    # As a folder, muon would be loaded in place of muon.py. Who owns what core.py leads to can
    # change it after the check.
    names = ["__pycache__/muon.cpython.pyc", "muon.pyc", "muon", "muon.so", "core.py"]
    outside = tmp_path / "outside"
    outside.mkdir()
    found, bytecode, result = client.python(f"""
from kernels import install_kernel

folder = install_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])
check = {documented("Verify what was fetched")!r}
outside, found = Path({str(outside)!r}), []
for planted in (folder / name for name in {names!r}):
    content = planted.read_bytes() if planted.exists() else None
    if planted.suffix == ".pyc":
        planted.parent.mkdir(exist_ok=True)
        planted.write_bytes(b"")
    elif content is None:
        planted.symlink_to(outside)
    else:
        planted.unlink()
        (outside / planted.name).write_bytes(content)
        planted.symlink_to(outside / planted.name)
    found.append(attempt(exec, check, {{}}))
    planted.unlink()
    if content is not None:
        planted.write_bytes(content)
exec(check, {{}})
result = train(load())
exec(check, {{}})
show(found, list(map(str, folder.rglob("*.pyc"))), result)
""")
    for name, told in zip(names, found, strict=True):
        assert told.startswith("RuntimeError: ")
        assert f"{VARIANT}/{name} is bytecode or a link" in told
    assert bytecode == [] and result == trained[0]


def test_files_of_another_size_are_refused_and_do_not_stay(hub, client, trained):
    path = f"{VARIANT}/muon.py"
    hub.corrupted[path] = b"RELEASE = 'cut short'\n"
    (refused,) = client.python("show(attempt(load))")
    assert "Consistency check failed" in refused and "muon.py" in refused
    hub.corrupted.clear()
    check = documented("Verify what was fetched")
    assert client.python(f"exec({check!r}, {{}})\nshow(train(load()))") == [trained[0]]


def test_what_is_not_published_is_named(hub, client):
    repository = hub.repositories[KERNEL]
    files = repository.files("v1")
    repository.commit("v1", {path: files[path] for path in files if not path.startswith(VARIANT)})
    no_variant, no_version, no_kernel = client.python("""
show(attempt(load), attempt(load, version=7), attempt(get_kernel, "org/other", version=1,
     trust_remote_code=True))
""")
    assert no_variant.startswith("FileNotFoundError: Cannot find a build variant for this system")
    assert "does not match system backend" in no_variant
    assert no_version == "ValueError: Version 7 not found, available versions: 1"
    assert no_kernel.startswith("RepositoryNotFoundError: 401")


def test_a_download_that_breaks_off_is_resumed_or_raises_and_completes_the_next_time(
    hub, client, trained
):
    resumed = [
        Fault(f"GET .*/{VARIANT}/core.py", cut=True),
        Fault(f"GET .*/{VARIANT}/adamw.py", drop=True),
        Fault(f"HEAD .*/{VARIANT}/presets.py", status=500),
    ]
    raised = Fault(f"GET .*/{VARIANT}/muon.py", status=500)
    hub.faults = [*resumed, raised]
    first, result = client.python("""
first = attempt(load)
optimizer = load()
show(first, train(optimizer))
""")
    assert first.startswith("HfHubHTTPError: Server error '500")
    assert result == trained[0]
    assert [fault.times for fault in hub.faults] == [0] * 4, "not every fault was met"


def test_what_an_online_start_leaves_is_not_enough_to_start_offline(hub, client, releases):
    # kernels asks by commit, so the cache has no name for the branch, and one variant only.
    client.python("show(load().__name__)")
    commit = commit_of(releases.first)
    by_version, by_commit = client.python(
        f'show(attempt(load), attempt(load, version=None, revision="{commit}"))',
        HF_HUB_OFFLINE="1",
    )
    assert "is not available in the local cache" in by_version
    assert "Cannot find a local snapshot" in by_commit
    (unreachable,) = client.python("show(attempt(load))", HF_ENDPOINT=DEAD)
    assert unreachable.startswith("ConnectError")


def test_a_whole_download_starts_offline(client, trained):
    client.tool("hf", "download", KERNEL, "--repo-type", "kernel", "--revision", "v1")
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": DEAD}
    assert client.python("show(train(load(trust_remote_code=False)))", **offline) == [trained[0]]


def test_a_downloaded_folder_needs_no_hub_and_no_trust(client, trained, tmp_path):
    folder = tmp_path / "kernel"
    where = ("--repo-type", "kernel", "--revision", "v1", "--local-dir", folder)
    client.tool("hf", "download", KERNEL, *where)
    result, same = client.python(
        f"""
optimizer = get_kernel("org/optimizer", version=1)
show(train(optimizer), get_local_kernel(Path({str(folder)!r})) is optimizer)
""",
        LOCAL_KERNELS=f"{KERNEL}={folder}",
        HF_ENDPOINT=DEAD,
    )
    assert result == trained[0] and same


def test_turned_off_telemetry_keeps_kernels_from_loading(client):
    (refused,) = client.python("show(attempt(load))", HF_HUB_DISABLE_TELEMETRY="1")
    assert refused.startswith("LocalProtocolError: Illegal header value")


def test_locked_kernels_stay_what_they_were_when_the_version_is_republished(
    hub, client, releases, tmp_path
):
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{KERNEL}" = 1\n')
    lock = project / "kernels.lock"
    with pytest.raises(AssertionError, match="is not from a trusted publisher"):
        client.tool("kernels", "lock", project)
    hub.trusted.add(KERNEL.partition("/")[0])
    client.tool("kernels", "lock", project)
    assert f'"commit": "{commit_of(releases.first)}"' in lock.read_text()
    hub.trusted.clear()

    hub.repositories[KERNEL] = copy.deepcopy(releases.changed[KERNEL])
    hub.repositories[KERNEL].commits |= releases.first[KERNEL].commits
    commit = commit_of(releases.first)
    names = client.python(f"""
locked = get_locked_kernel("org/optimizer", lockfile=Path({str(lock)!r}),
                           trust_remote_code=["org/optimizer"])
pinned = load(version=None, revision="{commit}")
show(locked.__name__, pinned.__name__, load().__name__)
""")
    first, changed = build_id(releases.first), build_id(releases.changed)
    assert names == [first, first, changed]


def test_a_lock_is_loaded_offline_after_a_whole_download_and_not_after_kernels_download(
    client, releases, tmp_path
):
    commit = commit_of(releases.first)
    dependency = {"repo-id": KERNEL, "version": 1}
    lock = json.dumps([{"dependency": dependency, "lock": {"commit": commit}}])
    (tmp_path / "kernels.lock").write_text(lock)
    lockfile = f"lockfile=Path({str(tmp_path)!r}, 'kernels.lock')"
    load = f"show(attempt(load_kernel, 'org/optimizer', {lockfile}))"
    # It looks for the benchmarks too, which `kernels download` leaves out.
    client.tool("kernels", "download", "--all-variants", tmp_path)
    (refused,) = client.python(load, HF_ENDPOINT=DEAD)
    assert "Cannot find a local snapshot" in refused
    client.tool("hf", "download", KERNEL, "--repo-type", "kernel", "--revision", commit)
    assert client.python(load, HF_ENDPOINT=DEAD) == [f"loaded {build_id(releases.first)}"]


def test_benchmarks_run_from_a_downloaded_folder(client, tmp_path):
    # `kernels benchmark org/optimizer` asks for a repository of models.
    refused = client.command("kernels", "benchmark", KERNEL, "--version", "1")
    assert refused.returncode and "/api/models/org/optimizer" in refused.stderr
    folder = tmp_path / "kernel"
    where = ("--repo-type", "kernel", "--revision", "v1", "--local-dir", folder)
    client.tool("hf", "download", KERNEL, *where)
    done = client.command("kernels", "benchmark", folder, "--iterations", "1", "--warmup", "0")
    assert done.returncode == 0 and "Orthogonalize" in done.stdout + done.stderr, done.stderr
