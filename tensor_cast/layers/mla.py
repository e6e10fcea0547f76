"""Multi-head latent attention: the cache holds one latent per token, decode attends in latent space.

Transformers' MLA modules hand their cache the compressed latents and expand them afterwards (``expand_kv``). Both are
places to step in: :class:`LatentCache` is the paged cache, and in decode the expansion is left out, because
:func:`absorbed_attention` moves W_UK to the query and W_UV behind the attention. Sparse attention reads other tokens
for each query, so it attends in latent space in prefill too, as engines' kernels do (FlashMLA-sparse, SFA); that vLLM
runs short prompts, which the choice does not thin out, through dense kernels is not modelled.
Legend: B requests, Q query tokens, T = B * Q, S context, h heads of this rank, R = kv_lora_rank, C = R + rope width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensor_cast import ops
from tensor_cast.engine.dcp import get_semantics
from tensor_cast.ir.record import Phase, Scope
from tensor_cast.layers.context import ParallelContext, current_step, enter_scope
from tensor_cast.layers.dcp import EXCHANGES, SPARSE_EXCHANGES, gather_query_heads
from tensor_cast.layers.modules import wrap_forward
from tensor_cast.ops.kv_layout import local_length


@dataclass(frozen=True)
class LatentCore:
    """One MLA module on one rank: widths of the latent, the rotary key, a head's key part and value.

    ``topk`` is the number of tokens that sparse attention reads; 0 for all of them.
    """

    ctx: ParallelContext
    layer_idx: int
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    topk: int = 0

    @property
    def cache_key(self) -> int:
        """Key of its cache."""
        return self.layer_idx

    def expands(self, phase: Phase) -> bool:
        """Whether latents are expanded to keys and values: in prefill, unless attention is sparse."""
        return phase is Phase.PREFILL and not self.topk

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the paged cache: blocks, tokens per block, latent and rotary key."""
        return (num_blocks, block_size, self.kv_lora_rank + self.rope_dim)


class LatentCache:
    """Transformers' cache as one MLA module sees it: takes this step's latents, returns the whole context."""

    def __init__(self, core: LatentCore) -> None:
        self._core = core

    def update(
        self, latent: torch.Tensor, k_rot: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take latent [B, 1, Q, R] and rotated key [B, 1, Q, rope]; return both over the local context.

        For attention in latent space the first of the pair is the whole row [B, 1, S', C].
        """
        enter_scope(Scope.SEQUENCE)
        core, step = self._core, current_step()
        kv_cache = step.kv_caches[core.layer_idx]
        row = torch.cat([latent, k_rot], dim=-1).squeeze(1)
        ops.mla_cache_write(row, kv_cache, step.slot_mapping, core.kv_lora_rank if core.topk else 0)
        decode = step.phase is Phase.DECODE
        count = local_length(step.seq_len, core.ctx.dcp if decode else 1, core.ctx.interleave)
        (rows,) = ops.gather_kv(kv_cache, step.block_table, step.positions, count, None)
        rows = rows.unsqueeze(1)
        latents, rotated = rows[..., : core.kv_lora_rank], rows[..., core.kv_lora_rank :]
        return (latents, rotated) if core.expands(step.phase) else (rows, rotated)


class _NoMask:
    """Stands for an attention mask where one must be sliced but none is read."""

    def __getitem__(self, _: Any) -> _NoMask:
        return self


NO_MASK = _NoMask()


def install(module: nn.Module, core: LatentCore) -> None:
    """Give an MLA module the paged cache, and leave its latents unexpanded where it attends in latent space."""
    module.__dict__["attention_core"] = core
    cache_argument = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"

    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The indexer looks at the mask, which here follows from positions.
        mask = {"attention_mask": NO_MASK} if core.topk else {}
        return inner(*args, **{**kwargs, cache_argument: LatentCache(core), **mask})

    expand = module.expand_kv

    def expand_kv(latents: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return expand(latents, k_rot) if core.expands(current_step().phase) else (latents, k_rot)

    module.__dict__["expand_kv"] = expand_kv
    wrap_forward(module, forward)


def absorbed_attention(
    core: LatentCore,
    module: nn.Module,
    query: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    window: int | None,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in latent space.

    Args:
        core: widths and rank.
        module: holds kv_b_proj, whose weight [heads * (nope + v), R] is W_UK over W_UV, head by head.
        query: [B, h, Q, nope + rope].
        rows: [B, 1, S', C] latents of the local context.
        scale: factor on the scores.
        window: sliding window, or None.
        indices: [B, Q, K'] places of the tokens that sparse attention reads.

    Returns:
        [B, Q, h, v].
    """
    step, ctx = current_step(), core.ctx
    batch, heads, queries, _ = query.shape
    tokens = batch * queries
    weight = module.kv_b_proj.weight.view(-1, core.nope_dim + core.v_dim, core.kv_lora_rank)
    # Under the rfc semantics kv_b holds the heads of the whole DCP group; this rank's keys are a slice of them.
    first = ctx.dcp_rank * heads if weight.shape[0] > heads else 0
    w_uk = weight[first : first + heads, : core.nope_dim]
    w_uv = weight[:, core.nope_dim :].transpose(1, 2)

    nope, rope = query.split([core.nope_dim, core.rope_dim], dim=-1)
    in_latent = torch.bmm(nope.transpose(0, 1).reshape(heads, tokens, core.nope_dim), w_uk)
    in_latent = in_latent.view(heads, batch, queries, core.kv_lora_rank).permute(1, 2, 0, 3)
    q = torch.cat([in_latent, rope.transpose(1, 2)], dim=-1)
    split = ctx.dcp > 1 and step.phase is Phase.DECODE
    if split:
        q = gather_query_heads(q, ctx)
    place = (str(step.phase), ctx.dcp if split else 1, ctx.dcp_rank if split else 0, ctx.interleave, split)
    rows, positions, rank = rows.squeeze(1), step.positions, core.kv_lora_rank
    if core.topk:
        assert indices is not None
        results = ops.sparse_mla_attention(q, rows, indices, positions, scale, rank, core.topk, *place)
    else:
        results = ops.mla_attention(q, rows, positions, scale, rank, True, window, *place)
    if not split:
        return _to_values(results[0], w_uv)
    exchange = (SPARSE_EXCHANGES if core.topk else EXCHANGES).get(ctx.dcp_semantics)
    if not get_semantics(ctx.dcp_semantics).merges_latent:
        return exchange(_to_values(results[0], w_uv), results[1], None, ctx)
    return _to_values(exchange(*results, None, ctx), w_uv)


def _to_values(out: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Out of latent space: out [B, Q, h, R], w_uv [h, R, v] -> [B, Q, h, v]."""
    batch, queries, heads, rank = out.shape
    flat = out.permute(2, 0, 1, 3).reshape(heads, batch * queries, rank)
    return torch.bmm(flat, w_uv).view(heads, batch, queries, -1).permute(1, 2, 0, 3)
