"""Rounds bf16 weights so that small updates count: with a residual, or at random.

Half the distance between neighboring bf16 numbers is at least 2^-9 of a weight, and rounding to
nearest loses every smaller update. So weights are updated in fp32, and rounded as

    rounded = (bits + added) & 0xFFFF0000

where ``bits`` are those of the fp32 weight. The parameter gets the upper half of ``rounded``.

``"exact"`` adds 0x8000, which rounds to nearest, ties away from zero. The state stores the
residual, bits − rounded, which restores the fp32 weight bit for bit. The residual fits an int16; it
wouldn't with ties to even. A weight that rounds to above the largest bf16 number is Inf in the
parameter, and finite again when it is restored. The state stores each int16 as two bytes along an
extra dimension: checkpoints gather shards, and NCCL and gloo have no collectives for int16.

``"stochastic"`` adds a random number of 16 bits, so that a weight is rounded away from zero with
the probability that makes the expected rounded weight equal to the weight.

In both modes Inf stays Inf, and every NaN becomes the same NaN.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Union

import torch
from torch import Tensor

MODES = ("nearest", "exact", "stochastic")

# SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195), figure 16: the increment, then
# the shift and multiplier of each of two rounds.
GAMMA = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

# Bits of a key below its highest bit, which is always set. Counters then lie between 2^61 and 2^63,
# so that Triton gives all of them the same integer type.
_KEY_BITS = 61
_SEED = 0
_BLOCK = 1 << 20  # random numbers to draw at once; each needs 8 bytes


class RandomBits(NamedTuple):
    """Determines the 16 random bits of each element of a tensor; `draw` computes them.

    An element's counter is the key plus the element's place in the whole parameter.

    Args:
        key: the `random_key` of a parameter in a step.
        places: a view, on the meta device, of a tensor with the shape of the whole parameter. It
            has the shape of the tensor to round; its strides and offset give the places.
    """

    key: int
    places: Tensor

    @property
    def first_counter(self) -> int:
        """The counter of the element with index 0 in all dimensions."""
        return self.key + int(self.places.storage_offset())

    def again(self) -> RandomBits:
        """Returns other random bits, for a second rounding of the tensor in the same step."""
        return self._replace(key=self.key ^ (1 << (_KEY_BITS - 1)))


def random_key(step: int, name: str) -> int:
    """Returns the key of a parameter in a step, the same on all machines and layouts."""
    digest = hashlib.blake2b(f"{_SEED} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << _KEY_BITS) - 1) | (1 << _KEY_BITS)


def draw(bits: RandomBits, device: torch.device) -> Tensor:
    """Returns random numbers in [0, 2^16), an int32 tensor with the shape of ``bits.places``."""
    places = bits.places
    counters = torch.tensor(bits.first_counter, device=device)
    for dim, (size, stride) in enumerate(zip(places.shape, places.stride())):
        along = torch.arange(size, device=device).mul_(stride)
        counters = counters + along.view(-1, *[1] * (places.ndim - dim - 1))
    mixed = counters * _signed(GAMMA)
    for shift, multiplier in MIX:
        mixed = mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))
        mixed = mixed * _signed(multiplier)
    return ((mixed >> 48) & 0xFFFF).to(torch.int32)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# What rounds a weight: its residual, an int16 tensor of the weight's shape, or random bits.
RoundedBy = Union[Tensor, RandomBits]


def as_int16(residual: Tensor) -> Tensor:
    """Views a residual from the state, (…, 2) in uint8, as int16, (…)."""
    return residual.view(torch.int16).squeeze(-1)


def widen(weights: Sequence[Tensor], rounded_by: Sequence[RoundedBy]) -> list[Tensor]:
    """Copies bf16 weights to new fp32 tensors, and adds their residuals, if they have any."""
    widened = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
    torch._foreach_copy_(widened, list(weights))
    for weight, residual in zip(widened, rounded_by):
        if isinstance(residual, Tensor):
            weight.view(torch.int32).add_(residual)
    return widened


def round_into(
    widened: Sequence[Tensor], weights: Sequence[Tensor], rounded_by: Sequence[RoundedBy]
) -> None:
    """Rounds fp32 tensors into bf16 weights; writes the residuals, and overwrites ``widened``."""
    for wide, weight, by in zip(widened, weights, rounded_by):
        bits = wide.masked_fill_(wide.isnan(), torch.nan).view(torch.int32)
        added = bits + 0x8000 if isinstance(by, Tensor) else _add_random(bits, by)
        rounded = added.bitwise_and_(-0x10000)
        if isinstance(by, Tensor):
            by.copy_(bits.sub_(rounded))
        weight.view(torch.int16).copy_(rounded.bitwise_right_shift_(16))


def _add_random(bits: Tensor, by: RandomBits) -> Tensor:
    """Returns ``bits`` plus random bits, drawn in blocks since each element needs 8 bytes."""
    total = torch.empty_like(bits)
    if not bits.ndim:
        return torch.add(bits, draw(by, bits.device), out=total)
    at_once = max(1, _BLOCK * len(bits) // max(1, bits.numel()))
    for start in range(0, len(bits), at_once):
        rows = slice(start, start + at_once)
        drawn = draw(by._replace(places=by.places[rows]), bits.device)
        torch.add(bits[rows], drawn, out=total[rows])
    return total
