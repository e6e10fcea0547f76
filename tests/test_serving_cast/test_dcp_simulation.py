"""The RFC's unit and integration tests of DCP: legality, KV memory, communication volumes, TPOT.

Expected values come from formulas written out here, not from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from serving_cast.config import Mode, OptimizerConfig, ParallelConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.service.points import LayoutPoints
from serving_cast.setting import make_setting
from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.errors import LegalityError
from tensor_cast.ir.record import Phase
from tensor_cast.model_catalog import load_model_config

Runner = Callable[..., ParallelRunner]

R1 = "deepseek-ai/DeepSeek-R1"
QWEN = "Qwen/Qwen3-235B-A22B"
LLAMA = "meta-llama/Meta-Llama-3.1-70B"
SEMANTICS = ("vllm-ascend", "vllm", "rfc")
TP = (1, 2, 4, 8, 16)
DCP = (1, 2, 3, 4, 8, 16)


# -- constraints -----------------------------------------------------------------------------------------------------


def expected_legal(model: str, semantics: str, tp: int, dcp: int) -> bool:
    """The rules in words of the RFC and of the engines; every tp here divides the heads."""
    if dcp == 1:
        return True
    if dcp > tp or tp % dcp:
        return False
    if model == R1:
        return True
    h, h_kv = {QWEN: (64, 4), LLAMA: (64, 8)}[model]
    if semantics == "rfc":
        return h_kv >= tp / dcp
    copies = tp // h_kv
    return tp > h_kv and dcp <= copies and copies % dcp == 0 and (h // h_kv) % dcp == 0


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("model", [R1, QWEN, LLAMA])
def test_every_illegal_pair_is_pruned(make_runner: Runner, model: str, semantics: str) -> None:
    """MLA and GQA, each tp and dcp: illegal pairs come back as rejections with a rule, legal ones are searched."""
    space = SearchSpace(tp=TP, dp=(1,), ep=(1,), dcp=DCP)
    runner = make_runner(model=model, num_devices=16, dcp_semantics=semantics, space=space)
    evaluation = runner.evaluate()
    legal = {(p.parallel.tp_size, p.parallel.dcp_size) for p in evaluation.points}
    refused = {(r.layout["tp"], r.layout["dcp"]): r for r in evaluation.rejections}
    pairs = {(tp, dcp) for tp in TP for dcp in DCP}
    assert legal == {pair for pair in pairs if expected_legal(model, semantics, *pair)}
    assert set(refused) == pairs - legal
    for (tp, dcp), rejection in refused.items():
        assert rejection.rule.startswith("dcp.")
        assert (rejection.rule == "dcp.divides_tp") == (tp % dcp != 0)
        assert rejection.need
        assert rejection.have
        assert rejection.remedy


@pytest.mark.parametrize(
    ("model", "semantics", "tp", "dcp", "rule"),
    [
        (R1, "vllm-ascend", 4, 8, "dcp.divides_tp"),
        (R1, "rfc", 8, 3, "dcp.divides_tp"),
        (LLAMA, "vllm", 8, 2, "dcp.kv_heads"),
        (QWEN, "vllm-ascend", 8, 4, "dcp.kv_copies"),
        (LLAMA, "rfc", 16, 1, None),
        (QWEN, "rfc", 16, 2, "dcp.kv_heads"),
        (QWEN, "vllm", 8, 2, None),
    ],
)
def test_user_config_is_checked_before_it_is_built(
    make_runner: Runner, model: str, semantics: str, tp: int, dcp: int, rule: str | None
) -> None:
    runner = make_runner(model=model, num_devices=16, dcp_semantics=semantics)
    sizes = {"tp_size": tp, "dcp_size": dcp}
    if rule is None:
        assert runner._get_user_config(Phase.DECODE, **sizes).dcp_size == dcp
    else:
        with pytest.raises(LegalityError) as caught:
            runner._get_user_config(Phase.DECODE, **sizes)
        assert caught.value.rule == rule
        assert caught.value.remedy
    assert runner._get_user_config(Phase.PREFILL, **sizes).dcp_size == 1


def test_world_size_does_not_grow() -> None:
    assert ParallelConfig(tp_size=8, dcp_size=8).world_size == 8


# -- the real search on one layout per dcp ----------------------------------------------------------------------------


@lru_cache
def decode_points(
    model: str, tp: int, dcps: tuple[int, ...], input_length: int, semantics: str = "vllm-ascend"
) -> dict[int, LayoutPoints]:
    """Points of every decode batch up to 16, by dcp, from the traced model."""
    config = OptimizerConfig(
        model,
        ("H200_SXM",),
        tp,
        Workload(input_length, 1024),
        space=SearchSpace(tp=(tp,), dp=(1,), ep=(1,), dcp=dcps, batch_range=(1, 16)),
        mode=Mode.DISAGGREGATED,
        dcp_semantics=semantics,
    )
    evaluation = ParallelRunner(make_setting(config, "H200_SXM")).evaluate()
    return {p.parallel.dcp_size: p for p in evaluation.points if p.phase == "decode"}


@pytest.mark.parametrize(("model", "tp", "dcps"), [(R1, 8, (1, 2, 4, 8)), (QWEN, 16, (1, 2, 4))])
def test_kv_cache_size_is_one_dcp_th(model: str, tp: int, dcps: tuple[int, ...]) -> None:
    """ISL + OSL = 32,768 tokens, a multiple of each logical block; and the size itself by hand."""
    points = decode_points(model, tp, dcps, 31_744)
    sizes = {dcp: p.row(15).kv_cache_size_gb for dcp, p in points.items()}
    token_bytes = 61 * 576 * 2 if model == R1 else 94 * 1 * 2 * 128 * 2
    for dcp in dcps:
        assert sizes[dcp] == pytest.approx(sizes[1] / dcp, rel=0.005)
        assert sizes[dcp] == pytest.approx(16 * 32_768 * token_bytes / dcp / 2**30, rel=1e-9)
    assert sorted(sizes.values(), reverse=True) == [sizes[dcp] for dcp in dcps], "falls with dcp"


def test_rfc_splits_gqa_heads_and_sequence() -> None:
    """RFC class B: [B, S/dcp, h_kv/(tp/dcp), D]; with tp >= h_kv * dcp the saving is 1/dcp again."""
    points = decode_points(LLAMA, 8, (1, 2), 31_744, "rfc")
    sizes = {dcp: p.row(15).kv_cache_size_gb for dcp, p in points.items()}
    assert sizes[1] == pytest.approx(16 * 32_768 * 80 * 1 * 2 * 128 * 2 / 2**30)
    assert sizes[2] == pytest.approx(16 * 16_384 * 80 * 2 * 2 * 128 * 2 / 2**30)


@pytest.mark.parametrize(("model", "tp", "dcps"), [(R1, 8, (1, 2, 4, 8)), (QWEN, 16, (1, 2, 4))])
@pytest.mark.parametrize("input_length", [2_000, 31_744, 120_000])
def test_tpot_falls_until_communication_dominates(
    model: str, tp: int, dcps: tuple[int, ...], input_length: int
) -> None:
    """At a fixed batch TPOT over dcp goes down to one minimum and up after it, earlier for shorter contexts."""
    points = decode_points(model, tp, dcps, input_length)
    tpot = [float(points[dcp].state.tpot[15]) for dcp in dcps]  # type: ignore[index]
    lowest = int(np.argmin(tpot))
    steps = np.diff(tpot)
    assert (steps[:lowest] < 0).all()
    assert (steps[lowest:] > 0).all()
    if input_length == 2_000:
        assert lowest == 0, "with little KV to read DCP only adds collectives"
    else:
        assert lowest > 0, "with much KV to read DCP helps"


def test_longer_context_wants_more_dcp() -> None:
    best = []
    for length in (2_000, 31_744, 120_000):
        points = decode_points(R1, 8, (1, 2, 4, 8), length)
        best.append(min(points, key=lambda dcp: float(points[dcp].state.tpot[15])))  # type: ignore[index]
    assert best == sorted(best)
    assert best[0] < best[-1]


# -- communication volumes of the traced model ------------------------------------------------------------------------


@lru_cache
def dcp_collectives(model: str, tp: int, dcp: int, semantics: str) -> tuple[tuple[str, int], ...]:
    """(op, bytes of the local input buffer) of one decode layer, for one token."""
    parallel = ParallelConfig(tp_size=tp, dcp_size=dcp).to_tensor_cast()
    library = TraceLibrary(load_model_config(model))
    trace = library.trace(parallel, Phase.DECODE, dcp_semantics=semantics, block_size=128)
    layers = load_model_config(model).num_hidden_layers
    found: dict[str, int] = {}
    calls = 0
    for op in trace.ops:
        if op.axis == "dcp":
            assert op.group_size == dcp
            key = f"{op.name.partition('.')[2]}/{len(found)}"
            same = [k for k, v in found.items() if k.partition("/")[0] == op.name.partition(".")[2]]
            size = op.collective_bytes({"B": 1, "Q": 1, "S": 4096})
            if not any(found[k] == size for k in same):
                found[key] = size
            calls += op.repeat
    assert calls == layers * len(found), "every layer has the same collectives"
    return tuple((key.partition("/")[0], int(size)) for key, size in found.items())


def expected_volumes(model: str, tp: int, dcp: int, semantics: str) -> list[tuple[str, int]]:
    """The RFC's and the engines' formulas; hl = h/tp heads per rank, G = hl*dcp gathered heads, bf16 activations."""
    h, query, merged = {R1: (128, 512 + 64, 512), QWEN: (64, 128, 128), LLAMA: (64, 128, 128)}[model]
    if semantics == "rfc" and model == R1:
        merged = 128  # v_head_dim
    gathered = h // tp * dcp
    gather = ("all_gather_into_tensor", h // tp * query * 2)
    if semantics == "vllm":
        return [gather, ("all_gather_into_tensor", gathered * 4), ("reduce_scatter_tensor", gathered * merged * 2)]
    return [gather, ("all_to_all_single", gathered * (merged + 1) * 4)]


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(("model", "tp", "dcp"), [(R1, 8, 8), (R1, 8, 2), (QWEN, 8, 2)])
def test_volumes_equal_the_formulas(model: str, tp: int, dcp: int, semantics: str) -> None:
    assert sorted(dcp_collectives(model, tp, dcp, semantics)) == sorted(expected_volumes(model, tp, dcp, semantics))


@pytest.mark.parametrize(
    ("model", "tp", "dcp", "semantics", "op", "size"),
    [
        (R1, 8, 8, "vllm-ascend", "all_gather_into_tensor", 18_432),
        (R1, 8, 8, "vllm-ascend", "all_to_all_single", 262_656),
        (R1, 8, 8, "rfc", "all_to_all_single", 66_048),
        (QWEN, 8, 2, "vllm-ascend", "all_to_all_single", 8_256),
    ],
)
def test_golden_volumes(model: str, tp: int, dcp: int, semantics: str, op: str, size: int) -> None:
    assert dict(dcp_collectives(model, tp, dcp, semantics))[op] == size


def test_no_dcp_no_collectives() -> None:
    assert dcp_collectives(R1, 8, 1, "vllm-ascend") == ()


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_prefill_has_no_dcp_collectives(semantics: str) -> None:
    parallel = ParallelConfig(tp_size=8, dcp_size=8).to_tensor_cast()
    library = TraceLibrary(load_model_config(R1))
    trace = library.trace(parallel, Phase.PREFILL, dcp_semantics=semantics, block_size=128)
    assert not [op for op in trace.ops if op.axis == "dcp"]


@pytest.mark.parametrize("field", ["query_length", "batch"])
def test_volumes_scale_with_tokens(field: str) -> None:
    """Draft tokens and requests are tokens alike: the RFC's B counts requests, Q = 1 + k."""
    parallel = ParallelConfig(tp_size=8, dcp_size=8).to_tensor_cast()
    trace = TraceLibrary(load_model_config(R1)).trace(
        parallel, Phase.DECODE, dcp_semantics="vllm-ascend", block_size=128
    )
    sizes: dict[str, Any] = {"B": 1, "Q": 1, "S": 4096}
    many = {**sizes, ("Q" if field == "query_length" else "B"): 4}
    ops = [op for op in trace.ops if op.axis == "dcp"]
    assert [op.collective_bytes(many) for op in ops] == [4 * op.collective_bytes(sizes) for op in ops]
