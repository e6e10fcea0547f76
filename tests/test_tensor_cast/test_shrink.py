"""A shrunk config runs on a laptop and is still the same model: legal, buildable, every behaviour kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tracer_models import TINY, tiny

from tensor_cast.errors import LegalityError, UnsupportedModelError
from tensor_cast.model_catalog import describe, load_model_config, model_names
from tensor_cast.model_config import AttentionKind, ModelConfig, ParallelConfig
from tensor_cast.parallel import violations
from tensor_cast.proof.shrink import WINDOW, shrink
from tensor_cast.proof.small_layout import small_layout
from tensor_cast.proof.telling import telling_layouts

#: Every field that may get smaller. Whatever else a config says must come through untouched.
SIZES = {
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("num_hidden_layers", "layer_types", "mlp_layer_types", "indexer_types", "first_k_dense_replace"),
    *("max_window_layers", "sliding_window", "index_head_dim", "index_n_heads", "index_topk", "quantization_config"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
#: Facts that must be the same.
SAME = ("model_id", "model_type", "attention", "dtype", "tie_word_embeddings", "num_shared_experts", "is_moe")


def layout(tp: int = 1, dp: int = 1, ep: int = 1, dcp: int = 1, interleave: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        expert_parallel_size=ep,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
    )


def described(name: str, **changes: Any) -> ModelConfig:
    """An embedded config with some fields changed."""
    return describe({**json.loads(load_model_config(name).hf_config), **changes}, name, name)


def known(name: str) -> ModelConfig:
    try:
        return load_model_config(name)
    except UnsupportedModelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", model_names())
def test_every_embedded_config_on_every_telling_layout(name: str) -> None:
    model = known(name)
    layouts = telling_layouts(model, block_size=16)
    assert layouts[0].what == "one rank"
    assert len(layouts) >= 3
    for asked in layouts:
        small = shrink(model, asked.parallel, block_size=16, max_ranks=4)
        got = small.model
        assert small.parallel.world_size <= 4
        assert not violations(got, small.parallel, dcp_semantics=asked.dcp_semantics, block_size=small.block_size), (
            asked.what
        )
        assert {change.field for change in small.changes} <= SIZES
        for fact in SAME:
            assert getattr(got, fact) == getattr(model, fact), fact
        assert bool(got.q_lora_rank) == bool(model.q_lora_rank)
        # Query heads for each KV head decide how the cache is cut.
        group = model.num_attention_heads // model.num_key_value_heads
        assert got.num_attention_heads == group * got.num_key_value_heads
        if model.attention is AttentionKind.GQA:
            before, after = asked.parallel.tensor_parallel_size, small.parallel.tensor_parallel_size
            assert (after > got.num_key_value_heads) == (before > model.num_key_value_heads)
        assert {w is None for w in got.layer_windows} == {w is None for w in model.layer_windows}
        assert set(got.layer_windows) <= {None, WINDOW}
        assert set(got.moe_layers) == set(model.moe_layers)
        assert 2 <= got.num_hidden_layers <= 6
        assert got.hidden_size <= 1024
        if model.is_moe:
            assert got.num_experts_per_tok < got.num_experts <= 17


@pytest.mark.parametrize("name", model_names())
def test_transformers_builds_it(name: str) -> None:
    from tensor_cast.tracer.builder import build

    model = known(name)
    small = shrink(model, layout(tp=2), block_size=16)
    try:
        built = build(small.model)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    assert type(built).__name__.endswith("ForCausalLM")
    assert sum(p.numel() for p in built.parameters()) < 3e6
    assert built.config.num_hidden_layers == small.model.num_hidden_layers
    scaling = json.loads(model.hf_config).get("rope_scaling")
    if scaling:
        rope = built.config.rope_parameters  # one for each kind of layer where they differ
        assert rope.get("full_attention", rope)["rope_type"] == scaling.get("rope_type", scaling.get("type"))


@pytest.mark.parametrize("name", sorted(TINY))
def test_small_models_stay_what_they_are(name: str) -> None:
    model = tiny(name)
    small = shrink(model, layout(tp=2), block_size=4).model
    assert {w is None for w in small.layer_windows} == {w is None for w in model.layer_windows}
    assert small.tie_word_embeddings == model.tie_word_embeddings
    assert small.num_hidden_layers == 2


def test_deepseek_by_hand() -> None:
    model = load_model_config("deepseek-ai/DeepSeek-R1")
    small = shrink(model, layout(tp=4, dcp=2), block_size=64)
    config = json.loads(small.model.hf_config)
    # 128 heads on 4 ranks are several each, so 8 do; 8 groups of which 4 are picked are 4 of which 2 are.
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 8)
    assert (config["n_group"], config["topk_group"], config["n_routed_experts"]) == (4, 2, 16)
    assert config["num_experts_per_tok"] == 4
    assert small.model.moe_layers == (False, True)
    assert config["rope_scaling"] == json.loads(model.hf_config)["rope_scaling"]
    assert (config["scoring_func"], config["routed_scaling_factor"]) == ("sigmoid", 2.5)
    assert small.block_size == 4


def test_layers_of_each_kind_are_picked_out_of_lists() -> None:
    model = load_model_config("zai-org/GLM-5.2")
    config = json.loads(shrink(model, layout(), block_size=64).model.hf_config)
    whole = json.loads(model.hf_config)
    before = set(zip(whole["mlp_layer_types"], whole["indexer_types"], strict=True))
    after = list(zip(config["mlp_layer_types"], config["indexer_types"], strict=True))
    assert set(after) == before
    assert len(after) == len(before) == config["num_hidden_layers"]


def test_dense_layers_between_experts() -> None:
    model = described("Qwen/Qwen3-30B-A3B", mlp_only_layers=[3, 9], decoder_sparse_step=1)
    small = shrink(model, layout(), block_size=16).model
    assert sorted(small.moe_layers) == [False, True]
    every_other = shrink(described("Qwen/Qwen3-30B-A3B", decoder_sparse_step=2), layout(), block_size=16).model
    assert every_other.moe_layers == (False, True)


def test_a_pattern_of_windows_becomes_a_list() -> None:
    model = tiny("gemma2", layer_types=None, num_hidden_layers=12, sliding_window=4096)
    assert model.layer_windows == (4096, None) * 6
    small = shrink(model, layout(), block_size=16).model
    assert small.layer_windows == (WINDOW, None)


def test_layers_by_a_rule_that_only_counting_can_say() -> None:
    """Every third layer routes to experts, in a way that no list can say: the first layers stay, and so the rule."""
    model = tiny("deepseek_v3", moe_layer_freq=3, first_k_dense_replace=0, num_hidden_layers=12)
    assert shrink(model, layout(), block_size=16).model.moe_layers == (True, False)
    late = tiny("deepseek_v3", moe_layer_freq=3, first_k_dense_replace=2, num_hidden_layers=12)
    assert shrink(late, layout(), block_size=16).model.moe_layers == (False, False, False, True)


def test_uneven_experts_stay_uneven() -> None:
    model = described("Qwen/Qwen3-30B-A3B", num_experts=126)
    assert shrink(model, layout(tp=4, ep=4), block_size=16).model.num_experts % 4
    assert shrink(model, layout(tp=2, ep=2), block_size=16).model.num_experts % 2 == 0


def test_a_vocabulary_that_needs_padding() -> None:
    model = described("Qwen/Qwen3-8B", vocab_size=151669, eos_token_id=[151645, 7])
    config = json.loads(shrink(model, layout(tp=2), block_size=16).model.hf_config)
    assert config["vocab_size"] == 66
    assert config["eos_token_id"] == [151645 % 66, 7]
    assert shrink(described("Qwen/Qwen3-8B"), layout(tp=2), block_size=16).model.vocab_size == 128


def test_rope_lists_follow_the_head() -> None:
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 32 + [2.0] * 32,
        "long_factor": [float(i) for i in range(64)],
    }
    model = described("Qwen/Qwen3-8B", rope_scaling=scaling)
    got = json.loads(shrink(model, layout(), block_size=16).model.hf_config)["rope_scaling"]
    assert got["short_factor"] == [1.0] * 4 + [2.0] * 4
    assert got["long_factor"] == [0.0, 8.0, 16.0, 24.0, 32.0, 40.0, 48.0, 56.0]
    partial = shrink(described("Qwen/Qwen3-8B", partial_rotary_factor=0.25), layout(), block_size=16).model
    assert partial.head_dim == 16


# -- layouts ----------------------------------------------------------------------------------------------------------


def sizes(parallel: ParallelConfig) -> tuple[int, int, int, int]:
    return (
        parallel.tensor_parallel_size,
        parallel.data_parallel_size,
        parallel.expert_parallel_size,
        parallel.decode_context_parallel_size,
    )


@pytest.mark.parametrize(
    ("name", "asked", "ranks", "want", "kv_heads"),
    [
        # Up to eight ranks run as asked. Heads: split two to a rank; one to a rank; copied.
        ("Qwen/Qwen3-32B", layout(tp=4), 8, (4, 1, 1, 1), 8),
        ("Qwen/Qwen3-32B", layout(tp=8), 8, (8, 1, 1, 1), 8),
        ("Qwen/Qwen3-235B-A22B", layout(tp=8), 8, (8, 1, 1, 1), 2),
        ("Qwen/Qwen3-235B-A22B", layout(tp=8, dcp=2), 8, (8, 1, 1, 2), 4),  # two copies, all used up: so they stay
        ("Qwen/Qwen3-235B-A22B", layout(tp=16, dcp=2), 8, (8, 1, 1, 2), 2),  # four copies, half of them
        # More ranks: experts go on filling all of them, a DCP group stays a part of the TP group.
        ("deepseek-ai/DeepSeek-R1", layout(tp=32, ep=32), 8, (8, 1, 8, 1), 16),
        ("deepseek-ai/DeepSeek-R1", layout(tp=16, dp=4, ep=64, dcp=4), 8, (4, 2, 8, 2), 8),
        ("deepseek-ai/DeepSeek-R1", layout(tp=16, dp=2, dcp=16), 8, (4, 2, 1, 4), 8),
        ("deepseek-ai/DeepSeek-R1", layout(tp=16, dp=2, dcp=16), 4, (2, 2, 1, 2), 4),
        ("Qwen/Qwen3-235B-A22B", layout(tp=4, dp=32, ep=128), 8, (4, 2, 8, 1), 4),
    ],
)
def test_layouts(name: str, asked: ParallelConfig, ranks: int, want: tuple[int, ...], kv_heads: int) -> None:
    model = load_model_config(name)
    got = small_layout(model, asked, block_size=16, max_ranks=ranks)
    assert sizes(got.parallel) == want
    assert got.kv_heads == kv_heads
    small = shrink(model, asked, block_size=16, max_ranks=ranks)
    assert not violations(small.model, small.parallel, dcp_semantics="vllm-ascend", block_size=small.block_size)


@pytest.mark.parametrize(
    ("block", "interleave", "want"),
    [(16, 1, (4, 1)), (128, 128, (4, 4)), (128, 16, (4, 2)), (2, 2, (2, 2)), (1, 1, (1, 1))],
)
def test_blocks(block: int, interleave: int, want: tuple[int, int]) -> None:
    got = small_layout(load_model_config("Qwen/Qwen3-8B"), layout(tp=2, interleave=interleave), block_size=block)
    assert (got.block_size, got.parallel.cp_kv_cache_interleave_size) == want


def test_a_layout_that_nothing_small_resembles() -> None:
    model = described("Qwen/Qwen3-8B", num_attention_heads=33, num_key_value_heads=3, hidden_size=33 * 128)
    with pytest.raises(LegalityError, match=r"verify\.ranks"):
        shrink(model, layout(tp=11), block_size=16, max_ranks=1)


def test_no_torch_is_needed() -> None:
    import subprocess
    import sys

    code = "import sys, tensor_cast.proof.shrink, tensor_cast.proof.telling; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert torch.__version__  # this test's own process does have it
