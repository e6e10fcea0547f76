"""A layout as a picture: memory of each stage against the budget, and its batches on the stages over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving_cast.config import ParallelConfig
from serving_cast.service.layout_costs import Grid, LayoutCosts, TracedCostsFactory
from serving_cast.service.rows import Row
from serving_cast.service.staged_costs import StagedCosts
from serving_cast.service.staged_state import solve_staged
from serving_cast.service.steady_state import GRIDS, AggregatedGrid
from serving_cast.setting import Setting
from tensor_cast.core.html_report import Bar, Block, Section, memory_svg, timeline_svg, write_report
from tensor_cast.ir.record import Phase
from tensor_cast.performance_model.pipeline import CAUSES, Flow, Slot, StageTimes, busy_steps, play
from tensor_cast.pipeline_partition import stage_ranges
from tensor_cast.units import GIB, MS

__all__ = ["layout_sections", "write_layout_report"]

#: Steps of each batch that the timeline shows where all are alike.
_STEPS = 3
#: Rounds of all batches: before the timeline starts where steps differ, and in it before and after its long step.
_WARM, _BEFORE, _AFTER = 3, 1, 2


def write_layout_report(path: Path, setting: Setting, rows: list[Row]) -> None:
    """Write the report of ``rows``, the best of each phase, to ``path``. Raises :class:`ConfigError` if it cannot."""
    title = f"{setting.model.model_id} on {setting.config.num_devices} x {setting.device.name}"
    w = setting.workload
    subtitle = f"{w.input_length} tokens in, {w.output_length} out; engine {setting.engine.name}"
    write_report(path, title, subtitle, [section for row in rows for section in layout_sections(setting, row)])


def layout_sections(setting: Setting, row: Row) -> list[Section]:
    """Memory and timeline of one row; its layout is priced again at its batch size."""
    partition = row.pp_layer_partition or ()
    parallel = ParallelConfig(
        tp_size=row.tp,
        pp_size=row.pp,
        dp_size=row.dp,
        ep_size=row.ep,
        moe_dp_size=row.moe_dp,
        dcp_size=row.dcp,
        cp_kv_cache_interleave_size=setting.interleave,
        pp_layer_partition=partition,
    )
    phases = (Phase.PREFILL,) if row.phase == "prefill" else (Phase.DECODE, Phase.PREFILL)
    costs = TracedCostsFactory(setting).costs(parallel, phases)
    grid = GRIDS[row.phase](setting.workload, setting.budget, np.array([float(row.batch_size)]))
    name = f"{row.parallel}, {row.phase}, batch {row.batch_size}"
    stages: tuple[LayoutCosts, ...] = costs.stages if isinstance(costs, StagedCosts) else (costs,)
    layers = stage_ranges(partition) if partition else (range(setting.model.num_hidden_layers),)
    resident = costs.resident_batches(grid) if isinstance(costs, StagedCosts) else 1.0
    bars = [
        _bar(setting, stage, f"stage {i}: layers {own.start}-{own.stop - 1}", grid, resident)
        for i, (stage, own) in enumerate(zip(stages, layers, strict=True))
    ]
    memory = Section(
        f"Memory of a rank: {name}",
        f"KV is that of {row.batches_in_flight * row.batch_size} requests at their longest; the dashed line is what "
        "the engine may take.",
        (memory_svg(bars),),
        notes=costs.handover.notes if isinstance(costs, StagedCosts) else (),
    )
    if not isinstance(costs, StagedCosts):
        return [memory]
    return [memory, _timeline(costs, grid, row, name)]


def _bar(setting: Setting, stage: LayoutCosts, label: str, grid: Grid, resident: float) -> Bar:
    parts = {
        "weights": float(stage.weight_bytes),
        "KV cache": float(stage.pool_bytes(grid, resident)[0]),
        "activation": float(stage.activation_bytes(grid)[0]),
        "graphs and other": stage.overhead_bytes,
    }
    return Bar(label, tuple((name, size / GIB) for name, size in parts.items()), setting.available_bytes / GIB)


def _timeline(costs: StagedCosts, grid: Grid, row: Row, name: str) -> Section:
    pipe = costs.pipe
    if isinstance(grid, AggregatedGrid):
        calm, busy, share = pipe.calm_times(grid).at(0), pipe.busy_times(grid).at(0), float(grid.share[0])
    else:
        calm, share = pipe.times(grid).at(0), 0.0
        busy = calm
    _, flow = solve_staged(grid, pipe)
    many, start, end = _stretch(calm, busy, share, pipe.batches)
    alone = play(calm, calm, [False] * (1 + int((end - start) / calm.latency)), 1)
    rows = [f"stage {i}" for i in range(len(calm.work))]
    text = (
        f"Above one batch alone (no prompts), below {pipe.batches} in flight, {_caption(calm, busy, share)} Letters "
        "are batches, numbers their steps, grey is the transfer into a stage, blank is idle. Stage times are those of "
        "the priced trace."
    )
    pictures = [
        timeline_svg(rows, _blocks(slots, first), end=end - start) for slots, first in ((alone, 0.0), (many, start))
    ]
    return Section(
        f"Batches over stages: {name}",
        text,
        tuple(pictures),
        _table(row, calm, flow),
        (f"A batch's step takes {float(np.ravel(flow.cycle)[0]) / MS:.2f} ms in the steady state.",),
    )


def _stretch(calm: StageTimes, busy: StageTimes, share: float, batches: int) -> tuple[list[Slot], float, float]:
    """(slots, start, end) to draw, in seconds: from empty stages on, or around a step with a chunk if any has one."""
    if not share:
        slots = play(calm, calm, [False] * (_STEPS * batches), batches)
        return slots, 0.0, max(slot.end for slot in slots)
    first = _WARM * batches
    long = first + _BEFORE * batches
    last = long + _AFTER * batches
    # Early stages are ahead of the last one by the batches in flight: they too are drawn to the end.
    kinds = busy_steps(share, last + batches + len(calm.work), long)
    slots = play(calm, busy, kinds, batches)
    by_step = {(slot.step * batches + slot.batch, slot.stage): slot for slot in slots}
    start, end = by_step[first, 0].begin, by_step[last, len(calm.work) - 1].end
    return [slot for slot in slots if slot.end > start and slot.hop_begin < end], start, end


def _caption(calm: StageTimes, busy: StageTimes, share: float) -> str:
    """What the lower timeline starts with, and what its framed steps are."""
    if not share:
        return "from the first step on."
    often = "all steps" if share >= 1 else f"{100 * share:.3g} % of all steps, one in {1 / share:.3g},"
    return (
        f"a stretch of the steady state around a framed step. Framed steps carry a chunk of a prompt, as {often} do; "
        f"they take {float(busy.slot) / MS:.1f} ms of the slowest stage, others {float(calm.slot) / MS:.1f} ms, and "
        "hold up the batches behind them."
    )


def _table(row: Row, calm: StageTimes, flow: Flow) -> tuple[tuple[str, ...], ...]:
    """Work and transfers of a step of decodes, and the mean time for which a batch takes the stage."""

    def percent(value: float) -> str:
        return f"{100 * value:.1f} %"

    head = ("", "layers", "layer equivalents", "work, ms", "transfer in, ms", "slot, ms", "share of the time")
    stages = [
        (
            f"stage {stage.stage}",
            str(stage.layers),
            str(stage.layer_equivalents),
            f"{float(np.ravel(work)[0]) / MS:.2f}",
            f"{float(np.ravel(hop)[0]) / MS:.3f}",
            f"{stage.slot_ms:.2f}",
            percent(stage.busy),
        )
        for stage, work, hop in zip(row.stages or (), calm.work, calm.hops, strict=True)
    ]
    causes = [(f"idle: {cause}", *[""] * 5, percent(float(np.ravel(flow.bubbles[cause])[0]))) for cause in CAUSES]
    return (head, *stages, *causes)


def _blocks(slots: list[Slot], start: float) -> list[Block]:
    """The slots on a time axis that begins at ``start``, numbered from the first step that shows."""
    out = []
    numbers = min(slot.step for slot in slots) - 1
    for slot in slots:
        label = f"{chr(ord('A') + slot.batch % 26)}{slot.step - numbers}"
        what = "with a chunk of a prompt" if slot.busy else "decode"
        since, begin = max(0.0, slot.hop_begin - start), max(0.0, slot.begin - start)
        if begin > since:
            out.append(Block(slot.stage, since, begin, -1, "", f"{label}: transfer"))
        detail = f"{label} on stage {slot.stage}, {what}: {(slot.end - slot.begin) / MS:.3f} ms"
        out.append(Block(slot.stage, begin, slot.end - start, slot.batch, label, detail, slot.busy))
    return out
