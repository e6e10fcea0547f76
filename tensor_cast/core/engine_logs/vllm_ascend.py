"""Lines of vllm-ascend: vLLM's, and its own account of a rank.

Source: vllm-ascend of August 2026 ``worker/worker.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tensor_cast.core.engine_logs.format import NUMBER
from tensor_cast.core.engine_logs.vllm import RANK_LINES, VLLM, line

__all__ = ["VLLM_ASCEND"]

VLLM_ASCEND = replace(
    VLLM,
    engine="vllm-ascend",
    marks=("vllm_ascend", "vllm-ascend", "NPUGraph", "NPU graph", "NPU KV cache", "device_config=npu"),
    rank_lines=(*RANK_LINES, line(rf"Current KV cache memory: {NUMBER} GiB", "kv_gib")),
    ends_with="Actual usage: ... Current KV cache memory: ...",
)
