"""Layouts worth running when none is asked for: one for each way in which a model can be cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensor_cast.engine.dcp import semantics_names
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig
from tensor_cast.parallel import violations

__all__ = ["Telling", "telling_layouts"]


@dataclass(frozen=True)
class Telling:
    """A layout and what is special about it.

    Args:
        what: in a few words.
        parallel: the layout, legal for the whole model.
        dcp_semantics: how decode context parallelism is read.
    """

    what: str
    parallel: ParallelConfig
    dcp_semantics: str


def telling_layouts(
    model: ModelConfig,
    *,
    block_size: int,
    dcp_semantics: str | None = None,
    interleave: int = 1,
    quant_block: int | None = None,
    num_mtp_tokens: int = 0,
) -> tuple[Telling, ...]:
    """The smallest legal layout of each kind; kinds that the model does not allow are left out.

    Args:
        model: the whole model.
        block_size: tokens of a KV block.
        dcp_semantics: the one to split contexts under; None takes each in turn.
        interleave: consecutive tokens on one rank where the context is split.
        quant_block: side of the blocks that share a scale, None without.
        num_mtp_tokens: draft tokens per step.
    """
    readings = (dcp_semantics,) if dcp_semantics else semantics_names()

    def legal(parallel: ParallelConfig, semantics: str) -> bool:
        return not violations(
            model,
            parallel,
            dcp_semantics=semantics,
            block_size=block_size,
            quant_block=quant_block,
            num_mtp_tokens=num_mtp_tokens,
        )

    found = [Telling("one rank", ParallelConfig(), readings[0])]
    for what, candidates in _kinds(model):
        for parallel in candidates:
            if legal(parallel, readings[0]):  # without DCP all readings are the same
                found.append(Telling(what, parallel, readings[0]))
                break
    for semantics in readings:
        for parallel in _split_contexts(interleave):
            if legal(parallel, semantics):
                found.append(Telling(f"context split, {semantics}", parallel, semantics))
                break
    return tuple(found)


#: Sizes of tensor parallelism in order of preference.
_TP = (2, 4, 8, 16, 32, 64, 3, 5, 6, 7)


def _kinds(model: ModelConfig) -> Iterator[tuple[str, list[ParallelConfig]]]:
    yield "heads split", [ParallelConfig(tensor_parallel_size=tp) for tp in _TP]
    if model.attention is AttentionKind.GQA:
        more = [tp for tp in _TP if tp > model.num_key_value_heads]
        yield "KV heads copied", [ParallelConfig(tensor_parallel_size=tp) for tp in more]
    if not model.is_moe:
        return
    yield "experts split over ranks", [ParallelConfig(tensor_parallel_size=tp, expert_parallel_size=tp) for tp in _TP]
    yield (
        "experts split inside, two batches",
        [ParallelConfig(tensor_parallel_size=tp, data_parallel_size=2) for tp in (1, *_TP)],
    )
    yield (
        "experts over ranks, two batches",
        [ParallelConfig(tensor_parallel_size=tp, data_parallel_size=2, expert_parallel_size=2 * tp) for tp in _TP],
    )


def _split_contexts(interleave: int) -> Iterator[ParallelConfig]:
    for tp in (4, 2, *_TP[2:]):  # four ranks in two groups tell more than two in one
        for dcp in (2, tp):
            yield ParallelConfig(
                tensor_parallel_size=tp, decode_context_parallel_size=dcp, cp_kv_cache_interleave_size=interleave
            )
