"""``msmodeling trace``: the ops of one step on one rank, with shapes, repeats and collectives."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cli.inference.common import (
    add_layout_arguments,
    add_pipeline_arguments,
    format_bytes,
    non_negative_int,
    pipeline_values,
    positive_int,
    print_json,
    print_tables,
    user_config,
)

if TYPE_CHECKING:
    from tensor_cast.core.trace_view import TraceView
    from tensor_cast.ir.record import OpRecord, TensorSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    add_layout_arguments(parser)
    add_pipeline_arguments(parser)
    parser.add_argument("--stage", type=non_negative_int, metavar="N", help="pipeline stage to show (default 0)")
    parser.add_argument(
        "--phase", choices=("decode", "prefill"), default="decode", help="kind of step (default decode)"
    )
    sizes = parser.add_argument_group("sizes (each left out stays a symbol)")
    sizes.add_argument("--batch-size", "--num-queries", type=positive_int, help="requests of one rank (B)")
    sizes.add_argument("--query-len", "--query-length", type=positive_int, help="tokens of a request in this step (Q)")
    sizes.add_argument(
        "--context-len",
        "--context-length",
        type=non_negative_int,
        help="tokens of a request in the cache, this step's included (S); 0: a fresh prompt, S = Q",
    )
    quant = parser.add_argument_group("quantisation (default: as the config says)")
    quant.add_argument("--quantize-linear-action", help="DISABLED, W8A8_DYNAMIC, W8A16, W4A8, W4A16, FP8, MXFP4")
    quant.add_argument("--quantize-attention-action", help="DISABLED, INT8, FP8")
    parser.add_argument("--axis", choices=("tp", "dp", "ep", "dcp", "pp"), help="show only the collectives of one axis")
    parser.add_argument("--no-fusion", action="store_true", help="show the eager ops instead of the fused kernels")
    parser.add_argument("--no-cache", action="store_true", help="trace anew instead of reading the trace cache")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default table)")


def run(args: argparse.Namespace) -> int:
    """Print the trace. Exit code 0."""
    from tensor_cast import trace

    config = user_config(
        args,
        **pipeline_values(args),
        phase=args.phase,
        quantize_linear_action=args.quantize_linear_action,
        quantize_attention_action=args.quantize_attention_action,
        fusion=not args.no_fusion,
    )
    result = trace(
        config,
        batch_size=args.batch_size,
        query_len=args.query_len,
        context_len=args.context_len,
        stage=args.stage,
        use_cache=not args.no_cache,
    )
    if args.axis:
        result = result.collectives_of(args.axis)
    if args.format == "json":
        print_json(result.to_json())
    else:
        _print_table(result)
    return 0


def _shape(tensor: TensorSpec) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _print_table(view: TraceView) -> None:
    from rich.table import Table

    ops, symbols = view.ops, view.symbols
    table = Table(title=view.title, title_justify="left", show_lines=False)
    for column in ("op", "module", "repeat", "inputs", "outputs", "collective"):
        table.add_column(column, justify="right" if column == "repeat" else "left", overflow="fold")
    for op in ops:
        table.add_row(
            op.name,
            op.module,
            str(op.repeat),
            "\n".join(map(_shape, op.inputs)),
            "\n".join(map(_shape, op.outputs)),
            _collective(op, symbols),
        )
    legend = {"B": "requests of one rank", "Q": "query tokens of a request", "S": "tokens of a request in the cache"}
    lines: list[Any] = [table, f"{len(ops)} ops, {sum(op.repeat for op in ops)} calls; coverage {view.coverage:.1%}"]
    if symbols:
        lines.append("; ".join(f"{s} = {legend[s]}" for s in symbols))
    if view.unpriced:
        lines.append("unpriced: " + ", ".join(f"{name} x{count}" for name, count in view.unpriced.items()))
    print_tables(*lines, *view.handover.notes)


def _collective(op: OpRecord, symbols: tuple[str, ...]) -> str:
    if not op.is_collective:
        return ""
    size = "" if symbols else f", {format_bytes(op.collective_bytes({}) or 0)}"
    return f"{op.axis} x{op.group_size}{size}"
