"""Loads of the ranks that tables of routed experts measured."""

import numpy as np
import pytest

from benchmarks.expert_load import expert_load


def test_balanced_load_is_an_even_share() -> None:
    load = expert_load(64, 128, 8, 4, "balanced")
    assert (load.rows, load.touched) == (128.0, 32.0)
    assert expert_load(1, 128, 8, 1, "balanced").touched == 8.0


@pytest.mark.parametrize("distribution", ["power_law_1.01", "power_law_1.2"])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "ep"), [(4096, 256, 8, 8), (512, 128, 8, 16), (2, 256, 8, 32)])
def test_busiest_rank_has_more_than_an_even_share(
    distribution: str, tokens: int, experts: int, top_k: int, ep: int
) -> None:
    pairs = tokens * top_k
    load, alone = (expert_load(tokens, experts, top_k, ranks, distribution) for ranks in (ep, 1))
    assert alone.rows == pairs
    assert pairs / ep < load.rows <= pairs
    assert load.touched <= min(experts // ep, load.rows)


def test_one_rank_of_two_experts_by_hand() -> None:
    """Two experts on two ranks, one choice: weights are 1 to 0.8 T by a uniform draw in logs (exponent near 1)."""
    tokens = 1000
    u = np.random.default_rng(1).random((20_000, 2))
    weights = 800.0**u
    expected = tokens * np.mean(weights.max(axis=1) / weights.sum(axis=1))
    assert expert_load(tokens, 2, 1, 2, "power_law_1.01").rows == pytest.approx(expected, rel=0.05)
