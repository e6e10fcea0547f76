"""Example workloads: cost models that state bytes instead of naming a model, priced by the machinery of real ones.

A workload file holds what a step reads and sends, a device and an engine. It becomes a trace like any other (one part
for each layer), is cut into stages, priced by the device's fits and run through the flow of batches; so a published
table can be checked against the same code that prices real models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from tensor_cast.config_files import explain, is_path, read_yaml, yaml_names
from tensor_cast.device.profile import DeviceProfile
from tensor_cast.engine.profile import EngineProfile
from tensor_cast.errors import UnknownNameError
from tensor_cast.ir.expr import symbol
from tensor_cast.ir.record import Kind, OpRecord, Part, Phase, Scope, Segment, TensorSpec, Trace
from tensor_cast.ir.stages import split_wire, stage_traces
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model.costs.assumed import READ
from tensor_cast.performance_model.estimate import StepEstimator
from tensor_cast.performance_model.pipeline import Flow, StageTimes, steady_flow
from tensor_cast.pipeline_partition import default_partition
from tensor_cast.quant import QuantConfig
from tensor_cast.units import MS

__all__ = ["ExampleWorkload", "LayoutSizes", "WorkloadRow", "load_workload", "workload_names"]


class LayoutSizes(BaseModel):
    """Ranks of a stage, and stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: PositiveInt
    pp: PositiveInt = 1


class ExampleWorkload(BaseModel):
    """A decode workload by its bytes.

    Args:
        weight_bytes: of the whole model, spread evenly over its layers.
        kv_bytes_per_token: over all layers; split over at most ``kv_heads`` ranks.
        context: tokens of each request that attention reads.
        whole_on_wire: both boundary tensors go whole from rank to rank, instead of 1/tp of each and a gather.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str
    layers: PositiveInt
    hidden_size: PositiveInt
    dtype: str
    weight_bytes: PositiveFloat
    kv_bytes_per_token: PositiveInt
    kv_heads: PositiveInt
    all_reduces_per_layer: Annotated[int, Field(ge=0)]
    context: PositiveInt
    whole_on_wire: bool
    concurrencies: tuple[PositiveInt, ...]
    layouts: tuple[LayoutSizes, ...]
    device: DeviceProfile
    engine: EngineProfile

    # -- as a trace ---------------------------------------------------------------------------------------------
    def trace(self, tp: int) -> Trace:
        """What one rank of ``tp`` does in a step, layer by layer."""
        batch, query, seq = symbol("B"), symbol("Q"), symbol("S")
        weights = TensorSpec((round(self.weight_bytes / self.layers / tp),), "int8", Kind.WEIGHT)
        per_token = round(self.kv_bytes_per_token / self.layers / min(tp, self.kv_heads))
        cache = TensorSpec((batch, seq, per_token), "int8", Kind.KV)
        hidden = TensorSpec((batch, query, self.hidden_size), self.dtype)
        done = TensorSpec((1,), "int8")
        ops = [
            OpRecord(READ, "layers.0.weights", (weights,), (done,), (1,), (2,)),
            OpRecord(READ, "layers.0.attention", (cache,), (done,), (3,), (4,), scope=Scope.SEQUENCE),
        ]
        if tp > 1:
            reduce = OpRecord(
                "_c10d_functional.all_reduce", "layers.0", (hidden,), (hidden,), (5,), (6,), axis="tp", group_size=tp
            )
            ops += [reduce] * self.all_reduces_per_layer
        part = Part(f"assumed/layer/tp{tp}", tuple(ops), (), (5,), (6,))
        return Trace(self.name, Phase.DECODE, {"tp": tp}, (Segment(part, tuple(range(self.layers))),))

    def times(self, sizes: LayoutSizes, batch: float) -> StageTimes:
        """Stage times of a step of ``batch`` requests. Nothing is said of tokens that go back: that takes no time."""
        parallel = ParallelConfig(tensor_parallel_size=sizes.tp, pipeline_parallel_size=sizes.pp)
        traces = stage_traces(
            self.trace(sizes.tp),
            default_partition(self.layers, sizes.pp),
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            tp=sizes.tp,
            whole_on_wire=self.whole_on_wire,
        )
        env = {"B": batch, "Q": 1.0, "S": float(self.context)}
        work, hops = [], []
        for stage, trace in enumerate(traces):
            inside, wire = (self._estimator(part, parallel, stage) for part in split_wire(trace))
            work.append(sum(inside.scope_seconds(env).values()))
            hops.append(wire.scope_seconds(env)[Scope.TOKEN])
        return StageTimes(tuple(work), tuple(hops), self.engine.host_step_s, self.engine.pp_overlap)

    def _estimator(self, trace: Trace, parallel: ParallelConfig, stage: int) -> StepEstimator:
        return StepEstimator(
            trace,
            device=self.device,
            engine=self.engine,
            parallel=parallel,
            quant=QuantConfig(kv_dtype="int8", model_dtype=self.dtype),  # the cache is stated in bytes
            fusion=False,
            strict=True,
            stage=stage,
        )

    # -- answers ------------------------------------------------------------------------------------------------
    def row(self, sizes: LayoutSizes, concurrency: int, *, replicas: int = 1) -> WorkloadRow:
        """Decode of ``concurrency`` requests, shared evenly by ``replicas`` and by the batches in flight of each."""
        mine = concurrency / replicas
        flight = max(1, min(self.engine.batches_in_flight(sizes.pp), int(mine)))
        flow = steady_flow(self.times(sizes, max(mine / flight, 1.0)), flight)
        return WorkloadRow(sizes, replicas, concurrency, flow)

    def rows(self) -> Iterator[WorkloadRow]:
        """Every layout at every concurrency, in the order of the file."""
        for concurrency in self.concurrencies:
            for sizes in self.layouts:
                yield self.row(sizes, concurrency)


@dataclass(frozen=True)
class WorkloadRow:
    """One layout at one concurrency."""

    sizes: LayoutSizes
    replicas: int
    concurrency: int
    flow: Flow

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.sizes.tp * self.sizes.pp * self.replicas

    @property
    def tpot_ms(self) -> float:
        """Milliseconds from a request's token to its next."""
        return float(self.flow.cycle) / MS

    @property
    def tokens_per_second(self) -> float:
        """Over all requests."""
        return self.concurrency / float(self.flow.cycle)

    @property
    def tokens_per_second_per_device(self) -> float:
        """Over all requests, by device."""
        return self.tokens_per_second / self.devices


def workload_names() -> list[str]:
    """Names of the embedded workloads, in alphabetical order. Reads no file."""
    return sorted(yaml_names("workloads"))


def load_workload(name: str) -> ExampleWorkload:
    """The embedded workload called ``name``, or the one in the YAML file at that path.

    Raises:
        UnknownNameError: there is none of that name.
        ConfigError: the file cannot be read or does not fit :class:`ExampleWorkload`.
    """
    path: Path | None = Path(name).expanduser() if is_path(name) else yaml_names("workloads").get(name.strip().lower())
    if path is None:
        raise UnknownNameError("workload", name, workload_names())
    try:
        return ExampleWorkload.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain(path, error) from error
