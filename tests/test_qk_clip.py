"""QK-Clip on one device, against float64: kinds of attention, names, errors, what is left alone."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import reference
from counters import count
from kernel import optimizer
from layouts import set_gradients

pytestmark = pytest.mark.usefixtures("one_thread")

Host = optimizer.SimulatedHost

D, TOKENS, THRESHOLD = 24, 40, 6.0


@dataclass
class Attention:
    """An attention's projections by what follows its prefix, and how to read heads from them.

    Args:
        shapes: of the parameters, without the columns.
        config: of QK-Clip, without a threshold.
        q_rows, k_rows: for each head the parameter, and its rows without rotation.
        q_rotated: rows of the query heads with it; the rotated key is not Muon's here.
        pairs: query head and key head of each logit.
    """

    shapes: dict[str, tuple[int, ...]]
    config: dict
    q_rows: list[tuple[str, range]]
    k_rows: list[tuple[str, range]]
    q_rotated: list[tuple[str, range]] = field(default_factory=list)
    biases: bool = False

    @property
    def pairs(self) -> list[tuple[int, int]]:
        group = len(self.q_rows) // len(self.k_rows)
        return [(head, head // group) for head in range(len(self.q_rows))]

    def params(self, dtype: torch.dtype) -> dict[str, nn.Parameter]:
        generator = torch.Generator().manual_seed(len(self.q_rows))
        made = {}
        for name, rows in self.shapes.items():
            made[f"{name}.weight"] = torch.randn(*rows, D, generator=generator)
            if self.biases:
                made[f"{name}.bias"] = torch.randn(rows, generator=generator)
        return {name: nn.Parameter(tensor.to(dtype)) for name, tensor in made.items()}

    def logits(self, params: dict[str, Tensor]) -> Tensor:
        """The largest q·k of each query head, in float64."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(TOKENS, D, generator=generator, dtype=torch.float64)
        rotary_key = torch.randn(TOKENS, 8, generator=generator, dtype=torch.float64)

        def project(head: tuple[str, range]) -> Tensor:
            name, rows = head
            weight = params[f"{name}.weight"].detach().double().reshape(-1, D)[rows]
            projected = x @ weight.T
            if self.biases:
                projected = projected + params[f"{name}.bias"].detach().double().flatten()[rows]
            return projected

        found = []
        for q, k in self.pairs:
            scores = project(self.q_rows[q]) @ project(self.k_rows[k]).T
            if self.q_rotated:
                rotated = project(self.q_rotated[q])
                scores = scores + rotated @ rotary_key[:, : rotated.shape[1]].T
            found.append(scores.max() / math.sqrt(len(self.q_rows[0][1])))
        return torch.stack(found)

    def clipped(self, params: dict[str, Tensor], logits: Tensor) -> dict[str, Tensor]:
        """What QK-Clip makes of the parameters, in float64, head by head."""
        whole = {name: p.detach().double().clone() for name, p in params.items()}
        queries, keys = reference.qk_scales(logits, THRESHOLD, *zip(*self.pairs))
        scaled = [(self.q_rows[h], plain) for h, (plain, _) in queries.items()]
        scaled += [(self.k_rows[h], scale) for h, scale in keys.items()]
        if self.q_rotated:
            scaled += [(self.q_rotated[h], rotated) for h, (_, rotated) in queries.items()]
        for (name, rows), scale in scaled:
            whole[f"{name}.weight"].view(-1, D)[rows] *= scale
            if self.biases:
                whole[f"{name}.bias"].view(-1)[rows] *= scale
        return whole


def heads(name: str, count: int, size: int, stride: int = 0, first: int = 0) -> list:
    stride = stride or size
    return [(name, range(first + h * stride, first + h * stride + size)) for h in range(count)]


def grouped(q: str, k: str, q_heads: int, k_heads: int, **options) -> Attention:
    return Attention(
        {q: (q_heads * 6,), k: (k_heads * 6,), "wv": (k_heads * 6,)},
        {"head_dim": 6},
        heads(q, q_heads, 6),
        heads(k, k_heads, 6),
        **options,
    )


def latent(q: str, kv: str, rope: int) -> Attention:
    return Attention(
        {q: (4 * (6 + rope),), kv: (4 * (6 + 5),), "wkv_a": (8,)},
        {"is_mla": True, "qk_nope_head_dim": 6, "qk_rope_head_dim": rope, "v_head_dim": 5},
        heads(q, 4, 6, stride=6 + rope),
        heads(kv, 4, 6, stride=11),
        heads(q, 4, rope, stride=6 + rope, first=6) if rope else [],
        biases=True,
    )


ATTENTIONS = {
    "multi-head": grouped("wq", "wk", 4, 4),
    "multi-head, biases": grouped("q_proj", "k_proj", 4, 4, biases=True),
    "grouped-query": grouped("q_proj", "k_proj", 8, 2, biases=True),
    "multi-query": grouped("wq", "wk", 5, 1),
    "latent": latent("wq_b", "wkv_b", 2),
    "latent, other names": latent("q_b_proj", "kv_b_proj", 4),
    "latent, whole queries": latent("wq", "wkv_b", 2),
    "latent, nothing rotated": latent("wq_b", "wkv_b", 0),
    "three dimensions": Attention(
        {"wq": (4, 6), "wk": (2, 6)}, {"head_dim": 6}, heads("wq", 4, 6), heads("wk", 2, 6)
    ),
    "three dimensions, biases": Attention(
        {"wq": (4, 6), "wk": (4, 6)},
        {"head_dim": 6},
        heads("wq", 4, 6),
        heads("wk", 4, 6),
        biases=True,
    ),
    "fused, stacked": Attention(
        {"wqkv": (48,)},
        {"head_dim": 6, "row_map": {"wqkv": "(q=24 + k=12 + v=12) dim"}},
        heads("wqkv", 4, 6),
        heads("wqkv", 2, 6, first=24),
        biases=True,
    ),
    "fused, by axes": Attention(
        {"wqkv": (48,)},
        {"head_dim": 6, "row_map": {"wqkv": "(group(q=6+q=6+k=6+v=6))dim"}},
        [("wqkv", range(start, start + 6)) for start in (0, 6, 24, 30)],
        [("wqkv", range(start, start + 6)) for start in (12, 36)],
        biases=True,
    ),
    "fused, head by head by axes": Attention(
        {"in_proj": (72,)},
        {"head_dim": 6, "row_map": {"in_proj": "([head] (q=6 + k=6 + v=6)) dim"}},
        [("in_proj", range(start, start + 6)) for start in range(0, 72, 18)],
        [("in_proj", range(start, start + 6)) for start in range(6, 72, 18)],
    ),
    "other names": Attention(
        {"to_q": (24,), "to_k": (24,)},
        {"head_dim": 6, "row_map": {"to_q": "wq", "to_k": "wk"}},
        heads("to_q", 4, 6),
        heads("to_k", 4, 6),
        biases=True,
    ),
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


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_rows_are_scaled_as_the_formula_says(kind):
    attention = ATTENTIONS[kind]
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        optim, (params,) = build(attention, dtype)
        logits = attention.logits(params)
        assert bool((logits > THRESHOLD).any()), "the case clips nothing"
        expected = attention.clipped(params, logits)
        before = {name: p.detach().clone() for name, p in params.items()}
        optim.step(qk_logits={0: logits})
        for name, param in params.items():
            torch.testing.assert_close(param.detach().double(), expected[name], rtol=rtol, atol=0)
        untouched = [name for name in params if "wv" in name or "wkv_a" in name]
        assert all(torch.equal(params[name], before[name]) for name in untouched)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_afterwards_the_largest_logits_are_at_the_threshold(kind):
    attention = ATTENTIONS[kind]
    optim, (params,) = build(attention)
    before = attention.logits(params)
    optim.step(qk_logits={0: before.float()})
    after = attention.logits(params)
    is_above = before > THRESHOLD
    if len(attention.k_rows) < len(attention.q_rows):
        strongest = torch.zeros_like(is_above)  # others of their key head are clipped further
        for key in range(len(attention.k_rows)):
            of_key = [q for q, k in attention.pairs if k == key]
            strongest[max(of_key, key=lambda q: before[q])] = True
        assert (after[is_above] <= THRESHOLD * (1 + 1e-4)).all()
        is_above &= strongest
    assert is_above.any()
    expected = torch.full_like(after[is_above], THRESHOLD)
    torch.testing.assert_close(after[is_above], expected, rtol=1e-4, atol=0)


def test_it_comes_behind_the_update():
    attention = ATTENTIONS["grouped-query"]
    options = {"lr": 0.1, "ns_dtype": torch.float32, "beta2": 0.9}
    optim, (params,) = build(attention, **options)
    twin, (others,) = build(attention, **{**options, "clip_config": None})
    for name, param in params.items():
        others[name].grad = param.grad.clone()
    logits = attention.logits(params)
    optim.step(qk_logits={0: logits})
    twin.step()
    expected = attention.clipped(others, logits)
    for name, param in params.items():
        torch.testing.assert_close(param.detach().double(), expected[name], rtol=1e-6, atol=1e-9)
        momentum = {"momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq"}
        for key in momentum & optim.state[param].keys():
            assert torch.equal(optim.state[param][key], twin.state[others[name]][key])


def test_layers_are_clipped_by_their_own_logits_and_counted():
    attention = ATTENTIONS["multi-head"]
    optim, of_layers = build(attention, layers=3, none_grad=False)
    assert optim.qk_clip_stats()["steps"] == 0
    logits = [attention.logits(params) * scale for params, scale in zip(of_layers, (1, 0.01, 2))]
    expected = [attention.clipped(p, m) for p, m in zip(of_layers, logits)]
    optim.step(qk_logits=dict(enumerate(logits)))
    for params, want in zip(of_layers, expected):
        for name, param in params.items():
            torch.testing.assert_close(param.detach().double(), want[name], rtol=1e-6, atol=0)
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
    for name, param in params.items():
        torch.testing.assert_close(param.detach().double(), expected[name], rtol=1e-6, atol=0)
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
    before = {name: p.detach().clone() for name, p in params.items()}
    optim.step(qk_logits={0: logits})
    assert all(torch.equal(p, before[name]) for name, p in params.items())


def test_listed_heads_only_and_the_strongest_of_several():
    attention = ATTENTIONS["grouped-query"]
    config = {"q_indices": [1, 1, 6], "k_indices": [0, 0, 1]}
    optim, (params,) = build(attention, config=config)
    before = {name: p.detach().clone() for name, p in params.items()}
    optim.step(qk_logits={0: [12.0, 24.0, 54.0]})
    q, k = (params[f"{name}.weight"] / before[f"{name}.weight"] for name in ("q_proj", "k_proj"))
    want_q, want_k = torch.ones(8), torch.tensor([0.5, 1 / 3])
    want_q[1], want_q[6] = 0.5, 1 / 3
    torch.testing.assert_close(q, want_q.repeat_interleave(6)[:, None].expand_as(q))
    torch.testing.assert_close(k, want_k.repeat_interleave(6)[:, None].expand_as(k))


def test_only_queries_or_only_keys_where_one_list_is_empty():
    for config, name in (({"k_indices": []}, "q_proj"), ({"q_indices": []}, "k_proj")):
        attention = ATTENTIONS["multi-head, biases"]
        full = {"q_indices": range(4), "k_indices": range(4), **config}
        optim, (params,) = build(attention, config=full)
        before = {key: p.detach().clone() for key, p in params.items()}
        optim.step(qk_logits={0: torch.full((4,), 4 * THRESHOLD)})
        for key, param in params.items():
            scale = 0.5 if key.startswith(name) else 1.0
            torch.testing.assert_close(param.detach(), scale * before[key])


# -- which layers ------------------------------------------------------------------------------


def projections(*prefixes: str, rows: int = 8) -> list:
    named = [
        (f"{prefix}.{kind}.weight", nn.Parameter(torch.ones(rows, 4)))
        for prefix in prefixes
        for kind in ("q_proj", "k_proj")
    ]
    for _, param in named:
        param.grad = torch.zeros_like(param)
    return named


def muon(named, **options):
    group = {"params": [p for _, p in named], "names": [n for n, _ in named], "use_muon": True}
    return optimizer.Muon([group], **{"lr": 0.0, **options})


HIGH = [4 * THRESHOLD] * 4  # halves every row
CONFIG = {"head_dim": 2, "threshold": THRESHOLD}


def halved(named) -> set[str]:
    return {name.rpartition(".")[0].rpartition(".")[0] for name, p in named if (p == 0.5).all()}


def test_layers_are_told_by_number_or_by_prefix_through_wrappers():
    named = projections("module.layers.3._orig_mod.attention", "layers.10.attention")
    for key in (3, "layers.3", "layers.3.attention", "module.layers.3.attention"):
        optim = muon(named, clip_config={3: CONFIG})
        optim.step(qk_logits={key: HIGH})
        assert halved(named) == {"module.layers.3._orig_mod.attention"}
        for _, p in named:
            p.data.fill_(1.0)
            p.grad = torch.zeros_like(p)


def test_an_encoder_and_a_decoder_are_told_by_prefixes():
    prefixes = ["encoder.layers.0.attn", "decoder.layers.0.attn", "decoder.layers.0.cross"]
    named = projections(*prefixes)
    optim = muon(named, clip_config=CONFIG)
    optim.step(qk_logits={"encoder": HIGH, prefixes[1]: [0.0] * 4, prefixes[2]: HIGH})
    assert halved(named) == {prefixes[0], prefixes[2]}
    assert set(optim.qk_clip_stats()["layers"]) == set(prefixes)
    with pytest.raises(ValueError, match=r"may be any of 'encoder.layers.0.attn', 'decoder"):
        optim.step(qk_logits={0: HIGH})
    with pytest.raises(ValueError, match=r"may be any of 'decoder.layers.0.attn', 'decoder"):
        optim.step(qk_logits={"decoder": HIGH})


def test_layers_have_configs_of_their_own_or_none():
    named = projections("layers.0.attn", "layers.1.attn", "layers.2.attn")
    config = {0: {"head_dim": 4, "threshold": 1.0}, "layers.1": CONFIG, 2: None}
    optim = muon(named, clip_config=config)
    optim.step(qk_logits={0: [4.0, 0.0], 1: HIGH, 2: HIGH})
    q = named[0][1]
    assert (q[:4] == 0.5).all() and (q[4:] == 1.0).all()
    assert halved(named) == {"layers.1.attn"}


def test_layers_are_named_by_prefixes_where_numbers_are_not_enough():
    prefixes = ["vision.layers.0.attn", *(f"language.layers.{number}.attn" for number in range(3))]
    named = projections(*prefixes)
    optim = muon(named, clip_config={"language": CONFIG})
    optim.step(qk_logits={"vision": HIGH, "language.layers.0": HIGH, 1: HIGH, 2: HIGH})
    assert halved(named) == set(prefixes[1:])
    with pytest.warns(UserWarning, match="no layer was found for 'langauge'"):
        muon(projections(*prefixes), clip_config={"langauge": CONFIG, "vision": CONFIG})


def test_weights_that_are_called_by_their_projection():
    """As those of nn.MultiheadAttention, fused and apart."""
    fused = nn.MultiheadAttention(4, 2)
    apart = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    for attention in (fused, apart):  # whose bias is fused even so
        named = [(f"layers.0.{name}", p) for name, p in attention.named_parameters()]
        for _, p in named:
            p.data.fill_(1.0)
            p.grad = torch.zeros_like(p)
        groups = [
            {"params": [(n, p) for n, p in named if (p.ndim > 1) is muon], "use_muon": muon}
            for muon in (True, False)
        ]
        rows = {"in_proj": "(q=4 + k=4 + v=4) dim"}
        config = {"head_dim": 2, "threshold": THRESHOLD, "row_map": rows}
        optim = optimizer.Muon(groups, lr=0.0, clip_config=config)
        optim.step(qk_logits={0: HIGH[:2]})
        for name, p in named:
            is_scaled = any(f".{kind}_proj" in name for kind in ("in", "q", "k"))
            expected = torch.ones(len(p))
            expected[: min(8, len(p)) if is_scaled else 0] = 0.5
            assert torch.equal(p.flatten(1)[:, 0] if p.ndim > 1 else p, expected), name


def test_attentions_of_other_names_in_one_block_are_layers_of_their_own():
    cross = projections("decoder.layers.0.cross")
    fused = ("decoder.layers.0.self.qkv.weight", nn.Parameter(torch.ones(24, 4)))
    fused[1].grad = torch.zeros(24, 4)
    config = {**CONFIG, "row_map": {"qkv": "(q=8 + k=8 + v=8) dim"}}
    optim = muon([fused, *cross], clip_config=config)
    optim.step(qk_logits={"decoder.layers.0.self": HIGH, "decoder.layers.0.cross": [0.0] * 4})
    assert (fused[1][:16] == 0.5).all() and (fused[1][16:] == 1).all() and not halved(cross)
    apart = [("layers.0.queries.wq.weight", cross[0][1]), ("layers.0.keys.wk.weight", cross[1][1])]
    for _, p in apart:
        p.grad = torch.zeros_like(p)
    muon(apart, clip_config=CONFIG).step(qk_logits={0: HIGH})
    assert all((p == 0.5).all() for _, p in apart)


def test_convolutions_have_their_rows_first():
    kernels = [
        (f"layers.0.attn.{kind}.weight", nn.Parameter(torch.ones(8, 4, *kernel)))
        for kind, kernel in (("q_proj", (3,)), ("k_proj", (1, 1)))
    ]
    for _, p in kernels:
        p.grad = torch.zeros_like(p)
    muon(kernels, clip_config=CONFIG, flatten=True).step(qk_logits={0: [*HIGH[:3], 0.0]})
    for _, p in kernels:
        assert (p[:6] == 0.5).all() and (p[6:] == 1).all()


def test_a_recorder_of_a_module_within_the_one_that_gave_the_groups_is_told_so():
    """As the model of a LightningModule is."""
    optim = muon(projections("model.layers.0.attn"), clip_config=CONFIG)
    optim.qk_recorder = Recorder({"layers.0.attn": HIGH})
    has = r"The recorder has 'layers.0.attn', not 'model.layers.0.attn': make it of the same module"
    with pytest.raises(ValueError, match=has):
        optim.step()


def test_recorded_logits_of_layers_that_are_not_trained_are_passed_over():
    named = projections("layers.1.attn")
    optim = muon(named, clip_config=CONFIG, none_grad=False)
    optim.step(qk_logits={1: [0.0] * 4})
    optim.qk_recorder = Recorder({"layers.0.attn": HIGH, "layers.1.attn": HIGH})
    optim.step()
    assert halved(named) == {"layers.1.attn"}
    optim.qk_recorder = Recorder({"layers.0.attn": HIGH})
    with pytest.raises(ValueError, match="qk_logits lacks layers 1"):
        optim.step()
    others = [("layers.0.attn.query.weight", nn.Parameter(torch.ones(8, 4))), *named]
    optim = muon(others, clip_config=CONFIG, none_grad=False)
    optim.qk_recorder = Recorder(*[{"layers.0.attn": HIGH, "layers.1.attn": [0.0] * 4}] * 2)
    with pytest.warns(UserWarning, match=r"saw the attention in 'layers.0.attn', of whose"):
        optim.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.step()


def test_other_default_dtypes_change_nothing():
    named = projections("layers.0.attn")
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = {"head_dim": 2, "threshold": 99.7}
        muon(named, clip_config=config).step(qk_logits={0: torch.full((4,), 99.6).float()})
    finally:
        torch.set_default_dtype(torch.float32)
    assert all((p == 1).all() for _, p in named)


def test_heads_of_other_parameters_are_no_ones():
    """Values, outputs, latents, norms, adapters, a parametrized weight."""
    named = projections("layers.0.attn")
    names = ["v_proj.weight", "wo.weight", "wq_a.weight", "wkv_a.weight", "q_proj.lora_A.weight"]
    names += ["q_norm2.weight", "k_proj.parametrizations.weight.original1", "q_projector.weight"]
    others = [(f"layers.0.attn.{name}", nn.Parameter(torch.ones(8, 4))) for name in names]
    for _, p in others:
        p.grad = torch.zeros_like(p)
    optim = muon(named + others, clip_config=CONFIG)
    optim.step(qk_logits={0: HIGH})
    assert all((p == 1).all() for _, p in others) and all((p == 0.5).all() for _, p in named)


def test_what_the_step_does_not_update_is_not_clipped():
    named = projections("layers.0.attn")
    named[1][1].grad = None
    muon(named, clip_config=CONFIG).step(qk_logits={0: HIGH})
    assert (named[0][1] == 0.5).all() and (named[1][1] == 1).all()


def test_projections_that_adamw_trains_are_clipped_too():
    named = projections("layers.0.attn")
    group = {"params": named, "use_muon": False}
    optim = optimizer.Muon([group], lr=0.0, clip_config=CONFIG)
    optim.step(qk_logits={0: HIGH})
    assert halved(named) == {"layers.0.attn"}


# -- where logits come from --------------------------------------------------------------------


class Recorder:
    def __init__(self, *logits):
        self.logits = list(logits)

    def take(self):
        return self.logits.pop(0) if self.logits else None


def test_given_logits_count_before_set_ones_before_recorded_ones():
    named = projections("layers.0.attn")
    optim = muon(named, clip_config=CONFIG, none_grad=False)
    low, none = {0: [0.0] * 4}, {0: [1.0] * 4}
    optim.qk_recorder = Recorder(none, none, {0: HIGH})
    optim.set_qk_logits({0: HIGH})
    optim.step(qk_logits=low)
    assert optim.qk_clip_stats()["max_logit"] == 0.0
    optim.set_qk_logits(low)
    optim.step()
    assert optim.qk_clip_stats()["max_logit"] == 0.0
    optim.step()
    assert optim.qk_clip_stats()["max_logit"] == HIGH[0]
    assert halved(named) == {"layers.0.attn"}
    optim.qk_recorder = None
    with pytest.raises(ValueError, match="qk_recorder must be"):
        optim.qk_recorder = object()


def test_a_closure_records_what_the_step_takes():
    named = projections("layers.0.attn")
    named[0][1].grad.fill_(1.0)
    optim = muon(named, clip_config=CONFIG)
    optim.qk_recorder = recorder = Recorder()
    optim.step(lambda: recorder.logits.append({0: HIGH}))
    assert halved(named) == {"layers.0.attn"}


def test_a_step_without_logits_warns_once():
    named = projections("layers.0.attn")
    optim = muon(named, clip_config=CONFIG, lr=0.1, none_grad=False)
    with pytest.warns(UserWarning, match="got no qk_logits") as caught:
        optim.step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.step()
        muon(projections("layers.0.attn"), lr=0.1).step()


def test_a_recorder_of_a_model_that_is_not_trained_warns_once():
    named = projections("layers.0.attn")
    optim = muon(named, clip_config=CONFIG, lr=0.1, none_grad=False)
    optim.qk_recorder = Recorder({0: None}, {0: None})
    with pytest.warns(UserWarning, match="does qk_recorder hook the model that is trained"):
        optim.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.step()


def test_state_made_for_a_checkpoint_clips_nothing():
    model = nn.ModuleDict({"q_proj": nn.Linear(4, 8), "k_proj": nn.Linear(4, 8)})
    groups = optimizer.muon.get_default_muon_param_groups(model)
    optim = optimizer.Muon(groups, lr=0.1, clip_config=CONFIG)
    before = copy.deepcopy(model.state_dict())
    optim.set_qk_logits({"": HIGH})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_optimizer_state_dict(model, optim)
    assert optim.state and optim.qk_clip_stats()["steps"] == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_numbers_of_many_kinds_are_logits():
    given = [HIGH, tuple(HIGH), torch.tensor(HIGH), torch.tensor(HIGH).bfloat16()]
    given += [
        torch.tensor(HIGH).double(),
        torch.tensor(HIGH).int(),
        nn.Parameter(torch.tensor(HIGH)),
    ]
    for logits in given:
        named = projections("layers.0.attn")
        muon(named, clip_config=CONFIG).step(qk_logits={0: logits})
        assert halved(named) == {"layers.0.attn"}
    assert torch.equal(torch.as_tensor(given[2]), torch.tensor(HIGH))  # read, not written


# -- errors ------------------------------------------------------------------------------------


def no_layers():
    return [("layers.0.attn.wo.weight", nn.Parameter(torch.ones(8, 4)))]


MLA = {"is_mla": True, "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 2}
WRONG_CONFIGS = [
    ([1], "clip_config must be a dict"),
    ({"head_dims": 2, "threshold": 1}, "'head_dims', which is no option; did you mean 'head_dim'"),
    ({"threshold": 1}, "head_dim must be an int ≥ 1, found None"),
    ({"head_dim": 2.0}, "head_dim must be an int ≥ 1, found 2.0"),
    ({"head_dim": 3}, r"layers.0.attn.q_proj.weight: 8 rows are no heads of head_dim=3"),
    ({"head_dim": 2, "threshold": 0}, "threshold must be a finite number above 0, found 0"),
    ({"head_dim": 2, "threshold": math.nan}, "threshold must be a finite number above 0"),
    ({"head_dim": 2, "threshold": True}, "threshold must be a finite number above 0"),
    ({"head_dim": 2, "q_indices": 4}, "q_indices must be a list of numbers of heads, found 4"),
    ({"head_dim": 2, "q_indices": [-1]}, "q_indices must be a list"),
    ({"head_dim": 2, "q_indices": [0, 4]}, "q_indices has head 4, but layers.0.attn has 4"),
    ({"head_dim": 2, "k_indices": [0, 1, 2, 9]}, "k_indices has head 9, but layers.0.attn has 4"),
    ({"head_dim": 2, "k_indices": [0, 1]}, "k_indices lists 2 key heads, but .* 4 query heads"),
    (
        {"head_dim": 2, "q_indices": [0, 1], "k_indices": [0]},
        "lists 1 key heads, but .* 2 query heads",
    ),
    ({"head_dim": 2, "qk_nope_head_dim": 2}, "qk_nope_head_dim but not is_mla=True"),
    ({"is_mla": True, "qk_nope_head_dim": 2}, "qk_rope_head_dim must be an int ≥ 0, found None"),
    ({"is_mla": 1}, "is_mla must be True or False, found 1"),
    (MLA, r"q_proj.weight: 8 rows are no heads of qk_nope_head_dim \+ qk_rope_head_dim=3"),
    ({**MLA, "qk_nope_head_dim": 1}, "is_mla=True, which does not fit layers.0.attn.k_proj"),
    ({"head_dim": 2, "row_map": []}, "row_map must be a mapping"),
    ({"head_dim": 2, "row_map": {"x": "wz"}}, r"\['x'\] must be .* one of wq_b.*found 'wz'"),
    ({"head_dim": 2, "row_map": {"x": "(q k"}}, r"row_map\['x'\]: '\(q k' has '\('"),
    ({"head_dim": 2, "row_map": {"q_proj": "(q=3 + k=5) d"}}, "parts 'q' that are no heads of 2"),
    ({"head_dim": 2, "row_map": {"q_proj": "(q=3 + k=6) d"}}, "q_proj.* counts as 9"),
    ({"head_dim": 2, "row_map": {"q_proj": "(a=3 + b=5) d"}}, "has no part 'q' or 'k'"),
    ({"head_dim": 2, "row_map": {"q_proj": "(q (k=2)) d"}}, "or one that is both, in"),
    ({"head_dim": 2, "row_map": {"x": {"query": [0]}}}, r"row_map\['x'\] must be"),
    ({0: 3}, r"clip_config\[0\] must be a dict of options or None, found 3"),
    ({1.5: CONFIG}, "has a key 1.5, which is neither"),
    ({"layers.0": {"head_dim": 3}}, "8 rows are no heads"),
]


@pytest.mark.parametrize(("config", "message"), WRONG_CONFIGS, ids=range(len(WRONG_CONFIGS)))
def test_wrong_configs_raise_at_once(config, message):
    with pytest.raises(ValueError, match=message):
        muon(projections("layers.0.attn"), clip_config=config)


def test_projections_that_do_not_fit_each_other_raise():
    named = projections("layers.0.attn")
    rows = nn.Parameter(torch.ones(6, 4))
    bias = ("layers.0.attn.q_proj.bias", nn.Parameter(torch.ones(4)))
    with pytest.raises(ValueError, match=r"4 query heads of layers.0.attn can't share 3 key heads"):
        muon([named[0], (named[1][0], rows)], clip_config=CONFIG)
    with pytest.raises(ValueError, match=r"give q_indices and k_indices, for the groups have no"):
        muon([named[1]], clip_config=CONFIG)
    with pytest.raises(ValueError, match="would be clipped by the same logits"):
        muon(
            [*named, ("layers.0.attn.wq.weight", named[0][1].clone().detach())], clip_config=CONFIG
        )
    with pytest.raises(ValueError, match="has 2 heads, but other parameters of the layer have 4"):
        groups = [{"params": named, "use_muon": True}, {"params": [bias], "use_muon": False}]
        optimizer.Muon(groups, clip_config=CONFIG)
    with pytest.raises(ValueError, match=r"q_proj.bias would be clipped without its weight"):
        groups = [{"params": [named[1]], "use_muon": True}, {"params": [bias], "use_muon": False}]
        optimizer.Muon(groups, clip_config={"head_dim": 2, "q_indices": [0], "k_indices": [0]})
    mla = ("layers.0.attn.wkv_b.weight", nn.Parameter(torch.ones(8, 4)))
    with pytest.raises(ValueError, match="projection of multi-head latent attention"):
        muon([mla], clip_config=CONFIG)


def test_names_are_needed_and_tell_of_traps():
    named = projections("layers.0.attn")
    params = [p for _, p in named]
    with pytest.raises(ValueError, match=r"param_groups\[0\]: clip_config needs names"):
        optimizer.Muon([{"params": params, "use_muon": True}], clip_config=CONFIG)
    bias = nn.Parameter(torch.ones(8))
    with pytest.warns(UserWarning, match=r"param_groups\[1\] has no names, so biases"):
        groups = [{"params": named, "use_muon": True}, {"params": [bias], "use_muon": False}]
        optimizer.Muon(groups, clip_config=CONFIG)
    with pytest.warns(UserWarning, match="no query or key projection was found"):
        muon(no_layers(), clip_config=CONFIG)
    norm = ("layers.0.attn.q_norm.weight", nn.Parameter(torch.ones(2)))
    with pytest.warns(UserWarning, match="q_norm.weight normalizes what QK-Clip scales"):
        groups = [{"params": named, "use_muon": True}, {"params": [norm], "use_muon": False}]
        optimizer.Muon(groups, clip_config=CONFIG)
    optim = muon(named, clip_config=CONFIG)
    with pytest.raises(ValueError, match=r"param_groups\[1\]: clip_config needs names"):
        optim.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))], "use_muon": True})
    wrong = ("layers.1.attn.q_proj.weight", nn.Parameter(torch.ones(5, 4)))
    with pytest.raises(ValueError, match="5 rows are no heads"):
        optim.add_param_group({"params": [wrong], "use_muon": True})
    assert len(optim.param_groups) == 1
    with pytest.raises(ValueError, match=r"clip_config.*for all groups"):
        muon(named).add_param_group({"params": [], "use_muon": True, "clip_config": CONFIG})


WRONG_LOGITS = [
    ([HIGH], "qk_logits must map layers to tensors"),
    ({1: HIGH}, "qk_logits has 1, where this optimizer has no query and key projections; .* 0"),
    ({"layer": HIGH}, "qk_logits has 'layer', where"),
    ({None: HIGH}, "qk_logits has None, where"),
    ({}, "qk_logits lacks layers 0"),
    ({0: HIGH, "layers.0.attn": HIGH}, "has the layer 'layers.0.attn' twice"),
    ({0: HIGH[:3]}, r"layer 0 have shape \(3,\), where \(4,\) is needed"),
    ({0: torch.ones(2, 4)}, r"layer 0 have shape \(2, 4\)"),
    ({0: torch.tensor(3.0)}, r"layer 0 have shape \(\)"),
    ({0: 5.0j}, r"layer 0 must be a tensor \(heads,\) or a list of numbers, found 5j"),
    ({0: "1234"}, "found '1234'"),
    ({0: torch.ones(4, dtype=torch.complex64)}, "complex64, no real numbers"),
    ({0: torch.ones(4, dtype=torch.bool)}, "bool, no real numbers"),
    ({0: torch.ones(4, device="meta")}, "are on meta, but its weights on cpu"),
]


@pytest.mark.parametrize(("logits", "message"), WRONG_LOGITS, ids=range(len(WRONG_LOGITS)))
def test_wrong_logits_raise_before_anything_changed(logits, message):
    named = projections("layers.0.attn")
    optim = muon(named, clip_config=CONFIG, lr=0.1)
    with pytest.raises(ValueError, match=message):
        optim.step(qk_logits=logits)
    assert all((p == 1).all() for _, p in named) and not optim.state
    assert all(p.grad is not None for _, p in named)


def test_logits_without_a_config_raise():
    optim = muon(projections("layers.0.attn"))
    with pytest.raises(ValueError, match="but the optimizer has no clip_config"):
        optim.step(qk_logits={0: HIGH})


# -- beside the rest ---------------------------------------------------------------------------


def test_copies_pickles_and_checkpoints_clip_as_well():
    named = projections("layers.0.attn")
    optim = muon(named, clip_config=CONFIG, none_grad=False)
    optim.qk_recorder = Recorder({0: [0.0] * 4})
    optim.step()
    for twin in (copy.deepcopy(optim), pickle.loads(pickle.dumps(optim))):
        assert twin.qk_recorder is None
        for param in twin.param_groups[0]["params"]:
            param.grad = torch.zeros_like(param)
        twin.step(qk_logits={0: HIGH})
        assert all((p == 0.5).all() for p in twin.param_groups[0]["params"])
    optim.load_state_dict(optim.state_dict())
    optim.step(qk_logits={0: HIGH})
    assert halved(named) == {"layers.0.attn"}


def test_parameters_swapped_after_construction_are_clipped():
    """As accelerate does it."""
    named = projections("layers.0.attn")
    optim = muon(named, clip_config=CONFIG)
    swapped = projections("layers.0.attn")
    optim.param_groups[0]["params"] = [p for _, p in swapped]
    optim.step(qk_logits={0: HIGH})
    assert halved(swapped) == {"layers.0.attn"} and not halved(named)


def test_offloaded_state_changes_nothing():
    attention = ATTENTIONS["latent"]
    results = []
    for offload in (False, True):
        optim, (params,) = build(attention, lr=0.1)
        if offload:
            optim.turn_on_cpu_offload(slot_bytes=16384, backend=Host())
        for step in range(3):
            set_gradients(params.values(), step)
            optim.step(qk_logits={0: torch.tensor([3.0, 9.0, 12.0, 50.0])})
        results.append({name: p.detach().clone() for name, p in params.items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_the_summary_tells_what_is_clipped():
    attention = ATTENTIONS["grouped-query"]
    optim, _ = build(attention)
    rows = {row["name"].rpartition("attention.")[2]: row for row in optim.summary().rows}
    clipped = {name for name, row in rows.items() if row["clipped"]}
    assert clipped == {"q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"}
    assert "QK-Clip" in str(optim.summary())


def operations(layers: int, heads: int, clip: bool) -> int:
    prefixes = [f"layers.{number}.attn" for number in range(layers)]
    named = projections(*prefixes, rows=2 * heads)
    optim = muon(named, clip_config=CONFIG, none_grad=False)
    logits = {number: torch.full((heads,), 2 * THRESHOLD) for number in range(layers)}
    optim.step(qk_logits=logits)
    return count(lambda: optim.step(qk_logits=logits if clip else None)).operations


@pytest.mark.filterwarnings("ignore:clip_config is given")
def test_what_clipping_costs_does_not_depend_on_the_number_of_heads():
    few, many = (operations(2, n, True) - operations(2, n, False) for n in (2, 64))
    assert few == many
    more = operations(12, 2, True) - operations(12, 2, False)
    assert (more - few) / 10 <= 16  # for each further layer, most of them views
