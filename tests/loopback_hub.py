"""A Hub for kernel repositories on 127.0.0.1, and processes that publish to it and load from it.

It answers what `kernels` 0.17.2 and `huggingface_hub` 2.4 ask for (neither brings a server of its
own), and fails where a test asks it to. `HF_ENDPOINT` is read when the clients are imported, so
they run in processes of their own.
"""

import base64
import copy
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from kernels.backends import _backend

from checkout import ROOT

PUBLISH = ROOT / "scripts" / "publish.py"
KERNEL = "org/optimizer"
VARIANT = f"build/torch-{_backend().name}"

Files = dict[str, bytes]

# -- the Hub ---------------------------------------------------------------------------------------


@dataclass
class Repository:
    """A branch is the name of a commit, a commit all of its files."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)

    def commit(self, branch: str, files: Files) -> str:
        # The Hub's commits differ by their time, too; here by their number.
        content = repr((len(self.commits), branch, sorted(files.items())))
        oid = hashlib.sha1(content.encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        return oid

    def files(self, branch: str) -> Files:
        return self.commits[self.branches[branch]]


Contents = dict[str, Repository]


@dataclass
class Fault:
    """What goes wrong with the next request whose "METHOD /path" matches `pattern`.

    `meanwhile` runs first. `status` answers with that error; `drop` closes the connection in place
    of serving the request, `cut` in the middle of the answer.
    """

    pattern: str
    status: int = 0
    drop: bool = False
    cut: bool = False
    meanwhile: Callable[["Hub"], object] = lambda hub: None


class Error(Exception):
    def __init__(self, status: int, code: str = "", **body: str):
        self.status, self.code, self.body = status, code, {"error": code, **body}


class Hub:
    """The server. `url` is its HF_ENDPOINT, `requests` the log of what it was asked for."""

    def __init__(self, repositories: Contents) -> None:
        self.repositories = copy.deepcopy(repositories)
        self.faults: list[Fault] = []
        self.corrupted: Files = {}  # what GET sends at these paths; HEAD stays true
        self.requests: list[str] = []
        self.lock = threading.Lock()

    def __enter__(self) -> "Hub":
        handler = type("Handler", (RequestHandler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fault_of(self, request: str) -> Fault:
        with self.lock:
            self.requests.append(request)
            met = [fault for fault in self.faults if re.search(fault.pattern, request)]
            for fault in met[:1]:
                self.faults.remove(fault)
            return met[0] if met else Fault("")


class RequestHandler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.url = urlsplit(self.path)
        fault = self.hub.fault_of(f"{self.command} {unquote(self.url.path)}")
        self.close_connection |= fault.drop or fault.cut
        status, headers = 200, {}
        try:
            fault.meanwhile(self.hub)
            if fault.status:
                raise Error(fault.status)
            if fault.drop:
                return
            with self.hub.lock:
                answer = self.answer()
        except Error as error:
            status, headers, answer = error.status, {"X-Error-Code": error.code}, error.body
        if isinstance(answer, tuple):
            headers, content = answer
        else:
            content = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if fault.cut else content)

    do_GET = do_HEAD = do_POST = serve

    def answer(self) -> Any:
        """JSON, or the headers and bytes of a file."""
        match [unquote(part) for part in self.url.path.strip("/").split("/")]:
            case ["kernels", owner, name, "resolve", revision, *path]:
                return self.file(f"{owner}/{name}", revision, "/".join(path))
            case ["api", "kernels", owner, name, *what]:
                return self.about(f"{owner}/{name}", *what)
            case ["api", "organizations", name, "overview"]:
                known = {"name": name, "fullname": name, "avatarUrl": ""}
                return {**known, "trustedKernelPublisher": False}
            case ["api", "repos", "create"]:
                return self.create(json.loads(self.body))
            case ["api", "validate-yaml"]:
                if json.loads(self.body)["content"].startswith("---\n"):
                    return {"errors": [], "warnings": []}
                raise Error(400)
        raise Error(404)

    def repository(self, name: str) -> Repository:
        if name not in self.hub.repositories:
            raise Error(401, "RepoNotFound")
        return self.hub.repositories[name]

    def files(self, name: str, revision: str) -> tuple[str, Files]:
        """The commit that `revision` names, and its files."""
        repository, revision = self.repository(name), revision.removeprefix("refs/heads/")
        oid = repository.branches.get(revision, revision)
        if oid not in repository.commits:
            raise Error(404, "RevisionNotFound")
        return oid, repository.commits[oid]

    def file(self, name: str, revision: str, path: str) -> tuple[dict[str, str], bytes]:
        oid, files = self.files(name, revision)
        if path not in files:
            raise Error(404, "EntryNotFound")
        sent = files if self.command == "HEAD" else {**files, **self.hub.corrupted}
        return {"ETag": f'"{blob_oid(files[path])}"', "X-Repo-Commit": oid}, sent[path]

    def create(self, asked: dict[str, str]) -> dict:
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.hub.url}/kernels/{name}"
        if name in self.hub.repositories:
            raise Error(409, url=url)
        repository = Repository(private=asked.get("visibility") == "private")
        repository.commit("main", {".gitattributes": b""})
        self.hub.repositories[name] = repository
        return {"url": url}

    def about(self, name: str, what: str = "revision", revision: str = "main", *path: str) -> Any:
        repository = self.repository(name)
        if what == "refs":
            branches = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": oid}
                for branch, oid in repository.branches.items()
            ]
            return {"tags": [], "converts": [], "branches": branches}
        if what == "branch":
            repository.branches[revision] = repository.branches["main"]
            return {}
        oid, files = self.files(name, revision)
        if what == "revision":
            return {"id": name, "sha": oid, "private": repository.private}
        if what == "tree":
            return self.tree(files, "".join(f"{part}/" for part in path))
        if what == "preupload":
            asked = [file["path"] for file in json.loads(self.body)["files"]]
            known = {path: {"oid": blob_oid(files[path])} for path in asked if path in files}
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": path, **how, **known.get(path, {})} for path in asked]}
        assert what == "commit"
        files = dict(files)
        for entry in map(json.loads, self.body.splitlines()):
            key, value = entry["key"], entry["value"]
            if key == "header" and value.get("parentCommit", oid) != oid:
                raise Error(412)
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                del files[value["path"]]
        oid = repository.commit(revision, files)
        return {"commitOid": oid, "commitUrl": f"{self.hub.url}/kernels/{name}/commit/{oid}"}

    def tree(self, files: Files, prefix: str) -> list[dict]:
        inside = sorted(path for path in files if path.startswith(prefix))
        if "recursive=true" in self.url.query:
            sizes = {
                path: {"size": len(files[path]), "oid": blob_oid(files[path])} for path in inside
            }
            return [{"type": "file", "path": path, **sizes[path]} for path in inside]
        if not inside:
            raise Error(404, "EntryNotFound")
        # Only folders are asked for that hold nothing but folders.
        folders = dict.fromkeys(prefix + path[len(prefix) :].split("/")[0] for path in inside)
        return [{"type": "directory", "path": folder, "size": 0, "oid": ""} for folder in folders]


def blob_oid(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


# -- its clients -----------------------------------------------------------------------------------

PRELUDE = '''
import hashlib, json, os, sys
from pathlib import Path

import torch
from kernels import get_kernel, get_local_kernel

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
    optim = optimizer.Muon(optimizer.get_default_muon_param_groups(model), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    return hashlib.sha256(weights).hexdigest()

def show(*values):
    print(json.dumps(values))
'''


@dataclass
class Client:
    """A machine: its HF_HOME, and the Hub that it reaches."""

    url: str
    home: Path

    def start(self, *command: object, **variables: str) -> "subprocess.Popen[str]":
        # Nothing of the tests' own Hub settings, above all not the build under test.
        foreign = ("HF_", "LOCAL_KERNELS", "KERNELS_", "GIT_", "DO_NOT_TRACK")
        kept = {name: os.environ[name] for name in os.environ if not name.startswith(foreign)}
        reached = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "NO_PROXY": "127.0.0.1"}
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
        program, *arguments = map(str, command)
        return subprocess.Popen(
            [str(Path(sys.executable).parent / program), *arguments],
            env={**kept, **reached, **quiet, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Jobs in the background are started deaf to interrupts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *command: object, **variables: str) -> str:
        """What a command of the environment prints."""
        done = self.start(*command, **variables)
        out, err = done.communicate()
        assert done.returncode == 0, err
        return out

    def python(self, code: str, **variables: str) -> Any:
        """What `code` shows last."""
        printed = self.run(sys.executable, "-c", PRELUDE + code, **variables)
        return json.loads(printed.splitlines()[-1])

    def publishing(self, source: Path, *options: object) -> "subprocess.Popen[str]":
        command = (sys.executable, PUBLISH, "--source", source, *options)
        return self.start(*command, HF_TOKEN="writer")

    def publish(self, source: Path, *options: object) -> tuple[str, str]:
        done = self.publishing(source, *options)
        out, err = done.communicate()
        assert done.returncode == 0, err
        return out, err

    def refused(self, source: Path, *options: object) -> str:
        """What publishing says that does not happen: one line, no traceback."""
        done = self.publishing(source, *options)
        _, told = done.communicate()
        assert done.returncode == 1 and told.startswith("publish ") and told.count("\n") == 1, told
        return told


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


CHANGES = {
    "torch-ext/optimizer/muon.py": ("momentum: float = 0.95,", "momentum: float = 0.59,"),
    "CARD.md": ("# ", "# Changed: "),
}


@dataclass
class Releases:
    """Checkouts, and what the Hub holds once they are published."""

    sources: Path  # the first v1
    changed_sources: Path  # v1 with other content
    first: Contents
    changed: Contents  # v1 republished


@pytest.fixture(scope="session")
def releases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("releases")
    first, changed = folder / "first", folder / "changed"
    for name in ("torch-ext", "benchmarks"):
        shutil.copytree(ROOT / name, first / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "build.toml", "CARD.md"):
        shutil.copy(ROOT / name, first)
    git(first, "init", "--quiet")
    commit(first)
    subprocess.run(["git", "clone", "--quiet", first, changed], check=True)
    for file, (old, new) in CHANGES.items():
        text = (changed / file).read_text()
        assert old in text
        (changed / file).write_text(text.replace(old, new, 1))
    (changed / "benchmarks" / "tune.py").unlink()
    commit(changed)
    contents: list[Contents] = []
    for source in (first, changed):
        with Hub(contents[0] if contents else {}) as hub:
            Client(hub.url, folder / "home").publish(source)
            contents.append(hub.repositories)
    return Releases(first, changed, *contents)


@pytest.fixture
def hub(releases):
    with Hub(releases.first) as hub:
        yield hub


@pytest.fixture
def client(hub, tmp_path):
    return Client(hub.url, tmp_path / "home")
