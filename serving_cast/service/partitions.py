"""Which partitions a search with ``--pp-layer-partition auto`` looks at for one layout.

A batch size has one partition whose slowest stage is fastest, and the memory of the device one that leaves most room
for KV; both are found exactly by the minimax search of :mod:`tensor_cast.pipeline_partition`. The first changes little
with the batch size, so it is asked at a few sizes of the grid, and every answer competes in the search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import inf

import numpy as np

from serving_cast.config import ParallelConfig
from serving_cast.service.layout_costs import Grid, Setting, TracedCosts, step_parts
from serving_cast.service.staged_costs import build_staged
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.engine.kv_cache import cache_layers, indexer_layers
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase
from tensor_cast.performance_model.memory import resident_bytes
from tensor_cast.pipeline_partition import Partition, best_partition, default_partition, stage_ranges

__all__ = ["candidates", "layer_costs"]

#: Batch sizes of the grid that are asked for their best partition: the ends and some between.
_SAMPLES = 5


def candidates(
    setting: Setting,
    library: TraceLibrary,
    parallel: ParallelConfig,
    layouts: Mapping[Phase, Layout],
    grid: Grid,
) -> list[Partition]:
    """Partitions that may be the best one of ``parallel``; the engine's own is among them if it is safe."""
    count, stages = setting.model.num_hidden_layers, parallel.pp_size
    default = default_partition(count, stages)
    costs = build_staged(setting, library, _with(parallel, default), layouts)
    full = indexer_layers(setting.model)
    allowed = [not full or setting.config.dsa_split is not None or full[layer] for layer in range(count)]
    found: dict[Partition, None] = {}
    if all(allowed[r.start] for r in stage_ranges(default)):
        found[default] = None
    last = len(grid.batches) - 1
    for index in sorted({int(i) for i in np.geomspace(1, last + 1, _SAMPLES) - 1}):
        pieces = [_seconds(stage, grid, index) for stage in costs.stages]
        hops = _hops(costs.pipe.times, costs.pipe.calm_times, grid, index)
        ends = [rest + hop for (_, rest), hop in zip(pieces, hops, strict=True)]
        _add(found, best_partition(count, stages, _stage_cost(layer_costs([by for by, _ in pieces]), ends, allowed)))
    _add(found, best_partition(count, stages, _memory_cost(setting, parallel, costs.stages, default, allowed)))
    return list(found) or [default]


def _with(parallel: ParallelConfig, partition: Partition) -> ParallelConfig:
    from dataclasses import replace

    return replace(parallel, pp_layer_partition=partition)


def _add(found: dict[Partition, None], result: tuple[Partition, float] | tuple[None, float]) -> None:
    if result[0] is not None:
        found[result[0]] = None


def layer_costs(by_stage: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """What each layer costs, whatever stage it is on; draft layers are the last stage's own affair."""
    return {layer: value for values in by_stage for layer, value in values.items()}


def _seconds(costs: TracedCosts, grid: Grid, index: int) -> tuple[dict[int, float], float]:
    """(seconds by decoder layer, seconds of everything else) of a stage's mean step at one batch size."""
    layers: dict[int, float] = {}
    rest = 0.0
    count = costs.setting.model.num_hidden_layers
    for estimator, env, scopes, weight in step_parts(grid, costs.decode, costs.prefill):
        share = float(np.broadcast_to(weight, grid.batches.shape)[index])
        here = {name: np.broadcast_to(value, grid.batches.shape)[index] for name, value in env.items()}
        for segment, seconds in estimator.segment_seconds(here, scopes):
            own = [layer for layer in segment.layers if layer < count]
            for layer in own:
                layers[layer] = layers.get(layer, 0.0) + share * float(seconds)
            if not own:
                rest += share * float(seconds) * segment.repeat
    return layers, rest


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


def _hops(steady: Callable[..., object], calm: Callable[..., object], grid: Grid, index: int) -> list[float]:
    from serving_cast.pipeline import StageTimes
    from serving_cast.service.steady_state import AggregatedGrid

    times = calm(grid) if isinstance(grid, AggregatedGrid) else steady(grid)
    assert isinstance(times, StageTimes)
    return [0.0 if times.overlap else float(np.broadcast_to(hop, grid.batches.shape)[index]) for hop in times.hops]


def _stage_cost(
    layers: Mapping[int, float], ends: Sequence[float], allowed: Sequence[bool]
) -> Callable[[int, int, int], float]:
    sums = [0.0, *accumulate(layers[layer] for layer in sorted(layers))]

    def cost(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + ends[stage] if allowed[start] else inf

    return cost


def _memory_cost(
    setting: Setting,
    parallel: ParallelConfig,
    stages: Sequence[TracedCosts],
    partition: Partition,
    allowed: Sequence[bool],
) -> Callable[[int, int, int], float]:
    """Negated number of KV blocks that a stage has room for."""
    count = setting.model.num_hidden_layers
    weights: dict[int, float] = {}
    fixed: list[float] = []
    for stage in stages:
        by_layer = {layer: nbytes for layer, nbytes in _layer_weights(stage).items() if layer < count}
        weights |= by_layer
        query = min(setting.workload.input_length, setting.budget)
        env = {"B": setting.budget / query, "Q": float(query), "S": float(setting.workload.input_length)}
        fixed.append(stage.weight_bytes - sum(by_layer.values()) + stage.peak_bytes(env) + stage.overhead_bytes)
    pages = dict.fromkeys(range(count), 0.0)
    drafts = 0.0
    for cache in cache_layers(
        setting.model,
        parallel.to_tensor_cast(),
        block_size=setting.block_size,
        kv_dtype=setting.quant.kv_dtype,
        dcp_semantics=setting.dcp_semantics,
        num_mtp_tokens=setting.workload.num_mtp_tokens,
    ):
        if cache.layer < count:
            pages[cache.layer] += cache.spec.page_bytes
        else:
            drafts += cache.spec.page_bytes
    weight_sums = [0.0, *accumulate(weights[layer] for layer in range(count))]
    page_sums = [0.0, *accumulate(pages[layer] for layer in range(count))]

    def cost(stage: int, start: int, end: int) -> float:
        if not allowed[start]:
            return inf
        page = page_sums[end] - page_sums[start] + (drafts if stage == len(partition) - 1 else 0.0)
        room = setting.available_bytes - fixed[stage] - (weight_sums[end] - weight_sums[start])
        return -room / page

    return cost
