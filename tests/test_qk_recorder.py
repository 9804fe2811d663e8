"""Which logits a recorder sees: against maxima of the scores themselves, in float64."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from kernel import optimizer
from ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

Recorder = optimizer.QKLogitRecorder

DIM, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8
NAMES = ["layers.0.attention", "layers.1.attention"]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def causal_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(HEAD_DIM)
    seen = torch.ones_like(scores, dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


class Attention(nn.Module):
    """Keeps what it attends with; ``attend`` and ``around`` are replaced by tests."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.attend: Callable[..., Tensor] = causal
        self.calls: list[tuple[Tensor, Tensor]] = []
        self.keeps = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        if self.keeps:
            self.calls.append((q.detach(), k.detach()))
        return self.wo(self.attend(q, k, v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.feed_forward = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(x + self.attention(x))


class Model(nn.Module):
    def __init__(self, around: Callable[..., Tensor] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.around(layer, x)
        return x

    @property
    def attentions(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def expected(self, mask: Any = "causal") -> dict[str, Tensor]:
        return {
            name: reference(attention.calls, mask)
            for name, attention in zip(NAMES, self.attentions)
        }


def tokens(seed: int = 0, length: int = 6) -> Tensor:
    return 3 * torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(seed))


def reference(calls: list[tuple[Tensor, Tensor]], mask: Any = "causal") -> Tensor:
    """Maxima over calls of q·k/sqrt(D) where the mask (broadcast to (B, H, Tq, Tk)) is True."""
    maxima = []
    for q, k in calls:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        if isinstance(mask, str):
            seen = seen.tril()
        elif mask is not None:
            seen = mask
        maxima.append(scores.masked_fill(~seen, -math.inf).amax((0, 2, 3)))
    return torch.stack(maxima).amax(0)


def assert_recorded(taken: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert taken.keys() == expected.keys()
    for name, maxima in taken.items():
        assert maxima.dtype == torch.float32 and not maxima.requires_grad
        torch.testing.assert_close(maxima.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_records_the_largest_causal_logit_of_each_head():
    model = Model()
    recorder = Recorder(model)
    model(tokens())
    assert recorder.names == NAMES
    assert recorder.forwards == dict.fromkeys(NAMES, 1)
    assert_recorded(recorder.take(), model.expected())


def test_microbatches_accumulate_and_take_starts_afresh():
    model = Model()
    recorder = Recorder(model)
    for seed in range(3):
        model(tokens(seed))
    assert recorder.forwards == dict.fromkeys(NAMES, 3)
    first = recorder.take()
    assert_recorded(first, model.expected())
    before = {name: maxima.clone() for name, maxima in first.items()}
    for maxima in recorder.take().values():
        assert maxima.shape == (HEADS,) and (maxima == -math.inf).all()
    for attention in model.attentions:
        attention.calls.clear()
    model(tokens(3) / 10)
    assert_recorded(recorder.take(), model.expected())
    for name, maxima in first.items():  # not written to later
        assert torch.equal(maxima, before[name])


def test_a_module_that_never_ran_has_nothing():
    assert Recorder(Model()).take() == dict.fromkeys(NAMES)


def test_evaluation_does_not_count():
    model = Model()
    recorder = Recorder(model)
    for guard in (torch.no_grad(), torch.inference_mode()):
        with guard:
            model(tokens())
    assert recorder.forwards == dict.fromkeys(NAMES, 0)
    assert recorder.take() == dict.fromkeys(NAMES)


def test_outputs_gradients_and_state_stay_the_same():
    model, twin = Model(), Model()
    keys = list(model.state_dict())
    with Recorder(model):
        for m in (model, twin):
            m(tokens()).square().sum().backward()
        assert torch.equal(model(tokens()), twin(tokens()))
        assert list(model.state_dict()) == keys
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p.grad, q.grad)


def test_the_hooks_and_torchs_functions_are_put_back():
    model = Model()
    before = (F.scaled_dot_product_attention, flex.flex_attention)
    with Recorder(model, NAMES[:1]) as recorder, Recorder(model, NAMES[1:]) as other:
        model(tokens())
        assert (F.scaled_dot_product_attention, flex.flex_attention) == before
        assert {**recorder.forwards, **other.forwards} == dict.fromkeys(NAMES, 1)
        assert_recorded({**recorder.take(), **other.take()}, model.expected())
    model(tokens())
    recorder.observe(NAMES[0], *model.attentions[0].calls[0])
    assert recorder.forwards == {NAMES[0]: 0}
    assert hooks_of(model) == 0


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_recorder_goes_with_its_optimizer_and_takes_its_hooks_along():
    model = Model()
    groups = optimizer.muon.get_default_muon_param_groups(model)
    for _ in range(3):
        optim = optimizer.Muon(groups, clip_config={"head_dim": HEAD_DIM})
        optim.qk_recorder = Recorder(model)
        recorder = weakref.ref(optim.qk_recorder)
        model(tokens())
        assert optim.qk_recorder.forwards == dict.fromkeys(NAMES, 1)
        del optim
        gc.collect()
        assert recorder() is None
        assert hooks_of(model) == 0


def test_a_second_recorder_of_a_module_replaces_the_first():
    model = Model()
    first = Recorder(model)
    once = hooks_of(model)
    model(tokens())
    second = Recorder(model, ["attention"])
    assert hooks_of(model) == once
    model(tokens(1) / 10)
    assert first.forwards == second.forwards == dict.fromkeys(NAMES, 1)
    taken = [first.take(), second.take()]
    for maxima, call in zip(taken, (0, 1)):
        expected = {n: reference(a.calls[call : call + 1]) for n, a in zip(NAMES, model.attentions)}
        assert_recorded(maxima, expected)
    assert first.take() == dict.fromkeys(NAMES)


def test_an_optimizer_whose_recorder_was_replaced_warns_that_it_clips_nothing():
    model = Model()
    groups = optimizer.muon.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, clip_config={"head_dim": HEAD_DIM}, lr=0.0)
    optim.qk_recorder = Recorder(model)
    recorder = Recorder(model)
    with pytest.warns(UserWarning, match=r"nothing is clipped: .* replaced by another"):
        for _ in range(2):
            model(tokens()).sum().backward()
            optim.step()
    assert_recorded(recorder.take(), model.expected())


def test_no_activation_is_kept():
    model = Model()
    recorder = Recorder(model)
    model(tokens())
    kept = [weakref.ref(t) for attention in model.attentions for t in attention.calls.pop()]
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    assert recorder.take()


def selective(layer: nn.Module, x: Tensor) -> Tensor:
    """Saves all products of matrices, in their order."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = "mm" in str(op) or "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def late_stop(layer: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    inner = lambda y: checkpoint(layer, y, use_reentrant=False)  # noqa: E731
    return checkpoint(inner, x, use_reentrant=True)


CHECKPOINTS = {
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "non-reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "late stop": late_stop,
    "selective": selective,
    "nested": nested,
    "nested in the other": lambda layer, x: checkpoint(
        lambda y: checkpoint(layer, y, use_reentrant=True), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("around", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_checkpointed_forward_counts_once(around):
    model, twin = Model(around), Model()
    recorder = Recorder(model)
    with torch.no_grad():
        model(tokens(7))
    for attention in model.attentions:
        attention.calls.clear()
    for m in (model, twin):
        for seed in range(2):
            m(tokens(seed).requires_grad_()).square().sum().backward()
    assert recorder.forwards == dict.fromkeys(NAMES, 2)
    assert_recorded(recorder.take(), model.expected())
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p.grad, q.grad)


def test_attention_checkpointed_within_a_module_counts_once():
    for reentrant in (True, False):
        model = Model()
        for attention in model.attentions:
            attention.attend = lambda *qkv, r=reentrant: checkpoint(causal, *qkv, use_reentrant=r)
        recorder = Recorder(model)
        model(tokens()).sum().backward()
        assert recorder.forwards == dict.fromkeys(NAMES, 1)
        assert_recorded(recorder.take(), model.expected())


def test_masks_scales_and_shapes_of_sdpa():
    """Each as a call, and the mask of the scores that it means."""
    T = 6
    window = (torch.arange(T)[:, None] - torch.arange(T)).abs() < 2
    bias = torch.zeros(2, 1, T, T).masked_fill(~window, -math.inf)
    padding = torch.ones(2, 1, 1, T, dtype=torch.bool)
    padding[1, ..., 4:] = False
    lower_right = causal_lower_right(T, T)

    def wide(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(HEADS // KV_HEADS, dim=1)

    cases: list[tuple[str, Callable[..., Tensor], Any]] = [
        ("all", lambda q, k, v: F.scaled_dot_product_attention(q, wide(k), wide(v)), None),
        (
            "causal",
            lambda q, k, v: F.scaled_dot_product_attention(q, wide(k), wide(v), None, 0.0, True),
            "causal",
        ),
        (
            "bool mask",
            lambda q, k, v: F.scaled_dot_product_attention(
                query=q, key=k, value=v, attn_mask=window, enable_gqa=True
            ),
            window,
        ),
        (
            "float mask",
            lambda q, k, v: F.scaled_dot_product_attention(q, wide(k), wide(v), bias),
            window,
        ),
        (
            "padding",
            lambda q, k, v: F.scaled_dot_product_attention(q, wide(k), wide(v), padding),
            padding,
        ),
        (
            "bias object",
            lambda q, k, v: F.scaled_dot_product_attention(q, wide(k), wide(v), lower_right),
            "causal",
        ),
        (
            "five dimensions",
            lambda q, k, v: F.scaled_dot_product_attention(
                q[:, None], wide(k)[:, None], wide(v)[:, None], padding[:, None]
            )[:, 0],
            padding,
        ),
        (
            "three dimensions",
            lambda q, k, v: torch.stack(
                [F.scaled_dot_product_attention(*one) for one in zip(q, wide(k), wide(v))]
            ),
            None,
        ),
    ]
    for name, attend, mask in cases:
        model = Model()
        model.attentions[0].attend = attend
        recorder = Recorder(model, [NAMES[0]])
        model(tokens())
        taken = recorder.take()[NAMES[0]]
        expected = reference(model.attentions[0].calls, mask)
        torch.testing.assert_close(taken.double(), expected, rtol=1e-5, atol=1e-6, msg=name)


def test_broadcast_batches_heads_and_other_lengths():
    q, k, v = torch.randn(3, HEADS, 5, 8), torch.randn(1, 1, 7, 8), torch.randn(1, 1, 7, 8)
    model = Model()
    for causally, mask in ((False, None), (True, torch.ones(5, 7, dtype=torch.bool).tril())):
        model.attentions[0].attend = lambda a, b, c, on=causally: (
            F.scaled_dot_product_attention(q, k, v, is_causal=on, scale=0.5).sum() * 0 + a
        )
        recorder = Recorder(model, ["layers.0.attention"])
        model(tokens())
        expected = reference([(q, k.expand(3, HEADS, 7, 8))], mask) * 0.5 * math.sqrt(8)
        assert_recorded(recorder.take(), {NAMES[0]: expected})


def test_autocast_and_double_precision():
    model = Model()
    recorder = Recorder(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    assert model.attentions[0].calls[0][0].dtype == torch.bfloat16
    assert_recorded(recorder.take(), model.expected())
    model = Model().double()
    recorder = Recorder(model)
    model(tokens().double())
    assert_recorded(recorder.take(), model.expected())


def test_maxima_are_fp32_whatever_the_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Model()
        recorder = Recorder(model)
        model(tokens().bfloat16())
        assert_recorded(recorder.take(), model.expected())
    finally:
        torch.set_default_dtype(before)


def test_flex_attention_by_its_mask():
    def before(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    block_mask = create_block_mask(before, None, None, 6, 6, device="cpu")
    model = Model()
    for number, attention in enumerate(model.attentions):
        mask = block_mask if number else None
        attention.attend = lambda q, k, v, mask=mask: flex.flex_attention(
            q.detach(), k.detach(), v.detach(), block_mask=mask, enable_gqa=True
        )
    recorder = Recorder(model)
    model(tokens())
    expected = {
        name: reference(attention.calls, mask)
        for name, attention, mask in zip(NAMES, model.attentions, (None, "causal"))
    }
    assert_recorded(recorder.take(), expected)


def test_maxima_that_attention_has_taken_itself_are_recorded():
    scores = torch.randn(2, HEADS, 6, dtype=torch.bfloat16)
    model = Model()
    recorder = Recorder(model)
    model.attentions[0].attend = lambda q, k, v: recorder.observe_scores(NAMES[0], scores) or q
    model.attentions[1].attend = lambda q, k, v: (
        recorder.observe_scores(model.attentions[1], -scores) or q
    )
    model(tokens())
    assert recorder.forwards == dict.fromkeys(NAMES, 1)
    expected = [s.double().amax((0, 2)) for s in (scores, -scores)]
    assert_recorded(recorder.take(), dict(zip(NAMES, expected)))


def test_attention_of_other_kinds_is_observed():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        recorder.observe(NAMES[0], q, k)
        return causal_by_hand(q, k, v)

    for around in (Model().around, *CHECKPOINTS.values()):
        model = Model(around)
        model.attentions[0].attend = attend
        recorder = Recorder(model, ["layers.0.attention"])
        with torch.no_grad():
            model(tokens(5))
        model.attentions[0].calls.clear()
        model(tokens().requires_grad_()).sum().backward()
        assert recorder.forwards == {NAMES[0]: 1}
        assert_recorded(recorder.take(), {NAMES[0]: reference(model.attentions[0].calls)})


def test_attention_that_is_not_seen_is_an_error_of_take():
    model = Model()
    recorder = Recorder(model)
    model.attentions[1].attend = lambda q, k, v: q
    model(tokens())
    with pytest.raises(ValueError, match=r"layers\.1\.attention ran, but no .*obs.*modules="):
        recorder.take()
    assert_recorded_nothing(recorder)
    with torch.no_grad():
        model(tokens())
    assert_recorded_nothing(recorder)


def test_names_imported_from_torch_are_not_seen_and_take_says_so():
    model = Model()
    recorder = Recorder(model)
    model.attentions[0].attend = lambda q, k, v: imported_by_name(q, k, v, enable_gqa=True)
    model(tokens())
    with pytest.raises(ValueError, match=r"layers\.0\.attention ran, but no .*obs"):
        recorder.take()


def test_eager_attention_is_refused_with_the_argument_of_transformers_that_helps():
    model = Model()
    recorder = Recorder(model)
    model.attentions[1].attend = lambda q, k, v: (q @ q.mT).softmax(-1) @ q
    model(tokens())
    with pytest.raises(ValueError, match=r'attn_implementation="sdpa"; in other .*obs'):
        recorder.take()


def assert_recorded_nothing(recorder: Any) -> None:
    found = recorder.take().values()
    assert all(maxima is None or (maxima == -math.inf).all() for maxima in found)


def test_what_is_not_understood_is_an_error_of_take():
    model = Model()
    recorder = Recorder(model)
    model.attentions[0].attend = lambda q, k, v: causal(q[:, :2], k, v).repeat(1, 2, 1, 1)
    model(tokens())
    recorder.take()
    model.attentions[0].attend = causal
    model(tokens())
    with pytest.raises(ValueError, match=r"layers\.0\.attention attends with 4 heads, and with 2"):
        recorder.take()
    assert_recorded_nothing(recorder)
    for attention in model.attentions:
        attention.calls.clear()
    model(tokens())  # and from now on, with 4
    assert_recorded(recorder.take(), model.expected())


class Aborted(Exception):
    pass


def raising(*inputs: Any) -> Any:
    raise Aborted


def aborted(model: Model, x: Tensor, at: nn.Module) -> None:
    """A forward, and its backward, which raises before the module runs."""
    hook = at.register_forward_pre_hook(raising)
    with pytest.raises(Aborted):
        model(x).sum().backward()
    hook.remove()


@pytest.mark.parametrize("around", [Model().around, *CHECKPOINTS.values()])
def test_of_a_forward_that_raised_nothing_is_recorded(around):
    """Beside it micro-batches, before and behind it, that ended."""
    for first in (False, True):
        model = Model(around)
        recorder = Recorder(model)
        if first:
            model(tokens(1).requires_grad_()).square().sum().backward()
        kept = [list(attention.calls) for attention in model.attentions]
        aborted(model, 100 * tokens().requires_grad_(), at=model.layers[1].feed_forward)
        assert recorder.forwards == dict.fromkeys(NAMES, int(first))
        for attention, calls in zip(model.attentions, kept):
            attention.calls = calls
        model(tokens(2).requires_grad_()).square().sum().backward()
        assert recorder.forwards == dict.fromkeys(NAMES, 1 + first)
        assert_recorded(recorder.take(), model.expected())


def test_of_an_interrupted_forward_nothing_is_recorded():
    def interrupted(*qkv: Tensor) -> Tensor:
        raise KeyboardInterrupt

    for behind in (True, False):  # whether another forward comes behind
        model = Model()
        recorder = Recorder(model)
        model(tokens(1))
        kept = [list(attention.calls) for attention in model.attentions]
        model.attentions[1].attend = interrupted
        with pytest.raises(KeyboardInterrupt):
            model(100 * tokens())
        model.attentions[1].attend = causal
        for attention, calls in zip(model.attentions, kept):
            attention.calls = calls
        if behind:
            model(tokens(2))
        assert_recorded(recorder.take(), model.expected())


def test_a_forward_within_a_forward_of_the_same_model_is_recorded_beside_it():
    class Twice(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if x.abs().max() > 1:
                self(0.01 * x)
            return y

    model = Twice()
    recorder = Recorder(model)
    model(100 * tokens(1))
    assert_recorded(recorder.take(), model.expected())


def test_compiled_modules_of_a_forward_that_raised_leave_nothing():
    torch.compiler.reset()
    model = Model()
    recorder = Recorder(model)
    for name, attention in zip(NAMES, model.attentions):
        attention.keeps, attention.attend = False, observing(recorder, name)
        attention.compile(backend="eager", fullgraph=True)
    twin = Model()
    for x in (tokens(), tokens(1)):
        aborted(model, 100 * x, at=model.layers[1].feed_forward)
        model(x)
        twin(x)
        assert_recorded(recorder.take(), twin.expected())
        for attention in twin.attentions:
            attention.calls.clear()


def test_discard_drops_all_since_the_last_step():
    model = Model()
    recorder = Recorder(model)
    recorder.discard()
    model(100 * tokens())
    model.attentions[1].attend = lambda q, k, v: q  # which take() would complain of
    model(100 * tokens())
    recorder.discard()
    assert recorder.forwards == dict.fromkeys(NAMES, 0)
    model.attentions[1].attend = causal
    for attention in model.attentions:
        attention.calls.clear()
    model(tokens())
    assert_recorded(recorder.take(), model.expected())


def observed(recorder: Any, name: str) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        recorder.observe(name, q, k)
        return causal_by_hand(q, k, v)

    return attend


@pytest.mark.parametrize("observes", [False, True])
def test_where_nothing_can_be_recorded_the_forward_runs(observes):
    """By a transform of torch.func, an error of take; by what holds no numbers, none."""

    def of_grad(model: Model) -> Any:
        loss = lambda p: functional_call(model, p, (tokens(),)).sum()  # noqa: E731
        return torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})

    def of_vmap(model: Model) -> Any:
        return torch.func.vmap(model)(torch.stack([tokens(1), tokens(2)]))

    for run in (of_grad, of_vmap):
        model, twin = Model(), Model()
        recorder = Recorder(model)
        for name, attention, other in zip(NAMES, model.attentions, twin.attentions):
            attention.keeps = other.keeps = False
            other.attend = causal_by_hand if observes else causal
            attention.attend = observed(recorder, name) if observes else causal
        torch.testing.assert_close(run(model), run(twin), rtol=0, atol=0)
        with pytest.raises(ValueError, match=r"layers\.0\.attention runs within a transform of"):
            recorder.take()
        model(tokens()), recorder.take()

    model = Model()
    recorder = Recorder(model)
    for name, attention in zip(NAMES, model.attentions):
        attention.attend = observed(recorder, name) if observes else causal
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(tokens())
    model.to("meta")(tokens().to("meta"))
    assert recorder.take() == dict.fromkeys(NAMES)
    model = model.to_empty(device="cpu")
    model.load_state_dict(Model().state_dict())
    for attention in model.attentions:
        attention.calls.clear()
    model(tokens())
    assert_recorded(recorder.take(), model.expected())


def test_what_recording_raises_is_an_error_of_take():
    class Strange(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is Tensor.detach:
                raise KeyError("no such operation")
            return super().__torch_function__(func, types, args, kwargs)

    model = Model()
    recorder = Recorder(model)
    model.attentions[0].attend = lambda q, k, v: causal(q.as_subclass(Strange), k, v).as_subclass(
        Tensor
    )
    model(tokens())
    with pytest.raises(ValueError, match=r"layers\.0\.attention was not recorded.*KeyError.*such"):
        recorder.take()


def test_removing_puts_back_what_an_interrupted_forward_left():
    def fail(*qkv: Tensor) -> Tensor:
        raise KeyboardInterrupt

    before = F.scaled_dot_product_attention
    for removes in (True, False):
        model = Model()
        recorder = Recorder(model)
        model.attentions[1].attend = fail
        with pytest.raises(KeyboardInterrupt):
            model(tokens())
        assert F.scaled_dot_product_attention is not before
        if removes:
            recorder.remove()
        else:  # the next forward of any recorder does, where this one is gone
            gone = weakref.ref(recorder)
            del model, recorder
            gc.collect()
            assert gone() is None
            model = Model()
            recorder = Recorder(model)
            model(tokens())
        assert F.scaled_dot_product_attention is before


def test_forwards_in_several_threads_record_their_own():
    """Each begins and ends while another runs."""
    models, before = [Model(), Model(), Model()], F.scaled_dot_product_attention
    recorders = [Recorder(model) for model in models[:2]]  # the last has none
    barrier = threading.Barrier(3, timeout=60)

    def attend(number: int) -> Callable[..., Tensor]:
        def attend(*qkv: Tensor) -> Tensor:
            for turn in range(3):
                barrier.wait()
                if turn == number:
                    out = causal(*qkv)
            return out

        return attend

    for number, model in enumerate(models):
        for attention in model.attentions:
            attention.attend = attend(number)
    threads = [
        threading.Thread(target=model, args=(tokens(seed),)) for seed, model in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.scaled_dot_product_attention is before
    for model, recorder in zip(models, recorders):
        assert_recorded(recorder.take(), model.expected())


def test_of_hooked_modules_within_each_other_the_innermost_records():
    model = Model()
    recorder = Recorder(model, ["layers.0", "attention"])
    assert recorder.names == ["layers.0", *NAMES]
    model.layers[0].feed_forward.forward = lambda x: causal(*[x[:, None]] * 3)[:, 0]
    model(tokens())
    taken = recorder.take()
    assert taken.pop("layers.0").shape == (1,)
    assert_recorded(taken, model.expected())


def test_modules_are_chosen_by_name():
    model = Model()
    assert Recorder(model).names == NAMES
    assert Recorder(model, ["layers.1.*"]).names == [
        "layers.1.attention",
        "layers.1.feed_forward",
    ]
    assert Recorder(model, "layers").names == ["layers.0", "layers.1"]
    assert Recorder(model, ["*.attention"]).names == NAMES
    with pytest.raises(ValueError, match=r"no module fits 'self_attn'; there are .*attention"):
        Recorder(model, ["attention", "self_attn"])
    with pytest.raises(ValueError, match=r"no module has any of .*'wq'.*modules="):
        Recorder(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="found none"):
        Recorder(model, [])
    with pytest.raises(ValueError, match="found a list"):
        Recorder([model])
    recorder = Recorder(model)
    for wrong in ("layers.0", model.layers[0]):
        with pytest.raises(ValueError, match="is not hooked; there are 'layers"):
            recorder.observe_scores(wrong, torch.zeros(1, 4, 2))
    with pytest.raises(ValueError, match=r"max_scores of shape \(4, 2\)"):
        recorder.observe_scores(NAMES[0], torch.zeros(4, 2))


@pytest.mark.parametrize("names", ["q_proj k_proj", "wq_b wkv_b", "q_b_proj kv_b_proj"])
def test_families_of_the_hub_are_found(names):
    """Modules or parameters of these names are an attention's."""
    attention = nn.Linear(2, 2)
    for name in names.split():
        setattr(attention, name, nn.Parameter(torch.ones(2, 2)))
    model = nn.ModuleDict({"self_attn": attention, "mlp": nn.Linear(2, 2)})
    assert Recorder(model).names == ["self_attn"]


def test_copies_of_the_model_do_not_feed_the_recorder():
    model = Model(around=call)
    model.attentions[0].recorder = recorder = Recorder(model)
    for attention in model.attentions:
        attention.keeps = False
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copied, torch.load(buffer, weights_only=False)):
        other(tokens())
        assert recorder.forwards == dict.fromkeys(NAMES, 0)
        other.attentions[0].recorder.observe("anything", tokens(), tokens())
        other.attentions[0].recorder.observe_scores(other, max_scores=tokens())
        assert other.attentions[0].recorder.take() == {}
    again = Recorder(copied)
    copied(tokens())
    assert again.forwards == dict.fromkeys(NAMES, 1)


def test_a_pickled_model_does_not_need_this_package():
    class Elsewhere(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert not module.startswith(optimizer.__name__), (module, name)
            return super().find_class(module, name)

    model = Model(around=call)
    model.attentions[0].recorder = Recorder(model)
    pickled = pickle.dumps(model)
    loaded = Elsewhere(io.BytesIO(pickled)).load()
    assert len(loaded.attentions[0]._forward_hooks) == 1
    assert torch.equal(loaded(tokens()), model(tokens()))
    torch.compiler.reset()
    compiled = torch.compile(loaded, backend="eager", fullgraph=True)
    for attention in loaded.attentions:
        attention.keeps = False
        attention.attend = observing(loaded.attentions[0].recorder, "anything")
    torch.testing.assert_close(compiled(tokens()), model(tokens()))


def call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


COMPILED = {
    "model": lambda model, **how: torch.compile(model, **how),
    "blocks": lambda model, **how: [layer.compile(**how) for layer in model.layers] and model,
}


@pytest.mark.parametrize(
    ("what", "checkpointed"), [("model", False), ("model", True), ("blocks", True)]
)
def test_compiled_modules_run_as_before_and_have_to_observe(what, checkpointed):
    torch.compiler.reset()
    around = CHECKPOINTS["non-reentrant"] if checkpointed else call
    twin = Model()
    twin(tokens()).square().sum().backward()
    for observes in (False, True):
        model = Model(around)
        recorder = Recorder(model)
        for name, attention in zip(NAMES, model.attentions):
            attention.keeps = False
            if observes:
                attention.attend = observing(recorder, name)
        backend = "aot_eager" if checkpointed and observes else "eager"
        compiled = COMPILED[what](model, backend=backend, fullgraph=True)
        with torch.no_grad():
            compiled(tokens())
        for _ in range(2):
            compiled(tokens()).square().sum().backward()
            if observes:
                assert_recorded(recorder.take(), twin.expected())
            else:
                with pytest.raises(ValueError, match=r"layers\.0\.attention is compiled, so"):
                    recorder.take()
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad, 2 * q.grad, rtol=1e-4, atol=1e-4)
        if observes:
            with torch.no_grad():
                compiled(tokens())
            assert_recorded_nothing(recorder)


def observing(recorder: Any, module: Any) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        recorder.observe(module, q, k)
        return causal(q, k, v)

    return attend


def test_what_is_compiled_within_a_module_stays_whole():
    """Dynamo would trace it through a torch function mode, and fails to."""
    helper = torch.compile(
        lambda q: q.unflatten(-1, (2, -1)).flatten(-2), backend="eager", fullgraph=True
    )
    model = Model()
    model.attentions[0].attend = lambda q, k, v: causal(helper(q), k, v)
    recorder = Recorder(model)
    model(tokens())
    assert_recorded(recorder.take(), model.expected())


@pytest.mark.slow
def test_tensor_parallel_ranks_record_their_own_heads():
    run_ranks(record_on_meshes, 4)


def record_on_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    x = tokens(dp.get_local_rank())

    def shard(model: Model, by_layer: bool = False, attends: bool = False) -> Model:
        for layer in model.layers:
            if by_layer:
                fully_shard(layer.attention.wq, mesh=dp)
            fully_shard(layer, mesh=dp)
        return fully_shard(model, mesh=dp)

    model = parallel(Model(), tp, use_local_output=False)
    recorder = Recorder(model)
    for attention in model.attentions:
        attention.attend = observing_dtensors(recorder, attention)
    model(x)
    check_local_heads(recorder.take(), model, tp, "TP, DTensors")

    for case, wrap in {
        "TP": lambda model: parallel(model, tp),
        "FSDP2 over TP": lambda model: shard(parallel(model, tp)),
        "FSDP2 of projections over TP": lambda model: shard(parallel(model, tp), by_layer=True),
        "checkpointed FSDP2 over TP": lambda model: shard(parallel(model, tp)),
    }.items():
        for before in (True, False):
            model = Model(CHECKPOINTS["reentrant"] if "checkpointed" in case else call)
            recorder = Recorder(model) if before else None
            model = wrap(model)
            recorder = recorder or Recorder(model)
            model(x.clone().requires_grad_()).sum().backward()
            assert recorder.forwards == dict.fromkeys(NAMES, 1), case
            for _ in range(2):
                check_local_heads(recorder.take(), model, tp, case)
                model(x.clone().requires_grad_()).sum().backward()

    for case, wrap in {
        "FSDP2": shard,
        "FSDP2 of projections": lambda model: shard(model, by_layer=True),
        "DDP": lambda model: DistributedDataParallel(model, process_group=dp.get_group()),
    }.items():
        inner = Model()
        model = wrap(inner)
        recorder = Recorder(model)
        model(x).sum().backward()
        taken = recorder.take()
        assert not any(isinstance(maxima, DTensor) for maxima in taken.values()), case
        assert_recorded(taken, inner.expected())

    model = parallel(Model(), tp)
    recorder = Recorder(model)
    attention = model.attentions[0]
    attention.keeps, attention.attend = False, observing(recorder, NAMES[0])
    attention.compile(backend="eager")
    model = shard(model)
    model(x)
    twin = parallel(Model(), tp)
    twin(x)
    check_local_heads(recorder.take(), twin, tp, "compiled FSDP2 over TP")


def observing_dtensors(recorder: Any, attention: Attention) -> Callable[..., Tensor]:
    def attend(q: DTensor, k: DTensor, v: DTensor) -> Tensor:
        recorder.observe(attention, q, k)
        out = causal_by_hand(*(t.to_local() for t in (q, k, v)))
        return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)

    return attend


def parallel(model: Model, mesh: Any, **output: bool) -> Model:
    plan: dict[str, Any] = {f"attention.{w}": ColwiseParallel(**output) for w in ("wq", "wk", "wv")}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**plan, "attention.wo": RowwiseParallel()})
    return model


def check_local_heads(taken: dict[str, Tensor], model: Model, mesh: Any, case: str) -> None:
    assert list(taken) == NAMES
    for maxima, attention in zip(taken.values(), model.attentions):
        assert isinstance(maxima, DTensor), case
        assert maxima.placements == (Shard(0),) and maxima.device_mesh == mesh, case
        assert maxima.shape == (HEADS,), case
        calls = [tuple(getattr(t, "_local_tensor", t) for t in c) for c in attention.calls]
        local = maxima.to_local()
        assert local.shape == (HEADS // mesh.size(),), case
        torch.testing.assert_close(local.double(), reference(calls), rtol=1e-5, atol=1e-6)


# On a GPU


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_recording_and_clipping_never_make_the_host_wait():
    model = Model().cuda()
    groups = optimizer.muon.get_default_muon_param_groups(model)
    config = {"head_dim": model.attentions[0].wq.out_features // HEADS, "threshold": 1e-3}
    optim = optimizer.Muon(groups, clip_config=config)
    optim.qk_recorder = Recorder(model)
    x = tokens().cuda()
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # tables are made once
        try:
            model(x).square().sum().backward()
            optim.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optim.qk_clip_stats()["total_clipped"] > 0


@needs_cuda
def test_maxima_of_compiled_flex_attention_are_those_of_its_queries_and_keys():
    compiled = torch.compile(flex.flex_attention)
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda") for _ in range(3))
    _, aux = compiled(q, k, v, return_aux=AuxRequest(max_scores=True))
    expected = optimizer.max_qk_logits(q, k, causal=False)
    torch.testing.assert_close(aux.max_scores.amax((0, 2)), expected, rtol=1e-2, atol=1e-2)
