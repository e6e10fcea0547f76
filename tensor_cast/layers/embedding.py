"""Vocabulary-parallel embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tensor_cast.layers.collectives import all_reduce
from tensor_cast.layers.modules import wrap_forward


def make_vocab_parallel(embedding: nn.Embedding, rank: int) -> None:
    """Make an embedding that holds this rank's rows look up its own tokens and sum over tp.

    The module's own forward runs inside, so whatever it does to the vectors (Gemma scales them) stays.
    """
    rows = embedding.weight.shape[0]
    first = rank * rows
    embedding.padding_idx = None  # concerns gradients only, and may lie outside of this shard

    def forward(inner: Callable[..., torch.Tensor], ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        local = ids - first
        elsewhere = torch.logical_or(local < 0, local >= rows)
        vectors = inner(local.masked_fill(elsewhere, 0), *args, **kwargs)
        return all_reduce(vectors.masked_fill(elsewhere[..., None], 0), "tp")

    wrap_forward(embedding, forward)
