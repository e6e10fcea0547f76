"""Bytes of quantised weights against published checkpoints, and schemes read from real configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tensor_cast.errors import ConfigError, UnknownNameError
from tensor_cast.ir.record import ParamSpec, Role
from tensor_cast.model_catalog import load_model_config
from tensor_cast.quant import FP8, SCHEMES, QuantConfig, w4a16
from tensor_cast.units import GIB, MIB


def param(name: str, shape: tuple[int, ...], role: Role = Role.LINEAR, dtype: str = "bfloat16") -> ParamSpec:
    return ParamSpec(name, shape, shape, dtype, role)


@pytest.mark.parametrize(
    ("scheme", "shape", "expected"),
    [
        ("DISABLED", (256, 512), 2 * 256 * 512),
        ("FP8_BLOCK", (256, 512), 256 * 512 + 4 * 2 * 4),
        ("FP8", (130, 129), 130 * 129 + 4 * 2 * 2),  # partial blocks have a scale of their own
        ("FP8_BLOCK", (3, 256, 128), 3 * (256 * 128 + 4 * 2)),
        ("W8A8_DYNAMIC", (256, 512), 256 * 512 + 256 * 2 * 2),  # scale and offset in bf16
        ("W8A16", (256, 512), 256 * 512 + 256 * 2),
        ("W4A16", (256, 512), 256 * 512 // 2 + 256 * 4 * 2),
        ("W4A8", (256, 512), 256 * 512 // 2 + 256 * 4 * 2),
        ("MXFP4", (256, 512), 256 * 512 // 2 + 256 * 512 // 32),
        ("NVFP4", (256, 512), 256 * 512 // 2 + 256 * 512 // 16 + 4),
    ],
)
def test_bytes_of_a_weight(scheme: str, shape: tuple[int, ...], expected: int) -> None:
    assert SCHEMES.get(scheme).weight_bytes(shape, "bfloat16") == expected


def test_group_128_costs_what_engines_document_per_parameter() -> None:
    n = 6144 * 2048
    assert w4a16(128).weight_bytes((2048, 6144), "bfloat16") / n == 0.515625
    assert w4a16(128, zero_points=True).weight_bytes((2048, 6144), "bfloat16") / n == 0.51953125


def test_glm_moe_layer_in_asymmetric_w4a16() -> None:
    """5,177.779 MiB: experts W4A16 with zero points, the rest of the layer bf16."""
    quant = QuantConfig(experts=w4a16(128, zero_points=True))
    experts = [
        param("mlp.experts.gate_up_proj", (256, 2 * 2048, 6144), Role.EXPERTS),
        param("mlp.experts.down_proj", (256, 6144, 2048), Role.EXPERTS),
    ]
    assert sum(map(quant.param_bytes, experts)) / MIB == 4788.0
    attention = 12_582_912 + 33_554_432 + 3_538_944 + 14_680_064 + 100_663_296 + 2_560
    rest = [
        param("self_attn.all", (attention,)),
        param("mlp.shared_experts.all", (37_748_736,)),
        param("mlp.gate.weight", (256, 6144), Role.ROUTER, "float32"),
        param("mlp.gate.e_score_correction_bias", (256,), Role.OTHER, "float32"),
        param("norms", (2 * 6144,), Role.NORM),
    ]
    assert sum(map(quant.param_bytes, [*experts, *rest])) / MIB == pytest.approx(5177.779, abs=1e-3)


def _deepseek_v3() -> Iterator[ParamSpec]:
    """Every parameter of the published fp8 checkpoint: 61 layers, and layer 61 with the draft module and its copies."""
    h, v = 7168, 129_280
    yield param("model.embed_tokens.weight", (v, h), Role.EMBEDDING)
    yield param("lm_head.weight", (v, h), Role.LM_HEAD)
    yield param("model.norm.weight", (h,), Role.NORM)
    for layer in range(62):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "q_a_proj": (1536, h),
            "q_b_proj": (128 * 192, 1536),
            "kv_a_proj_with_mqa": (576, h),
            "kv_b_proj": (128 * 256, 512),
            "o_proj": (h, 128 * 128),
        }.items():
            yield param(f"{prefix}self_attn.{name}.weight", shape)
        for name, size in {"q_a_layernorm": 1536, "kv_a_layernorm": 512}.items():
            yield param(f"{prefix}self_attn.{name}.weight", (size,), Role.NORM)
        yield param(f"{prefix}input_layernorm.weight", (h,), Role.NORM)
        yield param(f"{prefix}post_attention_layernorm.weight", (h,), Role.NORM)
        wide = 18_432 if layer < 3 else 2048  # dense width, else that of the shared expert
        for name, shape in {"gate_proj": (wide, h), "up_proj": (wide, h), "down_proj": (h, wide)}.items():
            yield param(f"{prefix}mlp.{name}.weight", shape)
        if layer >= 3:
            yield param(f"{prefix}mlp.gate.weight", (256, h), Role.ROUTER)
            yield param(f"{prefix}mlp.gate.e_score_correction_bias", (256,), Role.OTHER, "float32")
            yield param(f"{prefix}mlp.experts.gate_up_proj", (256, 4096, h), Role.EXPERTS)
            yield param(f"{prefix}mlp.experts.down_proj", (256, h, 2048), Role.EXPERTS)
    draft = "model.layers.61."
    yield param(f"{draft}embed_tokens.weight", (v, h), Role.EMBEDDING)
    yield param(f"{draft}shared_head.head.weight", (v, h), Role.LM_HEAD)
    yield param(f"{draft}eh_proj.weight", (h, 2 * h), Role.OTHER)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield param(f"{draft}{name}.weight", (h,), Role.NORM)


def test_deepseek_v3_checkpoint_to_the_byte() -> None:
    quant = QuantConfig.resolve(load_model_config("deepseek-ai/DeepSeek-V3"), None, None)
    assert sum(map(quant.param_bytes, _deepseek_v3())) == 688_574_839_360


def test_gpt_oss_120b_checkpoint_to_the_byte() -> None:
    quant = QuantConfig.resolve(load_model_config("openai/gpt-oss-120b"), None, None)
    h, v, e = 2880, 201_088, 128
    params = [
        param("model.embed_tokens.weight", (v, h), Role.EMBEDDING),
        param("lm_head.weight", (v, h), Role.LM_HEAD),
        param("model.norm.weight", (h,), Role.NORM),
    ]
    for layer in range(36):
        at, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        for name, rows, columns in (("q", 4096, h), ("k", 512, h), ("v", 512, h), ("o", h, 4096)):
            params.append(param(f"{at}{name}_proj.weight", (rows, columns)))
            params.append(param(f"{at}{name}_proj.bias", (rows,)))
        params += [
            param(f"{at}sinks", (64,), Role.OTHER),
            param(f"{at}norms", (2 * h,), Role.NORM),
            param(f"{mlp}router.weight", (e, h), Role.ROUTER),
            param(f"{mlp}router.bias", (e,), Role.ROUTER),
            param(f"{mlp}experts.gate_up_proj", (e, 2 * h, h), Role.EXPERTS),
            param(f"{mlp}experts.gate_up_proj_bias", (e, 2 * h), Role.EXPERTS),
            param(f"{mlp}experts.down_proj", (e, h, h), Role.EXPERTS),
            param(f"{mlp}experts.down_proj_bias", (e, h), Role.EXPERTS),
        ]
    assert sum(map(quant.param_bytes, params)) == 65_248_815_744


def test_roles_that_keep_their_dtype() -> None:
    quant = QuantConfig(SCHEMES.get("FP8"), SCHEMES.get("FP8"))
    kept = (Role.LM_HEAD, Role.EMBEDDING, Role.ROUTER, Role.NORM, Role.OTHER)
    assert all(not quant.scheme_of("x.weight", role).quantises for role in kept)
    assert quant.scheme_of("x.weight", Role.LINEAR).quantises
    assert not quant.scheme_of("x.weight", Role.LINEAR, ndim=1).quantises
    assert not quant.scheme_of("x.gate_up_proj_bias", Role.EXPERTS, ndim=2).quantises


def test_tied_parameter_costs_nothing() -> None:
    tied = ParamSpec("lm_head.weight", (8, 4), (8, 4), "bfloat16", Role.LM_HEAD, tied_to="embed.weight")
    assert QuantConfig().param_bytes(tied) == 0


def test_config_methods() -> None:
    r1 = QuantConfig.resolve(load_model_config("deepseek-ai/DeepSeek-R1"), None, None)
    assert (r1.linear.name, r1.experts.name, r1.block, r1.kv_dtype) == ("FP8_BLOCK", "FP8_BLOCK", 128, "bfloat16")
    oss = QuantConfig.resolve(load_model_config("openai/gpt-oss-120b"), None, None)
    assert (oss.linear.name, oss.experts.name) == ("DISABLED", "MXFP4")
    assert QuantConfig.resolve(load_model_config("Qwen/Qwen3-32B"), None, None).source == "unquantised"


def test_options_override_the_config() -> None:
    model = load_model_config("deepseek-ai/DeepSeek-R1")
    quant = QuantConfig.resolve(model, "w8a8_dynamic", "fp8")
    assert (quant.linear.activation_dtype, quant.kv_dtype, quant.block) == ("int8", FP8, None)
    assert QuantConfig.resolve(model, "DISABLED", "DISABLED").kv_dtype == "bfloat16"
    with pytest.raises(UnknownNameError, match="W8A8_DYNAMIC"):
        QuantConfig.resolve(model, "W8A8_DYNAMC", None)
    with pytest.raises(UnknownNameError, match="attention quantisation"):
        QuantConfig.resolve(model, None, "FP9")


def _with(config: dict[str, object]) -> QuantConfig:
    model = dataclasses.replace(load_model_config("Qwen/Qwen3-32B"), quantization=config)
    return QuantConfig.resolve(model, None, None)


def test_four_bit_methods() -> None:
    awq = _with({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True})
    gptq = _with({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True})
    n = 1024 * 1024
    assert awq.linear.weight_bytes((1024, 1024), "bfloat16") == 0.51953125 * n
    assert gptq.linear.weight_bytes((1024, 1024), "bfloat16") == 0.5 * n + 2 * n / 64
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    packed = _with(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": weights, "input_activations": None}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        }
    )
    assert packed.linear.weight_bytes((1024, 1024), "bfloat16") == 0.5 * n + 2 * n / 32
    assert not packed.scheme_of("model.layers.3.self_attn.q_proj.weight", Role.LINEAR).quantises
    assert not packed.scheme_of("model.layers.0.mlp.up_proj.weight", Role.LINEAR).quantises
    assert packed.scheme_of("model.layers.3.mlp.experts.down_proj", Role.EXPERTS, 3).quantises


def test_unknown_method_is_named() -> None:
    with pytest.raises(ConfigError, match="bitsandbytes"):
        _with({"quant_method": "bitsandbytes"})


def test_modules_to_not_convert_matches_whole_names() -> None:
    quant = QuantConfig(SCHEMES.get("FP8"), skip=("model.layers.*.self_attn", "gate"))
    assert not quant.scheme_of("model.layers.12.self_attn.o_proj.weight", Role.LINEAR).quantises
    assert not quant.scheme_of("model.layers.1.mlp.gate.weight", Role.LINEAR).quantises
    assert quant.scheme_of("model.layers.1.mlp.gate_proj.weight", Role.LINEAR).quantises


def test_main_weights_of_deepseek_v3_in_gib() -> None:
    quant = QuantConfig.resolve(load_model_config("deepseek-ai/DeepSeek-V3"), None, None)
    main = [p for p in _deepseek_v3() if ".61." not in p.name]
    # 671.03 B parameters, nearly all in one byte
    assert sum(map(quant.param_bytes, main)) / GIB == pytest.approx(627.1, abs=1.0)
