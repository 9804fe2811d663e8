"""The Hub's benchmark: orthogonalization, and a whole step on the matrices of a transformer layer.

    kernels benchmark DIRECTORY   # of a build: a checkout after `make build`, a downloaded kernel

The references use singular values, not the iteration under test: what an iteration does to a matrix
is its polynomials on the singular values. The runner times a reference once, so its speed-up is no
comparison; `step.py` beside this file makes one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kernels.benchmark import Benchmark
from torch import Tensor

# The arithmetic is bf16 where that is fast: a few parts in a thousand per product.
TOLERANCE = 0.03


class Orthogonalize(Benchmark):
    """Five Polar Express iterations on a batch of matrices."""

    seed = 0

    def _setup(self, *shape: int) -> None:
        self.G = torch.randn(shape, device=self.device)

    def _run(self) -> None:
        self.out = self.kernel.newton_schulz.newton_schulz(self.G).float()

    def _verify(self) -> Tensor:
        expected = polynomial_of_singular_values(self.kernel, self.G)
        check(self.out, expected)
        return expected

    def setup_square(self) -> None:
        self._setup(4, 512, 512)

    def setup_wide(self) -> None:
        self._setup(2, 512, 2048)

    def setup_experts(self) -> None:
        self._setup(32, 256, 128)

    benchmark_square = benchmark_wide = benchmark_experts = _run
    verify_square = verify_wide = verify_experts = _verify


class Step(Benchmark):
    """One step on a layer of a transformer: four (512, 512) and three (2048, 512) matrices."""

    seed = 0
    lr, weight_decay = 1e-2, 0.1
    steps = 0

    def setup_layer(self) -> None:
        shapes = [(512, 512)] * 4 + [(2048, 512), (2048, 512), (512, 2048)]
        self.weights = [torch.nn.Parameter(torch.randn(s, device=self.device)) for s in shapes]
        for weight in self.weights:
            weight.grad = torch.randn_like(weight)
        self.before = [weight.detach().clone() for weight in self.weights]
        group = {"params": self.weights, "use_muon": True, "none_grad": False}
        self.optimizer = self.kernel.Muon([group], lr=self.lr, weight_decay=self.weight_decay)

    def _expected(self, before: Tensor, grad: Tensor) -> Tensor:
        """After the first step, when momentum and gradient have one direction."""
        update = polynomial_of_singular_values(self.kernel, grad)
        scale = 0.2 * max(before.shape) ** 0.5
        return before * (1 - self.lr * self.weight_decay) - self.lr * scale * update

    def benchmark_layer(self) -> None:
        self.optimizer.step()
        if self.steps == 0:
            self.out = flat(self.weights)
        self.steps += 1

    def verify_layer(self) -> Tensor:
        grads = [weight.grad for weight in self.weights if weight.grad is not None]
        expected = flat([self._expected(w, g) for w, g in zip(self.before, grads)])
        before = flat(self.before)
        check(self.out - before, expected - before)
        return expected


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def polynomial_of_singular_values(kernel: object, G: Tensor) -> Tensor:
    """P · p₅(…p₁(Σ)) · Qᵀ of G / (1.02 · ‖G‖) = P Σ Qᵀ, in float64."""
    family = kernel.newton_schulz.FAMILIES["polar_express"]  # type: ignore[attr-defined]
    norm = torch.linalg.matrix_norm(G.double(), keepdim=True) * family.norm_factor
    P, sigma, Q = torch.linalg.svd(G.double() / norm, full_matrices=False)
    for a, b, c in family.triples:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return (P * sigma.unsqueeze(-2) @ Q).float()


def check(out: Tensor, expected: Tensor) -> None:
    """The runner's own check is absolute, and would pass small values that are all wrong."""
    error = ((out - expected).norm() / expected.norm()).item()
    if not error < TOLERANCE:
        raise RuntimeError(f"relative error {error:.3g} exceeds {TOLERANCE}")
