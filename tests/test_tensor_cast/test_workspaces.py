"""Buffers beside weights, activations and cache, and the estimate of a start-up against published logs."""

from __future__ import annotations

import pytest

from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import load_engine
from tensor_cast.engine.kv_formats import KV_FORMATS
from tensor_cast.engine.limits import StepLimits, step_limits
from tensor_cast.engine.workspaces import Workspaces, sampler_bytes, workspaces
from tensor_cast.model_catalog import load_model_config
from tensor_cast.units import GIB, MIB


def of(model: str, kv: str = "bfloat16", *, dcp: int = 1, length: int = 131_072) -> Workspaces:
    return workspaces(
        load_model_config(model),
        KV_FORMATS.get(kv),
        tp=8,
        moe_tp=8,
        dcp=dcp,
        max_model_len=length,
        max_num_seqs=1024,
        max_batched_tokens=8192,
        block_size=64,
    )


def test_grouped_queries_need_none() -> None:
    assert of("meta-llama/Llama-3.1-70B") == Workspaces(0, 0)


def test_experts() -> None:
    # 8,192 tokens * 8 experts rows of max(1536 / 8, 4096) + max(2 * 1536 / 8, 4096) elements.
    assert of("Qwen/Qwen3-235B-A22B").persistent == 8192 * 8 * (4096 + 4096) * 2
    # 8,192 * 2 rows of max(14336 / 8, 4096) + max(2 * 14336 / 8, 4096); on one rank 14,336 and 28,672 are the wider.
    mixtral = load_model_config("mistralai/Mixtral-8x7B-v0.1")
    assert of("mistralai/Mixtral-8x7B-v0.1").persistent == 8192 * 2 * (4096 + 4096) * 2
    sizes = {"tp": 1, "dcp": 1, "max_model_len": 4096, "max_num_seqs": 1024, "block_size": 16}
    alone = workspaces(mixtral, KV_FORMATS.get("bfloat16"), moe_tp=1, max_batched_tokens=8192, **sizes)
    assert alone.persistent == 8192 * 2 * (14_336 + 28_672) * 2


def test_dense_latents() -> None:
    # 65,536 tokens of 576 elements: 72 MiB; twice the context over 8 ranks more. 16 heads * 256 elements of each.
    experts = 8192 * 8 * (7168 + 7168) * 2
    assert of("deepseek-ai/DeepSeek-R1") == Workspaces(experts + 72 * MIB, 65_536 * 16 * 256 * 2)
    assert of("deepseek-ai/DeepSeek-R1", dcp=8).persistent == experts + 72 * MIB + 9 * MIB


@pytest.mark.parametrize(
    ("kv", "length", "largest"),
    [
        ("fp8_ds_mla", 524_288, 5280 * 524_288),  # keys that a prefill gathers
        ("bfloat16", 524_288, 5760 * 524_288),  # latents that it gathers
        ("fp8_ds_mla", 8192, 8192 * 8 * (6144 + 6144) * 2),  # experts
    ],
)
def test_one_buffer_serves_the_largest_need(kv: str, length: int, largest: int) -> None:
    indices = 8192 * 2048 * 4
    assert of("zai-org/GLM-5.3", kv, length=length) == Workspaces(largest + indices, 512 * MIB)


def test_limits_by_device() -> None:
    vllm, ascend = load_engine("vllm"), load_engine("vllm-ascend")
    assert step_limits(vllm, load_device("H100_SXM")) == StepLimits(8192, 1024)
    assert step_limits(vllm, load_device("H200_SXM")) == StepLimits(8192, 1024)  # 141 GB
    assert step_limits(vllm, load_device("B200_SXM")) == StepLimits(16_384, 1024)
    assert step_limits(vllm, load_device("A100_80G_SXM")) == StepLimits(2048, 256)
    assert step_limits(vllm, load_device("L40S")) == StepLimits(2048, 256)
    assert step_limits(ascend, load_device("Atlas_800_A2_376T_64G")) == StepLimits(
        ascend.max_batched_tokens, ascend.max_num_seqs
    )


def test_a_logit_while_sampling() -> None:
    # Activation peaks of vLLM 0.19 with 1,024 requests; what is beside them is hidden states.
    peaks = {100_352: 1.52, 128_256: 1.89, 152_064: 2.21, 256_000: 3.65}
    for vocab, peak in peaks.items():
        assert 0.1 < peak - sampler_bytes(vocab, 1024) / GIB < 0.25


@pytest.mark.parametrize(
    ("model", "options", "weights", "non_kv", "kv"),
    [
        # vLLM 0.19 on H100, 8,192 tokens, 0.95: weights, activation + non-torch, KV. That version did not subtract its
        # graphs (1.1 to 1.7 GiB) yet.
        ("Qwen/Qwen3-30B-A3B", {}, 56.88, 2.68 + 0.27, 15.41),
        ("meta-llama/Llama-3.1-70B", {"tp_size": 4, "quantize_linear_action": "W8A16"}, 16.96, 1.97 + 2.21, 54.09),
        ("google/gemma-3-27b-it", {}, 51.45, 3.99 + 0.26, 19.53),
    ],
)
def test_published_logs(model: str, options: dict[str, object], weights: float, non_kv: float, kv: float) -> None:
    config = CapacityConfig.create(
        model=model, device="H100_SXM", max_model_len=8192, gpu_memory_utilization=0.95, **options
    )
    (stage,) = CapacityPlanner(config).plan().stages
    assert stage.weights is not None
    assert stage.activation is not None
    assert stage.non_torch is not None
    assert stage.graph is not None
    # The published Gemma has a vision tower (0.8 GiB) that is not modelled.
    assert stage.weights / GIB == pytest.approx(weights, rel=0.025)
    assert (stage.activation + stage.non_torch) / GIB == pytest.approx(non_kv, abs=0.4)
    assert (stage.kv + stage.graph) / GIB == pytest.approx(kv, rel=0.08)
