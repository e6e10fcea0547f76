"""Attention, the paged cache, and the merge of partial results.

``B`` requests, ``Q`` new tokens each, ``S`` cached tokens each (the new ones included), ``h`` query heads and ``hkv``
KV heads on this rank, ``D``/``Dv`` head widths. Attention is causal, so a request has ``Q*S - Q*(Q-1)/2`` visible
(query, key) pairs; a sliding window caps what each query sees. DCP splits the keys: each rank holds ``S/dcp`` of them.
"""

from __future__ import annotations

import numpy as np

from tensor_cast.device.profile import OpClass
from tensor_cast.dtypes import bits_of
from tensor_cast.engine.kv_formats import KV_FORMATS
from tensor_cast.ir.expr import Num
from tensor_cast.ir.record import Kind, OpRecord, TensorSpec
from tensor_cast.performance_model.base import FREE, OpCost, dims, op_cost, tensor_bytes, tensor_numel, total_bytes


def visible_pairs(q: Num, s: Num, window: int | None, causal: bool = True) -> Num:
    """(query, key) pairs of one request: query i of Q sees ``S - Q + i`` keys, at most ``window`` of them.

    Continuous in both arguments; equals the integer sum wherever both are integers.
    """
    if not causal:
        return q * s if window is None else q * np.minimum(s, window)
    past = s - q
    if window is None:
        return q * past + q * (q + 1) / 2
    growing = np.clip(window - past, 0, q)  # queries that do not yet fill the window
    return growing * past + growing * (growing + 1) / 2 + (q - growing) * window


def keys_read(q: Num, s: Num, window: int | None) -> Num:
    """Distinct keys that Q new tokens of one request read."""
    return s if window is None else np.minimum(s, window + q - 1)


#: Query rows that one tile of a prefill kernel covers.
TILE = 128


def _is_decode(op: OpRecord) -> bool:
    return str(op.attr("phase", "decode")) == "decode"


def _cache_dtype(spec: TensorSpec) -> str:
    return spec.dtype if spec.kind is Kind.KV else ""


@op_cost("tensor_cast.attention")
def attention(op: OpRecord) -> OpCost:
    """q[B,Q,h,D], k[B,S',hkv,D], v[B,S',hkv,Dv] -> out[B,Q,h,Dv] (, lse[B,Q,h]); S' = S/dcp.

    FLOPs 2*pairs*h*(D + Dv). Each KV head is read once for all its query heads and all Q tokens. A prefill kernel works
    off tiles of queries and computes the masked half of the tiles on the diagonal too; a decode kernel has one piece of
    work per request and KV head.
    """
    query, key, value = op.inputs[:3]
    b, q, heads, d = dims(query)
    kv_heads, dv = dims(key)[2], dims(value)[3]
    dcp, window = op.attr("dcp", 1), op.attr("window")
    s = dims(key)[1] * dcp
    pairs = visible_pairs(q, s, window, bool(op.attr("causal", True))) / dcp
    kv_bytes = (d * bits_of(key.dtype) + dv * bits_of(value.dtype)) / 8
    flops = 2 * b * pairs * heads * (d + dv)
    padded: Num | None = None
    if _is_decode(op):
        op_class, tiles = OpClass.ATTENTION_DECODE, b * kv_heads
    else:
        # Expanded MLA has heads of unequal width and kernels of its own.
        op_class = OpClass.ATTENTION_PREFILL if d == dv else OpClass.MLA_PREFILL
        padded = flops + 2 * b * heads * (d + dv) * (q + TILE / 2) * (TILE / 2)
        tiles = b * heads * np.maximum(q / TILE, 1)
    return OpCost(
        op_class=op_class,
        flops=flops,
        padded_flops=padded,
        tiles=tiles,
        compute_dtype=query.dtype,
        cache_dtype=_cache_dtype(key),
        bytes_read=tensor_bytes(query)
        + b * keys_read(q, s, window) / dcp * kv_heads * kv_bytes
        + total_bytes(op.inputs[3:]),
        bytes_written=total_bytes(op.outputs),
    )


@op_cost("tensor_cast.mla_attention")
def mla_attention(op: OpRecord) -> OpCost:
    """Absorbed MLA: q[B,Q,h,R+r], kv[B,S',R+r] -> out[B,Q,h,R] (, lse); one latent row serves every head.

    FLOPs 2*pairs*h*((R + r) + R).
    """
    query, latent = op.inputs[:2]
    b, q, heads, width = dims(query)
    rank = dims(op.outputs[0])[-1]
    dcp = op.attr("dcp", 1)
    s = dims(latent)[1] * dcp
    pairs = visible_pairs(q, s, op.attr("window"), bool(op.attr("causal", True))) / dcp
    return OpCost(
        op_class=OpClass.MLA_DECODE,
        flops=2 * b * pairs * heads * (width + rank),
        tiles=b,
        compute_dtype=query.dtype,
        cache_dtype=_cache_dtype(latent),
        bytes_read=tensor_bytes(query)
        + b * keys_read(q, s, op.attr("window")) / dcp * dims(latent)[2] * bits_of(latent.dtype) / 8
        + total_bytes(op.inputs[2:]),
        bytes_written=total_bytes(op.outputs),
    )


def latent_bytes(rank: int, rope: int, dtype: str) -> int:
    """Bytes of one latent that sparse attention reads: 8-bit ones are stored as ``fp8_ds_mla``."""
    name = "fp8_ds_mla" if bits_of(dtype) == 8 else dtype
    latent = KV_FORMATS.get(name).latent
    assert latent is not None
    return latent(rank, rope)


@op_cost("tensor_cast.reshape_and_cache", "tensor_cast.mla_cache_write")
def cache_write(op: OpRecord) -> OpCost:
    """Reads the new keys and values and writes them to the cache in the cache's dtype."""
    new = [spec for spec in op.inputs if spec.kind is Kind.ACTIVATION]
    index = [spec for spec in op.inputs if spec.kind is Kind.INDEX]
    cache = next((spec.dtype for spec in op.inputs if spec.kind is Kind.KV), new[0].dtype)
    rank = op.attr("sparse_rank")
    if rank:
        width = int(dims(new[0])[-1])
        written: Num = tensor_numel(new[0]) / width * latent_bytes(rank, width - rank, cache)
        return OpCost(OpClass.POINTWISE, bytes_read=total_bytes(new) + total_bytes(index), bytes_written=written)
    written = 0
    for spec in new:
        written = written + tensor_numel(spec) * (bits_of(cache) / 8)
    return OpCost(OpClass.POINTWISE, bytes_read=total_bytes(new) + total_bytes(index), bytes_written=written)


@op_cost("tensor_cast.gather_kv")
def gather_kv(op: OpRecord) -> OpCost:
    """Free: the kernels read the pages in place, and attention is charged for them."""
    return FREE


@op_cost("tensor_cast.merge_attention")
def merge_attention(op: OpRecord) -> OpCost:
    """Weighted sum of the partial outputs of the dcp ranks: an exponential per lse, a multiply-add per element."""

    def elements(specs: tuple[TensorSpec, ...]) -> Num:
        total: Num = 0
        for spec in specs:
            total = total + tensor_numel(spec)
        return total

    return OpCost(
        OpClass.POINTWISE,
        flops=2 * elements(op.inputs),
        bytes_read=total_bytes(op.inputs),
        bytes_written=total_bytes(op.outputs),
    )
