"""Weights to the byte and activations by liveness, on programs small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tensor_cast.ir.expr import ceildiv, symbol
from tensor_cast.ir.record import Kind, OpRecord, ParamSpec, Part, Phase, Role, Segment, TensorSpec, Trace
from tensor_cast.performance_model.memory import MemoryPlan, activation_peak_bytes, param_counts, weight_bytes
from tensor_cast.quant import SCHEMES, QuantConfig
from tensor_cast.units import GIB

B, Q, S = symbol("B"), symbol("Q"), symbol("S")
H, WIDE = 8, 32


def act(width: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec((B, Q, width), dtype)


def op(name: str, inputs: dict[int, TensorSpec], outputs: dict[int, TensorSpec]) -> OpRecord:
    return OpRecord(name, "m", tuple(inputs.values()), tuple(outputs.values()), tuple(inputs), tuple(outputs))


def weight(rows: int, columns: int, name: str = "w") -> TensorSpec:
    return TensorSpec((rows, columns), "bfloat16", Kind.WEIGHT, name)


# hidden 0 -> up 1 (wide) -> act 2 (wide) -> down 3
MLP = Part(
    "ffn",
    (
        op("aten.linear", {0: act(H), 9: weight(WIDE, H)}, {1: act(WIDE)}),
        op("aten.silu", {1: act(WIDE)}, {2: act(WIDE)}),
        op("aten.linear", {2: act(WIDE), 10: weight(H, WIDE)}, {3: act(H)}),
    ),
    (
        ParamSpec("layers.0.up.weight", (WIDE, H), (WIDE, H), "bfloat16", Role.LINEAR),
        ParamSpec("layers.0.down.weight", (H, WIDE), (H, WIDE), "bfloat16", Role.LINEAR),
    ),
    (0,),
    (3,),
)
# residual 0 + output 1 -> new residual 2, its norm 3
GLUE = Part(
    "glue",
    (
        op("aten.add", {0: act(H), 1: act(H)}, {2: act(H)}),
        op("aten.rms_norm", {2: act(H)}, {3: act(H)}),
    ),
    (ParamSpec("layers.0.norm.weight", (H,), (H,), "bfloat16", Role.NORM),),
    (0, 1),
    (2, 3),
)


def trace(*segments: Segment) -> Trace:
    return Trace("m", Phase.DECODE, {}, segments)


def test_peak_inside_a_block() -> None:
    """Most is alive at the activation: input, up and act."""
    tokens = 3
    peak = activation_peak_bytes(trace(Segment(MLP, (0,))), {"B": tokens, "Q": 1, "S": 1})
    assert peak == 2 * tokens * (H + WIDE + WIDE)


def test_residual_lives_across_the_block() -> None:
    """The addition that follows needs two values; the block made one, so the other was alive all the while."""
    tokens = 3
    peak = activation_peak_bytes(trace(Segment(MLP, (0,)), Segment(GLUE, (0,))), {"B": tokens, "Q": 1, "S": 1})
    assert peak == 2 * tokens * (H + WIDE + WIDE + H)


def test_folding_layers_changes_no_peak() -> None:
    env = {"B": 4, "Q": 2, "S": 1}
    one = activation_peak_bytes(trace(Segment(MLP, (0,)), Segment(GLUE, (0,))), env)
    many = activation_peak_bytes(trace(Segment(MLP, tuple(range(60))), Segment(GLUE, tuple(range(60)))), env)
    assert one == many > 0


def test_weights_and_cache_are_not_activations() -> None:
    cache = TensorSpec((2, B * ceildiv(S, 16), 16, 1, 8), "bfloat16", Kind.KV)
    keys = TensorSpec((B, S, 1, 8), "bfloat16", Kind.KV)
    p = Part(
        "attention",
        (
            op("tensor_cast.gather_kv", {5: cache}, {6: keys, 7: keys}),
            op("tensor_cast.attention", {0: act(8), 6: keys, 7: keys}, {8: act(8)}),
        ),
        (),
        (0, 5),
        (8,),
    )
    assert activation_peak_bytes(trace(Segment(p)), {"B": 2, "Q": 1, "S": 4096}) == 2 * (2 * 8 + 2 * 8)


def test_views_of_one_value_count_once() -> None:
    whole, half = act(2 * WIDE), act(WIDE)
    p = Part(
        "ffn",
        (
            op("aten.linear", {0: act(H), 9: weight(2 * WIDE, H)}, {1: whole}),
            op("aten.silu", {1: half}, {2: half}),
            op("aten.mul", {2: half, 1: half}, {3: half}),
        ),
        (),
        (0,),
        (3,),
    )
    assert activation_peak_bytes(trace(Segment(p)), {"B": 1, "Q": 1}) == 2 * (H + 2 * WIDE + WIDE + WIDE)


def test_logits_and_draft_length_count() -> None:
    head = Part("head", (op("aten.linear", {0: act(H), 9: weight(1000, H)}, {1: act(1000)}),), (), (0,), (1,))
    env = {"B": 2, "Q": 4, "S": 1}
    assert activation_peak_bytes(trace(Segment(head)), env) == 2 * 8 * (H + 1000)
    assert activation_peak_bytes(trace(Segment(head, query_len=1)), env) == 2 * 2 * (H + 1000)


def test_peak_takes_arrays() -> None:
    batches = np.array([1, 2, 300])
    steps = trace(Segment(MLP, (0,)), Segment(GLUE, (0,)))
    peaks = activation_peak_bytes(steps, {"B": batches, "Q": 1, "S": 1})
    assert [activation_peak_bytes(steps, {"B": int(b), "Q": 1, "S": 1}) for b in batches] == list(peaks)


# -- weights ------------------------------------------------------------------------------------------------------
def test_weights_count_every_layer_once() -> None:
    steps = trace(Segment(MLP, (0, 1, 2)), Segment(GLUE, (0, 1, 2)))
    assert weight_bytes(steps, QuantConfig()) == 3 * 2 * (2 * H * WIDE + H)


def test_layers_that_run_again_hold_no_second_copy() -> None:
    steps = trace(Segment(MLP, (0, 1)), Segment(MLP, (1,), query_len=1), Segment(MLP, (2,)))
    assert param_counts(steps)["layers.0.up.weight"][1] == 3


def test_tied_head_costs_nothing() -> None:
    embed = ParamSpec("embed.weight", (1000, H), (1000, H), "bfloat16", Role.EMBEDDING)
    tied = ParamSpec("lm_head.weight", (1000, H), (1000, H), "bfloat16", Role.LM_HEAD, tied_to="embed.weight")
    steps = trace(Segment(Part("e", (), (embed,))), Segment(Part("h", (), (tied,))))
    assert weight_bytes(steps, QuantConfig()) == 2 * 1024 * H  # 1,000 rows padded to 16 * 64


def test_quantised_kv_b_keeps_a_dense_copy() -> None:
    """Absorbed MLA multiplies by slices of kv_b in bf16 beside the stored fp8 matrix."""
    kv_b = ParamSpec("layers.0.self_attn.kv_b_proj.weight", (4096, 512), (32768, 512), "bfloat16", Role.LINEAR)
    steps = trace(Segment(Part("a", (), (kv_b,)), (0, 1)))
    n = 4096 * 512
    assert weight_bytes(steps, QuantConfig()) == 2 * 2 * n
    assert weight_bytes(steps, QuantConfig(SCHEMES.get("FP8"))) == 2 * (n + 4 * (4096 // 128) * 4 + 2 * n)


def test_plan_adds_up() -> None:
    plan = MemoryPlan(
        weights=10 * GIB,
        kv=5 * GIB,
        activation=GIB,
        non_torch=GIB // 2,
        graph=GIB // 2,
        reserved=GIB,
        available=18 * GIB,
    )
    assert plan.total == 18 * GIB
    assert plan.fits
    assert plan.spare == 0
    assert plan.total_gib == pytest.approx(18)
    assert plan.gib()["kv"] == 5
