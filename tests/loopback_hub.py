"""A Hub for kernel repositories on 127.0.0.1: repositories, branches, commits and files in memory.

It answers what `kernels` 0.17.2 and `huggingface_hub` 2.4 ask for when they publish, load and
download kernels (neither brings a server of its own), and fails where a test asks it to.
`HF_ENDPOINT` is read when the clients are imported, so they run in processes of their own.
"""

import base64
import copy
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Repository:
    """What one repository holds. A branch is the name of a commit, a commit all of its files."""

    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)

    def commit(self, branch: str, files: Files) -> str:
        # The Hub's commits differ by their time, too; here by their number.
        content = repr((len(self.commits), branch, sorted(files.items())))
        oid = hashlib.sha1(content.encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def files(self, branch: str) -> Files:
        return self.commits[self.branches[branch]]


@dataclass
class Fault:
    """What goes wrong with the next request whose "METHOD /path" matches `pattern`.

    `meanwhile` runs first. `status` answers with that error; `drop` closes the connection in place
    of an answer, after the request was served if `served`; `cut` does so after half of the body.
    """

    pattern: str
    status: int = 0
    drop: bool = False
    served: bool = False
    cut: bool = False
    meanwhile: Callable[[], object] = lambda: None
    is_met: bool = False


class Error(Exception):
    def __init__(self, status: int, code: str = "", **body: str):
        self.status, self.code, self.body = status, code, {"error": code, **body}


class Hub:
    """The server. `url` is its HF_ENDPOINT, `requests` the log of what it was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        # Rights of tokens: "write" to repositories that exist, "create" new ones.
        self.tokens: dict[str, set[str]] = {"writer": {"write", "create"}}
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

    def contents(self) -> dict[str, Repository]:
        """A copy of all repositories, to compare with or to put back."""
        return copy.deepcopy(self.repositories)

    def fault_of(self, request: str) -> Fault:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if not fault.is_met and re.search(fault.pattern, request):
                    fault.is_met = True
                    return fault
        return Fault("")


class RequestHandler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        fault = self.hub.fault_of(f"{self.command} {unquote(url.path)}")
        self.close_connection |= fault.drop or fault.cut
        headers: dict[str, str] = {}
        try:
            fault.meanwhile()
            if fault.status:
                raise Error(fault.status)
            if fault.drop and not fault.served:
                return
            with self.hub.lock:
                status, headers, content = self.route(url.path)
            if fault.drop:
                return
        except Error as error:
            status, headers = error.status, {"X-Error-Code": error.code}
            content = json.dumps(error.body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if fault.cut else content)

    do_GET = do_HEAD = do_POST = serve

    def route(self, path: str) -> tuple[int, dict[str, str], bytes]:
        for pattern, answer in ROUTES.items():
            method, _, expression = pattern.partition(" ")
            match = re.fullmatch(expression, path)
            if match and (self.command == method or (self.command, method) == ("HEAD", "GET")):
                answered = answer(self, *map(unquote, match.groups()))
                if isinstance(answered, tuple):
                    return answered
                content = json.dumps({} if answered is None else answered).encode()
                return 201 if answered is None else 200, {}, content
        raise Error(404)

    def repository(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and self.token not in self.hub.tokens):
            raise Error(401 if self.token is None else 404, "RepoNotFound")
        return repository

    def require(self, right: str) -> None:
        if self.token not in self.hub.tokens:
            raise Error(401)
        if right not in self.hub.tokens[self.token]:
            raise Error(403)

    def files(self, name: str, revision: str) -> tuple[str, Files]:
        """The commit that `revision` names, and its files."""
        repository, revision = self.repository(name), revision.removeprefix("refs/heads/")
        oid = repository.branches.get(revision, revision)
        if oid not in repository.commits:
            raise Error(404, "RevisionNotFound")
        return oid, repository.commits[oid]

    def organization(self, name: str) -> dict:
        names = {"name": name, "fullname": name, "avatarUrl": ""}
        return {**names, "trustedKernelPublisher": False}

    def information(self, name: str, revision: str = "main") -> dict:
        oid, _ = self.files(name, revision)
        return {"id": name, "sha": oid, "private": self.repository(name).private}

    def references(self, name: str) -> dict:
        branches = [
            {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": oid}
            for branch, oid in self.repository(name).branches.items()
        ]
        return {"tags": [], "converts": [], "branches": branches}

    def tree(self, name: str, revision: str, folder: str = "") -> list[dict]:
        _, files = self.files(name, revision)
        prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        inside = {path: files[path] for path in sorted(files) if path.startswith(prefix)}
        if prefix and not inside:
            raise Error(404, "EntryNotFound")
        if self.query.get("recursive") == ["true"]:
            return [file_entry(path, content) for path, content in inside.items()]
        entries: dict[str, dict] = {}
        for path, content in inside.items():
            child, slash, _ = path.removeprefix(prefix).partition("/")
            folder_entry = {"type": "directory", "path": prefix + child, "size": 0, "oid": "0" * 40}
            entries[child] = folder_entry if slash else file_entry(path, content)
        return list(entries.values())

    def resolve(self, name: str, revision: str, path: str) -> tuple[int, dict[str, str], bytes]:
        oid, files = self.files(name, revision)
        if path not in files:
            raise Error(404, "EntryNotFound")
        content = files[path]
        if self.command == "GET":
            content = self.hub.corrupted.get(path, content)
        return 200, {"ETag": f'"{blob_oid(files[path])}"', "X-Repo-Commit": oid}, content

    def create(self) -> dict:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        self.require("create")
        url = f"{self.hub.url}/kernels/{name}"
        if name in self.hub.repositories:
            raise Error(409, url=url)
        repository = Repository(private=asked.get("visibility") == "private")
        repository.commit("main", {".gitattributes": b""})
        self.hub.repositories[name] = repository
        return {"url": url}

    def create_branch(self, name: str, branch: str) -> None:
        repository = self.repository(name)
        self.require("write")
        repository.branches[branch] = repository.branches["main"]

    def preupload(self, name: str, branch: str) -> dict:
        _, files = self.files(name, branch)
        self.require("write")
        answers = []
        for path in (file["path"] for file in json.loads(self.body)["files"]):
            known = {"oid": blob_oid(files[path])} if path in files else {}
            answers.append({"path": path, "uploadMode": "regular", "shouldIgnore": False, **known})
        return {"files": answers}

    def commit(self, name: str, branch: str) -> dict:
        parent, there = self.files(name, branch)
        self.require("write")
        files = dict(there)
        for entry in map(json.loads, self.body.splitlines()):
            key, value = entry["key"], entry["value"]
            if key == "header" and value.get("parentCommit", parent) != parent:
                raise Error(412)
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                del files[value["path"]]
        oid = self.repository(name).commit(branch, files)
        return {"commitOid": oid, "commitUrl": f"{self.hub.url}/kernels/{name}/commit/{oid}"}

    def validate_yaml(self) -> dict:
        if not json.loads(self.body)["content"].startswith("---\n"):
            raise Error(400)
        return {"errors": [], "warnings": []}


def blob_oid(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_entry(path: str, content: bytes) -> dict:
    return {"type": "file", "path": path, "size": len(content), "oid": blob_oid(content)}


KERNEL = "/api/kernels/([^/]+/[^/]+)"
ROUTES: dict[str, Callable[..., Any]] = {
    "GET /api/organizations/([^/]+)/overview": RequestHandler.organization,
    f"GET {KERNEL}": RequestHandler.information,
    f"GET {KERNEL}/revision/([^/]+)": RequestHandler.information,
    f"GET {KERNEL}/refs": RequestHandler.references,
    f"GET {KERNEL}/tree/([^/]+)": RequestHandler.tree,
    f"GET {KERNEL}/tree/([^/]+)/(.+)": RequestHandler.tree,
    "GET /kernels/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": RequestHandler.resolve,
    "POST /api/repos/create": RequestHandler.create,
    f"POST {KERNEL}/branch/([^/]+)": RequestHandler.create_branch,
    f"POST {KERNEL}/preupload/([^/]+)": RequestHandler.preupload,
    f"POST {KERNEL}/commit/([^/]+)": RequestHandler.commit,
    "POST /api/validate-yaml": RequestHandler.validate_yaml,
}
