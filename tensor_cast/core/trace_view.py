"""A trace as the user sees it: sizes filled in where they are given, and the public JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.core.user_config import UserInputConfig
from tensor_cast.dtypes import bits_of
from tensor_cast.engine.dcp import get_semantics
from tensor_cast.errors import ConfigError
from tensor_cast.ir.expr import Dim, Expr, substitute, symbol
from tensor_cast.ir.fuse import fuse_trace
from tensor_cast.ir.index_sharing import Handover, hand_over
from tensor_cast.ir.program import Layout
from tensor_cast.ir.quantize import quantize_trace
from tensor_cast.ir.record import OpRecord, TensorSpec, Trace
from tensor_cast.model_catalog import load_model_config
from tensor_cast.performance_model import costs as _registers_cost_functions  # noqa: F401
from tensor_cast.performance_model.base import coverage, unpriced
from tensor_cast.quant import QuantConfig


@dataclass(frozen=True)
class TraceView:
    """A trace with some sizes filled in.

    Args:
        trace: the symbolic trace.
        ops: its ops in order, with the given sizes filled in.
        symbols: the symbols that still stand in a shape.
        coverage: priced / all non-view ops, weighted by repeat.
        unpriced: name -> calls of ops without a cost function.
        handover: what is done where pipeline stages lack the top-k indices that their first layers reuse.
    """

    trace: Trace
    ops: tuple[OpRecord, ...]
    symbols: tuple[str, ...]
    coverage: float
    unpriced: Mapping[str, int]
    handover: Handover

    @property
    def title(self) -> str:
        """Model, phase and layout in one line."""
        experts = any(op.name == "tensor_cast.grouped_experts" for op in self.trace.ops)
        axes = dict(self.trace.layout)
        stage = axes.pop("stage", None)
        sizes = {axis: n for axis, n in axes.items() if n > 1 and (experts or axis != "moe_tp")}
        layout = " ".join(f"{axis}{size}" for axis, size in sizes.items()) or "one rank"
        where = "" if stage is None else f", stage {stage}"
        return f"{self.trace.model_id}, {self.trace.phase} step, {layout}{where}"

    def collectives_of(self, axis: str) -> TraceView:
        """The same trace showing only the collectives of one parallel axis."""
        return replace(self, ops=tuple(op for op in self.ops if op.axis == axis))

    def to_json(self) -> dict[str, Any]:
        """``{"symbols", "ops", "coverage"}`` with ops as documented in docs/trace.md."""
        return {
            "symbols": list(self.symbols),
            "ops": [_op_json(op) for op in self.ops],
            "coverage": self.coverage,
            "replicated": list(self.trace.replicated),
            "unpriced": dict(self.unpriced),
            "unsafe_layers": list(self.handover.unsafe),
            "own_indexer_layers": list(self.handover.own_indexers),
        }


def _op_json(op: OpRecord) -> dict[str, Any]:
    size: Dim | None = None
    if op.is_collective:
        total = Expr.wrap(0)
        for tensor in op.inputs:
            total = total + Expr.wrap(tensor.numel) * (bits_of(tensor.dtype) // 8)
        size = total.simplified()
    return {
        "name": op.name,
        "module": op.module,
        "repeat": op.repeat,
        "inputs": [t.to_json() for t in op.inputs],
        "outputs": [t.to_json() for t in op.outputs],
        "axis": op.axis,
        "group_size": op.group_size,
        "bytes": str(size) if isinstance(size, Expr) else size,
    }


def _fill(op: OpRecord, env: Mapping[str, Dim]) -> OpRecord:
    def fill(tensor: TensorSpec) -> TensorSpec:
        return replace(tensor, shape=tuple(substitute(d, env) for d in tensor.shape))

    return replace(op, inputs=tuple(map(fill, op.inputs)), outputs=tuple(map(fill, op.outputs)))


def view_trace(
    config: UserInputConfig,
    *,
    batch_size: int | None = None,
    query_len: int | None = None,
    context_len: int | None = None,
    stage: int | None = None,
    use_cache: bool = True,
    cache_dir: Path | None = None,
) -> TraceView:
    """Trace one step of one layout.

    Args:
        config: model, layout, phase, quantisation, fusion.
        batch_size: requests of one rank (B). Each size left out stays a symbol.
        query_len: tokens of a request in this step (Q).
        context_len: tokens of a request in the cache, this step's included (S); 0 means a fresh prompt (S = Q).
        stage: which pipeline stage; the first by default.
        use_cache: read and fill the trace cache.
        cache_dir: folder of the trace cache; None takes the user's.

    Raises:
        ConfigError, LegalityError, UnsupportedModelError: see :mod:`tensor_cast.errors`.
    """
    model = load_model_config(config.model)
    quant = QuantConfig.resolve(
        model,
        config.quantize_linear_action,
        config.quantize_attention_action,
        dcp_semantics=config.get_dcp_semantics(),
    )
    parallel = config.check(model, quant)
    env = _sizes(config, batch_size, query_len, context_len)
    if stage is not None and not 0 <= stage < config.pp_size:
        raise ConfigError(f"--stage must be at least 0 and below pp_size {config.pp_size}, found {stage}")
    partition = config.get_partition(model)
    layout = Layout(
        parallel,
        config.phase,
        get_semantics(config.get_dcp_semantics()).name,
        config.get_block_size(model),
        config.num_mtp_tokens,
    )
    library = TraceLibrary(model, cache_dir=cache_dir, use_cache=use_cache)
    handover = hand_over(model, partition, config.dsa_split)
    trace = quantize_trace(library.stages(layout, partition, handover=handover)[stage or 0], quant)
    if config.fusion:
        trace = fuse_trace(trace)
    ops = tuple(
        _fill(op, env if segment.query_len is None else {**env, "Q": segment.query_len})
        for segment in trace.segments
        for op in segment.ops()
    )
    left = sorted({s for op in ops for t in (*op.inputs, *op.outputs) for d in t.shape for s in _symbols(d)})
    return TraceView(trace, ops, tuple(left), coverage(trace.ops), unpriced(trace.ops), handover)


def _symbols(dim: Dim) -> frozenset[str]:
    return dim.symbols() if isinstance(dim, Expr) else frozenset()


def _sizes(
    config: UserInputConfig, batch_size: int | None, query_len: int | None, context_len: int | None
) -> dict[str, Dim]:
    """The sizes that are given. A fresh prompt (``context_len`` 0) has S = Q, be Q a number or the symbol."""
    env: dict[str, Dim] = {}
    if batch_size is not None:
        env["B"] = batch_size
    if query_len is not None:
        env["Q"] = query_len
    if context_len:
        env["S"] = context_len
        if query_len is not None:
            config.model_copy(update={"query_length": query_len, "context_length": context_len}).get_sizes()
    elif context_len == 0:
        env["S"] = env.get("Q", symbol("Q"))
    return env
