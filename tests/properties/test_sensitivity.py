"""The answer changes if, and only if, something changes that it depends on; and never with what was asked before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from embedded import BLOCK, SEMANTICS, Traces, cases, examples, sizes
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import load_engine
from tensor_cast.engine.kv_cache import request_kv_bytes
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model.estimate import StepEstimator, clear_memos
from tensor_cast.performance_model.memory import activation_peak_bytes, weight_bytes
from tensor_cast.quant import QuantConfig

LAYOUT = ParallelConfig(16, 1, 2, 32, 1, 2)


@dataclass(frozen=True)
class Question:
    """Everything that a step's time and memory depend on."""

    model: str = "Qwen/Qwen3-235B-A22B"
    parallel: ParallelConfig = LAYOUT
    phase: Phase = Phase.DECODE
    semantics: str = "vllm-ascend"
    block_size: int = BLOCK
    device: str = "H100_SXM"
    engine: str = "vllm"
    linear: str | None = None
    cache: str | None = None
    fusion: bool = True
    skew: float = 0.0
    batch: int = 64
    query: int = 1
    context: int = 8192
    mtp: int = 0

    def answer(self, traces: Traces) -> dict[str, float]:
        """Seconds of the step, and bytes of weights, activations and one request's KV cache."""
        model = load_model_config(self.model)
        quant = QuantConfig.resolve(model, self.linear, self.cache)
        layout = Layout(self.parallel, self.phase, self.semantics, self.block_size, self.mtp)
        est = StepEstimator(
            traces.of(model, layout),
            device=load_device(self.device),
            engine=load_engine(self.engine),
            parallel=self.parallel,
            quant=quant,
            fusion=self.fusion,
            moe_skew=self.skew,
        )
        env = {"B": self.batch, "Q": self.query, "S": self.context}
        return {
            "seconds": float(sum(est.scope_seconds(env).values())),
            "step": est.estimate(env).step_s,
            "weights": weight_bytes(est.trace, quant),
            "activations": float(activation_peak_bytes(est.prepared, env)),
            "kv": request_kv_bytes(
                model,
                self.parallel,
                tokens=self.context,
                block_size=self.block_size,
                kv_dtype=quant.kv_dtype,
                dcp_semantics=self.semantics,
                num_mtp_tokens=self.mtp,
            ),
        }


def layout(**changes: int) -> Callable[[Question], Question]:
    return lambda q: replace(q, parallel=replace(q.parallel, **changes))


def asks(**changes: Any) -> Callable[[Question], Question]:
    return lambda q: replace(q, **changes)


V3 = "deepseek-ai/DeepSeek-V3"

# What changes -> which numbers change with it; all others must stay to the last bit.
# fmt: off
RELEVANT: dict[str, tuple[Question, Callable[[Question], Question], set[str]]] = {
    "tp": (Question(), layout(tensor_parallel_size=8, expert_parallel_size=16), {"seconds", "step", "weights", "activations"}),  # noqa: E501
    "tp within KV heads": (Question(model="Qwen/Qwen3-32B", parallel=ParallelConfig(8)), layout(tensor_parallel_size=4), {"seconds", "step", "weights", "activations", "kv"}),  # noqa: E501
    "dcp": (Question(), layout(decode_context_parallel_size=4), {"seconds", "step", "activations", "kv"}),
    "dp": (Question(), layout(data_parallel_size=1, expert_parallel_size=16), {"seconds", "step", "weights", "activations"}),  # noqa: E501
    "semantics": (Question(), asks(semantics="vllm"), {"seconds", "step", "activations"}),
    "batch": (Question(), asks(batch=65), {"seconds", "step", "activations"}),
    "query": (Question(), asks(query=2), {"seconds", "step", "activations"}),
    "context": (Question(), asks(context=16384), {"seconds", "step", "kv"}),
    "device": (Question(), asks(device="H200_SXM"), {"seconds", "step"}),
    "engine": (Question(), asks(engine="vllm-ascend"), {"step"}),
    "linear": (Question(), asks(linear="W4A16"), {"seconds", "step", "weights"}),
    "cache": (Question(), asks(cache="FP8"), {"seconds", "step", "kv"}),
    "skew": (Question(), asks(skew=0.7), {"seconds", "step"}),
    "experts": (Question(), layout(expert_parallel_size=1), {"seconds", "step"}),
    "mtp": (Question(model=V3, query=2), asks(mtp=1), {"seconds", "step", "weights", "kv"}),
    "phase": (Question(model=V3), asks(phase=Phase.PREFILL), {"seconds", "step", "activations"}),
    "model": (Question(), asks(model="Qwen/Qwen3-30B-A3B"), {"seconds", "step", "weights", "activations", "kv"}),
}
IRRELEVANT: dict[str, tuple[Question, Callable[[Question], Question]]] = {
    "interleave without dcp": (Question(parallel=ParallelConfig(8)), layout(cp_kv_cache_interleave_size=BLOCK)),
    "semantics without dcp": (Question(parallel=ParallelConfig(8)), asks(semantics="rfc")),
    "skew without experts": (Question(model="Qwen/Qwen3-32B", parallel=ParallelConfig(8)), asks(skew=0.7)),
    "dp without experts": (Question(model="Qwen/Qwen3-32B", parallel=ParallelConfig(8)), layout(data_parallel_size=4)),
    "the action that is the default": (Question(), asks(linear="DISABLED")),
    "a checkpoint's name": (Question(model=V3, linear="DISABLED"), asks(model="deepseek-ai/DeepSeek-R1")),
}
# fmt: on


@pytest.mark.parametrize("what", RELEVANT)
def test_what_matters_changes_what_it_should(what: str, traces: Traces) -> None:
    question, change, expected = RELEVANT[what]
    before, after = question.answer(traces), change(question).answer(traces)
    moved = {key for key in before if before[key] != after[key]}
    # Fewer activations may be alive at another point of the step: that they may stay is no fault.
    assert expected - {"activations"} <= moved <= expected | {"activations"}, what


@pytest.mark.parametrize("what", IRRELEVANT)
def test_what_does_not_matter_changes_nothing(what: str, traces: Traces) -> None:
    question, change = IRRELEVANT[what]
    assert change(question) != question
    assert change(question).answer(traces) == question.answer(traces)


@given(data=st.data())
@examples(6)
def test_order_of_questions_does_not_matter(data: st.DataObject, traces: Traces) -> None:
    """Many questions that share parts, devices and sizes, asked in two orders and each alone, nothing remembered."""
    models = ("Qwen/Qwen3-235B-A22B", "openai/gpt-oss-20b", V3)
    questions = []
    for _ in range(8):
        name, chosen = data.draw(cases(models, max_tp=16))
        env = data.draw(sizes(chosen.phase, most_tokens=2048))
        questions.append(
            Question(
                name,
                replace(chosen.parallel, decode_context_parallel_size=chosen.dcp),
                chosen.phase,
                chosen.dcp_semantics,
                device=data.draw(st.sampled_from(("H100_SXM", "ATLAS_800_A3_752T_128G_DIE"))),
                linear=data.draw(st.sampled_from(("DISABLED", "W8A8_DYNAMIC"))),
                skew=data.draw(st.sampled_from((0.0, 0.5))),
                batch=env["B"],
                query=env["Q"],
                context=env["S"],
            )
        )
    together = [q.answer(traces) for q in questions]
    backwards = [q.answer(traces) for q in reversed(questions)][::-1]
    alone = []
    for question in questions:
        clear_memos()
        alone.append(question.answer(traces))
    assert together == backwards == alone


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_semantics_tell_what_they_change(semantics: str, traces: Traces) -> None:
    """Under dcp = 2 each semantics has a step time of its own where its collectives differ."""
    question = Question(model=V3, parallel=ParallelConfig(8, decode_context_parallel_size=2))
    seconds = {s: replace(question, semantics=s).answer(traces)["seconds"] for s in SEMANTICS}
    assert len(set(seconds.values())) == len(SEMANTICS)
    assert replace(question, semantics=semantics).answer(traces)["seconds"] == seconds[semantics]
