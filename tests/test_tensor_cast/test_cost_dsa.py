"""Costs of sparse attention with an indexer, against values worked out by hand (F1 to F3, D8, D9, P7)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.device.profile import OpClass
from tensor_cast.engine.catalog import load_engine
from tensor_cast.engine.dcp import get_semantics
from tensor_cast.engine.kv_cache import request_kv_bytes
from tensor_cast.errors import LegalityError
from tensor_cast.ir.quantize import quantize_trace
from tensor_cast.ir.record import Kind, OpRecord, Phase, TensorSpec, Trace
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model.base import COSTS, DimTable, OpCost, coverage
from tensor_cast.performance_model.costs.dsa import key_bytes, latent_bytes, padded_heads
from tensor_cast.performance_model.estimate import prepare
from tensor_cast.performance_model.memory import part_peak_bytes
from tensor_cast.quant import QuantConfig
from tensor_cast.units import MIB

GLM = load_model_config("zai-org/GLM-5.3")
V32 = load_model_config("deepseek-ai/DeepSeek-V3.2")
FP8 = "float8_e4m3fn"
PREFIX = "tensor_cast."


@cache
def library(name: str) -> TraceLibrary:
    return TraceLibrary(load_model_config(name), use_cache=False)


@cache
def trace(
    name: str = "zai-org/GLM-5.3", phase: Phase = Phase.DECODE, semantics: str = "vllm", tp: int = 8, dcp: int = 1
) -> Trace:
    parallel = ParallelConfig(tp, decode_context_parallel_size=dcp)
    traced = library(name).trace(parallel, phase, dcp_semantics=semantics, block_size=64)
    action = "FP8" if semantics == "vllm" else None
    return quantize_trace(traced, QuantConfig.resolve(load_model_config(name), None, action, dcp_semantics=semantics))


def ops_of(traced: Trace, name: str) -> list[OpRecord]:
    found = [op for op in traced.ops if op.name in (PREFIX + name, name)]
    assert found, name
    return found


def priced(traced: Trace, name: str, **sizes: Any) -> OpCost:
    op = DimTable(sizes).op(ops_of(traced, name)[0])
    return COSTS.get(op.name)(op)


# -- sizes of rows ------------------------------------------------------------------------------------------------
def test_rows_of_the_caches() -> None:
    assert key_bytes(128, FP8) == 128 + 4 == 132  # a float32 scale per 128
    assert key_bytes(128, "bfloat16") == 256
    assert key_bytes(128, "int8") == 130  # vllm-ascend: a float16 scale
    assert latent_bytes(512, 64, FP8) == 512 + 4 * 4 + 64 * 2 == 656
    assert latent_bytes(512, 64, "bfloat16") == 1152


def test_f3_heads_are_padded() -> None:
    tiles = load_engine("vllm").sparse_head_tiles
    assert [padded_heads(h, tiles) for h in (1, 8, 64, 65, 128, 129)] == [64, 64, 64, 128, 128, 256]


def test_npus_compute_the_heads_that_there_are() -> None:
    """The FLOPs of vLLM's kernel, with eight of 64 heads on a rank, are those of a full tile; vllm-ascend's are not."""
    executed = {}
    for engine, semantics in (("vllm", "vllm"), ("vllm-ascend", "vllm-ascend")):
        profile, segments = load_engine(engine), trace(semantics=semantics).segments
        part = next(s.part for s in segments if any(op.name == PREFIX + "sparse_mla_attention" for op in s.part.ops))
        ready = prepare(part, QuantConfig(), head_tiles=profile.sparse_head_tiles)
        op = next(op for op in ready.ops if op.name == PREFIX + "sparse_mla_attention")
        cost = COSTS.get(op.name)(DimTable({"B": 1, "Q": 1, "S": 100_000}).op(op))
        assert cost.flops == 285_212_672 / 8
        executed[engine] = cost.padded_flops
    assert executed == {"vllm": 285_212_672, "vllm-ascend": 285_212_672 / 8}


# -- scoring ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "heads", "per_key"), [("zai-org/GLM-5.3", 32, 8_256), (V32.model_id, 64, 16_512)])
def test_f1_scoring(name: str, heads: int, per_key: int) -> None:
    context = 65_536
    cost = priced(trace(name), "indexer_scores", B=3, Q=1, S=context)
    assert 2 * heads * 128 + 2 * heads == per_key
    assert cost.flops == 3 * context * per_key
    assert (cost.compute_dtype, cost.op_class) == (FP8, OpClass.MLA_DECODE)
    keys, scores = 3 * context * 132, 3 * context * 4
    assert cost.bytes_written == scores
    assert keys < cost.bytes_read < keys * 1.002


def test_queries_of_a_request_share_its_keys() -> None:
    """A verification step of 1 + 3 tokens scores four times as much and reads the cache once."""
    one, four = (priced(trace(), "indexer_scores", B=2, Q=q, S=32_768) for q in (1, 4))
    assert four.flops == pytest.approx(4 * one.flops, rel=1e-4)
    assert four.bytes_written == pytest.approx(4 * one.bytes_written, rel=1e-4)
    assert four.bytes_read == pytest.approx(one.bytes_read, rel=2e-2)


def test_a_prompt_scores_what_it_sees() -> None:
    # Of a prompt of n tokens each query sees itself and what came before: n (n + 1) / 2 scores.
    n = 4096
    cost = priced(trace(phase=Phase.PREFILL), "indexer_scores", B=1, Q=n, S=n)
    assert cost.flops == n * (n + 1) / 2 * 8_256
    assert cost.op_class is OpClass.ATTENTION_PREFILL
    assert priced(trace(phase=Phase.PREFILL), "indexer_topk", B=1, Q=n, S=n).bytes_read == n * (n + 1) / 2 * 4


def test_index_keys_are_written_with_their_scales() -> None:
    cost = priced(trace(), "indexer_cache_write", B=5, Q=2, S=4096)
    assert cost.bytes_written == 10 * 132
    assert priced(trace(), "mla_cache_write", B=5, Q=2, S=4096).bytes_written == 10 * 656


def test_projections_are_replicated_and_the_small_ones_never_quantised() -> None:
    quant = QuantConfig.resolve(V32)
    traced = quantize_trace(
        library(V32.model_id).trace(ParallelConfig(8), Phase.DECODE, dcp_semantics="vllm", block_size=64), quant
    )
    by_name = {op.module.rsplit(".", 1)[1]: op for op in traced.ops if ".indexer." in op.module}
    flops = {n: COSTS.get(op.name)(DimTable({"B": 1, "Q": 1, "S": 8}).op(op)).flops for n, op in by_name.items()}
    # Section 5 of the reference: 2 (q_lora n d + H d + H n) = 27.92 MFLOP per token, on every rank of tp 8.
    assert flops["wq_b"] + flops["wk"] + flops["weights_proj"] == 2 * (1536 * 8192 + 7168 * 128 + 7168 * 64)
    assert by_name["wq_b"].attr("compute_dtype") == FP8
    assert by_name["wk"].attr("compute_dtype") is None


# -- attention ----------------------------------------------------------------------------------------------------
def test_f2_sparse_attention() -> None:
    # All 64 heads of GLM: 2 * 64 * (576 + 512) * 2048.
    cost = priced(trace(tp=1), "sparse_mla_attention", B=1, Q=1, S=100_000)
    assert cost.flops == cost.padded_flops == 2 * 64 * 1088 * 2048 == 285_212_672
    assert priced(trace(V32.model_id, tp=1), "sparse_mla_attention", B=1, Q=1, S=100_000).flops == 2 * 285_212_672
    # tp 8 leaves 8 heads.
    assert priced(trace(), "sparse_mla_attention", B=1, Q=1, S=100_000).flops == 285_212_672 / 8


def test_queries_gather_their_own_latents() -> None:
    rows = 2 * 3 * 2048
    cost = priced(trace(), "sparse_mla_attention", B=2, Q=3, S=50_000)
    assert rows * 656 < cost.bytes_read < rows * 656 * 1.05
    # A context shorter than that is read whole.
    short = priced(trace(), "sparse_mla_attention", B=2, Q=1, S=300)
    assert short.flops == 2 * 2 * 8 * 1088 * 300


def test_attention_stops_growing_at_topk() -> None:
    sizes = np.array([1024, 2048, 4096, 131_072])
    flops = priced(trace(), "sparse_mla_attention", B=1, Q=1, S=sizes).flops
    assert list(flops / flops[1]) == [0.5, 1, 1, 1]


def test_a_prompt_attends_to_what_was_chosen() -> None:
    # Queries 1 .. 2048 see all before them, the others 2048: brute force.
    n = 5000
    pairs = sum(min(seen, 2048) for seen in range(1, n + 1))
    cost = priced(trace(phase=Phase.PREFILL), "sparse_mla_attention", B=1, Q=n, S=n)
    assert cost.flops == 2 * 8 * 1088 * pairs


# -- layers and ranks ---------------------------------------------------------------------------------------------
def calls(traced: Trace, name: str) -> int:
    return sum(op.repeat for op in ops_of(traced, name))


def test_only_layers_that_choose_have_an_indexer() -> None:
    assert calls(trace(), "sparse_mla_attention") == 78
    for name in ("indexer_cache_write", "indexer_scores", "indexer_topk"):
        assert calls(trace(), name) == 21
    assert calls(trace("zai-org/GLM-5"), "indexer_scores") == 78


def test_p7_indices_handed_on() -> None:
    """Layers that share read [B, Q, min(S, 2048)] int32: 8,192 bytes per token."""
    places = ops_of(trace(), "sparse_mla_attention")[0].inputs[2]
    assert (places.dtype, places.kind) == ("int32", Kind.INDEX)
    assert places.nbytes({"B": 3, "Q": 2, "S": 9_000}) == 6 * 8_192
    assert places.nbytes({"B": 3, "Q": 2, "S": 500}) == 6 * 2_000


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("name", ["zai-org/GLM-5.3", "zai-org/GLM-5", "deepseek-ai/DeepSeek-V3.2"])
def test_everything_is_priced(name: str, phase: Phase) -> None:
    assert coverage(trace(name, phase).ops) == 1.0


def wire(traced: Trace, **sizes: int) -> list[tuple[str, float, int]]:
    """(collective, bytes per token, calls) on the dcp axis."""
    tokens = sizes["B"] * sizes["Q"]
    return [
        (op.name.partition(".")[2], op.collective_bytes(sizes) / tokens, op.repeat)
        for op in traced.ops
        if op.axis == "dcp"
    ]


SIZES = {"B": 3, "Q": 2, "S": 100_000}


def test_d8_candidates_under_dcp() -> None:
    """vllm: 16 KiB of candidates per token where a layer chooses, then gather of Q, gather of lse, reduce-scatter."""
    found = wire(trace(dcp=8), **SIZES)
    chooses = found[:4]
    assert chooses == [
        ("all_gather_into_tensor", 2048 * 8, 3),
        ("all_gather_into_tensor", 8 * 576 * 2, 3),
        ("all_gather_into_tensor", 64 * 4, 3),
        ("reduce_scatter_tensor", 64 * 512 * 2, 3),
    ]
    assert sum(count for _, size, count in found if size == 16_384) == 21
    assert sum(count for _, size, count in found if size == 9_216) == 78
    told = get_semantics("vllm")
    stated = (*told.indexer_collectives(GLM, 8), *told.collectives(GLM, 8, 8))
    assert [(c.op, c.nbytes) for c in stated] == [(name, size) for name, size, _ in chooses]


def test_three_collectives_of_sfa() -> None:
    traced = trace(semantics="vllm-ascend", dcp=8)
    found = wire(traced, **SIZES)
    assert found[:3] == [
        ("all_gather_into_tensor", 9_216, 3),
        ("all_to_all_single", 64 * 512 * 2, 3),
        ("all_to_all_single", 64 * 4, 3),
    ]
    stated = get_semantics("vllm-ascend").collectives(GLM, 8, 8)
    assert [(c.op, c.nbytes) for c in stated] == [(name, size) for name, size, _ in found[:3]]
    assert sum(count for *_, count in found) == 3 * 78
    # Each rank scores the whole context from a cache of its own, and attends to its share of what was chosen.
    scores = ops_of(traced, "indexer_scores")[0]
    assert scores.inputs[2].nbytes(SIZES) == 3 * 100_000 * 256
    attended = priced(traced, "sparse_mla_attention", **SIZES)
    assert attended.flops == 2 * 6 * 64 * 1088 * 2048 / 8


def test_dcp_splits_scores_under_vllm() -> None:
    whole, split = (priced(trace(dcp=dcp), "indexer_scores", **SIZES) for dcp in (1, 8))
    assert split.flops == whole.flops / 8
    assert split.bytes_written == whole.bytes_written / 8


def test_the_rfc_refuses() -> None:
    with pytest.raises(LegalityError, match=r"dcp\.sparse_attention"):
        trace(semantics="rfc", dcp=8)


def test_d9_token_bytes_of_sfa() -> None:
    def token(dcp: int) -> float:
        parallel = ParallelConfig(8, decode_context_parallel_size=dcp)
        options = {"block_size": 128, "kv_dtype": "bfloat16", "dcp_semantics": "vllm-ascend", "num_mtp_tokens": 1}
        return request_kv_bytes(GLM, parallel, tokens=1024 * 128, **options) / (1024 * 128)

    assert token(1) == 79 * 1152 + 22 * 256 == 96_640
    assert token(8) == 79 * 1152 / 8 + 22 * 256 == 17_008


# -- formats ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("action", "semantics", "main", "indexer"),
    [
        (None, "vllm", "bfloat16", FP8),
        ("FP8", "vllm", FP8, FP8),
        (None, "vllm-ascend", "bfloat16", "bfloat16"),
        ("INT8", "vllm-ascend", "int8", "int8"),
    ],
)
def test_each_engine_has_its_formats(action: str | None, semantics: str, main: str, indexer: str) -> None:
    quant = QuantConfig.resolve(GLM, None, action, dcp_semantics=semantics)
    assert (quant.kv_dtype, quant.indexer_dtype) == (main, indexer)


def test_queries_are_quantised_for_8_bit_keys() -> None:
    traced = trace()
    scores = ops_of(traced, "indexer_scores")[0]
    assert (scores.inputs[0].dtype, scores.inputs[2].dtype, scores.inputs[2].kind) == (FP8, FP8, Kind.INDEXER)
    quants = [op for op in traced.ops if op.name == "tensor_cast.dynamic_quant" and "indexer" in op.module]
    assert sum(op.repeat for op in quants) == 21
    assert quants[0].outputs[1] == TensorSpec((*scores.inputs[0].shape[:3], 1), "float32")


def test_scores_of_a_prompt_come_in_pieces() -> None:
    """[Q, S] float32 of 8,192 tokens before 131,072 would be 4 GiB; engines keep 512 MiB of it at a time."""
    part = next(s.part for s in trace(phase=Phase.PREFILL).segments if "indexer" in str([op.name for op in s.part.ops]))
    sizes = {"B": 1, "Q": 8192, "S": 131_072}
    assert 512 * MIB < part_peak_bytes(part, sizes) < 2048 * MIB
    small = {"B": 1, "Q": 64, "S": 131_072}
    assert part_peak_bytes(part, small) < 128 * MIB
