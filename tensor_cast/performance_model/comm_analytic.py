"""Time of collectives: alpha-beta per algorithm, over the tiers of links that a group crosses.

Within one tier a collective of n ranks takes ``alpha + alpha_rank*(n-1) + hop latency + wire_bytes / (bandwidth *
efficiency)``. Bytes that one rank sends, for a local *input* buffer of b bytes:

=============== ==================== ======================================
all_reduce      ``2*(n-1)/n * b``    reduce-scatter and all-gather on a ring
all_gather      ``(n-1) * b``        its input goes to every other rank
reduce_scatter  ``(n-1)/n * b``      each n-th goes to its owner
all_to_all      ``(n-1)/n * b``      each n-th goes to its receiver
p2p             ``b``                to one peer, over one link
=============== ==================== ======================================

A group that spans tiers runs level by level, each with the alpha and bandwidth of its own links, so that a small
message between nodes costs latencies, not a ratio of bandwidths:

- all_reduce: reduce-scatter in the node, all-reduce of 1/n of the data across, all-gather in the node;
- reduce_scatter: in the node first, then 1/n of the data across;
- all_gather: across first (small), then n times as much in the node;
- all_to_all: what goes to other nodes is first collected in the node, then sent across: each level moves its share.

A fit that is ``flat`` takes all ranks as one ring, which is as fast as the slowest link that it crosses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensor_cast.device.profile import CollectiveFit, DeviceProfile, Tier
from tensor_cast.device.topology import Span, spans
from tensor_cast.errors import ConfigError
from tensor_cast.ir.expr import Num
from tensor_cast.performance_model.analytic import OpTime

__all__ = ["COLLECTIVE_KINDS", "collective_parts", "collective_seconds", "collective_time", "wire_bytes"]

COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


def wire_bytes(kind: str, nbytes: Num, ranks: int) -> Num:
    """Bytes one rank sends in a collective of ``ranks`` whose local input buffer has ``nbytes``.

    Raises:
        ConfigError: ``kind`` is not a collective.
    """
    others = ranks - 1
    match kind:
        case "all_reduce":
            return 2 * others / ranks * nbytes
        case "all_gather":
            return others * nbytes
        case "reduce_scatter" | "all_to_all":
            return others / ranks * nbytes
        case "p2p":
            return nbytes if ranks > 1 else 0 * nbytes
    raise ConfigError(f"unknown collective {kind!r}; known: {', '.join(COLLECTIVE_KINDS)}")


def _stages(kind: str, nbytes: Num, groups: Sequence[Span]) -> list[tuple[str, Num, Span]]:
    """(kind, local input bytes, level) of each step of the hierarchical algorithm."""
    if len(groups) == 1:
        return [(kind, nbytes, groups[0])]
    inner, outer = groups[0], groups[1:]
    n = inner.fewest  # in a domain with fewer members each carries a larger share to the next level
    match kind:
        case "all_reduce":
            return [
                ("reduce_scatter", nbytes, inner),
                *_stages("all_reduce", nbytes / n, outer),
                ("all_gather", nbytes / n, inner),
            ]
        case "reduce_scatter":
            return [("reduce_scatter", nbytes, inner), *_stages("reduce_scatter", nbytes / n, outer)]
        case "all_gather":
            across = 1
            for span in outer:
                across *= span.size
            return [*_stages("all_gather", nbytes, outer), ("all_gather", nbytes * across, inner)]
        case "all_to_all":
            return [("all_to_all", nbytes, inner), *_stages("all_to_all", nbytes, outer)]
    return [(kind, nbytes, groups[-1])]  # p2p: the outermost link the pair crosses


def _stage_parts(fit: CollectiveFit, kind: str, nbytes: Num, span: Span) -> tuple[Num, Num]:
    latency = fit.alpha_s + fit.alpha_rank_s * (span.size - 1) + span.tier.latency_s
    bandwidth = _bandwidth(span.tier, kind, span.size)
    transfer = wire_bytes(kind, nbytes, span.size) / (bandwidth * fit.efficiency)
    if fit.large is None:
        return latency, transfer
    later, moving = _stage_parts(fit.large, kind, nbytes, span)
    better = later + moving < latency + transfer
    return np.where(better, later, latency), np.where(better, moving, transfer)


def _bandwidth(tier: Tier, kind: str, ranks: int) -> float:
    return tier.bandwidth_among(2 if kind == "p2p" else ranks)


def _fit(device: DeviceProfile, kind: str) -> CollectiveFit:
    try:
        return device.collectives[kind]
    except KeyError:
        raise ConfigError(
            f"{device.name} has no fit for collective {kind!r}; it has {', '.join(device.collectives)}"
        ) from None


def collective_parts(device: DeviceProfile, kind: str, nbytes: Num, ranks: Sequence[int]) -> tuple[Num, Num]:
    """(latency, transfer) seconds of :func:`collective_seconds`."""
    if kind not in COLLECTIVE_KINDS:
        wire_bytes(kind, 0, 2)
    if len(ranks) < 2:
        return 0.0, 0.0 * nbytes
    latency: Num = 0.0
    transfer: Num = 0.0
    groups = spans(device, tuple(ranks))
    if _fit(device, kind).flat:
        groups = (Span(groups[-1].tier, len(ranks), len(ranks)),)
    for stage, amount, span in _stages(kind, nbytes, groups):
        alpha, moving = _stage_parts(_fit(device, stage), stage, amount, span)
        latency, transfer = latency + alpha, transfer + moving
    return latency, transfer


def collective_seconds(device: DeviceProfile, kind: str, nbytes: Num, ranks: Sequence[int]) -> Num:
    """Seconds of one collective.

    Args:
        device: whose links and collective fits.
        kind: one of :data:`COLLECTIVE_KINDS`.
        nbytes: the local input buffer, a number or an array.
        ranks: global ranks of the group (for p2p, the two of the pair); one rank costs nothing.
    """
    latency, transfer = collective_parts(device, kind, nbytes, ranks)
    return latency + transfer


def collective_time(device: DeviceProfile, kind: str, nbytes: Num, ranks: Sequence[int]) -> OpTime:
    """As :func:`collective_seconds`, split into latency and transfer, with the source of the coefficients."""
    latency, transfer = collective_parts(device, kind, nbytes, ranks)
    tiers = "+".join(span.tier.name for span in spans(device, tuple(ranks))) if len(ranks) > 1 else "none"
    source = f"{device.name} {kind} over {tiers}: {_fit(device, kind).source}"
    return OpTime(latency + transfer, 0.0, 0.0, latency, transfer, source)
