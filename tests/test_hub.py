"""Loading the published kernel from a Hub as users do: the `kernels` client, over a loopback Hub.

Some of these pin what kernels 0.17.2 does not do: docs/publishing.md tells its users so.
"""

import copy
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
    assert len(set(results)) == 2
    return results


def build_id(contents, version: str = "v1") -> str:
    return Metadata.from_bytes(branch(contents, version)[f"{VARIANT}/metadata.json"]).id


def test_a_published_kernel_is_fetched_and_trains_as_the_local_build(client, releases, trained):
    refused, name, result = client.python("""
refused = attempt(load, trust_remote_code=False)
optimizer = load()
show(refused, optimizer.__name__, train(optimizer))
""")
    assert refused.startswith("ValueError: ") and "trust_remote_code" in refused
    assert (name, result) == (build_id(releases.first), trained[0])


def test_two_versions_train_side_by_side_as_each_does_alone(hub, client, releases, trained):
    hub.repositories = copy.deepcopy(releases.both)
    names, results, mixed, instance = client.python("""
one, two = load(), load(version=2)
results = [train(one), train(two), train(one)]
builds = {name: m for name, m in sys.modules.items() if "_optimizer_" in name}
mixed = [
    name for name, module in builds.items() for value in vars(module).values()
    if (getattr(value, "__module__", None) or "").startswith("_optimizer_")
    and value.__module__.split(".")[0] != name.split(".")[0]
]
mixed += [
    name for name, module in builds.items()
    if name.startswith(one.__name__) == (getattr(module, "RELEASE", "first") == "second")
    and not name.endswith("_ops")  # which the build writes
]
optim = two.Muon([{"params": [torch.nn.Parameter(torch.ones(2, 2))], "use_muon": True}])
show([one.__name__, two.__name__], results, mixed, isinstance(optim, one.Muon))
""")
    assert names == [build_id(releases.both), build_id(releases.both, "v2")]
    assert results == [trained[0], trained[1], trained[0]]
    assert mixed == [] and not instance


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
        assert told.startswith("RuntimeError: ") and f"{VARIANT}/{name}" in told
    assert bytecode == [] and result == trained[0]


def test_what_is_not_published_is_named(hub, client):
    repository = hub.repositories[KERNEL]
    files = repository.files("v1")
    repository.commit("v1", {path: files[path] for path in files if not path.startswith(VARIANT)})
    no_variant, no_version, no_kernel = client.python("""
show(attempt(load), attempt(load, version=7), attempt(get_kernel, "org/other", version=1,
     trust_remote_code=True))
""")
    assert no_variant.startswith("FileNotFoundError: ")
    assert no_version.startswith("ValueError: Version 7")
    assert no_kernel.startswith("RepositoryNotFoundError: 401")


def test_a_download_that_breaks_off_is_resumed_or_raises_and_completes_the_next_time(
    hub, client, trained
):
    hub.faults = [
        Fault(f"GET .*/{VARIANT}/core.py", cut=True),
        Fault(f"GET .*/{VARIANT}/adamw.py", drop=True),
        Fault(f"HEAD .*/{VARIANT}/presets.py", status=500),
        Fault(f"GET .*/{VARIANT}/muon.py", status=500),  # which alone is not resumed
    ]
    first, result = client.python("""
first = attempt(load)
optimizer = load()
show(first, train(optimizer))
""")
    assert first.startswith("HfHubHTTPError: Server error '500")
    assert result == trained[0]
    assert all(fault.is_met for fault in hub.faults)


def test_a_downloaded_kernel_needs_no_hub(client, trained, tmp_path):
    where = ("--repo-type", "kernel", "--revision", "v1")
    client.tool("hf", "download", KERNEL, *where)
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": DEAD}
    assert client.python("show(train(load(trust_remote_code=False)))", **offline) == [trained[0]]
    folder = tmp_path / "kernel"
    client.tool("hf", "download", KERNEL, *where, "--local-dir", folder)
    result, same = client.python(
        f"""
optimizer = get_kernel("org/optimizer", version=1)
show(train(optimizer), get_local_kernel(Path({str(folder)!r})) is optimizer)
""",
        LOCAL_KERNELS=f"{KERNEL}={folder}",
        HF_ENDPOINT=DEAD,
    )
    assert result == trained[0] and same
