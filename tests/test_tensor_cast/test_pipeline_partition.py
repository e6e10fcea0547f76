"""Partitions of layers over pipeline stages: searches against brute force, messages, safety of shared indices."""

from __future__ import annotations

from math import comb, inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensor_cast.errors import ConfigError, LegalityError
from tensor_cast.pipeline_partition import (
    DsaSplit,
    all_partitions,
    best_partition,
    check_partition,
    default_partition,
    nearest_safe_partitions,
    parse_partition,
    refuse_unsafe,
    stage_ranges,
    unsafe_by_stage,
    unsafe_layers,
)

#: A busy machine is no fault.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

FULL = tuple(max(i - 2, 0) % 4 == 0 for i in range(78))


@relaxed
@given(st.integers(1, 200), st.integers(1, 16))
def test_the_default_covers_all_layers_evenly(layers: int, stages: int) -> None:
    partition = default_partition(layers, stages)
    assert len(partition) == stages
    assert sum(partition) == layers
    assert max(partition) - min(partition) <= 1
    assert partition[-1] == layers // stages  # the last stage never takes a left-over layer


def test_ranges() -> None:
    assert stage_ranges((3, 1, 2)) == (range(3), range(3, 4), range(4, 6))


@relaxed
@given(st.integers(1, 9), st.integers(1, 4))
def test_all_lists_each_once(layers: int, stages: int) -> None:
    if stages > layers:
        assert list(all_partitions(layers, stages)) == []
        return
    listed = list(all_partitions(layers, stages))
    assert len(listed) == len(set(listed)) == comb(layers - 1, stages - 1)
    for partition in listed:
        check_partition(partition, layers, stages)


def test_all_refuses_to_flood() -> None:
    assert len(list(all_partitions(78, 2))) == 77
    with pytest.raises(ConfigError, match=r"61 layers split over 8 stages in 386,206,920 ways.*auto"):
        next(all_partitions(61, 8))


@relaxed
@given(st.data())
def test_the_best_partition_is_the_best(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 9))
    stages = data.draw(st.integers(1, min(4, layers)))
    values = st.integers(-20, 20).map(float) | st.just(inf)
    table = {
        (stage, a, b): data.draw(values)
        for stage in range(stages)
        for a in range(layers)
        for b in range(a + 1, layers + 1)
    }

    def costs(partition: tuple[int, ...]) -> list[float]:
        return [table[s, r.start, r.stop] for s, r in enumerate(stage_ranges(partition))]

    found, worst = best_partition(layers, stages, lambda s, a, b: table[s, a, b])
    best = min(max(costs(p)) for p in all_partitions(layers, stages))
    assert worst == best
    if best == inf:
        assert found is None
        return
    assert found is not None
    check_partition(found, layers, stages)
    assert max(costs(found)) == best
    least = min(sum(costs(p)) for p in all_partitions(layers, stages) if max(costs(p)) == best)
    assert sum(costs(found)) == least


@pytest.mark.parametrize("partition", [(39, 39), (45, 33), (20, 20, 20, 18), (19, 20, 20, 19)])
def test_nearest_safe_partitions_are_safe_and_nearest(partition: tuple[int, ...]) -> None:
    near = nearest_safe_partitions(partition, FULL)
    assert len(near) == len(set(near)) == 3

    def moved(other: tuple[int, ...]) -> int:
        pairs = zip(stage_ranges(partition), stage_ranges(other), strict=True)
        return sum(abs(a.start - b.start) for a, b in pairs)

    for other in near:
        check_partition(other, 78, len(partition))
        assert unsafe_layers(other, FULL) == ()
    if len(partition) == 2:
        ranked = sorted(moved(p) for p in all_partitions(78, 2) if not unsafe_layers(p, FULL))
        assert [moved(p) for p in near] == ranked[:3]


def test_of_safe_partitions_as_near_the_later_border_comes_first() -> None:
    # Borders at 4 and 8 are both two layers away from 6; the last stage has head and drafts as well.
    assert nearest_safe_partitions((6, 6), [i % 4 == 0 for i in range(12)]) == ((8, 4), (4, 8))


def test_a_refusal_names_the_nearest_and_how_to_find_the_best() -> None:
    with pytest.raises(LegalityError) as caught:
        refuse_unsafe((6, 6), [i % 4 == 0 for i in range(12)], None)
    assert "nearest first: 8,4 or 4,8; msmodeling capacity --pp-layer-partition auto finds" in str(caught.value)


def test_no_safe_partition() -> None:
    assert nearest_safe_partitions((2, 2), (True, False, False, False)) == ()


def test_layers_without_sharing_are_always_safe() -> None:
    assert unsafe_by_stage((30, 31), ()) == ((), ())
    assert unsafe_by_stage((2, 2), (False,) * 4) == ((0, 1), (2, 3))


def test_refusal_names_layers_and_ways_out() -> None:
    with pytest.raises(LegalityError) as caught:
        refuse_unsafe((41, 37), FULL, None)
    message = str(caught.value)
    assert caught.value.rule == "pp.dsa_indices"
    for words in ("layer 41 would", "42,36 or", "self-compute", "send-indices", "unsafe"):
        assert words in message
    refuse_unsafe((42, 36), FULL, None)
    for split in DsaSplit:
        refuse_unsafe((41, 37), FULL, split)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("41,36", "pp.partition_sum"),
        ("26,26,26", "pp.partition_count"),
        ("78,0", "pp.partition_positive"),
        ("79,-1", "pp.partition_positive"),
    ],
)
def test_partitions_that_do_not_fit(text: str, rule: str) -> None:
    with pytest.raises(LegalityError) as caught:
        parse_partition(text, 78, 2)
    assert caught.value.rule == rule
    assert "39,39" in str(caught.value)


@pytest.mark.parametrize("text", ["39.0,39", "41;37", "", "a,b", "41,"])
def test_partitions_that_are_no_integers(text: str) -> None:
    with pytest.raises(ConfigError, match="need integers separated by commas"):
        parse_partition(text, 78, 2)


def test_spaces_do_not_matter() -> None:
    assert parse_partition(" 41, 37 ", 78, 2) == (41, 37)
