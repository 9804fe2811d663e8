"""A plugin of pytest that notes which lines of the package each test runs, on its ranks, too.

    PYTHONPATH=scripts COVERED=folder python -m pytest -p covering

Needs `coverage`. Each line of the files in ``COVERED`` is a JSON object: a test, its seconds, and
for each module the numbers of its lines that ran.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing.forkserver
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage  # type: ignore[import-not-found]
import pytest

FOLDER = Path(os.environ["COVERED"])
WATCH = coverage.Coverage(data_file=None, include=["*/torch-*/*"], config_file=False)
WATCH.set_option("run:disable_warnings", ["no-data-collected"])


@contextlib.contextmanager
def noted(test: str) -> Iterator[None]:
    """Writes down which lines run meanwhile, in the name of a test."""
    start = time.monotonic()
    WATCH.start()
    try:
        yield
    finally:
        WATCH.stop()
        data = WATCH.get_data()
        lines = {
            path.partition("/torch-")[2].partition("/")[2]: sorted(data.lines(path) or ())
            for path in data.measured_files()
        }
        entry = {"test": test, "seconds": time.monotonic() - start, "lines": lines}
        with open(FOLDER / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
        WATCH.erase()


if "ranks" in sys.modules:  # this is the server that ranks are forked from, a child of pytest's
    ranks: Any = importlib.import_module("ranks")

    RUNNING = FOLDER / f"{os.getppid()}.test"
    called = ranks.called

    def noted_call(*args: Any) -> Any:
        with noted(RUNNING.read_text()):
            return called(*args)

    ranks.called = noted_call


def pytest_collection_finish() -> None:
    """Has that server import this module when it starts."""
    server: Any = multiprocessing.forkserver._forkserver
    server.set_forkserver_preload([*server._preload_modules, "ranks", "covering"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    (FOLDER / f"{os.getpid()}.test").write_text(item.nodeid)
    with noted(item.nodeid):
        return (yield)
