"""scripts/publish.py: what goes where, what is refused, what an interruption leaves.

The Hub is on 127.0.0.1; its client is the real one.
"""

import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from checkout import ROOT
from hub_clients import KERNEL, PUBLISH, VARIANT, branch
from loopback_hub import Fault, Hub

pytestmark = pytest.mark.slow

BUILD = [sys.executable, ROOT / "scripts" / "build.py"]


def test_publishing_puts_the_kernel_on_its_branch_and_the_card_on_main(releases, tmp_path):
    options = ["--release", "--source", releases.sources, "--output", tmp_path / "build"]
    subprocess.run([*BUILD, *options], check=True, capture_output=True)
    expected = {".gitattributes": b""}
    for folder, files in ((tmp_path, "build/**/*"), (releases.sources, "benchmarks/*.py")):
        paths = [path for path in folder.glob(files) if path.is_file()]
        expected |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    # Whoever has the commit can rebuild what the Hub serves, byte for byte.
    assert branch(releases.first, "v1") == expected and f"{VARIANT}/metadata.json" in expected
    for contents, version in ((releases.first, 1), (releases.both, 2)):
        card = branch(contents, "main")["README.md"].decode()
        assert f'get_kernel("{KERNEL}", version={version}' in card and "- `Muon`" in card
    assert len(releases.first[KERNEL].commits) == 3, "each branch gets one commit"


def test_publishing_again_changes_nothing(hub, client, releases):
    client.publish(releases.sources)
    assert hub.repositories == releases.first
    # Nor does what exists take for private what is not.
    assert "409" in client.refused(releases.second_sources, "--private")
    assert hub.repositories == releases.first
    client.publish(releases.sources, "--repo-id", "someone/kernel", "--private")
    other = hub.repositories.pop("someone/kernel")
    assert other.private and b"someone/kernel" in other.files("main")["README.md"]
    assert hub.repositories == releases.first


def test_a_dry_run_needs_no_hub_and_names_what_publishing_uploads(client, releases):
    client.url = "http://127.0.0.1:9"
    told = client.publish(releases.second_sources, "--dry-run")
    files = {**branch(releases.both, "v2"), **branch(releases.both, "main")}
    del files[".gitattributes"]
    assert told.count(" bytes)") == len(files)
    assert all(f"{path} ({len(content)} bytes)" in told for path, content in files.items())


def test_what_is_not_meant_to_be_published_is_refused(hub, client, releases, tmp_path):
    other, source = tmp_path / "other", tmp_path / "source"
    build = [*BUILD, "--output", other, "--backend", "cpu", "--source"]
    subprocess.run([*build, releases.changed_sources], check=True, capture_output=True)
    subprocess.run(["git", "clone", "--quiet", releases.sources, source], check=True)
    (source / "torch-ext" / "optimizer" / "stray.py").write_text("")
    elsewhere = "https://github.com/someone/optimizer"
    for options, named in (
        ((releases.sources, "--tag", "v2.1"), "v2.1"),
        ((releases.sources, "--repository", elsewhere), elsewhere),
        ((releases.sources, "--same-as", other), "torch-cpu/__init__.py"),
        ((releases.sources, "--same-as", tmp_path / "absent"), "absent"),
        ((source,), "torch-ext/optimizer/stray.py"),
    ):
        assert named in client.refused(*options)
    dry = client.command(sys.executable, PUBLISH, "--source", source, "--dry-run")
    assert dry.returncode == 0 and "stray.py" in dry.stderr and "stray.py" not in dry.stdout
    assert not hub.requests
    subprocess.run([*build, releases.sources], check=True, capture_output=True)
    client.publish(releases.sources, "--tag", "v1.3", "--same-as", other)


FAULTS = {
    "the commit fails": (Fault("POST .*/commit/v1", status=500), "500"),
    "the commit is lost": (Fault("POST .*/commit/v1", drop=True), "no connection"),
    "its answer is lost": (Fault("POST .*/commit/v1", drop=True, served=True), "no connection"),
    "the card's fails": (Fault("POST .*/commit/main", status=503), "503"),
    "branches are lost": (Fault("GET .*/refs", drop=True), "no connection"),
    "too many": (Fault("POST .*/repos/create", status=429), "429"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_publication_that_fails_half_way_serves_old_or_new_and_a_rerun_completes_it(
    hub, client, releases, name
):
    fault, told = FAULTS[name]
    hub.faults = [fault]
    assert told in client.refused(releases.changed_sources)
    old, new = branch(releases.first, "v1"), branch(releases.changed, "v1")
    assert branch(hub.repositories, "v1") in (old, new)
    client.publish(releases.changed_sources)
    assert branch(hub.repositories, "v1") == new
    assert branch(hub.repositories, "main") == branch(releases.changed, "main")


def test_a_first_publication_that_is_interrupted_is_completed_by_a_rerun(client, hub, releases):
    hub.repositories = {}
    gone = threading.Event()  # the publisher, which gets no answer until then
    hub.faults = [Fault("POST .*/commit/v1", meanwhile=lambda: gone.wait(60), drop=True)]
    command = (sys.executable, PUBLISH, "--source", releases.sources)
    started = client.start(*command, HF_TOKEN="writer")
    while not any("commit/v1" in request for request in hub.requests):
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    _, told = started.communicate()
    gone.set()
    assert started.returncode == 1 and told.count("\n") == 1 and "run it again" in told
    client.publish(releases.sources)
    for name in ("v1", "main"):
        assert branch(hub.repositories, name) == branch(releases.first, name)


def between(hub: Hub) -> None:
    files = hub.repositories[KERNEL].files("v1")
    hub.repositories[KERNEL].commit("v1", {**files, "build/other.py": b""})


def no_right(hub: Hub, right: str) -> None:
    hub.tokens["writer"].remove(right)


REFUSALS = {
    "unknown token": (lambda hub: hub.tokens.clear(), "v1: 401, .*HF_TOKEN"),
    "only new kernels": (lambda hub: no_right(hub, "write"), "v1: 403, "),
    "no new kernels": (
        lambda hub: (hub.repositories.clear(), no_right(hub, "create")),
        f"create {KERNEL}: 403, ",
    ),
    "gone": (lambda hub: hub.faults.append(Fault("/refs", status=404)), "v1: 404, "),
    "conflict": (lambda hub: hub.faults.append(Fault("/commit/v1", status=409)), "v1: 409, "),
    "a commit in between": (
        lambda hub: hub.faults.append(Fault("/preupload/v1", meanwhile=lambda: between(hub))),
        "v1: 412, ",
    ),
    "no Hub": (lambda hub: hub.__exit__(), "no connection to http://127.0.0.1"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_hub_refuses_is_told_in_a_line(hub, client, releases, name):
    arrange, told = REFUSALS[name]
    arrange(hub)
    assert re.search(told, client.refused(releases.changed_sources))
