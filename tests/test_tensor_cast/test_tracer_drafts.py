"""Draft passes of sparse attention: what later passes leave out where they reuse what the first one chose."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from test_tracer_program import essence
from tracer_models import tiny

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.errors import ConfigError
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import OpRecord, Phase
from tensor_cast.model_catalog import load_model_config, model_names
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model.base import COSTS, DimTable
from tensor_cast.tracer.trace import ModelTracer
from tensor_cast.tracer.whole import trace_whole_draft


@cache
def drafts(name: str, tokens: int) -> tuple[OpRecord, ...]:
    """Ops of all draft passes of a decode step at tp 8."""
    library = TraceLibrary(load_model_config(name), use_cache=False)
    layout = Layout(ParallelConfig(8), Phase.DECODE, "vllm", 64, tokens)
    base = library.compose(replace(layout, num_mtp_tokens=0))
    return library.compose(layout).ops[len(base.ops) :]


def indexer_flops(name: str, tokens: int, **sizes: int) -> float:
    """FLOPs of the indexer's products in all draft passes."""
    products = ("aten.linear", "tensor_cast.indexer_scores")
    return sum(
        op.repeat * COSTS.get(op.name)(DimTable(sizes).op(op)).flops
        for op in drafts(name, tokens)
        if ".indexer" in op.module and op.name in products
    )


def test_only_the_first_pass_runs_the_indexer() -> None:
    """GLM-5.3 with three draft tokens; GLM-5, the same sizes without the key, runs it in every pass."""
    requests, context = 5, 100_000
    projections = 2 * (2048 * 32 * 128 + 6144 * 128 + 6144 * 32)
    # The first pass takes the four tokens of the step; query i of them sees all but the last 3 - i tokens.
    first = requests * (4 * projections + (4 * context - (3 + 2 + 1)) * 8_256)
    later = requests * (projections + context * 8_256)
    sizes = {"B": requests, "Q": 4, "S": context}
    assert indexer_flops("zai-org/GLM-5.3", 3, **sizes) == first
    assert indexer_flops("zai-org/GLM-5.3", 1, **sizes) == first
    assert indexer_flops("zai-org/GLM-5", 3, **sizes) == first + 2 * later


def test_later_passes_attend_to_what_was_chosen() -> None:
    """Each pass attends; keys are cached by the first alone, and no later pass reads or writes the indexer's cache."""
    names = [op.name for op in drafts("zai-org/GLM-5.3", 3)]
    assert names.count("tensor_cast.sparse_mla_attention") == names.count("tensor_cast.mla_cache_write") == 3
    assert names.count("tensor_cast.indexer_cache_write") == 1
    reads = [op for op in drafts("zai-org/GLM-5.3", 3) if op.name == "tensor_cast.sparse_mla_attention"]
    sizes = {"B": 5, "Q": 4, "S": 100_000}
    assert [op.inputs[2].at(sizes).shape for op in reads] == [(5, 4, 2048), (5, 1, 2048), (5, 1, 2048)]


def test_weights_of_the_draft_module_do_not_depend_on_its_passes() -> None:
    def weights(tokens: int) -> dict[str, int]:
        library = TraceLibrary(tiny("glm_moe_dsa", index_share_for_mtp_iteration=True), use_cache=False)
        layout = Layout(ParallelConfig(2), Phase.DECODE, "vllm", 4, tokens)
        return {spec.name: layers for spec, layers in library.compose(layout).params}

    assert weights(3) == weights(1)


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (4, 1), (4, 4)])
def test_later_pass_equals_the_whole_program(tp: int, dcp: int) -> None:
    model = tiny("glm_moe_dsa", index_share_for_mtp_iteration=True)
    layout = Layout(ParallelConfig(tp, decode_context_parallel_size=dcp), Phase.DECODE, "vllm", 4, 2)
    library = TraceLibrary(model, use_cache=False)
    later = library.compose(layout).ops[len(library.compose(replace(layout, num_mtp_tokens=1)).ops) :]
    whole = trace_whole_draft(ModelTracer(model), layout, reuse=True)
    assert [essence(op) for op in later] == [essence(op.with_dims({"Q": 1})) for op in whole]


def test_which_models_share() -> None:
    share = {name for name in model_names() if load_model_config(name).index_share_for_mtp_iteration}
    assert share == {"zai-org/GLM-5.2", "zai-org/GLM-5.3", "zai-org/GLM-5.3-W4A16"}


def test_the_key_must_be_a_truth_value() -> None:
    with pytest.raises(ConfigError, match="index_share_for_mtp_iteration: found 'yes'; allowed are true and false"):
        tiny("glm_moe_dsa", index_share_for_mtp_iteration="yes")
