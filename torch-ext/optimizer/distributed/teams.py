"""Estimates how many peers should own a matrix together, each a slice of it.

If there are more ranks than matrices, ranks idle, and the costliest matrix sets the time of a step.
In a team of k each member gathers, multiplies and scatters a slice, in 1/k of the time. But all
members repeat the products of s × s matrices, and the team sums such a matrix in each segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .machine import Machine
from .rounds import Partition, UnitCost
from .staging import Staging
from .units import Entry, Unit

# Teams that `owners_per_matrix="auto"` tries.
TEAM_SIZES = (1, 2, 4, 8)

# "auto" prefers slices if they take at most this share of the estimated time of whole matrices.
WORTHWHILE = 0.9

UnitsByCost = dict[UnitCost, list[Unit]]  # the units that a peer owns


def fastest(seconds: Callable[[int], float], peers: int) -> int:
    """The size of teams that takes the least ``seconds``; 1 unless another size is much faster."""
    sizes = (size for size in TEAM_SIZES if peers % size == 0)
    return min(sizes, key=lambda size: seconds(size) * (WORTHWHILE if size == 1 else 1.0))


def estimated_seconds(
    staging: Staging, queues: Sequence[UnitsByCost], partition: Partition, machine: Machine
) -> float:
    """The estimated time of a lane's orthogonalization and traffic, which overlap except for one
    chunk.

    Args:
        staging: of the lane.
        queues: what each peer owns.
        partition: of the queues.
        machine: the machine to estimate for.
    """
    channel, rounds = staging.channel, len(partition.rounds)
    peers, size = channel.peers, channel.team_size
    hosts = [machine.host(rank) for rank in peers]
    compute = partition.makespan / machine.flops
    if size > 1:
        are_within = all(hosts[at] == hosts[at - at % size] for at in range(len(hosts)))
        speed = machine.host_bytes if are_within else machine.network_bytes
        summed = max(summed_bytes(staging.entries, queue) for queue in queues[::size])
        # After the norms, one matrix of each batch is summed in each segment: about four calls.
        compute += 2 * (size - 1) / size * summed / speed + 4 * rounds * machine.latency
    # Consecutive ranks fill hosts, so only the first and the last host may have fewer peers.
    same_host = max(map(hosts.count, {hosts[0], hosts[-1]})) / len(peers)
    gathered = sum(max(most, total / len(peers)) for most, total in partition.gathered)
    moved = (1 + staging.mean_replicas) * gathered
    wire = moved * (1 - same_host) / machine.network_bytes
    wire = max(wire, moved * (same_host - 1 / len(peers)) / machine.host_bytes)
    return max(compute, wire) + min(compute, wire) / rounds + 2 * rounds * machine.latency


def summed_bytes(entries: Sequence[Entry], queue: UnitsByCost) -> int:
    """Bytes of the Gram matrices that a team sums in a step, by the queue of one member."""
    total = 0
    for unit in (unit for alike in queue.values() for unit in alike):
        recipe, block = entries[unit.entry].recipe, unit.block
        sums = len(recipe.form(block.rows, block.cols, True).segments)
        total += unit.count * sums * min(block.rows, block.cols) ** 2 * recipe.dtype.itemsize
    return total
