"""The trace of a pipeline stage is the program of that stage, whatever is done about top-k indices of other stages."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from test_tracer_program import essence
from tracer_models import tiny

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.ir.index_sharing import hand_over
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import OpRecord, Phase
from tensor_cast.ir.stages import split_wire
from tensor_cast.layers.choice_flow import self_computing
from tensor_cast.layers.stage import StageProgram
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.pipeline_partition import DsaSplit
from tensor_cast.tracer.trace import ModelTracer
from tensor_cast.tracer.whole import context_of


@cache
def tracer(model: ModelConfig) -> ModelTracer:
    return ModelTracer(model)


@cache
def library(model: ModelConfig) -> TraceLibrary:
    return TraceLibrary(model, use_cache=False)


def executed(
    model: ModelConfig, layout: Layout, partition: tuple[int, ...], stage: int, split: DsaSplit | None
) -> Counter[Any]:
    """Ops of a stage that runs on symbolic sizes."""
    traced = tracer(self_computing(model, partition) if split is DsaSplit.SELF_COMPUTE else model)
    inputs = traced.inputs
    with torch.inference_mode(), inputs.space.mode:
        program = StageProgram(traced.anatomy, context_of(layout), partition, stage, dsa_split=split)
        step = inputs.step(layout.phase, layout.block_size, program.ctx, program.model)
        size = inputs.space.sizes
        received = None if program.first else program.boundary(size.B, size.Q, inputs.dtype)
        recorder = inputs.recorder(program.model, step, program.ctx)
        with recorder.recording():
            program.run(inputs.ids(), step, received, last_only=layout.phase is Phase.PREFILL)
    return counted(event for event in recorder.events if isinstance(event, OpRecord))


def counted(ops: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for op in ops:
        found[essence(op)[:4]] += op.repeat
    return found


def priced(
    model: ModelConfig, layout: Layout, partition: tuple[int, ...], stage: int, split: DsaSplit | None
) -> Counter[Any]:
    """Ops of the stage's trace that are not its communication with other stages."""
    trace = library(model).stages(layout, partition, handover=hand_over(model, partition, split))[stage]
    inside, _ = split_wire(trace)
    segments = [segment for segment in inside.segments if not segment.part.key.startswith("glue/pp.gather")]
    return counted(op for segment in segments for op in segment.ops())


CASES = [
    ("llama", (2, 1), None),
    ("deepseek_v3", (1, 1, 1), None),
    ("gpt_oss", (1, 2), None),
    ("glm_moe_dsa", (1, 5), None),
    ("glm_moe_dsa", (3, 3), DsaSplit.SEND_INDICES),
    ("glm_moe_dsa", (3, 3), DsaSplit.SELF_COMPUTE),
    ("glm_moe_dsa", (2, 1, 3), DsaSplit.SELF_COMPUTE),
]


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(("name", "partition", "split"), CASES, ids=[f"{n}-{p}-{s}" for n, p, s in CASES])
def test_trace_of_a_stage_is_its_program(
    name: str, partition: tuple[int, ...], split: DsaSplit | None, phase: Phase
) -> None:
    model = tiny(name)
    layout = Layout(ParallelConfig(2, len(partition)), phase, "vllm", 4)
    for stage in range(len(partition)):
        ran, wanted = executed(model, layout, partition, stage, split), priced(model, layout, partition, stage, split)
        assert not wanted - ran
        # What else runs stands in for engines' own form of what crosses: Transformers adds the residual inside of
        # layers, so the parts are added on arrival; and engines write indices into a buffer K wide in the first place.
        rest = Counter(name for name, *_ in (ran - wanted).elements())
        first, last = stage == 0, stage == len(partition) - 1
        sends = split is DsaSplit.SEND_INDICES and not last
        made = ["aten.add"] * (not first) + ["aten.zeros_like"] * (not last) + ["aten.new_full", "aten.copy_"] * sends
        assert rest == Counter(made)
