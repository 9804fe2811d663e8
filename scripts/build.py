"""Build the kernel's Hub variants without Nix: build/torch-<backend>/ as `get_kernel` loads them.

The package is pure Python, so a variant is a copy of its files plus metadata.json. Parsing
build.toml and hashing are the `kernels` library's own.
"""

import argparse
import errno
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

OPS = '''\
import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    """Put an operator's name into this build's own namespace."""
    return f"{id}::{{op_name}}"
'''


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the kernel's Hub variants.")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--source", type=Path, default=root, help="directory of build.toml")
    parser.add_argument("--output", type=Path, help="where variants go (default: SOURCE/build)")
    parser.add_argument("--backend", action="append", help="build this one only; may be repeated")
    parser.add_argument(
        "--release", action="store_true", help="build the last commit; refuse changes since"
    )
    args = parser.parse_args()
    output = args.output or args.source / "build"
    try:
        if args.release:
            with tempfile.TemporaryDirectory(prefix="optimizer-release-") as folder:
                commit = export_commit(args.source, Path(folder))
                require_committed(args.source)
                ids = build(Path(folder), output, args.backend, commit)
        else:
            ids = build(args.source, output, args.backend)
    except (OSError, ValueError) as error:
        raise SystemExit(f"build failed: {error}") from error
    print(f"Built {', '.join(ids)} in {output}")


def build(
    source: Path, output: Path, backends: Sequence[str] | None = None, commit: str | None = None
) -> list[str]:
    """Build `backends` (default: all in build.toml) into `output`; returns the variants' ids.

    `commit` is the one that `source` was exported from, where `source` is no checkout itself.
    Each variant is staged next to its place and moved there when complete, so that a process that
    loads the kernel meanwhile sees the old build or the new one, never a part of either.
    """
    declared = [str(backend) for backend in Build.open(source).general.backends]
    if unknown := set(backends or ()) - set(declared):
        raise ValueError(f"backends {sorted(unknown)} are not in build.toml, which has {declared}")
    output.mkdir(parents=True, exist_ok=True)
    ids = []
    for backend in backends or declared:
        with tempfile.TemporaryDirectory(dir=output, prefix=".staging-") as staging:
            variant = Path(staging, f"torch-{backend}")
            ids.append(write_variant(source, variant, backend, commit))
            move_into_place(variant, output / variant.name)
    return ids


def read_config(source: Path) -> dict[str, Any]:
    return tomllib.loads((source / "build.toml").read_text(encoding="utf-8"))


def write_variant(source: Path, variant: Path, backend: str, commit: str | None) -> str:
    """Write the package's files, _ops.py if it is used, and metadata.json; returns the id."""
    config = read_config(source)
    general = config["general"]
    module = general["name"].replace("-", "_")
    copy_package(source / "torch-ext" / module, variant, config["torch-noarch"]["pyext"])
    git = {"commit": commit, "dirty": False} if commit else git_status(source)
    # The id is the module's name once loaded. Two builds that share one would mix their
    # submodules in a process that loads both, hence a hash of what is in the package.
    content = json.dumps(digests(variant), sort_keys=True)
    uid = hashlib.sha256(content.encode()).hexdigest()[:12]
    build_id = f"_{module}_{backend}_{uid}{'_dirty' if git and git['dirty'] else ''}"
    if uses_custom_ops(variant):
        (variant / "_ops.py").write_text(OPS.format(id=build_id), encoding="utf-8")

    metadata = {
        "name": general["name"],
        "id": build_id,
        "version": general["version"],
        "kernels-minver": "0.14.0",  # as the Hub's builder declares for this form of metadata
        "license": general["license"],
        **({"source": general["source"]} if "source" in general else {}),
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests(variant)},
        "provenance": {
            "kernel-builder": {"version": "none (scripts/build.py)"},  # the field is required
            **({"kernel": git} if git else {}),
        },
    }
    path = variant / "metadata.json"
    text = json.dumps(metadata, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")
    Metadata.read_from_file(path)  # raises where the loader would
    return build_id


def copy_package(package: Path, variant: Path, suffixes: Sequence[str]) -> None:
    """Copy the files that build.toml's `pyext` names; a variant holds the package's files flat."""
    if not (package / "__init__.py").is_file():
        raise FileNotFoundError(f"{package / '__init__.py'} does not exist")
    for file in sorted(package.rglob("*")):
        path = file.relative_to(package).as_posix()
        if file.is_file() and is_taken(path, suffixes):
            target = variant / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def is_taken(path: str, suffixes: Sequence[str]) -> bool:
    """True if a build includes this file of the package; the Hub's builder may leave an _ops.py."""
    return path != "_ops.py" and PurePosixPath(path).suffix.lstrip(".") in suffixes


def digests(variant: Path) -> dict[str, str]:
    """Relative path to base64 digest, of all files but metadata.json and bytecode."""
    return Digest.hash_variant(DigestAlgorithm.SHA256, variant).files


def git_status(source: Path) -> dict[str, object] | None:
    """Commit of the sources, and whether a build takes anything that is not in it.

    None outside a checkout or before its first commit.
    """
    commit = commit_of(source)
    return None if commit is None else {"commit": commit, "dirty": is_dirty(source, commit)}


def commit_of(source: Path) -> str | None:
    try:
        commit = git(source, "rev-parse", "HEAD").strip()
        # An unpacked release inside somebody else's checkout is not a part of it.
        return commit if committed_files(source, commit, "build.toml", "torch-ext") else None
    except (OSError, subprocess.CalledProcessError):
        return None


def is_dirty(source: Path, commit: str) -> bool:
    """True if a build of `source` differs from a build of the commit, in files or contents.

    Contents are compared, since `git status` passes over files that git ignores, and over those
    that it was told to take for unchanged.
    """
    config = read_config(source)
    folder = f"torch-ext/{config['general']['name'].replace('-', '_')}/"
    suffixes = config["torch-noarch"]["pyext"]

    def is_input(path: str) -> bool:
        in_package = path.startswith(folder) and is_taken(path.removeprefix(folder), suffixes)
        return in_package or path == "build.toml"

    files = [source / "build.toml", *(source / folder).rglob("*")]
    paths = [file.relative_to(source).as_posix() for file in files if file.is_file()]
    inputs = list(filter(is_input, paths))
    hashes = git(source, "hash-object", "--no-filters", "--", *inputs).split()
    committed = committed_files(source, commit, "build.toml", folder)
    blobs = {path: blob for path, (_, blob) in committed.items() if is_input(path)}
    return dict(zip(inputs, hashes, strict=True)) != blobs


def committed_files(source: Path, commit: str, *paths: str) -> dict[str, tuple[str, str]]:
    """Mode and blob of each file that the commit has under `paths`."""
    entries = git(source, "ls-tree", "-r", "-z", commit, "--", *paths).split("\0")[:-1]
    files = {}
    for entry in entries:
        description, path = entry.split("\t", 1)
        mode, _, blob = description.split()
        files[path] = (mode, blob)
    return files


def export_commit(source: Path, folder: Path) -> str:
    """Write the last commit's files that a release is made of to `folder`; returns the commit.

    Git's blobs are written, and no file of the work tree is opened: a link could lead to what must
    not be published, and git can be told to take a changed file for unchanged.
    """
    commit = commit_of(source)
    if commit is None:
        raise ValueError(f"{source} is in no commit of a git repository: commit it first")
    released = ["build.toml", "torch-ext", "benchmarks", "CARD.md"]
    for path, (mode, blob) in committed_files(source, commit, *released).items():
        if mode not in ("100644", "100755"):
            raise ValueError(f"{path} is a link or a submodule: a release holds files only")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("wb") as file:
            command = ["git", "-C", str(source), "cat-file", "blob", blob]
            subprocess.run(command, stdout=file, check=True)
    return commit


def require_committed(source: Path) -> None:
    """ValueError names what has changed since the last commit, which a release would not hold."""
    listed = git(source, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all")
    if changed := [entry[3:] for entry in listed.split("\0")[:-1]]:
        more = f" and {len(changed) - 10} more" if len(changed) > 10 else ""
        named = ", ".join(changed[:10]) + more
        raise ValueError(f"not in a commit, so commit, remove or stash it: {named}")


def git(source: Path, *arguments: str) -> str:
    command = ["git", "-C", str(source), *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout


def uses_custom_ops(variant: Path) -> bool:
    imports_ops = re.compile(r"^\s*from \.+_ops import", re.MULTILINE)
    files = (file.read_text(encoding="utf-8") for file in variant.rglob("*.py"))
    return any(map(imports_ops.search, files))


def move_into_place(variant: Path, target: Path) -> None:
    """Replace `target`. No single rename replaces a directory: the old one steps aside first."""
    while True:
        try:
            variant.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        # A parallel build may move it first, and may put its own there before the next turn.
        with suppress(FileNotFoundError):
            target.rename(tempfile.mkdtemp(dir=variant.parent, prefix="old-") + "/variant")


if __name__ == "__main__":
    main()
