"""Collectives: what enters the wire is the local input buffer; :mod:`..comm_analytic` turns it into time."""

from __future__ import annotations

from tensor_cast.ir.record import OpRecord
from tensor_cast.ir.stages import BROADCAST, RECV
from tensor_cast.performance_model.base import CollectiveCost, OpCost, op_cost, total_bytes

#: Op name -> kind of collective.
KINDS = {
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional.all_to_all_single": "all_to_all",
    RECV: "p2p",
    # From the last stage to all others; what a step waits for is the copy that the first stage gets.
    BROADCAST: "p2p",
}


@op_cost(*KINDS)
def collective(op: OpRecord) -> OpCost:
    """``bytes_read`` and ``bytes_written`` are the local buffers.

    Raises:
        ValueError: the record names no axis or group size.
    """
    if op.axis is None or op.group_size is None:
        raise ValueError(f"{op.name} at {op.module!r} has no parallel axis")
    nbytes = total_bytes(op.inputs)
    return OpCost(
        op_class=None,
        bytes_read=nbytes,
        bytes_written=total_bytes(op.outputs),
        collective=CollectiveCost(KINDS[op.name], nbytes, op.axis, op.group_size, op.attr("pair")),
    )
