"""Runs a check on the ranks that there are, or on CPU ranks that it starts; exchanges findings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

_TIMEOUT = timedelta(minutes=5)  # until the others end where one rank has died
_exchanges = itertools.count()  # the same number on all ranks, which exchange in the same order


def run_on_ranks(check: Callable[..., Any], arguments: tuple[Any, ...], ranks: int) -> Any:
    """What ``check(*arguments)`` returns on rank 0: plain data, as JSON has it.

    It runs in this process where a process group is initialized or torchrun has started ranks.
    Otherwise ``ranks`` processes are started for it, which meet over gloo on the CPU. They import
    the main script, then unpickle the arguments.
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
    start_processes(_run_rank, whole, nprocs=ranks, start_method="spawn")
    return json.loads(store.get("result"))


def _run_rank(rank: int, ranks: int, port: int, check: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    result = check(*arguments)
    if rank == 0:
        store.set("result", json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def gather_json(value: Any) -> list[Any]:
    """The values of all ranks, in order, as JSON has them."""
    store, key = dist.distributed_c10d._get_default_store(), f"selfcheck/{next(_exchanges)}"
    store.set(f"{key}/{dist.get_rank()}", json.dumps(value))
    return [json.loads(store.get(f"{key}/{rank}")) for rank in range(dist.get_world_size())]
