"""What source 000 concludes from its deployment of GLM-5.3 W4A16 on eight 80 GB devices, held against the planner.

Measured figures are its own; where a conclusion is only partly reproduced, both numbers stand here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tensor_cast.core.calibration import read_calibration
from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.core.capacity_plan import CapacityPlan
from tensor_cast.core.capacity_report import require_room
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.engine.kv_cache import indexer_layers
from tensor_cast.errors import InfeasibleError
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.units import GIB

START = Path(__file__).parents[2] / "docs" / "glm_5_3_start.yaml"

#: KV memory that the engine had at TP8, worked back from its blocks of 3,502,592 B: 338,688 and 386,943 tokens.
TP8_OLD, TP8 = 17.2628, 6046 * 3_502_592 / GIB


@cache
def plan(*, measured: bool = False, **changes: object) -> CapacityPlan:
    """Of TP8 with an 8-bit cache and three draft tokens, unless told otherwise; ``measured`` from the 39,39 start."""
    values: dict[str, object] = {
        "model": "zai-org/GLM-5.3-W4A16",
        "device": "A800_80G_SXM",
        "tp_size": 8,
        "num_mtp_tokens": 3,
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.95,
        "max_model_len": 352_000,
        "dsa_split": "self-compute",
    }
    config = CapacityConfig.create(**{**values, **changes})
    return CapacityPlanner(config, calibration=read_calibration(START) if measured else None).plan()


def staged(**changes: object) -> CapacityPlan:
    """TP4 PP2 with requests of up to 524,288 tokens, from the measured 39,39 start."""
    return plan(measured=True, **{"tp_size": 4, "pp_size": 2, "max_model_len": 524_288, **changes})


def test_stages_instead_of_ranks() -> None:
    # 352,000 / 64 = 5,500 blocks a request; int(6046 / 5500 * 352,000) is one short of 6,046 * 64.
    one = plan(kv_memory_gib=(TP8,)).capacity
    assert (one.num_blocks, one.blocks_per_request, one.kv_tokens) == (6046, 5500, 386_943)
    two = plan(
        tp_size=4, pp_size=2, pp_layer_partition="41,37", max_model_len=524_288, kv_memory_gib=(19.3445, 18.163)
    ).capacity
    assert two.kv_tokens == 729_280
    assert round(two.kv_tokens / one.kv_tokens, 2) == 1.88


def test_one_stage_is_predicted_too_small() -> None:
    # From the two-stage start, whose last stage has the larger graphs and peak; the engine had 386,943.
    predicted = plan(measured=True).capacity.kv_tokens
    assert predicted == pytest.approx(346_624, rel=0.002)
    assert predicted / 386_943 - 1 == pytest.approx(-0.104, abs=0.003)


def test_four_stages() -> None:
    asked = {"tp_size": 2, "pp_size": 4, "pp_layer_partition": "20,20,20,18", "num_mtp_tokens": 0}
    # Layers 20 to 39: 20 * 656 + (5 + 2) * 132 = 14,044 B a token; layers 0 to 19 with seven indexers as much.
    exact = plan(**asked, max_model_len=1_048_576, kv_memory_gib=(18_748 * 64 * 14_044 / GIB + 1e-9,))
    assert exact.bytes_per_token[:3] == (14_044,) * 3
    assert exact.capacity.kv_tokens == 18_748 * 64 == 1_199_872
    assert exact.unsafe_layers == (20, 21, 40, 41, 60, 61)
    # Predicted from the two-stage start, which ran the draft module: 1,224,896.
    predicted = plan(measured=True, **asked, max_model_len=1_048_576).capacity
    assert predicted.kv_tokens == pytest.approx(1_224_896, rel=0.002)
    assert predicted.kv_tokens / 1_199_872 - 1 == pytest.approx(0.021, abs=0.003)
    best = plan(measured=True, **{**asked, "pp_layer_partition": "auto"}, max_model_len=1_048_576)
    assert (best.partition, best.capacity.num_blocks) == ((21, 19, 19, 19), pytest.approx(1_318_144 / 64, rel=0.002))


def test_fp8_against_bf16() -> None:
    sizes = [plan(kv_cache_dtype=kv, kv_memory_gib=(TP8_OLD,)).bytes_per_token[0] for kv in ("bfloat16", "fp8")]
    assert sizes == [79 * 1152 + 22 * 132, 79 * 656 + 22 * 132] == [93_912, 54_728]
    assert round(sizes[0] / sizes[1], 3) == 1.716
    assert round(343_232 / 200_704, 2) == 1.71  # measured
    # 41,37 in bf16 from the 8-bit 39,39 start: 458,560 were measured.
    other = staged(pp_layer_partition="41,37", max_model_len=262_144, kv_cache_dtype="bfloat16")
    assert other.capacity.kv_tokens / 458_560 - 1 == pytest.approx(-0.019, abs=0.003)


def test_every_layer_chooses() -> None:
    # GLM-5 is GLM-5.3 with index_topk_freq 1; source 000 says four times the work of the indexer.
    sharing, own = (sum(indexer_layers(load_model_config(f"zai-org/{name}"))) for name in ("GLM-5.3", "GLM-5"))
    assert (own, sharing) == (78, 21)
    assert round(own / sharing, 2) == 3.71


def test_what_the_draft_module_takes() -> None:
    # Measured, on an older release: 168,576 of 791,744 tokens, and so 37 % of what two stages gained over 338,688.
    assert 791_744 - 623_168 == 168_576
    assert round(168_576 / 791_744, 3) == 0.213
    assert round(168_576 / (791_744 - 338_688), 2) == 0.37
    # Ours takes no graphs and no peak off: 1.89 GiB of weights on the last stage, and 41 pages there instead of 39.
    without, drafting = (staged(pp_layer_partition="39,39", num_mtp_tokens=k) for k in (0, 3))
    assert drafting.capacity.kv_tokens == 597_760
    weights = [p.stages[1].weights or 0 for p in (drafting, without)]
    assert round((weights[0] - weights[1]) / GIB, 2) == 1.89
    assert [p.bytes_per_token[1] for p in (drafting, without)] == [27_956, 27_168]
    assert 1 - drafting.capacity.kv_tokens / without.capacity.kv_tokens == pytest.approx(0.133, abs=0.002)


@pytest.mark.parametrize(("block", "blocks"), [(64, 5292), (128, 2646), (256, 1323)])
def test_the_size_of_blocks_is_neutral(block: int, blocks: int) -> None:
    pool = plan(block_size=block, max_model_len=327_680, kv_memory_gib=(TP8_OLD,)).capacity
    assert (pool.num_blocks, pool.kv_tokens) == (blocks, 338_688)


def test_expert_parallelism_leaves_the_cache_alone() -> None:
    # 256 / 8 whole experts are as many bytes as an eighth of each.
    plain, spread = plan(), plan(ep_size=8)
    assert spread.stages[0].weights == plain.stages[0].weights
    assert spread.capacity == plain.capacity
    # One instance without data parallelism moves no token to another rank (source 000 asks for an all-to-all backend).
    parallel = ParallelConfig(tensor_parallel_size=8, expert_parallel_size=8)
    layout = Layout(parallel, Phase.DECODE, "vllm", block_size=64)
    trace = TraceLibrary(load_model_config("zai-org/GLM-5.3-W4A16")).compose(layout)
    assert {(op.axis, op.name.removeprefix("_c10d_functional.")) for op in trace.ops if op.axis} == {
        ("tp", "all_reduce"),
        ("tp", "all_gather_into_tensor"),  # logits
    }


def test_data_parallelism_adds_none() -> None:
    one, two = plan(kv_memory_gib=(TP8,)), plan(dp_size=2, kv_memory_gib=(TP8,))
    assert two.capacity == one.capacity
    # Two replicas share the experts, 4,788 MiB in each of 76 layers: 51.550 - 76 * 4,788 / 16 / 1,024 = 29.340 GiB.
    assert (two.stages[0].weights or 0) / GIB == pytest.approx(29.34, abs=0.005)
    # Two instances of four devices do not hold the weights, without the draft module (source 000: 390.58 / 4 = 97.5).
    four = plan(tp_size=4, num_mtp_tokens=0)
    assert (four.stages[0].weights or 0) / GIB == pytest.approx(98.53, abs=0.01)
    with pytest.raises(InfeasibleError, match=r"weights 98\.53"):
        require_room(four)


def test_dcp_would_multiply_it() -> None:
    pool = plan(dcp_size=4, max_model_len=327_680, kv_memory_gib=(TP8_OLD,)).capacity
    assert (pool.kv_tokens, f"{pool.max_concurrency:.2f}") == (4 * 338_688, "4.13")
