"""Lines of SGLang. "GB" in them means GiB.

It prints what is free before and after loading, and gives the KV cache the share ``mem_fraction_static`` of what was
free, less the weights: ``kv = free_after - free_before * (1 - share)``; the rest is for activations and graphs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tensor_cast.core.engine_logs.format import (
    NUMBER,
    Line,
    LogFormat,
    Who,
    as_bool,
    as_count,
    as_number,
    as_text,
    flag,
)

__all__ = ["SGLANG"]


def _line(pattern: str, *names: str) -> Line:
    return Line(re.compile(pattern), names)


def _none(_: str) -> int:
    return 0


#: ``[2026-01-01 10:00:00 DP0 PP1 TP3 EP3]``: every axis of more than one rank.
_STAMP = re.compile(r"\[\d{4}-\d\d-\d\d[^\]A-Z]*((?: ?[A-Z_]+\d+)*)\]")
_AXIS = re.compile(r"([A-Z_]+)(\d+)")


def _who(line: str) -> Who:
    stamp = _STAMP.search(line)
    if stamp is None:
        return Who()
    return Who(MappingProxyType({axis.casefold(): int(rank) for axis, rank in _AXIS.findall(stamp[1])}), named=True)


def _fix_layout(sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """With data parallel attention ``tp_size`` counts all ranks; without it the replicas share nothing."""
    tp, dp = sizes.get("tp_size"), sizes.get("dp_size") or 1
    if dp == 1 or tp is None:
        return sizes
    # Replicas are launched apart: their ranks have names like those of a single one.
    attention = sizes.get("dp_attention")
    if attention is None:
        attention = tp % dp == 0
    return {**sizes, "tp_size": tp // dp, "dp_size": dp} if attention else {**sizes, "dp_size": 1}


SGLANG = LogFormat(
    engine="sglang",
    marks=("ServerArgs(", "KV Cache is allocated", "Load weight begin", "Load weight end"),
    hints=("ServerArgs(", "avail mem", "KV Cache is allocated", "max_total_num_tokens", "mem usage"),
    start_marks=(re.compile(r"server_args=ServerArgs\("),),
    rank_lines=(
        # A draft model loads, and allocates, on top: what was free is that of the first line, the rest adds up.
        _line(rf"Load weight begin\. avail mem={NUMBER} GB", "free_gib"),
        _line(rf"Load weight end\..*?mem usage={NUMBER} GB", "weights_gib"),
        _line(rf"KV Cache is allocated\..*?K size: {NUMBER} GB, V size: {NUMBER} GB", "kv_gib", "kv_gib"),
        _line(rf"KV Cache is allocated\..*?KV size: {NUMBER} GB", "kv_gib"),
        _line(rf"Capture .*?(?:cuda|CUDA) graph end\..*?mem usage={NUMBER} GB", "graph_gib"),
    ),
    run_lines=(
        flag("mem_fraction_static", "gpu_memory_utilization", as_number),
        Line(re.compile(r"max_total_num_tokens=(\d+)"), ("kv_tokens",), as_count),
        Line(re.compile(r"KV Cache is allocated\..*?#tokens: (\d+)"), ("kv_tokens",), as_count),
        flag("context_length|context_len", "max_model_len"),
        flag("tp_size", "tp_size"),
        flag("pp_size", "pp_size"),
        flag("dp_size", "dp_size"),
        flag("enable_dp_attention", "dp_attention", as_bool, "True|False"),
        flag("kv_cache_dtype", "kv_cache_dtype", as_text, r"[\w.]+"),
        Line(re.compile(r"speculative_algorithm=(None)"), ("num_mtp_tokens",), _none),
        flag("speculative_num_steps", "num_mtp_tokens"),
        Line(re.compile(r"model_path='([^']+)'"), ("model",), as_text),
    ),
    who=_who,
    sums=frozenset({"weights_gib", "kv_gib", "graph_gib"}),
    firsts=frozenset({"free_gib"}),
    unit="GB",
    ends_with="KV Cache is allocated. ...",
    fix_layout=_fix_layout,
)
