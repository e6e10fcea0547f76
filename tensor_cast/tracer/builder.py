"""From a model's configuration to its module, without weights and without running anyone's code but Transformers'."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tensor_cast.errors import ConfigError, UnsupportedModelError
from tensor_cast.hf_agreement import check_agreement
from tensor_cast.hf_families import ALIASES, UnknownFamilyError
from tensor_cast.layers.attention import IMPLEMENTATION, attention_forward
from tensor_cast.layers.moe import experts_forward
from tensor_cast.model_config import AttentionKind, ModelConfig

#: Layers of a model that is built at most. Transformers makes each of them, some four milliseconds a piece.
MAX_LAYERS = 2000

# Attention goes to our function. No mask function is registered under the name, so Transformers builds no mask at all.
AttentionInterface.register(IMPLEMENTATION, attention_forward)
ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = experts_forward


def hf_config(model: ModelConfig) -> Any:
    """Transformers' configuration object.

    Raises:
        UnsupportedModelError: a type that cannot be traced.
        ConfigError: the configuration cannot be read, or leaves out what we and Transformers fill in differently.
    """
    values = json.loads(model.hf_config)
    if model.attention is AttentionKind.DSA:
        # One list for whatever the file says; Transformers trips over frequencies that are written but null.
        values["indexer_types"] = ["full" if own else "shared" for own in model.indexer_layers]
        for key in ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"):
            values.pop(key, None)
    elif "index_topk" in values:
        raise UnsupportedModelError(f"{model.model_id} has an indexer but no latent attention; that is not known here.")
    if values.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{model.model_id} is an encoder-decoder model; only decoders are traced.")
    kind = ALIASES.get(values.get("model_type", model.model_type), values.get("model_type", model.model_type))
    if kind not in CONFIG_MAPPING:
        remote = " (its code comes with the checkpoint, and remote code is never run)" if "auto_map" in values else ""
        raise UnknownFamilyError(model.model_id, kind, remote)
    for key in ("auto_map", "quantization_config", "model_type"):
        values.pop(key, None)
    if model.attention is AttentionKind.GQA:
        # Nulls become what they mean: several classes compute with them as they are.
        for key, value in (("head_dim", model.head_dim), ("num_key_value_heads", model.num_key_value_heads)):
            if key in values and values[key] is None:
                values[key] = value
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:
        raise ConfigError(f"{model.model_id}: config.json does not describe a {kind}: {one_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{model.model_id}: Transformers has no causal language model of type {kind!r} on its own, so it cannot be "
            "traced; docs/models.md lists the families that can."
        )
    check_agreement(model, json.loads(model.hf_config), config.to_dict())
    return config


def build(model: ModelConfig, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The whole model, unsharded, in evaluation mode, its weights not initialised; on fake tensors it costs no memory.

    Args:
        model: what to build.
        dtype: of the weights; the model's own when absent.

    Raises:
        UnsupportedModelError, ConfigError: see :func:`hf_config`; also when Transformers cannot build it.
    """
    if model.num_hidden_layers > MAX_LAYERS:
        raise UnsupportedModelError(
            f"{model.model_id} has {model.num_hidden_layers:,} decoder layers; models of up to {MAX_LAYERS:,} are "
            "traced. Set num_hidden_layers to that or less: layers of a kind cost the same."
        )
    with _quiet(), no_init_weights():
        config = hf_config(model)
        config._experts_implementation = IMPLEMENTATION
        config.use_cache = False
        try:
            built = AutoModelForCausalLM.from_config(
                config, dtype=dtype or getattr(torch, model.dtype), attn_implementation=IMPLEMENTATION
            )
        except KeyError as error:
            if error.args != (IMPLEMENTATION,):
                raise _unbuildable(model, error) from error
            raise UnsupportedModelError(
                f"{model.model_id} ({model.model_type}) looks its attention up in a table of its own, which cannot be "
                "replaced; models that use Transformers' attention interface can be traced."
            ) from error
        except Exception as error:
            raise _unbuildable(model, error) from error
    built.tie_weights()
    return built.eval()


def _unbuildable(model: ModelConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"{model.model_id}: Transformers cannot build this {model.model_type}: {one_line(error)}; a field of "
        "config.json is missing, null or at odds with another: compare it with that of a published checkpoint."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' remarks on a configuration are for people who load weights; errors still come through."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of bounded length."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= 300 else f"{text[:297]}..."
