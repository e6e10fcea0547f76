"""Tiny models of each architecture that the equivalence matrix runs.

Small enough for a step to take milliseconds, with every part of the architecture in it: 8 query heads so that 4 ranks
hold 2 each, a vocabulary that needs padding, at least one layer of each kind and one kind twice.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tensor_cast.model_catalog import describe
from tensor_cast.model_config import AttentionKind, ModelConfig

_BASE = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_hidden_layers": 3,
}
_LATENT = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_INDEXER = {"index_topk": 6, "index_n_heads": 8, "index_head_dim": 8}
_ALTERNATING = {
    "num_hidden_layers": 3,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_FULL = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
_GEMMA2 = {
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 8,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "rope_scaling": None}

#: Name -> (model type, what differs from the base). ``*_full`` are the two whose sliding windows would otherwise keep
#: soft-capping and sinks away from DCP.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"attention_bias": True, "head_dim": None, "hidden_size": 64}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**_ALTERNATING, **_GEMMA2}),
    "gemma2_full": ("gemma2", {**_ALTERNATING, **_GEMMA2, **_FULL}),
    "gemma3": (
        "gemma3_text",
        {**_ALTERNATING, "query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": None},
    ),
    "gpt_oss": ("gpt_oss", {**_ALTERNATING, **_GPT_OSS, "intermediate_size": 16}),
    "gpt_oss_full": ("gpt_oss", {**_ALTERNATING, **_GPT_OSS, **_FULL, "intermediate_size": 16}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "intermediate_size": 16},
    ),
    # Six experts do not divide by four ranks.
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 6, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "deepseek_v3": ("deepseek_v3", {**_EXPERTS, **_GROUPED, **_LATENT, "rope_interleave": True}),
    "deepseek_v32": ("deepseek_v32", {**_EXPERTS, **_GROUPED, **_LATENT, **_INDEXER}),
    # Layers 0 and 2 choose tokens, the others take over what the one before chose.
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {
            **_EXPERTS,
            **_GROUPED,
            **_LATENT,
            **_INDEXER,
            "num_hidden_layers": 4,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {**_EXPERTS, **_GROUPED, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
}


@cache
def family(name: str, kv_heads: int = 0) -> ModelConfig:
    """The tiny model of a family; ``kv_heads`` replaces its number of KV heads."""
    model_type, changes = FAMILIES[name]
    raw = {**_BASE, "model_type": model_type, **changes}
    if kv_heads:
        raw["num_key_value_heads"] = kv_heads
    raw = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
    return describe(raw, f"tiny-{name}", f"tiny {name}")


def kv_variants(name: str) -> tuple[int, ...]:
    """Numbers of KV heads to run: fewer than ranks, so that heads are copied, and more; MLA has no such number."""
    model = family(name)
    if model.attention is not AttentionKind.GQA:
        return (0,)
    return (1, 2) if model.is_moe else (1, 2, 4)
