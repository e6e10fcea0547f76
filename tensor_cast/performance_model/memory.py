"""Memory of one rank: weights exactly, activations by liveness over the trace, and the plan that adds it all up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tensor_cast.ir.expr import Num, evaluate
from tensor_cast.ir.record import Kind, ParamSpec, Part, TensorSpec, Trace
from tensor_cast.performance_model.base import DimTable, tensor_bytes
from tensor_cast.performance_model.memo import Memo, env_key
from tensor_cast.quant import QuantConfig
from tensor_cast.units import GIB, MIB

__all__ = ["MemoryPlan", "activation_peak_bytes", "resident_bytes", "weight_bytes"]

#: Kinds that live in the allocator only while a step runs; weights and the cache have lines of their own.
_TRANSIENT = (Kind.ACTIVATION, Kind.INDEX)
#: What engines compute in pieces so that it never exceeds this: index scores of a prompt, in rows of 512 MiB at most
#: (vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB). Scores of a decode step are allocated whole.
_CHUNKED = {("tensor_cast.indexer_scores", "prefill"): 512 * MIB}
#: Sizes at which the views of one value are compared; they all scale alike.
_SAMPLE = {"B": 24, "Q": 4, "S": 4096}


def param_counts(trace: Trace) -> dict[str, tuple[ParamSpec, int]]:
    """Each parameter of the trace with the number of layers that hold one like it.

    A layer that runs twice in a step (a draft module's later passes) holds its parameters once.
    """
    layers: dict[str, set[int]] = {}
    params: dict[str, ParamSpec] = {}
    for segment in trace.segments:
        for param in segment.part.params:
            params[param.name] = param
            layers.setdefault(param.name, set()).update(segment.layers)
    return {name: (param, len(layers[name]) or 1) for name, param in params.items()}


def weight_bytes(trace: Trace, quant: QuantConfig) -> int:
    """Exact bytes of the parameters on one rank, as the engine keeps them (its kernel pads, if ``quant`` names one).

    Scales count, tied parameters count once. Engines keep a dense bf16 copy of a *quantised* ``kv_b_proj`` (absorbed
    MLA multiplies by slices of it), which counts too.
    """
    return sum(count * resident_bytes(param, quant) for param, count in param_counts(trace).values())


def resident_bytes(param: ParamSpec, quant: QuantConfig) -> int:
    """What :func:`weight_bytes` counts for one parameter of one layer."""
    return quant.resident_bytes(param) + _absorbed_copy(param, quant)


def _absorbed_copy(param: ParamSpec, quant: QuantConfig) -> int:
    quantised = quant.scheme_of(param.name, param.role, len(param.shape)).quantises
    return 2 * param.numel if quantised and param.name.endswith("kv_b_proj.weight") else 0


@dataclass(frozen=True)
class _Lifetime:
    """A value inside a part: its storage and the ops between which it lives (inclusive); no larger than ``limit``."""

    spec: TensorSpec
    first: int
    last: int
    limit: float | None = None

    def nbytes(self, table: DimTable) -> Num:
        """Its size."""
        size = tensor_bytes(table.spec(self.spec))
        return size if self.limit is None else np.minimum(size, self.limit)


_LIFETIMES: Memo[tuple[list[_Lifetime], list[TensorSpec]]] = Memo(4096)
_PEAKS: Memo[Num] = Memo(4096)


def _lifetimes(part: Part) -> tuple[list[_Lifetime], list[TensorSpec]]:
    """(values born in the part, values that come from outside); views share the storage of their value."""
    return _LIFETIMES.get(id(part), part, lambda: _find_lifetimes(part))


def _find_lifetimes(part: Part) -> tuple[list[_Lifetime], list[TensorSpec]]:
    views: dict[int, list[TensorSpec]] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    outside: list[int] = list(part.input_ids)
    for index, op in enumerate(part.ops):
        for ident, spec in zip(op.input_ids, op.inputs, strict=True):
            if ident not in first and ident not in outside:
                outside.append(ident)
            views.setdefault(ident, []).append(spec)
            last[ident] = index
        for ident, spec in zip(op.output_ids, op.outputs, strict=True):
            if ident not in first and ident not in outside:
                first[ident] = index
                views[ident] = [spec]  # what was allocated; later views are of it
            last[ident] = index
    end = len(part.ops) - 1
    limits = {at: _CHUNKED.get((part.ops[at].name, str(part.ops[at].attr("phase")))) for at in first.values()}
    born = [_Lifetime(views[i][0], at, end if i in part.output_ids else last[i], limits[at]) for i, at in first.items()]
    held = [_largest(views[i]) for i in outside if i in views]
    return [v for v in born if v.spec.kind in _TRANSIENT], [spec for spec in held if spec.kind in _TRANSIENT]


def _largest(views: list[TensorSpec]) -> TensorSpec:
    return max(views, key=lambda spec: float(evaluate(spec.numel, _SAMPLE, smooth=True)))


def _border(part: Part) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Transient tensors that (enter, leave) the part, as specs."""
    _, held = _lifetimes(part)
    made = {ident: spec for op in part.ops for ident, spec in zip(op.output_ids, op.outputs, strict=True)}
    return held, [made[i] for i in part.output_ids if i in made and made[i].kind in _TRANSIENT]


def _passing(part: Part, following: Part | None) -> list[TensorSpec]:
    """What lives across ``part`` without entering it (the residual stream): needed next, and not made here."""
    if following is None:
        return []
    _, made = _border(part)
    left = list(_border(following)[0])
    for spec in made:
        match = next((other for other in left if other.shape == spec.shape and other.dtype == spec.dtype), None)
        if match is not None:
            left.remove(match)
    return left


def part_peak_bytes(part: Part, env: Mapping[str, Num]) -> Num:
    """Most bytes alive at once while ``part`` runs.

    What enters the part is held by its caller throughout; a value of the part lives from the op that makes it to the
    last one that reads it. The op's inputs and outputs are alive together.
    """
    table = DimTable(env, smooth=False)
    born, held = _lifetimes(part)
    base: Num = 0
    for spec in held:
        base = base + tensor_bytes(table.spec(spec))
    alive: Num = base
    peak: Num = base
    starts: dict[int, list[Num]] = {}
    ends: dict[int, list[Num]] = {}
    for value in born:
        size = value.nbytes(table)
        starts.setdefault(value.first, []).append(size)
        ends.setdefault(value.last, []).append(size)
    for index in range(len(part.ops)):
        for size in starts.get(index, ()):
            alive = alive + size
        peak = np.maximum(peak, alive)
        for size in ends.get(index, ()):
            alive = alive - size
    return peak


def activation_peak_bytes(trace: Trace, env: Mapping[str, Num]) -> Num:
    """Peak of the transient memory of one step, by liveness over the trace (pass the fused, quantised one).

    Args:
        trace: what runs; a folded layer counts once, since its values are gone when the next one runs.
        env: ``B``, ``Q``, ``S``; arrays broadcast.
    """
    peak: Num = 0
    seen: set[tuple[int, int, int | None]] = set()
    for index, segment in enumerate(trace.segments):
        following = trace.segments[index + 1].part if index + 1 < len(trace.segments) else None
        key = (id(segment.part), id(following), segment.query_len)
        if key in seen:
            continue
        seen.add(key)
        sizes = env if segment.query_len is None else {**env, "Q": segment.query_len}

        def make(
            part: Part = segment.part, following: Part | None = following, sizes: Mapping[str, Num] = sizes
        ) -> Num:
            table = DimTable(sizes, smooth=False)
            alive = part_peak_bytes(part, sizes)
            for spec in _passing(part, following):
                alive = alive + tensor_bytes(table.spec(spec))
            return alive

        memo_key = (id(segment.part), id(following), env_key(sizes))
        peak = np.maximum(peak, _PEAKS.get(memo_key, (segment.part, following), make))
    return peak


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank by name.

    Args:
        weights: parameters as loaded.
        kv: the cache that the planned batch needs.
        activation: peak of a step.
        non_torch: context and communication buffers, outside the allocator.
        graph: captured graphs.
        reserved: what the user keeps free.
        available: what the engine may take of the device.
    """

    weights: float
    kv: float
    activation: float
    non_torch: float
    graph: float
    reserved: float
    available: float

    @property
    def total(self) -> float:
        """Everything that must fit."""
        return self.weights + self.kv + self.activation + self.non_torch + self.graph + self.reserved

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.total <= self.available

    @property
    def spare(self) -> float:
        """What is left; negative when it does not fit."""
        return self.available - self.total

    def gib(self) -> dict[str, float]:
        """Every line in GiB, by name."""
        lines = ("weights", "kv", "activation", "non_torch", "graph", "reserved", "total", "available")
        return {name: getattr(self, name) / GIB for name in lines}

    weights_gib = property(lambda self: self.weights / GIB)
    kv_gib = property(lambda self: self.kv / GIB)
    activation_gib = property(lambda self: self.activation / GIB)
    non_torch_gib = property(lambda self: self.non_torch / GIB)
    graph_gib = property(lambda self: self.graph / GIB)
    reserved_gib = property(lambda self: self.reserved / GIB)
    total_gib = property(lambda self: self.total / GIB)
    available_gib = property(lambda self: self.available / GIB)
