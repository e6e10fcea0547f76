"""The whole program recorded in one go, to check that parts put together are the program."""

from __future__ import annotations

from dataclasses import replace

import torch

from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import OpRecord, Phase
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.mtp import DraftModules
from tensor_cast.layers.program import DraftProgram, RankProgram
from tensor_cast.tracer.recorder import Recorder
from tensor_cast.tracer.trace import ModelTracer, bracket, skipping


def trace_whole(tracer: ModelTracer, layout: Layout, *, fold: bool = True) -> tuple[OpRecord, ...]:
    """Every op of the cut model; each layer kind once, or every layer when not ``fold``.

    ``repeat`` of the ops inside layers counts the layers of the kind.
    """
    anatomy, inputs = tracer.anatomy, tracer.inputs
    groups = tracer.groups if fold else {i: (i,) for i in range(len(anatomy.layers))}
    with torch.inference_mode(), inputs.space.mode:
        tuples = [False]
        program = RankProgram(anatomy, context_of(layout), skipping(anatomy, groups, tuples))
        step, recorder = _prepare(tracer, program, layout)
        for index in groups:
            bracket(program.model.get_submodule(anatomy.layer_path(index)), index, recorder, tuples)
        with recorder.recording():
            program(inputs.ids(), step, last_only=layout.phase is Phase.PREFILL)
    repeat, ops = 1, []
    for event in recorder.events:
        if isinstance(event, OpRecord):
            ops.append(replace(event, repeat=repeat))
        else:
            repeat = len(groups[event.what[1]]) if event.what[0] == "begin" else 1
    return tuple(ops)


def trace_whole_draft(tracer: ModelTracer, layout: Layout, *, reuse: bool = False) -> tuple[OpRecord, ...]:
    """Every op of one pass of the cut draft module over the step's tokens.

    ``reuse``: its sparse attention reads what an earlier pass chose.
    """
    with torch.inference_mode(), tracer.inputs.space.mode:
        modules = DraftModules.like(tracer.anatomy, tracer.inputs.dtype)
        program = DraftProgram(tracer.anatomy, context_of(layout), modules)
        step, recorder = _prepare(tracer, program, layout)
        with recorder.recording():
            choice = tracer.inputs.choice(tracer.config.index_topk) if reuse else None
            program.draft(tracer.inputs.ids(), tracer.inputs.hidden(), step, choice)
    return tuple(event for event in recorder.events if isinstance(event, OpRecord))


def context_of(layout: Layout) -> ParallelContext:
    """The first rank of a layout."""
    parallel = layout.parallel
    return ParallelContext(
        tp=parallel.tensor_parallel_size,
        dcp=layout.dcp,
        dp=parallel.data_parallel_size,
        ep=parallel.expert_parallel_size,
        moe_dp=parallel.moe_data_parallel_size,
        dcp_semantics=layout.dcp_semantics,
        interleave=parallel.cp_kv_cache_interleave_size,
    )


def _prepare(tracer: ModelTracer, program: RankProgram, layout: Layout) -> tuple[Step, Recorder]:
    step = tracer.inputs.step(layout.phase, layout.block_size, program.ctx, program.model)
    return step, tracer.inputs.recorder(program.model, step, program.ctx)
