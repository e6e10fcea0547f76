"""What a quantisation scheme does to a traced part."""

from __future__ import annotations

import tensor_cast.performance_model.costs  # noqa: F401
from tensor_cast.ir.expr import symbol
from tensor_cast.ir.quantize import DYNAMIC_QUANT, quantize, quantize_trace
from tensor_cast.ir.record import Kind, OpRecord, ParamSpec, Part, Phase, Role, Segment, TensorSpec, Trace
from tensor_cast.performance_model.base import COSTS
from tensor_cast.quant import FP8, SCHEMES, QuantConfig

B, Q = symbol("B"), symbol("Q")
FP8_BLOCK = QuantConfig(SCHEMES.get("FP8"), SCHEMES.get("FP8"))


def act(*shape: object, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(shape, dtype)  # type: ignore[arg-type]


def linear(
    name: str, x: int, out: int, rows: int = 256, *, ident: int, dtype: str = "bfloat16", flat: bool = False
) -> OpRecord:
    lead = (B * Q,) if flat else (B, Q)
    w = TensorSpec((rows, 512), dtype, Kind.WEIGHT, f"{name}.weight")
    return OpRecord("aten.linear", name, (act(*lead, 512, dtype=dtype), w), (act(*lead, rows),), (x, ident), (out,))


def param(name: str, shape: tuple[int, ...], role: Role = Role.LINEAR, dtype: str = "bfloat16") -> ParamSpec:
    return ParamSpec(name, shape, shape, dtype, role)


def test_dynamic_scheme_quantises_a_shared_input_once() -> None:
    """Three products read one value, one of them through a flattened view."""
    ops = (
        linear("a.q_proj", 0, 1, ident=10),
        linear("a.k_proj", 0, 2, ident=11),
        linear("b.gate", 0, 3, ident=12, flat=True),
    )
    params = tuple(param(f"{m}.weight", (256, 512)) for m in ("a.q_proj", "a.k_proj", "b.gate"))
    out = quantize(Part("p", ops, params, (0,), (1, 2, 3)), FP8_BLOCK)
    assert [o.name for o in out.ops] == [DYNAMIC_QUANT, "aten.linear", "aten.linear", "aten.linear"]
    quant, q, k, flat = out.ops
    assert [s.dtype for s in quant.outputs] == [FP8, "float32"]
    assert quant.outputs[1].shape == (B, Q, 4)  # a scale per 128 of 512
    for op in (q, k, flat):
        assert op.input_ids[0] == quant.output_ids[0]
        assert op.input_ids[-1] == quant.output_ids[1]
        assert op.attr("compute_dtype") == FP8
        assert op.attr("kernel") == "fp8_block"
        assert op.inputs[1].dtype == FP8
        assert (op.inputs[2].shape, op.inputs[2].dtype, op.inputs[2].kind) == ((2, 4), "float32", Kind.WEIGHT)
    assert flat.inputs[0].shape == (B * Q, 512)
    assert q.outputs[0].dtype == "bfloat16"


def test_weight_only_scheme_keeps_activations_and_compute() -> None:
    p = Part("p", (linear("a.q_proj", 0, 1, ident=10),), (param("a.q_proj.weight", (256, 512)),), (0,), (1,))
    (op,) = quantize(p, QuantConfig(SCHEMES.get("W4A16"))).ops
    assert op.inputs[0].dtype == "bfloat16"
    assert op.inputs[1].dtype == "int4"
    assert op.attr("compute_dtype") == "bfloat16"


def test_unquantised_part_is_the_same_object() -> None:
    p = Part("p", (linear("a.q_proj", 0, 1, ident=10),), (param("a.q_proj.weight", (256, 512)),), (0,), (1,))
    assert quantize(p, QuantConfig()) is p


def test_head_and_skipped_modules_stay() -> None:
    ops = (linear("lm_head", 0, 1, ident=10), linear("a.self_attn.q_proj", 0, 2, ident=11))
    params = (param("lm_head.weight", (256, 512), Role.LM_HEAD), param("a.self_attn.q_proj.weight", (256, 512)))
    p = Part("p", ops, params, (0,), (1, 2))
    assert quantize(p, QuantConfig(SCHEMES.get("FP8"), skip=("a.self_attn",))) is p


def test_experts_and_their_scales() -> None:
    hidden, up = act(B * Q, 512), TensorSpec((8, 1024, 512), "bfloat16", Kind.WEIGHT, "e.up")
    down = TensorSpec((8, 512, 512), "bfloat16", Kind.WEIGHT, "e.down")
    op = OpRecord("tensor_cast.grouped_experts", "e", (hidden, up, down), (hidden,), (0, 10, 11), (1,))
    params = (param("e.up", (8, 1024, 512), Role.EXPERTS), param("e.down", (8, 512, 512), Role.EXPERTS))
    quant, experts = quantize(Part("p", (op,), params, (0,), (1,)), FP8_BLOCK).ops
    assert quant.name == DYNAMIC_QUANT
    assert [s.shape for s in experts.inputs if "scale" in s.name] == [(8, 8, 4), (8, 4, 4)]


def test_absorbed_products_run_on_a_dense_copy() -> None:
    w = TensorSpec((16, 128, 512), "bfloat16", Kind.WEIGHT, "a.kv_b_proj.weight")
    op = OpRecord("aten.bmm", "a", (act(16, B * Q, 128), w), (act(16, B * Q, 512),), (0, 10), (1,))
    p = Part("p", (op,), (param("a.kv_b_proj.weight", (4096, 512)),), (0,), (1,))
    assert quantize(p, FP8_BLOCK) is p


def test_cache_takes_its_dtype_everywhere() -> None:
    cache = TensorSpec((2, 64, 16, 1, 128), "bfloat16", Kind.KV)
    new = act(B, Q, 1, 128)
    op = OpRecord("tensor_cast.reshape_and_cache", "a", (new, new, cache), (), (0, 1, 2), ())
    (out,) = quantize(Part("p", (op,), (), (0, 1, 2)), QuantConfig(kv_dtype="int8")).ops
    assert [s.dtype for s in out.inputs] == ["bfloat16", "bfloat16", "int8"]


def test_router_widened_by_model_code_runs_in_the_models_dtype() -> None:
    cast = OpRecord("aten._to_copy", "m.gate", (act(B, Q, 512),), (act(B, Q, 512, dtype="float32"),), (0,), (1,))
    router = linear("m.gate", 1, 2, ident=10, dtype="float32")
    p = Part("p", (cast, router), (param("m.gate.weight", (256, 512), Role.ROUTER, "float32"),), (0,), (2,))
    (out,) = quantize(p, QuantConfig()).ops
    assert out.input_ids == (0, 10)
    assert [s.dtype for s in out.inputs] == ["bfloat16", "bfloat16"]
    assert out.attr("compute_dtype") == "bfloat16"
    kept = Part("p", (cast, router), p.params, (0,), (1, 2))  # the wide value is used elsewhere
    assert len(quantize(kept, QuantConfig()).ops) == 2


def test_rewritten_value_is_quantised_again() -> None:
    relu = OpRecord("aten.relu_", "a", (act(B, Q, 512),), (act(B, Q, 512),), (0,), (0,))
    ops = (linear("a.q_proj", 0, 1, ident=10), relu, linear("a.k_proj", 0, 2, ident=11))
    params = tuple(param(f"a.{n}.weight", (256, 512)) for n in ("q_proj", "k_proj"))
    out = quantize(Part("p", ops, params, (0,), (1, 2)), FP8_BLOCK)
    assert [o.name for o in out.ops].count(DYNAMIC_QUANT) == 2


def test_shared_parts_stay_shared() -> None:
    p = Part("p", (linear("a.q_proj", 0, 1, ident=10),), (param("a.q_proj.weight", (256, 512)),), (0,), (1,))
    trace = Trace("m", Phase.DECODE, {}, (Segment(p, (0,)), Segment(p, (1,))))
    first, second = quantize_trace(trace, FP8_BLOCK).segments
    assert first.part is second.part
    assert first.part is not p


def dispatched(tokens: int = 4, dp: int = 4) -> Part:
    """Experts of 7168 x 2048 whose tokens, weights and ids come from ``dp`` ranks: DeepSeek-R1, tp 2, dp 4, ep 8."""

    def gather(spec: TensorSpec, source: int, out: int) -> OpRecord:
        wide = TensorSpec((dp * tokens, *spec.shape[1:]), spec.dtype, spec.kind)
        name = "_c10d_functional.all_gather_into_tensor"
        return OpRecord(name, "experts", (spec,), (wide,), (source,), (out,), axis="dp", group_size=dp)

    hidden, chosen = act(tokens, 7168), act(tokens, 8, dtype="float32")
    ids = TensorSpec((tokens, 8), "int64", Kind.INDEX)
    up = TensorSpec((32, 4096, 7168), "bfloat16", Kind.WEIGHT, "experts.gate_up_proj")
    down = TensorSpec((32, 7168, 2048), "bfloat16", Kind.WEIGHT, "experts.down_proj")
    gathers = (gather(hidden, 0, 10), gather(chosen, 1, 11), gather(ids, 2, 12))
    inputs = (*(op.outputs[0] for op in gathers), up, down)
    experts = OpRecord(
        "tensor_cast.grouped_experts",
        "experts",
        (inputs[0], inputs[2], inputs[1], up, down),
        (inputs[0],),
        (10, 12, 11, 20, 21),
        (30,),
        attrs=(("num_experts", 256), ("top_k", 8)),
    )
    params = tuple(param(w.name, tuple(map(int, w.shape)), Role.EXPERTS) for w in (up, down))  # type: ignore[arg-type]
    return Part("p", (*gathers, experts), params, (0, 1, 2), (30,))


def test_tokens_are_quantised_before_they_are_gathered_for_experts() -> None:
    """4 tokens: 28,672 B in fp8 and 896 B of scales instead of 57,344 B; weights and 32-bit ids of 128 B each."""
    quant, gather, experts = quantize(dispatched(), FP8_BLOCK).ops
    assert [op.name for op in (quant, experts)] == [DYNAMIC_QUANT, "tensor_cast.grouped_experts"]
    assert quant.input_ids == (0,)
    cost = COSTS.get(gather.name)(gather)
    assert cost.collective is not None
    assert cost.collective.nbytes == 28_672 + 896 + 128 + 128
    sent = dict(zip(gather.output_ids, gather.outputs, strict=True))
    assert sent[10].dtype == FP8
    assert sent[10].shape == (16, 7168)
    assert experts.input_ids[0] == 10
    assert experts.inputs[0].dtype == FP8
    assert experts.input_ids[-1] in sent  # the scales arrive with the tokens
    assert experts.attr("compute_dtype") == FP8


def test_weight_only_schemes_gather_tokens_as_they_are() -> None:
    gather, experts = quantize(dispatched(), QuantConfig(SCHEMES.get("W4A16"), SCHEMES.get("W4A16"))).ops
    cost = COSTS.get(gather.name)(gather)
    assert cost.collective is not None
    assert cost.collective.nbytes == 57_344 + 128 + 128
    assert experts.inputs[0].dtype == "bfloat16"


def test_blocks_of_nvfp4_have_fp8_scales() -> None:
    """16 elements of half a byte and a scale of one: 4 * 7168 * 9/16 B for 4 tokens."""
    _, gather, _ = quantize(dispatched(), QuantConfig(SCHEMES.get("NVFP4"), SCHEMES.get("NVFP4"))).ops
    cost = COSTS.get(gather.name)(gather)
    assert cost.collective is not None
    assert cost.collective.nbytes == 4 * 7168 * 9 / 16 + 128 + 128


def test_tokens_that_others_read_too_are_gathered_as_they_are() -> None:
    part = dispatched()
    reader = OpRecord("aten.add", "x", (act(16, 7168),), (act(16, 7168),), (10,), (40,))
    out = quantize(Part("p", (*part.ops, reader), part.params, (0, 1, 2), (30, 40)), FP8_BLOCK)
    assert [op.name for op in out.ops].count("_c10d_functional.all_gather_into_tensor") == 3
