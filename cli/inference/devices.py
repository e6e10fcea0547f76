"""``msmodeling devices``: the embedded devices, and the topologies that they can be put into."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from cli.inference.common import print_json, print_tables
from cli.inference.grid import Grid

if TYPE_CHECKING:
    from tensor_cast.device.profile import Tier

T = TypeVar("T")

#: Columns of peak rates: heading -> compute dtype.
RATES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "int8": "int8", "fp4": "float4_e2m1fn"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default table)")


def run(args: argparse.Namespace) -> int:
    """Print the list. Exit code 0; a file that cannot be read is named on standard error."""
    from tensor_cast.device.catalog import device_names, load_device
    from tensor_cast.device.topology_file import load_topology, topology_names

    devices = _readable(device_names(), load_device)
    if args.format == "json":
        print_json([device.model_dump(mode="json") for device in devices])
        return 0
    table = Grid(
        "Embedded devices (dense TFLOP/s; TB/s; GB/s per direction)",
        ("device", "vendor", *RATES, "memory GiB", "TB/s", "links"),
        words=("device", "vendor", "links"),
        wraps="links",
        droppable=("vendor", "fp4", "int8", "fp8", "links"),
    )
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
            _links(device.tiers),
        )
    columns = ("topology", "description", "links")
    places = Grid("Topologies (--topology NAME, or DEVICE@NAME)", columns, words=columns, wraps="links")
    for topology in _readable(topology_names(), load_topology):
        places.add_row(topology.name, topology.description, _links(topology.tiers))
    print_tables(table, *(["* not verified against a public source"] if unverified else []), places)
    return 0


def _readable(names: Iterable[str], load: Callable[[str], T]) -> list[T]:
    """What can be loaded; of the rest one line each on standard error."""
    from tensor_cast.errors import ConfigError

    found = []
    for name in names:
        try:
            found.append(load(name))
        except ConfigError as error:
            sys.stderr.write(f"warning: left out: {error}\n")
    return found


def _links(tiers: Iterable[Tier]) -> str:
    """Size and bandwidth of each tier, innermost first."""
    return ", ".join(f"{t.name} {t.size or 'any'}: {t.bandwidth.value / 1e9:,.0f}" for t in tiers)
