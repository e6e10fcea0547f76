"""Layout rules: each broken once, with its numbers; groups of ranks drawn by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tensor_cast.errors import LegalityError
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.parallel import AXES, axis_ranks, check, violations

R1 = "deepseek-ai/DeepSeek-R1"
QWEN_MOE = "Qwen/Qwen3-235B-A22B"
QWEN = "Qwen/Qwen3-32B"
LLAMA = "meta-llama/Llama-3.1-70B"
GPT_OSS = "openai/gpt-oss-120b"
SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "ep": "expert_parallel_size",
    "moe_dp": "moe_data_parallel_size",
    "dcp": "decode_context_parallel_size",
    "interleave": "cp_kv_cache_interleave_size",
}


def layout(**sizes: int) -> ParallelConfig:
    return ParallelConfig(**{SHORT[name]: size for name, size in sizes.items()})


def broken(model: str, sizes: dict[str, int], **options: Any) -> list[LegalityError]:
    options = {"dcp_semantics": "vllm-ascend", "block_size": 128, **options}
    return violations(load_model_config(model), layout(**sizes), **options)


@pytest.mark.parametrize(
    ("model", "sizes", "options"),
    [
        (R1, {"tp": 8}, {}),
        (R1, {"tp": 8, "dcp": 8, "dp": 4, "ep": 32}, {"quant_block": 128, "num_mtp_tokens": 2}),
        (R1, {"tp": 16, "dcp": 4, "interleave": 128}, {"quant_block": 128, "kv_transfer": True}),
        (QWEN_MOE, {"tp": 8, "dcp": 2, "ep": 8}, {}),
        (QWEN_MOE, {"tp": 4, "dp": 2, "ep": 8}, {"num_devices": 8}),
        (QWEN, {"tp": 16, "pp": 4}, {"num_devices": 64}),
        (GPT_OSS, {"tp": 8}, {}),
        (LLAMA, {"tp": 16, "dcp": 2}, {"dcp_semantics": "vllm"}),
        (R1, {"tp": 8, "dcp": 3}, {"phase": Phase.PREFILL}),  # prefill runs with dcp 1 anyway
    ],
)
def test_legal(model: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    assert broken(model, sizes, **options) == []


@pytest.mark.parametrize(
    ("rule", "model", "sizes", "options", "have"),
    [
        ("world.sizes", R1, {"tp": 0}, {}, "tp_size 0"),
        (
            "world.devices",
            R1,
            {"tp": 8, "dp": 4},
            {"num_devices": 16},
            "tp_size 8 * pp_size 1 * dp_size 4 = 32, 16 dev",
        ),
        ("tp.heads", QWEN, {"tp": 3}, {}, "64 query heads, tp_size 3"),
        ("tp.kv_heads", QWEN, {"tp": 12}, {}, "8 KV heads, tp_size 12"),
        ("tp.vocab", LLAMA, {"tp": 5}, {}, "128256 padded to 128256, tp_size 5"),
        ("tp.intermediate", QWEN, {"tp": 3}, {}, "25600, tp_size 3"),
        ("pp.layers", QWEN, {"pp": 65}, {}, "pp_size 65, 64 layers"),
        ("ep.experts", QWEN, {"tp": 8, "ep": 8}, {}, "ep_size 8, moe_dp_size 1, Qwen/Qwen3-32B has none"),
        ("ep.experts", GPT_OSS, {"tp": 8, "dp": 32, "ep": 256}, {}, "ep_size 256, 128 experts"),
        ("ep.divides", R1, {"tp": 8, "ep": 3}, {}, "tp_size 8 * dp_size 1 = 8, ep_size 3, moe_dp_size 1"),
        ("ep.divides", R1, {"tp": 8, "ep": 8, "moe_dp": 2}, {"free_experts": True}, "ep_size 8, moe_dp_size 2"),
        ("ep.engine", R1, {"tp": 8, "dp": 2, "ep": 8}, {}, "ep_size 8, tp_size 8 * dp_size 2 = 16"),
        ("moe_dp.engine", R1, {"tp": 8, "moe_dp": 2}, {}, "moe_dp_size 2"),
        ("moe_tp.intermediate", R1, {"tp": 8, "dp": 3}, {}, "2048, moe_tp 24"),
        ("quant.block", R1, {"tp": 32}, {"quant_block": 128}, "intermediate_size 18432 / 32 = 576"),
        ("quant.block", QWEN_MOE, {"tp": 8}, {"quant_block": 128}, "moe_intermediate_size 1536 / 8 = 192"),
        ("mtp.weights", QWEN, {}, {"num_mtp_tokens": 1}, "num_mtp_tokens 1, Qwen/Qwen3-32B has none"),
        ("dcp.divides_tp", R1, {"tp": 8, "dcp": 3}, {}, "tp_size 8, dcp_size 3"),
        ("dcp.kv_heads", LLAMA, {"tp": 8, "dcp": 2}, {}, "tp_size 8, dcp_size 2, 64 query heads and 8 KV heads"),
        ("dcp.sliding_window", GPT_OSS, {"tp": 16, "dcp": 2}, {}, "dcp_size 2, 18 layers of openai/gpt-oss-120b"),
        (
            "dcp.interleave",
            R1,
            {"tp": 8, "dcp": 2, "interleave": 3},
            {},
            "block_size 128, cp_kv_cache_interleave_size 3",
        ),
        ("dcp.interleave", R1, {"tp": 8, "dcp": 2, "interleave": 256}, {}, "block_size 128, cp_kv_cache_interleave_si"),
        (
            "dcp.interleave_transfer",
            R1,
            {"tp": 8, "dcp": 2},
            {"kv_transfer": True},
            "block_size 128, cp_kv_cache_inter",
        ),
        (
            "dcp.interleave_mtp",
            R1,
            {"tp": 8, "dcp": 2, "interleave": 2},
            {"dcp_semantics": "vllm", "num_mtp_tokens": 1},
            "cp_kv_cache_interleave_size 2, num_mtp_tokens 1",
        ),
    ],
)
def test_each_rule(rule: str, model: str, sizes: dict[str, int], options: dict[str, Any], have: str) -> None:
    (error,) = [error for error in broken(model, sizes, **options) if error.rule == rule and have in error.have]
    assert error.need
    assert error.remedy
    assert str(error) == f"[{rule}] need {error.need}; have {error.have}; {error.remedy}"


def test_an_engine_that_replicates_experts_may() -> None:
    sizes = {"tp": 8, "dp": 2, "ep": 4, "moe_dp": 2}
    assert broken(R1, sizes, free_experts=True) == []
    assert {error.rule for error in broken(R1, sizes)} == {"ep.engine", "moe_dp.engine"}


def test_dense_layers_matter_only_where_there_are_some() -> None:
    # Qwen3-30B-A3B has an intermediate_size of 6144 in its config, but no layer that uses it.
    assert "tp.intermediate" not in {e.rule for e in broken("Qwen/Qwen3-30B-A3B", {"tp": 5})}


def test_block_quantised_shards_of_real_checkpoints() -> None:
    # Qwen3-32B-FP8: 25600 / 16 = 1600 is no multiple of 128, 25600 / 8 = 3200 is.
    name = "Qwen/Qwen3-32B-FP8"
    assert broken(name, {"tp": 8}, quant_block=128) == []
    assert [e.have for e in broken(name, {"tp": 16}, quant_block=128)] == ["intermediate_size 25600 / 16 = 1600"]
    # Expert parallelism keeps experts whole.
    assert broken("Qwen/Qwen3-235B-A22B-FP8", {"tp": 8, "ep": 8}, quant_block=128) == []


def test_check_raises_the_first() -> None:
    model = load_model_config(QWEN)
    with pytest.raises(LegalityError, match=r"\[tp.heads\]") as caught:
        check(model, layout(tp=3), dcp_semantics="rfc", block_size=16)
    assert caught.value.exit_code == 2
    check(model, layout(tp=4), dcp_semantics="rfc", block_size=16)


@pytest.mark.parametrize(
    ("sizes", "axis", "ranks"),
    [
        ({"tp": 4, "pp": 2, "dp": 2, "dcp": 2, "ep": 8}, "tp", (0, 1, 2, 3)),
        ({"tp": 4, "pp": 2, "dp": 2, "dcp": 2, "ep": 8}, "dcp", (0, 1)),
        ({"tp": 4, "pp": 2, "dp": 2, "dcp": 2, "ep": 8}, "pp", (0, 4)),
        ({"tp": 4, "pp": 2, "dp": 2, "dcp": 2, "ep": 8}, "dp", (0, 8)),
        # Experts spread over the stage's ranks: both dp replicas of stage 0.
        ({"tp": 4, "pp": 2, "dp": 2, "dcp": 2, "ep": 8}, "ep", (0, 1, 2, 3, 8, 9, 10, 11)),
        ({"tp": 4, "pp": 2, "dp": 2}, "moe_tp", (0, 1, 2, 3, 8, 9, 10, 11)),
        ({"tp": 4, "pp": 2, "dp": 2}, "ep", (0,)),
        ({"tp": 4, "dp": 4, "ep": 4, "moe_dp": 2}, "moe_tp", (0, 1)),
        ({"tp": 4, "dp": 4, "ep": 4, "moe_dp": 2}, "ep", (0, 2, 4, 6)),
        ({"tp": 4, "dp": 4, "ep": 4, "moe_dp": 2}, "moe_dp", (0, 8)),
    ],
)
def test_groups(sizes: dict[str, int], axis: str, ranks: tuple[int, ...]) -> None:
    assert axis_ranks(layout(**sizes), axis) == ranks


def test_group_sizes_are_the_sizes_of_the_axes() -> None:
    parallel = layout(tp=4, pp=3, dp=6, dcp=2, ep=4, moe_dp=2)
    sizes = {axis: len(axis_ranks(parallel, axis)) for axis in AXES}
    assert sizes == {"tp": 4, "dcp": 2, "dp": 6, "pp": 3, "ep": 4, "moe_tp": 3, "moe_dp": 2}
    with pytest.raises(ValueError, match="unknown parallel axis 'cp'; known: tp"):
        axis_ranks(parallel, "cp")
