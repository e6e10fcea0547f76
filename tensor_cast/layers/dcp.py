"""Decode context parallelism: how the ranks that hold slices of the context join their partial attentions.

Legend: T = B * Q tokens, hl = query heads of this rank, G = hl * dcp heads after the gather, D = value width.
Each semantics is one function ``(out, lse, sinks, ctx) -> [B, Q, hl, D]`` where out [B, Q, G, D] and lse [B, Q, G] come
from attention over the local context. Collectives per layer (engine sources of vLLM 0.30 and vllm-ascend, RFC 2.1.4.3):

============  ===========================  ======================================================
vllm-ascend   all_gather Q, model dtype    all_to_all_single(out and lse packed, float32)
rfc           all_gather Q, model dtype    the same; for MLA in value space, W_UV applied before
vllm          all_gather Q, model dtype    all_gather lse float32, reduce_scatter out, model dtype
============  ===========================  ======================================================

Sparse attention (DSA): vllm as above; vllm-ascend all_to_all_single of out in the model's dtype and of lse in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tensor_cast import ops
from tensor_cast.layers.collectives import all_gather, all_to_all, reduce_scatter
from tensor_cast.layers.context import ParallelContext
from tensor_cast.registry import Registry

Exchange = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", ParallelContext], torch.Tensor]

EXCHANGES: Registry[Exchange] = Registry("DCP semantics")
#: The same for sparse attention; the RFC does not cover it.
SPARSE_EXCHANGES: Registry[Exchange] = Registry("DCP semantics of sparse attention")


def gather_query_heads(q: torch.Tensor, ctx: ParallelContext) -> torch.Tensor:
    """Queries [B, Q, hl, D] of the group's ranks side by side: [B, Q, G, D]."""
    return all_gather(q, "dcp", ctx.dcp, dim=2)


@EXCHANGES.register("vllm-ascend", "rfc")
def exchange_packed(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, ctx: ParallelContext
) -> torch.Tensor:
    """One all_to_all of out and lse packed as [G, D + 1, T] in the type of the lse (float32), then a local merge."""
    batch, queries, heads, width = out.shape
    packed = torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1)
    packed = packed.permute(2, 3, 0, 1).reshape(heads, width + 1, batch * queries)
    received = all_to_all(packed, "dcp", ctx.dcp)
    # [dcp, hl, D + 1, B, Q]: slice i is what rank i's part of the context says about this rank's heads.
    parts = received.view(ctx.dcp, heads // ctx.dcp, width + 1, batch, queries).permute(0, 3, 4, 1, 2)
    return ops.merge_attention(parts[..., :width], parts[..., width], sinks, out.dtype, ctx.dcp)


@SPARSE_EXCHANGES.register("vllm-ascend")
def exchange_separate(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, ctx: ParallelContext
) -> torch.Tensor:
    """An all_to_all of out [G, T, D] in its own dtype and one of lse [G, T] in float32, then a local merge."""
    batch, queries, heads, width = out.shape
    hl = heads // ctx.dcp
    outs = all_to_all(out.permute(2, 0, 1, 3).reshape(heads, batch * queries, width), "dcp", ctx.dcp)
    lses = all_to_all(lse.permute(2, 0, 1).reshape(heads, batch * queries), "dcp", ctx.dcp)
    outs = outs.view(ctx.dcp, hl, batch, queries, width).permute(0, 2, 3, 1, 4)
    lses = lses.view(ctx.dcp, hl, batch, queries).permute(0, 2, 3, 1)
    return ops.merge_attention(outs, lses, sinks, out.dtype, ctx.dcp)


@SPARSE_EXCHANGES.register("vllm")
@EXCHANGES.register("vllm")
def exchange_scattered(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, ctx: ParallelContext
) -> torch.Tensor:
    """Gather every rank's lse, rescale the local part by its share, and reduce_scatter over heads."""
    batch, queries, heads, width = out.shape
    hl = heads // ctx.dcp
    lses = all_gather(lse, "dcp", ctx.dcp).view(ctx.dcp, batch, queries, heads)
    total = torch.logsumexp(lses, dim=0)
    scaled = (out * torch.exp(lse - total)[..., None]).to(out.dtype)
    mine = reduce_scatter(scaled.permute(2, 0, 1, 3).reshape(heads, batch * queries, width), "dcp", ctx.dcp)
    mine = mine.view(hl, batch, queries, width).permute(1, 2, 0, 3)
    if sinks is None:
        return mine
    # A sink only enlarges the denominator, so each rank can apply its own heads' sinks after the sum.
    own = total.narrow(2, ctx.dcp_rank * hl, hl)
    return (mine * torch.exp(own - torch.logaddexp(own, sinks.to(own.dtype)))[..., None]).to(out.dtype)
