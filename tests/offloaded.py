"""What tests of CPU offload train: a `Pair` of optimizers in host memory, of which one is to be
offloaded, and a `Training` beside the accelerator of fake_device.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from comparisons import assert_equal
from fake_device import CUDA, rows_at
from kernel import as_arguments, optimizer
from layouts import MEMORY, local, params_of, random

Muon = optimizer.Muon
Host = optimizer.SimulatedHost

TINY = 16384  # bytes of slots: 192 elements of AdamW at once
DELAY = 2e-5  # seconds, before a copy of the stand-in

Shapes = Sequence[tuple[int, ...]]
MATRICES: Shapes = ((16, 24), (24, 16), (72, 40), (8, 8), (1, 30), (30, 1), (3, 12), (0, 4), (4, 0))
REST: Shapes = ((130, 24), (7,), (1,), (), (0,), (70, 6))
BF16, FP32 = torch.bfloat16, torch.float32


def group(
    shapes: Shapes = REST, stem: str = "", dtype: Any = FP32, memory: str = "", **options: Any
) -> Any:
    """Makes a group of random parameters; Muon trains them if a stem for names is given."""
    generator = torch.Generator().manual_seed(len(shapes))
    lay = MEMORY[memory or "contiguous"]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    params = [nn.Parameter(lay(value)) for value in values]
    names = {"names": [f"{stem}.{index}.weight" for index in range(len(params))]} if stem else {}
    return {"params": params, "use_muon": bool(stem), **names, **options}


def mixed(**how: Any) -> list[Any]:
    return [group(MATRICES, "layers", **how), group(**how)]


def experts() -> list[Any]:
    return [
        group(((3, 8, 12), (2, 12, 8), (0, 4, 6)), "experts", expert_keys=["experts"]),
        group(((6, 4, 3), (5, 2, 2, 3)), "convolutions", flatten=True),
        group(((24, 16), (24, 8)), "fused", split=[8, 16]),
        group(((24, 16),), "grouped", split="(group (q=5 + k=3)) (c + c)"),
        group(((6,), (40, 8))),
    ]


def dtypes() -> list[Any]:
    shapes = (16, 24), (40, 12)
    wide = group(shapes, "layers", BF16, momentum_dtype=FP32)
    narrow = group(shapes, "narrow", momentum_dtype=BF16)
    return [wide, narrow, group(((40, 24), (9,)), dtype=BF16)]


def small() -> list[Any]:
    """Loads of several tensors, of one, and of a part."""
    return [group(((16, 24), (40, 16), (1, 30)), "layers"), group(((60, 8), (3,)))]


RICH = {"beta2": 0.9, "cautious": True, "decay_lr": "adjusted", "chunk_size": 2}
ZERO = {"missing_grad": "zero", "beta2": 0.9}
GRAM = {"ns_algorithm": "gram", "momentum_dtype": torch.float64, "chunk_size": 1}
TRAININGS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "classical": (mixed, {}),
    "ema, without nesterov": (mixed, {"momentum_style": "ema", "nesterov": False}),
    "second moments, cautious": (mixed, RICH),
    "bf16 arithmetic": (mixed, {"ns_dtype": BF16, "beta2": 0.9}),
    "matrix by matrix": (mixed, {"chunk_size": 1, "beta2": 0.9}),
    "missing gradients": (mixed, {"beta2": 0.9}),
    "missing gradients as zeros": (mixed, ZERO),
    "tensor lr": (mixed, {"lr": torch.tensor(0.01)}),
    "experts, flattened, split": (experts, {"beta2": 0.9}),
    "experts, one by one": (experts, {"beta2": 0.9, "chunk_size": 1}),
    "dtypes": (dtypes, {"beta2": 0.9}),
    "transposed": (lambda: mixed(memory="transposed"), {"beta2": 0.9, "chunk_size": 2}),
    "with gaps": (lambda: mixed(memory="with gaps"), {"beta2": 0.9}),
    "matrices only": (lambda: mixed()[:1], {"none_grad": False}),
    "AdamW only": (lambda: mixed()[1:], {}),
    "gram": (mixed, GRAM),
    "small": (small, {"beta2": 0.9, "chunk_size": 1}),
}


class Pair:
    """Two optimizers of the same parameters, to take the same steps; one is to be offloaded."""

    def __init__(self, training: str = "classical", **options: Any):
        groups, own = TRAININGS[training]
        both = {"lr": 0.01, "ns_dtype": FP32, **own, **options}
        self.training = training
        self.ours, self.twin = (
            Muon(groups(), **as_arguments(copy.deepcopy(both))) for _ in range(2)
        )
        self.steps = 0

    @property
    def params(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(params_of(self.ours), params_of(self.twin)))

    def give_gradients(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        self.ours.zero_grad()
        for index, (p, q) in enumerate(self.params):
            if "missing" in self.training and (index + self.steps) % 3 == 0:
                q.grad = None
                continue
            q.grad = torch.randn(q.shape, generator=generator).to(q.dtype)
            p.grad = q.grad.clone()
        self.steps += 1

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.give_gradients()
            self.ours.step()
            self.twin.step()

    def compare(self) -> None:
        for index, (p, q) in enumerate(self.params):
            assert_equal(p, q, f"parameter {index}, {tuple(p.shape)}", strides=True)
        assert_equal(self.ours.state_dict(), self.twin.state_dict(), strides=True)

    def step_and_compare(self, count: int = 1) -> None:
        self.step(count)
        self.compare()

    def turn_on(self, **how: Any) -> Any:
        """The backend."""
        backend = how.setdefault("backend", Host(delay=DELAY, seed=self.steps))
        self.ours.turn_on_cpu_offload(**how)
        return backend

    def change(self, number: int, **options: Any) -> None:
        """Changes options in the group of that number in both optimizers."""
        for optim in (self.ours, self.twin):
            optim.param_groups[number].update(options)


def tensors_of(optim: Any) -> list[torch.Tensor]:
    """Returns the tensors of the state, without step counts."""
    return [t for own in optim.state.values() for key, t in own.items() if key != "step"]


# -- beside an accelerator -------------------------------------------------------------------------

CPU = torch.device("cpu")
SLOT_BYTES = 32768
MOMENTS = ["momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq"]
MATRIX_SHAPES = {"w1": (96, 64), "w2": (64, 128), "experts": (4, 32, 48), "odd": (33, 20)}
OTHER_SHAPES = {"embedding": (50, 32), "norm": (64,)}
ROWS = {"w1": "(q=32 + 16 + q=32 + 16) d", "w2": "(k=64) d", "norm": "(k=64) d"}
CLIPPED = {"clip_config": {"head_dim": 32, "threshold": 2.0, "row_map": ROWS}}

Make = Callable[[Tensor], Tensor]  # a parameter, or its gradient, of its value on the host


def placed(at: torch.device) -> Make:
    """Each rank has rows, there."""
    mesh = DeviceMesh("cuda", list(range(dist.get_world_size())))
    return lambda value: rows_at(value, mesh, at)


class Training:
    """An optimizer, its parameters by name, and steps with gradients that depend on their number.

    Args:
        make: places a parameter, or its gradient.
        is_on: whether it is offloaded.
        steps: that it has made.
        options: of the optimizer.
    """

    def __init__(
        self,
        make: Make = lambda value: value.to(CUDA),
        is_on: bool = True,
        steps: int = 0,
        **options: Any,
    ):
        self.make, self.steps = make, 0
        self.params = {
            name: nn.Parameter(self._random(name)) for name in (*MATRIX_SHAPES, *OTHER_SHAPES)
        }
        muon, others = (
            [(n, self.params[n]) for n in names] for names in (MATRIX_SHAPES, OTHER_SHAPES)
        )
        groups: list[dict[str, Any]] = [
            {"params": muon, "use_muon": True, "beta2": 0.9, "expert_keys": ("experts",)},
            {"params": others, "use_muon": False},
        ]
        options = {"lr": 0.1, "ns_dtype": FP32, "ns_coefficients": "quintic", **options}
        self.optimizer = Muon(groups, ns_steps=2, **options)
        if is_on:
            self.turn_on()
        self.step(steps)

    def _random(self, name: str) -> Tensor:
        shape = {**MATRIX_SHAPES, **OTHER_SHAPES}[name]
        generator = torch.Generator().manual_seed(1000 * self.steps + sum(map(ord, name)))
        return self.make(random(shape, FP32, generator) / 4)

    def set_gradients(self) -> None:
        self.steps += 1
        for name, param in self.params.items():
            param.grad = self._random(name)

    def drop_gradients(self) -> Training:
        for param in self.params.values():
            param.grad = None
        return self

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.set_gradients()
            self.optimizer.step()

    def turn_on(self, slot_bytes: int = SLOT_BYTES) -> None:
        self.optimizer.turn_on_cpu_offload(slot_bytes=slot_bytes)

    def state(self) -> dict[str, Tensor]:
        """All tensors that can be large, this rank's parts."""
        return {
            f"{name}.{key}": local(value)
            for name, param in self.params.items()
            for key, value in self.optimizer.state[param].items()
            if key in MOMENTS
        }

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state().values())

    def devices(self) -> set[torch.device]:
        """Where state is; all of it is there."""
        assert len(self.state()) == 2 * len(MATRIX_SHAPES) + 2 * len(OTHER_SHAPES)
        return {tensor.device for tensor in self.state().values()}

    def model(self) -> nn.Module:
        return nn.ParameterDict(self.params)
