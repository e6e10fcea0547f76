"""Options and printing that several sub-commands share."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.inference.grid import Grid

if TYPE_CHECKING:
    from rich.table import Table

    from tensor_cast.core.user_config import UserInputConfig


def positive_int(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value


def non_negative_int(text: str) -> int:
    """An integer of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, found {text}")
    return value


# argparse puts the name of the type into "invalid ... value".
positive_int.__name__ = "integer"
non_negative_int.__name__ = "integer"


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """The device, and the machine that it stands in."""
    parser.add_argument(
        "--device", required=True, help="name of a device (msmodeling devices lists them), or the path of a YAML file"
    )
    parser.add_argument(
        "--topology",
        metavar="T",
        help="links between the devices: a name (msmodeling devices) or the path of a YAML file; also DEVICE@T",
    )


def device_value(args: argparse.Namespace) -> str:
    """The device in its machine, ``DEVICE@TOPOLOGY``.

    Raises:
        ConfigError: two topologies are named.
    """
    from tensor_cast.errors import ConfigError

    device: str = args.device
    if args.topology is None:
        return device
    if "@" in device and not Path(device).is_file():
        raise ConfigError(f"--device {device} names a topology already; leave out --topology {args.topology}")
    return f"{device}@{args.topology}"


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, engine and the sizes of the parallel axes of one layout."""
    parser.add_argument("model", metavar="MODEL", help="hub id of an embedded config, or a local folder")
    parser.add_argument("--engine", help="vllm or vllm-ascend (default: the engine of the device's vendor)")
    layout = parser.add_argument_group("layout")
    layout.add_argument("--tp-size", type=positive_int, default=1, help="tensor parallel ranks (default 1)")
    layout.add_argument("--dp-size", type=positive_int, default=1, help="data parallel ranks of attention (default 1)")
    layout.add_argument("--ep-size", type=positive_int, default=1, help="expert parallel ranks: 1 or tp*dp (default 1)")
    layout.add_argument("--moe-dp-size", type=positive_int, default=1, help="copies of the experts (default 1)")
    layout.add_argument("--dcp-size", type=positive_int, default=1, help="decode context parallel ranks (default 1)")
    layout.add_argument("--dcp-semantics", help="vllm-ascend, vllm or rfc (default: the engine's)")
    layout.add_argument(
        "--cp-kv-cache-interleave-size", type=positive_int, default=1, help="consecutive tokens on one rank (default 1)"
    )
    layout.add_argument("--block-size", type=positive_int, help="tokens in a KV block (default: the engine's)")
    layout.add_argument("--num-mtp-tokens", type=non_negative_int, default=0, help="draft tokens a step (default 0)")


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Pipeline stages of one layout."""
    stages = parser.add_argument_group("pipeline stages")
    stages.add_argument("--pp-size", type=positive_int, default=1, help="pipeline stages (default 1)")
    stages.add_argument(
        "--pp-layer-partition", metavar="L,L,...", help="layers of each stage (default: vLLM's own rule)"
    )
    stages.add_argument(
        "--dsa-split",
        metavar="HOW",
        help="where a stage lacks the top-k indices that its first layers reuse: self-compute (those layers get an "
        "indexer), send-indices or unsafe (default: refused)",
    )


def pipeline_values(args: argparse.Namespace) -> dict[str, Any]:
    """The values that :func:`add_pipeline_arguments` read, by field of ``UserInputConfig``."""
    from tensor_cast.pipeline_partition import parse_dsa_split

    return {
        "pp_size": args.pp_size,
        "pp_layer_partition": args.pp_layer_partition,
        "dsa_split": None if args.dsa_split is None else parse_dsa_split(args.dsa_split),
    }


def layout_values(args: argparse.Namespace) -> dict[str, Any]:
    """The values that :func:`add_layout_arguments` read, by field of ``UserInputConfig``."""
    names = (
        "model engine tp_size dp_size ep_size moe_dp_size dcp_size dcp_semantics cp_kv_cache_interleave_size "
        "block_size num_mtp_tokens"
    )
    return {name: getattr(args, name) for name in names.split()}


def user_config(args: argparse.Namespace, **values: Any) -> UserInputConfig:
    """The layout options plus ``values``, validated."""
    from tensor_cast.core.user_config import UserInputConfig

    return UserInputConfig.create(**layout_values(args), **values)


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


def print_tables(*tables: Grid | Table | str) -> None:
    """Tables and lines on standard output: as wide as they need when piped, and then without escape codes."""
    from rich.console import Console
    from rich.table import Table

    piped = not sys.stdout.isatty()
    console = Console(width=200 if piped else None, no_color=piped, highlight=False, soft_wrap=False)
    for table in tables:
        if isinstance(table, Grid):
            fitted, dropped = table.fitted(console)
            console.print(fitted)
            if dropped:
                console.print(f"Left out for want of width: {'; '.join(dropped)}")
            continue
        if isinstance(table, Table):
            for column in table.columns:
                # Words make room, numbers stay whole.
                column.no_wrap = column.no_wrap or column.justify == "right"
        console.print(table)


def format_bytes(value: float) -> str:
    """``262,656 B``, ``1.50 MiB``: three significant digits above a MiB, exact below."""
    if value < 1024**2:
        return f"{value:,.0f} B"
    for unit, size in (("MiB", 1024**2), ("GiB", 1024**3)):
        if value < 1024 * size or unit == "GiB":
            return f"{value / size:,.2f} {unit}"
    raise AssertionError("unreachable")
