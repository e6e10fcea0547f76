"""``--max-concurrency``: layouts compared at one total number of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serving_cast.config import Mode, OptimizerConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.setting import make_setting
from tensor_cast.errors import ConfigError

Runner = Callable[..., ParallelRunner]

DENSE = SearchSpace(tp=(8, 16), dp=(1,), dcp=(1,), pp=(1, 2))


def llama(most: int | None, space: SearchSpace = DENSE, **values: Any) -> ParallelRunner:
    asked: dict[str, Any] = {
        "model": "meta-llama/Meta-Llama-3.1-70B",
        "devices": ("H100_SXM",),
        "num_devices": 16,
        "workload": Workload(4096, 512),
        "space": space,
        "max_concurrency": most,
    }
    config = OptimizerConfig(**(asked | values))
    return ParallelRunner(make_setting(config, "H100_SXM"))


@pytest.mark.parametrize("most", [64, 63])
def test_layouts_meet_at_the_same_number_of_requests(most: int) -> None:
    """One instance over 16 devices takes all requests; two replicas and two batches in flight each take half."""
    (summary,) = llama(most).run()
    rows = {row.parallel: row for row in summary.candidates}
    assert {name: row.batch_size for name, row in rows.items()} == {"tp16": most, "tp8": most // 2, "tp8pp2": most // 2}
    even = 2 * (most // 2)
    assert {name: row.concurrency for name, row in rows.items()} == {"tp16": most, "tp8": even, "tp8pp2": even}
    assert all(row.concurrency <= most for row in summary.pareto)
    assert summary.inputs()["max_concurrency"] == most


def test_a_bounded_batch_is_priced_as_any_other() -> None:
    (bounded,) = llama(64).run()
    for row in bounded.candidates:
        space = SearchSpace(tp=(row.tp,), dp=(1,), dcp=(1,), pp=(row.pp,), batch_range=(row.batch_size,) * 2)
        (alone,) = llama(None, space).run()
        assert alone.candidates == (row,)


def test_the_smallest_batch_may_be_too_many(make_runner: Runner) -> None:
    """Two replicas of dp 4 hold eight requests at batch 1; with --batch-range from 3 on they hold 24."""
    space = SearchSpace(tp=(2,), dp=(4,), ep=(8,), dcp=(1,), batch_range=(3, 9))
    (summary,) = make_runner(num_devices=16, space=space, max_concurrency=20).run()
    (rejection,) = summary.rejections
    assert rejection.rule == "workload.concurrency"
    assert rejection.need == "at most 20 requests in flight (--max-concurrency)"
    assert rejection.have == "24: batch 3 x dp 4 x replicas 2"
    assert rejection.remedy.startswith("raise --max-concurrency to 24, or lower --batch-range")
    assert rejection.excess == pytest.approx(1.2)
    assert "nearest is tp2ep8dp4" in summary.message()
    (fits,) = make_runner(num_devices=16, space=space, max_concurrency=24).run()
    assert [row.concurrency for row in fits.candidates] == [24]


def test_batches_in_flight_count() -> None:
    (summary,) = llama(1, SearchSpace(tp=(8,), dp=(1,), dcp=(1,), pp=(2,))).run()
    assert [(r.rule, r.have) for r in summary.rejections] == [("workload.concurrency", "2: batches in flight 2")]


def test_each_phase_of_a_disaggregated_search_keeps_it(make_runner: Runner) -> None:
    (summary,) = make_runner(num_devices=16, mode=Mode.DISAGGREGATED, max_concurrency=8).run()
    assert {row.phase for row in summary.candidates} == {"prefill", "decode"}
    assert max(row.concurrency for row in summary.candidates) == 8


def test_not_with_the_ratio(make_config: Callable[..., OptimizerConfig]) -> None:
    with pytest.raises(ConfigError, match="--batch-range"):
        make_config(mode=Mode.PD_RATIO, max_concurrency=8)
