"""Choosing the next token from the logits."""

from __future__ import annotations

from tensor_cast.device.profile import OpClass
from tensor_cast.ir.opkinds import TRANSCENDENTAL
from tensor_cast.ir.record import OpRecord
from tensor_cast.performance_model.base import OpCost, op_cost, tensor_numel, total_bytes

_FP32 = 4


@op_cost("tensor_cast.sample")
def sample(op: OpRecord) -> OpCost:
    """logits[.., V] -> ids. Engines cast to fp32 and then scale (temperature), mask, normalise and pick.

    That is three sweeps over an fp32 copy: cast (read, write), scale and mask (read, write), softmax and pick (read).
    """
    elements = tensor_numel(op.inputs[0])
    return OpCost(
        OpClass.SAMPLING,
        flops=(2 * TRANSCENDENTAL + 2) * elements,
        bytes_read=total_bytes(op.inputs) + 2 * _FP32 * elements,
        bytes_written=2 * _FP32 * elements + total_bytes(op.outputs),
    )
