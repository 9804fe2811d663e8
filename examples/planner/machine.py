"""What a run reaches: speeds of arithmetic and of links, by type of device. None was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One rank and its links.

    Args:
        flops: FLOP/s in orthogonalization.
        host_bytes: bytes/s that a rank sends to ranks of its host, while it receives as many.
        network_bytes: bytes/s that a rank sends to other hosts, while it receives as many.
        latency: seconds that a collective takes on top of the time for its bytes.
        ranks_per_host: how many consecutive global ranks share a host.
    """

    flops: float
    host_bytes: float
    network_bytes: float
    latency: float
    ranks_per_host: int


# "cuda" is hosts of eight H100s, linked by NVLink within a host, and by 400 Gbit/s for each H100
# between hosts: two thirds of what these links can do, two fifths of the bf16 FLOP/s.
MACHINES = {
    "cuda": Machine(
        flops=400e12, host_bytes=300e9, network_bytes=33e9, latency=40e-6, ranks_per_host=8
    ),
    "cpu": Machine(flops=0.4e12, host_bytes=2e9, network_bytes=1e9, latency=1e-3, ranks_per_host=8),
}
DEFAULT_MACHINE = MACHINES["cuda"]
