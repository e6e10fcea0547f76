"""From points to choices: the exact best batch size of a layout under limits, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving_cast.config import Limits
from serving_cast.service.points import LayoutMemory, LayoutPoints
from serving_cast.service.rows import Rejection, Row
from tensor_cast.units import GIB, MS

__all__ = ["choose", "merit", "nearest"]


def choose(points: LayoutPoints, limits: Limits) -> int | Rejection:
    """Index of the feasible batch size with the highest throughput, the larger one of equals; or why there is none.

    Throughput need not grow with the batch (experts, tiles, KV), so every batch size is looked at.
    """
    feasible = np.flatnonzero(points.meets(limits))
    if feasible.size:
        rates = points.state.tokens_per_second[feasible]
        return int(feasible[np.flatnonzero(rates == rates.max())[-1]])
    possible = np.flatnonzero(points.possible)
    if possible.size:
        return _limit_rejection(points, limits, possible)
    if not points.memory.fits.any():
        return _memory_rejection(points)
    if not points.within_concurrency.any():
        return _concurrency_rejection(points)
    return _budget_rejection(points)


def merit(row: Row) -> tuple[Any, ...]:
    """Sort key, best first: throughput (to nine digits: beyond that lies rounding), then the simpler layout."""
    simplicity = (row.tp * row.pp * row.dp, row.dcp, row.ep, row.tp, row.moe_dp)
    return (-float(f"{row.throughput_tok_s:.9g}"), *simplicity)


def nearest(rejections: Iterable[Rejection]) -> Rejection | None:
    """The rejection that missed by least; None without any.

    A layout that runs but is too slow is nearer than one that does not fit, and that nearer than an illegal one.
    """

    def distance(rejection: Rejection) -> tuple[Any, ...]:
        kind = rejection.rule.partition(".")[0]
        rank = _DISTANCE.get(kind, len(_DISTANCE))
        return (rank, rejection.excess, *rejection.layout.values(), rejection.phase, rejection.rule)

    return min(rejections, key=distance, default=None)


#: How far a kind of rule is from feasible; what is not listed is a rule of legality.
_DISTANCE = {"ttft": 0, "tpot": 0, "tokens": 1, "workload": 1, "memory": 2}


_LIMIT_REMEDIES = {
    "ttft.limit": "raise the TTFT limit or --max-batched-tokens, or use more devices per instance",
    "tpot.limit": "raise the TPOT limit, or use more devices per instance",
}


def _limit_rejection(points: LayoutPoints, limits: Limits, possible: NDArray[np.intp]) -> Rejection:
    """The batch size that misses by least, and the limit it misses by more."""
    index = int(possible[np.argmin(points.misses(limits)[possible])])
    missed: list[tuple[float, str, float, float]] = []
    for rule, seconds, limit in (
        ("ttft.limit", points.state.ttft, limits.ttft_ms),
        ("tpot.limit", points.state.tpot, limits.tpot_ms),
    ):
        if seconds is not None and limit is not None:
            value = float(seconds[index]) / MS
            missed.append((value / limit, rule, value, limit))
    ratio, rule, value, limit = max(missed)
    name = rule.partition(".")[0].upper()
    return Rejection(
        points.parallel,
        points.phase,
        rule,
        need=f"{name} <= {limit:g} ms",
        have=f"{value:.4g} ms at batch {points.batches[index]}, the nearest ({100 * (ratio - 1):.3g} % over)",
        remedy=_LIMIT_REMEDIES[rule],
        excess=ratio,
    )


def _budget_rejection(points: LayoutPoints) -> Rejection:
    """No batch size that fits memory fits the token budget as well: tell of the smallest."""
    tokens, budget = float(points.state.step_tokens[0]), points.state.budget
    return Rejection(
        points.parallel,
        points.phase,
        "tokens.budget",
        need=f"fewer than {budget} query tokens in a step (decodes and the prompts of newcomers)",
        have=f"{tokens:.5g} at batch {points.batches[0]}",
        remedy="raise --max-batched-tokens or lower --batch-range",
        excess=tokens / budget,
    )


def _concurrency_rejection(points: LayoutPoints) -> Rejection:
    """Even the smallest batch puts more requests in flight than there may be: tell what they are made of."""
    least, most = int(points.concurrency[0]), points.max_concurrency
    assert most is not None
    factors = {
        "batch": int(points.batches[0]),
        "dp": points.parallel.dp_size,
        "replicas": points.replicas,
        "batches in flight": points.batches_in_flight,
    }
    # A batch of several is the smallest only where --batch-range says so.
    remedies = {
        "batch": "lower --batch-range",
        "dp": "use less dp",
        "replicas": "use more tp for fewer replicas",
        "batches in flight": "use fewer stages",
    }
    ways = [f"raise --max-concurrency to {least}", *(remedies[name] for name, size in factors.items() if size > 1)]
    return Rejection(
        points.parallel,
        points.phase,
        "workload.concurrency",
        need=f"at most {most} requests in flight (--max-concurrency)",
        have=f"{least}: " + " x ".join(f"{name} {size}" for name, size in factors.items() if size > 1),
        remedy=", or ".join(ways),
        excess=least / most,
    )


def _memory_rejection(points: LayoutPoints) -> Rejection:
    """The smallest batch does not fit: name what is too much, weights before activations before KV."""
    memory = points.memory_at(0)
    stage = "" if isinstance(points.memory, LayoutMemory) else f" on stage {points.memory.fullest(0)}"
    fixed = memory.weights + memory.overhead + float(memory.activation[0])
    advice, total = points.advice(), float(memory.total[0])
    if memory.longest and float(memory.kv[0]) <= memory.longest:
        one = f"room for one request of {advice.longest_tokens:,} tokens (--max-model-len): memory with its KV"
        cache = ("memory.longest_request", one, total, advice.longest)
    else:
        cache = ("memory.kv_cache", f"memory with the KV of batch {points.batches[0]}", total, advice.kv)
    stages = (
        ("memory.weights", "weights", memory.weights, advice.weights),
        ("memory.activation", "weights, overhead and activations", fixed, advice.activation),
        cache,
    )
    rule, name, size, remedy = next((s for s in stages if s[2] > memory.available), stages[-1])
    return Rejection(
        points.parallel,
        points.phase,
        rule,
        need=f"{name} <= {memory.available / GIB:.2f} GiB",
        have=f"{size / GIB:.2f} GiB{stage}",
        remedy=remedy,
        excess=size / memory.available,
    )
