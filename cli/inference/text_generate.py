"""``msmodeling text_generate``: price one step of one layout."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from cli.inference.common import (
    add_device_arguments,
    add_layout_arguments,
    add_pipeline_arguments,
    device_value,
    non_negative_int,
    pipeline_values,
    positive_int,
    print_json,
    print_tables,
    user_config,
)
from cli.inference.grid import Grid

if TYPE_CHECKING:
    from tensor_cast.core.model_runner import RunResult
    from tensor_cast.core.pipeline_step import PipelineStep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    add_layout_arguments(parser)
    add_pipeline_arguments(parser)
    parser.add_argument(
        "--pp-extra-batches",
        type=non_negative_int,
        metavar="N",
        help="batches in flight beyond one for each stage (default: the engine's, 0)",
    )
    add_device_arguments(parser)
    step = parser.add_argument_group("step")
    step.add_argument(
        "--num-queries", "--batch-size", type=positive_int, default=1, help="requests of one data-parallel rank"
    )
    step.add_argument("--query-length", "--query-len", type=positive_int, help="tokens of a request in this step")
    step.add_argument(
        "--context-length",
        "--context-len",
        type=non_negative_int,
        default=0,
        help="tokens of a request in the cache, this step's included (0: a fresh prompt)",
    )
    step.add_argument("--decode", action="store_true", help="a decode step (default: prefill)")
    parser.add_argument("--quantize-linear-action", help="DISABLED, W8A8_DYNAMIC, W8A16, W4A8, W4A16, FP8, MXFP4")
    parser.add_argument("--quantize-attention-action", help="DISABLED, INT8, FP8")
    parser.add_argument("--reserved-memory-gb", type=float, default=0.0, help="GiB to keep free (default 0)")
    parser.add_argument("--no-fusion", action="store_true", help="price the eager ops one by one")
    parser.add_argument("--strict", action="store_true", help="an op without a cost function is an error")
    parser.add_argument("--no-cache", action="store_true", help="trace anew instead of reading the trace cache")
    parser.add_argument("--chrome-trace-file", metavar="FILE", help="write the step as a Chrome trace (JSON)")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default table)")
    parser.add_argument("--top", type=positive_int, default=15, help="ops to list (default 15)")


def run(args: argparse.Namespace) -> int:
    """Print the price of the step. Exit code 0."""
    from tensor_cast.core.model_runner import ModelRunner
    from tensor_cast.ir.record import Phase

    config = user_config(
        args,
        **pipeline_values(args),
        pp_extra_batches=args.pp_extra_batches,
        device=device_value(args),
        phase=Phase.DECODE if args.decode else Phase.PREFILL,
        num_queries=args.num_queries,
        query_length=args.query_length,
        context_length=args.context_length,
        quantize_linear_action=args.quantize_linear_action,
        quantize_attention_action=args.quantize_attention_action,
        reserved_memory_gb=args.reserved_memory_gb,
        fusion=not args.no_fusion,
        strict=args.strict,
    )
    result = ModelRunner(config, use_cache=not args.no_cache).run()
    if args.chrome_trace_file:
        from tensor_cast.core.chrome_trace import write_chrome_trace

        write_chrome_trace(result, args.chrome_trace_file)
    if args.format == "json":
        print_json(result.to_json())
    else:
        _print_tables(result, args.top)
    for warning in result.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    return 0


def _print_tables(result: RunResult, top: int) -> None:
    from rich.table import Table

    summary = Table(show_header=False)
    summary.add_column("what")
    summary.add_column("value", justify="right")
    for name, value in _summary(result):
        summary.add_row(name, value)

    ops = Table(title="Time by op", title_justify="left")
    for column, justify in (
        ("op", "left"),
        ("module", "left"),
        ("calls", "right"),
        ("us each", "right"),
        ("ms", "right"),
        ("share", "right"),
        ("bound", "left"),
    ):
        ops.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    rows = sorted(result.estimate.ops, key=lambda row: -row.total_s)
    for row in rows[:top]:
        ops.add_row(
            row.name,
            row.module,
            str(row.repeat),
            f"{row.seconds * 1e6:,.2f}",
            f"{row.total_s * 1e3:,.3f}",
            f"{row.total_s / result.step_s:.1%}",
            row.bound,
        )
    rest = sum(row.total_s for row in rows[top:])
    if rest:
        ops.add_row(f"{len(rows) - top} more", "", "", "", f"{rest * 1e3:,.3f}", f"{rest / result.step_s:.1%}", "")
    host = result.estimate.host_s
    ops.add_row("host", "", "1", f"{host * 1e6:,.2f}", f"{host * 1e3:,.3f}", f"{host / result.step_s:.1%}", "host")

    layers = Table(title="Time by layer", title_justify="left")
    for column in ("layers", "count", "us each", "ms"):
        layers.add_column(column, justify="left" if column == "layers" else "right")
    for layer in result.layers():
        layers.add_row(
            layer.name,
            str(layer.count),
            f"{layer.total_s / layer.count * 1e6:,.1f}",
            f"{layer.total_s * 1e3:,.3f}",
        )
    stages: list[Grid | str] = (
        [] if result.pipeline is None else [_stage_table(result.pipeline), *result.pipeline.handover.notes]
    )
    print_tables(_title(result), summary, *stages, ops, layers)


def _stage_table(pipeline: PipelineStep) -> Grid:
    table = Grid(
        f"Stages, {pipeline.batches} batches in flight",
        (
            *("stage", "layers", "layer equivalents", "work ms", "transfer in ms", "slot ms", "busy"),
            *("weights GiB", "KV GiB", "activation GiB", "in use GiB", "fits"),
        ),
        droppable=("layer equivalents", "activation GiB", "transfer in ms", "weights GiB", "KV GiB"),
    )
    for stage in pipeline.stages():
        table.add_row(
            *(f"{stage[key]}" for key in ("stage", "layers", "layer_equivalents")),
            *(f"{stage[key]:,.3f}" for key in ("work_ms", "transfer_in_ms", "slot_ms")),
            f"{stage['busy']:.1%}",
            *(f"{stage[key]:,.3f}" for key in ("weights_gib", "kv_cache_size_gb", "activation_gib")),
            f"{stage['memory_total_gib']:,.3f}",
            "yes" if stage["fits"] else "no",
        )
    return table


def _title(result: RunResult) -> str:
    sizes = result.sizes
    return (
        f"{result.model.model_id} on {result.device.name} ({result.engine.name}), {result.config.phase}: "
        f"{sizes['B']} requests x {sizes['Q']} tokens, context {sizes['S']}"
    )


def _summary(result: RunResult) -> list[tuple[str, str]]:
    memory = result.memory
    tokens = result.sizes["B"] * result.sizes["Q"]
    pipeline = result.pipeline
    if pipeline is None:
        times = [("step", f"{result.step_s * 1e3:,.3f} ms")]
        rate, cached = tokens / result.step_s, "KV cache of this batch"
    else:
        rate, cached = pipeline.batches * tokens / (pipeline.cycle_ms * 1e-3), "KV cache of all batches in flight"
        # How many drafts are accepted, and so tokens gained, is not known here.
        paced = "TPOT" if result.config.phase == "decode" and result.sizes["Q"] == 1 else "from step to step"
        busy = [float(flow.mean_utilisation) for flow in (pipeline.flow, pipeline.alone)]
        times = [
            ("step of one batch, through all stages", f"{result.step_s * 1e3:,.3f} ms"),
            ("between batches, at the slowest stage", f"{pipeline.slot_ms:,.3f} ms"),
            (f"{paced}, {pipeline.batches} batches in flight", f"{pipeline.cycle_ms:,.3f} ms"),
            (f"stages busy, {pipeline.batches} batches in flight", f"{busy[0]:.1%}"),
            ("stages busy, one batch alone", f"{busy[1]:.1%}"),
        ]
    rows: list[tuple[str, Any]] = [
        *times,
        ("bound", result.estimate.bound),
        ("tokens per second and rank", f"{rate:,.1f}"),
        ("weights", f"{memory.weights_gib:,.3f} GiB"),
        (cached, f"{result.kv_cache_size_gb:,.3f} GiB"),
        ("activations, kept free", f"{memory.activation_gib:,.3f} GiB"),
        ("activation peak of this step", f"{result.step_activation / 1024**3:,.3f} GiB"),
        ("memory in use", f"{memory.total_gib:,.3f} GiB"),
        ("memory available", f"{memory.available_gib:,.3f} GiB"),
        ("fits", "yes" if memory.fits else f"no, {memory.total_gib - memory.available_gib:,.3f} GiB too much"),
        ("coverage", f"{result.estimate.coverage:.1%}"),
    ]
    return rows
