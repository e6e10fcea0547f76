"""A measured start-up, taken apart: what is left beside our weights, and what it says about other layouts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tensor_cast.core.calibration import Calibration, MeasuredStage
from tensor_cast.engine.workspaces import requested_bytes
from tensor_cast.pipeline_partition import Partition, stage_ranges
from tensor_cast.units import GIB

__all__ = ["Measured", "StageKind", "StageResidual", "stage_kind"]


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
        consumed: weights and non-torch memory, measured.
        weights: ours.
        workspace: ours, of kernels and rotary tables.
        peak: what the engine kept free for activations (and graphs, where it counts them).
        graph: graphs within ``peak``.
        kv: available for the KV cache, measured; None where it was not.
    """

    kind: StageKind
    consumed: int
    weights: int
    workspace: int
    peak: int
    graph: int
    kv: int | None

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
        workspace: ours, at its longest request.
        usable: bytes of the device.
        utilization: share of it that the engine took.
    """

    calibration: Calibration
    partition: Partition
    weights: tuple[int, ...]
    workspace: int
    usable: float
    utilization: float

    @property
    def stages(self) -> tuple[StageResidual, ...]:
        """Each measured stage, taken apart."""
        layers = sum(self.partition)
        out = []
        for stage, measured, weights in zip(
            stage_ranges(self.partition), self.calibration.stages, self.weights, strict=True
        ):
            kind = stage_kind(stage.start, stage.stop, layers)
            out.append(self._apart(kind, measured, weights))
        return tuple(out)

    def overheads(self, kind: StageKind, workspace: int) -> tuple[int, int, int]:
        """(non-torch, activation, graph) bytes of a stage of ``kind``, with ``workspace`` bytes of buffers now."""
        by_kind = {stage.kind: stage for stage in reversed(self.stages)}
        stage = next(by_kind[k] for k in _STAND_INS[kind] if k in by_kind)
        return stage.residual + workspace, stage.peak - stage.graph, stage.graph

    def _apart(self, kind: StageKind, measured: MeasuredStage, weights: int) -> StageResidual:
        budget = requested_bytes(self.usable, self.utilization)
        kv = None if measured.kv_gib is None else int(measured.kv_gib * GIB)
        activation = None if measured.activation_gib is None else int(measured.activation_gib * GIB)
        if measured.consumed_gib is not None:
            consumed = int(measured.consumed_gib * GIB)
        elif measured.weights_gib is not None and measured.free_gib is not None:
            consumed = int(self.usable - (measured.free_gib - measured.weights_gib) * GIB)
        elif measured.weights_gib is not None:
            consumed = int((measured.weights_gib + (measured.non_torch_gib or 0.0)) * GIB)
        else:
            assert kv is not None
            assert activation is not None
            consumed = budget - kv - activation
        # The KV memory is what the engine itself arrived at: what it kept free follows from it.
        peak = budget - consumed - kv if kv is not None else activation
        assert peak is not None
        graph = int((measured.graph_gib or 0.0) * GIB) if measured.graph_in_activation else 0
        return StageResidual(kind, consumed, weights, self.workspace, peak, min(graph, max(peak, 0)), kv)
