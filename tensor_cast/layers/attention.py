"""Attention on a paged KV cache, reached through Transformers' attention interface.

The model's own code projects, normalises and rotates; :func:`attention_forward` takes over where it would attend.
Legend: B requests, Q query tokens, S tokens of context, h query heads and hkv KV heads of this rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensor_cast import ops
from tensor_cast.errors import UnsupportedModelError
from tensor_cast.ir.record import Phase, Scope
from tensor_cast.layers.context import ParallelContext, Step, current_step, enter_scope
from tensor_cast.layers.dcp import EXCHANGES, gather_query_heads
from tensor_cast.layers.mla import LatentCore, absorbed_attention
from tensor_cast.ops.kv_layout import local_length

#: Name under which the function is registered with Transformers.
IMPLEMENTATION = "tensor_cast"
#: Tensors among an attention function's arguments that change nothing: places, which the running step knows.
_HARMLESS = frozenset({"position_ids", "cache_position", "indices"})


@dataclass(frozen=True)
class HeadsCore:
    """One attention module with separate key and value heads, on one rank.

    Args:
        ctx: the rank.
        layer_idx: which KV cache is its own.
        kv_heads: KV heads held here.
        head_dim: width of a key and of a value.
    """

    ctx: ParallelContext
    layer_idx: int
    kv_heads: int
    head_dim: int

    @property
    def cache_key(self) -> int:
        """Key of its cache."""
        return self.layer_idx

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the paged cache: keys and values, blocks, tokens per block, heads, width."""
        return (2, num_blocks, block_size, self.kv_heads, self.head_dim)


def key_count(step: Step, window: int | None, ctx: ParallelContext) -> int:
    """Keys that attention reads per request: the local context, or with a sliding window what any query can see."""
    if window is not None and ctx.dcp == 1:
        return torch.sym_min(step.seq_len, window + step.positions.shape[1] - 1)
    return local_length(step.seq_len, ctx.dcp if step.phase is Phase.DECODE else 1, ctx.interleave)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for Transformers' interface.

    Args:
        module: the attention module; its ``attention_core`` says what it is.
        query: [B, h, Q, D].
        key: [B, hkv, Q, D] of this step's tokens; of an MLA module see :mod:`tensor_cast.layers.mla`.
        value: [B, hkv, Q, D], likewise.
        attention_mask: ignored, the mask follows from the positions of the running step.
        scaling: factor on the scores; D ** -0.5 when absent.
        sliding_window: tokens a query sees, itself included; None for all.
        softcap: cap of the scores through tanh.
        s_aux: [h] extra logits in the softmax denominator.
        kwargs: what else an architecture passes. ``indices`` [B, Q, K'] are the tokens that sparse attention reads.

    Returns:
        ([B, Q, h, Dv], None).

    Raises:
        UnsupportedModelError: an argument that would change the result is not known here.
    """
    _refuse_unknown(module, kwargs)
    core = module.__dict__["attention_core"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    enter_scope(Scope.SEQUENCE)
    if isinstance(core, LatentCore):
        out = _latent(core, module, query, key, value, scale, sliding_window, kwargs.get("indices"))
    else:
        out = _heads(core, query, key, value, scale, sliding_window, softcap, s_aux)
    # The model flattens the heads next; where that needs a copy, the copy belongs to attention.
    out = out.contiguous()
    enter_scope(Scope.TOKEN)
    return out, None


def _refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """A tensor nobody asked for (a bias on the scores, a selection of keys) must not be left out in silence."""
    unknown = sorted(k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and k not in _HARMLESS)
    if kwargs.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends with {', '.join(unknown)}, which is not known here; known are scaling, "
            "sliding_window, softcap, s_aux and the indices of sparse attention."
        )


def _heads(core, query, key, value, scale, window, softcap, sinks):
    step, ctx = current_step(), core.ctx
    kv_cache = step.kv_caches[core.layer_idx]
    ops.reshape_and_cache(key.transpose(1, 2), value.transpose(1, 2), kv_cache, step.slot_mapping)
    q = query.transpose(1, 2)
    split = ctx.dcp > 1 and step.phase is Phase.DECODE
    if split:
        q = gather_query_heads(q, ctx)
    keys, values = ops.gather_kv(
        kv_cache, step.block_table, step.positions, key_count(step, window, ctx), None if split else window
    )
    return _attend(core, step, q, keys, values, scale, window, softcap, sinks)


def _attend(core, step, q, keys, values, scale, window, softcap, sinks):
    """Attention over given keys, joined over the DCP ranks: q [B, Q, h, D] -> [B, Q, h, Dv] of this rank's heads."""
    ctx = core.ctx
    split = ctx.dcp > 1 and step.phase is Phase.DECODE
    results = ops.attention(
        q,
        keys,
        values,
        None if split else sinks,
        step.positions,
        scale,
        True,
        window,
        softcap,
        str(step.phase),
        ctx.dcp if split else 1,
        ctx.dcp_rank if split else 0,
        ctx.interleave,
        split,
    )
    if not split:
        return results[0]
    return EXCHANGES.get(ctx.dcp_semantics)(*results, sinks, ctx)


def _latent(core, module, query, key, value, scale, window, indices):
    step = current_step()
    if not core.expands(step.phase):
        return absorbed_attention(core, module, query, key, scale, window, indices)
    return _attend(
        core, step, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale, window, None, None
    )
