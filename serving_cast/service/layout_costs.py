"""What one layout costs: the meeting point of traces, prices, memory and the serving maths.

:class:`TracedCosts` is the real thing. The search only asks for :class:`LayoutCosts`, so its tests bring their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from serving_cast.config import OptimizerConfig, ParallelConfig, Workload
from serving_cast.kv_cache_manager import KVCacheManager
from serving_cast.service.chunk_gather import ChunkGather
from serving_cast.service.steady_state import AggregatedGrid, ContextGather, DecodeGrid, PrefillGrid, StepPricer
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.engine.profile import EngineProfile
from tensor_cast.ir.expr import Num
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase, Scope
from tensor_cast.model_config import ModelConfig
from tensor_cast.performance_model.analytic import Bound
from tensor_cast.performance_model.estimate import StepEstimator
from tensor_cast.performance_model.memory import activation_peak_bytes, weight_bytes
from tensor_cast.pipeline_partition import Partition
from tensor_cast.quant import QuantConfig
from tensor_cast.units import GIB

if TYPE_CHECKING:
    from serving_cast.service.staged_costs import StagedCosts
    from tensor_cast.core.trace_library import TraceLibrary

__all__ = [
    "CostsFactory",
    "Grid",
    "LayoutCosts",
    "Setting",
    "TracedCosts",
    "TracedCostsFactory",
    "bound_seconds",
    "step_parts",
]

Array = NDArray[np.float64]
Grid = AggregatedGrid | DecodeGrid | PrefillGrid

#: Tokens of earlier context that a prefill chunk expands at a time; engines work through longer contexts piece by
#: piece (vLLM: chunked_prefill_workspace_size <= 64 Ki tokens).
_CONTEXT_WORKSPACE_TOKENS = 65_536


@dataclass(frozen=True)
class Setting:
    """Everything about a search that does not depend on the layout."""

    config: OptimizerConfig
    model: ModelConfig
    device: DeviceProfile
    engine: EngineProfile
    quant: QuantConfig
    dcp_semantics: str
    block_size: int
    interleave: int
    budget: int
    max_num_seqs: int

    @property
    def workload(self) -> Workload:
        """The requests."""
        return self.config.workload

    @property
    def labels(self) -> tuple[str, str, str]:
        """Device, engine and DCP semantics, as rows show them."""
        return self.device.name, self.engine.name, self.dcp_semantics

    @property
    def available_bytes(self) -> float:
        """What the engine may use of a device's memory."""
        return float(self.device.usable_memory_bytes.value * self.engine.gpu_memory_utilization)


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
        """KV of one request of ``tokens`` tokens on one rank."""
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

    ``own_indexers`` are layers that the traces give an indexer though in the model they share top-k indices.
    """

    setting: Setting
    parallel: ParallelConfig
    decode: StepEstimator | None = None
    prefill: StepEstimator | None = None
    layers: range | None = None
    own_indexers: tuple[int, ...] = ()
    kv: KVCacheManager = field(init=False)

    def __post_init__(self) -> None:
        s = self.setting
        manager = KVCacheManager(
            s.model,
            self.parallel,
            s.block_size,
            s.quant.kv_dtype,
            s.dcp_semantics,
            s.workload.num_mtp_tokens,
            self.layers,
            self.own_indexers,
        )
        object.__setattr__(self, "kv", manager)

    @property
    def _main(self) -> StepEstimator:
        main = self.decode or self.prefill
        assert main is not None
        return main

    @property
    def host_s(self) -> float:
        """Host time of a step that the device does not hide."""
        return self.setting.engine.host_step_s

    @cached_property
    def weight_bytes(self) -> int:
        """Weights on the fullest rank."""
        return weight_bytes(self._main.trace, self.setting.quant)

    @cached_property
    def overhead_bytes(self) -> float:
        """Outside the allocator, captured graphs, reserved memory and the null block."""
        engine = self.setting.engine
        p = self.parallel
        # Ranks of a DP group that share no experts never talk to each other.
        talking = p.tp_size * p.pp_size * (p.dp_size if self.setting.model.is_moe else 1)
        gib = engine.non_torch_gib_for(talking) + engine.graph_gib + self.setting.config.reserved_memory_gb
        return gib * GIB + self.kv.block_bytes

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
        """KV of one request of ``tokens`` tokens on one rank, in whole blocks."""
        return self.kv.request_bytes(tokens)

    def activation_bytes(self, grid: Grid) -> Array:
        """The engine's profile run of a full token budget, or the decode step itself where that needs more."""
        s = self.setting
        peak = np.full(len(grid.batches), float(self._profile_peak(s.workload.input_length, s.budget)))
        if self.decode is not None and not isinstance(grid, PrefillGrid):
            env = grid.decode_env if isinstance(grid, AggregatedGrid) else grid.env
            peak = np.maximum(peak, activation_peak_bytes(self.decode.prepared, env))
        return peak

    def peak_bytes(self, env: Mapping[str, Num]) -> float:
        """Activation peak of one step of the phase with the larger steps."""
        main = self.prefill or self.decode
        assert main is not None
        return float(activation_peak_bytes(main.prepared, env))

    def _profile_peak(self, input_length: int, budget: int) -> float:
        """Engines size the KV pool after a run with as many prompt tokens as a step may hold."""
        if self.prefill is None:
            return 0.0
        query = min(input_length, budget)
        context = min(input_length, query + _CONTEXT_WORKSPACE_TOKENS)
        return float(activation_peak_bytes(self.prefill.prepared, {"B": budget / query, "Q": query, "S": context}))

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
        return TracedCosts(self.setting, parallel, estimators.get(Phase.DECODE), estimators.get(Phase.PREFILL))

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
