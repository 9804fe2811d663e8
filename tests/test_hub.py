"""Publishing the kernel by scripts/publish.py, and loading it from the Hub as users do.

The Hub is on 127.0.0.1; its clients are the real ones. Some tests pin what kernels 0.17.2 does not
do: docs/publishing.md tells its users so.
"""

import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from kernels import Metadata

from checkout import ROOT
from loopback_hub import KERNEL, VARIANT, Client, Fault, Hub, branch

pytestmark = pytest.mark.slow

DEAD = "http://127.0.0.1:9"  # the discard port: nothing listens


def build(*options: object) -> None:
    command = [sys.executable, ROOT / "scripts" / "build.py", *options]
    subprocess.run(command, check=True, capture_output=True)


# -- publishing ------------------------------------------------------------------------------------


def test_publishing_puts_the_kernel_on_its_branch_and_the_card_on_main(releases, tmp_path):
    published = (releases.sources, releases.first), (releases.changed_sources, releases.changed)
    for source, contents in published:
        output = tmp_path / source.name
        build("--release", "--source", source, "--output", output / "build")
        expected = {".gitattributes": b""}
        for folder, files in ((output, "build/**/*"), (source, "benchmarks/*.py")):
            paths = [path for path in folder.glob(files) if path.is_file()]
            expected |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        # Whoever has the commit can rebuild what the Hub serves, byte for byte.
        assert branch(contents, "v1") == expected and f"{VARIANT}/metadata.json" in expected
    card = branch(releases.first, "main")["README.md"].decode()
    assert f'get_kernel("{KERNEL}", version=1' in card and "- `Muon`" in card
    assert len(releases.first[KERNEL].commits) == 3, "each branch gets one commit"


def test_publishing_again_changes_nothing(hub, client, releases):
    client.publish(releases.sources)
    assert hub.repositories == releases.first
    # Nor does what exists take for private what is not.
    assert "409" in client.refused(releases.changed_sources, "--private")
    assert hub.repositories == releases.first
    client.publish(releases.sources, "--repo-id", "someone/kernel", "--private")
    other = hub.repositories.pop("someone/kernel")
    assert other.private and b"someone/kernel" in other.files("main")["README.md"]
    assert hub.repositories == releases.first


def test_a_dry_run_needs_no_hub_and_names_what_publishing_uploads(releases, tmp_path):
    told, _ = Client(DEAD, tmp_path).publish(releases.changed_sources, "--dry-run")
    files = {**branch(releases.changed, "v1"), **branch(releases.changed, "main")}
    del files[".gitattributes"]
    assert told.count(" bytes)") == len(files)
    assert all(f"{path} ({len(content)} bytes)" in told for path, content in files.items())


def test_what_is_not_meant_to_be_published_is_refused(hub, client, releases, tmp_path):
    other, same, source = (tmp_path / name for name in ("other", "same", "source"))
    for folder, sources in ((other, releases.changed_sources), (same, releases.sources)):
        build("--output", folder, "--backend", "cpu", "--source", sources)
    subprocess.run(["git", "clone", "--quiet", releases.sources, source], check=True)
    (source / "torch-ext" / "optimizer" / "stray.py").write_text("")
    elsewhere = "https://github.com/someone/optimizer"
    for options, named in (
        ((releases.sources, "--tag", "v2.1"), "v2.1"),
        ((releases.sources, "--repository", elsewhere), elsewhere),
        ((releases.sources, "--same-as", other), "torch-cpu/muon.py"),
        ((releases.sources, "--same-as", tmp_path / "absent"), "absent"),
        ((source,), "torch-ext/optimizer/stray.py"),
    ):
        assert named in client.refused(*options)
    told, warned = client.publish(source, "--dry-run")
    assert "stray.py" in warned and "stray.py" not in told and not hub.requests
    client.publish(releases.sources, "--tag", "v1.3", "--same-as", same)


def commit_in_between(hub: Hub) -> None:
    repository = hub.repositories[KERNEL]
    repository.commit("v1", {**repository.files("v1"), "build/other.py": b""})


# What happens at a request, and what is said of it, in a line.
FAULTS = {
    "the token is unknown": (Fault("POST .*/preupload/v1", status=401), "v1: 401, .*HF_TOKEN"),
    "the token may not write": (Fault("POST .*/commit/v1", status=403), "v1: 403, "),
    "the commit fails": (Fault("POST .*/commit/v1", status=500), "v1: 500"),
    "the commit is lost": (Fault("POST .*/commit/v1", drop=True), "no connection to http://127"),
    "its answer is lost": (Fault("POST .*/commit/v1", cut=True), "no connection"),
    "another commit": (Fault("POST .*/preupload/v1", meanwhile=commit_in_between), "v1: 412, "),
    "the card's fails": (Fault("POST .*/commit/main", status=503), "503"),
    "branches are lost": (Fault("GET .*/refs", drop=True), "no connection"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_publication_that_fails_half_way_serves_old_or_new_and_a_rerun_completes_it(
    hub, client, releases, name
):
    fault, told = FAULTS[name]
    hub.faults = [fault]
    assert re.search(told, client.refused(releases.changed_sources))
    old, new = branch(releases.first, "v1"), branch(releases.changed, "v1")
    assert name == "another commit" or branch(hub.repositories, "v1") in (old, new)
    client.publish(releases.changed_sources)
    assert branch(hub.repositories, "v1") == new
    assert branch(hub.repositories, "main") == branch(releases.changed, "main")


def test_a_first_publication_that_is_interrupted_is_completed_by_a_rerun(client, hub, releases):
    hub.repositories = {}
    hub.faults = [Fault("POST .*/create", status=403)]
    assert f"create {KERNEL}: 403, " in client.refused(releases.sources)
    gone = threading.Event()  # the publisher, which gets no answer until then
    hub.faults = [Fault("POST .*/commit/v1", meanwhile=lambda hub: gone.wait(60), drop=True)]
    started = client.publishing(releases.sources)
    while hub.faults:
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    _, told = started.communicate()
    gone.set()
    assert started.returncode == 1 and told.count("\n") == 1 and "run it again" in told
    client.publish(releases.sources)
    for name in ("v1", "main"):
        assert branch(hub.repositories, name) == branch(releases.first, name)


# -- loading ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(releases, tmp_path_factory):
    """What training with a local build gives."""
    build("--source", releases.sources)
    client = Client(DEAD, tmp_path_factory.mktemp("home"))
    local = {"LOCAL_KERNELS": f"{KERNEL}={releases.sources}"}
    return client.python("show(train(load()))", **local)[0]


def build_id(contents) -> str:
    return Metadata.from_bytes(branch(contents, "v1")[f"{VARIANT}/metadata.json"]).id


def documented_check() -> str:
    """The Python below a heading of docs/publishing.md."""
    text = (ROOT / "docs" / "publishing.md").read_text()
    pattern = r"\n#+ Verify\n.*?```python\n(.*?)```"
    return re.search(pattern, text, re.DOTALL)[1]


def test_a_published_kernel_is_fetched_and_trains_as_the_local_build(client, releases, trained):
    refused, name, result = client.python("""
refused = attempt(load, trust_remote_code=False)
optimizer = load()
show(refused, optimizer.__name__, train(optimizer))
""")
    assert refused.startswith("ValueError: ") and "trust_remote_code" in refused
    assert (name, result) == (build_id(releases.first), trained)


def test_a_republished_version_reaches_old_and_new_caches(hub, client, releases, tmp_path):
    load = "show(load().__name__)"
    assert client.python(load) == [build_id(releases.first)]
    hub.repositories = releases.changed
    ids = [client.python(load), Client(hub.url, tmp_path / "other").python(load)]
    assert ids == [[build_id(releases.changed)]] * 2
    assert build_id(releases.changed) != build_id(releases.first)


def test_other_bytes_of_the_same_size_are_loaded_unless_the_documented_check_is_made(
    hub, client, releases, trained
):
    # The client compares sizes only, and metadata.json's digests not at all.
    path = f"{VARIANT}/muon.py"
    hub.corrupted[path] = branch(releases.changed, "v1")[path]
    assert len(hub.corrupted[path]) == len(branch(releases.first, "v1")[path])
    code = f"result = train(load())\nshow(result, attempt(exec, {documented_check()!r}, {{}}))"
    result, found = client.python(code)
    assert result != trained
    assert "DigestValidationError" in found and "muon.py" in found


def test_the_documented_check_refuses_what_python_would_load_and_no_digest_covers(
    client, trained, tmp_path
):
    # As a folder, muon would be loaded in place of muon.py. Who owns what core.py leads to can
    # change it after the check.
    names = ["__pycache__/muon.cpython.pyc", "muon.pyc", "muon", "muon.so", "core.py"]
    found, bytecode, result = client.python(f"""
from kernels import install_kernel

folder = install_kernel("org/optimizer", version=1, trust_remote_code=["org/optimizer"])
check, found = {documented_check()!r}, []
(folder / "__pycache__").mkdir(exist_ok=True)
outside = Path({str(tmp_path)!r})
for planted in (folder / name for name in {names!r}):
    content = planted.read_bytes() if planted.exists() else None
    planted.unlink(missing_ok=True)
    if planted.suffix == ".pyc":
        planted.write_bytes(b"")
    elif content is None:
        planted.symlink_to(outside)
    else:
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
    assert bytecode == [] and result == trained


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
    first, result = client.python("show(attempt(load), train(load()))")
    assert first.startswith("HfHubHTTPError: Server error '500")
    assert result == trained and not hub.faults


def test_a_downloaded_kernel_needs_no_hub(client, trained, tmp_path):
    where = ("--repo-type", "kernel", "--revision", "v1")
    client.run("hf", "download", KERNEL, *where)
    folder = tmp_path / "kernel"
    client.run("hf", "download", KERNEL, *where, "--local-dir", folder)
    client.url = DEAD
    code = "show(train(load(trust_remote_code=False)))"
    assert client.python(code, HF_HUB_OFFLINE="1") == [trained]
    load = f"show(train(load()), get_local_kernel(Path({str(folder)!r})) is load())"
    assert client.python(load, LOCAL_KERNELS=f"{KERNEL}={folder}") == [trained, True]
