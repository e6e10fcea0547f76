"""Lines of vLLM, releases 0.6 to 0.33. "GB" in them means GiB.

Since 0.28 the weights, workspaces and everything outside the allocator are one number, and the activation peak holds
the estimate of the graphs that was subtracted; before, weights and non-torch memory are printed apart, and the kernels'
buffers are part of the peak.
"""

from __future__ import annotations

import re
from types import MappingProxyType

from tensor_cast.core.engine_logs.format import (
    NUMBER,
    Line,
    LogFormat,
    Who,
    as_bool,
    as_count,
    as_number,
    as_partition,
    as_text,
    flag,
)
from tensor_cast.units import GIB

__all__ = ["RANK_LINES", "RUN_LINES", "START_MARKS", "VLLM", "who"]

_GRAPH = r"(?:CUDA|NPU|ACL) ?[Gg]raph"


def line(pattern: str, *names: str) -> Line:
    """A line with numbers."""
    return Line(re.compile(pattern), names)


def _none(_: str) -> int:
    return 0


def _from_bytes(text: str) -> float:
    return as_number(text) / GIB


RANK_LINES: tuple[Line, ...] = (
    # 0.28 on.
    line(
        rf"Actual usage(?: is|:) {NUMBER} GiB for consumed memory.*?{NUMBER} GiB for peak activation"
        rf"(?:.*?{NUMBER} GiB for {_GRAPH})?",
        "consumed_gib",
        "activation_gib",
        "graph_gib",
    ),
    # 0.11 to 0.27.
    line(
        rf"Actual usage(?: is|:) {NUMBER} GiB for weights?, {NUMBER} GiB for peak activation, {NUMBER} GiB for "
        rf"non-torch memory(?:,? (?:and )?{NUMBER} GiB for {_GRAPH})?",
        "weights_gib",
        "activation_gib",
        "non_torch_gib",
        "graph_gib",
    ),
    line(
        rf"torch peak memory increase: {NUMBER} ?GiB; non-torch forward increase memory: {NUMBER} ?GiB; "
        rf"weights memory: {NUMBER} ?GiB",
        "activation_gib",
        "non_torch_gib",
        "weights_gib",
    ),
    # 0.6 to 0.8.
    line(
        rf"model weights take {NUMBER} ?GiB; non_torch_memory takes {NUMBER} ?GiB; PyTorch activation peak "
        rf"memory takes {NUMBER} ?GiB; the rest of the memory reserved for KV Cache is {NUMBER} ?GiB",
        "weights_gib",
        "non_torch_gib",
        "activation_gib",
        "kv_gib",
    ),
    line(rf"Model loading took {NUMBER} G", "weights_gib"),
    line(rf"Loading model weights took {NUMBER} G", "weights_gib"),
    line(rf"Available KV cache memory: {NUMBER} GiB", "kv_gib"),
    # Every rank prints this one; in 0.11 in bytes.
    line(rf"Current kv cache memory in use is {NUMBER} GiB", "kv_gib"),
    Line(re.compile(rf"Current kv cache memory in use is {NUMBER} bytes"), ("kv_gib",), _from_bytes),
    line(rf"graph pool memory: {NUMBER} GiB \(actual\), {NUMBER} GiB \(estimated\)", "graph_gib", "graph_estimate_gib"),
    line(rf"Graph capturing finished in .*?took {NUMBER} GiB", "graph_gib"),
    line(rf"reserved {NUMBER} GiB for KV Cache as specified by kv_cache_memory_bytes", "reserved_gib"),
)

RUN_LINES: tuple[Line, ...] = (
    line(rf"Free memory on device(?: \S+)? \({NUMBER}/{NUMBER} GiB\)", "", "total_gib"),
    line(rf"Desired GPU memory utilization is \({NUMBER}, {NUMBER} GiB\)", "gpu_memory_utilization", ""),
    line(
        rf"total_gpu_memory \({NUMBER} ?GiB\) x gpu_memory_utilization \({NUMBER}\)",
        "total_gib",
        "gpu_memory_utilization",
    ),
    flag("gpu_memory_utilization|gpu-memory-utilization", "gpu_memory_utilization", as_number),
    Line(re.compile(r"(?:GPU|NPU) KV cache size: (\S+) tokens"), ("kv_tokens",), as_count),
    Line(re.compile(r"# (?:cuda|CUDA|GPU|npu|NPU) blocks: (\d+)"), ("num_blocks",), as_count),
    Line(re.compile(r"num_gpu_blocks is: (\d+)"), ("num_blocks",), as_count),
    Line(re.compile(r"Maximum concurrency for (\S+) tokens per request"), ("max_model_len",), as_count),
    flag("max_seq_len|max_model_len|max-model-len", "max_model_len"),
    flag("tensor_parallel_size|tensor-parallel-size", "tp_size"),
    flag("pipeline_parallel_size|pipeline-parallel-size", "pp_size"),
    flag("data_parallel_size|data-parallel-size", "dp_size"),
    flag("decode_context_parallel_size|decode-context-parallel-size", "dcp_size"),
    flag("enable_expert_parallel", "expert_parallel", as_bool, "True|False"),
    flag("max_num_batched_tokens|max-num-batched-tokens", "max_num_batched_tokens"),
    flag("kv_cache_dtype", "kv_cache_dtype", as_text, r"[\w.]+"),
    # No draft model, or one without weights.
    Line(
        re.compile(r"speculative_config=(None|SpeculativeConfig\(method='(?:ngram|suffix))"), ("num_mtp_tokens",), _none
    ),
    flag("num_spec_tokens|num_speculative_tokens", "num_mtp_tokens"),
    Line(re.compile(r"Hidden layers were unevenly partitioned: \[([^\]]*)\]"), ("pp_layer_partition",), as_partition),
    flag("VLLM_PP_LAYER_PARTITION", "pp_layer_partition", as_partition, r"\d+(?:, ?\d+)*"),
    Line(re.compile(r"engine \([^)]*\) with config: model='([^']+)'"), ("model",), as_text),
    Line(re.compile(r"Starting to load model (\S+?)(?:\.\.\.|$)"), ("model",), as_text),
    Line(
        re.compile(r"rank (\d+) in world size (\d+) is assigned as DP rank (\d+), PP rank (\d+),.*?TP rank (\d+)"),
        ("assigned_rank", "world_size", "assigned_dp", "assigned_pp", "assigned_tp"),
        as_count,
    ),
)

#: Each engine of a data parallel run prints the first one.
START_MARKS: tuple[re.Pattern[str], ...] = (
    re.compile(r"Initializing an? (?:V\d )?LLM engine"),
    re.compile(r"vLLM API server version"),
    re.compile(r"non-default args:"),
)

_WORKER = re.compile(r"\((Worker(?:_[A-Z]+\d+)*|VllmWorker rank=\d+|EngineCore(?:_DP\d+|_\d+)?) pid=")
_AXIS = re.compile(r"_([A-Z]+)(\d+)")


def who(line: str) -> Who:
    """The last process name before the message: ``(Worker_PP0_TP1 pid=..)``, ``(VllmWorker rank=1 pid=..)``.

    ``Worker`` lists every axis that has more than one rank. A rank's line from ``EngineCore`` means that the engine
    runs its only worker itself.
    """
    names = _WORKER.findall(line)
    if not names:
        return Who()
    name = names[-1]
    if name.startswith("VllmWorker "):
        return Who(rank=int(name.partition("=")[2]))
    axes = {axis.casefold(): int(rank) for axis, rank in _AXIS.findall(name)}
    if name.startswith("EngineCore"):
        # Numbered from 0 even where it is alone.
        number = int(re.sub(r"\D", "", name) or 0)
        axes = {"dp": number} if number else {}
    return Who(MappingProxyType(axes), named=True)


VLLM = LogFormat(
    engine="vllm",
    marks=(),
    hints=(
        "iB",
        "memory",
        "took",
        "bytes",
        "blocks",
        "cache size",
        "Maximum concurrency",
        "gpu_memory_utilization",
        "gpu-memory-utilization",
        "parallel_size",
        "parallel-size",
        "expert_parallel",
        "max_",
        "max-",
        "kv_cache_dtype",
        "spec",
        "partition",
        "PARTITION",
        "engine",
        "load model",
        "world size",
        "version",
        "non-default args",
    ),
    start_marks=START_MARKS,
    rank_lines=RANK_LINES,
    run_lines=RUN_LINES,
    who=who,
    ends_with="Actual usage is ... Current kv cache memory in use is ...",
)
