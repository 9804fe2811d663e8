"""Counts what steps give an accelerator that isn't there: launches, operations, collectives.

Run as a program, without TRITON_INTERPRET: prints, as JSON, the `Facts` of the `CASES` named.

The package takes the path that it takes on an H100, kernels, fp16 and sizes of chunks included:
tensors are those of `fake_device`, of their real shapes, in memory that nothing touches; Triton
launches to a stub of the driver; a process group of torch's own, whose collectives move nothing,
stands in for the other ranks.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

import stub_driver
from fake_device import CUDA, Device, Fake, fake_device
from kernel import optimizer
from lone_rank import lone_rank

EXPERTS = ("experts",)

Shapes = dict[str, tuple[int, ...]]

# Neither a kernel nor a copy.
ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach")

# Numbers of matrices, one for each, are not accessed in vectors: arguments of kernels by name, and
# small tensors of torch's operations.
NUMBERS = ("partials", "sizes", "divided_by", "factor", "alpha", "beta")
NUMBERS_BYTES = 1024


def of_layers(layers: int, vocabulary: int, dim: int, shapes: Shapes) -> Shapes:
    model = {"embed_tokens.weight": (vocabulary, dim), "norm.weight": (dim,)}
    for layer in range(layers):
        model |= {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}
    return model | {"lm_head.weight": (vocabulary, dim)}


def llama_8b(layers: int = 32) -> Shapes:
    rows = {"q": 4096, "k": 1024, "v": 1024, "o": 4096, "gate": 14336, "up": 14336}
    shapes: Shapes = {f"{name}_proj.weight": (count, 4096) for name, count in rows.items()}
    shapes |= {"down_proj.weight": (4096, 14336)}
    shapes |= {f"{name}_layernorm.weight": (4096,) for name in ("input", "post_attention")}
    return of_layers(layers, 128256, 4096, shapes)


def experts_30b() -> Shapes:
    """Shapes of Qwen3-30B-A3B: 128 experts a layer, 16 on each of 8 ranks."""
    shapes: Shapes = {f"{name}_proj.weight": (512, 2048) for name in ("k", "v")}
    shapes |= {"q_proj.weight": (4096, 2048), "o_proj.weight": (2048, 4096)}
    shapes |= {"q_norm.weight": (128,), "k_norm.weight": (128,), "gate.weight": (128, 2048)}
    shapes |= {f"experts.{name}_proj": (128, 768, 2048) for name in ("gate", "up")}
    shapes |= {"experts.down_proj": (128, 2048, 768)}
    shapes |= {f"{name}_layernorm.weight": (2048,) for name in ("input", "post_attention")}
    return of_layers(48, 151936, 2048, shapes)


def small_matrices() -> Shapes:
    return {f"layers.{number}.weight": (64, 64) for number in range(1000)}


@dataclass(frozen=True)
class Case:
    """A model under FSDP2, as rank 0 of so many has it, and how many steps it takes."""

    shapes: Callable[[], Shapes]
    ranks: int
    steps: int = 2
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama-3-8b, rank 0 of 8": Case(llama_8b, 8),
    "llama-3-8b, rank 0 of 64": Case(llama_8b, 64),
    "30B of experts, rank 0 of 8": Case(experts_30b, 8),
    "1,000 of 64 × 64, rank 0 of 64": Case(small_matrices, 64),
    "four layers, rank 0 of 8": Case(partial(llama_8b, 4), 8, steps=5),
    "four layers in bf16, rank 0 of 8": Case(
        partial(llama_8b, 4), 8, steps=5, options={"ns_dtype": torch.bfloat16}
    ),
}


@dataclass
class Facts:
    """What one step of a case comes to, on its rank.

    Attributes:
        parameters: of Muon's.
        chunks: of all lanes, with those that need no traffic.
        launches: of Triton's kernels, by name.
        operations: of torch that are kernels or copies, by name; views and allocations are none.
        collectives: by name.
        waits: what made the host wait, and copies that would.
        misaligned: pointers into the package's own buffers that kernels or collectives get, and
            that `stub_driver.ALIGNMENT` does not divide: how often each, by a description.
        device_bytes: of live storages, after each step.
    """

    parameters: int = 0
    chunks: int = 0
    launches: dict[str, int] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    misaligned: dict[str, int] = field(default_factory=dict)
    device_bytes: list[int] = field(default_factory=list)


class Training:
    """A case's parameters on a device, their gradients, and an optimizer.

    The default process group has as many ranks as the case.
    """

    def __init__(self, case: Case, device: torch.device = CUDA):
        self.device = device
        self.mesh = init_device_mesh(device.type, (case.ranks,))
        self.shapes = case.shapes()
        self.params = {name: nn.Parameter(self._tensor(name)) for name in self.shapes}
        is_muon = {n: optimizer.default_is_muon(n, p, EXPERTS) for n, p in self.params.items()}
        groups: list[dict[str, Any]] = [
            {"params": [(n, p) for n, p in self.params.items() if is_muon[n] == kind]}
            | ({"use_muon": True, "expert_keys": EXPERTS} if kind else {"use_muon": False})
            for kind in (True, False)
            if kind in is_muon.values()
        ]
        self.muon_parameters = sum(is_muon.values())
        # Notes would travel between hosts that are not there.
        self.optimizer = optimizer.Muon(groups, consistency_check="off", **case.options)
        self.grads = {name: self._tensor(name) for name in self.shapes}

    def _tensor(self, name: str) -> Tensor:
        rows, *others = self.shapes[name]
        size = self.mesh.size()
        part = (math.ceil(rows / size), *others)
        local = torch.empty(part, dtype=torch.bfloat16, device=self.device)
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)

    def step(self) -> None:
        for name, param in self.params.items():
            param.grad = self.grads[name]
        self.optimizer.step()

    def storages(self) -> list[tuple[int, int]]:
        """First addresses, and the ones after the last, of weights, gradients and state."""
        state = [list(own.values()) for own in self.optimizer.state.values()]
        tensors = [*self.params.values(), *self.grads.values(), *tree_leaves(state)]
        storages = [local(t).untyped_storage() for t in tensors if isinstance(t, Tensor)]
        return [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Watch(TorchDispatchMode):
    """Counts a step's operations on the device, and looks at their pointers.

    Args:
        facts: written to.
        model: first and last addresses of the storages of weights, gradients and state, whose
            layout the user has chosen: their pointers are not looked at.
    """

    def __init__(self, facts: Facts, model: Sequence[tuple[int, int]]):
        super().__init__()
        self.facts = facts
        self.model = sorted(model)
        self.operations: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # a DTensor: seen again as operations on the tensors within
        kwargs = kwargs or {}
        name = func._opname
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self.collectives[name] += 1
            for place, piece in _pieces(func, args):
                self.look(f"{name} {place}", piece)
            return result
        fakes = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Fake)]
        if fakes and not func.is_view and name not in ALLOCATIONS:
            self.operations[name] += _copies(*args) if name == "_foreach_copy_" else 1
            for tensor in fakes:
                if tensor.nbytes >= NUMBERS_BYTES:
                    self.look(name, tensor)
        return result

    def look(self, what: str, tensor: Tensor) -> None:
        """Takes a tensor's pointer down, unless it is the model's."""
        of = f"{what} {tensor.dtype} {tuple(tensor.shape)}"
        self.look_at(of, tensor.data_ptr() if tensor.numel() else 0, tensor.numel())

    def look_at(self, what: str, address: int, numel: int) -> None:
        """Takes an address down, unless it is in the model."""
        before = bisect_right(self.model, (address, sys.maxsize))
        if numel == 0 or (before and address < self.model[before - 1][1]):
            return
        offset = address % stub_driver.ALIGNMENT
        if offset:
            key = f"{what} +{offset}"
            self.facts.misaligned[key] = self.facts.misaligned.get(key, 0) + 1


def _copies(targets: Sequence[Tensor], sources: Sequence[Tensor], *_: Any) -> int:
    """Kernels that torch launches to copy a list: one by one, where not all are contiguous."""
    is_fast = all(t.is_contiguous() and s.is_contiguous() for t, s in zip(targets, sources))
    return 1 if is_fast else len(targets)


def _pieces(func: Any, args: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """What a collective sends to and receives from each peer: a pointer for each."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args))
    for name in ("input", "output"):
        tensor, sizes = named.get(name), named.get(f"{name}_split_sizes")
        if isinstance(tensor, Tensor) and sizes:
            for piece in tensor.split(list(sizes)):
                yield name, piece
        else:
            whole = [v for key, v in named.items() if key.startswith(name)]
            yield from ((name, t) for t in tree_leaves(whole) if isinstance(t, Tensor))


def facts_of(case: Case, stub: stub_driver.StubDriver) -> Facts:
    """Takes some steps, and watches the last."""
    with fake_device(kernels=True, computes=False) as device, lone_rank(0, case.ranks):
        training, facts = Training(case), Facts()
        for number in range(1, case.steps + 1):
            if number < case.steps:
                training.step()
            else:
                _watch(training, facts, stub, device)
            stub.reset()  # which lets go of what was recorded
            facts.device_bytes.append(device.memory.now)
    facts.parameters = training.muon_parameters
    return facts


def _watch(training: Training, facts: Facts, stub: stub_driver.StubDriver, device: Device) -> None:
    device.waits.clear()
    stub.reset()
    stub.records = True
    watch = Watch(facts, training.storages())
    copies = device.operations["copy_"]
    with watch:
        training.step()
    # They are done before a mode sees them.
    watch.operations["copy_"] = device.operations["copy_"] - copies
    stub.records = False
    events = [event["event"] for event in training.optimizer.summary(schedule=True).schedule]
    facts.chunks = sum(event.startswith("orthogonalize") for event in events)
    facts.operations, facts.collectives = dict(watch.operations), dict(watch.collectives)
    facts.launches, facts.waits = dict(stub.counts), dict(device.waits)
    for launch in stub.launches:
        for name, value in launch.arguments.items():
            if isinstance(value, Tensor) and name not in NUMBERS:
                watch.look(f"{launch.kernel} {name}", value)
            elif f"{name}_strides" in launch.arguments and value and name not in NUMBERS:
                given = launch.arguments  # an address for each item
                for address, length in zip(value, given["lengths"]):
                    numel = length * math.prod(given["shape"])
                    watch.look_at(f"{launch.kernel} {name} of {numel}", address, numel)


def main(names: Sequence[str]) -> None:
    found = {}
    with tempfile.TemporaryDirectory() as scratch, stub_driver.installed(Path(scratch)) as stub:
        for name in names:
            found[name] = asdict(facts_of(CASES[name], stub))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
