"""Connects the hosts of ranks over gloo, with few connections each, and gathers tensors over them.

A gloo group opens a socket for every pair of its ranks, so groups here have at most eight ranks.
"""

from __future__ import annotations

import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .process_groups import GroupCache, key_of_ranks, world_timeout

Ranks = tuple[int, ...]  # global and ascending

# For error messages: how hosts reach each other, and how to change that.
_ROUTE = (
    "hosts compare notes over gloo, by the network interface that GLOO_SOCKET_IFNAME names, or "
    "the interface of the host's name if it is not set; on every rank set it to an interface that "
    "reaches the other hosts (`ip -br addr` lists them)"
)

_GROUP = 8  # ranks: as many as commonly share a host, which then needs one group

_NO_PROBLEM = "none"  # what a rank without a problem writes to the store


class NoConnection(RuntimeError):
    """Gloo can't connect the ranks, although all of them have arrived; the text says why."""


_cache = GroupCache()  # what `_connect` returned for each set of ranks


def close_connections(ranks: Ranks) -> None:
    """Closes the connections of ``ranks``, if there are any."""
    _cache.pop(ranks, {}).clear()


def all_gather(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Gathers CPU tensors of one shape from all ``ranks``, in order: (ranks, *shape).

    The connections have no other users: a group shared with, for example, a checkpoint saved in the
    background would need the same order of calls on all ranks. `dist.new_group` names groups by how
    many a rank is in, so ranks in different numbers of groups would wait for each other.

    Raises:
        RuntimeError: a rank didn't arrive, or gloo can't connect the ranks.
    """
    cache = _cache.current()
    try:
        if ranks not in cache:
            cache[ranks] = _connect(ranks)
        return _gather(tensor, cache[ranks], len(ranks))
    except NoConnection as error:
        raise RuntimeError(str(error)) from error.__cause__
    except RuntimeError as error:
        raise RuntimeError(
            f"ranks {list(ranks)} have to call step() together, but one of them didn't within "
            f"{world_timeout()}, or failed, or has consistency_check='off', or has 'plan' while "
            f"options were changed on other ranks only: {error}"
        ) from error


def _gather(tensor: Tensor, groups: dict[int, Any], size: int) -> Tensor:
    """Gathers tensors over a tree of groups that `_connect` made for ``size`` ranks.

    On the way up, the ranks of each group exchange what they have gathered; on the way down, the
    first rank of each group sends the others everything. No variable refers to a group, because the
    traceback of an error would then keep the group open.
    """
    gathered = tensor[None]  # (distance, *shape)
    for distance in groups:
        members = groups[distance].size()
        # An all-to-all sends at once; gloo's all-gather passes tensors hop by hop around a ring.
        copies = gathered.expand(members, *gathered.shape).contiguous()
        blocks = min(_GROUP, -(-size // distance))  # the last group may have fewer members
        gathered = gathered.new_zeros((blocks, *gathered.shape))
        groups[distance].alltoall_base(gathered[:members], copies, [], []).wait()
        gathered = gathered.flatten(0, 1)
    if len(gathered) < size:
        gathered = tensor.new_empty((size, *tensor.shape))
    for distance in reversed(groups):
        if distance * _GROUP < size:  # there is a group above
            groups[distance].broadcast(gathered[:size], 0).wait()
    return gathered[:size]


def _connect(ranks: Ranks) -> dict[int, Any]:
    """Makes this rank's gloo groups, by the distance of their members: eight consecutive ranks, the
    first ranks of eight such groups, and so on, up to the group that connects all."""
    size, index = len(ranks), ranks.index(dist.get_rank())
    store, options = _meet(ranks, index)
    groups: dict[int, Any] = {}
    distance = 1
    try:
        while distance < size and index % distance == 0:
            first, above = index - index % (distance * _GROUP), distance * _GROUP
            members = range(first, min(first + above, size), distance)
            group_store = dist.PrefixStore(f"{distance}-{first}", store)
            groups[distance] = dist.ProcessGroupGloo(
                group_store, members.index(index), len(members), options
            )
            distance = above
        _gather(torch.zeros(1, device="cpu"), groups, size)  # gloo may connect lazily
    except BaseException as error:
        groups.clear()
        if not isinstance(error, RuntimeError):
            raise
        raise NoConnection(
            f"ranks {list(ranks)} have all come to step(), but rank {ranks[index]} could not "
            f"connect with them, or one of them ended: {_ROUTE}: {error}"
        ) from error
    return groups


def _meet(ranks: Ranks, index: int) -> tuple[Any, Any]:
    """Waits until all ``ranks`` have arrived. Returns their store, and options for gloo groups.

    If gloo has no interface on one rank, all raise. The store may have addresses of earlier groups
    of the same name, so the first rank draws a random name, and deletes it once all have arrived or
    one is late. Groups share one gloo device, since each device listens on a socket.
    """
    world_store, timeout = dist.distributed_c10d._get_default_store(), world_timeout()
    key, problem = f"optimizer-agreement/{key_of_ranks(ranks)}", _NO_PROBLEM
    options: Any = None
    try:
        if index == 0:
            world_store.set(key, uuid.uuid4().hex)
        world_store.wait([key], timeout)
        name = world_store.get(key).decode()
        store = dist.PrefixStore(f"optimizer-agreement/{name}", world_store)
        try:
            options = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout).options  # a lone group
            options._threads = 1  # for one operation at a time
        except RuntimeError as error:
            problem = f"rank {ranks[index]} has no network: {_ROUTE}: {error}"
        store.set(f"came/{index}", problem)
        if index == 0:
            came = [f"came/{other}" for other in range(len(ranks))]
            store.wait(came, timeout)
    finally:
        if index == 0:
            world_store.delete_key(key)
    if index == 0:
        problems = (store.get(key).decode() for key in came)
        store.set("verdict", next((p for p in problems if p != _NO_PROBLEM), _NO_PROBLEM))
    store.wait(["verdict"], timeout)
    verdict = store.get("verdict").decode()
    if verdict != _NO_PROBLEM:
        raise NoConnection(verdict)
    return store, options
