"""Faults that ``verify`` must notice: made by name in every rank and entered around its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tensor_cast.layers import sharding


@contextmanager
def forgotten_reduce() -> Iterator[None]:
    """Partial sums of the row-parallel layers are never added up."""

    def reducing(inner: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    with mock.patch.object(sharding, "_reducing", reducing):
        yield


@contextmanager
def unfit_head() -> Iterator[None]:
    """The head drops a column, so that the ranks' program cannot run."""
    real = sharding.all_gather

    def gather(x: Any, axis: str, size: int, dim: int = 0) -> Any:
        if dim == -1:
            raise ValueError("a shard of the wrong width")
        return real(x, axis, size, dim)

    with mock.patch.object(sharding, "all_gather", gather):
        yield
