"""Pipeline flows against schedules that are played through batch by batch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tensor_cast.performance_model.pipeline import CAUSES, StageTimes, mixed_flow, prefill_seconds, steady_flow


def played(work: list[list[float]], hops: list[float], back: float, batches: int) -> float:
    """Seconds per step in the long run, from the rules: a stage takes batches in order, one at a time.

    ``work[k]`` are the stage times of step k; batch ``k % batches`` makes step k.
    """
    stages = len(hops)
    free = [0.0] * stages  # when each stage is done with the step before
    ready = [0.0] * batches  # when each batch may start its next step
    marks: list[float] = []
    for k, times in enumerate(work):
        now = ready[k % batches]
        for stage in range(stages):
            begin = max(now, free[stage])
            free[stage] = now = begin + hops[stage] + times[stage]
        ready[k % batches] = now + back
        marks.append(now)
    half = len(marks) // 2
    return (marks[-1] - marks[half]) / (len(marks) - 1 - half)


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("work", "hops", "back"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0.0] * 4, 0.0),
        ([1.0, 2.0, 1.5], [0.0, 0.1, 0.3], 0.4),
        ([3.0, 1.0], [0.0, 0.5], 2.0),
    ],
)
def test_cycle_is_what_the_schedule_gives(work: list[float], hops: list[float], back: float, batches: int) -> None:
    flow = steady_flow(StageTimes(tuple(work), tuple(hops), back), batches)
    assert flow.cycle / batches == pytest.approx(played([work] * 4000, hops, back, batches), rel=1e-3)


def test_one_batch_uses_one_stage_at_a_time() -> None:
    flow = steady_flow(StageTimes((1.0,) * 4, (0.0,) * 4, 0.0), 1)
    assert flow.cycle == 4.0
    assert [float(u) for u in flow.utilisation] == [0.25] * 4
    assert flow.bubbles["fill"] == 0.75


def test_as_many_batches_as_equal_stages_fill_them() -> None:
    flow = steady_flow(StageTimes((1.0,) * 4, (0.0,) * 4, 0.0), 4)
    assert flow.cycle == 4.0
    assert flow.mean_utilisation == 1.0


def test_one_more_batch_hides_the_host() -> None:
    """p batches wait for the host between their steps; p + 1 keep the stages busy and wait longer themselves."""
    times = StageTimes((1.0, 1.0), (0.0, 0.0), 0.5)
    assert steady_flow(times, 2).cycle == 2.5
    assert steady_flow(times, 2).bubbles["return"] == pytest.approx(0.2)
    assert steady_flow(times, 3).cycle == 3.0
    assert steady_flow(times, 3).mean_utilisation == 1.0


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_mixed_steps(stages: int, share: float) -> None:
    """Equal stages and as many batches: the slot is the longest of any p steps in a row, exactly for two."""
    draw = random.Random(7)
    work = [[5.0 if draw.random() < share else 1.0] * stages for _ in range(60_000)]
    calm = StageTimes((1.0,) * stages, (0.0,) * stages, 0.0)
    busy = StageTimes((5.0,) * stages, (0.0,) * stages, 0.0)
    flow = mixed_flow(calm, busy, share, stages)
    ratio = flow.cycle / stages / played(work, [0.0] * stages, 0.0, stages)
    assert 0.98 < ratio < (1.02 if stages == 2 else 1.1)


@pytest.mark.parametrize("overlap", [False, True])
def test_bubbles_and_work_add_up(overlap: bool) -> None:
    draw = np.random.default_rng(3)
    for batches in (1, 2, 3, 5):
        work = tuple(draw.uniform(0.5, 2.0, 50) for _ in range(3))
        more = tuple(w * draw.uniform(1.0, 4.0, 50) for w in work)
        hops = (0.0, draw.uniform(0, 0.5, 50), draw.uniform(0, 0.5, 50))
        calm, busy = StageTimes(work, hops, 0.3, overlap), StageTimes(more, hops, 0.4, overlap)
        flow = mixed_flow(calm, busy, draw.uniform(0, 1, 50), batches)
        assert set(flow.bubbles) == set(CAUSES)
        np.testing.assert_allclose(flow.mean_utilisation + sum(flow.bubbles.values()), 1.0)
        assert all((share >= -1e-12).all() for share in flow.bubbles.values())
        assert all((u <= 1 + 1e-12).all() for u in flow.utilisation)


def test_overlapped_transfers_cost_latency_only() -> None:
    """Source 004: p stages of s seconds and p - 1 transfers of h give a cycle of p*s + (p-1)*h for p batches."""
    flow = steady_flow(StageTimes((1.0,) * 4, (0.0, 0.1, 0.1, 0.1), 0.0, overlap=True), 4)
    assert flow.cycle == pytest.approx(4.3)
    assert steady_flow(StageTimes((1.0,) * 4, (0.0, 0.1, 0.1, 0.1), 0.0), 4).cycle == pytest.approx(4.4)


def test_chunks_follow_each_other() -> None:
    """Ten chunks through two stages of 1 s: the last leaves after 11 s; without pipelining it would be 20 s."""
    first_token, between = prefill_seconds(StageTimes((1.0, 1.0), (0.0, 0.0), 0.0), 10.0, 2)
    assert first_token == 11.0
    assert between == 10.0


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="transfer for each stage"):
        StageTimes((1.0,), (), 0.0)
    with pytest.raises(ValueError, match="batch in flight"):
        steady_flow(StageTimes((1.0,), (0.0,), 0.0), 0)
