"""What a layer must know of its surroundings: the ranks it works with and the step that is running.

Layers never pass these along; like an engine's forward context they are set around a call of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch

from tensor_cast.errors import LegalityError
from tensor_cast.ir.record import Phase, Scope


@dataclass(frozen=True)
class ParallelContext:
    """One rank's place in the parallel axes of a pipeline stage.

    ``rank`` counts within the stage, tp fastest: ``rank = dp_rank * tp + tp_rank``. DCP groups are contiguous slices of
    the TP group. Experts are laid over all ``tp * dp`` ranks: outermost moe_dp, then ep, innermost moe_tp.
    """

    tp: int = 1
    dcp: int = 1
    dp: int = 1
    ep: int = 1
    moe_dp: int = 1
    dcp_semantics: str = "vllm-ascend"
    interleave: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        stage = self.tp * self.dp
        if self.tp % self.dcp:
            raise LegalityError("dcp.divides_tp", "tp % dcp = 0", f"tp {self.tp}, dcp {self.dcp}", "choose another dcp")
        if stage % (self.ep * self.moe_dp):
            raise LegalityError(
                "moe.sizes",
                "moe_tp * moe_dp * ep = tp * dp",
                f"tp {self.tp}, dp {self.dp}, ep {self.ep}, moe_dp {self.moe_dp}",
                "choose ep and moe_dp whose product divides tp * dp",
            )
        if self.moe_dp not in (1, self.dp):
            raise LegalityError(
                "moe.moe_dp", "moe_dp 1 or dp", f"moe_dp {self.moe_dp}, dp {self.dp}", "use moe_dp 1 or moe_dp = dp"
            )

    @property
    def tp_rank(self) -> int:
        """Rank in the TP group."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """Rank in the DP group."""
        return self.rank // self.tp

    @property
    def dcp_rank(self) -> int:
        """Rank in the DCP group."""
        return self.tp_rank % self.dcp

    @property
    def moe_tp(self) -> int:
        """Ways each expert's intermediate size is split."""
        return self.tp * self.dp // (self.ep * self.moe_dp)

    @property
    def moe_tp_rank(self) -> int:
        """Which slice of each expert this rank holds."""
        return self.rank % self.moe_tp

    @property
    def ep_rank(self) -> int:
        """Which experts this rank holds."""
        return self.rank // self.moe_tp % self.ep

    @property
    def moe_dispatch(self) -> int:
        """DP ranks whose tokens meet in one expert computation; 1 when no tokens move."""
        return self.dp // self.moe_dp

    def size(self, axis: str) -> int:
        """Ranks in a group of ``axis``."""
        return int(getattr(self, axis))

    def at(self, rank: int) -> ParallelContext:
        """The same layout seen from another rank."""
        return replace(self, rank=rank)


#: Names a paged cache: a layer's index, or :func:`indexer_key` of one.
CacheKey = int | str


def indexer_key(layer: int) -> str:
    """Key of the cache that the indexer of a layer keeps beside the layer's own."""
    return f"indexer.{layer}"


@dataclass
class Step:
    """One forward pass.

    Args:
        phase: decode or prefill.
        positions: [B, Q] int64, place of each query token in its sequence.
        seq_len: S, tokens in the longest sequence, this step's included.
        block_table: [B, blocks per request] int32, [B * Q, ...] when DCP flattens it.
        slot_mapping: [B * Q] int32, cache slot of each token; -1 where another rank owns it.
        kv_caches: paged caches by key: of attention the layer index, of an indexer see :func:`indexer_key`.
    """

    phase: Phase
    positions: torch.Tensor
    seq_len: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    kv_caches: Mapping[CacheKey, torch.Tensor] = field(default_factory=dict)


_step: ContextVar[Step | None] = ContextVar("tensor_cast_step", default=None)
_scope: ContextVar[Scope] = ContextVar("tensor_cast_scope", default=Scope.TOKEN)


def current_step() -> Step:
    """The running step. Raises :class:`RuntimeError` outside of :func:`running`."""
    step = _step.get()
    if step is None:
        raise RuntimeError("attention runs only inside tensor_cast.layers.context.running(step)")
    return step


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Make ``step`` the running step."""
    token = _step.set(step)
    scope = _scope.set(Scope.TOKEN)
    try:
        yield
    finally:
        _scope.reset(scope)
        _step.reset(token)


def current_scope() -> Scope:
    """Scope of the ops that run now; the recorder asks."""
    return _scope.get()


def enter_scope(scope: Scope) -> None:
    """From here on ops belong to ``scope``."""
    _scope.set(scope)


@contextmanager
def scoped(scope: Scope) -> Iterator[None]:
    """Ops inside belong to ``scope``."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)
