"""``throughput_optimizer``: the layout and batch size that serve most tokens under limits on TTFT and TPOT.

Options are read as text and checked in :func:`run`, so that each mistake is one line wherever the command is mounted.
Nothing heavy is imported before there is something to compute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from cli.guard import EXIT_INFEASIBLE, EXIT_OK, Parser, run_guarded
from tensor_cast.errors import ConfigError

if TYPE_CHECKING:
    from serving_cast.config import OptimizerConfig
    from serving_cast.service.optimizer_summary import Summary

__all__ = ["add_arguments", "config_of", "main", "run"]

FORMATS = ("table", "json", "csv")

T = TypeVar("T", int, float)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the search."""
    parser.add_argument("model", metavar="MODEL", help="hub id of an embedded config, or a local folder")
    parser.add_argument("--device", nargs="+", required=True, metavar="D", help="one or more (msmodeling devices)")
    parser.add_argument(
        "--topology", metavar="T", help="links between the devices: a name or a file of configs/topologies (also D@T)"
    )
    parser.add_argument("--num-devices", required=True, metavar="N", help="devices in all; replicas fill them")

    work = parser.add_argument_group("workload")
    work.add_argument("--input-length", required=True, metavar="TOKENS", help="prompt tokens of a request")
    work.add_argument("--output-length", required=True, metavar="TOKENS", help="generated tokens of a request")
    work.add_argument(
        "--prefix-cache-hit-rate", default="0", metavar="SHARE", help="cached share of the prompt (default 0)"
    )
    work.add_argument("--num-mtp-tokens", default="0", metavar="K", help="draft tokens of a decode step (default 0)")
    work.add_argument(
        "--mtp-acceptance-rates",
        nargs="+",
        metavar="RATE",
        help="chance that each draft token is accepted given all before it; the last one repeats (default 0.85)",
    )

    limits = parser.add_argument_group("limits (several values: one result for each combination)")
    limits.add_argument(
        "--ttft-limit", "--ttft-limits", nargs="+", dest="ttft_limits", metavar="MS", help="time to first token"
    )
    limits.add_argument(
        "--tpot-limit", "--tpot-limits", nargs="+", dest="tpot_limits", metavar="MS", help="time per output token"
    )

    space = parser.add_argument_group("search space (commas or spaces; without a list every legal divisor)")
    space.add_argument("--tp-sizes", nargs="+", metavar="SIZE", help="tensor parallel")
    space.add_argument(
        "--pp-sizes", nargs="+", default=["1"], metavar="SIZE", help="pipeline stages (default 1: no pipeline)"
    )
    space.add_argument(
        "--pp-layer-partition",
        metavar="L,L,...",
        help="layers of each stage, or auto for the best; default: vLLM's own rule",
    )
    space.add_argument(
        "--pp-extra-batches",
        metavar="N",
        help="batches in flight beyond one for each stage: 1 for vLLM's asynchronous scheduling with its second model "
        "runner (default: the engine's, 0)",
    )
    space.add_argument(
        "--dsa-split",
        metavar="HOW",
        help="where a stage lacks the top-k indices that its first layers reuse: self-compute (those layers get an "
        "indexer), send-indices or unsafe (default: refused)",
    )
    space.add_argument("--dp-sizes", nargs="+", metavar="SIZE", help="data parallel attention")
    space.add_argument("--ep-sizes", nargs="+", metavar="SIZE", help="expert parallel: 1 or tp*dp")
    space.add_argument("--moe-dp-sizes", nargs="+", metavar="SIZE", help="copies of the experts (default 1)")
    space.add_argument("--dcp-sizes", nargs="+", metavar="SIZE", help="decode context parallel: divisors of tp")
    space.add_argument("--batch-range", nargs="+", metavar="SIZE", help="least and most decodes of a rank")
    space.add_argument(
        "--max-concurrency",
        metavar="N",
        help="most requests in flight at once over all devices: batch * dp * replicas * batches in flight",
    )

    mode = parser.add_argument_group("mode (default: prefill and decode share each instance)")
    mode.add_argument("--disagg", action="store_true", help="search prefill and decode instances on their own")
    mode.add_argument(
        "--enable-optimize-prefill-decode-ratio",
        action="store_true",
        help="how many prefill and decode instances serve most requests",
    )
    mode.add_argument("--prefill-devices-per-instance", metavar="P", help="with the ratio; default: every size")
    mode.add_argument("--decode-devices-per-instance", metavar="D", help="with the ratio; default: every size")

    engine = parser.add_argument_group("engine and precision (defaults: the device's engine, the model's config)")
    engine.add_argument("--engine", metavar="NAME", help="vllm or vllm-ascend")
    engine.add_argument("--dcp-semantics", metavar="NAME", help="vllm-ascend, vllm or rfc")
    engine.add_argument("--max-batched-tokens", metavar="TOKENS", help="token budget of a step")
    engine.add_argument(
        "--max-model-len", metavar="TOKENS", help="tokens of the longest request (default: the workload's)"
    )
    engine.add_argument("--gpu-memory-utilization", metavar="SHARE", help="of the memory that the engine takes")
    engine.add_argument("--block-size", metavar="TOKENS", help="tokens of a KV block")
    engine.add_argument("--cp-kv-cache-interleave-size", metavar="TOKENS", help="consecutive tokens on one DCP rank")
    engine.add_argument(
        "--quantize-linear-action",
        metavar="SCHEME",
        help="DISABLED, W8A8_DYNAMIC, W8A16, W4A8, W4A16, FP8 or MXFP4",
    )
    engine.add_argument("--quantize-attention-action", metavar="SCHEME", help="DISABLED, INT8 or FP8")
    engine.add_argument("--reserved-memory-gb", default="0", metavar="GIB", help="kept free per device (default 0)")

    run_options = parser.add_argument_group("run and output")
    run_options.add_argument("--format", default="table", metavar="FORMAT", help="table (default), json or csv")
    run_options.add_argument("--output", metavar="FILE", help="write there instead of standard output")
    run_options.add_argument(
        "--report", metavar="FILE", help="memory by stage and batches over time of the best layout, as one HTML file"
    )
    run_options.add_argument("--top", default="10", metavar="N", help="candidates in the table (default 10)")
    run_options.add_argument("--jobs", default="1", metavar="N", help="processes for several devices (default 1)")
    run_options.add_argument("--strict", action="store_true", help="an op without a price is an error")
    run_options.add_argument("--no-fusion", action="store_true", help="price every eager op on its own")
    run_options.add_argument("--no-cache", action="store_true", help="trace anew, leave the trace cache alone")


def config_of(args: argparse.Namespace) -> OptimizerConfig:
    """The options as one checked value. Raises :class:`ConfigError` for the first that cannot be used."""
    from serving_cast.config import Limits, Mode, OptimizerConfig, SearchSpace, Workload

    mode = Mode.AGGREGATED
    if args.enable_optimize_prefill_decode_ratio:
        mode = Mode.PD_RATIO
    elif args.disagg:
        mode = Mode.DISAGGREGATED
    batch_range = _many(args, "batch_range", int)
    if batch_range is not None and len(batch_range) != 2:
        raise ConfigError(f"--batch-range takes the smallest and the largest batch, found {len(batch_range)} values")
    per_instance = ("prefill_devices_per_instance", "decode_devices_per_instance")
    if mode is not Mode.PD_RATIO:
        for name in per_instance:
            if getattr(args, name) is not None:
                raise ConfigError(f"{_flag(name)} goes with --enable-optimize-prefill-decode-ratio")
    workload = Workload(
        input_length=_one(args, "input_length", int),
        output_length=_one(args, "output_length", int),
        prefix_cache_hit_rate=_one(args, "prefix_cache_hit_rate", float),
        num_mtp_tokens=_one(args, "num_mtp_tokens", int),
        mtp_acceptance_rates=_many(args, "mtp_acceptance_rates", float) or (),
    )
    sizes = {axis: _many(args, f"{axis}_sizes", int) for axis in ("tp", "dp", "ep", "moe_dp", "dcp")}
    pipelines = _many(args, "pp_sizes", int) or (1,)
    return OptimizerConfig(
        model=args.model,
        devices=tuple(dict.fromkeys(_placed(name, args.topology) for text in args.device for name in _split(text))),
        num_devices=_one(args, "num_devices", int),
        workload=workload,
        limits=tuple(
            Limits(ttft, tpot)
            for ttft in _many(args, "ttft_limits", float, flag="--ttft-limit") or (None,)
            for tpot in _many(args, "tpot_limits", float, flag="--tpot-limit") or (None,)
        ),
        space=SearchSpace(
            **sizes, pp=pipelines, batch_range=None if batch_range is None else (batch_range[0], batch_range[1])
        ),
        mode=mode,
        prefill_devices_per_instance=_maybe(args, "prefill_devices_per_instance", int),
        decode_devices_per_instance=_maybe(args, "decode_devices_per_instance", int),
        engine=args.engine,
        dcp_semantics=args.dcp_semantics,
        block_size=_maybe(args, "block_size", int),
        cp_kv_cache_interleave_size=_maybe(args, "cp_kv_cache_interleave_size", int),
        quantize_linear_action=args.quantize_linear_action,
        quantize_attention_action=args.quantize_attention_action,
        reserved_memory_gb=_one(args, "reserved_memory_gb", float),
        max_batched_tokens=_maybe(args, "max_batched_tokens", int),
        max_concurrency=_maybe(args, "max_concurrency", int),
        max_model_len=_maybe(args, "max_model_len", int),
        gpu_memory_utilization=_maybe(args, "gpu_memory_utilization", float),
        pp_layer_partition=args.pp_layer_partition,
        pp_extra_batches=_maybe(args, "pp_extra_batches", int),
        dsa_split=args.dsa_split,
        fusion=not args.no_fusion,
        strict=args.strict,
        use_cache=not args.no_cache,
        jobs=_one(args, "jobs", int),
        top=_one(args, "top", int),
    )


def run(args: argparse.Namespace) -> int:
    """Search and print. Exit code 0, or 3 when a scenario has no feasible layout.

    Raises:
        MsModelingError: bad input; nothing has been printed then.
    """
    if args.format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, found {args.format!r}")
    config = config_of(args)
    from serving_cast.parallel_runner import run_devices

    with _Progress() as progress:
        summaries = run_devices(config, progress.update)
    if args.report:
        _report(args.report, summaries)
    shown = args.format == "table" and not args.output and sys.stdout.isatty()
    if args.output:
        from pathlib import Path

        from tensor_cast.core.files import write_atomically

        write_atomically(Path(args.output), _render(summaries, args.format))
    else:
        text = _render(summaries, args.format, terminal=shown)
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))  # a plain-ASCII pipe has no table rules
    failed = [summary for summary in summaries if not summary.feasible]
    for summary in [] if shown else failed:
        sys.stderr.write(f"{summary.message()}\n")
    return EXIT_INFEASIBLE if failed else EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    parser = Parser(
        prog="throughput_optimizer",
        description="Find the layout and batch size that serve most tokens under limits on TTFT and TPOT.",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    return run_guarded(lambda: run(args))


# -- reading options ------------------------------------------------------------------------------------------------


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _split(text: str) -> list[str]:
    return [part for part in text.replace(",", " ").split() if part]


def _placed(device: str, topology: str | None) -> str:
    return device if topology is None or "@" in device else f"{device}@{topology}"


def _number(flag: str, text: str, kind: Callable[[str], T]) -> T:
    try:
        return kind(text)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise ConfigError(f"{flag} takes {what}, found {text!r}") from None


def _one(args: argparse.Namespace, name: str, kind: Callable[[str], T]) -> T:
    return _number(_flag(name), getattr(args, name), kind)


def _maybe(args: argparse.Namespace, name: str, kind: Callable[[str], T]) -> T | None:
    return None if getattr(args, name) is None else _one(args, name, kind)


def _many(args: argparse.Namespace, name: str, kind: Callable[[str], T], *, flag: str = "") -> tuple[T, ...] | None:
    """Values of a list option, or None if it was not given."""
    texts = getattr(args, name)
    if texts is None:
        return None
    flag = flag or _flag(name)
    values = tuple(_number(flag, part, kind) for text in texts for part in _split(text))
    if not values:
        raise ConfigError(f"{flag} needs at least one value")
    return values


# -- output ---------------------------------------------------------------------------------------------------------


def _render(summaries: Sequence[Summary], style: str, *, terminal: bool = False) -> str:
    """The whole output as text; it is complete before any of it is written."""
    if style == "json":
        import json

        from serving_cast.service.optimizer_summary import document

        return json.dumps(document(summaries), indent=1, allow_nan=False) + "\n"
    if style == "csv":
        import csv
        import io

        from serving_cast.service.optimizer_summary import table_rows

        header, rows = table_rows(summaries)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
        return text.getvalue()
    import io

    from rich.console import Console

    from serving_cast.service.summary_table import renderables

    # A pipe gets no escape codes and a fixed width that holds every column.
    text = io.StringIO()
    width = None if terminal else 170
    console = Console(file=text, force_terminal=terminal, no_color=not terminal, highlight=False, width=width)
    for summary in summaries:
        for item in renderables(summary, console.width):
            console.print(item, soft_wrap=not hasattr(item, "columns"))
            console.print()
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _report(file: str, summaries: Sequence[object]) -> None:
    """Write the answer of the first scenario that has one; nothing where nothing is feasible."""
    from pathlib import Path

    from serving_cast.service.optimizer_summary import OptimizerSummary
    from serving_cast.service.report import write_layout_report

    for summary in summaries:
        if isinstance(summary, OptimizerSummary) and summary.feasible:
            choice = summary.choice
            best = [summary.best_of(phase) for phase in summary.phases]
            rows = [choice.prefill, choice.decode] if choice else [row for row in best if row is not None]
            write_layout_report(Path(file), summary.setting, rows)
            return
    sys.stderr.write(f"no report was written to {file}: nothing is feasible\n")


class _Progress:
    """A bar on standard error, only when that is a terminal, and gone when the work is done."""

    _WIDTH = 30

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._next = 0.0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def update(self, done: int, total: int) -> None:
        """Show ``done`` of ``total`` layouts, ten times a second at most."""
        now = time.monotonic()
        if not self._live or (now < self._next and done < total):
            return
        self._next = now + 0.1
        filled = self._WIDTH * done // max(total, 1)
        sys.stderr.write(f"\r[{'#' * filled}{'.' * (self._WIDTH - filled)}] {done}/{total} layouts")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
