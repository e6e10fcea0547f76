"""Pipeline stages: a trace of the whole model restricted to the layers of each stage, and what crosses between them.

A stage runs its layers; the first one also the embedding, the last one the final norm, the head, sampling and every
pass of the draft module. What stands before the layers without touching hidden states (rotary tables) runs on each.

Between two stages go ``hidden_states`` and ``residual``, each [B, Q, H] in the model's dtype. Every TP rank of a stage
holds both whole, so an engine sends 1/tp of each from rank to rank and puts them together with an all_gather over tp in
the receiving stage. After sampling, the last stage broadcasts the sampled ids, their counts and the drafts, so that the
first one can embed the next step's tokens: ``n_req * (8(1+k) + 8 + 8k)`` bytes.
Source: vLLM 0.30 ``distributed/parallel_state.py`` (send_tensor_dict), ``v1/worker/gpu/pp_utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from tensor_cast.ir.expr import Dim, symbol
from tensor_cast.ir.index_sharing import Handover, with_own_indexers
from tensor_cast.ir.record import Kind, OpRecord, Part, Scope, Segment, TensorSpec, Trace
from tensor_cast.pipeline_partition import check_partition, stage_ranges

__all__ = ["BROADCAST", "RECV", "WIRE_PREFIX", "boundary_specs", "split_wire", "stage_traces"]

#: Ops that cross stages. Sending is asynchronous and shows up in the receiving stage, which waits for it.
RECV = "tensor_cast.pp_recv"
BROADCAST = "tensor_cast.pp_broadcast"

#: Part keys of what crosses stages begin with this.
WIRE_PREFIX = "pp/"

#: Tensors of each boundary.
BOUNDARY_TENSORS = ("hidden_states", "residual")


def boundary_specs(hidden_size: int, dtype: str) -> tuple[TensorSpec, ...]:
    """The tensors that every boundary carries, whole: ``hidden_states`` and ``residual``, each [B, Q, H]."""
    shape: tuple[Dim, ...] = (symbol("B"), symbol("Q"), hidden_size)
    return (TensorSpec(shape, dtype),) * len(BOUNDARY_TENSORS)


def stage_traces(
    trace: Trace,
    partition: Sequence[int],
    *,
    hidden_size: int,
    dtype: str,
    tp: int,
    num_mtp_tokens: int = 0,
    whole_on_wire: bool = False,
    handover: Handover | None = None,
) -> tuple[Trace, ...]:
    """The trace of each stage.

    Args:
        trace: of the whole model.
        partition: layers of each stage, draft layers not counted; the draft module is on the last stage.
        hidden_size: H of the tensors at a boundary.
        dtype: of these tensors.
        tp: ranks of a stage that share the transfer.
        num_mtp_tokens: draft tokens that go back with the sampled ones.
        whole_on_wire: every rank sends all of both tensors, and nothing is gathered (what source 004 assumes).
        handover: what is done where a stage lacks the top-k indices that its first layers reuse; nothing by default.

    Raises:
        LegalityError: a stage without layers, or layers that do not add up to the trace's.
        UnsupportedModelError: a layer is to get an indexer that cannot be known.
    """
    count = _layer_count(trace)
    check_partition(partition, count, len(partition))
    stages = stage_ranges(partition)
    if len(stages) == 1:
        return (trace,)
    handover = handover or Handover()
    trace = with_own_indexers(trace, handover.own_indexers)
    specs = boundary_specs(hidden_size, dtype)
    out = []
    for index, own in enumerate(stages):
        last = index == len(stages) - 1
        segments = list(_own_segments(trace, own, count, hidden_size, last=last))
        if index > 0:
            received = (*specs, *handover.sent.get(index, ()))
            segments = [*_receive(received, index, len(stages), 1 if whole_on_wire else tp), *segments]
        if last:
            segments.append(Segment(_broadcast_part(len(stages), num_mtp_tokens)))
        segments = _untied(segments)
        layout = {**trace.layout, "pp": len(stages), "stage": index}
        out.append(replace(trace, segments=tuple(segments), layout=layout))
    return tuple(out)


def _layer_count(trace: Trace) -> int:
    """Layers of the model itself. A draft layer stands after the head, in segments that follow it."""
    count = 0
    for segment in trace.segments:
        if segment.part.key.startswith("head/"):
            break
        count = max(count, *(layer + 1 for layer in segment.layers), 0)
    return count


def split_wire(trace: Trace) -> tuple[Trace, Trace]:
    """(what a stage computes, what crosses its border); the all_gather of what was received is part of the former."""
    inside = tuple(s for s in trace.segments if not s.part.key.startswith(WIRE_PREFIX))
    wire = tuple(s for s in trace.segments if s.part.key.startswith(WIRE_PREFIX))
    return replace(trace, segments=inside), replace(trace, segments=wire)


def _own_segments(trace: Trace, own: range, count: int, hidden_size: int, *, last: bool) -> list[Segment]:
    """Segments of the stage with layers ``own``."""
    out: list[Segment] = []
    inside = after = False
    for segment in trace.segments:
        if segment.layers and min(segment.layers) < count:
            inside = True
            kept = tuple(layer for layer in segment.layers if layer in own)
            if kept:
                out.append(segment if len(kept) == len(segment.layers) else replace(segment, layers=kept))
            continue
        after = after or inside
        if after:
            if last:
                out.append(segment)
        elif own.start == 0:
            out.append(segment)
        elif segment.part.key.startswith("glue/"):
            part = _without_hidden(segment.part, hidden_size)
            if part.ops:
                out.append(replace(segment, part=part))
    return out


@lru_cache(maxsize=256)
def _without_hidden(part: Part, hidden_size: int) -> Part:
    """The part without the ops that follow from the embedding's output (a scale, a norm)."""
    touched = {
        ident
        for op in part.ops
        for ident, spec in zip(op.input_ids, op.inputs, strict=True)
        if ident in part.input_ids and spec.kind is Kind.ACTIVATION and spec.shape[-1:] == (hidden_size,)
    }
    kept: list[OpRecord] = []
    for op in part.ops:
        if touched.intersection(op.input_ids):
            touched.update(op.output_ids)
        else:
            kept.append(op)
    return part if len(kept) == len(part.ops) else replace(part, key=f"{part.key}.tables", ops=tuple(kept), params=())


def _untied(segments: list[Segment]) -> list[Segment]:
    """A parameter whose twin is on another stage takes room of its own."""
    here = {param.name for segment in segments for param in segment.part.params}
    return [
        replace(segment, part=_without_tie(segment.part))
        if any(param.tied_to and param.tied_to not in here for param in segment.part.params)
        else segment
        for segment in segments
    ]


@lru_cache(maxsize=256)
def _without_tie(part: Part) -> Part:
    return replace(part, key=f"{part.key}.own", params=tuple(replace(param, tied_to="") for param in part.params))


@lru_cache(maxsize=1024)
def _receive(specs: tuple[TensorSpec, ...], stage: int, stages: int, tp: int) -> tuple[Segment, ...]:
    """What stage ``stage`` receives: the transfer, and the gather that makes the tensors whole. Interned."""
    slices = tuple(_slice(spec, tp) for spec in specs)
    ids = tuple(range(1, len(specs) + 1))
    names = f"{stage}of{stages}/tp{tp}/" + ".".join(f"{spec.shape[-1]}{spec.dtype}" for spec in specs)
    recv = OpRecord(
        name=RECV,
        module="",
        inputs=slices,
        outputs=slices,
        input_ids=tuple(-i for i in ids),
        output_ids=ids,
        attrs=(("pair", (stage - 1, stage)),),
        axis="pp",
        group_size=stages,
    )
    transfer = Part(f"{WIRE_PREFIX}recv/{names}", (recv,), (), recv.input_ids, ids)
    gathers = tuple(
        OpRecord(
            name="_c10d_functional.all_gather_into_tensor",
            module="",
            inputs=(piece,),
            outputs=(spec,),
            input_ids=(ident,),
            output_ids=(ident + len(specs),),
            axis="tp",
            group_size=tp,
        )
        for piece, spec, ident in zip(slices, specs, ids, strict=True)
        if piece != spec
    )
    if not gathers:
        return (Segment(transfer),)
    made = tuple(i for op in gathers for i in op.output_ids)
    return Segment(transfer), Segment(Part(f"glue/pp.gather/{names}", gathers, (), ids, made))


def _slice(spec: TensorSpec, tp: int) -> TensorSpec:
    """1/tp of a tensor, or all of it where tp does not divide its last dimension."""
    width = spec.shape[-1]
    if tp == 1 or not isinstance(width, int) or width % tp:
        return spec
    return replace(spec, shape=(*spec.shape[:-1], width // tp))


@lru_cache(maxsize=256)
def _broadcast_part(stages: int, k: int) -> Part:
    """Sampled ids [B, 1+k], (sampled, rejected) counts [2, B] and drafts [B, k], from the last stage to the others."""
    requests = symbol("B")
    specs = [TensorSpec((requests, 1 + k), "int64", Kind.INDEX), TensorSpec((2, requests), "int32", Kind.INDEX)]
    if k:
        specs.append(TensorSpec((requests, k), "int64", Kind.INDEX))
    op = OpRecord(
        name=BROADCAST,
        module="",
        inputs=tuple(specs),
        outputs=tuple(specs),
        input_ids=tuple(range(1, len(specs) + 1)),
        output_ids=tuple(range(1, len(specs) + 1)),
        attrs=(("pair", (stages - 1, 0)),),
        axis="pp",
        group_size=stages,
        scope=Scope.SAMPLE,
    )
    return Part(f"{WIRE_PREFIX}broadcast/{stages}/k{k}", (op,), (), op.input_ids, ())
