"""Queries, keys and masks of every kind of attention, and the maxima of their scores in float64."""

from __future__ import annotations

import math

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
        of_head = []
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


def documents(B, T, count=4):
    return torch.randint(0, count, (B, T)).sort(-1).values


def per_head(b, h, i, j):
    return (i - j) % (h + 2) == 0


def attend(q, k, **options):
    """What surrounds the call in a model: gradients flow through everything but the maxima."""
    heads = [q.shape[1], k.shape[1]]
    q, k = torch.cat((q * 2.0, k), 1).split(heads, 1)  # views of one tensor
    maxima = max_qk_logits(q, k, **options)
    return maxima, (q @ k.mT.repeat_interleave(q.shape[1] // k.shape[1], 1)).square().mean()
