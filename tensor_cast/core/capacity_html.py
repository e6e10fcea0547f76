"""A capacity plan as a picture: memory of each stage against the budget, in the partitions that are compared."""

from __future__ import annotations

from pathlib import Path

from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_plan import CapacityPlan
from tensor_cast.core.capacity_report import notes, split_heading, split_note
from tensor_cast.core.html_report import Bar, Section, memory_svg, write_report
from tensor_cast.units import GIB

__all__ = ["write_capacity_report"]

#: Partitions drawn at most; a list of all of them stays a table.
_DRAWN = 6


def write_capacity_report(
    path: Path, planner: CapacityPlanner, plan: CapacityPlan, rows: list[tuple[str, CapacityPlan]]
) -> None:
    """Write the report to ``path``.

    Args:
        path: of an HTML file.
        planner: what planned.
        plan: the partition asked for, drawn first.
        rows: others beside it, with what they are.

    Raises:
        ConfigError: the file cannot be written.
    """
    config, capacity = planner.config, plan.capacity
    title = f"KV capacity of {planner.model.model_id} on {planner.device.name}"
    subtitle = (
        f"TP{config.tp_size} PP{config.pp_size}, {planner.form.name} cache, requests of up to "
        f"{capacity.max_model_len:,} tokens; engine {planner.engine.name}"
    )
    others = [(note, row) for note, row in rows if row.partition != plan.partition]
    # Of a long list, the ones that have a name.
    drawn = others if len(others) <= _DRAWN else [(note, row) for note, row in others if note]
    sections = [_section(plan, "this one", notes(planner, plan))]
    sections += [_section(row, note, [split_note(row)]) for note, row in drawn[:_DRAWN]]
    if rows:
        sections.append(Section("Partitions", table=_table(rows, split_heading(planner))))
    write_report(path, title, subtitle, sections)


def _section(plan: CapacityPlan, note: str, remarks: list[str]) -> Section:
    capacity = plan.capacity
    text = (
        f"{capacity.kv_tokens:,} tokens in {capacity.num_blocks:,} blocks, {capacity.max_concurrency:.2f} requests at "
        "their longest."
    )
    if len(plan.stages) > 1:
        text += f" Stage {capacity.binding_stage} binds; idle is what the others cannot use."
    text += "".join(f" {remark}." for remark in remarks if remark)
    name = ",".join(map(str, plan.partition))
    return Section(f"{name}: {note}" if note else name, text, (memory_svg(_bars(plan)),))


def _bars(plan: CapacityPlan) -> list[Bar]:
    bars = []
    for index, (stage, rank) in enumerate(zip(plan.stages, plan.capacity.ranks, strict=True)):
        parts = {
            "weights": stage.weights,
            "non-torch": stage.non_torch,
            "activation": stage.activation,
            "graphs": stage.graph,
            "KV cache": rank.allocated,
            "KV idle": rank.idle,
        }
        shown = tuple((name, value / GIB) for name, value in parts.items() if value is not None)
        label = f"stage {index}: {stage.layers.start}-{stage.layers.stop - 1}"
        bars.append(Bar(label, shown, stage.budget / GIB))
    return bars


def _table(rows: list[tuple[str, CapacityPlan]], unsafe: str) -> tuple[tuple[str, ...], ...]:
    lines = [("split", "KV tokens", "binds", "idle, GiB", "layer equivalents", unsafe, "")]
    for note, row in rows:
        lines.append(
            (
                ",".join(map(str, row.partition)),
                f"{row.capacity.kv_tokens:,}",
                f"stage {row.capacity.binding_stage}",
                f"{row.idle_bytes / GIB:.2f}",
                " ".join(map(str, row.equivalents)),
                ",".join(map(str, row.unsafe_layers)),
                "; ".join(word for word in (note, "refused" if row.refused else "") if word),
            )
        )
    return tuple(lines)
