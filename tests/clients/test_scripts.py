"""The examples run as they stand, by the commands in their first lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from plain import assert_falls
from ranked import EXAMPLES, torchrun

ON_RANKS = {"accelerate_fsdp2", "torchrun_loop", "torchtitan_container"}
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "task")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_and_its_loss_falls(name, tmp_path):
    script = EXAMPLES / f"{name}.py"
    if name in ON_RANKS:
        printed = torchrun(script)
    else:
        command = [sys.executable, str(script)]
        printed = subprocess.run(
            command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=True
        ).stdout
    listed = re.findall(r"losses: ([\d. ]+)", printed)
    losses = listed[0].split() if listed else re.findall(r"'loss': '([\d.]+)'", printed)
    assert len(losses) in (20, 40)
    assert_falls(map(float, losses))
