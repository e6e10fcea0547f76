"""Sparse attention with an indexer (DSA): a cache of small keys, scores over the whole context, top-k, sparse reads.

Legend: B requests, Q query tokens, S' local keys, n index heads, d their width, K' chosen tokens, h query heads.
Under DCP keys may be a strided sample of the sequence; ids of chosen tokens always count in the whole sequence.
"""

from __future__ import annotations

import torch

from tensor_cast.ops.attention import softmax_shares, wide_dtype
from tensor_cast.ops.kv_layout import key_positions, slot_mapping, visible_keys


@torch.library.custom_op("tensor_cast::indexer_cache_write", mutates_args=("kv_cache",))
def indexer_cache_write(
    key: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor | None,
    positions: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    """Write index keys [B, Q, d] into kv_cache [N_blk, block_size, d].

    Either ``slots`` [B * Q] says where (-1 is skipped), or, for a cache that every DCP rank keeps whole in blocks of
    all their tokens, places follow from ``positions`` [B, Q] and ``block_table``.
    """
    if slots is None:
        assert positions is not None
        assert block_table is not None
        table = block_table.view(positions.shape[0], -1, block_table.shape[-1])[:, 0]
        slots = slot_mapping(positions, table, block_size=kv_cache.shape[1], dcp=1, rank=0, interleave=1)
    keep = slots >= 0
    kv_cache.flatten(0, 1)[slots[keep].long()] = key.flatten(0, 1)[keep].to(kv_cache.dtype)


@indexer_cache_write.register_fake
def _(key, kv_cache, slots, positions, block_table):
    return None


@torch.library.custom_op("tensor_cast::indexer_scores", mutates_args=())
def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    phase: str,
    dcp: int,
    dcp_rank: int,
    interleave: int,
) -> torch.Tensor:
    """Index scores [B, Q, S'] in float32 (:func:`wide_dtype`); -inf where the query does not see the key.

    ``sum_n weights_n * relu(scale * q_n . k)`` for q [B, Q, n, d], weights [B, Q, n] and keys [B, S', d], in float32
    and in the order in which Transformers computes it. Engines run it in fp8 with keys shared by the Q queries.
    """
    wide = wide_dtype(q)
    scores = torch.matmul(q.to(wide), keys.transpose(-1, -2).to(wide).unsqueeze(1)) * scale
    scores = torch.matmul(weights.to(wide).unsqueeze(-2), torch.relu(scores)).squeeze(-2)
    visible = visible_keys(positions, keys.shape[1], dcp=dcp, rank=dcp_rank, interleave=interleave)
    return scores.masked_fill(~visible, float("-inf"))


@indexer_scores.register_fake
def _(q, weights, keys, positions, scale, phase, dcp, dcp_rank, interleave):
    return q.new_empty((*q.shape[:2], keys.shape[1]), dtype=wide_dtype(q))


@torch.library.custom_op("tensor_cast::indexer_topk", mutates_args=())
def indexer_topk(scores: torch.Tensor, num_keys: int, phase: str) -> torch.Tensor:
    """The ``num_keys`` best of scores [B, Q, S]: their places [B, Q, num_keys] in int32."""
    return scores.topk(num_keys, dim=-1).indices.to(torch.int32)


@indexer_topk.register_fake
def _(scores, num_keys, phase):
    return scores.new_empty((*scores.shape[:2], num_keys), dtype=torch.int32)


@torch.library.custom_op("tensor_cast::indexer_candidates", mutates_args=())
def indexer_candidates(
    scores: torch.Tensor, positions: torch.Tensor, num_keys: int, dcp: int, dcp_rank: int, interleave: int
) -> torch.Tensor:
    """The best of the local context's scores [B, Q, S']: [B, Q, num_keys, 2], (score, place in the sequence).

    float32 holds every place below 2**24 exactly.
    """
    best = scores.topk(num_keys, dim=-1)
    places = key_positions(positions, scores.shape[-1], window=None, dcp=dcp, rank=dcp_rank, interleave=interleave)
    ids = places[:, None, :].expand(scores.shape).gather(-1, best.indices)
    return torch.stack([best.values, ids.to(scores.dtype)], dim=-1)


@indexer_candidates.register_fake
def _(scores, positions, num_keys, dcp, dcp_rank, interleave):
    return scores.new_empty((*scores.shape[:2], num_keys, 2))


@torch.library.custom_op("tensor_cast::indexer_merge", mutates_args=())
def indexer_merge(candidates: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The best of all ranks' candidates [dcp, B, Q, n, 2]: places [B, Q, num_keys] in int32."""
    together = candidates.permute(1, 2, 0, 3, 4).flatten(2, 3)
    chosen = together[..., 0].topk(num_keys, dim=-1).indices
    return together[..., 1].gather(-1, chosen).to(torch.int32)


@indexer_merge.register_fake
def _(candidates, num_keys):
    return candidates.new_empty((*candidates.shape[1:3], num_keys), dtype=torch.int32)


@torch.library.custom_op("tensor_cast::sparse_mla_attention", mutates_args=())
def sparse_mla_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    kv_lora_rank: int,
    topk: int,
    phase: str,
    dcp: int,
    dcp_rank: int,
    interleave: int,
    return_lse: bool,
) -> list[torch.Tensor]:
    """Absorbed MLA over chosen tokens: q [B, Q, h, C], kv [B, S', C], indices [B, Q, K'] -> [out [B, Q, h, R]] (, lse).

    ``indices`` are places in the sequence; those that lie on another rank or that a query does not see are left out.
    A query never reads more than ``topk`` rows.
    """
    batch, queries, _, width = q.shape
    wide = wide_dtype(q)
    ids = indices.long()
    mine = ids // interleave % dcp == dcp_rank
    visible = mine & (ids >= 0) & (ids <= positions[..., None])
    local = (ids // (interleave * dcp) * interleave + ids % interleave).clamp(0, kv.shape[1] - 1)
    rows = kv.gather(1, local.view(batch, -1, 1).expand(-1, -1, width)).view(batch, queries, -1, width).to(wide)
    scores = torch.einsum("bqhc,bqkc->bqhk", q.to(wide), rows) * scale
    scores = scores.masked_fill(~visible[:, :, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("bqhk,bqkc->bqhc", softmax_shares(scores, lse[..., None]), rows[..., :kv_lora_rank])
    # Results lie in memory as the shape function says.
    out, lse = out.to(q.dtype).contiguous(), lse.contiguous()
    return [out, lse] if return_lse else [out]


@sparse_mla_attention.register_fake
def _(q, kv, indices, positions, scale, kv_lora_rank, topk, phase, dcp, dcp_rank, interleave, return_lse):
    out = [q.new_empty((*q.shape[:3], kv_lora_rank))]
    if return_lse:
        out.append(q.new_empty(q.shape[:3], dtype=wide_dtype(q)))
    return out
