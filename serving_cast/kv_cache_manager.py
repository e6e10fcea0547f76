"""The paged KV cache of one rank: tables and buffers of the RFC's A and D classes, and how much fits a pool.

DCP leaves the physical cache alone. A block still holds ``block_size`` tokens on each rank, but stands for
``block_size * dcp`` tokens of a sequence, so the same pool holds dcp times the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving_cast.config import ParallelConfig
from tensor_cast.engine.kv_cache import request_kv_bytes
from tensor_cast.model_config import ModelConfig
from tensor_cast.units import GIB, ceil_div

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
    """KV accounting of one rank, in whole blocks as the engine allocates them.

    Args:
        kv_dtype: element type of the cache.
        num_mtp_tokens: draft tokens that each request reserves slots for.
        layers: those of one pipeline stage, draft layers among them; None for all.
        own_indexers: layers that get an indexer although they share top-k indices.
    """

    model: ModelConfig
    parallel: ParallelConfig
    block_size: int
    kv_dtype: str
    dcp_semantics: str
    num_mtp_tokens: int = 0
    layers: range | None = None
    own_indexers: tuple[int, ...] = ()

    def request_bytes(self, tokens: int) -> int:
        """Bytes of one request that holds ``tokens`` tokens and the slots of its next draft tokens."""
        return self._bytes(tokens + self.num_mtp_tokens)

    def _bytes(self, tokens: int) -> int:
        return int(
            request_kv_bytes(
                self.model,
                self.parallel.to_tensor_cast(),
                tokens=tokens,
                block_size=self.block_size,
                kv_dtype=self.kv_dtype,
                dcp_semantics=self.dcp_semantics,
                num_mtp_tokens=self.num_mtp_tokens,
                layers=self.layers,
                extra_indexers=self.own_indexers,
            )
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the rank; engines keep one such block as the null block."""
        return self._bytes(1)

    def batch_gib(self, batch_size: int, tokens: int) -> float:
        """GiB of ``batch_size`` requests of ``tokens`` tokens each."""
        return batch_size * self.request_bytes(tokens) / GIB

    def max_requests(self, pool_bytes: float, tokens: int) -> int:
        """Most requests of ``tokens`` tokens that a pool holds beside the null block."""
        return max(0, int((pool_bytes - self.block_bytes) // self.request_bytes(tokens)))

    def num_blocks(self, pool_bytes: float) -> int:
        """Blocks that a pool of ``pool_bytes`` is divided into, the null block included."""
        return int(pool_bytes // self.block_bytes)

    def pool_tokens(self, pool_bytes: float, max_model_len: int) -> int:
        """Tokens of KV cache as engines report them at start-up.

        ``int(num_blocks / blocks_per_request * max_model_len)``: the engine multiplies its float concurrency by the
        longest request, and truncates. Models whose layers all have blocks of the same tokens; engines group others.
        """
        blocks_per_request = self._bytes(max_model_len) / self.block_bytes
        return int(self.num_blocks(pool_bytes) / blocks_per_request * max_model_len)
