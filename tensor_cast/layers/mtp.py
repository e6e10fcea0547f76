"""The draft module of multi-token prediction: DeepSeek-V3's, as its report (section 2.2) and engines have it.

One module predicts the token after next from the last hidden state and the embedding of the next token: both are
normalised, joined and projected back to the hidden size, then one decoder layer like the model's last runs, then a
norm and the shared head. It is executed as the model itself with its parts exchanged, so that embedding, rotary tables
and whatever else stands between are the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensor_cast.errors import UnsupportedModelError
from tensor_cast.layers.modules import clone_tree, wrap_forward

if TYPE_CHECKING:
    from tensor_cast.layers.program import Anatomy


class DraftProjection(nn.Module):
    """What stands before the draft module's decoder layer.

    Args:
        like: a norm of the model; class and epsilon are taken from it.
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


@dataclass
class DraftModules:
    """Weights of a draft module: its projection, its decoder layer and its final norm."""

    projection: DraftProjection
    layer: nn.Module
    norm: nn.Module

    @classmethod
    def like(cls, anatomy: Anatomy, dtype: torch.dtype) -> DraftModules:
        """Modules of the right shape. The layer shares the weights of the one it is like until it is given its own."""
        _, norm = final_norm(anatomy)
        hidden = anatomy.model.config.hidden_size
        layer = anatomy.layers[anatomy.draft_source]
        return cls(DraftProjection(norm, hidden, dtype), layer, new_norm(norm, hidden, dtype))

    def named(self, anatomy: Anatomy) -> DraftModules:
        """Copies that know their names: those of a layer after the last, as in DeepSeek's checkpoints."""
        path = anatomy.layer_path(len(anatomy.layers))
        layer = clone_tree(self.layer, path)
        for module in layer.get_submodule(anatomy.regions[anatomy.draft_source].attention).modules():
            if "layer_idx" in module.__dict__:
                module.layer_idx = len(anatomy.layers)
        return DraftModules(clone_tree(self.projection, path), layer, clone_tree(self.norm, f"{path}.shared_head.norm"))


def new_norm(like: nn.Module, hidden_size: int, dtype: torch.dtype) -> nn.Module:
    """A norm of the same class and epsilon as ``like``, with weights of its own."""
    epsilon = next((getattr(like, name) for name in ("variance_epsilon", "eps") if hasattr(like, name)), 1e-6)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return type(like)(hidden_size, eps=epsilon)
    finally:
        torch.set_default_dtype(before)


def final_norm(anatomy: Anatomy) -> tuple[str, nn.Module]:
    """Path and module of the norm after the last layer. Raises :class:`UnsupportedModelError` if there is none."""
    parent = anatomy.layers_path.rpartition(".")[0]
    children = anatomy.model.get_submodule(parent).named_children()
    norms = [(f"{parent}.{name}", child) for name, child in children if "norm" in type(child).__name__.lower()]
    if not norms:
        raise UnsupportedModelError(f"{type(anatomy.model).__name__} has no final norm to build a draft module from.")
    return norms[-1]


def feed_hidden(embedding: nn.Module, projection: nn.Module, hidden: Callable[[], torch.Tensor]) -> None:
    """Make an embedding hand on the projection of its vectors and of the last hidden states."""

    def forward(inner: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        return projection(inner(*args, **kwargs), hidden())

    embedding.add_module("draft_projection", projection)
    wrap_forward(embedding, forward)
