"""Fake inputs of a step, and a recorder that knows them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tensor_cast.ir.record import Kind, Phase
from tensor_cast.layers.context import ParallelContext, Step
from tensor_cast.layers.modules import path_of
from tensor_cast.layers.program import cores
from tensor_cast.ops.kv_layout import blocks_per_request
from tensor_cast.tracer.recorder import Recorder, storage_key
from tensor_cast.tracer.sizes import SizeSpace


class FakeInputs:
    """Makes what a step needs, in the sizes of ``space``; call it under the space's mode.

    Args:
        space: fake-tensor mode and sizes.
        dtype: of activations and KV caches.
        hidden_size: H.
    """

    def __init__(self, space: SizeSpace, dtype: torch.dtype, hidden_size: int) -> None:
        self.space = space
        self.dtype = dtype
        self._hidden_size = hidden_size

    def ids(self) -> torch.Tensor:
        """Token ids [B, Q]."""
        return torch.empty(self.space.sizes.B, self.space.sizes.Q, dtype=torch.int64)

    def hidden(self, queries: Any = None) -> torch.Tensor:
        """Hidden states [B, Q, H], or with another number of tokens per request."""
        size = self.space.sizes
        return torch.empty(size.B, size.Q if queries is None else queries, self._hidden_size, dtype=self.dtype)

    def choice(self, topk: int) -> torch.Tensor:
        """Tokens [B, Q, min(S, K)] that an earlier pass of sparse attention chose."""
        size = self.space.sizes
        return torch.empty(size.B, size.Q, torch.sym_min(size.S, topk), dtype=torch.int32)

    def step(self, phase: Phase, block_size: int, ctx: ParallelContext, root: nn.Module) -> Step:
        """A step for the attention modules under ``root``, with KV caches just large enough for its requests.

        Under DCP a verification step of several tokens per request needs a block-table row for each of them.
        """
        size = self.space.sizes
        rows = size.B * size.Q if ctx.dcp > 1 and phase is Phase.DECODE else size.B
        blocks = blocks_per_request(size.S, block_size, ctx.dcp)
        shapes = {core.cache_key: core.cache_shape(size.B * blocks, block_size) for core in cores(root)}
        return Step(
            phase=phase,
            positions=torch.empty(size.B, size.Q, dtype=torch.int64),
            seq_len=size.S,
            block_table=torch.empty(rows, blocks, dtype=torch.int32),
            slot_mapping=torch.empty(size.B * size.Q, dtype=torch.int32),
            kv_caches={key: torch.empty(shape, dtype=self.dtype) for key, shape in shapes.items()},
        )

    def recorder(self, root: nn.Module, step: Step, ctx: ParallelContext) -> Recorder:
        """A recorder that knows the weights under ``root`` and the caches of ``step``."""
        sizes = {"tp": ctx.tp, "dcp": ctx.dcp, "dp": ctx.moe_dispatch, "ep": ctx.ep}
        caches = {
            storage_key(cache): Kind.KV if isinstance(key, int) else Kind.INDEXER
            for key, cache in step.kv_caches.items()
        }
        return Recorder(self.space.dim, sizes, _weights(root), caches, self.space.check)


def stored(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers that a module holds itself."""
    buffers = ((n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set)
    return [(name, t) for name, t in (*module._parameters.items(), *buffers) if t is not None]


def _weights(root: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for module in root.modules():
        path = path_of(module)
        if path is None:
            continue
        for name, tensor in stored(module):
            names.setdefault(storage_key(tensor), f"{path}.{name}" if path else name)
    return names
