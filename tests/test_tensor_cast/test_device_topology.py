"""Which links a group crosses: worked out by hand on nodes of 8, packages of 2 and racks of 72."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_cast.device.catalog import load_device
from tensor_cast.device.topology import spans


def levels(device: str, *ranks: int) -> list[tuple[str, int]]:
    return [(span.tier.name, span.size) for span in spans(load_device(device), ranks)]


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [
        ("H100_SXM", range(1), []),
        ("H100_SXM", range(8), [("node", 8)]),
        ("H100_SXM", range(4), [("node", 4)]),
        ("H100_SXM", range(16), [("node", 8), ("network", 2)]),
        ("H100_SXM", range(0, 32, 8), [("network", 4)]),
        ("H100_SXM", range(0, 32, 4), [("node", 2), ("network", 4)]),
        # 12 ranks: 8 in one node and 4 in the next; the fuller one sets the pace.
        ("H100_SXM", range(12), [("node", 8), ("network", 2)]),
        ("H100_SXM", range(6, 12), [("node", 4), ("network", 2)]),
        # A pair across the border of two nodes shares no node link.
        ("H100_SXM", (7, 8), [("network", 2)]),
        ("GB200", range(72), [("rack", 72)]),
        ("GB200", range(144), [("rack", 72), ("network", 2)]),
        ("H100_NVL", range(2), [("pair", 2)]),
        ("H100_NVL", range(8), [("pair", 2), ("node", 4)]),
        ("ATLAS_800_A3_752T_128G_DIE", range(2), [("die", 2)]),
        ("ATLAS_800_A3_752T_128G_DIE", range(16), [("die", 2), ("node", 8)]),
        ("ATLAS_800_A3_752T_128G_DIE", range(0, 64, 16), [("superpod", 4)]),
        ("ATLAS_800_A3_752T_128G_DIE", range(1536), [("die", 2), ("node", 8), ("superpod", 48), ("roce", 2)]),
        ("ATLAS_800_A2_376T_64G", range(0, 16, 2), [("node", 4), ("roce", 2)]),
    ],
)
def test_spans(device: str, ranks: range | tuple[int, ...], expected: list[tuple[str, int]]) -> None:
    assert levels(device, *ranks) == expected


def test_the_order_of_ranks_does_not_matter() -> None:
    assert levels("H100_SXM", 9, 0, 8, 1) == levels("H100_SXM", 0, 1, 8, 9) == [("node", 2), ("network", 2)]


@pytest.mark.parametrize("ranks", [(0, 0), (-1, 0)])
def test_a_group_is_made_of_distinct_ranks(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="distinct and not negative"):
        levels("H100_SXM", *ranks)


@given(st.sets(st.integers(0, 200), min_size=1, max_size=40))
def test_levels_hold_the_group(ranks: set[int]) -> None:
    sizes = [size for _, size in levels("ATLAS_800_A3_752T_128G_DIE", *ranks)]
    product = 1
    for size in sizes:
        assert size > 1
        product *= size
    # The fullest domain counts at each level, so the levels never hold fewer than there are.
    assert product >= len(ranks)


def test_uneven_groups_tell_both_ends() -> None:
    inner, outer = spans(load_device("H100_SXM"), tuple(range(12)))
    assert (inner.size, inner.fewest) == (8, 4)
    assert (outer.size, outer.fewest) == (2, 2)
