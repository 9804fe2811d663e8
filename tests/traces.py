"""What steps put on the wire, collective by collective: names, ranks, sizes and order.

A test with the fixture ``traced`` has every step of its ranks recorded, and a digest of it compared
with the one in traces.json. ``TRACES=new`` writes that file anew; ``TRACES=DIRECTORY`` writes whole
traces there, with hashes of weights and state behind each step, to be compared with those of
another revision on the same machine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

DIGESTS = Path(__file__).parent / "traces.json"

BITS = "bits"

Trace = list[str]  # of one rank


# Collectives of torch.distributed, under any name that a version of it has for them.
COLLECTIVES = {
    **dict.fromkeys(("all_gather_single", "all_gather_into_tensor"), "all_gather"),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), "reduce_scatter"),
    **{name: name for name in ("all_to_all_single", "all_reduce", "broadcast")},
}


@contextlib.contextmanager
def recorded_in(lines: Trace) -> Iterator[None]:
    """Notes collectives while it lasts: far cheaper than a mode that sees all operations."""
    with contextlib.ExitStack() as patches:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                noted = _noted(name, getattr(dist, name), lines)
                patches.enter_context(patch.object(dist, name, noted))
        yield


def _noted(name: str, collective: Callable[..., Any], lines: Trace) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def noted(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(*args, **kwargs).arguments
        ranks = dist.get_process_group_ranks(named.get("group") or dist.group.WORLD)
        tensors = [v for v in named.values() if isinstance(v, torch.Tensor)]
        sizes = [f"{str(t.dtype)[6:]}[{t.numel()}]" for t in tensors]
        splits = [str(list(v)) for key, v in named.items() if key.endswith("split_sizes")]
        lines.append(" ".join([COLLECTIVES[name], f"ranks {ranks}", *sizes, *splits]))
        return collective(*args, **kwargs)

    return noted


def record(optimizer: type, lines: Trace) -> None:
    """From now on, has all steps of a class of optimizers recorded in this process."""
    step = optimizer.step

    @functools.wraps(step)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        lines.append("step")
        with recorded_in(lines):
            result = step(self, *args, **kwargs)
        if os.environ.get("TRACES", "new") != "new":
            lines.append(f"{BITS} {_bits(self)}")
        return result

    optimizer.step = recorded


def _bits(optimizer: Any) -> str:
    """A hash of what this rank holds of weights and state."""
    optimizer.synchronize_offload()
    digest = hashlib.sha256()
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(param, {})
        for tensor in (param, *(state[key] for key in sorted(state))):
            held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            held = held.detach().cpu().contiguous()
            digest.update(held.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class Traced:
    """The traces of all ranks that a test has run."""

    current: Traced | None = None

    def __init__(self) -> None:
        self.traces: list[Mapping[int, Trace]] = []

    def compare(self, test: str) -> None:
        """With what is known of the test.

        Raises:
            AssertionError: they are others.
        """
        text = "".join(
            f"run {number}, rank {rank}\n" + "".join(f"  {line}\n" for line in run[rank])
            for number, run in enumerate(self.traces)
            for rank in sorted(run)
        )
        wanted = os.environ.get("TRACES", "")
        if not text or not (DIGESTS.exists() or wanted):  # a builder takes no data along
            return
        if wanted not in ("", "new"):
            path = Path(wanted, re.sub(r"[^\w.=,-]+", "_", test))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
        if wanted == "new":
            known[test] = digest
            DIGESTS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
        assert known.get(test) == digest, (
            "other collectives, of other sizes, or in another order, than known: where that is "
            "meant, TRACES=new; TRACES=DIRECTORY shows them"
        )


@pytest.fixture
def traced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compares what the steps of this test send with what is known of it."""
    Traced.current = Traced()
    try:
        yield
        found = Traced.current
    finally:
        Traced.current = None
    found.compare(f"{request.path.stem}::{request.node.name}")
