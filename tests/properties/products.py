"""FLOPs of the matrix products and the attention of a trace, by the module that spends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from embedded import ops_of

from tensor_cast.ir.record import OpRecord, Trace
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig
from tensor_cast.performance_model import costs as _registers  # noqa: F401
from tensor_cast.performance_model.base import COSTS

_LINEAR = ("aten.linear", "aten.addmm", "aten.mm")
_BATCHED = ("aten.bmm", "aten.matmul", "aten.einsum")
_ATTENTION = ("tensor_cast.attention", "tensor_cast.mla_attention")
_EXPERTS = "tensor_cast.grouped_experts"


def exactly(flops: object) -> Fraction:
    """A count that must be whole or a clean fraction (experts that a batch shares)."""
    return Fraction(float(flops)).limit_denominator(10**6)  # type: ignore[arg-type]


def product_flops(trace: Trace, env: Mapping[str, int], parallel: ParallelConfig) -> Counter[tuple[str, str]]:
    """(module, kind) -> FLOPs of one rank times the ranks that share the work of one TP group.

    ``kind`` is ``linear``, ``attention``, ``keys`` and ``values`` (the absorbed products of MLA) or ``experts``, which
    counts all ranks and the tokens of all DP ranks.
    """
    out: Counter[tuple[str, str]] = Counter()
    for module, op in ops_of(trace):
        kind = kind_of(op)
        if kind is None:
            continue
        sized = op.at(env)
        ranks = Fraction(parallel.tensor_parallel_size)
        if kind == "experts":
            local = next(spec.shape[0] for spec in sized.inputs if len(spec.shape) == 3)
            experts = Fraction(int(op.attr("num_experts")), int(local))
            ranks = experts * parallel.moe_tensor_parallel_size * parallel.moe_data_parallel_size
        out[module, kind] += exactly(COSTS.get(op.name)(sized).flops) * ranks  # type: ignore[assignment]
    return out


def kind_of(op: OpRecord) -> str | None:
    """Which kind of product an op is; None for an outer product (rotary angles) and for all else."""
    if op.name in _LINEAR:
        return "linear"
    if op.name in _ATTENTION:
        return "attention"
    if op.name == _EXPERTS:
        return "experts"
    if op.name in _BATCHED and op.inputs[0].shape[-1] != 1:
        # Absorbed MLA: q . W_UK widens to the latent, W_UV comes back from it.
        left, right = op.inputs[0].shape[-1], op.outputs[0].shape[-1]
        assert isinstance(left, int)
        assert isinstance(right, int)
        return "keys" if left < right else "values"
    return None


def visible(queries: int, context: int, window: int | None) -> int:
    """(query, key) pairs of one request, counted one by one."""
    places = np.arange(context - queries, context)[:, None] - np.arange(context)[None, :]
    return int(((places >= 0) & (places < (window or context + 1))).sum())


def unsharded_decode(model: ModelConfig, layer: int, env: Mapping[str, int]) -> dict[str, int]:
    """Attention FLOPs of a decode layer from the formula, and for MLA those of the absorbed products."""
    pairs = env["B"] * visible(env["Q"], env["S"], model.layer_windows[layer])
    tokens, heads = env["B"] * env["Q"], model.num_attention_heads
    if model.attention is AttentionKind.GQA:
        return {"attention": 2 * pairs * heads * (model.head_dim + model.v_head_dim)}
    rank, rope = model.kv_lora_rank, model.qk_rope_head_dim
    return {
        "attention": 2 * pairs * heads * (rank + rope + rank),
        "keys": 2 * tokens * heads * model.qk_nope_head_dim * rank,
        "values": 2 * tokens * heads * rank * model.v_head_dim,
    }
