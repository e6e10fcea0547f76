"""The indexer of sparse attention (DSA): which tokens of the context a query attends to.

A small attention of its own scores every token of the context and keeps the best; attention then reads only those.
Engines keep every weight of it whole on each TP rank, so all ranks choose the same tokens. Its keys live in a paged
cache of their own. Under DCP that cache is split like the main one (vllm: each rank hands in its best tokens, the best
of all are chosen), or kept whole on every rank (vllm-ascend).
Legend: B requests, Q query tokens, S context, n index heads, d their width, K tokens chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tensor_cast import ops
from tensor_cast.engine.dcp import get_semantics
from tensor_cast.errors import UnsupportedModelError
from tensor_cast.ir.record import Phase, Scope
from tensor_cast.layers.collectives import all_gather
from tensor_cast.layers.context import ParallelContext, Step, current_step, enter_scope, indexer_key
from tensor_cast.layers.modules import wrap_forward
from tensor_cast.ops.kv_layout import local_length

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]

#: Projections that engines never quantise: fused into one product in the model's dtype.
UNQUANTISED = (".indexer.wk", ".indexer.weights_proj")
#: Where the rotation of an architecture's indexer is: DeepSeek's turns halves, GLM's pairs of neighbours.
_ROTARY = {
    "deepseek_v32": ("transformers.models.deepseek_v32.modeling_deepseek_v32", "apply_rotary_pos_emb"),
    "glm_moe_dsa": ("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa", "apply_rotary_pos_emb_interleave"),
}


@dataclass(frozen=True)
class IndexerCore:
    """One indexer on one rank: its layer, the width of its keys, how many tokens it chooses."""

    ctx: ParallelContext
    layer_idx: int
    head_dim: int
    topk: int

    @property
    def cache_key(self) -> str:
        """Key of its cache."""
        return indexer_key(self.layer_idx)

    @property
    def whole(self) -> bool:
        """Whether every DCP rank keeps the keys of the whole sequence."""
        return self.ctx.dcp > 1 and get_semantics(self.ctx.dcp_semantics).replicates_indexer

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the paged cache: blocks, tokens per block, width; a whole cache holds the group's tokens."""
        return (num_blocks, block_size * (self.ctx.dcp if self.whole else 1), self.head_dim)


def install(module: nn.Module, ctx: ParallelContext) -> None:
    """Make an indexer of Transformers' write and score its keys through the paged cache.

    Raises:
        UnsupportedModelError: an architecture whose indexer is not known.
    """
    kind = module.config.model_type
    if kind not in _ROTARY:
        raise UnsupportedModelError(
            f"sparse attention of {kind!r} is not known here; known are {', '.join(sorted(_ROTARY))}."
        )
    source, name = _ROTARY[kind]
    rotary = getattr(import_module(source), name)
    core = IndexerCore(ctx, module.layer_idx, module.head_dim, module.index_topk)
    module.__dict__["attention_core"] = core

    def forward(hidden: torch.Tensor, q_resid: torch.Tensor, tables: Any, *_: Any, **__: Any) -> torch.Tensor:
        return choose_tokens(module, core, rotary, hidden, q_resid, tables)

    module.__dict__["forward"] = forward


def reuse(module: nn.Module, choice: Callable[[], torch.Tensor | None]) -> None:
    """Make an indexer hand on ``choice()`` where that is not None, and run nothing.

    So do later passes of a draft module whose config says ``index_share_for_mtp_iteration``. Their keys are not cached
    either: of every token that stays, the first pass of the next step writes the key before anything scores it.
    Source: vLLM 0.30 ``model_executor/layers/mla.py`` (``skip_topk``).
    """

    def forward(inner: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        known = choice()
        return inner(*args, **kwargs) if known is None else known

    wrap_forward(module, forward)


def choose_tokens(
    module: nn.Module,
    core: IndexerCore,
    rotary: Rotary,
    hidden: torch.Tensor,
    q_resid: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Places in the sequence of the tokens that each query attends to.

    Args:
        module: holds the projections wq_b, wk, weights_proj and k_norm.
        core: see :class:`IndexerCore`.
        rotary: rotates queries and keys.
        hidden: [B, Q, H].
        q_resid: [B, Q, q_lora_rank], the normalised low-rank query.
        tables: cosine and sine.

    Returns:
        [B, Q, min(S, K)] int32; of a query that sees fewer tokens than that some entries lie after it.
    """
    enter_scope(Scope.TOKEN)
    batch, queries, _ = hidden.shape
    rope = module.qk_rope_head_dim
    q = module.wq_b(q_resid).view(batch, queries, -1, core.head_dim)
    k = module.k_norm(module.wk(hidden)).unsqueeze(2)
    q_rot, k_rot = rotary(q[..., :rope], k[..., :rope], *tables, unsqueeze_dim=2)
    q = torch.cat([q_rot, q[..., rope:]], dim=-1)
    k = torch.cat([k_rot, k[..., rope:]], dim=-1).squeeze(2)
    weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype)).float() * module.n_heads**-0.5
    enter_scope(Scope.SEQUENCE)
    return _select(core, current_step(), q, k, weights, module.softmax_scale)


def _select(
    core: IndexerCore, step: Step, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float
) -> torch.Tensor:
    ctx, cache, phase = core.ctx, step.kv_caches[core.cache_key], str(step.phase)
    split = ctx.dcp > 1 and step.phase is Phase.DECODE and not core.whole
    if core.whole:
        ops.indexer_cache_write(k, cache, None, step.positions, step.block_table)
    else:
        ops.indexer_cache_write(k, cache, step.slot_mapping, None, None)
    count = local_length(step.seq_len, ctx.dcp if split else 1, ctx.interleave)
    (keys,) = ops.gather_kv(cache, step.block_table, step.positions, count, None)
    place = (ctx.dcp, ctx.dcp_rank, ctx.interleave) if split else (1, 0, 1)
    scores = ops.indexer_scores(q, weights, keys, step.positions, scale, phase, *place)
    chosen = torch.sym_min(step.seq_len, core.topk)
    if not split:
        return ops.indexer_topk(scores, chosen, phase)
    best = ops.indexer_candidates(scores, step.positions, torch.sym_min(count, core.topk), *place)
    gathered = all_gather(best, "dcp", ctx.dcp).view(ctx.dcp, *best.shape)
    return ops.indexer_merge(gathered, chosen)
