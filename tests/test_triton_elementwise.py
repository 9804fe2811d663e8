"""Kernels of element-wise steps: the formulas in float64, any layout, and steps like torch's."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from kernel import optimizer
from layouts import EXACT, Group, Weight, step_placed, whole
from ranks import on_ranks

pytest.importorskip("triton")
triton_kernels = optimizer.triton_kernels
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


def use_kernels(patch: pytest.MonkeyPatch) -> None:
    """Also on CPUs, where they are interpreted."""
    patch.setattr(triton_kernels, "DEVICE_TYPES", ("cpu", *triton_kernels.DEVICE_TYPES))


@pytest.fixture(autouse=True)
def kernels_are_used(monkeypatch):
    use_kernels(monkeypatch)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The name of the kernel of each launch from now on."""
    names: list[str] = []
    launch = elementwise.launching.launch

    def noted(kernel, *arguments, **options):
        names.append(kernel.__name__)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(elementwise.launching, "launch", noted)
    return names


# -- tensors in all layouts ------------------------------------------------------------------------

GUARD = 7.0
LAYOUTS: dict[str, Callable] = {  # a tensor of that shape within a larger one
    "contiguous": lambda shape, new: new(shape),
    "offset": lambda shape, new: new((math.prod(shape) + 5,))[3:-2].view(shape),
    "rows": lambda shape, new: new((*shape[:-2], shape[-2] + 3, shape[-1]))[..., 1:-2, :],
    "columns": lambda shape, new: new((*shape[:-1], shape[-1] + 3))[..., 1:-2],
    "every other": lambda shape, new: new((*shape[:-1], 2 * shape[-1]))[..., ::2],
    "transposed": lambda shape, new: new((*shape[:-2], shape[-1], shape[-2])).mT,
    "reversed": lambda shape, new: new(shape[::-1]).permute(*range(len(shape))[::-1]),
}
SHAPES = [(1, 1), (1, 40), (40, 1), (3, 700), (65, 33), (4, 9, 20)]
DEEP = (2, 3, 4, 3, 5)  # of more dimensions than kernels take
PLAIN = ("contiguous",) * 3


class Placed:
    """Random numbers in a layout, with guards around them."""

    def __init__(self, shape, dtype=FP32, layout="contiguous"):
        def new(of_shape):
            self.storage = torch.full(of_shape, GUARD, dtype=dtype).to(DEVICE)
            return self.storage

        self.tensor = LAYOUTS[layout](tuple(shape), new)
        self.tensor.copy_(torch.randn(shape))
        self.before = self.tensor.to(FP64, copy=True)
        self.storage_before = self.storage.clone()

    def assert_untouched(self) -> None:
        assert torch.equal(self.storage, self.storage_before)

    def assert_rounded(self, expected: torch.Tensor, size: torch.Tensor) -> None:
        """``size``: magnitudes that the arithmetic has rounded. Nothing around was written."""
        slack = 8 * (ULP[FP64] if self.tensor.dtype == FP64 else ULP[FP32])
        error = (self.tensor.double() - expected).abs()
        assert (error <= ULP[self.tensor.dtype] * expected.abs() + slack * size + 1e-45).all()
        self.tensor.fill_(GUARD)
        assert (self.storage == GUARD).all()


def placed_alike(shape, dtypes, layouts):
    return [Placed(shape, dtype, layout) for dtype, layout in zip(dtypes, layouts)]


def check_momentum(shape, dtypes, layouts=PLAIN, nesterov=True, weight=1.0, outputs=True):
    B, G, out = placed_alike(shape, dtypes, layouts)
    written = [out.tensor] if outputs else None
    hyper = {"momentum": 0.95, "weight": weight, "nesterov": nesterov}
    elementwise.update_momentum([B.tensor], [G.tensor], written, **hyper)
    grad, stored = weight * G.before, B.tensor.double()  # as it was rounded
    size = 2 * (0.95 * B.before.abs() + grad.abs())
    if outputs:
        out.assert_rounded(grad + 0.95 * stored if nesterov else stored, size)
    B.assert_rounded(0.95 * B.before + grad, size)
    G.assert_untouched()


def check_weights(shape, dtypes, layouts=PLAIN, cautious=False, factor=None, on_device=False):
    W, U = placed_alike(shape, dtypes, layouts)
    numbers = 0.05, 0.3
    if on_device:
        numbers = torch.tensor(numbers, dtype=FP64 if FP64 in dtypes else FP32).to(DEVICE)
    elementwise.update_weights(
        [W.tensor],
        [U.tensor],
        rate=numbers[0],
        decay=numbers[1],
        cautious=cautious,
        factors=None if factor is None else [factor],
    )
    delta = 0.05 * U.before * (1.0 if factor is None else factor.double())
    decayed = torch.where(delta * W.before >= 0, W.before, 0.0) if cautious else W.before
    W.assert_rounded(W.before - (delta + 0.3 * decayed), W.before.abs() + delta.abs())
    U.assert_untouched()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [*SHAPES, DEEP], ids=str)
def test_momentum_and_weights_of_any_shape(shape):
    for nesterov in (True, False):
        check_momentum(shape, (FP32, FP32, FP32), nesterov=nesterov)
    check_momentum(shape, (FP32, FP32, FP32), outputs=False)
    check_weights(shape, (FP32, BF16))


@pytest.mark.parametrize("shape", [(17, 4096), (511, 513)], ids=str)
def test_momentum_of_more_than_a_tile(shape):
    check_momentum(shape, (FP32, BF16, BF16), ["contiguous", "columns", "contiguous"])


@pytest.mark.parametrize(
    "dtypes", itertools.product([FP32, BF16, FP64], [FP32, BF16], [FP16, FP64])
)
def test_momentum_of_any_dtypes(dtypes):
    check_momentum((5, 37), dtypes)
    check_momentum((5, 37), dtypes, nesterov=False, weight=-0.05)


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("dtypes", itertools.product([FP32, BF16, FP16, FP64], repeat=2))
def test_weights_of_any_dtypes(dtypes, cautious):
    for on_device in (False, True):
        check_weights((5, 37), dtypes, cautious=cautious, on_device=on_device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", range(3))
def test_momentum_and_weights_in_any_layout(layout, role):
    layouts = ["contiguous"] * 3
    layouts[role] = layout
    for shape in [(19, 33), (3, 5, 24), (2, 5, 3, 4), DEEP]:
        check_momentum(shape, (FP32, BF16, BF16), layouts)
        check_weights(shape, (BF16, BF16), layouts, cautious=True)


@pytest.mark.parametrize("of_factor", [(9, 1), (1, 40)], ids=["rows", "columns"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_factor_multiplies_rows_or_columns(of_factor, layout):
    factor = torch.rand(of_factor).to(DEVICE)
    check_weights((9, 40), (FP32, BF16), (layout, "contiguous"), True, factor)
    check_weights((3, 9, 40), (FP32, FP32), (layout, "contiguous"), False, factor)


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


# -- norms -----------------------------------------------------------------------------------------


def normalized(G, dtype=FP32, eps=0.0, eps_absolute=0.0, divided_by=None, out=None):
    """A batch over 1.01 of its norms and eps, times 32."""
    out = torch.full_like(G, GUARD, dtype=dtype) if out is None else out
    elementwise.normalize(G, out, 1.01, eps, eps_absolute, divided_by, 1e18, 32.0)
    return out


def expected_norms(G, eps=0.0, eps_absolute=0.0, divided_by=None):
    """In float64, from the formula."""
    G = G.double()
    largest = G.abs().amax((1, 2), True)
    largest = torch.where(largest == 0, 1.0, largest)
    absolute = eps_absolute / (1.0 if divided_by is None else divided_by) / largest
    size = 1.01 * (G / largest).norm(dim=(1, 2), keepdim=True) + eps + absolute
    return 32 * (G / largest) / torch.where(size == 0, 1.0, size)


@pytest.mark.parametrize("partials", [1024, 4])
def test_matrices_are_normalized_each_by_itself_at_any_scale_and_in_any_layout(
    partials, monkeypatch
):
    monkeypatch.setattr(elementwise, "_PARTIALS", partials)  # tiles of a matrix, combined at once
    scales = [1.0, 0.0, 1e-38, 1e-30, 1e30, 1e37]
    G = torch.randn(6, 70, 150, device=DEVICE)
    G[0, 0, 0] = G[3, -1, -1] = 9.0
    G /= G.abs().amax((1, 2), True)
    G *= torch.tensor(scales, device=DEVICE).view(6, 1, 1)
    for X in (G, G[:1].half(), G.mT, G[:, ::2, 5:]):
        expected = expected_norms(X)
        torch.testing.assert_close(normalized(X).double(), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_matrix_with_inf_or_nan_becomes_nan(bad):
    G = torch.randn(2, 70, 60, device=DEVICE)
    G[1, 69, 3] = bad
    out = normalized(G)
    assert torch.equal(out[0], normalized(G[:1])[0]) and out[1, 69, 3].isnan()
    G[1, 0, 0] = INF  # beside a NaN
    assert normalized(G)[1, 69, 3].isnan()


@pytest.mark.parametrize(
    "eps", [(1e-7,), (1e-7, 1e-3), (1e-7, 1e-3, [1.0, 3.0, 1.0, 0.5]), (0.0, 1.0)], ids=str
)
@pytest.mark.parametrize("out_dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_a_batch_is_normalized_by_its_norms_and_eps(dtype, out_dtype, eps):
    def column(numbers):
        return torch.tensor(numbers, device=DEVICE, dtype=FP32).view(4, 1, 1)

    G = (torch.randn(4, 24, 40, device=DEVICE) * column([1.0, 1e-4, 0.0, 37.0])).to(dtype)
    eps = (*eps[:2], *map(column, eps[2:]))
    expected, found = expected_norms(G, *eps), normalized(G, out_dtype, *eps)
    rtol = max(1e-5, 2 * ULP[out_dtype])
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-7)
    if dtype == out_dtype:
        assert torch.equal(normalized(G, out_dtype, *eps, out=G), found)


# -- launches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_tensors_of_other_lengths_share_launches_of_32_and_others_have_their_own(dtype, launched):
    sizes = [(3, 16 * (1 + n % 5)) for n in range(40)] + [(0, 16), (70, 64)]
    W = [torch.randn(size).to(DEVICE, dtype) for size in sizes]
    W += [torch.randn(20, 30).to(DEVICE, dtype).t(), torch.randn(3, 5).to(DEVICE, dtype)]
    W += [torch.randn(3, 16).to(DEVICE, BF16)]
    U = [torch.empty_like(weight, dtype=FP32).normal_() for weight in W]
    W += [torch.randn(70, 128).to(DEVICE, dtype)[:, :n] for n in (64, 48)]
    U += [torch.randn(70, 128).to(DEVICE)[:, :n] for n in (64, 48)]
    before = [weight.clone() for weight in W]
    elementwise.update_weights(W, U, rate=1.0, decay=0.0, cautious=False)
    for weight, old, update in zip(W, before, U):
        torch.testing.assert_close(weight, (old - update).to(weight.dtype))
    # 41 in rows of multiples of 16 elements; the transposed one, the odd one, that in bf16; and
    # rows of two lengths at one distance.
    assert len(launched) == 2 + 3 + 1


@pytest.mark.parametrize("count", [1, 3, pytest.param(50, marks=pytest.mark.slow)])
def test_tensors_are_copied_as_by_torch(count, launched):
    sources = [torch.randn(2, 3, 8).to(DEVICE, BF16) for _ in range(count)]
    sources[0][0, 0, 0] = INF
    target = torch.full((2, count, 3, 8), GUARD, dtype=BF16, device=DEVICE)
    elementwise.copy(sources, target.unbind(1))
    assert torch.equal(target, torch.stack(sources, 1)) and len(launched) == -(-count // 32)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("by", ["residuals", "random bits"])
def test_kernels_round_weights_as_torchs_operations_do_to_the_bit(by):
    """In layouts of up to four dimensions; of numbers that arithmetic in fp32 does not round."""
    rounding, updates_by_kernel = optimizer.weight_rounding, elementwise.update_weights
    shapes = [(7, 40), (3, 4, 5, 6), (3, 4, 5, 6), (1,), (2, 0)]
    views: list[Callable] = [lambda t: t] * 5
    views[2] = lambda t: t[..., ::2].permute(2, 0, 3, 1)
    all_weights = [torch.randn(shape).to(DEVICE, BF16) for shape in shapes]
    residuals = [torch.randint(-16, 16, s, dtype=torch.int16).to(DEVICE) << 11 for s in shapes]
    weights, rounded_by = ([v(t) for v, t in zip(views, of)] for of in (all_weights, residuals))
    if by == "random bits":
        rounded_by = [
            rounding.RandomBits(rounding.random_key(2, str(n)), view(r.to("meta")))
            for n, (view, r) in enumerate(zip(views, residuals))
        ]
    updates = [torch.randint(-9, 9, w.shape).to(DEVICE, FP32) / 2**12 for w in weights]
    updates[1].view(-1)[3:5] = torch.tensor([NAN, INF])
    wide = rounding.widen(weights, rounded_by)
    exact = [w - (u / 2 + w / 2 * (u * w >= 0)) for w, u in zip(wide, updates)]
    expected = [w.clone() for w in weights], [r.clone() for r in residuals]
    rests = [v(r) for v, r in zip(views, expected[1])] if by == "residuals" else rounded_by
    rounding.round_into(exact, expected[0], rests)
    updates_by_kernel(weights, updates, rate=0.5, decay=0.5, cautious=True, rounded_by=rounded_by)
    for found, of in zip((weights, residuals), expected):
        for a, b in zip(found, of):
            assert torch.equal(a.isnan(), b.isnan())  # of which there are many, by their bits
            assert torch.equal(*(t.masked_fill(t.isnan(), 0).view(torch.int16) for t in (a, b)))


# -- steps -----------------------------------------------------------------------------------------


def weights_after(kernels: bool, dtype: torch.dtype, options: dict) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 16), (16, 24), (3, 8, 12), (8, 4, 3, 3)]
    params = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    params[0] = params[0].t().contiguous().t()
    params[3] = params[3].contiguous(memory_format=torch.channels_last)
    params = [nn.Parameter(p) for p in params]
    group = {"params": params, "names": ["a", "b", "experts", "conv"], "expert_keys": ["experts"]}
    options = {"lr": 0.05, "ns_dtype": torch.promote_types(dtype, FP32), **options}
    optim = optimizer.Muon(
        [{**group, "use_muon": True, "flatten": True}], triton=kernels, **options
    )
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        grads = [p.grad for p in params]
        before = [grad.clone() for grad in grads]
        optim.step()
        for p, grad, same in zip(params, grads, before):
            assert torch.equal(grad, same)
            assert p.grad is (grad if optim.defaults["capturable"] else None)
    return [p.detach().double() for p in params]


CAPTURED = {"lr": torch.tensor(0.05, device=DEVICE), "capturable": True, "cautious": True}


@pytest.mark.parametrize("options, dtype, bound", [
    ({}, FP32, 1e-5), ({"momentum_style": "ema", "nesterov": False, "maximize": True}, FP32, 1e-5),
    ({"momentum": 0.0, "weight_decay": 0.0}, FP32, 1e-5),
    ({"cautious": True, "decay_lr": "adjusted", "weight_decay": 0.5}, FP32, 1e-5),
    ({"beta2": 0.9, "lr": torch.tensor(0.05), "split": 4}, FP32, 1e-5), (CAPTURED, FP32, 1e-5),
    ({"momentum_dtype": BF16, "chunk_size": 1}, FP32, 2e-2), ({}, BF16, 0.06), ({}, FP16, 0.01),
    ({"beta2": 0.9, "cautious": True}, FP64, 1e-6), ({"beta2": 0.9, "cautious": True}, BF16, 0.06),
], ids=str)  # fmt: skip
def test_a_step_by_kernels_is_the_step_by_torch(options, dtype, bound):
    pairs = zip(weights_after(True, dtype, options), weights_after(False, dtype, options))
    for found, expected in pairs:
        assert (found - expected).norm() <= bound * expected.norm()


SHARDED = [Weight((8, 12), (2,), (0,)), Weight((12, 8), (2,), (1,)), Weight((3, 5), (2,), (0,))]
EXPERTS = [Weight((4, 8, 12), (2,), (2,)), Weight((3, 12, 8), (2,), (0,))]


@pytest.mark.skipif(str(DEVICE) != "cpu", reason="gloo ranks need the interpreter")
@pytest.mark.slow
@on_ranks(2)
def test_sharded_steps_by_kernels_have_the_bits_of_whole_ones() -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_kernels(patch)
        for options in ({}, {"beta2": 0.9, "cautious": True}):
            how, groups = {**EXACT, **options}, [Group(SHARDED), Group(EXPERTS)]
            step_placed([("rows, columns and experts", groups, how)])


# -- captured steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("averages", [False, True], ids=["FSDP2", "ZeRO-2"])
@on_ranks(2)
def test_a_step_with_traffic_is_not_capturable(averages: bool) -> None:
    model = nn.Linear(8, 8, bias=False)
    options = {"process_group": dist.group.WORLD, "grad_reduce": "mean"} if averages else {}
    if not averages:
        fully_shard(model)
    groups = [{"params": [model.weight], "use_muon": True}]
    optim = optimizer.Muon(groups, capturable=True, **options)
    model.weight.grad = torch.ones_like(model.weight)
    before = whole(model.weight).clone()
    with pytest.raises(ValueError, match="grad_reduce" if averages else "capturable=False"):
        optim.step()
    assert not optim.state and torch.equal(whole(model.weight), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA graphs")
@pytest.mark.parametrize("options", [{}, {"beta2": 0.9, "cautious": True}])
def test_a_replayed_step_is_the_eager_one(options):
    initial, lr = [torch.randn(64, 48), torch.randn(48, 96)], torch.tensor(0.05, device="cuda")
    ours, twins = ([nn.Parameter(t.cuda()) for t in initial] for _ in range(2))
    captured, eager = (
        optimizer.Muon([{"params": params, "use_muon": True}], lr=lr, capturable=True, **options)
        for params in (ours, twins)
    )

    def new_gradients() -> None:
        for p, q in zip(ours, twins):
            G = torch.randn(p.shape, device="cuda")
            p.grad = G.clone() if p.grad is None else p.grad.copy_(G)
            q.grad = G

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
