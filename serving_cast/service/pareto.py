"""The Pareto front: points that no other point beats in one aim without losing in the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serving_cast.config import Limits
from serving_cast.service.points import LayoutPoints
from serving_cast.service.rows import Row

__all__ = ["front", "pareto_rows"]

Array = NDArray[np.float64]


def front(first: Array, second: Array) -> NDArray[np.intp]:
    """Indices of the points that are not dominated when both values are to be high; descending in ``first``.

    Of points that are equal in both, the earliest stays.
    """
    order = np.lexsort((np.arange(len(first)), -second, -first))
    ranked = second[order]
    best_before = np.concatenate(([-np.inf], np.maximum.accumulate(ranked)[:-1])) if len(ranked) else ranked
    return order[ranked > best_before]


def pareto_rows(points: Sequence[LayoutPoints], limits: Limits) -> list[Row]:
    """Front of tok/s per user against tok/s per device over all feasible points.

    For prefill TTFT takes the user's part. Several phases give one front each, in the order in which the phases appear.
    """
    rows: list[Row] = []
    for phase in dict.fromkeys(p.phase for p in points):
        rows += _front_of_phase([p for p in points if p.phase == phase], limits)
    return rows


def _front_of_phase(points: Sequence[LayoutPoints], limits: Limits) -> list[Row]:
    per_user: list[Array] = []
    per_device: list[Array] = []
    owner: list[tuple[LayoutPoints, NDArray[np.intp]]] = []
    for p in points:
        feasible = np.flatnonzero(p.meets(limits))
        latency = p.state.tpot if p.state.tpot is not None else p.state.ttft
        assert latency is not None, "every phase has a latency"
        per_user.append(1.0 / latency[feasible])
        per_device.append(p.state.tokens_per_second[feasible] * (p.parallel.dp_size * p.replicas / p.num_devices))
        owner.append((p, feasible))
    if not per_user:
        return []
    starts = np.cumsum([0, *(len(a) for a in per_user)])
    rows: list[Row] = []
    for flat in front(np.concatenate(per_user), np.concatenate(per_device)):
        which = int(np.searchsorted(starts, flat, side="right")) - 1
        p, feasible = owner[which]
        rows.append(p.row(int(feasible[flat - starts[which]])))
    return rows
