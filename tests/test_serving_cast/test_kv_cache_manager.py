"""Tables, buffers and capacity of the paged KV cache, against figures of engines and of the RFC."""

from __future__ import annotations

from typing import Any

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
    assert drafts.batch_gib(8, 4096) == pytest.approx(8 * 65 * drafts.block_bytes / GIB)
