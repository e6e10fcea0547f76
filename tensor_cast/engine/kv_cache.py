"""KV cache specs that know their own bytes, and what a request occupies on one rank.

A layer's cache is paged: a request takes whole blocks of ``block_size`` tokens. Under DCP a block keeps its size but
stands for ``block_size * dcp`` tokens of the sequence, of which each rank holds its share.
Source: vLLM 0.30 ``v1/kv_cache_interface.py`` (page sizes, blocks of a request), vllm-ascend for its block sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensor_cast.dtypes import bits_of
from tensor_cast.engine.dcp import get_semantics
from tensor_cast.errors import ConfigError, UnsupportedModelError
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig

__all__ = [
    "KV_DTYPES",
    "FullAttentionSpec",
    "KVCacheSpec",
    "MlaSpec",
    "SlidingWindowSpec",
    "kv_cache_specs",
    "page_bytes",
    "request_kv_bytes",
]

#: Element types of a cache. The 8-bit ones have static scales, per tensor or channel, which take no room in the cache
#: (vLLM fp8, vllm-ascend C8); vLLM's int8_per_token_head would add 8 bytes per token and head.
KV_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")

#: An int or a numpy array of them.
Tokens = Any


@dataclass(frozen=True, slots=True)
class KVCacheSpec(ABC):
    """Cache of one layer on one rank. ``block_size`` tokens per block; ``dtype`` of its elements."""

    block_size: int
    dtype: str

    @property
    @abstractmethod
    def token_bytes(self) -> int:
        """Bytes that one token takes."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.token_bytes

    def blocks(self, tokens: Tokens, dcp: int = 1) -> Tokens:
        """Blocks that a request of ``tokens`` tokens takes on the fullest rank."""
        return -(-tokens // (self.block_size * dcp))


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(KVCacheSpec):
    """K and V of ``kv_heads`` local heads, of ``head_dim`` and ``v_head_dim`` elements."""

    kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def token_bytes(self) -> int:
        """``kv_heads * (head_dim + v_head_dim)`` elements."""
        return self.kv_heads * (self.head_dim + self.v_head_dim) * bits_of(self.dtype) // 8


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(FullAttentionSpec):
    """As full attention, but blocks behind the window are freed.

    ``in_flight`` tokens may be scheduled before the window moves on; at the start of a step a request holds the window
    but one token, and the blocks at both ends may be partly filled.
    """

    window: int
    in_flight: int = 1

    def blocks(self, tokens: Tokens, dcp: int = 1) -> Tokens:
        """``ceil(min(window - 1 + in_flight, tokens) / block_size) + 1``, and never more than full attention takes."""
        if dcp > 1:
            raise UnsupportedModelError("a sliding-window cache is not split by decode context parallelism")
        kept = np.minimum(self.window - 1 + self.in_flight, tokens)
        return np.minimum(-(-kept // self.block_size) + 1, -(-tokens // self.block_size))


@dataclass(frozen=True, slots=True)
class MlaSpec(KVCacheSpec):
    """One latent and one rope key per token, whatever the number of heads; each TP rank holds them all."""

    kv_lora_rank: int
    rope_dim: int

    @property
    def token_bytes(self) -> int:
        """``kv_lora_rank + rope_dim`` elements."""
        return (self.kv_lora_rank + self.rope_dim) * bits_of(self.dtype) // 8


def kv_cache_specs(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    block_size: int,
    kv_dtype: str,
    dcp_semantics: str,
    num_mtp_tokens: int = 0,
) -> tuple[KVCacheSpec, ...]:
    """The cache of each layer on one rank; with MTP also that of each draft layer.

    Raises:
        ConfigError: ``kv_dtype`` is no type of a cache.
        UnsupportedModelError: sparse attention, whose indexer keeps a cache of its own.
    """
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"unknown KV cache dtype {kv_dtype!r}; allowed are {', '.join(KV_DTYPES)}")
    drafts = min(model.num_nextn_predict_layers, num_mtp_tokens)
    match model.attention:
        case AttentionKind.DSA:
            raise UnsupportedModelError(
                f"{model.model_id}: the indexer cache of sparse attention (DSA) is not modelled yet"
            )
        case AttentionKind.MLA:
            spec = MlaSpec(block_size, kv_dtype, model.kv_lora_rank, model.qk_rope_head_dim)
            return (spec,) * (model.num_hidden_layers + drafts)
    heads = get_semantics(dcp_semantics).local_kv_heads(
        model.num_key_value_heads, parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    )
    full = FullAttentionSpec(block_size, kv_dtype, heads, model.head_dim, model.v_head_dim)
    by_window = {None: full} | {
        window: SlidingWindowSpec(
            block_size, kv_dtype, heads, model.head_dim, model.v_head_dim, window, in_flight=1 + num_mtp_tokens
        )
        for window in set(model.layer_windows)
        if window is not None
    }
    return (*(by_window[window] for window in model.layer_windows), *(full,) * drafts)


def page_bytes(specs: tuple[KVCacheSpec, ...]) -> int:
    """Bytes of one block over all layers, where each layer has blocks of its own."""
    return sum(spec.page_bytes for spec in specs)


def request_kv_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    tokens: Tokens,
    block_size: int,
    kv_dtype: str,
    dcp_semantics: str,
    num_mtp_tokens: int = 0,
) -> Any:
    """KV bytes that one request of ``tokens`` tokens occupies on the fullest rank, in whole blocks.

    Pipeline stages are not told apart: all layers count. ``num_mtp_tokens`` > 0 adds the caches of the draft layers;
    slots for draft tokens are the caller's to add to ``tokens``.

    Args:
        model: facts of the model.
        parallel: tp and dcp matter.
        tokens: int or numpy array of ints.
        block_size: tokens per physical block.
        kv_dtype: one of :data:`KV_DTYPES`.
        dcp_semantics: see :mod:`tensor_cast.engine.dcp`.
        num_mtp_tokens: draft tokens per step.

    Returns:
        int, or an int64 array of the shape of ``tokens``.

    Raises:
        ConfigError, UnsupportedModelError: as :func:`kv_cache_specs`.
    """
    specs = kv_cache_specs(
        model,
        parallel,
        block_size=block_size,
        kv_dtype=kv_dtype,
        dcp_semantics=dcp_semantics,
        num_mtp_tokens=num_mtp_tokens,
    )
    count = np.asarray(tokens, dtype=np.int64)
    total = np.zeros_like(count)
    dcp = parallel.decode_context_parallel_size
    for spec, layers in Counter(specs).items():
        total = total + layers * spec.page_bytes * spec.blocks(count, dcp)
    return int(total) if count.ndim == 0 else total
