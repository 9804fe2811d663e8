"""Optimizers of the same parameters, of which one is to be offloaded, and what they train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from comparisons import assert_equal
from kernel import as_arguments, optimizer
from layouts import params_of

Muon = optimizer.Muon
Host = optimizer.SimulatedHost

TINY = 16384  # bytes of slots: 192 elements of AdamW at once
DELAY = 2e-5  # seconds, before a copy of the stand-in
EXACT = {"ns_dtype": torch.float32}

MATRICES = ((16, 24), (24, 16), (72, 40), (8, 8), (1, 30), (30, 1), (3, 12), (0, 4), (4, 0))
REST = ((130, 24), (7,), (1,), (), (0,), (70, 6))


def host(seed: int = 0) -> Any:
    return Host(delay=DELAY, seed=seed)


def random_params(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, transposed: bool = False
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(len(shapes))
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if transposed:
        values = [v.mT.contiguous().mT if v.ndim > 1 else v for v in values]
    return [nn.Parameter(value) for value in values]


def muon_group_of(shapes: Sequence[tuple[int, ...]], stem: str = "layers", **options: Any) -> Any:
    kept = {key: options.pop(key) for key in ("dtype", "transposed") if key in options}
    params = random_params(shapes, **kept)
    names = [f"{stem}.{index}.weight" for index in range(len(params))]
    return {"params": params, "names": names, "use_muon": True, **options}


def adamw_group_of(shapes: Sequence[tuple[int, ...]] = REST, **options: Any) -> Any:
    kept = {key: options.pop(key) for key in ("dtype", "transposed") if key in options}
    return {"params": random_params(shapes, **kept), "use_muon": False, **options}


def mixed() -> list[Any]:
    return [muon_group_of(MATRICES), adamw_group_of()]


def experts() -> list[Any]:
    return [
        muon_group_of(((3, 8, 12), (2, 12, 8), (0, 4, 6)), "experts", expert_keys=["experts"]),
        muon_group_of(((6, 4, 3), (5, 2, 2, 3)), "convolutions", flatten=True),
        muon_group_of(((24, 16), (24, 8)), "fused", split=[8, 16]),
        muon_group_of(((24, 16),), "grouped", split="(group (q=5 + k=3)) (c + c)"),
        adamw_group_of(((6,), (40, 8))),
    ]


def dtypes() -> list[Any]:
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        muon_group_of(((16, 24), (40, 12)), dtype=bf16, momentum_dtype=fp32),
        muon_group_of(((16, 24), (40, 12)), "narrow", momentum_dtype=bf16),
        adamw_group_of(((40, 24), (9,)), dtype=bf16),
    ]


def transposed() -> list[Any]:
    return [
        muon_group_of(MATRICES, transposed=True),
        muon_group_of(((3, 8, 12),), "experts", transposed=True, expert_keys=["experts"]),
        adamw_group_of(transposed=True),
    ]


def with_gaps() -> list[Any]:
    """Every other column of something larger, whose state has no gaps."""
    groups = mixed()
    for group in groups:
        wide = [torch.stack([p.detach(), p.detach()], dim=-1) for p in group["params"]]
        group["params"] = [nn.Parameter(value[..., 0]) for value in wide]
    return groups


def matrices_only() -> list[Any]:
    return [muon_group_of(MATRICES)]


def adamw_only() -> list[Any]:
    return [adamw_group_of()]


def small() -> list[Any]:
    """Loads of several tensors, of one, and of a part."""
    return [muon_group_of(((16, 24), (40, 16), (1, 30))), adamw_group_of(((60, 8), (3,)))]


TRAININGS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "classical": (mixed, {}),
    "ema, without nesterov": (mixed, {"momentum_style": "ema", "nesterov": False}),
    "second moments, cautious": (
        mixed,
        {"beta2": 0.9, "cautious": True, "decay_lr": "adjusted", "chunk_size": 2},
    ),
    "fp16 arithmetic": (mixed, {"ns_dtype": torch.float16}),
    "bf16 arithmetic": (mixed, {"ns_dtype": torch.bfloat16, "beta2": 0.9}),
    "matrix by matrix": (mixed, {"chunk_size": 1, "beta2": 0.9}),
    "missing gradients": (mixed, {"beta2": 0.9}),
    "missing gradients as zeros": (mixed, {"missing_grad": "zero", "beta2": 0.9}),
    "tensor lr": (mixed, {"lr": torch.tensor(0.01)}),
    "maximize": (mixed, {"maximize": True}),
    "experts, flattened, split": (experts, {"beta2": 0.9}),
    "experts, one by one": (experts, {"beta2": 0.9, "chunk_size": 1}),
    "dtypes": (dtypes, {"beta2": 0.9}),
    "transposed": (transposed, {"beta2": 0.9, "chunk_size": 2}),
    "with gaps": (with_gaps, {"beta2": 0.9}),
    "matrices only": (matrices_only, {"none_grad": False}),
    "AdamW only": (adamw_only, {}),
    "gram": (mixed, {"ns_algorithm": "gram", "momentum_dtype": torch.float64, "chunk_size": 1}),
    "small": (small, {"beta2": 0.9, "chunk_size": 1}),
}


class Pair:
    """Two optimizers of the same parameters, to take the same steps; one is to be offloaded."""

    def __init__(self, training: str = "classical", **options: Any):
        groups, own = TRAININGS[training]
        both = {"lr": 0.01, **EXACT, **own, **options}
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
        backend = how.setdefault("backend", host(self.steps))
        self.ours.turn_on_cpu_offload(**how)
        return backend


def tensors_of(optim: Any) -> list[torch.Tensor]:
    """Of the state, without step counts."""
    return [t for own in optim.state.values() for key, t in own.items() if key != "step"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 30, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def models(**options: Any) -> tuple[tuple[Model, Any], tuple[Model, Any]]:
    torch.manual_seed(0)
    model = Model()
    pairs = []
    for each in (model, copy.deepcopy(model)):
        groups = optimizer.muon.get_default_muon_param_groups(each)
        pairs.append((each, Muon(groups, **as_arguments({"lr": 0.01, **EXACT, **options}))))
    return pairs[0], pairs[1]
