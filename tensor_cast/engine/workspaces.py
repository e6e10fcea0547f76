"""Memory that an engine takes beside weights, activations of the model's own operations, and the KV cache.

vLLM's attention backends keep buffers that grow with the longest request, and its profile run fills some more; both
shrink the KV cache. One growable buffer serves all of them, so the largest need counts, not the sum. vllm-ascend sizes
no such buffers ahead.
Source: vLLM 0.30 ``v1/attention/backends/mla/indexer.py``, ``v1/worker/workspace.py``, ``mla_attention.py``,
``v1/worker/gpu_worker.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensor_cast.dtypes import bits_of
from tensor_cast.engine.kv_formats import KVFormat, indexer_token_bytes
from tensor_cast.model_config import AttentionKind, ModelConfig
from tensor_cast.units import MIB

__all__ = ["Workspaces", "indexer_gather_bytes", "requested_bytes", "workspaces"]

#: Rows of gathered indexer keys for each token of the longest request.
_GATHER_FACTOR = 40
#: Rows of gathered latents for each token of the longest request, where the cache is not fp8.
_SPARSE_PREFILL_FACTOR = 5
#: Most tokens whose latents a chunked prefill of dense MLA expands at once.
_CHUNK_TOKENS = 65_536
#: Default of VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, which the profile run allocates whole.
_INDEXER_LOGITS = 512 * MIB
_INT32 = 4


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


def indexer_gather_bytes(model_len: int, key_bytes: int = 132) -> int:
    """Buffer in which a prefill gathers indexer keys: 40 rows per token of the longest request, 5,280 bytes of it."""
    return _GATHER_FACTOR * model_len * key_bytes


def workspaces(
    model: ModelConfig,
    form: KVFormat,
    *,
    ascend: bool,
    tp: int,
    dcp: int,
    max_model_len: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    block_size: int,
) -> Workspaces:
    """Buffers of the attention backends on one rank.

    Args:
        model: facts of the model.
        form: format of the KV cache.
        ascend: whether the engine is vllm-ascend.
        tp: ranks that share the heads.
        dcp: ranks that share a sequence.
        max_model_len: tokens of the longest request.
        max_num_seqs: requests in a step at most.
        max_batched_tokens: tokens in a step at most.
        block_size: tokens of a KV block.
    """
    if ascend or model.attention is AttentionKind.GQA:
        return Workspaces()
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    element = bits_of(model.dtype) // 8
    if model.attention is AttentionKind.DSA:
        needs = [indexer_gather_bytes(max_model_len, indexer_token_bytes(model.index_head_dim, form, ascend=False))]
        if form.bits >= 16:
            needs.append(_SPARSE_PREFILL_FACTOR * max_model_len * latent * element)
        chosen = max_batched_tokens * model.index_topk * _INT32
        return Workspaces(max(needs) + chosen, _INDEXER_LOGITS)
    tokens = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), _CHUNK_TOKENS)
    gathered = tokens * latent * element
    expanded = tokens * (model.num_attention_heads // tp) * (model.qk_nope_head_dim + model.v_head_dim) * element
    return Workspaces(gathered + (gathered // dcp if dcp > 1 else 0), expanded)
