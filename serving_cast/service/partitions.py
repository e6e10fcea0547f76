"""Which partitions a search with ``--pp-layer-partition auto`` looks at for one layout.

A batch size has one partition whose slowest stage is fastest, and the memory of the device one that leaves most room
for KV; both are found exactly by the minimax search of :mod:`tensor_cast.pipeline_partition`. The first changes little
with the batch size, so it is asked at a few sizes of the grid, and every answer competes in the search.

Where sparse attention shares top-k indices, a stage whose first layers lack them costs more: those layers run an
indexer, or the indices come in over the wire. What each layer and stage then costs is read off a layout in which all
are helped, what it costs otherwise off one in which none is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from serving_cast.config import ParallelConfig
from serving_cast.service.layout_costs import Grid, TracedCosts, step_parts
from serving_cast.service.staged_costs import StagedCosts, build_staged
from serving_cast.service.steady_state import AggregatedGrid
from serving_cast.setting import Setting
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.engine.kv_cache import indexer_layers
from tensor_cast.engine.kv_groups import CacheGroup
from tensor_cast.ir.expr import Num
from tensor_cast.ir.index_sharing import Handover, hand_over_all
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase
from tensor_cast.performance_model.memory import resident_bytes
from tensor_cast.pipeline_partition import Partition, best_partition, default_partition, stage_ranges

__all__ = ["candidates"]

#: Batch sizes of the grid that are asked for their best partition: the ends and some between.
_SAMPLES = 5

Array = NDArray[np.float64]
Samples = NDArray[np.int64]

#: Some amount of a stage that runs layers ``start <= i < end``, from (stage, start, end).
_Amount = Callable[[int, int, int], float]


def candidates(
    setting: Setting,
    library: TraceLibrary,
    parallel: ParallelConfig,
    layouts: Mapping[Phase, Layout],
    grid: Grid,
) -> list[Partition]:
    """Partitions that may be the best one of ``parallel``; the engine's own is among them if it is safe.

    Raises:
        UnsupportedModelError: a layer is to get an indexer that cannot be known.
    """
    count, stages = setting.model.num_hidden_layers, parallel.pp_size
    default = default_partition(count, stages)
    writers = _writers(setting)
    allowed = [setting.config.dsa_split is not None or writers[layer] == layer for layer in range(count)]
    found: dict[Partition, None] = {}
    if all(allowed[r.start] for r in stage_ranges(default)):
        found[default] = None

    def build(handover: Handover) -> StagedCosts:
        return build_staged(setting, library, replace(parallel, pp_layer_partition=default), layouts, handover)

    def add(amount: _Amount) -> None:
        best, _ = best_partition(
            count, stages, lambda stage, start, end: amount(stage, start, end) if allowed[start] else inf
        )
        if best is not None:
            found[best] = None

    helping = hand_over_all(setting.model, default, setting.config.dsa_split)
    plain = build(Handover())
    helped = build(helping) if helping != Handover() else plain

    def amounts(pieces: Callable[[StagedCosts], list[_Pieces]]) -> list[_Amount]:
        unhelped = pieces(plain)
        others = unhelped if helped is plain else pieces(helped)
        return [_either(*both, writers) for both in zip(unhelped, others, strict=True)]

    samples = np.unique(np.geomspace(1, len(grid.batches), _SAMPLES).astype(int)) - 1
    for seconds in amounts(partial(_seconds, grid=grid, samples=samples)):
        add(seconds)
    (memory,) = amounts(lambda costs: [_memory(costs)])
    pages = _pages(plain, helped, writers)
    # Negated number of KV blocks that a stage has room for.
    add(lambda *stage: (memory(*stage) - setting.available_bytes) / pages(*stage))
    return list(found) or [default]


def _writers(setting: Setting) -> list[int]:
    """For each layer the first one from there on that computes top-k indices; the layer itself without sharing."""
    count = setting.model.num_hidden_layers
    own = indexer_layers(setting.model) or (True,) * count
    following = list(accumulate(reversed(range(count)), lambda after, i: i if own[i] else after, initial=count))
    return following[:0:-1]


@dataclass(frozen=True)
class _Pieces:
    """What an amount is made of: that of each decoder layer, whatever stage it is on, and what else each stage has."""

    layers: Mapping[int, float]
    ends: Sequence[float]

    @cached_property
    def _sums(self) -> list[float]:
        return [0.0, *accumulate(self.layers[layer] for layer in sorted(self.layers))]

    def between(self, start: int, end: int) -> float:
        """Sum over layers ``start <= i < end``."""
        return self._sums[end] - self._sums[start]


def _either(plain: _Pieces, helped: _Pieces, writers: Sequence[int]) -> _Amount:
    """The amount of a stage whose layers before its first writer of indices are helped."""

    def amount(stage: int, start: int, end: int) -> float:
        written = min(writers[start], end)
        rest = (helped if written > start else plain).ends[stage]
        return helped.between(start, written) + plain.between(written, end) + rest

    return amount


def _seconds(costs: StagedCosts, grid: Grid, samples: Samples) -> list[_Pieces]:
    """Seconds of the mean step at each of some batch sizes, given by their places in the grid."""
    layers: dict[int, Array] = {}
    ends = []
    for stage, hop in zip(costs.stages, _hops(costs, grid, samples), strict=True):
        own, rest = _stage_seconds(stage, grid, samples)
        layers |= own
        ends.append(rest + hop)
    return [
        _Pieces({layer: float(seconds[i]) for layer, seconds in layers.items()}, [float(end[i]) for end in ends])
        for i in range(len(samples))
    ]


def _stage_seconds(costs: TracedCosts, grid: Grid, samples: Samples) -> tuple[dict[int, Array], Array]:
    """(seconds by decoder layer, seconds of everything else) of a stage, with one entry per batch size."""
    layers: dict[int, Array] = {}
    rest = np.zeros(len(samples))
    count = costs.setting.model.num_hidden_layers
    for estimator, env, scopes, weight in step_parts(grid, costs.decode, costs.prefill):
        here = {name: _at(value, grid, samples) for name, value in env.items()}
        share = _at(weight, grid, samples)
        for segment, seconds in estimator.segment_seconds(here, scopes):
            own = [layer for layer in segment.layers if layer < count]
            for layer in own:
                layers[layer] = layers.get(layer, 0.0) + share * seconds
            if not own:
                rest = rest + share * seconds * segment.repeat
    return layers, rest


def _hops(costs: StagedCosts, grid: Grid, samples: Samples) -> list[Array]:
    """Seconds of the transfer that each stage waits for."""
    times = costs.pipe.calm_times(grid) if isinstance(grid, AggregatedGrid) else costs.pipe.times(grid)
    return [_at(0.0 if times.overlap else hop, grid, samples) for hop in times.hops]


def _at(values: Num, grid: Grid, samples: Samples) -> Array:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), grid.batches.shape)[samples]


def _memory(costs: StagedCosts) -> _Pieces:
    """Bytes of a rank without its KV cache, whose null block counts as cache."""
    setting = costs.setting
    count = setting.model.num_hidden_layers
    layers: dict[int, float] = {}
    ends = []
    for stage in costs.stages:
        own = {layer: nbytes for layer, nbytes in _layer_weights(stage).items() if layer < count}
        layers |= own
        outside = stage.overhead_bytes - stage.kv.block_bytes
        ends.append(stage.weight_bytes - sum(own.values()) + stage.profile_bytes + outside)
    return _Pieces(layers, ends)


def _layer_weights(costs: TracedCosts) -> dict[int, int]:
    """Bytes of the weights of each layer of a stage."""
    main = costs.decode or costs.prefill
    out: dict[int, int] = {}
    seen: set[tuple[str, int]] = set()
    assert main is not None
    for segment in main.trace.segments:
        for param in segment.part.params:
            for layer in segment.layers:
                if (param.name, layer) not in seen:
                    seen.add((param.name, layer))
                    out[layer] = out.get(layer, 0) + resident_bytes(param, costs.setting.quant)
    return out


def _pages(plain: StagedCosts, helped: StagedCosts, writers: Sequence[int]) -> _Amount:
    """Bytes of one block of KV cache: of the widest group of a stage. Draft layers are the last stage's.

    Groups are formed over all stages, so they are those of any partition; helping adds to the pages of a group.
    """
    count, stages = plain.setting.model.num_hidden_layers, plain.parallel.pp_size
    total = count + plain.setting.model.num_nextn_predict_layers
    unhelped, others = ([_page_sums(group, total) for group in costs.stages[0].kv.groups] for costs in (plain, helped))

    def amount(stage: int, start: int, end: int) -> float:
        written = min(writers[start], end)
        stop = total if stage == stages - 1 else end
        return max(
            own[stop] - own[written] + more[written] - more[start] for own, more in zip(unhelped, others, strict=True)
        )

    return amount


def _page_sums(group: CacheGroup, layers: int) -> list[int]:
    """Bytes of the pages of the group's layers below each layer, up to ``layers``."""
    own = [0] * layers
    for page in group.pages:
        own[page.layer] += page.nbytes
    return list(accumulate(own, initial=0))
