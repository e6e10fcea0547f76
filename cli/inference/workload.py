"""``msmodeling workload``: an example cost model, layout by layout, on the machinery of real models."""

from __future__ import annotations

import argparse

from cli.inference.common import print_json, print_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument("name", metavar="NAME", help="an embedded workload, or a YAML file")
    parser.add_argument("--replicas", action="store_true", help="also what replicas of the one-stage layouts serve")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default table)")


def run(args: argparse.Namespace) -> int:
    """Print the table. Exit code 0.

    Raises:
        ConfigError: no such workload, or a file that cannot be used.
    """
    from serving_cast.workload import load_workload

    workload = load_workload(args.name)
    rows = list(workload.rows())
    if args.replicas:
        most = max(row.devices for row in rows)
        rows += [
            workload.row(sizes, concurrency, replicas=most // sizes.tp)
            for concurrency in workload.concurrencies
            for sizes in workload.layouts
            if sizes.pp == 1 and sizes.tp < most and most % sizes.tp == 0 and concurrency >= most // sizes.tp
        ]
    if args.format == "json":
        print_json(
            [
                {
                    **row.sizes.model_dump(),
                    "replicas": row.replicas,
                    "devices": row.devices,
                    "concurrency": row.concurrency,
                    "tpot_ms": row.tpot_ms,
                    "tok_s": row.tokens_per_second,
                    "tok_s_per_device": row.tokens_per_second_per_device,
                    "utilization": float(row.flow.mean_utilisation),
                    "bubbles": {cause: float(share) for cause, share in row.flow.bubbles.items()},
                }
                for row in rows
            ]
        )
        return 0
    from rich.table import Table

    table = Table(title=workload.description, title_justify="left")
    for column in ("TP x PP", "replicas", "devices", "requests", "TPOT ms", "tok/s", "per device", "busy"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.sizes.tp} x {row.sizes.pp}",
            str(row.replicas),
            str(row.devices),
            str(row.concurrency),
            f"{row.tpot_ms:.2f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.tokens_per_second_per_device:.0f}",
            f"{100 * float(row.flow.mean_utilisation):.0f} %",
        )
    print_tables(table)
    return 0
