"""A pipeline stage as a program: the model with only its own layers, fed with what the stage before hands over.

The stage takes and returns a :class:`Boundary`, the tensors that an engine sends from stage to stage. Transformers adds
the residual inside of its layers, so it travels as zeros beside the sum: the same two messages, the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tensor_cast.errors import UnsupportedModelError
from tensor_cast.layers.boundary import Boundary
from tensor_cast.layers.choice_flow import ChoiceFlow
from tensor_cast.layers.context import ParallelContext, Step, running
from tensor_cast.layers.modules import wrap_forward
from tensor_cast.layers.mtp import final_norm
from tensor_cast.layers.program import SHARED_CHOICE, Anatomy, RankProgram, SkippedLayer
from tensor_cast.pipeline_partition import DsaSplit, check_partition, stage_ranges

__all__ = ["StageProgram"]


class StageProgram(RankProgram):
    """One stage of the model on one rank.

    Args:
        anatomy: of the whole model.
        ctx: the rank within its stage.
        partition: layers of each stage.
        stage: which of them.
        dsa_split: what becomes of layers that reuse top-k indices of another stage, see :class:`ChoiceFlow`.

    Raises:
        LegalityError: the partition does not fit the model, or leaves layers without indices and ``dsa_split`` does
            not say how to go on.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        ctx: ParallelContext,
        partition: Sequence[int],
        stage: int,
        *,
        dsa_split: DsaSplit | None = None,
    ) -> None:
        check_partition(partition, len(anatomy.layers), len(partition))
        own = stage_ranges(partition)[stage]
        self.first, self.last = stage == 0, stage == len(partition) - 1
        self.layers = own
        config = anatomy.model.config
        self.choice_flow = ChoiceFlow(partition, stage, anatomy.chooses, getattr(config, "index_topk", 0), dsa_split)
        self._hidden_size = config.hidden_size
        self._incoming: torch.Tensor | None = None
        self._choice: torch.Tensor | None = None
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
        wrap_forward(self.model.get_submodule(anatomy.layer_path(own[-1])), self._leave)

    def _enter(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The first layer starts from what was received, whatever the model did to it on the way."""
        if self._choice is not None:
            kwargs[SHARED_CHOICE] = self._choice
        if args:
            return inner(self._incoming, *args[1:], **kwargs)
        return inner(**{**kwargs, "hidden_states": self._incoming})

    def _leave(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._left = inner(*args, **kwargs)
        return self._left

    def boundary(self, batch: int, queries: int, dtype: torch.dtype) -> Boundary:
        """Empty tensors of the shapes that this stage receives for ``batch`` requests of ``queries`` tokens."""
        hidden = torch.empty(batch, queries, self._hidden_size, dtype=dtype)
        choice = (
            torch.empty(batch, queries, self.choice_flow.topk, dtype=torch.int32) if self.choice_flow.receives else None
        )
        return Boundary(hidden, hidden, choice)

    def run(
        self, ids: torch.Tensor, step: Step, received: Boundary | None = None, *, last_only: bool = False
    ) -> Boundary | torch.Tensor:
        """Run one step.

        Args:
            ids: [B, Q] tokens; only the first stage reads them.
            step: positions, tables and the caches of this stage's layers.
            received: from the stage before; None on the first.
            last_only: compute logits of the last token of each request only.

        Returns:
            what the next stage needs, or on the last stage the logits [B, Q or 1, V].
        """
        if received is not None:
            self._incoming = received.hidden_states + received.residual
            self._choice = self.choice_flow.incoming(received.choice, step)
        try:
            if self.last:
                _, logits = self(ids, step, last_only=last_only)
            else:
                with running(step):
                    self._logits(ids, step, last_only)
            left = self._left
        finally:
            self._incoming = self._choice = self._left = None
        hidden, *others = left if isinstance(left, tuple) else (left,)
        choice = self.choice_flow.outgoing(others[0] if others else None)
        return logits if self.last else Boundary(hidden, torch.zeros_like(hidden), choice)


class _Stream(nn.Module):
    """Takes the place of the embedding on a later stage."""

    def __init__(self, hidden: Callable[[], torch.Tensor | None]) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, ids: torch.Tensor) -> torch.Tensor | None:
        """The received hidden states [B, Q, H]."""
        return self._hidden()
