"""What comparing notes costs the hosts of many ranks, beside one gloo group of them all.

    make bench BENCHMARKS=benchmarks/hosts.py ARGS="--ranks 16 64"

Real processes of one thread, connected over the loopback interface: sockets and threads that a
rank has more once connected (but for the first rank, which serves the store), keys and bytes that
all ranks together exchange with the store, and in each step the segments that a rank sends and the
time of the slowest. A message is three segments: either side says that it is ready, then comes the
data. The last rows are formulas.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

from timing import load_kernel, machine, show

kernel = load_kernel()
agreement = kernel.distributed.agreement

GROUPS, MESH = "groups of 8", "one group of all"
FORMULAS = (1024, 4096)  # ranks, powers of two
TIMEOUT = timedelta(seconds=120)
DATA_SEGMENTS_OUT = 156  # where Linux has it in struct tcp_info


class CountedStore(dist.Store):
    """A store that counts keys, and bytes of keys and values, on their way to another one."""

    def __init__(self, store: Any):
        super().__init__()
        self.store, self.keys, self.bytes = store, set[str](), 0

    def _count(self, *keys: str, values: Sequence[Any] = ()) -> None:
        self.keys.update(keys)
        self.bytes += sum(map(len, keys)) + sum(map(len, values))

    def set(self, key: str, value: Any) -> None:
        self._count(key, values=[value])
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.store.get(key)
        self._count(key, values=[value])
        return value

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        self._count(*keys)
        self.store.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self.store.multi_get(keys)
        self._count(*keys, values=values)
        return values

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._count(*keys, values=values)
        self.store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return True

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        return self.store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        self._count(key)
        return self.store.delete_key(key)


@dataclass
class Cost:
    """What one rank uses, and its times."""

    sockets: int
    threads: int
    keys: set[str]
    bytes: int
    segments: float
    connecting: float
    step: float


def cost_of(
    exchange: str, rank: int, ranks: int, server: socket.socket, steps: int, pipe: Any
) -> None:
    """Sends the cost of an exchange on one rank, and stays until the parent has heard of all."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    host, port = server.getsockname()
    is_first = rank == 0
    tcp = dist.TCPStore(
        host,
        port,
        is_master=is_first,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=server.fileno() if is_first else None,
    )
    store = CountedStore(tcp)
    # The process group of a job has connections of its own; a fake one has none.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    dist.distributed_c10d._get_default_store = lambda: store
    sockets, threads = _sockets()[0], _threads()
    start = time.perf_counter()
    step = _compare if exchange == GROUPS else _mesh
    call = step(store, rank, ranks)
    call()
    connecting = time.perf_counter() - start
    after, sent = _sockets()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    seconds = (time.perf_counter() - start) / steps
    segments = (_sockets()[1] - sent) / steps
    pipe.send(
        Cost(
            after - sockets,
            _threads() - threads,
            store.keys,
            store.bytes,
            segments,
            connecting,
            seconds,
        )
    )
    pipe.poll(None)
    os._exit(0)


def _compare(store: dist.Store, rank: int, ranks: int) -> Callable[[], object]:
    """The package's own comparison of notes."""
    shared, union = agreement.Agreement(), tuple(range(ranks))
    notes = {union: agreement.StepNotes(["a.weight: (6, 4)"], ["a.weight"])}
    return lambda: shared.check(notes, None, [union])


def _mesh(store: dist.Store, rank: int, ranks: int) -> Callable[[], object]:
    """A record as long as the package's, from every rank to every other."""
    group: Any = dist.ProcessGroupGloo(store, rank, ranks, TIMEOUT)
    sent, came = (torch.zeros(ranks, 3, dtype=torch.int64) for _ in range(2))
    return lambda: group.alltoall_base(came, sent, [], []).wait()


def _sockets() -> tuple[int, int]:
    """TCP sockets of this process, and the segments with data that they have sent."""
    count = segments = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            is_socket = os.readlink(link).startswith("socket:")
        except FileNotFoundError:  # of the listing itself
            continue
        if is_socket:
            with socket.socket(fileno=os.dup(int(link.name))) as opened:
                if opened.family == socket.AF_INET and opened.type == socket.SOCK_STREAM:
                    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    segments += struct.unpack_from("I", info, DATA_SEGMENTS_OUT)[0]
                    count += 1
    return count, segments


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def costs(exchange: str, ranks: int, steps: int) -> list[Cost]:
    """Results of all ranks, in processes started for this measurement."""
    context = multiprocessing.get_context("fork")  # of a process without threads, which imported
    server = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    pipes, processes = [], []
    try:
        for rank in range(ranks):
            here, there = context.Pipe()
            arguments = (exchange, rank, ranks, server, steps, there)
            processes.append(context.Process(target=cost_of, args=arguments, daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        server.close()  # the first rank has it now
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def row(ranks: int, exchange: str, of_ranks: Sequence[Cost]) -> list[str]:
    keys = set().union(*(cost.keys for cost in of_ranks))
    return [
        str(ranks),
        exchange,
        str(max(cost.sockets for cost in of_ranks[1:])),
        str(max(cost.threads for cost in of_ranks)),
        f"{len(keys):,}",
        f"{sum(cost.bytes for cost in of_ranks) / 1e3:,.0f}",
        f"{max(cost.segments for cost in of_ranks):.0f}",
        f"{1e3 * max(cost.step for cost in of_ranks):.1f}",
        f"{max(cost.connecting for cost in of_ranks):.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--markdown", action="store_true", help="print the table in markdown")
    options = parser.parse_args(arguments)
    exchanges = (MESH, GROUPS)
    rows = [
        row(ranks, exchange, costs(exchange, ranks, options.steps))
        for ranks in options.ranks
        for exchange in exchanges
    ]
    for ranks in FORMULAS:  # one socket more listens
        levels, rest = divmod(ranks.bit_length() - 1, 3)
        broadcasts = levels - (rest == 0)  # below the highest group, each to three ranks at once
        rows_of = ((MESH, ranks - 1, 0), (GROUPS, 7 * levels + 2**rest - 1, broadcasts))
        for exchange, peers, sent in rows_of:
            segments = str(3 * peers + 6 * sent)
            rows.append([str(ranks), exchange, str(peers + 1), "", "", "", segments, "", ""])
    columns = ["ranks", "exchange", "sockets", "threads", "keys", "kB of the store"]
    columns += ["segments", "ms a step", "s to connect"]
    show("Hosts that compare notes", columns, rows, markdown=options.markdown)
    print(machine("cpu"))


if __name__ == "__main__":
    main()
