"""One step of `Muon`, and many: the float64 reference's numbers for every option, layout of a
tensor and awkward gradient, on one device."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import reference as ref
from comparisons import assert_equal, relative_error, relative_error_of_known
from kernel import as_arguments, optimizer
from layouts import randn

SHAPES = [(24, 24), (40, 16), (16, 40)]
TRIPLES = [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]
NANOCHAT = dict(
    momentum_style="ema", beta2=0.95, cautious=True, decay_lr="adjusted", adjust_lr="original"
)
# Movement of the weights relative to the reference's. float32: measured at most 3e-5. float64:
# measured at most 3e-14, and 5e-8 with the second moment, which is kept in float32.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
SECOND_MOMENT_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}


class Run:
    """The optimizer beside its reference, fed with the same gradients.

    Args:
        shapes: of the parameters, or parameters.
        options: of `Muon` (of all parameters, or one dict each: a group each).
        as_reference: what the reference is told instead, where it has another word for it.
    """

    def __init__(self, shapes, options=None, as_reference=None, names=None, **constructor):
        dtype = constructor.pop("dtype", torch.float32)
        self.params = [
            shape
            if isinstance(shape, torch.Tensor)
            else nn.Parameter(randn(*shape, seed=i, dtype=dtype))
            for i, shape in enumerate(shapes)
        ]
        self.initial = [p.detach().clone() for p in self.params]
        constructor.setdefault("ns_dtype", torch.promote_types(dtype, torch.float32))
        if isinstance(options, list):
            groups = [
                {"params": [p], "use_muon": True, **given} for p, given in zip(self.params, options)
            ]
            told = [{**given, **(as_reference or {})} for given in options]
        else:
            options = {"lr": 0.05, **(options or {})}
            groups = [{"params": self.params, "use_muon": True}]
            constructor.update(options)
            told = {**options, **(as_reference or {})}
        if names is not None:
            groups[0]["names"] = names
        self.optimizer = optimizer.Muon(groups, **as_arguments(constructor))
        self.reference = ref.ReferenceMuon(self.params, told)
        self.steps = 0

    def gradients(self):
        """Fresh random ones, in the layout of the parameters."""
        self.steps += 1
        return [
            torch.empty_like(p).copy_(randn(*p.shape, seed=1000 * self.steps + i))
            for i, p in enumerate(self.params)
        ]

    def step(self, grads=None):
        grads = self.gradients() if grads is None else grads
        for p, G in zip(self.params, grads):
            p.grad = None if G is None else G.clone()
        self.optimizer.step()
        self.reference.step([None if G is None else G.detach() for G in grads])
        return self

    def errors(self, i):
        """Of the movement, the momentum and the second moment of parameter i."""
        p, state = self.params[i], self.optimizer.state[self.params[i]]
        moved = p.detach().double() - self.initial[i].double()
        expected = self.reference.weights[i] - self.initial[i].double()
        errors = [relative_error_of_known(moved, expected)]
        errors.append(relative_error(state["momentum_buffer"], self.reference.momentum[i]))
        if self.reference.second_moment[i] is not None:
            V = state["second_momentum_buffer"]
            assert V.dtype == torch.float32
            errors.append(relative_error(V.flatten(), self.reference.second_moment[i]))
        return errors

    def check(self, tolerance=None):
        for i, p in enumerate(self.params):
            bound = tolerance
            if bound is None:
                kept_in_float32 = self.reference.second_moment[i] is not None
                bound = (SECOND_MOMENT_TOLERANCE if kept_in_float32 else TOLERANCE)[p.dtype]
            if p.numel():
                errors = self.errors(i)
                assert max(errors) < bound, (i, tuple(p.shape), errors)


def follow(shapes, options=None, steps=4, tolerance=None, **how):
    run = Run(shapes, options, **how)
    for _ in range(steps):
        run.step()
    run.check(tolerance)
    return run


def weights_after(options, shapes=SHAPES, steps=3, dtype=torch.float32, names=None, **constructor):
    """The parameters after some steps and their state, for comparisons bit by bit."""
    params = [nn.Parameter(randn(*s, seed=i, dtype=dtype)) for i, s in enumerate(shapes)]
    group = {"params": params, "use_muon": True, **({"names": names} if names else {})}
    for key in ("ns_dtype", "comm_dtype"):  # exact mode
        constructor.setdefault(key, torch.promote_types(dtype, torch.float32))
    optim = optimizer.Muon([group], **as_arguments({**constructor, **options}))
    for t in range(1, steps + 1):
        for i, p in enumerate(params):
            p.grad = randn(*p.shape, seed=1000 * t + i, dtype=dtype)
        optim.step()
    return params, [optim.state[p] for p in params]


# Each option


OPTIONS = {
    "the defaults": {},
    "constant learning rate 1": dict(lr=1.0),
    "no decay": dict(weight_decay=0.0),
    "strong decay": dict(weight_decay=3.0),
    "momentum 0": dict(momentum=0.0),
    "momentum 0.5": dict(momentum=0.5),
    "cautious": dict(cautious=True, weight_decay=1.0),
    "decay by the adjusted rate": dict(decay_lr="adjusted", weight_decay=1.0),
    "adjusted decay, original scale": dict(decay_lr="adjusted", adjust_lr="original"),
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
    "rows equilibrated, absolute eps": dict(ns_equilibrate=True, ns_eps_absolute=10.0),
    "renormalized": dict(ns_renormalize=True, ns_steps=3, ns_coefficients="quintic"),
    "nanochat of July": dict(
        NANOCHAT,
        ns_equilibrate=True,
        ns_renormalize=True,
        ns_norm_factor=1.01,
        ns_eps_absolute=1e-6,
    ),
    "nanochat": NANOCHAT,
    "nanochat, maximize": dict(NANOCHAT, maximize=True, weight_decay=1.0),
    "cautious second moment": dict(cautious=True, beta2=0.9, weight_decay=1.0),
    "cautious, adjusted": dict(cautious=True, decay_lr="adjusted", weight_decay=1.0),
    "maximize, averaged momentum": dict(maximize=True, momentum_style="ema"),
    "maximize, cautious, no nesterov": dict(maximize=True, cautious=True, nesterov=False),
}
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@PRECISIONS
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_gives_the_references_numbers(name, dtype):
    follow(SHAPES, OPTIONS[name], dtype=dtype)


@pytest.mark.kernels_ci
@PRECISIONS
@pytest.mark.parametrize("style", ["classical", "ema"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_styles_give_the_references_numbers(style, nesterov, dtype):
    follow(SHAPES, dict(momentum_style=style, nesterov=nesterov, momentum=0.8), dtype=dtype)


@PRECISIONS
@pytest.mark.parametrize("decay_lr", ["base", "adjusted"])
@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original", "spectral", "none", 0.18])
def test_scales_give_the_references_numbers(adjust_lr, decay_lr, dtype):
    follow(SHAPES, dict(adjust_lr=adjust_lr, decay_lr=decay_lr, weight_decay=1.0), dtype=dtype)


@PRECISIONS
@pytest.mark.parametrize("family", ref.FAMILIES)
def test_families_give_the_references_numbers(family, dtype):
    follow(SHAPES, dict(ns_coefficients=family), dtype=dtype, steps=2)


@PRECISIONS
@pytest.mark.parametrize("ns_algorithm", ["standard", "gram"])
@pytest.mark.parametrize("family", ref.LONGER_AND_SHORTER)
def test_families_of_other_counts_set_the_count(family, ns_algorithm, dtype):
    given = dict(ns_coefficients=family)
    count = len(ref.LONGER_AND_SHORTER[family])
    constructor = dict(dtype=dtype, steps=2, ns_algorithm=ns_algorithm)
    run = follow(SHAPES, given, as_reference={"ns_steps": count}, **constructor)
    assert run.optimizer.param_groups[0]["ns_steps"] == count
    follow(SHAPES, [dict(given, lr=0.05)] * 3, as_reference={"ns_steps": count}, **constructor)


def test_options_differ_by_group():
    given = [
        dict(lr=0.1, momentum=0.5, beta2=0.9),
        dict(lr=0.01, nesterov=False, adjust_lr="none", ns_coefficients="you"),
        dict(lr=0.03, momentum_style="ema", maximize=True, cautious=True, weight_decay=1.0),
        dict(lr=0.02, split=8, decay_lr="adjusted"),
    ]
    follow([*SHAPES, (24, 24)], given)


def test_hyperparameters_may_change_between_steps():
    run = Run(SHAPES, dict(lr=0.1, beta2=0.9, cautious=True))
    schedule = [
        dict(lr=0.05, momentum=0.9),
        dict(lr=0.0, weight_decay=0.5),
        dict(lr=0.02, nesterov=False, beta2=0.5, adjust_lr="original"),
        dict(momentum_style="ema", ns_coefficients="quintic"),
        dict(maximize=True, cautious=False, decay_lr="adjusted", ns_steps=7),
    ]
    for change in schedule:
        run.step()
        run.optimizer.param_groups[0].update(change)
        for options in run.reference.options:
            options.update(change)
    run.step().check()


def test_the_second_moment_may_be_turned_on_later_and_off_again():
    run = Run(SHAPES).step()
    for beta2, V in [(0.9, [torch.zeros(max(s), dtype=torch.float64) for s in SHAPES]), (None, 0)]:
        run.optimizer.param_groups[0]["beta2"] = beta2
        for i, options in enumerate(run.reference.options):
            options["beta2"] = beta2
            run.reference.second_moment[i] = V[i] if V else None
        run.step().step().check()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["the defaults", "nanochat", "no decay", "strong decay"])
def test_a_tensor_learning_rate_is_a_float_one(name, dtype, lr_dtype, shape):
    lr = torch.full(shape, 2.0**-5, dtype=lr_dtype)
    options = dict(OPTIONS[name], split=8)
    tensor = weights_after(dict(options, lr=lr), dtype=dtype)[0]
    number = weights_after(dict(options, lr=2.0**-5), dtype=dtype)[0]
    # lr·scale and lr·weight_decay are rounded to float32, which may tip a bit of a bfloat16 weight.
    bound = 2e-3 if dtype == torch.bfloat16 else 1e-6
    for p, q in zip(tensor, number):
        assert p.dtype == dtype and relative_error(p, q) < bound
    assert torch.equal(lr, torch.full(shape, 2.0**-5, dtype=lr_dtype))


# How tensors are read as matrices


PLAIN_AND_FULL = pytest.mark.parametrize(
    "options", [{}, dict(NANOCHAT, weight_decay=1.0)], ids=["plain", "nanochat"]
)


@PLAIN_AND_FULL
@PRECISIONS
@pytest.mark.parametrize(
    "split", [[12, 6, 6], [6, 6, 12], [8, 8, 8], [20, 1, 3], [6, 12, 6], [24], 4, 24, 1], ids=str
)
def test_a_split_tensor_steps_as_its_blocks(split, dtype, options):
    follow([(24, 10), (24, 30), (24, 24)], dict(options, split=split), dtype=dtype)


def test_split_by_name_patterns_reaches_only_the_names_that_match():
    names = [
        "layers.0.attention.qkv.weight",
        "_orig_mod.layers.1.attention.q_proj.weight",
        "layers.0.attention.wo.weight",
    ]
    split = {"*.qkv.*": [12, 6, 6], "layers.1.*": 4, "*": 24}
    run = Run(
        [(24, 16)] * 3, dict(split=split, beta2=0.9), as_reference={"split": None}, names=names
    )
    run.reference = ref.ReferenceMuon(
        run.params, [dict(lr=0.05, beta2=0.9, split=s) for s in ([12, 6, 6], 4, 24)]
    )
    for _ in range(3):
        run.step()
    run.check()


@PLAIN_AND_FULL
@PRECISIONS
@pytest.mark.parametrize("split", [None, 4, [8, 3, 1]], ids=str)
def test_experts_are_matrices_of_their_own(split, dtype, options):
    shapes = [(3, 12, 20), (2, 12, 8), (2, 3, 12, 10), (12, 9)]
    names = ["moe.experts.w1", "moe.experts.w2", "moe.experts.w3", "wo.weight"]
    follow(
        shapes,
        dict(options, split=split),
        as_reference={"expert": True},
        names=names,
        expert_keys=["experts"],
        dtype=dtype,
        steps=3,
    )


@PLAIN_AND_FULL
@PRECISIONS
def test_flattened_convolutions_are_dim_0_by_all_the_rest(dtype, options):
    shapes = [(16, 3, 3, 3), (8, 4, 5), (12, 2, 2, 2, 2), (16, 8, 1, 1), (9, 7)]
    follow(shapes, dict(options, flatten=True), dtype=dtype, steps=3)


@PLAIN_AND_FULL
@pytest.mark.parametrize("grad_format", [torch.contiguous_format, torch.channels_last])
def test_channels_last_convolutions_are_those_in_any_format(grad_format, options):
    values = [randn(16, 6, 3, 3, seed=i) for i in range(2)]
    params = [nn.Parameter(v.to(memory_format=torch.channels_last)) for v in values]
    run = Run(params, dict(options, flatten=True))
    for _ in range(3):
        run.step([G.contiguous(memory_format=grad_format) for G in run.gradients()])
    run.check()
    for p in params:
        assert p.is_contiguous(memory_format=torch.channels_last)


def test_experts_are_experts_also_where_flatten_is_set():
    names = ["experts.w", "conv.weight"]
    run = Run([(3, 8, 12), (8, 3, 2, 2)], dict(flatten=True), names=names, expert_keys=["experts"])
    run.reference.options[0]["expert"] = True
    run.step().step().check()


@PLAIN_AND_FULL
def test_parameters_may_have_any_strides(options):
    def parameters():
        stored = [randn(20, 12, seed=1), randn(30, 48, seed=2), randn(6, 9, seed=3)]
        return [
            nn.Parameter(stored[0].t()),
            nn.Parameter(stored[1][::2, 1::3]),
            nn.Parameter(stored[2].as_strided((4, 9), (9, 1), 9)),
        ]

    run = Run(parameters(), dict(options))
    for _ in range(3):
        grads = run.gradients()
        grads[1] = grads[1].t().contiguous().t()
        run.step(grads)
    run.check()
    assert run.params[0].stride() == (1, 12) and run.params[1].stride() == (96, 3)


def test_weights_beside_a_strided_parameter_stay():
    stored = randn(8, 12)
    before, param = stored.clone(), nn.Parameter(stored[::2, ::2])
    Run([param]).step()
    assert torch.equal(stored[1::2], before[1::2]) and torch.equal(stored[:, 1::2], before[:, 1::2])
    assert not torch.equal(stored[::2, ::2], before[::2, ::2])


# Gradients with Inf and NaN, and none


BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])


@BAD
@pytest.mark.parametrize("cut", ["parameters", "experts", "heads"])
def test_inf_and_nan_stay_within_their_matrix(cut, bad):
    shapes, how, told = {
        "parameters": ([(8, 12)] * 3, {}, {}),
        "experts": ([(3, 8, 12)] * 2, {}, {"expert": True}),
        "heads": ([(24, 12)] * 2, {"split": 8}, {}),
    }[cut]
    names = [f"layers.{i}.experts" for i in range(len(shapes))] if told else None
    options = dict(NANOCHAT, **how)
    run = Run(shapes, options, told, names, expert_keys=["experts"]).step()
    grads = run.gradients()
    ref.matrices_of(grads[0], **how, **told)[0][2, 3] = bad
    run.step(grads).step()
    for p, W in zip(run.params, run.reference.weights):
        actual = ref.matrices_of(p.detach(), **how, **told)
        for found, expected in zip(actual, ref.matrices_of(W, **how, **told)):
            assert found.isnan().all() if expected.isnan().any() else found.isfinite().all()
            if not expected.isnan().any():
                assert relative_error(found, expected) < 1e-4
    assert sum(bool(p.isnan().any()) for p in run.params) == 1


@PLAIN_AND_FULL
@pytest.mark.parametrize("missing_grad", ["zero", "raise"])
def test_absent_gradients_are_skipped_or_count_as_zeros(missing_grad, options):
    options = dict(options, missing_grad=missing_grad)
    run = Run([*SHAPES, (16, 40)], options).step()
    before = run.params[2].detach().clone()
    grads = run.gradients()
    grads[2] = None
    run.step(grads)
    assert torch.equal(run.params[2], before) == (missing_grad == "raise")
    assert run.params[2].grad is None
    run.step().check()


def values_of_gradients(options, use_muon=True, **constructor):
    params = [nn.Parameter(randn(12, 8, seed=i)) for i in range(3)]
    optim = optimizer.Muon(
        [{"params": params, "use_muon": use_muon}], **as_arguments({**options, **constructor})
    )
    grads = [randn(12, 8, seed=10 + i) for i in range(3)]
    for _ in range(2):
        for p, G in zip(params, grads):
            p.grad = G
        optim.step()
    return params, grads


@pytest.mark.parametrize("none_grad", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_keep_their_values_also_for_other_holders(name, none_grad):
    params, grads = values_of_gradients(OPTIONS[name], none_grad=none_grad)
    for i, (p, G) in enumerate(zip(params, grads)):
        assert torch.equal(G, randn(12, 8, seed=10 + i)) and G._version == 0
        assert p.grad is (None if none_grad else G)


@pytest.mark.parametrize("maximize", [False, True])
def test_adamws_gradients_keep_their_values_and_stay(maximize):
    params, grads = values_of_gradients(dict(maximize=maximize), use_muon=False)
    for i, (p, G) in enumerate(zip(params, grads)):
        assert p.grad is G and torch.equal(G, randn(12, 8, seed=10 + i))


@pytest.mark.parametrize("chunk_size", [-1, 2])
def test_none_grad_frees_the_gradients_of_experts_that_several_chunks_share(chunk_size):
    run = Run([(5, 8, 6)] * 2, None, {"expert": True}, ["experts"] * 2, expert_keys=["experts"],
              chunk_size=chunk_size)  # fmt: skip
    run.step()
    assert all(p.grad is None for p in run.params)
    run.check()


# Dtypes


# Momentum is in the gradient's dtype and rounded twice a step, the weights once: to 4e-3 in
# bfloat16, to 5e-4 in float16. Measured after four steps: at most 2.4e-2 and 3e-3.
HALF_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Where the sign of U·W hangs on a rounding, cautious decay is there or not: float16 1.6e-2.
CAUTIOUS = 2e-2


@PLAIN_AND_FULL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_parameters_follow_within_their_rounding(dtype, options):
    bound = HALF_TOLERANCE[dtype] + (CAUTIOUS if options else 0.0)
    run = follow(SHAPES, dict(options, lr=0.2), dtype=dtype, tolerance=bound)
    for p in run.params:
        assert p.dtype == run.optimizer.state[p]["momentum_buffer"].dtype == dtype


@pytest.mark.kernels_ci
def test_dtypes_may_be_mixed_in_one_group():
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.float16] * 2
    params = [nn.Parameter(randn(24, 16, seed=i, dtype=d)) for i, d in enumerate(dtypes)]
    run = Run(params, dict(NANOCHAT, lr=0.2))
    for _ in range(3):
        run.step()
    for i, p in enumerate(params):
        assert p.dtype == dtypes[i] == run.optimizer.state[p]["momentum_buffer"].dtype
        half = p.dtype in HALF_TOLERANCE
        assert max(run.errors(i)) < (HALF_TOLERANCE[p.dtype] + CAUTIOUS if half else 1e-4)


@pytest.mark.parametrize("nesterov", [True, False])
def test_float32_momentum_of_bfloat16_parameters_is_kept_in_float32(nesterov):
    options = dict(nesterov=nesterov, lr=0.2)
    run = follow(
        SHAPES, options, dtype=torch.bfloat16, tolerance=3e-2, momentum_dtype=torch.float32
    )
    for i, p in enumerate(run.params):
        assert run.optimizer.state[p]["momentum_buffer"].dtype == torch.float32
        assert run.errors(i)[1] < 1e-6


@pytest.mark.parametrize("style", ["classical", "ema"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_bfloat16_momentum_of_float32_parameters_is_kept_in_bfloat16(nesterov, style):
    options = dict(nesterov=nesterov, momentum_style=style)
    run = follow(SHAPES, options, tolerance=3e-2, momentum_dtype=torch.bfloat16)
    for p in run.params:
        assert run.optimizer.state[p]["momentum_buffer"].dtype == torch.bfloat16


@PLAIN_AND_FULL
@pytest.mark.parametrize("ns_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_default_arithmetic_stays_near_the_reference(dtype, ns_dtype, options):
    # Each product rounds to 4e-3, and small matrices have few entries to average over: measured
    # at most 8e-2 of the movement, 9e-2 of V, which holds squares.
    shapes = [(24, 24), (40, 16), (16, 40), (128, 96), (17, 256), (1, 40)]
    run = Run(shapes, dict(options, lr=0.2), dtype=dtype, ns_dtype=ns_dtype)
    for _ in range(4):
        run.step()
    run.check(tolerance=0.15)


# Chunks


@PLAIN_AND_FULL
@pytest.mark.parametrize("arithmetic", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_the_chunk_size_changes_no_bit(chunk_size, arithmetic, options):
    shapes = [(24, 16), (16, 24), (24, 16), (8, 8), (24, 16), (24, 16), (16, 24), (24, 16)]
    options = dict(options, ns_dtype=arithmetic)
    whole = weights_after(options, shapes)
    assert_equal(weights_after(options, shapes, chunk_size=chunk_size), whole)


@PLAIN_AND_FULL
@pytest.mark.parametrize("split", [None, [5, 3]], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 7])
def test_experts_cut_into_chunks_change_no_bit(chunk_size, split, options):
    shapes = [(5, 8, 12), (7, 8, 12), (5, 3, 8, 12), (8, 12), (0, 8, 12), (2, 8, 12)]
    options = dict(options, split=split)
    how = dict(names=[f"experts.{i}" for i in range(6)], expert_keys=["experts"])
    whole = weights_after(options, shapes, **how)
    assert_equal(weights_after(options, shapes, chunk_size=chunk_size, **how), whole)


def test_more_experts_than_one_chunk_holds_by_bytes():
    shapes, how = [(2100, 32, 32)], dict(names=["experts"], expert_keys=["experts"])
    options = dict(ns_coefficients="cubic5", beta2=0.9, lr=0.05)
    (param,), (state,) = weights_after(options, shapes, 1, **how)
    for first, last in [(0, 4), (2046, 2050), (2096, 2100)]:
        some = nn.Parameter(randn(*shapes[0])[first:last].clone())
        run = Run([some], options, {"expert": True}, names=["experts"], expert_keys=["experts"])
        run.step([randn(*shapes[0], seed=1000)[first:last]])
        assert (
            torch.equal(some, param[first:last]) or relative_error(some, param[first:last]) < 1e-6
        )
        V = state["second_momentum_buffer"].view(2100, 32)[first:last]
        assert (
            relative_error(run.optimizer.state[some]["second_momentum_buffer"].view(-1, 32), V)
            < 1e-5
        )


def test_the_order_of_parameters_does_not_matter():
    shapes = [(24, 16), (16, 24), (24, 16), (8, 8)]
    values = [randn(*s, seed=i) for i, s in enumerate(shapes)]
    grads = [randn(*s, seed=10 + i) for i, s in enumerate(shapes)]
    results = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        params = {i: nn.Parameter(values[i].clone()) for i in order}
        optim = optimizer.Muon([{"params": list(params.values()), "use_muon": True}])
        for i, p in params.items():
            p.grad = grads[i].clone()
        optim.step()
        results.append([params[i] for i in range(4)])
    for one, other in itertools.combinations(results, 2):
        assert all(torch.equal(p, q) for p, q in zip(one, other))


# Awkward matrices and groups


@PLAIN_AND_FULL
def test_empty_groups_and_empty_matrices_hold_nothing_back(options):
    filled, vector = nn.Parameter(randn(8, 6)), nn.Parameter(randn(5))
    empty = [nn.Parameter(torch.zeros(shape)) for shape in [(0, 6), (6, 0), (0, 0)]]
    groups = [
        {"params": [], "use_muon": True},
        {"params": [], "use_muon": False},
        {"params": [*empty, filled], "use_muon": True},
        {"params": [vector, nn.Parameter(torch.zeros(0))], "use_muon": False},
    ]
    optim = optimizer.Muon(groups, **as_arguments(options))
    before = filled.detach().clone(), vector.detach().clone()
    for _ in range(2):
        for p in (*empty, filled, vector, groups[3]["params"][1]):
            p.grad = torch.ones_like(p)
        optim.step()
    assert not torch.equal(filled, before[0]) and not torch.equal(vector, before[1])
    assert filled.isfinite().all() and vector.isfinite().all()
    assert len(optim.state_dict()["state"]) == 6


@pytest.mark.kernels_ci
@PLAIN_AND_FULL
@PRECISIONS
def test_one_row_one_column_and_one_number_give_the_references_numbers(dtype, options):
    follow([(1, 9), (9, 1), (1, 1)], options, dtype=dtype)


AWKWARD = {
    "zeros": lambda: torch.zeros(16, 12),
    "rank one": lambda: torch.outer(randn(16), randn(12, seed=1)),
    "one entry": lambda: torch.eye(16, 12) * (torch.arange(12) == 5),
    "one row": lambda: torch.eye(16, 12)[:, 5:6] * randn(12),
    "equal": lambda: torch.full((16, 12), 2.5),
    "tiny": lambda: randn(16, 12) * 1e-30,
    "subnormal": lambda: randn(16, 12) * 1e-41,
    "huge": lambda: randn(16, 12) * 1e30,
    "far apart": lambda: randn(16, 12) * 10.0 ** torch.linspace(-30, 30, 12),
}


@PLAIN_AND_FULL
@pytest.mark.parametrize("arithmetic", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_gradients_give_finite_bounded_updates(kind, arithmetic, options):
    for transpose in (False, True):
        G = AWKWARD[kind]()
        G = G.t().contiguous() if transpose else G
        options = dict(options, weight_decay=0.0, adjust_lr="none")
        run = Run([tuple(G.shape)], dict(options, lr=1.0), ns_dtype=arithmetic)
        for _ in range(3):
            before = run.params[0].detach().clone()
            run.step([G])
            moved = run.params[0].detach() - before
            assert moved.isfinite().all()
            # Singular values up to 1.3, from all of at most 12 directions.
            assert moved.norm() < 1.3 * math.sqrt(12)
            assert moved.norm() == 0 if kind == "zeros" else moved.norm() > 0.5


@PLAIN_AND_FULL
def test_a_tiny_gradient_moves_weights_as_an_ordinary_one(options):
    moved = []
    for factor in (1.0, 1e-30, 1e30, 2.0**-100):
        run = Run([(16, 12)], dict(options, weight_decay=0.0)).step([randn(16, 12) * factor])
        moved.append(run.params[0].detach() - run.initial[0])
    for other in moved[1:]:
        assert relative_error(other, moved[0]) < 1e-4


def test_a_zero_gradient_still_decays_the_weight():
    run = Run([(8, 6)], dict(lr=0.5, weight_decay=0.25))
    run.step([torch.zeros(8, 6)])
    assert torch.equal(run.params[0].detach(), run.initial[0] * 0.875)


def test_cautious_decay_counts_a_zero_product_as_agreement():
    run = Run([(8, 6)], dict(lr=0.5, weight_decay=0.25, cautious=True))
    run.step([torch.zeros(8, 6)])
    assert torch.equal(run.params[0].detach(), run.initial[0] * 0.875)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("use_muon", [True, False])
def test_version_counters_grow_so_that_autograd_notices(use_muon):
    shapes = [(8, 6), (6, 8)]
    params = [nn.Parameter(randn(*s)) for s in shapes]
    optim = optimizer.Muon([{"params": params, "use_muon": use_muon}])
    for _ in range(2):
        versions = [p._version for p in params]
        for p in params:
            p.grad = randn(*p.shape, seed=1)
        optim.step()
        assert all(p._version > before for p, before in zip(params, versions))
    loss = (params[0] * 2).mul(params[0]).sum()
    params[0].grad = randn(8, 6)
    optim.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# AdamW


def adamw_beside_torchs(groups, **constructor):
    """Muon's AdamW groups and torch.optim.AdamW over copies of them; groups: (params, options)."""
    ours = [
        {
            "params": params,
            "use_muon": False,
            **{{"betas": "adamw_betas", "eps": "adamw_eps"}.get(k, k): v for k, v in o.items()},
        }
        for params, o in groups
    ]
    copies = [
        {"params": [nn.Parameter(p.detach().clone()) for p in params], **o} for params, o in groups
    ]
    defaults = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    return (
        optimizer.Muon(ours, **as_arguments(constructor)),
        torch.optim.AdamW(copies, **defaults, **constructor),
    )


def adamw_groups():
    def params(seed, *dtypes):
        shapes = [(7,), (6, 5), (2, 3, 4), (33,), (64, 3)]
        return [
            nn.Parameter(randn(*s, seed=seed + i, dtype=dtypes[i % len(dtypes)]))
            for i, s in enumerate(shapes)
        ]

    return [
        (params(0, torch.float32), dict(lr=1e-2, weight_decay=0.3)),
        (params(10, torch.bfloat16), dict(lr=3e-2, betas=(0.8, 0.99), eps=1e-6)),
        (params(20, torch.float32, torch.bfloat16), dict(lr=1e-3, weight_decay=0.0)),
        (params(30, torch.float64), dict(betas=(0.0, 0.9))),
    ]


@pytest.mark.parametrize("maximize", [False, True])
def test_adamw_groups_equal_torchs_bit_for_bit(maximize):
    muon, adamw = adamw_beside_torchs(adamw_groups(), maximize=maximize)
    for t in range(5):
        for group, theirs in zip(muon.param_groups, adamw.param_groups):
            for i, (p, q) in enumerate(zip(group["params"], theirs["params"])):
                G = randn(*p.shape, seed=100 * t + i, dtype=p.dtype)
                # Absent at first, in the middle, always.
                absent = (i, t) in [(0, 0), (1, 0), (1, 1), (2, 3)] or i == 4
                p.grad, q.grad = (None, None) if absent else (G, G.clone())
            if t == 2:
                group["lr"] = theirs["lr"] = 0.02
                group["weight_decay"] = theirs["weight_decay"] = 0.05
        muon.step()
        adamw.step()
    for group, theirs in zip(muon.param_groups, adamw.param_groups):
        for p, q in zip(group["params"], theirs["params"]):
            assert torch.equal(p, q)
            for key, expected in adamw.state[q].items():
                assert torch.equal(muon.state[p][key], expected)
                assert muon.state[p][key].dtype == expected.dtype


def test_adamw_counts_absent_gradients_as_zeros_where_it_is_told_to():
    ours, torchs = adamw_beside_torchs([([nn.Parameter(randn(6, 5))], {})])
    ours.param_groups[0]["missing_grad"] = "zero"
    for G in (randn(6, 5, seed=1), None, randn(6, 5, seed=2)):
        p, q = (o.param_groups[0]["params"][0] for o in (ours, torchs))
        p.grad, q.grad = G, torch.zeros(6, 5) if G is None else G.clone()
        ours.step()
        torchs.step()
    assert torch.equal(p, q)


def test_muon_and_adamw_groups_do_not_touch_each_other():
    run = Run(SHAPES)
    vector = nn.Parameter(randn(5))
    run.optimizer.add_param_group({"params": [vector], "use_muon": False, "lr": 0.1})
    expected = nn.Parameter(randn(5))
    torchs = torch.optim.AdamW([expected], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for t in range(3):
        vector.grad, expected.grad = randn(5, seed=t), randn(5, seed=t)
        run.step()
        torchs.step()
    run.check()
    assert torch.equal(vector, expected)


@pytest.mark.parametrize(
    ("of_base", "grad"),
    [
        (lambda base: base[:, :3], lambda p: torch.randn(p.shape)),
        (lambda base: base.clone(), lambda p: torch.randn(6, 8).t()),
        (lambda base: base.clone(), lambda p: torch.arange(6.0).expand(8, 6)),
        (lambda base: base.t(), lambda p: torch.randn(p.shape)),
    ],
    ids=["columns of a larger tensor", "transposed gradient", "expanded gradient", "transposed"],
)
def test_adamw_updates_the_right_elements_whatever_the_strides(of_base, grad):
    # torch's fused kernel takes the storages for flat arrays of one order.
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        base = torch.randn(8, 6)
        before = base.clone()
        param = torch.nn.Parameter(of_base(base))
        param.grad = grad(param)
        if ours:
            optim = optimizer.Muon([{"params": [param], "use_muon": False}], lr=0.1)
        else:
            optim = torch.optim.AdamW(
                [param], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
            )
        optim.step()
        results.append((param.detach().clone(), base != before))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
