"""Work of which only the bytes are known: workloads that state what a step reads instead of naming a model."""

from __future__ import annotations

from tensor_cast.device.profile import OpClass
from tensor_cast.ir.record import OpRecord
from tensor_cast.performance_model.base import OpCost, op_cost, total_bytes

#: Reads its inputs once and computes nothing.
READ = "tensor_cast.read"


@op_cost(READ)
def read(op: OpRecord) -> OpCost:
    """Every byte of every input, once."""
    return OpCost(OpClass.POINTWISE, bytes_read=total_bytes(op.inputs))
