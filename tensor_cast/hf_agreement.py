"""One source for what a ``config.json`` leaves out: ours and Transformers' defaults must not stand side by side.

Memory and KV cache are computed from our :class:`~tensor_cast.model_config.ModelConfig`, the traced program is what
Transformers builds. Where a field is missing each fills in its own default, and a run would be about two
models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensor_cast.errors import ConfigError, MsModelingError
from tensor_cast.hf_config import SIZE_NAMES, read_facts
from tensor_cast.hf_families import transformers_version
from tensor_cast.model_config import ModelConfig

__all__ = ["check_agreement"]

#: Facts that decide what is traced or stored, and the names that say them where those are not the fact's own.
#: Drafts are not among them: Transformers does not build them.
_FACTS: Mapping[str, tuple[str, ...]] = {
    **SIZE_NAMES,
    "vocab_size": (),
    "attention": ("kv_lora_rank", "index_topk"),
    "head_dim": (),
    "v_head_dim": ("head_dim",),
    "kv_lora_rank": (),
    "q_lora_rank": (),
    "qk_nope_head_dim": (),
    "qk_rope_head_dim": (),
    "index_topk": (),
    "index_n_heads": (),
    "index_head_dim": (),
    "indexer_layers": ("indexer_types",),
    "layer_windows": ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    "moe_layers": (
        *("mlp_layer_types", "decoder_sparse_step", "mlp_only_layers", "moe_layer_freq", "first_k_dense_replace"),
        *SIZE_NAMES["num_experts"],
    ),
    "num_shared_experts": ("n_shared_experts",),
    "shared_expert_intermediate_size": ("shared_intermediate_size", "n_shared_experts"),
    "tie_word_embeddings": (),
}


def check_agreement(model: ModelConfig, written: Mapping[str, Any], filled: Mapping[str, Any]) -> None:
    """Refuse a configuration in which a default of ours differs from Transformers' own.

    Both are read by the same reader, so whatever differs is what the file does not say.

    Args:
        model: the facts as we took them from the file.
        written: the text model's configuration as the file has it.
        filled: the same with what Transformers' configuration class fills in.

    Raises:
        ConfigError: names each field, both values, and what to write.
    """
    present = {key: value for key, value in filled.items() if value is not None}
    type_, version = model.model_type, transformers_version()
    try:
        theirs = read_facts(present | {"model_type": type_}, model.model_id)
    except MsModelingError as error:
        raise type(error)(f"with what Transformers {version} fills in for {type_}: {error}") from error
    found: dict[str, str] = {}
    unexplained = []
    for fact, names in _FACTS.items():
        ours, other = getattr(model, fact), theirs.get(fact, 0)
        if ours == other:
            continue
        says = (
            f"{fact} {_spell(ours)} in our memory and KV cache, {_spell(other)} in what Transformers {version} builds "
            f"({type_})"
        )
        missing = [name for name in (fact, *names) if name in present and written.get(name) is None]
        if missing:
            found.setdefault(missing[0], says)
        else:
            unexplained.append(says)
    if not found and not unexplained:
        return
    if not found:
        raise ConfigError(
            f"{model.model_id}: config.json is read in two ways: {'; '.join(unexplained)}; compare it "
            "with that of a published checkpoint"
        )
    raise ConfigError(
        f"{model.model_id}: config.json does not say {', '.join(found)}, and two defaults would stand in: "
        f"{'; '.join(found.values())}; write {', '.join(found)} in config.json, as the checkpoint "
        "has it"
    )


def _spell(value: Any) -> str:
    """A size as it is, a list by layer as how many layers have it."""
    if not isinstance(value, tuple):
        return str(value)
    some = sorted({str(entry) for entry in value if entry not in (None, False, True)})
    count = sum(bool(entry) for entry in value)
    return f"on {count} of {len(value)} layers" + (f" ({', '.join(some)})" if some else "")
