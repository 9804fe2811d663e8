"""Page-locked host memory for state: few large segments, cut into tensors.

torch rounds every page-locked allocation up to a power of two. So ordinary memory is allocated, to
the byte, and registered with the device's driver where it has a call for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Where tensors begin, in bytes; what lies between two neighbours is nobody's.
PADDED_TO = 64


class Arena:
    """Host memory of the state of an optimizer."""

    def __init__(self, device: torch.device):
        self.device = device

    def allocate(self, nbytes: Sequence[int]) -> list[Tensor]:
        """Zeroed bytes, one tensor with a storage of its own for each, neighbours in memory."""
        raise NotImplementedError

    def span(self, address: int, nbytes: int) -> Tensor:
        """The bytes of an interval that may go over several of the arena's tensors."""
        raise NotImplementedError
