"""Top-k indices of sparse attention where the layer that wrote them and the layer that reads them are on two stages.

Layers that choose no tokens reuse the choice of the layer before. Engines hand on hidden states between stages, not
choices; :class:`DsaSplit` says what becomes of layers whose choice was made elsewhere.
Legend: B requests, Q query tokens, S context, K tokens chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from tensor_cast.layers.context import Step
from tensor_cast.model_config import AttentionKind, ModelConfig
from tensor_cast.pipeline_partition import DsaSplit, check_partition, refuse_unsafe, unsafe_by_stage, unsafe_layers

__all__ = ["ChoiceFlow", "self_computing"]


def self_computing(config: ModelConfig, partition: Sequence[int]) -> ModelConfig:
    """The model that a partition runs under ``self-compute``: layers that would lack indices own an indexer.

    Raises:
        LegalityError: the partition does not fit the model.
    """
    check_partition(partition, config.num_hidden_layers, len(partition))
    if config.attention is not AttentionKind.DSA:
        return config
    flipped = unsafe_layers(partition, config.indexer_layers)
    own = tuple(chooses or layer in flipped for layer, chooses in enumerate(config.indexer_layers))
    digest = hashlib.sha256(f"{config.digest} {own}".encode()).hexdigest()
    return replace(config, indexer_layers=own, digest=digest)


class ChoiceFlow:
    """Top-k indices between the stages of sparse attention, seen from one stage.

    Args:
        partition: layers of each stage.
        stage: this one.
        chooses: for each layer, whether it chooses tokens itself; empty without sparse attention.
        topk: K.
        split: what becomes of layers whose indices are written on another stage. ``send-indices``: ``sends`` and
            ``receives`` say where they travel. ``unsafe``: such layers find in the stage's buffer what its last layer
            left there, which is another step's choice, or zeros at first (an engine's buffer is not even cleared).

    Raises:
        LegalityError: there are such layers, and ``split`` is None; or it is ``self-compute`` and the model is not the
            one that :func:`self_computing` makes of it.
    """

    def __init__(
        self, partition: Sequence[int], stage: int, chooses: Sequence[bool], topk: int, split: DsaSplit | None
    ) -> None:
        refuse_unsafe(partition, chooses, None if split is DsaSplit.SELF_COMPUTE else split)
        lacking = [bool(layers) for layers in unsafe_by_stage(partition, chooses)]
        sending = split is DsaSplit.SEND_INDICES
        self.sends = sending and stage + 1 < len(partition) and lacking[stage + 1]
        self.receives = sending and lacking[stage]
        self._reads_buffer = split is DsaSplit.UNSAFE and lacking[stage]
        self.topk = topk
        self._buffer = torch.zeros(0, topk, dtype=torch.int32)

    def incoming(self, received: torch.Tensor | None, step: Step) -> torch.Tensor | None:
        """What the first layer of the stage takes for the choice before it: [B, Q, min(S, K)], or None.

        Args:
            received: [B, Q, K] from the stage before, or None.
            step: gives B, Q and S.
        """
        width = torch.sym_min(step.seq_len, self.topk)
        if received is not None:
            return received[..., :width]
        if not self._reads_buffer:
            return None
        batch, queries = step.positions.shape
        missing = max(0, batch * queries - len(self._buffer))
        rows = pad(self._buffer, (0, 0, 0, missing))[: batch * queries]
        return rows.view(batch, queries, self.topk)[..., :width]

    def outgoing(self, choice: torch.Tensor | None) -> torch.Tensor | None:
        """What goes to the next stage of the choice [B, Q, min(S, K)] that the stage's last layer hands on."""
        if choice is None or not (self.sends or self._reads_buffer):
            return None
        whole = choice.new_full((*choice.shape[:-1], self.topk), -1, dtype=torch.int32)
        whole[..., : choice.shape[-1]] = choice
        if self._reads_buffer:
            rows = whole.flatten(0, 1)
            self._buffer = torch.cat([rows, self._buffer[len(rows) :]])
        return whole if self.sends else None
