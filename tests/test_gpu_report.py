"""`make gpu` reaches every section, judges figures, and names what failed or was not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from checkout import ROOT

sys.path.append(str(ROOT / "scripts"))
import gpu_checks
import gpu_figures
import gpu_report
from gpu_sections import AIMS, SECTIONS, Command, Section

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
    for name in ("times", "rates"):
        for picture in (f"{name}-light.png", f"{name}-dark.png"):
            assert f'"{picture}"' in report and (tmp_path / picture).stat().st_size


# Appends a line to the tables.
ROW = json.dumps({"title": "T", "columns": ["which", "ms"], "rows": [["large", 1.5]]})
APPENDS = "import os, sys; open(os.environ['BENCHMARK_TABLES'], 'a').write(sys.argv[1] + '\\n')"
WRITES = Command("", fake=f"""-c "{APPENDS}" '{ROW}'""")


@pytest.mark.slow
def test_a_section_that_fails_or_hangs_is_named_and_stops_no_other(monkeypatch, tmp_path, capsys):
    failing, hanging = "-c 'raise SystemExit(3)'", "-c 'import time; time.sleep(99)'"
    sections = [
        Section("broken", "it fails", 60, [Command("", fake=failing), WRITES]),
        Section("hanging", "it hangs", 1, [Command("", fake=hanging)]),
        Section("fine", "it works", 60, [WRITES]),
        Section("absent", "it needs a device", 60, [Command("")]),
    ]
    monkeypatch.setattr(gpu_report, "SECTIONS", sections)
    status = gpu_report.main(["--fake", "--out", str(tmp_path / "out")])
    report = (tmp_path / "out" / "report.md").read_text()
    assert status == 1 and report.count("| large | 1.5 |") == 2
    results = re.findall(r"^\| ([\w-]+) \| [^|]+ \| (FAILED|passed|not run)", report, re.MULTILINE)
    broken = {"broken": "FAILED", "hanging": "FAILED"}
    assert dict(results) == {**broken, "fine": "passed", "absent": "not run"}
    printed = capsys.readouterr().out.split("FAILED:\n")[1]
    assert all(name in printed for name in broken) and "fine" not in printed


OUTS = [["--out", ""], ["--out", "."], ["--out", "HERE/mine"]]
OUTS += [["--out", "HERE/new", "--to", "HERE/new"], ["--out", "HERE/new", "--to", "HERE/mine/file"]]


@pytest.mark.parametrize("options", OUTS, ids=str)
def test_a_folder_that_is_not_its_own_is_left_alone(tmp_path, options):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(SystemExit):
        gpu_report.main(["--fake", *(word.replace("HERE", str(tmp_path)) for word in options)])
    assert (tmp_path / "mine" / "file").read_text() == "mine"


@needs_no_device
def test_without_a_device_it_says_so_and_fails(capsys):
    assert gpu_report.main([]) == 1
    assert "GPU" in capsys.readouterr().err


def test_a_check_that_fails_is_named_and_stops_no_other(monkeypatch, tmp_path, capsys):
    checks = {"broken": lambda checks: checks.no_such_check, "fine": lambda checks: None}
    monkeypatch.setattr(gpu_checks, "CHECKS", checks)
    options = SimpleNamespace(small=True, out=tmp_path)
    made = gpu_checks.Checks(gpu_checks.load_kernel(), options)
    assert gpu_checks.run(made, ["broken", "fine"]) == 1
    printed = capsys.readouterr().out
    assert "no_such_check" in printed and "fine: passed" in printed
    assert printed.endswith("FAILED: broken\n")


def test_a_figure_is_judged_by_its_bound_beside_its_baseline():
    rows = [
        ["Muon (this package)", 50.0, 0.5, 1.25],
        ["torch.optim.Muon", 100.0, 1.0, 2.5],
        ["floor", 40.0, "–", 1.0],
    ]
    columns = ["optimizer", "least ms", "× torch", "× floor"]
    table = gpu_figures.Table("One step, llama", columns, rows)
    for what, judged in (
        ("floor", ["1.25", "floor, least ms: 40.0", "met"]),
        ("2.3 times", ["0.5", "torch.optim.Muon, least ms: 100.0", "NOT met"]),
    ):
        (aim,) = [aim for aim in AIMS if what in aim.what]
        (row,) = gpu_figures.judge(aim, [table], fake=False)
        assert row[2:5] == judged
