"""The command: options, output forms, exit codes, and what it imports."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving_fakes import FakeFactory

from cli.inference.throughput_optimizer import main
from serving_cast import parallel_runner
from serving_cast.service.utils import DISAGG_COLUMNS
from tensor_cast.errors import ConfigError

BASE = [
    "deepseek-ai/DeepSeek-V3",
    "--device",
    "H200_SXM",
    "--num-devices",
    "8",
    "--input-length",
    "2000",
    "--output-length",
    "500",
    "--ttft-limit",
    "2000",
    "--tpot-limit",
    "8",
]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("--disagg")``: the command with the base options, on fake prices."""
    monkeypatch.setattr(parallel_runner, "TracedCostsFactory", lambda setting: FakeFactory())

    def command(*options: str, base: list[str] = BASE) -> Result:
        try:
            code = main([*base, *options])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return command


def found(run: Run, *options: str) -> Any:
    result = run(*options, "--format", "json")
    assert result.code == 0, result.err
    return json.loads(result.out)


# -- JSON ------------------------------------------------------------------------------------------------------------

ROW_KEYS = [
    "phase",
    "device",
    "engine",
    "dcp_semantics",
    "tp",
    "pp",
    "dp",
    "ep",
    "moe_tp",
    "moe_dp",
    "replicas",
    "dcp",
    "parallel",
    "batch_size",
    "concurrency",
    "ttft_ms",
    "tpot_ms",
    "throughput_tok_s",
    "tok_s_per_device",
    "tok_s_per_user",
    "weights_gib",
    "kv_cache_size_gb",
    "activation_gib",
    "memory_total_gib",
    "coverage",
    "bound",
]


def test_json_has_the_documented_form(run: Run) -> None:
    document = found(run, "--dcp-sizes", "1,2,3")
    assert set(document) >= {"schema_version", "inputs", "best", "candidates", "pareto", "rejections"}
    assert document["schema_version"] == 1
    for row in [document["best"], *document["candidates"], *document["pareto"]]:
        assert set(row) >= set(ROW_KEYS)
        assert row["phase"] == "aggregated"
        assert row["device"] == "H200_SXM"
        assert row["engine"] == "vllm"
    assert document["best"] == document["candidates"][0]
    rates = [row["throughput_tok_s"] for row in document["candidates"]]
    assert rates == sorted(rates, reverse=True)
    for rejection in document["rejections"]:
        assert set(rejection) >= {"layout", "rule", "need", "have", "remedy"}
        assert set(rejection["layout"]) == {"tp", "pp", "dp", "ep", "moe_tp", "moe_dp", "dcp"}
    assert {r["layout"]["dcp"] for r in document["rejections"] if r["rule"] == "dcp.divides_tp"} == {2, 3}


def test_inputs_are_echoed(run: Run) -> None:
    inputs = found(run, "--dcp-sizes", "1", "--reserved-memory-gb", "2", "--prefix-cache-hit-rate", "0.25")["inputs"]
    assert inputs["model"] == "deepseek-ai/DeepSeek-V3"
    assert inputs["num_devices"] == 8
    assert inputs["input_length"] == 2000
    assert inputs["output_length"] == 500
    assert inputs["prefix_cache_hit_rate"] == 0.25
    assert inputs["dcp_sizes"] == [1]
    assert inputs["tp_sizes"] is None
    assert inputs["ttft_limit"] == 2000
    assert inputs["tpot_limit"] == 8
    assert inputs["reserved_memory_gb"] == 2
    assert inputs["dcp_semantics"] == "vllm"
    assert inputs["block_size"] == 64


@pytest.mark.parametrize("sizes", [["1,2,4"], ["1", "2", "4"], ["1,2", "4"], ["4", "2,1"], ["1, 2, 4"]])
def test_size_lists_take_commas_or_spaces(run: Run, sizes: list[str]) -> None:
    assert found(run, "--dcp-sizes", *sizes)["candidates"] == found(run, "--dcp-sizes", "1,2,4")["candidates"]


def test_several_scenarios(run: Run) -> None:
    document = found(run, "--device", "H200_SXM", "H100_SXM", "--tpot-limits", "6", "8")
    results = document["results"]
    assert document["schema_version"] == 1
    keys = [(r["inputs"]["device"], r["inputs"]["ttft_limit"], r["inputs"]["tpot_limit"]) for r in results]
    assert keys == [("H200_SXM", 2000, 6), ("H200_SXM", 2000, 8), ("H100_SXM", 2000, 6), ("H100_SXM", 2000, 8)]
    assert results[1]["best"] == found(run)["best"]


def test_devices_are_found_whatever_the_case(run: Run) -> None:
    assert found(run, "--device", "h200_sxm")["best"] == found(run)["best"]


def test_disaggregated(run: Run) -> None:
    best = found(run, "--disagg", "--dcp-sizes", "1,2")["best"]
    assert set(best) == {"prefill", "decode"}
    assert best["prefill"]["phase"] == "prefill"
    assert best["prefill"]["dcp"] == 1
    assert best["prefill"]["tpot_ms"] is None
    assert best["prefill"]["ttft_ms"] <= 2000
    assert best["decode"]["ttft_ms"] is None
    assert best["decode"]["tpot_ms"] <= 8


def test_ratio(run: Run) -> None:
    best = found(
        run,
        "--enable-optimize-prefill-decode-ratio",
        *("--prefill-devices-per-instance", "2", "--decode-devices-per-instance", "2", "--dcp-sizes", "1,2"),
    )["best"]
    assert set(best) >= {"prefill", "decode", "x", "y", "kv_transfer_ms"}
    assert 2 * best["x"] + 2 * best["y"] <= 8
    assert best["prefill"]["dcp"] == 1
    assert best["kv_transfer_ms"] > 0


def test_nothing_feasible(run: Run) -> None:
    result = run("--tpot-limit", "0.01", "--format", "json")
    assert result.code == 3
    document = json.loads(result.out)
    assert document["best"] is None
    assert document["candidates"] == []
    assert "nearest is" in result.err
    assert result.err.count("\n") == 1


def test_one_phase_without_a_layout(run: Run) -> None:
    result = run("--disagg", "--tpot-limit", "0.01", "--format", "json")
    assert result.code == 3
    best = json.loads(result.out)["best"]
    assert best["prefill"] is not None
    assert best["decode"] is None
    assert "decode: nearest is" in result.err


# -- table, CSV, files -----------------------------------------------------------------------------------------------


def test_csv(run: Run) -> None:
    result = run("--format", "csv")
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert tuple(rows[0])[: len(DISAGG_COLUMNS)] == DISAGG_COLUMNS
    best = found(run)["best"]
    assert rows[0]["parallel"] == best["parallel"]
    assert float(rows[0]["throughput_tok_s"]) == best["throughput_tok_s"]
    assert rows[0]["tpot_limit_ms"] == "8.0"
    assert [row["best"] for row in rows] == ["True"] + ["False"] * (len(rows) - 1)


def test_csv_of_the_ratio_names_the_pair(run: Run) -> None:
    options = ("--enable-optimize-prefill-decode-ratio", "--dcp-sizes", "1,2")
    rows = list(csv.DictReader(io.StringIO(run(*options, "--format", "csv").out)))
    best = found(run, *options)["best"]
    answer = [row for row in rows if row["best"] == "True"]
    assert [(row["phase"], row["instances"]) for row in answer] == [
        ("prefill", str(best["x"])),
        ("decode", str(best["y"])),
    ]
    assert {float(row["kv_transfer_ms"]) for row in answer} == {best["kv_transfer_ms"]}


def test_a_device_that_cannot_run_the_model_leaves_the_others_standing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without fp8 units, the checkpoint's own fp8 weights are refused; here the fake prices stand for the rest.
    class Refusing(FakeFactory):
        def prepare(self, wanted: Any) -> None:
            raise ConfigError("cannot compute in float8_e4m3fn")

    factories = iter([FakeFactory(), Refusing()])
    monkeypatch.setattr(parallel_runner, "TracedCostsFactory", lambda setting: next(factories))
    result = run("--device", "H200_SXM", "A100_80G_SXM", "--format", "json")
    assert result.code == 3
    first, second = json.loads(result.out)["results"]
    assert first["best"] is not None
    assert second["best"] is None
    assert second["message"] == result.err.strip()
    assert "A100_80G_SXM: cannot compute in float8_e4m3fn" in result.err


def test_one_device_that_cannot_run_the_model_is_bad_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeFactory, wanted: Any) -> None:
        raise ConfigError("cannot compute in float8_e4m3fn")

    monkeypatch.setattr(FakeFactory, "prepare", refuse)
    result = run("--format", "json")
    assert (result.code, result.out) == (2, "")
    assert result.err == "error: cannot compute in float8_e4m3fn\n"


@pytest.mark.parametrize("mode", [[], ["--disagg"], ["--enable-optimize-prefill-decode-ratio"]])
def test_table(run: Run, mode: list[str]) -> None:
    result = run("--dcp-sizes", "1", "2", "3", "--top", "2", *mode)
    assert result.code == 0
    assert "\x1b" not in result.out
    assert max(map(len, result.out.splitlines())) <= 170
    for text in ("deepseek-ai/DeepSeek-V3 on 8 x H200_SXM", "TTFT <= 2000 ms", "best", "Top candidates (2 of"):
        assert text in result.out
    for column in ("parallel", "dcp", "TTFT ms", "TPOT ms", "tok/s", "per device", "per user", "batch", "KV", "bound"):
        assert column in result.out
    assert "Pareto front" in result.out
    assert "dcp.divides_tp" in result.out
    assert "set tp_size to a" in result.out


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_narrow_terminals_lose_columns_not_digits(make_runner: Callable[..., Any], width: int) -> None:
    from rich.console import Console

    from serving_cast.service.summary_table import renderables

    summary = make_runner(num_devices=16).run()[0]
    text = io.StringIO()
    console = Console(file=text, width=width)
    tables = [item for item in renderables(summary, width) if hasattr(item, "columns")]
    console.print(tables[0])
    assert "…" not in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= width
    assert summary.candidates[0].parallel in text.getvalue()


def test_table_of_nothing(run: Run) -> None:
    result = run("--tpot-limit", "0.01")
    assert result.code == 3
    assert "nothing is feasible" in result.out
    assert "tpot.limit" in result.out


@pytest.mark.parametrize("style", ["table", "json", "csv"])
def test_output_file_equals_standard_output(run: Run, tmp_path: Path, style: str) -> None:
    target = tmp_path / "result.txt"
    result = run("--format", style, "--output", str(target))
    assert result.code == 0
    assert result.out == ""
    assert target.read_text() == run("--format", style).out
    assert [p.name for p in tmp_path.iterdir()] == ["result.txt"], "no temporary file is left"


def test_a_failed_run_leaves_the_old_file(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    assert run("--dcp-semantics", "nope", "--output", str(target)).code == 2
    assert target.read_text() == "old"


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-devices", "0"], "--num-devices must be an integer of at least 1, found 0"),
        (["--num-devices", "-8"], "--num-devices"),
        (["--num-devices", "eight"], "--num-devices takes an integer, found 'eight'"),
        (["--input-length", "1.5"], "--input-length takes an integer"),
        (["--output-length", "0"], "output length must be"),
        (["--tpot-limit", "0"], "TPOT limit must be a positive number"),
        (["--tpot-limit", "nan"], "TPOT limit must be"),
        (["--ttft-limit", "soon"], "--ttft-limit takes a number, found 'soon'"),
        (["--dcp-sizes", "1,x"], "--dcp-sizes takes an integer, found 'x'"),
        (["--dcp-sizes", ","], "--dcp-sizes needs at least one value"),
        (["--tp-sizes", "0"], "--tp-sizes must be"),
        (["--batch-range", "9", "3"], "--batch-range 9 3 is reversed"),
        (["--batch-range", "9"], "--batch-range takes the smallest and the largest batch"),
        (["--batch-range", "5000", "6000"], "vllm runs at most 1024 requests"),
        (["--max-concurrency", "0"], "--max-concurrency must be an integer of at least 1, found 0"),
        (["--max-concurrency", "many"], "--max-concurrency takes an integer, found 'many'"),
        (["--max-concurrency", "8", "--enable-optimize-prefill-decode-ratio"], "bound the batch of an instance"),
        (["--prefix-cache-hit-rate", "1.5"], "prefix cache hit rate must lie between 0 and 1"),
        (["--mtp-acceptance-rates", "0.9"], "1 MTP acceptance rates for 0 draft tokens"),
        (["--num-mtp-tokens", "1", "--mtp-acceptance-rates", "7"], "MTP acceptance rate must lie between 0 and 1"),
        (["--device", "H200_SXN"], "did you mean H200_SXM"),
        (["--engine", "vlm"], "unknown engine 'vlm'"),
        (["--dcp-semantics", "rcf"], "unknown DCP semantics 'rcf'"),
        (["--quantize-linear-action", "W3"], "unknown linear quantisation 'W3'"),
        (["--format", "xml"], "--format must be one of table, json, csv"),
        (["--prefill-devices-per-instance", "4"], "goes with --enable-optimize-prefill-decode-ratio"),
        (["--reserved-memory-gb", "-1"], "--reserved-memory-gb must be 0 or more"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--output", "/no/such/folder/x"], "cannot write /no/such/folder/x"),
    ],
)
def test_bad_values_are_one_line_and_exit_code_two(run: Run, options: list[str], message: str) -> None:
    result = run(*options)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


def test_missing_options(run: Run) -> None:
    result = run(base=["deepseek-ai/DeepSeek-V3"])
    assert result.code == 2
    assert "required" in result.err
    assert result.err.count("\n") == 1


def test_unknown_model_and_sparse_attention(run: Run) -> None:
    unknown = run(base=["deepseek-ai/DeepSeek-V4000", *BASE[1:]])
    assert unknown.code == 2
    assert "unknown model" in unknown.err
    assert unknown.err.count("\n") == 1


# -- processes -------------------------------------------------------------------------------------------------------


def _modules(*arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run the command in a process of its own; what it had imported at the end."""
    code = (
        "import sys\n"
        "from cli.inference.throughput_optimizer import main\n"
        "try:\n    status = main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    status = stop.code\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    return done, set(done.stderr.split())


def test_help_imports_nothing_heavy() -> None:
    done, modules = _modules("--help")
    assert done.returncode == 0
    assert "--dcp-sizes" in done.stdout
    assert not modules & {"numpy", "pydantic", "yaml", "rich", "networkx", "torch", "transformers", "sympy"}


def test_module_form() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli.inference.throughput_optimizer", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0
    assert "throughput_optimizer" in done.stdout


def test_warm_run_is_torch_free_and_reproducible() -> None:
    """The real thing on a small model: cold or warm, the same JSON; the second run imports no torch, nor rich."""
    options = "Qwen/Qwen3-8B --device H200_SXM --num-devices 2 --input-length 1000 --output-length 200 --format json"
    first, _ = _modules(*options.split())
    second, modules = _modules(*options.split())
    assert first.returncode == second.returncode == 0, second.stderr[-2000:]
    assert first.stdout == second.stdout
    assert not modules & {"torch", "transformers", "sympy", "rich", "networkx"}
    document = json.loads(second.stdout)
    assert {row["parallel"] for row in document["candidates"]} == {"tp1", "tp2"}
    assert document["best"]["coverage"] == 1.0
    jobs, _ = _modules(*options.split(), "--jobs", "2", "--device", "H200_SXM", "H100_SXM", "A100_80G_SXM")
    results = json.loads(jobs.stdout)["results"]
    assert results[0]["best"] == document["best"]
    assert [r["inputs"]["device"] for r in results] == ["H200_SXM", "H100_SXM", "A100_80G_SXM"]
