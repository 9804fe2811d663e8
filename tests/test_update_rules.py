"""Steps of `Muon` on one device: the float64 reference's numbers for every option, way of reading a
tensor as matrices, and awkward gradient."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import reference as ref
from comparisons import assert_equal, relative_error, relative_error_of_known
from kernel import as_arguments, optimizer
from layouts import MEMORY, randn

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SHAPES = [(24, 24), (40, 16), (16, 40)]
TRIPLES = [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]
NANOCHAT = dict(
    momentum_style="ema", beta2=0.95, cautious=True, decay_lr="adjusted", adjust_lr="original"
)
JULY = dict(ns_equilibrate=True, ns_renormalize=True, ns_norm_factor=1.01, ns_eps_absolute=1e-6)

# Movement of the weights relative to the reference's. float32: measured at most 3e-5. float64:
# measured at most 3e-14, and 5e-8 with the second moment, which is kept in float32. Momentum in 16
# bits is rounded twice a step, the weights once; where the sign of U·W hangs on a rounding,
# cautious decay is there or not: measured after four steps at most 3e-2 and 2e-2.
TOLERANCE = {FP64: 1e-10, FP32: 1e-4, BF16: 7e-2, FP16: 3e-2}

PRECISIONS = pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
PLAIN_AND_FULL = pytest.mark.parametrize(
    "options", [{}, dict(NANOCHAT, weight_decay=1.0)], ids=["plain", "nanochat"]
)


class Run:
    """The optimizer beside its reference, fed with the same gradients.

    Args:
        shapes: of the parameters, or parameters.
        options: of `Muon` (of all parameters, or one dict each: a group each).
        told: what the reference is told besides, where it has another word for it.
        constructor: arguments of `Muon`, and ``names`` and ``dtype`` of the parameters.
    """

    def __init__(self, shapes, options=None, told=None, names=None, dtype=FP32, **constructor):
        self.params = [
            shape
            if isinstance(shape, torch.Tensor)
            else nn.Parameter(randn(*shape, seed=i, dtype=dtype))
            for i, shape in enumerate(shapes)
        ]
        self.initial = [p.detach().clone() for p in self.params]
        constructor.setdefault("ns_dtype", torch.promote_types(dtype, FP32))
        groups = [{"params": self.params, "use_muon": True, **({"names": names} if names else {})}]
        if isinstance(options, list):
            groups = [dict(groups[0], params=[p], **o) for p, o in zip(self.params, options)]
            options = [{**given, **(told or {})} for given in options]
        else:
            options = {"lr": 0.05, **(options or {})}
            constructor.update(options)
            options = {**options, **(told or {})}
        self.optimizer = optimizer.Muon(groups, **as_arguments(constructor))
        self.reference = ref.ReferenceMuon(self.params, options)
        self.steps = 0

    def gradients(self):
        """Fresh random ones, in the layout of the parameters."""
        self.steps += 1
        return [
            torch.empty_like(p).copy_(randn(*p.shape, seed=1000 * self.steps + i))
            for i, p in enumerate(self.params)
        ]

    def step(self, grads=None):
        """A gradient keeps its value and is let go of, also if others hold it."""
        grads = self.gradients() if grads is None else grads
        for p, G in zip(self.params, grads):
            p.grad = G
        before = [(None, 0) if G is None else (G.clone(), G._version) for G in grads]
        self.optimizer.step()
        for p, G, (value, version) in zip(self.params, grads, before):
            assert p.grad is None
            assert G is None or (torch.equal(G, value) or G.isnan().any())
            assert G is None or G._version == version
        self.reference.step(grads)
        return self

    def change(self, **options):
        for held in (*self.optimizer.param_groups, *self.reference.options):
            held.update(options)

    def errors(self, i):
        """Returns the errors of movement, momentum and second moment of parameter i."""
        p, state, reference = self.params[i], self.optimizer.state[self.params[i]], self.reference
        moved = p.detach().double() - self.initial[i].double()
        errors = [relative_error_of_known(moved, reference.weights[i] - self.initial[i].double())]
        errors.append(relative_error(state["momentum_buffer"], reference.momentum[i]))
        if reference.second_moment[i] is not None:
            V = state["second_momentum_buffer"]
            assert V.dtype == FP32
            errors.append(relative_error(V.flatten(), reference.second_moment[i]))
        return errors

    def check(self, tolerance=None):
        for i, p in enumerate(self.params):
            bound = tolerance or TOLERANCE[p.dtype]
            if self.reference.second_moment[i] is not None:
                bound = max(bound, 1e-6)
            if p.numel():
                errors = self.errors(i)
                assert max(errors) < bound, (i, tuple(p.shape), errors)
        return self


def follow(shapes, options=None, steps=4, tolerance=None, **how):
    run = Run(shapes, options, **how)
    for _ in range(steps):
        run.step()
    return run.check(tolerance)


def weights_after(options, shapes=SHAPES, steps=3, dtype=FP32, **how):
    """The parameters after some steps in exact mode and their state, to compare bit by bit."""
    how = {"comm_dtype": torch.promote_types(dtype, FP32), **how}
    run = Run(shapes, options, told={"lr": 0, "expert": True}, dtype=dtype, **how)
    for _ in range(steps):
        for p, G in zip(run.params, run.gradients()):
            p.grad = G
        run.optimizer.step()
    return run.params, [run.optimizer.state[p] for p in run.params]


# -- each option -----------------------------------------------------------------------------------

OPTIONS = {
    "the defaults": {},
    "learning rate 1": dict(lr=1.0),
    "no decay": dict(weight_decay=0.0),
    "strong decay": dict(weight_decay=3.0),
    "momentum 0": dict(momentum=0.0),
    "cautious": dict(cautious=True, weight_decay=1.0),
    "second moment": dict(beta2=0.95),
    "second moment without memory": dict(beta2=0.0),
    "second moment of rows": dict(beta2=0.95, second_moment_side="rows"),
    "second moment of rows, blocks": dict(beta2=0.9, second_moment_side="rows", split=4),
    "maximize": dict(maximize=True),
    "three quintic steps": dict(ns_coefficients="quintic", ns_steps=3),
    "seven steps": dict(ns_steps=7),
    "explicit coefficients": dict(ns_coefficients=TRIPLES),
    "a large eps": dict(ns_eps=0.1),
    "a large absolute eps": dict(ns_eps_absolute=10.0),
    "another norm factor": dict(ns_norm_factor=1.5),
    "rows equilibrated": dict(ns_equilibrate=True),
    "renormalized": dict(ns_renormalize=True, ns_steps=3, ns_coefficients="quintic"),
    "nanochat of July": dict(NANOCHAT, **JULY),
    "nanochat": NANOCHAT,
    "nanochat, maximize": dict(NANOCHAT, maximize=True, weight_decay=1.0),
    "cautious second moment": dict(cautious=True, beta2=0.9, weight_decay=1.0),
    "cautious, adjusted": dict(cautious=True, decay_lr="adjusted", weight_decay=1.0),
    "maximize, averaged momentum": dict(maximize=True, momentum_style="ema"),
    "maximize, cautious, no nesterov": dict(maximize=True, cautious=True, nesterov=False),
}
OPTIONS |= {
    f"{style}, nesterov={nesterov}": dict(momentum_style=style, nesterov=nesterov, momentum=0.8)
    for style in ("classical", "ema")
    for nesterov in (True, False)
}
OPTIONS |= {
    f"scale {scale}, decay {decay}": dict(adjust_lr=scale, decay_lr=decay, weight_decay=1.0)
    for scale in ("match_rms_adamw", "original", "spectral", "none", 0.18)
    for decay in ("base", "adjusted")
}
OPTIONS |= {family: dict(ns_coefficients=family) for family in ref.FAMILIES}


@PRECISIONS
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_gives_the_references_numbers(name, dtype):
    follow(SHAPES, OPTIONS[name], dtype=dtype)
    if dtype is FP64 and "beta2" not in OPTIONS[name]:  # which the path without owners lacks
        follow(SHAPES, OPTIONS[name], dtype=dtype, use_distributed_muon=True)


@pytest.mark.parametrize("of_groups", [False, True])
@pytest.mark.parametrize("family", ref.LONGER_AND_SHORTER)
def test_families_of_other_counts_set_the_count(family, of_groups):
    count, given = len(ref.LONGER_AND_SHORTER[family]), dict(ns_coefficients=family, lr=0.05)
    run = follow(SHAPES, [given] * 3 if of_groups else given, told={"ns_steps": count})
    assert run.optimizer.param_groups[0]["ns_steps"] == count


@pytest.mark.parametrize("lr_dtype, shape", [(FP32, ()), (FP64, (1,))], ids=str)
@pytest.mark.parametrize("dtype, bound", [(FP32, 1e-6), (FP64, 1e-6), (BF16, 2e-3)], ids=str)
@pytest.mark.parametrize("options", [{}, NANOCHAT, {"weight_decay": 0.0}], ids=str)
def test_a_tensor_learning_rate_is_a_float_one(options, dtype, bound, lr_dtype, shape):
    lr = torch.full(shape, 2.0**-5, dtype=lr_dtype)
    tensor, number = (
        weights_after(dict(options, lr=rate, split=8), dtype=dtype)[0] for rate in (lr, 2.0**-5)
    )
    # lr·scale and lr·weight_decay are rounded to float32, which may tip a bit of a bfloat16 weight.
    for p, q in zip(tensor, number):
        assert p.dtype == dtype and relative_error(p, q) < bound
    assert torch.equal(lr, torch.full(shape, 2.0**-5, dtype=lr_dtype))


# -- how tensors are read as matrices --------------------------------------------------------------

BLOCKS = [[12, 6, 6], [6, 6, 12], [8, 8, 8], [20, 1, 3], [6, 12, 6], [24], 4, 24, 1]
STACKS = [(3, 12, 20), (2, 12, 8), (2, 3, 12, 10), (12, 9)]
EXPERTS = dict(told={"expert": True}, names=["experts"] * 4, expert_keys=["experts"])
CONVOLUTIONS = [(16, 3, 3, 3), (8, 4, 5), (12, 2, 2, 2, 2), (16, 8, 1, 1), (9, 7)]
TENSORS = {
    **{f"split {s}": ([(24, 10), (24, 30), (24, 24)], dict(split=s), {}) for s in BLOCKS},
    **{f"experts, split {s}": (STACKS, dict(split=s), EXPERTS) for s in (None, 4, [8, 3, 1])},
    "convolutions": (CONVOLUTIONS, dict(flatten=True), {}),
    "one row, one column, one number": ([(1, 9), (9, 1), (1, 1)], {}, {}),
}


@PLAIN_AND_FULL
@PRECISIONS
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_steps_as_its_matrices(name, dtype, options):
    shapes, own, how = TENSORS[name]
    follow(shapes, {**options, **own}, dtype=dtype, steps=3, **how)


def test_split_by_name_patterns_reaches_only_the_names_that_match():
    names = ["0.attention.qkv.weight", "_orig_mod.1.attention.q_proj.weight", "0.wo.weight"]
    split = {"*.qkv.*": [12, 6, 6], "1.*": 4, "*": 24}
    run = Run([(24, 16)] * 3, dict(split=split, beta2=0.9), told={"split": None}, names=names)
    each = [dict(lr=0.05, beta2=0.9, split=s) for s in ([12, 6, 6], 4, 24)]
    run.reference = ref.ReferenceMuon(run.params, each)
    run.step().step().check()


@PLAIN_AND_FULL
@pytest.mark.parametrize("of_gradients", ["contiguous", "channels last", "transposed"])
@pytest.mark.parametrize("memory", MEMORY)
def test_parameters_and_gradients_may_lie_anyhow_and_what_lies_between_stays(
    memory, of_gradients, options
):
    values = [randn(16, 6, 3, 3), randn(8, 6, seed=1), randn(20, 12, seed=2)]
    params = [nn.Parameter(MEMORY[memory](value)) for value in values[:2]]
    params.append(nn.Parameter(values[2][::2, 1::3]))
    before, strides = values[2].clone(), [p.stride() for p in params]
    run = Run(params, dict(options, flatten=True))
    for _ in range(3):
        run.step([MEMORY[of_gradients](G) for G in run.gradients()])
    run.check()
    assert [p.stride() for p in params] == strides
    assert torch.equal(values[2][1::2], before[1::2]) and torch.equal(
        values[2][:, ::3], before[:, ::3]
    )


# -- gradients with Inf and NaN, and none ----------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shapes, how, told", [
    ([(8, 12)] * 3, {}, {}), ([(3, 8, 12)] * 2, {}, {"expert": True}),
    ([(24, 12)] * 2, {"split": 8}, {}),
], ids=["parameters", "experts", "heads"])  # fmt: skip
def test_inf_and_nan_stay_within_their_matrix(shapes, how, told, bad):
    names = [f"layers.{i}.experts" for i in range(len(shapes))] if told else None
    run = Run(shapes, dict(NANOCHAT, **how), told, names, expert_keys=["experts"]).step()
    grads = run.gradients()
    ref.matrices_of(grads[0], **how, **told)[0][2, 3] = bad
    run.step(grads).step()
    for p, W in zip(run.params, run.reference.weights):
        actual = ref.matrices_of(p.detach(), **how, **told)
        for found, expected in zip(actual, ref.matrices_of(W, **how, **told)):
            if expected.isnan().any():
                assert found.isnan().all()
            else:
                assert relative_error(found, expected) < 1e-4
    assert sum(bool(p.isnan().any()) for p in run.params) == 1


@PLAIN_AND_FULL
@pytest.mark.parametrize("missing_grad", ["zero", "raise"])
def test_absent_gradients_are_skipped_or_count_as_zeros(missing_grad, options):
    run = Run([*SHAPES, (16, 40)], dict(options, missing_grad=missing_grad)).step()
    before = run.params[2].detach().clone()
    grads = run.gradients()
    grads[2] = None
    run.step(grads)
    assert torch.equal(run.params[2], before) == (missing_grad == "raise")
    run.step().check()


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
def test_dtypes_may_be_mixed_in_one_group():
    dtypes = [BF16, FP32, FP64, FP16] * 2
    params = [nn.Parameter(randn(24, 16, seed=i, dtype=d)) for i, d in enumerate(dtypes)]
    run = Run(params, dict(NANOCHAT, lr=0.2))
    run.step().step().step()
    for i, p in enumerate(params):
        assert p.dtype == dtypes[i] == run.optimizer.state[p]["momentum_buffer"].dtype
        assert max(run.errors(i)) < max(1e-4, TOLERANCE[p.dtype])  # the arithmetic is fp32's


@pytest.mark.parametrize("style", ["classical", "ema"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype, of_momentum, bound", [(BF16, FP32, 1e-6), (FP32, BF16, 3e-2)])
def test_momentum_is_kept_in_the_dtype_that_is_asked_for(
    dtype, of_momentum, bound, nesterov, style
):
    options = dict(nesterov=nesterov, momentum_style=style, lr=0.2)
    run = follow(SHAPES, options, dtype=dtype, tolerance=3e-2, momentum_dtype=of_momentum)
    for i, p in enumerate(run.params):
        assert run.optimizer.state[p]["momentum_buffer"].dtype == of_momentum
        assert run.errors(i)[1] < bound


# -- chunks ----------------------------------------------------------------------------------------


MATRICES = [(24, 16), (16, 24), (24, 16), (8, 8), (24, 16), (24, 16), (16, 24), (24, 16)]
STACKED = [(5, 8, 12), (7, 8, 12), (5, 3, 8, 12), (8, 12), (0, 8, 12), (2, 8, 12)]


@PLAIN_AND_FULL
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("shapes, split, arithmetic", [
    (MATRICES, None, FP32), (MATRICES, None, BF16), (STACKED, None, FP32), (STACKED, [5, 3], FP32),
], ids=str)  # fmt: skip
def test_the_chunk_size_changes_no_bit(shapes, split, arithmetic, chunk_size, options):
    options = dict(options, split=split)
    how = dict(names=["experts"] * len(shapes), expert_keys=["experts"], ns_dtype=arithmetic)
    whole = weights_after(options, shapes, **how)
    assert_equal(weights_after(options, shapes, chunk_size=chunk_size, **how), whole)


def test_more_experts_than_one_chunk_holds_by_bytes_are_those_of_many_chunks():
    how = dict(shapes=[(2100, 32, 32)], steps=1, names=["experts"], expert_keys=["experts"])
    options = dict(ns_coefficients="cubic5", beta2=0.9, lr=0.05)
    assert_equal(weights_after(options, **how), weights_after(options, chunk_size=700, **how))


# -- awkward matrices and groups -------------------------------------------------------------------


@PLAIN_AND_FULL
def test_empty_groups_and_empty_matrices_hold_nothing_back(options):
    nothing = [nn.Parameter(torch.zeros(shape)) for shape in [(0, 6), (6, 0), (0, 0), (0,)]]
    some = [nn.Parameter(randn(8, 6)), nn.Parameter(randn(5))]
    groups = [
        {"params": members, "use_muon": use_muon}
        for members, use_muon in [([], True), ([], False)]
        + [([*nothing[:3], some[0]], True), ([nothing[3], some[1]], False)]
    ]
    optim = optimizer.Muon(groups, **options)
    before = [p.detach().clone() for p in some]
    for _ in range(2):
        for p in (*nothing, *some):
            p.grad = torch.ones_like(p)
        optim.step()
    for p, old in zip(some, before):
        assert p.isfinite().all() and not torch.equal(p, old)
    assert len(optim.state_dict()["state"]) == 6


AWKWARD = {
    "zeros": torch.zeros(16, 12),
    "rank one": torch.outer(randn(16), randn(12, seed=1)),
    "one entry": torch.eye(16, 12) * (torch.arange(12) == 5),
    "equal": torch.full((16, 12), 2.5),
    "tiny": randn(16, 12) * 1e-30,
    "subnormal": randn(16, 12) * 1e-41,
    "huge": randn(16, 12) * 1e30,
    "far apart": randn(16, 12) * 10.0 ** torch.linspace(-30, 30, 12),
}


@PLAIN_AND_FULL
@pytest.mark.parametrize("arithmetic", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_gradients_give_finite_bounded_updates(kind, arithmetic, options):
    options = dict(options, weight_decay=0.0, adjust_lr="none", lr=1.0)
    for G in (AWKWARD[kind], AWKWARD[kind].t().contiguous()):
        run = Run([tuple(G.shape)], options, ns_dtype=arithmetic)
        for _ in range(3):
            before = run.params[0].detach().clone()
            run.step([G.clone()])
            moved = run.params[0].detach() - before
            # Singular values up to 1.3, from all of at most 12 directions.
            assert moved.isfinite().all() and moved.norm() < 1.3 * math.sqrt(12)
            assert moved.norm() == 0 if kind == "zeros" else moved.norm() > 0.5


@pytest.mark.parametrize("cautious", [False, True])
def test_a_zero_gradient_still_decays_the_weight(cautious):
    run = Run([(8, 6)], dict(lr=0.5, weight_decay=0.25, cautious=cautious))
    run.step([torch.zeros(8, 6)])
    assert torch.equal(run.params[0].detach(), run.initial[0] * 0.875)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("use_muon", [True, False])
def test_autograd_notices_that_weights_were_changed(use_muon):
    param = nn.Parameter(randn(8, 6))
    optim = optimizer.Muon([{"params": [param], "use_muon": use_muon}])
    loss = param.square().sum()
    param.grad = randn(8, 6, seed=1)
    optim.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- AdamW -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
def test_adamw_groups_equal_torchs_bit_for_bit(maximize):
    def params(seed, *dtypes):
        shapes = [(7,), (6, 5), (2, 3, 4), (33,), (64, 3)]
        each = zip(shapes, itertools.count(seed), itertools.cycle(dtypes))
        return [nn.Parameter(randn(*s, seed=number, dtype=d)) for s, number, d in each]

    groups = [
        dict(params=params(0, FP32), lr=1e-2, weight_decay=0.3),
        dict(params=params(10, BF16), lr=3e-2, adamw_betas=(0.8, 0.99), adamw_eps=1e-6),
        dict(params=params(20, FP32, BF16), lr=1e-3, weight_decay=0.0),
        dict(params=params(30, FP64), adamw_betas=(0.0, 0.9)),
        dict(params=params(40, FP32), missing_grad="zero"),
    ]
    words = {"adamw_betas": "betas", "adamw_eps": "eps"}
    copies = [{words.get(k, k): v for k, v in copy.deepcopy(group).items()} for group in groups]
    muon = optimizer.Muon([{**group, "use_muon": False} for group in groups], maximize=maximize)
    defaults = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    adamw = torch.optim.AdamW(copies, maximize=maximize, **defaults)
    pairs = list(zip(muon.param_groups, adamw.param_groups))
    for t in range(5):
        for group, theirs in pairs:
            counts_as_zeros = group["missing_grad"] == "zero"
            for i, (p, q) in enumerate(zip(group["params"], theirs["params"])):
                # Absent at first, in the middle, always.
                absent = (i, t) in [(0, 0), (1, 0), (1, 1), (2, 3)] or i == 4
                G = randn(*p.shape, seed=100 * t + i, dtype=p.dtype) * (not absent)
                p.grad, q.grad = (None if absent else G.clone()), G
                if absent and not counts_as_zeros:
                    q.grad = None
            if t == 2:
                group["lr"] = theirs["lr"] = 0.02
                group["weight_decay"] = theirs["weight_decay"] = 0.05
        muon.step()
        adamw.step()
    for p, q in (
        (p, q) for ours, theirs in pairs for p, q in zip(ours["params"], theirs["params"])
    ):
        assert torch.equal(p, q)
        for key, expected in adamw.state[q].items():
            assert_equal(muon.state[p][key], expected)


@pytest.mark.parametrize("of_base, grad", [
    (lambda base: base[:, :3], randn(8, 3)), (lambda base: base, randn(6, 8).t()),
    (lambda base: base, torch.arange(6.0).expand(8, 6)), (lambda base: base.t(), randn(6, 8)),
], ids=["columns of a larger one", "transposed gradient", "expanded", "transposed"])  # fmt: skip
@pytest.mark.parametrize("rounding", ["nearest", "exact", "stochastic"])
def test_adamw_updates_the_right_elements_whatever_the_strides(of_base, grad, rounding):
    # torch's fused kernel takes the storages for flat arrays of one order.
    is_wide = rounding == "nearest"
    base, grad = (t if is_wide else t.bfloat16() for t in (randn(8, 6), grad))
    before, param = base.clone(), nn.Parameter(of_base(base))
    reference = ref.ReferenceAdamW([param], dict(lr=0.1))
    param.grad = grad
    optimizer.Muon(
        [{"params": [param], "use_muon": False}], lr=0.1, weight_rounding=rounding
    ).step()
    reference.step([grad])
    bounds = dict(rtol=1e-5, atol=1e-6) if is_wide else dict(rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(param.double(), reference.weights[0], **bounds)
    assert torch.equal(base[:, 3:], before[:, 3:]) == (param.shape == (8, 3))
