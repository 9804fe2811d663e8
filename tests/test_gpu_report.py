"""`make gpu` reaches every section, judges figures, and names what failed or was not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkout import ROOT

sys.path.append(str(ROOT / "scripts"))
import gpu_checks
import gpu_figures
import gpu_report
from gpu_sections import AIMS, SECTIONS, Command, Machine, Section

needs_no_device = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")


@pytest.mark.slow
@needs_no_device
def test_every_section_is_reached_and_reported_without_a_device(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "gpu_report.py", "--fake", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert gpu_figures.FAKE in report and gpu_figures.FAKE in done.stdout
    first, _ = report.split("## Aims")
    results = dict(re.findall(r"^\| ([\w-]+) \| [^|]+ \| ([^|]+) \|", first, re.MULTILINE))
    assert results.keys() == {"section", *(section.name for section in SECTIONS)}
    assert results.pop("sanitizer").startswith("not run")
    assert set(results.values()) == {"result", "passed"}
    assert all(aim.what in report for aim in AIMS)
    assert " met |" not in report  # nor missed: no figure says anything
    for picture in ("times.png", "rates.png"):
        assert f"({picture})" in report and (tmp_path / picture).stat().st_size


def run_fake(monkeypatch, tmp_path, *sections: Section, options: Any = ()) -> tuple[int, str]:
    """Its exit status and report."""
    monkeypatch.setattr(gpu_report, "SECTIONS", sections)
    status = gpu_report.main(["--fake", "--out", str(tmp_path / "out"), *options])
    return status, (tmp_path / "out" / "report.md").read_text()


def writing(name: str, text: str = "''") -> Section:
    """A section of one command, which appends a line to the tables and does what ``text`` says."""
    row = json.dumps({"title": "T", "columns": ["which", "ms"], "rows": [[name, 1.5]]})
    code = (
        "import os, sys, time; open(os.environ['BENCHMARK_TABLES'], 'a').write(sys.argv[1] + '\\n')"
    )
    command = Command("", fake=f"""-c "{code}; {text}" '{row}'""")
    return Section(name, "it writes", 60, [command])


@pytest.mark.slow
def test_a_section_that_fails_or_hangs_is_named_and_stops_no_other(monkeypatch, tmp_path, capsys):
    (writes,) = writing("large").commands
    failing, hanging = "-c 'raise SystemExit(3)'", "-c 'import time; time.sleep(99)'"
    status, report = run_fake(
        monkeypatch,
        tmp_path,
        Section("broken", "it fails", 60, [Command("", fake=failing), writes]),
        Section("hanging", "it hangs", 1, [Command("", fake=hanging)]),
        Section("fine", "it works", 60, [writes]),
        Section("absent", "it needs a device", 60, [Command("")]),
    )
    assert status == 1 and report.count("| large | 1.5 |") == 2
    results = re.findall(r"^\| ([\w-]+) \| [^|]+ \| (FAILED|passed|not run)", report, re.MULTILINE)
    failed = [("broken", "FAILED"), ("hanging", "FAILED")]
    assert results == [*failed, ("fine", "passed"), ("absent", "not run")]
    printed = capsys.readouterr().out.split("FAILED:\n")[1]
    assert all(name in printed for name in ("broken", "hanging")) and "fine" not in printed


def test_after_the_deadline_nothing_is_started_and_what_runs_is_stopped(monkeypatch, tmp_path):
    sections = writing("first"), writing("long", "time.sleep(99)"), writing("late")
    start = time.monotonic()
    monkeypatch.setattr(gpu_report, "LEAST", 2)
    status, report = run_fake(monkeypatch, tmp_path, *sections, options=["--seconds", "6"])
    assert status == 1 and 5 < time.monotonic() - start < 30
    assert "| first | 1.5 |" in report and "| long | 1.5 |" in report
    assert "| late | 1.5 |" not in report


OUTS = [["--out", ""], ["--out", "."], ["--out", "HERE/mine"]]
OUTS += [["--out", "HERE/new", "--to", "HERE/new"], ["--out", "HERE/new", "--to", "HERE/mine/file"]]


@pytest.mark.parametrize("options", OUTS, ids=str)
def test_a_folder_that_is_not_its_own_is_left_alone(monkeypatch, tmp_path, options):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    monkeypatch.setattr(gpu_report, "SECTIONS", [writing("never")])
    with pytest.raises(SystemExit):
        gpu_report.main(["--fake", *(word.replace("HERE", str(tmp_path)) for word in options)])
    assert (tmp_path / "mine" / "file").read_text() == "mine"


@needs_no_device
def test_without_a_device_it_says_so_and_fails(capsys):
    assert gpu_report.main([]) == 1
    assert "GPU" in capsys.readouterr().err


def test_what_a_machine_lacks_is_the_reason_that_a_section_is_not_run():
    for sanitizer, lacking in (("/bin/compute-sanitizer", set()), (None, {"sanitizer"})):
        machine = Machine(devices=1, sanitizer=sanitizer)
        missing = {section.name for section in SECTIONS if section.missing(machine)}
        assert missing == {"layouts", "traffic", *lacking}


def test_commands_name_files_that_exist():
    for command in (command for section in SECTIONS for command in section.commands):
        for text in (command.words, command.full, command.fake):
            for path in re.findall(r"(?:benchmarks|scripts|tests)/\w+\.py", text or ""):
                assert (ROOT / path).is_file(), path


def test_gaps_are_between_all_that_a_device_does_and_time_is_by_kernel():
    work = [("b", 10.0, 20.0), ("a", 0.0, 4.0), ("b", 12.0, 15.0), ("a", 26.0, 30.0)]
    rows, idle, largest = gpu_checks.times_by_kernel(work)
    assert rows == [["b", "2", "0.013", "0.619"], ["a", "2", "0.008", "0.381"]]
    assert (idle, largest) == (12.0, 6.0)  # while another runs, nothing is idle
    assert gpu_checks.times_by_kernel([]) == ([], 0.0, 0.0)


def test_a_check_that_fails_is_named_and_stops_no_other(monkeypatch, tmp_path, capsys):
    def broken(checks):
        raise AssertionError("other bits")

    monkeypatch.setattr(gpu_checks, "CHECKS", {"broken": broken, "fine": lambda checks: None})
    options = SimpleNamespace(small=True, out=tmp_path)
    checks = gpu_checks.Checks(gpu_checks.load_kernel(), options)
    assert gpu_checks.run(checks, ["broken", "fine"]) == 1
    printed = capsys.readouterr().out
    assert "other bits" in printed and "fine: passed" in printed
    assert printed.endswith("FAILED: broken\n")


STEPS = gpu_figures.Table(
    "One step, llama",
    ["optimizer", "least ms", "× torch", "× floor"],
    [
        ["Muon (this package)", 50.0, 0.5, 1.25],
        ["torch.optim.Muon", 100.0, 1.0, 2.5],
        ["floor", 40.0, "–", 1.0],
    ],
)


@pytest.mark.parametrize(
    ("what", "judged"),
    [
        ("floor", ["1.25", "floor, least ms: 40.0", "met"]),
        ("2.3 times", ["0.5", "torch.optim.Muon, least ms: 100.0", "NOT met"]),
    ],
)
def test_a_figure_is_judged_by_its_bound_beside_its_baseline(what, judged):
    (aim,) = [aim for aim in AIMS if what in aim.what]
    (row,) = gpu_figures.judge(aim, [STEPS], fake=False)
    assert row[2:5] == judged
