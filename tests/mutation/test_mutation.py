"""The equivalence machinery notices mistakes: each mutation of the shard plan and the layers changes the numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutations import MUTATIONS
from table import model, run, sound

from tensor_cast.proof import close_shared_pool, shared_pool


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    shared_pool(4)
    yield
    close_shared_pool()


@pytest.mark.parametrize("name", MUTATIONS)
def test_is_caught(name: str) -> None:
    """Logits differ, by far more than rounding, and not because the program broke down; undamaged they are equal."""
    mutation = MUTATIONS[name]
    assert sound(model(mutation), mutation.cell).equal
    caught = run(name, record=False)
    assert caught.numbers, mutation.what
    assert caught.result.max_abs_difference > 1e4 * caught.result.tolerance
    assert caught.result.first_mismatch


@pytest.mark.parametrize("name", ["drop_all_reduce", "drop_one_all_reduce", "halve_kv_heads"])
def test_is_caught_by_the_trace_too(name: str) -> None:
    """A collective too few or a wrong shape is no longer the program that was traced."""
    assert run(name).ops


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 20
