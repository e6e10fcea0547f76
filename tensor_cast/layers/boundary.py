"""What crosses from one pipeline stage to the next, and how it gets there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tensor_cast.layers.collectives import all_gather
from tensor_cast.layers.context import ParallelContext

__all__ = ["Boundary", "StageLink"]


class Boundary(NamedTuple):
    """What one stage hands to the next: [B, Q, H] each, and [B, Q, K] int32 where top-k indices are sent along.

    Rows of indices are always K wide, as engines' buffers are; -1 stands where a context has fewer tokens.
    """

    hidden_states: torch.Tensor
    residual: torch.Tensor
    choice: torch.Tensor | None = None


class StageLink:
    """Moves tensors between the stages of a rank's pipeline, over process groups called ``pp`` and ``tp``.

    Each TP rank sends 1/tp of a tensor and the receiving stage gathers it, as engines do; a tensor that tp does not
    divide goes whole.

    Args:
        ctx: the rank within its stage.
        stage: its stage.
        stages: how many there are.
    """

    def __init__(self, ctx: ParallelContext, stage: int, stages: int) -> None:
        self.ctx, self.stage, self.stages = ctx, stage, stages

    def send(self, boundary: Boundary) -> int:
        """To the next stage; returns the bytes that this rank sent."""
        sent = 0
        for tensor in boundary:
            if tensor is not None:
                piece = self._piece(tensor).contiguous()
                _group("pp").send([piece], self.stage + 1, 0).wait()
                sent += piece.nbytes
        return sent

    def receive(self, like: Boundary) -> Boundary:
        """From the stage before; ``like`` gives shapes and dtypes of the whole tensors."""
        return Boundary(*(None if example is None else self._receive(example) for example in like))

    def _receive(self, example: torch.Tensor) -> torch.Tensor:
        piece = torch.empty_like(self._piece(example).contiguous())
        _group("pp").recv([piece], self.stage - 1, 0).wait()
        return all_gather(piece, "tp", self.ctx.tp, dim=-1) if piece.shape != example.shape else piece

    def broadcast(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last stage's sampled tokens, on every stage."""
        tokens = tokens.contiguous()
        _group("pp").broadcast(tokens, self.stages - 1).wait()
        return tokens

    def _piece(self, tensor: torch.Tensor) -> torch.Tensor:
        width = tensor.shape[-1]
        if self.ctx.tp == 1 or width % self.ctx.tp:
            return tensor
        return tensor.narrow(-1, self.ctx.tp_rank * (width // self.ctx.tp), width // self.ctx.tp)


def _group(axis: str) -> Any:
    return torch._C._distributed_c10d._resolve_process_group(axis)
