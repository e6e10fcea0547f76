"""Run one step of one layout on paper: trace, price, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensor_cast.core.input_generator import InputGenerator, KVCacheInfo
from tensor_cast.core.pipeline_step import PipelineStep, stage_times
from tensor_cast.core.start_up import RankMemory, StartUp, profile_layout
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.core.user_config import UserInputConfig
from tensor_cast.device.catalog import load_device
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.engine.dcp import get_semantics
from tensor_cast.engine.kv_cache import request_kv_bytes
from tensor_cast.engine.kv_formats import resolve_kv_format
from tensor_cast.engine.limits import step_limits
from tensor_cast.engine.profile import EngineProfile
from tensor_cast.engine.vision import vision_bytes
from tensor_cast.errors import ConfigError
from tensor_cast.ir.index_sharing import Handover, hand_over
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import Trace
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.performance_model.estimate import OpEstimate, StepEstimate, StepEstimator
from tensor_cast.performance_model.memory import MemoryPlan, activation_peak_bytes, weight_bytes
from tensor_cast.pipeline_partition import stage_ranges
from tensor_cast.quant import QuantConfig
from tensor_cast.units import GIB, MS, US


@dataclass(frozen=True)
class RunResult:
    """One step of one layout.

    Args:
        trace: as traced; ``prepared``: as it runs, quantised and fused. Pipeline stages one after the other.
        estimate: the step op by op; of a pipeline a batch's way through all stages.
        memory: what one rank holds, that of the fullest stage; ``kv_cache_size_gb`` is the KV cache of this batch in
            GiB, of a pipeline that of all batches in flight. For activations an engine keeps free what its profile run
            took, however little this step needs.
        step_activation: bytes of activations at the peak of this step, on the stage that needs most.
        kv_cache: layout of the paged cache.
        pipeline: stage by stage; None without stages.
    """

    config: UserInputConfig
    model: ModelConfig
    device: DeviceProfile
    engine: EngineProfile
    parallel: ParallelConfig
    sizes: dict[str, int]
    trace: Trace
    prepared: Trace
    estimate: StepEstimate
    memory: MemoryPlan
    kv_cache: KVCacheInfo
    step_activation: float
    pipeline: PipelineStep | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step: device time and the host's share."""
        return self.estimate.step_s

    @property
    def step_ms(self) -> float:
        """Milliseconds of the step."""
        return self.step_s / MS

    @property
    def warnings(self) -> list[str]:
        """What a deployment of this step would stumble over, one line each."""
        found = []
        memory = self.memory
        if not memory.fits:
            found.append(
                f"does not fit: one rank needs {memory.total_gib:.2f} GiB and the engine has "
                f"{memory.available_gib:.2f} GiB; use more tp or stages (--pp-size), fewer requests, a shorter "
                "context or a smaller weight format"
            )
        if self.pipeline is not None and self.pipeline.handover.unsafe:
            found += self.pipeline.handover.notes
        longest = self.model.max_position_embeddings
        if 0 < longest < self.sizes["S"]:
            found.append(f"a context of {self.sizes['S']} tokens exceeds the model's max_position_embeddings {longest}")
        return found

    @property
    def kv_cache_size_gb(self) -> float:
        """GiB of KV cache that this batch fills on one rank."""
        return self.memory.kv / GIB

    def layers(self) -> list[LayerTime]:
        """Time of what stands outside the layer stack, and by group of layers that run the same parts."""
        parts: dict[int, dict[tuple[int, ...], None]] = {}
        for op in self.estimate.ops:
            for layer in op.layers:
                parts.setdefault(layer, {})[op.layers] = None
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for layer, found in parts.items():
            groups.setdefault(tuple(found), []).append(layer)
        seconds = self.estimate.by_layer()
        rows = [
            LayerTime(_layer_name(tuple(group)), len(group), sum(seconds[layer] for layer in group))
            for group in groups.values()
        ]
        return [LayerTime("outside", 1, seconds.get(None, 0.0)), *rows]

    def to_json(self) -> dict[str, Any]:
        """The public JSON form of ``msmodeling text_generate``."""
        return {
            "schema_version": 1,
            "inputs": {
                **self.config.model_dump(mode="json"),
                "engine": self.engine.name,
                "dcp_semantics": self.config.get_dcp_semantics(),
                "block_size": self.kv_cache.block_size,
                "query_length": self.sizes["Q"],
                "context_length": self.sizes["S"],
            },
            "step_ms": self.step_ms,
            "host_ms": self.estimate.host_s / MS,
            "bound": self.estimate.bound,
            "weights_gib": self.memory.weights_gib,
            "kv_cache_size_gb": self.kv_cache_size_gb,
            "activation_gib": self.memory.activation_gib,
            "step_activation_gib": self.step_activation / GIB,
            "memory_total_gib": self.memory.total_gib,
            "memory_available_gib": self.memory.available_gib,
            "fits": self.memory.fits,
            "warnings": self.warnings,
            "coverage": self.estimate.coverage,
            "unpriced": dict(self.estimate.unpriced),
            "ops": [_op_json(op) for op in self.estimate.ops],
            "layers": [row.to_json() for row in self.layers()],
            "pipeline": None if self.pipeline is None else self.pipeline.to_json(),
        }


@dataclass(frozen=True)
class LayerTime:
    """Time of the layers that one representative stands for; ``name`` is ``outside`` beside the layer stack."""

    name: str
    count: int
    total_s: float

    def to_json(self) -> dict[str, Any]:
        """Public JSON form, times in milliseconds."""
        return {
            "name": self.name,
            "count": self.count,
            "ms_each": self.total_s / self.count / MS,
            "ms": self.total_s / MS,
        }


def _op_json(op: OpEstimate) -> dict[str, Any]:
    return {
        "name": op.name,
        "module": op.module,
        "class": op.op_class,
        "repeat": op.repeat,
        "us_each": op.seconds / US,
        "ms": op.total_s / MS,
        "flops": op.flops,
        "bytes": op.nbytes,
        "bound": op.bound,
        "source": op.source,
    }


def _layer_name(layers: tuple[int, ...]) -> str:
    """``0-2``, ``3-60``, ``0,2,4..34``: runs of layers in few characters."""
    first, last = layers[0], layers[-1]
    if layers == tuple(range(first, last + 1)):
        return str(first) if first == last else f"{first}-{last}"
    step = layers[1] - first
    if layers == tuple(range(first, last + 1, step)):
        return f"{first},{layers[1]}..{last}"
    return ",".join(map(str, layers))


class ModelRunner:
    """Prices one step. Traces come from the cache where it has them, so a warm run imports no torch."""

    def __init__(self, config: UserInputConfig, *, use_cache: bool = True, cache_dir: Path | None = None) -> None:
        if config.device is None:
            raise ConfigError("a price needs a device: give --device (msmodeling devices lists them)")
        self.config = config
        self.device = load_device(config.device)
        self.engine = config.get_engine()
        self.model = load_model_config(config.model)
        self.quant = QuantConfig.resolve(
            self.model,
            config.quantize_linear_action,
            config.quantize_attention_action,
            dcp_semantics=config.get_dcp_semantics(),
            expert_kernel=self.engine.expert_kernel(self.device.name),
        )
        self.library = TraceLibrary(self.model, cache_dir=cache_dir, use_cache=use_cache)

    def run(self) -> RunResult:
        """Trace, price and size one step.

        Raises:
            LegalityError: the layout breaks a rule.
            UnpricedOpError: under ``strict``, an op has no cost function.
        """
        config = self.config
        sizes = config.get_sizes()
        parallel = config.check(self.model, self.quant)
        partition = config.get_partition(self.model)
        handover = hand_over(self.model, partition, config.dsa_split)
        semantics = get_semantics(config.get_dcp_semantics()).name
        layout = Layout(parallel, config.phase, semantics, config.get_block_size(self.model), config.num_mtp_tokens)
        traces = self.library.stages(layout, partition, handover=handover)
        estimators = [self._estimator(trace, parallel, stage) for stage, trace in enumerate(traces)]
        estimates = [estimator.estimate(sizes) for estimator in estimators]
        peaks = [float(activation_peak_bytes(estimator.prepared, sizes)) for estimator in estimators]
        profile_run = self._profile_run(layout, sizes)
        memory = tuple(
            self._memory(layout, own, estimator.trace, peak, profile_run, sizes, handover)
            for own, estimator, peak in zip(stage_ranges(partition), estimators, peaks, strict=True)
        )
        pipeline = None
        if config.pp_size > 1:
            times = stage_times(estimates, overlap=self.engine.pp_overlap)
            batches = self.engine.batches_in_flight(config.pp_size)
            pipeline = PipelineStep(partition, config.num_mtp_tokens, handover, times, memory, batches)
        generator = InputGenerator(self.model, parallel, dcp_semantics=semantics, block_size=layout.block_size)
        return RunResult(
            config=config,
            model=self.model,
            device=self.device,
            engine=self.engine,
            parallel=parallel,
            sizes=sizes,
            trace=_joined(traces),
            estimate=_joined_estimates(estimates),
            memory=memory[0] if pipeline is None else pipeline.fullest,
            kv_cache=generator._get_kv_cache_info(sizes["B"], sizes["Q"], sizes["S"]),
            step_activation=max(peaks),
            prepared=_joined([estimator.prepared for estimator in estimators]),
            pipeline=pipeline,
        )

    def _estimator(self, trace: Trace, parallel: ParallelConfig, stage: int) -> StepEstimator:
        return StepEstimator(
            trace,
            device=self.device,
            engine=self.engine,
            parallel=parallel,
            quant=self.quant,
            fusion=self.config.fusion,
            strict=self.config.strict,
            stage=stage,
        )

    def _profile_run(self, layout: Layout, sizes: dict[str, int]) -> RankMemory:
        """Memory of the ranks when the engine starts, by the same sum as that of ``capacity``."""
        limits = step_limits(self.engine, self.device)
        start_up = StartUp(
            model=self.model,
            device=self.device,
            engine=self.engine,
            quant=self.quant,
            form=resolve_kv_format(self.model, self.quant.kv_dtype),
            dcp_semantics=layout.dcp_semantics,
            block_size=layout.block_size,
            max_model_len=sizes["S"],
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens,
            utilization=self.engine.gpu_memory_utilization,
            num_mtp_tokens=layout.num_mtp_tokens,
        )
        trace = self.library.compose(profile_layout(start_up, layout.parallel))
        return RankMemory(start_up, layout.parallel, trace)

    def _memory(
        self,
        layout: Layout,
        layers: range,
        trace: Trace,
        step_activation: float,
        profile_run: RankMemory,
        sizes: dict[str, int],
        handover: Handover,
    ) -> MemoryPlan:
        """Memory of one rank that runs decoder layers ``layers``, with the KV of all batches in flight."""
        drafts = min(self.model.num_nextn_predict_layers, layout.num_mtp_tokens)
        last = layers.stop == self.model.num_hidden_layers
        kv_bytes = request_kv_bytes(
            self.model,
            layout.parallel,
            tokens=sizes["S"],
            block_size=layout.block_size,
            kv_dtype=self.quant.kv_dtype,
            dcp_semantics=layout.dcp_semantics,
            num_mtp_tokens=layout.num_mtp_tokens,
            layers=range(layers.start, layers.stop + drafts) if last else layers,
            extra_indexers=handover.own_indexers,
        )
        batches = self.engine.batches_in_flight(layout.parallel.pipeline_parallel_size)
        tower = vision_bytes(self.model, layout.parallel.tensor_parallel_size) if layers.start == 0 else 0
        return MemoryPlan(
            weights=weight_bytes(trace, self.quant) + tower,
            kv=float(batches * sizes["B"] * kv_bytes),
            activation=max(step_activation, float(profile_run.activation(layers.start, layers.stop))),
            non_torch=profile_run.non_torch,
            graph=profile_run.start.graph_bytes,
            reserved=self.config.reserved_memory_gb * GIB,
            available=profile_run.start.budget,
        )


def _joined(traces: Sequence[Trace]) -> Trace:
    """The traces of all stages one after the other."""
    return replace(traces[0], segments=tuple(segment for trace in traces for segment in trace.segments))


def _joined_estimates(estimates: Sequence[StepEstimate]) -> StepEstimate:
    """A batch's way through all stages."""
    unpriced: Counter[str] = Counter()
    for estimate in estimates:
        unpriced.update(estimate.unpriced)
    ops = tuple(op for estimate in estimates for op in estimate.ops)
    return StepEstimate(ops, estimates[0].host_s, min(estimate.coverage for estimate in estimates), unpriced)
