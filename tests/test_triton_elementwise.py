"""Kernels of element-wise steps: the formulas in float64, any layout, and steps like torch's."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import math
import os
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from kernel import optimizer
from layouts import Group, Weight, make, part_for, step_placed, whole
from marks import slow_if_interpreted
from ranks import rank_outcomes, run_ranks

pytest.importorskip("triton")
elementwise = importlib.import_module(f"{optimizer.__name__}.triton_kernels.elementwise")

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")

# Twice what rounding to the nearest takes: the interpreter rounds to bf16 towards zero.
ULP = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-23, FP64: 2.0**-52}

pytestmark = [
    pytest.mark.usefixtures("seeded_on_one_thread"),
    # The interpreter's.
    pytest.mark.filterwarnings("ignore:Conversion of an array", "ignore:invalid value"),
]


# -- tensors in all layouts ------------------------------------------------------------------------

GUARD = 7.0
LAYOUTS: dict[str, Callable] = {  # a tensor of that shape within a larger one
    "contiguous": lambda shape, new: new(shape),
    "offset": lambda shape, new: new(math.prod(shape) + 5)[3:-2].view(shape),
    "rows": lambda shape, new: new((*shape[:-2], shape[-2] + 3, shape[-1]))[..., 1:-2, :],
    "columns": lambda shape, new: new((*shape[:-1], shape[-1] + 3))[..., 1:-2],
    "every other": lambda shape, new: new((*shape[:-1], 2 * shape[-1]))[..., ::2],
    "transposed": lambda shape, new: new((*shape[:-2], shape[-1], shape[-2])).mT,
    "reversed": lambda shape, new: new(shape[::-1]).permute(*range(len(shape))[::-1]),
}
SHAPES = [(1, 1), (1, 40), (40, 1), (3, 700), (65, 33), (4, 9, 20)]


class Placed:
    """Random numbers in a layout, with guards around them."""

    def __init__(self, shape, dtype=FP32, layout="contiguous"):
        def new(of_shape):
            self.storage = torch.full(
                of_shape if isinstance(of_shape, tuple) else (of_shape,), GUARD, dtype=dtype
            ).to(DEVICE)
            return self.storage

        self.tensor = LAYOUTS[layout](tuple(shape), new)
        assert self.tensor.shape == shape
        self.tensor.copy_(torch.randn(shape))
        self.before = self.tensor.to(FP64, copy=True)
        self.storage_before = self.storage.clone()

    def is_untouched(self) -> bool:
        return torch.equal(self.storage, self.storage_before)

    def is_guarded(self) -> bool:
        """Whether nothing around the tensor was written."""
        self.tensor.fill_(GUARD)
        return bool((self.storage == GUARD).all())


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """``size``: magnitudes that arithmetic of fp32, or of fp64 where ``found`` is, rounded."""
    slack = 8 * (ULP[FP64] if found.dtype == FP64 else ULP[FP32])
    error = (found.double() - expected).abs()
    assert (error <= ULP[found.dtype] * expected.abs() + slack * size + 1e-45).all()


def placed_alike(shapes, dtypes, layouts):
    return [Placed(shape, dtype, layout) for shape, dtype, layout in zip(shapes, dtypes, layouts)]


# -- momentum --------------------------------------------------------------------------------------


def momentum_of(B, G, out, momentum, weight, nesterov):
    """B' rounded as it was stored, and the output; both in float64."""
    after = momentum * B.before + weight * G.before
    stored = B.tensor.double()
    result = weight * G.before + momentum * stored if nesterov else stored
    size = momentum * B.before.abs() + abs(weight) * G.before.abs()
    return after, result, 2 * size


def check_momentum(shape, dtypes, layouts, nesterov, weight=1.0):
    B, G, out = placed_alike([shape] * 3, dtypes, layouts)
    hyper = {"momentum": 0.95, "weight": weight, "nesterov": nesterov}
    elementwise.update_momentum([B.tensor], [G.tensor], [out.tensor], **hyper)
    after, result, size = momentum_of(B, G, out, **hyper)
    assert_rounded(B.tensor, after, size)
    assert_rounded(out.tensor, result, size)
    assert G.is_untouched() and B.is_guarded() and out.is_guarded()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_of_any_shape(shape, nesterov):
    check_momentum(shape, (FP32, FP32, FP32), ["contiguous"] * 3, nesterov)


@pytest.mark.parametrize("of_buffer", [FP32, BF16])
@pytest.mark.parametrize("of_grad", [FP32, BF16])
@pytest.mark.parametrize("of_output", [FP32, BF16, FP16])
def test_momentum_of_any_dtypes(of_buffer, of_grad, of_output):
    dtypes = of_buffer, of_grad, of_output
    check_momentum((5, 37), dtypes, ["contiguous"] * 3, True)
    check_momentum((5, 37), dtypes, ["contiguous"] * 3, False, weight=-0.05)


@pytest.mark.parametrize("dtypes", [(FP64, FP64, FP64), (FP32, FP64, FP64), (FP64, FP32, BF16)])
def test_momentum_is_computed_in_fp64_where_a_tensor_has_it(dtypes):
    check_momentum((5, 37), dtypes, ["contiguous"] * 3, True, weight=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", range(3))
def test_momentum_in_any_layout(layout, role):
    layouts = ["contiguous"] * 3
    layouts[role] = layout
    for shape in [(19, 33), (3, 5, 24)]:
        check_momentum(shape, (FP32, BF16, BF16), layouts, True)


@pytest.mark.parametrize("shape", [(17, 4096), (511, 513)], ids=str)
def test_momentum_of_more_than_a_tile(shape):
    check_momentum(shape, (FP32, BF16, BF16), ["contiguous", "columns", "contiguous"], True)


def test_tensors_of_more_dimensions_than_kernels_take():
    shape = (2, 3, 4, 3, 5)
    check_momentum(shape, (FP32,) * 3, ["reversed", "contiguous", "every other"], True)
    W, U = Placed(shape, layout="reversed"), Placed(shape, layout="contiguous")
    elementwise.update_weights([W.tensor], [U.tensor], rate=0.5, decay=0.0, cautious=False)
    assert_rounded(W.tensor, W.before - 0.5 * U.before, W.before.abs() + U.before.abs())


@pytest.mark.parametrize("layout", ["contiguous", "reversed"])
def test_buffers_are_updated_where_nobody_wants_outputs(layout):
    shape = (2, 3, 4, 3, 5)
    B, G = placed_alike([shape] * 2, (FP32, FP32), [layout, "every other"])
    elementwise.update_momentum(
        [B.tensor], [G.tensor], None, momentum=0.5, weight=1.0, nesterov=True
    )
    assert_rounded(B.tensor, 0.5 * B.before + G.before, B.before.abs() + G.before.abs())
    assert G.is_untouched() and B.is_guarded()


# -- norms -----------------------------------------------------------------------------------------


normalization = importlib.import_module(f"{optimizer.__name__}.newton_schulz.normalization")


def normalized(G: torch.Tensor, dtype=FP32, eps=(0.0,), magnification=1.0, kernels=True, out=None):
    """A batch brought to norm ``magnification`` by kernels, or by torch's functions."""
    out = torch.full_like(G, GUARD, dtype=dtype) if out is None else out
    used = types.SimpleNamespace(is_used_on=lambda device_type: kernels)
    with patch.object(normalization, "triton_kernels", used):
        scratch = optimizer.scratch.Scratch()
        normalization.normalize(G, 1.01, normalization.Eps(*eps), magnification, scratch, out)
    return out


def assert_normalized(G: torch.Tensor) -> None:
    expected = G.double() / G.double().norm(dim=(1, 2), keepdim=True).clamp_min(1e-300) / 1.01
    torch.testing.assert_close(normalized(G).double(), expected, rtol=1e-5, atol=0.0)


def test_matrices_of_a_batch_are_normalized_each_by_itself():
    scales = torch.tensor([1.0, 1e-30, 0.0], device=DEVICE).view(3, 1, 1)
    G = torch.randn(3, 33, 130, device=DEVICE) * scales
    for matrices in (G, G.half() + 0, G.mT, G[:, ::2, 5:]):
        assert_normalized(matrices)


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1.0, 1e30, 1e38])
def test_norms_neither_underflow_nor_overflow(magnitude):
    G = torch.randn(1, 70, 60, device=DEVICE)
    assert_normalized(G * (magnitude / G.abs().max()))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_matrix_with_inf_or_nan_becomes_nan(bad):
    G = torch.randn(2, 70, 60, device=DEVICE)
    G[1, 69, 3] = bad
    out = normalized(G)
    assert torch.equal(out[0], normalized(G[:1])[0]) and out[1, 69, 3].isnan()
    G[1, 0, 0] = INF  # beside a NaN
    assert normalized(G)[1, 69, 3].isnan()


def test_matrices_of_more_tiles_than_are_combined_at_once(monkeypatch):
    monkeypatch.setattr(elementwise, "_PARTIALS", 4)
    for place in (0, -1):
        G = torch.randn(1, 150, 210, device=DEVICE)
        G.view(-1)[place] = 9.0
        assert_normalized(G)


@pytest.mark.parametrize("eps", [(1e-7,), (1e-7, 1e-3), (0.0, 1.0)], ids=str)
@pytest.mark.parametrize("out_dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_a_batch_is_normalized_as_by_torch(dtype, out_dtype, eps):
    scales = torch.tensor([1.0, 1e-4, 0.0, 37.0], device=DEVICE).view(4, 1, 1)
    G = (torch.randn(4, 24, 40, device=DEVICE) * scales).to(dtype)
    divided_by = torch.tensor([1.0, 3.0, 1.0, 0.5], device=DEVICE).view(4, 1, 1)
    for given in (eps, (*eps, divided_by)[: 3 if len(eps) == 2 else 1]):
        by_kernels, by_torch = (
            normalized(G, out_dtype, given, 32.0, kernels) for kernels in (True, False)
        )
        # The interpreter rounds to bf16 towards zero.
        rtol = max(1e-6, 2 * ULP[out_dtype])
        torch.testing.assert_close(by_kernels, by_torch, rtol=rtol, atol=0)


def test_the_default_dtype_changes_nothing():
    G = torch.randn(2, 33, 40, device=DEVICE, dtype=FP32)
    expected = normalized(G)
    torch.set_default_dtype(FP64)
    try:
        assert torch.equal(normalized(G), expected)
    finally:
        torch.set_default_dtype(FP32)


def test_a_batch_may_be_normalized_in_place():
    G = torch.randn(2, 33, 40, device=DEVICE, dtype=BF16)
    expected = normalized(G, BF16)
    with patch.object(
        normalization, "triton_kernels", types.SimpleNamespace(is_used_on=lambda _: True)
    ):
        scratch = optimizer.scratch.Scratch()
        normalization.normalize(G, 1.01, normalization.Eps(0.0), 1.0, scratch, G)
    assert torch.equal(G, expected)


# -- weights ---------------------------------------------------------------------------------------


def check_weights(shape, dtypes, layouts, cautious=False, factor=None, on_device=False):
    W, U = placed_alike([shape] * 2, dtypes, layouts)
    rate, decay = 0.05, 0.3
    as_given = (rate, decay)
    if on_device:
        as_given = torch.tensor(as_given, dtype=FP64 if FP64 in dtypes else FP32).to(DEVICE)
    elementwise.update_weights(
        [W.tensor],
        [U.tensor],
        rate=as_given[0],
        decay=as_given[1],
        cautious=cautious,
        factors=None if factor is None else [factor],
    )
    delta = rate * U.before * (1.0 if factor is None else factor.double())
    decayed = torch.where(delta * W.before >= 0, W.before, 0.0) if cautious else W.before
    expected = W.before - (delta + decay * decayed)
    assert_rounded(W.tensor, expected, W.before.abs() + delta.abs())
    assert U.is_untouched() and W.is_guarded()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_of_any_shape(shape):
    check_weights(shape, (FP32, BF16), ["contiguous"] * 2)


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("of_weight", [FP32, BF16, FP16, FP64])
@pytest.mark.parametrize("of_update", [FP32, BF16, FP16, FP64])
def test_weights_of_any_dtypes(of_weight, of_update, cautious):
    for on_device in (False, True):
        dtypes = of_weight, of_update
        check_weights((5, 37), dtypes, ["contiguous"] * 2, cautious, on_device=on_device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_in_any_layout(layout):
    for shape in [(19, 33), (3, 5, 24), (2, 5, 3, 4)]:
        check_weights(shape, (BF16, BF16), [layout, "contiguous"], True)
        check_weights(shape, (FP32, BF16), ["contiguous", layout])


@pytest.mark.parametrize("of_factor", [(9, 1), (1, 40)], ids=["rows", "columns"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_factor_multiplies_rows_or_columns(of_factor, layout):
    factor = torch.rand(of_factor).to(DEVICE)
    check_weights((9, 40), (FP32, BF16), [layout, "contiguous"], True, factor=factor)
    check_weights((3, 9, 40), (FP32, FP32), [layout, "contiguous"], factor=factor)


def test_zero_times_the_weight_is_decayed_as_well():
    W = torch.tensor([[1.0, -1.0, 0.0, 2.0]], device=DEVICE)
    U = torch.tensor([[0.0, -0.0, 1.0, -1.0]], device=DEVICE)
    elementwise.update_weights([W], [U], rate=0.5, decay=0.5, cautious=True)
    assert W.tolist() == [[0.5, -0.5, -0.5, 2.5]]


def test_offsets_beyond_32_bits():
    storage = torch.empty(2**31 + 40, dtype=BF16, device=DEVICE)  # of which few pages are touched
    W, U = storage.as_strided((2, 3, 5), (2**31, 7, 1)), torch.ones(2, 3, 5, device=DEVICE)
    W.copy_(torch.arange(30.0).view(2, 3, 5))
    elementwise.update_weights([W], [U], rate=1.0, decay=0.0, cautious=False)
    assert torch.equal(W.flatten().cpu(), torch.arange(-1.0, 29.0).to(BF16))


# -- launches --------------------------------------------------------------------------------------


class Spied:
    """A kernel whose launches are written down."""

    def __init__(self, kernel, launched: list[int]):
        self.kernel = kernel
        self.launched = launched

    def __getitem__(self, grid):
        self.launched.append(grid[0])
        return self.kernel[grid]

    def __getattr__(self, name):
        return getattr(self.kernel, name)


def launches(monkeypatch) -> list[int]:
    """The number of programs of every launch from now on, of any kernel but the combining one."""
    found: list[int] = []

    class Forgetful(dict):
        """Else compiled kernels would be called themselves, behind the spy."""

        def __setitem__(self, key, compiled):
            pass

    monkeypatch.setattr(elementwise.launching, "_kept", Forgetful())
    for name in ("_momentum_kernel", "_weights_kernel"):
        kernel = getattr(elementwise, name)
        monkeypatch.setattr(elementwise, name, Spied(kernel, found))
    return found


def test_tensors_of_any_storages_are_one_launch(monkeypatch):
    found = launches(monkeypatch)
    B, G = torch.randn(5, 6, 8, device=DEVICE), torch.randn(5, 6, 8, device=DEVICE)
    before, buffer = B.clone(), torch.zeros(5 * 48, device=DEVICE)
    outputs = list(buffer.view(5, 6, 8).unbind())
    hyper = {"momentum": 0.5, "weight": 1.0, "nesterov": False}
    lists = list(B.unbind()), [grad.clone() for grad in G], outputs
    elementwise.update_momentum(*lists, **hyper)
    assert len(found) == 1
    assert torch.equal(buffer.view(5, 6, 8), before * 0.5 + G)


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_tensors_of_other_lengths_share_launches_of_32_and_others_have_their_own(
    dtype, monkeypatch
):
    found = launches(monkeypatch)
    sizes = [(3, 16 * (1 + n % 5)) for n in range(40)] + [(0, 16), (70, 64)]
    W = [torch.randn(size).to(DEVICE, dtype) for size in sizes]
    W += [torch.randn(20, 30).to(DEVICE, dtype).t(), torch.randn(3, 5).to(DEVICE, dtype)]
    W += [torch.randn(3, 16).to(DEVICE, BF16)]
    U = [torch.randn(weight.shape, device=DEVICE) for weight in W]
    before = [weight.clone() for weight in W]
    elementwise.update_weights(W, U, rate=1.0, decay=0.0, cautious=False)
    for weight, old, update in zip(W, before, U):
        torch.testing.assert_close(weight, (old - update).to(weight.dtype))
    # 41 in rows of multiples of 16 elements; the transposed one, the odd one, that in bf16.
    assert len(found) == 2 + 3


def test_rows_of_other_lengths_share_a_launch_where_all_else_is_alike(monkeypatch):
    found = launches(monkeypatch)
    W, U = ([torch.randn(70, 128, device=DEVICE)[:, :n] for n in (64, 48)] for _ in range(2))
    before = [weight.clone() for weight in W]
    elementwise.update_weights(W, U, rate=1.0, decay=0.0, cautious=False)
    for weight, old, update in zip(W, before, U):
        torch.testing.assert_close(weight, old - update)
    assert len(found) == 1


@pytest.mark.parametrize("peers", [1, 3])
@pytest.mark.parametrize("runs", [1, 3, pytest.param(40, marks=pytest.mark.slow)])
def test_parts_are_copied_as_by_torch(runs, peers):
    sources = [torch.randn(2, peers, 3, 8).to(DEVICE, BF16) for _ in range(runs)]
    sources[0][0, 0, 0] = INF
    for kernels in (True, False):
        whole = torch.full((2, runs, peers, 3, 8), GUARD, dtype=BF16, device=DEVICE)
        with steps_by(kernels):
            optimizer.distributed.wire.copy_parts(sources, whole.unbind(1))
        assert torch.equal(whole, torch.stack(sources, 1))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
def test_kernels_compile_without_spills_and_without_fused_rounding():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("cross_compile.py")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert not done.returncode, done.stderr
    facts = json.loads(done.stdout)
    counts = Counter(fact["architecture"] for fact in facts)
    assert set(counts) == {"80", "90", "100", "gfx942"} and len(set(counts.values())) == 1
    for fact in facts:
        assert fact["spills"] == 0, fact
        # AMD divides with fused operations, which the norms alone need.
        divides = fact["kernel"] in ("_measure_kernel", "_sizes_kernel", "_copy_kernel")
        assert fact["fused"] == 0 or (divides and fact["architecture"] == "gfx942"), fact
    vectors = {fact["kernel"] for fact in facts if fact["vectors"]}
    assert vectors >= {"_momentum_kernel", "_weights_kernel", "_copy_kernel"}


# -- steps -----------------------------------------------------------------------------------------


@contextmanager
def steps_by(kernels: bool) -> Iterator[None]:
    """Element-wise work by kernels, wherever it is done, or by torch's functions."""
    where = optimizer.core, optimizer.distributed.wire
    before = [module.triton_kernels for module in where]
    for module in where:
        module.triton_kernels = types.SimpleNamespace(is_used_on=lambda device_type: kernels)
    try:
        yield
    finally:
        for module, found in zip(where, before):
            module.triton_kernels = found


# Values of every option of `core`'s two functions, by which torch's path and the kernels' are
# compared; a function makes a value of the tensors that the option is about, (2, 6, 40).
FACTORS = [torch.linspace(0.5, 2.0, 6).view(6, 1), torch.linspace(2.0, 0.5, 40).view(1, 40)]
VALUES: dict[str, dict[str, list]] = {
    "update_momentum": {
        "momentum": [0.9, 0.0],
        "nesterov": [False, True],
        "style": ["classical", "ema"],
        "maximize": [False, True],
        "opmath": [torch.float32],
    },
    "update_weights": {
        "rate": [0.05, torch.tensor(0.05, device=DEVICE)],
        "decay": [0.0, 0.3, torch.tensor(0.3, device=DEVICE)],
        "cautious": [False, True],
        "factors": [None, [factor.to(DEVICE) for factor in FACTORS]],
        "together": [None, lambda updates: updates],
        "rounded_by": [None],  # more of them in bf16, see below
        "clip": [None],
    },
}
# What kernels take for options that `core` translates; None for what `core` does itself.
TRANSLATED = {
    "style": "weight",
    "maximize": "weight",
    "together": None,
    "clip": None,
    "opmath": None,
}


def options_of(function: Callable) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", VALUES)
def test_every_option_of_core_is_compared_and_kernels_take_it(name):
    options = options_of(getattr(optimizer.core, name))
    assert options == set(VALUES[name])
    translated = {TRANSLATED.get(option, option) for option in options}
    assert translated - {None} == options_of(getattr(elementwise, name))


def changed_by_core(name: str, dtype: torch.dtype, options: dict, kernels: bool) -> list:
    """The tensors that one of `core`'s functions has changed, as far as they are defined then."""
    torch.manual_seed(0)
    changed, read = torch.randn(2, 2, 6, 40).to(DEVICE)
    read[..., :2] = torch.tensor([0.0, -0.0])
    changed, outputs = changed.to(dtype), torch.full_like(read, GUARD)
    options = {key: v(read) if callable(v) else v for key, v in options.items()}
    is_momentum = name == "update_momentum"
    stacks = (changed, read.to(dtype), outputs) if is_momentum else (changed, read)
    lists: list = [list(stack.unbind()) for stack in stacks]
    results = []
    with steps_by(kernels):
        for unread in (False, True) if is_momentum else (False,):
            if unread:
                lists[2] = None
            getattr(optimizer.core, name)(*lists, **options)
            results += [changed.clone(), *([] if unread or not is_momentum else [outputs.clone()])]
    return results


@slow_if_interpreted
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_kernels_do_what_core_does_without_them_for_all_options(name, dtype, monkeypatch):
    launched = launches(monkeypatch)
    for values in itertools.product(*VALUES[name].values()):
        options = dict(zip(VALUES[name], values))
        expected = changed_by_core(name, dtype, options, kernels=False)
        assert not launched
        found = changed_by_core(name, dtype, options, kernels=True)
        assert launched
        launched.clear()
        # The interpreter rounds to bf16 towards zero.
        slack = 2e-2 if dtype == BF16 else 2e-6
        for tensor, other in zip(found, expected):
            message = f"{options}"
            torch.testing.assert_close(tensor, other, rtol=slack, atol=slack, msg=message)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("by", ["residuals", "random bits"])
def test_kernels_round_weights_as_core_does_to_the_bit(by):
    """In layouts of up to four dimensions; of numbers that arithmetic in fp32 does not round."""
    rounding = optimizer.weight_rounding
    shapes = [(7, 40), (3, 4, 5, 6), (3, 4, 5, 6), (1,), (2, 0)]
    views: list[Callable] = [
        *(lambda t: t, lambda t: t, lambda t: t[..., ::2].permute(2, 0, 3, 1)),
        *(lambda t: t, lambda t: t),
    ]
    results = []
    for kernels in (False, True):
        torch.manual_seed(0)
        whole_weights = [torch.randn(shape).to(DEVICE, BF16) for shape in shapes]
        residuals = [
            torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).to(DEVICE) for shape in shapes
        ]
        residuals = [r & -(2**11) for r in residuals]
        weights = [view(t) for view, t in zip(views, whole_weights)]
        updates = [torch.randint(-9, 9, w.shape).to(DEVICE, FP32) / 2**12 for w in weights]
        updates[1].view(-1)[3:5] = torch.tensor([NAN, INF])
        rounded_by = [view(r) for view, r in zip(views, residuals)]
        if by == "random bits":
            rounded_by = [
                rounding.RandomBits(rounding.random_key(2, str(n)), view(r.to("meta")))
                for n, (view, r) in enumerate(zip(views, residuals))
            ]
        with steps_by(kernels):
            for decay in (0.0, 0.5):
                optimizer.core.update_weights(
                    weights,
                    [update.clone() for update in updates],
                    rate=0.5,
                    decay=decay,
                    cautious=True,
                    rounded_by=rounded_by,
                )
        results.append((whole_weights, residuals))
    for one, other in zip(*results):
        for a, b in zip(one, other):
            assert torch.equal(a.isnan(), b.isnan())  # of which there are many, by their bits
            a, b = (t.masked_fill(t.isnan(), 0).view(torch.int16) for t in (a, b))
            assert torch.equal(a, b)


OPTIONS = {
    "defaults": {},
    "ema": {"momentum_style": "ema"},
    "no nesterov": {"nesterov": False},
    "cautious": {"cautious": True, "weight_decay": 0.5},
    "second moment": {"beta2": 0.9},
    "maximize": {"maximize": True},
    "lr of a tensor": {"lr": torch.tensor(0.05)},
    "captured lr": {"lr": torch.tensor(0.05, device=DEVICE), "capturable": True, "cautious": True},
    "adjusted decay": {"decay_lr": "adjusted", "weight_decay": 0.5},
    "bf16 momentum": {"momentum_dtype": BF16},
    "chunks": {"chunk_size": 1},
    "split": {"split": 4},
}


def weights_after(kernels: bool, dtype: torch.dtype, options: dict) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 16), (16, 24), (3, 8, 12), (8, 4, 3, 3)]
    params = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    params[0] = params[0].t().contiguous().t()
    params[3] = params[3].contiguous(memory_format=torch.channels_last)
    params = [nn.Parameter(p) for p in params]
    names = ["a", "b", "experts", "conv"]
    group = {"params": params, "names": names, "use_muon": True, "expert_keys": ["experts"]}
    optim = optimizer.Muon(
        [{**group, "flatten": True}], **{"lr": 0.05, "ns_dtype": FP32, **options}
    )
    for _ in range(3):
        for p in params:
            grad = torch.randn(p.shape, generator=generator).to(DEVICE, dtype)
            p.grad = torch.empty_like(p).copy_(grad)
        grads = [p.grad for p in params]
        before = [grad.clone() for grad in grads]
        with steps_by(kernels):
            optim.step()
        for grad, same in zip(grads, before):
            assert torch.equal(grad, same)
        assert all((p.grad is None) is not optim.defaults["capturable"] for p in params)
    return [p.detach().double() for p in params]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_by_kernels_is_the_step_by_torch(options):
    for found, expected in zip(
        weights_after(True, FP32, options), weights_after(False, FP32, options)
    ):
        # A momentum of bf16 rounds towards zero in the interpreter.
        rounding = 2e-2 if options.get("momentum_dtype") == BF16 else 1e-5
        assert (found - expected).norm() <= rounding * expected.norm()


@pytest.mark.parametrize("options", [{}, {"beta2": 0.9, "cautious": True}], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP64], ids=str)
def test_a_step_of_other_dtypes_by_kernels_is_the_step_by_torch(dtype, options):
    options = {**options, "ns_dtype": torch.promote_types(dtype, FP32)}
    for found, expected in zip(
        weights_after(True, dtype, options), weights_after(False, dtype, options)
    ):
        bound = 1e-6 if options.get("beta2") and dtype == FP64 else 8 * ULP[dtype]
        assert (found - expected).norm() <= bound * expected.norm()


CASES = {
    "rows and columns": [
        Weight((8, 12), (2,), (0,)),
        Weight((12, 8), (2,), (1,)),
        Weight((3, 5), (2,), (0,)),
        Weight((8, 12)),
    ],
    "experts": [Group([Weight((4, 8, 12), (2,), (2,)), Weight((3, 12, 8), (2,), (0,))])],
}
SHARDED = [{}, {"beta2": 0.9, "cautious": True}]


def step_in_layouts() -> None:
    exact = {"ns_dtype": FP32, "comm_dtype": FP32}
    with steps_by(kernels=True):
        step_placed(
            [
                (name, case if isinstance(case[0], Group) else [Group(case)], {**exact, **options})
                for name, case in CASES.items()
                for options in SHARDED
            ],
            atol=0.0,
        )


def sharded_weights(kernels: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for o, i in [(24, 16), (16, 24), (40, 12)]))
    fully_shard(model)
    optim = make(model, ns_dtype=FP32, lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for p, scale in zip(model.parameters(), (1e-7, 1.0, 1e4)):
            p.grad = part_for(p, scale * torch.randn(p.shape, generator=generator))
        with steps_by(kernels):
            optim.step()
    return [whole(p).detach() for p in model.parameters()]


def compare_on_ranks() -> float:
    step_in_layouts()
    pairs = zip(sharded_weights(True), sharded_weights(False))
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.skipif(str(DEVICE) != "cpu", reason="gloo ranks need the interpreter")
@pytest.mark.slow
def test_sharded_steps_by_kernels_have_the_bits_of_whole_ones_and_travel_in_16_bits():
    for error in run_ranks(compare_on_ranks, 2):
        assert error <= 5e-3  # where the interpreter rounds towards zero


# -- captured steps --------------------------------------------------------------------------------


def refuse_capture() -> None:
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model)
    optim = make(model, capturable=True)
    model.weight.grad = part_for(model.weight, torch.ones(8, 8))
    before = whole(model.weight).clone()
    try:
        optim.step()
    finally:
        assert not optim.state and torch.equal(whole(model.weight), before)


def refuse_capture_of_averages() -> None:
    params = [nn.Parameter(torch.ones(8, 8))]
    params[0].grad = torch.ones(8, 8)
    groups = [{"params": params, "use_muon": False, "capturable": True}]
    replicas = {"process_group": dist.group.WORLD, "grad_reduce": "mean"}
    optim = optimizer.Muon(groups, **replicas)
    try:
        optim.step()
    finally:
        assert not optim.state and torch.equal(params[0], torch.ones(8, 8))


def test_a_step_that_averages_gradients_is_not_capturable():
    for outcome in rank_outcomes(refuse_capture_of_averages, 2):
        assert outcome.error == "ValueError"
        assert outcome.message.startswith('param_groups[0]: grad_reduce="mean" averages gradients')


def test_a_step_with_traffic_is_not_capturable():
    for outcome in rank_outcomes(refuse_capture, 2):
        assert outcome.error == "ValueError"
        assert "weight is exchanged between ranks [0, 1]" in outcome.message
        assert "capturable=False in param_groups[0]" in outcome.message


def test_capturable_keeps_gradients_where_they_are():
    p = nn.Parameter(torch.randn(8, 4))
    p.grad = grad = torch.randn(8, 4)
    optimizer.Muon([{"params": [p], "use_muon": True}], capturable=True, none_grad=True).step()
    assert p.grad is grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA graphs")
@pytest.mark.parametrize("options", [{}, {"beta2": 0.9, "cautious": True}])
def test_a_replayed_step_is_the_eager_one(options):
    initial = [torch.randn(64, 48), torch.randn(48, 96)]
    ours, twins = ([nn.Parameter(t.cuda()) for t in initial] for _ in range(2))
    lr = torch.tensor(0.05, device="cuda")
    captured, eager = (
        optimizer.Muon([{"params": params, "use_muon": True}], lr=lr, capturable=True, **options)
        for params in (ours, twins)
    )
    for params in (ours, twins):
        for p in params:
            p.grad = torch.zeros_like(p)

    def new_gradients() -> None:
        for p, q in zip(ours, twins):
            p.grad.normal_()
            q.grad.copy_(p.grad)

    new_gradients()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            captured.step()
            eager.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for rate in (0.1, 0.02):
        lr.fill_(rate)
        new_gradients()
        graph.replay()
        eager.step()
        for p, q in zip(ours, twins):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
