"""``msmodeling verify``: run a small copy of a model on several ranks and compare it with Transformers' own."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from cli.inference.common import add_layout_arguments, non_negative_int, print_json, print_tables, user_config

if TYPE_CHECKING:
    from rich.table import Table

    from tensor_cast.core.verify import PlannedLayout, Verification

EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    add_layout_arguments(parser)
    parser.description = (
        "Shrink the config, keep what decides how it is cut, run it on this machine's processors as the given layout "
        "(or, with every size at 1, as a few layouts that tell most) and compare logits and sampled tokens with "
        "Transformers' own model, executed ops with the trace. Exit code 0: equal; 1: different; 2: bad input."
    )
    parser.add_argument("--seed", type=non_negative_int, default=0, help="of weights and tokens (default 0)")
    parser.add_argument(
        "--dtype", choices=("float64", "float32"), default="float64", help="type of both sides (default float64)"
    )
    parser.add_argument("--plan", action="store_true", help="say what would be run, and run nothing")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default table)")


def run(args: argparse.Namespace) -> int:
    """Verify and print. Exit code 0 if everything is equal, 1 if anything differs."""
    from tensor_cast.core.verify import plan, verify

    config = user_config(args)
    if args.plan:
        layouts = plan(config)
        if args.format == "json":
            print_json({"model": args.model, "layouts": [layout.to_json() for layout in layouts]})
        else:
            _print_plan(args.model, layouts)
        return 0
    result = verify(config, seed=args.seed, dtype=args.dtype, progress=_progress)
    if args.format == "json":
        print_json(result.to_json())
    else:
        _print_result(result)
    return 0 if result.equal else EXIT_DIFFERENT


def _progress(line: str) -> None:
    """For whoever watches; nothing where standard error is read by a program."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")


def _print_plan(model: str, layouts: tuple[PlannedLayout, ...]) -> None:
    from rich.table import Table

    table = Table(title=f"{model}: what would be run", title_justify="left")
    for column in ("what", "layout", "runs as", "block"):
        table.add_column(column, justify="right" if column == "block" else "left")
    for layout in layouts:
        row = layout.to_json()
        table.add_row(row["what"], row["layout"], row["ran_as"], str(row["block_size"]))
    print_tables(table, _changes(layouts))


def _print_result(result: Verification) -> None:
    from rich.table import Table

    table = Table(
        title=f"{result.model_id} against Transformers, {result.dtype}, tolerance {result.tolerance:g}",
        title_justify="left",
    )
    for column in ("what", "layout", "ran as", "query lengths", "logits", "largest difference", "ops as traced", ""):
        table.add_column(column, justify="right" if column in ("logits", "largest difference") else "left")
    for layout in result.layouts:
        planned = layout.planned.to_json()
        table.add_row(
            planned["what"],
            planned["layout"],
            planned["ran_as"],
            ", ".join(f"{r.query}{' (chunks)' if r.prompt == 'chunks' else ''}" for r in layout.runs),
            f"{layout.compared:,}",
            f"{layout.max_abs_difference:.1e}",
            f"{sum(r.traced_ops for r in layout.runs):,}",
            "equal" if layout.equal else "DIFFERENT",
        )
    lines: list[Table | str] = [table, _changes(tuple(layout.planned for layout in result.layouts))]
    if result.equal:
        lines.append(f"equal: {result.compared:,} logits, largest difference {result.max_abs_difference:.1e}")
    else:
        lines.append(f"different: {result.first_mismatch}")
    print_tables(*lines)


def _changes(layouts: tuple[PlannedLayout, ...]) -> Table:
    """Fields that were made smaller; several values where layouts need different ones."""
    from rich.table import Table

    table = Table(title="shrunk", title_justify="left")
    for column in ("field", "whole", "small"):
        table.add_column(column)
    before: dict[str, Any] = {}
    after: dict[str, list[str]] = {}
    for layout in layouts:
        for change in layout.small.changes:
            before[change.field] = change.before
            value = _short(change.after)
            if value not in after.setdefault(change.field, []):
                after[change.field].append(value)
    for field in sorted(before):
        table.add_row(field, _short(before[field]), " or ".join(after[field]))
    return table


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 3:
        return f"{len(value)} entries"
    if isinstance(value, dict):
        return str(value.get("quant_method", f"{len(value)} entries"))
    return "none" if value is None else str(value)
