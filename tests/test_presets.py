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
from layouts import randn
from ranks import run_ranks

presets = optimizer.presets
SHAPES = [(24, 24), (40, 16), (16, 40), (64, 12)]

# How far the movement of the weights may be from the source's, relative to it.
# Arithmetic in float32: measured at most 1.4e-5. In bfloat16 each product rounds to 4e-3: measured
# at most 1.5e-2, and 4.8e-2 with nanochat's, whose cautious decay hangs on rounded signs.
FLOAT32, BFLOAT16, NANOCHATS_BFLOAT16 = 1e-4, 4e-2, 0.1


def parameters(shapes=SHAPES, seed=0, dtype=torch.float32):
    """Of the size weights have: on larger ones float32 would round a step of 1e-3 to 4 digits."""
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


# Each source: (its reference, the preset), from parameters and the arguments of its constructor.
SOURCES = {
    "motif": (
        ref.MotifReference,
        lambda params, **arguments: presets.motif(
            [{"params": params, "use_muon": True}], **arguments
        ),
    ),
    "torch_muon": (ref.TorchMuonReference, presets.torch_muon),
    "keller_jordan": (ref.KellerJordanReference, presets.keller_jordan),
    "moonlight": (
        ref.MoonlightReference,
        lambda params, **arguments: presets.moonlight(muon_params=params, **arguments),
    ),
    "dion": (ref.DionReference, presets.dion),
    "emerging_optimizers": (ref.EmergingReference, presets.emerging_optimizers),
}
ARGUMENTS = {
    "motif": [
        dict(),
        dict(lr=0.02, momentum=0.9, nesterov=False, weight_decay=0.3),
    ],
    "torch_muon": [
        dict(),
        dict(lr=0.02, weight_decay=0.3, momentum=0.9, nesterov=False),
        dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=4, eps=1e-6),
        dict(ns_steps=3, adjust_lr_fn="match_rms_adamw"),
        dict(adjust_lr_fn="original", lr=0.1),
        dict(adjust_lr_fn="spectral_unclamped", lr=0.1),
    ],
    "keller_jordan": [
        dict(),
        dict(lr=0.1, weight_decay=0.3, momentum=0.9),
    ],
    "moonlight": [
        dict(),
        dict(lr=0.02, wd=0.3, momentum=0.9, nesterov=False, ns_steps=6),
    ],
    "dion": [
        dict(),
        dict(lr=0.02, mu=0.9, nesterov=True, weight_decay=0.3, adjust_lr="rms_norm"),
        dict(adjust_lr=None, epsilon=1e-6),
        dict(use_polar_express=True, cautious_wd=True, weight_decay=0.3),
    ],
    "emerging_optimizers": [
        dict(),
        dict(lr=0.02, extra_scale_factor=0.2, weight_decay=0.3, nesterov=True, num_ns_steps=3),
        dict(coefficient_type="polar_express", num_ns_steps=9, scale_mode="shape_scaling"),
        dict(coefficient_type="deepseekv4", num_ns_steps=10, scale_mode="unit_rms_norm"),
        dict(coefficient_type="simple", num_ns_steps=6, extra_scale_factor=0.5),
    ],
}
CASES = [(name, arguments) for name in SOURCES for arguments in ARGUMENTS[name]]
EVERY_CASE = pytest.mark.parametrize("name, arguments", CASES, ids=str)


def beside_source(name, arguments, dtype=torch.float32, **options):
    make_source, preset = SOURCES[name]
    params = parameters(dtype=dtype)
    source = make_source(params, **arguments)
    optim = optimizer.Muon(**preset(params, **arguments), **options)
    return optim, params, source, copies(params)


@EVERY_CASE
def test_presets_give_their_sources_numbers_in_float64(name, arguments):
    # eps is added to the norm of the matrix scaled to 1, not of the matrix itself: 1e-7 apart.
    optim, params, source, initial = beside_source(name, arguments, torch.float64)
    run(5, (optim, params, source))
    check(params, initial, source.weights, 1e-5)
    for p, B in zip(params, source.momentum):
        assert relative_error(optim.state[p]["momentum_buffer"], B) < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("ns_dtype", [None, torch.bfloat16], ids=str)
@EVERY_CASE
def test_presets_stay_near_their_sources_in_the_default_arithmetic(name, arguments, ns_dtype):
    optim, params, source, initial = beside_source(name, arguments, ns_dtype=ns_dtype)
    run(4, (optim, params, source))
    check(params, initial, source.weights, BFLOAT16)


@pytest.mark.parametrize("name", SOURCES)
def test_presets_stay_near_their_sources_with_bfloat16_parameters(name):
    # The update is far above a bit of the weights, 4e-3 of their size, which would hide it.
    decay = {"moonlight": "wd"}.get(name, "weight_decay")
    arguments = {"lr": 0.3, decay: 0.1}
    optim, params, source, initial = beside_source(name, arguments, torch.bfloat16)
    run(4, (optim, params, source))
    check(params, initial, source.weights, BFLOAT16)
    assert all(p.dtype == torch.bfloat16 for p in params)


@pytest.mark.parametrize("name", SOURCES)
def test_presets_leave_their_arguments_as_they_are(name):
    params = parameters()
    if name in ("torch_muon", "keller_jordan", "dion"):
        group = {"params": params, "use_muon": True, "lr": 0.1}
        before = dict(group)
        optimizer.Muon(**SOURCES[name][1]([group]))
        assert group.keys() == before.keys() and group["params"] is params
    optimizer.Muon(**SOURCES[name][1](params))
    assert len(params) == len(SHAPES)


@pytest.mark.parametrize("name", SOURCES)
def test_a_missing_gradient_is_what_it_is_in_the_source(name):
    # Keller Jordan's takes it for zeros; the others skip the matrix.
    optim, params, source, initial = beside_source(name, {}, ns_dtype=torch.float32)
    absent = [(1, 0), (2, 1), (3, 1), (3, 2)]
    run(4, (optim, params, source), absent=absent)
    check(params, initial, source.weights, FLOAT32)
    for p, B in zip(params, source.momentum):
        assert relative_error(optim.state[p]["momentum_buffer"], B) < 1e-6


@pytest.mark.parametrize("name", SOURCES)
def test_learning_rates_may_be_tensors(name):
    optim, params, source, initial = beside_source(
        name, {"lr": torch.tensor(0.02)}, ns_dtype=torch.float32
    )
    source.lr = float(source.lr)
    run(2, (optim, params, source))
    optim.param_groups[0]["lr"].fill_(0.005)
    source.lr = 0.005
    run(2, (optim, params, source))
    check(params, initial, source.weights, FLOAT32)


# torch.optim.Muon


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


def torchs_muon_beside(arguments, dtype=torch.float32, **options):
    params = parameters([(96, 96), (128, 48), (48, 128)], dtype=dtype)
    initial, theirs = copies(params), [nn.Parameter(p.detach().clone()) for p in params]
    ours = optimizer.Muon(**presets.torch_muon(params, **arguments), **options)
    torchs = torch.optim.Muon(theirs, **copy.deepcopy(arguments))
    for t in range(1, 5):
        for p, q, G in zip(params, theirs, gradients(params, t)):
            p.grad, q.grad = G, G.clone()
        ours.step()
        torchs.step()
    return ours, torchs, initial


@pytest.mark.kernels_ci
@pytest.mark.parametrize("arguments", TORCH_ARGUMENTS, ids=str)
def test_torch_muon_gives_what_torchs_own_gives_in_the_same_arithmetic(arguments):
    # Both in bfloat16; torch also takes the norm in it. Measured at most 1.3e-2 apart.
    ours, torchs, initial = torchs_muon_beside(arguments, ns_dtype=torch.bfloat16)
    params, theirs = (o.param_groups[0]["params"] for o in (ours, torchs))
    check(params, initial, [q.detach().double() for q in theirs], 3e-2)
    for p, q in zip(params, theirs):
        buffers = (o.state[x]["momentum_buffer"] for o, x in ((ours, p), (torchs, q)))
        torch.testing.assert_close(*buffers, rtol=1e-5, atol=1e-6)


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
    given = presets.torch_muon(FORMS[form](params), lr=0.02)
    optim = optimizer.Muon(**given, ns_dtype=torch.float32)
    run(2, (optim, params, source))
    check(params, initial, source.weights, FLOAT32)


GROUP_ARGUMENTS = [
    dict(lr=0.1, weight_decay=0.3, momentum=0.9, nesterov=False),
    dict(adjust_lr_fn="match_rms_adamw"),
    dict(ns_steps=3),
    dict(ns_coefficients=(2.0, -1.5, 0.5)),
    dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=6, eps=1e-6),
]


@pytest.mark.parametrize("arguments", GROUP_ARGUMENTS, ids=str)
def test_torch_muon_takes_torchs_arguments_in_groups_too(arguments):
    params = parameters()
    torch.optim.Muon([{"params": params, **arguments}])
    arguments = {"lr": 0.02, **arguments}
    source, initial = ref.TorchMuonReference(params, **arguments), copies(params)
    given = presets.torch_muon([{"params": params, **arguments}])
    optim = optimizer.Muon(**given, ns_dtype=torch.float32)
    run(2, (optim, params, source))
    check(params, initial, source.weights, FLOAT32)


def test_torch_muon_refuses_an_unknown_scale():
    with pytest.raises(ValueError, match=r"adjust_lr_fn must be one of None.*'rms'"):
        presets.torch_muon(parameters(), adjust_lr_fn="rms")


# Keller Jordan


@pytest.mark.parametrize(
    "matrices, others",
    [
        (dict(), dict()),
        (
            dict(lr=0.1, momentum=0.9, weight_decay=0.3),
            dict(lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.2),
        ),
    ],
    ids=["defaults", "given"],
)
def test_keller_jordans_groups_give_muon_with_aux_adams_numbers(matrices, others):
    params, vectors = parameters(), parameters([(7,), (6, 5), (3, 2, 2)], seed=50)
    before, vectors_before = copies(params), copies(vectors)
    groups = [
        {"params": vectors, "use_muon": False, **others},
        {"params": params, "use_muon": True, **matrices},
    ]
    optim = optimizer.Muon(**presets.keller_jordan(groups), ns_dtype=torch.float32)
    source = ref.KellerJordanReference(params, **matrices)
    defaults = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    told = {**defaults, **others}
    told["adamw_betas"], told["adamw_eps"] = told.pop("betas"), told.pop("eps")
    adam = ref.ReferenceAdamW(vectors, told)
    run(4, (optim, params, source), (optim, vectors, adam))
    check(params, before, source.weights, FLOAT32)
    # A learning rate of 3e-4 moves weights by a few thousand times their last bit only.
    check(vectors, vectors_before, adam.weights, 1e-4)


def test_keller_jordans_adam_counts_missing_gradients_as_zeros():
    vectors = parameters([(7,), (6, 5)])
    before = copies(vectors)
    adam = ref.ReferenceAdamW(vectors, dict(lr=0.1, adamw_eps=1e-10, weight_decay=0.0))
    groups = [{"params": vectors, "use_muon": False, "lr": 0.1}]
    optim = optimizer.Muon(**presets.keller_jordan(groups))
    for t in range(1, 4):
        grads = gradients(vectors, t)
        if t == 2:
            grads[0] = torch.zeros(7)
        for i, (p, G) in enumerate(zip(vectors, grads)):
            p.grad = None if (t, i) == (2, 0) else G
        optim.step()
        adam.step(grads)
    check(vectors, before, adam.weights, 1e-5)


@pytest.mark.parametrize("as_groups", [False, True])
@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (64, 2, 2, 2), (4, 4, 1, 1), (8, 2, 2, 6)])
def test_keller_jordans_convolutions_give_its_numbers(shape, as_groups):
    params = parameters([shape, (20, 12), shape])
    initial, source = copies(params), ref.KellerJordanReference(params, lr=0.1, weight_decay=0.3)
    arguments = dict(lr=0.1, weight_decay=0.3)
    if as_groups:
        given = presets.keller_jordan([{"params": params, "use_muon": True, **arguments}])
    else:
        given = presets.keller_jordan(params, **arguments)
    optim = optimizer.Muon(**given, ns_dtype=torch.float32)
    run(4, (optim, params, source), absent=[(2, 0)])
    check(params, initial, source.weights, FLOAT32)


def test_keller_jordan_refuses_a_kernel_whose_scale_it_cannot_give():
    with pytest.raises(ValueError, match="kernel higher than wide"):
        presets.keller_jordan(parameters([(16, 2, 6, 3)]))


# Moonlight


def test_moonlights_two_lists_give_its_numbers_with_adamw():
    params, vectors = parameters(), parameters([(7,), (6, 5), (3, 2, 2)], seed=50)
    before, vectors_before = copies(params), copies(vectors)
    arguments = dict(lr=0.02, wd=0.3, momentum=0.9)
    adamw = dict(adamw_betas=(0.8, 0.99), adamw_eps=1e-8)
    given = presets.moonlight(muon_params=params, adamw_params=vectors, **arguments, **adamw)
    optim = optimizer.Muon(**given, ns_dtype=torch.float32)
    source = ref.MoonlightReference(params, **arguments)
    options = dict(lr=0.02, weight_decay=0.3, **adamw)
    moonlights = ref.ReferenceAdamW(vectors, options, ref.moonlight_adamw_update)
    torchs = ref.ReferenceAdamW(vectors, options)
    run(4, (optim, params, source), (optim, vectors, moonlights, torchs))
    check(params, before, source.weights, FLOAT32)
    check(vectors, vectors_before, torchs.weights, 1e-5)
    # eps before the bias correction weighs nothing beside gradients of ordinary size.
    check(vectors, vectors_before, moonlights.weights, 1e-5)


def test_moonlights_adamw_is_torchs_where_eps_weighs():
    vectors = parameters([(6, 5)])
    before, adamw = copies(vectors), dict(adamw_betas=(0.9, 0.95), adamw_eps=0.1)
    optim = optimizer.Muon(**presets.moonlight(lr=0.02, adamw_params=vectors, **adamw))
    options = dict(lr=0.02, weight_decay=0.1, **adamw)
    torchs = ref.ReferenceAdamW(vectors, options)
    moonlights = ref.ReferenceAdamW(vectors, options, ref.moonlight_adamw_update)
    run(3, (optim, vectors, torchs, moonlights))
    check(vectors, before, torchs.weights, 1e-5)
    moved = [W - b.double() for W, b in zip(moonlights.weights, before)]
    assert relative_error(vectors[0].detach() - before[0], moved[0]) > 1e-2


@pytest.mark.parametrize("given", ["muon_params", "adamw_params"])
def test_moonlight_takes_one_list_alone_and_generators(given):
    params = parameters()
    initial = copies(params)
    optim = optimizer.Muon(**presets.moonlight(**{given: (p for p in params)}))
    for p in params:
        p.grad = randn(*p.shape, seed=9)
    optim.step()
    assert not any(torch.equal(p, before) for p, before in zip(params, initial))


# Motif


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 8)
        self.wq = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ParameterDict({"w1": torch.zeros(3, 12, 8), "w2": torch.zeros(3, 8, 12)})
        self.lm_head = nn.Linear(8, 11, bias=False)
        for i, p in enumerate(self.parameters()):
            p.data.copy_(randn(*p.shape, seed=i))


def test_dions_groups_give_its_numbers_and_adamws():
    params, others = parameters(), parameters([(5, 4)], seed=50)
    matrices, twins, initial = copies(params), copies(others), copies([*params, *others])
    groups = [
        {"params": params, "mu": 0.8, "adjust_lr": "rms_norm"},
        {"params": others, "algorithm": "adamw", "lr": 0.003, "beta1": 0.8, "weight_decay": 0.2},
    ]
    source = ref.DionReference(matrices, lr=0.01, mu=0.8, adjust_lr="rms_norm")
    optim = optimizer.Muon(**presets.dion(groups), ns_dtype=torch.float32)
    adamw = torch.optim.AdamW(twins, lr=0.003, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.2)
    for t in range(3):
        grads = gradients(params, t)
        for p, G in zip([*params, *others], [*grads, *gradients(others, t)]):
            p.grad = G.clone()
        for p, G in zip(twins, gradients(others, t)):
            p.grad = G.clone()
        optim.step()
        source.step(grads)
        adamw.step()
    check([*params, *others], initial, [*source.weights, *(p.double() for p in twins)], FLOAT32)


@pytest.mark.parametrize(
    "groups, arguments, message",
    [
        ([{"algorithm": "lion"}], {}, "one of 'muon', 'adamw', found 'lion'"),
        ([{"adjust_lr": "match_rms_adamw"}], {}, "found 'match_rms_adamw'"),
        ([{}], {"adjust_lr": "original"}, "'rms_norm', None, found 'original'"),
        ([{"num_heads": 0}], {}, "num_heads"),
        ([{"num_heads": 2, "split_sizes": [2, 2]}], {}, "num_heads"),
        ([{"num_heads": 3}], {}, r"\['params'\]\[1\] has 40 rows, .*num_heads=3.* does not divide"),
        ([{}, {"algorithm": "adamw", "cautious_wd": True}], {}, r"param_groups\[1\].*cautious_wd"),
        ([{"algorithm": "adamw"}], {"cautious_wd": True}, "cautious_wd"),
        ([{}], {"use_gram_newton_schulz": True}, "use_gram_newton_schulz has no counterpart"),
        ([{}], {"newton_schulz_func": torch.clone}, "newton_schulz_func has no counterpart"),
        (
            [{"algorithm": "muon", "use_muon": False}],
            {},
            r"\[0\] has algorithm='muon' and use",
        ),
    ],
)
def test_dion_refuses_what_has_no_counterpart(groups, arguments, message):
    groups = [{"params": parameters(), **group} for group in groups]
    with pytest.raises(ValueError, match=message):
        optimizer.Muon(**presets.dion(groups, **arguments))


@pytest.mark.parametrize("scale", ["spectral_norm", "rms_norm"])
@pytest.mark.parametrize(
    "own",
    [dict(num_heads=4), dict(split_sizes=[8, 4, 4]), dict(cautious_wd=True), dict(num_heads=1)],
)
def test_dions_options_of_groups_give_its_numbers(own, scale):
    shapes = [(16, 24), (16, 8)] if "split_sizes" in own else [(16, 24), (40, 24), (16, 8)]
    params = parameters(shapes)
    initial = copies(params)
    arguments = dict(lr=0.02, weight_decay=2.0, adjust_lr=scale)
    source = ref.DionReference(params, **arguments, **own)
    groups = [{"params": [(f"w{i}", p) for i, p in enumerate(params)], **own}]
    optim = optimizer.Muon(**presets.dion(groups, **arguments), ns_dtype=torch.float32)
    run(3, (optim, params, source))
    check(params, initial, source.weights, FLOAT32)


@pytest.mark.parametrize("name", ["dion", "normuon"])
def test_flattened_convolutions_of_one_shape_are_matrices_of_their_own_as_in_dion(name):
    """With a second moment for each row (out, in · height · width) of NorMuon."""
    params = parameters([(8, 4, 3, 3), (8, 4, 3, 3), (8, 6)])
    initial = [p.detach().flatten(1).clone() for p in params]
    make_source = {"dion": ref.DionReference, "normuon": ref.NorMuonReference}[name]
    source = make_source(initial, lr=0.02, weight_decay=0.3)
    preset = getattr(presets, name)
    optim = optimizer.Muon(
        **preset(params, lr=0.02, weight_decay=0.3, flatten=True), ns_dtype=torch.float32
    )
    for t in range(1, 4):
        grads = gradients(params, t)
        for p, G in zip(params, grads):
            p.grad = G.clone()
        source.step([G.flatten(1) for G in grads])
        optim.step()
    check([p.detach().flatten(1) for p in params], initial, source.weights, FLOAT32)


def test_dions_heads_are_those_of_each_stacked_matrix():
    stacked = parameters([(4, 8, 16)])[0]
    given = presets.dion([{"params": [("experts.w", stacked)], "num_heads": 2}], lr=0.02)
    optim = optimizer.Muon(**given, expert_keys=["experts"], ns_dtype=torch.float32)
    initial = list(stacked.detach().clone())
    source = ref.DionReference(initial, lr=0.02, num_heads=2)
    stacked.grad = gradients([stacked], 1)[0]
    source.step(list(stacked.grad))
    optim.step()
    check(list(stacked.detach()), initial, source.weights, FLOAT32)


@pytest.mark.parametrize("empty", [[], ()], ids=["list", "tuple"])
@pytest.mark.parametrize("name", [*SOURCES, "normuon"])
def test_presets_refuse_an_empty_list_as_the_class_does(name, empty):
    preset = SOURCES[name][1] if name in SOURCES else presets.normuon
    if name == "motif":  # which takes groups
        preset = presets.motif
    with pytest.raises(ValueError, match="empty"):
        optimizer.Muon(**preset(empty))


def test_motif_refuses_tensors_as_muon_does():
    with pytest.raises(ValueError, match="use_muon"):
        presets.motif(parameters())


@pytest.mark.parametrize("name", [*sorted(SOURCES.keys() - {"moonlight"}), "normuon"])
def test_presets_keep_the_algorithm_of_default_groups(name):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    groups = optimizer.get_default_muon_param_groups(model)
    optim = optimizer.Muon(**getattr(presets, name)(groups))
    for group, given in zip(optim.param_groups, groups):
        assert group["use_muon"] is given["use_muon"]
        assert len(group["params"]) == len(given["params"])


def test_moonlight_takes_a_tensor():
    optim = optimizer.Muon(**presets.moonlight(muon_params=parameters()[0]))
    assert [len(group["params"]) for group in optim.param_groups] == [1, 0]


def test_dions_adamw_without_decay_needs_no_caution():
    groups = [{"params": parameters(), "algorithm": "adamw", "weight_decay": 0.0}]
    assert optimizer.Muon(**presets.dion(groups, cautious_wd=True)).param_groups


@pytest.mark.parametrize("name", SOURCES)
def test_presets_refuse_arguments_their_sources_do_not_have(name):
    with pytest.raises(ValueError, match="no argument 'muon_beta2'"):
        SOURCES[name][1](parameters(), muon_beta2=0.9)


@pytest.mark.parametrize("use_muon", [True, False])
@pytest.mark.parametrize("name", ["motif", "torch_muon", "keller_jordan", "dion"])
def test_presets_refuse_group_keys_their_sources_do_not_have(name, use_muon):
    group = {"params": parameters(), "use_muon": use_muon}
    with pytest.raises(ValueError, match=r"param_groups\[1\] has 'muon_beta2'"):
        getattr(presets, name)([group, {**group, "muon_beta2": 0.9}])


@pytest.mark.parametrize("key", ["momentum", "betas"])
def test_keller_jordan_refuses_a_key_of_the_other_kind_of_group(key):
    group = {"params": parameters(), "use_muon": key == "betas", key: (0.9, 0.9)}
    with pytest.raises(ValueError, match=key):
        presets.keller_jordan([group])


def test_keller_jordans_arguments_hold_for_groups_that_give_none():
    params = parameters()
    arguments = dict(lr=0.1, momentum=0.9, weight_decay=0.3)
    initial, source = copies(params), ref.KellerJordanReference(params, **arguments)
    optim = optimizer.Muon(
        **presets.keller_jordan([{"params": params}], **arguments), ns_dtype=torch.float32
    )
    run(2, (optim, params, source))
    check(params, initial, source.weights, FLOAT32)


def test_groups_of_a_model_with_experts_are_taken_by_presets():
    groups = optimizer.muon.get_default_muon_param_groups(Moe(), expert_keys=["experts"])
    for preset in (presets.motif, presets.torch_muon, presets.keller_jordan):
        optim = optimizer.Muon(**preset(groups))
        assert optim.param_groups[0]["expert_keys"] == ["experts"]


def test_motifs_groups_of_a_model_give_its_numbers():
    model, arguments = Moe(), dict(lr=0.02, momentum=0.9, weight_decay=0.3)
    groups = optimizer.muon.get_default_muon_param_groups(model, expert_keys=["experts"])
    assert groups[0]["names"] == ["wq.weight", "experts.w1", "experts.w2"]
    matrices, others = (group["params"] for group in groups)
    before, others_before = copies(matrices), copies(others)
    given = presets.motif(
        groups, **arguments, expert_keys=["experts"], adamw_betas=(0.8, 0.99), adamw_eps=1e-6
    )
    optim = optimizer.Muon(**given, ns_dtype=torch.float32)
    source = ref.MotifReference(matrices, **arguments)
    adamw = ref.ReferenceAdamW(
        others, dict(lr=0.02, weight_decay=0.3, adamw_betas=(0.8, 0.99), adamw_eps=1e-6)
    )
    run(4, (optim, matrices, source), (optim, others, adamw))
    check(matrices, before, source.weights, FLOAT32)
    check(others, others_before, adamw.weights, 1e-5)


@pytest.mark.parametrize("name", [*SOURCES, "nanochat"])
def test_gradients_stay_behind_a_step_but_with_motifs_preset_as_in_the_sources(name):
    params = parameters()
    if name == "nanochat":
        optim = optimizer.MuonAdamW(nanochat_groups(params, []))
    else:
        optim = optimizer.Muon(**SOURCES[name][1](params))
    for p, G in zip(params, gradients(params, 1)):
        p.grad = G
    optim.step()
    assert all((p.grad is None) is (name == "motif") for p in params)


# -- twenty steps --------------------------------------------------------------------------------


TWENTY = {
    **{name: (*SOURCES[name], {}) for name in SOURCES},
    "keller_jordan, small": (*SOURCES["keller_jordan"], {}),
    "dion's Polar Express": (*SOURCES["dion"], dict(use_polar_express=True)),
    "dion's NorMuon": (ref.NorMuonReference, presets.normuon, {}),
    "nanochat of February": (ref.NanochatReference, "2026-02", {}),
    "nanochat of July": (ref.NanochatJulyReference, "2026-07", {}),
}


class Regression(nn.Module):
    """Two layers and a head, of `SHAPES`' kinds: square, tall, wide."""

    def __init__(self, dtype):
        super().__init__()
        shapes = [(24, 24), (64, 24), (16, 64)]
        self.weights = nn.ParameterList(parameters(shapes, dtype=dtype))
        self.inputs, self.targets = randn(64, 24, dtype=dtype), randn(64, 16, seed=9, dtype=dtype)

    def gradients(self, t):
        x = self.inputs.roll(t, 0)[:32]
        for W in self.weights:
            x = torch.tanh(x @ W.mT)
        loss = (x - self.targets.roll(t, 0)[:32]).square().mean()
        return torch.autograd.grad(loss, list(self.weights))


@pytest.mark.parametrize("kind", ["random", "training"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", TWENTY)
def test_twenty_steps_in_exact_arithmetic_are_those_of_each_source(name, dtype, kind):
    make_source, preset, arguments = TWENTY[name]
    model = Regression(dtype)
    params = list(model.weights)
    initial = copies(params)
    if isinstance(preset, str):
        hyper = dict(lr=0.02, momentum=0.95, beta2=0.9, weight_decay=0.2)
        source = make_source(params, **hyper)
        groups = [{"kind": "muon", "params": params, "ns_steps": 5, **hyper}]
        optim = optimizer.MuonAdamW(groups, version=preset, ns_dtype=dtype, comm_dtype=dtype)
    else:
        source = make_source(params, **arguments)
        optim = optimizer.Muon(**preset(params, **arguments), ns_dtype=dtype, comm_dtype=dtype)
    for t in range(1, 21):
        grads = model.gradients(t) if kind == "training" else gradients(params, t)
        grads = [G * 1e-9 for G in grads] if "small" in name else grads
        for p, G in zip(params, grads):
            p.grad = G.clone()
        source.step(grads)
        optim.step()
    check(params, initial, source.weights, 3e-4)


@pytest.mark.parametrize("version", ["2026-02", "2026-07"])
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


def test_an_unknown_version_of_nanochat_is_refused():
    with pytest.raises(ValueError, match=r"version must be one of '2026-02', '2026-07', found '1'"):
        optimizer.MuonAdamW(nanochat_groups(parameters(), []), version="1")


def of_all_ranks(dist_class):
    """What `MuonAdamW` of July makes of each rank's own gradients."""
    params, vectors = parameters(), parameters([(8,), (6, 5)], seed=50)
    before, vectors_before = copies(params), copies(vectors)
    hyper = dict(lr=0.02, momentum=0.95, beta2=0.9, weight_decay=0.2)
    source = ref.NanochatJulyReference(params, **hyper)
    adamw = nanochat_reference(params, vectors)[1]
    make = optimizer.DistMuonAdamW if dist_class else optimizer.MuonAdamW
    optim = make(nanochat_groups(params, vectors), version="2026-07", ns_dtype=torch.float32)
    for t in range(1, 4):
        for each, of in ((params, source), (vectors, adamw)):
            theirs = [gradients(each, 10 * t + rank) for rank in range(dist.get_world_size())]
            for p, G in zip(each, theirs[dist.get_rank()]):
                p.grad = G
            of.step([sum(grads) / len(theirs) for grads in zip(*theirs)])
        optim.step()
    check(params, before, source.weights, BFLOAT16)  # updates travel in bf16
    check(vectors, vectors_before, adamw.weights, 1e-5)


@pytest.mark.parametrize("dist_class", [False, True])
def test_julys_muon_adamw_is_one_class_for_one_rank_and_many(dist_class):
    run_ranks(of_all_ranks, 2, dist_class)


# -- Emerging-Optimizers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(coefficient_type="aol"), "coefficient_type must be one of 'simple'.*found 'aol'"),
        (dict(coefficient_type="quintic", num_ns_steps=6), "would repeat"),
        (dict(scale_mode="none"), "scale_mode must be one of 'spectral'"),
        (dict(extra_scale_factor=0.0), "extra_scale_factor must be a number > 0"),
        (dict(weight_decay_method="l2"), "weight_decay_method must be one of 'decoupled'"),
        (dict(weight_update_hook=len), "weight_update_hook must be one of None"),
    ],
)
def test_emerging_optimizers_refuses_what_has_no_counterpart(arguments, message):
    with pytest.raises(ValueError, match=message):
        presets.emerging_optimizers(parameters(), **arguments)


@pytest.mark.parametrize("steps", [3, 5, 7])
def test_emerging_optimizers_continues_cans_with_its_last_triple(steps):
    arguments = dict(coefficient_type="cans", num_ns_steps=steps)
    params = parameters(dtype=torch.float64)
    initial, source = copies(params), ref.EmergingReference(params, **arguments)
    optim = optimizer.Muon(**presets.emerging_optimizers(params, **arguments))
    run(3, (optim, params, source))
    check(params, initial, source.weights, 1e-5)


@pytest.mark.parametrize("scale_mode", ["spectral", "shape_scaling", "unit_rms_norm"])
def test_the_extra_scale_multiplies_the_update_but_not_the_decay_of_groups_too(scale_mode):
    params = parameters()
    group = dict(lr=0.05, weight_decay=0.4, momentum=0.9)
    scale = dict(scale_mode=scale_mode, extra_scale_factor=0.2)
    initial, source = copies(params), ref.EmergingReference(params, **group, **scale)
    given = presets.emerging_optimizers([{"params": params, **group}], **scale)
    run(3, (optimizer.Muon(**given, ns_dtype=torch.float32), params, source))
    check(params, initial, source.weights, FLOAT32)


@pytest.mark.parametrize("scale_mode", ["spectral", "shape_scaling"])
def test_factors_of_matrices_do_not_reach_adamw(scale_mode):
    groups = [{"params": parameters(), "use_muon": use_muon} for use_muon in (True, False)]
    scale = dict(scale_mode=scale_mode, extra_scale_factor=5.0)
    given = presets.emerging_optimizers(groups, lr=0.01, weight_decay=0.1, **scale)
    matrices, others = optimizer.Muon(**given).param_groups
    assert (others["lr"], others["weight_decay"]) == (0.01, 0.1)
    if scale_mode == "spectral":
        assert (matrices["lr"], matrices["weight_decay"], matrices["adjust_lr"]) == (0.01, 0.1, 5.0)
    else:
        assert (matrices["lr"], matrices["weight_decay"]) == (0.05, 0.02)


def test_motifs_options_may_be_replaced():
    params = parameters()
    given = presets.motif([{"params": params, "use_muon": True}], ns_coefficients="quintic")
    assert optimizer.Muon(**given).param_groups[0]["ns_coefficients"] == "quintic"


# nanochat


def nanochat_groups(params, vectors, **options):
    muon = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=0.2)
    adamw = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    return [
        {"kind": "adamw", "params": vectors, **adamw},
        {"kind": "muon", "params": params, **muon, **options},
    ]


def nanochat_reference(params, vectors, **options):
    muon = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=0.2)
    source = ref.NanochatReference(params, **{**muon, **options})
    adamw = dict(lr=0.01, adamw_betas=(0.8, 0.95), adamw_eps=1e-10, weight_decay=0.0)
    return source, ref.ReferenceAdamW(vectors, adamw)


NANOCHAT = [
    dict(),
    dict(beta2=None),
    dict(beta2=0.95, momentum=0.85, weight_decay=1.0),
    dict(weight_decay=0.0, lr=0.1),
    pytest.param(
        dict(ns_steps=3), marks=pytest.mark.filterwarnings("ignore:.*leave singular values")
    ),
]


def nanochat_beside(options, dtype=torch.float32, **ours):
    params, vectors = parameters(dtype=dtype), parameters([(7,), (6, 5)], seed=50)
    source, adamw = nanochat_reference(params, vectors, **options)
    optim = optimizer.MuonAdamW(nanochat_groups(params, vectors, **options, **ours))
    return optim, params, vectors, source, adamw


@pytest.mark.parametrize("options", NANOCHAT, ids=str)
def test_muon_adamw_gives_nanochats_numbers_in_float32(options):
    optim, params, vectors, source, adamw = nanochat_beside(options, ns_dtype=torch.float32)
    before, vectors_before = copies(params), copies(vectors)
    run(5, (optim, params, source), (optim, vectors, adamw))
    check(params, before, source.weights, FLOAT32)
    check(vectors, vectors_before, adamw.weights, 1e-5)
    for p, B, V in zip(params, source.momentum, source.second_moment):
        assert relative_error(optim.state[p]["momentum_buffer"], B) < 1e-6
        assert relative_error(optim.state[p]["second_momentum_buffer"], V) < FLOAT32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", NANOCHAT, ids=str)
def test_muon_adamw_stays_near_nanochat_in_the_default_arithmetic(options, dtype):
    optim, params, vectors, source, adamw = nanochat_beside({**options, "lr": 0.2}, dtype)
    before = copies(params)
    run(4, (optim, params, source), (optim, vectors, adamw))
    check(params, before, source.weights, NANOCHATS_BFLOAT16)


def test_muon_adamw_keeps_gradients_and_skips_absent_ones():
    optim, params, vectors, source, adamw = nanochat_beside({}, ns_dtype=torch.float32)
    before, vectors_before = copies(params), copies(vectors)
    run(3, (optim, params, source), (optim, vectors, adamw), absent=[(1, 0), (2, 1), (3, 0)])
    check(params, before, source.weights, FLOAT32)
    check(vectors, vectors_before, adamw.weights, 1e-5)
    assert params[2].grad is not None


LIVE_MUON = [
    dict(lr=0.1),
    dict(momentum=0.5),
    dict(beta2=0.5),
    dict(beta2=None),
    dict(weight_decay=2.0),
    dict(lr=0.05, momentum=0.8, beta2=0.0, weight_decay=0.0),
]
LIVE_ADAMW = [
    dict(lr=0.1),
    dict(betas=(0.5, 0.6)),
    dict(eps=0.1),
    dict(weight_decay=2.0),
    dict(lr=0.05, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.5),
]


@pytest.mark.parametrize("change", LIVE_MUON, ids=str)
def test_nanochats_keys_of_muon_groups_are_live(change):
    optim, params, _, source, _ = nanochat_beside({}, ns_dtype=torch.float32)
    before, unchanged = copies(params), copy.deepcopy(source)
    names = {"lr": "lr", "momentum": "mu", "beta2": "beta2", "weight_decay": "wd"}

    def after(t):
        if t == 2:
            optim.param_groups[1].update(change)
            for key, value in change.items():
                setattr(source, names[key], 0.0 if value is None else value)

    run(4, (optim, params, source, unchanged), after=after)
    check(params, before, source.weights, FLOAT32)
    with pytest.raises(AssertionError):
        check(params, before, unchanged.weights, FLOAT32)


@pytest.mark.parametrize("change", LIVE_ADAMW, ids=str)
def test_nanochats_keys_of_adamw_groups_are_live(change):
    optim, _, vectors, _, adamw = nanochat_beside({})
    before, unchanged = copies(vectors), copy.deepcopy(adamw)

    def after(t):
        if t == 2:
            optim.param_groups[0].update(change)
            names = {"betas": "adamw_betas", "eps": "adamw_eps"}
            for options in adamw.options:
                options.update({names.get(key, key): value for key, value in change.items()})

    run(4, (optim, vectors, adamw, unchanged), after=after)
    check(vectors, before, adamw.weights, 1e-5)
    with pytest.raises(AssertionError):
        check(vectors, before, unchanged.weights, 1e-5)


@pytest.mark.parametrize("key", ["beta2", "adamw_betas", "adamw_eps", "cautious"])
def test_muon_adamw_refuses_arguments_that_groups_or_nanochat_decide(key):
    with pytest.raises(ValueError, match=key):
        optimizer.MuonAdamW(nanochat_groups(parameters(), parameters([(7,)])), **{key: 0.5})


@pytest.mark.parametrize("key, meant", [("adamw_betas", "betas"), ("adamw_eps", "eps")])
def test_muon_adamw_refuses_other_names_of_its_group_keys(key, meant):
    groups = nanochat_groups(parameters(), parameters([(7,)]))
    groups[0][key] = groups[0].pop(meant)
    with pytest.raises(ValueError, match=rf"param_groups\[0\] has '{key}'.*'{meant}'"):
        optimizer.MuonAdamW(groups)


def fresh_and_saved(steps=2):
    """An optimizer after some steps, a fresh one beside it on copies of its parameters."""
    optim, params, vectors, *_ = nanochat_beside({})
    for group in optim.param_groups:
        group["initial_lr"], group["tag"] = group["lr"], "mine"
    run(steps, (optim, params), (optim, vectors))
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    their_vectors = [nn.Parameter(p.detach().clone()) for p in vectors]
    fresh = optimizer.MuonAdamW(nanochat_groups(theirs, their_vectors))
    return optim, params, vectors, fresh, theirs, their_vectors


def assert_steps_alike(optim, params, vectors, fresh, theirs, their_vectors):
    run(2, (optim, params), (optim, vectors), (fresh, theirs), (fresh, their_vectors))
    for p, q in zip([*params, *vectors], [*theirs, *their_vectors]):
        assert torch.equal(p, q)
        assert all(torch.equal(optim.state[p][key], fresh.state[q][key]) for key in optim.state[p])


def test_a_state_dict_round_trip_resumes_bit_for_bit():
    optim, *own, fresh, theirs, their_vectors = fresh_and_saved()
    optim.param_groups[1].update(lr=0.07, beta2=None)
    optim.param_groups[0].update(betas=(0.7, 0.8), eps=1e-3)
    with pytest.warns(UserWarning, match="left out: tag$"):
        fresh.load_state_dict(copy.deepcopy(optim.state_dict()))
    for group, loaded in zip(optim.param_groups, fresh.param_groups):
        assert all(
            loaded[key] == value for key, value in group.items() if key not in ("params", "tag")
        )
    assert_steps_alike(optim, *own, fresh, theirs, their_vectors)


@pytest.mark.parametrize(
    "missing", [("eps", "betas", "beta2"), ("use_muon",), ("kind",), ("momentum", "ns_dtype")]
)
def test_group_keys_missing_from_a_checkpoint_do_not_stop_it(missing):
    optim, *own, fresh, theirs, their_vectors = fresh_and_saved()
    saved = copy.deepcopy(optim.state_dict())
    for group in saved["param_groups"]:
        for key in missing:
            group.pop(key, None)
    fresh.load_state_dict(saved)
    assert [group["kind"] for group in fresh.param_groups] == ["adamw", "muon"]
    assert [group["use_muon"] for group in fresh.param_groups] == [False, True]
    run(1, (fresh, theirs), (fresh, their_vectors))
    if missing in [("use_muon",), ("kind",)]:
        run(1, (optim, own[0]), (optim, own[1]))
        assert all(torch.equal(p, q) for p, q in zip(own[0], theirs))


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
