"""Rounds weights in bf16 so that small updates count: with a residual, or at random.

Half of the distance between two neighbours in bf16 is 2^-9 of a weight, and rounding to the nearest
takes away all of an update that is smaller. So weights are updated in fp32, and rounded as

    rounded = (bits + added) & 0xFFFF0000

where ``bits`` are those of the fp32 weight, and the parameter gets the upper half of ``rounded``.

``"exact"`` adds 0x8000, which rounds to the nearest, and ties away from zero. The state has the
residual, bits − rounded. It fits an int16, as it would not if ties went to even, and brings the
weight back bit by bit. What rounds above the largest number in bf16 is Inf in the parameter, and
comes back finite. In the state an int16 is two bytes along one more dimension, because NCCL and
gloo have no collectives for int16, by which checkpoints gather what is sharded.

``"stochastic"`` adds a random number of 16 bits, so that a weight is rounded away from zero with
the probability that makes its expectation right. Inf stays Inf; NaN is one NaN in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Callable, Union

import torch
from torch import Tensor

MODES = ("nearest", "exact", "stochastic")

# SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195), figure 16: the increment and
# the two multipliers, and how far each shifts.
GAMMA = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

# Of a key, below the one that is always set. Its counters are between 2^61 and 2^63 then, so that
# all of them are integers of the same type to a kernel.
_KEY_BITS = 61
_BLOCK = 1 << 20  # random numbers made at once, which take 8 bytes each


class Noise:
    """16 random bits for every element of a tensor, which a key and the element's place tell.

    Kernels take it for one more tensor, whose address is a counter.

    Args:
        key: of a parameter in a step, from `noise_key`.
        places: on the meta device, a view that has the tensor's shape, of a tensor with the shape
            of the whole parameter.
    """

    dtype = torch.int64

    def __init__(self, key: int, places: Tensor):
        self._key = key
        self._places = places
        self.shape = places.shape

    def again(self) -> Noise:
        """For another rounding in the same step."""
        return Noise(self._key ^ (1 << (_KEY_BITS - 1)), self._places)

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Noise:
        """That of a view of the tensor."""
        return Noise(self._key, view(self._places))

    def __getitem__(self, index: Any) -> Noise:
        return Noise(self._key, self._places[index])

    def unbind(self, dim: int) -> list[Noise]:
        return [Noise(self._key, places) for places in self._places.unbind(dim)]

    def expand(self, shape: torch.Size) -> Noise:
        assert shape == self.shape
        return self

    def stride(self) -> tuple[int, ...]:
        return self._places.stride()

    def data_ptr(self) -> int:
        return self._key + int(self._places.storage_offset())

    def draw(self, device: torch.device) -> Tensor:
        """The numbers, in [0, 2^16), int32."""
        counters = torch.tensor(self.data_ptr(), device=device)
        for dim, (size, stride) in enumerate(zip(self.shape, self.stride())):
            along = torch.arange(size, device=device).mul_(stride)
            counters = counters + along.view(-1, *[1] * (self._places.ndim - dim - 1))
        bits = counters * _signed(GAMMA)
        for shift, multiplier in MIX:
            bits = bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))
            bits = bits * _signed(multiplier)
        return ((bits >> 48) & 0xFFFF).to(torch.int32)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def noise_key(seed: int, step: int, name: str) -> int:
    """The key of a parameter in a step, the same on all machines and layouts."""
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << _KEY_BITS) - 1) | (1 << _KEY_BITS)


# What a weight is rounded by: its residual, int16 of its shape, or noise.
RoundedBy = Union[Tensor, Noise]


def as_int16(residual: Tensor) -> Tensor:
    """A view (…) of a residual as the state has it, (…, 2) in uint8."""
    return residual.view(torch.int16).squeeze(-1)


def widen(weights: Sequence[Tensor], rounded_by: Sequence[RoundedBy]) -> list[Tensor]:
    """Weights, which are in bf16, in fp32 with their residuals; new tensors."""
    exact = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
    torch._foreach_copy_(exact, list(weights))
    for weight, residual in zip(exact, rounded_by):
        if isinstance(residual, Tensor):
            weight.view(torch.int32).add_(residual)
    return exact


def round_into(
    exact: Sequence[Tensor], weights: Sequence[Tensor], rounded_by: Sequence[RoundedBy]
) -> None:
    """Rounds weights in fp32 into those in bf16, and writes residuals; ``exact`` is overwritten."""
    for wide, weight, by in zip(exact, weights, rounded_by):
        bits = wide.masked_fill_(wide.isnan(), torch.nan).view(torch.int32)
        added = bits + 0x8000 if isinstance(by, Tensor) else _add_noise(bits, by)
        rounded = added.bitwise_and_(-0x10000)
        if isinstance(by, Tensor):
            by.copy_(bits.sub_(rounded))
        weight.view(torch.int16).copy_(rounded.bitwise_right_shift_(16))


def _add_noise(bits: Tensor, noise: Noise) -> Tensor:
    """The sum, in memory of its own; few numbers are drawn at once, as they take much of it."""
    total = torch.empty_like(bits)
    if not bits.ndim:
        return torch.add(bits, noise.draw(bits.device), out=total)
    at_once = max(1, _BLOCK * len(bits) // max(1, bits.numel()))
    for start in range(0, len(bits), at_once):
        rows = slice(start, start + at_once)
        torch.add(bits[rows], noise[rows].draw(bits.device), out=total[rows])
    return total
