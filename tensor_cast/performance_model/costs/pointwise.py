"""Everything that runs on the vector units: pointwise ops, reductions, orderings, table look-ups and fused regions.

These kernels are bound by memory or by their launch; FLOPs count only where the device states a vector rate.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensor_cast.device.profile import OpClass
from tensor_cast.ir.expr import Num
from tensor_cast.ir.opkinds import LOOK_UPS, ORDERING, POINTWISE, REDUCTION, UPDATES
from tensor_cast.ir.record import Kind, OpRecord, TensorSpec
from tensor_cast.performance_model.base import OpCost, op_cost, tensor_numel, total_bytes


def _numel(specs: Iterable[TensorSpec]) -> Num:
    total: Num = 0
    for spec in specs:
        total = total + tensor_numel(spec)
    return total


@op_cost(*(name for name in POINTWISE if name not in (*LOOK_UPS, *UPDATES)))
def pointwise(op: OpRecord) -> OpCost:
    """Reads each input once, writes each output once."""
    return OpCost(
        OpClass.POINTWISE,
        flops=POINTWISE[op.name] * _numel(op.outputs),
        bytes_read=total_bytes(op.inputs),
        bytes_written=total_bytes(op.outputs),
    )


@op_cost(*REDUCTION)
def reduction(op: OpRecord) -> OpCost:
    """Folds a dimension; FLOPs go with the input."""
    return OpCost(
        OpClass.POINTWISE,
        flops=REDUCTION[op.name] * (tensor_numel(op.inputs[0]) if op.inputs else 0),
        bytes_read=total_bytes(op.inputs),
        bytes_written=total_bytes(op.outputs),
    )


@op_cost(*sorted(ORDERING))
def ordering(op: OpRecord) -> OpCost:
    """One pass over the input with a comparison per element; what is kept is written."""
    return OpCost(
        OpClass.POINTWISE,
        flops=_numel(op.inputs),
        bytes_read=total_bytes(op.inputs),
        bytes_written=total_bytes(op.outputs),
    )


@op_cost(*LOOK_UPS)
def look_up(op: OpRecord) -> OpCost:
    """Reads the indices and one table row for each row it writes (table[V,H], ids -> [..,H])."""
    return OpCost(
        OpClass.POINTWISE,
        bytes_read=total_bytes(op.outputs) + total_bytes(_indices(op)),
        bytes_written=total_bytes(op.outputs),
    )


@op_cost(*UPDATES)
def update(op: OpRecord) -> OpCost:
    """Reads indices and new values, and reads and writes as many elements of the buffer."""
    moved = op.inputs[1:]
    values = [spec for spec in moved if spec not in _indices(op)] or list(moved[:1])
    return OpCost(
        OpClass.POINTWISE,
        flops=POINTWISE[op.name] * _numel(values),
        bytes_read=total_bytes(moved) + total_bytes(values),
        bytes_written=total_bytes(values),
    )


def _indices(op: OpRecord) -> list[TensorSpec]:
    """The index operands: integers, whatever kind a recorder gave them."""
    integers = ("int64", "int32", "int16", "bool")
    return [spec for spec in op.inputs[1:] if spec.kind is Kind.INDEX or spec.dtype in integers]


@op_cost("tensor_cast.fused")
def fused(op: OpRecord) -> OpCost:
    """A region that :mod:`tensor_cast.ir.fuse` merged; its inputs and outputs are what crosses the border."""
    return OpCost(
        OpClass.POINTWISE,
        flops=op.attr("flops", 0),
        bytes_read=total_bytes(op.inputs),
        bytes_written=total_bytes(op.outputs),
    )
