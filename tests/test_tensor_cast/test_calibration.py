"""Start-up logs of several engines, as published in issues, and files of numbers: what is read of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from start_logs import GLM_STAGES, LLAMA_LOG, account, glm_log, sglang_log, worker

from tensor_cast.core.calibration import Calibration, GivenLayout, read_calibration
from tensor_cast.core.engine_logs import LOG_FORMATS
from tensor_cast.errors import ConfigError

Read = Callable[..., Calibration]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """``read(lines or text, name)`` -> what a file with them says."""

    def read_file(text: str | list[str] | tuple[str, ...], name: str = "start.log", **given: object) -> Calibration:
        file = tmp_path / name
        file.write_text(text if isinstance(text, str) else "\n".join(text) + "\n")
        return read_calibration(file, GivenLayout(**given))  # type: ignore[arg-type]

    return read_file


def test_vllm_of_2024(read: Read) -> None:
    # vllm-project/vllm#15783: budget 63.46 = 15.53 + 0.09 + 1.72 + 46.11.
    found = read(
        "INFO 03-31 llm_engine.py:234] Initializing an LLM engine (v0.7.3) with config: model='Qwen/Qwen2.5-VL-7B', "
        "speculative_config=None, tensor_parallel_size=1, pipeline_parallel_size=1\n"
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
    assert (found.num_blocks, found.num_mtp_tokens, found.model) == (53_965, 0, "Qwen/Qwen2.5-VL-7B")


def test_vllm_of_2025_with_ranks(read: Read) -> None:
    text = "".join(
        f"(Worker_TP{rank} pid=1) INFO [gpu_model_runner.py:1] Model loading took 33.88 GiB memory and 9.1 seconds\n"
        f"(Worker_TP{rank} pid=1) INFO [gpu_worker.py:1] Available KV cache memory: {37.28 + rank / 100:.2f} GiB\n"
        f"(Worker_TP{rank} pid=1) INFO [gpu_worker.py:3] CUDA graph pool memory: 1.79 GiB (actual), 1.82 GiB "
        "(estimated), difference: 0.03 GiB (1.7%).\n"
        f"(Worker_TP{rank} pid=1) INFO [gpu_worker.py:2] Free memory on device (78.66/79.19 GiB) on startup. Desired "
        "GPU memory utilization is (0.95, 75.23 GiB). Actual usage is 33.88 GiB for weight, 1.96 GiB for peak "
        f"activation, {2.1 - rank / 100} GiB for non-torch memory, and 1.79 GiB for CUDAGraph memory. Replace ...\n"
        for rank in range(2)
    )
    found = read(text + "INFO [kv_cache_utils.py] GPU KV cache size: 244,304 tokens\n")
    (stage,) = found.stages
    # The rank with least room, whole: 75.23 - 33.88 - 1.96 - 2.1 = 37.29.
    assert (stage.weights_gib, stage.non_torch_gib, stage.kv_gib) == (33.88, 2.1, 37.28)
    assert (stage.graph_gib, stage.graph_estimate_gib) == (1.79, 1.82)
    assert (found.kv_tokens, found.total_gib, found.gpu_memory_utilization) == (244_304, 79.19, 0.95)
    assert (found.tp_size, found.pp_size, found.dp_size, found.expert_parallel) == (2, 1, 1, False)


def test_bytes_are_as_good_as_gib(read: Read) -> None:
    # vLLM 0.11; 59,212,694,937 bytes are 55.146 GiB, which it prints as 55.15 before.
    (stage,) = read(
        "(EngineCore_DP0 pid=3021) INFO 09-23 18:12:33 [gpu_worker.py:298] Available KV cache memory: 55.15 GiB\n"
        "(EngineCore_DP0 pid=3021) INFO 09-23 18:12:39 [gpu_worker.py:391] Free memory on device (78.66/79.19 GiB) on "
        "startup. Desired GPU memory utilization is (0.9, 71.27 GiB). Actual usage is 14.08 GiB for weight, 1.97 GiB "
        "for peak activation, 0.07 GiB for non-torch memory, and 0.67 GiB for CUDAGraph memory. Current kv cache "
        "memory in use is 59212694937 bytes.\n"
    ).stages
    assert stage.kv_gib == 59_212_694_937 / 2**30
    assert stage.weights_gib == 14.08


def test_vllm_ascend(read: Read) -> None:
    # vllm-project/vllm-ascend#8289: 0.9 * 61.27 = 55.14, less 1.14, 0.22 and 0.13.
    found = read(
        "(EngineCore pid=7) INFO [worker.py:1] Available KV cache memory: 53.65 GiB\n"
        "(EngineCore pid=7) INFO [worker.py:2] Free memory on device (60.86/61.27 GiB) on startup. Desired GPU memory "
        "utilization is (0.9, 55.14 GiB). Actual usage: 1.14 GiB for weights, 0.22 GiB for peak activation, 0.13 GiB "
        "for non-torch memory, 0.04 GiB for NPU graph memory. Replace gpu_memory_utilization with "
        "`--kv-cache-memory=57403864576` (53.46 GiB) to fit. Current KV cache memory: 53.65 GiB.\n",
    )
    assert (found.engine, found.tp_size) == ("vllm-ascend", 1)
    (stage,) = found.stages
    assert (stage.weights_gib, stage.activation_gib, stage.non_torch_gib) == (1.14, 0.22, 0.13)
    assert (stage.kv_gib, stage.graph_gib) == (53.65, 0.04)


def test_sglang(read: Read) -> None:
    found = read(sglang_log([" TP0", " TP1"]))
    (stage,) = found.stages
    assert (found.engine, found.model, found.max_model_len) == ("sglang", "org/model", 40_960)
    assert (stage.weights_gib, stage.free_gib, stage.kv_gib, stage.graph_gib) == (14.43, 75.10, 47.84, 1.12)
    assert (found.kv_tokens, found.tp_size, found.gpu_memory_utilization) == (2_090_351, 2, 0.83)


def test_a_draft_model_comes_on_top(read: Read) -> None:
    (stage,) = read(sglang_log([" TP0", " TP1"], drafts=True)).stages
    assert (stage.weights_gib, stage.free_gib, stage.kv_gib) == (14.43 + 1.0, 75.10, pytest.approx(47.84 + 1.0))


def test_sglang_latents_and_pipeline_stages(read: Read) -> None:
    text = "".join(
        f"[2026-01-01 10:00:00 PP{stage}] Load weight begin. avail mem=170.0 GB\n"
        f"[2026-01-01 10:00:00 PP{stage}] Load weight end. avail mem={90 - stage} GB, mem usage={80 + stage} GB.\n"
        f"[2026-01-01 10:00:00 PP{stage}] KV Cache is allocated. #tokens: 1462784, KV size: 54.52 GB\n"
        for stage in range(2)
    )
    found = read(text)
    assert [stage.weights_gib for stage in found.stages] == [80.0, 81.0]
    assert [stage.kv_gib for stage in found.stages] == [54.52, 54.52]
    assert (found.tp_size, found.pp_size) == (1, 2)


def test_what_the_run_was_started_with(read: Read) -> None:
    found = read(
        [
            (
                "(APIServer pid=1) INFO 02-01 [utils.py:250] non-default args: {'model': 'org/model', "
                "'max_num_seqs': 32, 'enable_expert_parallel': True, 'max_num_batched_tokens': 4096, "
                "'tensor_parallel_size': 4, 'pipeline_parallel_size': 2}"
            ),
            *glm_log(),
        ]
    )
    assert (found.max_num_batched_tokens, found.expert_parallel) == (4096, True)
    assert (found.kv_cache_dtype, found.num_mtp_tokens, found.max_model_len) == ("fp8", 3, 524_288)
    assert (found.model, found.dcp_size, found.notes) == ("zai-org/GLM-5.3-W4A16", 1, ())
    assert [(s.consumed_gib, s.activation_gib, s.graph_gib, s.kv_gib) for s in found.stages] == list(
        GLM_STAGES.values()
    )


def test_drafts_without_weights_are_none(read: Read) -> None:
    config = (
        "Initializing a V1 LLM engine (v0.30.0) with config: model='m', speculative_config=SpeculativeConfig(method="
    )
    for method, drafts in (("ngram", 0), ("mtp", 3)):
        assert read([f"{config}'{method}', num_spec_tokens=3)", *LLAMA_LOG]).num_mtp_tokens == drafts


def test_uneven_partition_and_environment(read: Read) -> None:
    lines = [worker(f"_PP{stage}") + account(5, 1, 0.5, 69.29) for stage in range(4)]
    logged = read(["Hidden layers were unevenly partitioned: [31,32, 32,31]. This can be", *lines])
    assert logged.pp_layer_partition == (31, 32, 32, 31)
    assert read(["export VLLM_PP_LAYER_PARTITION=41,37", *lines[:2]]).pp_layer_partition == (41, 37)


def test_docker_stamps_and_colours_do_not_matter(read: Read) -> None:
    plain = read(glm_log())
    coloured = [
        f"2026-09-01 12:00:00.088 | {line}".replace("(Worker", "\x1b[0;36m(Worker").replace(") INFO", ")\x1b[0;0m INFO")
        for line in glm_log()
    ]
    assert read(coloured) == plain


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_numbers(read: Read, suffix: str) -> None:
    text = '{"stages": [{"consumed_gib": 50.98, "kv_gib": 21.95}], "max_model_len": 524288}'
    found = read(text, f"numbers.{suffix}", tp_size=8)
    assert (found.stages[0].consumed_gib, found.max_model_len, found.source) == (50.98, 524_288, f"numbers.{suffix}")
    assert (found.tp_size, found.pp_size) == (8, None)  # said beside the file; left out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.log", "hello\nworld\n", "no memory lines of vLLM"),
        ("a.yaml", "stages: [", "cannot be parsed"),
        ("a.yaml", "- 1", "must hold a mapping with stages"),
        ("a.yaml", "stages: []", "stages"),
        ("a.yaml", "stages: [{kv_gib: 1}]", "needs consumed_gib"),
        ("a.yaml", "stages: [{consumed_gib: 1}]", "needs kv_gib or activation_gib"),
        ("a.yaml", "stages: [{consumed_gib: .inf, kv_gib: 1}]", "finite number"),
        ("a.yaml", "stages: [{consumed_gib: 1, kv_gib: .nan}]", "kv_gib"),
        ("a.yaml", "total_gib: .inf\nstages: [{consumed_gib: 1, kv_gib: 1}]", "finite number"),
        ("a.json", '{"stages": [{"consumed": 1}]}', "consumed"),
    ],
)
def test_files_that_say_nothing(read: Read, tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text, name)
    with pytest.raises(ConfigError, match="cannot read"):
        read_calibration(tmp_path / "absent.log")


@pytest.mark.parametrize("garbled", ["50.9.8", "..", "nan", "inf", "1e400", "5,0.98", "5O.98", "9" * 400])
def test_garbled_numbers_are_named_with_their_line(read: Read, garbled: str) -> None:
    lines = [line.replace("is 50.98 GiB", f"is {garbled} GiB") for line in glm_log()]
    first = next(i for i, line in enumerate(lines, 1) if garbled in line)
    with pytest.raises(ConfigError, match=rf"start\.log: line {first}: '.*' is no number"):
        read(lines)


def test_garbled_options(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"line 1: '0\.9\.5' is no number"):
        read(["gpu_memory_utilization=0.9.5", *LLAMA_LOG])
    with pytest.raises(ConfigError, match="line 1: '' is no number"):
        read(["Hidden layers were unevenly partitioned: [31,,31]. This can be", *LLAMA_LOG])
    with pytest.raises(ConfigError, match=r"line 1: '1\.5' is no whole number"):
        read(["tensor_parallel_size=1.5", *LLAMA_LOG])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("engine: foo", "engine"),
        ("pp_layer_partition: []", "pp_layer_partition"),
        ("pp_layer_partition: [39.5, 38.5]", "valid integer"),
        ("num_mtp_tokens: 1000000000", "num_mtp_tokens"),
        ("total_gib: 1.0e+300", "total_gib"),
        ("kv_tokens: 0", "kv_tokens"),
    ],
)
def test_numbers_out_of_bounds(read: Read, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"start\.yaml: field .*{message}"):
        read(f"{line}\nstages: [{{consumed_gib: 1, kv_gib: 1}}]\n", "start.yaml")


def test_what_is_said_twice_must_agree(read: Read) -> None:
    stages = "stages: [{consumed_gib: 1, kv_gib: 1}, {consumed_gib: 1, kv_gib: 1}]\n"
    found = read(
        f"tp_size: 4\npp_layer_partition: [41, 37]\n{stages}", "a.yaml", tp_size=4, pp_layer_partition=(41, 37)
    )
    assert found.pp_layer_partition == (41, 37)
    with pytest.raises(ConfigError, match=r"a\.yaml says tp_size 4, --measured-tp-size 8"):
        read(f"tp_size: 4\n{stages}", "a.yaml", tp_size=8)
    logged = ["VLLM_PP_LAYER_PARTITION=39,39", *glm_log()]
    with pytest.raises(ConfigError, match=r"says pp_layer_partition \(39, 39\)"):
        read(logged, pp_layer_partition=(41, 37))


def test_sizes_that_no_run_has(read: Read) -> None:
    with pytest.raises(ConfigError, match="the log says pp_size 999,999,999; allowed are 1 to"):
        read(["config: tensor_parallel_size=1, pipeline_parallel_size=999999999", *LLAMA_LOG])


def test_a_start_without_room_measures_nothing(read: Read) -> None:
    lines = [line.replace("memory: 56.21", "memory: -0.87") for line in LLAMA_LOG[:2]]
    with pytest.raises(ConfigError, match=r"had no room for a KV cache \(-0\.87 GiB\)"):
        read(lines)


def test_long_logs_are_mostly_skipped(read: Read) -> None:
    # Serving prints a line every ten seconds; none of them is looked at.
    serving = (
        "(APIServer pid=1) INFO 09-01 10:10:00 [loggers.py:248] Engine 000: Avg prompt throughput: 12.3 tokens/s, Avg "
        "generation throughput: 45.6 tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%"
    )
    assert not any(form.may_say(serving) for form in LOG_FORMATS)
    start = time.process_time()
    read(glm_log() + [serving] * 50_000)
    assert time.process_time() - start < 2
