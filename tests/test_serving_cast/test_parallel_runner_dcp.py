"""The search over DCP: its space, prefill at dcp = 1, the PD ratio, and what prefill pays on a split cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from serving_cast.config import Limits, Mode, ParallelConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.service.chunk_gather import ChunkGather
from serving_cast.service.layout_sizes import layout_sizes
from serving_cast.setting import make_setting
from tensor_cast.device.catalog import load_device
from tensor_cast.errors import ConfigError
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.performance_model.comm_analytic import collective_seconds

Runner = Callable[..., ParallelRunner]
R1 = "deepseek-ai/DeepSeek-R1"
QWEN = "Qwen/Qwen3-235B-A22B"


def sizes(runner: ParallelRunner, *names: str) -> set[tuple[int, ...]]:
    return {tuple(layout[f"{name}_size"] for name in names) for layout in layout_sizes(runner.setting)}


def test_space_without_lists_is_every_divisor(make_runner: Runner) -> None:
    found = sizes(make_runner(num_devices=8), "tp", "dp", "ep", "dcp")
    expected = {
        (tp, dp, ep, dcp)
        for tp in (1, 2, 4, 8)
        for dp in (1, 2, 4, 8)
        if tp * dp <= 8
        for ep in (1, tp * dp)
        for dcp in (1, 2, 4, 8)
        if tp % dcp == 0
    }
    assert found == expected


def test_dense_models_have_no_expert_axis(make_runner: Runner) -> None:
    assert sizes(make_runner(model="Qwen/Qwen3-32B"), "ep") == {(1,)}


def test_dcp_sizes_are_taken_as_listed(make_runner: Runner) -> None:
    runner = make_runner(space=SearchSpace(tp=(8,), dp=(1,), ep=(1,), dcp=(2, 3, 8)))
    summary = runner.run()[0]
    assert {row.dcp for row in summary.candidates} == {2, 8}
    rejection = summary.rejections[0]
    assert rejection.layout["dcp"] == 3
    assert rejection.rule == "dcp.divides_tp"


def test_listed_sizes_beyond_the_devices_are_rejected(make_runner: Runner) -> None:
    summary = make_runner(space=SearchSpace(tp=(4, 16), dp=(1, 4), ep=(1,), dcp=(1,))).run()[0]
    assert {(r.layout["tp"], r.layout["dp"]) for r in summary.rejections if r.rule == "world.devices"} == {
        (16, 1),
        (16, 4),
        (4, 4),
    }


def test_device_counts_that_no_head_count_divides(make_runner: Runner) -> None:
    """TP sizes divide the heads, DP sizes the devices; an instance need not divide them, the rest stays idle."""
    heads = make_runner().setting.model.num_attention_heads
    found = {tp for (tp,) in sizes(make_runner(num_devices=12), "tp")}
    assert found == {n for n in range(1, 13) if heads % n == 0}
    assert {dp for (dp,) in sizes(make_runner(num_devices=12), "dp")} == {1, 2, 3, 4, 6, 12}


def test_instances_of_the_ratio_need_not_divide_the_devices(make_runner: Runner) -> None:
    runner = make_runner(
        mode=Mode.PD_RATIO, num_devices=9, prefill_devices_per_instance=4, decode_devices_per_instance=4
    )
    choice = runner.run()[0].choice
    assert choice is not None
    assert (choice.x, choice.y, choice.devices_used) == (1, 1, 8)
    assert choice.prefill.tp * choice.prefill.dp == 4


@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.PD_RATIO])
def test_prefill_runs_with_dcp_one(make_runner: Runner, mode: Mode) -> None:
    runner = make_runner(mode=mode, num_devices=16, space=SearchSpace(tp=(4,), dp=(1,), ep=(1,), dcp=(1, 2, 4)))
    summary = runner.run()[0]
    dcp = {phase: [row.dcp for row in summary.candidates if row.phase == phase] for phase in ("prefill", "decode")}
    assert dcp["prefill"] == [1]
    assert sorted(dcp["decode"]) == [1, 2, 4]


def test_ratio_walks_the_dcp_sizes(make_runner: Runner) -> None:
    """More KV per device with dcp: the decode side of the ratio picks it where memory bounds the batch."""
    summary = make_runner(
        mode=Mode.PD_RATIO,
        num_devices=16,
        space=SearchSpace(tp=(4,), dp=(1,), ep=(1,), dcp=(1, 2, 4)),
        costs={"kv_token_bytes": 4e7},
    ).run()[0]
    assert summary.choice is not None
    assert summary.choice.prefill.dcp == 1
    assert summary.choice.decode.dcp == 4
    rows = {row.dcp: row.batch_size for row in summary.candidates if row.phase == "decode"}
    assert rows[4] >= 4 * rows[1]


def test_disaggregation_interleaves_whole_blocks(make_runner: Runner) -> None:
    aggregated, split = make_runner(), make_runner(mode=Mode.DISAGGREGATED)
    assert aggregated.setting.interleave == 1
    assert split.setting.interleave == split.setting.block_size
    found = make_runner(mode=Mode.DISAGGREGATED, cp_kv_cache_interleave_size=1).run()[0]
    rules = {r.rule for r in found.rejections if r.layout["dcp"] > 1}
    assert "dcp.interleave_transfer" in rules


def test_draft_tokens_need_draft_weights(make_config: Callable[..., Any]) -> None:
    config = make_config(model="Qwen/Qwen3-32B", workload=Workload(100, 100, num_mtp_tokens=1))
    with pytest.raises(ConfigError, match=r"draft .MTP. weights; Qwen/Qwen3-32B has none"):
        make_setting(config, "H200_SXM")


# -- what a prefill chunk pays on a split cache -----------------------------------------------------------------------


def gather(model: str, tp: int, dcp: int, semantics: str = "vllm-ascend") -> ChunkGather:
    parallel = ParallelConfig(tp_size=tp, dcp_size=dcp).to_tensor_cast()
    return ChunkGather(load_model_config(model), load_device("H200_SXM"), parallel, semantics)


def test_chunks_of_sparse_attention() -> None:
    """vllm: chunks run like decode steps, and 21 of GLM's 78 layers gather 16 KiB of candidates per token first."""
    glm = "zai-org/GLM-5.3"
    merged = gather(glm, 8, 8, "vllm")
    assert [kind for kind, _ in merged.buffers(1000.0, 8192.0)] == ["all_gather", "all_gather", "reduce_scatter"]
    assert merged.candidates(1000.0) == [("all_gather", 1000 * 2048 * 8)]
    assert merged.choosing_layers == 21
    # vllm-ascend gathers latents, at most those of the whole context.
    assert gather(glm, 8, 8).buffers(1000.0, 8192.0) == [("all_gather", 8192 / 8 * 576 * 2)]
    assert gather(glm, 8, 8).candidates(1000.0) == gather(R1, 8, 4).candidates(1000.0) == []


def test_mla_chunks_gather_the_context() -> None:
    """S_ctx/dcp * 576 * 2 bytes per layer and rank, whatever the chunk."""
    assert gather(R1, 8, 4).buffers(1000.0, 8192.0) == [("all_gather", 8192 / 4 * 576 * 2)]


def test_gqa_chunks_gather_queries_and_merge() -> None:
    """Qwen3-235B, tp8 dcp2: 8 heads of 128 in bf16, then 16 heads of 129 in float32, for each token."""
    assert gather(QWEN, 8, 2).buffers(1000.0, 8192.0) == [
        ("all_gather", 1000 * 8 * 128 * 2),
        ("all_to_all", 1000 * 16 * 129 * 4),
    ]


def test_seconds_are_of_every_layer_and_of_chunks_with_context() -> None:
    one = np.ones(1)
    found = gather(R1, 8, 4)(one, 1000 * one, 3000 * one, 0.75 * one)
    # Three chunks of four have context, 4,000 tokens each: 3,000 in the mean over all.
    each = collective_seconds(load_device("H200_SXM"), "all_gather", 4000 / 4 * 576 * 2, range(4))
    assert found[0] == pytest.approx(61 * 0.75 * each)
    assert gather(R1, 8, 4)(one, 1000 * one, 0 * one, 0 * one)[0] == 0


def test_aggregated_layouts_with_dcp_pay_it() -> None:
    """The same layout with long chunked prompts: dcp adds to TTFT what the gather costs."""
    workload = Workload(30_000, 200)
    config: dict[str, Any] = {
        "space": SearchSpace(tp=(8,), dp=(1,), ep=(1,), dcp=(1, 8), batch_range=(4, 4)),
        "workload": workload,
        "limits": (Limits(),),
    }
    from serving_cast.config import OptimizerConfig

    asked = OptimizerConfig(R1, ("H200_SXM",), 8, **config)
    runner = ParallelRunner(make_setting(asked, "H200_SXM"))
    points = {p.parallel.dcp_size: p for p in runner.evaluate().points}
    ttft = {dcp: float(p.state.ttft[0]) for dcp, p in points.items()}  # type: ignore[index]
    extra = gather(R1, 8, 8, "vllm")
    chunk = 8192 - 4
    context = (30_000 - chunk) / 2
    chunks = 30_000 / chunk
    seconds = extra(np.ones(1), np.array([chunk]), np.array([context]), np.array([1 - 1 / chunks]))[0]
    assert seconds > 0
    assert ttft[8] - ttft[1] == pytest.approx(chunks * seconds, rel=0.5), "the rest is decode attention and queueing"


def test_phases_that_are_traced(make_runner: Runner) -> None:
    runner = make_runner(mode=Mode.DISAGGREGATED)
    runner.evaluate()
    prepared = runner._costs.prepared  # type: ignore[attr-defined]
    assert all(Phase.PREFILL in phases for _, phases in prepared)
    assert all(parallel.dcp_size == 1 for parallel, phases in prepared if phases == (Phase.PREFILL,))


def test_searching_one_device_does_not_change_another() -> None:
    """A peer's cache key left a size out: with two devices searched the second answer was wrong by a factor of 5."""
    from serving_cast.config import OptimizerConfig
    from serving_cast.parallel_runner import run_devices
    from tensor_cast.performance_model.estimate import clear_memos

    def search(*devices: str) -> list[Any]:
        clear_memos()
        space = SearchSpace(tp=(16,), dp=(1,), ep=(1, 16), dcp=(1, 2, 4))
        asked = OptimizerConfig(QWEN, devices, 16, Workload(8000, 500), limits=(Limits(tpot_ms=50),), space=space)
        return [(summary.candidates, summary.pareto, summary.rejections) for summary in run_devices(asked)]

    together = search("H200_SXM", "B200_SXM")
    assert together == [*search("H200_SXM"), *search("B200_SXM")]
    assert together[0] != together[1]
    assert {row.dcp for row in together[0][0]} == {1, 2, 4}
    assert len({row.tpot_ms for row in together[0][0]}) == len(together[0][0])
