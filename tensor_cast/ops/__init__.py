"""Custom ops: what engines run as one kernel. Each has a schema, a shape function and a small CPU reference."""

from __future__ import annotations

from tensor_cast.ops.attention import (
    attention,
    gather_kv,
    merge_attention,
    mla_attention,
    mla_cache_write,
    reshape_and_cache,
)
from tensor_cast.ops.dsa import (
    indexer_cache_write,
    indexer_candidates,
    indexer_merge,
    indexer_scores,
    indexer_topk,
    sparse_mla_attention,
)
from tensor_cast.ops.moe import grouped_experts
from tensor_cast.ops.sample import sample

__all__ = [
    "attention",
    "gather_kv",
    "grouped_experts",
    "indexer_cache_write",
    "indexer_candidates",
    "indexer_merge",
    "indexer_scores",
    "indexer_topk",
    "merge_attention",
    "mla_attention",
    "mla_cache_write",
    "reshape_and_cache",
    "sample",
    "sparse_mla_attention",
]
