"""KV cache specs that know their own bytes: what one layer keeps on one rank.

A cache is paged: a request takes whole blocks of ``block_size`` tokens. Under DCP a block keeps its size but stands for
``block_size * dcp`` tokens of the sequence, of which each rank holds its share.
Source: vLLM 0.30 ``v1/kv_cache_interface.py`` (page sizes, blocks of a request).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tensor_cast.engine.kv_formats import KV_FORMATS
from tensor_cast.errors import UnsupportedModelError
from tensor_cast.units import ceil_div

__all__ = [
    "ChunkedLocalSpec",
    "FullAttentionSpec",
    "IndexerSpec",
    "KVCacheSpec",
    "MlaSpec",
    "RecurrentSpec",
    "SlidingWindowSpec",
]

#: An int or a numpy array of them.
Tokens = Any


@dataclass(frozen=True, slots=True)
class KVCacheSpec(ABC):
    """Cache of one layer on one rank. ``block_size`` tokens per block; ``dtype`` is the name of a format."""

    #: What people call it.
    kind: ClassVar[str]

    block_size: int
    dtype: str

    @property
    @abstractmethod
    def token_bytes(self) -> int:
        """Bytes that one token takes."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.token_bytes

    @property
    def keeps_all(self) -> bool:
        """Whether every token of a request stays in the cache; such specs can share one group."""
        return True

    def blocks(self, tokens: Tokens, dcp: int = 1) -> Tokens:
        """Blocks that a request of ``tokens`` tokens takes on the fullest rank."""
        return -(-tokens // (self.block_size * dcp))

    def admission_blocks(self, max_model_len: int, *, dcp: int = 1, in_flight: int = 0) -> int:
        """Blocks that the engine counts for the longest request when it reports its capacity.

        Args:
            max_model_len: tokens of that request.
            dcp: ways its tokens are split.
            in_flight: tokens that may be scheduled before blocks behind a window are freed.
        """
        return ceil_div(ceil_div(max_model_len, dcp), self.block_size)


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(KVCacheSpec):
    """K and V of ``kv_heads`` local heads, of ``head_dim`` and ``v_head_dim`` elements."""

    kind: ClassVar[str] = "full attention"

    kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def token_bytes(self) -> int:
        """As the format stores ``kv_heads`` heads."""
        heads = KV_FORMATS.get(self.dtype).heads
        assert heads is not None, self.dtype
        return self.kv_heads * heads(self.head_dim, self.v_head_dim)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(FullAttentionSpec):
    """As full attention, but blocks behind the window are freed.

    ``in_flight`` tokens may be scheduled before the window moves on; at the start of a step a request holds the window
    but one token, and the blocks at both ends may be partly filled.
    """

    kind: ClassVar[str] = "sliding window"

    window: int
    in_flight: int = 1

    @property
    def keeps_all(self) -> bool:
        """No."""
        return False

    def blocks(self, tokens: Tokens, dcp: int = 1) -> Tokens:
        """``ceil(min(window - 1 + in_flight, tokens) / block_size) + 1``, and never more than full attention takes."""
        _refuse_dcp(dcp)
        kept = np.minimum(self.window - 1 + self.in_flight, tokens)
        return np.minimum(-(-kept // self.block_size) + 1, -(-tokens // self.block_size))

    def admission_blocks(self, max_model_len: int, *, dcp: int = 1, in_flight: int = 0) -> int:
        """``ceil(min(window - 1 + in_flight, max_model_len) / block_size) + 1``: the engine does not cap it."""
        _refuse_dcp(dcp)
        return ceil_div(min(self.window - 1 + in_flight, max_model_len), self.block_size) + 1


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(FullAttentionSpec):
    """Full attention within chunks of ``chunk`` tokens; earlier chunks are freed."""

    kind: ClassVar[str] = "attention in chunks"

    chunk: int

    @property
    def keeps_all(self) -> bool:
        """No."""
        return False

    def blocks(self, tokens: Tokens, dcp: int = 1) -> Tokens:
        """Blocks of at most one chunk."""
        _refuse_dcp(dcp)
        return -(-np.minimum(self.chunk, tokens) // self.block_size)

    def admission_blocks(self, max_model_len: int, *, dcp: int = 1, in_flight: int = 0) -> int:
        """``ceil(min(chunk + in_flight, max_model_len) / block_size)``."""
        _refuse_dcp(dcp)
        return ceil_div(min(self.chunk + in_flight, max_model_len), self.block_size)


def _refuse_dcp(dcp: int) -> None:
    if dcp > 1:
        raise UnsupportedModelError("a sliding-window cache is not split by decode context parallelism")


@dataclass(frozen=True, slots=True)
class MlaSpec(KVCacheSpec):
    """One latent and one rope key per token, whatever the number of heads; each TP rank holds them all."""

    kind: ClassVar[str] = "latent"

    kv_lora_rank: int
    rope_dim: int

    @property
    def token_bytes(self) -> int:
        """As the format stores a latent."""
        latent = KV_FORMATS.get(self.dtype).latent
        assert latent is not None, self.dtype
        return latent(self.kv_lora_rank, self.rope_dim)


@dataclass(frozen=True, slots=True)
class IndexerSpec(KVCacheSpec):
    """Keys of the indexer of sparse attention, on each TP rank.

    ``replicas`` is dcp where the engine does not split this cache (vllm-ascend): a block then holds all
    ``block_size * dcp`` tokens that its index stands for.
    """

    kind: ClassVar[str] = "indexer keys"

    key_bytes: int
    replicas: int = 1

    @property
    def token_bytes(self) -> int:
        """Of one token of a block's ``block_size``."""
        return self.key_bytes * self.replicas


@dataclass(frozen=True, slots=True)
class RecurrentSpec(KVCacheSpec):
    """State of a recurrent layer (Mamba, gated delta net): the same for any length of the request.

    ``state_bytes`` for one state; ``states`` that a request holds: 1, and 1 more for each draft token.
    """

    kind: ClassVar[str] = "recurrent state"

    state_bytes: int
    states: int = 1

    @property
    def token_bytes(self) -> int:
        """None: a token adds nothing."""
        return 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one state."""
        return self.state_bytes

    @property
    def keeps_all(self) -> bool:
        """No."""
        return False

    def blocks(self, tokens: Tokens, dcp: int = 1) -> Tokens:
        """One for each state."""
        return np.zeros_like(tokens) + self.states

    def admission_blocks(self, max_model_len: int, *, dcp: int = 1, in_flight: int = 0) -> int:
        """One for each state."""
        return self.states
