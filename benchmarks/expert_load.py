"""What one rank had to do in measured tables of routed experts.

Tables of skewed routing draw the tokens of each expert from a power law and measure the rank whose experts drew most,
the mean over a few draws. Source of the procedure: the collectors of aiconfigurator-core 0.12.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

#: Draws that the mean is taken over; the tables take ten.
DRAWS = 64


@dataclass(frozen=True)
class ExpertLoad:
    """Of the measured rank: (token, expert) pairs, and experts with any token."""

    rows: float
    touched: float


@cache
def expert_load(tokens: int, experts: int, top_k: int, ep: int, distribution: str) -> ExpertLoad:
    """Load of the busiest of ``ep`` ranks, each with ``experts / ep`` experts.

    Args:
        tokens: tokens that enter the layer on all ranks together.
        experts: experts of all ranks.
        top_k: experts that each token chooses.
        ep: ranks that the experts are spread over.
        distribution: ``balanced``, or ``power_law_<exponent>``.
    """
    local, pairs = experts // ep, tokens * top_k
    if distribution == "balanced":
        return ExpertLoad(pairs / ep, float(min(local, max(1.0, pairs / ep))))
    exponent = float(distribution.rsplit("_", 1)[1])
    low, high = (1.0, 0.8 * tokens) if pairs > experts else (0.01, 2.0)
    draws = np.random.default_rng(0).random((DRAWS, experts))
    power = 1.0 - exponent
    weights = ((high**power - low**power) * draws + low**power) ** (1.0 / power)
    counts = np.round(pairs * weights / weights.sum(axis=1, keepdims=True))
    # Rounding leaves some pairs over, one for each of the largest, or takes some from the smallest that have any.
    order = np.argsort(-counts, axis=1)
    for draw in range(DRAWS):
        missing = int(pairs - counts[draw].sum())
        largest = order[draw] if missing > 0 else order[draw, counts[draw, order[draw]] > 0][::-1]
        np.add.at(counts[draw], np.resize(largest, abs(missing)), np.sign(missing))
    ranks = counts.reshape(DRAWS, ep, local)
    busiest = ranks[np.arange(DRAWS), ranks.sum(axis=2).argmax(axis=1)]
    return ExpertLoad(float(busiest.sum(axis=1).mean()), float((busiest > 0).sum(axis=1).mean()))
