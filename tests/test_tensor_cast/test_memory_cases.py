"""The comparison with start-up logs: what is compared, in the logs' own terms, and which rows are named instead."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_cases
from benchmarks.memory_cases import UnusableRowError, compare

# Qwen3-30B-A3B on one H100 as vLLM 0.19 logged it.
ROW: dict[str, Any] = {
    "id": "a",
    "engine": "vllm",
    "engine_version": "0.19.0",
    "model": "Qwen/Qwen3-30B-A3B",
    "gpu": "H100 80GB",
    "gpu_mem_gib": 79.19,
    "tp": 1,
    "max_model_len": 8192,
    "gpu_memory_utilization": 0.95,
    "block_size": 16,
    "max_num_batched_tokens": 8192,
    "observed": {
        "weights_gib": 56.88,
        "kv_available_gib": 15.41,
        "kv_tokens": 168_288,
        "max_concurrency": 20.54,
        "activation_gib": 2.68,
        "non_torch_gib": 0.27,
    },
}


def test_a_whole_row() -> None:
    found = {c.quantity: c for c in compare(ROW, None)}
    assert set(found) == set(memory_cases.QUANTITIES)
    # 40,960 positions * 128 * 2 B of rotary tables go with the weights, two buffers of experts with the activations.
    assert found["weights"].ours == pytest.approx(56.871 + 40_960 * 256 / 2**30, abs=0.001)
    assert found["activation"].ours == pytest.approx(2.091 + 8192 * 8 * 4096 * 2 / 2**30, abs=0.001)
    assert found["non-torch"].ours == pytest.approx(0.25)
    assert found["KV tokens"].error == found["concurrency"].error == 0
    # That release did not subtract its graphs: 0.95 * 79.19 less weights, tables, buffers, activations and the rest.
    ours = 0.95 * 79.19 - found["weights"].ours - found["activation"].ours - 0.25
    assert found["KV memory"].ours == pytest.approx(ours, abs=0.01)
    later = {c.quantity: c for c in compare({**ROW, "engine_version": "0.30.0"}, None)}
    assert later["KV memory"].ours == pytest.approx(ours - 1.0, abs=0.01)


def test_tokens_that_do_not_follow_from_the_memory() -> None:
    wrong = {**ROW, "observed": {"kv_available_gib": 15.41, "kv_tokens": 170_000}}
    (tokens,) = (c for c in compare(wrong, None) if c.quantity == "KV tokens")
    assert tokens.error == pytest.approx(168_288 / 170_000 - 1, abs=1e-3)


def test_rows_that_say_too_little() -> None:
    for missing, words in (("model", "names no model"), ("tp", "how many ranks")):
        with pytest.raises(UnusableRowError, match=words):
            list(compare({**ROW, missing: None}, None))
    # Without a device only what does not depend on one.
    unplaced = {**ROW, "gpu": None, "gpu_mem_gib": None}
    assert {c.quantity for c in compare(unplaced, None)} == {"weights", "KV tokens", "concurrency"}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ROW, {**ROW, "id": "b", "model": "nobody/knows"}, {**ROW, "id": "c", "model": None}]
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(sys, "argv", ["memory_cases", str(file)])
    assert memory_cases.main() == 0
    out = capsys.readouterr().out
    assert "not run: b nobody/knows: no config of that name" in out
    assert "not run: c no model: the log names no model" in out
    assert [line.split()[0] for line in out.splitlines()[-6:]] == [name.split()[0] for name in memory_cases.QUANTITIES]
    file.write_text("no json")
    with pytest.raises(SystemExit, match="one JSON object a line"):
        memory_cases.main()
