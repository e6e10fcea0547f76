"""What one layout costs: the meeting point of traces, prices, memory and the serving maths.

:class:`TracedCosts` is the real thing. The search only asks for :class:`LayoutCosts`, so its tests bring their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from serving_cast.config import ParallelConfig
from serving_cast.kv_cache_manager import KVCacheManager
from serving_cast.service.chunk_gather import ChunkGather
from serving_cast.service.steady_state import AggregatedGrid, ContextGather, DecodeGrid, PrefillGrid, StepPricer
from serving_cast.setting import Setting
from tensor_cast.core.start_up import RankMemory, profile_layout
from tensor_cast.ir.expr import Num
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase, Scope
from tensor_cast.performance_model.analytic import Bound
from tensor_cast.performance_model.estimate import StepEstimator
from tensor_cast.performance_model.memory import activation_peak_bytes
from tensor_cast.pipeline_partition import Partition
from tensor_cast.units import GIB

if TYPE_CHECKING:
    from serving_cast.service.staged_costs import StagedCosts
    from tensor_cast.core.trace_library import TraceLibrary

__all__ = [
    "CostsFactory",
    "Grid",
    "LayoutCosts",
    "TracedCosts",
    "TracedCostsFactory",
    "bound_seconds",
    "rank_memory",
    "step_parts",
]

Array = NDArray[np.float64]
Grid = AggregatedGrid | DecodeGrid | PrefillGrid


class LayoutCosts(Protocol):
    """Prices and memory of one layout in the phases it runs."""

    @property
    def host_s(self) -> float:
        """Host time of a step that the device does not hide."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Weights on the fullest rank."""
        ...

    @property
    def overhead_bytes(self) -> float:
        """Memory that is neither weights, KV nor activations."""
        ...

    @property
    def coverage(self) -> float:
        """Priced share of the ops."""
        ...

    @property
    def decode(self) -> StepPricer | None:
        """Prices of a decode step."""
        ...

    @property
    def prefill(self) -> StepPricer | None:
        """Prices of a prefill step."""
        ...

    @property
    def gather(self) -> ContextGather | None:
        """What prefill chunks add under DCP."""
        ...

    def kv_bytes(self, tokens: int) -> int:
        """KV of one request of ``tokens`` tokens on one rank, as it is moved."""
        ...

    def pool_bytes(self, grid: Grid, batches: float = 1.0) -> Array:
        """KV of ``batches`` batches of each size of the grid on one rank, as the engine's pool holds it."""
        ...

    @property
    def longest_bytes(self) -> int:
        """Part of the KV pool of one rank that the longest request takes."""
        ...

    def activation_bytes(self, grid: Grid) -> Array:
        """Activation peak for each batch size of the grid."""
        ...

    def bound(self, grid: Grid, index: int) -> str:
        """The resource that most of the mean step waits for, at one batch size."""
        ...


class CostsFactory(Protocol):
    """Makes the costs of layouts."""

    def prepare(self, wanted: Sequence[tuple[ParallelConfig, tuple[Phase, ...]]]) -> None:
        """Get ready for these layouts and phases, in one go where that is cheaper."""
        ...

    def partitions(self, parallel: ParallelConfig, phases: tuple[Phase, ...], grid: Grid) -> list[Partition]:
        """Partitions among which ``auto`` chooses for a layout."""
        ...

    def costs(self, parallel: ParallelConfig, phases: tuple[Phase, ...]) -> LayoutCosts | StagedCosts:
        """The costs of one layout. ``phases`` without prefill is a decode-only instance, and the other way round."""
        ...


@dataclass(frozen=True)
class TracedCosts:
    """Costs from traces of the model, or of one of its pipeline stages, whose ``layers`` are given.

    Args:
        memory: of the ranks of the layout.
        own_indexers: layers that the traces give an indexer though in the model they share top-k indices.
    """

    setting: Setting
    parallel: ParallelConfig
    memory: RankMemory
    decode: StepEstimator | None = None
    prefill: StepEstimator | None = None
    layers: range | None = None
    own_indexers: tuple[int, ...] = ()

    @cached_property
    def kv(self) -> KVCacheManager:
        """Caches of the stage."""
        s = self.setting
        return KVCacheManager(
            s.model,
            self.parallel,
            s.block_size,
            s.quant.kv_dtype,
            s.dcp_semantics,
            s.workload.num_mtp_tokens,
            self.layers,
            self.own_indexers,
            s.start_up.max_model_len,
            s.start_up.in_flight(self.parallel.pp_size),
        )

    @property
    def _decoder(self) -> range:
        """Decoder layers of the stage, draft layers left out."""
        count = self.setting.model.num_hidden_layers
        return range(count) if self.layers is None else range(self.layers.start, min(self.layers.stop, count))

    @property
    def host_s(self) -> float:
        """Host time of a step that the device does not hide."""
        return self.setting.engine.host_step_s

    @cached_property
    def weight_bytes(self) -> int:
        """Weights on the fullest rank."""
        own = self._decoder
        given = sum(layer in own for layer in self.own_indexers)
        return self.memory.weights(own.start, own.stop, extra_indexers=given)

    @cached_property
    def overhead_bytes(self) -> float:
        """Outside the allocator, captured graphs, reserved memory and the null block."""
        reserved = self.setting.config.reserved_memory_gb * GIB
        return self.memory.non_torch + self.setting.start_up.graph_bytes + reserved + self.kv.block_bytes

    @cached_property
    def coverage(self) -> float:
        """Priced share of the ops; the lesser of the two phases."""
        return min(e.coverage for e in (self.decode, self.prefill) if e is not None)

    @cached_property
    def gather(self) -> ContextGather | None:
        """The collectives of a prefill chunk over a split cache; None where the cache is whole."""
        if self.parallel.dcp_size == 1 or self.prefill is None:
            return None
        s = self.setting
        return ChunkGather(
            s.model,
            s.device,
            self.parallel.to_tensor_cast(),
            s.dcp_semantics,
            s.workload.num_mtp_tokens,
            self.layers,
            self.own_indexers,
        )

    def kv_bytes(self, tokens: int) -> int:
        """KV of one request of ``tokens`` tokens on one rank, in whole blocks, as it is moved."""
        return self.kv.request_bytes(tokens)

    def pool_bytes(self, grid: Grid, batches: float = 1.0) -> Array:
        """The part of the KV pool that ``batches`` batches of each size take. Only one of them runs at a time.

        The engine refuses to start where the pool could not hold its longest request, so no less than that counts.
        """
        w = self.setting.workload
        if isinstance(grid, PrefillGrid):  # hands its KV over; it never holds the output
            pool = self.kv.prompt_bytes(grid.batches * batches, w.input_length)
        else:
            pool = self.kv.pool_bytes(grid.batches * batches, w.total_tokens)
        return np.asarray(np.maximum(pool, self.longest_bytes), dtype=np.float64)

    @cached_property
    def longest_bytes(self) -> int:
        """Part of the KV pool that the longest request takes while it computes its prompt."""
        return int(self.kv.prompt_bytes(1, self.setting.start_up.max_model_len))

    @cached_property
    def profile_bytes(self) -> int:
        """Activation peak of the engine's profile run, which sizes the KV pool."""
        return self.memory.activation(self._decoder.start, self._decoder.stop)

    def activation_bytes(self, grid: Grid) -> Array:
        """The engine's profile run of a full token budget, or the decode step itself where that needs more."""
        peak = np.full(len(grid.batches), float(self.profile_bytes))
        if self.decode is not None and not isinstance(grid, PrefillGrid):
            env = grid.decode_env if isinstance(grid, AggregatedGrid) else grid.env
            peak = np.maximum(peak, activation_peak_bytes(self.decode.prepared, env))
        return peak

    def bound(self, grid: Grid, index: int) -> str:
        """The resource that most of the mean step waits for, at one batch size. The host's share is latency."""
        totals = bound_seconds(grid, index, self.decode, self.prefill, self.gather)
        totals[Bound.LATENCY] += self.host_s
        return str(max(totals, key=lambda bound: totals[bound]))


def bound_seconds(
    grid: Grid,
    index: int,
    decode: StepEstimator | None,
    prefill: StepEstimator | None,
    gather: ContextGather | None = None,
) -> dict[Bound, float]:
    """Device seconds of the grid's mean step at one batch size by what bounds them; ``gather`` adds network."""
    totals = dict.fromkeys(Bound, 0.0)
    for estimator, env, scopes, weight in step_parts(grid, decode, prefill):
        for bound, seconds in estimator.bound_seconds(env, scopes).items():
            totals[bound] += float(np.broadcast_to(weight * seconds, grid.batches.shape)[index])
    if isinstance(grid, AggregatedGrid) and gather is not None:
        extra = grid.share * gather(grid.prompts, grid.chunk, *grid.context_before())
        totals[Bound.NETWORK] += float(extra[index])
    return totals


def step_parts(
    grid: Grid, decode: StepEstimator | None, prefill: StepEstimator | None
) -> list[tuple[StepEstimator, Mapping[str, Num], tuple[Scope, ...], Num]]:
    """(estimator, sizes, scopes, weight) that add up to the device time of the grid's mean step."""
    if not isinstance(grid, AggregatedGrid):
        estimator = decode if isinstance(grid, DecodeGrid) else prefill
        assert estimator is not None
        return [(estimator, grid.env, tuple(Scope), 1.0)]
    assert decode is not None
    assert prefill is not None
    calm, busy = 1.0 - grid.share, grid.share
    return [
        (decode, grid.decode_env, (Scope.SEQUENCE,), 1.0),
        (decode, grid.decode_env, (Scope.TOKEN, Scope.SAMPLE), calm),
        (decode, grid.mixed_env, (Scope.TOKEN,), busy),
        (decode, grid.sample_env, (Scope.SAMPLE,), busy),
        (prefill, grid.prefill_env, (Scope.SEQUENCE,), busy),
    ]


def rank_memory(setting: Setting, library: TraceLibrary, parallel: ParallelConfig) -> RankMemory:
    """Memory of the ranks of a layout, as ``msmodeling capacity`` has it."""
    sizes = parallel.to_tensor_cast()
    return RankMemory(setting.start_up, sizes, library.compose(profile_layout(setting.start_up, sizes)))


class TracedCostsFactory:
    """Traces what a search needs once and prices it per layout."""

    def __init__(self, setting: Setting, *, library: TraceLibrary | None = None) -> None:
        if library is None:
            from tensor_cast.core.trace_library import TraceLibrary

            library = TraceLibrary(setting.model, use_cache=setting.config.use_cache)
        self.setting = setting
        self.library = library

    def prepare(self, wanted: Sequence[tuple[ParallelConfig, tuple[Phase, ...]]]) -> None:
        """Trace everything that is missing in one go."""
        self.library.prefetch(self._layout(parallel, phase) for parallel, phases in wanted for phase in phases)

    def partitions(self, parallel: ParallelConfig, phases: tuple[Phase, ...], grid: Grid) -> list[Partition]:
        """The partitions among which ``auto`` chooses for a layout; see :mod:`.partitions`."""
        from serving_cast.service.partitions import candidates

        return candidates(self.setting, self.library, parallel, {p: self._layout(parallel, p) for p in phases}, grid)

    def costs(self, parallel: ParallelConfig, phases: tuple[Phase, ...]) -> TracedCosts | StagedCosts:
        """Costs of one layout from its traces, stage by stage where it has several."""
        if parallel.pp_size > 1:
            from serving_cast.service.staged_costs import build_staged

            return build_staged(self.setting, self.library, parallel, {p: self._layout(parallel, p) for p in phases})
        estimators = {phase: self._estimator(parallel, phase) for phase in phases}
        return TracedCosts(
            self.setting,
            parallel,
            rank_memory(self.setting, self.library, parallel),
            estimators.get(Phase.DECODE),
            estimators.get(Phase.PREFILL),
        )

    def _layout(self, parallel: ParallelConfig, phase: Phase) -> Layout:
        s = self.setting
        parallel = parallel.for_prefill() if phase is Phase.PREFILL else parallel
        return Layout(parallel.to_tensor_cast(), phase, s.dcp_semantics, s.block_size, s.workload.num_mtp_tokens)

    def _estimator(self, parallel: ParallelConfig, phase: Phase) -> StepEstimator:
        layout = self._layout(parallel, phase)
        s = self.setting
        return StepEstimator(
            self.library.compose(layout),
            device=s.device,
            engine=s.engine,
            parallel=layout.parallel,
            quant=s.quant,
            fusion=s.config.fusion,
            strict=s.config.strict,
        )
