"""Tables, buffers and capacity of the paged KV cache, against figures of engines and of the RFC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serving_cast.config import ParallelConfig
from serving_cast.kv_cache_manager import (
    KVCacheManager,
    attn_lse_local_bytes,
    block_table_shape,
    logical_block_size,
    slot_mapping_shape,
)
from tensor_cast.model_catalog import load_model_config
from tensor_cast.units import GIB


def manager(model: str = "deepseek-ai/DeepSeek-V3", block_size: int = 64, mtp: int = 0, **sizes: Any) -> KVCacheManager:
    config = load_model_config(model)
    return KVCacheManager(config, ParallelConfig(**sizes), block_size, "bfloat16", "vllm-ascend", mtp)


def test_block_table_has_a_row_per_request() -> None:
    shape = block_table_shape(num_decodes=7, num_prefills=2, max_tokens=4097, block_size=128)
    assert shape == (9, 33)


def test_dcp_alone_only_shortens_the_rows() -> None:
    shape = block_table_shape(num_decodes=7, num_prefills=2, max_tokens=4097, block_size=128, dcp_size=4)
    assert shape == (9, 9)


def test_speculative_decoding_alone_changes_nothing() -> None:
    shape = block_table_shape(num_decodes=7, num_prefills=2, max_tokens=4097, block_size=128, num_mtp_tokens=3)
    assert shape == (9, 33)


def test_dcp_with_speculative_decoding_flattens() -> None:
    """RFC class A: [N_d * decode_threshold + N_p, max_blk]."""
    shape = block_table_shape(
        num_decodes=7, num_prefills=2, max_tokens=4097, block_size=128, dcp_size=4, num_mtp_tokens=3
    )
    assert shape == (7 * 4 + 2, 9)


def test_slot_mapping_has_every_token_of_the_step() -> None:
    assert slot_mapping_shape(num_decodes=7, num_prefill_tokens=100, num_mtp_tokens=2) == (121,)


def test_logical_block() -> None:
    assert logical_block_size(128, 8) == 1024


def test_lse_buffer() -> None:
    """RFC class D: [B*Q, h*dcp/tp] float32. DeepSeek-R1, tp8 dcp8, 16 requests with one draft token."""
    size = attn_lse_local_bytes(num_decodes=16, query_length=2, num_attention_heads=128, tp_size=8, dcp_size=8)
    assert size == 32 * 128 * 4
    assert attn_lse_local_bytes(num_decodes=16, query_length=2, num_attention_heads=128, tp_size=8, dcp_size=1) == 0


@pytest.mark.parametrize(("dcp", "mtp", "blocks", "tokens"), [(1, 0, 4774, 305_536), (8, 0, 4774, 2_444_288)])
def test_capacity_of_deepseek_v3(dcp: int, mtp: int, blocks: int, tokens: int) -> None:
    """20 GiB, block 64, 163,840 tokens a request: what vLLM 0.30's own code prints."""
    kv = manager(tp_size=8, dcp_size=dcp, mtp=mtp)
    assert kv.block_bytes == 4_497_408
    assert kv.num_blocks(20 * GIB) == blocks
    assert kv.pool_tokens(20 * GIB, 163_840) == tokens


def test_capacity_with_draft_layer() -> None:
    kv = manager(tp_size=8, mtp=1)
    assert kv.block_bytes == 4_571_136
    assert kv.num_blocks(20 * GIB) == 4697


@pytest.mark.parametrize(("dcp", "tokens"), [(1, 223_088), (2, 446_176)])
def test_capacity_of_qwen3_235b(dcp: int, tokens: int) -> None:
    """10 GiB, block 16, 40,960 tokens a request: vLLM 0.30's own code again."""
    kv = manager("Qwen/Qwen3-235B-A22B", 16, tp_size=8, dcp_size=dcp)
    assert kv.num_blocks(10 * GIB) == 13_943
    assert kv.pool_tokens(10 * GIB, 40_960) == tokens


def test_float_truncation_of_the_reported_tokens() -> None:
    """Engines multiply a float: 6,046 blocks over 5,500 a request give 386,943 tokens of 352,000, not 386,944."""
    kv = manager(tp_size=8)
    pool = 6046 * kv.block_bytes
    assert kv.pool_tokens(pool, 352_000) == int(6046 / 5500 * 352_000) == 386_943


def test_requests_in_a_pool_leave_the_null_block() -> None:
    kv = manager(tp_size=8)
    ten = 10 * kv.request_bytes(4096)
    assert kv.max_requests(ten + kv.block_bytes, 4096) == 10
    assert kv.max_requests(ten + kv.block_bytes - 1, 4096) == 9
    assert kv.max_requests(0, 4096) == 0


def test_draft_tokens_reserve_slots() -> None:
    """4,096 tokens fill 64 blocks; three draft tokens start another."""
    plain, drafts = manager(tp_size=8), manager(tp_size=8, mtp=3)
    assert plain.request_bytes(4096) == 64 * plain.block_bytes
    assert drafts.request_bytes(4096) == 65 * drafts.block_bytes
    assert drafts.pool_bytes(8, 4096) == 8 * 65 * drafts.block_bytes


def test_no_drafts_beyond_the_longest_request() -> None:
    """An engine started for 4,096 tokens gives the last drafts of such a request no slots."""
    config, layout = load_model_config("deepseek-ai/DeepSeek-V3"), ParallelConfig(tp_size=8)
    kv = KVCacheManager(config, layout, 64, "bfloat16", "vllm", 3, max_model_len=4096)
    assert kv.request_blocks(4096).held == 64
    assert kv.request_blocks(4092).held == 64
    assert kv.request_blocks(4032).held == 64  # 63 full blocks, and one for the drafts


def test_windowed_layers_take_blocks_of_the_widest_group() -> None:
    """gpt-oss-20b: 12 layers with a window of 128 tokens and 12 without, in two groups that draw from one pool.

    A page of 16 tokens is 8 heads * 2 * 64 elements of two bytes: 32 KiB, so a block costs 12 * 32 KiB. 5,000 tokens
    take 313 blocks of the full layers. Behind a window a decoding request keeps 128 tokens: 8 blocks and one for the
    partial ends. While its prompt is computed, 8,192 tokens may be scheduled before anything is freed: all of 5,000.
    """
    kv = KVCacheManager(
        load_model_config("openai/gpt-oss-20b"), ParallelConfig(), 16, "bfloat16", "vllm", max_model_len=5000,
        in_flight=2 * 8192,
    )  # fmt: skip
    assert kv.block_bytes == 12 * 16 * 8 * 2 * 64 * 2 == 393_216
    blocks = kv.request_blocks(5000)
    assert (blocks.held, blocks.admitted) == (313 + 9, 313 + 314)
    assert [int(blocks.of(n)) for n in (0, 1, 2, 10)] == [0, 627, 627 + 322, 627 + 9 * 322]
    assert [blocks.fitting(n) for n in (626, 627, 948, 949, 627 + 9 * 322)] == [0, 1, 1, 2, 10]
    assert list(kv.pool_bytes(np.array([1, 2]), 5000)) == [627 * 393_216, 949 * 393_216]
    # Prompts alone: nothing is freed yet. What is handed over is what windows reach, in 24 layers.
    assert kv.prompt_bytes(3, 5000) == 3 * 627 * 393_216
    assert kv.request_bytes(5000) == 12 * (313 + 9) * 32 * 1024
