"""``msmodeling capacity``: the JSON contract, tables, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

LLAMA = ("capacity", "meta-llama/Llama-3.1-8B", "--device", "H100_SXM")


def test_json_of_one_stage(run: Run) -> None:
    result = run(*LLAMA, "--max-model-len", 8192, "--format", "json")
    assert result.code == 0, result.err
    document = result.json()
    (stage,) = document["stages"]
    # 8,030,261,248 parameters of two bytes; 32 layers * 8 heads * 256 elements * 2 B a token.
    assert stage["weights_gib"] == pytest.approx(8_030_261_248 * 2 / 2**30, rel=1e-6)
    assert (stage["bytes_per_token"], stage["bytes_per_block"]) == (131_072, 16 * 131_072)
    assert stage["kv_gib"] * 2**30 // stage["bytes_per_block"] == document["num_blocks"]
    assert document["kv_tokens"] == int(document["num_blocks"] / 512 * 8192)
    assert document["max_concurrency"] == document["num_blocks"] / 512
    assert (document["binding_stage"], document["unsafe_layers"]) == (0, [])
    # A published log (vLLM 0.19, H100, 0.95 of 79.19 GiB) leaves 58 to 62 GiB of 75.2 with 13 to 15 GiB of weights.
    assert 50 < stage["kv_gib"] < 58


def test_given_kv_memory(run: Run) -> None:
    document = run(
        "capacity", "meta-llama/Llama-3.1-70B", "--device", "H100_SXM", "--tp-size", 8, "--pp-size", 2,
        "--kv-memory-gib", "10,9", "--max-model-len", 131072, "--format", "json",
    ).json()  # fmt: skip
    assert (document["num_blocks"], document["kv_tokens"], document["binding_stage"]) == (29_491, 471_856, 1)
    assert [stage["num_blocks"] for stage in document["stages"]] == [32_768, 29_491]
    assert [stage["layers"] for stage in document["stages"]] == [40, 40]


def test_a_model_that_is_not_traced_needs_its_kv_memory(run: Run) -> None:
    asked = ("capacity", "Qwen/Qwen3-Next-80B-A3B-Instruct", "--device", "H200_SXM")
    refused = run(*asked)
    assert refused.code == 2
    assert "softmax attention" in refused.err
    document = run(*asked, "--kv-memory-gib", 40, "--format", "json").json()
    assert document["stages"][0]["weights_gib"] is None
    assert (document["num_blocks"], document["kv_tokens"]) == (3212, 1_736_095)
    assert run(*asked, "--kv-memory-gib", 40).code == 0


def test_tables_of_two_stages(run: Run) -> None:
    result = run(*LLAMA, "--pp-size", 2, "--pp-layer-partition", "auto", "--request-length", 4096)
    assert result.code == 0, result.err
    for words in (
        "KV cache size:",
        "Maximum concurrency for 131,072 tokens",
        "Partitions",
        "best",
        "engine's own",
        "16,16",
    ):
        assert words in result.out
    assert "resident in whole blocks" in result.out


def test_every_partition(run: Run) -> None:
    document = run(*LLAMA, "--pp-size", 2, "--pp-layer-partition", "all", "--format", "json").json()
    rows = document["partitions"]
    assert [row["partition"] for row in rows] == [[i, 32 - i] for i in range(1, 32)]
    best = max(rows, key=lambda row: row["num_blocks"])
    assert [row["partition"] for row in rows if "best" in row["note"]] == [best["partition"]]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--pp-size", 2, "--pp-layer-partition", "20,20"), 2, "stages that add up to the model's 32 layers"),
        (("--pp-size", 2, "--pp-layer-partition", "31.0,1"), 2, "need integers separated by commas"),
        (("--pp-size", 2, "--kv-memory-gib", "1,2,3"), 2, "one for each of 2 stages; found 3"),
        (("--pp-size", 2, "--kv-memory-gib", "1", "--pp-layer-partition", "auto"), 2, "--calibrate-from"),
        (("--pp-size", 8, "--pp-layer-partition", "all"), 2, "can be listed; ask for the best one"),
        (("--kv-cache-dtype", "fp8_ds_mla"), 2, "stores latents"),
        (("--gpu-memory-utilization", "1.5"), 2, "gpu_memory_utilization: input should be less than or equal to 1"),
        (("--gpu-memory-utilization", "0.1"), 3, "has no room for a KV cache"),
        (("--calibrate-from", "/nowhere"), 2, "cannot read"),
        (("--tp-size", 3), 2, "num_attention_heads % tp_size"),
    ],
)
def test_refusals(run: Run, options: tuple[object, ...], code: int, message: str) -> None:
    result = run(*LLAMA, *options)
    assert result.code == code
    assert message in result.err
    assert result.err.count("\n") == 1


def test_sparse_layers_across_a_border(run: Run) -> None:
    asked = (
        "capacity",
        "zai-org/GLM-5.3",
        "--device",
        "H200_SXM",
        "--tp-size",
        8,
        "--pp-size",
        2,
        "--kv-memory-gib",
        20,
    )
    refused = run(*asked, "--pp-layer-partition", "39,39")
    assert refused.code == 2
    for words in ("39, 40, 41", "42,36", "38,40", "--dsa-split self-compute", "send-indices", "unsafe"):
        assert words in refused.err
    assert "UNSAFE" in run(*asked, "--pp-layer-partition", "41,37", "--dsa-split", "unsafe").out
    safe = run(*asked, "--pp-layer-partition", "42,36", "--format", "json")
    assert safe.json()["unsafe_layers"] == []


def test_calibration_is_shown(run: Run, tmp_path: Path) -> None:
    numbers = tmp_path / "start.yaml"
    numbers.write_text(
        "total_gib: 79.19\ngpu_memory_utilization: 0.9\nmax_model_len: 8192\n"
        "stages: [{weights_gib: 14.99, non_torch_gib: 0.25, activation_gib: 1.2, kv_gib: 54.83}]\n"
    )
    asked = (*LLAMA, "--max-model-len", 8192, "--gpu-memory-utilization", "0.9", "--calibrate-from", numbers)
    assert "residual" in run(*asked).out
    document = run(*asked, "--format", "json").json()
    (stage,) = document["calibration"]
    # 14.958 GiB of weights, and rotary tables of 131,072 positions: 131,072 * 128 * 2 B.
    assert stage["residual_gib"] == pytest.approx(14.99 + 0.25 - 14.958 - 0.03125, abs=0.001)
    # The same layout comes out as it was measured.
    assert document["stages"][0]["kv_gib"] == pytest.approx(54.83, abs=1e-6)


def test_report(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "memory.html"
    assert run(*LLAMA, "--pp-size", 2, "--report", file).code == 0
    page = file.read_text()
    for words in ("KV capacity of", "16,16: this one", "budget:", "KV idle", "Partitions", "<svg"):
        assert words in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing is fetched
    failed = run(*LLAMA, "--report", tmp_path / "absent" / "memory.html")
    assert failed.code == 2
    assert "cannot write" in failed.err
