"""A summary as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from serving_cast.config import Mode
from serving_cast.service.optimizer_summary import FailedSummary, OptimizerSummary, Summary
from serving_cast.service.rows import Rejection, Row
from serving_cast.service.utils import format_parallel_label

__all__ = ["renderables"]

_PARETO_ROWS = 10
_REJECTION_ROWS = 8
_EXAMPLES = 3
#: Causes of idle time on the line of the best row, each with a share that does not print as 0 %.
_CAUSES = 2
_LEAST_SHARE = 0.005


def renderables(summary: Summary, width: int) -> list[Table | Text]:
    """Header, best, candidates, Pareto front and rejections, in this order, for ``width`` characters."""
    if isinstance(summary, FailedSummary):
        return [Text(summary.message(), style="bold red")]
    config = summary.setting.config
    out: list[Table | Text] = [Text("\n").join(_header(summary)), Text("\n").join(_best(summary))]
    for phase in summary.phases:
        rows = [row for row in summary.candidates if row.phase == phase]
        if rows:
            title = f"Top candidates ({min(config.top, len(rows))} of {len(rows)} feasible layouts)"
            title = f"{title}: {phase}" if len(summary.phases) > 1 else title
            out.append(_rows_table(title, rows[: config.top], width))
    for phase in summary.phases:
        rows = [row for row in summary.pareto if row.phase == phase]
        if len(rows) > 1:
            shown = _spread(rows, _PARETO_ROWS)
            aims = "TTFT" if phase == "prefill" else "tok/s per user"
            title = f"Pareto front of {phase}: {aims} against tok/s per device ({len(shown)} of {len(rows)} points)"
            out.append(_rows_table(title, shown, width))
    if summary.rejections:
        out.append(_rejection_table(summary.rejections))
    return out


def _header(summary: OptimizerSummary) -> list[Text]:
    s = summary.setting
    w, c = s.workload, s.config
    limits = [
        f"{name} <= {value:g} ms"
        for name, value in (("TTFT", summary.limits.ttft_ms), ("TPOT", summary.limits.tpot_ms))
        if value is not None
    ]
    work = f"{w.input_length} in, {w.output_length} out"
    if c.max_concurrency is not None:
        work += f", at most {c.max_concurrency} requests in flight"
    if w.prefix_cache_hit_rate:
        work += f", {100 * w.prefix_cache_hit_rate:g} % of the prompt cached"
    if w.num_mtp_tokens:
        rates = ", ".join(f"{rate:g}" for rate in w.mtp_acceptance_rates)
        work += f", {w.num_mtp_tokens} draft tokens (acceptance {rates}: {w.tokens_per_step:.2f} tokens a step)"
    engine = (
        f"engine {s.engine.name}, DCP semantics {s.dcp_semantics}, KV {s.quant.kv_dtype}, "
        f"block {s.block_size}, {s.budget} tokens a step; weights: {s.quant.source}"
    )
    lines = (
        f"{s.model.model_id} on {c.num_devices} x {s.device.name}, {c.mode.value.replace('_', ' ')}",
        engine,
        f"workload: {work}; limits: {', '.join(limits) or 'none'}",
    )
    return [Text(line) for line in lines]


def _best(summary: OptimizerSummary) -> list[Text]:
    if not summary.feasible:
        return [Text(summary.message(), style="bold red")]
    out: list[Text] = []
    choice = summary.choice
    if choice is not None:
        out.append(
            Text(
                f"best: {choice.x} prefill x {choice.prefill.parallel} + {choice.y} decode x {choice.decode.parallel}: "
                f"{choice.requests_per_s:.2f} requests/s, {choice.throughput_tok_s:,.0f} tok/s "
                f"({choice.tok_s_per_device:,.0f} per device), TTFT {choice.ttft_ms:,.0f} ms "
                f"(KV transfer {choice.kv_transfer_ms:.1f} ms), TPOT {choice.tpot_ms:.2f} ms",
                style="bold",
            )
        )
    elif summary.setting.config.mode is Mode.DISAGGREGATED:
        out += [line for row in map(summary.best_of, summary.phases) if row is not None for line in _best_lines(row)]
    else:
        out += _best_lines(summary.candidates[0])
    note = summary.message()
    if note:
        out.append(Text(note))
    if any(row.coverage < 1 for row in summary.candidates):
        least = min(row.coverage for row in summary.candidates)
        out.append(Text(f"coverage is {100 * least:.1f} %: some ops have no price and add no time", style="yellow"))
    return out


def _best_lines(row: Row) -> list[Text]:
    return [Text(_best_line(row), style="bold"), *(Text(line) for line in _stage_lines(row))]


def _stage_lines(row: Row) -> list[str]:
    """Which stage is the straggler, side by side."""
    stages = row.stages or ()
    if not stages:
        return []

    def each(values: Iterable[object]) -> str:
        return " | ".join(map(str, values))

    layers = each(stage.layers for stage in stages)
    equivalents = each(stage.layer_equivalents for stage in stages)
    counted = f" ({equivalents} with each draft pass counted)" if equivalents != layers else ""
    slots, busy = each(f"{stage.slot_ms:,.2f}" for stage in stages), each(f"{stage.busy:.0%}" for stage in stages)
    causes = sorted(row.pp_idle or (), key=lambda cause: -cause[1])
    idle = ", ".join(f"{name} {share:.0%}" for name, share in causes[:_CAUSES] if share >= _LEAST_SHARE)
    why = f"; idle for {idle}" if idle else ""
    time = f"{slots} ms for a batch, busy {busy} of a cycle of {row.cycle_ms:,.2f} ms{why}"
    return [f"its stages: {layers} layers{counted}, {time}"]


def _best_line(row: Row) -> str:
    prefix = "best" if row.phase == "aggregated" else f"best {row.phase}"
    latency = [f"TTFT {row.ttft_ms:,.0f} ms"] if row.ttft_ms is not None else []
    latency += [f"TPOT {row.tpot_ms:.2f} ms"] if row.tpot_ms is not None else []
    copies = f" x {row.replicas} replicas" if row.replicas > 1 else ""
    return (
        f"{prefix}: {row.parallel}{copies} at batch {row.batch_size}: {row.throughput_tok_s:,.0f} tok/s "
        f"({row.tok_s_per_device:,.0f} per device), {', '.join(latency)}"
    )


def _table(title: str) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


#: Column, how a row fills it, and its rank: on a narrow terminal the columns of highest rank go first.
_COLUMNS: tuple[tuple[str, Callable[[Row], str], int], ...] = (
    ("parallel", lambda row: row.parallel, 0),
    ("dcp", lambda row: str(row.dcp), 1),
    ("TTFT ms", lambda row: _number(row.ttft_ms, 0), 0),
    ("TPOT ms", lambda row: _number(row.tpot_ms, 2), 0),
    ("tok/s", lambda row: _number(row.throughput_tok_s, 0), 0),
    ("per device", lambda row: _number(row.tok_s_per_device, 0), 1),
    ("per user", lambda row: _number(row.tok_s_per_user, 1), 3),
    ("batch", lambda row: str(row.batch_size), 0),
    ("concurrency", lambda row: str(row.concurrency), 4),
    ("weights", lambda row: _number(row.weights_gib, 1), 2),
    ("KV", lambda row: _number(row.kv_cache_size_gb, 2), 2),
    ("activ.", lambda row: _number(row.activation_gib, 2), 3),
    ("other", lambda row: _number(row.overhead_gib, 2), 3),
    ("total GiB", lambda row: _number(row.memory_total_gib, 1), 1),
    ("of", lambda row: _number(row.memory_available_gib, 1), 4),
    ("bound", lambda row: row.bound, 1),
)
_GAP = 3  # between two columns


def _rows_table(title: str, rows: Sequence[Row], width: int) -> Table:
    columns = [(name, [fill(row) for row in rows], rank) for name, fill, rank in _COLUMNS]
    sizes = {name: max(map(len, (name, *cells))) + _GAP for name, cells, _ in columns}
    while sum(sizes[name] for name, _, _ in columns) > width:
        last = max(rank for _, _, rank in columns)
        if last == 0:
            break
        dropped = next(name for name, _, rank in reversed(columns) if rank == last)
        columns = [column for column in columns if column[0] != dropped]
    table = _table(title)
    for name, _, _ in columns:
        table.add_column(name, justify="left" if name in ("parallel", "bound") else "right", no_wrap=True)
    for index in range(len(rows)):
        table.add_row(*(cells[index] for _, cells, _ in columns))
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    """At most ``count`` rows, evenly over the front, both ends included."""
    if len(rows) <= count:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def _rejection_table(rejections: Sequence[Rejection]) -> Table:
    """One line per rule, the one with most layouts first."""
    groups: dict[str, list[Rejection]] = {}
    for rejection in rejections:
        groups.setdefault(rejection.rule, []).append(rejection)
    table = _table(f"Rejected layouts: {len(rejections)}")
    for name in ("rule", "layouts", "for example", "need", "have", "remedy"):
        table.add_column(name, justify="right" if name == "layouts" else "left", overflow="fold")
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    for rule, group in ordered[:_REJECTION_ROWS]:
        nearest_first = sorted(group, key=lambda r: r.excess)
        labels = dict.fromkeys(format_parallel_label(r.parallel) for r in nearest_first)
        sample = ", ".join(list(labels)[:_EXAMPLES]) + (" ..." if len(labels) > _EXAMPLES else "")
        first = nearest_first[0]
        cells = (rule, str(len(group)), sample, first.need, first.have, first.remedy)
        table.add_row(*(Text(cell) for cell in cells))
    if len(ordered) > _REJECTION_ROWS:
        rest = sum(len(group) for _, group in ordered[_REJECTION_ROWS:])
        table.add_row(Text("others"), str(rest))
    return table
