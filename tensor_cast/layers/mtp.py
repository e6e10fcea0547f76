"""The draft module of multi-token prediction: DeepSeek-V3's, as its report (section 2.2) and engines have it.

One module predicts the token after next from the last hidden state and the embedding of the next token: both are
normalised, joined and projected back to the hidden size, then one decoder layer like the model's last runs, then a
norm and the shared head.
"""

from __future__ import annotations

import torch
from torch import nn


class DraftProjection(nn.Module):
    """What stands before the draft module's decoder layer.

    Args:
        like: a norm of the model; class and settings are taken from it.
        hidden_size: H.
        dtype: of the weights.
    """

    def __init__(self, like: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.enorm = new_norm(like, hidden_size, dtype)
        self.hnorm = new_norm(like, hidden_size, dtype)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False, dtype=dtype)

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings of the next tokens and last hidden states, both [B, Q, H] -> [B, Q, H]."""
        return self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))


def new_norm(like: nn.Module, hidden_size: int, dtype: torch.dtype) -> nn.Module:
    """A norm of the same class and epsilon as ``like``, with weights of its own."""
    epsilon = next((getattr(like, name) for name in ("variance_epsilon", "eps") if hasattr(like, name)), 1e-6)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return type(like)(hidden_size, eps=epsilon)
    finally:
        torch.set_default_dtype(before)
