"""Connects the hosts of ranks over gloo, with few connections each, and gathers tensors over them.

A gloo group connects every pair of its ranks: in a group of 1,024 each rank would open 1,023
sockets, and read as many addresses from one store. So groups of this module have at most eight
ranks.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .utils import GroupCache, key_of_ranks, world_timeout

Ranks = tuple[int, ...]  # global and ascending

# What errors say of the way between hosts, and how to change it.
_ROUTE = (
    "hosts compare notes over gloo, by the network interface that GLOO_SOCKET_IFNAME names, or "
    "that of the host's name where it is not set; on every rank set it to an interface that "
    "reaches the other hosts (`ip -br addr` lists them)"
)

# What a rank without a problem writes to the store.
_NO_PROBLEM = "none"


class NoConnection(RuntimeError):
    """Gloo can't connect the ranks, although all of them have come; its text says why."""


# Ranks of a group, a power of two: as many as commonly share a host, which then needs one round.
_GROUP = 8


class Connections:
    """Gathers tensors of all ranks in rounds, each in small groups.

    The groups of the first round are eight consecutive ranks each. A group of the second round has
    one rank of each of eight such groups, and so on: in each round a rank exchanges what it has
    gathered with ranks that have gathered from other ranks. The groups of the last round have two,
    four or eight ranks.

    If the number of ranks is no power of two, only the first 2^k ranks take part in rounds, as many
    as possible. Each further rank hands its tensor to a proxy, the rank 2^k places before it, and
    gets the result from there.

    Args:
        size: how many ranks.
        index: of this rank.
        connect: makes a gloo group of some indices, ascending.
    """

    def __init__(self, size: int, index: int, connect: Callable[[Sequence[int]], Any]):
        self._size, self._index = size, index
        self._power = 1 << (size.bit_length() - 1)
        self._groups: dict[int, Any] = {}  # by distance of members; at 0, a rank and its proxy
        proxy, distance = index % self._power, 1
        try:
            # In the order of use, in which no two ranks block each other.
            if proxy + self._power < size:
                self._groups[0] = connect((proxy, proxy + self._power))
            while index < self._power and distance < self._power:
                stop = distance * min(_GROUP, self._power // distance)
                first = index - index % stop + index % distance
                self._groups[distance] = connect(range(first, first + stop, distance))
                distance = stop
            self.all_gather(torch.zeros(1, device="cpu"))  # gloo may connect lazily
        except BaseException:
            self.close()
            raise

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gathers tensors of one shape from all ranks: (ranks, *shape), in order."""
        # Blocks are (ranks, 1 or 2, *shape); the 2 are a rank's tensor, and the one it is proxy of.
        has_proxies = self._size > self._power
        gathered = tensor.expand(1, 1 + has_proxies, *tensor.shape)
        if 0 in self._groups:
            gathered = self._exchange(0, tensor[None])[None]
        for distance in filter(None, self._groups):
            gathered = self._exchange(distance, gathered)
        if self._index >= self._power:
            gathered = tensor.new_empty((self._power, 2, *tensor.shape))
            self._groups[0].recv([gathered], 0, 0).wait()
        elif 0 in self._groups:
            self._groups[0].send([gathered], 1, 0).wait()
        return gathered.transpose(0, 1).flatten(0, 1)[: self._size]

    def _exchange(self, distance: int, block: Tensor) -> Tensor:
        """The blocks of all ranks of a group, in order, joined in the first dimension.

        The group is looked up each time. A local variable would live on in the traceback of an
        error, and keep the group open after `close`.
        """
        gathered = block.new_empty((self._groups[distance].size(), *block.shape))
        # An all-to-all sends at once; gloo's all-gather passes tensors hop by hop around a ring.
        copies = block.expand_as(gathered).contiguous()
        self._groups[distance].alltoall_base(gathered, copies, [], []).wait()
        return gathered.flatten(0, 1)

    def close(self) -> None:
        self._groups.clear()


_cache = GroupCache()


def close_connections(ranks: Ranks) -> None:
    """Closes the connections of ``ranks``, if there are any."""
    connections = _cache.pop(ranks, None)
    if connections is not None:
        connections.close()


def connections_of(ranks: Ranks) -> Connections:
    """Connections between ``ranks`` for comparisons only; other ranks take no part in making them.

    A group with other users, such as the default one, would have to be used in the same order on
    all ranks, but a checkpoint that is saved in the background uses the default one at any time.

    `dist.new_group` names a group by how many groups a rank is in already, so ranks in different
    numbers of groups would wait for each other under different names. Here the first of ``ranks``
    draws a name. The store may outlive the process group, and gloo would read addresses of earlier
    groups of the same name. So each name is new, and is deleted once all ranks have come, or one
    did not.

    Raises:
        NoConnection: all ranks have come, but gloo can't connect them.
        RuntimeError: a rank did not come.
    """
    cache = _cache.current()
    if ranks in cache:
        return cache[ranks]
    store, timeout = dist.distributed_c10d._get_default_store(), world_timeout()
    key = f"optimizer-agreement/{key_of_ranks(ranks)}"
    index = ranks.index(dist.get_rank())
    if index == 0:
        store.set(key, uuid.uuid4().hex)
    try:
        store.wait([key], timeout)
        prefixed = dist.PrefixStore(f"optimizer-agreement/{store.get(key).decode()}", store)
        options = _meet(prefixed, index, len(ranks), timeout, lambda: store.delete_key(key))
    finally:
        if index == 0:
            store.delete_key(key)

    def connect(indices: Sequence[int]) -> Any:
        group_store = dist.PrefixStore("-".join(map(str, indices)), prefixed)
        return dist.ProcessGroupGloo(group_store, indices.index(index), len(indices), options)

    try:
        cache[ranks] = Connections(len(ranks), index, connect)
    except RuntimeError as error:
        raise NoConnection(
            f"ranks {list(ranks)} have all come to step(), but rank {ranks[index]} could not "
            f"connect with them, or one of them ended meanwhile: {_ROUTE}: {error}"
        ) from error
    return cache[ranks]


def _meet(store: Any, index: int, size: int, timeout: timedelta, forget: Callable[[], Any]) -> Any:
    """Waits until ``size`` ranks have come; if gloo has no interface on one of them, all raise.

    Gloo itself would raise on that rank only, while the others wait for its address. The first rank
    calls ``forget`` before any rank goes on, so that no rank reads a used name again.

    Returns:
        Options for gloo groups, which share one device: each device listens on a socket.
    """
    problem = _NO_PROBLEM
    options: Any = None
    try:
        options = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout).options  # a group of one
        options._threads = 1  # for one operation at a time
    except RuntimeError as error:
        problem = f"rank {dist.get_rank()} has no network: {_ROUTE}: {error}"
    store.set(f"came/{index}", problem)
    if index == 0:
        came = [f"came/{other}" for other in range(size)]
        store.wait(came, timeout)
        problems = (store.get(key).decode() for key in came)
        forget()
        first_problem = next((text for text in problems if text != _NO_PROBLEM), _NO_PROBLEM)
        store.set("verdict", first_problem)
    store.wait(["verdict"], timeout)
    verdict = store.get("verdict").decode()
    if verdict != _NO_PROBLEM:
        raise NoConnection(verdict)
    return options
