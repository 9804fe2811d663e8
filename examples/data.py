"""Text that every machine has: the sources of Python's standard library, as bytes.

Whole files are held out for validation, so nothing of them is seen in training. Sampling holds no
state: the batch of a step follows from (seed, step) alone, which is why resuming a run needs no
position in the data to be saved, and why it is the same text on any number of ranks.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 8 << 20
HELD_OUT_EVERY = 20  # one file of twenty: about 5 %
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@lru_cache(maxsize=1)
def load_corpus() -> tuple[Tensor, Tensor]:
    """The training and the validation bytes, two 1-D uint8 tensors."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for i, path in enumerate(_source_files(root)):
        room = MAX_BYTES - sum(map(len, parts))
        if room <= 0:
            break
        held_out = i % HELD_OUT_EVERY == 0
        parts[held_out].extend(path.read_bytes()[:room])
    if not all(parts):
        raise RuntimeError(f"no Python sources to train on under {root}")
    train, val = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return train, val


def train_batch(
    text: Tensor, batch: int, seq_len: int, seed: int, step: int, rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """This rank's rows of a step's batch: inputs and next bytes, (batch / world_size, seq_len)."""
    # A CPU generator keeps 32 bits of its seed: hash, so that (seed, step) pairs don't overlap.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{step}".encode()))
    starts = torch.randint(len(text) - seq_len, (batch,), generator=generator)
    return _windows(text, starts.chunk(world_size)[rank], seq_len)


def val_batches(
    text: Tensor, batch: int, seq_len: int, count: int, rank: int, world_size: int
) -> list[tuple[Tensor, Tensor]]:
    """This rank's rows of `count` fixed batches, spread evenly over the validation text."""
    starts = torch.linspace(0, len(text) - seq_len - 1, batch * count).long()
    return [_windows(text, s.chunk(world_size)[rank], seq_len) for s in starts.chunk(count)]


def _source_files(root: Path) -> list[Path]:
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED  # in place: os.walk then stays out of them
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _windows(text: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    rows = text[starts[:, None] + torch.arange(seq_len + 1)].long()
    return rows[:, :-1], rows[:, 1:]
