"""`max_qk_logits`: the maxima of the whole score matrix in float64, of whatever is masked."""

from __future__ import annotations

import copy
import inspect
import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attention_inputs import CASES, HEADS, KINDS, attend, documents, inputs_of, maxima_of, per_head
from comparisons import assert_equal
from counters import Operations, RefusesToRead, count
from kernel import optimizer
from lone_rank import lone_rank

max_qk_logits = optimizer.max_qk_logits
logits = inspect.getmodule(max_qk_logits)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


def assert_equal_to_reference(inputs, found=None, **options):
    found = max_qk_logits(**inputs, **options) if found is None else found
    dtype = inputs["q"].dtype
    options.pop("block_size", None)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    expected = maxima_of(**inputs, **options)
    # What 16-bit inputs hold is exact, so that roundings are those of sums in fp32.
    rtol = 1e-12 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=rtol, equal_nan=True)


# The reference's numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", CASES)
def test_blocks_give_the_references_numbers(rows, dtype):
    for inputs, options in CASES[rows](dtype):
        for block_size in (None, 7, 16):
            assert_equal_to_reference(inputs, **options, block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16, 36, 37, 38, 1000])
@pytest.mark.parametrize("kind", ["GQA", "MLA"])
def test_blocks_of_any_size_give_the_same(kind, block_size):
    inputs = inputs_of(kind, Tq=19 if block_size < 3 else 37)
    for causal in (True, False):
        assert_equal_to_reference(inputs, causal=causal, block_size=block_size)


@pytest.mark.parametrize("numel", [1, 500, 2000, 10000])
def test_batch_entries_and_heads_fall_into_blocks_of_any_number(monkeypatch, numel):
    monkeypatch.setitem(logits.BLOCK_NUMEL, "cpu", numel)
    for kind in KINDS:
        assert_equal_to_reference(inputs_of(kind, B=3), document_ids=documents(3, 37))


@pytest.mark.parametrize("scale", [0.3, 1, 0.0, -0.7])
def test_scales_of_either_sign(scale):
    inputs = inputs_of()
    assert_equal_to_reference(inputs, scale=scale, block_size=8)
    assert_equal_to_reference(inputs, scale=scale, document_ids=documents(2, 37))


def test_16_bit_products_are_not_rounded():
    inputs = inputs_of(dtype=torch.bfloat16, Tq=64, D=64)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal_to_reference(inputs)
        assert_equal_to_reference(inputs_of(Tq=64))


# Masks


def sliding(b, h, i, j):
    return (i - j).abs() <= 3


def per_entry(b, h, i, j):
    return (i + j) % 3 >= b


def none_at_all(b, h, i, j):
    return b < 0


TABLE = torch.rand(2, 6, 37, 37, generator=torch.Generator().manual_seed(0)) < 0.1
MASK_MODS = [sliding, per_head, per_entry, none_at_all, lambda b, h, i, j: TABLE[b, h, i, j]]


@pytest.mark.parametrize("mask_mod", MASK_MODS)
def test_mask_mods(mask_mod):
    for causal, block_size in itertools.product((True, False), (None, 1, 10)):
        inputs = inputs_of(Tq=11 if block_size == 1 else 37)
        options = {"causal": causal, "mask_mod": mask_mod, "block_size": block_size}
        assert_equal_to_reference(inputs, **options)


def test_masks_are_combined():
    options = {"document_ids": documents(2, 37), "mask_mod": per_head}
    mask = torch.rand(2, 6, 37, 37) < 0.7
    assert_equal_to_reference(inputs_of(), attn_mask=mask, **options, block_size=10)


# Running maxima


@pytest.mark.parametrize("compiled", [False, True])
def test_running_maxima_are_those_of_all_batches(compiled):
    torch._dynamo.reset()
    call = torch.compile(max_qk_logits, fullgraph=True, backend="aot_eager")
    call = call if compiled else max_qk_logits
    batches = [inputs_of(Tq=20) for _ in range(3)]
    out = torch.full((6,), -math.inf)
    for batch in batches:
        found = call(**batch, out=out, block_size=8)
        assert compiled or found is out
    torch.testing.assert_close(out, torch.stack([max_qk_logits(**b) for b in batches]).amax(0))
    held = torch.full((6,), 1e6)
    assert torch.equal(call(**batches[0], out=held), torch.full((6,), 1e6))


def test_inputs_stay_as_they_are_and_no_gradient_flows():
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs_of("MLA").items()}
    before = copy.deepcopy(inputs)
    for scale in (None, -1.0):
        assert not max_qk_logits(**inputs, scale=scale).requires_grad
    assert_equal(inputs, before)


# Costs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_grows_with_nothing(monkeypatch, dtype):
    monkeypatch.setitem(logits.BLOCK_NUMEL, "cpu", 1 << 12)
    monkeypatch.setitem(logits.BLOCK_SIDE, "cpu", 32)
    peaks = {}
    for B, heads, T in ((1, 4, 64), (1, 4, 256), (8, 4, 64), (1, 32, 64)):
        q = torch.randn(B, heads, T, 16).to(dtype)
        ids, mask = torch.zeros(T, dtype=torch.int64), torch.zeros(T, T)
        options = {"document_ids": ids, "attn_mask": mask, "mask_mod": sliding}
        peaks[B, heads, T] = count(lambda: max_qk_logits(q, q, **options)).peak_bytes  # noqa: B023
    assert max(peaks.values()) <= 2 * 4 * (1 << 12)
    assert max(peaks.values()) < 1.1 * min(peaks.values())


def test_blocks_above_the_diagonal_are_not_computed():
    inputs = inputs_of("MHA", Tq=64)
    with FlopCounterMode(display=False) as counter:
        max_qk_logits(**inputs, block_size=8)
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * (8 * 9 // 2) * 8 * 8


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_from_the_device(kind):
    inputs, out = inputs_of(kind), torch.zeros(HEADS.get(kind, (4, 4))[0])
    options = {"document_ids": documents(2, 37), "attn_mask": torch.zeros(37, 37)}
    with RefusesToRead():
        max_qk_logits(**inputs, **options, mask_mod=sliding, out=out, block_size=10)


@pytest.mark.skipif(torch.version.hip is not None, reason="for NVIDIA's devices")
def test_16_bit_products_on_cuda_are_asked_for_in_fp32():
    with FakeTensorMode():  # which makes no products, and slices nothing without CUDA
        q = torch.empty(2, 4, 70, 8, dtype=torch.bfloat16, device="cuda")
        with Operations() as counted:
            scores = logits._products(q, q.narrow(1, 0, 2))
    assert scores.shape == (2, 4, 70, 70) and scores.dtype == torch.float32
    assert "bmm.dtype" in counted.names and "_to_copy.default" not in counted.names


# Compiled

COMPILED = {
    "causal": {},
    "all pairs": {"causal": False},
    "masks": {"mask_mod": per_head, "attn_mask": torch.rand(61) < 0.8},
    "mask of all pairs": {"mask_mod": per_head, "causal": False},
    "documents": {"document_ids": torch.arange(61) // 9},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "numel", "backend"),  # one head or several to a block
    [
        *((case, 600, "aot_eager") for case in COMPILED),
        ("masks", 10000, "aot_eager"),
        ("documents", 600, "inductor"),
    ],
)
def test_a_compiled_call_is_one_graph_of_the_same_numbers(monkeypatch, case, numel, backend):
    monkeypatch.setitem(logits.BLOCK_NUMEL, "cpu", numel)
    monkeypatch.setitem(logits.BLOCK_SIDE, "cpu", 16)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    q, k = inputs_of(Tq=61).values()
    found, loss = compiled(q.requires_grad_(), k, **COMPILED[case])
    loss.backward()
    assert q.grad is not None
    assert_equal_to_reference({"q": 2 * q.detach(), "k": k}, found, **COMPILED[case])


@pytest.mark.slow
@pytest.mark.parametrize("mask_mod", [None, sliding])
def test_a_compiled_call_takes_any_length_and_one_graph_holds_one_block(monkeypatch, mask_mod):
    monkeypatch.setitem(logits.BLOCK_NUMEL, "cpu", 4000)
    monkeypatch.setitem(logits.BLOCK_SIDE, "cpu", 16)
    torch._dynamo.reset()
    sizes = []

    def backend(graph, _):
        sizes.append(
            sum(len(m.graph.nodes) for m in graph.modules() if isinstance(m, torch.fx.GraphModule))
        )
        return graph.forward

    compiled = torch.compile(max_qk_logits, fullgraph=True, backend=backend)
    for T in (61, 100, 333):
        inputs = inputs_of(Tq=T)
        for tensor in inputs.values():
            torch._dynamo.mark_dynamic(tensor, 2)
        found = compiled(**inputs, mask_mod=mask_mod)
        assert_equal_to_reference(inputs, found, mask_mod=mask_mod)
    assert len(sizes) == 1 and sizes[0] < 400


@pytest.mark.parametrize("compiled", [False, True])
def test_within_a_checkpoint(compiled):
    torch._dynamo.reset()

    def model(q, k):
        return checkpoint(lambda q, k: attend(q, k, block_size=16), q, k, use_reentrant=False)

    q, k = inputs_of().values()
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    found, loss = call(q.requires_grad_(), k)
    loss.backward()
    assert_equal_to_reference({"q": 2 * q.detach(), "k": k}, found)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autocast_does_not_apply_under_compile(backend):
    torch._dynamo.reset()
    inputs = inputs_of()

    def model(**inputs):
        with torch.autocast("cpu", torch.bfloat16):
            found = max_qk_logits(**inputs), max_qk_logits(**inputs, mask_mod=per_head)
            return *found, inputs["q"] @ inputs["q"].mT

    *found, product = torch.compile(model, fullgraph=True, backend=backend)(**inputs)
    assert product.dtype == torch.bfloat16
    assert_equal_to_reference(inputs, found[0])
    assert_equal_to_reference(inputs, found[1], mask_mod=per_head)


# Errors


ROPE = {"q_rope": torch.ones(2, 6, 37, 4), "k_rope": torch.ones(2, 1, 37, 4)}


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"q": torch.ones(4, 8)}, r"q must.*\(4, 8\)"),
        ({"k": torch.ones(2, 4, 37, 8)}, "q has 6 heads.* 4 heads of k"),
        ({"k": torch.ones(2, 2, 37, 9)}, r"k must.*\(2, 2, 37, 8\).*\(2, 2, 37, 9\)"),
        ({"k": torch.ones(3, 2, 37, 8)}, r"k must.*\(2, 2, 37, 8\).*\(3, 2, 37, 8\)"),
        ({"k": torch.ones(2, 2, 37, 8).half()}, r"k is torch\.float16.*q"),
        ({"q": torch.ones(2, 6, 37, 8).int()}, r"q must.*torch\.int32"),
        ({"k": torch.ones(2, 2, 37, 8, device="meta")}, "k is on meta.*q on cpu"),
        ({"k": [1.0]}, "k must.*list"),
        ({"q": torch.ones(2, 6, 37, 0), "k": torch.ones(2, 2, 37, 0)}, "q and k"),
        ({"q_rope": ROPE["q_rope"]}, "only q_rope"),
        ({**ROPE, "q_rope": torch.ones(2, 6, 36, 4)}, r"q_rope must.*\(2, 6, 36, 4\)"),
        ({**ROPE, "k_rope": torch.ones(2, 3, 37, 4)}, r"k_rope must.*\(2, 3, 37, 4\)"),
        ({"scale": math.inf}, "scale.*inf"),
        ({"scale": torch.tensor(1.0)}, "scale"),
        ({"block_size": 0}, "block_size.*0"),
        ({"block_size": 2.5}, r"block_size.*2\.5"),
        ({"document_ids": torch.ones(36).long()}, r"document_ids must.*\(37,\).*\(2, 37\)"),
        ({"document_ids": torch.ones(37)}, r"document_ids must.*torch\.float32"),
        ({"document_ids": (torch.ones(37).long(),) * 3}, "document_ids must.*3"),
        ({"k": torch.ones(2, 2, 9, 8), "document_ids": torch.ones(37).long()}, "document_ids"),
        ({"attn_mask": torch.ones(3, 1, 37, 37) > 0}, r"attn_mask of.*\(3, 1, 37, 37\)"),
        ({"attn_mask": torch.ones(37, 37).int()}, "attn_mask"),
        ({"mask_mod": lambda b, h, i, j: i - j}, r"mask_mod.*torch\.int64"),
        ({"mask_mod": lambda b, h, i, j: True}, "mask_mod.*bool"),
        ({"out": torch.ones(5)}, r"out must.*\(6,\) of torch\.float32.*\(5,\)"),
        ({"out": torch.ones(6).double()}, r"out must.*torch\.float64"),
    ],
)
def test_errors_name_the_argument_and_what_was_found(changed, match):
    with pytest.raises(ValueError, match=match):
        max_qk_logits(**{**inputs_of(), **changed})


def test_dtensors_are_refused():
    q, k = inputs_of().values()
    with lone_rank(0, 1):
        sharded = DTensor.from_local(q, init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(ValueError, match="q is a DTensor"):
            max_qk_logits(sharded, k)
