"""Traces of real models: sizes of weights, golden DCP volumes, what cannot be traced and why."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tracer_models import TINY, model_config, tiny
from transformers import CONFIG_MAPPING

import tensor_cast
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.engine.dcp import get_semantics
from tensor_cast.errors import ConfigError, LegalityError, UnknownNameError, UnsupportedModelError
from tensor_cast.ir.record import Kind, OpRecord, Phase, Role, Scope, Trace
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig

#: Parameters of each model as published with the checkpoints (DeepSeek and Kimi: with the routers' bias, without MTP).
PARAMETERS = {
    "deepseek-ai/DeepSeek-R1": 671_026_419_200,
    "moonshotai/Kimi-K2-Instruct": 1_026_408_232_448,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
}
TOKEN = {"B": 1, "Q": 1, "S": 4096}


@cache
def library(name: str) -> TraceLibrary:
    return TraceLibrary(load_model_config(name), use_cache=False)


def trace(name: str, parallel: ParallelConfig, phase: Phase = Phase.DECODE, semantics: str = "vllm-ascend") -> Trace:
    return library(name).trace(parallel, phase, dcp_semantics=semantics, block_size=128)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_embedded_models_trace_with_their_published_size(name: str) -> None:
    for tp in (1, 2, 8):
        traces = [trace(name, ParallelConfig(tp), phase) for phase in Phase]
        for traced in traces:
            whole = sum(spec.full_numel * layers for spec, layers in traced.params if not spec.tied_to)
            assert whole == PARAMETERS[name]
        local = sum(spec.numel * layers for spec, layers in traces[0].params if not spec.tied_to)
        # Everything that is split is split tp ways; the rest is small.
        assert PARAMETERS[name] / tp <= local <= PARAMETERS[name] / tp * 1.02


def layer_collectives(traced: Trace, axis: str) -> list[OpRecord]:
    """Collectives of the first attention part."""
    part = next(s.part for s in traced.segments if s.part.key.startswith("attention"))
    return [op for op in part.ops if op.axis == axis]


@pytest.mark.parametrize(
    ("name", "dcp", "semantics", "expected"),
    [
        ("deepseek-ai/DeepSeek-R1", 8, "vllm-ascend", [18_432, 262_656]),
        ("deepseek-ai/DeepSeek-R1", 8, "rfc", [18_432, 66_048]),
        ("deepseek-ai/DeepSeek-R1", 8, "vllm", [18_432, 512, 131_072]),
        ("Qwen/Qwen3-235B-A22B", 2, "vllm-ascend", [2_048, 8_256]),
        ("Qwen/Qwen3-235B-A22B", 2, "rfc", [2_048, 8_256]),
        ("Qwen/Qwen3-235B-A22B", 2, "vllm", [2_048, 64, 4_096]),
    ],
)
def test_golden_dcp_volumes(name: str, dcp: int, semantics: str, expected: list[int]) -> None:
    """Bytes of each collective's input buffer per token, layer and rank (engine sources; RFC 2.1.4.3)."""
    parallel = ParallelConfig(8, decode_context_parallel_size=dcp)
    ops = layer_collectives(trace(name, parallel, semantics=semantics), "dcp")
    assert [op.collective_bytes(TOKEN) for op in ops] == expected
    assert {op.group_size for op in ops} == {dcp}
    rule = get_semantics(semantics).collectives(load_model_config(name), 8, dcp)
    assert [(op.name.split(".")[1], op.collective_bytes(TOKEN)) for op in ops] == [(c.op, c.nbytes) for c in rule]


def find(traced: Trace, name: str) -> OpRecord:
    return next(op for op in traced.ops if op.name == name)


def shapes(op: OpRecord) -> list[str]:
    return [f"{t.dtype}[{', '.join(map(str, t.shape))}]" for t in (*op.inputs, *op.outputs)]


def test_rfc_shapes_mla() -> None:
    """Source 003, section 2.1.4, classes A to D, for DeepSeek-R1 at tp8 dcp8."""
    traced = trace("deepseek-ai/DeepSeek-R1", ParallelConfig(8, decode_context_parallel_size=8))
    assert shapes(find(traced, "tensor_cast.mla_cache_write")) == [
        "bfloat16[B, Q, 576]",
        "bfloat16[B*ceildiv(S, 1024), 128, 576]",
        "int32[B*Q]",
    ]
    gather = find(traced, "tensor_cast.gather_kv")
    assert shapes(gather)[1] == "int32[B*Q, ceildiv(S, 1024)]"  # flattened under DCP
    assert shapes(gather)[-1] == "bfloat16[B, ceildiv(S, 8), 576]"
    attention = find(traced, "tensor_cast.mla_attention")
    assert shapes(attention)[0] == "bfloat16[B, Q, 128, 576]"
    assert shapes(attention)[-2:] == ["bfloat16[B, Q, 128, 512]", "float32[B, Q, 128]"]
    assert attention.attr("dcp") == 8
    assert shapes(find(traced, "_c10d_functional.all_to_all_single"))[0] == "float32[128, 513, B*Q]"
    assert shapes(find(traced, "tensor_cast.merge_attention"))[-1] == "bfloat16[B, Q, 16, 512]"


def test_rfc_shapes_gqa() -> None:
    """The same for Qwen3-235B (64 query and 4 KV heads of 128) at tp8, dcp 1 and 2, and the rfc's own KV heads."""
    alone = trace("Qwen/Qwen3-235B-A22B", ParallelConfig(8))
    assert shapes(find(alone, "tensor_cast.reshape_and_cache")) == [
        "bfloat16[B, Q, 1, 128]",
        "bfloat16[B, Q, 1, 128]",
        "bfloat16[2, B*ceildiv(S, 128), 128, 1, 128]",
        "int32[B*Q]",
    ]
    assert shapes(find(alone, "tensor_cast.gather_kv"))[1] == "int32[B, ceildiv(S, 128)]"
    assert shapes(find(alone, "tensor_cast.attention"))[1] == "bfloat16[B, S, 1, 128]"
    assert len(find(alone, "tensor_cast.attention").outputs) == 1  # no lse without DCP

    split = trace("Qwen/Qwen3-235B-A22B", ParallelConfig(8, decode_context_parallel_size=2))
    attention = find(split, "tensor_cast.attention")
    assert shapes(attention)[:2] == ["bfloat16[B, Q, 16, 128]", "bfloat16[B, ceildiv(S, 2), 1, 128]"]
    assert shapes(attention)[-1] == "float32[B, Q, 16]"

    rfc = trace("Qwen/Qwen3-32B", ParallelConfig(8, decode_context_parallel_size=4), semantics="rfc")
    assert shapes(find(rfc, "tensor_cast.attention"))[1] == "bfloat16[B, ceildiv(S, 4), 4, 128]"


def test_mla_prefill_is_expanded_over_the_whole_context() -> None:
    traced = trace("deepseek-ai/DeepSeek-R1", ParallelConfig(8), Phase.PREFILL)
    expand = next(op for op in traced.ops if op.module.endswith("kv_b_proj"))
    assert expand.scope is Scope.SEQUENCE
    assert expand.inputs[0].kind is Kind.KV
    assert shapes(expand) == ["bfloat16[B, 1, S, 512]", "bfloat16[4096, 512]", "bfloat16[B, 1, S, 4096]"]
    assert shapes(find(traced, "tensor_cast.attention"))[1] == "bfloat16[B, S, 16, 192]"
    assert not [op for op in traced.ops if op.name == "aten.bmm"]


def test_sampling_takes_one_token_of_a_prompt_and_all_of_a_verification() -> None:
    for phase, tokens in ((Phase.PREFILL, "1"), (Phase.DECODE, "Q")):
        traced = trace("Qwen/Qwen3-32B", ParallelConfig(8), phase)
        head = next(op for op in traced.ops if op.module == "lm_head")
        assert [str(d) for d in head.inputs[0].shape] == ["B", tokens, "5120"]
        assert head.scope is find(traced, "tensor_cast.sample").scope is Scope.SAMPLE


def test_sliding_window_bounds_what_is_read() -> None:
    traced = trace("openai/gpt-oss-20b", ParallelConfig(8))
    read = [
        (str(op.inputs[1].shape[1]), op.attr("window"), op.repeat) for op in traced.ops if "ast.attention" in op.name
    ]
    assert read == [("min(Q + 127, S)", 128, 12), ("S", None, 12)]
    assert [t.name.endswith("sinks") for t in find(traced, "tensor_cast.attention").inputs] == [False] * 3 + [
        True,
        False,
    ]


def test_experts_are_split_as_the_layout_says() -> None:
    def experts(parallel: ParallelConfig) -> tuple[list[tuple[int, ...]], tuple[Any, ...]]:
        traced = trace("deepseek-ai/DeepSeek-R1", parallel)
        spec = next(s for s, _ in traced.params if s.name.endswith("experts.gate_up_proj"))
        assert spec.role is Role.EXPERTS
        assert spec.full_shape == (256, 4096, 7168)
        op = find(traced, "tensor_cast.grouped_experts")
        assert op.inputs[3].shape == spec.shape
        assert (op.attr("num_experts"), op.attr("top_k"), op.attr("ep")) == (256, 8, parallel.expert_parallel_size)
        return [spec.shape, op.inputs[0].shape], spec.splits

    assert experts(ParallelConfig(8)) == ([(256, 512, 7168), experts_tokens("B*Q")], ((1, "moe_tp", 8),))
    assert experts(ParallelConfig(8, 1, 1, 8)) == ([(32, 4096, 7168), experts_tokens("B*Q")], ((0, "ep", 8),))
    assert experts(ParallelConfig(4, 1, 4, 16)) == ([(16, 4096, 7168), experts_tokens("4*B*Q")], ((0, "ep", 16),))
    assert experts(ParallelConfig(4, 1, 4, 1)) == ([(256, 256, 7168), experts_tokens("4*B*Q")], ((1, "moe_tp", 16),))


def experts_tokens(tokens: str) -> tuple[Any, ...]:
    from tensor_cast.ir.expr import Expr

    return (Expr.parse(tokens), 7168)


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    traced = trace("Qwen/Qwen3-235B-A22B", ParallelConfig(16))
    spec = next(s for s, _ in traced.params if s.name.endswith("k_proj.weight"))
    assert (spec.shape, spec.full_shape, spec.splits) == ((128, 4096), (512, 4096), ((0, "tp", 4),))


def test_what_stays_whole_is_listed() -> None:
    names = {path.split(".", 3)[3] for path in trace("deepseek-ai/DeepSeek-R1", ParallelConfig(8)).replicated}
    assert names == {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "mlp.gate"}
    assert trace("Qwen/Qwen3-32B", ParallelConfig(8)).replicated == ()


def test_tied_embedding_costs_nothing_twice() -> None:
    traced = TraceLibrary(tiny("qwen3"), use_cache=False).trace(
        ParallelConfig(2), Phase.DECODE, dcp_semantics="vllm", block_size=4
    )
    specs = {spec.name: spec for spec, _ in traced.params}
    assert specs["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert specs["model.embed_tokens.weight"].tied_to == ""


# -- what cannot be traced --------------------------------------------------------------------------------------------


def one(config: Any, tp: int = 1, **options: Any) -> Trace:
    options = {"dcp_semantics": "vllm", "block_size": 4, **options}
    return TraceLibrary(config, use_cache=False).trace(ParallelConfig(tp), Phase.DECODE, **options)


def raw(name: str, **changes: Any) -> Any:
    base = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    return model_config({**base, **heads, **TINY[name], **changes}, "some/model")


def test_unknown_type_names_remote_code() -> None:
    config = raw("llama", model_type="brandnew", auto_map={"AutoConfig": "configuration.BrandNew"})
    with pytest.raises(UnsupportedModelError, match=r"'brandnew' .* remote code is never run"):
        one(config)


def test_type_without_a_language_model() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no causal language model of type .vit. on its own"):
        one(raw("llama", model_type="vit"))


def test_linear_attention_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="softmax attention"):
        one(raw("llama", model_type="mamba", state_size=8, tie_word_embeddings=True))


def test_broken_config() -> None:
    with pytest.raises(ConfigError, match="some/model"):
        one(raw("llama", hidden_act="no_such_activation"))
    with pytest.raises(ConfigError, match="some/model"):
        one(raw("llama", rope_parameters={"rope_type": "no_such_rope"}))


def test_unknown_shard_style_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    plan = {**LlamaConfig.base_model_tp_plan, "layers.*.mlp.up_proj": "sideways"}
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
    with pytest.raises(UnsupportedModelError, match="sideways"):
        one(raw("llama"))


@pytest.mark.parametrize(
    ("changes", "tp", "rule"),
    [
        ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}, 4, "tp"),
        ({"intermediate_size": 99}, 2, "tp.divides"),
        ({}, 128, "tp"),
    ],
)
def test_layouts_that_do_not_fit(changes: dict[str, Any], tp: int, rule: str) -> None:
    with pytest.raises(LegalityError) as found:
        one(raw("llama", **changes), tp)
    assert found.value.rule.startswith(rule)


def test_illegal_dcp_is_refused() -> None:
    lib = TraceLibrary(raw("llama"), use_cache=False)
    with pytest.raises(LegalityError, match="DCP splits copies of KV heads"):
        lib.trace(ParallelConfig(4, decode_context_parallel_size=2), Phase.DECODE, dcp_semantics="vllm", block_size=4)
    with pytest.raises(UnknownNameError, match="vllm-ascend"):
        lib.trace(ParallelConfig(4), Phase.DECODE, dcp_semantics="vllm-ascent", block_size=4)
    with pytest.raises(ConfigError, match="block_size"):
        lib.trace(ParallelConfig(4), Phase.DECODE, dcp_semantics="vllm", block_size=0)


@pytest.mark.parametrize("kind", ["phi", "starcoder2", "phimoe"])
def test_dropout_of_inference_is_no_op(kind: str, tmp_path: Path) -> None:
    """Layers that keep a dropout call, and one that spells ``cat`` as ``concat``, are priced whole."""
    values = CONFIG_MAPPING[kind]().to_dict()
    values |= {"model_type": kind, "architectures": [f"{kind}ForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    view = tensor_cast.trace(str(tmp_path), use_cache=False)
    assert view.coverage == 1.0
    assert not any(op.name == "aten.dropout" for op in view.ops)


def test_attention_that_cannot_be_replaced_is_said(tmp_path: Path) -> None:
    values = CONFIG_MAPPING["falcon"]().to_dict() | {"model_type": "falcon", "architectures": ["FalconForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    with pytest.raises(UnsupportedModelError, match="table of its own"):
        tensor_cast.trace(str(tmp_path), use_cache=False)


def test_models_of_very_many_layers_are_refused_at_once() -> None:
    many = tiny("llama", num_hidden_layers=100_000)
    with pytest.raises(UnsupportedModelError, match="tiny-llama has 100,000 decoder layers; models of up to 2,000 are"):
        one(many)
