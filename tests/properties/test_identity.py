"""An axis of degree 1 is no axis, and folding equal layers changes no total."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from embedded import ALL, BLOCK, DRAFTING, KINDS, SEMANTICS, Traces, cases, examples, layouts, shallow, sizes
from hypothesis import given
from hypothesis import strategies as st
from products import exactly

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.ir.cache import part_to_json
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import OpRecord, Phase, Trace
from tensor_cast.layers.context import ParallelContext
from tensor_cast.layers.sharding import Sharder
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import AttentionKind, ParallelConfig
from tensor_cast.performance_model.base import COSTS
from tensor_cast.tracer.trace import ModelTracer
from tensor_cast.tracer.whole import trace_whole


def as_bytes(trace: Trace) -> bytes:
    """The whole trace but the sizes that it displays."""
    segments = [[part_to_json(s.part), s.layers, s.query_len] for s in trace.segments]
    return json.dumps([segments, trace.replicated, trace.notes]).encode()


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("name", ALL)
def test_degree_one_is_no_axis(name: str, phase: Phase, traces: Traces) -> None:
    """Whatever says how an axis works says nothing when there is one rank on it; nothing crosses ranks."""
    mtp = 2 if name in DRAFTING else 0
    base = traces.of(name, Layout(ParallelConfig(), phase, "vllm", BLOCK, mtp))
    for semantics in SEMANTICS:
        for interleave in (1, 16, BLOCK):
            parallel = ParallelConfig(cp_kv_cache_interleave_size=interleave)
            assert as_bytes(traces.of(name, Layout(parallel, phase, semantics, BLOCK, mtp))) == as_bytes(base)
    assert not any(op.is_collective for op in base.ops)
    fresh = TraceLibrary(load_model_config(name), use_cache=False)
    assert as_bytes(fresh.compose(Layout(ParallelConfig(), phase, "rfc", BLOCK, mtp))) == as_bytes(base)


@given(case=cases(free=True))
@examples(30)
def test_each_axis_alone_at_degree_one(case: tuple[str, Layout], traces: Traces) -> None:
    """Under any layout, setting one axis to 1 gives the trace of the layout that never had it."""
    name, layout = case
    without_dcp = replace(layout.parallel, decode_context_parallel_size=1, cp_kv_cache_interleave_size=1)
    wanted = as_bytes(traces.of(name, replace(layout, parallel=without_dcp, dcp_semantics="vllm")))
    for semantics in SEMANTICS:
        for interleave in (1, BLOCK):
            parallel = replace(without_dcp, cp_kv_cache_interleave_size=interleave)
            assert as_bytes(traces.of(name, replace(layout, parallel=parallel, dcp_semantics=semantics))) == wanted
    if layout.phase is Phase.PREFILL:
        assert as_bytes(traces.of(name, layout)) == wanted
    if not load_model_config(name).is_moe:
        # Data parallelism touches nothing but experts.
        alone = replace(layout, parallel=replace(layout.parallel, data_parallel_size=1))
        assert as_bytes(traces.of(name, alone)) == as_bytes(traces.of(name, layout))


@pytest.mark.parametrize("name", KINDS)
def test_one_rank_is_not_cut(name: str) -> None:
    """On a single rank every parameter is the model's own object, and no region waits for others."""
    tracer = ModelTracer(load_model_config(name))
    anatomy = tracer.anatomy
    with torch.inference_mode(), tracer.inputs.space.mode:
        sharder = Sharder(anatomy.plan, ParallelContext(), anatomy.names)
        for index in tracer.groups:
            for region in anatomy.layer_regions(index):
                cut = dict(sharder.region(region.module, region.path).named_parameters())
                assert all(cut[key] is value for key, value in region.module.named_parameters())
    assert not any(spec.splits for spec in sharder.params.values())


# -- folding --------------------------------------------------------------------------------------------------------

#: Depths that hold every kind of layer of the model, some more than once.
DEPTHS = {"deepseek-ai/DeepSeek-V3": 5, "openai/gpt-oss-120b": 5}


@cache
def shallow_tracer(name: str) -> ModelTracer:
    return ModelTracer(shallow(name, DEPTHS.get(name, 3)))


def totals(ops: Mapping[Any, OpRecord] | Any, env: Mapping[str, int]) -> Counter[tuple[str, str]]:
    """Calls, FLOPs, bytes and bytes on the wire by op."""
    out: Counter[tuple[str, str]] = Counter()
    for op in ops:
        cost = COSTS.get(op.name)(op.at(env))
        wire = cost.collective.nbytes if cost.collective else 0
        for what, value in (("calls", 1), ("flops", cost.flops), ("bytes", cost.nbytes), ("wire", wire)):
            out[op.name, what] += exactly(value) * op.repeat  # type: ignore[assignment]
    return out


@given(data=st.data(), name=st.sampled_from(KINDS))
@examples(10)
def test_folded_equals_unfolded(data: st.DataObject, name: str, traces: Traces) -> None:
    """Equal layers are traced once; running every layer of the same model gives the same totals, op by op."""
    layout = data.draw(st.sampled_from(layouts(name, max_tp=16)))
    env = data.draw(sizes(layout.phase))
    tracer = shallow_tracer(name)
    unfolded = trace_whole(tracer, layout, fold=False)
    assert all(op.repeat == 1 for op in unfolded)
    folded = traces.of(tracer.config, layout)
    assert totals(folded.ops, env) == totals(unfolded, env)


@given(data=st.data(), name=st.sampled_from(KINDS))
@examples(25)
def test_deeper_models_cost_in_proportion(data: st.DataObject, name: str, traces: Traces) -> None:
    """A layer more costs what such a layer costs: totals of the full depth follow from those of shallow ones."""
    layout = data.draw(st.sampled_from(layouts(name, max_tp=16)))
    env = data.draw(sizes(layout.phase))
    model, depth = load_model_config(name), DEPTHS.get(name, 3)
    two = 2 if name.startswith("openai") else 1  # windows alternate
    short, longer = (totals(traces.of(shallow(name, n), layout).ops, env) for n in (depth, depth + two))
    rounds = Fraction(model.num_hidden_layers - depth, two)
    full = totals(traces.of(name, layout).ops, env)
    if rounds.denominator == 1:
        assert full == {k: short[k] + (longer[k] - short[k]) * rounds for k in longer}
    assert model.attention is not AttentionKind.DSA
