"""Ways to get parallel execution wrong, each as a context in which the product does it that way.

Every mutation keeps the program running on all ranks: it is a mistake that someone could make and not notice. The ranks
of the gloo harness enter the context by name (``broken``), the process that judges them does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tensor_cast import ops
from tensor_cast.engine import dcp as rules
from tensor_cast.layers import attention, dcp, embedding, indexer, mla, moe, sharding
from tensor_cast.layers.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from tensor_cast.layers.context import current_step
from tensor_cast.layers.modules import path_of, wrap_forward
from tensor_cast.ops import kv_layout
from tensor_cast.proof import session
from tensor_cast.proof.cell import Cell

Patches = Callable[[], Iterator[Any]]


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Args:
        what: in a few words.
        family, kv_heads: tiny model of the equivalence matrix that shows it.
        cell: the layout that shows it.
        patches: what is replaced.
    """

    what: str
    family: str
    kv_heads: int
    cell: Cell
    patches: Patches


MUTATIONS: dict[str, Mutation] = {}


def mutation(what: str, family: str, kv_heads: int = 0, **cell: Any) -> Callable[[Patches], Patches]:
    """Decorator: files a function that yields patches under its name."""

    def file(patches: Patches) -> Patches:
        MUTATIONS[patches.__name__] = Mutation(what, family, kv_heads, Cell(steps=2, **cell), patches)
        return patches

    return file


@contextmanager
def broken(name: str) -> Iterator[None]:
    """The product with the mistake ``name`` in it."""
    with ExitStack() as stack:
        for one in MUTATIONS[name].patches():
            stack.enter_context(one)
        yield


def on_join(change: Callable[[sharding.Sharder, nn.Module], None]) -> Any:
    """A patch that changes a region after its collectives were put in."""
    inner = sharding.Sharder._join

    def join(self: sharding.Sharder, region: nn.Module, rules: Any, routed: bool) -> None:
        inner(self, region, rules, routed)
        change(self, region)

    return patch.object(sharding.Sharder, "_join", join)


# -- tensor parallelism ---------------------------------------------------------------------------------------------


@mutation("no all_reduce after attention and feed-forward", "llama", 4, tp=2)
def drop_all_reduce() -> Iterator[Any]:
    yield patch.object(sharding, "_reducing", lambda inner, *args, **kwargs: inner(*args, **kwargs))


@mutation("no all_reduce after the feed-forward block only", "qwen3", 2, tp=2)
def drop_one_all_reduce() -> Iterator[Any]:
    inner = sharding.Sharder._join

    def join(self: Any, region: nn.Module, rules: Any, routed: bool) -> None:
        if not (path_of(region) or "").endswith("mlp"):
            inner(self, region, rules, routed)

    yield patch.object(sharding.Sharder, "_join", join)


@mutation("shared experts reduced on their own and again with the routed ones", "deepseek_v3", tp=2)
def reduce_shared_experts_twice() -> Iterator[Any]:
    def change(_: Any, region: nn.Module) -> None:
        for module in region.modules():
            if (path_of(module) or "").endswith("shared_experts"):
                wrap_forward(module, sharding._reducing)

    yield on_join(change)


@mutation("half of the KV heads kept", "llama", 4, tp=2)
def halve_kv_heads() -> Iterator[Any]:
    yield patch.object(rules._Engine, "local_kv_heads", lambda self, h_kv, tp, dcp: max(1, h_kv // tp // 2))


@mutation("copied KV heads dealt round instead of in runs", "llama", 2, tp=4)
def wrong_kv_head_copy() -> Iterator[Any]:
    inner = sharding.Sharder._ways

    def ways(self: Any, split: Any, length: int, name: str) -> tuple[int, int]:
        count, index = inner(self, split, length, name)
        return (count, self._ctx.tp_rank % count) if split.axis == "kv" else (count, index)

    yield patch.object(sharding.Sharder, "_ways", ways)


@mutation("bias of a row-parallel product added on every rank", "gpt_oss", 2, tp=2)
def bias_on_every_rank() -> Iterator[Any]:
    inner = sharding.Sharder._join

    def join(self: Any, region: nn.Module, rules: Any, routed: bool) -> None:
        biases = {m: m.bias for m in region.modules() if isinstance(m, nn.Linear)}
        inner(self, region, rules, routed)
        for module, bias in biases.items():
            module._parameters["bias"] = bias

    yield patch.object(sharding.Sharder, "_join", join)


@mutation("sinks not cut with their heads", "gpt_oss", 2, tp=2)
def wrong_sinks() -> Iterator[Any]:
    inner = attention._attend

    def attend(core: Any, *args: Any) -> Any:
        *others, sinks = args
        rolled = None if sinks is None else all_gather(sinks, "tp", core.ctx.tp)[: len(sinks)]
        return inner(core, *others, rolled)

    yield patch.object(attention, "_attend", attend)


@mutation("gate and up of a packed weight cut as one", "mixtral", 2, tp=2)
def packed_weight_cut_as_one() -> Iterator[Any]:
    inner = sharding._slice

    def cut(tensor: torch.Tensor, split: Any, ways: int, index: int) -> torch.Tensor:
        return inner(tensor, replace(split, sections=1) if split.axis == "moe_tp" else split, ways, index)

    yield patch.object(sharding, "_slice", cut)


@mutation("tokens of other ranks embedded as token 0", "llama", 4, tp=2)
def no_vocabulary_mask() -> Iterator[Any]:
    def unmasked(module: nn.Embedding, rank: int) -> None:
        rows = module.weight.shape[0]

        def forward(inner: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            local = ids - rank * rows
            elsewhere = torch.logical_or(local < 0, local >= rows)
            return all_reduce(inner(local.masked_fill(elsewhere, 0), *args, **kwargs), "tp")

        wrap_forward(module, forward)

    yield patch.object(sharding, "make_vocab_parallel", unmasked)


@mutation("embedding rows of the ranks one off", "qwen3", 2, tp=2)
def embedding_off_by_one() -> Iterator[Any]:
    inner = embedding.make_vocab_parallel

    def shifted(module: nn.Embedding, rank: int) -> None:
        inner(module, rank)
        wrap_forward(module, lambda forward, ids: forward(torch.where(ids > 0, ids - 1, ids)))

    yield patch.object(sharding, "make_vocab_parallel", shifted)


@mutation("logits of the ranks gathered in the wrong order", "llama", 4, tp=2)
def logits_in_wrong_order() -> Iterator[Any]:
    def gather(x: torch.Tensor, axis: str, size: int, dim: int = 0) -> torch.Tensor:
        return all_gather(x, axis, size, dim).roll(x.shape[dim], dim)

    yield patch.object(sharding, "all_gather", gather)


@mutation("a window one token short", "gpt_oss", 2, tp=1)
def window_off_by_one() -> Iterator[Any]:
    inner = ops.attention

    def attend(*args: Any) -> Any:
        changed = list(args)
        changed[7] = None if args[7] is None else args[7] - 1
        return inner(*changed)

    yield patch.object(ops, "attention", attend)


@mutation("soft-capping of scores forgotten", "gemma2", 2, tp=2)
def no_soft_cap() -> Iterator[Any]:
    inner = ops.attention

    def attend(*args: Any) -> Any:
        return inner(*args[:8], None, *args[9:])

    yield patch.object(ops, "attention", attend)


# -- experts --------------------------------------------------------------------------------------------------------


@mutation("experts of a rank counted from one too high", "qwen3_moe", 2, tp=2, ep=2)
def experts_off_by_one() -> Iterator[Any]:
    def shifted(total: int, ways: int, rank: int) -> tuple[int, int]:
        begin, end = sharding.split_range(total, ways, rank)
        return begin + 1, end + 1

    yield patch.object(moe, "split_range", shifted)


@mutation("bias of the experts added by every slice of them", "gpt_oss", 2, tp=2)
def expert_bias_on_every_rank() -> Iterator[Any]:
    def forward(module: nn.Module, *args: Any) -> torch.Tensor:
        core = module.__dict__["experts_core"]
        module.__dict__["experts_core"] = replace(core, ctx=core.ctx.at(0))
        try:
            return moe.experts_forward(module, *args)
        finally:
            module.__dict__["experts_core"] = core

    yield patch.dict(ALL_EXPERTS_FUNCTIONS._local_mapping, {attention.IMPLEMENTATION: forward})


@mutation("outputs of the DP ranks' experts averaged, not summed", "mixtral", 2, tp=1, dp=2, ep=2)
def experts_averaged() -> Iterator[Any]:
    yield patch.object(moe, "reduce_scatter", lambda x, axis, size: reduce_scatter(x, axis, size) / size)


@mutation("expert weights of other DP ranks' tokens mixed up", "qwen3_moe", 2, tp=1, dp=2)
def routing_of_other_tokens() -> Iterator[Any]:
    def gather(x: torch.Tensor, axis: str, size: int, dim: int = 0) -> torch.Tensor:
        gathered = all_gather(x, axis, size, dim)
        return gathered.roll(len(x), 0) if x.is_floating_point() and x.shape[-1] == 2 else gathered

    yield patch.object(moe, "all_gather", gather)


# -- latent attention -----------------------------------------------------------------------------------------------


@mutation("W_UV of the next head", "deepseek_v3", tp=2)
def wrong_w_uv() -> Iterator[Any]:
    inner = mla._to_values
    yield patch.object(mla, "_to_values", lambda out, w_uv: inner(out, w_uv.roll(1, 0)))


@mutation("rotary part of the cached latents turned round", "deepseek_v3", tp=2)
def stale_latent() -> Iterator[Any]:
    inner = ops.mla_cache_write

    def write(latent: torch.Tensor, *args: Any) -> None:
        inner(torch.cat([latent[..., :-4], latent[..., -4:].flip(-1)], -1), *args)

    yield patch.object(ops, "mla_cache_write", write)


# -- sparse attention -----------------------------------------------------------------------------------------------


@mutation("index scores without their ReLU", "glm_moe_dsa", tp=2)
def no_relu_of_index_scores() -> Iterator[Any]:
    yield patch.object(torch, "relu", lambda x: x)


@mutation("indexer turns halves where GLM turns pairs", "glm_moe_dsa", tp=2)
def wrong_index_rotation() -> Iterator[Any]:
    yield patch.dict(indexer._ROTARY, {"glm_moe_dsa": indexer._ROTARY["deepseek_v32"]})


@mutation("one token too few chosen", "glm_moe_dsa", tp=2)
def choice_off_by_one() -> Iterator[Any]:
    inner = ops.indexer_topk

    def choose(scores: torch.Tensor, num_keys: int, phase: str) -> torch.Tensor:
        return inner(scores, max(num_keys - 1, 1), phase)

    yield patch.object(ops, "indexer_topk", choose)


@mutation("index keys scored before they are written", "deepseek_v32", tp=2)
def stale_index_keys() -> Iterator[Any]:
    write, gather = ops.indexer_cache_write, ops.gather_kv
    held: list[tuple[Any, ...]] = []

    def read(*args: Any) -> Any:
        keys = gather(*args)
        while held:
            write(*held.pop())
        return keys

    yield patch.object(ops, "indexer_cache_write", lambda *args: held.append(args))
    yield patch.object(ops, "gather_kv", read)


@mutation(
    "places of a rank's candidates taken for those of the first rank", "glm_moe_dsa", tp=2, dcp=2, semantics="vllm"
)
def candidates_of_first_rank() -> Iterator[Any]:
    inner = ops.indexer_candidates

    def candidates(scores: torch.Tensor, positions: torch.Tensor, n: int, dcp: int, _: int, run: int) -> torch.Tensor:
        return inner(scores, positions, n, dcp, 0, run)

    yield patch.object(ops, "indexer_candidates", candidates)


@mutation("best tokens of one rank chosen instead of the best of all", "glm_moe_dsa", tp=2, dcp=2, semantics="vllm")
def choice_of_one_rank() -> Iterator[Any]:
    inner = ops.indexer_merge
    yield patch.object(ops, "indexer_merge", lambda best, n: inner(best[:1].expand_as(best).contiguous(), n))


@mutation("chosen places read as if the rank held the whole sequence", "glm_moe_dsa", tp=2, dcp=2, semantics="vllm")
def choice_not_localised() -> Iterator[Any]:
    inner = ops.sparse_mla_attention
    yield patch.object(ops, "sparse_mla_attention", lambda *args: inner(*args[:8], 1, 0, 1, args[11]))


@mutation("an indexer's whole cache written as if it were split", "glm_moe_dsa", tp=2, dcp=2)
def whole_index_cache_split() -> Iterator[Any]:
    inner = ops.indexer_cache_write

    def write(key: torch.Tensor, cache: torch.Tensor, *_: Any) -> None:
        inner(key, cache, current_step().slot_mapping, None, None)

    yield patch.object(ops, "indexer_cache_write", write)


# -- decode context parallelism -------------------------------------------------------------------------------------


@mutation("partial outputs averaged without their lse", "llama", 1, tp=2, dcp=2)
def skip_lse() -> Iterator[Any]:
    yield patch.object(ops, "merge_attention", lambda outs, lses, sinks, dtype, dcp: outs.mean(0).to(dtype))


@mutation("partial outputs reduced without rescaling by the lse", "llama", 1, tp=2, dcp=2, semantics="vllm")
def skip_lse_vllm() -> Iterator[Any]:
    inner = dcp.exchange_scattered

    def exchange(out: torch.Tensor, lse: torch.Tensor, *rest: Any) -> torch.Tensor:
        return inner(out, torch.zeros_like(lse), *rest)

    yield patch.dict(dcp.EXCHANGES._entries, {"vllm": exchange})


@mutation("all_to_all sends each rank another rank's heads", "llama", 1, tp=2, dcp=2)
def wrong_all_to_all_split() -> Iterator[Any]:
    def swapped(x: torch.Tensor, axis: str, size: int) -> torch.Tensor:
        return all_to_all(x.roll(len(x) // size, 0), axis, size)

    yield patch.object(dcp, "all_to_all", swapped)


@mutation("queries gathered along the batch", "llama", 1, tp=2, dcp=2)
def swapped_gather_dim() -> Iterator[Any]:
    def gather(q: torch.Tensor, ctx: Any) -> torch.Tensor:
        batch, queries, heads, width = q.shape
        return all_gather(q, "dcp", ctx.dcp, dim=0).reshape(batch, queries, heads * ctx.dcp, width)

    yield patch.object(attention, "gather_query_heads", gather)


@mutation("sinks added on every rank of a DCP group", "gpt_oss_full", 1, tp=2, dcp=2)
def sinks_on_every_rank() -> Iterator[Any]:
    attend, op = attention._attend, ops.attention

    def everywhere(core: Any, step: Any, q: torch.Tensor, *rest: Any) -> Any:
        *others, sinks = rest
        if q.shape[2] == len(sinks):
            return attend(core, step, q, *rest)
        gathered = all_gather(sinks, "dcp", core.ctx.dcp)
        with patch.object(ops, "attention", lambda *args: op(*args[:3], gathered, *args[4:])):
            return attend(core, step, q, *others, None)

    yield patch.object(attention, "_attend", everywhere)


@mutation("keys placed as if dealt one by one, not in runs", "llama", 1, tp=2, dcp=2, interleave=4)
def wrong_interleave() -> Iterator[Any]:
    yield _places(lambda inner, args, how: inner(*args, **{**how, "interleave": 1}))


@mutation("causal mask from local lengths, the rank forgotten", "llama", 1, tp=2, dcp=2, query=3)
def mask_without_rank() -> Iterator[Any]:
    yield _places(lambda inner, args, how: inner(*args, **{**how, "rank": 0}))


def _places(change: Callable[[Any, Any, Any], torch.Tensor]) -> Any:
    inner = kv_layout.key_positions
    return patch.object(kv_layout, "key_positions", lambda *args, **how: change(inner, args, how))


@mutation("tokens stored on the wrong rank of a DCP group", "deepseek_v3", tp=2, dcp=2)
def wrong_slot_owner() -> Iterator[Any]:
    inner = session.slot_mapping

    def other(positions: torch.Tensor, table: torch.Tensor, **how: Any) -> torch.Tensor:
        return inner(positions, table, **{**how, "rank": (how["rank"] + 1) % how["dcp"]})

    yield patch.object(session, "slot_mapping", other)


@mutation("latents of a DCP group merged without their lse", "deepseek_v3", tp=2, dcp=2, semantics="rfc")
def skip_lse_latent() -> Iterator[Any]:
    yield patch.object(ops, "merge_attention", lambda outs, lses, sinks, dtype, dcp: outs.sum(0).to(dtype))
