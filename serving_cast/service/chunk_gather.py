"""What prefill costs on an instance whose KV cache is split over DCP ranks (aggregated mode with dcp > 1).

A prompt's chunk attends to what the cache already holds of the prompt, and each rank holds 1/dcp of that.

- MLA: each layer all-gathers the latent of the context, ``S_ctx/dcp * (kv_lora + rope)`` elements per rank, and goes on
  as without DCP. The chunk itself needs nothing.
- Sparse attention (DSA): with vllm-ascend as MLA (it gathers the blocks that were chosen, at most the context); with
  vllm its chunks run as decode steps do, and where a layer chooses tokens each rank's candidates are gathered first.
- GQA: as in decode, the chunk's queries are gathered, attend to the local context, and the partial outputs are merged,
  with the collectives of the DCP semantics. Chunks without context skip this.

Source: vLLM and vllm-ascend, prefill paths of their MLA and GQA backends under DCP.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensor_cast.device.profile import DeviceProfile
from tensor_cast.dtypes import bytes_of
from tensor_cast.engine.dcp import get_semantics
from tensor_cast.ir.expr import Num
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig
from tensor_cast.parallel import axis_ranks
from tensor_cast.performance_model.comm_analytic import collective_seconds

__all__ = ["ChunkGather"]

Array = NDArray[np.float64]

_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
}


@dataclass(frozen=True)
class ChunkGather:
    """Seconds of the extra collectives of a step's prefill chunks, over all layers.

    Args:
        stage: layers of one pipeline stage, draft layers among them; None for all.
        own_indexers: layers that choose tokens though in the model they share a choice.
    """

    model: ModelConfig
    device: DeviceProfile
    parallel: ParallelConfig
    dcp_semantics: str
    num_mtp_tokens: int = 0
    stage: range | None = None
    own_indexers: tuple[int, ...] = ()

    @property
    def layers(self) -> range:
        """Layers that attend, of all or of one stage: the model's own and the draft layers, which see prompts too."""
        if self.stage is not None:
            return self.stage
        return range(self.model.num_hidden_layers + min(self.model.num_nextn_predict_layers, self.num_mtp_tokens))

    def buffers(self, tokens: Num, context_tokens: Num) -> list[tuple[str, Num]]:
        """(kind, bytes of the local input buffer) of each collective of one layer.

        Args:
            tokens: query tokens of the chunks.
            context_tokens: cached tokens before the chunks, summed over their prompts.
        """
        m, tp, dcp = self.model, self.parallel.tensor_parallel_size, self.parallel.decode_context_parallel_size
        semantics = get_semantics(self.dcp_semantics)
        sparse = m.attention is AttentionKind.DSA
        if m.attention is AttentionKind.MLA or (sparse and semantics.replicates_indexer):
            width = (m.kv_lora_rank + m.qk_rope_head_dim) * bytes_of(m.dtype)
            return [("all_gather", context_tokens / dcp * width)]
        return [(_KINDS[c.op], tokens * c.nbytes) for c in semantics.collectives(m, tp, dcp)]

    def candidates(self, tokens: Num) -> list[tuple[str, Num]]:
        """As :meth:`buffers`, what a layer of sparse attention that chooses tokens gathers beside that."""
        dcp = self.parallel.decode_context_parallel_size
        found = get_semantics(self.dcp_semantics).indexer_collectives(self.model, dcp)
        return [(_KINDS[c.op], tokens * c.nbytes) for c in found]

    @property
    def choosing_layers(self) -> int:
        """Layers that choose tokens; draft layers all do."""
        own = self.model.indexer_layers
        return sum(layer >= len(own) or own[layer] or layer in self.own_indexers for layer in self.layers)

    def __call__(self, prompts: Array, chunk: Array, context: Array, share: Array) -> Num:
        """Seconds for ``prompts`` chunks of ``chunk`` tokens; a ``share`` of them has ``context`` tokens before it."""
        ranks = axis_ranks(self.parallel, "dcp")
        total: Num = 0.0
        # Mean context over all chunks = share * context of those that have any.
        with_context = np.where(share > 0, context / np.maximum(share, 1e-12), 0.0)
        for kind, nbytes in self.buffers(prompts * chunk, prompts * with_context):
            total = total + len(self.layers) * collective_seconds(self.device, kind, nbytes, ranks)
        for kind, nbytes in self.candidates(prompts * chunk):
            total = total + self.choosing_layers * collective_seconds(self.device, kind, nbytes, ranks)
        return total * share
