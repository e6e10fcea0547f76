"""Start-up logs to read: lines as engines print them, around the numbers of runs that were published or worked out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Weights and non-torch memory, activation peak, graphs and KV memory of source 000's 39,39 run, by stage. The peaks
#: hold what was kept for graphs: 50.98 + 2.36 + 21.95 = 56.53 + 3.20 + 15.56 = 75.29 = 0.95 * 79.25.
GLM_STAGES: Mapping[int, tuple[float, float, float, float]] = {
    0: (50.98, 2.36, 0.76, 21.95),
    1: (56.53, 3.20, 1.49, 15.56),
}

GLM_CONFIG = (
    "(EngineCore pid=900) INFO 09-01 10:00:01 [core.py:112] Initializing a V1 LLM engine (v0.30.0) with config: "
    "model='zai-org/GLM-5.3-W4A16', speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=3), "
    "max_seq_len=524288, tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=1, "
    "decode_context_parallel_size=1, kv_cache_dtype=fp8, device_config=cuda"
)


def worker(axes: str, pid: int = 1000) -> str:
    """``(Worker_PP0_TP1 pid=1000) INFO 09-01 10:00:00 ``."""
    return f"(Worker{axes} pid={pid}) INFO 09-01 10:00:00 "


def account(consumed: float, peak: float, graph: float, kv: float, *, total: float = 79.25, share: float = 0.95) -> str:
    """What a rank of vLLM 0.28 to 0.33 prints at the end."""
    return (
        f"[gpu_worker.py:789] Free memory on device cuda:0 (78.30/{total} GiB) on startup. Desired GPU memory "
        f"utilization is ({share}, {share * total:.2f} GiB). Actual usage is {consumed} GiB for consumed memory "
        f"(weights + non-torch), {peak} GiB for peak activation, and {graph} GiB for CUDAGraph memory. Replace "
        "gpu_memory_utilization config with "
        "`--kv-cache-memory=22000000000` (20.49 GiB) to fit into requested memory, or `--kv-cache-memory=24000000000` "
        f"(22.35 GiB) to fully utilize gpu memory. Current kv cache memory in use is {kv} GiB."
    )


def glm_log(
    stages: Mapping[int, tuple[float, float, float, float]] = GLM_STAGES,
    *,
    tp: int = 4,
    config: bool = True,
    names: bool = True,
    total: float = 79.25,
    tokens: str = "597,760",
) -> list[str]:
    """Lines of the 39,39 run, TP4 PP2; ``names`` are those of the ranks."""
    ranks = [(stage, rank, numbers) for stage, numbers in stages.items() for rank in range(tp)]

    def name(stage: int, rank: int) -> str:
        return worker(f"_PP{stage}_TP{rank}", 1000 + 10 * stage + rank) if names else "INFO 09-01 10:00:00 "

    lines = [GLM_CONFIG] if config else []
    # Once for a machine.
    lines.append(f"{name(0, 0)}[gpu_model_runner.py:329] Model loading took 47.85 GiB memory and 61.5 seconds")
    lines += [f"{name(s, r)}[gpu_worker.py:563] Available KV cache memory: {n[3]:.2f} GiB" for s, r, n in ranks]
    lines += [
        f"(EngineCore pid=900) INFO 09-01 10:02:01 [kv_cache_utils.py:2235] GPU KV cache size: {tokens} tokens",
        (
            "(EngineCore pid=900) INFO 09-01 10:02:01 [kv_cache_utils.py:2236] Maximum concurrency for 524,288 tokens "
            "per request: 1.14x"
        ),
    ]
    return lines + [name(s, r) + account(*n, total=total) for s, r, n in ranks]


#: Llama-3.1-8B on one A100 (vLLM 0.33), as published: 15.26 + 1.44 + 56.21 = 72.91 = 0.92 * 79.25.
LLAMA_LOG = (
    "(EngineCore pid=326) INFO 10-06 17:00:11 [model_runner.py:407] Model loading took 15.0 GiB memory and 5.4 s",
    "(EngineCore pid=326) INFO 10-06 17:00:33 [gpu_worker.py:692] Available KV cache memory: 56.21 GiB",
    (
        "(EngineCore pid=326) INFO 10-06 17:00:33 [kv_cache_utils.py:2464] GPU KV cache size: 460,496 tokens, Maximum "
        "concurrency for 131,072 tokens per request: 3.51x"
    ),
    "(EngineCore pid=326) INFO 10-06 17:00:41 " + account(15.26, 1.44, 0.23, 56.21, share=0.92),
)

#: Qwen3-235B-A22B-FP8 on four 96 GB cards (vLLM 0.28), as published: 56.89 + 0.76 + 27.85 = 85.50, 0.9 * 95.01 = 85.51.
QWEN_LOG = (
    worker("_TP0") + "[gpu_model_runner.py:5405] Model loading took 55.19 GiB memory and 48.502592 seconds",
    "(EngineCore pid=558) INFO 08-21 18:21:55 [kv_cache_utils.py:2235] GPU KV cache size: 621,392 tokens",
    (
        "(EngineCore pid=558) INFO 08-21 18:21:55 [kv_cache_utils.py:2236] Maximum concurrency for 32,768 tokens per "
        "request: 18.96x"
    ),
    *(worker(f"_TP{rank}") + account(56.89, 0.76, 0.32, 27.85, total=95.01, share=0.9) for rank in (1, 0, 3, 2)),
)


def sglang_log(
    tags: Sequence[str], *, args: str = "tp_size=2, mem_fraction_static=0.83", drafts: bool = False
) -> list[str]:
    """Lines of SGLang: 0.83 of the 75.10 GiB that were free, less 14.43 of weights, is 47.90; 47.84 in whole tokens."""
    lines = [f"[2026-06-08 07:19:00] server_args=ServerArgs(model_path='org/model', {args})"] if args else []
    for tag in tags:
        stamp = f"[2026-06-08 07:20:00{tag}]"
        lines += [
            f"{stamp} Load weight begin. avail mem=75.10 GB",
            f"{stamp} Load weight end. elapsed=3.48 s, type=Qwen3, avail mem=60.67 GB, mem usage=14.43 GB.",
        ]
        if drafts:
            lines += [
                f"{stamp} Load weight begin. avail mem=60.67 GB",
                f"{stamp} Load weight end. elapsed=1.00 s, type=Qwen3Draft, avail mem=59.67 GB, mem usage=1.00 GB.",
                f"{stamp} KV Cache is allocated. #tokens: 2000000, K size: 0.50 GB, V size: 0.50 GB",
            ]
        lines += [
            f"{stamp} KV Cache is allocated. dtype: bfloat16, #tokens: 2090351, K size: 23.92 GB, V size: 23.92 GB",
            f"{stamp} Memory pool end. avail mem=12.45 GB",
            f"{stamp} Capture cuda graph end. Time elapsed: 9.1 s. mem usage=1.12 GB. avail mem=11.3 GB.",
            f"{stamp} max_total_num_tokens=2090351, chunked_prefill_size=8192, context_len=40960",
        ]
    return lines
