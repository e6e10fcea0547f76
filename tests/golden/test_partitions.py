"""Facts P1, P2, P3, P5, P6 on pipeline partitions, each with its arithmetic."""

from __future__ import annotations

import pytest

from tensor_cast.errors import ConfigError, LegalityError
from tensor_cast.pipeline_partition import (
    all_partitions,
    check_partition,
    default_partition,
    max_concurrent_batches,
    parse_partition,
    stage_ranges,
    unsafe_layers,
)

#: GLM-5.2 and 5.3, index_topk_freq 4, index_skip_topk_offset 3: layer l computes indices iff max(l - 2, 0) % 4 == 0.
FULL = tuple(max(layer - 2, 0) % 4 == 0 for layer in range(78))


def test_k5_layers_that_compute_indices() -> None:
    # 0, 1, 2 (max(.., 0) is 0) and every fourth from 2 on up to 74: 3 + 72 / 4 = 21.
    assert [i for i, full in enumerate(FULL) if full] == [0, 1, *range(2, 75, 4)]
    assert sum(FULL) == 3 + (74 - 2) // 4 == 21


@pytest.mark.parametrize(
    ("layers", "stages", "partition"),
    [
        (78, 4, (19, 20, 20, 19)),  # 78 = 4 * 19 + 2: the two before the last
        (126, 4, (31, 32, 32, 31)),
        (61, 4, (15, 15, 16, 15)),
        (80, 2, (40, 40)),
        (61, 2, (31, 30)),
        (79, 4, (20, 20, 20, 19)),
        (94, 4, (23, 24, 24, 23)),
        (36, 8, (4, 4, 4, 5, 5, 5, 5, 4)),
        (7, 8, (1, 1, 1, 1, 1, 1, 1, 0)),  # the engine accepts it; check_partition does not
    ],
)
def test_p1_default_partition(layers: int, stages: int, partition: tuple[int, ...]) -> None:
    assert default_partition(layers, stages) == partition
    assert sum(partition) == layers


@pytest.mark.parametrize("text", ["41,36", "41,37,0", "39", "-1,79", "0,78", "39.0,39", "x,39"])
def test_p2_partition_errors(text: str) -> None:
    # Count, sum and integers are the engine's own checks; it lets "0,78" and "-1,79" through, which sum to 78.
    with pytest.raises((ConfigError, LegalityError)):
        parse_partition(text, 78, 2)


def test_p2_the_engines_own_empty_stage_is_refused() -> None:
    with pytest.raises(LegalityError):
        check_partition(default_partition(7, 8), 7, 8)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_p3_batches_in_flight(stages: int) -> None:
    assert max_concurrent_batches(stages, async_scheduling=False) == stages
    assert max_concurrent_batches(stages) == stages + 1
    assert max_concurrent_batches(stages, v2_runner=False) == (2 if stages == 1 else stages)


@pytest.mark.parametrize(
    ("partition", "unsafe"),
    [
        ((39, 39), (39, 40, 41)),  # layers that compute indices: .., 38, 42, ..
        ((40, 38), (40, 41)),
        ((41, 37), (41,)),
        ((42, 36), ()),
        ((45, 33), (45,)),  # .., 42, 46, ..
        ((20, 20, 20, 18), (20, 21, 40, 41, 60, 61)),
        ((19, 20, 20, 19), (19, 20, 21, 39, 40, 41, 59, 60, 61)),
        ((18, 20, 20, 20), ()),  # starts 18, 38, 58
        ((22, 20, 20, 16), ()),  # starts 22, 42, 62
    ],
)
def test_p5_unsafe_layers(partition: tuple[int, ...], unsafe: tuple[int, ...]) -> None:
    assert unsafe_layers(partition, FULL) == unsafe


def test_p6_safe_starts() -> None:
    freq, offset = 4, 3
    for partition in all_partitions(78, 2):
        start = stage_ranges(partition)[1].start
        safe = start <= offset - 1 or start % freq == (offset - 1) % freq
        assert (unsafe_layers(partition, FULL) == ()) == safe
