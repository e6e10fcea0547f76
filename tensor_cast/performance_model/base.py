"""What an op costs, free of any device: FLOPs by dtype, bytes moved, bytes on the wire.

A cost function takes an :class:`~tensor_cast.ir.record.OpRecord` whose dimensions are numbers (ints or numpy arrays,
one entry per point of a grid) and returns an :class:`OpCost`; it is plain arithmetic, so one call prices a point or a
grid. Adding an estimator is one decorated function::

    @op_cost("aten.bmm")
    def bmm(op: OpRecord) -> OpCost: ...

An op without a cost function is *unpriced*: it adds no time and shows in the coverage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tensor_cast.device.profile import OpClass
from tensor_cast.dtypes import bits_of
from tensor_cast.ir.expr import Dim, Expr, Num
from tensor_cast.ir.opkinds import is_view
from tensor_cast.ir.record import OpRecord, TensorSpec
from tensor_cast.registry import Registry

__all__ = [
    "COSTS",
    "CollectiveCost",
    "CostFunction",
    "DimTable",
    "OpCost",
    "coverage",
    "dims",
    "is_priced",
    "op_cost",
    "op_counts",
    "tensor_bytes",
    "tensor_numel",
    "total_bytes",
    "unpriced",
]


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What goes on the wire.

    ``kind`` is ``all_reduce | all_gather | reduce_scatter | all_to_all | p2p``, ``nbytes`` the local input buffer of
    one call, ``axis`` the parallel axis and ``group_size`` its ranks. ``pair`` names the two members of the axis that
    a ``p2p`` joins, sender first.
    """

    kind: str
    nbytes: Num
    axis: str
    group_size: int
    pair: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class OpCost:
    """Work of one call of an op on one rank.

    Args:
        op_class: which kernels it runs on; None for a collective or an op that launches nothing.
        flops: useful FLOPs (2 per multiply-add).
        compute_dtype: dtype the multiplies run in; empty for work on the vector units.
        bytes_read, bytes_written: least traffic with memory.
        padded_flops: FLOPs the kernel executes, padding included, where that is more than ``flops``.
        tiles: independent pieces that the kernel can spread over cores; None where that does not matter. It grows
            smoothly with size, never below what one row of tiles gives.
        streams: independent pieces of its memory traffic; None where they are the tiles. Tiles that read the same
            weights are one stream, so that a product which spreads its rows over more tiles does not read them faster.
        variant: more specific kernel name, looked up before the dtype (``"fp8_block"``).
        cache_dtype: what the KV cache that the op reads is stored in; empty where it reads none.
        collective: set for an op that crosses ranks.
        free: launches no kernel (its bytes are charged elsewhere).
    """

    op_class: OpClass | None
    flops: Num = 0
    compute_dtype: str = ""
    bytes_read: Num = 0
    bytes_written: Num = 0
    padded_flops: Num | None = None
    tiles: Num | None = None
    streams: Num | None = None
    variant: str = ""
    cache_dtype: str = ""
    collective: CollectiveCost | None = None
    free: bool = False

    @property
    def nbytes(self) -> Num:
        """All traffic with memory."""
        return self.bytes_read + self.bytes_written


CostFunction = Callable[[OpRecord], OpCost]
COSTS: Registry[CostFunction] = Registry("op")

#: An op that launches no kernel.
FREE = OpCost(op_class=None, free=True)


def op_cost(*names: str) -> Callable[[CostFunction], CostFunction]:
    """Decorator: the function prices the ops called ``names`` (``aten.linear``, without overload)."""
    return COSTS.register(*names)


def dims(spec: TensorSpec) -> tuple[Num, ...]:
    """Dimensions of a tensor whose dimensions are numbers."""
    return spec.shape


def tensor_numel(spec: TensorSpec) -> Num:
    """Elements of a tensor whose dimensions are numbers."""
    total: Num = 1
    for dim in spec.shape:
        total = total * dim
    return total


def tensor_bytes(spec: TensorSpec) -> Num:
    """Bytes of a tensor whose dimensions are numbers."""
    return tensor_numel(spec) * (bits_of(spec.dtype) / 8)


def total_bytes(specs: Iterable[TensorSpec]) -> Num:
    """Bytes of several tensors."""
    total: Num = 0
    for spec in specs:
        total = total + tensor_bytes(spec)
    return total


class DimTable:
    """Evaluates the dimensions of ops under one environment, each distinct expression once.

    Args:
        env: values of ``B``, ``Q``, ``S``; arrays broadcast against each other.
        smooth: see :meth:`tensor_cast.ir.expr.Expr.evaluate`. Pricing is smooth, so that time has no steps that
            only come from block or shard sizes.
    """

    def __init__(self, env: Mapping[str, Num], *, smooth: bool = True) -> None:
        self.env = env
        self.smooth = smooth
        self._known: dict[Expr, Num] = {}

    def value(self, dim: Dim) -> Num:
        """Value of one dimension."""
        if not isinstance(dim, Expr):
            return dim
        found = self._known.get(dim)
        if found is None:
            found = self._known[dim] = dim.evaluate(self.env, smooth=self.smooth)
        return found

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """The tensor with numbers for dimensions."""
        return TensorSpec(tuple(map(self.value, spec.shape)), spec.dtype, spec.kind, spec.name)

    def op(self, op: OpRecord) -> OpRecord:
        """The op with numbers for dimensions and for attributes that are size expressions."""
        return replace(
            op,
            inputs=tuple(map(self.spec, op.inputs)),
            outputs=tuple(map(self.spec, op.outputs)),
            attrs=tuple((key, self.value(value) if isinstance(value, Expr) else value) for key, value in op.attrs),
        )


def is_priced(op: OpRecord) -> bool:
    """Whether some cost function takes this op."""
    return op.name in COSTS


def op_counts(ops: Iterable[OpRecord]) -> tuple[int, int]:
    """(priced, all) calls of non-view ops."""
    priced = total = 0
    for op in ops:
        if is_view(op.name):
            continue
        total += op.repeat
        priced += op.repeat if is_priced(op) else 0
    return priced, total


def coverage(ops: Iterable[OpRecord]) -> float:
    """Share of the non-view ops that are priced, weighted by repeat; 1.0 for a trace without any."""
    priced, total = op_counts(ops)
    return priced / total if total else 1.0


def unpriced(ops: Iterable[OpRecord]) -> dict[str, int]:
    """Names of the ops no cost function takes, with how often one step runs each."""
    out: dict[str, int] = {}
    for op in ops:
        if not is_view(op.name) and not is_priced(op):
            out[op.name] = out.get(op.name, 0) + op.repeat
    return out
