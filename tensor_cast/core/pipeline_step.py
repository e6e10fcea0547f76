"""One step of a layout with pipeline stages: what each stage takes and holds, and how batches follow each other.

A batch passes the stages one after the other, so a single one keeps each busy 1/p of the time; with as many batches in
flight as there are stages the slowest one sets the pace. See :mod:`tensor_cast.performance_model.pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tensor_cast.ir.index_sharing import Handover
from tensor_cast.ir.stages import BROADCAST, RECV
from tensor_cast.performance_model.estimate import StepEstimate
from tensor_cast.performance_model.memory import MemoryPlan
from tensor_cast.performance_model.pipeline import Flow, StageTimes, steady_flow
from tensor_cast.pipeline_partition import Partition, layer_equivalents
from tensor_cast.units import GIB, MS

__all__ = ["PipelineStep", "stage_times"]


def stage_times(estimates: Sequence[StepEstimate], *, overlap: bool) -> StageTimes:
    """Stage times from the estimate of each stage, transfers and the returning tokens among its ops.

    Args:
        estimates: of one step on each stage; the host's share is that of the whole step.
        overlap: transfers do not occupy the receiving stage.
    """
    hops = [sum(op.total_s for op in estimate.ops if op.name == RECV) for estimate in estimates]
    back = sum(op.total_s for estimate in estimates for op in estimate.ops if op.name == BROADCAST)
    work = [estimate.device_s - hop for estimate, hop in zip(estimates, hops, strict=True)]
    work[-1] -= back
    return StageTimes(tuple(work), tuple(hops), back + estimates[0].host_s, overlap)


@dataclass(frozen=True)
class PipelineStep:
    """The stages of one step.

    Args:
        partition: layers of each stage.
        num_mtp_tokens: draft tokens; the last stage runs the draft layer once for each.
        handover: what is done where a stage lacks the top-k indices that its first layers reuse.
        times: seconds of the step on each stage.
        memory: of one rank of each stage, with the KV of all batches in flight.
        batches: in flight.
    """

    partition: Partition
    num_mtp_tokens: int
    handover: Handover
    times: StageTimes
    memory: tuple[MemoryPlan, ...]
    batches: int

    @cached_property
    def flow(self) -> Flow:
        """The steady state with all batches in flight."""
        return steady_flow(self.times, self.batches)

    @cached_property
    def alone(self) -> Flow:
        """The steady state of one batch that has the stages to itself."""
        return steady_flow(self.times, 1)

    @property
    def fullest(self) -> MemoryPlan:
        """Memory of the stage with least to spare."""
        return min(self.memory, key=lambda plan: plan.spare)

    @property
    def slot_ms(self) -> float:
        """Milliseconds between batches at the slowest stage when it never waits."""
        return float(self.flow.slot) / MS

    @property
    def cycle_ms(self) -> float:
        """Milliseconds from a batch's step to its next: the TPOT of decode without draft tokens."""
        return float(self.flow.cycle) / MS

    def stages(self) -> list[dict[str, Any]]:
        """Each stage in the public JSON form: milliseconds, GiB, shares."""
        flow = self.flow
        found = zip(
            self.partition,
            layer_equivalents(self.partition, self.num_mtp_tokens),
            self.times.work,
            self.times.hops,
            flow.stage_slots,
            flow.utilisation,
            self.memory,
            strict=True,
        )
        return [
            {
                "stage": stage,
                "layers": layers,
                "layer_equivalents": equivalents,
                "work_ms": float(work) / MS,
                "transfer_in_ms": float(hop) / MS,
                "slot_ms": float(slot) / MS,
                "busy": float(busy),
                "weights_gib": plan.weights_gib,
                "kv_cache_size_gb": plan.kv / GIB,
                "activation_gib": plan.activation_gib,
                "memory_total_gib": plan.total_gib,
                "fits": plan.fits,
            }
            for stage, (layers, equivalents, work, hop, slot, busy, plan) in enumerate(found)
        ]

    def to_json(self) -> dict[str, Any]:
        """The public JSON form; the step's own time is a batch's way through all stages."""
        return {
            "pp_layer_partition": list(self.partition),
            "batches_in_flight": self.batches,
            "slot_ms": self.slot_ms,
            "cycle_ms": self.cycle_ms,
            "pp_utilization": float(self.flow.mean_utilisation),
            "pp_utilization_of_one_batch": float(self.alone.mean_utilisation),
            "bubbles": {cause: float(share) for cause, share in self.flow.bubbles.items()},
            "unsafe_layers": list(self.handover.unsafe),
            "own_indexer_layers": list(self.handover.own_indexers),
            "stages": self.stages(),
        }
