"""Inputs that check themselves, labels and size lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serving_cast.config import DEFAULT_MTP_ACCEPTANCE, Limits, Mode, ParallelConfig, SearchSpace, Workload
from serving_cast.service.rows import Row
from serving_cast.service.utils import DISAGG_COLUMNS, divisors, format_parallel_label, resolve_search_sizes
from tensor_cast.errors import ConfigError


def test_world_size_is_the_product() -> None:
    assert ParallelConfig(tp_size=8, dp_size=2, dcp_size=8).world_size == 16
    assert ParallelConfig(world_size=8, tp_size=8).world_size == 8
    assert ParallelConfig().world_size == 1
    with pytest.raises(ConfigError, match=r"world_size 64 is not tp\*pp\*dp = 8"):
        ParallelConfig(world_size=64, tp_size=8, dcp_size=8)


def test_conversion_keeps_every_axis() -> None:
    found = ParallelConfig(
        tp_size=8, dp_size=4, ep_size=32, dcp_size=2, cp_kv_cache_interleave_size=16
    ).to_tensor_cast()
    assert found.tensor_parallel_size == 8
    assert found.data_parallel_size == 4
    assert found.expert_parallel_size == 32
    assert found.decode_context_parallel_size == 2
    assert found.cp_kv_cache_interleave_size == 16
    assert found.world_size == 32


@pytest.mark.parametrize("sizes", [{"tp_size": 0}, {"dcp_size": -1}, {"dp_size": True}, {"ep_size": 1.5}])
def test_sizes_are_positive_integers(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be an integer of at least 1"):
        ParallelConfig(**sizes)


@pytest.mark.parametrize(
    ("sizes", "label"),
    [
        ({"tp_size": 8, "dcp_size": 4, "ep_size": 16, "dp_size": 2}, "tp8dcp4ep16dp2"),
        ({"tp_size": 8, "dcp_size": 4, "ep_size": 8}, "tp8dcp4ep8"),
        ({}, "tp1"),
        ({"dp_size": 4}, "tp1dp4"),
        ({"tp_size": 2, "pp_size": 3}, "tp2pp3"),
    ],
)
def test_label(sizes: dict[str, int], label: str) -> None:
    assert format_parallel_label(ParallelConfig(**sizes)) == label


def test_size_lists() -> None:
    assert resolve_search_sizes(None, (4, 1, 2)) == (1, 2, 4)
    assert resolve_search_sizes((8, 2, 8), (1, 2)) == (2, 8)
    assert divisors(24) == (1, 2, 3, 4, 6, 8, 12, 24)


def test_columns_are_the_row() -> None:
    assert tuple(Row.__dataclass_fields__) == DISAGG_COLUMNS
    assert "dcp" in DISAGG_COLUMNS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_length": 0}, "input length must be an integer of at least 1"),
        ({"output_length": -3}, "output length"),
        ({"prefix_cache_hit_rate": 1.1}, "prefix cache hit rate must lie between 0 and 1"),
        ({"prefix_cache_hit_rate": float("nan")}, "prefix cache hit rate"),
        ({"num_mtp_tokens": 1, "mtp_acceptance_rates": (0.9, 0.8)}, "2 MTP acceptance rates for 1 draft tokens"),
        ({"mtp_acceptance_rates": (0.9,)}, "1 MTP acceptance rates for 0 draft tokens"),
        ({"num_mtp_tokens": 1, "mtp_acceptance_rates": (1.9,)}, "MTP acceptance rate must lie between 0 and 1"),
        ({"num_mtp_tokens": -1}, "number of MTP tokens"),
    ],
)
def test_bad_workloads(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**({"input_length": 10, "output_length": 10} | values))


def test_missing_acceptance_rates() -> None:
    assert Workload(9, 9, num_mtp_tokens=2).mtp_acceptance_rates == (DEFAULT_MTP_ACCEPTANCE,) * 2
    assert Workload(9, 9, num_mtp_tokens=3, mtp_acceptance_rates=(0.9, 0.7)).mtp_acceptance_rates == (0.9, 0.7, 0.7)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    workload = Workload(100, 10, prefix_cache_hit_rate=1.0)
    assert workload.new_input_tokens == 1
    assert workload.cached_input_tokens == 99


@pytest.mark.parametrize("value", [0.0, -5.0, float("nan"), float("inf")])
def test_limits_are_positive(value: float) -> None:
    with pytest.raises(ConfigError, match="must be a positive number of milliseconds"):
        Limits(tpot_ms=value)


def test_search_space_checks() -> None:
    with pytest.raises(ConfigError, match="--dcp-sizes must be an integer of at least 1, found 0"):
        SearchSpace(dcp=(1, 0))
    with pytest.raises(ConfigError, match="--batch-range 8 2 is reversed"):
        SearchSpace(batch_range=(8, 2))
    with pytest.raises(ConfigError, match="--batch-range"):
        SearchSpace(batch_range=(0, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_devices": 0}, "--num-devices"),
        ({"jobs": 0}, "--jobs"),
        ({"reserved_memory_gb": -1.0}, "--reserved-memory-gb"),
        ({"max_batched_tokens": 0}, "--max-batched-tokens"),
        ({"block_size": -16}, "--block-size"),
        (
            {"mode": Mode.PD_RATIO, "prefill_devices_per_instance": 4, "decode_devices_per_instance": 8},
            "one prefill and one decode instance need 12 devices, --num-devices is 8",
        ),
    ],
)
def test_bad_searches(make_config: Callable[..., Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**values)
