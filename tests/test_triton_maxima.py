"""The kernel of `max_qk_logits`: float64's numbers, as blocks have them, in one launch.

Runs on an accelerator where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from attention_inputs import CASES, KINDS, attend, documents, inputs_of, maxima_of, per_head
from counters import Operations
from kernel import optimizer
from marks import one_dtype_is_quick
from ranks import on_ranks

pytest.importorskip("triton")
kernels = importlib.import_module(f"{optimizer.__name__}.triton_kernels.logit_maxima")
max_qk_logits = optimizer.max_qk_logits

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
# The interpreter's own, of numpy.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def launches(monkeypatch, one_thread) -> list[int]:
    """The number of programs of every launch; kernels are used on any device."""
    torch.manual_seed(0)
    found: list[int] = []
    kernel = kernels._maxima_kernel

    class Spied:
        def __getitem__(self, grid):
            found.extend(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "_maxima_kernel", Spied())
    monkeypatch.setattr(optimizer.triton_kernels, "DEVICE_TYPES", ("cpu", "cuda", "xpu"))
    return found


def on_device(value):
    if isinstance(value, tuple):
        return tuple(map(on_device, value))
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def assert_equal_to_reference(inputs, found=None, **options):
    if found is None:
        given = {name: on_device(value) for name, value in {**inputs, **options}.items()}
        found = max_qk_logits(**given)
    expected = maxima_of(**inputs, **options)
    # What 16-bit inputs hold is exact, so that roundings are those of sums in fp32.
    torch.testing.assert_close(found.double().cpu(), expected, rtol=3e-6, atol=3e-6, equal_nan=True)


SLOW = ("lengths", "widths")


@one_dtype_is_quick
@pytest.mark.parametrize(
    "rows", [pytest.param(r, marks=[pytest.mark.slow] * (r in SLOW)) for r in CASES]
)
def test_the_kernel_gives_the_references_numbers(rows, dtype, launches):
    cases = list(CASES[rows](dtype))
    for inputs, options in cases:
        assert_equal_to_reference(inputs, **options)
    empty = sum(not (i["q"].numel() and i["k"].numel()) for i, _ in cases)
    assert len(launches) == len(cases) - empty


@pytest.mark.slow
@pytest.mark.parametrize(("Tq", "Tk"), [(13, 300), (300, 13), (129, 257), (256, 128)])
def test_lengths_need_not_be_multiples_of_tiles(Tq, Tk):
    inputs = inputs_of("MLA", torch.bfloat16, B=1, Tq=Tq, Tk=Tk, D=70, R=20)
    ids = (documents(1, Tq), documents(1, Tk)[0].to(torch.uint8))
    for causal in (True, False):
        assert_equal_to_reference(inputs, causal=causal, document_ids=ids)


# Running maxima


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_maxima_of_either_sign_are_raised_and_never_lowered(sign):
    q, k = (tensor.abs() for tensor in inputs_of().values())
    q = sign * q
    expected = maxima_of(q, k)
    for held in (-math.inf, -1e30, -0.0, 0.0, 1e30, math.inf):
        out = torch.full((6,), held, device=DEVICE)
        found = max_qk_logits(on_device(q), on_device(k), out=out)
        assert found is out
        torch.testing.assert_close(
            found.double().cpu(), expected.clamp_min(held), rtol=3e-6, atol=3e-6
        )
    held = torch.full((6,), math.nan, device=DEVICE)
    assert max_qk_logits(on_device(q), on_device(k), out=held).isnan().all()


def test_nan_of_either_sign_stays_in_running_maxima():
    q, k = (torch.randn(1, 3, 5, 16, device=DEVICE) for _ in range(2))
    out = torch.tensor([math.nan, -math.nan, -1e30], device=DEVICE)
    out.view(torch.int32)[1] |= -(2**31)
    max_qk_logits(q, k, 0.25, out=out)
    assert out.isnan().tolist() == [True, True, False] and out[2] > -1e30


# Launches


def test_running_maxima_take_one_launch_and_nothing_else(monkeypatch):
    launched = []

    class Counted:  # the interpreter has operations of its own
        def __getitem__(self, grid):
            return lambda *args, BLOCK, **options: launched.append((grid, BLOCK))

    monkeypatch.setattr(kernels, "_maxima_kernel", Counted())
    inputs = {name: on_device(value) for name, value in inputs_of("MLA", Tq=300).items()}
    ids, bias = on_device(documents(2, 300)), torch.zeros(300, device=DEVICE)
    out = torch.full((4,), -math.inf, device=DEVICE)
    with Operations() as mode:
        max_qk_logits(**inputs, document_ids=ids, attn_mask=bias, out=out)
    ((grid, block),) = launched
    assert grid == (2 * 4 * -(-300 // block),)
    assert set(mode.names) <= {
        *("view.default", "view.dtype", "detach.default", "promote_types.default")
    }


def test_an_attention_call_that_is_recorded_takes_one_launch(launches):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            q, k = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.wq, self.wk))
            self.largest = maxima_of(q.detach().cpu(), k.detach().cpu())
            return x + F.scaled_dot_product_attention(q, k, k, is_causal=True).mean()

    model = nn.Sequential(Attention(), Attention()).to(DEVICE)
    recorder = optimizer.QKLogitRecorder(model)
    model(torch.randn(2, 37, 32, device=DEVICE)).sum().backward()
    assert len(launches) == 2
    for found, attention in zip(recorder.take().values(), model):
        torch.testing.assert_close(found.double().cpu(), attention.largest, rtol=3e-6, atol=3e-6)


NOT_TAKEN = [{"mask_mod": per_head}, {"scale": -0.5}, {"scale": 0.0}, {"block_size": 16}]
NOT_TAKEN.append({"attn_mask": torch.zeros(37, dtype=torch.float64)})


@pytest.mark.parametrize("options", NOT_TAKEN, ids=lambda options: next(iter(options)))
def test_what_the_kernel_does_not_take_is_done_in_blocks(options, launches):
    inputs = inputs_of()
    given = {name: on_device(value) for name, value in {**inputs, **options}.items()}
    found = max_qk_logits(**given)
    assert_equal_to_reference(
        inputs, found, **{k: options[k] for k in options.keys() - {"block_size"}}
    )
    assert not launches


def test_fp64_and_rows_far_apart_are_done_in_blocks(launches):
    wide = torch.empty(2, 4, 2**24, dtype=torch.bfloat16)  # of which few pages are touched
    q = wide[:, None, :, :8].copy_(torch.randn(2, 1, 4, 8))
    inputs = {"q": q, "k": q}
    if DEVICE == "cpu":
        assert_equal_to_reference(inputs)
    assert_equal_to_reference(inputs_of(dtype=torch.float64))
    assert not launches


def test_fake_tensors_launch_nothing(launches):
    with FakeTensorMode():
        found = max_qk_logits(torch.empty(2, 4, 70, 8), torch.empty(2, 4, 70, 8))
    assert found.shape == (4,) and not launches


def test_a_compiled_graph_launches_the_kernel(launches):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k = map(on_device, inputs_of(Tq=61).values())
    found, loss = compiled(q.requires_grad_(), k)
    loss.backward()
    assert_equal_to_reference({"q": 2 * q.detach().cpu(), "k": k.cpu()}, found)
    assert len(launches) == 1


@pytest.mark.skipif(str(DEVICE) != "cpu", reason="ranks are on the CPU")
@on_ranks(1)
def test_without_a_c_compiler_a_forward_is_recorded_in_blocks() -> None:
    class Failing:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler.\nmore")

    kernels._maxima_kernel = Failing()
    optimizer.triton_kernels.DEVICE_TYPES = ("cpu",)
    with pytest.warns(RuntimeWarning, match="C compiler") as caught:
        for _ in range(2):
            assert_equal_to_reference(inputs_of(KINDS[0], torch.float32))
    assert len(caught) == 1 and "more" not in str(caught[0].message)


def test_lazily_negated_inputs_and_those_of_functorch_are_done_in_blocks(launches):
    q, k = (torch.randn(1, 2, 5, 16, dtype=torch.complex64).to(DEVICE) for _ in range(2))
    negated = q.conj().imag
    assert negated.is_neg()
    expected = max_qk_logits(negated.resolve_neg(), k.imag, 0.25)
    assert len(launches) == 1
    assert torch.allclose(max_qk_logits(negated, k.imag, 0.25), expected)

    def loss(q):
        max_qk_logits(q, k.real.contiguous(), 0.25)
        return q.sum()

    torch.func.grad(loss)(q.real.contiguous())
    max_qk_logits(q.real.contiguous(), k.real.contiguous(), 0.25)  # nothing had failed
    assert len(launches) == 2
