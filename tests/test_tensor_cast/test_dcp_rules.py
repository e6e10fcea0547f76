"""DCP: legality, local heads, volumes and token placement, each against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.engine.dcp import get_semantics, local_tokens, owner, semantics_names
from tensor_cast.errors import UnknownNameError
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import AttentionKind, ModelConfig

R1 = load_model_config("deepseek-ai/DeepSeek-R1")
GLM = load_model_config("zai-org/GLM-5.3")
QWEN = load_model_config("Qwen/Qwen3-235B-A22B")  # 64 query heads, 4 KV heads, 128 wide
LLAMA = load_model_config("meta-llama/Llama-3.1-70B")  # 64 query heads, 8 KV heads
POWERS = (1, 2, 4, 8, 16, 32)


def legal(semantics: str, model: ModelConfig, tp: int) -> list[int]:
    return [dcp for dcp in POWERS if not get_semantics(semantics).violations(model, tp, dcp)]


def volumes(semantics: str, model: ModelConfig, tp: int, dcp: int) -> list[tuple[str, str, int]]:
    return [(c.op, c.what, c.nbytes) for c in get_semantics(semantics).collectives(model, tp, dcp)]


def test_names() -> None:
    assert semantics_names() == ("vllm-ascend", "vllm", "rfc")
    with pytest.raises(UnknownNameError, match=r"unknown DCP semantics 'vlm'; did you mean vllm\?"):
        get_semantics("vlm")


# -- legality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("semantics", semantics_names())
def test_mla_takes_every_divisor_of_tp(semantics: str) -> None:
    assert legal(semantics, R1, 8) == [1, 2, 4, 8]
    assert legal(semantics, R1, 1) == [1]
    assert not get_semantics(semantics).violations(R1, 12, 3)


@pytest.mark.parametrize("semantics", ["vllm-ascend", "vllm"])
@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        (QWEN, 2, [1]),  # fewer ranks than KV heads: nothing is stored twice
        (QWEN, 4, [1]),
        (QWEN, 8, [1, 2]),
        (QWEN, 16, [1, 2, 4]),
        (QWEN, 32, [1, 2, 4, 8]),
        (LLAMA, 8, [1]),
        (LLAMA, 16, [1, 2]),
        (LLAMA, 32, [1, 2, 4]),
    ],
)
def test_gqa_splits_copies_of_kv_heads(semantics: str, model: ModelConfig, tp: int, expected: list[int]) -> None:
    assert legal(semantics, model, tp) == expected


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        (QWEN, 4, [1, 2, 4]),
        (QWEN, 8, [1, 2, 4, 8]),  # 4 >= 8 / 2; dcp 1 although 4 < 8
        (QWEN, 16, [1, 4, 8, 16]),
        (LLAMA, 8, [1, 2, 4, 8]),
        (LLAMA, 32, [1, 4, 8, 16, 32]),
    ],
)
def test_gqa_by_the_letter_of_the_rfc(model: ModelConfig, tp: int, expected: list[int]) -> None:
    assert legal("rfc", model, tp) == expected


@pytest.mark.parametrize(
    ("semantics", "model", "tp", "dcp", "rule", "numbers"),
    [
        ("vllm", R1, 8, 3, "dcp.divides_tp", "tp_size 8, dcp_size 3"),
        ("rfc", R1, 8, 16, "dcp.divides_tp", "tp_size 8, dcp_size 16"),
        ("vllm-ascend", QWEN, 4, 2, "dcp.kv_heads", "tp_size 4, dcp_size 2, 64 query heads and 4 KV heads"),
        ("vllm-ascend", QWEN, 8, 4, "dcp.kv_copies", "tp_size 8, dcp_size 4"),
        ("rfc", QWEN, 16, 2, "dcp.kv_heads", "tp_size 16, dcp_size 2, 4 KV heads"),
        ("vllm-ascend", GLM, 8, 4, "dcp.sparse_attention", "tp_size 8, dcp_size 4"),
    ],
)
def test_a_violation_names_rule_and_numbers(
    semantics: str, model: ModelConfig, tp: int, dcp: int, rule: str, numbers: str
) -> None:
    (error,) = get_semantics(semantics).violations(model, tp, dcp)
    assert error.rule == rule
    assert error.have.startswith(numbers)
    assert error.need
    assert error.remedy


def test_odd_shapes() -> None:
    # 12 query heads over 4 KV heads: 3 a group, which 2 ranks cannot share.
    odd = replace(QWEN, num_attention_heads=12)
    assert [e.rule for e in get_semantics("vllm").violations(odd, 12, 3)] == []
    assert [e.rule for e in get_semantics("vllm").violations(odd, 8, 2)] == ["dcp.query_heads"]
    # tp // h_kv = 3 copies and dcp 2: a slice of two ranks would mix KV heads.
    assert [e.rule for e in get_semantics("vllm").violations(QWEN, 12, 2)] == ["dcp.kv_copies"]
    # rfc, 6 KV heads on 8 ranks: 1.5 heads a rank.
    assert [e.rule for e in get_semantics("rfc").violations(replace(QWEN, num_key_value_heads=6), 8, 2)] == [
        "dcp.kv_heads_whole"
    ]


def test_sparse_attention_on_gpus_takes_any_divisor() -> None:
    assert legal("vllm", GLM, 8) == [1, 2, 4, 8]
    assert legal("vllm-ascend", GLM, 8) == [1, 8]


@pytest.mark.parametrize("semantics", semantics_names())
@given(
    h_kv=st.sampled_from([1, 2, 4, 8, 16]),
    group=st.sampled_from([1, 2, 4, 8, 16]),
    tp=st.sampled_from([1, 2, 4, 8, 16, 32]),
    dcp=st.integers(1, 40),
)
def test_legality_is_the_published_formula(semantics: str, h_kv: int, group: int, tp: int, dcp: int) -> None:
    h = h_kv * group
    model = replace(QWEN, num_attention_heads=h, num_key_value_heads=h_kv)
    if semantics == "rfc":
        expected = tp >= dcp and tp % dcp == 0 and h_kv >= tp / dcp
    else:
        expected = tp % dcp == 0 and tp > h_kv and dcp <= tp // h_kv and tp // h_kv % dcp == 0 and h // h_kv % dcp == 0
    assert (not get_semantics(semantics).violations(model, tp, dcp)) is (expected or dcp == 1)


# -- heads and bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("semantics", "h_kv", "tp", "dcp", "heads", "shrink"),
    [
        ("vllm-ascend", 4, 8, 1, 1, 1),
        ("vllm-ascend", 4, 8, 2, 1, 2),
        ("vllm", 8, 32, 4, 1, 4),
        ("vllm", 8, 2, 1, 4, 1),
        # The RFC widens the heads as it shortens the sequence: no gain where KV heads are split already,
        ("rfc", 8, 8, 1, 1, 1),
        ("rfc", 8, 8, 4, 4, 1),
        # and at most the number of copies where they are copied.
        ("rfc", 4, 8, 2, 1, 2),
        ("rfc", 4, 8, 8, 4, 2),
    ],
)
def test_local_heads_and_shrinking(semantics: str, h_kv: int, tp: int, dcp: int, heads: int, shrink: float) -> None:
    strategy = get_semantics(semantics)
    assert strategy.local_kv_heads(h_kv, tp, dcp) == heads
    assert strategy.kv_shards(h_kv, tp, dcp) == shrink


# -- communication, per token, layer and rank ----------------------------------------------------------------------


def test_volumes_mla() -> None:
    # DeepSeek-R1, tp 8: 16 heads a rank, 128 after the gather of dcp 8; latent 512, rope 64, bfloat16.
    q = 16 * (512 + 64) * 2
    assert q == 18_432
    assert volumes("vllm-ascend", R1, 8, 8) == [
        ("all_gather_into_tensor", "q", q),
        ("all_to_all_single", "out+lse", 128 * (512 + 1) * 4),
    ]
    assert 128 * 513 * 4 == 262_656
    assert volumes("vllm", R1, 8, 8) == [
        ("all_gather_into_tensor", "q", q),
        ("all_gather_into_tensor", "lse", 128 * 4),
        ("reduce_scatter_tensor", "out", 128 * 512 * 2),
    ]
    assert volumes("rfc", R1, 8, 8) == [
        ("all_gather_into_tensor", "q", q),
        ("all_to_all_single", "out+lse", 128 * (128 + 1) * 4),
    ]
    assert 128 * 129 * 4 == 66_048


def test_volumes_gqa() -> None:
    # Qwen3-235B, tp 8: 8 heads of 128 a rank, 16 after the gather of dcp 2.
    q = ("all_gather_into_tensor", "q", 8 * 128 * 2)
    merge = ("all_to_all_single", "out+lse", 16 * (128 + 1) * 4)
    assert merge[2] == 8_256
    assert volumes("vllm-ascend", QWEN, 8, 2) == [q, merge]
    assert volumes("rfc", QWEN, 8, 2) == [q, merge]
    assert volumes("vllm", QWEN, 8, 2) == [
        q,
        ("all_gather_into_tensor", "lse", 16 * 4),
        ("reduce_scatter_tensor", "out", 16 * 128 * 2),
    ]


@pytest.mark.parametrize(("dcp", "merge"), [(8, 131_328), (4, 65_664)])
def test_volumes_of_64_heads(dcp: int, merge: int) -> None:
    gather, exchange = volumes("vllm-ascend", replace(GLM, attention=AttentionKind.MLA), 8, dcp)
    assert (gather[2], exchange[2]) == (9_216, merge)


def test_volumes_of_sparse_attention() -> None:
    # GLM: 64 heads, latent 512, rope 64. vllm-ascend (SFA): out stays in bf16, lse apart, in float32.
    gather = ("all_gather_into_tensor", "q", 8 * 576 * 2)
    assert volumes("vllm-ascend", GLM, 8, 8) == [
        gather,
        ("all_to_all_single", "out", 64 * 512 * 2),
        ("all_to_all_single", "lse", 64 * 4),
    ]
    assert [v[1] for v in volumes("vllm", GLM, 8, 8)] == ["q", "lse", "out"]


def test_sparse_attention_needs_few_heads_per_rank() -> None:
    # GLM has 64 heads, DeepSeek-V3.2 128; 32 on a rank are too many.
    assert [tp for tp in POWERS if get_semantics("vllm").violations(GLM, tp, tp)] == [2]
    v32 = load_model_config("deepseek-ai/DeepSeek-V3.2")
    assert [tp for tp in POWERS if get_semantics("vllm").violations(v32, tp, tp)] == [2, 4]
    (error,) = get_semantics("vllm").violations(v32, 4, 2)
    assert (error.rule, error.remedy) == ("dcp.sparse_heads", "set dcp_size to 1, or tp_size to 8 or more")


def test_candidates_of_an_indexer() -> None:
    """(score, id) in float32 of the 2048 best tokens: 16 KiB per token, where the indexer's cache is split."""
    (candidates,) = get_semantics("vllm").indexer_collectives(GLM, 8)
    assert (candidates.op, candidates.nbytes) == ("all_gather_into_tensor", 16_384)
    assert get_semantics("vllm").indexer_collectives(GLM, 1) == ()
    assert get_semantics("vllm").indexer_collectives(R1, 8) == ()
    assert get_semantics("vllm-ascend").indexer_collectives(GLM, 8) == ()


def test_the_rfc_does_not_cover_sparse_attention() -> None:
    (error,) = get_semantics("rfc").violations(GLM, 8, 8)
    assert (error.rule, get_semantics("rfc").violations(GLM, 8, 1)) == ("dcp.sparse_attention", [])


@pytest.mark.parametrize("semantics", semantics_names())
def test_no_dcp_no_collectives(semantics: str) -> None:
    assert volumes(semantics, R1, 8, 1) == []


def test_the_merge_stays_in_float32_whatever_the_model_is_in() -> None:
    gather, merge = get_semantics("vllm-ascend").collectives(R1, 8, 8, dtype="float8_e4m3fn")
    assert (gather.nbytes, gather.dtype) == (18_432 // 2, "float8_e4m3fn")
    assert (merge.nbytes, merge.dtype) == (262_656, "float32")


# -- placement of tokens --------------------------------------------------------------------------------------------


def test_local_lengths() -> None:
    assert [local_tokens(10, rank, dcp=4) for rank in range(4)] == [3, 3, 2, 2]
    assert [local_tokens(10, rank, dcp=2, interleave=4) for rank in range(2)] == [6, 4]


@given(
    tokens=st.integers(0, 300),
    dcp=st.sampled_from([1, 2, 4, 8]),
    interleave=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_local_lengths_count_the_owners(tokens: int, dcp: int, interleave: int) -> None:
    owners = [owner(x, dcp=dcp, block_size=16, interleave=interleave) for x in range(tokens)]
    lengths = [local_tokens(tokens, rank, dcp=dcp, interleave=interleave) for rank in range(dcp)]
    assert lengths == [owners.count(rank) for rank in range(dcp)]
    assert sum(lengths) == tokens
    assert lengths == sorted(lengths, reverse=True)
