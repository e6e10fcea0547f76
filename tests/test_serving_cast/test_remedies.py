"""What a layout that does not fit is told: only what is legal for the model, and helps."""

from __future__ import annotations

from typing import Any

import pytest

from serving_cast.config import OptimizerConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.service.rows import Rejection
from serving_cast.setting import make_setting

LLAMA, GLM = "meta-llama/Meta-Llama-3.1-70B", "zai-org/GLM-5.3-W4A16"


def rejections(model: str, device: str, devices: int, tp: int, **values: Any) -> dict[str, Rejection]:
    """Rejections by label of a search of tp alone, unless other sizes are given as ``space``."""
    space = {"tp": (tp,), "dp": (1,), "ep": (1,), "dcp": (1,)} | values.pop("space", {})
    asked = {"workload": Workload(4096, 512)} | values
    config = OptimizerConfig(model, (device,), devices, space=SearchSpace(**space), **asked)
    (summary,) = ParallelRunner(make_setting(config, device)).run()
    return {f"tp{r.parallel.tp_size}pp{r.parallel.pp_size}dcp{r.parallel.dcp_size}": r for r in summary.rejections}


def test_a_dense_model_has_no_experts_to_spread() -> None:
    found = rejections(LLAMA, "H100_SXM", 8, 1)["tp1pp1dcp1"]
    assert found.rule == "memory.weights"
    assert found.remedy == (
        "use more tp or stages (--pp-sizes 2), or a smaller weight format (--quantize-linear-action)"
    )
    asked = rejections(LLAMA, "H100_SXM", 8, 1, space={"pp": (1, 2)})
    assert asked["tp1pp1dcp1"].remedy.startswith("use more tp or more pp, or")


def test_without_devices_for_it_nothing_is_split_further() -> None:
    found = rejections(LLAMA, "A100_80G_SXM", 1, 1)["tp1pp1dcp1"]
    assert found.remedy.startswith("use more devices (--num-devices), or a smaller weight format")


def test_experts_spread_over_dp_as_well() -> None:
    """98.5 GiB of GLM's W4A16 weights on each of four ranks; its experts are in 4 bits already."""
    found = rejections(GLM, "A100_80G_SXM", 8, 4)["tp4pp1dcp1"]
    assert found.rule == "memory.weights"
    assert found.remedy == "use more tp, more dp or stages (--pp-sizes 2)"


def test_the_longest_request_and_not_the_batch() -> None:
    """Latents are whole on every TP rank: only dcp and stages divide them. One request of 4,608 tokens would fit."""
    found = rejections(GLM, "A100_80G_SXM", 16, 8, max_model_len=524_288)["tp8pp1dcp1"]
    assert found.rule == "memory.longest_request"
    assert found.need.startswith("room for one request of 524,288 tokens (--max-model-len)")
    assert found.remedy == (
        "lower --max-model-len, or use more dcp or stages (--pp-sizes 2), or a smaller KV format "
        "(--quantize-attention-action)"
    )
    assert not rejections(GLM, "A100_80G_SXM", 16, 8)
    fits = rejections(GLM, "A100_80G_SXM", 16, 8, max_model_len=524_288, space={"dcp": (8,)})
    assert not fits, "what the remedy says helps"


@pytest.mark.parametrize(("tp", "ways"), [(4, "more tp or stages"), (8, "stages"), (16, "more dcp or stages")])
def test_kv_heads_split_until_each_rank_has_one(tp: int, ways: str) -> None:
    """From TP 8 on ranks of Llama-3.1-70B hold copies of 8 KV heads, which only dcp (beyond TP 8) and stages divide.

    A token takes 80 layers x 2 x 128 elements x 2 B of a head: four million of them 152.6 GiB.
    """
    found = rejections(LLAMA, "H200_SXM", 64, tp, workload=Workload(4_000_000, 512))[f"tp{tp}pp1dcp1"]
    assert found.rule == "memory.kv_cache"
    assert found.remedy == f"use {ways} (--pp-sizes 2), or a smaller KV format (--quantize-attention-action)"
