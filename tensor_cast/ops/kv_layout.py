"""Where a token lives in the paged KV cache, with and without DCP.

Under DCP a logical block holds ``block_size * dcp`` tokens, dealt to the ranks in runs of ``interleave`` tokens; every
rank uses the same block number for its share, which is one physical block (vllm-ascend's and vLLM's placement).
"""

from __future__ import annotations

import torch


def local_length(seq_len: int, dcp: int, interleave: int = 1) -> int:
    """Tokens of a sequence on the fullest rank, rounded up to whole runs. Works on symbolic sizes."""
    granule = interleave * dcp
    return (seq_len + granule - 1) // granule * interleave if dcp > 1 else seq_len


def blocks_per_request(seq_len: int, block_size: int, dcp: int) -> int:
    """Entries of a block-table row. Works on symbolic sizes."""
    logical = block_size * dcp
    return (seq_len + logical - 1) // logical


def slot_mapping(
    positions: torch.Tensor, block_table: torch.Tensor, *, block_size: int, dcp: int, rank: int, interleave: int
) -> torch.Tensor:
    """Cache slot of each token of ``positions`` [B, Q], flattened to [B * Q] int32; -1 where another rank owns it."""
    logical = block_size * dcp
    offset = positions % logical
    owner = offset // interleave % dcp
    local = offset // (interleave * dcp) * interleave + offset % interleave
    block = block_table.gather(1, (positions // logical).long())
    slots = block * block_size + local
    return torch.where(owner == rank, slots, -1).flatten().to(torch.int32)


def key_index(positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """Which of a request's local tokens attention reads: [B, num_keys], or [1, num_keys] when the same for all.

    With a sliding window that is the ``num_keys`` tokens from the first one any query token of this step can see.
    """
    index = torch.arange(num_keys, device=positions.device)[None]
    if window is None:
        return index
    return index + (positions[:, :1] - window + 1).clamp(min=0)


def key_positions(
    positions: torch.Tensor, num_keys: int, *, window: int | None, dcp: int, rank: int, interleave: int
) -> torch.Tensor:
    """Place in the sequence of each local key, [B or 1, num_keys]."""
    index = key_index(positions, num_keys, window if dcp == 1 else None)
    if dcp == 1:
        return index
    return index // interleave * (interleave * dcp) + rank * interleave + index % interleave


def visible_keys(
    positions: torch.Tensor,
    num_keys: int,
    *,
    causal: bool = True,
    window: int | None = None,
    dcp: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> torch.Tensor:
    """Which of its local keys each query token of ``positions`` [B, Q] sees: [B, Q, num_keys].

    A query at place p sees keys at places <= p (``causal``) and > p - window, places being those in the sequence.
    """
    keys = key_positions(positions, num_keys, window=window, dcp=dcp, rank=rank, interleave=interleave)
    distance = positions[:, :, None] - keys[:, None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance < window)
