"""Mixture of experts: dispatch over DP ranks, grouped experts, combine. The router is the model's own code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tensor_cast import ops
from tensor_cast.layers.collectives import all_gather, reduce_scatter
from tensor_cast.layers.context import ParallelContext
from tensor_cast.layers.modules import clone_tree
from tensor_cast.ops.moe import GATES


@dataclass(frozen=True)
class ExpertsCore:
    """What the experts function must know of one experts module on one rank.

    ``num_experts`` counts all experts, ``first_expert`` is the first one held here, ``gate`` names the gate function.
    """

    ctx: ParallelContext
    num_experts: int
    first_expert: int
    gate: str
    gated: bool
    transposed: bool

    @classmethod
    def of(cls, module: nn.Module, num_experts: int, ctx: ParallelContext) -> ExpertsCore:
        """The core of a sharded experts module. The gate function is registered without holding on to weights."""
        gated = getattr(module, "has_gate", True)
        bare = clone_tree(module, "")
        bare.__dict__["_parameters"] = {}
        function = bare._apply_gate if gated else bare.act_fn
        name = _gate_name(module)
        GATES[name] = function
        first = split_range(num_experts, ctx.ep, ctx.ep_rank)[0]
        return cls(ctx, num_experts, first, name, gated, getattr(module, "is_transposed", False))


def _gate_name(module: nn.Module) -> str:
    """Class, activation and constants: what tells gate functions apart, and the same in every run."""
    activation = getattr(module, "act_fn", None)
    plain = {k: v for k, v in module.__dict__.items() if isinstance(v, float)}
    words = [
        type(module).__name__,
        *([] if activation is None else [getattr(activation, "__name__", type(activation).__name__)]),
    ]
    return ".".join(words) + "".join(f",{k}={v:g}" for k, v in sorted(plain.items()))


def split_range(total: int, ways: int, rank: int) -> tuple[int, int]:
    """Begin and end of the part of ``total`` things that ``rank`` of ``ways`` holds; the first ranks hold one more."""
    base, extra = divmod(total, ways)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)


def experts_forward(
    module: nn.Module, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Experts function for Transformers' interface: hidden [T, H], ids and weights [T, k] -> [T, H].

    With tokens of several DP ranks meeting, every rank gathers all tokens, computes its experts (or slices of experts)
    and the sum is scattered back: what vLLM calls allgather_reducescatter. The sum over tp is left to the block's end.
    """
    core: ExpertsCore = module.__dict__["experts_core"]
    dispatch = core.ctx.moe_dispatch
    if dispatch > 1:
        hidden = all_gather(hidden, "dp", dispatch)
        topk_weights = all_gather(topk_weights, "dp", dispatch)
        topk_ids = all_gather(topk_ids, "dp", dispatch)
    params = module._parameters
    up = "gate_up_proj" if core.gated else "up_proj"
    up_weight, down_weight = params[up], params["down_proj"]
    if core.transposed:
        up_weight, down_weight = up_weight.transpose(1, 2), down_weight.transpose(1, 2)
    out = ops.grouped_experts(
        hidden,
        topk_ids,
        topk_weights,
        up_weight,
        down_weight,
        params.get(f"{up}_bias"),
        # Each moe_tp rank adds up a slice of every expert: only one of them may add the bias.
        params.get("down_proj_bias") if core.ctx.moe_tp_rank == 0 else None,
        core.num_experts,
        topk_ids.shape[-1],
        core.first_expert,
        core.gate,
        core.gated,
        core.ctx.ep,
        core.ctx.dp,
    )
    return reduce_scatter(out, "dp", dispatch) if dispatch > 1 else out
