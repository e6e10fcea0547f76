"""Source 000's two-stage deployment of GLM-5.3 W4A16 on eight 80 GB devices, through the planner.

TP4 PP2, three draft tokens, 8-bit cache, 95 % of 79.25 GiB, 524,288 tokens; layers that would read indices across the
border compute their own.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import pytest

from tensor_cast.core.calibration import Calibration, read_calibration
from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.core.capacity_report import compare, to_json
from tensor_cast.errors import LegalityError
from tensor_cast.ir.stages import boundary_specs
from tensor_cast.pipeline_partition import DsaSplit, stage_ranges
from tensor_cast.units import GIB, KIB, MIB

#: What the 39,39 run printed, stage by stage.
MEASURED = Calibration.model_validate(
    {
        "tp_size": 4,
        "pp_layer_partition": (39, 39),
        "num_mtp_tokens": 3,
        "max_model_len": 524_288,
        "gpu_memory_utilization": 0.95,
        "total_gib": 79.25,
        "kv_tokens": 597_760,
        "stages": [
            {"consumed_gib": 50.98, "activation_gib": 2.36, "graph_gib": 0.76, "kv_gib": 21.95},
            # The log prints 15.56; 9,340 blocks of 1,789,184 bytes are 15.5633 GiB.
            {"consumed_gib": 56.53, "activation_gib": 3.20, "graph_gib": 1.49, "kv_gib": 15.564},
        ],
    }
)


def ask(**changes: object) -> CapacityConfig:
    values: dict[str, object] = {
        "model": "zai-org/GLM-5.3-W4A16",
        "device": "A800_80G_SXM",
        "tp_size": 4,
        "pp_size": 2,
        "num_mtp_tokens": 3,
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.95,
        "max_model_len": 524_288,
        "dsa_split": DsaSplit.SELF_COMPUTE,
    }
    return CapacityConfig.create(**{**values, **changes})


@cache
def calibrated() -> CapacityPlanner:
    return CapacityPlanner(ask(), calibration=MEASURED)


@pytest.mark.parametrize(
    ("changes", "blocks", "tokens", "conc", "binding"),
    [
        ({"pp_layer_partition": "39,39", "kv_memory_gib": (21.95, 15.564)}, 9340, 597_760, "1.14", 1),
        ({"pp_layer_partition": "41,37", "kv_memory_gib": (19.3445, 18.163)}, 11_395, 729_280, "1.39", 0),
        (
            {"tp_size": 8, "pp_size": 1, "kv_memory_gib": (17.2628,), "max_model_len": 327_680},
            5292,
            338_688,
            "1.03",
            0,
        ),
    ],
)
def test_measured_runs(changes: dict[str, object], blocks: int, tokens: int, conc: str, binding: int) -> None:
    planner = CapacityPlanner(ask(**changes))
    plan = planner.plan()
    assert (plan.capacity.num_blocks, plan.capacity.kv_tokens, plan.capacity.binding_stage) == (blocks, tokens, binding)
    assert f"{plan.capacity.max_concurrency:.2f}" == conc


def test_w5_weights_of_the_stages() -> None:
    # Without the indexers that flipped layers get: 47.666 | 52.755 and 50.243 | 50.178 GiB.
    weights = calibrated().memory.model_weights
    sizes = {p: [weights.of(0, p[0]), weights.of(p[0], 78)] for p in ((39, 39), (41, 37))}
    assert [round(b / GIB, 3) for b in sizes[39, 39]] == [47.666, 52.755]
    assert [round(b / GIB, 3) for b in sizes[41, 37]] == [50.243, 50.178]
    # A layer with experts: 1,319.779 MiB at TP4; its indexer, replicated, 17.8755 MiB.
    assert round(weights.layers[39] / MIB, 3) == 1319.779
    assert weights.layers[42] - weights.layers[39] == weights.indexer == 9_371_904 * 2
    assert round(weights.first / MIB, 2) == 453.75  # W6: 154,880 * 6,144 * 2 B / 4
    plan = calibrated().plan((39, 39))
    assert plan.stages[1].weights == sizes[39, 39][1] + 3 * weights.indexer


@pytest.mark.parametrize(
    ("tp", "drafts", "partition", "gib"),
    [
        (8, 0, (78,), [50.731]),  # source 000's 390.58 / 8 = 48.8 leaves out what every rank holds
        (8, 3, (78,), [51.550]),
        (4, 0, (39, 39), [47.666, 50.865]),
        (4, 0, (41, 37), [50.243, 48.288]),
        (2, 0, (20, 20, 20, 18), [45.407, 50.981, 50.981, 46.761]),
    ],
)
def test_weights_of_other_layouts(tp: int, drafts: int, partition: tuple[int, ...], gib: list[float]) -> None:
    layout = ask(tp_size=tp, pp_size=len(partition), num_mtp_tokens=drafts)
    weights = CapacityPlanner(layout).memory.model_weights
    assert [round(weights.of(s.start, s.stop) / GIB, 3) for s in stage_ranges(partition)] == gib


def test_the_other_split_predicted_from_one_run() -> None:
    # Two layers of 1,319.779 MiB move: 21.95 - 2.5777 = 19.3723 GiB / 1,822,720 B = 11,411.9 -> 11,411 blocks.
    # Section 1.8 has 730,368 (11,412 blocks) from 1,319.77 MiB a layer; measured were 729,280.
    assert calibrated().plan((39, 39)).capacity.kv_tokens == MEASURED.kv_tokens
    plan = calibrated().plan((41, 37))
    assert int((21.95 - 2 * 1319.779296875 / 1024) * GIB) // 1_822_720 == 11_411
    assert plan.capacity.kv_tokens == 11_411 * 64 == 730_304
    assert abs(plan.capacity.kv_tokens / 729_280 - 1) < 0.002
    assert plan.capacity.binding_stage == 0
    # What is left beside our weights is alike on both stages: 3.31 and 3.72 GiB, of which 2.77 are ours: indexer keys
    # that a prefill gathers, chosen indices, and rotary tables of 1,048,576 positions.
    first, last = calibrated().measured.stages  # type: ignore[union-attr]
    assert [round((s.residual + s.workspace) / GIB, 2) for s in (first, last)] == [3.31, 3.72]
    assert first.workspace == 2.578125 * GIB + 8192 * 2048 * 4 + 1_048_576 * 64 * 2


def test_the_best_partition_is_the_best_of_all() -> None:
    planner = calibrated()
    plans = list(planner.all())
    assert len(plans) == 77
    best = max(plans, key=lambda plan: plan.capacity.num_blocks)
    assert planner.best() == best.partition == (41, 37)
    # The stage that runs the draft layer three times a step: 39 | 42 layers' worth before, 41 | 40 after.
    assert [planner.plan(p).equivalents for p in ((39, 39), (41, 37), (42, 36))] == [(39, 42), (41, 40), (42, 39)]


def test_listing_every_partition_takes_no_time() -> None:
    planner = CapacityPlanner(ask(), calibration=MEASURED)
    planner.plan()  # the model is traced, or read from the cache
    start = time.process_time()
    assert len(list(planner.all())) == 77
    assert time.process_time() - start < 2


def test_the_measured_run_is_the_default() -> None:
    planner = CapacityPlanner(ask(gpu_memory_utilization=None, max_model_len=None), calibration=MEASURED)
    assert (planner.start_up.utilization, planner.max_model_len) == (0.95, 524_288)


def test_the_longest_request() -> None:
    # One block of 11,411 is the null block: 11,410 * 64 tokens, more than asked for.
    planner = calibrated()
    plan = planner.plan((41, 37))
    assert planner.longest_request(plan) == 524_288
    longer = CapacityPlanner(ask(max_model_len=1_048_576), calibration=MEASURED)
    plan = longer.plan((41, 37))
    assert not plan.capacity.starts
    assert longer.longest_request(plan) == plan.capacity.usable_blocks * 64
    # Its workspace is larger, so there are fewer blocks: 5,280 B * 524,288 / 1,822,720 B = 1,518.7.
    assert 11_411 - plan.capacity.num_blocks in (1518, 1519)


def test_without_a_way_out_only_safe_partitions_count() -> None:
    planner = CapacityPlanner(ask(dsa_split=None), calibration=MEASURED)
    with pytest.raises(LegalityError, match=r"layers 39, 40, 41 would read.*42,36"):
        planner.plan((39, 39))
    assert planner.best() == (42, 36)
    assert planner.plan(planner.best()).unsafe_layers == ()
    marked = [plan for plan in planner.all() if plan.refused]
    assert len(marked) == sum(1 for plan in planner.all() if plan.unsafe_layers) == 77 - 20


def test_source_000s_table_of_four_splits() -> None:
    # Predicted there: 647,700 (+8.4 %), 697,600 (+16.7 %), 693,300 (+16.0 %), scaling 15.56 GiB and nothing else.
    planner = calibrated()
    tokens = {first: planner.plan((first, 78 - first)).capacity.kv_tokens for first in (39, 40, 41, 42)}
    assert tokens[39] == 597_760
    assert tokens[40] == pytest.approx(666_368, rel=0.002)
    assert tokens[41] == pytest.approx(729_280, rel=0.002)
    assert tokens[42] == pytest.approx(665_024, rel=0.003)
    bindings = {first: planner.plan((first, 78 - first)).capacity.binding_stage for first in tokens}
    assert bindings == {39: 1, 40: 1, 41: 0, 42: 0}  # the bottleneck changes sides at 41


@pytest.mark.parametrize(("split", "kv"), [(DsaSplit.UNSAFE, 39 * 656 + 132), (DsaSplit.SEND_INDICES, 39 * 656 + 132)])
def test_other_ways_out_add_no_memory(split: DsaSplit, kv: int) -> None:
    plan = CapacityPlanner(ask(dsa_split=split), calibration=MEASURED).plan((39, 39))
    # 40 latents and 9 + 1 indexers on the second stage, none for layers 39 to 41.
    assert plan.bytes_per_token == (27_168, 40 * 656 + 10 * 132)
    assert plan.split is split
    assert plan.unsafe_layers == (39, 40, 41)


def test_the_public_json() -> None:
    planner = CapacityPlanner(ask(request_length=131_328), calibration=MEASURED)
    plan = planner.plan((41, 37))
    document = to_json(planner, plan, compare(planner, plan))
    stage = document["stages"][0]
    memory = {f"{name}_gib" for name in ("weights", "activation", "non_torch", "graph", "kv")}
    assert memory | {"stage", "layers", "bytes_per_token", "bytes_per_block", "num_blocks"} <= set(stage)
    assert (stage["stage"], stage["layers"], stage["bytes_per_token"], stage["num_blocks"]) == (0, 41, 28_480, 11_411)
    assert sum(stage[name] for name in memory) == pytest.approx(0.95 * 79.25, abs=1e-6)
    assert document["num_blocks"] == 11_411
    assert document["kv_tokens"] == 730_304
    assert document["max_concurrency"] == pytest.approx(11_411 / 8192)
    assert document["binding_stage"] == 0
    assert document["unsafe_layers"] == [41]
    assert document["resident_requests"]["by_tokens"] == pytest.approx(5.56, abs=0.01)
    assert document["resident_requests"]["whole_blocks"] == 5
    named = {row["note"]: row["partition"] for row in document["partitions"] if "best" in row["note"]}
    assert named == {"this one; best": [41, 37], "best safe": [42, 36]}


def test_p4_bytes_at_a_boundary() -> None:
    # Two tensors of 64 requests * 8,192 * 2 B: 2 MiB, of which each of 8 ranks sends an eighth.
    total = sum(spec.nbytes({"B": 64, "Q": 1}) for spec in boundary_specs(8192, "bfloat16"))
    assert total == 2 * 64 * 8192 * 2 == 2 * MIB
    assert total / 8 == 256 * KIB
    assert sum(spec.nbytes({"B": 1, "Q": 1}) for spec in boundary_specs(6144, "bfloat16")) == 24_576


def test_p7_handing_over_indices() -> None:
    # 2,048 indices of 4 bytes a token on top of GLM's 24,576 bytes: a third more.
    from tensor_cast.model_catalog import load_model_config

    model = load_model_config("zai-org/GLM-5.3")
    assert model.index_topk * 4 == 8_192
    assert 8_192 / (2 * model.hidden_size * 2) == pytest.approx(1 / 3)


def test_a_log_of_the_run_gives_the_same(tmp_path: Path) -> None:
    lines = [
        (
            "INFO [core.py:58] Initializing a V1 LLM engine (v0.30.0) with config: model='/models/GLM', "
            "speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=3), max_seq_len=524288, "
            "tensor_parallel_size=4, pipeline_parallel_size=2, decode_context_parallel_size=1, kv_cache_dtype=fp8"
        ),
    ]
    kv = {0: (50.98, 2.36, 0.76, 21.95), 1: (56.53, 3.20, 1.49, 15.564)}
    for stage, (consumed, peak, graph, room) in kv.items():
        for rank in range(4):
            tag = f"(Worker_PP{stage}_TP{rank} pid={100 + rank}) INFO 09-01 10:00:00 "
            lines.append(
                f"{tag}[gpu_model_runner.py:1] Model loading took {consumed - 3:.2f} GiB memory and 60 seconds"
            )
            lines.append(f"{tag}[gpu_worker.py:1] Available KV cache memory: {room + 0.001 * rank:.3f} GiB")
            lines.append(
                f"{tag}[gpu_worker.py:2] Free memory on device cuda:{rank} (78.3/79.25 GiB) on startup. Desired GPU "
                f"memory utilization is (0.95, 75.29 GiB). Actual usage is {consumed} GiB for consumed memory (weights "
                f"+ non-torch), {peak} GiB for peak activation, and {graph} GiB for CUDAGraph memory."
            )
    lines.append("(EngineCore pid=9) INFO [kv_cache_utils.py:1] GPU KV cache size: 597,760 tokens")
    lines.append(
        "(EngineCore pid=9) INFO [kv_cache_utils.py:2] Maximum concurrency for 524,288 tokens per request: 1.14x"
    )
    log = tmp_path / "vllm.log"
    log.write_text("\n".join(lines))
    read = read_calibration(log)
    assert (read.engine, read.tp_size, read.pp_size, read.num_mtp_tokens) == ("vllm", 4, 2, 3)
    assert (read.total_gib, read.gpu_memory_utilization, read.kv_tokens) == (79.25, 0.95, 597_760)
    assert CapacityPlanner(ask(), calibration=read).plan((41, 37)).capacity.kv_tokens == 730_304
