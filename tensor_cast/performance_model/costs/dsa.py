"""Sparse attention with an indexer (DSA): writing and scoring index keys, top-k, attention over the chosen tokens.

``B`` requests, ``Q`` new tokens each, ``S`` cached tokens each, ``n`` index heads of width ``d``, ``K`` tokens chosen,
``h`` query heads on this rank. A query scores every token it sees, so a request has ``Q*S - Q*(Q-1)/2`` scores, and
attends to at most ``K`` of them. DCP splits the keys that are scored (unless each rank keeps them all) and those
attended to.
Sources: vLLM 0.30 ``v1/attention/backends/mla/{indexer,flashmla_sparse}.py``, DeepGEMM's MQA logits kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensor_cast.device.profile import OpClass
from tensor_cast.dtypes import bits_of
from tensor_cast.engine.kv_formats import KV_FORMATS, indexer_token_bytes
from tensor_cast.ir.expr import Num
from tensor_cast.ir.record import Kind, OpRecord
from tensor_cast.performance_model.base import OpCost, dims, op_cost, tensor_bytes, tensor_numel, total_bytes
from tensor_cast.performance_model.costs.attention import latent_bytes, visible_pairs

#: Bytes of an index score (float32) and of a chosen place (int32).
_SCORE, _PLACE = 4, 4


def key_bytes(width: int, dtype: str) -> int:
    """Bytes of one index key in the cache: fp8 brings a float32 scale per 128 elements, int8 a float16 one."""
    form = KV_FORMATS.get(dtype)
    if form.bits > 16:
        return width * form.bits // 8
    return indexer_token_bytes(width, form, ascend=not dtype.startswith("float8"))


def padded_heads(heads: int, tiles: Sequence[int]) -> int:
    """Heads that a kernel with tiles of these sizes computes for ``heads`` of a rank; without tiles just those."""
    if not tiles:
        return heads
    tile = next((t for t in tiles if heads <= t), tiles[-1])
    return -(-heads // tile) * tile


def _pairs(q: Num, s: Num, dcp: int) -> Num:
    """Scores of one request on one rank."""
    return visible_pairs(q, s, None) / dcp


@op_cost("tensor_cast.indexer_cache_write")
def indexer_cache_write(op: OpRecord) -> OpCost:
    """key[B,Q,d], cache: reads the new keys, writes them with their scales."""
    key = op.inputs[0]
    cache = next(spec for spec in op.inputs if spec.kind is Kind.INDEXER)
    rows = tensor_numel(key) / dims(key)[-1]
    index = [spec for spec in op.inputs if spec.kind is Kind.INDEX]
    return OpCost(
        OpClass.POINTWISE,
        flops=4 * tensor_numel(key) if bits_of(cache.dtype) == 8 else 0,  # maximum, scale and rounding
        bytes_read=tensor_bytes(key) + total_bytes(index),
        bytes_written=rows * key_bytes(int(dims(key)[-1]), cache.dtype),
    )


@op_cost("tensor_cast.indexer_scores")
def indexer_scores(op: OpRecord) -> OpCost:
    """q[B,Q,n,d], weights[B,Q,n], keys[B,S',d] -> scores[B,Q,S'] float32; S' = S/dcp.

    FLOPs ``2*n*d + 2*n`` per score. The queries of a request read its keys together, once.
    """
    query, weights, keys = op.inputs[:3]
    b, q, heads, width = dims(query)
    dcp = op.attr("dcp", 1)
    local = dims(keys)[1]
    pairs = _pairs(q, local * dcp, dcp)
    decode = op.attr("phase", "decode") == "decode"
    return OpCost(
        OpClass.MLA_DECODE if decode else OpClass.ATTENTION_PREFILL,
        flops=b * pairs * (2 * heads * width + 2 * heads),
        tiles=b if decode else b * q * heads / 128,
        compute_dtype=keys.dtype if bits_of(keys.dtype) == 8 else query.dtype,
        bytes_read=tensor_bytes(query)
        + tensor_bytes(weights)
        + b * local * key_bytes(int(width), keys.dtype)
        + total_bytes(op.inputs[3:]),
        bytes_written=b * pairs * _SCORE,
    )


@op_cost("tensor_cast.indexer_topk")
def indexer_topk(op: OpRecord) -> OpCost:
    """scores[B,Q,S] -> places[B,Q,K]: one pass over the scores of visible tokens."""
    b, q, s = dims(op.inputs[0])
    scores = b * _pairs(q, s, 1)
    return OpCost(OpClass.POINTWISE, flops=scores, bytes_read=scores * _SCORE, bytes_written=total_bytes(op.outputs))


@op_cost("tensor_cast.indexer_candidates")
def indexer_candidates(op: OpRecord) -> OpCost:
    """scores[B,Q,S'] -> [B,Q,K',2]: the same over the local tokens, and score and place of each side by side."""
    b, q, local = dims(op.inputs[0])
    dcp = op.attr("dcp", 1)
    scores = b * _pairs(q, local * dcp, dcp)
    return OpCost(OpClass.POINTWISE, flops=scores, bytes_read=scores * _SCORE, bytes_written=total_bytes(op.outputs))


@op_cost("tensor_cast.indexer_merge")
def indexer_merge(op: OpRecord) -> OpCost:
    """candidates[dcp,B,Q,K',2] -> places[B,Q,K]: the best of all ranks' candidates."""
    return OpCost(
        OpClass.POINTWISE,
        flops=tensor_numel(op.inputs[0]) / 2,
        bytes_read=total_bytes(op.inputs),
        bytes_written=total_bytes(op.outputs),
    )


@op_cost("tensor_cast.sparse_mla_attention")
def sparse_mla_attention(op: OpRecord) -> OpCost:
    """q[B,Q,h,R+r], kv[B,S',R+r], places[B,Q,K'] -> out[B,Q,h,R] (, lse): absorbed, over the chosen tokens.

    FLOPs 2*h*((R + r) + R) per token attended to, ``min(seen, K)`` per query; under DCP each rank owns 1/dcp of them.
    Queries choose apart, so each gathers its own rows. The kernel computes whole tiles of heads (attribute
    ``head_tiles``, the engine's).
    """
    query, latent, places = op.inputs[:3]
    b, q, heads, width = dims(query)
    rank = dims(op.outputs[0])[-1]
    dcp = op.attr("dcp", 1)
    attended = b * visible_pairs(q, dims(latent)[1] * dcp, op.attr("topk")) / dcp
    flops = 2 * attended * heads * (width + rank)
    return OpCost(
        OpClass.MLA_DECODE,
        flops=flops,
        padded_flops=flops * padded_heads(int(heads), op.attr("head_tiles", ())) / heads,
        tiles=b * q,
        compute_dtype=query.dtype,
        bytes_read=tensor_bytes(query)
        + attended * latent_bytes(int(rank), int(width - rank), latent.dtype)
        + tensor_numel(places) * _PLACE
        + total_bytes(op.inputs[3:]),
        bytes_written=total_bytes(op.outputs),
    )
