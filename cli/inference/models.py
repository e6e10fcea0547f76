"""``msmodeling models``: the embedded model configs."""

from __future__ import annotations

import argparse
from typing import Any

from cli.inference.common import print_json, print_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default table)")


def run(args: argparse.Namespace) -> int:
    """Print the list. Exit code 0."""
    from tensor_cast.model_catalog import load_model_config, model_names

    rows: list[dict[str, Any]] = []
    for name in model_names():
        model = load_model_config(name)
        rows.append(
            {
                "model": name,
                "model_type": model.model_type,
                "attention": str(model.attention),
                "layers": model.num_hidden_layers,
                "hidden_size": model.hidden_size,
                "heads": model.num_attention_heads,
                "kv_heads": 1 if model.kv_lora_rank else model.num_key_value_heads,
                "experts": model.num_experts,
                "mtp_layers": model.num_nextn_predict_layers,
                "quantization": (model.quantization or {}).get("quant_method"),
            }
        )
    if args.format == "json":
        print_json(rows)
        return 0
    from rich.table import Table

    table = Table(title="Embedded models", title_justify="left")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if column in ("model", "model_type") else "right")
    for row in rows:
        table.add_row(*("-" if value in (None, 0) else str(value) for value in row.values()))
    print_tables(table)
    return 0
