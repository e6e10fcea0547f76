"""Reading any Hugging Face config: the embedded ones against published files, names that vary, what is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensor_cast.config_files import config_root
from tensor_cast.errors import ConfigError, UnknownNameError, UnsupportedModelError
from tensor_cast.hf_config import read_facts
from tensor_cast.model_catalog import load_model_config, model_names
from tensor_cast.model_config import AttentionKind, ModelConfig

PUBLISHED = Path(__file__).parents[3] / "shared" / "hf_configs"
PROMISED = [
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3.2",
    "zai-org/GLM-5.3",
    "moonshotai/Kimi-K2-Instruct",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
    "mistralai/Mixtral-8x7B-v0.1",
]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """The config of a small llama with some fields changed; None leaves a field out."""
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    return load_model_config(str(folder))


# -- embedded configs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROMISED)
def test_promised_models_are_embedded(name: str) -> None:
    assert load_model_config(name).num_hidden_layers > 0


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published configs are not beside this checkout")
@pytest.mark.parametrize("name", model_names())
def test_embedded_values_are_the_published_ones(name: str) -> None:
    folder = name.replace("/", "--")
    if not (PUBLISHED / folder).is_dir():
        pytest.skip("this config was written from the published facts, its file is not beside this checkout")
    ours = json.loads((config_root() / "models" / folder / "config.json").read_text())
    theirs = json.loads((PUBLISHED / folder / "config.json").read_text())
    assert {key: theirs[key] for key in ours} == ours
    # What was left out says nothing about sizes: the facts are the same with it.
    full, kept = load_model_config(str(PUBLISHED / folder)), load_model_config(name)
    for field in ModelConfig.__dataclass_fields__:
        if field not in ("model_id", "hf_config", "digest"):
            assert getattr(full, field) == getattr(kept, field), field


SPARSE = {
    "model_type": "glm_moe_dsa",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
}


def test_deepseek_r1() -> None:
    model = load_model_config("deepseek-ai/DeepSeek-R1")
    assert model.attention is AttentionKind.MLA
    assert (model.kv_lora_rank, model.q_lora_rank, model.qk_nope_head_dim, model.qk_rope_head_dim) == (
        512,
        1536,
        128,
        64,
    )
    assert (model.head_dim, model.v_head_dim, model.num_attention_heads) == (192, 128, 128)
    assert model.moe_layers == (False,) * 3 + (True,) * 58
    assert (model.num_experts, model.num_experts_per_tok, model.moe_intermediate_size) == (256, 8, 2048)
    assert (model.num_shared_experts, model.shared_expert_intermediate_size) == (1, 2048)
    assert (model.intermediate_size, model.num_nextn_predict_layers) == (18432, 1)
    assert model.quantization is not None
    assert model.quantization["weight_block_size"] == [128, 128]


def test_layers_that_choose_tokens() -> None:
    """max(layer - offset + 1, 0) is a multiple of freq; GLM-5.2 and 5.3: 4 and 3, the others choose in every layer."""
    assert load_model_config("deepseek-ai/DeepSeek-V3.2").indexer_layers == (True,) * 61
    assert load_model_config("zai-org/GLM-5").indexer_layers == (True,) * 78
    for name in ("zai-org/GLM-5.2", "zai-org/GLM-5.3"):
        own = load_model_config(name).indexer_layers
        assert [i for i, chooses in enumerate(own) if chooses] == [0, 1, *range(2, 75, 4)]
    assert load_model_config("deepseek-ai/DeepSeek-R1").indexer_layers == (False,) * 61


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared"]}, "FSFS"),
        ({"index_topk_pattern": "FFSS"}, "FFSS"),
        ({"index_topk_pattern": ["full", "shared", "shared", "full"]}, "FSSF"),
        ({"index_topk_pattern": "FFSS", "indexer_types": ["full"] * 4}, "FFFF"),  # the list stands above all
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, "FFFS"),
        ({"index_topk_freq": 3}, "FFSS"),
        ({"index_topk_freq": None, "index_topk_pattern": None, "index_skip_topk_offset": None}, "FFFF"),
        ({}, "FFFF"),
    ],
)
def test_ways_to_say_which_layers_choose(fields: dict[str, object], own: str) -> None:
    facts = read_facts({**SPARSE, **fields}, "here")
    assert "".join("F" if chooses else "S" for chooses in facts["indexer_layers"]) == own


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_topk_pattern": "FFS"}, "index_topk_pattern.*4 times F"),
        ({"index_topk_pattern": "FFXS"}, "index_topk_pattern.*4 times F"),
        ({"indexer_types": ["full"]}, "indexer_types.*one entry for each of 4 layers"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "first layer must be full"),
        ({"index_head_dim": None}, "index_head_dim"),
    ],
)
def test_what_cannot_be_said_of_them(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_facts({**SPARSE, **fields}, "here")


def test_kinds_of_attention() -> None:
    assert load_model_config("deepseek-ai/DeepSeek-V3.2").attention is AttentionKind.DSA
    assert load_model_config("zai-org/GLM-5.3").attention is AttentionKind.DSA
    assert load_model_config("moonshotai/Kimi-K2-Instruct").attention is AttentionKind.MLA
    assert load_model_config("Qwen/Qwen3-235B-A22B").attention is AttentionKind.GQA


def test_gpt_oss_alternates_windows_and_names_expert_size_intermediate_size() -> None:
    model = load_model_config("openai/gpt-oss-20b")
    assert model.layer_windows == (128, None) * 12
    assert (model.moe_intermediate_size, model.intermediate_size, model.num_experts, model.num_experts_per_tok) == (
        2880,
        0,
        32,
        4,
    )
    assert model.head_dim == 64  # not 2880 / 64


def test_mixtral_names_expert_size_intermediate_size() -> None:
    model = load_model_config("mistralai/Mixtral-8x7B-v0.1")
    assert (model.moe_intermediate_size, model.intermediate_size, model.num_experts) == (14336, 0, 8)
    assert model.moe_layers == (True,) * 32


def test_glm_lists_its_sparse_layers() -> None:
    model = load_model_config("zai-org/GLM-5.3")
    assert (model.head_dim, model.v_head_dim) == (256, 256)  # nope 192 + rope 64; the field head_dim says 192
    assert model.moe_layers == (False,) * 3 + (True,) * 75


def test_qwen_dense_and_moe() -> None:
    dense, moe = load_model_config("Qwen/Qwen3-32B"), load_model_config("Qwen/Qwen3-30B-A3B")
    assert (dense.is_moe, dense.head_dim, dense.num_key_value_heads) == (False, 128, 8)  # 5120 / 64 would be 80
    assert (moe.is_moe, moe.moe_intermediate_size, moe.num_shared_experts) == (True, 768, 0)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-R1"),
        ("DeepSeek-R1", "deepseek-ai/DeepSeek-R1"),
        ("qwen/qwen3-32b", "Qwen/Qwen3-32B"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
    ],
)
def test_other_names(name: str, target: str) -> None:
    assert load_model_config(name) is load_model_config(target)


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    first = read(tmp_path)
    (tmp_path / "other").mkdir()
    assert read(tmp_path / "other").digest == first.digest
    assert read(tmp_path, vocab_size=101).digest != first.digest
    assert len(first.digest) == 64
    assert json.loads(first.hf_config)["vocab_size"] == 100


# -- names and defaults ---------------------------------------------------------------------------------------------


def test_defaults_that_transformers_supplies(tmp_path: Path) -> None:
    model = read(tmp_path)
    assert (model.num_key_value_heads, model.head_dim, model.v_head_dim) == (8, 8, 8)
    assert (model.dtype, model.tie_word_embeddings, model.max_position_embeddings) == ("bfloat16", False, 0)
    assert read(tmp_path, model_type="gemma2", architectures=["Gemma2ForCausalLM"]).tie_word_embeddings


def test_names_of_gpt2(tmp_path: Path) -> None:
    raw = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}
    raw |= {"n_positions": 1024, "vocab_size": 50257, "n_inner": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = load_model_config(str(tmp_path))
    assert (model.hidden_size, model.num_hidden_layers, model.head_dim, model.intermediate_size) == (768, 12, 64, 3072)
    assert model.tie_word_embeddings


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("value", ["float16", "torch.float16"])
def test_dtype(tmp_path: Path, key: str, value: str) -> None:
    assert read(tmp_path, **{key: value}).dtype == "float16"


def test_multimodal_wrappers_nest_the_text_model(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = read(
        tmp_path,
        architectures=["ThingForConditionalGeneration"],
        model_type="thing",
        hidden_size=None,
        text_config={**LLAMA, "architectures": None, "num_hidden_layers": 7},
        vision_config={"hidden_size": 3},
        quantization_config=quantization,
        torch_dtype="float16",
    )
    assert (model.model_type, model.num_hidden_layers, model.dtype) == ("llama", 7, "float16")
    assert model.quantization == quantization
    assert json.loads(model.hf_config)["quantization_config"] == quantization


QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "sliding_window": 16}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 16}, (None,) * 4),  # llama has none, whatever the file says
        ({"model_type": "mistral", "sliding_window": 16}, (16,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        (QWEN, (None,) * 4),  # off unless switched on
        ({**QWEN, "use_sliding_window": False, "max_window_layers": 2}, (None,) * 4),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 16)),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 4}, (None,) * 4),
        ({**QWEN, "model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 3}, (16,) * 4),
        ({"model_type": "gemma2", "sliding_window": 16}, (16, None, 16, None)),
        ({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 3}, (16, 16, None, 16)),
        (
            {
                "model_type": "gpt_oss",
                "sliding_window": 16,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            (None, None, None, 16),
        ),
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(tmp_path, **changes).layer_windows == windows


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("changes", "moe"),
    [
        ({}, (False,) * 4),
        ({"num_experts": 1}, (False,) * 4),
        (EXPERTS, (True,) * 4),
        ({**EXPERTS, "num_experts": None, "num_local_experts": 4}, (True,) * 4),
        (
            {**EXPERTS, "num_experts": None, "n_routed_experts": 4, "first_k_dense_replace": 1},
            (False, True, True, True),
        ),
        ({**EXPERTS, "first_k_dense_replace": 1, "moe_layer_freq": 2}, (False, False, True, False)),
        ({**EXPERTS, "moe_layer_freq": [0, 1, 1, 0]}, (False, True, True, False)),
        ({**EXPERTS, "decoder_sparse_step": 2}, (False, True, False, True)),
        ({**EXPERTS, "mlp_only_layers": [1]}, (True, False, True, True)),
        ({**EXPERTS, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, (False, True, False, True)),
        ({**EXPERTS, "num_experts_per_tok": None, "experts_per_token": 2}, (True,) * 4),
    ],
)
def test_layers_with_experts(tmp_path: Path, changes: dict[str, Any], moe: tuple[bool, ...]) -> None:
    model = read(tmp_path, **changes)
    assert model.moe_layers == moe
    assert (model.num_experts, model.num_experts_per_tok) == ((4, 2) if any(moe) else (0, 0))


def test_shared_experts(tmp_path: Path) -> None:
    by_count = read(tmp_path, **EXPERTS, n_shared_experts=2)
    by_width = read(tmp_path, **EXPERTS, shared_expert_intermediate_size=64)
    for model in (by_count, by_width):
        assert (model.num_shared_experts, model.shared_expert_intermediate_size) == (2, 64)


def test_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    )
    assert read(tmp_path).quantization == {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


# -- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in model_names() if "Kimi" not in n])
def test_facts_agree_with_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = load_model_config(name)
    raw = json.loads(model.hf_config)
    config = transformers.CONFIG_MAPPING[model.model_type](**raw)
    assert config.num_key_value_heads == model.num_key_value_heads
    assert config.tie_word_embeddings == model.tie_word_embeddings
    if model.attention is AttentionKind.GQA:
        assert getattr(config, "head_dim", None) in (model.head_dim, None)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if model.attention is AttentionKind.GQA and kinds:
        assert tuple(window if kind == "sliding_attention" else None for kind in kinds) == model.layer_windows
    elif model.attention is AttentionKind.GQA:
        assert window is None
        assert set(model.layer_windows) == {None}


# -- what is broken -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_dtype": "float3"}, "field dtype: found 'float3'; allowed is one of bfloat16"),
        ({"text_config": "x", "num_hidden_layers": None}, "field text_config: found 'x'; allowed is an object"),
        ({"hidden_size": None}, "need hidden_size or n_embd .* as a positive integer; found none of them"),
        ({"hidden_size": 0}, "need hidden_size .*found hidden_size = 0"),
        ({"hidden_size": -64}, "field hidden_size: found -64; allowed is a positive integer"),
        ({"num_hidden_layers": "4"}, "field num_hidden_layers: found '4'"),
        ({"num_attention_heads": True}, "field num_attention_heads: found True"),
        ({"vocab_size": None}, "need vocab_size"),
        ({"model_type": None}, "field model_type: it is missing"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads; found 8 and 3"),
        ({"hidden_size": 65}, "without head_dim, hidden_size must be a multiple"),
        ({"intermediate_size": None}, "need intermediate_size"),
        ({"num_experts": 4, "num_experts_per_tok": 2}, "4 experts but no moe_intermediate_size"),
        ({"num_experts": 4, "moe_intermediate_size": 32}, "need num_experts_per_tok"),
        ({"kv_lora_rank": 512}, "need qk_nope_head_dim"),
        ({"architectures": ["BertModel"]}, "not the config of a causal language model .*BertModel"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "not the config of a causal language model"),
        ({"layer_types": ["full_attention"]}, "one entry for each of 4 layers; found 1"),
        ({"layer_types": "full"}, "field layer_types: found 'full'; allowed is a list"),
        ({**EXPERTS, "first_k_dense_replace": "x"}, "field first_k_dense_replace: found 'x'"),
        ({**EXPERTS, "mlp_only_layers": 3}, "field mlp_only_layers: found 3; allowed is a list"),
        ({**EXPERTS, "moe_layer_freq": [1]}, "one entry for each of 4 layers; found 1"),
        ({**EXPERTS, "num_experts_per_tok": 5}, "5 experts per token are more than the 4"),
        ({"quantization_config": "fp8"}, "field quantization_config: found 'fp8'; allowed is an object"),
    ],
)
def test_a_broken_config_gives_one_clear_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, **changes)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON at line 1, column 2"), ("[]", "must hold a JSON object; it holds list"), ("\xff", "JSON")],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, "linear_attention layers keep a state"),
        ({"hybrid_override_pattern": "M*"}, "recurrent layers"),
        ({"compress_ratios": [0]}, "compressed KV cache"),
        ({"global_head_dim": 512}, "head sizes that differ"),
        ({"per_layer_config": {"03": {"head_dim": 512}}}, "head sizes that differ"),
        ({"attention_chunk_size": 8192}, "attention in chunks"),
        ({"layer_types": ["full_attention", "mlp"] * 2}, "layers of type mlp are not modelled yet; those of"),
        ({"is_encoder_decoder": True}, "encoder-decoder model .* only models that are a decoder alone"),
        ({"num_attention_heads": None}, "without attention .* needs its number of heads"),
    ],
)
def test_what_is_not_modelled_is_said_in_a_sentence(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, **changes)


def test_an_unknown_id_says_that_no_hub_is_reached() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean .*Qwen/Qwen3-8B.*No hub is reached.*local folder"):
        load_model_config("Qwen/Qwen3-7B")


def test_a_path_without_a_config(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json", tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"no config at .*give a folder that holds config\.json"):
            load_model_config(str(path))
