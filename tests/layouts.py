"""Steps parameters on device meshes beside plain twins on one device, and compares them.

Tensors are placed by hand (`Weight`, `check`); model_layouts.py places whole models. Each rank
compares what it holds with its part of the twin, replicas included.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from kernel import as_arguments, optimizer
from ranks import DEVICE, run_ranks

STEPS = 3

# Each a way for a tensor's elements to lie in memory.
MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
    "with gaps": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "further in": lambda t: torch.cat([t.new_zeros(3), t.flatten()])[3:].view(t.shape),
    "channels last": lambda t: (
        t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t
    ),
}

# Exact mode: the same bits on every layout, whatever else is in a batch.
EXACT = {"exact": True}
FP32 = {"ns_dtype": torch.float32, "comm_dtype": torch.float32}  # the same for fp32 weights

# torch's fused AdamW rounds the last elements of a tensor, which do not fill a vector register,
# differently, and shards end elsewhere.
ADAMW_ROUNDING = 1e-6

VARIANTS: list[dict[str, Any]] = [
    {},
    {"beta2": 0.9, "cautious": True, "decay_lr": "adjusted"},
    {"momentum_style": "ema", "nesterov": False, "adjust_lr": "original", "chunk_size": 1},
    {"warmup_step": 0, "chunk_size": 2, "beta2": 0.9},
    {"warmup_step": 1, "chunk_size": 1, "hsdp": "spread"},
    {"beta2": 0.9, "hsdp": "spread"},
    {"use_distributed_muon": True, "cautious": True, "decay_lr": "adjusted"},
    {"momentum_dtype": torch.bfloat16, "maximize": True},
]


@dataclass(frozen=True)
class Weight:
    """One parameter and where it lives.

    Args:
        shape: of the whole tensor; more than two dimensions are experts, or flattened.
        mesh: sizes of a mesh over all ranks; None for a plain tensor.
        dims: for each mesh dimension the tensor dimension that it shards, or None: replicas. One
            that shards the same as a later one does so in strides, like FSDP2 over TP.
        nested: it cuts first instead, and the later one cuts its pieces.
        dtype: of the parameter and its gradient.
        memory: how a rank's part lies there, one of `MEMORY`.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...] | None = None
    dims: tuple[int | None, ...] = ()
    nested: bool = False
    dtype: torch.dtype = torch.float32
    memory: str = "contiguous"

    @property
    def placements(self) -> list[Any]:
        assert self.mesh is not None
        placements: list[Any] = []
        for index, dim in enumerate(self.dims):
            later = zip(self.dims[index + 1 :], self.mesh[index + 1 :])
            pieces = math.prod(size for other, size in later if other == dim)
            if dim is None:
                placements.append(Replicate())
            elif pieces > 1 and not self.nested:
                placements.append(_StridedShard(dim, split_factor=pieces))
            else:
                placements.append(Shard(dim))
        return placements


@dataclass(frozen=True)
class Group:
    """A param group: its weights, its own options, and names, if it matters how they are called."""

    weights: Sequence[Weight]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[str] = ()

    def param_group(self, params: Sequence[nn.Parameter], number: int) -> dict[str, Any]:
        stacked = "layers" if self.options.get("flatten") else "experts"
        names = [
            f"{stacked if p.ndim > 2 else 'layers'}.{number}.{index}.weight"
            for index, p in enumerate(params)
        ]
        names = list(self.names) or names
        return {"params": list(params), "names": names, "use_muon": True, **self.options}


def check(
    ranks: int, cases: Mapping[str, Sequence[Group]], variants: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Asserts that all cases take the steps of one process, in one launch of ``ranks`` ranks.

    Args:
        cases: groups by name.
        variants: further options, for each case all of them; by default one of `VARIANTS` in turn.
    """
    varied = []
    for number, (name, groups) in enumerate(cases.items()):
        turn = VARIANTS[(ranks + 3 * number) % len(VARIANTS)]
        varied += [(name, groups, {**EXACT, **variant}) for variant in variants or [turn]]
    run_ranks(step_placed, ranks, varied)


def step_placed(cases: Iterable[tuple[str, Sequence[Group], Mapping[str, Any]]]) -> None:
    for name, groups, options in cases:
        if "use_distributed_muon" in options:  # which knows no second moment
            groups = [replace(g, options={**g.options, "beta2": None}) for g in groups]
        with case(f"{name}, {options}"):
            Twins.placed(groups, options).step_and_compare()


@functools.cache
def mesh_over(world: dist.ProcessGroup | None, sizes: tuple[int, ...]) -> DeviceMesh:
    """Makes one mesh of all ranks for each process group and sizes."""
    return init_device_mesh(DEVICE, sizes)


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """Names in the traceback of a failure which of several cases it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"In the case: {name}")
        raise


@dataclass
class Twins:
    """An optimizer of parameters on meshes, one of the same parameters whole, and their names."""

    ours: torch.optim.Optimizer
    reference: torch.optim.Optimizer
    pairs: list[tuple[str, nn.Parameter, nn.Parameter]]

    @classmethod
    def placed(
        cls,
        groups: Sequence[Group],
        options: Mapping[str, Any],
        reference: Mapping[str, Any] | None = None,
    ) -> Twins:
        """Random weights; the optimizers have the same options unless ``reference`` has others."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        ours, plain, pairs = [], [], []
        for number, group in enumerate(groups):
            values = [random(w.shape, w.dtype, generator) for w in group.weights]
            whole_params = [
                nn.Parameter(MEMORY[w.memory](value)) for w, value in zip(group.weights, values)
            ]
            parts = [
                part(value, mesh_over(dist.group.WORLD, w.mesh), w.placements) if w.mesh else value
                for w, value in zip(group.weights, values)
            ]
            params = [nn.Parameter(lay(value, w.memory)) for w, value in zip(group.weights, parts)]
            ours.append(group.param_group(params, number))
            plain.append(group.param_group(whole_params, number))
            pairs += zip(ours[-1]["names"], params, whole_params)
        reference = options if reference is None else reference
        return cls(build(ours, **options), build(plain, **reference), pairs)

    def step_and_compare(self) -> None:
        self.step()
        self.compare()

    def step(self) -> None:
        """Steps with random gradients."""
        generator = torch.Generator(DEVICE).manual_seed(1)
        for _ in range(STEPS):
            for _, p, q in self.pairs:
                q.grad = torch.randn(q.shape, generator=generator).to(q.dtype)
                p.grad = part_for(p, q.grad)
            self.ours.step()
            self.reference.step()

    def compare(self, atol: float = 0.0) -> None:
        """Muon's weights and state to the bit, but for ``atol``; AdamW's weights to rounding."""
        for name, p, q in self.pairs:
            ours, reference = self.ours.state.get(p, {}), self.reference.state.get(q, {})
            assert ours.keys() == reference.keys(), name
            assert torch.isfinite(q).all(), name
            if "exp_avg" in reference:
                rtol = STEPS * torch.finfo(q.dtype).eps
                assert_same(name, p, q, ADAMW_ROUNDING, rtol)
                continue
            assert_same(name, p, q, atol)
            for key, value in ours.items():
                expected = reference[key]
                assert value.dtype == expected.dtype, f"{key} of {name}"
                if key == "second_momentum_buffer":
                    assert_same(f"V of {name}", whole(value).flatten(), expected.flatten(), atol)
                    continue
                assert_same(f"{key} of {name}", value, expected, 0.0)
                if isinstance(p, DTensor):
                    assert value.placements == p.placements, f"{key} of {name}"


def build(groups: list[dict[str, Any]], **options) -> torch.optim.Optimizer:
    return optimizer.Muon(
        groups, **as_arguments({"lr": 0.02, "expert_keys": ["experts"], **options})
    )


def part(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A tensor that all ranks have, distributed without traffic."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def part_for(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return tensor.clone()
    return part(tensor, param.device_mesh, param.placements)


def params_of(optim: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters, in the order of groups."""
    return [p for group in optim.param_groups for p in group["params"]]


def set_gradients(params: Iterable[torch.Tensor], seed: int = 0, scale: float = 1.0) -> None:
    """Random gradients, the same numbers on every layout."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for p in params:
        grad = scale * torch.randn(p.shape, generator=generator)
        p.grad = part_for(p, grad.to(p.dtype))


def random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers of a seed in every dtype, but for rounding."""
    return random(shape, dtype, torch.Generator().manual_seed(seed))


def lay(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    """A copy whose elements, of a DTensor those that this rank holds, lie as told."""
    if not isinstance(tensor, DTensor):
        return MEMORY[memory](tensor.clone())
    return DTensor.from_local(
        MEMORY[memory](tensor.to_local().clone()),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(
    name: str, ours: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float = 0.0
) -> None:
    expected = part_for(ours, expected.detach())
    assert ours.shape == expected.shape, name
    torch.testing.assert_close(
        local(ours), local(expected), rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}"
    )


def axes_of(size: int, choose: Callable[[Sequence[Any]], Any], depth: int = 2) -> str:
    """A term of ``split`` that some way or other makes up ``size`` indices (at least 1)."""
    outer = choose([n for n in range(1, size + 1) if size % n == 0])
    inner, first = size // outer, choose(range(1, max(2, size // outer)))
    axis = choose([f"{outer}", f"[{outer}]"])
    if depth == 0 or inner == 1 or choose([True, False, False]):
        return f"({axis} {inner})"
    parts = f"{axes_of(first, choose, depth - 1)} + {axes_of(inner - first, choose, depth - 1)}"
    return f"({axis} ({parts}))"
