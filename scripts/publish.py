"""Publish the kernel: what `get_kernel` loads to the branch of its version, the card to main.

Each branch gets one commit, the kernel's first: whatever interrupts it, the Hub serves the old
version or the new one, and running it again does what is left.
"""

import argparse
import ast
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import logging
from jinja2 import StrictUndefined, Template, TemplateError
from kernels._rust import Digest, DigestValidationError, Metadata

from build import build, export_commit, read_config, require_committed

Files = Mapping[str, Path | bytes]  # path in the repository -> what is uploaded there

BRANCH_OWNS = ("build/", "benchmarks/")  # of a version's branch: all else there is left alone

HINTS = {
    401: "the Hub does not know you: `hf auth login`, or set HF_TOKEN to a token with write access",
    403: "this token may not write there: it needs write access to the repository",
    404: "there is no such repository or branch, or this token may not see it",
    409: "somebody else is publishing, or has in between: look at what is there, then run it again",
    412: "somebody else has published in between: look at what is there, then run it again",
    429: "too many requests: wait, then run it again",
}
MAY_NOT_CREATE = (
    "it does not exist, and this token may not create it: its owner needs the Hub's leave to have "
    "kernel repositories, and the token the right to write for that owner"
)
EXISTS = "it exists already, as public or private as it is: leave --private out to publish to it"


class Refused(Exception):
    """What is wrong and what to do about it, in a line."""


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=root, help="directory of build.toml")
    parser.add_argument("--repo-id", help="owner/name (default: the one in build.toml)")
    parser.add_argument("--private", action="store_true", help="create it for members only")
    parser.add_argument(
        "--tag", help="refuse unless this git tag is one of the version's: v1, v1.2"
    )
    parser.add_argument("--repository", help="refuse unless this URL is the source in build.toml")
    parser.add_argument(
        "--same-as", type=Path, help="refuse unless the variants there hold the same"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go where")
    args = parser.parse_args()
    logging.set_verbosity_error()  # what matters is said here
    try:
        publish(args)
    except Refused as refusal:
        raise SystemExit(f"publish failed: {refusal}") from None
    except KeyboardInterrupt:
        raise SystemExit("publish interrupted: run it again to complete it") from None


def publish(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="optimizer-release-") as folder:
        with refusing("cannot build", OSError, ValueError, DigestValidationError, TemplateError):
            source, variants = Path(folder, "source"), Path(folder, "variants")
            commit = export_commit(args.source, source)
            config = read_config(source)
            version = f"v{config['general']['version']}"
            if args.tag and not re.fullmatch(rf"{version}(\.\d+)*", args.tag):
                raise ValueError(f"tag {args.tag} is not of {version}, the version in build.toml")
            origin = config["general"].get("source")
            if args.repository and args.repository != origin:
                raise ValueError(f"{args.repository} is not {origin}, the source in build.toml")
            try:
                require_committed(args.source)
            except ValueError as error:
                if not args.dry_run:
                    raise
                print(f"would be refused: {error}", file=sys.stderr)
            build(source, variants, commit=commit)
            verify(variants, args.same_as)
            repo_id = args.repo_id or config["general"].get("hub", {}).get("repo-id")
            if not repo_id:
                raise ValueError("build.toml has no repo-id: name one by --repo-id")
            branches = {
                version: version_files(source, variants),
                "main": {"README.md": render_card(source, repo_id).encode()},
            }
        if args.dry_run:
            describe(repo_id, branches)
        else:
            upload(repo_id, branches, private=args.private)


def verify(folder: Path, other: Path | None = None) -> None:
    """Check variants against their digests and the files of those in `other`."""
    for variant in sorted(folder.iterdir()):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        if metadata.digest is None:
            raise ValueError(f"{variant.name} has no digest")
        algorithm = metadata.digest.algorithm
        metadata.digest.validate(Digest.hash_variant(algorithm, variant))
        if other is None or not (other / variant.name).exists():
            continue
        # Another builder adds files of its own, and names its build otherwise.
        theirs = Digest.hash_variant(algorithm, other / variant.name).files
        for path, digest in metadata.digest.files.items():
            if path != "_ops.py" and theirs.get(path) != digest:
                raise ValueError(f"{variant.name}/{path} is not the same in {other}")
    if other is not None and not any((other / path.name).exists() for path in folder.iterdir()):
        raise ValueError(f"no variant of this kernel is in {other}")


def version_files(source: Path, variants: Path) -> Files:
    """build/ and the benchmarks."""
    built = {
        f"build/{path.relative_to(variants).as_posix()}": path
        for path in sorted(variants.rglob("*"))
        if path.is_file()
    }
    return built | {
        f"benchmarks/{path.name}": path for path in sorted((source / "benchmarks").glob("*.py"))
    }


def render_card(source: Path, repo_id: str) -> str:
    """CARD.md with the variables that the Hub's builder gives it."""
    general = read_config(source)["general"]
    package = source / "torch-ext" / general["name"].replace("-", "_")
    template = Template(
        (source / "CARD.md").read_text(encoding="utf-8"),
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    return template.render(
        repo_id=repo_id,
        version=general["version"],
        functions=exported_names(package / "__init__.py"),
        layers=None,
        has_benchmark=(source / "benchmarks" / "benchmark.py").exists(),
        upstream=general.get("upstream"),
        source=general.get("source"),
        license=general["license"].lower(),
    )


def exported_names(init: Path) -> list[str]:
    """`__all__`, without importing the package."""
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{init} has no __all__")


def describe(repo_id: str, branches: Mapping[str, Files]) -> None:
    for branch, files in branches.items():
        print(f"{constants.ENDPOINT}/kernels/{repo_id} branch {branch}, {len(files)} files:")
        for path, content in files.items():
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            print(f"  {path} ({size} bytes)")
        if branch != "main":
            print(f"  and deletes whatever else is in {' and '.join(BRANCH_OWNS)} there")


def upload(repo_id: str, branches: Mapping[str, Files], private: bool) -> None:
    api = HfApi()
    hints = {403: MAY_NOT_CREATE} | ({409: EXISTS} if private else {})
    with explaining(f"cannot create {repo_id}", hints):
        # One that exists keeps its visibility: publishing to it must not pass for private.
        api.create_repo(repo_id, repo_type="kernel", private=private or None, exist_ok=not private)
    for branch, files in branches.items():
        with explaining(f"cannot publish to {repo_id}, branch {branch}"):
            head = head_of(api, repo_id, branch)
            oid = commit(api, repo_id, branch, head, files)
            print(f"{branch}: {'unchanged' if oid == head else 'published'}, {oid}")


def head_of(api: HfApi, repo_id: str, branch: str) -> str:
    """The branch's last commit; creates the branch."""
    for _ in range(2):
        refs = api.list_repo_refs(repo_id, repo_type="kernel").branches
        if heads := [ref.target_commit for ref in refs if ref.name == branch]:
            return heads[0]
        api.create_branch(repo_id, branch=branch, repo_type="kernel", exist_ok=True)
    raise Refused(f"the Hub has not created branch {branch} of {repo_id}: run it again")


def commit(api: HfApi, repo_id: str, branch: str, head: str, files: Files) -> str:
    """Make `files` what the branch holds, in one commit on top of `head`; returns the last commit.

    `upload_folder` would divide large folders over several commits, and users would be served what
    is between them. Where nothing has changed, the client makes no commit.
    """
    there = api.list_repo_files(repo_id, revision=head, repo_type="kernel")
    vanished = [path for path in there if path.startswith(BRANCH_OWNS) and path not in files]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationDelete(path, is_folder=False) for path in vanished),
        *(CommitOperationAdd(path, content) for path, content in files.items()),
    ]
    done = api.create_commit(
        repo_id,
        operations,
        commit_message=f"Publish {branch}" if branch != "main" else "Publish the card",
        repo_type="kernel",
        revision=branch,
        parent_commit=head,
    )
    return done.oid


@contextmanager
def explaining(doing: str, hints: Mapping[int, str] | None = None) -> Iterator[None]:
    """Errors of the Hub and of the way to it, as what to do about them."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = {**HINTS, **(hints or {})}.get(status)
        if hint is None:
            hint = "the Hub is failing: run it again later" if status >= 500 else one_line(error)
        raise Refused(f"{doing}: {status}, {hint}") from error
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        hint = f"no connection to {constants.ENDPOINT} ({one_line(error)}): run it again"
        raise Refused(f"{doing}: {hint}") from error
    except ValueError as error:
        raise Refused(f"{doing}: {one_line(error)}") from error


@contextmanager
def refusing(doing: str, *errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise Refused(f"{doing}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    main()
