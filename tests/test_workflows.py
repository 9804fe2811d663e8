"""The workflows of .github can't be run here: that they are well-formed and name what exists."""

import json
import os
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


ENDS = {
    "there": ("nix", {}, (True, "")),
    "installed": ("apt-get", {"CI": "true"}, (True, "update install")),
    "not installed": ("", {}, (True, "could not be installed")),
    "not installed, on a runner": ("", {"CI": "true"}, (False, "could not be installed")),
}


@pytest.mark.parametrize(("present", "environment", "end"), ENDS.values(), ids=ENDS)
def test_ci_installs_nix_where_it_is_absent_and_says_so_where_it_cannot(
    tmp_path, present, environment, end
):
    scripts = {
        "make": 'echo "make $*"',
        "sudo": 'shift; exec "$@"',
        "nix": "",
        "apt-get": f'echo "$1" >&2; [ "$1" = update ] || cp {tmp_path}/make {tmp_path}/nix',
    }
    for name in {"make", "sudo", present} - {""}:
        (tmp_path / name).write_text(f"#!/bin/sh\n{scripts[name]}\n")
        (tmp_path / name).chmod(0o755)
    for tool in ("bash", "cp", "date", "dirname", "id", "sh"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    environment = {"PATH": str(tmp_path), **environment}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True)
    goes_on, said = end
    assert done.stdout == ("make test SLOW=1 ARGS=-rs\nmake test-clients\n" if goes_on else "")
    assert (done.returncode == 0) == goes_on
    assert said in " ".join(done.stderr.split()) and bool(said) == bool(done.stderr)


def test_a_run_that_takes_too_long_leaves_slow_tests_out_and_names_them():
    slow = "test_docs.py::test_distances_at_small_gradients_are_those_that_are_documented"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    command += ["tests/test_docs.py"]
    environment = {**os.environ, "SLOW_UNTIL": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert f"no time was left for tests/{slow}" in done.stdout
    assert re.search(r"^[1-9]\d* passed, 1 skipped", done.stdout, re.MULTILINE), done.stdout


def test_all_tests_run_with_the_pinned_torch_and_quick_ones_with_the_oldest_and_the_newest():
    jobs = parsed(TESTS)["jobs"]
    assert [step["run"] for step in jobs["ci"]["steps"] if "run" in step] == [".ci/run"]
    other = jobs["other-torch"]
    oldest, newest = other["strategy"]["matrix"]["torch"]
    named = re.search(r"for torch (\S+) and newer", (ROOT / "README.md").read_text())[1]
    assert oldest.startswith(f"{named}.")
    for step in (step for step in other["steps"] if "run" in step):
        assert "make test TORCH=${{ matrix.torch }} ARGS=" in step["run"]
    releases = [tuple(map(int, t.split("."))) for t in (oldest, required("torch"), newest)]
    assert releases == sorted(releases)


def test_a_gpu_is_used_only_where_somebody_names_a_runner_and_its_report_is_kept():
    workflow = parsed(GPU)
    assert list(workflow["on"]) == ["workflow_dispatch"]
    assert workflow["on"]["workflow_dispatch"]["inputs"]["runner"]["required"]
    (job,) = workflow["jobs"].values()
    assert job["runs-on"] == "${{ inputs.runner }}"
    (run,) = [step for step in job["steps"] if "run" in step]
    # By a variable: what is typed into a form is no part of the script.
    assert run["run"] == 'make gpu ARGS="$ARGUMENTS"' and list(run["env"]) == ["ARGUMENTS"]
    upload = job["steps"][-1]
    assert upload["if"] == "always()" and "runs/gpu" in upload["with"]["path"].split()


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_builds_what_it_proves_on_a_gpu():
    command = ["make", "gpu", "--no-print-directory", "-nB", "ARGS=--full"]
    made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    *_, build, prove = made.splitlines()
    assert build.endswith("python scripts/build.py")
    assert prove.endswith("python scripts/gpu_report.py --full")


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("target", ["gpu", "train", "bench", "test"])
def test_make_takes_the_python_at_hand_and_installs_nothing(target):
    command = ["make", target, "--no-print-directory", "-nB", "HERE=1", "PYTHON=some-python"]
    made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "pip" not in made and ".venv" not in made
    assert "some-python" in made


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


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_an_environment_that_make_has_begun_is_begun_again(tmp_path):
    folder = tmp_path / "environment"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "half").touch()
    (folder / ".made-by-make").touch()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" != venv ] || { ls -A "$3"; exit 9; }\n')
    python.chmod(0o755)
    command = ["make", "build", "--no-print-directory", f"VENV={folder}", f"PYTHON={python}"]
    made = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert made.returncode and made.stdout.splitlines()[-1] == ".made-by-make"
    assert [path.name for path in folder.iterdir()] == [".made-by-make"]


def test_every_triton_from_the_pinned_one_on_compiles_the_kernels():
    job = parsed(TESTS)["jobs"]["other-triton"]
    versions = [tuple(map(int, v.split("."))) for v in job["strategy"]["matrix"]["triton"]]
    minors = [minor for _, minor, _ in versions]
    assert minors == list(range(minors[0], minors[0] + len(minors)))
    pinned = re.search(r"^triton==(\S+)", (ROOT / "requirements-triton.txt").read_text(), re.M)[1]
    assert job["strategy"]["matrix"]["triton"][0] == pinned
    install, _, test = (step["run"] for step in job["steps"] if "run" in step)
    assert "triton==${{ matrix.triton }}" in install
    assert 'PYTHONPATH="$RUNNER_TEMP/triton"' in test
    assert "tests/test_triton_compile.py tests/test_triton_elementwise.py" in test


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_tests_with_another_torch_in_an_environment_of_its_own():
    options = ["--dry-run", "--always-make", "TORCH=2.10.0", "ARGS=-m kernels_ci"]
    command = ["make", "test", *options]
    made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert ".venv-torch-2.10.0/bin/python -m pytest" in made and ".venv/" not in made
    assert "-m kernels_ci\n" in made
    (select,) = re.findall(r"(sed .* requirements.txt) > \.venv-torch", made)
    selected = subprocess.run(["bash", "-c", select], cwd=ROOT, capture_output=True, text=True)
    pins = (ROOT / "requirements.txt").read_text()
    assert selected.stdout == pins.replace(f"torch=={required('torch')}", "torch==2.10.0") != pins
