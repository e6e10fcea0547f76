"""The ranks end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensor_cast.proof import close_shared_pool, shared_pool


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    """One pool of the largest size for all cells."""
    shared_pool(8)
    yield
    close_shared_pool()
