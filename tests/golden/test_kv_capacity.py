"""Facts K1 to K26 on the KV cache, each with its arithmetic.

Values marked [engine] come from running vLLM 0.30's own ``kv_cache_utils`` on the same layers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensor_cast.engine.kv_cache import CacheLayer, cache_layers, indexer_layers, request_kv_bytes
from tensor_cast.engine.kv_formats import KV_FORMATS, indexer_token_bytes
from tensor_cast.engine.kv_groups import Capacity, build_groups, plan_pool
from tensor_cast.engine.kv_specs import FullAttentionSpec, RecurrentSpec, SlidingWindowSpec
from tensor_cast.engine.workspaces import indexer_gather_bytes, requested_bytes
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.pipeline_partition import stage_ranges, unsafe_layers
from tensor_cast.units import GIB, MIB

GLM = load_model_config("zai-org/GLM-5.3")
LLAMA_70B = load_model_config("meta-llama/Llama-3.1-70B")
QWEN_235B = load_model_config("Qwen/Qwen3-235B-A22B")
V3 = load_model_config("deepseek-ai/DeepSeek-V3")
V32 = load_model_config("deepseek-ai/DeepSeek-V3.2")
GPT_OSS_20B = load_model_config("openai/gpt-oss-20b")
GPT_OSS_120B = load_model_config("openai/gpt-oss-120b")
GEMMA = load_model_config("google/gemma-3-27b-it")
QWEN_NEXT = load_model_config("Qwen/Qwen3-Next-80B-A3B-Instruct")

#: Two batches of 8,192 tokens in flight.
IN_FLIGHT = 2 * 8192


def capacity(
    model: ModelConfig,
    *gib: float,
    tp: int = 1,
    dcp: int = 1,
    block: int = 16,
    kv: str = "bfloat16",
    mtp: int = 0,
    length: int,
    partition: tuple[int, ...] = (),
    self_compute: bool = False,
    hybrid: bool = True,
    in_flight: int = IN_FLIGHT,
    semantics: str = "vllm",
) -> Capacity:
    """Capacity of ``model`` with ``gib`` GiB of KV memory on a rank of each stage."""
    layers = model.num_hidden_layers
    partition = partition or (layers,)
    full = indexer_layers(model)
    caches = cache_layers(
        model,
        ParallelConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp),
        block_size=block,
        kv_dtype=kv,
        dcp_semantics=semantics,
        num_mtp_tokens=mtp,
        extra_indexers=unsafe_layers(partition, full) if self_compute else (),
    )
    stages = list(stage_ranges(partition))
    stages[-1] = range(stages[-1].start, layers + 8)  # draft layers count on
    room = [int(value * GIB) for value in gib]
    return plan_pool(
        build_groups(caches, hybrid=hybrid), stages, room, max_model_len=length, dcp=dcp, in_flight=in_flight
    )


def test_k1_k2_k4_bytes_of_a_latent() -> None:
    size = {name: KV_FORMATS.get(name).latent for name in ("fp8_ds_mla", "nvfp4_ds_mla", "bfloat16")}
    assert size["fp8_ds_mla"](512, 64) == 512 + 4 * 4 + 2 * 64 == 656  # type: ignore[misc]
    assert size["nvfp4_ds_mla"](512, 64) == 512 // 2 + 512 // 16 + 64 == 352  # type: ignore[misc]
    assert size["bfloat16"](512, 64) == (512 + 64) * 2 == 1152  # type: ignore[misc]


def test_k3_bytes_of_an_indexer_key() -> None:
    fp8, bf16 = KV_FORMATS.get("fp8_ds_mla"), KV_FORMATS.get("bfloat16")
    assert indexer_token_bytes(128, fp8, ascend=False) == 128 + 4 * (128 // 128) == 132
    assert indexer_token_bytes(128, bf16, ascend=False) == 132  # whatever the main cache holds
    assert indexer_token_bytes(128, bf16, ascend=True) == 128 * 2 == 256
    assert indexer_token_bytes(128, KV_FORMATS.get("int8"), ascend=True) == 128 + 2 == 130


def test_k5_layers_with_an_indexer() -> None:
    assert [i for i, full in enumerate(indexer_layers(GLM)) if full] == [0, 1, *range(2, 75, 4)]
    assert sum(indexer_layers(GLM)) == 21
    assert indexer_layers(load_model_config("zai-org/GLM-5.2")) == indexer_layers(GLM)
    assert all(indexer_layers(load_model_config("zai-org/GLM-5")))  # no frequency: every layer
    assert all(indexer_layers(V32))
    assert indexer_layers(V3) == ()


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_k6_k7_bytes_per_token_and_block(tp: int) -> None:
    # 78 layers and the draft layer keep a latent; 21 layers and the draft layer, always, keep indexer keys.
    # (Source 000 leaves out the draft layer's indexer: 79 * 656 + 21 * 132 = 54,596, and finds an error of 0.22 %.)
    assert 79 * 656 + 22 * 132 == 54_728
    pool = capacity(GLM, 17.2628, tp=tp, block=64, kv="fp8", mtp=3, length=327_680)
    assert pool.ranks[0].block_bytes == 64 * 54_728 == 3_502_592


def test_k8_one_stage_of_eight_ranks() -> None:
    # 17.2628 GiB / 3,502,592 B = 5292.05 [engine]. 327,680 / 64 = 5,120 blocks a request.
    pool = capacity(GLM, 17.2628, tp=8, block=64, kv="fp8", mtp=3, length=327_680)
    assert (pool.num_blocks, pool.blocks_per_request) == (5292, 5120)
    assert pool.kv_tokens == 5292 * 64 == 338_688
    # Source 000 says 1.04x for a run with 343,232 tokens, which are 5,363 blocks: 5363 / 5120 = 1.04746 prints 1.05.
    assert f"{pool.max_concurrency:.2f}" == "1.03"
    assert f"{343_232 / 64 / 5120:.2f}" == "1.05"
    assert round(pool.ranks[0].allocated / GIB, 4) == 17.2627
    assert round(GIB / 54_728, 1) == 19_619.6  # tokens in a GiB; source 000: 19,668


def test_k9_the_engine_truncates_a_float() -> None:
    # 352,000 / 64 = 5,500 blocks. 6046 * 64 = 386,944 exactly, but 6046 / 5500 * 352000 is 386943.99999999994.
    pool = capacity(GLM, 6046 * 3_502_592 / GIB, tp=8, block=64, kv="fp8", mtp=3, length=352_000)
    assert pool.num_blocks == 6046
    assert 6046 * 64 == 386_944
    assert pool.kv_tokens == int(6046 / 5500 * 352_000) == 386_943


def test_k10_two_stages_of_39() -> None:
    # Layers 39, 40, 41 compute their own indices. Rank 0: 39 * 656 + 12 * 132 = 27,168 B (layers 0, 1, 2, 6 .. 38).
    # Rank 1: 40 * 656 + (9 + 1 + 3) * 132 = 27,956 B (42 .. 74, the draft layer, the three).
    pool = capacity(
        GLM, 21.95, 15.564, tp=4, block=64, kv="fp8", mtp=3, length=524_288, partition=(39, 39), self_compute=True
    )
    assert [rank.block_bytes for rank in pool.ranks] == [64 * 27_168, 64 * 27_956] == [1_738_752, 1_789_184]
    assert [rank.num_blocks for rank in pool.ranks] == [13_554, 9340]
    assert (pool.num_blocks, pool.binding_stage) == (9340, 1)
    assert pool.kv_tokens == 9340 * 64 == 597_760
    assert f"{pool.max_concurrency:.2f}" == "1.14"
    # Both ranks take 9,340 blocks of their own size; source 000 lists 15.56 GiB on both.
    assert [round(rank.allocated / GIB, 4) for rank in pool.ranks] == [15.1246, 15.5633]
    assert round(pool.ranks[0].idle / GIB, 2) == 6.83


def test_k11_41_and_37() -> None:
    # Rank 0: 41 * 656 + 12 * 132 = 28,480 B; rank 1: 38 * 656 + (9 + 1 + 1) * 132 = 26,380 B.
    pool = capacity(
        GLM, 19.3445, 18.163, tp=4, block=64, kv="fp8", mtp=3, length=524_288, partition=(41, 37), self_compute=True
    )
    assert [rank.block_bytes for rank in pool.ranks] == [64 * 28_480, 64 * 26_380]
    assert (pool.num_blocks, pool.binding_stage) == (11_395, 0)
    assert pool.kv_tokens == 11_395 * 64 == 729_280
    assert f"{pool.max_concurrency:.2f}" == "1.39"
    # Requests of 131,072 + 256 tokens that stay resident: 5.55 by tokens, 5 in whole blocks beside the null block.
    assert f"{pool.kv_tokens / 131_328:.2f}" == "5.55"
    assert pool.usable_blocks // (131_328 // 64) == 5


@pytest.mark.parametrize(
    ("partition", "unsafe", "rank_bytes", "blocks", "binding"),
    [
        # Source 000's table: 647,700 / 697,600 / 693,300. It scales 15.56 GiB linearly and leaves the page alone.
        ((40, 38), (40, 41), (40 * 656 + 12 * 132, 39 * 656 + 12 * 132), 10_414, 1),
        ((41, 37), (41,), (28_480, 26_380), 11_397, 0),
        ((42, 36), (), (42 * 656 + 12 * 132, 37 * 656 + 10 * 132), 10_391, 0),
        ((45, 33), (45,), (45 * 656 + 13 * 132, 34 * 656 + 10 * 132), 7_595, 0),
    ],
)
def test_k12_other_splits_predicted_from_39_39(
    partition: tuple[int, int], unsafe: tuple[int, ...], rank_bytes: tuple[int, int], blocks: int, binding: int
) -> None:
    # From 39,39's 21.95 and 15.564 GiB, with source 000's 1,332.6 MiB for each layer that moves.
    moved = (partition[0] - 39) * 1332.6 * MIB / GIB
    assert unsafe_layers(partition, indexer_layers(GLM)) == unsafe
    pool = capacity(
        GLM,
        21.95 - moved,
        15.564 + moved,
        tp=4,
        block=64,
        kv="fp8",
        mtp=3,
        length=524_288,
        partition=partition,
        self_compute=True,
    )
    assert tuple(rank.block_bytes for rank in pool.ranks) == tuple(64 * b for b in rank_bytes)
    assert pool.binding_stage == binding
    # Section 1.8 has 10,412 blocks for 40,38, from 15.56 GiB: (15.56 + 1.3014) GiB / 1,738,752 B = 10,412.5. The 15.564
    # that gives 9,340 blocks in 39,39 makes it 10,414.97.
    assert pool.num_blocks == blocks
    if partition == (41, 37):
        assert abs(pool.kv_tokens / 729_280 - 1) < 0.0005


def test_k13_dcp_shards_the_request_not_the_pool() -> None:
    # ceil(327,680 / 4) / 64 = 1,280 blocks on a rank [engine].
    pool = capacity(GLM, 17.2628, tp=8, dcp=4, block=64, kv="fp8", mtp=3, length=327_680)
    assert (pool.num_blocks, pool.blocks_per_request) == (5292, 1280)
    assert pool.kv_tokens == 338_688 * 4 == 1_354_752
    assert f"{pool.max_concurrency:.2f}" == "4.13"


def test_k14_bf16_keeps_the_indexer_in_fp8() -> None:
    # 79 * 1152 + 22 * 132 = 93,912 B a token; 93,912 / 54,728 = 1.716 (measured 343,232 / 200,704 = 1.710).
    pool = capacity(GLM, 17.2628, tp=8, block=64, mtp=3, length=163_840)
    assert pool.ranks[0].block_bytes == 64 * (79 * 1152 + 22 * 132) == 6_010_368
    assert pool.num_blocks == 3083
    assert pool.kv_tokens == 3083 * 64 == 197_312


@pytest.mark.parametrize("tp", [8, 16])
def test_k15_kv_heads_are_copied_beyond_their_number(tp: int) -> None:
    # 80 layers * 1 head * 256 elements * 2 B * 16 tokens = 655,360 B; 10 GiB / that = 16,384 [engine].
    pool = capacity(LLAMA_70B, 10, tp=tp, length=131_072)
    assert pool.ranks[0].block_bytes == 80 * 256 * 2 * 16 == 655_360
    assert (pool.num_blocks, pool.kv_tokens) == (16_384, 262_144)
    assert f"{pool.max_concurrency:.2f}" == "2.00"


def test_k16_the_smaller_stage_decides() -> None:
    # 9 GiB / 327,680 B = 29,491.2 [engine].
    pool = capacity(LLAMA_70B, 10, 9, tp=8, length=131_072, partition=(40, 40))
    assert [rank.num_blocks for rank in pool.ranks] == [32_768, 29_491]
    assert (pool.num_blocks, pool.binding_stage, pool.kv_tokens) == (29_491, 1, 471_856)
    assert f"{pool.max_concurrency:.2f}" == "3.60"


@pytest.mark.parametrize(("dcp", "tokens", "conc"), [(1, 223_088, "5.45"), (2, 446_176, "10.89")])
def test_k17_dcp_of_grouped_queries(dcp: int, tokens: int, conc: str) -> None:
    # 94 layers * 8,192 B = 770,048 B; 10 GiB / that = 13,943.9 [engine].
    pool = capacity(QWEN_235B, 10, tp=8, dcp=dcp, length=40_960)
    assert (pool.ranks[0].block_bytes, pool.num_blocks) == (770_048, 13_943)
    assert pool.kv_tokens == tokens
    assert f"{pool.max_concurrency:.2f}" == conc


def test_fp8_halves_grouped_query_pages() -> None:
    pool = capacity(load_model_config("meta-llama/Llama-3.1-8B"), 10, kv="fp8", length=131_072)
    assert (pool.num_blocks, pool.ranks[0].block_bytes, pool.kv_tokens) == (10_240, 1_048_576, 163_840)


def test_k18_hybrid_groups_and_without() -> None:
    # 12 windowed and 12 full layers: two groups of 12 pages of 32,768 B. A request takes 8,192 blocks of the full group
    # and ceil((127 + 16,384) / 16) + 1 = 1,033 of the windowed one [engine].
    pool = capacity(GPT_OSS_20B, 40, length=131_072)
    assert pool.ranks[0].block_bytes == 12 * 32_768 == 393_216
    assert (pool.num_blocks, pool.blocks_per_request) == (109_226, 8192 + 1033)
    assert pool.kv_tokens == 1_551_920
    assert f"{pool.max_concurrency:.2f}" == "11.84"
    flat = capacity(GPT_OSS_20B, 40, length=131_072, hybrid=False)
    assert (flat.ranks[0].block_bytes, flat.num_blocks, flat.kv_tokens) == (786_432, 54_613, 873_808)
    assert f"{flat.max_concurrency:.2f}" == "6.67"


def test_gpt_oss_120b() -> None:
    pool = capacity(GPT_OSS_120B, 40, tp=8, length=131_072)
    assert (pool.ranks[0].block_bytes, pool.num_blocks, pool.kv_tokens) == (73_728, 582_542, 8_276_958)
    assert f"{pool.max_concurrency:.2f}" == "63.15"


def test_k19_slightly_uneven_buckets_make_one_group_each() -> None:
    # A draft layer with full attention: 12 and 13 layers. 13 < 1.5 * 12, so groups are as wide as the larger [engine].
    caches = cache_layers(GPT_OSS_20B, ParallelConfig(), block_size=16, kv_dtype="bf16", dcp_semantics="vllm")
    full = next(c.spec for c in caches if not isinstance(c.spec, SlidingWindowSpec))
    groups = build_groups([*caches, CacheLayer(24, full)])
    assert sorted(len(group.pages) for group in groups) == [12, 13]
    pool = plan_pool(groups, [range(25)], [40 * GIB], max_model_len=131_072, in_flight=IN_FLIGHT)
    assert pool.ranks[0].block_bytes == 13 * 32_768 == 425_984
    assert (pool.num_blocks, pool.kv_tokens) == (100_824, 1_432_542)
    assert f"{pool.max_concurrency:.2f}" == "10.93"


def test_k20_gemma_groups() -> None:
    # 52 windowed and 10 full layers: 52 is more than 1.5 * 10, so groups of up to 10; ceil(52 / 10) = 6 of them, dealt
    # out by turns [engine]. A page is 16 heads * 256 * 2 B * 16 tokens = 131,072 B.
    caches = cache_layers(GEMMA, ParallelConfig(), block_size=16, kv_dtype="bf16", dcp_semantics="vllm")
    groups = build_groups(caches)
    assert [len(group.pages) for group in groups] == [9, 9, 9, 9, 8, 8, 10]
    pool = capacity(GEMMA, 20, length=131_072)
    assert (pool.num_blocks, pool.ranks[0].block_bytes) == (16_384, 10 * 131_072)
    # 8,192 + 6 * (ceil((1,023 + 16,384) / 16) + 1) = 14,726 blocks.
    assert pool.blocks_per_request == 8192 + 6 * 1089
    assert pool.kv_tokens == 145_829
    assert f"{pool.max_concurrency:.2f}" == "1.11"
    slow = capacity(GEMMA, 20, length=131_072, in_flight=2048)
    assert slow.kv_tokens == 229_677
    assert f"{slow.max_concurrency:.2f}" == "1.75"


def test_k21_a_block_of_attention_holds_a_recurrent_state() -> None:
    # State: (4 - 1) * (2 * 16 * 128 + 32 * 128) * 2 B + 32 * 128 * 128 * 2 B = 49,152 + 1,048,576 = 1,097,728 B.
    # A token of attention: 2 heads * 512 * 2 B = 2,048 B. Block: 16 * ceil(1,097,728 / (16 * 2,048)) = 544 tokens.
    caches = cache_layers(QWEN_NEXT, ParallelConfig(), block_size=16, kv_dtype="bf16", dcp_semantics="vllm")
    states = {c.spec for c in caches if isinstance(c.spec, RecurrentSpec)}
    attention = {c.spec for c in caches if isinstance(c.spec, FullAttentionSpec)}
    assert [spec.page_bytes for spec in states] == [1_097_728]
    assert [(spec.block_size, spec.page_bytes) for spec in attention] == [(544, 1_114_112)]
    assert round(1_114_112 / 1_097_728 - 1, 4) == 0.0149  # of padding
    # 36 states in 3 groups of 12, 12 attention layers in one; 262,144 / 544 -> 482 blocks and one for each state.
    pool = capacity(QWEN_NEXT, 40, length=262_144)
    assert pool.ranks[0].block_bytes == 12 * 1_114_112 == 13_369_344
    assert (pool.num_blocks, pool.blocks_per_request) == (3212, 482 + 3)
    assert pool.kv_tokens == 1_736_095
    assert f"{pool.max_concurrency:.2f}" == "6.62"


@pytest.mark.parametrize(
    ("options", "block_bytes", "blocks", "tokens", "conc"),
    [
        # 61 latents of 1,152 B, 64 tokens each [engine].
        ({}, 4_497_408, 4774, 305_536, "1.86"),
        ({"mtp": 1}, 4_571_136, 4697, 300_608, "1.83"),
        ({"tp": 8, "dcp": 8}, 4_497_408, 4774, 2_444_288, "14.92"),
    ],
)
def test_k22_deepseek_v3(options: dict[str, int], block_bytes: int, blocks: int, tokens: int, conc: str) -> None:
    pool = capacity(V3, 20, block=64, length=163_840, **options)  # type: ignore[arg-type]
    assert (pool.ranks[0].block_bytes, pool.num_blocks, pool.kv_tokens) == (block_bytes, blocks, tokens)
    # 305,536 / 163,840 = 1.8648 and so on.
    assert f"{pool.max_concurrency:.2f}" == conc


def test_k23_deepseek_v32() -> None:
    # 61 * (656 + 132) * 64 = 3,076,352 B; 20 GiB / that = 6,980.6 [engine].
    pool = capacity(V32, 20, block=64, kv="fp8", length=163_840)
    assert pool.ranks[0].block_bytes == 61 * (656 + 132) * 64 == 3_076_352
    assert (pool.num_blocks, pool.kv_tokens) == (6980, 446_720)
    assert f"{pool.max_concurrency:.2f}" == "2.73"


def test_k24_memory_identity() -> None:
    # Consumed + activation peak (with the graph estimate) + KV = ceil(utilisation * usable), on both ranks of 39,39.
    budget = requested_bytes(79.25 * GIB, 0.95) / GIB
    assert round(budget, 4) == 75.2875
    for parts in ((50.98, 2.36, 21.95), (56.53, 3.20, 15.56)):
        assert round(sum(parts), 2) == round(budget, 2) == 75.29


def test_k25_indexer_workspace() -> None:
    assert indexer_gather_bytes(524_288) == 40 * 524_288 * 132 == 2_768_240_640
    assert indexer_gather_bytes(524_288) / GIB == 2.578125
    assert [round(indexer_gather_bytes(n) / GIB, 3) for n in (352_000, 327_680)] == [1.731, 1.611]


def test_k26_block_0_is_never_handed_out() -> None:
    pool = capacity(LLAMA_70B, 10, tp=8, length=262_144)
    # 16,384 blocks are exactly a request of 262,144 tokens; with the null block it does not fit, so no start.
    assert (pool.num_blocks, pool.blocks_per_request, pool.usable_blocks) == (16_384, 16_384, 16_383)
    assert not pool.starts
    assert capacity(LLAMA_70B, 10, tp=8, length=262_144 - 16).starts


@pytest.mark.parametrize(("dcp", "token_bytes"), [(1, 96_640), (8, 17_008)])
def test_d9_vllm_ascend_keeps_the_indexer_whole(dcp: int, token_bytes: int) -> None:
    # 79 * 1152 / dcp + 22 * 256: capacity grows 5.68 times with dcp 8, not 8 times.
    parallel = ParallelConfig(tensor_parallel_size=8, decode_context_parallel_size=dcp)
    total = request_kv_bytes(
        GLM,
        parallel,
        tokens=128 * 1024,
        block_size=128,
        kv_dtype="bfloat16",
        dcp_semantics="vllm-ascend",
        num_mtp_tokens=3,
    )
    assert total == 128 * 1024 * token_bytes


@pytest.mark.parametrize(("dcp", "token_bytes"), [(1, 79 * 656 + 22 * 130), (8, 79 * 82 + 22 * 130)])
def test_d9_with_an_8_bit_cache(dcp: int, token_bytes: int) -> None:
    parallel = ParallelConfig(tensor_parallel_size=8, decode_context_parallel_size=dcp)
    total = request_kv_bytes(
        GLM,
        parallel,
        tokens=128 * 1024,
        block_size=128,
        kv_dtype="int8",
        dcp_semantics="vllm-ascend",
        num_mtp_tokens=3,
    )
    assert total == 128 * 1024 * token_bytes
    assert token_bytes in (54_684, 9_338)


# -- published start-up logs -----------------------------------------------------------------------------------------


def test_a_log_of_gpt_oss_120b() -> None:
    # "4.54 GiB needed": 18 full layers * 131,072 * 2,048 B, 18 windowed * (ceil((127 + 1,024) / 16) + 1) * 16 tokens.
    pool = capacity(GPT_OSS_120B, 1.71, length=131_072, in_flight=1024)
    needed = pool.blocks_per_request * pool.ranks[0].block_bytes
    assert needed == 18 * 2048 * 16 * (8192 + 73)
    assert round(needed / GIB, 2) == 4.54
    assert not pool.starts


def test_a_log_of_gemma_3_27b() -> None:
    # vLLM 0.19, H100: 19.53 GiB, 8,192 tokens, 8,192 in flight: "Maximum concurrency 4.46x", "Add 8 padding layers".
    pool = capacity(GEMMA, 19.53, length=8192, in_flight=8192)
    assert f"{pool.max_concurrency:.2f}" == "4.46"


def test_a_log_of_a_wrong_bottleneck() -> None:
    # Qwen3-30B-A3B-FP8 over two cards, 16 and 32 layers: the engine wanted 24 GiB of the first, 16 layers need 8.
    model = load_model_config("Qwen/Qwen3-30B-A3B")
    pool = capacity(model, 3.18, 16, length=262_144, partition=(16, 32))
    assert [pool.blocks_per_request * rank.block_bytes / GIB for rank in pool.ranks] == [8.0, 16.0]
    assert pool.ranks[0].num_blocks * 16 == pytest.approx(104_000, rel=0.005)


def test_a_log_of_a_recurrent_model_with_an_fp8_cache() -> None:
    # "Setting attention block size to 1568 tokens", "Padding mamba page size by 0.13 %": 48 value heads, float32 state.
    import json

    config = json.loads(QWEN_NEXT.hf_config) | {"linear_num_value_heads": 48, "mamba_ssm_dtype": "float32"}
    model = replace(QWEN_NEXT, hf_config=json.dumps(config), num_key_value_heads=4)
    caches = cache_layers(model, ParallelConfig(), block_size=16, kv_dtype="fp8", dcp_semantics="vllm")
    attention = next(c.spec for c in caches if isinstance(c.spec, FullAttentionSpec))
    state = next(c.spec for c in caches if isinstance(c.spec, RecurrentSpec))
    assert state.page_bytes == 48 * 128 * 128 * 4 + 10_240 * 3 * 2 == 3_207_168
    # The log's 1568 is a multiple of 32 tokens (its kernel's block); of 16 the first multiple is the same.
    assert attention.block_size == 1568
    assert round(attention.page_bytes / state.page_bytes - 1, 4) == 0.0013
