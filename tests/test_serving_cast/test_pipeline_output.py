"""What rows and notes say of a pipeline: numbers that multiply to TPOT, and words about the row that is meant."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.inference import throughput_optimizer
from tensor_cast.performance_model.pipeline import CAUSES

LLAMA = ["meta-llama/Meta-Llama-3.1-70B", "--device", "H100_SXM", "--input-length", "4096", "--output-length", "512"]
GLM = [
    *("zai-org/GLM-5.3-W4A16", "--device", "A100_80G_PCIE", "--topology", "nvlink_pairs", "--num-devices", "8"),
    *("--dp-sizes", "1", "--ep-sizes", "1", "--dcp-sizes", "1", "--input-length", "4096", "--output-length", "1024"),
    *("--pp-sizes", "1,2", "--dsa-split", "self-compute"),
]


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    """Standard output and error of a search."""
    assert throughput_optimizer.main(list(argv)) == code
    found = capsys.readouterr()
    return found.out, found.err


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    return json.loads(printed(capsys, *argv, "--format", "json")[0])


PIPE = ("--num-devices", "8", "--tp-sizes", "4", "--pp-sizes", "2", "--dp-sizes", "1", "--dcp-sizes", "1")


@pytest.mark.parametrize("mode", [[], ["--disagg"]])
def test_numbers_of_a_row_multiply_to_its_tpot(capsys: pytest.CaptureFixture[str], mode: list[str]) -> None:
    """cycle * (1 - variation - return - fill) is what the batches in flight take of the slowest stage, one by one."""
    out = document(capsys, *LLAMA, *PIPE, *mode)
    rows = [row for row in out["candidates"] if row["tpot_ms"] is not None]
    assert rows
    for row in rows:
        idle = row["pp_idle"]
        assert tuple(idle) == CAUSES
        assert row["pp_utilization"] + sum(idle.values()) == pytest.approx(1)
        assert row["cycle_ms"] == pytest.approx(row["tpot_ms"])  # one token a step
        slowest = max(stage["slot_ms"] for stage in row["stages"])
        taken = row["cycle_ms"] * (1 - idle["variation"] - idle["return"] - idle["fill"])
        assert taken == pytest.approx(row["batches_in_flight"] * slowest)
        assert (idle["variation"] > 0.05) == (row["phase"] == "aggregated"), "only there some steps carry prompts"


def test_cycle_holds_the_tokens_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        *GLM,
        "--tp-sizes",
        "4,8",
        "--num-mtp-tokens",
        "3",
        "--pp-layer-partition",
        "41,37",
        "--batch-range",
        "8",
        "9",
    ]
    rows = {row["parallel"]: row for row in document(capsys, *argv)["candidates"]}
    tokens = 1 + 0.85 + 0.85**2 + 0.85**3
    assert rows["tp4pp2"]["cycle_ms"] == pytest.approx(rows["tp4pp2"]["tpot_ms"] * tokens)
    assert rows["tp8"]["cycle_ms"] is rows["tp8"]["pp_idle"] is None


def test_csv_has_the_causes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = document(capsys, *LLAMA, *PIPE)["candidates"]
    (cells,) = csv.DictReader(io.StringIO(printed(capsys, *LLAMA, *PIPE, "--format", "csv")[0]))
    assert json.loads(cells["pp_idle"]) == row["pp_idle"]
    assert float(cells["cycle_ms"]) == row["cycle_ms"]


def test_line_of_the_best_row_names_the_largest_causes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*LLAMA, *PIPE, "--batch-range", "4", "4"]
    best = document(capsys, *argv)["best"]
    (line,) = [line for line in printed(capsys, *argv)[0].splitlines() if line.startswith("its stages")]
    first, second = sorted(best["pp_idle"].items(), key=lambda cause: -cause[1])[:2]
    assert line.endswith(
        f"of a cycle of {best['cycle_ms']:,.2f} ms; idle for {first[0]} {first[1]:.0%}, {second[0]} {second[1]:.0%}"
    )
    assert first[0] == "variation"


def test_parts_of_memory_add_up_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, *LLAMA, *PIPE)[0].splitlines()
    head = next(line for line in lines if line.lstrip().startswith("parallel"))
    row = next(line for line in lines if line.lstrip().startswith("tp4pp2"))
    names = re.split(r"\s{3,}", head.strip())
    cells = dict(zip(names, re.split(r"\s{3,}", row.strip()), strict=True))
    parts = sum(float(cells[name]) for name in ("weights", "KV", "activ.", "other"))
    assert parts == pytest.approx(float(cells["total GiB"]), abs=0.12)  # one digit of two of them, two of the others


# -- notes -----------------------------------------------------------------------------------------------------------


def test_note_on_indexers_speaks_of_the_best_row(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*GLM, "--tp-sizes", "4,8", "--pp-layer-partition", "41,37", "--batch-range", "8", "8"]
    assert document(capsys, *argv)["message"] == (
        "layer 41 gets an indexer of its own, as --dsa-split self-compute asks"
    )


def test_note_on_wrong_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*GLM, "--tp-sizes", "4,8", "--pp-layer-partition", "41,37", "--batch-range", "8", "8"]
    assert document(capsys, *argv, "--dsa-split", "unsafe")["message"] == (
        "UNSAFE: layer 41 reads top-k indices that were never written on the stage; outputs are wrong, priced as "
        "--dsa-split unsafe asks"
    )


def test_note_on_indexers_names_a_row_that_is_not_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    """On 16 GPUs of two such machines 8 x 2 is beaten by two replicas; with --top 1 its row is not shown."""
    argv = [
        *GLM,
        "--num-devices",
        "16",
        "--tp-sizes",
        "8",
        "--pp-layer-partition",
        "39,39",
        "--batch-range",
        "16",
        "16",
    ]
    out = document(capsys, *argv)
    assert [row["parallel"] for row in out["candidates"]] == ["tp8", "tp8pp2"]
    assert out["message"] == (
        "in tp8pp2 with partition 39,39 layers 39,40,41 get an indexer of their own, as --dsa-split self-compute asks"
    )
    assert not document(capsys, *argv, "--top", "1")["message"]


def test_partition_auto_goes_with_sizes_of_which_one_is_no_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--num-devices", "8", "--tp-sizes", "4", "--dp-sizes", "1", "--dcp-sizes", "1")
    out = document(
        capsys, *LLAMA, *sizes, "--pp-sizes", "1,2", "--pp-layer-partition", "auto", "--batch-range", "8", "8"
    )
    assert {row["parallel"] for row in out["candidates"]} == {"tp4", "tp4pp2"}
    _, err = printed(capsys, *LLAMA, *sizes, "--pp-layer-partition", "auto", code=2)
    assert "--pp-layer-partition auto needs stages to divide the layers over; add --pp-sizes 2 or more" in err


def test_no_report_without_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.html"
    _, err = printed(capsys, *LLAMA, *PIPE, "--tpot-limit", "0.01", "--report", str(file), code=3)
    assert f"no report was written to {file}: nothing is feasible" in err
    assert not file.exists()


def test_requests_that_wait_longer_than_they_are_served(capsys: pytest.CaptureFixture[str]) -> None:
    """128 k prompts for 16 tokens each: by Little's law more requests wait than decode. A limit on TTFT is consent."""
    argv = [*LLAMA, *PIPE, "--input-length", "131000", "--output-length", "16", "--batch-range", "1", "1"]
    out = document(capsys, *argv)
    best = out["best"]
    assert best["ttft_ms"] > 16 * best["tpot_ms"]
    assert f"TTFT {best['ttft_ms'] / 1e3:.3g} s exceeds" in out["message"]
    assert not document(capsys, *argv, "--ttft-limit", "1e9")["message"]
    assert not document(capsys, *LLAMA, *PIPE)["message"]
