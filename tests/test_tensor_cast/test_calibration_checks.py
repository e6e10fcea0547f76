"""A measured start-up beside our own account of it: what is left, what it predicts, and runs that it cannot be of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from start_logs import LLAMA_LOG, QWEN_LOG, account, glm_log, sglang_log, worker

from tensor_cast.core.calibration import Calibration, GivenLayout, MeasuredStage, read_calibration
from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.core.measured import Measured, StageKind, stage_kind
from tensor_cast.core.measured_report import measured_json, remarks
from tensor_cast.errors import ConfigError
from tensor_cast.units import GIB

Plan = Callable[..., CapacityPlanner]

LLAMA: Mapping[str, object] = {"model": "meta-llama/Llama-3.1-8B", "device": "A100_80G_SXM"}
GLM: Mapping[str, object] = {
    "model": "zai-org/GLM-5.3-W4A16",
    "device": "A800_80G_SXM",
    "tp_size": 4,
    "pp_size": 2,
    "num_mtp_tokens": 3,
    "kv_cache_dtype": "fp8",
    "dsa_split": "self-compute",
}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """``plan(lines, asked, **changes)`` -> the planner that is asked for, calibrated by a log of ``lines``."""

    def calibrated(
        lines: Sequence[str] | str, asked: Mapping[str, object] = LLAMA, **changes: object
    ) -> CapacityPlanner:
        given = {name: changes.pop(name) for name in ("measured_tp", "measured_split") if name in changes}
        file = tmp_path / ("start.yaml" if isinstance(lines, str) else "start.log")
        file.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n")
        layout = GivenLayout(given.get("measured_tp"), None, given.get("measured_split"))  # type: ignore[arg-type]
        return CapacityPlanner(
            CapacityConfig.create(**{**asked, **changes}), calibration=read_calibration(file, layout)
        )

    return calibrated


def measured(planner: CapacityPlanner) -> Measured:
    assert planner.measured is not None
    return planner.measured


# -- taken apart -------------------------------------------------------------------------------------------------------


def taken_apart(
    *stages: dict[str, Any],
    weights: tuple[int, ...],
    partition: tuple[int, ...],
    workspace: int = 0,
    share: float = 0.9,
) -> Measured:
    calibration = Calibration(stages=tuple(MeasuredStage(**stage) for stage in stages), gpu_memory_utilization=share)
    return Measured(calibration, partition, weights, workspace, usable=100 * GIB, utilization=share)


def test_residual_and_overheads() -> None:
    first = {"consumed_gib": 50.0, "activation_gib": 3.0, "graph_gib": 1.0, "kv_gib": 37.0}
    last = {"consumed_gib": 60.0, "activation_gib": 4.0, "graph_gib": 2.0, "kv_gib": 26.0}
    run = taken_apart(first, last, weights=(45 * GIB, 54 * GIB), partition=(2, 2), workspace=2 * GIB)
    assert [stage.kind for stage in run.stages] == [StageKind.FIRST, StageKind.LAST]
    assert [stage.residual for stage in run.stages] == [3 * GIB, 4 * GIB]
    # Longer requests: 5 GiB of workspaces. Activation without graphs, graphs.
    assert run.overheads(StageKind.FIRST, 5 * GIB) == (8 * GIB, 2 * GIB, GIB)
    assert run.overheads(StageKind.LAST, 0) == (4 * GIB, 2 * GIB, 2 * GIB)
    assert run.overheads(StageKind.MIDDLE, 0) == run.overheads(StageKind.FIRST, 0)
    assert run.overheads(StageKind.ONLY, 0) == run.overheads(StageKind.LAST, 0)


@pytest.mark.parametrize(("kv", "graph"), [(42.0, 0.0), (40.5, 1.5)])
def test_graphs_that_were_subtracted_are_what_is_left(kv: float, graph: float) -> None:
    # Weights and non-torch memory apart: 90 - 45 - 1 - 2 = 42 where the graphs come on top, less where they do not.
    stage = {"weights_gib": 45.0, "non_torch_gib": 1.0, "activation_gib": 2.0, "graph_gib": 1.2, "kv_gib": kv}
    run = taken_apart(stage, weights=(45 * GIB,), partition=(4,))
    assert run.overheads(StageKind.ONLY, 0) == (GIB, 2 * GIB, int(graph * GIB))


def test_buffers_of_kernels_are_activations_where_weights_are_apart() -> None:
    # Half a GiB of buffers is in the 2 GiB of the peak: 1.5 remain, and the residual stays what is outside.
    stage = {"weights_gib": 45.0, "non_torch_gib": 1.0, "activation_gib": 2.0, "kv_gib": 42.0}
    run = taken_apart(stage, weights=(45 * GIB,), partition=(4,), workspace=GIB // 2)
    assert run.stages[0].residual == GIB
    assert run.overheads(StageKind.ONLY, GIB // 2) == (GIB + GIB // 2, 3 * GIB // 2, 0)


def test_sglang_takes_its_share_of_what_was_free() -> None:
    # 100 GiB, 95 free before the weights take 40: 5 are gone. 0.9 * 95 - 40 = 45.5 for the cache, of which 45 are whole
    # pages. At 0.8 it would take 9.5 less.
    run = taken_apart({"weights_gib": 40.0, "free_gib": 95.0, "kv_gib": 45.0}, weights=(40 * GIB,), partition=(4,))
    assert run.overheads(StageKind.ONLY, 0) == (5 * GIB, GIB // 2, 0)
    assert run.budget(0.9) - run.budget(0.8) == pytest.approx(9.5 * GIB, abs=1)


def test_without_the_share_the_printed_peak_counts() -> None:
    calibration = Calibration(stages=(MeasuredStage(consumed_gib=50, activation_gib=3, kv_gib=30),))
    run = Measured(calibration, (4,), (45 * GIB,), 0, usable=100 * GIB, utilization=0.9)
    assert run.overheads(StageKind.ONLY, 0) == (5 * GIB, 3 * GIB, 0)


def test_kinds() -> None:
    assert [stage_kind(*s, 8) for s in ((0, 8), (0, 3), (3, 6), (6, 8))] == list(StageKind)


# -- published starts --------------------------------------------------------------------------------------------------


def test_a_published_start_of_one_gpu(plan: Plan) -> None:
    planner = plan(LLAMA_LOG)
    (stage,) = measured(planner).stages
    # 15.26 GiB, less 8,030,261,248 parameters of two bytes and rotary tables of 131,072 * 128 * 2 B.
    assert stage.residual / GIB == pytest.approx(15.26 - 14.958 - 0.03125, abs=0.001)
    # 56.21 GiB of 16 * 131,072 B are 28,779 blocks; what it printed are 28,781 in a cache of 56.2129.
    assert measured_json(measured(planner))["kv_cache"] == {
        "tokens": {"measured": 460_496, "predicted": 28_779 * 16, "difference": 28_779 / 28_781 - 1}
    }
    # The same layout comes out as it was measured, to the rounding of three numbers.
    assert planner.plan().stages[0].kv / GIB == pytest.approx(56.21, abs=0.001)


def test_a_published_start_of_four_gpus(plan: Plan) -> None:
    asked = {"model": "Qwen/Qwen3-235B-A22B-FP8", "device": "RTX_PRO_6000", "tp_size": 4}
    run = measured(plan(QWEN_LOG, asked))
    assert run.layout == "TP4"
    # "Model loading took 55.19": weights and tables alone; what is left of 56.89 lies outside the allocator.
    assert run.weights[0] / GIB == pytest.approx(55.19, abs=0.1)
    assert 0.25 < run.stages[0].residual / GIB < 2.1
    assert run.predicted is not None
    assert run.predicted.kv_tokens == pytest.approx(621_392, rel=0.0005)


def test_a_published_start_that_prints_weights_apart(plan: Plan) -> None:
    # Qwen3-30B-A3B on one H100 (vLLM 0.19): 75.23 - 56.88 - 0.27 - 2.68 = 15.40, 168,288 tokens of 98,304 B.
    lines = [
        "(EngineCore pid=1) INFO [gpu_worker.py:1] Available KV cache memory: 15.41 GiB",
        (
            "(EngineCore pid=1) INFO [gpu_worker.py:2] CUDA graph pool memory: 1.41 GiB (actual), 1.24 GiB "
            "(estimated), difference: 0.17 GiB (12.1%)."
        ),
        (
            "(EngineCore pid=1) INFO [gpu_worker.py:3] Free memory on device (78.66/79.19 GiB) on startup. Desired GPU "
            "memory utilization is (0.95, 75.23 GiB). Actual usage is 56.88 GiB for weight, 2.68 GiB for peak "
            "activation, 0.27 GiB for non-torch memory, and 1.41 GiB for CUDAGraph memory."
        ),
        "(EngineCore pid=1) INFO [kv_cache_utils.py:1] GPU KV cache size: 168,288 tokens",
        "(EngineCore pid=1) INFO [kv_cache_utils.py:1] Maximum concurrency for 8,192 tokens per request: 20.54x",
    ]
    run = measured(plan(lines, {"model": "Qwen/Qwen3-30B-A3B", "device": "H100_SXM"}))
    (stage,) = run.stages
    assert stage.residual / GIB == pytest.approx(0.27, abs=0.05)
    assert stage.graph == 0  # an estimate, not subtracted in this release
    # The experts' buffers are in the peak that was printed, not in what the weights leave.
    assert stage.peak + stage.workspace - run.tables == pytest.approx(2.68 * GIB, abs=0.02 * GIB)
    assert run.predicted is not None
    assert run.predicted.kv_tokens == pytest.approx(168_288, rel=0.0005)


def test_buffers_are_those_of_the_measured_token_budget(plan: Plan) -> None:
    # Two buffers of 8 experts a token: 8,192 * 8 * (4,096 + 4,096) * 2 B are 1 GiB, a quarter of it for 2,048 tokens.
    asked = {"model": "Qwen/Qwen3-235B-A22B-FP8", "device": "RTX_PRO_6000", "tp_size": 4}
    sizes = [
        measured(
            plan([f"Chunked prefill is enabled with max_num_batched_tokens={tokens}.", *QWEN_LOG], asked)
        ).workspace
        for tokens in (8192, 2048)
    ]
    assert sizes[0] - sizes[1] == 3 * GIB // 4


def test_expert_parallel_ranks_hold_whole_experts(plan: Plan) -> None:
    # Split over eight, an expert of 1,536 breaks the 128 x 128 blocks; sixteen whole ones on each rank do not.
    asked = {"model": "Qwen/Qwen3-235B-A22B-FP8", "device": "RTX_PRO_6000", "tp_size": 4}
    lines = [worker(f"_TP{i}_EP{i}") + account(30.1, 0.8, 0.3, 54.61, total=95.01, share=0.9) for i in range(8)]
    run = measured(plan(lines, asked))
    assert run.layout == "TP8 EP8"
    with pytest.raises(ConfigError, match=r"\[quant.block\]"):
        plan([line.replace(f"_EP{i}", "") for i, line in enumerate(lines)], asked)


def test_memory_of_a_device_is_known_to_a_percent_or_so(plan: Plan) -> None:
    # 0.92 of 78.5 GiB are 72.22, of 79.25 72.91; 70 are of another device or another share.
    numbers = "gpu_memory_utilization: 0.92\nstages: [{{consumed_gib: 15.26, activation_gib: 1.44, kv_gib: {}}}]"
    assert measured(plan(numbers.format(72.22 - 16.70))).stages[0].kv == int((72.22 - 16.70) * GIB)
    with pytest.raises(ConfigError, match="does not add up"):
        plan(numbers.format(70 - 16.70))


def test_sglang_is_taken_apart_too(plan: Plan) -> None:
    # Qwen3-32B over four: 15.27 GiB of weights each, on devices of 79.19 GiB of which 75.10 are free.
    lines = [line.replace("14.43", "15.30") for line in sglang_log([f" TP{i}" for i in range(4)])]
    lines = [line.replace("tp_size=2", "tp_size=4").replace("23.92", "23.49") for line in lines]
    planner = plan(lines, {"model": "Qwen/Qwen3-32B", "device": "H100_SXM", "tp_size": 4})
    run = measured(planner)
    (stage,) = run.stages
    # What was gone before: 79.19 - 75.10 = 4.09; 65,536 B a token make 46.98 GiB 769,720 tokens.
    assert stage.consumed / GIB == pytest.approx(4.09 + 15.30, abs=0.001)
    assert stage.residual / GIB == pytest.approx(4.09 + 15.30 - run.weights[0] / GIB - run.workspace / GIB, abs=0.001)
    # 0.83 * 75.10 - 15.30 = 47.03 GiB for the cache, of which 46.98 were filled.
    assert stage.peak / GIB == pytest.approx(0.83 * 75.10 - 15.30 - 46.98, abs=0.001)
    assert planner.plan().stages[0].kv / GIB == pytest.approx(46.98, abs=0.001)


# -- other layouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [True, False])
def test_another_layout_is_predicted_from_the_measured_one(plan: Plan, config: bool) -> None:
    asked = {**GLM, "tp_size": 2, "pp_size": 4, "pp_layer_partition": "18,20,20,20"}
    planner = plan(glm_log(config=config), asked)
    run = measured(planner)
    assert (run.layout, run.partition) == ("TP4 PP2", (39, 39))
    assert all(0.2 < stage.residual / GIB < 1.5 for stage in run.stages)
    assert all(stage.non_torch is not None and stage.non_torch > 0 for stage in planner.plan().stages)


def test_a_published_start_is_predicted_from_another(plan: Plan) -> None:
    # A 70B model in FP8 on H100 (vLLM 0.19): 54.09 GiB of KV at TP4, 708,992 tokens; 37.28 at TP2, 244,304 tokens.
    lines = [
        worker(f"_TP{rank}")
        + "[gpu_worker.py:3] Free memory on device (78.66/79.19 GiB) on startup. Desired GPU memory "
        "utilization is (0.95, 75.23 GiB). Actual usage is 16.96 GiB for weight, 1.97 GiB for peak activation, 2.21 "
        "GiB for non-torch memory, and 1.66 GiB for CUDAGraph memory. Current kv cache memory in use is 54.09 GiB."
        for rank in range(4)
    ]
    lines += ["GPU KV cache size: 708,992 tokens", "Maximum concurrency for 8,192 tokens per request: 86.55x"]
    asked = {"model": "meta-llama/Llama-3.1-70B", "device": "H100_SXM", "tp_size": 2, "quantize_linear_action": "FP8"}
    planner = plan(lines, asked)
    assert measured_json(measured(planner))["kv_cache"]["tokens"]["difference"] == pytest.approx(0, abs=1e-4)
    found = planner.plan()
    assert found.stages[0].kv / GIB == pytest.approx(37.28, abs=0.15)
    assert found.capacity.kv_tokens == pytest.approx(244_304, rel=0.004)


def test_the_printed_cache_stands_beside_ours(plan: Plan) -> None:
    # 15.56 GiB hold 9,338 blocks of 1,789,184 B, 597,632 tokens; the 15.5633 behind it hold 9,340, 597,760 tokens.
    run = measured(plan(glm_log(), GLM))
    assert int(15.56 * GIB) // 1_789_184 == 9_338
    assert run.predicted is not None
    assert (run.predicted.num_blocks, run.predicted.kv_tokens) == (9_338, 9_338 * 64)
    assert remarks(run) == [
        "KV cache of the measured run: 597,760 tokens printed, 597,632 predicted from its KV memory (-0.02%)"
    ]


def test_another_cache_is_pointed_out(plan: Plan) -> None:
    # The log of a bfloat16 cache says nothing of it; with 8 bits ours has twice the tokens.
    run = measured(plan(LLAMA_LOG, kv_cache_dtype="fp8"))
    assert any("+100.00%" in line or "+99.99%" in line for line in remarks(run))
    assert any("--kv-cache-dtype" in line for line in remarks(run))
    # Where it says so, its own is counted.
    run = measured(plan(["config: kv_cache_dtype=auto", *LLAMA_LOG], kv_cache_dtype="fp8"))
    assert len(remarks(run)) == 1


def test_the_number_of_blocks_is_shown_like_tokens(plan: Plan) -> None:
    run = measured(plan(["config: tensor_parallel_size=1", *LLAMA_LOG, "# cuda blocks: 28781, # CPU blocks: 4681"]))
    assert measured_json(run)["kv_cache"]["blocks"] == {
        "measured": 28_781, "predicted": 28_779, "difference": 28_779 / 28_781 - 1,
    }  # fmt: skip


def test_numbers_leave_out_what_is_as_asked(plan: Plan) -> None:
    text = "total_gib: 79.25\ngpu_memory_utilization: 0.95\nmax_model_len: 524288\nstages:\n" + "".join(
        f"- {{consumed_gib: {c}, activation_gib: {a}, graph_gib: {g}, kv_gib: {k}}}\n"
        for c, a, g, k in ((50.98, 2.36, 0.76, 21.95), (56.53, 3.20, 1.49, 15.564))
    )
    run = measured(plan(text, GLM))
    assert run.layout == "TP4 PP2"
    assert remarks(run) == []  # no cache printed, none compared


# -- runs that it cannot be of -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "asked", "changes", "messages"),
    [
        (
            "stages: [{consumed_gib: 50.98, activation_gib: 2.36, graph_gib: 0.76, kv_gib: 21.95}]",
            GLM,
            {},
            ["start.yaml", "1 stage(s) where --pp-size 2", "tp_size", "--measured-tp-size"],
        ),
        # TP4 on one stage holds all 78 layers, 99.98 GiB.
        (
            "tp_size: 4\nstages: [{consumed_gib: 50.98, activation_gib: 2.36, graph_gib: 0.76, kv_gib: 21.95}]",
            GLM,
            {},
            ["start.yaml", "stage 0 (layers 0-77, TP4)", "50.98 GiB", "99.98", "Another model", "dtype"],
        ),
        (
            glm_log(config=False, names=False),
            GLM,
            {"measured_tp": 4},
            ["start.log", "stage 0 (layers 0-77, TP4)", "--measured-pp-layer-partition"],
        ),
        (glm_log(total=139.80), GLM, {}, ["stage 0 does not add up", "75.29 GiB", "0.95 x 139.80 = 132.81"]),
        (glm_log(), GLM, {"measured_split": (41, 37)}, ["stage 0 (layers 0-40, TP4 PP2)", "50.98", "GiB outside"]),
        # The same start of an H200: adds up, but is none of an A800.
        (
            [
                line.replace("15.56 GiB", "73.08 GiB").replace("21.95 GiB", "79.47 GiB")
                for line in glm_log(total=139.80)
            ],
            GLM,
            {},
            ["a device of 139.80 GiB, A800_80G_SXM has 79.25", "--device"],
        ),
        # A bfloat16 start for weights of 8 bits: half of them would be something else.
        (LLAMA_LOG, LLAMA, {"quantize_linear_action": "FP8"}, ["cannot be meta-llama/Llama-3.1-8B", "15.26 GiB"]),
        (
            glm_log(),
            {"model": "Qwen/Qwen3-32B", "device": "A800_80G_SXM", "tp_size": 4},
            {},
            ["the log says", "num_mtp_tokens 3", "Qwen/Qwen3-32B", "The log is of zai-org/GLM-5.3-W4A16"],
        ),
        (
            [
                "with config: model='m', tensor_parallel_size=3",
                *("INFO " + account(15.3, 1, 0, 58.99) for _ in range(3)),
            ],
            LLAMA,
            {},
            ["the log says", "tp_size 3", "num_attention_heads % tp_size"],
        ),
        (
            ["config: kv_cache_dtype=fp9", *LLAMA_LOG],
            LLAMA,
            {},
            ["kv_cache_dtype fp9", "unknown KV cache dtype 'fp9'"],
        ),
        (["gpu_memory_utilization=0.5", *LLAMA_LOG], LLAMA, {}, ["does not add up", "0.5 x 79.25"]),
        (
            [line.replace("23.92", "33.92") for line in sglang_log([" TP0", " TP1"])],
            {"model": "Qwen/Qwen3-32B", "device": "H100_SXM", "tp_size": 2},
            {},
            ["does not add up", "67.84"],
        ),
    ],
)
def test_what_cannot_be_is_refused(
    plan: Plan, lines: Sequence[str] | str, asked: Mapping[str, object], changes: dict[str, object], messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(lines, asked, **changes)
    for message in ("--calibrate-from start.", *messages):
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_model_of_the_log_is_named(plan: Plan) -> None:
    start = "engine (v0.33.0) with config: model='{}', tensor_parallel_size=1"
    assert measured(plan([start.format("meta-llama/Meta-Llama-3.1-8B"), *LLAMA_LOG])).other_model is None  # an alias
    for same in ("meta-llama/Llama-3.1-8B", "/data/llama_3.1-8b/", "/c/models--meta-llama--Llama-3.1-8B/snapshots/0e9"):
        assert measured(plan([start.format(same), *LLAMA_LOG])).other_model is None
    run = measured(plan([start.format("org/Other-8B"), *LLAMA_LOG]))
    assert "The log names another model: org/Other-8B" in remarks(run)
    assert measured_json(run)["other_model"]
    with pytest.raises(ConfigError, match="The log is of org/Other-8B"):
        plan([start.format("org/Other-8B"), *LLAMA_LOG], quantize_linear_action="FP8")
