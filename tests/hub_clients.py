"""Processes that publish to and load from a loopback Hub, as maintainers and users do."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kernels.backends import _backend

from checkout import ROOT
from loopback_hub import Files, Hub, Repository

PUBLISH = ROOT / "scripts" / "publish.py"
KERNEL = "org/optimizer"
VARIANT = f"build/torch-{_backend().name}"

Contents = dict[str, Repository]

PRELUDE = '''
import hashlib, json, os, sys
from pathlib import Path

import torch
from kernels import get_kernel, get_local_kernel, get_locked_kernel, load_kernel

def load(**options):
    options = {"version": 1, "trust_remote_code": ["org/optimizer"], **options}
    return get_kernel("org/optimizer", **options)

def attempt(call, *args, **options):
    """What is raised."""
    try:
        return f"loaded {call(*args, **options).__name__}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def train(optimizer):
    """A digest of the weights after two steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    groups = optimizer.muon.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    return hashlib.sha256(weights).hexdigest()

def show(*values):
    print(json.dumps(values))
'''


def _listen_to_interrupts() -> None:
    """For a process that is to be interrupted: jobs in the background are started deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Client:
    """A machine: its HF_HOME, and the Hub that it reaches."""

    url: str
    home: Path

    def command(self, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
        done = self.start(*command, **variables)
        out, err = done.communicate()
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    def start(self, *command: object, **variables: str) -> "subprocess.Popen[str]":
        program, *arguments = map(str, command)
        return subprocess.Popen(
            [str(Path(sys.executable).parent / program), *arguments],
            env=self.environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_listen_to_interrupts,
        )

    def environment(self) -> dict[str, str]:
        """Nothing of the tests' own Hub settings, above all not the build under test."""
        foreign = ("HF_", "LOCAL_KERNELS", "KERNELS_", "GIT_", "DO_NOT_TRACK")
        kept = {name: os.environ[name] for name in os.environ if not name.startswith(foreign)}
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }

    def python(self, code: str, **variables: str) -> Any:
        """What `code` shows last."""
        done = self.command(sys.executable, "-c", PRELUDE + code, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def tool(self, name: str, *arguments: object, **variables: str) -> str:
        """What a command of the environment prints."""
        done = self.command(name, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def publish(self, source: Path, *options: object) -> str:
        return self.tool(sys.executable, PUBLISH, "--source", source, *options, HF_TOKEN="writer")

    def refused(self, source: Path, *options: object) -> str:
        """What publishing says that does not happen: one line, no traceback."""
        command = (sys.executable, PUBLISH, "--source", source, *options)
        done = self.command(*command, HF_TOKEN="writer")
        assert done.returncode == 1 and done.stderr.startswith("publish "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr


def checkout(folder: Path) -> Path:
    """A git repository of what is published, in one commit."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("torch-ext", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in (".gitignore", "build.toml", "CARD.md"):
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "all")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    command = ["git", "-C", folder, *identity, *arguments]
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.strip()


def branch(contents: Contents, name: str) -> Files:
    return contents[KERNEL].files(name)


@dataclass
class Releases:
    """Checkouts, and what the Hub holds once they are published."""

    sources: Path  # the first v1
    changed_sources: Path  # v1 with other content
    second_sources: Path  # v2
    first: Contents
    changed: Contents  # v1 republished
    both: Contents  # the first v1 and v2


@pytest.fixture(scope="session")
def releases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("releases")
    first = checkout(folder / "first")
    changed, second = folder / "changed", folder / "second"
    for source, momentum in ((changed, "0.5"), (second, "0.8")):
        subprocess.run(["git", "clone", "--quiet", first, source], check=True)
        package = source / "torch-ext" / "optimizer"
        for module in package.rglob("*.py"):
            module.write_text(f"{module.read_text()}\nRELEASE = {source.name!r}\n")
        text = (package / "muon.py").read_text()
        default = "momentum: float = 0.95,"
        assert text.count(default) == 1
        (package / "muon.py").write_text(text.replace(default, f"momentum: float = {momentum},"))
    config = (second / "build.toml").read_text()
    (second / "build.toml").write_text(config.replace("version = 1", "version = 2"))
    with (changed / "CARD.md").open("a") as card:
        card.write("Changed.\n")
    (changed / "benchmarks" / "tune.py").unlink()
    for source in (changed, second):
        commit(source)

    contents = []
    with Hub() as hub:
        client = Client(hub.url, folder / "home")
        for source in (first, changed, second):
            if source is second:
                hub.repositories = copy.deepcopy(contents[0])
            client.publish(source)
            contents.append(hub.contents())
    return Releases(first, changed, second, *contents)


@pytest.fixture
def hub(releases):
    with Hub() as hub:
        hub.repositories = copy.deepcopy(releases.first)
        yield hub


@pytest.fixture
def client(hub, tmp_path):
    return Client(hub.url, tmp_path / "home")
