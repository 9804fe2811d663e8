"""Runs a function on several gloo ranks, each a fresh process, from inside a test.

With ``TEST_DEVICE=cuda`` each rank has a GPU of its own and NCCL beside gloo, tensors are made on
that GPU, and a test of more ranks than there are GPUs is skipped. With ``TEST_DEVICE=fake`` each
has the accelerator of fake_device.py, and gloo. Otherwise ranks see no GPU.

The processes are forked from a server that has imported torch and loaded the kernel once, which
makes a run cost a tenth of a second. They see the environment as it was when the server started, at
the first run.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

IS_FAKE = os.environ.get("TEST_DEVICE") == "fake"
DEVICE = "cuda" if IS_FAKE else os.environ.get("TEST_DEVICE", "cpu")  # a type of device

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint.state_dict",
        "torch._dynamo",
        "torch.profiler",
        "kernels",
        "pytest",
        *(["kernel", "reference"] if not IS_FAKE else []),  # the fake device has to come first
    ]
)

# After a first failure the other ranks get this long to report theirs: a rank whose peer crashed
# often fails sooner than the crash itself is seen, and would be blamed for it.
GRACE_SECONDS = 0.3


class RankError(RuntimeError):
    """A rank raised, crashed or hung. The message names it and holds its traceback."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, or with the class name of an exception.

    The latter may also be "Crashed" or "TimedOut". `detail` is the traceback, or what the rank
    wrote to stderr before it crashed or hung, with the stacks of its threads at the end.
    """

    value: Any = None
    error: str | None = None
    message: str = ""
    detail: str = ""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    pg_timeout: float = 30,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `world_size` gloo ranks; returns the results in rank order.

    `fn` is a module-level function of a test module, called with the default process group
    initialized (`dist.get_rank()` tells who it is). Arguments and results are pickled. At the first
    failure, or `timeout` seconds after the start, all ranks are killed and `RankError` is raised.
    `pg_timeout` is the process group's own, in seconds.
    """
    outcomes = _run((fn, args, kwargs), world_size, timeout, pg_timeout, stop_on_failure=True)
    return values_of(outcomes, world_size)


def on_ranks(ranks: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator of a test, whose body so many gloo ranks run, all with the test's arguments.

    Args:
        ranks: how many.
        options: ``timeout`` and ``pg_timeout``, see `run_ranks`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            if torch.distributed.is_initialized():  # on a rank, which was sent the test by its name
                body(*args, **kwargs)
            else:
                run_ranks(test, ranks, *args, **options, **kwargs)

        return test

    return decorate


def values_of(outcomes: Mapping[int, Outcome], world_size: int) -> list[Any]:
    """The results in rank order, or RankError with the failures of all ranks that had one."""
    failures = [
        f"rank {rank} of {world_size}: {outcome.error}: {outcome.message}\n{outcome.detail}"
        for rank, outcome in sorted(outcomes.items())
        if outcome.error
    ]
    if failures:
        raise RankError("\n".join(failures))
    return [outcomes[rank].value for rank in range(world_size)]


def rank_outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    pg_timeout: float = 30,
    **kwargs: Any,
) -> list[Outcome]:
    """Like `run_ranks`, but lets every rank end in its own way and tells how each did."""
    outcomes = _run((fn, args, kwargs), world_size, timeout, pg_timeout, stop_on_failure=False)
    return [outcomes[rank] for rank in range(world_size)]


def _run(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    world_size: int,
    timeout: float,
    pg_timeout: float,
    stop_on_failure: bool,
) -> dict[int, Outcome]:
    if DEVICE != "cpu" and not IS_FAKE and torch.accelerator.device_count() < world_size:
        pytest.skip(f"needs {world_size} devices of the type {DEVICE}")
    # Plain pickle: multiprocessing's own would pass tensors as shared memory of a dead process.
    payload = pickle.dumps(call)
    outcomes: dict[int, Outcome] = {}
    processes, connections = [], {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        try:
            _start_server()
            for rank in range(world_size):
                ours, theirs = FORKSERVER.Pipe()
                process = FORKSERVER.Process(
                    target=_rank_main,
                    args=(theirs, payload, rank, world_size, scratch, pg_timeout),
                    daemon=True,
                )
                process.start()
                theirs.close()  # so that a crash is an end of file on ours
                processes.append(process)
                connections[ours] = rank
            deadline = time.monotonic() + timeout
            pending = dict(connections)
            while pending:
                ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for connection in ready:
                    rank = pending.pop(connection)
                    stderr = _stderr_file(scratch, rank)
                    outcomes[rank] = _receive(connection, processes[rank], stderr)
                    if stop_on_failure and outcomes[rank].error:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not (stop_on_failure and any(outcome.error for outcome in outcomes.values())):
                for rank in pending.values():
                    stack = _stack(processes[rank], _stderr_file(scratch, rank))
                    outcomes[rank] = Outcome(None, "TimedOut", f"no result in {timeout} s", stack)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for connection in connections:
                connection.close()
    return outcomes


_server_lock = threading.Lock()  # tests run several groups of ranks at once, from threads


def _start_server() -> None:
    """Starts the server, unless it runs, where it finds the modules beside this one."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with _server_lock, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", paths.rstrip(os.pathsep))
        forkserver.ensure_running()


def _rank_main(
    connection: Connection,
    payload: bytes,
    rank: int,
    world_size: int,
    scratch: str,
    pg_timeout: float,
) -> None:
    with open(_stderr_file(scratch, rank), "wb") as stderr:
        os.dup2(stderr.fileno(), 2)  # of the process, so that C++ writes there, too
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            _take_device(rank),
            store=dist.FileStore(f"{scratch}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=pg_timeout),
        )
        fn, args, kwargs = pickle.loads(payload)
        if DEVICE != "cpu":
            torch.set_default_device(DEVICE)  # by now all modules are there
        answer = pickle.dumps(Outcome(called(fn, args, kwargs)))
    except BaseException as error:
        answer = pickle.dumps(
            Outcome(None, type(error).__name__, str(error), traceback.format_exc())
        )
    connection.send_bytes(answer)
    # Stay until the parent has heard from all ranks: closing sockets that a slower rank still
    # reads from would fail that rank. The parent kills us, or its end of the pipe goes with it.
    wait([connection])
    sys.stderr.flush()
    os._exit(0)  # finalization is slow, and sometimes aborts


def called(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function returns on this rank, its tensors in host memory."""
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, fn(*args, **kwargs))


def _take_device(rank: int) -> str:
    """Makes it this process's; returns the backends of its process group."""
    import torch.distributed as dist

    if DEVICE == "cpu":
        # FSDP2 would move parameters to a GPU that it sees.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
        return "gloo"
    if IS_FAKE:
        import on_fake_device

        on_fake_device.put_there()
        return "cpu:gloo,cuda:gloo"
    torch.accelerator.set_device_index(rank)
    return f"cpu:gloo,{DEVICE}:{dist.get_default_backend_for_device(DEVICE)}"


def _receive(
    connection: Connection, process: multiprocessing.process.BaseProcess, stderr: Path
) -> Outcome:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join()
        text = stderr.read_text(errors="replace") if stderr.exists() else ""
        return Outcome(None, "Crashed", f"exit code {process.exitcode}", text)


def _stderr_file(scratch: str, rank: int) -> Path:
    return Path(scratch, f"stderr-{rank}")


def _stack(process: multiprocessing.process.BaseProcess, file: Path) -> str:
    """Where all threads of a hanging rank are; empty when it hung before it could tell."""
    if process.pid is None or not file.exists():
        return ""
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    return file.read_text(errors="replace")
