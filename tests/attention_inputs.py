"""Attention of every kind, as blocks and the kernel have to take it, and its maxima in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernel import optimizer

max_qk_logits = optimizer.max_qk_logits

HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (3, 1)}
KINDS = [*HEADS, "MLA", "MLA, a key per head"]


def inputs_of(kind="GQA", dtype=torch.float32, B=2, Tq=37, Tk=None, D=8, R=4):
    """Arguments by name."""
    Tk = Tq if Tk is None else Tk
    Hq, Hk = HEADS.get(kind, (4, 4))
    made = {"q": torch.randn(B, Hq, Tq, D), "k": torch.randn(B, Hk, Tk, D)}
    if kind.startswith("MLA"):
        made["q_rope"] = torch.randn(B, Hq, Tq, R)
        made["k_rope"] = torch.randn(B, 1 if kind == "MLA" else Hk, Tk, R)
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def maxima_of(
    q, k, scale=None, causal=True, q_rope=None, k_rope=None, document_ids=None, mask_mod=None,
    attn_mask=None,
):  # fmt: skip
    """All scores at once, in float64, every head by itself, every mask pair by pair."""
    (B, Hq, Tq, D), (Hk, Tk) = q.shape, k.shape[1:3]
    maxima = []
    for h in range(Hq):
        of_head = [torch.zeros(0, dtype=torch.float64)]
        for b in range(B):
            scores = q[b, h].double() @ k[b, h * Hk // Hq].double().T
            width = D
            if q_rope is not None:
                key = k_rope[b, h if k_rope.shape[1] > 1 else 0]
                scores = scores + q_rope[b, h].double() @ key.double().T
                width += q_rope.shape[-1]
            scores = scores * (width**-0.5 if scale is None else scale)
            i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
            seen = torch.ones(Tq, Tk, dtype=torch.bool)
            if causal:
                seen &= i >= j
            if document_ids is not None:
                pair = document_ids if isinstance(document_ids, tuple) else [document_ids] * 2
                of_q, of_k = (ids if ids.dim() == 1 else ids[b] for ids in pair)
                seen &= of_q[:, None] == of_k
            if mask_mod is not None:
                seen &= mask_mod(torch.tensor(b), torch.tensor(h), i, j)
            if attn_mask is not None:
                mask = attn_mask.expand(B, Hq, Tq, Tk)[b, h]
                seen &= mask if mask.dtype == torch.bool else mask > -30000
            of_head.append(torch.where(seen, scores, -math.inf).flatten())
        of_head = torch.cat(of_head)
        maxima.append(of_head.max() if len(of_head) else torch.tensor(-math.inf).double())
    return torch.stack(maxima)


def documents(B, T):
    return torch.randint(0, 4, (B, T)).sort(-1).values


def per_head(b, h, i, j):
    return (i - j) % (h + 2) == 0


SHAPES_OF_MASKS = [(), (37,), (37, 1), (37, 37), (6, 1, 37), (2, 1, 1, 37)]
LENGTHS = [(1, 40), (40, 1), (13, 40), (40, 13)]
Case = tuple[dict[str, Any], dict[str, Any]]  # inputs, and options


def of_kinds(dtype: torch.dtype) -> Iterator[Case]:
    ids = documents(2, 37)
    for kind in KINDS:
        for options in ({}, {"causal": False, "document_ids": ids[0]}, {"document_ids": ids}):
            yield inputs_of(kind, dtype), options


def of_growing_keys(dtype: torch.dtype) -> Iterator[Case]:
    """Every pair above the diagonal has a larger logit than those that count."""
    for T in (2, 16, 37):
        powers = (1.2 ** torch.arange(T)).view(1, 1, T, 1).expand(2, 2, T, 8)
        yield {"q": (1 / powers).to(dtype), "k": powers.to(dtype)}, {}


def of_lengths(dtype: torch.dtype) -> Iterator[Case]:
    """Yields queries and keys of different lengths, aligned at their start."""
    for Tq, Tk in LENGTHS:
        inputs = inputs_of("MLA", dtype, B=1, Tq=Tq, Tk=Tk, D=70, R=20)
        ids = (documents(1, Tq), documents(1, Tk)[0].to(torch.uint8))
        mask = torch.rand(1, 1, Tq, Tk) < 0.5
        for causal in (True, False):
            yield inputs, {"causal": causal}
            yield inputs, {"causal": causal, "document_ids": ids, "attn_mask": mask}


def of_strides(dtype: torch.dtype) -> Iterator[Case]:
    q, k = torch.randn(2, 37, 6, 8).to(dtype), torch.randn(2, 37, 4, 16).to(dtype)
    yield {"q": q.transpose(1, 2), "k": k.transpose(1, 2)[:, ::2, :, ::2]}, {}
    yield {"q": torch.randn(2, 1, 37, 8).to(dtype).expand(-1, 6, -1, -1), "k": q[:, :2]}, {}


def of_widths(dtype: torch.dtype) -> Iterator[Case]:
    for width in (1, 16, 64, 100, 192):
        yield inputs_of(dtype=dtype, D=width), {}


def of_masks(dtype: torch.dtype) -> Iterator[Case]:
    """As torch's attention takes them; a bias in another dtype than queries."""
    lowest = torch.finfo(dtype).min
    for shape in SHAPES_OF_MASKS:
        seen, inputs = torch.rand(shape) < 0.5, inputs_of()
        yield inputs, {"attn_mask": seen}
        for excluded in (-math.inf, lowest, lowest / 2):
            bias = (-100 * torch.rand(shape)).to(dtype).masked_fill(~seen, excluded)
            yield inputs, {"attn_mask": bias}
    everything = {"document_ids": documents(2, 37), "attn_mask": torch.rand(2, 6, 37, 37) < 0.7}
    yield inputs_of(dtype=dtype), everything


def of_nothing(dtype: torch.dtype) -> Iterator[Case]:
    """Heads without a pair have -inf."""
    for B, Tq, Tk in ((0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)):
        yield inputs_of(dtype=dtype, B=B, Tq=Tq, Tk=Tk), {}
    yield inputs_of(dtype=dtype, Tk=4), {"attn_mask": torch.zeros(4, dtype=torch.bool)}


def of_masked_nonsense(dtype: torch.dtype) -> Iterator[Case]:
    """NaN and Inf count only in pairs that count."""
    mask = torch.ones(37, 1, dtype=torch.bool)
    mask[36] = False
    for worst in (math.nan, math.inf):
        inputs = inputs_of(dtype=dtype, B=1)
        inputs["q"][:, 1, 36] = worst  # the last query of head 1, of no pair that counts
        inputs["k"][:, :, 36] = worst
        yield inputs, {"attn_mask": mask}


def of_nan(dtype: torch.dtype) -> Iterator[Case]:
    """NaN is above infinity, and its head's only."""
    inputs = inputs_of("MHA", dtype, Tq=70, D=1)
    q, k = (tensor.abs_() for tensor in inputs.values())
    q[0, 0, 3] = q[0, 1, 69] = math.inf
    q[1, 1, 5] = math.nan
    q[1, 3] = -math.inf
    k[0, 2, 0] = math.nan
    yield inputs, {}


CASES: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "kinds": of_kinds,
    "growing keys": of_growing_keys,
    "lengths": of_lengths,
    "strides": of_strides,
    "widths": of_widths,
    "masks": of_masks,
    "nothing": of_nothing,
    "masked nonsense": of_masked_nonsense,
    "NaN": of_nan,
}


def attend(q, k, **options):
    """What surrounds the call in a model: gradients flow through everything but the maxima."""
    heads = [q.shape[1], k.shape[1]]
    q, k = torch.cat((q * 2.0, k), 1).split(heads, 1)  # views of one tensor
    maxima = max_qk_logits(q, k, **options)
    return maxima, (q @ k.mT.repeat_interleave(q.shape[1] // k.shape[1], 1)).square().mean()
