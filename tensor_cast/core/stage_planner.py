"""Memory of each pipeline stage of one layout: what the engine may take, what is used, what is left for the KV cache.

Weights and activations come from the traces, exactly; non-torch memory and graphs from the engine's profile, or from a
start-up that was measured.
Source: vLLM 0.30 ``v1/worker/gpu_worker.py``.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from tensor_cast.core.calibration import Calibration
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.core.capacity_plan import StageMemory
from tensor_cast.core.measured import StageKind, stage_kind
from tensor_cast.core.measured_run import measure
from tensor_cast.core.start_up import RankMemory, StartUp, profile_layout
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import default_engine, load_engine
from tensor_cast.engine.kv_cache import indexer_layers
from tensor_cast.engine.kv_formats import resolve_kv_format
from tensor_cast.engine.limits import step_limits
from tensor_cast.engine.recurrent import recurrent_state
from tensor_cast.errors import ConfigError, UnsupportedModelError
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.parallel import check
from tensor_cast.pipeline_partition import DsaSplit
from tensor_cast.quant import QuantConfig
from tensor_cast.units import GIB

__all__ = ["StagePlanner"]


class StagePlanner:
    """Sizes the stages of one layout. The model is traced once; each stage is sized once.

    Args:
        config: what is asked.
        calibration: a measured start-up that replaces the estimates of non-torch, activation and graph memory.
        use_cache: read and fill the trace cache.
        cache_dir: folder of the trace cache; None takes the user's.

    Raises:
        LegalityError: the layout breaks a rule.
        UnsupportedModelError: the model cannot be traced, and no KV memory is given.
    """

    def __init__(
        self,
        config: CapacityConfig,
        *,
        calibration: Calibration | None = None,
        use_cache: bool = True,
        cache_dir: Path | None = None,
    ) -> None:
        self.config = config
        self.model = load_model_config(config.model)
        self.device = load_device(config.device)
        self.engine = load_engine(config.engine or default_engine(self.device))
        self.semantics = config.dcp_semantics or self.engine.dcp_semantics
        self.quant = QuantConfig.resolve(
            self.model,
            config.quantize_linear_action,
            dcp_semantics=self.semantics,
            expert_kernel=self.engine.expert_kernel(self.device.name),
        )
        self.parallel = ParallelConfig(
            tensor_parallel_size=config.tp_size,
            pipeline_parallel_size=config.pp_size,
            data_parallel_size=config.dp_size,
            expert_parallel_size=config.ep_size,
            moe_data_parallel_size=config.moe_dp_size,
            cp_kv_cache_interleave_size=config.cp_kv_cache_interleave_size,
            decode_context_parallel_size=config.dcp_size,
        )
        self.block_size = config.block_size or self.engine.block_size_for(self.model.attention)
        kv_dtype = self.quant.kv_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        self.form = resolve_kv_format(self.model, kv_dtype)
        measured_len = None if calibration is None else calibration.max_model_len
        self.max_model_len = config.max_model_len or measured_len or self.model.max_position_embeddings
        if not self.max_model_len:
            raise ConfigError(f"{self.model.model_id} names no number of positions; give --max-model-len")
        limits = step_limits(self.engine, self.device)
        measured_share = None if calibration is None else calibration.gpu_memory_utilization
        self.start_up = StartUp(
            model=self.model,
            device=self.device,
            engine=self.engine,
            quant=self.quant,
            form=self.form,
            dcp_semantics=self.semantics,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs or limits.max_num_seqs,
            max_batched_tokens=config.max_num_batched_tokens or limits.max_batched_tokens,
            utilization=config.gpu_memory_utilization or measured_share or self.engine.gpu_memory_utilization,
            num_mtp_tokens=config.num_mtp_tokens,
        )
        self.full = indexer_layers(self.model)
        check(
            self.model,
            self.parallel,
            dcp_semantics=self.semantics,
            block_size=self.block_size,
            quant_block=self.quant.block,
            num_mtp_tokens=config.num_mtp_tokens,
        )
        self._library = TraceLibrary(self.model, cache_dir=cache_dir, use_cache=use_cache)
        self._stages: dict[tuple[int, int, int], StageMemory] = {}
        self.measured = (
            None
            if calibration is None
            else measure(calibration, config, self.start_up, self.parallel, self._rank_memory)
        )

    # -- one stage -------------------------------------------------------------------------------------------------

    def stage(self, index: int, start: int, end: int) -> StageMemory:
        """Memory of a rank of stage ``index`` with decoder layers ``start <= i < end``."""
        key = (index, start, end)
        if key not in self._stages:
            self._stages[key] = self._size(index, start, end)
        return self._stages[key]

    def _size(self, index: int, start: int, end: int) -> StageMemory:
        budget, given = self.budget, self.config.kv_memory_gib
        weights = non_torch = activation = graph = None
        if self._traced:
            flips = len(self.flips(start, end)) if self.config.dsa_split is DsaSplit.SELF_COMPUTE else 0
            weights = self.memory.weights(start, end, extra_indexers=flips)
            kind = stage_kind(start, end, self.model.num_hidden_layers)
            non_torch, activation, graph = self._overheads(kind, start, end)
        if given is None:
            kv = budget - sum(part for part in (weights, non_torch, activation, graph) if part is not None)
        else:
            if len(given) not in (1, self.config.pp_size):
                raise ConfigError(
                    f"--kv-memory-gib needs one number, or one for each of {self.config.pp_size} stages; "
                    f"found {len(given)}"
                )
            kv = int(given[index if len(given) > 1 else 0] * GIB)
        return StageMemory(range(start, end), self.device_bytes, budget, weights, non_torch, activation, graph, kv)

    def _overheads(self, kind: StageKind, start: int, end: int) -> tuple[int, int, int]:
        """(non-torch, activation, graph) bytes, measured where there are measurements."""
        memory = self.memory
        if self.measured is not None:
            return self.measured.overheads(kind, memory.buffers)
        return memory.non_torch, memory.activation(start, end), self.start_up.graph_bytes

    @cached_property
    def device_bytes(self) -> int:
        """Usable memory of a device."""
        return int(self.device.usable_memory_bytes.value if self.measured is None else self.measured.usable)

    @cached_property
    def budget(self) -> int:
        """Bytes that the engine takes of a device."""
        if self.measured is not None:
            return self.measured.budget(self.start_up.utilization)
        return self.start_up.budget

    # -- traces ----------------------------------------------------------------------------------------------------

    @cached_property
    def _traced(self) -> bool:
        """Whether there are weights: a model that is not traced still has a KV cache, if its memory is given."""
        try:
            if recurrent_state(self.model) is not None:
                # Known without building the model, which takes seconds.
                raise UnsupportedModelError(f"{self.model.model_id}: recurrent layers are not traced yet")
            _ = self.memory
        except UnsupportedModelError as error:
            if self.config.kv_memory_gib is None:
                raise UnsupportedModelError(
                    f"{str(error).rstrip('.')}; without weights there is no estimate of the KV memory: give it with "
                    "--kv-memory-gib"
                ) from None
            return False
        return True

    @cached_property
    def memory(self) -> RankMemory:
        """Memory of the ranks, by the layers of their stage."""
        return self._rank_memory(self.start_up, self.parallel)

    def _rank_memory(self, start_up: StartUp, parallel: ParallelConfig) -> RankMemory:
        return RankMemory(start_up, parallel, self._library.compose(profile_layout(start_up, parallel)))

    def flips(self, start: int, end: int) -> range:
        """Layers at the start of a stage that reuse indices of the stage before."""
        if not self.full:
            return range(0)
        return range(start, next((i for i in range(start, end) if self.full[i]), end))
