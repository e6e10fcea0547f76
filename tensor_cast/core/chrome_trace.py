"""A step as a Chrome trace (``chrome://tracing``, Perfetto): every op of every layer, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensor_cast.core.files import write_atomically

if TYPE_CHECKING:
    from tensor_cast.core.model_runner import RunResult
    from tensor_cast.performance_model.estimate import OpEstimate


def chrome_trace(result: RunResult) -> dict[str, Any]:
    """The trace-event document: times in microseconds, thread 0 for kernels, thread 1 for collectives."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": result.model.model_id}},
        {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "kernels"}},
        {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "collectives"}},
    ]
    now = 0.0
    for row in _unfolded(result):
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": int(row.bound == "network"),
                "name": row.name,
                "cat": row.op_class,
                "ts": now,
                "dur": row.seconds * 1e6,
                "args": {"module": row.module, "bound": row.bound, "source": row.source},
            }
        )
        now += row.seconds * 1e6
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _unfolded(result: RunResult) -> Iterator[OpEstimate]:
    """Rows in the order of execution: a folded layer is repeated in the place of each layer it stands for."""
    rows = iter(result.estimate.ops)
    segments = [(segment, [next(rows) for _ in segment.part.ops]) for segment in result.prepared.segments]
    position = 0
    while position < len(segments):
        if not segments[position][0].layers:
            yield from (row for row in segments[position][1] for _ in range(row.repeat))
            position += 1
            continue
        stack = []
        while position < len(segments) and segments[position][0].layers:
            stack.append(segments[position])
            position += 1
        for layer in sorted({i for segment, _ in stack for i in segment.layers}):
            for segment, priced in stack:
                if layer in segment.layers:
                    yield from (row for row in priced for _ in range(row.repeat // segment.repeat))


def write_chrome_trace(result: RunResult, path: str | Path) -> None:
    """Write the trace to ``path``; nothing is left behind when it cannot be written.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_atomically(Path(path), json.dumps(chrome_trace(result)))
