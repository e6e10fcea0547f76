"""How many prefill and decode instances: integers x and y under the device budget that serve most requests.

A request costs one prefill and OSL - 1 decoded tokens, so ``x`` prefill instances and ``y`` decode instances serve
``min(x*r_p, y*r_d)`` requests per second. More of either rate never serves fewer, so each decode layout runs at its
best batch, and each prefill layout at the best one whose TTFT, KV transfer included, keeps the limit. The side that
could do more then runs at the batch with the least latency that still keeps up. Of equal rates the one with fewer
devices wins, then the one with less latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from serving_cast.config import Limits
from serving_cast.service.points import LayoutPoints
from serving_cast.service.rows import Row
from tensor_cast.units import MS

__all__ = ["PdChoice", "best_ratio", "instances", "transfer_seconds"]


@dataclass(frozen=True)
class PdChoice:
    """``x`` prefill instances and ``y`` decode instances.

    Args:
        kv_transfer_ms: time to move a prompt's KV to the decode instance; part of ``ttft_ms``.
        requests_per_s: what both sides together sustain.
        devices_used: x and y times their instances' devices; the rest idles.
    """

    prefill: Row
    decode: Row
    x: int
    y: int
    kv_transfer_ms: float
    ttft_ms: float
    tpot_ms: float
    requests_per_s: float
    throughput_tok_s: float
    tok_s_per_device: float
    devices_used: int

    def to_json(self) -> dict[str, Any]:
        """The choice as a JSON object; the two rows are objects in it."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"prefill": self.prefill.to_json(), "decode": self.decode.to_json()}


def transfer_seconds(bytes_per_decode_rank: float, *, prefill_tp: int, decode_tp: int, bandwidth: float) -> float:
    """Seconds to move one request's KV over the network cards.

    Each of the ``decode_tp`` ranks pulls the KV it will read. Its own card carries that once; the prefill side spreads
    the sum over its ``prefill_tp`` cards. The slower side counts.
    """
    sent = bytes_per_decode_rank * decode_tp / prefill_tp
    return max(bytes_per_decode_rank, sent) / bandwidth


def instances(
    prefill_rate: float, decode_rate: float, prefill_devices: int, decode_devices: int, num_devices: int
) -> tuple[int, int, float] | None:
    """(x, y, requests per second) with the highest rate, and of equals the fewest devices; None if none fit.

    Rates are per instance. Every x is looked at with the largest y that is left room for.
    """
    most = (num_devices - decode_devices) // prefill_devices
    if most < 1:
        return None
    x = np.arange(1, most + 1)
    y = (num_devices - x * prefill_devices) // decode_devices
    rates = np.minimum(x * prefill_rate, y * decode_rate)
    rate = float(rates.max())
    # Whole instances that the rate does not need stay off; the margin absorbs rounding of the quotient.
    return _enough(rate, prefill_rate), _enough(rate, decode_rate), rate


def _enough(total: float, each: float) -> int:
    return max(1, math.ceil(total / each - 1e-9))


def best_ratio(
    prefill: Sequence[LayoutPoints],
    decode: Sequence[LayoutPoints],
    limits: Limits,
    *,
    num_devices: int,
    output_length: int,
    transfer: Callable[[LayoutPoints, LayoutPoints], float],
) -> PdChoice | None:
    """The pair of layouts, batches and counts with the highest request rate; None if no pair keeps the limits.

    ``transfer`` gives the seconds to move one request's KV between two layouts.
    """
    best: tuple[tuple[Any, ...], LayoutPoints, int, LayoutPoints, int, int, int, float, float] | None = None
    prefill_choice: dict[tuple[int, float], int | None] = {}
    for d in decode:
        decode_index = _fastest(d, limits)
        if decode_index is None:
            continue
        decode_rate = float(d.state.requests_per_second[decode_index]) * d.parallel.dp_size
        for p in prefill:
            moving = transfer(p, d)
            key = (id(p), moving)
            if key not in prefill_choice:
                prefill_choice[key] = _fastest(p, _shortened(limits, moving))
            prefill_index = prefill_choice[key]
            if prefill_index is None:
                continue
            prefill_rate = float(p.state.requests_per_second[prefill_index]) * p.parallel.dp_size
            sizes = p.parallel.world_size, d.parallel.world_size
            found = instances(prefill_rate, decode_rate, *sizes, num_devices)
            if found is None:
                continue
            x, y, rate = found
            calm_p, ttft = _gentlest(p, _shortened(limits, moving), rate / x / p.parallel.dp_size)
            calm_d, tpot = _gentlest(d, limits, rate / y / d.parallel.dp_size)
            latency = ttft + moving + output_length * tpot
            devices = x * sizes[0] + y * sizes[1]
            rank = (-_digits(rate), devices, _digits(latency), *_axes(p), *_axes(d))
            if best is None or rank < best[0]:
                best = (rank, p, calm_p, d, calm_d, x, y, rate, moving)
    if best is None:
        return None
    _, p, prefill_index, d, decode_index, x, y, rate, moving = best
    prefill_row, decode_row = p.row(prefill_index, replicas=x), d.row(decode_index, replicas=y)
    assert prefill_row.ttft_ms is not None
    assert decode_row.tpot_ms is not None
    return PdChoice(
        prefill=prefill_row,
        decode=decode_row,
        x=x,
        y=y,
        kv_transfer_ms=moving / MS,
        ttft_ms=prefill_row.ttft_ms + moving / MS,
        tpot_ms=decode_row.tpot_ms,
        requests_per_s=rate,
        throughput_tok_s=rate * output_length,
        tok_s_per_device=rate * output_length / num_devices,
        devices_used=x * p.parallel.world_size + y * d.parallel.world_size,
    )


def _digits(value: float) -> float:
    """Nine significant digits: beyond lies rounding, which must not decide."""
    return float(f"{value:.9g}")


def _axes(points: LayoutPoints) -> tuple[int, ...]:
    return tuple(points.parallel.axes().values())


def _shortened(limits: Limits, seconds: float) -> Limits | None:
    """The limits with ``seconds`` taken off TTFT; None if nothing is left of it."""
    if limits.ttft_ms is None:
        return limits
    left = limits.ttft_ms - seconds / MS
    return replace(limits, ttft_ms=left) if left > 0 else None


def _gentlest(points: LayoutPoints, limits: Limits | None, rate: float) -> tuple[int, float]:
    """(index, latency in seconds) of the least latency at which one rank still serves ``rate`` requests per second."""
    assert limits is not None
    latency = points.state.ttft if points.phase == "prefill" else points.state.tpot
    assert latency is not None
    enough = points.meets(limits) & (points.state.requests_per_second >= rate * (1 - 1e-9))
    candidates = np.flatnonzero(enough)
    index = int(candidates[np.argmin(latency[candidates])])
    return index, float(latency[index])


def _fastest(points: LayoutPoints, limits: Limits | None) -> int | None:
    """Index of the highest request rate under the limits; the larger batch of equals."""
    if limits is None:
        return None
    feasible = np.flatnonzero(points.meets(limits))
    if not feasible.size:
        return None
    rates = points.state.requests_per_second[feasible]
    return int(feasible[np.flatnonzero(rates == rates.max())[-1]])
