"""Faults that ranks are run with: importable by name, entered around a rank's work."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tensor_cast.layers import attention, sharding
from tensor_cast.layers.boundary import StageLink
from tensor_cast.layers.choice_flow import ChoiceFlow


def double(value: int) -> int:
    return 2 * value


def name_and_threads() -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def fail(rank: int) -> int:
    if rank == 1:
        raise ValueError("a fault on purpose")
    return rank


def vanish(rank: int) -> int:
    if rank == 1:
        os._exit(7)
    time.sleep(60)
    return rank


def sleep(seconds: float) -> None:
    time.sleep(seconds)


@contextmanager
def no_reduce_in_second_layer() -> Iterator[None]:
    """The feed-forward block of layer 1 forgets its all_reduce."""
    real = sharding._reducing

    def reducing(inner: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(inner, "__self__", None)
        if path is not None and ".layers.1.mlp" in (path.__dict__.get("tensor_cast_path") or ""):
            return inner(*args, **kwargs)
        return real(inner, *args, **kwargs)

    with mock.patch.object(sharding, "_reducing", reducing):
        yield


@contextmanager
def head_scaled() -> Iterator[None]:
    """Logits come out a millionth too large."""
    real = sharding.all_gather

    def gather(x: torch.Tensor, axis: str, size: int, dim: int = 0) -> torch.Tensor:
        out = real(x, axis, size, dim)
        return out * (1 + 1e-6) if dim == -1 else out

    with mock.patch.object(sharding, "all_gather", gather):
        yield


@contextmanager
def superfluous_op() -> Iterator[None]:
    """Attention does something that changes no number."""
    real = attention._attend

    def attend(core: Any, step: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        return real(core, step, q + 0.0, *rest)

    with mock.patch.object(attention, "_attend", attend):
        yield


# -- between stages ---------------------------------------------------------------------------------------------------


@contextmanager
def indices_one_too_high() -> Iterator[None]:
    """Top-k indices that arrive are counted from 1."""
    real = ChoiceFlow.incoming
    with mock.patch.object(ChoiceFlow, "incoming", lambda self, received, step: real(self, received + 1, step)):
        yield


@contextmanager
def indices_of_other_request() -> Iterator[None]:
    """Top-k indices that arrive are those of the next request."""
    real = ChoiceFlow.incoming
    with mock.patch.object(ChoiceFlow, "incoming", lambda self, received, step: real(self, received.roll(1, 0), step)):
        yield


@contextmanager
def first_slice_sent_by_all() -> Iterator[None]:
    """Every TP rank sends the first slice of what crosses, not its own."""

    def piece(self: StageLink, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[..., : tensor.shape[-1] // self.ctx.tp]

    with mock.patch.object(StageLink, "_piece", piece):
        yield
