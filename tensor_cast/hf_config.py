"""The facts in a Hugging Face ``config.json``, whatever names the architecture gives them.

Read without torch or transformers. Where a field is absent the value is the one transformers 5.24 would fill in, for
the fields whose rule is the same over architectures or listed here; a field that only a model's own class could supply
is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from tensor_cast.errors import ConfigError, UnsupportedModelError

Config = Mapping[str, Any]

#: Keys under which multimodal wrappers keep the language model.
_TEXT_KEYS = ("text_config", "language_config", "llm_config", "thinker_config")
#: What a wrapper may say once for all its parts.
_WEIGHT_DTYPES = ("bfloat16", "float16", "float32")
_INHERITED = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings")

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff", "dim_ff", "dff", "d_inner")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
_EXPERT_SIZE = ("moe_intermediate_size", "expert_ffn_hidden_size")
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
#: Draft modules of other kinds (MiniMax-M2, Medusa heads): where their weights and passes differ is not known here.
_OTHER_MTP = ("num_mtp_modules", "medusa_num_heads")
#: The same for whoever writes a config: field of ``ModelConfig`` -> the names that configs give it.
SIZE_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "intermediate_size": _INTERMEDIATE,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": _TOP_K,
    "moe_intermediate_size": _EXPERT_SIZE,
}

#: Architectures whose ``intermediate_size`` is that of one expert.
# fmt: off
_INTERMEDIATE_IS_EXPERT = frozenset(
    {
        "aria_text", "cohere2_moe", "dbrx", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared",
        "jamba", "jetmoe", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe",
    }
)
# fmt: on
#: Architectures of GPT-2's kin that are four times as wide inside as outside, with no field for it or a null in it.
_FOUR_TIMES_WIDE = frozenset(
    {"bloom", "codegen", "gpt-sw3", "gpt2", "gpt_bigcode", "gptj", "gpt_neo", "mpt", "openai-gpt"}
)
#: Architectures that ignore ``sliding_window`` unless ``use_sliding_window`` says otherwise.
_WINDOW_OFF_BY_DEFAULT = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"})
#: Architectures without a window, even if an old config carries one.
_NO_WINDOW = frozenset({"llama", "deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm4_moe", "glm_moe_dsa"})
#: Every n-th layer attends fully, the others through the window, where neither layer_types nor a pattern is given.
_FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "olmo3": 4}
#: What ``layer_types`` calls layers with softmax attention that is modelled, and those that keep a state instead.
_ATTENDING = frozenset({"full_attention", "sliding_attention", "indexed_attention", "attention"})
_STATEFUL = frozenset({"linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"})
#: Architectures that tie input and output embeddings when the config does not say.
# fmt: off
_TIED_BY_DEFAULT = frozenset(
    {
        "bloom", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "falcon", "gemma", "gemma2",
        "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt2", "gpt_bigcode",
        "gpt_neo", "jetmoe", "lfm2", "lfm2_moe", "minicpm3", "mpt", "opt", "recurrent_gemma", "smollm3",
        "starcoder2", "vaultgemma", "zamba", "zamba2",
    }
)
# fmt: on
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def text_config(raw: Config, where: str) -> dict[str, Any]:
    """The language model's part of ``raw``: the whole, or what a multimodal wrapper nests.

    Raises:
        ConfigError: the config is not one of a causal language model.
    """
    architectures = raw.get("architectures") or []
    nested = next((raw[key] for key in _TEXT_KEYS if isinstance(raw.get(key), Mapping)), None)
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{where}: {raw.get('model_type')} is an encoder-decoder model (is_encoder_decoder is true); only models "
            "that are a decoder alone are traced, give the config of one"
        )
    if not isinstance(architectures, list):
        raise _not_causal(where, architectures or raw.get("model_type"))
    if architectures:
        named = [name for name in architectures if isinstance(name, str) and name.endswith(_CAUSAL_SUFFIXES)]
        conditional = bool(named) and all(name.endswith("ForConditionalGeneration") for name in named)
        if not named or (conditional and nested is None):
            raise _not_causal(where, ", ".join(map(str, architectures)))
    if nested is None:
        if broken := next((key for key in _TEXT_KEYS if key in raw and "num_hidden_layers" not in raw), None):
            raise ConfigError(f"{where}: field {broken}: found {raw[broken]!r}; allowed is an object")
        return dict(raw)
    inherited = {key: raw[key] for key in _INHERITED if key in raw and key not in nested}
    return {**text_config(nested, where), **inherited}


def read_facts(config: Config, where: str) -> dict[str, Any]:
    """Fields of :class:`~tensor_cast.model_config.ModelConfig` that ``config`` (a text model's) determines.

    Args:
        config: as :func:`text_config` returns it.
        where: name of the file, for messages.

    Raises:
        ConfigError: a size is missing or is not a positive integer.
        UnsupportedModelError: the model has layers that cannot be described yet.
    """
    reader = _Reader(config, where)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        found = "it is missing" if "model_type" not in config else f"found {model_type!r}"
        raise ConfigError(
            f'{where}: field model_type: {found}; allowed is the name of an architecture, such as "llama" '
            "(docs/models.md lists them)"
        )
    _refuse_unknown_layers(config, model_type)
    layers = reader.size(_LAYERS)
    # Some configs list sizes of experts that a switch turns off.
    experts = 0 if config.get("is_moe") is False else reader.optional(_EXPERTS)
    facts: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": reader.size(_HIDDEN),
        "num_hidden_layers": layers,
        "vocab_size": reader.size(("vocab_size",)),
        "max_position_embeddings": reader.optional(_POSITIONS),
        "dtype": _dtype(config, where),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)),
        "num_nextn_predict_layers": reader.optional(_MTP),
        "quantization": _quantization(config, where),
        "layer_windows": _layer_windows(config, model_type, layers, reader),
        "moe_layers": _moe_layers(config, layers, experts, reader),
    }
    facts |= _attention(config, facts["hidden_size"], reader)
    facts |= _indexer(config, layers, reader) if facts["attention"] == "dsa" else {"indexer_layers": (False,) * layers}
    facts |= _experts(config, model_type, experts, facts["moe_layers"], reader)
    return facts


def no_drafts(config: Config) -> str:
    """Of a model without draft modules that are modelled: whether it has none, or others; a clause without subject."""
    others = ", ".join(f"{name} {config[name]}" for name in _OTHER_MTP if config.get(name))
    return f"has draft modules of a kind that is not modelled ({others})" if others else "has none"


class _Reader:
    """Reads sizes under any of several names, and refuses what is no size."""

    def __init__(self, config: Config, where: str) -> None:
        self.config = config
        self.where = where

    def size(self, names: tuple[str, ...]) -> int:
        value = self.optional(names)
        if not value:
            found = next((f"{n} = {self.config[n]!r}" for n in names if n in self.config), "none of them")
            raise ConfigError(f"{self.where}: need {' or '.join(names)} as a positive integer; found {found}")
        return value

    def optional(self, names: tuple[str, ...]) -> int:
        """The first of ``names`` that is set, 0 if none is."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if not _is_int(value) or value < 0:
                raise ConfigError(f"{self.where}: field {name}: found {value!r}; allowed is a positive integer")
            return value
        return 0

    def items(self, name: str, count: int | None = None) -> list[Any]:
        """The list ``name``, empty if it is not set; ``count`` entries long where that is given."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ConfigError(f"{self.where}: field {name}: found {value!r}; allowed is a list")
        if count is not None and len(value) != count:
            raise ConfigError(
                f"{self.where}: field {name}: need one entry for each of {count} layers; found {len(value)}"
            )
        return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _not_causal(where: str, found: object) -> ConfigError:
    return ConfigError(
        f"{where}: not the config of a causal language model (found {found!r}); "
        "allowed are ...ForCausalLM, or a multimodal wrapper with a text_config"
    )


def _dtype(config: Config, where: str) -> str:
    # Configs written without a dtype are those of bfloat16 checkpoints; engines never serve in float32 by default.
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    name = {"half": "float16", "float": "float32", "auto": "bfloat16"}.get(name, name)
    if name not in _WEIGHT_DTYPES:
        raise ConfigError(f"{where}: field dtype: found {name!r}; allowed is one of {', '.join(_WEIGHT_DTYPES)}")
    return name


def _quantization(config: Config, where: str) -> Config | None:
    value = config.get("quantization_config")
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: field quantization_config: found {value!r}; allowed is an object")
    return value


def _refuse_unknown_layers(config: Config, model_type: str) -> None:
    listed = config.get("layer_types")
    layer_types = {kind for kind in listed if isinstance(kind, str)} if isinstance(listed, list) else set()
    # Gated delta nets are described where their sizes are given (tensor_cast.engine.recurrent).
    known = {"linear_attention"} if "linear_num_value_heads" in config else set()
    kinds = sorted(layer_types & _STATEFUL - known)
    if kinds or "hybrid_override_pattern" in config or "layers_block_type" in config:
        what = f"{', '.join(kinds)} layers" if kinds else "recurrent layers"
        raise UnsupportedModelError(f"{model_type}: {what} keep a state instead of a KV cache; not modelled yet")
    if "compress_ratios" in config:
        raise UnsupportedModelError(f"{model_type}: attention over a compressed KV cache is not modelled yet")
    overrides = config.get("per_layer_config")
    own_heads = isinstance(overrides, Mapping) and any("head" in key for entry in overrides.values() for key in entry)
    if "global_head_dim" in config or config.get("num_kv_shared_layers") or own_heads:
        raise UnsupportedModelError(f"{model_type}: head sizes that differ between layers are not modelled yet")
    if model_type.startswith("llama4") or config.get("attention_chunk_size"):
        raise UnsupportedModelError(f"{model_type}: attention in chunks is not modelled yet")
    if others := sorted(layer_types - _STATEFUL - _ATTENDING):
        raise UnsupportedModelError(
            f"{model_type}: layers of type {', '.join(others)} are not modelled yet; those of type "
            f"{', '.join(sorted(_ATTENDING))} are"
        )


def _attention(config: Config, hidden: int, reader: _Reader) -> dict[str, Any]:
    if not reader.optional(_HEADS) and not any(name in config for name in _HEADS):
        raise UnsupportedModelError(
            f"{reader.where}: none of {', '.join(_HEADS)} is there; a model without attention (state space, recurrent) "
            "is not modelled yet, one with attention needs its number of heads"
        )
    heads = reader.size(_HEADS)
    kv_heads = reader.optional(_KV_HEADS) or (1 if config.get("multi_query") else heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{reader.where}: num_attention_heads must be a multiple of num_key_value_heads; "
            f"found {heads} and {kv_heads}"
        )
    facts: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    latent = reader.optional(("kv_lora_rank",))
    if latent:
        nope, rope = reader.size(("qk_nope_head_dim",)), reader.size(("qk_rope_head_dim",))
        return facts | {
            "attention": "dsa" if reader.optional(("index_topk",)) else "mla",
            "head_dim": nope + rope,
            "v_head_dim": reader.size(("v_head_dim",)),
            "kv_lora_rank": latent,
            "q_lora_rank": reader.optional(("q_lora_rank",)),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
        }
    head_dim = reader.optional(("head_dim",))
    if not head_dim:
        if hidden % heads:
            raise ConfigError(
                f"{reader.where}: without head_dim, hidden_size must be a multiple of num_attention_heads; "
                f"found {hidden} and {heads}"
            )
        head_dim = hidden // heads
    return facts | {"attention": "gqa", "head_dim": head_dim, "v_head_dim": head_dim}


def _indexer(config: Config, layers: int, reader: _Reader) -> dict[str, Any]:
    """Sizes of the indexer of sparse attention, and which layers have one of their own.

    The others reuse the choice of the last one that does.
    """
    field = "index_share_for_mtp_iteration"
    if not isinstance(config.get(field), bool | None):
        raise ConfigError(f"{reader.where}: field {field}: found {config[field]!r}; allowed are true and false")
    facts = {
        "index_topk": reader.size(("index_topk",)),
        "index_n_heads": reader.size(("index_n_heads",)),
        "index_head_dim": reader.size(("index_head_dim",)),
        field: bool(config.get(field)),
    }
    if config.get("indexer_types") is not None:
        field = "indexer_types"
        own = tuple(kind == "full" for kind in reader.items(field, layers))
    elif config.get("index_topk_pattern") is not None:
        field = "index_topk_pattern"
        pattern = config[field]
        listed = list(pattern) if isinstance(pattern, str) else reader.items(field, layers)
        if len(listed) != layers or any(kind not in ("F", "S", "full", "shared") for kind in listed):
            raise ConfigError(
                f"{reader.where}: field {field}: found {pattern!r}; allowed are {layers} times F (full) or S (shared)"
            )
        own = tuple(kind in ("F", "full") for kind in listed)
    else:
        field = "index_topk_freq"
        every = reader.optional((field,)) or 1
        offset = config.get("index_skip_topk_offset")
        offset = 2 if offset is None else reader.optional(("index_skip_topk_offset",))
        own = tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    if not own[0]:
        raise ConfigError(f"{reader.where}: field {field}: the first layer must be full, it has nothing to share")
    return facts | {"indexer_layers": own}


def _layer_windows(config: Config, model_type: str, layers: int, reader: _Reader) -> tuple[int | None, ...]:
    window = reader.optional(("sliding_window",)) or None
    if not config.get("use_sliding_window", model_type not in _WINDOW_OFF_BY_DEFAULT) or model_type in _NO_WINDOW:
        window = None
    if config.get("layer_types") is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in reader.items("layer_types", layers))
    if window is None:
        return (None,) * layers
    every = reader.optional(("sliding_window_pattern",)) or _FULL_EVERY.get(model_type, 0)
    if every:
        return tuple(window if (i + 1) % every else None for i in range(layers))
    # Qwen's dense models keep the first max_window_layers layers full; the others ignore the field.
    first = reader.optional(("max_window_layers",)) if model_type in ("qwen2", "qwen3") else 0
    return tuple(window if i >= first else None for i in range(layers))


def _moe_layers(config: Config, layers: int, experts: int, reader: _Reader) -> tuple[bool, ...]:
    if experts <= 1:
        return (False,) * layers
    if config.get("mlp_layer_types") is not None:
        return tuple(kind == "sparse" for kind in reader.items("mlp_layer_types", layers))
    if "decoder_sparse_step" in config or "mlp_only_layers" in config:
        step = reader.optional(("decoder_sparse_step",)) or 1
        dense = set(reader.items("mlp_only_layers"))
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if isinstance(config.get("moe_layer_freq"), list):
        return tuple(bool(flag) for flag in reader.items("moe_layer_freq", layers))
    first = reader.optional(("first_k_dense_replace",))
    every = reader.optional(("moe_layer_freq",)) or 1
    return tuple(i >= first and i % every == 0 for i in range(layers))


def _experts(
    config: Config, model_type: str, experts: int, moe_layers: tuple[bool, ...], reader: _Reader
) -> dict[str, Any]:
    intermediate = reader.optional(_INTERMEDIATE)
    if not any(moe_layers):
        if not intermediate and ("n_inner" in config or model_type in _FOUR_TIMES_WIDE):
            intermediate = 4 * reader.size(_HIDDEN)
        return {"intermediate_size": intermediate or reader.size(_INTERMEDIATE)}
    size = reader.optional(_EXPERT_SIZE)
    if model_type in _INTERMEDIATE_IS_EXPERT:
        size = size or reader.size(("intermediate_size",))
        intermediate = 0
    if not size:
        raise ConfigError(f"{reader.where}: the model has {experts} experts but no {_EXPERT_SIZE[0]}")
    if not all(moe_layers):
        intermediate = intermediate or reader.size(_INTERMEDIATE)
    width = reader.optional(("shared_expert_intermediate_size", "shared_intermediate_size"))
    shared = reader.optional(("n_shared_experts", "num_shared_experts")) or -(-width // size)
    top_k = reader.size(_TOP_K)
    if top_k > experts:
        raise ConfigError(f"{reader.where}: {top_k} experts per token are more than the {experts} there are")
    return {
        "intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": size,
        "num_shared_experts": shared,
        "shared_expert_intermediate_size": width or shared * size,
    }
