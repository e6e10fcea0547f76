"""Start-up logs of several engines, as published in issues, and files of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensor_cast.core.calibration import Calibration, MeasuredStage, read_calibration
from tensor_cast.core.measured import Measured, StageKind, stage_kind
from tensor_cast.errors import ConfigError
from tensor_cast.units import GIB


def read(tmp_path: Path, text: str, name: str = "start.log") -> Calibration:
    file = tmp_path / name
    file.write_text(text)
    return read_calibration(file)


def test_vllm_of_2024(tmp_path: Path) -> None:
    # vllm-project/vllm#15783: budget 63.46 = 15.53 + 0.09 + 1.72 + 46.11.
    found = read(
        tmp_path,
        "INFO 03-31 worker.py:267] the current vLLM instance can use total_gpu_memory (79.32GiB) x "
        "gpu_memory_utilization (0.80) = 63.46GiB\n"
        "INFO 03-31 worker.py:267] model weights take 15.53GiB; non_torch_memory takes 0.09GiB; PyTorch activation "
        "peak memory takes 1.72GiB; the rest of the memory reserved for KV Cache is 46.11GiB.\n"
        "INFO 03-31 executor_base.py:111] # cuda blocks: 53965, # CPU blocks: 4681\n"
        "INFO 03-31 executor_base.py:116] Maximum concurrency for 10240 tokens per request: 84.32x\n",
    )
    (stage,) = found.stages
    assert (stage.weights_gib, stage.non_torch_gib, stage.activation_gib, stage.kv_gib) == (15.53, 0.09, 1.72, 46.11)
    assert (found.total_gib, found.gpu_memory_utilization, found.max_model_len) == (79.32, 0.8, 10_240)


def test_vllm_of_2025_with_ranks(tmp_path: Path) -> None:
    text = "".join(
        f"(Worker_TP{rank} pid=1) INFO [gpu_model_runner.py:1] Model loading took 33.88 GiB memory and 9.1 seconds\n"
        f"(Worker_TP{rank} pid=1) INFO [gpu_worker.py:1] Available KV cache memory: {37.28 + rank / 100:.2f} GiB\n"
        f"(Worker_TP{rank} pid=1) INFO [gpu_worker.py:2] Free memory on device (78.66/79.19 GiB) on startup. Desired "
        "GPU memory utilization is (0.95, 75.23 GiB). Actual usage is 33.88 GiB for weight, 1.96 GiB for peak "
        "activation, 2.1 GiB for non-torch memory, and 1.79 GiB for CUDAGraph memory. Replace ...\n"
        for rank in range(2)
    )
    found = read(tmp_path, text + "INFO [kv_cache_utils.py] GPU KV cache size: 244,304 tokens\n")
    (stage,) = found.stages
    assert stage.kv_gib == 37.28  # the rank with least room
    assert (stage.weights_gib, stage.non_torch_gib, stage.graph_gib) == (33.88, 2.1, 1.79)
    assert not stage.graph_in_activation  # of that age: not subtracted, 75.23 - 33.88 - 1.96 - 2.1 = 37.29
    assert (found.kv_tokens, found.total_gib, found.gpu_memory_utilization) == (244_304, 79.19, 0.95)


def test_vllm_ascend(tmp_path: Path) -> None:
    # vllm-project/vllm-ascend#8289: 61.27 * 0.9 - 1.14 - 0.22 - 0.13 - 0.04 - 150 MiB = 53.47.
    found = read(
        tmp_path,
        "[worker.py:1] Available KV cache memory: 53.46 GiB\n"
        "[worker.py:2] Free memory on device (60.9/61.27 GiB) on startup. Desired GPU memory utilization is (0.9, "
        "55.14 GiB). Actual usage is 1.14 GiB for weight, 0.22 GiB for peak activation, 0.13 GiB for non-torch memory, "
        "and 0.04 GiB for NPUGraph memory.\n",
    )
    assert found.engine == "vllm-ascend"
    assert (found.stages[0].kv_gib, found.stages[0].graph_gib) == (53.46, 0.04)


def test_sglang(tmp_path: Path) -> None:
    text = "".join(
        f"[2026-06-08 07:20:{rank} TP{rank}] Load weight begin. avail mem=75.10 GB\n"
        f"[2026-06-08 07:20:{rank} TP{rank}] Load weight end. type=Qwen3, dtype=torch.bfloat16, avail mem=60.67 GB, "
        "mem usage=14.43 GB.\n"
        f"[2026-06-08 07:20:{rank} TP{rank}] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 2090351, K size: "
        "23.92 GB, V size: 23.92 GB\n"
        f"[2026-06-08 07:20:{rank} TP{rank}] Memory pool end. avail mem=12.45 GB\n"
        f"[2026-06-08 07:20:{rank} TP{rank}] Capture cuda graph end. Time elapsed: 9.1 s. mem usage=1.12 GB. avail "
        "mem=11.3 GB.\n"
        for rank in range(2)
    )
    found = read(tmp_path, "server_args=ServerArgs(tp_size=4, mem_fraction_static=0.83)\n" + text)
    (stage,) = found.stages
    assert found.engine == "sglang"
    assert (stage.weights_gib, stage.free_gib, stage.kv_gib, stage.graph_gib) == (14.43, 75.10, 47.84, 1.12)
    assert (found.kv_tokens, found.tp_size, found.gpu_memory_utilization) == (2_090_351, 4, 0.83)


def test_sglang_latents_and_pipeline_stages(tmp_path: Path) -> None:
    text = "".join(
        f"[2026-01-01 PP{stage} TP0] Load weight begin. avail mem=170.0 GB\n"
        f"[2026-01-01 PP{stage} TP0] Load weight end. type=X, avail mem={90 - stage} GB, mem usage={80 + stage} GB.\n"
        f"[2026-01-01 PP{stage} TP0] KV Cache is allocated. #tokens: 1462784, KV size: 54.52 GB\n"
        for stage in range(2)
    )
    found = read(tmp_path, text)
    assert [stage.weights_gib for stage in found.stages] == [80.0, 81.0]
    assert [stage.kv_gib for stage in found.stages] == [54.52, 54.52]


def test_uneven_partition_and_environment(tmp_path: Path) -> None:
    line = "Available KV cache memory: 9.0 GiB\nActual usage is 5 GiB for consumed memory, 1 GiB for peak activation."
    logged = read(tmp_path, f"Hidden layers were unevenly partitioned: [31,32, 32,31]. This can be\n{line}")
    assert logged.pp_layer_partition == (31, 32, 32, 31)
    assert read(tmp_path, f"export VLLM_PP_LAYER_PARTITION=41,37\n{line}").pp_layer_partition == (41, 37)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_numbers(tmp_path: Path, suffix: str) -> None:
    text = '{"stages": [{"consumed_gib": 50.98, "kv_gib": 21.95}], "max_model_len": 524288}'
    found = read(tmp_path, text, f"numbers.{suffix}")
    assert (found.stages[0].consumed_gib, found.max_model_len, found.source) == (50.98, 524_288, f"numbers.{suffix}")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.log", "hello\nworld\n", "no memory lines of vLLM"),
        ("a.yaml", "stages: [", "cannot be parsed"),
        ("a.yaml", "- 1", "must hold a mapping with stages"),
        ("a.yaml", "stages: []", "stages"),
        ("a.yaml", "stages: [{kv_gib: 1}]", "needs consumed_gib"),
        ("a.yaml", "stages: [{consumed_gib: 1}]", "needs kv_gib or activation_gib"),
        ("a.json", '{"stages": [{"consumed": 1}]}', "consumed"),
    ],
)
def test_files_that_say_nothing(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text, name)
    with pytest.raises(ConfigError, match="cannot read"):
        read_calibration(tmp_path / "absent.log")


def measured(
    *stages: dict[str, Any], weights: tuple[int, ...], partition: tuple[int, ...], workspace: int = 0
) -> Measured:
    calibration = Calibration(stages=tuple(MeasuredStage(**stage) for stage in stages))
    return Measured(calibration, partition, weights, workspace, usable=100 * GIB, utilization=0.9)


def test_residual_and_overheads() -> None:
    first = {"consumed_gib": 50.0, "activation_gib": 3.0, "graph_gib": 1.0, "kv_gib": 37.0}
    last = {"consumed_gib": 60.0, "activation_gib": 4.0, "graph_gib": 2.0, "kv_gib": 26.0}
    run = measured(first, last, weights=(45 * GIB, 54 * GIB), partition=(2, 2), workspace=2 * GIB)
    assert [stage.kind for stage in run.stages] == [StageKind.FIRST, StageKind.LAST]
    assert [stage.residual for stage in run.stages] == [3 * GIB, 4 * GIB]
    # Longer requests: 5 GiB of workspaces. Activation without graphs, graphs.
    assert run.overheads(StageKind.FIRST, 5 * GIB) == (8 * GIB, 2 * GIB, GIB)
    assert run.overheads(StageKind.LAST, 0) == (4 * GIB, 2 * GIB, 2 * GIB)
    assert run.overheads(StageKind.MIDDLE, 0) == run.overheads(StageKind.FIRST, 0)
    assert run.overheads(StageKind.ONLY, 0) == run.overheads(StageKind.LAST, 0)


def test_graphs_on_top_are_not_subtracted() -> None:
    # Engines that print weights and non-torch memory apart: 90 - 45 - 1 - 2 = 42, the graphs come on top.
    stage = {
        "weights_gib": 45.0,
        "non_torch_gib": 1.0,
        "activation_gib": 2.0,
        "graph_gib": 1.5,
        "graph_in_activation": False,
        "kv_gib": 42.0,
    }
    run = measured(stage, weights=(45 * GIB,), partition=(4,))
    assert run.overheads(StageKind.ONLY, 0) == (GIB, 2 * GIB, 0)


def test_memory_before_loading() -> None:
    # SGLang: 100 GiB, 95 free before the weights take 40: 45 are gone. 0.9 * 100 - 45 = 45 GiB of KV, nothing kept.
    run = measured({"weights_gib": 40.0, "free_gib": 95.0, "kv_gib": 45.0}, weights=(40 * GIB,), partition=(4,))
    assert run.overheads(StageKind.ONLY, 0) == (5 * GIB, 0, 0)


def test_kinds() -> None:
    assert [stage_kind(*s, 8) for s in ((0, 8), (0, 3), (3, 6), (6, 8))] == list(StageKind)
