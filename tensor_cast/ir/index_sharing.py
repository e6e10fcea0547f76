"""Top-k indices of sparse attention that layers share, where a stage border parts a layer from the one that wrote them.

Engines pass hidden states between stages, not indices. What happens instead is :class:`DsaSplit`'s question; a
:class:`Handover` is its answer for one partition, and :func:`with_own_indexers` the trace of a model whose layers were
given indexers. Source: vLLM 0.30 ``models/deepseek_v2.py`` (which layers own an indexer).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tensor_cast.errors import UnsupportedModelError
from tensor_cast.ir.expr import symbol
from tensor_cast.ir.record import Kind, ParamSpec, Part, Segment, TensorSpec, Trace, at_layer
from tensor_cast.model_config import AttentionKind, ModelConfig
from tensor_cast.pipeline_partition import DsaSplit, stage_ranges, unsafe_by_stage

__all__ = ["Handover", "hand_over", "hand_over_all", "with_own_indexers"]

#: What an indexer's parameters have in their names.
_INDEXER = ".indexer."


@dataclass(frozen=True)
class Handover:
    """How layers get top-k indices that no layer before them on their stage computes.

    Args:
        own_indexers: layers that are given an indexer.
        sent: tensors, whole, that the given stages receive beside hidden states and residual.
        unsafe: layers that read indices which nobody wrote.
    """

    own_indexers: tuple[int, ...] = ()
    sent: Mapping[int, tuple[TensorSpec, ...]] = field(default_factory=dict)
    unsafe: tuple[int, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of any result must know, one sentence each."""
        found = []
        if self.unsafe:
            layers = ", ".join(map(str, self.unsafe))
            found.append(f"UNSAFE: layers {layers} read top-k indices never written on their stage; outputs are wrong")
        if self.own_indexers:
            found.append(f"layers {', '.join(map(str, self.own_indexers))} get an indexer of their own")
        return tuple(found)


def hand_over(model: ModelConfig, partition: Sequence[int], split: DsaSplit | None) -> Handover:
    """What ``split`` does about ``partition``; nothing where the partition is safe, or the model shares no indices."""
    by_stage = unsafe_by_stage(partition, model.indexer_layers if model.attention is AttentionKind.DSA else ())
    lacking = tuple(layer for layers in by_stage for layer in layers)
    if split is DsaSplit.SELF_COMPUTE:
        return Handover(own_indexers=lacking)
    if split is DsaSplit.SEND_INDICES:
        return Handover(sent={stage: (_indices(model),) for stage, layers in enumerate(by_stage) if layers})
    return Handover(unsafe=lacking)


def hand_over_all(model: ModelConfig, partition: Sequence[int], split: DsaSplit | None) -> Handover:
    """As :func:`hand_over` if every layer that shares indices, and every stage but the first, had to be helped.

    What a layer or a stage then costs more is what any other partition adds where it parts layers.
    """
    if model.attention is not AttentionKind.DSA:
        return Handover()
    if split is DsaSplit.SELF_COMPUTE:
        return Handover(own_indexers=tuple(i for i, own in enumerate(model.indexer_layers) if not own))
    if split is DsaSplit.SEND_INDICES:
        return Handover(sent=dict.fromkeys(range(1, len(stage_ranges(partition))), (_indices(model),)))
    return Handover()


def _indices(model: ModelConfig) -> TensorSpec:
    """Rows are as wide as the choice, however short the context: engines' buffers are."""
    return TensorSpec((symbol("B"), symbol("Q"), model.index_topk), "int32", Kind.INDEX)


def with_own_indexers(trace: Trace, layers: Collection[int]) -> Trace:
    """The trace of the model in which ``layers`` compute the top-k indices that they would reuse.

    Their attention becomes that of a layer which is alike but for the indexer. Layers that compute indices anyway are
    left as they are.

    Raises:
        UnsupportedModelError: no layer of the model is alike and has an indexer.
    """
    if not layers:
        return trace
    segments: list[Segment] = []
    for segment in trace.segments:
        given = tuple(layer for layer in segment.layers if layer in layers) if _reads_indices(segment.part) else ()
        kept = tuple(layer for layer in segment.layers if layer not in given)
        if kept or not segment.layers:
            segments.append(replace(segment, layers=kept) if given else segment)
        if given:
            # Last, so that what follows attention follows the larger of the two.
            segments.append(replace(segment, part=_twin(trace, segment), layers=given))
    return replace(trace, segments=tuple(segments))


def _reads_indices(part: Part) -> bool:
    """Whether the part attends to tokens that another layer chose."""
    return any(op.name == "tensor_cast.sparse_mla_attention" for op in part.ops) and not _has_indexer(part)


def _has_indexer(part: Part) -> bool:
    return any(op.name == "tensor_cast.indexer_scores" for op in part.ops)


def _twin(trace: Trace, segment: Segment) -> Part:
    """The attention with an indexer that is else like the segment's; best of a layer with the same feed-forward block.

    Parts that are the same work may differ in how a quantised checkpoint stores them, which goes by kinds of layers.
    """
    found = [
        other
        for other in trace.segments
        if other.layers and _has_indexer(other.part) and _likeness(other.part) == _likeness(segment.part)
    ]
    if not found:
        raise UnsupportedModelError(
            f"{trace.model_id}: --dsa-split self-compute gives layer {segment.layers[0]} an indexer, but no layer with "
            "attention like that one's has an indexer to go by; choose a partition whose stages start with layers that "
            "compute their own top-k indices, or --dsa-split send-indices"
        )
    return max(found, key=lambda other: len(_beside(trace, other) & _beside(trace, segment))).part


def _likeness(part: Part) -> tuple[object, ...]:
    """What parts have in common that are alike but for layer and indexer."""
    layout = part.key.split("/")[2:]  # phase, tp, block size, dcp
    return (*layout, *(_unnumbered(param) for param in part.params if _INDEXER not in param.name))


def _unnumbered(param: ParamSpec) -> ParamSpec:
    return replace(param, name=at_layer(param.name, (0,)))


def _beside(trace: Trace, segment: Segment) -> set[str]:
    """Keys of the other parts that the segment's layers run."""
    return {other.part.key for other in trace.segments if set(other.layers) & set(segment.layers)}
