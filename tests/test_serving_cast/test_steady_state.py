"""The steady-state maths against sums worked out by hand, and its continuity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_fakes import FakePricer

from serving_cast.config import Workload
from serving_cast.service.steady_state import AggregatedGrid, DecodeGrid, PrefillGrid, SteadyState

DECODE = FakePricer()
PREFILL = replace(DECODE, per_read=4e-9)
HOST = 5e-4


def aggregated(workload: Workload, budget: float, batches: list[float], **values: Any) -> SteadyState:
    grid = AggregatedGrid.build(workload, budget, np.asarray(batches, dtype=float))  # type: ignore[arg-type]
    return grid.solve(DECODE, PREFILL, HOST, **values)


def test_decode_step_by_hand() -> None:
    state = DecodeGrid.build(Workload(1000, 200), 8192, np.asarray([1.0, 10.0])).solve(DECODE, HOST)
    step = 1e-3 + 10 * 1e-5 + 10 * 1100 * 1e-9 + 10 * 1e-6 + HOST
    assert state.tpot is not None
    assert state.tpot[1] == pytest.approx(step)
    assert state.tokens_per_second[1] == pytest.approx(10 / step)
    assert state.requests_per_second[1] == pytest.approx(10 / step / 199), "the prefill instance makes one token"
    assert state.ttft is None


def test_decode_with_draft_tokens() -> None:
    workload = Workload(1000, 200, num_mtp_tokens=2, mtp_acceptance_rates=(0.8, 0.5))
    assert workload.tokens_per_step == pytest.approx(1 + 0.8 + 0.4)
    state = DecodeGrid.build(workload, 8192, np.asarray([10.0])).solve(DECODE, HOST)
    step = 1e-3 + 30 * 1e-5 + 30 * (1000 + 100 + 2) * 1e-9 + 30 * 1e-6 + HOST
    assert state.step[0] == pytest.approx(step)
    assert state.tpot is not None
    assert state.tpot[0] == pytest.approx(step / 2.2)


def test_prefill_by_hand() -> None:
    state = PrefillGrid.build(Workload(1000, 200), 4000, np.asarray([1.0, 4.0, 5.0])).solve(PREFILL, HOST)
    step = 1e-3 + 4000 * 1e-5 + 4000 * 1000 * 4e-9 + 4000 * 1e-6 + HOST
    assert state.ttft is not None
    assert state.ttft[1] == pytest.approx(step)
    assert state.requests_per_second[1] == pytest.approx(4 / step)
    assert state.tokens_per_second[1] == pytest.approx(4000 / step)
    assert list(state.within_budget) == [True, True, False]
    assert state.tpot is None


def test_prefill_of_a_prompt_beyond_the_budget_is_chunked() -> None:
    state = PrefillGrid.build(Workload(10_000, 200), 4000, np.asarray([1.0, 2.0])).solve(PREFILL, HOST)
    # 2.5 steps of 4,000 tokens; the i-th ends at context 4,000 i, (10,000 + 4,000) / 2 in the mean.
    step = 1e-3 + 4000 * 1e-5 + 4000 * 7000 * 4e-9 + 4000 * 1e-6 + HOST
    assert state.ttft is not None
    assert state.ttft[0] == pytest.approx(2.5 * step)
    assert list(state.within_budget) == [True, False]


def test_prefill_of_a_cached_prefix_costs_only_attention() -> None:
    cached = Workload(1000, 200, prefix_cache_hit_rate=0.75)
    state = PrefillGrid.build(cached, 4000, np.asarray([1.0])).solve(PREFILL, HOST)
    assert state.ttft is not None
    assert state.ttft[0] == pytest.approx(1e-3 + 250 * 1e-5 + 250 * 1000 * 4e-9 + 250 * 1e-6 + HOST)


def test_aggregated_by_hand() -> None:
    """20 decodes, ISL 1,000, OSL 100: 200 prompt tokens a step, so every fifth step runs one whole prompt."""
    state = aggregated(Workload(1000, 100), 8000, [20.0])
    decode = 20 * 1050 * 1e-9 + HOST
    calm = 1e-3 + 20 * 1e-5 + 20 * 1e-6 + decode
    busy = 1e-3 + 1020 * 1e-5 + (20 + 1) * 1e-6 + decode + 1000 * 1000 * 4e-9
    step = 0.8 * calm + 0.2 * busy
    assert state.tpot is not None
    assert state.ttft is not None
    assert state.step[0] == pytest.approx(step)
    assert state.tpot[0] == pytest.approx(step)
    assert state.tokens_per_second[0] == pytest.approx(20 / step)
    assert state.requests_per_second[0] == pytest.approx(20 / step / 100)
    busy_share = 200 / 7980
    wait = (0.8 * calm**2 + 0.2 * busy**2) / (2 * step)
    queue = busy_share / (2 * (1 - busy_share)) * 1000 / 7980 * busy
    assert state.ttft[0] == pytest.approx(wait + queue + busy)
    assert state.step_tokens[0] == pytest.approx(220)


def test_aggregated_with_several_prompts_in_each_step() -> None:
    """Short prompts at a large batch: 400 prompt tokens of 100 each in every step, four prompts together."""
    state = aggregated(Workload(100, 100), 8000, [400.0])
    decode = 400 * 150 * 1e-9 + HOST
    busy = 1e-3 + 800 * 1e-5 + 404 * 1e-6 + decode + 400 * 100 * 4e-9
    assert state.step[0] == pytest.approx(busy)


def test_aggregated_chunks_a_prompt_beyond_the_budget() -> None:
    state = aggregated(Workload(4000, 1000), 1010, [10.0])
    # 40 prompt tokens a step in chunks of 1,000: every 25th step; four chunks, mean context (4,000 + 1,000) / 2.
    decode = 10 * 4500 * 1e-9 + HOST
    calm = 1e-3 + 10 * 1e-5 + 10 * 1e-6 + decode
    busy = 1e-3 + 1010 * 1e-5 + 10.25 * 1e-6 + decode + 1000 * 2500 * 4e-9
    assert state.step[0] == pytest.approx(0.96 * calm + 0.04 * busy)


def test_token_budget_bounds_the_batch() -> None:
    """b + 4 b must stay below 1,000: 199 is the largest batch."""
    state = aggregated(Workload(400, 100), 1000, [199.0, 200.0, 201.0])
    assert list(state.within_budget) == [True, False, False]


def test_ttft_diverges_towards_a_full_budget() -> None:
    state = aggregated(Workload(400, 100), 1000, [100.0, 190.0, 199.0, 199.9])
    assert state.ttft is not None
    assert state.ttft[0] < state.ttft[1] < state.ttft[2] < state.ttft[3]
    assert state.ttft[3] > 20 * state.ttft[0]


def test_cached_prefix_still_counts_as_context() -> None:
    plain = aggregated(Workload(4000, 100), 8192, [8.0])
    cached = aggregated(Workload(4000, 100, prefix_cache_hit_rate=0.9), 8192, [8.0])
    no_prompt = DecodeGrid.build(Workload(4000, 100), 8192, np.asarray([8.0])).solve(DECODE, HOST)
    assert no_prompt.step[0] < cached.step[0] < plain.step[0]


def test_few_prompts_leave_decode_alone() -> None:
    """With a long answer to a short prompt the aggregated step is the decode step."""
    workload = Workload(10, 100_000)
    lone = DecodeGrid.build(workload, 8192, np.asarray([16.0])).solve(DECODE, HOST)
    assert aggregated(workload, 8192, [16.0]).step[0] == pytest.approx(lone.step[0], rel=1e-3)


def test_context_gather_is_charged_to_chunk_steps() -> None:
    seen: dict[str, Any] = {}

    def gather(prompts: Any, chunk: Any, context: Any, share: Any) -> Any:
        seen.update(prompts=prompts, chunk=chunk, context=context, share=share)
        return 2e-3 * np.ones_like(chunk)

    workload = Workload(4000, 1000)
    plain = aggregated(workload, 1010, [10.0])
    with_gather = aggregated(workload, 1010, [10.0], gather=gather)
    assert with_gather.step[0] - plain.step[0] == pytest.approx(0.04 * 2e-3)
    assert seen["context"][0] == pytest.approx(1500), "chunks of 1,000 start at 0, 1,000, 2,000, 3,000"
    assert seen["share"][0] == pytest.approx(0.75), "the first chunk has no context"


# -- continuity: a small change of any parameter changes the result by little -----------------------------------------


def _result(isl: int, osl: int, budget: int, batch: float, hit: float) -> tuple[float, float]:
    state = aggregated(Workload(isl, osl, prefix_cache_hit_rate=hit), budget, [batch])
    assert state.within_budget[0]
    assert state.ttft is not None
    return float(state.step[0]), float(state.ttft[0])


@pytest.mark.parametrize("batch", [1.0, 16.0, 150.0])
def test_no_jump_where_the_prompt_meets_the_budget(batch: float) -> None:
    """A peer gave 122 and 179 requests for a budget of 3,500 and 3,499 tokens at ISL 3,500."""
    results = [_result(3500, 500, budget, batch, 0.0) for budget in range(3400, 3800)]
    steps, ttfts = np.array(results).T
    assert np.abs(np.diff(steps) / steps[:-1]).max() < 2e-3
    assert np.abs(np.diff(ttfts) / ttfts[:-1]).max() < 1e-2


@given(
    isl=st.integers(200, 20_000),
    osl=st.integers(50, 2000),
    budget=st.integers(1024, 16_384),
    batch=st.floats(1, 256),
    hit=st.floats(0, 0.95),
)
def test_continuous_in_every_parameter(isl: int, osl: int, budget: int, batch: float, hit: float) -> None:
    load = batch * isl * (1 - hit) / osl
    # The queue grows with u / (1 - u): a token more or less of 50 moves it by 2 % / (1 - u), without any jump.
    if load > 0.5 * (budget - batch):
        return
    base = np.array(_result(isl, osl, budget, batch, hit))
    for changed in (
        (isl + 1, osl, budget, batch, hit),
        (isl, osl + 1, budget, batch, hit),
        (isl, osl, budget + 1, batch, hit),
        (isl, osl, budget, batch * 1.001, hit),
        (isl, osl, budget, batch, hit + 0.001),
    ):
        moved = np.array(_result(*changed))
        assert np.abs(moved / base - 1).max() < 0.05


@given(batch=st.integers(1, 150), budget=st.integers(2048, 16_384))
def test_a_prompt_of_more_tokens_never_makes_anything_faster(batch: int, budget: int) -> None:
    short, long = (_result(isl, 2000, budget, float(batch), 0.0) for isl in (1000, 1500))
    assert long[0] > short[0]
    assert long[1] > short[1]
