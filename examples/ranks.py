"""The processes of a run: joined by torchrun, or a single one under plain `python`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


def launch(main: Callable[[], None]) -> None:
    """Runs `main` on every rank, and ends the process."""
    with process_group():
        main()
    if dist.is_torchelastic_launched():
        # Shutting the interpreter down sometimes aborts after gloo was used ("terminate called
        # without an active exception"), and torchrun would report the finished run as failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def process_group() -> Iterator[None]:
    """Joins the ranks that torchrun started; under plain `python` there is nothing to join."""
    if not dist.is_torchelastic_launched():
        yield
        return
    device = pick_device()
    backend = dist.get_default_backend_for_device(device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
        backend = f"cpu:gloo,{device.type}:{backend}"  # gloo for messages between hosts
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()


def pick_device() -> torch.device:
    """This process's accelerator if there is one for each process, else the CPU."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < local_ranks:
        return torch.device("cpu")
    if accelerator.type == "mps":  # has neither an index nor collectives
        return torch.device("cpu") if dist.is_torchelastic_launched() else accelerator
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", 0)))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
    return value.item() / world_size()


def max_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
