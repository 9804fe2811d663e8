"""Runs functions of these modules on ranks that torchrun starts, as people start their scripts.

As a script, which torchrun runs: `ranked.py MODULE FUNCTION OUT ARGUMENTS`. Rank 0 writes what the
function returned.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import audits

# What torch's shutdown sometimes prints as it aborts after gloo was used; once in thirty here.
ABORTED = "terminate called without an active exception"

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "clients"


def torchrun(script: Path, *arguments: str, ranks: int = 2, timeout: float = 180) -> str:
    """What it printed; raises with all of it where a rank failed, but not as it was shut down."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = [str(EXAMPLES), str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, *command, str(script), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        if done.returncode == 0 or ABORTED not in done.stdout:
            break
    assert done.returncode == 0, done.stdout
    return done.stdout


def run(function: Any, folder: Path, /, **arguments: Any) -> Any:
    """What a module-level function returns on rank 0."""
    path = folder / f"{function.__name__}.pt"
    names = (function.__module__, function.__name__)
    torchrun(Path(__file__), *names, str(path), json.dumps(arguments))
    return torch.load(path, weights_only=False)


def main(module: str, function: str, out: str, arguments: str) -> None:
    torch.set_num_threads(1)
    with audits.healthy():
        found = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    if os.environ["RANK"] == "0":
        torch.save(found, out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the shutdown that sometimes aborts


if __name__ == "__main__":
    main(*sys.argv[1:])
