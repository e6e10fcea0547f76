"""A config small enough to run on a laptop that still does everything the whole one does.

Widths, depth, experts and vocabulary go down. What decides how the program is cut and what it computes stays: query
heads for each KV head, a layer of every kind, windows (so short that they bite), group-limited routing, shared experts,
low-rank queries, biases, norms, sinks, caps, tied embeddings, rope. Every field that is not a size is kept as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from tensor_cast.errors import UnsupportedModelError
from tensor_cast.hf_config import SIZE_NAMES
from tensor_cast.model_catalog import describe
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig
from tensor_cast.parallel import VOCAB_PADDING
from tensor_cast.proof.small_layout import MAX_RANKS, small_layout
from tensor_cast.units import round_up

__all__ = ["WINDOW", "Change", "Shrunk", "shrink"]

#: Tokens of a sliding window, where there is one: shorter than every sequence that is run.
WINDOW = 4
#: Tokens that sparse attention picks, where it does.
_INDEX_TOPK = 4
_INDEX_HEADS = 32
_HIDDEN, _INTERMEDIATE, _EXPERT_SIZE, _EXPERTS, _TOP_K = 64, 96, 48, 16, 4
_LATENT, _QUERY_LATENT = 32, 24


@dataclass(frozen=True)
class Change:
    """A field of the config that was made smaller; ``after`` is None where it was taken out."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Shrunk:
    """What stands for a model on a layout.

    Args:
        model: the small model.
        parallel: the layout it runs on; the one asked for where that has few ranks.
        block_size: tokens of a KV block.
        changes: fields of the config that differ, in alphabetical order.
    """

    model: ModelConfig
    parallel: ParallelConfig
    block_size: int
    changes: tuple[Change, ...]


def shrink(model: ModelConfig, parallel: ParallelConfig, *, block_size: int, max_ranks: int = MAX_RANKS) -> Shrunk:
    """Make a model and a layout small.

    Args:
        model: the whole model.
        parallel: a layout that is legal for it.
        block_size: tokens of a KV block under that layout.
        max_ranks: most ranks of the small layout.

    Raises:
        LegalityError: no layout of so few ranks resembles the one asked for.
        UnsupportedModelError: the config varies over its layers in a way that cannot be kept.
    """
    small = small_layout(model, parallel, block_size=block_size, max_ranks=max_ranks)
    config: dict[str, Any] = json.loads(model.hf_config)
    for layers in (_one_of_each_kind(model, config), _prefix(model, config)):
        shrunk = _shrink_config(model, config, layers, small.parallel, small.kv_heads, parallel)
        result = describe(shrunk, model.model_id, f"the shrunk config of {model.model_id}")
        if _layers_kept(model, result, layers):
            return Shrunk(result, small.parallel, small.block_size, _changes(config, shrunk))
    raise UnsupportedModelError(
        f"{model.model_id}: its layers differ in a way that a config of fewer layers cannot say; it is not verified."
    )


# -- layers -----------------------------------------------------------------------------------------------------------


def _per_layer(config: Mapping[str, Any], layers: int) -> dict[str, list[Any]]:
    """Lists with an entry for each layer (and perhaps for each draft layer after them)."""
    words = ("layer", "type", "freq", "pattern", "rope")
    drafts = int(config.get("num_nextn_predict_layers") or 0)
    return {
        key: value
        for key, value in config.items()
        if isinstance(value, list) and len(value) in (layers, layers + drafts) and any(w in key for w in words)
        if key != "mlp_only_layers"  # names layers instead of listing them
    }


def _kinds(model: ModelConfig, config: Mapping[str, Any]) -> list[str]:
    """What tells one layer from another, for each layer."""
    lists = _per_layer(config, model.num_hidden_layers)
    return [
        json.dumps([model.layer_windows[i], model.moe_layers[i], *(values[i] for values in lists.values())])
        for i in range(model.num_hidden_layers)
    ]


def _one_of_each_kind(model: ModelConfig, config: Mapping[str, Any]) -> list[int]:
    """The first layer of each kind, and at least two layers so that their caches can be mixed up."""
    kinds = _kinds(model, config)
    first = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    return first if len(first) > 1 else list(range(min(2, len(kinds))))


def _prefix(model: ModelConfig, config: Mapping[str, Any]) -> list[int]:
    """The first layers up to one of the last kind: right whatever rule tells the layers apart."""
    return list(range(_one_of_each_kind(model, config)[-1] + 1))


def _layers_kept(model: ModelConfig, shrunk: ModelConfig, layers: list[int]) -> bool:
    windows = tuple(None if model.layer_windows[i] is None else WINDOW for i in layers)
    return shrunk.layer_windows == windows and shrunk.moe_layers == tuple(model.moe_layers[i] for i in layers)


def _set_layers(model: ModelConfig, config: dict[str, Any], layers: list[int]) -> None:
    total = model.num_hidden_layers
    for key, values in _per_layer(config, total).items():
        config[key] = [values[i] for i in layers] + values[total:]
    _put(config, "num_hidden_layers", len(layers))
    if "max_window_layers" in config:
        # Layers from this one on have a window, where windows are used at all.
        config["max_window_layers"] = sum(i < config["max_window_layers"] for i in layers)
    if len({w is None for w in model.layer_windows}) > 1 and "layer_types" not in config:
        config["layer_types"] = [
            "full_attention" if model.layer_windows[i] is None else "sliding_attention" for i in layers
        ]
    if layers == list(range(len(layers))):
        return  # rules that count layers still hold for the first ones
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = sum(i < config["first_k_dense_replace"] for i in layers)
    if model.is_moe and ("decoder_sparse_step" in config or "mlp_only_layers" in config):
        config["decoder_sparse_step"] = 1
        config["mlp_only_layers"] = [new for new, old in enumerate(layers) if not model.moe_layers[old]]


# -- sizes ------------------------------------------------------------------------------------------------------------


def _put(config: dict[str, Any], size: str, value: int) -> None:
    """Set a size under every name that the config gives it."""
    for name in SIZE_NAMES[size]:
        if config.get(name) is not None:
            config[name] = value


def _scaled(config: dict[str, Any], key: str, value: int) -> None:
    """Set a size that may be absent or null (and then means that the model does not have the part)."""
    if config.get(key):
        config[key] = value


def _shrink_config(
    model: ModelConfig,
    whole: Mapping[str, Any],
    layers: list[int],
    parallel: ParallelConfig,
    kv_heads: int,
    asked: ParallelConfig,
) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(whole))
    config.pop("quantization_config", None)  # numbers of low precision are not what is compared
    heads = kv_heads * (model.num_attention_heads // model.num_key_value_heads)
    _put(config, "num_attention_heads", heads)
    _put(config, "num_key_value_heads", kv_heads)
    if model.attention is AttentionKind.GQA:
        head_dim = _head_dim(model, config, heads)
    else:
        head_dim = 0
        _latent_dims(model, config)
    hidden = _hidden(model, config, heads, head_dim)
    _put(config, "hidden_size", hidden)
    _scaled(config, "word_embed_proj_dim", hidden)
    # Whatever a split divides: every rank of tp, and every slice of an expert.
    unit = lcm(parallel.tensor_parallel_size, parallel.moe_tensor_parallel_size)
    _put(config, "intermediate_size", round_up(_INTERMEDIATE, 2 * unit))
    _put(config, "moe_intermediate_size", round_up(_EXPERT_SIZE, 2 * unit))
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        _scaled(config, key, round_up(_EXPERT_SIZE, 2 * unit))
    if model.is_moe:
        _experts(model, config, parallel, asked)
    _vocabulary(model, config, parallel.tensor_parallel_size)
    _set_layers(model, config, layers)
    if any(window is not None for window in model.layer_windows):
        config["sliding_window"] = WINDOW
    return config


def _head_dim(model: ModelConfig, config: dict[str, Any], heads: int) -> int:
    """Width of a head, small and such that the part of it that is rotated is even."""
    partial = _partial_rotary(config)
    start = 8 if not config.get("head_dim") and heads >= 16 else 16
    head_dim = next((d for d in range(start, 129, 4) if partial * d == int(partial * d) and partial * d % 2 == 0), 128)
    before = model.head_dim
    _scaled(config, "head_dim", head_dim)
    for key in ("rotary_dim", "kv_channels", "attention_head_dim"):
        if config.get(key):
            config[key] = max(2, config[key] * head_dim // before)
    _rope_lists(config, int(before * partial), int(head_dim * partial))
    return head_dim


def _partial_rotary(config: Mapping[str, Any]) -> float:
    for place in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(place, Mapping):
            for key in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction"):
                if place.get(key):
                    return float(place[key])
    return 1.0


def _rope_lists(place: dict[str, Any], before: int, after: int) -> None:
    """Factors with an entry for each pair of rotated dimensions, and sections that add up to them."""
    for key, value in place.items():
        if isinstance(value, dict) and key not in ("quantization_config",):
            _rope_lists(value, before, after)
        elif key in ("short_factor", "long_factor") and isinstance(value, list) and len(value) == before // 2:
            place[key] = [value[i * len(value) // (after // 2)] for i in range(after // 2)]
        elif key == "mrope_section" and isinstance(value, list) and sum(value) == before // 2:
            parts = [max(1, v * after // before) for v in value]
            parts[0] += after // 2 - sum(parts)
            place[key] = parts


def _latent_dims(model: ModelConfig, config: dict[str, Any]) -> None:
    """Widths of latent attention: an eighth, the rotated part even."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    eighth = {name: max(4, config[name] // 16 * 2) for name in names}
    rope = eighth["qk_rope_head_dim"]
    head = eighth["qk_nope_head_dim"] + rope
    before = config.get("head_dim")
    if before:
        # Configs of this kind disagree on what head_dim is; it stays the same thing.
        same = [new for name, new in eighth.items() if config[name] == before]
        config["head_dim"] = head if before == model.head_dim else (same or [rope])[0]
    config.update(eighth)
    _scaled(config, "qk_head_dim", head)
    _scaled(config, "kv_lora_rank", _LATENT)
    _scaled(config, "q_lora_rank", _QUERY_LATENT)
    _scaled(config, "index_head_dim", 2 * rope)
    # Scores are sums of rectified products: with few heads many are exactly 0, and which of them is picked is chance.
    _scaled(config, "index_n_heads", min(config.get("index_n_heads") or 0, _INDEX_HEADS))
    _scaled(config, "index_topk", _INDEX_TOPK)
    _rope_lists(config, model.qk_rope_head_dim, rope)


def _hidden(model: ModelConfig, config: Mapping[str, Any], heads: int, head_dim: int) -> int:
    """Width of the model: as many heads wide as the whole one where it is just that, else something else."""
    if head_dim and (not config.get("head_dim") or model.hidden_size == model.num_attention_heads * model.head_dim):
        return heads * head_dim
    step = lcm(heads, 2) if model.hidden_size % model.num_attention_heads == 0 else 4
    hidden = round_up(_HIDDEN, step)
    return hidden + step if hidden == heads * head_dim else hidden


def _experts(model: ModelConfig, config: dict[str, Any], parallel: ParallelConfig, asked: ParallelConfig) -> None:
    """Experts that fill or do not fill their ranks evenly, as before, and routing by groups if there was any."""
    top_k, experts = min(model.num_experts_per_tok, _TOP_K), min(model.num_experts, _EXPERTS)
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups > 1:
        # Four groups of which the same share is picked; a group is scored by its two best experts.
        small_groups = min(groups, 4)
        chosen = max(1, chosen * small_groups // groups)
        config["n_group"], config["topk_group"] = small_groups, chosen
        experts = round_up(max(experts, 2 * small_groups), small_groups)
        top_k = min(top_k, chosen * experts // small_groups)
    else:
        ep = parallel.expert_parallel_size
        even = model.num_experts % asked.expert_parallel_size == 0
        experts = max(experts, ep)
        if ep > 1:
            experts = round_up(experts, ep) if even else experts + (experts % ep == 0)
    _put(config, "num_experts", experts)
    _put(config, "num_experts_per_tok", top_k)


def _vocabulary(model: ModelConfig, config: dict[str, Any], tp: int) -> None:
    """A vocabulary that must be padded if the whole one must, and special tokens inside it."""
    vocab = lcm(2 * VOCAB_PADDING, tp)
    if model.vocab_size % VOCAB_PADDING:
        vocab -= VOCAB_PADDING - 2
    config["vocab_size"] = vocab
    for key, value in config.items():
        if key.endswith(("_token_id", "_token_ids", "_token_index")):
            config[key] = _inside(value, vocab)
    # Where the config is silent the class may pad with a token beyond the small vocabulary.
    config.setdefault("pad_token_id", 0)


def _inside(token: Any, vocab: int) -> Any:
    if isinstance(token, list):
        return [_inside(t, vocab) for t in token]
    return token % vocab if isinstance(token, int) and not isinstance(token, bool) and token >= vocab else token


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    keys = sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
    return tuple(Change(key, before.get(key), after.get(key)) for key in keys)
