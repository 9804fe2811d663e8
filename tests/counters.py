"""What a step does, by counting: bytes on the wire, collectives, operations, memory.

Tests assert on these numbers and the benchmarks print them. Bytes are what a rank hands to the
network, its own piece not counted, with the formulas of bandwidth-optimal algorithms for P ranks:

    all-to-all              what its splits for other ranks hold
    all-gather of n bytes   n · (P − 1): its piece reaches every other rank
    reduce-scatter of n     n · (P − 1) / P: a partial sum for each piece of the others
    all-reduce of n         2 · n · (P − 1) / P: a reduce-scatter, then an all-gather
    broadcast of n          n · (P − 1), on its root

Seen is what passes torch's dispatcher: calls of `torch.distributed`, of process groups and of
DTensor. Of what goes straight to a backend, `count` sees the all-gathers of `ProcessGroupGloo`, by
which the hosts of this package compare notes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
SENDING_NOTHING = ("wait", "wrap", "check", "barrier", "recv")  # by a part of their names


@dataclass(frozen=True)
class Collective:
    """One call; `sent` are the bytes that leave this rank.

    `notes`: an all-gather of integers on the CPU, by which the hosts of ranks compare notes.
    """

    name: str
    ranks: int
    sent: float
    notes: bool


class Counter(TorchDispatchMode):
    """Counts while active. Operations on a DTensor are counted as those on its local tensors.

    Attributes:
        operations: how many torch operations were dispatched, views and collectives included.
        collectives: each one, in order.
        peak_bytes: the most that storages made meanwhile held at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.collectives: list[Collective] = []
        self.peak_bytes = 0
        self._bytes = 0
        self._known: dict[int, Any] = {}  # by identity, as long as the storage lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # seen again as operations on the tensors within
        kwargs = kwargs or {}
        self.operations += 1
        silent = any(part in func._opname for part in SENDING_NOTHING)
        if func.namespace in NAMESPACES and not silent:
            self.collectives.append(_collective(func, args, kwargs))
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, is_new=False)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._meet(tensor, is_new=True)
        return result

    @property
    def messages(self) -> list[Collective]:
        """All collectives but the notes of hosts."""
        return [c for c in self.collectives if not c.notes]

    @property
    def sent(self) -> float:
        return sum(c.sent for c in self.messages)

    def _meet(self, tensor: Tensor, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if is_new else 0
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _forget(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self._bytes -= size


class Operations(TorchDispatchMode):
    """The names of torch's operations while active, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class RefusesToRead(TorchDispatchMode):
    """Raises where values move between devices, or decide on a result's value or shape.

    Args:
        on_host: a number that only the host has, which may be read.
    """

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal")

    def __init__(self, on_host: Tensor | None = None) -> None:
        super().__init__()
        self.on_host = on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._opname not in self.READS or args[0] is self.on_host, func
        assert func._opname != "_to_copy" or "device" not in (kwargs or {}), func
        return func(*args, **(kwargs or {}))


def count(step: Callable[[], object]) -> Counter:
    """What one call does."""
    with Counter() as counter, _count_raw_gloo(counter):
        step()
    return counter


def calls_of(function: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how many Python functions it calls."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        return function(), calls
    finally:
        sys.setprofile(None)


def calls_by_file(function: Callable[[], Any], folder: Path) -> dict[str, int]:
    """How many Python functions of each file in a folder it calls."""
    calls: dict[str, int] = {}

    def count(frame: Any, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and folder in file.parents:
            name = str(file.relative_to(folder))
            calls[name] = calls.get(name, 0) + 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@contextmanager
def _count_raw_gloo(counter: Counter) -> Iterator[None]:
    backend: Any = getattr(dist, "ProcessGroupGloo", None)
    if backend is None:
        yield
        return
    alltoall = backend.alltoall_base

    def counted(group: Any, output: Any, given: Any, *rest: Any) -> Any:
        sent = _nbytes(given) * (group.size() - 1) / group.size()
        counter.collectives.append(Collective("raw_alltoall", group.size(), sent, _notes(given)))
        return alltoall(group, output, given, *rest)

    backend.alltoall_base = counted
    try:
        yield
    finally:
        backend.alltoall_base = alltoall


def _tensors(tree: Any) -> Iterator[Tensor]:
    """All that own memory: a wrapper's storage is none."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and not is_traceable_wrapper_subclass_type(type(leaf)):
            yield leaf


def _notes(tree: Any) -> bool:
    return not any(t.is_floating_point() or t.device.type != "cpu" for t in _tensors(tree))


def _nbytes(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(tree))


def _collective(func: Any, args: Any, kwargs: Any) -> Collective:
    named = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    group = _group(named)
    inputs = next(
        named[key]
        for key in ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors")
        if named.get(key) is not None
    )
    sent = _sent(func._opname, named, inputs, group)
    notes = _plain(func._opname).startswith(("allgather", "alltoall")) and _notes(inputs)
    return Collective(func._opname, group.size(), sent, notes)


def _sent(name: str, named: dict[str, Any], inputs: Any, group: dist.ProcessGroup) -> float:
    ranks, rank, n, kind = group.size(), group.rank(), _nbytes(inputs), _plain(name)
    if name == "alltoall_":  # the tensors of a list need not be equal
        return n - _nbytes(inputs[rank])
    if "alltoall" in kind:
        splits = named.get("input_split_sizes")
        return n - n * splits[rank] // max(1, sum(splits)) if splits else n * (ranks - 1) / ranks
    if "allgather" in kind:
        return n * (ranks - 1)
    if "allreduce" in kind:
        return 2 * n * (ranks - 1) / ranks
    if "reducescatter" in kind:
        return n * (ranks - 1) / ranks
    if "broadcast" in kind:
        return n * (ranks - 1) if rank == named.get("root_rank", named.get("src")) else 0
    raise NotImplementedError(f"no formula for the bytes of {name}")


def _plain(name: str) -> str:
    """torch writes `allgather_`, `_allgather_base_` and `all_gather_into_tensor`."""
    return name.replace("_", "")


def _group(named: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"])
    group = named["group_name"]
    return group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)
