"""Attention over a paged KV cache: write, read, attend, merge. Each op has a plain reference and a shape function.

Legend: B requests, Q query tokens each, S' keys read, h query heads, hkv key/value heads, D head size, N_blk blocks.
The reference implementations are for small tensors on a CPU; they define what the ops mean.
"""

from __future__ import annotations

import torch

from tensor_cast.ops.kv_layout import key_index, visible_keys


@torch.library.custom_op("tensor_cast::reshape_and_cache", mutates_args=("kv_cache",))
def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write key and value [B, Q, hkv, D] into kv_cache [2, N_blk, block_size, hkv, D]; slot -1 is skipped."""
    keep = slot_mapping >= 0
    slots = slot_mapping[keep].long()
    for plane, new in zip(kv_cache, (key, value), strict=True):
        plane.flatten(0, 1)[slots] = new.flatten(0, 1)[keep].to(plane.dtype)


@reshape_and_cache.register_fake
def _(key, value, kv_cache, slot_mapping):
    return None


@torch.library.custom_op("tensor_cast::mla_cache_write", mutates_args=("kv_cache",))
def mla_cache_write(
    latent: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, sparse_rank: int = 0
) -> None:
    """Write latent [B, Q, C] into kv_cache [N_blk, block_size, C]; slot -1 is skipped.

    ``sparse_rank`` is R of a cache that sparse attention reads, else 0; the cost function asks, since an 8-bit one has
    a format of its own.
    """
    keep = slot_mapping >= 0
    kv_cache.flatten(0, 1)[slot_mapping[keep].long()] = latent.flatten(0, 1)[keep].to(kv_cache.dtype)


@mla_cache_write.register_fake
def _(latent, kv_cache, slot_mapping, sparse_rank=0):
    return None


@torch.library.custom_op("tensor_cast::gather_kv", mutates_args=())
def gather_kv(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    num_keys: int,
    window: int | None,
) -> list[torch.Tensor]:
    """Read ``num_keys`` tokens of each request: [K, V], each [B, S', hkv, D]; of an MLA cache [latent], [B, S', C].

    A kernel reads the pages where it attends, so this op is free and attention is charged for the bytes.
    block_table is [B, blocks], or [B * Q, blocks] when flattened (its rows then repeat per query token).
    """
    batch = positions.shape[0]
    table = block_table.view(batch, -1, block_table.shape[-1])[:, 0].long()
    block_size = kv_cache.shape[-3] if kv_cache.dim() == 5 else kv_cache.shape[-2]
    index = key_index(positions, num_keys, window).expand(batch, -1)
    # Keys past the end of the table are never visible; clamping keeps their addresses legal.
    block = table.gather(1, (index // block_size).clamp(max=table.shape[1] - 1))
    slots = block * block_size + index % block_size
    planes = kv_cache.unbind(0) if kv_cache.dim() == 5 else (kv_cache,)
    return [plane.flatten(0, 1)[slots] for plane in planes]


@gather_kv.register_fake
def _(kv_cache, block_table, positions, num_keys, window):
    batch = positions.shape[0]
    if kv_cache.dim() == 5:
        shape = (batch, num_keys, *kv_cache.shape[3:])
        return [kv_cache.new_empty(shape), kv_cache.new_empty(shape)]
    return [kv_cache.new_empty((batch, num_keys, kv_cache.shape[2]))]


def wide_dtype(q: torch.Tensor) -> torch.dtype:
    """Type of the softmax and its lse: float32, as kernels have it, unless the model itself is wider (float64)."""
    return torch.promote_types(q.dtype, torch.float32)


def softmax_shares(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """``exp(scores - lse)``, the shares of a sum whose logarithm is ``lse``.

    A rank that owns no visible key has an ``lse`` of -inf and contributes nothing: 0 instead of exp(-inf + inf).
    """
    return torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0))


def _attend(q, k, v, sinks, visible, scale, softcap):
    """Masked softmax: q [B, Q, h, D], k, v [B, S', hkv, ...] -> out [B, Q, h, Dv], lse [B, Q, h] (see wide_dtype)."""
    wide = wide_dtype(q)
    groups = q.shape[2] // k.shape[2]
    k, v = (t.to(wide).repeat_interleave(groups, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bshd->bhqs", q.to(wide), k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide)[None, :, None])
    out = torch.einsum("bhqs,bshd->bqhd", softmax_shares(scores, lse[..., None]), v)
    # Results lie in memory as the shape functions say: whether a later reshape copies depends on it.
    return out.to(q.dtype).contiguous(), lse.transpose(1, 2).contiguous()


@torch.library.custom_op("tensor_cast::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    positions: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    phase: str,
    dcp: int,
    dcp_rank: int,
    interleave: int,
    return_lse: bool,
) -> list[torch.Tensor]:
    """Softmax attention of q [B, Q, h, D] over the local keys: [out [B, Q, h, Dv]] and, if asked, lse [B, Q, h] fp32.

    A query at place p sees keys at places <= p (``causal``) and > p - window. Places are those in the whole sequence:
    under DCP the local keys are a strided sample of it, so lengths alone would not give the mask. ``sinks`` [h] are
    extra logits that take part in the denominator only.
    """
    visible = visible_keys(
        positions, k.shape[1], causal=causal, window=window, dcp=dcp, rank=dcp_rank, interleave=interleave
    )
    out, lse = _attend(q, k, v, sinks, visible, scale, softcap)
    return [out, lse] if return_lse else [out]


@attention.register_fake
def _(q, k, v, sinks, positions, scale, causal, window, softcap, phase, dcp, dcp_rank, interleave, return_lse):
    out = [q.new_empty((*q.shape[:3], v.shape[3]))]
    if return_lse:
        out.append(q.new_empty(q.shape[:3], dtype=wide_dtype(q)))
    return out


@torch.library.custom_op("tensor_cast::mla_attention", mutates_args=())
def mla_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    kv_lora_rank: int,
    causal: bool,
    window: int | None,
    phase: str,
    dcp: int,
    dcp_rank: int,
    interleave: int,
    return_lse: bool,
) -> list[torch.Tensor]:
    """Absorbed MLA: q [B, Q, h, R + rope] over latents kv [B, S', R + rope]: [out [B, Q, h, R]] and, if asked, lse.

    Every head reads the same latent; its first R = ``kv_lora_rank`` numbers are the value.
    """
    visible = visible_keys(
        positions, kv.shape[1], causal=causal, window=window, dcp=dcp, rank=dcp_rank, interleave=interleave
    )
    k = kv.unsqueeze(2)
    out, lse = _attend(q, k, k[..., :kv_lora_rank], None, visible, scale, None)
    return [out, lse] if return_lse else [out]


@mla_attention.register_fake
def _(q, kv, positions, scale, kv_lora_rank, causal, window, phase, dcp, dcp_rank, interleave, return_lse):
    out = [q.new_empty((*q.shape[:3], kv_lora_rank))]
    if return_lse:
        out.append(q.new_empty(q.shape[:3], dtype=wide_dtype(q)))
    return out


@torch.library.custom_op("tensor_cast::merge_attention", mutates_args=())
def merge_attention(
    outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype, dcp: int
) -> torch.Tensor:
    """Online-softmax merge of partial results: outs [dcp, B, Q, h, Dv], lses [dcp, B, Q, h] -> [B, Q, h, Dv].

    ``sinks`` [h] join the denominator here, once, and not in the partial attentions.
    """
    total = torch.logsumexp(lses, dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(total.dtype))
    return (outs * softmax_shares(lses, total)[..., None]).sum(dim=0).to(dtype).contiguous()


@merge_attention.register_fake
def _(outs, lses, sinks, dtype, dcp):
    return outs.new_empty(outs.shape[1:], dtype=dtype)
