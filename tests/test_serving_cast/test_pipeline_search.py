"""Layouts with pipeline stages in the search: from traces to rows."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from serving_fakes import FakePricer

from cli.inference import throughput_optimizer
from serving_cast.config import Limits, Mode, OptimizerConfig, ParallelConfig, SearchSpace, Workload
from serving_cast.parallel_runner import ParallelRunner
from serving_cast.service.layout_costs import TracedCosts, TracedCostsFactory
from serving_cast.service.points import LayoutPoints
from serving_cast.service.staged_costs import StagedCosts
from serving_cast.service.staged_state import Pipe, StagedPricer, solve_staged
from serving_cast.service.steady_state import AggregatedGrid, DecodeGrid, PrefillGrid
from serving_cast.setting import make_setting
from tensor_cast.core.capacity import CapacityPlanner
from tensor_cast.core.capacity_config import CapacityConfig
from tensor_cast.errors import ConfigError, LegalityError
from tensor_cast.ir.record import Phase, Scope
from tensor_cast.performance_model.pipeline import steady_flow
from tensor_cast.pipeline_partition import DsaSplit, all_partitions, unsafe_layers

LLAMA = "meta-llama/Meta-Llama-3.1-70B"
BOTH = (Phase.DECODE, Phase.PREFILL)


def asked(**values: Any) -> OptimizerConfig:
    defaults: dict[str, Any] = {
        "model": LLAMA,
        "devices": ("H100_SXM",),
        "num_devices": 8,
        "workload": Workload(4096, 512),
        "space": SearchSpace(tp=(4,), dp=(1,), dcp=(1,), pp=(2,)),
    }
    return OptimizerConfig(**(defaults | values))


def runner(**values: Any) -> ParallelRunner:
    config = asked(**values)
    return ParallelRunner(make_setting(config, config.devices[0]))


class NoWire:
    """Stages that are next to each other: nothing to wait for."""

    def seconds(self, env: Any, scopes: Any) -> dict[Scope, Any]:
        return dict.fromkeys(scopes, 0.0)


@pytest.mark.parametrize("build", [AggregatedGrid.build, DecodeGrid.build, PrefillGrid.build])
def test_one_stage_is_no_pipeline(build: Any) -> None:
    grid = build(Workload(3000, 400, num_mtp_tokens=1), 2048, np.arange(1.0, 60.0))
    pricer = FakePricer()
    staged = StagedPricer((pricer,), (NoWire(),))
    state, _ = solve_staged(grid, Pipe(staged, staged, batches=1, host_s=2e-3))
    plain = grid.solve(pricer, pricer, 2e-3) if isinstance(grid, AggregatedGrid) else grid.solve(pricer, 2e-3)
    for name in ("step", "tpot", "ttft", "tokens_per_second", "requests_per_second", "within_budget"):
        mine, theirs = getattr(state, name), getattr(plain, name)
        if theirs is None:
            assert mine is None
        else:
            inside = plain.within_budget
            np.testing.assert_allclose(mine[inside], theirs[inside], rtol=1e-12)


def test_stage_times_add_up_to_the_step() -> None:
    """The stages of a layout take together what the whole takes, but for rotary tables and gathers made again."""
    config = asked(space=SearchSpace(tp=(4,), dp=(1,), dcp=(1,), pp=(1, 4)), num_devices=16)
    factory = TracedCostsFactory(make_setting(config, "H100_SXM"))
    whole = factory.costs(ParallelConfig(tp_size=4), BOTH)
    staged = factory.costs(ParallelConfig(tp_size=4, pp_size=4, pp_layer_partition=(20, 20, 20, 20)), BOTH)
    assert isinstance(whole, TracedCosts)
    assert isinstance(staged, StagedCosts)
    grid = DecodeGrid.build(config.workload, 8192, np.array([1.0, 64.0]))
    total = sum(whole.decode.seconds(grid.env, tuple(Scope)).values())  # type: ignore[union-attr]
    times = staged.pipe.times(grid)
    np.testing.assert_allclose(sum(times.work), total, rtol=0.02)
    assert (np.asarray(sum(times.work)) > total).all()
    assert not times.hops[0].any()
    assert all((hop > 0).all() for hop in times.hops[1:])
    assert sum(stage.weight_bytes for stage in staged.stages) == whole.weight_bytes
    assert sum(stage.kv_bytes(5000) for stage in staged.stages) == whole.kv_bytes(5000)


def test_row_of_a_pipeline() -> None:
    run = runner()
    evaluation = run.evaluate()
    (points,) = evaluation.points
    row = points.row(9)
    assert row.parallel == "tp4pp2"
    assert (row.pp, row.replicas, row.batch_size, row.concurrency) == (2, 1, 10, 20)
    assert row.pp_layer_partition == (40, 40)
    assert row.batches_in_flight == 2
    # Two batches in flight: 20 requests gain a token per cycle. KV: 20 requests of 4,608 tokens, 40 layers, 2 heads.
    assert row.throughput_tok_s == pytest.approx(20 / (row.tpot_ms * 1e-3))
    assert row.kv_cache_size_gb == pytest.approx(20 * 4608 * 40 * 2 * 2 * 128 * 2 / 2**30)
    # The last stage holds the head and the norm beside its 40 layers; it is the fuller one.
    weights = [stage.weights for stage in points.memory.stages]
    assert weights[1] - weights[0] == 8192 * 2  # embedding and head are alike, the final norm remains
    assert row.weights_gib == pytest.approx(weights[1] / 2**30)
    assert 0 < row.pp_utilization < 1


def test_an_extra_batch_in_flight() -> None:
    points = {}
    for name, extra in (("p", None), ("p+1", 1)):
        evaluation = runner(mode=Mode.DISAGGREGATED, pp_extra_batches=extra).evaluate()
        points[name] = next(p for p in evaluation.points if p.phase == "decode")
    assert points["p+1"].row(9).concurrency == 30
    assert points["p+1"].row(9).pp_utilization > points["p"].row(9).pp_utilization
    assert points["p+1"].row(9).tpot_ms > points["p"].row(9).tpot_ms


def test_same_requests_on_more_stages() -> None:
    """Source 004: what fits one TP group gains nothing from stages, replicas serve more (section 7)."""
    space = SearchSpace(tp=(8,), dp=(1,), dcp=(1,), pp=(1, 2), batch_range=(32, 64))
    (summary,) = runner(num_devices=16, space=space).run()
    rows = {row.parallel: row for row in summary.candidates}
    assert rows["tp8"].replicas == 2
    assert rows["tp8"].throughput_tok_s > rows["tp8pp2"].throughput_tok_s


def test_auto_is_the_best_of_all() -> None:
    """Every split of 80 layers over two stages, each searched on its own: none serves more than what auto finds."""
    space = SearchSpace(tp=(4,), dp=(1,), dcp=(1,), pp=(2,), batch_range=(8, 8))
    (auto,) = runner(space=space, pp_layer_partition="auto").run()
    best = auto.candidates[0]
    factory_run = runner(space=space)
    rates = {}
    for partition in all_partitions(80, 2):
        parallel = ParallelConfig(tp_size=4, pp_size=2, pp_layer_partition=partition)
        points = factory_run._points("aggregated", parallel, *factory_run._grid("aggregated"))
        rates[partition] = points.row(0).throughput_tok_s
    assert best.throughput_tok_s == pytest.approx(max(rates.values()), rel=1e-9)


def test_mtp_counts_on_the_last_stage() -> None:
    """Each of k draft passes runs one more layer on the last stage (source 000, section 4.2: 39 against 39 + 3)."""
    model = "deepseek-ai/DeepSeek-V3"
    space = SearchSpace(tp=(8,), dp=(1,), dcp=(1,), ep=(1,), pp=(2,))
    times = {}
    for k in (0, 3):
        config = asked(
            model=model, devices=("H200_SXM",), num_devices=16, workload=Workload(4096, 512, 0, k), space=space
        )
        factory = TracedCostsFactory(make_setting(config, "H200_SXM"))
        costs = factory.costs(ParallelConfig(tp_size=8, pp_size=2, pp_layer_partition=(31, 30)), BOTH)
        assert isinstance(costs, StagedCosts)
        env = {"B": np.array([16.0]), "Q": 1.0 + k, "S": 4096.0}
        pricer = costs.stages[1].decode
        assert pricer is not None
        times[k] = [(s.layers, s.query_len) for s in pricer.segments if s.part.key.startswith("attention")]
        assert steady_flow(costs.pipe.times(DecodeGrid(config.workload, 8192, env["B"], env)), 2).cycle > 0
    assert times[0] == [(tuple(range(31, 61)), None)]
    assert times[3] == [(tuple(range(31, 61)), None), ((61,), None), ((61,), 1), ((61,), 1)]


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    base = [LLAMA, "--device", "H100_SXM", "--num-devices", "8", "--input-length", "4096", "--output-length", "512"]
    sizes = ["--tp-sizes", "4", "--dp-sizes", "1", "--dcp-sizes", "1", "--pp-sizes", "1,2", "--format", "json"]
    assert throughput_optimizer.main([*base, *sizes, "--pp-layer-partition", "41,39", "--pp-extra-batches", "1"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert {row["parallel"]: row["pp_layer_partition"] for row in out["candidates"]} == {
        "tp4": None,
        "tp4pp2": [41, 39],
    }
    assert {row["parallel"]: row["batches_in_flight"] for row in out["candidates"]} == {"tp4": 1, "tp4pp2": 3}
    assert out["inputs"]["pp_sizes"] == [1, 2]
    assert out["inputs"]["pp_extra_batches"] == 1
    assert throughput_optimizer.main([*base, *sizes, "--pp-layer-partition", "41,39", "--format", "csv"]) == 0
    rows = {row["parallel"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert [stage["layers"] for stage in json.loads(rows["tp4pp2"]["stages"])] == [41, 39]
    assert rows["tp4pp2"]["pp_layer_partition"] == "41,39"
    assert (rows["tp4pp2"]["own_indexer_layers"], rows["tp4"]["stages"]) == ("", "")


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("41,40", r"\[pp.partition_sum\].*41\+40 = 81"),
        ("80,0", r"\[pp.partition_positive\]"),
        ("81,-1", r"\[pp.partition_positive\]"),
        ("20,20,20,20", r"\[pp.partition_count\].*4 in 20,20,20,20, pp_size 2"),
        ("4_1,39", "integers separated by commas"),
        ("41.0,39", "integers separated by commas"),
        ("", "integers separated by commas"),
    ],
)
def test_partition_that_fits_no_size_is_bad_input(
    partition: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [LLAMA, "--device", "H100_SXM", "--num-devices", "8", "--input-length", "4096", "--output-length", "512"]
    assert throughput_optimizer.main([*asked, "--pp-sizes", "1,2", "--pp-layer-partition", partition]) == 2
    out = capsys.readouterr()
    assert not out.out
    assert re.search(message, out.err)


def test_partition_may_fit_one_size_of_several() -> None:
    (found,) = runner(space=SearchSpace(tp=(2,), pp=(2, 4), dp=(1,), dcp=(1,)), pp_layer_partition="41,39").run()
    assert [row.pp for row in found.candidates] == [2]
    assert {rejection.rule for rejection in found.rejections} == {"pp.partition_count"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"space": SearchSpace(), "pp_layer_partition": "41,39"}, "--pp-sizes"),
        ({"pp_extra_batches": -1}, "--pp-extra-batches must be an integer of at least 0"),
        ({"dsa_split": "what"}, "--dsa-split must be self-compute, send-indices, unsafe; found 'what'"),
    ],
)
def test_options_that_make_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(**values)


GLM = "zai-org/GLM-5.3"


def test_stages_without_their_indices_are_refused() -> None:
    """Source 000: with 39,39 the layers 39 to 41 would reuse indices of layer 38, which another stage computed."""
    run = runner(model=GLM, pp_layer_partition="39,39")
    with pytest.raises(LegalityError, match="39, 40, 41") as error:
        run._get_user_config(Phase.DECODE, tp_size=4, pp_size=2)
    assert error.value.rule == "pp.dsa_indices"
    safe = runner(model=GLM, pp_layer_partition="42,36")._get_user_config(Phase.DECODE, tp_size=4, pp_size=2)
    assert safe.pp_layer_partition == (42, 36)


def glm_points(partition: str, split: str | None, *, dcp: int = 1, k: int = 3, **values: Any) -> LayoutPoints:
    space = SearchSpace(tp=(8,), dp=(1,), ep=(1,), dcp=(dcp,), pp=(2,))
    run = runner(
        model=GLM,
        num_devices=16,
        devices=("H200_SXM",),
        workload=Workload(8192, 512, 0, k),
        space=space,
        pp_layer_partition=partition,
        dsa_split=split,
        quantize_linear_action="FP8",
        quantize_attention_action="FP8",
        **values,
    )
    (points,) = run.evaluate().points
    return points


def test_ways_out_of_missing_indices() -> None:
    """With 39,39 layers 39 to 41 of GLM lack indices: an indexer for each, or 8,192 B a token over the wire."""
    unsafe, own, sent = (glm_points("39,39", split) for split in ("unsafe", "self-compute", "send-indices"))
    rows = {name: points.row(15) for name, points in (("unsafe", unsafe), ("own", own), ("sent", sent))}
    assert [(r.unsafe_layers, r.own_indexer_layers) for r in rows.values()] == [
        ((39, 40, 41), ()),
        ((), (39, 40, 41)),
        ((), ()),
    ]
    first, last = (
        [
            getattr(own.memory.stages[stage], name) - getattr(unsafe.memory.stages[stage], name)
            for name in ("weights", "kv")
        ]
        for stage in (0, 1)
    )
    assert first[0] == 0
    assert not first[1].any()
    # Replicated over tp: 4,096 x 2,048 in 8 bits with a float32 scale per block of 128 x 128, the rest in bfloat16.
    assert last[0] == 3 * (2048 * 4096 + 32 * 16 * 4 + 2 * (9_371_904 - 2048 * 4096))
    # 16 requests in each of two batches; 8,192 + 512 + 3 tokens in blocks of 64; 132 B a token and layer.
    assert last[1][15] == 2 * 16 * 137 * 64 * 3 * 132
    assert rows["own"].stages[0].slot_ms == rows["unsafe"].stages[0].slot_ms
    assert rows["own"].stages[1].slot_ms > rows["unsafe"].stages[1].slot_ms
    assert rows["own"].tpot_ms > rows["unsafe"].tpot_ms
    assert rows["sent"].stages[1].slot_ms > rows["unsafe"].stages[1].slot_ms
    assert [stage.weights for stage in sent.memory.stages] == [stage.weights for stage in unsafe.memory.stages]


@pytest.mark.parametrize("dcp", [1, 8])
def test_a_safe_partition_costs_the_same_whatever_is_asked(dcp: int) -> None:
    rows = {split: glm_points("42,36", split, dcp=dcp).row(7) for split in (None, *DsaSplit)}
    assert len(set(rows.values())) == 1
    assert rows[None].own_indexer_layers == rows[None].unsafe_layers == ()


def test_auto_stays_safe_unless_told_how_to_go_on() -> None:
    space = SearchSpace(tp=(8,), dp=(1,), ep=(1,), dcp=(1,), pp=(2, 3), batch_range=(8, 8))
    run = runner(model=GLM, num_devices=48, devices=("H200_SXM",), space=space, pp_layer_partition="auto")
    tried = [points.parallel.pp_layer_partition for points in run.evaluate().points]
    assert {len(partition) for partition in tried} == {2, 3}
    assert not any(unsafe_layers(partition, run.setting.model.indexer_layers) for partition in tried)


def test_weights_are_those_of_capacity() -> None:
    """GLM-5.3-W4A16 in 41,37 at TP 4 with three draft tokens: 50.243 GiB, and 50.178 with 17.8755 MiB for layer 41."""
    asks = {"model": "zai-org/GLM-5.3-W4A16", "tp_size": 4, "pp_size": 2, "num_mtp_tokens": 3}
    planner = CapacityPlanner(CapacityConfig.create(**asks, device="A800_80G_SXM", dsa_split="self-compute"))
    config = asked(
        model="zai-org/GLM-5.3-W4A16",
        devices=("A800_80G_SXM",),
        workload=Workload(4096, 512, 0, 3),
        dsa_split="self-compute",
    )
    factory = TracedCostsFactory(make_setting(config, "A800_80G_SXM"))
    parallel = ParallelConfig(tp_size=4, pp_size=2, pp_layer_partition=(41, 37))
    costs = factory.costs(parallel, BOTH)
    assert isinstance(costs, StagedCosts)
    weights = [stage.weight_bytes for stage in costs.stages]
    assert weights == [stage.weights for stage in planner.plan((41, 37)).stages]
    assert [round(size / 2**30, 3) for size in weights] == [50.243, 50.195]
    plain = replace(config, dsa_split="unsafe")
    without = TracedCostsFactory(make_setting(plain, "A800_80G_SXM")).costs(parallel, BOTH)
    assert isinstance(without, StagedCosts)
    assert weights[1] - without.stages[1].weight_bytes == 9_371_904 * 2


def test_stages_of_a_row() -> None:
    """The draft layer runs three times a step: 39 layers do the work of 42, and hold the others up."""
    row = glm_points("39,39", "self-compute").row(15)
    first, last = row.stages
    assert [(s.stage, s.layers, s.layer_equivalents) for s in row.stages] == [(0, 39, 39), (1, 39, 42)]
    assert last.slot_ms > first.slot_ms
    assert last.busy > first.busy
    assert row.pp_utilization == pytest.approx((first.busy + last.busy) / 2)
    # Two batches a cycle, which is a TPOT times 1 + 0.85 + 0.85^2 + 0.85^3 tokens; a slot is work and transfer.
    cycle = row.tpot_ms * (1 + 0.85 + 0.85**2 + 0.85**3)
    assert 2 * last.slot_ms >= last.busy * cycle
    assert first.busy == pytest.approx(2 * first.slot_ms / cycle)  # nothing is sent to the first stage
    assert json.loads(json.dumps(row.to_json()))["stages"][1]["layer_equivalents"] == 42


def test_one_stage_has_no_border() -> None:
    space = SearchSpace(tp=(8,), dp=(1,), ep=(1,), dcp=(1, 8), batch_range=(1, 16))
    rows = []
    for split in (None, *DsaSplit):
        run = runner(model=GLM, devices=("H200_SXM",), space=space, dsa_split=split, quantize_linear_action="FP8")
        rows.append(run.run()[0].candidates)
    assert rows[0]
    assert all(other == rows[0] for other in rows)


def test_own_indexers_under_dcp() -> None:
    """vllm splits their caches as well, and gathers the candidates of three more layers."""
    unsafe, own = (glm_points("39,39", split, dcp=8, mode=Mode.AGGREGATED) for split in ("unsafe", "self-compute"))
    more = own.memory.stages[1].kv[15] - unsafe.memory.stages[1].kv[15]
    # 8,707 tokens are 18 logical blocks of 512, of which a rank holds 64 tokens each.
    assert more == 2 * 16 * 18 * 64 * 3 * 132
    config = asked(
        model=GLM, devices=("H200_SXM",), num_devices=16, dsa_split="self-compute", pp_layer_partition="39,39"
    )
    factory = TracedCostsFactory(make_setting(config, "H200_SXM"))
    costs = factory.costs(ParallelConfig(tp_size=8, pp_size=2, dcp_size=8, pp_layer_partition=(39, 39)), BOTH)
    assert isinstance(costs, StagedCosts)
    # Of layers 0 to 38 eleven choose; of 39 to 77 nine, and now three more.
    assert [stage.gather.choosing_layers for stage in costs.stages] == [11 + 1, 9 + 3]  # type: ignore[union-attr]
    decode = costs.stages[1].decode
    assert decode is not None
    gathers = [op for op in decode.trace.ops if op.axis == "dcp" and op.module.endswith("indexer")]
    assert sum(op.repeat for op in gathers) == 12


@pytest.mark.parametrize("split", ["self-compute", "send-indices"])
@pytest.mark.parametrize(("length", "batch"), [(32_768, 16), (400_000, 1)])
def test_auto_weighs_what_helping_layers_costs(split: str, length: int, batch: int) -> None:
    """Every split of GLM over two stages searched on its own: none serves more than what auto finds.

    At the long context indexers decide: 38,40 with one more would lose to 40,38 with two if they cost nothing.
    """
    space = SearchSpace(tp=(8,), dp=(1,), ep=(1,), dcp=(1,), pp=(2,), batch_range=(batch, batch))
    values: dict[str, Any] = {
        "model": GLM,
        "num_devices": 16,
        "devices": ("H200_SXM",),
        "workload": Workload(length, 512, 0, 3),
        "space": space,
        "dsa_split": split,
    }
    (auto,) = runner(**values, pp_layer_partition="auto", quantize_linear_action="FP8").run()
    run = runner(**values, quantize_linear_action="FP8")
    grid = run._grid("aggregated")
    rates = {}
    for partition in all_partitions(78, 2):
        points = run._points("aggregated", ParallelConfig(tp_size=8, pp_size=2, pp_layer_partition=partition), *grid)
        rates[partition] = points.row(0).throughput_tok_s if points.memory.fits[0] else 0.0
    assert auto.candidates[0].throughput_tok_s == pytest.approx(max(rates.values()), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "summed", "grouped"),
    [
        # Every other layer has a window: 9 layers have 5 of one kind, as 10 do, and 8 have 4.
        ("openai/gpt-oss-120b", (9, 9, 9, 9), (8, 10, 10, 8)),
        # Every sixth has none; the others are dealt to six groups of up to 9, so 12 to 17 layers have 2 or 3 of a kind.
        ("google/gemma-3-27b-it", (11, 13, 13, 13, 12), (12, 13, 14, 14, 9)),
    ],
)
def test_auto_weighs_the_widest_group_of_a_stage(model: str, summed: tuple[int, ...], grouped: tuple[int, ...]) -> None:
    """A block costs what the widest group has on a stage, not a page of each layer: the split with most blocks."""
    stages = len(grouped)
    run = runner(model=model, num_devices=stages, space=SearchSpace(tp=(1,), dp=(1,), dcp=(1,), pp=(stages,)))
    layout = ParallelConfig(pp_size=stages)
    blocks = {}
    for partition in (summed, grouped):
        costs = run._costs.costs(replace(layout, pp_layer_partition=partition), BOTH)
        assert isinstance(costs, StagedCosts)
        blocks[partition] = min(
            (run.setting.available_bytes - stage.weight_bytes - stage.profile_bytes - stage.overhead_bytes)
            / stage.kv.block_bytes
            for stage in costs.stages
        )
    assert blocks[grouped] > 1.03 * blocks[summed]
    assert grouped in run._costs.partitions(layout, BOTH, run._grid("aggregated")[1])


def test_too_many_stages_are_a_rejection() -> None:
    (summary,) = runner(
        num_devices=128, space=SearchSpace(tp=(1,), dp=(1,), dcp=(1,), pp=(81,)), limits=(Limits(),)
    ).run()
    assert [r.rule for r in summary.rejections] == ["pp.layers"]
