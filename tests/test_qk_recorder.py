"""Which logits a recorder sees: against maxima of the scores themselves, in float64."""

from __future__ import annotations

import copy
import functools
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
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from comparisons import assert_equal, through_torch_save
from kernel import optimizer
from ranks import on_ranks

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
    """Keeps what it attends with, while it ``keeps``."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.attend = attend
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
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = Attention(attend)
        self.feed_forward = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(x + self.attention(x))


def call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class Model(nn.Module):
    """Calls ``around`` with each layer, and ``attend`` within each attention."""

    def __init__(
        self, around: Callable[..., Tensor] = call, attend: Callable[..., Tensor] = causal
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(attend) for _ in range(2))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.around(layer, x)
        return x

    @property
    def attentions(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def keep(self, keeps: bool) -> None:
        for attention in self.attentions:
            attention.keeps = keeps

    def expected(self, mask: Any = "causal") -> dict[str, Tensor]:
        """Returns the maxima of the calls since the last time it was called."""
        found = {name: reference(of.calls, mask) for name, of in zip(NAMES, self.attentions)}
        for attention in self.attentions:
            attention.calls.clear()
        return found


def tokens(seed: int = 0) -> Tensor:
    return 3 * torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(seed))


def reference(calls: list[tuple[Tensor, Tensor]], mask: Any = "causal") -> Tensor:
    """Maxima over calls of q·k/sqrt(D) where the mask (broadcast to (B, H, Tq, Tk)) is True."""
    maxima = []
    for pair in calls:
        q, k = (getattr(t, "_local_tensor", t) for t in pair)
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


def check(recorder: Any, model: Model, mask: Any = "causal") -> None:
    assert_recorded(recorder.take(), model.expected(mask))


def observing(recorder: Any, module: Any, attend: Callable[..., Any] = causal) -> Any:
    def observed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        recorder.observe(module, q, k)
        return attend(q, k, v)

    return observed


def test_microbatches_accumulate_and_take_starts_afresh():
    model = Model()
    recorder = Recorder(model)
    for seed in range(3):
        model(tokens(seed))
    assert recorder.forwards == dict.fromkeys(NAMES, 3)
    first = recorder.take()
    before = copy.deepcopy(first)
    assert_recorded(first, model.expected())
    for maxima in recorder.take().values():
        assert maxima.shape == (HEADS,) and (maxima == -math.inf).all()
    model(tokens(3) / 10)
    check(recorder, model)
    assert_equal(first, before)  # not written to later


def test_outputs_gradients_and_state_stay_the_same_and_evaluation_does_not_count():
    model, twin = Model(), Model()
    keys = list(model.state_dict())
    with Recorder(model) as recorder:
        for guard in (torch.no_grad(), torch.inference_mode()):
            with guard:
                assert torch.equal(model(tokens()), twin(tokens()))
        assert recorder.forwards == dict.fromkeys(NAMES, 0)
        assert recorder.take() == dict.fromkeys(NAMES)
        for m in (model, twin):
            m(tokens()).square().sum().backward()
        assert list(model.state_dict()) == keys
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


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


def optimizer_of(model: Model) -> Any:
    groups = optimizer.muon.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, clip_config={"head_dim": HEAD_DIM}, lr=0.0)
    optim.qk_recorder = Recorder(model)
    return optim


def test_a_recorder_goes_with_its_optimizer_and_takes_its_hooks_along():
    model = Model()
    for _ in range(3):
        optim = optimizer_of(model)
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
    expected = model.expected()
    second = Recorder(model, ["attention"])
    assert hooks_of(model) == once
    model(tokens(1) / 10)
    assert first.forwards == second.forwards == dict.fromkeys(NAMES, 1)
    assert_recorded(first.take(), expected)
    check(second, model)
    assert first.take() == dict.fromkeys(NAMES)


def test_an_optimizer_whose_recorder_was_replaced_warns_that_it_clips_nothing():
    model = Model()
    optim, recorder = optimizer_of(model), Recorder(model)
    with pytest.warns(UserWarning, match="nothing is clipped"):
        for _ in range(2):
            model(tokens()).sum().backward()
            optim.step()
    check(recorder, model)


def test_no_activation_is_kept():
    model = Model()
    recorder = Recorder(model)
    model(tokens())
    kept = [weakref.ref(t) for attention in model.attentions for t in attention.calls.pop()]
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    assert recorder.take()


# Activation checkpointing


def selective(layer: nn.Module, x: Tensor) -> Tensor:
    """Saves all products of matrices, in their order."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = "mm" in str(op) or "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def late_stop(layer: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)


def reentrant(layer: Any, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def non_reentrant(layer: Any, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


CHECKPOINTS = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "late stop": late_stop,
    "selective": selective,
    "nested": lambda layer, x: reentrant(lambda y: non_reentrant(layer, y), x),
    "nested in the other": lambda layer, x: non_reentrant(lambda y: reentrant(layer, y), x),
}
AROUND = {"no checkpoint": call, **CHECKPOINTS}
each_around = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)


@each_around
def test_a_checkpointed_forward_counts_once_whether_seen_or_observed(around):
    model, twin = Model(around), Model()
    recorder = Recorder(model)
    model.attentions[0].attend = observing(recorder, NAMES[0], causal_by_hand)
    twin.attentions[0].attend = causal_by_hand
    with torch.no_grad():
        model(tokens(7))
    model.expected()
    for m in (model, twin):
        for seed in range(2):
            m(tokens(seed).requires_grad_()).square().sum().backward()
    assert recorder.forwards == dict.fromkeys(NAMES, 2)
    check(recorder, model)
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


# Ways to call attention

T = 6
WINDOW = (torch.arange(T)[:, None] - torch.arange(T)).abs() < 2
BIAS = torch.zeros(2, 1, T, T).masked_fill(~WINDOW, -math.inf)
PADDING = torch.ones(2, 1, 1, T, dtype=torch.bool)
PADDING[1, ..., 4:] = False


def wide(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(HEADS // KV_HEADS, dim=1)


def sdpa(*args: Any, **options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, wide(k), wide(v), *args, **options)


def by_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=WINDOW, enable_gqa=True
    )


def of_five_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t[:, None] for t in (q, wide(k), wide(v)))
    return F.scaled_dot_product_attention(q, k, v, PADDING[:, None])[:, 0]


def by_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([F.scaled_dot_product_attention(*one) for one in zip(q, wide(k), wide(v))])


def flexed(*args: Any) -> Callable[..., Tensor]:
    return lambda *qkv: flex.flex_attention(*(t.detach() for t in qkv), *args, enable_gqa=True)


BEFORE = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")


def checkpointed(is_reentrant: bool) -> Callable[..., Tensor]:
    return lambda *qkv: checkpoint(causal, *qkv, use_reentrant=is_reentrant)


# Each as a call, and the mask of the scores that it means.
CALLS: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "all": (sdpa(), None),
    "causal": (sdpa(None, 0.0, True), "causal"),
    "bool mask": (by_name, WINDOW),
    "float mask": (sdpa(BIAS), WINDOW),
    "padding": (sdpa(PADDING), PADDING),
    "bias object": (sdpa(causal_lower_right(T, T)), "causal"),
    "five dimensions": (of_five_dimensions, PADDING),
    "three dimensions": (by_sequence, None),
    "checkpointed": (checkpointed(False), "causal"),
    "checkpointed, reentrant": (checkpointed(True), "causal"),
    "flex": (flexed(), None),
    "flex with a mask": (flexed(None, BEFORE), "causal"),
}


@pytest.mark.parametrize(("attend", "mask"), CALLS.values(), ids=CALLS)
def test_every_way_to_call_attention_is_recorded(attend, mask):
    model = Model(attend=attend)
    recorder = Recorder(model)
    model(tokens()).sum().backward()
    assert recorder.forwards == dict.fromkeys(NAMES, 1)
    check(recorder, model, mask)


@pytest.mark.parametrize("is_causal", [False, True])
def test_broadcast_batches_heads_and_other_lengths(is_causal):
    q, k = torch.randn(3, HEADS, 5, 8), torch.randn(1, 1, 7, 8)
    options = {"is_causal": is_causal, "scale": 0.5}
    model = Model(
        attend=lambda own, *_: F.scaled_dot_product_attention(q, k, k, **options).sum() * 0 + own
    )
    recorder = Recorder(model)
    model(tokens())
    mask = "causal" if is_causal else None
    expected = reference([(q, k.expand(3, HEADS, 7, 8))], mask) * 0.5 * math.sqrt(8)
    assert_recorded(recorder.take(), dict.fromkeys(NAMES, expected))


def test_autocast_and_double_precision():
    model = Model()
    recorder = Recorder(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    assert model.attentions[0].calls[0][0].dtype == torch.bfloat16
    check(recorder, model)
    model.double()(tokens().double())
    check(recorder, model)


def test_maxima_are_fp32_whatever_the_default_dtype():
    model = Model().bfloat16()
    recorder = Recorder(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model(tokens().bfloat16())
    finally:
        torch.set_default_dtype(torch.float32)
    check(recorder, model)


def test_maxima_that_attention_has_taken_itself_are_recorded():
    scores = torch.randn(2, HEADS, 6, dtype=torch.bfloat16)
    model = Model()
    recorder = Recorder(model)
    first, second = model.attentions
    first.attend = lambda q, k, v: recorder.observe_scores(NAMES[0], scores) or q
    second.attend = lambda q, k, v: recorder.observe_scores(second, -scores) or q
    model(tokens())
    assert recorder.forwards == dict.fromkeys(NAMES, 1)
    expected = [s.double().amax((0, 2)) for s in (scores, -scores)]
    assert_recorded(recorder.take(), dict(zip(NAMES, expected)))


# What is not seen, or not understood


def imported(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return imported_by_name(q, k, v, enable_gqa=True)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ q.mT).softmax(-1) @ q


class Strange(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if func is Tensor.detach:
            raise KeyError("no such operation")
        return super().__torch_function__(func, types, args, kwargs)


def strange(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q.as_subclass(Strange), k, v).as_subclass(Tensor)


UNSEEN = {
    "none": (lambda q, k, v: q, r"layers\.1\.attention .*observe.*modules="),
    "imported by name": (imported, r"layers\.1\.attention .*observe"),
    "eager": (eager, r'attn_implementation="sdpa".*observe'),
    "raises": (strange, r"layers\.1\.attention .*KeyError.*no such operation"),
}


@pytest.mark.parametrize(("attend", "match"), UNSEEN.values(), ids=UNSEEN)
def test_attention_that_is_not_seen_is_an_error_of_take(attend, match):
    model = Model()
    recorder = Recorder(model)
    model.attentions[1].attend = attend
    model(tokens())
    model.attentions[1].attend = causal
    model(tokens())  # which is seen, and makes nothing better
    with pytest.raises(ValueError, match=match):
        recorder.take()
    assert_recorded_nothing(recorder)
    with torch.no_grad():
        model(tokens())
    assert_recorded_nothing(recorder)


def assert_recorded_nothing(recorder: Any) -> None:
    found = recorder.take().values()
    assert all(maxima is None or (maxima == -math.inf).all() for maxima in found)


def test_another_number_of_heads_is_an_error_of_take():
    model = Model()
    recorder = Recorder(model)
    model.attentions[0].attend = lambda q, k, v: causal(q[:, :2], k, v).repeat(1, 2, 1, 1)
    model(tokens())
    recorder.take()
    model.attentions[0].attend = causal
    model(tokens())
    with pytest.raises(ValueError, match=r"layers\.0\.attention .* 4 heads.* 2"):
        recorder.take()
    assert_recorded_nothing(recorder)
    model.expected()
    model(tokens())  # and from now on, with 4
    check(recorder, model)


def of_grad(model: Model) -> Any:
    loss = lambda p: functional_call(model, p, (tokens(),)).sum()  # noqa: E731
    return torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})


def of_vmap(model: Model) -> Any:
    return torch.func.vmap(model)(torch.stack([tokens(1), tokens(2)]))


@pytest.mark.parametrize("observes", [False, True])
@pytest.mark.parametrize("run", [of_grad, of_vmap])
def test_within_transforms_of_torch_func_the_forward_runs_and_take_raises(run, observes):
    attend = causal_by_hand if observes else causal
    model, twin = Model(attend=attend), Model(attend=attend)
    recorder = Recorder(model)
    model.keep(False), twin.keep(False)
    for name, attention in zip(NAMES, model.attentions):
        attention.attend = observing(recorder, name, attend) if observes else attend
    torch.testing.assert_close(run(model), run(twin), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"layers\.0\.attention .*transform"):
        recorder.take()
    model(tokens())
    recorder.take()


@pytest.mark.parametrize("observes", [False, True])
def test_tensors_without_numbers_are_passed_over(observes):
    model = Model()
    recorder = Recorder(model)
    for name, attention in zip(NAMES, model.attentions):
        attention.attend = observing(recorder, name, causal_by_hand) if observes else causal
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(tokens())
    model.to("meta")(tokens().to("meta"))
    assert recorder.take() == dict.fromkeys(NAMES)


# Forwards that do not end, or run at the same time


class Aborted(Exception):
    pass


def aborted(model: Model, x: Tensor) -> None:
    """A forward, and its backward, which raises in the second layer, after its attention."""

    def hook(*_: Any) -> None:
        raise Aborted

    model.keep(False)
    handle = model.layers[1].feed_forward.register_forward_pre_hook(hook)
    with pytest.raises(Aborted):
        model(x).sum().backward()
    handle.remove()
    model.keep(True)


@each_around
@pytest.mark.parametrize("first", [False, True])
def test_of_a_forward_that_raised_nothing_is_recorded(around, first):
    """Beside it micro-batches, before and after it, that ended."""
    model = Model(around)
    recorder = Recorder(model)
    if first:
        model(tokens(1).requires_grad_()).square().sum().backward()
    aborted(model, 100 * tokens().requires_grad_())
    assert recorder.forwards == dict.fromkeys(NAMES, int(first))
    model(tokens(2).requires_grad_()).square().sum().backward()
    assert recorder.forwards == dict.fromkeys(NAMES, 1 + first)
    check(recorder, model)


def interrupted(*qkv: Tensor) -> Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize("then", ["a take", "a forward", "remove", "a forward of another model"])
def test_an_interrupted_forward_leaves_nothing(then):
    before, model = F.scaled_dot_product_attention, Model()
    recorder = Recorder(model)
    model(tokens(1))
    model.keep(False)
    model.attentions[1].attend = interrupted
    with pytest.raises(KeyboardInterrupt):
        model(100 * tokens())
    assert F.scaled_dot_product_attention is not before
    model.attentions[1].attend = causal
    model.keep(True)
    if then == "a take":
        check(recorder, model)
    elif then == "a forward":
        check_after(recorder, model)
    elif then == "remove":
        recorder.remove()
    else:
        gone = weakref.ref(recorder)
        del model, recorder
        gc.collect()
        assert gone() is None
        other = Model()
        check_after(Recorder(other), other)
    assert F.scaled_dot_product_attention is before


def check_after(recorder: Any, model: Model) -> None:
    model(tokens())
    check(recorder, model)


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
    check(recorder, model)


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
    model.expected()
    check_after(recorder, model)


def test_forwards_in_several_threads_record_their_own():
    """Each begins and ends while another runs."""
    models, before = [Model(), Model(), Model()], F.scaled_dot_product_attention
    recorders = [Recorder(model) for model in models[:2]]  # the last has none
    barrier = threading.Barrier(3, timeout=60)

    def in_turn(number: int, *qkv: Tensor) -> Tensor:
        for turn in range(3):
            barrier.wait()
            if turn == number:
                out = causal(*qkv)
        return out

    for number, model in enumerate(models):
        for attention in model.attentions:
            attention.attend = functools.partial(in_turn, number)
    threads = [threading.Thread(target=m, args=(tokens(seed),)) for seed, m in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.scaled_dot_product_attention is before
    for model, recorder in zip(models, recorders):
        check(recorder, model)


# Which modules


def test_of_hooked_modules_within_each_other_the_innermost_records():
    model = Model()
    recorder = Recorder(model, ["layers.0", "attention"])
    assert recorder.names == ["layers.0", *NAMES]
    model.layers[0].feed_forward.forward = lambda x: causal(*[x[:, None]] * 3)[:, 0]
    model(tokens())
    taken = recorder.take()
    assert taken.pop("layers.0").shape == (1,)
    assert_recorded(taken, model.expected())


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (["layers.1.*"], ["layers.1.attention", "layers.1.feed_forward"]),
        ("layers", ["layers.0", "layers.1"]),
        (["*.attention"], NAMES),
        (None, NAMES),
    ],
)
def test_modules_are_chosen_by_name(modules, names):
    assert Recorder(Model(), modules).names == names


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: Recorder(m, ["attention", "self_attn"]), "'self_attn'.*attention"),
        (lambda m: Recorder(nn.Sequential(nn.Linear(2, 2))), "'wq'.*modules="),
        (lambda m: Recorder(m, []), "modules"),
        (lambda m: Recorder([m]), "list"),
        (lambda m: Recorder(m).observe_scores("layers.0", torch.zeros(1, 4, 2)), "'layers"),
        (lambda m: Recorder(m).observe_scores(m.layers[0], torch.zeros(1, 4, 2)), "'layers"),
        (lambda m: Recorder(m).observe_scores(NAMES[0], torch.zeros(4, 2)), r"\(4, 2\)"),
    ],
)
def test_modules_and_scores_that_do_not_fit_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call(Model())


@pytest.mark.parametrize("names", ["q_proj k_proj", "wq_b wkv_b", "q_b_proj kv_b_proj"])
def test_families_of_the_hub_are_found(names):
    """Modules or parameters of these names are an attention's."""
    attention = nn.Linear(2, 2)
    for name in names.split():
        setattr(attention, name, nn.Parameter(torch.ones(2, 2)))
    model = nn.ModuleDict({"self_attn": attention, "mlp": nn.Linear(2, 2)})
    assert Recorder(model).names == ["self_attn"]


# Copies


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, functools.partial(through_torch_save, weights_only=False)]
)
def test_copies_of_the_model_do_not_feed_the_recorder(duplicate):
    model = Model()
    model.attentions[0].recorder = recorder = Recorder(model)
    copied = duplicate(model)
    copied(tokens())
    assert recorder.forwards == dict.fromkeys(NAMES, 0)
    copied.attentions[0].recorder.observe("anything", tokens(), tokens())
    copied.attentions[0].recorder.observe_scores(copied, max_scores=tokens())
    assert copied.attentions[0].recorder.take() == {}
    again = Recorder(copied)
    copied(tokens())
    assert again.forwards == dict.fromkeys(NAMES, 1)


def test_a_pickled_model_does_not_need_this_package():
    class Elsewhere(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert not module.startswith(optimizer.__name__), (module, name)
            return super().find_class(module, name)

    model = Model()
    model.attentions[0].recorder = Recorder(model)
    loaded = Elsewhere(io.BytesIO(pickle.dumps(model))).load()
    assert len(loaded.attentions[0]._forward_hooks) == 1
    assert torch.equal(loaded(tokens()), model(tokens()))


# Compiled


@pytest.mark.parametrize("observes", [False, True])
@pytest.mark.parametrize(
    ("what", "around"), [("model", call), ("model", non_reentrant), ("blocks", non_reentrant)]
)
def test_compiled_modules_run_as_before_and_have_to_observe(what, around, observes):
    torch.compiler.reset()
    twin, model = Model(), Model(around)
    twin(tokens()).square().sum().backward()
    recorder, expected = Recorder(model), twin.expected()
    model.keep(False)
    for name, attention in zip(NAMES, model.attentions):
        attention.attend = observing(recorder, name) if observes else causal
    how: dict[str, Any] = {"backend": "eager", "fullgraph": True}
    if observes and around is non_reentrant:
        how["backend"] = "aot_eager"
    for module in [model] if what == "model" else model.layers:
        module.compile(**how)
    with torch.no_grad():
        model(tokens())
    for _ in range(2):
        model(tokens()).square().sum().backward()
        if observes:
            assert_recorded(recorder.take(), expected)
        else:
            with pytest.raises(ValueError, match=r"layers\.0\.attention is compiled"):
                recorder.take()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, 2 * q.grad, rtol=1e-4, atol=1e-4)
    if observes:
        with torch.no_grad():
            model(tokens())
        assert_recorded_nothing(recorder)


def test_compiled_modules_of_a_forward_that_raised_leave_nothing():
    torch.compiler.reset()
    model, twin = Model(), Model()
    recorder = Recorder(model)
    for name, attention in zip(NAMES, model.attentions):
        attention.attend = observing(recorder, name)
        attention.compile(backend="eager", fullgraph=True)
    for x in (tokens(), tokens(1)):
        aborted(model, 100 * x)
        model.keep(False)
        model(x)
        twin(x)
        check(recorder, twin)


def test_what_is_compiled_within_a_module_stays_whole():
    """Dynamo would trace it through a torch function mode, and fails to."""
    helper = torch.compile(
        lambda q: q.unflatten(-1, (2, -1)).flatten(-2), backend="eager", fullgraph=True
    )
    model = Model(attend=lambda q, k, v: causal(helper(q), k, v))
    check_after(Recorder(model), model)


# Meshes


@on_ranks(4)
def test_tensor_parallel_ranks_record_their_own_heads_observed_or_compiled() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, x = mesh["tp"], tokens(mesh["dp"].get_local_rank())
    model = parallel(Model(), tp, use_local_output=False)
    recorder = Recorder(model)
    for attention in model.attentions:
        attention.attend = observing(recorder, attention, of_local_tensors)
    model(x)
    check_local_heads(recorder, model, tp)

    model, twin = parallel(Model(), tp), parallel(Model(), tp)
    recorder = Recorder(model)
    model.keep(False)
    model.attentions[0].attend = observing(recorder, NAMES[0])
    model.attentions[0].compile(backend="eager")
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh["dp"])
    model(x)
    twin(x)
    check_local_heads(recorder, twin, tp)


def of_local_tensors(q: DTensor, k: DTensor, v: DTensor) -> Tensor:
    out = causal_by_hand(*(t.to_local() for t in (q, k, v)))
    return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)


def parallel(model: Model, mesh: Any, **output: bool) -> Model:
    plan: dict[str, Any] = {f"attention.{w}": ColwiseParallel(**output) for w in ("wq", "wk", "wv")}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**plan, "attention.wo": RowwiseParallel()})
    return model


def check_local_heads(recorder: Any, model: Model, mesh: Any) -> None:
    taken = recorder.take()
    for maxima in taken.values():
        assert isinstance(maxima, DTensor) and maxima.shape == (HEADS,)
        assert maxima.placements == (Shard(0),) and maxima.device_mesh == mesh
    own = {name: maxima.to_local() for name, maxima in taken.items()}
    assert_recorded(own, model.expected())


# On a GPU


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_recording_and_clipping_never_make_the_host_wait():
    model = Model().cuda()
    groups = optimizer.muon.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, clip_config={"head_dim": HEAD_DIM, "threshold": 1e-3})
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
