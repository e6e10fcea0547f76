"""Facts W1 to W6 on the weights of GLM-5.3 with W4A16 experts, each with its arithmetic, from the trace's parameters.

Only routed experts are quantised: 4 bits, one bf16 scale and one packed 4-bit zero point per group of 128, which is
0.5 + 2/128 + 0.5/128 = 0.51953125 bytes a parameter. Everything else has two bytes a parameter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.ir.record import ParamSpec, Phase, Trace
from tensor_cast.ir.stages import stage_traces
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model.memory import weight_bytes
from tensor_cast.quant import QuantConfig, w4a16
from tensor_cast.units import GIB, MIB

GLM = load_model_config("zai-org/GLM-5.3-W4A16")
QUANT = QuantConfig.resolve(GLM)
LIBRARY = TraceLibrary(GLM, use_cache=False)
HIDDEN, VOCAB = 6144, 154_880

# Parameters by hand, from the sizes in the config.
EXPERTS = 256 * 3 * HIDDEN * 2048
ATTENTION = (
    2048 * HIDDEN  # q_a
    + 64 * 256 * 2048  # q_b: 64 heads of nope 192 + rope 64
    + 576 * HIDDEN  # kv_a: latent 512 + rope 64
    + 64 * (192 + 256) * 512  # kv_b
    + HIDDEN * 64 * 256  # o
    + 2048
    + 512  # norms of the two latents
)
SHARED_EXPERT = 3 * HIDDEN * 2048
ROUTER = 256 * HIDDEN
LAYER_NORMS = 2 * HIDDEN
INDEXER = 32 * 128 * 2048 + 128 * HIDDEN + 32 * HIDDEN + 2 * 128  # wq_b, wk, weights_proj, k_norm
DENSE = 3 * HIDDEN * 12_288
#: The router's correction is float32.
CORRECTION_BYTES = 4 * 256

MOE_LAYER = EXPERTS * 0.51953125 + 2 * (ATTENTION + SHARED_EXPERT + ROUTER + LAYER_NORMS) + CORRECTION_BYTES
DENSE_LAYER = 2 * (DENSE + ATTENTION + LAYER_NORMS)
MTP_LAYER = MOE_LAYER + 2 * (INDEXER + 2 * HIDDEN * HIDDEN + 3 * HIDDEN)  # eh_proj, enorm, hnorm, shared_head.norm


@cache
def trace(tp: int = 1, mtp: int = 0) -> Trace:
    return LIBRARY.trace(ParallelConfig(tp), Phase.DECODE, dcp_semantics="vllm", block_size=64, num_mtp_tokens=mtp)


def layer_bytes(traced: Trace, layer: int) -> dict[str, int]:
    """Bytes of the parameters of one layer, by the end of their names."""
    found: dict[str, int] = {}
    for segment in traced.segments:
        if layer in segment.layers:
            for param in segment.part.params:
                found[param.name.split(".", 3)[3]] = QUANT.param_bytes(param)
    return found


def total(traced: Trace, layer: int, *, indexer: bool | None = None) -> int:
    """Bytes of one layer; of its indexer alone, or without it."""
    named = layer_bytes(traced, layer).items()
    return sum(size for name, size in named if indexer is None or (".indexer." in name) is indexer)


def test_parameters_by_hand() -> None:
    assert (EXPERTS, ATTENTION, INDEXER) == (9_663_676_416, 165_022_208, 9_371_904)
    assert EXPERTS * 0.51953125 == 4788 * MIB


def test_w1_moe_layer_without_indexer() -> None:
    # 4788 + 314.7549 + 72 + 3 + 0.0010 + 0.0234 MiB
    assert [total(trace(), layer) for layer in (3, 40, 77)] == [MOE_LAYER] * 3
    assert total(trace(), 6, indexer=False) == MOE_LAYER
    assert pytest.approx(5177.779, abs=5e-4) == MOE_LAYER / MIB
    assert layer_bytes(trace(), 3)["mlp.experts.gate_up_proj"] == 2 / 3 * 4788 * MIB


@pytest.mark.parametrize(("group", "mib"), [(128, 5141.8), (64, 5285.8), (32, 5573.8)])
def test_w1_tells_the_scheme(group: int, mib: float) -> None:
    """Symmetric groups give other sizes: 0.5 + 2/group bytes a parameter, without zero points."""
    symmetric = replace(QUANT, experts=w4a16(group))
    size = sum(symmetric.param_bytes(p) for s in trace().segments if 3 in s.layers for p in s.part.params)
    assert size == MOE_LAYER + EXPERTS * (0.5 + 2 / group - 0.51953125)
    assert pytest.approx(mib, abs=0.05) == size / MIB


def test_w2_draft_layer() -> None:
    """The MTP layer always has its own indexer, although the last layer of the model has none."""
    before, after = weight_bytes(trace(), QUANT), weight_bytes(trace(mtp=1), QUANT)
    assert after - before == MTP_LAYER
    assert pytest.approx(5339.690, abs=5e-4) == MTP_LAYER / MIB
    assert total(trace(mtp=1), 78, indexer=True) == 2 * INDEXER


def test_w3_checkpoint() -> None:
    ends = 2 * 2 * VOCAB * HIDDEN + 2 * HIDDEN  # embedding, head, norm
    by_hand = 75 * MOE_LAYER + 3 * DENSE_LAYER + 21 * 2 * INDEXER + MTP_LAYER + ends
    assert weight_bytes(trace(mtp=1), QUANT) == by_hand
    assert pytest.approx(390.546, abs=5e-4) == by_hand / GIB
    # The files of the checkpoint: 390.58 GiB, headers included.
    assert pytest.approx(390.58, rel=2e-4) == by_hand / GIB


def test_w4_indexer() -> None:
    indexer = {n: s for n, s in layer_bytes(trace(), 2).items() if ".indexer." in n}
    assert sum(indexer.values()) == 2 * INDEXER
    assert pytest.approx(17.8755, abs=5e-5) == 2 * INDEXER / MIB
    owners = [layer for layer in range(78) if total(trace(), layer, indexer=True)]
    assert owners == [0, 1, *range(2, 75, 4)]


def params(traced: Trace) -> dict[str, ParamSpec]:
    return {spec.name: spec for spec, _ in traced.params}


def test_w5_one_stage() -> None:
    assert pytest.approx(50.731, abs=5e-4) == weight_bytes(trace(8), QUANT) / GIB
    assert pytest.approx(51.550, abs=5e-4) == weight_bytes(trace(8, 1), QUANT) / GIB
    # Replicated over tp: the down-projections of MLA, all of the indexer, the router, the draft module's projection.
    kept = params(trace(8, 1))
    for name in ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wq_b", "mlp.gate"):
        assert kept[f"model.layers.{6 if 'attn' in name else 3}.{name}.weight"].splits == (), name
    assert kept["model.layers.78.eh_proj.weight"].splits == ()


@pytest.mark.parametrize(
    ("partition", "gib"), [((39, 39), (47.666, 52.755)), ((41, 37), (50.243, 50.178))], ids=["39,39", "41,37"]
)
def test_w5_two_stages(partition: tuple[int, ...], gib: tuple[float, ...]) -> None:
    stages = stage_traces(trace(4, 1), partition, hidden_size=HIDDEN, dtype="bfloat16", tp=4, num_mtp_tokens=1)
    assert [weight_bytes(stage, QUANT) / GIB for stage in stages] == [pytest.approx(g, abs=5e-4) for g in gib]


def test_w6_embedding() -> None:
    embedding = params(trace(4))["model.embed_tokens.weight"]
    assert QUANT.param_bytes(embedding) == VOCAB * HIDDEN * 2 // 4 == 453.75 * MIB
