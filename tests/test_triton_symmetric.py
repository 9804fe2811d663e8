"""`symmetric_product`: float64's numbers, exactly symmetric, whatever the shapes and strides.

Runs on an accelerator where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from kernel import optimizer
from marks import one_dtype_is_quick, slow_if_interpreted

triton = pytest.importorskip("triton")
tl = triton.language

symmetric = import_module(f"{optimizer.__name__}.triton_kernels.symmetric")
launching = import_module(f"{optimizer.__name__}.triton_kernels.launching")
symmetric_product = symmetric.symmetric_product
SymmetricConfig, CompileTarget, choose = (
    getattr(launching, name) for name in ("SymmetricConfig", "CompileTarget", "choose")
)

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICE = ACCELERATOR.type if ACCELERATOR else "cpu"
FP16, BF16, FP32 = DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# The interpreter's own, of numpy: lanes that are masked out may divide by zero.
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = SymmetricConfig(block=16, block_k=16, num_warps=4, num_stages=2)
VARIANTS = {
    "by pointers": SMALL,
    "wide": replace(SMALL, width=2),
    "in bulk": replace(SMALL, descriptors=True),
    "wide, in bulk": replace(SMALL, width=2, descriptors=True),
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
H100 = CompileTarget("unknown", "sm_90", "cuda", 132)


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch):
    """What tests pretend of devices and limits is not kept for later launches."""
    monkeypatch.setattr(symmetric, "_prepared", {})
    monkeypatch.setattr(launching, "_kept", {})


def plain_config(config):
    """The variant whose bits another must have: on a device `SMALL`, in the interpreter its width.

    The interpreter multiplies by numpy, which on some CPUs rounds tiles of other widths otherwise.
    """
    return SMALL if ACCELERATOR else replace(SMALL, width=config.width)


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def gram(X):
    return X @ X.mT


def product(A, B, out_dtype=None, alpha=1.0, beta=0.0, C=None, config=None):
    n, s, _ = A.shape
    out = torch.full((n, s, s), math.nan, dtype=out_dtype or A.dtype, device=A.device)
    assert symmetric_product(A, B, alpha, beta, out if C is None else C, out, config) is out
    return out


def assert_product(out, A, B, alpha=1.0, beta=0.0, C=None, terms=1.0):
    """Float64's within one rounding of ``out``, and the sum's own error in fp32; symmetric to the
    last bit.

    Args:
        terms: magnitude of what was summed, where it is larger than the sum.
    """
    expected = alpha * (A.double() @ B.double()) + (0.0 if C is None else beta * C.double())
    precision = torch.finfo(out.dtype).eps / 2
    bound = precision * expected.abs() + 4e-6 * terms * expected.abs().amax().clamp_min(1.0)
    assert ((out.double() - expected).abs() <= bound).all()
    assert torch.equal(out, out.mT)


# -- float64's numbers -----------------------------------------------------------------------------


@one_dtype_is_quick
def test_a_gram_matrix_is_float64s(dtype):
    for n, s, k in [(2, 33, 40), (1, 1, 37), (1, 37, 1), (1, 1, 1), (2, 16, 32)]:
        X = randn(n, s, k, dtype=dtype)
        for A, B in [(X, X.mT), (X.mT, X)]:
            for config in (None, SMALL):
                assert_product(product(A, B, config=config), A, B)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("s, k", [(511, 513), (17, 4096), (65, 513)])
def test_sizes_need_not_be_multiples_of_tiles(s, k, dtype):
    X = randn(1, s, k, dtype=dtype)
    # Tensor cores cut off what does not fit when they add, each time a little.
    assert_product(product(X, X.mT), X, X.mT, terms=max(1, k / 512))


@pytest.mark.parametrize("dtype, out_dtype", itertools.product(DTYPES, DTYPES), ids=str)
def test_the_output_is_rounded_once_to_a_dtype_of_its_own_and_c_may_have_another(dtype, out_dtype):
    X = randn(2, 40, 24, dtype=dtype)
    out = product(X, X.mT, out_dtype)
    assert out.dtype == out_dtype
    assert torch.equal(out, product(X, X.mT, FP32).to(out_dtype))
    C = gram(randn(2, 40, 40)).to(dtype)
    options = dict(alpha=0.5, beta=-1.5, C=C)
    for A in (X, X.half()):
        out = product(A, A.mT, out_dtype, config=SMALL, **options)
        assert_product(out, A, A.mT, **options, terms=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_polynomial_of_a_matrix_takes_it_three_times(dtype):
    A = product(randn(2, 40, 24), randn(2, 40, 24).mT).div_(24).to(dtype)
    for options in [dict(alpha=2.5, beta=-3.5, C=A), dict(alpha=-2.0), dict(beta=1.0, C=A)]:
        assert_product(product(A, A, config=SMALL, **options), A, A, **options, terms=20.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_exact_and_fp32_is_multiplied_in_full_precision(dtype):
    X = torch.randint(-3, 4, (2, 50, 70), generator=torch.Generator().manual_seed(0))
    A = X.to(DEVICE, dtype)
    assert torch.equal(product(A, A.mT, FP32, config=SMALL).cpu(), gram(X).float())
    # TF32 keeps ten bits of 1 + 2⁻¹⁶: the difference of the products would be 0.
    X = torch.tensor([[[1 + 2.0**-16, 1.0], [1.0, -1.0]]], device=DEVICE)
    assert product(X, X.mT)[0, 0, 1].item() == 2.0**-16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_overflow_are_kept_when_rounding(dtype):
    X = torch.tensor([[[3e38, 0.0], [1.0, math.nan]]], device=DEVICE)
    out = product(X, X.mT, dtype)
    assert out[0, 0, 0] == math.inf and out[0, 0, 1].isnan() and out[0, 1, 1].isnan()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_inf_and_nan_stay_within_their_own_matrix(bad):
    X = randn(3, 40, 24)
    expected = product(X, X.mT, config=SMALL)
    X[1, 5, 7] = bad
    out = product(X, X.mT, config=SMALL)
    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    assert not out[1, 5].isfinite().any() and not out[1, :, 5].isfinite().any()
    keep = torch.arange(40) != 5
    assert torch.equal(out[1][keep][:, keep], expected[1][keep][:, keep])


def test_empty_shapes_are_left_alone_and_products_over_nothing_leave_c():
    for n, s, k in [(0, 4, 3), (2, 0, 3), (0, 0, 0), (0, 4, 0)]:
        A = randn(n, s, k)
        assert product(A, A.mT).shape == (n, s, s)
    A, C = randn(2, 20, 0), gram(randn(2, 20, 5))
    assert torch.equal(product(A, A.mT), torch.zeros(2, 20, 20, device=DEVICE))
    expected = 2 * C
    out = product(A, A.mT, beta=2.0, C=C)
    assert torch.equal(out, expected.triu() + expected.triu(1).mT)


# -- bits do not depend on tiles, batches, launches before -----------------------------------------


@slow_if_interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["wide", "in bulk", "wide, in bulk"])
def test_how_tiles_are_loaded_and_joined_changes_no_bit(name, dtype):
    for n, s, k in [(2, 48, 32), (1, 64, 16), (1, 33, 40)]:
        X, C = randn(n, s, k, dtype=dtype), gram(randn(n, s, k)).to(dtype)
        stored = X.mT.contiguous()
        options = dict(alpha=0.5, beta=-2.0, C=C)
        plain = product(X, X.mT, config=plain_config(VARIANTS[name]), **options)
        for A, B in [(X, X.mT), (X, stored), (stored.mT, stored)]:
            assert torch.equal(product(A, B, config=VARIANTS[name], **options), plain)
        assert_product(plain, X, X.mT, **options, terms=4.0)


@pytest.mark.kernels_ci
def test_order_of_tiles_batches_and_wide_offsets_change_no_bit(monkeypatch):
    X, C = randn(3, 64, 32, dtype=FP16), gram(randn(3, 64, 32)).half()
    plain = product(X, X.mT, beta=0.5, C=C, config=SMALL)
    for group in (1, 3):
        config = replace(SMALL, group=group)
        assert torch.equal(product(X, X.mT, beta=0.5, C=C, config=config), plain)
    alone = [product(x, x.mT, beta=0.5, C=c, config=SMALL) for x, c in zip(X.split(1), C.split(1))]
    assert torch.equal(torch.cat(alone), plain)
    options = dict(alpha=0.25, beta=0.5, C=C, config=SMALL)  # prepared as the first
    assert torch.equal(product(X * 2, X.mT * 2, **options), plain)
    monkeypatch.setattr(symmetric, "INT32_MAX", 5)
    symmetric._prepared.clear()
    assert torch.equal(product(X, X.mT, beta=0.5, C=C, config=SMALL), plain)


def views(n, s, k, dtype=FP32):
    """The same sizes, stored in other ways."""
    return {
        "contiguous": randn(n, s, k, dtype=dtype),
        "transposed": randn(n, k, s, dtype=dtype).mT,
        "some rows": randn(n, s + 9, k, dtype=dtype)[:, 5 : 5 + s],
        "some columns": randn(n, s, k + 7, dtype=dtype)[..., 3 : 3 + k],
        "every second row": randn(n, 2 * s, k, dtype=dtype)[:, ::2],
        "every third column": randn(n, s, 3 * k, dtype=dtype)[..., ::3],
        "expanded batch": randn(1, s, k, dtype=dtype).expand(n, -1, -1),
        "expanded rows": randn(n, 1, k, dtype=dtype).expand(-1, s, -1),
        "batch last": randn(s, k, n, dtype=dtype).permute(2, 0, 1),
    }


@pytest.mark.kernels_ci
def test_only_what_lies_in_multiples_of_16_bytes_is_loaded_in_bulk(monkeypatch):
    seen = []
    described = symmetric._descriptor
    monkeypatch.setattr(symmetric, "_descriptor", lambda *args: seen.append(1) or described(*args))
    fitting = {"contiguous", "transposed", "some rows", "every second row"}
    others = {"no columns": randn(2, 16, 0, dtype=FP16)}
    others["further in"] = randn(1, 16, 24, dtype=FP16).mT[:, 4:]
    for name, A in {**views(2, 32, 48, FP16), **others}.items():
        product(A, A.mT, config=VARIANTS["in bulk"])
        assert len(seen) == (2 if name in fitting else 0), name
        seen.clear()


@pytest.mark.slow
@every_variant
@pytest.mark.parametrize("name", views(1, 1, 1))
def test_strides_of_the_inputs_do_not_matter(name, config):
    A = views(2, 24, 40)[name]
    expected = product(A.contiguous(), A.contiguous().mT, config=plain_config(config))
    for left, right in [(A, A.mT), (A.contiguous(), A.mT), (A, A.mT.contiguous())]:
        assert torch.equal(product(left, right, config=config), expected)


@pytest.mark.parametrize("name", [name for name in views(1, 1, 1) if name != "expanded rows"])
def test_strides_of_c_and_out_do_not_matter(name):
    X, stored = randn(2, 24, 40), views(2, 24, 24)[name]
    C = (stored.triu() + stored.triu(1).mT).contiguous()
    plain = product(X, X.mT, beta=0.5, C=C, config=SMALL)
    if name != "expanded batch":
        out = views(2, 24, 24)[name]
        symmetric_product(X, X.mT, 1.0, 0.5, stored.copy_(C), out, SMALL)
        assert torch.equal(out, plain)
    else:
        stored = C[:1].expand(2, -1, -1)
        assert torch.equal(product(X, X.mT, beta=0.5, C=stored, config=SMALL), plain)


# -- memory that is shared, and what is read -------------------------------------------------------


@every_variant
def test_nothing_around_the_output_is_written(config):
    X, around = randn(2, 21, 40), torch.full((4, 25, 30), 7.0, device=DEVICE)
    before = around.clone()
    out = around[1:3, 2:23, 4:25]
    symmetric_product(X, X.mT, 1.0, 0.0, out, out, config)
    assert torch.equal(out, product(X, X.mT, config=plain_config(config)))
    out.copy_(before[1:3, 2:23, 4:25])
    assert torch.equal(around, before)


@pytest.mark.slow
@every_variant
@pytest.mark.parametrize("s", [50, 64])
def test_c_may_be_the_output_itself(s, config):
    X, C = randn(2, s, 16), gram(randn(2, s, 16))
    expected = product(X, X.mT, alpha=0.5, beta=-2.0, C=C, config=plain_config(config))
    for out in (C.clone(), C.mT.clone().mT):
        symmetric_product(X, X.mT, 0.5, -2.0, out, out, config)
        assert torch.equal(out, expected)  # a tile computed twice would have added C twice


@every_variant
def test_only_the_upper_triangle_of_c_is_used(config):
    X, C = randn(2, 40, 24), gram(randn(2, 40, 24))
    noise = C + randn(2, 40, 40, seed=1).tril(-1)
    before = [(tensor, tensor.clone(), tensor._version) for tensor in (X, noise)]
    out = product(X, X.mT, beta=1.0, C=noise, config=config)
    assert torch.equal(out, product(X, X.mT, beta=1.0, C=C, config=plain_config(config)))
    for tensor, value, version in before:
        assert torch.equal(tensor, value) and tensor._version == version


@pytest.mark.kernels_ci
def test_where_beta_is_zero_c_is_not_read():
    X, C = randn(3, 40, 24), torch.full((3, 40, 40), math.nan, device=DEVICE)
    expected = product(X, X.mT, config=SMALL)
    assert torch.equal(product(X, X.mT, beta=0.0, C=C, config=SMALL), expected)
    assert product(X, X.mT, beta=1.0, C=C, config=SMALL).isnan().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter copies all 5 GB of it")
def test_a_matrix_may_span_more_than_32_bits_of_offsets():
    rows = torch.empty(40 * 2**26, dtype=FP16, device=DEVICE)
    X = rows.as_strided((1, 40, 16), (1, 2**26, 1)).copy_(randn(1, 40, 16))
    expected = product(X.contiguous(), X.contiguous().mT, config=SMALL)
    assert torch.equal(product(X, X.mT, config=SMALL), expected)


# -- numbers of tiles ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first", "side"])
def number_tiles(first, rows_ptr, cols_ptr, side, GROUP: tl.constexpr, COUNT: tl.constexpr):
    numbers = first + tl.arange(0, COUNT).to(tl.int64)
    rows, cols = tile_at(numbers, side, GROUP)
    tl.store(rows_ptr + tl.arange(0, COUNT), rows)
    tl.store(cols_ptr + tl.arange(0, COUNT), cols)


tile_at = symmetric._tile_at


@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_tile_on_and_above_the_diagonal_has_one_number(group):
    for side in (1, 2, 7, 8, 17):
        count = side * (side + 1) // 2
        size = triton.next_power_of_2(count)
        rows, cols = torch.empty(2, size, dtype=torch.int64, device=DEVICE)
        number_tiles[(1,)](0, rows, cols, side, GROUP=group, COUNT=size)
        found = set(zip(rows[:count].tolist(), cols[:count].tolist()))
        assert found == {(row, col) for col in range(side) for row in range(col + 1)}


def test_numbers_of_tiles_are_exact_where_floats_are_not():
    # At 2³¹ tiles, neighbours of fp32 are 128 apart.
    rows, cols = torch.empty(2, 8, dtype=torch.int64, device=DEVICE)
    for col in (4095, 5793, 8191, 16384, 32767, 46340, 46341, 65534):
        start = col * (col + 1) // 2
        number_tiles[(1,)](start - 4, rows, cols, 65535, GROUP=1, COUNT=8)
        expected = [(col - 4 + i, col - 1) for i in range(4)] + [(i, col) for i in range(4)]
        assert list(zip(rows.tolist(), cols.tolist())) == expected


# -- configurations --------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("architecture, backend, processors", [
    ("sm_80", "cuda", 108), ("sm_90", "cuda", 132), ("sm_100", "cuda", 148), ("sm_75", "cuda", 40),
    ("gfx942", "hip", 304), ("gfx1100", "hip", 96), ("xpu", "xpu", 64),
    ("interpreter", "interpreter", 4),
])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_heuristic_has_a_rule_for_every_size(dtype, architecture, backend, processors):
    target = CompileTarget("unknown", architecture, backend, processors)
    possible = {rule.config for rule in launching.rules_of(dtype, architecture, backend)}
    sides = (1, 17, 128, 512, 4096, 4112, 65536)
    sizes = itertools.product(sides, (1, 4096), (1, 128), (False, True))
    assert {choose(dtype, *size, target) for size in sizes} == possible
    sides_of_tiles = {side for config in possible for side in (config.block, config.block_k)}
    assert sides_of_tiles <= {16, 32, 64, 128}  # as Triton's tiles have to be


@pytest.mark.parametrize("s, batch, aligned, block", [
    (1024, 1, True, 64), (4096, 1, True, 128), (1024, 8, True, 128), (128, 999, True, 64),
    (4096, 1, False, 64), (192, 50, True, 128), (191, 999, True, 64), (512, 1, True, 64),
])  # fmt: skip
def test_large_tiles_are_for_many_of_them(s, batch, aligned, block):
    assert choose(FP16, s, s, batch, aligned, H100).block == block


def test_the_nearest_measurement_comes_before_the_heuristic(monkeypatch):
    keys = [
        *(("float16", 1024, 1024, 1), ("float16", 4096, 4096, 1), ("float16", 768, 2048, 128)),
        *(("float32", 1024, 1024, 1), ("bfloat16", 1024, 1024, 1)),
    ]
    measured = {key: replace(SMALL, group=n) for n, key in enumerate(keys, 1)}
    monkeypatch.setattr(launching, "MEASURED", {"chip": measured})
    target = CompileTarget("chip", "sm_90", "cuda", 132)
    for dtype, *size, group in [
        *((FP16, 1000, 1000, 1, 1), (FP16, 8192, 8192, 1, 2), (FP16, 900, 1024, 64, 3)),
        *((FP16, 1, 1, 1, 1), (FP32, 4096, 4096, 1, 4), (BF16, 1024, 1024, 1, 5)),
        (BF16, 4096, 4096, 1, 2),
    ]:
        assert choose(dtype, *size, True, target).group == group
    assert choose(FP16, 1000, 1000, 1, False, target) != measured[keys[0]]


def test_the_tuner_has_a_dry_run():
    tune = Path(__file__).parent.parent / "benchmarks" / "tune.py"
    if not tune.exists():
        pytest.skip("benchmarks/tune.py is not here")
    command = [sys.executable, tune, "--dry-run", "--dtypes", "float16"]
    assert "nothing was timed" in subprocess.check_output(command, text=True)
