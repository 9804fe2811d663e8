"""The workflows of .github can't be run here: that they are well-formed and name what exists."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT
from hub_clients import git

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PUBLISH, TESTS, GPU = (
    ROOT / ".github" / "workflows" / f"{name}.yml" for name in ("publish", "tests", "gpu")
)

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason=".github is not part of the sources")

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def parsed(path: Path) -> dict:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    workflow["on"] = workflow.pop(True)  # what YAML 1.1 takes `on` for
    return workflow


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def required(package: str) -> str:
    """The version of `package` in requirements.txt."""
    pins = (ROOT / "requirements.txt").read_text()
    return re.search(rf"^{package}(?:\[\w+\])?==(\S+)", pins, re.MULTILINE)[1]


@each_workflow
def test_what_a_workflow_runs_exists(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(step["run"] for step in steps(parsed(path)) if "run" in step)
    assert subprocess.run(["bash", "-n"], input=commands, text=True).returncode == 0
    assert set(re.findall(r"^make ([\w-]+)", commands, re.MULTILINE)) <= targets
    for file in re.findall(r"(?:scripts|\.ci|tests)/[\w./-]+|requirements[\w-]*\.txt", commands):
        assert (ROOT / file).is_file(), file
    if "scripts/publish.py" in commands:
        helped = [sys.executable, ROOT / "scripts" / "publish.py", "--help"]
        usage = subprocess.run(helped, check=True, capture_output=True, text=True).stdout
        for line in re.findall(r"scripts/publish\.py(.*)", commands):
            assert set(re.findall(r"--[a-z-]+", line)) <= set(re.findall(r"--[a-z-]+", usage))


@each_workflow
def test_no_checkout_leaves_credentials_to_the_commands_after_it(path):
    checkouts = [
        step for step in steps(parsed(path)) if step.get("uses", "").startswith("actions/checkout@")
    ]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@each_workflow
def test_actions_of_others_are_pinned_to_a_commit(path):
    workflow = parsed(path)
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
    for called in (job["uses"] for job in workflow["jobs"].values() if "uses" in job):
        assert (ROOT / called).is_file(), called
    assert workflow["permissions"] == {"contents": "read"}


def test_a_tag_publishes_once_tests_and_builder_agree():
    workflow = parsed(PUBLISH)
    jobs = workflow["jobs"]
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    assert jobs["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert "workflow_call" in parsed(TESTS)["on"]
    assert jobs["tests"]["needs"] == jobs["build"]["needs"] == "check"
    assert jobs["publish"]["needs"] == ["tests", "build"]
    assert '--tag "$GITHUB_REF_NAME"' in jobs["publish"]["steps"][-1]["run"]


def test_the_token_is_on_a_job_that_only_compares_with_what_the_builder_built():
    jobs = parsed(PUBLISH)["jobs"]
    assert [name for name in jobs if {"secrets", "environment"} & words(jobs[name])] == ["publish"]
    *earlier, last = jobs["publish"]["steps"]
    assert "secrets" not in words(earlier) and last["env"] == {
        "HF_TOKEN": "${{ secrets.HF_TOKEN }}"
    }
    actions = {step["uses"].split("@")[0]: step["with"] for step in earlier if "uses" in step}
    names = ("checkout", "setup-python", "download-artifact")
    assert actions.keys() == {f"actions/{name}" for name in names}
    (bundle,) = [step["with"] for step in jobs["build"]["steps"] if "upload" in str(step)]
    assert actions["actions/download-artifact"] == bundle
    (folder,) = re.findall(r"runner\.temp }}(/\w+)$", bundle["path"])
    (install,) = [step["run"] for step in earlier if "run" in step]
    assert install.startswith("python -m pip install --require-hashes ")
    (publish,) = last["run"].splitlines()
    assert publish.startswith("python scripts/publish.py ")
    assert publish.endswith(f'--same-as "$RUNNER_TEMP{folder}"')


def words(part: object) -> set[str]:
    return set(re.findall(r"\w+", str(part)))


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_commit_that_is_not_one_of_main_is_not_published(tmp_path):
    checkout, refuse, *_ = parsed(PUBLISH)["jobs"]["check"]["steps"]
    assert checkout["with"]["fetch-depth"] == 0
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    git(tmp_path, "init", "--quiet", "--initial-branch", "main", str(origin))
    for message in ("first", "second"):
        git(origin, "commit", "--quiet", "--allow-empty", "-m", message)
    git(origin, "switch", "--quiet", "--create", "branch", "main~1")
    git(origin, "commit", "--quiet", "--allow-empty", "-m", "not reviewed")
    git(origin, "tag", "v1")
    git(tmp_path, "clone", "--quiet", str(origin), str(clone))
    allowed = {}
    for commit in ("origin/main", "origin/main~1", "v1"):
        git(clone, "checkout", "--quiet", "--detach", commit)
        allowed[commit] = not subprocess.run(["bash", "-ec", refuse["run"]], cwd=clone).returncode
    assert allowed == {"origin/main": True, "origin/main~1": True, "v1": False}


def test_what_is_installed_beside_the_token_has_hashes_and_the_tested_versions():
    text = (ROOT / "requirements-publish.txt").read_text()
    packages = [line for line in text.splitlines() if not line.startswith("#")]
    hashed = r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}"
    pinned = dict(re.fullmatch(hashed, package).groups() for package in packages)
    for name in ("kernels", "huggingface_hub"):
        assert pinned[name] == required(name)


def test_the_builder_is_pinned_to_a_commit_and_locked_at_it():
    flake = (ROOT / "flake.nix").read_text()
    (builder,) = re.findall(r'\.url = "(.*)"', flake)
    rev = re.fullmatch("github:huggingface/kernels/([0-9a-f]{40})", builder)[1]
    nodes = json.loads((ROOT / "flake.lock").read_text())["nodes"]
    assert nodes["kernel-builder"]["locked"]["rev"] == rev
    assert all("narHash" in node["locked"] for name, node in nodes.items() if name != "root")
    # With a lock that Nix would have to write, the builder is not told the kernel's commit.
    commands = [step["run"] for step in steps(parsed(PUBLISH)) if "run" in step]
    invoked = re.findall(r"\bnix (?:build|eval|run) .*", "\n".join(commands))
    assert invoked and all("--no-write-lock-file" in command for command in invoked)


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_empties_no_folder_that_it_has_not_made(tmp_path):
    mine = tmp_path / "environment" / "mine"
    mine.parent.mkdir()
    mine.touch()
    link = tmp_path / "link"
    link.symlink_to(mine.parent)
    refused = "is no environment that make has made"
    for target, variable in (("build", "VENV"), ("test-clients", "CLIENTS")):
        for folder, why in (
            *((mine.parent, refused), (f"{link}/", refused), (tmp_path, refused), (mine, "")),
            *(("", "one word"), (f"{mine.parent} {tmp_path}/other", "one word")),
        ):
            command = ["make", target, f"{variable}={folder}", f"PYTHON={sys.executable}"]
            made = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
            assert made.returncode and why in made.stderr, folder
            assert mine.is_file(), folder
