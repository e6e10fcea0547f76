"""``text_generate`` and ``trace`` of layouts with pipeline stages."""

import json

import numpy as np
import pytest

import tensor_cast
from serving_cast.config import OptimizerConfig, ParallelConfig, Workload
from serving_cast.service.layout_costs import TracedCostsFactory
from serving_cast.service.steady_state import DecodeGrid
from serving_cast.setting import make_setting
from tensor_cast.errors import ConfigError
from tensor_cast.ir.record import Phase

LLAMA, GLM = "meta-llama/Meta-Llama-3.1-70B", "zai-org/GLM-5.3"
STEP = ("--device", "H100_SXM", "--tp-size", 4, "--num-queries", 32, "--context-length", 4096, "--decode")
GLM_STAGES = ("--tp-size", 8, "--pp-size", 2, "--pp-layer-partition", "39,39")


def priced(run, *arguments):
    result = run("text_generate", LLAMA, *STEP, *arguments, "--format", "json")
    assert result.code == 0, result.err
    return result.json()


def test_a_step_through_two_stages(run):
    document = priced(run, "--pp-size", 2)
    pipeline, host = document["pipeline"], document["host_ms"]
    first, last = pipeline["stages"]
    back = sum(op["ms"] for op in document["ops"] if op["name"] == "tensor_cast.pp_broadcast")
    latency = first["work_ms"] + last["transfer_in_ms"] + last["work_ms"] + back + host
    assert document["step_ms"] == pytest.approx(latency)
    assert pipeline["slot_ms"] == pytest.approx(last["work_ms"] + last["transfer_in_ms"])
    assert pipeline["batches_in_flight"] == 2
    assert pipeline["cycle_ms"] == pytest.approx(max(latency, 2 * pipeline["slot_ms"]))
    assert pipeline["pp_utilization_of_one_batch"] == pytest.approx((first["work_ms"] + last["work_ms"]) / 2 / latency)
    assert pipeline["pp_utilization"] + sum(pipeline["bubbles"].values()) == pytest.approx(1)
    assert (first["busy"] + last["busy"]) / 2 == pytest.approx(pipeline["pp_utilization"])
    # 32 requests in each of two batches: 4,096 tokens, 40 layers, 2 of 8 heads, K and V of 128, two bytes.
    assert last["kv_cache_size_gb"] == pytest.approx(2 * 32 * 4096 * 40 * 2 * 256 * 2 / 2**30)
    assert document["memory_total_gib"] == max(first["memory_total_gib"], last["memory_total_gib"])


def test_two_stages_do_what_one_does_and_a_transfer(run):
    whole, staged = priced(run), priced(run, "--pp-size", 2)
    assert whole["pipeline"] is None
    wire = [op for op in staged["ops"] if op["name"].startswith("tensor_cast.pp_")]
    # Hidden and residual of 32 tokens, a quarter from each rank; ids of 8 B and two counts of 4 B for each request.
    assert [op["bytes"] for op in wire] == [2 * 32 * 8192 * 2 / 4, 32 * 16]
    gathered = [op for op in staged["ops"] if op["class"] == "all_gather" and not op["module"]]
    again = [op for op in staged["ops"] if op["module"].startswith("model.rotary")]
    more = staged["step_ms"] - whole["step_ms"]
    at_least = sum(op["ms"] for op in (*wire, *gathered))
    assert at_least <= more <= at_least + sum(op["ms"] for op in again) + 0.02
    assert sum(s["weights_gib"] for s in staged["pipeline"]["stages"]) == pytest.approx(whole["weights_gib"])
    assert sum(row["count"] for row in staged["layers"] if row["name"] != "outside") == 80


def test_one_more_batch_in_flight(run):
    two, three = priced(run, "--pp-size", 2), priced(run, "--pp-size", 2, "--pp-extra-batches", 1)
    assert three["pipeline"]["batches_in_flight"] == 3
    assert three["kv_cache_size_gb"] == pytest.approx(1.5 * two["kv_cache_size_gb"])
    assert three["pipeline"]["cycle_ms"] == pytest.approx(3 * three["pipeline"]["slot_ms"])
    assert three["step_ms"] == two["step_ms"]


def test_stage_times_are_those_of_the_search():
    setting = make_setting(OptimizerConfig(LLAMA, ("H100_SXM",), 8, Workload(4096, 512)), "H100_SXM")
    parallel = ParallelConfig(tp_size=4, pp_size=2, pp_layer_partition=(41, 39))
    costs = TracedCostsFactory(setting).costs(parallel, (Phase.DECODE,))
    env = {"B": np.array([32.0]), "Q": 1.0, "S": 4096.0}
    want = costs.pipe.times(DecodeGrid(setting.workload, 8192, env["B"], env)).at(0)
    got = tensor_cast.estimate(
        LLAMA,
        device="H100_SXM",
        tp_size=4,
        pp_size=2,
        pp_layer_partition="41,39",
        num_queries=32,
        context_length=4096,
    ).pipeline.times
    assert got.work == pytest.approx(want.work)
    assert got.hops == pytest.approx(want.hops)
    assert got.back == pytest.approx(want.back)


def test_table_and_chrome_trace(run, tmp_path):
    file = tmp_path / "step.json"
    result = run("text_generate", LLAMA, *STEP, "--pp-size", 2, "--chrome-trace-file", file)
    assert result.code == 0, result.err
    for words in ("Stages, 2 batches in flight", "TPOT, 2 batches in flight", "one batch alone"):
        assert words in result.out
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert names.count("tensor_cast.pp_recv") == 1
    assert names.count("tensor_cast.attention") == 80


def test_sparse_attention_across_the_border(run):
    asked = ("text_generate", GLM, "--device", "H200_SXM", *GLM_STAGES, "--context-length", 8192, "--decode")
    refused = run(*asked)
    assert refused.code == 2
    assert "39, 40, 41" in refused.err
    documents = {}
    for how in ("self-compute", "send-indices", "unsafe"):
        result = run(*asked, "--dsa-split", how, "--format", "json")
        assert result.code == 0
        assert ("UNSAFE" in result.err) == (how == "unsafe")
        assert ("UNSAFE" in run(*asked, "--dsa-split", how).out) == (how == "unsafe")
        documents[how] = result.json()["pipeline"]
        counts = {row["name"]: row["count"] for row in result.json()["layers"] if row["name"] != "outside"}
        assert sum(counts.values()) == 78
        assert ("39-41" in counts) == (how == "self-compute")
    assert documents["self-compute"]["own_indexer_layers"] == documents["unsafe"]["unsafe_layers"] == [39, 40, 41]
    unsafe, own, sent = (documents[how]["stages"][1] for how in ("unsafe", "self-compute", "send-indices"))
    assert own["weights_gib"] - unsafe["weights_gib"] == pytest.approx(3 * 2 * 9_371_904 / 2**30)
    # bfloat16 latents, but indexer keys are 132 B: 8,192 tokens, two batches of one request.
    assert own["kv_cache_size_gb"] - unsafe["kv_cache_size_gb"] == pytest.approx(2 * 8192 * 3 * 132 / 2**30)
    assert own["work_ms"] > unsafe["work_ms"]
    assert sent["transfer_in_ms"] > unsafe["transfer_in_ms"] == own["transfer_in_ms"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pp-layer-partition", "40,40"), "--pp-size 2 or more"),
        (("--pp-size", 2, "--pp-layer-partition", "41,40"), "41+40 = 81"),
        (("--pp-size", 81), "pp.layers"),
        (("--pp-size", 2, "--dsa-split", "what"), "--dsa-split must be self-compute, send-indices, unsafe"),
    ],
)
def test_bad_stages(run, options, words):
    result = run("text_generate", LLAMA, *STEP, *options)
    assert result.code == 2
    assert words in result.err
    assert len(result.err.splitlines()) == 1


# -- trace ----------------------------------------------------------------------------------------------------------


def shown(run, *arguments):
    result = run("trace", *arguments, "--format", "json")
    assert result.code == 0, result.err
    return result.json()["ops"]


def test_trace_of_each_stage(run):
    point = (LLAMA, "--tp-size", 8, "--pp-size", 2, "--batch-size", 64, "--query-len", 1, "--context-len", 4096)
    first, last = (shown(run, *point, "--stage", stage) for stage in (0, 1))
    assert first == shown(run, *point)
    assert not [op for op in first if op["axis"] == "pp"]
    recv, back = (op for op in last if op["axis"] == "pp")
    assert (recv["name"], recv["bytes"], recv["group_size"]) == ("tensor_cast.pp_recv", 256 * 1024, 2)
    assert (back["name"], back["bytes"]) == ("tensor_cast.pp_broadcast", 64 * 16)
    gathers = [op for op in last if op["name"].endswith("all_gather_into_tensor") and not op["module"]]
    assert [op["outputs"][0]["shape"] for op in gathers] == [[64, 1, 8192]] * 2
    attention = [next(op for op in ops if op["name"] == "tensor_cast.attention") for ops in (first, last)]
    assert [(op["module"], op["repeat"]) for op in attention] == [
        ("model.layers.0.self_attn", 40),
        ("model.layers.40.self_attn", 40),
    ]
    assert "pp2, stage 1" in run("trace", *point, "--stage", 1).out


def test_trace_shows_indexers_and_indices(run):
    point = (GLM, *GLM_STAGES, "--stage", 1, "--batch-size", 2, "--query-len", 1, "--context-len", 8192)
    scores = {
        how: [op for op in shown(run, *point, "--dsa-split", how) if op["name"] == "tensor_cast.indexer_scores"]
        for how in ("unsafe", "self-compute")
    }
    assert [op["repeat"] for op in scores["unsafe"]] == [9]
    assert [(op["module"], op["repeat"]) for op in scores["self-compute"]] == [
        ("model.layers.39.self_attn.indexer", 3),
        ("model.layers.42.self_attn.indexer", 9),
    ]
    assert "UNSAFE: layers 39, 40, 41" in run("trace", *point, "--dsa-split", "unsafe").out
    assert "layers 39, 40, 41 get an indexer" in run("trace", *point, "--dsa-split", "self-compute").out
    recv = next(op for op in shown(run, *point, "--dsa-split", "send-indices") if op["axis"] == "pp")
    assert recv["bytes"] == 2 * (2 * 6144 * 2 + 2048 * 4) / 8


def test_stage_out_of_range(run):
    for stages, stage in ((1, 1), (2, 2)):
        result = run("trace", LLAMA, "--pp-size", stages, "--stage", stage)
        assert result.code == 2
        assert f"below pp_size {stages}, found {stage}" in result.err
    with pytest.raises(ConfigError, match="stage"):
        tensor_cast.trace(LLAMA, pp_size=2, stage=-1)
