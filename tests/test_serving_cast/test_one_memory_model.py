"""``capacity`` and the search call the same memory their own: KV bytes of a rank, and requests that stay resident."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from serving_cast.config import Mode, OptimizerConfig, ParallelConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.service.layout_costs import TracedCostsFactory
from serving_cast.service.staged_costs import StagedCosts
from serving_cast.setting import make_setting
from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.ir.record import Phase
from tensor_cast.pipeline_partition import default_partition
from tensor_cast.units import GIB


@dataclass(frozen=True)
class Case:
    """One layout of one model on one device; ``both`` are options that the two commands share."""

    model: str
    device: str
    sizes: dict[str, int] = field(default_factory=dict)
    drafts: int = 0
    partition: tuple[int, ...] = ()
    kv: str | None = None
    length: int = 20_000
    longest: int | None = None
    budget: int | None = None
    utilization: float | None = None

    def planner(self) -> CapacityPlanner:
        return CapacityPlanner(
            CapacityConfig.create(
                model=self.model,
                device=self.device,
                num_mtp_tokens=self.drafts,
                kv_cache_dtype=self.kv or "auto",
                max_model_len=self.longest or self.length + self.drafts,
                max_num_batched_tokens=self.budget,
                gpu_memory_utilization=self.utilization,
                pp_layer_partition=",".join(map(str, self.partition)) or None,
                **self.sizes,
            )
        )

    def config(self, mode: Mode = Mode.AGGREGATED) -> OptimizerConfig:
        space = {axis: (self.sizes.get(f"{axis}_size", 1),) for axis in ("tp", "pp", "dp", "ep", "dcp")}
        layout = ParallelConfig(**self.sizes)
        return OptimizerConfig(
            model=self.model,
            devices=(self.device,),
            num_devices=layout.world_size * (2 if mode is Mode.DISAGGREGATED else 1),
            workload=Workload(self.length - 1000, 1000, num_mtp_tokens=self.drafts),
            space=SearchSpace(**space),
            mode=mode,
            quantize_attention_action=None if self.kv is None else self.kv.upper(),
            max_model_len=self.longest,
            max_batched_tokens=self.budget,
            gpu_memory_utilization=self.utilization,
            pp_layer_partition=",".join(map(str, self.partition)) or None,
        )


CASES = {
    "grouped queries": Case("meta-llama/Llama-3.1-8B", "H100_SXM"),
    "grouped queries, PP2": Case("meta-llama/Llama-3.1-8B", "H100_SXM", {"tp_size": 2, "pp_size": 2}, kv="fp8"),
    "grouped queries, DCP2": Case("Qwen/Qwen3-235B-A22B", "H200_SXM", {"tp_size": 8, "dcp_size": 2}, utilization=0.95),
    "experts, EP over DP": Case("Qwen/Qwen3-30B-A3B", "H100_SXM", {"tp_size": 2, "dp_size": 2, "ep_size": 4}),
    "experts on NPUs": Case("Qwen/Qwen3-30B-A3B", "ATLAS_800_A2_376T_64G", {"tp_size": 4, "ep_size": 4}, budget=4096),
    "latents, DCP8, drafts": Case(
        "deepseek-ai/DeepSeek-V3", "H200_SXM", {"tp_size": 8, "ep_size": 8, "dcp_size": 8}, drafts=1
    ),
    "sparse, PP2, drafts": Case(
        "zai-org/GLM-5.3-W4A16",
        "A800_80G_SXM",
        {"tp_size": 4, "pp_size": 2},
        drafts=3,
        partition=(42, 36),
        kv="fp8",
        longest=131_072,
        utilization=0.95,
    ),
    "sliding window": Case("openai/gpt-oss-20b", "H100_SXM"),
    "sliding window, PP2": Case("openai/gpt-oss-20b", "H100_SXM", {"tp_size": 2, "pp_size": 2}, longest=65_536),
}


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request: Any) -> Case:
    return CASES[request.param]


def test_both_leave_the_same_bytes_for_the_cache(case: Case) -> None:
    planner = case.planner()
    plan = planner.plan()
    setting = make_setting(case.config(), case.device)
    parallel = ParallelConfig(**case.sizes)
    if parallel.pp_size > 1:
        layers = setting.model.num_hidden_layers
        parallel = replace(parallel, pp_layer_partition=case.partition or default_partition(layers, parallel.pp_size))
    costs = TracedCostsFactory(setting).costs(parallel, (Phase.DECODE, Phase.PREFILL))
    stages = costs.stages if isinstance(costs, StagedCosts) else (costs,)
    assert len(stages) == len(plan.stages)
    for stage, planned, rank in zip(stages, plan.stages, plan.capacity.ranks, strict=True):
        outside = stage.overhead_bytes - stage.kv.block_bytes  # the null block is cache
        assert stage.weight_bytes == planned.weights
        assert outside == planned.non_torch + planned.graph
        assert stage.profile_bytes == planned.activation
        assert setting.available_bytes - stage.weight_bytes - outside - stage.profile_bytes == planned.kv
        assert stage.kv.block_bytes == rank.block_bytes


def test_both_keep_as_many_requests(case: Case) -> None:
    planner = case.planner()
    resident = planner.resident(planner.plan(), case.length)
    (points,) = ParallelRunner(make_setting(case.config(), case.device)).evaluate().points
    flight = points.pipeline.batches if points.pipeline else 1
    most = int(points.batches[points.memory.fits].max())
    assert 0 < most < points.batches.max()  # memory decides, not the limits of a step
    assert most == resident // flight


def test_a_prefill_instance_has_the_memory_of_its_own_layout() -> None:
    """Its cache is not split, and holds prompts alone."""
    case = replace(CASES["latents, DCP8, drafts"], drafts=0)  # draft tokens need an interleave of 1, transfers a block
    runner = ParallelRunner(make_setting(case.config(Mode.DISAGGREGATED), case.device))
    by_phase = {points.phase: points for points in runner.evaluate().points}
    plan = replace(case, sizes={**case.sizes, "dcp_size": 1}).planner().plan()
    split = case.planner().plan()
    for phase, expected in (("prefill", plan), ("decode", split)):
        memory = by_phase[phase].memory
        spare = memory.available - memory.weights - memory.overhead - memory.activation.min()
        (rank,) = expected.capacity.ranks
        assert spare + rank.block_bytes == expected.stages[0].kv
    # 19,000 tokens: 297 blocks of 64 tokens, whole on every rank; 20,000, which the engine is started for: 313.
    prompts = by_phase["prefill"]
    blocks = prompts.memory.kv / plan.capacity.ranks[0].block_bytes
    assert np.array_equal(blocks, np.maximum(prompts.batches * 297, 313))


@pytest.mark.parametrize(("longest", "starts"), [(44_048, True), (44_064, False)])
def test_the_longest_request_must_fit_or_the_engine_does_not_start(longest: int, starts: bool) -> None:
    """2,754 blocks of 16 tokens: beside the null block 2,753 of them, 44,048 tokens, whatever the workload needs."""
    case = Case("Qwen/Qwen3-32B", "H100_SXM", length=8000, longest=longest, utilization=0.95)
    capacity = case.planner().plan().capacity
    assert (capacity.num_blocks, capacity.starts) == (2754, starts)
    (points,) = ParallelRunner(make_setting(case.config(), case.device)).evaluate().points
    assert bool(points.memory.fits[0]) is starts


def test_reserved_memory_is_not_for_the_cache() -> None:
    case = CASES["grouped queries"]
    config = replace(case.config(), reserved_memory_gb=3.0)
    (points,) = ParallelRunner(make_setting(config, case.device)).evaluate().points
    (free,) = ParallelRunner(make_setting(case.config(), case.device)).evaluate().points
    assert points.memory.overhead - free.memory.overhead == 3 * GIB
    (rank,) = case.planner().plan().capacity.ranks
    held = -(-20_000 // 16) * rank.block_bytes
    lost = int(free.batches[free.memory.fits].max() - points.batches[points.memory.fits].max())
    assert abs(lost - 3 * GIB / held) < 1
