"""Which links a group of ranks crosses, and how many members meet at each level.

Ranks are placed contiguously: rank r runs on device r, and device r belongs to domain ``r // size`` of a tier. The
tiers of a device thus form a tree, and a group of ranks picks a subtree of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tensor_cast.device.profile import DeviceProfile, Tier

__all__ = ["Span", "spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """One level of a group: ``size`` members meet over the links of ``tier``.

    At the innermost level the members are ranks; further out each member stands for all ranks of one inner domain.
    Where domains hold different numbers of members, ``size`` counts the fullest one, which takes longest at this level,
    and ``fewest`` the emptiest, whose members each carry the largest share to the next level.
    """

    tier: Tier
    size: int
    fewest: int


def spans(device: DeviceProfile, ranks: tuple[int, ...]) -> tuple[Span, ...]:
    """Levels that a group crosses, innermost first; levels at which nobody meets are left out.

    With nodes of 8, ranks 0..15 give ``(node, 8), (network, 2)`` and ranks 0, 8, 16, 24 give ``(network, 4)``.

    Args:
        device: whose tiers.
        ranks: distinct global ranks, in any order. One rank crosses nothing.

    Raises:
        ValueError: a rank is negative or occurs twice.
    """
    return _spans(device.tiers, ranks)


@lru_cache(maxsize=65536)
def _spans(tiers: tuple[Tier, ...], ranks: tuple[int, ...]) -> tuple[Span, ...]:
    members = set(ranks)
    if len(members) != len(ranks) or min(ranks, default=0) < 0:
        raise ValueError(f"ranks of a group must be distinct and not negative; found {ranks}")
    levels: list[Span] = []
    unit = 1  # devices that one member of the current level stands for
    for tier in tiers:
        if len(members) == 1:
            break
        domains: dict[int, int] = {}
        ratio = None if tier.size is None else tier.size // unit
        for member in members:
            domain = 0 if ratio is None else member // ratio
            domains[domain] = domains.get(domain, 0) + 1
        meeting = max(domains.values())
        if meeting > 1:
            levels.append(Span(tier, meeting, min(domains.values())))
        members = set(domains)
        unit = tier.size or unit
    return tuple(levels)
