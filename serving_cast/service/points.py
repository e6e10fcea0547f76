"""One layout at every batch size: times, rates and memory side by side, independent of limits and of other layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from serving_cast.config import Limits, ParallelConfig
from serving_cast.service.remedies import Advice
from serving_cast.service.rows import Row, StageRow
from serving_cast.service.steady_state import SteadyState
from serving_cast.service.utils import format_parallel_label
from tensor_cast.ir.index_sharing import Handover
from tensor_cast.performance_model.pipeline import CAUSES, Flow
from tensor_cast.units import GIB, MS

__all__ = ["LayoutMemory", "LayoutPoints", "PipelineView", "StagedMemory"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LayoutMemory:
    """Memory of one rank in bytes; ``activation`` and ``kv`` have one entry per batch size.

    Args:
        available: what the engine may use.
        longest: KV of the longest request that the engine is started for, which ``kv`` never falls below; 0 where that
            is the workload's.
        overhead: outside the allocator, buffers of kernels, captured graphs, reserved memory, the null block.
    """

    available: float
    weights: float
    overhead: float
    activation: Array
    kv: Array
    longest: float = 0.0

    @cached_property
    def total(self) -> Array:
        """Bytes that the rank needs."""
        return self.weights + self.overhead + self.activation + self.kv

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """Where the total is within what is available."""
        return self.total <= self.available


@dataclass(frozen=True)
class StagedMemory:
    """Memory of one rank of each pipeline stage."""

    stages: tuple[LayoutMemory, ...]

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """Where every stage fits."""
        return np.asarray(np.logical_and.reduce([stage.fits for stage in self.stages]), dtype=np.bool_)

    def fullest(self, index: int) -> int:
        """The stage that needs most of what it may use, at one batch size."""
        return int(np.argmax([float(stage.total[index]) for stage in self.stages]))


@dataclass(frozen=True)
class PipelineView:
    """What the rows of a pipeline add.

    Args:
        batches: in flight.
        flow: utilisation and bubbles at every batch size.
        partition: layers of each stage; ``equivalents`` counts the draft layer once for each of its passes.
        handover: what is done where a stage lacks the top-k indices that its first layers reuse.
    """

    batches: int
    flow: Flow
    partition: tuple[int, ...]
    equivalents: tuple[int, ...]
    handover: Handover

    def cycle_ms(self, index: int) -> float:
        """Milliseconds from a batch's step to its next, at one batch size."""
        return _at(self.flow.cycle, index) / MS

    def idle(self, index: int) -> tuple[tuple[str, float], ...]:
        """Idle share of all stages together by cause, at one batch size."""
        return tuple((cause, _at(self.flow.bubbles[cause], index)) for cause in CAUSES)

    def utilisation(self, index: int) -> float:
        """Mean share of the time that the stages compute, at one batch size."""
        return _at(self.flow.mean_utilisation, index)

    def stages(self, index: int) -> tuple[StageRow, ...]:
        """The stages at one batch size."""
        flow = self.flow
        found = zip(self.partition, self.equivalents, flow.stage_slots, flow.utilisation, strict=True)
        return tuple(
            StageRow(stage, layers, equivalents, _at(slot, index) / MS, _at(busy, index))
            for stage, (layers, equivalents, slot, busy) in enumerate(found)
        )


def _at(values: Array, index: int) -> float:
    """The entry of one batch size; a number holds for all."""
    flat = np.atleast_1d(values)
    return float(flat[index if len(flat) > 1 else 0])


@dataclass(frozen=True)
class LayoutPoints:
    """One layout in one phase at every batch size.

    Args:
        labels: device, engine and DCP semantics, for rows.
        replicas: instances side by side; ``num_devices`` counts idle devices too.
        batches: requests of one rank; ``state`` and ``memory`` run along it.
        prompt_kv_bytes: KV of one request's prompt on one rank.
        coverage: priced share of the ops.
        bound_of: dominating resource of the step at one index.
        pipeline: of a layout with stages.
        max_concurrency: most requests in flight over all devices; None for no bound.
        advice: what to change where the layout does not fit.
    """

    phase: str
    parallel: ParallelConfig
    labels: tuple[str, str, str]
    num_devices: int
    replicas: int
    batches: NDArray[np.int64]
    state: SteadyState
    memory: LayoutMemory | StagedMemory
    prompt_kv_bytes: int
    coverage: float
    bound_of: Callable[[int], str]
    pipeline: PipelineView | None = None
    max_concurrency: int | None = None
    advice: Callable[[], Advice] = Advice

    @property
    def batches_in_flight(self) -> int:
        """Batches under way at once on an instance."""
        return self.pipeline.batches if self.pipeline else 1

    @cached_property
    def concurrency(self) -> NDArray[np.int64]:
        """Requests in flight over all devices."""
        return self.batches * (self.parallel.dp_size * self.replicas * self.batches_in_flight)

    @cached_property
    def within_concurrency(self) -> NDArray[np.bool_]:
        """Where no more requests are in flight than may be."""
        if self.max_concurrency is None:
            return np.ones(len(self.batches), dtype=np.bool_)
        return self.concurrency <= self.max_concurrency

    def memory_at(self, index: int) -> LayoutMemory:
        """Memory of the rank, or of the fullest stage at one batch size."""
        return self.memory if isinstance(self.memory, LayoutMemory) else self.memory.stages[self.memory.fullest(index)]

    @cached_property
    def possible(self) -> NDArray[np.bool_]:
        """Batch sizes that fit memory, token budget and concurrency, whatever the limits."""
        return self.state.within_budget & self.memory.fits & self.within_concurrency

    def misses(self, limits: Limits) -> Array:
        """Times over the worse of the two limits for each batch size; at most 1 where both are kept."""
        worst = np.zeros(len(self.batches))
        for seconds, limit in ((self.state.ttft, limits.ttft_ms), (self.state.tpot, limits.tpot_ms)):
            if seconds is not None and limit is not None:
                worst = np.maximum(worst, seconds / MS / limit)
        return worst

    def meets(self, limits: Limits) -> NDArray[np.bool_]:
        """Batch sizes that fit and keep both limits."""
        return self.possible & (self.misses(limits) <= 1.0)

    def row(self, index: int, *, replicas: int | None = None) -> Row:
        """The point as a row; another number of replicas scales what depends on it."""
        replicas = self.replicas if replicas is None else replicas
        ranks = self.parallel.dp_size * replicas
        batch = int(self.batches[index])
        state, memory, pipeline = self.state, self.memory_at(index), self.pipeline
        flight = self.batches_in_flight
        handover = pipeline.handover if pipeline else Handover()
        tokens = float(state.tokens_per_second[index]) * ranks
        tpot = None if state.tpot is None else float(state.tpot[index])
        device, engine, semantics = self.labels
        return Row(
            phase=self.phase,
            device=device,
            engine=engine,
            dcp_semantics=semantics,
            **self.parallel.axes(),
            replicas=replicas,
            parallel=format_parallel_label(self.parallel),
            batch_size=batch,
            concurrency=batch * ranks * flight,
            ttft_ms=None if state.ttft is None else float(state.ttft[index]) / MS,
            tpot_ms=None if tpot is None else tpot / MS,
            throughput_tok_s=tokens,
            tok_s_per_device=tokens / self.num_devices,
            tok_s_per_user=None if tpot is None else 1.0 / tpot,
            requests_per_s=float(state.requests_per_second[index]) * ranks,
            weights_gib=memory.weights / GIB,
            kv_cache_size_gb=float(memory.kv[index]) / GIB,
            activation_gib=float(memory.activation[index]) / GIB,
            overhead_gib=memory.overhead / GIB,
            memory_total_gib=float(memory.total[index]) / GIB,
            memory_available_gib=memory.available / GIB,
            coverage=self.coverage,
            bound=self.bound_of(index),
            pp_layer_partition=self.parallel.pp_layer_partition or None,
            batches_in_flight=flight,
            cycle_ms=None if pipeline is None else pipeline.cycle_ms(index),
            pp_utilization=None if pipeline is None else pipeline.utilisation(index),
            pp_idle=None if pipeline is None else pipeline.idle(index),
            unsafe_layers=handover.unsafe,
            own_indexer_layers=handover.own_indexers,
            stages=None if pipeline is None else pipeline.stages(index),
        )
