"""The paged KV cache of one rank: tables and buffers of the RFC's A and D classes, and how much fits a pool.

DCP leaves the physical cache alone. A block still holds ``block_size`` tokens on each rank, but stands for
``block_size * dcp`` tokens of a sequence, so the same pool holds dcp times the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from serving_cast.config import ParallelConfig
from tensor_cast.engine.kv_cache import cache_layers, request_kv_bytes
from tensor_cast.engine.kv_groups import CacheGroup, RequestBlocks, build_groups, request_blocks, with_drafts
from tensor_cast.model_config import ModelConfig
from tensor_cast.units import ceil_div

__all__ = [
    "KVCacheManager",
    "attn_lse_local_bytes",
    "block_table_shape",
    "logical_block_size",
    "slot_mapping_shape",
]

_FLOAT32_BYTES = 4


def logical_block_size(block_size: int, dcp_size: int) -> int:
    """Tokens of a sequence that one block index stands for."""
    return block_size * dcp_size


def block_table_shape(
    *, num_decodes: int, num_prefills: int, max_tokens: int, block_size: int, dcp_size: int = 1, num_mtp_tokens: int = 0
) -> tuple[int, int]:
    """Rows and columns of a step's block table.

    One row per request; with DCP *and* speculative decoding one per query token of each decode, because every query
    token then has its own length on a rank: ``[N_d * decode_threshold + N_p, max_blk]`` with
    ``decode_threshold = 1 + num_mtp_tokens`` (RFC 2.1.4.1).
    """
    threshold = 1 + num_mtp_tokens if dcp_size > 1 else 1
    columns = ceil_div(max_tokens, logical_block_size(block_size, dcp_size))
    return num_decodes * threshold + num_prefills, columns


def slot_mapping_shape(*, num_decodes: int, num_prefill_tokens: int, num_mtp_tokens: int = 0) -> tuple[int]:
    """One slot per token of the step, owned by this rank or not (a rank skips the tokens of the others)."""
    return (num_decodes * (1 + num_mtp_tokens) + num_prefill_tokens,)


def attn_lse_local_bytes(
    *, num_decodes: int, query_length: int, num_attention_heads: int, tp_size: int, dcp_size: int
) -> int:
    """Bytes of ``attn_lse_local`` ``[B*Q, h*dcp/tp]`` in float32; 0 without DCP, which needs no merge.

    The trace holds this tensor as an output of decode attention, so the activation peak already counts it: this is for
    display, not for a memory sum.
    """
    if dcp_size == 1:
        return 0
    heads = num_attention_heads * dcp_size // tp_size
    return num_decodes * query_length * heads * _FLOAT32_BYTES


@dataclass(frozen=True)
class KVCacheManager:
    """KV accounting of the ranks of one pipeline stage, in whole blocks as the engine allocates them.

    Layers form groups over all stages; each group takes blocks of one pool, whose size the widest group of the stage
    sets (:mod:`tensor_cast.engine.kv_groups`).

    Args:
        kv_dtype: element type of the cache.
        num_mtp_tokens: draft tokens that each request reserves slots for.
        layers: those of the stage, draft layers among them; None for all.
        own_indexers: layers that get an indexer although they share top-k indices.
        max_model_len: tokens of the longest request; None where draft tokens always have slots.
        in_flight: tokens that may be scheduled at once, before blocks behind a window are freed.
    """

    model: ModelConfig
    parallel: ParallelConfig
    block_size: int
    kv_dtype: str
    dcp_semantics: str
    num_mtp_tokens: int = 0
    layers: range | None = None
    own_indexers: tuple[int, ...] = ()
    max_model_len: int | None = None
    in_flight: int = 0

    def _options(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "kv_dtype": self.kv_dtype,
            "dcp_semantics": self.dcp_semantics,
            "num_mtp_tokens": self.num_mtp_tokens,
            "extra_indexers": self.own_indexers,
        }

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Groups of the caches of all stages."""
        return build_groups(cache_layers(self.model, self.parallel.to_tensor_cast(), **self._options()))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block on a rank of the stage; engines keep one such block as the null block."""
        return max(group.block_bytes(self.layers) for group in self.groups)

    def request_blocks(self, tokens: int) -> RequestBlocks:
        """Blocks of one request that ends with ``tokens`` tokens, the slots of its next draft tokens included."""
        slots = with_drafts(tokens, self.num_mtp_tokens, self.max_model_len or tokens + self.num_mtp_tokens)
        return request_blocks(self.groups, slots, dcp=self.parallel.dcp_size, in_flight=self.in_flight)

    def request_bytes(self, tokens: int) -> int:
        """Bytes of the stage's caches of one request with ``tokens`` tokens and the slots of its next draft tokens.

        What has to be moved to hand the request over: only what windows reach, and no padding of groups.
        """
        return int(
            request_kv_bytes(
                self.model,
                self.parallel.to_tensor_cast(),
                tokens=tokens + self.num_mtp_tokens,
                layers=self.layers,
                **self._options(),
            )
        )

    def pool_bytes(self, requests: Any, tokens: int) -> Any:
        """Bytes of the pool that ``requests`` requests (a number or an array) of ``tokens`` tokens take."""
        return self.request_blocks(tokens).of(requests) * self.block_bytes

    def prompt_bytes(self, requests: Any, tokens: int) -> Any:
        """As :meth:`pool_bytes` where all of them compute their prompts: no block behind a window is free yet."""
        return requests * self.request_blocks(tokens).admitted * self.block_bytes

    def max_requests(self, pool_bytes: float, tokens: int) -> int:
        """Most requests of ``tokens`` tokens that a pool holds beside the null block."""
        return self.request_blocks(tokens).fitting(max(0, self.num_blocks(pool_bytes) - 1))

    def num_blocks(self, pool_bytes: float) -> int:
        """Blocks that a pool of ``pool_bytes`` is divided into, the null block included."""
        return int(pool_bytes // self.block_bytes)

    def pool_tokens(self, pool_bytes: float, max_model_len: int) -> int:
        """Tokens of KV cache as engines report them at start-up.

        ``int(num_blocks / blocks_per_request * max_model_len)``: the engine multiplies its float concurrency by the
        longest request, and truncates.
        """
        longest = request_blocks(self.groups, max_model_len, dcp=self.parallel.dcp_size, in_flight=self.in_flight)
        return int(self.num_blocks(pool_bytes) / longest.admitted * max_model_len)
