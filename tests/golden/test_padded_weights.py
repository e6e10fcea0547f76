"""Facts W7 to W11: checkpoints whole, and what ranks hold where sizes do not divide or kernels pad."""

from __future__ import annotations

import json

import pytest

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import load_engine
from tensor_cast.engine.expert_kernels import EXPERT_KERNELS
from tensor_cast.ir.record import ParamSpec, Phase, Role, Trace
from tensor_cast.layers.moe import split_range
from tensor_cast.model_catalog import describe, load_model_config
from tensor_cast.model_config import ModelConfig, ParallelConfig
from tensor_cast.performance_model.estimate import StepEstimator
from tensor_cast.performance_model.memory import weight_bytes
from tensor_cast.quant import QuantConfig
from tensor_cast.units import GIB

OSS = load_model_config("openai/gpt-oss-120b")
#: 36 layers of 128 experts with three matrices of 2,880 x 2,880.
EXPERTS = 36 * 128 * 3 * 2880 * 2880


def trace(model: ModelConfig, *, tp: int = 1, ep: int = 1, mtp: int = 0) -> Trace:
    layout = ParallelConfig(tensor_parallel_size=tp, expert_parallel_size=ep)
    return TraceLibrary(model).trace(layout, Phase.PREFILL, dcp_semantics="vllm", block_size=64, num_mtp_tokens=mtp)


def params(traced: Trace, role: Role) -> list[ParamSpec]:
    return [p for segment in traced.segments for p in segment.part.params if p.role is role]


def test_w7_checkpoint_of_gpt_oss() -> None:
    """Experts in MXFP4, half a byte and a scale of one byte for 32 elements; everything else in bfloat16."""
    assert weight_bytes(trace(OSS), QuantConfig.resolve(OSS)) == 65_248_815_744
    assert EXPERTS // 2 + EXPERTS // 32 == 60_914_073_600


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(201_088, 8, 25_136), (151_669, 1, 151_680), (151_669, 4, 37_920)])
def test_w9_vocabulary_padded_to_64_then_divided(vocab: int, tp: int, rows: int) -> None:
    """151,669 = 64 * 2369 + 53 grows to 64 * 2370 = 151,680; a quarter of that is 37,920."""
    model = load_model_config("openai/gpt-oss-20b")
    if vocab != model.vocab_size:
        base = json.loads(load_model_config("Qwen/Qwen3-8B").hf_config)
        model = describe({**base, "vocab_size": vocab, "num_hidden_layers": 2}, "padded", "config")
    traced = trace(model, tp=tp)
    (embedding,), (head,) = params(traced, Role.EMBEDDING), params(traced, Role.LM_HEAD)
    quant = QuantConfig.resolve(model)
    assert quant.resident_bytes(embedding) == quant.resident_bytes(head) == rows * model.hidden_size * 2
    if tp > 1:
        assert embedding.shape == head.shape == (rows, model.hidden_size)


def test_w10_the_fullest_rank_counts() -> None:
    """256 experts over 48 ranks: 256 // 48 = 5, one more on the first 256 % 48 = 16, hence 6."""
    model = load_model_config("deepseek-ai/DeepSeek-V3")
    layout = ParallelConfig(tensor_parallel_size=4, data_parallel_size=12, expert_parallel_size=48)
    traced = TraceLibrary(model).trace(layout, Phase.PREFILL, dcp_semantics="vllm", block_size=64)
    assert {p.shape[0] for p in params(traced, Role.EXPERTS)} == {6}
    held = [256 // 48 + (rank < 256 % 48) for rank in range(48)]
    assert [b - a for a, b in (split_range(256, 48, rank) for rank in range(48))] == held
    assert (sum(held), max(held), min(held)) == (256, 6, 5)


@pytest.mark.parametrize(
    ("kernel", "tp", "ratio"),
    [
        # 2,880 grows to 3,072 and 2,944; a half, quarter or eighth of it (1,440; 720; 360) to 1,536; 768; 384.
        ("marlin", 1, 3072 * 2944 / 2880**2),
        ("marlin", 2, 3072 * 1536 * 2 / 2880**2),
        ("marlin", 4, 3072 * 768 * 4 / 2880**2),
        ("marlin", 8, 3072 * 384 * 8 / 2880**2),
        ("trtllm", 1, 3072 * 3072 / 2880**2),
        ("trtllm", 8, 3072 * 512 * 8 / 2880**2),
        ("cutlass", 1, 2944 * 2944 / 2880**2),
        ("triton", 1, 1.0),
        ("triton", 8, 384 / 360),
    ],
)
def test_w11_padding_of_mxfp4_experts(kernel: str, tp: int, ratio: float) -> None:
    quant = QuantConfig.resolve(OSS, expert_kernel=EXPERT_KERNELS.get(kernel))
    matrices = [p for p in params(trace(OSS, tp=tp), Role.EXPERTS) if p.name.startswith("model.layers.0.")]
    assert len(matrices) == 2
    assert [quant.padding(p.name, p.shape) for p in matrices] == pytest.approx([ratio] * 2, rel=1e-12)
    if kernel in ("marlin", "cutlass") and tp < 8:  # one scale for 32 padded elements: bytes grow as elements do
        grown = sum(map(quant.resident_bytes, matrices)) / sum(map(quant.param_bytes, matrices))
        assert grown == pytest.approx(ratio, rel=1e-12)


def test_w11_in_two_digits() -> None:
    """Section 2.2: 1.0904 on one rank, 1.1378 on two, four and eight."""
    kernel = EXPERT_KERNELS.get("marlin")
    for tp, expected in ((1, 1.0904), (2, 1.1378), (4, 1.1378), (8, 1.1378)):
        hidden, width = kernel.padded(2880, 2880 // tp)
        assert round(hidden * width * tp / 2880**2, 4) == expected


@pytest.mark.parametrize(
    ("device", "kernel", "measured"),
    [
        # Start-up logs of one rank: 65.9651 GiB with Marlin, 64.38 with Triton, the default on Hopper.
        ("A100_80G_SXM", "marlin", 65.9651),
        ("H100_SXM", "triton", 64.38),
        ("H200_SXM", "triton", 64.38),
        ("B200_SXM", "trtllm", None),
    ],
)
def test_w11_what_stays_on_a_device(device: str, kernel: str, measured: float | None) -> None:
    engine = load_engine("vllm")
    chosen = engine.expert_kernel(load_device(device).name)
    assert chosen is not None
    assert chosen.name == kernel
    held = weight_bytes(trace(OSS), QuantConfig.resolve(OSS, expert_kernel=chosen))
    if measured is not None:
        assert held / GIB == pytest.approx(measured, rel=2e-3)
    loaded, biases = 65_248_815_744, 36 * 128 * (2 * 2880 + 2880) * 2
    if kernel == "marlin":
        assert held == loaded + 60_914_073_600 * (3072 * 2944 / 2880**2 - 1) + biases * ((2 * 2944 + 3072) / 8640 - 1)
    elif kernel == "triton":  # scales once more, rows padded to 256: 5,760 to 5,888 and 2,880 to 3,072; wider biases
        assert held == loaded + 36 * 128 * (5888 + 3072) * 90 + biases
    else:
        assert held == loaded + 60_914_073_600 * (3072**2 / 2880**2 - 1) + biases * (2 * 3072 / 2880 - 1)


def test_npus_keep_experts_as_loaded() -> None:
    assert load_engine("vllm-ascend").expert_kernel("ATLAS_350_425T_112G") is None


def test_w11_padding_is_read_as_well() -> None:
    """A decode step of 128 requests reads nearly all experts, padding included."""
    vllm = load_engine("vllm")
    read = {}
    for kernel in (None, EXPERT_KERNELS.get("marlin")):
        quant = QuantConfig.resolve(OSS, expert_kernel=kernel)
        traced = TraceLibrary(OSS).trace(ParallelConfig(), Phase.DECODE, dcp_semantics="vllm", block_size=16)
        estimator = StepEstimator(
            traced, device=load_device("A100_80G_SXM"), engine=vllm, parallel=ParallelConfig(), quant=quant
        )
        ops = estimator.estimate({"B": 128, "Q": 1, "S": 1024}).ops
        read[kernel] = sum(op.nbytes * op.repeat for op in ops if op.op_class == "moe")
    plain, padded = read.values()
    touched = 128 * (1 - (1 - 4 / 128) ** 128) / 128
    matrices = 60_914_073_600 + 36 * 128 * 8640 * 2  # biases are read with them
    assert padded - plain == pytest.approx(touched * matrices * (3072 * 2944 / 2880**2 - 1), rel=1e-3)
