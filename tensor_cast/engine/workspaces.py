"""Memory that an engine takes beside weights, activations of the model's own operations, and the KV cache.

vLLM's attention backends keep buffers that grow with the longest request, its experts some that grow with the token
budget, and its profile run fills some more; all shrink the KV cache. One growable buffer serves the kernels, so the
largest need counts, not the sum. Engines whose profile says otherwise (``profiles_kernels``) size none ahead.
Source: vLLM 0.30 ``v1/attention/backends/mla/indexer.py``, ``v1/worker/workspace.py``, ``mla_attention.py``,
``fused_moe``, ``v1/worker/gpu_worker.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensor_cast.dtypes import bits_of
from tensor_cast.engine.kv_formats import KVFormat, indexer_token_bytes
from tensor_cast.model_config import AttentionKind, ModelConfig
from tensor_cast.units import MIB

__all__ = ["Workspaces", "indexer_gather_bytes", "requested_bytes", "sampler_bytes", "workspaces"]

#: Rows of gathered indexer keys for each token of the longest request.
_GATHER_FACTOR = 40
#: Rows of gathered latents for each token of the longest request, where the cache is not fp8.
_SPARSE_PREFILL_FACTOR = 5
#: Most tokens whose latents a chunked prefill of dense MLA expands at once.
_CHUNK_TOKENS = 65_536
#: Default of VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, which the profile run allocates whole.
_INDEXER_LOGITS = 512 * MIB
_INT32 = 4
#: Bytes of a logit while the profile run samples: itself (2), in float32 (4), and its index when sorted (8). Start-up
#: logs of ten models with vocabularies of 49,000 to 262,000 say 13.9 to 14.5.
_LOGIT_BYTES = 2 + 4 + 8


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Bytes on one rank.

    Args:
        persistent: held for good; the engine counts them as used, not as activations.
        transient: on top of the activations while the engine measures their peak.
    """

    persistent: int = 0
    transient: int = 0


def requested_bytes(usable: float, utilization: float) -> int:
    """What the engine takes of a device with ``usable`` bytes: ``ceil(usable * utilization)``."""
    return math.ceil(usable * utilization)


def sampler_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """What sampling for ``max_num_seqs`` requests holds at its peak; every TP rank has the whole vocabulary."""
    return max_num_seqs * vocab_size * _LOGIT_BYTES


def indexer_gather_bytes(model_len: int, key_bytes: int = 132) -> int:
    """Buffer in which a prefill gathers indexer keys: 40 rows per token of the longest request, 5,280 bytes of it."""
    return _GATHER_FACTOR * model_len * key_bytes


def workspaces(
    model: ModelConfig,
    form: KVFormat,
    *,
    tp: int,
    moe_tp: int,
    dcp: int,
    max_model_len: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    block_size: int,
) -> Workspaces:
    """Buffers of the kernels on one rank.

    Args:
        model: facts of the model.
        form: format of the KV cache.
        tp: ranks that share the heads.
        moe_tp: ranks that share an expert.
        dcp: ranks that share a sequence.
        max_model_len: tokens of the longest request.
        max_num_seqs: requests in a step at most.
        max_batched_tokens: tokens in a step at most.
        block_size: tokens of a KV block.
    """
    element = bits_of(model.dtype) // 8
    needs, own, transient = [0], 0, 0
    if model.is_moe:
        # Rows for each token and chosen expert in two buffers: of what the activation makes of the first product, later
        # the output of the second; and of the first product, later its sums.
        width, hidden = model.moe_intermediate_size // moe_tp, model.hidden_size
        rows = max_batched_tokens * model.num_experts_per_tok
        needs.append(rows * (max(width, hidden) + max(2 * width, hidden)) * element)
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    if model.attention is AttentionKind.DSA:
        key_bytes = indexer_token_bytes(model.index_head_dim, form, ascend=False)
        needs.append(indexer_gather_bytes(max_model_len, key_bytes))
        if form.bits >= 16:
            needs.append(_SPARSE_PREFILL_FACTOR * max_model_len * latent * element)
        own, transient = max_batched_tokens * model.index_topk * _INT32, _INDEXER_LOGITS
    elif model.attention is AttentionKind.MLA:
        tokens = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), _CHUNK_TOKENS)
        gathered = tokens * latent * element
        own = gathered + (gathered // dcp if dcp > 1 else 0)
        heads = model.num_attention_heads // tp
        transient = tokens * heads * (model.qk_nope_head_dim + model.v_head_dim) * element
    return Workspaces(max(needs) + own, transient)
