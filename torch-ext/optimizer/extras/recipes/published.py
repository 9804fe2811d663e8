"""What published models chose: parts, groups and options, each number with its source.

Where a source does not give a number, a comment says so, and the number is that of another source,
on which it builds. Learning rates are the highest of a schedule.
"""

from __future__ import annotations

from typing import Any

# Components of parameters' names in transformers' DeepSeek-V3, as which Moonlight and Kimi K2 are
# built; of several in one string, a model has one.
DEEPSEEK_V3 = (
    "embed_tokens",
    "q_b_proj q_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "experts",
    "lm_head",
)

# Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982, of Moonlight.
MOONLIGHT: dict[str, Any] = {
    "lr": 4.2e-4,  # section 3.3: after a warm-up of 2,000 steps, in a cosine to 4.2e-5
    "momentum": 0.95,  # section 2.2, "Other Hyper-parameters"
    "nesterov": True,  # section 2.1, footnote 1
    "momentum_style": "classical",  # equation 1
    "ns_steps": 5,  # section 2.2: N = 5
    "ns_coefficients": "quintic",  # section 2.1, as Jordan et al. 2024
    # Not in the report: its repository's examples/toy_train.py.
    "ns_options": {"eps_absolute": 1e-7},
    "adjust_lr": "match_rms_adamw",  # equation 4: 0.2·sqrt(max(rows, cols))
    "weight_decay": 0.1,  # section 3.3, all stages
    "adamw_betas": (0.9, 0.95),  # not in the report: examples/toy_train.py
    "adamw_eps": 1e-8,  # likewise
}
# Of stacked experts, whose gate and up projections are matrices of their own, as DeepSeek-V3's
# published code stores them; the report does not say.
STACKED_EXPERTS = {"experts.gate_up_proj": "(n + n) dim"}

# Kimi Team 2025, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534. Moonlight's momentum,
# iteration and AdamW stand in for what this report does not say.
KIMI_K2: dict[str, Any] = {
    **MOONLIGHT,  # with Nesterov's momentum, where algorithm 1 has the momentum alone
    "lr": 2e-4,  # section 2.5: constant over 10 T tokens after a warm-up of 500 steps, then to 2e-5
    "weight_decay": 0.1,  # section 2.5
}
KIMI_K2_CLIP = {"is_mla": True, "threshold": 100.0}  # section 2.1: τ = 100

# karpathy/nanochat at 92d63d4, of July 2026. The arguments that scripts/base_train.py has for
# ``GPT.setup_optimizer``; it multiplies them by batch size and horizon first, and has schedules for
# all of them and the momentum.
NANOCHAT: dict[str, Any] = {
    "unembedding_lr": 0.008,
    "embedding_lr": 0.3,
    "matrix_lr": 0.02,
    "weight_decay": 0.28,
    "scalar_lr": 0.5,
}
# All below is from ``GPT.setup_optimizer`` in nanochat/gpt.py. The rates of embedding and head hold
# for this width of the model; for others they are multiplied by (width / this one)^-½.
NANOCHAT_WIDTH = 768
# Groups of AdamW: the beginnings of parameters' names; the learning rate, a factor and the argument
# that it multiplies ("constant" is 1); betas; weight decay.
NANOCHAT_ADAMW = (
    (("lm_head",), (1.0, "unembedding_lr"), (0.8, 0.96), 0.01),
    (("transformer.wte",), (1.0, "embedding_lr"), (0.8, 0.995), 0.001),
    (("value_embeds",), (0.5, "embedding_lr"), (0.8, 0.995), 0.01),
    (("resid_lambdas",), (0.01, "scalar_lr"), (0.8, 0.95), 0.05),
    (("x0_lambdas",), (1.0, "scalar_lr"), (0.96, 0.95), 0.0),
    (("smear_gate", "smear_lambda", "backout_lambda"), (0.2, "constant"), (0.8, 0.95), 0.0),
)
NANOCHAT_ADAMW_EPS = 1e-10
NANOCHAT_MATRICES = ("transformer.h",)
NANOCHAT_MUON = {"momentum": 0.95, "ns_steps": 5, "beta2": 0.9}
