"""The workflows of .github can't be run here: that they name what exists, and guard the token."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT
from loopback_hub import git

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PUBLISH = ROOT / ".github" / "workflows" / "publish.yml"

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason=".github is not part of the sources")


def parsed(path: Path) -> dict:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    workflow["on"] = workflow.pop(True)  # what YAML 1.1 takes `on` for
    return workflow


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_exists_and_gets_no_credentials(path):
    workflow = parsed(path)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(step["run"] for step in steps(workflow) if "run" in step)
    assert subprocess.run(["bash", "-n"], input=commands, text=True).returncode == 0
    assert set(re.findall(r"^make ([\w-]+)", commands, re.MULTILINE)) <= targets
    for file in re.findall(r"(?:scripts|\.ci|tests)/[\w./-]+|requirements[\w-]*\.txt", commands):
        assert (ROOT / file).is_file(), file
    options = (ROOT / "scripts" / "publish.py").read_text()
    for line in re.findall(r"scripts/publish\.py(.*)", commands):
        assert all(f'"{option}"' in options for option in re.findall(r"--[a-z-]+", line))
    actions = [step for step in steps(workflow) if "uses" in step]
    for step in actions:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
        is_checkout = step["uses"].startswith("actions/checkout@")
        assert not is_checkout or step["with"]["persist-credentials"] is False
    called = [job["uses"] for job in workflow["jobs"].values() if "uses" in job]
    assert actions and all((ROOT / file).is_file() for file in called)
    assert workflow["permissions"] == {"contents": "read"}


def test_the_token_is_on_a_job_that_only_compares_with_what_the_builder_built():
    workflow = parsed(PUBLISH)
    jobs = workflow["jobs"]
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    assert jobs["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert jobs["tests"]["needs"] == jobs["build"]["needs"] == "check"
    assert jobs["publish"]["needs"] == ["tests", "build"]
    assert [name for name in jobs if "secrets." in str(jobs[name])] == ["publish"]
    checkout, python, download, install, last = jobs["publish"]["steps"]
    assert "secrets." not in str([checkout, python, download, install])
    assert last["env"] == {"HF_TOKEN": "${{ secrets.HF_TOKEN }}"}
    (bundle,) = [step["with"] for step in jobs["build"]["steps"] if "upload" in str(step)]
    assert "actions/download-artifact" in download["uses"] and download["with"] == bundle
    (folder,) = re.findall(r"runner\.temp }}(/\w+)$", bundle["path"])
    assert install["run"].startswith("python -m pip install --require-hashes ")
    (publish,) = last["run"].splitlines()
    for option in ('--tag "$GITHUB_REF_NAME"', f'--same-as "$RUNNER_TEMP{folder}"'):
        assert option in publish


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


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_empties_no_folder_that_it_has_not_made(tmp_path):
    mine = tmp_path / "environment" / "mine"
    mine.parent.mkdir()
    mine.touch()
    link = tmp_path / "link"
    link.symlink_to(mine.parent)
    refused = "is not an environment that make created"
    for target, variable in (("build", "VENV"), ("test-clients", "CLIENTS")):
        for folder, why in (
            *((mine.parent, refused), (f"{link}/", refused), (tmp_path, refused), (mine, "")),
            *(("", "one word"), (f"{mine.parent} {tmp_path}/other", "one word")),
        ):
            command = ["make", target, f"{variable}={folder}", f"PYTHON={sys.executable}"]
            made = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
            assert made.returncode and why in made.stderr, folder
            assert mine.is_file(), folder
