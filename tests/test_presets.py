"""Presets: one changed line gives the numbers of the source, as tests/reference.py has it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reference as ref
from comparisons import relative_error, relative_error_of_known
from kernel import optimizer
from layouts import params_of, randn
from models import Model
from ranks import on_ranks

presets = optimizer.presets
SHAPES = [(24, 24), (40, 16), (16, 40), (64, 12)]
FP32 = {"ns_dtype": torch.float32}

# How far the movement of the weights may be from the source's, relative to it.
# Arithmetic in float32: measured at most 1.4e-5. Updates that travel in bfloat16 round to 4e-3.
FLOAT32, BFLOAT16 = 1e-4, 4e-2

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*leave singular values"),  # of a short Polar Express
    pytest.mark.usefixtures("one_thread"),
]


def parameters(shapes=SHAPES, seed=0, dtype=torch.float32):
    """Returns weights of a realistic size; larger ones would round a step of 1e-3 to 4 digits."""
    return [nn.Parameter((randn(*s, seed=seed + i) * 0.1).to(dtype)) for i, s in enumerate(shapes)]


def gradients(params, t):
    return [randn(*p.shape, seed=1000 * t + i, dtype=p.dtype) for i, p in enumerate(params)]


def run(steps, *pairs, absent=(), after=None):
    """Steps optimizers and the references beside them on the same fresh gradients.

    Args:
        pairs: (optimizer, its parameters, reference, ...): every reference follows all of them.
        absent: (step, parameter) without gradient.
        after: called with the number of steps done.
    """
    for t in range(1, steps + 1):
        for _, params, *sources in pairs:
            grads = gradients(params, t)
            grads = [None if (t, i) in absent else G for i, G in enumerate(grads)]
            for p, G in zip(params, grads):
                p.grad = None if G is None else G.clone()
            for source in sources:
                source.step(grads)
        for optim in {id(optim): optim for optim, *_ in pairs}.values():
            optim.step()
        if after is not None:
            after(t)


def check(params, initial, weights, tolerance):
    for i, (p, before, W) in enumerate(zip(params, initial, weights)):
        moved = p.detach().double() - before.double()
        error = relative_error_of_known(moved, W - before.double())
        assert error < tolerance, (i, tuple(p.shape), error)


def copies(params):
    return [p.detach().clone() for p in params]


SOURCES = {
    "motif": ref.MotifReference,
    "torch_muon": ref.TorchMuonReference,
    "keller_jordan": ref.KellerJordanReference,
    "moonlight": ref.MoonlightReference,
    "dion": ref.DionReference,
    "normuon": ref.NorMuonReference,
    "emerging_optimizers": ref.EmergingReference,
    "2026-02": ref.NanochatReference,  # versions of nanochat's MuonAdamW
    "2026-07": ref.NanochatJulyReference,
}
NANOCHATS = ("2026-02", "2026-07")
PRESETS = [name for name in SOURCES if name not in NANOCHATS]
NANOCHAT = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=0.2)
ARGUMENTS = {
    "motif": [dict(), dict(lr=0.02, momentum=0.9, nesterov=False, weight_decay=0.3)],
    "torch_muon": [
        dict(),
        dict(lr=0.02, weight_decay=0.3, momentum=0.9, nesterov=False),
        dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=4, eps=1e-6),
        dict(ns_steps=3, adjust_lr_fn="match_rms_adamw"),
        dict(adjust_lr_fn="original", lr=0.1),
        dict(adjust_lr_fn="spectral_unclamped", lr=0.1),
    ],
    "keller_jordan": [dict(), dict(lr=0.1, weight_decay=0.3, momentum=0.9)],
    "moonlight": [dict(), dict(lr=0.02, wd=0.3, momentum=0.9, nesterov=False, ns_steps=6)],
    "dion": [
        dict(),
        dict(lr=0.02, mu=0.9, nesterov=True, weight_decay=0.3, adjust_lr="rms_norm"),
        dict(adjust_lr=None, epsilon=1e-6),
        dict(use_polar_express=True, cautious_wd=True, weight_decay=0.3),
    ],
    "normuon": [dict(), dict(lr=0.02, mu=0.9, muon_beta2=0.8, weight_decay=0.3)],
    "emerging_optimizers": [
        dict(),
        dict(lr=0.02, extra_scale_factor=0.2, weight_decay=0.3, nesterov=True, num_ns_steps=3),
        dict(coefficient_type="polar_express", num_ns_steps=9, scale_mode="shape_scaling"),
        dict(coefficient_type="deepseekv4", num_ns_steps=10, scale_mode="unit_rms_norm"),
        dict(coefficient_type="simple", num_ns_steps=6, extra_scale_factor=0.5),
        *(dict(coefficient_type="cans", num_ns_steps=steps) for steps in (3, 5)),
    ],
    "2026-02": [
        NANOCHAT,
        {**NANOCHAT, "beta2": None},
        {**NANOCHAT, "beta2": 0.95, "momentum": 0.85, "weight_decay": 1.0},
        {**NANOCHAT, "weight_decay": 0.0, "lr": 0.1},
        {**NANOCHAT, "ns_steps": 3},
    ],
    "2026-07": [NANOCHAT],
}
CASES = [(name, arguments) for name in SOURCES for arguments in ARGUMENTS[name]]
EVERY_CASE = pytest.mark.parametrize("name, arguments", CASES, ids=str)
EVERY_SOURCE = pytest.mark.parametrize("name", SOURCES)


def make(name, params, arguments, **options):
    """The optimizer of a source's matrices, from the arguments of its constructor."""
    if name in NANOCHATS:
        groups = [{"kind": "muon", "params": params, **arguments}]
        return optimizer.MuonAdamW(groups, version=name, **options)
    if name == "moonlight":
        return optimizer.Muon(**presets.moonlight(muon_params=params, **arguments), **options)
    params = [{"params": params, "use_muon": True}] if name == "motif" else params
    return optimizer.Muon(**getattr(presets, name)(params, **arguments), **options)


def beside_source(name, arguments, dtype=torch.float32, **options):
    params = parameters(dtype=dtype)
    source, initial = SOURCES[name](params, **arguments), copies(params)
    return make(name, params, arguments, **options), params, source, initial


@EVERY_CASE
def test_presets_give_their_sources_numbers_in_float64(name, arguments):
    # eps is added to the norm of the matrix scaled to 1, not of the matrix itself: 1e-7 apart.
    optim, params, source, initial = beside_source(name, arguments, torch.float64)
    run(20, (optim, params, source))
    check(params, initial, source.weights, 1e-5)
    for i, p in enumerate(params):
        state = optim.state[p]
        assert relative_error(state["momentum_buffer"], source.momentum[i]) < 1e-14
        if hasattr(source, "second_moment"):
            V = source.second_moment[i].flatten()
            assert relative_error(state["second_momentum_buffer"], V) < 1e-6


@EVERY_SOURCE
def test_missing_gradients_and_those_after_a_step_are_what_they_are_in_the_source(name):
    # Keller Jordan's takes missing ones for zeros; the others skip the matrix. Motif's are let go.
    optim, params, source, initial = beside_source(name, ARGUMENTS[name][0], **FP32)
    run(4, (optim, params, source), absent=[(1, 0), (2, 1), (3, 1), (3, 2)])
    check(params, initial, source.weights, FLOAT32)
    for p, B in zip(params, source.momentum):
        assert relative_error(optim.state[p]["momentum_buffer"], B) < 1e-6
    assert all((p.grad is None) is (name == "motif") for p in params)


@EVERY_SOURCE
def test_learning_rates_may_be_tensors(name):
    arguments = {**ARGUMENTS[name][0], "lr": torch.tensor(0.02)}
    optim, params, source, initial = beside_source(name, arguments, **FP32)
    source.lr = float(source.lr)
    run(2, (optim, params, source))
    optim.param_groups[0]["lr"].fill_(0.005)
    source.lr = 0.005
    run(2, (optim, params, source))
    check(params, initial, source.weights, FLOAT32)


# Sources that divide by max(norm, eps), whose updates shrink below eps where this package's do not.
CLAMPED = ("torch_muon", "emerging_optimizers")
NORMS = [
    (name, norm)
    for name in SOURCES
    for norm in (1, 1e-3, 1e-5, *(() if name in CLAMPED else (1e-9,)))
]


@pytest.mark.parametrize("name, norm", NORMS)
def test_presets_give_their_sources_numbers_however_small_gradients_are(name, norm):
    """Every gradient has this norm. Measured at most 3e-6."""
    arguments = ARGUMENTS[name][0]
    optim, params, source, initial = beside_source(name, arguments, torch.float64, **FP32)
    for t in range(1, 4):
        grads = [G * norm / G.norm() for G in gradients(params, t)]
        for p, G in zip(params, grads):
            p.grad = G.clone()
        source.step(grads)
        optim.step()
    check(params, initial, source.weights, 1e-5)


# Forms of parameters, and arguments in groups

FORMS = {
    "list": lambda params: params,
    "generator": lambda params: (p for p in params),
    "pairs": lambda params: [(f"layers.{i}.weight", p) for i, p in enumerate(params)],
    "generator of pairs": lambda params: ((f"layers.{i}", p) for i, p in enumerate(params)),
    "groups": lambda params: [{"params": params[:2]}, {"params": params[2:]}],
    "tuple of groups": lambda params: ({"params": params[:2]}, {"params": params[2:]}),
    "generator of groups": lambda params: ({"params": [p]} for p in params),
}


@pytest.mark.parametrize("form", FORMS)
def test_torch_muon_takes_parameters_in_every_form_torch_takes(form):
    params = parameters()
    torch.optim.Muon(FORMS[form](params))
    source, initial = ref.TorchMuonReference(params, lr=0.02), copies(params)
    optim = make("torch_muon", FORMS[form](params), dict(lr=0.02), **FP32)
    run(2, (optim, params, source))
    check(params, initial, source.weights, FLOAT32)


def test_moonlight_takes_one_list_alone_generators_and_a_tensor():
    params = parameters()
    for key in ("muon_params", "adamw_params"):
        initial = copies(params)
        optim = optimizer.Muon(**presets.moonlight(**{key: (p for p in params)}))
        run(1, (optim, params))
        assert not any(map(torch.equal, params, initial))
    assert len(params_of(make("moonlight", params[0], {}))) == 1


IN_GROUPS = [  # a source, arguments of its constructor, and of a group
    ("torch_muon", dict(), dict(lr=0.1, weight_decay=0.3, momentum=0.9, nesterov=False)),
    ("torch_muon", dict(lr=0.02), dict(adjust_lr_fn="match_rms_adamw")),
    ("torch_muon", dict(lr=0.02), dict(ns_steps=3)),
    ("torch_muon", dict(lr=0.02), dict(ns_coefficients=(2.0, -1.5, 0.5))),
    ("torch_muon", dict(), dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=6, eps=1e-6)),
    ("keller_jordan", dict(lr=0.1, momentum=0.9, weight_decay=0.3), dict()),
    ("keller_jordan", dict(), dict(lr=0.1, momentum=0.9, weight_decay=0.3)),
    *(
        (
            "emerging_optimizers",
            dict(scale_mode=mode, extra_scale_factor=0.2),
            dict(lr=0.05, weight_decay=0.4, momentum=0.9),
        )
        for mode in ("spectral", "shape_scaling", "unit_rms_norm")
    ),
    *(
        ("dion", dict(lr=0.02, weight_decay=2.0, adjust_lr=scale), own)
        for scale in ("spectral_norm", "rms_norm")
        for own in [
            dict(num_heads=4),
            dict(num_heads=1),
            dict(split_sizes=[8, 4, 4]),
            dict(cautious_wd=True),
            dict(mu=0.8, epsilon=1e-6, nesterov=True, lr=0.05),
        ]
    ),
]


@pytest.mark.parametrize("name, arguments, own", IN_GROUPS, ids=str)
def test_arguments_in_groups_give_the_sources_numbers_and_stay_as_they_are(name, arguments, own):
    params = parameters([(16, 24), (16, 8)] if "split_sizes" in own else [(16, 24), (40, 24)])
    source, initial = SOURCES[name](params, **{**arguments, **own}), copies(params)
    group = {"params": [(f"w{i}", p) for i, p in enumerate(params)], **own}
    before = {**group, "params": list(group["params"])}
    run(3, (make(name, [group], arguments, **FP32), params, source))
    check(params, initial, source.weights, FLOAT32)
    assert group == before


@pytest.mark.parametrize("scale_mode", ["spectral", "shape_scaling"])
def test_factors_of_matrices_do_not_reach_adamw(scale_mode):
    groups = [{"params": parameters(), "use_muon": use_muon} for use_muon in (True, False)]
    scale = dict(scale_mode=scale_mode, extra_scale_factor=5.0)
    optim = make("emerging_optimizers", groups, dict(lr=0.01, weight_decay=0.1, **scale))
    matrices, others = optim.param_groups
    assert (others["lr"], others["weight_decay"]) == (0.01, 0.1)
    if scale_mode == "spectral":
        assert (matrices["lr"], matrices["weight_decay"], matrices["adjust_lr"]) == (0.01, 0.1, 5.0)
    else:
        assert (matrices["lr"], matrices["weight_decay"]) == (0.05, 0.02)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "moonlight"])
def test_presets_keep_the_algorithm_and_the_experts_of_default_groups(name):
    groups = optimizer.get_default_muon_param_groups(Model(), expert_keys=["experts"])
    optim = optimizer.Muon(**getattr(presets, name)(groups))
    assert optim.names == [group["names"] for group in groups]
    assert [group["use_muon"] for group in optim.param_groups] == [True, False]
    assert optim.param_groups[0]["expert_keys"] == ["experts"]


def test_motifs_options_may_be_replaced():
    optim = make("motif", parameters(), dict(ns_coefficients="quintic"))
    assert optim.param_groups[0]["ns_coefficients"] == "quintic"


# AdamW of each source


def motifs_groups(params, others):
    """Groups a model with experts, and puts its parameters into the lists."""
    groups = optimizer.get_default_muon_param_groups(Model(), expert_keys=["experts"])
    params[:], others[:] = (group["params"] for group in groups)
    return groups


def kellers(params, others, own=(), of_adam=()):
    adam = {"params": others, "use_muon": False, **dict(of_adam)}
    return presets.keller_jordan([adam, {"params": params, "use_muon": True, **dict(own)}])


FAST = dict(lr=0.1, momentum=0.9, weight_decay=0.3)
ADAM = dict(lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.2)
AS_ADAMW = dict(adamw_betas=(0.8, 0.99), adamw_eps=1e-6)
# By source: its keyword arguments for a list of matrices and one of other parameters; arguments of
# the reference; AdamW's lr, betas, eps, decay.
WITH_ADAMW = {
    "keller_jordan, defaults": (kellers, {}, (3e-4, (0.9, 0.95), 1e-10, 0.0)),
    "keller_jordan": (lambda m, v: kellers(m, v, FAST, ADAM), FAST, (0.01, (0.8, 0.99), 1e-6, 0.2)),
    "moonlight": (
        lambda m, v: presets.moonlight(0.02, 0.3, m, 0.9, adamw_params=v, **AS_ADAMW),
        dict(lr=0.02, wd=0.3, momentum=0.9),
        (0.02, (0.8, 0.99), 1e-6, 0.3),
    ),
    "moonlight, an eps that weighs": (  # torch's AdamW, which adds it after the bias correction
        lambda m, v: presets.moonlight(0.02, 0.1, m, adamw_params=v, adamw_eps=0.1),
        dict(lr=0.02),
        (0.02, (0.9, 0.95), 0.1, 0.1),
    ),
    "motif": (
        lambda m, v: presets.motif(motifs_groups(m, v), **FAST, **AS_ADAMW),
        FAST,
        (0.1, (0.8, 0.99), 1e-6, 0.3),
    ),
    "dion": (
        lambda m, v: presets.dion(
            [
                {"params": m, "mu": 0.8, "adjust_lr": "rms_norm"},
                {"params": v, "algorithm": "adamw", "lr": 0.003, "beta1": 0.8, "weight_decay": 0.2},
            ]
        ),
        dict(mu=0.8, adjust_lr="rms_norm"),
        (0.003, (0.8, 0.95), 1e-8, 0.2),
    ),
}


@pytest.mark.parametrize("name", WITH_ADAMW)
def test_groups_of_both_algorithms_give_the_sources_numbers(name):
    given, own, (lr, betas, eps, decay) = WITH_ADAMW[name]
    params, others = parameters(), parameters([(7,), (6, 5), (3, 2, 2)], seed=50)
    optim = optimizer.Muon(**given(params, others), **FP32)
    before = copies(params), copies(others)
    source = SOURCES[name.partition(",")[0]](params, **own)
    adamw = dict(lr=lr, adamw_betas=betas, adamw_eps=eps, weight_decay=decay)
    adamw = ref.ReferenceAdamW(others, adamw)
    run(4, (optim, params, source), (optim, others, adamw))
    check(params, before[0], source.weights, FLOAT32)
    # A learning rate of 3e-4 moves weights by a few thousand times their last bit only.
    check(others, before[1], adamw.weights, 1e-4)


def test_keller_jordans_adam_counts_missing_gradients_as_zeros():
    optim = make("keller_jordan", [{"params": parameters([(7,)]), "use_muon": False}], {})
    assert optim.param_groups[0]["missing_grad"] == "zero"


# Tensors of more than two dimensions


@pytest.mark.parametrize("as_groups", [False, True])
@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (64, 2, 2, 2), (4, 4, 1, 1), (8, 2, 2, 6)])
def test_keller_jordans_convolutions_give_its_numbers(shape, as_groups):
    params, arguments = parameters([shape, (20, 12), shape]), dict(lr=0.1, weight_decay=0.3)
    initial, source = copies(params), ref.KellerJordanReference(params, **arguments)
    given = [{"params": params, "use_muon": True, **arguments}] if as_groups else params
    optim = make("keller_jordan", given, {} if as_groups else arguments, **FP32)
    run(4, (optim, params, source), absent=[(2, 0)])
    check(params, initial, source.weights, FLOAT32)


@pytest.mark.parametrize("name", ["dion", "normuon"])
def test_flattened_convolutions_of_one_shape_are_matrices_of_their_own_as_in_dion(name):
    """With a second moment for each row (out, in · height · width) of NorMuon."""
    params = parameters([(8, 4, 3, 3), (8, 4, 3, 3), (8, 6)])
    initial, how = [p.detach().flatten(1).clone() for p in params], dict(lr=0.02, weight_decay=0.3)
    source = SOURCES[name](initial, **how)
    optim = make(name, params, dict(**how, flatten=True), **FP32)
    for t in range(1, 4):
        grads = gradients(params, t)
        for p, G in zip(params, grads):
            p.grad = G.clone()
        source.step([G.flatten(1) for G in grads])
        optim.step()
    check([p.detach().flatten(1) for p in params], initial, source.weights, FLOAT32)


def test_dions_heads_are_those_of_each_stacked_matrix():
    (stacked,) = parameters([(4, 8, 16)])
    groups = [{"params": [("experts.w", stacked)], "num_heads": 2}]
    optim = make("dion", groups, dict(lr=0.02), expert_keys=["experts"], **FP32)
    initial = list(stacked.detach().clone())
    source = ref.DionReference(initial, lr=0.02, num_heads=2)
    (stacked.grad,) = gradients([stacked], 1)
    source.step(list(stacked.grad))
    optim.step()
    check(list(stacked.detach()), initial, source.weights, FLOAT32)


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, "distributed_mesh") for name in ("dion", "normuon")]
    + [("keller_jordan", "process_group")],
)
def test_a_process_group_is_the_optimizers_and_gradients_are_averaged_before(name, argument):
    group = object()
    given = getattr(presets, name)([{"params": parameters()}], **{argument: group})
    assert given["process_group"] is group and "grad_reduce" not in given


# torch.optim.Muon itself


def torch_takes(arguments):
    try:
        torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except ValueError:  # the unclamped scale is new in 2.14
        return False
    return True


TORCH_ARGUMENTS = [
    *filter(torch_takes, ARGUMENTS["torch_muon"]),
    dict(lr=torch.tensor(0.05), adjust_lr_fn="match_rms_adamw", weight_decay=0.0),
    dict(ns_coefficients=(3.0, -3.2, 1.2), ns_steps=6, momentum=0.5),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("arguments", TORCH_ARGUMENTS, ids=str)
def test_torch_muon_gives_what_torchs_own_gives_in_the_same_arithmetic(arguments):
    # Both in bfloat16; torch also takes the norm in it. Measured at most 1.3e-2 apart.
    params = parameters([(96, 96), (128, 48), (48, 128)])
    initial, theirs = copies(params), [nn.Parameter(p.detach().clone()) for p in params]
    ours = make("torch_muon", params, arguments, ns_dtype=torch.bfloat16)
    torchs = torch.optim.Muon(theirs, **copy.deepcopy(arguments))
    run(4, (ours, params), (torchs, theirs))
    check(params, initial, [q.detach().double() for q in theirs], 3e-2)
    for p, q in zip(params, theirs):
        buffers = (o.state[x]["momentum_buffer"] for o, x in ((ours, p), (torchs, q)))
        torch.testing.assert_close(*buffers, rtol=1e-5, atol=1e-6)


# What is refused


def nanochat_groups(params, vectors):
    adamw = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    return [
        {"kind": "adamw", "params": vectors, **adamw},
        {"kind": "muon", "params": params, **NANOCHAT},
    ]


OF_OTHER_ALGORITHM = {"use_muon": False}
# A preset, groups, arguments, and what the message names.
REFUSED = [
    ("torch_muon", [{}], dict(adjust_lr_fn="rms"), "adjust_lr_fn.*'rms'"),
    ("torch_muon", [{"adjust_lr_fn": "rms"}], {}, "adjust_lr_fn.*'rms'"),
    ("keller_jordan", [{"params": parameters([(16, 2, 6, 3)])}], {}, "higher than wide"),
    ("keller_jordan", [{"betas": (0.9, 0.9)}], {}, r"param_groups\[0\].*'betas'"),
    ("keller_jordan", [{"momentum": 0.9, **OF_OTHER_ALGORITHM}], {}, r"\[0\].*'momentum'"),
    ("motif", [], {}, "empty"),
    ("dion", [{"algorithm": "lion"}], {}, r"param_groups\[0\].*'lion'"),
    ("dion", [{"adjust_lr": "match_rms_adamw"}], {}, "adjust_lr.*'match_rms_adamw'"),
    ("dion", [{}], {"adjust_lr": "original"}, "adjust_lr.*'original'"),
    ("dion", [{"num_heads": 0}], {}, r"param_groups\[0\].*num_heads.*0"),
    ("dion", [{"num_heads": True}], {}, "num_heads.*True"),
    ("dion", [{"num_heads": 2, "split_sizes": [2, 2]}], {}, "num_heads.*split_sizes"),
    ("dion", [{"num_heads": 3}], {}, r"\['params'\]\[1\] has 40 rows.*num_heads=3"),
    ("dion", [{}, {"algorithm": "adamw", "cautious_wd": True}], {}, r"\[1\].*cautious_wd"),
    ("dion", [{"algorithm": "adamw"}], {"cautious_wd": True}, "cautious_wd"),
    ("dion", [{}], {"use_gram_newton_schulz": True}, "use_gram_newton_schulz"),
    ("dion", [{}], {"newton_schulz_func": torch.clone}, "newton_schulz_func"),
    ("dion", [{"algorithm": "muon", **OF_OTHER_ALGORITHM}], {}, r"\[0\].*algorithm.*use_muon"),
    ("emerging_optimizers", [{}], dict(coefficient_type="aol"), "coefficient_type.*'aol'"),
    ("emerging_optimizers", [{}], dict(num_ns_steps=6), "num_ns_steps=6.*'quintic'"),
    *(
        ("emerging_optimizers", [{}], dict(coefficient_type=name, num_ns_steps=6), name)
        for name in ("cubic5", "cans")
    ),
    ("emerging_optimizers", [{}], dict(scale_mode="none"), "scale_mode.*'none'"),
    ("emerging_optimizers", [{}], dict(extra_scale_factor=0.0), "extra_scale_factor.*0.0"),
    ("emerging_optimizers", [{}], dict(extra_scale_factor="1"), "extra_scale_factor.*'1'"),
    ("emerging_optimizers", [{}], dict(weight_decay_method="l2"), "weight_decay_method.*'l2'"),
    ("emerging_optimizers", [{}], dict(weight_update_hook=len), "weight_update_hook"),
    *(
        (name, [{}, {"muon_beta2": 0.9, "use_muon": use_muon}], {}, r"\[1\].*'muon_beta2'")
        for name in ("motif", "torch_muon", "keller_jordan", "dion")
        for use_muon in (True, False)
    ),
]


@pytest.mark.parametrize("name, groups, arguments, message", REFUSED)
def test_presets_refuse_what_has_no_counterpart(name, groups, arguments, message):
    groups = [{"params": parameters(), "use_muon": True, **group} for group in groups]
    with pytest.raises(ValueError, match=message):
        optimizer.Muon(**getattr(presets, name)(groups, **arguments))


def test_dions_adamw_without_decay_needs_no_caution():
    groups = [{"params": parameters(), "algorithm": "adamw", "weight_decay": 0.0}]
    assert optimizer.Muon(**presets.dion(groups, cautious_wd=True)).param_groups


@pytest.mark.parametrize("name", PRESETS)
def test_presets_refuse_other_sources_arguments_tensors_of_motifs_and_empty_lists(name):
    with pytest.raises(ValueError, match="no argument 'adamw_beta1'"):
        make(name, parameters(), dict(adamw_beta1=0.9))
    keys = {"moonlight": "muon_params"}.get(name, "params")
    for empty in ([], ()):
        with pytest.raises(ValueError, match="empty"):
            optimizer.Muon(**getattr(presets, name)(**{keys: empty}))
    if name == "motif":
        with pytest.raises(ValueError, match="use_muon"):
            presets.motif(parameters())


@pytest.mark.parametrize(
    "own, arguments, message",
    [
        *(({}, {key: 0.5}, key) for key in ("beta2", "adamw_betas", "adamw_eps", "cautious")),
        ({}, {"ns_options": {}}, "ns_options"),
        ({"adamw_betas": (0.0, 0.0)}, {}, r"param_groups\[0\].*'adamw_betas'.*'betas'"),
        ({"adamw_eps": 0.1}, {}, r"param_groups\[0\].*'adamw_eps'.*'eps'"),
        ({}, {"version": "1"}, "version.*'1'"),
    ],
)
def test_muon_adamw_refuses_what_groups_or_nanochat_decide(own, arguments, message):
    groups = nanochat_groups(parameters(), parameters([(7,)]))
    groups[0].update(own)
    with pytest.raises(ValueError, match=message):
        optimizer.MuonAdamW(groups, **arguments)


# nanochat's MuonAdamW


def nanochat_beside():
    params, vectors = parameters(), parameters([(7,), (6, 5)], seed=50)
    source = ref.NanochatReference(params, **NANOCHAT)
    adamw = dict(lr=0.01, adamw_betas=(0.8, 0.95), adamw_eps=1e-10, weight_decay=0.0)
    optim = optimizer.MuonAdamW(nanochat_groups(params, vectors), **FP32)
    return optim, params, vectors, source, ref.ReferenceAdamW(vectors, adamw)


def test_muon_adamw_steps_both_kinds_keeps_gradients_and_skips_absent_ones():
    optim, params, vectors, source, adamw = nanochat_beside()
    before, vectors_before = copies(params), copies(vectors)
    run(3, (optim, params, source), (optim, vectors, adamw), absent=[(1, 0), (2, 1), (3, 0)])
    check(params, before, source.weights, FLOAT32)
    check(vectors, vectors_before, adamw.weights, 1e-5)
    assert params[2].grad is not None


LIVE = [
    *((1, {key: value}) for key, value in dict(lr=0.1, momentum=0.5, weight_decay=2.0).items()),
    (1, dict(beta2=0.5)),
    (1, dict(beta2=None)),
    (1, dict(lr=0.05, momentum=0.8, beta2=0.0, weight_decay=0.0)),
    *((0, {key: value}) for key, value in dict(lr=0.1, eps=0.1, weight_decay=2.0).items()),
    (0, dict(betas=(0.5, 0.6))),
    (0, dict(lr=0.05, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.5)),
]


@pytest.mark.parametrize("number, change", LIVE, ids=str)
def test_nanochats_keys_of_groups_are_live(number, change):
    optim, matrices, vectors, *sources = nanochat_beside()
    params, source = (vectors, sources[1]) if number == 0 else (matrices, sources[0])
    before, unchanged = copies(params), copy.deepcopy(source)
    attributes = {"lr": "lr", "momentum": "mu", "beta2": "beta2", "weight_decay": "wd"}
    options = {"betas": "adamw_betas", "eps": "adamw_eps"}

    def after(t):
        for key, value in change.items() if t == 2 else ():
            optim.param_groups[number][key] = value
            if number == 1:
                setattr(source, attributes[key], 0.0 if value is None else value)
            for each in source.options if number == 0 else ():
                each[options.get(key, key)] = value

    run(4, (optim, params, source, unchanged), after=after)
    check(params, before, source.weights, FLOAT32)
    with pytest.raises(AssertionError):
        check(params, before, unchanged.weights, FLOAT32)


@pytest.mark.parametrize("version", NANOCHATS)
def test_muon_adamw_computes_bfloat16_parameters_of_adamw_in_fp32(version):
    """Weights and moments are rounded once a step, as nanochat of July 2026 does."""
    (p,) = vectors = parameters([(300,)], dtype=torch.bfloat16)
    W, m, v = (x.clone() for x in (p.detach(), torch.zeros_like(p), torch.zeros_like(p)))
    how = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    optim = optimizer.MuonAdamW([{"kind": "adamw", "params": vectors, **how}], version=version)
    for t in range(1, 11):
        (p.grad,) = gradients(vectors, t)
        new = ref.adamw_update(
            *(x.double() for x in (W, p.grad, m, v)), t, 0.01, (0.8, 0.95), 1e-10, 0.1
        )
        W, m, v = (x.to(torch.bfloat16) for x in new)
        optim.step()
    # A sum that lies between two numbers may go either way by its fp32 roundings.
    assert (p != W).float().mean() < 0.02
    assert relative_error(p.detach(), W.double()) < 1e-4


@pytest.mark.parametrize(
    ("version", "dist_class"), [("2026-02", True), ("2026-07", True), ("2026-07", False)]
)
@on_ranks(2)
def test_nanochats_optimizer_on_ranks_averages_their_gradients(version, dist_class):
    """In July it is one class for one rank and many."""
    params, vectors = parameters(), parameters([(8,), (6, 5)], seed=50)
    before, vectors_before = copies(params), copies(vectors)
    source = SOURCES[version](params, **NANOCHAT)
    adamw = dict(lr=0.01, adamw_betas=(0.8, 0.95), adamw_eps=1e-10, weight_decay=0.0)
    adamw = ref.ReferenceAdamW(vectors, adamw)
    cls = optimizer.DistMuonAdamW if dist_class else optimizer.MuonAdamW
    optim = cls(nanochat_groups(params, vectors), version=version, **FP32)
    for t in range(1, 4):
        for each, of in ((params, source), (vectors, adamw)):
            theirs = [gradients(each, 10 * t + rank) for rank in range(dist.get_world_size())]
            for p, G in zip(each, theirs[dist.get_rank()]):
                p.grad = G
            of.step([sum(grads) / len(theirs) for grads in zip(*theirs)])
        optim.step()
    check(params, before, source.weights, BFLOAT16)  # updates travel in bf16
    check(vectors, vectors_before, adamw.weights, 1e-5)


@pytest.mark.parametrize(
    "missing", [(), ("eps", "betas", "beta2"), ("use_muon",), ("kind",), ("momentum", "ns_dtype")]
)
def test_a_state_dict_round_trip_resumes_bit_for_bit_also_without_some_keys_of_groups(missing):
    optim, params, vectors, *_ = nanochat_beside()
    for group in optim.param_groups:
        group["initial_lr"], group["tag"] = group["lr"], "mine"
    run(2, (optim, params), (optim, vectors))
    theirs, their_vectors = copy.deepcopy((params, vectors))
    fresh = optimizer.MuonAdamW(nanochat_groups(theirs, their_vectors), **FP32)
    if not missing:
        optim.param_groups[1].update(lr=0.07, beta2=None)
        optim.param_groups[0].update(betas=(0.7, 0.8), eps=1e-3)
    saved = copy.deepcopy(optim.state_dict())
    for group in saved["param_groups"]:
        for key in missing:
            group.pop(key, None)
    with pytest.warns(UserWarning, match="tag$"):
        fresh.load_state_dict(saved)
    for group, loaded in zip(optim.param_groups, fresh.param_groups):
        own = group.keys() - {"params", "tag", *missing}
        assert all(loaded[key] == group[key] for key in own)
        assert {loaded["kind"], loaded["use_muon"]} in ({"adamw", False}, {"muon", True})
    run(2, (optim, params), (optim, vectors), (fresh, theirs), (fresh, their_vectors))
    if missing in [(), ("use_muon",), ("kind",)]:
        for p, q in zip([*params, *vectors], [*theirs, *their_vectors]):
            assert torch.equal(p, q)
            assert all(torch.equal(v, fresh.state[q][key]) for key, v in optim.state[p].items())


def test_adding_a_group_later_reads_its_kind():
    optim = optimizer.MuonAdamW(nanochat_groups(parameters(), parameters([(7,)])))
    vectors = parameters([(9,)], seed=70)
    before, options = copies(vectors), dict(lr=0.1, adamw_betas=(0.9, 0.95), adamw_eps=1e-8)
    adamw = ref.ReferenceAdamW(vectors, options)
    optim.add_param_group({"kind": "adamw", "params": vectors, "lr": 0.1})
    run(3, (optim, vectors, adamw))
    check(vectors, before, adamw.weights, 1e-5)
    with pytest.raises(ValueError, match="kind"):
        optim.add_param_group({"params": parameters()})
