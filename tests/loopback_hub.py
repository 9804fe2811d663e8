"""A Hub for kernel repositories on 127.0.0.1: repositories, branches, commits and files in memory.

It answers what `kernels` 0.17.2 and `huggingface_hub` 2.4 ask for when they publish, load, lock and
download kernels, and fails where a test asks it to. `HF_ENDPOINT` is read when the clients are
imported, so they run in processes of their own.
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

    def files(self, revision: str) -> Files:
        return self.commits[self.branches.get(revision, revision)]


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD /path" matches `pattern`.

    `meanwhile` runs first. `status` answers with that error; `drop` closes the connection in place
    of an answer, after the request was served if `served`; `cut` does so after half of the body.
    """

    pattern: str
    status: int = 0
    message: str = ""
    drop: bool = False
    served: bool = False
    cut: bool = False
    meanwhile: Callable[[], object] | None = None
    times: int = 1


class Error(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", **body: str):
        self.status, self.code, self.message = status, code, message
        self.body = {"error": message, **body}


class Hub:
    """The server. `url` is its HF_ENDPOINT, `requests` the log of what it was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.trusted: set[str] = set()
        # Rights of tokens: "write" to repositories that exist, "create" new ones.
        self.tokens: dict[str, set[str]] = {"writer": {"write", "create"}}
        self.faults: list[Fault] = []
        self.corrupted: Files = {}  # what GET sends at these paths; HEAD stays true
        self.requests: list[str] = []
        self.lock = threading.Lock()

    def __enter__(self) -> "Hub":
        hub = self

        class Handler(RequestHandler):
            def __init__(self, *args: Any) -> None:
                self.hub = hub
                super().__init__(*args)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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

    def fault_of(self, request: str) -> Fault | None:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None

    def repository(self, name: str, token: str | None) -> Repository:
        repository = self.repositories.get(name)
        if repository is None or (repository.private and token not in self.tokens):
            raise Error(401 if token is None else 404, "RepoNotFound", "Repository not found")
        return repository

    def require(self, right: str, token: str | None, message: str) -> None:
        if token not in self.tokens:
            raise Error(401, message="Invalid username or password.")
        if right not in self.tokens[token]:
            raise Error(403, message=message)


class RequestHandler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.serve()

    def do_HEAD(self) -> None:
        self.serve()

    def do_POST(self) -> None:
        self.serve()

    def serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        fault = self.hub.fault_of(f"{self.command} {unquote(url.path)}")
        try:
            if fault and fault.meanwhile:
                fault.meanwhile()
            if fault and fault.status:
                raise Error(fault.status, message=fault.message)
            if fault and fault.drop and not fault.served:
                return self.drop()
            with self.hub.lock:
                status, headers, content = self.route(url.path)
            if fault and fault.drop:
                return self.drop()
        except Error as error:
            content = json.dumps(error.body).encode()
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            status, fault = error.status, None
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return None
        if fault and fault.cut:
            self.wfile.write(content[: len(content) // 2])
            return self.drop()
        self.wfile.write(content)
        return None

    def drop(self) -> None:
        self.close_connection = True

    def route(self, path: str) -> tuple[int, dict[str, str], bytes]:
        for pattern, answer in ROUTES.items():
            method, _, expression = pattern.partition(" ")
            match = re.fullmatch(expression, path)
            if match and (self.command == method or (self.command, method) == ("HEAD", "GET")):
                answered = answer(self, *map(unquote, match.groups()))
                if isinstance(answered, tuple):
                    return answered
                content = json.dumps({} if answered is None else answered).encode()
                status = 201 if answered is None else 200
                return status, {"Content-Type": "application/json"}, content
        raise Error(404, message=f"no such address: {path}")

    def files(self, name: str, revision: str) -> tuple[str, Files]:
        """The commit that `revision` names, and its files."""
        repository = self.hub.repository(name, self.token)
        revision = revision.removeprefix("refs/heads/")
        oid = repository.branches.get(revision, revision)
        if oid not in repository.commits:
            raise Error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid, repository.commits[oid]

    def organization(self, name: str) -> dict:
        trusted = name in self.hub.trusted
        names = {"name": name, "fullname": name, "avatarUrl": ""}
        return {**names, "trustedKernelPublisher": trusted}

    def information(self, name: str, revision: str = "main") -> dict:
        oid, _ = self.files(name, revision)
        return {"id": name, "sha": oid, "private": self.hub.repositories[name].private}

    def references(self, name: str) -> dict:
        branches = self.hub.repository(name, self.token).branches
        return {
            "tags": [],
            "converts": [],
            "branches": [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": oid}
                for branch, oid in branches.items()
            ],
        }

    def tree(self, name: str, revision: str, folder: str = "") -> list[dict]:
        _, files = self.files(name, revision)
        prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        inside = {path: files[path] for path in files if path.startswith(prefix)}
        if prefix and not inside:
            raise Error(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        if self.query.get("recursive") == ["true"]:
            return [file_entry(path, content) for path, content in sorted(inside.items())]
        entries: dict[str, dict] = {}
        for path, content in sorted(inside.items()):
            child, slash, _ = path.removeprefix(prefix).partition("/")
            folder_entry = {"type": "directory", "path": prefix + child, "size": 0, "oid": "0" * 40}
            entries[child] = folder_entry if slash else file_entry(path, content)
        return list(entries.values())

    def resolve(self, name: str, revision: str, path: str) -> tuple[int, dict[str, str], bytes]:
        oid, files = self.files(name, revision)
        if path not in files:
            raise Error(404, "EntryNotFound", f"{path} does not exist on {revision}")
        content = files[path]
        if self.command == "GET":
            content = self.hub.corrupted.get(path, content)
        return 200, {"ETag": f'"{blob_oid(files[path])}"', "X-Repo-Commit": oid}, content

    def create(self) -> dict:
        asked = json.loads(self.body)
        owner = asked["organization"]
        name = f"{owner}/{asked['name']}"
        self.hub.require("create", self.token, f"You can't create a kernel under {owner}")
        url = f"{self.hub.url}/kernels/{name}"
        if name in self.hub.repositories:
            raise Error(409, message="You already created this kernel repo", url=url)
        repository = Repository(private=asked.get("visibility") == "private")
        repository.commit("main", {".gitattributes": b""})
        self.hub.repositories[name] = repository
        return {"url": url}

    def create_branch(self, name: str, branch: str) -> None:
        repository = self.hub.repository(name, self.token)
        self.hub.require("write", self.token, "You have no write access to this repository")
        if branch in repository.branches:
            raise Error(409, message=f"Reference already exists: {branch}")
        repository.branches[branch] = repository.branches["main"]

    def preupload(self, name: str, branch: str) -> dict:
        _, files = self.files(name, branch)
        self.hub.require("write", self.token, "You have no write access to this repository")
        answers = []
        for file in json.loads(self.body)["files"]:
            known = {"oid": blob_oid(files[file["path"]])} if file["path"] in files else {}
            regular = {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
            answers.append({**regular, **known})
        return {"files": answers}

    def commit(self, name: str, branch: str) -> dict:
        parent, files = self.files(name, branch)
        self.hub.require("write", self.token, "You have no write access to this repository")
        files = dict(files)
        for line in self.body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                if value.get("parentCommit", parent) != parent:
                    raise Error(412, message="A commit has happened since. Please refresh.")
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile" and files.pop(value["path"], None) is None:
                raise Error(404, "EntryNotFound", f"{value['path']} does not exist")
        oid = self.hub.repositories[name].commit(branch, files)
        url = f"{self.hub.url}/kernels/{name}/commit/{oid}"
        return {"commitOid": oid, "commitUrl": url}

    def validate_yaml(self) -> dict:
        if not json.loads(self.body)["content"].startswith("---\n"):
            raise Error(400, message="README.md has no metadata")
        return {"errors": [], "warnings": []}


def blob_oid(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_entry(path: str, content: bytes) -> dict:
    return {"type": "file", "path": path, "size": len(content), "oid": blob_oid(content)}


NAME = "([^/]+/[^/]+)"
ROUTES: dict[str, Callable[..., Any]] = {
    "GET /api/organizations/([^/]+)/overview": RequestHandler.organization,
    f"GET /api/kernels/{NAME}": RequestHandler.information,
    f"GET /api/kernels/{NAME}/revision/([^/]+)": RequestHandler.information,
    f"GET /api/kernels/{NAME}/refs": RequestHandler.references,
    f"GET /api/kernels/{NAME}/tree/([^/]+)": RequestHandler.tree,
    f"GET /api/kernels/{NAME}/tree/([^/]+)/(.+)": RequestHandler.tree,
    f"GET /kernels/{NAME}/resolve/([^/]+)/(.+)": RequestHandler.resolve,
    "POST /api/repos/create": RequestHandler.create,
    f"POST /api/kernels/{NAME}/branch/([^/]+)": RequestHandler.create_branch,
    f"POST /api/kernels/{NAME}/preupload/([^/]+)": RequestHandler.preupload,
    f"POST /api/kernels/{NAME}/commit/([^/]+)": RequestHandler.commit,
    "POST /api/validate-yaml": RequestHandler.validate_yaml,
}
