"""Names and small helpers that search and output share."""

from __future__ import annotations

from collections.abc import Iterable

from serving_cast.config import ParallelConfig

__all__ = ["DISAGG_COLUMNS", "divisors", "format_parallel_label", "resolve_search_sizes"]

#: Keys of a result row, in order. Phases that lack a quantity (TPOT of a prefill instance) hold null.
DISAGG_COLUMNS: tuple[str, ...] = (
    "phase",
    "device",
    "engine",
    "dcp_semantics",
    "tp",
    "pp",
    "dp",
    "ep",
    "moe_tp",
    "moe_dp",
    "replicas",
    "dcp",
    "parallel",
    "batch_size",
    "concurrency",
    "ttft_ms",
    "tpot_ms",
    "throughput_tok_s",
    "tok_s_per_device",
    "tok_s_per_user",
    "requests_per_s",
    "weights_gib",
    "kv_cache_size_gb",
    "activation_gib",
    "overhead_gib",
    "memory_total_gib",
    "memory_available_gib",
    "coverage",
    "bound",
    "pp_layer_partition",
    "batches_in_flight",
    "cycle_ms",
    "pp_utilization",
    "pp_idle",
    "unsafe_layers",
    "own_indexer_layers",
    "stages",
)


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor of ``number`` in ascending order."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def resolve_search_sizes(requested: Iterable[int] | None, available: Iterable[int]) -> tuple[int, ...]:
    """Sizes of one axis to try: what the user listed, else everything available; ascending, without repeats.

    A listed size is kept even if nothing legal comes of it: the search then says why.
    """
    return tuple(sorted(set(available if requested is None else requested)))


def format_parallel_label(parallel: ParallelConfig) -> str:
    """``tp8dcp4ep16dp2``: axes of size 1 are left out, tp never is."""
    sizes = (
        ("dcp", parallel.dcp_size),
        ("ep", parallel.ep_size),
        ("dp", parallel.dp_size),
        ("pp", parallel.pp_size),
        ("moedp", parallel.moe_dp_size),
    )
    return f"tp{parallel.tp_size}" + "".join(f"{name}{size}" for name, size in sizes if size > 1)
