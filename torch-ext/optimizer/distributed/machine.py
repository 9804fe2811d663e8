"""Assumes speeds of computation and of links, by type of device.

The figures are what a run reaches, not what a data sheet promises. They decide `hsdp="auto"` and
the times that `examples/plan.py` prints; nothing is measured, so that all ranks decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One rank and its links.

    Args:
        flops: FLOP/s in orthogonalization.
        host_bytes: bytes/s that a rank sends to ranks of its host, while it receives as many.
        network_bytes: bytes/s that a rank sends to other hosts, while it receives as many.
        latency: seconds that a collective takes beside its bytes.
        ranks_per_host: consecutive global ranks that share a host.
    """

    flops: float
    host_bytes: float
    network_bytes: float
    latency: float
    ranks_per_host: int

    def __post_init__(self) -> None:
        for name in ("flops", "host_bytes", "network_bytes", "ranks_per_host"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, found {getattr(self, name)!r}")
        if not self.latency >= 0:
            raise ValueError(f"latency must be ≥ 0, found {self.latency!r}")

    def host(self, rank: int) -> int:
        return rank // self.ranks_per_host


# By device type. "cuda" is eight H100s to a host, with NVLink within it and 400 Gbit/s for each of
# them out of it: two thirds of what either link could do, and half of the bf16 FLOPs.
MACHINES = {
    "cuda": Machine(
        flops=400e12, host_bytes=300e9, network_bytes=33e9, latency=40e-6, ranks_per_host=8
    ),
    "cpu": Machine(flops=0.4e12, host_bytes=2e9, network_bytes=1e9, latency=1e-3, ranks_per_host=8),
}
DEFAULT_MACHINE = MACHINES["cuda"]
