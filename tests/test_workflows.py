"""The workflows of .github can't be run here: that they are well-formed and name what exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason=".github is not part of the sources")

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def parsed(path: Path) -> dict:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    workflow["on"] = workflow.pop(True)  # what YAML 1.1 takes `on` for
    return workflow


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


@each_workflow
def test_what_a_workflow_runs_exists(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(step["run"] for step in steps(parsed(path)) if "run" in step)
    assert subprocess.run(["bash", "-n"], input=commands, text=True).returncode == 0
    assert set(re.findall(r"^make ([\w-]+)", commands, re.MULTILINE)) <= targets
    for file in re.findall(r"(?:scripts|\.ci)/[\w./-]+", commands):
        assert (ROOT / file).is_file(), file
    if "scripts/publish.py" in commands:
        helped = [sys.executable, ROOT / "scripts" / "publish.py", "--help"]
        usage = subprocess.run(helped, check=True, capture_output=True, text=True).stdout
        for line in re.findall(r"scripts/publish\.py(.*)", commands):
            assert set(re.findall(r"--[a-z-]+", line)) <= set(re.findall(r"--[a-z-]+", usage))


@each_workflow
def test_actions_of_others_are_pinned_to_a_commit(path):
    workflow = parsed(path)
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
    for called in (job["uses"] for job in workflow["jobs"].values() if "uses" in job):
        assert (ROOT / called).is_file(), called
    assert workflow["permissions"] == {"contents": "read"}


def test_a_tag_publishes_once_tests_and_builder_agree_and_only_that_step_has_the_token():
    workflow = parsed(ROOT / ".github" / "workflows" / "publish.yml")
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    assert workflow["jobs"]["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert workflow["jobs"]["publish"]["needs"] == "tests"
    assert "workflow_call" in parsed(ROOT / ".github" / "workflows" / "tests.yml")["on"]
    *earlier, last = steps(workflow)
    assert "secrets." not in str(earlier) and "HF_TOKEN" in last["env"]
    assert '--tag "$GITHUB_REF_NAME"' in last["run"] and "--same-as" in last["run"]
    assert [
        step["run"]
        for step in steps(parsed(ROOT / ".github" / "workflows" / "tests.yml"))
        if "run" in step
    ] == [".ci/run"]
