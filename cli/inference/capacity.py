"""``msmodeling capacity``: the KV cache that a layout has room for, stage by stage, and the best pipeline partition."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cli.inference.common import (
    add_device_arguments,
    add_layout_arguments,
    device_value,
    layout_values,
    positive_int,
    print_json,
    print_tables,
)
from cli.inference.grid import Grid

if TYPE_CHECKING:
    from tensor_cast.core.capacity import CapacityPlanner
    from tensor_cast.core.capacity_plan import CapacityPlan
    from tensor_cast.core.measured import Measured

_GIB = 1024**3


def _gib_list(text: str) -> tuple[float, ...]:
    """Numbers separated by commas, for argparse."""
    return tuple(float(field) for field in text.split(","))


_gib_list.__name__ = "list of GiB"


def _layer_list(text: str) -> tuple[int, ...]:
    """Layers of each stage, separated by commas, for argparse."""
    return tuple(positive_int(field) for field in text.split(","))


_layer_list.__name__ = "list of layers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    add_device_arguments(parser)
    add_layout_arguments(parser)
    layout = parser.add_argument_group("pipeline stages")
    layout.add_argument("--pp-size", type=positive_int, default=1, help="pipeline stages (default 1)")
    layout.add_argument(
        "--pp-layer-partition",
        metavar="A,B|auto|all",
        help="layers of each stage; auto: the split with most KV blocks; all: every split (default: the engine's rule)",
    )
    layout.add_argument(
        "--dsa-split",
        choices=("self-compute", "send-indices", "unsafe"),
        help="layers that would reuse top-k indices of the stage before: give them an indexer, send the indices, or "
        "go on with wrong outputs (default: refuse)",
    )
    engine = parser.add_argument_group("engine (default: the engine's own value)")
    engine.add_argument(
        "--kv-cache-dtype", default="auto", help="fp8, fp8_ds_mla, int8 ... (default auto: the model's)"
    )
    engine.add_argument("--gpu-memory-utilization", type=float, help="share of usable memory that the engine takes")
    engine.add_argument(
        "--max-model-len", type=positive_int, help="tokens of the longest request (default: the model's)"
    )
    engine.add_argument(
        "--max-num-batched-tokens", "--max-batched-tokens", type=positive_int, help="tokens in a step at most"
    )
    engine.add_argument("--max-num-seqs", type=positive_int, help="requests in a step at most")
    engine.add_argument("--no-hybrid-kv-cache", action="store_true", help="windowed layers keep every token")
    parser.add_argument("--quantize-linear-action", help="DISABLED, W8A8_DYNAMIC, W8A16, W4A8, W4A16, FP8, MXFP4")
    parser.add_argument(
        "--kv-memory-gib",
        type=_gib_list,
        metavar="A[,B...]",
        help="KV memory of a rank of each stage, in GiB, instead of an estimate",
    )
    parser.add_argument(
        "--calibrate-from",
        metavar="FILE",
        help="start-up log of vLLM, vllm-ascend or SGLang, or numbers in YAML or JSON, to replace the estimates",
    )
    for option, reads, words in (
        ("--measured-tp-size", positive_int, "tensor parallel ranks"),
        ("--measured-dp-size", positive_int, "data parallel ranks"),
        ("--measured-pp-layer-partition", _layer_list, "layers of each pipeline stage"),
    ):
        parser.add_argument(option, type=reads, help=f"{words} of that start, for a log that does not say them")
    parser.add_argument("--request-length", type=positive_int, help="tokens of a request: how many stay resident")
    parser.add_argument("--report", metavar="FILE", help="memory by stage against the budget, as one HTML file")
    parser.add_argument("--no-cache", action="store_true", help="trace anew instead of reading the trace cache")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default table)")


_FIELDS = (
    "pp_size pp_layer_partition dsa_split kv_cache_dtype gpu_memory_utilization max_model_len "
    "max_num_batched_tokens max_num_seqs quantize_linear_action kv_memory_gib request_length"
)


def run(args: argparse.Namespace) -> int:
    """Print the capacity. Exit code 0; 3 when a stage has no room for a KV cache."""
    from tensor_cast.core.calibration import GivenLayout, read_calibration
    from tensor_cast.core.capacity import CapacityPlanner
    from tensor_cast.core.capacity_config import CapacityConfig
    from tensor_cast.core.capacity_report import compare, require_room, split_heading, to_json
    from tensor_cast.errors import ConfigError

    config = CapacityConfig.create(
        **layout_values(args),
        device=device_value(args),
        **{name: getattr(args, name) for name in _FIELDS.split()},
        hybrid_kv_cache=not args.no_hybrid_kv_cache,
    )
    given = GivenLayout(args.measured_tp_size, args.measured_dp_size, args.measured_pp_layer_partition)
    if args.calibrate_from is None and given != GivenLayout():
        raise ConfigError("--measured-tp-size and the like are of a measured start; give it with --calibrate-from FILE")
    calibration = None if args.calibrate_from is None else read_calibration(args.calibrate_from, given)
    planner = CapacityPlanner(config, calibration=calibration, use_cache=not args.no_cache)
    listing = config.pp_layer_partition == "all"
    plan = planner.plan(mark_refused=listing)
    require_room(plan)
    rows = compare(planner, plan)
    if args.report:
        from tensor_cast.core.capacity_html import write_capacity_report

        write_capacity_report(Path(args.report), planner, plan, rows)
    if args.format == "json":
        print_json(to_json(planner, plan, rows))
        return 0
    tables: list[Grid | str] = [_stage_table(planner, plan), *_group_table(planner, plan), *_summary(planner, plan)]
    if planner.measured is not None:
        tables += _calibration_table(planner.measured)
    if rows:
        tables.append(_partition_table(rows, plan, split_heading(planner)))
    print_tables(*tables)
    return 0


def _gib(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value / _GIB:,.{digits}f}"


def _spell(plan: CapacityPlan) -> str:
    return ",".join(map(str, plan.partition))


def _stage_table(planner: CapacityPlanner, plan: CapacityPlan) -> Grid:
    config = planner.config
    axes = (("TP", config.tp_size), ("PP", config.pp_size), ("DP", config.dp_size), ("EP", config.ep_size))
    sizes = " ".join(f"{name}{size}" for name, size in (*axes, ("DCP", config.dcp_size)) if size > 1) or "one rank"
    where = f"{planner.device.name} ({planner.engine.name})"
    given = "KV" if config.kv_memory_gib is None else "KV (given)"
    table = Grid(
        f"{planner.model.model_id} on {where}, {sizes}, {planner.form.name} cache: GiB of one rank",
        (
            *("stage", "layers", "weights", "non-torch", "activation", "graphs"),
            *(given, "KV idle", "B/token", "B/block", "blocks"),
        ),
        words=("stage",),
        droppable=("B/token", "B/block", "KV idle", "graphs"),
    )
    for index, (stage, rank) in enumerate(zip(plan.stages, plan.capacity.ranks, strict=True)):
        binds = len(plan.stages) > 1 and index == plan.capacity.binding_stage
        table.add_row(
            f"{index} (binds)" if binds else str(index),
            f"{stage.layers.start}-{stage.layers.stop - 1}",
            _gib(stage.weights),
            _gib(stage.non_torch),
            _gib(stage.activation),
            _gib(stage.graph),
            _gib(stage.kv),
            _gib(rank.idle),
            f"{plan.bytes_per_token[index]:,}",
            f"{rank.block_bytes:,}",
            f"{rank.num_blocks:,}",
        )
    return table


def _group_table(planner: CapacityPlanner, plan: CapacityPlan) -> list[Grid]:
    """Groups of caches that draw blocks from one pool; a single group needs no table."""
    groups = planner.blocks_by_group(plan)
    if len(groups) == 1:
        return []
    # Groups of one kind differ in their number of layers alone.
    alike: dict[tuple[str, int, int, int], list[str]] = {}
    for group, blocks in groups:
        kind, page = group.pages[0].kind, group.pages[0].nbytes
        alike.setdefault((kind, group.spec.block_size, page, blocks), []).append(str(len(group.pages)))
    columns = ("groups of caches", "layers of each", "tokens/block", "B/page", "blocks of the longest request")
    table = Grid("Groups that draw blocks from one pool, over all stages", columns, words=columns[:1])
    for (kind, size, page, blocks), layers in alike.items():
        table.add_row(kind, ", ".join(layers), f"{size:,}", f"{page:,}", f"{blocks * len(layers):,}")
    return [table]


def _summary(planner: CapacityPlanner, plan: CapacityPlan) -> list[str]:
    from tensor_cast.core.capacity_report import notes

    capacity = plan.capacity
    lines = [
        f"KV cache size: {capacity.kv_tokens:,} tokens ({capacity.num_blocks:,} blocks, one of them the null block)",
        f"Maximum concurrency for {capacity.max_model_len:,} tokens per request: {capacity.max_concurrency:.2f}x",
    ]
    if length := planner.config.request_length:
        lines.append(
            f"Requests of {length:,} tokens: {capacity.kv_tokens / length:.2f} by tokens, "
            f"{planner.resident(plan, length):,} resident in whole blocks"
        )
    return [*lines, *notes(planner, plan)]


def _calibration_table(measured: Measured) -> list[Grid | str]:
    from tensor_cast.core.measured_report import remarks

    calibration = measured.calibration
    table = Grid(
        f"Measured ({calibration.source}, {calibration.engine or 'numbers'}, {measured.layout}, "
        f"{','.join(map(str, measured.partition))}): GiB of one rank",
        ("stage", "consumed", "our weights", "workspaces", "residual", "activation", "graphs", "KV"),
        words=("stage",),
        droppable=("consumed", "graphs"),
    )
    for index, stage in enumerate(measured.stages):
        table.add_row(
            f"{index} ({stage.kind})",
            _gib(stage.consumed),
            _gib(stage.weights),
            _gib(stage.workspace),
            _gib(stage.residual),
            _gib(stage.peak - stage.graph),
            _gib(stage.graph),
            _gib(stage.kv),
        )
    return [table, *remarks(measured)]


def _partition_table(rows: list[tuple[str, CapacityPlan]], plan: CapacityPlan, unsafe: str) -> Grid:
    table = Grid(
        "Partitions",
        (
            *("split", "stage that binds", "its KV, GiB", "KV tokens", "change", "concurrency", "KV idle, GiB"),
            *("layer equivalents", unsafe, "note"),
        ),
        words=("split", "note"),
        wraps="note",
        droppable=("layer equivalents", "its KV, GiB", "KV idle, GiB", "concurrency", "stage that binds"),
    )
    for note, row in rows:
        capacity = row.capacity
        stage = row.stages[capacity.binding_stage]
        change = "" if row.partition == plan.partition else f"{capacity.kv_tokens / plan.capacity.kv_tokens - 1:+.1%}"
        table.add_row(
            _spell(row),
            str(capacity.binding_stage),
            _gib(stage.kv, 2),
            f"{capacity.kv_tokens:,}",
            change,
            f"{capacity.max_concurrency:.2f}x",
            _gib(row.idle_bytes, 2),
            " ".join(map(str, row.equivalents)),
            ",".join(map(str, row.unsafe_layers)) or "none",
            "; ".join(
                word for word in (note, "refused" if row.refused else "", "" if row.fits else "does not fit") if word
            ),
        )
    return table
