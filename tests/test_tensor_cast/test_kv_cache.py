"""KV bytes against engine logs and arithmetic on public configs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.engine.kv_cache import (
    KV_DTYPES,
    FullAttentionSpec,
    IndexerSpec,
    KVCacheSpec,
    MlaSpec,
    SlidingWindowSpec,
    kv_cache_specs,
    page_bytes,
    request_kv_bytes,
)
from tensor_cast.errors import ConfigError, UnsupportedModelError
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.units import GIB

R1 = load_model_config("deepseek-ai/DeepSeek-R1")
QWEN = load_model_config("Qwen/Qwen3-235B-A22B")
LLAMA_8B = load_model_config("meta-llama/Llama-3.1-8B")
LLAMA_70B = load_model_config("meta-llama/Llama-3.1-70B")
GPT_OSS = load_model_config("openai/gpt-oss-20b")


def layout(tp: int = 1, dcp: int = 1) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp)


def kv(
    model: ModelConfig,
    tokens: int,
    *,
    tp: int = 1,
    dcp: int = 1,
    block: int = 16,
    dtype: str = "bfloat16",
    semantics: str = "vllm",
    mtp: int = 0,
) -> int:
    out = request_kv_bytes(
        model,
        layout(tp, dcp),
        tokens=tokens,
        block_size=block,
        kv_dtype=dtype,
        dcp_semantics=semantics,
        num_mtp_tokens=mtp,
    )
    assert isinstance(out, int)
    return out


@pytest.mark.parametrize(
    ("spec", "token", "page"),
    [
        (FullAttentionSpec(16, "bfloat16", 1, 128, 128), 512, 8_192),
        (FullAttentionSpec(16, "float8_e4m3fn", 8, 128, 128), 2_048, 32_768),
        (FullAttentionSpec(128, "int8", 2, 128, 128), 512, 65_536),
        (MlaSpec(64, "bfloat16", 512, 64), 1_152, 73_728),
        (MlaSpec(128, "float8_e4m3fn", 512, 64), 576, 73_728),
        (MlaSpec(64, "fp8_ds_mla", 512, 64), 656, 41_984),
        (MlaSpec(64, "nvfp4_ds_mla", 512, 64), 352, 22_528),
        # 2 heads: K and V of 128 bytes each and two float32 scales; 64 bytes each with 4 bits.
        (FullAttentionSpec(16, "int8_per_token_head", 2, 128, 128), 528, 8_448),
        (FullAttentionSpec(16, "fp8_per_token_head", 2, 128, 128), 528, 8_448),
        (FullAttentionSpec(16, "int4_per_token_head", 2, 128, 128), 272, 4_352),
        # 2 * 2 head slots of 64 bytes and 8 scales.
        (FullAttentionSpec(16, "nvfp4", 2, 128, 128), 288, 4_608),
        (IndexerSpec(64, "bfloat16", 132), 132, 8_448),
        (IndexerSpec(128, "bfloat16", 256, replicas=8), 2_048, 262_144),
    ],
)
def test_a_spec_knows_its_bytes(spec: KVCacheSpec, token: int, page: int) -> None:
    assert (spec.token_bytes, spec.page_bytes) == (token, page)


@pytest.mark.parametrize(
    ("model", "options", "per_block"),
    [
        # Each from vLLM's own code (0.30) on the same config.
        (LLAMA_70B, {"tp": 8}, 655_360),
        (LLAMA_70B, {"tp": 16}, 655_360),  # KV heads are copied once tp exceeds them
        (QWEN, {"tp": 8}, 770_048),
        (LLAMA_8B, {"dtype": "float8_e4m3fn"}, 1_048_576),
        (R1, {"block": 64}, 4_497_408),
        (R1, {"block": 64, "tp": 8}, 4_497_408),  # the latent is on every rank
        (R1, {"block": 64, "mtp": 1}, 4_571_136),
    ],
)
def test_bytes_per_block(model: ModelConfig, options: dict[str, object], per_block: int) -> None:
    assert kv(model, 1, **options) == per_block  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "options", "gib", "blocks", "tokens"),
    [
        (LLAMA_70B, {"tp": 8}, 10, 16_384, 262_144),
        (QWEN, {"tp": 8}, 10, 13_943, 223_088),
        (QWEN, {"tp": 8, "dcp": 2}, 10, 13_943, 446_176),
        (LLAMA_8B, {"dtype": "float8_e4m3fn"}, 10, 10_240, 163_840),
        (R1, {"block": 64}, 20, 4_774, 305_536),
        (R1, {"block": 64, "mtp": 1}, 20, 4_697, 300_608),
        (R1, {"block": 64, "tp": 8, "dcp": 8}, 20, 4_774, 2_444_288),
    ],
)
def test_what_a_pool_holds(model: ModelConfig, options: dict[str, int], gib: int, blocks: int, tokens: int) -> None:
    assert gib * GIB // kv(model, 1, **options) == blocks  # type: ignore[arg-type]
    # One request as long as the pool takes exactly its blocks.
    assert kv(model, tokens, **options) == blocks * kv(model, 1, **options)  # type: ignore[arg-type]


def test_bytes_per_token_of_public_reports() -> None:
    # GQA caches KV heads, not query heads: Llama-3-70B reads 327,680 bytes per token of context.
    assert kv(LLAMA_70B, 131_072) == 131_072 * 327_680 == 40 * GIB
    # MLA caches the latent, not heads: 61 * 576 * 2 = 70,272 bytes per token, 343 MiB for 5,120 tokens.
    assert kv(R1, 5_120, block=64) == 5_120 * 70_272
    assert 343 <= kv(R1, 5_120, block=64) / 2**20 < 344
    # An engine log: Llama-3.1-8B, 29,751 blocks of 16 are 476,016 tokens of 131,072 bytes.
    assert kv(LLAMA_8B, 476_016) == 29_751 * 16 * 131_072


def test_a_window_holds_what_it_sees() -> None:
    window = SlidingWindowSpec(16, "bfloat16", 8, 64, 64, window=128)
    full = FullAttentionSpec(16, "bfloat16", 8, 64, 64)
    assert [window.blocks(n) for n in (1, 16, 100, 128)] == [full.blocks(n) for n in (1, 16, 100, 128)]
    assert window.blocks(10**6) == 128 // 16 + 1
    # vLLM reserves for the tokens in flight of two batches: (127 + 16,384) / 16 -> 1,032 blocks and one more.
    reserved = replace(window, in_flight=2 * 8192)
    assert reserved.blocks(131_072) == 1_033


def test_gpt_oss_in_a_shared_pool() -> None:
    # 12 windowed and 12 full layers share 40 GiB in groups of 12: 109,226 blocks, 11.84 requests of 131,072 tokens.
    full, window = 131_072 // 16, 1_033
    page = 12 * FullAttentionSpec(16, "bfloat16", 8, 64, 64).page_bytes
    assert page == 393_216
    assert 40 * GIB // page == 109_226
    assert round(109_226 / (full + window), 2) == 11.84
    specs = kv_cache_specs(
        GPT_OSS, layout(), block_size=16, kv_dtype="bfloat16", dcp_semantics="vllm", num_mtp_tokens=0
    )
    assert [isinstance(spec, SlidingWindowSpec) for spec in specs] == [True, False] * 12
    assert page_bytes(specs) == 2 * page
    # In steady decode the windowed layers keep their window: 12 * 32,768 * (8,192 + 9) bytes.
    assert kv(GPT_OSS, 131_072) == 12 * 32_768 * (8_192 + 9)


def test_draft_layers_have_a_cache_only_when_they_run() -> None:
    assert kv(R1, 64, block=64, mtp=3) == kv(R1, 64, block=64, mtp=1) == kv(R1, 64, block=64) * 62 // 61
    assert kv(LLAMA_8B, 64, mtp=1) == kv(LLAMA_8B, 64)  # no draft layers


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_eight_bits_halve_the_cache(dtype: str) -> None:
    assert 2 * kv(R1, 4096, dtype=dtype) == kv(R1, 4096)
    assert 2 * kv(QWEN, 4096, tp=8, dtype=dtype) == kv(QWEN, 4096, tp=8)


@pytest.mark.parametrize("semantics", ["vllm-ascend", "vllm", "rfc"])
@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
def test_mla_shrinks_with_dcp(semantics: str, dcp: int) -> None:
    assert kv(R1, 65_536, tp=8, dcp=dcp, block=128, semantics=semantics) * dcp == kv(R1, 65_536, tp=8, block=128)


def test_gqa_under_the_rfc_keeps_its_bytes_where_heads_are_split() -> None:
    bytes_of = {dcp: kv(LLAMA_70B, 65_536, tp=8, dcp=dcp, semantics="rfc") for dcp in (1, 2, 4, 8)}
    assert len(set(bytes_of.values())) == 1
    assert kv(QWEN, 65_536, tp=8, dcp=2, semantics="rfc") * 2 == kv(QWEN, 65_536, tp=8)


def test_a_rank_rounds_up_to_its_own_blocks() -> None:
    # 129 tokens, block 16, dcp 4: 33 tokens on the fullest rank, 3 blocks; a logical block holds 64.
    assert kv(R1, 129, tp=8, dcp=4) == 3 * kv(R1, 1, tp=8)
    assert kv(R1, 128, tp=8, dcp=4) == 2 * kv(R1, 1, tp=8)


@given(st.lists(st.integers(1, 500_000), min_size=1, max_size=8))
def test_arrays_and_numbers_agree(tokens: list[int]) -> None:
    for model in (R1, GPT_OSS):
        out = request_kv_bytes(
            model, layout(8), tokens=np.array(tokens), block_size=16, kv_dtype="bfloat16", dcp_semantics="vllm"
        )
        assert out.dtype == np.int64
        assert out.tolist() == [kv(model, n, tp=8) for n in tokens]


def test_errors() -> None:
    with pytest.raises(ConfigError, match=f"unknown KV cache dtype 'fp4'; allowed are {', '.join(KV_DTYPES)}"):
        kv(R1, 1, dtype="fp4")
    with pytest.raises(
        ConfigError, match=r"fp8_ds_mla stores latents; .*Llama.* uses gqa attention; allowed are bfloat16"
    ):
        kv(LLAMA_8B, 1, dtype="fp8_ds_mla")
    with pytest.raises(ConfigError, match="int8_per_token_head stores heads of K and V"):
        kv(R1, 1, dtype="int8_per_token_head")
    with pytest.raises(UnsupportedModelError, match="sliding-window cache is not split"):
        kv(GPT_OSS, 1, tp=16, dcp=2)
