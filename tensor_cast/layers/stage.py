"""A pipeline stage as a program: the model with only its own layers, fed with what the stage before hands over.

The stage takes and returns a :class:`Boundary`, the tensors that an engine sends from stage to stage. Transformers adds
the residual inside of its layers, so it travels as zeros beside the sum: the same two messages, the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from tensor_cast.errors import UnsupportedModelError
from tensor_cast.layers.collectives import all_gather
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.modules import wrap_forward
from tensor_cast.layers.mtp import final_norm
from tensor_cast.layers.program import Anatomy, RankProgram, SkippedLayer
from tensor_cast.pipeline_partition import check_partition, stage_ranges

__all__ = ["Boundary", "StageLink", "StageProgram"]

#: Argument through which layers of sparse attention hand on what the last indexer chose.
_CHOICE = "prev_topk_indices"


class Boundary(NamedTuple):
    """What one stage hands to the next: [B, Q, H] each, and the top-k indices where sparse attention shares them."""

    hidden_states: torch.Tensor
    residual: torch.Tensor
    choice: torch.Tensor | None = None


class StageProgram(RankProgram):
    """One stage of the model on one rank.

    Args:
        anatomy: of the whole model.
        ctx: the rank within its stage.
        partition: layers of each stage.
        stage: which of them.
        send_choice: the top-k indices of sparse attention travel along with the hidden states.

    Raises:
        LegalityError: the partition does not fit the model.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        ctx: ParallelContext,
        partition: Sequence[int],
        stage: int,
        *,
        send_choice: bool = False,
    ) -> None:
        check_partition(partition, len(anatomy.layers), len(partition))
        own = stage_ranges(partition)[stage]
        self.first, self.last = stage == 0, stage == len(partition) - 1
        self.layers, self._send_choice = own, send_choice
        self._received: Boundary | None = None
        self._left: Any = None
        tuples = [False]
        stand_ins: dict[str, nn.Module] = {
            anatomy.layer_path(i): SkippedLayer(layer, tuples) for i, layer in enumerate(anatomy.layers) if i not in own
        }
        if not self.first:
            stand_ins[anatomy.embedding.path] = _Stream(lambda: self._incoming)
        if not self.last:
            stand_ins[anatomy.head.path] = nn.Identity()
            with suppress(UnsupportedModelError):  # a model without a final norm has nothing to leave out
                stand_ins[final_norm(anatomy)[0]] = nn.Identity()
        super().__init__(anatomy, ctx, stand_ins)
        if not self.first:
            wrap_forward(self.model.get_submodule(anatomy.layer_path(own[0])), self._enter)
        if not self.last:
            wrap_forward(self.model.get_submodule(anatomy.layer_path(own[-1])), self._leave)

    @property
    def _incoming(self) -> torch.Tensor:
        assert self._received is not None
        return self._received.hidden_states + self._received.residual

    def _enter(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The first layer starts from what was received, whatever the model did to it on the way."""
        assert self._received is not None
        if self._received.choice is not None:
            kwargs[_CHOICE] = self._received.choice
        if args:
            return inner(self._incoming, *args[1:], **kwargs)
        return inner(**{**kwargs, "hidden_states": self._incoming})

    def _leave(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._left = inner(*args, **kwargs)
        return self._left

    def run(self, ids: torch.Tensor, step: Step, received: Boundary | None = None) -> Boundary | torch.Tensor:
        """Run one step.

        Args:
            ids: [B, Q] tokens; only the first stage reads them.
            step: positions, tables and the caches of this stage's layers.
            received: from the stage before; None on the first.

        Returns:
            what the next stage needs, or on the last stage the logits [B, Q, V].
        """
        self._received = received
        try:
            _, logits = self(ids, step)
            left, self._left = self._left, None
        finally:
            self._received = None
        if self.last:
            return logits
        hidden = left[0] if isinstance(left, tuple) else left
        choice = left[1] if self._send_choice and isinstance(left, tuple) else None
        return Boundary(hidden, torch.zeros_like(hidden), choice)


class _Stream(nn.Module):
    """Takes the place of the embedding on a later stage."""

    def __init__(self, hidden: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The received hidden states [B, Q, H]."""
        return self._hidden()


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

    def send(self, boundary: Boundary) -> None:
        """To the next stage."""
        for tensor in boundary:
            if tensor is not None:
                piece = self._piece(tensor)
                _group("pp").send([piece.contiguous()], self.stage + 1, 0).wait()

    def receive(self, like: Sequence[torch.Tensor]) -> Boundary:
        """From the stage before; ``like`` gives shapes and dtypes of the whole tensors."""
        whole = []
        for example in like:
            piece = torch.empty_like(self._piece(example).contiguous())
            _group("pp").recv([piece], self.stage - 1, 0).wait()
            whole.append(all_gather(piece, "tp", self.ctx.tp, dim=-1) if piece.shape != example.shape else piece)
        return Boundary(*whole)

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
