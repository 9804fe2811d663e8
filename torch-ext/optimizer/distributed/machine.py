"""Has assumed speeds of computation and of links, and sizes of memory, by type of device.

Speeds are what a run reaches, not what a data sheet promises. They decide `hsdp="auto"` and the
times that `examples/plan.py` prints. No speed is measured, so that all ranks decide alike. Memory
is only a default here: ranks tell each other what they have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """One rank and its links.

    Args:
        flops: FLOP/s in orthogonalization.
        host_bytes: bytes/s that a rank sends to ranks of its host, while it receives as many.
        network_bytes: bytes/s that a rank sends to other hosts, while it receives as many.
        latency: seconds that a collective takes on top of the time for its bytes.
        ranks_per_host: how many consecutive global ranks share a host.
        memory: bytes of an accelerator's memory; staging and batches take shares of it.
    """

    flops: float
    host_bytes: float
    network_bytes: float
    latency: float
    ranks_per_host: int
    memory: float = 85e9

    def __post_init__(self) -> None:
        for name in ("flops", "host_bytes", "network_bytes", "ranks_per_host"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, found {getattr(self, name)!r}")
        if not 1 <= self.memory < 2**63:  # an integer that ranks tell each other
            raise ValueError(f"memory must be bytes, at least 1, found {self.memory!r}")
        if not self.latency >= 0:
            raise ValueError(f"latency must be ≥ 0, found {self.latency!r}")

    def host(self, rank: int) -> int:
        return rank // self.ranks_per_host


# By device type. "cuda" is hosts of eight H100s, linked by NVLink within a host, and by 400 Gbit/s
# for each H100 between hosts: two thirds of what these links can do, two fifths of the bf16 FLOP/s.
MACHINES = {
    "cuda": Machine(
        flops=400e12, host_bytes=300e9, network_bytes=33e9, latency=40e-6, ranks_per_host=8
    ),
    "cpu": Machine(flops=0.4e12, host_bytes=2e9, network_bytes=1e9, latency=1e-3, ranks_per_host=8),
}
DEFAULT_MACHINE = MACHINES["cuda"]


def memory_of(device: torch.device) -> float:
    """Bytes of an accelerator's memory; that of `DEFAULT_MACHINE` for a device that can't say."""
    properties_of = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    if device.type == "cpu" or properties_of is None:
        return DEFAULT_MACHINE.memory
    return float(getattr(properties_of(device), "total_memory", DEFAULT_MACHINE.memory))
