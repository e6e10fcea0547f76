"""What more than one rank holds or computes, listed by name: everything else is on exactly one rank of an instance.

Ranks are those of one pipeline stage, tp * dp. Each factor says how many of them hold the same piece.
"""

from __future__ import annotations

import re
from fractions import Fraction

from tensor_cast.ir.program import Layout
from tensor_cast.model_config import AttentionKind, ModelConfig

#: On every rank: norms, routers, MLA's down projections, the indexer, the draft module's projection.
_EVERYWHERE = re.compile(
    r"\.indexer\.|norm\.weight$|norm\.bias$|mlp\.gate\.|mlp\.router\.|\.q_a_proj\.|\.kv_a_proj_with_mqa\.|\.(eh_proj|enorm|hnorm)\."
)
_EXPERTS = re.compile(r"\.experts\.")
_KV_HEADS = re.compile(r"\.[kv]_proj\.")
_VOCABULARY = re.compile(r"^(lm_head|model\.embed_tokens)\.")
_VALUES_OF_LATENTS = re.compile(r"\.kv_b_proj\.")


def kv_head_copies(model: ModelConfig, layout: Layout) -> Fraction:
    """TP ranks that hold the same KV head: engines copy only where there are too few, the RFC once per DCP rank."""
    tp, dcp, heads = layout.parallel.tensor_parallel_size, layout.dcp, model.num_key_value_heads
    if layout.dcp_semantics == "rfc" and dcp > 1:
        return Fraction(dcp)
    return Fraction(max(1, tp // heads) if tp >= heads else 1)


def vocabulary_padding(model: ModelConfig) -> Fraction:
    """Rows of a divided vocabulary, padded to a multiple of 64, over its tokens."""
    return Fraction(-(-model.vocab_size // 64) * 64, model.vocab_size)


def latent_value_copies(model: ModelConfig, layout: Layout) -> int:
    """Under the RFC every rank of a DCP group turns latents into values for the heads of the whole group."""
    return layout.dcp if layout.dcp_semantics == "rfc" and model.attention is not AttentionKind.GQA else 1


def parameter_copies(name: str, model: ModelConfig, layout: Layout) -> Fraction:
    """Elements over all ranks, divided by the elements of the whole parameter."""
    parallel = layout.parallel
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    if _EXPERTS.search(name):
        # The bias of a product split along its inner dimension is not split; moe_tp ranks hold it.
        whole_bias = name.endswith("down_proj_bias")
        return Fraction(parallel.moe_data_parallel_size * (parallel.moe_tensor_parallel_size if whole_bias else 1))
    if _EVERYWHERE.search(name):
        return Fraction(tp * dp)
    if name.endswith("o_proj.bias"):
        return Fraction(tp * dp)  # added by the first rank of a TP group only
    if _KV_HEADS.search(name):
        return dp * kv_head_copies(model, layout)
    if _VALUES_OF_LATENTS.search(name):
        return Fraction(dp * latent_value_copies(model, layout))
    if _VOCABULARY.search(name) and tp > 1:
        return dp * vocabulary_padding(model)
    return Fraction(dp)


def product_copies(module: str, op: str, model: ModelConfig, layout: Layout) -> Fraction:
    """FLOPs of a module over the ranks of one TP group, divided by those of the unsharded model.

    Of experts: over all ranks and for the tokens of all DP ranks.
    """
    tp = layout.parallel.tensor_parallel_size
    if _EVERYWHERE.search(f"{module}."):
        return Fraction(tp)
    if _KV_HEADS.search(f"{module}."):
        return kv_head_copies(model, layout)
    if module == "lm_head" and tp > 1:
        return vocabulary_padding(model)
    if op == "values":
        return Fraction(latent_value_copies(model, layout))
    return Fraction(1)
