"""The inputs of a step: the paged KV cache and its metadata, as a serving engine lays them out (RFC class A)."""

from __future__ import annotations

from dataclasses import dataclass

from tensor_cast.engine.dcp import get_semantics
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig
from tensor_cast.units import ceil_div


@dataclass(frozen=True)
class KVCacheInfo:
    """Paged cache of one layer on one rank.

    Args:
        block_size: tokens of a physical block; DCP leaves it alone.
        logical_block_size: tokens of a sequence that one block index stands for: block_size * dcp.
        blocks_per_request: columns of the block table.
        num_blocks: physical blocks that this batch fills.
        kv_cache_shape: ``[2, N_blk, block_size, h_kv, D]`` for GQA, ``[N_blk, block_size, kv_lora + rope]`` for MLA.
        block_table_shape: ``[B, blocks]``; one row per query token under DCP with speculative decoding.
        slot_mapping_shape: ``[B * Q]``, one slot per new token whether or not this rank owns it.
    """

    block_size: int
    logical_block_size: int
    blocks_per_request: int
    num_blocks: int
    kv_cache_shape: tuple[int, ...]
    block_table_shape: tuple[int, int]
    slot_mapping_shape: tuple[int]


class InputGenerator:
    """Shapes of a step's inputs for one model, layout and block size."""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, *, dcp_semantics: str, block_size: int) -> None:
        self.model = model
        self.parallel = parallel
        self.dcp_semantics = dcp_semantics
        self.block_size = block_size

    def _get_kv_cache_info(self, num_queries: int, query_length: int, context_length: int) -> KVCacheInfo:
        """Layout of the cache for ``num_queries`` requests that hold ``context_length`` tokens each."""
        dcp = self.parallel.decode_context_parallel_size
        logical = self.block_size * dcp
        blocks = ceil_div(context_length, logical)
        num_blocks = num_queries * blocks
        shape: tuple[int, ...]
        if self.model.attention is AttentionKind.GQA:
            heads = get_semantics(self.dcp_semantics).local_kv_heads(
                self.model.num_key_value_heads, self.parallel.tensor_parallel_size, dcp
            )
            shape = (2, num_blocks, self.block_size, heads, self.model.head_dim)
        else:
            shape = (num_blocks, self.block_size, self.model.kv_lora_rank + self.model.qk_rope_head_dim)
        flattened = dcp > 1 and query_length > 1
        rows = num_queries * query_length if flattened else num_queries
        return KVCacheInfo(
            block_size=self.block_size,
            logical_block_size=logical,
            blocks_per_request=blocks,
            num_blocks=num_blocks,
            kv_cache_shape=shape,
            block_table_shape=(rows, blocks),
            slot_mapping_shape=(num_queries * query_length,),
        )
