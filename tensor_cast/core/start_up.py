"""Memory of one rank at start-up, for any stage of a layout: the one sum that planning and searching share.

An engine loads its weights, runs one step of as many tokens as it may schedule, and gives what is then left of its
share of the device to the KV cache. Source: vLLM 0.30 ``v1/worker/gpu_worker.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from tensor_cast.core.stage_memory import ModelWeights, StageActivations, model_weights
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.dtypes import bits_of
from tensor_cast.engine.kv_formats import KVFormat
from tensor_cast.engine.profile import EngineProfile
from tensor_cast.engine.rope import rope_cache_bytes
from tensor_cast.engine.vision import vision_bytes
from tensor_cast.engine.workspaces import Workspaces, requested_bytes, sampler_bytes, workspaces
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Phase, Trace
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.performance_model.estimate import as_run, prepare
from tensor_cast.pipeline_partition import max_concurrent_batches
from tensor_cast.quant import QuantConfig
from tensor_cast.units import GIB, ceil_div

__all__ = ["RankMemory", "StartUp", "profile_layout", "talking_ranks"]


@dataclass(frozen=True)
class StartUp:
    """What an engine is started with, as far as the memory of its ranks depends on it.

    Args:
        quant: schemes of the weights.
        form: format of the KV cache.
        block_size: tokens of a KV block.
        max_model_len: tokens of the longest request.
        max_num_seqs, max_batched_tokens: requests and tokens of a step at most.
        utilization: share of the usable memory that the engine takes.
        num_mtp_tokens: draft tokens of a decode step.
    """

    model: ModelConfig
    device: DeviceProfile
    engine: EngineProfile
    quant: QuantConfig
    form: KVFormat
    dcp_semantics: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    utilization: float
    num_mtp_tokens: int = 0

    @property
    def budget(self) -> int:
        """Bytes that the engine takes of a device."""
        return requested_bytes(self.device.usable_memory_bytes.value, self.utilization)

    def in_flight(self, stages: int) -> int:
        """Tokens that may be scheduled at once in a pipeline of ``stages`` stages."""
        batches = max_concurrent_batches(stages, v2_runner=self.engine.pp_extra_batches > 0)
        return batches * self.max_batched_tokens

    def workspaces(self, parallel: ParallelConfig) -> Workspaces:
        """Buffers of the kernels on one rank of the layout."""
        if not self.engine.profiles_kernels:
            return Workspaces()
        return workspaces(
            self.model,
            self.form,
            tp=parallel.tensor_parallel_size,
            moe_tp=parallel.moe_tensor_parallel_size,
            dcp=parallel.decode_context_parallel_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            block_size=self.block_size,
        )

    def outside_bytes(self, parallel: ParallelConfig) -> int:
        """Outside the allocator, kernels' buffers left out: context, libraries, communication where there is any."""
        return int(self.engine.non_torch_gib_for(talking_ranks(self.model, parallel)) * GIB)

    def buffer_bytes(self, parallel: ParallelConfig) -> int:
        """Held for good beside the weights: buffers of the kernels, tables of rotary embeddings."""
        return self.workspaces(parallel).persistent + rope_cache_bytes(self.model)

    def non_torch_bytes(self, parallel: ParallelConfig) -> int:
        """Outside the allocator, and the buffers, which the engine counts as used like it."""
        return self.outside_bytes(parallel) + self.buffer_bytes(parallel)

    @property
    def graph_bytes(self) -> int:
        """Captured graphs, as far as the engine subtracts them."""
        return int(self.engine.graph_gib * GIB)

    @property
    def profile_sizes(self) -> dict[str, int]:
        """B, Q and S of the profile run: the token budget over as many requests as there may be."""
        requests = min(self.max_num_seqs, self.max_batched_tokens) or self.max_batched_tokens
        tokens = ceil_div(self.max_batched_tokens, requests)
        return {"B": requests, "Q": tokens, "S": tokens}


def talking_ranks(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Ranks of an instance that take part in collectives; those of a DP group that share no experts never do."""
    stage = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return stage * (parallel.data_parallel_size if model.is_moe else 1)


def profile_layout(start: StartUp, parallel: ParallelConfig) -> Layout:
    """What is traced for the profile run: a prefill of all layers, whose KV is not split."""
    whole = replace(
        parallel,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
    )
    return Layout(whole, Phase.PREFILL, start.dcp_semantics, start.block_size, start.num_mtp_tokens)


class RankMemory:
    """Memory of the ranks of one layout, by the layers of their stage. All sizes in bytes.

    Args:
        start: what the engine is started with.
        parallel: the layout.
        trace: of the whole model, in :func:`profile_layout`.
    """

    def __init__(self, start: StartUp, parallel: ParallelConfig, trace: Trace) -> None:
        self.start = start
        self.parallel = parallel
        self._trace = trace

    @cached_property
    def model_weights(self) -> ModelWeights:
        """Weights by layer."""
        return model_weights(self._trace, self.start.quant, self.start.model.num_hidden_layers)

    def weights(self, start: int, end: int, *, extra_indexers: int = 0) -> int:
        """Weights of the stage with decoder layers ``start <= i < end``, some of which got an indexer.

        The first stage has the vision tower of a multimodal model as well.
        """
        tower = vision_bytes(self.start.model, self.parallel.tensor_parallel_size) if start == 0 else 0
        return self.model_weights.of(start, end, extra_indexers=extra_indexers) + tower

    @cached_property
    def workspaces(self) -> Workspaces:
        """Buffers of the kernels."""
        return self.start.workspaces(self.parallel)

    @cached_property
    def buffers(self) -> int:
        """See :meth:`StartUp.buffer_bytes`."""
        return self.start.buffer_bytes(self.parallel)

    @cached_property
    def non_torch(self) -> int:
        """See :meth:`StartUp.non_torch_bytes`."""
        return self.start.non_torch_bytes(self.parallel)

    def activation(self, start: int, end: int) -> int:
        """Peak of the profile run: in the layers, or where the last stage samples for as many requests as may be."""
        peak = self._activations.peak(start, end) + self.workspaces.transient
        s = self.start
        if end < s.model.num_hidden_layers or not s.engine.profiles_kernels:
            return peak
        hidden = s.max_batched_tokens * s.model.hidden_size * bits_of(s.model.dtype) // 8
        # Hidden states and residual are still held.
        return max(peak, 2 * hidden + sampler_bytes(s.model.vocab_size, s.max_num_seqs))

    @cached_property
    def _activations(self) -> StageActivations:
        s = self.start
        run = as_run(s.quant, s.device)
        segments = tuple(
            replace(segment, part=prepare(segment.part, run, head_tiles=s.engine.sparse_head_tiles))
            for segment in self._trace.segments
        )
        return StageActivations(replace(self._trace, segments=segments), s.model.num_hidden_layers, s.profile_sizes)
