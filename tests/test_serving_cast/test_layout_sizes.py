"""Which layouts a search looks at unasked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serving_cast.config import Mode, SearchSpace
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.service.layout_sizes import layout_sizes

Runner = Callable[..., ParallelRunner]


def sizes(runner: ParallelRunner, *axes: str) -> set[tuple[int, ...]]:
    return {tuple(layout[f"{axis}_size"] for axis in axes) for layout in layout_sizes(runner.setting)}


def test_dense_models_have_replicas_instead_of_dp(make_runner: Runner) -> None:
    """Data-parallel ranks that share no experts are instances of their own; the rows would be listed twice."""
    runner = make_runner(model="Qwen/Qwen3-32B")
    assert sizes(runner, "tp", "dp") == {(1, 1), (2, 1), (4, 1), (8, 1)}
    rows = {row.parallel: row for row in runner.run()[0].candidates}
    assert rows["tp2"].replicas == 4


def test_dp_of_a_dense_model_where_it_is_asked_for(make_runner: Runner) -> None:
    space = SearchSpace(tp=(2,), dp=(1, 2), dcp=(1,))
    (summary,) = make_runner(model="Qwen/Qwen3-32B", space=space).run()
    rates = {row.parallel: row.throughput_tok_s for row in summary.candidates}
    assert rates["tp2dp2"] == pytest.approx(rates["tp2"])


def test_instances_of_a_given_size_are_filled(make_runner: Runner) -> None:
    asked: dict[str, Any] = {"mode": Mode.PD_RATIO, "prefill_devices_per_instance": 4}
    assert {(1, 4), (2, 2), (4, 1)} <= sizes(make_runner(model="Qwen/Qwen3-32B", **asked), "tp", "dp")


def test_experts_are_shared_over_dp(make_runner: Runner) -> None:
    assert {(1, 8), (2, 4), (4, 2), (8, 1)} <= sizes(make_runner(), "tp", "dp")
