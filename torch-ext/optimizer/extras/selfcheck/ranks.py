"""Runs a check on the existing ranks, or on CPU ranks that it starts; exchanges findings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

_TIMEOUT = timedelta(minutes=5)  # until the other ranks end after one has died
_GRACE = timedelta(seconds=10)  # for the others to raise after one rank has raised
_exchanges = itertools.count()  # equal on all ranks, which exchange in the same order


class Alone(Exception):
    """One rank raised while others may be in a collective; the arguments are ``check``'s result."""

    def __str__(self) -> str:
        return "one rank raised, and the others did not answer"


def run_on_ranks(check: Callable[..., Any], arguments: tuple[Any, ...], ranks: int) -> Any:
    """Returns what ``check(*arguments)`` returns on rank 0: plain data, after a JSON round trip.

    It runs in this process if a process group is initialized or torchrun has started ranks.
    Otherwise it starts ``ranks`` processes, connected by gloo on the CPU, which import the main
    script and unpickle the arguments.

    Raises:
        Alone: one rank raised, and the ranks existed before.
        ValueError: processes can't import the functions.
    """
    if dist.is_initialized():
        return check(*arguments)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        try:
            return check(*arguments)
        finally:
            dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    whole = (ranks, store.port, check, arguments)
    try:
        start_processes(_run_rank, whole, nprocs=ranks, start_method="spawn")
    except Exception as error:
        if not store.check(["begun"]):
            raise ValueError(
                "the processes that selfcheck starts could not import the functions from the "
                f"script ({str(error).strip().splitlines()[0]}). Save it to a file, load the "
                "package and define the functions at its top level (no lambdas), call selfcheck "
                'below if __name__ == "__main__":. Or start the script with torchrun'
            ) from None
        if not store.check(["result"]):
            raise
    return json.loads(store.get("result"))


def _run_rank(rank: int, ranks: int, port: int, check: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set("begun", "")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    try:
        result = check(*arguments)
    except Alone as ended:  # ends this process, and then the others
        store.compare_set("result", "", json.dumps(ended.args))
        raise
    if rank == 0:
        store.set("result", json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def gather_json(value: Any, has_raised: bool = False) -> list[Any]:
    """The values of all ranks, in order, after a JSON round trip.

    All ranks that raised give the first one's value: the others may have raised because it ended.

    Raises:
        DistStoreError: this rank raised, and others didn't answer in time.
    """
    store, key = dist.distributed_c10d._get_default_store(), f"selfcheck/{next(_exchanges)}"
    text = json.dumps(value)
    if has_raised:
        text = store.compare_set(f"{key}/raised", "", text).decode()
    store.set(f"{key}/{dist.get_rank()}", text)
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    if has_raised:
        store.wait(keys, _GRACE)
    return [json.loads(store.get(key)) for key in keys]
