"""`make gpu` reaches every section, judges figures, and names what failed or was not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
import gpu_checks
import gpu_figures
import gpu_report
from gpu_sections import AIMS, CHECKOUT, SECTIONS, Command, Machine, Section

COMMANDS = [command for section in SECTIONS for command in section.commands]
ONE_DEVICE = Machine(devices=1, sanitizer="/bin/compute-sanitizer")


def table(title, *lines):
    columns, *rows = lines
    return gpu_figures.Table(title, list(columns), [list(row) for row in rows])


def run_fake(monkeypatch, tmp_path, *sections, options=()):
    """Its exit status and report."""
    monkeypatch.setattr(gpu_report, "SECTIONS", sections)
    status = gpu_report.main(["--fake", "--out", str(tmp_path / "out"), *options])
    return status, (tmp_path / "out" / "report.md").read_text()


# -- without a device ------------------------------------------------------------------------------


def reported(folder, sections):
    """The run of these sections without a device, and its report."""
    command = [sys.executable, CHECKOUT / "scripts" / "gpu_report.py", "--fake", "--out", folder]
    command += ["--sections", *sections]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_every_section_is_reached_and_reported_without_a_device(tmp_path):
    done, report = reported(tmp_path, [section.name for section in SECTIONS])
    assert gpu_figures.FAKE in report and gpu_figures.FAKE in done.stdout
    first, _ = report.split("## Aims")
    results = dict(re.findall(r"^\| ([\w-]+) \| [^|]+ \| ([^|]+) \|", first, re.MULTILINE))
    assert results.pop("section") == "result"  # the head of the table
    sanitizer = results.pop("sanitizer")
    assert sanitizer.startswith("not run") and f"sanitizer: {sanitizer[9:]}" in done.stdout
    assert set(results.values()) == {"passed"} and len(results) == len(SECTIONS) - 1
    for aim in AIMS:
        assert aim.what in report
    assert " met |" not in report  # nor missed: no figure says anything
    for picture in ("times.png", "rates.png"):
        assert f"({picture})" in report and (tmp_path / picture).stat().st_size


@pytest.mark.slow
def test_a_section_that_fails_or_hangs_is_named_and_stops_no_other(monkeypatch, tmp_path, capsys):
    (writes,) = writing("large").commands
    status, report = run_fake(
        monkeypatch,
        tmp_path,
        Section("broken", "it fails", 60, [Command("", fake="-c 'raise SystemExit(3)'"), writes]),
        Section("hanging", "it hangs", 1, [Command("", fake="-c 'import time; time.sleep(99)'")]),
        Section("fine", "it works", 60, [writes]),
        Section("absent", "it needs a device", 60, [Command("")]),
    )
    printed = capsys.readouterr().out
    assert status == 1
    _, failed = printed.split("FAILED:\n")
    assert "broken: exit code 3" in failed and "hanging: not done in time" in failed
    assert "fine" not in failed and "absent: there is no part of it" in printed
    assert report.count("| large | 1.5 |") == 2
    assert "| fine | it works | passed |" in report


def writing(name, text="''", seconds=60, **about):
    """A section of one command, which appends a line to the tables and does what ``text`` says."""
    row = json.dumps({"title": "T", "columns": ["which", "ms"], "rows": [[name, 1.5]]})
    code = (
        "import os, sys, time; open(os.environ['BENCHMARK_TABLES'], 'a').write(sys.argv[1] + '\\n')"
    )
    command = Command("", fake=f"""-c "{code}; {text}" '{row}'""")
    return Section(name, "it writes", seconds, [command], **about)


def test_after_the_deadline_nothing_is_started_and_what_runs_is_stopped(
    monkeypatch, tmp_path, capsys
):
    sections = writing("first"), writing("long", "time.sleep(99)"), writing("late")
    start = time.monotonic()
    options = ["--seconds", "6"]
    monkeypatch.setattr(gpu_report, "LEAST", 2)
    status, report = run_fake(monkeypatch, tmp_path, *sections, options=options)
    assert status == 1 and 5 < time.monotonic() - start < 30
    printed = capsys.readouterr().out
    assert "long: not done in time" in printed and "late: no time was left" in printed
    assert "| first | 1.5 |" in report and "| long | 1.5 |" in report


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--out", ""], "no folder of an earlier report"),
        (["--out", "."], "no folder of an earlier report"),
        (["--out", "HERE/mine"], "no folder of an earlier report"),
        (["--out", "HERE/new", "--to", "HERE/new"], "another folder"),
        (["--out", "HERE/new", "--to", "HERE/mine/file"], "File exists"),
    ],
)
def test_a_folder_that_is_not_its_own_is_left_alone(monkeypatch, tmp_path, capsys, options, says):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    monkeypatch.setattr(gpu_report, "SECTIONS", [writing("never")])
    with pytest.raises(SystemExit):
        gpu_report.main(["--fake", *(word.replace("HERE", str(tmp_path)) for word in options)])
    assert says in capsys.readouterr().err and (tmp_path / "mine" / "file").exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_fails(capsys):
    assert gpu_report.main([]) == 1
    assert "finds no GPU" in capsys.readouterr().err


# -- what is run on a device -----------------------------------------------------------------------


def test_what_a_machine_lacks_is_the_reason_that_a_section_is_not_run():
    assert {s.name for s in SECTIONS if s.missing(ONE_DEVICE)} == {"layouts", "traffic"}
    poor = Machine(devices=1, sanitizer=None)
    reasons = {s.name: reason for s in SECTIONS if (reason := s.missing(poor))}
    assert reasons == {
        "sanitizer": "compute-sanitizer is not installed",
        "layouts": "needs two GPUs or more, and there is 1",
        "traffic": "needs two GPUs or more, and there is 1",
    }


def test_gaps_are_between_all_that_a_device_does_and_time_is_by_kernel():
    work = [("b", 10.0, 20.0), ("a", 0.0, 4.0), ("b", 12.0, 15.0), ("a", 26.0, 30.0)]
    rows, idle, largest = gpu_checks.times_by_kernel(work)
    assert rows == [["b", "2", "0.013", "0.619"], ["a", "2", "0.008", "0.381"]]
    assert (idle, largest) == (12.0, 6.0)  # while another runs, nothing is idle
    assert gpu_checks.times_by_kernel([]) == ([], 0.0, 0.0)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words[:60])
def test_commands_name_files_and_options_that_exist(command):
    for line in (f"{command.words} {command.full}", command.fake):
        for path in re.findall(r"(?:benchmarks|scripts|tests)/\w+\.py", line):
            assert (CHECKOUT / path).is_file(), path
        scripts = re.findall(r"benchmarks/\w+\.py", line)
        known = "".join((CHECKOUT / script).read_text() for script in scripts)
        for option in re.findall(r"--[a-z-]+", line) if scripts else ():
            assert f'"{option}"' in known, option


def test_a_check_that_fails_is_named_and_stops_no_other(monkeypatch, tmp_path, capsys):
    def broken(checks):
        raise AssertionError("other bits")

    monkeypatch.setattr(gpu_checks, "CHECKS", {"broken": broken, "fine": lambda checks: None})
    options = SimpleNamespace(small=True, out=tmp_path)
    checks = gpu_checks.Checks(gpu_checks.load_kernel(), options)
    assert gpu_checks.run(checks, ["broken", "fine"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: AssertionError: other bits" in printed and "fine: passed" in printed
    assert printed.endswith("FAILED: broken\n")


# -- figures beside aims ---------------------------------------------------------------------------


STEPS = table(
    "One step, llama",
    ("optimizer", "least ms", "× torch", "× floor"),
    ("Muon (this package)", 50.0, 0.5, 1.25),
    ("torch.optim.Muon", 100.0, 1.0, 2.5),
    ("floor", 40.0, "–", 1.0),
)
LOGITS = table(
    "Maxima of causal attention logits",
    ("B × Hq/Hk × T × D", "dtype", "contender", "least ms", "× attention"),
    ("1", "bf16", "max_qk_logits", 3.0, 0.6),
    ("1", "bf16", "attention, forward", 5.0, 1.0),
    ("1", "fp32", "max_qk_logits", 4.0, 0.4),
    ("1", "fp32", "attention, forward", 10.0, 1.0),
)
CLIP = table(
    "QK-Clip", ("", "least ms"), ("step", 10.0), ("step with QK-Clip", 10.5), ("a loop", 20.0)
)


PRODUCTS = table(
    "Symmetric products",
    ("product", "matrices", "library, least ms", "speed-up"),
    ("XXᵀ, 4096 × 4096", 1.0, 2.0, 1.3),
    ("XXᵀ, 1024 × 4096", 1.0, 1.0, 0.9),
)
RANK = table(
    "Rank 0 of 8",
    ("optimizer", "least ms", "× floor", "host / step"),
    ("Muon (this package)", 20.0, 1.4, 0.3),
    ("floor", 14.3, 1.0, "–"),
)


def judged(what, *tables):
    """Figures, what they are beside, and whether they are met."""
    (aim,) = [aim for aim in AIMS if what in aim.what]
    return [(row[2], row[3], row[4]) for row in gpu_figures.judge(aim, tables, fake=False)]


def test_a_figure_is_judged_by_its_bound_beside_its_baseline():
    assert judged("floor", STEPS) == [("1.25", "floor, least ms: 40.0", "met")]
    assert judged("2.3 times", STEPS) == [("0.5", "torch.optim.Muon, least ms: 100.0", "NOT met")]
