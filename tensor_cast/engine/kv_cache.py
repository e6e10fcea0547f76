"""The caches of a model on one rank, layer by layer, and what a request occupies there.

Which layers keep what: each decoder layer its keys and values (a latent for MLA), or a recurrent state; each layer of
sparse attention that computes top-k indices also the keys of its indexer; a draft (MTP) layer one main cache, and its
own indexer even in a model whose layers share indices.
Source: vLLM 0.30 (``v1/kv_cache_interface.py``, ``models/deepseek_v2.py``), vllm-ascend of August 2026.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensor_cast.engine.dcp import get_semantics
from tensor_cast.engine.kv_formats import KV_DTYPES, KVFormat, indexer_token_bytes, resolve_kv_format
from tensor_cast.engine.kv_specs import (
    FullAttentionSpec,
    IndexerSpec,
    KVCacheSpec,
    MlaSpec,
    RecurrentSpec,
    SlidingWindowSpec,
    Tokens,
)
from tensor_cast.engine.recurrent import recurrent_state
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig
from tensor_cast.units import round_up

__all__ = [
    "KV_DTYPES",
    "CacheLayer",
    "FullAttentionSpec",
    "IndexerSpec",
    "KVCacheSpec",
    "MlaSpec",
    "RecurrentSpec",
    "SlidingWindowSpec",
    "cache_layers",
    "indexer_layers",
    "kv_cache_specs",
    "page_bytes",
    "request_kv_bytes",
]


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """One cache of one layer. Draft layers count on after the model's own: layer ``num_hidden_layers`` is the first."""

    layer: int
    spec: KVCacheSpec


def indexer_layers(model: ModelConfig) -> tuple[bool, ...]:
    """For each decoder layer, whether it computes top-k indices and so owns an indexer; empty without DSA."""
    return model.indexer_layers if model.attention is AttentionKind.DSA else ()


def cache_layers(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    block_size: int,
    kv_dtype: str,
    dcp_semantics: str,
    num_mtp_tokens: int = 0,
    extra_indexers: Collection[int] = (),
) -> tuple[CacheLayer, ...]:
    """Every cache on one rank in the order of layers: those of all pipeline stages together.

    Args:
        model: facts of the model.
        parallel: tp and dcp matter.
        block_size: tokens per physical block. Models with recurrent layers get a larger one, for a block of attention
            to be no smaller than a state.
        kv_dtype: name of a format, see :mod:`tensor_cast.engine.kv_formats`.
        dcp_semantics: see :mod:`tensor_cast.engine.dcp`.
        num_mtp_tokens: draft tokens per step; above 0 the draft layers have caches.
        extra_indexers: layers that get an indexer although they share indices.

    Raises:
        ConfigError: ``kv_dtype`` is no format, or not one for the model's attention.
    """
    form = resolve_kv_format(model, kv_dtype)
    layers, drafts = model.num_hidden_layers, min(model.num_nextn_predict_layers, num_mtp_tokens)
    if model.attention is not AttentionKind.GQA:
        latent = MlaSpec(block_size, form.name, model.kv_lora_rank, model.qk_rope_head_dim)
        out = [CacheLayer(layer, latent) for layer in range(layers + drafts)]
        if model.attention is AttentionKind.DSA:
            indexer = _indexer_spec(model, parallel, block_size, form, dcp_semantics)
            own = indexer_layers(model)
            at = [i for i in range(layers + drafts) if i >= layers or own[i] or i in extra_indexers]
            out = sorted([*out, *(CacheLayer(i, indexer) for i in at)], key=lambda cache: cache.layer)
        return tuple(out)
    heads = get_semantics(dcp_semantics).local_kv_heads(
        model.num_key_value_heads, parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    )
    state = recurrent_state(model)
    if state is not None:
        token = FullAttentionSpec(1, form.name, heads, model.head_dim, model.v_head_dim).token_bytes
        state_bytes = state.nbytes(parallel.tensor_parallel_size, num_mtp_tokens)
        # A multiple of the kernel's block that makes the page of attention no smaller than a state.
        block_size = max(block_size, round_up(-(-state_bytes // token), block_size))
        recurrent = RecurrentSpec(block_size, form.name, state_bytes, 1 + num_mtp_tokens)
    full = FullAttentionSpec(block_size, form.name, heads, model.head_dim, model.v_head_dim)
    out = []
    for layer, window in enumerate((*model.layer_windows, *(None,) * drafts)):
        spec: KVCacheSpec = full
        if state is not None and layer < layers and state.layers[layer]:
            spec = recurrent
        elif window is not None:
            spec = SlidingWindowSpec(
                block_size,
                form.name,
                heads,
                model.head_dim,
                model.v_head_dim,
                window,
                in_flight=1 + num_mtp_tokens,
            )
        out.append(CacheLayer(layer, spec))
    return tuple(out)


def _indexer_spec(
    model: ModelConfig, parallel: ParallelConfig, block_size: int, form: KVFormat, dcp_semantics: str
) -> IndexerSpec:
    semantics = get_semantics(dcp_semantics)
    # The RFC describes vllm-ascend; vLLM's own reading goes with its GPU kernels.
    key_bytes = indexer_token_bytes(model.index_head_dim, form, ascend=semantics.name != "vllm")
    # vllm-ascend splits the main cache of sparse attention over DCP ranks and keeps the indexer's whole on each.
    replicas = parallel.decode_context_parallel_size if semantics.replicates_indexer else 1
    return IndexerSpec(block_size, form.name, key_bytes, replicas)


def kv_cache_specs(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    block_size: int,
    kv_dtype: str,
    dcp_semantics: str,
    num_mtp_tokens: int = 0,
) -> tuple[KVCacheSpec, ...]:
    """The specs of :func:`cache_layers`, which documents arguments and errors."""
    caches = cache_layers(
        model,
        parallel,
        block_size=block_size,
        kv_dtype=kv_dtype,
        dcp_semantics=dcp_semantics,
        num_mtp_tokens=num_mtp_tokens,
    )
    return tuple(cache.spec for cache in caches)


def page_bytes(specs: tuple[KVCacheSpec, ...]) -> int:
    """Bytes of one block over all layers, where each layer has blocks of its own."""
    return sum(spec.page_bytes for spec in specs)


def request_kv_bytes(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    tokens: Tokens,
    block_size: int,
    kv_dtype: str,
    dcp_semantics: str,
    num_mtp_tokens: int = 0,
    layers: Collection[int] | None = None,
    extra_indexers: Collection[int] = (),
) -> Any:
    """KV bytes that one request of ``tokens`` tokens occupies on the fullest rank, in whole blocks.

    ``num_mtp_tokens`` > 0 adds the caches of the draft layers; slots for draft tokens are the caller's to add to
    ``tokens``.

    Args:
        model: facts of the model.
        parallel: tp and dcp matter.
        tokens: int or numpy array of ints.
        block_size: tokens per physical block.
        kv_dtype: one of :data:`KV_DTYPES`.
        dcp_semantics: see :mod:`tensor_cast.engine.dcp`.
        num_mtp_tokens: draft tokens per step.
        layers: those of one pipeline stage, draft layers among them; all when absent.
        extra_indexers: layers that get an indexer although they share indices.

    Returns:
        int, or an int64 array of the shape of ``tokens``.

    Raises:
        ConfigError, UnsupportedModelError: as :func:`cache_layers`.
    """
    caches = cache_layers(
        model,
        parallel,
        block_size=block_size,
        kv_dtype=kv_dtype,
        dcp_semantics=dcp_semantics,
        num_mtp_tokens=num_mtp_tokens,
        extra_indexers=extra_indexers,
    )
    specs = Counter(cache.spec for cache in caches if layers is None or cache.layer in layers)
    count = np.asarray(tokens, dtype=np.int64)
    total = np.zeros_like(count)
    dcp = parallel.decode_context_parallel_size
    for spec, number in specs.items():
        total = total + number * spec.page_bytes * spec.blocks(count, dcp)
    return int(total) if count.ndim == 0 else total
