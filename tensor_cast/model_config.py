"""Facts of a model, its parallel layout and its quantisation, as frozen values.

:class:`ModelConfig` reads any Hugging Face ``config.json`` without torch or transformers, so that a warm run needs
neither. Names differ between architectures (``n_routed_experts``, ``num_local_experts`` ...); this is the one place
that knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class AttentionKind(StrEnum):
    """How a layer attends; decides KV layout and DCP rule."""

    GQA = "gqa"
    MLA = "mla"
    DSA = "dsa"


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the parallel axes of one instance. Rank order is dp, pp, tp (tp fastest); DCP reuses TP ranks.

    ``moe_tensor_parallel_size`` follows: moe_tp * moe_dp * ep = tp * dp.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    moe_data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1

    @property
    def world_size(self) -> int:
        """Devices of the instance; DCP adds none."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def moe_tensor_parallel_size(self) -> int:
        """Ways each expert's intermediate size is split."""
        stage = self.tensor_parallel_size * self.data_parallel_size
        return stage // (self.expert_parallel_size * self.moe_data_parallel_size)


@dataclass(frozen=True)
class ModelConfig:
    """What planning needs to know of a model; everything comes from its ``config.json``.

    ``hf_config`` is the text model's configuration as loaded (canonical JSON text, so that the value is hashable);
    ``digest`` identifies it. ``layer_windows[i]`` is the sliding window of layer i, or None for full attention;
    ``moe_layers[i]`` says whether layer i routes to experts, ``indexer_layers[i]`` whether it chooses the tokens of
    sparse attention itself (the other layers of a DSA model reuse the choice of the last one that does);
    ``index_share_for_mtp_iteration`` says whether later draft passes reuse the choice of the first. Sizes a model does
    not have are 0; ``intermediate_size`` is that of a dense layer, ``shared_expert_intermediate_size`` that of all
    shared experts together. For MLA ``head_dim`` is that of query and key (nope + rope), ``num_key_value_heads``
    counts the expanded heads of prefill. ``vision`` is the config of the vision tower of a multimodal model.
    """

    model_id: str
    model_type: str
    hf_config: str = field(repr=False)
    digest: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    dtype: str
    tie_word_embeddings: bool
    attention: AttentionKind
    layer_windows: tuple[int | None, ...]
    moe_layers: tuple[bool, ...]
    indexer_layers: tuple[bool, ...] = ()
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    index_topk: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_share_for_mtp_iteration: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    shared_expert_intermediate_size: int = 0
    num_nextn_predict_layers: int = 0
    quantization: Mapping[str, Any] | None = field(default=None, hash=False)
    vision: Mapping[str, Any] | None = field(default=None, hash=False, repr=False)

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes to experts."""
        return any(self.moe_layers)
