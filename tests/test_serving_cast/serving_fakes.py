"""Fake prices that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from serving_cast.config import ParallelConfig
from tensor_cast.ir.record import Phase, Scope
from tensor_cast.units import GIB


@dataclass
class FakePricer:
    """Seconds of each scope as affine functions of tokens B*Q and of tokens read B*Q*S."""

    token_base: float = 1e-3
    per_token: float = 1e-5
    per_read: float = 1e-9
    per_sample: float = 1e-6

    def seconds(self, env: Mapping[str, Any], scopes: Collection[Scope]) -> dict[Scope, Any]:
        tokens = env["B"] * env["Q"]
        all_of_them = {
            Scope.TOKEN: self.token_base + self.per_token * tokens,
            Scope.SEQUENCE: self.per_read * tokens * env["S"],
            Scope.SAMPLE: self.per_sample * tokens,
        }
        return {scope: all_of_them[scope] for scope in scopes}


@dataclass
class FakeCosts:
    """One layout: everything divides by tp, KV by dcp as well; dcp adds a fixed time per token for its collectives."""

    parallel: ParallelConfig
    phases: tuple[Phase, ...]
    kv_token_bytes: float = 2e6
    weights: float = 60 * GIB
    host_s: float = 1e-3
    coverage: float = 1.0
    overhead_bytes: float = 2.0 * GIB
    gather: Any = None
    pricer: FakePricer = field(default_factory=FakePricer)

    @property
    def _sharded(self) -> FakePricer:
        tp, dcp = self.parallel.tp_size, self.parallel.dcp_size
        return replace(
            self.pricer,
            token_base=self.pricer.token_base / tp,
            per_token=self.pricer.per_token / tp + 1e-8 * (dcp - 1),
            per_read=self.pricer.per_read / tp / dcp,
        )

    @property
    def decode(self) -> FakePricer | None:
        return self._sharded if Phase.DECODE in self.phases else None

    @property
    def prefill(self) -> FakePricer | None:
        return self._sharded if Phase.PREFILL in self.phases else None

    @property
    def weight_bytes(self) -> int:
        return int(self.weights / self.parallel.tp_size)

    def kv_bytes(self, tokens: int) -> int:
        return int(tokens * self.kv_token_bytes / self.parallel.tp_size / self.parallel.dcp_size)

    def pool_bytes(self, grid: Any, batches: float = 1.0) -> Any:
        w = grid.workload
        tokens = w.total_tokens if Phase.DECODE in self.phases else w.input_length
        return grid.batches * batches * self.kv_bytes(tokens)

    @property
    def longest_bytes(self) -> int:
        return 0

    def activation_bytes(self, grid: Any) -> Any:
        return np.full(len(grid.batches), 1.0 * GIB)

    def bound(self, grid: Any, index: int) -> str:
        return "memory"


class FakeFactory:
    """Makes :class:`FakeCosts`; keyword arguments go to each of them."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.prepared: list[Any] = []

    def prepare(self, wanted: Sequence[Any]) -> None:
        self.prepared += wanted

    def costs(self, parallel: ParallelConfig, phases: tuple[Phase, ...]) -> FakeCosts:
        return FakeCosts(parallel, phases, **self.values)
