"""What a layout with pipeline stages costs: one :class:`TracedCosts` per stage, and the transfers between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from serving_cast.config import ParallelConfig
from serving_cast.service.layout_costs import Grid, TracedCosts, bound_seconds, rank_memory
from serving_cast.service.staged_state import Pipe, StagedPricer
from serving_cast.service.steady_state import PrefillGrid
from serving_cast.setting import Setting
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.ir.index_sharing import Handover, hand_over
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase, Trace
from tensor_cast.ir.stages import split_wire
from tensor_cast.performance_model.analytic import Bound
from tensor_cast.performance_model.estimate import StepEstimator
from tensor_cast.pipeline_partition import stage_ranges

__all__ = ["StagedCosts", "build_staged"]


@dataclass(frozen=True)
class StagedCosts:
    """Costs of a pipeline.

    Args:
        stages: costs of each stage: its own work, weights, caches and activations.
        wires: by phase, what crosses into each stage and back from the last one.
        handover: what is done where a stage lacks top-k indices.
    """

    setting: Setting
    parallel: ParallelConfig
    stages: tuple[TracedCosts, ...]
    wires: Mapping[Phase, tuple[StepEstimator, ...]]
    handover: Handover

    @property
    def batches_in_flight(self) -> int:
        """Batches that the engine keeps under way at once."""
        return self.setting.engine.batches_in_flight(len(self.stages))

    def resident_batches(self, grid: Grid) -> float:
        """Batches whose KV is held at once: chunks of one prompt may fill the pipeline, else as many prompts do."""
        chunks = grid.chunks if isinstance(grid, PrefillGrid) else 1.0
        return max(1.0, self.batches_in_flight / chunks)

    @cached_property
    def coverage(self) -> float:
        """Priced share of the ops; the least of all stages."""
        return min(stage.coverage for stage in self.stages)

    @cached_property
    def pipe(self) -> Pipe:
        """The pipeline for the serving maths."""
        gathers = tuple(stage.gather for stage in self.stages)
        return Pipe(
            decode=self._pricer(Phase.DECODE),
            prefill=self._pricer(Phase.PREFILL),
            batches=self.batches_in_flight,
            host_s=self.setting.engine.host_step_s,
            overlap=self.setting.engine.pp_overlap,
            gather=None if gathers[0] is None else tuple(gather for gather in gathers if gather is not None),
        )

    def _pricer(self, phase: Phase) -> StagedPricer | None:
        if phase not in self.wires:
            return None
        work = [stage.decode if phase is Phase.DECODE else stage.prefill for stage in self.stages]
        return StagedPricer(tuple(pricer for pricer in work if pricer is not None), self.wires[phase])

    def bound(self, grid: Grid, index: int) -> str:
        """The resource that most of a batch's way through all stages waits for."""
        totals = dict.fromkeys(Bound, 0.0) | {Bound.LATENCY: self.setting.engine.host_step_s}
        for number, stage in enumerate(self.stages):
            wires = {phase: wire[number] for phase, wire in self.wires.items()}
            for found in (
                bound_seconds(grid, index, stage.decode, stage.prefill, stage.gather),
                bound_seconds(grid, index, wires.get(Phase.DECODE), wires.get(Phase.PREFILL)),
            ):
                totals = {bound: seconds + found[bound] for bound, seconds in totals.items()}
        return str(max(totals, key=lambda bound: totals[bound]))


def build_staged(
    setting: Setting,
    library: TraceLibrary,
    parallel: ParallelConfig,
    layouts: Mapping[Phase, Layout],
    handover: Handover | None = None,
) -> StagedCosts:
    """Costs of ``parallel``, whose ``pp_layer_partition`` says what each stage runs.

    Args:
        setting: model, device and engine.
        library: where traces come from.
        parallel: the layout.
        layouts: what is traced for each phase.
        handover: what is done where stages lack top-k indices; by default what ``dsa_split`` asks for.

    Raises:
        UnsupportedModelError: a layer is to get an indexer that cannot be known.
    """
    partition = parallel.pp_layer_partition
    if handover is None:
        handover = hand_over(setting.model, partition, setting.config.dsa_split)
    work: dict[Phase, list[StepEstimator]] = {}
    wires: dict[Phase, list[StepEstimator]] = {}
    for phase, layout in layouts.items():
        for number, trace in enumerate(library.stages(layout, partition, handover=handover)):
            inside, crossing = split_wire(trace)
            work.setdefault(phase, []).append(_estimator(setting, layout, inside, number))
            wires.setdefault(phase, []).append(_estimator(setting, layout, crossing, number))
    drafts = min(setting.model.num_nextn_predict_layers, setting.workload.num_mtp_tokens)
    memory = rank_memory(setting, library, parallel)
    stages = []
    for number, own in enumerate(stage_ranges(partition)):
        last = number == len(partition) - 1
        stages.append(
            TracedCosts(
                setting,
                parallel,
                memory,
                work[Phase.DECODE][number] if Phase.DECODE in work else None,
                work[Phase.PREFILL][number] if Phase.PREFILL in work else None,
                range(own.start, own.stop + drafts) if last else own,
                handover.own_indexers,
            )
        )
    crossing_by_phase = {phase: tuple(found) for phase, found in wires.items()}
    return StagedCosts(setting, parallel, tuple(stages), crossing_by_phase, handover)


def _estimator(setting: Setting, layout: Layout, trace: Trace, stage: int) -> StepEstimator:
    return StepEstimator(
        trace,
        device=setting.device,
        engine=setting.engine,
        parallel=layout.parallel,
        quant=setting.quant,
        fusion=setting.config.fusion,
        strict=setting.config.strict,
        stage=stage,
    )
