"""Weights and activations of a pipeline stage, from the traces of the whole model.

A stage holds the parameters of its layers; the first one also the embedding; the last one the final norm, the head and
the draft module. Tables that two ends need (a tied head, the draft module's embedding) are shared on one stage and held
twice over several. Source: vLLM 0.30 ``models/llama.py``, ``gpu/spec_decode/eagle/utils.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tensor_cast.ir.expr import Num
from tensor_cast.ir.record import Segment, Trace
from tensor_cast.performance_model.memo import Memo
from tensor_cast.performance_model.memory import activation_peak_bytes, resident_bytes
from tensor_cast.quant import QuantConfig

__all__ = ["ModelWeights", "StageActivations", "model_weights"]

#: What an indexer's parameters have in their names.
_INDEXER = ".indexer."


@dataclass(frozen=True)
class ModelWeights:
    """Bytes of the parameters on one rank, by where they stand.

    Args:
        layers: of each decoder layer, draft layers counted on.
        num_layers: decoder layers, draft layers left out.
        first: what stands before the layers (embedding).
        last: what stands after them (norm, head, the draft module's own parameters).
        copies: what the last stage holds once more when it is not the first.
        indexer: of the indexer of one layer; 0 without sparse attention.
    """

    layers: tuple[int, ...]
    num_layers: int
    first: int
    last: int
    copies: int
    indexer: int

    def of(self, start: int, end: int, *, extra_indexers: int = 0) -> int:
        """Bytes of the stage with decoder layers ``start <= i < end``.

        Args:
            start: its first layer; 0 makes it the first stage.
            end: its end; the number of decoder layers makes it the last stage.
            extra_indexers: layers of it that get an indexer they would not have.
        """
        last = end == self.num_layers
        total = sum(self.layers[start : len(self.layers) if last else end]) + extra_indexers * self.indexer
        if start == 0:
            total += self.first
        if last:
            total += self.last + (self.copies if start > 0 else 0)
        return total


_WEIGHTS: Memo[ModelWeights] = Memo(1024)


def model_weights(trace: Trace, quant: QuantConfig, num_layers: int) -> ModelWeights:
    """The weights of ``trace``'s model on one rank; remembered, as many layouts share their parts.

    Args:
        trace: of the whole model; with draft tokens also the draft module's.
        quant: how parameters are stored.
        num_layers: decoder layers of the model.
    """
    key = (tuple((id(segment.part), segment.layers) for segment in trace.segments), quant, num_layers)
    return _WEIGHTS.get(key, trace.segments, lambda: _count(trace, quant, num_layers))


def _count(trace: Trace, quant: QuantConfig, num_layers: int) -> ModelWeights:
    by_layer: Counter[int] = Counter()
    ends = [0, 0]
    copies = indexer = 0
    seen: set[tuple[str, int | None]] = set()
    after_layers = False
    for segment in trace.segments:
        after_layers = after_layers or bool(segment.layers)
        for param in segment.part.params:
            nbytes = resident_bytes(param, quant)
            if segment.layers:
                for layer in segment.layers:
                    if (param.name, layer) not in seen:
                        seen.add((param.name, layer))
                        by_layer[layer] += nbytes
                continue
            if param.tied_to and (param.name, None) not in seen:
                copies += resident_bytes(replace(param, tied_to=""), quant)
            if (param.name, None) not in seen:
                seen.add((param.name, None))
                ends[after_layers] += nbytes
            elif after_layers and segment.part.key.startswith("embed/") and (param.name, -1) not in seen:
                seen.add((param.name, -1))  # the draft module embeds tokens on the last stage
                copies += nbytes
        if any(_INDEXER in param.name for param in segment.part.params):
            indexer = sum(resident_bytes(p, quant) for p in segment.part.params if _INDEXER in p.name)
    count = max(num_layers, *(layer + 1 for layer in by_layer)) if by_layer else num_layers
    return ModelWeights(tuple(by_layer[i] for i in range(count)), num_layers, ends[0], ends[1], copies, indexer)


@dataclass
class StageActivations:
    """Peak of the transient memory of each stage in one kind of step.

    Args:
        trace: of the whole model, as it runs (quantised, fused).
        num_layers: decoder layers of the model.
        env: ``B``, ``Q``, ``S`` of the step.
    """

    trace: Trace
    num_layers: int
    env: Mapping[str, Num]
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def peak(self, start: int, end: int) -> int:
        """Bytes of the stage with decoder layers ``start <= i < end``. Stages of the same parts share one answer."""
        chosen = tuple(i for i, segment in enumerate(self.trace.segments) if self._runs(i, segment, start, end))
        if chosen not in self._known:
            segments = tuple(self.trace.segments[i] for i in chosen)
            self._known[chosen] = int(activation_peak_bytes(replace(self.trace, segments=segments), self.env))
        return self._known[chosen]

    def _runs(self, index: int, segment: Segment, start: int, end: int) -> bool:
        if not segment.layers:
            return end == self.num_layers if index > self._first_layers else start == 0
        if segment.layers[0] >= self.num_layers:
            return end == self.num_layers
        return any(start <= layer < end for layer in segment.layers)

    @property
    def _first_layers(self) -> int:
        return next(i for i, segment in enumerate(self.trace.segments) if segment.layers)
