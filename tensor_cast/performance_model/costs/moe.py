"""Routed experts: a grouped product over the experts that a batch touches.

``T`` tokens enter the layer on this rank, each picks ``k`` of ``E`` experts; this rank holds ``E_local`` of them, each
with intermediate width ``I`` (already divided by the tensor parallelism inside experts).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tensor_cast.device.profile import OpClass
from tensor_cast.ir.expr import Num
from tensor_cast.ir.record import Kind, OpRecord
from tensor_cast.performance_model.base import OpCost, op_cost, tensor_bytes, tensor_numel, total_bytes

#: Rows that one tile of a grouped product holds, fewest and most: kernels choose by the rows of an expert. Half a tile
#: is empty on average for each expert that is visited.
MIN_TILE_ROWS, TILE_ROWS = 16, 64
#: Columns of the intermediate width that one tile covers.
TILE_COLUMNS = 64


@lru_cache(maxsize=64)
def _popularity(num_experts: int, top_k: int, skew: float) -> np.ndarray:
    """Chance of each expert to be among a token's top-k: proportional to rank**-skew, none above 1."""
    weights = np.arange(1, num_experts + 1, dtype=float) ** -skew
    chance = np.zeros(num_experts)
    free = np.ones(num_experts, dtype=bool)
    # What a capped expert cannot take goes to the others in proportion.
    while True:
        left = top_k - np.count_nonzero(~free)
        share = left * weights / weights[free].sum()
        over = free & (share >= 1)
        if not over.any() or left <= 0:
            chance[free] = share[free]
            chance[~free] = 1
            return chance
        free &= ~over


def touched_experts(tokens: Num, num_experts: int, top_k: int, skew: float = 0.0) -> Num:
    """Expected number of distinct experts that ``tokens`` tokens choose, of all ``num_experts``.

    Uniform routing gives ``E * (1 - (1 - k/E)**T)``: continuous, rising, never above E. With ``skew`` > 0 expert i is
    chosen in proportion to ``i**-skew``, so that fewer are touched.
    """
    if skew == 0.0:
        return num_experts * (1 - (1 - top_k / num_experts) ** tokens)
    miss = 1 - _popularity(num_experts, top_k, skew)
    if np.ndim(tokens) == 0:
        return float(np.sum(1 - miss ** float(tokens)))
    return np.sum(1 - miss ** np.asarray(tokens, dtype=float)[..., None], axis=-1)


@op_cost("tensor_cast.grouped_experts")
def grouped_experts(op: OpRecord) -> OpCost:
    """hidden[T,H], topk_ids[T,k], topk_weights[T,k], gate_up[E_local,2I,H], down[E_local,H,I] -> [T,H].

    Biases and scales may follow. Reads the weights of touched experts only; activations go through memory between the
    two products. Attribute ``skew`` as in :func:`touched_experts`; ``padding`` is what a kernel that pads the matrices
    reads and multiplies for each of their elements.
    """
    hidden = op.inputs[0]
    weights = [spec for spec in op.inputs if spec.kind is Kind.WEIGHT]
    matrices = [spec for spec in weights if len(spec.shape) == 3 and "scale" not in spec.name][:2]
    width = hidden.shape[-1]
    local = matrices[0].shape[0]
    # Widths by element counts, so that a checkpoint that stores the transposed matrices is read right.
    up, inter = (tensor_numel(spec) // (local * width) for spec in matrices)
    experts, top_k = int(op.attr("num_experts", local)), int(op.attr("top_k"))

    tokens = tensor_numel(hidden) / width
    touched = op.attr("touched")
    if touched is None:
        touched = touched_experts(tokens, experts, top_k, float(op.attr("skew", 0.0))) * local / experts
    rows = op.attr("rows", tokens * top_k * local / experts)
    flops_per_row = 2 * width * (up + inter)
    padding = float(op.attr("padding", 1.0))
    out = op.outputs[0]
    tile = np.clip(rows / touched, MIN_TILE_ROWS, TILE_ROWS)
    # Each expert visited has a tile that is half empty on average, and one tile at least.
    tiles = np.maximum(touched, rows / tile + touched / 2)
    across = np.maximum(inter / TILE_COLUMNS, 1)
    # permuted input, both intermediates and the expert outputs, each written once and read once
    passed_on = rows * (width + up + inter + width) * (tensor_bytes(out) / tensor_numel(out))
    return OpCost(
        op_class=OpClass.MOE,
        flops=rows * flops_per_row,
        padded_flops=(rows + touched * tile / 2) * flops_per_row * padding,
        tiles=tiles * across,
        streams=touched * across,
        compute_dtype=str(op.attr("compute_dtype", hidden.dtype)),
        bytes_read=touched / local * padding * total_bytes(weights) + tensor_bytes(hidden) + passed_on,
        bytes_written=tensor_bytes(out) + passed_on,
        variant=str(op.attr("kernel", "")),
    )
