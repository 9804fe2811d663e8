"""`make gpu` reaches every section, judges figures, and names what failed or was not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
import gpu_report
import gpu_sections
from gpu_sections import AIMS, CHECKOUT, SECTIONS, Command, Machine, Section

COMMANDS = [command for section in SECTIONS for command in section.commands]
ONE_DEVICE = Machine(devices=1, gib=139.0, sanitizer="/bin/compute-sanitizer")


def table(title, *lines):
    columns, *rows = lines
    return gpu_report.Table(title, list(columns), [list(row) for row in rows])


def run_fake(monkeypatch, tmp_path, *sections):
    """Its exit status and report."""
    monkeypatch.setattr(gpu_report, "SECTIONS", sections)
    status = gpu_report.main(["--fake", "--out", str(tmp_path / "out")])
    return status, (tmp_path / "out" / "report.md").read_text()


# -- without a device ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="for builds without CUDA")
def test_every_section_is_reached_and_reported_without_a_device(tmp_path):
    command = [sys.executable, CHECKOUT / "scripts" / "gpu_report.py", "--fake", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert gpu_report.FAKE in report and gpu_report.FAKE in done.stdout
    first, _ = report.split("## Aims")
    results = dict(re.findall(r"^\| ([\w-]+) \| [^|]+ \| ([^|]+) \|", first, re.MULTILINE))
    alone = results.pop("sanitizer")
    assert alone.startswith("not run") and f"sanitizer: {alone[9:]}" in done.stdout
    assert {name for name, result in results.items() if result == "passed"} == {
        section.name for section in SECTIONS if section.name != "sanitizer"
    }
    for aim in AIMS:
        assert aim.what in report
    assert " met |" not in report  # nor missed: no figure says anything
    for picture in ("times.png", "rates.png"):
        assert f"({picture})" in report and (tmp_path / picture).stat().st_size


@pytest.mark.slow
def test_a_section_that_fails_or_hangs_is_named_and_stops_no_other(monkeypatch, tmp_path, capsys):
    row = {"title": "T", "columns": ["size", "ms"], "rows": [["large", 1.5]]}
    code = "import os, sys; open(os.environ['BENCHMARK_TABLES'], 'a').write(sys.argv[1])"
    writes = Command("", fake=f"""-c "{code}" '{json.dumps(row)}'""")
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


def test_tests_that_fail_or_are_skipped_are_told_by_name_and_reason(monkeypatch, tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip(reason='no link')\n"
        "def test_absent(): pass\n"
    )
    command = Command("", fake=f"-m pytest -q -c /dev/null -p no:cacheprovider {file}")
    status, report = run_fake(monkeypatch, tmp_path, Section("some", "tests", 60, [command]))
    assert status == 1
    assert "| passed |  | 1 |" in report
    assert "| failure | test_bad | 1 |" in report and "| skipped | no link | 1 |" in report


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_fails(capsys):
    assert gpu_report.main([]) == 1
    assert "finds no GPU" in capsys.readouterr().err


# -- what is run on a device -----------------------------------------------------------------------


def test_sections_on_one_device_take_ten_minutes():
    alone = [section for section in SECTIONS if section.missing(ONE_DEVICE) is None]
    assert sum(section.seconds for section in alone) <= 600
    others = {section.name for section in SECTIONS} - {section.name for section in alone}
    assert others == {"layouts", "traffic"}  # they need two


def test_what_a_machine_lacks_is_the_reason_that_a_section_is_not_run():
    poor = Machine(devices=1, gib=78.0, sanitizer=None)
    reasons = {s.name: reason for s in SECTIONS if (reason := s.missing(poor))}
    assert reasons == {
        "whole-step": "needs 116 GiB of memory, and there are 78",
        "sanitizer": "compute-sanitizer is not installed",
        "layouts": "needs two GPUs or more, and there is 1",
        "traffic": "needs two GPUs or more, and there is 1",
    }


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words[:60])
def test_commands_name_files_and_options_that_exist(command):
    for line in (f"{command.words} {command.full}", command.fake):
        for path in re.findall(r"(?:benchmarks|scripts|tests)/\w+\.py", line):
            assert (CHECKOUT / path).is_file(), path
        scripts = re.findall(r"benchmarks/\w+\.py", line)
        known = "".join((CHECKOUT / script).read_text() for script in scripts)
        for option in re.findall(r"--[a-z-]+", line) if scripts else ():
            assert f'"{option}"' in known, option


def test_tests_of_kernels_are_all_there_but_those_that_compile_for_other_chips():
    assert "tests/test_triton_symmetric.py" in gpu_sections.KERNEL_TESTS
    assert "tests/test_triton_elementwise.py" in gpu_sections.KERNEL_TESTS
    assert "compile" not in gpu_sections.KERNEL_TESTS


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


def judged(what, *tables):
    """Figures, what they are beside, and whether they are met."""
    (aim,) = [aim for aim in AIMS if what in aim.what]
    return [(row[2], row[3], row[4]) for row in gpu_report.judge(aim, tables, fake=False)]


def test_a_figure_is_judged_by_its_bound_beside_its_baseline():
    assert judged("floor", STEPS) == [("1.25", "floor, least ms: 40.0", "met")]
    assert judged("2.3 times", STEPS) == [("0.5", "torch.optim.Muon, least ms: 100.0", "NOT met")]


def test_a_baseline_is_of_the_same_shape_and_dtype():
    assert judged("attention's forward", LOGITS) == [
        ("0.6", "attention, forward, least ms: 5.0", "NOT met"),
        ("0.4", "attention, forward, least ms: 10.0", "met"),
    ]


def test_a_figure_may_be_a_ratio_to_its_baseline():
    assert judged("QK-Clip", STEPS, CLIP) == [("1.05", "step, least ms: 10.0", "NOT met")]


def test_an_aim_without_a_figure_is_not_measured():
    assert judged("streamed", STEPS, CLIP) == [("–", "", "not measured")]
    alone = table("One step", STEPS.columns, ("Muon (this package)", 50.0, "–", 1.1))
    assert judged("2.3 times", alone) == [("–", "", "not measured")]


def test_aims_are_those_of_the_document():
    text = " ".join((CHECKOUT / "docs" / "performance.md").read_text().split())
    for aim in AIMS:
        assert aim.what in text, aim.what
