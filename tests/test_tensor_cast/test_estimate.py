"""The step estimator on a small model: sums, scopes, sharing between layouts, what is not priced, and speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import load_engine
from tensor_cast.errors import ConfigError, UnpricedOpError
from tensor_cast.ir.expr import ceildiv, symbol
from tensor_cast.ir.record import Kind, OpRecord, ParamSpec, Part, Phase, Role, Scope, Segment, TensorSpec, Trace
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model.analytic import Bound
from tensor_cast.performance_model.estimate import StepEstimator, as_run, clear_memos, prepare
from tensor_cast.quant import FP8, SCHEMES, QuantConfig

B, Q, S = symbol("B"), symbol("Q"), symbol("S")
H = 4096
HIDDEN = TensorSpec((B, Q, H), "bfloat16")


def weight(rows: int, columns: int, name: str) -> TensorSpec:
    return TensorSpec((rows, columns), "bfloat16", Kind.WEIGHT, name)


def linear(module: str, x: int, out: int, rows: int, ident: int, scope: Scope = Scope.TOKEN) -> OpRecord:
    return OpRecord(
        "aten.linear",
        module,
        (HIDDEN, weight(rows, H, f"{module}.weight")),
        (TensorSpec((B, Q, rows), "bfloat16"),),
        (x, ident),
        (out,),
        scope=scope,
    )


def attention_part(tp: int, dcp: int = 1) -> Part:
    heads = 32 // tp
    keys = TensorSpec((B, ceildiv(S, dcp), 1, 128), "bfloat16", Kind.KV)
    query = TensorSpec((B, Q, heads, 128), "bfloat16")
    ops = (
        linear("self_attn.q_proj", 0, 1, heads * 128, 100),
        OpRecord(
            "tensor_cast.attention",
            "self_attn",
            (query, keys, keys),
            (query,),
            (1, 2, 3),
            (4,),
            attrs=(("dcp", dcp), ("phase", "decode")),
            scope=Scope.SEQUENCE,
        ),
        OpRecord(
            "_c10d_functional.all_reduce", "self_attn.o", (HIDDEN,), (HIDDEN,), (4,), (5,), axis="tp", group_size=tp
        ),
    )
    params = (ParamSpec("self_attn.q_proj.weight", (heads * 128, H), (H, H), "bfloat16", Role.LINEAR),)
    return Part(f"attention/tp{tp}/dcp{dcp}", ops, params, (0, 2, 3), (5,))


FFN = Part(
    "ffn",
    (
        linear("mlp.up_proj", 0, 1, H, 100),
        OpRecord("aten.silu", "mlp", (HIDDEN,), (HIDDEN,), (1,), (2,)),
        OpRecord("aten.add", "mlp", (HIDDEN, HIDDEN), (HIDDEN,), (2, 0), (3,)),
    ),
    (ParamSpec("mlp.up_proj.weight", (H, H), (H, H), "bfloat16", Role.LINEAR),),
    (0,),
    (3,),
)
HEAD = Part("head", (linear("lm_head", 0, 1, 8000, 100, Scope.SAMPLE),), (), (0,), (1,))
ENV = {"B": 16, "Q": 1, "S": 4096}


def model(attention: Part, *extra: Segment) -> Trace:
    layers = tuple(range(4))
    return Trace("small", Phase.DECODE, {}, (Segment(attention, layers), Segment(FFN, layers), Segment(HEAD), *extra))


def estimator(
    trace: Trace | None = None, *, tp: int = 8, quant: QuantConfig | None = None, **more: Any
) -> StepEstimator:
    return StepEstimator(
        trace or model(attention_part(tp)),
        device=load_device(more.pop("device", "H100_SXM")),
        engine=load_engine("vllm"),
        parallel=ParallelConfig(tensor_parallel_size=tp),
        quant=quant or QuantConfig(),
        **more,
    )


def total(seconds: Mapping[Scope, Any]) -> Any:
    return sum(seconds.values())


def test_rows_add_up_to_the_fast_path() -> None:
    est = estimator()
    step = est.estimate(ENV)
    assert step.device_s == pytest.approx(float(total(est.scope_seconds(ENV))))
    assert step.step_s == step.device_s + load_engine("vllm").host_step_s
    for sums in (step.by_class(), step.by_bound(), step.by_scope(), step.by_layer()):
        assert sum(sums.values()) == pytest.approx(step.device_s)
    assert step.by_layer()[0] == pytest.approx(step.by_layer()[3])
    assert set(step.by_layer()) == {0, 1, 2, 3, None}
    assert step.bound in {str(b) for b in Bound}


def test_bounds_of_a_grid_add_up() -> None:
    est = estimator()
    env = {"B": np.array([1, 512, 100_000]), "Q": 1, "S": 4096}
    assert sum(est.bound_seconds(env, tuple(Scope)).values()) == pytest.approx(total(est.scope_seconds(env)))


def test_grid_equals_points() -> None:
    est = estimator()
    batches = np.array([1, 16, 300])
    grid = est.scope_seconds({"B": batches, "Q": 1, "S": 4096})
    for i, batch in enumerate(batches):
        point = est.scope_seconds({"B": int(batch), "Q": 1, "S": 4096})
        for scope in Scope:
            assert grid[scope][i] == pytest.approx(float(point[scope]))


def test_axes_of_an_environment_broadcast() -> None:
    seconds = estimator().scope_seconds({"B": np.arange(1, 5)[:, None], "Q": 1, "S": np.array([1024, 4096])})
    assert seconds[Scope.SEQUENCE].shape == (4, 2)
    assert seconds[Scope.TOKEN].shape == (4, 2)


def test_scopes_are_priced_apart() -> None:
    est = estimator()
    whole = est.scope_seconds(ENV)
    tokens = est.seconds({"B": 500, "Q": 1, "S": 1}, [Scope.TOKEN])
    assert set(tokens) == {Scope.TOKEN}
    assert tokens[Scope.TOKEN] > whole[Scope.TOKEN]
    other = est.seconds({**ENV, "S": 8192}, [Scope.TOKEN])
    assert other[Scope.TOKEN] == whole[Scope.TOKEN]


def test_context_moves_attention_only() -> None:
    est = estimator()
    short, long = est.scope_seconds(ENV), est.scope_seconds({**ENV, "S": 65_536})
    assert long[Scope.SEQUENCE] > 4 * short[Scope.SEQUENCE]
    assert long[Scope.TOKEN] == short[Scope.TOKEN]


def test_dcp_shortens_attention() -> None:
    long = {"B": 64, "Q": 1, "S": 32_768}
    one, four = (estimator(model(attention_part(8, dcp))).scope_seconds(long) for dcp in (1, 4))
    assert four[Scope.SEQUENCE] < one[Scope.SEQUENCE] / 2


def test_segment_query_length_overrides() -> None:
    env = {**ENV, "Q": 3}
    base = estimator().scope_seconds(env)
    longer = estimator(model(attention_part(8), Segment(FFN, (4,), query_len=1)))
    alone = estimator(Trace("small", Phase.DECODE, {}, (Segment(FFN, (4,)),)))
    added = longer.scope_seconds(env)[Scope.TOKEN] - base[Scope.TOKEN]
    assert added == pytest.approx(alone.scope_seconds({**ENV, "Q": 1})[Scope.TOKEN])
    wide = longer.seconds(env, [Scope.TOKEN], draft_env={**ENV, "B": 4096})[Scope.TOKEN]
    assert wide - base[Scope.TOKEN] == pytest.approx(alone.scope_seconds({**ENV, "B": 4096})[Scope.TOKEN])


def test_unpriced_op_is_counted_listed_and_refused_under_strict() -> None:
    odd = Part("odd", (OpRecord("aten.frobnicate", "m", (HIDDEN,), (HIDDEN,), (0,), (1,)),), (), (0,), (1,))
    trace = model(attention_part(8), Segment(odd, (0, 1, 2, 3)))
    est = estimator(trace)
    assert est.coverage == pytest.approx(25 / 29)  # 4 layers of six ops, the head; four ops are not priced
    assert est.unpriced == {"aten.frobnicate": 4}
    row = next(r for r in est.estimate(ENV).ops if r.name == "aten.frobnicate")
    assert (row.seconds, row.bound) == (0.0, "unpriced")
    with pytest.raises(UnpricedOpError, match=r"frobnicate \(4x\)"):
        estimator(trace, strict=True)


def test_fusion_saves_kernels_and_none_of_the_products() -> None:
    fused, eager = estimator().estimate(ENV), estimator(fusion=False).estimate(ENV)
    assert fused.by_class()["pointwise"] < eager.by_class()["pointwise"]
    assert fused.by_class()["gemm"] == eager.by_class()["gemm"]


def test_quantisation_reaches_the_price() -> None:
    fp8 = QuantConfig(SCHEMES.get("FP8"), kv_dtype=FP8)
    plain, narrow = estimator().estimate(ENV), estimator(quant=fp8).estimate(ENV)
    linears = [sum(r.nbytes for r in step.ops if r.module == "mlp.up_proj" and r.flops) for step in (plain, narrow)]
    assert linears[1] < 0.6 * linears[0]
    assert narrow.by_class()["attention_decode"] < plain.by_class()["attention_decode"]


def test_dtype_that_the_device_lacks_is_refused() -> None:
    int8 = QuantConfig(SCHEMES.get("W8A8_DYNAMIC"))
    assert estimator(quant=int8).estimate(ENV).device_s > 0
    with pytest.raises(ConfigError, match=r"ATLAS.*float8_e4m3fn"):
        estimator(quant=QuantConfig(SCHEMES.get("FP8")), device="ATLAS_800_A3_752T_128G_DIE").scope_seconds(ENV)


def test_trace_of_another_layout_is_noticed() -> None:
    with pytest.raises(ValueError, match="another layout"):
        estimator(model(attention_part(8)), tp=4).scope_seconds(ENV)


def test_layouts_share_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_memos()
    calls: list[str] = []
    original = StepEstimator._price

    def counted(self: StepEstimator, part: Part, *args: Any) -> Any:
        calls.append(part.key)
        return original(self, part, *args)

    monkeypatch.setattr(StepEstimator, "_price", counted)
    eight, four = attention_part(8), attention_part(4)
    estimator(model(eight)).scope_seconds(ENV)
    estimator(model(four), tp=4).scope_seconds(ENV)
    estimator(model(eight)).scope_seconds(ENV)
    assert sorted(calls) == ["attention/tp4/dcp1", "attention/tp8/dcp1", "ffn", "head"]


def test_order_of_pricing_does_not_matter() -> None:
    part = attention_part(8)

    def price(device: str) -> float:
        return float(total(estimator(model(part), device=device).scope_seconds(ENV)))

    clear_memos()
    first = [price(d) for d in ("H100_SXM", "A100_80G_SXM", "B200_SXM")]
    clear_memos()
    second = [price(d) for d in ("B200_SXM", "A100_80G_SXM", "H100_SXM")]
    assert first == second[::-1]
    assert len(set(first)) == 3


def test_prepared_parts_are_remembered() -> None:
    quant = QuantConfig(SCHEMES.get("FP8"))
    assert prepare(FFN, quant) is prepare(FFN, quant)
    assert prepare(FFN, quant) is not prepare(FFN, QuantConfig())


def test_no_step_between_neighbouring_batches() -> None:
    batches = np.arange(1, 2000)
    seconds = np.asarray(total(estimator().scope_seconds({"B": batches, "Q": 1, "S": 4096})))
    assert (np.diff(seconds) >= -1e-15).all()
    assert (seconds[1:] / seconds[:-1]).max() < 1.15


def points_per_second(layouts: int = 20, batches: int = 2048) -> float:
    """(layout, batch) points priced per second with empty memos; every layout has an attention part of its own."""
    estimators = [estimator(model(attention_part(8))) for _ in range(layouts)]
    clear_memos()
    env = {"B": np.arange(1, batches + 1), "Q": 1, "S": 4096}
    start = time.perf_counter()
    for est in estimators:
        est.scope_seconds(env)
    return layouts * batches / (time.perf_counter() - start)


def test_points_are_vectorised() -> None:
    """One call prices a whole grid: a thousand times the points for far less than a thousand times the work."""
    assert points_per_second(layouts=2, batches=4096) > 10 * points_per_second(layouts=2, batches=4)


def test_emulated_products_are_weight_only() -> None:
    """A100 widens fp8 weights in the kernel: nothing quantises activations for that; H100 computes in fp8."""
    fp8 = QuantConfig(SCHEMES.get("FP8"), SCHEMES.get("FP8"))
    widened = as_run(fp8, load_device("A100_80G_SXM"))
    assert widened.linear.activation_dtype is None
    assert widened.linear.weight_bytes((256, 256), "bfloat16") == 256 * 256 + 4 * 4
    assert as_run(fp8, load_device("H100_SXM")) == fp8
    # A device that has no kernels for a type refuses it later, by name.
    assert as_run(fp8, load_device("ATLAS_800_A3_752T_128G_DIE")) == fp8
