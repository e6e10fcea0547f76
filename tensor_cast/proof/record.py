"""Recording the program while it executes, and the list of ops that the symbolic trace says it should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch

from tensor_cast.ir.program import Layout, compose
from tensor_cast.ir.record import Kind, OpRecord, Part, Phase, Scope, Segment, TensorSpec
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.program import Anatomy, RankProgram
from tensor_cast.model_config import ModelConfig
from tensor_cast.ops.kv_layout import blocks_per_request, slot_mapping
from tensor_cast.proof.cell import Cell
from tensor_cast.tracer.inputs import FakeInputs
from tensor_cast.tracer.trace import ModelTracer

#: Copies that only change how a tensor lies in memory; with a size of 1 there may be nothing to change.
_LAYOUT_COPY = "aten.clone"


class _PlainSizes:
    """What :class:`SizeSpace` is for symbols: sizes of real tensors are what they are."""

    dim = staticmethod(int)

    def check(self) -> None:
        """Nothing can be fixed that is not open."""


def step_sizes(cell: Cell, phase: Phase) -> dict[str, int]:
    """B, Q and S of the step that is recorded: all prompts at once, or the last decode step of the longest request."""
    if phase is Phase.PREFILL:
        longest = max(cell.prompts)
        return {"B": len(cell.prompts), "Q": longest, "S": longest}
    return {"B": len(cell.prompts), "Q": cell.query, "S": cell.longest}


def record_phases(
    anatomy: Anatomy, ctx: ParallelContext, cell: Cell, config: ModelConfig
) -> dict[Phase, tuple[OpRecord, ...]]:
    """Run one prefill and one decode step; rank 0 writes down its ops. All ranks must take part."""
    return {phase: _record(anatomy, ctx, cell, config, phase) for phase in Phase}


def _record(
    anatomy: Anatomy, ctx: ParallelContext, cell: Cell, config: ModelConfig, phase: Phase
) -> tuple[OpRecord, ...]:
    if phase is Phase.PREFILL and ctx.dcp > 1:
        ctx = replace(ctx, dcp=1)
    size = step_sizes(cell, phase)
    batch, query, context = size["B"], size["Q"], size["S"]
    program = RankProgram(anatomy, ctx)
    blocks = blocks_per_request(context, cell.block_size, ctx.dcp)
    table = torch.arange(batch * blocks).view(batch, blocks)
    positions = torch.arange(context - query, context).expand(batch, -1).contiguous()
    slots = slot_mapping(
        positions, table, block_size=cell.block_size, dcp=ctx.dcp, rank=ctx.dcp_rank, interleave=ctx.interleave
    )
    rows = table.to(torch.int32)
    if ctx.dcp > 1:
        rows = rows.repeat_interleave(query, 0)
    caches = program.caches(batch * blocks, cell.block_size, getattr(torch, config.dtype))
    step = Step(phase, positions, context, rows, slots, caches)
    recorder = FakeInputs(_PlainSizes(), getattr(torch, config.dtype), config.hidden_size).recorder(
        program.model, step, ctx
    )
    ids = torch.randint(3, config.vocab_size, (batch, query), generator=torch.Generator().manual_seed(1))
    with recorder.recording() if ctx.rank == 0 else nullcontext():
        program(ids, step, last_only=phase is Phase.PREFILL)
    return tuple(event for event in recorder.events if isinstance(event, OpRecord))


# -- the trace ------------------------------------------------------------------------------------------------------


class Tracing:
    """Symbolic traces of one model, composed of parts as the product composes them."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tracer = ModelTracer(config)
        self._parts: dict[str, Part] = {part.key: part for part in self._tracer.skeleton().fixed}

    def ops(self, cell: Cell, phase: Phase) -> list[OpRecord]:
        """Ops of one step at the sizes of :func:`step_sizes`, layer after layer."""
        layout = Layout(cell.parallel, phase, cell.semantics, cell.block_size)
        skeleton = self._tracer.skeleton()
        for request, _, _ in skeleton.plan(layout):
            if request.key not in self._parts:
                self._parts[request.key] = self._tracer.part(request)
        trace = compose(self._config.model_id, skeleton, layout, self._parts)
        size = step_sizes(cell, phase)
        return [op.at(size) for op in unfolded(trace.segments)]


@lru_cache(maxsize=2)
def tracing(config: ModelConfig) -> Tracing:
    """:class:`Tracing` of a model; kept, since many cells in a row use the same one."""
    return Tracing(config)


def unfolded(segments: tuple[Segment, ...]) -> Iterator[OpRecord]:
    """Ops in the order in which they run: the segments of layer 0, of layer 1 ..., each with its own module paths."""
    inside = [number for number, segment in enumerate(segments) if segment.layers]
    first, last = (inside[0], inside[-1] + 1) if inside else (len(segments), len(segments))
    for segment in segments[:first]:
        yield from segment.ops()
    layers = sorted({layer for segment in segments[first:last] for layer in segment.layers})
    for layer in layers:
        for segment in segments[first:last]:
            if layer in segment.layers:
                yield from Segment(segment.part, (layer,), segment.query_len).ops()
    for segment in segments[last:]:
        yield from segment.ops()


def first_difference(executed: tuple[OpRecord, ...], traced: list[OpRecord], size: dict[str, int]) -> str | None:
    """Where the two lists of ops part, in a sentence; None if they are equal.

    Compared are names, modules, shapes, types and kinds of all operands, attributes, scope, axis and group size of
    collectives. Views are in neither list. Where a size of the step is 1, copies that only change the layout are left
    out of both: torch makes none when there is nothing to move.
    """
    keep_copies = size["B"] > 1 and size["Q"] > 1
    lists = [[_essence(op) for op in ops if keep_copies or op.name != _LAYOUT_COPY] for ops in (executed, traced)]
    for number, (ours, theirs) in enumerate(zip_longest(*lists)):
        if ours != theirs:
            return f"op {number}: executed {_readable(ours)}, traced {_readable(theirs)}"
    return None


@dataclass(frozen=True)
class _Essence:
    """What must agree of an op: everything but the numbers of values."""

    name: str
    module: str
    tensors: tuple[tuple[tuple[int, ...], str, Kind], ...]
    attrs: tuple[tuple[str, Any], ...]
    axis: str | None
    group_size: int | None
    scope: Scope


def _essence(op: OpRecord) -> _Essence:
    def plain(spec: TensorSpec) -> tuple[tuple[int, ...], str, Kind]:
        return tuple(map(int, spec.shape)), spec.dtype, spec.kind

    tensors = tuple(map(plain, (*op.inputs, *op.outputs)))
    return _Essence(op.name, op.module, tensors, op.attrs, op.axis, op.group_size, op.scope)


def _readable(essence: _Essence | None) -> str:
    if essence is None:
        return "nothing"
    shapes = ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in essence.tensors)
    words = f"{essence.name} in {essence.module or 'the model'} on {shapes}"
    if essence.attrs:
        words += " with " + ", ".join(f"{name}={value}" for name, value in essence.attrs)
    return words + (f" over {essence.axis} of {essence.group_size}" if essence.axis else "")
