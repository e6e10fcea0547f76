"""What a config.json leaves out has one source: a default of ours that is not Transformers' own is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.errors import ConfigError, LegalityError, UnsupportedModelError
from tensor_cast.hf_agreement import check_agreement
from tensor_cast.hf_families import known_families
from tensor_cast.model_catalog import load_model_config, model_names
from tensor_cast.model_config import ParallelConfig
from tensor_cast.parallel import check
from tensor_cast.tracer.builder import hf_config

#: As MiniMax-M2 has it, smaller: heads of 16 although 64 / 16 is 4, two KV heads, four experts.
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "num_mtp_modules": 3,
}


def write(folder: Path, **changes: Any) -> str:
    """A folder with MINIMAX, some fields changed; None leaves a field out."""
    raw = {key: value for key, value in {**MINIMAX, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


@pytest.mark.parametrize("name", model_names())
def test_embedded_models_agree(name: str) -> None:
    model = load_model_config(name)
    try:
        built = hf_config(model)  # checks it
    except UnsupportedModelError:
        pytest.skip("not traced")
    assert built.hidden_size == model.hidden_size


# What Transformers 5.24's MiniMaxM2Config fills in: head_dim 128, 8 KV heads, 256 experts.
@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("head_dim", "head_dim 4 in our memory and KV cache, 128 in what Transformers"),
        ("num_key_value_heads", "num_key_value_heads 16 in our memory and KV cache, 2 in what Transformers"),
        ("num_local_experts", "num_experts 0 in our memory and KV cache, 256 in what Transformers"),
    ],
)
def test_a_missing_field_with_two_defaults_is_refused(tmp_path: Path, field: str, says: str) -> None:
    model = load_model_config(write(tmp_path, **{field: None}))
    defaults = {"head_dim": 128, "num_key_value_heads": 2, "num_local_experts": 256}
    with pytest.raises(ConfigError) as caught:
        check_agreement(model, MINIMAX | {field: None}, MINIMAX | {field: defaults[field]})
    assert says in str(caught.value)
    assert f"write {field} in config.json" in str(caught.value)


@pytest.mark.parametrize("field", ["head_dim", "num_key_value_heads", "num_local_experts"])
def test_tracing_refuses_it_and_caches_nothing(tmp_path: Path, field: str) -> None:
    (tmp_path / "model").mkdir()
    model = load_model_config(write(tmp_path / "model", **{field: None}))
    with pytest.raises(ConfigError, match=f"config.json does not say {field}, and two defaults would stand in"):
        _ = TraceLibrary(model, cache_dir=tmp_path / "cache").skeleton
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_whole_config_is_traced(tmp_path: Path) -> None:
    model = load_model_config(write(tmp_path))
    assert TraceLibrary(model, use_cache=False).skeleton.fixed


def test_a_contradiction_that_no_field_explains_is_named(tmp_path: Path) -> None:
    model = load_model_config(write(tmp_path))
    with pytest.raises(ConfigError, match=r"read in two ways: vocab_size 128 in our memory .* 256 in what"):
        check_agreement(model, MINIMAX, MINIMAX | {"vocab_size": 256})


def test_lists_by_layer_are_counted(tmp_path: Path) -> None:
    model = load_model_config(write(tmp_path))
    filled = MINIMAX | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
    with pytest.raises(
        ConfigError, match=r"layer_windows on 0 of 2 layers in our .*, on 1 of 2 layers \(512\) in what"
    ):
        check_agreement(model, MINIMAX, filled)


def test_an_unknown_architecture_is_said_before_what_follows_from_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_config(write(tmp_path, model_type="minimax_m9"))
    message = str(caught.value)
    assert "knows no model_type 'minimax_m9'" in message
    assert message.index("minimax_m9") < message.index("moe_intermediate_size")
    assert "did you mean minimax_m2 or" in message


def test_an_unknown_architecture_that_can_be_read_is_refused_when_traced(tmp_path: Path) -> None:
    model = load_model_config(write(tmp_path, model_type="minimax_m9", moe_intermediate_size=32))
    with pytest.raises(UnsupportedModelError, match=r"knows no model_type 'minimax_m9'; did you mean minimax_m2"):
        hf_config(model)


def test_families_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(CONFIG_MAPPING_NAMES) <= known_families()


def test_no_model_type_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="field model_type: it is missing"):
        load_model_config(write(tmp_path, model_type=None))


def test_draft_modules_of_another_kind_are_named(tmp_path: Path) -> None:
    model = load_model_config(write(tmp_path))
    with pytest.raises(LegalityError, match=r"of a kind that is not modelled \(num_mtp_modules 3\)"):
        check(model, ParallelConfig(), dcp_semantics="vllm", block_size=16, num_mtp_tokens=1)
