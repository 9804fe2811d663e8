"""The weights of language models, from their Hugging Face configs: names, shapes, whose they are.

Nothing is downloaded: the built-in configs hold the published values that shapes follow from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

MODELS: dict[str, Config] = {
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "llama-3-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "vocab_size": 151936,
    },
    "kimi-k2": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "vocab_size": 163840,
    },
}

# Decoders of gated feed-forwards whose matrices are those of `weights_of`: no others, none fused.
# What is not modelled (some biases and norms) is less than 1 % of the parameters.
KNOWN = (
    *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text"),
    *("glm4_moe", "granite", "kimi_k2", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3"),
    *("olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"),
)

# What configs may leave out, since their classes have it so.
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
DEFAULTS: dict[str, Config] = {
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": {
        **_GEMMA,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    },
    "qwen3": {"head_dim": 128},
    "smollm3": {"tie_word_embeddings": True},
}

# Keys that count routed experts: Qwen's, DeepSeek's and Kimi's, Mixtral's.
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Args:
        name: its FQN.
        shape: (out, in), (experts, out, in), or (size,).
        parallel: which of its sides tensor parallelism divides: ``"colwise"`` the rows,
            ``"rowwise"`` the columns; None where every rank of a TP group has all of it.
        muon: whether it is Muon's; else AdamW's.
    """

    name: str
    shape: tuple[int, ...]
    parallel: str | None = None
    muon: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        return len(self.shape) == 3


def read_config(path: Path) -> Config:
    """A model's config.json, or that of a folder; of a multimodal one, its language model's part.

    Raises:
        ValueError: not a config.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no readable config.json: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object")
    return config.get("text_config", config)


def weights_of(config: Config, assume_gated: bool = False) -> list[Weight]:
    """All parameters of a decoder-only transformer with gated feed-forwards.

    Routed experts of a layer are three stacks (experts, out, in).

    Args:
        config: of a `KNOWN` model_type.
        assume_gated: of any, which is taken for such a transformer.

    Raises:
        ValueError: of another model_type, or lacks keys, which are named.
    """
    kind = config.get("model_type")
    if not assume_gated and kind not in KNOWN:
        raise ValueError(_unknown(kind))
    config = {**DEFAULTS.get(str(kind), {}), **config}
    check(config)
    dim, vocab = config["hidden_size"], config["vocab_size"]
    weights = [Weight("embed_tokens.weight", (vocab, dim), "colwise", muon=False)]
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        weights += _attention(config, f"{name}.self_attn")
        weights += [
            _norm(f"{name}.input_layernorm", dim),
            _norm(f"{name}.post_attention_layernorm", dim),
        ]
        if _is_sparse(config, layer):
            weights += _mixture(config, f"{name}.mlp")
        else:
            weights += _feed_forward(f"{name}.mlp", dim, config["intermediate_size"])
    weights.append(_norm("norm", dim))
    if not config.get("tie_word_embeddings", False):
        weights.append(Weight("lm_head.weight", (vocab, dim), "colwise", muon=False))
    return weights


def _unknown(kind: str | None) -> str:
    found = "a config without a model_type" if kind is None else f"model_type {kind!r}"
    return (
        f"{found} is not known to be a decoder with gated feed-forwards and nothing else, as "
        f"{', '.join(KNOWN)} are; --assume-gated counts it as one"
    )


def check(config: Config) -> None:
    """All keys that the shapes follow from are there.

    Raises:
        ValueError: names those that are missing.
    """
    needed = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    missing = _missing(config, needed)
    if not missing and any(
        not _is_sparse(config, layer) for layer in range(config["num_hidden_layers"])
    ):
        missing += _missing(config, ["intermediate_size"])
    if _experts(config) and not _has(config, "moe_intermediate_size"):
        missing += ["moe_intermediate_size"] if not _has(config, "intermediate_size") else []
    if _has(config, "kv_lora_rank"):
        missing += _missing(config, ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
    if missing:
        raise ValueError(
            f"a config of model_type {config.get('model_type')!r} lacks "
            f"{', '.join(dict.fromkeys(missing))}, without which its shapes are not known"
        )


def _missing(config: Config, keys: list[str]) -> list[str]:
    return [key for key in keys if not _has(config, key)]


def _has(config: Config, key: str) -> bool:
    return config.get(key) is not None


def _norm(name: str, size: int) -> Weight:
    return Weight(f"{name}.weight", (size,), muon=False)


def _feed_forward(name: str, dim: int, hidden: int) -> Iterator[Weight]:
    yield Weight(f"{name}.gate_proj.weight", (hidden, dim), "colwise")
    yield Weight(f"{name}.up_proj.weight", (hidden, dim), "colwise")
    yield Weight(f"{name}.down_proj.weight", (dim, hidden), "rowwise")


# -- attention -------------------------------------------------------------------------------------


def _attention(config: Config, name: str) -> Iterator[Weight]:
    if _has(config, "kv_lora_rank"):
        yield from _latent_attention(config, name)
        return
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    kv_heads = config.get("num_key_value_heads") or heads
    kind = str(config.get("model_type"))
    biased = config.get("attention_bias", kind.startswith("qwen2"))
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield Weight(f"{name}.{part}_proj.weight", (count * head_dim, dim), "colwise")
        if biased:
            yield Weight(f"{name}.{part}_proj.bias", (count * head_dim,), muon=False)
    yield Weight(f"{name}.o_proj.weight", (dim, heads * head_dim), "rowwise")
    if kind.startswith("qwen3"):
        yield _norm(f"{name}.q_norm", head_dim)
        yield _norm(f"{name}.k_norm", head_dim)


def _latent_attention(config: Config, name: str) -> Iterator[Weight]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Tensor parallelism divides the heads; the projections into the latent space stay whole.
    """
    dim, heads, kv_rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, v = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_rank = config.get("q_lora_rank")
    if q_rank:
        yield Weight(f"{name}.q_a_proj.weight", (q_rank, dim))
        yield _norm(f"{name}.q_a_layernorm", q_rank)
        yield Weight(f"{name}.q_b_proj.weight", (heads * (nope + rope), q_rank), "colwise")
    else:
        yield Weight(f"{name}.q_proj.weight", (heads * (nope + rope), dim), "colwise")
    yield Weight(f"{name}.kv_a_proj_with_mqa.weight", (kv_rank + rope, dim))
    yield _norm(f"{name}.kv_a_layernorm", kv_rank)
    yield Weight(f"{name}.kv_b_proj.weight", (heads * (nope + v), kv_rank), "colwise")
    yield Weight(f"{name}.o_proj.weight", (dim, heads * v), "rowwise")


# -- mixture of experts ----------------------------------------------------------------------------


def _experts(config: Config) -> int:
    return next((config[key] for key in EXPERTS if _has(config, key)), 0)


def _is_sparse(config: Config, layer: int) -> bool:
    """True if a layer has routed experts, by DeepSeek's and Qwen's keys."""
    if not _experts(config) or layer < (config.get("first_k_dense_replace") or 0):
        return False
    if layer % (config.get("moe_layer_freq") or 1):
        return False
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _mixture(config: Config, name: str) -> Iterator[Weight]:
    dim, experts = config["hidden_size"], _experts(config)
    hidden = config.get("moe_intermediate_size") or config["intermediate_size"]
    yield Weight(f"{name}.gate.weight", (experts, dim))
    yield Weight(f"{name}.experts.gate_proj", (experts, hidden, dim), "colwise")
    yield Weight(f"{name}.experts.up_proj", (experts, hidden, dim), "colwise")
    yield Weight(f"{name}.experts.down_proj", (experts, dim, hidden), "rowwise")
    if config.get("n_shared_experts"):
        shared = config["n_shared_experts"] * hidden
        yield from _feed_forward(f"{name}.shared_experts", dim, shared)
    elif config.get("shared_expert_intermediate_size"):
        yield from _feed_forward(
            f"{name}.shared_expert", dim, config["shared_expert_intermediate_size"]
        )
        yield Weight(f"{name}.shared_expert_gate.weight", (1, dim), muon=False)
