"""QK-Clip on one device, against float64: kinds of attention, names, errors, what is left alone."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import reference
from counters import count
from kernel import optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

D, THRESHOLD = 24, 6.0


@dataclass
class Attention:
    """An attention's projections by what follows its prefix, and how to read heads from them.

    Args:
        shapes: of the parameters, without the columns.
        config: of QK-Clip, without a threshold.
        q, k: a parameter, and the first rows of its heads, of six rows each.
        rotated: rows of a query head after these; the rotated key is not Muon's here.
    """

    shapes: dict[str, tuple[int, ...]]
    config: dict
    q: tuple[str, Sequence[int]]
    k: tuple[str, Sequence[int]]
    rotated: int = 0
    biases: bool = False

    @property
    def logits(self) -> Tensor:
        """Returns a logit for each query head, from below the threshold to above."""
        return THRESHOLD * torch.linspace(0.5, 3.0, len(self.q[1]), dtype=torch.float64)

    def params(self, dtype: torch.dtype) -> dict[str, nn.Parameter]:
        generator = torch.Generator().manual_seed(len(self.q[1]))
        made = {}
        for name, rows in self.shapes.items():
            made[f"{name}.weight"] = torch.randn(*rows, D, generator=generator)
            if self.biases:
                made[f"{name}.bias"] = torch.randn(rows, generator=generator)
        return {name: nn.Parameter(tensor.to(dtype)) for name, tensor in made.items()}

    def clipped(self, params: dict[str, Tensor], logits: Tensor) -> dict[str, Tensor]:
        """What QK-Clip makes of the parameters, in float64, head by head."""
        whole = {name: p.detach().double().clone() for name, p in params.items()}
        (q, q_starts), (k, k_starts) = self.q, self.k
        key_heads = [head * len(k_starts) // len(q_starts) for head in range(len(q_starts))]
        queries, keys = reference.qk_scales(logits, THRESHOLD, range(len(q_starts)), key_heads)
        scaled = [(q, q_starts[head], 6, plain) for head, (plain, _) in queries.items()]
        scaled += [(q, q_starts[h] + 6, self.rotated, scale) for h, (_, scale) in queries.items()]
        scaled += [(k, k_starts[head], 6, scale) for head, scale in keys.items()]
        for name, start, size, scale in scaled:
            whole[f"{name}.weight"].view(-1, D)[start : start + size] *= scale
            if self.biases:
                whole[f"{name}.bias"].view(-1)[start : start + size] *= scale
        return whole


def grouped(q: str, k: str, q_heads: int, k_heads: int, **options) -> Attention:
    rows, of_keys = 6 * q_heads, 6 * k_heads
    shapes = {q: (rows,), k: (of_keys,), "wv": (of_keys,)}
    heads = (q, range(0, rows, 6)), (k, range(0, of_keys, 6))
    return Attention(shapes, {"head_dim": 6}, *heads, **options)


def latent(q: str, kv: str, rope: int) -> Attention:
    rows = 4 * (6 + rope)
    shapes = {q: (rows,), kv: (4 * (6 + 5),), "wkv_a": (8,)}
    config = {"is_mla": True, "qk_nope_head_dim": 6, "qk_rope_head_dim": rope, "v_head_dim": 5}
    heads = (q, range(0, rows, 6 + rope)), (kv, range(0, 44, 11))
    return Attention(shapes, config, *heads, rope, biases=True)


def fused(name: str, axes: str, q: Sequence, k: Sequence, rows: int = 48, **options) -> Attention:
    config = {"head_dim": 6, "row_map": {name: axes}}
    return Attention({name: (rows,)}, config, (name, q), (name, k), **options)


def mapped(attention: Attention, **row_map: str) -> Attention:
    return replace(attention, config={**attention.config, "row_map": row_map})


HEADS = {"q": ("wq", range(0, 24, 6)), "k": ("wk", range(0, 12, 6))}
THREE = Attention({"wq": (4, 6), "wk": (2, 6)}, {"head_dim": 6}, **HEADS)
STARTS = {"q": (0, 6, 24, 30), "k": (12, 36)}
ATTENTIONS = {
    "multi-head": grouped("wq", "wk", 4, 4),
    "multi-head, biases": grouped("q_proj", "k_proj", 4, 4, biases=True),
    "grouped-query": grouped("q_proj", "k_proj", 8, 2, biases=True),
    "multi-query": grouped("wq", "wk", 5, 1),
    "latent": latent("wq_b", "wkv_b", 2),
    "latent, other names": latent("q_b_proj", "kv_b_proj", 4),
    "latent, whole queries": latent("wq", "wkv_b", 2),
    "latent, nothing rotated": latent("wq_b", "wkv_b", 0),
    "three dimensions": THREE,
    "three dimensions, biases": replace(THREE, biases=True),
    "fused, stacked": fused(
        "wqkv", "(q=24 + k=12 + v=12) dim", range(0, 24, 6), range(24, 36, 6), biases=True
    ),
    "fused, by axes": fused("wqkv", "(group(q=6+q=6+k=6+v=6))dim", **STARTS, biases=True),
    "fused, head by head": fused(
        "in_proj", "([head] (q=6 + k=6 + v=6)) dim", range(0, 72, 18), range(6, 72, 18), rows=72
    ),
    "other names": mapped(grouped("to_q", "to_k", 4, 4, biases=True), to_q="wq", to_k="wk"),
}


def build(attention: Attention, dtype=torch.float32, layers=1, config=None, **options):
    """An optimizer, and of each layer its parameters by name."""
    config = {"threshold": THRESHOLD, **attention.config, **(config or {})}
    of_layers = [attention.params(dtype) for _ in range(layers)]
    named = [
        (f"layers.{number}.attention.{name}", param)
        for number, params in enumerate(of_layers)
        for name, param in params.items()
    ]
    muon = [(name, p) for name, p in named if name.endswith("weight")]
    others = [(name, p) for name, p in named if name.endswith("bias")]
    optim = optimizer.Muon(
        [{"params": muon, "use_muon": True}, {"params": others, "use_muon": False}],
        **{"lr": 0.0, "clip_config": config, "expert_keys": ["wq", "wk"], **options},
    )
    for _, param in named:
        param.grad = torch.randn_like(param)
    return optim, of_layers


def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


def assert_close(params: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-6):
    for name, param in params.items():
        torch.testing.assert_close(param.detach().double(), expected[name], rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_rows_are_scaled_as_the_formula_says(kind):
    attention = ATTENTIONS[kind]
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        optim, (params,) = build(attention, dtype)
        expected, before = attention.clipped(params, attention.logits), values(params)
        optim.step(qk_logits={0: attention.logits})
        assert_close(params, expected, rtol)
        untouched = [name for name in params if "wv" in name or "wkv_a" in name]
        assert all(torch.equal(params[name], before[name]) for name in untouched)


def test_it_comes_after_the_update():
    attention = ATTENTIONS["grouped-query"]
    options = {"lr": 0.1, "ns_dtype": torch.float32, "beta2": 0.9}
    optim, (params,) = build(attention, **options)
    twin, (others,) = build(attention, **{**options, "clip_config": None})
    for name, param in params.items():
        others[name].grad = param.grad.clone()
    optim.step(qk_logits={0: attention.logits})
    twin.step()
    assert_close(params, attention.clipped(others, attention.logits))
    for name, param in params.items():
        kept = {k: v for k, v in twin.state[others[name]].items() if k != "step"}
        assert all(torch.equal(optim.state[param][key], value) for key, value in kept.items())


def test_layers_are_clipped_by_their_own_logits_and_counted():
    attention = ATTENTIONS["multi-head"]
    optim, of_layers = build(attention, layers=3, none_grad=False)
    assert optim.qk_clip_stats()["steps"] == 0
    logits = [attention.logits * scale for scale in (1, 0.01, 2)]
    expected = [attention.clipped(p, m) for p, m in zip(of_layers, logits)]
    optim.step(qk_logits=dict(enumerate(logits)))
    for params, want in zip(of_layers, expected):
        assert_close(params, want)
    stats = optim.qk_clip_stats()
    assert stats["steps"] == 1 and stats["heads"] == 12
    assert stats["max_logit"] == pytest.approx(float(torch.cat(logits).max()))
    above = [int((m > THRESHOLD).sum()) for m in logits]
    assert [stats["layers"][n]["clipped"] for n in range(3)] == above
    assert stats["clipped"] == stats["total_clipped"] == sum(above) and above[1] == 0
    assert stats["layers"][2]["max_logits"] == pytest.approx(logits[2].tolist())
    optim.step(qk_logits=dict(enumerate(logits)))
    assert optim.qk_clip_stats()["total_clipped"] == 2 * sum(above)


def test_heads_with_nan_or_inf_are_left_alone_and_counted():
    attention = ATTENTIONS["grouped-query"]
    optim, (params,) = build(attention, none_grad=False)
    logits = torch.full((8,), 2 * THRESHOLD)
    logits[0], logits[5], logits[6] = math.nan, math.inf, -math.inf
    expected = attention.clipped(params, logits)
    optim.step(qk_logits={0: logits})
    assert_close(params, expected)
    optim.step(qk_logits={0: torch.full((8,), math.nan)})
    stats = optim.qk_clip_stats()
    assert (stats["nonfinite"], stats["total_nonfinite"], stats["clipped"]) == (8, 10, 0)
    assert stats["total_clipped"] == 5
    assert all(torch.isfinite(p).all() for p in params.values())


def test_logits_of_any_size_leave_finite_weights():
    config = {"threshold": 1e-6}
    optim, (params,) = build(ATTENTIONS["grouped-query"], config=config)
    largest = torch.finfo(torch.float32).max
    optim.step(qk_logits={0: torch.tensor([largest, 1e30, 1e-7, 1.0, -largest, 0.0, 1e-6, 2.0])})
    assert all(torch.isfinite(p).all() for p in params.values())


@pytest.mark.filterwarnings("ignore:clip_config is given")
@pytest.mark.parametrize("logits", [[0.0] * 4, [-3.0] * 4, [THRESHOLD] * 4, None])
def test_logits_up_to_the_threshold_change_no_bit(logits):
    optim, (params,) = build(ATTENTIONS["multi-head, biases"])
    before = values(params)
    optim.step(qk_logits={0: logits})
    assert all(torch.equal(p, before[name]) for name, p in params.items())


@pytest.mark.parametrize("keys", [{"k_indices": [0, 0, 1]}, {}], ids=["listed", "as paired"])
def test_listed_heads_only_and_the_strongest_of_several(keys):
    attention = ATTENTIONS["grouped-query"]
    optim, (params,) = build(attention, config={"q_indices": [1, 1, 6], **keys})
    before = values(params)
    optim.step(qk_logits={0: [12.0, 24.0, 54.0]})
    q, k = (params[f"{name}.weight"] / before[f"{name}.weight"] for name in ("q_proj", "k_proj"))
    want_q, want_k = torch.ones(8), torch.tensor([0.5, 1 / 3])
    want_q[1], want_q[6] = 0.5, 1 / 3
    torch.testing.assert_close(q, want_q.repeat_interleave(6)[:, None].expand_as(q))
    torch.testing.assert_close(k, want_k.repeat_interleave(6)[:, None].expand_as(k))


@pytest.mark.parametrize(("empty", "clipped"), [("k_indices", "q_proj"), ("q_indices", "k_proj")])
def test_only_queries_or_only_keys_where_one_list_is_empty(empty, clipped):
    config = {"q_indices": range(4), "k_indices": range(4), empty: []}
    optim, (params,) = build(ATTENTIONS["multi-head, biases"], config=config)
    before = values(params)
    optim.step(qk_logits={0: torch.full((4,), 4 * THRESHOLD)})
    for key, param in params.items():
        torch.testing.assert_close(param.detach(), before[key] * (0.5 if clipped in key else 1.0))


# Which layers


def projections(*prefixes: str, rows: int = 8) -> list:
    names = [f"{prefix}.{kind}.weight" for prefix in prefixes for kind in ("q_proj", "k_proj")]
    return ones(dict.fromkeys(names, (rows, 4)))


def ones(shapes: dict[str, tuple[int, ...]]) -> list:
    named = [(name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]
    for _, param in named:
        param.grad = torch.zeros_like(param)
    return named


def muon(named, **options):
    return optimizer.Muon([{"params": named, "use_muon": True}], **{"lr": 0.0, **options})


HIGH, LOW = [4 * THRESHOLD] * 4, [0.0] * 4  # halves every row, and none
CONFIG = {"head_dim": 2, "threshold": THRESHOLD}


def halved(named) -> set[str]:
    return {name.rpartition(".")[0].rpartition(".")[0] for name, p in named if (p == 0.5).all()}


WRAPPED = ["module.layers.3._orig_mod.attn", "layers.10.attn"]
CODERS = ["encoder.layers.0.attn", "decoder.layers.0.attn", "decoder.layers.0.cross"]
THREE_LAYERS = ["layers.0.attn", "layers.1.attn", "layers.2.attn"]
TOWERS = ["vision.layers.0.attn", *(f"language.layers.{number}.attn" for number in range(3))]
OF_TOWERS = {"vision": HIGH, "language.layers.0": HIGH, 1: HIGH, 2: HIGH}
ALL_HIGH = dict.fromkeys(range(3), HIGH)
ALL_LOW = dict.fromkeys(CODERS, LOW)


@pytest.mark.parametrize(
    ("prefixes", "config", "logits", "clipped"),
    [
        (WRAPPED, {3: CONFIG}, {3: HIGH}, WRAPPED[:1]),
        (WRAPPED, {3: CONFIG}, {"layers.3": HIGH}, WRAPPED[:1]),
        (WRAPPED, {3: CONFIG}, {"layers.3.attn": HIGH}, WRAPPED[:1]),
        (WRAPPED, {3: CONFIG}, {"module.layers.3.attn": HIGH}, WRAPPED[:1]),
        (CODERS, CONFIG, {**ALL_LOW, CODERS[0]: HIGH}, CODERS[:1]),
        (CODERS, CONFIG, {"encoder": HIGH, CODERS[1]: LOW, CODERS[2]: HIGH}, CODERS[::2]),
        (THREE_LAYERS, {0: CONFIG, "layers.1": CONFIG, 2: None}, ALL_HIGH, THREE_LAYERS[:2]),
        (TOWERS, {"language": CONFIG}, OF_TOWERS, TOWERS[1:]),
        (TOWERS, {"language": None, "language.layers.1": CONFIG}, OF_TOWERS, TOWERS[2:3]),
    ],
)  # fmt: skip
def test_layers_are_told_by_number_or_by_prefix(prefixes, config, logits, clipped):
    named = projections(*prefixes)
    optim = muon(named, clip_config=config)
    optim.step(qk_logits=logits)
    assert halved(named) == set(clipped)
    assert prefixes is not CODERS or set(optim.qk_clip_stats()["layers"]) == set(prefixes)


@pytest.mark.parametrize("apart", [{}, {"kdim": 3, "vdim": 5}], ids=["fused", "apart"])
def test_weights_that_are_called_by_their_projection(apart):
    """As those of nn.MultiheadAttention, whose bias is fused even where its weights are not."""
    shapes = {name: p.shape for name, p in nn.MultiheadAttention(4, 2, **apart).named_parameters()}
    named = ones({f"layers.0.{name}": shape for name, shape in shapes.items()})
    groups = [
        {"params": [(n, p) for n, p in named if (p.ndim > 1) is muon], "use_muon": muon}
        for muon in (True, False)
    ]
    config = {**CONFIG, "row_map": {"in_proj": "(q=4 + k=4 + v=4) dim"}}
    optimizer.Muon(groups, lr=0.0, clip_config=config).step(qk_logits={0: HIGH[:2]})
    for name, p in named:
        is_scaled = any(f".{kind}_proj" in name for kind in ("in", "q", "k"))
        expected = torch.ones_like(p)
        expected[: min(8, len(p)) if is_scaled else 0] = 0.5
        assert torch.equal(p, expected), name


def test_attentions_of_other_names_in_one_block_are_layers_of_their_own():
    cross = projections("decoder.layers.0.cross")
    ((name, fused),) = ones({"decoder.layers.0.self.qkv.weight": (24, 4)})
    config = {**CONFIG, "row_map": {"qkv": "(q=8 + k=8 + v=8) dim"}}
    optim = muon([(name, fused), *cross], clip_config=config)
    optim.step(qk_logits={"decoder.layers.0.self": HIGH, "decoder.layers.0.cross": LOW})
    assert (fused[:16] == 0.5).all() and (fused[16:] == 1).all() and not halved(cross)
    apart = ones({"layers.0.queries.wq.weight": (8, 4), "layers.0.keys.wk.weight": (8, 4)})
    muon(apart, clip_config=CONFIG).step(qk_logits={0: HIGH})
    assert all((p == 0.5).all() for _, p in apart)


def test_convolutions_have_their_rows_first():
    named = ones({"layers.0.q_proj.weight": (8, 4, 3), "layers.0.k_proj.weight": (8, 4, 1, 1)})
    muon(named, clip_config=CONFIG, flatten=True).step(qk_logits={0: [*HIGH[:3], 0.0]})
    for _, p in named:
        assert (p[:6] == 0.5).all() and (p[6:] == 1).all()


def test_only_query_and_key_projections_are_clipped():
    """Values, outputs, latents, norms, adapters, a parametrized weight."""
    names = ["v_proj.weight", "wo.weight", "wq_a.weight", "wkv_a.weight", "q_proj.lora_A.weight"]
    names += ["q_norm2.weight", "k_proj.parametrizations.weight.original1", "q_projector.weight"]
    named = projections("layers.0.attn")
    others = ones({f"layers.0.attn.{name}": (8, 4) for name in names})
    muon(named + others, clip_config=CONFIG).step(qk_logits={0: HIGH})
    assert all((p == 1).all() for _, p in others) and all((p == 0.5).all() for _, p in named)


def test_what_the_step_does_not_update_is_not_clipped():
    named = projections("layers.0.attn")
    named[1][1].grad = None
    muon(named, clip_config=CONFIG).step(qk_logits={0: HIGH})
    assert (named[0][1] == 0.5).all() and (named[1][1] == 1).all()


def test_projections_that_adamw_trains_are_clipped_too():
    named = projections("layers.0.attn")
    optim = optimizer.Muon([{"params": named, "use_muon": False}], lr=0.0, clip_config=CONFIG)
    optim.step(qk_logits={0: HIGH})
    assert halved(named) == {"layers.0.attn"}


# Where logits come from


class Recorder:
    def __init__(self, *logits):
        self.logits = list(logits)

    def take(self):
        return self.logits.pop(0) if self.logits else None


def recorded_by(optim, *logits):
    optim.qk_recorder = Recorder(*logits)
    return optim


def test_given_logits_count_before_set_ones_before_recorded_ones():
    named = projections("layers.0.attn")
    optim = muon(named, clip_config=CONFIG, none_grad=False)
    recorded_by(optim, {0: [1.0] * 4}, {0: [1.0] * 4}, {0: HIGH})
    optim.set_qk_logits({0: HIGH})
    optim.step(qk_logits={0: LOW})
    assert optim.qk_clip_stats()["max_logit"] == 0.0
    optim.set_qk_logits({0: LOW})
    optim.step()
    assert optim.qk_clip_stats()["max_logit"] == 0.0
    optim.step()
    assert optim.qk_clip_stats()["max_logit"] == HIGH[0]
    assert halved(named) == {"layers.0.attn"}
    optim.qk_recorder = None
    with pytest.raises(ValueError, match="qk_recorder"):
        optim.qk_recorder = object()


def test_a_closure_records_what_the_step_takes():
    named = projections("layers.0.attn")
    named[0][1].grad.fill_(1.0)
    optim = recorded_by(muon(named, clip_config=CONFIG))
    optim.step(lambda: optim.qk_recorder.logits.append({0: HIGH}))
    assert halved(named) == {"layers.0.attn"}


OTHERS_TRAINED = {"layers.0.attn": HIGH, "layers.1.attn": LOW}


@pytest.mark.parametrize(
    ("recorded", "match"),
    [
        ([], "qk_logits"),
        ([{1: None}, {1: None}], "qk_recorder"),
        ([OTHERS_TRAINED, OTHERS_TRAINED], r"'layers\.0\.attn'"),
    ],
    ids=["none", "of another model", "of a layer that is not recognized"],
)
def test_logits_that_clip_nothing_warn_once(recorded, match):
    named = [*ones({"layers.0.attn.query.weight": (8, 4)}), *projections("layers.1.attn")]
    optim = muon(named, clip_config=CONFIG, lr=0.1, none_grad=False)
    if recorded:
        recorded_by(optim, *recorded)
    with pytest.warns(UserWarning, match=match) as caught:
        optim.step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.step()
        muon(projections("layers.0.attn"), lr=0.1).step()


def test_recorded_logits_of_layers_that_are_not_trained_are_passed_over():
    named = projections("layers.1.attn")
    optim = muon(named, clip_config=CONFIG, none_grad=False)
    optim.step(qk_logits={1: LOW})  # a first step of zeros clips nothing that was recorded
    recorded_by(optim, {"layers.0.attn": HIGH, "layers.1.attn": HIGH}).step()
    assert halved(named) == {"layers.1.attn"}


@pytest.mark.parametrize(
    "convert",
    [list, tuple, nn.Parameter]
    + [lambda t, d=d: t.to(d) for d in (torch.bfloat16, torch.float64, torch.int32)],
)
def test_numbers_of_many_kinds_are_logits(convert):
    named, given = projections("layers.0.attn"), torch.tensor(HIGH)
    muon(named, clip_config=CONFIG).step(qk_logits={0: convert(given)})
    assert halved(named) == {"layers.0.attn"}
    assert given.tolist() == HIGH  # read, not written


def test_other_default_dtypes_change_nothing():
    named, config = projections("layers.0.attn"), {"head_dim": 2, "threshold": 99.7}
    torch.set_default_dtype(torch.bfloat16)
    try:
        muon(named, clip_config=config).step(qk_logits={0: torch.full((4,), 99.6).float()})
    finally:
        torch.set_default_dtype(torch.float32)
    assert all((p == 1).all() for _, p in named)


# What is refused

MLA = {"is_mla": True, "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 2}
WRONG_CONFIGS = [
    ([1], "clip_config"),
    ({"head_dims": 2, "threshold": 1}, "'head_dims'.*'head_dim'"),
    ({"threshold": 1}, "head_dim.*None"),
    ({"head_dim": 3}, r"layers\.0\.attn\.q_proj\.weight.*head_dim=3"),
    ({"head_dim": 2, "threshold": 0}, "threshold.*0"),
    ({"head_dim": 2, "q_indices": 4}, "q_indices"),
    ({"head_dim": 2, "q_indices": [-1]}, "q_indices"),
    ({"head_dim": 2, "q_indices": [0, 4]}, r"q_indices.*head 4.*layers\.0\.attn"),
    ({"head_dim": 2, "k_indices": [0, 1, 2, 9]}, r"k_indices.*head 9.*layers\.0\.attn"),
    ({"head_dim": 2, "k_indices": [0, 1]}, "k_indices.* 2 key heads.* 4 query heads"),
    ({"head_dim": 2, "q_indices": [0, 1], "k_indices": [0]}, "1 key heads.* 2 query heads"),
    ({"head_dim": 2, "qk_nope_head_dim": 2}, "qk_nope_head_dim.*is_mla"),
    ({"is_mla": True, "qk_nope_head_dim": 2}, "qk_rope_head_dim.*None"),
    ({"is_mla": 1}, "is_mla.*1"),
    (MLA, r"q_proj\.weight.*qk_nope_head_dim \+ qk_rope_head_dim=3"),
    ({**MLA, "qk_nope_head_dim": 1}, r"is_mla.*layers\.0\.attn\.k_proj"),
    ({"head_dim": 2, "row_map": []}, "row_map"),
    ({"head_dim": 2, "row_map": {"x": "wz"}}, r"row_map\['x'\].*'wz'"),
    ({"head_dim": 2, "row_map": {"x": "(q k"}}, r"row_map\['x'\].*'\('"),
    ({"head_dim": 2, "row_map": {"q_proj": "(q=3 + k=5) d"}}, "q_proj.*'q'.* 2"),
    ({"head_dim": 2, "row_map": {"q_proj": "(q=3 + k=6) d"}}, "q_proj.*9"),
    ({"head_dim": 2, "row_map": {"q_proj": "(a=3 + b=5) d"}}, "q_proj.*'q'.*'k'"),
    ({"head_dim": 2, "row_map": {"q_proj": "(q (k=2)) d"}}, "q_proj"),
    ({"head_dim": 2, "row_map": {"x": {"query": [0]}}}, r"row_map\['x'\]"),
    ({0: 3}, r"clip_config\[0\].*3"),
    ({1.5: CONFIG}, r"clip_config.*1\.5"),
    ({"layers.0": {"head_dim": 3}}, r"q_proj\.weight.*head_dim=3"),
]


@pytest.mark.parametrize(("config", "match"), WRONG_CONFIGS, ids=range(len(WRONG_CONFIGS)))
def test_wrong_configs_raise_at_once(config, match):
    with pytest.raises(ValueError, match=match):
        muon(projections("layers.0.attn"), clip_config=config)


def row(**rows: int) -> dict[str, tuple[int, ...]]:
    return {f"layers.0.attn.{key.replace('__', '.')}": (count, 4) for key, count in rows.items()}


Q, K, BOTH = row(q_proj__weight=8), row(k_proj__weight=8), row(q_proj__weight=8, k_proj__weight=8)
FIRST = {**CONFIG, "q_indices": [0], "k_indices": [0]}
BIAS, NORM = {"layers.0.attn.q_proj.bias": (4,)}, {"layers.0.attn.q_norm.weight": (2,)}


@pytest.mark.parametrize(
    ("matrices", "others", "config", "match"),
    [
        ({**Q, **row(k_proj__weight=6)}, {}, CONFIG, r"4 query heads of layers\.0\.attn.* 3 key"),
        (K, {}, CONFIG, "q_indices and k_indices"),
        ({**BOTH, **row(wq__weight=8)}, {}, CONFIG, r"attn\.wq|attn\.q_proj"),
        (BOTH, BIAS, CONFIG, r"q_proj\.bias.* 2 heads.* 4"),
        (K, BIAS, FIRST, r"q_proj\.bias"),
        (row(wkv_b__weight=8), {}, CONFIG, r"wkv_b.*latent"),
    ],
)  # fmt: skip
def test_projections_that_do_not_fit_each_other_raise(matrices, others, config, match):
    groups = [{"params": ones(matrices), "use_muon": True}]
    groups.append({"params": ones(others), "use_muon": False})
    with pytest.raises(ValueError, match=match):
        optimizer.Muon(groups, clip_config=config)


@pytest.mark.parametrize(
    ("matrices", "others", "config", "match"),
    [
        (BOTH, [nn.Parameter(torch.ones(8))], CONFIG, r"param_groups\[1\].*names"),
        (row(wo__weight=8), [], CONFIG, "projection"),
        (BOTH, ones(NORM), CONFIG, r"q_norm\.weight"),
        (BOTH, [], {"layer": CONFIG, 0: CONFIG}, "'layer'"),
    ],
    ids=["no names of biases", "no projections", "a norm", "no such layer"],
)
def test_traps_are_warned_of(matrices, others, config, match):
    groups = [{"params": ones(matrices), "use_muon": True}]
    with pytest.warns(UserWarning, match=match):
        optimizer.Muon([*groups, {"params": others, "use_muon": False}], clip_config=config)


def test_groups_that_are_added_have_to_fit():
    with pytest.raises(ValueError, match=r"param_groups\[0\].*names"):
        muon([p for _, p in ones(BOTH)], clip_config=CONFIG)
    optim = muon(ones(BOTH), clip_config=CONFIG)
    for params, options, match in (
        ([nn.Parameter(torch.ones(4, 4))], {}, r"param_groups\[1\].*names"),
        (ones({"layers.1.attn.q_proj.weight": (5, 4)}), {}, r"layers\.1\.attn\.q_proj"),
        ([], {"clip_config": CONFIG}, "clip_config"),
    ):
        with pytest.raises(ValueError, match=match):
            optim.add_param_group({"params": params, "use_muon": True, **options})
    assert len(optim.param_groups) == 1


ONE = ["layers.0.attn"]
WRONG_LOGITS = [
    (ONE, [HIGH], "qk_logits"),
    (ONE, {1: HIGH}, "qk_logits has 1.* 0"),
    (ONE, {"layer": HIGH}, "qk_logits has 'layer'"),
    (ONE, {None: HIGH}, "qk_logits has None"),
    (ONE, {}, "qk_logits lacks layers 0"),
    ([f"layers.{n}.attn" for n in range(9)], {}, "lacks layers 0, .*, 7 and 1 more"),
    (ONE, {0: HIGH, "layers.0.attn": HIGH}, r"'layers\.0\.attn' twice"),
    (ONE, {0: HIGH[:3]}, r"layer 0.*\(3,\).*\(4,\)"),
    (ONE, {0: torch.ones(2, 4)}, r"layer 0.*\(2, 4\)"),
    (ONE, {0: torch.tensor(3.0)}, r"layer 0.*\(\)"),
    (ONE, {0: 5.0j}, "layer 0.*5j"),
    (ONE, {0: "1234"}, "'1234'"),
    (ONE, {0: torch.ones(4, dtype=torch.complex64)}, "complex64"),
    (ONE, {0: torch.ones(4, dtype=torch.bool)}, "bool"),
    (ONE, {0: torch.ones(4, device="meta")}, "meta.*cpu"),
    (CODERS, {0: HIGH}, r"'encoder\.layers\.0\.attn', 'decoder"),
    (CODERS, {"encoder": HIGH, "decoder": HIGH}, r"'decoder\.layers\.0\.attn', 'decoder"),
    (["model.layers.0.attn"], Recorder({"layers.0.attn": HIGH}), r"'layers\.0\.attn'.*'model\."),
    (["layers.1.attn"], Recorder({"layers.0.attn": HIGH}), "qk_logits lacks layers 1"),
]


@pytest.mark.parametrize(("prefixes", "logits", "match"), WRONG_LOGITS)
def test_wrong_logits_raise_before_anything_changed(prefixes, logits, match):
    named = projections(*prefixes)
    optim = muon(named, clip_config=CONFIG, lr=0.1)
    if isinstance(logits, Recorder):
        optim.qk_recorder, logits = logits, None
    with pytest.raises(ValueError, match=match):
        optim.step(qk_logits=logits)
    assert all((p == 1).all() for _, p in named) and not optim.state
    assert all(p.grad is not None for _, p in named)


def test_logits_without_a_config_raise():
    optim = muon(projections("layers.0.attn"))
    with pytest.raises(ValueError, match="clip_config"):
        optim.step(qk_logits={0: HIGH})


# Beside the rest


def test_copies_and_pickles_clip_as_well():
    named = projections("layers.0.attn")
    optim = recorded_by(muon(named, clip_config=CONFIG, none_grad=False), {0: LOW})
    optim.step()
    for twin in (copy.deepcopy(optim), pickle.loads(pickle.dumps(optim))):
        assert twin.qk_recorder is None
        params = twin.param_groups[0]["params"]
        for param in params:
            param.grad = torch.zeros_like(param)
        twin.step(qk_logits={0: HIGH})
        assert all((p == 0.5).all() for p in params)


def test_parameters_swapped_after_construction_are_clipped():
    """As accelerate does it."""
    named, swapped = projections("layers.0.attn"), projections("layers.0.attn")
    optim = muon(named, clip_config=CONFIG)
    optim.param_groups[0]["params"] = [p for _, p in swapped]
    optim.step(qk_logits={0: HIGH})
    assert halved(swapped) == {"layers.0.attn"} and not halved(named)


def test_the_summary_tells_what_is_clipped():
    optim, _ = build(ATTENTIONS["grouped-query"])
    rows = {row["name"].rpartition("attention.")[2]: row for row in optim.summary().rows}
    clipped = {name for name, row in rows.items() if row["clipped"]}
    assert clipped == {"q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"}
    assert "QK-Clip" in str(optim.summary())


def operations(layers: int, heads: int) -> int:
    """Those of a step that are for clipping."""
    named = projections(*(f"layers.{number}.attn" for number in range(layers)), rows=2 * heads)
    optim = muon(named, clip_config=CONFIG, none_grad=False)
    logits = {number: torch.full((heads,), 2 * THRESHOLD) for number in range(layers)}
    optim.step(qk_logits=logits)
    with_clip, without = (count(lambda: optim.step(qk_logits=m)).operations for m in (logits, None))  # noqa: B023
    return with_clip - without


@pytest.mark.filterwarnings("ignore:clip_config is given")
def test_what_clipping_costs_does_not_depend_on_the_number_of_heads():
    few = operations(2, 2)
    assert operations(2, 64) == few
    assert (operations(12, 2) - few) / 10 <= 16  # for each further layer, most of them views
