"""Gloo ranks that stay, and take one call after the other.

For tests of many small cases: a call costs milliseconds, and `run_ranks` tenths of a second.
After a case that failed, the next one meets new ranks, unless all have told how it ended.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, wait
from typing import Any

import torch.distributed as dist

import ranks
from ranks import GRACE_SECONDS, Outcome, run_ranks, values_of

LIFETIME = 3600  # seconds


class RankPool:
    """Ranks that are started when first called.

    Args:
        ranks: how many.
        pg_timeout: of their process group, in seconds.
    """

    def __init__(self, ranks: int, pg_timeout: float = 30):
        self.ranks = ranks
        self._pg_timeout = pg_timeout
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()  # an end of file, at which a rank returns
        if self._thread is not None:
            self._thread.join()
        self._connections, self._thread = [], None

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(*args)`` on all ranks; their results in order.

        Raises:
            RankError: a rank raised, or died; it names it, and all ranks are gone.
        """
        if self._thread is None:
            self._start()
        payload = pickle.dumps((fn, args))
        try:
            for connection in self._connections:
                connection.send_bytes(payload)
            outcomes = self._receive()
        except (EOFError, OSError):
            assert self._thread is not None
            self._thread.join()
            failure, self._failure = self._failure, None
            self.__exit__()
            raise failure or RuntimeError("the ranks have ended") from None
        if len(outcomes) < self.ranks:
            self._stop()
        return values_of(outcomes, self.ranks)

    def _receive(self) -> dict[int, Outcome]:
        """Receives from all ranks; after a failure, only from ranks that answer soon."""
        outcomes: dict[int, Outcome] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        while pending:
            has_failed = any(outcome.error for outcome in outcomes.values())
            ready = wait(list(pending), GRACE_SECONDS if has_failed else None)
            if not ready:
                break
            for connection in ready:
                outcomes[pending.pop(connection)] = pickle.loads(connection.recv_bytes())
        return outcomes

    def _stop(self) -> None:
        """Kills all ranks, since the others may wait for one that raised."""
        assert self._thread is not None
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        self._thread.join()
        self._failure = None
        self.__exit__()

    def _start(self) -> None:
        with tempfile.TemporaryDirectory(prefix="rank-pool-") as scratch:
            address = f"{scratch}/socket"
            listener = socket.socket(socket.AF_UNIX)
            with listener:
                listener.bind(address)
                listener.listen(self.ranks)
                listener.settimeout(60)
                self._thread = threading.Thread(target=self._run, args=(address,), daemon=True)
                self._thread.start()
                found = []
                for _ in range(self.ranks):
                    accepted = listener.accept()[0]
                    accepted.setblocking(True)
                    found.append(Connection(accepted.detach()))
        met = {pickle.loads(connection.recv_bytes()): connection for connection in found}
        self._connections = [met[key] for key in sorted(met)]
        self._pids = [pid for _, pid in sorted(met)]

    def _run(self, address: str) -> None:
        try:
            run_ranks(_serve, self.ranks, address, timeout=LIFETIME, pg_timeout=self._pg_timeout)
        except BaseException as error:
            self._failure = error


def _serve(address: str) -> None:
    connection = Client(address, "AF_UNIX")
    connection.send_bytes(pickle.dumps((dist.get_rank(), os.getpid())))
    while True:
        try:
            payload = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        try:
            fn, args = pickle.loads(payload)
            answer = pickle.dumps(Outcome(ranks.called(fn, args, {})))
        except Exception as error:
            text = traceback.format_exc()
            answer = pickle.dumps(Outcome(None, type(error).__name__, str(error), text))
        connection.send_bytes(answer)
