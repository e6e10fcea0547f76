"""What the property tests draw from: embedded models, their legal layouts, step sizes, and shared traces.

The examples are drawn the same way in every run. ``PROPERTY_EXAMPLES_FACTOR=20`` draws twenty times as many, at random.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import Phase as Generation
from hypothesis import strategies as st

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.engine.recurrent import recurrent_state
from tensor_cast.hf_config import read_facts
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import OpRecord, ParamSpec, Part, Phase, Segment, Trace
from tensor_cast.model_catalog import load_model_config, model_names
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig
from tensor_cast.parallel import violations

SEMANTICS = ("vllm-ascend", "vllm", "rfc")
BLOCK = 128
FACTOR = int(os.environ.get("PROPERTY_EXAMPLES_FACTOR", "1"))

#: Models with sparse attention: an indexer chooses the keys, so their products are not those of eager attention.
SPARSE = tuple(n for n in model_names() if load_model_config(n).attention is AttentionKind.DSA)
#: Models with recurrent layers: their caches are described, their layers are not traced.
RECURRENT = tuple(n for n in model_names() if recurrent_state(load_model_config(n)) is not None)
MODELS = tuple(n for n in model_names() if n not in SPARSE + RECURRENT)
ALL = MODELS + SPARSE
DENSE = tuple(n for n in MODELS if not load_model_config(n).is_moe)
MOE = tuple(n for n in MODELS if load_model_config(n).is_moe)
DRAFTING = tuple(n for n in MODELS if load_model_config(n).num_nextn_predict_layers)
#: One model of each kind: grouped-query, latent attention with draft module, sliding windows and biases, experts.
KINDS = (
    "Qwen/Qwen3-32B",
    "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-120b",
    "Qwen/Qwen3-235B-A22B",
    "mistralai/Mixtral-8x7B-v0.1",
)


def examples(count: int) -> settings:
    """``count`` examples, always the same ones in CI."""
    return settings(
        max_examples=count * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        phases=(Generation.explicit, Generation.generate) if FACTOR == 1 else tuple(Generation),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


class Traces:
    """A trace library of each model over one cache directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._libraries: dict[str, TraceLibrary] = {}

    def library(self, model: ModelConfig) -> TraceLibrary:
        if model.digest not in self._libraries:
            self._libraries[model.digest] = TraceLibrary(model, cache_dir=self._directory)
        return self._libraries[model.digest]

    def of(self, model: str | ModelConfig, layout: Layout) -> Trace:
        config = load_model_config(model) if isinstance(model, str) else model
        return self.library(config).compose(layout)


# -- layouts --------------------------------------------------------------------------------------------------------


@cache
def layouts(model: str, *, phase: Phase | None = None, max_tp: int = 32, free: bool = False) -> tuple[Layout, ...]:
    """Every legal layout of up to ``max_tp`` ranks per TP group and up to four DP ranks, under each DCP semantics.

    ``free``: also layouts that only engines with data-parallel experts take.
    """
    config = load_model_config(model)
    return tuple(_layouts(config, (phase,) if phase else tuple(Phase), max_tp, free))


def _layouts(config: ModelConfig, phases: tuple[Phase, ...], max_tp: int, free: bool) -> Iterator[Layout]:
    for tp in (n for n in range(1, max_tp + 1) if config.num_attention_heads % n == 0):
        for dp in (1, 2, 3, 4):
            experts = {(1, 1), (tp * dp, 1)} | ({(tp, dp), (1, dp)} if free else set())
            for ep, moe_dp in sorted(experts) if config.is_moe else [(1, 1)]:
                for dcp in (n for n in range(1, tp + 1) if tp % n == 0):
                    for semantics in SEMANTICS:
                        for interleave in (1, BLOCK) if dcp > 1 else (1,):
                            parallel = ParallelConfig(tp, 1, dp, ep, moe_dp, dcp, interleave)
                            for phase in phases:
                                if not violations(
                                    config,
                                    parallel,
                                    dcp_semantics=semantics,
                                    block_size=BLOCK,
                                    phase=phase,
                                    free_experts=free,
                                ):
                                    yield Layout(parallel, phase, semantics, BLOCK)


def cases(models: tuple[str, ...] = MODELS, **limits: Any) -> st.SearchStrategy[tuple[str, Layout]]:
    """A model with one of its legal layouts."""
    return st.sampled_from(models).flatmap(
        lambda name: st.sampled_from(layouts(name, **limits)).map(lambda layout: (name, layout))
    )


@st.composite
def sizes(draw: st.DrawFn, phase: Phase, *, most_tokens: int = 8192) -> dict[str, int]:
    """B, Q and S of a step: a fresh or chunked prompt, or a decode of 1 + k tokens."""
    batch = draw(st.integers(1, 64))
    if phase is Phase.PREFILL:
        query = draw(st.integers(2, most_tokens))
        return {"B": batch, "Q": query, "S": query + draw(st.sampled_from((0, 0, 128, 4096)))}
    query = draw(st.integers(1, 5))
    return {"B": batch, "Q": query, "S": query + draw(st.integers(0, 131072))}


# -- one rank's trace, layer by layer -------------------------------------------------------------------------------

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def at_layer(name: str, layer: int | None) -> str:
    """The same module or parameter in another layer."""
    return name if layer is None else _LAYER.sub(str(layer), name, count=1)


def runs(trace: Trace) -> Iterator[tuple[Segment, int | None]]:
    """Each run of each segment, with the layer that runs it."""
    for segment in trace.segments:
        for layer in segment.layers or (None,):
            yield segment, layer


def ops_of(trace: Trace) -> Iterator[tuple[str, OpRecord]]:
    """Every op of every layer with its module path; no op stands for several layers."""
    for segment, layer in runs(trace):
        for op in replace(segment, layers=()).ops():
            yield at_layer(op.module, layer), op


def params_of(trace: Trace) -> dict[str, ParamSpec]:
    """Every parameter of every layer by its name."""
    found: dict[str, ParamSpec] = {}
    for segment, layer in runs(trace):
        for param in segment.part.params:
            found[at_layer(param.name, layer)] = param
    return found


def parts_of(trace: Trace) -> dict[str, Part]:
    """The distinct parts."""
    return {segment.part.key: segment.part for segment in trace.segments}


def shallow(name: str, layers: int) -> ModelConfig:
    """The model with its first ``layers`` layers only."""
    values = json.loads(load_model_config(name).hf_config)
    count = values["num_hidden_layers"]
    values = {k: v[:layers] if isinstance(v, list) and len(v) == count else v for k, v in values.items()}
    values["num_hidden_layers"] = layers
    facts = read_facts(values, name)
    facts["attention"] = AttentionKind(facts["attention"])
    text = json.dumps(values, sort_keys=True)
    return ModelConfig(model_id=name, hf_config=text, digest=hashlib.sha256(text.encode()).hexdigest(), **facts)
