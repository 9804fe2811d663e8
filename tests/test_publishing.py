"""scripts/publish.py: what goes where, what is refused, what an interruption leaves.

The Hub is on 127.0.0.1; its client is the real one.
"""

import importlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from kernels._rust import DigestValidationError

from checkout import ROOT
from hub_clients import KERNEL, PUBLISH, VARIANT, branch
from loopback_hub import Fault, Hub

pytestmark = pytest.mark.slow

BUILD = [sys.executable, ROOT / "scripts" / "build.py"]


def test_publishing_puts_the_kernel_on_its_branch_and_the_card_on_main(releases, tmp_path):
    options = ["--release", "--source", releases.sources, "--output", tmp_path / "build"]
    subprocess.run([*BUILD, *options], check=True, capture_output=True)
    built = {
        str(path.relative_to(tmp_path)): path.read_bytes()
        for path in (tmp_path / "build").rglob("*")
        if path.is_file()
    }
    benchmarks = {
        f"benchmarks/{path.name}": path.read_bytes()
        for path in (releases.sources / "benchmarks").glob("*.py")
    }
    assert f"{VARIANT}/metadata.json" in built and "benchmarks/benchmark.py" in benchmarks
    # Whoever has the commit can rebuild what the Hub serves, byte for byte.
    assert branch(releases.first, "v1") == {".gitattributes": b""} | built | benchmarks
    card = branch(releases.first, "main")["README.md"].decode()
    assert f'get_kernel("{KERNEL}", version=1' in card and "- `Muon`" in card
    assert "https://github.com/org/optimizer" in card
    second = branch(releases.both, "main")["README.md"].decode()
    assert f'get_kernel("{KERNEL}", version=2' in second and "--revision v2 " in second
    assert len(releases.first[KERNEL].commits) == 3, "each branch gets one commit"


def test_publishing_again_changes_nothing(hub, client, releases):
    client.publish(releases.sources)
    assert hub.repositories == releases.first


def test_another_repository_can_be_named_and_be_private(hub, client, releases):
    client.publish(releases.sources, "--repo-id", "someone/kernel", "--private")
    assert hub.repositories["someone/kernel"].private
    card = hub.repositories["someone/kernel"].files("main")["README.md"].decode()
    assert 'get_kernel("someone/kernel", version=1' in card
    assert hub.repositories[KERNEL] == releases.first[KERNEL]


def test_what_exists_is_not_published_to_as_if_it_were_private(hub, client, releases):
    told = client.refused(releases.second_sources, "--private")
    assert "409, it exists already" in told and "leave --private out" in told
    assert hub.repositories == releases.first


def test_a_dry_run_needs_no_hub_and_names_what_publishing_uploads(client, releases):
    client.url = "http://127.0.0.1:9"
    told = client.publish(releases.second_sources, "--dry-run")
    named: dict[str, dict[str, int]] = {}
    for line in told.splitlines():
        if match := re.search(r"org/optimizer branch (\w+)", line):
            files = named.setdefault(match[1], {})
        elif match := re.fullmatch(r"  (\S+) \((\d+) bytes\)", line):
            files[match[1]] = int(match[2])
    for name in ("v2", "main"):
        there = branch(releases.both, name).items()
        sizes = {path: len(content) for path, content in there}
        # The branch began as a copy of main, which had the first card.
        untouched = {".gitattributes"} | ({"README.md"} if name == "v2" else set())
        assert named[name] == {path: sizes[path] for path in sizes.keys() - untouched}


def test_what_is_in_no_commit_is_not_published(hub, client, releases, tmp_path):
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", releases.sources, source], check=True)
    (source / "torch-ext" / "optimizer" / "stray.py").write_text("")
    assert "torch-ext/optimizer/stray.py" in client.refused(source)
    dry = client.command(sys.executable, PUBLISH, "--source", source, "--dry-run")
    assert dry.returncode == 0 and "would be refused" in dry.stderr and "stray.py" in dry.stderr
    assert "stray.py" not in dry.stdout
    assert not hub.requests


def test_a_build_is_verified_against_its_digests(releases, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    publish = importlib.import_module("publish")
    options = ["--source", releases.sources, "--output", tmp_path]
    subprocess.run([*BUILD, *options], check=True, capture_output=True)
    publish.verify(tmp_path)
    (tmp_path / "torch-xpu" / "muon.py").write_text("tampered = True\n")
    with pytest.raises(DigestValidationError, match=r"muon\.py"):
        publish.verify(tmp_path)


def test_another_version_another_repository_and_a_build_of_other_sources_are_refused(
    hub, client, releases, tmp_path
):
    assert "v2.1 is not of v1" in client.refused(releases.sources, "--tag", "v2.1")
    elsewhere = "https://github.com/someone/optimizer"
    refused = client.refused(releases.sources, "--repository", elsewhere)
    assert f"{elsewhere} is not https://github.com/org/optimizer, the source in" in refused
    other = tmp_path / "other"
    build = [*BUILD, "--output", other, "--backend", "cpu", "--source"]
    subprocess.run([*build, releases.changed_sources], check=True, capture_output=True)
    refused = client.refused(releases.sources, "--same-as", other)
    assert f"torch-cpu/__init__.py is not the same in {other}" in refused
    refused = client.refused(releases.sources, "--same-as", tmp_path / "absent")
    assert "no variant of this kernel" in refused
    assert not hub.requests
    subprocess.run([*build, releases.sources], check=True, capture_output=True)
    client.publish(releases.sources, "--tag", "v1.3", "--same-as", other)


FAULTS = {
    "the commit fails": (Fault("POST .*/commit/v1", status=500), "500, the Hub is failing"),
    "the commit is lost": (Fault("POST .*/commit/v1", drop=True), "no connection"),
    "its answer is lost": (Fault("POST .*/commit/v1", drop=True, served=True), "no connection"),
    "the card's fails": (Fault("POST .*/commit/main", status=503), "503, the Hub is failing"),
    "branches are lost": (Fault("GET .*/refs", drop=True), "no connection"),
    "too many": (Fault("POST .*/repos/create", status=429), "429, too many requests"),
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
    assert started.returncode == 1 and told == "publish interrupted: run it again to complete it\n"
    client.publish(releases.sources)
    assert branch(hub.repositories, "v1") == branch(releases.first, "v1")
    assert branch(hub.repositories, "main") == branch(releases.first, "main")


def between(hub: Hub) -> None:
    files = hub.repositories[KERNEL].files("v1")
    hub.repositories[KERNEL].commit("v1", {**files, "build/other.py": b""})


def no_right(hub: Hub, right: str) -> None:
    hub.tokens["writer"].remove(right)


REFUSALS = {
    "unknown token": (
        lambda hub: hub.tokens.clear(),
        "branch v1: 401, the Hub does not know you: `hf auth login`, or set HF_TOKEN",
    ),
    "unknown token, new kernel": (
        lambda hub: (hub.repositories.clear(), hub.tokens.clear()),
        "cannot create org/optimizer: 401, the Hub does not know you",
    ),
    "no new kernels": (
        lambda hub: (hub.repositories.clear(), no_right(hub, "create")),
        "cannot create org/optimizer: 403, it does not exist, and this token may not create it",
    ),
    "only new kernels": (
        lambda hub: no_right(hub, "write"),
        "branch v1: 403, this token may not write there",
    ),
    "gone": (
        lambda hub: hub.faults.append(Fault("/refs", status=404)),
        "branch v1: 404, there is no such repository or branch",
    ),
    "conflict": (
        lambda hub: hub.faults.append(Fault("/commit/v1", status=409)),
        "branch v1: 409, somebody else is publishing",
    ),
    "a commit in between": (
        lambda hub: hub.faults.append(Fault("/preupload/v1", meanwhile=lambda: between(hub))),
        "branch v1: 412, somebody else has published in between",
    ),
    "no Hub": (
        lambda hub: hub.__exit__(),
        "cannot create org/optimizer: no connection to http://127.0.0.1",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_hub_refuses_is_told_in_a_line_that_says_what_to_do(hub, client, releases, name):
    arrange, told = REFUSALS[name]
    arrange(hub)
    assert told in client.refused(releases.changed_sources)
