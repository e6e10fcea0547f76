"""Small models of each architecture for the tests of the torch wing."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tensor_cast.hf_config import read_facts
from tensor_cast.model_config import AttentionKind, ModelConfig

_BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "head_dim": None,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "rope_interleave": True,
    },
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_key_value_heads": 8,
        "head_dim": None,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "index_topk": 6,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
    "glm_moe_dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "head_dim": None,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "index_topk": 5,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk_freq": 3,
        "index_skip_topk_offset": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": None,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "tie_word_embeddings": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


def model_config(raw: dict[str, Any], model_id: str = "tiny") -> ModelConfig:
    """The facts of a raw config, as the loader would read them from a file."""
    facts = read_facts(raw, model_id)
    facts["attention"] = AttentionKind(facts["attention"])
    text = json.dumps(raw, sort_keys=True)
    return ModelConfig(model_id=model_id, hf_config=text, digest=hashlib.sha256(text.encode()).hexdigest(), **facts)


def tiny(name: str, **changes: Any) -> ModelConfig:
    """A small model of the architecture ``name`` with some fields changed; None leaves a field out."""
    raw = {**_BASE, **TINY[name], **changes}
    return model_config({key: value for key, value in raw.items() if value is not None}, f"tiny-{name}")
