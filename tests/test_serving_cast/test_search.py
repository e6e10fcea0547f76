"""Choosing a batch: exact, whatever the order, and with a reason where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_cast.config import Limits, OptimizerConfig, ParallelConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.service.points import LayoutMemory, LayoutPoints
from serving_cast.service.rows import Rejection
from serving_cast.service.search import choose, nearest
from serving_cast.service.steady_state import SteadyState
from tensor_cast.units import GIB

Runner = Callable[..., ParallelRunner]


def points(tpot: list[float], rate: list[float], *, kv: float = 0.0, **values: Any) -> LayoutPoints:
    """A layout with these TPOTs (ms) and rates at batch 1, 2, ..."""
    size = len(tpot)
    batches = np.arange(1, size + 1)
    defaults: dict[str, Any] = {
        "step_tokens": batches * 1.0,
        "budget": 10_000,
        "within_budget": np.ones(size, dtype=bool),
    }
    state = SteadyState(
        step=np.asarray(tpot) * 1e-3,
        tpot=np.asarray(tpot) * 1e-3,
        tokens_per_second=np.asarray(rate),
        requests_per_second=np.asarray(rate) / 100,
        **(defaults | values),
    )
    memory = LayoutMemory(10 * GIB, 4 * GIB, 1 * GIB, np.full(size, 1.0 * GIB), batches * kv * GIB)
    labels = ("D", "E", "S")
    return LayoutPoints(
        "aggregated", ParallelConfig(tp_size=2), labels, 8, 4, batches, state, memory, 0, 1.0, lambda index: "memory"
    )


def test_largest_batch_under_the_limit() -> None:
    assert choose(points([10, 20, 30, 40], [1, 2, 3, 4]), Limits(tpot_ms=30)) == 2


def test_every_batch_is_looked_at() -> None:
    """Throughput that falls and rises again: the best of all feasible ones, not the first or the last."""
    found = choose(points([10, 20, 30, 40, 50], [3, 9, 2, 8, 10]), Limits(tpot_ms=45))
    assert found == 1


def test_of_equal_rates_the_larger_batch() -> None:
    assert choose(points([10, 20, 30], [1, 5, 5]), Limits()) == 2


def test_feasibility_need_not_be_one_interval() -> None:
    assert choose(points([10, 50, 20, 60], [1, 2, 3, 4]), Limits(tpot_ms=25)) == 2


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 99)), min_size=1, max_size=45), st.integers(1, 100))
def test_equals_trying_every_batch(values: list[tuple[int, int]], limit: int) -> None:
    tpot, rate = zip(*values, strict=True)
    found = choose(points(list(tpot), list(rate), kv=0.1), Limits(tpot_ms=limit + 0.5))
    feasible = [i for i in range(len(values)) if tpot[i] <= limit + 0.5 and 6 + 0.1 * (i + 1) <= 10 + 1e-9]
    if not feasible:
        assert isinstance(found, Rejection)
    else:
        assert isinstance(found, int)
        assert rate[found] == max(rate[i] for i in feasible)


def test_limit_rejection_names_the_nearest_batch() -> None:
    found = choose(points([60, 55, 70], [1, 2, 3]), Limits(tpot_ms=50))
    assert isinstance(found, Rejection)
    assert found.rule == "tpot.limit"
    assert found.need == "TPOT <= 50 ms"
    assert found.have == "55 ms at batch 2, the nearest (10 % over)"
    assert found.excess == pytest.approx(1.1)


def test_ttft_rejection() -> None:
    late = replace(points([10], [1]).state, ttft=np.asarray([2.0]))
    found = choose(replace(points([10], [1]), state=late), Limits(ttft_ms=1000, tpot_ms=50))
    assert isinstance(found, Rejection)
    assert found.rule == "ttft.limit"
    assert found.excess == pytest.approx(2)


@pytest.mark.parametrize(
    ("weights", "activation", "kv", "rule", "size"),
    [(11, 1, 1, "memory.weights", 11), (8, 1.5, 1, "memory.activation", 10.5), (7, 1, 2, "memory.kv_cache", 11)],
)
def test_memory_rejections(weights: float, activation: float, kv: float, rule: str, size: float) -> None:
    memory = LayoutMemory(10 * GIB, weights * GIB, GIB, np.asarray([activation * GIB]), np.asarray([kv * GIB]))
    found = choose(replace(points([10], [1]), memory=memory), Limits())
    assert isinstance(found, Rejection)
    assert found.rule == rule
    assert found.need.endswith("<= 10.00 GiB")
    assert found.have == f"{size:.2f} GiB"
    assert found.remedy


def test_budget_rejection() -> None:
    full = points([10, 20], [1, 2], within_budget=np.zeros(2, dtype=bool), step_tokens=np.asarray([120.0, 240.0]))
    found = choose(replace(full, state=replace(full.state, budget=100)), Limits())
    assert isinstance(found, Rejection)
    assert found.rule == "tokens.budget"
    assert found.excess == pytest.approx(1.2)


def test_nearest_is_the_least_excess() -> None:
    made = [
        Rejection(ParallelConfig(tp_size=t), "decode", "tpot.limit", "", "", "", e)
        for t, e in ((1, 3.0), (2, 1.1), (4, 2))
    ]
    legality = Rejection(ParallelConfig(), "decode", "dcp.divides_tp", "", "", "")
    too_big = Rejection(ParallelConfig(), "decode", "memory.weights", "", "", "", 1.01)
    assert nearest([legality, too_big, *made]) is made[1]
    assert nearest([legality, too_big]) is too_big
    assert nearest([legality]) is legality
    assert nearest([]) is None


# -- the whole search, on fake prices --------------------------------------------------------------------------------


def test_batch_plus_one_violates(make_runner: Runner) -> None:
    """The chosen batch is exact: one more request breaks the limit or does not fit."""
    limits = Limits(ttft_ms=5000, tpot_ms=8)
    runner = make_runner(limits=(limits,))
    evaluation = runner.evaluate()
    summary = runner.summarise(evaluation, limits)
    assert summary.candidates
    by_label = {p.parallel: p for p in evaluation.points}
    reasons = set()
    for row in summary.candidates:
        layout = next(p for key, p in by_label.items() if key.axes() == {a: getattr(row, a) for a in key.axes()})
        index = row.batch_size - 1
        assert layout.batches[index] == row.batch_size
        assert row.tpot_ms is not None
        assert row.tpot_ms <= 8
        assert row.memory_total_gib <= row.memory_available_gib
        if index + 1 < len(layout.batches):
            assert not layout.meets(limits)[index + 1]
            reasons.add(bool(layout.memory.fits[index + 1]))
    assert reasons == {True, False}, "some layouts end at the limit, some at the memory"


def test_answer_does_not_depend_on_what_else_is_searched(make_runner: Runner) -> None:
    everything = make_runner(num_devices=16).run()[0]
    rows = {row.parallel: row for row in everything.candidates}
    for row in everything.candidates[:8]:
        space = SearchSpace(tp=(row.tp,), dp=(row.dp,), ep=(row.ep,), dcp=(row.dcp,))
        alone = make_runner(num_devices=16, space=space).run()[0]
        assert alone.candidates == (rows[row.parallel],)


def test_order_of_the_sizes_does_not_matter(make_runner: Runner) -> None:
    first = make_runner(space=SearchSpace(tp=(1, 2, 4, 8), dcp=(1, 2))).run()[0]
    second = make_runner(space=SearchSpace(tp=(8, 2, 4, 1, 2), dcp=(2, 1))).run()[0]
    assert first.candidates == second.candidates
    assert first.rejections == second.rejections
    assert first.pareto == second.pareto


def test_limits_of_other_scenarios_do_not_matter(make_runner: Runner) -> None:
    tight, loose = Limits(tpot_ms=6), Limits(tpot_ms=50)
    both = make_runner(limits=(tight, loose)).run()
    assert [make_runner(limits=(one,)).run()[0].candidates for one in (tight, loose)] == [s.candidates for s in both]


def _answer(make_runner: Runner, **values: Any) -> Any:
    summary = make_runner(**({"limits": (Limits(5000, 8),)} | values)).run()[0]
    return summary.candidates, summary.pareto, summary.rejections


@pytest.mark.parametrize(
    "change",
    [
        {"workload": Workload(2001, 500)},
        {"workload": Workload(2000, 501)},
        {"workload": Workload(2000, 500, prefix_cache_hit_rate=0.1)},
        {"workload": Workload(2000, 500, num_mtp_tokens=1)},
        {"workload": Workload(2000, 500, num_mtp_tokens=1, mtp_acceptance_rates=(0.9,))},
        {"limits": (Limits(5000, 7),)},
        {"limits": (Limits(20, 8),)},
        {"max_batched_tokens": 4096},
        {"reserved_memory_gb": 1.0, "costs": {"overhead_bytes": 3.0 * GIB}},
        {"num_devices": 4},
        {"devices": ("H100_SXM",)},
        {"space": SearchSpace(dcp=(1,))},
        {"space": SearchSpace(batch_range=(1, 8))},
        {"dcp_semantics": "rfc"},
    ],
)
def test_a_relevant_input_changes_the_answer(make_runner: Runner, change: dict[str, Any]) -> None:
    assert _answer(make_runner, **change) != _answer(make_runner)


@pytest.mark.parametrize("change", [{"jobs": 4}, {"top": 3}, {"use_cache": False}])
def test_an_irrelevant_input_does_not(make_runner: Runner, change: dict[str, Any]) -> None:
    assert _answer(make_runner, **change) == _answer(make_runner)


def test_idle_devices_are_told(make_runner: Runner) -> None:
    space = SearchSpace(tp=(4,), dp=(1,), ep=(1,), dcp=(1,))
    summary = make_runner(num_devices=6, space=space).run()[0]
    row = summary.candidates[0]
    assert row.replicas == 1
    assert row.tok_s_per_device == pytest.approx(row.throughput_tok_s / 6)
    assert "2 of 6 devices stay idle" in summary.message()


def test_replicas_fill_the_devices(make_runner: Runner) -> None:
    space = SearchSpace(tp=(4,), dp=(1,), ep=(1,), dcp=(1,))
    one, four = (make_runner(num_devices=n, space=space).run()[0].candidates[0] for n in (4, 16))
    assert four.replicas == 4
    assert four.concurrency == 4 * one.concurrency
    assert four.throughput_tok_s == pytest.approx(4 * one.throughput_tok_s)
    assert four.tok_s_per_device == pytest.approx(one.tok_s_per_device)


def test_rows_agree_with_themselves(make_runner: Runner) -> None:
    for row in make_runner(num_devices=16).run()[0].candidates:
        assert row.tpot_ms is not None
        assert row.tok_s_per_user == pytest.approx(1000 / row.tpot_ms)
        assert row.throughput_tok_s == pytest.approx(row.concurrency * 1000 / row.tpot_ms)
        assert row.concurrency == row.batch_size * row.dp * row.replicas
        assert row.moe_tp * row.moe_dp * row.ep == row.tp * row.dp
        parts = row.weights_gib + row.kv_cache_size_gb + row.activation_gib + row.overhead_gib
        assert row.memory_total_gib == pytest.approx(parts)


def test_nothing_feasible_says_what_is_nearest(make_runner: Runner) -> None:
    summary = make_runner(limits=(Limits(tpot_ms=0.5),)).run()[0]
    assert not summary.feasible
    assert summary.best_json() is None
    least = min(r.excess for r in summary.rejections if r.rule == "tpot.limit")
    assert f"({100 * (least - 1):.3g} % over)" in summary.message()
    assert "nearest is" in summary.message()
    assert "[tpot.limit]" in summary.message()


def test_batch_range_is_kept(make_runner: Runner) -> None:
    rows = make_runner(space=SearchSpace(batch_range=(3, 5))).run()[0].candidates
    assert {row.batch_size for row in rows} == {5}


def test_config_echo_holds_every_input(make_config: Callable[..., OptimizerConfig], make_runner: Runner) -> None:
    inputs = make_runner().run()[0].inputs()
    assert set(make_config().echo()) <= set(inputs)
    assert inputs["device"] == "H200_SXM"
    assert inputs["dcp_semantics"] == "vllm"
    assert inputs["max_batched_tokens"] == 8192
