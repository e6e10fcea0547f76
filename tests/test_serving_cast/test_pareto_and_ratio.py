"""The Pareto front and the counts of prefill and decode instances against plain enumeration."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_cast.config import Limits, Mode, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.service.pareto import front
from serving_cast.service.pd_ratio import instances, transfer_seconds

Runner = Callable[..., ParallelRunner]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=30))
def test_front_equals_its_definition(values: list[tuple[int, int]]) -> None:
    first, second = (np.array(v, dtype=float) for v in zip(*values, strict=True))

    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a[0] >= b[0] and a[1] >= b[1] and a != b

    expected = {v for v in values if not any(beats(other, v) for other in values)}
    found = [values[i] for i in front(first, second)]
    assert set(found) == expected
    assert len(found) == len(expected), "equal points appear once"
    assert found == sorted(found, reverse=True)


def test_front_of_nothing() -> None:
    assert front(np.array([]), np.array([])).size == 0


def test_front_rows_are_feasible(make_runner: Runner) -> None:
    limits = Limits(5000, 8)
    summary = make_runner(num_devices=16, limits=(limits,)).run()[0]
    users = [row.tok_s_per_user for row in summary.pareto]
    devices = [row.tok_s_per_device for row in summary.pareto]
    assert users == sorted(users, reverse=True)
    assert devices == sorted(devices)
    assert all(row.tpot_ms is not None and row.tpot_ms <= 8 for row in summary.pareto)
    assert max(devices) == pytest.approx(max(row.tok_s_per_device for row in summary.candidates))


@given(
    rates=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    total=st.integers(1, 64),
)
def test_instances_equal_enumeration(rates: tuple[float, float], sizes: tuple[int, int], total: int) -> None:
    options = [
        (min(x * rates[0], y * rates[1]), x * sizes[0] + y * sizes[1])
        for x in range(1, total + 1)
        for y in range(1, total + 1)
        if x * sizes[0] + y * sizes[1] <= total
    ]
    found = instances(*rates, *sizes, total)
    if not options:
        assert found is None
        return
    assert found is not None
    x, y, rate = found
    best = max(option[0] for option in options)
    assert rate == pytest.approx(best)
    assert min(x * rates[0], y * rates[1]) == pytest.approx(best)
    fewest = min(devices for value, devices in options if value >= best * (1 - 1e-12))
    assert x * sizes[0] + y * sizes[1] == fewest


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "seconds"),
    [(8, 8, 1e-3), (4, 8, 2e-3), (16, 8, 1e-3), (1, 1, 1e-3)],
)
def test_transfer_takes_the_slower_side(prefill_tp: int, decode_tp: int, seconds: float) -> None:
    found = transfer_seconds(50e6, prefill_tp=prefill_tp, decode_tp=decode_tp, bandwidth=50e9)
    assert found == pytest.approx(seconds)


def pd(make_runner: Runner, **values: object) -> ParallelRunner:
    defaults = {"num_devices": 16, "mode": Mode.PD_RATIO, "limits": (Limits(2000, 8),)}
    return make_runner(**(defaults | values))


def test_ratio_with_given_instances(make_runner: Runner) -> None:
    summary = pd(make_runner, prefill_devices_per_instance=2, decode_devices_per_instance=4).run()[0]
    choice = summary.choice
    assert choice is not None
    assert choice.prefill.tp * choice.prefill.dp == 2
    assert choice.decode.tp * choice.decode.dp == 4
    assert choice.prefill.replicas == choice.x
    assert choice.decode.replicas == choice.y
    assert choice.devices_used == 2 * choice.x + 4 * choice.y <= 16
    assert choice.requests_per_s <= min(choice.prefill.requests_per_s, choice.decode.requests_per_s) * (1 + 1e-9)
    assert choice.throughput_tok_s == pytest.approx(500 * choice.requests_per_s)
    assert choice.ttft_ms == pytest.approx(choice.prefill.ttft_ms + choice.kv_transfer_ms)
    assert choice.ttft_ms <= 2000
    assert choice.tpot_ms <= 8


def test_ratio_is_the_best_of_all_pairs(make_runner: Runner) -> None:
    """Every prefill row with every decode row in every count: none serves more."""
    limits = Limits(2000, 8)
    runner = pd(make_runner, limits=(limits,), space=SearchSpace(tp=(1, 2, 4), dp=(1,), ep=(1,), dcp=(1, 2)))
    summary = runner.run()[0]
    assert summary.choice is not None
    best = 0.0
    rows = {phase: [r for r in summary.candidates if r.phase == phase] for phase in ("prefill", "decode")}
    for p in rows["prefill"]:
        for d in rows["decode"]:
            for x in range(1, 17):
                for y in range(1, 17):
                    if x * p.tp + y * d.tp <= 16:
                        rate = min(x * p.requests_per_s / p.replicas, y * d.requests_per_s / d.replicas)
                        best = max(best, rate)
    # Transfers are short against the TTFT limit here, so they take no prefill batch away.
    assert summary.choice.requests_per_s == pytest.approx(best, rel=1e-9)


def test_more_devices_never_serve_fewer(make_runner: Runner) -> None:
    rates = [pd(make_runner, num_devices=n).run()[0].choice.requests_per_s for n in (4, 8, 16, 32)]  # type: ignore[union-attr]
    assert rates == sorted(rates)


def test_transfer_counts_against_the_ttft_limit(make_runner: Runner) -> None:
    quick = pd(make_runner).run()[0]
    slow = pd(make_runner, costs={"kv_token_bytes": 8e6}).run()[0]
    assert quick.choice is not None
    assert slow.choice is None or slow.choice.ttft_ms <= 2000
    moving = quick.choice.kv_transfer_ms
    assert moving > 0
    limit = quick.choice.prefill.ttft_ms
    assert limit is not None
    tight = pd(make_runner, limits=(Limits(limit, 8),)).run()[0]
    assert tight.choice is None or tight.choice.ttft_ms <= limit


def test_decode_makes_all_but_the_first_token(make_runner: Runner) -> None:
    summary = pd(make_runner, workload=Workload(2000, 2)).run()[0]
    row = next(row for row in summary.candidates if row.phase == "decode")
    assert row.requests_per_s == pytest.approx(row.throughput_tok_s / 1)


def test_no_room_for_both_sides(make_runner: Runner) -> None:
    runner = pd(make_runner, num_devices=4, space=SearchSpace(tp=(4,), dp=(1,), ep=(1,), dcp=(1,)))
    summary = runner.run()[0]
    assert summary.choice is None
    assert not summary.feasible
    assert summary.best_json() is None
    assert "no pair of instances fits" in summary.message()
