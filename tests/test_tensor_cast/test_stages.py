"""Stage traces: together they are the whole trace, and what crosses between them has the engine's bytes."""

from __future__ import annotations

from collections import Counter

import pytest
from tracer_models import tiny

from tensor_cast.core.trace_library import TraceLibrary
from tensor_cast.device.catalog import load_device
from tensor_cast.engine.catalog import load_engine
from tensor_cast.errors import LegalityError
from tensor_cast.ir.expr import symbol
from tensor_cast.ir.program import Layout
from tensor_cast.ir.record import OpRecord, Part, Phase, Segment, TensorSpec, Trace
from tensor_cast.ir.stages import BROADCAST, RECV, split_wire, stage_traces
from tensor_cast.model_catalog import load_model_config
from tensor_cast.model_config import ParallelConfig
from tensor_cast.performance_model.estimate import StepEstimator
from tensor_cast.performance_model.memory import weight_bytes
from tensor_cast.quant import QuantConfig

DEEPSEEK = "deepseek-ai/DeepSeek-V3"


@pytest.fixture(scope="module")
def library() -> TraceLibrary:
    return TraceLibrary(load_model_config(DEEPSEEK))


def layout(pp: int, k: int = 0, tp: int = 8, phase: Phase = Phase.DECODE) -> Layout:
    return Layout(ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp), phase, "vllm", 64, k)


def calls(trace: Trace) -> Counter[tuple[str, str]]:
    """Calls of each op by name and class of part, wire left out."""
    found: Counter[tuple[str, str]] = Counter()
    for segment in split_wire(trace)[0].segments:
        if segment.part.key.startswith("glue/pp.gather"):
            continue
        for op in segment.part.ops:
            found[segment.part.key, op.name] += op.repeat * segment.repeat
    return found


@pytest.mark.parametrize("partition", [(31, 30), (1, 60), (2, 57, 2), (15, 15, 16, 15)])
def test_stages_add_up_to_the_whole(library: TraceLibrary, partition: tuple[int, ...]) -> None:
    want = calls(library.compose(layout(len(partition), k=2)))
    stages = library.stages(layout(len(partition), k=2), partition)
    got: Counter[tuple[str, str]] = Counter()
    for number, stage in enumerate(stages):
        here = calls(stage)
        if number:  # each stage makes its rotary tables
            tables = {key: n for key, n in here.items() if key[0] == "glue/outer.1"}
            assert tables
            first = calls(stages[0])
            here.subtract({key: first[key] for key in tables})
        got.update(here)
    assert {k: v for k, v in got.items() if v} == dict(want)


def test_the_ends_are_on_their_stages(library: TraceLibrary) -> None:
    first, middle, last = library.stages(layout(3, k=1), (21, 20, 20))
    roles = [{s.part.key.partition("/")[0] for s in t.segments} for t in (first, middle, last)]
    assert "embed" in roles[0]
    assert not {"embed", "head", "draft"} & roles[1]
    assert {"head", "draft", "embed"} <= roles[2]  # the draft module embeds its tokens
    assert "head" not in roles[0]
    assert [t.layout["stage"] for t in (first, middle, last)] == [0, 1, 2]


def test_boundary_bytes_of_llama_70b() -> None:
    """Hidden and residual of 64 tokens: 2 * 64 * 8192 * 2 B = 2 MiB, of which a rank of TP 8 sends 256 KiB."""
    model = load_model_config("meta-llama/Meta-Llama-3.1-70B")
    stages = TraceLibrary(model).stages(layout(2, tp=8), (40, 40))
    env = {"B": 64, "Q": 1, "S": 4096}
    recv = next(op for op in stages[1].ops if op.name == RECV)
    assert recv.collective_bytes(env) == 256 * 1024
    assert (recv.axis, recv.group_size, recv.attr("pair")) == ("pp", 2, (0, 1))
    gathers = stages[1].segments[1].part.ops
    assert [op.axis for op in gathers] == ["tp", "tp"]
    assert sum(op.outputs[0].nbytes(env) for op in gathers) == 2 * 1024**2
    whole = TraceLibrary(model).stages(layout(2, tp=8), (40, 40), whole_on_wire=True)
    assert next(op for op in whole[1].ops if op.name == RECV).collective_bytes(env) == 2 * 1024**2
    assert not any(s.part.key.startswith("glue/pp") for s in whole[1].segments)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_sampled_tokens_go_back(library: TraceLibrary, k: int) -> None:
    """n * (8(1+k) + 8 + 8k) bytes."""
    *others, last = library.stages(layout(2, k=k), (31, 30))
    assert not any(op.name == BROADCAST for t in others for op in t.ops)
    back = next(op for op in last.ops if op.name == BROADCAST)
    assert back.collective_bytes({"B": 10, "Q": 1 + k, "S": 100}) == 10 * (8 * (1 + k) + 8 + 8 * k)
    assert back.attr("pair") == (1, 0)


def test_weights_of_stages(library: TraceLibrary) -> None:
    quant = QuantConfig.resolve(library.model, None, None)
    whole = weight_bytes(library.compose(layout(1)), quant)
    stages = library.stages(layout(2), (31, 30))
    assert sum(weight_bytes(t, quant) for t in stages) == whole
    # With a draft module the last stage holds the embedding as well: 129,280 x 7168 in bfloat16, split eight ways.
    drafting = sum(weight_bytes(t, quant) for t in library.stages(layout(2, k=1), (31, 30)))
    copy = 129280 * 7168 * 2 // 8
    assert drafting == weight_bytes(library.compose(layout(1, k=1)), quant) + copy


def test_hops_cross_the_links_between_their_stages(library: TraceLibrary) -> None:
    """Two stages of eight ranks lie in two nodes; four of four: the middle hop crosses nodes, the others do not."""
    device, engine = load_device("H100_SXM"), load_engine("vllm")
    quant = QuantConfig.resolve(library.model, None, None)
    node, network = device.tiers[0], device.tiers[-1]
    env = {"B": 64.0, "Q": 1.0, "S": 4096.0}

    def hop(tp: int, partition: tuple[int, ...], stage: int) -> float:
        parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=len(partition))
        traces = library.stages(Layout(parallel, Phase.DECODE, "vllm", 64), partition)
        wire = split_wire(traces[stage])[1]
        estimator = StepEstimator(wire, device=device, engine=engine, parallel=parallel, quant=quant, stage=stage)
        received = [s for s in estimator.segments if "recv" in s.part.key]
        assert len(received) == 1
        return float(estimator.scope_seconds(env)["token"])

    fit = device.collectives["p2p"]

    def expected(tier: object, tp: int) -> float:
        size = 2 * 64 * 7168 * 2 / tp
        return fit.alpha_s + tier.latency_s + size / (tier.bandwidth_among(2) * fit.efficiency)  # type: ignore[attr-defined]

    assert hop(8, (31, 30), 1) == pytest.approx(expected(network, 8))
    quarters = (15, 15, 16, 15)
    assert hop(4, quarters, 1) == pytest.approx(expected(node, 4))
    assert hop(4, quarters, 2) == pytest.approx(expected(network, 4))
    assert hop(4, quarters, 3) == pytest.approx(expected(node, 4))


def test_a_stage_that_crosses_nodes_pays_for_it() -> None:
    """Six ranks a stage on nodes of eight: the second stage, ranks 6 to 11, lies in two nodes."""
    from tensor_cast.parallel import axis_ranks

    parallel = ParallelConfig(tensor_parallel_size=6, pipeline_parallel_size=2, data_parallel_size=2)
    assert axis_ranks(parallel, "tp", stage=1) == (6, 7, 8, 9, 10, 11)
    assert axis_ranks(parallel, "dp", stage=1) == (6, 18)
    assert axis_ranks(parallel, "ep", stage=1)[:1] == (6,)
    assert axis_ranks(parallel, "pp", stage=1) == (0, 6)


def test_bad_partitions(library: TraceLibrary) -> None:
    for partition in [(61, 0), (31, 31), (62, -1)]:
        with pytest.raises(LegalityError):
            library.stages(layout(2), partition)


def test_what_follows_from_the_embedding_is_on_the_first_stage() -> None:
    """A scale of the embedding's output before the layers; rotary tables stay."""
    x, y = symbol("B"), symbol("Q")
    hidden, angles = TensorSpec((x, y, 64), "float32"), TensorSpec((x, y, 16), "float32")
    scale = OpRecord("aten.mul", "model", (hidden,), (hidden,), (1,), (3,))
    cosine = OpRecord("aten.cos", "model", (angles,), (angles,), (2,), (4,))
    again = OpRecord("aten.add", "model", (hidden, angles), (hidden,), (3, 4), (5,))
    glue = Part("glue/outer.1", (scale, cosine, again), (), (1, 2), (4, 5))
    layer = Part("glue/layer.0.0", (scale,), (), (1,), (3,))
    trace = Trace("m", Phase.DECODE, {}, (Segment(glue), Segment(layer, (0, 1)), Segment(Part("head/head", (scale,)))))
    first, second = stage_traces(trace, (1, 1), hidden_size=64, dtype="float32", tp=1)
    assert [op.name for op in first.ops] == ["aten.mul", "aten.cos", "aten.add", "aten.mul"]
    assert [op.name for op in second.ops] == [RECV, "aten.cos", "aten.mul", "aten.mul", BROADCAST]


def test_tied_weights_are_on_both_ends() -> None:
    """A head that shares the embedding's weights needs a copy of its own on another stage."""
    model = tiny("qwen3", dtype="bfloat16")
    quant = QuantConfig.resolve(model, None, None)
    library = TraceLibrary(model, use_cache=False)
    stages = library.stages(layout(2, tp=1), (1, 2))
    embedding = model.vocab_size * model.hidden_size * 2
    assert (
        sum(weight_bytes(t, quant) for t in stages) == weight_bytes(library.compose(layout(1, tp=1)), quant) + embedding
    )
