"""Parts put together equal the whole program; symbols evaluated equal a concrete trace; folding changes no total."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tracer_models import TINY, tiny

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.errors import ConfigError
from tensor_cast.ir.expr import evaluate
from tensor_cast.ir.program import Layout, compose
from tensor_cast.ir.record import OpRecord, Phase, Scope, Trace
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.tracer.trace import ModelTracer
from tensor_cast.tracer.whole import trace_whole, trace_whole_draft

SIZES = {"B": 3, "Q": 2, "S": 37}

LAYOUTS = [
    ("one", ParallelConfig(), Phase.DECODE, "vllm-ascend"),
    ("tp2 prefill", ParallelConfig(2), Phase.PREFILL, "vllm-ascend"),
    ("tp4 dcp2", ParallelConfig(4, decode_context_parallel_size=2), Phase.DECODE, "vllm-ascend"),
    ("tp4 dcp2 rfc", ParallelConfig(4, decode_context_parallel_size=2), Phase.DECODE, "rfc"),
    ("tp2 dp2 ep4", ParallelConfig(2, 1, 2, 4), Phase.DECODE, "vllm"),
    ("tp4 dcp2 vllm", ParallelConfig(4, decode_context_parallel_size=2), Phase.DECODE, "vllm"),
]


def small(name: str) -> ModelConfig:
    """Few enough KV heads for DCP to be legal at tp 4."""
    return tiny(name) if "kv_lora_rank" in TINY[name] else tiny(name, num_key_value_heads=2)


@cache
def tracer(name: str) -> ModelTracer:
    return ModelTracer(small(name))


@cache
def library(name: str) -> TraceLibrary:
    return TraceLibrary(small(name), use_cache=False)


def layout(parallel: ParallelConfig, phase: Phase, semantics: str, mtp: int = 0) -> Layout:
    return Layout(parallel, phase, semantics, 4, mtp)


def essence(op: OpRecord) -> tuple[Any, ...]:
    """All that must agree but the module."""
    specs = tuple((t.shape, t.dtype, t.kind) for t in (*op.inputs, None, *op.outputs) if t is not None)
    return (op.name, specs, len(op.inputs), op.attrs, op.repeat, op.axis, op.group_size, op.scope)


#: Sparse attention under vllm-ascend shards its cache over the whole TP group; the RFC does not cover it.
SPARSE = [
    *(LAYOUTS[i] for i in (0, 1, 4, 5)),
    ("tp4 dcp4", ParallelConfig(4, decode_context_parallel_size=4), Phase.DECODE, "vllm-ascend"),
]


def split(name: str) -> tuple[str, ParallelConfig, Phase, str]:
    """A layout with DCP that is legal for the model."""
    return LAYOUTS[5] if "index_topk" in TINY[name] else LAYOUTS[2]


CASES = [(n, c) for n in sorted(TINY) for c in (SPARSE if "index_topk" in TINY[n] else LAYOUTS)]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c[0]}" for n, c in CASES])
def test_composed_equals_whole(name: str, case: tuple[str, ParallelConfig, Phase, str]) -> None:
    wanted = layout(*case[1:])
    trace = library(name).compose(wanted)
    whole = trace_whole(tracer(name), wanted)
    assert list(map(essence, trace.ops)) == list(map(essence, whole))
    assert [op.module for op in trace.ops] == [op.module for op in whole]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "glm_moe_dsa", "gpt_oss"])
def test_folding_changes_no_total(name: str) -> None:
    wanted = layout(*split(name)[1:])
    folded: Counter[Any] = Counter()
    for op in library(name).compose(wanted).ops:
        folded[essence(op)[:4]] += op.repeat
    unfolded: Counter[Any] = Counter(essence(op)[:4] for op in trace_whole(tracer(name), wanted, fold=False))
    assert folded == unfolded


@pytest.mark.parametrize("case", [LAYOUTS[i] for i in (0, 1, 2, 4)], ids=[LAYOUTS[i][0] for i in (0, 1, 2, 4)])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "glm_moe_dsa", "gpt_oss", "qwen3_moe"])
def test_symbolic_equals_concrete(name: str, case: tuple[str, ParallelConfig, Phase, str]) -> None:
    wanted = layout(*(split(name) if case is LAYOUTS[2] else case)[1:])
    symbolic = library(name).compose(wanted)
    concrete = concrete_tracer(name)
    skeleton = concrete.skeleton()
    parts = {part.key: part for part in skeleton.fixed}
    parts |= {r.key: concrete.part(r) for r, _, _ in skeleton.plan(wanted) if r.key not in parts}
    numbers = compose("tiny", skeleton, wanted, parts)
    assert [numeric(op) for op in symbolic.ops] == [numeric(op) for op in numbers.ops]


@cache
def concrete_tracer(name: str) -> ModelTracer:
    return ModelTracer(small(name), sizes=SIZES)


def numeric(op: OpRecord) -> tuple[Any, ...]:
    shapes = tuple(tuple(evaluate(d, SIZES) for d in t.shape) for t in (*op.inputs, *op.outputs))
    return (op.name, shapes, tuple(t.dtype for t in (*op.inputs, *op.outputs)), op.repeat, op.axis)


@pytest.mark.parametrize("name", sorted(TINY))
def test_degree_one_has_no_collectives(name: str) -> None:
    for phase in Phase:
        trace = library(name).compose(layout(ParallelConfig(), phase, "vllm-ascend"))
        assert not [op.name for op in trace.ops if op.is_collective or op.name == "tensor_cast.merge_attention"]
        assert trace.replicated == ()


@pytest.mark.parametrize("name", sorted(TINY))
def test_two_all_reduces_per_layer(name: str) -> None:
    """One after attention, one after the feed-forward block, one for the embedding; a gather of the logits."""
    trace = library(name).compose(layout(ParallelConfig(2), Phase.DECODE, "vllm-ascend"))
    count: Counter[str] = Counter()
    for op in trace.ops:
        if op.is_collective:
            assert (op.axis, op.group_size) == ("tp", 2)
            count[op.name] += op.repeat
    layers = small(name).num_hidden_layers
    assert count == {
        "_c10d_functional.all_reduce": 2 * layers + 1,
        "_c10d_functional.all_gather_into_tensor": 1,
    }


@pytest.mark.parametrize("name", sorted(TINY))
def test_token_ops_are_the_same_in_every_phase(name: str) -> None:
    """A step that mixes phases runs the TOKEN ops once, over the tokens of both."""

    def of(trace: Trace, scope: Scope) -> list[Any]:
        return [essence(op) for op in trace.ops if op.scope is scope]

    tp4 = ParallelConfig(4)
    dcp = layout(*split(name)[1:])
    decode = library(name).compose(layout(tp4, Phase.DECODE, "vllm-ascend"))
    prefill = library(name).compose(layout(tp4, Phase.PREFILL, "vllm-ascend"))
    shared = library(name).compose(dcp)
    assert of(decode, Scope.TOKEN) == of(prefill, Scope.TOKEN) == of(shared, Scope.TOKEN)
    for trace in (decode, prefill, shared):
        for op in trace.ops:
            uses_context = any("S" in str(d) for t in (*op.inputs, *op.outputs) for d in t.shape)
            assert not uses_context or op.scope is Scope.SEQUENCE, op


def test_values_connect_inside_parts() -> None:
    """Every value an op reads was made before it in the part, is an input of the part, a weight or a cache."""
    for name in sorted(TINY):
        for segment in library(name).compose(layout(*split(name)[1:])).segments:
            part = segment.part
            known = set(part.input_ids)
            for op in part.ops:
                for spec, value in zip(op.inputs, op.input_ids, strict=True):
                    assert value in known or spec.kind in ("weight", "kv", "indexer"), (part.key, op.name)
                known.update(op.output_ids)
            assert set(part.output_ids) <= known


def test_moe_dispatch_only_between_dp_ranks() -> None:
    def dp_collectives(parallel: ParallelConfig) -> list[tuple[str, int | None]]:
        trace = library("qwen3_moe").compose(layout(parallel, Phase.DECODE, "vllm"))
        return [(op.name.split(".")[1], op.group_size) for op in trace.ops if op.axis == "dp"]

    gather, scatter = ("all_gather_into_tensor", 2), ("reduce_scatter_tensor", 2)
    assert dp_collectives(ParallelConfig(2, 1, 2, 1)) == [gather] * 3 + [scatter]
    assert dp_collectives(ParallelConfig(2, 1, 2, 4)) == [gather] * 3 + [scatter]
    assert dp_collectives(ParallelConfig(4, 1, 1, 4)) == []
    assert dp_collectives(ParallelConfig(2, 1, 2, 1, 2)) == []


def test_mtp_segments() -> None:
    lib = library("deepseek_v3")
    base = lib.compose(layout(ParallelConfig(2), Phase.DECODE, "vllm"))
    drafted = lib.compose(layout(ParallelConfig(2), Phase.DECODE, "vllm", 3))
    extra = drafted.segments[len(base.segments) :]
    assert [s.query_len for s in extra if s.part.key == "draft/project"] == [None, 1, 1]
    attention = [s for s in extra if s.part.key.startswith("attention")]
    assert [s.layers for s in attention] == [(3,)] * 3
    # Embedding and head are shared, the projection and one layer more are counted once.
    before, after = dict_of(base), dict_of(drafted)
    assert after["model.embed_tokens.weight"] == before["model.embed_tokens.weight"] == 1
    assert after["lm_head.weight"] == 1
    assert after["model.layers.3.eh_proj.weight"] == 1
    assert after["model.layers.0.self_attn.q_b_proj.weight"] == 4
    assert after["model.layers.1.mlp.experts.down_proj"] == 3
    sampled = [op.inputs[0].shape for op in drafted.ops if op.name == "tensor_cast.sample"]
    assert [str(shape[1]) for shape in sampled] == ["Q", "1", "1", "1"]


@pytest.mark.parametrize("phase", list(Phase))
def test_composed_draft_equals_whole_draft(phase: Phase) -> None:
    wanted = layout(ParallelConfig(4, decode_context_parallel_size=2), phase, "vllm-ascend", 1)
    trace = library("deepseek_v3").compose(wanted)
    base = library("deepseek_v3").compose(replace(wanted, num_mtp_tokens=0))
    draft = trace.ops[len(base.ops) :]
    whole = trace_whole_draft(tracer("deepseek_v3"), wanted)
    assert list(map(essence, draft)) == list(map(essence, whole))
    assert [op.module for op in draft] == [op.module for op in whole]


def dict_of(trace: Trace) -> dict[str, int]:
    return {spec.name: layers for spec, layers in trace.params}


def test_mtp_needs_a_draft_module() -> None:
    with pytest.raises(ConfigError, match="no MTP layers"):
        library("llama").compose(layout(ParallelConfig(), Phase.DECODE, "vllm", 1))


def test_equal_keys_give_the_same_part() -> None:
    lib = library("deepseek_v3")
    a = lib.compose(layout(ParallelConfig(2, 1, 2, 4), Phase.DECODE, "vllm"))
    b = lib.compose(layout(ParallelConfig(2, 1, 1, 1), Phase.DECODE, "vllm"))
    shared = {s.part.key: s.part for s in a.segments}
    same = [s for s in b.segments if s.part.key in shared]
    assert len(same) > 10
    assert all(shared[s.part.key] is s.part for s in same)
