"""KV capacity of a layout, as its engine computes it at start-up: memory of each stage, blocks, tokens, what binds.

``kv = ceil(usable * utilisation) - weights - non-torch - activation peak - graphs`` on every rank; the ranks then agree
on the smallest number of blocks. Weights and activations come from the traces, exactly; non-torch memory and graphs
from the engine's profile, or from a start-up that was measured.
Source: vLLM 0.30 ``v1/worker/gpu_worker.py``, ``v1/core/kv_cache_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import inf
from pathlib import Path

from tensor_cast.core.calibration import Calibration
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.core.capacity_plan import CapacityPlan, StageMemory
from tensor_cast.core.measured import Measured, StageKind, stage_kind
from tensor_cast.core.stage_memory import ModelWeights, StageActivations, model_weights
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import default_engine, load_engine
from tensor_cast.engine.kv_cache import CacheLayer, cache_layers, indexer_layers
from tensor_cast.engine.kv_formats import resolve_kv_format
from tensor_cast.engine.kv_groups import CacheGroup, build_groups, plan_pool
from tensor_cast.engine.kv_specs import IndexerSpec
from tensor_cast.engine.workspaces import Workspaces, requested_bytes, workspaces
from tensor_cast.errors import ConfigError, InfeasibleError, UnsupportedModelError
from tensor_cast.ir.fuse import fuse_trace
from tensor_cast.ir.program import Layout
from tensor_cast.ir.quantize import quantize_trace
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import AttentionKind, ParallelConfig
from tensor_cast.parallel import check
from tensor_cast.pipeline_partition import (
    DsaSplit,
    Partition,
    all_partitions,
    best_partition,
    check_partition,
    default_partition,
    max_concurrent_batches,
    parse_partition,
    refuse_unsafe,
    stage_ranges,
    unsafe_by_stage,
)
from tensor_cast.quant import QuantConfig
from tensor_cast.units import GIB, ceil_div

__all__ = ["CapacityPlan", "CapacityPlanner", "StageMemory"]

#: Values of ``--pp-layer-partition`` that are no partition.
AUTO, ALL = "auto", "all"


class CapacityPlanner:
    """Plans any partition of one layout. The model is traced once; each stage is sized once.

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
        self.quant = QuantConfig.resolve(self.model, config.quantize_linear_action)
        self.parallel = ParallelConfig(
            tensor_parallel_size=config.tp_size,
            pipeline_parallel_size=config.pp_size,
            data_parallel_size=config.dp_size,
            expert_parallel_size=config.ep_size,
            decode_context_parallel_size=config.dcp_size,
        )
        self.block_size = config.block_size or self.engine.block_size_for(self.model.attention)
        kv_dtype = self.quant.kv_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        self.form = resolve_kv_format(self.model, kv_dtype)
        self.max_model_len = config.max_model_len or self.model.max_position_embeddings
        if not self.max_model_len:
            raise ConfigError(f"{self.model.model_id} names no number of positions; give --max-model-len")
        self.max_batched_tokens = config.max_num_batched_tokens or self.engine.max_batched_tokens
        self.max_num_seqs = config.max_num_seqs or self.engine.max_num_seqs
        self.utilization = config.gpu_memory_utilization or self.engine.gpu_memory_utilization
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
        self.measured = None if calibration is None else self._measure(calibration)

    # -- partitions ------------------------------------------------------------------------------------------------

    def partition(self) -> Partition:
        """The partition that is asked for: given, the best, or the engine's own (also for ``all``).

        Raises:
            InfeasibleError: ``auto``, and no split fits.
        """
        layers, stages, asked = self.model.num_hidden_layers, self.config.pp_size, self.config.pp_layer_partition
        if asked == AUTO:
            best = self.best()
            if best is None:
                raise InfeasibleError(self._nothing_fits())
            return best
        if asked in (None, ALL):
            own = default_partition(layers, stages)
            check_partition(own, layers, stages)
            return own
        assert asked is not None
        return parse_partition(asked, layers, stages)

    def best(self) -> Partition | None:
        """The partition with most KV blocks, exactly; without ``dsa_split`` only safe ones count. None if none fits.

        Raises:
            ConfigError: the KV memory is given, which depends on the partition.
        """
        if self.config.kv_memory_gib is not None:
            raise ConfigError(
                "--kv-memory-gib gives the KV memory of one partition; to compare partitions leave it out, and use "
                "--calibrate-from to start from a measured one"
            )

        def cost(stage: int, start: int, end: int) -> float:
            flips = self._flips(start, end)
            if flips and self.config.dsa_split is None:
                return inf
            room = self.stage(stage, start, end).kv
            blocks = room // self._block_bytes(start, end)
            return inf if blocks < 1 else -float(blocks)

        return best_partition(self.model.num_hidden_layers, self.config.pp_size, cost)[0]

    def all(self) -> Iterator[CapacityPlan]:
        """The plan of every partition; those that would be refused are marked, and computed as they are."""
        for partition in all_partitions(self.model.num_hidden_layers, self.config.pp_size):
            yield self.plan(partition, mark_refused=True)

    def plan(self, partition: Partition | None = None, *, mark_refused: bool = False) -> CapacityPlan:
        """Capacity of ``partition``; of the one that is asked for by default.

        Args:
            partition: layers of each stage.
            mark_refused: mark a partition with unsafe layers instead of refusing it.

        Raises:
            LegalityError: unsafe layers, and nothing says how to go on.
            ConfigError: the KV memory is given for another number of stages.
        """
        partition = partition or self.partition()
        unsafe = unsafe_by_stage(partition, self.full) if self.full else ((),) * len(partition)
        split = self.config.dsa_split
        if not mark_refused:
            refuse_unsafe(partition, self.full, split)
        stages = stage_ranges(partition)
        memory = tuple(self.stage(i, stage.start, stage.stop) for i, stage in enumerate(stages))
        flips = [layer for layers in unsafe for layer in layers] if split is DsaSplit.SELF_COMPUTE else []
        groups = self._groups(tuple(flips))
        capacity = plan_pool(
            groups,
            [self._with_drafts(stage) for stage in stages],
            [stage.kv for stage in memory],
            max_model_len=self.max_model_len,
            dcp=self.config.dcp_size,
            in_flight=max_concurrent_batches(self.config.pp_size) * self.max_batched_tokens,
        )
        return CapacityPlan(
            partition=partition,
            stages=memory,
            capacity=capacity,
            bytes_per_token=tuple(self._token_bytes(self._with_drafts(s), tuple(flips)) for s in stages),
            unsafe=unsafe,
            split=split if any(unsafe) else None,
            equivalents=tuple(
                len(stage) + (self.config.num_mtp_tokens if stage.stop == self.model.num_hidden_layers else 0)
                for stage in stages
            ),
            refused=any(unsafe) and split is None,
        )

    def resident(self, plan: CapacityPlan, length: int) -> int:
        """Requests of ``length`` tokens that stay resident at once, in whole blocks beside the null block."""
        in_flight = max_concurrent_batches(self.config.pp_size) * self.max_batched_tokens
        flips = plan.unsafe_layers if self.config.dsa_split is DsaSplit.SELF_COMPUTE else ()
        needed = sum(
            group.spec.admission_blocks(length, dcp=self.config.dcp_size, in_flight=in_flight)
            for group in self._groups(flips)
        )
        return plan.capacity.usable_blocks // needed

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
            flips = len(self._flips(start, end)) if self.config.dsa_split is DsaSplit.SELF_COMPUTE else 0
            weights = self.weights.of(start, end, extra_indexers=flips)
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
        return StageMemory(range(start, end), budget, weights, non_torch, activation, graph, kv)

    def _overheads(self, kind: StageKind, start: int, end: int) -> tuple[int, int, int]:
        """(non-torch, activation, graph) bytes, measured where there are measurements."""
        if self.measured is not None:
            return self.measured.overheads(kind, self.workspaces.persistent)
        return (
            int(self.engine.non_torch_gib_for(self.parallel.world_size) * GIB) + self.workspaces.persistent,
            self.activations.peak(start, end) + self.workspaces.transient,
            int(self.engine.graph_gib * GIB),
        )

    @cached_property
    def budget(self) -> int:
        """Bytes that the engine takes of a device."""
        usable = self.device.usable_memory_bytes.value
        if self.measured is not None and self.measured.calibration.total_gib is not None:
            usable = self.measured.calibration.total_gib * GIB
        return requested_bytes(usable, self.utilization)

    @cached_property
    def workspaces(self) -> Workspaces:
        """Buffers of the attention backends."""
        return self._workspaces(self.max_model_len, self.config.tp_size, self.config.dcp_size)

    def _workspaces(self, max_model_len: int, tp: int, dcp: int) -> Workspaces:
        return workspaces(
            self.model,
            self.form,
            ascend=self.engine.name == "vllm-ascend",
            tp=tp,
            dcp=dcp,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            block_size=self.block_size,
        )

    # -- traces ----------------------------------------------------------------------------------------------------

    @cached_property
    def _traced(self) -> bool:
        """Whether there are weights: a model that is not traced still has a KV cache, if its memory is given."""
        try:
            _ = self.weights
        except UnsupportedModelError:
            if self.config.kv_memory_gib is None:
                raise
            return False
        return True

    def _layout(self, tp: int, num_mtp_tokens: int, phase: Phase = Phase.PREFILL) -> Layout:
        parallel = ParallelConfig(
            tensor_parallel_size=tp,
            data_parallel_size=self.config.dp_size,
            expert_parallel_size=self.config.ep_size if tp == self.config.tp_size else 1,
        )
        return Layout(parallel, phase, self.semantics, self.block_size, num_mtp_tokens)

    def weights_of(self, tp: int, num_mtp_tokens: int) -> ModelWeights:
        """Weights of the model on one of ``tp`` ranks."""
        trace = self._library.compose(self._layout(tp, num_mtp_tokens))
        return model_weights(trace, self.quant, self.model.num_hidden_layers)

    @cached_property
    def weights(self) -> ModelWeights:
        """Weights of the layout."""
        return self.weights_of(self.config.tp_size, self.config.num_mtp_tokens)

    @cached_property
    def activations(self) -> StageActivations:
        """Activations of the engine's profile run: the token budget spread over as many requests as there may be."""
        trace = self._library.compose(self._layout(self.config.tp_size, self.config.num_mtp_tokens))
        requests = min(self.max_num_seqs, self.max_batched_tokens)
        tokens = ceil_div(self.max_batched_tokens, requests)
        env = {"B": requests, "Q": tokens, "S": tokens}
        return StageActivations(fuse_trace(quantize_trace(trace, self.quant)), self.model.num_hidden_layers, env)

    # -- caches ----------------------------------------------------------------------------------------------------

    def _caches(self, flips: tuple[int, ...]) -> tuple[CacheLayer, ...]:
        return cache_layers(
            self.model,
            self.parallel,
            block_size=self.block_size,
            kv_dtype=self.form.name,
            dcp_semantics=self.semantics,
            num_mtp_tokens=self.config.num_mtp_tokens,
            extra_indexers=flips,
        )

    def _groups(self, flips: tuple[int, ...] = ()) -> tuple[CacheGroup, ...]:
        if flips not in self._known_groups:
            self._known_groups[flips] = build_groups(self._caches(flips), hybrid=self.config.hybrid_kv_cache)
        return self._known_groups[flips]

    @cached_property
    def _known_groups(self) -> dict[tuple[int, ...], tuple[CacheGroup, ...]]:
        return {}

    def _with_drafts(self, stage: range) -> range:
        last = stage.stop == self.model.num_hidden_layers
        return range(stage.start, stage.stop + self.model.num_nextn_predict_layers) if last else stage

    def _block_bytes(self, start: int, end: int) -> int:
        stage = self._with_drafts(range(start, end))
        base = max(group.block_bytes(stage) for group in self._groups())
        if self.config.dsa_split is not DsaSplit.SELF_COMPUTE:
            return base
        return base + len(self._flips(start, end)) * self._indexer_page

    @cached_property
    def _indexer_page(self) -> int:
        if self.model.attention is not AttentionKind.DSA:
            return 0
        return next(c.spec.page_bytes for c in self._caches(()) if isinstance(c.spec, IndexerSpec))

    def _token_bytes(self, stage: range, flips: tuple[int, ...]) -> int:
        """Bytes that a token adds on a rank of the stage, over its share of the tokens."""
        return sum(c.spec.token_bytes for c in self._caches(flips) if c.layer in stage)

    def _flips(self, start: int, end: int) -> range:
        """Layers at the start of a stage that reuse indices of the stage before."""
        if not self.full:
            return range(0)
        return range(start, next((i for i in range(start, end) if self.full[i]), end))

    # -- the rest --------------------------------------------------------------------------------------------------

    def _measure(self, calibration: Calibration) -> Measured:
        """What the measured start-up leaves once our weights are taken off."""
        tp = calibration.tp_size or self.config.tp_size
        drafts = calibration.num_mtp_tokens
        drafts = self.config.num_mtp_tokens if drafts is None else drafts
        length = calibration.max_model_len or self.max_model_len
        pp = calibration.pp_size or len(calibration.stages)
        partition = calibration.pp_layer_partition or default_partition(self.model.num_hidden_layers, pp)
        check_partition(partition, self.model.num_hidden_layers, len(calibration.stages))
        weights = self.weights_of(tp, drafts)
        held = []
        for stage in stage_ranges(partition):
            flips = len(self._flips(stage.start, stage.stop)) if self.config.dsa_split is DsaSplit.SELF_COMPUTE else 0
            held.append(weights.of(stage.start, stage.stop, extra_indexers=flips))
        return Measured(
            calibration=calibration,
            partition=partition,
            weights=tuple(held),
            workspace=self._workspaces(length, tp, calibration.dcp_size or self.config.dcp_size).persistent,
            usable=(calibration.total_gib or self.device.usable_memory_bytes.value / GIB) * GIB,
            utilization=calibration.gpu_memory_utilization or self.utilization,
        )

    def _nothing_fits(self) -> str:
        partition = default_partition(self.model.num_hidden_layers, self.config.pp_size)
        stages = [self.stage(i, s.start, s.stop) for i, s in enumerate(stage_ranges(partition))]
        worst = min(range(len(stages)), key=lambda i: stages[i].kv)
        return (
            f"no split of {self.model.num_hidden_layers} layers over {self.config.pp_size} stages leaves room for a "
            f"KV cache: in {','.join(map(str, partition))} stage {worst} lacks {-stages[worst].kv / GIB:,.2f} GiB of "
            f"{stages[worst].budget / GIB:,.2f}; raise tp_size or pp_size, or quantise the weights"
        )
