"""Matrix products. ``M`` rows of activations, ``N`` columns of output, ``K`` contracted, ``b`` batch of products.

FLOPs are 2*b*M*N*K; bytes are each operand read once (scales of quantised weights are operands too) and the output
written once.
"""

from __future__ import annotations

import numpy as np

from tensor_cast.device.profile import OpClass
from tensor_cast.ir.expr import Num
from tensor_cast.ir.record import OpRecord
from tensor_cast.performance_model.base import OpCost, dims, op_cost, tensor_numel, total_bytes


def compute_dtype(op: OpRecord) -> str:
    """Dtype the multiplies run in: what quantisation asked for, else that of the activations."""
    chosen = op.attr("compute_dtype")
    return chosen if isinstance(chosen, str) else op.inputs[0].dtype


#: Rows and columns of output that one tile of a product covers.
TILE = 128


def gemm_cost(op: OpRecord, flops: Num, contracted: Num, op_class: OpClass) -> OpCost:
    """Cost of a product that contracts ``contracted`` elements per output element.

    A product with one contracted element is an outer product (the rotary angles): pointwise work, no matrix unit.
    """
    outer = isinstance(contracted, int) and contracted == 1
    out = op.outputs[0]
    rows = tensor_numel(out) / dims(out)[-1]
    columns: Num = 0
    for spec in op.outputs:
        columns = columns + dims(spec)[-1]
    batch: Num = 1
    if op_class is OpClass.BATCHED_GEMM and len(out.shape) > 2:
        rows = dims(out)[-2]
        batch = tensor_numel(out) / (rows * columns)
    across = batch * np.maximum(columns / TILE, 1)
    return OpCost(
        op_class=OpClass.POINTWISE if outer else op_class,
        flops=flops / 2 if outer else flops,
        compute_dtype="" if outer else compute_dtype(op),
        bytes_read=total_bytes(op.inputs),
        bytes_written=total_bytes(op.outputs),
        tiles=np.maximum(rows / TILE, 1) * across,
        streams=across,
        variant=str(op.attr("kernel", "")),
    )


@op_cost("aten.linear")
def linear(op: OpRecord) -> OpCost:
    """``x[.., K] @ weight[N, K].T (+ bias[N])``."""
    k = op.inputs[1].shape[-1]
    return gemm_cost(op, 2 * tensor_numel(op.outputs[0]) * k, k, OpClass.GEMM)


@op_cost("tensor_cast.packed_linear")
def packed_linear(op: OpRecord) -> OpCost:
    """Linears with one input as a single product: x[.., K], weights[N_i, K] ... -> [.., N_i] ..."""
    k = op.inputs[1].shape[-1]
    flops: Num = 0
    for spec in op.outputs:
        flops = flops + 2 * tensor_numel(spec) * k
    return gemm_cost(op, flops, k, OpClass.GEMM)


@op_cost("aten.mm")
def mm(op: OpRecord) -> OpCost:
    """``a[M, K] @ b[K, N]``."""
    k = op.inputs[0].shape[-1]
    return gemm_cost(op, 2 * tensor_numel(op.outputs[0]) * k, k, OpClass.GEMM)


@op_cost("aten.addmm", "aten.baddbmm")
def addmm(op: OpRecord) -> OpCost:
    """``input + a[.., M, K] @ b[.., K, N]``."""
    k = op.inputs[1].shape[-1]
    op_class = OpClass.GEMM if op.name == "aten.addmm" else OpClass.BATCHED_GEMM
    return gemm_cost(op, 2 * tensor_numel(op.outputs[0]) * k, k, op_class)


@op_cost("aten.bmm", "aten.matmul")
def bmm(op: OpRecord) -> OpCost:
    """``a[.., M, K] @ b[.., K, N]``; batched when either operand has a batch dimension that both share."""
    k = op.inputs[0].shape[-1]
    batched = len(op.inputs[0].shape) > 2 and len(op.inputs[1].shape) > 2
    return gemm_cost(op, 2 * tensor_numel(op.outputs[0]) * k, k, OpClass.BATCHED_GEMM if batched else OpClass.GEMM)


@op_cost("aten.einsum")
def einsum(op: OpRecord) -> OpCost:
    """Two-operand einsum; attribute ``equation`` as torch writes it (``"bqhd,hdr->bqhr"``, no ellipsis).

    Raises:
        ValueError: the equation is missing or is not one of two operands.
    """
    equation = str(op.attr("equation", "")).replace(" ", "")
    operands, arrow, result = equation.partition("->")
    labels = operands.split(",")
    if not arrow or len(labels) != 2 or "." in equation:
        raise ValueError(f"{op.module or op.name}: cannot price einsum {equation!r}; need two operands and '->'")
    sizes: dict[str, Num] = {}
    for label, spec in zip(labels, op.inputs, strict=False):
        sizes.update(zip(label, spec.shape, strict=True))
    contracted: Num = 1
    for letter, size in sizes.items():
        if letter not in result:
            contracted = contracted * size
    batched = bool(set(labels[0]) & set(labels[1]) & set(result))
    flops = 2 * tensor_numel(op.outputs[0]) * contracted
    return gemm_cost(op, flops, contracted, OpClass.BATCHED_GEMM if batched else OpClass.GEMM)
