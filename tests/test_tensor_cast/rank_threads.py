"""Ranks as threads of one process: functional collectives by rendezvous, so that cut programs can be executed.

It stands in for process groups in unit tests; the operations are written from their definitions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tensor_cast.layers import collectives
from tensor_cast.layers.context import ParallelContext


class _Group:
    """Ranks that meet: everyone hands in a tensor, everyone sees all of them in rank order."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._slots: list[Any] = [None] * size

    def meet(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[rank] = tensor
        self._barrier.wait()
        everyone = list(self._slots)
        self._barrier.wait()
        return everyone

    def abort(self) -> None:
        self._barrier.abort()


class ThreadCollectives:
    """Stands in for ``torch.ops._c10d_functional`` while threads run as the ranks of ``ctx``."""

    def __init__(self, ctx: ParallelContext) -> None:
        self._local = threading.local()
        self._groups: dict[tuple[str, int], _Group] = {}
        for rank in range(ctx.tp * ctx.dp):
            at = ctx.at(rank)
            for axis, (group, _, size) in self._places(at).items():
                self._groups.setdefault((axis, group), _Group(size))

    @staticmethod
    def _places(ctx: ParallelContext) -> dict[str, tuple[int, int, int]]:
        """Axis -> (which group, rank in it, its size)."""
        return {
            "tp": (ctx.dp_rank, ctx.tp_rank, ctx.tp),
            "dcp": (ctx.rank // ctx.dcp, ctx.dcp_rank, ctx.dcp),
            "dp": (ctx.tp_rank, ctx.dp_rank, ctx.dp),
        }

    def run(self, ctx: ParallelContext, work: Callable[[ParallelContext], Any]) -> list[Any]:
        """Results of ``work`` on every rank."""
        results: list[Any] = [None] * (ctx.tp * ctx.dp)
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self._local.ctx = ctx.at(rank)
            try:
                with torch.inference_mode():
                    results[rank] = work(self._local.ctx)
            except BaseException as error:
                errors.append(error)
                for group in self._groups.values():
                    group.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results

    def _meet(self, x: torch.Tensor, axis: str) -> tuple[list[torch.Tensor], int, int]:
        group, rank, size = self._places(self._local.ctx)[axis]
        return self._groups[axis, group].meet(rank, x), rank, size

    # -- the operations -----------------------------------------------------------------------------------------
    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_reduce(self, x: torch.Tensor, op: str, axis: str) -> torch.Tensor:
        assert op == "sum"
        return torch.stack(self._meet(x, axis)[0]).sum(0)

    def all_gather_into_tensor(self, x: torch.Tensor, size: int, axis: str) -> torch.Tensor:
        everyone, _, members = self._meet(x, axis)
        assert size == members
        return torch.cat(everyone)

    def reduce_scatter_tensor(self, x: torch.Tensor, op: str, size: int, axis: str) -> torch.Tensor:
        everyone, rank, members = self._meet(x, axis)
        assert (op, size) == ("sum", members)
        return torch.stack(everyone).sum(0).chunk(size)[rank].clone()

    def all_to_all_single(self, x: torch.Tensor, out: list[int], into: list[int], axis: str) -> torch.Tensor:
        everyone, rank, members = self._meet(x, axis)
        assert len(out) == len(into) == members
        assert sum(into) == x.shape[0]
        return torch.cat([other.split(into)[rank] for other in everyone])


def run_ranks(monkeypatch: Any, ctx: ParallelContext, work: Callable[[ParallelContext], Any]) -> list[Any]:
    """Run ``work`` as every rank of ``ctx`` at once."""
    stand_in = ThreadCollectives(ctx)
    monkeypatch.setattr(collectives, "_C10D", stand_in)
    return stand_in.run(ctx, work)
