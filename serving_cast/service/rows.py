"""Results as values: a row for what works, a rejection for what does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from serving_cast.config import ParallelConfig

__all__ = ["Rejection", "Row"]


@dataclass(frozen=True)
class StageRow:
    """One pipeline stage of a row.

    Args:
        stage: its number, from 0.
        layers: decoder layers.
        layer_equivalents: the same with the draft layer counted once for each of its passes.
        slot_ms: milliseconds for which one batch takes the stage, the transfer that it waits for included: the mean
            over steps with and without a prompt's chunk; the stage with the longest slot is the straggler.
        busy: share of the time that it computes.
    """

    stage: int
    layers: int
    layer_equivalents: int
    slot_ms: float
    busy: float


@dataclass(frozen=True)
class Row:
    """One layout at one batch size; field names are the keys of the JSON output, in its order.

    Args:
        phase: ``aggregated``, ``prefill`` or ``decode``.
        batch_size: requests of one DP rank in one step; ``concurrency``: of all ranks and replicas.
        throughput_tok_s: over all devices; generated tokens, for a prefill row prompt tokens.
        tok_s_per_device: the same over all devices asked for, idle ones included.
        kv_cache_size_gb: GiB that this batch's KV needs at its longest on one rank.
        overhead_gib: outside the allocator, captured graphs, reserved memory and the engine's null block.
        memory_total_gib: sum of weights, KV, activations and overhead, at most ``memory_available_gib``.
        bound: resource that most of the step's time waits for.
        pp_layer_partition: layers of each pipeline stage; None without stages. The memory of a row is that of the
            fullest stage.
        batches_in_flight: batches of ``batch_size`` that are under way at once, one without a pipeline.
        cycle_ms: of a pipeline, milliseconds from a batch's step to its next: TPOT times the tokens of a step. None
            without stages.
        pp_utilization: mean share of the time that the stages compute; None without stages.
        pp_idle: (cause, share of the time that the stages idle for it); with ``pp_utilization`` they add up to 1. None
            without stages.
        unsafe_layers: layers of sparse attention that read top-k indices never written on their stage.
        own_indexer_layers: layers given an indexer so that they need none of those indices.
        stages: of a pipeline, one entry for each stage; None without.
    """

    phase: str
    device: str
    engine: str
    dcp_semantics: str
    tp: int
    pp: int
    dp: int
    ep: int
    moe_tp: int
    moe_dp: int
    replicas: int
    dcp: int
    parallel: str
    batch_size: int
    concurrency: int
    ttft_ms: float | None
    tpot_ms: float | None
    throughput_tok_s: float
    tok_s_per_device: float
    tok_s_per_user: float | None
    requests_per_s: float
    weights_gib: float
    kv_cache_size_gb: float
    activation_gib: float
    overhead_gib: float
    memory_total_gib: float
    memory_available_gib: float
    coverage: float
    bound: str
    pp_layer_partition: tuple[int, ...] | None = None
    batches_in_flight: int = 1
    cycle_ms: float | None = None
    pp_utilization: float | None = None
    pp_idle: tuple[tuple[str, float], ...] | None = None
    unsafe_layers: tuple[int, ...] = ()
    own_indexer_layers: tuple[int, ...] = ()
    stages: tuple[StageRow, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return values | {
            "pp_idle": None if self.pp_idle is None else dict(self.pp_idle),
            "stages": None if self.stages is None else [asdict(stage) for stage in self.stages],
        }


@dataclass(frozen=True)
class Rejection:
    """Why one layout is out, in the words of the rule it breaks.

    Args:
        phase: the phase that it cannot run.
        rule: stable id: ``dcp.divides_tp``, ``memory.weights``, ``tpot.limit`` ...
        excess: how many times too much it is (1.2: a fifth over); infinite for a rule that is not a quantity.
    """

    parallel: ParallelConfig
    phase: str
    rule: str
    need: str
    have: str
    remedy: str
    excess: float = math.inf

    @property
    def layout(self) -> Mapping[str, int]:
        """Size of each axis."""
        return self.parallel.axes()

    def to_json(self) -> dict[str, Any]:
        """The rejection as a JSON object."""
        return {
            "layout": dict(self.layout),
            "phase": self.phase,
            "rule": self.rule,
            "need": self.need,
            "have": self.have,
            "remedy": self.remedy,
        }
