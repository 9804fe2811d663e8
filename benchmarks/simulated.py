"""A step with CPU offload on a machine that isn't there: real events, in their order, on clocks.

The step is the package's own: its plan, its loads, its copies and events, on tensors of their
full size, whose memory nothing touches. Time passes on three clocks, for the arithmetic and for the
copies of each direction, which wait for each other where the events say so. Nothing is computed:

- A product takes FLOPs / (peak · achieved) or bytes / memory bandwidth, whichever is more, and a
  launch; a symmetric one the FLOPs of the accelerators' kernels, by halves.
- Momentum, weights and AdamW take one kernel for each group of tensors, which reads and writes each
  of them once; normalizing takes two. Any other operation is a kernel that reads what it is given
  and writes what it gives. Views and allocations take no time.
- A copy takes bytes / bandwidth and a latency. Both directions have all of their bandwidth at the
  same time, and take nothing from the bandwidth of the device's memory.
- The host is always ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from timing import load_kernel

kernel = load_kernel()


def _module(name: str) -> Any:
    return import_module(f"{kernel.__name__}.{name}")


Backend = _module("cpu_offload.backend").Backend
QUEUES = COMPUTE, IN, OUT = "compute", "in", "out"

TILE_ROWS = 128  # of symmetric products by halves


@dataclass(frozen=True)
class Machine:
    """An accelerator and its link to the host, by default an H200's on PCIe 5 x16.

    Args:
        flops: peak of dense 16-bit products, per second.
        achieved: share of it that products reach.
        memory: bytes per second of the device's memory.
        link: bytes per second between host and device, each way.
        launch: seconds of any kernel beyond its work.
        latency: seconds of any copy beyond its bytes.
    """

    flops: float = 989e12
    achieved: float = 0.7
    memory: float = 4.8e12
    link: float = 55e9
    launch: float = 2e-6
    latency: float = 2e-6

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e12:.0f} TFLOP/s × {self.achieved:.2f}, memory "
            f"{self.memory / 1e12:.1f} TB/s, link {self.link / 1e9:.0f} GB/s each way, "
            f"{self.launch * 1e6:.0f} µs a kernel, {self.latency * 1e6:.0f} µs a copy"
        )


@dataclass
class Clocks:
    """When each queue has done what it was given so far, in seconds.

    Attributes:
        busy: for how long each has worked.
        stalls: when the arithmetic waited for a copy, and for how long.
    """

    machine: Machine
    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUES, 0.0))
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUES, 0.0))
    stalls: list[tuple[float, float]] = field(default_factory=list)

    def restart(self) -> None:
        self.now, self.busy = dict.fromkeys(QUEUES, 0.0), dict.fromkeys(QUEUES, 0.0)
        self.stalls = []

    def work(self, on: str, seconds: float) -> None:
        self.now[on] += seconds
        self.busy[on] += seconds

    def compute(self, tensors: Sequence[Tensor], flops: float = 0.0) -> None:
        """One kernel that reads or writes each of these tensors once."""
        machine = self.machine
        for_products = flops / (machine.flops * machine.achieved)
        self.work(COMPUTE, max(for_products, _nbytes(tensors) / machine.memory) + machine.launch)

    def wait(self, on: str, until: float) -> None:
        if on == COMPUTE and until > self.now[on]:
            self.stalls.append((self.now[on], until - self.now[on]))
        self.now[on] = max(self.now[on], until)


class Simulated(Backend):  # type: ignore[misc, valid-type]
    """Queues whose copies take time on clocks, and copy nothing.

    Attributes:
        loads: how often something was brought.
        copies, nbytes: by queue.
    """

    def __init__(self, clocks: Clocks):
        super().__init__(torch.device("cpu"))
        self.clocks = clocks
        self.restart()

    def restart(self) -> None:
        self.loads = 0
        self.copies, self.nbytes = {IN: 0, OUT: 0}, {IN: 0, OUT: 0}

    def record(self, on: str) -> float:
        return self.clocks.now[on]

    def wait(self, on: str, event: float) -> None:
        self.clocks.wait(on, event)

    def copy(self, on: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        machine = self.clocks.machine
        self.loads += on == IN
        self.copies[on] += len(targets)
        for target in targets:
            self.nbytes[on] += target.numel()
            self.clocks.work(on, target.numel() / machine.link + machine.latency)

    def synchronize(self, event: float) -> None:
        pass


# -- arithmetic ------------------------------------------------------------------------------------


class Uncomputed(TorchDispatchMode):
    """Charges operations instead of doing them; makes views, and memory that stays untouched.

    Attributes:
        allocated: bytes of memory made meanwhile, now.
        peak: at most so far.
    """

    def __init__(self, clocks: Clocks):
        super().__init__()
        self.clocks = clocks
        self.allocated = self.peak = 0
        self._storages: dict[int, Any] = {}  # by identity, as long as they live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func._opname in ("detach", "_local_scalar_dense"):
            return func(*args, **kwargs)
        if func._opname.startswith(("empty", "new_empty")):
            return self._made(func(*args, **kwargs))
        given, written = _tensors((args, kwargs)), _written(func, args, kwargs)
        if written is None:
            result = self._like_meta(func, args, kwargs)
            written = _tensors(result)
        else:
            returned = len(func._schema.returns)
            result = None if not returned else written[0] if returned == 1 else tuple(written)
        self.clocks.compute([*given, *written])
        return result

    def _like_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Memory for what an operation returns: of that shape, order and dtype."""

        def on_meta(t: Tensor) -> Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

        def in_memory(t: Tensor) -> Tensor:
            return self._made(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu"))

        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, on_meta, (args, kwargs))
            kwargs = kwargs | ({"device": "meta"} if "device" in kwargs else {})
            return tree_map_only(Tensor, in_memory, func(*args, **kwargs))

    def _made(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._gone(key, nbytes))
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        return tensor

    def _gone(self, key: int, nbytes: int) -> None:
        del self._storages[key]
        self.allocated -= nbytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """The arguments that an operation writes; None where it makes what it returns."""
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args)) | kwargs
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([named.get(a.name) for a in written]) if written else None


# -- what accelerators do otherwise than CPUs ------------------------------------------------------


@contextmanager
def as_on_accelerators(clocks: Clocks) -> Iterator[None]:
    """Tensors on the CPU are planned for as an accelerator's, in its arithmetic, fp16.

    What kernels of this package or products do there is charged, not done.
    """
    core, limits = map(_module, ("core", "distributed.limits"))
    iteration, products = map(_module, ("newton_schulz.iteration", "newton_schulz.products"))
    by_cpus = limits.BATCH_BYTES, limits.CHUNK_BYTES, iteration.AT_ONCE_BYTES
    with ExitStack() as stack:
        for name, charge in _ELEMENTWISE.items():
            stack.enter_context(patch.object(core, name, charge(clocks)))
        stack.enter_context(patch.object(iteration, "normalize", _normalization(clocks)))
        stack.enter_context(patch.object(iteration, "is_by_kernel", lambda *about: True))
        ways = products.PRODUCTS
        stack.enter_context(patch.dict(ways, in_fp32=_products(clocks, products._sides)))
        for table in by_cpus:
            stack.enter_context(patch.dict(table))
            del table["cpu"]
        yield


def _momentum(clocks: Clocks) -> Callable[..., None]:
    def update_momentum(buffers: Any, grads: Any, outputs: Any, **options: Any) -> None:
        clocks.compute([*buffers, *buffers, *grads, *(outputs or ())])

    return update_momentum


def _weights(clocks: Clocks) -> Callable[..., None]:
    def update_weights(weights: Any, updates: Any, **options: Any) -> None:
        clocks.compute([*weights, *weights, *updates])

    return update_weights


_ELEMENTWISE: dict[str, Callable[[Clocks], Callable[..., Any]]] = {
    "update_momentum": _momentum,
    "update_weights": _weights,
    "update_dtype": lambda clocks: lambda wire, opmath, device: wire,
}


def _normalization(clocks: Clocks) -> Callable[..., None]:
    def normalize(G: Tensor, *arguments: Any) -> None:
        clocks.compute([G])
        clocks.compute([G, arguments[-1]])

    return normalize


def _products(clocks: Clocks, sides: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Any:
    forms = _module("newton_schulz.forms")

    def halves(read: Sequence[Tensor], A: Tensor, out: Tensor) -> Tensor:
        n, s, k = A.shape
        rows = TILE_ROWS if s >= forms.HALVES_FROM else s
        ends = [min(s, start + rows) for start in range(0, s, rows)]
        flops = sum(2 * (end - start) * end * k for start, end in zip([0, *ends], ends))
        clocks.compute([*read, out], n * flops)
        return out

    def gram(X: Tensor, alpha: float, out: Tensor) -> Tensor:
        return halves([X], sides(X)[0], out)

    def symmetric(
        A: Tensor, B: Tensor, alpha: float, beta: float, C: Tensor, out: Tensor
    ) -> Tensor:
        return halves([A, B, C], A, out)

    def apply(Q: Tensor, X: Tensor, alpha: float, beta: float, out: Tensor) -> Tensor:
        clocks.compute([Q, X, out], 2 * X.numel() * Q.shape[-1])
        return out

    return _module("newton_schulz.products").Products(gram, symmetric, apply)


# -- steps -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one simulated step comes to.

    Args:
        seconds: from its begin until all is where it belongs.
        stalls: when the arithmetic waited for copies, and for how long, in seconds.
        nbytes: carried, each way.
        carrying: seconds of copies, in the direction that has more of them.
        loads: brought one after the other.
        copies: in both directions.
        peak: bytes allocated on the device within the step, at most.
        resting: bytes of state on the device between steps.
    """

    seconds: float
    stalls: tuple[tuple[float, float], ...]
    nbytes: int
    carrying: float
    loads: int
    copies: int
    peak: int
    resting: int


def simulate(
    make: Callable[[], tuple[Any, Sequence[Tensor]]],
    machine: Machine,
    is_offloaded: bool,
    slot_bytes: int | None = None,
) -> Step:
    """The second step of an optimizer.

    Args:
        make: gives the optimizer, with ``ns_dtype=torch.float16``, and its parameters, which are on
            the CPU and have gradients.
        is_offloaded: whether CPU offload is on.
        slot_bytes: of CPU offload.
    """
    clocks = Clocks(machine)
    backend, arithmetic = Simulated(clocks), Uncomputed(clocks)
    with as_on_accelerators(clocks), arithmetic:
        optimizer, params = make()
        if is_offloaded:
            optimizer.turn_on_cpu_offload(slot_bytes=slot_bytes, backend=backend)
        grads = [param.grad for param in params]
        optimizer.step()
        for param, grad in zip(params, grads):
            param.grad = grad
        clocks.restart()
        backend.restart()
        before = arithmetic.peak = arithmetic.allocated
        optimizer.step()
    state = _tensors([list(own.values()) for own in optimizer.state.values()])
    return Step(
        seconds=clocks.now[COMPUTE],
        stalls=tuple(clocks.stalls),
        nbytes=max(backend.nbytes.values()),
        carrying=max(clocks.busy[IN], clocks.busy[OUT]),
        loads=backend.loads,
        copies=sum(backend.copies.values()),
        peak=arithmetic.peak - before,
        resting=_nbytes([t for t in state if id(t) not in optimizer._offload._offloaded]),
    )
