"""How an engine divides memory into blocks: groups of layers that share block indices, blocks of each rank, capacity.

Layers of one group use the same block indices; a block of a group holds a page of each of its layers. Models whose
caches all keep every token form one group, whatever their page sizes (MLA with the caches of indexers). Others are
grouped so that each group has about as many layers, since groups draw from one pool and the widest one sets the size of
a block. Groups are formed over all pipeline stages; a rank holds the layers of its stage.
Source: vLLM 0.28 to 0.33 ``v1/core/kv_cache_utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tensor_cast.engine.kv_cache import CacheLayer
from tensor_cast.engine.kv_specs import ChunkedLocalSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tensor_cast.errors import UnsupportedModelError
from tensor_cast.units import ceil_div

__all__ = [
    "CacheGroup",
    "CachePage",
    "Capacity",
    "RankPool",
    "RequestBlocks",
    "build_groups",
    "plan_pool",
    "request_blocks",
    "with_drafts",
]

#: Buckets of layers this much more uneven than the smallest are cut into groups of its size.
_UNEVEN = 1.5


class CachePage(NamedTuple):
    """What a block holds for one cache of a layer: ``nbytes`` bytes, padded where pages were made equal."""

    layer: int
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block indices.

    Args:
        spec: what decides how many blocks a request takes.
        pages: of the group's caches, in the order of layers.
    """

    spec: KVCacheSpec
    pages: tuple[CachePage, ...]

    def block_bytes(self, layers: range | None = None) -> int:
        """Bytes of one block on the rank that has ``layers``; on one that has all of them by default."""
        return sum(page.nbytes for page in self.pages if layers is None or page.layer in layers)


def build_groups(caches: Sequence[CacheLayer], *, hybrid: bool = True) -> tuple[CacheGroup, ...]:
    """Groups of the caches of all stages.

    Args:
        caches: in the order of layers.
        hybrid: whether blocks behind a window are freed. Without, windowed layers are treated as full attention.

    Raises:
        UnsupportedModelError: recurrent layers without hybrid groups.
    """
    if not hybrid:
        caches = [CacheLayer(cache.layer, _as_full(cache.spec)) for cache in caches]
    specs = {cache.spec for cache in caches}
    if all(spec.keeps_all for spec in specs) or len(specs) == 1:
        return (CacheGroup(caches[0].spec, tuple(CachePage(c.layer, c.spec.kind, c.spec.page_bytes) for c in caches)),)
    page = max(spec.page_bytes for spec in specs)
    buckets: dict[KVCacheSpec, list[int]] = {}
    for cache in caches:
        buckets.setdefault(_widened(cache.spec, page), []).append(cache.layer)
    sizes = [len(layers) for layers in buckets.values()]
    size = max(sizes) if max(sizes) < _UNEVEN * min(sizes) else min(sizes)
    groups = []
    for spec, layers in buckets.items():
        # Strided, so that each pipeline stage has its share of each group.
        count = ceil_div(len(layers), size)
        pages = [CachePage(layer, spec.kind, page) for layer in layers]
        groups += [CacheGroup(spec, tuple(pages[i::count])) for i in range(count)]
    return tuple(groups)


def _widened(spec: KVCacheSpec, page: int) -> KVCacheSpec:
    """The spec with a block large enough for a page of ``page`` bytes, where that is a whole number of its own pages.

    Otherwise the page is padded and the block stays.
    """
    own = spec.page_bytes
    if spec.token_bytes == 0 or page % own:
        return spec
    return replace(spec, block_size=spec.block_size * (page // own))


def _as_full(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalSpec):
        return FullAttentionSpec(spec.block_size, spec.dtype, spec.kv_heads, spec.head_dim, spec.v_head_dim)
    if not spec.keeps_all:
        raise UnsupportedModelError("recurrent layers need hybrid groups of KV caches")
    return spec


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Blocks of the pool that one request takes, over all groups.

    Args:
        held: while it decodes; of a windowed layer only the blocks that the window reaches.
        admitted: at most while its prompt is computed, which must be free when the engine lets it in.
    """

    held: int
    admitted: int

    def of(self, requests: Any) -> Any:
        """Blocks of ``requests`` requests (a number or an array), the last of which computes its prompt."""
        return np.where(requests > 0, np.ceil((requests - 1) * self.held + self.admitted), 0.0)

    def fitting(self, blocks: int) -> int:
        """Most requests that ``blocks`` blocks hold."""
        return 0 if blocks < self.admitted else 1 + (blocks - self.admitted) // self.held


def request_blocks(groups: Sequence[CacheGroup], tokens: int, *, dcp: int = 1, in_flight: int = 0) -> RequestBlocks:
    """Blocks of a request of ``tokens`` tokens.

    Args:
        groups: of :func:`build_groups`.
        tokens: prompt, output, and slots of draft tokens.
        dcp: ways a sequence is split.
        in_flight: tokens that may be scheduled at once: batches in flight times the token budget of a step.
    """
    held = sum(int(group.spec.blocks(tokens, dcp)) for group in groups)
    admitted = sum(group.spec.admission_blocks(tokens, dcp=dcp, in_flight=in_flight) for group in groups)
    return RequestBlocks(held, max(held, admitted))


@dataclass(frozen=True, slots=True)
class RankPool:
    """The KV cache of the ranks of one pipeline stage.

    Args:
        available: bytes that the rank could spend.
        block_bytes: bytes of one block of all its layers (of the widest group).
        num_blocks: blocks that would fit.
        allocated: bytes taken after every rank was cut to the smallest number of blocks.
    """

    available: int
    block_bytes: int
    num_blocks: int
    allocated: int

    @property
    def idle(self) -> int:
        """Bytes left unused because another rank has fewer blocks."""
        return self.available - self.allocated


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine reports at start-up.

    Args:
        ranks: one for each pipeline stage.
        num_blocks: blocks of every rank, the null block (block 0, never handed out) included.
        blocks_per_request: blocks of the longest request over all groups.
        max_model_len: its tokens.
        binding_stage: stage with the fewest blocks; the first of several.
    """

    ranks: tuple[RankPool, ...]
    num_blocks: int
    blocks_per_request: int
    max_model_len: int
    binding_stage: int

    @property
    def usable_blocks(self) -> int:
        """Blocks beside the null block."""
        return max(0, self.num_blocks - 1)

    @property
    def max_concurrency(self) -> float:
        """Requests of ``max_model_len`` tokens that fit, as the engine counts (the null block included)."""
        return self.num_blocks / self.blocks_per_request

    @property
    def kv_tokens(self) -> int:
        """The engine's "GPU KV cache size": its float concurrency times the longest request, truncated."""
        return int(self.max_concurrency * self.max_model_len)

    @property
    def starts(self) -> bool:
        """Whether the longest request fits beside the null block on every rank; else the engine refuses to start."""
        needed = self.blocks_per_request
        return all(rank.block_bytes * (needed + 1) <= rank.available for rank in self.ranks)


def with_drafts(tokens: int, num_mtp_tokens: int, max_model_len: int) -> int:
    """Slots of a request of ``tokens`` tokens: its next draft tokens have some too, up to the longest request."""
    return max(tokens, min(tokens + num_mtp_tokens, max_model_len))


def plan_pool(
    groups: Sequence[CacheGroup],
    stages: Sequence[range],
    available: Sequence[int],
    *,
    max_model_len: int,
    dcp: int = 1,
    in_flight: int = 0,
) -> Capacity:
    """Blocks of every rank, and what they hold.

    Args:
        groups: of :func:`build_groups`.
        stages: layers of each pipeline stage; those of the last one include the draft layers.
        available: bytes for the KV cache on a rank of each stage.
        max_model_len: tokens of the longest request.
        dcp: ways a sequence is split.
        in_flight: tokens that may be scheduled at once: batches in flight times the token budget of a step.
    """
    block_bytes = [max(group.block_bytes(layers) for group in groups) for layers in stages]
    fitting = [max(0, room) // size for room, size in zip(available, block_bytes, strict=True)]
    blocks = min(fitting)
    per_request = sum(group.spec.admission_blocks(max_model_len, dcp=dcp, in_flight=in_flight) for group in groups)
    ranks = tuple(
        RankPool(available=room, block_bytes=size, num_blocks=count, allocated=blocks * size)
        for room, size, count in zip(available, block_bytes, fitting, strict=True)
    )
    return Capacity(ranks, blocks, per_request, max_model_len, fitting.index(blocks))
