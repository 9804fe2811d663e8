"""The Hub's benchmark: orthogonalization, and a whole step on the matrices of a transformer layer.

    kernels benchmark DIRECTORY   # of a build: a checkout after `make build`, a downloaded kernel

The runner calls the time of a reference over that of the package a speed-up. So the references are
the iteration and the step of torch.optim.Muon, in the arithmetic that the package takes on the
device and with its coefficients: torch's own products, one matrix after the other. The runner times
a reference once; `step.py` beside this file lets both take turns.

Before anything is timed, results are compared with singular values in float64: what an iteration
does to a matrix is its polynomials on the singular values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from kernels.benchmark import Benchmark
from torch import Tensor

# The arithmetic is bf16 where that is fast: a few parts in a thousand per product.
TOLERANCE = 0.03


class Orthogonalize(Benchmark):
    """Five Polar Express iterations on a batch of matrices."""

    seed = 0
    out: Any = None

    def _setup(self, *shape: int) -> None:
        self.G = torch.randn(shape, device=self.device)

    def _run(self) -> None:
        out = self.kernel.newton_schulz.newton_schulz(self.G)
        if self.out is None:
            check(out, polynomial_of_singular_values(self.kernel, self.G))
        self.out = out

    def _verify(self) -> Tensor:
        return torch.stack([newton_schulz_of_torch(self.kernel, G) for G in self.G])

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
    lr, weight_decay, momentum = 1e-2, 0.1, 0.95
    out: Any = None
    expected: Tensor | None = None  # weights after the reference's first step

    def setup_layer(self) -> None:
        shapes = [(512, 512)] * 4 + [(2048, 512), (2048, 512), (512, 2048)]
        self.weights = [torch.nn.Parameter(torch.randn(s, device=self.device)) for s in shapes]
        self.grads = [torch.randn_like(weight) for weight in self.weights]
        for weight, grad in zip(self.weights, self.grads):
            weight.grad = grad
        self.before = [weight.detach().clone() for weight in self.weights]
        self.reference = [(W.clone(), torch.zeros_like(W)) for W in self.before]
        group = {"params": self.weights, "use_muon": True, "none_grad": False}
        self.optimizer = self.kernel.Muon(
            [group], lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum
        )

    def benchmark_layer(self) -> None:
        self.optimizer.step()
        if self.out is None:
            self.out, before = flat(self.weights), flat(self.before)
            check(self.out - before, self._after_one_step() - before)

    def _after_one_step(self) -> Tensor:
        """When momentum and gradient have one direction."""
        updates = [polynomial_of_singular_values(self.kernel, G) for G in self.grads]
        return flat([self._stepped(W.clone(), U) for W, U in zip(self.before, updates)])

    def _stepped(self, W: Tensor, U: Tensor) -> Tensor:
        scale = 0.2 * max(W.shape) ** 0.5
        return W.mul_(1 - self.lr * self.weight_decay).add_(U, alpha=-self.lr * scale)

    def verify_layer(self) -> Tensor:
        for G, (W, B) in zip(self.grads, self.reference):
            B.mul_(self.momentum).add_(G)
            nesterov = G.add(B, alpha=self.momentum)
            self._stepped(W, newton_schulz_of_torch(self.kernel, nesterov))
        if self.expected is None:
            self.expected = flat([W for W, _ in self.reference])
        return self.expected


def newton_schulz_of_torch(kernel: Any, G: Tensor) -> Tensor:  # (rows, cols)
    """torch.optim.Muon's, whose own function has bfloat16 and one triple for all iterations."""
    family = kernel.newton_schulz.FAMILIES["polar_express"]
    dtype = kernel.newton_schulz.default_dtype(G.dtype, G.device)
    X = (G / (G.norm() * family.norm_factor)).to(dtype)
    is_tall = X.shape[0] > X.shape[1]
    X = X.T if is_tall else X
    for a, b, c in family.triples:
        gram = X @ X.T
        X = torch.addmm(X, torch.addmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.T if is_tall else X


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def polynomial_of_singular_values(kernel: Any, G: Tensor) -> Tensor:
    """P · p₅(…p₁(Σ)) · Qᵀ of G / (1.02 · ‖G‖) = P Σ Qᵀ, in float64."""
    family = kernel.newton_schulz.FAMILIES["polar_express"]
    norm = torch.linalg.matrix_norm(G.double(), keepdim=True) * family.norm_factor
    P, sigma, Q = torch.linalg.svd(G.double() / norm, full_matrices=False)
    for a, b, c in family.triples:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return (P * sigma.unsqueeze(-2) @ Q).float()


def check(out: Tensor, expected: Tensor) -> None:
    """The runner's own check is absolute, and would pass small values that are all wrong."""
    error = ((out.float() - expected).norm() / expected.norm()).item()
    if not error < TOLERANCE:
        raise RuntimeError(f"relative error {error:.3g} exceeds {TOLERANCE}")
