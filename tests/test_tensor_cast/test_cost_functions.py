"""FLOPs and bytes of each family of ops against values worked out by hand or by brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.device.profile import OpClass
from tensor_cast.ir.expr import ceildiv, symbol
from tensor_cast.ir.record import Kind, OpRecord, TensorSpec
from tensor_cast.performance_model import base
from tensor_cast.performance_model.base import COSTS, DimTable, OpCost
from tensor_cast.performance_model.costs.attention import keys_read, visible_pairs
from tensor_cast.performance_model.costs.moe import touched_experts

BF16 = "bfloat16"
B, Q, S = symbol("B"), symbol("Q"), symbol("S")


def act(*shape: Any, dtype: str = BF16) -> TensorSpec:
    return TensorSpec(shape, dtype)


def weight(*shape: int, dtype: str = BF16, name: str = "w") -> TensorSpec:
    return TensorSpec(shape, dtype, Kind.WEIGHT, name)


def kv(*shape: Any, dtype: str = BF16) -> TensorSpec:
    return TensorSpec(shape, dtype, Kind.KV)


def index(*shape: Any, dtype: str = "int64") -> TensorSpec:
    return TensorSpec(shape, dtype, Kind.INDEX)


def cost(name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], **attrs: object) -> OpCost:
    op = OpRecord(name, "m", tuple(inputs), tuple(outputs), attrs=tuple(sorted(attrs.items())))
    return COSTS.get(name)(op)


# -- products -----------------------------------------------------------------------------------------------------
def test_linear() -> None:
    c = cost("aten.linear", [act(4, 16, 1024), weight(3072, 1024), weight(3072)], [act(4, 16, 3072)])
    assert c.flops == 2 * 64 * 1024 * 3072
    assert c.bytes_read == 2 * (64 * 1024 + 3072 * 1024 + 3072)
    assert c.bytes_written == 2 * 64 * 3072
    assert (c.op_class, c.compute_dtype) == (OpClass.GEMM, BF16)


def test_linear_of_a_quantised_weight_reads_its_bytes_and_computes_where_told() -> None:
    fp8 = "float8_e4m3fn"
    inputs = [act(64, 1024, dtype=fp8), weight(512, 1024, dtype=fp8), weight(4, 8, dtype="float32")]
    c = cost("aten.linear", inputs, [act(64, 512)], compute_dtype=fp8, kernel="fp8_block")
    assert c.bytes_read == 64 * 1024 + 512 * 1024 + 4 * 8 * 4
    assert (c.compute_dtype, c.variant) == (fp8, "fp8_block")


def test_packed_linear_reads_its_input_once() -> None:
    c = cost(
        "tensor_cast.packed_linear", [act(64, 1024), weight(512, 1024), weight(128, 1024)], [act(64, 512), act(64, 128)]
    )
    assert c.flops == 2 * 64 * 1024 * 640
    assert c.bytes_read == 2 * (64 * 1024 + 640 * 1024)
    assert c.bytes_written == 2 * 64 * 640


@pytest.mark.parametrize("name", ["aten.bmm", "aten.matmul"])
def test_batched_product(name: str) -> None:
    c = cost(name, [act(16, 64, 128), weight(16, 128, 512)], [act(16, 64, 512)])
    assert c.flops == 2 * 16 * 64 * 128 * 512
    assert c.bytes_read == 2 * 16 * (64 * 128 + 128 * 512)
    assert c.op_class is OpClass.BATCHED_GEMM


def test_mm_addmm_and_einsum_agree() -> None:
    mm = cost("aten.mm", [act(64, 128), weight(128, 512)], [act(64, 512)])
    addmm = cost("aten.addmm", [weight(512), act(64, 128), weight(128, 512)], [act(64, 512)])
    einsum = cost("aten.einsum", [act(64, 128), weight(128, 512)], [act(64, 512)], equation="ab,bc->ac")
    assert mm.flops == addmm.flops == einsum.flops == 2 * 64 * 128 * 512
    assert addmm.bytes_read == mm.bytes_read + 2 * 512
    absorbed = cost(
        "aten.einsum", [act(4, 1, 16, 128), weight(16, 128, 512)], [act(4, 1, 16, 512)], equation="bqhd,hdr->bqhr"
    )
    assert absorbed.flops == 2 * 4 * 16 * 128 * 512
    assert absorbed.op_class is OpClass.BATCHED_GEMM


def test_einsum_without_an_equation_is_an_error() -> None:
    with pytest.raises(ValueError, match="einsum"):
        cost("aten.einsum", [act(2, 2), act(2, 2)], [act(2, 2)])


def test_an_outer_product_needs_no_matrix_unit() -> None:
    c = cost("aten.bmm", [act(4, 32, 1, dtype="float32"), act(4, 1, 7, dtype="float32")], [act(4, 32, 7)])
    assert (c.op_class, c.compute_dtype, c.flops) == (OpClass.POINTWISE, "", 4 * 32 * 7)


# -- attention ----------------------------------------------------------------------------------------------------
@given(st.integers(1, 40), st.integers(0, 60), st.one_of(st.none(), st.integers(1, 80)))
def test_visible_pairs_equal_a_count(q: int, past: int, window: int | None) -> None:
    s = past + q
    seen = [
        (i, j)
        for i, j in itertools.product(range(q), range(s))
        if j <= past + i and (window is None or j > past + i - window)
    ]
    assert visible_pairs(q, s, window) == len(seen)
    assert keys_read(q, s, window) == len({j for _, j in seen})


def test_visible_pairs_of_a_fresh_prompt_are_half_the_square() -> None:
    assert visible_pairs(4096, 4096, None) == 4096 * 4097 / 2
    assert visible_pairs(4, 4096, None) == 4 * 4096 - 4 * 3 / 2


def test_decode_attention_reads_each_kv_head_once_for_all_verify_tokens() -> None:
    q, k = act(8, 4, 32, 128), kv(8, 1000, 2, 128)
    c = cost("tensor_cast.attention", [q, k, k], [act(8, 4, 32, 128)], phase="decode", window=None, dcp=1)
    pairs = 997 + 998 + 999 + 1000
    assert c.flops == 2 * 8 * pairs * 32 * 256
    assert c.bytes_read == 2 * (8 * 4 * 32 * 128) + 8 * 1000 * 2 * 256 * 2
    assert c.bytes_written == 2 * 8 * 4 * 32 * 128
    assert c.op_class is OpClass.ATTENTION_DECODE


def test_quantised_cache_changes_bytes_and_nothing_else() -> None:
    q = act(8, 1, 32, 128)
    wide, narrow = (
        cost("tensor_cast.attention", [q, k, k], [q], phase="decode")
        for k in (kv(8, 1024, 2, 128), kv(8, 1024, 2, 128, dtype="int8"))
    )
    assert wide.flops == narrow.flops
    assert wide.bytes_read - narrow.bytes_read == 8 * 1024 * 2 * 256


def test_dcp_divides_keys_and_multiplies_heads() -> None:
    whole = cost("tensor_cast.mla_attention", [act(8, 1, 16, 576), kv(8, 4096, 576)], [act(8, 1, 16, 512)])
    outputs = [act(8, 1, 64, 512), act(8, 1, 64, dtype="float32")]
    split = cost("tensor_cast.mla_attention", [act(8, 1, 64, 576), kv(8, 1024, 576)], outputs, dcp=4)
    assert split.flops == whole.flops == 2 * 8 * 4096 * 16 * (576 + 512)
    assert split.bytes_read == 2 * 8 * 64 * 576 + 8 * 1024 * 576 * 2
    assert split.bytes_written == 2 * 8 * 64 * 512 + 4 * 8 * 64


def test_window_limits_decode() -> None:
    q, k = act(1, 1, 8, 64), kv(1, 4096, 1, 64)
    c = cost("tensor_cast.attention", [q, k, k], [q], phase="decode", window=128)
    assert c.flops == 2 * 128 * 8 * 128
    assert c.bytes_read == 2 * 8 * 64 + 128 * 128 * 2


def test_prefill_classes_and_diagonal_tiles() -> None:
    q, k = act(1, 1024, 8, 128), kv(1, 1024, 8, 128)
    c = cost("tensor_cast.attention", [q, k, k], [q], phase="prefill")
    assert c.op_class is OpClass.ATTENTION_PREFILL
    assert c.flops == 2 * 8 * (1024 * 1025 / 2) * 256
    assert c.padded_flops is not None
    assert c.flops < c.padded_flops < 1.15 * c.flops
    wide, v = act(1, 1024, 8, 192), kv(1, 1024, 8, 128)
    mla = cost("tensor_cast.attention", [wide, kv(1, 1024, 8, 192), v], [q], phase="prefill")
    assert mla.op_class is OpClass.MLA_PREFILL
    assert mla.flops == 2 * 8 * (1024 * 1025 / 2) * 320


def test_cache_write_does_not_touch_the_whole_cache() -> None:
    new, cache = act(8, 1, 2, 128), kv(2, 1000, 128, 2, 128, dtype="int8")
    c = cost("tensor_cast.reshape_and_cache", [new, new, cache, index(8, dtype="int32")], [])
    assert c.bytes_read == 2 * (8 * 2 * 128 * 2) + 8 * 4
    assert c.bytes_written == 2 * 8 * 2 * 128


def test_gather_kv_is_free_and_priced() -> None:
    c = cost("tensor_cast.gather_kv", [kv(2, 1000, 128, 2, 128), index(8, 32)], [kv(8, 4096, 2, 128)] * 2)
    assert c.free
    assert c.nbytes == 0


def test_merge_of_partial_results() -> None:
    inputs = [act(4, 8, 1, 16, 512, dtype="float32"), act(4, 8, 1, 16, dtype="float32")]
    c = cost("tensor_cast.merge_attention", inputs, [act(8, 1, 16, 512)], dcp=4)
    assert c.bytes_read == 4 * (4 * 8 * 16 * 513)
    assert c.bytes_written == 2 * 8 * 16 * 512


# -- experts ------------------------------------------------------------------------------------------------------
def test_touched_experts_equal_the_expectation_of_all_routings() -> None:
    """Two tokens, each choosing two of four experts, every choice equally likely."""
    choices = list(itertools.combinations(range(4), 2))
    expected = np.mean([len({*a, *b}) for a in choices for b in choices])
    assert touched_experts(2, 4, 2) == pytest.approx(expected)
    assert touched_experts(1, 4, 2) == pytest.approx(2)
    assert touched_experts(10**6, 4, 2) == pytest.approx(4)


def test_skewed_routing_touches_fewer() -> None:
    tokens = np.array([1.0, 16.0, 256.0])
    even, skewed = touched_experts(tokens, 256, 8), touched_experts(tokens, 256, 8, skew=1.0)
    assert skewed[0] == pytest.approx(8)
    assert (skewed[1:] < even[1:]).all()
    assert (np.diff(skewed) > 0).all()


def experts(tokens: Any, *, local: int = 256, ep: int = 1) -> OpCost:
    inputs = [act(tokens, 7168), index(tokens, 8), act(tokens, 8), weight(local, 4096, 7168), weight(local, 7168, 2048)]
    return cost("tensor_cast.grouped_experts", inputs, [act(tokens, 7168)], num_experts=256, top_k=8, ep=ep, gated=True)


def test_tiles_of_experts_fit_their_rows() -> None:
    """256 tokens give each of 256 experts 8 rows in tiles of 16; 65,536 give each 2,048 in tiles of 64."""
    row = 2 * (4096 * 7168 + 7168 * 2048)
    few, many = experts(256), experts(65_536)
    touched = 256 * (1 - (1 - 8 / 256) ** 256)
    assert few.padded_flops == pytest.approx((256 * 8 + touched * 8) * row)
    assert many.padded_flops == pytest.approx((65_536 * 8 + 256 * 32) * row)


def test_given_load_of_a_rank_replaces_an_even_share() -> None:
    inputs = [act(64, 512), index(64, 2), act(64, 2), weight(4, 256, 512), weight(4, 512, 128)]
    c = cost(
        "tensor_cast.grouped_experts", inputs, [act(64, 512)], num_experts=8, top_k=2, ep=2, rows=96.0, touched=3.0
    )
    assert c.flops == 96 * 2 * (256 * 512 + 512 * 128)
    assert c.streams == 3 * (128 / 64)


def test_experts_read_only_what_the_batch_touches() -> None:
    one = experts(1)
    per_expert = 2 * (4096 * 7168 + 7168 * 2048)
    assert one.flops == 2 * 8 * 3 * 7168 * 2048
    # eight experts, the token in and out, and what passes between the steps
    passed = 8 * (7168 + 4096 + 2048 + 7168) * 2
    assert one.bytes_read == pytest.approx(8 * per_expert + 2 * 7168 + passed)
    assert one.bytes_written == 2 * 7168 + passed


def test_expert_parallel_rank_holds_its_share() -> None:
    whole, rank = experts(512), experts(512, local=32, ep=8)
    assert rank.flops == whole.flops / 8
    assert rank.bytes_read < whole.bytes_read / 4


def test_experts_have_no_steps_in_the_batch() -> None:
    tokens = np.arange(1, 2000)
    c = experts(tokens)
    for values in (c.bytes_read, c.padded_flops, c.flops, c.tiles):
        ratio = np.asarray(values)[1:] / np.asarray(values)[:-1]
        assert (ratio > 1 - 1e-12).all()
        assert (ratio <= tokens[1:] / tokens[:-1] + 1e-12).all()
    sixteen, seventeen = experts(16).bytes_read, experts(17).bytes_read
    assert 1 < seventeen / sixteen < 17 / 16


# -- the rest -----------------------------------------------------------------------------------------------------
def test_embedding_reads_rows_not_the_table() -> None:
    c = cost("aten.embedding", [weight(150_000, 4096), index(8, 1)], [act(8, 1, 4096)])
    assert c.bytes_read == 8 * 4096 * 2 + 8 * 8
    assert c.bytes_written == 8 * 4096 * 2


def test_pointwise_reduction_and_topk() -> None:
    silu = cost("aten.silu", [act(8, 100)], [act(8, 100)])
    assert (silu.bytes_read, silu.bytes_written, silu.flops) == (1600, 1600, 8 * 800)
    mean = cost("aten.mean", [act(8, 100, dtype="float32")], [act(8, 1, dtype="float32")])
    assert (mean.bytes_read, mean.bytes_written, mean.flops) == (3200, 32, 800)
    top = cost("aten.topk", [act(8, 100)], [act(8, 2), index(8, 2)])
    assert (top.bytes_read, top.bytes_written) == (1600, 8 * 2 * 2 + 8 * 2 * 8)


def test_scatter_add_touches_what_it_adds() -> None:
    rows = [act(10_000, 64), index(8, 64), act(8, 64)]
    c = cost("aten.scatter_add_", rows, [act(10_000, 64)])
    assert c.bytes_written == 8 * 64 * 2
    assert c.bytes_read == 8 * 64 * 8 + 2 * (8 * 64 * 2)


def test_sampling_sweeps_over_float32_logits() -> None:
    c = cost("tensor_cast.sample", [act(4, 1, 1000)], [index(4, 1)])
    assert c.bytes_read == 4 * 1000 * (2 + 2 * 4)
    assert c.bytes_written == 4 * 1000 * 2 * 4 + 4 * 8
    assert c.op_class is OpClass.SAMPLING


def test_collective_carries_its_input_buffer() -> None:
    op = OpRecord("_c10d_functional.all_reduce", "m", (act(8, 7168),), (act(8, 7168),), axis="tp", group_size=8)
    wire = COSTS.get(op.name)(op).collective
    assert wire is not None
    assert (wire.kind, wire.nbytes, wire.axis, wire.group_size) == ("all_reduce", 8 * 7168 * 2, "tp", 8)


def test_coverage_counts_repeats_and_leaves_views_out() -> None:
    known = OpRecord("aten.add", "m", (act(1),), (act(1),), repeat=3)
    unknown = OpRecord("aten.frobnicate", "m", (act(1),), (act(1),))
    view = OpRecord("aten.view", "m", (act(1),), (act(1),), repeat=100)
    assert base.coverage([known, unknown, view]) == 0.75
    assert base.unpriced([known, unknown, view]) == {"aten.frobnicate": 1}
    assert base.coverage([]) == 1.0


def test_grid_equals_points() -> None:
    op = OpRecord(
        "tensor_cast.attention",
        "m",
        (act(B, Q, 8, 128), kv(B, ceildiv(S, 4), 1, 128), kv(B, ceildiv(S, 4), 1, 128)),
        (act(B, Q, 8, 128),),
        attrs=(("dcp", 4), ("phase", "decode")),
    )
    batches = np.array([1, 7, 64])
    grid = COSTS.get(op.name)(DimTable({"B": batches, "Q": 2, "S": 1003}).op(op))
    for i, batch in enumerate(batches):
        point = COSTS.get(op.name)(DimTable({"B": int(batch), "Q": 2, "S": 1003}).op(op))
        assert grid.flops[i] == point.flops
        assert grid.bytes_read[i] == point.bytes_read
