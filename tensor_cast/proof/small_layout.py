"""A layout of few ranks that works like a layout of many, and the heads it needs.

What counts is not how large an axis is but how it meets the others: whether KV heads are split or copied, whether DCP
uses up the copies, whether a DCP group is the whole TP group, whether experts fill all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from tensor_cast.errors import LegalityError
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig

__all__ = ["MAX_RANKS", "SmallLayout", "small_layout"]

#: Ranks that one machine runs side by side.
MAX_RANKS = 8


@dataclass(frozen=True)
class SmallLayout:
    """A layout that fits one machine.

    Args:
        parallel: sizes of its axes.
        kv_heads: KV heads (for latent attention: query heads) of a model that meets it as the whole one meets its own.
        block_size: tokens of a KV block, few enough that a short sequence has several.
    """

    parallel: ParallelConfig
    kv_heads: int
    block_size: int


def small_layout(
    model: ModelConfig, parallel: ParallelConfig, *, block_size: int, max_ranks: int = MAX_RANKS
) -> SmallLayout:
    """The layout itself where it has few ranks, else one of its character.

    Args:
        model: the whole model.
        parallel: a layout that is legal for it.
        block_size: tokens of a KV block under that layout.
        max_ranks: most ranks allowed.

    Raises:
        LegalityError: no layout of so few ranks resembles it.
    """
    group = model.num_attention_heads // model.num_key_value_heads
    wanted = _character(model, parallel, model.num_key_value_heads)
    best: tuple[tuple[int, ...], ParallelConfig, int] | None = None
    for smaller in _smaller(parallel, max_ranks):
        for kv_heads in range(1, 2 * MAX_RANKS + 1):
            if (group * kv_heads) % smaller.tensor_parallel_size:
                continue
            alike = sum(a == b for a, b in zip(wanted, _character(model, smaller, kv_heads), strict=True))
            # The more alike the better, then the more ranks, most of them in tp, then the fewer heads.
            score = (alike, smaller.world_size, smaller.tensor_parallel_size, -kv_heads)
            if best is None or score > best[0]:
                best = score, smaller, kv_heads
    if best is None:
        raise LegalityError(
            "verify.ranks",
            f"a layout that runs on {max_ranks} ranks, or one whose sizes share divisors with it",
            f"tp_size {parallel.tensor_parallel_size} * dp_size {parallel.data_parallel_size} = {parallel.world_size}",
            f"choose sizes whose product is at most {max_ranks}, or powers of two",
        )
    _, chosen, kv_heads = best
    block, interleave = _small_block(block_size, parallel.cp_kv_cache_interleave_size)
    return SmallLayout(replace(chosen, cp_kv_cache_interleave_size=interleave), kv_heads, block)


def _smaller(parallel: ParallelConfig, max_ranks: int) -> Iterator[ParallelConfig]:
    """Layouts of at most ``max_ranks`` ranks that keep every axis above 1 above 1."""
    if parallel.world_size <= max_ranks:
        yield parallel
        return
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    for tp in _sizes(parallel.tensor_parallel_size, max_ranks):
        for dp in _sizes(parallel.data_parallel_size, max_ranks):
            if tp * dp > max_ranks:
                continue
            for dcp in _sizes(parallel.decode_context_parallel_size, tp):
                if tp % dcp:
                    continue
                moe_dp = dp if parallel.moe_data_parallel_size > 1 else 1
                whole = parallel.expert_parallel_size == ranks // parallel.moe_data_parallel_size
                ep = tp * dp // moe_dp if whole else gcd(parallel.expert_parallel_size, tp * dp // moe_dp)
                if (parallel.expert_parallel_size > 1) == (ep > 1):
                    yield ParallelConfig(
                        tensor_parallel_size=tp,
                        data_parallel_size=dp,
                        expert_parallel_size=ep,
                        moe_data_parallel_size=moe_dp,
                        decode_context_parallel_size=dcp,
                    )


def _sizes(size: int, most: int) -> list[int]:
    """Sizes that may stand for ``size``: its divisors above 1, or else 2."""
    return [1] if size == 1 else [d for d in range(2, most + 1) if size % d == 0] or [2]


def _character(model: ModelConfig, parallel: ParallelConfig, kv_heads: int) -> tuple[int | bool, ...]:
    """What must stay as it is: one fact each, all equally important."""
    tp, dcp = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    facts: list[int | bool] = [
        kv_heads > 1,
        dcp == tp,
        dcp < tp,
        tp == 1 or kv_heads > tp,  # several heads on a rank
    ]
    if model.attention is AttentionKind.GQA:
        facts += [
            tp > kv_heads,  # heads are copied
            not (kv_heads % tp and tp % kv_heads),
            dcp * kv_heads > tp,
            dcp * kv_heads == tp,  # DCP uses up the copies
            (dcp * kv_heads) % tp == 0 or tp % (dcp * kv_heads) == 0,
        ]
    return tuple(facts)


def _small_block(block_size: int, interleave: int) -> tuple[int, int]:
    """Block and interleave sizes of at most 4 tokens that relate as the given ones do."""
    if block_size <= 4:
        return block_size, interleave
    if interleave in (1, block_size):
        return 4, 1 if interleave == 1 else 4
    return 4, 2
