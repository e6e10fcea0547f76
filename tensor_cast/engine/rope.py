"""Tables of sines and cosines that a rank keeps for rotary embeddings: one for each distinct set of parameters.

Engines compute them when the model is loaded, for every position that the model knows (not for the longest request),
and share them over layers. Their start-up logs count them with the weights.
Source: vLLM 0.30 ``layers/rotary_embedding``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tensor_cast.dtypes import bits_of
from tensor_cast.model_config import AttentionKind, ModelConfig

__all__ = ["rope_cache_bytes"]


def rope_cache_bytes(model: ModelConfig) -> int:
    """Bytes of the tables ``[positions, rotary elements of a head]`` in the model's dtype."""
    config = json.loads(model.hf_config)
    width = model.qk_rope_head_dim
    if model.attention is AttentionKind.GQA:
        width = int(model.head_dim * float(_of_rope(config, "partial_rotary_factor") or 1.0))
    positions = sum(_positions(scaling, model.max_position_embeddings) for scaling in _tables(config))
    return positions * width * bits_of(model.dtype) // 8


def _of_rope(config: Mapping[str, Any], name: str) -> Any:
    """A value that newer configs keep among ``rope_parameters``."""
    value = config.get(name)
    return value if value is not None else (config.get("rope_parameters") or {}).get(name)


def _tables(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Parameters of each table; windowed layers may have a table of their own, which is never scaled."""
    named = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if named and all(isinstance(value, Mapping) for value in named.values()):  # by kind of layer
        unique = {json.dumps(value, sort_keys=True): value for value in named.values()}
        return list(unique.values())
    return [named, {}] if config.get("rope_local_base_freq") else [named]


def _positions(scaling: Mapping[str, Any], known: int) -> int:
    """Rows of one table. Scaled tables reach as far as scaling does; those of Llama 3 are not stretched."""
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    factor = float(scaling.get("factor") or 1.0)
    if kind == "yarn":
        return int((scaling.get("original_max_position_embeddings") or known) * factor)
    return int(known * factor) if kind in ("linear", "dynamic") else known
