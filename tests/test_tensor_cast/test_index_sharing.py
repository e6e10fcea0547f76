"""Layers given an indexer of their own: the stage is that of a model which has one there, op for op."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from tracer_models import tiny

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.errors import UnsupportedModelError
from tensor_cast.ir.index_sharing import Handover, hand_over, hand_over_all, with_own_indexers
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase, TensorSpec, Trace, at_layer
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model import costs as _registers_cost_functions  # noqa: F401
from tensor_cast.performance_model.base import COSTS, DimTable
from tensor_cast.performance_model.memory import weight_bytes
from tensor_cast.pipeline_partition import DsaSplit
from tensor_cast.quant import QuantConfig

#: GLM's indexer: 2048 * 32 * 128 (wq_b) + 6144 * 128 (wk) + 6144 * 32 (weights_proj) + 2 * 128 (k_norm).
GLM_INDEXER = 9_371_904


def layout(tp: int, pp: int, *, dcp: int = 1, k: int = 0, phase: Phase = Phase.DECODE) -> Layout:
    parallel = ParallelConfig(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, decode_context_parallel_size=dcp if tp > 1 else 1
    )
    return Layout(parallel, phase, "vllm", 64, k)


def work(trace: Trace) -> Counter[tuple[object, ...]]:
    """Calls of each op by what it does, and parameters, whatever layer they were traced in."""
    found: Counter[tuple[object, ...]] = Counter()
    for segment in trace.segments:
        for op in segment.ops():
            sides = tuple(bare(spec) for spec in (*op.inputs, *op.outputs))
            found[op.name, at_layer(op.module, (0,)), sides, op.attrs, op.axis, op.scope] += op.repeat
    for param, count in trace.params:
        found[at_layer(param.name, (0,)), param.shape, param.dtype, param.role, param.splits] += count
    return found


def bare(spec: TensorSpec) -> TensorSpec:
    return replace(spec, name=at_layer(spec.name, (0,)))


@cache
def library(own: str = "110010", dense: int = 1) -> TraceLibrary:
    """Traces of a tiny GLM whose layers have an indexer each (1), or share the last choice (0)."""
    kinds = ["full" if flag == "1" else "shared" for flag in own]
    changes = {"index_topk_freq": None, "index_skip_topk_offset": None, "first_k_dense_replace": dense}
    return TraceLibrary(tiny("glm_moe_dsa", indexer_types=kinds, **changes), use_cache=False)


@pytest.mark.parametrize(
    ("own", "dense", "partition", "dcp", "k", "phase"),
    [
        ("110010", 1, (2, 4), 1, 0, Phase.DECODE),
        ("110010", 1, (2, 4), 1, 0, Phase.PREFILL),
        ("110010", 1, (3, 3), 2, 2, Phase.DECODE),
        ("110010", 1, (2, 1, 3), 1, 1, Phase.PREFILL),
        ("110010", 1, (4, 2), 2, 0, Phase.DECODE),
        ("110000", 2, (3, 3), 2, 0, Phase.DECODE),  # no layer with experts has an indexer
    ],
)
def test_stages_are_those_of_a_model_with_indexers_there(
    own: str, dense: int, partition: tuple[int, ...], dcp: int, k: int, phase: Phase
) -> None:
    model = library(own, dense).model
    handover = hand_over(model, partition, DsaSplit.SELF_COMPUTE)
    other = "".join("1" if i in handover.own_indexers else flag for i, flag in enumerate(own))
    at = layout(2, len(partition), dcp=dcp, k=k, phase=phase)
    given = library(own, dense).stages(at, partition, handover=handover)
    assert [work(trace) for trace in given] == [work(trace) for trace in library(other, dense).stages(at, partition)]


def test_layers_that_lack_indices() -> None:
    model = library().model
    assert hand_over(model, (2, 4), DsaSplit.SELF_COMPUTE) == Handover(own_indexers=(2, 3))
    assert hand_over(model, (3, 2, 1), DsaSplit.SELF_COMPUTE) == Handover(own_indexers=(3, 5))
    assert hand_over(model, (2, 4), DsaSplit.UNSAFE) == hand_over(model, (2, 4), None) == Handover(unsafe=(2, 3))
    assert list(hand_over(model, (3, 1, 2), DsaSplit.SEND_INDICES).sent) == [1]
    for split in (*DsaSplit, None):
        assert hand_over(model, (4, 2), split) == Handover()
        assert hand_over(tiny("deepseek_v3"), (1, 2), split) == hand_over_all(tiny("deepseek_v3"), (1, 2), split)
    assert hand_over_all(model, (2, 4), DsaSplit.SELF_COMPUTE).own_indexers == (2, 3, 5)
    assert list(hand_over_all(model, (2, 2, 2), DsaSplit.SEND_INDICES).sent) == [1, 2]


@pytest.fixture(scope="module")
def glm() -> TraceLibrary:
    return TraceLibrary(load_model_config("zai-org/GLM-5.3"))


@pytest.mark.parametrize("partition", [(39, 39), (41, 37), (20, 20, 20, 18)])
def test_an_indexer_of_glm_weighs_what_it_has_parameters(glm: TraceLibrary, partition: tuple[int, ...]) -> None:
    quant = QuantConfig.resolve(glm.model, None, None)
    handover = hand_over(glm.model, partition, DsaSplit.SELF_COMPUTE)
    at = layout(4, len(partition), k=3)
    plain, given = glm.stages(at, partition), glm.stages(at, partition, handover=handover)
    ends = [sum(partition[: i + 1]) for i in range(len(partition))]
    flips = [sum(end - n <= i < end for i in handover.own_indexers) for end, n in zip(ends, partition, strict=True)]
    grown = [weight_bytes(b, quant) - weight_bytes(a, quant) for a, b in zip(plain, given, strict=True)]
    assert grown == [count * GLM_INDEXER * 2 for count in flips]
    assert sum(flips) == {(39, 39): 3, (41, 37): 1, (20, 20, 20, 18): 6}[partition]


def test_an_indexer_of_glm_scores_the_whole_context(glm: TraceLibrary) -> None:
    """2 * 32 * 128 + 2 * 32 = 8,256 FLOPs for each token of context and each layer."""
    sizes = {"B": 3, "Q": 1, "S": 10_000}

    def flops(trace: Trace) -> float:
        scores = [op for op in trace.ops if op.name == "tensor_cast.indexer_scores"]
        return float(sum(op.repeat * COSTS.get(op.name)(DimTable(sizes).op(op)).flops for op in scores))

    plain = glm.stages(layout(4, 2), (39, 39))
    given = glm.stages(layout(4, 2), (39, 39), handover=Handover(own_indexers=(39, 40, 41)))
    assert flops(given[1]) - flops(plain[1]) == 3 * 3 * 8256 * 10_000
    assert flops(given[0]) == flops(plain[0])


def test_nothing_to_give() -> None:
    trace = library().compose(layout(2, 1))
    assert with_own_indexers(trace, ()) is trace
    assert work(with_own_indexers(trace, (0, 1, 4))) == work(trace)  # they have one


def test_no_layer_to_go_by() -> None:
    trace = library().compose(layout(2, 1))
    shared = [s for s in trace.segments if not any(".indexer" in op.module for op in s.part.ops)]
    with pytest.raises(UnsupportedModelError, match=r"gives layer 2 an indexer, but no layer .* send-indices"):
        with_own_indexers(replace(trace, segments=tuple(shared)), (3,))
