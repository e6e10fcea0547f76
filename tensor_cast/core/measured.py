"""A measured start-up, taken apart: what is left beside our weights, and what it says about other layouts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tensor_cast.core.calibration import Calibration, MeasuredStage
from tensor_cast.engine.kv_groups import Capacity
from tensor_cast.engine.workspaces import requested_bytes
from tensor_cast.pipeline_partition import Partition, stage_ranges
from tensor_cast.units import GIB

__all__ = ["ROUNDING", "Measured", "StageKind", "StageResidual", "stage_kind"]


class StageKind(StrEnum):
    """Where a stage stands; stages of one kind have the same overheads."""

    ONLY = "only"
    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"


#: Whose measurements stand in for a kind that was not measured, nearest first.
_STAND_INS = {
    StageKind.ONLY: (StageKind.ONLY, StageKind.LAST, StageKind.FIRST),
    StageKind.FIRST: (StageKind.FIRST, StageKind.MIDDLE, StageKind.ONLY, StageKind.LAST),
    StageKind.MIDDLE: (StageKind.MIDDLE, StageKind.FIRST, StageKind.ONLY, StageKind.LAST),
    StageKind.LAST: (StageKind.LAST, StageKind.ONLY, StageKind.FIRST),
}


def stage_kind(start: int, end: int, layers: int) -> StageKind:
    """Kind of the stage that runs ``start <= i < end`` of ``layers`` layers."""
    if start == 0:
        return StageKind.ONLY if end == layers else StageKind.FIRST
    return StageKind.LAST if end == layers else StageKind.MIDDLE


@dataclass(frozen=True)
class StageResidual:
    """Bytes of one measured stage.

    Args:
        kind: where it stands.
        layers: decoder layers of the stage.
        consumed: weights, buffers of the kernels and non-torch memory, measured.
        weights: ours.
        workspace: ours, of the kernels.
        peak: what the engine kept free for activations (and graphs, where it counts them).
        graph: graphs within ``peak``.
        kv: available for the KV cache, measured; None where it was not.
        stated: what the engine says it used and kept free beside the KV cache; None where it does not say.
    """

    kind: StageKind
    layers: range
    consumed: int
    weights: int
    workspace: int
    peak: int
    graph: int
    kv: int | None
    stated: int | None = None

    @property
    def residual(self) -> int:
        """Measured memory that our weights and workspaces do not explain: context, communication, tables, gaps."""
        return self.consumed - self.weights - self.workspace


@dataclass(frozen=True)
class Measured:
    """A calibration with our weights beside it.

    Args:
        calibration: what was measured.
        partition: of the measured run.
        weights: ours, of each of its stages.
        workspace: ours, at its longest request, beside the weights for good.
        tables: of these, what comes with the weights.
        usable: bytes of the device.
        utilization: share of it that the engine took.
        layout: of the measured run, in words.
        communication: bytes of communicators that the ranks asked for have and the measured one had not; below 0 where
            only the measured ones had them.
        alone: what a rank without communicators has outside the allocator; no less is left when theirs are taken off.
        predicted: what we make of the measured KV memory; None where it was not measured.
        other_model: the model that the log names, where it is not the one asked for.
    """

    calibration: Calibration
    partition: Partition
    weights: tuple[int, ...]
    workspace: int
    usable: float
    utilization: float
    tables: int = 0
    layout: str = ""
    communication: int = 0
    alone: int = 0
    predicted: Capacity | None = None
    other_model: str | None = None

    @property
    def stages(self) -> tuple[StageResidual, ...]:
        """Each measured stage, taken apart."""
        return tuple(
            self._apart(layers, measured, weights)
            for layers, measured, weights in zip(
                stage_ranges(self.partition), self.calibration.stages, self.weights, strict=True
            )
        )

    def overheads(self, kind: StageKind, workspace: int) -> tuple[int, int, int]:
        """(non-torch, activation, graph) bytes of a stage of ``kind``, with ``workspace`` bytes of buffers now."""
        stage = self._stands_for(kind)
        residual = stage.residual + self.communication_of(kind)
        return residual + workspace, stage.peak - stage.graph, stage.graph

    def communication_of(self, kind: StageKind) -> int:
        """Bytes added (taken off, where below 0) for the communicators of a stage of ``kind``."""
        if self.communication >= 0:
            return self.communication
        return -min(-self.communication, max(0, self._stands_for(kind).residual - self.alone))

    def _stands_for(self, kind: StageKind) -> StageResidual:
        by_kind = {stage.kind: stage for stage in reversed(self.stages)}
        return next(by_kind[k] for k in _STAND_INS[kind] if k in by_kind)

    def budget(self, utilization: float) -> int:
        """Bytes that the engine takes of the device, at any utilisation.

        SGLang's share is of what was free before it loaded the weights; what was gone by then counts as taken.
        """
        free = [stage.free_gib for stage in self.calibration.stages if stage.free_gib is not None]
        if free:
            return int(self.usable - min(free) * GIB * (1 - utilization))
        return requested_bytes(self.usable, utilization)

    def _apart(self, layers: range, measured: MeasuredStage, weights: int) -> StageResidual:
        budget = self.budget(self.utilization)
        kv, activation, graph = (
            _bytes(measured.kv_gib),
            _bytes(measured.activation_gib),
            _bytes(measured.graph_gib) or 0,
        )
        stated = None
        if measured.consumed_gib is not None:
            consumed = int(measured.consumed_gib * GIB)
            stated = None if activation is None else consumed + activation
        elif measured.weights_gib is not None and measured.free_gib is not None:
            consumed = int(self.usable - (measured.free_gib - measured.weights_gib) * GIB)
        elif measured.weights_gib is not None:
            loaded = int((measured.weights_gib + (measured.non_torch_gib or 0.0)) * GIB)
            # Engines that print weights apart count the kernels' buffers with the activations.
            buffers = self.workspace - self.tables
            buffers = buffers if activation is None else min(buffers, activation)
            consumed = loaded + buffers
            graph = 0
            if activation is not None:
                stated, activation = loaded + activation, activation - buffers
                if kv is not None:
                    # What is kept beyond that is an estimate of the graphs (vLLM since 0.21).
                    kept = budget - stated - kv
                    graph = kept if kept > ROUNDING * GIB else 0
        else:
            assert kv is not None
            assert activation is not None
            consumed = budget - kv - activation
        if kv is not None and (self.calibration.gpu_memory_utilization is not None or activation is None):
            # The KV memory is what the engine itself arrived at: what it kept free follows from it.
            peak = budget - consumed - kv
        else:
            assert activation is not None
            peak = activation
        kind = stage_kind(layers.start, layers.stop, sum(self.partition))
        graph = min(graph, max(peak, 0))
        return StageResidual(kind, layers, consumed, weights, self.workspace, peak, graph, kv, stated)


#: What rounding makes of a sum of numbers with two decimals, in GiB.
ROUNDING = 0.03


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)
