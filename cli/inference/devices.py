"""``msmodeling devices``: the embedded devices."""

from __future__ import annotations

import argparse
from typing import Any

from cli.inference.common import print_json, print_tables

#: Columns of peak rates: heading -> compute dtype.
RATES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "int8": "int8", "fp4": "float4_e2m1fn"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default table)")


def run(args: argparse.Namespace) -> int:
    """Print the list. Exit code 0."""
    from tensor_cast.device.catalog import device_names, load_device

    devices = [load_device(name) for name in device_names()]
    if args.format == "json":
        print_json([device.model_dump(mode="json") for device in devices])
        return 0
    from rich.table import Table

    table = Table(title="Embedded devices (dense TFLOP/s; TB/s; GB/s per direction)", title_justify="left")
    for column in ("device", "vendor", *RATES, "memory GiB", "TB/s", "links"):
        table.add_column(column, justify="left" if column in ("device", "vendor", "links") else "right")
    unverified = False
    for device in devices:
        rates: list[Any] = [device.peak_flops.get(dtype) for dtype in RATES.values()]
        marks = [rate is not None and not rate.verified for rate in (*rates, device.memory_bandwidth)]
        unverified |= any(marks)
        table.add_row(
            device.name,
            device.vendor,
            *(
                "-" if r is None else f"{r.value / 1e12:,.1f}{'*' if m else ''}"
                for r, m in zip(rates, marks, strict=False)
            ),
            f"{device.usable_memory_bytes.value / 1024**3:,.1f}",
            f"{device.memory_bandwidth.value / 1e12:.3f}{'*' if marks[-1] else ''}",
            ", ".join(f"{t.name} {t.size or 'any'}: {t.bandwidth.value / 1e9:,.0f}" for t in device.tiers),
        )
    print_tables(table, *(["* not verified against a public source"] if unverified else []))
    return 0
