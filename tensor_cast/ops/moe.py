"""The experts of a mixture-of-experts block as one op: a grouped GEMM, the gate, a grouped GEMM, the weighted sum."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Gate functions by name: what lies between the two GEMMs, [n, 2I] -> [n, I] (or [n, I] -> [n, I]).
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


@torch.library.custom_op("tensor_cast::grouped_experts", mutates_args=())
def grouped_experts(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    first_expert: int,
    gate: str,
    gated: bool,
    ep: int,
    dp: int,
) -> torch.Tensor:
    """Weighted sum over the chosen experts that live here.

    Args:
        hidden: [T, H] tokens of all dispatching ranks.
        topk_ids: [T, k] chosen experts, counted over all ``num_experts``.
        topk_weights: [T, k].
        gate_up: [E_local, 2I, H], or [E_local, I, H] when not ``gated``.
        down: [E_local, H, I].
        gate_up_bias: [E_local, 2I].
        down_bias: [E_local, H].
        num_experts: experts of the whole layer.
        top_k: experts per token.
        first_expert: id of the first local expert.
        gate: key in :data:`GATES`.
        gated: whether gate_up holds two matrices.
        ep: ways the experts are split, for the cost function.
        dp: DP ranks of the layout, for the cost function.

    Returns:
        [T, H]; zero for a token none of whose experts are local.
    """
    out = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
    apply_gate = GATES[gate]
    for local in range(gate_up.shape[0]):
        token, choice = torch.where(topk_ids == first_expert + local)
        if token.numel() == 0:
            continue
        inner = torch.nn.functional.linear(
            hidden[token], gate_up[local], None if gate_up_bias is None else gate_up_bias[local]
        )
        result = torch.nn.functional.linear(
            apply_gate(inner), down[local], None if down_bias is None else down_bias[local]
        )
        out.index_add_(0, token, (result * topk_weights[token, choice, None]).to(out.dtype))
    return out.to(hidden.dtype)


@grouped_experts.register_fake
def _(hidden, topk_ids, topk_weights, gate_up, down, gate_up_bias, down_bias, num_experts, top_k, *rest):
    return torch.empty_like(hidden)
