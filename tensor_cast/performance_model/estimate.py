"""Prices a trace: seconds of each scope for whole grids of sizes, and a full breakdown of single points.

The fast path works part by part. A part is quantised and fused once, priced once for each grid of sizes, and both are
remembered, so that layouts which share parts (attention by tp and dcp, feed-forward by tp and ep) share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tensor_cast import parallel as parallel_axes
from tensor_cast.device.profile import DeviceProfile, OpClass
from tensor_cast.device.topology import spans
from tensor_cast.engine.profile import EngineProfile
from tensor_cast.errors import UnpricedOpError
from tensor_cast.ir.expr import Num
from tensor_cast.ir.fuse import fuse
from tensor_cast.ir.pack import pack
from tensor_cast.ir.quantize import quantize
from tensor_cast.ir.record import OpRecord, Part, Scope, Segment, Trace
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model import base
from tensor_cast.performance_model.analytic import Bound, OpTime, kernel_seconds, kernel_time
from tensor_cast.performance_model.comm_analytic import collective_seconds, collective_time
from tensor_cast.performance_model.memo import Memo, env_key
from tensor_cast.quant import QuantConfig, QuantScheme

__all__ = ["OpEstimate", "StepEstimate", "StepEstimator", "as_run", "prepare"]

_PREPARED: Memo[Part] = Memo(4096)
_PRICED: Memo[dict[Scope, Num]] = Memo(4096)
_BOUNDS: Memo[dict[Bound, Num]] = Memo(4096)


#: Attention whose kernels compute whole tiles of heads.
_TILED = "tensor_cast.sparse_mla_attention"


def prepare(part: Part, quant: QuantConfig, *, fusion: bool = True, head_tiles: tuple[int, ...] = ()) -> Part:
    """``part`` as it runs: quantised, then packed and fused. Remembered, so equal requests give the same object.

    ``head_tiles`` are the engine's (``sparse_head_tiles``); its sparse attention is marked with them.
    """

    def make() -> Part:
        quantised = _tiled(quantize(part, quant), head_tiles)
        return fuse(pack(quantised)) if fusion else quantised

    return _PREPARED.get((id(part), quant, fusion, head_tiles), part, make)


def _tiled(part: Part, tiles: tuple[int, ...]) -> Part:
    if not tiles or all(op.name != _TILED for op in part.ops):
        return part
    mark = ("head_tiles", tiles)
    ops = tuple(replace(op, attrs=(*op.attrs, mark)) if op.name == _TILED else op for op in part.ops)
    return replace(part, ops=ops)


def as_run(quant: QuantConfig, device: DeviceProfile) -> QuantConfig:
    """``quant`` as ``device`` runs it: products in a type that it only emulates are weight-only.

    Such kernels (Marlin and its kin) widen the weights themselves, so nobody quantises activations for them.
    """

    def scheme(chosen: QuantScheme) -> QuantScheme:
        emulated = chosen.activation_dtype in device.emulates
        return replace(chosen, activation_dtype=None, kernel="") if emulated else chosen

    return replace(quant, linear=scheme(quant.linear), experts=scheme(quant.experts))


@dataclass(frozen=True, slots=True)
class OpEstimate:
    """One row of a breakdown: an op of one segment at one point.

    Args:
        repeat: calls in the step; ``layers``: the layers that run it.
        seconds: of one call; ``total_s`` of all.
        flops, nbytes: of one call (local buffer for a collective).
        bound: ``compute | memory | latency | network | free | unpriced``.
        source: where the coefficients come from.
    """

    name: str
    module: str
    op_class: str
    scope: Scope
    layers: tuple[int, ...]
    repeat: int
    seconds: float
    flops: float
    nbytes: float
    bound: str
    source: str

    @property
    def total_s(self) -> float:
        """Seconds of all calls in the step."""
        return self.seconds * self.repeat


@dataclass(frozen=True)
class StepEstimate:
    """One step at one point: every op, and the host's share.

    ``device_s`` is the sum over ops, ``step_s`` adds what the host does not hide.
    """

    ops: tuple[OpEstimate, ...]
    host_s: float
    coverage: float
    unpriced: Mapping[str, int]

    @cached_property
    def device_s(self) -> float:
        """Seconds the device is busy."""
        return sum(op.total_s for op in self.ops)

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.device_s + self.host_s

    def _sum_by(self, key: Callable[[OpEstimate], str]) -> dict[str, float]:
        out: dict[str, float] = {}
        for op in self.ops:
            out[key(op)] = out.get(key(op), 0.0) + op.total_s
        return dict(sorted(out.items(), key=lambda item: -item[1]))

    def by_class(self) -> dict[str, float]:
        """Seconds by op class (``gemm``, ``all_reduce`` ...), longest first."""
        return self._sum_by(lambda op: op.op_class)

    def by_bound(self) -> dict[str, float]:
        """Seconds by what bounds the ops, longest first."""
        return self._sum_by(lambda op: op.bound)

    def by_scope(self) -> dict[str, float]:
        """Seconds by scope, longest first."""
        return self._sum_by(lambda op: str(op.scope))

    def by_layer(self) -> dict[int | None, float]:
        """Seconds by layer; None holds what stands outside the layers."""
        out: dict[int | None, float] = {}
        for op in self.ops:
            for layer in op.layers or (None,):
                out[layer] = out.get(layer, 0.0) + op.total_s / max(len(op.layers), 1)
        return out

    @property
    def bound(self) -> str:
        """What most of the time goes to."""
        return next(iter(self.by_bound()), "latency")


class StepEstimator:
    """Prices one trace on one device.

    Args:
        trace: what one rank runs, unquantised and unfused.
        parallel: the layout; tells which ranks a collective's axis joins.
        quant: schemes of weights and cache.
        fusion: pack linears and merge pointwise regions first; without it every eager op is a kernel.
        strict: refuse a trace with an op that no cost function prices.
        moe_skew: see :func:`tensor_cast.performance_model.costs.moe.touched_experts`.
        stage: pipeline stage whose ranks run the trace.

    Raises:
        UnpricedOpError: under ``strict``.
        ConfigError: the device cannot compute in a dtype that the trace needs (raised when priced).
    """

    def __init__(
        self,
        trace: Trace,
        *,
        device: DeviceProfile,
        engine: EngineProfile,
        parallel: ParallelConfig,
        quant: QuantConfig,
        fusion: bool = True,
        strict: bool = False,
        moe_skew: float = 0.0,
        stage: int = 0,
    ) -> None:
        self.trace = trace
        self.device = device
        self.engine = engine
        self.parallel = parallel
        self.quant = quant
        self.fusion = fusion
        self.moe_skew = moe_skew
        self.stage = stage
        run = as_run(quant, device)
        self.segments: tuple[Segment, ...] = tuple(
            replace(segment, part=prepare(segment.part, run, fusion=fusion, head_tiles=engine.sparse_head_tiles))
            for segment in trace.segments
        )
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._reach: dict[str, Hashable] = {}
        if strict and self.unpriced:
            listed = ", ".join(f"{name} ({count}x)" for name, count in sorted(self.unpriced.items()))
            raise UnpricedOpError(
                f"{trace.model_id}: no cost function for {listed}; register one with @op_cost or drop --strict"
            )

    @cached_property
    def unpriced(self) -> Mapping[str, int]:
        """Ops without a cost function, with their calls in one step."""
        return base.unpriced(self.prepared.ops)

    @cached_property
    def coverage(self) -> float:
        """Share of the non-view ops of the unfused trace that are priced, weighted by repeat."""
        priced = total = 0
        for segment in self.trace.segments:
            part_priced, part_total = _op_counts(segment.part)
            priced += part_priced * segment.repeat
            total += part_total * segment.repeat
        return priced / total if total else 1.0

    @cached_property
    def prepared(self) -> Trace:
        """The trace as it runs: quantised and fused."""
        return replace(self.trace, segments=self.segments)

    # -- fast path ----------------------------------------------------------------------------------------------
    def scope_seconds(self, env: Mapping[str, Num]) -> dict[Scope, Num]:
        """Device seconds of a step by scope.

        Args:
            env: values of ``B``, ``Q``, ``S``; arrays broadcast, and the result has their shape.
        """
        return self.seconds(env, tuple(Scope))

    def seconds(
        self,
        env: Mapping[str, Num],
        scopes: Collection[Scope],
        *,
        draft_env: Mapping[str, Num] | None = None,
    ) -> dict[Scope, Num]:
        """As :meth:`scope_seconds`, for some scopes only.

        A mixed step is priced scope by scope, each at sizes of its own (``TOKEN`` at all tokens of the step).
        ``draft_env`` holds the sizes of segments that set a query length of their own; by default ``env`` with that
        query length for ``Q``.
        """
        wanted = frozenset(scopes)
        shape = np.broadcast_shapes(*(np.shape(value) for value in env.values()))
        totals: dict[Scope, Num] = {scope: np.zeros(shape) for scope in Scope if scope in wanted}
        for segment in self.segments:
            sizes = self._env_of(segment, env, draft_env)
            for scope, seconds in self._part_seconds(segment.part, sizes, wanted).items():
                totals[scope] = totals[scope] + seconds * segment.repeat
        return totals

    def segment_seconds(self, env: Mapping[str, Num], scopes: Collection[Scope]) -> list[tuple[Segment, Num]]:
        """Seconds of one run of each segment, over ``scopes``, in program order; times ``segment.repeat`` in a step."""
        wanted = frozenset(scopes)
        return [
            (segment, sum(self._part_seconds(segment.part, self._env_of(segment, env), wanted).values()))
            for segment in self.segments
        ]

    @staticmethod
    def _env_of(
        segment: Segment, env: Mapping[str, Num], draft_env: Mapping[str, Num] | None = None
    ) -> Mapping[str, Num]:
        if segment.query_len is None:
            return env
        return draft_env if draft_env is not None else {**env, "Q": segment.query_len}

    def _part_seconds(self, part: Part, env: Mapping[str, Num], scopes: frozenset[Scope]) -> Mapping[Scope, Num]:
        key = self._price_key(part, env, scopes)
        return _PRICED.get(key, (part, self.device), lambda: self._price(part, env, scopes))

    def _price_key(self, part: Part, env: Mapping[str, Num], scopes: frozenset[Scope]) -> tuple[Hashable, ...]:
        return (
            id(part),
            self.device.name,
            id(self.device),
            self.moe_skew,
            scopes,
            tuple((axis, self._reach_of(axis)) for axis in _axes(part)),
            env_key(env),
        )

    def _price(self, part: Part, env: Mapping[str, Num], scopes: frozenset[Scope]) -> dict[Scope, Num]:
        table = base.DimTable(env)
        totals: dict[Scope, Num] = {}
        for op in part.ops:
            if op.scope not in scopes:
                continue
            cost = self._cost(op, table)
            if cost is None:
                continue
            if cost.collective is None:
                seconds = kernel_seconds(cost, self.device)
            else:
                wire = cost.collective
                seconds = collective_seconds(self.device, wire.kind, wire.nbytes, self._group(wire))
            totals[op.scope] = totals.get(op.scope, 0.0) + seconds * op.repeat
        return totals

    def bound_seconds(self, env: Mapping[str, Num], scopes: Collection[Scope]) -> dict[Bound, Num]:
        """Seconds of the ops of ``scopes`` by what bounds each op; arrays as in :meth:`seconds`.

        An op may be bound by one resource at one point of the grid and by another at the next.
        """
        wanted = frozenset(scopes)
        shape = np.broadcast_shapes(*(np.shape(value) for value in env.values()))
        totals: dict[Bound, Num] = {bound: np.zeros(shape) for bound in Bound}
        for segment in self.segments:
            sizes = self._env_of(segment, env)
            key = (*self._price_key(segment.part, sizes, wanted), "bound")

            def make(part: Part = segment.part, sizes: Mapping[str, Num] = sizes) -> dict[Bound, Num]:
                return self._price_bounds(part, sizes, wanted)

            for bound, seconds in _BOUNDS.get(key, (segment.part, self.device), make).items():
                totals[bound] = totals[bound] + seconds * segment.repeat
        return totals

    def _price_bounds(self, part: Part, env: Mapping[str, Num], scopes: frozenset[Scope]) -> dict[Bound, Num]:
        table = base.DimTable(env)
        totals: dict[Bound, Num] = {}
        for op in part.ops:
            cost = self._cost(op, table) if op.scope in scopes else None
            if cost is None or cost.free:
                continue
            if cost.collective is None:
                time = kernel_time(cost, self.device)
            else:
                wire = cost.collective
                time = collective_time(self.device, wire.kind, wire.nbytes, self._group(wire))
            for bound, seconds in time.by_bound():
                totals[bound] = totals.get(bound, 0.0) + seconds * op.repeat
        return totals

    def _cost(self, op: OpRecord, table: base.DimTable) -> base.OpCost | None:
        function = base.COSTS.find(op.name)
        if function is None:
            return None
        sized = table.op(op)
        if self.moe_skew and op.name == "tensor_cast.grouped_experts":
            sized = replace(sized, attrs=(*sized.attrs, ("skew", self.moe_skew)))
        return function(sized)

    def ranks_of(self, axis: str) -> tuple[int, ...]:
        """Global ranks of the group of ``axis`` that the stage's first rank is in."""
        if axis not in self._ranks:
            self._ranks[axis] = tuple(parallel_axes.axis_ranks(self.parallel, axis, stage=self.stage))
        return self._ranks[axis]

    def _reach_of(self, axis: str) -> Hashable:
        """What decides a collective's time: the tiers its group crosses, so that stages alike share prices.

        Pairs of stages lie differently each: there it is the ranks themselves.
        """
        if axis not in self._reach:
            ranks = self.ranks_of(axis)
            levels = tuple((span.tier.name, span.size, span.fewest) for span in spans(self.device, ranks))
            self._reach[axis] = ranks if axis == "pp" else levels
        return self._reach[axis]

    def _group(self, wire: base.CollectiveCost) -> tuple[int, ...]:
        ranks = self.ranks_of(wire.axis)
        if len(ranks) != wire.group_size:
            raise ValueError(
                f"the trace has {wire.group_size} ranks on axis {wire.axis!r}, the layout {len(ranks)}: "
                "it was traced for another layout"
            )
        return ranks if wire.pair is None else tuple(ranks[member] for member in wire.pair)

    # -- one point ----------------------------------------------------------------------------------------------
    def estimate(self, env: Mapping[str, Num]) -> StepEstimate:
        """Every op of one step at one point (``env`` holds plain numbers)."""
        rows: list[OpEstimate] = []
        for segment in self.segments:
            table = base.DimTable(self._env_of(segment, env))
            rows.extend(self._row(op, segment, table) for op in segment.part.ops)
        return StepEstimate(tuple(rows), self.engine.host_step_s, self.coverage, self.unpriced)

    def _row(self, op: OpRecord, segment: Segment, table: base.DimTable) -> OpEstimate:
        cost = self._cost(op, table)
        op_class, bound = "unpriced", "unpriced"
        time = OpTime(0.0, 0.0, 0.0, 0.0, 0.0, "no cost function")
        flops: Num = 0.0
        nbytes: Num = 0.0
        if cost is not None:
            flops, nbytes = cost.flops, cost.nbytes
            if cost.collective is not None:
                wire = cost.collective
                op_class, nbytes = wire.kind, wire.nbytes
                time = collective_time(self.device, wire.kind, wire.nbytes, self._group(wire))
            else:
                op_class = str(cost.op_class) if isinstance(cost.op_class, OpClass) else "free"
                time = kernel_time(cost, self.device)
            bound = "free" if cost.free else str(time.bound)
        return OpEstimate(
            op.name,
            segment.module_of(op),
            op_class,
            op.scope,
            segment.layers,
            op.repeat * segment.repeat,
            float(time.seconds),
            float(flops),
            float(nbytes),
            bound,
            time.source,
        )


def _op_counts(part: Part) -> tuple[int, int]:
    """(priced, all) non-view ops that one run of the part calls."""
    return _COUNTS.get(id(part), part, lambda: base.op_counts(part.ops))


def _axes(part: Part) -> Sequence[str]:
    return _AXES.get(id(part), part, lambda: tuple(sorted({op.axis for op in part.ops if op.axis is not None})))


_AXES: Memo[tuple[str, ...]] = Memo(4096)
_COUNTS: Memo[tuple[int, int]] = Memo(4096)


def clear_memos() -> None:
    """Forgets every prepared and priced part (for tests and benchmarks)."""
    for memo in (_PREPARED, _PRICED, _BOUNDS, _AXES, _COUNTS):
        memo.clear()
