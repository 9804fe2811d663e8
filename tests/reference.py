"""Independent float64 reference of every update rule: plain, slow, one matrix at a time.

Written from the formulas and never from the code under test, so it shares no name,
constant or helper with the package. Order: orthogonalization, the other formulas of one
step, the map from tensors to matrices, `ReferenceMuon` and `ReferenceAdamW` driven by the
package's option names, then the five source optimizers, each from its own formulas.

Notation: G gradient, B momentum buffer, U orthogonalized update, W weight, V second
moment; a matrix has shape (rows, cols), s = min(rows, cols), l = max(rows, cols).
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

# (a, b, c) of each iteration X <- aX + (bA + cA²)X with A = XXᵀ.
FAMILIES = {
    # K. Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
    "quintic": [(3.4445, -4.7750, 2.0315)],
    # Y. Jiacheng's five triples, fitted for five iterations (2025).
    "you": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    # Amsel, Persson, Musco, Gower, "The Polar Express" (arXiv 2505.16932), computed for
    # 5 iterations with safety factor 2e-2 and cushion 2, as nanochat has them.
    "polar_express": [
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ],
    # Grishina, Smirnov, Rakhuba, "CANS: Chebyshev-type Newton-Schulz" (arXiv 2506.10935).
    "cans": [
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ],
    # Relaxed cubic polynomials, no A² term (arXiv 2606.00371).
    "cubic5": [
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ],
}
# Made for other counts of iterations than five.
LONGER_AND_SHORTER = {
    # DeepSeek-V4, section 2.4: ten iterations in two stages.
    "deepseekv4": [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2,
}
CONSTANT_FAMILIES = {"quintic"}
CONVERGING_TRIPLE = (15 / 8, -10 / 8, 3 / 8)  # p(1) = 1, p'(1) = p''(1) = 0
NORM_FACTORS = {"polar_express": 1.02}  # every other family, and a list: 1


def coefficients_of(ns_coefficients, ns_steps=5) -> list[tuple[float, float, float]]:
    """The triples of all iterations.

    A constant family repeats its triple. A scheduled one gives its first `ns_steps`
    triples and goes on with `CONVERGING_TRIPLE`. An explicit list sets the count itself.
    """
    if isinstance(ns_coefficients, str):
        family = {**FAMILIES, **LONGER_AND_SHORTER}[ns_coefficients]
        if ns_coefficients in CONSTANT_FAMILIES:
            return family * ns_steps
        return (family + [CONVERGING_TRIPLE] * ns_steps)[:ns_steps]
    return list(ns_coefficients)


def norm_factor_of(ns_coefficients) -> float:
    """What the input norm is multiplied by: 1.02 for `polar_express`, 1 otherwise."""
    return NORM_FACTORS.get(ns_coefficients, 1.0) if isinstance(ns_coefficients, str) else 1.0


def scalar_map(sigma: Tensor, coefficients) -> Tensor:
    """What the iterations do to one singular value: p(σ) = aσ + bσ³ + cσ⁵, in turn."""
    for a, b, c in coefficients:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def largest_singular_value(ns_coefficients, ns_steps=5) -> float:
    """Largest singular value the iterations can return for any normalized input (on a
    fine grid); past 1.5 a shortened schedule deserves its warning."""
    sigma = torch.linspace(0, 1 / norm_factor_of(ns_coefficients), 200_001, dtype=torch.float64)
    return scalar_map(sigma, coefficients_of(ns_coefficients, ns_steps)).abs().max().item()


def iterate(X: Tensor, coefficients) -> Tensor:
    """X <- aX + (bA + cA²)X with A = XXᵀ, on the orientation with rows <= cols."""
    if X.shape[0] > X.shape[1]:
        return iterate(X.T, coefficients).T
    for a, b, c in coefficients:
        A = X @ X.T  # (s, s)
        X = a * X + (b * A + c * (A @ A)) @ X
    return X


def newton_schulz(
    G: Tensor,
    coefficients,
    norm_factor=1.0,
    eps=1e-7,
    eps_absolute=0.0,
    equilibrated=False,
    renormalized=False,
) -> Tensor:
    """U = iterate(X) of the normalized input, in float64. G: (rows, cols).

    X = G / max|G|, then X / (‖X‖·norm_factor + eps), where ‖X‖ is the Frobenius norm. Division by
    the largest magnitude comes first, so `eps` is relative to it and the scale of G never matters:
    a source that adds eps to ‖G‖ itself differs by about eps/‖G‖, or not at all where it is
    `eps_absolute`, which is added to ‖G‖. A zero or empty matrix gives zeros of its shape, a
    non-finite entry makes every entry NaN.
    """
    X = G.to(torch.float64)
    if X.numel() == 0 or X.abs().max() == 0:
        return torch.zeros_like(X)
    if equilibrated:
        X = equilibrate(X)
    eps = eps + eps_absolute / X.abs().max()
    X = X / X.abs().max()
    X = X / (frobenius(X) * norm_factor + eps)
    U = iterate(X, coefficients)
    return renormalize(U) if renormalized else U


def equilibrate(X: Tensor) -> Tensor:
    """Rows of norm ‖X‖_F/sqrt(rows), as nanochat (July 2026) has MuonEq (arXiv 2603.28254): norms
    of rows count as 1e-6 at least."""
    norms = X.square().sum(1, keepdim=True).sqrt()
    return X * (frobenius(X) / math.sqrt(len(X)) / norms.clamp(min=1e-6))


def renormalize(U: Tensor) -> Tensor:
    """Frobenius norm sqrt(s), as nanochat (July 2026) has Muon+ (arXiv 2602.21545): norms count as
    1e-6 at least."""
    return U * (math.sqrt(min(U.shape)) / frobenius(U).clamp(min=1e-6))


def momentum_update(
    B: Tensor, G: Tensor, mu: float, style="classical", nesterov=True
) -> tuple[Tensor, Tensor]:
    """(new B, direction to orthogonalize).

    classical (Sutskever et al. 2013, as torch.optim.SGD): B = μB + G; Nesterov G + μB.
    ema: B = μB + (1-μ)G; Nesterov (1-μ)G + μB. Without Nesterov the direction is B.
    """
    weight = {"classical": 1.0, "ema": 1.0 - mu}[style]
    B = mu * B + weight * G
    return B, (weight * G + mu * B if nesterov else B)


def update_scale(rows: int, cols: int, adjust_lr="match_rms_adamw") -> float:
    """match_rms_adamw: 0.2·sqrt(l) (Liu et al., "Muon is Scalable for LLM Training",
    arXiv 2502.16982, eq. 4); original: sqrt(max(1, rows/cols)) (K. Jordan);
    spectral: sqrt(rows/cols) (Yang et al., "A Spectral Condition for Feature Learning",
    arXiv 2310.17813); none: 1."""
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if isinstance(adjust_lr, float):
        return adjust_lr * math.sqrt(max(rows, cols))
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / cols)) if cols else 1.0
    if adjust_lr == "spectral":
        return math.sqrt(rows / cols) if rows and cols else 1.0
    return {"none": 1.0}[adjust_lr]


def normalize_second_moment(
    V: Tensor, U: Tensor, beta2: float, side="longer"
) -> tuple[Tensor, Tensor]:
    """(new V, rescaled U): NorMuon (arXiv 2510.05491) as nanochat has it. V: (l,), or (rows,).

    v = mean of U² over the shorter side (the columns if rows >= cols), or always over the
    columns (side "rows", as dion has it), V = β2·V + (1-β2)·v, U' = U / sqrt(max(V, 1e-10)),
    then U'·‖U‖_F / max(‖U'‖_F, 1e-10): the Frobenius norm stays.
    """
    if U.numel() == 0:
        return V, U
    short = 1 if side == "rows" or U.shape[0] >= U.shape[1] else 0
    v = U.square().mean(dim=short)  # (l,)
    V = beta2 * V + (1 - beta2) * v
    scaled = U / V.clamp(min=1e-10).sqrt().unsqueeze(short)
    return V, scaled * (frobenius(U) / frobenius(scaled).clamp(min=1e-10))


def frobenius(X: Tensor) -> Tensor:
    return X.square().sum().sqrt()


def update_weight(
    W: Tensor, U: Tensor, lr: float, scale: float, weight_decay=0.0, cautious=False, decay_lr="base"
) -> Tensor:
    """W - rate·wd·W - lr·scale·U, with rate = lr ("base") or lr·scale ("adjusted").

    Cautious (Chen et al., arXiv 2510.12402): decay only the entries with U·W >= 0, by the
    U that is applied (after second-moment normalization) and the weight before the step.
    """
    rate = {"base": lr, "adjusted": lr * scale}[decay_lr]
    decay = rate * weight_decay * W
    if cautious:
        decay = decay * decays(U, W)
    return W - decay - lr * scale * U


def decays(U: Tensor, W: Tensor) -> Tensor:
    """1 where cautious decay applies, 0 where not, NaN where roundings of U decide on its sign."""
    mask = (U * W >= 0).double()
    too_near = 1e-4 * U.square().mean().sqrt()
    return mask.masked_fill((U != 0) & (U.abs() < too_near), math.nan)


def qk_scales(logits, threshold, q_indices, k_indices):
    """Kimi K2 (arXiv 2507.20534), algorithm 1: what rows of each head are multiplied with.

    Returns, by head, (plain rows, rotated rows) of queries and plain rows of keys. Logit i is that
    of q_indices[i] and k_indices[i]. A head with several logits takes the strongest clip. Logits
    that are no finite numbers clip nothing.
    """
    gammas = [threshold / m if threshold < m < math.inf else 1.0 for m in map(float, logits)]
    gamma_of_q: dict[int, float] = {}
    keys: dict[int, float] = {}
    for head, gamma in zip(q_indices, gammas):
        gamma_of_q[head] = min(gamma, gamma_of_q.get(head, 1.0))
    for head, gamma in zip(k_indices, gammas):
        keys[head] = min(math.sqrt(gamma), keys.get(head, 1.0))
    queries = {head: (math.sqrt(gamma), gamma) for head, gamma in gamma_of_q.items()}
    return queries, keys


def adamw_update(W, G, m, v, t, lr, betas, eps, weight_decay):
    """(W, m, v) after step t = 1, 2, … of torch.optim.AdamW (arXiv 1711.05101, alg. 2).

    W(1 - lr·wd) - lr · m̂ / (sqrt(v̂) + eps), m̂ = m/(1-β1ᵗ), v̂ = v/(1-β2ᵗ).
    """
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * G
    v = beta2 * v + (1 - beta2) * G**2
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    return W * (1 - lr * weight_decay) - lr * m_hat / (v_hat.sqrt() + eps), m, v


def moonlight_adamw_update(W, G, m, v, t, lr, betas, eps, weight_decay):
    """The AdamW inside Moonlight's (and LlamaFactory's) Muon: eps before bias correction.

    W(1 - lr·wd) - lr/scale · m / (eps + sqrt(v)), scale = (1-β1ᵗ)/sqrt(1-β2ᵗ). It equals
    torch's with eps/sqrt(1-β2ᵗ) in place of eps: at t = 1, β2 = 0.95 an eps 4.5 times as
    large, and the same in the limit of many steps.
    """
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * G
    v = beta2 * v + (1 - beta2) * G**2
    scale = (1 - beta1**t) / math.sqrt(1 - beta2**t)
    return W * (1 - lr * weight_decay) - lr / scale * m / (eps + v.sqrt()), m, v


def matrices_of(tensor: Tensor, split=None, flatten=False, expert=False) -> list[Tensor]:
    """The matrices one stored tensor holds, in row-major order, as views of it.

    expert: every leading dimension counts experts (before `flatten`, where both are set);
    flatten: more than two dimensions become (dim 0, all the rest); then `split` cuts the
    rows of each: a list of block heights that add up to the rows, or one height that
    divides them. (Name patterns are the caller's to resolve.)
    """
    if expert:
        indices = itertools.product(*(range(n) for n in tensor.shape[:-2]))
        whole = [tensor[index] for index in indices]
    else:
        assert tensor.ndim == 2 or flatten
        whole = [tensor.view(tensor.shape[0], math.prod(tensor.shape[1:]))]
    return [block for matrix in whole for block in _row_blocks(matrix, split)]


def _row_blocks(matrix: Tensor, split) -> list[Tensor]:
    rows = matrix.shape[0]
    if split is None:
        return [matrix]
    heights = [split] * (rows // split) if isinstance(split, int) else list(split)
    return list(matrix.split(heights))


def to_float64(tensor: Tensor) -> Tensor:
    """A contiguous float64 copy that shares nothing with `tensor`."""
    copy = torch.empty(tensor.shape, dtype=torch.float64)
    return copy.copy_(tensor.detach())


MUON_DEFAULTS = dict(
    lr=1e-3, momentum=0.95, nesterov=True, ns_steps=5, weight_decay=0.1, maximize=False,
    adjust_lr="match_rms_adamw", momentum_style="classical", ns_coefficients="polar_express",
    ns_eps=1e-7, ns_eps_absolute=None, ns_norm_factor=None, ns_equilibrate=False,
    ns_renormalize=False, beta2=None, second_moment_side="longer", cautious=False, decay_lr="base",
    split=None, flatten=False, expert=False, missing_grad="raise",
)  # fmt: skip
ADAMW_DEFAULTS = dict(
    lr=1e-3, adamw_betas=(0.9, 0.95), adamw_eps=1e-8, weight_decay=0.1, maximize=False
)


def _matrices(tensor, o):
    return matrices_of(tensor, o["split"], o["flatten"], o["expert"])


def _moments(matrix, o):
    return len(matrix) if o["second_moment_side"] == "rows" else max(matrix.shape)


def _options_of_each(defaults, options, count) -> list[dict]:
    each = options if isinstance(options, list) else [options or {}] * count
    unknown = {key for given in each for key in given} - set(defaults)
    if len(each) != count or unknown:
        raise ValueError(f"{len(each)} options for {count} tensors, unknown {unknown}")
    return [{**defaults, **given} for given in each]


class ReferenceMuon:
    """Muon with the package's options, per parameter.

    `tensors` are copied to float64. `options`: one dict for all of them or a list with one
    dict each, keys as in `MUON_DEFAULTS`; change `self.options[i]` for a schedule.
    `step(grads)` takes a gradient or None per tensor (None: skipped, or zeros with
    `missing_grad="zero"`). `weights[i]` and `momentum[i]` have the tensor's shape,
    `second_moment[i]` is flat, the l entries of each matrix in turn, or None.
    """

    def __init__(self, tensors, options=None):
        self.weights = [to_float64(t) for t in tensors]
        self.momentum = [torch.zeros_like(W) for W in self.weights]
        self.options = _options_of_each(MUON_DEFAULTS, options, len(self.weights))
        self.second_moment = []
        for W, o in zip(self.weights, self.options):
            entries = sum(_moments(M, o) for M in _matrices(W, o))
            self.second_moment.append(None if o["beta2"] is None else W.new_zeros(entries))

    def step(self, grads):
        for i, G in enumerate(grads):
            if G is not None:
                self._step_parameter(i, to_float64(G))
            elif self.options[i]["missing_grad"] == "zero":
                self._step_parameter(i, torch.zeros_like(self.weights[i]))

    def _step_parameter(self, i, full_G):
        o = self.options[i]
        if o["maximize"]:
            full_G = -full_G
        parts = (_matrices(t, o) for t in (self.weights[i], full_G, self.momentum[i]))
        start = 0  # of this matrix in the flat second moment
        for W, G, B in zip(*parts):
            stop = start + _moments(W, o)
            V = None if o["beta2"] is None else self.second_moment[i][start:stop]
            start = stop
            self._step_matrix(W, G, B, V, o)

    @staticmethod
    def _step_matrix(W, G, B, V, o):
        """One step of one matrix, written into W, B and V."""
        style, nesterov, family = o["momentum_style"], o["nesterov"], o["ns_coefficients"]
        new_B, direction = momentum_update(B, G, o["momentum"], style, nesterov)
        coefficients = coefficients_of(family, o["ns_steps"] if isinstance(family, str) else None)
        factor = o["ns_norm_factor"] or norm_factor_of(family)
        how = o["ns_eps"], o["ns_eps_absolute"] or 0.0, o["ns_equilibrate"], o["ns_renormalize"]
        U = newton_schulz(direction, coefficients, factor, *how)
        if V is not None:
            new_V, U = normalize_second_moment(V, U, o["beta2"], o["second_moment_side"])
            V.copy_(new_V)
        scale = update_scale(*W.shape, o["adjust_lr"])
        decay = o["weight_decay"], o["cautious"], o["decay_lr"]
        W.copy_(update_weight(W, U, float(o["lr"]), scale, *decay))
        B.copy_(new_B)


class ReferenceAdamW:
    """AdamW with the package's option names, per parameter; see `ReferenceMuon`.

    `update` is `adamw_update` or `moonlight_adamw_update`.
    """

    def __init__(self, tensors, options=None, update=adamw_update):
        self.weights = [to_float64(t) for t in tensors]
        self.options = _options_of_each(ADAMW_DEFAULTS, options, len(self.weights))
        self.update = update
        self.exp_avg = [torch.zeros_like(W) for W in self.weights]
        self.exp_avg_sq = [torch.zeros_like(W) for W in self.weights]
        self.steps = [0] * len(self.weights)

    def step(self, grads):
        for i, (G, o) in enumerate(zip(grads, self.options)):
            if G is None:
                continue
            self.steps[i] += 1
            G = -to_float64(G) if o["maximize"] else to_float64(G)
            state = self.weights[i], G, self.exp_avg[i], self.exp_avg_sq[i], self.steps[i]
            hyper = float(o["lr"]), o["adamw_betas"], o["adamw_eps"], o["weight_decay"]
            self.weights[i], self.exp_avg[i], self.exp_avg_sq[i] = self.update(*state, *hyper)


class _Source:
    """A source's Muon: W(1 - lr·wd) - lr·scale·U, with U = iterate(D/(factor·‖D‖ + eps)).

    Of an averaged momentum B = lerp(B, G, 1-μ), D = lerp(G, B, μ) with Nesterov, else B; of others
    B = μB + G, D = G + μB or B.
    """

    is_averaged, factor, eps = False, 1.0, 1e-7
    triples = FAMILIES["quintic"] * 5

    def __init__(self, tensors, lr, mu, wd, nesterov=True):
        self.weights = [to_float64(t) for t in tensors]
        self.momentum = [torch.zeros_like(W) for W in self.weights]
        self.lr, self.mu, self.wd, self.nesterov = lr, mu, wd, nesterov

    def step(self, grads):
        for i, G in enumerate(grads):
            if G is not None:
                self._update(i, to_float64(G))

    def _update(self, i, G):
        U = self._scaled(self._direction(i, G))
        self.weights[i] = self.weights[i] * (1 - self.lr * self.wd) - self.lr * U

    def _direction(self, i, G):
        if self.is_averaged:
            self.momentum[i] = B = torch.lerp(self.momentum[i], G, 1 - self.mu)
            return torch.lerp(G, B, self.mu) if self.nesterov else B
        self.momentum[i] = B = self.mu * self.momentum[i] + G
        return G + self.mu * B if self.nesterov else B

    def _scaled(self, D):
        return self._scale(*D.shape) * self._orthogonalized(D)

    def _orthogonalized(self, D):
        return iterate(D / (self.factor * frobenius(D) + self.eps), self.triples)

    def _scale(self, rows, cols):
        return 0.2 * math.sqrt(max(rows, cols))


class MotifReference(_Source):
    """Muon of the motif-technologies/optimizer kernel.

    Always the five `you` iterations (its `ns_steps` is not read), scale 0.2·sqrt(max(rows, cols)).
    A tensor of three dimensions is (experts, rows, cols), each expert on its own.
    """

    triples = FAMILIES["you"]

    def __init__(self, tensors, lr=1e-3, momentum=0.95, nesterov=True, weight_decay=0.1):
        super().__init__(tensors, lr, momentum, weight_decay, nesterov)

    def _scaled(self, D):
        return torch.stack([*map(self._scaled, D)]) if D.ndim == 3 else super()._scaled(D)


class NanochatReference(_Source):
    """Muon of nanochat's MuonAdamW and DistMuonAdamW, in the version with norm·1.02.

    Averaged momentum with Nesterov, X = D/(1.02·‖D‖ + 1e-6), the first `ns_steps` Polar Express
    iterations (five at most), v = mean(U²) over the shorter side, V = lerp(V, v, 1-β2) with
    β2 = None meaning 0, U scaled by rsqrt(max(V, 1e-10)) and back to its norm, then with
    lr' = lr·max(1, rows/cols)^0.5 in both terms: W - lr'·U - lr'·wd·W·[U·W >= 0].
    """

    is_averaged, factor, eps = True, 1.02, 1e-6

    def __init__(self, tensors, lr, momentum=0.95, ns_steps=5, beta2=None, weight_decay=0.0):
        super().__init__(tensors, lr, momentum, weight_decay)
        self.beta2 = 0.0 if beta2 is None else beta2
        self.triples = FAMILIES["polar_express"][:ns_steps]
        self.second_moment = [W.new_zeros(max(W.shape)) for W in self.weights]

    def _update(self, i, G):
        W, (rows, cols) = self.weights[i], G.shape
        U = self._orthogonalized(self._direction(i, G))
        dim, length = (-1, cols) if rows >= cols else (-2, rows)
        v = U.square().mean(dim)  # (l,)
        self.second_moment[i] = V = torch.lerp(self.second_moment[i], v, 1 - self.beta2)
        step = V.clamp(min=1e-10).rsqrt()
        old_norm = (v.sum() * length).sqrt()
        new_norm = ((v * length) * step.square()).sum().sqrt()
        U = U * (step * (old_norm / new_norm.clamp(min=1e-10))).unsqueeze(dim)
        lr = self.lr * max(1.0, rows / cols) ** 0.5
        self.weights[i] = W - lr * U - lr * self.wd * W * decays(U, W)


class NanochatJulyReference(NanochatReference):
    """Muon of nanochat's MuonAdamW as of July 2026.

    Each row d of D becomes d·(‖D‖/sqrt(rows))/max(‖d‖, 1e-6), then X = D/(1.01·‖D‖ + 1e-6), Polar
    Express, U = X·sqrt(s)/max(‖X‖, 1e-6). All else as before, but for β2 = 0.9 by default.
    """

    factor = 1.01

    def __init__(self, tensors, lr, momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=0.0):
        super().__init__(tensors, lr, momentum, ns_steps, beta2, weight_decay)

    def _orthogonalized(self, D):
        norms = torch.linalg.vector_norm(D, dim=1)  # (rows,)
        D = D * (torch.linalg.vector_norm(D) / len(D) ** 0.5 / norms.clamp(min=1e-6))[:, None]
        X = super()._orthogonalized(D)
        return X * (min(X.shape) ** 0.5 / torch.linalg.vector_norm(X).clamp(min=1e-6))


class NorMuonReference(_Source):
    """microsoft/dion's ``NorMuon``: Polar Express with 1.02·‖D‖ + eps, and scale sqrt(rows/cols).

    v = mean of U² over the columns, V = lerp(V, v, 1-β2), U' = U/(sqrt(V) + 1e-8), and back to the
    Frobenius norm of U, on every shape.
    """

    factor, triples = 1.02, FAMILIES["polar_express"]

    def __init__(self, tensors, lr=0.01, mu=0.95, muon_beta2=0.95, weight_decay=0.01, eps=1e-8):
        super().__init__(tensors, lr, mu, weight_decay, nesterov=False)
        self.beta2, self.eps = muon_beta2, eps
        self.second_moment = [W.new_zeros(len(W), 1) for W in self.weights]

    def _update(self, i, G):
        U = self._orthogonalized(self._direction(i, G))
        v = U.square().mean(1, keepdim=True)  # (rows, 1)
        self.second_moment[i] = V = torch.lerp(self.second_moment[i], v, 1 - self.beta2)
        scaled = U / (V.sqrt() + 1e-8)
        U = scaled * (frobenius(U) / frobenius(scaled).clamp(min=1e-8))
        W, (rows, cols) = self.weights[i], G.shape
        self.weights[i] = W - self.lr * self.wd * W - self.lr * math.sqrt(rows / cols) * U


class EmergingReference(_Source):
    """Muon of NVIDIA's Emerging-Optimizers, 0.5.0a0.

    Averaged momentum, X = D/‖D‖, and a scale of sqrt(max(rows, cols)) ("spectral"), sqrt(max(1,
    rows/cols)) ("shape_scaling") or sqrt(rows/cols) ("unit_rms_norm"), times an extra one.
    """

    COEFFICIENTS = {
        "simple": FAMILIES["quintic"] * 20,
        "quintic": FAMILIES["you"],
        "cans": FAMILIES["cans"] + FAMILIES["cans"][-1:] * 9,
        "deepseekv4": LONGER_AND_SHORTER["deepseekv4"] + [(2.0, -1.5, 0.5)] * 9,
        # Polar Express with divisions by powers of 1.01, rounded to four digits.
        "polar_express": [
            (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568), *[(1.8750, -1.2500, 0.3750)] * 9,
        ],
    }  # fmt: skip
    is_averaged, eps = True, 0.0

    def __init__(
        self, tensors, lr=3e-4, momentum=0.95, weight_decay=0.01, nesterov=False,
        coefficient_type="quintic", num_ns_steps=5, scale_mode="spectral", extra_scale_factor=1.0,
    ):  # fmt: skip
        super().__init__(tensors, lr, momentum, weight_decay, nesterov)
        self.triples = self.COEFFICIENTS[coefficient_type][:num_ns_steps]
        self.mode, self.extra = scale_mode, extra_scale_factor

    def _scale(self, rows, cols):
        ratio = {"spectral": max(rows, cols), "shape_scaling": max(1, rows / cols)}
        return self.extra * math.sqrt({**ratio, "unit_rms_norm": rows / cols}[self.mode])


class KellerJordanReference(_Source):
    """Muon of KellerJordan/Muon.

    Averaged momentum with Nesterov, X = D/(‖D‖ + 1e-7), quintic ×5, scale max(1, rows/cols)^0.5. A
    missing gradient is zeros. A 4-D convolution is orthogonalized as (out, rest), but its scale
    takes the gradient's last two dimensions, the kernel's height and width: 1 for every square
    kernel, where a flattened (out, rest) matrix would have sqrt(max(1, out/rest)).
    """

    is_averaged = True

    def __init__(self, tensors, lr=0.02, weight_decay=0.0, momentum=0.95):
        super().__init__(tensors, lr, momentum, weight_decay)

    def step(self, grads):
        super().step([torch.zeros_like(W) if G is None else G for G, W in zip(grads, self.weights)])

    def _scaled(self, D):
        matrix = D.flatten(1) if D.ndim == 4 else D
        scale = max(1, D.shape[-2] / D.shape[-1]) ** 0.5
        return scale * self._orthogonalized(matrix).reshape(D.shape)


class MoonlightReference(_Source):
    """Muon of Moonlight and of LlamaFactory (arXiv 2502.16982), 2-D parameters: quintic ×
    `ns_steps`, scale 0.2·sqrt(max(rows, cols)). Its AdamW: `moonlight_adamw_update`."""

    def __init__(self, tensors, lr=1e-3, wd=0.1, momentum=0.95, nesterov=True, ns_steps=5):
        super().__init__(tensors, lr, momentum, wd, nesterov)
        self.triples = FAMILIES["quintic"] * ns_steps


class TorchMuonReference(_Source):
    """torch.optim.Muon.

    Averaged momentum, X = D/max(‖D‖, eps), one triple `ns_steps` times, scale
    sqrt(max(1, rows/cols)) ("original", None), 0.2·sqrt(max(rows, cols)) ("match_rms_adamw") or
    sqrt(rows/cols) ("spectral_unclamped").
    """

    is_averaged = True

    def __init__(
        self, tensors, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True,
        ns_coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7, ns_steps=5, adjust_lr_fn=None,
    ):  # fmt: skip
        super().__init__(tensors, lr, momentum, weight_decay, nesterov)
        self.triples, self.eps, self.adjust_lr_fn = [ns_coefficients] * ns_steps, eps, adjust_lr_fn

    def _orthogonalized(self, D):
        return iterate(D / frobenius(D).clamp(min=self.eps), self.triples)

    def _scale(self, rows, cols):
        return {
            "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
            "spectral_unclamped": math.sqrt(rows / cols),
        }.get(self.adjust_lr_fn, math.sqrt(max(1, rows / cols)))


class DionReference(_Source):
    """microsoft/dion's ``Muon``, of matrices.

    The five triples of `you`, or Polar Express with 1.02·‖D‖ + eps; scale sqrt(rows/cols)
    ("spectral_norm"), 0.2·sqrt(max(rows, cols)) ("rms_norm") or 1 (None); with cautious_wd the
    decay only where U·W ≥ 0. With split_sizes or num_heads each block of rows is a matrix.
    """

    def __init__(
        self, tensors, lr=0.01, mu=0.95, weight_decay=0.01, epsilon=1e-8, nesterov=False,
        adjust_lr="spectral_norm", cautious_wd=False, use_polar_express=False, num_heads=1,
        split_sizes=None,
    ):  # fmt: skip
        super().__init__(tensors, lr, mu, weight_decay, nesterov)
        self.eps, self.adjust_lr, self.cautious = epsilon, adjust_lr, cautious_wd
        family, self.factor = ("polar_express", 1.02) if use_polar_express else ("you", 1.0)
        self.triples, self.num_heads, self.split_sizes = FAMILIES[family], num_heads, split_sizes

    def _update(self, i, G):
        D = self._direction(i, G)
        sizes = self.split_sizes or [len(D) // self.num_heads] * self.num_heads
        U = torch.cat([self._scaled(block) for block in D.split(sizes)])
        W = self.weights[i]
        decayed = W * decays(U, W) if self.cautious else W
        self.weights[i] = W - self.lr * self.wd * decayed - self.lr * U

    def _scale(self, rows, cols):
        scales = {"spectral_norm": math.sqrt(rows / cols), "rms_norm": super()._scale(rows, cols)}
        return scales.get(self.adjust_lr, 1.0)
